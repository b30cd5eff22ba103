"""Two small real data sets as image folders: scikit-learn's handwritten digits, and the Noto emoji."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..errors import UserError
from .checkpoints import whole_folder

EMOJI_PACKAGE = "emoji-datasource-google@16"
SKIN_TONES = {"1F3FB": "light", "1F3FC": "medium-light", "1F3FD": "medium", "1F3FE": "medium-dark", "1F3FF": "dark"}


class Entry(NamedTuple):
    """One image of a data set to be written."""

    split: str
    class_name: str
    name: str
    image: Image.Image
    text: str | None = None


def write_digits(out: str | Path, size: int = 16) -> dict[str, int]:
    """Write scikit-learn's 1,797 digits as OUT/{train,test}/DIGIT/NNNN.png; every fifth of a digit is held out.

    Args:
        size: 8, the scans themselves, or 16, enlarged bilinearly.

    Returns the number of images per split. Raises `UserError` when `out` is not empty or `size` is another.
    """
    if size not in (8, 16):
        raise UserError(f"--size {size} is not possible for digits; 8 and 16 are accepted")
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen: Counter[int] = Counter()
    entries = []
    for number, (scan, digit) in enumerate(zip(digits.images, digits.target.tolist(), strict=True)):
        image = Image.fromarray((scan * (255 / 16)).round().astype(np.uint8))
        split = "test" if seen[digit] % 5 == 4 else "train"
        seen[digit] += 1
        entries.append(
            Entry(split, str(digit), f"{number:04d}.png", image.resize((size, size), Image.Resampling.BILINEAR))
        )
    return _write(out, entries)


def write_emoji(out: str | Path, size: int = 64) -> dict[str, int]:
    """Write the Noto emoji of the npm package as OUT/{train,test}/CATEGORY/CODE.png with captions in metadata.jsonl.

    Every tenth emoji of a category is held out, together with its skin tones. Transparency is laid on white.

    Args:
        size: side in pixels, 64 or less.

    Returns the number of images per split. Raises `UserError` when npm is missing or fails.
    """
    if not 8 <= size <= 64:
        raise UserError(f"--size {size} is not possible for emoji; 8 to 64 is accepted")
    _check_empty(Path(out))
    if shutil.which("npm") is None:
        raise UserError(
            "the emoji images are fetched with npm, which is not installed; install Node.js (it brings npm)"
        )
    with tempfile.TemporaryDirectory() as folder:
        archive = _npm_pack(EMOJI_PACKAGE, Path(folder))
        images = Path(folder) / "images"
        images.mkdir()
        with tarfile.open(archive) as package:
            for member in package:
                if member.name == "package/emoji.json":
                    table = json.load(package.extractfile(member))
                elif member.name.startswith("package/img/google/64/"):
                    (images / Path(member.name).name).write_bytes(package.extractfile(member).read())
        return _write(out, _emoji_entries(table, images, size))


def _emoji_entries(table: list[dict[str, Any]], images: Path, size: int) -> Iterable[Entry]:
    seen: Counter[str] = Counter()
    for row in sorted(table, key=lambda row: row["sort_order"]):
        category = re.sub(r"[^a-z]+", "-", row["category"].lower())
        split = "test" if seen[category] % 10 == 9 else "train"
        seen[category] += 1
        name = (row["name"] or row["short_name"].replace("_", " ")).lower()
        forms = [(row["image"], name)]
        for code, form in row.get("skin_variations", {}).items():
            tones = " and ".join(SKIN_TONES[part] for part in code.split("-"))
            forms.append((form["image"], f"{name}, {tones} skin"))
        for file, text in forms:
            if (images / file).is_file():
                image = Image.open(images / file).convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
                yield Entry(split, category, file, image.resize((size, size), Image.Resampling.LANCZOS), text)


def _npm_pack(package: str, folder: Path) -> Path:
    done = subprocess.run(["npm", "pack", "--silent", package], cwd=folder, capture_output=True, text=True)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[0]
        raise UserError(f"npm pack {package} failed ({reason}); check that npm can reach its registry")
    return archives[0]


def _write(out: str | Path, entries: Iterable[Entry]) -> dict[str, int]:
    out = Path(out)
    _check_empty(out)
    counts = Counter({"train": 0, "test": 0})
    captions: dict[str, list[str]] = {"train": [], "test": []}
    try:
        with whole_folder(out, synced=False) as folder:
            for entry in entries:
                place = folder / entry.split / entry.class_name
                place.mkdir(parents=True, exist_ok=True)
                entry.image.save(place / entry.name)
                counts[entry.split] += 1
                if entry.text is not None:
                    row = {"file_name": f"{entry.class_name}/{entry.name}", "text": entry.text}
                    captions[entry.split].append(json.dumps(row, ensure_ascii=False) + "\n")
            for split, lines in captions.items():
                if lines:
                    (folder / split / "metadata.jsonl").write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}") from None
    return dict(counts)


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; choose a new folder")
