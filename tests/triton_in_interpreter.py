"""The Triton kernels in Triton's interpreter, on the CPU, against the plain path: run by test_triton.py.

Its own process, because Triton reads TRITON_INTERPRET when it is imported and other libraries import it, too.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from operator_reference import random_inputs, rotated

from mhla_diffusion import BlockLayout, mhla_attention
from mhla_diffusion.errors import UserError

CASES = [
    # layout, heads, dim, value dim, feature map, options
    (BlockLayout((4, 6), (2, 3)), 2, 8, 8, "relu", {"normalize": True, "batch": 2}),
    (BlockLayout((5, 7), (2, 3)), 1, 20, 24, "elu", {"normalize": True, "mask": True}),
    (BlockLayout((2, 5), (4, 2)), 2, 8, 5, "relu_eps", {"normalize": True, "separable": True}),
    (BlockLayout((3, 3, 5), (2, 2, 2)), 1, 8, 12, "identity", {"normalize": False, "rotary": True}),
    (BlockLayout((23,), (3,)), 1, 8, 40, "identity", {"normalize": True, "rotary": True, "mask": True}),
    (BlockLayout((9, 16), (1, 2)), 1, 8, 8, "relu", {"normalize": True}),  # several tiles of tokens
    (BlockLayout((4, 4), (2, 2)), 1, 130, 136, "relu", {"normalize": True}),  # several tiles of values
]


def run(case, dtype, backend):
    """The output and all gradients, in float64; inputs of every dtype are the same numbers."""
    layout, heads, dim, width, feature_map, options = case
    batch = options.get("batch", 1)
    query, key, value, generator = random_inputs(0, batch, layout.num_tokens, heads, dim, width)
    if feature_map in ("relu", "relu_eps", "elu"):
        query, key = query - 0.3, key - 0.3
    counts = layout.blocks if options.get("separable") else (layout.num_blocks,)
    factors = [torch.rand(n, n, generator=generator, dtype=torch.float64) for n in counts]
    downstream = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    pair = [rotated(query), rotated(key)] if "rotary" in options else []
    exact = dtype == torch.float64
    half = torch.bfloat16 if exact or dtype == torch.float32 else dtype  # representable in every dtype compared
    leaves = [x.to(half).to(dtype).requires_grad_() for x in (query, key, value, *pair)]
    factors = [m.float().to(torch.float64 if exact else torch.float32).requires_grad_() for m in factors]
    mask = torch.rand(batch, layout.num_tokens, generator=generator) < 0.7 if "mask" in options else None
    out = mhla_attention(
        *leaves[:3],
        factors if options.get("separable") else factors[0],
        layout,
        options["normalize"],
        1e-3,
        tuple(leaves[3:]) or None,
        mask,
        feature_map,
        backend,
    )
    out.backward(downstream.to(half).to(out.dtype))
    return [None if x is None else x.double() for x in (out, *(x.grad for x in (*leaves, *factors)))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].grid}-{case[4]}")
def test_float32_equals_the_plain_path_in_float64(case):
    results = run(case, torch.float32, "triton"), run(case, torch.float64, "plain")
    # One scale for all: with one block and a normaliser the gradient of the mixing is nothing but rounding.
    largest = max(expected.abs().max().item() for expected in results[1] if expected is not None)
    for found, expected in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * largest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_off_by_its_rounding_only(dtype):
    case = (BlockLayout((2, 6), (1, 3)), 1, 8, 8, "relu", {"normalize": True})
    found, expected = run(case, dtype, "triton"), run(case, dtype, "plain")
    for fast, plain in zip(found, expected, strict=True):
        assert (fast - plain).abs().max() <= 4 * torch.finfo(dtype).eps * plain.abs().max()


def test_noncontiguous_inputs_are_read_where_they_lie():
    layout = BlockLayout((4, 5), (2, 2))
    packed = torch.rand(3, 2, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    views = [x.transpose(1, 2) for x in packed[:2]] + [packed[2].transpose(1, 2)[..., ::2]]
    mixing = torch.rand(4, 4, generator=torch.Generator().manual_seed(1)).T
    out = mhla_attention(*views, mixing, layout, backend="triton")
    expected = mhla_attention(*(x.contiguous() for x in views), mixing, layout, backend="plain")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_float16_saturates():
    x = torch.full((1, 16, 1, 16), 200.0, dtype=torch.float16)
    out = mhla_attention(x, x, x, torch.ones(1, 1), BlockLayout((16,), (1,)), normalize=False, backend="triton")
    assert (out == 65504).all()


@pytest.mark.parametrize(
    ("dtype", "dim", "sentence"),
    [
        (torch.float64, 8, "backend='triton' takes float32, bfloat16 and float16, not float64"),
        (torch.float32, 300, "backend='triton' takes heads of at most 256 dimensions, not 300"),
    ],
)
def test_what_the_kernels_cannot_take_is_refused(dtype, dim, sentence):
    x = torch.ones(1, 4, 1, dim, dtype=dtype)
    with pytest.raises(UserError, match=f"^{sentence}"):
        mhla_attention(x, x, x, torch.ones(1, 1), BlockLayout((4,), (1,)), backend="triton")
