"""Checkpoints that appear whole or not at all, and that hold tensors and JSON only.

A folder is written under a temporary name, forced to disk and renamed; what has no final name was never finished and is
swept away at the next start. Weights, moving average and optimiser state are stored by parameter name and in full, so
that a checkpoint does not depend on how many processes wrote it or how they shared the weights.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from diffusers.training_utils import EMAModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import UserError

TEMPORARY = ".tmp-"
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")  # of torch's AdamW
STEP_FOLDER = re.compile(r"step-(\d{8})")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
NO_ROOM |= {errno.EISDIR, errno.ENOTDIR}  # something else has the place


# Whole or not at all -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def whole_folder(target: Path, synced: bool = True) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends without an error it becomes `target`, replacing an old one.

    At any moment a kill leaves the old folder, the new one, or (for an instant) the old one under a name from which
    `sweep` restores it. `synced=False` spares forcing every file to disk, for what is easily made again.
    """
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.rglob("*") if synced else ():
            _sync(path)
        _sync(temporary)
        replaced = target.with_name(f"{TEMPORARY}old-{target.name}")
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def whole_file(path: Path, name: str | None = None) -> Iterator[Path]:
    """Give a temporary path to write; when the block ends without an error that file becomes `path`.

    `name` distinguishes it from those of other processes; None: a killed one's is written anew.
    """
    temporary = path.with_name(f"{TEMPORARY}{name or path.name}")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old content or the new one, never a part.

    Several processes may write the same file at once; that of the last one stays.
    """
    with whole_file(path, f"{uuid.uuid4().hex[:12]}{path.suffix}") as temporary:
        temporary.write_text(text, encoding="utf-8")


def sweep(folder: Path) -> None:
    """Remove what an interrupted save left in `folder`, and put back a folder whose replacement did not arrive."""
    for path in folder.glob(f"{TEMPORARY}old-*"):
        target = path.with_name(path.name.removeprefix(f"{TEMPORARY}old-"))
        if not target.exists():
            path.rename(target)
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def on_main_process(accelerator: Accelerator, function: Callable[[], Any]) -> Any:
    """Run `function` on the main process; its result, or its `UserError`, reaches every process."""
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1], failure = str(error), error
        except BaseException as error:
            outcome[1], failure = repr(error), error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


# The training state --------------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: EMAModel | None,
    state: dict[str, Any],
) -> None:
    """Write the training state as `folder`; every process must call it, the main one writes.

    `model` is the unwrapped model and `optimizer` the torch one; `state` is plain data for `state.json`. Raises
    `UserError` in one sentence when the disk is full or not writable, leaving earlier checkpoints as they were.
    """
    parts = {
        "model": lambda: named_weights(model),
        "optimizer": lambda: optimizer_tensors(model, optimizer),
    }
    if ema is not None:
        parts["ema"] = lambda: named_ema(model, ema)

    writer = contextlib.ExitStack()

    def begin() -> None:
        with disk_errors(folder.parent, f"checkpoint {folder} cannot be written"):
            begin.path = writer.enter_context(whole_folder(folder))

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        with disk_errors(folder.parent, f"checkpoint {folder} cannot be written"):
            save_file(tensors, begin.path / f"{name}.safetensors")

    def finish() -> None:
        with disk_errors(folder.parent, f"checkpoint {folder} cannot be written"):
            (begin.path / "state.json").write_text(json.dumps(state), encoding="utf-8")
            writer.close()

    try:
        on_main_process(accelerator, begin)
        for name, collect in parts.items():
            tensors = {key: _whole_on_cpu(tensor, accelerator) for key, tensor in collect().items()}
            on_main_process(accelerator, lambda name=name, tensors=tensors: write(name, tensors))
        on_main_process(accelerator, finish)
    except BaseException as error:
        with contextlib.suppress(BaseException):  # takes the temporary folder away
            writer.__exit__(type(error), error, error.__traceback__)
        raise


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMAModel | None
) -> dict[str, Any]:
    """Put the state saved in `folder` into the unwrapped model, the torch optimiser and the EMA; return `state.json`.

    Raises `UserError` when a file is missing, damaged, or does not fit the model.
    """
    state = read_state(folder)
    with _readable(folder / "model.safetensors") as weights:
        _copy_all(weights, named_weights(model), folder / "model.safetensors")
    if ema is not None:
        with _readable(folder / "ema.safetensors") as weights:
            _copy_all(weights, named_ema(model, ema), folder / "ema.safetensors")
        ema.optimization_step = state["step"]
    with _readable(folder / "optimizer.safetensors") as tensors:
        # Before the first step, or when gradients overflowed in all of them, the optimiser has no state yet.
        if tensors.keys() or not (state["step"] == 0 or state.get("scaler")):
            _load_optimizer(tensors, model, optimizer, folder / "optimizer.safetensors")
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """`state.json` of a checkpoint folder. Raises `UserError` where it is missing or damaged."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: state.json: {error}") from None
    if not isinstance(state, dict) or "step" not in state:
        raise UserError(f"checkpoint {folder} cannot be read: state.json has no step")
    return state


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the saved buffers of `model` by name; a tensor shared by two modules comes once."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


