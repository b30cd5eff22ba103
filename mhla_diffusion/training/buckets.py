"""Shapes that images are trained in: the square, SANA's published ones, or a list; each image takes the nearest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backbones.family import Family
from ..errors import UserError
from .config import DataOptions
from .data import ImageSource

Size = tuple[int, int]  # height, width in pixels


def open_buckets(options: DataOptions) -> dict[Size, float] | None:
    """The (height, width) of every bucket with its aspect ratio height / width; None without `data.buckets`.

    `data.buckets="sana"` takes the tables that diffusers' SanaPipeline uses, with their rounded ratios.

    Raises:
        UserError: for another value, an empty list, or a size that SANA has no table for.
    """
    buckets = options.buckets
    if buckets is None:
        return None
    if buckets == "sana":
        table = _published(options.size)
        return {(int(height), int(width)): float(ratio) for ratio, (height, width) in table.items()}
    fine = isinstance(buckets, (list, tuple)) and len(buckets) > 0
    if not fine or not all(_is_size(size) for size in buckets):
        raise UserError(
            f"data.buckets is {buckets!r}; 'sana' or a list of sizes [[height, width], …] in pixels is accepted"
        )
    return {(height, width): height / width for height, width in buckets}


def assign(sizes: Sequence[Size | None], buckets: dict[Size, float]) -> tuple[list[Size], list[int]]:
    """The bucket of each image: that with the nearest aspect ratio, as SANA does it, and of several the nearest area.

    Args:
        sizes: (height, width) of each image; None for one that cannot be read, which goes where most others are.

    Returns:
        The buckets that are used, in the order of `buckets`, and the place in it of each image's.
    """
    known = np.array([size for size in sizes if size is not None], dtype=float).reshape(-1, 2)
    places = np.array([*buckets], dtype=float)
    nearest = np.empty(len(known), dtype=np.int64)
    for first in range(0, len(known), 65536):
        part = known[first : first + 65536, None]
        away = np.abs(part[..., 0] / part[..., 1] - np.array([*buckets.values()]))
        area = np.abs(np.log(part.prod(-1) / places.prod(-1)))
        tied = away <= away.min(1, keepdims=True) + 1e-9
        nearest[first : first + 65536] = np.where(tied, area, np.inf).argmin(1)
    counts = np.bincount(nearest, minlength=len(buckets))
    used = np.flatnonzero(counts) if len(known) else np.array([0])
    place = {int(bucket): i for i, bucket in enumerate(used)}
    found = iter(nearest.tolist())
    most = int(counts.argmax())
    return (
        [[*buckets][i] for i in used],
        [place[next(found) if size is not None else most] for size in sizes],
    )


def check_family(options: DataOptions, family: Family) -> None:
    """Raise `UserError` where buckets are asked for and the family makes images of one size only."""
    if options.buckets is not None and family.one_size:
        raise UserError(f"data.buckets is set, but {family.name} makes square images of one size; set it to null")


def check_factor(shapes: Sequence[tuple[int, ...]], factor: int, key: str) -> None:
    """Raise `UserError` for a height or width of (…, height, width) that the VAE's `factor` does not divide."""
    for *_, height, width in shapes:
        if height % factor or width % factor:
            near = [max(1, round(side / factor)) * factor for side in (height, width)]
            raise UserError(
                f"{key} gives samples of {height}×{width} pixels, which the VAE's factor of {factor} does not divide; "
                f"{near[0]}×{near[1]} would do"
            )


def describe_shapes(source: ImageSource) -> str | None:
    """How many samples there are of each shape, as "512×512: 1,203, 448×576: 88"; None where all are alike."""
    if source.shapes is None:
        return None
    counts = Counter(source.shape_of(index) for index in range(len(source)))
    return ", ".join(f"{'×'.join(map(str, source.shapes[i]))}: {n:,}" for i, n in counts.most_common())


def _published(size: int) -> dict[str, list[float]]:
    from diffusers.pipelines.sana import pipeline_sana as published  # takes a second

    tables = {
        512: published.ASPECT_RATIO_512_BIN,
        1024: published.ASPECT_RATIO_1024_BIN,
        2048: published.ASPECT_RATIO_2048_BIN,
        4096: published.ASPECT_RATIO_4096_BIN,
    }
    if size not in tables:
        raise UserError(
            f"data.buckets is 'sana', which has shapes for data.size={', '.join(map(str, tables))}, but data.size is "
            f"{size}; set it to one of these, or give a list of [height, width]"
        )
    return tables[size]


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in value)
    )
