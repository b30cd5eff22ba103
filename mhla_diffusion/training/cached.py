"""Training from a folder that `cache_latents` wrote: what its files are, and the samples in it.

CACHE/cache.json                   what was encoded and with what, and the finished shards
      shapes.safetensors           the shape of every sample, where there are several
      shared.safetensors           conditions that all samples share: what a dropped caption becomes
      latents-00000.safetensors    a thousand samples or so, those of a shape together: what the VAE says of each and of
                                   its mirror image, and its conditions
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..backbones.family import Family
from ..errors import UserError
from .config import DataOptions
from .data import Sample

INDEX = "cache.json"
SHAPES = "shapes.safetensors"
SHARED = "shared.safetensors"
FORMAT = 2
PREPROCESSING = "upright, centre crop as in ADM"  # of `images.load_image`; another one would be another cache
MIRRORED = "mirrored."
CONDITION = "conditions."
TOKENS = "tokens."  # conditions of one row per token, those of all samples after each other
LENGTHS = "lengths."  # how many rows a sample has there; the rest, up to its full length, is zero
OPEN_SHARDS = 64  # per reading process
READING = ("buckets", "channels", "num_frames", "fps", "short_clips")  # data options that decide what a sample is
TEXT = ("instruction", "max_tokens")  # and what a caption is


class CachedLatents:
    """The samples of a cache, as `ImageFolder` gives those of its images.

    Args:
        root: folder that `cache_latents` wrote.
        options: of the data, which must be those that the cache was made with.
        flip: whether half of the samples shall be mirrored.
        class_names: classes of the training data, where this is a held-out set; labels are those of the training data.

    Raises:
        UserError: when the cache is not finished, damaged, or was made with other options.
    """

    def __init__(
        self, root: str | Path, options: DataOptions, *, flip: bool = False, class_names: list[str] | None = None
    ):
        self.root, self.flip = Path(root), flip
        about = self.about = read_index(self.root)
        if about.get("format") != FORMAT or about.get("preprocessing") != PREPROCESSING:
            raise UserError(
                f"cache {root} was written by another version of this library; write it anew with "
                "scripts/cache_latents.py"
            )
        self.text_cached = self.captioned = about["text"] is not None
        for key, wanted in described(options, self.text_cached).items():
            if (made_with := about.get(key)) != wanted:
                raise UserError(
                    f"cache {root} was made with data.{key}={short(made_with)}, but data.{key} is {short(wanted)}; "
                    "change that, or make another cache"
                )
        if flip and not about["flip"]:
            raise UserError(
                f"cache {root} was made with data.flip=false, but data.flip is true; change that, or make another cache"
            )
        if "shards" not in about:
            raise UserError(
                f"cache {root} is not finished; run scripts/cache_latents.py again with the same config to go on"
            )
        self.starts = [0]
        for number, (count, bytes_) in enumerate(about["shards"]):
            path = shard_file(self.root, number)
            if not path.is_file() or path.stat().st_size != bytes_:
                raise damaged(path)
            self.starts.append(self.starts[-1] + count)
        self.fingerprint: str = about["data"]
        self.class_names: list[str] = class_names or about["class_names"]
        unknown = [name for name in about["class_names"] if name not in self.class_names]
        if unknown:
            raise UserError(f"cache {root} has class {unknown[0]!r}, which the training images do not have")
        self.labels = torch.tensor([self.class_names.index(name) for name in about["class_names"]])
        self.shapes = about["shapes"] and [tuple(shape) for shape in about["shapes"]]
        self._shape_of = None if self.shapes is None else self._whole_file(SHAPES)["shape_of"].long()
        self.shared_conditions = self._whole_file(SHARED) if self.text_cached else {}
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self.latent_shape: tuple[int, ...] | None = None
        if self.shapes is None or len(self.shapes) == 1:
            self.latent_shape = tuple(self._row(0, False)[0]["mean"].shape)

    def __len__(self) -> int:
        return self.starts[-1]

    def shape_of(self, index: int) -> int:
        """The place in `shapes` of the shape of sample `index`."""
        return 0 if self._shape_of is None else int(self._shape_of[index])

    def check_family(self, family: Family) -> None:
        """Raise `UserError` unless the cache is of `family`."""
        if self.about["family"] != family.name:
            raise UserError(
                f"cache {self.root} holds latents for {self.about['family']}, but model.family is {family.name}"
            )

    def check(self, family: Family, components: Mapping[str, Any]) -> None:
        """Raise `UserError` unless the cache is of `family` and of the VAE and text encoder in `components`."""
        self.check_family(family)
        made_with = {"vae": self.about["vae"], **(self.about["text"] or {})}
        for name, before in made_with.items():
            part = components.get(name)
            found = None if part is None else fingerprint(part)
            if found != before:
                label = "VAE" if name == "vae" else name.replace("_", " ")
                raise UserError(
                    f"cache {self.root} was made with another {label} ({before}) than that of model.components or "
                    f"model.pretrained ({found or 'none'}); name the pipeline it was made with, or make another cache"
                )

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Sample `index`; whether it is mirrored is drawn from `generator`, as `ImageFolder` does."""
        mirror = self.flip and bool(torch.rand((), generator=generator) < 0.5)
        rows, text = self._row(index, mirror)
        conditions = {name.removeprefix(CONDITION): rows.pop(name) for name in [*rows] if name.startswith(CONDITION)}
        if "class_labels" in conditions:
            conditions["class_labels"] = self.labels[conditions["class_labels"]]
        return Sample(posterior={name: row.float() for name, row in rows.items()}, conditions=conditions, text=text)

    def _row(self, index: int, mirror: bool) -> tuple[dict[str, torch.Tensor], str | None]:
        """The tensors of one sample, or of its mirror image, and its caption."""
        number = index // self.about["shard_size"]
        path = shard_file(self.root, number)
        try:
            if number not in self._open:
                shapes = (
                    None if self._shape_of is None else self._shape_of[self.starts[number] : self.starts[number + 1]]
                )
                self._open[number] = _Shard.open(path, shapes)
                if len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return self._open[number].row(index - self.starts[number], mirror)
        except (OSError, SafetensorError, LookupError, ValueError, TypeError):
            raise damaged(path) from None

    def _whole_file(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.root / name)
        except (OSError, SafetensorError):
            raise damaged(self.root / name) from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # open files do not travel to other processes


