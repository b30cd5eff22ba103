"""What of a model learns and how: the weights that are not frozen, LoRA adapters, the optimiser, the moving average."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from torch import nn

from ..backbones.family import Family
from ..errors import UserError
from .checkpoints import learning_weights
from .config import TrainOptions
from .metrics import mixing_parameters

# Weights -------------------------------------------------------------------------------------------------------------


def choose_trainable(family: Family, model: nn.Module, options: TrainOptions) -> int:
    """Freeze what `train.trainable` leaves out, add adapters if asked; return the number of parameters that learn."""
    fixed = [p for p in model.parameters() if not p.requires_grad]  # mixing with learn_mixing=False stays fixed
    if options.trainable != "all":
        model.requires_grad_(False)
        for block in family.blocks_of(model):
            learning = block.attn1 if options.trainable == "attention" else block.attn1.processor
            if isinstance(learning, nn.Module):
                learning.requires_grad_(True)
        for parameter in fixed:
            parameter.requires_grad_(False)
    if options.lora_rank:
        add_adapters(family, model, options.lora_rank)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if count == 0:
        raise UserError(
            f"train.trainable is {options.trainable!r}, but the model has no such weights; 'all' is accepted"
        )
    return count


def add_adapters(family: Family, model: nn.Module, rank: int) -> None:
    """Put LoRA adapters (Hu et al. 2021) with α = `rank` on the frozen linear layers of the blocks' attention and MLPs.

    What they add is zero at first. Raises `UserError` where none of these layers is frozen, and for a diffusers class
    that takes no adapters (DiT without MHLA).
    """
    if not hasattr(model, "add_adapter"):
        raise UserError(
            f"train.lora_rank is {rank}, but a {type(model).__name__} takes no adapters; set model.attention=mhla, or "
            "train.lora_rank=0"
        )
    blocks = {id(block) for block in family.blocks_of(model)}
    targets = {
        f"{place}.{name}": min(layer.in_features, layer.out_features)
        for place, block in model.named_modules()
        if id(block) in blocks
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(("attn", "ff"))  # "ffn" in some families
        if not any(parameter.requires_grad for parameter in layer.parameters()) and ".processor." not in name
    }
    if not targets:
        raise UserError(
            f"train.lora_rank is {rank}, but no linear layer is frozen; set train.trainable=attention or mhla, or "
            "train.lora_rank=0"
        )
    if rank > max(targets.values()):
        raise UserError(f"train.lora_rank is {rank}, but no layer's weights have a rank above {max(targets.values())}")
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)))
    for parameter in learning:  # which the adapters have frozen
        parameter.requires_grad_(True)


def adapter_parameters(model: nn.Module) -> int:
    """The number of parameters in LoRA adapters."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" in name)


# The optimiser -------------------------------------------------------------------------------------------------------


def parameter_groups(model: nn.Module, options: TrainOptions) -> list[dict[str, Any]]:
    """AdamW groups: the mixing weights apart, with their own learning rate and no weight decay."""
    mixing = [p for p in mixing_parameters(model) if p.requires_grad]
    apart = {id(p) for p in mixing}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in apart]
    mixing_lr = options.lr if options.mixing_lr is None else options.mixing_lr
    groups = [
        {"params": others, "lr": options.lr, "weight_decay": options.weight_decay, "name": "weights"},
        {"params": mixing, "lr": mixing_lr, "weight_decay": 0.0, "name": "mixing"},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, options: TrainOptions, accelerator: Accelerator) -> torch.optim.Optimizer:
    """AdamW over what learns, its averages in float32 or, for "adamw8bit", in blocks of 8-bit numbers.

    Raises `UserError` where the latter needs a package that is missing, or weights that are whole.
    """
    groups, betas = parameter_groups(model, options), (options.beta1, options.beta2)
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, betas=betas)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise UserError(
            "train.optimizer is 'adamw8bit', which needs whole weights, but FSDP splits them (and the optimiser's "
            "state with them); 'adamw' is accepted"
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise UserError(
            "train.optimizer is 'adamw8bit' but the bitsandbytes package is missing; pip install bitsandbytes, or set "
            "it to adamw"
        ) from None
    return AdamW8bit(groups, betas=betas)


# The moving average --------------------------------------------------------------------------------------------------


def moving_average(model: nn.Module, options: TrainOptions) -> EMAModel | None:
    """The average of what learns, on `train.ema_device`; None for `train.ema_decay=0`."""
    if not options.ema_decay:
        return None
    ema = EMAModel(learning_weights(model).values(), decay=options.ema_decay)
    if options.ema_device == "cpu":
        ema.shadow_params = [parameter.to("cpu") for parameter in ema.shadow_params]
    return ema


def update_average(ema: EMAModel, model: nn.Module) -> None:
    """Take the weights of this step into the average, wherever that is kept."""
    pairs = zip(learning_weights(model).values(), ema.shadow_params, strict=True)
    # As parameters, because EMAModel copies what does not learn instead of averaging it.
    ema.step([nn.Parameter(weight.detach().to(average.device)) for weight, average in pairs])


# Splitting over processes --------------------------------------------------------------------------------------------


def wrap_present_classes(accelerator: Accelerator, model: nn.Module) -> None:
    """Of the layer classes that an accelerate config names for FSDP, keep those that `model` has.

    So one config serves all families; accelerate itself refuses a class that the model lacks.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.transformer_cls_names_to_wrap:
        present = {type(module).__name__ for module in model.modules()}
        kept = [name for name in plugin.transformer_cls_names_to_wrap if name in present]
        plugin.transformer_cls_names_to_wrap = kept or None
