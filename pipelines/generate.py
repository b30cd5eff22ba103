"""Generating a folder of images or videos, one file per item, by one process or many.

Item i is a function of the seed, of i and of its condition: everything random comes from a generator of its own. So a
folder can be finished later, extended, or filled by several processes, started together or separately.

How exact that is: what is drawn is bit-identical whatever the batch size, the number of processes or what was there
already. The arithmetic of a network, however, may round differently when its inputs have another shape. So incomplete
batches are filled up, and for one `batch_size` every item is computed in the same shape; between different batch sizes
the outputs differ by rounding, which now and then moves a pixel to the neighbouring grey level.
"""

from __future__ import annotations

import json
import math
import sys
import zipfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline
from PIL import Image
from tqdm import tqdm

from ..devices import is_out_of_memory
from ..errors import UserError, of_one_process
from ..randomness import sample_generator
from ..training.checkpoints import on_main_process
from ..training.metrics import peak_memory_gib
from ..training.video_files import write_mp4
from .any_pipeline import (
    OWN_KEYS,
    call_arguments,
    call_parameters,
    fingerprint,
    makes_videos,
    precision,
    process_state,
)
from .any_pipeline import check_saved as check_saved
from .any_pipeline import load_pipeline as load_pipeline
from .generation_folder import IMAGE_SUFFIX, VIDEO_SUFFIX, Claims, check_place, complete, fill_in, item_files, whole
from .generation_folder import file_name as file_name
from .prompts import class_conditions as class_conditions

ARRAY = "samples.npz"
DEFAULT_FPS = 16  # of Wan2.1's training videos
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class GenerationReport:
    """What `generate_images` did.

    `num_new` items were made now by this run's processes, `num_elsewhere` meanwhile by processes started separately.
    """

    folder: Path
    num_images: int
    num_new: int
    seconds: float
    num_elsewhere: int = 0
    peak_memory_gib: float = 0.0  # of this process
    noun: str = "image"

    @property
    def images_per_second(self) -> float:
        """Items made per second, all processes of this run together, writing included."""
        return self.num_new / self.seconds if self.num_new else 0.0

    def __str__(self) -> str:
        elsewhere = f", {self.num_elsewhere} meanwhile by other processes" if self.num_elsewhere else ""
        return (
            f"{self.num_images} {self.noun}s in {self.folder}: {self.num_new} made now in {self.seconds:.1f} s "
            f"({self.images_per_second:.3g} {self.noun}s/s){elsewhere}, "
            f"{self.num_images - self.num_new - self.num_elsewhere} were there; "
            f"peak memory {self.peak_memory_gib:.2f} GiB"
        )


