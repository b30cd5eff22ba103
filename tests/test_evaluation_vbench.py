"""VBench: totals by hand and as published, names its tools find, flickering by definition, resumable evaluation."""

import importlib.util
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from painting_pipelines import FilmingPipeline, PaintingPipeline

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation import vbench
from mhla_diffusion.evaluation.vbench import evaluate_videos, read_scores, summarize_results
from mhla_diffusion.evaluation.vbench_dimensions import DIMENSIONS, format_totals, total_scores
from mhla_diffusion.evaluation.vbench_flickering import temporal_flickering, video_flickering
from mhla_diffusion.evaluation.vbench_prompts import (
    awkward_names,
    check_file_system,
    conditions,
    read_suite,
    video_name,
)
from mhla_diffusion.training import checkpoints
from mhla_diffusion.training.video_files import write_mp4

SCRIPT = Path(__file__).parent.parent / "scripts" / "evaluate_vbench.py"
NAMES = list(DIMENSIONS)

# Rows of the table of VBench results in the README of aejion/AccVideo, in per cent: subject and background consistency,
# flickering, smoothness, dynamic degree, aesthetic and imaging quality; object class, multiple objects, human action,
# colour, spatial relationship, scene, appearance and temporal style, overall consistency; quality, semantic, total.
HUNYUAN = (94.46, 97.45, 99.18, 98.79, 75.0, 62.08, 65.64, 92.99, 67.33, 95.6, 94.11, 75.7, 54.72, 19.87, 23.71, 27.21)
WAN = (95.02, 97.75, 99.54, 97.95, 93.33, 64.21, 68.42, 98.38, 86.58, 97.4, 92.04, 75.68, 59.82, 23.88, 24.62, 27.34)
PUBLISHED = [(HUNYUAN, (84.58, 77.96, 83.26)), (WAN, (86.62, 83.25, 85.95))]


def row(percentages):
    return dict(zip(NAMES, (value / 100 for value in percentages), strict=True))


# Totals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percentages, expected", PUBLISHED, ids=["AccVideo-HunyuanT2V", "AccVideo-WanXT2V"])
def test_published_totals_are_reproduced_from_published_dimensions(percentages, expected):
    """As near as two decimals of the dimensions and of the totals allow."""
    result = total_scores(row(percentages))
    rounding = 0.005
    for part, published in zip(("quality", "semantic"), expected, strict=False):
        parts = [dimension for dimension in DIMENSIONS.values() if dimension.part == part]
        weighted = sum(d.weight * rounding / (d.high - d.low) for d in parts) / sum(d.weight for d in parts)
        assert weighted + rounding < 0.014
        assert 100 * result[part] == pytest.approx(published, abs=weighted + rounding)
    assert 100 * result["total"] == pytest.approx(expected[2], abs=0.014)
    assert result["missing"] == []


def test_totals_are_those_computed_by_hand():
    """All at 0.5 but three: (0.5 − low) / (high − low), dynamic degree at half weight, quality four times semantic."""
    scores = dict.fromkeys(NAMES, 0.5) | {"dynamic_degree": 1.0, "scene": 0.8222, "motion_smoothness": 1.0}
    subject = (0.5 - 0.1462) / 0.8538
    background = (0.5 - 0.2615) / 0.7385
    flickering = (0.5 - 0.6293) / 0.3707  # below the range: negative, not cut off
    smoothness = (1.0 - 0.706) / 0.2915  # above it
    quality = (subject + background + flickering + smoothness + 0.5 + 0.5 + 0.5 * 1.0) / 6.5
    appearance = (0.5 - 0.0009) / 0.2846
    semantic = (5 * 0.5 + 1.0 + appearance + 2 * 0.5 / 0.364) / 9
    result = total_scores(scores)
    assert flickering < 0 and smoothness > 1
    assert result["quality"] == pytest.approx(quality, rel=1e-12)
    assert result["semantic"] == pytest.approx(semantic, rel=1e-12)
    assert result["total"] == pytest.approx((4 * quality + semantic) / 5, rel=1e-12)


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_missing_dimensions_are_listed_and_never_filled(missing):
    result = total_scores({name: score for name, score in row(WAN).items() if name not in missing})
    whole = total_scores(row(WAN))
    assert result["missing"] == [name for name in NAMES if name in missing]
    assert result["total"] is None
    for part in ("quality", "semantic"):
        incomplete = any(DIMENSIONS[name].part == part for name in missing)
        assert result[part] == (None if incomplete else whole[part])
    assert all(name in format_totals(result).splitlines()[-1] for name in missing)


