"""MHLADiTTransformer2DModel: what it computes, and that it saves, loads and trains as any diffusers model does."""

import copy
import inspect
import json
import subprocess
import sys
import warnings

import accelerate
import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from diffusers.models.attention_processor import AttnProcessor2_0
from dit_models import SMALL, dense_mhla, disturb, inputs, small_dit, small_vae, written_out_dit
from operator_reference import relative_error
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from mhla_diffusion import MHLAConfig, MHLADiTTransformer2DModel, MHLAProcessor, apply_mhla
from mhla_diffusion.backbones import family_named, family_of
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline

DIT = family_named("dit")
FULL = {"blocks": (2, 3), "cpe": True, "gate": True, "head_norm": True}
RETROFITTED = "trained with softmax attention .* noise until it is fine-tuned .accelerate launch scripts/finetune.py"


def mhla_dit(seed=0, **arguments):
    """A small MHLA model with random weights everywhere, its mixing included."""
    torch.manual_seed(seed)
    return disturb(MHLADiTTransformer2DModel(**{**SMALL, "mhla": FULL, **arguments})).eval()


def sample(model, **arguments):
    return model(**inputs(**arguments)).sample


def quietly(retrofit, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return retrofit(*arguments)


# What it computes -----------------------------------------------------------------------------------------------------


def test_the_written_out_forward_pass_is_stock_dit():
    model = small_dit().double()

    def softmax_attention(w, x):
        q, k, v = (
            (x @ w[f"{n}.weight"].T + w[f"{n}.bias"]).unflatten(-1, (2, 8)).transpose(1, 2)
            for n in ("to_q", "to_k", "to_v")
        )
        out = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return out @ w["to_out.0.weight"].T + w["to_out.0.bias"]

    x = inputs(dtype=torch.float64)
    assert relative_error(model(**x).sample, written_out_dit(model, x, softmax_attention)) < 1e-10


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("mixing", ["full", "separable"])
def test_the_model_equals_its_dense_matrix_form(mixing, size):
    model = mhla_dit(mhla={**FULL, "mixing": mixing}).double()
    x = inputs(size=size, dtype=torch.float64)
    side = size // 2
    expected = written_out_dit(model, x, lambda w, h: dense_mhla(w, h, 2, (side, side), (2, 3)))
    assert relative_error(model(**x).sample, expected) < 1e-10


@pytest.mark.parametrize("blocks", [(4, 4), (3, 2)])
def test_without_locality_it_is_vanilla_linear_attention(blocks):
    stock = small_dit().double()
    config = MHLAConfig(blocks=blocks, locality=0, eps=1e-6)
    model = quietly(MHLADiTTransformer2DModel.from_base, stock, config)

    def linear_attention(w, x):
        q, k, v = ((x @ w[f"{n}.weight"].T + w[f"{n}.bias"]).unflatten(-1, (2, 8)) for n in ("to_q", "to_k", "to_v"))
        q, k = q.relu(), k.relu()
        numerator = torch.einsum("bqhd,bthd,bthe->bqhe", q, k, v)
        # The constant mixing 1/M scales sums, and so what eps is compared with.
        denominator = torch.einsum("bqhd,bthd->bqh", q, k) + 1e-6 * blocks[0] * blocks[1]
        out = (numerator / denominator.unsqueeze(-1)).flatten(2)
        return out @ w["to_out.0.weight"].T + w["to_out.0.bias"]

    x = inputs(dtype=torch.float64)
    result = model(**x).sample
    # The initial mixing is stored in float32.
    assert relative_error(result, written_out_dit(stock, x, linear_attention)) < 1e-7
    assert relative_error(result, stock(**x).sample) > 1e-2


def test_a_sample_does_not_depend_on_its_batch():
    model, x = mhla_dit(), inputs(batch=3)
    alone = torch.cat([model(**{k: v[i : i + 1] for k, v in x.items()}).sample for i in range(3)])
    assert relative_error(model(**x).sample, alone) < 1e-5


@pytest.mark.parametrize("shape", [(8, 10), (9, 9), (7, 7)])
def test_latents_that_are_no_square_of_patches_are_refused(shape):
    x = {**inputs(), "hidden_states": torch.zeros(2, 4, *shape)}
    with pytest.raises(UserError, match="takes square latents whose side is a multiple of the patch size 2"):
        mhla_dit()(**x)


# Saving and loading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saved_and_loaded_it_computes_the_same_bits(tmp_path, dtype, shard_size, low_cpu_mem_usage):
    mhla_dit(mhla={**FULL, "feature_map": "hedgehog", "mixing": "separable"}).save_pretrained(tmp_path / "float32")
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": low_cpu_mem_usage}
    # Not .to(dtype), which rounds the position embedding too; it is not saved.
    model = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "float32", **options)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    loaded = MHLADiTTransformer2DModel.from_pretrained(tmp_path, **options)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.mhla_config == model.mhla_config
    result = sample(loaded, dtype=dtype)
    assert result.dtype == dtype and torch.equal(result, sample(model, dtype=dtype))


