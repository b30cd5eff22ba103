"""Wan2.1: text-to-video diffusion, softmax attention with rotary embedding on a grid of frames × height × width."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.configuration_utils import register_to_config

# Loading a saved pipeline, diffusers looks for ModelMixin in the module that defines the model class.
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn

from ..errors import UserError
from ..processor import MHLAConfig, MHLAProcessor
from .family import Example, Family, Objective, build_on_meta, image_size
from .flow_matching import FlowMatchingObjective, drop_captions
from .model import MHLAModelMixin
from .wan_release import load_original, original_config, renamed


class WanFamily(Family):
    """diffusers' WanTransformer3DModel and the pipelines around it."""

    name = "wan"
    # As published, and with the convolution: docs/wan_video.md
    default_config = MHLAConfig(blocks=(3, 5, 10), normalize=False, head_norm=True, gate=True, cpe=True)
    linear_blocks = (1, 1, 1)
    trained_with_softmax = True
    pipeline_multiple = 16
    takes_text = True
    text_components = ("tokenizer", "text_encoder")
    presets = {
        "Wan2.1-1.3B": {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 8960,
            "num_layers": 30,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
        }
    }

    @property
    def base_class(self) -> type[nn.Module]:
        return WanTransformer3DModel

    @property
    def model_class(self) -> type[nn.Module]:
        return MHLAWanTransformer3DModel

    def own_processor(self) -> Any:
        return WanAttnProcessor()

    def blocks_of(self, model: nn.Module) -> Sequence[nn.Module]:
        return model.blocks

    def hybrid_layers(self, num_layers: int) -> tuple[int, ...]:
        return tuple(i for i in range(num_layers) if i % 3)

    @staticmethod
    def tell_grid(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Read the grid off the rotary embedding (`GridRotaryPosEmbed`) and hand it on flat, as attention takes it."""
        rotary = args[3] if len(args) > 3 else kwargs["rotary_emb"]
        if rotary[0].ndim != 6:
            return None
        if isinstance(block.attn1.processor, MHLAProcessor):
            block.attn1.processor.grid = tuple(rotary[0].shape[1:4])
        flat = tuple(angles.flatten(1, 3) for angles in rotary)
        if len(args) > 3:
            return (*args[:3], flat, *args[4:]), kwargs
        return args, {**kwargs, "rotary_emb": flat}

    def usual_grid(self, model: nn.Module) -> tuple[int, ...]:
        latents = (21, 60, 104)  # 81 frames of 480×832
        return tuple(length // patch for length, patch in zip(latents, model.config.patch_size, strict=True))

    def objective(self, **options: Any) -> Objective:
        return WanObjective(**options)

    def pipeline_class(self) -> type:
        from ..pipelines import MHLAWanPipeline

        return MHLAWanPipeline

    def build_pipeline(self, transformer: nn.Module, components: Mapping[str, Any]) -> Any:
        scheduler = components.get("scheduler") or UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
        parts = {name: components.get(name) for name in ("tokenizer", "text_encoder", "vae")}
        return self.pipeline_class()(transformer=transformer, scheduler=scheduler, **parts)

    def example(self, arguments: Mapping[str, Any], size: Sequence[int], batch_size: int = 1) -> Example:
        if len(size) != 3 or size[0] < 1 or size[0] % 4 != 1:
            raise UserError(f"size={tuple(size)} must be frames (4k + 1 of them, as 81), height and width in pixels.")
        height, width = image_size(size[1:], 8 * arguments["patch_size"][1])
        latents = (batch_size, arguments["in_channels"], size[0] // 4 + 1, height // 8, width // 8)
        return Example(
            arguments={},
            latents=torch.randn(latents),
            conditions={"prompt_embeds": torch.randn(batch_size, 512, arguments["text_dim"])},
        )

    def pipeline_arguments(self, conditions: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Any]:
        embeds = conditions["prompt_embeds"]
        everywhere = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        negative, _ = drop_captions(embeds, everywhere, conditions.get("null_embeds"))
        frames, height, width = shape if len(shape) == 3 else (1, *shape)
        return {
            "prompt_embeds": embeds,
            "negative_prompt_embeds": negative,
            "num_frames": frames,
            "height": height,
            "width": width,
        }

    @torch.no_grad()
    def posterior(self, components: Mapping[str, Any], images: Tensor) -> dict[str, Tensor]:
        """Videos (B, 3, F, H, W) with F = 4k + 1 frames, or images (B, 3, H, W), to latents (B, C, k + 1, H/8, W/8).

        Each channel is shifted and scaled as WanPipeline undoes it before decoding. Without "std": Wan was trained on
        the VAE's mean.

        Raises:
            UserError: for frames, heights and widths that the VAE would cut off or fill up.
        """
        videos = images if images.ndim == 5 else images.unsqueeze(2)
        vae = components.get("vae")
        if vae is None:
            return {"mean": videos}
        frames, height, width = videos.shape[2:]
        if frames % vae.config.scale_factor_temporal != 1:
            raise UserError(f"videos have {frames} frames; Wan's VAE takes {vae.config.scale_factor_temporal}k + 1.")
        if height % vae.config.scale_factor_spatial or width % vae.config.scale_factor_spatial:
            raise UserError(
                f"videos are {height}×{width} pixels; Wan's VAE takes multiples of {vae.config.scale_factor_spatial}."
            )
        latents = vae.encode(videos.to(vae.dtype)).latent_dist.mean
        mean, std = (
            torch.tensor(values).to(latents).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return {"mean": (latents - mean) / std}

    def encode_prompts(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> dict[str, Tensor]:
        """As WanPipeline encodes a prompt: {"prompt_embeds": (B, L, C)}, zeros after each caption's end.

        In the dtype and on the device of `components["text_encoder"]`; L is `max_sequence_length`, 512 if None. The
        lines of `instruction` come before each caption; the pipeline itself puts none there.
        """
        encoder = WanPipeline(components["tokenizer"], components["text_encoder"], None, None)
        with torch.no_grad():
            embeds, _ = encoder.encode_prompt(
                _instructed(prompts, instruction),
                do_classifier_free_guidance=False,
                max_sequence_length=max_sequence_length or MAX_TOKENS,
                device=components["text_encoder"].device,
            )
        return {"prompt_embeds": embeds}

    def too_long(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> list[bool]:
        texts = [prompt_clean(text) for text in _instructed(prompts, instruction)]
        return [
            len(tokens) > (max_sequence_length or MAX_TOKENS) for tokens in components["tokenizer"](texts).input_ids
        ]

    def null_conditions(
        self, components: Mapping[str, Any], max_sequence_length: int | None = None
    ) -> dict[str, Tensor]:
        """The embedding of the empty prompt, {"null_embeds": (1, L, C)}."""
        embeds = self.encode_prompts(components, [""], None, max_sequence_length)["prompt_embeds"]
        return {"null_embeds": embeds}

    def from_original(
        self,
        state_dict: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        mhla: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Weights under the names of the Wan2.1 release, with MHLA layers or without (wan_release.py)."""
        weights = {name.removeprefix("model.diffusion_model."): value for name, value in state_dict.items()}
        config = original_config(weights, metadata or {}, mhla or {}, self)
        model = build_on_meta(MHLAWanTransformer3DModel, config)
        rope = model.rope
        model.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
        load_original(model, weights)
        return model.eval()

    def to_original(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        mhla = model.config.get("mhla")
        if mhla is not None and (mhla["feature_map"] not in ("relu", "relu_eps") or mhla["rope"] != "after"):
            raise UserError(
                f"MHLA with feature_map={mhla['feature_map']!r} and rope={mhla['rope']!r} has no original format, "
                "which knows feature_map='relu_eps' (or 'relu', nearly the same) and rope='after'."
            )
        weights = {}
        for name, value in model.state_dict().items():
            if ".processor.mixing." in name:
                index = int(name.split(".")[1])
                name = f"blocks.{index}.attn1.processor.mixing.weights.0"
                value = model.blocks[index].attn1.processor.mixing.matrix().detach()[:, :, None, None]
            weights[renamed(name, to_original=True)] = value.contiguous()
        config = {name: value for name, value in model.config.items() if not name.startswith("_")}
        if mhla is not None:
            config["mhla"] = {**mhla, "mixing": "full"}  # as which every mixing is written
        return weights, {"config": json.dumps(config)}


WAN = WanFamily()
MAX_TOKENS = 512  # that Wan's text encoder is given of a prompt


def _instructed(prompts: Sequence[str], instruction: Sequence[str] | None) -> list[str]:
    return ["\n".join(instruction or ()) + prompt for prompt in prompts]


class GridRotaryPosEmbed(WanRotaryPosEmbed):
    """Wan's rotary embedding in the shape of the token grid, (1, frames, height, width, 1, D) each of cos and sin.

    Every block so is told its grid with its arguments, and flattens them before use. Shapes are all that survives
    checkpointing, compiling, offloading and copying alike.
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        grid = [length // patch for length, patch in zip(hidden_states.shape[2:], self.patch_size, strict=True)]
        return tuple(angles.unflatten(1, grid) for angles in super().forward(hidden_states))


class MHLAWanTransformer3DModel(MHLAModelMixin, WanTransformer3DModel):
    """WanTransformer3DModel with MHLA in its self-attention layers, for text, image and video to video alike.

    Args: those of the base class, and
        mhla: fields of MHLAConfig; None keeps softmax attention everywhere.
    """

    family = WAN

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, ...] = (1, 2, 2),
        num_attention_heads: int = 40,
        attention_head_dim: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        text_dim: int = 4096,
        freq_dim: int = 256,
        ffn_dim: int = 13824,
        num_layers: int = 40,
        cross_attn_norm: bool = True,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        image_dim: int | None = None,
        added_kv_proj_dim: int | None = None,
        rope_max_seq_len: int = 1024,
        pos_embed_seq_len: int | None = None,
        mhla: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            patch_size=patch_size,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            text_dim=text_dim,
            freq_dim=freq_dim,
            ffn_dim=ffn_dim,
            num_layers=num_layers,
            cross_attn_norm=cross_attn_norm,
            qk_norm=qk_norm,
            eps=eps,
            image_dim=image_dim,
            added_kv_proj_dim=added_kv_proj_dim,
            rope_max_seq_len=rope_max_seq_len,
            pos_embed_seq_len=pos_embed_seq_len,
        )
        self._init_mhla(mhla)

    def _hook_grids(self) -> None:
        super()._hook_grids()
        self.rope.__class__ = GridRotaryPosEmbed


class WanObjective(FlowMatchingObjective):
    """Wan's loss: flow matching with shift 3 and logit-normal σ.

    Conditions: `prompt_embeds` (B, L, text_dim), zeros after the caption's end as WanPipeline makes them; and
    `null_embeds` (1 or B, L', text_dim), the embedding of "", which stands in for dropped captions (zeros where
    it is not given, unlike in guidance).
    """

    def prepare(
        self,
        model: nn.Module,
        latents: Tensor,
        conditions: Mapping[str, Tensor],
        generators: Sequence[torch.Generator],
    ) -> dict[str, Any]:
        patch = model.config.patch_size
        if any(length % part for length, part in zip(latents.shape[2:], patch, strict=True)):
            raise UserError(
                f"latents are {'×'.join(map(str, latents.shape[2:]))} (frames × height × width), which the model's "
                f"patches of {'×'.join(map(str, patch))} do not divide; choose other heights and widths (multiples of "
                "16 pixels for Wan2.1)."
            )
        return super().prepare(model, latents, conditions, generators)

    def condition(self, conditions: Mapping[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        embeds, _ = drop_captions(conditions["prompt_embeds"], dropped, conditions.get("null_embeds"))
        return {"encoder_hidden_states": embeds}

    def predict(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        noisy, embeds = inputs["noisy"], inputs["encoder_hidden_states"]
        return model(noisy, timestep=inputs["timestep"], encoder_hidden_states=embeds.to(noisy.dtype)).sample
