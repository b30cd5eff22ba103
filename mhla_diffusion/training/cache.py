"""Latents that are encoded once and trained on many times.

CACHE/cache.json                   what the latents were made of and with, and the finished shards
      latents-00000.safetensors    a thousand images or so: what the VAE says of each, its mirror image, conditions

The mean and standard deviation of every image are kept, so that each epoch draws anew; a sample's draw and its flip
come from the same generators as in training from images. Every file is written whole or not at all, so a cache that was
cut at any moment goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm

from ..backbones import family_named
from ..backbones.family import Family
from ..errors import UserError, nearest
from .checkpoints import NO_ROOM, on_main_process, sweep, whole_file, write_whole
from .config import TrainConfig
from .data import Sample, read_batches
from .images import open_images
from .model import load_components
from .run_folder import lock_folder

INDEX = "cache.json"
FORMAT = 1
PREPROCESSING = "centre crop as in ADM"  # of `data.load_image`; another one would be another cache
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MIRRORED = "mirrored."
CONDITION = "conditions."
OPEN_SHARDS = 64  # per reading process


@dataclass
class CacheReport:
    """What `cache_latents` did."""

    folder: Path
    images: int  # in the cache
    encoded: int  # by this call
    seconds: float
    gigabytes: float

    def __str__(self) -> str:
        rate = f"{self.encoded / self.seconds:.1f} images/s" if self.encoded else "nothing was missing"
        return (
            f"{self.folder}: {self.images:,} images, {self.gigabytes:.2f} GB; {self.encoded:,} encoded in "
            f"{self.seconds:.0f} s ({rate}); train with data.train={self.folder}"
        )


# Making a cache ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def cache_latents(
    config: TrainConfig,
    out: str | Path,
    batch_size: int = 32,
    dtype: str = "float32",
    shard_size: int = 1024,
) -> CacheReport:
    """Encode `config.data.train` with the VAE that `config.model` names into the folder `out`.

    In one process or in each of those that `accelerate launch` starts; a call with the same arguments goes on where an
    earlier one was cut, with any number of processes.

    Args:
        batch_size: images per forward pass of the VAE.
        dtype: of the stored latents; they are encoded in float32.
        shard_size: images per file.

    Raises:
        UserError: when there is no VAE, `out` holds something else, an image cannot be read, or the disk is full.
    """
    for name, value in {"batch_size": batch_size, "shard_size": shard_size}.items():
        if value < 1:
            raise UserError(f"{name} is {value}; 1 or more is accepted")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}{nearest(dtype, DTYPES)}; {', '.join(DTYPES)} are accepted")
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.train.tf32
    out, data = Path(out), config.data
    if (Path(data.train) / INDEX).is_file():
        raise UserError(f"data.train {data.train} is a cache already; the images themselves are expected")
    family = family_named(config.model.family)
    source = open_images(data.train, "data.train", data, family, flip=False)
    components = load_components(config.model, only=("vae",))
    if "vae" not in components:
        raise UserError(
            "neither model.components nor model.pretrained names a pipeline with a VAE, without which there is nothing "
            "to cache"
        )
    vae = components["vae"].to(accelerator.device)
    if data.channels != vae.config.in_channels:
        raise UserError(f"data.channels is {data.channels}, but the VAE takes {vae.config.in_channels}; set it to that")

    about = {
        "format": FORMAT,
        "family": family.name,
        "vae": fingerprint(vae),
        "size": data.size,
        "channels": data.channels,
        "flip": data.flip,
        "preprocessing": PREPROCESSING,
        "data": source.fingerprint,
        "dtype": dtype,
        "shard_size": shard_size,
        "class_names": source.class_names,
    }
    ranges = [range(len(source))[first : first + shard_size] for first in range(0, len(source), shard_size)]
    missing = on_main_process(accelerator, lambda: _open_cache(out, about, len(ranges)))
    mine = missing[accelerator.process_index :: accelerator.num_processes]

    plan = [
        [(0, index) for index in indices[first : first + batch_size]]
        for indices in (ranges[shard] for shard in mine)
        for first in range(0, len(indices), batch_size)
    ]
    clock = time.perf_counter()
    progress = tqdm(
        total=sum(len(ranges[shard]) for shard in mine),
        unit="image",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=not accelerator.is_main_process,
        desc="encoding" if accelerator.num_processes == 1 else f"encoding (1 of {accelerator.num_processes} processes)",
    )
    batches = read_batches(source, plan, config.train.seed, data.num_workers)
    with progress:
        for shard in mine:
            parts = []
            for _ in range(0, len(ranges[shard]), batch_size):
                batch = next(batches)
                images = batch.images.to(accelerator.device)
                rows = dict(family.posterior(components, images))
                if data.flip:
                    mirrored = family.posterior(components, images.flip(-1))
                    rows |= {MIRRORED + name: value for name, value in mirrored.items()}
                rows = {name: value.to(DTYPES[dtype]).cpu() for name, value in rows.items()}
                if not all(value.isfinite().all() for value in rows.values()):
                    raise _of_one_process(f"the VAE's latents are not finite in {dtype}; --dtype float32 may help")
                rows |= {CONDITION + name: value for name, value in batch.conditions.items()}
                parts.append((rows, batch.texts))
                progress.update(len(images))
            _write_shard(out, shard, parts)
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - clock
    on_main_process(accelerator, lambda: _close_cache(out, about, [len(indices) for indices in ranges]))
    size = sum(path.stat().st_size for path in out.glob("latents-*.safetensors")) / 1e9
    return CacheReport(out, len(source), sum(len(ranges[shard]) for shard in missing), seconds, size)


def fingerprint(vae: nn.Module) -> str:
    """A hash of a VAE's weights and of the numbers that scale its latents, the same on every device."""
    digest = hashlib.sha256(type(vae).__name__.encode())
    for key in ("scaling_factor", "shift_factor", "latents_mean", "latents_std"):
        digest.update(f"{key}={json.dumps(vae.config.get(key))}".encode())
    for name, value in sorted(vae.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"latents-{number:05d}.safetensors"


def _open_cache(out: Path, about: dict[str, Any], shards: int) -> list[int]:
    """Claim `out` for the cache that `about` describes, and return the numbers of the shards it lacks."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock_folder(out, "--out")
        if (out / INDEX).is_file():
            found = _read_index(out)
            different = {key: (found.get(key), value) for key, value in about.items() if found.get(key) != value}
            if different:
                key, (before, now) = next(iter(different.items()))
                raise UserError(
                    f"--out {out} holds a cache with {key} {_short(before)} instead of {_short(now)}; choose a new "
                    "folder"
                )
        elif others := [path.name for path in out.iterdir() if path.name[0] != "."]:
            raise UserError(f"--out {out} holds other files ({', '.join(sorted(others)[:3])}); choose a new folder")
        sweep(out)
        if not (out / INDEX).is_file():
            write_whole(out / INDEX, json.dumps(about, indent=1) + "\n")
        return [number for number in range(shards) if not _is_whole(_shard(out, number))]
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _write_shard(out: Path, number: int, parts: list[tuple[dict[str, torch.Tensor], list[str | None]]]) -> None:
    tensors = {name: torch.cat([rows[name] for rows, _ in parts]).contiguous() for name in parts[0][0]}
    texts = [text for _, texts in parts for text in texts]
    metadata = {"format": "pt"} | ({"texts": json.dumps(texts)} if any(texts) else {})
    try:
        with whole_file(_shard(out, number)) as temporary:
            save_file(tensors, temporary, metadata)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in NO_ROOM:
            raise
        reason = getattr(error, "strerror", None) or error
        raise _of_one_process(
            f"--out {out} cannot be written: {reason}; the shards that are there are kept, and the same command goes on"
        ) from None


def _close_cache(out: Path, about: dict[str, Any], counts: list[int]) -> None:
    sizes = [_shard(out, number).stat().st_size for number in range(len(counts))]
    write_whole(out / INDEX, json.dumps({**about, "shards": list(zip(counts, sizes, strict=True))}, indent=1) + "\n")


def _of_one_process(message: str) -> UserError:
    """An error that the other processes do not know of."""
    error = UserError(message)
    error.of_one_process = True
    return error


def _is_whole(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"cache {folder} cannot be read: {INDEX}: {error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# Training from it ----------------------------------------------------------------------------------------------------


class CachedLatents:
    """The samples of a cache, as `ImageFolder` gives those of its images.

    Args:
        root: folder that `cache_latents` wrote.
        size, channels, flip: what the images must have been when they were encoded.
        class_names: classes of the training data, where this is a held-out set; labels are those of the training data.

    Raises:
        UserError: when the cache is not finished, damaged, or of another size, channels or flip.
    """

    captioned = False
    text_cached = False
    shared_conditions: ClassVar[dict[str, torch.Tensor]] = {}
    shapes: list[tuple[int, ...]] | None = None

    def __init__(
        self, root: str | Path, size: int, channels: int = 3, flip: bool = False, class_names: list[str] | None = None
    ):
        self.root, self.flip = Path(root), flip
        about = self.about = _read_index(self.root)
        if about.get("format") != FORMAT or about.get("preprocessing") != PREPROCESSING:
            raise UserError(
                f"cache {root} was written by another version of this library; write it anew with "
                "scripts/cache_latents.py"
            )
        for key, wanted in (("size", size), ("channels", channels)):
            if about[key] != wanted:
                raise UserError(
                    f"cache {root} was made with data.{key}={about[key]}, but data.{key} is {wanted}; change that, or "
                    "make another cache"
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
            path = _shard(self.root, number)
            if not path.is_file() or path.stat().st_size != bytes_:
                raise _damaged(path)
            self.starts.append(self.starts[-1] + count)
        self.fingerprint: str = about["data"]
        self.class_names: list[str] = class_names or about["class_names"]
        unknown = [name for name in about["class_names"] if name not in self.class_names]
        if unknown:
            raise UserError(f"cache {root} has class {unknown[0]!r}, which the training images do not have")
        self.labels = torch.tensor([self.class_names.index(name) for name in about["class_names"]])
        self._open: OrderedDict[int, Any] = OrderedDict()
        self.latent_shape: tuple[int, ...] = tuple(self._row(0, 0, False)[0]["mean"].shape)

    def __len__(self) -> int:
        return self.starts[-1]

    def shape_of(self, index: int) -> int:
        return 0

    def check(self, family: Family, components: Mapping[str, Any]) -> None:
        """Raise `UserError` unless the latents are of `family` and of the VAE in `components`."""
        if self.about["family"] != family.name:
            raise UserError(
                f"cache {self.root} holds latents for {self.about['family']}, but model.family is {family.name}"
            )
        vae = components.get("vae")
        found = None if vae is None else fingerprint(vae)
        if found != self.about["vae"]:
            raise UserError(
                f"cache {self.root} was made with another VAE ({self.about['vae']}) than that of model.components or "
                f"model.pretrained ({found or 'none'}); name the pipeline it was made with, or make another cache"
            )

    def read(self, index: int, generator: torch.Generator) -> Sample:
        """Sample `index`; whether it is mirrored is drawn from `generator`, as `ImageFolder` does."""
        number = index // self.about["shard_size"]
        mirror = self.flip and bool(torch.rand((), generator=generator) < 0.5)
        rows, text = self._row(number, index - self.starts[number], mirror)
        conditions = {name.removeprefix(CONDITION): rows.pop(name) for name in [*rows] if name.startswith(CONDITION)}
        conditions["class_labels"] = self.labels[conditions["class_labels"]]
        return Sample(posterior={name: row.float() for name, row in rows.items()}, conditions=conditions, text=text)

    def _row(self, number: int, row: int, mirror: bool) -> tuple[dict[str, torch.Tensor], str | None]:
        """The tensors of one image of a shard, or of its mirror image, and its caption."""
        path = _shard(self.root, number)
        try:
            if number not in self._open:
                opened = safe_open(path, "pt")
                self._open[number] = opened, json.loads((opened.metadata() or {}).get("texts", "null"))
                if len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            opened, texts = self._open[number]
            rows = {
                name.removeprefix(MIRRORED): opened.get_slice(name)[row : row + 1][0]
                for name in opened.keys()  # noqa: SIM118 (a safetensors file is not a dict)
                if name.startswith(CONDITION) or name.startswith(MIRRORED) == mirror
            }
        except (OSError, SafetensorError, IndexError, ValueError):
            raise _damaged(path) from None
        return rows, None if texts is None else texts[row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # open files do not travel to other processes


def _damaged(path: Path) -> UserError:
    return UserError(
        f"shard {path} is missing or damaged; delete it and run scripts/cache_latents.py again to make it anew"
    )
