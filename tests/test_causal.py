"""The causal form: parallel against written-out attention, streaming against parallel, and time in video layouts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_reference import (
    LargestTensor,
    blocks_of_tokens,
    looped_attention,
    property_settings,
    random_inputs,
    relative_error,
)

from mhla_diffusion.attention import mhla_attention, mhla_attention_matrix
from mhla_diffusion.causal import (
    CausalState,
    causal_mhla_attention,
    causal_mhla_attention_matrix,
    temporal_causal_mixing,
)
from mhla_diffusion.errors import UserError
from mhla_diffusion.layout import BlockLayout
from mhla_diffusion.mixing import BlockMixing, initial_mixing


@st.composite
def causal_cases(draw):
    """Float64 inputs whose last chunk may be partial, or the only one; the mixing's upper triangle is garbage."""
    tokens, chunk_size = draw(st.integers(1, 24)), draw(st.integers(1, 9))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    query, key, value, generator = random_inputs(draw(st.integers(0, 2**16)), batch, tokens, heads, dim, value_dim)
    chunks = math.ceil(tokens / chunk_size)
    mixing = torch.rand(chunks, chunks, generator=generator, dtype=torch.float64)
    mixing = mixing + torch.full_like(mixing, 1e9).triu(1)
    options = {
        "chunk_size": chunk_size,
        "normalize": draw(st.booleans()),
        "eps": draw(st.sampled_from([1e-6, 0.1])),
    }
    return query, key, value, mixing, options


