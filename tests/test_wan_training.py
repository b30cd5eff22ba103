"""What fine-tuning Wan on videos needs: scaled latents, clips and small components from videos, other block counts."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import wan_models
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from PIL import Image
from test_training_videos import folder_of
from test_training_wan import video_config
from test_video_files import numbers
from training_runs import ROOT

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.randomness import sample_generator
from mhla_diffusion.training import finetune, validation
from mhla_diffusion.training.clips import cut_clips
from mhla_diffusion.training.components_wan import read_clips, write_wan_components
from mhla_diffusion.training.config import DataOptions, ModelOptions, ValidationOptions, load_config
from mhla_diffusion.training.model import load_model
from mhla_diffusion.training.moving_digits import write_moving_digits
from mhla_diffusion.training.video_files import read_clip
from mhla_diffusion.training.videos import VideoFolder

WAN = family_named("wan")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    write_moving_digits(folder / "videos", size=32, videos=5, frames=9)
    return folder / "videos"


# Latents --------------------------------------------------------------------------------------------------------------


class _Still(WanTransformer3DModel):
    """Predicts no motion, so that the pipeline decodes the latents that it is given."""

    def forward(self, hidden_states, **_):
        return (torch.zeros_like(hidden_states),)


def test_the_pipeline_decodes_the_scaled_latents_to_what_the_vae_makes_of_the_video(digits):
    video = VideoFolder(digits / "train", DataOptions(size=32, num_frames=5)).read(0, sample_generator(0)).image[None]
    vae = wan_models.small_vae()
    latents = WAN.posterior({"vae": vae}, video)["mean"]
    assert latents.shape == (1, 4, 2, 4, 4)
    with torch.no_grad():
        expected = vae.decode(vae.encode(video).latent_dist.mode()).sample
    still = wan_models.stock_transformer()
    still.__class__ = _Still
    pipeline = WanPipeline(None, None, vae, UniPCMultistepScheduler(prediction_type="flow_prediction",
                           use_flow_sigmas=True, flow_shift=3.0), transformer=still)  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    decoded = pipeline(
        prompt_embeds=torch.zeros(1, 4, 16), latents=latents, height=32, width=32, num_frames=5,
        num_inference_steps=2, guidance_scale=1.0, output_type="pt",
    ).frames  # fmt: skip
    torch.testing.assert_close(decoded[0], ((expected[0] + 1) / 2).clamp(0, 1).transpose(0, 1), atol=1e-4, rtol=0)


def test_images_are_videos_of_one_frame():
    images = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    components = {"vae": wan_models.small_vae()}
    one, other = (WAN.posterior(components, x)["mean"] for x in (images, images[:, :, None]))
    assert one.shape == (2, 4, 1, 2, 3) and torch.equal(one, other)


def test_sizes_that_the_vae_or_the_patches_would_cut_are_told():
    components = {"vae": wan_models.small_vae()}
    with pytest.raises(UserError, match="videos have 6 frames; Wan's VAE takes 4k . 1"):
        WAN.posterior(components, torch.zeros(1, 3, 6, 16, 16))
    with pytest.raises(UserError, match="videos are 16×20 pixels; Wan's VAE takes multiples of 8"):
        WAN.posterior(components, torch.zeros(1, 3, 5, 16, 20))
    model, generators = wan_models.stock_transformer(), [torch.Generator()]
    with pytest.raises(UserError, match="latents are 2×3×4 .* patches of 1×2×2 do not divide"):
        conditions = {"prompt_embeds": torch.zeros(1, 4, 16)}
        WAN.objective().prepare(model, torch.zeros(1, 4, 2, 3, 4), conditions, generators)


# From videos to a run -------------------------------------------------------------------------------------------------


def test_clips_of_one_video_are_split_so_that_no_frame_is_in_both(tmp_path):
    root = folder_of(tmp_path / "v", long=40, short=12)
    counts = cut_clips(root, tmp_path / "clips", size=32, num_frames=9, fps=10, stride=4)
    seen = {"train": set(), "test": set()}
    for split in seen:
        rows = [json.loads(line) for line in (tmp_path / "clips" / split / "metadata.jsonl").read_text().splitlines()]
        assert len(rows) == counts[split] == len(list((tmp_path / "clips" / split).glob("*.mp4")))
        for row in rows:
            name, start = row["file_name"].removesuffix(".mp4").rsplit("-", 1)
            assert row["text"] == f"a clock named {name}"
            clip = read_clip(tmp_path / "clips" / split / row["file_name"], 9, 10, 32, 32)
            assert numbers(clip) == list(range(int(start), int(start) + 9))
            seen[split] |= {(name, number) for number in numbers(clip)}
    assert not seen["train"] & seen["test"]
    assert {name for name, _ in seen["test"]} == {"long"}  # the other one has no room for two clips
    assert len(VideoFolder(tmp_path / "clips" / "train", DataOptions(size=32, num_frames=9, fps=10))) == counts["train"]
    with pytest.raises(UserError, match="no video in .* has 90 frames at 10 per second"):
        cut_clips(folder_of(tmp_path / "w", a=50), tmp_path / "others", num_frames=45, fps=10)


def damage_end(path):
    """Overwrite the last 30 % of a video's content; its index still names all frames."""
    content = bytearray(path.read_bytes())
    place = content.index(b"mdat")
    size = int.from_bytes(content[place - 4 : place], "big")
    kept = 7 * size // 10
    content[place + kept : place + size - 4] = bytes(size - 4 - kept)
    path.write_bytes(content)


