"""Video generation with Wan, from text, an image or a video: stock, or with MHLA."""

from __future__ import annotations

from typing import Any

from diffusers import WanImageToVideoPipeline, WanPipeline, WanVideoToVideoPipeline

from ..errors import UserError
from .common import MHLAPipelineMixin


class MHLAWanPipeline(MHLAPipelineMixin, WanPipeline):
    """WanPipeline with `set_attn_processor`, with or without text encoder.

    Without tokenizer and text encoder it takes `prompt_embeds` (and `negative_prompt_embeds` for guidance); else the
    call is that of WanPipeline.
    """

    _optional_components = [*WanPipeline._optional_components, "tokenizer", "text_encoder"]

    def _get_t5_prompt_embeds(self, *args: Any, **kwargs: Any) -> Any:
        if self.tokenizer is None or self.text_encoder is None:
            raise UserError(
                "this pipeline has no text encoder to read prompts with; pass prompt_embeds (and "
                "negative_prompt_embeds for guidance), or load it with tokenizer=… and text_encoder=…."
            )
        return super()._get_t5_prompt_embeds(*args, **kwargs)


class MHLAWanImageToVideoPipeline(MHLAPipelineMixin, WanImageToVideoPipeline):
    """WanImageToVideoPipeline with `set_attn_processor`."""


class MHLAWanVideoToVideoPipeline(MHLAPipelineMixin, WanVideoToVideoPipeline):
    """WanVideoToVideoPipeline with `set_attn_processor`."""
