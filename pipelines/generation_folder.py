"""A folder that generation fills: its settings, the names of its files, and who is at work on which of them.

OUT/generation.json   the settings: a folder of other settings is refused
    labels.jsonl      one line per item: its file and its conditions (class or prompt)
    000000.png, …     the items; 000000.mp4 of a video pipeline; NAME.png where a condition has a name
    .claims           while processes are at work: which items each of them is making

A process claims an item by locking a byte of `.claims` that belongs to it. The operating system takes back the locks of
a process that ends in whatever way, so nothing has to be cleaned up after a kill, and no clocks are compared. Claims
only save work: an item is the same whoever makes it, and files appear whole, so on a file system without locks
processes that were started separately repeat each other's work and harm nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UserError
from ..training.checkpoints import TEMPORARY

MANIFEST, LABELS, CLAIMS = "generation.json", "labels.jsonl", ".claims"
IMAGE_SUFFIX, VIDEO_SUFFIX = ".png", ".mp4"
# What `whole` and `write_mp4` leave when they are killed; a training run's temporary files in a folder are its own.
HALF_WRITTEN = re.compile(rf"({re.escape(TEMPORARY)}){{1,2}}[0-9a-f]{{12}}\.[a-z0-9]+")
MAX_NAME = 255  # bytes of a file name on Linux and macOS
BUSY = {errno.EAGAIN, errno.EACCES}
OPENING, PRESENT, FIRST_ITEM = 0, 1, 2  # bytes of the file of claims


# Names ---------------------------------------------------------------------------------------------------------------


def file_name(index: int, name: str | None = None, suffix: str = IMAGE_SUFFIX) -> str:
    """Name of the file of item `index`, e.g. 000007.png, or of an item with a name of its own."""
    return f"{index:06d}{suffix}" if name is None else f"{name}{suffix}"


def check_name(name: Any) -> None:
    """Raise `UserError` unless `name` can be a file's name without suffix; with `/` it lies in sub-folders.

    Anything else that the file system takes is accepted, spaces, quotes and other scripts included.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"name={name!r} must be text that is not empty")
    try:
        longest = max(len(part.encode()) for part in (name + IMAGE_SUFFIX).split("/"))
    except UnicodeEncodeError:
        raise UserError(f"name={name!r} is not valid Unicode") from None
    if longest > MAX_NAME:
        short = f"{name[:40]}…"
        limit = MAX_NAME - len(IMAGE_SUFFIX)
        raise UserError(f"name={short!r} is too long for a file's name; {limit} bytes are accepted")
    if any(part.startswith(".") or not part for part in name.split("/")) or any(ord(c) < 32 for c in name):
        raise UserError(
            f"name={name!r} cannot be a file's name; no part of it may be empty or begin with a dot, and it may not "
            "hold control characters"
        )


def item_files(conditions: Sequence[dict[str, Any]], suffix: str) -> list[str]:
    """The file of every item, relative to the folder. Raises `UserError` when two items would share one."""
    files: dict[str, int] = {}
    for index, condition in enumerate(conditions):
        if (name := condition.get("name")) is not None:
            check_name(name)
        file = file_name(index, name, suffix)
        if (other := files.setdefault(file, index)) != index:
            raise UserError(f"items {other} and {index} would both be the file {file!r}; give them different names")
    for file, index in files.items():
        for folder in map(str, PurePosixPath(file).parents):
            if folder in files:
                raise UserError(
                    f"item {files[folder]} would be the file {folder!r}, and item {index} would lie in a folder of "
                    "that name; give them different names"
                )
    return list(files)


# The folder ----------------------------------------------------------------------------------------------------------


