"""The training loop, from a config to an exported pipeline; `finetune` reads from top to bottom."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..backbones import family_named
from ..backbones.family import Family, Objective
from ..errors import UserError
from .align import align_layers, interrupted_state
from .checkpoints import (
    checkpoint_folder,
    checkpoints,
    disk_errors,
    load_checkpoint,
    named_ema,
    named_weights,
    on_main_process,
    prune_checkpoints,
    save_checkpoint,
    whole_folder,
    whole_tensor,
)
from .config import TrainConfig, TrainOptions, config_to_dict
from .data import Batch, BatchPlan, ImageSource, read_batches, sample_generator, sample_order
from .encoding import Encoder, check_conditions, encoded_shape, open_components
from .learning import (
    adapter_parameters,
    choose_trainable,
    export_adapters,
    has_adapters,
    make_optimizer,
    moving_average,
    update_average,
    wrap_present_classes,
)
from .metrics import MetricLog, mixing_statistics, peak_memory_gib
from .model import check_fit, load_components, load_model
from .run_folder import open_run
from .sources import open_source
from .validation import Validation


class TrainingDiverged(UserError):
    """A loss or gradient was not finite; the weights are those before that step."""


@dataclass
class RunResult:
    """What a run leaves behind."""

    output_dir: Path
    step: int  # optimiser steps done
    pipeline: Path | None  # the exported pipeline; None when the run was stopped before its last step
    metrics: dict[str, float]  # the last ones logged
    trainable_parameters: int
    stopped_by: str | None = None  # the signal that ended the run early


def finetune(config: TrainConfig, resume: str | None = None, allow_config_change: bool = False) -> RunResult:
    """Train as `config` says, in one process or in each of those that `accelerate launch` starts.

    Args:
        resume: None to start, "latest" to go on from the newest checkpoint of `config.output_dir` (or to start when it
            has none), or the folder of a checkpoint.
        allow_config_change: go on with a config or images that differ from those that the run was started with.

    Raises:
        UserError: one sentence on what cannot be done as asked, before work is lost.
    """
    options = config.train
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),  # else several processes without GPUs would not find each other
        mixed_precision=options.mixed_precision,
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    say = accelerator.print

    # The data, and the run's folder --------------------------------------------------------------------------------
    family = family_named(config.model.family)
    source, held_out = open_data(config, family)
    checkpoint = on_main_process(accelerator, lambda: open_run(config, resume, allow_config_change))
    folder = Path(config.output_dir)

    # The model, what of it learns, and what encodes the data -------------------------------------------------------
    torch.manual_seed(options.seed)
    model = load_model(config.model, len(source.class_names), say, options.align_steps)[1]
    objective = family.objective(label_dropout=options.label_dropout, **options.objective)
    objective.prepare_model(model)
    trainable_parameters = choose_trainable(family, model, options)
    say(describe(model, trainable_parameters, source))
    model.to(accelerator.device)
    pictures = config.validation.images > 0
    components = open_components(config.model, config.data, family, [source, held_out], accelerator, pictures)
    components["id2label"] = dict(enumerate(source.class_names))
    size, channels = config.data.size, config.data.channels
    check_fit(family, model, components, size, channels, encoded_shape(source), source.shapes)
    parts = (family, components, config.data)
    encoder = Encoder(*parts, source, accelerator.device, say)
    held_out_encoder = None if held_out is None else Encoder(*parts, held_out, accelerator.device, say)
    validation = Validation(config, objective, encoder, held_out_encoder, components, accelerator)

    # The alignment of new layers -----------------------------------------------------------------------------------
    aligned = options.align_steps > 0 and checkpoint is None
    if aligned:
        with stop_signals() as stop:
            how = {"resume": resume is not None, "stopping": lambda: bool(stop.received)}
            done = align_layers(config, family, model, objective, encoder, accelerator, **how)
        if not done:
            return RunResult(folder, 0, None, {}, trainable_parameters, stop.received or "a signal")

    # Where an earlier start of this run left off -------------------------------------------------------------------
    learner = Learner(model, objective, options, accelerator)
    first_step, window = 0, []
    if checkpoint is not None:
        state = learner.load(checkpoint)
        first_step, window = state["step"], state["window"]
        if state["data"] != source.fingerprint and not allow_config_change:
            raise UserError(
                f"data.train {config.data.train} has other images ({source.fingerprint}) than the run was started with "
                f"({state['data']}); restore them, choose a new output_dir, or add --allow-config-change"
            )
        say(f"going on from {checkpoint}")
    elif resume is not None:
        say(f"{folder} has no checkpoint yet: starting at step 0")
    if first_step > options.steps:
        raise UserError(f"train.steps is {options.steps}, but the run is already at step {first_step}")

    plan = BatchPlan(
        sample_order(source, options.seed, options.batch_size),
        options.batch_size,
        options.gradient_accumulation,
        accelerator.process_index,
        accelerator.num_processes,
        first_step,
        options.steps,
    )
    log = MetricLog(folder, config.logging, first_step, config_to_dict(config), accelerator.is_main_process)

    def validate(step: int, **changes: Any) -> dict[str, float]:
        videos = log.sample_folder(step) if step else None
        values, grid = validation(learner.prepared, learner.ema, plan.local_batch_size, videos, **changes)
        if step and grid is not None:
            on_main_process(accelerator, lambda: log.picture(step, grid))
        return values

    def save(step: int) -> None:
        place = folder / "checkpoints"
        learner.save(checkpoint_folder(place, step), {"step": step, "window": window, "data": source.fingerprint})
        on_main_process(
            accelerator, lambda: prune_checkpoints(place, config.checkpoint.keep_last, config.checkpoint.keep_every)
        )

    if aligned:
        save(0)
        on_main_process(accelerator, lambda: shutil.rmtree(interrupted_state(folder), ignore_errors=True))
        if held_out is not None:
            start = validate(0, images=0)
            on_main_process(accelerator, lambda: log.numbers(0, start))

    # Anything broken in sampling or validation shows now rather than after the first thousand steps.
    validate(0, images=min(2, config.validation.images), num_inference_steps=1, loss_images=1)

    # The steps -----------------------------------------------------------------------------------------------------
    batches = read_batches(source, plan, options.seed, config.data.num_workers)
    progress = tqdm(
        initial=first_step,
        total=options.steps,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15,
        disable=not (config.logging.progress and accelerator.is_main_process),
    )
    metrics: dict[str, float] = {}
    history: deque[dict[str, float]] = deque(maxlen=10)
    step, clock = first_step, (first_step, time.perf_counter())
    with (
        stop_signals() as stop,
        disk_errors(folder / "checkpoints", f"{folder} cannot be written"),
        contextlib.closing(log),
        contextlib.closing(batches),
        progress,
    ):
        while step < options.steps:
            step += 1
            try:
                sums = learner.gradients(step, batches, encoder)
            except UserError:  # images that cannot be read; several processes could not save together now
                if accelerator.num_processes == 1 and step - 1 > first_step:
                    save(step - 1)
                raise

            # Every process learns the mean losses, and whether any of them was told to stop.
            shared = torch.stack([*sums.values(), sums["loss"].new_tensor(float(bool(stop.received)))])
            *means, stopping = accelerator.reduce(shared, "mean").tolist()
            history.append(dict(zip(sums, means, strict=True)) | {"grad_norm": learner.clip_gradients()})
            if not is_finite(history[-1], accelerator.scaler is not None):
                raise TrainingDiverged(divergence(step, history, folder / "checkpoints"))
            window.append(history[-1])
            learner.update(step)
            progress.update()

            # What is seen and kept --------------------------------------------------------------------------------
            is_end = step == options.steps
            seen = validate(step) if is_end or is_due(step, config.validation.every) else {}
            if is_end or is_due(step, config.logging.every):
                seen |= {name: sum(row[name] for row in window) / len(window) for name in window[0]}
                seen |= learner.learning_rates()
                rate = (step - clock[0]) / (time.perf_counter() - clock[1])
                seen |= {"steps_per_second": rate, "images_per_second": rate * options.batch_size}
                seen |= {"memory_gib": peak_memory_gib(accelerator.device), **mixing_statistics(learner.model)}
                window, clock = [], (step, time.perf_counter())
                progress.set_postfix(loss=f"{seen['loss']:.4f}", refresh=False)
            if seen:
                metrics |= seen
                on_main_process(accelerator, lambda step=step, seen=seen: log.numbers(step, seen))
            if is_end or stopping or is_due(step, config.checkpoint.every):
                save(step)
            if stopping:
                break

    # The pipeline --------------------------------------------------------------------------------------------------
    report_cut_captions(encoder, accelerator)
    if step < options.steps:
        return RunResult(folder, step, None, metrics, trainable_parameters, stop.received or "a signal")
    pipeline = folder / "pipeline"
    if accelerator.is_main_process:  # with the parts that this run did without
        components = {**load_components(config.model, without=components), **components}
    export_pipeline(pipeline, family, learner.model, learner.ema, components, accelerator)
    say(f"pipeline written to {pipeline}")
    return RunResult(folder, step, pipeline, metrics, trainable_parameters)


# The stages ----------------------------------------------------------------------------------------------------------


def open_data(config: TrainConfig, family: Family) -> tuple[ImageSource, ImageSource | None]:
    """The training data and, where the config names them, the held-out data; they suit the family."""
    source = open_source(config.data.train, "data.train", config.data, family, flip=config.data.flip)
    held_out = None
    if config.data.validation:
        held_out = open_source(
            config.data.validation, "data.validation", config.data, family, flip=False, class_names=source.class_names
        )
    check_conditions(family, {"data.train": source, "data.validation": held_out})
    return source, held_out


def describe(model: nn.Module, trainable_parameters: int, source: ImageSource) -> str:
    """How much learns, and on what."""
    adapters = adapter_parameters(model)
    of_these = f" ({adapters:,} of them in LoRA adapters)" if adapters else ""
    classes = f" of {len(source.class_names)} classes" if source.class_names else " with captions"
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"{trainable_parameters:,} of {total:,} parameters learn{of_these}, on {len(source):,} samples{classes}"


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


def report_cut_captions(encoder: Encoder, accelerator: Accelerator) -> None:
    """Say how many of the captions that were encoded lost their end, if any."""
    counts = torch.tensor([encoder.cut, encoder.captions], dtype=torch.long, device=accelerator.device)
    cut, captions = accelerator.reduce(counts, "sum").tolist()
    if cut:
        accelerator.print(
            f"{cut:,} of {captions:,} captions were longer than the text encoder takes and lost their end"
        )


def export_pipeline(
    target: Path,
    family: Family,
    model: nn.Module,
    ema: EMAModel | None,
    components: dict[str, Any],
    accelerator: Accelerator,
) -> None:
    """Write `target` as a diffusers pipeline with the moving-average weights; every process must call it.

    LoRA adapters are merged into the weights; they themselves are in a folder beside it, TARGET_lora.
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
                    export_adapters(exported, family.pipeline_class(), folder)
            with whole_folder(target) as folder:
                family.build_pipeline(exported.eval(), components).save_pretrained(folder)

    on_main_process(accelerator, write)


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


