"""Attention that is causal in time: streaming equals the parallel form, and a model's frames ignore later ones."""

from __future__ import annotations

import pytest
import torch
from dit_models import small_dit
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_reference import random_inputs, relative_error, rotated
from wan_models import inputs, mhla_transformer

from mhla_diffusion import (
    BlockLayout,
    MHLAConfig,
    MHLADiTTransformer2DModel,
    MHLAProcessor,
    mhla_attention,
    mhla_attention_matrix,
)
from mhla_diffusion.causal import temporal_causal_mixing
from mhla_diffusion.errors import UserError
from mhla_diffusion.temporal import TemporalState


def stream(state, query, key, value, rotary=None):
    """The whole video through `state`, in order."""
    outs, start = [], 0
    while state.next_frames:
        tokens = slice(start, start + state.next_frames * state.layout.grid[1] * state.layout.grid[2])
        moved = None if rotary is None else tuple(x[:, tokens] for x in rotary)
        outs.append(state.extend(query[:, tokens], key[:, tokens], value[:, tokens], moved))
        start = tokens.stop
    return torch.cat(outs, dim=1)


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_frames_in_order_give_what_the_whole_video_gives(grid, blocks, separable, normalize, rotate):
    layout = BlockLayout(grid, blocks)
    query, key, value, generator = random_inputs(0, 2, layout.num_tokens, 2, 4, 3)
    rotary = (rotated(query), rotated(key)) if rotate else None
    factors = [torch.rand(n, n, generator=generator, dtype=torch.float64) for n in blocks]
    mixing = factors if separable else torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    options = (normalize, 0.1)
    out = stream(TemporalState(mixing, layout, *options), query, key, value, rotary)
    masked = temporal_causal_mixing(mixing, blocks)
    assert relative_error(out, mhla_attention(query, key, value, masked, layout, *options, rotary)) <= 1e-10
    matrix = mhla_attention_matrix(query, key, masked, layout, *options, rotary)
    assert relative_error(out, torch.einsum("bhqt,bthe->bqhe", matrix, value)) <= 1e-10


def test_gradients_are_those_of_the_whole_video():
    layout = BlockLayout((5, 3, 4), (2, 2, 3))
    query, key, value, generator = random_inputs(0, 1, layout.num_tokens, 2, 4, 3)
    mixing = torch.rand(12, 12, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value, mixing)]
    weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    streamed = (stream(TemporalState(mixing, layout, True, 0.1), query, key, value) * weights).sum()
    parallel = mhla_attention(query, key, value, temporal_causal_mixing(mixing, layout.blocks), layout, True, 0.1)
    expected = torch.autograd.grad((parallel * weights).sum(), leaves)
    for found, gradient in zip(torch.autograd.grad(streamed, leaves), expected, strict=True):
        assert relative_error(found, gradient) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    layout = BlockLayout((4, 4, 4), (2, 2, 2))
    query, key, value, _ = random_inputs(0, 1, 64, 2, 8, 8, dtype=torch.float32)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    mixing = torch.rand(8, 8)
    out = stream(TemporalState(mixing, layout), query, key, value)
    masked = temporal_causal_mixing(mixing, layout.blocks)
    expected = mhla_attention(query.float(), key.float(), value.float(), masked, layout)
    assert out.dtype == dtype and relative_error(out.float(), expected) <= 2 * torch.finfo(dtype).eps


def test_bad_input_is_refused():
    layout = BlockLayout((3, 2, 2), (3, 1, 1))
    state = TemporalState(torch.ones(3, 3), layout)
    query, key, value, _ = random_inputs(0, 1, 4, 2, 4, 4)
    with pytest.raises(UserError, match="4 tokens|grid"):
        state.extend(query[:, :3], key[:, :3], value[:, :3])
    state.extend(query, key, value)
    with pytest.raises(UserError, match="earlier frames"):
        state.extend(query[:, :, :1], key[:, :, :1], value[:, :, :1])
    state.extend(query, key, value)
    state.extend(query, key, value)
    with pytest.raises(UserError, match="all 3 frames"):
        state.extend(query, key, value)
    with pytest.raises(UserError, match="three axes"):
        TemporalState(torch.ones(4, 4), BlockLayout((4, 4), (2, 2)))
    with pytest.raises(UserError, match="mixing"):
        TemporalState(torch.ones(4, 4), layout)


