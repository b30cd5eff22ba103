"""VBench's sixteen dimensions, and how their scores become a quality, a semantic and a total score.

The ranges, weights and the formula are those of VBench's own leaderboard script (Vchitect/VBench,
`scripts/constant.py` and `scripts/cal_final_score.py`): each dimension is brought to (score − low) / (high − low), not
clipped; quality and semantic score are weighted means over their dimensions, the total is
(4 · quality + 1 · semantic) / 5. That script takes a missing dimension for a score of 0; here it is named instead, and
what depends on it is not given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, nearest

QUALITY_WEIGHT, SEMANTIC_WEIGHT = 4, 1


@dataclass(frozen=True)
class Dimension:
    """One of VBench's dimensions.

    Attributes:
        name: as VBench's functions spell it, with underscores.
        part: "quality" or "semantic", the score that it belongs to.
        low, high: the empirical range that its score is normalised by.
        weight: in the mean of its part.
        prompts: the file of VBench's `prompts/prompts_per_dimension`, without suffix, that its videos are made from.
    """

    name: str
    part: str
    low: float
    high: float
    weight: float
    prompts: str

    @property
    def title(self) -> str:
        """The name for readers, with spaces."""
        return self.name.replace("_", " ")

    def normalised(self, score: float) -> float:
        """The score relative to the dimension's range; 0 and 1 are its ends, not limits."""
        return (score - self.low) / (self.high - self.low)


DIMENSIONS = {
    dimension.name: dimension
    for dimension in (
        Dimension("subject_consistency", "quality", 0.1462, 1.0, 1, "subject_consistency"),
        Dimension("background_consistency", "quality", 0.2615, 1.0, 1, "scene"),
        Dimension("temporal_flickering", "quality", 0.6293, 1.0, 1, "temporal_flickering"),
        Dimension("motion_smoothness", "quality", 0.706, 0.9975, 1, "subject_consistency"),
        Dimension("dynamic_degree", "quality", 0.0, 1.0, 0.5, "subject_consistency"),
        Dimension("aesthetic_quality", "quality", 0.0, 1.0, 1, "overall_consistency"),
        Dimension("imaging_quality", "quality", 0.0, 1.0, 1, "overall_consistency"),
        Dimension("object_class", "semantic", 0.0, 1.0, 1, "object_class"),
        Dimension("multiple_objects", "semantic", 0.0, 1.0, 1, "multiple_objects"),
        Dimension("human_action", "semantic", 0.0, 1.0, 1, "human_action"),
        Dimension("color", "semantic", 0.0, 1.0, 1, "color"),
        Dimension("spatial_relationship", "semantic", 0.0, 1.0, 1, "spatial_relationship"),
        Dimension("scene", "semantic", 0.0, 0.8222, 1, "scene"),
        Dimension("appearance_style", "semantic", 0.0009, 0.2855, 1, "appearance_style"),
        Dimension("temporal_style", "semantic", 0.0, 0.364, 1, "temporal_style"),
        Dimension("overall_consistency", "semantic", 0.0, 0.364, 1, "overall_consistency"),
    )
}


def dimension_named(name: str) -> Dimension:
    """The dimension called `name`, spelt with underscores or spaces, in any case.

    Raises:
        UserError: there is none.
    """
    key = str(name).strip().lower().replace(" ", "_").replace("-", "_")
    if key not in DIMENSIONS:
        raise UserError(
            f"{name!r} is not a dimension of VBench{nearest(key, DIMENSIONS)}; they are {', '.join(DIMENSIONS)}"
        )
    return DIMENSIONS[key]


def total_scores(scores: Mapping[str, float]) -> dict[str, Any]:
    """Quality, semantic and total score from the scores of the dimensions.

    Args:
        scores: dimension → its score as VBench's evaluation gives it, a fraction from 0 to 1.

    Returns:
        `quality`, `semantic`, `total` (fractions; None where a dimension that it needs is missing), `missing` (names),
        and `dimensions`: for each one given `score`, `normalised`, `weight` and `part`. All of it fits into JSON.

    Raises:
        UserError: an unknown dimension, one given twice, or a value that is not a fraction.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, score in scores.items():
        dimension = dimension_named(name)
        if dimension.name in found:
            raise UserError(f"dimension {dimension.name!r} is given twice, the second time as {name!r}")
        score = checked_score(dimension.name, score)
        found[dimension.name] = {
            "score": score,
            "normalised": dimension.normalised(score),
            "weight": dimension.weight,
            "part": dimension.part,
        }
    result: dict[str, Any] = {part: _weighted_mean(found, part) for part in ("quality", "semantic")}
    complete = len(found) == len(DIMENSIONS)
    total = None
    if complete:
        weights = QUALITY_WEIGHT, SEMANTIC_WEIGHT
        total = (weights[0] * result["quality"] + weights[1] * result["semantic"]) / sum(weights)
    return result | {
        "total": total,
        "missing": [name for name in DIMENSIONS if name not in found],
        "dimensions": {name: found[name] for name in DIMENSIONS if name in found},
    }


def checked_score(name: str, score: Any) -> float:
    """`score` as a float, or a `UserError` that says why it cannot be the score of dimension `name`."""
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise UserError(f"the score of {name} is {score!r}; a number from 0 to 1 is accepted")
    if not 0 <= score <= 1:
        hint = "; percentages are to be divided by 100" if 1 < score <= 100 else ""
        raise UserError(f"the score of {name} is {score:g}; VBench's scores are fractions from 0 to 1{hint}")
    return float(score)


def format_totals(result: Mapping[str, Any]) -> str:
    """The result of `total_scores` as a table, in per cent."""
    lines = [f"{'dimension':<24}{'score':>9}{'normalised':>12}{'weight':>8}"]
    for part in ("quality", "semantic"):
        for name, entry in result["dimensions"].items():
            if entry["part"] == part:
                lines.append(
                    f"{DIMENSIONS[name].title:<24}{100 * entry['score']:>8.2f}%{100 * entry['normalised']:>11.2f}%"
                    f"{entry['weight']:>8g}"
                )
        lines.append(f"{part + ' score':<24}{_percent(result[part]):>9}")
    lines.append(f"{'total score':<24}{_percent(result['total']):>9}")
    if result["missing"]:
        lines.append(f"missing, so that there is no total: {', '.join(result['missing'])}")
    return "\n".join(lines)


def _weighted_mean(found: Mapping[str, Mapping[str, Any]], part: str) -> float | None:
    needed = [dimension for dimension in DIMENSIONS.values() if dimension.part == part]
    if any(dimension.name not in found for dimension in needed):
        return None
    weighted = math.fsum(dimension.weight * found[dimension.name]["normalised"] for dimension in needed)
    return weighted / sum(dimension.weight for dimension in needed)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}%"
