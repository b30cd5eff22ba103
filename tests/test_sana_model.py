"""MHLASanaTransformer2DModel against stock SANA, its grids, precision, saving, and the training objective."""

from __future__ import annotations

import copy
import inspect
import warnings

import accelerate
import pytest
import torch
from diffusers import SanaControlNetModel, SanaTransformer2DModel
from sana_components import (
    UNCHANGED,
    relative_error,
    small_text_encoder,
    small_tokenizer,
    small_transformer,
    small_vae,
    transformer_inputs,
)

from mhla_diffusion import (
    BlockLayout,
    MHLAConfig,
    MHLAProcessor,
    MHLASanaTransformer2DModel,
    apply_mhla,
    mhla_attention_matrix,
)
from mhla_diffusion.backbones import family_named, family_of
from mhla_diffusion.backbones.sana import SANA, SanaObjective, complex_human_instruction
from mhla_diffusion.errors import UserError

GRIDS = [(8, 8), (16, 16), (6, 11), (11, 6), (5, 13), (3, 2), (1, 7)]
LOCAL = MHLAConfig(eps=1e-15)


def with_mhla(config: MHLAConfig | None = LOCAL, **arguments) -> MHLASanaTransformer2DModel:
    """A small MHLA model; the warning that it is another function than before is not what these tests look at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MHLASanaTransformer2DModel.from_base(small_transformer(**arguments), config)


def shuffled_mixing(model: MHLASanaTransformer2DModel, seed: int = 0) -> MHLASanaTransformer2DModel:
    """Random mixing weights, as after training: every pair of blocks counts differently."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.mixing_parameters():
            weight.copy_(torch.rand(weight.shape, generator=generator))
    return model


# Equality with stock SANA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"qk_norm": "rms_norm_across_heads", "attention_bias": True},
        {"sample_size": 16, "patch_size": 2, "interpolation_scale": 1},
    ],
    ids=["plain", "qk_norm", "patches"],
)
def test_zero_locality_equals_stock(grid, arguments):
    stock = small_transformer(**arguments)
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    patch = arguments.get("patch_size", 1)
    inputs = transformer_inputs(grid[0] * patch, grid[1] * patch, batch=4)
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, stock(**inputs).sample) < 1e-5


@pytest.mark.parametrize("config", [MHLAConfig(locality=0), MHLAConfig(locality=0, blocks=(3, 5), mixing="separable")])
def test_zero_locality_equals_stock_for_a_config_without_the_familys_eps(config):
    stock, inputs = small_transformer(), transformer_inputs(6, 11)
    model = MHLASanaTransformer2DModel.from_base(stock, config)
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, stock(**inputs).sample) < 1e-5


def test_zero_locality_equals_stock_with_an_embedded_guidance_scale():
    stock = small_transformer(guidance_embeds=True)
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    inputs = transformer_inputs(8, 12) | {"guidance": torch.tensor([0.45, 0.1])}
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, stock(**inputs).sample) < 1e-5


def test_zero_locality_equals_stock_with_controlnet_residuals():
    stock = small_transformer()
    inputs = transformer_inputs(8, 12)
    residuals = tuple(torch.randn(2, 96, 32) for _ in range(2))
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    with torch.no_grad():
        expected = stock(**inputs, controlnet_block_samples=residuals).sample
        assert relative_error(model(**inputs, controlnet_block_samples=residuals).sample, expected) < 1e-5
        assert relative_error(model(**inputs).sample, expected) > 1e-3


def test_the_default_is_local_and_differs_from_stock():
    stock, inputs = small_transformer(), transformer_inputs(8, 12)
    with torch.no_grad():
        assert relative_error(with_mhla()(**inputs).sample, stock(**inputs).sample) > 1e-3


