"""Feature maps: their formulas, their dtypes, and how they relate to softmax attention."""

import math
import re

import pytest
import torch

from mhla_diffusion.attention import linear_attention
from mhla_diffusion.errors import UserError
from mhla_diffusion.feature_maps import FEATURE_MAPS, FeatureMap, build_feature_map

NONNEGATIVE = ("relu", "relu_eps", "elu", "positive_random", "hedgehog")


def random_query_and_key(heads=2, head_dim=4, tokens=6, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, tokens, heads, head_dim, generator=generator, dtype=torch.float64) * scale
    return x[0].to(dtype), x[1].to(dtype)


def attention_over_softmax_kernel(query, key, value):
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1), value)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("relu_eps", lambda x: max(x, 0.0) + 1e-6),
        ("elu", lambda x: x + 1 if x > 0 else math.exp(x)),
        ("identity", lambda x: x),
    ],
)
def test_fixed_maps_apply_their_formula_to_query_and_key(name, formula):
    query, key = random_query_and_key()
    for features, x in zip(build_feature_map(name, 2, 4)(query, key), (query, key), strict=True):
        expected = torch.tensor([formula(entry) for entry in x.double().flatten().tolist()]).view_as(x)
        torch.testing.assert_close(features, expected)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_features_have_the_announced_width_and_no_dependence_on_other_batch_elements(name):
    feature_map = build_feature_map(name, 2, 4)
    query, key = random_query_and_key()
    features = feature_map(query, key)
    for x, one in zip(features, feature_map(query[1:2], key[1:2]), strict=True):
        assert x.shape == (3, 6, 2, feature_map.feature_dim)
        torch.testing.assert_close(x[1:2], one)


