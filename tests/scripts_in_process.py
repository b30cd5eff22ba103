"""Scripts called as functions, which spares the seconds that a new process takes to import everything."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from training_runs import ROOT


def main_of(script: str) -> Callable[[list[str]], int]:
    """`main` of scripts/<script>.py, which takes the command line's arguments and returns the exit status."""
    place = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.main
