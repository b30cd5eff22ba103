"""Put MHLA into a stock diffusers pipeline or transformer."""

from __future__ import annotations

from typing import Any, TypeVar

from diffusers import DiffusionPipeline
from torch import nn

from .backbones import family_of
from .backbones.model import convert_
from .errors import UserError
from .processor import MHLAConfig, MHLAProcessor

T = TypeVar("T", bound=Any)


def apply_mhla(target: T, config: MHLAConfig | None = None) -> T:
    """Replace the self-attention of a pipeline or transformer by MHLA, in place, and return it.

    No weight is copied: the object becomes the family's MHLA class and keeps its weights, device and dtype.

    Args:
        target: a diffusers pipeline with a `transformer`, or the transformer itself, stock or already with MHLA.
        config: which layers, and how; None for the family's defaults.

    Raises:
        UserError: when the transformer is of no known family, or the config does not suit it.
    """
    if config is not None and not isinstance(config, MHLAConfig):
        raise UserError(f"config={config!r} must be an MHLAConfig or None.")
    return retrofit(target, MHLAProcessor(config))


def retrofit(target: T, processor: MHLAProcessor) -> T:
    """As `apply_mhla`, from a processor that describes the attention (fields it leaves out are the family's)."""
    if isinstance(target, DiffusionPipeline):
        transformer = getattr(target, "transformer", None)
        if transformer is None:
            raise UserError(f"a {type(target).__name__} has no transformer to put MHLA into.")
        # Registered anew, because the name of its class is what the pipeline saves.
        family = family_of(transformer)
        target.register_modules(transformer=convert_(transformer, family, processor))
        family.adapt_pipeline(target)
        return target
    if isinstance(target, nn.Module):
        return convert_(target, family_of(target), processor)
    raise UserError(f"a {type(target).__name__} is neither a diffusers pipeline nor a transformer.")
