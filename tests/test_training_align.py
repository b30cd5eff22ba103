"""The alignment stage: what it fits, what it leaves alone, what it keeps in memory, and that it can be cut anywhere."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref

import pytest
import sana_components
import torch
import torch.nn.functional as F
import wan_models
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from training_runs import TINY, make_images, same_tensors, start_script

from mhla_diffusion import MHLAConfig, apply_mhla
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import align, config_from_dict, config_to_yaml, finetune, read_metrics
from mhla_diffusion.training.align import fitting, mhla_layers, rate_factor, relative_error, teacher_of

DIT = family_named("dit")
SIZES = TINY["model"]["overrides"]


def softmax_model(seed: int = 0, **changes) -> torch.nn.Module:
    """A small stock DiT of 3 classes with attention that is neither uniform nor a choice of one token."""
    torch.manual_seed(seed)
    model = DIT.build_model(None, None, num_embeds_ada_norm=3, **{**SIZES, **changes})
    DIT.objective().prepare_model(model)
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.attn1.to_q.weight.mul_(2)
            block.attn1.to_k.weight.mul_(2)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with `images` and a softmax pipeline, `teacher`."""
    folder = tmp_path_factory.mktemp("align")
    make_images(folder / "images")
    DIT.build_pipeline(softmax_model(), {}).save_pretrained(folder / "teacher")
    return folder


def aligned_config(place, run, **changes):
    model = {"pretrained": str(place / "teacher"), "mhla": {"feature_map": "hedgehog"}, "overrides": {}}
    tiny = {**TINY, "model": {**TINY["model"], "overrides": {}}}
    layer = {"output_dir": str(run), "data": {"train": str(place / "images"), "validation": str(place / "images")}}
    train = {"align_steps": 12, "align_lr": 1e-2, "steps": 2}
    return config_from_dict(tiny, layer, {"model": model, "train": train}, changes)


