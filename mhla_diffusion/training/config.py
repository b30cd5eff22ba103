"""The configuration of a training run: every option, its default and what it means.

A recipe is a YAML file that holds only what differs from the defaults below; `key=value` on the command line goes on
top.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import UserError, nearest


def option(default: Any, help: str, *, choices: Sequence[str] = (), minimum: float | None = None) -> Any:
    """A dataclass field with the sentence that `--help` and the printed config show beside it."""
    metadata = {"help": help, "choices": tuple(choices), "minimum": minimum}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelOptions:
    family: str = option("dit", "backbone family: dit, sana or wan")
    pretrained: str | None = option(
        None, "start: pipeline or transformer (folder, hub id), or an original release's file"
    )
    components: str | None = option(None, "pipeline whose VAE, scheduler, … are used; null: model.pretrained")
    preset: str | None = option(None, "size of a model that starts from random weights, as 'DiT-S/2'")
    overrides: dict[str, Any] = option({}, "model arguments on top of the preset, as {in_channels: 1}")
    attention: str = option("mhla", "self-attention; softmax: the family's own", choices=("softmax", "linear", "mhla"))
    mhla: dict[str, Any] = option({}, "MHLAConfig fields on top of the family's default, as {cpe: true}")


@dataclass
class DataOptions:
    train: str = option("", "folder of images or videos (classes or captions), dataset (hub id or folder) or cache")
    validation: str | None = option(None, "the same with held-out images, for the validation loss")
    size: int = option(256, "images are centre-cropped to size × size pixels", minimum=1)
    channels: int = option(3, "3: colour, 1: greyscale", minimum=1)
    flip: bool = option(True, "mirror half of the training images, chosen anew each epoch")
    num_workers: int = option(4, "image readers per training process; no result depends on it", minimum=0)
    buckets: Any = option(
        None, "shapes instead of the square: 'sana' (its published aspect ratios at data.size), or [[height, width], …]"
    )
    streaming: bool = option(False, "read a Hugging Face dataset in order from its files, without a copy on disk")
    instruction: list[str] | None = option(None, "lines before each caption; null: as the family's pipeline does it")
    max_tokens: int | None = option(None, "tokens kept of a caption; null: as many as generation keeps", minimum=1)
    num_frames: int = option(1, "frames of a clip, 4k + 1; 1: images", minimum=1)
    fps: float = option(16.0, "frames per second that videos are read at")
    short_clips: str = option("skip", "videos shorter than a clip", choices=("skip", "loop", "hold"))


@dataclass
class TrainOptions:
    steps: int = option(400_000, "optimiser steps", minimum=1)
    batch_size: int = option(256, "samples per optimiser step, over all processes and accumulation rounds", minimum=1)
    gradient_accumulation: int = option(1, "forward-backward rounds per optimiser step", minimum=1)
    lr: float = option(1e-4, "AdamW learning rate", minimum=0)
    mixing_lr: float | None = option(None, "learning rate of the mixing matrices; null: train.lr", minimum=0)
    weight_decay: float = option(0.0, "AdamW weight decay; never applied to the mixing matrices", minimum=0)
    beta1: float = option(0.9, "AdamW decay of the gradient average", minimum=0)
    beta2: float = option(0.999, "AdamW decay of the squared-gradient average", minimum=0)
    warmup_steps: int = option(0, "steps over which the learning rate rises from 0", minimum=0)
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm; 0: never", minimum=0)
    ema_decay: float = option(0.9999, "decay of the weights' moving average, which is exported; 0: none", minimum=0)
    label_dropout: float = option(0.1, "share of samples that lose their condition, for guidance", minimum=0)
    objective: dict[str, Any] = option({}, "further options of the family's training objective")
    align_steps: int = option(0, "steps that first fit each new layer to the one that it replaces; 0: none", minimum=0)
    align_lr: float | None = option(None, "AdamW learning rate of these steps; null: ten times train.lr", minimum=0)
    trainable: str = option("all", "which weights learn", choices=("all", "attention", "mhla"))
    lora_rank: int = option(0, "rank of LoRA adapters on layers that would not learn; 0: none", minimum=0)
    optimizer: str = option("adamw", "adamw8bit needs the bitsandbytes package", choices=("adamw", "adamw8bit"))
    ema_device: str = option("model", "where the moving average is kept", choices=("model", "cpu"))
    mixed_precision: str = option("no", "arithmetic; the weights stay float32", choices=("no", "bf16", "fp16"))
    tf32: bool = option(True, "allow TF32 matrix products on GPUs that have them")
    gradient_checkpointing: bool = option(False, "recompute activations: less memory, about 30 % slower")
    compile: bool = option(False, "compile the transformer with torch.compile")
    seed: int = option(0, "every random number of the run follows from it", minimum=0)


@dataclass
class CheckpointOptions:
    every: int = option(5_000, "steps between checkpoints; 0: only the last step", minimum=0)
    keep_last: int = option(3, "newest checkpoints that are kept", minimum=1)
    keep_every: int = option(0, "checkpoints at multiples of this step are kept for good; 0: none", minimum=0)


@dataclass
class ValidationOptions:
    every: int = option(5_000, "steps between validations; 0: only the last step", minimum=0)
    images: int = option(16, "images in the grid; image i depends on train.seed and i alone; 0: no grid", minimum=0)
    labels: list[int] = option([], "classes of the grid, repeated as needed; []: all classes in turn")
    prompts: list[str] = option([], "captions of the grid, repeated as needed; []: the first of the data")
    num_inference_steps: int = option(50, "denoising steps of the grid", minimum=1)
    guidance_scale: float = option(4.0, "classifier-free guidance of the grid; 1: none", minimum=0)
    loss_images: int = option(1024, "at most this many held-out images in the validation loss", minimum=1)


@dataclass
class LoggingOptions:
    every: int = option(50, "steps between lines of metrics.jsonl; each is the mean over those steps", minimum=1)
    tensorboard: bool = option(True, "write curves and grids to OUTPUT_DIR/tensorboard")
    wandb: str | None = option(None, "Weights & Biases project to log to; needs the wandb package")
    progress: bool = option(True, "progress bar with the time left")


@dataclass
class TrainConfig:
    output_dir: str = option("", "folder of the run: config, checkpoints, metrics, grids, and the exported pipeline")
    model: ModelOptions = field(default_factory=ModelOptions, metadata={"help": "what is trained"})
    data: DataOptions = field(default_factory=DataOptions, metadata={"help": "what it is trained on"})
    train: TrainOptions = field(default_factory=TrainOptions, metadata={"help": "how it is trained"})
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions, metadata={"help": "what is kept"})
    validation: ValidationOptions = field(default_factory=ValidationOptions, metadata={"help": "what is looked at"})
    logging: LoggingOptions = field(default_factory=LoggingOptions, metadata={"help": "where numbers go"})


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a recipe, put `key=value` overrides on top, and check every key, type, choice and range.

    Raises `UserError` naming the key, the value and what is accepted.
    """
    layers = [] if path is None else [read_yaml(Path(path))]
    layers.append(_read_dotlist(overrides))
    return config_from_dict(*layers)


