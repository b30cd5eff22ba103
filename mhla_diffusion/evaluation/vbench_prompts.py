"""VBench's prompts and the videos that are made from them, under the names that its tools look for.

VBench finds sample k of a prompt as `{prompt}-{k}.mp4`. Five samples are made of each prompt, and 25 of those for
temporal flickering, which VBench's static filter then chooses five from (Vchitect/VBench, `prompts/README.md`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..text_files import read_lines
from .vbench_dimensions import DIMENSIONS, dimension_named

SAMPLES, FLICKERING_SAMPLES = 5, 25
SUFFIX = ".mp4"
VIDEO_FOLDER = "videos"
NAME_BYTES = 230  # of the 255 that file systems allow, less "-24.mp4" and what a temporary name adds
CUT = 180  # characters that VBench-2.0 keeps of a prompt that is too long for a file name


@dataclass(frozen=True)
class Prompt:
    """One line of the suite.

    Attributes:
        text: the prompt as VBench has it; file names and its text scores use this one.
        dimensions: what its videos are scored for.
        entry: the suite's entry as VBench's functions expect it (`prompt_en`, `dimension`, `auxiliary_info`).
        generated_from: what the model is given: the text itself, or a longer version of it.
    """

    text: str
    dimensions: tuple[str, ...]
    entry: dict[str, Any]
    generated_from: str

    @property
    def samples(self) -> int:
        """How many videos are made of it."""
        return FLICKERING_SAMPLES if "temporal_flickering" in self.dimensions else SAMPLES


def read_suite(
    path: str | Path, dimensions: Collection[str] | None = None, augmented: str | Path | None = None
) -> list[Prompt]:
    """Read VBench's prompts.

    Args:
        path: `VBench_full_info.json`, the folder `prompts_per_dimension`, or one file of that folder. What object or
            colour to look for stands only in the JSON file.
        dimensions: only prompts of these; None: all.
        augmented: a text file with a longer version of each prompt, line by line in the order of the whole suite, as
            VBench provides them for Wan2.1; the videos are made from these and named after the originals.

    Raises:
        UserError: a missing or unreadable file, an entry without prompt or dimension, an unknown dimension, another
            number of lines, or no prompts at all.

    Entries that stand twice stay twice: VBench counts their videos twice.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(file for file in path.glob("*.txt") if _dimensions_of(file))
        if not files:
            raise UserError(f"the folder {str(path)!r} holds no prompt file of a dimension, as scene.txt")
        prompts = [prompt for file in files for prompt in _read_text(file)]
    elif path.suffix == ".json":
        prompts = _read_json(path)
    elif path.suffix == ".txt" and path.is_file():
        prompts = _read_text(path)
    else:
        what = "is neither a .json nor a .txt file" if path.exists() else "does not exist"
        raise UserError(f"VBench's prompts {str(path)!r}: this {what}; give VBench_full_info.json or a folder of .txt")
    if augmented is not None:
        prompts = _augmented(prompts, augmented)
    if dimensions is not None:
        wanted = {dimension_named(name).name for name in dimensions}
        prompts = [prompt for prompt in prompts if wanted & set(prompt.dimensions)]
    if not prompts:
        of = f" of {', '.join(sorted(wanted))}" if dimensions is not None else ""
        raise UserError(f"{str(path)!r} holds no prompts{of}")
    return prompts


def video_name(prompt: str, sample: int) -> str:
    """The name, without suffix, of a prompt's video: `{prompt}-{sample}` as VBench has it, where that is a file name.

    A prompt that cannot be one (a slash or a control character, a dot in front, too long, spaces at its ends) is cut
    to its first 180 characters, has the offending characters replaced by `_`, and gets a hash, so that two never meet.
    """
    stem = re.sub(r"[/\x00-\x1f\x7f]", "_", prompt).strip()
    if stem.startswith("."):
        stem = "_" + stem[1:]
    if stem != prompt or len(prompt.encode()) > NAME_BYTES or not prompt:
        digest = hashlib.sha256(prompt.encode()).hexdigest()[:8]
        stem = stem[:CUT].strip()
        while len(stem.encode()) > NAME_BYTES - 9:
            stem = stem[:-1]
        stem = f"{stem}~{digest}"
    return f"{stem}-{sample}"


