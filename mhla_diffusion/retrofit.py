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
TRANSFORMERS = ("transformer", "transformer_2")  # Wan2.2 has one for high and one for low noise


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
        names = [name for name in TRANSFORMERS if getattr(target, name, None) is not None]
        if not names:
            raise UserError(f"a {type(target).__name__} has no transformer to put MHLA into.")
        family = family_of(getattr(target, names[0]))
        for name in names:
            # Registered anew, because the name of its class is what the pipeline saves.
            target.register_modules(**{name: convert_(getattr(target, name), family, processor)})
        family.adapt_pipeline(target)
        return target
    if isinstance(target, nn.Module):
        return convert_(target, family_of(target), processor)
    raise UserError(f"a {type(target).__name__} is neither a diffusers pipeline nor a transformer.")