def test_names_with_spaces_are_the_same_dimensions():
    spaced = {name.replace("_", " ").title(): score for name, score in row(WAN).items()}
    assert total_scores(spaced) == total_scores(row(WAN))


@pytest.mark.parametrize(
    "scores, words",
    [
        ({"subject_consistancy": 0.5}, ["'subject_consistancy'", "did you mean 'subject_consistency'"]),
        ({"scene": 59.8}, ["scene", "59.8", "divided by 100"]),
        ({"scene": float("nan")}, ["scene", "nan"]),
        ({"scene": True}, ["scene", "True"]),
        ({"scene": "0.5"}, ["scene", "'0.5'"]),
        ({"scene": -0.1}, ["scene", "-0.1"]),
        ({"temporal_style": 0.2, "temporal style": 0.3}, ["temporal_style", "twice"]),
    ],
)
def test_bad_scores_are_refused_in_one_sentence(scores, words):
    with pytest.raises(UserError) as error:
        total_scores(scores)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


# Result files --------------------------------------------------------------------------------------------------------


def write_json(path, content):
    path.write_text(json.dumps(content))
    return path


def test_results_are_read_in_all_their_forms(tmp_path):
    """VBench's own files one dimension each, with its lists of prompts beside them; one plain file; both."""
    scores = row(HUNYUAN)
    folder = tmp_path / "results"
    folder.mkdir()
    for name in NAMES[:10]:
        details = [{"video_path": "a.mp4", "video_results": 0.1}]
        write_json(folder / f"{name}_eval_results.json", {name: [scores[name], details]})
        write_json(folder / f"{name}_full_info.json", [{"prompt_en": "a", "dimension": [name], "video_list": []}])
    plain = write_json(tmp_path / "rest.json", {name: scores[name] for name in NAMES[10:]})
    assert read_scores(folder, plain) == scores
    assert summarize_results(folder, plain)["total"] == total_scores(scores)["total"]
    assert summarize_results(folder)["missing"] == NAMES[10:]


def test_contradicting_or_broken_results_are_refused(tmp_path):
    first = write_json(tmp_path / "a.json", {"scene": 0.5})
    second = write_json(tmp_path / "b.json", {"scene": [0.6, []]})
    with pytest.raises(UserError, match=r"different scores of scene \(0.5 and 0.6\)"):
        read_scores(first, second)
    assert read_scores(first, write_json(tmp_path / "c.json", {"scene": 0.5})) == {"scene": 0.5}
    for content, word in (([0.5], "object"), ({}, "object"), ({"scene": []}, "number"), ({"scene": None}, "number")):
        with pytest.raises(UserError, match=word):
            read_scores(write_json(tmp_path / "bad.json", content))
    (tmp_path / "cut.json").write_text('{"scene": 0.')
    with pytest.raises(UserError, match="cannot be read"):
        read_scores(tmp_path / "cut.json")
    with pytest.raises(UserError, match="do not exist"):
        read_scores(tmp_path / "nowhere")


# Prompts and names ---------------------------------------------------------------------------------------------------

SUITE = [
    {"prompt_en": "In a still frame, a stop sign", "dimension": ["temporal_flickering"]},
    {"prompt_en": "a cat", "dimension": ["subject_consistency", "dynamic_degree", "motion_smoothness"]},
    {
        "prompt_en": 'a "red" bicycle: isn\'t it?',
        "dimension": ["color"],
        "auxiliary_info": {"color": {"color": "red"}},
    },
    {"prompt_en": "either/or", "dimension": ["object_class"], "auxiliary_info": {"object_class": {"object": "or"}}},
    {"prompt_en": "a cat", "dimension": ["subject_consistency", "dynamic_degree", "motion_smoothness"]},
]


@pytest.fixture
def suite_file(tmp_path):
    return write_json(tmp_path / "VBench_full_info.json", SUITE)


