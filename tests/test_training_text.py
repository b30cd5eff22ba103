"""Fine-tuning models that take captions: where conditions come from, what learns, and that runs can be cut."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from types import SimpleNamespace

import dit_models
import numpy as np
import pytest
import sana_components
import torch
import wan_models
from accelerate import Accelerator
from diffusers import DiffusionPipeline, SanaPipeline
from PIL import Image
from safetensors.torch import load_file
from text_runs import make_captioned_images, make_place, text_config
from training_runs import losses, same_tensors, start_script

from mhla_diffusion import MHLAConfig, MHLADiTTransformer2DModel, MHLAProcessor
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLASanaPipeline
from mhla_diffusion.training import cache, cached, config_to_yaml, finetune, held_out_loss, loop, read_metrics
from mhla_diffusion.training.cache import cache_latents
from mhla_diffusion.training.checkpoints import checkpoints
from mhla_diffusion.training.config import DataOptions, ModelOptions, TrainOptions
from mhla_diffusion.training.data import Batch
from mhla_diffusion.training.encoding import Encoder, check_conditions, open_components
from mhla_diffusion.training.known_parts import files_signature
from mhla_diffusion.training.learning import choose_trainable
from mhla_diffusion.training.sources import open_source

SANA = family_named("sana")
LAST = "checkpoints/step-00000004/{}.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("text"))


class Cut(Exception):
    """Stands for whatever ends a process."""


def cut_at(monkeypatch, step):
    """Let a run end before it takes the gradients of `step`."""
    whole = loop.Learner.gradients

    def gradients(self, number, *arguments):
        if number == step:
            raise Cut
        return whole(self, number, *arguments)

    monkeypatch.setattr(loop.Learner, "gradients", gradients)


# The run -------------------------------------------------------------------------------------------------------------


def test_a_run_ends_in_a_pipeline_that_takes_prompts(place, tmp_path, capsys):
    result = finetune(text_config(place, tmp_path / "run", {"validation": {"every": 2}}))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {"loss", "validation/loss", "mixing/mean"} <= rows[-1].keys()
    assert Image.open(tmp_path / "run" / "samples" / "step-00000002.png").size == (128, 64)
    said = capsys.readouterr().out
    assert "parameters learn, on 8 samples with captions" in said
    pipeline = DiffusionPipeline.from_pretrained(result.pipeline)
    averaged = load_file(tmp_path / "run" / LAST.format("ema"))
    assert all(torch.equal(averaged[name], p) for name, p in pipeline.transformer.named_parameters())
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "complex_human_instruction": None}
    assert pipeline("red", **call).images[0].size == (64, 64)
    before, after = (
        load_file(folder / "text_encoder" / "model.safetensors") for folder in (place / "sana", result.pipeline)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_that_was_cut_and_resumed_equals_one_that_was_not(place, tmp_path, monkeypatch):
    finetune(text_config(place, tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, 4)
        finetune(text_config(place, tmp_path / "cut"))
    finetune(text_config(place, tmp_path / "cut"), resume="latest")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name in ("model", "ema", "optimizer"):
        assert same_tensors(tmp_path / "cut" / LAST.format(name), tmp_path / "whole" / LAST.format(name))


def test_two_processes_take_the_first_step_of_one(place, tmp_path):
    quick = {"train": {"steps": 1}, "validation": {"images": 0}}
    finetune(text_config(place, tmp_path / "one", quick))
    (tmp_path / "two.yaml").write_text(config_to_yaml(text_config(place, tmp_path / "two", quick)))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0",
                "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")  # fmt: skip
    two = start_script(tmp_path / "two.yaml", launcher=launcher)
    _, err = two.communicate(timeout=300)
    assert two.returncode == 0, err
    (_, loss, norm), (_, same_loss, same_norm) = losses(tmp_path / "one")[0], losses(tmp_path / "two")[0]
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert same_norm == pytest.approx(norm, rel=1e-4)


def test_a_retrofit_without_locality_starts_from_the_loss_of_the_stock_model(place, tmp_path):
    runs = {
        "stock": {"model": {"attention": "softmax", "mhla": {}}},  # the family's own attention
        "mhla": {"model": {"mhla": {"locality": 0.0}}},
        "local": {"model": {"mhla": {"locality": 1.0}}},
    }
    quick = {"train": {"steps": 1}, "validation": {"images": 0}}
    first = {}
    for name, changes in runs.items():
        config = text_config(place, tmp_path / name, quick, changes)
        if name == "stock":
            config.model.mhla = {}
        finetune(config)
        first[name] = losses(tmp_path / name)[0][1]
    assert first["mhla"] == pytest.approx(first["stock"], rel=1e-5)
    assert abs(first["local"] - first["stock"]) > 1e-5 * first["stock"]


def test_aligned_layers_of_a_text_model_fit_the_ones_they_replace(place, tmp_path):
    changes = {"train": {"align_steps": 30, "steps": 1, "align_lr": 2e-3}, "validation": {"images": 0}}
    finetune(text_config(place, tmp_path / "run", changes, {"model": {"mhla": {"feature_map": "elu"}}}))
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "align/loss" in row]
    assert rows[-1]["align/loss"] < 0.7 * rows[0]["align/loss"]


# Conditions ----------------------------------------------------------------------------------------------------------


class Captions:
    """Stands for a data set of captions."""

    text_cached, shared_conditions = False, {}


def sana_encoder(said=None, **options):
    components = {"tokenizer": sana_components.small_tokenizer(), "text_encoder": sana_components.small_text_encoder()}
    data = DataOptions(**{"max_tokens": 12, "instruction": ["say: "], **options})
    say = (said if said is not None else []).append
    return components, Encoder(SANA, components, data, Captions(), torch.device("cpu"), say)


def test_captions_become_the_conditions_that_the_pipeline_makes_of_prompts():
    components, encoder = sana_encoder()
    batch = Batch(None, {}, {}, ["red", "two dogs"], [(0, 0), (0, 1)])
    conditions = encoder.conditions(batch)
    pipeline = SanaPipeline(**components, vae=None, transformer=None, scheduler=None)
    embeds, mask, null, null_mask = pipeline.encode_prompt(
        ["red", "two dogs"], max_sequence_length=12, complex_human_instruction=["say: "]
    )
    expected = {"prompt_embeds": embeds, "prompt_mask": mask, "null_embeds": null[:1], "null_mask": null_mask[:1]}
    assert conditions.keys() == expected.keys()
    assert all(torch.equal(conditions[name], value) for name, value in expected.items())


@pytest.mark.parametrize("instruction", [["say: "], []])
def test_captions_that_lose_their_end_are_told_once_and_counted(instruction):
    said = []
    _, encoder = sana_encoder(said, instruction=instruction)
    fits, long = "a" * 8, "b" * 30
    encoder.encode([fits, "c"])
    assert not said and (encoder.cut, encoder.captions) == (0, 2)
    assert not torch.equal(encoder.encode([fits])["prompt_embeds"], encoder.encode([fits[:-1]])["prompt_embeds"])
    for _ in range(2):
        encoder.encode([fits, long])
    assert len(said) == 1 and long in said[0]
    assert (encoder.cut, encoder.captions) == (2, 8)


def test_validation_prompts_change_the_pictures(place, tmp_path):
    for name, prompts in (("first", []), ("same", ["red 0", "green 1"]), ("other", ["blue"])):
        changes = {"train": {"steps": 1}, "validation": {"prompts": prompts, "guidance_scale": 8.0}}
        finetune(text_config(place, tmp_path / name, changes))
    first, same, other = (
        (tmp_path / name / "samples" / "step-00000001.png").read_bytes() for name in ("first", "same", "other")
    )
    assert same == first != other


@pytest.mark.parametrize(
    ("family", "source", "said"),
    [
        (
            "sana",
            {"captioned": False, "class_names": ["cat"]},
            "takes captions, but data.train has samples without one",
        ),
        ("dit", {"captioned": True, "class_names": []}, "takes classes, but data.train has none"),
    ],
)
def test_data_without_what_the_family_takes_are_refused(family, source, said):
    source = SimpleNamespace(text_cached=False, **source)
    with pytest.raises(UserError, match=said):
        check_conditions(family_named(family), {"data.train": source, "data.validation": None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"size": 60}}, "60×60 pixels; multiples of 8"),
        ({"train": {"lora_rank": 2}}, "no linear layer is frozen"),
        ({"model": {"pretrained": "NO TEXT"}}, "with a tokenizer, without which captions cannot be encoded"),
    ],
)
def test_what_cannot_be_done_is_told_before_any_step(place, tmp_path, changes, said):
    if "model" in changes:
        parts = {"vae": sana_components.small_vae()}
        SANA.build_pipeline(sana_components.small_transformer(), parts).save_pretrained(tmp_path / "NO TEXT")
        changes = {"model": {"pretrained": str(tmp_path / "NO TEXT")}}
    with pytest.raises(UserError, match=said):
        finetune(text_config(place, tmp_path / "run", changes))
    assert not checkpoints(tmp_path / "run" / "checkpoints")


# What learns ---------------------------------------------------------------------------------------------------------

LORA = {"train": {"lora_rank": 2, "trainable": "mhla"}}


def test_with_lora_nothing_but_adapters_and_mhla_weights_learns(place, tmp_path, capsys):
    result = finetune(text_config(place, tmp_path / "run", LORA, {"validation": {"images": 0}}))
    said = capsys.readouterr().out
    first, last = checkpoints(tmp_path / "run" / "checkpoints")
    before, after = load_file(first / "model.safetensors"), load_file(last / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".lora_" in name or ".processor." in name}
    adapters = sum(value.numel() for name, value in after.items() if ".lora_" in name)
    # rank · (in + out) of q, k, v, out of 3 layers' self- and cross-attention, all 32 wide
    assert adapters == 2 * 64 * 4 * 3 * 2
    assert f"({adapters:,} of them in LoRA adapters)" in said
    assert result.trainable_parameters == adapters + 3 * 4 * 4
    assert set(load_file(last / "ema.safetensors")) == changed


def test_a_lora_run_that_was_cut_and_resumed_equals_one_that_was_not(place, tmp_path, monkeypatch):
    finetune(text_config(place, tmp_path / "whole", LORA))
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, 4)
        finetune(text_config(place, tmp_path / "cut", LORA))
    finetune(text_config(place, tmp_path / "cut", LORA), resume="latest")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name in ("model", "ema", "optimizer"):
        assert same_tensors(tmp_path / "cut" / LAST.format(name), tmp_path / "whole" / LAST.format(name))


def test_the_pipeline_of_a_lora_run_is_the_stock_one_with_its_lora_file(place, tmp_path):
    changes = {"model": {"attention": "softmax"}, "train": {**LORA["train"], "lr": 1e-2}, "validation": {"images": 0}}
    config = text_config(place, tmp_path / "run", changes)
    config.model.mhla = {}  # SANA's own attention, so that all that was learned is in the file
    result = finetune(config)
    inputs = sana_components.transformer_inputs(8, 8)
    with torch.no_grad():
        merged = DiffusionPipeline.from_pretrained(result.pipeline)
        stock = SanaPipeline.from_pretrained(place / "sana")
        without = stock.transformer(**inputs).sample
        stock.load_lora_weights(tmp_path / "run" / "pipeline_lora")
        expected = stock.transformer(**inputs).sample
        assert not any("lora" in name for name, _ in merged.transformer.named_parameters())
        torch.testing.assert_close(merged.transformer(**inputs).sample, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without, expected, rtol=1e-3, atol=1e-4)


def test_the_pipeline_of_a_lora_run_with_mhla_is_the_retrofitted_one_with_its_two_files(place, tmp_path):
    changes = {"train": {**LORA["train"], "lr": 1e-2}, "validation": {"images": 0}}
    config = text_config(place, tmp_path / "run", changes)
    result = finetune(config)
    inputs, files = sana_components.transformer_inputs(8, 8), tmp_path / "run" / "pipeline_lora"
    merged = DiffusionPipeline.from_pretrained(result.pipeline)
    pipeline = MHLASanaPipeline.from_pretrained(place / "sana")
    pipeline.set_attn_processor(MHLAProcessor(**config.model.mhla))
    learned = load_file(files / "learned_weights.safetensors")
    assert learned and all(".processor." in name for name in learned)
    assert not pipeline.transformer.load_state_dict(learned, strict=False).unexpected_keys
    pipeline.load_lora_weights(files)
    with torch.no_grad():
        expected = merged.transformer(**inputs).sample
        torch.testing.assert_close(pipeline.transformer(**inputs).sample, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["sana", "wan", "dit"])
def test_adapters_sit_on_the_frozen_attention_and_mlp_layers_of_the_blocks(family):
    model = {
        "sana": sana_components.small_transformer,
        "wan": wan_models.stock_transformer,
        "dit": lambda: MHLADiTTransformer2DModel.from_base(dit_models.small_dit(), MHLAConfig()),
    }[family]()
    choose_trainable(family_named(family), model, TrainOptions(trainable="mhla", lora_rank=1))
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    kinds = {".".join(name.split(".")[2:]) for name in adapted}
    attention = {f"attn1.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")}
    assert attention <= kinds
    assert all(kind.startswith(("attn", "ff")) for kind in kinds)
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all(".lora_" in name or ".processor." in name for name in learning)


def test_a_class_that_takes_no_adapters_is_told():
    with pytest.raises(UserError, match="a DiTTransformer2DModel takes no adapters; set model.attention=mhla"):
        choose_trainable(family_named("dit"), dit_models.small_dit(), TrainOptions(trainable="attention", lora_rank=1))


def test_adapters_beyond_the_rank_of_the_weights_are_refused():
    model = sana_components.small_transformer()
    largest = max(min(layer.weight.shape) for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    with pytest.raises(UserError, match=f"train.lora_rank is {largest + 1}, but no layer's weights have a rank above"):
        choose_trainable(SANA, model, TrainOptions(trainable="mhla", lora_rank=largest + 1))


def test_attention_learns_beside_adapters_on_the_rest(place):
    model = sana_components.small_transformer()
    choose_trainable(SANA, model, TrainOptions(trainable="attention", lora_rank=1))
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(".attn1." in name or ".lora_" in name for name in learning)
    assert not any(".attn1." in name and ".lora_" in name for name in learning)
    assert any(".attn2." in name for name in learning)


def test_an_average_on_the_cpu_is_the_average_on_the_model(place, tmp_path):
    for device in ("cpu", "model"):
        finetune(text_config(place, tmp_path / device, {"train": {"ema_device": device}, "validation": {"images": 0}}))
    assert same_tensors(tmp_path / "cpu" / LAST.format("ema"), tmp_path / "model" / LAST.format("ema"))


def test_the_8_bit_optimiser_needs_its_package(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="pip install bitsandbytes"):
        finetune(text_config(place, tmp_path / "run", {"train": {"optimizer": "adamw8bit"}}))


def test_a_run_with_the_8_bit_optimiser_resumes_exactly(place, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    changes = {"train": {"optimizer": "adamw8bit"}, "validation": {"images": 0}}
    finetune(text_config(place, tmp_path / "whole", changes))
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, 4)
        finetune(text_config(place, tmp_path / "cut", changes))
    finetune(text_config(place, tmp_path / "cut", changes), resume="latest")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for name in ("model", "ema", "optimizer"):
        assert same_tensors(tmp_path / "cut" / LAST.format(name), tmp_path / "whole" / LAST.format(name))


# Caches --------------------------------------------------------------------------------------------------------------


def kept_components(monkeypatch):
    """A list to which every run adds the components that it keeps."""
    kept, whole = [], loop.open_components
    monkeypatch.setattr(loop, "open_components", lambda *args: kept.append(whole(*args)) or kept[-1])
    return kept


def test_a_cached_run_starts_from_the_loss_of_an_uncached_one_and_keeps_no_encoders(place, tmp_path, monkeypatch):
    quick = {"train": {"steps": 2}, "validation": {"images": 0}}
    finetune(text_config(place, tmp_path / "uncached", quick))
    cache_latents(text_config(place, tmp_path / "unused"), tmp_path / "cache", batch_size=3)
    kept = kept_components(monkeypatch)
    cached = {"data": {"train": str(tmp_path / "cache"), "validation": str(tmp_path / "cache")}}
    result = finetune(text_config(place, tmp_path / "cached", quick, cached))
    for one, other in zip(losses(tmp_path / "uncached"), losses(tmp_path / "cached"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    rows = [read_metrics(tmp_path / run / "metrics.jsonl")[-1] for run in ("uncached", "cached")]
    assert rows[0]["validation/loss"] == pytest.approx(rows[1]["validation/loss"], rel=1e-5)
    assert not {"vae", "text_encoder", "tokenizer"} & kept[0].keys()
    pipeline = DiffusionPipeline.from_pretrained(result.pipeline)
    assert pipeline.text_encoder is not None and pipeline.vae is not None


def test_a_cached_run_shows_the_pictures_of_an_uncached_one_without_the_text_encoder(place, tmp_path, monkeypatch):
    for prompts in ([], ["blue 2"]):
        shown = {"train": {"steps": 1, "lr": 0.0}, "validation": {"prompts": prompts, "guidance_scale": 4.0}}
        uncached, cached = (tmp_path / f"{name}{len(prompts)}" for name in ("uncached", "cached"))
        finetune(text_config(place, uncached, shown))
        cache_latents(text_config(place, tmp_path / "unused"), tmp_path / "cache")
        with monkeypatch.context() as patch:
            kept = kept_components(patch)
            data = {"train": str(tmp_path / "cache"), "validation": None}
            finetune(text_config(place, cached, shown, {"data": data}))
        assert "vae" in kept[0] and "text_encoder" not in kept[0]
        one, other = (Image.open(run / "samples" / "step-00000001.png") for run in (uncached, cached))
        assert abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1


def test_a_cache_made_with_other_text_is_refused(place, tmp_path):
    cache_latents(text_config(place, tmp_path / "unused"), tmp_path / "cache")
    data = {"train": str(tmp_path / "cache"), "validation": None, "instruction": ["paint: "]}
    with pytest.raises(UserError, match="instruction"):
        finetune(text_config(place, tmp_path / "run", {"data": data}))


def test_buckets_train_and_validate_and_their_loss_is_that_of_each_alone(place, tmp_path):
    images = make_captioned_images(tmp_path / "images", count=5, size=64)
    wide = make_captioned_images(tmp_path / "wide", count=4, size=(48, 96))
    for path in wide.glob("*.png"):
        path.rename(images / f"wide-{path.name}")
    lines = [json.loads(line) for line in (wide / "metadata.jsonl").read_text().splitlines()]
    with (images / "metadata.jsonl").open("a") as file:
        file.writelines(json.dumps({**line, "file_name": f"wide-{line['file_name']}"}) + "\n" for line in lines)
    data = {"train": str(images), "validation": str(images), "buckets": [[64, 64], [48, 96]]}
    changes = {"data": data, "train": {"steps": 4, "gradient_checkpointing": True}, "validation": {"loss_images": 9}}
    result = finetune(text_config(place, tmp_path / "run", changes))
    one_by_one = {"data": data, "train": {"batch_size": 1}, "validation": {"loss_images": 9}}
    loss = held_out_loss(text_config(place, tmp_path / "unused", one_by_one), result.pipeline)["loss"]
    assert result.metrics["validation/loss"] == pytest.approx(loss, rel=1e-5)


def test_parts_are_compared_with_a_cache_again_only_when_their_files_have_changed(tmp_path, monkeypatch):
    place = make_place(tmp_path / "place")
    cache_latents(text_config(place, tmp_path / "unused"), tmp_path / "cache")
    compared, whole = [], cached.fingerprint
    monkeypatch.setattr(cached, "fingerprint", lambda part: compared.append(type(part).__name__) or whole(part))
    data = {"data": {"train": str(tmp_path / "cache"), "validation": None}, "validation": {"images": 0}}
    options, family = text_config(place, tmp_path / "run", data), SANA
    source = open_source(options.data.train, "data.train", options.data, family, flip=False)
    open_them = [options.model, options.data, family, [source], Accelerator(cpu=True), False]
    assert open_components(*open_them).keys() == {"scheduler"} and not compared
    (place / "sana" / "text_encoder" / "model.safetensors").touch()
    for _ in range(2):
        open_components(*open_them)
        assert sorted(compared) == ["AutoencoderDC", "Gemma2Model", type(sana_components.small_tokenizer()).__name__]
    config = place / "sana" / "vae" / "config.json"
    config.write_text(config.read_text().replace("0.41407", "0.5"))
    with pytest.raises(UserError, match="another VAE"):
        open_components(*open_them)


def test_files_that_look_like_the_ones_compared_before_are_compared_again(tmp_path):
    def signature(folder):
        return files_signature(ModelOptions(components=str(folder)), "sana", ("vae",))

    for name in ("one", "other"):
        (tmp_path / name / "vae").mkdir(parents=True)
        (tmp_path / name / "vae" / "model.safetensors").write_text(f"{name:5}")
        os.utime(tmp_path / name / "vae" / "model.safetensors", (0, 0))  # as in images of containers
    before = signature(tmp_path / "one")
    assert before == signature(tmp_path / "one") != signature(tmp_path / "other")
    time.sleep(0.05)
    shutil.copy2(tmp_path / "other" / "vae" / "model.safetensors", tmp_path / "one" / "vae" / "model.safetensors")
    assert signature(tmp_path / "one") != before


def test_parts_that_change_while_a_cache_is_made_are_not_taken_for_those_it_was_made_with(tmp_path, monkeypatch):
    place = make_place(tmp_path / "place")
    config = text_config(place, tmp_path / "run", {"data": {"train": str(tmp_path / "cache"), "validation": None}})
    write = cache._write_shard

    def replace_meanwhile(*arguments):
        write(*arguments)
        vae = sana_components.small_vae()
        next(vae.parameters()).data += 1
        vae.save_pretrained(place / "sana" / "vae")

    monkeypatch.setattr(cache, "_write_shard", replace_meanwhile)
    cache_latents(text_config(place, tmp_path / "unused"), tmp_path / "cache")
    with pytest.raises(UserError, match="another VAE"):
        finetune(config)
