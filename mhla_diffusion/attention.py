"""Multi-head linear attention as functions of tensors, and its dense reference.

The notation is that of *MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head* (section 4):
token block b keeps a key-value summary S_b and a normaliser z_b; a query in block i reads Σ_b m_ib S_b.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from einops import rearrange
from torch import Tensor

from .errors import UserError
from .feature_maps import at_least_float32, no_autocast
from .layout import BlockLayout

Mixing = Tensor | Sequence[Tensor]


def mhla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Mixing,
    layout: BlockLayout,
    normalize: bool = True,
    eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Multi-head linear attention over token blocks, O(N D² + M² D²) time and O(M D²) memory per feature head.

    Args:
        query, key: features φ(q), φ(k), (B, N, H, D).
        value: (B, N, H, E).
        mixing: (M, M), row = block of the query; or one (n_a, n_a) matrix per grid axis, standing for their Kronecker
            product (separable mixing).
        layout: the token grid and its blocks.
        normalize: divide by φ(q)·z̃ of the query's own block; otherwise the bare numerator.
        eps: added to the denominator, so an all-zero query gives zero.
        rotary: (query, key) with rotary embedding applied; used in the numerator only, while the denominator stays
            nonnegative with the unrotated features.
        key_mask: (B, N) bool, True where a token may be attended to.

    Returns:
        (B, N, H, E) in `value`'s dtype. Sums run in float32 (float64 for float64 input), autocast or not; a float16
        result saturates instead of overflowing.

    Raises:
        UserError: when shapes disagree.
    """
    check_shapes(query, key, value, layout, rotary, key_mask)
    check_mixing(mixing, layout)
    with no_autocast(query):
        numerator_query, numerator_key = rotary if rotary is not None else (query, key)
        key_blocks = _head_blocks(_masked(numerator_key, key_mask), layout)  # (B, H, M, L, D)
        summaries = key_blocks.mT @ _head_blocks(value, layout, zero_padding=False)  # (B, H, M, D, E)
        query_blocks = _head_blocks(numerator_query, layout, zero_padding=False)
        out = query_blocks @ mix_blocks(summaries, mixing, layout)  # (B, H, M, L, E)
        if normalize:
            if rotary is not None:
                key_blocks = _head_blocks(_masked(key, key_mask), layout)
                query_blocks = _head_blocks(query, layout, zero_padding=False)
            normaliser = mix_blocks(key_blocks.sum(dim=-2), mixing, layout)  # (B, H, M, D)
            # einsum, because a batched matrix-vector product is several times slower on CPUs.
            denominator = torch.einsum("bhmld,bhmd->bhml", query_blocks, normaliser)
            out = out / (denominator.unsqueeze(-1) + eps)
        out = layout.from_blocks(rearrange(out, "b h m l e -> b m l h e"))
        return saturating_cast(out, value.dtype)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normalize: bool = True,
    eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Vanilla linear attention (Katharopoulos et al. 2020): all queries share one summary. As `mhla_attention`."""
    check_shapes(query, key, value, None, rotary, key_mask)
    with no_autocast(query):
        numerator_query, numerator_key = rotary if rotary is not None else (query, key)
        numerator_query, numerator_key, values = (
            rearrange(at_least_float32(x), "b n h d -> b h n d")
            for x in (numerator_query, _masked(numerator_key, key_mask), value)
        )
        out = numerator_query @ (numerator_key.mT @ values)
        if normalize:
            normaliser = at_least_float32(_masked(key, key_mask)).sum(dim=1)  # (B, H, D)
            out = out / (rearrange(at_least_float32(query), "b n h d -> b h n d") @ normaliser.unsqueeze(-1) + eps)
        return saturating_cast(rearrange(out, "b h n e -> b n h e"), value.dtype)


def mhla_attention_matrix(
    query: Tensor,
    key: Tensor,
    mixing: Mixing,
    layout: BlockLayout,
    normalize: bool = True,
    eps: float = 1e-6,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """The N×N matrix that `mhla_attention` applies without forming it: the reference for tests and diagnostics.

    A[q, t] = m[block(q), block(t)] φ(q)·φ(k_t), each row divided by its sum over the unrotated features plus eps.

    Args: as for `mhla_attention`.

    Returns:
        (B, H, N, N) float64; `A @ value` (per head) is the output.
    """
    check_shapes(query, key, key, layout, rotary, key_mask)
    check_mixing(mixing, layout)
    block = layout.block_index(query.device)
    weights = full_mixing(mixing).to(torch.float64)[block][:, block]  # (N, N)
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :]

    def scores(q: Tensor, k: Tensor) -> Tensor:
        return weights * torch.einsum("bqhd,bthd->bhqt", q.to(torch.float64), k.to(torch.float64))

    matrix = scores(*rotary) if rotary is not None else scores(query, key)
    if normalize:
        matrix = matrix / (scores(query, key).sum(dim=-1, keepdim=True) + eps)
    return matrix


def mix_blocks(summaries: Tensor, mixing: Mixing, layout: BlockLayout) -> Tensor:
    """Σ_b m_ib x_b along the block axis (axis 2) of (B, H, M, ...); same shape and dtype."""
    if isinstance(mixing, Tensor):
        flat = summaries.flatten(3)
        return (mixing.to(flat.dtype) @ flat).reshape(summaries.shape)
    mixed = summaries.unflatten(2, layout.blocks)
    for axis, matrix in enumerate(mixing, start=2):
        mixed = torch.movedim(torch.tensordot(matrix.to(mixed.dtype), mixed, dims=([1], [axis])), 0, axis)
    return mixed.reshape(summaries.shape)


def full_mixing(mixing: Mixing) -> Tensor:
    """The (M, M) matrix: `mixing` itself, or the Kronecker product of its factors."""
    return mixing if isinstance(mixing, Tensor) else reduce(torch.kron, [m.contiguous() for m in mixing])


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; float16 saturates at its largest value, as diffusers' linear attention does, instead of inf."""
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def _head_blocks(tokens: Tensor, layout: BlockLayout, zero_padding: bool = True) -> Tensor:
    """(B, N, H, D) to (B, H, M, L, D) in the accumulation dtype; padding of keys must be zero, others drop out."""
    return at_least_float32(layout.to_blocks(rearrange(tokens, "b n h d -> b h n d"), 2, zero_padding))


