"""SANA pipelines with MHLA: stock ones retrofitted, LoRA files, perturbed-attention guidance, saving, tiling."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    SanaControlNetModel,
    SanaControlNetPipeline,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintPipeline,
    SCMScheduler,
)
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from sana_components import (
    UNCHANGED,
    call_arguments,
    relative_error,
    small_components,
    small_pipeline,
    small_transformer,
    transformer_inputs,
)

from mhla_diffusion import MHLAConfig, MHLAProcessor, MHLASanaTransformer2DModel, apply_mhla
from mhla_diffusion.backbones.sana import SANA, PerturbedMHLA
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLASanaPAGPipeline, MHLASanaPipeline


def retrofitted(pipeline, config: MHLAConfig | None = None):
    """The pipeline with MHLA, its mixing random, as after training."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_mhla(pipeline, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in pipeline.transformer.mixing_parameters():
            weight.copy_(torch.rand(weight.shape, generator=generator))
    return pipeline


def test_the_call_in_the_readme():
    stock = small_pipeline()
    expected = stock(**call_arguments()).images
    pipeline = small_pipeline(MHLASanaPipeline)
    np.testing.assert_array_equal(pipeline(**call_arguments()).images, expected)
    pipeline.set_attn_processor(MHLAProcessor())
    assert isinstance(pipeline.transformer, MHLASanaTransformer2DModel)
    np.testing.assert_allclose(pipeline(**call_arguments()).images, expected, atol=2e-5)
    with pytest.warns(UserWarning, match="locality=0"):
        fresh = small_pipeline(MHLASanaPipeline)
        fresh.set_attn_processor(MHLAProcessor(locality=1))
    assert np.abs(fresh(**call_arguments()).images - expected).max() > 1e-3


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (160, 96), (32, 224)], ids=str)
def test_every_resolution_equals_stock(size):
    arguments = call_arguments(height=size[0], width=size[1], num_inference_steps=2, output_type="latent")
    expected = small_pipeline()(**arguments).images
    pipeline = apply_mhla(small_pipeline(), UNCHANGED)
    arguments["generator"] = call_arguments()["generator"]
    images = pipeline(**arguments).images
    assert relative_error(images, expected) < 1e-5


def test_one_mixing_serves_all_resolutions_of_one_pipeline():
    pipeline = retrofitted(small_pipeline())
    first = pipeline(**call_arguments()).images
    pipeline(**call_arguments(height=96, width=64))
    np.testing.assert_array_equal(pipeline(**call_arguments()).images, first)


def test_vae_tiling_equals_stock():
    images = []
    for change in (lambda pipeline: pipeline, lambda pipeline: apply_mhla(pipeline, UNCHANGED)):
        pipeline = change(small_pipeline())
        pipeline.vae.enable_tiling(
            tile_sample_min_height=64,
            tile_sample_min_width=64,
            tile_sample_stride_height=48,
            tile_sample_stride_width=48,
        )
        images.append(pipeline(**call_arguments(height=96, width=160)).images)
    np.testing.assert_allclose(images[1], images[0], atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_pipelines_run(dtype):
    pipeline = retrofitted(small_pipeline()).to(dtype)
    images = pipeline(**call_arguments()).images
    assert np.isfinite(images).all() and images.std() > 0.01


# Other pipelines with the same transformer ----------------------------------------------------------------------


def pag_arguments(**changes):
    arguments = call_arguments(pag_scale=3.0, **changes)
    return arguments


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("layers", ["transformer_blocks.1", ["transformer_blocks.(0|2)"]], ids=str)
def test_perturbed_attention_guidance_equals_stock(guidance_scale, layers):
    arguments = {"guidance_scale": guidance_scale, "output_type": "latent"}
    stock = small_pipeline(SanaPAGPipeline)
    plain = stock(**pag_arguments(**arguments) | {"pag_scale": 0.0}).images
    stock.set_pag_applied_layers(layers, stock._pag_attn_processors)
    expected = stock(**pag_arguments(**arguments)).images
    pipeline = small_pipeline(SanaPAGPipeline)
    pipeline.set_pag_applied_layers(layers, pipeline._pag_attn_processors)
    apply_mhla(pipeline, UNCHANGED)
    assert type(pipeline) is MHLASanaPAGPipeline
    for _ in range(2):  # the layers are as before afterwards
        assert relative_error(pipeline(**pag_arguments(**arguments)).images, expected) < 1e-5
        assert len(list(pipeline.transformer.mixings())) == 3
    assert pipeline.transformer.mhla_config.layers == "all"
    assert relative_error(plain, expected) > 1e-3


def test_perturbed_attention_guidance_beside_layers_without_mhla():
    expected = small_pipeline(SanaPAGPipeline)(**pag_arguments(output_type="latent")).images
    pipeline = apply_mhla(small_pipeline(SanaPAGPipeline), MHLAConfig(locality=0, layers=[1, 2]))
    assert relative_error(pipeline(**pag_arguments(output_type="latent")).images, expected) < 1e-5
    assert pipeline.transformer.mhla_config.layers == (1, 2)


def test_an_interrupted_perturbed_generation_leaves_the_model_whole():
    pipeline = retrofitted(small_pipeline(SanaPAGPipeline))
    before = {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}

    def interrupt(pipe, step, timestep, tensors):
        assert isinstance(pipe.transformer.transformer_blocks[0].attn1.processor, PerturbedMHLA)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(**pag_arguments(callback_on_step_end=interrupt))
    after = pipeline.transformer.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_perturbed_pipeline_is_made_from_another_and_saved(tmp_path):
    base = retrofitted(small_pipeline())
    pipeline = MHLASanaPAGPipeline.from_pipe(base)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(**pag_arguments()).images
    pipeline.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded) is MHLASanaPAGPipeline
    loaded.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(loaded(**pag_arguments()).images, expected)


