"""Scores of a set of generated images against a reference set: FID, sFID, Inception score, precision, recall, KID.

The protocol is that of the ADM evaluation suite (Dhariwal & Nichol 2021): FID and sFID from all images of both sides,
precision and recall with 3 neighbours against at most 10,000 reference images, the Inception score over splits of
5,000. KID is torch-fidelity's: the mean over 100 subsets of 1,000 of the unbiased estimate with the cubic kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, KEY_METRIC_ISC_STD, isc_features_to_metric

from ..errors import UserError, check_writable, nearest
from .features import FeatureNetwork, load_feature_network
from .image_statistics import ImageStatistics, compute_statistics
from .images import ImageSet, npz_keys, read_labels
from .statistics import (
    FeatureStatistics,
    frechet_distance,
    kernel_distance,
    precision_recall,
)

METRICS = ("fid", "sfid", "inception_score", "precision", "recall", "kid", "accuracy")
SPLIT = 5_000
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000


def fid_from_statistics(first: Any, second: Any) -> float:
    """Fréchet distance of two statistics.

    Args:
        first, second: `ImageStatistics`, `FeatureStatistics`, a mapping with `mu` and `sigma`, or a statistics file.

    Raises:
        UserError: different numbers of features, or different feature networks.
    """

    def read(value: Any) -> tuple[FeatureStatistics, tuple[str, str]]:
        if isinstance(value, (str, Path)):
            value = ImageStatistics.load(value)
        if isinstance(value, ImageStatistics):
            return value.pooled, (value.network, value.fingerprint)
        if isinstance(value, FeatureStatistics):
            return value, ("", "")
        return FeatureStatistics.from_covariance(value["mu"], value["sigma"]), ("", "")

    (first, first_network), (second, second_network) = read(first), read(second)
    _same_network(first_network, second_network)
    return frechet_distance(first, second)


def inception_score(logits: Tensor, split: int = SPLIT) -> tuple[float, float, int]:
    """Inception score (Salimans et al. 2016): mean and standard deviation over parts, and their number.

    A part has about `split` images. The images are shuffled first (fixed seed), so that a folder sorted by class does
    not make each part hold few classes.
    """
    splits = max(1, round(len(logits) / split))
    found = isc_features_to_metric(logits, splits)
    return found[KEY_METRIC_ISC_MEAN], found[KEY_METRIC_ISC_STD], splits


def evaluate_images(
    generated: str | Path,
    reference: str | Path | ImageSet,
    features: str | FeatureNetwork = "inception",
    metrics: Iterable[str] | None = None,
    *,
    inception_weights: str | Path | None = None,
    save_statistics: str | Path | None = None,
    kid_subsets: int = KID_SUBSETS,
    batch_size: int = 64,
    workers: int = 4,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Score generated images against a reference.

    Args:
        generated: a folder of images, or an `.npz` file with `arr_0`.
        reference: the same, or a statistics file: of `save_statistics`, or of the ADM suite (`mu`, `sigma`, `mu_s`,
            `sigma_s`, `arr_0`). An `ImageSet` has been opened already, as that of a caption set.
        features: "inception", "digits", a name registered with torch-fidelity, or a loaded network.
        metrics: some of `METRICS`; None: all that the inputs allow.
        inception_weights: Inception's weight file; None: downloaded once by torch-fidelity.
        save_statistics: write the reference's statistics here, to be used as `reference` later.
        kid_subsets: how many subsets KID averages over.

    Returns:
        The metrics by name (floats, None where it could not be computed), `inception_score_std`, `kid_std`,
        `num_generated`, `num_reference` (None if unknown), `protocol` (dict), `unavailable` (metric → reason) and
        `notes`, sentences about the images and the trust that the scores deserve. All of it fits into JSON.

    Raises:
        UserError: a missing or empty folder, an unknown metric or network, statistics of another network; all of these
            before any image has been read.
    """
    wanted = _wanted(metrics)
    images = ImageSet(generated, "generated")
    reference_images = reference if isinstance(reference, ImageSet) else _reference_images(reference)
    reference = reference.path if isinstance(reference, ImageSet) else reference
    if save_statistics is not None and Path(save_statistics).suffix != ".npz":
        raise UserError(f"save_statistics={str(save_statistics)!r} must end in .npz")
    if save_statistics is not None:
        check_writable("save_statistics", save_statistics)
    labels = read_labels(generated) if Path(generated).is_dir() else {}
    network = features
    if not isinstance(features, FeatureNetwork):
        network = load_feature_network(features, inception_weights, device)
    options = {"batch_size": batch_size, "workers": workers, "progress": progress}
    real = _reference_statistics(reference, reference_images, network, wanted, options)
    if save_statistics is not None:
        real.save(save_statistics)
    fake = compute_statistics(images, network, keep_features=None, keep_logits=True, **options)
    _same_network((fake.network, fake.fingerprint), (real.network, real.fingerprint))

    result: dict[str, Any] = {}
    unavailable: dict[str, str] = {}
    remarks: list[str] = []
    protocol: dict[str, str] = {"features": f"{network.name} (weights {network.fingerprint})"}
    for metric in wanted:
        result[metric] = None
    if "fid" in wanted:
        result["fid"] = frechet_distance(fake.pooled, real.pooled)
    if "sfid" in wanted:
        if fake.spatial is None:
            unavailable["sfid"] = f"{network.name!r} has no spatial features"
        elif real.spatial is None:
            unavailable["sfid"] = "the reference statistics have no spatial part ('mu_s', 'sigma_s')"
        else:
            result["sfid"] = frechet_distance(fake.spatial, real.spatial)
            protocol["sfid"] = f"{len(fake.spatial.mean)} spatial features of mixed_6/conv"
    if "inception_score" in wanted:
        if fake.logits is None:
            unavailable["inception_score"] = f"{network.name!r} has no class scores"
        else:
            mean, deviation, splits = inception_score(fake.logits)
            result |= {"inception_score": mean, "inception_score_std": deviation}
            protocol["inception_score"] = f"{splits} split{'s' * (splits > 1)} of {len(fake.logits) // splits} images"
    kept = 0 if real.features is None else len(real.features)
    if {"precision", "recall"} & set(wanted):
        if min(kept, len(fake.features)) <= 3:
            reason = "the reference statistics hold no features of images" if not kept else "fewer than 4 images"
            unavailable |= {name: reason for name in ("precision", "recall") if name in wanted}
        else:
            scores = precision_recall(fake.features, real.features, device=network.device)
            result |= {
                name: value for name, value in zip(("precision", "recall"), scores, strict=True) if name in wanted
            }
            protocol["precision, recall"] = f"3 neighbours, {len(fake.features)} generated and {kept} reference images"
    if "kid" in wanted:
        if not kept:
            unavailable["kid"] = "the reference statistics hold no features of images"
        else:
            result["kid"], result["kid_std"] = kernel_distance(
                fake.features, real.features, kid_subsets, KID_SUBSET_SIZE, device=network.device
            )
            size = min(KID_SUBSET_SIZE, len(fake.features), kept)
            everything = size == len(fake.features) == kept
            subsets = f"all {size} images" if everything else f"{kid_subsets} subsets of {size}"
            protocol["kid"] = f"{subsets}, unbiased, cubic kernel"
            if result["kid"] < 0:
                remarks.append("KID below zero is possible, being unbiased: no difference was found.")
    if "accuracy" in wanted:
        pairs = [
            (row, labels[images.name(index)])
            for row, index in enumerate(fake.indices.tolist())
            if images.name(index) in labels
        ]
        if not network.classifies_labels or not pairs:
            # Most data sets have no classifier here; the reason is given to those who asked.
            if metrics is not None:
                unavailable["accuracy"] = (
                    "there is no labels.jsonl beside the generated images"
                    if network.classifies_labels
                    else f"{network.name!r} does not classify the data's own classes"
                )
        else:
            chosen, requested = (torch.tensor(column) for column in zip(*pairs, strict=True))
            hits = fake.logits[chosen].argmax(1) == requested
            result["accuracy"] = hits.double().mean().item()
            protocol["accuracy"] = f"share of {len(pairs)} images recognised as the class that was asked for"
    return result | {
        "num_generated": fake.count,
        "num_reference": real.count,
        "generated": str(generated),
        "reference": str(reference),
        "protocol": protocol,
        "unavailable": unavailable,
        "notes": fake.notes + real.notes + remarks + _trust(fake, real, network),
    }