def generate_images(
    pipeline: DiffusionPipeline,
    conditions: Sequence[dict[str, Any]],
    out: str | Path,
    *,
    seed: int = 0,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    batch_size: int | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    fps: float | None = None,
    instruction: Sequence[str] | None = None,
    npz: bool = False,
    progress: bool = True,
) -> GenerationReport:
    """Generate image i from `conditions[i]` into `out/00000i.png`, skipping those that are there; or videos, as `.mp4`.

    Args:
        pipeline: any pipeline whose call takes a list per key of the conditions, `guidance_scale`,
            `num_inference_steps` and a list of generators, and returns `.images`, or `.frames` if it makes videos.
        conditions: for each item the pipeline's arguments that belong to it, e.g. `{"class_labels": 3}` or
            `{"prompt": "a cat"}`; besides, optionally, "name", the name of its file without suffix (with `/` in
            sub-folders of `out`), and "seed_index", the number that its randomness depends on in place of i. Items
            that all have both are added to what is in the folder.
        out: folder; written beside the items are `generation.json` (the settings) and `labels.jsonl` (the conditions).
        seed: all items depend on it.
        num_inference_steps, guidance_scale, height, width, num_frames: as in the pipeline's call; None: its defaults.
        batch_size: items per call of the pipeline, the last of which is filled up; None: 16 images, or all if they are
            fewer; 1 video.
        fps: frames per second of the videos, which their length follows from; None: 16, as Wan2.1 is trained with.
        instruction: lines before each prompt, SANA's `complex_human_instruction`; empty: nothing; None: the pipeline's.
        npz: when all images are there, also write `samples.npz` with `arr_0`, uint8 (N, H, W, 3), for the ADM suite.
        progress: show a bar.

    All processes at work on the folder, those of `accelerate launch` or `torchrun` and any started by hand, share the
    work, and each returns when all of it is done. What a killed process was making is made by the others.

    Raises:
        UserError: a bad argument; a folder that holds items of other settings, or more items; a full disk; too little
            memory; values that are not finite. What was written stays and is used by the next call.
    """
    conditions, out = list(conditions), Path(out)
    sizes = {"height": height, "width": width, "num_frames": num_frames}
    steering = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
    check_options(out, batch_size=batch_size, fps=fps, **steering, **sizes)
    if not conditions:
        raise UserError("the number of images must be at least 1, got no conditions")
    videos = makes_videos(pipeline)
    batch_size = batch_size or (1 if videos else min(16, len(conditions)))
    if npz and videos:
        raise UserError(f"npz is for images; {type(pipeline).__name__} makes videos")
    if fps is not None and not videos:
        raise UserError(f"fps={fps} is for videos; {type(pipeline).__name__} makes images")
    lines_before = None if instruction is None else list(instruction)
    call = call_arguments(pipeline, conditions, steering | sizes | {"complex_human_instruction": lines_before})
    files = item_files(conditions, VIDEO_SUFFIX if videos else IMAGE_SUFFIX)
    manifest = {
        "seed": seed,
        **{name: call.get(name) for name in steering},
        "pipeline": type(pipeline).__name__,
        "dtype": precision(pipeline),  # before the weights, whose hash depends on it
        "weights": fingerprint(pipeline),
        "num_images": len(conditions),
        **{name: call.get(name) for name in sizes if name in call_parameters(pipeline)},
        **({"fps": float(fps or DEFAULT_FPS)} if videos else {}),
        **({"instruction": lines_before} if "complex_human_instruction" in call_parameters(pipeline) else {}),
    }
    lines = [json.dumps({"file": file, **c}, ensure_ascii=False) for file, c in zip(files, conditions, strict=True)]
    state, claims = process_state(cpu=pipeline.device.type == "cpu"), None

    def open_folder() -> list[int]:
        nonlocal claims
        out.mkdir(parents=True, exist_ok=True)
        claims = Claims(out)
        with claims.alone():
            independent = all(condition.keys() >= OWN_KEYS for condition in conditions)
            return fill_in(out, manifest, lines, files, independent)

    try:
        missing = on_main_process(state, open_folder)
        claims = claims or Claims(out)
        start, made = perf_counter(), 0
        with _quiet(pipeline), _bar(len(missing), videos, progress and state.is_main_process) as bar:
            todo = _share(missing, state, claims)
            for indices in _claimed_batches(todo, [out / file for file in files], claims, batch_size, bar):
                arguments = _batch_arguments(conditions, indices, seed, batch_size)
                for index, item in zip(indices, _generate(pipeline, arguments | call, videos), strict=False):
                    _save(item, out / files[index], out, manifest.get("fps"))
                    claims.release(index)
                    bar.update()
                made += len(indices)
        made = sum(gather_object([made]))
        seconds = perf_counter() - start
        if npz and state.is_main_process:
            write_array(out, files)
    except OSError as error:
        raise of_one_process(
            f"writing to {str(out)!r} failed ({error.strerror or error}); what was written so far is kept"
        ) from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_little_memory(pipeline, batch_size, {name: call.get(name) for name in sizes}) from None
    finally:
        if claims:
            claims.close()
    return GenerationReport(
        out,
        len(conditions),
        made,
        seconds,
        len(missing) - made,
        peak_memory_gib(pipeline.device),
        "video" if videos else "image",
    )


def check_options(out: str | Path, **numbers: float | None) -> None:
    """Raise `UserError` for a folder or for numbers of `generate_images` that are impossible with any pipeline."""
    for name, value in numbers.items():
        if value is None:
            continue
        if not math.isfinite(value):
            raise UserError(f"{name}={value} must be a finite number")
        if name != "guidance_scale" and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
        if name == "fps" and value >= 1000:
            raise UserError(f"fps={value} must be below 1000")
    check_place(out)


