"""The data set that a config names: an image folder, a Hugging Face dataset, or a cache of latents made from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..backbones.family import Family
from .cache import INDEX, CachedLatents
from .config import DataOptions
from .data import ImageSource
from .images import open_images


def open_source(
    path: str,
    key: str,
    options: DataOptions,
    family: Family,
    *,
    flip: bool,
    class_names: list[str] | None = None,
) -> ImageSource:
    """The data set at `path`, the value of config key `key`, as `options` ask for it and `family` takes it.

    Raises `UserError` where there is none, or one that does not give what the other arguments ask for.
    """
    if path and (Path(path) / INDEX).is_file():
        return CachedLatents(path, options.size, options.channels, flip, class_names)
    return open_images(path, key, options, family, flip=flip, class_names=class_names)


def check_sources(sources: Sequence[ImageSource | None], family: Family, components: Mapping[str, Any]) -> bool:
    """Whether all of `sources` come encoded, so that no VAE is needed to train on them.

    Raises `UserError` for latents of another family or VAE than the run's.
    """
    given = [source for source in sources if source is not None]
    cached = [source for source in given if isinstance(source, CachedLatents)]
    for source in cached:
        source.check(family, components)
    return len(cached) == len(given)
