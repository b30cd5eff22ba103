"""Wan pipelines with MHLA: text, image and video to video, saved and loaded, with real small components."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection
from wan_models import disturb, mhla_transformer, small_components, stock_transformer

from mhla_diffusion import MHLAConfig, MHLAProcessor, MHLAWanTransformer3DModel, apply_mhla
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import (
    MHLADiTPipeline,
    MHLASanaPipeline,
    MHLAWanImageToVideoPipeline,
    MHLAWanPipeline,
    MHLAWanVideoToVideoPipeline,
)

WAN = family_named("wan")
SMALL_VIDEO = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2, "output_type": "np"}


def text_pipeline(transformer=None, **components):
    pipeline = MHLAWanPipeline(transformer=transformer or mhla_transformer(), **{**small_components(), **components})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline, prompt="a cat runs", seed=0, **arguments):
    generator = torch.Generator().manual_seed(seed)
    return pipeline(prompt, generator=generator, max_sequence_length=8, **{**SMALL_VIDEO, **arguments}).frames


@pytest.mark.parametrize("layers", ["all", "hybrid", [1], 0.5])
def test_setting_a_processor_retrofits_a_stock_pipeline(layers):
    pipeline = text_pipeline(stock_transformer())
    before = generate(pipeline)
    with pytest.warns(UserWarning, match="makes noise until it is fine-tuned"):
        pipeline.set_attn_processor(MHLAProcessor(layers=layers))
    assert isinstance(pipeline.transformer, MHLAWanTransformer3DModel)
    assert pipeline.transformer.mhla_config.blocks == (3, 5, 10)
    frames = generate(pipeline)
    assert frames.shape == (1, 5, 16, 32, 3) and np.isfinite(frames).all()
    assert np.abs(frames - before).max() > 1e-4
    pipeline.set_attn_processor(WanAttnProcessor())
    np.testing.assert_array_equal(generate(pipeline), before)


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 16, 32), (5, 48, 16), (13, 16, 16), (9, 32, 80)])
def test_one_pipeline_serves_every_length_and_resolution(frames, height, width):
    pipeline = text_pipeline(mhla_transformer(blocks=(3, 5, 10)))
    video = generate(pipeline, num_frames=frames, height=height, width=width, num_inference_steps=1)
    assert video.shape == (1, frames, height, width, 3) and np.isfinite(video).all()


def test_videos_depend_on_their_own_generator_only():
    pipeline = text_pipeline()

    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    arguments = {**SMALL_VIDEO, "max_sequence_length": 8}
    both = pipeline(["a cat", "a dog runs"], generator=generators(3, 4), **arguments).frames
    alone = pipeline(["a dog runs"], generator=generators(4), **arguments).frames
    np.testing.assert_allclose(both[1], alone[0], atol=1e-5)


def test_saved_pipelines_give_the_same_bits_in_a_new_process(tmp_path):
    own = text_pipeline(mhla_transformer(layers="hybrid", cpe=True))
    stock = WanPipeline(transformer=stock_transformer(), **small_components())
    with pytest.warns(UserWarning, match="noise"):
        apply_mhla(stock, MHLAConfig(blocks=(1, 2, 2), layers=0.5))
    disturb(stock.transformer)
    own.save_pretrained(tmp_path / "MHLAWanPipeline")
    stock.save_pretrained(tmp_path / "WanPipeline")
    script = f"""
        import mhla_diffusion, numpy, torch
        from diffusers import DiffusionPipeline
        torch.set_num_threads({torch.get_num_threads()})
        for name in ("MHLAWanPipeline", "WanPipeline"):
            pipeline = DiffusionPipeline.from_pretrained({str(tmp_path)!r} + "/" + name)
            assert type(pipeline).__name__ == name
            assert type(pipeline.transformer).__name__ == "MHLAWanTransformer3DModel"
            generator = torch.Generator().manual_seed(0)
            frames = pipeline("a cat runs", generator=generator, max_sequence_length=8, **{SMALL_VIDEO}).frames
            numpy.save({str(tmp_path)!r} + "/" + name, frames)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True)
    for pipeline in (own, stock):
        np.testing.assert_array_equal(np.load(tmp_path / f"{type(pipeline).__name__}.npy"), generate(pipeline))


@pytest.mark.parametrize("wrong", [MHLASanaPipeline, MHLADiTPipeline])
def test_a_pipeline_of_another_family_is_named(wrong, tmp_path):
    text_pipeline().save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=f"makes a pipeline with a MHLAWan.*; {wrong.__name__} takes a .*Transformer2DM"
    ):
        wrong.from_pretrained(tmp_path)


def test_loaded_weights_are_aligned_so_that_sums_do_not_depend_on_where_the_file_left_them(tmp_path):
    pipeline = text_pipeline()
    pipeline.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in loaded.transformer.parameters())
    np.testing.assert_array_equal(generate(loaded), generate(pipeline))


