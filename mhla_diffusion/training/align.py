"""The stage before fine-tuning: each new MHLA layer is fitted to the output of the layer that it replaces.

The model runs once per batch as it was before the retrofit (every layer sees what it saw in pretraining), and each new
layer tries to say what its predecessor says of the same input. A layer's gradient is taken on the spot, so that no more
than one attention layer is ever kept for a backward pass, and nothing flows from one layer to another.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..backbones.family import Family, Objective
from ..errors import UserError
from ..processor import MHLAProcessor
from ..randomness import sample_generator
from .checkpoints import disk_errors, load_checkpoint, on_main_process, save_checkpoint
from .config import TrainConfig, config_to_dict
from .data import read_batches
from .encoding import Encoder
from .learning import parameter_groups
from .metrics import MetricLog, peak_memory_gib
from .run_folder import interrupted_state
from .stage import agreed, batch_plan, check_same_data, progress_bar


def align_layers(
    config: TrainConfig,
    family: Family,
    model: nn.Module,
    objective: Objective,
    encoder: Encoder,
    accelerator: Accelerator,
    resume: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Fit the MHLA layers of `model` for `config.train.align_steps` steps; whether all of them were done.

    Only weights of MHLA layers that learn in fine-tuning (`train.trainable`) change. Batches, noise and timesteps are
    drawn as in fine-tuning, from numbers of their own. Metrics are named align/… and count steps up to 0, where
    fine-tuning starts. `align/layer_NN` is the layer's squared error in relation to its target's square.

    Args:
        model: freshly retrofitted, on its device, neither compiled nor wrapped nor with gradient checkpointing.
        resume: go on from what an interrupted stage of this run has saved.
        stopping: asked after every step whether to save and leave.

    Raises:
        UserError: when a loss is not finite, or the data are not those of the saved state.
    """
    options, last, source = config.train, config.train.align_steps, encoder.source
    folder = Path(config.output_dir)
    seed = sample_generator(options.seed, "align").initial_seed()
    layers = mhla_layers(family, model)
    learned = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    model.requires_grad_(False).eval()
    for attn in layers.values():
        for parameter in attn.parameters():
            parameter.requires_grad_(id(parameter) in learned)
    teachers = {name: teacher_of(attn, family) for name, attn in layers.items()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A layer by itself takes larger steps than a model does.
    highest_rate = 10 * options.lr if options.align_lr is None else options.align_lr
    adam = torch.optim.AdamW(
        parameter_groups(model, dataclasses.replace(options, lr=highest_rate, weight_decay=0.0)),
        betas=(options.beta1, options.beta2),
    )
    learning_rates = [group["lr"] for group in adam.param_groups]
    scaler = torch.amp.GradScaler(accelerator.device.type, enabled=options.mixed_precision == "fp16")

    step, window = 0, []
    state_folder = interrupted_state(folder)
    if resume and state_folder.is_dir():
        state = load_checkpoint(state_folder, model, adam, None)
        check_same_data(config, source, state["data"])
        step, window = state["step"], state["window"]
        scaler.load_state_dict(state["scaler"])
        accelerator.print(f"going on with the alignment from step {step}")

    plan = batch_plan(source, options, accelerator, seed, step, last)
    unwritable = (folder / "checkpoints", f"{folder} cannot be written")
    with disk_errors(*unwritable):
        log = MetricLog(folder, config.logging, step - last, config_to_dict(config), accelerator.is_main_process)
    batches = read_batches(source, plan, seed, config.data.num_workers)
    progress = progress_bar(config, accelerator, step, last, "alignment")

    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums.get(name, 0) + value.detach().float() / options.gradient_accumulation

    def fit(name: str, output: Tensor, target: Tensor) -> None:
        loss = relative_error(output, target).mean()
        with torch.autocast(accelerator.device.type, enabled=False):
            scaler.scale(loss / options.gradient_accumulation).backward()
        add(f"align/{name}", loss)

    clock, stopped = (step, time.perf_counter()), False
    with (
        disk_errors(*unwritable),
        contextlib.closing(log),
        contextlib.closing(batches),
        progress,
    ):
        while step < last and not stopped:
            step += 1
            sums.clear()
            for _ in range(options.gradient_accumulation):
                inputs = encoder.inputs(next(batches), model, objective, seed)
                with accelerator.autocast(), fitting(layers, teachers, fit):
                    add("align/teacher_loss", objective.loss(model, inputs)["loss"].mean())

            means, stopped = agreed(accelerator, sums, stopping())
            window.append(means)
            broken = [name for name, value in window[-1].items() if not math.isfinite(value)]
            if broken:
                raise UserError(
                    f"the alignment stopped at step {step} of {last} because {broken[0]} is not finite; a lower "
                    "train.align_lr or train.mixed_precision=no may help"
                )

            for parameter in learning:
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
            scaler.unscale_(adam)
            for attn in layers.values():  # each for itself, so that no layer's step depends on another's
                nn.utils.clip_grad_norm_(attn.parameters(), options.max_grad_norm or math.inf)
            factor = rate_factor(step, last)
            for group, rate in zip(adam.param_groups, learning_rates, strict=True):
                group["lr"] = rate * factor
            scaler.step(adam)
            scaler.update()
            adam.zero_grad(set_to_none=True)
            model.clip_mixing_()
            progress.update()

            if step == last or step % config.logging.every == 0:
                seen = {name: sum(row[name] for row in window) / len(window) for name in window[0]}
                seen["align/loss"] = sum(seen[f"align/{name}"] for name in layers) / len(layers)
                seen["align/lr"] = highest_rate * factor
                seen["align/steps_per_second"] = (step - clock[0]) / (time.perf_counter() - clock[1])
                seen["align/memory_gib"] = peak_memory_gib(accelerator.device)
                window, clock = [], (step, time.perf_counter())
                progress.set_postfix(loss=f"{seen['align/loss']:.4f}", refresh=False)
                on_main_process(accelerator, lambda step=step, seen=seen: log.numbers(step - last, seen))
            if stopped or (config.checkpoint.every and step % config.checkpoint.every == 0 and step < last):
                state = {"step": step, "window": window, "data": source.fingerprint, "scaler": scaler.state_dict()}
                save_checkpoint(state_folder, accelerator, model, adam, None, state)

    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learned)
    return step == last and not stopped


