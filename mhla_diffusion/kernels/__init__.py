"""Ways to compute the operator: `plain`, for everything, and faster ones for some devices, with the same results.

Which one runs is decided by the tensors, or forced by the argument `backend` or the environment variable MHLA_BACKEND.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ..errors import UserError
from ..feature_maps import ELEMENTWISE
from ..layout import BlockLayout
from . import autograd, plain
from .cpu import CPUKernel

BACKENDS = ("auto", "plain", "cpu")
VARIABLE = "MHLA_BACKEND"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: plain.Mixing,
    layout: BlockLayout,
    normalize: bool,
    eps: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    feature_map: str = "identity",
    backend: str | None = None,
) -> Tensor:
    """`mhla_attention` of tensors that were checked, computed by the backend that suits them.

    Raises:
        UserError: for a backend that does not exist or cannot take these tensors.
    """
    arguments = (mixing, layout, normalize, eps, rotary, key_mask)
    if choose_backend(query, key, value, backend) == "cpu":
        return autograd.attend(CPUKernel, query, key, value, *arguments, feature_map)
    features = ELEMENTWISE[feature_map]
    return plain.attend(features(query), features(key), value, *arguments)


def choose_backend(query: Tensor, key: Tensor, value: Tensor, backend: str | None = None) -> str:
    """The backend that will compute attention of these tensors: the forced one, or the fastest that takes them.

    While torch.compile or torch.export trace it is "plain" whatever is forced: the compiler makes its own kernels.
    """
    if torch.compiler.is_compiling():
        return "plain"
    name, origin = (backend, "backend") if backend is not None else (os.environ.get(VARIABLE) or "auto", VARIABLE)
    if name not in BACKENDS:
        raise UserError(f"{origin}={name!r} is unknown; known: {', '.join(BACKENDS)}.")
    if name == "plain":
        return name
    obstacle = _obstacle_to_cpu(query, key, value)
    if name == "cpu" and obstacle is not None:
        raise UserError(f"{origin}='cpu' {obstacle}; leave it out to have a backend chosen.")
    return "cpu" if obstacle is None else "plain"


def _obstacle_to_cpu(*tensors: Tensor) -> str | None:
    for x in tensors:
        if x.device.type != "cpu":
            return f"computes CPU tensors, and these are on {x.device}"
        if type(x) not in (Tensor, torch.nn.Parameter):
            return f"computes plain tensors, not {type(x).__name__}"
    if torch._C._are_functorch_transforms_active():
        return "cannot be transformed by torch.func"
    return None
