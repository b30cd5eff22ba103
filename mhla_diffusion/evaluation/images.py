"""Reading the images that are to be scored, and noticing what is odd about them.

A set of images is a folder (searched with its sub-folders, in the order of the paths) or an `.npz` file with `arr_0`,
the uint8 array (N, H, W, 3) that the ADM evaluation suite reads. Both are read in batches, so that neither has to fit
in memory.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import UserError
from ..image_files import turn_upright

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
LOSSY_FORMATS = ("JPEG", "MPO", "WEBP")


class ImageSet:
    """Images in a folder or an `.npz` file.

    Args:
        path: the folder, or the file with `arr_0`.
        role: what the images are ("generated", "reference"), for messages.

    Raises:
        UserError: the path does not exist or holds no images.
    """

    def __init__(self, path: str | Path, role: str = "image"):
        self.path, self.role = Path(path), role
        self.files: list[Path] = []
        self.sizes: Counter = Counter()
        self.unreadable: list[str] = []
        self.grey = self.transparent = self.lossy = self.deep = self.read = 0
        if self.path.is_dir():
            self.files = sorted(f for f in self.path.rglob("*") if f.suffix.lower() in EXTENSIONS and f.is_file())
            self.files = [f for f in self.files if not f.name.startswith(".")]
            if not self.files:
                raise UserError(
                    f"the {role} folder {str(self.path)!r} holds no images ({', '.join(e[1:] for e in EXTENSIONS)})"
                )
            self._length = len(self.files)
        elif self.path.is_file() and self.path.suffix == ".npz":
            if "arr_0" not in npz_keys(self.path):
                raise UserError(f"{str(self.path)!r} holds no image array 'arr_0'")
            self._shape = self._read_npz_header()
            self._length = self._shape[0]
        elif self.path.exists():
            raise UserError(f"{role} {str(self.path)!r} is neither a folder of images nor an .npz file")
        else:
            raise UserError(f"{role} {str(self.path)!r} does not exist")

    def __len__(self) -> int:
        return self._length

    def select(self, names: Iterable[str]) -> None:
        """Keep only these files of the folder (paths relative to it), in the order of their paths."""
        self.files = sorted(self.path / name for name in set(names))
        self._length = len(self.files)

    def name(self, index: int) -> str:
        """The file name of image `index`, relative to the folder."""
        return self.files[index].relative_to(self.path).as_posix() if self.files else f"{index:06d}"

    def batches(self, batch_size: int, workers: int = 4) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (indices, images), images uint8 (B, 3, H, W) of one size per batch, each readable image once.

        Images of different sizes go to different batches, so the indices are in order only if all sizes are equal.
        """
        waiting: dict[tuple[int, int], list[tuple[int, np.ndarray]]] = defaultdict(list)
        for index, pixels in self._decode(workers):
            if pixels is None:
                continue
            size = pixels.shape[:2]
            waiting[size].append((index, pixels))
            if len(waiting[size]) == batch_size:
                yield _stack(waiting.pop(size))
            elif sum(map(len, waiting.values())) >= 16 * batch_size:
                # Photographs may all differ in size; they must not pile up until the end.
                yield from map(_stack, waiting.values())
                waiting.clear()
        for group in waiting.values():
            yield _stack(group)

    def _decode(self, workers: int) -> Iterator[tuple[int, np.ndarray | None]]:
        if not self.files:
            yield from enumerate(self._decode_npz())
            return
        with ThreadPoolExecutor(max(1, workers)) as pool:
            # Windows keep the decoded images in memory few; `map` alone would decode the whole folder ahead.
            for start in range(0, len(self.files), 512):
                window = range(start, min(start + 512, len(self.files)))
                for index, decoded in zip(window, pool.map(lambda i: _decode_file(self.files[i]), window), strict=True):
                    if isinstance(decoded, str):
                        self.unreadable.append(f"{self.name(index)}: {decoded}")
                        yield index, None
                        continue
                    pixels, traits = decoded
                    self.read += 1
                    self.sizes[f"{pixels.shape[1]}x{pixels.shape[0]}"] += 1
                    for trait in traits:
                        setattr(self, trait, getattr(self, trait) + 1)
                    yield index, pixels

    def _read_npz_header(self) -> tuple[int, ...]:
        with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as stream:
            shape, fortran, dtype = _npy_header(stream)
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3) or fortran or shape[0] == 0:
            raise UserError(
                f"'arr_0' of {str(self.path)!r} must be a uint8 array (N, H, W, 3), got {dtype} {tuple(shape)}"
            )
        return shape

    def _decode_npz(self) -> Iterator[np.ndarray]:
        count, height, width, channels = self._shape
        with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as stream:
            _npy_header(stream)
            for index in range(count):
                raw = stream.read(height * width * channels)
                if len(raw) < height * width * channels:
                    raise UserError(f"'arr_0' of {str(self.path)!r} is cut off after {index} of {count} images")
                pixels = np.frombuffer(raw, np.uint8).reshape(height, width, channels)
                self.read += 1
                self.sizes[f"{width}x{height}"] += 1
                if channels == 1:
                    self.grey += 1
                yield np.repeat(pixels, 3, axis=2) if channels == 1 else pixels

    def notes(self, grey_expected: bool = False) -> list[str]:
        """What a reader of the score should know about the images read so far, one sentence each."""
        notes, read, role = [], self.read, self.role
        if self.unreadable:
            shown = "; ".join(self.unreadable[:3]) + ("; …" if len(self.unreadable) > 3 else "")
            notes.append(f"{len(self.unreadable)} {role} files could not be read and were left out ({shown}).")
        if len(self.sizes) > 1:
            shown = ", ".join(f"{count} of {size}" for size, count in self.sizes.most_common(3))
            notes.append(
                f"The {role} images have {len(self.sizes)} different sizes ({shown}); each was resized by itself."
            )
        if self.grey and not grey_expected:
            notes.append(f"{self.grey} of {read} {role} images are greyscale and were scored as grey RGB.")
        if self.transparent:
            notes.append(f"{self.transparent} of {read} {role} images are transparent and were laid on white.")
        if self.deep:
            notes.append(f"{self.deep} of {read} {role} images have 16 bits per channel and were reduced to 8.")
        if self.lossy:
            notes.append(
                f"{self.lossy} of {read} {role} images are lossy (JPEG or WebP); compression made after generation or "
                "resizing changes the score."
            )
        return notes