def check_place(out: str | Path) -> None:
    """Raise `UserError` when `out` is a file, or lies where nothing can be written; nothing is made."""
    if Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"the output folder {str(out)!r} is a file")
    place = next(path for path in (Path(out), *Path(out).absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"the output folder {str(out)!r} cannot be made: {str(place)!r} is not a folder to write in")


def fill_in(
    out: Path, manifest: dict[str, Any], lines: Sequence[str], files: Sequence[str], independent: bool = False
) -> list[int]:
    """Write the settings and conditions of a folder, and return which of `files` are missing.

    Args:
        manifest: the settings.
        lines: of the items, their file and conditions as JSON.
        independent: no item depends on its place, so those that are not among `files` stay, and others are added.

    Raises:
        UserError: the folder holds items of other settings or conditions, or strangers; it stays as it was.
    """
    before = _check_content(out, manifest, lines, files, independent)
    if independent:
        now = set(files)
        lines = [line for file, line in before.items() if file not in now] + list(lines)
        manifest = {**manifest, "num_images": len(lines)}
    for folder in {(out / file).parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
    with whole(out / MANIFEST, out) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    with whole(out / LABELS, out) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [index for index, file in enumerate(files) if not complete(out / file)]


def _check_content(
    out: Path, manifest: dict[str, Any], lines: Sequence[str], files: Sequence[str], independent: bool
) -> dict[str, str]:
    """Raise `UserError` unless the items can go into the folder; file -> line of those that are written down there."""
    place, path = f"the output folder {str(out)!r}", out / MANIFEST
    if not path.is_file():
        strangers = [found for found in out.glob(f"*{Path(files[0]).suffix}") if not found.name.startswith(".")]
        if strangers or any((out / file).exists() for file in files):
            raise UserError(f"{place} holds {_items(manifest)} without {MANIFEST}; choose a new folder")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        # Lines end with \n only: a prompt may hold other characters that Python takes for the end of a line.
        known = (out / LABELS).read_text(encoding="utf-8").split("\n")[:-1] if (out / LABELS).is_file() else []
        before = {json.loads(line)["file"]: line for line in known}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read ({error}); choose a new folder") from None
    for name, value in manifest.items():
        if name != "num_images" and found.get(name) != value:
            raise UserError(
                f"{place} holds {_items(manifest)} made with {name}={found.get(name)}, now it is {value}; "
                "choose a new folder"
            )
    if independent:
        known = [before.get(file, line) for file, line in zip(files, lines, strict=True)]
    elif len(known) > len(lines):
        raise UserError(f"{place} is one of {len(known)} items, now it is {len(lines)}; choose a new folder")
    for index, (old, new) in enumerate(zip(known, lines, strict=False)):
        if old != new:
            raise UserError(f"{place} holds other items (number {index}: {old}, now {new}); choose a new folder")
    return before


def _items(manifest: dict[str, Any]) -> str:
    return "videos" if "fps" in manifest else "images"


# Files that are there whole or not at all ----------------------------------------------------------------------------


@contextlib.contextmanager
def whole(path: Path, folder: Path) -> Iterator[Path]:
    """Give a temporary path in `folder` to write; when the block ends without an error that file becomes `path`."""
    # A name of its own: another process may be writing the same file, and a long name has no room for a prefix.
    temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex[:12]}{path.suffix}"
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def complete(path: Path) -> bool:
    """Whether an image or video is there up to its end, so that one cut off by a copy or a full disk is made again."""
    try:
        with open(path, "rb") as file:
            if path.suffix == VIDEO_SUFFIX:
                return _whole_mp4(file)
            start = file.read(8)
            file.seek(-8, os.SEEK_END)
            return start == b"\x89PNG\r\n\x1a\n" and file.read(4) == b"IEND"
    except OSError:
        return False


def _whole_mp4(file: Any) -> bool:
    """Whether the boxes of an MP4 file (ISO 14496-12, 4.2) fill it exactly, its index `moov` among them."""
    size, position, kinds = file.seek(0, os.SEEK_END), 0, set()
    while position < size:
        file.seek(position)
        header = file.read(16)
        length = int.from_bytes(header[:4], "big")
        if length == 1:  # a long box
            length = int.from_bytes(header[8:16], "big")
        if length < 8:
            return False
        kinds.add(header[4:8])
        position += length
    return position == size and {b"ftyp", b"moov"} <= kinds


# Claims --------------------------------------------------------------------------------------------------------------


class Claims:
    """Who makes which item of a folder: locks on the bytes of its `.claims`, held by this process.

    `available` is False on a file system without locks; every claim succeeds then.
    """

    def __init__(self, out: Path):
        self.path = out / CLAIMS
        while True:
            self.file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (open as long as the claims are held)
            self.available = self._lock(fcntl.LOCK_SH, PRESENT, 1)
            try:
                if os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
                    return
            except FileNotFoundError:
                pass
            self.file.close()  # the last process at work before us has just removed it

    def _lock(self, operation: int, start: int, length: int) -> bool:
        try:
            fcntl.lockf(self.file, operation, length, start)
        except OSError as error:
            if error.errno not in BUSY:  # no locks here
                self.available = False
            return False
        return True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let one process at a time look at the folder's settings and write them."""
        self._lock(fcntl.LOCK_EX, OPENING, 1)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_UN, OPENING, 1)

    def take(self, index: int) -> bool:
        """Claim item `index`; False when another process has it."""
        return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, FIRST_ITEM + index, 1) or not self.available

    def release(self, index: int) -> None:
        """Give item `index` back."""
        self._lock(fcntl.LOCK_UN, FIRST_ITEM + index, 1)

    def close(self) -> None:
        """Give everything back; the last process to leave removes the file, and what killed ones left half written."""
        if not self.file.closed:
            with contextlib.suppress(OSError):
                if self.available and self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 0):
                    for path in self.path.parent.iterdir():
                        if HALF_WRITTEN.fullmatch(path.name):
                            path.unlink(missing_ok=True)
                    self.path.unlink(missing_ok=True)
            self.file.close()