def written_out(query, key, value, mixing, chunk_size, normalize, eps):
    chunks = [n // chunk_size for n in range(query.shape[1])]
    return looped_attention(query, key, value, mixing, chunks, normalize, eps, causal=True)


def stream(state, query, key, value, pieces):
    """Feed the tokens in pieces: 0 is one token through `step`, n > 0 are n tokens through `extend`."""
    outs, start = [], 0
    for piece in [*pieces, query.shape[1]]:
        if start == query.shape[1]:
            break
        if piece == 0:
            outs.append(state.step(query[:, start], key[:, start], value[:, start]).unsqueeze(1))
            start += 1
        else:
            part = slice(start, start + piece)
            outs.append(state.extend(query[:, part], key[:, part], value[:, part]))
            start = min(start + piece, query.shape[1])
    return torch.cat(outs, dim=1)


@given(causal_cases())
@property_settings
def test_parallel_form_equals_written_out_causal_attention(case):
    query, key, value, mixing, options = case
    out = causal_mhla_attention(query, key, value, mixing, **options)
    assert relative_error(out, written_out(query, key, value, mixing, **options)) <= 1e-10


@given(causal_cases())
@property_settings
def test_dense_reference_equals_written_out_causal_attention(case):
    query, key, value, mixing, options = case
    matrix = causal_mhla_attention_matrix(query, key, mixing, **options)
    assert matrix.dtype == torch.float64
    assert not matrix.triu(1).any()
    out = torch.einsum("bhqt,bthe->bqhe", matrix, value)
    assert relative_error(out, written_out(query, key, value, mixing, **options)) <= 1e-10


@given(causal_cases(), st.data())
@property_settings
def test_streaming_in_any_pieces_equals_the_parallel_form(case, data):
    query, key, value, mixing, options = case
    pieces = data.draw(st.lists(st.integers(0, 12), max_size=query.shape[1]))
    state = CausalState(mixing, **options)
    out = stream(state, query, key, value, pieces)
    assert state.num_tokens == query.shape[1]
    assert relative_error(out, written_out(query, key, value, mixing, **options)) <= 1e-10


@pytest.mark.parametrize("normalize", [True, False])
def test_token_by_token_and_chunk_by_chunk_equal_the_parallel_form(normalize):
    query, key, value, generator = random_inputs(0, 2, 21, 2, 4, 3)
    mixing = torch.rand(5, 5, generator=generator, dtype=torch.float64)
    options = {"chunk_size": 5, "normalize": normalize}
    expected = causal_mhla_attention(query, key, value, mixing, **options)
    for pieces in ([0] * 21, [5] * 5, [21], [3, 0, 0, 7, 5, 0]):
        assert relative_error(stream(CausalState(mixing, **options), query, key, value, pieces), expected) <= 1e-10


def test_one_chunk_is_causal_linear_attention_by_cumulative_sums():
    query, key, value, _ = random_inputs(0, 2, 9, 2, 4, 3)
    one = torch.ones(1, 1, dtype=torch.float64)
    summaries = torch.einsum("bnhd,bnhe->bnhde", key, value).cumsum(dim=1)
    numerator = torch.einsum("bnhd,bnhde->bnhe", query, summaries)
    denominator = (query * key.cumsum(dim=1)).sum(dim=-1, keepdim=True)
    assert relative_error(causal_mhla_attention(query, key, value, one, chunk_size=9), numerator) <= 1e-10
    out = causal_mhla_attention(query, key, value, one, chunk_size=64, normalize=True, eps=1e-3)
    assert relative_error(out, numerator / (denominator + 1e-3)) <= 1e-10


@given(causal_cases(), st.data())
@property_settings
def test_later_tokens_have_no_influence(case, data):
    query, key, value, mixing, options = case
    seen = data.draw(st.integers(1, query.shape[1]))
    before = causal_mhla_attention(query, key, value, mixing, **options)
    for x in (query, key, value):
        x[:, seen:] = 55.0
    after = causal_mhla_attention(query, key, value, mixing, **options)
    assert torch.equal(before[:, :seen], after[:, :seen])


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_both_forms_are_those_of_finite_differences(normalize):
    query, key, value, generator = random_inputs(1, 1, 3, 1, 2, 2)
    mixing = torch.rand(2, 2, generator=generator, dtype=torch.float64)
    options = {"chunk_size": 2, "normalize": normalize, "eps": 1e-3}
    inputs = [x.requires_grad_() for x in (query + 0.1, key + 0.1, value, mixing)]
    assert torch.autograd.gradcheck(lambda q, k, v, m: causal_mhla_attention(q, k, v, m, **options), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v, m: stream(CausalState(m, **options), q, k, v, [0]), inputs)


def test_gradients_of_the_streaming_state_equal_those_of_the_parallel_form():
    query, key, value, generator = random_inputs(2, 2, 23, 2, 4, 3)
    mixing = torch.rand(5, 5, generator=generator, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (query, key, value, mixing)]
    weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    parallel = causal_mhla_attention(*inputs, chunk_size=5, normalize=True, eps=0.1)
    streamed = stream(CausalState(mixing, 5, normalize=True, eps=0.1), query, key, value, [0, 0, 9, 5, 0, 4])
    expected = torch.autograd.grad((parallel * weight).sum(), inputs)
    for got, want in zip(torch.autograd.grad((streamed * weight).sum(), inputs), expected, strict=True):
        assert relative_error(got, want) <= 1e-10


def test_detaching_the_state_cuts_gradients_and_keeps_values():
    query, key, value, _ = random_inputs(0, 1, 9, 1, 2, 2)
    mixing = torch.rand(3, 3, dtype=torch.float64)
    key.requires_grad_()
    expected = causal_mhla_attention(query, key, value, mixing, chunk_size=3)
    state = CausalState(mixing, chunk_size=3)
    state.extend(query[:, :5], key[:, :5], value[:, :5])
    assert state.detach_() is state
    out = state.extend(query[:, 5:], key[:, 5:], value[:, 5:])
    assert relative_error(out, expected[:, 5:]) <= 1e-10
    (gradient,) = torch.autograd.grad(out.sum(), key)
    assert not gradient[:, :5].any() and gradient[:, 5:].any()


def test_a_token_costs_the_same_wherever_it_stands_in_its_chunk():
    query, key, value, _ = random_inputs(0, 1, 64, 1, 4, 4, dtype=torch.float32)
    state = CausalState(torch.ones(4, 4), chunk_size=16)
    largest = []
    for n in range(64):
        with LargestTensor() as record:
            state.step(query[:, n], key[:, n], value[:, n])
        largest.append(record.numel)
    assert max(x for n, x in enumerate(largest) if n % 16) <= 4 * 4
    assert max(largest) <= 3 * 4 * 4  # the past summaries, gathered when a chunk begins
    assert len(state.summaries) == 3 and state.summaries[0].shape == (1, 1, 4, 4)


def test_no_tensor_grows_with_the_square_of_the_tokens():
    tokens = 2048
    query, key, value, _ = random_inputs(0, 1, tokens, 1, 8, 8, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    with LargestTensor() as record:
        causal_mhla_attention(*leaves, torch.ones(32, 32), chunk_size=64).sum().backward()
    assert record.numel <= tokens * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [True, False])
def test_half_precision_error_is_that_of_rounding_the_result(dtype, normalize):
    query, key, value, _ = random_inputs(0, 1, 200, 2, 16, 16, dtype=torch.float32)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    mixing = initial_mixing((7,))
    exact = written_out(query, key, value, mixing, 32, normalize, 1e-6)
    for out in (
        causal_mhla_attention(query, key, value, mixing, 32, normalize),
        stream(CausalState(mixing, 32, normalize), query, key, value, [0, 50, 31, 0]),
    ):
        assert out.dtype == dtype
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (out.double() - exact).norm() <= 1.01 * rounding


@pytest.mark.parametrize("normalize", [True, False])
def test_float16_inputs_of_magnitude_100_stay_finite(normalize):
    query, key, value, _ = random_inputs(0, 1, 200, 2, 32, 32, dtype=torch.float32)
    query, key, value = ((x * 100).half() for x in (query, key, value))
    mixing = torch.ones(4, 4)
    for out in (
        causal_mhla_attention(query, key, value, mixing, 64, normalize),
        CausalState(mixing, 64, normalize).extend(query, key, value),
    ):
        assert out.dtype == torch.float16 and out.isfinite().all()
        assert normalize or out.abs().max() == 65504


def test_all_zero_query_gives_zero():
    query, key, value, _ = random_inputs(0, 1, 10, 2, 4, 4, dtype=torch.float32)
    query[:, 6] = 0
    for normalize in (True, False):
        out = causal_mhla_attention(query, key, value, torch.ones(3, 3), 4, normalize, eps=1e-15)
        assert out.isfinite().all() and not out[:, 6].any()


def test_autocast_does_not_change_the_float32_sums():
    query, key, value, _ = random_inputs(0, 1, 20, 2, 4, 4, dtype=torch.float32)
    mixing = initial_mixing((3,))
    expected = causal_mhla_attention(query, key, value, mixing, 8, normalize=True)
    streamed = CausalState(mixing, 8, normalize=True).extend(query, key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(causal_mhla_attention(query, key, value, mixing, 8, normalize=True), expected)
        assert torch.equal(CausalState(mixing, 8, normalize=True).extend(query, key, value), streamed)


def test_noncontiguous_inputs_give_the_same():
    query, key, value, _ = random_inputs(0, 2, 11, 3, 4, 4)
    scattered = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (query, key, value)]
    assert not any(x.is_contiguous() for x in scattered)
    mixing = torch.rand(3, 3, dtype=torch.float64)
    expected = causal_mhla_attention(query, key, value, mixing.T.contiguous(), 4)
    assert relative_error(causal_mhla_attention(*scattered, mixing.T, 4), expected) <= 1e-12


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.booleans(),
)
@property_settings
def test_temporal_causal_mixing_hides_blocks_of_later_frames_only(grid, blocks, separable, normalize):
    layout = BlockLayout(grid, blocks)
    query, key, value, generator = random_inputs(0, 1, layout.num_tokens, 2, 3, 3)
    factors = [torch.rand(n, n, generator=generator, dtype=torch.float64) for n in blocks]
    mixing = factors if separable else torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    masked = temporal_causal_mixing(mixing, blocks)
    matrix = mhla_attention_matrix(query, key, masked, layout, normalize=False)
    everything = mhla_attention_matrix(query, key, mixing, layout, normalize=False)
    time = [block // (blocks[1] * blocks[2]) for block in blocks_of_tokens(grid, blocks)]
    visible = torch.tensor([[later <= now for later in time] for now in time])
    torch.testing.assert_close(matrix, everything * visible)
    out = mhla_attention(query, key, value, masked, layout, normalize)
    dense = torch.einsum("bhqt,bthe->bqhe", mhla_attention_matrix(query, key, masked, layout, normalize), value)
    assert relative_error(out, dense) <= 1e-10


def test_later_frames_have_no_influence_under_temporal_causal_mixing():
    layout = BlockLayout((6, 2, 4), (3, 1, 2))
    query, key, value, _ = random_inputs(0, 1, 48, 2, 3, 3)
    mixing = temporal_causal_mixing(BlockMixing((3, 1, 2))(), (3, 1, 2))
    before = mhla_attention(query, key, value, mixing, layout)
    key[:, 32:], value[:, 32:] = 9.0, 9.0  # frames 4 and 5, the last time index
    after = mhla_attention(query, key, value, mixing, layout)
    assert torch.equal(before[:, :32], after[:, :32])
    assert not torch.equal(before[:, 32:], after[:, 32:])
    key[:, 8:16] = 3.0  # frame 1, in the same block as frame 0
    assert not torch.equal(after[:, :8], mhla_attention(query, key, value, mixing, layout)[:, :8])


@pytest.mark.parametrize("kind", ["full", "separable"])
def test_temporal_causal_mixing_passes_gradients_to_the_visible_weights_only(kind):
    mixing = BlockMixing((3, 2, 1), kind)
    masked = temporal_causal_mixing(mixing(), mixing.blocks)
    torch.stack([m.sum() for m in (masked if kind == "separable" else [masked])]).sum().backward()
    per_time = mixing.weights[0].grad.view(3, -1, 3, mixing.weights[0].shape[0] // 3).amax(dim=(1, 3))
    assert torch.equal(per_time, torch.ones(3, 3).tril())


def tokens(*shape):
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((tokens(2, 9, 4), *[tokens(2, 9, 1, 4)] * 2, tokens(3, 3), 4), r"query has shape \(2, 9, 4\); expected"),
        ((tokens(2, 9, 1, 3), *[tokens(2, 9, 1, 4)] * 2, tokens(3, 3), 4), r"query .* must have the same shape"),
        ((*[tokens(2, 9, 1, 4)] * 2, tokens(2, 8, 1, 4), tokens(3, 3), 4), r"value \(2, 8, 1, 4\) must match key"),
        ((*[tokens(2, 9, 1, 4)] * 3, tokens(2, 2), 4), r"mixing has shape \(2, 2\), but 9 tokens .*need \(3, 3\)"),
        ((*[tokens(2, 9, 1, 4)] * 3, tokens(3, 3), 0), r"chunk_size=0 must be a positive integer"),
        ((*[tokens(2, 9, 1, 4)] * 3, tokens(3, 3), 2.5), r"chunk_size=2.5 must be a positive integer"),
    ],
)
def test_shapes_that_disagree_are_refused_in_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=f"^{sentence}") as error:
        causal_mhla_attention(*arguments)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_the_state_refuses_what_it_cannot_continue_and_stays_as_it_was():
    with pytest.raises(UserError, match=r"^mixing has shape \(2, 3\); expected \(M, M\)"):
        CausalState(tokens(2, 3))
    with pytest.raises(UserError, match="^chunk_size=-1 must be a positive integer"):
        CausalState(tokens(2, 2), chunk_size=-1)
    state = CausalState(torch.ones(2, 2), chunk_size=4, normalize=True)
    state.extend(*[tokens(2, 5, 3, 4)] * 2, tokens(2, 5, 3, 6))
    with pytest.raises(UserError, match=r"^query has 4 tokens after 5 earlier ones, but mixing .* covers 8\.$"):
        state.extend(*[tokens(2, 4, 3, 4)] * 2, tokens(2, 4, 3, 6))
    for query, value in (((1, 1, 3, 4), (1, 1, 3, 6)), ((2, 1, 3, 5), (2, 1, 3, 6)), ((2, 1, 3, 4), (2, 1, 3, 7))):
        with pytest.raises(UserError, match="earlier tokens: batch 2, 3 heads, dimension 4, value dimension 6"):
            state.extend(*[tokens(*query)] * 2, tokens(*value))
    with pytest.raises(UserError, match="step expects one token"):
        state.step(*[tokens(2, 1, 3, 4)] * 2, tokens(2, 1, 3, 6))
    assert state.num_tokens == 5
    assert state.extend(*[tokens(2, 0, 3, 4)] * 2, tokens(2, 0, 3, 6)).shape == (2, 0, 3, 6)
    assert state.extend(*[tokens(2, 3, 3, 4)] * 2, tokens(2, 3, 3, 6)).shape == (2, 3, 3, 6)


