"""Captioned images: folders with metadata or text files beside the images, and what is refused of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training.config import DataOptions
from mhla_diffusion.training.data import read_batches, sample_generator
from mhla_diffusion.training.images import ImageFolder
from mhla_diffusion.training.sources import open_source

NAMES = ["a.png", "deep/er/b.png", "deep/c.png", "d.png"]


def make_pictures(folder, names=NAMES):
    random = np.random.default_rng(0)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name)
    return folder


def write_metadata(folder, rows):
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def beside(folder, rows):
    for name, text in rows:
        (folder / name).with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def captioned(folder, **options):
    return open_source(str(folder), "data.train", DataOptions(size=8, **options), family_named("sana"), flip=False)


def texts(source):
    return {name: source.read(i, sample_generator(0)).text for i, (name, _) in enumerate(source.files)}


@pytest.mark.parametrize("write", [write_metadata, beside])
def test_every_image_below_the_folder_comes_with_its_caption_and_without_a_class(tmp_path, write):
    write(make_pictures(tmp_path), [(name, f"pièce {name}") for name in reversed(NAMES)])
    source = captioned(tmp_path)
    assert source.captioned and not source.text_cached and source.class_names == [] and len(source) == 4
    assert texts(source) == {name: f"pièce {name}" for name in NAMES}
    assert source.read(0, sample_generator(0)).conditions == {}
    (batch,) = read_batches(source, [[(0, 0), (0, 3)]], 0, 0)
    assert batch.images.shape == (2, 3, 8, 8) and len(batch.texts) == 2 and batch.conditions == {}


def test_metadata_goes_before_text_files(tmp_path):
    beside(make_pictures(tmp_path), [(name, "beside") for name in NAMES])
    write_metadata(tmp_path, [(name, "in metadata") for name in NAMES])
    assert set(texts(captioned(tmp_path)).values()) == {"in metadata"}


def test_another_caption_is_another_data_set(tmp_path):
    write_metadata(make_pictures(tmp_path), [(name, "one") for name in NAMES])
    one = captioned(tmp_path).fingerprint
    write_metadata(tmp_path, [(name, "one" if name != "d.png" else "other") for name in NAMES])
    assert captioned(tmp_path).fingerprint != one


def test_families_of_classes_need_no_captions_and_keep_those_that_are_there(tmp_path):
    make_pictures(tmp_path, ["x/1.png", "y/1.png"])
    write_metadata(tmp_path, [("y/1.png", "a caption"), ("y/gone.png", "of nothing")])
    source = open_source(str(tmp_path), "data.train", DataOptions(size=8), family_named("dit"), flip=False)
    assert not source.captioned and source.class_names == ["x", "y"]
    assert texts(source) == {"x/1.png": None, "y/1.png": "a caption"}


@pytest.mark.parametrize(
    ("write", "rows", "message"),
    [
        (write_metadata, [("a.png", "x"), ("b.png", "x"), ("e.png", "x")],
         r"metadata.jsonl, line 2, names 'b.png', which is no image in that folder \(the first of 2\)"),
        (write_metadata, [(name, "" if name == "deep/c.png" else "x") for name in NAMES],
         "metadata.jsonl, line 3, has an empty caption; give it"),
        (write_metadata, [("a.png", "x")], r"image .*d.png has no caption .no line in .*jsonl. .the first of 3"),
        (beside, [(name, " " if "deep" in name else "x") for name in NAMES],
         r"caption .*deep/c.txt is empty \(the first of 2\)|caption .*b.txt is empty \(the first of 2\)"),
        (beside, [("a.png", "x")], r"has no caption .no .txt beside it. .the first of 3"),
        (write_metadata, [("a.png", 5)], "metadata.jsonl, line 1, is not a JSON object with 'file_name' and 'text'"),
        (beside, [], "has no captions; a metadata.jsonl with file_name and text in each line, or NAME.txt"),
    ],
)  # fmt: skip
def test_captions_that_are_not_there_are_one_sentence_at_the_start(tmp_path, write, rows, message):
    write(make_pictures(tmp_path), rows)
    with pytest.raises(UserError, match=message) as caught:
        captioned(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_images_and_text_that_is_no_utf8_are_told(tmp_path):
    with pytest.raises(UserError, match="has no images"):
        captioned(tmp_path)
    make_pictures(tmp_path, ["a.png"])
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00caption")
    with pytest.raises(UserError, match="a.txt cannot be read as UTF-8 text"):
        captioned(tmp_path)


def test_captions_may_hold_any_character_and_files_may_begin_with_a_byte_order_mark(tmp_path):
    rows = [("a.png", "one line\u2028or two\x85"), *((name, "x") for name in NAMES[1:])]
    lines = [json.dumps({"file_name": name, "text": text}, ensure_ascii=False) for name, text in rows]
    (make_pictures(tmp_path / "listed") / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    assert texts(captioned(tmp_path / "listed"))["a.png"] == "one line\u2028or two"
    make_pictures(tmp_path / "beside", ["a.png"])
    (tmp_path / "beside" / "a.txt").write_text("a caption", encoding="utf-8-sig")
    assert texts(captioned(tmp_path / "beside")) == {"a.png": "a caption"}


def test_two_captions_of_one_image_are_refused_unless_they_are_the_same(tmp_path):
    rows = [(name, "x") for name in NAMES]
    write_metadata(make_pictures(tmp_path), [*rows, ("./a.png", "x")])
    assert len(captioned(tmp_path)) == 4
    write_metadata(tmp_path, [*rows, ("a.png", "y")])
    with pytest.raises(UserError, match="line 5, has another caption of 'a.png' than line 1; one is accepted"):
        captioned(tmp_path)


def test_a_caption_stays_with_its_image_when_another_stands_in(tmp_path):
    write_metadata(make_pictures(tmp_path), [(name, name) for name in NAMES])
    source = captioned(tmp_path)
    (tmp_path / "a.png").write_bytes(b"broken")
    with pytest.warns(UserWarning, match="a.png cannot be read"):
        (batch,) = read_batches(source, [[(0, 0)]], 0, 0)
    assert batch.texts == [source.files[1][0]]
    assert torch.equal(batch.images[0], source.read(1, sample_generator(0)).image)


def test_hidden_files_and_folders_are_not_images(tmp_path):
    make_pictures(tmp_path, ["a.png", ".cache/b.png", ".c.png"])
    beside(tmp_path, [("a.png", "x")])
    assert [name for name, _ in ImageFolder(tmp_path, 8, takes_text=True).files] == ["a.png"]
