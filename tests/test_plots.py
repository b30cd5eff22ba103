"""Pictures of runs and samples: where curves begin, and which images stand under which prompt."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from scripts_in_process import main_of

from mhla_diffusion.errors import UserError
from mhla_diffusion.plots import read_samples, run_curves


def make_run(folder, steps, pretrained=None):
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps({"model": {"pretrained": pretrained}}))
    rows = [{"step": step, "loss": 1 / (step + 1), "validation/loss": 1 / (step + 2)} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_samples(folder, prompts, shade):
    folder.mkdir()
    lines = []
    for number, prompt in enumerate(prompts):
        # The order of the names is not that of the prompts.
        file = f"{9 - number}.png"
        Image.new("RGB", (4, 4), (shade + number,) * 3).save(folder / file)
        lines.append(json.dumps({"file": file, "prompt": prompt}) + "\n")
    (folder / "labels.jsonl").write_text("".join(lines))
    return folder


def test_a_run_begins_where_the_run_that_it_starts_from_ends(tmp_path):
    base = make_run(tmp_path / "base", [10, 20], "somebody/else")
    tuned = make_run(tmp_path / "tuned", [5, 15], f"{base}/pipeline")
    again = make_run(tmp_path / "again", [5], f"{tuned}/pipeline")
    metrics, starts = run_curves({"base": base, "tuned": tuned, "again": again})
    assert starts == {"base": 0, "tuned": 20, "again": 35}
    assert metrics["tuned"] == tuned / "metrics.jsonl"
    assert run_curves({"tuned": tuned})[1] == {"tuned": 0}


def test_samples_stand_under_their_prompts(tmp_path):
    one, other = (make_samples(tmp_path / str(shade), ["a cat", "a dog"], shade) for shade in (10, 100))
    rows, columns = read_samples({"one": one, "other": other}, 2)
    assert columns == ["a cat", "a dog"]
    assert [image.getpixel((0, 0))[0] for image in rows["other"]] == [100, 101]
    strange = make_samples(tmp_path / "strange", ["a cat", "a cow"], 0)
    with pytest.raises(UserError, match="strange has other prompts"):
        read_samples({"one": one, "strange": strange}, 2)
    with pytest.raises(UserError, match="does not hold 3 images"):
        read_samples({"one": one}, 3)
    with pytest.raises(UserError, match="--count 0 must be at least 1"):
        read_samples({"one": one}, 0)
    (one / "8.png").write_bytes(b"a video")
    with pytest.raises(UserError, match="one=.* holds a file that is no image"):
        read_samples({"one": one}, 2)


def test_the_script_draws_both_and_tells_what_is_wrong(tmp_path, capsys):
    run = make_run(tmp_path / "run", [1, 2])
    samples = make_samples(tmp_path / "samples", ["a cat", "a dog"], 7)
    plot_runs = main_of("plot_runs")
    for what, more in ((f"--run=stock={run}", ["--linear"]), (f"--samples=stock={samples}", ["--count", "2"])):
        out = tmp_path / f"{len(more)}.png"
        assert plot_runs([what, "--out", str(out), *more]) == 0
        assert Image.open(out).size[0] > 100
    capsys.readouterr()
    assert plot_runs([f"--run=stock={samples}", "--out", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert "holds no run" in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        plot_runs([f"--run=a={run}", f"--run=a={run}", "--out", "x"])
    assert ended.value.code == 2 and "the name 'a' is given twice" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