def mhla_layers(family: Family, model: nn.Module) -> dict[str, nn.Module]:
    """The self-attention layers that have MHLA, by name ("layer_00", …)."""
    attention = [block.attn1 for block in family.blocks_of(model)]
    return {f"layer_{i:02d}": attn for i, attn in enumerate(attention) if isinstance(attn.processor, MHLAProcessor)}


def teacher_of(attn: nn.Module, family: Family) -> nn.Module:
    """`attn` as it was before the retrofit: the family's own attention, with copies of the weights that learn."""
    shared = {id(parameter): parameter for parameter in attn.parameters() if not parameter.requires_grad}
    teacher = copy.deepcopy(attn, shared)
    teacher.set_processor(family.own_processor())
    return teacher.requires_grad_(False)


@contextlib.contextmanager
def fitting(
    layers: dict[str, nn.Module], teachers: dict[str, nn.Module], fit: Callable[[str, Tensor, Tensor], None]
) -> Iterator[None]:
    """While the block lasts, each layer gives `fit` its name, its output and its teacher's, and returns the latter.

    Where nothing but the layers learns, the model so computes what it did before the retrofit and no graph leaves a
    layer: `fit` is where the layer's backward pass belongs.
    """

    def hook(name: str, teacher: nn.Module) -> Callable[..., Tensor]:
        def compare(attn: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(*args, **kwargs)
            fit(name, output, target)
            return target

        return compare

    with contextlib.ExitStack() as hooks:
        for name, attn in layers.items():
            handle = attn.register_forward_hook(hook(name, teachers[name]), with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def rate_factor(step: int, last: int) -> float:
    """Learning rate of a step (1 to `last`), 1 at its highest: a rise over a tenth of the steps, then half a cosine."""
    rise = max(1, last // 10)
    return min(1.0, step / rise) * (1 + math.cos(math.pi * max(0, step - rise) / (last - rise + 1))) / 2


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error of (B, N, C) outputs in relation to the target's square, (B,) float32: 1 for an output of zeros."""
    output, target = output.float().flatten(1), target.float().flatten(1)
    tiny = torch.finfo(torch.float32).tiny
    return (output - target).square().sum(1) / target.square().sum(1).clamp_min(tiny)
