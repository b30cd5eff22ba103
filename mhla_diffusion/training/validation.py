"""What a run looks at now and then: a grid of samples from fixed seeds, and the loss on held-out data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers.training_utils import EMAModel
from PIL import Image
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..backbones import family_named
from ..backbones.family import Family, Objective
from ..errors import UserError
from .checkpoints import learning_weights, on_main_process
from .config import TrainConfig, ValidationOptions
from .data import ImageSource, read_batches, sample_generator
from .encoding import Encoder, open_components, sample_conditions
from .model import load_components, load_saved, make_objective
from .sources import open_source
from .stage import join_processes


@contextlib.contextmanager
def averaged_weights(model: nn.Module, ema: EMAModel | None) -> Iterator[None]:
    """The model with its moving-average weights and in eval mode, for as long as the block lasts."""
    was_training = model.training
    model.eval()
    learning = list(learning_weights(model).values()) if ema is not None else []
    kept = [parameter.detach().clone() for parameter in learning]
    if ema is not None:
        ema.copy_to(learning)
    try:
        # A sampler's batch sizes differ from training's: compiling for them would take longer than they do.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward one leaves the outermost weights gathered
        with torch.no_grad():
            for parameter, value in zip(learning, kept, strict=True):
                parameter.copy_(value)
        model.train(was_training)


# Samples -------------------------------------------------------------------------------------------------------------


def grid_conditions(encoder: Encoder, config: TrainConfig) -> dict[str, Tensor]:
    """What the grid's samples are conditioned on, one row each, and null conditions: encoded once, at the start.

    Classes or captions that the config names, else all classes in turn or the first captions of the encoder's source.
    Rows are repeated where there are fewer than samples.
    """
    options, family = config.validation, encoder.family
    if not family.takes_text:
        labels = options.labels or list(range(len(encoder.source.class_names)))
        return {"class_labels": torch.tensor(labels, device=encoder.device)}
    if not options.prompts:
        return sample_conditions(encoder, options.images, config.train.seed)
    if not encoder.components.keys() >= {*family.text_components}:  # training itself reads a cache
        components = load_components(config.model, only=family.text_components)
        for part in components.values():
            if isinstance(part, nn.Module):
                part.to(encoder.device)
        encoder = Encoder(family, components, config.data, encoder.source, encoder.device, encoder.say)
    return encoder.encode(options.prompts) | encoder.null


def sample_shape(source: ImageSource, config: TrainConfig) -> tuple[int, ...]:
    """The shape of the grid's samples, (height, width) or (frames, height, width): that of the source's first one."""
    if source.shapes is not None:
        return tuple(source.shapes[source.shape_of(0)])
    square = (config.data.size, config.data.size)
    return square if config.data.num_frames == 1 else (config.data.num_frames, *square)


def _check_sides(shape: tuple[int, ...], multiple: int, count: int) -> None:
    """Raise `UserError` for a height or width that the pipeline, which makes the samples, does not take."""
    if any(side % multiple for side in shape[-2:]):
        raise UserError(
            f"validation.images is {count}, but samples of {'×'.join(map(str, shape))} pixels, as the data are, cannot "
            f"be made: the pipeline takes multiples of {multiple}; change data.size or data.buckets, or set "
            "validation.images to 0"
        )


def validation_grid(
    family: Family,
    model: nn.Module,
    components: dict[str, Any],
    options: ValidationOptions,
    conditions: dict[str, Tensor],
    shape: tuple[int, ...],
    seed: int,
    accelerator: Accelerator,
    videos: Path | None = None,
    fps: float = 16.0,
) -> Image.Image:
    """Samples that depend on `seed` and their place in the grid only, made by all processes together, in one picture.

    Of a video it shows the first, the middle and the last frame; all frames are in `videos`, a folder, as NN.mp4.
    """
    pipeline = family.build_pipeline(model, {k: v for k, v in components.items() if k not in family.text_components})
    pipeline.set_progress_bar_config(disable=True)
    total = options.images
    # With sharded weights every process must make as many forward passes as the others: the last ones repeat a sample.
    share = -(-total // accelerator.num_processes)
    mine = [(accelerator.process_index * share + i) % total for i in range(share)]
    rows = {name: value[[i % len(value) for i in mine]] for name, value in conditions.items()}
    output = pipeline(
        **family.pipeline_arguments(rows, shape),
        generator=[sample_generator(seed, "image", i) for i in mine],
        num_inference_steps=options.num_inference_steps,
        guidance_scale=options.guidance_scale,
        output_type="pil",
    )
    samples = [np.stack(frames) for frames in output.frames] if hasattr(output, "frames") else output.images
    arrays = [np.asarray(sample) for sample in samples]
    if arrays[0].ndim == 4:  # frames
        if videos is not None:
            own = max(0, min(share, total - accelerator.process_index * share))  # what is repeated another one writes
            save_videos(arrays[:own], mine[:own], videos, fps)
        arrays = [key_frames(array) for array in arrays]
    pixels = torch.from_numpy(np.stack(arrays)).to(accelerator.device)
    return image_grid(list(accelerator.gather(pixels).cpu().numpy()[:total]))


def key_frames(frames: np.ndarray) -> np.ndarray:
    """The first, middle and last of (T, H, W, 3) frames beside each other, (H, 3·W, 3); a single frame as it is."""
    chosen = sorted({0, len(frames) // 2, len(frames) - 1})
    return np.concatenate([frames[i] for i in chosen], axis=1)


def save_videos(videos: list[np.ndarray], names: list[int], folder: Path, fps: float) -> None:
    """Write (T, H, W, 3) 8-bit frames as NN.mp4 in `folder`."""
    from .video_files import write_mp4  # needs a video library, which images do without

    folder.mkdir(parents=True, exist_ok=True)
    for name, frames in zip(names, videos, strict=True):
        write_mp4(frames, folder / f"{name:02d}.mp4", fps)


def image_grid(images: list[np.ndarray], columns: int | None = None) -> Image.Image:
    """Arrays (H, W) or (H, W, 3) of 8-bit pixels side by side, in rows of `columns` (about a square if None)."""
    columns = columns or -(-len(images) // max(1, int(len(images) ** 0.5)))
    height, width = images[0].shape[:2]
    rows = -(-len(images) // columns)
    sheet = np.zeros((rows * height, columns * width, *images[0].shape[2:]), dtype=np.uint8)
    for i, image in enumerate(images):
        top, left = (i // columns) * height, (i % columns) * width
        sheet[top : top + height, left : left + width] = image
    return Image.fromarray(sheet)


# The loss ------------------------------------------------------------------------------------------------------------

NOISE_SEED = 0  # of the noise and timesteps of held-out samples, whatever `train.seed` is


def validation_loss(
    objective: Objective,
    model: nn.Module,
    encoder: Encoder,
    options: ValidationOptions,
    batch_size: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Mean loss and its parts over held-out samples, each with the same noise and timestep in every run.

    So losses of different models, and of runs with different seeds, can be compared. `model` may be the prepared one,
    so that the precision is that of training. Every process takes part.
    """
    source = encoder.source
    total = min(len(source), options.loss_images)
    batches = batches_of_one_shape(source, total, batch_size)
    rounds = -(-len(batches) // accelerator.num_processes)
    mine = [round * accelerator.num_processes + accelerator.process_index for round in range(rounds)]
    # Every process makes as many forward passes as the others; what is there to that end alone is not counted.
    plan = [[(0, index) for index in batches[i % len(batches)][0]] for i in mine]
    counts = [batches[i][1] if i < len(batches) else 0 for i in mine]
    sums: dict[str, float] = {}
    for count, batch in zip(counts, read_batches(source, plan, NOISE_SEED, num_workers=0), strict=True):
        generators = [sample_generator(NOISE_SEED, "validation", index) for _, index in batch.keys]
        latents, conditions = encoder(batch, generators)
        inputs = objective.prepare(accelerator.unwrap_model(model), latents, conditions, generators)
        for name, values in objective.loss(model, inputs).items():
            # In double precision, and therefore on the CPU: not every accelerator has it.
            sums[name] = sums.get(name, 0.0) + values.detach().cpu()[:count].double().sum().item()
    parts = gather_object([sums])
    return {name: sum(part[name] for part in parts) / total for name in sorted(sums)}


def batches_of_one_shape(source: ImageSource, total: int, batch_size: int) -> list[tuple[list[int], int]]:
    """The first `total` samples in batches whose samples are of one shape, each with the number of those that count.

    The rest of a batch, which is there to fill it, are samples that come in another place too.
    """
    groups: dict[int, list[int]] = {}
    for index in range(total):
        groups.setdefault(source.shape_of(index), []).append(index)
    batches = []
    for indices in groups.values():
        for first in range(0, len(indices), batch_size):
            batch = indices[first : first + batch_size]
            filling = [indices[i % len(indices)] for i in range(batch_size - len(batch))]
            batches.append((batch + filling, len(batch)))
    return batches


def held_out_loss(config: TrainConfig, pipeline: str | Path) -> dict[str, float]:
    """Validation loss and its parts of a saved pipeline, on the held-out data and with the objective of `config`."""
    family = family_named(config.model.family)
    source = open_source(config.data.train, "data.train", config.data, family, flip=False)
    held_out = open_source(
        config.data.validation or "",
        "data.validation",
        config.data,
        family,
        flip=False,
        class_names=source.class_names,
    )
    accelerator = join_processes(config.train.mixed_precision)
    options = dataclasses.replace(config.model, pretrained=str(pipeline), components=None, overrides={})
    model = load_saved(options).to(accelerator.device)
    components = open_components(options, config.data, family, [held_out], accelerator, pictures=False)
    encoder = Encoder(family, components, config.data, held_out, accelerator.device)
    objective = make_objective(family, config.train)
    with averaged_weights(model, None):
        return validation_loss(objective, model, encoder, config.validation, config.train.batch_size, accelerator)


# Both ----------------------------------------------------------------------------------------------------------------


class Validation:
    """The validations of one run: `loss` of the held-out data and `grid` of samples, with the averaged weights.

    Raises `UserError` where samples are asked for that cannot be decoded.
    """

    def __init__(
        self,
        config: TrainConfig,
        objective: Objective,
        encoder: Encoder,
        held_out: Encoder | None,
        components: dict[str, Any],
        accelerator: Accelerator,
    ) -> None:
        self.config, self.objective, self.held_out = config, objective, held_out
        self.components, self.accelerator = components, accelerator
        shown = held_out or encoder
        self.family = shown.family
        self.conditions: dict[str, Tensor] = {}
        if config.validation.images:
            if self.family.takes_text and "vae" not in components:
                raise UserError(
                    f"validation.images is {config.validation.images}, but no pipeline with a VAE is named to decode "
                    "them; name one in model.components, or set it to 0"
                )
            self.shape = sample_shape(shown.source, config)
            _check_sides(self.shape, self.family.pipeline_multiple, config.validation.images)
            # By one process, because a text encoder that training does without may have to be loaded for it.
            rows = on_main_process(accelerator, lambda: {k: v.cpu() for k, v in grid_conditions(shown, config).items()})
            self.conditions = {name: value.to(accelerator.device) for name, value in rows.items()}

    def __call__(
        self, prepared: nn.Module, ema: EMAModel | None, batch_size: int, videos: Path | None = None, **changes: Any
    ) -> tuple[dict[str, float], Image.Image | None]:
        """Held-out losses by name and the grid, where the run has them; every process must call it.

        Args:
            prepared: the model as it is trained.
            batch_size: of the loss.
            videos: folder for the grid's samples where they are videos.
            **changes: of the config's validation options, for this call.
        """
        options, seed = dataclasses.replace(self.config.validation, **changes), self.config.train.seed
        model = self.accelerator.unwrap_model(prepared)
        values: dict[str, float] = {}
        grid = None
        with averaged_weights(model, ema):
            if self.held_out is not None:
                parts = validation_loss(self.objective, prepared, self.held_out, options, batch_size, self.accelerator)
                values = {f"validation/{name}": value for name, value in parts.items()}
            if options.images:
                grid = validation_grid(
                    self.family,
                    model,
                    self.components,
                    options,
                    self.conditions,
                    self.shape,
                    seed,
                    self.accelerator,
                    videos,
                    self.config.data.fps,
                )
        return values, grid
