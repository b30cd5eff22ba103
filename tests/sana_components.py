"""Small SANA components of the classes that the published pipelines hold, built without any download."""

from __future__ import annotations

import string
from typing import Any

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from mhla_diffusion import MHLAConfig

UNCHANGED = MHLAConfig(locality=0, eps=1e-15)


def small_transformer(seed: int = 0, **arguments: Any) -> SanaTransformer2DModel:
    """Stock SANA, 3 layers of 4×8 heads, 4-channel latents, captions of 16 channels."""
    torch.manual_seed(seed)
    defaults = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "num_layers": 3,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 16,
        "sample_size": 8,
    }
    return SanaTransformer2DModel(**{**defaults, **arguments}).eval()


def transformer_inputs(
    height: int, width: int, batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Arguments of the small transformer: noisy latents, masked captions of different lengths, timesteps."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.randint(1, 7, (batch, 1), generator=generator)
    return {
        "hidden_states": torch.randn(batch, 4, height, width, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 6, 16, generator=generator).to(dtype),
        "encoder_attention_mask": mask.long(),
        "timestep": 1000 * torch.rand(batch, generator=generator),
    }


def small_vae() -> AutoencoderDC:
    """An AutoencoderDC of factor 8 and 4 latent channels."""
    torch.manual_seed(1)
    channels = (8, 8, 8, 8)
    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    return AutoencoderDC(
        in_channels=3,
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        encoder_qkv_multiscales=((), (), (), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    ).eval()


def small_tokenizer() -> GemmaTokenizer:
    """A GemmaTokenizer that reads letter by letter, other characters byte by byte."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁" + string.ascii_letters + string.digits)
    return GemmaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], add_bos_token=True)


def small_text_encoder(vocab_size: int = 400) -> Gemma2Model:
    """A one-layer Gemma2Model of width 16."""
    torch.manual_seed(2)
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation="eager",
    )
    return Gemma2Model(config).eval()


def small_components(**transformer: Any) -> dict[str, Any]:
    """All components of a SanaPipeline; `transformer` are arguments of the transformer."""
    return {
        "tokenizer": small_tokenizer(),
        "text_encoder": small_text_encoder(),
        "vae": small_vae(),
        "transformer": small_transformer(**transformer),
        "scheduler": DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    }


def small_pipeline(pipeline_class: type = SanaPipeline, **transformer: Any) -> Any:
    """A stock pipeline of the small components, its progress bar off."""
    pipeline = pipeline_class(**small_components(**transformer))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def call_arguments(**changes: Any) -> dict[str, Any]:
    """A quick call: two prompts with guidance, 3 steps, 64×96 pixels (8×12 tokens)."""
    defaults = {
        "prompt": ["a red circle", "two dogs"],
        "height": 64,
        "width": 96,
        "num_inference_steps": 3,
        "guidance_scale": 4.5,
        "max_sequence_length": 12,
        "complex_human_instruction": None,
        "use_resolution_binning": False,
        "generator": [torch.Generator().manual_seed(i) for i in range(2)],
        "output_type": "np",
    }
    return {**defaults, **changes}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    actual, expected = torch.as_tensor(actual).double(), torch.as_tensor(expected).double()
    return ((actual - expected).abs().max() / expected.abs().max()).item()
