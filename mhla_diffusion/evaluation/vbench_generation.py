"""Making the videos that VBench scores."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import UserError
from .vbench import required_suite
from .vbench_prompts import awkward_names, check_file_system, conditions, read_suite


def generate_videos(
    pipeline: str,
    out: str | Path,
    prompts: str | Path | None = None,
    dimensions: Collection[str] | None = None,
    augmented: str | Path | None = None,
    *,
    python: str | None = None,
    dtype: str = "float32",
    device: str | None = None,
    vae_dtype: str | None = None,
    seed: int = 0,
    **numbers: float | None,
) -> str:
    """Make the videos of the suite's prompts as `out/videos/{prompt}-{k}.mp4` and return what is to be said of them.

    Args:
        pipeline, dtype, device, vae_dtype: see `load_pipeline`.
        prompts, python: see `required_suite`.
        dimensions, augmented: see `read_suite`.
        seed, **numbers: see `generate_images`.

    Raises:
        UserError: what these functions raise, or a pipeline that makes no videos. Numbers and prompts are looked at
            before it is loaded.
    """
    from ..pipelines.any_pipeline import makes_videos
    from ..pipelines.generate import check_options, check_saved, generate_images, load_pipeline

    check_options(out, **numbers)
    suite = read_suite(required_suite(prompts, python), dimensions, augmented)
    check_file_system(suite, out)
    check_saved(pipeline, ["prompt"], **numbers)
    loaded = load_pipeline(pipeline, dtype, device, vae_dtype)
    if not makes_videos(loaded):
        raise UserError(f"VBench scores videos, but pipeline={pipeline!r}, a {type(loaded).__name__}, makes none")
    report = generate_images(loaded, conditions(suite), out, seed=seed, **numbers)
    notes = [
        f"note: {text!r} cannot be a file name; its videos are {stem}-0.mp4 and so on"
        for text, stem in awkward_names(suite).items()
    ]
    return "\n".join([str(report), *notes])
