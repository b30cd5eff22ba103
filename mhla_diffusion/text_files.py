"""Text files that people write or hand over, read line by line: prompts, captions, lists, JSON lines; and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError


def read_lines(path: str | Path, what: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, stripped, with their numbers from 1.

    Raises:
        UserError: the file, a `what`, cannot be read or has no such line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the {what} {str(path)!r} cannot be read ({reason})") from None
    # Not splitlines(): a prompt may hold characters, such as U+2028, that it takes for the end of a line.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"the {what} {str(path)!r} is empty")
    return lines


def read_objects(path: str | Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file with one in each line, each with its place for messages ("line 3 of 'a.jsonl'").

    Raises:
        UserError: as `read_lines`; a line that is not a JSON object.
    """
    objects = []
    for number, line in read_lines(path, what):
        place = f"line {number} of {str(path)!r}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place} is not JSON ({error})") from None
        if not isinstance(entry, dict):
            raise UserError(f"{place} is not a JSON object: {line[:60]!r}")
        objects.append((place, entry))
    return objects


def write_json(name: str, path: str | Path, content: Any) -> None:
    """Write `content` as readable JSON; `name` is the option that names the file. Raises `UserError` if it cannot."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{name}={str(path)!r} cannot be written ({error.strerror or error})") from None
