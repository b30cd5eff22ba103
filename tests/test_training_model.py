"""What a training config starts from: pipelines, transformers, original release files; and what is not imported."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from diffusers import DDIMScheduler, DiTPipeline
from dit_models import disturb, inputs, small_dit, small_vae
from sana_components import small_components as sana_components
from test_dit_convert import inputs as original_inputs
from test_dit_convert import original, output, relative_error, written_out
from wan_models import small_components as wan_components
from wan_models import stock_transformer

from mhla_diffusion import MHLAConfig, apply_mhla
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline
from mhla_diffusion.training import config_from_dict
from mhla_diffusion.training.config import ModelOptions
from mhla_diffusion.training.model import check_fit, load_components, load_model

DIT = family_named("dit")


def dit_pipeline(folder, transformer=None):
    DiTPipeline(transformer or small_dit(), small_vae(), DDIMScheduler(), {0: "cat"}).save_pretrained(folder)
    return folder


def as_published_on_the_hub(folder):
    """Rewrite a saved DiT pipeline to name its transformer as facebook/DiT-XL-2-256 does."""
    index, config = folder / "model_index.json", folder / "transformer" / "config.json"
    content = json.loads(index.read_text())
    content["transformer"] = ["diffusers", "Transformer2DModel"]
    index.write_text(json.dumps(content))
    legacy = {
        "_class_name": "Transformer2DModel",
        "attention_type": "default",
        "cross_attention_dim": None,
        "double_self_attention": False,
        "num_vector_embeds": None,
        "only_cross_attention": False,
        "use_linear_projection": False,
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | legacy))
    return folder


def test_a_pipeline_that_names_the_legacy_class_is_the_same_model(tmp_path):
    stock = disturb(small_dit())
    folder = as_published_on_the_hub(dit_pipeline(tmp_path / "hub", stock))
    for attention in ("softmax", "mhla"):
        options = ModelOptions(pretrained=str(folder), attention=attention)
        model, components = load_model(options, 10)[1], load_components(options)
        weights = model.state_dict()
        assert all(torch.equal(weights[name], value) for name, value in stock.state_dict().items())
        assert components.keys() == {"vae", "scheduler"}
    pipeline = MHLADiTPipeline.from_pretrained(folder)
    with torch.no_grad():
        assert torch.equal(pipeline.transformer(**inputs()).sample, stock(**inputs()).sample)


def test_the_legacy_class_of_another_model_is_refused(tmp_path):
    folder = as_published_on_the_hub(dit_pipeline(tmp_path / "hub"))
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_type": "ada_norm_single"}))
    with pytest.raises(UserError, match="holds a Transformer2DModel; DiTTransformer2DModel and MHLADiT"):
        load_model(ModelOptions(pretrained=str(folder)), 10)


def test_an_original_release_file_is_a_start(tmp_path):
    weights = {name: value.bfloat16().float() for name, value in original().items() if name != "pos_embed"}
    weights["pos_embed"] = original()["pos_embed"]
    torch.save({name: value.bfloat16() for name, value in weights.items()}, tmp_path / "DiT.pt")
    options = {"pretrained": str(tmp_path / "DiT.pt"), "overrides": {"num_attention_heads": 2}}
    config = config_from_dict({"model": {**options, "attention": "softmax", "components": str(tmp_path / "pipe")}})
    dit_pipeline(tmp_path / "pipe")
    family, model = load_model(config.model, 10)
    components = load_components(config.model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert relative_error(output(model), written_out(weights, *original_inputs(), heads=2)) < 1e-5
    check_fit(family, model, components, 16, 3)
    said = []
    retrofit = ModelOptions(**options, mhla={"blocks": (2, 2)})
    model, components = load_model(retrofit, 3, said.append)[1], load_components(retrofit)
    assert model.mhla_config.blocks == (2, 2) and model.config.num_embeds_ada_norm == 3
    assert said == ["the label table of 10 classes is replaced by a new one of 3; all else is kept"]
    with pytest.raises(UserError, match="or name the pipeline with its VAE in model.components"):
        check_fit(family, model, components, 16, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "do not say how many heads"),
        ({"num_attention_heads": 2, "num_layers": 3}, "does not suit model.pretrained"),
        ({"num_attention_heads": 2, "dropuot": 0.1}, "does not suit model.pretrained"),
    ],
)
def test_an_original_file_that_does_not_fit_is_refused(tmp_path, overrides, message):
    torch.save(original(), tmp_path / "DiT.pt")
    with pytest.raises(UserError, match=message) as caught:
        load_model(ModelOptions(pretrained=str(tmp_path / "DiT.pt"), overrides=overrides), 10)
    assert "\n" not in str(caught.value)


def test_overrides_change_an_original_model(tmp_path):
    torch.save(original(), tmp_path / "DiT.pt")
    overrides = {"num_attention_heads": 2, "dropout": 0.25}
    model = load_model(ModelOptions(pretrained=str(tmp_path / "DiT.pt"), overrides=overrides), 10)[1]
    assert model.config.dropout == 0.25


@pytest.mark.parametrize("name", ["dit", "sana", "wan"])
def test_components_are_those_of_the_pipeline_without_its_transformer(tmp_path, name):
    parts = {"dit": lambda: {"vae": small_vae()}, "sana": sana_components, "wan": wan_components}[name]()
    transformer = parts.pop("transformer", None) or {"dit": small_dit, "wan": stock_transformer}[name]()
    folder = str(tmp_path / name)
    family_named(name).build_pipeline(transformer, parts).save_pretrained(folder)
    loaded = load_components(ModelOptions(family=name, components=folder))
    assert loaded.keys() == {part for part, value in parts.items() if value is not None} | {"scheduler"}
    assert load_components(ModelOptions(components=folder), only=("vae",)).keys() == {"vae"}
    assert not any(parameter.requires_grad for parameter in loaded["vae"].parameters())
    weights = loaded["vae"].state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in parts["vae"].state_dict().items())


@pytest.mark.parametrize("size", [18, 17, 15])
def test_a_size_that_the_vae_or_the_patches_would_cut_is_refused(tmp_path, size):
    options = ModelOptions(pretrained=str(dit_pipeline(tmp_path / "pipe")))
    model, components = load_model(options, 10)[1], load_components(options)
    check_fit(DIT, model, components, 16, 3)
    with pytest.raises(UserError, match=f"samples of {size}×{size} pixels; multiples of 4 are accepted .the VAE div"):
        check_fit(DIT, model, components, size, 3)


def test_components_that_cannot_be_had_are_told_by_their_key(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for place in (str(tmp_path), "nobody/nothing-of-that-name"):
        with pytest.raises(UserError, match=f"model.components '{place}' cannot be read") as caught:
            load_components(ModelOptions(components=place))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="model.components '/nowhere' is neither a folder nor a hub id"):
        load_components(ModelOptions(components="/nowhere"))


def test_a_pretrained_model_without_parts_is_one_that_can_be_had(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="model.pretrained 'nobody/nothing-of-that-name' cannot be read"):
        load_components(ModelOptions(pretrained="nobody/nothing-of-that-name"))


def test_no_module_is_imported_because_a_checkpoint_names_it(tmp_path, monkeypatch):
    folder = dit_pipeline(tmp_path / "pipe")
    (tmp_path / "weights_of_mine.py").write_text("raise SystemExit('imported')\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    index = folder / "model_index.json"
    original_index = json.loads(index.read_text())
    for entry, message in (
        ({"vae": ["weights_of_mine", "Thing"]}, "'weights_of_mine', which is not imported because a checkpoint"),
        ({"vae": ["subprocess", "Popen"]}, "cannot be read"),
        ({"vae": ["diffusers", "NoSuchClass"]}, "cannot be read"),
        ({"_class_name": ["pipeline", "Mine"]}, "is no pipeline of diffusers"),
        ({"_class_name": "AutoencoderKL"}, "is no pipeline of diffusers"),
    ):
        index.write_text(json.dumps(original_index | entry))
        with pytest.raises(UserError, match=message) as caught:
            load_components(ModelOptions(pretrained=str(folder)))
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:this model was trained with softmax")
def test_linear_attention_is_not_what_an_mhla_checkpoint_has(tmp_path):
    linear = MHLAConfig(blocks=(1, 1), learn_mixing=False, cpe=True, eps=1e-6)
    for name, config in {"mhla": MHLAConfig(), "one_block": MHLAConfig(blocks=(1, 1)), "linear": linear}.items():
        apply_mhla(small_dit(), config).save_pretrained(tmp_path / name)
    for name, mhla, changed in (
        ("mhla", {}, r"blocks=\[1, 1\], learn_mixing=False"),
        ("mhla", {"cpe": False}, r"blocks=\[1, 1\], learn_mixing=False"),
        ("one_block", {}, "learn_mixing=False"),
        ("linear", {"cpe": False}, "cpe=False"),
    ):
        with pytest.raises(UserError, match=f"already has MHLA attention .*, which {changed} would change"):
            load_model(ModelOptions(pretrained=str(tmp_path / name), attention="linear", mhla=mhla), 10)
    model = load_model(ModelOptions(pretrained=str(tmp_path / "linear"), attention="linear", mhla={"cpe": True}), 10)[1]
    assert model.mhla_config == linear


def test_a_model_without_attention_biases_starts_from_random_weights():
    options = ModelOptions(preset="DiT-S/2", overrides={"attention_bias": False, "num_layers": 1})
    model = load_model(options, 10)[1]
    assert model.transformer_blocks[0].attn1.to_q.bias is None


def test_a_pipeline_folder_without_its_transformer_is_refused(tmp_path):
    folder = dit_pipeline(tmp_path / "pipe")
    shutil.rmtree(folder / "transformer")
    with pytest.raises(UserError, match="cannot be read") as caught:
        load_model(ModelOptions(pretrained=str(folder)), 10)
    assert "\n" not in str(caught.value)