def awkward_names(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Prompt → the stem of its videos' names, for those prompts that cannot be file names.

    VBench's own listing of a folder does not find these videos; `evaluate_videos` does.
    """
    stems = {prompt.text: video_name(prompt.text, 0).removesuffix("-0") for prompt in prompts}
    return {text: stem for text, stem in stems.items() if stem != text}


def conditions(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """What `generate_images` makes the videos from: prompt, file name, and a number that the random draw depends on.

    A video depends on the seed, its prompt and its sample number, not on which other prompts are made with it. A
    prompt that stands in the suite twice (two do) has its videos made once.
    """
    videos: dict[str, dict[str, Any]] = {}
    for prompt in prompts:
        for sample in range(prompt.samples):
            name = f"{VIDEO_FOLDER}/{video_name(prompt.text, sample)}"
            seed_index = _seed_index(prompt.text, sample)
            videos.setdefault(name, {"prompt": prompt.generated_from, "name": name, "seed_index": seed_index})
    return list(videos.values())


def check_file_system(prompts: Sequence[Prompt], folder: str | Path) -> None:
    """Raise a UserError where `folder` would take two prompts' names for one.

    VBench has prompts that differ in a capital only; a file system that ignores case would keep one of the two.
    """
    names: dict[str, str] = {}
    for prompt in prompts:
        other = names.setdefault(prompt.text.casefold(), prompt.text)
        if other != prompt.text and _ignores_case(Path(folder)):
            raise UserError(
                f"the file system of {str(folder)!r} ignores case and cannot hold the videos of both {other!r} and "
                f"{prompt.text!r}; choose a folder on one that tells them apart"
            )


def _read_json(path: Path) -> list[Prompt]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"VBench's prompts {str(path)!r} cannot be read ({error})") from None
    if not isinstance(entries, list):
        raise UserError(f"VBench's prompts {str(path)!r} hold no list of entries")
    prompts = []
    for number, entry in enumerate(entries, 1):
        text = entry.get("prompt_en") if isinstance(entry, dict) else None
        names = entry.get("dimension") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text.strip() or not isinstance(names, list) or not names:
            raise UserError(f"entry {number} of {str(path)!r} has no 'prompt_en' or no list 'dimension'")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"entry {number} of {str(path)!r} has a prompt that is not valid Unicode") from None
        dimensions = tuple(dimension_named(name).name for name in names)
        prompts.append(Prompt(text, dimensions, entry, text))
    return prompts


def _read_text(path: Path) -> list[Prompt]:
    dimensions = _dimensions_of(path)
    if not dimensions:
        raise UserError(
            f"{str(path)!r} does not say which dimension its prompts belong to; give VBench_full_info.json, the folder "
            "prompts_per_dimension, or a file named after a dimension"
        )
    lines = [line for _, line in read_lines(path, "prompt file")]
    return [Prompt(line, dimensions, {"prompt_en": line, "dimension": list(dimensions)}, line) for line in lines]


def _dimensions_of(path: Path) -> tuple[str, ...]:
    """The dimensions that are measured on the prompts of `scene.txt` and the like; () for other files."""
    return tuple(name for name, dimension in DIMENSIONS.items() if dimension.prompts == path.stem)


def _augmented(prompts: list[Prompt], path: str | Path) -> list[Prompt]:
    lines = [line for _, line in read_lines(path, "file of longer prompts")]
    if len(lines) != len(prompts):
        raise UserError(f"{str(path)!r} has {len(lines)} prompts, the suite {len(prompts)}; one line each is needed")
    return [replace(prompt, generated_from=line) for prompt, line in zip(prompts, lines, strict=True)]


def _seed_index(prompt: str, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{sample} {prompt}".encode()).digest()[:4], "big")


def _ignores_case(folder: Path) -> bool:
    while not folder.is_dir():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(prefix="case-a-", dir=folder) as file:
        return os.path.exists(os.path.join(folder, os.path.basename(file.name).replace("case-a-", "CASE-A-")))
