"""mhla_attention against written-out attention: equality, gradients, precision, rank, cost and bad input."""

import itertools
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0
from hypothesis import given
from hypothesis import strategies as st
from operator_reference import (
    LargestTensor,
    blocks_of_tokens,
    grids_and_blocks,
    looped_attention,
    property_settings,
    random_inputs,
    relative_error,
    rotated,
)

from mhla_diffusion.attention import linear_attention, mhla_attention, mhla_attention_matrix
from mhla_diffusion.errors import UserError
from mhla_diffusion.layout import BlockLayout
from mhla_diffusion.mixing import BlockMixing, initial_mixing

HALF_DTYPES = (torch.bfloat16, torch.float16)


@st.composite
def attention_cases(draw):
    """A layout and matching float64 inputs with every option drawn: the arguments of the operator, and the blocks."""
    grid, blocks = draw(grids_and_blocks())
    layout = BlockLayout(grid, blocks)
    batch, heads, value_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    dim = 2 * draw(st.integers(1, 3))
    tokens = layout.num_tokens
    query, key, value, generator = random_inputs(draw(st.integers(0, 2**16)), batch, tokens, heads, dim, value_dim)
    options = {"normalize": draw(st.booleans()), "eps": draw(st.sampled_from([1e-6, 0.1]))}
    if draw(st.booleans()):
        options["rotary"] = (rotated(query), rotated(key))
    if draw(st.booleans()):
        options["key_mask"] = torch.rand(batch, tokens, generator=generator) < 0.7
    factors = [torch.rand(n, n, generator=generator, dtype=torch.float64) for n in blocks]
    full = torch.rand(layout.num_blocks, layout.num_blocks, generator=generator, dtype=torch.float64)
    return query, key, value, full, factors, layout, options


def kronecker(factors):
    """The product mixing entry by entry: the weight of two blocks is the product over axes."""
    ranges = [range(len(f)) for f in factors]
    rows = []
    for row in itertools.product(*ranges):
        entries = []
        for column in itertools.product(*ranges):
            weight = 1.0
            for f, i, j in zip(factors, row, column, strict=True):
                weight *= f[i, j].item()
            entries.append(weight)
        rows.append(entries)
    return torch.tensor(rows, dtype=torch.float64)


@given(attention_cases())
@property_settings
def test_operator_equals_written_out_attention(case):
    query, key, value, mixing, _, layout, options = case
    out = mhla_attention(query, key, value, mixing, layout, **options)
    token_blocks = blocks_of_tokens(layout.grid, layout.blocks)
    assert relative_error(out, looped_attention(query, key, value, mixing, token_blocks, **options)) <= 1e-10


@given(attention_cases())
@property_settings
def test_dense_reference_equals_written_out_attention(case):
    query, key, value, mixing, _, layout, options = case
    matrix = mhla_attention_matrix(query, key, mixing, layout, **options)
    assert matrix.dtype == torch.float64
    out = torch.einsum("bhqt,bthe->bqhe", matrix, value)
    token_blocks = blocks_of_tokens(layout.grid, layout.blocks)
    assert relative_error(out, looped_attention(query, key, value, mixing, token_blocks, **options)) <= 1e-10


@given(attention_cases())
@property_settings
def test_separable_mixing_equals_full_mixing_with_the_kronecker_product(case):
    query, key, value, _, factors, layout, options = case
    out = mhla_attention(query, key, value, factors, layout, **options)
    token_blocks = blocks_of_tokens(layout.grid, layout.blocks)
    full = kronecker(factors)
    assert relative_error(out, looped_attention(query, key, value, full, token_blocks, **options)) <= 1e-10
    matrix = mhla_attention_matrix(query, key, factors, layout, **options)
    torch.testing.assert_close(matrix, mhla_attention_matrix(query, key, full, layout, **options))


