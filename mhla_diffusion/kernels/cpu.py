"""The operator on CPUs, a few blocks and heads at a time, so that what lies between two products stays in the cache.

Three things make it faster than `plain`. The feature map, the cut into blocks and the change of dtype are one copy
into a small scratch buffer that the next blocks use again; division and the way back are another. The normaliser is one
more column of the values, which is 1, and so needs no pass of its own. And the backward pass is written out: of the
forward pass it keeps the denominators only, and makes the summaries anew.

The forward pass takes neighbouring tokens of many heads, because these lie together in memory: it makes the summaries
of all blocks, mixes them, and reads them out. The backward pass takes all blocks of a few heads, because it needs their
keys and values twice. So does the forward pass where blocks are uneven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import SHIFT
from ..layout import BlockLayout
from . import plain

SCRATCH_ELEMENTS = 2**19  # of one buffer of tokens, where one block of one head does not need more
# The forward pass takes as many heads at once as have this many summary elements together, and more for longer rows:
SUMMARY_ELEMENTS = 2**19
ROW_ELEMENTS = 512  # wanted side by side in memory, as long as the summaries are within
MOST_SUMMARY_ELEMENTS = 2**23
Part = tuple[slice, slice]  # of the batch and of the heads


@dataclass(frozen=True)
class Run:
    """Blocks with successive numbers: as a range of numbers, and as ranges along the axes (none for all blocks)."""

    numbers: slice
    box: tuple[slice, ...]


class CPUKernel:
    """One call: its tensors seen by head and block, and the scratch buffers that its parts use one after the other.

    A part is n = batches × heads. The tokens of a run of m blocks lie in buffers (m * n, L, columns), the summaries of
    all M blocks in buffers (M * n, D, columns); blocks are the slower index if they are even, else heads.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factors: Sequence[Tensor],
        normalize: bool,
        eps: float,
        layout: BlockLayout,
        key_mask: Tensor | None,
        feature_map: str,
    ) -> None:
        self.batch, _, self.heads, self.dim = query.shape
        self.width = value.shape[-1]
        self.normalize, self.eps = normalize, eps
        self.feature_map = feature_map
        self.inputs = (query, key, value)
        self.dtype = reduce(torch.promote_types, (query.dtype, key.dtype, value.dtype), torch.float32)
        self.factors = [factor.to(self.dtype) for factor in factors]
        self.places = _Boxes(layout) if layout.is_even else _Slots(layout)
        self.query, self.key, self.value = map(self.places.tokens, self.inputs)
        self.num_blocks, self.block_size = layout.num_blocks, layout.largest_block
        self.columns = _columns(self.width) if normalize else self.width
        self.hidden = None
        if key_mask is not None:
            self.hidden = self.places.by_block(~layout.to_blocks(key_mask, 1)[:, None, ..., None])

    def _plan(self, split_blocks: bool) -> None:
        """Choose the parts and their runs such that buffers stay small."""
        tokens = self.block_size * max(self.dim, self.columns)
        summary = self.dim * self.columns
        if split_blocks:
            summaries = self.num_blocks * summary
            row = min(-(-ROW_ELEMENTS // self.dim), MOST_SUMMARY_ELEMENTS // summaries)
            most = min(max(SUMMARY_ELEMENTS // summaries, row), SCRATCH_ELEMENTS // tokens)
        else:
            most = SCRATCH_ELEMENTS // (self.num_blocks * max(tokens, summary))
        self.part_heads = _largest_divisor(self.heads, most)
        whole = self.part_heads == self.heads
        self.part_batch = _largest_divisor(self.batch, most // self.heads) if whole else 1
        self.num_heads = self.part_batch * self.part_heads
        self.runs = self.places.runs(SCRATCH_ELEMENTS // (tokens * self.num_heads) if split_blocks else self.num_blocks)
        self.buffers: dict[str, Tensor] = {}

    def parts(self) -> Iterator[Part]:
        for b in range(0, self.batch, self.part_batch):
            for h in range(0, self.heads, self.part_heads):
                yield slice(b, b + self.part_batch), slice(h, h + self.part_heads)

    def outputs(self, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The attention (B, N, H, E), and its denominators (B, H, M, L) if they are to be kept and there are any."""
        value = self.inputs[2]
        out = torch.empty(value.shape, dtype=value.dtype)
        denominators = None
        if keep and self.normalize:
            denominators = torch.empty(self.batch, self.heads, self.num_blocks, self.block_size, dtype=self.dtype)
            denominators_by_block = self.places.by_block(denominators)
        out_tokens = self.places.tokens(out)
        self._plan(split_blocks=self.places.can_split)
        for part in self.parts():
            mixed = self.mixed(self.summaries(part))[-1]
            for run in self.runs:
                at = self.places.at(part, run)
                result = self.token_buffer("result", self.columns)
                torch.bmm(self.queries(at), self._rows(mixed, run), out=result)
                if self.normalize:
                    result[..., self.width].add_(self.eps)
                    if denominators is not None:
                        kept = denominators_by_block[at]
                        kept.copy_(result[..., self.width].view(kept.shape))
                result = self.places.from_blocks(result, out_tokens[at].shape)
                self._write_quotient(result, out_tokens[at])
        return out, denominators

    def gradients(self, grad: Tensor, denominators: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of query, key, value and the mixing factors, where `needed`, from the gradient of the output."""
        wanted = zip(self.inputs, needed[:3], strict=True)
        grads = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in wanted]
        targets = [None if x is None else self.places.tokens(x) for x in grads]
        wanted = zip(self.factors, needed[3:], strict=True)
        factor_grads = [torch.zeros_like(factor) if need else None for factor, need in wanted]
        grad_tokens = self.places.tokens(grad)
        denominators = None if denominators is None else self.places.by_block(denominators)
        self._plan(split_blocks=False)
        (run,) = self.runs
        for part in self.parts():
            at = self.places.at(part, run)
            stages = self.mixed(self.summaries(part))
            keys, values, queries = self.buffers["keys"], self.buffers["values"], self.queries(at)
            out_grad = self.token_buffer("result", self.columns)
            self.places.to_blocks(grad_tokens[at], out_grad)
            if self.normalize:
                out_grad[..., self.width :] = 0
                denominator = denominators[at].reshape(-1, self.block_size, 1)
                out_grad.div_(denominator)
            query_grad = torch.bmm(out_grad, stages[-1].mT, out=self.token_buffer("features grad", self.dim))
            if self.normalize:
                # The quotient's derivative by its denominator is −g·numerator/denominator² = −q·(S̃ g)/denominator,
                # where the product in brackets is already there.
                product = torch.mul(queries, query_grad, out=self.token_buffer("product", self.dim))
                downwards = product.sum(-1, keepdim=True).div_(denominator).neg_()
                out_grad[..., self.width : self.width + 1].copy_(downwards)
                query_grad.addcmul_(downwards, stages[-1][..., self.width].unsqueeze(-2))
            if targets[0] is not None:
                self._write_gradient(query_grad, queries, self.query[at], targets[0][at])

            self.places.clear_padding(out_grad, self.num_blocks)
            summary_grad = torch.bmm(queries.mT, out_grad, out=self.summary_buffer("summaries grad"))
            summary_grad = self._unmix(summary_grad, stages, factor_grads)
            if targets[1] is not None:
                key_grad = torch.bmm(values, summary_grad.mT, out=self.token_buffer("features grad", self.dim))
                self._hide(key_grad, at)
                self._write_gradient(key_grad, keys, self.key[at], targets[1][at])
            if targets[2] is not None:
                value_grad = torch.bmm(keys, summary_grad, out=self.token_buffer("result", self.columns))
                value_grad = self.places.from_blocks(value_grad, targets[2][at].shape)
                targets[2][at].copy_(value_grad[..., : self.width])
        return [*grads, *factor_grads]

    def summaries(self, part: Part) -> Tensor:
        """S and z of every block, (M * n, D, columns); leaves keys and values of the last run in their buffers."""
        summaries = self.summary_buffer("summaries")
        if "values" not in self.buffers:
            values = self.token_buffer("values", self.columns)
            values[..., self.width :] = 0
            values[..., self.width : self.width + 1] = 1
        keys, values = self.token_buffer("keys", self.dim), self.buffers["values"]
        for run in self.runs:
            at = self.places.at(part, run)
            self.places.to_blocks(self.key[at], keys, self.feature_map)
            self.places.clear_padding(keys, self.num_blocks)
            self._hide(keys, at)
            self.places.to_blocks(self.value[at], values)
            torch.bmm(keys.mT, values, out=self._rows(summaries, run))
        return summaries

    def _rows(self, summaries: Tensor, run: Run) -> Tensor:
        """Those of a run's blocks."""
        return summaries[run.numbers.start * self.num_heads : run.numbers.stop * self.num_heads]

    def queries(self, at: tuple[slice, ...]) -> Tensor:
        queries = self.token_buffer("queries", self.dim)
        self.places.to_blocks(self.query[at], queries, self.feature_map)
        return queries

    def mixed(self, summaries: Tensor) -> list[Tensor]:
        """The summaries, and what each factor of the mixing makes of what the one before it made."""
        stages = [summaries]
        for axis, factor in enumerate(self.factors):
            stages.append(self._mix_axis(axis, factor, stages[-1], self.summary_buffer(f"mixed {axis}")))
        return stages

    def _unmix(self, grad: Tensor, stages: list[Tensor], factor_grads: list[Tensor | None]) -> Tensor:
        """The gradient of the summaries from that of the mixed ones; adds to the factors' gradients."""
        spare = self.summary_buffer("spare grad")
        for axis in reversed(range(len(self.factors))):
            if factor_grads[axis] is not None:
                outer = torch.bmm(self._along(axis, grad), self._along(axis, stages[axis]).mT)
                factor_grads[axis] += outer.sum(0)
            grad, spare = self._mix_axis(axis, self.factors[axis].mT, grad, spare), grad
        return grad

    def _mix_axis(self, axis: int, factor: Tensor, summaries: Tensor, out: Tensor) -> Tensor:
        before = self._along(axis, summaries)
        torch.bmm(factor.expand(before.shape[0], -1, -1), before, out=self._along(axis, out))
        return out

    def _along(self, axis: int, summaries: Tensor) -> Tensor:
        """All summaries as (what is slower than the axis, blocks along it, what is faster)."""
        counts = [factor.shape[0] for factor in self.factors]
        heads = 1 if self.places.can_split else self.num_heads
        return summaries.view(heads * math.prod(counts[:axis]), counts[axis], -1)

    def token_buffer(self, name: str, columns: int) -> Tensor:
        blocks = self.runs[0].numbers.stop  # all runs are of this length
        return self._buffer(name, blocks, self.block_size, columns)

    def summary_buffer(self, name: str) -> Tensor:
        return self._buffer(name, self.num_blocks, self.dim, self.columns)

    def _buffer(self, name: str, blocks: int, rows: int, columns: int) -> Tensor:
        if name not in self.buffers:
            self.buffers[name] = torch.empty(blocks * self.num_heads, rows, columns, dtype=self.dtype)
        return self.buffers[name]

    def _hide(self, keys: Tensor, at: tuple[slice, ...]) -> None:
        if self.hidden is not None:
            hidden = self.places.expand_heads(self.hidden, self.heads)[at]
            keys.view(*hidden.shape[:-1], self.dim).masked_fill_(hidden, 0)

    def _write_quotient(self, result: Tensor, out: Tensor) -> None:
        """The numerators, divided by the column after them, to the output."""
        numerator = result[..., : self.width]
        denominator = result[..., self.width : self.width + 1] if self.normalize else None
        if out.dtype != self.dtype:
            numerator = numerator if denominator is None else numerator.div_(denominator)
            out.copy_(plain.saturating_cast(numerator, out.dtype))
        elif denominator is None:
            out.copy_(numerator)
        else:
            torch.div(numerator, denominator, out=out)

    def _write_gradient(self, grad: Tensor, features: Tensor, tokens: Tensor, out: Tensor) -> None:
        """The gradient of the features, through the feature map, to the gradient of `tokens`."""
        if self.feature_map == "elu":
            grad.mul_(features.clamp_max(1))  # elu's slope is 1 above zero and elu(x) + 1 below
        grad = self.places.from_blocks(grad, out.shape)
        if self.feature_map not in ("relu", "relu_eps"):
            out.copy_(grad)
        elif tokens.dtype == out.dtype == self.dtype:
            torch.ops.aten.threshold_backward.grad_input(grad, tokens, 0, grad_input=out)
        else:
            out.copy_(grad * (tokens > 0))


class _Boxes:
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
        axis = next(a for a in range(len(self.counts)) if math.prod(self.counts[a + 1 :]) <= max(most, 1))
        faster = math.prod(self.counts[axis + 1 :])
        step = _largest_divisor(self.counts[axis], most // faster)
        starts = product(*map(range, self.counts[:axis]), range(0, self.counts[axis], step))
        rest = tuple(slice(0, count) for count in self.counts[axis + 1 :])
        runs = []
        for number, start in enumerate(starts):
            numbers = slice(number * step * faster, (number + 1) * step * faster)
            before = tuple(slice(i, i + 1) for i in start[:-1])
            runs.append(Run(numbers, (*before, slice(start[-1], start[-1] + step), *rest)))
        return runs

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


class _Slots:
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
        return [Run(slice(0, self.num_blocks), ())]

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


def _columns(width: int) -> int:
    """Room for the values and the normaliser; rows that start where vector instructions like them, if that is cheap."""
    aligned = -(-(width + 1) // 8) * 8
    return aligned if aligned <= 1.1 * (width + 1) else width + 1


def _largest_divisor(number: int, most: int) -> int:
    return max((d for d in range(1, min(number, most) + 1) if number % d == 0), default=1)
