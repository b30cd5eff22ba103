"""Caches of captions beside latents, of several shapes, and of videos: what they hold, cuts, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiTPipeline, SanaPipeline, WanPipeline
from dit_models import small_dit, small_vae
from PIL import Image
from sana_components import small_components, small_text_encoder, small_tokenizer
from text_runs import make_place, text_config
from training_runs import ROOT, losses, same_tensors
from wan_models import small_components as wan_components

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import config_to_yaml, finetune
from mhla_diffusion.training.cache import cache_latents
from mhla_diffusion.training.cached import CachedLatents, fingerprint
from mhla_diffusion.training.data import sample_generator
from mhla_diffusion.training.sources import check_sources, open_source
from mhla_diffusion.training.video_files import write_mp4

SANA = family_named("sana")
SMALL = {"batch_size": 2, "shard_size": 3}
SHAPES = {"data": {"buckets": [[64, 64], [32, 96], [96, 32]]}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("place"))
    cache_latents(text_config(place, place / "run"), place / "cache", **SMALL)
    return place


def from_cache(place, *changes):
    data = {"data": {"train": str(place / "cache"), "validation": str(place / "cache")}}
    return lambda run, *further: text_config(place, run, data, *changes, *further)


def opened(config, path, flip=False):
    return open_source(str(path), "data.train", config.data, SANA, flip=flip)


# What it holds -------------------------------------------------------------------------------------------------------


def test_latents_and_captions_are_those_of_the_family(place, tmp_path):
    config = text_config(place, tmp_path / "run")
    images, cached = opened(config, place / "images"), opened(config, place / "cache")
    assert cached.text_cached and cached.captioned and cached.class_names == [] and len(cached) == 8
    assert cached.fingerprint == images.fingerprint and cached.latent_shape == (4, 8, 8)
    parts = small_components()
    null = SANA.null_conditions(parts, config.data.max_tokens)
    assert cached.shared_conditions.keys() == null.keys()
    for name, value in null.items():
        assert torch.equal(cached.shared_conditions[name], value)
    for index in range(8):
        one, other = (source.read(index, sample_generator(0, index)) for source in (images, cached))
        assert other.text == one.text and other.image is None
        expected = SANA.encode_prompts(parts, [one.text], config.data.instruction, config.data.max_tokens)
        mask = expected["prompt_mask"][0]
        assert 0 < mask.sum() < len(mask) and torch.equal(other.conditions["prompt_mask"], mask)
        embeds = other.conditions["prompt_embeds"]
        visible = expected["prompt_embeds"][0] * mask[:, None]
        torch.testing.assert_close(embeds, visible, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            other.posterior["mean"], SANA.posterior(parts, one.image[None])["mean"][0], rtol=1e-4, atol=1e-5
        )


def test_training_from_it_equals_training_from_images_and_captions(place, tmp_path):
    finetune(text_config(place, tmp_path / "images"))
    finetune(from_cache(place)(tmp_path / "cached"))
    one, other = losses(tmp_path / "images"), losses(tmp_path / "cached")
    assert len(one) == 4
    for (_, loss, norm), (_, same_loss, same_norm) in zip(one, other, strict=True):
        assert same_loss == pytest.approx(loss, rel=1e-5) and same_norm == pytest.approx(norm, rel=1e-4)


def test_samples_travel_to_reading_processes(place, tmp_path):
    source = opened(text_config(place, tmp_path / "run"), place / "cache")
    before = source.read(5, sample_generator(0))
    after = pickle.loads(pickle.dumps(source)).read(5, sample_generator(0))
    assert before.text == after.text and torch.equal(
        before.conditions["prompt_embeds"], after.conditions["prompt_embeds"]
    )


def make_shapes(folder: Path) -> Path:
    random = np.random.default_rng(1)
    folder.mkdir()
    sizes = [(70, 64), (40, 130), (64, 64), (130, 40), (33, 99), (64, 70), (32, 96)]
    rows = []
    for number, (height, width) in enumerate(sizes):
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        rows.append(json.dumps({"file_name": f"{number}.png", "text": f"picture {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def test_every_shape_is_cached_as_it_is_read_from_images(place, tmp_path):
    data = {"data": {"train": str(make_shapes(tmp_path / "images")), "flip": True}}
    config = text_config(place, tmp_path / "run", SHAPES, data)
    said = []
    cache_latents(config, tmp_path / "cache", batch_size=2, shard_size=4, say=said.append)
    assert said == ["7 samples: 64×64: 3, 32×96: 3, 96×32: 1"]
    images, cached = (opened(config, tmp_path / name, flip=True) for name in ("images", "cache"))
    assert cached.shapes == images.shapes == [(64, 64), (32, 96), (96, 32)] and cached.latent_shape is None
    parts = small_components()
    for index in range(7):
        one, other = (source.read(index, sample_generator(1, index)) for source in (images, cached))
        assert cached.shape_of(index) == images.shape_of(index) and other.text == f"picture {index}"
        assert other.posterior["mean"].shape == (4, *(side // 8 for side in images.shapes[images.shape_of(index)]))
        torch.testing.assert_close(
            other.posterior["mean"], SANA.posterior(parts, one.image[None])["mean"][0], rtol=1e-4, atol=1e-5
        )
    with pytest.raises(UserError, match=r"was made with data.buckets=\[\[64, 64\].*, but data.buckets is None"):
        opened(text_config(place, tmp_path / "run"), tmp_path / "cache")


def test_training_on_several_shapes_from_the_cache_equals_that_from_images(place, tmp_path):
    images = str(make_shapes(tmp_path / "images"))
    changes = (SHAPES, {"data": {"train": images, "validation": images}})
    cache_latents(text_config(place, tmp_path / "run", *changes), tmp_path / "cache", **SMALL)
    cached = {"data": {"train": str(tmp_path / "cache"), "validation": str(tmp_path / "cache")}}
    finetune(text_config(place, tmp_path / "images run", *changes))
    finetune(text_config(place, tmp_path / "cached run", *changes, cached))
    one, other = losses(tmp_path / "images run"), losses(tmp_path / "cached run")
    assert len(one) == 4
    for (_, loss, _), (_, same, _) in zip(one, other, strict=True):
        assert same == pytest.approx(loss, rel=1e-5)


def test_videos_are_cached_with_their_captions(tmp_path):
    random = np.random.default_rng(0)
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(3):
        write_mp4(random.integers(0, 256, (9, 32, 32, 3), dtype=np.uint8), videos / f"{number}.mp4", 16)
        (videos / f"{number}.txt").write_text(f"video {number}")
    parts = wan_components()
    WanPipeline(**parts).save_pretrained(tmp_path / "wan")
    data = {"train": str(videos), "validation": None, "size": 32, "num_frames": 5, "instruction": None}
    model = {"family": "wan", "pretrained": str(tmp_path / "wan"), "mhla": {}}
    config = text_config(tmp_path, tmp_path / "run", {"data": data, "model": model})
    report = cache_latents(config, tmp_path / "cache", batch_size=2, shard_size=2)
    assert report.images == 3 and report.encoded == 3
    cache_latents(config, tmp_path / "usual", batch_size=2)
    assert json.loads((tmp_path / "usual" / "cache.json").read_text())["shard_size"] == 64
    wan = family_named("wan")
    read, cached = (
        open_source(str(path), "data.train", config.data, wan, flip=False) for path in (videos, tmp_path / "cache")
    )
    check_sources([cached], wan, parts)
    assert cached.latent_shape is not None and len(cached.latent_shape) == 4 and cached.latent_shape[1] == 2
    for index in range(3):
        # A cache holds the clips of the first epoch, whose generator this is.
        one = read.read(index, sample_generator(config.train.seed, "image", 0, index))
        other = cached.read(index, sample_generator(0))
        assert other.text == f"video {index}"
        mean = wan.posterior(parts, one.image[None])["mean"][0]
        torch.testing.assert_close(other.posterior["mean"], mean, rtol=1e-3, atol=1e-4)
        embeds = wan.encode_prompts(parts, [one.text], None, config.data.max_tokens)["prompt_embeds"][0]
        torch.testing.assert_close(other.conditions["prompt_embeds"], embeds.float(), rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="was made with data.num_frames=5, but data.num_frames is 9"):
        changed = text_config(tmp_path, tmp_path / "run", {"data": {**data, "num_frames": 9}, "model": model})
        open_source(str(tmp_path / "cache"), "data.train", changed.data, wan, flip=False)


# Cuts and processes --------------------------------------------------------------------------------------------------


def same_caches(one: Path, other: Path) -> bool:
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(same_tensors(one / name, other / name) for name in names[0])


def test_a_cache_that_was_cut_goes_on_with_what_is_missing(place, tmp_path, monkeypatch):
    whole, encoded = type(SANA).encode_prompts, []

    def encode_prompts(self, components, prompts, *arguments):
        if len(encoded) == 4:  # the null embedding, and the two batches of the first shard and one of the second
            raise KeyboardInterrupt
        encoded.append(prompts)
        return whole(self, components, prompts, *arguments)

    config = text_config(place, tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(SANA), "encode_prompts", encode_prompts)
        cache_latents(config, tmp_path / "cut", **SMALL)
    with pytest.raises(UserError, match="cut is not finished"):
        opened(config, tmp_path / "cut")
    (tmp_path / "cut" / "shared.safetensors").write_bytes(b"half")
    report = cache_latents(config, tmp_path / "cut", **SMALL)
    assert report.encoded == 5 and report.images == 8
    assert same_caches(tmp_path / "cut", place / "cache")


def test_two_processes_make_the_cache_of_one(place, tmp_path):
    data = {"data": {"train": str(make_shapes(tmp_path / "images"))}}
    config = text_config(place, tmp_path / "run", SHAPES, data)
    cache_latents(config, tmp_path / "one", **SMALL)
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d",
                "--rdzv_endpoint=localhost:0", str(ROOT / "scripts" / "cache_latents.py")]  # fmt: skip
    arguments = ["--config", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "two"), "--batch-size", "2",
                 "--shard-size", "3"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "two: 7 images" in done.stdout and "images/s" in done.stdout and "64×64: 3" in done.stdout
    assert same_caches(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "cache.json").read_text() == (tmp_path / "two" / "cache.json").read_text()


# What is told --------------------------------------------------------------------------------------------------------


def test_long_captions_and_damaged_images_are_counted_over_all_starts(place, tmp_path):
    images = shutil.copytree(place / "images", tmp_path / "images")
    rows = [json.loads(line) for line in (images / "metadata.jsonl").read_text().splitlines()]
    rows[1]["text"] = rows[6]["text"] = "far too many letters for twelve tokens"
    (images / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (images / "3.png").write_bytes(b"broken")
    config = text_config(place, tmp_path / "run", {"data": {"train": str(images)}})
    with pytest.warns(UserWarning, match="3.png cannot be read: .*; another one is used in its place"):
        report = cache_latents(config, tmp_path / "cache", **SMALL)
    assert report.cut == 2 and report.damaged == 1
    assert "1 could not be read and were replaced by others; 2 lost the end of their caption" in str(report)
    again = cache_latents(config, tmp_path / "cache", **SMALL)
    assert (again.encoded, again.cut, again.damaged) == (0, 2, 1)
    cached = opened(config, tmp_path / "cache")
    assert cached.read(3, sample_generator(0)).text == cached.read(4, sample_generator(0)).text == rows[4]["text"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 128}, "was made with data.size=64, but data.size is 128"),
        ({"instruction": None}, r"was made with data.instruction=\['say: '\], but data.instruction is None"),
        ({"max_tokens": 13}, "was made with data.max_tokens=12, but data.max_tokens is 13"),
        (SHAPES["data"], "was made with data.buckets=None, but data.buckets is"),
        ({"flip": True}, "was made with data.flip=false, but data.flip is true"),
    ],
)
def test_a_cache_of_other_options_is_refused_in_one_sentence(place, tmp_path, changes, message):
    config = from_cache(place)(tmp_path / "run", {"data": changes})
    with pytest.raises(UserError, match=message) as caught:
        finetune(config)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def other_parts(name):
    parts = small_components()
    if name == "text_encoder":
        parts[name] = small_text_encoder()
        with torch.no_grad():
            next(parts[name].parameters())[0, 0] += 1e-3
    else:
        parts[name].add_tokens(["lighthouse"])
    return parts


@pytest.mark.parametrize("name", ["text_encoder", "tokenizer"])
def test_a_cache_of_another_text_encoder_or_tokenizer_is_refused(place, tmp_path, name):
    source = opened(text_config(place, tmp_path / "run"), place / "cache")
    check_sources([source], SANA, small_components())
    with pytest.raises(UserError, match=f"was made with another {name.replace('_', ' ')} ") as caught:
        check_sources([source], SANA, other_parts(name))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_known_again_after_it_was_used_and_saved(tmp_path):
    tokenizer = small_tokenizer()
    before = fingerprint(tokenizer)
    tokenizer(["some text", "x"], padding="max_length", max_length=4, truncation=True)
    assert fingerprint(tokenizer) == before
    parts = small_components()
    SanaPipeline(**{**parts, "transformer": None}).save_pretrained(tmp_path)
    loaded = SanaPipeline.from_pretrained(tmp_path, transformer=None)
    for name in ("tokenizer", "text_encoder", "vae"):
        assert fingerprint(getattr(loaded, name)) == fingerprint(parts[name])


def test_what_cannot_be_cached_is_told(place, tmp_path):
    for changes, message in [
        ({"data": {"buckets": [[64, 60]]}}, "data.buckets gives samples of 64×60 pixels, which the VAE's factor of 8"),
        (
            {"data": {"size": 60}},
            "data.size gives samples of 60×60 pixels, which the VAE's factor of 8 does not divide",
        ),
        ({"data": {"streaming": True}}, "data.streaming is true, but a cache needs to know all samples"),
    ]:
        with pytest.raises(UserError, match=message):
            cache_latents(text_config(place, tmp_path / "run", changes), tmp_path / "out")
    DiTPipeline(small_dit(), small_vae(), DDIMScheduler()).save_pretrained(tmp_path / "mute")
    with pytest.raises(UserError, match="names a pipeline with a tokenizer, without which captions cannot be encoded"):
        cache_latents(text_config(place, tmp_path, {"model": {"components": str(tmp_path / "mute")}}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    damaged = shutil.copytree(place / "cache", tmp_path / "cache")
    (damaged / "shared.safetensors").unlink()
    with pytest.raises(UserError, match="shared.safetensors is missing or damaged; delete it and run"):
        CachedLatents(damaged, text_config(place, tmp_path).data)
