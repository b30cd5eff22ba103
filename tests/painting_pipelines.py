"""Pipelines without a network, for tests of what happens around them: they paint what can be recognised in a file."""

import numpy as np
import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from diffusers.utils import BaseOutput


class PaintingPipeline(DiffusionPipeline):
    """4×4 images: the prompt's length in the first channel, noise from the generators in the others."""

    def __init__(self, scheduler=None):
        super().__init__()
        self.register_modules(scheduler=scheduler or DDPMScheduler())

    def __call__(self, prompt=None, guidance_scale=1.0, num_inference_steps=1, generator=None, output_type="np"):
        return BaseOutput(images=_paint(prompt, generator, (4, 4, 3)))


class FilmingPipeline(DiffusionPipeline):
    """Videos: the prompt's length in the first channel, noise from the generators in the others."""

    vae_scale_factor_temporal = 1

    def __init__(self, scheduler=None):
        super().__init__()
        self.register_modules(scheduler=scheduler or DDPMScheduler())

    def __call__(
        self,
        prompt=None,
        height=16,
        width=16,
        num_frames=3,
        guidance_scale=1.0,
        num_inference_steps=1,
        generator=None,
        output_type="np",
    ):
        return BaseOutput(frames=_paint(prompt, generator, (num_frames, height, width, 3)))


def _paint(prompts, generators, shape):
    items = np.stack([torch.rand(shape, generator=draw).numpy() for draw in generators])
    for item, text in zip(items, prompts, strict=True):
        item[..., 0] = len(text) / 255
    return items