@pytest.mark.parametrize("name", NONNEGATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_features_are_finite_and_nonnegative(name, dtype, scale):
    for features in build_feature_map(name, 2, 4)(*random_query_and_key(dtype=dtype, scale=scale)):
        assert features.isfinite().all()
        assert (features >= 0).all()


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_maps_that_select_keep_the_dtype_and_the_others_compute_in_float32_at_least(name, dtype):
    query, key = random_query_and_key(dtype=dtype)
    selects = name in ("relu", "identity")
    reference = build_feature_map(name, 2, 4)(query.double(), key.double())
    for features, expected in zip(build_feature_map(name, 2, 4)(query, key), reference, strict=True):
        assert features.dtype == (dtype if selects else torch.promote_types(dtype, torch.float32))
        torch.testing.assert_close(features.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_autocast_does_not_round_the_features(name):
    feature_map, (query, key) = build_feature_map(name, 2, 4), random_query_and_key()
    expected = feature_map(query, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = feature_map(query, key)
    assert all(torch.equal(x, y) for x, y in zip(features, expected, strict=True))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradients_reach_inputs_and_weights(name):
    feature_map = build_feature_map(name, 2, 4).double()
    query, key = random_query_and_key(dtype=torch.float64, tokens=2)
    query, key = query[:1].requires_grad_(), key[:1].requires_grad_()
    assert torch.autograd.gradcheck(feature_map, (query, key))
    sum((x * torch.arange(x.shape[-1])).sum() for x in feature_map(query, key)).backward()
    assert all(p.grad is not None and p.grad.any() for p in (query, key, *feature_map.parameters()))


def test_random_projections_have_the_length_of_gaussians_and_no_preferred_side():
    """The estimate of the softmax kernel is unbiased only if every row is distributed like a Gaussian vector."""
    rows = build_feature_map("positive_random", 4000, 6).projection
    assert rows.shape == (4000, 6, 6)
    standard_error = 4000**-0.5
    assert rows.mean(dim=0).abs().max() <= 5 * standard_error
    assert (rows.square().mean(dim=0) - 1).abs().max() <= 5 * math.sqrt(2) * standard_error
    directions = torch.nn.functional.normalize(rows, dim=-1)
    gram = directions @ directions.mT
    torch.testing.assert_close(gram, torch.eye(6).expand_as(gram), rtol=0, atol=1e-5)


def test_random_features_are_exponentials_of_projections_up_to_factors_that_normalisation_cancels():
    feature_map, (query, key) = build_feature_map("positive_random", 2, 4), random_query_and_key()

    def unscaled(x):
        x = x / 4**0.25
        projected = torch.stack([x[:, :, h] @ feature_map.projection[h].T for h in range(2)], dim=2)
        return (projected - x.square().sum(dim=-1, keepdim=True) / 2).exp()

    value = torch.randn(3, 6, 2, 4, generator=torch.Generator().manual_seed(1))
    out = linear_attention(*feature_map(query, key), value, eps=1e-20)
    torch.testing.assert_close(out, linear_attention(unscaled(query), unscaled(key), value, eps=1e-20))


def test_random_features_averaged_over_many_draws_give_the_softmax_kernel():
    draws = 20_000
    feature_map = build_feature_map("positive_random", draws, 4)
    x, y = random_query_and_key(heads=1, tokens=1)
    x, y = x[0, 0, 0], y[0, 0, 0]
    projected = torch.einsum("hfd,d->hf", feature_map.projection, (x + y) / 4**0.25)
    exponent = -(x.square().sum() + y.square().sum()) / 2 / math.sqrt(4)
    estimates = (projected + exponent).exp().mean(dim=1)
    kernel = math.exp((x @ y).item() / math.sqrt(4))
    assert abs(estimates.mean().item() - kernel) <= 5 * estimates.std().item() / math.sqrt(draws)


def test_random_features_are_the_same_in_every_instance_and_are_saved():
    first, second = (build_feature_map("positive_random", 2, 4) for _ in range(2))
    assert torch.equal(first.projection, second.projection)
    assert "projection" in first.state_dict()
    assert not list(first.parameters())
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_feature_map("positive_random", 2, 4)
    assert torch.equal(torch.rand(3), expected), "building the map must not consume global random numbers"


def test_learned_features_are_a_softmax_over_both_signs():
    feature_map = build_feature_map("hedgehog", 2, 4)
    generator = torch.Generator().manual_seed(2)
    for weight in feature_map.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    query, key = random_query_and_key()
    weights = (feature_map.query_weight, feature_map.key_weight)
    for features, x, weight in zip(feature_map(query, key), (query, key), weights, strict=True):
        for h in range(2):
            y = x[:, :, h] @ weight[h].T
            torch.testing.assert_close(features[:, :, h], torch.cat([y, -y], dim=-1).softmax(dim=-1))


def test_learned_map_starts_at_the_scale_of_softmax_attention():
    """For small inputs φ(q)·φ(k) = (1 + q·k / sqrt(D) / D + …) / 2D: softmax's weights, only flatter by D."""
    feature_map = build_feature_map("hedgehog", 2, 4)
    query, key = random_query_and_key(dtype=torch.float64, scale=1e-3)
    phi_query, phi_key = feature_map(query, key)
    products = torch.einsum("bqhf,bkhf->bhqk", phi_query, phi_key) * 8 - 1
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(4) / 4
    torch.testing.assert_close(products, scores, rtol=1e-3, atol=1e-11)


def test_learned_map_has_weights_of_its_own_for_queries_and_keys():
    feature_map = build_feature_map("hedgehog", 2, 4)
    assert [tuple(p.shape) for p in feature_map.parameters()] == [(2, 4, 4), (2, 4, 4)]
    assert feature_map.query_weight.data_ptr() != feature_map.key_weight.data_ptr()
    torch.testing.assert_close(feature_map.query_weight, (torch.eye(4) / 4**0.25).expand(2, 4, 4))


def test_an_unknown_name_is_refused_with_the_nearest_and_the_known_ones():
    with pytest.raises(UserError) as error:
        build_feature_map("rellu", 2, 4)
    assert str(error.value) == (
        "feature_map='rellu' is unknown (did you mean 'relu'?); known: relu, relu_eps, elu, identity, positive_random, "
        "hedgehog."
    )
    for name in (3, ["relu"]):
        with pytest.raises(UserError, match=f"^feature_map={re.escape(repr(name))} is unknown"):
            build_feature_map(name, 2, 4)


def test_a_map_without_features_says_what_it_lacks():
    with pytest.raises(NotImplementedError, match=r"FeatureMap must define features\(\) or forward\(\)"):
        FeatureMap(2, 4)(*random_query_and_key())
