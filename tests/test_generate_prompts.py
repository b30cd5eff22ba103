"""Images and videos from prompts: files, names and rates; processes that share a folder; what is refused."""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import signal
import time
import warnings
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanVideoToVideoPipeline
from dit_models import small_dit
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sana_components import UNCHANGED, small_components
from wan_models import mhla_transformer, stock_transformer
from wan_models import small_components as wan_components

from mhla_diffusion import apply_mhla
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline, MHLASanaPipeline, MHLAWanPipeline
from mhla_diffusion.pipelines.generate import generate_images, load_pipeline
from mhla_diffusion.pipelines.generation_folder import CLAIMS, Claims, check_name, complete, file_name, item_files
from mhla_diffusion.pipelines.prompts import read_prompts
from mhla_diffusion.randomness import sample_generator
from mhla_diffusion.training.video_files import write_mp4

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
IMAGES = {"num_inference_steps": 1, "height": 64, "width": 96, "progress": False, "batch_size": 2}
VIDEOS = {"num_inference_steps": 1, "height": 32, "width": 48, "num_frames": 5, "progress": False, "batch_size": 2}
PROMPTS = [{"prompt": text} for text in ("a cat", "a dog", "a cat runs", "a dog sleeps", "a cat")]


@pytest.fixture(scope="module")
def sana():
    pipeline = MHLASanaPipeline(**small_components())
    with torch.no_grad():  # random weights whose outputs depend visibly on the prompt
        generator = torch.Generator().manual_seed(0)
        for parameter in pipeline.transformer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return apply_mhla(pipeline, UNCHANGED)


@pytest.fixture(scope="module")
def wan():
    return MHLAWanPipeline(**wan_components(), transformer=mhla_transformer())


def files(folder):
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".png", ".mp4"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def hidden(folder):
    return sorted(path.name for path in Path(folder).glob(".*"))


# Images ---------------------------------------------------------------------------------------------------------------


def test_image_of_a_prompt_is_the_pipelines_own(sana, tmp_path):
    report = generate_images(sana, PROMPTS, tmp_path, seed=3, guidance_scale=2.0, **IMAGES | {"batch_size": 1})
    assert report.num_new == 5 and sorted(files(tmp_path)) == [file_name(i) for i in range(5)]
    (expected,) = sana(
        "a cat runs", height=64, width=96, num_inference_steps=1, guidance_scale=2.0,
        generator=[sample_generator(3, "image", 2)],
    ).images  # fmt: skip
    with Image.open(tmp_path / file_name(2)) as image:
        assert image.mode == "RGB" and image.size == (96, 64)
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert lines == [{"file": file_name(i), **prompt} for i, prompt in enumerate(PROMPTS)]


def test_an_instruction_takes_the_place_of_the_pipelines(sana, wan, tmp_path):
    for name, instruction in (("own", None), ("given", ["paint: "]), ("none", [])):
        options = IMAGES | {"batch_size": 1, "instruction": instruction}
        generate_images(sana, PROMPTS[:1], tmp_path / name, **options)
    assert len({files(tmp_path / name)[file_name(0)] for name in ("own", "given", "none")}) == 3
    (expected,) = sana(
        PROMPTS[0]["prompt"], height=64, width=96, num_inference_steps=1, generator=[sample_generator(0, "image", 0)],
        complex_human_instruction=["paint: "],
    ).images  # fmt: skip
    with Image.open(tmp_path / "given" / file_name(0)) as image:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    with pytest.raises(UserError, match="other settings|instruction"):
        generate_images(sana, PROMPTS[:1], tmp_path / "none", **IMAGES | {"batch_size": 1})
    with pytest.raises(UserError, match="complex_human_instruction"):
        generate_images(wan, PROMPTS[:1], tmp_path / "video", instruction=["film: "])


def test_image_depends_on_its_prompt_and_index_only(sana, tmp_path):
    generate_images(sana, PROMPTS, tmp_path / "a", **IMAGES)
    generate_images(sana, [PROMPTS[0]] * 5, tmp_path / "b", **IMAGES)
    a, b = files(tmp_path / "a"), files(tmp_path / "b")
    assert [a[name] == b[name] for name in sorted(a)] == [True, False, False, False, True]
    assert len(set(b.values())) == 5


