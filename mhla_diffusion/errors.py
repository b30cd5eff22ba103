"""The one exception that scripts turn into a single line for the user, and what helps to raise it."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """A request that cannot be met as asked; its message is one sentence that says what to change."""


def of_one_process(message: str) -> UserError:
    """An error that the other processes of a launch do not know of, so that this one has to say it."""
    error = UserError(message)
    error.of_one_process = True
    return error


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest of `known`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def check_writable(name: str, path: str | Path) -> None:
    """Raise a UserError unless a file can be written at `path` (its folder is made): asked before work is done."""
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise UserError(f"{name}={str(path)!r} is a folder; name a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{name}={str(path)!r} cannot be written ({error.strerror})") from None
