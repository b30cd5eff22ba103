"""Which files of a pipeline a cache is known to have been made with, so that they need not be loaded to be compared."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .checkpoints import write_whole
from .config import ModelOptions

KNOWN = "known_parts.json"  # in the cache's folder: signatures


def files_signature(options: ModelOptions, family: str, names: Collection[str]) -> str | None:
    """Places, sizes and times of the files of the parts `names`; None where they are not on this machine.

    To be asked before the parts are loaded: what changes after that is then noticed the next time. The time of a file's
    last change of any kind is among these, because copying and unpacking set the other one to that of the original.
    """
    path = options.components or options.pretrained
    if path is None:
        return None
    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
            return None
    files = sorted(file for name in names for file in (folder / name).rglob("*") if file.is_file())
    if not files:
        return None
    listing = [
        (file.relative_to(folder).as_posix(), str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for file, stat in ((file, file.stat()) for file in files)
    ]
    return hashlib.sha256(json.dumps([family, listing]).encode()).hexdigest()[:32]


def is_known(cache: Path, signature: str | None) -> bool:
    """Whether the cache has been compared with these very files before."""
    return signature is not None and signature in _read(cache)


def remember(cache: Path, signature: str | None) -> None:
    """Note that the cache was made with parts that equal those in these files."""
    known = _read(cache)
    if signature is not None and signature not in known:
        with contextlib.suppress(OSError):  # a cache that cannot be written to is compared every time
            write_whole(cache / KNOWN, json.dumps([*known, signature]) + "\n")


def _read(cache: Path) -> list[str]:
    try:
        known = json.loads((cache / KNOWN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return known if isinstance(known, list) else []