def test_samples_are_five_and_twenty_five_for_flickering(suite_file):
    made = conditions(read_suite(suite_file))
    names = [condition["name"] for condition in made]
    assert len(made) == 25 + 3 * 5 and len(set(names)) == len(names)  # "a cat" stands twice
    stop = [f"videos/In a still frame, a stop sign-{k}" for k in range(25)]
    assert names[:30] == stop + [f"videos/a cat-{k}" for k in range(5)]
    assert {condition["prompt"] for condition in made} == {entry["prompt_en"] for entry in SUITE}
    assert len({condition["seed_index"] for condition in made}) == len(made)


def test_a_video_does_not_depend_on_the_other_prompts(suite_file):
    everything = {condition["name"]: condition for condition in conditions(read_suite(suite_file))}
    for condition in conditions(read_suite(suite_file, ["dynamic degree", "color"])):
        assert everything.pop(condition["name"]) == condition
    assert {condition["prompt"] for condition in everything.values()} == {SUITE[0]["prompt_en"], "either/or"}


def test_prompt_folder_of_the_repository_gives_the_same_prompts(tmp_path):
    folder = tmp_path / "prompts_per_dimension"
    folder.mkdir()
    (folder / "subject_consistency.txt").write_text("a cat\n a dog \n")
    (folder / "temporal_flickering.txt").write_text("a still\n")
    (folder / "overall.txt").write_text("not a dimension\n")
    suite = read_suite(folder)
    assert [prompt.text for prompt in suite] == ["a cat", "a dog", "a still"]
    assert suite[0].dimensions == ("subject_consistency", "motion_smoothness", "dynamic_degree")
    assert [prompt.samples for prompt in suite] == [5, 5, 25]
    assert [prompt.text for prompt in read_suite(folder / "temporal_flickering.txt")] == ["a still"]
    with pytest.raises(UserError, match="does not say which dimension"):
        read_suite(folder / "overall.txt")
    with pytest.raises(UserError, match="holds no prompts of scene"):
        read_suite(folder, ["scene"])


def test_longer_prompts_are_generated_from_but_not_named_after(suite_file, tmp_path):
    longer = tmp_path / "longer.txt"
    longer.write_text("\n".join(f"long version {i}" for i in range(5)) + "\n")
    made = conditions(read_suite(suite_file, augmented=longer))
    assert {c["prompt"] for c in made if c["name"].startswith("videos/a cat-")} == {"long version 1"}
    assert [c["name"] for c in made] == [c["name"] for c in conditions(read_suite(suite_file))]
    longer.write_text("one\ntwo\n")
    with pytest.raises(UserError, match="has 2 prompts, the suite 5"):
        read_suite(suite_file, augmented=longer)


AWKWARD = [
    "either/or",
    ".hidden",
    "../../escape",
    "two\nlines",
    "nul\0byte",
    " spaces ",
    "x" * 300,
    "é" * 150,
    "",
]


def test_awkward_prompts_get_names_that_are_files_in_the_folder(tmp_path):
    names = [video_name(prompt, 24) + ".mp4" for prompt in AWKWARD]
    assert len(set(names)) == len(names)
    for name in names:
        (tmp_path / name).write_bytes(b"")
        assert (tmp_path / name).parent == tmp_path and not name.startswith(".")
    assert sorted(os.listdir(tmp_path)) == sorted(names)


@given(st.text(max_size=400), st.text(max_size=400), st.integers(0, 24))
def test_names_are_one_path_component_and_differ_where_prompts_do(first, second, sample):
    name, other = video_name(first, sample), video_name(second, sample)
    assert "/" not in name and "\0" not in name and not name.startswith(".") and len(name.encode()) <= 240
    assert (name == other) == (first == second)


def test_ordinary_prompts_are_named_as_vbench_names_them(suite_file):
    quoted = SUITE[2]["prompt_en"]
    assert video_name(quoted, 3) == f"{quoted}-3"
    suite = read_suite(suite_file)
    (text,) = awkward_names(suite)
    assert text == "either/or" and awkward_names(suite)[text].startswith("either_or~")


def test_prompts_that_differ_in_case_only_need_a_file_system_that_tells(tmp_path, monkeypatch):
    entries = [{"prompt_en": text, "dimension": ["appearance_style"]} for text in ("a fantasy", "A fantasy")]
    prompts = read_suite(write_json(tmp_path / "suite.json", entries))
    monkeypatch.setattr("mhla_diffusion.evaluation.vbench_prompts._ignores_case", lambda folder: False)
    check_file_system(prompts, tmp_path)
    monkeypatch.setattr("mhla_diffusion.evaluation.vbench_prompts._ignores_case", lambda folder: True)
    with pytest.raises(UserError, match="'a fantasy' and 'A fantasy'"):
        check_file_system(prompts, tmp_path)


