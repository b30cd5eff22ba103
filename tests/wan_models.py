"""Small Wan transformers and pipelines made of the real classes, for the tests."""

from __future__ import annotations

import warnings

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from mhla_diffusion import MHLAConfig, MHLAWanTransformer3DModel

SMALL = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 3,
    "rope_max_seq_len": 64,
}
PUBLISHED = {"blocks": (2, 2, 3), "normalize": False, "head_norm": True, "gate": True}


def stock_transformer(seed: int = 0, **arguments) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**{**SMALL, **arguments}).eval()


def mhla_transformer(seed: int = 0, trained: bool = True, **fields) -> MHLAWanTransformer3DModel:
    """A small MHLA model; `trained` moves every MHLA weight off its initial value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MHLAWanTransformer3DModel.from_base(stock_transformer(seed), MHLAConfig(**{**PUBLISHED, **fields}))
    if trained:
        disturb(model, seed)
    return model


@torch.no_grad()
def disturb(model: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if ".processor." in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    model.clip_mixing_()


def inputs(grid: tuple[int, int, int], batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict:
    """Arguments of a small transformer for a token grid (frames, height, width) of patches (1, 2, 2)."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = grid
    return {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width, generator=generator).to(dtype),
        "timestep": torch.linspace(100, 900, batch),
        "encoder_hidden_states": torch.randn(batch, 5, 16, generator=generator).to(dtype),
    }


def small_vae(seed: int = 0) -> AutoencoderKLWan:
    torch.manual_seed(seed)
    return AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 1.0, 2.0],
    ).eval()  # fmt: skip


def small_text_encoder(seed: int = 0) -> tuple[PreTrainedTokenizerFast, UMT5EncoderModel]:
    words = ["<pad>", "</s>", "<unk>", "a", "cat", "dog", "runs", "sleeps"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    torch.manual_seed(seed)
    config = UMT5Config(
        vocab_size=len(words), d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return fast, UMT5EncoderModel(config).eval()


def small_components() -> dict:
    tokenizer, text_encoder = small_text_encoder()
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": small_vae(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
