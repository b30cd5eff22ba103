"""A model in training: what takes the gradients of a step, and the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch import Tensor, nn

from ..backbones.family import Objective
from ..randomness import sample_generator
from .checkpoints import load_checkpoint, save_checkpoint, whole_tensor
from .config import TrainOptions
from .data import Batch
from .encoding import Encoder
from .learning import make_optimizer, moving_average, update_average, wrap_present_classes


class Learner:
    """A model in training on this process: its gradients, optimiser, learning rates and moving average."""

    def __init__(self, model: nn.Module, objective: Objective, options: TrainOptions, accelerator: Accelerator) -> None:
        self.objective, self.options, self.accelerator = objective, options, accelerator
        if options.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        if options.compile:
            model.compile()
        wrap_present_classes(accelerator, model)
        adam = make_optimizer(model, options, accelerator)
        self.prepared, self.optimizer = accelerator.prepare(model.train(), adam)
        self.model, self.adam = accelerator.unwrap_model(self.prepared), self.optimizer.optimizer
        self.rates = [group["lr"] for group in self.adam.param_groups]
        self.rate_factor = get_scheduler(
            options.schedule if options.schedule != "constant" else "constant_with_warmup",
            self.adam,
            num_warmup_steps=options.warmup_steps,
            num_training_steps=options.steps,
        ).lr_lambdas[0]
        self.ema = moving_average(self.model, options)

    def gradients(self, step: int, batches: Iterator[Batch], encoder: Encoder) -> dict[str, Tensor]:
        """Add up the gradients of one step over its accumulation rounds; this process's mean losses by name."""
        options, accelerator = self.options, self.accelerator
        # What draws from the global generator (dropout layers) must not depend on where a run was cut.
        torch.manual_seed(sample_generator(options.seed, "step", step, accelerator.process_index).initial_seed())
        sums: dict[str, Tensor] = {}
        for part in range(options.gradient_accumulation):
            inputs = encoder.inputs(next(batches), self.model, self.objective, options.seed)
            is_last = part == options.gradient_accumulation - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(self.prepared):
                losses = {name: values.mean() for name, values in self.objective.loss(self.prepared, inputs).items()}
                accelerator.backward(losses["loss"] / options.gradient_accumulation)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0) + value.detach().float() / options.gradient_accumulation
        return sums

    def clip_gradients(self) -> float:
        """Scale the gradients down to `train.max_grad_norm`; the norm that they had, over all processes."""
        learning = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return whole_tensor(self.accelerator.clip_grad_norm_(learning, self.options.max_grad_norm or math.inf)).item()

    def update(self, step: int) -> None:
        """Take step number `step` (the first is 1) with the gradients that are there."""
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.rate_factor(step - 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if hasattr(self.model, "clip_mixing_"):
            self.model.clip_mixing_()
        if self.ema is not None:
            update_average(self.ema, self.model)

    def learning_rates(self) -> dict[str, float]:
        """The last step's, by group."""
        return {f"lr/{group['name']}": group["lr"] for group in self.adam.param_groups}

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint; every process must call it."""
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        state = {**state, "processes": self.accelerator.num_processes, "scaler": scaler}
        save_checkpoint(folder, self.accelerator, self.model, self.adam, self.ema, state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Go back to a checkpoint; its `state.json`."""
        state = load_checkpoint(folder, self.model, self.adam, self.ema)
        if self.accelerator.scaler is not None and state["scaler"]:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        return state