def write_array(folder: str | Path, files: Sequence[str]) -> Path:
    """Write the images `files` of `folder` as `samples.npz` with `arr_0`, uint8 (N, H, W, 3), one at a time."""
    folder = Path(folder)
    with Image.open(folder / files[0]) as image:
        width, height = image.size
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(files), height, width, 3)}
    with (
        whole(folder / ARRAY, folder) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        for file in files:
            with Image.open(folder / file) as image:
                if image.size != (width, height):
                    raise UserError(
                        f"{file} is {image.size[0]}x{image.size[1]}, but {files[0]} is {width}x{height}; an array "
                        "needs images of one size"
                    )
                stream.write(np.asarray(image.convert("RGB")).tobytes())
    return folder / ARRAY


# One batch -----------------------------------------------------------------------------------------------------------


def _batch_arguments(conditions: list[dict[str, Any]], indices: list[int], seed: int, batch_size: int) -> dict:
    """What belongs to each item of a batch, which is filled up with its last item."""
    padded = indices + [indices[-1]] * (batch_size - len(indices))
    arguments = {key: [conditions[i][key] for i in padded] for key in conditions[0].keys() - OWN_KEYS}
    seeds = [conditions[i].get("seed_index", i) for i in padded]
    return arguments | {"generator": [sample_generator(seed, "image", i) for i in seeds]}


def _generate(pipeline: DiffusionPipeline, arguments: dict[str, Any], videos: bool) -> Iterator[np.ndarray]:
    """Images (H, W, C) or videos (T, H, W, C), uint8."""
    output = pipeline(**arguments, output_type="np")
    for values in output.frames if videos else output.images:
        values = np.asarray(values, dtype=np.float32)
        if not np.isfinite(values).all():
            raise of_one_process(
                f"the pipeline made values that are not finite with dtype={precision(pipeline)}; "
                "float32 and bfloat16 have a wider range than float16"
            )
        yield (values * 255).round().clip(0, 255).astype(np.uint8)


def _save(item: np.ndarray, path: Path, folder: Path, fps: float | None) -> None:
    with whole(path, folder) as temporary:
        if fps is None:
            Image.fromarray(item[..., 0] if item.shape[-1] == 1 else item).save(temporary)
            return
        try:
            write_mp4(item, temporary, fps)
        except UserError as error:
            raise of_one_process(f"{error}; what was written so far is kept") from None


def _too_little_memory(pipeline: DiffusionPipeline, batch_size: int, sizes: dict[str, Any]) -> UserError:
    """The error that says what to lower, with what was asked for where that was named."""
    given = {"batch_size": batch_size, **{name: size for name, size in sizes.items() if size is not None}}
    asked = ", ".join(f"{name}={value}" for name, value in given.items())
    ways = [name for name in sizes if name in call_parameters(pipeline)]
    ways = ["batch_size"] * (batch_size > 1) + ways + ["the precision (dtype=bfloat16)"] * (pipeline.dtype.itemsize > 2)
    return of_one_process(
        f"the memory of {pipeline.device} is too small for {asked} with dtype={precision(pipeline)}; "
        f"{'lower ' + ', '.join(ways) if ways else 'another device is needed'}; what was made so far is kept"
    )


# Sharing the work ----------------------------------------------------------------------------------------------------


def _share(missing: list[int], state: PartialState, claims: Claims) -> list[int]:
    """The items in the order in which this process looks at them: its own share, then that of the others."""
    own = missing[state.process_index :: state.num_processes]
    if not claims.available:
        return own
    chosen = set(own)
    return own + [index for index in missing if index not in chosen]


def _claimed_batches(
    todo: list[int], paths: list[Path], claims: Claims, batch_size: int, bar: tqdm
) -> Iterator[list[int]]:
    """Yield batches of items that this process has claimed, until every item of `todo` is there."""
    waiting, claimed = deque(todo), deque()
    while waiting:
        batch = []
        while waiting and len(batch) < batch_size:
            index = waiting.popleft()
            if not claims.take(index):
                claimed.append(index)
            elif complete(paths[index]):  # by another process, since this one first looked
                claims.release(index)
                bar.update()
            else:
                batch.append(index)
        if batch:
            yield batch
        elif claimed:
            bar.set_postfix_str("waiting for other processes")
            sleep(POLL_SECONDS)
        if not waiting:  # what others had claimed is there by now, or they were killed
            waiting, claimed = claimed, deque()


class _quiet:
    """The pipeline's own bar is switched off while ours is shown."""

    def __init__(self, pipeline: DiffusionPipeline):
        self.pipeline = pipeline

    def __enter__(self) -> None:
        self.before = getattr(self.pipeline, "_progress_bar_config", {})
        self.pipeline.set_progress_bar_config(disable=True)

    def __exit__(self, *_: Any) -> None:
        self.pipeline.set_progress_bar_config(**self.before)


def _bar(total: int, videos: bool, shown: bool) -> tqdm:
    unit = "video" if videos else "image"
    return tqdm(total=total, desc=f"{unit}s", unit=unit, disable=not shown, file=sys.stderr, dynamic_ncols=True)
