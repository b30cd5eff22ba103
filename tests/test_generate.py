"""Generating folders: each image depends on the seed and its index, nothing is lost, nothing is mixed."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from dit_models import small_dit, small_vae
from PIL import Image

from mhla_diffusion import MHLAConfig, apply_mhla
from mhla_diffusion.errors import UserError
from mhla_diffusion.pipelines import MHLADiTPipeline
from mhla_diffusion.pipelines.generate import class_conditions, file_name, generate_images, load_pipeline

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
OPTIONS = {"num_inference_steps": 2, "guidance_scale": 2.0, "progress": False}


def pixel_pipeline(seed=0, scheduler=None, num_classes=4):
    """A small MHLA DiT of grey 8×8 pixels with random weights, such that its outputs depend on everything."""
    transformer = small_dit(
        seed, in_channels=1, out_channels=1, num_embeds_ada_norm=num_classes, num_layers=1, attention_head_dim=16
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in transformer.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    apply_mhla(transformer, MHLAConfig(blocks=(2, 2)))
    names = {i: f"class {i}" for i in range(num_classes)}
    return MHLADiTPipeline(transformer, None, scheduler or DDPMScheduler(), names)


@pytest.fixture(scope="module")
def pipeline():
    return pixel_pipeline()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "pipeline"
    pixel_pipeline().save_pretrained(path)
    return path


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.png"))}


def pixels(folder):
    return np.stack([np.asarray(Image.open(path)) for path in sorted(Path(folder).glob("*.png"))])


def make(pipeline, out, num_images=7, **options):
    conditions = options.pop("conditions", None) or class_conditions(pipeline, num_images)
    return generate_images(pipeline, conditions, out, **(OPTIONS | {"batch_size": 3} | options))


def test_images_of_different_index_seed_and_class_differ(pipeline, tmp_path):
    make(pipeline, tmp_path / "a")
    make(pipeline, tmp_path / "b", seed=1)
    make(pipeline, tmp_path / "c", conditions=[{"class_labels": 3}] * 7)
    a, b, c = (pixels(tmp_path / name) for name in "abc")
    assert a.shape == (7, 8, 8) and a.std() > 20
    assert len({image.tobytes() for image in a}) == 7
    assert all((x != y).any() for x, y in zip(a, b, strict=True))
    assert [bool((x == y).all()) for x, y in zip(a, c, strict=True)] == [i == 3 for i in range(7)]


def test_image_is_the_pipelines_own(pipeline, tmp_path):
    """Image 5 alone, from the pipeline's call with the documented generator."""
    from mhla_diffusion.training.data import sample_generator

    make(pipeline, tmp_path, batch_size=1)
    (image,) = pipeline([1], 2.0, [sample_generator(0, "image", 5)], 2).images
    assert image.mode == "L"
    np.testing.assert_array_equal(np.asarray(image), pixels(tmp_path)[5])


def test_files_do_not_depend_on_what_was_there(pipeline, tmp_path):
    make(pipeline, tmp_path / "whole")
    make(pipeline, tmp_path / "grown", num_images=2)
    make(pipeline, tmp_path / "grown", num_images=5)
    (tmp_path / "grown" / file_name(1)).unlink()
    report = make(pipeline, tmp_path / "grown")
    assert report.num_new == 3 and report.num_images == 7
    assert files(tmp_path / "grown") == files(tmp_path / "whole")
    assert make(pipeline, tmp_path / "grown").num_new == 0


@pytest.mark.parametrize("scheduler", [DDIMScheduler, DDPMScheduler])
def test_batch_size_changes_at_most_the_rounding(scheduler, tmp_path):
    pipeline = pixel_pipeline(scheduler=scheduler())
    for size in (1, 2, 7):
        make(pipeline, tmp_path / str(size), batch_size=size)
    one, two, seven = (pixels(tmp_path / str(size)).astype(int) for size in (1, 2, 7))
    for other in (one, two):
        assert abs(other - seven).max() <= 1 and (other != seven).mean() < 0.01


