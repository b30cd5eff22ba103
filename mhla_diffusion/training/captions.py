"""Captions of the images or videos in a folder: a metadata.jsonl, or a text file beside each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from tqdm.auto import tqdm

from ..errors import UserError

METADATA = "metadata.jsonl"


def captions_by_name(root: Path, names: Sequence[str], kind: str = "image") -> dict[str, str]:
    """One caption for each of the images (or whatever `kind` calls them) `names`, which are below `root`.

    They are in ROOT/metadata.jsonl, one line of {"file_name": …, "text": …} per image, or, where there is no such
    file, in NAME.txt beside NAME.png.

    Raises:
        UserError: when there are none, one is empty or missing, or one is of an image that is not there.
    """
    if (root / METADATA).is_file():
        return _from_metadata(root, names, kind)
    beside = {name: root / PurePosixPath(name).with_suffix(".txt") for name in names}
    progress = tqdm(beside.items(), "reading captions", unit="caption", delay=5, leave=False, dynamic_ncols=True)
    found = {name: _text(path) for name, path in progress if path.is_file()}
    if not found:
        raise UserError(
            f"{kind} folder {root} has no captions; a {METADATA} with file_name and text in each line, or NAME.txt "
            f"beside each NAME{PurePosixPath(names[0]).suffix}, is expected"
        )
    for name, text in found.items():
        if not text:
            empty = sum(not text for text in found.values())
            raise UserError(f"caption {beside[name]} is empty{_first_of(empty)}; give it a text, or remove the {kind}")
    _refuse_missing(root, [name for name in names if name not in found], "no .txt beside it", kind)
    return found


def read_listing(path: Path, one_each: bool = False) -> dict[str, tuple[int, str]]:
    """Line number and caption by file name; of several captions the last.

    Raises `UserError` naming a line that is not as expected or, with `one_each`, has another caption of the same file.
    """
    captions: dict[str, tuple[int, str]] = {}
    # Not splitlines(): a caption may hold characters, such as U+2028, that it takes for the end of a line.
    for number, line in enumerate(_text(path, strip=False).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name, text = row["file_name"], row["text"]
        except (ValueError, KeyError, TypeError):
            name = text = None
        if not isinstance(name, str) or not isinstance(text, str):
            raise UserError(f"{path}, line {number}, is not a JSON object with 'file_name' and 'text'")
        place = PurePosixPath(name).as_posix()
        if one_each and place in captions and captions[place][1] != text.strip():
            raise UserError(
                f"{path}, line {number}, has another caption of {name!r} than line {captions[place][0]}; one is "
                "accepted for each file"
            )
        captions[place] = number, text.strip()
    return captions


def _from_metadata(root: Path, names: Sequence[str], kind: str) -> dict[str, str]:
    path = root / METADATA
    rows, there = read_listing(path, one_each=True), set(names)
    if missing := [(number, name) for name, (number, _) in rows.items() if name not in there]:
        number, name = missing[0]
        raise UserError(
            f"{path}, line {number}, names {name!r}, which is no {kind} in that folder{_first_of(len(missing))}; "
            f"remove such lines, or restore the {kind}s"
        )
    if empty := [number for number, text in rows.values() if not text]:
        raise UserError(
            f"{path}, line {empty[0]}, has an empty caption{_first_of(len(empty))}; give it a text, or remove line and "
            f"{kind}"
        )
    _refuse_missing(root, [name for name in names if name not in rows], f"no line in {path}", kind)
    return {name: rows[name][1] for name in names}


def _refuse_missing(root: Path, missing: Sequence[str], why: str, kind: str) -> None:
    if missing:
        raise UserError(
            f"{kind} {root / missing[0]} has no caption ({why}){_first_of(len(missing))}; add captions, or remove "
            f"the {kind}s"
        )


def _first_of(count: int) -> str:
    return f" (the first of {count:,})" if count > 1 else ""


def _text(path: Path, strip: bool = True) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"caption file {path} cannot be read as UTF-8 text: {error}") from None
    return text.strip() if strip else text
