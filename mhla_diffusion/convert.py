"""Public checkpoint formats to a diffusers folder and back; what a format is, its family says (`from_original`)."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import diffusers
import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import pipelines
from .backbones import family_named, family_of
from .errors import UserError

PICKLED = (".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("ema", "state_dict", "model", "module")  # under which training code puts the weights in a .pth file


def from_public(
    family: str,
    source: str | Path,
    output: str | Path,
    components: str | None = None,
    blocks: Sequence[int] | None = None,
    resize_blocks: Sequence[int] | None = None,
    heads: int | None = None,
) -> str:
    """Write the weights in the public format at `source` as a diffusers folder; return what was done, one sentence.

    Args:
        family: "dit", "wan", ….
        source: a .safetensors, .pt or .pth file, or a folder of .safetensors shards.
        output: a new folder: the transformer, or with `components` a whole pipeline.
        components: folder or hub id of the pipeline that gives everything but the transformer.
        blocks: block counts that the weights were trained with, where they do not say.
        resize_blocks: block counts to interpolate the mixing to.
        heads: attention heads per layer, where the weights do not say.

    Raises:
        UserError: when files cannot be read or written, or do not suit the family.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"the output {str(output)!r} exists already; choose a new folder.")
    weights, metadata = read_weights(source)
    if heads is not None:
        metadata = {**metadata, "heads": str(heads)}
    mhla = {} if blocks is None else {"blocks": tuple(blocks)}
    model = family_named(family).from_original(weights, metadata, mhla)
    _resize_blocks(model, resize_blocks)
    result: Any = model if components is None else _pipeline_around(model, components)
    try:
        result.save_pretrained(output)
    except OSError as error:
        raise UserError(f"the output {str(output)!r} cannot be written: {error}") from None
    return f"{output}: {_description(model)}"


def to_public(family: str, source: str | Path, output: str | Path, resize_blocks: Sequence[int] | None = None) -> str:
    """Write the diffusers transformer, or that of the pipeline, at `source` as one .safetensors, .pt or .pth file.

    What the public format has no weights for is in the metadata of a .safetensors file; a .pt or .pth file has none, so
    only models that the weights say in full can be written as one.
    """
    output = Path(output)
    if output.suffix not in (".safetensors", ".pt", ".pth"):
        raise UserError(f"the output {str(output)!r} must end in .safetensors, .pt or .pth.")
    if output.exists():
        raise UserError(f"the output {str(output)!r} exists already; choose a new file.")
    model = _load_transformer(family, Path(source))
    _resize_blocks(model, resize_blocks)
    weights, metadata = family_named(family).to_original(model)
    if output.suffix != ".safetensors":
        _check_weights_say_all(family, output, weights, metadata)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".safetensors":
            save_file(weights, temporary, {"format": "pt", **metadata})
        else:
            torch.save(weights, temporary)
        os.replace(temporary, output)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the output {str(output)!r} cannot be written: {error}") from None
    return f"{output}: {_description(model)}"


def is_diffusers_folder(path: str | Path) -> bool:
    """Whether `path` holds a diffusers transformer or pipeline (original releases have a config.json too)."""
    path = Path(path)
    if (path / "model_index.json").is_file():
        return True
    return (path / "config.json").is_file() and '"_diffusers_version"' in (path / "config.json").read_text()


def read_weights(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .safetensors file (or a folder of its shards), .pt or .pth file by name, and the metadata.

    Nothing but tensors and plain data is unpickled. Of a training checkpoint the averaged weights are taken, if it has
    them.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"the input {str(path)!r} is neither a file nor a folder with .safetensors files.")
    weights: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        try:
            if file.suffix in PICKLED:
                with torch.serialization.safe_globals([argparse.Namespace]):  # options beside the weights
                    weights |= _tensors(torch.load(file, map_location="cpu", weights_only=True))
            else:
                with safe_open(file, "pt") as opened:
                    metadata |= opened.metadata() or {}
                    weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except pickle.UnpicklingError:
            raise UserError(f"{str(file)!r} is damaged, or holds more than tensors, which alone are read.") from None
        except (OSError, RuntimeError, EOFError, SafetensorError) as error:
            raise UserError(f"{str(file)!r} cannot be read as weights: {' '.join(str(error).split())}") from None
    return weights, metadata


def _tensors(content: Any) -> dict[str, Tensor]:
    """The state dict in what a .pth file held."""
    while isinstance(content, Mapping):
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return dict(content)
        inner = [name for name in WRAPPERS if isinstance(content.get(name), Mapping)]
        if not inner:
            break
        content = content[inner[0]]
    raise RuntimeError(f"it holds no state dict, alone or under one of {', '.join(WRAPPERS)}")


def _check_weights_say_all(
    family: str, output: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Raise `UserError` where the weights without the metadata would be read as another model."""
    known = family_named(family)
    try:
        read = known.to_original(known.from_original(weights))[1]
    except UserError as error:
        lost = str(error)
    else:
        here, there = (
            {name: value for name, value in json.loads(info["config"]).items() if value is not None}
            for info in (metadata, read)
        )
        differing = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        lost = ", ".join(f"{name}={here.get(name)!r} would become {there.get(name)!r}" for name in differing)
    if lost:
        raise UserError(
            f"the output {str(output)!r} cannot hold all of this model ({lost}); write a .safetensors file, which has "
            "room for its config."
        )


def _resize_blocks(model: nn.Module, blocks: Sequence[int] | None) -> None:
    if blocks is None:
        return
    if getattr(model, "mhla_config", None) is None:
        raise UserError(f"resize_blocks={tuple(blocks)} is given, but the model has no MHLA layers; leave it out.")
    model.resize_blocks_(tuple(blocks))


def _pipeline_around(model: nn.Module, components: str) -> Any:
    try:
        name = str(DiffusionPipeline.load_config(components).get("_class_name"))
        # By its own class: DiffusionPipeline.from_pretrained would ignore the transformer where it is optional.
        cls = getattr(pipelines, f"MHLA{name}", None) or getattr(diffusers, name, None)
        if cls is None:
            raise UserError(f"the components {components!r} are of a {name}, which is not known here.")
        taken = get_type_hints(cls.__init__).get("transformer", object)
        if not isinstance(model, taken):
            raise UserError(f"the components {components!r} are of a {name}, which takes no {type(model).__name__}.")
        return cls.from_pretrained(components, transformer=model)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"the components {components!r} cannot be read: {' '.join(str(error).split())}") from None


def _load_transformer(family: str, path: Path) -> nn.Module:
    """The transformer in a diffusers folder, its weights in the dtypes of the file."""
    known = family_named(family)
    if (path / "model_index.json").is_file():
        path = path / "transformer"
    try:
        config = known.base_class.load_config(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the input {str(path)!r} is no transformer's folder: {' '.join(str(error).split())}") from None
    saved_class = known.saved_class(config)
    if saved_class is None:
        accepted = f"{known.base_class.__name__} and {known.model_class.__name__}"
        raise UserError(f"the input {str(path)!r} holds a {config.get('_class_name')}; {accepted} are accepted.")
    weights, _ = read_weights(path)
    with torch.device("meta"):
        model = saved_class.from_config(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(f"the input {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    return model


def _description(model: nn.Module) -> str:
    config = getattr(model, "mhla_config", None)
    count = len(family_of(model).blocks_of(model))
    if config is None:
        return f"{type(model).__name__}, the family's own attention in all {count} layers"
    layers = sum(1 for _ in model.mixings())
    return f"{type(model).__name__}, MHLA with blocks {config.blocks} in {layers} of {count} layers"
