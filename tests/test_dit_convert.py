"""The original DiT checkpoint format to diffusers and back, against DiT's forward pass written out on its own names."""

import argparse
import json
import math
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DiffusionPipeline, DiTPipeline, DiTTransformer2DModel
from dit_models import disturb, small_dit, small_vae
from safetensors.torch import load_file

from mhla_diffusion import MHLAConfig, MHLADiTTransformer2DModel
from mhla_diffusion.backbones import family_named
from mhla_diffusion.backbones.dit_release import original_config, position_table
from mhla_diffusion.convert import from_public, read_weights, to_public
from mhla_diffusion.errors import UserError

DIT = family_named("dit")
SCRIPT = Path(__file__).parents[1] / "scripts" / "convert.py"
HEADS = {"heads": "2"}


def sines_and_cosines(width, side):
    """The release's position table, as it computes it: numpy, float64, the column's half first."""
    columns, rows = np.meshgrid(np.arange(side, dtype=np.float32), np.arange(side, dtype=np.float32))

    def axis(positions):
        omega = np.arange(width // 4, dtype=np.float64)
        omega /= width / 4
        angles = np.einsum("m,d->md", positions.reshape(-1), 1.0 / 10000**omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    return torch.from_numpy(np.concatenate([axis(columns), axis(rows)], axis=1)).float()[None]


def original(width=16, depth=2, classes=10, side=4, patch=2, channels=4, out_channels=8, seed=0):
    """Random weights under the release's names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "x_embedder.proj": (width, channels, patch, patch),
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "final_layer.linear": (patch * patch * out_channels, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.attn.qkv": (3 * width, width),
            f"blocks.{i}.attn.proj": (width, width),
            f"blocks.{i}.mlp.fc1": (4 * width, width),
            f"blocks.{i}.mlp.fc2": (width, 4 * width),
            f"blocks.{i}.adaLN_modulation.1": (6 * width, width),
        }
    weights = {"pos_embed": sines_and_cosines(width, side)}
    weights["y_embedder.embedding_table.weight"] = torch.randn(classes + 1, width, generator=generator)
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))
        weights[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.1
    return weights


def written_out(weights, x, t, y, heads):
    """The release's forward pass in float64: `DiT.forward` of Peebles and Xie (2023) and the modules that it calls."""
    w = {name: value.double() for name, value in weights.items()}
    patch = w["x_embedder.proj.weight"].shape[-1]

    def linear(name, h):
        return F.linear(h, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(h):
        return F.layer_norm(h, h.shape[-1:], eps=1e-6)

    def modulate(h, shift, scale):
        return h * (1 + scale[:, None]) + shift[:, None]

    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float64) / 128)
    angles = t[:, None].double() * frequencies
    c = linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], dim=-1))
    c = linear("t_embedder.mlp.2", F.silu(c)) + w["y_embedder.embedding_table.weight"][y]

    h = F.conv2d(x.double(), w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch)
    h = h.flatten(2).mT + w["pos_embed"]
    for i in range(sum(name.endswith("attn.proj.bias") for name in w)):
        name = f"blocks.{i}"
        modulation = linear(f"{name}.adaLN_modulation.1", F.silu(c)).chunk(6, dim=1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        batch, tokens, width = h.shape
        qkv = linear(f"{name}.attn.qkv", modulate(norm(h), shift_msa, scale_msa))
        q, k, v = qkv.reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        a = ((q @ k.mT) / math.sqrt(width // heads)).softmax(-1) @ v
        h = h + gate_msa[:, None] * linear(f"{name}.attn.proj", a.transpose(1, 2).reshape(batch, tokens, width))
        m = F.gelu(linear(f"{name}.mlp.fc1", modulate(norm(h), shift_mlp, scale_mlp)), approximate="tanh")
        h = h + gate_mlp[:, None] * linear(f"{name}.mlp.fc2", m)
    shift, scale = linear("final_layer.adaLN_modulation.1", F.silu(c)).chunk(2, dim=1)
    h = linear("final_layer.linear", modulate(norm(h), shift, scale))
    side = math.isqrt(h.shape[1])
    h = h.reshape(len(h), side, side, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", h).reshape(len(h), -1, side * patch, side * patch)


def one_embedder(stock):
    """`stock` with the embedder of block 0 in every block."""
    first = stock.transformer_blocks[0].norm1.emb.state_dict()
    for block in stock.transformer_blocks:
        block.norm1.emb.load_state_dict(first)
    return stock


def inputs(classes=10, size=8):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 4, size, size, generator=generator)
    return x, torch.tensor([0, 1, 437, 999]), torch.tensor([0, 3, classes - 1, classes])


def output(model, classes=10, size=8):
    x, t, y = inputs(classes, size)
    with torch.no_grad():
        return model(x, timestep=t, class_labels=y).sample


def relative_error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


# From the original --------------------------------------------------------------------------------------------------


def test_the_converted_model_computes_what_the_architecture_says(tmp_path):
    weights = original()
    torch.save(weights, tmp_path / "dit.pt")
    from_public("dit", tmp_path / "dit.pt", tmp_path / "converted", heads=2)
    model = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "converted")
    assert model.mhla_config is None
    expected = written_out(weights, *inputs(), heads=2)
    assert relative_error(output(model), expected) < 1e-5
    assert relative_error(output(DIT.from_original(weights, HEADS)), expected) < 1e-5


@pytest.mark.parametrize(("width", "heads"), [(384, 6), (1152, 16)])
def test_heads_of_a_published_width_need_not_be_given(width, heads):
    weights = original(width=width, depth=1, classes=1000, side=2)
    model = DIT.from_original(weights)
    assert model.config.num_attention_heads == heads
    assert relative_error(output(model, 1000, 4), written_out(weights, *inputs(1000, 4), heads)) < 1e-5


@pytest.mark.parametrize(("size", "side"), [("S", 16), ("B", 16), ("L", 16), ("XL", 16), ("XL", 32)])
def test_the_published_sizes_are_those_of_the_presets(size, side):
    with torch.device("meta"):
        preset = DIT.build_model(f"DiT-{size}/2", sample_size=2 * side)
    weights = DIT.to_original(preset)[0]
    config = original_config(weights, {}, {}, DIT.presets)
    assert config == {name: preset.config[name] for name in config}


def test_the_position_table_is_that_of_the_release_and_of_diffusers_to_the_last_bit():
    for width, side in ((16, 4), (1152, 16), (384, 32)):
        assert torch.equal(position_table(width, side), sines_and_cosines(width, side))
    assert torch.equal(position_table(16, 4), small_dit().pos_embed.pos_embed)


def test_stock_models_have_other_timestep_frequencies_and_keep_them():
    stock = disturb(small_dit())
    weights, metadata = DIT.to_original(one_embedder(stock))
    assert json.loads(metadata["config"])["freq_shift"] == 1
    assert torch.equal(output(DIT.from_original(weights, metadata)), output(one_embedder(stock)))
    assert relative_error(output(DIT.from_original(weights, HEADS)), output(stock).double()) > 1e-3


def test_embedders_that_differ_are_refused():
    said = "one embedder for all blocks, but transformer_blocks.1.norm1.emb.* differs .* models read from an original"
    with pytest.raises(UserError, match=said):
        DIT.to_original(disturb(small_dit()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_embedder.proj.weight": None}, "not the weights of an original DiT: they lack x_embedder.proj.weight"),
        ({"pos_embed": None}, "not the weights of an original DiT: they lack pos_embed"),
        ({"pos_embed": torch.zeros(1, 16, 16)}, "not DiT's fixed sine-cosine table"),
        ({"pos_embed": torch.zeros(1, 15, 16)}, "not DiT's fixed sine-cosine table"),
        ({"blocks.1.attn.qkv.bias": None}, "lack 3 tensors, such as blocks.1.attn.qkv.bias"),
        ({"blocks.1.mlp.fc1.bias": torch.ones(5)}, r"have blocks.1.mlp.fc1.bias of shape \(5,\), .*needs \(64,\)"),
        ({"blocks.0.attn.w.weight": torch.ones(1)}, "no weight blocks.0.attn.w.weight"),
        ({"extra": torch.ones(1)}, "no weight extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, message):
    weights = {name: value for name, value in (original() | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        DIT.from_original(weights, HEADS)


def test_an_unknown_width_asks_for_the_heads():
    with pytest.raises(UserError, match="how many heads their width of 16 is cut into .*; give heads"):
        DIT.from_original(original())


# And back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["dit.pt", "training.pt", "dit.safetensors"])
def test_there_and_back_are_the_same_bits(tmp_path, name, dtype):
    weights = {key: value.to(dtype) for key, value in original(width=384, depth=1).items()}
    given = weights
    if name == "training.pt":  # what the release's train.py writes
        options = argparse.Namespace(model="DiT-S/2", global_batch_size=256)
        given = {"model": original(), "ema": weights, "opt": {"state": {}, "param_groups": []}, "args": options}
    torch.save(given, tmp_path / "dit.pt")
    from_public("dit", tmp_path / "dit.pt", tmp_path / "converted")
    to_public("dit", tmp_path / "converted", tmp_path / ("back" + Path(name).suffix))
    back = read_weights(tmp_path / ("back" + Path(name).suffix))[0]
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        assert back[key].dtype == value.dtype and torch.equal(back[key], value), key
    if name.endswith(".pt"):
        assert torch.load(tmp_path / "back.pt", weights_only=True).keys() == weights.keys()


FIELDS = [
    {},
    {"cpe": True, "gate": True, "layers": (1,)},
    {"mixing": "separable", "blocks": (2, 3), "head_norm": True},
    {"feature_map": "hedgehog", "normalize": False, "eps": 1e-4, "blocks": (1, 3)},
    {"feature_map": "positive_random"},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_mhla_rides_along_both_ways(tmp_path, fields):
    torch.manual_seed(0)
    shape = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "out_channels": 8, "sample_size": 8,
             "num_embeds_ada_norm": 10, "share_embedder": True, "freq_shift": 0}  # fmt: skip
    model = MHLADiTTransformer2DModel(**shape, in_channels=4, mhla=MHLAConfig(**{"blocks": (2, 2), **fields}).to_dict())
    disturb(model).eval().save_pretrained(tmp_path / "model")
    to_public("dit", tmp_path / "model", tmp_path / "dit.safetensors")
    assert any(".attn.mhla.mixing.weights.0" in name for name in load_file(tmp_path / "dit.safetensors"))
    from_public("dit", tmp_path / "dit.safetensors", tmp_path / "back")
    back = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "back")
    assert back.mhla_config == model.mhla_config
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in back.state_dict().items())
    assert torch.equal(output(back), output(model))


def retrofitted(**fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MHLADiTTransformer2DModel.from_base(one_embedder(small_dit()), MHLAConfig(**fields))


def test_mhla_is_recognised_from_the_weights_as_far_as_they_say_it():
    for fields in FIELDS[:3]:
        fields = {"blocks": (2, 2), **fields}
        weights = DIT.to_original(retrofitted(**fields))[0]
        assert DIT.from_original(weights, HEADS).mhla_config == MHLAConfig(**fields, eps=1e-6)
    weights = DIT.to_original(retrofitted(blocks=(3, 2)))[0]
    with pytest.raises(UserError, match="mix 6 blocks, which are not 2×2; give blocks: two counts"):
        DIT.from_original(weights, HEADS)
    assert DIT.from_original(weights, HEADS, {"blocks": (3, 2)}).mhla_config.blocks == (3, 2)


def test_a_pt_file_is_not_written_where_it_would_lose_something(tmp_path):
    one_embedder(small_dit(num_attention_heads=6, attention_head_dim=64)).save_pretrained(tmp_path / "stock")
    with pytest.raises(UserError, match="cannot hold all of this model .*freq_shift=1 would become 0.*safetensors"):
        to_public("dit", tmp_path / "stock", tmp_path / "stock.pt")
    assert not (tmp_path / "stock.pt").exists()
    to_public("dit", tmp_path / "stock", tmp_path / "stock.safetensors")
    from_public("dit", tmp_path / "stock.safetensors", tmp_path / "back")
    back = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "back")
    assert torch.equal(output(back), output(DiTTransformer2DModel.from_pretrained(tmp_path / "stock")))


# The command, and pipelines -----------------------------------------------------------------------------------------


def stock_pipeline(folder, transformer=None):
    DiTPipeline(transformer or small_dit(), small_vae(), DDIMScheduler()).save_pretrained(folder)
    return folder


def test_the_command_makes_a_pipeline_that_generates(tmp_path, capsys, monkeypatch):
    torch.save(original(), tmp_path / "dit.pt")
    stock_pipeline(tmp_path / "stock")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import convert

    arguments = ["dit", tmp_path / "dit.pt", tmp_path / "out", "--components", tmp_path / "stock"]
    assert convert.main([*map(str, arguments), "--heads", "3"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: the weights do not say how many heads")
    assert convert.main([*map(str, arguments), "--heads", "2"]) == 0
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert relative_error(output(pipeline.transformer), written_out(original(), *inputs(), heads=2)) < 1e-5
    assert len(pipeline([0, 9], num_inference_steps=2).images) == 2


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    torch.save({**original(), "hook": subprocess.run}, tmp_path / "dit.pt")
    with pytest.raises(UserError, match="is damaged, or holds more than tensors"):
        from_public("dit", tmp_path / "dit.pt", tmp_path / "out", heads=2)


def test_blocks_of_a_model_without_mhla_cannot_be_resized(tmp_path):
    torch.save(original(), tmp_path / "dit.pt")
    small_dit().save_pretrained(tmp_path / "stock")
    with pytest.raises(UserError, match=r"resize_blocks=\(2, 2\) is given, but the model has no MHLA layers"):
        from_public("dit", tmp_path / "dit.pt", tmp_path / "out", resize_blocks=[2, 2], heads=2)
    with pytest.raises(UserError, match=r"resize_blocks=\(2, 2\) is given, but the model has no MHLA layers"):
        to_public("dit", tmp_path / "stock", tmp_path / "out.safetensors", resize_blocks=[2, 2])


@pytest.mark.parametrize("emptied", [False, True])
def test_a_pipeline_folder_without_a_transformer_is_refused(tmp_path, emptied):
    folder = stock_pipeline(tmp_path / "pipeline")
    shutil.rmtree(folder / "transformer")
    if emptied:
        (folder / "transformer").mkdir()
    with pytest.raises(UserError, match="is no transformer's folder") as caught:
        to_public("dit", folder, tmp_path / "out.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"config": "{"}, "metadata of the weights has config='{'; a dict is expected"),
        ({"config": "[1]"}, "a dict is expected"),
        ({"config": '{"mhla": [1]}'}, r"metadata of the weights has mhla=\[1\]; a dict is expected"),
        ({"config": '{"num_heads": 2}'}, "describe no MHLADiTTransformer2DModel .*num_heads"),
        ({"config": '{"num_attention_heads": "two"}'}, "describe no MHLADiTTransformer2DModel"),
        ({"heads": "two"}, "metadata of the weights has heads='two'; a int is expected"),
        ({"heads": "-2"}, "heads=-2; 1 or more is accepted"),
    ],
)
def test_odd_metadata_is_told_in_one_sentence(metadata, message):
    with pytest.raises(UserError, match=message) as caught:
        DIT.from_original(original(), metadata)
    assert "\n" not in str(caught.value)