def npz_keys(path: str | Path) -> list[str]:
    """Names of the arrays in an `.npz` file.

    Raises:
        UserError: the file cannot be read as one.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{str(path)!r} cannot be read as an .npz file ({error})") from None


def read_labels(folder: str | Path) -> dict[str, int]:
    """The requested class of each file in a folder that `generate_images` wrote; empty where there is none."""
    path = Path(folder) / "labels.jsonl"
    if not path.is_file():
        return {}
    labels = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if isinstance(entry.get("class_labels"), int):
                    labels[entry["file"]] = entry["class_labels"]
            except (ValueError, KeyError, AttributeError):
                raise UserError(f"line {number} of {str(path)!r} is not a label: {line.strip()[:60]!r}") from None
    return labels


def _stack(group: list[tuple[int, np.ndarray]]) -> tuple[list[int], Tensor]:
    pixels = torch.from_numpy(np.stack([array for _, array in group]))
    return [index for index, _ in group], pixels.permute(0, 3, 1, 2).contiguous()


def _decode_file(path: Path) -> tuple[np.ndarray, list[str]] | str:
    """Pixels (H, W, 3) uint8 and the traits to count, or the reason why the file cannot be read."""
    traits = []
    try:
        with Image.open(path) as image:
            if image.format in LOSSY_FORMATS:
                traits.append("lossy")
            turn_upright(image)
            if image.mode.startswith("I") or image.mode == "F":
                # Pillow clips 16-bit values at 255 when it converts them.
                array = np.asarray(image, dtype=np.float64) / 257
                image = Image.fromarray(array.clip(0, 255).round().astype(np.uint8))
                traits.append("deep")
            if image.mode in ("L", "LA", "1"):
                traits.append("grey")
            if image.mode in ("LA", "PA", "RGBA", "La", "RGBa") or "transparency" in image.info:
                image = image.convert("RGBA")
                if image.getextrema()[3][0] < 255:
                    traits.append("transparent")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return np.asarray(image.convert("RGB")), traits
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return str(error) or type(error).__name__


def _npy_header(stream) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return reader(stream)