@given(attention_cases())
@property_settings
def test_uniform_mixing_equals_linear_attention(case):
    query, key, value, mixing, factors, layout, options = case
    written_out = looped_attention(query, key, value, torch.ones(1, 1), [0] * layout.num_tokens, **options)
    assert relative_error(linear_attention(query, key, value, **options), written_out) <= 1e-10
    ones, factors_of_ones = torch.ones_like(mixing), [torch.ones_like(f) for f in factors]
    for uniform in (ones, factors_of_ones):
        assert relative_error(mhla_attention(query, key, value, uniform, layout, **options), written_out) <= 1e-10


def test_any_constant_mixing_equals_linear_attention_under_the_normaliser():
    layout = BlockLayout((6, 5), (4, 2))
    query, key, value, _ = random_inputs(0, 2, 30, 2, 4, 3)
    expected = linear_attention(query, key, value, eps=1e-15)
    for constant in (1e-3, 0.37, 1.0):
        mixing = torch.full((8, 8), constant, dtype=torch.float64)
        assert relative_error(mhla_attention(query, key, value, mixing, layout, eps=1e-15), expected) <= 1e-10


@given(attention_cases())
@property_settings
def test_one_block_equals_linear_attention(case):
    query, key, value, _, _, layout, options = case
    one = BlockLayout(layout.grid, (1,) * len(layout.grid))
    mixing = BlockMixing(one.blocks, normalize=options["normalize"])
    expected = looped_attention(query, key, value, torch.ones(1, 1), [0] * layout.num_tokens, **options)
    assert relative_error(mhla_attention(query, key, value, mixing(), one, **options), expected) <= 1e-10


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("with_rotary", "separable"), [(True, False), (False, True)])
@pytest.mark.parametrize(("grid", "blocks"), [((4,), (2,)), ((3, 2), (2, 3)), ((1, 3, 2), (2, 2, 1))])
def test_gradients_are_those_of_finite_differences(grid, blocks, with_rotary, separable, normalize):
    layout = BlockLayout(grid, blocks)
    batch, heads = (2, 1) if len(grid) == 1 else (1, 2)
    query, key, value, generator = random_inputs(3, batch, layout.num_tokens, heads, 2, 2)
    query, key = query + 0.1, key + 0.1
    key_mask = torch.arange(layout.num_tokens).expand(batch, -1) != 1
    factors = [torch.rand(n, n, generator=generator, dtype=torch.float64) for n in blocks]
    mixing = factors if separable else [kronecker(factors)]
    rotary = (rotated(query), rotated(key)) if with_rotary else ()

    def attend(query, key, value, *rest):
        mixing, rotary = rest[: -2 if with_rotary else None], rest[-2:] if with_rotary else None
        mixing = mixing if separable else mixing[0]
        return mhla_attention(query, key, value, mixing, layout, normalize, 1e-3, rotary, key_mask)

    inputs = [x.requires_grad_() for x in (query, key, value, *mixing, *rotary)]
    assert torch.autograd.gradcheck(attend, inputs)


def test_gradients_of_linear_attention_are_those_of_finite_differences():
    query, key, value, _ = random_inputs(3, 2, 5, 2, 2, 3)
    inputs = [x.requires_grad_() for x in (query + 0.1, key + 0.1, value)]
    for normalize in (True, False):
        assert torch.autograd.gradcheck(lambda q, k, v, n=normalize: linear_attention(q, k, v, n, 1e-3), inputs)


def test_denominator_belongs_to_the_block_of_the_query():
    """The tempting denominator Σ_b m_ib (q_b·z_b), products mixed over blocks, is another quantity."""
    layout = BlockLayout((4, 6), (2, 3))
    query, key, value, generator = random_inputs(5, 1, 24, 1, 4, 4)
    mixing = torch.rand(6, 6, generator=generator, dtype=torch.float64)
    query_blocks, key_blocks, value_blocks = (layout.to_blocks(x)[0, :, :, 0] for x in (query, key, value))
    right, wrong = torch.zeros_like(value_blocks), torch.zeros_like(value_blocks)
    for i, slot in itertools.product(range(6), range(4)):
        q = query_blocks[i, slot]
        numerator = sum(mixing[i, b] * (q @ key_blocks[b].T @ value_blocks[b]) for b in range(6))
        own = sum(mixing[i, b] * (q @ key_blocks[b].sum(0)) for b in range(6))
        mixed_products = sum(mixing[i, b] * (query_blocks[b, slot] @ key_blocks[b].sum(0)) for b in range(6))
        right[i, slot], wrong[i, slot] = numerator / (own + 1e-6), numerator / (mixed_products + 1e-6)
    out = layout.to_blocks(mhla_attention(query, key, value, mixing, layout))[0, :, :, 0]
    assert relative_error(out, right) <= 1e-10
    assert relative_error(out, wrong) >= 0.1


