"""Generating a folder of images, one file per image, by one process or many.

Image i is a function of the seed, of i and of its condition: everything random comes from a generator of its own. So a
folder can be finished later, extended, or filled by several processes.

How exact that is: what is drawn is bit-identical whatever the batch size, the number of processes or what was there
already. The arithmetic of a network, however, may round differently when its inputs have another shape. So incomplete
batches are filled up, and for one `batch_size` every image is computed in the same shape; between different batch sizes
the outputs differ by rounding, which now and then moves a pixel to the neighbouring grey level.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from ..devices import usable_device
from ..errors import UserError
from ..training.data import sample_generator

MANIFEST, LABELS, ARRAY = "generation.json", "labels.jsonl", "samples.npz"


@dataclass(frozen=True)
class GenerationReport:
    """What `generate_images` did: images in the folder, those made now (by all processes), and how fast."""

    folder: Path
    num_images: int
    num_new: int
    seconds: float

    @property
    def images_per_second(self) -> float:
        """Images made per second, all processes together, writing included."""
        return self.num_new / self.seconds if self.num_new else 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_images} images in {self.folder}: {self.num_new} made now in {self.seconds:.1f} s "
            f"({self.images_per_second:.2f} images/s), {self.num_images - self.num_new} were there"
        )


def generate_images(
    pipeline: DiffusionPipeline,
    conditions: Sequence[dict[str, Any]],
    out: str | Path,
    *,
    seed: int = 0,
    num_inference_steps: int = 50,
    guidance_scale: float = 4.0,
    batch_size: int = 16,
    npz: bool = False,
    progress: bool = True,
) -> GenerationReport:
    """Generate image i from `conditions[i]` into `out/00000i.png`, skipping those that are there.

    Args:
        pipeline: any pipeline whose call takes a list per key of the conditions, `guidance_scale`,
            `num_inference_steps`, a list of generators, and returns `.images`.
        conditions: for each image the pipeline's arguments that belong to it, e.g. `{"class_labels": 3}`.
        out: folder; written beside the images are `generation.json` (the settings) and `labels.jsonl` (the conditions).
        seed: all images depend on it.
        num_inference_steps, guidance_scale: as in the pipeline's call.
        batch_size: images per call of the pipeline.
        npz: when all images are there, also write `samples.npz` with `arr_0`, uint8 (N, H, W, 3), for the ADM suite.
        progress: show a bar.

    Under `accelerate launch` or `torchrun` each process makes every n-th image.

    Raises:
        UserError: a bad argument; a folder that holds images of other settings, or more images; a full disk. What was
            written stays and is used by the next call.
    """
    conditions, out = list(conditions), Path(out)
    for name, value in (("batch_size", batch_size), ("num_inference_steps", num_inference_steps)):
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if not conditions:
        raise UserError("the number of images must be at least 1, got no conditions")
    state = process_state(cpu=pipeline.device.type == "cpu")
    manifest = {
        "seed": seed,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": float(guidance_scale),
        "pipeline": type(pipeline).__name__,
        "weights": fingerprint(pipeline),
        "dtype": str(pipeline.dtype).removeprefix("torch."),
        "num_images": len(conditions),
    }
    lines = [json.dumps({"file": file_name(i), **c}, ensure_ascii=False) for i, c in enumerate(conditions)]
    _check_folder(out, manifest, lines)
    missing = [i for i in range(len(conditions)) if not _complete(out / file_name(i))]
    # Every process has looked at the folder before the first one writes into it.
    state.wait_for_everyone()
    try:
        if state.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            _write(out / MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")
            _write(out / LABELS, "".join(f"{line}\n" for line in lines).encode())
        state.wait_for_everyone()
        own = missing[state.process_index :: state.num_processes]
        start = time.perf_counter()
        with _quiet(pipeline), _bar(len(own), state, progress) as bar:
            for first in range(0, len(own), batch_size):
                indices = own[first : first + batch_size]
                images = _generate_batch(pipeline, conditions, indices, manifest, batch_size)
                for index, image in zip(indices, images, strict=True):
                    _save_png(image, out / file_name(index))
                bar.update(len(indices))
        state.wait_for_everyone()
        seconds = time.perf_counter() - start
        if npz and state.is_main_process:
            write_array(out, len(conditions))
    except OSError as error:
        failure = UserError(
            f"writing to {str(out)!r} failed ({error.strerror or error}); the images written so far are kept"
        )
        failure.of_one_process = True  # the other processes do not know of it, so this one has to say it
        raise failure from None
    return GenerationReport(out, len(conditions), len(missing), seconds)


def process_state(cpu: bool = False) -> PartialState:
    """This process among those of `accelerate launch` or `torchrun`; alone otherwise."""
    # Processes wait for the slowest one, which on a shared machine may take longer than torch's ten minutes.
    options = {"timeout": timedelta(days=7)} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
    return PartialState(cpu=cpu, **options)


def load_pipeline(path: str | Path, dtype: str = "float32", device: str | None = None) -> DiffusionPipeline:
    """Load a pipeline, with or without MHLA, onto a device.

    Args:
        path: a folder of `save_pretrained`, or a hub id.
        dtype: "float32", "bfloat16" or "float16".
        device: default: this process's GPU if there is one.

    Raises:
        UserError: there is no pipeline at `path`.
    """
    path, place = str(path), usable_device(device) if device else process_state().device
    if Path(path).exists() and not (Path(path) / "model_index.json").is_file():
        raise UserError(f"{path!r} is not a saved pipeline: it holds no model_index.json")
    if not Path(path).exists() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        raise UserError(f"the pipeline {path!r} does not exist, and it is not a hub id (owner/name)")
    try:
        pipeline = DiffusionPipeline.from_pretrained(path, dtype=getattr(torch, dtype))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the pipeline {path!r} could not be loaded: {reason}") from None
    return pipeline.to(place)


def class_conditions(
    pipeline: DiffusionPipeline, num_images: int | None = None, labels: str | Path | None = None
) -> list[dict[str, int]]:
    """Conditions of a class-conditional pipeline.

    Args:
        num_images: this many images, image i of class i modulo the number of classes.
        labels: or a text file with one class per line: its number, or its name where the pipeline has names.

    Raises:
        UserError: not exactly one of the two; a pipeline without classes; a line that is not one of its classes.
    """
    if (num_images is None) == (labels is None):
        raise UserError("give either num_images or labels")
    transformer = getattr(pipeline, "transformer", None)
    num_classes = getattr(getattr(transformer, "config", None), "num_embeds_ada_norm", None)
    if not num_classes:
        raise UserError(f"{type(pipeline).__name__} is not conditioned on classes")
    if num_images is not None:
        if num_images < 1:
            raise UserError(f"num_images={num_images} must be at least 1")
        return [{"class_labels": i % num_classes} for i in range(num_images)]
    try:
        lines = Path(labels).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the label file {str(labels)!r} cannot be read ({error})") from None
    names = getattr(pipeline, "labels", None) or {}
    conditions = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        label = int(text) if text.isdecimal() else names.get(text)
        if label is None or label >= num_classes:
            raise UserError(
                f"line {number} of {str(labels)!r} is {text!r}; it must be a class from 0 to {num_classes - 1}"
                + (" or a class name of the pipeline" if names else "")
            )
        conditions.append({"class_labels": label})
    if not conditions:
        raise UserError(f"the label file {str(labels)!r} is empty")
    return conditions


def file_name(index: int) -> str:
    """Name of the file of image `index`."""
    return f"{index:06d}.png"


def fingerprint(pipeline: DiffusionPipeline) -> str:
    """A short hash of a pipeline's weights (a sample of each tensor) and of its scheduler's settings."""
    digest = hashlib.sha256()
    for name, component in sorted(pipeline.components.items()):
        if isinstance(component, torch.nn.Module):
            for key, value in component.state_dict().items():
                if value.is_meta:  # offloaded
                    continue
                flat = value.detach().flatten()
                sample = flat[:: max(1, flat.numel() // 256)].float().cpu()
                digest.update(f"{name}.{key} {tuple(value.shape)}".encode() + sample.numpy().tobytes())
        elif name == "scheduler":
            digest.update(json.dumps(dict(component.config), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:12]


def write_array(folder: str | Path, num_images: int) -> Path:
    """Write images 0 to `num_images` − 1 as `samples.npz` with `arr_0`, uint8 (N, H, W, 3), one at a time."""
    folder = Path(folder)
    target, temporary = folder / ARRAY, folder / f".{ARRAY}.tmp"
    with Image.open(folder / file_name(0)) as image:
        width, height = image.size
    header = {"descr": "|u1", "fortran_order": False, "shape": (num_images, height, width, 3)}
    with (
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        for index in range(num_images):
            with Image.open(folder / file_name(index)) as image:
                if image.size != (width, height):
                    raise UserError(
                        f"{file_name(index)} is {image.size[0]}x{image.size[1]}, but {file_name(0)} is "
                        f"{width}x{height}; an array needs images of one size"
                    )
                stream.write(np.asarray(image.convert("RGB")).tobytes())
    os.replace(temporary, target)
    return target


def _generate_batch(pipeline, conditions, indices: list[int], manifest: dict, batch_size: int) -> list[Image.Image]:
    padded = indices + [indices[-1]] * (batch_size - len(indices))
    arguments = {key: [conditions[i][key] for i in padded] for key in conditions[indices[0]]}
    images = pipeline(
        **arguments,
        guidance_scale=manifest["guidance_scale"],
        num_inference_steps=manifest["num_inference_steps"],
        generator=[sample_generator(manifest["seed"], "image", i) for i in padded],
        output_type="pil",
    ).images
    return images[: len(indices)]


def _check_folder(out: Path, manifest: dict[str, Any], lines: list[str]) -> None:
    """Raise UserError unless `out` is new, or holds the beginning of what is asked for now."""
    if out.exists() and not out.is_dir():
        raise UserError(f"the output folder {str(out)!r} is a file")
    path = out / MANIFEST
    if not path.is_file():
        if out.is_dir() and any(out.glob("*.png")):
            raise UserError(f"the output folder {str(out)!r} holds images without {MANIFEST}; choose a new folder")
        return
    try:
        found = json.loads(path.read_text())
        known = (out / LABELS).read_text(encoding="utf-8").splitlines() if (out / LABELS).is_file() else []
    except (ValueError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be read ({error}); choose a new folder") from None
    for name, value in manifest.items():
        if name != "num_images" and found.get(name) != value:
            raise UserError(
                f"the output folder {str(out)!r} holds images made with {name}={found.get(name)}, now it is {value}; "
                "choose a new folder"
            )
    if len(known) > len(lines):
        raise UserError(
            f"the output folder {str(out)!r} is one of {len(known)} images, now it is {len(lines)}; choose a new folder"
        )
    for index, (before, now) in enumerate(zip(known, lines, strict=False)):
        if before != now:
            raise UserError(
                f"the output folder {str(out)!r} holds other classes (image {index}: {before}, now {now}); "
                "choose a new folder"
            )


def _complete(path: Path) -> bool:
    """Whether a PNG file is there up to its last chunk, so that one cut off by a copy or a full disk is made again."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            file.seek(-8, os.SEEK_END)
            return start == b"\x89PNG\r\n\x1a\n" and file.read(4) == b"IEND"
    except OSError:
        return False


def _save_png(image: Image.Image, path: Path) -> None:
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    _write(path, buffer.getvalue())


def _write(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all."""
    # No two processes write the same file, so a temporary name that a killed one left behind is simply used again.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class _quiet:
    """The pipeline's own bar is switched off while ours is shown."""

    def __init__(self, pipeline: DiffusionPipeline):
        self.pipeline = pipeline

    def __enter__(self) -> None:
        self.before = getattr(self.pipeline, "_progress_bar_config", {})
        self.pipeline.set_progress_bar_config(disable=True)

    def __exit__(self, *_: Any) -> None:
        self.pipeline.set_progress_bar_config(**self.before)


def _bar(total: int, state: PartialState, progress: bool) -> tqdm:
    description = "images" if state.num_processes == 1 else f"images, 1 of {state.num_processes} processes"
    shown = progress and state.is_main_process
    return tqdm(total=total, desc=description, unit="image", disable=not shown, file=sys.stderr, dynamic_ncols=True)
