"""MHLAConfig, and the MHLAProcessor that stands on one diffusers attention layer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .attention import Mixing, mhla_attention, saturating_cast
from .causal import temporal_causal_mixing
from .errors import UserError, nearest
from .feature_maps import ELEMENTWISE, at_least_float32, build_feature_map, check_feature_map
from .layout import BlockLayout, check_counts
from .mixing import BlockMixing, check_mixing_kind

DEFAULT_EPS = 1e-6
SPACINGS = ("even", "first", "last")
SILU_ONE = 1.278464542761074  # SiLU(SILU_ONE) = 1: the bias with which a fresh gate changes nothing


@dataclass(frozen=True)
class MHLAConfig:
    """How attention layers are replaced, complete: every field that is not given has the value below.

    (`MHLAProcessor()` and `apply_mhla(model)` take the model family's values instead.)

    Raises:
        UserError: naming the field and what it accepts.
    """

    blocks: tuple[int, ...] | None = (4, 4)  # per grid axis; None: M² ≤ N on the model's usual grid
    mixing: str = "full"  # "full" or "separable"
    feature_map: str = "relu"  # relu, relu_eps, elu, identity, positive_random, hedgehog
    normalize: bool = True  # divide by φ(q)·z̃
    eps: float | None = None  # added to the denominator; None: the family's (SANA 1e-15), else 1e-6
    locality: float = 1.0  # initial mixing: 0 vanilla linear attention, 1 local
    learn_mixing: bool = True
    cpe: bool = False  # depthwise convolution of the values on the grid, added to the output
    gate: bool = False  # output ⊙ SiLU(W x)
    head_norm: bool = False  # RMSNorm of each head's output
    layers: str | float | tuple[int, ...] = "all"  # "all", "hybrid" (where the family defines it), a share, or indices
    spacing: str = "even"  # which layers a share means: spread evenly, the "first" ones or the "last" ones
    rope: str = "after"  # rotary embedding "after" the feature map (numerator only) or "before" it
    temporal_causal: bool = False  # of videos: queries see blocks of their own and of earlier times only

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", check_counts("blocks", self.blocks))
        check_mixing_kind(self.mixing)
        check_feature_map(self.feature_map)
        for name in ("normalize", "learn_mixing", "cpe", "gate", "head_norm", "temporal_causal"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.feature_map == "identity" and self.normalize:
            raise UserError(
                "feature_map='identity' has negative features, whose sums cannot normalise; give normalize=False too."
            )
        if self.eps is not None and (not _is_number(self.eps) or not 0 < self.eps < float("inf")):
            raise UserError(f"eps={self.eps!r} must be a positive number or None.")
        if not _is_number(self.locality) or not 0 <= self.locality <= 1:
            raise UserError(f"locality={self.locality!r} must lie between 0 and 1.")
        if self.rope not in ("after", "before"):
            raise UserError(f"rope={self.rope!r} must be 'after' or 'before' (the feature map).")
        if self.spacing not in SPACINGS:
            raise UserError(f"spacing={self.spacing!r} must be 'even', 'first' or 'last'.")
        if isinstance(self.layers, str):
            if self.layers not in ("all", "hybrid"):
                raise UserError(f"layers={self.layers!r} must be 'all', 'hybrid', a share or a list of layer indices.")
        elif isinstance(self.layers, float):
            if not 0 < self.layers <= 1:
                raise UserError(f"layers={self.layers} as a share of the layers must lie above 0 and not above 1.")
        else:
            object.__setattr__(self, "layers", _check_layers(self.layers))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> MHLAConfig:
        """The config with the given fields, as read from a model's config.json or a YAML file."""
        if not isinstance(fields, Mapping):
            raise UserError(f"fields={fields!r} of an MHLAConfig must be a mapping, such as {{'cpe': True}}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise UserError(f"MHLAConfig has no field {name!r}{nearest(name, known)}; known: {', '.join(known)}.")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, as `from_dict` and JSON take them."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    def layer_indices(self, num_layers: int, hybrid: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Which of `num_layers` layers get MHLA; `hybrid` are the family's indices for layers="hybrid"."""
        if self.layers == "all":
            return tuple(range(num_layers))
        if self.layers == "hybrid":
            if hybrid is None:
                raise UserError("layers='hybrid' is not defined for this model family; give a list of layer indices.")
            if not hybrid:
                raise UserError(f"layers='hybrid' gives MHLA to none of the model's {num_layers} layers; give a list.")
            return hybrid
        if isinstance(self.layers, float):
            return _share_of_layers(self.layers, self.spacing, num_layers)
        for index in self.layers:
            if not 0 <= index < num_layers:
                raise UserError(
                    f"layers={list(self.layers)} names layer {index}, but the model has layers 0 to {num_layers - 1}."
                )
        return self.layers


class MHLAProcessor(nn.Module):
    """Multi-head linear attention as a diffusers attention processor.

    `MHLAProcessor()` or `MHLAProcessor(blocks=(8, 8), cpe=True)` *describes* the attention: fields that are not named
    take the model family's defaults. Setting it on a model (`set_attn_processor` of pipelines and models) makes
    one processor with weights of its own per self-attention layer, on the layer's device and in its dtype.

    Args:
        config: a complete MHLAConfig, in place of fields.
        **fields: fields of MHLAConfig.
    """

    def __init__(self, config: MHLAConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is not None and fields:
            raise UserError(f"give MHLAProcessor either a config or fields, not both (got {', '.join(fields)}).")
        if config is not None and not isinstance(config, MHLAConfig):
            raise UserError(f"config={config!r} must be an MHLAConfig; fields go by name: MHLAProcessor(cpe=True).")
        # A wrong field is reported here, where it was typed; whether the family's default normalises shows later.
        MHLAConfig.from_dict({"normalize": False, **fields})
        self.config = config
        self.fields = fields
        self.grid: tuple[int, ...] | None = None

    def resolve(self, default: MHLAConfig) -> MHLAConfig:
        """The full config this describes, on a family whose defaults are `default`."""
        config = self.config if self.config is not None else dataclasses.replace(default, **self.fields)
        return dataclasses.replace(config, eps=config.eps or default.eps or DEFAULT_EPS)

    @classmethod
    def for_layer(cls, attn: nn.Module, config: MHLAConfig) -> MHLAProcessor:
        """A processor with weights for the diffusers attention layer `attn`, on its device and in its dtype."""
        config = dataclasses.replace(config, eps=config.eps or DEFAULT_EPS)
        if config.temporal_causal and len(config.blocks) != 3:
            raise UserError(f"temporal_causal=True needs three axes, time first, but has blocks={config.blocks}.")
        processor = cls(config)
        inner_dim = attn.to_v.out_features
        head_dim = inner_dim // attn.heads
        processor.feature_map = build_feature_map(config.feature_map, attn.heads, head_dim)
        processor.mixing = BlockMixing(
            config.blocks, config.mixing, config.locality, config.normalize, learn=config.learn_mixing
        )
        processor.cpe = _zero_conv(inner_dim, len(config.blocks)) if config.cpe else None
        processor.gate = _open_gate(attn.to_q.in_features, inner_dim) if config.gate else None
        processor.head_norm = HeadNorm(head_dim, eps=1e-6) if config.head_norm else None
        weight = attn.to_v.weight
        dtype = weight.dtype if weight.is_floating_point() else None
        return processor.to(device=weight.device, dtype=dtype).train(attn.training)

    @property
    def is_bound(self) -> bool:
        """Whether this processor belongs to a layer (and has weights)."""
        return "mixing" in self._modules

    # Not `forward`: accelerate's offloading hooks there would move the argument `attn`, a module, between devices.
    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Self-attention of `attn` on (B, N, C) hidden states; returns (B, N, C) in their dtype.

        `attention_mask` is a key mask, (B, N) bool, True where a token may be attended to; `rotary_emb` is (cos, sin),
        (1, N, 1, D) each, as diffusers' Wan makes them.
        """
        if not self.is_bound:
            raise UserError(
                "this MHLAProcessor is a description without weights; set it on a model with "
                "pipe.set_attn_processor(processor) or apply_mhla(model, config)."
            )
        if encoder_hidden_states is not None:
            raise UserError("MHLAProcessor computes self-attention and takes no encoder_hidden_states.")
        layout = self._layout(hidden_states.shape[1])

        query, key, value = _projections(attn, hidden_states)
        if attn.norm_q is not None:
            query = attn.norm_q(query)
        if attn.norm_k is not None:
            key = attn.norm_k(key)
        query, key, value = (rearrange(x, "b n (h d) -> b n h d", h=attn.heads) for x in (query, key, value))

        rotary = None
        if rotary_emb is not None and self.config.rope == "before":
            query, key = (apply_rotary(x, *rotary_emb) for x in (query, key))
        fused = "identity"
        if rotary_emb is not None and self.config.rope == "after":
            query, key = self.feature_map(query, key)
            rotary = tuple(apply_rotary(x, *rotary_emb) for x in (query, key))
        elif self.config.feature_map in ELEMENTWISE:
            fused = self.config.feature_map  # costs less inside
        else:
            query, key = self.feature_map(query, key)

        # What a head norm scales or a gate multiplies may outgrow float16 on the way, so it stays in float32.
        wide = self.head_norm is not None or self.gate is not None
        values = at_least_float32(value) if wide else value
        out = mhla_attention(
            query,
            key,
            values,
            self._mixing(),
            layout,
            self.config.normalize,
            self.config.eps,
            rotary,
            attention_mask,
            fused,
        )
        if self.head_norm is not None:
            out = self.head_norm(out)
        out = rearrange(out, "b n h d -> b n (h d)")
        if self.gate is not None:
            out = out * F.silu(self.gate(hidden_states))
        if self.cpe is not None:
            out = out + self._position_encoding(value, layout)

        out = attn.to_out[1](attn.to_out[0](saturating_cast(out, hidden_states.dtype)))
        return saturating_cast(out, hidden_states.dtype)

    def _mixing(self) -> Mixing:
        mixing = self.mixing()
        return temporal_causal_mixing(mixing, self.config.blocks) if self.config.temporal_causal else mixing

    def _layout(self, num_tokens: int) -> BlockLayout:
        if self.grid is None:
            raise UserError(
                "this MHLAProcessor was not told the token grid; call the transformer or its block, not the bare layer."
            )
        layout = BlockLayout(self.grid, self.config.blocks)
        if layout.num_tokens != num_tokens:
            raise UserError(f"{num_tokens} tokens do not fill the token grid {self.grid}.")
        if not torch.compiler.is_compiling():
            _tell_empty_blocks(layout)
        return layout

    def _position_encoding(self, value: Tensor, layout: BlockLayout) -> Tensor:
        """Conditional position encoding: a depthwise convolution of the values laid out on the grid, (B, N, H*D)."""
        channels = rearrange(value, "b n h d -> b (h d) n").unflatten(2, layout.grid)
        if self.config.temporal_causal:  # each frame in the place of the next one: no tap reads later frames
            channels = F.pad(channels[:, :, :-1], (0, 0, 0, 0, 1, 0))
        return rearrange(self.cpe(channels).flatten(2), "b c n -> b n c")

    def extra_repr(self) -> str:
        return repr(self.config) if self.config is not None else repr(self.fields)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head's output, (..., D), in the dtype of its input whatever that of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (2i, 2i+1) of (B, N, H, F) by the angles of `cos` and `sin`, (1, N, 1, D) each.

    Both hold every angle twice, as diffusers' Wan makes them. Features that are a multiple of D wide (the learned map
    has 2D) are rotated part by part. Computes in and returns at least float32.
    """
    x = at_least_float32(x)
    cos, sin = (angles[..., 0::2].to(x.dtype).repeat(1, 1, 1, x.shape[-1] // angles.shape[-1]) for angles in (cos, sin))
    if x.device.type in ("cpu", "cuda") and not torch.compiler.is_compiling():
        # One way through memory in place of seven; compilers fuse the seven, but know little of complex numbers.
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def check_processor(processor: Any) -> None:
    """Raise a UserError unless this can be set as attention processors."""
    if isinstance(processor, type):
        raise UserError(f"processor is the class {processor.__name__}; make one of it: {processor.__name__}().")
    if not callable(processor) and not isinstance(processor, dict):
        raise UserError(f"processor={processor!r} must be an attention processor such as MHLAProcessor(), or a dict.")


@lru_cache(maxsize=64)
def _tell_empty_blocks(layout: BlockLayout) -> None:
    """Warn, once, of a grid that cannot fill all blocks: a mixing weight of an empty block costs and learns nothing."""
    if layout.num_blocks > layout.num_tokens:
        warnings.warn(
            f"blocks={layout.blocks} makes {layout.num_blocks:,} blocks, but the token grid {layout.grid} has only "
            f"{layout.num_tokens:,} tokens: blocks that hold no token cost time and memory for nothing; give lower "
            "counts if this size is the usual one",
            stacklevel=2,
        )


def _projections(attn: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if getattr(attn, "fused_projections", False):
        return attn.to_qkv(hidden_states).chunk(3, dim=-1)
    return attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)


class _TokenConv:
    """A convolution of tokens, whose channels lie next to each other; `nn.Conv2d` or `nn.Conv3d` is the other base.

    On CPUs torch keeps them so for weights in the same memory format only; with others it moves the values of a single
    sample to planes of channels and back, which takes 2 to 5 times as long. That holds for float32 only.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Through this view the gradient comes back with the strides of the weight, as DistributedDataParallel wants it.
        weight = weight.flatten(1).unflatten(1, weight.shape[1:])
        if input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32:
            last = torch.channels_last if input.ndim == 4 else torch.channels_last_3d
            weight = weight.to(memory_format=last)
        return super()._conv_forward(input, weight, bias)


class _TokenConv2d(_TokenConv, nn.Conv2d):
    pass


class _TokenConv3d(_TokenConv, nn.Conv3d):
    pass


def _zero_conv(channels: int, axes: int) -> nn.Module:
    conv = (nn.Conv1d, _TokenConv2d, _TokenConv3d)[axes - 1](channels, channels, 3, padding=1, groups=channels)
    nn.init.zeros_(conv.weight)
    nn.init.zeros_(conv.bias)
    return conv


def _open_gate(in_features: int, out_features: int) -> nn.Linear:
    gate = nn.Linear(in_features, out_features)
    nn.init.zeros_(gate.weight)
    nn.init.constant_(gate.bias, SILU_ONE)
    return gate


def _check_layers(layers: Any) -> tuple[int, ...]:
    try:
        indices = tuple(layers)
    except TypeError:
        indices = (layers,)
    if not indices or any(not isinstance(i, int) or isinstance(i, bool) for i in indices):
        raise UserError(f"layers={layers!r} must be 'all', 'hybrid', a share (0.5) or a non-empty list of indices.")
    if len(set(indices)) != len(indices):
        raise UserError(f"layers={list(indices)} names a layer twice.")
    return tuple(sorted(indices))


def _share_of_layers(share: float, spacing: str, num_layers: int) -> tuple[int, ...]:
    """At least one of `num_layers`. Even spacing spreads the layers that stay from layer 0 on: 2/3 leaves 0, 3, 6, …"""
    count = max(1, round(share * num_layers))
    if spacing == "first":
        return tuple(range(count))
    if spacing == "last":
        return tuple(range(num_layers - count, num_layers))
    kept = num_layers - count
    stay = {i * num_layers // kept for i in range(kept)}
    return tuple(i for i in range(num_layers) if i not in stay)


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)
