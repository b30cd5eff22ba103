"""Latents encoded once: what training from them computes, what cuts leave behind, and caches that are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, DiTPipeline
from dit_models import small_dit, small_vae
from PIL import Image
from safetensors.torch import load_file
from training_runs import ROOT, losses, same_tensors
from wan_models import small_vae as wan_vae

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import config_from_dict, config_to_yaml, finetune, held_out_loss
from mhla_diffusion.training.cache import cache_latents
from mhla_diffusion.training.cached import CachedLatents, fingerprint
from mhla_diffusion.training.config import DataOptions
from mhla_diffusion.training.data import sample_generator
from mhla_diffusion.training.images import ImageFolder

SHAPE = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 2,
         "num_attention_heads": 2, "attention_head_dim": 8}  # fmt: skip


def make_pictures(folder: Path, classes: int = 3, per_class: int = 7) -> Path:
    random = np.random.default_rng(0)
    for label in range(classes):
        place = folder / f"class {label}"
        place.mkdir(parents=True)
        for number in range(per_class):
            pixels = random.integers(0, 256, (20, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


@pytest.fixture
def config(tmp_path):
    """Config of a short run with a VAE: the callable takes the run's name and changes."""
    DiTPipeline(small_dit(), small_vae(), DDIMScheduler()).save_pretrained(tmp_path / "components")
    images = make_pictures(tmp_path / "images")

    def make(run: str = "run", **changes):
        tiny = {
            "output_dir": str(tmp_path / run),
            "model": {"components": str(tmp_path / "components"), "overrides": SHAPE, "mhla": {"blocks": [2, 2]}},
            "data": {"train": str(images), "validation": str(images), "size": 16, "num_workers": 0},
            "train": {"steps": 6, "batch_size": 8, "lr": 2e-3, "ema_decay": 0.9},
            "validation": {"every": 3, "images": 0, "loss_images": 7},
            "checkpoint": {"every": 3},
            "logging": {"every": 1, "tensorboard": False, "progress": False},
        }
        return config_from_dict(tiny, changes)

    return make


def cached(config, out, **arguments):
    cache_latents(config(), out, **{"batch_size": 4, "shard_size": 5, **arguments})
    return {"data": {"train": str(out), "validation": str(out)}}


# Training from it ----------------------------------------------------------------------------------------------------


