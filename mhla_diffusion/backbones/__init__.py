"""One file per model family."""

from __future__ import annotations

from torch import nn

from ..errors import UserError, nearest
from .dit import DIT, MHLADiTTransformer2DModel
from .family import Family, Objective
from .sana import SANA, MHLASanaTransformer2DModel
from .wan import WAN, MHLAWanTransformer3DModel

FAMILIES: dict[str, Family] = {family.name: family for family in (DIT, SANA, WAN)}


def family_named(name: str) -> Family:
    """The family called `name`, as it stands in a training config."""
    if name not in FAMILIES:
        raise UserError(f"family={name!r} is unknown{nearest(name, FAMILIES)}; known: {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def family_of(model: nn.Module) -> Family:
    """The family of a diffusers or MHLA transformer."""
    for family in FAMILIES.values():
        if isinstance(model, family.base_class):
            return family
    known = ", ".join(family.base_class.__name__ for family in FAMILIES.values())
    hint = " Set the processor before torch.compile." if hasattr(model, "_orig_mod") else ""
    raise UserError(f"a {type(model).__name__} is not a transformer that MHLA knows; it knows {known}.{hint}")


__all__ = [
    "FAMILIES",
    "Family",
    "MHLADiTTransformer2DModel",
    "MHLASanaTransformer2DModel",
    "MHLAWanTransformer3DModel",
    "Objective",
    "family_named",
    "family_of",
]