@given(attention_cases())
@property_settings
def test_normalised_output_of_a_constant_value_is_that_constant(case):
    query, key, value, mixing, _, layout, _ = case
    out = mhla_attention(query + 0.1, key + 0.1, torch.full_like(value, 3.5), mixing + 0.1, layout, eps=1e-15)
    torch.testing.assert_close(out, torch.full_like(out, 3.5))


@given(attention_cases(), st.data())
@property_settings
def test_masked_tokens_have_no_influence(case, data):
    query, key, value, mixing, _, layout, options = case
    key_mask = torch.tensor([data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in key.shape[1:2]])
    key_mask = key_mask.expand(key.shape[0], -1)
    hidden = ~key_mask[:, :, None, None]
    options = {"normalize": options["normalize"], "key_mask": key_mask}
    out = mhla_attention(query, key, value, mixing, layout, **options)
    changed = mhla_attention(
        query, key.masked_fill(hidden, 77.0), value.masked_fill(hidden, -1e6), mixing, layout, **options
    )
    assert torch.equal(out, changed)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_keys_that_are_all_masked_give_zero(normalize, dtype):
    layout = BlockLayout((5, 4), (2, 3))
    query, key, value, _ = random_inputs(0, 2, 20, 2, 4, 4, dtype=dtype)
    key_mask = torch.tensor([[False] * 20, [True] * 20])
    for out in (
        mhla_attention(query, key, value, initial_mixing((2, 3)), layout, normalize, key_mask=key_mask),
        linear_attention(query, key, value, normalize, key_mask=key_mask),
    ):
        assert not out[0].any()
        assert out[1].any()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-6, 1e-15])
def test_all_zero_query_gives_zero(normalize, dtype, eps):
    layout = BlockLayout((5, 4), (2, 3))
    query, key, value, _ = random_inputs(0, 2, 20, 2, 4, 4, dtype=dtype)
    query[:, 7] = 0
    for out in (
        mhla_attention(query, key, value, initial_mixing((2, 3)), layout, normalize, eps),
        linear_attention(query, key, value, normalize, eps),
    ):
        assert out.isfinite().all()
        assert not out[:, 7].any()
    assert not mhla_attention(query * 0, key * 0, value, initial_mixing((2, 3)), layout, normalize, eps).any()


def stock_linear_attention(query, key, value):
    """The core of diffusers' SANA processor (relu, pad, two matmuls, divide), with identities for its projections."""
    attn = SimpleNamespace(
        heads=query.shape[2],
        norm_q=None,
        norm_k=None,
        to_q=lambda x: query.flatten(2),
        to_k=lambda x: key.flatten(2),
        to_v=lambda x: value.flatten(2),
        to_out=[lambda x: x, lambda x: x],
    )
    return SanaLinearAttnProcessor2_0()(attn, value.flatten(2)).unflatten(-1, (query.shape[2], -1))


def half_inputs(seed, dtype, tokens=256, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, tokens, 2, 32, generator=generator) * scale).to(dtype) for _ in range(3)]


def norm_error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


