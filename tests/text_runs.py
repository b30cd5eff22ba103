"""Miniature fine-tuning runs of text-conditioned models on captioned images that are drawn here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sana_components import small_pipeline

from mhla_diffusion.training import TrainConfig, config_from_dict

TINY = {
    "model": {"family": "sana", "attention": "mhla", "mhla": {"blocks": [2, 2]}},
    "data": {"size": 64, "num_workers": 0, "flip": False, "max_tokens": 12, "instruction": ["say: "]},
    "train": {"steps": 4, "batch_size": 4, "lr": 1e-3, "ema_decay": 0.9, "label_dropout": 0.3},
    "checkpoint": {"every": 2},
    "validation": {"every": 0, "images": 2, "num_inference_steps": 1, "loss_images": 5},
    "logging": {"every": 1, "tensorboard": False, "progress": False},
}


def make_captioned_images(folder: Path, count: int = 8, size: int | tuple[int, int] = 64) -> Path:
    """Images of one colour with noise, whose captions name the colour."""
    random = np.random.default_rng(0)
    height, width = (size, size) if isinstance(size, int) else size
    folder.mkdir(parents=True)
    lines = []
    for number in range(count):
        name, colour = [("red", (200, 30, 30)), ("green", (30, 200, 30)), ("blue", (30, 30, 200))][number % 3]
        pixels = np.clip(np.array(colour) + random.integers(-20, 20, (height, width, 3)), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": f"{name} {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_place(folder: Path) -> Path:
    """A folder with `images` and a stock SANA pipeline of small components, `sana`."""
    make_captioned_images(folder / "images")
    small_pipeline().save_pretrained(folder / "sana")
    return folder


def text_config(place: Path, run: Path, *changes: dict[str, Any]) -> TrainConfig:
    """The config of a run of a few steps on the images in `place` from the pipeline there, into `run`."""
    layer = {
        "output_dir": str(run),
        "model": {"pretrained": str(place / "sana")},
        "data": {"train": str(place / "images"), "validation": str(place / "images")},
    }
    return config_from_dict(TINY, layer, *changes)
