"""What the alignment and the fine-tuning do alike: the plan of batches, the bar, the processes' means, stopping."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor
from tqdm.auto import tqdm

from ..errors import UserError
from .config import TrainConfig, TrainOptions
from .data import BatchPlan, ImageSource, sample_order


def join_processes(mixed_precision: str = "no") -> Accelerator:
    """This process's part in the run, on a GPU where there is one.

    Processes wait for each other as long as it takes: the last shard of a cache or an export may take longer than the
    ten minutes after which they would give up, and of one that has died the launcher knows.
    """
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes without GPUs would not find each other
        mixed_precision=mixed_precision,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))],
    )


def batch_plan(
    source: ImageSource, options: TrainOptions, accelerator: Accelerator, seed: int, first_step: int, last_step: int
) -> BatchPlan:
    """Which samples this process sees in each step from `first_step` on, in an order that follows from `seed`."""
    return BatchPlan(
        sample_order(source, seed, options.batch_size),
        options.batch_size,
        options.gradient_accumulation,
        accelerator.process_index,
        accelerator.num_processes,
        first_step,
        last_step,
    )


def check_same_data(config: TrainConfig, source: ImageSource, saved: str | None, more: str = "") -> None:
    """Raise `UserError` when the data for training are not those of the fingerprint `saved`; `more` is a way out."""
    if saved != source.fingerprint:
        ways = f"choose a new output_dir, or {more}" if more else "or choose a new output_dir"
        raise UserError(
            f"data.train {config.data.train} has other samples ({source.fingerprint}) than the run was started with "
            f"({saved}); restore them, {ways}"
        )


def progress_bar(config: TrainConfig, accelerator: Accelerator, first: int, last: int, name: str | None = None) -> tqdm:
    """A bar over steps on the main process, written seldom where it is not a person who looks."""
    return tqdm(
        desc=name,
        initial=first,
        total=last,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=not (config.logging.progress and accelerator.is_main_process),
    )


def agreed(accelerator: Accelerator, sums: dict[str, Tensor], stopping: bool) -> tuple[dict[str, float], bool]:
    """The mean over processes of each number, and whether any process was told to stop."""
    shared = torch.stack([*sums.values(), torch.tensor(float(stopping), device=accelerator.device)])
    *means, asked = accelerator.reduce(shared, "mean").tolist()
    return dict(zip(sums, means, strict=True)), asked > 0


class _Stop:
    received: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[_Stop]:
    """Turn SIGTERM (a cluster's warning) and the first Ctrl-C into a note to stop after the current step."""
    stop = _Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.received = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():  # only the main thread can be told
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
