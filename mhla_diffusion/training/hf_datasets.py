"""Images in a Hugging Face dataset: on the hub, or a folder of parquet files or webdataset archives.

The dataset is read once into the Arrow files of its own cache, from which any image is found at once: so sample number
s of a run is the same image in every process and after every resume, which a stream could not promise.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .buckets import Size
from .data import Sample, UnreadableSample
from .images import ImageSamples, image_size

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


class DatasetImages(ImageSamples):
    """The images, classes and captions of a dataset, as `ImageFolder` gives those of a folder.

    The image column is the one of type Image. For families that take classes the label column (`label`, `cls`, …) holds
    class ids or names, and a caption column (`text`, `caption`, `txt`, …) may be there; for those that take text only
    the caption column is read.

    Args:
        name: folder or hub id, with the split after a colon where it is not "train".
        size, channels, flip, class_names, takes_text, buckets: as for `ImageFolder`.

    Raises:
        UserError: when the dataset cannot be read or has no such columns, or an empty caption.
    """

    def __init__(
        self,
        name: str,
        size: int,
        channels: int = 3,
        flip: bool = False,
        class_names: list[str] | None = None,
        *,
        takes_text: bool = False,
        buckets: dict[Size, float] | None = None,
    ):
        import datasets  # takes a second

        super().__init__(size, channels, flip)
        self.name = name
        rows = load(name, streaming=False)
        image, label, caption = find_columns(name, rows.features, takes_text)
        self.class_names: list[str] = []
        self.labels: torch.Tensor | None = None
        if takes_text:
            texts = rows.with_format("arrow")[caption][:].to_pylist()
            if empty := [i for i, text in enumerate(texts) if not (text or "").strip()]:
                raise UserError(
                    f"dataset {name!r} has {len(empty)} images with an empty caption (column {caption!r}), the first "
                    f"is row {empty[0]}; give them texts, or leave them out"
                )
            self.captioned = True
            content: Any = texts
        else:
            content = self._set_classes(rows, label, class_names)
        columns = {"image": image} | ({} if caption is None else {"text": caption})
        rows = rows.select_columns([*columns.values()]).rename_columns({old: new for new, old in columns.items()})
        self.rows = rows.cast_column("image", datasets.Image(decode=False))
        content = json.dumps([*content, rows.info.dataset_size])
        self.fingerprint = f"{len(rows)} images, {hashlib.sha256(content.encode()).hexdigest()[:16]}"
        self._set_buckets(buckets, self._image_size, len(self))

    def _set_classes(self, rows: Any, label: str, class_names: list[str] | None) -> list[Any]:
        import datasets

        values = rows.with_format("arrow")[label][:].to_pylist()
        if isinstance(rows.features[label], datasets.ClassLabel):
            own_names = dict(enumerate(rows.features[label].names))
        else:
            own_names = {value: str(value) for value in sorted({*values} - {None})}
        if unlabelled := [value for value in values if value not in own_names]:
            raise UserError(
                f"dataset {self.name!r} has {len(unlabelled)} images without a class, such as {unlabelled[0]!r}"
            )
        self.class_names = class_names or list(own_names.values())
        if unknown := [own_names[value] for value in {*values} if own_names[value] not in self.class_names]:
            raise UserError(f"dataset {self.name!r} has class {unknown[0]!r}, which the training images do not have")
        ids = {class_name: i for i, class_name in enumerate(self.class_names)}
        self.labels = torch.tensor([ids[own_names[value]] for value in values])
        return [values, list(own_names.values())]

    def _image_size(self, index: int) -> Size | None:
        try:
            path, content = image_file(self.rows[index]["image"], "")
        except UnreadableSample:
            return None
        return image_size(path if content is None else io.BytesIO(content))

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int, generator: torch.Generator) -> Sample:
        row: dict[str, Any] = self.rows[index]
        path, content = image_file(row["image"], f"{index} of dataset {self.name}")
        label = None if self.labels is None else self.labels[index]
        return self._sample(index, path, content, generator, label, row.get("text"))


def image_file(image: dict[str, Any] | None, name: str) -> tuple[str, bytes | None]:
    """Path, or else `name`, and content (None where only the path is known) of an image that is not decoded.

    Raises `UnreadableSample` where there is none.
    """
    if image is None or (image["bytes"] is None and image["path"] is None):
        raise UnreadableSample(f"image {name} is missing")
    return image["path"] or name, image["bytes"]


def load(name: str, streaming: bool) -> Any:
    """The rows of a dataset, of the split after the colon in `name`. Raises `UserError` where it cannot be read."""
    import datasets

    place, split = _without_split(name)
    try:
        return datasets.load_dataset(place, split=split or "train", streaming=streaming)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = "" if Path(place).is_dir() else " (a hub id, for there is no such folder)"
        raise UserError(f"dataset {name!r}{where} cannot be read: {' '.join(str(error).split())}") from None


def find_columns(name: str, features: Any, takes_text: bool) -> tuple[str, str | None, str | None]:
    """The image, label and caption columns of a dataset. Raises `UserError` where one that is needed is missing."""
    import datasets

    image = next((column for column, kind in features.items() if isinstance(kind, datasets.Image)), None)
    label = next((column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    label = label or next((column for column in LABELS if column in features), None)
    caption = next((column for column in CAPTIONS if column in features), None)
    condition = (f"a caption column (as {', '.join(CAPTIONS)})", caption)
    if not takes_text:
        condition = (f"a label column (as {', '.join(LABELS)})", label)
    for what, column in (("an image column", image), condition):
        if column is None:
            raise UserError(f"dataset {name!r} has the columns {', '.join(features)}; {what} is expected")
    return image, label, caption


def _without_split(name: str) -> tuple[str, str | None]:
    if Path(name).is_dir() or ":" not in name:
        return name, None
    place, _, split = name.rpartition(":")
    return place, split
