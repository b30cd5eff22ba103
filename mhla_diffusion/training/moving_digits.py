"""Small real-enough videos without a download: scikit-learn's handwritten digits in colour, bouncing about."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import UserError
from .checkpoints import whole_folder
from .video_files import write_mp4

COLOURS = {
    "red": (255, 70, 60),
    "green": (80, 220, 90),
    "blue": (80, 120, 255),
    "yellow": (250, 220, 70),
    "white": (255, 255, 255),
}
DIRECTIONS = ("right", "down and right", "down", "down and left", "left", "up and left", "up", "up and right")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def write_moving_digits(
    out: str | Path, size: int = 64, videos: int = 200, frames: int = 33, fps: float = 16.0, seed: int = 0
) -> dict[str, int]:
    """Write OUT/{train,test}/NNNN.mp4 with captions in metadata.jsonl; every fifth video is held out.

    A video shows two digits on black that move straight and bounce off the edges. Its caption says which, in which
    colours, and which way they set out. No handwritten digit is in both splits.

    Args:
        size: side of the videos in pixels, even, 32 or more.
        frames, fps: length and frame rate of each video.

    Returns the number of videos per split. Raises `UserError` when `out` is not empty or a number is out of range.
    """
    if size < 32 or size % 2:
        raise UserError(f"--size {size} is not possible for moving digits; even numbers from 32 on are accepted")
    for name, value in {"videos": videos, "frames": frames}.items():
        if value < 1:
            raise UserError(f"{name} is {value}; 1 or more is accepted")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose a new folder")
    scans = _scans()
    captions: dict[str, list[str]] = {"train": [], "test": []}
    try:
        with whole_folder(out, synced=False) as folder:
            for number in range(videos):
                split = "test" if number % 5 == 4 else "train"
                random = np.random.default_rng([seed, number])
                pixels, text = moving_digits(scans[split], size, frames, fps, random)
                (folder / split).mkdir(exist_ok=True)
                write_mp4(pixels, folder / split / f"{number:04d}.mp4", fps)
                captions[split].append(json.dumps({"file_name": f"{number:04d}.mp4", "text": text}) + "\n")
            for split, lines in captions.items():
                if lines:
                    (folder / split / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    return {split: len(lines) for split, lines in captions.items()}


def moving_digits(
    scans: list[tuple[int, np.ndarray]], size: int, frames: int, fps: float, random: np.random.Generator
) -> tuple[np.ndarray, str]:
    """One video, uint8 (T, size, size, 3), and its caption; everything about it is drawn from `random`.

    `scans` are digits with their 8×8 images in [0, 1].
    """
    canvas = np.zeros((frames, size, size, 3))
    side = 3 * size // 8
    colours = random.permutation(list(COLOURS))
    parts = []
    for colour in colours[:2]:
        digit, scan = scans[random.integers(len(scans))]
        heading = int(random.integers(len(DIRECTIONS)))
        angle = heading * math.tau / len(DIRECTIONS) + random.uniform(-0.2, 0.2)
        step = size * random.uniform(0.5, 1.0) / fps * np.array([math.sin(angle), math.cos(angle)])  # pixels per frame
        room = size - side
        start = random.uniform(0.25 * room, 0.75 * room, 2)
        shape = Image.fromarray(scan.astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
        for t in range(frames):
            top, left = (_bounced(start[axis] + t * step[axis], room) for axis in (0, 1))
            alpha = np.asarray(_shifted(shape, top, left, size)).clip(0, 1)[..., None]
            canvas[t] = canvas[t] * (1 - alpha) + alpha * np.array(COLOURS[str(colour)])
        parts.append(f"a {colour} {WORDS[digit]} that sets out {DIRECTIONS[heading]}")
    return canvas.round().clip(0, 255).astype(np.uint8), " and ".join(parts)


def _scans() -> dict[str, list[tuple[int, np.ndarray]]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen: Counter[int] = Counter()
    scans: dict[str, list[tuple[int, np.ndarray]]] = {"train": [], "test": []}
    for scan, digit in zip(digits.images, digits.target.tolist(), strict=True):
        scans["test" if seen[digit] % 5 == 4 else "train"].append((digit, scan / 16))
        seen[digit] += 1
    return scans


def _bounced(position: float, room: float) -> float:
    """A position on a line of length `room` after it has been reflected at both ends as often as it takes."""
    return room - abs(position % (2 * room) - room)


def _shifted(shape: Image.Image, top: float, left: float, size: int) -> Image.Image:
    """`shape` on an empty square of side `size`, at a place between pixels."""
    return shape.transform((size, size), Image.Transform.AFFINE, (1, 0, -left, 0, 1, -top), Image.Resampling.BILINEAR)
