"""Training data: what is read, in which order, and the random numbers that belong to each sample.

Sample number s of a run (s counts from 0, across epochs and optimiser steps) is always the same image with the same
crop, flip, noise and timestep: it is found from s and the seed alone. A run can therefore be cut at any step, spread
over any number of processes and read by any number of workers without changing what it computes.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import signal
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from ..backbones.family import Family
from ..errors import UserError
from ..randomness import sample_generator as sample_generator

# Order ---------------------------------------------------------------------------------------------------------------


class SampleOrder:
    """The endless sequence of samples: one random permutation of the data set after the other.

    `order[s]` is `(epoch, index)` of sample number s. Epochs follow each other without a gap, so no image is left out
    when the batch size does not divide their number.
    """

    def __init__(self, num_images: int, seed: int, *key: int | str):
        self.num_images, self.seed, self.key = num_images, seed, key
        self._permutations: dict[int, list[int]] = {}

    def __getitem__(self, sample: int) -> tuple[int, int]:
        epoch, position = divmod(sample, self.num_images)
        if epoch not in self._permutations:
            generator = sample_generator(self.seed, "order", *self.key, epoch)
            permutation = torch.randperm(self.num_images, generator=generator).tolist()
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1} | {epoch: permutation}
        return epoch, self._permutations[epoch][position]


class StreamOrder:
    """The samples of an endless stream, one after the other: all in "epoch" 0, as a stream counts without an end."""

    def __getitem__(self, sample: int) -> tuple[int, int]:
        return 0, sample


class BucketOrder:
    """The endless sequence of samples of a source with several shapes: every `batch_size` of them are of one shape.

    Each shape has its own sequence of permutations, as in `SampleOrder`. In epoch e the batches that are full by its
    end and were not before are taken, those of all shapes mixed; the rest of a shape waits for the next epoch. So after
    E epochs an image of a shape with at least `batch_size` images has been seen E or E - 1 times.
    """

    def __init__(self, shape_of: list[int], seed: int, batch_size: int):
        members: dict[int, list[int]] = {}
        for index, shape in enumerate(shape_of):
            members.setdefault(shape, []).append(index)
        self.members = [members[shape] for shape in sorted(members)]
        self.seed, self.batch_size = seed, batch_size
        self.shapes = [SampleOrder(len(indices), seed, "shape", shape) for shape, indices in sorted(members.items())]
        self.num_images = len(shape_of)
        self._batch, self._place = -1, (0, 0)  # the last one that was looked up
        self._epoch, self._batches = -1, [(0, 0)]

    def __getitem__(self, sample: int) -> tuple[int, int]:
        number, position = divmod(sample, self.batch_size)
        if number != self._batch:
            self._batch, self._place = number, self._find(number)
        shape, batch = self._place
        epoch, place = self.shapes[shape][batch * self.batch_size + position]
        return epoch, self.members[shape][place]

    def _find(self, number: int) -> tuple[int, int]:
        """The shape of batch `number`, and which of that shape's batches it is."""
        latest = (number + len(self.members) + 1) * self.batch_size // self.num_images + 2
        epoch = bisect.bisect_right(range(latest), number, key=self._batches_before) - 1
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._batches_of(epoch)
        return self._batches[number - self._batches_before(epoch)]

    def _full(self, shape: int, epoch: int) -> int:
        return epoch * len(self.members[shape]) // self.batch_size

    def _batches_before(self, epoch: int) -> int:
        return sum(self._full(shape, epoch) for shape in range(len(self.members)))

    def _batches_of(self, epoch: int) -> list[tuple[int, int]]:
        batches = [
            (shape, batch)
            for shape in range(len(self.members))
            for batch in range(self._full(shape, epoch), self._full(shape, epoch + 1))
        ]
        generator = sample_generator(self.seed, "batches", epoch)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def sample_order(source: ImageSource, seed: int, batch_size: int) -> SampleOrder | BucketOrder | StreamOrder:
    """The order in which training sees `source`; with several shapes every `batch_size` samples are of one."""
    if _is_stream(source):
        return StreamOrder()
    if source.shapes is None or len(source.shapes) == 1:
        return SampleOrder(len(source), seed)
    return BucketOrder([source.shape_of(index) for index in range(len(source))], seed, batch_size)


@dataclass
class BatchPlan:
    """Which samples process `rank` of `num_processes` sees in each accumulation round, from `first_step` on.

    A step's samples are split into rounds, a round into processes: sample number =
    step·batch_size + (round·num_processes + rank)·local_batch_size + position.
    """

    order: SampleOrder | BucketOrder | StreamOrder
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


# Samples -------------------------------------------------------------------------------------------------------------


class UnreadableSample(UserError):
    """A sentence on a damaged image or video; where there are few, another of the same shape stands in for it."""


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


