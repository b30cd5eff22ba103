"""Runs in processes of their own: killed, warned, and several at once."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from diffusers import DiffusionPipeline
from training_runs import losses, same_tensors, start_script, tiny_config

from mhla_diffusion.errors import UserError
from mhla_diffusion.training import TrainConfig, config_to_yaml, finetune
from mhla_diffusion.training.checkpoints import checkpoints, read_state, sweep
from mhla_diffusion.training.stage import join_processes

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["mhla_diffusion.training", "torchvision"])


def train_in_child(config, log: Path) -> None:
    """What a killed child does: go on with the run, its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    torch.set_num_threads(1)
    finetune(config, resume="latest")


def kill_at_random(configs: Iterator[TrainConfig], log: Path, random_number: random.Random, kills: int) -> list[Path]:
    """Start runs and kill living ones `kills` times after random times; a run that ends is followed by the next.

    Returns the folders of all runs, the last one unfinished.
    """
    config, hit, longest = next(configs), 0, 2.0
    folders = [Path(config.output_dir)]
    while hit < kills:
        child = FORKS.Process(target=train_in_child, args=(config, log))
        child.start()
        child.join(timeout=random_number.uniform(0, longest))
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL), log.read_text()[-2000:]
        for checkpoint in checkpoints(folders[-1] / "checkpoints"):
            assert sorted(p.name for p in checkpoint.iterdir()) == [
                "ema.safetensors", "model.safetensors", "optimizer.safetensors", "state.json",
            ]  # fmt: skip
        if child.exitcode:
            hit, longest = hit + 1, min(6.0, longest * 1.3)
        else:
            config, longest = next(configs), max(1.0, longest * 0.7)
            folders.append(Path(config.output_dir))
    return folders


def test_fifty_kills_at_random_moments_leave_runs_that_end_as_if_nothing_had_happened(tmp_path):
    changes = {"train": {"steps": 40}, "checkpoint": {"every": 1, "keep_last": 2}, "validation": {"every": 10}}
    configs = (tiny_config(tmp_path, f"killed-{number}", **changes) for number in itertools.count())
    folders = kill_at_random(configs, tmp_path / "log", random.Random(0), kills=50)
    finetune(tiny_config(tmp_path, folders[-1].name, **changes), resume="latest")
    finetune(tiny_config(tmp_path, "whole", **changes))
    for folder in folders:
        assert losses(folder) == losses(tmp_path / "whole")
        for file in ("checkpoints/step-00000040/model.safetensors", "checkpoints/step-00000040/optimizer.safetensors",
                     "pipeline/transformer/diffusion_pytorch_model.safetensors"):  # fmt: skip
            assert same_tensors(folder / file, tmp_path / "whole" / file)
    assert DiffusionPipeline.from_pretrained(folders[0] / "pipeline")(class_labels=[1], num_inference_steps=1)


def test_a_replacement_that_was_cut_between_its_two_renames_is_undone(tmp_path):
    (tmp_path / ".tmp-old-pipeline").mkdir()
    (tmp_path / ".tmp-old-pipeline" / "model_index.json").touch()
    (tmp_path / ".tmp-pipeline").mkdir()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline"]
    assert (tmp_path / "pipeline" / "model_index.json").exists()


def wait_for(condition, process, seconds=120):
    """Wait until `condition()`; fail when the process ends first or it takes too long."""
    start = time.monotonic()
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - start < seconds, "took too long"
        time.sleep(0.02)


def test_sigterm_saves_the_step_ends_cleanly_and_the_run_goes_on_from_there(tmp_path):
    changes = {"train": {"steps": 2000}, "checkpoint": {"every": 0}, "data": {"num_workers": 1}}
    config = tiny_config(tmp_path, **changes, validation={"every": 0})
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config))
    run = start_script(tmp_path / "recipe.yaml")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, run)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    (saved,) = checkpoints(tmp_path / "run" / "checkpoints")
    step = read_state(saved)["step"]
    assert f"stopped by SIGTERM and saved at step {step}; --resume latest goes on" in out
    assert losses(tmp_path / "run")[-1][0] == step < 2000
    shorter = tiny_config(tmp_path, train={"steps": 2000}, validation={"every": 0})
    shorter.train.steps = step + 2
    with pytest.raises(UserError, match="already holds this run"):
        finetune(shorter)
    assert finetune(shorter, resume="latest").step == step + 2


def kill_with_children(process):
    """Kill a launcher and the training processes and readers that it started, which live in sessions of their own."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    process.communicate()
    psutil.wait_procs(family, timeout=30)


TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv_backend=c10d",
       "--rdzv_endpoint=localhost:0")  # fmt: skip


def test_two_processes_give_the_losses_of_one_also_after_a_kill(tmp_path):
    changes = {"train": {"gradient_accumulation": 2}, "data": {"num_workers": 1}}
    finetune(tiny_config(tmp_path, "one", **changes))
    for name in ("two", "killed"):
        (tmp_path / f"{name}.yaml").write_text(config_to_yaml(tiny_config(tmp_path, name, **changes)))
    two = start_script(tmp_path / "two.yaml", launcher=TWO)
    _, err = two.communicate(timeout=300)
    assert two.returncode == 0, err
    assert json.loads((tmp_path / "two" / "checkpoints" / "step-00000006" / "state.json").read_text())["processes"] == 2
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(
        losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True
    ):
        assert step == same_step
        assert same_loss == pytest.approx(loss, rel=1e-5)
        assert same_norm == pytest.approx(norm, rel=1e-4)

    killed = start_script(tmp_path / "killed.yaml", launcher=TWO)
    wait_for(lambda: checkpoints(tmp_path / "killed" / "checkpoints"), killed)
    kill_with_children(killed)
    assert not (tmp_path / "killed" / "pipeline").exists()
    resumed = start_script(tmp_path / "killed.yaml", "--resume", "latest", launcher=TWO)
    _, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert losses(tmp_path / "killed") == losses(tmp_path / "two")
    last = "checkpoints/step-00000006/{}.safetensors"
    for name in ("model", "ema", "optimizer"):
        assert same_tensors(tmp_path / "killed" / last.format(name), tmp_path / "two" / last.format(name))


def test_processes_wait_for_a_slow_one_as_long_as_it_takes():
    assert join_processes().init_handler.timeout >= timedelta(days=1)
