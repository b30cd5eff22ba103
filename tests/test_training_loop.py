"""The training loop: what a run computes, that it can be cut anywhere, and what it says when it cannot go on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
from training_runs import losses, make_images, same_tensors, tiny_config

from mhla_diffusion.backbones.dit import DiTObjective
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import TrainingDiverged, finetune, held_out_loss, read_metrics
from mhla_diffusion.training.checkpoints import checkpoints


class Cut(Exception):
    """Stands for whatever ends a process."""


@contextlib.contextmanager
def cut_before_step(monkeypatch, step, accumulation=1):
    """Let the objective raise in the forward pass of a step, as if the process had ended there."""
    calls, whole = [], DiTObjective.loss

    def loss(self, model, inputs):
        if model.training:
            calls.append(1)
        if len(calls) > (step - 1) * accumulation:
            raise Cut
        return whole(self, model, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(DiTObjective, "loss", loss)
        yield


def test_a_run_leaves_everything_a_person_looks_for(tmp_path):
    result = finetune(tiny_config(tmp_path))
    run = tmp_path / "run"
    assert result.step == 6 and result.stopped_by is None
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert {
        "loss",
        "mse",
        "vb",
        "validation/loss",
        "lr/weights",
        "lr/mixing",
        "grad_norm",
        "steps_per_second",
    } <= last.keys()
    assert {"images_per_second", "memory_gib", "mixing/min", "mixing/max"} <= last.keys()
    assert [path.name for path in sorted((run / "samples").iterdir())] == ["step-00000003.png", "step-00000006.png"]
    assert Image.open(run / "samples" / "step-00000003.png").size == (16, 8)
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert starts[0]["versions"]["torch"] == torch.__version__
    assert not list(run.rglob(".tmp-*"))


def test_the_exported_pipeline_holds_the_averaged_weights_and_the_class_names(tmp_path):
    result = finetune(tiny_config(tmp_path))
    pipeline = DiffusionPipeline.from_pretrained(result.pipeline)
    averaged = load_file(tmp_path / "run" / "checkpoints" / "step-00000006" / "ema.safetensors")
    for name, parameter in pipeline.transformer.named_parameters():
        assert torch.equal(parameter, averaged[name])
    assert pipeline.transformer.config.num_embeds_ada_norm == 3
    assert {int(k): v for k, v in pipeline.config.id2label.items()} == {0: "0", 1: "1", 2: "2"}
    assert len(pipeline(class_labels=[0, 2], num_inference_steps=2).images) == 2


def test_the_validation_loss_of_the_run_is_that_of_the_exported_pipeline(tmp_path):
    config = tiny_config(tmp_path)
    result = finetune(config)
    assert held_out_loss(config, result.pipeline)["loss"] == pytest.approx(result.metrics["validation/loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (4, {}),
        (6, {"train": {"gradient_accumulation": 2}}),
        (5, {"data": {"num_workers": 1}, "model": {"overrides": {"dropout": 0.1}}}),
        (5, {"logging": {"every": 3}}),
    ],
    ids=["plain", "accumulation", "workers and dropout", "averaged log lines"],
)
def test_a_run_that_was_cut_and_resumed_equals_one_that_was_not(tmp_path, monkeypatch, step, changes):
    finetune(tiny_config(tmp_path, "whole", **changes))
    config = tiny_config(tmp_path, "cut", **changes)
    with pytest.raises(Cut), cut_before_step(monkeypatch, step, config.train.gradient_accumulation):
        finetune(config)
    assert not (tmp_path / "cut" / "pipeline").exists()
    result = finetune(config, resume="latest")
    assert result.step == 6
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name in ("model", "ema", "optimizer"):
        last = f"checkpoints/step-00000006/{name}.safetensors"
        assert same_tensors(tmp_path / "cut" / last, tmp_path / "whole" / last)
    grids = [tmp_path / run / "samples" / "step-00000006.png" for run in ("cut", "whole")]
    assert grids[0].read_bytes() == grids[1].read_bytes()


def test_accumulation_gives_the_losses_of_whole_batches(tmp_path):
    finetune(tiny_config(tmp_path, "whole"))
    finetune(tiny_config(tmp_path, "parts", train={"gradient_accumulation": 4}))
    for (_, loss, norm), (_, loss_in_parts, norm_in_parts) in zip(
        losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True
    ):
        assert loss_in_parts == pytest.approx(loss, rel=1e-5)
        assert norm_in_parts == pytest.approx(norm, rel=1e-4)


def test_gradient_checkpointing_gives_the_same_losses(tmp_path):
    finetune(tiny_config(tmp_path, "plain"))
    finetune(tiny_config(tmp_path, "recomputed", train={"gradient_checkpointing": True}))
    for (_, loss, _), (_, recomputed, _) in zip(
        losses(tmp_path / "plain"), losses(tmp_path / "recomputed"), strict=True
    ):
        assert recomputed == pytest.approx(loss, rel=1e-6)


def test_mixing_weights_are_clipped_after_every_step(tmp_path):
    finetune(tiny_config(tmp_path, train={"mixing_lr": 5.0, "lr": 1e-5}))
    for checkpoint in checkpoints(tmp_path / "run" / "checkpoints"):
        mixing = [value for name, value in load_file(checkpoint / "model.safetensors").items() if ".mixing." in name]
        assert mixing and all(value.min() >= 0 and value.max() <= 1 for value in mixing)
    assert any(row["mixing/share_zero"] > 0 for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_weight_decay_spares_the_mixing_weights(tmp_path):
    # with a learning rate so small that gradients move nothing, only weight decay is left
    finetune(
        tiny_config(tmp_path, "decayed", train={"lr": 1e-3, "weight_decay": 100.0, "mixing_lr": 0.0, "warmup_steps": 0})
    )
    first, *_, last = checkpoints(tmp_path / "decayed" / "checkpoints")
    before, after = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    for name in before:
        if ".mixing." in name:
            assert torch.equal(before[name], after[name])
    decayed = "transformer_blocks.0.ff.net.2.weight"
    assert after[decayed].norm() < 0.9 * before[decayed].norm()


@pytest.mark.parametrize(("trainable", "learns"), [("mhla", ".processor."), ("attention", ".attn1.")])
def test_only_the_chosen_weights_learn(tmp_path, trainable, learns):
    config = tiny_config(tmp_path, train={"trainable": trainable})
    # Blocks trained from scratch start as the identity, and nothing inside them learns before their gates do.
    config.model.pretrained, config.model.overrides = str(finetune(tiny_config(tmp_path, "before")).pipeline), {}
    result = finetune(config)
    first, *_, last = checkpoints(tmp_path / "run" / "checkpoints")
    before, after = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(learns in name for name in changed)
    assert result.trainable_parameters == sum(v.numel() for name, v in before.items() if learns in name)


def test_the_learning_rate_warms_up_and_decays(tmp_path):
    finetune(
        tiny_config(
            tmp_path, train={"steps": 8, "warmup_steps": 4, "schedule": "linear", "lr": 1e-3, "mixing_lr": 1e-2}
        )
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    expected = [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]
    assert [row["lr/weights"] for row in rows] == pytest.approx([1e-3 * share for share in expected])
    assert [row["lr/mixing"] for row in rows] == pytest.approx([1e-2 * share for share in expected])


def test_the_last_checkpoints_and_every_nth_are_kept(tmp_path):
    finetune(tiny_config(tmp_path, train={"steps": 9}, checkpoint={"every": 1, "keep_last": 2, "keep_every": 3}))
    assert [path.name[-2:] for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["03", "06", "08", "09"]


# Starting from a checkpoint ------------------------------------------------------------------------------------------


def softmax_pipeline(tmp_path, **changes):
    config = tiny_config(tmp_path, "teacher", **changes)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="softmax", mhla={}))
    return finetune(config).pipeline


def test_a_softmax_pipeline_is_retrofitted_and_keeps_its_other_weights(tmp_path):
    teacher = softmax_pipeline(tmp_path)
    config = tiny_config(tmp_path, "student", train={"lr": 0.0, "steps": 1, "ema_decay": 0.0})
    config.model.pretrained, config.model.overrides = str(teacher), {}
    student = DiffusionPipeline.from_pretrained(finetune(config).pipeline)
    assert student.transformer.config.mhla["blocks"] == [2, 2]
    weights = student.transformer.state_dict()
    for name, value in DiffusionPipeline.from_pretrained(teacher).transformer.state_dict().items():
        assert torch.equal(weights[name], value), name


def test_an_mhla_pipeline_goes_on_with_the_attention_it_has(tmp_path):
    first = finetune(tiny_config(tmp_path, "first")).pipeline
    config = tiny_config(tmp_path, "second")
    config.model.pretrained, config.model.overrides, config.model.mhla = str(first), {}, {}
    second = DiffusionPipeline.from_pretrained(finetune(config).pipeline)
    assert second.transformer.config.mhla["blocks"] == [2, 2] and second.transformer.config.mhla["cpe"]


def test_another_number_of_classes_replaces_the_label_table_and_says_so(tmp_path, capsys):
    teacher = softmax_pipeline(tmp_path)
    make_images(tmp_path / "more", classes=5)
    config = tiny_config(
        tmp_path, "student", data={"train": str(tmp_path / "more")}, train={"lr": 0.0, "ema_decay": 0.0}
    )
    config.model.pretrained, config.model.overrides, config.data.validation = str(teacher), {}, None
    capsys.readouterr()
    result = finetune(config)
    assert "the label table of 3 classes is replaced by a new one of 5" in capsys.readouterr().out
    student = DiffusionPipeline.from_pretrained(result.pipeline)
    assert student.transformer.config.num_embeds_ada_norm == 5
    assert student(class_labels=[4], num_inference_steps=1).images
    weights = student.transformer.state_dict()
    for name, value in DiffusionPipeline.from_pretrained(teacher).transformer.state_dict().items():
        assert "embedding_table" in name or torch.equal(weights[name], value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"family": "dti"}, "did you mean 'dit'"),
        ({"preset": "DiT-S/3"}, "did you mean 'DiT-S/2'"),
        ({"overrides": {"in_channel": 1}}, "model.overrides"),
        ({"mhla": {"block": [2, 2]}}, "did you mean 'blocks'"),
        ({"mhla": {"blocks": [2, 2, 2]}}, "blocks"),
        ({"mhla": {"layers": [7]}}, "layer 7"),
        ({"attention": "softmax", "mhla": {"cpe": True}}, "model.attention is 'softmax'"),
        ({"pretrained": "nowhere/at/all"}, "model.pretrained 'nowhere/at/all' is neither a folder nor a hub id"),
        ({"overrides": {"num_layers": 0}}, "model.overrides.num_layers is 0; 1 or more is accepted"),
        ({"overrides": {"num_attention_heads": 0}}, "model.overrides.num_attention_heads is 0; 1 or more is accepted"),
    ],
)
def test_a_model_that_cannot_be_had_is_told_before_any_step(tmp_path, model, said):
    config = tiny_config(tmp_path, model=model)
    with pytest.raises(UserError) as caught:
        finetune(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"channels": 3}, "data.channels=3 gives 3 channels, but the model takes 1"),
        ({"size": 16}, "data.size=16 gives latents of 16×16, but the model is set to 8×8"),
    ],
)
def test_images_that_do_not_fit_the_model_are_told_before_any_step(tmp_path, data, said):
    with pytest.raises(UserError) as caught:
        finetune(tiny_config(tmp_path, data=data))
    assert said in str(caught.value)


# Whose folder is it --------------------------------------------------------------------------------------------------


def test_a_folder_with_a_finished_run_is_not_overwritten(tmp_path):
    config = tiny_config(tmp_path)
    finetune(config)
    with pytest.raises(UserError, match="already holds this run, up to step 6; continue it with --resume latest"):
        finetune(config)


def test_a_folder_with_another_config_is_refused_unless_asked_twice(tmp_path):
    finetune(tiny_config(tmp_path))
    other = tiny_config(tmp_path, train={"lr": 0.5, "steps": 7})
    for resume in (None, "latest"):
        with pytest.raises(UserError, match=r"another config \(train.lr is 0.5 instead of 0.002\)"):
            finetune(other, resume=resume)
    assert finetune(other, resume="latest", allow_config_change=True).step == 7


def test_a_start_that_was_refused_does_not_claim_the_folder(tmp_path):
    with pytest.raises(UserError, match="blocks"):
        finetune(tiny_config(tmp_path, model={"mhla": {"blocks": [2, 2, 2]}}))
    assert finetune(tiny_config(tmp_path, train={"steps": 1})).step == 1


def test_an_option_that_the_objective_lacks_is_told(tmp_path):
    with pytest.raises(UserError, match=r"train.objective {'shift': 3} does not suit model.family 'dit'"):
        finetune(tiny_config(tmp_path, train={"objective": {"shift": 3}}))


def test_a_run_can_be_made_longer(tmp_path):
    finetune(tiny_config(tmp_path, train={"schedule": "constant"}))
    result = finetune(tiny_config(tmp_path, train={"schedule": "constant", "steps": 8}), resume="latest")
    finetune(tiny_config(tmp_path, "whole", train={"schedule": "constant", "steps": 8}))
    assert result.step == 8
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(tmp_path):
    config = tiny_config(tmp_path)
    finetune(config)
    before = losses(tmp_path / "run")
    finetune(config, resume=str(tmp_path / "run" / "checkpoints" / "step-00000002"))
    assert losses(tmp_path / "run") == before
    assert len(list((tmp_path / "run" / "checkpoints").glob("abandoned-step-*"))) == 2


def test_a_folder_with_other_files_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds other files"):
        finetune(config)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_class_of_the_grid_that_the_data_do_not_have_is_refused_before_any_work(tmp_path, label):
    with pytest.raises(UserError, match=f"validation.labels names class {label}, .* has 3 classes; 0 to 2 are accept"):
        finetune(tiny_config(tmp_path, validation={"labels": [2, label]}))
    assert not (tmp_path / "run").exists()


def test_a_resume_with_other_images_is_refused(tmp_path):
    config = tiny_config(tmp_path)
    finetune(config)
    next((tmp_path / "images" / "0").iterdir()).unlink()
    with pytest.raises(UserError, match="has other samples"):
        finetune(config, resume="latest")
    shutil.rmtree(tmp_path / "images" / "0")  # fewer classes, so that not even the weights fit
    with pytest.raises(UserError, match="has other samples"):
        finetune(config, resume="latest")


def test_a_damaged_checkpoint_is_named(tmp_path):
    config = tiny_config(tmp_path)
    finetune(config)
    weights = tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        UserError, match=r"step-00000006/model.safetensors cannot be read.*; remove the folder"
    ) as caught:
        finetune(config, resume="latest")
    assert "\n" not in str(caught.value)
    (weights.parent / "state.json").write_text("[]")
    with pytest.raises(UserError, match=r"step-00000006 cannot be read: state.json has no step"):
        finetune(config, resume="latest")


@pytest.mark.parametrize("content", ["train: [", "nonsense: 1"])
def test_a_damaged_config_of_a_run_is_named_with_its_folder(tmp_path, content):
    config = tiny_config(tmp_path)
    finetune(config)
    (tmp_path / "run" / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"output_dir .*/run holds a run whose config.yaml cannot be read"):
        finetune(config, resume="latest")


def test_damaged_records_do_not_keep_a_run_from_going_on(tmp_path):
    finetune(tiny_config(tmp_path, train={"schedule": "constant"}))
    (tmp_path / "run" / "run.json").write_text('{"starts": 5}')
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'5\n"x"\n\xff\x00\n')
    longer = tiny_config(tmp_path, train={"schedule": "constant", "steps": 8})
    assert finetune(longer, resume="latest").step == 8
    assert [step for step, _, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_metrics_that_cannot_be_written_at_the_start_are_one_sentence(tmp_path):
    finetune(tiny_config(tmp_path, train={"schedule": "constant"}))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    longer = tiny_config(tmp_path, train={"schedule": "constant", "steps": 8})
    with pytest.raises(UserError, match=r"/run cannot be written: Is a directory; the last good .*step-00000006"):
        finetune(longer, resume="latest")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("proj_out_2.weight/exp_avg"), "lacks 'proj_out_2.weight/exp_avg', which this run needs"),
        (lambda t: t.clear(), "lacks '.*/exp_avg', which this run needs"),
        (lambda t: t.update(other=torch.ones(1)), "has 'other', which this run has no place for"),
        (lambda t: t.update({"proj_out_2.bias/exp_avg_sq": torch.ones(3)}), r"bias/exp_avg_sq has shape \(3,\); \("),
        (lambda t: t.update({"proj_out_2.bias/step": torch.ones(3)}), r"bias/step has shape \(3,\); \(\) is expected"),
    ],
)
def test_an_optimiser_state_that_does_not_fit_is_told(tmp_path, change, said):
    config = tiny_config(tmp_path, train={"steps": 2}, validation={"images": 0})
    finetune(config)
    path = tmp_path / "run" / "checkpoints" / "step-00000002" / "optimizer.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=said):
        finetune(config, resume="latest")


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path, monkeypatch):
    ids = []

    def init(project, id, resume, **options):
        ids.append(id)
        return SimpleNamespace(id=id or f"id-{len(ids)}", log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Image=lambda image: image))
    changes = {"validation": {"images": 0}, "checkpoint": {"every": 1}}
    for steps, project in ((1, "one"), (2, "one"), (3, "other")):
        config = tiny_config(tmp_path, train={"steps": steps}, logging={"wandb": project}, **changes)
        finetune(config, resume="latest")
    assert ids == [None, "id-1", None]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["wandb"] == {"project": "other", "id": "id-3"} and len(record["starts"]) == 3


# When it cannot go on ------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(tmp_path, monkeypatch):
    whole, calls = DiTObjective.loss, []

    def loss(self, model, inputs):
        parts = whole(self, model, inputs)
        calls.append(1)
        return {name: value * (math.nan if model.training and len(calls) > 6 else 1) for name, value in parts.items()}

    monkeypatch.setattr(DiTObjective, "loss", loss)
    with pytest.raises(TrainingDiverged) as caught:
        finetune(tiny_config(tmp_path))
    said = str(caught.value)
    assert "stopped at step" in said and "nan" in said and "last gradient norms" in said
    kept = checkpoints(tmp_path / "run" / "checkpoints")
    assert str(kept[-1]) in said
    for path in kept:
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
def test_a_full_disk_is_one_sentence_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch, file):
    from mhla_diffusion.training import checkpoints as module

    def full(original):
        def write(*arguments, **keywords):
            path = arguments[1] if file.endswith("safetensors") else arguments[0]
            if "step-00000004" in str(path) and str(path).endswith(file):
                raise OSError(28, "No space left on device", str(path))
            return original(*arguments, **keywords)

        return write

    if file == "state.json":
        monkeypatch.setattr("pathlib.Path.write_text", full(module.Path.write_text))
    else:
        monkeypatch.setattr(module, "save_file", full(module.save_file))
    with pytest.raises(UserError, match=r"step-00000004 cannot be written: No space left.*last good.*step-00000002"):
        finetune(tiny_config(tmp_path))
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]
    assert not list((tmp_path / "run").rglob(".tmp-*"))
    monkeypatch.undo()
    finetune(tiny_config(tmp_path), resume="latest")
    finetune(tiny_config(tmp_path, "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_damaged_image_is_told_and_replaced_also_after_a_resume(tmp_path):
    config = tiny_config(tmp_path, "whole")
    sorted((tmp_path / "images").rglob("*.png"))[11].write_bytes(b"no image any more")
    with pytest.warns(UserWarning, match="4.png cannot be read: .*another one is used in its place"):
        assert finetune(config).step == 6
    finetune(tiny_config(tmp_path, "cut", train={"steps": 4, "schedule": "constant"}))
    finetune(tiny_config(tmp_path, "cut", train={"schedule": "constant"}), resume="latest")
    finetune(tiny_config(tmp_path, "uncut", train={"schedule": "constant"}, data={"num_workers": 2}))
    assert losses(tmp_path / "cut") == losses(tmp_path / "uncut")


def test_too_many_damaged_images_cost_no_step_and_can_be_removed(tmp_path):
    steps = {"train": {"steps": 12}, "checkpoint": {"every": 0}}
    config = tiny_config(tmp_path, **steps, data={"validation": None})
    broken = sorted((tmp_path / "images").rglob("*.png"))[::2]
    for path in broken:
        path.write_bytes(b"no image any more")
    with pytest.raises(UserError, match="11 or more of 21 samples cannot be read"), pytest.warns(UserWarning):
        finetune(config)
    (kept,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert 0 < int(kept.name.removeprefix("step-")) < 12
    for path in broken:
        path.unlink()
    with pytest.raises(UserError, match="has other samples.*--allow-config-change"):
        finetune(config, resume="latest")
    assert finetune(config, resume="latest", allow_config_change=True).step == 12


def test_resuming_where_nothing_is_says_so(tmp_path, capsys):
    finetune(tiny_config(tmp_path, train={"steps": 1}), resume="latest")
    assert "has no checkpoint yet: starting at step 0" in capsys.readouterr().out
