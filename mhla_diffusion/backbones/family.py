"""What the shared parts ask of a model family; each backbone file answers with one Family and one Objective."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import UserError, nearest
from ..processor import MHLAConfig


class Objective(ABC):
    """A family's training objective, in two halves so that all randomness sits in the first."""

    def prepare_model(self, model: nn.Module) -> None:  # noqa: B027  (optional hook)
        """Called once before training: switch off what the model would otherwise draw by itself."""

    @abstractmethod
    def prepare(
        self,
        model: nn.Module,
        latents: Tensor,
        conditions: Mapping[str, Tensor],
        generators: Sequence[torch.Generator],
    ) -> dict[str, Any]:
        """Draw noise, timesteps and dropped conditions for (B, C, ...) latents, one CPU generator per sample.

        A sample's draws depend on its own generator only, so a loss does not depend on how samples are batched. Returns
        what `loss` takes.
        """

    @abstractmethod
    def loss(self, model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Per-sample losses (B,) float32: "loss", which is minimised, and its parts. Draws nothing."""


class Example(NamedTuple):
    """A batch for a model of random weights, as benchmarks need it."""

    arguments: dict[str, Any]  # of the model class, where the size asks for others than the preset's
    latents: Tensor  # (B, C, ...) float32
    conditions: dict[str, Tensor]  # what the objective takes


class Family(ABC):
    """A family of diffusion transformers: its attention layers, token grid, models, training objective and pipeline."""

    name: ClassVar[str]
    default_config: ClassVar[MHLAConfig]  # what MHLAProcessor() means here
    linear_blocks: ClassVar[tuple[int, ...]]  # the block counts of vanilla linear attention: one block
    trained_with_softmax: ClassVar[bool]  # then a fresh retrofit makes noise until it is fine-tuned
    presets: ClassVar[dict[str, dict[str, Any]]]  # name -> arguments of the model class
    one_size: ClassVar[bool] = False  # the model makes images of its `sample_size` only
    pipeline_multiple: ClassVar[int] = 1  # of which the pipeline takes heights and widths in pixels, whatever its VAE
    takes_text: ClassVar[bool] = False  # conditions are captions; otherwise class labels
    text_components: ClassVar[tuple[str, ...]] = ()  # those of the pipeline that `encode_prompts` uses

    @property
    @abstractmethod
    def base_class(self) -> type[nn.Module]:
        """The diffusers transformer class."""

    @property
    @abstractmethod
    def model_class(self) -> type[nn.Module]:
        """Its MHLA subclass."""

    @abstractmethod
    def blocks_of(self, model: nn.Module) -> Sequence[nn.Module]:
        """The transformer blocks; each one's self-attention is its `attn1`."""

    @staticmethod
    @abstractmethod
    def tell_grid(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Forward pre-hook of a block: set `block.attn1.processor.grid` from what the block is called with.

        A function of its arguments only, so that copies of a model and recomputation under gradient checkpointing
        are right. May return the (args, kwargs) that the block shall see instead.
        """

    @abstractmethod
    def usual_grid(self, model: nn.Module) -> tuple[int, ...]:
        """The token grid at the model's native resolution, from which `blocks=None` is resolved."""

    @abstractmethod
    def own_processor(self) -> Any:
        """A fresh stock attention processor of a self-attention layer."""

    def model_defaults(self) -> dict[str, Any]:
        """Arguments besides `mhla` that the model class adds to its base's, with the values that mean the base."""
        return {}

    def saved_class(self, config: Mapping[str, Any]) -> type[nn.Module] | None:
        """The class to load a saved transformer with, from its config.json; None where it is of another family."""
        classes = {cls.__name__: cls for cls in (self.base_class, self.model_class)}
        return classes.get(config.get("_class_name"))

    def hybrid_layers(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers that get MHLA for layers="hybrid"; None where the family defines no hybrid."""
        return None

    def retrofit_warning(self, config: MHLAConfig) -> str | None:
        """What to say when a model that had the family's own attention gets MHLA; None where nothing needs saying."""
        if not self.trained_with_softmax:
            return None
        return (
            "this model was trained with softmax attention and now has MHLA layers with fresh weights: it makes noise "
            "until it is fine-tuned (accelerate launch scripts/finetune.py --config configs/….yaml)."
        )

    def adapt_pipeline(self, pipeline: Any) -> None:  # noqa: B027  (optional hook)
        """Called on a diffusers pipeline whose transformer just got MHLA: change what would not work with it."""

    def build_model(
        self, preset: str | None = None, mhla: Mapping[str, Any] | None = None, **arguments: Any
    ) -> nn.Module:
        """A model with random weights.

        Args:
            preset: a name from `presets`; None builds from `arguments` alone.
            mhla: MHLAConfig fields, None for the family's own attention.
            **arguments: arguments of the model class, over those of the preset.

        Without a preset and without mhla the result is the stock diffusers class.
        """
        if preset is None:
            return self.base_class(**arguments) if mhla is None else self.model_class(**arguments, mhla=mhla)
        if preset not in self.presets:
            known = ", ".join(self.presets)
            raise UserError(f"preset={preset!r} is unknown{nearest(preset, self.presets)}; known: {known}.")
        return self.model_class(**{**self.presets[preset], **arguments}, mhla=mhla)

    def init_weights_(self, model: nn.Module) -> None:  # noqa: B027  (optional)
        """Give a model that is trained from scratch the initial weights of its publication; drawn from torch's RNG."""

    def set_num_classes(self, model: nn.Module, num_classes: int) -> int | None:
        """Give `model` a new label table of `num_classes` classes and a null class, unless it has that many.

        Returns the number of classes it had, None where nothing was changed or the family has no classes.
        """
        return None

    @abstractmethod
    def objective(self, **options: Any) -> Objective:
        """The training objective with its options."""

    @abstractmethod
    def pipeline_class(self) -> type:
        """The generation pipeline (imported when asked for: pipelines stand above backbones)."""

    @abstractmethod
    def build_pipeline(self, transformer: nn.Module, components: Mapping[str, Any]) -> Any:
        """A pipeline around `transformer`, with the family's usual scheduler where `components` has none."""

    @abstractmethod
    def pipeline_arguments(self, conditions: Mapping[str, Tensor], shape: Sequence[int]) -> dict[str, Any]:
        """Arguments of the pipeline's call that make samples of `shape` under `conditions`, which it takes as they are.

        Args:
            conditions: what the objective takes, B rows each; null conditions may have one row.
            shape: (height, width) or (frames, height, width) in pixels.
        """

    @abstractmethod
    def example(self, arguments: Mapping[str, Any], size: Sequence[int], batch_size: int = 1) -> Example:
        """What a model built from `arguments` (those of its class) takes for pixels of `size`; values are random.

        Args:
            size: (height, width), for video (frames, height, width); one number for a square image.

        Raises:
            UserError: when the family's VAE and model have no such size.
        """

    @abstractmethod
    def posterior(self, components: Mapping[str, Any], images: Tensor) -> dict[str, Tensor]:
        """What the VAE says of images (B, C, H, W) or videos (B, C, T, H, W) in [-1, 1], before anything is drawn.

        B rows each: "mean" is the scaled latents' mean and "std", where latents are drawn around it, their standard
        deviation. Without a VAE "mean" is the images themselves.
        """

    def draw_latents(self, posterior: Mapping[str, Tensor], generators: Sequence[torch.Generator]) -> Tensor:
        """Scaled latents from what `posterior` returned (or a cache of it holds), one CPU generator per sample."""
        mean = posterior["mean"]
        if "std" not in posterior:
            return mean
        noise = torch.stack([torch.randn(mean.shape[1:], generator=g) for g in generators])
        return mean + posterior["std"] * noise.to(mean)

    def encode(self, components: Mapping[str, Any], images: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Images or videos, as `posterior` takes them, to scaled latents; without a VAE they are returned as given."""
        return self.draw_latents(self.posterior(components, images), generators)

    def encode_prompts(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> dict[str, Tensor]:
        """Captions to the conditions that the objective takes, one row each; {} for a family without text.

        Args:
            components: with `text_components`; the result is on the encoder's device and in its dtype.
            prompts: B captions.
            instruction: lines put before each caption; None for what the pipeline puts there, () for none.
            max_sequence_length: tokens kept of a caption; None for as many as the pipeline keeps.
        """
        return {}

    def null_conditions(
        self, components: Mapping[str, Any], max_sequence_length: int | None = None
    ) -> dict[str, Tensor]:
        """Conditions with one row for all samples: what a dropped caption becomes; {} for a family without text."""
        return {}

    def too_long(
        self,
        components: Mapping[str, Any],
        prompts: Sequence[str],
        instruction: Sequence[str] | None = None,
        max_sequence_length: int | None = None,
    ) -> list[bool]:
        """Of which captions `encode_prompts` with the same arguments leaves out the end."""
        return [False] * len(prompts)

    def from_original(
        self,
        state_dict: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        mhla: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """A model from weights in the family's public checkpoint format, which it then holds (no copy, their dtype).

        Args:
            state_dict: names as published.
            metadata: of the safetensors file.
            mhla: MHLAConfig fields that neither the weights nor the metadata say, or that overrule them.

        Raises:
            UserError: naming the first weight that is missing, unknown or of another shape, or what must be given.
        """
        raise UserError(f"{self.name} has no other public checkpoint format than that of diffusers.")

    def to_original(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The inverse of `from_original`: the weights (no copy) and the metadata to save with them."""
        raise UserError(f"{self.name} has no other public checkpoint format than that of diffusers.")


def image_size(size: Sequence[int], multiple: int) -> tuple[int, int]:
    """`size` as (height, width), one number meaning a square; `UserError` unless both are multiples of `multiple`."""
    sides = (size[0], size[0]) if len(size) == 1 else tuple(size)
    if len(sides) != 2 or any(side < multiple or side % multiple for side in sides):
        raise UserError(f"size={tuple(size)} must be one or two multiples of {multiple}: height and width in pixels.")
    return sides


# What a file of a public format says beside its weights --------------------------------------------------------------


def metadata_field(metadata: Mapping[str, str], name: str, read: Callable[[str], Any], kind: type) -> Any:
    """`read` of the entry `name`, which must give a `kind`; None where there is no such entry, else `UserError`."""
    if name not in metadata:
        return None
    try:
        value = read(metadata[name])
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, kind):
        given = metadata[name][:60]
        raise UserError(f"the metadata of the weights has {name}={given!r}; a {kind.__name__} is expected.")
    return value


def read_heads(metadata: Mapping[str, str]) -> int | None:
    """The number of attention heads in the metadata, None where it is not there."""
    heads = metadata_field(metadata, "heads", int, int)
    if heads is not None and heads < 1:
        raise UserError(f"the metadata of the weights has heads={heads}; 1 or more is accepted.")
    return heads


def read_config(metadata: Mapping[str, str], mhla: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model's arguments as `to_original` wrote them, its MHLA fields overruled by `mhla`; None where it did not."""
    config = metadata_field(metadata, "config", json.loads, dict)
    if config is None or config.get("mhla") is None:
        return config
    if not isinstance(config["mhla"], dict):
        raise UserError(f"the metadata of the weights has mhla={config['mhla']!r}; a dict is expected.")
    return {**config, "mhla": {**config["mhla"], **mhla}}


def build_on_meta(model_class: type[nn.Module], config: Mapping[str, Any]) -> nn.Module:
    """A model without weights as a file describes it. Raises `UserError` where there is no such model."""
    try:
        with torch.device("meta"):
            return model_class(**config)
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the weights describe no {model_class.__name__} that can be built: {reason}") from None


def fill_with(
    model: nn.Module, weights: Mapping[str, Tensor], original_name: Callable[[str], str], given: Mapping[str, Tensor]
) -> None:
    """Put `weights`, which come from another format, into `model` themselves (no copy, their dtype).

    Args:
        weights: by the model's own names.
        original_name: the name in the other format, for messages.
        given: the weights in the other format, by that name.

    Raises:
        UserError: where weights are missing, unknown or of another shape.
    """
    expected = {name: value.shape for name, value in model.state_dict().items()}
    missing = [name for name in expected if name not in weights]
    if missing:
        raise UserError(f"the original weights lack {len(missing)} tensors, such as {original_name(missing[0])}.")
    for name, value in weights.items():
        if value.shape != expected.get(name):
            wanted = f"{tuple(expected[name])} as {name}" if name in expected else "no such tensor"
            original = original_name(name)
            raise UserError(
                f"the original weights have {original} of shape {tuple(given[original].shape)}, but the model that the "
                f"others make needs {wanted}."
            )
    model.load_state_dict(weights, strict=True, assign=True)