def align_rows(run):
    """The lines of the alignment stage, without what the clock says."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "align/loss" in row]
    return [{k: v for k, v in row.items() if "second" not in k and "memory" not in k} for row in rows]


def losses_of_training(run):
    return [(row["step"], row["loss"]) for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def weights_after(run, step=0):
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def retrofitted(config: MHLAConfig, **changes):
    """A retrofitted model of which only the attention learns, its layers and their teachers."""
    model = apply_mhla(softmax_model(**changes), config).requires_grad_(False).eval()
    layers = mhla_layers(DIT, model)
    for attn in layers.values():
        attn.requires_grad_(True)
    return model, layers, {name: teacher_of(attn, DIT) for name, attn in layers.items()}


INPUTS = {"timestep": torch.tensor([10, 500, 900]), "class_labels": torch.tensor([0, 1, 2])}
FIELDS = MHLAConfig(blocks=(2, 2), feature_map="hedgehog", cpe=True, gate=True)
silent = pytest.mark.filterwarnings("ignore:this model was trained with softmax")


def noisy():
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


# What is fitted ------------------------------------------------------------------------------------------------------


def test_the_error_of_every_layer_falls_and_steps_count_up_to_zero(place, tmp_path):
    finetune(aligned_config(place, tmp_path / "run", train={"align_steps": 40}))
    rows = align_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(-39, 1))
    for name in ("align/layer_00", "align/layer_01", "align/loss"):
        assert rows[-1][name] < 0.5 * rows[0][name]
    assert rows[-1]["align/loss"] == pytest.approx((rows[-1]["align/layer_00"] + rows[-1]["align/layer_01"]) / 2)
    assert [step for step, _ in losses_of_training(tmp_path / "run")] == [1, 2]
    validated = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "validation/loss" in row]
    assert [row["step"] for row in validated] == [0, 2]


@pytest.mark.parametrize(("trainable", "part"), [("all", ".attn1."), ("attention", ".attn1."), ("mhla", ".processor.")])
def test_nothing_but_what_should_learn_of_the_new_layers_changes(place, tmp_path, trainable, part):
    finetune(aligned_config(place, tmp_path / "run", train={"trainable": trainable}))
    before = load_file(place / "teacher" / "transformer" / "diffusion_pytorch_model.safetensors")
    after = weights_after(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if part in name}
    mixing = [weight for name, weight in after.items() if ".mixing." in name]
    assert all((weight >= 0).all() and (weight <= 1).all() for weight in mixing)


@silent
def test_the_model_computes_what_it_did_before_the_retrofit_however_far_the_layers_have_moved():
    expected = softmax_model()(noisy(), **INPUTS).sample
    model, layers, teachers = retrofitted(FIELDS)
    with torch.no_grad():
        for attn in layers.values():
            for parameter in attn.parameters():
                parameter.add_(1.0)
    with fitting(layers, teachers, lambda *_: None):
        assert torch.equal(model(noisy(), **INPUTS).sample, expected)
    assert not torch.allclose(model(noisy(), **INPUTS).sample, expected)


@silent
def test_gradients_equal_those_of_every_layer_computed_by_itself():
    stock, seen = softmax_model().eval(), {}
    for i, block in enumerate(stock.transformer_blocks):
        block.attn1.register_forward_hook(
            lambda attn, args, output, i=i: seen.update({i: (args[0].detach(), output.detach())})
        )
    stock(noisy(), **INPUTS)

    model, layers, teachers = retrofitted(FIELDS)
    with fitting(layers, teachers, lambda name, output, target: relative_error(output, target).mean().backward()):
        model(noisy(), **INPUTS)
    for i, attn in enumerate(layers.values()):
        hidden_states, target = seen[i]
        output = attn(hidden_states)
        pairs = zip(output, target, strict=True)
        error = sum(F.mse_loss(o, t, reduction="sum") / t.square().sum() for o, t in pairs) / 3
        expected = torch.autograd.grad(error, list(attn.parameters()))
        for parameter, gradient in zip(attn.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    outside = [p for name, p in model.named_parameters() if ".attn1." not in name]
    assert all(parameter.grad is None for parameter in outside)


@silent
def test_no_more_than_one_layer_is_kept_for_a_backward_pass():
    model, layers, teachers = retrofitted(FIELDS, num_layers=4)
    packed, per_layer = [], []

    def fit(name, output, target):
        assert output.requires_grad and not target.requires_grad
        relative_error(output, target).mean().backward()
        per_layer.append(len(packed))

    def pack(tensor):
        packed.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fitting(layers, teachers, fit):
        result = model(noisy(), **INPUTS).sample
    assert not result.requires_grad
    assert len(per_layer) == 4 and per_layer[-1] == len(packed)  # what comes after the last layer saves nothing
    counts = [after - before for before, after in zip([0, *per_layer], per_layer, strict=False)]
    assert len(set(counts)) == 1


@silent
def test_a_layer_is_gone_when_the_next_one_begins():
    model, layers, teachers = retrofitted(FIELDS, num_layers=4)
    graphs = []

    def fit(name, output, target):
        gc.collect()
        assert all(graph() is None for graph in graphs)
        loss = relative_error(output, target).mean()
        graphs.append(weakref.ref(output))
        loss.backward()

    with fitting(layers, teachers, fit):
        model(noisy(), **INPUTS)
    assert len(graphs) == 4


def test_uniform_softmax_attention_is_found_by_the_mixing(place, tmp_path):
    model = softmax_model()
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.attn1.to_q.weight.zero_()
            block.attn1.to_q.bias.zero_()
    DIT.build_pipeline(model, {}).save_pretrained(tmp_path / "uniform")
    changes = {"pretrained": str(tmp_path / "uniform"), "mhla": {"cpe": False}}
    options = {"align_steps": 200, "align_lr": 2e-2, "trainable": "mhla"}
    finetune(aligned_config(place, tmp_path / "run", model=changes, train=options))
    rows = align_rows(tmp_path / "run")
    assert rows[0]["align/loss"] > 0.01 and rows[-1]["align/loss"] < 1e-4
    mixing = weights_after(tmp_path / "run")["transformer_blocks.0.attn1.processor.mixing.weights.0"]
    rows = mixing / mixing.sum(1, keepdim=True)
    torch.testing.assert_close(rows, torch.full_like(rows, 1 / 4), atol=0.02, rtol=0)


def test_the_rate_is_ten_times_that_of_fine_tuning_unless_it_is_given(place, tmp_path):
    finetune(aligned_config(place, tmp_path / "given"))
    finetune(aligned_config(place, tmp_path / "not", train={"align_lr": None, "lr": 2e-3}))
    assert align_rows(tmp_path / "given")[0]["align/lr"] == pytest.approx(1e-2)
    assert align_rows(tmp_path / "not")[0]["align/lr"] == pytest.approx(2e-2)


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_to_almost_nothing():
    rates = [rate_factor(step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(0 < later < earlier for earlier, later in zip(rates[9:], rates[10:], strict=False))
    assert rates[-1] < 1e-3 and rate_factor(1, 1) == 1


# The run -------------------------------------------------------------------------------------------------------------


def test_accumulation_gives_the_losses_of_whole_batches(place, tmp_path):
    finetune(aligned_config(place, tmp_path / "whole"))
    finetune(aligned_config(place, tmp_path / "parts", train={"gradient_accumulation": 4}))
    for whole, parts in zip(align_rows(tmp_path / "whole"), align_rows(tmp_path / "parts"), strict=True):
        assert parts == pytest.approx(whole, rel=1e-3)


class Cut(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("every", [0, 4], ids=["from the start", "from a saved state"])
def test_a_stage_that_was_cut_and_resumed_equals_one_that_was_not(place, tmp_path, monkeypatch, every):
    changes = {"checkpoint": {"every": every}, "logging": {"every": 3}}
    finetune(aligned_config(place, tmp_path / "whole", **changes))

    calls, error = [], align.relative_error

    def cut(output, target):
        calls.append(1)
        if len(calls) > 2 * 9:
            raise Cut
        return error(output, target)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(align, "relative_error", cut)
        finetune(aligned_config(place, tmp_path / "cut", **changes))
    assert (tmp_path / "cut" / "checkpoints" / "alignment").is_dir() == bool(every)
    finetune(aligned_config(place, tmp_path / "cut", **changes), resume="latest")
    assert align_rows(tmp_path / "cut") == align_rows(tmp_path / "whole")
    assert losses_of_training(tmp_path / "cut") == losses_of_training(tmp_path / "whole")
    for step in (0, 2):
        for name in ("model", "ema", "optimizer"):
            file = f"checkpoints/step-{step:08d}/{name}.safetensors"
            assert same_tensors(tmp_path / "cut" / file, tmp_path / "whole" / file)
    assert not (tmp_path / "cut" / "checkpoints" / "alignment").exists()


def finetune_until_told(config, monkeypatch, steps):
    """The run, told by a signal to stop during a step of the alignment."""
    calls, error = [], align.relative_error

    def note(output, target):
        calls.append(1)
        if len(calls) == 2 * steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return error(output, target)

    with monkeypatch.context() as patch:
        patch.setattr(align, "relative_error", note)
        return finetune(config)


def test_a_run_without_resume_does_not_overwrite_a_stage_that_was_begun(place, tmp_path, monkeypatch):
    config = aligned_config(place, tmp_path / "run")
    finetune_until_told(config, monkeypatch, steps=5)
    state = tmp_path / "run" / "checkpoints" / "alignment" / "model.safetensors"
    before = state.read_bytes()
    with pytest.raises(UserError, match="already holds this run, in its alignment; continue it with --resume latest"):
        finetune(config)
    assert state.read_bytes() == before


def test_a_signal_saves_the_stage_and_ends_the_run(place, tmp_path, monkeypatch):
    finetune(aligned_config(place, tmp_path / "whole"))
    config = aligned_config(place, tmp_path / "run")
    result = finetune_until_told(config, monkeypatch, steps=5)
    assert result.stopped_by == "SIGTERM" and result.step == 0 and result.pipeline is None
    assert [row["step"] for row in align_rows(tmp_path / "run")] == [-11, -10, -9, -8, -7]

    assert finetune(config, resume="latest").step == 2
    assert align_rows(tmp_path / "run") == align_rows(tmp_path / "whole")
    assert losses_of_training(tmp_path / "run") == losses_of_training(tmp_path / "whole")
    monkeypatch.delattr(align, "relative_error")  # a stage that was done is not done again
    config.train.steps = 3
    assert finetune(config, resume="latest").step == 3


def test_two_processes_give_the_alignment_of_one(place, tmp_path):
    finetune(aligned_config(place, tmp_path / "one"))
    (tmp_path / "two.yaml").write_text(config_to_yaml(aligned_config(place, tmp_path / "two")))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0",
                "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")  # fmt: skip
    run = start_script(tmp_path / "two.yaml", launcher=launcher)
    _, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    for one, two in zip(align_rows(tmp_path / "one"), align_rows(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-3)


@pytest.fixture
def precision_can_change():
    """accelerate keeps one precision per process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_half_precision_aligns_too(place, tmp_path, precision_can_change):
    finetune(aligned_config(place, tmp_path / "run", train={"mixed_precision": "bf16", "align_steps": 30}))
    rows = align_rows(tmp_path / "run")
    assert rows[-1]["align/loss"] < 0.6 * rows[0]["align/loss"]