@pytest.mark.parametrize(
    "content, words",
    [
        ({"a": 1}, ["list"]),
        ([{"prompt_en": "x"}], ["entry 1", "'dimension'"]),
        ([{"prompt_en": " ", "dimension": ["scene"]}], ["entry 1"]),
        (["x"], ["entry 1"]),
        ([{"prompt_en": "half \ud83d pair", "dimension": ["scene"]}], ["entry 1", "not valid Unicode"]),
        ([{"prompt_en": "x", "dimension": ["scenes"]}], ["'scenes'", "did you mean 'scene'"]),
        ([], ["no prompts"]),
    ],
)
def test_bad_suites_are_refused_in_one_sentence(tmp_path, content, words):
    with pytest.raises(UserError) as error:
        read_suite(write_json(tmp_path / "bad.json", content))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


# Temporal flickering -------------------------------------------------------------------------------------------------


def moving_squares(frames=9, height=48, width=64, noise=6, seed=0):
    random = np.random.default_rng(seed)
    tile = random.integers(0, 256, (height // 8, width // 8, 3)).repeat(8, 0).repeat(8, 1)
    clip = np.stack([np.roll(tile, 2 * t, axis=1) for t in range(frames)])
    return (clip + random.integers(-noise, noise + 1, clip.shape)).clip(0, 255).astype(np.uint8)


def flickering_by_definition(path):
    """The mean over neighbouring frames of mean |difference|, from 255, relative to 255; all frames at once."""
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]).astype(np.float64)
    pairs = [np.mean(np.abs(frames[i + 1] - frames[i])) for i in range(len(frames) - 1)]
    return (255.0 - np.mean(pairs)) / 255.0


def test_flickering_is_the_definition_on_real_files(tmp_path):
    paths = []
    for index, noise in enumerate((0, 6, 40)):
        paths.append(tmp_path / f"{index}.mp4")
        write_mp4(moving_squares(noise=noise, seed=index), paths[-1], fps=8)
    scores = [video_flickering(path) for path in paths]
    assert scores == pytest.approx([flickering_by_definition(path) for path in paths], rel=1e-12)
    assert 0.5 < scores[2] < scores[1] < scores[0] < 0.99
    mean, details = temporal_flickering(paths, progress=False)
    assert mean == pytest.approx(np.mean(scores), rel=1e-12)
    assert [detail["video_path"] for detail in details] == [str(path) for path in paths]
    assert [detail["video_results"] for detail in details] == scores


def test_flickering_of_known_frames_is_the_number_by_hand(tmp_path):
    """Grey levels 0, 51, 51: differences 51 and 0, so (255 − 25.5) / 255 = 0.9, up to what the codec rounds."""
    frames = np.stack([np.full((16, 16, 3), level, dtype=np.uint8) for level in (0, 51, 51)])
    write_mp4(frames, tmp_path / "steps.mp4", fps=8, quality=0)
    assert video_flickering(tmp_path / "steps.mp4") == pytest.approx(0.9, abs=0.005)
    write_mp4(frames[:2] * 0, tmp_path / "still.mp4", fps=8)
    assert video_flickering(tmp_path / "still.mp4") == 1.0


def test_videos_that_cannot_be_measured_are_named(tmp_path):
    write_mp4(moving_squares(frames=1), tmp_path / "one.mp4", fps=8)
    (tmp_path / "none.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no video")
    write_mp4(moving_squares(frames=30), tmp_path / "whole.mp4", fps=8)
    whole = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    for name, word in (("one", "one frame"), ("none", "none.mp4"), ("text", "text.mp4"), ("cut", "cut.mp4")):
        with pytest.raises(UserError, match=word):
            video_flickering(tmp_path / f"{name}.mp4")
    with pytest.raises(UserError, match="at least one video"):
        temporal_flickering([], progress=False)


# Evaluating ----------------------------------------------------------------------------------------------------------

