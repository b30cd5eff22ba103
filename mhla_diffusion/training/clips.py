"""Many short clips from a few long videos, as a data set of its own with held-out clips."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import UserError
from .checkpoints import whole_folder
from .config import DataOptions
from .video_files import read_clip, write_mp4
from .videos import DamagedVideos, VideoFolder


def cut_clips(
    videos: str | Path,
    out: str | Path,
    size: int = 64,
    num_frames: int = 33,
    fps: float = 24.0,
    stride: int = 4,
    held_out: float = 0.25,
) -> dict[str, int]:
    """Cut overlapping clips from the captioned videos in a folder into OUT/{train,test}/NAME-FRAME.mp4.

    The last part of every video is held out, so that no frame is in both splits. Captions are those of the videos.

    Args:
        videos: a folder as `VideoFolder` takes it.
        size: the clips are size × size pixels, cut from the middle.
        num_frames, fps: length and frame rate of a clip.
        stride: frames from the beginning of one clip to that of the next.
        held_out: share of a video that is held out; at least one clip.

    Clips that a damaged video does not give are left out, and which video it is is told in a warning. Returns the
    number of clips per split. Raises `UserError` when `out` is not empty, no video has twice a clip's length, or no
    clip of a split can be read.
    """
    if size < 16 or size % 2:
        raise UserError(f"--size {size} is not possible for clips; even numbers from 16 on are accepted")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose a new folder")
    source = VideoFolder(videos, DataOptions(size=size, num_frames=num_frames, fps=fps), "--videos")
    starts = [
        (split, i, start)
        for i, frames in enumerate(source.frames)
        for split, span in _spans(frames, num_frames, held_out).items()
        for start in range(span.start, span.stop - num_frames + 1, stride)
    ]
    if not any(split == "test" for split, _, _ in starts):
        raise UserError(
            f"no video in {videos} has {2 * num_frames} frames at {fps:g} per second, for one clip to train on and one "
            "to hold out; longer videos are needed"
        )
    stems = [Path(name).with_suffix("").as_posix().replace("/", "_") for name in source.files]
    names = [f"{stem}_{i}" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems)]
    captions: dict[str, list[str]] = {"train": [], "test": []}
    damaged = DamagedVideos()
    try:
        with whole_folder(out, synced=False) as folder:
            for split, i, start in starts:
                name = f"{names[i]}-{start:06d}.mp4"
                (folder / split).mkdir(exist_ok=True)
                try:
                    clip = read_clip(source.root / source.files[i], num_frames, fps, size, size, start / fps)
                except UserError as error:
                    damaged.add(source.files[i], error)
                    continue
                write_mp4(clip, folder / split / name, fps)
                captions[split].append(json.dumps({"file_name": name, "text": source.texts[i]}, ensure_ascii=False))
            for split, lines in captions.items():
                if not lines:
                    raise UserError(f"no clip of {videos} for the {split} split can be read{damaged.first}")
                (folder / split / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    damaged.close()
    return {split: len(lines) for split, lines in captions.items()}


def _spans(frames: int, num_frames: int, held_out: float) -> dict[str, range]:
    """The frames of a video that each split may use; a video too short for both is trained on."""
    if frames < 2 * num_frames:
        return {"train": range(frames)}
    border = frames - max(num_frames, min(round(held_out * frames), frames - num_frames))
    return {"train": range(border), "test": range(border, frames)}
