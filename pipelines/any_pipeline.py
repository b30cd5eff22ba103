"""Any diffusers pipeline as generation sees it: loading it, what it makes, and what its call takes.

No family is known here: everything is read off the pipeline's class, its call and its components.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import PartialState
from diffusers import DiffusionPipeline

from ..devices import is_out_of_memory, usable_device
from ..errors import UserError, of_one_process

OWN_KEYS = {"name", "seed_index"}  # of conditions, not of the pipeline's call
OWN_NUMBERS = {"batch_size", "fps"}  # of generation, not of the pipeline's call


def process_state(cpu: bool = False) -> PartialState:
    """This process among those of `accelerate launch` or `torchrun`; alone otherwise."""
    # Processes wait for the slowest one, which on a shared machine may take longer than torch's ten minutes.
    options = {"timeout": timedelta(days=7)} if int(os.environ.get("WORLD_SIZE", 1)) > 1 else {}
    return PartialState(cpu=cpu, **options)


def load_pipeline(
    path: str | Path, dtype: str = "float32", device: str | None = None, vae_dtype: str | None = None
) -> DiffusionPipeline:
    """Load a pipeline, with or without MHLA, onto a device.

    Args:
        path: a folder of `save_pretrained`, or a hub id.
        dtype: "float32", "bfloat16" or "float16".
        device: default: this process's GPU if there is one.
        vae_dtype: of the VAE alone; None: float32 in a pipeline that makes videos, as diffusers' examples of Wan load
            it, else `dtype`.

    Raises:
        UserError: there is no pipeline at `path`, it is damaged, or the memory is too small for it.
    """
    path, place = str(path), usable_device(device) if device else process_state().device
    if Path(path).exists() and not (Path(path) / "model_index.json").is_file():
        raise UserError(f"{path!r} is not a saved pipeline: it holds no model_index.json")
    if not Path(path).exists() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        raise UserError(f"the pipeline {path!r} does not exist, and it is not a hub id (owner/name)")
    try:
        pipeline = DiffusionPipeline.from_pretrained(path, dtype=getattr(torch, dtype))
        wanted = vae_dtype or ("float32" if makes_videos(pipeline) else dtype)
        if wanted != dtype and getattr(pipeline, "vae", None) is not None:
            # Read anew: converting back would not bring back the digits that were lost.
            pipeline.vae = type(pipeline.vae).from_pretrained(path, subfolder="vae", dtype=getattr(torch, wanted))
    except UserError:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(path, torch.device("cpu"), dtype) from None
    except (OSError, ValueError, AttributeError) as error:  # the last for a class that diffusers does not have
        reason = " ".join(str(error).split())
        raise UserError(f"the pipeline {path!r} could not be loaded: {reason}") from None
    for name, component in pipeline.components.items():
        weights = component.named_parameters() if isinstance(component, torch.nn.Module) else ()
        if missing := [key for key, weight in weights if weight.is_meta]:
            raise UserError(
                f"the pipeline {path!r} could not be loaded: {len(missing)} weights of its {name} are missing, the "
                f"first is {missing[0]!r}"
            )
    try:
        return pipeline.to(place)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _too_large(path, place, dtype) from None


def _too_large(path: str, place: torch.device, dtype: str) -> UserError:
    hint = "; dtype=bfloat16 takes half of it" if dtype == "float32" else ""
    return of_one_process(f"the memory of {place} is too small for the weights of {path!r} with dtype={dtype}{hint}")


def fingerprint(pipeline: DiffusionPipeline) -> str:
    """A short hash of a pipeline's weights (a sample of each tensor) and of its scheduler's settings."""
    digest = hashlib.sha256()
    for name, component in sorted(pipeline.components.items()):
        if isinstance(component, torch.nn.Module):
            for key, value in component.state_dict().items():
                if value.is_meta:  # offloaded
                    continue
                flat = value.detach().flatten()
                sample = flat[:: max(1, flat.numel() // 256)].float().cpu()
                digest.update(f"{name}.{key} {tuple(value.shape)}".encode() + sample.numpy().tobytes())
        elif name == "scheduler":
            digest.update(json.dumps(dict(component.config), sort_keys=True, default=str).encode())
    return digest.hexdigest()[:12]


def precision(pipeline: DiffusionPipeline) -> str:
    """The dtype of a pipeline's weights in words, and that of its VAE where it has another one."""
    main, vae = pipeline.dtype, getattr(getattr(pipeline, "vae", None), "dtype", None)
    text = str(main).removeprefix("torch.")
    return text if vae in (None, main) else f"{text}, VAE {str(vae).removeprefix('torch.')}"


def call_parameters(pipeline: DiffusionPipeline) -> dict[str, inspect.Parameter]:
    """The parameters of a pipeline's call by name."""
    return dict(inspect.signature(type(pipeline).__call__).parameters)


def makes_videos(pipeline: DiffusionPipeline) -> bool:
    """Whether a pipeline's call returns `.frames`, as those of diffusers that have a processor for videos."""
    return hasattr(pipeline, "video_processor") or "num_frames" in call_parameters(pipeline)