def test_damaged_videos_are_left_out_of_clips_and_told_until_none_is_left(tmp_path):
    root = folder_of(tmp_path / "v", whole=30, half=40, none=30)
    damage_end(root / "half.mp4")
    (root / "none.mp4").write_bytes(b"no video")
    how = {"size": 32, "num_frames": 9, "fps": 10, "stride": 4}
    with pytest.warns(UserWarning, match="cannot be read|is damaged|ends at") as told:
        counts = cut_clips(root, tmp_path / "clips", **how)
    sentences = [str(warning.message) for warning in told]
    assert [sum(f"{name}.mp4" in sentence for sentence in sentences) for name in ("whole", "half", "none")] == [0, 1, 1]
    assert sentences[-1] == "2 damaged videos were left out, in whole or in part"
    names = {split: [path.name for path in (tmp_path / "clips" / split).glob("*.mp4")] for split in counts}
    assert counts == {split: len(found) for split, found in names.items()}
    assert any("half" in name for name in names["train"]) and all("whole" in name for name in names["test"])

    (root / "whole.mp4").unlink()
    (root / "whole.txt").unlink()
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(UserError, match="no clip of .* for the test split can be read; the first: video .*(half|none)"),
    ):
        cut_clips(root, tmp_path / "others", **how)
    assert not (tmp_path / "others").exists()


def test_damaged_videos_are_left_out_of_components_and_told_until_one_is_left(tmp_path):
    root = folder_of(tmp_path / "v", a=9, b=9, c=9)
    (root / "b.mp4").write_bytes(b"no video")
    with pytest.warns(UserWarning, match="b.mp4 cannot be read: .*; it is left out"):
        clips, _ = read_clips(str(root), DataOptions(size=32, num_frames=9, fps=10))
    assert [numbers(clip.permute(1, 2, 3, 0).numpy()) for clip in clips] == [list(range(9))] * 2
    (root / "a.mp4").write_bytes(b"no video")
    with pytest.warns(UserWarning), pytest.raises(UserError, match="1 can be read, but 2 .*; the first: video .*a.mp4"):
        read_clips(str(root), DataOptions(size=32, num_frames=9, fps=10))


