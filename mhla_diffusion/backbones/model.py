"""What every MHLA model adds to its diffusers base: processors from the config, setting them, and loading strictly."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import UserError
from ..layout import choose_blocks
from ..mixing import BlockMixing
from ..processor import MHLAConfig, MHLAProcessor, check_processor
from .family import Family

PROCESSOR_KEY = ".processor."


class MHLAModelMixin:
    """Mixed into a subclass of a diffusers transformer, before the base class. Needs `family`."""

    family: ClassVar[Family]

    @property
    def mhla_config(self) -> MHLAConfig | None:
        """The MHLA config of this model, None while it has its family's own attention."""
        fields = self.config.mhla
        return None if fields is None else MHLAConfig.from_dict(fields)

    @classmethod
    def from_base(cls, base: nn.Module, config: MHLAConfig | None = None) -> nn.Module:
        """An MHLA model with the weights of a stock diffusers transformer, which is left as it was.

        Args:
            base: a model of the family's diffusers class.
            config: None for the family's defaults.
        """
        return convert_(copy.deepcopy(base), cls.family, MHLAProcessor(config))

    def set_attn_processor(self, processor: Any) -> None:
        """Set attention processors, as on any diffusers model.

        An `MHLAProcessor` is bound to every self-attention layer its config names, except where the layer has exactly
        this MHLA already; the other self-attention layers get the family's own attention (back), and cross-attention
        is left alone. Anything else (a stock processor, a dict of processors) goes where diffusers puts it.

        Warns where the model's output becomes another than before (softmax attention replaced: noise until fine-tuned).
        """
        check_processor(processor)
        if isinstance(processor, MHLAProcessor):
            before = self.mhla_config
            self._set_mhla(processor)
            warning = self.family.retrofit_warning(self.mhla_config) if before is None else _replaced(before, self)
            if warning is not None:
                _warn_caller(warning)
            return
        if isinstance(processor, dict):
            _check_processors(processor)
        super().set_attn_processor(processor)
        bound = [i for i, attn in enumerate(self._self_attention()) if isinstance(attn.processor, MHLAProcessor)]
        if not bound:
            self.register_to_config(mhla=None)
            return
        self._hook_grids()
        config = self._self_attention()[bound[0]].processor.config
        layers = "all" if len(bound) == len(self._self_attention()) else tuple(bound)
        self.register_to_config(mhla=dataclasses.replace(config, layers=layers).to_dict())

    def mixings(self) -> Iterator[BlockMixing]:
        """The block mixings of all MHLA layers, first layer first."""
        for attn in self._self_attention():
            if isinstance(attn.processor, MHLAProcessor):
                yield attn.processor.mixing

    def mixing_parameters(self) -> list[nn.Parameter]:
        """All mixing weights: they take no weight decay and are clipped after every optimiser step."""
        return [weight for mixing in self.mixings() for weight in mixing.weights]

    def clip_mixing_(self) -> None:
        """Clip all mixing weights to [0, 1] in place."""
        for mixing in self.mixings():
            mixing.clip_()

    def resize_blocks_(self, blocks: tuple[int, ...]) -> None:
        """Give every MHLA layer other block counts, its mixing interpolated between block centres, in place."""
        config = dataclasses.replace(self.mhla_config or self.family.default_config, blocks=blocks)
        for attn in self._self_attention():
            if isinstance(attn.processor, MHLAProcessor):
                attn.processor.mixing = attn.processor.mixing.resized(config.blocks)
                attn.processor.config = dataclasses.replace(attn.processor.config, blocks=config.blocks)
        if self.mhla_config is not None:
            self.register_to_config(mhla=config.to_dict())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As diffusers' `from_pretrained`, but MHLA weights that are missing or unknown are an error."""
        wants_info = kwargs.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, output_loading_info=True, **kwargs)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, UserError) or PROCESSOR_KEY not in str(error):
                raise
            # diffusers would advise to ignore the sizes, which replaces trained MHLA weights by fresh ones.
            raise UserError(
                f"the MHLA weights at {pretrained_model_name_or_path} are of other sizes than its config.json says "
                "(blocks, mixing or feature_map); restore the config that was saved with them."
            ) from error
        missing = [key for key in info["missing_keys"] if PROCESSOR_KEY in key]
        unexpected = [key for key in info["unexpected_keys"] if PROCESSOR_KEY in key]
        if missing:
            raise UserError(
                f"the checkpoint at {pretrained_model_name_or_path} lacks {len(missing)} MHLA weights that its config "
                f"asks for, such as {min(missing)}; load the original model and retrofit it with set_attn_processor."
            )
        if unexpected:
            raise UserError(
                f"the checkpoint at {pretrained_model_name_or_path} holds {len(unexpected)} MHLA weights that its "
                f"config has no place for, such as {min(unexpected)}; its config.json does not belong to these weights."
            )
        _align_(model)
        return (model, info) if wants_info else model

    def _self_attention(self) -> list[nn.Module]:
        return [block.attn1 for block in self.family.blocks_of(self)]

    def _init_mhla(self, fields: Mapping[str, Any] | MHLAConfig | None) -> None:
        """Bind the processors that the config describes: the last thing a subclass's __init__ does."""
        if fields is not None:
            config = fields if isinstance(fields, MHLAConfig) else MHLAConfig.from_dict(fields)
            self._set_mhla(MHLAProcessor(config))

    def _set_mhla(self, description: MHLAProcessor) -> None:
        config = description.resolve(self.family.default_config)
        if config.blocks is None:
            config = dataclasses.replace(config, blocks=choose_blocks(self.family.usual_grid(self)))
        axes = len(self.family.linear_blocks)
        if len(config.blocks) != axes:
            raise UserError(
                f"blocks={config.blocks} has {len(config.blocks)} axes, but {type(self).__name__} needs {axes} counts."
            )
        blocks = self.family.blocks_of(self)
        layers = config.layer_indices(len(blocks), self.family.hybrid_layers(len(blocks)))
        self._hook_grids()
        for index, block in enumerate(blocks):
            if index in layers:
                if not _same_attention(block.attn1.processor, config):
                    block.attn1.set_processor(MHLAProcessor.for_layer(block.attn1, config))
            elif isinstance(block.attn1.processor, MHLAProcessor):
                block.attn1.set_processor(self.family.own_processor())
        self.register_to_config(mhla=config.to_dict())

    def _hook_grids(self) -> None:
        """Have the family tell every block's MHLA processor, if it has one, its grid at every call."""
        for block in self.family.blocks_of(self):
            if not any(hook is self.family.tell_grid for hook in block._forward_pre_hooks.values()):
                block.register_forward_pre_hook(self.family.tell_grid, with_kwargs=True)


