"""What a run looks at now and then: a grid of images from fixed seeds, and the loss on held-out images."""

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
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..backbones.family import Family, Objective
from .config import TrainConfig, ValidationOptions
from .data import ImageSource, read_batches, sample_generator
from .model import load_saved
from .sources import check_sources, open_source


@contextlib.contextmanager
def averaged_weights(model: nn.Module, ema: EMAModel | None) -> Iterator[None]:
    """The model with its moving-average weights and in eval mode, for as long as the block lasts."""
    was_training = model.training
    model.eval()
    kept = None
    if ema is not None:
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        ema.copy_to(model.parameters())
    try:
        # A sampler's batch sizes differ from training's: compiling for them would take longer than they do.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass without a backward one leaves the outermost weights gathered
        if kept is not None:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(value)
        model.train(was_training)


def validation_grid(
    family: Family,
    model: nn.Module,
    components: dict[str, Any],
    options: ValidationOptions,
    num_classes: int,
    seed: int,
    accelerator: Accelerator,
) -> Image.Image:
    """Images that depend on `seed` and their place in the grid only, made by all processes together, in one picture."""
    pipeline = family.build_pipeline(model, components)
    pipeline.set_progress_bar_config(disable=True)
    total = options.images
    # With sharded weights every process must make as many forward passes as the others: the last ones repeat an image.
    share = -(-total // accelerator.num_processes)
    mine = [(accelerator.process_index * share + i) % total for i in range(share)]
    images = pipeline(
        **_grid_conditions(options, num_classes, mine),
        generator=[sample_generator(seed, "image", i) for i in mine],
        num_inference_steps=options.num_inference_steps,
        guidance_scale=options.guidance_scale,
        output_type="pil",
    ).images
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).to(accelerator.device)
    return image_grid(list(accelerator.gather(pixels).cpu().numpy()[:total]))


def validation_loss(
    family: Family,
    objective: Objective,
    model: nn.Module,
    components: dict[str, Any],
    source: ImageSource,
    options: ValidationOptions,
    batch_size: int,
    seed: int,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Mean loss and its parts over held-out images, each with the same noise and timestep every time it is called.

    `model` may be the prepared one, so that the precision is that of training. Every process takes part.
    """
    total = min(len(source), options.loss_images)
    rounds = -(-total // (batch_size * accelerator.num_processes))
    plan = []
    for i in range(rounds):
        first = (i * accelerator.num_processes + accelerator.process_index) * batch_size
        plan.append([(0, index % total) for index in range(first, first + batch_size)])
    sums: dict[str, float] = {}
    position = accelerator.process_index * batch_size
    for batch in read_batches(source, plan, seed, num_workers=0):
        counts = torch.arange(position, position + batch_size) < total
        position += batch_size * accelerator.num_processes
        generators = [sample_generator(seed, "validation", index) for _, index in batch.keys]
        latents = batch.latents(family, components, generators, accelerator.device)
        conditions = {name: value.to(accelerator.device) for name, value in batch.conditions.items()}
        inputs = objective.prepare(accelerator.unwrap_model(model), latents, conditions, generators)
        for name, values in objective.loss(model, inputs).items():
            # In double precision, and therefore on the CPU: not every accelerator has it.
            sums[name] = sums.get(name, 0.0) + values.detach().cpu()[counts].double().sum().item()
    parts = gather_object([sums])
    return {name: sum(part[name] for part in parts) / total for name in sorted(sums)}


def held_out_loss(config: TrainConfig, pipeline: str | Path) -> dict[str, float]:
    """Validation loss and its parts of a saved pipeline, on the held-out images and with the objective of `config`.

    The noise is that of a training run with the same config, so losses of different models can be compared.
    """
    source = open_source(config.data.train, "data.train", config.data.size, config.data.channels, False)
    held_out = open_source(
        config.data.validation or "",
        "data.validation",
        config.data.size,
        config.data.channels,
        False,
        source.class_names,
    )
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=config.train.mixed_precision)
    options = dataclasses.replace(config.model, pretrained=str(pipeline), components=None, overrides={})
    family, model, components = load_saved(options)
    check_sources([held_out], family, components)
    for part in (model, *components.values()):
        if isinstance(part, nn.Module):
            part.to(accelerator.device)
    objective = family.objective(label_dropout=config.train.label_dropout, **config.train.objective)
    with averaged_weights(model, None):
        return validation_loss(
            family,
            objective,
            model,
            components,
            held_out,
            config.validation,
            config.train.batch_size,
            config.train.seed,
            accelerator,
        )


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


def _grid_conditions(options: ValidationOptions, num_classes: int, places: list[int]) -> dict[str, Any]:
    """The pipeline's arguments for the images at `places` of the grid."""
    if options.prompts:
        return {"prompt": [options.prompts[i % len(options.prompts)] for i in places]}
    labels = options.labels or list(range(num_classes))
    return {"class_labels": [labels[i % len(labels)] for i in places]}
