"""Causal multi-head linear attention: the chunkwise parallel form, its dense reference, and the streaming state.

Chunks of the sequence take the place of token blocks. A query in chunk i reads the whole chunks before it through the
mixing, and the tokens of its own chunk up to itself (paper, section 4.2):

    H_i = Q_i Σ_{b<i} m_ib S_b + m_ii (Q_i K_iᵀ ⊙ tril) V_i
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from .attention import Mixing, check_mixing, check_normaliser, check_shapes, saturating_cast
from .errors import UserError
from .feature_maps import accumulation_dtype, no_autocast
from .layout import BlockLayout, check_counts


def causal_mhla_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    chunk_size: int = 64,
    normalize: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Causal multi-head linear attention in chunkwise parallel form, O(N C D + N D² + M² D²) per feature head.

    Args:
        query, key: features φ(q), φ(k), (B, N, H, D).
        value: (B, N, H, E).
        mixing: (M, M) for M = ceil(N / chunk_size) chunks, row = chunk of the query; only its lower triangle is used.
        chunk_size: C, tokens per chunk; the last chunk may be shorter.
        normalize: divide by φ(q) times the keys, weighted and masked as in the numerator, plus `eps`.
        eps: added to the denominator, so an all-zero query gives zero.

    Returns:
        (B, N, H, E) in `value`'s dtype. Sums run in the widest dtype of the input, at least float32, autocast or not;
        a float16 result saturates instead of overflowing.

    Raises:
        UserError: when shapes disagree.
    """
    check_shapes(query, key, value)
    _check_chunks(query, mixing, chunk_size)
    check_normaliser(normalize, eps)
    with no_autocast(query):
        wide = accumulation_dtype(query, key, value)
        tokens = (query.to(wide), key.to(wide), _with_ones(value.to(wide), normalize))
        queries, keys, values = (_chunks(x, chunk_size) for x in tokens)
        weights = mixing.to(queries.dtype)
        summaries = keys.mT @ values  # (B, H, M, D, E)
        past = (weights.tril(-1) @ summaries.flatten(3)).reshape(summaries.shape)
        within = weights.diagonal()[:, None, None] * (queries @ keys.mT).tril()  # (B, H, M, C, C)
        out = rearrange(queries @ past + within @ values, "b h m c e -> b (m c) h e")[:, : query.shape[1]]
        return _finish(out, normalize, eps, value.dtype)


def causal_mhla_attention_matrix(
    query: Tensor,
    key: Tensor,
    mixing: Tensor,
    chunk_size: int = 64,
    normalize: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """The N×N matrix that `causal_mhla_attention` applies without forming it: the reference for tests and diagnostics.

    A[q, t] = m[chunk(q), chunk(t)] φ(q)·φ(k_t) for t ≤ q and zero after, each row divided by its sum plus eps.

    Args: as for `causal_mhla_attention`.

    Returns:
        (B, H, N, N) float64; `A @ value` (per head) is the output.
    """
    check_shapes(query, key, key)
    _check_chunks(query, mixing, chunk_size)
    check_normaliser(normalize, eps)
    chunk = torch.arange(query.shape[1], device=query.device) // chunk_size
    weights = mixing.to(torch.float64)[chunk][:, chunk].tril()
    matrix = weights * torch.einsum("bqhd,bthd->bhqt", query.to(torch.float64), key.to(torch.float64))
    return matrix / (matrix.sum(dim=-1, keepdim=True) + eps) if normalize else matrix


class CausalState:
    """What causal attention must remember of the tokens so far, so that new ones come one by one or many at a time.

    Holds one (B, H, D, E) summary per past chunk, their mixture for the current chunk (computed once, when the chunk
    begins) and the current chunk's own summary. A token costs O(D E) per head plus, once per chunk, the mixture. Any
    sequence of `step` and `extend` gives what `causal_mhla_attention` gives on the whole sequence, gradients included.

    Args:
        mixing: (M, M), as for `causal_mhla_attention`; M * chunk_size is the longest sequence.
        chunk_size: tokens per chunk.
        normalize, eps: as for `causal_mhla_attention`.

    Raises:
        UserError: for a mixing that is not square, a chunk size below 1, tokens beyond the longest sequence, or tokens
            that disagree with earlier ones in batch, heads or dimension.
    """

    def __init__(self, mixing: Tensor, chunk_size: int = 64, normalize: bool = False, eps: float = 1e-6) -> None:
        _check_chunk_size(chunk_size)
        check_normaliser(normalize, eps)
        _check_matrix(mixing)
        if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1]:
            raise UserError(f"mixing has shape {tuple(mixing.shape)}; expected (M, M), one row and column per chunk.")
        self.mixing = mixing
        self.chunk_size = chunk_size
        self.normalize = normalize
        self.eps = eps
        self.num_tokens = 0
        self.summaries: list[Tensor] = []  # of the complete chunks, (B, H, D, E) each
        self.past: Tensor | None = None  # Σ_{b<i} m_ib S_b for the current chunk i
        self.current: Tensor | None = None  # the current chunk's own summary

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with one new token: query and key (B, H, D), value (B, H, E) to (B, H, E) in `value`'s dtype."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor) or x.ndim != 3:
                what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
                raise UserError(f"{name} has {what}; step expects one token, (batch, heads, dimension).")
        return self.extend(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)).squeeze(1)

    def extend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with T new tokens: query and key (B, T, H, D), value (B, T, H, E) to (B, T, H, E) in its dtype.

        Sums run in the widest dtype of these and earlier tokens, at least float32.
        """
        check_shapes(query, key, value)
        self._check_tokens(query, value)
        with no_autocast(query):
            known = () if self.current is None else (self.current,)
            wide = accumulation_dtype(query, key, value, *known)
            self.past, self.current = (x if x is None else x.to(wide) for x in (self.past, self.current))
            tokens = (query.to(wide), key.to(wide), _with_ones(value.to(wide), self.normalize))
            queries, keys, values = (rearrange(x, "b t h d -> b h t d") for x in tokens)
            outs, start, new_tokens = [], 0, query.shape[1]
            while start < new_tokens:
                left_in_chunk = self.chunk_size - self.num_tokens % self.chunk_size
                stop = min(start + left_in_chunk, new_tokens)
                outs.append(self._within_chunk(*(x[:, :, start:stop] for x in (queries, keys, values))))
                start = stop
            out = torch.cat(outs, dim=2) if outs else values  # no token, no output
            return _finish(rearrange(out, "b h t e -> b t h e"), self.normalize, self.eps, value.dtype)

    def detach_(self) -> CausalState:
        """Cut the gradient to the tokens so far, in place; returns the state (for truncated back-propagation)."""
        self.summaries = [summary.detach() for summary in self.summaries]
        self.past, self.current = (x if x is None else x.detach() for x in (self.past, self.current))
        return self

    def _within_chunk(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Tokens of one chunk, (B, H, T, D) and (B, H, T, E): the output before division; updates the state."""
        chunk = self.num_tokens // self.chunk_size
        if self.num_tokens % self.chunk_size == 0:
            self._begin_chunk(chunk, key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]))
        own = query @ self.current + (query @ key.mT).tril() @ value
        out = query @ self.past + self.mixing[chunk, chunk].to(query.dtype) * own
        self.current = self.current + key.mT @ value
        self.num_tokens += query.shape[2]
        return out

    def _begin_chunk(self, chunk: int, zero: Tensor) -> None:
        if self.current is not None:
            self.summaries.append(self.current)
        self.past, self.current = zero, zero
        if chunk > 0:
            weights = self.mixing[chunk, :chunk].to(zero.dtype)
            self.past = torch.tensordot(weights, torch.stack([x.to(zero.dtype) for x in self.summaries]), dims=1)

    def _check_tokens(self, query: Tensor, value: Tensor) -> None:
        longest = self.mixing.shape[0] * self.chunk_size
        if self.num_tokens + query.shape[1] > longest:
            raise UserError(
                f"query has {query.shape[1]} tokens after {self.num_tokens} earlier ones, but mixing "
                f"{tuple(self.mixing.shape)} with chunk_size={self.chunk_size} covers {longest}."
            )
        if self.current is not None:
            batch, heads, dim, width = self.current.shape
            width -= self.normalize
            if (*query.shape[::2], query.shape[3], value.shape[3]) != (batch, heads, dim, width):
                raise UserError(
                    f"query {tuple(query.shape)} and value {tuple(value.shape)} must agree with the earlier tokens: "
                    f"batch {batch}, {heads} heads, dimension {dim}, value dimension {width}."
                )