def _masked(key: Tensor, key_mask: Tensor | None) -> Tensor:
    return key if key_mask is None else key.masked_fill(~key_mask[:, :, None, None], 0)


def check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> None:
    """Raise a UserError unless the tensors agree with one another and with the layout."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise UserError(f"{name} has shape {tuple(x.shape)}; expected (batch, tokens, heads, head dimension).")
    if query.shape != key.shape:
        raise UserError(f"query {tuple(query.shape)} and key {tuple(key.shape)} must have the same shape.")
    if value.shape[:3] != key.shape[:3]:
        raise UserError(f"value {tuple(value.shape)} must match key {tuple(key.shape)} in batch, tokens and heads.")
    if layout is not None and query.shape[1] != layout.num_tokens:
        raise UserError(f"query has {query.shape[1]} tokens, but grid={layout.grid} has {layout.num_tokens}.")
    if rotary is not None and (rotary[0].shape[:3] != query.shape[:3] or rotary[0].shape != rotary[1].shape):
        raise UserError(
            f"rotary=({tuple(rotary[0].shape)}, {tuple(rotary[1].shape)}) must be a rotated query and key that agree "
            f"with query {tuple(query.shape)} in batch, tokens and heads."
        )
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != key.shape[:2]):
        raise UserError(
            f"key_mask {tuple(key_mask.shape)} {key_mask.dtype} must be bool of shape {tuple(key.shape[:2])}, "
            "True where a token may be attended to."
        )


def check_mixing(mixing: Mixing, layout: BlockLayout) -> None:
    """Raise a UserError unless the mixing is (M, M) or has one matrix per axis of the layout."""
    m = layout.num_blocks
    if isinstance(mixing, Tensor):
        shapes, expected = [tuple(mixing.shape)], [(m, m)]
    else:
        shapes, expected = [tuple(x.shape) for x in mixing], [(n, n) for n in layout.blocks]
    if shapes != expected:
        raise UserError(
            f"mixing has shape {', '.join(map(str, shapes))}, but blocks={layout.blocks} needs ({m}, {m}), or for "
            f"separable mixing one matrix per axis: {', '.join(str((n, n)) for n in layout.blocks)}."
        )
