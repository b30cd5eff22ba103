"""Scores of text-to-image generation: CLIP score with the captions, FID and its kin against a caption set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .captions import caption_set, read_captions
from .clip import DEFAULT_MODEL, CLIPScorer, clip_score, format_clip_score
from .features import load_feature_network
from .fid import evaluate_images, format_table
from .images import ImageSet


def evaluate_text_image(
    generated: str | Path,
    reference: str | Path | None = None,
    captions: str | Path | None = None,
    clip: str | Path | None = DEFAULT_MODEL,
    *,
    dtype: str = "float32",
    features: str = "inception",
    metrics: Iterable[str] = ("fid",),
    inception_weights: str | Path | None = None,
    batch_size: int = 64,
    workers: int = 4,
    device: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Score a folder of images that were generated from captions.

    Args:
        generated: the folder.
        reference: for FID: a caption set (the images that its `metadata.jsonl` names, or all of the folder), or saved
            statistics; None: no FID.
        captions: the texts of the images, see `read_captions`; None: those in the folder.
        clip: CLIP as a hub id or a local folder; None: no CLIP score.
        dtype: precision of CLIP.
        features, metrics, inception_weights: see `evaluate_images`.
        batch_size, workers, device, progress: of both.

    Returns:
        `{"clip": the result of clip_score, "reference": that of evaluate_images}`, each only where asked for.

    Raises:
        UserError: nothing to do, missing images, captions or weights; before the first image is scored.
    """
    if reference is None and clip is None:
        raise UserError("neither a reference nor a CLIP model is given; there is nothing to score")
    options = {"batch_size": batch_size, "workers": workers, "progress": progress}
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
    images = ImageSet(generated, "generated")
    if reference is not None and Path(reference).is_dir():
        reference = caption_set(reference)
    if clip is not None:
        read_captions(images, captions)
        scorer = CLIPScorer(clip, dtype, device)
    result = {}
    if reference is not None:
        network = load_feature_network(features, inception_weights, device)
        found = evaluate_images(generated, reference, network, metrics, **options)
        if found["num_reference"] and found["num_reference"] != found["num_generated"]:
            found["notes"].append(
                f"A caption set is usually compared with one image for each of its captions; here {len(images)} "
                f"images meet {found['num_reference']}."
            )
        result["reference"] = found
    if clip is not None:
        result["clip"] = clip_score(images, captions, scorer, **options)
    return result


def format_scores(result: Mapping[str, Any]) -> str:
    """What `evaluate_text_image` returned, as tables."""
    parts = [format_clip_score(result["clip"])] if "clip" in result else []
    return "\n".join([*parts, format_table(result["reference"])] if "reference" in result else parts)
