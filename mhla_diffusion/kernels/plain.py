"""The operator in plain PyTorch: any device and dtype, and what the other ways are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from ..feature_maps import accumulation_dtype, no_autocast
from ..layout import BlockLayout

Mixing = Tensor | Sequence[Tensor]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Mixing,
    layout: BlockLayout,
    normalize: bool,
    eps: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """`mhla_attention` of tensors that were checked, after the feature map."""
    with no_autocast(query):
        wide = accumulation_dtype(query, key, value, *(rotary or ()))
        numerator_query, numerator_key = rotary if rotary is not None else (query, key)
        key_blocks = head_blocks(masked(numerator_key, key_mask), layout, wide)  # (B, H, M, L, D)
        summaries = key_blocks.mT @ head_blocks(value, layout, wide, zero_padding=False)  # (B, H, M, D, E)
        query_blocks = head_blocks(numerator_query, layout, wide, zero_padding=False)
        out = query_blocks @ mix_blocks(summaries, mixing, layout)  # (B, H, M, L, E)
        if normalize:
            if rotary is not None:
                key_blocks = head_blocks(masked(key, key_mask), layout, wide)
                query_blocks = head_blocks(query, layout, wide, zero_padding=False)
            normaliser = mix_blocks(key_blocks.sum(dim=-2), mixing, layout)  # (B, H, M, D)
            # einsum, because a batched matrix-vector product is several times slower on CPUs.
            denominator = torch.einsum("bhmld,bhmd->bhml", query_blocks, normaliser)
            out = out / (denominator.unsqueeze(-1) + eps)
        out = layout.from_blocks(rearrange(out, "b h m l e -> b m l h e"))
        return saturating_cast(out, value.dtype)


def mix_blocks(summaries: Tensor, mixing: Mixing, layout: BlockLayout) -> Tensor:
    """Σ_b m_ib x_b along the block axis (axis 2) of (B, H, M, ...); same shape and dtype."""
    if isinstance(mixing, Tensor):
        flat = summaries.flatten(3)
        return (mixing.to(flat.dtype) @ flat).reshape(summaries.shape)
    mixed = summaries.unflatten(2, layout.blocks)
    for axis, matrix in enumerate(mixing, start=2):
        mixed = torch.movedim(torch.tensordot(matrix.to(mixed.dtype), mixed, dims=([1], [axis])), 0, axis)
    return mixed.reshape(summaries.shape)


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; float16 saturates at its largest value, as diffusers' linear attention does, instead of inf."""
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def masked(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """`key` (B, N, H, D) with zeros where `key_mask` (B, N) is False: such a token adds nothing to any sum."""
    return key if key_mask is None else key.masked_fill(~key_mask[:, :, None, None], 0)


def head_blocks(tokens: Tensor, layout: BlockLayout, dtype: torch.dtype, zero_padding: bool = True) -> Tensor:
    """(B, N, H, D) to (B, H, M, L, D) in `dtype`; padding of keys must be zero, others drop out."""
    return layout.to_blocks(rearrange(tokens, "b n h d -> b h n d"), 2, zero_padding).to(dtype)
