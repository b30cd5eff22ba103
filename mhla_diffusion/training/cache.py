"""Encoding a data set once: what the VAE says of every image or video, and the text encoder of every caption.

The mean and standard deviation of every latent are kept, so that each epoch draws anew; a sample's draw and its flip
come from the same generators as in training from images. Every file is written whole or not at all, so a cache that was
cut at any moment goes on with the shards that are missing. What the files hold stands in `cached`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..backbones import family_named
from ..backbones.family import Family
from ..errors import UserError, nearest, of_one_process
from .buckets import check_factor, check_family, describe_shapes
from .cached import (
    CONDITION,
    FORMAT,
    INDEX,
    LENGTHS,
    MIRRORED,
    PREPROCESSING,
    SHAPES,
    SHARED,
    TOKENS,
    described,
    fingerprint,
    read_index,
    shape_prefix,
    shard_file,
    shard_order,
    short,
)
from .checkpoints import NO_ROOM, on_main_process, sweep, whole_file, write_whole
from .config import DataOptions, TrainConfig
from .data import Batch, ImageSource, read_batches
from .known_parts import files_signature, remember
from .model import load_components
from .run_folder import lock_folder
from .sources import open_source
from .stage import join_processes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PROBE = 128  # pixels: a side that the factor of every VAE divides


@dataclass
class CacheReport:
    """What `cache_latents` did."""

    folder: Path
    images: int  # in the cache, or clips
    encoded: int  # by this call
    seconds: float
    gigabytes: float
    damaged: int = 0  # in whose place others stand
    noun: str = "image"  # or clip
    cut: int = 0  # captions that are longer than the text encoder takes, and lose their end

    def __str__(self) -> str:
        rate = f"{self.encoded / self.seconds:.1f} {self.noun}s/s" if self.encoded else "nothing was missing"
        told = "".join(
            f"; {count:,} {what}"
            for count, what in (
                (self.damaged, "could not be read and were replaced by others"),
                (self.cut, "lost the end of their caption, which is longer than the text encoder takes"),
            )
            if count
        )
        return (
            f"{self.folder}: {self.images:,} {self.noun}s, {self.gigabytes:.2f} GB; {self.encoded:,} encoded in "
            f"{self.seconds:.0f} s ({rate}){told}; train with data.train={self.folder}"
        )


@torch.no_grad()
def cache_latents(
    config: TrainConfig,
    out: str | Path,
    batch_size: int = 32,
    dtype: str = "float32",
    shard_size: int | None = None,
    say: Callable[[str], None] | None = None,
) -> CacheReport:
    """Encode `config.data.train` with the VAE and text encoder that `config.model` names into the folder `out`.

    In one process or in each of those that `accelerate launch` starts; a call with the same arguments goes on where an
    earlier one was cut, with any number of processes. Families without text need no text encoder. Videos are clips that
    begin where those of the first epoch do.

    Args:
        batch_size: samples per forward pass of the VAE.
        dtype: of the stored latents and embeddings; they are encoded in float32.
        shard_size: samples per file: what a process has in memory, and what it loses when it is cut. None: 1024, of
            videos 64.
        say: told what is encoded; None for the console.

    Raises:
        UserError: when there is no VAE or text encoder, sizes do not suit it, `out` holds something else, too many
            images cannot be read, or the disk is full.
    """
    noun = "image" if config.data.num_frames == 1 else "clip"
    if shard_size is None:
        shard_size = 1024 if noun == "image" else 64
    for name, value in {"batch_size": batch_size, "shard_size": shard_size}.items():
        if value < 1:
            raise UserError(f"{name} is {value}; 1 or more is accepted")
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}{nearest(dtype, DTYPES)}; {', '.join(DTYPES)} are accepted")
    accelerator = join_processes()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.train.tf32
    out, data = Path(out), config.data
    family = family_named(config.model.family)
    source = _open_pixels(data, family)
    parts = files_signature(config.model, family.name, ("vae", *family.text_components))
    components = load_components(config.model, only=("vae", *family.text_components))
    _check_components(family, components, data)
    for part in components.values():
        if isinstance(part, nn.Module):
            part.to(accelerator.device)
    factor = vae_factor(family, components, data.channels, accelerator.device)
    key = "data.size" if data.buckets is None else "data.buckets"
    check_factor([(data.size, data.size)] if source.shapes is None else source.shapes, factor, key)

    about = on_main_process(accelerator, lambda: _about(family, components, config, source, dtype, shard_size))
    ranges = [range(len(source))[first : first + shard_size] for first in range(0, len(source), shard_size)]
    encoder = _Encoder(family, components, data, DTYPES[dtype], accelerator.device)
    missing = on_main_process(accelerator, lambda: _open_cache(out, about, len(ranges), source, encoder))
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    if shapes := describe_shapes(source):
        (say or accelerator.print)(f"{len(source):,} samples: {shapes}")

    batches_of = {shard: _batches(source, ranges[shard], batch_size) for shard in mine}
    plan = [[(0, index) for index in batch] for shard in mine for batch in batches_of[shard]]
    clock = time.perf_counter()
    progress = tqdm(
        total=sum(len(ranges[shard]) for shard in mine),
        unit=noun,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=not accelerator.is_main_process,
        desc="encoding" if accelerator.num_processes == 1 else f"encoding (1 of {accelerator.num_processes} processes)",
    )
    batches = read_batches(source, plan, config.train.seed, data.num_workers)
    with contextlib.closing(batches), progress:
        for shard in mine:
            content = _Content()
            for indices in batches_of[shard]:
                batch = next(batches)
                prefix = "" if source.shapes is None else shape_prefix(source.shape_of(indices[0]))
                content.add(encoder(batch, prefix), batch)
                progress.update(len(indices))
            _write_shard(out, shard, content, encoder)
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - clock
    counts = on_main_process(accelerator, lambda: _close_cache(out, about, [len(indices) for indices in ranges]))
    on_main_process(accelerator, lambda: remember(out, parts))
    size = sum(path.stat().st_size for path in out.glob("*.safetensors")) / 1e9
    encoded = sum(len(ranges[shard]) for shard in missing)
    return CacheReport(out, len(source), encoded, seconds, size, noun=noun, **counts)


# What is encoded -----------------------------------------------------------------------------------------------------


class _Encoder:
    """Batches to the tensors that a shard holds, on the CPU: those of `flat` have a row per token, the others one each.

    Embeddings beyond a caption's last token are not stored: the mask hides them, or they are zero.
    """

    def __init__(
        self,
        family: Family,
        components: Mapping[str, Any],
        options: DataOptions,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.family, self.components, self.options, self.dtype, self.device = family, components, options, dtype, device
        self.full_lengths: dict[str, int] = {}  # rows per sample of the embeddings before they are cut

    def __call__(self, batch: Batch, prefix: str) -> dict[str, Tensor]:
        pixels = batch.images.to(self.device)
        rows = {prefix + name: value for name, value in self.family.posterior(self.components, pixels).items()}
        if self.options.flip:
            mirrored = self.family.posterior(self.components, pixels.flip(-1))
            rows |= {prefix + MIRRORED + name: value for name, value in mirrored.items()}
        rows |= {CONDITION + name: value for name, value in batch.conditions.items()}
        stored = self._stored(rows, self.dtype, "the VAE's latents")
        captions = self._captions([text or "" for text in batch.texts])
        return stored | self._stored(captions, self.dtype, "the text encoder's embeddings")

    def shared(self) -> dict[str, Tensor]:
        """The conditions of a dropped caption, one row each."""
        if not self.family.takes_text:
            return {}
        null = self.family.null_conditions(self.components, self.options.max_tokens)
        return self._stored(null, torch.float32, "the text encoder's embeddings")

    def cut(self, texts: list[str | None]) -> int:
        """How many captions lose their end."""
        captions = [text or "" for text in texts]
        how = (self.options.instruction, self.options.max_tokens)
        return sum(self.family.too_long(self.components, captions, *how)) if self.family.takes_text else 0

    def _captions(self, captions: list[str]) -> dict[str, Tensor]:
        if not self.family.takes_text:
            return {}
        how = (self.options.instruction, self.options.max_tokens)
        encoded = self.family.encode_prompts(self.components, captions, *how)
        rows = {}
        for name, value in encoded.items():
            if value.ndim < 3:
                rows[CONDITION + name] = value
                continue
            mask = encoded.get(name.replace("embeds", "mask"))
            used = value.flatten(2).ne(0).any(-1) if mask is None else mask.bool()
            places = torch.arange(1, value.shape[1] + 1, device=value.device)
            lengths = (used * places).amax(1)
            rows[TOKENS + name] = torch.cat([row[:length] for row, length in zip(value, lengths, strict=True)])
            rows[LENGTHS + name] = lengths
            self.full_lengths[name] = value.shape[1]
        return rows

    def _stored(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, what: str) -> dict[str, Tensor]:
        stored = {
            name: (value.to(dtype) if value.is_floating_point() else value).cpu() for name, value in tensors.items()
        }
        if not all(value.isfinite().all() for value in stored.values()):
            name = str(dtype).removeprefix("torch.")
            raise of_one_process(f"{what} are not finite in {name}; --dtype float32 may help")
        return stored


def vae_factor(family: Family, components: Mapping[str, Any], channels: int, device: torch.device) -> int:
    """Pixels per latent along height and width, from encoding a black image."""
    black = torch.zeros(1, channels, PROBE, PROBE, device=device)
    return PROBE // family.posterior(components, black)["mean"].shape[-1]


def _open_pixels(data: DataOptions, family: Family) -> ImageSource:
    if data.streaming:
        raise UserError("data.streaming is true, but a cache needs to know all samples; set it to false to cache them")
    if data.train and (Path(data.train) / INDEX).is_file():
        raise UserError(f"data.train {data.train} is a cache already; the images themselves are expected")
    check_family(data, family)
    return open_source(data.train, "data.train", data, family, flip=False)


def _about(
    family: Family, components: Mapping[str, Any], config: TrainConfig, source: ImageSource, dtype: str, shard_size: int
) -> dict[str, Any]:
    """What a cache is made of and with: two caches that agree in it hold the same."""
    return {
        "format": FORMAT,
        "family": family.name,
        "vae": fingerprint(components["vae"]),
        "text": {name: fingerprint(components[name]) for name in family.text_components} or None,
        **described(config.data, family.takes_text),
        "flip": config.data.flip,
        "preprocessing": PREPROCESSING,
        "data": source.fingerprint,
        "shapes": source.shapes and [list(shape) for shape in source.shapes],
        "dtype": dtype,
        "shard_size": shard_size,
        "class_names": source.class_names,
    }


def _check_components(family: Family, components: Mapping[str, Any], data: DataOptions) -> None:
    where = "neither model.components nor model.pretrained names a pipeline with a"
    if "vae" not in components:
        raise UserError(f"{where} VAE, without which there is nothing to cache")
    for name in family.text_components:
        if name not in components:
            raise UserError(f"{where} {name.replace('_', ' ')}, without which captions cannot be encoded")
    channels = components["vae"].config.in_channels
    if data.channels != channels:
        raise UserError(f"data.channels is {data.channels}, but the VAE takes {channels}; set it to that")


def _batches(source: ImageSource, indices: range, batch_size: int) -> list[list[int]]:
    """The samples of a shard in batches of one shape, in the order in which they stand in its file."""
    shape_of = torch.tensor([source.shape_of(index) for index in indices])
    batches: list[list[int]] = []
    for place in shard_order(shape_of).tolist():
        same = batches and shape_of[batches[-1][0] - indices[0]] == shape_of[place]
        if not same or len(batches[-1]) == batch_size:
            batches.append([])
        batches[-1].append(indices[place])
    return batches


# Its files -----------------------------------------------------------------------------------------------------------


@dataclass
class _Content:
    """What a shard is going to hold."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    texts: list[str | None] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def add(self, tensors: Mapping[str, Tensor], batch: Batch) -> None:
        for name, value in tensors.items():
            self.parts.setdefault(name, []).append(value)
        self.texts += batch.texts
        self.damaged += [sentence for _, sentence in batch.skipped if sentence not in self.damaged]