@dataclass
class _Shard:
    """An open shard, in which the samples stand in the order of their shapes."""

    file: Any
    texts: list[str | None] | None
    shape_of: torch.Tensor | None
    place: torch.Tensor | None  # of each sample
    first: torch.Tensor | None  # place of the first sample of each shape
    ends: dict[str, torch.Tensor]  # of each sample's tokens
    lengths: dict[str, int]  # of a whole row of tokens

    @classmethod
    def open(cls, path: Path, shape_of: torch.Tensor | None) -> _Shard:
        file = safe_open(path, "pt")
        metadata = file.metadata() or {}
        place = first = None
        if shape_of is not None:
            place = shard_order(shape_of).argsort()
            first = torch.bincount(shape_of).cumsum(0) - torch.bincount(shape_of)
        names = file.keys()
        ends = {name: file.get_tensor(name).cumsum(0) for name in names if name.startswith(LENGTHS)}
        texts, lengths = (json.loads(metadata.get(key, "null")) for key in ("texts", "lengths"))
        return cls(file, texts, shape_of, place, first, ends, lengths or {})

    def row(self, index: int, mirror: bool) -> tuple[dict[str, torch.Tensor], str | None]:
        """The tensors of the shard's sample `index`, or of its mirror image, and its caption."""
        place = index if self.place is None else int(self.place[index])
        shape, own = "", place
        if self.shape_of is not None:
            number = int(self.shape_of[index])
            shape, own = shape_prefix(number), place - int(self.first[number])
        rows = {}
        for name in self.file.keys():  # noqa: SIM118 (a safetensors file is not a dict)
            if name.startswith(CONDITION):
                rows[name] = self.file.get_slice(name)[place : place + 1][0]
            elif name.startswith(TOKENS):
                rows[CONDITION + name.removeprefix(TOKENS)] = self._tokens(name.removeprefix(TOKENS), place)
            elif name.startswith(shape) and not name.startswith(LENGTHS):
                kind = name.removeprefix(shape)
                if kind.startswith(MIRRORED) == mirror:
                    rows[kind.removeprefix(MIRRORED)] = self.file.get_slice(name)[own : own + 1][0]
        return rows, None if self.texts is None else self.texts[place]

    def _tokens(self, name: str, place: int) -> torch.Tensor:
        ends = self.ends[LENGTHS + name]
        start = int(ends[place - 1]) if place else 0
        tokens = self.file.get_slice(TOKENS + name)[start : int(ends[place])].float()
        return torch.cat([tokens, tokens.new_zeros(self.lengths[name] - len(tokens), *tokens.shape[1:])])


def described(options: DataOptions, text: bool) -> dict[str, Any]:
    """The data options that decide what a cache holds, in the form in which JSON gives them back."""
    names = [*READING, *(() if isinstance(options.buckets, list) else ("size",)), *(TEXT if text else ())]
    return json.loads(json.dumps({name: getattr(options, name) for name in names}))


def fingerprint(part: Any) -> str:
    """A hash of a VAE or text encoder (weights, and numbers that scale latents) or tokenizer, the same everywhere."""
    digest = hashlib.sha256(type(part).__name__.encode())
    if not isinstance(part, nn.Module):
        digest.update(_tokenizer_content(part).encode())
        return digest.hexdigest()[:16]
    config = part.config if isinstance(part.config, Mapping) else vars(part.config)
    for key in ("scaling_factor", "shift_factor", "latents_mean", "latents_std"):
        digest.update(f"{key}={json.dumps(config.get(key))}".encode())
    for name, value in sorted(part.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _tokenizer_content(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    content = json.loads(backend.to_str())
    return json.dumps({name: part for name, part in content.items() if name not in ("padding", "truncation")})


def shard_file(folder: Path, number: int) -> Path:
    """The file of shard `number`."""
    return folder / f"latents-{number:05d}.safetensors"


def shard_order(shape_of: torch.Tensor) -> torch.Tensor:
    """The samples of a shard in the order in which they stand in its file: by shape, else as they come."""
    return shape_of.argsort(stable=True)


def shape_prefix(shape: int) -> str:
    """What stands before the names of the latents of one of several shapes."""
    return f"shape{shape}."


def read_index(folder: Path) -> dict[str, Any]:
    """What `cache_latents` wrote of a cache. Raises `UserError` where it cannot be read."""
    try:
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cache {folder} cannot be read: {INDEX}: {error}") from None


def short(value: Any) -> str:
    """`value` in a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def damaged(path: Path) -> UserError:
    """The error for a file of a cache that is not as it was written."""
    return UserError(
        f"shard {path} is missing or damaged; delete it and run scripts/cache_latents.py again to make it anew"
    )
