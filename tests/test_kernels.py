"""Every way to compute the operator against the plain one, and against the loops of operator_reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_reference import (
    LAYOUTS,
    blocks_of_tokens,
    cases,
    looped_attention,
    property_settings,
    random_inputs,
    random_mixing,
    relative_error,
    rotated,
)

from mhla_diffusion import BlockLayout, BlockMixing, mhla_attention
from mhla_diffusion.attention import full_mixing
from mhla_diffusion.errors import UserError
from mhla_diffusion.feature_maps import ELEMENTWISE, at_least_float32
from mhla_diffusion.kernels import choose_backend, cpu, native


@given(cases())
@property_settings
def test_cpu_path_equals_the_loops_over_tokens_however_the_heads_are_split(case):
    (query, key, value, mixing, layout), options, scratch = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "SCRATCH_ELEMENTS", scratch)
        out = mhla_attention(query, key, value, mixing, layout, backend="cpu", **options)
    token_blocks = blocks_of_tokens(layout.grid, layout.blocks)
    expected = looped_attention(query, key, value, full_mixing(mixing), token_blocks, **options)
    assert relative_error(out, expected) <= 1e-10


@given(cases(), st.sampled_from(sorted(ELEMENTWISE)))
@property_settings
def test_cpu_gradients_equal_those_of_the_plain_path(case, feature_map):
    (query, key, value, mixing, layout), options, scratch = case
    generator = torch.Generator().manual_seed(0)
    if "rotary" not in options:
        options["feature_map"] = feature_map
        query, key = (x - x.flip(1) for x in (query, key))  # of either sign
        if feature_map == "identity":
            options["normalize"] = False
    factors = [mixing] if isinstance(mixing, torch.Tensor) else list(mixing)
    leaves = [query, key, value, *factors, *options.get("rotary", ())]
    downstream = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    gradients = {}
    for backend in ("plain", "cpu"):
        q, k, v, *rest = copies = [x.clone().requires_grad_() for x in leaves]
        if "rotary" in options:
            *rest, options["rotary"] = *rest[:-2], tuple(rest[-2:])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "SCRATCH_ELEMENTS", scratch)
            out = mhla_attention(
                q, k, v, rest[0] if len(factors) == 1 else rest, layout, backend=backend, eps=1e-3, **options
            )
            out.backward(downstream)
        gradients[backend] = [out, *(x.grad for x in copies)]
    for plain, fast in zip(gradients["plain"], gradients["cpu"], strict=True):
        assert (plain is None) == (fast is None)  # without a normaliser, what is not rotated is not read
        if plain is not None:
            torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9 * max(1.0, plain.abs().max().item()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_cpu_backward_is_the_derivative_of_its_forward(layout, separable, normalize, rotary):
    query, key, value, generator = random_inputs(0, 2, layout.num_tokens, 2, 4, 3)
    mixing = random_mixing(layout, separable, generator)
    factors = mixing if separable else (mixing,)
    mask = torch.arange(layout.num_tokens).expand(2, -1) % 5 > 0

    def attention(q, k, v, *rest):
        pair = rest[len(factors) :] if rotary else None
        m = rest[: len(factors)] if separable else rest[0]
        return mhla_attention(q, k, v, m, layout, normalize, 1e-2, pair, mask, backend="cpu")

    inputs = [query + 0.1, key + 0.1, value, *factors, *((rotated(query), rotated(key)) if rotary else ())]
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in inputs], fast_mode=True)


@pytest.mark.parametrize("feature_map", ["relu", "relu_eps", "elu", "identity"])
def test_second_derivatives_exist(feature_map):
    layout = BlockLayout((3, 4), (2, 2))
    query, key, value, generator = random_inputs(0, 1, 12, 2, 3, 2)
    mixing = random_mixing(layout, False, generator)

    def attention(q, k, v, m):
        return mhla_attention(q, k, v, m, layout, eps=1e-2, feature_map=feature_map, backend="cpu")

    inputs = [x.requires_grad_() for x in (query + 0.1, key + 0.1, value, mixing)]
    assert torch.autograd.gradgradcheck(attention, inputs, fast_mode=True)


def test_gradients_of_a_tensor_that_is_query_and_key_add_up_in_first_and_second_order():
    layout = BlockLayout((3, 4), (2, 2))
    query, _, value, generator = random_inputs(0, 1, 12, 2, 3, 2)
    mixing = random_mixing(layout, False, generator)

    def attention(q):
        return mhla_attention(q, q, value, mixing, layout, eps=1e-2, backend="cpu")

    query = (query + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(attention, query) and torch.autograd.gradgradcheck(attention, query)


@pytest.mark.parametrize("needed", itertools.product([False, True], repeat=4))
def test_only_the_gradients_that_are_asked_for_are_made(needed):
    layout = BlockLayout((3, 5), (2, 2))
    query, key, value, generator = random_inputs(0, 2, 15, 2, 3, 2)
    leaves = [query, key, value, random_mixing(layout, False, generator)]
    gradients = {}
    for backend in ("plain", "cpu"):
        copies = [x.clone().requires_grad_(need) for x, need in zip(leaves, needed, strict=True)]
        out = mhla_attention(*copies, layout, backend=backend)
        assert out.requires_grad == any(needed)
        if any(needed):
            out.square().sum().backward()
        gradients[backend] = [x.grad for x in copies]
    for plain, fast, need in zip(gradients["plain"], gradients["cpu"], needed, strict=True):
        assert (fast is not None) == need
        if need:
            torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("feature_map", ["relu", "elu"])
def test_half_precision_is_as_exact_as_the_plain_path(dtype, layout, feature_map):
    """Both paths against float64: the fast one may be off by what storing inputs' gradients and outputs loses."""
    query, key, value, generator = random_inputs(0, 2, layout.num_tokens, 3, 8, 8)
    query, key = (x - 0.3 for x in (query, key))
    mixing = random_mixing(layout, False, generator)
    downstream = torch.randn(value.shape, generator=generator)
    results = {}
    for name, backend, to in (("exact", "plain", torch.float64), ("plain", "plain", dtype), ("cpu", "cpu", dtype)):
        copies = [x.to(dtype).to(to).requires_grad_() for x in (query, key, value)]
        weights = mixing.float().to(at_least_float32(copies[0]).dtype).requires_grad_()
        out = mhla_attention(*copies, weights, layout, feature_map=feature_map, eps=1e-3, backend=backend)
        out.backward(downstream.to(dtype).to(to))
        results[name] = [x.double() for x in (out, *(x.grad for x in (*copies, weights)))]
        assert out.dtype == to and copies[0].grad.dtype == to
    for exact, plain, fast in zip(*results.values(), strict=True):
        allowed = 2 * (plain - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (fast - exact).abs().max() <= allowed


def test_float16_saturates_and_its_gradient_stops_there_as_in_the_plain_path():
    layout = BlockLayout((4, 4), (2, 2))
    query, key, value, _ = random_inputs(0, 1, 16, 1, 4, 4, dtype=torch.float32)
    query, key, value = (x.mul(60).half() for x in (query, key, value))
    results = []
    for backend in ("plain", "cpu"):
        copies = [x.clone().requires_grad_() for x in (query, key, value)]
        out = mhla_attention(*copies, torch.ones(4, 4), layout, normalize=False, backend=backend)
        assert out.isfinite().all() and (out.abs() == 65504).any() and (out.abs() < 65504).any()
        out.float().mul(1e-6).sum().backward()
        results.append([out, *(x.grad for x in copies)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_noncontiguous_tensors_and_gradients_give_the_same(layout):
    generator = torch.Generator().manual_seed(0)
    packed = torch.rand(3, 2, 3, layout.num_tokens, 8, generator=generator, dtype=torch.float64)
    query, key, value = (x.transpose(1, 2)[..., ::2] for x in packed)
    key = key[:1].expand(2, -1, -1, -1)
    mixing = torch.rand(layout.num_blocks, layout.num_blocks, generator=generator, dtype=torch.float64).T
    downstream = torch.rand(1, 1, 3, 4, generator=generator, dtype=torch.float64).expand(value.shape)
    results = []
    for copy in (torch.clone, lambda x: x.clone(memory_format=torch.contiguous_format)):
        leaves = [copy(x).requires_grad_() for x in (query, key, value, mixing)]
        if copy is torch.clone:
            leaves = [x.detach().requires_grad_() for x in (query, key, value, mixing)]
        out = mhla_attention(*leaves, layout, backend="cpu")
        results.append([out, *torch.autograd.grad(out, leaves, downstream)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)


def test_inputs_are_left_as_they_are_and_two_calls_agree_to_the_bit():
    layout = BlockLayout((5, 7), (2, 3))
    query, key, value, generator = random_inputs(0, 2, 35, 4, 8, 6, dtype=torch.float32)
    mixing = random_mixing(layout, False, generator, torch.float32)
    mask = torch.arange(35).expand(2, -1) % 4 > 0
    results = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (query, key, value, mixing)]
        out = mhla_attention(*leaves, layout, key_mask=mask, feature_map="relu", backend="cpu")
        out.square().sum().backward()
        for leaf, before in zip(leaves, (query, key, value, mixing), strict=True):
            assert torch.equal(leaf, before)
        results.append([out, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fused_feature_maps_equal_those_applied_before():
    layout = BlockLayout((4, 6), (2, 3))
    query, key, value, generator = random_inputs(0, 1, 24, 2, 4, 4)
    query, key = (x - 0.3 for x in (query, key))
    mixing = random_mixing(layout, False, generator)
    for (name, function), backend in itertools.product(ELEMENTWISE.items(), ("plain", "cpu")):
        fused = mhla_attention(query, key, value, mixing, layout, False, feature_map=name, backend=backend)
        before = mhla_attention(function(query), function(key), value, mixing, layout, False, backend=backend)
        torch.testing.assert_close(fused, before)


def test_backend_is_chosen_by_the_tensors_unless_it_is_forced(monkeypatch):
    on_cpu, elsewhere = torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 2, device="meta")
    fastest = "cpu" if native.why_not_compiled() else "native"
    assert choose_backend([on_cpu]) == fastest
    assert choose_backend([on_cpu], feature_map="elu") == choose_backend([on_cpu.double()]) == "cpu"
    assert choose_backend([elsewhere]) == "plain"
    monkeypatch.setenv("MHLA_BACKEND", "plain")
    assert choose_backend([on_cpu]) == "plain"
    assert choose_backend([on_cpu], "cpu") == "cpu"
    assert choose_backend([on_cpu], "auto") == fastest


@pytest.mark.parametrize(
    ("backend", "device", "sentence"),
    [
        ("fast", "cpu", "is unknown; known: auto, plain, cpu, native, triton"),
        ("cpu", "meta", "takes tensors on the CPU, not on meta; leave it out"),
        ("native", "meta", "takes tensors on the CPU, not on meta; leave it out"),
        ("triton", "meta", "takes tensors on a GPU, not on meta; leave it out"),
        ("triton", "cpu", "takes tensors on a GPU, not on cpu; leave it out"),
    ],
)
def test_backend_that_cannot_be_used_is_refused_in_one_sentence(backend, device, sentence, monkeypatch):
    x = torch.ones(1, 4, 1, 2, device=device)
    layout = BlockLayout((2, 2), (1, 1))
    with pytest.raises(UserError, match=f"^backend='{backend}' {sentence}"):
        mhla_attention(x, x, x, torch.ones(1, 1, device=device), layout, backend=backend)
    monkeypatch.setenv("MHLA_BACKEND", backend)
    with pytest.raises(UserError, match=f"^MHLA_BACKEND='{backend}' {sentence}"):
        mhla_attention(x, x, x, torch.ones(1, 1, device=device), layout)


def test_feature_maps_that_the_kernels_do_not_know_are_refused():
    x = torch.ones(1, 4, 1, 2)
    layout, mixing = BlockLayout((2, 2), (1, 1)), torch.ones(1, 1)
    with pytest.raises(UserError, match="feature_map='hedgehog' is not elementwise; known: relu, relu_eps, elu"):
        mhla_attention(x, x, x, mixing, layout, feature_map="hedgehog")
    with pytest.raises(UserError, match="feature_map='relu' must have been applied before rotary"):
        mhla_attention(x, x, x, mixing, layout, rotary=(x, x), feature_map="relu")


def test_transformed_functions_take_the_plain_path():
    layout = BlockLayout((2, 3), (2, 1))
    query, key, value, generator = random_inputs(0, 3, 6, 1, 4, 2)
    mixing = random_mixing(layout, False, generator)

    def attention(q, k, v):
        return mhla_attention(q[None], k[None], v[None], mixing, layout)[0]

    expected = mhla_attention(query, key, value, mixing, layout, backend="plain")
    torch.testing.assert_close(torch.func.vmap(attention)(query, key, value), expected)


def test_the_fast_path_keeps_less_for_the_backward_pass_than_its_inputs():
    layout = BlockLayout((16, 16), (4, 4))
    query, key, value, _ = random_inputs(0, 1, 256, 4, 16, 16, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        mhla_attention(*leaves, BlockMixing((4, 4))(), layout, backend="cpu")
    inputs = {x.data_ptr() for x in leaves}
    extra = sum(x.numel() for x in kept if x.data_ptr() not in inputs)
    assert kept and extra <= 256 * 4 + 16 * 16  # denominators and mixing


def test_gradients_of_many_outputs_at_once_and_forward_gradients():
    layout = BlockLayout((4, 4), (2, 2))
    query, key, value, generator = random_inputs(0, 1, 16, 2, 3, 3)
    mixing = torch.rand(4, 4, generator=generator, dtype=torch.float64)
    query.requires_grad_()

    def attention(q, backend=None):
        return mhla_attention(q, key, value, mixing, layout, feature_map="elu", backend=backend)

    seeds = torch.randn(5, *value.shape, generator=generator, dtype=torch.float64)
    for create_graph in (False, True):
        (found,) = torch.autograd.grad(attention(query), query, seeds, is_grads_batched=True, create_graph=create_graph)
        for seed, gradient in zip(seeds, found, strict=True):
            (expected,) = torch.autograd.grad(attention(query, "cpu"), query, seed)
            assert relative_error(gradient, expected) < 1e-10
    tangent = torch.randn(query.shape, generator=generator, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        out = attention(torch.autograd.forward_ad.make_dual(query.detach(), tangent))
        forward = torch.autograd.forward_ad.unpack_dual(out).tangent
    (backward,) = torch.autograd.grad(attention(query), query, seeds[0])
    assert abs((forward * seeds[0]).sum() - (backward * tangent).sum()) < 1e-10
    for factors in (mixing, [mixing[:2, :2], mixing[2:, 2:]]):
        with torch.autograd.forward_ad.dual_level():
            leaf = factors if factors is mixing else factors[1]
            moved = torch.autograd.forward_ad.make_dual(leaf, torch.ones_like(leaf))
            given = moved if factors is mixing else [factors[0], moved]
            out = mhla_attention(query.detach(), key, value, given, layout, False, feature_map="elu")
            forward = torch.autograd.forward_ad.unpack_dual(out).tangent
        ones = torch.ones_like(leaf)  # without the normaliser the output is linear in each factor
        given = ones if factors is mixing else [factors[0], ones]
        expected = mhla_attention(query.detach(), key, value, given, layout, False, feature_map="elu")
        assert relative_error(forward, expected) < 1e-10


@pytest.mark.parametrize("grid", [(4, 4), (5, 4)])
@pytest.mark.parametrize(("dim", "width", "batch"), [(0, 3, 1), (3, 0, 1), (3, 3, 0)])
def test_tensors_without_elements(grid, dim, width, batch):
    layout = BlockLayout(grid, (2, 2))
    query, key = torch.rand(2, batch, layout.num_tokens, 2, dim)
    out = mhla_attention(query, key, torch.rand(batch, layout.num_tokens, 2, width), torch.ones(4, 4), layout)
    assert out.shape == (batch, layout.num_tokens, 2, width) and not out.any()
