"""Measuring in processes of their own, one at a time: `run_jobs`."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..errors import UserError
from .measure import enough
from .results import Case, Results, kind_of
from .worker import work

KILLED = "killed (out of memory?)"


@dataclass(frozen=True)
class Job:
    """One process: the time of several candidates in turn, the memory of one, or both of a single call of one."""

    case: Case
    variants: tuple[str, ...]
    measure: str  # "time", "memory" or "once"
    repeats: int = 5
    budget: float = float("inf")  # see `measure.interleaved`
    profile: bool = False  # of models: one more forward pass for the share of attention


def check_seconds(name: str, seconds: float) -> None:
    """Raise a UserError unless this is a time limit (infinity is one)."""
    if not seconds > 0:
        raise UserError(f"{name}={seconds} must be a number of seconds above 0.")


def plan(
    cases: Sequence[Case],
    variants: Callable[[Case], Sequence[str]],
    repeats: int,
    budget: float = float("inf"),
    memory: bool = True,
    profile: bool = False,
    once: bool = False,
) -> list[Job]:
    """For each case one job for the times and, with `memory`, one per candidate; with `once`, one per candidate."""
    if repeats < 1:
        raise UserError(f"repeats={repeats} must be 1 or more.")
    check_seconds("budget", budget)
    jobs = []
    for case in cases:
        names = tuple(variants(case))
        if once:
            jobs += [Job(case, (name,), "once") for name in names]
            continue
        jobs.append(Job(case, names, "time", repeats, budget, profile))
        jobs += [Job(case, (name,), "memory") for name in names if memory and name not in ("gemm", "copy")]
    return jobs


def run_jobs(
    jobs: Sequence[Job],
    results: Results,
    leave_out: Callable[[Case, str], str | None] = lambda case, variant: None,
    progress: bool = True,
) -> None:
    """Do what `results` does not have yet, and add it there as it comes.

    Args:
        leave_out: asked before each job for each candidate; a reason leaves it out.
        progress: show a progress bar on a terminal.
    """
    with tqdm(jobs, unit="job", dynamic_ncols=True, disable=None if progress else True) as bar:
        for job in bar:
            for variant in job.variants:
                reason = leave_out(job.case, variant)
                if reason is not None and not _is_done(job, results, variant):
                    _give_up(job, results, variant, reason)
            while missing := [v for v in job.variants if not _is_done(job, results, v)]:
                bar.set_description_str(f"{job.measure}: {job.case.label}", refresh=False)
                _run(dataclasses.replace(job, variants=tuple(missing)), results, bar)


def _is_done(job: Job, results: Results, variant: str) -> bool:
    entry = results.of(job.case, variant)
    if ("time" if job.measure == "once" else job.measure) in entry.problems:
        return True
    if job.measure != "time":
        return entry.memory is not None and (job.measure == "memory" or bool(entry.seconds))
    return enough(entry.seconds, job.repeats, job.budget) and not (job.profile and entry.profile is None)


def _run(job: Job, results: Results, bar: tqdm) -> None:
    """One process; when it is killed, the candidate that it was at has a problem, and nothing else is lost."""
    request = dataclasses.asdict(job) | {
        "kind": kind_of(job.case),
        "before": {name: results.of(job.case, name).seconds for name in job.variants},
    }
    current = job.variants[0]  # also while the model is built
    try:
        for event in worker_events(request):
            if "refused" in event:
                raise UserError(event["refused"])
            current = event.pop("variant")
            if "error" in event:
                _give_up(job, results, current, event["error"])
            elif "begin" not in event:
                results.add(job.case, current, **event)
            bar.set_postfix_str(f"{current}, {len(results.of(job.case, current).seconds)}", refresh=True)
    except ProcessKilled:  # not by us
        _give_up(job, results, current, KILLED)


def _give_up(job: Job, results: Results, variant: str, reason: str) -> None:
    for measure in ("time", "memory") if job.measure == "once" else (job.measure,):
        results.add(job.case, variant, problem=reason, measure=measure)


class ProcessKilled(Exception):
    """The worker got a SIGKILL, which is how a system without memory left ends it."""


def worker_events(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Have a process of its own do a job, and yield its events.

    Raises:
        ProcessKilled: when it was killed.
        RuntimeError: when it failed otherwise.
    """
    # The server imports the library once, computes nothing, and is forked for each job.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mhla_diffusion.benchmarks.worker"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(request, sender), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            try:
                event = receiver.recv()
            except EOFError:
                break
            if "failed" in event:
                raise RuntimeError(f"measuring failed:\n{event['failed']}")
            yield event
        process.join()
    finally:
        process.kill()
        process.join()
        receiver.close()
    if process.exitcode == -signal.SIGKILL:
        raise ProcessKilled
    if process.exitcode:
        raise RuntimeError(f"measuring failed: its process ended with exit status {process.exitcode}")
