"""The benchmark times what it says it times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mhla_diffusion import linear_attention
from mhla_diffusion.benchmark import interleaved, sana_core, softmax_core, time_operators

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "benchmark.py"


def test_the_stock_core_is_relu_linear_attention():
    query, key, value = torch.randn(3, 2, 20, 3, 8).unbind()
    expected = linear_attention(F.relu(query), F.relu(key), value, eps=1e-15).flatten(2)
    assert torch.allclose(sana_core(query, key, value), expected, atol=1e-5)


def test_the_softmax_core_is_softmax_attention():
    query, key, value = torch.randn(3, 2, 20, 3, 8).unbind()
    weights = torch.einsum("bqhd,bthd->bhqt", query, key).div(8**0.5).softmax(-1)
    expected = torch.einsum("bhqt,bthd->bqhd", weights, value).flatten(2)
    assert torch.allclose(softmax_core(query, key, value), expected, atol=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_every_candidate_is_timed_in_turn(backward):
    calls = []
    timings = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3)
    assert calls == ["a", "b"] * 4 and [t.name for t in timings] == ["a", "b"]
    timings = time_operators((4, 6), 2, 8, (2, 2), repeats=2, backward=backward)
    assert [t.name for t in timings] == ["mhla", "linear", "sana core", "sdpa"]
    assert all(0 < t.low <= t.median <= t.high for t in timings)


def test_the_script_prints_a_table_and_writes_json(tmp_path):
    command = [sys.executable, str(SCRIPT), "operator", "--grid", "4", "4", "--blocks", "2", "2", "--repeats", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += ["--json", str(tmp_path / "b.json")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert "mhla" in result.stdout and "threads 1" in result.stdout
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["settings"]["grid"] == [4, 4] and len(written["timings"]) == 4