def test_components_made_from_videos_are_a_pipeline_with_scaled_latents(digits, tmp_path):
    report = write_wan_components(tmp_path / "wan", str(digits / "train"), size=32, steps=2, num_frames=9, fps=16)
    assert report.images == 4 and "tokens" in str(report) and report.pictures.shape == (2, 1, 3, 32, 32)
    pipeline = WanPipeline.from_pretrained(tmp_path / "wan")
    source = VideoFolder(digits / "train", DataOptions(size=32, num_frames=9))
    generators = [sample_generator(0, "components", i) for i in range(4)]
    clips = torch.stack([source.read(i, generator).image for i, generator in enumerate(generators)])
    latents = WAN.posterior(pipeline.components, clips[1:])["mean"]  # those it was trained on
    assert latents.shape == (3, 8, 3, 8, 8)
    torch.testing.assert_close(latents.mean((0, 2, 3, 4)), torch.zeros(8), atol=1e-2, rtol=0)
    torch.testing.assert_close(latents.std((0, 2, 3, 4)), torch.ones(8), atol=1e-2, rtol=0)
    texts = [source.texts[0], source.texts[1]]
    embeds = WAN.encode_prompts(pipeline.components, texts)["prompt_embeds"]
    assert embeds.shape == (2, 512, 64) and (embeds[0] - embeds[1]).abs().max() > 0.1
    assert pipeline.tokenizer.decode(pipeline.tokenizer(texts[0]).input_ids) == f"{texts[0]}</s>"
    with pytest.raises(UserError, match="is not empty"):
        write_wan_components(tmp_path / "wan", str(digits / "train"))


@pytest.mark.filterwarnings("ignore:this model was trained with softmax")
def test_a_checkpoint_of_other_block_counts_is_resized_with_a_message(tmp_path):
    wan_models.mhla_transformer(blocks=(2, 2, 3)).save_pretrained(tmp_path / "wan")
    said = []
    options = {"family": "wan", "pretrained": str(tmp_path / "wan")}
    model = load_model(ModelOptions(**options, mhla={"blocks": [1, 2, 4]}), 0, said.append)[1]
    assert model.mhla_config.blocks == (1, 2, 4)
    assert {mixing.matrix().shape for mixing in model.mixings()} == {(8, 8)}
    assert len(said) == 1 and "2, 2, 3" in said[0] and "1, 2, 4" in said[0] and "interpolated" in said[0]
    with pytest.raises(UserError, match="already has MHLA attention .*, which blocks=.*, gate=False would change"):
        load_model(ModelOptions(**options, mhla={"blocks": [1, 2, 4], "gate": False}), 0)
    load_model(ModelOptions(**options, mhla={"blocks": [2, 2, 3]}), 0, said.append)
    assert len(said) == 1  # nothing was resized


def test_the_recipes_of_the_small_run_follow_each_other(digits, tmp_path):
    """The small run's four recipes in miniature: a softmax teacher from components, then a retrofitted student."""
    write_wan_components(tmp_path / "parts", str(digits / "train"), size=32, steps=1, num_frames=5, fps=16)
    small = [
        f"data.train={digits / 'train'}", f"data.validation={digits / 'test'}", "data.size=32", "data.num_frames=5",
        "train.steps=1", "validation.loss_images=1", "logging.tensorboard=false", "logging.progress=false",
        "data.max_tokens=8", "checkpoint.every=0",
    ]  # fmt: skip
    teacher = load_config(
        ROOT / "configs" / "wan_tiny.yaml",
        [*small, f"model.components={tmp_path / 'parts'}", f"output_dir={tmp_path / 'teacher'}"],
    )
    pipeline = finetune(teacher).pipeline
    kinds = {}
    for name in ("mhla", "hybrid", "linear"):
        config = load_config(
            ROOT / "configs" / f"wan_tiny_{name}.yaml",
            [*small, f"model.pretrained={pipeline}", f"output_dir={tmp_path / name}"],
        )
        model = load_model(config.model, 0, lambda _: None)[1]
        kinds[name] = [len(list(model.mixings())), model.mhla_config.blocks]
    assert kinds == {"mhla": [6, (3, 4, 4)], "hybrid": [4, (3, 4, 4)], "linear": [6, (1, 1, 1)]}
    assert finetune(config).metrics["loss"] > 0


