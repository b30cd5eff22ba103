"""Training data: what is read, in which order, and the random numbers that belong to each sample.

Sample number s of a run (s counts from 0, across epochs and optimiser steps) is always the same image with the same
crop, flip, noise and timestep: it is found from s and the seed alone. A run can therefore be cut at any step, spread
over any number of processes and read by any number of workers without changing what it computes.
"""

from __future__ import annotations

import hashlib
import io
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, Dataset

from ..backbones.family import Family
from ..errors import UserError
from ..randomness import sample_generator as sample_generator

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


# Order ---------------------------------------------------------------------------------------------------------------


class SampleOrder:
    """The endless sequence of samples: one random permutation of the data set after the other.

    `order[s]` is `(epoch, index)` of sample number s. Epochs follow each other without a gap, so no image is left out
    when the batch size does not divide their number.
    """

    def __init__(self, num_images: int, seed: int):
        self.num_images, self.seed = num_images, seed
        self._permutations: dict[int, list[int]] = {}

    def __getitem__(self, sample: int) -> tuple[int, int]:
        epoch, position = divmod(sample, self.num_images)
        if epoch not in self._permutations:
            generator = sample_generator(self.seed, "order", epoch)
            permutation = torch.randperm(self.num_images, generator=generator).tolist()
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1} | {epoch: permutation}
        return epoch, self._permutations[epoch][position]


def sample_order(source: ImageSource, seed: int, batch_size: int) -> SampleOrder:
    """The order in which training sees `source`; with several shapes every `batch_size` samples are of one."""
    return SampleOrder(len(source), seed)


@dataclass
class BatchPlan:
    """Which samples process `rank` of `num_processes` sees in each accumulation round, from `first_step` on.

    A step's samples are split into rounds, a round into processes: sample number =
    step·batch_size + (round·num_processes + rank)·local_batch_size + position.
    """

    order: SampleOrder
    batch_size: int
    rounds: int
    rank: int
    num_processes: int
    first_step: int
    last_step: int

    def __post_init__(self) -> None:
        shares = self.rounds * self.num_processes
        if self.batch_size % shares:
            raise UserError(
                f"train.batch_size is {self.batch_size}; a multiple of {shares} is accepted "
                f"({self.num_processes} processes × train.gradient_accumulation={self.rounds})"
            )
        self.local_batch_size = self.batch_size // shares

    def __len__(self) -> int:
        return (self.last_step - self.first_step) * self.rounds

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        size = self.local_batch_size
        for step in range(self.first_step, self.last_step):
            for part in range(self.rounds):
                first = step * self.batch_size + (part * self.num_processes + self.rank) * size
                yield [self.order[sample] for sample in range(first, first + size)]


# Images --------------------------------------------------------------------------------------------------------------


class UnreadableSample(UserError):
    """A damaged image or video; where there are few, another of the same shape is read in its place."""

    def __init__(self, path: str | Path, reason: object, kind: str = "image"):
        self.path = str(path)
        super().__init__(f"{kind} {path} cannot be read: {reason}")


