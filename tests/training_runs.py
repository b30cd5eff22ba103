"""Miniature training runs on small images that are drawn here, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from mhla_diffusion.training import TrainConfig, config_from_dict, read_metrics

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "model": {
        "attention": "mhla",
        "mhla": {"blocks": [2, 2], "cpe": True},
        "overrides": {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 1,
            "out_channels": 2,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
        },
    },
    "data": {"size": 8, "channels": 1, "num_workers": 0},
    "train": {"steps": 6, "batch_size": 8, "lr": 2e-3, "ema_decay": 0.9, "warmup_steps": 2, "schedule": "cosine"},
    "checkpoint": {"every": 2},
    "validation": {"every": 3, "images": 2, "num_inference_steps": 2, "loss_images": 7},
    "logging": {"every": 1, "tensorboard": False, "progress": False},
}


def make_images(folder: Path, classes: int = 3, per_class: int = 7, size: int = 8) -> Path:
    """Greyscale images whose brightness says their class."""
    random = np.random.default_rng(0)
    for label in range(classes):
        place = folder / str(label)
        place.mkdir(parents=True)
        for number in range(per_class):
            pixels = random.integers(0, 60, (size, size)) + 60 * label
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    return folder


def tiny_config(folder: Path, run: str = "run", **changes: dict) -> TrainConfig:
    """The config of a run of a few steps on the images in `folder / "images"` into `folder / run`."""
    images = folder / "images"
    if not images.exists():
        make_images(images)
    layer = {"output_dir": str(folder / run), "data": {"train": str(images), "validation": str(images)}}
    return config_from_dict(TINY, layer, changes)


def losses(run: Path | str) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(Path(run) / "metrics.jsonl")]


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two safetensors files hold the same tensors to the last bit."""
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def start_script(config: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen:
    """scripts/finetune.py as a process of its own."""
    return subprocess.Popen(
        [*launcher, str(ROOT / "scripts" / "finetune.py"), "--config", str(config), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