def test_training_from_the_cache_equals_training_from_the_images(tmp_path, config):
    data = cached(config, tmp_path / "cache")
    finetune(config("pictures"))
    finetune(config("latents", **data))
    one, other = losses(tmp_path / "pictures"), losses(tmp_path / "latents")
    assert len(one) == 6
    for (_, loss, norm), (_, same_loss, same_norm) in zip(one, other, strict=True):
        assert same_loss == pytest.approx(loss, rel=1e-5)
        assert same_norm == pytest.approx(norm, rel=1e-4)
    rows = [
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("pictures", "latents")
    ]
    assert rows[1]["validation/loss"] == pytest.approx(rows[0]["validation/loss"], rel=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_from_images_goes_on_from_their_cache(tmp_path, config, workers):
    data = cached(config, tmp_path / "cache")
    finetune(config("whole"))
    finetune(config("mixed", train={"steps": 3}))
    finetune(config("mixed", data={**data["data"], "num_workers": workers}), resume="latest")
    for (_, loss, _), (_, same, _) in zip(losses(tmp_path / "whole"), losses(tmp_path / "mixed"), strict=True):
        assert same == pytest.approx(loss, rel=1e-5)


def test_samples_and_mirror_images_are_those_of_the_images(tmp_path, config):
    cached(config, tmp_path / "cache")
    images = ImageFolder(tmp_path / "images", 16, flip=True)
    latents = CachedLatents(tmp_path / "cache", DataOptions(size=16), flip=True)
    dit, vae = family_named("dit"), {"vae": small_vae()}
    assert len(latents) == len(images) == 21 and latents.class_names == images.class_names
    assert latents.fingerprint == images.fingerprint and latents.latent_shape == (4, 8, 8)
    mirrored = 0
    for index in range(21):
        one, other = (source.read(index, sample_generator(3, index)) for source in (images, latents))
        assert other.image is None and torch.equal(one.conditions["class_labels"], other.conditions["class_labels"])
        posterior = dit.posterior(vae, one.image[None])
        for name in ("mean", "std"):
            torch.testing.assert_close(other.posterior[name], posterior[name][0], rtol=1e-4, atol=1e-5)
        drawn = dit.draw_latents({name: value[None] for name, value in other.posterior.items()}, [sample_generator(4)])
        torch.testing.assert_close(drawn, dit.encode(vae, one.image[None], [sample_generator(4)]), rtol=1e-4, atol=1e-5)
        plain = ImageFolder(tmp_path / "images", 16).read(index, sample_generator(3, index))
        mirrored += not torch.equal(plain.image, one.image)
    assert 0 < mirrored < 21


def test_the_vae_stays_off_the_device_but_is_exported(tmp_path, config, monkeypatch):
    data = cached(config, tmp_path / "cache")
    moved, move = [], torch.nn.Module.to
    monkeypatch.setattr(
        torch.nn.Module, "to", lambda self, *a, **k: moved.append(type(self).__name__) or move(self, *a, **k)
    )
    forward = []
    monkeypatch.setattr("diffusers.AutoencoderKL.encode", lambda *a, **k: forward.append(1), raising=True)
    result = finetune(config(**data))
    assert "MHLADiTTransformer2DModel" in moved and not forward
    assert "AutoencoderKL" not in moved[: moved.index("MHLADiTTransformer2DModel") + 1]
    monkeypatch.undo()
    exported = DiffusionPipeline.from_pretrained(result.pipeline)
    assert fingerprint(exported.vae) == fingerprint(small_vae())
    assert [name for _, name in sorted(exported.config.id2label.items())] == ["class 0", "class 1", "class 2"]


def test_validation_grids_decode_also_from_a_cache(tmp_path, config):
    data = cached(config, tmp_path / "cache")
    finetune(config(**data, validation={"images": 2, "num_inference_steps": 1, "every": 6}))
    assert Image.open(tmp_path / "run" / "samples" / "step-00000006.png").size == (32, 16)


def test_half_precision_halves_the_cache(tmp_path, config):
    cached(config, tmp_path / "full")
    cached(config, tmp_path / "half", dtype="float16")
    full, half = (CachedLatents(tmp_path / name, DataOptions(size=16), flip=True) for name in ("full", "half"))
    assert half.read(3, sample_generator(0)).posterior["mean"].dtype == torch.float32
    torch.testing.assert_close(
        half.read(3, sample_generator(0)).posterior, full.read(3, sample_generator(0)).posterior, rtol=1e-3, atol=1e-3
    )
    sizes = [sum(len(value.numpy().tobytes()) for path in (tmp_path / name).glob("*.safetensors")
                 for key, value in load_file(path).items() if "mean" in key or "std" in key)
             for name in ("full", "half")]  # fmt: skip
    assert sizes[0] == 2 * sizes[1]


def test_a_cache_without_mirror_images_is_half_as_large_and_captions_are_kept(tmp_path, config):
    (tmp_path / "images" / "metadata.jsonl").write_text('{"file_name": "class 1/0.png", "text": "a cat"}\n')
    cache_latents(config(data={"flip": False}), tmp_path / "cache", shard_size=5)
    assert set(load_file(tmp_path / "cache" / "latents-00000.safetensors")) == {
        "mean",
        "std",
        "conditions.class_labels",
    }
    source = CachedLatents(tmp_path / "cache", DataOptions(size=16))
    texts = [source.read(index, sample_generator(0)).text for index in range(21)]
    assert texts == [None] * 7 + ["a cat"] + [None] * 13


def test_held_out_latents_keep_the_training_classes(tmp_path, config):
    shutil.rmtree(make_pictures(tmp_path / "held out") / "class 0")
    cache_latents(config(data={"train": str(tmp_path / "held out")}), tmp_path / "held out cache", shard_size=5)
    cached(config, tmp_path / "cache")
    source = CachedLatents(
        tmp_path / "held out cache", DataOptions(size=16), class_names=["class 0", "class 1", "class 2"]
    )
    assert source.read(0, sample_generator(0)).conditions["class_labels"] == 1
    with pytest.raises(UserError, match="has class 'class 1', which the training images do not have"):
        CachedLatents(tmp_path / "held out cache", DataOptions(size=16), class_names=["class 0", "class 2"])
    images, latents = (
        config(data={"validation": str(tmp_path / "held out")}),
        config(data={"train": str(tmp_path / "cache"), "validation": str(tmp_path / "held out cache")}),
    )
    pipeline = finetune(config()).pipeline
    assert held_out_loss(latents, pipeline)["loss"] == pytest.approx(held_out_loss(images, pipeline)["loss"], rel=1e-5)


def test_families_that_draw_nothing_cache_the_mean_alone():
    wan = family_named("wan")
    with torch.no_grad():
        posterior = wan.posterior({"vae": wan_vae()}, torch.rand(2, 3, 16, 16) * 2 - 1)
    assert posterior.keys() == {"mean"}
    assert wan.draw_latents(posterior, []) is posterior["mean"]


# Cuts ----------------------------------------------------------------------------------------------------------------


def same_caches(one: Path, other: Path) -> bool:
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other)]
    return names[0] == names[1] and all(same_tensors(one / name, other / name) for name in names[0])


