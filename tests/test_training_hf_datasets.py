"""Hugging Face datasets as training data: parquet and webdataset files are the same samples as an image folder."""

from __future__ import annotations

import io
import tarfile

import pytest
import torch
from PIL import Image
from training_runs import losses, make_images, tiny_config

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import finetune
from mhla_diffusion.training.config import DataOptions
from mhla_diffusion.training.data import BatchPlan, UnreadableSample, read_batches, sample_generator, sample_order
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


def test_what_is_no_image_is_told_in_the_same_words_each_time(tmp_path):
    images = make_images(tmp_path / "images")
    (images / "1" / "3.png").write_bytes(b"no image any more")
    source = DatasetImages(str(as_parquet(images, tmp_path / "data")), 8)
    with pytest.raises(UnreadableSample, match="3.png cannot be read: it is of no known format$"):
        source.read(10, sample_generator(0))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_without_an_image_is_told_and_replaced(tmp_path, streaming):
    images = make_images(tmp_path / "images")
    files = [{"bytes": (images / name).read_bytes(), "path": None} for name, _ in ImageFolder(images, 8).files]
    rows = datasets.Dataset.from_dict({"image": [*files[:10], None, *files[11:]], "text": ["a caption"] * 21})
    (tmp_path / "data").mkdir()
    rows.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    options = DataOptions(size=8, streaming=streaming, buckets=None if streaming else [[8, 8], [8, 16]])
    source = open_source(str(tmp_path / "data"), "data.train", options, family_named("sana"), flip=False)
    with pytest.warns(UserWarning, match="image .* is missing; another one is used in its place"):
        assert len(list(read_batches(source, [[(0, index)] for index in range(21)], 0, 0))) == 21


def test_what_can_be_a_dataset_is_told_from_paths(tmp_path):
    make_images(tmp_path / "images")
    assert is_dataset("owner/name") and is_dataset("owner/name:test")
    assert not is_dataset("name") and not is_dataset("a/b/c") and not is_dataset(str(tmp_path / "images"))
    with pytest.raises(UserError, match="data.train is 'nowhere', which is not a folder; an image folder .* expected"):
        open_source("nowhere", "data.train", DataOptions(size=8), family_named("dit"), flip=False)


# Streams -------------------------------------------------------------------------------------------------------------


def streamed(place, family="dit", **options):
    options = DataOptions(size=8, channels=1, streaming=True, num_workers=0, **options)
    return open_source(str(place), "data.train", options, family_named(family), flip=True)


@pytest.fixture
def numbered(tmp_path):
    """A dataset of 21 images whose captions are their numbers."""
    images = make_images(tmp_path / "images")
    return as_parquet(images, tmp_path / "data", text=[f"number {i}" for i in range(21)])


def read_steps(source, rounds=1, processes=1, workers=0, first_step=0, last_step=9, seed=0):
    """Captions and images of each step of 7 (or 8 with several shares), all processes and rounds together."""
    size = 7 if rounds * processes == 1 else 8
    order = sample_order(source, seed, size)
    plans = [BatchPlan(order, size, rounds, rank, processes, first_step, last_step) for rank in range(processes)]
    streams = [list(read_batches(source, plan, seed, workers)) for plan in plans]
    steps = [
        [stream[step * rounds + part] for part in range(rounds) for stream in streams]
        for step in range(last_step - first_step)
    ]
    texts = [[text for batch in step for text in batch.texts] for step in steps]
    return texts, torch.stack([torch.cat([batch.images for batch in step]) for step in steps])


