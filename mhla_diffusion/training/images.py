"""The images that a config names: a folder with class sub-folders, or a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path

from ..backbones.family import Family
from ..errors import UserError
from .config import DataOptions
from .data import ImageFolder, ImageSource
from .hf_datasets import DatasetImages, is_dataset

ACCEPTED = (
    "an image folder with one sub-folder per class, a Hugging Face dataset (hub id owner/name, or a folder of parquet "
    "or webdataset files), or a folder made by scripts/cache_latents.py is expected"
)


def open_images(
    path: str,
    key: str,
    options: DataOptions,
    family: Family,
    *,
    flip: bool,
    class_names: list[str] | None = None,
) -> ImageSource:
    """The images or videos at `path`, the value of config key `key`. Raises `UserError` where there are none."""
    if not path:
        raise UserError(f"{key} is not set; {ACCEPTED}")
    if is_dataset(path):
        return DatasetImages(path, options.size, options.channels, flip, class_names)
    if not Path(path).is_dir():
        raise UserError(f"{key} is {path!r}, which is not a folder; {ACCEPTED}")
    if options.num_frames > 1 or _holds_videos(path):
        from .videos import VideoFolder  # needs a video library, which images do without

        return VideoFolder(path, options, key, flip=flip)
    return ImageFolder(path, options.size, options.channels, flip, class_names)


def _holds_videos(path: str) -> bool:
    try:
        from .videos import holds_videos
    except ImportError:
        return False
    return holds_videos(path)
