"""Ways to compute the operator: `plain`, for everything, and faster ones for some devices, with the same results.

Which one runs is decided by the tensors, or forced by the argument `backend` or the environment variable MHLA_BACKEND.
The Triton kernels run only where they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..errors import UserError
from ..feature_maps import ELEMENTWISE
from ..layout import BlockLayout
from . import autograd, native, plain
from .cpu import CPUKernel

BACKENDS = ("auto", "plain", "cpu", "native", "triton")
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
    factors = (mixing,) if isinstance(mixing, Tensor) else tuple(mixing)
    others = factors if key_mask is None else (*factors, key_mask)
    chosen = choose_backend((query, key, value, *(rotary or ())), backend, others, feature_map)
    if chosen == "plain":
        features = ELEMENTWISE[feature_map]
        return plain.attend(features(query), features(key), value, *arguments)
    return autograd.attend(_kernel(chosen), query, key, value, *arguments, feature_map)


def _kernel(backend: str) -> type[autograd.Kernel]:
    if backend == "triton":
        return _triton().TritonKernel
    return {"cpu": CPUKernel, "native": native.NativeKernel}[backend]


def choose_backend(
    tensors: Sequence[Tensor],
    backend: str | None = None,
    others: Sequence[Tensor] = (),
    feature_map: str = "identity",
) -> str:
    """The backend that will compute attention of these tensors: the forced one, or the fastest that takes them.

    `others` are the factors of the mixing and the mask.

    While torch.compile or torch.export trace it is "plain" whatever is forced: the compiler makes its own kernels.
    """
    if torch.compiler.is_compiling():
        return "plain"
    name, origin = (backend, "backend") if backend is not None else (os.environ.get(VARIABLE) or "auto", VARIABLE)
    if name not in BACKENDS:
        raise UserError(f"{origin}={name!r} is unknown; known: {', '.join(BACKENDS)}.")
    if name == "plain":
        return name
    if name == "auto" and is_in_torch_dispatch_mode():
        return "plain"  # somebody follows or replaces the operations
    if name == "auto":  # never Triton so far: its kernels have run in the interpreter only, not on a GPU
        possible = (name for name in ("native", "cpu") if _obstacle(name, tensors, others, feature_map) is None)
        return next(possible, "plain")
    obstacle = _obstacle(name, tensors, others, feature_map)
    if obstacle is not None:
        raise UserError(f"{origin}={name!r} {obstacle}; leave it out to have a backend chosen.")
    return name


def _obstacle(backend: str, tensors: Sequence[Tensor], others: Sequence[Tensor], feature_map: str) -> str | None:
    """Why a backend cannot take the tensors; None if it can."""
    for x in (*tensors, *others):
        if type(x) not in (Tensor, torch.nn.Parameter):
            return f"takes plain tensors, not a {type(x).__name__}"
        if x.numel() == 0:
            return f"takes tensors that are not empty, not {tuple(x.shape)}"
    if torch._C._are_functorch_transforms_active():
        return "cannot be transformed by torch.func"
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (*tensors, *others)):
        return "cannot be differentiated in forward mode"
    if backend == "native":
        return native.obstacle(tensors, others, feature_map)
    devices = {x.device.type for x in tensors}
    if backend == "cpu":
        return None if devices == {"cpu"} else f"takes tensors on the CPU, not on {tensors[0].device}"
    if devices not in ({"cuda"}, {"cpu"}) or (devices == {"cpu"} and os.environ.get("TRITON_INTERPRET") != "1"):
        return f"takes tensors on a GPU, not on {tensors[0].device}"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    kernels = _triton()
    for x in tensors:
        if x.dtype not in kernels.DTYPES:
            return f"takes float32, bfloat16 and float16, not {str(x.dtype).removeprefix('torch.')}"
        if x.shape[-1] > kernels.LARGEST_DIM:
            return f"takes heads of at most {kernels.LARGEST_DIM} dimensions, not {x.shape[-1]}"
    return None


def _triton() -> ModuleType:
    return importlib.import_module(".triton", __name__)  # late, because importing Triton takes a while