def test_without_a_text_encoder_it_takes_embeddings(tmp_path):
    whole = text_pipeline()
    expected = generate(whole)
    prompt = WAN.encode_prompts(small_components(), ["a cat runs"], max_sequence_length=8)["prompt_embeds"]
    null = WAN.null_conditions(small_components(), max_sequence_length=8)["null_embeds"]
    text_pipeline(whole.transformer, tokenizer=None, text_encoder=None).save_pretrained(tmp_path)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path)
    assert pipeline.text_encoder is None
    frames = generate(pipeline, None, prompt_embeds=prompt, negative_prompt_embeds=null)
    np.testing.assert_allclose(frames, expected, atol=1e-5)
    with pytest.raises(UserError, match="no text encoder to read prompts with"):
        generate(pipeline)


def test_the_family_builds_a_pipeline_with_wans_scheduler():
    components = {name: part for name, part in small_components().items() if name != "scheduler"}
    pipeline = WAN.build_pipeline(mhla_transformer(), components)
    assert type(pipeline) is MHLAWanPipeline
    assert pipeline.scheduler.config.flow_shift == 3.0 and pipeline.scheduler.config.use_flow_sigmas
    assert np.isfinite(generate(pipeline)).all()


def test_training_and_generation_agree_on_the_direction_of_time():
    """A model that knows the velocity to one video generates it from any noise."""
    target = torch.randn(1, 4, 2, 2, 4, generator=torch.Generator().manual_seed(1))

    class Oracle(WanTransformer3DModel):
        def forward(self, hidden_states, timestep, encoder_hidden_states, **_):
            sigma = (timestep / 1000).view(-1, 1, 1, 1, 1)
            return ((hidden_states - target) / sigma,)

    oracle = stock_transformer()
    oracle.__class__ = Oracle
    for pipeline in (text_pipeline(oracle), WAN.build_pipeline(oracle, {**small_components(), "scheduler": None})):
        latents = generate(pipeline, output_type="latent", num_inference_steps=8, guidance_scale=1.0)
        torch.testing.assert_close(latents, target, atol=1e-2, rtol=0)
    generators = [torch.Generator().manual_seed(0)]
    conditions = {"prompt_embeds": torch.zeros(1, 5, 16)}
    given = WAN.objective(label_dropout=0.0).prepare(oracle, target, conditions, generators)
    loss = WAN.objective().loss(_Sample(oracle), given)["loss"]
    assert loss < 1e-8


class _Sample(torch.nn.Module):
    """Gives the oracle's tuple as an output with `.sample`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        (self.sample,) = self.model(hidden_states, timestep, encoder_hidden_states)
        return self


@pytest.mark.parametrize("cls", [WanImageToVideoPipeline, MHLAWanImageToVideoPipeline])
def test_an_image_becomes_a_video(cls, tmp_path):
    torch.manual_seed(0)
    vision = CLIPVisionConfig(hidden_size=8, projection_dim=8, intermediate_size=16, num_hidden_layers=2,
                              num_attention_heads=2, image_size=32, patch_size=16)  # fmt: skip
    transformer = stock_transformer(in_channels=12, image_dim=8, added_kv_proj_dim=24)
    pipeline = cls(
        transformer=transformer,
        image_encoder=CLIPVisionModelWithProjection(vision).eval(),
        image_processor=CLIPImageProcessor(crop_size=32, size=32),
        **small_components(),
    )
    pipeline.set_progress_bar_config(disable=True)
    with pytest.warns(UserWarning, match="noise"):
        apply_mhla(pipeline, MHLAConfig(blocks=(1, 2, 2), layers="hybrid"))
    disturb(pipeline.transformer)
    image = Image.new("RGB", (32, 16), "teal")

    def video(pipe):
        generator = torch.Generator().manual_seed(0)
        # diffusers takes everything before the last 512 tokens of the context for the image's
        return pipe(image, "a cat", generator=generator, max_sequence_length=512, **SMALL_VIDEO).frames

    frames = video(pipeline)
    assert frames.shape == (1, 5, 16, 32, 3) and np.isfinite(frames).all()
    pipeline.save_pretrained(tmp_path)
    np.testing.assert_array_equal(video(DiffusionPipeline.from_pretrained(tmp_path)), frames)


def test_a_video_becomes_a_video():
    pipeline = MHLAWanVideoToVideoPipeline(transformer=mhla_transformer(), **small_components())
    pipeline.set_progress_bar_config(disable=True)
    video = [Image.new("RGB", (32, 16), colour) for colour in ("red", "green", "blue", "black", "white")]
    arguments = {name: value for name, value in SMALL_VIDEO.items() if name != "num_frames"}
    frames = pipeline(video=video, prompt="a dog", strength=0.5, max_sequence_length=8, **arguments).frames
    assert frames.shape == (1, 5, 16, 32, 3) and np.isfinite(frames).all()


def test_both_transformers_of_a_two_stage_pipeline_get_mhla():
    pipeline = text_pipeline(stock_transformer(), transformer_2=stock_transformer(1), boundary_ratio=0.9)
    with pytest.warns(UserWarning, match="noise"):
        pipeline.set_attn_processor(MHLAProcessor(layers="hybrid"))
    for transformer in (pipeline.transformer, pipeline.transformer_2):
        assert transformer.mhla_config.layers == "hybrid"
    assert np.isfinite(generate(pipeline)).all()
    pipeline.set_attn_processor(WanAttnProcessor())
    for transformer in (pipeline.transformer, pipeline.transformer_2):
        assert all(isinstance(x, WanAttnProcessor) for x in transformer.attn_processors.values())
