"""Captioned videos in a folder as training clips.

Captions are in a `metadata.jsonl` with `file_name` and `text` in each line, or in `NAME.txt` beside `NAME.mp4`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import UserError
from .config import DataOptions
from .data import Sample, UnreadableSample
from .video_files import VIDEO_SUFFIXES, VideoInfo, probe, read_clip

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of ITU-R BT.601
LOOKED_AT = 1000  # entries of a folder before it is taken to hold no videos


def holds_videos(root: str | Path) -> bool:
    """Whether there are videos among the first thousand entries of a folder and its sub-folders."""
    entries = itertools.islice(Path(root).rglob("*"), LOOKED_AT)
    return any(path.suffix.lower() in VIDEO_SUFFIXES for path in entries)


class VideoFolder:
    """Clips of `data.num_frames` frames at `data.fps`, each from a moment drawn anew in every epoch.

    A sample is a clip (channels, T, H, W) or, with one frame, an image (channels, H, W), float32 in [-1, 1], and its
    caption. H × W is `data.size` squared, or the one of `data.buckets` whose aspect ratio is nearest to the video's:
    the clip is scaled to cover it and the middle is cut out.

    Videos shorter than a clip are left out (`data.short_clips` "skip"), begun again ("loop"), or stand still at their
    end ("hold"). Files that cannot be opened are left out too, as long as they are 1 % at most, or ten.

    Args:
        root: the folder; videos may be in sub-folders.
        options: what of it is used is named above, and `channels`.
        key: config key that names the folder, for messages.
        flip: mirror half of the clips, drawn anew in every epoch.

    Raises:
        UserError: for a number of frames that is not 4k + 1, a rate that is not positive, a missing file or caption,
            and a folder without usable videos.
    """

    class_names: ClassVar[list[str]] = []
    captioned = True
    text_cached = False
    shared_conditions: ClassVar[dict[str, torch.Tensor]] = {}
    latent_shape = None

    def __init__(self, root: str | Path, options: DataOptions, key: str = "data.train", flip: bool = False):
        self.root, self.options, self.flip = Path(root), options, flip
        if not self.root.is_dir():
            raise UserError(f"{key} is {str(root)!r}, which is not a folder; a folder of videos is expected")
        check_rates(options)
        self.sizes = bucket_sizes(options)
        captions = self._captions(key)
        infos = self._opened(sorted(captions), key)
        long_enough = {name: info.frames_at(options.fps) >= options.num_frames for name, info in infos.items()}
        self.short = [name for name, enough in long_enough.items() if not enough]
        self._report_short(infos, key)
        self.files = [name for name in infos if long_enough[name] or options.short_clips != "skip"]
        self.texts = [captions[name] for name in self.files]
        self.frames = [infos[name].frames_at(options.fps) for name in self.files]
        fits = [nearest_size(infos[name].height, infos[name].width, self.sizes) for name in self.files]
        used = sorted(set(fits))
        self._shape_of = [used.index(i) for i in fits]
        self.shapes: list[tuple[int, ...]] = [self._shape(self.sizes[i]) for i in used]
        reading = [options.num_frames, options.fps, options.short_clips, options.channels, self.shapes]
        content = json.dumps([reading, self.files, self.texts, self.frames]).encode()
        self.fingerprint = f"{len(self.files)} videos, {hashlib.sha256(content).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.files)

    def shape_of(self, index: int) -> int:
        """Which of `shapes` sample `index` has."""
        return self._shape_of[index]

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Sample `index`; when its clip begins and whether it is mirrored is drawn from `generator`.

        Raises `UnreadableSample` when the file cannot be read, or is damaged within the clip.
        """
        wanted, fps = self.options.num_frames, self.options.fps
        there = min(wanted, self.frames[index])
        start = int(torch.randint(self.frames[index] - there + 1, (), generator=generator))
        mirrored = self.flip and bool(torch.rand((), generator=generator) < 0.5)
        height, width = self.shapes[self._shape_of[index]][-2:]
        try:
            clip = read_clip(self.root / self.files[index], there, fps, height, width, start / fps)
        except UserError as error:
            raise UnreadableSample(str(error)) from None
        if there < wanted:
            positions = np.arange(wanted)
            clip = clip[positions % there if self.options.short_clips == "loop" else positions.clip(max=there - 1)]
        if self.options.channels == 1:
            clip = (clip @ LUMA)[..., None]
        video = torch.from_numpy(clip).permute(3, 0, 1, 2).float() / 127.5 - 1
        if mirrored:
            video = video.flip(-1)
        return Sample(video if wanted > 1 else video[:, 0], text=self.texts[index])

    def _shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return (self.options.num_frames, *size) if self.options.num_frames > 1 else size

    def _captions(self, key: str) -> dict[str, str]:
        """The caption of every video in the folder, by its path within it."""
        found = {
            path.relative_to(self.root).as_posix(): path
            for path in self.root.rglob("*")
            if path.suffix.lower() in VIDEO_SUFFIXES and not path.name.startswith(".")
        }
        if not found:
            raise UserError(f"{key} {self.root} holds no videos ({', '.join(VIDEO_SUFFIXES)})")
        captions = read_metadata(self.root / "metadata.jsonl")
        if absent := [name for name in captions if not (self.root / name).is_file()]:
            raise UserError(f"{self.root / 'metadata.jsonl'} names {absent[0]}, which is not there")
        for name, path in found.items():
            beside = path.with_suffix(".txt")
            if name not in captions and beside.is_file():
                captions[name] = beside.read_text(encoding="utf-8").strip()
        if without := sorted(found.keys() - captions.keys()):
            raise UserError(
                f"video {self.root / without[0]} has no caption"
                f"{f' ({len(without)} videos have none)' if len(without) > 1 else ''}; a line with file_name and text "
                f"in {self.root / 'metadata.jsonl'}, or a file {Path(without[0]).stem}.txt beside it, is expected"
            )
        return captions

    def _opened(self, names: Sequence[str], key: str) -> dict[str, VideoInfo]:
        """What is in each video that can be opened; the others are told of."""

        def look(name: str) -> VideoInfo | UserError:
            try:
                return probe(self.root / name)
            except UserError as error:
                return error

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            looks = dict(zip(names, pool.map(look, names), strict=True))
        broken = {name: look for name, look in looks.items() if isinstance(look, UserError)}
        if len(broken) == len(looks) or len(broken) > max(10, len(looks) // 100):
            raise UserError(
                f"{len(broken)} of the {len(looks)} videos of {key} {self.root} cannot be read; the first: "
                f"{next(iter(broken.values()))}"
            )
        for error in broken.values():
            _say(f"{error}; it is left out")
        return {name: look for name, look in looks.items() if isinstance(look, VideoInfo)}

    def _report_short(self, infos: dict[str, VideoInfo], key: str) -> None:
        if not self.short:
            return
        rule, clip = self.options.short_clips, f"{self.options.num_frames} frames at {self.options.fps:g} per second"
        if rule == "skip" and len(self.short) == len(infos):
            longest = max(info.frames_at(self.options.fps) for info in infos.values())
            raise UserError(
                f"all {len(infos)} videos of {key} {self.root} are shorter than {clip}, the longest has {longest}; "
                "lower data.num_frames or raise data.fps, or set data.short_clips to loop or hold"
            )
        done = {"skip": "are left out", "loop": "begin again", "hold": "stand still at their end"}[rule]
        _say(
            f"{len(self.short)} of the {len(infos)} videos of {key} {self.root} are shorter than {clip} and {done} "
            f"(data.short_clips={rule}); the first is {self.short[0]}"
        )


def check_rates(options: DataOptions) -> None:
    """Raise `UserError` unless `num_frames` is 4k + 1, as video autoencoders take them, and `fps` is positive."""
    frames = options.num_frames
    if frames < 1 or frames % 4 != 1:
        near = 4 * max(0, round((frames - 1) / 4)) + 1
        raise UserError(f"data.num_frames is {frames}; 4k + 1 frames are accepted, such as {near}")
    if not 0 < options.fps < 1000:
        raise UserError(f"data.fps is {options.fps}; frames per second between 0 and 1000 are accepted")


def bucket_sizes(options: DataOptions) -> list[tuple[int, int]]:
    """The (height, width) that clips may have."""
    if options.buckets is None:
        return [(options.size, options.size)]
    sizes = options.buckets
    fine = isinstance(sizes, list) and sizes and all(isinstance(size, list) and len(size) == 2 for size in sizes)
    if not fine or not all(isinstance(side, int) and side > 0 for size in sizes for side in size):
        raise UserError(f"data.buckets is {sizes!r}; for videos a list like [[480, 832], [832, 480]] is accepted")
    return [tuple(size) for size in sizes]


def nearest_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> int:
    """Which of `sizes` has the aspect ratio nearest to that of height × width; of equal ones the first."""
    aspect = math.log(height / width)
    return min(range(len(sizes)), key=lambda i: abs(math.log(sizes[i][0] / sizes[i][1]) - aspect))


def read_metadata(path: Path) -> dict[str, str]:
    """Captions by file name from a metadata.jsonl; {} where there is none. Raises `UserError` with the line."""
    if not path.is_file():
        return {}
    captions: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row: Any = None
        try:
            row = json.loads(line)
            name = row["file_name"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}, is not a JSON object with 'file_name' and 'text'") from None
        if not isinstance(row.get("text"), str):
            raise UserError(f"{path}, line {number}: {name} has no caption; 'text' with a string is expected")
        captions[name] = row["text"]
    return captions


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # once, not in every process
        warnings.warn(message, stacklevel=3)