def test_interrupted_run_is_finished_with_the_same_files(pipeline, tmp_path, monkeypatch):
    make(pipeline, tmp_path / "whole")
    original, calls = MHLADiTPipeline.__call__, []

    def interrupted(self, *args, **kwargs):
        calls.append(kwargs["class_labels"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MHLADiTPipeline, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(pipeline, tmp_path / "cut")
    kept = files(tmp_path / "cut")
    assert sorted(kept) == [file_name(i) for i in range(3)]
    # What else a kill, or a copy that was cut off, may leave behind.
    (tmp_path / "cut" / ".tmp-0123456789ab.png").write_bytes(b"half")
    (tmp_path / "cut" / file_name(2)).write_bytes(kept[file_name(2)][:-20])
    (tmp_path / "cut" / file_name(5)).write_bytes(b"")
    report = make(pipeline, tmp_path / "cut")
    assert report.num_new == 5
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert not list((tmp_path / "cut").glob(".*"))


def test_conditions_and_settings_are_recorded(pipeline, tmp_path):
    make(pipeline, tmp_path, num_images=6, seed=5)
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert lines == [{"file": file_name(i), "class_labels": i % 4} for i in range(6)]
    manifest = json.loads((tmp_path / "generation.json").read_text())
    assert manifest["seed"] == 5 and manifest["num_inference_steps"] == 2 and manifest["guidance_scale"] == 2.0
    assert manifest["num_images"] == 6 and manifest["pipeline"] == "MHLADiTPipeline"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed=0, now it is 1"),
        ({"num_inference_steps": 3}, "num_inference_steps=2, now it is 3"),
        ({"guidance_scale": 1.0}, "guidance_scale=2.0, now it is 1.0"),
        ({"num_images": 4}, "is one of 7 items, now it is 4"),
        ({"conditions": [{"class_labels": 0}] * 7}, "other items .number 1"),
    ],
)
def test_folder_of_other_settings_is_refused_untouched(pipeline, tmp_path, change, message):
    make(pipeline, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=message) as error:
        make(pipeline, tmp_path, **change)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_of_other_weights_or_of_strangers_is_refused(pipeline, tmp_path):
    make(pipeline, tmp_path / "a")
    with pytest.raises(UserError, match="weights="):
        make(pixel_pipeline(seed=1), tmp_path / "a")
    with pytest.raises(UserError, match="weights="):
        make(pixel_pipeline(scheduler=DDIMScheduler()), tmp_path / "a")
    (tmp_path / "b").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "b" / "holiday.png")
    with pytest.raises(UserError, match="holds images without generation.json"):
        make(pipeline, tmp_path / "b")
    (tmp_path / "c").write_text("")
    with pytest.raises(UserError, match="is a file"):
        make(pipeline, tmp_path / "c")


@pytest.mark.parametrize("option", ["batch_size", "num_inference_steps"])
def test_impossible_numbers_are_refused(pipeline, tmp_path, option):
    with pytest.raises(UserError, match=f"{option}=0 must be at least 1"):
        make(pipeline, tmp_path / "new", **{option: 0})
    assert not (tmp_path / "new").exists()


def allocate_too_much(*_, **__):
    return torch.empty(2**50)  # bytes times four: more than any machine has


def test_too_little_memory_is_one_sentence_that_says_what_to_lower(pipeline, tmp_path, monkeypatch):
    make(pipeline, tmp_path, num_images=3)
    monkeypatch.setattr(MHLADiTPipeline, "__call__", allocate_too_much)
    with pytest.raises(UserError, match="memory of cpu is too small for batch_size=3 .*; lower batch_size, the prec"):
        make(pipeline, tmp_path)
    with pytest.raises(UserError, match="too small for batch_size=1 .*; lower the precision .dtype=bfloat16.; what"):
        make(pipeline, tmp_path, batch_size=1)
    assert len(files(tmp_path)) == 3


def test_a_pipeline_that_the_memory_is_too_small_for_is_one_sentence(saved, monkeypatch):
    monkeypatch.setattr(MHLADiTPipeline, "to", allocate_too_much)
    with pytest.raises(UserError, match="memory of cpu is too small for the weights of .* with dtype=float32; dty"):
        load_pipeline(saved, device="cpu")


def test_full_disk_is_one_sentence_and_keeps_what_was_written(pipeline, tmp_path, monkeypatch):
    original, saved = Image.Image.save, []

    def full(self, path):
        saved.append(path)
        if len(saved) == 5:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return original(self, path)

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(UserError, match="No space left on device.*kept"):
        make(pipeline, tmp_path / "a")
    monkeypatch.undo()
    assert sorted(files(tmp_path / "a")) == [file_name(i) for i in range(4)]
    assert not list((tmp_path / "a").glob(".*"))
    assert make(pipeline, tmp_path / "a").num_new == 3


def test_array_holds_all_images_as_rgb(pipeline, tmp_path):
    make(pipeline, tmp_path, npz=True)
    with np.load(tmp_path / "samples.npz") as file:
        assert file.files == ["arr_0"]
        array = file["arr_0"]
    assert array.shape == (7, 8, 8, 3) and array.dtype == np.uint8
    np.testing.assert_array_equal(array, np.repeat(pixels(tmp_path)[..., None], 3, axis=3))


def test_colour_pipeline_with_a_vae_writes_rgb(tmp_path):
    pipeline = MHLADiTPipeline(small_dit(), small_vae(), DDIMScheduler())
    make(pipeline, tmp_path, num_images=2)
    with Image.open(tmp_path / file_name(0)) as image:
        assert image.mode == "RGB"


def test_own_progress_bar_of_the_pipeline_is_restored(pipeline, tmp_path, capfd):
    pipeline.set_progress_bar_config(desc="mine")
    make(pipeline, tmp_path / "a", progress=True)
    assert pipeline._progress_bar_config == {"desc": "mine"}
    shown = capfd.readouterr().err
    assert "mine" not in shown and "7/7" in shown


# Classes --------------------------------------------------------------------------------------------------------------