FAKE_VBENCH = '''
    import json, os

    class VBench:
        """The interface of the package: lists the videos, evaluates each dimension, writes a file of results."""

        def __init__(self, device, full_info_dir, output_path):
            self.device, self.output_path = device, output_path

        def build_full_info_json(self, videos_path, name, dimension_list, **kwargs):
            raise AssertionError("it would look for {prompt}-{k} itself")

        def evaluate(self, videos_path, name, dimension_list=None, local=False, **kwargs):
            (dimension,) = dimension_list
            with open(os.environ["FAKE_VBENCH_LOG"], "a") as log:
                log.write(f"{dimension} {self.device} {local}\\\\n")
            if dimension == os.environ.get("FAKE_VBENCH_FAILS"):
                raise RuntimeError("no detectron2")
            path = self.build_full_info_json(videos_path, name, dimension_list)
            entries = json.load(open(path))
            details = [
                {"video_path": video, "video_results": len(entry["prompt_en"])}
                for entry in entries for video in entry["video_list"] if os.path.getsize(video)
            ]
            with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
                json.dump({dimension: [len(details) / 100, details]}, file)
'''


@pytest.fixture
def fake_vbench(tmp_path, monkeypatch):
    """A package `vbench` that other interpreters find; returns the log of what it was asked."""
    package = tmp_path / "packages" / "vbench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_VBENCH).replace("\\\\n", "\\n"))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("FAKE_VBENCH_LOG", str(tmp_path / "log.txt"))
    return tmp_path / "log.txt"


@pytest.fixture
def videos(suite_file, tmp_path):
    """All videos of the suite but those of flickering samples 5 to 24; one clip serves for all."""
    folder = tmp_path / "videos"
    folder.mkdir()
    write_mp4(moving_squares(frames=3, height=16, width=16), tmp_path / "clip.mp4", fps=8)
    for prompt in read_suite(suite_file):
        for sample in range(5):
            (folder / f"{video_name(prompt.text, sample)}.mp4").write_bytes((tmp_path / "clip.mp4").read_bytes())
    return folder


def evaluate(videos, suite_file, out, dimensions, **options):
    options = {"python": sys.executable, "progress": False, "device": "cpu"} | options
    return evaluate_videos(videos, read_suite(suite_file), out, dimensions, **options)


def test_dimensions_run_one_at_a_time_and_resume(videos, suite_file, fake_vbench, tmp_path):
    out = tmp_path / "out"
    chosen = ["object_class", "temporal_flickering", "subject_consistency"]
    paths = evaluate(videos, suite_file, out, chosen)
    assert fake_vbench.read_text() == "object_class cpu False\nsubject_consistency cpu False\n"
    scores = read_scores(out)
    assert scores["object_class"] == 0.05  # the prompt with a slash, whose five videos VBench itself would not find
    assert scores["subject_consistency"] == 0.10  # an entry that stands twice counts twice, as in VBench
    assert scores["temporal_flickering"] == pytest.approx(flickering_by_definition(tmp_path / "clip.mp4"))
    before = {path: path.read_text() for path in paths.values()}
    evaluate(videos, suite_file, out, [*chosen, "color"], local=True)
    assert fake_vbench.read_text().splitlines()[2:] == ["color cpu True"]
    assert {path: path.read_text() for path in paths.values()} == before

    path = videos / "a cat-3.mp4"  # made anew: what was measured on it is out of date
    later = paths["subject_consistency"].stat().st_mtime + 10
    os.utime(path, (later, later))
    evaluate(videos, suite_file, out, chosen)
    assert fake_vbench.read_text().splitlines()[3:] == ["subject_consistency cpu False"]


def test_two_runs_that_fill_one_folder_leave_each_others_results(
    videos, suite_file, fake_vbench, tmp_path, monkeypatch
):
    """While one run measures flickering, another one measures the rest."""
    out, measured = tmp_path / "out", vbench.temporal_flickering

    def meanwhile(*arguments):
        evaluate(videos, suite_file, out, ["color", "object_class"])
        return measured(*arguments)

    monkeypatch.setattr(vbench, "temporal_flickering", meanwhile)
    evaluate(videos, suite_file, out, ["temporal_flickering", "color", "object_class"])
    assert fake_vbench.read_text().split()[::3] == ["color", "object_class"]
    assert read_scores(out).keys() == {"temporal_flickering", "color", "object_class"}


