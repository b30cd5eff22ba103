"""Images of several shapes: which bucket each takes, how it is cut, and batches of one shape."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from diffusers.image_processor import PixArtImageProcessor
from diffusers.pipelines.sana import pipeline_sana
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training.buckets import assign, check_factor, describe_shapes, open_buckets
from mhla_diffusion.training.config import DataOptions, config_from_dict
from mhla_diffusion.training.data import BatchPlan, BucketOrder, SampleOrder, read_batches, sample_order
from mhla_diffusion.training.images import load_image
from mhla_diffusion.training.sources import open_source

BUCKETS = [[16, 16], [8, 24], [24, 8]]
sides = st.integers(1, 5000)


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=20), st.sampled_from([512, 1024, 2048, 4096]))
@settings(max_examples=40, deadline=None)
def test_published_buckets_are_those_of_the_pipeline(sizes, size):
    table = getattr(pipeline_sana, f"ASPECT_RATIO_{size}_BIN")
    shapes, places = assign(sizes, open_buckets(DataOptions(size=size, buckets="sana")))
    for (height, width), place in zip(sizes, places, strict=True):
        assert shapes[place] == PixArtImageProcessor.classify_height_width_bin(height, width, table)
    assert {*places} == {*range(len(shapes))}


def test_of_buckets_with_one_aspect_ratio_that_of_the_nearest_area_is_taken():
    buckets = open_buckets(DataOptions(buckets=[[64, 64], [256, 256], [128, 256]]))
    shapes, places = assign([(50, 50), (1000, 1000), (300, 600), None, (40, 40)], buckets)
    assert [shapes[place] for place in places] == [(64, 64), (256, 256), (128, 256), (64, 64), (64, 64)]


@pytest.mark.parametrize("buckets", ["pixart", [], [[16]], [[16, 0]], [16, 16], [[16, 16.5]], {"a": 1}])
def test_other_values_are_refused(buckets):
    with pytest.raises(UserError, match="data.buckets is .*; 'sana' or a list of sizes"):
        open_buckets(DataOptions(buckets=buckets))


def test_sizes_that_sana_does_not_publish_are_refused():
    with pytest.raises(UserError, match="data.buckets is 'sana', .* but data.size is 256"):
        open_buckets(DataOptions(size=256, buckets="sana"))


def test_lists_in_a_recipe_are_read():
    assert open_buckets(config_from_dict({"data": {"buckets": BUCKETS}}).data) == {
        (16, 16): 1.0, (8, 24): 8 / 24, (24, 8): 3.0
    }  # fmt: skip


def test_sizes_that_the_factor_does_not_divide_are_refused():
    check_factor([(64, 96), (5, 32, 32)], 32, "data.buckets")
    message = (
        "data.buckets gives samples of 64×100 pixels, which the VAE's factor of 32 does not divide; 64×96 would do"
    )
    with pytest.raises(UserError, match=message):
        check_factor([(64, 64), (64, 100)], 32, "data.buckets")


# Cutting -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_image_covers_every_shape_about_its_centre(tmp_path_factory, height, width, to_height, to_width):
    ramp = np.zeros((height, width, 3), dtype=np.uint8)
    ramp[..., 0] = np.linspace(0, 255, width)[None, :]
    ramp[..., 1] = np.linspace(0, 255, height)[:, None]
    path = tmp_path_factory.mktemp("ramp") / "a.png"
    Image.fromarray(ramp).save(path)
    image = load_image(path, (to_height, to_width), 3)
    assert image.shape == (3, to_height, to_width)
    if min(height, width, to_height, to_width) >= 8:  # left and right, top and bottom are balanced about grey
        assert image[:2].mean((1, 2)).abs().max() < 0.2


def test_the_middle_of_a_wide_image_is_cut_and_what_fits_is_kept_whole(tmp_path):
    pixels = np.arange(8 * 24 * 3, dtype=np.uint8).reshape(8, 24, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    as_numbers = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
    assert torch.equal(load_image(tmp_path / "a.png", (8, 24), 3), as_numbers)
    assert torch.equal(load_image(tmp_path / "a.png", (8, 12), 3), as_numbers[..., 6:18])


# Order ---------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_batches_are_of_one_shape_and_every_image_is_used_equally_often(shape_of, batch_size, seed):
    order = BucketOrder(shape_of, seed, batch_size)
    epochs = 6
    batches = epochs * len(shape_of) // batch_size
    keys = [order[s] for s in range(batches * batch_size)]
    for first in range(0, len(keys), batch_size):
        assert len({shape_of[index] for _, index in keys[first : first + batch_size]}) == 1
    assert len(set(keys)) == len(keys)  # no noise is drawn twice for one image
    uses, sizes = Counter(index for _, index in keys), Counter(shape_of)
    for shape, size in sizes.items():
        counts = [uses[index] for index in range(len(shape_of)) if shape_of[index] == shape]
        assert max(counts) - min(counts) <= 1
        # in step with the others, but for batches that are not full yet and those of an epoch that has begun
        assert abs(sum(counts) - epochs * size) <= batch_size + size + len(sizes) * batch_size
    assert [BucketOrder(shape_of, seed, batch_size)[s] for s in range(len(keys) - 1, -1, -1)] == keys[::-1]


def test_shapes_are_mixed_within_an_epoch_and_in_another_way_in_the_next():
    shape_of = [0] * 40 + [1] * 40
    order = BucketOrder(shape_of, 0, 4)
    epochs = [[shape_of[order[s][1]] for s in range(e * 80, (e + 1) * 80, 4)] for e in range(3)]
    assert all(Counter(epoch) == {0: 10, 1: 10} for epoch in epochs)
    assert all(sum(a != b for a, b in zip(epoch, epoch[1:], strict=False)) > 3 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    other = BucketOrder(shape_of, 1, 4)
    assert [order[s] for s in range(80)] != [other[s] for s in range(80)]


# Sources -------------------------------------------------------------------------------------------------------------


def make_shapes(folder, classes=("a", "b")):
    random = np.random.default_rng(0)
    for number, (height, width) in enumerate([(20, 20)] * 6 + [(10, 30)] * 5 + [(50, 20)] * 3):
        place = folder / classes[number % len(classes)]
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02d}.png")
    return folder


def shaped(folder, **options):
    options = DataOptions(size=16, buckets=BUCKETS, **options)
    return open_source(str(folder), "data.train", options, family_named("dit"), flip=True)


@pytest.mark.parametrize(("rounds", "processes", "workers"), [(1, 1, 0), (2, 2, 0), (1, 1, 2)])
def test_steps_read_batches_of_one_shape_however_they_are_split(tmp_path, rounds, processes, workers):
    source = shaped(make_shapes(tmp_path))
    order = sample_order(source, 0, 4)
    assert isinstance(order, BucketOrder) and source.latent_shape is None
    seen = []
    plans = [BatchPlan(order, 4, rounds, rank, processes, 2, 12) for rank in range(processes)]
    streams = [list(read_batches(source, plan, 0, workers)) for plan in plans]
    for step in range(10):
        parts = [stream[step * rounds + part] for part in range(rounds) for stream in streams]
        assert len({part.images.shape[1:] for part in parts}) == 1
        keys = [key for part in parts for key in part.keys]
        assert keys == [order[s] for s in range((2 + step) * 4, (3 + step) * 4)]
        assert tuple(parts[0].images.shape[2:]) == source.shapes[source.shape_of(keys[0][1])]
        seen.append(tuple(parts[0].images.shape[2:]))
    assert {*seen} == {(16, 16), (8, 24), (24, 8)}


def test_the_distribution_is_told(tmp_path):
    assert describe_shapes(shaped(make_shapes(tmp_path))) == "16×16: 6, 8×24: 5, 24×8: 3"
    square = open_source(str(tmp_path), "data.train", DataOptions(size=16), family_named("dit"), flip=True)
    assert describe_shapes(square) is None and isinstance(sample_order(square, 0, 4), SampleOrder)


def test_an_image_whose_head_cannot_be_read_is_counted_where_most_are_and_replaced(tmp_path):
    make_shapes(tmp_path)
    (tmp_path / "a" / "06.png").write_bytes(b"broken")
    source = shaped(tmp_path)
    index = [name for name, _ in source.files].index("a/06.png")
    assert source.shapes[source.shape_of(index)] == (16, 16)
    with pytest.warns(UserWarning, match="06.png cannot be read"):
        (batch,) = read_batches(source, [[(0, index)]], 0, 0)
    assert batch.images.shape == (1, 3, 16, 16)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_an_image_that_a_camera_stored_sideways_takes_the_shape_it_has_upright(tmp_path, suffix):
    pixels = np.zeros((48, 32), dtype=np.uint8)
    pixels[:24] = 255  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise by a quarter
    (tmp_path / "a").mkdir()
    stored = Image.fromarray(pixels).rotate(90, expand=True)
    stored.save(tmp_path / "a" / f"0.{suffix}", exif=exif, **({} if suffix == "png" else {"quality": 100}))
    options = DataOptions(buckets=[[32, 48], [48, 32]])
    source = open_source(str(tmp_path), "data.train", options, family_named("dit"), flip=False)
    assert source.shapes == [(48, 32)]
    image = source.read(0, torch.Generator()).image
    assert (image[:, :23] > 0.9).all() and (image[:, 25:] < -0.9).all()


def test_only_shapes_that_occur_are_there(tmp_path):
    make_shapes(tmp_path, classes=("only",))
    for path in [*(tmp_path / "only").iterdir()][:]:
        if int(path.stem) >= 6:
            path.unlink()
    source = shaped(tmp_path)
    assert source.shapes == [(16, 16)] and isinstance(sample_order(source, 0, 4), SampleOrder)
