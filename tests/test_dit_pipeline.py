"""MHLADiTPipeline: stock DiT's images, any number of classes, pixels or latents, one seed per image."""

import json

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    DiTPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
)
from diffusers.models.attention_processor import AttnProcessor2_0
from dit_models import SMALL, disturb, small_dit, small_vae

from mhla_diffusion import MHLADiTTransformer2DModel
from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


def mhla_pipeline(scheduler=None, vae=None, id2label=None, **arguments):
    torch.manual_seed(0)
    transformer = disturb(MHLADiTTransformer2DModel(**{**SMALL, "mhla": {"cpe": True}, **arguments})).eval()
    return quiet(MHLADiTPipeline(transformer, vae, scheduler or DDIMScheduler(clip_sample=False), id2label))


def seeds(*numbers):
    return [torch.Generator().manual_seed(n) for n in numbers]


def labels_seen(pipe):
    """The list to which the class labels of every transformer call are added."""
    seen = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["class_labels"].tolist()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("guidance_scale", [4.0, 1.0])
@pytest.mark.parametrize("out_channels", [8, 4])
def test_images_of_a_stock_model_are_those_of_the_stock_pipeline(guidance_scale, out_channels):
    transformer, vae = small_dit(num_embeds_ada_norm=1000, out_channels=out_channels), small_vae()
    stock, ours = (quiet(c(transformer, vae, DDIMScheduler())) for c in (DiTPipeline, MHLADiTPipeline))

    def images(pipe, output_type):
        return pipe(
            [3, 999],
            guidance_scale=guidance_scale,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(5),
            output_type=output_type,
        ).images

    expected = images(stock, "np")
    assert expected.shape == (2, 16, 16, 3) and expected.std() > 0.05
    np.testing.assert_allclose(images(ours, "np"), expected, atol=1e-5)
    np.testing.assert_allclose(images(ours, "pt").permute(0, 2, 3, 1), expected, atol=1e-5)
    for image, array in zip(images(ours, "pil"), expected, strict=True):
        assert image.mode == "RGB" and np.abs(np.asarray(image) - 255 * array).max() < 0.51


def test_guidance_doubles_the_batch_with_the_models_own_null_class():
    pipe = mhla_pipeline()
    seen = labels_seen(pipe)
    pipe([3, 7], num_inference_steps=2, output_type="latent")
    assert seen == [[3, 7, 10, 10]] * 2
    seen.clear()
    pipe([3, 7], guidance_scale=1.0, num_inference_steps=2, output_type="latent")
    assert seen == [[3, 7]] * 2


@pytest.mark.parametrize("channels", [1, 3])
def test_without_a_vae_the_latents_are_the_pixels(channels):
    pipe = mhla_pipeline(in_channels=channels, out_channels=2 * channels)
    assert family_named("dit").build_pipeline(pipe.transformer, {}).vae is None
    result = {
        kind: pipe([1, 2], num_inference_steps=2, generator=seeds(0, 1), output_type=kind).images
        for kind in ("latent", "np", "pil")
    }
    assert result["latent"].shape == (2, channels, 8, 8)
    expected = (result["latent"] / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(result["np"], expected, atol=1e-6)
    for image, array in zip(result["pil"], expected, strict=True):
        assert image.mode == {1: "L", 3: "RGB"}[channels] and image.size == (8, 8)
        assert np.abs(np.asarray(image).reshape(array.shape) - 255 * array).max() < 0.51


@pytest.mark.parametrize(
    "scheduler",
    [
        DDIMScheduler(clip_sample=False),
        DDPMScheduler(clip_sample=False, variance_type="learned_range"),
        DDPMScheduler(clip_sample=False),
        EulerDiscreteScheduler(),
        DPMSolverMultistepScheduler(),
    ],
    ids=lambda s: type(s).__name__ + "-" + str(s.config.get("variance_type")),
)
def test_an_image_depends_on_its_own_generator_and_label_only(scheduler):
    pipe = mhla_pipeline(scheduler)

    def latents(labels, generators):
        return pipe(labels, num_inference_steps=3, generator=generators, output_type="latent").images

    together = latents([1, 5, 9], seeds(11, 12, 13))
    assert together.isfinite().all()
    alone = torch.cat([latents([label], seeds(seed)) for label, seed in ((1, 11), (5, 12), (9, 13))])
    reordered = latents([9, 1], seeds(13, 11))
    scale = together.abs().max()
    assert (together - alone).abs().max() < 1e-4 * scale
    assert (together[[2, 0]] - reordered).abs().max() < 1e-4 * scale
    assert (latents([1], seeds(12)) - alone[:1]).abs().max() > 1e-2 * scale


def test_a_scheduler_that_learns_the_range_is_given_the_predicted_variance():
    scheduler = DDPMScheduler(clip_sample=False, variance_type="learned_range")
    pipe = mhla_pipeline(scheduler)
    result = pipe([2], guidance_scale=3.0, num_inference_steps=3, generator=seeds(4), output_type="latent").images

    generator = torch.Generator().manual_seed(4)
    x = torch.randn(1, 4, 8, 8, generator=generator)
    scheduler.set_timesteps(3)
    with torch.no_grad():
        for t in scheduler.timesteps:
            conditional, unconditional = (
                pipe.transformer(x, timestep=t.view(1), class_labels=torch.tensor([label])).sample for label in (2, 10)
            )
            epsilon = unconditional[:, :4] + 3.0 * (conditional[:, :4] - unconditional[:, :4])
            both = torch.cat([epsilon, conditional[:, 4:]], dim=1)
            x = scheduler.step(both, t, x, generator=generator).prev_sample
    assert torch.allclose(result, x, rtol=1e-4, atol=1e-4)


def test_the_noise_is_scaled_to_the_schedulers_first_sigma():
    pipe = mhla_pipeline(EulerDiscreteScheduler(timestep_spacing="linspace"))
    inputs = []
    pipe.transformer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    pipe([2], guidance_scale=1.0, num_inference_steps=4, generator=seeds(8), output_type="latent")
    noise, sigma = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(8)), pipe.scheduler.sigmas[0]
    # σ·noise, divided by √(σ² + 1) as the model takes it; unscaled noise would come out σ times smaller.
    assert torch.allclose(inputs[0], sigma * noise / (sigma**2 + 1).sqrt(), rtol=1e-5)