def test_a_stream_holds_every_row_once_in_every_epoch_in_another_order(numbered):
    texts, images = read_steps(streamed(numbered))
    epochs = [sum(texts[3 * epoch : 3 * epoch + 3], []) for epoch in range(3)]
    assert all(sorted(epoch) == sorted(f"number {i}" for i in range(21)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read_steps(streamed(numbered))[0] == texts != read_steps(streamed(numbered), seed=1)[0]
    whole = DatasetImages(str(numbered), 8, 1)
    for text, image in zip(sum(texts, []), images.flatten(0, 1), strict=True):
        expected = whole.read(int(text.split()[1]), sample_generator(0)).image
        assert torch.equal(image, expected) or torch.equal(image, expected.flip(-1))


@pytest.mark.parametrize("count", [None, 21])
def test_a_stream_goes_on_exactly_where_it_was_cut(numbered, count):
    texts, images = read_steps(streamed(numbered))
    source = streamed(numbered)
    source.count = count
    later_texts, later_images = read_steps(source, first_step=5)
    assert later_texts == texts[5:] and torch.equal(later_images, images[5:])


@pytest.mark.parametrize("split", [{"workers": 3}, {"processes": 2}, {"rounds": 2, "processes": 2}])
def test_a_stream_does_not_depend_on_processes_rounds_or_readers(numbered, split):
    source = streamed(numbered)
    if "workers" in split:
        source.threads = 3
    else:
        whole = [text for step in read_steps(source, last_step=9)[0] for text in step][:56]
        assert [text for step in read_steps(source, last_step=7, **split)[0] for text in step] == whole
        return
    one, other = read_steps(streamed(numbered)), read_steps(source, **split)
    assert one[0] == other[0] and torch.equal(one[1], other[1])


def test_the_next_row_of_a_stream_stands_in_for_a_damaged_one(tmp_path):
    images = make_images(tmp_path / "images")
    source = ImageFolder(images, size=8)
    broken = images / source.files[4][0]
    broken.write_bytes(broken.read_bytes()[:40])
    data = as_parquet(images, tmp_path / "data", text=[f"number {i}" for i in range(21)])
    with pytest.warns(UserWarning, match="cannot be read: .*another one is used in its place"):
        texts, _ = read_steps(streamed(data), last_step=3)
    texts = sum(texts, [])
    assert "number 4" not in texts
    (twice,) = [i for i in range(20) if texts[i] == texts[i + 1]]
    assert sorted({*texts}) == sorted(f"number {i}" for i in range(21) if i != 4) and twice >= 0


def test_captions_of_a_dataset_and_of_its_stream_need_no_labels(tmp_path, numbered):
    for source in (
        streamed(numbered, "sana"),
        open_source(str(numbered), "data.train", DataOptions(size=8, channels=1), family_named("sana"), flip=False),
    ):
        assert source.captioned and source.class_names == []
        (batch,) = read_batches(source, [[(0, 0), (0, 1)]], 0, 0)
        assert all(text.startswith("number ") for text in batch.texts) and batch.conditions == {}
    empty = as_parquet(tmp_path / "images", tmp_path / "empty", text=["x"] * 20 + ["  "])
    with pytest.raises(UserError, match="1 images with an empty caption .column 'text'., the first is row 20"):
        open_source(str(empty), "data.train", DataOptions(size=8), family_named("sana"), flip=False)
    with pytest.raises(UserError, match="has an empty caption"):
        read_steps(streamed(empty, "sana"), last_step=3)


def test_buckets_of_a_dataset(tmp_path):
    images = make_images(tmp_path / "images")
    Image.new("L", (24, 8)).save(images / "1" / "3.png")
    options = DataOptions(size=8, channels=1, buckets=[[8, 8], [8, 24]])
    data = as_parquet(images, tmp_path / "data")
    source = open_source(str(data), "data.train", options, family_named("dit"), flip=False)
    assert [source.shapes[source.shape_of(i)] for i in range(21)].count((8, 24)) == 1
    assert source.read(10, sample_generator(0)).image.shape == (1, 8, 24)


def test_training_on_a_stream_can_be_cut(tmp_path, numbered):
    changes = {"data": {"train": str(numbered), "streaming": True}}
    steps = {"train": {"schedule": "constant"}}
    finetune(tiny_config(tmp_path, "whole", **changes, **steps))
    finetune(tiny_config(tmp_path, "cut", **changes, train={"steps": 4, "schedule": "constant"}))
    finetune(tiny_config(tmp_path, "cut", **changes, **steps), resume="latest")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6


def test_what_cannot_be_streamed_is_told(tmp_path, numbered):
    with pytest.raises(UserError, match="data.streaming is true, but data.buckets needs the sizes of all images"):
        streamed(numbered, buckets=[[8, 8]])
    with pytest.raises(UserError, match="data.streaming is true, but data.train .*images' is no Hugging Face dataset"):
        streamed(tmp_path / "images")
    unnamed = as_parquet(tmp_path / "images", tmp_path / "unnamed", label=[i % 3 for i in range(21)])
    with pytest.raises(UserError, match="a label column 'label' without class names.*set data.streaming=false"):
        streamed(unnamed)
    source = streamed(numbered)
    source.count = 20
    with pytest.raises(UserError, match="has 21 rows, but is said to have 20"):
        read_steps(source)
