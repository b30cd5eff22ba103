"""The images that a config names: a folder with class sub-folders, or a Hugging Face dataset."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError
from .data import ImageFolder, ImageSource
from .hf_datasets import DatasetImages, is_dataset

ACCEPTED = (
    "an image folder with one sub-folder per class, a Hugging Face dataset (hub id owner/name, or a folder of parquet "
    "or webdataset files), or a folder made by scripts/cache_latents.py is expected"
)


def open_images(
    path: str, key: str, size: int, channels: int, flip: bool, class_names: list[str] | None = None
) -> ImageSource:
    """The images at `path`, the value of config key `key`. Raises `UserError` where there are none."""
    if not path:
        raise UserError(f"{key} is not set; {ACCEPTED}")
    if is_dataset(path):
        return DatasetImages(path, size, channels, flip, class_names)
    if not Path(path).is_dir():
        raise UserError(f"{key} is {path!r}, which is not a folder; {ACCEPTED}")
    return ImageFolder(path, size, channels, flip, class_names)