def is_finite(values: dict[str, float], scaled: bool) -> bool:
    """Whether a step may be taken; with a gradient scaler an overflowing gradient is routine and skips the step."""
    return all(math.isfinite(value) for name, value in values.items() if not (scaled and name == "grad_norm"))


def divergence(step: int, history: deque[dict[str, float]], folder: Path) -> str:
    """The sentence that ends a run whose loss or gradient is not finite."""
    losses = ", ".join(f"{row['loss']:.4g}" for row in history)
    norms = ", ".join(f"{row['grad_norm']:.4g}" for row in history)
    kept = checkpoints(folder)
    return (
        f"training stopped at step {step} because the loss or the gradient is not finite: the last losses are {losses} "
        f"and the last gradient norms {norms}; the last good checkpoint is {kept[-1] if kept else 'none'} "
        "(a lower train.lr, a longer train.warmup_steps or train.mixed_precision=no may help)"
    )


class _Stop:
    received: str | None = None


@contextlib.contextmanager
def stop_signals() -> Iterator[_Stop]:
    """Turn SIGTERM (a cluster's warning) and the first Ctrl-C into a note to stop after the current step."""
    stop = _Stop()

    def note(number: int, frame: FrameType | None) -> None:
        if stop.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.received = signal.Signals(number).name

    if threading.current_thread() is not threading.main_thread():  # only the main thread can be told
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
