"""Pictures of runs and samples."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .errors import UserError
from .training.config import read_yaml
from .training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def read_curve(metrics: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, such as "loss" or "validation/loss", from a run's metrics.jsonl."""
    path = Path(metrics)
    if not path.is_file():
        raise UserError(f"metrics={str(metrics)!r} does not exist; a run's metrics.jsonl is expected.")
    rows = [row for row in read_metrics(path) if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def run_curves(runs: Mapping[str, str | Path]) -> tuple[dict[str, Path], dict[str, int]]:
    """Of training runs' folders by label: their metrics.jsonl, and the step at which each curve begins.

    A run whose `model.pretrained` is the pipeline of another one given begins at that one's last step, others at 0.
    Raises `UserError` for a folder that holds no run.
    """
    metrics = {label: Path(folder) / "metrics.jsonl" for label, folder in runs.items()}
    origins: dict[str, str | None] = {}
    for label, folder in runs.items():
        if not (Path(folder) / "config.yaml").is_file() or not metrics[label].is_file():
            raise UserError(f"--run {label}={folder} holds no run; an output_dir of scripts/finetune.py is expected")
        pretrained = read_yaml(Path(folder) / "config.yaml").get("model", {}).get("pretrained")
        shown = {Path(other).resolve() / "pipeline": name for name, other in runs.items() if name != label}
        origins[label] = shown.get(Path(pretrained).resolve()) if pretrained else None

    def start(label: str | None, seen: tuple[str | None, ...] = ()) -> int:
        origin = None if label in seen else origins[label]
        if origin is None:
            return 0
        return start(origin, (*seen, label)) + max(row["step"] for row in read_metrics(metrics[origin]))

    return metrics, {label: start(label) for label in runs}


def read_samples(folders: Mapping[str, str | Path], count: int) -> tuple[dict[str, list[Image.Image]], list[str]]:
    """The first `count` images of generated folders by label, and the prompts or classes that all of them share.

    Raises `UserError` for a folder with fewer, or whose prompts differ from those of the others.
    """
    if count < 1:
        raise UserError(f"--count {count} must be at least 1")
    rows: dict[str, list[Image.Image]] = {}
    columns: list[str] | None = None
    for label, folder in folders.items():
        conditions = Path(folder) / "labels.jsonl"
        lines = conditions.read_text(encoding="utf-8").split("\n")[:-1] if conditions.is_file() else []
        items = [json.loads(line) for line in lines[:count]]
        if len(items) < count or not all((Path(folder) / item["file"]).is_file() for item in items):
            raise UserError(f"--samples {label}={folder} does not hold {count} images made by scripts/generate.py")
        titles = [textwrap.fill(str(item.get("prompt", item.get("class_labels", ""))), 14) for item in items]
        if columns not in (None, titles):
            raise UserError(f"--samples {label}={folder} has other prompts than the folders before it; use the same")
        columns = titles
        try:
            rows[label] = [Image.open(Path(folder) / item["file"]) for item in items]
        except OSError as error:
            raise UserError(f"--samples {label}={folder} holds a file that is no image: {error}") from None
    return rows, columns or []


def plot_losses(
    runs: Mapping[str, str | Path], out: str | Path, starts: Mapping[str, int] | None = None, log: bool = True
) -> Path:
    """Loss curves of several runs in one PNG: training loss as lines, held-out loss as points.

    Args:
        runs: label to the run's metrics.jsonl.
        out: the PNG file.
        starts: label to the step at which its curve begins, for a run that goes on from another; default 0.
        log: whether the axis of losses is logarithmic.
    """
    figure, axes = new_figure(7.0, 4.0)
    for label, metrics in runs.items():
        start = (starts or {}).get(label, 0)
        steps, losses = read_curve(metrics, "loss")
        (line,) = axes.plot([start + s for s in steps], losses, linewidth=1, alpha=0.6, label=f"{label}, training")
        steps, losses = read_curve(metrics, "validation/loss")
        if steps:
            axes.plot([start + s for s in steps], losses, "o-", color=line.get_color(), label=f"{label}, held out")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss")
    axes.set_yscale("log" if log else "linear")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return save_figure(figure, out)


def plot_ranges(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], levels: Mapping[str, float], out: str | Path
) -> Path:
    """Held-out losses of runs with several seeds in one PNG: the median as a line, the range as a band.

    Args:
        curves: label to one curve of (step, loss) per seed, all at the same steps.
        levels: label to a loss that is drawn as a dashed horizontal line.
        out: the PNG file.
    """
    figure, axes = new_figure(8.0, 4.5)
    for label, runs in curves.items():
        steps = [step for step, _ in runs[0]]
        losses = np.array([[loss for _, loss in run] for run in runs])
        (line,) = axes.plot(steps, np.median(losses, axis=0), label=label)
        axes.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.15)
    for label, level in levels.items():
        axes.axhline(level, color="black", linestyle="--", label=label)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("held-out loss")
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return save_figure(figure, out)


def plot_samples(rows: Mapping[str, Sequence[Image.Image]], columns: Sequence[str], out: str | Path) -> Path:
    """Images in labelled rows and columns as one PNG, smoothly enlarged.

    Args:
        rows: row label to its images, as many as there are columns.
        columns: column labels.
        out: the PNG file.
    """
    figure, grid = new_figure(0.9 * len(columns) + 2.0, 1.0 * len(rows) + 0.4, len(rows), len(columns))
    for (label, images), line in zip(rows.items(), np.reshape(grid, (len(rows), len(columns))), strict=True):
        for axes, image, column in zip(line, images, columns, strict=True):
            axes.imshow(np.asarray(image), cmap="gray", interpolation="bicubic")
            axes.set_xticks([])
            axes.set_yticks([])
            if axes.get_subplotspec().is_first_row():
                axes.set_title(column, fontsize=10)
        line[0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=10)
    return save_figure(figure, out)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of that many inches and its panels, as `Figure.subplots` gives them; it takes the options."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    return figure, figure.subplots(rows, columns, **options)


def save_figure(figure: Figure, out: str | Path) -> Path:
    """Write a PNG, whole or not at all."""
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
    return path
