"""DiT: class-conditional image diffusion (Peebles and Xie 2023), softmax attention on a square grid of patches."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings, LabelEmbedding

# Loading a saved pipeline, diffusers looks for ModelMixin in the module that defines the model class.
from diffusers.models.modeling_utils import ModelMixin  # noqa: F401
from torch import Tensor, nn

from ..errors import UserError
from ..processor import MHLAConfig, MHLAProcessor
from .dit_release import load_original, original_config, position_table, renamed, with_one_embedder
from .family import Example, Family, Objective, build_on_meta, image_size
from .model import MHLAModelMixin, first_argument


class DiTFamily(Family):
    """diffusers' DiTTransformer2DModel and DiTPipeline."""

    name = "dit"
    default_config = MHLAConfig(blocks=(4, 4), cpe=True)  # the convolution: docs/retrofit.md
    linear_blocks = (1, 1)
    trained_with_softmax = True
    one_size = True
    presets = {
        f"DiT-{size}/2": {
            "num_layers": depth,
            "num_attention_heads": heads,
            "attention_head_dim": width // heads,
            "in_channels": 4,
            "out_channels": 8,
            "patch_size": 2,
            "num_embeds_ada_norm": 1000,
            "norm_eps": 1e-6,
            "share_embedder": True,
            "freq_shift": 0,
        }
        for size, depth, width, heads in (
            ("S", 12, 384, 6),
            ("B", 12, 768, 12),
            ("L", 24, 1024, 16),
            ("XL", 28, 1152, 16),
        )
    }

    @property
    def base_class(self) -> type[nn.Module]:
        return DiTTransformer2DModel

    @property
    def model_class(self) -> type[nn.Module]:
        return MHLADiTTransformer2DModel

    def model_defaults(self) -> dict[str, Any]:
        return {"share_embedder": False, "freq_shift": 1}

    def saved_class(self, config: Mapping[str, Any]) -> type[nn.Module] | None:
        # The published DiT checkpoints on the hub name the class that diffusers' DiT was a case of.
        if config.get("_class_name") == "Transformer2DModel" and config.get("norm_type") == "ada_norm_zero":
            return self.base_class
        return super().saved_class(config)

    def own_processor(self) -> Any:
        return AttnProcessor2_0()

    def blocks_of(self, model: nn.Module) -> Sequence[nn.Module]:
        return model.transformer_blocks

    @staticmethod
    def tell_grid(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(block.attn1.processor, MHLAProcessor):
            side = int(first_argument(args, kwargs).shape[1] ** 0.5)  # math.isqrt would break torch.compile
            block.attn1.processor.grid = (side, side)

    def usual_grid(self, model: nn.Module) -> tuple[int, ...]:
        side = model.config.sample_size // model.config.patch_size
        return (side, side)

    @torch.no_grad()
    def init_weights_(self, model: nn.Module) -> None:
        # DiT's own (Peebles and Xie 2023, section 3.2 and its released code): blocks start as the identity.
        kept = {module for block in model.transformer_blocks for module in _own_modules(block.attn1.processor)}
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module not in kept:
                nn.init.xavier_uniform_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, CombinedTimestepLabelEmbeddings):
                nn.init.normal_(module.class_embedder.embedding_table.weight, std=0.02)
        for module in model.modules():
            if isinstance(module, CombinedTimestepLabelEmbeddings):
                nn.init.normal_(module.timestep_embedder.linear_1.weight, std=0.02)
                nn.init.normal_(module.timestep_embedder.linear_2.weight, std=0.02)
        for zero in (*(block.norm1.linear for block in model.transformer_blocks), model.proj_out_1, model.proj_out_2):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def set_num_classes(self, model: nn.Module, num_classes: int) -> int | None:
        before = model.config.num_embeds_ada_norm
        if before == num_classes:
            return None
        embedders = [module for module in model.modules() if isinstance(module, LabelEmbedding)]
        old = embedders[0].embedding_table.weight
        table = nn.init.normal_(torch.empty(num_classes + 1, old.shape[1]), std=0.02).to(old)
        for embedder in embedders:
            embedder.embedding_table = nn.Embedding.from_pretrained(table.clone(), freeze=False)
            embedder.num_classes = num_classes
        model.register_to_config(num_embeds_ada_norm=num_classes)
        return before

    def objective(self, **options: Any) -> Objective:
        return DiTObjective(**options)

    def pipeline_class(self) -> type:
        from ..pipelines import MHLADiTPipeline

        return MHLADiTPipeline

    def build_pipeline(self, transformer: nn.Module, components: Mapping[str, Any]) -> Any:
        scheduler = components.get("scheduler") or DDIMScheduler(
            num_train_timesteps=1000,
            beta_schedule="linear",
            beta_start=1e-4,
            beta_end=0.02,
            clip_sample=components.get("vae") is None,  # pixels lie in [-1, 1], latents need not
        )
        return self.pipeline_class()(
            transformer=transformer,
            vae=components.get("vae"),
            scheduler=scheduler,
            id2label=components.get("id2label"),
        )

    def example(self, arguments: Mapping[str, Any], size: Sequence[int], batch_size: int = 1) -> Example:
        height, width = image_size(size, 8 * arguments["patch_size"])
        if height != width:
            raise UserError(f"size={tuple(size)} must be square: DiT's position embedding is.")
        side = height // 8
        return Example(
            arguments={"sample_size": side},
            latents=torch.randn(batch_size, arguments["in_channels"], side, side),
            conditions={"class_labels": torch.randint(arguments["num_embeds_ada_norm"], (batch_size,))},
        )

    def pipeline_arguments(self, conditions: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Any]:
        return {"class_labels": conditions["class_labels"].tolist()}

    @torch.no_grad()
    def posterior(self, components: Mapping[str, Any], images: Tensor) -> dict[str, Tensor]:
        vae = components.get("vae")
        if vae is None:
            return {"mean": images}
        latents = vae.encode(images.to(vae.dtype)).latent_dist
        scale = vae.config.scaling_factor
        return {"mean": latents.mean * scale, "std": latents.std * scale}

    def from_original(
        self,
        state_dict: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        mhla: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Weights under the names of the DiT release, with MHLA layers or without (dit_release.py)."""
        config = original_config(state_dict, metadata or {}, mhla or {}, self.presets)
        model = build_on_meta(MHLADiTTransformer2DModel, config)
        load_original(model, state_dict)
        return model.eval()

    def to_original(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        weights = with_one_embedder(model)
        side = model.config.sample_size // model.config.patch_size
        original = {"pos_embed": position_table(model.inner_dim, side).to(weights["pos_embed.proj.weight"].dtype)}
        for name, value in weights.items():
            if ".attn1.to_q." in name:
                parts = [weights[name.replace(".to_q.", f".to_{part}.")] for part in "qkv"]
                name = name.removeprefix("transformer_").replace(".attn1.to_q.", ".attn.qkv.")
                original[name] = torch.cat(parts)
            elif ".attn1.to_k." not in name and ".attn1.to_v." not in name:
                original[renamed(name, to_original=True)] = value.contiguous()
        config = {**self.model_defaults(), "mhla": None, **model.config, "share_embedder": True}
        return original, {"config": json.dumps({k: v for k, v in config.items() if not k.startswith("_")})}


DIT = DiTFamily()


class MHLADiTTransformer2DModel(MHLAModelMixin, DiTTransformer2DModel, AttentionMixin, PeftAdapterMixin):
    """DiTTransformer2DModel with MHLA in its self-attention layers.

    Args: those of the base class, and
        share_embedder: one timestep and label embedder for the whole model, as published, in place of diffusers' one
            per block (whose copies are equal in converted checkpoints).
        freq_shift: 0 for the timestep frequencies 10000^(-i / 128) of the DiT release; 1 for those of diffusers' DiT,
            10000^(-i / 127).
        mhla: fields of MHLAConfig; None keeps softmax attention everywhere.
    """

    family = DIT

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 28,
        dropout: float = 0.0,
        norm_num_groups: int = 32,
        attention_bias: bool = True,
        sample_size: int = 32,
        patch_size: int = 2,
        activation_fn: str = "gelu-approximate",
        num_embeds_ada_norm: int | None = 1000,
        upcast_attention: bool = False,
        norm_type: str = "ada_norm_zero",
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-5,
        share_embedder: bool = False,
        freq_shift: int = 1,
        mhla: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            num_layers=num_layers,
            dropout=dropout,
            norm_num_groups=norm_num_groups,
            attention_bias=attention_bias,
            sample_size=sample_size,
            patch_size=patch_size,
            activation_fn=activation_fn,
            num_embeds_ada_norm=num_embeds_ada_norm,
            upcast_attention=upcast_attention,
            norm_type=norm_type,
            norm_elementwise_affine=norm_elementwise_affine,
            norm_eps=norm_eps,
        )
        if share_embedder:
            self.embedder = CombinedTimestepLabelEmbeddings(num_embeds_ada_norm, self.inner_dim)
            for block in self.transformer_blocks:
                block.norm1.emb = _GivenConditioning()
        for module in self.modules():
            if isinstance(module, CombinedTimestepLabelEmbeddings):
                module.time_proj.downscale_freq_shift = freq_shift
        self._init_mhla(mhla)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As diffusers' `from_pretrained`; `share_embedder` may differ from the checkpoint's.

        Raises:
            UserError: for MHLA weights that are missing or unknown, or blocks with embedders of their own that cannot
                be shared.
        """
        share = kwargs.pop("share_embedder", None)
        loaded = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        if share is not None:
            (loaded[0] if isinstance(loaded, tuple) else loaded).share_embedder_(share)
        return loaded

    def share_embedder_(self, share: bool = True) -> None:
        """Have one timestep and label embedder, or with `share=False` diffusers' copy per block, in place.

        Raises:
            UserError: when the blocks' embedders are not equal, so that sharing one would change the model.
        """
        norms = [block.norm1 for block in self.transformer_blocks]
        if share == self.config.share_embedder:
            return
        if share:
            first = norms[0].emb.state_dict()
            for norm in norms[1:]:
                if any(not torch.equal(first[name], weight) for name, weight in norm.emb.state_dict().items()):
                    raise UserError("share_embedder=True needs blocks with equal embedders; this model's differ.")
            self.embedder = norms[0].emb
            for norm in norms:
                norm.emb = _GivenConditioning()
        else:
            for norm in norms:
                norm.emb = copy.deepcopy(self.embedder)
            del self.embedder
        self.register_to_config(share_embedder=share)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """As the base class: (B, C, S, S) latents, (B,) timesteps and labels to (B, out_channels, S, S)."""
        height, width = hidden_states.shape[-2:]
        if height != width or height % self.patch_size:
            raise UserError(
                f"hidden_states of {height}×{width} do not suit DiT; it takes square latents whose side is a multiple "
                f"of the patch size {self.patch_size}."
            )
        if self.config.share_embedder:
            timestep = self.embedder(timestep, class_labels, hidden_dtype=hidden_states.dtype)
            class_labels = None
        return super().forward(hidden_states, timestep, class_labels, cross_attention_kwargs, return_dict)


def _own_modules(processor: Any) -> Iterable[nn.Module]:
    return processor.modules() if isinstance(processor, nn.Module) else ()


class _GivenConditioning(nn.Module):
    """Stands where diffusers' DiT keeps an embedder per block: the conditioning comes in place of the timestep."""

    def forward(self, timestep: Tensor, class_labels: Tensor | None, hidden_dtype: torch.dtype | None = None) -> Tensor:
        return timestep


class DiTObjective(Objective):
    """DiT's loss: mean-squared error on ε, plus the variational bound where the model predicts the variance.

    Linear β from 1e-4 to 0.02 over 1000 steps; the bound trains the variance only (the mean is detached) and is in bits
    per dimension (Nichol and Dhariwal 2021, section 3.1).

    Args:
        label_dropout: share of samples whose label is replaced by the null class, for classifier-free guidance.
    """

    def __init__(self, label_dropout: float = 0.1) -> None:
        if not 0 <= label_dropout < 1:
            raise UserError(f"label_dropout={label_dropout} must lie in [0, 1).")
        self.label_dropout = label_dropout
        schedule = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear", beta_start=1e-4, beta_end=0.02)
        self.betas = schedule.betas.double()
        self.alphas_cumprod = torch.cumprod(1 - self.betas, 0)

    def prepare_model(self, model: nn.Module) -> None:
        # In training mode every block of diffusers' DiT drops labels on its own, so the blocks disagree on a sample's
        # label; `prepare` drops it once.
        for module in model.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0

    def prepare(
        self,
        model: nn.Module,
        latents: Tensor,
        conditions: Mapping[str, Tensor],
        generators: Sequence[torch.Generator],
    ) -> dict[str, Any]:
        null_class = model.config.num_embeds_ada_norm
        labels = conditions["class_labels"]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in generators]).to(latents)
        steps = torch.stack([torch.randint(len(self.betas), (), generator=g) for g in generators])
        dropped = torch.stack([torch.rand((), generator=g) for g in generators]) < self.label_dropout
        a = self.alphas_cumprod[steps].to(latents).view(-1, *[1] * (latents.ndim - 1))
        return {
            "clean": latents,
            "noise": noise,
            "noisy": a.sqrt() * latents + (1 - a).sqrt() * noise,
            "timestep": steps.to(latents.device),
            "class_labels": torch.where(dropped.to(labels.device), null_class, labels),
        }

    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        output = model(inputs["noisy"], timestep=inputs["timestep"], class_labels=inputs["class_labels"]).sample.float()
        noise = inputs["noise"].float()
        epsilon, variance = output[:, : noise.shape[1]], output[:, noise.shape[1] :]
        mse = F.mse_loss(epsilon, noise, reduction="none").flatten(1).mean(1)
        if variance.shape[1] == 0:
            return {"loss": mse, "mse": mse}
        vb = self._variational_bound(epsilon.detach(), variance, inputs)
        return {"loss": mse + vb, "mse": mse, "vb": vb}

    def _variational_bound(self, epsilon: Tensor, variance: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """One term of the bound in bits per dimension, (B,): KL to the posterior, at t = 0 the decoder's likelihood."""
        clean, noisy, t = inputs["clean"].float(), inputs["noisy"].float(), inputs["timestep"].cpu()

        def at(table: Tensor) -> Tensor:
            return table[t].to(clean).view(-1, *[1] * (clean.ndim - 1))

        alpha_bar = self.alphas_cumprod
        alpha_bar_prev = F.pad(alpha_bar[:-1], (1, 0), value=1.0)
        posterior_variance = self.betas * (1 - alpha_bar_prev) / (1 - alpha_bar)
        posterior_variance[0] = posterior_variance[1]  # the posterior at t = 0 is a point
        posterior_log_variance = posterior_variance.log()

        share = (variance + 1) / 2
        log_variance = share * at(self.betas.log()) + (1 - share) * at(posterior_log_variance)
        from_clean = at(self.betas * alpha_bar_prev.sqrt() / (1 - alpha_bar))
        from_noisy = at((1 - alpha_bar_prev) * (1 - self.betas).sqrt() / (1 - alpha_bar))
        predicted_clean = (noisy - at((1 - alpha_bar).sqrt()) * epsilon) / at(alpha_bar.sqrt())
        mean = from_clean * predicted_clean + from_noisy * noisy
        true_mean = from_clean * clean + from_noisy * noisy

        kl = 0.5 * (
            log_variance
            - at(posterior_log_variance)
            - 1
            + (at(posterior_log_variance) - log_variance).exp()
            + (true_mean - mean).square() * (-log_variance).exp()
        )
        decoder = -_discretised_log_likelihood(clean, mean, 0.5 * log_variance)
        bound = torch.where(at(torch.arange(len(self.betas))) == 0, decoder, kl)
        return bound.flatten(1).mean(1) / math.log(2)


def _discretised_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """log P of 8-bit values scaled to [-1, 1]: a Gaussian integrated over each value's bin (Ho et al. 2020, eq. 13)."""
    inverse = (-log_scale).exp()
    upper = torch.special.ndtr(inverse * (x - mean + 1 / 255))
    lower = torch.special.ndtr(inverse * (x - mean - 1 / 255))
    upper = torch.where(x > 0.999, 1.0, upper)
    lower = torch.where(x < -0.999, 0.0, lower)
    return (upper - lower).clamp(min=1e-12).log()