def convert_(model: nn.Module, family: Family, processor: MHLAProcessor) -> nn.Module:
    """Turn a stock diffusers transformer into its MHLA class in place (no weight is copied) and set `processor`.

    A processor that does not suit the model is an error that leaves the model as it was.
    """
    if not isinstance(model, MHLAModelMixin):
        if type(model) is not family.base_class:
            raise UserError(f"a {type(model).__name__} cannot be retrofitted; expected {family.base_class.__name__}.")
        stock_config = model._internal_dict
        model.__class__ = family.model_class
        try:
            model.register_to_config(mhla=None, **family.model_defaults())
            model.set_attn_processor(processor)
        except Exception:
            model.__class__, model._internal_dict = family.base_class, stock_config
            raise
        return model
    model.set_attn_processor(processor)
    return model


def _same_attention(processor: Any, config: MHLAConfig) -> bool:
    """Whether `processor` is MHLA that does what `config` says, in whichever layers."""
    return (
        isinstance(processor, MHLAProcessor)
        and dataclasses.replace(processor.config, layers=config.layers, spacing=config.spacing) == config
    )


def _replaced(before: MHLAConfig, model: MHLAModelMixin) -> str | None:
    """What to say when a model's MHLA gave way to another with fresh weights."""
    after = model.mhla_config
    changed = [
        field.name
        for field in dataclasses.fields(after)
        if field.name not in ("layers", "spacing") and getattr(before, field.name) != getattr(after, field.name)
    ]
    if not changed:
        return None
    return (
        f"this model already had MHLA; its weights are replaced by fresh ones, because {', '.join(changed)} "
        f"{'differs' if len(changed) == 1 else 'differ'} from its config."
    )


def _check_processors(processors: Mapping[str, Any]) -> None:
    """That a dict of processors gives a model one MHLA config, with weights."""
    mhla = [processor for processor in processors.values() if isinstance(processor, MHLAProcessor)]
    if any(not processor.is_bound for processor in mhla):
        raise UserError(
            "the dict of processors holds an MHLAProcessor without weights; set MHLAProcessor(layers=[…]) itself on "
            "the model, which makes one with weights per layer."
        )
    if any(not _same_attention(processor, mhla[0].config) for processor in mhla):
        raise UserError("the dict of processors holds MHLAProcessors of different configs; a model has one.")


def _warn_caller(message: str) -> None:
    """Warn at the line of the first caller outside this library."""
    frame, level, library = inspect.currentframe(), 1, __name__.partition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == library:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states a block is called with, by position or name."""
    return args[0] if args else kwargs["hidden_states"]


def _align_(model: nn.Module) -> None:
    """Copy CPU weights that a file left at odd addresses: MKL's sums depend on alignment, in their last bits."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
