"""Images in a Hugging Face dataset: on the hub, or a folder of parquet files or webdataset archives.

The dataset is read once into the Arrow files of its own cache, from which any image is found at once: so sample number
s of a run is the same image in every process and after every resume, which a stream could not promise.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import UserError
from .data import Sample, load_image

LABELS = ("label", "labels", "cls", "class", "fine_label", "target")
CAPTIONS = ("text", "caption", "txt", "prompt")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILES = ("*.parquet", "*.tar", "data/*.parquet", "data/*.tar")


def is_dataset(name: str) -> bool:
    """Whether `name`, without its ":SPLIT", can be a hub id or is a folder of parquet or webdataset files."""
    place = _without_split(name)[0]
    if Path(place).is_dir():
        return any(next(Path(place).glob(pattern), None) is not None for pattern in FILES)
    return HUB_ID.fullmatch(place) is not None and not Path(place).exists()


class DatasetImages:
    """The images, classes and captions of a dataset, as `ImageFolder` gives those of a folder.

    The image column is the one of type Image; the label column (`label`, `cls`, …) holds class ids or names, and a
    caption column (`text`, `caption`, …) may be there.

    Args:
        name: folder or hub id, with the split after a colon where it is not "train".
        size, channels, flip, class_names: as for `ImageFolder`.

    Raises:
        UserError: when the dataset cannot be read or has no such columns.
    """

    latent_shape = None
    captioned = False
    text_cached = False
    shared_conditions: ClassVar[dict[str, torch.Tensor]] = {}
    shapes: list[tuple[int, ...]] | None = None

    def __init__(
        self, name: str, size: int, channels: int = 3, flip: bool = False, class_names: list[str] | None = None
    ):
        import datasets  # takes a second

        self.name, self.size, self.channels, self.flip = name, size, channels, flip
        place, split = _without_split(name)
        try:
            rows = datasets.load_dataset(place, split=split or "train")
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            where = "" if Path(place).is_dir() else " (a hub id, for there is no such folder)"
            raise UserError(f"dataset {name!r}{where} cannot be read: {' '.join(str(error).split())}") from None
        features = rows.features
        image = next((column for column, kind in features.items() if isinstance(kind, datasets.Image)), None)
        label = next((column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
        label = label or next((column for column in LABELS if column in features), None)
        caption = next((column for column in CAPTIONS if column in features), None)
        for what, column in (("an image column", image), (f"a label column (as {', '.join(LABELS)})", label)):
            if column is None:
                raise UserError(f"dataset {name!r} has the columns {', '.join(features)}; {what} is expected")

        values = rows.with_format("arrow")[label][:].to_pylist()
        if isinstance(features[label], datasets.ClassLabel):
            own_names = dict(enumerate(features[label].names))
        else:
            own_names = {value: str(value) for value in sorted({*values} - {None})}
        if unlabelled := [value for value in values if value not in own_names]:
            raise UserError(f"dataset {name!r} has {len(unlabelled)} images without a class, such as {unlabelled[0]!r}")
        self.class_names = class_names or list(own_names.values())
        if unknown := [own_names[value] for value in {*values} if own_names[value] not in self.class_names]:
            raise UserError(f"dataset {name!r} has class {unknown[0]!r}, which the training images do not have")
        ids = {class_name: i for i, class_name in enumerate(self.class_names)}
        self.labels = torch.tensor([ids[own_names[value]] for value in values])

        columns = {"image": image} | ({} if caption is None else {"text": caption})
        rows = rows.select_columns([*columns.values()]).rename_columns({old: new for new, old in columns.items()})
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        content = json.dumps([values, list(own_names.values()), rows.info.dataset_size])
        self.fingerprint = f"{len(rows)} images, {hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.rows)

    def shape_of(self, index: int) -> int:
        return 0

    def read(self, index: int, generator: torch.Generator) -> Sample:
        row: dict[str, Any] = self.rows[index]
        image = load_image(
            row["image"]["path"] or f"{index} of dataset {self.name}", self.size, self.channels, row["image"]["bytes"]
        )
        if self.flip and torch.rand((), generator=generator) < 0.5:
            image = image.flip(-1)
        return Sample(image, conditions={"class_labels": self.labels[index]}, text=row.get("text"))


def _without_split(name: str) -> tuple[str, str | None]:
    if Path(name).is_dir() or ":" not in name:
        return name, None
    place, _, split = name.rpartition(":")
    return place, split
