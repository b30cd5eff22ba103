"""How tokens lie in blocks, for `cpu`: the way from a tensor of tokens to buffers of blocks, and back.

Whether blocks come before batch and head or behind them depends on the layout, and only these classes know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import SHIFT
from ..layout import BlockLayout

Part = tuple[slice, slice]  # of the batch and of the heads


@dataclass(frozen=True)
class Run:
    """Blocks that are computed together: as a range of numbers, and as ranges along the axes (none for all blocks).

    The numbers are those of blocks, or of columns: all blocks that differ in the first axis only.
    """

    numbers: slice
    box: tuple[slice, ...]
    blocks: int


class Boxes:
    """Blocks of equal size: going to them and back is a permutation of axes, done by the copy that is needed anyway."""

    can_split = True  # into runs of blocks

    def __init__(self, layout: BlockLayout) -> None:
        axes = len(layout.grid)
        self.counts = layout.blocks
        cuts = zip(layout.grid, layout.blocks, strict=True)
        self.split = [n for length, count in cuts for n in (count, length // count)]
        counts, sizes = range(1, 2 * axes + 1, 2), range(2, 2 * axes + 1, 2)
        self.order = (*counts, 0, 2 * axes + 1, *sizes, 2 * axes + 2)

    def tokens(self, x: Tensor) -> Tensor:
        """A view of (B, N, H, D) as (counts…, B, H, sizes…, D)."""
        return x.unflatten(1, self.split).permute(self.order)

    def by_block(self, x: Tensor) -> Tensor:
        """A view of (B, H, M, …) as (counts…, B, H, …)."""
        return x.movedim(2, 0).unflatten(0, self.counts)

    def expand_heads(self, x: Tensor, heads: int) -> Tensor:
        """(counts…, B, 1, …) for all heads."""
        axis = len(self.counts) + 1
        return x.expand(*x.shape[:axis], heads, *x.shape[axis + 1 :])

    def at(self, part: Part, run: Run) -> tuple[slice, ...]:
        """The index of a part's tokens in a run."""
        return (*run.box, *part)

    def runs(self, most: int) -> list[Run]:
        """All blocks in runs of equal length, of at most so many blocks (or one)."""
        return [Run(numbers, box, numbers.stop - numbers.start) for numbers, box in _runs(self.counts, most)]

    def columns(self, most: int) -> list[Run]:
        """All blocks in runs of whole columns, of at most so many blocks (or one column)."""
        length, *counts = self.counts
        runs = _runs(counts, most // length)
        return [Run(numbers, (slice(None), *box), length * (numbers.stop - numbers.start)) for numbers, box in runs]

    def to_blocks(self, tokens: Tensor, blocks: Tensor, feature_map: str = "identity") -> None:
        """Fill the first columns of a buffer with the features of a part's tokens."""
        target = self.from_blocks(blocks, tokens.shape)[..., : tokens.shape[-1]]
        if feature_map == "relu" and tokens.dtype == target.dtype:
            torch.clamp_min(tokens, 0, out=target)
        else:
            _map_(target.copy_(tokens), feature_map)

    def from_blocks(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """A buffer as a part's tokens of that shape, with the buffer's columns."""
        return blocks.view(*shape[:-1], blocks.shape[-1])

    def clear_padding(self, blocks: Tensor, num_blocks: int) -> None:
        pass


class Slots:
    """Blocks whose sizes differ, each padded to the largest."""

    can_split = False

    def __init__(self, layout: BlockLayout) -> None:
        self.num_blocks = layout.num_blocks
        self.token_of_slot, is_token, self.slot_of_token = layout.slots()
        self.padding = (~is_token).nonzero().flatten()

    def tokens(self, x: Tensor) -> Tensor:
        """A view of (B, N, H, D) as (B, H, N, D)."""
        return x.transpose(1, 2)

    def by_block(self, x: Tensor) -> Tensor:
        """(B, H, M, …) as it is."""
        return x

    def expand_heads(self, x: Tensor, heads: int) -> Tensor:
        """(B, 1, …) for all heads."""
        return x.expand(x.shape[0], heads, *x.shape[2:])

    def at(self, part: Part, run: Run) -> tuple[slice, ...]:
        """The index of a part's tokens."""
        return part

    def runs(self, most: int) -> list[Run]:
        """All blocks."""
        return [Run(slice(0, self.num_blocks), (), self.num_blocks)]

    def to_blocks(self, tokens: Tensor, blocks: Tensor, feature_map: str = "identity") -> None:
        """Fill the first columns of a buffer with the features of a part's tokens, padding with those of token 0."""
        target = self._slots(blocks, tokens.shape)[..., : tokens.shape[-1]]
        if tokens.dtype == target.dtype:
            torch.index_select(tokens, 2, self.token_of_slot, out=target)
        else:
            target.copy_(tokens.index_select(2, self.token_of_slot))
        _map_(target, feature_map)

    def from_blocks(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """A buffer as a part's tokens of that shape, with the buffer's columns."""
        return self._slots(blocks, shape).index_select(2, self.slot_of_token)

    def clear_padding(self, blocks: Tensor, num_blocks: int) -> None:
        blocks.view(-1, len(self.token_of_slot), blocks.shape[-1]).index_fill_(1, self.padding, 0)

    def _slots(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        return blocks.view(*shape[:2], len(self.token_of_slot), blocks.shape[-1])


def _map_(x: Tensor, feature_map: str) -> None:
    if feature_map in ("relu", "relu_eps"):
        x.clamp_min_(0)
    if feature_map == "relu_eps":
        x.add_(SHIFT)
    if feature_map == "elu":
        F.elu_(x).add_(1)


def _runs(counts: Sequence[int], most: int) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    """Ranges of at most `most` successive numbers (or one) of a grid, all of one length and each a box."""
    axis = next(a for a in range(len(counts)) if math.prod(counts[a + 1 :]) <= max(most, 1))
    faster = math.prod(counts[axis + 1 :])
    step = largest_divisor(counts[axis], most // faster)
    rest = tuple(slice(0, count) for count in counts[axis + 1 :])
    for number, start in enumerate(product(*map(range, counts[:axis]), range(0, counts[axis], step))):
        numbers = slice(number * step * faster, (number + 1) * step * faster)
        before = tuple(slice(i, i + 1) for i in start[:-1])
        yield numbers, (*before, slice(start[-1], start[-1] + step), *rest)


def largest_divisor(number: int, most: int) -> int:
    return max((d for d in range(1, min(number, most) + 1) if number % d == 0), default=1)
