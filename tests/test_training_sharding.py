"""Weights split over two processes by torch's fully_shard: what clipping, averaging, saving and export must survive."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
import yaml
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import CombinedTimestepLabelEmbeddings
from dit_models import small_dit
from safetensors.torch import load_file
from sana_components import small_transformer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training_runs import TINY
from wan_models import stock_transformer

from mhla_diffusion.backbones import family_named
from mhla_diffusion.training.checkpoints import load_checkpoint, save_checkpoint
from mhla_diffusion.training.config import TrainOptions
from mhla_diffusion.training.export import export_pipeline
from mhla_diffusion.training.learning import (
    moving_average,
    parameter_groups,
    update_average,
    wrap_present_classes,
)
from mhla_diffusion.training.metrics import mixing_statistics
from mhla_diffusion.training.validation import averaged_weights

OPTIONS = TrainOptions(lr=1e-3, mixing_lr=3.0, ema_decay=0.5)


def build(sharded: bool):
    torch.manual_seed(0)
    family = family_named("dit")
    model = family.build_model(None, TINY["model"]["mhla"], num_embeds_ada_norm=3, **TINY["model"]["overrides"])
    family.objective().prepare_model(model)
    if sharded:
        for module in reversed(list(model.modules())):  # as configs/accelerate/fsdp2.yaml asks for
            if isinstance(module, (BasicTransformerBlock, CombinedTimestepLabelEmbeddings)):
                fully_shard(module)
        fully_shard(model)
    adam = torch.optim.AdamW(parameter_groups(model, OPTIONS))
    return family, model, adam, moving_average(model, OPTIONS)


def train(family, model, adam, ema, steps, rank=0, num_processes=1):
    """A few steps on fixed noise, as the loop takes them; returns the losses of all samples."""
    objective = family.objective()
    losses = []
    for step in steps:
        torch.manual_seed(step)
        images = torch.randn(4, 1, 8, 8)
        generators = [torch.Generator().manual_seed(100 * step + i) for i in range(4)]
        mine = slice(rank * 4 // num_processes, (rank + 1) * 4 // num_processes)
        labels = torch.tensor([0, 1, 2, 0])[mine]
        inputs = objective.prepare(model, images[mine], {"class_labels": labels}, generators[mine])
        loss = objective.loss(model, inputs)["loss"].mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        model.clip_mixing_()
        update_average(ema, model)
        losses.append(loss.item())
    return losses


def sharded_process(rank: int, port: int, folder: str) -> None:
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    family, model, adam, ema = build(sharded=True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train(family, model, adam, ema, range(2), rank, 2)
    save_checkpoint(Path(folder) / "checkpoints" / "step-00000002", accelerator, model, adam, ema, {"step": 2})

    family, model, adam, ema = build(sharded=True)
    load_checkpoint(Path(folder) / "checkpoints" / "step-00000002", model, adam, ema)
    train(family, model, adam, ema, range(2, 4), rank, 2)
    save_checkpoint(Path(folder) / "checkpoints" / "step-00000004", accelerator, model, adam, ema, {"step": 4})
    statistics = mixing_statistics(model)
    assert statistics["mixing/min"] >= 0 and statistics["mixing/max"] <= 1 and statistics["mixing/share_zero"] > 0
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    with averaged_weights(model, ema):
        model(torch.zeros(1, 1, 8, 8), timestep=torch.tensor([3]), class_labels=torch.tensor([1]))
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True))
    export_pipeline(Path(folder) / "pipeline", family, model, ema, {}, accelerator)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharded_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(sharded_process, (port, str(folder)), nprocs=2)
    return folder


def test_sharded_training_with_a_resume_equals_training_in_one_process(sharded_run):
    family, model, adam, ema = build(sharded=False)
    train(family, model, adam, ema, range(4))
    saved = load_file(sharded_run / "checkpoints" / "step-00000004" / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-3, atol=2e-5)
    averaged = load_file(sharded_run / "checkpoints" / "step-00000004" / "ema.safetensors")
    for (name, _), parameter in zip(model.named_parameters(), ema.shadow_params, strict=True):
        torch.testing.assert_close(averaged[name], parameter, rtol=1e-3, atol=2e-5)


def test_a_sharded_checkpoint_opens_in_one_process(sharded_run):
    _, model, adam, ema = build(sharded=False)
    state = load_checkpoint(sharded_run / "checkpoints" / "step-00000004", model, adam, ema)
    assert state["step"] == 4
    saved = load_file(sharded_run / "checkpoints" / "step-00000004" / "model.safetensors")
    assert all(torch.equal(saved[name], parameter) for name, parameter in model.named_parameters())
    assert len(adam.state) == sum(1 for _ in model.parameters())


def test_the_pipeline_of_a_sharded_run_holds_whole_averaged_weights(sharded_run):
    pipeline = DiffusionPipeline.from_pretrained(sharded_run / "pipeline")
    averaged = load_file(sharded_run / "checkpoints" / "step-00000004" / "ema.safetensors")
    assert all(torch.equal(averaged[name], p) for name, p in pipeline.transformer.named_parameters())


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("dit", {"BasicTransformerBlock", "CombinedTimestepLabelEmbeddings"}),
        ("sana", {"SanaTransformerBlock"}),
        ("wan", {"WanTransformerBlock"}),
    ],
)
def test_one_accelerate_config_names_the_layers_of_every_family(family, names):
    recipe = Path(__file__).resolve().parent.parent / "configs" / "accelerate" / "fsdp2.yaml"
    wrapped = yaml.safe_load(recipe.read_text())["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"].split(",")
    plugin = SimpleNamespace(transformer_cls_names_to_wrap=wrapped)
    model = {"dit": small_dit, "sana": small_transformer, "wan": stock_transformer}[family]()
    wrap_present_classes(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    assert set(plugin.transformer_cls_names_to_wrap) == names
