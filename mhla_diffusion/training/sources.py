"""The data set that a config names: an image folder, or a cache of latents made from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..backbones.family import Family
from ..errors import UserError
from .cache import INDEX, CachedLatents
from .data import ImageFolder, ImageSource

ACCEPTED = "an image folder with one sub-folder per class, or a folder made by scripts/cache_latents.py, is expected"


def open_source(
    path: str, key: str, size: int, channels: int, flip: bool, class_names: list[str] | None = None
) -> ImageSource:
    """The data set at `path`, the value of config key `key`.

    Raises `UserError` where there is none, or one that does not give what the other arguments ask for.
    """
    if not path:
        raise UserError(f"{key} is not set; {ACCEPTED}")
    if not Path(path).is_dir():
        raise UserError(f"{key} is {path!r}, which is not a folder; {ACCEPTED}")
    if (Path(path) / INDEX).is_file():
        return CachedLatents(path, size, channels, flip, class_names)
    return ImageFolder(path, size, channels, flip, class_names)


def check_sources(sources: Sequence[ImageSource | None], family: Family, components: Mapping[str, Any]) -> bool:
    """Whether all of `sources` come encoded, so that no VAE is needed to train on them.

    Raises `UserError` for latents of another family or VAE than the run's.
    """
    given = [source for source in sources if source is not None]
    cached = [source for source in given if isinstance(source, CachedLatents)]
    for source in cached:
        source.check(family, components)
    return len(cached) == len(given)
