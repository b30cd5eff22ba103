"""The formats of the Wan2.1 release and of the released Wan-MHLA: names of weights, and a model's config by them.

Names of the Wan2.1 release and, for the self-attention of MHLA layers, of the released Wan-MHLA: (original, here).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import UserError
from ..layout import check_counts
from .family import Family, fill_with, metadata_field, read_config, read_heads

OUTSIDE_BLOCKS = (
    ("patch_embedding", "patch_embedding"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1"),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj"),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2"),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2"),
    ("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),
    ("head.head", "proj_out"),
    ("head.modulation", "scale_shift_table"),
)
IN_BLOCK = (
    *(
        (f"{original}.{part}", f"{here}.{name}")
        for original, here in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for part, name in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    ),
    ("cross_attn.k_img", "attn2.add_k_proj"),
    ("cross_attn.v_img", "attn2.add_v_proj"),
    ("cross_attn.norm_k_img", "attn2.norm_added_k"),
    ("norm3", "norm2"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
    ("modulation", "scale_shift_table"),
    ("self_attn.block_attn.conv.weight", "attn1.processor.mixing.weights.0"),
    ("self_attn.g", "attn1.processor.gate"),
    ("self_attn.g_norm", "attn1.processor.head_norm"),
    ("self_attn.lepe", "attn1.processor.cpe"),
)
MIXING = "self_attn.block_attn.conv.weight"


def original_config(
    weights: Mapping[str, Tensor], metadata: Mapping[str, str], mhla: Mapping[str, Any], family: Family
) -> dict[str, Any]:
    """Arguments of MHLAWanTransformer3DModel for weights in the original format.

    Everything is read off the weights: which layers have MHLA, its gate, head norm and CPE. They do not hold the block
    counts (known for M = 150 and M = 1) and not whether there is a denominator (the released ones have none); that,
    and for weights without MHLA the number of heads, comes from `mhla`, else from `metadata` (the model's "config" as
    `to_original` writes it, or "blocks", "heads" and "options"), else is the published value.
    """
    if "config" in metadata:
        return read_config(metadata, mhla)

    def shape(name: str) -> tuple[int, ...]:
        if name not in weights:
            raise UserError(f"these are not the weights of an original Wan transformer: they lack {name}.")
        return tuple(weights[name].shape)

    dim, in_channels, *patch_size = shape("patch_embedding.weight")
    indices = {int(name.split(".")[1]) for name in weights if name.startswith("blocks.")}
    layers = [i for i in sorted(indices) if f"blocks.{i}.{MIXING}" in weights]
    if layers and f"blocks.{layers[0]}.self_attn.g_norm.weight" in weights:
        head_dim = shape(f"blocks.{layers[0]}.self_attn.g_norm.weight")[0]
    else:
        heads = read_heads(metadata)
        head_dim = 128 if heads is None else dim // heads
    if not head_dim or dim % head_dim:
        raise UserError(f"a width of {dim} is no multiple of {head_dim}, the width of Wan's heads; give heads.")
    config = {
        "patch_size": tuple(patch_size),
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "in_channels": in_channels,
        "out_channels": shape("head.head.weight")[0] // math.prod(patch_size),
        "text_dim": shape("text_embedding.0.weight")[1],
        "freq_dim": shape("time_embedding.0.weight")[1],
        "ffn_dim": shape("blocks.0.ffn.0.weight")[0],
        "num_layers": len(indices),
        "cross_attn_norm": "blocks.0.norm3.weight" in weights,
        "mhla": _original_mhla(weights, layers, len(indices), metadata, mhla, family) if layers else None,
    }
    if "img_emb.proj.0.weight" in weights:
        config["image_dim"] = shape("img_emb.proj.0.weight")[0]
        config["added_kv_proj_dim"] = shape("blocks.0.cross_attn.k_img.weight")[1]
    if "img_emb.emb_pos" in weights:
        config["pos_embed_seq_len"] = shape("img_emb.emb_pos")[1]
    return config


def _original_mhla(
    weights: Mapping[str, Tensor],
    layers: Sequence[int],
    num_layers: int,
    metadata: Mapping[str, str],
    mhla: Mapping[str, Any],
    family: Family,
) -> dict[str, Any]:
    first = f"blocks.{layers[0]}.self_attn."
    if len(layers) == num_layers:
        which: Any = "all"
    else:
        which = "hybrid" if tuple(layers) == family.hybrid_layers(num_layers) else list(layers)
    fields = {
        "feature_map": "relu_eps",
        "normalize": bool((metadata_field(metadata, "options", ast.literal_eval, dict) or {}).get("normalize_out")),
        "gate": first + "g.weight" in weights,
        "cpe": first + "lepe.weight" in weights,
        "head_norm": first + "g_norm.weight" in weights,
        "layers": which,
        **mhla,
    }
    count = weights[f"blocks.{layers[0]}.{MIXING}"].shape[0]
    blocks = fields.get("blocks")
    if blocks is None and "blocks" in metadata:
        blocks = check_counts("blocks", metadata_field(metadata, "blocks", ast.literal_eval, tuple))
    if blocks is None:
        known = {math.prod(counts): counts for counts in (family.default_config.blocks, family.linear_blocks)}
        if count not in known:
            raise UserError(
                f"the weights mix {count} blocks but do not say how many these are along frames, height and width; "
                f"give blocks: three counts whose product is {count}."
            )
        blocks = known[count]
    if math.prod(blocks) != count:
        raise UserError(
            f"blocks={tuple(blocks)} are {math.prod(blocks)} blocks, but the weights mix {count}; give the counts that "
            "they were trained with (the converted model can be resized to others)."
        )
    return {**fields, "blocks": tuple(blocks)}


def load_original(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Fill `model` with `weights` themselves (no copy, their dtype)."""
    converted = {renamed(name): value.flatten(1) if name.endswith(MIXING) else value for name, value in weights.items()}
    fill_with(model, converted, lambda name: renamed(name, to_original=True), weights)


def renamed(name: str, to_original: bool = False) -> str:
    """The name of a weight here from its original name, or the other way round."""
    prefix, rest, table = "", name, OUTSIDE_BLOCKS
    if name.startswith("blocks."):
        _, index, rest = name.split(".", 2)
        prefix, table = f"blocks.{index}.", IN_BLOCK
    for original, here in table:
        old, new = (here, original) if to_original else (original, here)
        if rest == old or rest.startswith(old + "."):
            return prefix + new + rest[len(old) :]
    raise UserError(f"the original format of Wan has no {'place for ' if to_original else ''}weight {name}.")