def temporal_causal_mixing(mixing: Mixing, blocks: tuple[int, ...]) -> Mixing:
    """`mixing` without the weights from later frames: a query sees blocks of its own and of earlier time indices only.

    The first axis of the grid is time, as in `(frames, height, width)`; tokens inside one block see each other in both
    directions, so the frames of one time index are made together.

    Args:
        mixing: (M, M), or one (n_a, n_a) matrix per axis.
        blocks: block counts per grid axis, time first.

    Returns:
        What was given, with zeros for later frames; differentiable.

    Raises:
        UserError: when `mixing` has neither of the two shapes.
    """
    blocks = check_counts("blocks", blocks)
    layout = BlockLayout(grid=blocks, blocks=blocks)  # a grid with one token per block
    check_mixing(mixing, layout)
    if not isinstance(mixing, Tensor):
        return (mixing[0].tril(), *mixing[1:])
    time = torch.arange(layout.num_blocks, device=mixing.device) // (layout.num_blocks // layout.blocks[0])
    return mixing.masked_fill(time[:, None] < time[None, :], 0)


def _chunks(tokens: Tensor, chunk_size: int) -> Tensor:
    """(B, N, H, D) to (B, H, M, C, D), the last chunk filled up with zeros."""
    missing = -tokens.shape[1] % chunk_size
    padded = F.pad(tokens, (0, 0, 0, 0, 0, missing))
    return rearrange(padded, "b (m c) h d -> b h m c d", c=chunk_size)


def _with_ones(value: Tensor, normalize: bool) -> Tensor:
    """The denominator is the numerator of a value that is 1: carried along as one more channel."""
    return F.pad(value, (0, 1), value=1.0) if normalize else value


def _finish(out: Tensor, normalize: bool, eps: float, dtype: torch.dtype) -> Tensor:
    if normalize:
        out = out[..., :-1] / (out[..., -1:] + eps)
    return saturating_cast(out, dtype)


def _check_chunk_size(chunk_size: int) -> None:
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise UserError(f"chunk_size={chunk_size!r} must be a positive integer.")


def _check_matrix(mixing: Tensor) -> None:
    if not isinstance(mixing, Tensor) or not mixing.is_floating_point():
        what = mixing.dtype if isinstance(mixing, Tensor) else f"a {type(mixing).__name__}"
        raise UserError(f"mixing is {what}; expected a tensor of floating-point numbers.")


def _check_chunks(query: Tensor, mixing: Tensor, chunk_size: int) -> None:
    _check_chunk_size(chunk_size)
    chunks = -(-query.shape[1] // chunk_size)
    _check_matrix(mixing)
    if tuple(mixing.shape) != (chunks, chunks):
        raise UserError(
            f"mixing has shape {tuple(mixing.shape)}, but {query.shape[1]} tokens in chunks of chunk_size={chunk_size} "
            f"need ({chunks}, {chunks})."
        )
