"""Distances between two sets of feature vectors: Fréchet distance, kernel distance, precision and recall.

Everything here takes tensors and returns numbers; where the features come from is told in `features.py`.

The Fréchet distance needs tr √(Σ₁Σ₂). The usual matrix square root of the product loses half of the digits when a
covariance is nearly singular (fewer images than features, dead features). Here a covariance is kept as a factor F with
Σ = FᵀF; then tr √(Σ₁Σ₂) is the sum of the singular values of F₁F₂ᵀ, which is accurate to rounding whatever the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and covariance of a set of feature vectors, float64 on the CPU.

    Attributes:
        mean: (D,).
        factor: (R, D) with R ≤ D; the unbiased covariance is `factor.T @ factor`.
        count: number of vectors, or None where a statistics file does not say.
    """

    mean: Tensor
    factor: Tensor
    count: int | None = None

    @property
    def covariance(self) -> Tensor:
        """The unbiased covariance, (D, D)."""
        return self.factor.T @ self.factor

    @classmethod
    def from_covariance(cls, mean: np.ndarray | Tensor, covariance: np.ndarray | Tensor, count: int | None = None):
        """Read mean (D,) and covariance (D, D), as published statistics files hold them.

        Raises:
            UserError: the shapes do not fit, a value is not finite, or an eigenvalue is clearly negative.
        """
        mean = torch.as_tensor(mean, dtype=torch.float64)
        covariance = torch.as_tensor(covariance, dtype=torch.float64)
        if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
            raise UserError(
                f"statistics need a mean (D,) and a covariance (D, D), got {tuple(mean.shape)} and "
                f"{tuple(covariance.shape)}"
            )
        if not (mean.isfinite().all() and covariance.isfinite().all()):
            raise UserError("the statistics hold values that are not finite")
        values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
        largest = values[-1].clamp(min=0)
        if values[0] < -1e-3 * largest:
            raise UserError(f"the covariance is not positive semi-definite: its lowest eigenvalue is {values[0]:.3g}")
        # An eigenvalue below rounding is noise of either sign, and its square root would be 1e8 times larger.
        kept = values > 4 * torch.finfo(torch.float64).eps * largest
        return cls(mean, values[kept].sqrt()[:, None] * vectors[:, kept].T, count)

    @classmethod
    def from_features(cls, features: Tensor | np.ndarray) -> FeatureStatistics:
        """Statistics of (N, D) features, N ≥ 2."""
        accumulator = StatisticsAccumulator()
        accumulator.add(torch.as_tensor(features))
        return accumulator.finish()


class StatisticsAccumulator:
    """Mean and covariance factor of features that arrive in batches, in float64 and in memory O(D²).

    Each group of rows is centred on its own mean, joined to the factor so far together with one row for the distance of
    the two means (Chan, Golub & LeVeque 1979), and reduced again by a QR decomposition.
    """

    def __init__(self) -> None:
        self._pending: list[Tensor] = []
        self._pending_rows = 0
        self._count = 0
        self._mean: Tensor | None = None
        self._factor: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """Add a batch (B, D) of any floating dtype; the work is done on its device."""
        features = features.detach().to(double_device(features.device), torch.float64)
        self._pending.append(features)
        self._pending_rows += len(features)
        # One decomposition costs O((rows + D) D²), so rows are collected until they are as many as the features.
        if self._pending_rows >= features.shape[1]:
            self._merge()

    def _merge(self) -> None:
        rows = torch.cat(self._pending)
        self._pending, self._pending_rows = [], 0
        mean, count = rows.mean(0), len(rows)
        parts = [rows - mean]
        if self._count:
            total = self._count + count
            shift = mean - self._mean
            parts += [self._factor, ((self._count * count / total) ** 0.5 * shift)[None]]
            mean, count = self._mean + shift * (count / total), total
        self._factor = torch.linalg.qr(torch.cat(parts), mode="r").R
        self._mean, self._count = mean, count

    def finish(self) -> FeatureStatistics:
        """Return the statistics of everything added.

        Raises:
            UserError: fewer than two vectors were added, or a feature is not finite.
        """
        if self._pending_rows:
            self._merge()
        if self._count < 2:
            raise UserError(f"a covariance needs at least 2 images, got {self._count}")
        if not self._mean.isfinite().all():
            raise UserError("the features hold values that are not finite")
        return FeatureStatistics(self._mean.cpu(), self._factor.cpu() / (self._count - 1) ** 0.5, self._count)


