"""Measurements as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..plots import new_figure, save_figure
from .measure import quartiles
from .report import MIB
from .results import Case, Measured, Results
from .scaling import Crossover, growth, series


def plot_candidates(
    results: Results, cases: Sequence[Case], variants: Callable[[Case], Sequence[str]], out: Path
) -> Path:
    """Median times with their quartiles, one panel per case."""
    heights = [0.9 + 0.32 * len(variants(case)) for case in cases]
    figure, grid = new_figure(8.0, sum(heights), len(cases), squeeze=False, height_ratios=heights)
    for axes, case in zip(grid.flat, cases, strict=True):
        entries = [e for e in (results.of(case, v) for v in variants(case)) if e.seconds and e.variant != "gemm"][::-1]
        spread = [quartiles(e.seconds) for e in entries]
        errors = [[m - low for low, m, _ in spread], [high - m for _, m, high in spread]]
        axes.errorbar([m for _, m, _ in spread], [e.variant for e in entries], xerr=errors, fmt="o", capsize=3)
        axes.margins(y=0.15)
        axes.set_title(case.label, fontsize=9, loc="left")
        axes.set_xscale("log")
        axes.grid(alpha=0.3, axis="x", which="both")
    axes.set_xlabel("seconds per call (median, quartiles)")
    return save_figure(figure, out)


def plot_scaling(
    results: Results,
    panels: Mapping[str, tuple[Sequence[Case], Sequence[str]]],
    crossovers: Mapping[str, Crossover | None],
    out: Path,
) -> Path:
    """Time and memory over tokens or blocks, log-log, with fitted exponents and crossovers.

    Args:
        panels: "tokens", "blocks" or "model" to its cases and candidates.
        crossovers: panel to where MHLA becomes the faster one.
    """
    drawn = [(name, measure) for name in panels for measure in ("time", "memory")]
    drawn = [(n, m) for n, m in drawn if any(series(results, panels[n][0], v, m) for v in panels[n][1])]
    rows = len({name for name, _ in drawn})
    figure, grid = new_figure(11.0, 3.8 * rows, rows, 2, squeeze=False)
    places = {name: row for row, name in enumerate(dict.fromkeys(name for name, _ in drawn))}
    for axes in grid.flat:
        axes.set_visible(False)
    for name, measure in drawn:
        cases, variants = panels[name]
        axes = grid[places[name], int(measure == "memory")]
        axes.set_visible(True)
        for variant in variants:
            _draw_series(axes, name, variant, series(results, cases, variant, measure), measure)
        found = crossovers.get(name)
        if measure == "time" and found is not None and found.at is not None:
            axes.axvline(found.at, color="black", linestyle=":", linewidth=1, label=f"mhla faster {found}")
        axes.set_title(_series_title(name, cases[0]), fontsize=9)
        axes.set_xlabel("blocks M" if name == "blocks" else "tokens N")
        axes.set_ylabel("seconds per call" if measure == "time" else "memory of a call / MiB")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    return save_figure(figure, out)


def _series_title(name: str, first: Case) -> str:
    """What all cases of a series share."""
    if name == "model":
        return f"{first.preset}, {'training step' if first.step else 'forward'}"
    shared = first.blocks if name == "tokens" else first.grid
    what = f"{'×'.join(map(str, shared))} {'blocks' if name == 'tokens' else 'tokens'}"
    return f"operator, {first.heads}×{first.head_dim}, {what}{', with backward' if first.backward else ''}"


def _draw_series(axes, name: str, variant: str, entries: Sequence[Measured], measure: str) -> None:
    if not entries:
        return
    x = [e.case.num_blocks if name == "blocks" else e.case.num_tokens for e in entries]
    label = variant
    if name != "blocks" and (found := growth(entries, measure)) is not None:
        label += f", N^{found.exponent:.2f}"
    if measure == "memory":
        axes.plot(x, [e.memory["call"] / MIB for e in entries], "o-", label=label)
        return
    low, median, high = zip(*(quartiles(e.seconds) for e in entries), strict=True)
    (line,) = axes.plot(x, median, "o-", label=label)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
