"""Small DiT models, and DiT's forward pass written out from its published form, in float64 and with any attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DiTTransformer2DModel
from operator_reference import blocks_of_tokens
from torch import Tensor, nn

SMALL = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}


def small_dit(seed: int = 0, **arguments: Any) -> DiTTransformer2DModel:
    """Stock DiT, 2 layers of 2×8 heads on 4×4 tokens, 10 classes, learned variance; in eval mode."""
    torch.manual_seed(seed)
    return DiTTransformer2DModel(**{**SMALL, **arguments}).eval()


def small_vae() -> AutoencoderKL:
    """A real AutoencoderKL of factor 2 and 4 latent channels."""
    torch.manual_seed(1)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.3,
    ).eval()


def inputs(batch: int = 2, size: int = 8, seed: int = 0, channels: int = 4, dtype=torch.float32) -> dict[str, Tensor]:
    """Arguments of the small model; the last label is the null class."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, channels, size, size, generator=generator).to(dtype),
        "timestep": torch.randint(1000, (batch,), generator=generator),
        "class_labels": torch.arange(11 - batch, 11),
    }


def disturb(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise to all parameters, so that none is at a value (zero, one) that would hide it; in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(noise.abs() * 0.2 if ".mixing." in name else noise * 0.2)
    return model


def token_mixing(mixing: Tensor, grid: tuple[int, ...], blocks: tuple[int, ...]) -> Tensor:
    """m[block(q), block(t)] for all pairs of tokens, (N, N)."""
    block = torch.tensor(blocks_of_tokens(grid, blocks))
    return mixing[block][:, block]


def depthwise_taps(value: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor) -> Tensor:
    """3×3 depthwise convolution of (B, N, C) values on a 2D grid, neighbour by neighbour."""
    image = value.unflatten(1, grid)
    out = bias.expand(image.shape).clone()
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            for y in range(max(0, -dy), min(grid[0], grid[0] - dy)):
                for x in range(max(0, -dx), min(grid[1], grid[1] - dx)):
                    out[:, y, x] += weight[:, 0, dy + 1, dx + 1] * image[:, y + dy, x + dx]
    return out.flatten(1, 2)


def dense_mhla(
    weights: dict[str, Tensor],
    x: Tensor,
    heads: int,
    grid: tuple[int, int],
    blocks: tuple[int, int],
    features: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = lambda q, k, head: (q.relu(), k.relu()),
    normalize: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """An attention layer with MHLA, head by head through N×N matrices, from the layer's state dict; float64.

    Gate, head norm and position encoding are there where the state dict has them.
    """
    w = {name: weight.double() for name, weight in weights.items()}
    q, k, v = (x @ w[f"{name}.weight"].T + w[f"{name}.bias"] for name in ("to_q", "to_k", "to_v"))
    mixing = w["processor.mixing.weights.0"]
    if "processor.mixing.weights.1" in w:
        mixing = torch.kron(mixing, w["processor.mixing.weights.1"])
    pairs = token_mixing(mixing, grid, blocks)
    outs = []
    for head, (q_h, k_h, v_h) in enumerate(zip(*(t.chunk(heads, dim=-1) for t in (q, k, v)), strict=True)):
        phi_q, phi_k = features(q_h, k_h, head)
        scores = pairs * (phi_q @ phi_k.mT)
        out = scores @ v_h
        if normalize:
            out = out / (scores.sum(-1, keepdim=True) + eps)
        if "processor.head_norm.weight" in w:
            out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["processor.head_norm.weight"]
        outs.append(out)
    out = torch.cat(outs, dim=-1)
    if "processor.gate.weight" in w:
        gate = x @ w["processor.gate.weight"].T + w["processor.gate.bias"]
        out = out * gate / (1 + (-gate).exp())
    if "processor.cpe.weight" in w:
        out = out + depthwise_taps(v, grid, w["processor.cpe.weight"], w["processor.cpe.bias"])
    return out @ w["to_out.0.weight"].T + w["to_out.0.bias"]


def written_out_dit(
    model: nn.Module, inputs: dict[str, Tensor], attention: Callable[[dict[str, Tensor], Tensor], Tensor]
) -> Tensor:
    """DiT (Peebles and Xie 2023) from the weights of `model`, in float64, with `attention(layer's weights, x)`.

    Only the patch embedding, which is stock diffusers, is called.
    """
    w = {name: weight.double() for name, weight in model.state_dict().items()}
    patch, channels = model.config.patch_size, model.config.out_channels

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, eps: float) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()

    def conditioning(prefix: str) -> Tensor:
        # diffusers computes the sinusoids in float32 whatever the model's dtype.
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 127)
        angles = inputs["timestep"][:, None].float() * frequencies
        x = torch.cat([angles.cos(), angles.sin()], dim=-1).double()
        time = linear(f"{prefix}.timestep_embedder.linear_2", F.silu(linear(f"{prefix}.timestep_embedder.linear_1", x)))
        return time + w[f"{prefix}.class_embedder.embedding_table.weight"][inputs["class_labels"]]

    shared = "embedder.class_embedder.embedding_table.weight" in w
    x = model.pos_embed(inputs["hidden_states"]).double()
    for i in range(model.config.num_layers):
        name = f"transformer_blocks.{i}"
        c = conditioning("embedder" if shared else f"{name}.norm1.emb")
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{name}.norm1.linear", F.silu(c))[:, None].chunk(6, -1)
        layer = {k.removeprefix(f"{name}.attn1."): v for k, v in w.items() if k.startswith(f"{name}.attn1.")}
        x = x + gate1 * attention(layer, norm(x, 1e-6) * (1 + scale1) + shift1)
        h = linear(f"{name}.ff.net.0.proj", norm(x, 1e-5) * (1 + scale2) + shift2)
        x = x + gate2 * linear(f"{name}.ff.net.2", F.gelu(h, approximate="tanh"))
    c = conditioning("embedder" if shared else "transformer_blocks.0.norm1.emb")
    shift, scale = linear("proj_out_1", F.silu(c))[:, None].chunk(2, -1)
    x = linear("proj_out_2", norm(x, 1e-6) * (1 + scale) + shift)
    side = math.isqrt(x.shape[1])
    x = x.reshape(-1, side, side, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(-1, channels, side * patch, side * patch)
