"""Feature maps φ by name: what is applied to queries and keys before linear attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError, nearest

SHIFT = 1e-6  # of relu_eps: no feature is ever zero


class FeatureMap(nn.Module):
    """φ on queries and keys of shape (B, N, H, D) each; returns features (B, N, H, `feature_dim`).

    Maps that only select values (relu, identity) keep the dtype; the others compute in at least float32 and return it,
    because rounding features to half precision would lose more than the attention itself does.

    Args:
        heads: number of feature heads H.
        head_dim: D.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim

    @property
    def feature_dim(self) -> int:
        return self.head_dim

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.features(query), self.features(key)

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define features() or forward().")


class ReluMap(FeatureMap):
    """φ(x) = max(x, 0), the map of SANA and of the paper's image models."""

    def features(self, x: Tensor) -> Tensor:
        return F.relu(x)


class ShiftedReluMap(FeatureMap):
    """φ(x) = max(x, 0) + 1e-6, the map of the released Wan-MHLA weights: no feature is ever zero."""

    def features(self, x: Tensor) -> Tensor:
        return shifted_relu(x)


class EluMap(FeatureMap):
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, eq. 7)."""

    def features(self, x: Tensor) -> Tensor:
        return shifted_elu(x)


class IdentityMap(FeatureMap):
    """φ(x) = x. Not nonnegative: for use without the denominator."""

    def features(self, x: Tensor) -> Tensor:
        return x


class PositiveRandomMap(FeatureMap):
    """Positive orthogonal random features of the softmax kernel (Choromanski et al. 2021, eq. 5 and section 3).

    φ(x) = exp(W x' − |x'|²/2 − c) / sqrt(D) with x' = x D^(-1/4), and c the largest exponent (per query; per head for
    keys), which cancels in the normalised output and keeps exp from overflowing. W is drawn once from a fixed seed and
    saved with the model.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        generator = torch.Generator().manual_seed(0)
        gaussian = torch.randn(heads, head_dim, head_dim, generator=generator, device="cpu", dtype=torch.float32)
        orthogonal, triangle = torch.linalg.qr(gaussian)
        # QR leaves each column's sign to the diagonal of R; without this every row would point to one side.
        orthogonal = orthogonal * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        norms = torch.randn(heads, head_dim, head_dim, generator=generator, device="cpu").norm(dim=-1, keepdim=True)
        self.register_buffer("projection", orthogonal.mT * norms)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = self._exponents(query), self._exponents(key)
        query = query - query.amax(dim=-1, keepdim=True)
        key = key - key.amax(dim=(1, 3), keepdim=True)
        scale = self.head_dim**-0.5
        return query.exp() * scale, key.exp() * scale

    def _exponents(self, x: Tensor) -> Tensor:
        x = at_least_float32(x) * self.head_dim**-0.25
        return _project(x, self.projection) - x.square().sum(-1, keepdim=True) / 2


class HedgehogMap(FeatureMap):
    """Learned map φ(x) = softmax([y, −y]), y = W x, with 2D features (Zhang et al. 2024, Hedgehog).

    One W per feature head, separate for queries and keys, starting at D^(-1/4)·I so that products of y start at softmax
    attention's scale. Made for layers that were trained with softmax.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim)
        start = torch.eye(head_dim).repeat(heads, 1, 1) * head_dim**-0.25
        self.query_weight = nn.Parameter(start.clone())
        self.key_weight = nn.Parameter(start.clone())

    @property
    def feature_dim(self) -> int:
        return 2 * self.head_dim

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self._learned(query, self.query_weight), self._learned(key, self.key_weight)

    @staticmethod
    def _learned(x: Tensor, weight: Tensor) -> Tensor:
        y = _project(at_least_float32(x), weight)
        return torch.cat([y, -y], dim=-1).softmax(dim=-1)


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "relu": ReluMap,
    "relu_eps": ShiftedReluMap,
    "elu": EluMap,
    "identity": IdentityMap,
    "positive_random": PositiveRandomMap,
    "hedgehog": HedgehogMap,
}


def shifted_relu(x: Tensor) -> Tensor:
    """max(x, 0) + 1e-6 in at least float32."""
    return F.relu(at_least_float32(x)) + SHIFT


def shifted_elu(x: Tensor) -> Tensor:
    """elu(x) + 1 in at least float32."""
    return F.elu(at_least_float32(x)) + 1


def unchanged(x: Tensor) -> Tensor:
    """x."""
    return x


# The maps that treat every number alike: `mhla_attention` takes them by name, since its kernels apply them on the way.
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_eps": shifted_relu,
    "elu": shifted_elu,
    "identity": unchanged,
}


def check_feature_map(name: str) -> str:
    """Return `name` if it is a known feature map, else raise a UserError that lists them."""
    if not isinstance(name, str) or name not in FEATURE_MAPS:
        known = ", ".join(FEATURE_MAPS)
        raise UserError(f"feature_map={name!r} is unknown{nearest(str(name), FEATURE_MAPS)}; known: {known}.")
    return name


def build_feature_map(name: str, heads: int, head_dim: int) -> FeatureMap:
    """The feature map called `name` for `heads` feature heads of `head_dim`.

    Raises:
        UserError: for an unknown name, with the known ones.
    """
    return FEATURE_MAPS[check_feature_map(name)](heads, head_dim)


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged if it is already float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """In which sums over products of these tensors run: the widest of their dtypes, at least float32."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def no_autocast(x: Tensor) -> AbstractContextManager:
    """Computations on `x` keep their dtype inside: mixed precision must not undo float32."""
    return torch.autocast(device_type=x.device.type, enabled=False)


def _project(x: Tensor, weight: Tensor) -> Tensor:
    """W x per head: (B, N, H, D) with (H, F, D) to (B, N, H, F), in the dtype of `x`, autocast or not."""
    with no_autocast(x):
        return torch.einsum("bnhd,hfd->bnhf", x, weight.to(x.dtype))
