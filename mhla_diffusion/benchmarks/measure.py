"""Time and memory of calls in this process: interleaved rounds, and the peak of one call."""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..devices import is_out_of_memory

OUT_OF_MEMORY = "out of memory"  # why a candidate has no measurement
FEWEST = 3  # timed calls of a candidate before its budget may end its part


@dataclass(frozen=True)
class Call:
    """Something to measure: `ready` comes before each `run` and is not measured."""

    run: Callable[[], Any]
    ready: Callable[[], Any] | None = None


def interleaved(
    calls: Mapping[str, Call],
    repeats: int,
    device: str = "cpu",
    budget: float = float("inf"),
    before: Mapping[str, list[float]] | None = None,
) -> Iterator[tuple[str, float | str | None]]:
    """Time the calls in rounds, so that a busy moment of the machine hits all of them alike.

    Each round is in another order: what a call leaves in the caches must not always meet the same one after it. One
    untimed call of each comes first.

    Args:
        calls: candidates by name.
        repeats: timed calls of each.
        device: the torch device that they run on.
        budget: seconds of timed calls after which a candidate sits out the remaining rounds, once it had `FEWEST`.
        before: times of earlier calls, which count.

    Yields:
        (name, None) before each call, (name, seconds) after each timed one, and (name, reason) for a candidate that
        ran out of memory, which is not called again.
    """
    times = {name: list((before or {}).get(name, ())) for name in calls}
    alive = [name for name in calls if not enough(times[name], repeats, budget)]
    is_warm: set[str] = set()
    shuffled = random.Random(0)
    while alive:
        for name in shuffled.sample(alive, len(alive)):
            yield name, None
            try:
                seconds = timed(calls[name], device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                seconds = None
            if seconds is None:
                alive.remove(name)
                yield name, OUT_OF_MEMORY
            elif name not in is_warm:
                is_warm.add(name)
            else:
                times[name].append(seconds)
                yield name, seconds
                if enough(times[name], repeats, budget):
                    alive.remove(name)


def enough(times: list[float], repeats: int, budget: float = float("inf")) -> bool:
    """Whether a candidate with these timed calls needs no more."""
    return len(times) >= repeats or (len(times) >= FEWEST and sum(times) >= budget)


def timed(call: Call, device: str) -> float:
    """Seconds of one call, the device's work included."""
    if call.ready is not None:
        call.ready()
    synchronize(device)
    start = time.perf_counter()
    call.run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25th percentile, median and 75th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


class MemoryMeter:
    """Memory of this process in bytes: resident on the CPU, that of torch's allocator on a GPU.

    On Linux the kernel's high-water mark is reset before a call. Elsewhere it cannot be, so that a peak below an
    earlier one is not seen.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def in_use(self) -> int:
        """What is in use now, after freed memory was given back to the system."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.memory_allocated(self.device)
        _give_back()
        return _resident("VmRSS")

    def forget_peak(self) -> None:
        """Start a new peak from what is in use."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most that was in use at once since `forget_peak`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device)
        return _resident("VmHWM")


def peak_of(call: Call, meter: MemoryMeter, warm_up: bool = True) -> tuple[int, int, float]:
    """Bytes in use before one call, the most during it, and its seconds; with `warm_up` an unmeasured call comes first.

    The warm-up is what makes a training step the usual one: the first step has no optimiser state yet.
    """
    for _ in range(2 if warm_up else 1):
        if call.ready is not None:
            call.ready()
        before = meter.in_use()
        meter.forget_peak()
        seconds = timed(Call(call.run), str(meter.device))
    return before, max(meter.peak(), before), seconds


def _resident(field: str) -> int:
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _give_back() -> None:
    """glibc keeps freed memory for later; what a call needs anew must not hide in it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
