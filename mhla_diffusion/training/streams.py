"""A Hugging Face dataset that is read in order from its files, without a copy on disk (data.streaming).

Row by row, epoch after epoch, each in a new order: the files are shuffled, and rows within a buffer. Sample number s of
a run is row number s of this endless sequence, which follows from the dataset and the seed alone. So nothing that is
computed depends on the number of processes or readers, or on where a run was cut; the price is that every process
passes over all rows (and decodes its own), and that a run that goes on passes over those before its position in the
epoch, or, where the dataset does not say how many rows it has, over all since its first step.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import UserError
from .config import DataOptions
from .data import Sample, sample_generator
from .hf_datasets import find_columns, image_file, load
from .images import ImageSamples

BUFFER = 1000  # rows that are shuffled among each other
LOOK_AHEAD = 64  # rows kept beside those of a batch, to stand in for damaged ones
UNKNOWN = 2**31 - 1  # the length of a stream that does not say it


class StreamedImages(ImageSamples):
    """The images of a dataset with their classes or captions, read in the order of the stream.

    Args:
        name: hub id or folder, with the split after a colon where it is not "train".
        options: size, channels and number of reading threads.
        flip, class_names, takes_text: as for `DatasetImages`; classes must be named by the dataset.

    Raises:
        UserError: when the dataset cannot be read or lacks a column, and for options that need all samples at once.
    """

    def __init__(
        self,
        name: str,
        options: DataOptions,
        *,
        flip: bool = False,
        class_names: list[str] | None = None,
        takes_text: bool = False,
    ):
        import datasets  # takes a second

        super().__init__(options.size, options.channels, flip)
        if options.buckets is not None:
            raise UserError(
                "data.streaming is true, but data.buckets needs the sizes of all images; set one of them to its default"
            )
        self.name, self.threads = name, max(1, options.num_workers)
        rows = load(name, streaming=True)
        if rows.features is None:
            raise UserError(f"dataset {name!r} does not say its columns before it is read; set data.streaming=false")
        image, label, caption = find_columns(name, rows.features, takes_text)
        self.captioned, self.class_names = takes_text, []
        self._labels: list[int] = []
        if not takes_text:
            if not isinstance(rows.features[label], datasets.ClassLabel):
                raise UserError(
                    f"dataset {name!r} has a label column {label!r} without class names, which only reading all of it "
                    "would tell; set data.streaming=false"
                )
            own_names = rows.features[label].names
            self.class_names = class_names or list(own_names)
            if unknown := [own for own in own_names if own not in self.class_names]:
                raise UserError(f"dataset {name!r} has class {unknown[0]!r}, which the training images do not have")
            self._labels = [self.class_names.index(own) for own in own_names]
        self._image, self._label_column, self._caption = image, None if takes_text else label, caption
        columns = [name for name in (image, self._label_column, caption) if name is not None]
        self.rows = rows.select_columns(columns).cast_column(image, datasets.Image(decode=False))
        split = (rows.info.splits or {}).get(str(rows.split))
        self.count: int | None = split.num_examples if split is not None and split.num_examples else None
        content = [str(rows.info.builder_name), str(rows.info.config_name), str(rows.info.version), rows.num_shards]
        content = json.dumps([*content, str(rows.split), str(rows.features), self.count])
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        self.fingerprint = f"a stream of {self.count or 'some'} images, {digest}"
        self._stream: _Stream | None = None

    def __len__(self) -> int:
        return self.count or UNKNOWN

    def shuffled(self, seed: int) -> StreamedImages:
        """This source in the order that belongs to `seed`, read from its beginning."""
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__ | {"_stream": _Stream(self.rows, seed, self.count, self.name)}
        return other

    def fetch(self, indices: Sequence[int]) -> None:
        """Read the rows of a batch, which `read` then decodes, in several threads where asked to."""
        for index in indices:
            self._stream.row(index, keep=len(indices) + LOOK_AHEAD)

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Row `index` of the endless sequence; rows are fast to read in order only."""
        if self._stream is None:
            raise RuntimeError("a stream is read through `shuffled`")
        row = self._stream.row(index)
        path, content = image_file(row[self._image], f"{index} of dataset {self.name}")
        text = row[self._caption] if self._caption else None
        if self.captioned and not (text or "").strip():
            raise UserError(f"dataset {self.name!r} has an empty caption, that of image {path}; leave such rows out")
        label = None if self._label_column is None else self._label(row[self._label_column], path)
        return self._sample(index, path, content, generator, label, text)

    def _label(self, value: int | None, path: str) -> int:
        if value is None or not 0 <= value < len(self._labels):
            raise UserError(f"dataset {self.name!r} has an image without a class: {path}")
        return self._labels[value]


class _Stream:
    """The rows of all epochs after each other, of which the last few are kept."""

    def __init__(self, rows: Any, seed: int, count: int | None, name: str):
        self.rows, self.seed, self.count, self.name = rows, seed, count, name
        self.kept: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.keep, self.next = LOOK_AHEAD, 0
        self.reading: Iterator[dict[str, Any]] | None = None
        self.one_at_a_time = threading.Lock()

    def row(self, number: int, keep: int = 0) -> dict[str, Any]:
        """Row `number`; at least the last `keep` ones stay at hand."""
        with self.one_at_a_time:
            return self._row(number, keep)

    def _row(self, number: int, keep: int) -> dict[str, Any]:
        self.keep = max(self.keep, keep)
        if number in self.kept:
            return self.kept[number]
        if self.reading is None or number < self.next:
            self.kept.clear()
            epoch = number // self.count if self.count else 0
            self.next, self.reading = epoch * (self.count or 0), self._epochs(epoch)
        while self.next <= number:
            self.kept[self.next] = next(self.reading)
            self.next += 1
            if len(self.kept) > self.keep:
                self.kept.popitem(last=False)
        return self.kept[number]

    def _epochs(self, epoch: int) -> Iterator[dict[str, Any]]:
        while True:
            found = 0
            for row in self._epoch(epoch):
                found += 1
                yield row
            if found == 0 or (self.count is not None and found != self.count):
                raise UserError(
                    f"dataset {self.name!r} has {found} rows, but is said to have {self.count or 'some'}; set "
                    "data.streaming=false"
                )
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        # Not with `rows.shuffle`, which draws other numbers in a reading process than outside of one.
        draw = random.Random(sample_generator(self.seed, "stream", epoch).initial_seed())
        files = list(range(self.rows.num_shards))
        draw.shuffle(files)
        waiting: list[dict[str, Any]] = []
        for file in files:
            for row in self.rows.shard(num_shards=len(files), index=file):
                if len(waiting) < BUFFER:
                    waiting.append(row)
                    continue
                place = draw.randrange(BUFFER)
                waiting[place], row = row, waiting[place]
                yield row
        draw.shuffle(waiting)
        yield from waiting

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": OrderedDict(), "next": 0, "reading": None, "one_at_a_time": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"one_at_a_time": threading.Lock()}
