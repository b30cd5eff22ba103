"""Where a run's numbers and pictures go: metrics.jsonl, TensorBoard and, if asked, Weights & Biases."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from ..errors import UserError
from .checkpoints import whole_tensor, write_whole
from .config import LoggingOptions
from .run_folder import read_record, update_record


class MetricLog:
    """Writes metrics of the main process; on other processes (`active=False`) it does nothing.

    A run that goes on from step `first_step` drops the lines and curve points after it, so that no step comes twice.
    """

    def __init__(self, folder: Path, options: LoggingOptions, first_step: int, config: dict[str, Any], active: bool):
        self.path = folder / "metrics.jsonl"
        self.samples = folder / "samples"
        self.active = active
        self.tensorboard = self.wandb = None
        if not active:
            return
        _truncate(self.path, first_step)
        if options.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)
        if options.wandb:
            self.wandb = _start_wandb(options.wandb, folder, config)

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Record `values` of optimiser step `step` (the first step is 1; those of the alignment end at 0)."""
        if not self.active:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.tensorboard:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
            self.tensorboard.flush()
        if self.wandb and step > 0:  # it knows no steps below 0
            self.wandb.log(values, step=step)

    def sample_folder(self, step: int) -> Path:
        """Where the samples of a validation are that do not fit into its picture."""
        return self.samples / f"step-{step:08d}"

    def picture(self, step: int, image: Image.Image) -> None:
        """Record a validation grid as samples/step-NNNNNNNN.png."""
        if not self.active:
            return
        self.samples.mkdir(exist_ok=True)
        path = self.samples / f"step-{step:08d}.png"
        temporary = path.with_name(f".tmp-{path.name}")
        image.save(temporary)
        temporary.rename(path)
        if self.tensorboard:
            from torchvision.transforms.functional import pil_to_tensor

            self.tensorboard.add_image("samples", pil_to_tensor(image), step)
            self.tensorboard.flush()
        if self.wandb:
            import wandb

            self.wandb.log({"samples": wandb.Image(image)}, step=step)

    def close(self) -> None:
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def read_metrics(path: Path | str) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; a line that is not whole, as after a kill or a full disk, is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def mixing_statistics(model: nn.Module) -> dict[str, float]:
    """Least, mean and greatest mixing weight over all layers, and the share of weights that were clipped to 0.

    Every process must call it when the model is sharded. Empty for a model without MHLA.
    """
    weights = [whole_tensor(weight.detach()).float().flatten() for weight in mixing_parameters(model)]
    if not weights:
        return {}
    flat = torch.cat(weights)
    return {
        "mixing/min": flat.min().item(),
        "mixing/mean": flat.mean().item(),
        "mixing/max": flat.max().item(),
        "mixing/share_zero": (flat == 0).float().mean().item(),
    }


def mixing_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The mixing weights of a model; none for a stock diffusers transformer."""
    return list(model.mixing_parameters()) if hasattr(model, "mixing_parameters") else []


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process: on the GPU where it trains on one, else resident memory; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # bytes on macOS, else kilobytes


def _truncate(path: Path, last_step: int) -> None:
    if path.exists():
        kept = [json.dumps(row) + "\n" for row in read_metrics(path) if row.get("step", 0) <= last_step]
        write_whole(path, "".join(kept))


def _start_wandb(project: str, folder: Path, config: dict[str, Any]) -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError(
            "logging.wandb is set but the wandb package is missing; pip install wandb, or set it to null"
        ) from None
    known = read_record(folder).get("wandb", {})
    id_ = known.get("id") if known.get("project") == project else None
    run = wandb.init(project=project, dir=folder, config=config, name=folder.name, id=id_, resume="allow")
    update_record(folder, wandb={"project": project, "id": run.id})
    return run
