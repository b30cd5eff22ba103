"""The original Wan checkpoint format, with MHLA layers and without, to diffusers and back."""

import ast
import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wan_models import inputs, mhla_transformer, small_components, stock_transformer

from mhla_diffusion import MHLAWanTransformer3DModel
from mhla_diffusion.backbones import family_named
from mhla_diffusion.convert import from_public, read_weights, to_public
from mhla_diffusion.errors import UserError

WAN = family_named("wan")
SCRIPT = Path(__file__).parents[1] / "scripts" / "convert.py"
LAYERS = sorted((Path(__file__).parent / "fixtures" / "wan").glob("*.safetensors"))
MIXING = "blocks.{}.self_attn.block_attn.conv.weight"


def published(**fields):
    """A small model as the released ones are, its weights under their original names."""
    model = mhla_transformer(**{"feature_map": "relu_eps", **fields})
    return model, WAN.to_original(model)[0]


def output(model, grid=(3, 4, 5)):
    with torch.no_grad():
        return model(**inputs(grid)).sample


# The released layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", LAYERS, ids=lambda file: file.stem)
def test_a_released_layer_reproduces_its_recorded_output(file, tmp_path):
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        layer = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    given, recorded = layer.pop("input"), layer.pop("output")
    dim, heads, grid = int(metadata["dim"]), int(metadata["heads"]), ast.literal_eval(metadata["grid"])
    around = stock_transformer(num_attention_heads=heads, attention_head_dim=dim // heads, num_layers=1)
    weights = {k: v for k, v in WAN.to_original(around)[0].items() if "self_attn" not in k} | layer
    save_file(weights, tmp_path / "wan.safetensors", metadata)

    from_public("wan", tmp_path / "wan.safetensors", tmp_path / "converted")
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "converted")

    options = ast.literal_eval(metadata["options"])
    assert model.mhla_config.blocks == ast.literal_eval(metadata["blocks"])
    assert (model.mhla_config.gate, model.mhla_config.cpe) == (options["is_gated"], options["is_lepe"])
    attn = model.blocks[0].attn1
    attn.processor.grid = grid
    rotary = model.rope(torch.zeros(1, 4, grid[0], 2 * grid[1], 2 * grid[2]))
    with torch.no_grad():
        out = attn(given, None, None, tuple(angles.flatten(1, 3) for angles in rotary))
    assert (out - recorded).abs().max() < 1e-5


# From the original --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("image", [False, True])
def test_stock_names_are_those_that_diffusers_converts(image, prefix):
    arguments = {"image_dim": 20, "added_kv_proj_dim": 24, "in_channels": 9} if image else {}
    stock = stock_transformer(**arguments)
    weights = {prefix + name: value for name, value in WAN.to_original(stock)[0].items()}
    theirs = convert_wan_transformer_to_diffusers(dict(weights))
    ours = WAN.from_original(weights, {"heads": "2"}).state_dict()
    assert ours.keys() == theirs.keys() == stock.state_dict().keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("layers", ["all", "hybrid", [0, 2]])
@pytest.mark.parametrize("fields", [{}, {"cpe": True}, {"gate": False, "head_norm": True}])
def test_layers_gate_and_position_encoding_are_recognised_from_the_weights(layers, fields):
    model, weights = published(layers=layers, **fields)
    read = WAN.from_original(weights, mhla={"blocks": (2, 2, 3)})
    assert read.mhla_config == model.mhla_config
    assert torch.equal(output(read), output(model))


@pytest.mark.parametrize("blocks", [(3, 5, 10), (1, 1, 1)])
def test_published_block_counts_need_not_be_given(blocks):
    model, weights = published(blocks=blocks)
    assert weights[MIXING.format(0)].shape == (math.prod(blocks), math.prod(blocks), 1, 1)
    assert WAN.from_original(weights).mhla_config.blocks == blocks


def test_the_published_shape_is_read_from_the_weights():
    with torch.device("meta"):
        model = WAN.build_model("Wan2.1-1.3B", WAN.default_config.to_dict())
    read = WAN.from_original(WAN.to_original(model)[0])
    config = {name: value for name, value in model.config.items() if name[0] != "_"}
    assert {name: read.config[name] for name in config} == {
        **config,
        "mhla": {**config["mhla"], "feature_map": "relu_eps"},
    }


