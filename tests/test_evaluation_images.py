"""Reading images to score: every image once, and a sentence for everything odd."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation.images import ImageSet, read_labels


def pixels(seed, height=6, width=8, channels=3):
    array = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return array[..., 0] if channels == 1 else array


def read_all(images, batch_size=4):
    found = {}
    for indices, batch in images.batches(batch_size):
        assert batch.dtype == torch.uint8 and batch.shape[1] == 3 and 0 < len(batch) <= batch_size
        for index, image in zip(indices, batch, strict=True):
            assert index not in found
            found[index] = image.permute(1, 2, 0).numpy()
    return [found[index] for index in sorted(found)]


def test_folder_is_read_in_order_of_paths_with_sub_folders(tmp_path):
    for number, name in enumerate(["a/2.png", "a/1.png", "b.PNG", ".hidden.png", "notes.txt", "x.jsonl"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name.lower().endswith("png"):
            Image.fromarray(pixels(number)).save(tmp_path / name, format="png")
        else:
            (tmp_path / name).write_text("no image")
    images = ImageSet(tmp_path)
    assert [images.name(i) for i in range(len(images))] == ["a/1.png", "a/2.png", "b.PNG"]
    for image, seed in zip(read_all(images), (1, 0, 2), strict=True):
        np.testing.assert_array_equal(image, pixels(seed))
    assert images.notes() == []


def test_a_photograph_is_scored_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise by a quarter
    Image.fromarray(np.ascontiguousarray(np.rot90(pixels(0)))).save(tmp_path / "0.png", exif=exif)
    np.testing.assert_array_equal(read_all(ImageSet(tmp_path))[0], pixels(0))


@pytest.mark.parametrize("compressed", [False, True])
def test_array_file_equals_numpy(tmp_path, compressed):
    array = np.stack([pixels(i) for i in range(11)])
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", array)
    images = ImageSet(tmp_path / "a.npz")
    assert len(images) == 11
    np.testing.assert_array_equal(np.stack(read_all(images)), array)


def test_images_of_different_sizes_are_all_read_and_told(tmp_path):
    for i in range(9):
        Image.fromarray(pixels(i, width=8 + i % 3)).save(tmp_path / f"{i}.png")
    images = ImageSet(tmp_path, "generated")
    for i, image in enumerate(read_all(images, batch_size=2)):
        np.testing.assert_array_equal(image, pixels(i, width=8 + i % 3))
    (note,) = images.notes()
    assert "generated images have 3 different sizes" in note and "3 of 8x6" in note


def test_images_that_all_differ_in_size_do_not_pile_up(tmp_path):
    for i in range(40):
        Image.fromarray(pixels(i, width=4 + i)).save(tmp_path / f"{i:02d}.png")
    first_indices, _ = next(iter(ImageSet(tmp_path).batches(batch_size=2)))
    assert first_indices == [0]
    assert len(read_all(ImageSet(tmp_path), batch_size=2)) == 40


def test_transparent_images_are_laid_on_white_and_told(tmp_path):
    array = np.zeros((2, 2, 4), np.uint8)
    array[0, 0] = (255, 0, 0, 255)
    Image.fromarray(array).save(tmp_path / "0.png")
    opaque = np.full((2, 2, 4), 255, np.uint8)
    Image.fromarray(opaque).save(tmp_path / "1.png")
    images = ImageSet(tmp_path)
    first = read_all(images)[0]
    assert first[0, 0].tolist() == [255, 0, 0] and first[1, 1].tolist() == [255, 255, 255]
    assert images.notes() == ["1 of 2 image images are transparent and were laid on white."]


def test_grey_and_sixteen_bit_images_are_told(tmp_path):
    Image.fromarray(pixels(0, channels=1)).save(tmp_path / "0.png")
    Image.fromarray((np.arange(48).reshape(6, 8) * 257).astype(np.uint16)).save(tmp_path / "1.png")
    images = ImageSet(tmp_path, "reference")
    grey, deep = read_all(images)
    np.testing.assert_array_equal(grey, np.repeat(pixels(0, channels=1)[..., None], 3, 2))
    np.testing.assert_array_equal(deep[..., 0], np.arange(48).reshape(6, 8))
    notes = " ".join(images.notes())
    assert "2 of 2 reference images are greyscale" in notes and "1 of 2 reference images have 16 bits" in notes
    assert "greyscale" not in " ".join(images.notes(grey_expected=True))


def test_lossy_images_are_told(tmp_path):
    Image.fromarray(pixels(0)).save(tmp_path / "0.jpg")
    Image.fromarray(pixels(1)).save(tmp_path / "1.png")
    images = ImageSet(tmp_path)
    read_all(images)
    (note,) = images.notes()
    assert "1 of 2" in note and "lossy" in note


def test_unreadable_images_are_left_out_and_named(tmp_path):
    for i in range(3):
        Image.fromarray(pixels(i)).save(tmp_path / f"{i}.png")
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "3.png").write_bytes(b"")
    images = ImageSet(tmp_path, "generated")
    assert len(read_all(images)) == 2
    (note,) = images.notes()
    assert "2 generated files could not be read" in note and "1.png" in note and "3.png" in note


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no images"),
        (lambda path: path.write_text("x"), "neither a folder of images nor an .npz file"),
    ],
)
def test_bad_paths_are_refused_in_one_sentence(tmp_path, make, message):
    make(tmp_path / "it")
    with pytest.raises(UserError, match=message) as error:
        ImageSet(tmp_path / "it", "reference")
    assert "reference" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "no image array 'arr_0'"),
        ({"arr_0": np.zeros((2, 4, 4, 3), np.float32)}, "uint8 array"),
        ({"arr_0": np.zeros((2, 3, 4, 4), np.uint8)}, "uint8 array"),
    ],
)
def test_bad_array_files_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        ImageSet(tmp_path / "a.npz")


def test_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(UserError, match="cannot be read as an .npz file"):
        ImageSet(tmp_path / "a.npz")


def test_labels_are_read(tmp_path):
    assert read_labels(tmp_path) == {}
    lines = [{"file": "0.png", "class_labels": 3}, {"file": "1.png", "prompt": "a cat"}]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_labels(tmp_path) == {"0.png": 3}
    (tmp_path / "labels.jsonl").write_text("three\n")
    with pytest.raises(UserError, match="line 1"):
        read_labels(tmp_path)
