"""The Wan family: MHLA on frames × height × width against the dense matrix, and everything a diffusers model does."""

import copy
import json

import accelerate
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from peft import LoraConfig
from wan_models import SMALL, disturb, inputs, mhla_transformer, small_components, small_vae, stock_transformer

from mhla_diffusion import (
    BlockLayout,
    MHLAConfig,
    MHLAProcessor,
    MHLAWanTransformer3DModel,
    apply_mhla,
    mhla_attention_matrix,
)
from mhla_diffusion.backbones import family_named, family_of
from mhla_diffusion.errors import UserError

WAN = family_named("wan")
GRIDS = {
    "even": (2, 4, 6),
    "uneven": (5, 3, 7),
    "one frame": (1, 5, 9),
    "portrait": (3, 8, 2),
}


def mhla_layers(model):
    return [i for i, block in enumerate(model.blocks) if isinstance(block.attn1.processor, MHLAProcessor)]


class DenseAttention:
    """What one MHLA layer of Wan computes, written out with the N×N matrix."""

    def __init__(self, processor, grid):
        self.processor, self.config, self.grid = processor, processor.config, grid

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb):
        config, own = self.config, self.processor
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (attn.norm_q(query), attn.norm_k(key), value))
        if config.rope == "before":
            query, key = self.rotate(query, rotary_emb), self.rotate(key, rotary_emb)
        if config.feature_map == "relu":
            query, key = query.clamp(min=0), key.clamp(min=0)
        else:
            query, key = own.feature_map(query, key)
        rotary = None
        if config.rope == "after":
            rotary = self.rotate(query, rotary_emb), self.rotate(key, rotary_emb)
        matrix = mhla_attention_matrix(
            query, key, own.mixing.matrix(), BlockLayout(self.grid, config.blocks), config.normalize, config.eps, rotary
        )
        out = torch.einsum("bhqt,bthd->bqhd", matrix, value)
        if own.head_norm is not None:
            out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * own.head_norm.weight
        out = out.flatten(2)
        if own.gate is not None:
            gate = hidden_states @ own.gate.weight.T + own.gate.bias
            out = out * gate * torch.sigmoid(gate)
        if own.cpe is not None:
            volume = value.flatten(2).mT.unflatten(2, self.grid)
            out = out + F.conv3d(volume, own.cpe.weight, own.cpe.bias, padding=1, groups=volume.shape[1]).flatten(2).mT
        return attn.to_out[0](out)

    @staticmethod
    def rotate(x, rotary_emb):
        """Channel pairs as complex numbers times exp(iθ), part by part for features wider than the head."""
        cos, sin = (angles[..., ::2].double() for angles in rotary_emb)
        factor = torch.complex(cos, sin)
        parts = x.unflatten(-1, (-1, 2 * factor.shape[-1]))
        pairs = torch.view_as_complex(parts.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * factor.unsqueeze(-2)).flatten(-2).flatten(-2)


def dense_model(model, grid):
    """A stock transformer with the same weights, whose MHLA layers are dense."""
    dense = stock_transformer().to(torch.float64)
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if ".processor." not in k})
    for index in mhla_layers(model):
        dense.blocks[index].attn1.processor = DenseAttention(model.blocks[index].attn1.processor, grid)
    return dense


