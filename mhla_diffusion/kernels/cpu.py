"""The operator on CPUs, a few blocks and heads at a time, so that what lies between two products stays in the cache.

Three things make it faster than `plain`. The feature map, the cut into blocks and the change of dtype are one copy
into a small scratch buffer that the next blocks use again; division and the way back are another. The normaliser is one
more column of the values, which is 1, and so needs no pass of its own. And the backward pass is written out: of the
forward pass it keeps the denominators only, and makes the summaries anew.

The forward pass takes neighbouring tokens of many heads, because these lie together in memory: it makes the summaries
of all blocks, mixes them, and reads them out. Separable mixing is split over the two passes (`mixes_early`): summaries
are mixed along all axes but the first as soon as they are made, and along the first one just before they are read, so
that only one copy of all of them exists. The backward pass takes all blocks of a few heads, because it needs their keys
and values twice. So does the forward pass where blocks are uneven.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..feature_maps import accumulation_dtype
from ..layout import BlockLayout
from . import plain
from .cpu_layouts import Boxes, Part, Run, Slots, largest_divisor

SCRATCH_ELEMENTS = 2**19  # of one buffer of tokens, where a block (or a slab of them, see `_plan`) does not need more
# The forward pass takes as many heads at once as have this many summary elements together, and more for longer rows:
SUMMARY_ELEMENTS = 2**19
ROW_ELEMENTS = 512  # wanted side by side in memory, as long as the summaries are within
MOST_SUMMARY_ELEMENTS = 2**23


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
        self.dtype = accumulation_dtype(query, key, value)
        self.factors = [factor.to(self.dtype) for factor in factors]
        self.places = Boxes(layout) if layout.is_even else Slots(layout)
        self.query, self.key, self.value = map(self.places.tokens, self.inputs)
        self.num_blocks, self.block_size = layout.num_blocks, layout.largest_block
        self.columns = _columns(self.width) if normalize else self.width
        self.hidden = None
        if key_mask is not None:
            self.hidden = self.places.by_block(~layout.to_blocks(key_mask, 1)[:, None, ..., None])

    def _plan(self, split_blocks: bool) -> None:
        """Choose the parts and their runs such that buffers stay small.

        A run is written (`runs`) and later read (`reading_runs`). They are the same but for separable mixing, where
        whole slabs are written, all blocks of one index on the first axis, and whole columns read, all indices on it.
        """
        tokens = self.block_size * max(self.dim, self.columns)
        summary = self.dim * self.columns
        if split_blocks:
            summaries = self.num_blocks * summary
            row = min(-(-ROW_ELEMENTS // self.dim), MOST_SUMMARY_ELEMENTS // summaries)
            most = min(max(SUMMARY_ELEMENTS // summaries, row), SCRATCH_ELEMENTS // tokens)
        else:
            most = SCRATCH_ELEMENTS // (self.num_blocks * max(tokens, summary))
        self.part_heads = largest_divisor(self.heads, most)
        whole = self.part_heads == self.heads
        self.part_batch = largest_divisor(self.batch, most // self.heads) if whole else 1
        self.num_heads = self.part_batch * self.part_heads
        blocks = SCRATCH_ELEMENTS // (tokens * self.num_heads) if split_blocks else self.num_blocks
        self.mixes_early = split_blocks and len(self.factors) > 1
        self.runs = self.places.runs(self.num_blocks // len(self.factors[0]) if self.mixes_early else blocks)
        self.reading_runs = self.places.columns(blocks) if self.mixes_early else self.runs
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
            summaries = self.summaries(part)
            mixed = None if self.mixes_early else self.mixed(summaries)[-1]
            for run in self.reading_runs:
                at = self.places.at(part, run)
                result = self.token_buffer("result", run, self.columns)
                of_run = self._mixed_columns(summaries, run) if mixed is None else self._rows(mixed, run)
                torch.bmm(self.queries(at, run), of_run, out=result)
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
            keys, values, queries = self.buffers["keys"], self.buffers["values"], self.queries(at, run)
            out_grad = self.token_buffer("result", run, self.columns)
            self.places.to_blocks(grad_tokens[at], out_grad)
            if self.normalize:
                out_grad[..., self.width :] = 0
                denominator = denominators[at].reshape(-1, self.block_size, 1)
                out_grad.div_(denominator)
            query_grad = torch.bmm(out_grad, stages[-1].mT, out=self.token_buffer("features grad", run, self.dim))
            if self.normalize:
                # The quotient's derivative by its denominator is −g·numerator/denominator² = −q·(S̃ g)/denominator,
                # where the product in brackets is already there.
                product = torch.mul(queries, query_grad, out=self.token_buffer("product", run, self.dim))
                downwards = product.sum(-1, keepdim=True).div_(denominator).neg_()
                out_grad[..., self.width : self.width + 1].copy_(downwards)
                query_grad.addcmul_(downwards, stages[-1][..., self.width].unsqueeze(-2))
            if targets[0] is not None:
                self._write_gradient(query_grad, queries, self.query[at], targets[0][at])

            self.places.clear_padding(out_grad, self.num_blocks)
            summary_grad = torch.bmm(queries.mT, out_grad, out=self.summary_buffer("summaries grad"))
            summary_grad = self._unmix(summary_grad, stages, factor_grads)
            if targets[1] is not None:
                key_grad = torch.bmm(values, summary_grad.mT, out=self.token_buffer("features grad", run, self.dim))
                self._hide(key_grad, at)
                self._write_gradient(key_grad, keys, self.key[at], targets[1][at])
            if targets[2] is not None:
                value_grad = torch.bmm(keys, summary_grad, out=self.token_buffer("result", run, self.columns))
                value_grad = self.places.from_blocks(value_grad, targets[2][at].shape)
                targets[2][at].copy_(value_grad[..., : self.width])
        return [*grads, *factor_grads]

    def summaries(self, part: Part) -> Tensor:
        """S and z of every block, (M * n, D, columns), mixed along all axes but the first if the plan `mixes_early`.

        Leaves keys and values of the last run in their buffers.
        """
        summaries = self.summary_buffer("summaries")
        for run in self.runs:
            at = self.places.at(part, run)
            keys, values = self.token_buffer("keys", run, self.dim), self._values(run)
            self.places.to_blocks(self.key[at], keys, self.feature_map)
            self.places.clear_padding(keys, self.num_blocks)
            self._hide(keys, at)
            self.places.to_blocks(self.value[at], values)
            stages = [self._rows(summaries, run)]
            if self.mixes_early:
                size = (run.blocks, self.dim, self.columns)
                stages = [*(self._buffer(f"early {axis}", *size) for axis in range(1, len(self.factors))), *stages]
            torch.bmm(keys.mT, values, out=stages[0])
            for axis in range(1, len(stages)):
                self._mix_axis(axis, self.factors[axis], stages[axis - 1], stages[axis])
        return summaries

    def _values(self, run: Run) -> Tensor:
        """The buffer of values, whose columns behind them are 1 (the normaliser's) and 0 (padding)."""
        is_new = "values" not in self.buffers
        values = self.token_buffer("values", run, self.columns)
        if is_new:
            values[..., self.width :] = 0
            values[..., self.width : self.width + 1] = 1
        return values

    def _rows(self, summaries: Tensor, run: Run) -> Tensor:
        """Those of a run's blocks."""
        return summaries[run.numbers.start * self.num_heads : run.numbers.stop * self.num_heads]

    def _mixed_columns(self, summaries: Tensor, run: Run) -> Tensor:
        """A run of columns, mixed along the first axis, which is all that is left to do."""
        factor = self.factors[0]
        before = summaries.view(len(factor), self.num_blocks // len(factor), -1)[:, run.numbers].flatten(1)
        mixed = self._buffer("mixed columns", run.blocks, self.dim, self.columns)
        torch.mm(factor, before, out=mixed.view(len(factor), -1))
        return mixed

    def queries(self, at: tuple[slice, ...], run: Run) -> Tensor:
        queries = self.token_buffer("queries", run, self.dim)
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
        """Summaries as (what is slower than the axis, blocks along it, what is faster)."""
        counts = [len(factor) for factor in self.factors[axis:]]
        heads = self.num_heads if self.places.can_split else 1
        return summaries.view(-1, counts[0], heads * math.prod(counts[1:]) * self.dim * self.columns)

    def token_buffer(self, name: str, run: Run, columns: int) -> Tensor:
        """For the tokens of any run of the length of this one."""
        return self._buffer(name, run.blocks, self.block_size, columns)

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


def _columns(width: int) -> int:
    """Room for the values and the normaliser; rows that start where vector instructions like them, if that is cheap."""
    aligned = -(-(width + 1) // 8) * 8
    return aligned if aligned <= 1.1 * (width + 1) else width + 1
