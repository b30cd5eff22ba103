"""BlockLayout: which token lies in which block, and the way there and back."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from operator_reference import blocks_of_tokens, grids_and_blocks, property_settings

from mhla_diffusion.errors import UserError
from mhla_diffusion.layout import BlockLayout, choose_blocks


@given(grids_and_blocks(max_length=11, max_count=13, max_tokens=400))
@property_settings
def test_tokens_lie_in_the_box_between_the_floor_cuts(case):
    grid, blocks = case
    layout = BlockLayout(grid, blocks)
    assert layout.num_tokens == math.prod(grid)
    assert layout.num_blocks == math.prod(blocks)
    assert layout.block_of_token.dtype == torch.int64
    assert layout.block_of_token.tolist() == blocks_of_tokens(grid, blocks)


@given(grids_and_blocks(max_length=11, max_count=13, max_tokens=400))
@property_settings
def test_block_sizes_count_the_tokens_of_every_block(case):
    grid, blocks = case
    layout = BlockLayout(grid, blocks)
    token_blocks = blocks_of_tokens(grid, blocks)
    counted = [token_blocks.count(b) for b in range(layout.num_blocks)]
    assert list(layout.block_sizes) == counted
    assert layout.largest_block == max(counted)
    assert layout.is_even == (len(set(counted)) == 1)


@given(grids_and_blocks())
@property_settings
def test_to_blocks_lists_each_blocks_tokens_in_order_and_pads_with_zeros(case):
    grid, blocks = case
    layout = BlockLayout(grid, blocks)
    tokens = torch.arange(1.0, layout.num_tokens + 1).view(1, -1, 1) * torch.tensor([[[1.0, -1.0]], [[2.0, 3.0]]])
    result = layout.to_blocks(tokens)
    assert result.shape == (2, layout.num_blocks, layout.largest_block, 2)
    token_blocks = blocks_of_tokens(grid, blocks)
    for b in range(layout.num_blocks):
        inside = [n for n, block in enumerate(token_blocks) if block == b]
        assert torch.equal(result[:, b, : len(inside)], tokens[:, inside])
        assert not result[:, b, len(inside) :].any()


@given(grids_and_blocks())
@property_settings
def test_from_blocks_undoes_to_blocks(case):
    layout = BlockLayout(*case)
    for rest in ((), (3,), (2, 3)):
        tokens = torch.randn(2, layout.num_tokens, *rest)
        assert torch.equal(layout.from_blocks(layout.to_blocks(tokens)), tokens)


@given(grids_and_blocks())
@property_settings
def test_slots_of_tokens_and_tokens_of_slots_are_inverse(case):
    layout = BlockLayout(*case)
    token_of_slot, is_token, slot_of_token = layout.slots()
    assert is_token.sum() == layout.num_tokens
    assert torch.equal(token_of_slot[slot_of_token], torch.arange(layout.num_tokens))
    assert is_token[slot_of_token].all()
    assert not token_of_slot[~is_token].any()


@pytest.mark.parametrize(("grid", "blocks"), [((4, 6), (2, 3)), ((5, 7), (2, 3)), ((2, 3), (4, 4))])
def test_gradients_pass_through_blocks_and_back(grid, blocks):
    layout = BlockLayout(grid, blocks)
    tokens = torch.randn(2, layout.num_tokens, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, layout.num_blocks, layout.largest_block, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: layout.to_blocks(x) * weight, tokens)
    assert torch.autograd.gradcheck(lambda x: layout.from_blocks(layout.to_blocks(x) * weight), tokens)


def test_noncontiguous_tokens_go_to_blocks():
    tokens = torch.randn(2, 3, 24).transpose(1, 2)
    for layout in (BlockLayout((4, 6), (2, 3)), BlockLayout((4, 6), (3, 4))):
        assert torch.equal(layout.to_blocks(tokens), layout.to_blocks(tokens.contiguous()))


def test_dtypes_survive_the_way_through_blocks():
    for layout in (BlockLayout((4,), (2,)), BlockLayout((5,), (2,))):
        for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float64):
            tokens = torch.ones(1, layout.num_tokens, dtype=dtype)
            assert layout.from_blocks(layout.to_blocks(tokens)).dtype == dtype


def test_layouts_are_values():
    layout = BlockLayout([6, 4], [2, 2])
    assert layout == BlockLayout((6, 4), (2, 2))
    assert hash(layout) == hash(BlockLayout((6, 4), (2, 2)))
    assert layout != BlockLayout((4, 6), (2, 2))
    assert layout.grid == (6, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.grid = (4, 6)


@given(grids_and_blocks(max_length=40, max_tokens=4000))
@property_settings
def test_chosen_blocks_keep_the_mixing_cheap_and_fit_the_grid(case):
    grid, _ = case
    blocks = choose_blocks(grid)
    assert len(blocks) == len(grid)
    assert math.prod(blocks) ** 2 <= math.prod(grid)
    assert all(1 <= count <= length for count, length in zip(blocks, grid, strict=True))


@pytest.mark.parametrize(
    ("grid", "blocks"),
    [((16, 16), (4, 4)), ((32, 32), (4, 4)), ((21, 30, 50), (3, 5, 10)), ((1, 1), (1, 1)), ((10007,), (100,))],
)
def test_chosen_blocks_of_known_grids(grid, blocks):
    assert choose_blocks(grid) == blocks


def test_chosen_blocks_turn_with_the_grid():
    assert choose_blocks((24, 40)) == choose_blocks((40, 24))[::-1]


@pytest.mark.parametrize("wrong", [(0, 4), (-1,), (2.0, 2), (), (1, 2, 3, 4), 4, "44", None, (True, 2), ("4", 4)])
def test_counts_that_are_not_one_to_three_positive_integers_are_refused(wrong):
    with pytest.raises(UserError, match=r"^grid=.*must be one to three positive integers, one per grid axis\.$"):
        BlockLayout(wrong, (2, 2))
    with pytest.raises(UserError, match=r"^blocks=.*must be one to three positive integers"):
        BlockLayout((4, 4), wrong)
    with pytest.raises(UserError, match="^grid="):
        choose_blocks(wrong)


def test_blocks_of_another_dimension_than_the_grid_are_refused():
    for grid, blocks in itertools.permutations([(4,), (4, 4), (4, 4, 4)], 2):
        with pytest.raises(UserError, match="give one block count per grid axis") as error:
            BlockLayout(grid, blocks)
        assert str(grid) in str(error.value) and str(blocks) in str(error.value)


def test_a_sequence_that_does_not_fill_the_grid_is_refused():
    for blocks in ((2, 2), (3, 3)):
        with pytest.raises(UserError, match=r"a sequence of 15 tokens does not fit grid=\(4, 4\), which has 16"):
            BlockLayout((4, 4), blocks).to_blocks(torch.zeros(1, 15, 2))