def test_uniform_mixing_equals_the_stock_linear_attention_processor():
    query, key, value = half_inputs(0, torch.float32)
    layout = BlockLayout((16, 16), (3, 4))
    out = mhla_attention(query.relu(), key.relu(), value, torch.ones(12, 12), layout, eps=1e-15)
    assert relative_error(out, stock_linear_attention(query, key, value)) <= 1e-5


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("blocks", [(4, 4), (3, 5), (1, 1)])
def test_half_precision_error_is_no_larger_than_that_of_the_stock_processor(dtype, blocks):
    layout = BlockLayout((16, 16), blocks)
    uniform = torch.ones(layout.num_blocks, layout.num_blocks)
    token_blocks = layout.block_of_token
    weights = {"uniform": uniform, "local": initial_mixing(blocks)}
    ours, stock, local, rounding = [], [], [], []
    for seed in range(3):
        query, key, value = half_inputs(seed, dtype)
        features = query.relu(), key.relu()
        products = torch.einsum("bqhd,bkhd->bhqk", *(x.double() for x in features))
        exact = {}
        for name, mixing in weights.items():
            scores = products * mixing.double()[token_blocks][:, token_blocks]
            exact[name] = torch.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdim=True), value.double())
        ours.append(norm_error(mhla_attention(*features, value, uniform, layout, eps=1e-15), exact["uniform"]))
        stock.append(norm_error(stock_linear_attention(query, key, value), exact["uniform"]))
        local.append(norm_error(mhla_attention(*features, value, weights["local"], layout, eps=1e-15), exact["local"]))
        rounding.append(norm_error(exact["local"].to(dtype), exact["local"]))
    # Ties of the result's rounding fall one way or the other, hence the ten-thousandth.
    assert median(ours) <= median(stock) * 1.0001
    # With a local mixing it is another function; its error is that of rounding the exact result.
    assert median(local) <= median(rounding) * 1.0001


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_half_precision_inputs_are_summed_in_float32(dtype):
    """With the output's rounding left out, what remains is float32's error, far below one half-precision step."""
    query, key, value = half_inputs(0, dtype, tokens=4096)
    layout, mixing = BlockLayout((64, 64), (3, 4)), initial_mixing((3, 4))
    out = mhla_attention(query.relu(), key.relu(), value.float(), mixing, layout)
    exact = mhla_attention(query.double().relu(), key.double().relu(), value.double(), mixing.double(), layout)
    assert out.dtype == torch.float32
    assert relative_error(out, exact) <= 1e-4


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("blocks", [(4, 4), (3, 5)])
def test_float16_inputs_of_magnitude_100_stay_finite(normalize, separable, blocks):
    layout = BlockLayout((16, 16), blocks)
    query, key, value = (x.clamp(-400, 400) for x in half_inputs(0, torch.float16, scale=100.0))
    query, key = query.relu(), key.relu()
    mixing = BlockMixing(blocks, "separable" if separable else "full", normalize=normalize)()
    out = mhla_attention(query, key, value, mixing, layout, normalize)
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    exact = mhla_attention(query.double(), key.double(), value.double(), mixing, layout, normalize)
    assert normalize or exact.abs().max() > 65504, "the case must be one that overflows float16"
    expected = exact.clamp(-65504, 65504)
    float32_rounding = 1e-6 * exact.abs().max()  # of sums whose terms cancel
    assert ((out.double() - expected).abs() <= expected.abs() * 1e-3 + float32_rounding).all()
    assert linear_attention(query, key, value, normalize).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("separable", [True, False])
def test_autocast_does_not_change_the_float32_sums(dtype, separable):
    query, key, value = half_inputs(0, dtype, tokens=30)
    query, key = query.relu(), key.relu()
    layout = BlockLayout((5, 6), (2, 4))
    mixing = BlockMixing((2, 4), "separable" if separable else "full")()
    for normalize in (True, False):
        expected = mhla_attention(query, key, value, mixing, layout, normalize)
        expected_linear = linear_attention(query, key, value, normalize)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = mhla_attention(query, key, value, mixing, layout, normalize)
            linear = linear_attention(query, key, value, normalize)
        assert torch.equal(out, expected) and out.dtype == dtype
        assert torch.equal(linear, expected_linear)


