"""The format of the DiT release: names of its weights, and what a model's config is by them.

Names of the DiT release: (original, here). Queries, keys and values are one matrix there, `attn.qkv`, in this order.
The release's timestep embedding is cosines before sines, as diffusers' (flip_sin_to_cos), but its frequencies are not
those of diffusers' DiT (`freq_shift`), and its normalisations have eps 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .family import fill_with, read_config, read_heads

OUTSIDE_BLOCKS = (
    ("x_embedder.proj", "pos_embed.proj"),
    ("t_embedder.mlp.0", "embedder.timestep_embedder.linear_1"),
    ("t_embedder.mlp.2", "embedder.timestep_embedder.linear_2"),
    ("y_embedder.embedding_table", "embedder.class_embedder.embedding_table"),
    ("final_layer.adaLN_modulation.1", "proj_out_1"),
    ("final_layer.linear", "proj_out_2"),
)
IN_BLOCK = (
    ("adaLN_modulation.1", "norm1.linear"),
    ("attn.proj", "attn1.to_out.0"),
    ("attn.mhla", "attn1.processor"),
    ("mlp.fc1", "ff.net.0.proj"),
    ("mlp.fc2", "ff.net.2"),
)
MIXING = "attn.mhla.mixing.weights.0"


def position_table(width: int, side: int) -> Tensor:
    """DiT's fixed sine-cosine position embedding of a square grid, (1, side², width) float32.

    Half of the channels say the column and half the row, each as sines and then cosines of width/4 frequencies.
    """
    frequencies = 1 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns, rows = axis.expand(side, -1, -1), axis[:, None].expand(-1, side, -1)
    return torch.cat([columns, rows], dim=-1).flatten(0, 1)[None].float()


def original_config(
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    mhla: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Arguments of MHLADiTTransformer2DModel for weights in the original format.

    Sizes are read off the weights, the number of heads off the width, which says it for the published sizes (`presets`:
    arguments of the model by name). For other widths it comes from `metadata` ("heads"), as does everything where
    `to_original` wrote it ("config").
    """
    if "config" in metadata:
        return read_config(metadata, mhla)

    def shape(name: str, axes: int) -> tuple[int, ...]:
        if name not in weights or weights[name].ndim != axes:
            raise UserError(f"these are not the weights of an original DiT: they lack {name} of {axes} axes.")
        return tuple(weights[name].shape)

    width, in_channels, patch_size, _ = shape("x_embedder.proj.weight", 4)
    num_tokens = shape("pos_embed", 3)[1]
    indices = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    sizes = [(size["num_attention_heads"], size["attention_head_dim"]) for size in presets.values()]
    published = {heads * head_dim: heads for heads, head_dim in sizes}
    heads = read_heads(metadata) or published.get(width, 0)
    if not heads or width % heads:
        raise UserError(
            f"the weights do not say how many heads their width of {width} is cut into (known for "
            f"{', '.join(map(str, published))}); give heads, a divisor of {width}."
        )
    return {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": in_channels,
        "out_channels": shape("final_layer.linear.weight", 2)[0] // patch_size**2,
        "num_layers": len(indices),
        "sample_size": math.isqrt(num_tokens) * patch_size,
        "patch_size": patch_size,
        "num_embeds_ada_norm": shape("y_embedder.embedding_table.weight", 2)[0] - 1,
        "norm_eps": 1e-6,
        "share_embedder": True,
        "freq_shift": 0,
        "mhla": _original_mhla(weights, len(indices), mhla),
    }


