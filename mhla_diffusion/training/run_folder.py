"""The folder of a run: who may write in it, which checkpoint to go on from, and the record of how it was made.

OUTPUT_DIR/config.yaml      the full config
           run.json         package versions, git revision and command of every start; the run's id at wandb
           metrics.jsonl    one line per logged step
           tensorboard/     the same as curves, and the grids
           samples/         validation grids; of video models the films too
           checkpoints/     step-00001000/ …; alignment/ before the first of them, of a stage that was interrupted
           pipeline/        the exported diffusers pipeline
           pipeline_lora/   of a run with LoRA, the adapters that are merged into the pipeline's weights, and what else
                            learned
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .checkpoints import checkpoints, step_of, sweep, write_whole
from .config import TrainConfig, config_differences, config_from_dict, config_to_dict, config_to_yaml, read_yaml

# What a run may change when it goes on; everything else would make it another run.
CHANGEABLE = (
    "output_dir",
    "data.train",  # the folder may have moved; its content is compared
    "data.validation",
    "data.num_workers",
    "train.steps",
    "train.compile",
    "train.ema_device",
    "train.gradient_checkpointing",
    "checkpoint.",
    "validation.",
    "logging.",
)
_LOCKS: list[Any] = []  # open as long as the process lives


def open_run(config: TrainConfig, resume: str | None, allow_config_change: bool = False) -> Path | None:
    """Claim `config.output_dir` for this run and return the checkpoint to go on from, None to start at step 0.

    Args:
        resume: None for a new run; "latest"; or the folder of a checkpoint or of a run.
        allow_config_change: go on although the config differs in more than `CHANGEABLE`.

    Raises:
        UserError: when the folder holds another run or other files, is in use, or cannot be written.
    """
    folder = Path(config.output_dir)
    if not config.output_dir:
        raise UserError("output_dir is not set; give the folder of the run, as output_dir=runs/name")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock_folder(folder, "output_dir")
        for place in (folder, folder / "checkpoints"):
            sweep(place)
        _refuse_other_run(folder, config, resume, allow_config_change)
        start = _find_checkpoint(folder, resume)
        if start is not None and start.parent == folder / "checkpoints":
            _set_aside_newer(start)
        write_whole(folder / "config.yaml", config_to_yaml(config))
        _record_start(folder, start)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        raise UserError(f"output_dir {folder} cannot be written: {error.strerror or error}{place}") from None
    return start


def _refuse_other_run(folder: Path, config: TrainConfig, resume: str | None, allow_config_change: bool) -> None:
    """Raise `UserError` where what is in `folder` must not be continued or overwritten by `config`."""
    if not (folder / "config.yaml").is_file():
        others = [p.name for p in folder.iterdir() if p.name not in ("checkpoints", "run.json") and p.name[0] != "."]
        if others or checkpoints(folder / "checkpoints"):
            raise UserError(
                f"output_dir {folder} holds other files ({', '.join(sorted(others)[:3])}, …) and no config.yaml of a "
                "run; choose a new output_dir"
            )
        return
    if not _has_results(folder):  # an earlier start was refused, or ended before its first logged step
        return
    kept, begun = checkpoints(folder / "checkpoints"), interrupted_state(folder).is_dir()
    try:
        saved = config_to_dict(config_from_dict(read_yaml(folder / "config.yaml")))
    except UserError as error:
        raise UserError(
            f"output_dir {folder} holds a run whose config.yaml cannot be read ({error}); mend it, or choose a new "
            "output_dir"
        ) from None
    changed = {
        key: values
        for key, values in config_differences(saved, config_to_dict(config)).items()
        if not key.startswith(CHANGEABLE)
    }
    listed = ", ".join(f"{key} is {new!r} instead of {old!r}" for key, (old, new) in changed.items())
    if changed and not (resume and allow_config_change):
        raise UserError(
            f"output_dir {folder} holds a run with another config ({listed}); choose a new output_dir, or continue it "
            "regardless with --resume latest --allow-config-change"
        )
    if (kept or begun) and not resume:
        raise UserError(
            f"output_dir {folder} already holds this run, "
            f"{f'up to step {step_of(kept[-1])}' if kept else 'in its alignment'}; "
            "continue it with --resume latest, or choose a new output_dir"
        )


def _has_results(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any((folder / "checkpoints").iterdir())


def _find_checkpoint(folder: Path, resume: str | None) -> Path | None:
    if not resume:
        return None
    if resume == "latest":
        kept = checkpoints(folder / "checkpoints")
        return kept[-1] if kept else None
    given = Path(resume)
    if (given / "state.json").is_file():
        same = folder / "checkpoints" / given.name
        return same if same.is_dir() and same.samefile(given) else given
    kept = checkpoints(given / "checkpoints")
    if not kept:
        raise UserError(
            f"--resume {resume} is neither 'latest' nor the folder of a checkpoint or of a run that has one"
        )
    return kept[-1]


def interrupted_state(run: Path) -> Path:
    """Where a run keeps the state of its alignment until there is a checkpoint of step 0."""
    return run / "checkpoints" / "alignment"


def _set_aside_newer(start: Path) -> None:
    """Going on from an older checkpoint: newer ones of the abandoned course must not be taken for the latest."""
    for path in checkpoints(start.parent):
        if step_of(path) > step_of(start):
            aside = path.with_name(f"abandoned-{path.name}-{datetime.now():%Y%m%d-%H%M%S}")
            path.rename(aside)


def lock_folder(folder: Path, key: str) -> None:
    """Keep other processes out of `folder`, the value of `key`, until this one ends; raise `UserError` if one is in."""
    handle = open(folder / ".lock", "w")  # noqa: SIM115 (held until the process ends)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{key} {folder} is in use by another process") from None
    except OSError:  # a file system without locks
        handle.close()
    else:
        _LOCKS.append(handle)


def _record_start(folder: Path, start: Path | None) -> None:
    this = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "from": start and str(start)}
    before = read_record(folder).get("starts", [])
    update_record(folder, starts=[*(before if isinstance(before, list) else []), this | environment()])


def read_record(folder: Path) -> dict[str, Any]:
    """What run.json of a run's folder holds; {} where there is none, or it is damaged."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def update_record(folder: Path, **entries: Any) -> None:
    """Put `entries` into run.json of a run's folder, keeping the others."""
    write_whole(folder / "run.json", json.dumps({**read_record(folder), **entries}, indent=1) + "\n")


def environment() -> dict[str, Any]:
    """What a result may depend on besides the config: command, versions, git revision, machine."""
    packages = ("mhla-diffusion", "torch", "diffusers", "accelerate", "transformers", "safetensors", "numpy")
    versions = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions["torch"] = torch.__version__  # with the build, as +cu130
    return {
        "command": sys.argv,
        "versions": versions,
        "git": _git_revision(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _git_revision() -> str | None:
    """Revision of the code that runs, with "+changes" when its files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", here, *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