# Mathematics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layers": "hybrid"},
        {"normalize": True, "cpe": True, "head_norm": False},
        {"mixing": "separable", "gate": False, "cpe": True},
        {"feature_map": "hedgehog", "rope": "before", "normalize": True},
        {"feature_map": "hedgehog"},
        {"blocks": (1, 1, 1), "layers": [0, 2]},
    ],
    ids=lambda fields: ",".join(f"{k}={v}" for k, v in fields.items()) or "published",
)
def test_the_transformer_equals_its_dense_matrix_form(grid, fields):
    model = mhla_transformer(**fields).to(torch.float64)
    given = inputs(grid, batch=2, dtype=torch.float64)  # two, as in guidance
    with torch.no_grad():
        out, expected = model(**given).sample, dense_model(model, grid)(**given).sample
    assert (out - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_guidance_batch_equals_its_members_alone():
    model, given = mhla_transformer(), inputs((3, 4, 5))
    with torch.no_grad():
        both = model(**given).sample
        alone = [model(**{k: v[i : i + 1] for k, v in given.items()}).sample for i in range(2)]
    torch.testing.assert_close(both, torch.cat(alone))


def test_gate_and_position_encoding_start_neutral():
    given = inputs((3, 4, 5))
    plain = mhla_transformer(trained=False, gate=False)
    with torch.no_grad():
        expected = plain(**given).sample
        for fields in ({"gate": True}, {"cpe": True, "gate": False}):
            torch.testing.assert_close(mhla_transformer(trained=False, **fields)(**given).sample, expected)


def test_without_locality_it_is_vanilla_linear_attention():
    given = inputs((3, 4, 5))
    with torch.no_grad():
        for normalize in (False, True):
            blocks = mhla_transformer(trained=False, locality=0.0, normalize=normalize)
            one = mhla_transformer(trained=False, blocks=(1, 1, 1), normalize=normalize)
            torch.testing.assert_close(blocks(**given).sample, one(**given).sample)
            constant = 1 / 12 if normalize else 1.0
            assert all(torch.equal(m.matrix(), torch.full((12, 12), constant)) for m in blocks.mixings())


def test_without_a_denominator_the_initial_mixing_still_has_rows_that_sum_to_one_and_is_clipped_to_one():
    model = mhla_transformer(trained=False)
    for weight in model.mixing_parameters():
        torch.testing.assert_close(weight.sum(1), torch.ones(12))
        weight.data += torch.linspace(-2, 2, 144).view(12, 12)
    model.clip_mixing_()
    assert all(weight.min() == 0 and weight.max() == 1 for weight in model.mixing_parameters())


# Which layers -------------------------------------------------------------------------------------------------------


def test_the_family_defaults_are_those_published_and_the_convolution():
    config = MHLAProcessor().resolve(WAN.default_config)
    assert (config.blocks, config.normalize, config.head_norm, config.gate) == ((3, 5, 10), False, True, True)
    assert (config.feature_map, config.rope, config.layers, config.cpe) == ("relu", "after", "all", True)
    with torch.device("meta"):
        model = WAN.build_model("Wan2.1-1.3B", {"layers": "hybrid", **WAN.default_config.to_dict()})
    assert 1.40e9 < sum(p.numel() for p in model.parameters()) < 1.50e9
    assert WAN.usual_grid(model) == (21, 30, 52)


@pytest.mark.parametrize(
    ("layers", "spacing", "expected"),
    [
        ("all", "even", range(9)),
        ("hybrid", "even", (1, 2, 4, 5, 7, 8)),
        (2 / 3, "even", (1, 2, 4, 5, 7, 8)),
        (0.5, "even", (2, 4, 6, 8)),
        (0.5, "first", (0, 1, 2, 3)),
        (0.34, "last", (6, 7, 8)),
        (1.0, "even", range(9)),
        (0.01, "even", (8,)),
        ([7, 2], "even", (2, 7)),
    ],
)
def test_layers_by_name_share_or_list(layers, spacing, expected):
    model = stock_transformer(num_layers=9)
    with pytest.warns(UserWarning, match="makes noise until it is fine-tuned"):
        apply_mhla(model, MHLAConfig(blocks=(2, 2, 2), layers=layers, spacing=spacing))
    assert mhla_layers(model) == list(expected)
    softmax = [block.attn1.processor for i, block in enumerate(model.blocks) if i not in expected]
    assert all(isinstance(processor, WanAttnProcessor) for processor in softmax)
    assert all(isinstance(block.attn2.processor, WanAttnProcessor) for block in model.blocks)
    assert MHLAConfig.from_dict(json.loads(json.dumps(model.config.mhla))).layers == model.mhla_config.layers


def test_a_hybrid_without_any_mhla_layer_is_refused():
    with pytest.raises(UserError, match="layers='hybrid' gives MHLA to none of the model's 1 layers"):
        apply_mhla(stock_transformer(num_layers=1), MHLAConfig(blocks=(2, 2, 2), layers="hybrid"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0.0}, "layers=0.0 as a share"),
        ({"layers": 1.5}, "layers=1.5 as a share"),
        ({"layers": [3]}, "layer 3, but the model has layers 0 to 2"),
        ({"layers": 0.5, "spacing": "odd"}, "spacing='odd' must be"),
        ({"blocks": (4, 4)}, "needs 3 counts"),
    ],
)
def test_layers_and_blocks_that_do_not_suit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        stock = stock_transformer()
        apply_mhla(stock, MHLAConfig(**{"blocks": (2, 2, 2), **fields}))


@pytest.mark.filterwarnings("ignore:this model was trained with softmax")
def test_stock_attention_can_be_set_back():
    stock, given = stock_transformer(), inputs((2, 3, 4))
    model = MHLAWanTransformer3DModel.from_base(stock, MHLAConfig(blocks=(2, 2, 2)))
    model.set_attn_processor(WanAttnProcessor())
    assert model.config.mhla is None
    with torch.no_grad():
        assert torch.equal(model(**given).sample, stock(**given).sample)


