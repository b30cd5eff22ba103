"""Class-conditional generation with DiT: stock, or with MHLA."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, DiTPipeline, DiTTransformer2DModel, ImagePipelineOutput
from diffusers.schedulers import KarrasDiffusionSchedulers
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from ..errors import UserError
from .common import MHLAPipelineMixin

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class MHLADiTPipeline(MHLAPipelineMixin, DiTPipeline):
    """DiTPipeline with `set_attn_processor`, for any number of classes, with or without a VAE.

    Args:
        transformer: a DiTTransformer2DModel, stock or MHLA. Its `num_embeds_ada_norm` is the number of classes and also
            the null class of guidance.
        vae: None for a model of pixels, which then are the latents.
        scheduler: any diffusers scheduler for ε; one with a learned variance also gets the predicted variance.
        id2label: class names by id (0, 1, …), comma-separated synonyms allowed.
    """

    _optional_components = ["vae"]

    def __init__(
        self,
        transformer: DiTTransformer2DModel,
        vae: AutoencoderKL | None,
        scheduler: KarrasDiffusionSchedulers,
        id2label: dict | None = None,
    ) -> None:
        super().__init__(transformer, vae, scheduler, id2label)
        self.register_to_config(id2label=id2label)  # the base class forgets it on saving

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int] | int,
        guidance_scale: float = 4.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_inference_steps: int = 50,
        output_type: str = "pil",
        return_dict: bool = True,
        latents: Tensor | None = None,
    ) -> ImagePipelineOutput | tuple:
        """Generate one image per class label.

        Args:
            class_labels: class ids, 0 to the number of classes − 1.
            guidance_scale: weight of classifier-free guidance; 1 or less switches it off and halves the work.
            generator: one generator, or one per image for images that do not depend on the batch.
            num_inference_steps: denoising steps.
            output_type: "pil", "np" (B, H, W, C) in [0, 1], "pt" (B, C, H, W) in [0, 1], or "latent".
            return_dict: whether to return an ImagePipelineOutput or a tuple.
            latents: starting noise (B, C, S, S), in place of the generator's.

        Raises:
            UserError: for a label that the model does not have or a list of generators of the wrong length.
        """
        if output_type not in OUTPUT_TYPES:
            raise UserError(f"output_type={output_type!r} must be one of {', '.join(OUTPUT_TYPES)}.")
        config = self.transformer.config
        device = self._execution_device
        labels, null_class = self._check_labels(class_labels), config.num_embeds_ada_norm
        if isinstance(generator, list) and len(generator) != len(labels):
            raise UserError(f"generator has {len(generator)} entries for {len(labels)} class_labels; give one each.")
        if num_inference_steps < 1:
            raise UserError(f"num_inference_steps={num_inference_steps} must be at least 1.")

        shape = (len(labels), config.in_channels, config.sample_size, config.sample_size)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=self.transformer.dtype)
        elif tuple(latents.shape) != shape:
            raise UserError(f"latents has shape {tuple(latents.shape)}; this model and these labels need {shape}.")
        latents = latents.to(device=device, dtype=self.transformer.dtype)
        guided = guidance_scale > 1
        classes = torch.tensor(labels + [null_class] * len(labels) if guided else labels, device=device)
        learned_variance = getattr(self.scheduler.config, "variance_type", None) in ("learned", "learned_range")

        takes_generator = "generator" in inspect.signature(self.scheduler.step).parameters
        step_kwargs = {"generator": generator} if takes_generator else {}

        self.scheduler.set_timesteps(num_inference_steps)
        latents = latents * self.scheduler.init_noise_sigma
        for t in self.progress_bar(self.scheduler.timesteps):
            model_input = self.scheduler.scale_model_input(torch.cat([latents] * 2) if guided else latents, t)
            output = self.transformer(
                model_input, timestep=t.to(device).expand(len(model_input)), class_labels=classes
            ).sample
            if guided:
                output = self._guide(output, guidance_scale)
            if not learned_variance:
                output = output[:, : config.in_channels]
            latents = self.scheduler.step(output, t, latents, **step_kwargs).prev_sample

        images = latents if output_type == "latent" else self._decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _check_labels(self, class_labels: Sequence[int] | int) -> list[int]:
        num_classes = self.transformer.config.num_embeds_ada_norm
        try:
            labels = torch.as_tensor(class_labels).reshape(-1).tolist()
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"class_labels={class_labels!r} must be class ids; get_label_ids gives those of names in `labels`."
            ) from None
        if not labels:
            raise UserError("class_labels is empty; give one class id per image.")
        for label in labels:
            if not isinstance(label, int) or not 0 <= label < num_classes:
                raise UserError(f"class_labels has {label}, but the model has classes 0 to {num_classes - 1}.")
        return labels

    def _guide(self, output: Tensor, guidance_scale: float) -> Tensor:
        """Classifier-free guidance on ε of (conditional, unconditional) halves; the variance is the conditional's."""
        channels = self.transformer.config.in_channels
        conditional, unconditional = output.chunk(2)
        epsilon = torch.lerp(unconditional[:, :channels], conditional[:, :channels], guidance_scale)
        return torch.cat([epsilon, conditional[:, channels:]], dim=1)

    def _decode(self, latents: Tensor, output_type: str) -> Tensor | list:
        samples = latents
        if self.vae is not None:
            samples = self.vae.decode((latents / self.vae.config.scaling_factor).to(self.vae.dtype)).sample
        samples = (samples.float() / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return samples
        samples = samples.cpu().permute(0, 2, 3, 1).numpy()
        return self.numpy_to_pil(samples) if output_type == "pil" else samples
