"""Comparing retrofits: every cell once, the same steps for all, and results that can be read without the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from training_runs import ROOT, TINY, make_images

from mhla_diffusion.backbones import family_named
from mhla_diffusion.errors import UserError
from mhla_diffusion.training import comparison, config_from_dict, config_to_yaml, held_out_loss
from mhla_diffusion.training.comparison import (
    Retrofit,
    cell_config,
    compare_retrofits,
    grid,
    read_results,
    results_table,
)
from mhla_diffusion.training.config import config_to_dict


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    images = str(make_images(folder / "images"))
    family = family_named("dit")
    teacher = family.build_model(None, None, num_embeds_ada_norm=3, **TINY["model"]["overrides"])
    family.build_pipeline(teacher, {}).save_pretrained(folder / "teacher")
    tiny = {**TINY, "model": {"pretrained": str(folder / "teacher"), "attention": "mhla"}}
    changes = {"train": {"steps": 6}, "validation": {"every": 2, "images": 0}, "checkpoint": {"every": 0}}
    return config_from_dict(tiny, {"data": {"train": images, "validation": images}}, changes)


def test_every_cell_is_run_once_within_the_same_steps(config, tmp_path, monkeypatch):
    choices = grid(blocks=[(2, 2)], align_steps=[0, 2])
    rows = compare_retrofits(choices, [0, 1], config, tmp_path / "out")
    assert [(row["align_steps"], row["seed"]) for row in rows] == [(0, 0), (2, 0), (0, 1), (2, 1)]
    assert [[step for step, _ in row["curve"]] for row in rows] == [[2, 4, 6]] * 2 + [[2, 4, 6]] * 2
    teacher = held_out_loss(config, config.model.pretrained)["loss"]
    for row in rows:
        assert row["teacher_loss"] == teacher and row["loss"] == row["curve"][-1][1]
        reached = [step for step, loss in row["curve"] if loss <= teacher]
        assert row["steps_to_teacher"] == (reached[0] if reached else None)
    assert rows[0]["loss"] != rows[2]["loss"]

    ran = []
    whole = comparison.finetune
    monkeypatch.setattr(comparison, "finetune", lambda cell, resume: ran.append(cell) or whole(cell, resume))
    more = compare_retrofits([*choices, Retrofit(blocks=(2, 2), cpe=True)], [0, 1], config, tmp_path / "out")
    assert more[:4] == rows and len(more) == 6
    assert [(cell.model.mhla["cpe"], cell.train.seed, cell.train.steps) for cell in ran] == [(True, 0, 6), (True, 1, 6)]
    assert not list((tmp_path / "out" / "cells").glob("*/pipeline"))


def test_a_models_held_out_loss_does_not_depend_on_the_seed_of_training(config):
    other = config_from_dict(config_to_dict(config), {"train": {"seed": config.train.seed + 1}})
    assert held_out_loss(other, config.model.pretrained) == held_out_loss(config, config.model.pretrained)


def test_an_interrupted_comparison_goes_on(config, tmp_path, monkeypatch):
    whole = compare_retrofits([Retrofit(blocks=(2, 2))], [0, 1], config, tmp_path / "whole")

    def cut(cell, resume):
        if cell.train.seed == 1:
            raise KeyboardInterrupt
        return finetune(cell, resume)

    finetune = comparison.finetune
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(comparison, "finetune", cut)
        compare_retrofits([Retrofit(blocks=(2, 2))], [0, 1], config, tmp_path / "cut")
    assert len(read_results(tmp_path / "cut")) == 1
    rows = compare_retrofits([Retrofit(blocks=(2, 2))], [0, 1], config, tmp_path / "cut")
    assert [row["curve"] for row in rows] == [row["curve"] for row in whole]


def test_the_table_shows_median_range_and_steps_best_first():
    rows = [
        {"name": "relu", "seed": seed, "loss": loss, "teacher_loss": 0.2, "steps_to_teacher": step}
        for seed, (loss, step) in enumerate([(0.3, None), (0.5, None), (0.19, 40)])
    ]
    rows += [{**row, "name": "hedgehog", "loss": row["loss"] / 2, "steps_to_teacher": 10 + row["seed"]} for row in rows]
    lines = results_table(rows).splitlines()
    assert lines[2] == "| hedgehog | 3 | 0.1500 (0.0950–0.2500) | 11 (3 of 3) |"
    assert lines[3] == "| relu | 3 | 0.3000 (0.1900–0.5000) | – (1 of 3) |"
    assert lines[-1] == "The teacher's loss is 0.2000."


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("locality", 0.5, "locality 0.5"),
        ("normalize", False, "not normalized"),
        ("head_norm", True, "head norm"),
        ("rope", "before", "rope before"),
    ],
)
def test_what_families_decide_is_part_of_the_choice_only_where_it_is_given(config, tmp_path, field, value, words):
    given, default = grid(**{"blocks": [(2, 2)], field: [value, None]})
    assert given.name == f"relu, 2×2 full, {words}" and default.name == "relu, 2×2 full"
    assert cell_config(config, given, 3, tmp_path / "a").model.mhla[field] == value
    assert field not in cell_config(config, default, 3, tmp_path / "b").model.mhla


def test_what_cannot_be_compared_is_said(config, tmp_path):
    with pytest.raises(UserError, match="align_steps is 6, which leaves nothing of train.steps=6"):
        compare_retrofits([Retrofit(blocks=(2, 2), align_steps=6)], [0], config, tmp_path / "out")
    with pytest.raises(UserError, match="cpe='yes' must be True or False"):
        compare_retrofits([Retrofit(), Retrofit(cpe="yes")], [0], config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    compare_retrofits([], [0], config, tmp_path / "out")
    other = config_from_dict(comparison.config_to_dict(config), {"train": {"lr": 0.5}})
    with pytest.raises(UserError, match="holds a comparison with another config; choose a new folder"):
        compare_retrofits([], [0], other, tmp_path / "out")


def test_the_script_prints_the_table_and_draws_the_curves(config, tmp_path):
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config))
    options = ["--teacher", config.model.pretrained, "--config", tmp_path / "recipe.yaml", "--out", tmp_path / "out"]
    choice = ["--feature-map", "relu,hedgehog", "--blocks", "2x2", "--align-steps", "1", "--seeds", "0"]
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "compare_retrofit.py", *options, *choice, "train.steps=2"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "| hedgehog, 2×2 full, aligned 1 | 1 |" in run.stdout
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["feature_map"] for row in rows] == ["relu", "hedgehog"]
