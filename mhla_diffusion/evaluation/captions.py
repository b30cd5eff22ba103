"""Which text belongs to which image: caption sets, and folders of images that were generated from prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import UserError
from ..text_files import read_lines, read_objects
from ..training import captions as folder_captions
from .images import ImageSet

GENERATED = "labels.jsonl"  # what generation writes beside its images
FILE = "caption file"
FILE_KEYS, TEXT_KEYS = ("file", "file_name"), ("prompt", "text", "caption")


def read_captions(images: ImageSet, captions: str | Path | None = None) -> list[str]:
    """The text of each image of a folder, in the folder's order.

    Args:
        images: the folder.
        captions: a `.jsonl` file whose lines hold `file` or `file_name` (or `name`, without suffix, as a prompt file
            has it) and `prompt` or `text`, or lines with a text alone, which belong to the images in the order of their
            paths; any other suffix: text, one caption a line, in that order. None: what lies in the folder,
            `labels.jsonl` (written by generation), else `metadata.jsonl` or a `.txt` file beside each image, as for
            training.

    Raises:
        UserError: no captions, an unreadable file, an image without a text or with an empty one, a text whose image
            is missing, or two texts for one image.
    """
    names = [images.name(index) for index in range(len(images))]
    if captions is None:
        if not images.files:
            raise UserError(f"the images in {str(images.path)!r} have no captions; name a file of captions")
        captions = images.path / GENERATED
        if not captions.is_file():
            found = folder_captions.captions_by_name(images.path, names)
            return [found[name] for name in names]
    source = Path(captions)
    files = {str(PurePosixPath(name).with_suffix("")): name for name in names}
    is_jsonl = source.suffix == ".jsonl"
    entries = _read_jsonl(source, files) if is_jsonl else [(None, t) for _, t in read_lines(source, FILE)]
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
    listing = images.path / folder_captions.METADATA
    if not images.files or not listing.is_file():
        return images
    named = folder_captions.read_listing(listing)
    if not named:
        raise UserError(f"{str(listing)!r} names no images")
    for name in named:
        if not (images.path / name).is_file():
            raise UserError(f"{str(listing)!r} names {name!r}, which is missing")
    images.select(named)
    return images


def _read_jsonl(path: Path, files: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """File and text of each line; `files` gives the file of a name without suffix."""
    entries = []
    for place, entry in read_objects(path, FILE):
        texts = [entry[key] for key in TEXT_KEYS if key in entry]
        if not texts:
            raise UserError(f"{place} holds no text: one of {', '.join(TEXT_KEYS)} is needed")
        names = [entry[key] for key in FILE_KEYS if key in entry]
        if not names and entry.get("name") is not None:
            names = [files.get(str(entry["name"]), entry["name"])]
        entries.append((PurePosixPath(str(names[0])).as_posix() if names else None, _checked(texts[0], place)))
    return entries


def _checked(text: Any, place: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place} has the text {text!r}; text that is not empty is needed")
    return text.strip()
