"""What a finished run leaves: a pipeline with the moving-average weights, and its LoRA adapters as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.training_utils import EMAModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from ..backbones.family import Family
from .checkpoints import (
    disk_errors,
    learning_weights,
    named_ema,
    named_weights,
    on_main_process,
    whole_folder,
    whole_tensor,
)

LEARNED_WEIGHTS = "learned_weights.safetensors"  # of a run with LoRA: those that are not in its adapters


def export_pipeline(
    target: Path,
    family: Family,
    model: nn.Module,
    ema: EMAModel | None,
    components: dict[str, Any],
    accelerator: Accelerator,
) -> None:
    """Write `target` as a diffusers pipeline with the moving-average weights; every process must call it.

    LoRA adapters are merged into the weights; they themselves are in a folder beside it, TARGET_lora, with what else
    learned in LEARNED_WEIGHTS.
    """
    weights = named_weights(model) | (named_ema(model, ema) if ema is not None else {})
    weights = {name: whole_tensor(weight.detach()).cpu() for name, weight in weights.items()}

    def write() -> None:
        # diffusers would put arguments that were left at their defaults back to these, whatever they are now.
        settings = {key: value for key, value in model.config.items() if key != "_use_default_values"}
        exported = type(model).from_config(settings)
        if has_adapters(model):
            exported.add_adapter(model.peft_config["default"])
        with torch.no_grad():
            for name, place in named_weights(exported).items():
                place.copy_(weights[name])
        with disk_errors(target.parent / "checkpoints", f"{target} cannot be written"):
            if has_adapters(exported):
                with whole_folder(target.with_name(f"{target.name}_lora")) as folder:
                    others = [name for name in learning_weights(model) if ".lora_" not in name]
                    if others:
                        save_file({name: weights[name].contiguous() for name in others}, folder / LEARNED_WEIGHTS)
                    export_adapters(exported, family.pipeline_class(), folder)
            with whole_folder(target) as folder:
                family.build_pipeline(exported.eval(), components).save_pretrained(folder)

    on_main_process(accelerator, write)


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraLayer) for module in model.modules())


def export_adapters(model: nn.Module, pipeline_class: type, folder: Path) -> None:
    """Write the adapters of `model` as a LoRA file of diffusers, and merge them into its weights.

    A pipeline class that can load LoRA files reads it with `load_lora_weights(folder)`, else a transformer with
    `load_lora_adapter(folder, prefix=None)`.
    """
    if hasattr(pipeline_class, "save_lora_weights"):
        pipeline_class.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(model))
    else:
        model.save_lora_adapter(folder)
    model.fuse_lora()
    model.unload_lora()
