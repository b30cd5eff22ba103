"""Whole transformers and single blocks with random weights, their own attention beside linear attention and MHLA."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import FAMILIES
from ..backbones.family import Family
from ..errors import UserError, nearest
from ..processor import MHLAConfig, MHLAProcessor
from .measure import Call, synchronize
from .operators import check_dtype

SCOPES = ("block", "model")
MIXED_PRECISION = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelCase:
    """A model of a preset at one size, or its first block fed as the model feeds it; its attention is the candidate.

    Raises:
        UserError: naming the field and what it accepts.
    """

    preset: str  # of any family: "DiT-XL/2", "SANA-0.6B", "Wan2.1-1.3B", …
    size: tuple[int, ...]  # pixels: (height, width) or one number for a square; video: (frames, height, width)
    scope: str = "model"  # or "block"
    step: bool = False  # a training step (forward, backward, clipping, AdamW) in place of a forward pass
    gradient_checkpointing: bool = False
    batch: int = 1
    dtype: str = "float32"  # of weights and inputs
    mixed_precision: str = "no"  # as train.mixed_precision: autocast over weights in `dtype`
    device: str = "cpu"
    mhla: dict[str, Any] = field(default_factory=dict)  # MHLAConfig fields over the family's defaults
    overrides: dict[str, Any] = field(default_factory=dict)  # arguments of the model class over the preset's

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", tuple(self.size))
        if self.scope not in SCOPES:
            raise UserError(f"scope={self.scope!r} must be one of {', '.join(SCOPES)}.")
        if self.batch < 1:
            raise UserError(f"batch={self.batch} must be 1 or more.")
        if self.mixed_precision not in MIXED_PRECISION:
            raise UserError(f"mixed_precision={self.mixed_precision!r} must be one of {', '.join(MIXED_PRECISION)}.")
        if self.gradient_checkpointing and (self.scope == "block" or not self.step):
            raise UserError("gradient_checkpointing is for training steps of whole models: scope='model', step=True.")
        check_dtype(self.dtype)
        for name, value in self.overrides.items():
            if type(value) is type(self.family.presets[self.preset].get(name)) is int and value < 1:
                raise UserError(f"overrides: {name}={value} must be 1 or more.")
        self._latent_shape()
        MHLAConfig.from_dict({**self.family.default_config.to_dict(), **self.mhla})

    @property
    def family(self) -> Family:
        for family in FAMILIES.values():
            if self.preset in family.presets:
                return family
        known = [preset for family in FAMILIES.values() for preset in family.presets]
        raise UserError(f"preset={self.preset!r} is unknown{nearest(self.preset, known)}; known: {', '.join(known)}.")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the model class; a single block is taken out of a model of one layer."""
        layers = {"num_layers": 1} if self.scope == "block" else {}
        return {**self.family.presets[self.preset], **self.overrides, **layers}

    @property
    def own_attention(self) -> str:
        """What the candidate with the family's own attention is called."""
        return "softmax" if self.family.trained_with_softmax else "stock"

    @property
    def num_tokens(self) -> int:
        lengths, patch = self._latent_shape()[2:], self.arguments["patch_size"]
        return math.prod(lengths) // (patch ** len(lengths) if isinstance(patch, int) else math.prod(patch))

    def _latent_shape(self) -> tuple[int, ...]:
        try:
            with torch.device("meta"):
                return tuple(self.family.example(self.arguments, self.size).latents.shape)
        except (ArithmeticError, TypeError) as error:
            raise UserError(f"overrides={self.overrides} does not suit {self.preset}: {error}") from None

    @property
    def label(self) -> str:
        what = [f"{self.preset}{' block' if self.scope == 'block' else ''}", "×".join(map(str, self.size))]
        what += [f"batch {self.batch}"] if self.batch > 1 else []
        what += ["training step" if self.step else "forward"]
        what += ["gradient checkpointing"] if self.gradient_checkpointing else []
        what += [self.dtype] if self.dtype != "float32" else []
        what += [f"mixed precision {self.mixed_precision}"] if self.mixed_precision != "no" else []
        what += [f"{name}={value}" for name, value in {**self.mhla, **self.overrides}.items()]
        return ", ".join(what)


def candidates(case: ModelCase) -> list[str]:
    """The attention that a case can be measured with: the family's own, vanilla linear, MHLA, and the hybrid."""
    hybrid = case.scope == "model" and bool(case.family.hybrid_layers(case.arguments["num_layers"]))
    return [case.own_attention, "linear", "mhla"] + ["hybrid"] * hybrid


@dataclass
class PreparedModel:
    """One model whose attention can be exchanged."""

    calls: dict[str, Call]
    weights: int  # bytes of the parameters and buffers of the largest candidate
    profile: Callable[[str], dict[str, float]]  # of a forward pass with a candidate: see `attention_seconds`