def test_sprint_pipeline_equals_stock():
    def sprint():
        components = small_components(guidance_embeds=True, qk_norm="rms_norm_across_heads")
        components["scheduler"] = SCMScheduler()
        pipeline = SanaSprintPipeline(**components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    arguments = call_arguments(num_inference_steps=2, output_type="latent")
    expected = sprint()(**arguments).images
    pipeline = apply_mhla(sprint(), UNCHANGED)
    assert isinstance(pipeline, SanaSprintPipeline) and len(list(pipeline.transformer.mixings())) == 3
    arguments["generator"] = call_arguments()["generator"]
    assert relative_error(pipeline(**arguments).images, expected) < 1e-5


def test_controlnet_pipeline_equals_stock_and_keeps_its_controlnet():
    def with_controlnet():
        torch.manual_seed(3)
        config = small_transformer().config
        names = inspect.signature(SanaControlNetModel.__init__).parameters
        controlnet = SanaControlNetModel(**{n: config[n] for n in names if n in config} | {"num_layers": 2}).eval()
        for p in controlnet.parameters():  # its output layers start at zero
            if not p.any():
                torch.nn.init.normal_(p, std=0.3)
        pipeline = SanaControlNetPipeline(**small_components(), controlnet=controlnet)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    arguments = call_arguments(prompt="a red circle", output_type="latent", control_image=torch.rand(1, 3, 64, 96))
    arguments["generator"] = torch.Generator().manual_seed(0)
    expected = with_controlnet()(**arguments).images
    pipeline = apply_mhla(with_controlnet(), UNCHANGED)
    assert not any(isinstance(m, MHLAProcessor) for m in pipeline.controlnet.modules())
    arguments["generator"] = torch.Generator().manual_seed(0)
    assert relative_error(pipeline(**arguments).images, expected) < 1e-5
    arguments |= {"controlnet_conditioning_scale": 0.0, "generator": torch.Generator().manual_seed(0)}
    assert relative_error(pipeline(**arguments).images, expected) > 1e-3


# LoRA -------------------------------------------------------------------------------------------------------------


def save_stock_lora(folder, targets=("to_q", "to_k", "to_v", "to_out.0", "linear_1")):
    """A LoRA file as stock SanaPipeline writes it, its weights away from zero."""
    transformer = small_transformer()
    transformer.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=list(targets), init_lora_weights=False))
    layers = get_peft_model_state_dict(transformer)
    SanaPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


@pytest.mark.parametrize("order", ["retrofit first", "LoRA first"])
def test_a_lora_file_of_stock_sana_acts_as_on_stock(tmp_path, order):
    save_stock_lora(tmp_path)
    stock = small_pipeline()
    without = stock(**call_arguments(output_type="latent")).images
    stock.load_lora_weights(tmp_path)
    expected = stock(**call_arguments(output_type="latent")).images
    assert relative_error(without, expected) > 1e-2

    pipeline = small_pipeline(MHLASanaPipeline)
    if order == "retrofit first":
        pipeline.set_attn_processor(MHLAProcessor(locality=0))
    pipeline.load_lora_weights(tmp_path)
    if order == "LoRA first":
        pipeline.set_attn_processor(MHLAProcessor(locality=0))
    assert relative_error(pipeline(**call_arguments(output_type="latent")).images, expected) < 1e-5
    pipeline.set_adapters(pipeline.get_active_adapters(), 0.5)
    half = pipeline(**call_arguments(output_type="latent")).images
    assert relative_error(half, expected) > 1e-3 and relative_error(half, without) > 1e-3
    pipeline.fuse_lora(lora_scale=1.0)
    pipeline.unload_lora_weights()


