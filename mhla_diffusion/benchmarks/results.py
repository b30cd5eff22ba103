"""What was measured, on which machine: in memory, and line by line in a file that a stopped run goes on from."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch

from ..errors import UserError, check_writable
from ..training.checkpoints import write_whole
from ..training.metrics import read_metrics
from .measure import quartiles
from .models import ModelCase
from .operators import OperatorCase

Case = OperatorCase | ModelCase
KINDS: dict[str, type] = {"operator": OperatorCase, "model": ModelCase}


@dataclass
class Measured:
    """All that is known of one candidate in one case."""

    case: Case
    variant: str
    seconds: list[float] = field(default_factory=list)  # of each timed call
    memory: dict[str, int] | None = None  # bytes: "weights", "call" above what was in use before it, "peak" in all
    profile: dict[str, float] | None = None  # seconds of one forward pass: "total", "attention", "core"
    problems: dict[str, str] = field(default_factory=dict)  # "time" or "memory": why it is missing

    @property
    def median(self) -> float | None:
        return quartiles(self.seconds)[1] if self.seconds else None


class Results:
    """Measurements by case and candidate.

    Args:
        header: what they all depend on: the machine, and what was asked for.
        path: a file of JSON lines: the header, then one line per timed call, memory or profile. If it exists with the
            same machine, its measurements count and are not repeated (what failed or was left out is tried again);
            else it is left alone and `UserError` says so.
    """

    def __init__(self, header: Mapping[str, Any], path: Path | None = None) -> None:
        self.header = json.loads(json.dumps(header))
        self.path = path
        self._entries: dict[tuple[str, str], Measured] = {}
        self.found = 0
        if path is None:
            return
        check_writable("json", path)
        if path.exists():
            try:
                lines = read_metrics(path)  # without a last line that was cut off
            except (OSError, UnicodeDecodeError):
                lines = []
            kept = [line for line in lines[1:] if isinstance(line, dict) and "variant" in line]
            kept = [line for line in kept if "problem" not in line]
            self._take_from_file(lines, kept)
            self.found = len(kept)
            write_whole(path, "".join(json.dumps(line) + "\n" for line in [self.header, *kept]))
        else:
            write_whole(path, json.dumps(self.header) + "\n")

    def _take_from_file(self, lines: list[Any], kept: list[dict[str, Any]]) -> None:
        """Take the lines that are kept of a file; `UserError` if it is not one of these measurements."""
        other = f"json={str(self.path)!r} exists and is not of a benchmark on this machine with these versions"
        header = lines[0] if lines and isinstance(lines[0], dict) else {}
        there, here = header.get("machine"), self.header.get("machine")
        if there != here and isinstance(there, dict) and isinstance(here, dict):
            differ = [name for name in {**there, **here} if there.get(name) != here.get(name)]
            other += "".join(f"; {name}: {there.get(name)} there, {here.get(name)} here" for name in differ)
        if there != here or not all(isinstance(line, dict) for line in lines) or not lines:
            raise UserError(f"{other}; name another file, or delete it.")
        for line in kept:
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError):  # a UserError too: of a case that this version refuses
                raise UserError(f"{other}: {json.dumps(line)[:80]}…; name another file, or delete it.") from None

    def add(self, case: Case, variant: str, **what: Any) -> None:
        """Keep one event: seconds=…, memory=…, profile=…, or problem=… with measure="time" or "memory"."""
        line = {"kind": kind_of(case), "case": dataclasses.asdict(case), "variant": variant, **what}
        self._take(line)
        self._write(line)

    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Write what was read off the measurements as the file's last line."""
        self._write({"summary": summary})

    def of(self, case: Case, variant: str) -> Measured:
        """The entry of a candidate, empty if nothing was measured yet."""
        return self._entries.setdefault((_key(case), variant), Measured(case, variant))

    def __iter__(self) -> Iterator[Measured]:
        return iter(self._entries.values())

    def _take(self, line: Mapping[str, Any]) -> None:
        entry = self.of(KINDS[line["kind"]](**line["case"]), line["variant"])
        if "seconds" in line:
            entry.seconds.append(line["seconds"])
        elif "problem" in line:
            entry.problems[line["measure"]] = line["problem"]
        elif "memory" in line:
            entry.memory = line["memory"]
        else:
            entry.profile = line["profile"]

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def kind_of(case: Case) -> str:
    return next(kind for kind, cls in KINDS.items() if isinstance(case, cls))


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a figure depends on besides the code: processor, threads and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "processor": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    if os.environ.get("MHLA_BACKEND"):
        facts["MHLA_BACKEND"] = os.environ["MHLA_BACKEND"]
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        for package in ("triton", "fla"):
            if importlib.util.find_spec(package) is not None:
                name = {"fla": "flash-linear-attention"}.get(package, package)
                facts[package] = importlib.metadata.version(name)
    return facts


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _key(case: Case) -> str:
    return json.dumps([kind_of(case), dataclasses.asdict(case)], sort_keys=True)
