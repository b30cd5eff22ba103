"""Written-out forms that the operator is compared with: NumPy loops over tokens, sharing no code with the library,
and the cases that it is tested with."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mhla_diffusion import BlockLayout

# Examples here are tiny, but the first one pays for imports and allocations.
property_settings = settings(deadline=None, max_examples=40, derandomize=True)


@st.composite
def grids_and_blocks(draw, max_length: int = 7, max_count: int = 4, max_tokens: int = 72):
    """Grids of one to three axes with block counts that need not divide them and may exceed them."""
    axes = draw(st.integers(1, 3))
    lengths = st.integers(1, max_length)
    grid = draw(st.tuples(*[lengths] * axes).filter(lambda g: np.prod(g) <= max_tokens))
    blocks = draw(st.tuples(*[st.integers(1, max_count)] * axes))
    return grid, blocks


def blocks_of_tokens(grid: tuple[int, ...], blocks: tuple[int, ...]) -> list[int]:
    """The block of each token, by looking every coordinate up among the cuts floor(i * G / n)."""
    result = []
    for coordinates in itertools.product(*(range(length) for length in grid)):
        block = 0
        for x, length, count in zip(coordinates, grid, blocks, strict=True):
            inside = [i for i in range(count) if i * length // count <= x < (i + 1) * length // count]
            assert len(inside) == 1
            block = block * count + inside[0]
        result.append(block)
    return result


def looped_attention(
    query, key, value, mixing, token_blocks, normalize=True, eps=1e-6, rotary=None, key_mask=None, causal=False
):
    """Σ_t m[block(q), block(t)] φ(q)·φ(k_t) v_t for one query after the other, in float64."""
    query, key, value, mixing = (x.detach().double().numpy() for x in (query, key, value, mixing))
    top_query, top_key = (x.detach().double().numpy() for x in rotary) if rotary is not None else (query, key)
    batch, tokens, heads, _ = query.shape
    out = np.zeros(value.shape)
    token_blocks = np.asarray(token_blocks)
    for b, h, n in itertools.product(range(batch), range(heads), range(tokens)):
        weights = mixing[token_blocks[n], token_blocks].copy()
        if key_mask is not None:
            weights[~key_mask[b].numpy()] = 0
        if causal:
            weights[n + 1 :] = 0
        out[b, n, h] = (weights * (top_key[b, :, h] @ top_query[b, n, h])) @ value[b, :, h]
        if normalize:
            out[b, n, h] /= weights @ (key[b, :, h] @ query[b, n, h]) + eps
    return torch.from_numpy(out)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by sequence position: channel pairs (2c, 2c + 1) turned by position / 10^c."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    position = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None]
    angle = position / 10.0 ** torch.arange(pairs.shape[-1], dtype=torch.float64)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


def random_inputs(seed, batch, tokens, heads, dim, value_dim, dtype=torch.float64):
    """Nonnegative query and key features with exact zeros, as relu leaves them, and values of either sign."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(batch, tokens, heads, dim, generator=generator, dtype=dtype).relu() for _ in range(2))
    value = torch.randn(batch, tokens, heads, value_dim, generator=generator, dtype=dtype)
    return query, key, value, generator


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation over the largest expected value."""
    assert result.shape == expected.shape
    result, expected = result.detach().double(), expected.detach().double()
    return ((result - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


LAYOUTS = [
    BlockLayout((6,), (3,)),
    BlockLayout((4, 6), (2, 3)),  # even
    BlockLayout((5, 7), (2, 3)),  # uneven
    BlockLayout((2, 5), (4, 2)),  # empty blocks
    BlockLayout((2, 3, 4), (2, 1, 2)),
    BlockLayout((3, 3, 5), (2, 2, 2)),
    BlockLayout((3, 4), (1, 1)),
]


def random_mixing(layout, separable, generator, dtype=torch.float64):
    counts = layout.blocks if separable else (layout.num_blocks,)
    factors = tuple(torch.rand(n, n, generator=generator, dtype=dtype) for n in counts)
    return factors if separable else factors[0]


@st.composite
def cases(draw):
    grid, blocks = draw(grids_and_blocks())
    layout = BlockLayout(grid, blocks)
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dim, value_dim = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 9))
    query, key, value, generator = random_inputs(
        draw(st.integers(0, 2**16)), batch, layout.num_tokens, heads, dim, value_dim
    )
    mixing = random_mixing(layout, draw(st.booleans()), generator)
    options = {"normalize": draw(st.booleans())}
    if draw(st.booleans()):
        options["rotary"] = (rotated(query), rotated(key))
    if draw(st.booleans()):
        options["key_mask"] = torch.rand(batch, layout.num_tokens, generator=generator) < 0.7
    scratch = draw(st.sampled_from([1, 200, 2**18]))
    return (query, key, value, mixing, layout), options, scratch


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out
