"""MHLAConfig and MHLAProcessor: what they accept, what a layer computes, how a model's processors are set."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor2_0, SanaLinearAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed
from dit_models import dense_mhla, disturb, inputs, small_dit
from operator_reference import relative_error
from safetensors import safe_open

from mhla_diffusion import MHLAConfig, MHLADiTTransformer2DModel, MHLAProcessor, apply_mhla
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline

WAN_LAYERS = sorted((Path(__file__).parent / "fixtures" / "wan").glob("*.safetensors"))
EVERYTHING = {"cpe": True, "gate": True, "head_norm": True}


def attention_layer(seed=0, dim=16, heads=2, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    layer = Attention(query_dim=dim, heads=heads, dim_head=dim // heads, bias=True, **options)
    return layer.to(dtype).eval()


def mhla_layer(grid=(5, 4), seed=0, dtype=torch.float32, dim=16, heads=2, **fields):
    """A diffusers attention layer with a bound processor, told its grid, as a block would."""
    layer = attention_layer(seed, dim, heads, dtype)
    layer.set_processor(MHLAProcessor.for_layer(layer, MHLAConfig(**{"blocks": (2, 3), **fields})))
    layer.processor.grid = grid
    return layer


def tokens(grid=(5, 4), batch=2, dim=16, seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, grid[0] * grid[1], dim, generator=generator, dtype=torch.float64).to(dtype)


def mhla_dit(config=None, **arguments):
    return MHLADiTTransformer2DModel(**small_dit(**arguments).config, mhla=(config or MHLAConfig()).to_dict()).eval()


# The config -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        MHLAConfig(),
        MHLAConfig(blocks=None, layers=[3, 0], **EVERYTHING),
        MHLAConfig((3, 5, 10), "separable", "hedgehog", False, 1e-15, 0.5, False, layers="hybrid", rope="before"),
        MHLAConfig(layers=0.5, spacing="last"),
    ],
)
def test_a_config_survives_json(config):
    assert MHLAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_names_every_field_in_its_dict():
    assert set(MHLAConfig().to_dict()) == {field.name for field in dataclasses.fields(MHLAConfig)}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"feature_map": "rellu"},
            r"feature_map='rellu' is unknown \(did you mean 'relu'\?\); known: relu, .*hedgehog",
        ),
        ({"mixing": "dense"}, "mixing='dense' is unknown; known: full, separable"),
        ({"blocks": (4, 0)}, r"blocks=\(4, 0\) must be one to three positive integers"),
        ({"blocks": 4}, "blocks=4 must be one to three positive integers"),
        ({"blocks": (2, 2, 2, 2)}, "blocks=.* must be one to three"),
        ({"blocks": (2.0, 2)}, "blocks=.* must be one to three positive integers"),
        ({"eps": 0}, "eps=0 must be a positive number"),
        ({"eps": "small"}, "eps='small' must be a positive number"),
        ({"locality": 1.5}, "locality=1.5 must lie between 0 and 1"),
        ({"locality": -0.1}, "locality=-0.1 must lie between 0 and 1"),
        ({"locality": "local"}, "locality='local' must lie between 0 and 1"),
        ({"cpe": 1}, "cpe=1 must be True or False"),
        ({"normalize": "no"}, "normalize='no' must be True or False"),
        ({"layers": "some"}, "layers='some' must be 'all', 'hybrid', a share or a list of layer indices"),
        ({"layers": []}, r"layers=\[\] must be .* non-empty list"),
        ({"layers": [1, 1]}, r"layers=\[1, 1\] names a layer twice"),
        ({"layers": [0, 1.5]}, r"layers=\[0, 1.5\] must be"),
        ({"layers": 1.5}, "layers=1.5 as a share of the layers must lie above 0 and not above 1"),
        ({"spacing": "odd"}, "spacing='odd' must be 'even', 'first' or 'last'"),
        ({"feature_map": "identity", "normalize": True}, "'identity' has negative features.*give normalize=False too"),
        ({"rope": "never"}, "rope='never' must be 'after' or 'before'"),
        ({"feature_maps": "relu"}, r"no field 'feature_maps' \(did you mean 'feature_map'\?\); known: blocks, mixing"),
    ],
)
def test_a_wrong_field_is_refused_where_it_is_typed(fields, sentence):
    for make in (MHLAConfig.from_dict, lambda fields: MHLAProcessor(**fields)):
        with pytest.raises(UserError, match=sentence):
            make(fields)


def test_identity_features_are_refused_where_the_family_normalises():
    with pytest.raises(UserError, match="'identity' has negative features, whose sums cannot normalise"):
        small = MHLADiTTransformer2DModel(**small_dit().config)
        small.set_attn_processor(MHLAProcessor(feature_map="identity"))
    mhla_dit(MHLAConfig(feature_map="identity", normalize=False))


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        (MHLAProcessor, r"processor is the class MHLAProcessor; make one of it: MHLAProcessor\(\)"),
        (None, "processor=None must be an attention processor such as MHLAProcessor"),
        ("mhla", "processor='mhla' must be an attention processor"),
    ],
)
def test_what_is_no_processor_is_refused(processor, sentence):
    pipeline = MHLADiTPipeline(small_dit(), None, DDIMScheduler())
    for target in (mhla_dit(), pipeline):
        with pytest.raises(UserError, match=sentence):
            target.set_attn_processor(processor)


def test_a_processor_takes_a_config_or_fields():
    with pytest.raises(UserError, match="either a config or fields, not both .got cpe"):
        MHLAProcessor(MHLAConfig(), cpe=True)
    with pytest.raises(UserError, match="config='relu' must be an MHLAConfig"):
        MHLAProcessor("relu")
    with pytest.raises(UserError, match="config=.'cpe': True. must be an MHLAConfig or None"):
        apply_mhla(small_dit(), {"cpe": True})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"blocks": (2, 2, 2)}, r"blocks=\(2, 2, 2\) has 3 axes, but MHLADiTTransformer2DModel needs 2 counts"),
        ({"blocks": (4,)}, r"blocks=\(4,\) has 1 axes"),
        ({"layers": [0, 2]}, r"layers=\[0, 2\] names layer 2, but the model has layers 0 to 1"),
        ({"layers": [-1]}, r"layers=\[-1\] names layer -1, but the model has layers 0 to 1"),
        ({"layers": "hybrid"}, "layers='hybrid' is not defined for this model family; give a list"),
    ],
)
def test_a_config_that_does_not_suit_the_model_is_refused_and_changes_nothing(fields, sentence):
    model = small_dit()
    before = model(**inputs()).sample, dict(model.config)
    with pytest.raises(UserError, match=sentence):
        apply_mhla(model, MHLAConfig(**fields))
    assert type(model) is DiTTransformer2DModel and dict(model.config) == before[1]
    assert torch.equal(model(**inputs()).sample, before[0])

    model = mhla_dit(MHLAConfig(blocks=(2, 2)))
    before = model(**inputs()).sample, model.mhla_config
    with pytest.raises(UserError, match=sentence):
        model.set_attn_processor(MHLAProcessor(**fields))
    assert torch.equal(model(**inputs()).sample, before[0]) and model.mhla_config == before[1]


def test_an_unbound_processor_says_what_to_call():
    layer = attention_layer()
    layer.set_processor(MHLAProcessor())
    with pytest.raises(UserError, match="without weights; set it on a model with pipe.set_attn_processor"):
        layer(tokens())


def test_a_grid_with_fewer_tokens_than_blocks_is_told_once(recwarn):
    layers = [mhla_layer(grid=(3, 7), blocks=blocks) for blocks in ((3, 7), (2, 11), (2, 11))]
    for layer in (*layers, *layers):
        layer(tokens((3, 7)))
    (told,) = [str(warning.message) for warning in recwarn if "blocks" in str(warning.message)]
    assert told.startswith("blocks=(2, 11) makes 22 blocks, but the token grid (3, 7) has only 21 tokens")


def test_a_bound_layer_called_alone_says_that_it_lacks_the_grid():
    layer = mhla_layer(grid=None)
    with pytest.raises(UserError, match="not told the token grid; call the transformer or its block"):
        layer(tokens())
    layer.processor.grid = (5, 5)
    with pytest.raises(UserError, match=r"20 tokens do not fill the token grid \(5, 5\)"):
        layer(tokens())
    layer.processor.grid = (5, 4)
    with pytest.raises(UserError, match="takes no encoder_hidden_states"):
        layer(tokens(), encoder_hidden_states=tokens())


# What a layer computes ------------------------------------------------------------------------------------------------


def hedgehog(layer):
    weights = layer.processor.feature_map.query_weight, layer.processor.feature_map.key_weight

    def phi(x, weight):
        exponents = torch.cat([x @ weight.T, -x @ weight.T], dim=-1).exp()
        return exponents / exponents.sum(-1, keepdim=True)

    return lambda q, k, head: (phi(q, weights[0][head]), phi(k, weights[1][head]))


def random_features(layer):
    rows, dim = layer.processor.feature_map.projection, layer.processor.feature_map.head_dim

    def phi(x, head):
        x = x / dim**0.25
        return (x @ rows[head].T - x.square().sum(-1, keepdim=True) / 2).exp() / dim**0.5

    return lambda q, k, head: (phi(q, head), phi(k, head))


def pointwise(phi):
    return lambda layer: lambda q, k, head: (phi(q), phi(k))


FEATURES = {
    "relu": pointwise(lambda x: x * (x > 0)),
    "relu_eps": pointwise(lambda x: x * (x > 0) + 1e-6),
    "elu": pointwise(lambda x: torch.where(x > 0, x + 1, x.exp())),
    "identity": pointwise(lambda x: x),
    "positive_random": random_features,
    "hedgehog": hedgehog,
}


@pytest.mark.parametrize("extras", [{}, *({name: True} for name in EVERYTHING), EVERYTHING], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_layer_equals_its_dense_form(extras, normalize):
    layer = disturb(mhla_layer(dtype=torch.float64, normalize=normalize, eps=1e-3, **extras))
    x = tokens(dtype=torch.float64)
    expected = dense_mhla(layer.state_dict(), x, 2, (5, 4), (2, 3), normalize=normalize, eps=1e-3)
    assert relative_error(layer(x), expected) < 1e-12


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_map_in_a_layer_equals_its_dense_form(name):
    # Random features are stabilised by factors that cancel only without eps; identity has no sign to normalise by.
    normalize = name != "identity"
    layer = disturb(mhla_layer(dtype=torch.float64, feature_map=name, normalize=normalize, eps=1e-15, head_norm=True))
    x = tokens(dtype=torch.float64)
    features = FEATURES[name](layer)
    expected = dense_mhla(layer.state_dict(), x, 2, (5, 4), (2, 3), features, normalize=normalize, eps=1e-15)
    assert relative_error(layer(x), expected) < 1e-10


def test_a_separable_layer_equals_the_dense_form_of_the_kronecker_product():
    layer = disturb(mhla_layer(dtype=torch.float64, mixing="separable", cpe=True))
    x = tokens(dtype=torch.float64)
    assert [tuple(w.shape) for w in layer.processor.mixing.weights] == [(2, 2), (3, 3)]
    expected = dense_mhla(layer.state_dict(), x, 2, (5, 4), (2, 3))
    assert relative_error(layer(x), expected) < 1e-12


@pytest.mark.parametrize("path", WAN_LAYERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("fused", [False, True])
def test_released_wan_layers_are_reproduced(path, fused):
    with safe_open(path, "pt") as file:
        about = {name: ast.literal_eval(value) for name, value in file.metadata().items()}
        stored = {name.removeprefix("blocks.0.self_attn."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    x, expected = stored.pop("input"), stored.pop("output")
    dim, heads, grid = about["dim"], about["heads"], about["grid"]
    options = about["options"]

    layer = WanAttention(dim, heads, dim // heads, eps=about["eps"])
    config = MHLAConfig(
        blocks=about["blocks"],
        normalize=options["normalize_out"],
        gate=options["is_gated"],
        cpe=options["is_lepe"],
        head_norm=True,
    )
    layer.set_processor(MHLAProcessor.for_layer(layer, config))
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "g": "processor.gate"}
    names |= {"g_norm": "processor.head_norm", "lepe": "processor.cpe"}
    mixing = stored.pop("block_attn.conv.weight")[:, :, 0, 0]
    weights = {}
    for name, weight in stored.items():
        part, kind = name.rsplit(".", 1)
        weights[f"{names.get(part, part)}.{kind}"] = weight
    layer.load_state_dict({**weights, "processor.mixing.weights.0": mixing})
    if fused:
        layer.fuse_projections()

    rotary = WanRotaryPosEmbed(dim // heads, (1, 2, 2), 1024)(torch.zeros(1, 1, grid[0], 2 * grid[1], 2 * grid[2]))
    layer.processor.grid = grid
    assert relative_error(layer(x, rotary_emb=rotary), expected) < 1e-4


def test_the_reference_layers_are_there():
    assert len(WAN_LAYERS) == 3


def test_gate_and_position_encoding_leave_the_output_unchanged_when_inserted():
    x = tokens()
    plain, position, gated = (mhla_layer(**fields)(x) for fields in ({}, {"cpe": True}, {"gate": True}))
    assert torch.equal(position, plain)
    assert relative_error(gated, plain) < 1e-6


def test_head_norm_gives_every_head_unit_mean_square():
    layer = mhla_layer(head_norm=True)
    layer.to_out = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    heads = layer(tokens()).unflatten(-1, (2, 8))
    assert torch.allclose(heads.square().mean(-1), torch.ones(2, 20, 2), atol=1e-3)
    with torch.no_grad():
        layer.processor.head_norm.weight.copy_(torch.arange(8.0))
    assert torch.allclose(layer(tokens()).unflatten(-1, (2, 8)), heads * torch.arange(8.0))


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("kind", ["full", "separable"])
def test_mixing_learns_unless_told_not_to(kind, learn):
    layer = mhla_layer(mixing=kind, learn_mixing=learn, cpe=True, gate=True)
    layer(tokens()).square().sum().backward()
    assert all(
        (weight.grad is not None and weight.grad.abs().sum() > 0) == learn for weight in layer.processor.mixing.weights
    )
    assert layer.processor.cpe.weight.grad.abs().sum() > 0 and layer.processor.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grid", [(5, 4), (1, 7), (3, 5, 4), (1, 1, 6)])
def test_position_encoding_is_a_depthwise_convolution_in_any_memory_format(grid, batch):
    layer = disturb(mhla_layer(grid, blocks=(2,) * len(grid), cpe=True))
    conv = layer.processor.cpe
    x = torch.randn(batch, *grid, 16, requires_grad=True)
    out = conv(x.movedim(-1, 1))
    gradients = torch.autograd.grad(out.square().sum(), [x, conv.weight, conv.bias])
    exact = [t.detach().double().requires_grad_() for t in (x, conv.weight, conv.bias)]
    padded = torch.nn.functional.pad(exact[0], (0, 0) + (1, 1) * len(grid))
    for axis in range(1, len(grid) + 1):
        padded = padded.unfold(axis, 3, 1)  # (B, grid…, C, taps…)
    expected = (padded * exact[1][:, 0]).flatten(len(grid) + 2).sum(-1) + exact[2]
    assert relative_error(out.movedim(1, -1), expected) < 1e-6
    for found, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        assert found.shape == wanted.shape and relative_error(found, wanted) < 1e-5
    assert gradients[1].stride() == conv.weight.stride()  # else DistributedDataParallel warns


def test_fused_projections_are_used():
    layer = mhla_layer(cpe=True)
    x = tokens()
    before = layer(x)
    layer.fuse_projections()
    torch.nn.init.zeros_(layer.to_q.weight)  # no longer read
    assert relative_error(layer(x), before) < 1e-6


# Precision ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_float16_is_as_exact_as_the_stock_linear_attention(scale):
    x = (tokens(dim=32) * scale).half()
    stock = attention_layer(dim=32, heads=4, dtype=torch.float16)
    stock.set_processor(SanaLinearAttnProcessor2_0())
    ours = mhla_layer(dim=32, heads=4, dtype=torch.float16, locality=0.0)
    exact = mhla_layer(dim=32, heads=4, dtype=torch.float16, locality=0.0).double()
    expected = exact(x.double())
    result = ours(x)
    assert result.dtype == torch.float16 and result.isfinite().all()
    assert relative_error(result, expected) <= 1.2 * relative_error(stock(x), expected) + 1e-4


def test_float16_survives_values_at_the_edge_of_its_range():
    layer = mhla_layer(dtype=torch.float16)
    with torch.no_grad():
        layer.to_out[0].weight.mul_(100)
    out = layer(tokens().half() * 1e4)
    assert out.isfinite().all() and out.abs().max() == torch.finfo(torch.float16).max


def test_a_bare_numerator_beyond_float16_reaches_the_head_norm_unrounded():
    fields = {"normalize": False, "head_norm": True}
    x = (tokens() * 300).half()
    expected = mhla_layer(dtype=torch.float16, **fields).double()(x.double())
    numerator = mhla_layer(dtype=torch.float16, normalize=False)
    numerator.to_out = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    assert numerator.double()(x.double()).abs().max() > torch.finfo(torch.float16).max
    assert relative_error(mhla_layer(dtype=torch.float16, **fields)(x), expected) < 5e-3


def test_autocast_keeps_the_layer_near_float32():
    layer = mhla_layer(gate=True, cpe=True, head_norm=True)
    x = tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert relative_error(out, layer(x)) < 3e-2


# Setting processors on a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_follow_the_layers_dtype_and_mode(dtype):
    layer = attention_layer(dtype=dtype)
    for mode in (True, False):
        fields = {"feature_map": "hedgehog", **EVERYTHING}
        processor = MHLAProcessor.for_layer(layer.train(mode), MHLAConfig(**fields))
        assert {p.dtype for p in processor.parameters()} == {dtype}
        assert processor.training == mode


def test_weights_follow_the_layers_device():
    layer = attention_layer().to("meta")
    processor = MHLAProcessor.for_layer(layer, MHLAConfig(feature_map="positive_random", **EVERYTHING))
    assert {t.device.type for t in (*processor.parameters(), *processor.buffers())} == {"meta"}


@pytest.mark.filterwarnings("ignore:this model already had MHLA")
def test_every_self_attention_layer_gets_weights_of_its_own_from_one_description():
    model, description = mhla_dit(), MHLAProcessor(blocks=(2, 2), cpe=True)
    model.set_attn_processor(description)
    first, second = (block.attn1.processor for block in model.transformer_blocks)
    assert first is not second and first is not description and not description.is_bound
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert model.mixing_parameters() == [first.mixing.weights[0], second.mixing.weights[0]]
    assert model.mhla_config == MHLAConfig(blocks=(2, 2), cpe=True, eps=1e-6)


def test_only_the_named_layers_change():
    model = mhla_dit(MHLAConfig(layers=[1]), num_layers=3)
    kinds = [type(block.attn1.processor) for block in model.transformer_blocks]
    assert kinds == [AttnProcessor2_0, MHLAProcessor, AttnProcessor2_0]
    model.set_attn_processor(MHLAProcessor(layers=[0, 2]))
    kinds = [type(block.attn1.processor) for block in model.transformer_blocks]
    assert kinds == [MHLAProcessor, AttnProcessor2_0, MHLAProcessor]
    assert model.mhla_config.layers == (0, 2)


@pytest.mark.parametrize(
    ("layers", "spacing", "expected"),
    [
        (0.5, "even", [1, 3]),
        (0.5, "first", [0, 1]),
        (0.5, "last", [2, 3]),
        (0.01, "last", [3]),
        (1.0, "even", [0, 1, 2, 3]),
    ],
)
def test_a_share_of_the_layers_is_spread_as_asked(layers, spacing, expected):
    model = mhla_dit(MHLAConfig(layers=layers, spacing=spacing), num_layers=4)
    blocks = model.transformer_blocks
    assert [i for i, b in enumerate(blocks) if isinstance(b.attn1.processor, MHLAProcessor)] == expected


@pytest.mark.filterwarnings("ignore:this model was trained with softmax")
def test_stock_attention_set_back_gives_the_stock_model():
    stock = small_dit()
    expected = stock(**inputs()).sample
    model = MHLADiTTransformer2DModel.from_base(stock, MHLAConfig(cpe=True))
    assert not torch.allclose(model(**inputs()).sample, expected)
    model.set_attn_processor(AttnProcessor2_0())
    assert torch.equal(model(**inputs()).sample, expected)
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert model.config.mhla is None and model.mhla_config is None and not model.mixing_parameters()


@pytest.mark.parametrize("layers", ["all", [1]])
def test_processors_taken_from_a_model_and_set_again_change_nothing(layers):
    model = disturb(mhla_dit(MHLAConfig(layers=layers, **EVERYTHING)))
    expected, config = model(**inputs()).sample, model.mhla_config
    model.set_attn_processor(model.attn_processors)
    assert torch.equal(model(**inputs()).sample, expected)
    assert model.mhla_config == config


def test_processors_move_to_another_model_with_their_weights_and_are_told_its_grid():
    donor = disturb(mhla_dit(MHLAConfig(cpe=True)))
    donor(**inputs())
    model = MHLADiTTransformer2DModel(**small_dit().config)
    weights = {name: w for name, w in donor.state_dict().items() if ".processor." not in name}
    model.load_state_dict(weights)
    model.set_attn_processor(donor.attn_processors)
    assert model.mhla_config == donor.mhla_config
    larger = inputs(size=12)
    assert torch.equal(model.eval()(**larger).sample, donor(**larger).sample)


def test_dicts_of_descriptions_or_of_different_configs_are_refused():
    model = mhla_dit()
    with pytest.raises(UserError, match="MHLAProcessor without weights; set MHLAProcessor.layers="):
        model.set_attn_processor({name: MHLAProcessor() for name in model.attn_processors})
    other = mhla_dit(MHLAConfig(blocks=(2, 2))).attn_processors
    (name, processor), *_ = model.attn_processors.items()
    with pytest.raises(UserError, match="different configs; a model has one"):
        model.set_attn_processor({**other, name: processor})


def test_setting_the_attention_a_model_has_keeps_its_weights(recwarn):
    model = disturb(mhla_dit(MHLAConfig(cpe=True)))
    expected = model(**inputs()).sample
    model.set_attn_processor(MHLAProcessor(cpe=True))
    assert torch.equal(model(**inputs()).sample, expected)
    assert not recwarn


def test_replacing_trained_weights_says_so():
    model = disturb(mhla_dit(MHLAConfig(cpe=True)))
    with pytest.warns(UserWarning, match="its weights are replaced by fresh ones, because blocks, cpe differ"):
        model.set_attn_processor(MHLAProcessor(blocks=(2, 2), cpe=False))


@pytest.mark.parametrize(("sample_size", "blocks"), [(8, (2, 2)), (16, (2, 2)), (32, (4, 4))])
def test_open_block_counts_are_chosen_once_and_saved(tmp_path, sample_size, blocks):
    model = mhla_dit(MHLAConfig(blocks=None), sample_size=sample_size)
    m, n = blocks[0] * blocks[1], (sample_size // 2) ** 2
    assert m**2 <= n
    assert model.mhla_config.blocks == blocks
    model.save_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mhla"]["blocks"] == list(blocks)


def test_block_counts_change_in_place_and_are_saved():
    model = mhla_dit(MHLAConfig(blocks=(2, 2), learn_mixing=False))
    model.resize_blocks_((3, 2))
    assert model.mhla_config.blocks == (3, 2)
    assert [tuple(w.shape) for w in model.mixing_parameters()] == [(6, 6)] * 2
    assert model(**inputs()).sample.isfinite().all()


def test_clipping_reaches_every_layer():
    model = disturb(mhla_dit(MHLAConfig(mixing="separable")))
    with torch.no_grad():
        for i, weight in enumerate(model.mixing_parameters()):
            weight.add_(2.0 if i % 2 else -2.0)
    model.clip_mixing_()
    assert [weight.unique().item() for weight in model.mixing_parameters()] == [0.0, 1.0] * 2


@pytest.mark.parametrize("fields", [{"gate": True}, {"gate": True, "cpe": True}, {"head_norm": True}])
def test_a_large_numerator_stays_finite_in_float16(fields):
    model = MHLADiTTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, in_channels=1, sample_size=8, patch_size=1,
        num_embeds_ada_norm=3, mhla={"normalize": False, **fields},
    ).half()  # fmt: skip
    attn = model.transformer_blocks[0].attn1
    attn.processor.grid = (8, 8)
    with torch.no_grad():
        for layer in (attn.to_q, attn.to_k, attn.to_v):
            layer.weight.copy_(torch.eye(16) * 100)
        assert attn(torch.ones(1, 64, 16, dtype=torch.float16)).isfinite().all()
