"""The data set that a config names: images or videos, or a cache of what the VAE and the text encoder say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..backbones.family import Family
from ..errors import UserError
from .buckets import open_buckets
from .cached import INDEX, CachedLatents
from .config import DataOptions
from .data import ImageSource
from .hf_datasets import DatasetImages, is_dataset
from .images import ImageFolder
from .streams import StreamedImages

ACCEPTED = (
    "an image folder (with one sub-folder per class, or with captions), a folder of videos, a Hugging Face dataset "
    "(hub id owner/name, or a folder of parquet or webdataset files), or a folder made by scripts/cache_latents.py is "
    "expected"
)


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
        cache = CachedLatents(path, options, flip=flip, class_names=class_names)
        cache.check_family(family)
        return cache
    if not path:
        raise UserError(f"{key} is not set; {ACCEPTED}")
    if options.streaming and key == "data.train":  # held-out samples are few, and looked at again and again
        if not is_dataset(path):
            raise UserError(f"data.streaming is true, but {key} {path!r} is no Hugging Face dataset; set it to false")
        return StreamedImages(path, options, flip=flip, class_names=class_names, takes_text=family.takes_text)
    how: dict[str, Any] = {"takes_text": family.takes_text, "buckets": open_buckets(options)}
    if is_dataset(path):
        return DatasetImages(path, options.size, options.channels, flip, class_names, **how)
    if not Path(path).is_dir():
        raise UserError(f"{key} is {path!r}, which is not a folder; {ACCEPTED}")
    from .videos import VideoFolder, holds_videos  # need a video library, which takes its time to import

    if options.num_frames > 1 or holds_videos(path):
        return VideoFolder(path, options, key, flip=flip)
    return ImageFolder(path, options.size, options.channels, flip, class_names, **how)


def check_sources(
    sources: Sequence[ImageSource | None],
    family: Family,
    components: Mapping[str, Any],
) -> bool:
    """Whether all of `sources` come encoded, so that no VAE is needed to train on them.

    Raises `UserError` for latents of another family or VAE, or captions of another text encoder, than the run's.
    """
    given = [source for source in sources if source is not None]
    cached = [source for source in given if isinstance(source, CachedLatents)]
    for source in cached:
        source.check(family, components)
    return len(cached) == len(given)
