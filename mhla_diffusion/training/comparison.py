"""Ways to retrofit one softmax model, compared on real data: every choice with every seed, within the same steps."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..processor import MHLAConfig
from .config import TrainConfig, config_from_dict, config_to_dict, config_to_yaml, read_yaml
from .loop import finetune
from .metrics import read_metrics
from .validation import held_out_loss


@dataclass(frozen=True)
class Retrofit:
    """One way to put MHLA into a softmax model."""

    feature_map: str = "relu"
    cpe: bool = False
    gate: bool = False
    blocks: tuple[int, ...] = (4, 4)
    mixing: str = "full"
    align_steps: int = 0
    # None: the family's
    locality: float | None = None  # of the first mixing
    normalize: bool | None = None
    head_norm: bool | None = None
    rope: str | None = None  # "after" or "before" the feature map

    @property
    def name(self) -> str:
        """Such as "hedgehog, CPE, 4×4 full, aligned 50"."""
        parts = [self.feature_map, *(["CPE"] if self.cpe else []), *(["gate"] if self.gate else [])]
        parts.append(f"{'×'.join(map(str, self.blocks))} {self.mixing}")
        parts += [] if self.locality is None else [f"locality {self.locality:g}"]
        parts += [] if self.normalize is None else ["normalized" if self.normalize else "not normalized"]
        parts += [] if self.head_norm is None else ["head norm" if self.head_norm else "no head norm"]
        parts += [] if self.rope is None else [f"rope {self.rope}"]
        return ", ".join([*parts, f"aligned {self.align_steps}"] if self.align_steps else parts)


def grid(**values: Sequence[Any]) -> list[Retrofit]:
    """All combinations of the given values of `Retrofit`'s fields."""
    return [Retrofit(**dict(zip(values, row, strict=True))) for row in itertools.product(*values.values())]


def compare_retrofits(
    choices: Iterable[Retrofit],
    seeds: Sequence[int],
    config: TrainConfig,
    out: Path,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Retrofit and train `config.model.pretrained` in every way with every seed; all rows of OUT/results.jsonl.

    `config.train.steps` are the steps of a cell in all: those of the alignment count like those of fine-tuning, which
    gets what they leave. A cell that OUT/results.jsonl has is not run again, and one that was interrupted goes on, so
    that grids can grow. A row holds the choice, the seed, the "curve" of (step, held-out loss), the last "loss", the
    "teacher_loss" and "steps_to_teacher", the first validated step that is not above it (None: never).

    Raises:
        UserError: when `out` holds a comparison of another config, or a choice leaves no steps to fine-tune.
    """
    if not config.model.pretrained or not config.data.validation or not config.validation.every:
        raise UserError("model.pretrained, data.validation and validation.every must be set to compare retrofits")
    cells = []
    for seed, choice in itertools.product(seeds, choices):  # what is there early compares all choices
        if choice.align_steps >= config.train.steps:
            raise UserError(
                f"align_steps is {choice.align_steps}, which leaves nothing of train.steps={config.train.steps} to "
                "fine-tune; fewer are accepted"
            )
        place = out / "cells" / f"{choice.name.replace(' ', '_')}-seed{seed}"
        cells.append((choice, seed, cell_config(config, choice, seed, place)))
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, config)
    rows = read_results(out)
    teacher_loss = rows[0]["teacher_loss"] if rows else held_out_loss(config, config.model.pretrained)["loss"]
    done = {(row["name"], row["seed"]) for row in rows}
    for number, (choice, seed, cell) in enumerate(cells, 1):
        if (choice.name, seed) in done:
            continue
        start, place = time.perf_counter(), Path(cell.output_dir)
        result = finetune(cell, resume="latest")
        if result.stopped_by:
            raise UserError(
                f"stopped by {result.stopped_by} in cell {number} of {len(cells)}; the same command goes on"
            )
        curve = [
            (choice.align_steps + row["step"], row["validation/loss"])
            for row in read_metrics(place / "metrics.jsonl")
            if "validation/loss" in row
        ]
        row = {
            "name": choice.name,
            **dataclasses.asdict(choice),
            "seed": seed,
            "loss": curve[-1][1],
            "teacher_loss": teacher_loss,
            "steps_to_teacher": next((step for step, loss in curve if loss <= teacher_loss), None),
            "seconds": round(time.perf_counter() - start, 1),
            "curve": curve,
        }
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        for part in ("checkpoints", "pipeline"):  # what is compared is in the row
            shutil.rmtree(place / part)
        say(f"{number}/{len(cells)} {choice.name}, seed {seed}: {row['loss']:.4f} (teacher {teacher_loss:.4f})")
    return read_results(out)


def cell_config(config: TrainConfig, choice: Retrofit, seed: int, place: Path) -> TrainConfig:
    """The run of one choice with one seed; raises `UserError` for a choice that no MHLAConfig can have."""
    fields = {name: value for name, value in dataclasses.asdict(choice).items() if value is not None}
    del fields["align_steps"]
    train = {"seed": seed, "align_steps": choice.align_steps, "steps": config.train.steps - choice.align_steps}
    cell = config_from_dict(
        config_to_dict(config),
        {"output_dir": str(place), "model": {"mhla": {**fields, "blocks": list(choice.blocks)}}, "train": train},
    )
    MHLAConfig.from_dict(cell.model.mhla)
    return cell


def read_results(out: Path) -> list[dict[str, Any]]:
    """The rows of OUT/results.jsonl; none where there is no such file."""
    path = out / "results.jsonl"
    return read_metrics(path) if path.exists() else []


def by_choice(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of one choice together, the choice with the least median loss first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: statistics.median(row["loss"] for row in item[1])))


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: median and range over seeds of the last held-out loss, and the steps until it was the teacher's."""
    lines = [
        "| retrofit | seeds | loss: median (range) | steps to the teacher's loss: median (reached by) |",
        "| --- | --- | --- | --- |",
    ]
    for name, group in by_choice(rows).items():
        losses = [row["loss"] for row in group]
        steps = sorted(row["steps_to_teacher"] or float("inf") for row in group)
        middle = statistics.median_high(steps)
        reached = sum(step < float("inf") for step in steps)
        lines.append(
            f"| {name} | {len(group)} | {statistics.median(losses):.4f} ({min(losses):.4f}–{max(losses):.4f}) "
            f"| {middle if middle < float('inf') else '–'} ({reached} of {len(group)}) |"
        )
    return "\n".join([*lines, "", f"The teacher's loss is {rows[0]['teacher_loss']:.4f}."])


def _claim(out: Path, config: TrainConfig) -> None:
    """Remember what is compared in `out`, and refuse to mix it with something else."""
    config = dataclasses.replace(config, output_dir=str(out))
    path = out / "config.yaml"
    if path.exists():
        if config_from_dict(read_yaml(path)) != config:
            raise UserError(f"--out {out} holds a comparison with another config; choose a new folder")
    else:
        path.write_text(config_to_yaml(config), encoding="utf-8")