@pytest.mark.parametrize("value_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_value(value_dtype):
    query, key, value, _ = random_inputs(0, 1, 20, 2, 4, 4, dtype=torch.float32)
    if value_dtype == torch.float64:
        query, key = query.double(), key.double()
    layout = BlockLayout((5, 4), (2, 3))
    for mixing in (initial_mixing((2, 3)), initial_mixing((2, 3)).to(torch.bfloat16)):
        assert mhla_attention(query, key, value.to(value_dtype), mixing, layout).dtype == value_dtype
    assert linear_attention(query, key, value.to(value_dtype)).dtype == value_dtype


@pytest.mark.parametrize("blocks", [(2, 2), (3, 3)])
def test_noncontiguous_inputs_give_the_same(blocks):
    layout = BlockLayout((4, 6), blocks)
    generator = torch.Generator().manual_seed(0)
    packed = torch.rand(2, 3, 2, 24, 8, generator=generator, dtype=torch.float64)  # batch, qkv, heads, tokens, 2 × dim
    query, key, value = (x.transpose(1, 2)[..., ::2] for x in packed.unbind(1))
    key = key[:1].expand(2, -1, -1, -1)
    mixing = torch.rand(layout.num_blocks, layout.num_blocks, generator=generator, dtype=torch.float64).T
    assert not any(x.is_contiguous() for x in (query, key, value, mixing))
    options = {"rotary": (query.flip(-1), key.flip(-1)), "key_mask": torch.arange(24).expand(2, -1) % 5 > 0}
    out = mhla_attention(query, key, value, mixing, layout, **options)
    token_blocks = blocks_of_tokens((4, 6), blocks)
    assert relative_error(out, looped_attention(query, key, value, mixing, token_blocks, **options)) <= 1e-10


def test_attention_matrix_has_the_rank_of_all_blocks_where_linear_attention_has_that_of_one():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 256, 2, 8, generator=generator, dtype=torch.float64).relu() for _ in range(2))
    mixed = mhla_attention_matrix(query, key, initial_mixing((4, 4)), BlockLayout((16, 16), (4, 4)))
    vanilla = mhla_attention_matrix(query, key, torch.ones(1, 1), BlockLayout((16, 16), (1, 1)))
    assert (torch.linalg.matrix_rank(mixed) >= 0.9 * 128).all()
    assert (torch.linalg.matrix_rank(vanilla) == 8).all()


def test_no_tensor_grows_with_the_square_of_the_tokens():
    largest = {}
    for side in (32, 64):
        query, key, value, _ = random_inputs(0, 1, side**2, 2, 8, 8, dtype=torch.float32)
        leaves = [x.requires_grad_() for x in (query, key, value)]
        with LargestTensor() as record:
            out = mhla_attention(*leaves, BlockMixing((5, 4))(), BlockLayout((side, side), (5, 4)))
            out.sum().backward()
        largest[side] = record.numel
    assert largest[64] <= 2 * 64**2 * 16
    assert largest[64] <= 4.2 * largest[32]


