"""What a measuring process does: one job, whose events go back through a pipe.

`jobs.py` starts a process for each job, so that memory that one candidate leaves behind cannot reach the next.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from ..devices import is_out_of_memory
from ..errors import UserError
from . import models, operators
from .measure import OUT_OF_MEMORY, Call, MemoryMeter, interleaved, peak_of, timed


def work(job: Mapping[str, Any], events: Connection) -> None:
    """Do a job and send its events; a refusal or a failure is the last one."""
    if multiprocessing.parent_process() is not None:  # Ctrl-C reaches that one too, which then ends this one
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    current = job.get("variants")  # what a lack of memory costs; while the model is built, all of them
    try:
        for event in run(job):
            current = [event["variant"]]
            events.send(event)
    except UserError as error:
        events.send({"refused": str(error)})
    except BrokenPipeError:  # nobody listens any more
        return
    except Exception as error:
        if current and is_out_of_memory(error):
            for name in current:
                events.send({"variant": name, "error": OUT_OF_MEMORY})
        else:
            events.send({"failed": traceback.format_exc()})


def run(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure as a `jobs.Job` says and yield what happens, each event of one candidate ("variant")."""
    meter = MemoryMeter(job["case"]["device"])
    at_start = meter.in_use()
    calls, weights, profile = _prepare(job)
    if job["measure"] != "time":
        (name,) = calls
        yield {"variant": name, "begin": True}
        before, peak, seconds = peak_of(calls[name], meter, warm_up=job["measure"] == "memory")
        yield {"variant": name, "memory": {"weights": weights, "call": peak - before, "peak": peak - at_start}}
        if job["measure"] == "once":
            yield {"variant": name, "seconds": seconds}
        return
    failed, is_warm = set(), set()
    events = interleaved(calls, job["repeats"], job["case"]["device"], job["budget"], job["before"])
    for name, result in events:
        if result is None:
            yield {"variant": name, "begin": True}
        elif isinstance(result, str):
            failed.add(name)
            yield {"variant": name, "error": result}
        else:
            is_warm.add(name)
            yield {"variant": name, "seconds": result}
    if job["profile"] and profile is not None:
        for name in [name for name in calls if name not in failed]:
            yield {"variant": name, "begin": True}
            if name not in is_warm:  # its times are from before
                timed(calls[name], job["case"]["device"])
            yield {"variant": name, "profile": profile(name)}


def _prepare(job: Mapping[str, Any]) -> tuple[dict[str, Call], int, Any]:
    if job["kind"] == "operator":
        return operators.prepare(operators.OperatorCase(**job["case"]), job["variants"]), 0, None
    prepared = models.prepare(models.ModelCase(**job["case"]), job["variants"])
    return prepared.calls, prepared.weights, prepared.profile
