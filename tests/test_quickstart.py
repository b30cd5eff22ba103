"""The quickstart in miniature, and that every script explains itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from scripts_in_process import main_of

from mhla_diffusion.pipelines import MHLADiTPipeline
from mhla_diffusion.plots import plot_losses, plot_samples, read_curve

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_quickstart_goes_from_digits_to_a_table_pictures_and_a_pipeline(tmp_path):
    out = tmp_path / "quickstart"
    result = run_script("quickstart.py", "--out", str(out), "--miniature", "--num-images", "10")
    assert result.returncode == 0, result.stderr
    for name in ("softmax", "retrofitted", "fine-tuned"):
        row = re.search(rf"^{name} +(\S+) +(\S+) +(\S+) +(\S+)% +(\S+)$", result.stdout, re.MULTILINE)
        assert row and all(float(number) > -100 for number in row.groups()), result.stdout
    for picture in ("samples.png", "losses.png"):
        with Image.open(out / picture) as image:
            assert image.width > 300 and len(image.convert("L").getcolors(1 << 16)) > 10
    pipeline = MHLADiTPipeline.from_pretrained(out / "mhla" / "pipeline")
    assert pipeline.transformer.mhla_config.cpe
    assert len(pipeline([3, 5], num_inference_steps=1).images) == 2


def test_the_quickstart_replaces_no_folder_but_its_own(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = run_script("quickstart.py", "--out", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and "choose a new folder" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_a_script_explains_its_options(script, capsys):
    with pytest.raises(SystemExit) as ended:
        main_of(script)(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_a_script_is_a_program():
    result = run_script("finetune.py", "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ") and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("script", "at_work", "arguments"),
    [
        ("benchmark", "benchmarks.commands.run_command", ["operator"]),
        ("cache_latents", "training.cache.cache_latents", ["--out", "out"]),
        ("compare_retrofit", "training.finetune", ["--out", "out"]),
        ("convert", "convert.is_diffusers_folder", ["dit", "in", "out"]),
        ("evaluate_fid", "evaluation.evaluate_images", ["--generated", "a", "--reference", "b"]),
        ("evaluate_text_image", "evaluation.geneval.summarize_results", ["--geneval-results", "a"]),
        ("evaluate_vbench", "evaluation.vbench.summarize_results", ["summarize", "a"]),
        ("finetune", "training.finetune", []),
        ("generate", "pipelines.generate.load_pipeline", ["--pipeline", "a", "--num-images", "1", "--out", "out"]),
        ("plot_runs", "plots.run_curves", ["--run", "a=b", "--out", "a.png"]),
        ("prepare_components", "training.components.write_sana_components", ["sana", "out", "--data", "a"]),
        ("prepare_data", "training.datasets.write_digits", ["digits", "out"]),
        ("quickstart", "training.datasets.write_digits", ["--out", "out"]),
    ],
)
def test_ctrl_c_ends_a_script_with_one_line(tmp_path, monkeypatch, capsys, script, at_work, arguments):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mhla_diffusion.{at_work}", stopped)
    monkeypatch.chdir(tmp_path)
    assert main_of(script)(arguments) == 130
    (line,) = capsys.readouterr().err.splitlines()
    goes_on = {"cache_latents", "compare_retrofit", "evaluate_vbench", "finetune", "generate"}
    assert line.startswith("stopped by Ctrl-C") and ("goes on" in line) == (script in goes_on)


def test_loss_curves_and_samples_become_pictures(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0, "validation/loss": 1.5}\n{"st')  # cut off
    assert read_curve(metrics, "validation/loss") == ([2], [1.5])
    path = plot_losses({"a": metrics, "b": metrics}, tmp_path / "plots" / "losses.png", starts={"b": 2})
    rows = {"one": [Image.new("L", (8, 8), 255)] * 3, "two": [Image.new("RGB", (8, 8), "red")] * 3}
    for picture in (path, plot_samples(rows, ["a", "b", "c"], tmp_path / "samples.png")):
        with Image.open(picture) as image:
            assert image.format == "PNG" and len(image.convert("L").getcolors(1 << 16)) > 2
    assert not list(tmp_path.rglob("*.tmp"))


def test_every_package_of_the_source_is_installed():
    here = ROOT / "mhla_diffusion"
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in here.rglob("__init__.py")}
    listed = set(re.findall(r'^    "(mhla_diffusion[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert listed == found | {"mhla_diffusion.pipelines"}