@pytest.mark.parametrize(
    ("change", "mhla", "message"),
    [
        ({}, {}, "mix 12 blocks but do not say how many"),
        ({}, {"blocks": (2, 2, 2)}, r"blocks=\(2, 2, 2\) are 8 blocks, but the weights mix 12"),
        ({"patch_embedding.weight": None}, {}, "not the weights of an original Wan transformer: they lack patch_emb"),
        ({"blocks.1.self_attn.g.bias": None}, {"blocks": (2, 2, 3)}, "lack 1 tensors, such as blocks.1.self_attn.g"),
        ({MIXING.format(2): torch.ones(8, 8, 1, 1)}, {"blocks": (2, 2, 3)}, "blocks.2.self_attn.block_attn.conv"),
        ({"blocks.0.self_attn.w.weight": torch.ones(1)}, {"blocks": (2, 2, 3)}, "no weight blocks.0.self_attn.w.w"),
        ({"extra": torch.ones(1)}, {"blocks": (2, 2, 3)}, "no weight extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, mhla, message):
    weights = published()[1] | change
    with pytest.raises(UserError, match=message):
        WAN.from_original({k: v for k, v in weights.items() if v is not None}, mhla=mhla)


# And back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan.safetensors", "wan.pth", "nested.pth", "shards"])
def test_there_and_back_are_the_same_bits(tmp_path, name):
    _, weights = published(layers="hybrid", cpe=True)
    weights = {k: v.to(torch.bfloat16) if "ffn" in k else v for k, v in weights.items()}
    source = tmp_path / name
    if name == "shards":
        source.mkdir()
        for part in range(2):
            save_file(dict(list(weights.items())[part::2]), source / f"model-{part}.safetensors")
    elif name.endswith(".pth"):
        torch.save({"state_dict": weights, "step": 3} if "nested" in name else weights, source)
    else:
        save_file(weights, source)
    report = from_public("wan", source, tmp_path / "converted", blocks=(2, 2, 3))
    assert "MHLA with blocks (2, 2, 3) in 2 of 3 layers" in report
    to_public("wan", tmp_path / "converted", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        assert back[key].dtype == value.dtype and torch.equal(back[key], value), key


def test_what_the_weights_do_not_say_is_kept_in_the_files_metadata(tmp_path):
    model = mhla_transformer(feature_map="relu", normalize=True, mixing="full", locality=0.5, eps=1e-4)
    model.save_pretrained(tmp_path / "model")
    to_public("wan", tmp_path / "model", tmp_path / "wan.safetensors")
    weights, metadata = read_weights(tmp_path / "wan.safetensors")
    read = WAN.from_original(weights, metadata)
    assert read.mhla_config == model.mhla_config
    assert torch.equal(output(read), output(model))


def test_separable_mixing_is_written_as_the_full_matrix_it_stands_for():
    model, weights = published(mixing="separable")
    torch.testing.assert_close(output(WAN.from_original(weights, mhla={"blocks": (2, 2, 3)})), output(model))
    read = WAN.from_original(*WAN.to_original(model))
    assert read.mhla_config == dataclasses.replace(model.mhla_config, mixing="full")
    torch.testing.assert_close(output(read), output(model))
    assert model.mhla_config.mixing == "separable"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"config": "{"}, "metadata of the weights has config='{'; a dict is expected"),
        ({"config": '{"layers": 2}'}, "describe no MHLAWanTransformer3DModel .*layers"),
        ({"blocks": "(2, 2"}, r"metadata of the weights has blocks='\(2, 2'; a tuple is expected"),
        ({"blocks": "('a', 'b')"}, "blocks=.* must be one to three positive integers"),
        ({"options": "[3]"}, "options=.*; a dict is expected"),
    ],
)
def test_odd_metadata_is_told_in_one_sentence(metadata, message):
    weights = published()[1]
    with pytest.raises(UserError, match=message) as caught:
        WAN.from_original(weights, metadata)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "message"),
    [("two", "heads='two'; a int"), ("0", "heads=0; 1 or more"), ("9999", "no multiple of")],
)
def test_odd_numbers_of_heads_are_told_in_one_sentence(heads, message):
    weights = WAN.to_original(stock_transformer())[0]
    with pytest.raises(UserError, match=message):
        WAN.from_original(weights, {"heads": heads})


def test_attention_that_the_format_does_not_know_is_refused():
    for fields in ({"feature_map": "hedgehog"}, {"rope": "before"}):
        with pytest.raises(UserError, match="has no original format"):
            WAN.to_original(mhla_transformer(**fields))
    with pytest.raises(UserError, match="^sana has no other public checkpoint format"):
        family_named("sana").to_original(None)


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_makes_a_pipeline_that_generates(tmp_path, capsys):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import convert
    finally:
        sys.path.pop(0)
    model, weights = published(layers="hybrid")
    save_file(weights, tmp_path / "wan.safetensors")
    WAN.build_pipeline(stock_transformer(), small_components()).save_pretrained(tmp_path / "stock")
    arguments = ["wan", str(tmp_path / "wan.safetensors"), str(tmp_path / "out")]
    assert convert.main([*arguments, "--components", str(tmp_path / "stock")]) == 2
    assert "\nerror: the weights mix 12 blocks" in capsys.readouterr().err
    arguments += ["--components", str(tmp_path / "stock"), "--blocks", "2", "2", "3"]
    assert convert.main([*arguments, "--resize-blocks", "1", "2", "2"]) == 0
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert pipeline.transformer.mhla_config.blocks == (1, 2, 2)
    frames = pipeline("a cat", height=16, width=32, num_frames=5, num_inference_steps=2, output_type="np").frames
    assert frames.shape == (1, 5, 16, 32, 3)
    assert convert.main(["wan", str(tmp_path / "out"), str(tmp_path / "back.safetensors")]) == 0
    assert json.loads(read_weights(tmp_path / "back.safetensors")[1]["config"])["mhla"]["layers"] == "hybrid"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SanaPipeline", "are of a SanaPipeline, which takes no MHLAWanTransformer3DModel"),
        ("DiTPipeline", "are of a DiTPipeline, which takes no MHLAWanTransformer3DModel"),
        ("WanImageToVideoPipeline", "cannot be read"),  # of the family, but with nothing in it
    ],
)
def test_components_of_another_family_are_refused(tmp_path, name, message):
    save_file(published()[1], tmp_path / "wan.safetensors")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model_index.json").write_text(json.dumps({"_class_name": name}))
    with pytest.raises(UserError, match=message):
        from_public("wan", tmp_path / "wan.safetensors", tmp_path / "out", str(tmp_path / "parts"), (2, 2, 3))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not weights", "is damaged, or holds more than tensors"),
        ({"hook": subprocess.run}, "is damaged, or holds more than tensors"),
        ({"step": 3}, "holds no state dict"),
    ],
)
def test_files_that_are_no_weights_are_refused(tmp_path, content, message):
    file = tmp_path / "wan.pth"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UserError, match=message):
        from_public("wan", file, tmp_path / "out")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        from_public("wan", tmp_path / "absent.safetensors", tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        from_public("wan", file, tmp_path)
