"""Components made for a data set: what a run on them needs, and the same path that a published checkpoint takes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, SanaPipeline
from PIL import Image
from training_runs import ROOT

import mhla_diffusion.training.components as components
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLASanaPipeline
from mhla_diffusion.pipelines.generate import generate_images
from mhla_diffusion.pipelines.prompts import read_prompts
from mhla_diffusion.training import config_from_dict, finetune, read_metrics
from mhla_diffusion.training.cache import cache_latents
from mhla_diffusion.training.components import write_sana_components

CAPTIONS = ["red ball, small", "blue ball, small", "red ball, large"]


def make_images(folder, count=34, size=32):
    """Noise in one of three colours, with captions that say which."""
    random = np.random.default_rng(0)
    (folder / "balls").mkdir(parents=True)
    lines = []
    for number in range(count):
        pixels = random.integers(0, 80, (size, size, 3))
        pixels[..., number % 3] += 150
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "balls" / f"{number:02d}.png")
        lines.append(json.dumps({"file_name": f"balls/{number:02d}.png", "text": CAPTIONS[number % 3]}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("components")
    data = make_images(folder / "data")
    return data, write_sana_components(folder / "parts", str(data), size=32, steps=30, batch_size=4)


def test_the_folder_is_that_of_a_sana_pipeline(made):
    _, report = made
    pipeline = SanaPipeline.from_pretrained(report.folder, transformer=None)
    names = {name: type(part).__name__ for name, part in pipeline.components.items()}
    assert names["vae"] == "AutoencoderDC" and names["text_encoder"] == "Gemma2Model"
    assert names["tokenizer"].startswith("GemmaTokenizer") and pipeline.scheduler.config.use_flow_sigmas
    assert report.vocabulary == len(pipeline.tokenizer)
    vae = pipeline.vae
    latents = torch.cat(
        [vae.encode(report.pictures[0][i : i + 1]).latent * vae.config.scaling_factor for i in range(12)]
    )
    assert latents.shape[1:] == (8, 8, 8) and 0.8 < latents.std() < 1.25
    again = vae.decode(latents / vae.config.scaling_factor).sample.clamp(-1, 1)
    assert torch.allclose(again, report.pictures[1], atol=1e-5)


def test_training_the_vae_lowers_its_error(made, tmp_path):
    data, report = made
    assert write_sana_components(tmp_path / "untrained", str(data), size=32, steps=1).psnr < report.psnr - 1


def test_the_same_seed_gives_the_same_parts(made, tmp_path):
    data, _ = made
    short = {"size": 32, "steps": 2, "batch_size": 4}
    parts = [write_sana_components(tmp_path / name, str(data), **short) for name in ("one", "other")]
    parts.append(write_sana_components(tmp_path / "third", str(data), **short, seed=1))
    assert torch.equal(parts[0].pictures, parts[1].pictures) and not torch.equal(parts[0].pictures, parts[2].pictures)


def test_a_word_is_the_same_token_before_a_comma_and_after_a_space():
    tokenizer = components.gemma_tokenizer(CAPTIONS)
    assert tokenizer.tokenize("red ball, small") == ["red", "▁ball", ",", "▁small"]
    assert tokenizer.tokenize("small ball") == ["small", "▁ball"]
    unseen = tokenizer("größe 🎈").input_ids
    assert tokenizer.unk_token_id not in unseen and tokenizer.decode(unseen, skip_special_tokens=True) == "größe 🎈"


def test_captions_that_differ_are_encoded_differently(made):
    parts = SanaPipeline.from_pretrained(made[1].folder, transformer=None).components
    rows = family_named("sana").encode_prompts(parts, CAPTIONS, (), 8)
    red, blue, large = rows["prompt_embeds"]
    assert torch.allclose(red[:2], large[:2], atol=1e-5)  # causal: the end does not change the beginning
    assert (red[1] - blue[1]).norm() > 0.5 * red[1].norm() and (red[4] - large[4]).norm() > 0.3 * red[4].norm()


def test_components_cache_training_and_generation_fit_together(made, tmp_path):
    data, report = made
    config = {
        "output_dir": str(tmp_path / "run"),
        "model": {
            "family": "sana",
            "components": str(report.folder),
            "overrides": {
                "in_channels": 8, "out_channels": 8, "sample_size": 16, "num_layers": 1, "num_attention_heads": 2,
                "attention_head_dim": 8, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
                "cross_attention_dim": 16, "caption_channels": 128,
            },
        },
        "data": {"train": str(data), "size": 32, "flip": False, "max_tokens": 8, "num_workers": 0},
        "train": {"steps": 2, "batch_size": 4},
        "validation": {"images": 2, "num_inference_steps": 2},
        "logging": {"every": 1, "tensorboard": False, "progress": False},
    }  # fmt: skip
    cache_latents(config_from_dict(config), tmp_path / "cache")
    cached = {"data": {"train": str(tmp_path / "cache"), "validation": str(tmp_path / "cache")}}
    result = finetune(config_from_dict(config, cached))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]

    pipeline = MHLASanaPipeline.from_pretrained(result.pipeline)
    assert isinstance(DiffusionPipeline.from_pretrained(result.pipeline), SanaPipeline)
    prompts = read_prompts(data / "metadata.jsonl")[:3]
    generate_images(pipeline, prompts, tmp_path / "samples", num_inference_steps=2, progress=False)
    image = Image.open(tmp_path / "samples" / "000002.png")
    # 16 latent pixels at this VAE's factor of 4: a model of that size with the published VAE would make 512 pixels.
    assert image.size == (64, 64)


def test_what_cannot_be_made_is_said_before_work_is_done(made, tmp_path, monkeypatch):
    data, report = made
    monkeypatch.setattr(components, "train_autoencoder", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(UserError, match="--size 48 does not suit the pipeline; a multiple of 32 is accepted"):
        write_sana_components(tmp_path / "out", str(data), size=48)
    with pytest.raises(UserError, match="--steps 0 is too small"):
        write_sana_components(tmp_path / "out", str(data), size=32, steps=0)
    with pytest.raises(UserError, match="is not empty"):
        write_sana_components(report.folder, str(data), size=32)
    few = make_images(tmp_path / "few", count=5)
    with pytest.raises(UserError, match="has 5 images; 16 or more"):
        write_sana_components(tmp_path / "out", str(few), size=32)
    silent = make_images(tmp_path / "silent")
    (silent / "metadata.jsonl").unlink()
    with pytest.raises(UserError, match="caption"):
        write_sana_components(tmp_path / "out", str(silent), size=32)
    assert not (tmp_path / "out").exists()


def test_the_script_writes_the_reconstructions_and_errors_in_one_line(made, tmp_path):
    data, _ = made
    script = [sys.executable, str(ROOT / "scripts" / "prepare_components.py"), "sana"]
    options = ["--data", str(data), "--size", "32", "--steps", "1"]
    subprocess.run([*script, str(tmp_path / "parts"), *options], check=True)
    assert Image.open(tmp_path / "parts" / "reconstructions.png").size[0] > 500
    done = subprocess.run([*script, str(tmp_path / "parts"), *options], capture_output=True, text=True)
    assert done.returncode == 2 and "is not empty" in done.stderr and done.stderr.count("\n") == 1
