"""A 1D, 2D or 3D token grid cut into blocks: which token lies in which block, and how to get there and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from .errors import UserError


@dataclass(frozen=True)
class BlockLayout:
    """A token grid and the number of blocks along each of its axes.

    An axis of length G with n blocks is cut at `floor(i * G / n)`, so block sizes along an axis differ by at most one
    and an axis shorter than its count has empty blocks. Tokens are numbered row by row (last axis fastest), and so are
    blocks.

    Args:
        grid: tokens along each axis, for instance `(height, width)` or `(frames, height, width)`.
        blocks: blocks along each axis, as many numbers as `grid` has.

    Raises:
        UserError: when the two disagree in dimension or hold anything but positive integers.
    """

    grid: tuple[int, ...]
    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", check_counts("grid", self.grid))
        object.__setattr__(self, "blocks", check_counts("blocks", self.blocks))
        if len(self.grid) != len(self.blocks):
            raise UserError(
                f"blocks={self.blocks} has {len(self.blocks)} axes but grid={self.grid} has {len(self.grid)}; "
                "give one block count per grid axis."
            )

    @property
    def num_tokens(self) -> int:
        """N, the number of tokens."""
        return math.prod(self.grid)

    @property
    def num_blocks(self) -> int:
        """M, the number of blocks, empty ones included."""
        return math.prod(self.blocks)

    @property
    def is_even(self) -> bool:
        """Whether all blocks have the same size, so that going to blocks is a permutation of axes."""
        return all(length % count == 0 for length, count in zip(self.grid, self.blocks, strict=True))

    @property
    def largest_block(self) -> int:
        """L, the number of tokens in the largest block."""
        return math.prod([-(-length // count) for length, count in zip(self.grid, self.blocks, strict=True)])

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in each of the M blocks."""
        per_axis = [
            [(i + 1) * length // count - i * length // count for i in range(count)]
            for length, count in zip(self.grid, self.blocks, strict=True)
        ]
        return tuple(math.prod(sizes) for sizes in product(*per_axis))

    @property
    def block_of_token(self) -> Tensor:
        """The block of every token, (N,) int64."""
        return self.block_index()

    def block_index(self, device: torch.device | str | None = None) -> Tensor:
        """The block of every token, (N,) int64, on `device`."""
        index = torch.zeros((), dtype=torch.int64, device=device)
        for length, count in zip(self.grid, self.blocks, strict=True):
            ends = torch.arange(1, count + 1, device=device) * length // count
            along_axis = torch.searchsorted(ends, torch.arange(length, device=device), right=True)
            index = index.unsqueeze(-1) * count + along_axis
        return index.flatten()

    def slots(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the tokens in M padded blocks of L slots each.

        Returns:
            `token_of_slot` (M*L,) int64 (0 where padded), `is_token` (M*L,) bool, `slot_of_token` (N,) int64.
        """
        if torch.compiler.is_compiling():
            return self._find_slots(device)
        return _cached_slots(self, torch.device(device or "cpu"))

    def _find_slots(self, device: torch.device | str | None) -> tuple[Tensor, Tensor, Tensor]:
        block = self.block_index(device)
        order = torch.argsort(block, stable=True)
        sizes = torch.ones((), dtype=torch.int64, device=device)
        for length, count in zip(self.grid, self.blocks, strict=True):
            cuts = torch.arange(count + 1, device=device) * length // count
            sizes = (sizes.unsqueeze(-1) * cuts.diff()).flatten()
        first = torch.cumsum(sizes, 0) - sizes
        sorted_block = block[order]
        slot = sorted_block * self.largest_block + torch.arange(self.num_tokens, device=device) - first[sorted_block]
        slot_of_token = torch.zeros_like(block).scatter(0, order, slot)
        num_slots = self.num_blocks * self.largest_block
        token_of_slot = torch.zeros(num_slots, dtype=torch.int64, device=device).scatter(0, slot, order)
        is_token = torch.zeros(num_slots, dtype=torch.bool, device=device).scatter(0, slot, torch.ones_like(slot) > 0)
        return token_of_slot, is_token, slot_of_token

    def to_blocks(self, tokens: Tensor, dim: int = 1, zero_padding: bool = True) -> Tensor:
        """(..., N, ...) to (..., M, L, ...), contiguous, in one copy. Same dtype; differentiable.

        Args:
            tokens: the sequence lies along dimension `dim`.
            zero_padding: whether slots without a token are zero; otherwise they hold some token's values.
        """
        if tokens.shape[dim] != self.num_tokens:
            raise UserError(
                f"a sequence of {tokens.shape[dim]} tokens does not fit grid={self.grid}, which has {self.num_tokens}."
            )
        before, rest = tokens.shape[:dim], tokens.shape[dim + 1 :]
        shape = (*before, self.num_blocks, self.largest_block, *rest)
        if self.is_even:
            axes = len(self.grid)
            split = [n for length, count in zip(self.grid, self.blocks, strict=True) for n in (count, length // count)]
            counts, sizes = range(dim, dim + 2 * axes, 2), range(dim + 1, dim + 2 * axes, 2)
            last = range(dim + 2 * axes, dim + 2 * axes + len(rest))
            return tokens.unflatten(dim, split).permute(*range(dim), *counts, *sizes, *last).reshape(shape)
        token_of_slot, is_token, _ = self.slots(tokens.device)
        padded = tokens.index_select(dim, token_of_slot)
        if zero_padding:
            padded = padded.masked_fill(~is_token.view(-1, *[1] * len(rest)), 0)
        return padded.reshape(shape)

    def from_blocks(self, blocks: Tensor) -> Tensor:
        """(B, M, L, ...) back to (B, N, ...), padding dropped: the inverse of `to_blocks`."""
        rest = blocks.shape[3:]
        if self.is_even:
            inner = [length // count for length, count in zip(self.grid, self.blocks, strict=True)]
            split = blocks.reshape(blocks.shape[0], *self.blocks, *inner, *rest)
            axes = len(self.grid)
            order = [0] + [1 + a + half * axes for a in range(axes) for half in (0, 1)]
            order += range(1 + 2 * axes, split.ndim)
            return split.permute(order).reshape(blocks.shape[0], self.num_tokens, *rest)
        _, _, slot_of_token = self.slots(blocks.device)
        return blocks.flatten(1, 2).index_select(1, slot_of_token)


@lru_cache(maxsize=64)
def _cached_slots(layout: BlockLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    # Tensors made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return layout._find_slots(device)


def choose_blocks(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Block counts for a grid such that M² ≤ N: many blocks, as cubic as they come, dividing the grid if they can.

    M² ≤ N keeps the mixing (M² D²) no dearer than the rest of the operator (N D²): a rule of cost, not of quality.
    """
    grid = check_counts("grid", grid)
    most = math.isqrt(math.prod(grid))
    best, best_score = (1,) * len(grid), 0.0
    for blocks in product(*(range(1, min(length, most) + 1) for length in grid)):
        if math.prod(blocks) > most:
            continue
        sizes = [length / count for length, count in zip(grid, blocks, strict=True) if length > 1]
        elongation = max(sizes, default=1) / min(sizes, default=1)
        divides = all(length % count == 0 for length, count in zip(grid, blocks, strict=True))
        score = math.prod(blocks) / elongation * (1.0 if divides else 0.5)
        score -= 1e-9 * elongation  # of equal scores the most cubic
        if score > best_score:
            best, best_score = blocks, score
    return best


def check_counts(name: str, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return `counts` as a tuple of one to three positive ints or raise a UserError that names them."""
    try:
        result = tuple(counts)
    except TypeError:
        result = ()
    # bool is an int in Python; True as a count is a mistake.
    whole = all(isinstance(n, int | torch.SymInt) and not isinstance(n, bool) for n in result)
    if not 1 <= len(result) <= 3 or not whole or any(n < 1 for n in result):
        raise UserError(f"{name}={counts!r} must be one to three positive integers, one per grid axis.")
    return result
