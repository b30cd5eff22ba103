"""What is kept of a set of images for its scores: made in one pass through a feature network, saved and read again."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..errors import UserError
from .features import FeatureNetwork, load_feature_network
from .images import ImageSet
from .statistics import FeatureStatistics, StatisticsAccumulator

REFERENCE_FEATURES = 10_000


@dataclass
class ImageStatistics:
    """What is kept of a set of images: enough for every metric.

    Attributes:
        pooled, spatial: statistics over all images.
        features: (n, D) float32, those of the images that precision, recall and KID use.
        indices: the image of each row of `features`, in the order of the set.
        logits: (n, C) float32.
    """

    pooled: FeatureStatistics
    spatial: FeatureStatistics | None = None
    features: Tensor | None = None
    indices: Tensor | None = None
    logits: Tensor | None = None
    network: str = ""
    fingerprint: str = ""
    sizes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int | None:
        """Number of images, or None where a statistics file does not say."""
        return self.pooled.count

    def save(self, path: str | Path) -> None:
        """Write an `.npz` file: `mu`, `sigma`, `mu_s`, `sigma_s` as the ADM suite, and what other metrics need."""
        path = Path(path)
        if path.suffix != ".npz":
            raise UserError(f"a statistics file ends in .npz, got {str(path)!r}")
        arrays = {
            "mu": self.pooled.mean,
            "sigma": self.pooled.covariance,
            "factor": self.pooled.factor,
            "num_images": np.array(self.count or 0),
            "network": np.array([self.network, self.fingerprint]),
            "sizes": np.array(self.sizes, dtype=str),
        }
        if self.spatial is not None:
            arrays |= {"mu_s": self.spatial.mean, "sigma_s": self.spatial.covariance, "factor_s": self.spatial.factor}
        if self.features is not None:
            arrays["features"] = self.features
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                np.savez(file, **{name: np.asarray(value) for name, value in arrays.items()})
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"the statistics cannot be written to {str(path)!r} ({error.strerror})") from None

    @classmethod
    def load(cls, path: str | Path) -> ImageStatistics:
        """Read a file of `save`, or one with `mu` and `sigma` (and `mu_s`, `sigma_s`) from elsewhere."""
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files if name != "arr_0"}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(f"{str(path)!r} cannot be read as a statistics file ({error})") from None
        if "mu" not in arrays or "sigma" not in arrays:
            raise UserError(f"{str(path)!r} holds neither 'mu' and 'sigma' nor images 'arr_0', but {sorted(arrays)}")
        count = int(arrays["num_images"]) if "num_images" in arrays else None

        def read(suffix: str) -> FeatureStatistics | None:
            if f"mu{suffix}" not in arrays or f"sigma{suffix}" not in arrays:
                return None
            if f"factor{suffix}" in arrays:
                mean, factor = (torch.as_tensor(arrays[f"{name}{suffix}"]).double() for name in ("mu", "factor"))
                return FeatureStatistics(mean, factor, count)
            return FeatureStatistics.from_covariance(arrays[f"mu{suffix}"], arrays[f"sigma{suffix}"], count)

        features = torch.as_tensor(arrays["features"]) if "features" in arrays else None
        network, fingerprint = (str(name) for name in arrays["network"]) if "network" in arrays else ("", "")
        sizes = [str(size) for size in arrays["sizes"]] if "sizes" in arrays else []
        return cls(read(""), read("_s"), features, network=network, fingerprint=fingerprint, sizes=sizes)


def compute_statistics(
    source: str | Path | ImageSet,
    features: str | FeatureNetwork = "inception",
    *,
    inception_weights: str | Path | None = None,
    keep_features: int | None = REFERENCE_FEATURES,
    keep_logits: bool = False,
    batch_size: int = 64,
    workers: int = 4,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> ImageStatistics:
    """Pass a folder or `arr_0` file of images through a feature network once.

    Args:
        source: the images.
        features: name of a network, or one that is loaded.
        inception_weights: Inception's weight file, see `load_feature_network`.
        keep_features: keep the features of this many images, evenly spaced over the set; None: of all.
        keep_logits: keep the class scores of all images.
        batch_size: images per forward pass; does not change the result beyond rounding.
        workers: threads that decode images.

    Raises:
        UserError: no images, or fewer than two readable ones.
    """
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
    images = source if isinstance(source, ImageSet) else ImageSet(source)
    network = (
        features if isinstance(features, FeatureNetwork) else load_feature_network(features, inception_weights, device)
    )
    kept = len(images) if keep_features is None else min(keep_features, len(images))
    chosen = set(np.linspace(0, len(images) - 1, kept).round().astype(int).tolist()) if kept else set()
    pooled, spatial = StatisticsAccumulator(), StatisticsAccumulator()
    rows: list[tuple[int, Tensor]] = []
    scores: list[tuple[int, Tensor]] = []
    description = f"{images.role} features"
    with tqdm(total=len(images), desc=description, unit="image", disable=not progress, dynamic_ncols=True) as bar:
        for indices, batch in images.batches(batch_size, workers):
            found = network(batch)
            pooled.add(found.pooled)
            if found.spatial is not None:
                spatial.add(found.spatial)
            values = found.pooled.cpu()
            rows += [(index, values[i]) for i, index in enumerate(indices) if index in chosen]
            if keep_logits and found.logits is not None:
                scores += list(zip(indices, found.logits.float().cpu(), strict=True))
            bar.update(len(indices))
    if images.read < 2:
        reason = f" ({images.unreadable[0]})" if images.unreadable else ""
        raise UserError(
            f"{images.role} {str(images.path)!r} has {images.read} readable images, at least 2 are needed{reason}"
        )
    rows.sort(key=lambda row: row[0])
    scores.sort(key=lambda row: row[0])
    return ImageStatistics(
        pooled.finish(),
        spatial.finish() if network.has_spatial else None,
        torch.stack([row for _, row in rows]) if rows else None,
        torch.tensor([index for index, _ in rows]),
        torch.stack([row for _, row in scores]) if scores else None,
        network.name,
        network.fingerprint,
        list(images.sizes),
        images.notes(grey_expected=network.classifies_labels),
    )
