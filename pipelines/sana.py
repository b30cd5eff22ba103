"""Text-to-image generation with SANA: stock, or with MHLA."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPAGPipeline,
    SanaPipeline,
    SanaTransformer2DModel,
)
from transformers import Gemma2PreTrainedModel, GemmaTokenizer, GemmaTokenizerFast

from ..backbones.sana import SANA, MHLASanaTransformer2DModel, PerturbedMHLA
from ..errors import UserError
from ..processor import MHLAProcessor
from .common import MHLAPipelineMixin

# Of the published models, whose aspect-ratio bins SanaPipeline knows.
BINNED_SAMPLE_SIZES = (16, 32, 64, 128)
PUBLISHED_FACTOR = 32


class MHLASanaPipeline(MHLAPipelineMixin, SanaPipeline):
    """SanaPipeline with `set_attn_processor`, for a model of any native size, with or without text encoder and VAE.

    Without tokenizer and text encoder it takes `prompt_embeds`; without a VAE it gives `output_type="latent"`. A model
    whose `sample_size` is none of the published ones (16, 32, 64, 128 latent pixels), or whose VAE has another factor
    than 32, makes images of its native size by default, without aspect-ratio bins; else the call is SanaPipeline's.
    """

    _optional_components = ["tokenizer", "text_encoder", "vae"]

    # Stated anew for its types: DiffusionPipeline.from_pipe hands over components of these very classes only.
    def __init__(
        self,
        tokenizer: GemmaTokenizer | GemmaTokenizerFast | None,
        text_encoder: Gemma2PreTrainedModel | None,
        vae: AutoencoderDC | None,
        transformer: SanaTransformer2DModel | MHLASanaTransformer2DModel,
        scheduler: DPMSolverMultistepScheduler,
    ) -> None:
        super().__init__(tokenizer, text_encoder, vae, transformer, scheduler)

    @functools.wraps(SanaPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(SanaPipeline.__call__).bind(self, *args, **kwargs)
        given = call.arguments
        if self.vae is None and given.get("output_type") != "latent":
            raise UserError("this pipeline has no VAE; ask for output_type='latent', or load it with vae=….")
        sample_size = self.transformer.config.sample_size
        if sample_size not in BINNED_SAMPLE_SIZES or self.vae_scale_factor != PUBLISHED_FACTOR:
            native = sample_size * self.vae_scale_factor
            given = {"height": native, "width": native, "use_resolution_binning": False, **given}
        return super().__call__(**{name: value for name, value in given.items() if name != "self"})

    def _get_gemma_prompt_embeds(self, *args: Any, **kwargs: Any) -> Any:
        if self.tokenizer is None or self.text_encoder is None:
            raise UserError(
                "this pipeline has no text encoder to read prompts with; pass prompt_embeds and "
                "prompt_attention_mask (and the negative ones for guidance), or load it with tokenizer=… and "
                "text_encoder=…."
            )
        return super()._get_gemma_prompt_embeds(*args, **kwargs)


class MHLASanaPAGPipeline(MHLAPipelineMixin, SanaPAGPipeline):
    """SanaPAGPipeline, whose perturbed layers keep their MHLA for the part of the batch that is not perturbed.

    `apply_mhla` makes a SanaPAGPipeline one of these.
    """

    def __init__(
        self,
        tokenizer: GemmaTokenizer | GemmaTokenizerFast,
        text_encoder: Gemma2PreTrainedModel,
        vae: AutoencoderDC,
        transformer: SanaTransformer2DModel | MHLASanaTransformer2DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        pag_applied_layers: str | list[str] = "transformer_blocks.0",
    ) -> None:
        super().__init__(tokenizer, text_encoder, vae, transformer, scheduler, pag_applied_layers)

    @functools.wraps(SanaPAGPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        finally:  # a generation that was interrupted leaves its processors on the model
            for attn in self._self_attention():
                if isinstance(attn.processor, PerturbedMHLA):
                    attn.set_processor(attn.processor.mhla)

    def _set_pag_attn_processor(self, pag_applied_layers: list[str], do_classifier_free_guidance: bool) -> None:
        # The base class assigns a processor without weights, which torch refuses where one with weights stands.
        layers = {attn: attn.processor for attn in self._self_attention() if isinstance(attn.processor, MHLAProcessor)}
        for attn in layers:
            attn.set_processor(SANA.own_processor())
        try:
            super()._set_pag_attn_processor(pag_applied_layers, do_classifier_free_guidance)
        finally:
            parts = 3 if do_classifier_free_guidance else 2
            for attn, mhla in layers.items():
                perturbed = attn.processor in self._pag_attn_processors
                attn.set_processor(PerturbedMHLA(mhla, parts) if perturbed else mhla)

    def _self_attention(self) -> list[Any]:
        return [block.attn1 for block in SANA.blocks_of(self.transformer)]
