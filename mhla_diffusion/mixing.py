"""The learned mixing of block summaries: its initial value, clipping and resizing."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .attention import full_mixing
from .errors import UserError
from .layout import check_counts

MIXING_KINDS = ("full", "separable")
LARGEST_MATRIX = 4096  # a side beyond this is a slip: 16 million weights per layer already


class BlockMixing(nn.Module):
    """The nonnegative (M, M) mixing matrix of one attention layer, shared by its feature heads.

    Row i holds the weights with which queries of block i read the M block summaries. `kind="separable"` keeps one
    (n_a, n_a) matrix per grid axis instead; their Kronecker product is the mixing.

    Args:
        blocks: block counts per grid axis.
        kind: "full" or "separable".
        locality: 1 starts at the local initial value, 0 at the constant with which the layer computes vanilla linear
            attention; in between, a blend.
        normalize: whether the layer divides by its normaliser (it decides the constant: 1/M with, 1 without).
        learn: whether the weights receive gradients.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        kind: str = "full",
        locality: float = 1.0,
        normalize: bool = True,
        learn: bool = True,
    ) -> None:
        super().__init__()
        self.blocks = check_counts("blocks", blocks)
        self.kind = check_mixing_kind(kind)
        axes = [self.blocks] if kind == "full" else [(n,) for n in self.blocks]
        side = max(math.prod(axis) for axis in axes)
        if side > LARGEST_MATRIX:
            raise UserError(
                f"blocks={self.blocks} with mixing={kind!r} makes a {side}×{side} matrix in every layer; at most "
                f"{LARGEST_MATRIX}×{LARGEST_MATRIX} is accepted, and mixing='separable' needs one matrix per axis only."
            )
        start = [initial_mixing(axis, locality, normalize) for axis in axes]
        self.weights = _Weights(nn.Parameter(m, requires_grad=learn) for m in start)

    def forward(self) -> Tensor | tuple[Tensor, ...]:
        """The mixing as `mhla_attention` takes it: (M, M), or one (n_a, n_a) matrix per axis."""
        weights = self.weights()
        return weights[0] if self.kind == "full" else weights

    def matrix(self) -> Tensor:
        """The full (M, M) matrix, whatever the kind."""
        return full_mixing(self.forward())

    @torch.no_grad()
    def clip_(self) -> None:
        """Clip all weights to [0, 1] in place: to be called after every optimiser step (paper, section 4.2)."""
        for weight in self.weights:
            weight.clamp_(0.0, 1.0)

    @torch.no_grad()
    def resized(self, blocks: tuple[int, ...]) -> BlockMixing:
        """This mixing for other block counts: each weight is read off at the new block centres, linearly interpolated.

        The values are not rescaled: a block cut in two halves splits its summary, and each half keeps the weight.
        """
        blocks = check_counts("blocks", blocks)
        if len(blocks) != len(self.blocks):
            raise UserError(f"blocks={blocks} must have as many axes as this mixing's blocks={self.blocks}.")
        result = BlockMixing(blocks, self.kind, learn=self.weights[0].requires_grad).to(self.weights[0])
        per_axis = [_interpolation(old, new).to(self.weights[0]) for old, new in zip(self.blocks, blocks, strict=True)]
        resamplers = [full_mixing(per_axis)] if self.kind == "full" else per_axis
        for target, source, resample in zip(result.weights, self.weights, resamplers, strict=True):
            target.copy_(resample @ source @ resample.mT)
        return result

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}, kind={self.kind!r}"


class _Weights(nn.ParameterList):
    """A parameter list that is called for its tensors: only calls make offloading fetch a module's weights."""

    __call__ = nn.Module.__call__

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(self)


def initial_mixing(blocks: tuple[int, ...], locality: float = 1.0, normalize: bool = True) -> Tensor:
    """The (M, M) float32 mixing before training.

    The local value is m_ij ∝ 1 − dist(i, j) / max_k dist(i, k) with rows that sum to one (paper, section 4.2), the
    distances Euclidean between block centres, counted in blocks. `locality` blends it with the constant 1/M (or 1
    without the normaliser) of vanilla linear attention.
    """
    if not 0.0 <= locality <= 1.0:
        raise UserError(f"locality={locality} must lie between 0 (vanilla linear attention) and 1 (local).")
    blocks = check_counts("blocks", blocks)
    count = math.prod(blocks)
    constant = torch.full((count, count), 1.0 / count if normalize else 1.0, dtype=torch.float64)
    if count == 1:
        return torch.ones(1, 1)
    centres = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in blocks)).reshape(count, -1)
    distance = torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")
    local = 1.0 - distance / distance.amax(dim=1, keepdim=True)
    local = local / local.sum(dim=1, keepdim=True)
    return (locality * local + (1.0 - locality) * constant).to(torch.float32)


def check_mixing_kind(kind: str) -> str:
    """Return `kind` if known, else raise a UserError."""
    if kind not in MIXING_KINDS:
        raise UserError(f"mixing={kind!r} is unknown; known: {', '.join(MIXING_KINDS)}.")
    return kind


def _interpolation(old: int, new: int) -> Tensor:
    """(new, old) matrix that reads a function known at `old` equal cells' centres off at `new` cells' centres."""
    position = ((torch.arange(new, dtype=torch.float64) + 0.5) * old / new - 0.5).clamp(0, old - 1)
    lower = position.floor().long().clamp(max=max(old - 2, 0))
    share = position - lower
    matrix = torch.zeros(new, old, dtype=torch.float64)
    matrix[torch.arange(new), lower] += 1 - share
    matrix[torch.arange(new), (lower + 1).clamp(max=old - 1)] += share
    return matrix
