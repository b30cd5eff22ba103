"""GenEval: the folders its evaluator reads, filled by generation, and its results summed up as it does."""

import importlib.util
import json
from pathlib import Path

import pytest
from painting_pipelines import PaintingPipeline
from PIL import Image

from mhla_diffusion.errors import UserError
from mhla_diffusion.evaluation.geneval import TASKS, format_results, lay_out, summarize_results
from mhla_diffusion.pipelines.generate import generate_images
from mhla_diffusion.pipelines.prompts import read_prompts

SCRIPT = Path(__file__).parent.parent / "scripts" / "evaluate_text_image.py"
METADATA = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {
        "tag": "counting",
        "include": [{"class": "clock", "count": 2}],
        "exclude": [{"class": "clock", "count": 3}],
        "prompt": "a photo of two clocks",
    },
    {
        "tag": "position",
        "include": [{"class": "cow", "count": 1}, {"class": "tie", "count": 1, "position": ["left of", 0]}],
        "prompt": "a photo of a tie left of a cow",
    },
]


def write_lines(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def metadata(tmp_path):
    return write_lines(tmp_path / "evaluation_metadata.jsonl", METADATA)


def read_as_the_evaluator_does(folder):
    """(prompt, tag, image files) in the way of GenEval's evaluate_images.py: digit folders, one JSON object each."""
    found = {}
    for subfolder in folder.iterdir():
        if subfolder.is_dir() and subfolder.name.isdigit():
            entry = json.loads((subfolder / "metadata.jsonl").read_text())
            files = sorted(path.name for path in (subfolder / "samples").iterdir())
            found[subfolder.name] = (entry, files)
    return found


def test_images_generated_from_the_layout_lie_where_the_evaluator_reads_them(metadata, tmp_path):
    """The prompts are read and drawn by the project's own generation; a stand-in pipeline paints what it is asked."""
    prompts = lay_out(metadata, tmp_path / "out")
    conditions = read_prompts(prompts)
    assert len(conditions) == 12
    generate_images(PaintingPipeline(), conditions, tmp_path / "out", batch_size=5, progress=False)
    found = read_as_the_evaluator_does(tmp_path / "out")
    assert sorted(found) == ["00000", "00001", "00002"]
    for index, (entry, files) in enumerate(found[name] for name in sorted(found)):
        assert entry == METADATA[index]
        assert files == ["0000.png", "0001.png", "0002.png", "0003.png"]
        samples = [Image.open(tmp_path / "out" / f"{index:05d}" / "samples" / file) for file in files]
        assert {sample.getpixel((0, 0))[0] for sample in samples} == {len(entry["prompt"])}
        assert len({sample.tobytes() for sample in samples}) == 4


def test_layout_can_be_made_again_but_not_for_other_prompts(metadata, tmp_path):
    first = lay_out(metadata, tmp_path / "out").read_text()
    assert lay_out(metadata, tmp_path / "out").read_text() == first
    names = [json.loads(line)["name"] for line in first.splitlines()]
    assert names[:5] == [*(f"00000/samples/{i:04d}" for i in range(4)), "00001/samples/0000"]
    other = write_lines(tmp_path / "other.jsonl", METADATA[::-1])
    with pytest.raises(UserError, match="holds another prompt"):
        lay_out(other, tmp_path / "out")
    with pytest.raises(UserError, match="'00002', which .* has no line for"):
        lay_out(write_lines(tmp_path / "fewer.jsonl", METADATA[:2]), tmp_path / "out")
    assert len(lay_out(metadata, tmp_path / "few", samples=1).read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "entries, words",
    [
        ([], ["empty"]),
        ([METADATA[0], {"tag": "colour", "include": [], "prompt": "x"}], ["line 2", "'colour'", "'colors'"]),
        ([{"include": [], "prompt": "x"}], ["line 1", "tag=None", "single_object"]),
        ([{"tag": "colors", "include": []}], ["line 1", "'prompt'"]),
        ([{"tag": "colors", "prompt": "x"}], ["line 1", "'include'"]),
        (["text"], ["line 1", "JSON object"]),
    ],
)
def test_bad_metadata_is_refused_before_anything_is_written(tmp_path, entries, words):
    with pytest.raises(UserError) as error:
        lay_out(write_lines(tmp_path / "bad.jsonl", entries), tmp_path / "out")
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def results(counts, images=100):
    """Lines as GenEval's evaluator writes them: `counts[task]` of `images` are correct, four images a prompt."""
    lines = []
    for task, count in counts.items():
        for i in range(images):
            entry = {"tag": task, "prompt": f"{task} {i // 4}"}
            lines.append(
                {
                    "filename": f"out/{task}-{i // 4}/samples/{i % 4:04d}.png",
                    "tag": task,
                    "prompt": entry["prompt"],
                    "correct": i < count,
                    "reason": "",
                    "metadata": json.dumps(entry),
                    "details": "{}",
                }
            )
    return lines


@pytest.mark.parametrize(
    "scores, overall",
    [
        ((98, 51, 44, 85, 7, 17), 0.50),  # Stable Diffusion 2.1
        ((97, 38, 35, 76, 4, 6), 0.43),  # Stable Diffusion 1.5
        ((97, 74, 66, 81, 13, 35), 0.61),  # IF-XL
    ],
)
def test_published_rows_are_reproduced_from_their_sub_scores(tmp_path, scores, overall):
    """The table in the README of djghosh13/geneval: single, two objects, counting, colours, position, attribution."""
    counts = dict(zip(TASKS, scores, strict=True))
    result = summarize_results(write_lines(tmp_path / "results.jsonl", results(counts)))
    assert result["tasks"] == {task: count / 100 for task, count in counts.items()}
    assert round(result["overall"], 2) == overall and result["missing"] == []


def test_overall_is_the_mean_over_tasks_not_over_images(tmp_path):
    lines = results(dict.fromkeys(TASKS[:5], 8), images=8) + results({TASKS[5]: 0}, images=80)
    result = summarize_results(write_lines(tmp_path / "results.jsonl", lines))
    assert result["overall"] == pytest.approx(5 / 6)
    assert result["correct_images"] == pytest.approx(40 / 120)
    assert result["correct_prompts"] == pytest.approx(10 / 30) and result["num_prompts"] == 30
    assert any("30 prompts, GenEval has 553" in note for note in result["notes"])
    assert not any("per prompt" in note for note in result["notes"])


def test_missing_task_is_listed_and_not_filled(tmp_path):
    lines = results({task: 4 for task in TASKS if task != "position"}, images=4)
    result = summarize_results(write_lines(tmp_path / "results.jsonl", lines))
    assert result["overall"] is None and result["missing"] == ["position"] and "position" not in result["tasks"]
    table = format_results(result)
    assert "no overall score: position" in table and "0.8333" not in table and "100.00%" in table


def test_wrong_number_of_images_is_noted(tmp_path):
    lines = results(dict.fromkeys(TASKS, 4), images=6)
    notes = summarize_results(write_lines(tmp_path / "results.jsonl", lines))["notes"]
    assert any("6 prompts with 2, 6 prompts with 4" in note for note in notes)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"correct": "yes"}, ["line 2", "correct='yes'", "true or false"]),
        ({"correct": 1}, ["line 2", "correct=1"]),
        ({"tag": "three_object"}, ["line 2", "'three_object'", "'two_object'"]),
        ({"metadata": None}, ["line 2", "'metadata'"]),
        ({"filename": "out/colors-0/samples/0000.png"}, ["line 2", "as line 1", "once"]),
    ],
)
def test_bad_results_are_refused_by_line(tmp_path, change, words):
    lines = results({"colors": 2}, images=2)
    lines[1] |= change
    with pytest.raises(UserError) as error:
        summarize_results(write_lines(tmp_path / "results.jsonl", lines))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_script_lays_out_and_sums_up(metadata, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("evaluate_text_image", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--geneval-prompts", str(metadata), "--out", str(tmp_path / "out")]) == 0
    assert "prompts.jsonl" in capsys.readouterr().out
    assert (tmp_path / "out" / "00002" / "metadata.jsonl").is_file()
    path = write_lines(tmp_path / "results.jsonl", results(dict.fromkeys(TASKS, 50)))
    assert module.main(["--geneval-results", str(path), "--json", str(tmp_path / "scores.json")]) == 0
    assert "overall" in capsys.readouterr().out
    assert json.loads((tmp_path / "scores.json").read_text())["overall"] == 0.5
    assert module.main(["--geneval-results", str(tmp_path / "nowhere.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("error: the GenEval results file")