def test_classes_are_balanced(pipeline):
    assert [c["class_labels"] for c in class_conditions(pipeline, 10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_label_file_takes_numbers_and_names(pipeline, tmp_path):
    (tmp_path / "labels.txt").write_text("3\nclass 1\n\n0\n")
    assert [c["class_labels"] for c in class_conditions(pipeline, labels=tmp_path / "labels.txt")] == [3, 1, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("0\n4\n", "line 2 .* '4'.*0 to 3"), ("-1\n", "'-1'"), ("cat\n", "'cat'.*class name"), ("\n", "is empty")],
)
def test_bad_label_files_are_refused(pipeline, tmp_path, content, message):
    (tmp_path / "labels.txt").write_text(content)
    with pytest.raises(UserError, match=message):
        class_conditions(pipeline, labels=tmp_path / "labels.txt")


def test_missing_label_file_and_no_images_are_refused(pipeline, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        class_conditions(pipeline, labels=tmp_path / "none.txt")
    with pytest.raises(UserError, match="num_images=0"):
        class_conditions(pipeline, 0)
    with pytest.raises(UserError, match="either"):
        class_conditions(pipeline)


# The command ----------------------------------------------------------------------------------------------------------


def run_script(*arguments):
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--height", 64], "MHLADiTPipeline takes no height; leave out height=64"),
        (["--num-frames", 5], "MHLADiTPipeline takes no num_frames; leave out num_frames=5"),
        (["--steps", 1001], "num_inference_steps=1001 must be at most 1000, the timesteps"),
    ],
)
def test_command_refuses_what_the_saved_class_does_not_take_before_loading(
    saved, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr("mhla_diffusion.pipelines.generate.load_pipeline", lambda *_: pytest.fail("loaded"))
    assert run_script("--pipeline", saved, "--num-images", 1, "--out", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err


def test_command_generates_from_a_saved_pipeline(saved, tmp_path, capsys):
    arguments = ["--pipeline", saved, "--num-images", 7, "--steps", 2, "--guidance-scale", 2, "--batch-size", 3]
    assert run_script(*arguments, "--out", tmp_path / "a", "--npz", "--device", "cpu") == 0
    assert "7 made now" in capsys.readouterr().out
    make(pixel_pipeline(), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b") and (tmp_path / "a" / "samples.npz").is_file()


def test_two_processes_write_the_files_of_one(saved, pipeline, tmp_path):
    make(pipeline, tmp_path / "one")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    command += ["--pipeline", saved, "--num-images", 7, "--steps", 2, "--guidance-scale", 2, "--batch-size", 3]
    command += ["--out", tmp_path / "two", "--npz", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([str(c) for c in command], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("7 made now") == 1
    assert files(tmp_path / "two") == files(tmp_path / "one")
    with np.load(tmp_path / "two" / "samples.npz") as file:
        assert len(file["arr_0"]) == 7


@pytest.mark.parametrize(
    ("path", "message"),
    [("missing/folder/x", "does not exist"), (".", "holds no model_index.json")],
)
def test_command_says_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys, path, message):
    monkeypatch.chdir(tmp_path)
    assert run_script("--pipeline", path, "--num-images", 2, "--out", "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not Path("out").exists()


def test_damaged_pipelines_are_refused_in_one_sentence(tmp_path):
    saved, index, config = tmp_path / "saved", "model_index.json", "transformer/config.json"
    MHLADiTPipeline(small_dit(), None, DDIMScheduler()).save_pretrained(saved)
    more_layers = json.loads((saved / config).read_text())
    more_layers["num_layers"] += 1
    for name, file, content, message in (
        ("class", index, (saved / index).read_text().replace("MHLADiTPipeline", "NoPipeline"), "no attribute NoPipel"),
        ("weights", config, json.dumps(more_layers), "weights of its transformer are missing, the first is 'tr"),
        ("json", index, "{", "not a valid JSON"),
    ):
        shutil.copytree(saved, tmp_path / name)
        (tmp_path / name / file).write_text(content)
        with pytest.raises(UserError, match=message) as error:
            load_pipeline(tmp_path / name, device="cpu")
        assert "\n" not in str(error.value)


def test_half_precision_pipeline_generates(saved, tmp_path):
    pipeline = load_pipeline(saved, "bfloat16", "cpu")
    make(pipeline, tmp_path, num_images=2)
    assert json.loads((tmp_path / "generation.json").read_text())["dtype"] == "bfloat16"


def test_only_the_main_process_says_what_all_of_them_know(tmp_path, monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert run_script("--pipeline", tmp_path / "none", "--num-images", 2, "--out", tmp_path / "out") == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_a_process_that_cannot_write_says_so_itself(saved, tmp_path, monkeypatch, capsys):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    monkeypatch.setenv("RANK", "1")
    arguments = ["--pipeline", saved, "--num-images", 2, "--steps", 1, "--device", "cpu", "--out", tmp_path / "out"]
    assert run_script(*arguments) == 2
    assert "No space left" in capsys.readouterr().err