def test_two_processes_write_one_file_at_once(tmp_path, monkeypatch):
    path, sync = tmp_path / "results.json", checkpoints._sync

    def interrupted(written):  # by another process that writes the same file, before this one has renamed its own
        monkeypatch.setattr(checkpoints, "_sync", sync)
        checkpoints.write_whole(path, "of the other one")
        sync(written)

    monkeypatch.setattr(checkpoints, "_sync", interrupted)
    checkpoints.write_whole(path, "of this one")
    assert path.read_text() == "of this one" and os.listdir(tmp_path) == ["results.json"]


def test_a_failed_dimension_does_not_stop_the_others(videos, suite_file, fake_vbench, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VBENCH_FAILS", "color")
    with pytest.raises(UserError, match="vbench failed on color, its messages are above"):
        evaluate(videos, suite_file, tmp_path / "out", ["color", "object_class"])
    assert list(read_scores(tmp_path / "out")) == ["object_class"]
    monkeypatch.setenv("FAKE_VBENCH_FAILS", "")
    evaluate(videos, suite_file, tmp_path / "out", ["color", "object_class"])
    assert fake_vbench.read_text().split()[::3] == ["color", "object_class", "color"]


def test_absent_vbench_is_one_sentence_before_any_work(videos, suite_file, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for python in (None, sys.executable):
        with pytest.raises(UserError, match="'vbench' is not installed for .*--vbench-python") as error:
            evaluate(videos, suite_file, tmp_path / "out", ["temporal_flickering", "color"], python=python)
        assert "\n" not in str(error.value)
    assert not list((tmp_path / "out").glob("*.json"))
    evaluate(videos, suite_file, tmp_path / "out", ["temporal_flickering"])
    assert list(read_scores(tmp_path / "out")) == ["temporal_flickering"]
    with pytest.raises(UserError, match="python='no-such-python' is not a program"):
        evaluate(videos, suite_file, tmp_path / "out", ["color"], python="no-such-python")


def test_missing_videos_are_counted_before_any_work(videos, suite_file, fake_vbench, tmp_path):
    (videos / "a cat-2.mp4").unlink()
    with pytest.raises(UserError, match="2 of the 10 videos of dynamic_degree are missing in .*'a cat-2.mp4'"):
        evaluate(videos, suite_file, tmp_path / "out", ["color", "dynamic_degree"])
    assert not fake_vbench.exists()
    with pytest.raises(UserError, match="'nowhere' does not exist"):
        evaluate("nowhere", suite_file, tmp_path / "out", ["color"])


def test_flickering_is_measured_on_what_the_static_filter_left(videos, suite_file, tmp_path):
    filtered = tmp_path / "filtered"
    filtered.mkdir()
    still = np.full((4, 16, 16, 3), 7, dtype=np.uint8)
    write_mp4(still, filtered / f"{video_name(SUITE[0]['prompt_en'], 0)}.mp4", fps=8)
    evaluate(videos, suite_file, tmp_path / "out", ["temporal_flickering"], filtered=filtered)
    assert read_scores(tmp_path / "out") == {"temporal_flickering": 1.0}
    evaluate(videos, suite_file, tmp_path / "out", ["temporal_flickering"])
    assert read_scores(tmp_path / "out")["temporal_flickering"] < 1.0


# The script ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("evaluate_vbench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main([str(argument) for argument in arguments])


def test_generated_videos_are_found_scored_and_summed_up(suite_file, tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr("mhla_diffusion.pipelines.generate.load_pipeline", lambda *args: FilmingPipeline())
    made = ["--pipeline", "any", "--prompts", suite_file, "--out", tmp_path / "out", "--fps", 8, "--batch-size", 8]
    assert script("generate", *made) == 0
    printed = capsys.readouterr().out
    assert "40 videos" in printed and "'either/or' cannot be a file name" in printed
    listed = os.listdir(tmp_path / "out" / "videos")
    assert len(listed) == 40 and "In a still frame, a stop sign-24.mp4" in listed and "a cat-4.mp4" in listed
    assert all(name.endswith(".mp4") for name in listed)  # VBench takes the suffix of whatever comes first
    one, other = (tmp_path / "out" / "videos" / f"a cat-{k}.mp4" for k in (0, 1))
    assert one.read_bytes() != other.read_bytes()
    before = one.stat().st_mtime_ns
    assert script("generate", *made) == 0 and one.stat().st_mtime_ns == before

    scored = ["--prompts", suite_file, "--videos", tmp_path / "out" / "videos", "--out", tmp_path / "results"]
    assert script("run", *scored, "--dimensions", "temporal_flickering") == 0
    printed = capsys.readouterr().out
    assert "temporal flickering" in printed and "static_filter" in printed and "total score" in printed

    rest = write_json(tmp_path / "rest.json", {n: s for n, s in row(WAN).items() if n != "temporal_flickering"})
    assert script("summarize", tmp_path / "results", rest, "--json", tmp_path / "totals.json") == 0
    totals = json.loads((tmp_path / "totals.json").read_text())
    flickering = read_scores(tmp_path / "results")["temporal_flickering"]
    assert totals["total"] == total_scores(row(WAN) | {"temporal_flickering": flickering})["total"]


def test_dimensions_are_added_to_a_folder_of_videos_in_any_order(suite_file, tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr("mhla_diffusion.pipelines.generate.load_pipeline", lambda *args: FilmingPipeline())
    made = ["--pipeline", "any", "--prompts", suite_file, "--fps", 8, "--batch-size", 8]
    places = {name: tmp_path / name for name in ("whole", "parts")}
    assert script("generate", *made, "--out", places["whole"]) == 0
    assert script("generate", *made, "--out", places["parts"], "--dimensions", "color") == 0
    some = os.listdir(places["parts"] / "videos")
    assert 0 < len(some) < 40
    assert script("generate", *made, "--out", places["parts"], "--dimensions", "temporal_flickering") == 0
    for place in places.values():
        assert script("generate", *made, "--out", place) == 0
    assert script("generate", *made, "--out", places["parts"], "--dimensions", "color") == 0
    assert f"{len(some)} were there" in capsys.readouterr().out
    whole, parts = ({p.name: p.read_bytes() for p in (place / "videos").iterdir()} for place in places.values())
    assert len(whole) == 40 and parts == whole
    whole, parts = (sorted((place / "labels.jsonl").read_text().splitlines()) for place in places.values())
    assert parts == whole and len(parts) == 40
    assert json.loads((places["parts"] / "generation.json").read_text())["num_images"] == 40
    assert script("generate", *made, "--out", places["parts"], "--dimensions", "color", "--seed", 1) == 2
    assert "made with seed=0, now it is 1; choose a new folder" in capsys.readouterr().err


def test_a_pipeline_of_images_is_refused(suite_file, tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr("mhla_diffusion.pipelines.generate.load_pipeline", lambda *args: PaintingPipeline())
    assert script("generate", "--pipeline", "sana", "--prompts", suite_file, "--out", tmp_path / "out") == 2
    assert "pipeline='sana', a PaintingPipeline, makes none" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.png"))


def test_quick_check_needs_no_prompts(videos, tmp_path, script, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    options = ["--videos", videos, "--out", tmp_path / "quick"]
    assert script("run", *options, "--dimensions", "temporal_flickering") == 0
    content = json.loads((tmp_path / "quick" / "temporal_flickering_eval_results.json").read_text())
    assert len(content["temporal_flickering"][1]) == 20
    filtered = tmp_path / "filtered"
    filtered.mkdir()
    shutil.copy(next(videos.glob("*.mp4")), filtered)
    assert script("run", *options, "--dimensions", "temporal_flickering", "--filtered-videos", filtered) == 0
    content = json.loads((tmp_path / "quick" / "temporal_flickering_eval_results.json").read_text())
    assert [Path(video["video_path"]).parent for video in content["temporal_flickering"][1]] == [filtered]
    capsys.readouterr()
    assert script("run", *options) == 2
    assert capsys.readouterr().err.startswith("error: VBench's prompts are needed")


def test_script_tells_errors_in_one_line(tmp_path, script, capsys):
    assert script("summarize", tmp_path / "nowhere") == 2
    assert script("run", "--videos", tmp_path, "--out", tmp_path, "--dimensions", "flicker") == 2
    assert script("generate", "--pipeline", "x", "--prompts", tmp_path / "x.json", "--out", tmp_path / "o") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    assert "temporal_flickering" in errors[1]