def test_a_cache_that_was_cut_goes_on_with_what_is_missing(tmp_path, config, monkeypatch):
    cached(config, tmp_path / "whole")
    family, encoded = type(family_named("dit")), []
    whole = family.posterior

    def posterior(self, components, images):
        if len(encoded) == 9:
            raise KeyboardInterrupt
        encoded.append(len(images))
        return whole(self, components, images)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(family, "posterior", posterior)
        cached(config, tmp_path / "cut")
    with pytest.raises(UserError, match="cut is not finished; run scripts/cache_latents.py again"):
        CachedLatents(tmp_path / "cut", DataOptions(size=16))
    (tmp_path / "cut" / ".tmp-latents-00002.safetensors").write_bytes(b"half a sh")
    report = cache_latents(config(), tmp_path / "cut", batch_size=4, shard_size=5)
    assert report.images == 21 and report.encoded == 11
    assert same_caches(tmp_path / "cut", tmp_path / "whole")
    assert not list((tmp_path / "cut").glob(".tmp-*"))
    assert cache_latents(config(), tmp_path / "cut", shard_size=5).encoded == 0


def start(config_file: Path, out: Path, *launcher: str) -> subprocess.Popen:
    command = [*(launcher or (sys.executable,)), str(ROOT / "scripts" / "cache_latents.py")]
    return subprocess.Popen(
        [*command, "--config", str(config_file), "--out", str(out), "--batch-size", "1", "--shard-size", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_killed_once_make_the_cache_of_one(tmp_path, config):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d",
                "--rdzv_endpoint=localhost:0")  # fmt: skip
    cache_latents(config(), tmp_path / "one", batch_size=1, shard_size=2)
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config()))
    run = start(tmp_path / "recipe.yaml", tmp_path / "two", *launcher)
    deadline = time.monotonic() + 200
    while not list((tmp_path / "two").glob("latents-*")) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGTERM)  # torch's launcher passes it on
    _, err = run.communicate(timeout=100)
    found = len(list((tmp_path / "two").glob("latents-*")))
    assert found, err
    run = start(tmp_path / "recipe.yaml", tmp_path / "two", *launcher)
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "two: 21 images" in out and "images/s" in out
    assert same_caches(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one" / "cache.json").read_text() == (tmp_path / "two" / "cache.json").read_text()


@pytest.mark.parametrize("missing", [False, True])
def test_a_truncated_or_missing_shard_is_one_sentence_before_any_step(tmp_path, config, missing):
    data = cached(config, tmp_path / "cache")
    shard = tmp_path / "cache" / "latents-00003.safetensors"
    shard.unlink() if missing else shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match="latents-00003.safetensors is missing or damaged; delete it and run") as caught:
        finetune(config(**data))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    assert cache_latents(config(), tmp_path / "cache", batch_size=4, shard_size=5).encoded == 5
    finetune(config(**data))


def test_a_full_disk_is_one_sentence_and_finished_shards_stay(tmp_path, config, monkeypatch):
    from mhla_diffusion.training import cache as module

    whole = module.save_file

    def full(tensors, path, metadata):
        if "00002" in path.name:
            raise OSError(28, "No space left on device")
        whole(tensors, path, metadata)

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(
        UserError, match="cannot be written: No space left on device; the shards that are there are kept"
    ):
        cached(config, tmp_path / "cache")
    monkeypatch.undo()
    assert cache_latents(config(), tmp_path / "cache", batch_size=4, shard_size=5).encoded == 11


