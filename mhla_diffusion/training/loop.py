"""The training loop, from a config to an exported pipeline; `finetune` reads from top to bottom."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..backbones import family_named
from ..backbones.family import Family
from ..errors import UserError
from .align import align_layers
from .buckets import check_family, describe_shapes
from .checkpoints import checkpoint_folder, checkpoints, disk_errors, on_main_process, prune_checkpoints, read_state
from .config import TrainConfig, config_to_dict
from .data import ImageSource, read_batches
from .encoding import Encoder, check_conditions, check_labels, encoded_shape, open_components
from .export import export_pipeline
from .learner import Learner
from .learning import adapter_parameters, choose_trainable
from .metrics import MetricLog, mixing_statistics, peak_memory_gib
from .model import check_fit, load_components, load_model, make_objective
from .run_folder import interrupted_state, open_run
from .sources import open_source
from .stage import agreed, batch_plan, check_same_data, join_processes, progress_bar, stop_signals
from .streams import UNKNOWN
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
    accelerator = join_processes(options.mixed_precision)
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
    objective = make_objective(family, options)
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
        if not allow_config_change:  # first, because other classes do not fit the weights
            check_same_data(config, source, read_state(checkpoint).get("data"), "add --allow-config-change")
        state = learner.load(checkpoint)
        first_step, window = state["step"], state["window"]
        say(f"going on from {checkpoint}")
    elif resume is not None:
        say(f"{folder} has no checkpoint yet: starting at step 0")
    if first_step > options.steps:
        raise UserError(f"train.steps is {options.steps}, but the run is already at step {first_step}")

    plan = batch_plan(source, options, accelerator, options.seed, first_step, options.steps)
    unwritable = (folder / "checkpoints", f"{folder} cannot be written")
    with disk_errors(*unwritable):
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
    progress = progress_bar(config, accelerator, first_step, options.steps)
    metrics: dict[str, float] = {}
    history: deque[dict[str, float]] = deque(maxlen=10)
    step, clock = first_step, (first_step, time.perf_counter())
    with (
        stop_signals() as stop,
        disk_errors(*unwritable),
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
            means, stopping = agreed(accelerator, sums, bool(stop.received))
            history.append(means | {"grad_norm": learner.clip_gradients()})
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
    """The training data and, where the config names them, the held-out data; they suit the family and the grid."""
    check_family(config.data, family)
    source = open_source(config.data.train, "data.train", config.data, family, flip=config.data.flip)
    held_out = None
    if config.data.validation:
        held_out = open_source(
            config.data.validation, "data.validation", config.data, family, flip=False, class_names=source.class_names
        )
    check_conditions(family, {"data.train": source, "data.validation": held_out})
    check_labels(config.validation.labels, source.class_names)
    return source, held_out


def describe(model: nn.Module, trainable_parameters: int, source: ImageSource) -> str:
    """How much learns, and on what."""
    adapters = adapter_parameters(model)
    of_these = f" ({adapters:,} of them in LoRA adapters)" if adapters else ""
    classes = f" of {len(source.class_names)} classes" if source.class_names else " with captions"
    shapes = describe_shapes(source)
    total = sum(parameter.numel() for parameter in model.parameters())
    samples = "a stream of samples" if len(source) == UNKNOWN else f"{len(source):,} samples"
    return (
        f"{trainable_parameters:,} of {total:,} parameters learn{of_these}, on {samples}{classes}"
        f"{f' ({shapes})' if shapes else ''}"
    )


def report_cut_captions(encoder: Encoder, accelerator: Accelerator) -> None:
    """Say how many of the captions that were encoded lost their end, if any."""
    counts = torch.tensor([encoder.cut, encoder.captions], dtype=torch.long, device=accelerator.device)
    cut, captions = accelerator.reduce(counts, "sum").tolist()
    if cut:
        accelerator.print(
            f"{cut:,} of {captions:,} captions were longer than the text encoder takes and lost their end"
        )


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