def double_device(device: str | torch.device) -> torch.device:
    """The device, or the CPU where it has no float64 (Apple's GPUs)."""
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def frechet_distance(first: FeatureStatistics, second: FeatureStatistics) -> float:
    """Fréchet distance ‖μ₁−μ₂‖² + tr(Σ₁ + Σ₂ − 2 √(Σ₁Σ₂)) in float64 (Heusel et al. 2017, equation 6).

    Raises:
        UserError: the two have different numbers of features.
    """
    if first.mean.shape != second.mean.shape:
        raise UserError(
            f"the two sets of statistics have {len(first.mean)} and {len(second.mean)} features; "
            "they must come from the same feature network"
        )
    shift = first.mean - second.mean
    root_trace = torch.linalg.svdvals(first.factor @ second.factor.T).sum()
    distance = shift @ shift + first.factor.square().sum() + second.factor.square().sum() - 2 * root_trace
    return max(distance.item(), 0.0)


def precision_recall(
    generated: Tensor, reference: Tensor, neighbours: int = 3, chunk: int = 2048, device: str | torch.device = "cpu"
) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al. 2019), with the neighbourhood of 3 that ADM reports.

    A generated vector counts as precise if it lies in the ball of some reference vector that reaches to that vector's
    `neighbours`-th nearest reference vector; recall is the same with the roles exchanged. Distances are computed in
    float64, `chunk` rows at a time: memory O(chunk · N).

    Args:
        generated: (N, D).
        reference: (M, D).

    Returns:
        precision and recall, each in [0, 1].
    """
    smallest = min(len(generated), len(reference))
    if smallest <= neighbours:
        raise UserError(f"precision and recall need more than {neighbours} images on each side, got {smallest}")
    device = double_device(device)
    generated, reference = generated.to(device, torch.float64), reference.to(device, torch.float64)

    def radii(vectors: Tensor) -> Tensor:
        # The nearest vector to each is itself, at rank 1.
        return torch.cat(
            [torch.cdist(part, vectors).kthvalue(neighbours + 1, dim=1).values for part in vectors.split(chunk)]
        )

    def inside(vectors: Tensor, centres: Tensor) -> float:
        radius = radii(centres)
        hits = [(torch.cdist(part, centres) <= radius).any(dim=1) for part in vectors.split(chunk)]
        return torch.cat(hits).double().mean().item()

    return inside(generated, reference), inside(reference, generated)


def kernel_distance(
    generated: Tensor,
    reference: Tensor,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 2020,
    device: str | torch.device = "cpu",
) -> tuple[float, float]:
    """Kernel distance (Bińkowski et al. 2018): mean and standard deviation over random subsets, in float64.

    The unbiased estimate of the squared maximum mean discrepancy with the kernel (x·y/D + 1)³. The subsets are the same
    as torch-fidelity's, and so are the values; they shrink to the smaller of the two sets.

    Args:
        generated: (N, D).
        reference: (M, D).

    Raises:
        UserError: fewer than two vectors on a side.
    """
    size = min(subset_size, len(generated), len(reference))
    if size < 2:
        raise UserError(f"KID needs at least 2 images on each side, got {size}")
    device = double_device(device)
    generated, reference = generated.to(device, torch.float64), reference.to(device, torch.float64)
    if size == len(generated) == len(reference):
        subsets = 1  # each subset would be everything

    def kernel_sum(x: Tensor, y: Tensor) -> Tensor:
        values = (x @ y.T).div_(x.shape[1]).add_(1).flatten()
        return values.dot(values.square())

    def kernel_trace(x: Tensor) -> Tensor:
        return (x.square().mean(1) + 1).pow(3).sum()

    random = np.random.RandomState(seed)
    estimates = []
    for _ in range(subsets):
        x = generated[random.choice(len(generated), size, replace=False)]
        y = reference[random.choice(len(reference), size, replace=False)]
        within = kernel_sum(x, x) - kernel_trace(x) + kernel_sum(y, y) - kernel_trace(y)
        estimates.append((within / (size * (size - 1)) - 2 * kernel_sum(x, y) / size**2).item())
    return float(np.mean(estimates)), float(np.std(estimates))