def good_arguments():
    query, key, value, _ = random_inputs(0, 2, 12, 2, 4, 3)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mixing": torch.ones(4, 4, dtype=torch.float64),
        "layout": BlockLayout((3, 4), (2, 2)),
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"query": torch.zeros(12, 2, 4)}, r"query has shape \(12, 2, 4\); expected \(batch, tokens, heads, head dim"),
        ({"value": torch.zeros(2, 12, 6)}, r"value has shape \(2, 12, 6\); expected \(batch, tokens"),
        ({"key": torch.zeros(2, 12, 2, 5)}, r"query \(2, 12, 2, 4\) and key \(2, 12, 2, 5\) must have the same shape"),
        ({"value": torch.zeros(2, 12, 1, 3)}, r"value \(2, 12, 1, 3\) must match key \(2, 12, 2, 4\) in batch, tok"),
        ({"layout": BlockLayout((3, 5), (2, 2))}, r"query has 12 tokens, but grid=\(3, 5\) has 15"),
        (
            {"mixing": torch.ones(4, 3)},
            r"mixing has shape \(4, 3\), but blocks=\(2, 2\) needs \(4, 4\), or .*: \(2, 2\), ",
        ),
        ({"mixing": [torch.ones(2, 2)]}, r"mixing has shape \(2, 2\), but blocks=\(2, 2\) needs \(4, 4\)"),
        ({"mixing": (torch.ones(2, 2), torch.ones(3, 3))}, r"mixing has shape \(2, 2\), \(3, 3\), but blocks="),
        ({"rotary": (torch.ones(2, 12, 2, 4), torch.ones(2, 12, 2, 6))}, r"rotary=.* must be a rotated query and key"),
        ({"rotary": (torch.ones(2, 11, 2, 4),) * 2}, r"rotary=\(\(2, 11, 2, 4\), .*agree with query \(2, 12, 2, 4\)"),
        ({"rotary": torch.ones(2, 12, 2, 4)}, "rotary must be a pair: query and key with rotary"),
        ({"query": [1.0]}, "query is a list; expected a tensor of floating-point numbers"),
        ({"value": torch.ones(2, 12, 2, 3, dtype=torch.int64)}, "value is torch.int64; expected a tensor of floating"),
        ({"mixing": None}, "mixing is a NoneType; expected a tensor, or one tensor per axis"),
        ({"mixing": [[1.0, 0.0], [0.0, 1.0]]}, "mixing is a list; expected a tensor, or one tensor per axis"),
        ({"mixing": torch.ones(4, 4).bool()}, "mixing is torch.bool; expected floating-point numbers"),
        ({"key_mask": [True]}, "key_mask is a list; expected a bool tensor"),
        ({"layout": (3, 4)}, r"layout=\(3, 4\) must be a BlockLayout"),
        ({"key_mask": torch.ones(2, 12)}, r"key_mask \(2, 12\) torch.float32 must be bool of shape \(2, 12\)"),
        (
            {"key_mask": torch.ones(2, 11).bool()},
            r"key_mask \(2, 11\) torch.bool must be bool of shape \(2, 12\), True",
        ),
    ],
)
def test_shapes_that_disagree_are_refused_in_one_sentence(change, sentence):
    arguments = good_arguments() | change
    with pytest.raises(UserError, match=f"^{sentence}") as error:
        mhla_attention(**arguments)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    if "value" not in change:
        del arguments["value"]
        with pytest.raises(UserError, match=f"^{sentence}"):
            mhla_attention_matrix(**arguments)
    if not {"mixing", "layout"} & set(change):
        shared = {name: x for name, x in (good_arguments() | change).items() if name not in ("mixing", "layout")}
        with pytest.raises(UserError, match=f"^{sentence}"):
            linear_attention(**shared)


@pytest.mark.parametrize("attention", [mhla_attention, linear_attention])
@pytest.mark.parametrize(
    ("change", "sentence"), [({"normalize": "x"}, "normalize='x' must"), ({"eps": None}, "eps=None")]
)
def test_how_to_normalise_is_checked(attention, change, sentence):
    arguments = good_arguments() | change
    if attention is linear_attention:
        del arguments["mixing"], arguments["layout"]
    with pytest.raises(UserError, match=sentence):
        attention(**arguments)


@pytest.mark.parametrize("backend", ["plain", "cpu"])
@pytest.mark.parametrize("wide", ["query", "key", "value"])
def test_tensors_of_several_dtypes_are_summed_in_the_widest(wide, backend):
    arguments = good_arguments()
    expected = mhla_attention(**arguments)
    mixed = {name: x if name in (wide, "mixing", "layout") else x.float() for name, x in arguments.items()}
    out = mhla_attention(**mixed, backend=backend)
    assert out.dtype == mixed["value"].dtype and relative_error(out, expected) < 1e-6
    rotary = (rotated(arguments["query"]), rotated(arguments["key"]))  # wider than the rest
    narrow = {name: arguments[name].float() for name in ("query", "key", "value")}
    moved = linear_attention(**narrow, rotary=rotary)
    assert relative_error(moved, linear_attention(*(arguments[name] for name in narrow), rotary=rotary)) < 1e-6
    narrow = {name: mixed[name] for name in ("query", "key", "value")}
    assert relative_error(linear_attention(**narrow), linear_attention(*(arguments[name] for name in narrow))) < 1e-6
