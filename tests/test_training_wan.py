"""Fine-tuning a video model on clips: pictures and films of its samples, and clips that were encoded before."""

from __future__ import annotations

import pytest
import wan_models
from diffusers import DiffusionPipeline, WanPipeline
from PIL import Image

from mhla_diffusion.backbones.wan import WanFamily
from mhla_diffusion.training import config_from_dict, finetune, read_metrics
from mhla_diffusion.training.cache import cache_latents
from mhla_diffusion.training.moving_digits import write_moving_digits
from mhla_diffusion.training.video_files import probe

TINY = {
    "model": {"family": "wan", "mhla": {"blocks": [2, 2, 2]}},
    "data": {"size": 32, "num_frames": 5, "num_workers": 0, "flip": False, "max_tokens": 8},
    "train": {"steps": 2, "batch_size": 2, "lr": 1e-3, "ema_decay": 0.9},
    "checkpoint": {"every": 0},
    "validation": {"every": 0, "images": 2, "num_inference_steps": 1, "loss_images": 2},
    "logging": {"every": 1, "tensorboard": False, "progress": False},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `videos` and a stock Wan pipeline of small components, `wan`."""
    folder = tmp_path_factory.mktemp("wan")
    # As long as a clip: the alignment draws moments of its own, a cache has those of the first epoch.
    write_moving_digits(folder / "videos", size=32, videos=5, frames=5)
    WanPipeline(transformer=wan_models.stock_transformer(), **wan_models.small_components()).save_pretrained(
        folder / "wan"
    )
    return folder


def video_config(place, run, *changes):
    layer = {
        "output_dir": str(run),
        "model": {"pretrained": str(place / "wan")},
        "data": {"train": str(place / "videos" / "train"), "validation": str(place / "videos" / "test")},
    }
    return config_from_dict(TINY, layer, *changes)


def test_a_run_on_videos_shows_frames_and_films_and_ends_in_a_pipeline(place, tmp_path):
    result = finetune(video_config(place, tmp_path / "run"))
    assert {"loss", "validation/loss"} <= read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].keys()
    samples = tmp_path / "run" / "samples"
    assert Image.open(samples / "step-00000002.png").size == (2 * 3 * 32, 32)  # first, middle and last frame of two
    films = sorted((samples / "step-00000002").iterdir())
    assert [film.name for film in films] == ["00.mp4", "01.mp4"] and probe(films[0]).frames == 5
    pipeline = DiffusionPipeline.from_pretrained(result.pipeline)
    call = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 1, "max_sequence_length": 8}
    assert pipeline("a cat runs", **call).frames[0].shape == (5, 32, 32, 3)


def test_clips_and_captions_from_a_cache_give_the_first_loss_without_the_encoders(place, tmp_path, monkeypatch):
    quick = {"train": {"steps": 1, "align_steps": 1}, "validation": {"images": 0}, "data": {"validation": None}}
    finetune(video_config(place, tmp_path / "uncached", quick))
    report = cache_latents(video_config(place, tmp_path / "unused"), tmp_path / "cache", batch_size=3)
    assert f"{report.images} clips," in str(report) and " clips/s)" in str(report) and "image" not in str(report)
    for verb in ("encode_prompts", "posterior"):
        monkeypatch.setattr(WanFamily, verb, lambda *args, **kwargs: pytest.fail("the cache holds this"))
    finetune(video_config(place, tmp_path / "cached", quick, {"data": {"train": str(tmp_path / "cache")}}))
    for one, other in zip(
        *(read_metrics(tmp_path / run / "metrics.jsonl") for run in ("uncached", "cached")), strict=True
    ):
        compared = [name for name in one if "loss" in name or "layer" in name or "norm" in name]
        assert compared and [one[name] for name in compared] == pytest.approx(
            [other[name] for name in compared], rel=1e-4
        )