# The grid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 15, 26), (33, 2, 3), (2, 1, 40), (7, 13, 5)])
def test_one_set_of_weights_serves_every_length_and_resolution(grid):
    model = mhla_transformer(blocks=(3, 5, 10), cpe=True)
    with torch.no_grad():
        out = model(**inputs(grid, batch=1)).sample
    assert out.shape == (1, 4, grid[0], 2 * grid[1], 2 * grid[2])
    assert out.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_grid_of_its_own_pass_when_passes_interleave(reentrant):
    def gradients(checkpointing):
        model = mhla_transformer(layers="hybrid").train()
        if checkpointing:
            model.enable_gradient_checkpointing(
                lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=reentrant)
            )
        wide, tall = inputs((1, 24, 40), batch=1), inputs((1, 40, 24), batch=1)
        for given in (wide, tall):  # so that reentrant checkpoints have something to differentiate
            given["hidden_states"].requires_grad_()
        losses = [model(**given).sample.square().mean() for given in (wide, tall)]
        sum(losses).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, recomputed = gradients(False), gradients(True)
    assert plain["blocks.1.attn1.processor.mixing.weights.0"].abs().max() > 0
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_a_block_compiles_whole_and_tells_apart_grids_of_the_same_length():
    model = mhla_transformer()
    block = model.blocks[1]
    compiled = torch.compile(copy.deepcopy(block), fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        for grid in ((2, 5, 6), (2, 6, 5), (2, 5, 6)):
            rotary = model.rope(inputs(grid)["hidden_states"])
            given = torch.randn(1, 60, 24), torch.randn(1, 5, 24), torch.randn(1, 6, 24), rotary
            torch.testing.assert_close(compiled(*given), block(*given))


def test_copies_are_independent_and_offloaded_weights_find_the_grid():
    model, given = mhla_transformer(layers="hybrid"), inputs((3, 4, 5))
    with torch.no_grad():
        expected = model(**given).sample
        double = copy.deepcopy(model)
        disturb(model, seed=3)
        assert torch.equal(double(**given).sample, expected)
        offloaded = accelerate.cpu_offload(copy.deepcopy(double), execution_device="cpu")
        assert next(offloaded.parameters()).device.type == "meta"
        assert torch.equal(offloaded(**given).sample, expected)


def test_one_timestep_per_token_gives_what_one_per_sample_gives():
    model, given = mhla_transformer(layers="hybrid"), inputs((2, 3, 4))
    with torch.no_grad():
        expected = model(**given).sample
        given["timestep"] = given["timestep"][:, None].expand(2, 24)  # Wan2.2's text-and-image-to-video
        torch.testing.assert_close(model(**given).sample, expected)


def test_a_block_without_a_grid_says_so():
    block = mhla_transformer().blocks[0]
    flat = stock_transformer().rope(torch.zeros(1, 4, 2, 4, 4))
    with pytest.raises(UserError, match="was not told the token grid"):
        block(torch.randn(1, 8, 24), torch.randn(1, 5, 24), torch.randn(1, 6, 24), flat)


# As a diffusers model -----------------------------------------------------------------------------------------------


def test_saved_in_shards_and_loaded_it_computes_the_same_bits(tmp_path):
    model, given = mhla_transformer(layers="hybrid", cpe=True), inputs((3, 4, 5))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    loaded = MHLAWanTransformer3DModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**given).sample, model(**given).sample)
    assert loaded.mhla_config == model.mhla_config
    assert family_of(loaded) is WAN


@pytest.mark.filterwarnings("ignore:this model was trained with softmax")
def test_a_stock_checkpoint_loads_into_the_model_class(tmp_path):
    stock, given = stock_transformer(), inputs((2, 3, 4))
    stock.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = MHLAWanTransformer3DModel.from_pretrained(tmp_path)
        assert torch.equal(loaded(**given).sample, stock(**given).sample)
        apply_mhla(loaded, MHLAConfig(blocks=(2, 2, 2), layers="hybrid"))
        assert mhla_layers(loaded) == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(tmp_path, dtype):
    model, given = mhla_transformer(blocks=(3, 5, 10)), inputs((2, 16, 24))
    model.save_pretrained(tmp_path)
    half = MHLAWanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    with torch.no_grad():
        expected = model(**given).sample
        given = {k: v if k == "timestep" else v.to(dtype) for k, v in given.items()}
        out = half(**given).sample
    assert out.dtype == dtype
    assert (out - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_numerator_beyond_float16_does_not_reach_the_head_norm_rounded():
    model = mhla_transformer(blocks=(1, 1, 1), trained=False, gate=False)
    attn = model.blocks[0].attn1
    attn.to_v.weight.data *= 1000
    x = torch.randn(1, 960, 24)
    rotary = model.rope(torch.zeros(1, 4, 1, 48, 80))
    flat = tuple(angles.flatten(1, 3) for angles in rotary)
    attn.processor.grid = (1, 24, 40)
    with torch.no_grad():
        expected = attn(x, None, None, flat)
        out = attn.half()(x.half(), None, None, flat).float()
    assert (out - expected).abs().max() < 0.02 * expected.abs().max()


def test_lora_adapters_train_and_leave_the_model_unchanged_at_first():
    model, given = mhla_transformer(), inputs((2, 3, 4))
    with torch.no_grad():
        expected = model(**given).sample
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "to_out.0"]))
    out = model(**given).sample
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained and all("lora_" in name for name in trained)