def prepare(case: ModelCase, names: Sequence[str]) -> PreparedModel:
    """A model with random weights and a call of it for each of the named kinds of attention.

    All kinds share the model's other weights, and its optimiser, so that a model is in memory once.
    """
    torch.manual_seed(0)
    family, dtype = case.family, getattr(torch, case.dtype)
    example = family.example(case.arguments, case.size, case.batch)
    with default_dtype(dtype):  # a float32 copy of a large model would not fit where its bfloat16 weights do
        try:
            model = family.build_model(case.preset, **{**case.arguments, **example.arguments})
        except (ArithmeticError, TypeError) as error:
            raise UserError(f"overrides={case.overrides} does not suit {case.preset}: {error}") from None
    if not family.blocks_of(model):
        raise UserError(f"overrides={case.overrides} leaves a {case.preset} without layers.")
    model = _cast_(model, dtype).to(case.device).train(case.step)
    if case.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    objective = family.objective()
    objective.prepare_model(model)

    processors = {name: _processors(model, family, case, name) for name in names}
    generators = [torch.Generator().manual_seed(i) for i in range(case.batch)]
    latents = example.latents.to(case.device, dtype)
    conditions = {
        name: value.to(case.device, dtype if value.is_floating_point() else None)
        for name, value in example.conditions.items()
    }
    inputs = objective.prepare(model, latents, conditions, generators)
    module = model if case.scope == "model" else family.blocks_of(model)[0]

    def choose(name: str) -> None:
        model.set_attn_processor(dict(processors[name]))

    # What the module is called with may depend on the attention.
    given = {}
    for name in names:
        choose(name)
        given[name] = _arguments_of(module, lambda: objective.loss(model, inputs))

    precision = MIXED_PRECISION[case.mixed_precision]
    autocast = partial(torch.autocast, torch.device(case.device).type, dtype=precision, enabled=precision is not None)

    def forward(name: str) -> Tensor:
        args, kwargs = given[name]
        with torch.no_grad(), autocast():
            return module(*args, **kwargs)

    def loss(name: str) -> Tensor:
        if case.scope == "model":
            return objective.loss(model, inputs)["loss"].mean()
        args, kwargs = given[name]
        return module(*args, **kwargs).float().square().mean()

    parameters = {}  # of all candidates; those that a step does not use get no gradient and no optimiser state
    sizes = []
    for name in names:
        choose(name)
        parameters |= {id(p): p for p in module.parameters() if p.requires_grad}
        sizes.append(sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers())))
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4)

    def step(name: str) -> None:
        with autocast():
            value = loss(name)
        value.backward()
        torch.nn.utils.clip_grad_norm_([p for p in parameters.values() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.clip_mixing_()

    def profile(name: str) -> dict[str, float]:
        choose(name)
        layers = [block.attn1 for block in family.blocks_of(model)]
        with attention_seconds(layers, case.device) as seconds:
            synchronize(case.device)
            start = time.perf_counter()
            forward(name)
            synchronize(case.device)
            return {"total": time.perf_counter() - start, **seconds}

    run = step if case.step else forward
    calls = {name: Call(partial(run, name), partial(choose, name)) for name in names}
    return PreparedModel(calls, max(sizes), profile)


@contextlib.contextmanager
def attention_seconds(layers: Sequence[nn.Module], device: str) -> Iterator[dict[str, float]]:
    """Seconds spent in self-attention layers: "attention" in all, "core" without their linear projections."""
    seconds = {"attention": 0.0, "core": 0.0}
    starts: list[float] = []
    handles = []

    def enter(*_: Any) -> None:
        synchronize(device)
        starts.append(time.perf_counter())

    def leave(names: Mapping[str, int], *_: Any) -> None:
        synchronize(device)
        elapsed = time.perf_counter() - starts.pop()
        for name, sign in names.items():
            seconds[name] += sign * elapsed

    def watch(module: nn.Module, names: Mapping[str, int]) -> None:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(partial(leave, names)))

    for attn in layers:
        inside = set(attn.processor.modules()) if isinstance(attn.processor, nn.Module) else set()
        watch(attn, {"attention": 1, "core": 1})
        for module in attn.modules():
            if isinstance(module, nn.Linear) and module not in inside:
                watch(module, {"core": -1})
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As diffusers loads a model in a dtype: some modules stay in float32, and so do tables that are no weights."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, weight in model.named_parameters():
        weight.data = weight.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
    return model


class _Called(Exception):
    """Carries what a module was called with."""


def _arguments_of(module: nn.Module, run: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `run` calls `module` with; the call itself does not happen."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Called(args, kwargs)

    # First of all hooks: the module's own ones shall see the same arguments later.
    handle = module.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad():
            run()
    except _Called as called:
        return called.args
    finally:
        handle.remove()
    raise RuntimeError(f"{type(module).__name__} was not called")


def _processors(model: nn.Module, family: Family, case: ModelCase, name: str) -> dict[str, Any]:
    """The attention processors of one candidate, as `set_attn_processor` takes them; the model keeps its own."""
    own = dict(model.attn_processors)
    if name == case.own_attention:
        return own
    fields = {"mhla": case.mhla, "hybrid": {**case.mhla, "layers": "hybrid"}}
    fields["linear"] = {"cpe": False, **case.mhla, "blocks": family.linear_blocks, "learn_mixing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the model must be fine-tuned
        model.set_attn_processor(MHLAProcessor(**fields[name]))
    result = dict(model.attn_processors)
    model.set_attn_processor(own)
    return result
