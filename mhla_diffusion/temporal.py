"""Attention that is causal in time: the streaming state with which a video's frames are attended to in order."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .attention import check_mixing, check_normaliser, check_shapes, full_mixing, saturating_cast
from .causal import temporal_causal_mixing
from .errors import UserError
from .feature_maps import accumulation_dtype, no_autocast
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
        check_mixing(mixing, layout)
        check_normaliser(normalize, eps)
        if len(layout.grid) != 3:
            raise UserError(f"layout has grid={layout.grid}; expected three axes, (frames, height, width).")
        self.mixing = full_mixing(temporal_causal_mixing(mixing, layout.blocks))
        self.layout = layout
        self.normalize, self.eps = normalize, eps
        frames = BlockLayout(layout.grid[:1], layout.blocks[:1]).block_sizes
        self.waiting = [(i, length) for i, length in enumerate(frames) if length]  # blocks in time and their frames
        self.seen: list[int] = []  # blocks in time that were fed
        self.summaries: list[Tensor] = []  # of each of these, (B, H, blocks in space, D, E)
        self.normalisers: list[Tensor] = []  # likewise (B, H, blocks in space, D)
        self.is_rotated: bool | None = None  # whether these frames came with rotary embedding; None before the first

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
            (B, T, H, E) in `value`'s dtype; sums run in the widest dtype of these and earlier frames, at least float32.

        Raises:
            UserError: for another number of tokens, tokens after the last frame, shapes that disagree, or rotary given
                for some frames only. The state then is as before the call.
        """
        if not self.waiting:
            raise UserError(f"all {self.layout.grid[0]} frames of grid={self.layout.grid} were fed; make a new state.")
        here = BlockLayout((self.next_frames, *self.layout.grid[1:]), (1, *self.layout.blocks[1:]))
        check_shapes(query, key, value, here, rotary)
        numerator_query, numerator_key = rotary if rotary is not None else (query, key)
        self._check_earlier(query, numerator_query, value, rotary is not None)
        with no_autocast(query):
            wide = accumulation_dtype(query, key, value, numerator_query, numerator_key, *self.summaries)
            moved_keys, values = (head_blocks(x, here, wide) for x in (numerator_key, value))
            seen = [*self.seen, self.waiting[0][0]]
            summaries = [*self.summaries, moved_keys.mT @ values]
            normalisers = [*self.normalisers, head_blocks(key, here, wide).sum(dim=-2)]
            weights = self._weights(seen, here.num_blocks).to(wide)
            out = head_blocks(numerator_query, here, wide) @ _mixed(summaries, weights)
            if self.normalize:
                normaliser = _mixed(normalisers, weights)
                denominator = torch.einsum("bhmld,bhmd->bhml", head_blocks(query, here, wide), normaliser)
                out = out / (denominator.unsqueeze(-1) + self.eps)
            out = saturating_cast(here.from_blocks(rearrange(out, "b h m l e -> b m l h e")), value.dtype)
        self.seen, self.summaries, self.normalisers = seen, summaries, normalisers
        self.waiting, self.is_rotated = self.waiting[1:], rotary is not None
        return out

    def _weights(self, seen: list[int], per_time: int) -> Tensor:
        """Of all blocks seen for those seen last, (blocks in space, blocks seen)."""
        by_time = self.mixing.unflatten(1, (-1, per_time)).unflatten(0, (-1, per_time))
        return by_time[seen[-1]][:, seen].flatten(1)

    def _check_earlier(self, query: Tensor, numerator_query: Tensor, value: Tensor, is_rotated: bool) -> None:
        if self.is_rotated is None:
            return
        if is_rotated != self.is_rotated:
            given = "with" if self.is_rotated else "without"
            raise UserError(f"rotary must be given for all frames or for none; the earlier ones came {given} it.")
        batch, heads, _, dim = self.normalisers[0].shape
        numerator_dim, width = self.summaries[0].shape[3:]
        expected = (batch, heads, dim, numerator_dim, width)
        if (query.shape[0], *query.shape[2:], numerator_query.shape[3], value.shape[3]) != expected:
            raise UserError(
                f"query {tuple(query.shape)} and value {tuple(value.shape)} must agree with the earlier frames: "
                f"batch {batch}, {heads} heads, dimension {dim} ({numerator_dim} in the numerator), value dimension "
                f"{width}."
            )


def _mixed(summaries: list[Tensor], weights: Tensor) -> Tensor:
    """Σ_b weights_ib x_b over the blocks of all tensors (B, H, M, ...), in the weights' dtype."""
    together = torch.cat(summaries, dim=2).to(weights.dtype)
    return (weights @ together.flatten(3)).unflatten(3, together.shape[3:])
