"""Scores of generated images."""

from .features import FeatureNetwork, load_feature_network
from .fid import (
    ImageStatistics,
    compute_statistics,
    evaluate_images,
    fid_from_statistics,
    format_table,
)
from .statistics import FeatureStatistics, frechet_distance, precision_recall

__all__ = [
    "FeatureNetwork",
    "FeatureStatistics",
    "ImageStatistics",
    "compute_statistics",
    "evaluate_images",
    "fid_from_statistics",
    "format_table",
    "frechet_distance",
    "load_feature_network",
    "precision_recall",
]