def test_temporal_causal_mixing_refuses_a_mixing_of_other_blocks():
    with pytest.raises(UserError, match=r"^mixing has shape \(4, 4\), but blocks=\(3, 2\) needs \(6, 6\)"):
        temporal_causal_mixing(torch.ones(4, 4), (3, 2))
    with pytest.raises(UserError, match=r"^blocks=\(0, 2\) must be one to three positive integers"):
        temporal_causal_mixing(torch.ones(4, 4), (0, 2))


def test_a_state_takes_tokens_of_several_dtypes():
    query, key, value, generator = random_inputs(0, 1, 9, 2, 4, 3)
    mixing = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    expected = causal_mhla_attention(query, key, value, mixing, chunk_size=3)
    state = CausalState(mixing, chunk_size=3)
    for dtypes in ((torch.float64, torch.float32, torch.float64), (torch.float32, torch.float64, torch.float32)):
        state, outs = CausalState(mixing, chunk_size=3), []
        for start, dtype in zip((0, 4, 6), dtypes, strict=True):
            new = slice(start, {0: 4, 4: 6, 6: 9}[start])
            outs.append(state.extend(*(x[:, new].to(dtype) for x in (query, key, value))))
            assert outs[-1].dtype == dtype
        assert relative_error(torch.cat([out.double() for out in outs], dim=1), expected) < 1e-6


@pytest.mark.parametrize("mixing", [[[1.0]], (torch.ones(3, 3),), torch.ones(3, 3, dtype=torch.int64)])
def test_a_mixing_that_is_no_matrix_of_numbers_is_refused(mixing):
    with pytest.raises(UserError, match="mixing is .*; expected a tensor of floating-point numbers"):
        CausalState(mixing, 3)
    with pytest.raises(UserError, match="mixing is .*; expected a tensor of floating-point numbers"):
        causal_mhla_attention(*torch.rand(3, 1, 9, 2, 4), mixing, 3)