@pytest.mark.parametrize("grid", [(8, 12), (6, 11)], ids=str)
def test_a_layer_equals_the_dense_matrix_with_its_own_grid(grid):
    model = shuffled_mixing(with_mhla())
    attn = model.transformer_blocks[1].attn1
    seen = {}
    attn.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    with torch.no_grad():
        model(**transformer_inputs(*grid))
        query, key, value = (linear(seen["x"]).unflatten(-1, (4, 8)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        matrix = mhla_attention_matrix(
            query.relu(), key.relu(), attn.processor.mixing(), BlockLayout(grid, (4, 4)), eps=1e-15
        )
        expected = attn.to_out[0](torch.einsum("bhqt,bthd->bqhd", matrix, value.double()).flatten(2).float())
    assert relative_error(seen["y"], expected) < 1e-5


# Precision --------------------------------------------------------------------------------------------------------


class DoubleLinearAttention:
    """SANA's linear attention in float64 throughout: the stock processor rounds to float32."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        query, key, value = (
            linear(hidden_states).unflatten(-1, (attn.heads, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        weights = torch.einsum("bqhd,bthd->bhqt", query.relu(), key.relu())
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-15)
        return attn.to_out[0](torch.einsum("bhqt,bthd->bqhd", weights, value).flatten(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_no_more_than_stock(dtype):
    stock = small_transformer().to(dtype)
    exact = copy.deepcopy(stock).double()
    for block in exact.transformer_blocks:
        block.attn1.set_processor(DoubleLinearAttention())
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    squared = {"stock": [], "mhla": []}
    with torch.no_grad():
        for seed in range(12):
            inputs = transformer_inputs(10, 14, seed=seed, dtype=dtype)
            double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            expected = exact(**double).sample
            for name, candidate in (("stock", stock), ("mhla", model)):
                output = candidate(**inputs).sample
                assert output.dtype == dtype
                squared[name].append((output.double() - expected).square().mean())
    rms = {name: torch.stack(values).mean().sqrt().item() for name, values in squared.items()}
    assert rms["mhla"] <= 1.05 * rms["stock"]  # both round at the same places, but not always the same way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_half_precision_layer_errs_no_more_than_stock(dtype):
    stock = small_transformer().to(dtype)
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    attn, own = stock.transformer_blocks[0].attn1, model.transformer_blocks[0].attn1
    own.processor.grid = (10, 14)
    hidden_states = torch.randn(4, 140, 32).to(dtype)
    with torch.no_grad():
        expected = DoubleLinearAttention()(copy.deepcopy(attn).double(), hidden_states.double())
        error, stock_error = ((layer(hidden_states).double() - expected).square().mean() for layer in (own, attn))
    assert error <= stock_error


def test_float16_is_finite_where_stock_is():
    stock = small_transformer()
    with torch.no_grad():
        for block in stock.transformer_blocks:
            block.attn1.to_k.weight *= 100
            block.attn1.to_q.weight *= 100
            block.attn1.to_v.weight *= 10
    stock = stock.half()
    inputs = transformer_inputs(16, 16, dtype=torch.float16)
    model = MHLASanaTransformer2DModel.from_base(stock, UNCHANGED)
    with torch.no_grad():
        expected = stock(**inputs).sample
        assert expected.isfinite().all()
        assert relative_error(model(**inputs).sample, expected) < 1e-2


# Grids ------------------------------------------------------------------------------------------------------------


def test_interleaved_resolutions_with_gradient_checkpointing_give_the_same_gradients():
    # 6×10 and 10×6 have as many tokens: a grid remembered from the last forward pass would go unnoticed.
    gradients = []
    for checkpointing in (False, True):
        model = shuffled_mixing(with_mhla()).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        losses = [model(**transformer_inputs(*grid)).sample.square().mean() for grid in [(6, 10), (10, 6), (5, 5)]]
        sum(losses).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=0, msg=name)


def test_height_and_width_are_not_swapped():
    model = shuffled_mixing(with_mhla())
    inputs = transformer_inputs(6, 10)
    with torch.no_grad():
        model(**inputs)
        assert {block.attn1.processor.grid for block in model.transformer_blocks} == {(6, 10)}


def test_a_block_called_by_name_knows_its_grid():
    block = with_mhla().transformer_blocks[0]
    arguments = {
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.randn(1, 6 * 32),
        "height": 5,
        "width": 7,
    }
    x = torch.randn(1, 35, 32)
    by_name = block(hidden_states=x, **arguments)
    by_position = block(x, None, arguments["encoder_hidden_states"], None, arguments["timestep"], 5, 7)
    assert torch.equal(by_name, by_position)


# Retrofit, config, saving ---------------------------------------------------------------------------------------


def test_a_retrofit_that_changes_nothing_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_mhla(small_transformer(), UNCHANGED)
        apply_mhla(small_transformer(), MHLAConfig(blocks=(1, 1)))
        apply_mhla(small_transformer(), MHLAConfig(locality=0, cpe=True, gate=True))


@pytest.mark.parametrize("config", [MHLAConfig(), LOCAL, MHLAConfig(locality=0, feature_map="elu")], ids=str)
def test_a_retrofit_that_changes_the_function_says_so_and_how_to_avoid_it(config):
    with pytest.warns(UserWarning, match=r"starts from another function.*locality=0") as caught:
        apply_mhla(small_transformer(), config)
    assert len(caught) == 1 and "softmax" not in str(caught[0].message)


def test_extras_that_start_neutral_leave_stock_unchanged():
    stock, inputs = small_transformer(), transformer_inputs(6, 11)
    model = MHLASanaTransformer2DModel.from_base(stock, MHLAConfig(locality=0, cpe=True, gate=True, eps=1e-15))
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, stock(**inputs).sample) < 1e-5


def test_default_processor_is_the_familys_default():
    model = with_mhla(None)
    assert model.mhla_config == SANA.default_config
    assert model.mhla_config.blocks == (4, 4) and model.mhla_config.eps == 1e-15 and model.mhla_config.locality == 0
    assert model.mhla_config.feature_map == "relu" and model.mhla_config.normalize


def test_cross_attention_is_left_alone():
    model = with_mhla()
    for block in model.transformer_blocks:
        assert isinstance(block.attn1.processor, MHLAProcessor)
        assert type(block.attn2.processor).__name__ == "SanaAttnProcessor2_0"


def test_some_layers_keep_linear_attention():
    model = with_mhla(MHLAConfig(layers=[1]))
    kinds = [isinstance(block.attn1.processor, MHLAProcessor) for block in model.transformer_blocks]
    assert kinds == [False, True, False]
    model.set_attn_processor(MHLAProcessor(layers=[0, 2]))
    kinds = [isinstance(block.attn1.processor, MHLAProcessor) for block in model.transformer_blocks]
    assert kinds == [True, False, True]


def test_a_controlnet_is_refused_by_name():
    controlnet = SanaControlNetModel(num_layers=1, num_attention_heads=2, attention_head_dim=8, caption_channels=16)
    with pytest.raises(UserError, match="SanaControlNetModel is not a transformer that MHLA knows"):
        apply_mhla(controlnet)


def test_the_signature_shows_all_of_the_base():
    base = inspect.signature(SanaTransformer2DModel.__init__).parameters
    own = inspect.signature(MHLASanaTransformer2DModel.__init__).parameters
    assert list(own) == [*base, "mhla"]
    assert {name: p.default for name, p in own.items() if name != "mhla"} == {n: p.default for n, p in base.items()}


def test_saved_in_shards_and_loaded_it_computes_the_same(tmp_path):
    config = MHLAConfig(blocks=(3, 2), cpe=True, gate=True, head_norm=True, layers=[0, 2])
    model = shuffled_mixing(with_mhla(config, qk_norm="rms_norm_across_heads"))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert loaded.config.qk_norm == "rms_norm_across_heads" and loaded.mhla_config.layers == (0, 2)
    inputs = transformer_inputs(6, 11)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, model(**inputs).sample)


def test_a_stock_checkpoint_loads_and_stays_stock(tmp_path):
    stock, inputs = small_transformer(), transformer_inputs(6, 11)
    stock.save_pretrained(tmp_path)
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path)
    assert loaded.mhla_config is None
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, stock(**inputs).sample)
    with pytest.raises(UserError, match="lacks .* MHLA weights"):
        MHLASanaTransformer2DModel.from_pretrained(tmp_path, mhla={"blocks": [4, 4]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loading_in_half_precision_makes_all_of_it_half_precision(tmp_path, dtype):
    with_mhla(MHLAConfig(cpe=True, gate=True)).save_pretrained(tmp_path)
    loaded = MHLASanaTransformer2DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    with torch.no_grad():
        assert loaded(**transformer_inputs(6, 11, dtype=dtype)).sample.isfinite().all()


def test_autocast_runs_forward_and_backward():
    model = with_mhla().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**transformer_inputs(6, 11)).sample.float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.mixing_parameters())


def test_a_block_compiles_without_graph_breaks():
    block = with_mhla().transformer_blocks[0]
    compiled = torch.compile(block, fullgraph=True, backend="eager", dynamic=False)
    for height, width in [(8, 8), (6, 11)]:
        arguments = (torch.randn(2, height * width, 32), None, torch.randn(2, 6, 32), None, torch.randn(2, 192))
        with torch.no_grad():
            expected = block(*arguments, height, width)
            assert relative_error(compiled(*arguments, height, width), expected) < 1e-5


def test_fused_projections_change_nothing():
    model = shuffled_mixing(with_mhla())
    inputs = transformer_inputs(6, 11)
    with torch.no_grad():
        before = model(**inputs).sample
        model.fuse_qkv_projections()
        assert relative_error(model(**inputs).sample, before) < 1e-5
        for block in model.transformer_blocks:  # what the line above does in diffusers versions that fuse this layer
            block.attn1.fuse_projections()
        assert relative_error(model(**inputs).sample, before) < 1e-5
        model.unfuse_qkv_projections()
        assert relative_error(model(**inputs).sample, before) < 1e-5


def test_layerwise_casting_runs_as_in_stock():
    stock = small_transformer()
    model = MHLASanaTransformer2DModel.from_base(stock, MHLAConfig(locality=0, eps=1e-15))
    for m in (stock, model):
        m.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    inputs = transformer_inputs(6, 11)
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, stock(**inputs).sample) < 1e-5


OFFLOADING = {
    "sequential": lambda model, folder: accelerate.cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device=torch.device("cpu")),
    "groups of leaves": lambda model, folder: model.enable_group_offload(
        torch.device("cpu"), offload_type="leaf_level"
    ),
    "groups of blocks": lambda model, folder: model.enable_group_offload(
        torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    ),
}


@pytest.mark.parametrize("kind", OFFLOADING)
def test_offloading_changes_nothing(tmp_path, kind):
    model = shuffled_mixing(with_mhla(MHLAConfig(cpe=True, gate=True, head_norm=True)))
    inputs = transformer_inputs(6, 11)
    with torch.no_grad():
        before = model(**inputs).sample
        OFFLOADING[kind](model, tmp_path)
        assert torch.equal(model(**inputs).sample, before)


def test_loading_with_a_device_map_that_spills_to_disk(tmp_path):
    model = shuffled_mixing(with_mhla(MHLAConfig(cpe=True, gate=True)))
    model.save_pretrained(tmp_path / "model")
    loaded = MHLASanaTransformer2DModel.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": 120_000}, offload_folder=tmp_path / "offloaded"
    )
    assert any(p.device.type == "meta" for p in loaded.mixing_parameters())
    inputs = transformer_inputs(6, 11)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, model(**inputs).sample)


# The family and its objective ----------------------------------------------------------------------------------


def test_the_published_size_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = SANA.build_model("SANA-0.6B", mhla={"blocks": [4, 4]})
        stock = SANA.build_model("SANA-0.6B")
    count = sum(p.numel() for p in stock.parameters())
    assert 0.58e9 < count < 0.60e9
    assert sum(p.numel() for p in model.parameters()) == count + 28 * 16 * 16
    attn = model.transformer_blocks[0]
    assert (attn.attn1.heads, attn.attn2.heads, model.config.caption_channels) == (36, 16, 2304)


def test_the_family_is_found_by_name_and_by_model():
    assert family_named("sana") is SANA
    assert family_of(small_transformer()) is SANA and family_of(with_mhla()) is SANA


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 * seed + i) for i in range(count)]


def caption_conditions(batch: int, length: int = 6) -> dict[str, torch.Tensor]:
    return {
        "prompt_embeds": torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(7)),
        "prompt_mask": torch.ones(batch, length, dtype=torch.long),
    }


def test_objective_interpolates_and_targets_the_velocity():
    latents = torch.randn(64, 4, 4, 4)
    inputs = SanaObjective(0.0).prepare(with_mhla(), latents, caption_conditions(64), generators(64))
    sigma = (inputs["timestep"] / 1000).view(-1, 1, 1, 1)
    noise = inputs["target"] + latents
    torch.testing.assert_close(inputs["noisy"], (1 - sigma) * latents + sigma * noise)
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 1) < 0.1
    # Denoising by the true velocity arrives at the data.
    torch.testing.assert_close(inputs["noisy"] - sigma * inputs["target"], latents, atol=1e-5, rtol=1e-5)


def test_sigmas_are_shifted_logit_normal():
    objective = SanaObjective(0.0, shift=3.0)
    inputs = objective.prepare(with_mhla(), torch.zeros(4000, 1, 1, 1), caption_conditions(4000), generators(4000))
    sigma = inputs["timestep"].double() / 1000
    normal = torch.logit(sigma / (3 - 2 * sigma))  # the shift undone
    assert abs(normal.mean()) < 0.06 and abs(normal.std() - 1) < 0.04
    assert abs(sigma.median() - 0.75) < 0.02  # 3·½ / (1 + 2·½)


def test_sigma_is_the_schedulers_where_a_sample_is_at_the_same_timestep():
    pipeline = SANA.build_pipeline(small_transformer(), {"vae": small_vae()})
    pipeline.scheduler.set_timesteps(10)
    for t, sigma in zip(pipeline.scheduler.timesteps, pipeline.scheduler.sigmas, strict=False):
        assert abs(t / 1000 - sigma) < 1e-3


def test_draws_of_a_sample_depend_on_its_generator_only():
    objective, model, latents, conditions = (
        SanaObjective(0.5),
        with_mhla(),
        torch.randn(6, 4, 5, 3),
        caption_conditions(6),
    )
    whole = objective.prepare(model, latents, conditions, generators(6))
    part = objective.prepare(model, latents[4:], {name: x[4:] for name, x in conditions.items()}, generators(6)[4:])
    for name in whole:
        assert torch.equal(whole[name][4:], part[name]), name


def test_dropped_captions_become_the_null_caption():
    conditions = caption_conditions(400)
    null = {"null_embeds": torch.full((1, 9, 16), 3.0), "null_mask": torch.tensor([[1, 1] + [0] * 7])}
    for extra, null_value, null_tokens in ((null, 3.0, 2), ({}, 0.0, 1)):
        inputs = SanaObjective(0.3).prepare(with_mhla(), torch.zeros(400, 4, 1, 1), conditions | extra, generators(400))
        dropped = (inputs["prompt_embeds"][:, 0] == null_value).all(-1)
        assert 0.2 < dropped.float().mean() < 0.4
        assert (inputs["prompt_embeds"][dropped] == null_value).all()
        assert (inputs["prompt_mask"][dropped].sum(1) == null_tokens).all()
        assert torch.equal(inputs["prompt_embeds"][~dropped, :6], conditions["prompt_embeds"][~dropped])
        assert (inputs["prompt_mask"][~dropped].sum(1) == 6).all()


def test_the_loss_is_per_sample_and_trains_the_mixing():
    objective, model = SanaObjective(), shuffled_mixing(with_mhla()).train()
    objective.prepare_model(model)
    inputs = objective.prepare(model, torch.randn(3, 4, 6, 10), caption_conditions(3), generators(3))
    losses = objective.loss(model, inputs)
    assert losses["loss"].shape == (3,)
    expected = (
        model(
            inputs["noisy"],
            encoder_hidden_states=inputs["prompt_embeds"],
            encoder_attention_mask=inputs["prompt_mask"],
            timestep=inputs["timestep"],
        ).sample
        - inputs["target"]
    )
    torch.testing.assert_close(losses["loss"], expected.square().mean((1, 2, 3)))
    losses["loss"].mean().backward()
    assert all(p.grad.any() for p in model.mixing_parameters())


def test_learned_sigma_channels_are_not_compared_with_the_velocity():
    model = with_mhla(out_channels=8)
    inputs = SanaObjective().prepare(model, torch.randn(2, 4, 6, 10), caption_conditions(2), generators(2))
    assert SanaObjective().loss(model, inputs)["loss"].shape == (2,)


@pytest.mark.parametrize("options", [{"label_dropout": 1.0}, {"shift": 0.0}, {"logit_std": -1.0}], ids=str)
def test_wrong_objective_options_are_named(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SANA.objective(**options)


def test_a_distilled_model_is_refused_for_training():
    with pytest.raises(UserError, match="guidance_embeds"):
        SanaObjective().prepare_model(small_transformer(guidance_embeds=True))


def test_images_are_encoded_as_the_pipeline_decodes():
    vae, images = small_vae(), torch.rand(2, 3, 32, 48) * 2 - 1
    latents = SANA.encode({"vae": vae}, images, generators(2))
    assert latents.shape == (2, 4, 4, 6)
    torch.testing.assert_close(latents / vae.config.scaling_factor, vae.encode(images).latent)


def test_prompts_are_encoded_as_the_pipeline_does():
    components = {"tokenizer": small_tokenizer(), "text_encoder": small_text_encoder()}
    pipeline = SANA.build_pipeline(small_transformer(), components)
    prompts = ["a red circle", "Two dogs"]
    embeds, mask, null_embeds, null_mask = pipeline.encode_prompt(
        prompts, complex_human_instruction=complex_human_instruction(), max_sequence_length=20
    )
    encoded = SANA.encode_prompts(components, prompts, max_sequence_length=20)
    null = SANA.null_conditions(components, max_sequence_length=20)
    assert torch.equal(encoded["prompt_embeds"], embeds) and torch.equal(encoded["prompt_mask"], mask)
    assert torch.equal(null["null_embeds"], null_embeds[:1]) and torch.equal(null["null_mask"], null_mask[:1])
    without = SANA.encode_prompts(components, prompts, (), max_sequence_length=20)["prompt_embeds"]
    assert not torch.equal(without, embeds)
    inputs = SANA.objective().prepare(small_transformer(), torch.randn(2, 4, 4, 4), {**encoded, **null}, generators(2))
    assert SANA.objective().loss(small_transformer(), inputs)["loss"].isfinite().all()
