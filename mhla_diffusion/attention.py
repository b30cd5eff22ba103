"""Multi-head linear attention as functions of tensors, and its dense reference.

The notation is that of *MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head* (section 4):
token block b keeps a key-value summary S_b and a normaliser z_b; a query in block i reads Σ_b m_ib S_b.
"""

from __future__ import annotations

from functools import reduce

import torch
from einops import rearrange
from torch import Tensor

from . import kernels
from .errors import UserError
from .feature_maps import ELEMENTWISE, accumulation_dtype, no_autocast
from .kernels.plain import Mixing, masked, saturating_cast
from .layout import BlockLayout


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
    feature_map: str = "identity",
    backend: str | None = None,
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
        feature_map: "relu", "relu_eps" or "elu" where query and key are still to be mapped, which costs less here than
            before; not together with `rotary`, which comes after φ.
        backend: "plain", "cpu", "native" (compiled C++) or "triton" to force a way to compute; None takes that of the
            environment variable MHLA_BACKEND, or the fastest. Results differ by rounding.

    Returns:
        (B, N, H, E) in `value`'s dtype. Sums run in the widest dtype of the input, at least float32, autocast or not;
        a float16 result saturates instead of overflowing.

    Raises:
        UserError: when shapes disagree, or for a feature map or backend that cannot be used.
    """
    check_mixing(mixing, layout)
    check_shapes(query, key, value, layout, rotary, key_mask)
    check_normaliser(normalize, eps)
    if not isinstance(feature_map, str) or feature_map not in ELEMENTWISE:
        raise UserError(f"feature_map={feature_map!r} is not elementwise; known: {', '.join(ELEMENTWISE)}.")
    if rotary is not None and feature_map != "identity":
        raise UserError(f"feature_map={feature_map!r} must have been applied before rotary; leave it out.")
    parts = {"mixing": [mixing] if isinstance(mixing, Tensor) else mixing, "key_mask": [key_mask], "value": [value]}
    for name, x in ((name, x) for name, tensors in parts.items() for x in tensors):
        if x is not None and x.device != query.device:
            raise UserError(f"{name} is on {x.device}, but query on {query.device}.")
    return kernels.attend(query, key, value, mixing, layout, normalize, eps, rotary, key_mask, feature_map, backend)


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
    check_normaliser(normalize, eps)
    with no_autocast(query):
        wide = accumulation_dtype(query, key, value, *(rotary or ()))
        numerator_query, numerator_key = rotary if rotary is not None else (query, key)
        numerator_query, numerator_key, values = (
            rearrange(x.to(wide), "b n h d -> b h n d")
            for x in (numerator_query, masked(numerator_key, key_mask), value)
        )
        out = numerator_query @ (numerator_key.mT @ values)
        if normalize:
            normaliser = masked(key, key_mask).to(wide).sum(dim=1)  # (B, H, D)
            out = out / (rearrange(query.to(wide), "b n h d -> b h n d") @ normaliser.unsqueeze(-1) + eps)
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
    check_mixing(mixing, layout)
    check_shapes(query, key, key, layout, rotary, key_mask)
    check_normaliser(normalize, eps)
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


def full_mixing(mixing: Mixing) -> Tensor:
    """The (M, M) matrix: `mixing` itself, or the Kronecker product of its factors."""
    return mixing if isinstance(mixing, Tensor) else reduce(torch.kron, [m.contiguous() for m in mixing])


def check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: BlockLayout | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
) -> None:
    """Raise a UserError unless the tensors agree with one another and with the layout."""
    tensors = {"query": query, "key": key, "value": value}
    if rotary is not None:
        if isinstance(rotary, Tensor) or len(rotary) != 2:
            raise UserError("rotary must be a pair: query and key with rotary embedding applied.")
        tensors |= {"rotary[0]": rotary[0], "rotary[1]": rotary[1]}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = str(x.dtype) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UserError(f"{name} is {what}; expected a tensor of floating-point numbers.")
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
    if key_mask is not None and not isinstance(key_mask, Tensor):
        raise UserError(f"key_mask is a {type(key_mask).__name__}; expected a bool tensor.")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != key.shape[:2]):
        raise UserError(
            f"key_mask {tuple(key_mask.shape)} {key_mask.dtype} must be bool of shape {tuple(key.shape[:2])}, "
            "True where a token may be attended to."
        )


def check_normaliser(normalize: bool, eps: float) -> None:
    """Raise a UserError unless these can say how to normalise."""
    if not isinstance(normalize, bool):
        raise UserError(f"normalize={normalize!r} must be True or False.")
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise UserError(f"eps={eps!r} must be a number.")


def check_mixing(mixing: Mixing, layout: BlockLayout) -> None:
    """Raise a UserError unless the mixing is (M, M) or has one matrix per axis of the layout."""
    if not isinstance(layout, BlockLayout):
        raise UserError(f"layout={layout!r} must be a BlockLayout(grid, blocks).")
    parts = (mixing,) if isinstance(mixing, Tensor) else mixing
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
        raise UserError(f"mixing is a {type(mixing).__name__}; expected a tensor, or one tensor per axis.")
    if not all(part.is_floating_point() for part in parts):
        raise UserError(f"mixing is {parts[0].dtype}; expected floating-point numbers.")
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
