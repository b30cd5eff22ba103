"""The operator on CPUs, a few heads at a time, so that what passes between two matrix products stays in the cache.

Three things make it faster than `plain`. The feature map, the cut into blocks and the change of dtype are one copy
into a small scratch buffer that the next heads use again; division and the way back are another. The normaliser is one
more column of the values, which is 1, and so needs no pass of its own. And the backward pass is written out: of the
forward pass it keeps the denominators only, and makes the summaries anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ..feature_maps import SHIFT
from ..layout import BlockLayout
from . import plain

SCRATCH_ELEMENTS = 2**19  # of one buffer, where one head does not need more
Part = tuple[slice, slice]  # of the batch and of the heads


class CPUKernel:
    """One call: its tensors seen by head and block, and the scratch buffers that its parts use one after the other.

    In a buffer the tokens of n = batches × heads of a part lie block by block, (n * M, L, columns).
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
        self.hidden = None if key_mask is None else ~layout.to_blocks(key_mask, 1)[:, None, ..., None]  # (B,1,M,L,1)

        self.num_blocks, self.block_size = layout.num_blocks, layout.largest_block
        self.columns = _columns(self.width) if normalize else self.width
        per_head = self.num_blocks * max(self.dim, self.columns) * max(self.block_size, min(self.dim, self.columns))
        self.part_heads = _largest_divisor(self.heads, SCRATCH_ELEMENTS // per_head)
        whole = self.part_heads == self.heads
        self.part_batch = _largest_divisor(self.batch, SCRATCH_ELEMENTS // per_head // self.heads) if whole else 1
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
        out_tokens = self.places.tokens(out)
        for part in self.parts():
            mixed = self.mixed(self.summaries(part))[-1]
            result = torch.bmm(self.queries(part), mixed, out=self.token_buffer("result", self.columns))
            if self.normalize:
                result[..., self.width].add_(self.eps)
                if denominators is not None:
                    kept = denominators[part]
                    kept.copy_(result[..., self.width].view(kept.shape))
            result = self.places.from_blocks(result, out_tokens[part].shape)
            self._write_quotient(result, out_tokens[part])
        return out, denominators

    def gradients(self, grad: Tensor, denominators: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of query, key, value and the mixing factors, where `needed`, from the gradient of the output."""
        wanted = zip(self.inputs, needed[:3], strict=True)
        grads = [torch.empty(x.shape, dtype=x.dtype) if need else None for x, need in wanted]
        targets = [None if x is None else self.places.tokens(x) for x in grads]
        wanted = zip(self.factors, needed[3:], strict=True)
        factor_grads = [torch.zeros_like(factor) if need else None for factor, need in wanted]
        grad_tokens = self.places.tokens(grad)
        for part in self.parts():
            stages = self.mixed(self.summaries(part))
            keys, values, queries = self.buffers["keys"], self.buffers["values"], self.queries(part)
            out_grad = self.token_buffer("result", self.columns)
            self.places.to_blocks(grad_tokens[part], out_grad)
            if self.normalize:
                out_grad[..., self.width :] = 0
                denominator = denominators[part].view(-1, self.block_size, 1)
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
                self._write_gradient(query_grad, queries, self.query[part], targets[0][part])

            self.places.clear_padding(out_grad, self.num_blocks)
            summary_grad = torch.bmm(queries.mT, out_grad, out=self.summary_buffer("summaries grad"))
            summary_grad = self._unmix(summary_grad, stages, factor_grads)
            if targets[1] is not None:
                key_grad = torch.bmm(values, summary_grad.mT, out=self.token_buffer("features grad", self.dim))
                self._hide(key_grad, part)
                self._write_gradient(key_grad, keys, self.key[part], targets[1][part])
            if targets[2] is not None:
                value_grad = torch.bmm(keys, summary_grad, out=self.token_buffer("result", self.columns))
                value_grad = self.places.from_blocks(value_grad, targets[2][part].shape)
                targets[2][part].copy_(value_grad[..., : self.width])
        return [*grads, *factor_grads]

    def summaries(self, part: Part) -> Tensor:
        """S and z of every block, (n * M, D, columns); leaves `keys` and `values` in their buffers."""
        keys = self.token_buffer("keys", self.dim)
        self.places.to_blocks(self.key[part], keys, self.feature_map)
        self.places.clear_padding(keys, self.num_blocks)
        self._hide(keys, part)
        if "values" not in self.buffers:
            values = self.token_buffer("values", self.columns)
            values[..., self.width :] = 0
            values[..., self.width : self.width + 1] = 1
        values = self.buffers["values"]
        self.places.to_blocks(self.value[part], values)
        return torch.bmm(keys.mT, values, out=self.summary_buffer("summaries"))

    def queries(self, part: Part) -> Tensor:
        queries = self.token_buffer("queries", self.dim)
        self.places.to_blocks(self.query[part], queries, self.feature_map)
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
        """(n * M, D, columns) as (blocks before the axis, along it, the rest)."""
        counts = [factor.shape[0] for factor in self.factors]
        heads = self.part_batch * self.part_heads
        return summaries.view(heads * math.prod(counts[:axis]), counts[axis], -1)

    def token_buffer(self, name: str, columns: int) -> Tensor:
        return self._buffer(name, self.block_size, columns)

    def summary_buffer(self, name: str) -> Tensor:
        return self._buffer(name, self.dim, self.columns)

    def _buffer(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self.buffers:
            count = self.part_batch * self.part_heads * self.num_blocks
            self.buffers[name] = torch.empty(count, rows, columns, dtype=self.dtype)
        return self.buffers[name]

    def _hide(self, keys: Tensor, part: Part) -> None:
        if self.hidden is not None:
            seen = keys.view(self.part_batch, self.part_heads, self.num_blocks, self.block_size, self.dim)
            seen.masked_fill_(self.hidden[part[0]], 0)

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

    def __init__(self, layout: BlockLayout) -> None:
        axes = len(layout.grid)
        cuts = zip(layout.grid, layout.blocks, strict=True)
        self.split = [n for length, count in cuts for n in (count, length // count)]
        self.order = (0, 2 * axes + 1, *range(1, 2 * axes + 1, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 2)

    def tokens(self, x: Tensor) -> Tensor:
        """A view of (B, N, H, D) as (B, H, counts…, sizes…, D)."""
        return x.unflatten(1, self.split).permute(self.order)

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

    def __init__(self, layout: BlockLayout) -> None:
        self.token_of_slot, is_token, self.slot_of_token = layout.slots()
        self.padding = (~is_token).nonzero().flatten()

    def tokens(self, x: Tensor) -> Tensor:
        """A view of (B, N, H, D) as (B, H, N, D)."""
        return x.transpose(1, 2)

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