def format_table(result: dict[str, Any]) -> str:
    """The result of `evaluate_images` as text: one metric a line, then the protocol and the notes."""
    names = {"fid": "FID", "sfid": "sFID", "inception_score": "Inception score", "kid": "KID"}
    lines = []
    for metric in METRICS:
        value = result.get(metric)
        if value is None:
            continue
        spread = result.get(f"{metric}_std")
        text = f"{value:.3g}" if metric == "kid" else f"{value:.4f}"
        if spread is not None:
            text += f" ± {spread:.2g}" if spread else ""
        name, protocol = names.get(metric, metric.capitalize()), result["protocol"].get(metric, "")
        lines.append(f"{name:<16} {text:<20} {protocol}".rstrip())
    if "precision, recall" in result["protocol"]:
        lines.append(f"{'':<16} {'precision, recall:':<20} {result['protocol']['precision, recall']}")
    reference = result["num_reference"] or "an unknown number of"
    lines.append(f"{'images':<16} {result['num_generated']} generated, {reference} reference")
    lines.append(f"{'features':<16} {result['protocol']['features']}")
    lines += [f"not computed: {metric}: {reason}" for metric, reason in result["unavailable"].items()]
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines)


def _wanted(metrics: Iterable[str] | None) -> list[str]:
    if metrics is None:
        return list(METRICS)
    metrics = [metrics] if isinstance(metrics, str) else list(metrics)
    for metric in metrics:
        if metric not in METRICS:
            raise UserError(
                f"metric {metric!r} is not known{nearest(metric, METRICS)}; metrics are {', '.join(METRICS)}"
            )
    return [metric for metric in METRICS if metric in metrics]