def call_arguments(pipeline: DiffusionPipeline, conditions: list[dict[str, Any]], options: dict[str, Any]) -> dict:
    """The arguments of the pipeline's call that all items share; refuses what it does not take, before any work."""
    name, parameters = type(pipeline).__name__, call_parameters(pipeline)
    keys = conditions[0].keys() - OWN_KEYS
    for index, condition in enumerate(conditions):
        if condition.keys() - OWN_KEYS != keys:
            raise UserError(f"item {index} has {sorted(condition)}, item 0 {sorted(conditions[0])}; all need the same")
        if not isinstance(condition.get("seed_index", 0), int):
            raise UserError(f"item {index} has seed_index={condition['seed_index']!r}, which must be a whole number")
    call = {key: value for key, value in options.items() if value is not None}
    _check_taken(name, parameters, keys, call)
    for key in ("num_inference_steps", "guidance_scale"):
        if key in parameters:
            call.setdefault(key, parameters[key].default)
    trained = getattr(getattr(getattr(pipeline, "scheduler", None), "config", None), "num_train_timesteps", None)
    _check_steps(name, call.get("num_inference_steps"), trained)
    if "guidance_scale" in call:
        call["guidance_scale"] = float(call["guidance_scale"])
    factor = getattr(pipeline, "vae_scale_factor_temporal", 1)
    if (call.get("num_frames", 1) - 1) % factor:
        lower = (call["num_frames"] - 1) // factor * factor + 1
        raise UserError(
            f"num_frames={call['num_frames']} must be a multiple of {factor} plus 1 for {name}; the nearest are "
            f"{lower} and {lower + factor}"
        )
    if "prompt" in keys:
        _check_text(pipeline, conditions, parameters)
    if check := getattr(pipeline, "check_inputs", None):
        known = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty}
        known |= call | {key: conditions[0][key] for key in keys}
        try:
            check(**{key: known[key] for key in inspect.signature(check).parameters if key in known})
        except ValueError as error:
            raise UserError(f"{name}: {' '.join(str(error).split())}") from None
    return call


def check_saved(path: str | Path, keys: Iterable[str], **numbers: float | None) -> None:
    """Refuse what the pipeline in the folder `path` does not take, before its weights are loaded.

    Its class and its scheduler's settings tell that; `call_arguments` looks at the rest. Of a hub id nothing is asked.

    Args:
        keys: the conditions' keys.
        numbers: of `generate_images`; None where not given.

    Raises:
        UserError: an argument that the call does not take; more steps than the scheduler has timesteps.
    """
    index = _read_json(Path(path) / "model_index.json")
    name = index.get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    call = {key: value for key, value in numbers.items() if value is not None and key not in OWN_NUMBERS}
    if isinstance(found, type) and issubclass(found, DiffusionPipeline):
        _check_taken(name, dict(inspect.signature(found.__call__).parameters), set(keys), call)
    trained = _read_json(Path(path) / "scheduler" / "scheduler_config.json").get("num_train_timesteps")
    _check_steps(name, call.get("num_inference_steps"), trained if isinstance(trained, int) else None)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none, which loading then says."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _check_taken(
    name: str, parameters: dict[str, inspect.Parameter], keys: Collection[str], call: dict[str, Any]
) -> None:
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in sorted(keys):
        if key not in parameters and not takes_any:
            raise UserError(f"{name} takes no {key}")
    if missing := [key for key in _required(parameters) if key not in keys and key not in call]:
        raise UserError(f"{name} needs {' and '.join(missing)}, which cannot be given here; call it from Python")
    for key in sorted(call):
        if key not in parameters and not takes_any:
            raise UserError(f"{name} takes no {key}; leave out {key}={call[key]}")


def _check_steps(name: str, steps: int | None, trained: int | None) -> None:
    if trained is not None and steps is not None and steps > trained:
        raise UserError(
            f"num_inference_steps={steps} must be at most {trained}, the timesteps that the scheduler of this {name} "
            "has"
        )


def _required(parameters: dict[str, inspect.Parameter]) -> list[str]:
    """What a call does not do without: what has no default, and what stands before the prompt (an image, a video)."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [key for key, p in parameters.items() if p.kind not in several and key != "self"]
    first = names[: names.index("prompt")] if "prompt" in names else []
    return [key for key in names if key in first or parameters[key].default is inspect.Parameter.empty]


def _check_text(pipeline: DiffusionPipeline, conditions: list[dict[str, Any]], parameters: dict) -> None:
    """Refuse prompts where nothing can read them; say which ones are cut off."""
    if getattr(pipeline, "text_encoder", pipeline) is None or getattr(pipeline, "tokenizer", pipeline) is None:
        raise UserError(f"this {type(pipeline).__name__} has no text encoder to read prompts with")
    if "max_sequence_length" not in parameters or not hasattr(pipeline, "tokenizer"):
        return
    limit = parameters["max_sequence_length"].default
    lengths = [len(tokens) for tokens in pipeline.tokenizer([c["prompt"] for c in conditions]).input_ids]
    if long := [index for index, length in enumerate(lengths) if length > limit]:
        warnings.warn(
            f"{len(long)} of {len(lengths)} prompts are longer than the {limit} tokens that the pipeline reads and are "
            f"cut off there; the first is number {long[0]} with {lengths[long[0]]} tokens",
            stacklevel=4,
        )
