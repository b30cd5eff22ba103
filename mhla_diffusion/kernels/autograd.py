"""What the faster ways to compute the operator share: an autograd function around a kernel with its own backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..feature_maps import ELEMENTWISE, no_autocast
from ..layout import BlockLayout
from . import plain


class Kernel(Protocol):
    """One call of a fast way to compute the operator, made with its tensors and options."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        factors: Sequence[Tensor],
        normalize: bool,
        eps: float,
        layout: BlockLayout,
        key_mask: Tensor | None,
        feature_map: str,
    ) -> None: ...

    def outputs(self, keep: bool) -> tuple[Tensor, Tensor | None]:
        """The attention (B, N, H, E), and what `gradients` needs of it if `keep` (the denominators)."""

    def gradients(self, grad: Tensor, kept: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of query, key, value and each mixing factor, where `needed`, from the gradient of the attention."""


def attend(
    kernel: type[Kernel],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: plain.Mixing,
    layout: BlockLayout,
    normalize: bool,
    eps: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    feature_map: str = "identity",
) -> Tensor:
    """`mhla_attention` of tensors that were checked; `feature_map` is one of ELEMENTWISE, and not used with rotary."""
    factors = (mixing,) if isinstance(mixing, Tensor) else tuple(mixing)
    options = (eps, layout, key_mask, feature_map)
    with no_autocast(query):
        if rotary is None or not normalize:
            query, key = rotary if rotary is not None else (query, key)
            return _Attention.apply(kernel, query, key, value, normalize, *options, *factors)
        # The normaliser is the bare numerator of values that are 1.
        wide = torch.promote_types(value.dtype, torch.float32)
        ones = value.new_ones((), dtype=wide).expand(*value.shape[:3], 1)
        numerator = _Attention.apply(kernel, *rotary, value.to(wide), False, *options, *factors)
        denominator = _Attention.apply(kernel, query, key, ones, False, *options, *factors)
        return plain.saturating_cast(numerator / (denominator + eps), value.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: type[Kernel],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        normalize: bool,
        eps: float,
        layout: BlockLayout,
        key_mask: Tensor | None,
        feature_map: str,
        *factors: Tensor,
    ) -> Tensor:
        call = kernel(query, key, value, factors, normalize, eps, layout, key_mask, feature_map)
        out, kept = call.outputs(any(ctx.needs_input_grad))
        saturated = out if out.dtype == torch.float16 else None
        ctx.save_for_backward(query, key, value, key_mask, kept, saturated, *factors)
        ctx.options = (kernel, normalize, eps, layout, feature_map)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, kept, saturated, *factors = ctx.saved_tensors
        kernel, normalize, eps, layout, feature_map = ctx.options
        needed = (*ctx.needs_input_grad[1:4], *ctx.needs_input_grad[9:])
        with no_autocast(query):
            # Somebody will differentiate the gradients, or wants those of many outputs at once.
            if torch.is_grad_enabled() or _is_batched(grad):
                with torch.enable_grad():
                    inputs = [x.view_as(x) for x in (query, key, value, *factors)]
                    gradients = _plain_gradients(inputs, needed, grad, normalize, eps, layout, key_mask, feature_map)
            else:
                if saturated is not None:
                    grad = grad.masked_fill(saturated.abs() >= torch.finfo(torch.float16).max, 0)
                call = kernel(query, key, value, factors, normalize, eps, layout, key_mask, feature_map)
                gradients = call.gradients(grad, kept, needed)
        return (None, *gradients[:3], None, None, None, None, None, *gradients[3:])


def _is_batched(grad: Tensor) -> bool:
    """Whether it stands for many tensors: of is_grads_batched, or of torch.vmap."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(grad) or functorch.is_functorch_wrapped_tensor(grad)


def _plain_gradients(
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    grad: Tensor,
    normalize: bool,
    eps: float,
    layout: BlockLayout,
    key_mask: Tensor | None,
    feature_map: str,
) -> list[Tensor | None]:
    """As `Kernel.gradients`, but such that they can be differentiated again."""
    query, key, value, *factors = inputs
    mixing = factors[0] if len(factors) == 1 else factors
    features = ELEMENTWISE[feature_map]
    out = plain.attend(features(query), features(key), value, mixing, layout, normalize, eps, None, key_mask)
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needed]
