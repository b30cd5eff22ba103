"""SANA: text-to-image diffusion (Xie et al. 2024), ReLU linear attention on the grid of latent pixels."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, SanaPAGPipeline, SanaPipeline, SanaTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0

# Loading a saved pipeline, diffusers looks for ModelMixin in the module that defines the model class.
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401
from torch import Tensor, nn

from ..errors import UserError
from ..processor import MHLAConfig, MHLAProcessor
from .family import Example, Family, Objective, image_size
from .flow_matching import FlowMatchingObjective, drop_captions
from .model import MHLAModelMixin


class SanaFamily(Family):
    """diffusers' SanaTransformer2DModel and the pipelines that use it."""

    name = "sana"
    default_config = MHLAConfig(blocks=(4, 4), eps=1e-15, locality=0.0)  # unchanged at first: docs/sana_emoji.md
    linear_blocks = (1, 1)
    trained_with_softmax = False
    pipeline_multiple = 32
    takes_text = True
    text_components = ("tokenizer", "text_encoder")
    presets = {
        f"SANA-{size}": {
            "num_layers": depth,
            "num_attention_heads": heads,
            "attention_head_dim": 32,
            "num_cross_attention_heads": cross_heads,
            "cross_attention_head_dim": width // cross_heads,
            "cross_attention_dim": width,
            "caption_channels": 2304,
            "mlp_ratio": 2.5,
            "in_channels": 32,
            "out_channels": 32,
            "patch_size": 1,
            "sample_size": 32,
        }
        for size, depth, width, heads, cross_heads in (("0.6B", 28, 1152, 36, 16), ("1.6B", 20, 2240, 70, 20))
    }

    @property
    def base_class(self) -> type[nn.Module]:
        return SanaTransformer2DModel

    @property
    def model_class(self) -> type[nn.Module]:
        return MHLASanaTransformer2DModel

    def own_processor(self) -> Any:
        return SanaLinearAttnProcessor2_0()

    def blocks_of(self, model: nn.Module) -> Sequence[nn.Module]:
        return model.transformer_blocks

    @staticmethod
    def tell_grid(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(block.attn1.processor, MHLAProcessor | PerturbedMHLA):
            height = kwargs["height"] if "height" in kwargs else args[5]
            width = kwargs["width"] if "width" in kwargs else args[6]
            block.attn1.processor.grid = (height, width)

    def usual_grid(self, model: nn.Module) -> tuple[int, ...]:
        side = model.config.sample_size // model.config.patch_size
        return (side, side)

    def retrofit_warning(self, config: MHLAConfig) -> str | None:
        constant = config.locality == 0 or all(count == 1 for count in config.blocks)
        if constant and config.feature_map == "relu" and config.normalize and not config.head_norm:
            return None  # the model computes what it computed before
        return (
            "this model's linear attention is now MHLA that starts from another function: its images differ from "
            "before until it is fine-tuned (accelerate launch scripts/finetune.py --config configs/….yaml); "
            "MHLAProcessor(locality=0) starts from exactly the model as it was."
        )

    def adapt_pipeline(self, pipeline: Any) -> None:
        from ..pipelines.sana import MHLASanaPAGPipeline

        if type(pipeline) is SanaPAGPipeline:
            pipeline.__class__ = MHLASanaPAGPipeline

    def objective(self, **options: Any) -> Objective:
        return SanaObjective(**options)

    def pipeline_class(self) -> type:
        from ..pipelines import MHLASanaPipeline

        return MHLASanaPipeline

    def build_pipeline(self, transformer: nn.Module, components: Mapping[str, Any]) -> Any:
        scheduler = components.get("scheduler") or DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        return self.pipeline_class()(
            tokenizer=components.get("tokenizer"),
            text_encoder=components.get("text_encoder"),
            vae=components.get("vae"),
            transformer=transformer,
            scheduler=scheduler,
        )

    def example(self, arguments: Mapping[str, Any], size: Sequence[int], batch_size: int = 1) -> Example:
        height, width = image_size(size, 32 * arguments["patch_size"])
        length = 300  # tokens of a caption, as SanaPipeline pads them
        return Example(
            arguments={},
            latents=torch.randn(batch_size, arguments["in_channels"], height // 32, width // 32),
            conditions={
                "prompt_embeds": torch.randn(batch_size, length, arguments["caption_channels"]),
                "prompt_mask": torch.ones(batch_size, length, dtype=torch.int64),
            },
        )

    def pipeline_arguments(self, conditions: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Any]:
        embeds, mask = conditions["prompt_embeds"], conditions["prompt_mask"]
        everywhere = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        nulls = {"null_embeds": conditions.get("null_embeds"), "null_mask": conditions.get("null_mask")}
        prompt_embeds, prompt_mask = drop_captions(embeds, ~everywhere, mask=mask, **nulls)  # both of one length
        negative_embeds, negative_mask = drop_captions(embeds, everywhere, mask=mask, **nulls)
        return {
            "prompt_embeds": prompt_embeds,
            "prompt_attention_mask": prompt_mask,
            "negative_prompt": None,
            "negative_prompt_embeds": negative_embeds,
            "negative_prompt_attention_mask": negative_mask,
            "height": shape[-2],
            "width": shape[-1],
            "use_resolution_binning": False,
        }

    @torch.no_grad()
    def posterior(self, components: Mapping[str, Any], images: Tensor) -> dict[str, Tensor]:
        vae = components.get("vae")  # an AutoencoderDC, whose latents are not drawn
        if vae is None:
            return {"mean": images}
        return {"mean": vae.encode(images.to(vae.dtype)).latent * vae.config.scaling_factor}

    def encode_prompts(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> dict[str, Tensor]:
        """As SanaPipeline encodes a prompt, with its instruction ("complex human instruction") before it.

        Args:
            components: "tokenizer" and "text_encoder".
            prompts: B captions.
            instruction: lines put before each caption; None for the pipeline's own, () for none.
            max_sequence_length: L, tokens kept per caption; None for the pipeline's 300.

        Returns:
            "prompt_embeds" (B, L, C) in the encoder's dtype and "prompt_mask" (B, L) int64, on the encoder's device.
        """
        instruction = complex_human_instruction() if instruction is None else instruction
        encoder = SanaPipeline(components["tokenizer"], components["text_encoder"], None, None, None)
        with torch.no_grad():
            embeds, mask, _, _ = encoder.encode_prompt(
                list(prompts),
                do_classifier_free_guidance=False,
                device=components["text_encoder"].device,
                max_sequence_length=max_sequence_length or MAX_TOKENS,
                complex_human_instruction=list(instruction),
            )
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def too_long(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> list[bool]:
        before = "\n".join(complex_human_instruction() if instruction is None else instruction)
        limit = max_sequence_length or MAX_TOKENS
        if before:  # the instruction has room of its own, of which the pipeline takes two tokens
            limit += len(components["tokenizer"].encode(before)) - 2
        texts = [before + prompt.lower().strip() for prompt in prompts]
        return [len(tokens) > limit for tokens in components["tokenizer"](texts).input_ids]

    def null_conditions(
        self, components: Mapping[str, Any], max_sequence_length: int | None = None
    ) -> dict[str, Tensor]:
        """The embedding of the empty negative prompt: "null_embeds" (1, L, C) and "null_mask" (1, L)."""
        null = self.encode_prompts(components, [""], (), max_sequence_length)
        return {"null_embeds": null["prompt_embeds"], "null_mask": null["prompt_mask"]}


SANA = SanaFamily()
MAX_TOKENS = 300  # that SanaPipeline keeps of a prompt


def complex_human_instruction() -> list[str]:
    """The lines that SanaPipeline puts before a prompt unless told otherwise."""
    return list(inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default)


class MHLASanaTransformer2DModel(MHLAModelMixin, SanaTransformer2DModel):
    """SanaTransformer2DModel with MHLA in its self-attention layers.

    Args: those of the base class, and
        mhla: fields of MHLAConfig; None keeps SANA's linear attention everywhere.
    """

    family = SANA

    @register_to_config
    def __init__(
        self,
        in_channels: int = 32,
        out_channels: int | None = 32,
        num_attention_heads: int = 70,
        attention_head_dim: int = 32,
        num_layers: int = 20,
        num_cross_attention_heads: int | None = 20,
        cross_attention_head_dim: int | None = 112,
        cross_attention_dim: int | None = 2240,
        caption_channels: int = 2304,
        mlp_ratio: float = 2.5,
        dropout: float = 0.0,
        attention_bias: bool = False,
        sample_size: int = 32,
        patch_size: int = 1,
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        interpolation_scale: int | None = None,
        guidance_embeds: bool = False,
        guidance_embeds_scale: float = 0.1,
        qk_norm: str | None = None,
        timestep_scale: float = 1.0,
        mhla: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            in_channels=in_channels,
            out_channels=out_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            num_cross_attention_heads=num_cross_attention_heads,
            cross_attention_head_dim=cross_attention_head_dim,
            cross_attention_dim=cross_attention_dim,
            caption_channels=caption_channels,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
            attention_bias=attention_bias,
            sample_size=sample_size,
            patch_size=patch_size,
            norm_elementwise_affine=norm_elementwise_affine,
            norm_eps=norm_eps,
            interpolation_scale=interpolation_scale,
            guidance_embeds=guidance_embeds,
            guidance_embeds_scale=guidance_embeds_scale,
            qk_norm=qk_norm,
            timestep_scale=timestep_scale,
        )
        self._init_mhla(mhla)


class PerturbedMHLA(nn.Module):
    """Stands on a layer in perturbed-attention guidance, as diffusers' PAG processors for SANA do.

    The last of `parts` equal parts of the batch gets identity attention (every token's output is its own value), the
    others the layer's MHLA.
    """

    def __init__(self, mhla: MHLAProcessor, parts: int) -> None:
        super().__init__()
        self.mhla = mhla
        self.parts = parts
        self.grid: tuple[int, ...] | None = None

    def forward(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention of `attn` on (parts · B, N, C) hidden states; the other arguments are never given."""
        self.mhla.grid = self.grid
        last = hidden_states.shape[0] // self.parts
        attended, perturbed = hidden_states.split([hidden_states.shape[0] - last, last])
        perturbed = attn.to_out[1](attn.to_out[0](attn.to_v(perturbed)))
        return torch.cat([self.mhla(attn, attended), perturbed])


class SanaObjective(FlowMatchingObjective):
    """Flow matching as SANA is trained: shifted logit-normal σ, captions dropped to the null embedding.

    Conditions: "prompt_embeds" (B, L, C) and "prompt_mask" (B, L), nonzero where there is a token; for the dropped
    captions "null_embeds" (1 or B, L', C) and "null_mask" (1 or B, L'), zeros where they are not given.
    """

    def prepare_model(self, model: nn.Module) -> None:
        if model.config.guidance_embeds:
            raise UserError(
                "this SANA takes an embedded guidance scale (guidance_embeds=True): it is a distilled Sprint model, "
                "which flow matching would undo; fine-tune the model it was distilled from."
            )

    def condition(self, conditions: Mapping[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        embeds, mask = drop_captions(
            conditions["prompt_embeds"],
            dropped,
            conditions.get("null_embeds"),
            conditions["prompt_mask"],
            conditions.get("null_mask"),
        )
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def predict(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        noisy = inputs["noisy"]
        output = model(
            noisy,
            encoder_hidden_states=inputs["prompt_embeds"].to(noisy.dtype),
            encoder_attention_mask=inputs["prompt_mask"],
            timestep=inputs["timestep"],
        ).sample
        return output[:, : noisy.shape[1]]  # a model with a learned σ predicts it in further channels