def test_seed_index_stands_for_the_index(sana, tmp_path):
    generate_images(sana, [{"prompt": "a cat"}] * 3, tmp_path / "a", **IMAGES)
    conditions = [{"prompt": "a cat", "seed_index": i, "name": f"cat-{i}"} for i in (2, 0)]
    generate_images(sana, conditions, tmp_path / "b", **IMAGES)
    a, b = files(tmp_path / "a"), files(tmp_path / "b")
    assert b == {"cat-0.png": a[file_name(0)], "cat-2.png": a[file_name(2)]}


def test_defaults_of_the_pipeline_are_used_and_recorded(sana, tmp_path, monkeypatch):
    generate_images(sana, PROMPTS[:1], tmp_path, progress=False, batch_size=1)
    manifest = json.loads((tmp_path / "generation.json").read_text())
    assert manifest["num_inference_steps"] == 20 and manifest["guidance_scale"] == 4.5
    assert manifest["height"] is None and "num_frames" not in manifest and "fps" not in manifest
    with Image.open(tmp_path / file_name(0)) as image:
        assert image.size == (64, 64)  # the native size of the small model


def test_resumed_images_equal_those_of_one_go(sana, tmp_path):
    generate_images(sana, PROMPTS, tmp_path / "whole", **IMAGES)
    generate_images(sana, PROMPTS[:3], tmp_path / "cut", **IMAGES)
    (tmp_path / "cut" / file_name(1)).unlink()
    report = generate_images(sana, PROMPTS, tmp_path / "cut", **IMAGES)
    assert report.num_new == 3 and "3 made now" in str(report) and "2 were there" in str(report)
    assert files(tmp_path / "cut") == files(tmp_path / "whole") and not hidden(tmp_path / "cut")


ODD = [
    'a "quoted" cat?*',
    "Ünïcode 猫 🐈",
    "50% off; rm -rf $HOME",
    "sub folder/deep er/x.y",
    "trailing ",
    "-dash",
    "l" * 251,
]


