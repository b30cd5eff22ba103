"""Measurements as text: Markdown tables, and sentences on growth and crossover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .measure import quartiles
from .operators import FLOORS, OperatorCase, gemm_size
from .results import Case, Measured, Results
from .scaling import Crossover, Growth

MIB, GIB = 2**20, 2**30


def header_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also aligned as text; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return f"| {' | '.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])} |"

    rule = f"| {' | '.join('-' * (w - 1) + (':' if i else '-') for i, w in enumerate(widths))} |"
    return "\n".join([line(columns), rule, *map(line, rows)])


def candidate_table(results: Results, case: Case, variants: Sequence[str]) -> str:
    """One case in detail: a row per candidate with its time, spread, relation to MHLA and memory."""
    entries = [results.of(case, variant) for variant in variants]
    reference = next((e.median for e in entries if e.variant.startswith("mhla") and e.median), None)
    has_weights = any(e.memory and e.memory["weights"] for e in entries)
    has_profile = any(e.profile for e in entries)
    unit = time_unit(entries)
    columns = ["attention", f"median {unit}", "25–75 %", "calls", "× MHLA"]
    columns += ["weights GiB", "call GiB", "peak GiB"] if has_weights else ["extra MiB"]
    columns += ["attention layers", "without projections"] if has_profile else []
    rows = []
    for entry in entries:
        row = [entry.variant, *time_cells(entry, unit), str(len(entry.seconds))]
        row.append(f"{entry.median / reference:.2f}" if reference and entry.median else "")
        if has_weights:
            row += [memory_cell(entry, name, GIB, "{:.2f}") for name in ("weights", "call", "peak")]
        else:
            row.append(memory_cell(entry, "call", MIB, "{:.0f}"))
        if has_profile:
            shares = entry.profile or {}
            row += [f"{shares[n] / shares['total']:.1%}" if shares else "" for n in ("attention", "core")]
        rows.append(row)
    lines = [f"{case.label}:", "", markdown(columns, rows)]
    efficiency = efficiency_line(results, case, variants)
    return "\n".join(lines + (["", efficiency] if efficiency else []))


def case_table(results: Results, cases: Sequence[Case], variants: Sequence[str], measure: str = "time") -> str:
    """Several cases: a row per case, a column per candidate with its median time or the memory of a call."""
    variants = [v for v in variants if v not in FLOORS]
    entries = [results.of(case, variant) for case in cases for variant in variants]
    unit = time_unit(entries) if measure == "time" else "MiB"
    rows = []
    for case in cases:
        cells = []
        for variant in variants:
            entry = results.of(case, variant)
            if measure == "time":
                cells.append(time_cells(entry, unit)[0])
            else:
                cells.append(memory_cell(entry, "call", MIB, "{:.0f}"))
        rows.append([case.label, *cells])
    title = f"median {unit}" if measure == "time" else "memory of a call, MiB"
    return markdown([title, *variants], rows)


def time_unit(entries: Sequence[Measured]) -> str:
    """Milliseconds unless everything takes a second or more."""
    return "s" if all(e.median is None or e.median >= 1 for e in entries) else "ms"


def time_cells(entry: Measured, unit: str) -> tuple[str, str]:
    """The median and the quartiles, or why there are none."""
    if not entry.seconds:
        return entry.problems.get("time", "not measured"), ""
    scale = 1e3 if unit == "ms" else 1
    low, median, high = (_digits(value * scale) for value in quartiles(entry.seconds))
    ended = f", then {entry.problems['time']}" if "time" in entry.problems else ""
    return median + ended, f"{low}–{high}"


def memory_cell(entry: Measured, name: str, unit: int, form: str) -> str:
    if entry.memory is None:
        return entry.problems.get("memory", "" if entry.variant in FLOORS else "not measured")
    return form.format(entry.memory[name] / unit)


def efficiency_line(results: Results, case: Case, variants: Sequence[str]) -> str | None:
    """MHLA's rate beside what the machine does at best, where both were measured."""
    if not isinstance(case, OperatorCase) or case.backward:
        return None
    gemm, copy = (results.of(case, name).median for name in ("gemm", "copy"))
    parts = []
    for variant in variants:
        median = results.of(case, variant).median
        if not variant.startswith("mhla") or median is None or gemm is None or copy is None:
            continue
        best = 2 * gemm_size(case.device) ** 3 / gemm
        rate = case.flops / median
        parts.append(
            f"{variant}: {rate / 1e9:,.0f} GFLOP/s, {rate / best:.0%} of the {best / 1e9:,.0f} GFLOP/s of a large "
            f"matrix product; {median / copy:.1f}× the time of copying as many bytes as it reads and writes."
        )
    return "\n".join(parts) or None


def growth_line(what: str, variant: str, found: Growth | None) -> str | None:
    """ "time of mhla: N^1.02 ± 0.01" """
    if found is None:
        return None
    spread = f" ± {found.error:.2f}" if found.points > 2 else ""
    return f"{what} of {variant}: N^{found.exponent:.2f}{spread} ({found.points} sizes)"


def crossover_line(what: str, variant: str, other: str, device: str, found: Crossover | None) -> str | None:
    """ "operator on cpu: mhla is faster than sdpa from 210 tokens on" """
    return None if found is None else f"{what} on {device}: {variant} is faster than {other} {found}"


def _digits(value: float) -> str:
    """About three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