def learning_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` that are not frozen, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def named_ema(model: nn.Module, ema: EMAModel) -> dict[str, torch.Tensor]:
    """The moving average, which is of what learns, by parameter name."""
    return dict(zip(learning_weights(model), ema.shadow_params, strict=True))


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as `PARAMETER/STATE` tensors, e.g. `proj_out_2.weight/exp_avg`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            value = torch.as_tensor(value)
            # 8-bit optimisers share their tables of numbers, which a safetensors file must not.
            tensors[f"{names[id(parameter)]}/{key}"] = value.clone() if key.startswith("qmap") else value
    return tensors


def _load_optimizer(tensors: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    learning = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in learning}
    if not isinstance(optimizer, torch.optim.AdamW):
        _load_other_optimizer(tensors, parameters, optimizer, path)
        return
    _check_names(tensors, {f"{name}/{key}" for name in parameters for key in ADAM_STATE}, path)
    for name, parameter in parameters.items():
        for key in ADAM_STATE:
            like = parameter.detach()
            value = _tensor_of_shape(tensors, f"{name}/{key}", () if key == "step" else like.shape, path)
            # Adam's step counter stays where torch keeps it; the averages live as the parameter does.
            optimizer.state[parameter][key] = value if key == "step" else _placed_like(value, like).clone()


def _load_other_optimizer(
    tensors: Any, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, path: Path
) -> None:
    """The state of an optimiser that itself decides what it keeps of which parameter, as those in 8 bit do."""
    keys: dict[str, list[str]] = {}
    for name in tensors.keys():  # noqa: SIM118 (a safetensors file is not a dict)
        parameter, _, key = name.rpartition("/")
        keys.setdefault(parameter, []).append(key)
    _check_names(keys, parameters.keys(), path)
    for name, parameter in parameters.items():
        state = {key: tensors.get_tensor(f"{name}/{key}") for key in keys[name]}
        optimizer.state[parameter] = {
            key: value.item() if key == "step" else value.to(parameter.device) for key, value in state.items()
        }


def _copy_all(source: Any, targets: dict[str, torch.Tensor], path: Path) -> None:
    _check_names(source, targets.keys(), path)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(_placed_like(_tensor_of_shape(source, name, target.shape, path), target))


def _check_names(source: Any, expected: Collection[str], path: Path) -> None:
    found = set(source.keys())
    if missing := sorted(set(expected) - found):
        raise UserError(f"{path} lacks {missing[0]!r}, which this run needs ({len(missing)} missing in all)")
    if extra := sorted(found - set(expected)):
        raise UserError(f"{path} has {extra[0]!r}, which this run has no place for ({len(extra)} extra in all)")


def _tensor_of_shape(source: Any, name: str, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    value = source.get_tensor(name)
    if tuple(value.shape) != tuple(shape):
        raise UserError(f"{path}: {name} has shape {tuple(value.shape)}; {tuple(shape)} is expected")
    return value


def _placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements) if isinstance(like, DTensor) else value


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of one that may be sharded; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _whole_on_cpu(tensor: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    tensor = whole_tensor(tensor.detach())
    return tensor.cpu().contiguous() if accelerator.is_main_process else tensor.new_empty(0)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"checkpoint {path} cannot be read: {error}; remove the folder {path.parent.name}, and --resume latest "
            "goes on from what was saved before it"
        ) from None


@contextlib.contextmanager
def disk_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn a full or read-only disk into a `UserError`: `what`, why, and the last good checkpoint in `folder`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in NO_ROOM:
            raise
        kept = checkpoints(folder)
        last = f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"
        raise UserError(f"{what}: {getattr(error, 'strerror', None) or error}; {last}") from error


# The checkpoints of a run --------------------------------------------------------------------------------------------


def checkpoint_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(STEP_FOLDER.fullmatch(folder.name)[1])


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step-*") if STEP_FOLDER.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def prune_checkpoints(folder: Path, keep_last: int, keep_every: int) -> None:
    """Keep the `keep_last` newest checkpoints, and those at multiples of `keep_every` steps (0: none)."""
    for path in checkpoints(folder)[:-keep_last]:
        if not (keep_every and step_of(path) % keep_every == 0):
            gone = path.with_name(f"{TEMPORARY}gone-{path.name}")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)  # a checkpoint that is half deleted must not look like one
            shutil.rmtree(gone, ignore_errors=True)