def test_block_counts_can_be_changed_after_training():
    model, given = mhla_transformer(), inputs((3, 4, 5))
    same = copy.deepcopy(model)
    same.resize_blocks_((2, 2, 3))
    model.resize_blocks_((1, 2, 6))
    assert model.mhla_config.blocks == (1, 2, 6)
    assert all(m.blocks == (1, 2, 6) for m in model.mixings())
    with torch.no_grad():
        assert model(**given).sample.isfinite().all()
        torch.testing.assert_close(same(**given).sample, mhla_transformer()(**given).sample)


def test_the_signature_shows_every_argument_of_the_base():
    base, own = WanTransformer3DModel(**SMALL).config, MHLAWanTransformer3DModel(**SMALL).config
    assert {k: v for k, v in own.items() if k != "mhla" and k[0] != "_"} == {
        k: v for k, v in base.items() if k[0] != "_"
    }


# Training -----------------------------------------------------------------------------------------------------------


def test_the_objective_is_flow_matching_with_captions_dropped_to_the_null_embedding():
    latents, prompt = torch.randn(2, 4, 2, 6, 8), torch.randn(2, 5, 16)
    null = torch.randn(1, 5, 16)

    def prepared(**options):
        generators = [torch.Generator().manual_seed(i) for i in range(2)]
        conditions = {"prompt_embeds": prompt, "null_embeds": null}
        return WAN.objective(**options).prepare(mhla_transformer(), latents, conditions, generators)

    given = prepared(label_dropout=0.0)
    sigma = given["timestep"] / 1000
    noise = given["target"] + latents
    torch.testing.assert_close(given["noisy"], torch.stack([torch.lerp(x, n, s) for x, n, s in zip(
        latents, noise, sigma, strict=True)]))  # fmt: skip
    base = prepared(label_dropout=0.0, shift=1.0)["timestep"] / 1000
    torch.testing.assert_close(sigma, 3 * base / (1 + 2 * base))
    assert torch.equal(given["encoder_hidden_states"], prompt)
    dropped = prepared(label_dropout=0.999)["encoder_hidden_states"]
    assert torch.equal(dropped, null.expand(2, -1, -1))


def test_the_loss_is_the_error_of_the_models_velocity_and_can_be_minimised():
    model, objective = mhla_transformer(layers="hybrid").train(), WAN.objective()
    latents, prompt = torch.randn(2, 4, 2, 6, 8), torch.randn(2, 5, 16)
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    given = objective.prepare(model, latents, {"prompt_embeds": prompt}, generators)
    velocity = model(given["noisy"], given["timestep"], given["encoder_hidden_states"]).sample
    losses = objective.loss(model, given)
    torch.testing.assert_close(losses["loss"], (velocity - given["target"]).square().mean((1, 2, 3, 4)))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(12):
        optimiser.zero_grad()
        loss = objective.loss(model, given)["loss"].mean()
        loss.backward()
        optimiser.step()
        model.clip_mixing_()
    assert loss < 0.8 * losses["loss"].mean()


def test_videos_and_images_are_encoded_as_the_pipelines_expect_latents():
    vae = small_vae()
    video = torch.rand(2, 3, 5, 16, 24) * 2 - 1
    latents = WAN.encode({"vae": vae}, video, [])
    assert latents.shape == (2, 4, 2, 2, 3)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        torch.testing.assert_close(latents * std + mean, vae.encode(video).latent_dist.mode())
    assert torch.equal(WAN.encode({"vae": vae}, video[:, :, 0], []), WAN.encode({"vae": vae}, video[:, :, :1], []))
    assert WAN.encode({}, video[:, :, 0], []).shape == (2, 3, 1, 16, 24)


def test_captions_are_encoded_as_in_the_pipeline():
    components = small_components()
    pipeline = WAN.build_pipeline(mhla_transformer(), components)
    embeds = WAN.encode_prompts(components, ["a cat runs", "a dog"], max_sequence_length=8)["prompt_embeds"]
    with torch.no_grad():
        expected, negative = pipeline.encode_prompt(["a cat runs", "a dog"], "", max_sequence_length=8)
    assert torch.equal(embeds, expected)
    assert embeds.shape == (2, 8, 16) and embeds[1, 3:].eq(0).all()  # two words and the end of the sentence
    assert torch.equal(WAN.null_conditions(components, max_sequence_length=8)["null_embeds"], negative[:1])