def config_from_dict(*layers: dict[str, Any]) -> TrainConfig:
    """The config that results from the defaults with each of `layers` (nested dicts) on top in turn.

    `model.mhla` is merged field by field, too; an empty one drops what earlier layers say.
    """
    merged = OmegaConf.structured(TrainConfig)
    for layer in layers:
        _check_keys(layer, TrainConfig)
        if (layer.get("model") or {}).get("mhla") == {}:  # not "nothing more", as merging would have it
            merged.model.mhla = {}
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise UserError(_type_message(error)) from None
    config = OmegaConf.to_object(merged)
    _check_values(config)
    return config


def config_to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain dict of `config`, fit for YAML and JSON."""
    return dataclasses.asdict(config)


def config_to_yaml(config: TrainConfig) -> str:
    """The full config as YAML, each key with its explanation; it reads back as the same config."""
    lines = []
    for depth, key, value, metadata in _walk(config):
        indent = "  " * depth
        if dataclasses.is_dataclass(value):
            lines.append(f"\n{indent}{key}:  # {metadata['help']}")
        else:
            lines.append(f"{indent}{key}: {_inline(value)}  # {_describe(metadata)}")
    return "\n".join(lines).strip() + "\n"


def config_help() -> str:
    """One line per key: name, default, meaning."""
    lines = []
    section = ""
    for depth, key, value, metadata in _walk(TrainConfig()):
        if dataclasses.is_dataclass(value):
            section = f"{key}."
            lines.append(f"\n{key}: {metadata['help']}")
        else:
            name = f"{section if depth else ''}{key}={_inline(value)}"
            lines.append(f"  {name:<38} {_describe(metadata)}")
    return "\n".join(lines)


def config_differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two nested dicts, with both values."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            differences |= config_differences(before, after, f"{prefix}{key}.")
        elif before != after:
            differences[f"{prefix}{key}"] = (before, after)
    return differences


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a recipe as nested dicts. Raises `UserError` when there is no such file or it is not YAML."""
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"--config {path} {what}{nearest(path.name, near)}")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config {path} is not a readable YAML file: {reason}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path} holds a {type(loaded).__name__}; sections like 'train:' are expected")
    return loaded


