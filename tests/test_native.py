"""The compiled operator against the loops of operator_reference and the plain path, and how it is compiled."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile

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
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusion import BlockLayout, mhla_attention
from mhla_diffusion.attention import full_mixing
from mhla_diffusion.errors import UserError
from mhla_diffusion.kernels import choose_backend, native

needs_compiler = pytest.mark.skipif(
    native.why_not_compiled() is not None, reason=f"no compiled attention: it {native.why_not_compiled()}"
)
LARGER = [
    BlockLayout((24, 20), (3, 2)),  # blocks of more tokens than are handled at once
    BlockLayout((16, 16), (16, 16)),  # one token each
    BlockLayout((13, 17), (5, 4)),
    BlockLayout((6, 8, 10), (3, 4, 5)),
    BlockLayout((61,), (1,)),
]


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def single(x):
    """In float32, and so exact for both sides."""
    return tuple(map(single, x)) if isinstance(x, list | tuple) else x.float()


def outputs_and_gradients(backend, dtype, inputs, mixing, layout, downstream, rotary=(), needed=None, **options):
    factors = [mixing] if isinstance(mixing, torch.Tensor) else list(mixing)
    leaves = [x.detach().to(dtype) for x in (*inputs, *factors, *rotary)]
    for x, need in zip(leaves, needed or [True] * len(leaves), strict=True):
        x.requires_grad_(need)
    used = leaves[3 : 3 + len(factors)]
    if rotary:
        options["rotary"] = tuple(leaves[-2:])
    mixing = used[0] if isinstance(mixing, torch.Tensor) else used
    out = mhla_attention(*leaves[:3], mixing, layout, backend=backend, **options)
    out.backward(downstream.to(out.dtype))
    return [out, *(x.grad for x in leaves)]


@needs_compiler
@given(cases())
@property_settings
def test_it_equals_the_loops_over_tokens(case):
    (query, key, value, mixing, layout), options, _ = case
    query, key, value, mixing = map(single, (query, key, value, mixing))
    if "rotary" in options:
        options["rotary"] = single(options["rotary"])
    out = mhla_attention(query, key, value, mixing, layout, eps=1e-2, backend="native", **options)
    token_blocks = blocks_of_tokens(layout.grid, layout.blocks)
    expected = looped_attention(query, key, value, full_mixing(mixing), token_blocks, eps=1e-2, **options)
    assert out.dtype == torch.float32 and relative_error(out, expected) <= 2e-5


@needs_compiler
@given(cases(), st.sampled_from(sorted(native.FEATURE_MAPS)))
@property_settings
def test_outputs_and_gradients_equal_those_of_the_plain_path_in_float64(case, feature_map):
    (query, key, value, mixing, layout), options, _ = case
    query, key, value, mixing = map(single, (query, key, value, mixing))
    options["rotary"] = single(options.pop("rotary", ()))
    if not options["rotary"]:
        options["feature_map"] = feature_map
        query, key = (x - x.flip(1) for x in (query, key))  # of either sign
        if feature_map == "identity":
            options["normalize"] = False
    compare((query, key, value), mixing, layout, **options)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS + LARGER, ids=str)
@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize(("dim", "width"), [(8, 8), (13, 3), (24, 50), (72, 72)])
def test_it_equals_the_plain_path_for_all_sizes_of_heads_and_numbers_of_threads(layout, separable, dim, width, threads):
    query, key, value, generator = random_inputs(0, 2, layout.num_tokens, 2, dim, width, dtype=torch.float32)
    mixing = random_mixing(layout, separable, generator, torch.float32)
    mask = torch.rand(2, layout.num_tokens, generator=generator) < 0.8
    compare((query - 0.2, key - 0.2, value), mixing, layout, feature_map="relu", key_mask=mask)


def compare(inputs, mixing, layout, eps=0.1, **options):
    generator = torch.Generator().manual_seed(0)
    downstream = torch.randn(inputs[2].shape, generator=generator)
    results = [
        outputs_and_gradients(backend, dtype, inputs, mixing, layout, downstream, eps=eps, **options)
        for backend, dtype in (("plain", torch.float64), ("native", torch.float32))
    ]
    for exact, fast in zip(*results, strict=True):
        assert (exact is None) == (fast is None)
        if exact is not None:
            # The gradient of a mixing of one number cancels to nothing, because the normaliser undoes it.
            scale = max(exact.abs().max().item(), 1.0 if exact.numel() == 1 else 0.01)
            torch.testing.assert_close(fast.double(), exact, rtol=1e-4, atol=1e-4 * scale)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("feature_map", ["relu", "relu_eps"])
def test_bfloat16_is_as_exact_as_the_plain_path(layout, feature_map):
    """Both paths against float64: the fast one may be off by what storing gradients and outputs loses."""
    query, key, value, generator = random_inputs(0, 2, layout.num_tokens, 3, 8, 8)
    inputs = [x.bfloat16() for x in (query - 0.3, key - 0.3, value)]
    mixing = random_mixing(layout, False, generator, torch.float32)
    downstream = torch.randn(value.shape, generator=generator).bfloat16()
    results = {}
    for backend, dtype in (("exact", torch.float64), ("plain", torch.bfloat16), ("native", torch.bfloat16)):
        copies = [x.clone().to(dtype).requires_grad_() for x in inputs]
        weights = mixing.clone().to(torch.float64 if backend == "exact" else torch.float32).requires_grad_()
        path = "plain" if backend == "exact" else backend
        out = mhla_attention(*copies, weights, layout, feature_map=feature_map, eps=1e-3, backend=path)
        out.backward(downstream.to(dtype))
        assert out.dtype == copies[0].grad.dtype == dtype
        results[backend] = [x.double() for x in (out, *(x.grad for x in (*copies, weights)))]
    for exact, plain, fast in zip(*results.values(), strict=True):
        allowed = 2 * (plain - exact).abs().max() + 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (fast - exact).abs().max() <= allowed


@needs_compiler
def test_dtypes_of_query_key_and_value_may_differ():
    layout = BlockLayout((4, 6), (2, 3))
    query, key, value, generator = random_inputs(0, 1, 24, 2, 8, 8, dtype=torch.float32)
    mixing = random_mixing(layout, False, generator)
    for dtypes in itertools.product([torch.float32, torch.bfloat16], repeat=3):
        q, k, v = (x.clone().to(dtype).requires_grad_() for x, dtype in zip((query, key, value), dtypes, strict=True))
        out = mhla_attention(q, k, v, mixing, layout, backend="native")
        out.sum().backward()
        expected = mhla_attention(q.double(), k.double(), v.double(), mixing, layout, backend="plain")
        assert out.dtype == v.dtype and relative_error(out, expected) < (1e-5 if v.dtype == torch.float32 else 1e-2)
        assert [x.grad.dtype for x in (q, k, v)] == list(dtypes)


@needs_compiler
@pytest.mark.parametrize("needed", itertools.product([False, True], repeat=5))
def test_only_the_gradients_that_are_asked_for_are_made(needed):
    layout = BlockLayout((3, 5), (2, 2))
    query, key, value, generator = random_inputs(0, 2, 15, 2, 3, 2, dtype=torch.float32)
    mixing = random_mixing(layout, True, generator, torch.float32)
    arguments = ((query, key, value), mixing, layout, torch.ones(value.shape))
    if not any(needed):
        assert not mhla_attention(query, key, value, mixing, layout, backend="native").requires_grad
        return
    plain = outputs_and_gradients("plain", torch.float32, *arguments, needed=needed)
    fast = outputs_and_gradients("native", torch.float32, *arguments, needed=needed)
    for expected, found, need in zip(plain[1:], fast[1:], needed, strict=True):
        assert (found is not None) == need
        if need:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_noncontiguous_tensors_and_gradients_give_the_same(layout):
    generator = torch.Generator().manual_seed(0)
    packed = torch.rand(3, 2, 3, layout.num_tokens, 8, generator=generator)
    query, key, value = (x.transpose(1, 2) for x in packed)  # heads before tokens
    query, key = query[..., ::2], key[:1, ..., :4].expand(2, -1, -1, -1)
    mixing = torch.rand(layout.num_blocks, layout.num_blocks, generator=generator).T
    downstream = torch.rand(1, 1, 3, 8, generator=generator).expand(value.shape)
    results = []
    for contiguous in (False, True):
        leaves = [x.contiguous() if contiguous else x for x in (query, key, value, mixing)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = mhla_attention(*leaves, layout, backend="native")
        results.append([out, *torch.autograd.grad(out, leaves, downstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
def test_negated_views_are_read_with_their_sign():
    layout = BlockLayout((2, 2), (1, 1))
    value = torch.conj(torch.complex(torch.zeros(1, 4, 1, 2), torch.ones(1, 4, 1, 2))).imag  # a negated view
    out = mhla_attention(torch.ones(1, 4, 1, 2), torch.ones(1, 4, 1, 2), value, torch.ones(1, 1), layout)
    assert value.is_neg() and torch.allclose(out, -torch.ones(1, 4, 1, 2))
    x, mixing = torch.ones(1, 4, 1, 2), torch.conj(torch.complex(torch.zeros(1, 1), torch.ones(1, 1))).imag
    out = mhla_attention(x, x, x, mixing, layout, normalize=False, backend="native")
    assert mixing.is_neg() and torch.allclose(out, torch.full((1, 4, 1, 2), -8.0))


@needs_compiler
def test_inputs_are_left_as_they_are_and_two_calls_agree_to_the_bit(threads):
    layout = BlockLayout((5, 7), (2, 3))
    query, key, value, generator = random_inputs(0, 2, 35, 4, 8, 6, dtype=torch.float32)
    mixing = random_mixing(layout, True, generator, torch.float32)
    mask = torch.arange(35).expand(2, -1) % 4 > 0
    arguments = ((query, key, value), mixing, layout, torch.ones(value.shape))
    before = [x.clone() for x in (query, key, value, *mixing)]
    first, second = (
        outputs_and_gradients("native", torch.float32, *arguments, key_mask=mask, feature_map="relu") for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (query, key, value, *mixing), strict=True))


@needs_compiler
def test_what_is_not_finite_reaches_who_reads_it_and_nobody_else():
    layout = BlockLayout((4, 4), (2, 2))
    query, key, value, _ = random_inputs(0, 2, 16, 2, 9, 4, dtype=torch.float32)
    query, key = query + 0.1, key + 0.1
    spoiled = key.clone()
    spoiled[0, 0, 0, 0] = float("nan")
    out = mhla_attention(query, spoiled, value, torch.ones(4, 4), layout, feature_map="relu", backend="native")
    assert out[0, :, 0].isnan().all() and out[0, :, 1].isfinite().all() and out[1].isfinite().all()
    mixing = torch.ones(4, 4)
    mixing[1, 2] = float("inf")
    downstream = torch.ones(value.shape)
    results = [
        outputs_and_gradients(backend, torch.float32, (query, key, value), mixing, layout, downstream)
        for backend in ("plain", "native")
    ]
    for plain, fast in zip(*results, strict=True):
        assert torch.equal(plain.isfinite(), fast.isfinite()) and not plain.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    layout = BlockLayout((6, 8), (2, 2))
    query, key, value, generator = random_inputs(0, 2, 48, 2, 8, 8, dtype=torch.float32)
    arguments = ((query, key, value), random_mixing(layout, True, generator, torch.float32), layout)
    expected = outputs_and_gradients("native", torch.float32, *arguments, torch.ones(value.shape))
    torch.set_default_dtype(dtype)
    try:
        found = outputs_and_gradients("native", torch.float32, *arguments, torch.ones(value.shape))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@needs_compiler
def test_the_default_device_does_not_matter():
    layout = BlockLayout((5, 3), (2, 3))  # of which nothing is known yet
    query, key, value, _ = random_inputs(0, 1, 15, 1, 4, 4, dtype=torch.float32)
    mixing = torch.rand(6, 6)
    with torch.device("meta"):
        out = mhla_attention(query, key, value, mixing, layout, backend="native")
    assert torch.equal(out, mhla_attention(query, key, value, mixing, layout, backend="native"))


@needs_compiler
def test_tensors_without_numbers_in_memory_are_refused_or_go_elsewhere():
    layout, mixing = BlockLayout((2, 2), (1, 1)), torch.ones(1, 1)
    x = torch.ones(1, 4, 1, 2)
    for backend in (None, "native"):
        with pytest.raises(UserError, match="mixing is on meta, but query on cpu"):
            mhla_attention(x, x, x, mixing.to("meta"), layout, backend=backend)
        with pytest.raises(UserError, match="key_mask is on meta, but query on cpu"):
            mask = torch.ones(1, 4, dtype=torch.bool, device="meta")
            mhla_attention(x, x, x, mixing, layout, key_mask=mask, backend=backend)
    zeros = torch._efficientzerotensor(x.shape)
    assert not mhla_attention(zeros, x, x, mixing, layout).any()
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(UserError, match="takes tensors that have their numbers in memory"):
        mhla_attention(x, freed, x, mixing, layout, backend="native")


@needs_compiler
def test_gradients_that_the_kernel_cannot_read_take_another_way():
    layout, generator = BlockLayout((3, 5), (2, 2)), torch.Generator().manual_seed(0)
    query, key, value = torch.rand(3, 1, 15, 2, 4, generator=generator)
    mixing = torch.rand(4, 4, generator=generator)
    leaf = query.clone().requires_grad_()
    out = mhla_attention(leaf, key, value, mixing, layout, backend="native")
    plain = mhla_attention(leaf, key, value, mixing, layout, backend="plain")
    (found,) = torch.autograd.grad(out, leaf, torch._efficientzerotensor(out.shape), retain_graph=True)
    assert not found.any()
    seeds = torch.randn(3, *out.shape, generator=generator)
    (expected,) = torch.autograd.grad(plain, leaf, seeds, is_grads_batched=True, retain_graph=True)
    found = torch.vmap(lambda seed: torch.autograd.grad(out, leaf, seed, retain_graph=True)[0])(seeds)
    torch.testing.assert_close(found, expected)
    with FlopCounterMode(display=False) as counter:
        (found,) = torch.autograd.grad(out, leaf, seeds[0])
    torch.testing.assert_close(found, expected[0])
    assert counter.get_total_flops() > 0


@needs_compiler
def test_a_graph_that_is_traced_holds_operations_of_torch():
    layout, generator = BlockLayout((4, 4), (2, 2)), torch.Generator().manual_seed(0)
    inputs, others = torch.rand(2, 3, 1, 16, 1, 4, generator=generator)
    mixing = torch.rand(4, 4, generator=generator)
    graph = make_fx(lambda *x: mhla_attention(*x, mixing, layout))(*inputs)
    torch.testing.assert_close(graph(*others), mhla_attention(*others, mixing, layout, backend="plain"))
    with FlopCounterMode(display=False) as counter:
        mhla_attention(*inputs, mixing, layout)
    assert counter.get_total_flops() > 0


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "feature_map", "sentence"),
    [
        (torch.float64, "relu", "takes float32 and bfloat16, not float64"),
        (torch.float16, "relu", "takes float32 and bfloat16, not float16"),
        (torch.float32, "elu", "takes the feature maps identity, relu, relu_eps, not elu"),
    ],
)
def test_what_it_does_not_know_is_refused_in_one_sentence_and_goes_elsewhere_otherwise(dtype, feature_map, sentence):
    x, layout = torch.ones(1, 4, 1, 2, dtype=dtype), BlockLayout((2, 2), (1, 1))
    with pytest.raises(UserError, match=f"^backend='native' {sentence}; leave it out"):
        mhla_attention(x, x, x, torch.ones(1, 1), layout, feature_map=feature_map, backend="native")
    assert mhla_attention(x, x, x, torch.ones(1, 1), layout, feature_map=feature_map).isfinite().all()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A new cache for compiled code, and nothing loaded; as before when the test ends."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))  # compiles in a fraction of the time
    native._load_once.cache_clear()
    yield tmp_path / "mhla_diffusion"
    native._load_once.cache_clear()


def choice():
    x = torch.ones(1, 4, 1, 2)
    assert torch.allclose(mhla_attention(x, x, x, torch.ones(1, 1), BlockLayout((2, 2), (1, 1))), x)
    return choose_backend([x])


@needs_compiler
def test_what_was_compiled_is_found_again(cache, monkeypatch):
    assert choice() == "native"
    (made,) = cache.iterdir()  # nothing else is left there
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native._load_once.cache_clear()
    assert choice() == "native" and list(cache.iterdir()) == [made]


@needs_compiler
def test_a_damaged_file_is_never_opened_but_made_anew(cache, monkeypatch):
    assert choice() == "native"
    (made,) = cache.iterdir()
    whole = made.read_bytes()
    zeros = whole[:20000] + bytes(4000) + whole[24000:]
    for number, content in enumerate((b"", whole[:50], whole[: len(whole) // 2], zeros, whole + b"x")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache / str(number)))
        damaged = cache / str(number) / "mhla_diffusion" / made.name
        damaged.parent.mkdir(parents=True)
        damaged.write_bytes(content)
        assert not native._can_be_trusted(damaged)
        monkeypatch.setattr(native, "_compile", lambda library: library.write_bytes(whole))
        native._load_once.cache_clear()
        assert choice() == "native" and damaged.read_bytes() == whole and len(list(damaged.parent.iterdir())) == 1


@needs_compiler
def test_where_programs_are_forbidden_a_copy_is_opened_elsewhere(cache, monkeypatch):
    assert choice() == "native"
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    native._load_once.cache_clear()
    open_, refused = native._open, []

    def forbidding(path):
        if path.parent == cache:
            refused.append(path)
            raise OSError("failed to map segment from shared object")
        return open_(path)

    monkeypatch.setattr(native, "_open", forbidding)
    assert choice() == "native" and refused


@needs_compiler
def test_what_is_in_the_cache_needs_no_compiler_and_must_not_be_another_users(cache, monkeypatch):
    assert choice() == "native"
    monkeypatch.setenv("PATH", "")
    native._load_once.cache_clear()
    assert choice() == "native"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (made,) = cache.iterdir()
    assert native._can_be_trusted(made) == (made.stat().st_uid == 0)


@needs_compiler
def test_without_a_folder_to_keep_it_in_it_is_compiled_for_one_process(cache, monkeypatch, tmp_path):
    cache.touch()  # a file where the folder should be
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert choice() == "native" and not list(temporary.iterdir())


@needs_compiler
def test_another_source_or_processor_is_compiled_anew(cache, monkeypatch):
    assert choice() == "native"
    monkeypatch.setattr(native, "_processor", lambda: "another")
    native._load_once.cache_clear()
    assert choice() == "native" and len(list(cache.iterdir())) == 2


@needs_compiler
@pytest.mark.parametrize("named", ["false", "no-such-compiler", "'", "g++ -fno-math-errno"])
def test_a_compiler_that_is_named_comes_first_and_others_after_it(cache, monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert choice() == "native"


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    [
        ("", "needs a C++ compiler, and there is none of g++, c++"),
        ("/bin/false", "could not be compiled by /bin/false (no message)"),
        ("/no/such-compiler", "could not be compiled by /no/such-compiler ("),
        ("/bin/true", "could not be compiled by /bin/true (it made no file)"),
    ],
)
def test_without_a_compiler_the_other_code_for_cpus_is_used(cache, monkeypatch, compiler, sentence):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", compiler)
    assert choice() == "cpu"
    x = torch.ones(1, 4, 1, 2)
    with pytest.raises(UserError) as caught:
        mhla_attention(x, x, x, torch.ones(1, 1), BlockLayout((2, 2), (1, 1)), backend="native")
    assert str(caught.value).startswith(f"backend='native' {sentence}")
    assert str(caught.value).endswith("; leave it out to have a backend chosen.")
    assert not cache.exists() or not list(cache.iterdir())


@needs_compiler
def test_processes_that_start_together_compile_side_by_side(cache):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=native.load) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0] and len(list(cache.iterdir())) == 1
