"""Which text belongs to which image: caption sets, and folders of images that were generated from prompts."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import UserError
from .images import ImageSet

CAPTION_FILES = ("labels.jsonl", "metadata.jsonl")
FILE_KEYS, TEXT_KEYS = ("file", "file_name"), ("prompt", "text", "caption")


def read_captions(images: ImageSet, captions: str | Path | None = None) -> list[str]:
    """The text of each image of a folder, in the folder's order.

    Args:
        images: the folder.
        captions: a `.jsonl` file whose lines hold `file` or `file_name` and `prompt` or `text`, or lines with a text
            alone, which belong to the images in the order of their paths; any other suffix: text, one caption a line,
            in that order. None: `labels.jsonl` (written by generation) or `metadata.jsonl` in the folder, else a
            `.txt` file beside each image.

    Raises:
        UserError: no captions, an unreadable file, an image without a text or with an empty one, a text whose image
            is missing, or two texts for one image.
    """
    names = [images.name(index) for index in range(len(images))]
    source = Path(captions) if captions is not None else _found(images)
    if source is None:
        return [_beside(images.path / name, images.path) for name in names]
    entries = _read_jsonl(source) if source.suffix == ".jsonl" else _read_lines(source)
    if all(name is None for name, _ in entries):
        if len(entries) != len(names):
            raise UserError(
                f"{str(source)!r} has {len(entries)} captions without file names, {str(images.path)!r} has "
                f"{len(names)} images; equal numbers are needed"
            )
        return [text for _, text in entries]
    texts: dict[str, str] = {}
    for number, (name, text) in enumerate(entries, 1):
        if name is None:
            raise UserError(f"caption {number} of {str(source)!r} names no file, others do")
        if texts.setdefault(name, text) != text:
            raise UserError(f"{str(source)!r} has two captions for {name!r}")
    if missing := sorted(texts.keys() - set(names)):
        raise UserError(
            f"{len(missing)} of the {len(texts)} images that {str(source)!r} names are missing in "
            f"{str(images.path)!r}, the first is {missing[0]!r}"
        )
    if unnamed := [name for name in names if name not in texts]:
        raise UserError(
            f"{len(unnamed)} of {len(names)} images have no caption in {str(source)!r}, the first is {unnamed[0]!r}"
        )
    return [texts[name] for name in names]


def caption_set(path: str | Path, role: str = "reference") -> ImageSet:
    """The images of a caption set: those that its `metadata.jsonl` names; without one, all images of the folder.

    Raises:
        UserError: a folder without images, or a named image that is missing.
    """
    images = ImageSet(path, role)
    listing = images.path / "metadata.jsonl"
    if not images.files or not listing.is_file():
        return images
    named = dict.fromkeys(name for name, _ in _read_jsonl(listing) if name is not None)
    if not named:
        return images
    for name in named:
        if not (images.path / name).is_file():
            raise UserError(f"{str(listing)!r} names {name!r}, which is missing")
    images.select(named)
    return images


def _found(images: ImageSet) -> Path | None:
    """The file of captions in a folder; None where the texts lie beside the images."""
    if not images.files:
        raise UserError(f"the images in {str(images.path)!r} have no captions; name a file of captions")
    for name in CAPTION_FILES:
        if (images.path / name).is_file():
            return images.path / name
    if images.files[0].with_suffix(".txt").is_file():
        return None
    raise UserError(
        f"the folder {str(images.path)!r} holds no captions: neither {' nor '.join(CAPTION_FILES)} nor "
        f"{images.files[0].with_suffix('.txt').name!r} beside {images.files[0].name!r}; name a file of captions"
    )


def _beside(image: Path, folder: Path) -> str:
    path = image.with_suffix(".txt")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the caption {path.relative_to(folder).as_posix()!r} cannot be read ({reason})") from None
    return _checked(text, f"the caption {path.relative_to(folder).as_posix()!r}")


def _read_lines(path: Path) -> list[tuple[None, str]]:
    return [(None, line.strip()) for _, line in _numbered_lines(path)]


def _read_jsonl(path: Path) -> list[tuple[str | None, str]]:
    entries = []
    for number, line in _numbered_lines(path):
        place = f"line {number} of {str(path)!r}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{place} is not JSON ({error})") from None
        texts = [entry[key] for key in TEXT_KEYS if key in entry] if isinstance(entry, dict) else []
        if not texts:
            raise UserError(f"{place} holds no text: one of {', '.join(TEXT_KEYS)} is needed, got {line[:60]!r}")
        names = [entry[key] for key in FILE_KEYS if key in entry]
        entries.append((Path(str(names[0])).as_posix() if names else None, _checked(texts[0], place)))
    return entries


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty. Raises `UserError` when the file cannot be read or holds none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the caption file {str(path)!r} cannot be read ({reason})") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"the caption file {str(path)!r} is empty")
    return lines


def _checked(text: object, place: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place} has the text {text!r}; text that is not empty is needed")
    return text.strip()
