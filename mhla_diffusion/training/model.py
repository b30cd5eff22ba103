"""The model that a config asks for: built or loaded, retrofitted, given the data's classes; its pipeline's parts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging
from torch import nn

from ..backbones import family_named
from ..backbones.family import Family, Objective
from ..convert import read_weights
from ..errors import UserError
from ..processor import MHLAConfig
from ..retrofit import TRANSFORMERS, apply_mhla
from .config import ModelOptions, TrainOptions

# Model arguments that are counts, or sizes in tokens, pixels or channels.
COUNTS = (
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "sample_size",
    "patch_size",
)


def load_model(
    options: ModelOptions, num_classes: int, say: Callable[[str], None] = print, align_steps: int = 0
) -> tuple[Family, nn.Module]:
    """The family and the float32 transformer.

    Raises `UserError` for a family or preset that is unknown, a checkpoint that cannot be read or is of another family,
    and attention that the checkpoint cannot have; and, with `align_steps`, where no layer is replaced.
    """
    family = family_named(options.family)
    mhla = _mhla_config(options, family)
    _check_overrides(options.overrides)
    aligned = f"train.align_steps is {align_steps}, but "
    if align_steps and mhla is None:
        raise UserError(f"{aligned}model.attention is 'softmax', so no layer is replaced; set train.align_steps=0")
    if align_steps and options.pretrained is None:
        raise UserError(f"{aligned}model.pretrained is not set, so there is nothing to align to; set one of the two")

    if options.pretrained is None:
        model = _build(family, options, mhla)
        family.set_num_classes(model, num_classes)
        family.init_weights_(model)
    else:
        model = _load_transformer(family, options.pretrained, options.overrides)
        if align_steps and getattr(model, "mhla_config", None) is not None:
            raise UserError(f"{aligned}{options.pretrained!r} already has MHLA attention; set train.align_steps=0")
        model = _set_attention(model, options, mhla, say)
        replaced = family.set_num_classes(model, num_classes)
        if replaced is not None:
            say(f"the label table of {replaced} classes is replaced by a new one of {num_classes}; all else is kept")

    return family, model


def make_objective(family: Family, options: TrainOptions) -> Objective:
    """The training objective. Raises `UserError` for an entry of `train.objective` that the family's does not take."""
    try:
        return family.objective(label_dropout=options.label_dropout, **options.objective)
    except TypeError as error:
        raise UserError(
            f"train.objective {options.objective} does not suit model.family {family.name!r}: {error}"
        ) from None