def test_a_new_process_that_imports_the_library_generates_the_same_images(tmp_path):
    model = mhla_dit(mhla={**FULL, "feature_map": "positive_random"})
    pipe = MHLADiTPipeline(model, small_vae(), DDIMScheduler())
    pipe.save_pretrained(tmp_path / "pipe")
    script = """
import sys, torch, mhla_diffusion
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1] + "/pipe")
assert type(pipe) is mhla_diffusion.pipelines.MHLADiTPipeline
assert type(pipe.transformer) is mhla_diffusion.MHLADiTTransformer2DModel
images = pipe([1, 7], generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="pt").images
torch.save(images, sys.argv[1] + "/images.pt")
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr and "newly initialized" not in run.stderr
    pipe.set_progress_bar_config(disable=True)
    expected = pipe([1, 7], generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="pt").images
    assert torch.equal(torch.load(tmp_path / "images.pt"), expected)


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_missing_and_unknown_mhla_weights_are_errors(tmp_path, low_cpu_mem_usage):
    model = mhla_dit()
    model.save_pretrained(tmp_path)
    weights_file, config_file = tmp_path / "diffusion_pytorch_model.safetensors", tmp_path / "config.json"
    weights, config = load_file(weights_file), json.loads(config_file.read_text())

    def load():
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)

    gone = "transformer_blocks.1.attn1.processor.cpe.bias"
    save_file({name: w for name, w in weights.items() if name != gone}, weights_file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lacks 1 MHLA weights that its config asks for, such as {gone}"):
        load()

    save_file(weights, weights_file, metadata={"format": "pt"})
    config_file.write_text(json.dumps({**config, "mhla": {**config["mhla"], "gate": False}}))
    with pytest.raises(
        UserError, match="holds 4 MHLA weights that its config has no place for, such as .*processor.gate"
    ):
        load()
    config_file.write_text(json.dumps({**config, "mhla": {**config["mhla"], "blocks": [2, 2]}}))
    with pytest.raises(UserError, match="of other sizes than its config.json says"):
        load()
    config_file.write_text(json.dumps({**config, "mhla": {**config["mhla"], "block": [2, 2]}}))
    with pytest.raises(UserError, match="no field 'block' .did you mean 'blocks'"):
        load()
    config_file.write_text(json.dumps(config))
    load()


def test_a_stock_checkpoint_with_an_mhla_config_is_refused(tmp_path):
    small_dit().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lacks 2 MHLA weights .* retrofit it with set_attn_processor"):
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, mhla={})


def test_loading_reports_what_it_was_asked_to_report(tmp_path):
    mhla_dit().save_pretrained(tmp_path)
    model, info = MHLADiTTransformer2DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(model, MHLADiTTransformer2DModel) and not info["missing_keys"] and not info["unexpected_keys"]


def test_the_signature_shows_every_argument_of_the_base():
    base, ours = (inspect.signature(c.__init__).parameters for c in (DiTTransformer2DModel, MHLADiTTransformer2DModel))
    assert [(p.name, p.default) for p in base.values()] == [(p.name, p.default) for p in ours.values()][: len(base)]
    assert set(ours) - set(base) == {"share_embedder", "freq_shift", "mhla"}


# Retrofitting ---------------------------------------------------------------------------------------------------------


def test_from_base_leaves_the_base_as_it_was():
    stock = small_dit()
    weights, config, expected = copy.deepcopy(stock.state_dict()), dict(stock.config), sample(stock)
    model = quietly(MHLADiTTransformer2DModel.from_base, stock, MHLAConfig(**FULL))
    disturb(model)
    sample(model)
    assert type(stock) is DiTTransformer2DModel and dict(stock.config) == config
    assert stock.state_dict().keys() == weights.keys()
    assert all(torch.equal(w, weights[name]) for name, w in stock.state_dict().items())
    assert all(type(b.attn1.processor) is AttnProcessor2_0 for b in stock.transformer_blocks)
    assert not any(b._forward_pre_hooks for b in stock.transformer_blocks)
    assert torch.equal(sample(stock), expected)


def test_apply_mhla_changes_a_transformer_in_place_and_keeps_its_weights():
    stock = small_dit()
    parameters = dict(stock.named_parameters())
    result = quietly(apply_mhla, stock, MHLAConfig(**FULL))
    assert result is stock and type(result) is MHLADiTTransformer2DModel
    kept = dict(result.named_parameters())
    assert all(kept[name] is parameter for name, parameter in parameters.items())
    assert {name for name in kept if name not in parameters} == {n for n in kept if ".processor." in n}
    assert result.mhla_config == MHLAConfig(**FULL, eps=1e-6) and result.config.share_embedder is False


def test_apply_mhla_changes_a_stock_pipeline_in_place():
    pipe = DiTPipeline(small_dit(), small_vae(), DDIMScheduler())
    assert quietly(apply_mhla, pipe) is pipe
    assert type(pipe.transformer) is MHLADiTTransformer2DModel and pipe.transformer.mhla_config.blocks == (4, 4)
    assert pipe.config["transformer"] == ("mhla_diffusion.backbones.dit", "MHLADiTTransformer2DModel")


def test_what_cannot_be_retrofitted_says_so():
    with pytest.raises(UserError, match="AutoencoderKL is not a transformer that MHLA knows; it knows DiTTransf"):
        apply_mhla(small_vae())
    with pytest.raises(UserError, match="a str is neither a diffusers pipeline nor a transformer"):
        apply_mhla("facebook/DiT-XL-2-256")

    class Variant(DiTTransformer2DModel):
        pass

    with pytest.raises(UserError, match="a Variant cannot be retrofitted; expected DiTTransformer2DModel"):
        apply_mhla(Variant(**SMALL))
    with pytest.raises(UserError, match="Set the processor before torch.compile"):
        apply_mhla(torch.compile(small_dit()))


@pytest.mark.parametrize(
    "retrofit",
    [
        lambda folder: apply_mhla(DiTPipeline.from_pretrained(folder)),
        lambda folder: MHLADiTPipeline.from_pretrained(folder).set_attn_processor(MHLAProcessor()),
        lambda folder: apply_mhla(DiTTransformer2DModel.from_pretrained(folder, subfolder="transformer")),
        lambda folder: MHLADiTTransformer2DModel.from_base(
            DiTTransformer2DModel.from_pretrained(folder, subfolder="transformer")
        ),
        lambda folder: MHLADiTTransformer2DModel.from_pretrained(folder, subfolder="transformer").set_attn_processor(
            MHLAProcessor()
        ),
    ],
    ids=["apply to pipeline", "set on pipeline", "apply to transformer", "from_base", "set on the model class"],
)
def test_retrofitting_a_softmax_checkpoint_warns_once_at_the_callers_line(tmp_path, retrofit):
    DiTPipeline(small_dit(), small_vae(), DDIMScheduler()).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=RETROFITTED) as caught:
        retrofit(tmp_path)
    assert [w.filename for w in caught] == [__file__]


def test_a_fine_tuned_pipeline_loads_without_a_warning(tmp_path, recwarn):
    MHLADiTPipeline(mhla_dit(), small_vae(), DDIMScheduler()).save_pretrained(tmp_path)
    MHLADiTPipeline.from_pretrained(tmp_path)
    assert not recwarn


def test_a_family_is_found_by_model_and_by_name():
    assert family_of(small_dit()) is family_of(mhla_dit()) is DIT
    with pytest.raises(UserError, match=r"family='ditt' is unknown \(did you mean 'dit'\?\)"):
        family_named("ditt")


# Training and running as any diffusers model --------------------------------------------------------------------------


def gradients(model, sizes):
    model.zero_grad()
    sum(sample(model, size=size).square().mean() for size in sizes).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradient_checkpointing_gives_the_same_gradients_with_resolutions_interleaved():
    model = mhla_dit()
    expected = gradients(model, (8, 12, 8))
    model.enable_gradient_checkpointing()
    result = gradients(model, (8, 12, 8))
    assert all(expected[name].abs().sum() > 0 for name in expected if ".processor." in name)
    assert all(torch.allclose(result[name], expected[name], rtol=1e-5, atol=1e-7) for name in expected)


def test_a_block_compiles_without_a_graph_break_for_even_and_uneven_grids():
    model = mhla_dit(share_embedder=True)
    block = model.transformer_blocks[0]
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    conditioning = torch.randn(2, 16)
    for blocks_divide in (6, 5):
        h = torch.randn(2, blocks_divide**2, 16)
        assert relative_error(compiled(h, timestep=conditioning), block(h, timestep=conditioning)) < 1e-5


def test_a_lora_adapter_acts_and_is_saved_and_loaded(tmp_path):
    model, fresh = mhla_dit(), mhla_dit()
    base = sample(model)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "processor.gate"], init_lora_weights="gaussian"))
    assert relative_error(sample(model), base) < 1e-5  # one of the two factors starts at zero
    assert all(("lora" in name) == p.requires_grad for name, p in model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    adapted = sample(model)
    assert relative_error(adapted, base) > 1e-2
    model.disable_adapters()
    assert relative_error(sample(model), base) < 1e-5
    model.enable_adapters()

    model.save_lora_adapter(tmp_path)
    fresh.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
    assert torch.equal(sample(fresh), adapted)


def test_copies_are_independent():
    model = mhla_dit()
    expected = sample(model)
    twin = copy.deepcopy(model)
    assert torch.equal(sample(twin), expected)
    disturb(twin, seed=1)
    sample(twin, size=12)
    assert not torch.allclose(sample(twin), expected)
    assert torch.equal(sample(model), expected)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_layers_offloaded_one_by_one_find_their_weights(tmp_path, where):
    # The hooks are those of enable_sequential_cpu_offload and of device maps with "cpu" or "disk".
    model = mhla_dit(mhla={**FULL, "feature_map": "hedgehog", "mixing": "separable"})
    expected = sample(model)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(sample(model), expected)


def test_models_offloaded_as_a_whole_generate_the_same_images():
    # The hooks that enable_model_cpu_offload sets, with the CPU as the device to run on.
    pipe = MHLADiTPipeline(mhla_dit(), small_vae(), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def images():
        return pipe([1, 7], generator=torch.Generator().manual_seed(3), num_inference_steps=2, output_type="pt").images

    expected = images()
    pipe.enable_model_cpu_offload(device="cpu")
    assert hasattr(pipe.transformer, "_hf_hook") and torch.equal(images(), expected)


def test_a_device_map_places_the_model(tmp_path):
    model = mhla_dit()
    model.save_pretrained(tmp_path)
    loaded = MHLADiTTransformer2DModel.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(sample(loaded), sample(model))


# Presets and embedders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_size", [32, 64])
@pytest.mark.parametrize(("preset", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
@pytest.mark.parametrize("mhla", [None, {}], ids=["softmax", "mhla"])
def test_presets_have_the_published_sizes(preset, millions, mhla, sample_size):
    with torch.device("meta"):
        model = DIT.build_model(f"DiT-{preset}/2", mhla, sample_size=sample_size)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.01)
    assert model.config.sample_size == sample_size and model.config.share_embedder
    assert len([name for name, _ in model.named_parameters() if name.endswith("embedding_table.weight")]) == 1


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"preset='DiT-XL' is unknown \(did you mean 'DiT-XL/2'\?\); known: DiT-S/2"):
        DIT.build_model("DiT-XL")


def test_without_preset_and_mhla_the_stock_class_is_built():
    assert type(DIT.build_model(**SMALL)) is DiTTransformer2DModel
    assert type(DIT.build_model(**SMALL, mhla={"blocks": (2, 2)})) is MHLADiTTransformer2DModel


def equal_embedders(model):
    """Give all blocks the embedder of the first, as in converted checkpoints; in place."""
    first, *others = (block.norm1.emb for block in model.transformer_blocks)
    for embedder in others:
        embedder.load_state_dict(first.state_dict())
    return model


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_a_checkpoint_in_the_diffusers_layout_loads_with_one_embedder_and_back(tmp_path, low_cpu_mem_usage):
    model = equal_embedders(mhla_dit())
    expected = sample(model)
    model.save_pretrained(tmp_path / "copies")
    options = {"low_cpu_mem_usage": low_cpu_mem_usage}
    shared = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "copies", share_embedder=True, **options)
    embedder = sum(p.numel() for p in model.transformer_blocks[0].norm1.emb.parameters())
    assert shared.config.share_embedder and shared.num_parameters() == model.num_parameters() - embedder
    assert torch.equal(sample(shared), expected)

    shared.save_pretrained(tmp_path / "one")
    assert torch.equal(sample(MHLADiTTransformer2DModel.from_pretrained(tmp_path / "one", **options)), expected)
    back = MHLADiTTransformer2DModel.from_pretrained(tmp_path / "one", share_embedder=False, **options)
    assert torch.equal(sample(back), expected)
    assert back.state_dict().keys() == model.state_dict().keys() and not back.config.share_embedder


def test_embedders_that_differ_are_not_shared(tmp_path):
    mhla_dit().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="share_embedder=True needs blocks with equal embedders; this model's differ"):
        MHLADiTTransformer2DModel.from_pretrained(tmp_path, share_embedder=True)


def test_a_shared_embedder_trains_through_all_blocks():
    model, copies = mhla_dit(share_embedder=True), mhla_dit()
    copies.load_state_dict(model.state_dict(), strict=False)
    for block in copies.transformer_blocks:
        block.norm1.emb.load_state_dict(model.embedder.state_dict())
    for each in (model, copies):
        sample(each).square().sum().backward()
    table = "class_embedder.embedding_table.weight"
    summed = sum(b.norm1.emb.get_parameter(table).grad for b in copies.transformer_blocks)
    assert relative_error(model.embedder.get_parameter(table).grad, summed) < 1e-4


@pytest.mark.parametrize("share", [True, False])
def test_another_number_of_classes_replaces_the_label_table_only(share):
    model = mhla_dit(share_embedder=share)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    assert DIT.set_num_classes(model, 10) is None
    assert DIT.set_num_classes(model, 3) == 10
    after = model.state_dict()
    tables = [name for name in after if name.endswith("embedding_table.weight")]
    assert len(tables) == (1 if share else 2) and all(after[name].shape == (4, 16) for name in tables)
    assert all(torch.equal(after[name], after[tables[0]]) for name in tables)
    assert all(torch.equal(w, before[name]) for name, w in after.items() if name not in tables)
    assert model.config.num_embeds_ada_norm == 3
    x = {**inputs(), "class_labels": torch.tensor([2, 3])}
    assert model.train()(**x).sample.isfinite().all()


def test_images_are_encoded_as_the_autoencoder_scales_them():
    vae = small_vae()
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    latents = DIT.encode({"vae": vae}, images, generators)
    noise = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    mean, log_variance = vae.quant_conv(vae.encoder(images)).chunk(2, dim=1)
    expected = 0.3 * (mean + (log_variance.clamp(-30, 20) / 2).exp() * noise)
    assert relative_error(latents, expected) < 1e-5
    assert DIT.encode({"vae": None}, images, generators) is images
    assert isinstance(vae, AutoencoderKL)
