"""The training objective that text-conditioned families share: rectified flow matching."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .family import Objective


class FlowMatchingObjective(Objective):
    """Mean-squared error on the velocity n − x at x_t = (1 − σ) x + σ n, with n ~ N(0, 1).

    σ is logit-normal (Esser et al. 2024, section 3.1), then shifted towards noise: shift·σ / (1 + (shift − 1)·σ).

    Args:
        label_dropout: share of samples that lose their caption, for classifier-free guidance.
        shift: 1 for none; 3 is what SANA and Wan2.1 were trained with.
        logit_mean, logit_std: of the normal whose sigmoid is σ before the shift.
    """

    def __init__(
        self, label_dropout: float = 0.1, shift: float = 3.0, logit_mean: float = 0.0, logit_std: float = 1.0
    ) -> None:
        if not 0 <= label_dropout < 1:
            raise UserError(f"label_dropout={label_dropout} must lie in [0, 1).")
        for name, value in (("shift", shift), ("logit_std", logit_std)):
            if not value > 0:
                raise UserError(f"{name}={value} must be positive.")
        self.label_dropout = label_dropout
        self.shift = shift
        self.logit_mean = logit_mean
        self.logit_std = logit_std

    @abstractmethod
    def condition(self, conditions: Mapping[str, Tensor], dropped: Tensor) -> dict[str, Tensor]:
        """The model's arguments that carry the caption, captions of `dropped` (B,) bool samples taken away."""

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The model's velocity for `noisy`, `timestep` and what `condition` returned, shaped like the latents."""

    def prepare(
        self,
        model: nn.Module,
        latents: Tensor,
        conditions: Mapping[str, Tensor],
        generators: Sequence[torch.Generator],
    ) -> dict[str, Any]:
        noise = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(latents)
        normal = torch.stack([torch.randn((), generator=g) for g in generators])
        dropped = torch.stack([torch.rand((), generator=g) for g in generators]) < self.label_dropout
        sigma = torch.sigmoid(self.logit_mean + self.logit_std * normal)
        sigma = (self.shift * sigma / (1 + (self.shift - 1) * sigma)).to(latents.device)
        weight = sigma.to(latents.dtype).view(-1, *[1] * (latents.ndim - 1))
        return {
            "noisy": (1 - weight) * latents + weight * noise,
            "target": noise - latents,
            "timestep": 1000 * sigma,  # float32: a half-precision timestep would be whole numbers at best
            **self.condition(conditions, dropped.to(latents.device)),
        }

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        velocity, target = self.predict(model, inputs).float(), inputs["target"].float()
        mse = (velocity - target).square().flatten(1).mean(1)
        return {"loss": mse, "mse": mse}


def drop_captions(
    embeds: Tensor,
    dropped: Tensor,
    null_embeds: Tensor | None = None,
    mask: Tensor | None = None,
    null_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Caption embeddings and their mask, those of `dropped` samples replaced by the null caption's.

    Args:
        embeds: (B, L, C).
        dropped: (B,) bool.
        null_embeds: (1 or B, L', C); None for zeros.
        mask: (B, L), nonzero where there is a token; None where the family has no mask.
        null_mask: (1 or B, L'); None for the first token only.

    Returns:
        (B, max(L, L'), C) and (B, max(L, L')) or None, in the dtypes of `embeds` and `mask`.
    """
    if null_embeds is None:
        null_embeds = torch.zeros_like(embeds[:1])
    if mask is not None and null_mask is None:
        null_mask = torch.zeros_like(mask[:1])[:, : null_embeds.shape[1]]
        null_mask[:, :1] = 1
    length = max(embeds.shape[1], null_embeds.shape[1])
    embeds = torch.where(dropped.view(-1, 1, 1), _padded(null_embeds.to(embeds), length), _padded(embeds, length))
    if mask is not None:
        mask = torch.where(dropped.view(-1, 1), _padded(null_mask.to(mask), length), _padded(mask, length))
    return embeds, mask


def _padded(x: Tensor, length: int) -> Tensor:
    """(B, L, ...) with zeros appended along L."""
    if x.shape[1] == length:
        return x
    return torch.cat([x, x.new_zeros(x.shape[0], length - x.shape[1], *x.shape[2:])], dim=1)
