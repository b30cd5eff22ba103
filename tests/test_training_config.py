"""The training config: what it accepts, and the one sentence it gives otherwise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
from training_runs import ROOT

from mhla_diffusion.errors import UserError
from mhla_diffusion.training.config import TrainConfig, config_help, config_to_yaml, load_config


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs").glob("dit_*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads_and_names_only_known_keys(recipe):
    config = load_config(recipe)
    assert config.output_dir.startswith("runs/")


def test_the_printed_config_reads_back_as_the_same_config(tmp_path):
    config = load_config(
        None, ["train.lr=3e-7", "model.mhla={blocks: [2, 3], cpe: true}", "data.train=/a b/c-é", "model.preset=null"]
    )
    path = tmp_path / "printed.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config


def test_overrides_go_on_top_of_the_file_and_the_file_on_top_of_the_defaults(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train: {steps: 7, lr: 0.5}\nmodel: {overrides: {a: 1, b: 2}}")
    config = load_config(path, ["train.lr=0.25", "model.overrides.b=3"])
    assert (config.train.steps, config.train.lr, config.train.batch_size) == (7, 0.25, TrainConfig().train.batch_size)
    assert config.model.overrides == {"a": 1, "b": 3}


def test_mhla_is_merged_by_field_and_an_empty_one_drops_it(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {mhla: {cpe: true}}\n")
    merged = load_config(recipe, ["model.mhla={gate: true}"]).model.mhla
    assert merged == {"cpe": True, "gate": True}
    assert load_config(recipe, ["model.mhla={}"]).model.mhla == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", "unknown config key 'train.stepz' (did you mean 'steps'?)"),
        ("lr=1", "unknown config key 'lr' (did you mean 'train.lr'?)"),
        ("trian.lr=1", "unknown config key 'trian' (did you mean 'train'?)"),
        ("train.steps=soon", "train.steps must be of type int"),
        ("train.lr=[1]", "train.lr must be of type float"),
        ("model.mhla=3", "model.mhla must be of type dict"),
        ("validation.labels=[a,b]", "validation.labels must be of type list[int]"),
        ("train=3", "train is 3; a section"),
        ("train.steps=0", "train.steps is 0; 1 or more is accepted"),
        ("train.lr=-1", "train.lr is -1.0; 0 or more is accepted"),
        ("train.lr=nan", "train.lr is nan; 0 or more is accepted"),
        ("train.ema_decay=1.5", "train.ema_decay is 1.5"),
        ("model.attention=softmx", "softmax, linear, mhla are accepted (did you mean 'softmax'?)"),
        ("data.channels=2", "data.channels is 2; 1 (greyscale) and 3 (colour) are accepted"),
        ("train.seed=9223372036854775808", "train.seed is 9223372036854775808; a number below 2**63 is accepted"),
        ("steps", "argument 'steps' is not understood"),
    ],
)
def test_a_bad_override_is_told_in_one_sentence(override, said):
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b", "train: {steps: 1", "\tx: 1"])
def test_a_file_that_is_no_recipe_is_told_in_one_sentence(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match="recipe.yaml") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_names_the_nearest_one():
    with pytest.raises(UserError, match=r"did you mean 'dit_digits.yaml'"):
        load_config(ROOT / "configs" / "dit_digit.yaml")


def test_help_shows_every_key_with_its_default():
    shown = config_help()
    for line in config_to_yaml(TrainConfig()).splitlines():
        key = line.strip().split(":")[0]
        assert key in shown


def test_the_script_ends_with_status_2_and_one_line_on_bad_input():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "finetune.py", "train.stepz=3"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown config key 'train.stepz'")
    assert done.stderr.count("\n") == 1


def test_the_script_says_where_a_run_was_stopped(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("finetune_script", ROOT / "scripts" / "finetune.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    for step, where in ((0, "before the first step"), (7, "at step 7")):
        stopped = SimpleNamespace(stopped_by="SIGINT", step=step)
        monkeypatch.setattr("mhla_diffusion.training.finetune", lambda *_, stopped=stopped: stopped)
        assert script.main([]) == 0
        assert f"stopped by SIGINT and saved {where}; --resume latest goes on" in capsys.readouterr().out