# Batches -------------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Images (B, C, H, W), videos (B, C, T, H, W) or posteriors, conditions, captions, and each (epoch, index).

    `skipped` says of each damaged sample which one it is and what is to be told.
    """

    images: torch.Tensor | None
    posterior: dict[str, torch.Tensor]
    conditions: dict[str, torch.Tensor]
    texts: list[str | None]
    keys: list[tuple[int, int]]
    skipped: list[tuple[int | str, str]] = field(default_factory=list)  # damaged ones that others stand in for

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
    """Reads one sample; an error that the user should see travels as a value, which keeps its sentence whole.

    In place of a damaged sample the next one of its shape that can be read is taken.
    """

    def __init__(self, source: ImageSource, seed: int):
        self.source, self.seed = source.shuffled(seed) if _is_stream(source) else source, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Any]:
        if not _is_stream(self.source):
            return [self[key] for key in keys]
        try:
            self.source.fetch([index for _, index in keys])
        except UserError as error:
            return [error]
        with ThreadPoolExecutor(self.source.threads) as pool:
            return list(pool.map(self.__getitem__, keys))

    def __getitem__(self, key: tuple[int, int]) -> tuple[tuple[int, int], Sample, list[Any]] | UserError:
        epoch, index = key
        count, shape, skipped = len(self.source), self.source.shape_of(index), []
        most = most_damaged(0 if _is_stream(self.source) else count)
        for further in range(count):
            candidate = index + further if _is_stream(self.source) else (index + further) % count
            if self.source.shape_of(candidate) != shape:
                continue
            try:
                sample = self.source.read(candidate, sample_generator(self.seed, "image", epoch, candidate))
                return key, sample, skipped
            except UnreadableSample as error:
                # A row of a stream has another number in each epoch; what is told of a video changes with its clip.
                skipped.append((str(error) if _is_stream(self.source) else candidate, str(error)))
                if len(skipped) > most:
                    break
            except UserError as error:
                return error
        sentences = [sentence for _, sentence in skipped]
        if len(skipped) > most or self.source.shapes is None:
            return too_many_damaged(sentences, count)
        size = "×".join(map(str, self.source.shapes[shape]))
        return UserError(f"none of the {len(skipped)} samples of shape {size} can be read; the first: {sentences[0]}")


def _is_stream(source: ImageSource) -> bool:
    return hasattr(source, "shuffled")


def most_damaged(count: int) -> int:
    """How many of `count` samples may be damaged: 1 %, or ten."""
    return max(10, count // 100)


def too_many_damaged(skipped: Iterable[str], count: int) -> UserError:
    """The error that ends the reading of a set with too many damaged samples."""
    skipped = sorted(skipped)
    return UserError(
        f"{len(skipped)} or more of {count:,} samples cannot be read, which is too many to go on without them; "
        f"the first: {skipped[0]}"
    )


def _collate(items: list[Any]) -> Batch | UserError:
    for item in items:
        if isinstance(item, UserError):
            return item
    keys, samples, skipped = zip(*items, strict=True)
    images = None if samples[0].image is None else torch.stack([s.image for s in samples])
    posterior = {name: torch.stack([s.posterior[name] for s in samples]) for name in samples[0].posterior}
    conditions = {name: torch.stack([s.conditions[name] for s in samples]) for name in samples[0].conditions}
    return Batch(images, posterior, conditions, [s.text for s in samples], list(keys), sum(skipped, []))


def _ignore_sigterm(worker: int) -> None:
    # A cluster warns the whole process group; the training process decides when its readers end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()  # what `read_batches` gave and is not finished
_READERS: weakref.WeakSet[Any] = weakref.WeakSet()  # reading processes


@atexit.register
def _end_reading() -> None:
    """Close what is still open, and end readers that hang.

    multiprocessing ends what is left at exit by a signal that readers ignore, and would wait for them forever.
    """
    for batches in [*_OPEN]:
        with contextlib.suppress(Exception):
            batches.close()
    for reader in [*_READERS]:
        with contextlib.suppress(Exception):
            if reader.is_alive():
                reader.kill()


def _started(loader: DataLoader) -> Iterator[Any]:
    batches = iter(loader)
    _READERS.update(getattr(batches, "_workers", ()))
    return batches


def read_batches(source: ImageSource, plan: Any, seed: int, num_workers: int) -> Iterator[Batch]:
    """Yield the batches of `plan` (an iterable of lists of (epoch, index)), read ahead by `num_workers` processes.

    Of a damaged image or video it is said, in a warning, that another of the same shape is read in its place; and at
    the end how many there were.

    Raises:
        UserError: when more than 1 % of the samples, and more than ten, are damaged.
    """
    batches = _read_batches(source, plan, seed, num_workers)
    _OPEN.add(batches)
    return batches


def _read_batches(source: ImageSource, plan: Any, seed: int, num_workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        _Reader(source, seed),
        batch_sampler=plan,
        num_workers=min(1, num_workers) if _is_stream(source) else num_workers,  # a stream is read once, in threads
        collate_fn=_collate,
        worker_init_fn=_ignore_sigterm,
        generator=torch.Generator(),  # the loader's own seed must not be taken from, nor move, the global one
        pin_memory=torch.cuda.is_available(),
    )
    damaged: dict[int | str, str] = {}
    count = 0 if _is_stream(source) else len(source)
    try:
        for batch in _started(loader):
            if isinstance(batch, Batch):
                count += len(batch.keys) if _is_stream(source) else 0  # a stream is judged by what is read of it
                for which, sentence in batch.skipped:
                    if which not in damaged:
                        warnings.warn(f"{sentence}; another one is used in its place", stacklevel=2)
                        damaged[which] = sentence
                if len(damaged) > most_damaged(count):
                    batch = too_many_damaged(damaged.values(), count)
            if isinstance(batch, UserError):
                batch.of_one_process = True  # the other processes do not know of it, so this one has to say it
                raise batch
            yield batch
    finally:
        if len(damaged) > 1:
            warnings.warn(f"{len(damaged)} damaged samples were replaced by others", stacklevel=2)
