"""The order of the samples, the images, and the batches."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from training_runs import ROOT, make_images

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.data import (
    BatchPlan,
    SampleOrder,
    UnreadableSample,
    read_batches,
    sample_generator,
)
from mhla_diffusion.training.images import ImageFolder, centre_crop, image_size, load_image


def plan_keys(rounds=1, num_processes=1, first_step=0, last_step=7, batch_size=12, num_images=17):
    """The samples of each step, all processes and rounds together."""
    plans = [
        list(BatchPlan(SampleOrder(num_images, 3), batch_size, rounds, rank, num_processes, first_step, last_step))
        for rank in range(num_processes)
    ]
    return [
        [key for part in range(rounds) for plan in plans for key in plan[step * rounds + part]]
        for step in range(last_step - first_step)
    ]


def test_every_epoch_holds_every_image_once_in_another_order():
    order = SampleOrder(17, seed=5)
    epochs = [[order[s] for s in range(e * 17, (e + 1) * 17)] for e in range(3)]
    for e, keys in enumerate(epochs):
        assert [epoch for epoch, _ in keys] == [e] * 17
        assert sorted(index for _, index in keys) == list(range(17))
    assert len({tuple(index for _, index in keys) for keys in epochs}) == 3


@pytest.mark.parametrize(("rounds", "num_processes"), [(1, 2), (3, 1), (2, 3)])
def test_a_step_has_the_same_samples_in_the_same_order_however_it_is_split(rounds, num_processes):
    assert plan_keys(rounds, num_processes) == plan_keys()


def test_a_resumed_plan_goes_on_where_it_was_cut():
    assert plan_keys(first_step=4) == plan_keys()[4:]


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(UserError, match="train.batch_size is 12; a multiple of 8 is accepted"):
        BatchPlan(SampleOrder(5, 0), 12, 2, 0, 4, 0, 1)


def test_generators_depend_on_seed_and_key_only():
    draw = lambda *key: torch.rand(3, generator=sample_generator(*key)).tolist()  # noqa: E731
    assert draw(0, "image", 1) == draw(0, "image", 1)
    assert len({tuple(draw(*key)) for key in [(0, "image", 1), (1, "image", 1), (0, "noise", 1), (0, "image", 2)]}) == 4


def test_batches_do_not_depend_on_the_number_of_workers(tmp_path):
    source = ImageFolder(make_images(tmp_path / "images"), size=8, channels=1, flip=True)
    plan = [[(0, 3), (1, 3), (0, 20)], [(2, 0), (0, 9), (5, 9)]]
    for here, there in zip(read_batches(source, plan, 4, 0), read_batches(source, plan, 4, 2), strict=True):
        assert torch.equal(here.images, there.images)
        assert torch.equal(here.conditions["class_labels"], there.conditions["class_labels"])
        assert here.keys == there.keys


def test_about_half_of_the_images_are_mirrored_and_another_half_next_epoch(tmp_path):
    source = ImageFolder(make_images(tmp_path / "images", per_class=40), size=8, channels=1, flip=True)
    plain = ImageFolder(tmp_path / "images", size=8, channels=1)
    mirrored = []
    for epoch in (0, 1):
        (batch,) = read_batches(source, [[(epoch, i) for i in range(len(source))]], 0, 0)
        (still,) = read_batches(plain, [[(epoch, i) for i in range(len(source))]], 0, 0)
        same = (batch.images == still.images).flatten(1).all(1)
        assert ((batch.images.flip(-1) == still.images).flatten(1).all(1) | same).all()
        mirrored.append(~same)
    assert 0.3 < mirrored[0].float().mean() < 0.7
    assert not torch.equal(*mirrored)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_read_upright_whatever_way_the_camera_was_held(tmp_path, orientation):
    pixels = torch.arange(64, dtype=torch.uint8).reshape(8, 8).numpy() * 3
    # How the sensor saw it, by the definition in the EXIF standard: where its first row and first column are.
    stored = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.T,
        6: np.rot90(pixels),
        7: pixels[::-1, ::-1].T,
        8: np.rot90(pixels, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "image.png", exif=exif)
    image = load_image(tmp_path / "image.png", 8, 1)
    np.testing.assert_allclose(image[0].numpy(), pixels / 127.5 - 1, atol=1e-6)


def test_an_image_with_damaged_exif_data_is_read_as_it_is_stored(tmp_path):
    Image.new("L", (16, 8), "white").save(tmp_path / "image.png", exif=b"Exif\0\0MM\0nonsense")
    assert image_size(tmp_path / "image.png") == (8, 16)
    assert (load_image(tmp_path / "image.png", 8, 1) == 1).all()


def damage(folder, *names):
    for name in names:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_told_once_and_the_next_one_stands_in_for_it(tmp_path, workers):
    source = ImageFolder(make_images(tmp_path / "images"), size=8, flip=True)
    damage(tmp_path / "images", "1/3.png", "1/4.png")
    index = [name for name, _ in source.files].index("1/3.png")
    plan = [[(0, index), (0, 0)], [(1, index + 1), (2, index)]]
    with pytest.warns(UserWarning, match="another one is used in its place") as told:
        one, other = read_batches(source, plan, 0, workers)
    sentences = [str(warning.message) for warning in told]
    assert sum("1/3.png cannot be read" in sentence for sentence in sentences) == 1
    assert sum("1/4.png cannot be read" in sentence for sentence in sentences) == 1
    assert sentences[-1] == "2 damaged samples were replaced by others"
    assert one.keys == [(0, index), (0, 0)] and len(one.skipped) == 2 and len(other.skipped) == 3
    stand_in = source.read(index + 2, sample_generator(0, "image", 0, index + 2))
    assert torch.equal(one.images[0], stand_in.image)
    assert torch.equal(one.conditions["class_labels"], torch.tensor([1, 0]))


def test_too_many_damaged_images_end_the_reading(tmp_path):
    source = ImageFolder(make_images(tmp_path / "images"), size=8)
    damage(tmp_path / "images", *(f"{label}/{number}.png" for label in (0, 2) for number in range(0, 7, 2)))
    order = [[(0, index)] for index in range(21)]
    with pytest.warns(UserWarning, match="8 damaged samples were replaced"):
        assert len(list(read_batches(source, order, 0, 0))) == 21
    damage(tmp_path / "images", *(f"1/{number}.png" for number in range(0, 7, 2)))
    with (
        pytest.warns(UserWarning),
        pytest.raises(UserError, match="11 or more of 21 samples cannot be read, which is too many") as caught,
    ):
        list(read_batches(source, order, 0, 0))
    assert "\n" not in str(caught.value)


def test_a_sample_whose_damage_shows_at_another_place_each_time_counts_once(tmp_path):
    class Truncated(ImageFolder):
        def read(self, index, generator):
            if index == 1:
                raise UnreadableSample(f"video 1 ends before {torch.rand((), generator=generator):.6f} s")
            return super().read(index, generator)

    source = Truncated(make_images(tmp_path / "images"), size=8)
    with pytest.warns(UserWarning) as told:
        assert len(list(read_batches(source, [[(epoch, 1)] for epoch in range(15)], 0, 0))) == 15
    assert len(told) == 1


def test_a_shape_of_which_nothing_can_be_read_is_told(tmp_path):
    folder = make_images(tmp_path / "images", classes=1, per_class=4)
    Image.new("L", (16, 8)).save(folder / "0" / "wide.png")
    source = ImageFolder(folder, size=8, buckets={(8, 8): 1.0, (8, 16): 0.5})
    damage(folder, "0/wide.png")
    with pytest.raises(UserError, match="none of the 1 samples of shape 8×16 can be read; the first: image .*wide.png"):
        list(read_batches(source, [[(0, 4)]], 0, 0))


LEFT_OPEN = """
import sys, time
from mhla_diffusion.training.data import read_batches
from mhla_diffusion.training.images import ImageFolder