@torch.no_grad()
def check_fit(
    family: Family,
    model: nn.Module,
    components: dict[str, Any],
    size: int,
    channels: int,
    latent_shape: tuple[int, ...] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> None:
    """Raise `UserError` when images of `data.size` and `data.channels` do not give latents that the model takes.

    Args:
        latent_shape: that of cached latents, whose shapes have been encoded already; None encodes an image to know it.
        shapes: in pixels, (…, height, width), where they are others than the square.
    """
    vae = components.get("vae")
    if vae is not None and channels != vae.config.in_channels:
        raise UserError(f"data.channels is {channels}, but the VAE takes {vae.config.in_channels}; set it to that")
    cached = latent_shape is not None
    if latent_shape is None:
        device, side = next(model.parameters()).device, 128  # a small image, of a size that every VAE takes
        latents = family.encode(components, torch.zeros(1, channels, side, side, device=device), [torch.Generator()])
        factor = side // latents.shape[-1]
        _check_sizes([(size, size)] if shapes is None else shapes, factor, model)
        latent_shape = (latents.shape[1], size // factor, size // factor)
    wanted = model.config.in_channels
    if latent_shape[0] != wanted:
        source = "the cache" if cached else "the VAE" if vae is not None else f"data.channels={channels}"
        hint = ", or name the pipeline with its VAE in model.components" if vae is None and not cached else ""
        raise UserError(
            f"{source} gives {latent_shape[0]} channels, but the model takes {wanted}; change it or "
            f"model.overrides.in_channels{hint}"
        )
    if not family.one_size:
        return
    side = model.config.sample_size
    if latent_shape[-1] != side:
        raise UserError(
            f"data.size={size} gives latents of {latent_shape[-1]}×{latent_shape[-1]}, but the model is set to "
            f"{side}×{side}; set model.overrides.sample_size={latent_shape[-1]} or change data.size"
        )


def _check_sizes(shapes: Sequence[tuple[int, ...]], factor: int, model: nn.Module) -> None:
    """Raise `UserError` for a height or width in pixels that the VAE's factor and the model's patches do not divide."""
    patch = model.config.patch_size
    step = factor * (patch if isinstance(patch, int) else patch[-1])
    for *_, height, width in shapes:
        if height % step or width % step:
            raise UserError(
                f"data.size or data.buckets gives samples of {height}×{width} pixels; multiples of {step} are accepted "
                f"(the VAE divides by {factor}, the model's patches by {step // factor})"
            )


def load_saved(options: ModelOptions) -> nn.Module:
    """The transformer of `options.pretrained`, as it was saved."""
    return _load_transformer(family_named(options.family), options.pretrained, options.overrides)


def load_components(
    options: ModelOptions, only: Collection[str] | None = None, without: Collection[str] = ()
) -> dict[str, Any]:
    """The parts of the pipeline at `options.components` (else `options.pretrained`) besides its transformer.

    `only` names those that are wanted, None means all but those in `without`. Empty for a bare transformer or an
    original release's file. What is loaded, and with which class, is up to diffusers; no module is imported because a
    checkpoint names it.
    """
    path = options.components or options.pretrained
    key = "model.components" if options.components else "model.pretrained"
    if path is None or (path != options.components and Path(path).is_file()):
        return {}
    if not _is_pipeline(path, key) and not options.components:
        if not Path(path).is_dir():
            _check_bare(family_named(options.family), path)
        return {}
    try:
        index = DiffusionPipeline.load_config(path)
    except OSError as error:
        raise _unreadable(path, error, key) from None
    parts = {name: entry for name, entry in index.items() if isinstance(entry, (list, tuple)) and name[0] != "_"}
    skipped = {name for name in parts if name in (*TRANSFORMERS, *without) or (only is not None and name not in only)}
    for name in parts.keys() - skipped:
        _check_library(path, name, parts[name][0])
    # By its own class: DiffusionPipeline would load a transformer that is optional although it is passed as None.
    name = index.get("_class_name")
    pipeline_class = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (isinstance(pipeline_class, type) and issubclass(pipeline_class, DiffusionPipeline)):
        raise UserError(f"pipeline {path!r} is a {name}, which is no pipeline of diffusers or of this library")
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # else there is one per process
    try:
        pipeline = pipeline_class.from_pretrained(path, dtype=torch.float32, **dict.fromkeys(skipped))
    except (OSError, ValueError, AttributeError, TypeError, RuntimeError, ImportError) as error:
        raise _unreadable(path, error, key) from None
    finally:
        if shows_progress:
            logging.enable_progress_bar()
    components = {name: part for name, part in pipeline.components.items() if part is not None}
    for part in components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False).eval()
    return components


def _check_library(path: str, name: str, library: str | None) -> None:
    """diffusers' rule, which not all of its versions keep: a checkpoint may name these, or what is imported already."""
    if library not in (None, "diffusers", "transformers", *sys.modules) and not hasattr(diffusers.pipelines, library):
        raise UserError(
            f"pipeline {path!r} takes its {name} from a module {library!r}, which is not imported because a checkpoint "
            "names it; parts of diffusers and transformers are accepted"
        )


def _mhla_config(options: ModelOptions, family: Family) -> MHLAConfig | None:
    if options.attention == "softmax":
        if options.mhla:
            raise UserError(
                "model.mhla is given but model.attention is 'softmax'; set model.attention=mhla, or drop it with "
                "model.mhla={}"
            )
        return None
    fields = dict(options.mhla)
    if options.attention == "linear":
        fields = {"cpe": False, **fields, "blocks": family.linear_blocks, "learn_mixing": False}
    return MHLAConfig.from_dict({**family.default_config.to_dict(), **fields})


def _check_overrides(overrides: dict[str, Any]) -> None:
    for name in COUNTS:
        value = overrides.get(name, 1)
        if isinstance(value, int) and value < 1:
            raise UserError(f"model.overrides.{name} is {value}; 1 or more is accepted")


def _build(family: Family, options: ModelOptions, mhla: MHLAConfig | None) -> nn.Module:
    try:
        return family.build_model(options.preset, None if mhla is None else mhla.to_dict(), **options.overrides)
    except TypeError as error:
        raise UserError(f"model.overrides does not suit the model: {error}") from None


def _load_transformer(family: Family, path: str, overrides: dict[str, Any]) -> nn.Module:
    if Path(path).is_file():
        return _load_original(family, path, overrides)
    place: dict[str, Any] = {"subfolder": "transformer"} if _is_pipeline(path) else {}
    try:
        saved = family.base_class.load_config(path, **place)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    saved_class = family.saved_class(saved)
    if saved_class is None:
        accepted = f"{family.base_class.__name__} and {family.model_class.__name__}"
        raise UserError(f"model.pretrained {path!r} holds a {saved.get('_class_name')}; {accepted} are accepted")
    try:
        return saved_class.from_pretrained(path, dtype=torch.float32, **place, **overrides)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise _unreadable(path, error) from None


def _load_original(family: Family, path: str, overrides: dict[str, Any]) -> nn.Module:
    """The transformer in a file of the family's public format, in float32."""
    weights, metadata = read_weights(path)
    if "num_attention_heads" in overrides:  # the weights of an unusual size do not say it
        metadata = {**metadata, "heads": str(overrides["num_attention_heads"])}
    model = family.from_original(weights, metadata).float()
    if not overrides:
        return model
    settings = {name: value for name, value in model.config.items() if not name.startswith("_")}
    try:
        changed = type(model)(**{**settings, **overrides})
        changed.load_state_dict(model.state_dict())
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.overrides {overrides} does not suit model.pretrained {path!r}: {reason}") from None
    return changed


def _set_attention(
    model: nn.Module, options: ModelOptions, mhla: MHLAConfig | None, say: Callable[[str], None]
) -> nn.Module:
    current = getattr(model, "mhla_config", None)
    if mhla is None:
        if current is not None:
            raise UserError(
                f"model.attention is 'softmax', but {options.pretrained!r} has MHLA attention; set it to mhla"
            )
        return model
    if current is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it must be fine-tuned, which is what happens next
            return apply_mhla(model, mhla)
    asked, has = mhla.to_dict(), current.to_dict()
    linear = {"blocks", "learn_mixing"} if options.attention == "linear" else set()
    changed = {key: f"{key}={asked[key]!r}" for key in sorted({*options.mhla} | linear) if asked[key] != has[key]}
    if [*changed] == ["blocks"] and asked["blocks"] is not None and options.attention == "mhla":
        model.resize_blocks_(tuple(asked["blocks"]))
        say(f"the mixing of {has['blocks']} blocks is interpolated to {asked['blocks']} blocks; all else is kept")
    elif changed:
        raise UserError(
            f"{options.pretrained!r} already has MHLA attention ({current}), which {', '.join(changed.values())} would "
            "change; set model.attention=mhla and leave model.mhla empty to keep it"
        )
    return model


def _is_pipeline(path: str, key: str = "model.pretrained") -> bool:
    if Path(path).is_dir():
        return (Path(path) / "model_index.json").is_file()
    if Path(path).exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(f"{key} {path!r} is neither a folder nor a hub id like owner/name")
    try:
        DiffusionPipeline.load_config(path)
    except OSError:
        return False  # a bare transformer, or nothing; loading that says which
    return True


def _check_bare(family: Family, path: str) -> None:
    """Raise `UserError` where there is no transformer at a hub id either."""
    try:
        family.base_class.load_config(path)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception, key: str = "model.pretrained") -> UserError:
    return UserError(f"{key} {path!r} cannot be read: {' '.join(str(error).split())}")
