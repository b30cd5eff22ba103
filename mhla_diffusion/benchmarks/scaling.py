"""How time and memory grow with the number of tokens and of blocks, and from where on MHLA is the faster one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from .models import ModelCase
from .operators import OperatorCase
from .results import Case, Measured, Results


@dataclass(frozen=True)
class Growth:
    """A power law fitted to points: y ≈ factor · x^exponent."""

    exponent: float
    factor: float
    error: float  # standard error of the exponent, infinite for two points
    points: int


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> Growth | None:
    """Least squares of log y over log x; None for fewer than two different x."""
    if len(set(x)) < 2:
        return None
    log_x, log_y = np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float))
    centred = log_x - log_x.mean()
    exponent = float(centred @ log_y / (centred @ centred))
    intercept = float(log_y.mean() - exponent * log_x.mean())
    residual = log_y - intercept - exponent * log_x
    freedom = len(x) - 2
    error = math.sqrt(residual @ residual / freedom / (centred @ centred)) if freedom else math.inf
    return Growth(exponent, math.exp(intercept), error, len(x))


@dataclass(frozen=True)
class Crossover:
    """From which x on one candidate is faster than another, at all larger x that were measured."""

    at: float | None  # interpolated; None where it is always or never the faster one
    always: bool = False  # at every measured x, so that it lies at or below the smallest
    smallest: float = 0  # the range that was measured
    largest: float = 0

    def __str__(self) -> str:
        if self.always:
            return f"at all measured sizes, {self.smallest:,.0f} to {self.largest:,.0f} tokens"
        if self.at is None:
            return f"at no measured size up to {self.largest:,.0f} tokens"
        return f"from {_two_digits(self.at):,.0f} tokens on"


def crossover(x: Sequence[float], mine: Sequence[float], other: Sequence[float]) -> Crossover | None:
    """Where `mine` becomes and stays smaller than `other`, both measured at the same x; None without measurements.

    Between the two neighbouring sizes the ratio of the times is taken as a power law.
    """
    rows = sorted(zip(x, mine, other, strict=True))
    if not rows:
        return None
    ratios = [math.log(a / b) for _, a, b in rows]  # below 0: mine is faster
    sizes = [row[0] for row in rows]
    losing = [i for i, ratio in enumerate(ratios) if ratio >= 0]
    if not losing:
        return Crossover(None, True, sizes[0], sizes[-1])
    last = losing[-1]
    if last == len(rows) - 1:
        return Crossover(None, False, sizes[0], sizes[-1])
    share = ratios[last] / (ratios[last] - ratios[last + 1])
    at = math.exp(math.log(sizes[last]) + share * (math.log(sizes[last + 1]) - math.log(sizes[last])))
    return Crossover(at, False, sizes[0], sizes[-1])


# The cases ----------------------------------------------------------------------------------------------------------


def token_cases(sides: Sequence[int], base: OperatorCase) -> list[OperatorCase]:
    """Square grids with the other fields of `base`, in rising size."""
    _check_sides("sides", sides)
    return [dataclasses.replace(base, grid=(side, side)) for side in sorted(set(sides))]


def block_cases(counts: Sequence[int], base: OperatorCase) -> list[OperatorCase]:
    """The grid of `base` in n × n blocks, in rising number."""
    _check_sides("block_counts", counts)
    return [dataclasses.replace(base, blocks=(count, count)) for count in sorted(set(counts))]


def model_cases(sizes: Sequence[int], base: ModelCase) -> list[ModelCase]:
    """Square images of these sizes with the other fields of `base`, in rising size."""
    _check_sides("model_sizes", sizes)
    return [dataclasses.replace(base, size=(size,)) for size in sorted(set(sizes))]


def too_long(results: Results, cases: Sequence[Case], most: float) -> Callable[[Case, str], str | None]:
    """For `run_jobs`: leave a candidate out of a case that would take more than `most` seconds a call.

    That is judged from the next smaller case of the series, taking the time to grow on as it did before that, and at
    least with the number of tokens.
    """

    def reason(case: Case, variant: str) -> str | None:
        if case not in cases or cases.index(case) == 0:
            return None
        smaller = [results.of(other, variant) for other in cases[: cases.index(case)]]
        problems = smaller[-1].problems
        if problems:
            return problems.get("time") or problems.get("memory")
        if smaller[-1].median is None:
            return None
        points = [(entry.case.num_tokens, entry.median) for entry in smaller[-2:] if entry.median is not None]
        grown = fit_exponent(*zip(*points, strict=True))
        exponent = 1.0 if grown is None else max(grown.exponent, 1.0)
        expected = smaller[-1].median * (case.num_tokens / points[-1][0]) ** exponent
        return f"left out: more than {most:g} s a call" if expected > most else None

    return reason


# What is read off the measurements ----------------------------------------------------------------------------------


def series(results: Results, cases: Sequence[Case], variant: str, measure: str = "time") -> list[Measured]:
    """The entries of one candidate where it has the measure, in the order of `cases`."""
    entries = [results.of(case, variant) for case in cases]
    return [entry for entry in entries if (entry.seconds if measure == "time" else entry.memory)]


def growth(entries: Sequence[Measured], measure: str = "time") -> Growth | None:
    """Of time or of a call's memory over the number of tokens, where M² ≤ N."""
    fitting = [e for e in entries if _blocks_are_few(e.case)]
    y = [e.median if measure == "time" else e.memory["call"] for e in fitting]
    positive = [(e.case.num_tokens, value) for e, value in zip(fitting, y, strict=True) if value > 0]
    return fit_exponent([x for x, _ in positive], [value for _, value in positive])


def faster_from(results: Results, cases: Sequence[Case], variant: str, other: str) -> Crossover | None:
    """The crossover in the number of tokens from which `variant` is faster than `other`."""
    both = [
        (case.num_tokens, a, b)
        for case in cases
        if (a := results.of(case, variant).median) is not None and (b := results.of(case, other).median) is not None
    ]
    return crossover(*map(list, zip(*both, strict=True))) if both else None


def _blocks_are_few(case: Case) -> bool:
    return not isinstance(case, OperatorCase) or case.num_blocks**2 <= case.num_tokens


def _check_sides(name: str, sides: Sequence[int]) -> None:
    if not sides or any(side < 1 for side in sides):
        raise UserError(f"{name}={list(sides)} must be one or more positive integers.")


def _two_digits(x: float) -> float:
    return round(x, 1 - math.floor(math.log10(x)))