def _original_mhla(weights: Mapping[str, Tensor], num_layers: int, mhla: Mapping[str, Any]) -> dict[str, Any] | None:
    """MHLAConfig fields as far as the weights say them, None where no layer has MHLA; the others are the defaults."""
    layers = [i for i in range(num_layers) if f"blocks.{i}.{MIXING}" in weights]
    if not layers:
        return None
    first = f"blocks.{layers[0]}.attn.mhla."
    separable = f"{first}mixing.weights.1" in weights
    sides = [weights[f"{first}mixing.weights.{axis}"].shape[0] for axis in range(1 + separable)]
    count = math.prod(sides)
    fields = {
        "mixing": "separable" if separable else "full",
        "gate": first + "gate.weight" in weights,
        "cpe": first + "cpe.weight" in weights,
        "head_norm": first + "head_norm.weight" in weights,
        "feature_map": "hedgehog" if any(name.startswith(first + "feature_map.") for name in weights) else "relu",
        "layers": "all" if len(layers) == num_layers else layers,
        **mhla,
    }
    if fields.get("blocks") is None:
        fields["blocks"] = tuple(sides) if separable else (math.isqrt(count), math.isqrt(count))
    if math.prod(fields["blocks"]) != count:
        raise UserError(
            f"the weights mix {count} blocks, which are not {'×'.join(map(str, fields['blocks']))}; give blocks: two "
            f"counts, along height and width, whose product is {count}."
        )
    return fields


def load_original(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill `model`, whose tensors are on the meta device, with `weights` themselves (their dtype)."""
    converted: dict[str, Tensor] = {}
    names: dict[str, str] = {}  # by the name here: that of the original
    for name, value in weights.items():
        if name == "pos_embed":
            continue
        here = [renamed(name)]
        if ".attn.qkv." in name:
            here = [here[0].replace(".to_qkv.", f".to_{part}.") for part in "qkv"]
        parts = [value] if len(here) == 1 else [part.clone() for part in value.tensor_split(3)]
        converted |= zip(here, parts, strict=True)
        names |= dict.fromkeys(here, name)

    def original_name(name: str) -> str:
        in_one = name.replace(".to_q.", ".to_qkv.").replace(".to_k.", ".to_qkv.")  # a missing one is in no table
        return names.get(name) or renamed(in_one, to_original=True)

    fill_with(model, converted, original_name, weights)

    side = model.config.sample_size // model.config.patch_size
    table = position_table(model.inner_dim, side)
    given = weights.get("pos_embed", table)
    tolerance = 1e-5 + torch.finfo(given.dtype).eps
    if given.shape != table.shape or (given.float() - table).abs().max() > tolerance:
        raise UserError(
            f"the original weights have a pos_embed of shape {tuple(given.shape)} that is not DiT's fixed sine-cosine "
            f"table of {side}×{side} tokens; diffusers' DiT computes that table and has no place for another."
        )
    model.pos_embed.pos_embed = table


def with_one_embedder(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model`, its blocks' copies of the timestep and label embedder (which must be equal) as one."""
    weights = model.state_dict()
    if model.config.get("share_embedder"):
        return weights
    result = {}
    for name, value in weights.items():
        head, found, rest = name.partition(".norm1.emb.")
        if found and not torch.equal(value, weights[f"transformer_blocks.0.norm1.emb.{rest}"]):
            raise UserError(
                f"the original format has one embedder for all blocks, but {name} differs from block 0's, as after "
                "training diffusers' embedder per block; presets and models read from an original file keep one."
            )
        result[f"embedder.{rest}" if found else name] = value
    return result


def renamed(name: str, to_original: bool = False) -> str:
    """The name of a weight here from its original name, or the other way round; `to_qkv` stands for its three parts."""
    blocks = ("transformer_blocks.", "blocks.") if to_original else ("blocks.", "transformer_blocks.")
    prefix, rest, table = "", name, OUTSIDE_BLOCKS
    if name.startswith(blocks[0]):
        index, _, rest = name.removeprefix(blocks[0]).partition(".")
        prefix, table = f"{blocks[1]}{index}.", (*IN_BLOCK, ("attn.qkv", "attn1.to_qkv"))
    for original, here in table:
        old, new = (here, original) if to_original else (original, here)
        if rest == old or rest.startswith(old + "."):
            return prefix + new + rest[len(old) :]
    raise UserError(f"the original format of DiT has no {'place for ' if to_original else ''}weight {name}.")
