"""Images from files: read, cut to a shape, and put into the numbers that a model takes; and the folder of images."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from tqdm.auto import tqdm

from ..errors import UserError
from ..image_files import turn_upright, upright_size
from .buckets import Size, assign
from .captions import METADATA, captions_by_name, read_listing
from .data import Sample, UnreadableSample

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
BROKEN = (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageSamples:
    """What folders and datasets of images have in common: shapes, and how an image becomes a sample.

    Args:
        size: of the square, in pixels; where there are buckets theirs count.
        channels: 3 or 1 (greyscale).
        flip: mirror half of the images, drawn anew in every epoch.
    """

    latent_shape = None
    text_cached = False
    shared_conditions: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, size: int, channels: int, flip: bool) -> None:
        self.size, self.channels, self.flip = size, channels, flip
        self.captioned = False
        self.shapes: list[tuple[int, ...]] | None = None
        self._shape_of: list[int] = []

    def shape_of(self, index: int) -> int:
        """The place in `shapes` of the shape of image `index`."""
        return 0 if self.shapes is None else self._shape_of[index]

    def _set_buckets(self, buckets: dict[Size, float] | None, read: Callable[[int], Size | None], count: int) -> None:
        if buckets is None:
            return
        with ThreadPoolExecutor(min(16, 4 * (os.cpu_count() or 1))) as pool:
            sizes = pool.map(read, range(count), chunksize=256)
            bar = {"unit": "image", "delay": 5, "leave": False, "dynamic_ncols": True}
            bar["disable"] = os.environ.get("RANK", "0") != "0"  # one for all processes
            self.shapes, self._shape_of = assign([*tqdm(sizes, "reading image sizes", count, **bar)], buckets)

    def _sample(
        self,
        index: int,
        path: Path | str,
        content: bytes | None,
        generator: torch.Generator,
        label: int | torch.Tensor | None,
        text: str | None,
    ) -> Sample:
        size = self.size if self.shapes is None else self.shapes[self._shape_of[index]]
        image = load_image(path, size, self.channels, content)
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = image.flip(-1)
        conditions = {} if label is None else {"class_labels": torch.as_tensor(label, dtype=torch.long)}
        return Sample(image, conditions=conditions, text=text)


class ImageFolder(ImageSamples):
    """Images in a folder, with their classes or their captions.

    For families that take classes they lie in class sub-folders (`class_names` in order: numeric names by value, others
    by letter), and captions from a `metadata.jsonl` may be there. For those that take text each has a caption (see
    `captions`), and sub-folders mean nothing. Images are scaled to cover their shape and centre-cropped as in ADM and
    DiT, transparency is laid on white, and each becomes (channels, height, width) float32 in [-1, 1].

    Args:
        size, channels, flip: as for `ImageSamples`.
        class_names: classes of the training images, where these are held-out ones.
        takes_text: whether captions are asked for instead of classes.
        buckets: of `open_buckets`; None for the square.

    Raises:
        UserError: when there are no images, classes or captions as expected.
    """

    def __init__(
        self,
        root: str | Path,
        size: int,
        channels: int = 3,
        flip: bool = False,
        class_names: list[str] | None = None,
        *,
        takes_text: bool = False,
        buckets: dict[Size, float] | None = None,
    ):
        super().__init__(size, channels, flip)
        self.root = Path(root)
        if not self.root.is_dir():
            raise UserError(f"image folder {self.root} does not exist")
        names = list_files(self.root, IMAGE_SUFFIXES)
        self.class_names: list[str] = []
        self.captions: dict[str, str] = {}
        if takes_text:
            if not names:
                raise UserError(f"image folder {self.root} has no images ({', '.join(IMAGE_SUFFIXES)})")
            self.files: list[tuple[str, str | None]] = [(name, None) for name in names]
            self.captions, self.captioned = captions_by_name(self.root, names), True
        else:
            self._set_classes(names, class_names)
            if (self.root / METADATA).is_file():
                self.captions = {name: text for name, (_, text) in read_listing(self.root / METADATA).items()}
        content: Any = [name for name, _ in self.files]
        if takes_text:
            content = [[name, self.captions[name]] for name in content]
        self.fingerprint = f"{len(self)} images, {hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"
        self._set_buckets(buckets, lambda index: image_size(self.root / self.files[index][0]), len(self))

    def _set_classes(self, names: Sequence[str], class_names: list[str] | None) -> None:
        classes = sorted({name.split("/")[0] for name in names if "/" in name}, key=_order)
        place = {name: i for i, name in enumerate(classes)}
        owned = [(name, name.split("/")[0]) for name in names if "/" in name]
        self.files = sorted(owned, key=lambda file: place[file[1]])
        if not self.files:
            raise UserError(
                f"image folder {self.root} has no images in class sub-folders; "
                f"CLASS/IMAGE with one of {', '.join(IMAGE_SUFFIXES)} is expected"
            )
        self.class_names = class_names or classes
        unknown = [name for name in classes if name not in self.class_names]
        if unknown:
            raise UserError(f"image folder {self.root} has class {unknown[0]!r}, which the training images do not have")

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, generator: torch.Generator) -> Sample:
        name, owner = self.files[index]
        label = None if owner is None else self.class_names.index(owner)
        return self._sample(index, self.root / name, None, generator, label, self.captions.get(name))


def list_files(root: Path, suffixes: Sequence[str]) -> list[str]:
    """The files below `root` that no hidden folder holds, as paths within it, in order of their parts."""
    names = []
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        place = Path(folder).relative_to(root).as_posix()
        for name in files:
            if os.path.splitext(name)[1].lower() in suffixes and not name.startswith("."):
                names.append(name if place == "." else f"{place}/{name}")
    return sorted(names, key=lambda name: name.split("/"))


def load_image(
    path: Path | str, size: int | Sequence[int], channels: int, content: bytes | None = None
) -> torch.Tensor:
    """Read an image, upright as its EXIF data say, and cut it to `size`: (channels, height, width) float32 in [-1, 1].

    Args:
        size: (height, width), or the side of a square.
        content: what is in the file where that is not to be read.

    Raises:
        UnreadableSample: with the path.
    """
    try:
        with Image.open(path if content is None else io.BytesIO(content)) as opened:
            turn_upright(opened)
            image = _without_transparency(opened).convert("L" if channels == 1 else "RGB")
    except BROKEN as error:
        # Pillow would name the object that it reads from, which is another one each time.
        reason = "it is of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise UnreadableSample(f"image {path} cannot be read: {reason}") from None
    pixels = np.array(centre_crop(image, size), dtype=np.float32)
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], channels).permute(2, 0, 1) / 127.5 - 1


def image_size(file: Path | str | BinaryIO) -> Size | None:
    """(height, width) of the upright image, from the head of its file; None where it cannot be read."""
    try:
        with Image.open(file) as opened:
            return upright_size(opened)
    except BROKEN:
        return None


def centre_crop(image: Image.Image, size: int | Sequence[int]) -> Image.Image:
    """Shrink the image until it just covers `size` and cut the middle, as ADM (guided-diffusion) and DiT do it.

    Args:
        size: (height, width), or the side of a square.
    """
    height, width = (size, size) if isinstance(size, int) else size
    while image.height >= 2 * height and image.width >= 2 * width:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(height / image.height, width / image.width)
    covering = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    if covering != image.size:
        image = image.resize(covering, Image.Resampling.BICUBIC)
    left, top = (covering[0] - width) // 2, (covering[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


def _without_transparency(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _order(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
