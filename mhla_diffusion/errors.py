"""The one exception that scripts turn into a single line for the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A request that cannot be met as asked; its message is one sentence that says what to change."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest of `known`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
