"""Attention that is causal in time: the streaming state with which a video's frames are attended to in order."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .attention import check_mixing, check_shapes, full_mixing, saturating_cast
from .causal import temporal_causal_mixing
from .errors import UserError
from .feature_maps import no_autocast
from .kernels.plain import Mixing, head_blocks
from .layout import BlockLayout


class TemporalState:
    """What attention under a temporal-causal mixing must remember of the frames so far.

    The frames of one block in time come together, `next_frames` at a time, and see one another and all earlier ones.
    Feeding a video in this order gives what `mhla_attention` gives on all of it with
    `temporal_causal_mixing(mixing, blocks)`, gradients included. The state holds one (D, E) summary per head and block
    that was fed; frames cost O(D E) per token, and mixing the summaries once per block.

    Args:
        mixing: (M, M), or one (n_a, n_a) matrix per axis; what it says of later frames is not used.
        layout: the grid (frames, height, width) of the whole video and its blocks.
        normalize, eps: as for `mhla_attention`.

    Raises:
        UserError: for a grid without three axes, or a mixing of other blocks.
    """

    def __init__(self, mixing: Mixing, layout: BlockLayout, normalize: bool = True, eps: float = 1e-6) -> None:
        if len(layout.grid) != 3:
            raise UserError(f"layout has grid={layout.grid}; expected three axes, (frames, height, width).")
        check_mixing(mixing, layout)
        self.mixing = full_mixing(temporal_causal_mixing(mixing, layout.blocks))
        self.layout = layout
        self.normalize, self.eps = normalize, eps
        frames, count = layout.grid[0], layout.blocks[0]
        lengths = [(i + 1) * frames // count - i * frames // count for i in range(count)]
        self.waiting = [(i, length) for i, length in enumerate(lengths) if length]  # blocks in time and their frames
        self.seen: list[int] = []  # blocks in time that were fed
        self.summaries: list[Tensor] = []  # of each of these, (B, H, blocks in space, D, E)
        self.normalisers: list[Tensor] = []  # likewise (B, H, blocks in space, D)

    @property
    def next_frames(self) -> int:
        """Frames that `extend` takes next; 0 after the last."""
        return self.waiting[0][1] if self.waiting else 0

    def extend(self, query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Attend with the tokens of the next `next_frames` frames.

        Args:
            query, key: features φ(q), φ(k), (B, T, H, D) with T = next_frames * height * width.
            value: (B, T, H, E).
            rotary: (query, key) with rotary embedding applied, for the numerator.

        Returns:
            (B, T, H, E) in `value`'s dtype; sums run in float32, in float64 for float64 input.

        Raises:
            UserError: for another number of tokens, tokens after the last frame, or shapes that disagree.
        """
        if not self.waiting:
            raise UserError(f"all {self.layout.grid[0]} frames of grid={self.layout.grid} were fed; make a new state.")
        here = BlockLayout((self.next_frames, *self.layout.grid[1:]), (1, *self.layout.blocks[1:]))
        check_shapes(query, key, value, here, rotary)
        self._check_earlier(query, value)
        with no_autocast(query):
            queries, keys = (head_blocks(x, here) for x in (query, key))
            moved_queries, moved_keys = (head_blocks(x, here) for x in rotary) if rotary else (queries, keys)
            self.seen.append(self.waiting.pop(0)[0])
            self.summaries.append(moved_keys.mT @ head_blocks(value, here))
            self.normalisers.append(keys.sum(dim=-2))
            weights = self._weights(here.num_blocks).to(queries.dtype)
            out = moved_queries @ _mixed(self.summaries, weights)
            if self.normalize:
                normaliser = _mixed(self.normalisers, weights)
                denominator = torch.einsum("bhmld,bhmd->bhml", queries, normaliser)
                out = out / (denominator.unsqueeze(-1) + self.eps)
            return saturating_cast(here.from_blocks(rearrange(out, "b h m l e -> b m l h e")), value.dtype)

    def _weights(self, per_time: int) -> Tensor:
        """Of all blocks seen so far for those seen last, (blocks in space, blocks seen)."""
        by_time = self.mixing.unflatten(1, (-1, per_time)).unflatten(0, (-1, per_time))
        return by_time[self.seen[-1]][:, self.seen].flatten(1)

    def _check_earlier(self, query: Tensor, value: Tensor) -> None:
        if not self.summaries:
            return
        batch, heads, _, dim, width = self.summaries[0].shape
        if (query.shape[0], *query.shape[2:], value.shape[3]) != (batch, heads, dim, width):
            raise UserError(
                f"query {tuple(query.shape)} and value {tuple(value.shape)} must agree with the earlier frames: "
                f"batch {batch}, {heads} heads, dimension {dim}, value dimension {width}."
            )


def _mixed(summaries: list[Tensor], weights: Tensor) -> Tensor:
    """Σ_b weights_ib x_b over the blocks of all tensors (B, H, M, ...)."""
    together = torch.cat(summaries, dim=2)
    return (weights @ together.flatten(3)).unflatten(3, together.shape[3:])