def _read_dotlist(overrides: Sequence[str]) -> dict[str, Any]:
    for item in overrides:
        if "=" not in item or item.startswith(("=", "-")):
            raise UserError(f"argument {item!r} is not understood; overrides look like train.lr=1e-4")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"overrides {list(overrides)} cannot be read: {' '.join(str(error).split())}") from None


def _check_keys(layer: Any, kind: type, prefix: str = "") -> None:
    if not isinstance(layer, dict):
        raise UserError(f"{prefix.rstrip('.')} is {layer!r}; a section with keys like {_names(kind)[0]!r} is expected")
    hints = get_type_hints(kind)
    for key, value in layer.items():
        if key not in hints:
            hint = nearest(str(key), _names(kind))
            if not hint and not prefix:  # a key that was given without its section
                owners = [name for name in _all_names() if name.endswith(f".{key}")]
                hint = f" (did you mean {owners[0]!r}?)" if owners else hint
            raise UserError(f"unknown config key {prefix + str(key)!r}{hint}; known are {', '.join(_names(kind))}")
        if dataclasses.is_dataclass(hints[key]):
            _check_keys(value, hints[key], f"{prefix}{key}.")


def _check_values(config: TrainConfig) -> None:
    for section, name, value, metadata in _leaves(config):
        key = f"{section}{name}"
        if metadata["choices"] and value not in metadata["choices"]:
            known = metadata["choices"]
            raise UserError(f"{key} is {value!r}; {', '.join(known)} are accepted{nearest(str(value), known)}")
        if metadata["minimum"] is not None and value is not None and not value >= metadata["minimum"]:
            raise UserError(f"{key} is {value!r}; {metadata['minimum']} or more is accepted")
    for key, value in (("ema_decay", config.train.ema_decay), ("label_dropout", config.train.label_dropout)):
        if value > 1:
            raise UserError(f"train.{key} is {value!r}; a value from 0 to 1 is accepted")
    for key, value in (("beta1", config.train.beta1), ("beta2", config.train.beta2)):
        if value >= 1:
            raise UserError(f"train.{key} is {value!r}; a value from 0 to below 1 is accepted")
    if config.train.seed >= 2**63:
        raise UserError(f"train.seed is {config.train.seed}; a number below 2**63 is accepted")
    if config.data.channels not in (1, 3):
        raise UserError(f"data.channels is {config.data.channels}; 1 (greyscale) and 3 (colour) are accepted")


def _type_message(error: OmegaConfBaseException) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    *sections, name = str(error.full_key).split(".")
    kind: Any = TrainConfig
    for section in sections:
        kind = get_type_hints(kind)[section]
    name = name.partition("[")[0]  # an element of a list, as labels[0]
    expected = next(f.type for f in dataclasses.fields(kind) if f.name == name)
    return f"config key {error.full_key.partition('[')[0]} must be of type {expected}: {reason}"


def _names(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]


def _all_names() -> list[str]:
    return [f"{section}{name}" for section, name, _, _ in _leaves(TrainConfig())]


def _walk(config: Any, depth: int = 0) -> Iterator[tuple[int, str, Any, dict[str, Any]]]:
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        yield depth, f.name, value, f.metadata
        if dataclasses.is_dataclass(value):
            yield from _walk(value, depth + 1)


def _leaves(config: TrainConfig) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    section = ""
    for depth, name, value, metadata in _walk(config):
        if dataclasses.is_dataclass(value):
            section = f"{name}."
        else:
            yield (section if depth else ""), name, value, metadata


def _describe(metadata: dict[str, Any]) -> str:
    return metadata["help"] + (f" ({', '.join(metadata['choices'])})" if metadata["choices"] else "")


def _inline(value: Any) -> str:
    """`value` as JSON, which is YAML too; a float keeps its point, so that it reads back as one."""
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)
