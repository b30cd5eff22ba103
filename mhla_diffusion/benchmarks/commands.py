"""The benchmark's commands: measure what is not measured yet, then say and draw what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ..devices import usable_device
from ..errors import UserError, check_writable, nearest
from . import models, operators
from .figures import plot_candidates, plot_scaling
from .jobs import check_seconds, plan, run_jobs
from .models import ModelCase
from .operators import OperatorCase
from .report import candidate_table, case_table, crossover_line, growth_line, header_line
from .results import Case, Results, machine
from .scaling import block_cases, faster_from, growth, model_cases, series, token_cases, too_long


def compare(
    cases: Sequence[Case],
    settings: Mapping[str, Any],
    variants: Sequence[str] = (),
    backends: Sequence[str] = (),
    repeats: int = 5,
    budget: float = float("inf"),
    memory: bool = True,
    profile: bool = False,
    once: bool = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> str:
    """Measure the candidates of every case side by side.

    Args:
        settings: what was asked for, for the header of the JSON file.
        variants: candidates by name; none means all.
        backends: of MHLA's operator, each a candidate; none means the one that is chosen by itself.
        repeats, budget: see `measure.interleaved`.
        memory: also measure each candidate's memory in a process of its own.
        profile: also measure the share of attention in a forward pass of a model.
        once: call each candidate a single time, in a process of its own, for both time and memory.
        json: a file of JSON lines to keep the measurements in, and to go on from.
        plot: a PNG with the times.

    Returns:
        The machine and the measurements as text.
    """
    if once and any(isinstance(case, ModelCase) and case.step for case in cases):
        raise UserError("once is for forward passes: the first training step has no optimiser state yet.")
    if once and (profile or not memory):
        raise UserError("once measures time and memory and nothing else; it takes neither profile nor memory=False.")
    results = _open(cases[0].device, settings, json, plot)
    names = {id(case): choose(variants, all_candidates(case, backends), case) for case in cases}
    jobs = plan(cases, lambda case: names[id(case)], repeats, budget, memory, profile, once)
    run_jobs(jobs, results)
    if plot is not None:
        plot_candidates(results, cases, lambda case: names[id(case)], plot)
    text = [header_line(results.header["machine"])]
    text += [candidate_table(results, case, names[id(case)]) for case in cases]
    if len(cases) > 1:
        shown = list(dict.fromkeys(name for case in cases for name in names[id(case)]))
        text.append(case_table(results, cases, shown))
        text += [case_table(results, cases, shown, "memory")] * memory
    return "\n\n".join(text)


def scaling(
    operator: OperatorCase,
    model: ModelCase | None,
    settings: Mapping[str, Any],
    over: Sequence[str] = ("tokens", "blocks", "model"),
    sides: Sequence[int] = (16, 32, 64, 128, 256),
    block_counts: Sequence[int] = (1, 2, 4, 8, 16),
    model_sizes: Sequence[int] = (128, 256, 512, 1024),
    repeats: int = 5,
    budget: float = float("inf"),
    max_seconds: float = 60.0,
    memory: bool = True,
    json: Path | None = None,
    plot: Path | None = None,
) -> str:
    """Measure growth over tokens, over blocks and of a whole model, and find where MHLA becomes the faster one.

    Args:
        operator: its `blocks` and other fields hold for the series over tokens, its `grid` for that over blocks.
        model: its fields but the size hold for the series of the whole model.
        over: which series.
        sides: of the square token grids.
        block_counts: n of n × n blocks.
        model_sizes: of the images, in pixels.
        max_seconds: a candidate is left out where a call would take longer.
        (The others as for `compare`.)
    """
    check_seconds("max_seconds", max_seconds)
    results = _open(operator.device, settings, json, plot)
    panels: dict[str, tuple[Sequence[Case], list[str]]] = {}
    if "tokens" in over:
        panels["tokens"] = (token_cases(sides, operator), ["mhla", "linear", "sana-core", "sdpa"])
    if "blocks" in over:
        panels["blocks"] = (block_cases(block_counts, operator), ["mhla", "linear"])
    if "model" in over and model is not None:
        panels["model"] = (model_cases(model_sizes, model), [model.own_attention, "linear", "mhla"])
    for cases, variants in panels.values():
        jobs = plan(cases, lambda case, variants=variants: variants, repeats, budget, memory)
        run_jobs(jobs, results, too_long(results, cases, max_seconds))

    text, found, exponents = [header_line(results.header["machine"])], {}, {}
    for panel, (cases, variants) in panels.items():
        text.append(case_table(results, cases, variants))
        text += [case_table(results, cases, variants, "memory")] * memory
        if panel == "blocks":
            continue
        what = "operator" if panel == "tokens" else cases[0].preset
        lines = []
        for measure in ("time", "memory"):
            for variant in variants:
                fitted = growth(series(results, cases, variant, measure), measure)
                lines.append(growth_line(f"{what}, {measure}", variant, fitted))
                if fitted is not None:
                    exponents[f"{panel}/{measure}/{variant}"] = fitted.exponent
        for other in variants:
            if other in ("sdpa", "softmax", "stock", "sana-core"):
                crossing = faster_from(results, cases, "mhla", other)
                lines.append(crossover_line(what, "mhla", other, operator.device, crossing))
                if crossing is not None and other in ("sdpa", "softmax"):
                    found[panel] = crossing
        text.append("\n".join(f"- {line}" for line in lines if line))
    if plot is not None:
        plot_scaling(results, panels, found, plot)
    results.conclude({"exponents": exponents, "faster": {panel: str(crossing) for panel, crossing in found.items()}})
    return "\n\n".join(text)


def all_candidates(case: Case, backends: Sequence[str] = ()) -> list[str]:
    """The names of everything that a case can be measured with."""
    return operators.candidates(case, backends) if isinstance(case, OperatorCase) else models.candidates(case)


def choose(variants: Sequence[str], known: Sequence[str], case: Case) -> tuple[str, ...]:
    """`variants`, or all known ones; `UserError` for one that a case does not have."""
    for name in variants:
        if name not in known:
            raise UserError(
                f"variants: {name!r} is unknown for {case.label}{nearest(name, known)}; known: {', '.join(known)}."
            )
    return tuple(variants or known)


def _open(device: str, settings: Mapping[str, Any], json: Path | None, plot: Path | None) -> Results:
    usable_device(device)
    if plot is not None:
        check_writable("plot", plot)
        if json is not None and plot.resolve() == json.resolve():
            raise UserError(f"json and plot are both {str(plot)!r}; name two files.")
    results = Results({"machine": machine(device), "settings": dict(settings)}, json)
    if results.found:
        print(f"{results.found} measurements are in {json} already and are not repeated")
    return results


def run_command(command: str, options: Mapping[str, Any]) -> str:
    """What scripts/benchmark.py does: `command` is operator, block, model or scaling, `options` its options by name."""
    settings = {"command": command, **{k: v for k, v in options.items() if k not in ("json", "plot")}}
    shared = {name: options[name] for name in ("repeats", "budget", "memory", "json", "plot")}

    def operator_case(**fields: Any) -> OperatorCase:
        names = ("grid", "blocks", "heads", "head_dim", "mixing", "batch", "dtype", "device", "backward")
        return OperatorCase(**{**{name: options[name] for name in names}, **fields})

    def model_case(**fields: Any) -> ModelCase:
        names = ("preset", "step", "batch", "dtype", "device")
        given = {"mhla": _key_values("mhla", options["mhla"]), "overrides": _key_values("set", options["set"])}
        return ModelCase(**{**{name: options[name] for name in names}, **given, **fields})

    if command == "scaling":
        series_options = {
            name: options[name] for name in ("over", "sides", "block_counts", "model_sizes", "max_seconds")
        }
        model = model_case(size=options["model_sizes"][:1]) if "model" in options["over"] else None
        return scaling(operator_case(), model, settings, **series_options, **shared)
    shared["variants"] = options["variants"]
    if command == "operator":
        cases = [operator_case(**fields) for fields in (operators.STANDARD_CASES if options["standard"] else ({},))]
        return compare(cases, settings, backends=options["backend"], **shared)
    fields = {"scope": command, "size": options["size"], "mixed_precision": options["mixed_precision"]}
    fields["gradient_checkpointing"] = options.get("gradient_checkpointing", False)
    return compare([model_case(**fields)], settings, profile=options["profile"], once=options["once"], **shared)


def _key_values(name: str, pairs: Sequence[str]) -> dict[str, Any]:
    """key=value pairs, values as in YAML."""
    bad = [pair for pair in pairs if "=" not in pair]
    if bad:
        raise UserError(f"{name}: {bad[0]!r} must be of the form key=value.")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(list(pairs)))
    except yaml.YAMLError as error:
        raise UserError(f"{name}: {' '.join(pairs)} is not YAML: {' '.join(str(error).split())}") from None
