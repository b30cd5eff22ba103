"""Captioned videos in a folder as training clips.

Captions are in a `metadata.jsonl` with `file_name` and `text` in each line, or in `NAME.txt` beside `NAME.mp4`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from ..errors import UserError
from .buckets import assign, open_buckets
from .captions import captions_by_name
from .config import DataOptions
from .data import Sample, UnreadableSample, most_damaged, too_many_damaged
from .images import IMAGE_SUFFIXES, list_files
from .video_files import VIDEO_SUFFIXES, VideoInfo, probe, read_clip

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # of ITU-R BT.601
LOOKED_AT = 1000  # entries of a folder that tell what it holds


def holds_videos(root: str | Path) -> bool:
    """Whether there are videos, and no images, among the first thousand entries of a folder and its sub-folders."""
    kinds = {path.suffix.lower() for path in itertools.islice(Path(root).rglob("*"), LOOKED_AT)}
    return not kinds.isdisjoint(VIDEO_SUFFIXES) and kinds.isdisjoint(IMAGE_SUFFIXES)


class VideoFolder:
    """Clips of `data.num_frames` frames at `data.fps`, each from a moment drawn anew in every epoch.

    A sample is a clip (channels, T, H, W) or, with one frame, an image (channels, H, W), float32 in [-1, 1], and its
    caption. H × W is `data.size` squared, or the one of `data.buckets` whose aspect ratio is nearest to the video's:
    the clip is scaled to cover it and the middle is cut out.

    Videos shorter than a clip are left out (`data.short_clips` "skip"), begin again ("loop"), or stand still at their
    end ("hold").

    Args:
        root: the folder; videos may be in sub-folders.
        options: what of it is used is named above, and `channels`.
        key: config key that names the folder, for messages.
        flip: mirror half of the clips, drawn anew in every epoch.

    Raises:
        UserError: for a number of frames that is not 4k + 1, a rate that is not positive, a missing file or caption,
            a folder without usable videos, and one where more than 1 % of them, and more than ten, cannot be opened.
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
        check_rates(options, key)
        buckets = open_buckets(options) or {(options.size, options.size): 1.0}
        names = self._names(key)
        captions = captions_by_name(self.root, names, "video")
        infos = self._opened(names)
        self.short = [name for name, info in infos.items() if info and info.frames_at(options.fps) < options.num_frames]
        self._report_short([info for info in infos.values() if info], key)
        left_out = {*self.short} if options.short_clips == "skip" else set()
        self.files = [name for name in names if name not in left_out]
        self.texts = [captions[name] for name in self.files]
        # Of a file that cannot be opened only reading says so, as of any damaged one.
        kept = [infos[name] for name in self.files]
        self.frames = [info.frames_at(options.fps) if info else options.num_frames for info in kept]
        sizes, self._shape_of = assign([info and (info.height, info.width) for info in kept], buckets)
        moments = () if options.num_frames == 1 else (options.num_frames,)
        self.shapes: list[tuple[int, ...]] = [(*moments, *size) for size in sizes]
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

    def _names(self, key: str) -> list[str]:
        """The videos in the folder, by their path within it."""
        names = sorted(list_files(self.root, VIDEO_SUFFIXES))
        if not names:
            raise UserError(f"{key} {self.root} holds no videos ({', '.join(VIDEO_SUFFIXES)})")
        return names

    def _opened(self, names: Sequence[str]) -> dict[str, VideoInfo | None]:
        """What is in each video; None for one that cannot be opened. Raises `UserError` when those are too many."""

        def look(name: str) -> VideoInfo | UserError:
            try:
                return probe(self.root / name)
            except UserError as error:
                return error

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            looks = dict(zip(names, pool.map(look, names), strict=True))
        broken = [str(look) for look in looks.values() if isinstance(look, UserError)]
        if len(broken) == len(names) or len(broken) > most_damaged(len(names)):
            raise too_many_damaged(broken, len(names))
        return {name: look if isinstance(look, VideoInfo) else None for name, look in looks.items()}

    def _report_short(self, infos: Sequence[VideoInfo], key: str) -> None:
        if not self.short:
            return
        rule, clip = self.options.short_clips, f"{self.options.num_frames} frames at {self.options.fps:g} per second"
        if rule == "skip" and len(self.short) == len(infos):
            longest = max(info.frames_at(self.options.fps) for info in infos)
            hint = f"lower {_option(key, 'num_frames')} or raise {_option(key, 'fps')}"
            if not key.startswith("--"):
                hint += ", or set data.short_clips to loop or hold"
            raise UserError(
                f"all {len(infos)} videos of {key} {self.root} are shorter than {clip}, the longest has {longest}; "
                f"{hint}"
            )
        done = {"skip": "are left out", "loop": "begin again", "hold": "stand still at their end"}[rule]
        if os.environ.get("RANK", "0") == "0":  # once, not in every process
            warnings.warn(
                f"{len(self.short)} of the {len(infos)} videos of {key} {self.root} are shorter than {clip} and {done} "
                f"(data.short_clips={rule}); the first is {self.short[0]}",
                stacklevel=3,
            )


class DamagedVideos:
    """The videos that could not be read so far: each is told once, in a warning, and at the end how many there were."""

    def __init__(self) -> None:
        self.sentences: dict[str, str] = {}

    def add(self, name: str, error: UserError) -> None:
        """Tell of a damaged video, unless that was done."""
        if name not in self.sentences:
            self.sentences[name] = str(error)
            warnings.warn(f"{error}; it is left out", stacklevel=3)

    def close(self) -> None:
        """Tell how many there were, if more than one."""
        if len(self.sentences) > 1:
            warnings.warn(f"{len(self.sentences)} damaged videos were left out, in whole or in part", stacklevel=3)

    @property
    def first(self) -> str:
        """What was told of the first one, as the end of a sentence."""
        return f"; the first: {next(iter(self.sentences.values()))}" if self.sentences else ""


def check_rates(options: DataOptions, key: str = "data.train") -> None:
    """Raise `UserError` unless `num_frames` is 4k + 1, as video autoencoders take them, and `fps` is positive."""
    frames = options.num_frames
    if frames < 1 or frames % 4 != 1:
        near = 4 * max(0, round((frames - 1) / 4)) + 1
        raise UserError(f"{_option(key, 'num_frames')} is {frames}; 4k + 1 frames are accepted, such as {near}")
    if not 0 < options.fps < 1000:
        raise UserError(f"{_option(key, 'fps')} is {options.fps}; frames per second between 0 and 1000 are accepted")


def _option(key: str, name: str) -> str:
    """A data option as the user spells it who named the videos by `key`: in a config, or to a command."""
    return f"--{name.replace('_', '-')}" if key.startswith("--") else f"data.{name}"