def test_a_lora_trained_on_mhla_is_saved_without_the_mixing_and_loads_again(tmp_path):
    def fresh():
        return retrofitted(small_pipeline(MHLASanaPipeline))

    pipeline = fresh()
    pipeline.transformer.add_adapter(
        LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    layers = get_peft_model_state_dict(pipeline.transformer)
    assert not any("processor" in name for name in layers)
    MHLASanaPipeline.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    loaded = fresh()
    loaded.load_lora_weights(tmp_path)
    expected = pipeline(**call_arguments(output_type="latent")).images
    assert relative_error(loaded(**call_arguments(output_type="latent")).images, expected) < 1e-6


# Saving and loading ---------------------------------------------------------------------------------------------

LOAD = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from sana_components import call_arguments
from diffusers import DiffusionPipeline
import mhla_diffusion

pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
np.save(sys.argv[2], pipeline(**call_arguments()).images)
print(type(pipeline).__name__, type(pipeline.transformer).__name__)
"""


@pytest.mark.parametrize("pipeline_class", [SanaPipeline, MHLASanaPipeline], ids=lambda c: c.__name__)
def test_a_new_process_makes_the_same_images(tmp_path, pipeline_class):
    pipeline = retrofitted(small_pipeline(pipeline_class), MHLAConfig(blocks=(3, 4), cpe=True, gate=True))
    expected = pipeline(**call_arguments()).images
    pipeline.save_pretrained(tmp_path / "pipeline", max_shard_size="50KB")
    tests = str(__import__("pathlib").Path(__file__).parent)
    run = [sys.executable, "-c", LOAD, str(tmp_path / "pipeline"), str(tmp_path / "images.npy"), tests]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert out == [pipeline_class.__name__, "MHLASanaTransformer2DModel"]
    np.testing.assert_array_equal(np.load(tmp_path / "images.npy"), expected)


def test_a_stock_folder_opens_as_an_mhla_pipeline(tmp_path):
    stock = small_pipeline()
    stock.save_pretrained(tmp_path)
    pipeline = MHLASanaPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.set_attn_processor(MHLAProcessor(locality=0))
    expected = stock(**call_arguments(output_type="latent")).images
    assert relative_error(pipeline(**call_arguments(output_type="latent")).images, expected) < 1e-5


def test_without_text_encoder_and_vae_it_takes_embeddings_and_gives_latents(tmp_path):
    whole = retrofitted(small_pipeline(MHLASanaPipeline))
    arguments = call_arguments(output_type="latent")
    expected = whole(**arguments).images
    names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
    embeddings = whole.encode_prompt(arguments["prompt"], max_sequence_length=12, complex_human_instruction=None)
    bare = SANA.build_pipeline(whole.transformer, {})
    bare.save_pretrained(tmp_path)
    bare = DiffusionPipeline.from_pretrained(tmp_path)
    assert bare.text_encoder is None and bare.vae is None
    bare.vae_scale_factor = whole.vae_scale_factor
    bare.set_progress_bar_config(disable=True)
    given = call_arguments(output_type="latent", prompt=None, negative_prompt=None) | dict(
        zip(names, embeddings, strict=True)
    )
    assert relative_error(bare(**given).images, expected) < 1e-6
    with pytest.raises(UserError, match="no text encoder.*prompt_embeds"):
        bare(**call_arguments(output_type="latent"))
    with pytest.raises(UserError, match="no VAE.*latent"):
        bare(**given | {"output_type": "pil"})


# The call -----------------------------------------------------------------------------------------------------------


def test_a_model_of_another_size_makes_images_of_its_native_size():
    pipeline = small_pipeline(MHLASanaPipeline)  # 8 latent pixels, factor 8
    image = pipeline("a red circle", num_inference_steps=1, complex_human_instruction=None).images[0]
    assert image.size == (64, 64)
    with pytest.raises(ValueError, match="Invalid sample size"):  # what stock does
        small_pipeline()("a red circle", num_inference_steps=1)


def test_a_published_size_is_binned_as_in_stock():
    arguments = call_arguments(height=500, width=300, use_resolution_binning=True, num_inference_steps=1)
    arguments |= {"prompt": "a", "generator": torch.Generator().manual_seed(0)}
    expected = small_pipeline(sample_size=16)(**arguments).images
    arguments["generator"] = torch.Generator().manual_seed(0)
    images = small_pipeline(MHLASanaPipeline, sample_size=16)(**arguments).images
    assert images.shape == (1, 500, 300, 3)
    np.testing.assert_array_equal(images, expected)


def test_the_call_shows_the_signature_of_stock():
    assert inspect.signature(MHLASanaPipeline.__call__) == inspect.signature(SanaPipeline.__call__)
    assert inspect.signature(MHLASanaPAGPipeline.__call__) == inspect.signature(SanaPAGPipeline.__call__)


def test_transformer_output_equals_stock_through_the_pipelines_guidance_batch():
    stock = small_pipeline()
    pipeline = apply_mhla(small_pipeline(), UNCHANGED)
    inputs = transformer_inputs(12, 20, batch=4)
    with torch.no_grad():
        expected = stock.transformer(**inputs).sample
        assert relative_error(pipeline.transformer(**inputs).sample, expected) < 1e-5