def _reference_images(reference: str | Path) -> ImageSet | None:
    """The images of the reference, or None where it is a file of statistics alone."""
    path = Path(reference)
    if path.is_file() and path.suffix == ".npz":
        keys = npz_keys(path)
        if "arr_0" not in keys:
            if not {"mu", "sigma"} <= set(keys):
                raise UserError(f"{str(path)!r} holds neither 'mu' and 'sigma' nor images 'arr_0', but {sorted(keys)}")
            return None
    return ImageSet(path, "reference")


def _reference_statistics(
    reference: str | Path, images: ImageSet | None, network: FeatureNetwork, wanted: list[str], options: dict
) -> ImageStatistics:
    path = Path(reference)
    if images is not None and not (path.suffix == ".npz" and path.is_file() and "mu" in npz_keys(path)):
        return compute_statistics(images, network, **options)
    statistics = ImageStatistics.load(path)
    if statistics.network:
        _same_network((network.name, network.fingerprint), (statistics.network, statistics.fingerprint))
    if len(statistics.pooled.mean) != network.dim:
        raise UserError(
            f"the statistics in {str(path)!r} have {len(statistics.pooled.mean)} features, "
            f"{network.name!r} has {network.dim}"
        )
    if statistics.features is None and images is not None and {"precision", "recall", "kid"} & set(wanted):
        # ADM's reference batches: published statistics of the whole data set, and 10,000 of its images.
        batch = compute_statistics(images, network, **options)
        statistics.features, statistics.sizes, statistics.notes = batch.features, batch.sizes, batch.notes
    return statistics


def _same_network(first: tuple[str, str], second: tuple[str, str]) -> None:
    if first[0] and second[0] and first != second:
        raise UserError(
            f"statistics of {second[0]!r} with weights {second[1]} cannot be compared with those of {first[0]!r} with "
            f"weights {first[1]}"
        )


def _trust(fake: ImageStatistics, real: ImageStatistics, network: FeatureNetwork) -> list[str]:
    notes = []
    for role, statistics in (("generated", fake), ("reference", real)):
        count = statistics.count
        if count is None:
            continue
        if count <= network.dim:
            notes.append(
                f"{count} {role} images are fewer than the {network.dim + 1} that {network.dim} features need: their "
                "covariance is singular, and the Fréchet distance says more about the number of images than about them."
            )
        elif network.classifies_labels and count < network.recommended_images:
            notes.append(f"With {count} {role} images (fewer than {network.recommended_images}) the scores are noisy.")
        elif not network.classifies_labels and count < 10_000:
            notes.append(
                f"{count} {role} images are fewer than the 10,000 below which FID is strongly biased upwards; "
                "published values use 50,000."
            )
        elif not network.classifies_labels and count < network.recommended_images and role == "generated":
            notes.append(f"Published FIDs use 50,000 generated images; {count} give a higher value.")
    if fake.sizes and real.sizes and set(fake.sizes) != set(real.sizes) and len(fake.sizes) == len(real.sizes) == 1:
        notes.append(
            f"The generated images are {fake.sizes[0]}, the reference {real.sizes[0]}: the score also counts the "
            "difference of resolution."
        )
    return notes