def _open_cache(out: Path, about: dict[str, Any], shards: int, source: ImageSource, encoder: _Encoder) -> list[int]:
    """Claim `out` for the cache that `about` describes, and return the numbers of the shards it lacks."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock_folder(out, "--out")
        if (out / INDEX).is_file():
            found = read_index(out)
            different = {key: (found.get(key), value) for key, value in about.items() if found.get(key) != value}
            if different:
                key, (before, now) = next(iter(different.items()))
                raise UserError(
                    f"--out {out} holds a cache with {key} {short(before)} instead of {short(now)}; choose a new folder"
                )
        elif others := [path.name for path in out.iterdir() if path.name[0] != "."]:
            raise UserError(f"--out {out} holds other files ({', '.join(sorted(others)[:3])}); choose a new folder")
        sweep(out)
        if not (out / INDEX).is_file():
            write_whole(out / INDEX, json.dumps(about, indent=1) + "\n")
        if source.shapes is not None and not _is_whole(out / SHAPES):
            shape_of = torch.tensor([source.shape_of(index) for index in range(len(source))], dtype=torch.int16)
            _write(out, out / SHAPES, {"shape_of": shape_of})
        if about["text"] is not None and not _is_whole(out / SHARED):
            _write(out, out / SHARED, encoder.shared())
        return [number for number in range(shards) if not _is_whole(shard_file(out, number))]
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _write_shard(out: Path, number: int, content: _Content, encoder: _Encoder) -> None:
    # One after the other, so that no more than one of them is there twice.
    tensors = {name: torch.cat(content.parts.pop(name)).contiguous() for name in [*content.parts]}
    about: dict[str, Any] = {"damaged": content.damaged, "cut": encoder.cut(content.texts)}
    about |= {"lengths": encoder.full_lengths} if encoder.full_lengths else {}
    about |= {"texts": content.texts} if any(content.texts) else {}
    _write(out, shard_file(out, number), tensors, {name: json.dumps(value) for name, value in about.items()})


def _write(out: Path, path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, {"format": "pt", **(about or {})})
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in NO_ROOM:
            raise
        reason = getattr(error, "strerror", None) or error
        raise of_one_process(
            f"--out {out} cannot be written: {reason}; the shards that are there are kept, and the same command goes on"
        ) from None


def _close_cache(out: Path, about: dict[str, Any], counts: list[int]) -> dict[str, int]:
    """Write the index of a finished cache; return how many samples were damaged and captions cut."""
    sizes, cut, damaged = [], 0, set()
    for number in range(len(counts)):
        path = shard_file(out, number)
        sizes.append(path.stat().st_size)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        cut += json.loads(metadata["cut"])
        damaged.update(json.loads(metadata["damaged"]))
    write_whole(out / INDEX, json.dumps({**about, "shards": list(zip(counts, sizes, strict=True))}, indent=1) + "\n")
    return {"damaged": len(damaged), "cut": cut}


def _is_whole(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False
