"""Hugging Face datasets as training data: parquet and webdataset files are the same samples as an image folder."""

from __future__ import annotations

import io
import tarfile

import pytest
import torch
from training_runs import losses, make_images, tiny_config

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import finetune
from mhla_diffusion.training.config import DataOptions
from mhla_diffusion.training.data import read_batches, sample_generator
from mhla_diffusion.training.hf_datasets import DatasetImages, is_dataset
from mhla_diffusion.training.images import ImageFolder
from mhla_diffusion.training.sources import open_source

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")


def as_parquet(images, out, split="train", names=("0", "1", "2"), **columns):
    folder = ImageFolder(images, size=8, channels=1)
    rows = {
        "image": [{"bytes": (images / name).read_bytes(), "path": name} for name, _ in folder.files],
        "label": [int(owner) for _, owner in folder.files],
        "text": [f"picture {name}" for name, _ in folder.files],
        **columns,
    }
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    out.mkdir(exist_ok=True)
    table = datasets.Dataset.from_dict(rows)
    for column, kind in kinds.items():
        if column not in columns:
            table = table.cast_column(column, kind)
    table.to_parquet(str(out / f"{split}-00000-of-00001.parquet"))
    return out


def as_webdataset(images, out):
    folder = ImageFolder(images, size=8, channels=1)
    out.mkdir()
    with tarfile.open(out / "shard-000000.tar", "w") as archive:
        for number, (name, owner) in enumerate(folder.files):
            for suffix, content in (("cls", owner.encode()), ("png", (images / name).read_bytes())):
                entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return out


@pytest.mark.parametrize("write", [as_parquet, as_webdataset])
def test_a_dataset_gives_the_samples_of_the_folder_it_was_made_from(tmp_path, write):
    images = make_images(tmp_path / "images")
    folder = ImageFolder(images, size=8, channels=1, flip=True)
    source = open_source(
        str(write(images, tmp_path / "data")),
        "data.train",
        DataOptions(size=8, channels=1),
        family_named("dit"),
        flip=True,
    )
    assert isinstance(source, DatasetImages) and len(source) == len(folder)
    assert source.class_names == folder.class_names and source.latent_shape is None
    for index in range(len(folder)):
        one, other = (x.read(index, sample_generator(1, index)) for x in (folder, source))
        assert torch.equal(one.image, other.image)
        assert torch.equal(one.conditions["class_labels"], other.conditions["class_labels"])
        assert other.text == (f"picture {folder.files[index][0]}" if write is as_parquet else None)
    for workers in (0, 1):
        (batch,) = read_batches(source, [[(0, 2), (0, 9)]], 0, workers)
        assert batch.images.shape == (2, 1, 8, 8)


def test_training_on_a_dataset_equals_training_on_the_folder_and_so_does_its_resume(tmp_path):
    finetune(tiny_config(tmp_path, "folder"))
    data = as_parquet(tmp_path / "images", tmp_path / "data")
    as_parquet(tmp_path / "images", tmp_path / "data", split="test")
    changes = {"data": {"train": str(data), "validation": f"{data}:test"}}
    finetune(tiny_config(tmp_path, "dataset", **changes, train={"steps": 4, "schedule": "constant"}))
    config = tiny_config(tmp_path, "dataset", **changes, train={"steps": 6, "schedule": "constant"})
    finetune(config, resume="latest")
    finetune(tiny_config(tmp_path, "whole", train={"schedule": "constant"}))
    assert losses(tmp_path / "dataset") == losses(tmp_path / "whole")


def test_other_images_have_another_fingerprint(tmp_path):
    images = make_images(tmp_path / "images")
    one = DatasetImages(str(as_parquet(images, tmp_path / "one")), 8)
    again = DatasetImages(str(as_parquet(images, tmp_path / "again")), 8)
    next((images / "0").iterdir()).unlink()
    other = DatasetImages(str(as_parquet(images, tmp_path / "other")), 8)
    assert one.fingerprint == again.fingerprint != other.fingerprint


def test_class_ids_without_names_are_their_own_names(tmp_path):
    images = make_images(tmp_path / "images", classes=3, per_class=1)
    source = DatasetImages(str(as_parquet(images, tmp_path / "data", label=[10, 2, 7])), 8)
    assert source.class_names == ["2", "7", "10"] and source.labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [0, 1, -1]}, "has 1 images without a class, such as -1"),
        ({"image": ["a", "b", "c"]}, "has the columns image, label, text; an image column is expected"),
    ],
)
def test_columns_that_do_not_fit_are_told(tmp_path, columns, message):
    images = make_images(tmp_path / "images", per_class=1)
    if "label" in columns:
        table = datasets.Dataset.from_dict({"image": [str(p) for p in sorted(images.rglob("*.png"))], **columns})
        table = table.cast_column("image", datasets.Image()).cast_column("label", datasets.ClassLabel(names=["a", "b"]))
        (tmp_path / "data").mkdir()
        table.to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    else:
        as_parquet(images, tmp_path / "data", **columns)
    with pytest.raises(UserError, match=message):
        DatasetImages(str(tmp_path / "data"), 8)


def test_classes_unknown_to_the_training_data_and_missing_splits_are_told(tmp_path):
    data = as_parquet(make_images(tmp_path / "images"), tmp_path / "data")
    with pytest.raises(UserError, match="has class '2', which the training images do not have"):
        DatasetImages(str(data), 8, class_names=["0", "1"])
    with pytest.raises(UserError, match="cannot be read: .*validation") as caught:
        DatasetImages(f"{data}:validation", 8)
    assert "\n" not in str(caught.value)


def test_a_damaged_image_is_named_and_replaced(tmp_path):
    images = make_images(tmp_path / "images")
    broken = images / "1" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    source = DatasetImages(str(as_parquet(images, tmp_path / "data")), 8)
    with pytest.warns(UserWarning, match="image (1/)?3.png cannot be read: .*another one is used in its place"):
        assert len(list(read_batches(source, [[(0, index)] for index in range(21)], 0, 0))) == 21


def test_what_can_be_a_dataset_is_told_from_paths(tmp_path):
    make_images(tmp_path / "images")
    assert is_dataset("owner/name") and is_dataset("owner/name:test")
    assert not is_dataset("name") and not is_dataset("a/b/c") and not is_dataset(str(tmp_path / "images"))
    with pytest.raises(UserError, match="data.train is 'nowhere', which is not a folder; an image folder .* expected"):
        open_source("nowhere", "data.train", DataOptions(size=8), family_named("dit"), flip=False)