def test_a_number_of_frames_that_the_vae_has_no_latents_for_ends_the_command_with_a_sentence(digits, tmp_path):
    config = video_config(tmp_path, tmp_path / "run", {"data": {"train": str(digits / "train"), "num_frames": 82}})
    with pytest.raises(UserError, match="data.num_frames is 82; 4k . 1 frames are accepted, such as 81"):
        finetune(config)


def test_videos_that_are_too_short_for_a_command_are_told_with_its_own_options(digits, tmp_path):
    with pytest.raises(
        UserError, match="shorter than 33 frames .* the longest has 14; lower --num-frames or raise --f"
    ):
        write_wan_components(tmp_path / "parts", str(digits / "train"), size=32)
    with pytest.raises(UserError, match="; lower --num-frames or raise --fps$"):
        cut_clips(digits / "train", tmp_path / "clips", size=32)


def test_samples_that_the_pipeline_cannot_make_are_told_at_the_start(digits, tmp_path, monkeypatch):
    parts = write_wan_components(tmp_path / "parts", str(digits / "train"), size=32, steps=1, num_frames=5, fps=16)
    arguments = [
        f"model.components={parts.folder}", f"data.train={digits / 'train'}", "data.validation=null", "data.size=24",
        "data.num_frames=5", "data.fps=16", "train.steps=1", "validation.images=1", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    monkeypatch.setattr("mhla_diffusion.training.loop.Learner", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(UserError, match="samples of 5×24×24 pixels.* multiples of 16; change data.size"):
        finetune(load_config(ROOT / "configs" / "wan_tiny.yaml", arguments))
    with pytest.raises(UserError, match="--size 24 does not suit the pipeline; a multiple of 16 is accepted"):
        write_wan_components(tmp_path / "others", str(digits / "train"), size=24)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["clips", "out"], "--videos names the videos"),
        (["digits", "out", "--videos", "x"], "--videos names the videos"),
        (["clips", "out", "--videos", "nowhere"], "--videos is 'nowhere', which is not a folder"),
        (["digits", "out", "--fps", "8"], "--num-frames and --fps are of clips"),
        (["clips", "out", "--videos", ".", "--num-frames", "8"], "--num-frames is 8; 4k + 1 frames are accepted"),
    ],
)
def test_the_command_that_prepares_data_says_what_is_wrong(tmp_path, arguments, reason):
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and reason in done.stderr
    assert not (tmp_path / "out").exists()


def test_processes_write_each_video_of_a_grid_once(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(validation, "save_videos", lambda videos, names, folder, fps: written.extend(names))
    family = SimpleNamespace(
        text_components=(),
        build_pipeline=lambda *_: Pipeline(),
        pipeline_arguments=lambda rows, shape: {"count": len(rows["prompt_embeds"])},
    )

    class Pipeline:
        def set_progress_bar_config(self, **_):
            pass

        def __call__(self, count, **_):
            return SimpleNamespace(frames=[[Image.new("RGB", (8, 8))] * 5] * count)

    for rank in range(4):
        accelerator = SimpleNamespace(
            num_processes=4, process_index=rank, device="cpu", gather=lambda x: torch.cat([x] * 4)
        )
        how = (ValidationOptions(images=5), {"prompt_embeds": torch.zeros(5, 1)}, (5, 8, 8), 0, accelerator, tmp_path)
        validation.validation_grid(family, None, {}, *how)
    assert sorted(written) == [0, 1, 2, 3, 4]


def test_clips_of_videos_of_one_name_are_kept_apart(tmp_path):
    root = folder_of(tmp_path / "v", a_b=24)
    folder_of(root / "a", b=24)
    counts = cut_clips(root, tmp_path / "clips", size=32, num_frames=9, fps=10, stride=4)
    assert counts["train"] == len(list((tmp_path / "clips" / "train").glob("*.mp4")))