class Slow(ImageFolder):
    def read(self, index, generator):
        if index > 0:
            time.sleep(float(sys.argv[2]))
        return super().read(index, generator)

batches = read_batches(Slow(sys.argv[1], size=8), [[(0, index)] for index in range(21)], 0, 1)
print(len(next(batches).keys), flush=True)
"""


@pytest.mark.parametrize("seconds", [0, 1000])
def test_a_process_that_leaves_its_readers_open_ends_all_the_same(tmp_path, seconds):
    make_images(tmp_path / "images")
    command = [sys.executable, "-c", LEFT_OPEN, str(tmp_path / "images"), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "1\n") and "Error" not in done.stderr


def test_numeric_class_folders_are_ordered_by_value(tmp_path):
    source = ImageFolder(make_images(tmp_path / "images", classes=12, per_class=1), size=8)
    assert source.class_names == [str(i) for i in range(12)]
    labels = {
        name: source.read(i, sample_generator(0)).conditions["class_labels"] for i, (name, _) in enumerate(source.files)
    }
    assert labels["10/0.png"] == 10


def test_a_folder_without_class_folders_is_refused(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "alone.png")
    with pytest.raises(UserError, match="no images in class sub-folders"):
        ImageFolder(tmp_path, size=8)


def test_captions_come_from_metadata(tmp_path):
    folder = make_images(tmp_path / "images")
    (folder / "metadata.jsonl").write_text('{"file_name": "2/0.png", "text": "a bright square"}\n')
    source = ImageFolder(folder, size=8)
    texts = {name: source.read(i, sample_generator(0)).text for i, (name, _) in enumerate(source.files)}
    assert texts["2/0.png"] == "a bright square"
    assert texts["2/1.png"] is None


def test_images_are_scaled_to_the_range_of_the_model(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).save(path)
    assert load_image(path, 2, 1).tolist() == [[[-1.0, 1.0], [1.0, -1.0]]]
    assert load_image(path, 2, 3).shape == (3, 2, 2)


def test_transparency_becomes_white(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(path)
    assert (load_image(path, 4, 3) == 1).all()


@pytest.mark.parametrize("size", [(30, 20), (20, 30), (97, 64), (8, 200), (5, 5)])
def test_the_crop_is_the_centre_square_of_the_asked_size(size):
    width, height = size
    ramp = np.zeros((height, width, 3), dtype=np.uint8)
    ramp[..., 0] = np.linspace(0, 255, width)[None, :]
    ramp[..., 1] = np.linspace(0, 255, height)[:, None]
    cropped = np.asarray(centre_crop(Image.fromarray(ramp), 8), dtype=float)
    assert cropped.shape == (8, 8, 3)
    # the middle of the picture stays in the middle, so left and right, top and bottom are balanced about grey
    assert abs(cropped[..., 0].mean() - 127.5) < 16
    assert abs(cropped[..., 1].mean() - 127.5) < 16
