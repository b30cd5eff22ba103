"""BlockMixing: the initial value, clipping, and resizing to other block counts."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_reference import property_settings, random_inputs, relative_error

from mhla_diffusion.attention import linear_attention, mhla_attention
from mhla_diffusion.errors import UserError
from mhla_diffusion.layout import BlockLayout
from mhla_diffusion.mixing import BlockMixing, initial_mixing

block_counts = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
KINDS = ("full", "separable")


def looped_local_mixing(blocks):
    """m_ij ∝ 1 − dist(i, j) / max_k dist(i, k), rows summing to one, entry by entry."""
    centres = list(itertools.product(*(range(n) for n in blocks)))
    rows = []
    for centre in centres:
        distances = [math.dist(centre, other) for other in centres]
        row = [1 - d / max(distances) if max(distances) > 0 else 1.0 for d in distances]
        rows.append([x / sum(row) for x in row])
    return torch.tensor(rows, dtype=torch.float64)


@given(block_counts)
@property_settings
def test_initial_mixing_is_the_local_formula(blocks):
    mixing = initial_mixing(blocks)
    assert mixing.dtype == torch.float32
    torch.testing.assert_close(mixing.double(), looped_local_mixing(blocks), rtol=1e-6, atol=1e-7)
    assert (mixing >= 0).all()
    torch.testing.assert_close(mixing.sum(dim=1), torch.ones(math.prod(blocks)))


@given(block_counts)
@property_settings
def test_separable_mixing_starts_as_the_product_of_the_local_formulas_of_its_axes(blocks):
    mixing = BlockMixing(blocks, kind="separable")
    expected = torch.ones(1, 1, dtype=torch.float64)
    for n in blocks:
        expected = torch.kron(expected, looped_local_mixing((n,)))
    assert [tuple(w.shape) for w in mixing.weights] == [(n, n) for n in blocks]
    torch.testing.assert_close(mixing.matrix().double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("locality", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_locality_blends_between_the_constant_and_the_local_value(locality, normalize):
    blocks = (3, 2)
    constant = 1 / 6 if normalize else 1.0
    expected = locality * looped_local_mixing(blocks) + (1 - locality) * constant
    torch.testing.assert_close(initial_mixing(blocks, locality, normalize).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("blocks", [(1,), (4,), (2, 3), (1, 3), (2, 1, 3)])
def test_locality_zero_computes_vanilla_linear_attention(kind, normalize, blocks):
    layout = BlockLayout((5, 4, 3)[: len(blocks)], blocks)
    query, key, value, _ = random_inputs(0, 2, layout.num_tokens, 2, 4, 4)
    mixing = BlockMixing(blocks, kind, locality=0.0, normalize=normalize)
    out = mhla_attention(query, key, value, mixing(), layout, normalize, eps=1e-15)
    # The constant is stored in float32, 1/3 included, and cancels only where there is a normaliser.
    assert relative_error(out, linear_attention(query, key, value, normalize, eps=1e-15)) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_one_block_starts_at_the_weight_one(kind):
    for normalize, locality in itertools.product((True, False), (0.0, 0.5, 1.0)):
        mixing = BlockMixing((1, 1), kind, locality, normalize)
        assert torch.equal(mixing.matrix(), torch.ones(1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_brings_weights_into_the_unit_interval_and_leaves_the_rest(kind):
    mixing = BlockMixing((3, 2), kind)
    generator = torch.Generator().manual_seed(0)
    before = [torch.randn(w.shape, generator=generator) * 2 for w in mixing.weights]
    with torch.no_grad():
        for weight, x in zip(mixing.weights, before, strict=True):
            weight.copy_(x)
    mixing.clip_()
    for weight, x in zip(mixing.weights, before, strict=True):
        inside = (x >= 0) & (x <= 1)
        assert torch.equal(weight[inside], x[inside])
        assert (weight[x < 0] == 0).all() and (weight[x > 1] == 1).all()
        assert weight.requires_grad


@pytest.mark.parametrize("kind", KINDS)
@given(block_counts)
@property_settings
def test_resizing_to_the_same_counts_changes_nothing(kind, blocks):
    mixing = BlockMixing(blocks, kind)
    torch.testing.assert_close(mixing.resized(blocks).matrix(), mixing.matrix(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
@given(block_counts, st.data())
@property_settings
def test_resizing_keeps_a_constant_and_the_range_of_values(kind, blocks, data):
    other = data.draw(st.tuples(*[st.integers(1, 6)] * len(blocks)))
    constant = BlockMixing(blocks, kind)
    for weight in constant.weights:
        torch.nn.init.constant_(weight, 0.25)
    resized = constant.resized(other)
    assert resized.blocks == other
    for weight in resized.weights:
        torch.testing.assert_close(weight, torch.full_like(weight, 0.25))
    local = BlockMixing(blocks, kind)
    for old, new in zip(local.weights, local.resized(other).weights, strict=True):
        assert new.min() >= old.min() - 1e-6 and new.max() <= old.max() + 1e-6


def test_resizing_reads_linear_functions_off_at_the_new_centres():
    """Between the outermost old centres a mixing that is linear in the position stays exactly linear."""
    mixing = BlockMixing((4, 4))
    centre = (torch.arange(4) + 0.5) / 4

    def linear(rows, columns):  # of the query block's row and the key block's column
        return 0.1 + 0.5 * rows[:, None, None, None] + 0.2 * columns[None, None, None, :]

    with torch.no_grad():
        mixing.weights[0].copy_(linear(centre, centre).expand(4, 4, 4, 4).reshape(16, 16))
    resized = mixing.resized((3, 2)).matrix().view(3, 2, 3, 2)
    expected = linear((torch.arange(3) + 0.5) / 3, (torch.arange(2) + 0.5) / 2).expand(3, 2, 3, 2)
    torch.testing.assert_close(resized, expected)


def test_refining_and_coarsening_a_smooth_mixing_gives_it_back():
    mixing = BlockMixing((6, 5))
    rows, columns = (torch.arange(6) + 0.5) / 6, (torch.arange(5) + 0.5) / 5
    field = torch.cos(2 * rows)[:, None] + torch.sin(columns)[None, :]
    with torch.no_grad():
        mixing.weights[0].copy_(0.5 + 0.1 * torch.cos(field.flatten()[:, None] - field.flatten()[None, :]))
    back = mixing.resized((24, 20)).resized((6, 5))
    difference = (back.matrix() - mixing.matrix()).abs().max().item()
    assert 0 < difference <= 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_refining_by_an_odd_factor_keeps_the_values_at_the_old_centres(kind):
    mixing = BlockMixing((4, 3), kind)
    torch.testing.assert_close(mixing.resized((12, 15)).resized((4, 3)).matrix(), mixing.matrix())


def test_resizing_keeps_what_training_decided():
    mixing = BlockMixing((2, 2), "separable", learn=False).to(torch.float64)
    resized = mixing.resized((3, 3))
    assert resized.kind == "separable"
    assert all(w.dtype == torch.float64 and not w.requires_grad for w in resized.weights)
    assert all(w.requires_grad for w in BlockMixing((2, 2)).resized((3, 3)).weights)


@pytest.mark.parametrize("kind", KINDS)
def test_every_mixing_weight_learns_unless_told_not_to(kind):
    layout = BlockLayout((4, 6), (2, 3))
    query, key, value, _ = random_inputs(0, 1, 24, 2, 4, 4, dtype=torch.float32)
    mixing = BlockMixing((2, 3), kind)
    mhla_attention(query, key, value, mixing(), layout).square().sum().backward()
    assert all((w.grad != 0).all() for w in mixing.weights)
    assert not any(p.requires_grad for p in BlockMixing((2, 3), kind, learn=False).parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_survive_a_state_dict(kind):
    source, target = BlockMixing((2, 3), kind), BlockMixing((2, 3), kind, locality=0.0)
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.matrix(), target.matrix())


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"^mixing='fulll' is unknown; known: full, separable\.$"):
        BlockMixing((2, 2), "fulll")


@pytest.mark.parametrize("locality", [-0.1, 1.1, float("nan")])
def test_a_locality_outside_the_unit_interval_is_refused(locality):
    with pytest.raises(UserError, match=r"^locality=.* must lie between 0 .* and 1"):
        BlockMixing((2, 2), locality=locality)


def test_wrong_block_counts_are_refused():
    with pytest.raises(UserError, match=r"^blocks=\(2, 0\) must be one to three positive integers"):
        BlockMixing((2, 0))
    with pytest.raises(UserError, match=r"^blocks=\(2, 2, 2\) must have as many axes as this mixing's blocks=\(2, 2\)"):
        BlockMixing((2, 2)).resized((2, 2, 2))


def test_a_matrix_of_absurd_size_is_refused_before_it_is_made():
    with pytest.raises(UserError, match=r"blocks=\(100, 100\).*10000×10000.*separable"):
        BlockMixing((100, 100))
    assert BlockMixing((100, 100), "separable").weights[0].shape == (100, 100)