class ImageSource(Protocol):
    """What the loop needs of a data set of images or videos."""

    class_names: list[str]  # [] where samples have captions only
    fingerprint: str
    latent_shape: tuple[int, ...] | None  # of one sample that comes encoded; None for pixels or when shapes differ
    captioned: bool  # every sample has a text
    text_cached: bool  # the samples' conditions hold what the text encoder says of their captions
    shared_conditions: dict[str, torch.Tensor]  # of a cache: conditions with one row for all samples, as null_embeds
    shapes: list[tuple[int, ...]] | None  # (height, width) or (frames, height, width) in pixels; None: all are alike

    def __len__(self) -> int: ...

    def shape_of(self, index: int) -> int:
        """The place in `shapes` of the shape of sample `index`; 0 where all are alike."""
        ...

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Sample `index`, with everything random about it (crop, flip) drawn from `generator`.

        Raises `UnreadableSample` for a damaged one.
        """
        ...


@dataclass
class Sample:
    """One training example: an image (C, H, W) or video (C, T, H, W) in [-1, 1], or what the VAE says of it.

    `conditions` are the tensors it is conditioned on.
    """

    image: torch.Tensor | None = None
    posterior: dict[str, torch.Tensor] = field(default_factory=dict)
    conditions: dict[str, torch.Tensor] = field(default_factory=dict)
    text: str | None = None


class ImageFolder:
    """Images in class sub-folders (`class_names` in order: numeric names by value, others by letter).

    A `metadata.jsonl` with `file_name` and `text` in each line adds captions. Images are centre-cropped as in ADM and
    DiT, transparency is laid on white, and each becomes (channels, size, size) float32 in [-1, 1].
    """

    latent_shape = None
    captioned = False
    text_cached = False
    shared_conditions: ClassVar[dict[str, torch.Tensor]] = {}
    shapes: list[tuple[int, ...]] | None = None

    def __init__(
        self, root: str | Path, size: int, channels: int = 3, flip: bool = False, class_names: list[str] | None = None
    ):
        self.root, self.size, self.channels, self.flip = Path(root), size, channels, flip
        if not self.root.is_dir():
            raise UserError(f"image folder {self.root} does not exist")
        found = sorted((p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=_order)
        self.files = [
            (f"{name}/{path.relative_to(self.root / name).as_posix()}", name)
            for name in found
            for path in sorted((self.root / name).rglob("*"))
            if path.suffix.lower() in IMAGE_SUFFIXES
        ]
        if not self.files:
            raise UserError(
                f"image folder {self.root} has no images in class sub-folders; "
                f"CLASS/IMAGE with one of {', '.join(IMAGE_SUFFIXES)} is expected"
            )
        self.class_names = class_names or [name for name in found if any(owner == name for _, owner in self.files)]
        unknown = sorted({owner for _, owner in self.files} - set(self.class_names), key=_order)
        if unknown:
            raise UserError(f"image folder {self.root} has class {unknown[0]!r}, which the training images do not have")
        self.labels = {name: label for label, name in enumerate(self.class_names)}
        self.captions = self._read_captions()
        listing = json.dumps([name for name, _ in self.files]).encode()
        self.fingerprint = f"{len(self.files)} images, {hashlib.sha256(listing).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.files)

    def shape_of(self, index: int) -> int:
        return 0

    def read(self, index: int, generator: torch.Generator) -> Sample:
        name, owner = self.files[index]
        image = load_image(self.root / name, self.size, self.channels)
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = image.flip(-1)
        label = torch.tensor(self.labels[owner], dtype=torch.long)
        return Sample(image, conditions={"class_labels": label}, text=self.captions.get(name))

    def _read_captions(self) -> dict[str, str]:
        path = self.root / "metadata.jsonl"
        if not path.is_file():
            return {}
        captions = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                captions[row["file_name"]] = row["text"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path}, line {number}, is not a JSON object with 'file_name' and 'text'") from None
        return captions


def load_image(path: Path | str, size: int, channels: int, content: bytes | None = None) -> torch.Tensor:
    """Read and centre-crop an image: (channels, size, size) float32 in [-1, 1]. Raises `UserError` with the path.

    `content` is what is in the file where that is not to be read.
    """
    try:
        with Image.open(path if content is None else io.BytesIO(content)) as opened:
            image = _without_transparency(opened).convert("L" if channels == 1 else "RGB")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UnreadableSample(path, error) from None
    pixels = np.array(centre_crop(image, size), dtype=np.float32)
    return torch.from_numpy(pixels).reshape(size, size, channels).permute(2, 0, 1) / 127.5 - 1


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Shrink the shorter side to `size` and cut the middle square, as in ADM (guided-diffusion) and DiT."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _without_transparency(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _order(name: str) -> tuple[int, int, str]:
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)


# Batches -------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Images (B, C, H, W) or their posteriors, conditions, captions, and the (epoch, index) of every sample."""

    images: torch.Tensor | None
    posterior: dict[str, torch.Tensor]
    conditions: dict[str, torch.Tensor]
    texts: list[str | None]
    keys: list[tuple[int, int]]
    skipped: list[str] = field(default_factory=list)  # damaged files in whose place others were read

    def generators(self, seed: int) -> list[torch.Generator]:
        """One CPU generator per sample, for its latent, noise, timestep and label dropout."""
        return [sample_generator(seed, "objective", epoch, index) for epoch, index in self.keys]

    def latents(
        self,
        family: Family,
        components: Mapping[str, Any],
        generators: list[torch.Generator],
        device: torch.device,
    ) -> torch.Tensor:
        """Scaled latents on `device`, one generator per sample: the images encoded, or only drawn from a cache."""
        if self.images is not None:
            return family.encode(components, self.images.to(device, non_blocking=True), generators)
        return family.draw_latents({name: value.to(device) for name, value in self.posterior.items()}, generators)


class _Reader(Dataset):
    """Reads one sample; an error that the user should see travels as a value, which keeps its sentence whole."""

    def __init__(self, source: ImageSource, seed: int):
        self.source, self.seed = source, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[tuple[int, int], Sample] | UserError:
        try:
            return key, self.source.read(key[1], sample_generator(self.seed, "image", *key))
        except UserError as error:
            return error


def _collate(items: list[Any]) -> Batch | UserError:
    for item in items:
        if isinstance(item, UserError):
            return item
    keys, samples = zip(*items, strict=True)
    images = None if samples[0].image is None else torch.stack([s.image for s in samples])
    posterior = {name: torch.stack([s.posterior[name] for s in samples]) for name in samples[0].posterior}
    conditions = {name: torch.stack([s.conditions[name] for s in samples]) for name in samples[0].conditions}
    return Batch(images, posterior, conditions, [s.text for s in samples], list(keys))


def _ignore_sigterm(worker: int) -> None:
    # A cluster warns the whole process group; the training process decides when its readers end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def read_batches(source: ImageSource, plan: Any, seed: int, num_workers: int) -> Iterator[Batch]:
    """Yield the batches of `plan` (an iterable of lists of (epoch, index)), read ahead by `num_workers` processes.

    Raises `UserError` with the path of an image that cannot be read.
    """
    loader = DataLoader(
        _Reader(source, seed),
        batch_sampler=plan,
        num_workers=num_workers,
        collate_fn=_collate,
        worker_init_fn=_ignore_sigterm,
        generator=torch.Generator(),  # the loader's own seed must not be taken from, nor move, the global one
        pin_memory=torch.cuda.is_available(),
    )
    for batch in loader:
        if isinstance(batch, UserError):
            batch.of_one_process = True  # the other processes do not know of it, so this one has to say it
            raise batch
        yield batch