def test_buckets_are_refused_for_a_family_of_one_size_as_in_training(tmp_path, config):
    buckets = config(data={"buckets": [[16, 16], [16, 32]]})
    for work in (lambda: cache_latents(buckets, tmp_path / "cache"), lambda: finetune(buckets)):
        with pytest.raises(UserError, match="data.buckets is set, but dit makes square images of one size; set it to"):
            work()
    assert not (tmp_path / "cache").exists() and not (tmp_path / "run").exists()


# Caches that do not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"size": 32}}, "was made with data.size=16, but data.size is 32"),
        ({"data": {"channels": 1}}, "was made with data.channels=3, but data.channels is 1"),
        ({"model": {"family": "wan"}}, "holds latents for dit, but model.family is wan"),
        ({"model": {"family": "sana"}}, "holds latents for dit, but model.family is sana"),
        ({"model": {"components": None}}, r"made with another VAE \(\w+\) than that of model.components .*\(none\)"),
        ({"model": {"overrides": {**SHAPE, "in_channels": 3}}}, "the cache gives 4 channels, but the model takes 3"),
        ({"model": {"overrides": {**SHAPE, "sample_size": 4}}}, "gives latents of 8×8, but the model is set to 4×4"),
    ],
)
def test_a_cache_that_does_not_fit_the_config_is_refused(tmp_path, config, changes, message):
    data = cached(config, tmp_path / "cache")
    changes["data"] = data["data"] | changes.get("data", {})
    with pytest.raises(UserError, match=message) as caught:
        finetune(config(**changes))
    assert "\n" not in str(caught.value)


def test_a_cache_of_another_vae_is_refused(tmp_path, config):
    data = cached(config, tmp_path / "cache")
    vae = small_vae()
    with torch.no_grad():
        vae.encoder.conv_in.bias[0] += 1e-3
    DiTPipeline(small_dit(), vae, DDIMScheduler()).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="made with another VAE"):
        finetune(config(**data, model={"components": str(tmp_path / "other")}))
    scaled = small_vae()
    scaled.register_to_config(scaling_factor=0.5)
    assert fingerprint(scaled) != fingerprint(small_vae())


def test_flips_must_be_there_when_asked_for_and_may_be_there_when_not(tmp_path, config):
    cache_latents(config(data={"flip": False}), tmp_path / "plain", shard_size=5)
    with pytest.raises(UserError, match="made with data.flip=false, but data.flip is true"):
        CachedLatents(tmp_path / "plain", DataOptions(size=16), flip=True)
    cached(config, tmp_path / "both")
    for index in range(5):
        one, other = (
            CachedLatents(tmp_path / name, DataOptions(size=16)).read(index, sample_generator(0))
            for name in ("plain", "both")
        )
        torch.testing.assert_close(one.posterior, other.posterior, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"data": {"size": 32}}, {}, "holds a cache with size 16 instead of 32; choose a new folder"),
        ({}, {"dtype": "float16"}, "holds a cache with dtype 'float32' instead of 'float16'"),
        ({}, {"dtype": "float61"}, "dtype is 'float61' .did you mean 'float16'"),
        ({}, {"shard_size": 0}, "shard_size is 0; 1 or more is accepted"),
        ({"model": {"components": None}}, {}, "names a pipeline with a VAE"),
        ({"data": {"channels": 1}}, {}, "data.channels is 1, but the VAE takes 3"),
    ],
)
def test_what_cannot_be_cached_is_told(tmp_path, config, changes, arguments, message):
    cached(config, tmp_path / "cache")
    with pytest.raises(UserError, match=message):
        cache_latents(config(**changes), tmp_path / "cache", **{"shard_size": 5, **arguments})


def test_other_files_and_caches_of_caches_are_refused(tmp_path, config):
    data = cached(config, tmp_path / "cache")
    with pytest.raises(UserError, match="holds other files"):
        cache_latents(config(), tmp_path / "images")
    with pytest.raises(UserError, match="is a cache already"):
        cache_latents(config(**data), tmp_path / "again")