def test_odd_names_and_prompts_are_kept_and_resumed(sana, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ["line\u2028separator \x85 \x0c", "tab\there", "quotes \"'", "back\\slash", "new\nline", "猫", "{}"]
    rows = [{"prompt": text, "name": name} for text, name in zip(texts, ODD, strict=True)]
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    conditions = read_prompts(prompts)
    assert conditions == rows
    generate_images(sana, conditions, tmp_path / "out", **IMAGES)
    before = files(tmp_path / "out")
    assert set(before) == {f"{name}.png" for name in ODD}
    (tmp_path / "out" / f"{ODD[3]}.png").unlink()
    assert generate_images(sana, conditions, tmp_path / "out", **IMAGES).num_new == 1
    assert files(tmp_path / "out") == before


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_accepted_names_stay_in_the_folder_and_fit(name):
    try:
        check_name(name)
    except UserError as error:
        assert "\n" not in str(error)
        return
    path = Path("/out") / file_name(0, name)
    assert path.is_relative_to("/out") and ".." not in path.parts and not path.name.startswith(".")
    assert all(len(part.encode()) <= 255 for part in path.parts)


@pytest.mark.parametrize(("cls", "what"), [(WanImageToVideoPipeline, "image"), (WanVideoToVideoPipeline, "video")])
def test_pipelines_that_begin_with_an_image_or_a_video_are_refused(tmp_path, cls, what):
    pipeline = cls(transformer=stock_transformer(in_channels=12), **wan_components())
    with pytest.raises(UserError, match=f"^{cls.__name__} needs {what}, which cannot be given here"):
        generate_images(pipeline, PROMPTS, tmp_path / "out", **VIDEOS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc/x", "a//b", "a/", ".hidden", "a\0b", "a\nb", "l" * 252, "\ud800", 3]
)
def test_impossible_names_are_refused(sana, tmp_path, name):
    with pytest.raises(UserError, match="name="):
        generate_images(sana, [{"prompt": "a", "name": name}], tmp_path / "out", **IMAGES)
    assert not (tmp_path / "out").exists()


def test_two_items_of_one_file_are_refused():
    with pytest.raises(UserError, match="items 0 and 1 would both be the file '000000.png'"):
        item_files([{}, {"name": "000000"}], ".png")
    with pytest.raises(UserError, match="item 1 would be the file 'x.png', and item 0 would lie in a folder of that"):
        item_files([{"name": "x.png/y"}, {"name": "x"}], ".png")


def test_few_images_are_not_filled_up_to_a_batch_of_sixteen(sana, tmp_path, monkeypatch):
    original, sizes = MHLASanaPipeline.__call__, []

    def counting(self, *args, **kwargs):
        sizes.append(len(kwargs["prompt"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MHLASanaPipeline, "__call__", functools.wraps(original)(counting))
    generate_images(sana, PROMPTS[:2], tmp_path, **IMAGES | {"batch_size": None})
    assert sizes == [2]


def test_vae_of_videos_stays_in_float32_unless_asked_otherwise(wan, sana, tmp_path):
    wan.save_pretrained(tmp_path / "wan")
    sana.save_pretrained(tmp_path / "sana")
    mixed = load_pipeline(tmp_path / "wan", "bfloat16", "cpu")
    assert mixed.transformer.patch_embedding.weight.dtype == mixed.text_encoder.dtype == torch.bfloat16
    assert all(torch.equal(w, mixed.vae.state_dict()[name]) for name, w in wan.vae.state_dict().items())
    generate_images(mixed, PROMPTS[:1], tmp_path / "out", **VIDEOS)
    assert json.loads((tmp_path / "out" / "generation.json").read_text())["dtype"] == "bfloat16, VAE float32"
    half = load_pipeline(tmp_path / "wan", "bfloat16", "cpu", "bfloat16")
    assert half.vae.dtype == torch.bfloat16
    with pytest.raises(UserError, match="made with dtype=bfloat16, VAE float32, now it is bfloat16"):
        generate_images(half, PROMPTS[:1], tmp_path / "out", **VIDEOS)
    assert load_pipeline(tmp_path / "sana", "bfloat16", "cpu").vae.dtype == torch.bfloat16
    assert load_pipeline(tmp_path / "sana", "float16", "cpu", "bfloat16").vae.dtype == torch.bfloat16


def test_prompts_that_are_cut_off_are_told(sana, tmp_path):
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than the 300 tokens.*number 1 with 40"):
        generate_images(sana, [{"prompt": "a"}, {"prompt": "b" * 400}], tmp_path, **IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        generate_images(sana, [{"prompt": "a"}], tmp_path / "short", **IMAGES)


def test_values_that_are_not_finite_are_refused(sana, tmp_path, monkeypatch):
    original = MHLASanaPipeline.__call__

    def broken(self, *args, **kwargs):
        output = original(self, *args, **kwargs)
        output.images[1, 0, 0, 0] = float("nan")
        return output

    monkeypatch.setattr(MHLASanaPipeline, "__call__", broken)
    with pytest.raises(UserError, match="not finite with dtype=float32") as error:
        generate_images(sana, PROMPTS, tmp_path, **IMAGES)
    assert error.value.of_one_process and list(files(tmp_path)) == [file_name(0)]


# Videos ---------------------------------------------------------------------------------------------------------------


def decoded(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, float(stream.average_rate), stream.codec_context.name, float(stream.duration * stream.time_base)


@pytest.mark.parametrize("fps", [None, 24, 24000 / 1001])
def test_video_has_its_frames_and_rate(wan, tmp_path, fps):
    generate_images(wan, PROMPTS[:1], tmp_path, fps=fps, **VIDEOS)
    frames, rate, codec, seconds = decoded(tmp_path / "000000.mp4")
    assert frames.shape == (5, 32, 48, 3) and frames.dtype == np.uint8 and codec == "h264"
    assert rate == pytest.approx(fps or 16, rel=1e-6) and seconds == pytest.approx(5 / (fps or 16), rel=1e-3)


def test_video_shows_the_frames_of_the_pipeline_in_order(wan, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "mhla_diffusion.pipelines.generate.write_mp4", lambda *args: (seen.append(args[0]), write_mp4(*args))
    )
    generate_images(wan, PROMPTS[:2], tmp_path, guidance_scale=2.0, **VIDEOS | {"batch_size": 1})
    expected = wan(
        "a dog", height=32, width=48, num_frames=5, num_inference_steps=1, guidance_scale=2.0,
        generator=[sample_generator(0, "image", 1)], output_type="np",
    ).frames[0]  # fmt: skip
    assert seen[1].dtype == np.uint8
    assert abs(seen[1] - expected * 255).max() <= 0.5 + 1e-4
    frames = decoded(tmp_path / "000001.mp4")[0].astype(float)
    errors = abs(frames[:, None] - expected[None] * 255).mean((2, 3, 4))
    assert (errors.argmin(1) == np.arange(5)).all()


def test_videos_are_made_one_at_a_time_unless_asked_otherwise(wan, tmp_path, monkeypatch):
    original, sizes = MHLAWanPipeline.__call__, []

    def counting(self, *args, **kwargs):
        sizes.append(len(kwargs["prompt"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MHLAWanPipeline, "__call__", functools.wraps(original)(counting))
    generate_images(wan, PROMPTS[:2], tmp_path / "one", **VIDEOS | {"batch_size": None})
    generate_images(wan, PROMPTS[:2], tmp_path / "two", **VIDEOS)
    assert sizes == [1, 1, 2]


def test_resumed_videos_equal_those_of_one_go(wan, tmp_path):
    generate_images(wan, PROMPTS[:3], tmp_path / "whole", **VIDEOS)
    generate_images(wan, PROMPTS[:2], tmp_path / "cut", **VIDEOS)
    whole = files(tmp_path / "whole")
    (tmp_path / "cut" / "000000.mp4").write_bytes(whole["000000.mp4"][:-7])
    assert generate_images(wan, PROMPTS[:3], tmp_path / "cut", **VIDEOS).num_new == 2
    assert files(tmp_path / "cut") == whole and len(set(whole.values())) == 3


def test_every_cut_of_an_mp4_is_seen(tmp_path):
    path, cut = tmp_path / "a.mp4", tmp_path / "b.mp4"
    write_mp4(np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), dtype=np.uint8), path, 8)
    content = path.read_bytes()
    assert complete(path)
    for length in [*range(0, len(content), 101), len(content) - 1]:
        cut.write_bytes(content[:length])
        assert not complete(cut)


# Sharing a folder -----------------------------------------------------------------------------------------------------


def worker(pipeline, out, conditions, options, results, stuck=None):
    """What a process started by hand does; with the event `stuck` it stops for ever in its second batch."""
    torch.set_num_threads(1)
    original, calls = MHLASanaPipeline.__call__, []

    def slow(self, *args, **kwargs):
        calls.append(args)
        time.sleep(0.2)  # so that the others get their share
        if stuck and len(calls) == 2:
            stuck.set()
            time.sleep(600)
        return original(self, *args, **kwargs)

    MHLASanaPipeline.__call__ = functools.wraps(original)(slow)
    results.put(generate_images(pipeline, conditions, out, **options))


def test_processes_started_separately_share_the_work_and_take_over_from_a_killed_one(sana, tmp_path):
    fork, out = multiprocessing.get_context("fork"), tmp_path / "out"
    conditions = [{"prompt": f"a cat number {i}"} for i in range(24)]
    results, stuck = fork.Queue(), fork.Event()
    arguments = (sana, out, conditions, IMAGES, results)
    victim = fork.Process(target=worker, args=(*arguments, stuck))
    others = [fork.Process(target=worker, args=arguments) for _ in range(2)]
    victim.start()
    assert stuck.wait(120)
    for process in others:
        process.start()
    deadline = time.monotonic() + 240
    while len(files(out)) < 22 and time.monotonic() < deadline:  # all but what the victim holds
        time.sleep(0.05)
    assert len(files(out)) == 22 and all(process.is_alive() for process in others)
    victim.kill()
    reports = [results.get(timeout=240) for _ in others]
    for process in (victim, *others):
        process.join()
    assert victim.exitcode == -signal.SIGKILL and [process.exitcode for process in others] == [0, 0]
    # Nothing was made twice: two by the victim, all others by one of the others each.
    assert sum(report.num_new for report in reports) == 22 and min(report.num_new for report in reports) > 2
    assert not hidden(out)
    generate_images(sana, conditions, tmp_path / "one", **IMAGES)
    assert files(out) == files(tmp_path / "one")


@contextlib.contextmanager
def claiming_process(out, index):
    """A process that holds the claim on an item until the block ends, or it is killed."""
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def hold():
        claims = Claims(out)
        if claims.take(index):
            ready.set()
        time.sleep(600)
        claims.close()

    process = fork.Process(target=hold)
    process.start()
    try:
        assert ready.wait(60)
        yield process
    finally:
        process.kill()
        process.join()


def test_claim_keeps_others_out_until_its_process_is_killed(tmp_path):
    with claiming_process(tmp_path, 7):
        claims = Claims(tmp_path)
        assert claims.available and not claims.take(7) and claims.take(6)
    assert claims.take(7)
    claims.close()
    assert not hidden(tmp_path)


def test_claimed_items_are_left_out_and_made_when_the_claim_ends(sana, tmp_path, monkeypatch):
    out, waits = tmp_path / "out", []
    out.mkdir()
    with claiming_process(out, 1) as process:

        def wait(seconds):
            waits.append(sorted(files(out)))
            process.kill()
            process.join()

        monkeypatch.setattr("mhla_diffusion.pipelines.generate.sleep", wait)
        report = generate_images(sana, PROMPTS, out, **IMAGES)
    assert waits == [[file_name(i) for i in (0, 2, 3, 4)]]
    generate_images(sana, PROMPTS, tmp_path / "alone", **IMAGES)
    assert report.num_new == 5 and files(out) == files(tmp_path / "alone")
    assert not hidden(out)


def test_claims_stay_while_another_process_is_at_work(sana, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with claiming_process(out, 100):
        (out / ".tmp-0123456789ab.png").write_bytes(b"of the other one")
        generate_images(sana, PROMPTS[:2], out, **IMAGES)
        assert hidden(out) == [CLAIMS, ".tmp-0123456789ab.png"]
    generate_images(sana, PROMPTS[:2], out, **IMAGES)
    assert not hidden(out)


def test_only_generations_own_half_written_files_are_removed(sana, tmp_path):
    strange = [".tmp-metrics.jsonl", ".tmp-step-00000010/model.safetensors", ".tmp-old-pipeline/x.json"]
    for name in strange:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of somebody else")
    for name in (".tmp-0123456789ab.png", ".tmp-.tmp-0123456789ab.mp4", ".tmp-0123456789ab.jsonl"):
        (tmp_path / name).write_text("of a killed process")
    generate_images(sana, PROMPTS[:1], tmp_path, **IMAGES)
    assert hidden(tmp_path) == [".tmp-metrics.jsonl", ".tmp-old-pipeline", ".tmp-step-00000010"]
    assert all((tmp_path / name).is_file() for name in strange)


def test_a_file_system_without_locks_costs_nothing_but_sharing(sana, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("mhla_diffusion.pipelines.generation_folder.fcntl.lockf", no_locks)
    assert generate_images(sana, PROMPTS[:3], tmp_path, **IMAGES).num_new == 3
    assert len(files(tmp_path)) == 3


# Prompt files ---------------------------------------------------------------------------------------------------------


def test_text_file_has_one_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_bytes("\ufeffa cat\r\n\r\n  a dog \n2\u2028lines, 猫".encode())
    assert read_prompts(tmp_path / "p.txt") == [{"prompt": t} for t in ("a cat", "a dog", "2\u2028lines, 猫")]


def test_jsonl_takes_prompt_or_text_and_leaves_other_keys_aside(tmp_path):
    rows = [{"prompt": "a", "name": "x"}, {"file_name": "1.png", "text": "b"}, {"prompt": "c", "text": "d"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(tmp_path / "p.jsonl") == [{"prompt": "a", "name": "x"}, {"prompt": "b"}, {"prompt": "c"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "is empty"),
        ("p.txt", b" \n\n", "is empty"),
        ("p.txt", b"a\n\xff\n", "cannot be read"),
        ("p.jsonl", b"", "is empty"),
        ("p.jsonl", b'{"prompt": "a"}\nb\n', "line 2 .* is not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n\n["b"]\n', "line 3 .* 'prompt' or 'text'"),
        ("p.jsonl", b'{"caption": "a"}', "line 1 .* 'prompt' or 'text'"),
        ("p.jsonl", b'{"prompt": "  "}', "line 1 .* not empty"),
        ("p.jsonl", b'{"prompt": 3}', "line 1 .* the prompt 3"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1 .* not valid Unicode"),
        ("p.jsonl", b'{"prompt": "a", "name": "../b"}', "line 1 .*: name='../b'"),
        ("p.jsonl", b'{"prompt": "a", "name": "b"}\n{"prompt": "c", "name": "b"}', "line 2 .* 'b' of line 1"),
    ],
)
def test_bad_prompt_files_are_refused_in_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_prompts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_missing_prompt_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read .No such file"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(UserError, match="cannot be read .Is a directory"):
        read_prompts(tmp_path)


# Bad arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("sana", {"num_frames": 5}, "MHLASanaPipeline takes no num_frames; leave out num_frames=5"),
        ("sana", {"fps": 8}, "fps=8 is for videos; MHLASanaPipeline makes images"),
        ("sana", {"height": 65}, "divisible by 32 but are 65"),
        ("sana", {"width": 0}, "width=0 must be at least 1"),
        ("sana", {"guidance_scale": float("nan")}, "guidance_scale=nan must be a finite number"),
        ("sana", {"conditions": [{"class_labels": 1}]}, "MHLASanaPipeline takes no class_labels"),
        ("sana", {"conditions": [{"prompt": "a"}, {"negative_prompt": "b"}]}, "item 1 has .*all need the same"),
        ("sana", {"conditions": [{"prompt": "a", "seed_index": "x"}]}, "seed_index='x'"),
        ("wan", {"num_frames": 82}, "num_frames=82 must be a multiple of 4 plus 1 .* nearest are 81 and 85"),
        ("wan", {"height": 40}, "divisible by 16 but are 40 and 48"),
        ("wan", {"npz": True}, "npz is for images; MHLAWanPipeline makes videos"),
        ("wan", {"fps": 0}, "fps=0 must be at least 1"),
        ("wan", {"fps": 1000}, "fps=1000 must be below 1000"),
        ("blind", {}, "MHLASanaPipeline has no text encoder"),
        ("dit", {"height": None, "width": None}, "MHLADiTPipeline takes no prompt"),
        ("sana", {"num_inference_steps": 1001}, "num_inference_steps=1001 must be at most 1000, the timesteps"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_before_any_work(sana, wan, tmp_path, kind, options, message):
    blind = MHLASanaPipeline(**{**small_components(), "text_encoder": None, "tokenizer": None})
    pipelines = {"sana": sana, "wan": wan, "blind": blind, "dit": MHLADiTPipeline(small_dit(), None, sana.scheduler)}
    options = (VIDEOS if kind == "wan" else IMAGES) | options
    with pytest.raises(UserError, match=message) as error:
        generate_images(pipelines[kind], options.pop("conditions", PROMPTS), tmp_path / "out", **options)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 96}, "height=64, now it is 96"),
        ({"height": None}, "height=64, now it is None"),
        ({"conditions": [{"prompt": "a bird"}]}, "holds other items .number 0"),
    ],
)
def test_folder_of_other_sizes_or_prompts_is_refused(sana, tmp_path, change, message):
    generate_images(sana, PROMPTS[:1], tmp_path, **IMAGES)
    with pytest.raises(UserError, match=message):
        generate_images(sana, change.pop("conditions", PROMPTS[:1]), tmp_path, **IMAGES | change)
    assert not hidden(tmp_path)


def test_video_folder_of_another_rate_is_refused(wan, tmp_path):
    generate_images(wan, PROMPTS[:1], tmp_path, **VIDEOS)
    with pytest.raises(UserError, match="holds videos made with fps=16.0, now it is 8.0"):
        generate_images(wan, PROMPTS[:1], tmp_path, fps=8, **VIDEOS)


# The command ----------------------------------------------------------------------------------------------------------


def run_script(*arguments):
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


def test_command_makes_videos_from_a_prompt_file(wan, tmp_path, capsys):
    wan.save_pretrained(tmp_path / "wan")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "name": "cat, 1"}\n{"text": "a dog"}\n')
    arguments = ["--pipeline", tmp_path / "wan", "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "out"]
    arguments += ["--height", 32, "--width", 48, "--num-frames", 5, "--fps", 8, "--steps", 1, "--device", "cpu"]
    assert run_script(*arguments) == 0
    output = capsys.readouterr().out
    assert "2 videos in" in output and "2 made now" in output and "peak memory" in output
    assert sorted(files(tmp_path / "out")) == ["000001.mp4", "cat, 1.mp4"]
    frames, rate, *_ = decoded(tmp_path / "out" / "cat, 1.mp4")
    assert len(frames) == 5 and rate == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "none.txt"], "'none.txt' cannot be read"),
        (["--labels", "none.txt"], "'none.txt' cannot be read"),
        (["--num-images", 0], "num_images=0 must be at least 1"),
        (["--num-images", 1, "--batch-size", 0], "batch_size=0 must be at least 1"),
        (["--num-images", 1, "--steps", -1], "num_inference_steps=-1"),
        (["--num-images", 1, "--fps", "inf"], "fps=inf must be a finite number"),
        (["--num-images", 1, "--out", __file__], "is a file"),
        (["--num-images", 1, "--out", f"{__file__}/sub"], "is not a folder to write in"),
    ],
)
def test_command_checks_its_arguments_before_loading(tmp_path, monkeypatch, capsys, arguments, message):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("mhla_diffusion.pipelines.generate.load_pipeline", load)
    monkeypatch.chdir(tmp_path)
    assert run_script("--pipeline", "large/pipeline", "--out", "out", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