@pytest.mark.parametrize(("kind", "cpe"), [("full", False), ("full", True), ("separable", False)])
def test_a_models_frames_do_not_depend_on_later_ones(kind, cpe):
    grid = (6, 4, 4)
    blocks = (3, 2, 2)
    model = mhla_transformer(blocks=blocks, mixing=kind, cpe=cpe, temporal_causal=True).eval()
    arguments = inputs(grid)
    changed = dict(arguments)
    changed["hidden_states"] = arguments["hidden_states"].clone()
    changed["hidden_states"][:, :, 4:] += 1  # the last of three blocks in time
    with torch.no_grad():
        before, after = (model(**a, return_dict=False)[0] for a in (arguments, changed))
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert (before[:, :, 4:] - after[:, :, 4:]).abs().max() > 1e-3
    free = mhla_transformer(blocks=blocks, mixing=kind).eval()
    with torch.no_grad():
        before, after = (free(**a, return_dict=False)[0] for a in (arguments, changed))
    assert (before[:, :, :4] - after[:, :, :4]).abs().max() > 1e-4


def test_it_is_an_option_of_grids_with_time():
    model = mhla_transformer()
    model.set_attn_processor(MHLAProcessor(temporal_causal=True))
    assert all(block.attn1.processor.config.temporal_causal for block in model.blocks)
    with pytest.raises(UserError, match="temporal_causal=True needs three axes"):
        MHLADiTTransformer2DModel.from_base(small_dit(), MHLAConfig(temporal_causal=True))


def test_a_refused_call_leaves_the_state_as_it_was():
    layout = BlockLayout((4, 2, 3), (2, 2, 2))
    query, key, value, _ = random_inputs(0, 1, layout.num_tokens, 2, 4, 3)
    rotary = (rotated(query), rotated(key))
    mixing = torch.rand(8, 8, dtype=torch.float64)
    state = TemporalState(mixing, layout)
    first, second = slice(0, 12), slice(12, 24)
    outs = [state.extend(query[:, first], key[:, first], value[:, first], tuple(x[:, first] for x in rotary))]
    with pytest.raises(UserError, match="rotary must be given for all frames or for none; the earlier ones came with"):
        state.extend(query[:, second], key[:, second], value[:, second])
    with pytest.raises(UserError, match="query has 13 tokens"):
        state.extend(query[:, :13], key[:, :13], value[:, :13], tuple(x[:, :13] for x in rotary))
    outs.append(state.extend(query[:, second], key[:, second], value[:, second], tuple(x[:, second] for x in rotary)))
    expected = mhla_attention(query, key, value, temporal_causal_mixing(mixing, layout.blocks), layout, rotary=rotary)
    assert relative_error(torch.cat(outs, dim=1), expected) <= 1e-10


def test_frames_may_come_in_several_dtypes():
    layout = BlockLayout((4, 2, 3), (2, 2, 2))
    query, key, value, _ = random_inputs(0, 1, layout.num_tokens, 2, 4, 3)
    mixing = torch.rand(8, 8, dtype=torch.float64)
    state = TemporalState(mixing, layout)
    first = state.extend(query[:, :12].float(), key[:, :12].float(), value[:, :12].float())
    second = state.extend(query[:, 12:].float(), key[:, 12:], value[:, 12:])
    assert first.dtype == torch.float32 and second.dtype == torch.float64
    expected = mhla_attention(query, key, value, temporal_causal_mixing(mixing, layout.blocks), layout)
    assert relative_error(torch.cat([first, second], dim=1), expected) <= 1e-5