# Other families ------------------------------------------------------------------------------------------------------


@silent
def test_rotary_arguments_and_grids_pass_through():
    wan, stock = family_named("wan"), wan_models.stock_transformer()
    inputs = wan_models.inputs((3, 2, 4))
    expected = stock(**inputs).sample
    model = apply_mhla(stock, MHLAConfig(**wan_models.PUBLISHED)).requires_grad_(False)
    layers = mhla_layers(wan, model)
    for attn in layers.values():
        attn.requires_grad_(True)
    teachers = {name: teacher_of(attn, wan) for name, attn in layers.items()}
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    errors = []

    def fit(name, output, target):
        loss = relative_error(output, target).mean()
        loss.backward()
        errors[-1][name] = loss.item()

    for _ in range(20):
        errors.append({})
        with fitting(layers, teachers, fit):
            torch.testing.assert_close(model(**inputs).sample, expected, rtol=0, atol=0)
        adam.step()
        adam.zero_grad()
        model.clip_mixing_()
    assert list(errors[0]) == ["layer_00", "layer_01", "layer_02"]
    assert all(errors[-1][name] < 0.7 * errors[0][name] for name in layers)


@silent
def test_linear_attention_is_matched_at_once_where_the_retrofit_changes_nothing():
    sana, stock = family_named("sana"), sana_components.small_transformer()
    inputs = sana_components.transformer_inputs(8, 8)
    model = apply_mhla(stock, MHLAConfig(blocks=(2, 2), locality=0.0)).requires_grad_(False)
    layers = mhla_layers(sana, model)
    teachers, errors = {name: teacher_of(attn, sana) for name, attn in layers.items()}, []
    with fitting(layers, teachers, lambda name, *outputs: errors.append(relative_error(*outputs).max().item())):
        model(**inputs)
    assert len(errors) == len(layers) and max(errors) < 1e-9


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention": "softmax", "mhla": {}}, "train.align_steps is 12, but model.attention is 'softmax'"),
        ({"pretrained": None, "overrides": SIZES}, "train.align_steps is 12, but model.pretrained is not set"),
    ],
    ids=["softmax", "not pretrained"],
)
def test_a_model_without_replaced_layers_is_refused(place, tmp_path, changes, sentence):
    config = aligned_config(place, tmp_path / "run", model=changes)
    config.model.mhla = changes.get("mhla", config.model.mhla)
    with pytest.raises(UserError, match=sentence):
        finetune(config)


def test_a_model_that_already_has_mhla_is_refused(place, tmp_path):
    result = finetune(aligned_config(place, tmp_path / "first", train={"align_steps": 0}))
    with pytest.raises(UserError, match="train.align_steps is 12, but .* already has MHLA attention"):
        finetune(aligned_config(place, tmp_path / "second", model={"pretrained": str(result.pipeline)}))


def test_a_loss_that_is_not_finite_ends_the_stage_with_a_sentence(place, tmp_path):
    with pytest.raises(UserError, match="alignment stopped at step .* is not finite; a lower train.align_lr"):
        finetune(aligned_config(place, tmp_path / "run", train={"align_lr": 1e30, "max_grad_norm": 0}))