def test_given_latents_replace_the_drawn_noise():
    pipe = mhla_pipeline()
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(8))
    given = pipe([2], num_inference_steps=2, latents=noise, output_type="latent").images
    drawn = pipe([2], num_inference_steps=2, generator=seeds(8), output_type="latent").images
    assert torch.equal(given, drawn)


def test_a_tuple_is_returned_on_request():
    pipe = mhla_pipeline()
    (images,) = pipe(4, num_inference_steps=1, return_dict=False, output_type="pt")
    assert images.shape == (1, 4, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"class_labels": [3, 10]}, "class_labels has 10, but the model has classes 0 to 9"),
        ({"class_labels": [-1]}, "class_labels has -1, but the model has classes 0 to 9"),
        ({"class_labels": [1.5]}, "class_labels has 1.5, but the model has classes 0 to 9"),
        ({"class_labels": []}, "class_labels is empty; give one class id per image"),
        ({"class_labels": ["cat"]}, r"class_labels=\['cat'\] must be class ids; get_label_ids gives those of names"),
        ({"class_labels": [1, 2], "generator": seeds(0)}, "generator has 1 entries for 2 class_labels; give one each"),
        ({"class_labels": [1], "num_inference_steps": 0}, "num_inference_steps=0 must be at least 1"),
        ({"class_labels": [1], "output_type": "jpeg"}, "output_type='jpeg' must be one of pil, np, pt, latent"),
        (
            {"class_labels": [1], "latents": torch.zeros(1, 3, 8, 8)},
            r"latents has shape \(1, 3, 8, 8\); this model and these labels need \(1, 4, 8, 8\)",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_runs(arguments, sentence):
    pipe = mhla_pipeline()
    seen = labels_seen(pipe)
    with pytest.raises(UserError, match=sentence):
        pipe(**arguments)
    assert not seen


def test_class_names_survive_saving(tmp_path):
    names = {0: "zero, nought", 1: "one", 9: "nine"}
    mhla_pipeline(vae=small_vae(), id2label=names).save_pretrained(tmp_path)
    for kind in (MHLADiTPipeline, DiffusionPipeline):
        pipe = kind.from_pretrained(tmp_path)
        assert pipe.labels == {"zero": 0, "nought": 0, "one": 1, "nine": 9}
        assert pipe.get_label_ids(["nine", "nought"]) == [9, 0]
        pipe.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "model_index.json").read_text())["id2label"]["9"] == "nine"


def test_a_pipeline_without_a_vae_survives_saving(tmp_path):
    pipe = mhla_pipeline(in_channels=1, out_channels=2)
    expected = pipe([4], num_inference_steps=2, generator=seeds(1), output_type="pt").images
    pipe.save_pretrained(tmp_path)
    loaded = quiet(DiffusionPipeline.from_pretrained(tmp_path))
    assert type(loaded) is MHLADiTPipeline and loaded.vae is None
    assert torch.equal(loaded([4], num_inference_steps=2, generator=seeds(1), output_type="pt").images, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pipelines_load_and_stay_near_float32(tmp_path, dtype):
    pipe = mhla_pipeline(vae=small_vae())

    def images(pipe):
        return pipe([1, 7], num_inference_steps=3, generator=seeds(0, 1), output_type="np", guidance_scale=2.0).images

    expected = images(pipe)
    pipe.save_pretrained(tmp_path)
    half = quiet(MHLADiTPipeline.from_pretrained(tmp_path, torch_dtype=dtype))
    assert half.transformer.dtype == half.vae.dtype == dtype
    result = images(half)
    assert result.dtype == np.float32 and np.isfinite(result).all()
    assert np.abs(result - expected).mean() < 0.02 < expected.std()


def test_stock_processors_pass_through_to_the_transformer():
    pipe = quiet(MHLADiTPipeline(small_dit(), None, DDIMScheduler()))
    with pytest.raises(UserError, match="processor=<.*AttnProcessor2_0.*> must be an MHLAProcessor on a DiT"):
        pipe.set_attn_processor(AttnProcessor2_0())
    pipe = mhla_pipeline()
    processors = pipe.transformer.attn_processors
    pipe.set_attn_processor(processors)
    assert [*pipe.transformer.attn_processors.values()] and pipe.transformer.mhla_config.cpe
