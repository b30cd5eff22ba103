"""The benchmark measures what it says it measures, keeps it, and reads the right conclusions off it."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mhla_diffusion import linear_attention
from mhla_diffusion.benchmarks import models, operators
from mhla_diffusion.benchmarks.commands import compare, run_command
from mhla_diffusion.benchmarks.jobs import ProcessKilled, plan, run_jobs, worker_events
from mhla_diffusion.benchmarks.measure import Call, MemoryMeter, interleaved, peak_of
from mhla_diffusion.benchmarks.models import ModelCase
from mhla_diffusion.benchmarks.operators import OperatorCase, linear_core, sana_core, softmax_core
from mhla_diffusion.benchmarks.report import candidate_table, case_table, markdown, time_cells
from mhla_diffusion.benchmarks.results import Results
from mhla_diffusion.benchmarks.scaling import (
    crossover,
    faster_from,
    fit_exponent,
    growth,
    series,
    token_cases,
    too_long,
)
from mhla_diffusion.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from benchmark import main, parse_args  # noqa: E402

TINY = {
    "DiT-S/2": {
        "size": (64,),
        "overrides": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8},
    },
    "SANA-0.6B": {
        "size": (256, 128),
        "overrides": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 12,
        },
    },
    "Wan2.1-1.3B": {
        "size": (9, 32, 48),
        "overrides": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "text_dim": 16,
            "ffn_dim": 32,
        },
    },
}
SMALL = OperatorCase(grid=(4, 6), blocks=(2, 2), heads=2, head_dim=8)


# Operators -----------------------------------------------------------------------------------------------------------


def test_the_stock_core_is_relu_linear_attention():
    query, key, value = torch.randn(3, 2, 20, 3, 8).unbind()
    expected = linear_attention(F.relu(query), F.relu(key), value, eps=1e-15).flatten(2)
    assert torch.allclose(sana_core(query, key, value), expected, atol=1e-5)
    assert torch.allclose(linear_core(query, key, value), expected, atol=1e-4)


def test_the_softmax_core_is_softmax_attention():
    query, key, value = torch.randn(3, 2, 20, 3, 8).unbind()
    weights = torch.einsum("bqhd,bthd->bhqt", query, key).div(8**0.5).softmax(-1)
    expected = torch.einsum("bhqt,bthd->bqhd", weights, value).flatten(2)
    assert torch.allclose(softmax_core(query, key, value), expected, atol=1e-5)


def test_operations_of_mhla_are_counted_as_in_the_cost_model():
    case = OperatorCase(grid=(64, 64), blocks=(16, 16), heads=3, head_dim=10, batch=2)
    assert case.flops == 2 * 3 * (4 * 4096 * 100 + 2 * 256 * 256 * 100)
    separable = OperatorCase(grid=(64, 64), blocks=(16, 16), heads=3, head_dim=10, batch=2, mixing="separable")
    assert separable.flops == 2 * 3 * (4 * 4096 * 100 + 2 * 256 * (16 + 16) * 100)


@pytest.mark.parametrize("backward", [False, True])
def test_every_candidate_of_an_operator_runs(backward):
    case = OperatorCase(grid=(4, 6), blocks=(2, 2), heads=2, head_dim=8, backward=backward)
    names = operators.candidates(case)
    assert {"mhla", "linear", "sana-core", "sdpa"} <= set(names)
    assert ("gemm" in names) != backward
    calls = operators.prepare(case, [name for name in names if name != "gemm"])
    for call in calls.values():
        call.run()


# Time and memory -----------------------------------------------------------------------------------------------------


def test_candidates_are_timed_in_rounds_of_changing_order_after_a_warm_up():
    calls = []
    candidates = {
        name: Call(lambda n=name: calls.append(n), lambda n=name: calls.append(f"ready {n}")) for name in "abc"
    }
    events = list(interleaved(candidates, repeats=29))
    assert calls[::2] == [f"ready {name}" for name in calls[1::2]]
    rounds = ["".join(calls[i + 1 : i + 6 : 2]) for i in range(0, len(calls), 6)]
    assert len(rounds) == 30 and {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert {r[0] for r in rounds} == {r[2] for r in rounds} == set("abc")
    assert [name for name, seconds in events if seconds is None] == list("".join(rounds))
    assert [name for name, seconds in events if isinstance(seconds, float)] == list("".join(rounds[1:]))


def test_earlier_calls_count_and_a_spent_budget_ends_a_candidates_part():
    calls = []
    candidates = {name: Call(lambda n=name: calls.append(n)) for name in "abc"}
    before = {"a": [1.0], "b": [9.0, 9.0, 9.0], "c": [9.0, 9.0]}
    events = list(interleaved(candidates, repeats=4, budget=10.0, before=before))
    timed = [name for name, seconds in events if isinstance(seconds, float)]
    assert sorted(timed) == ["a", "a", "a", "c"]
    assert "b" not in calls


def test_a_candidate_out_of_memory_leaves_the_others_alone():
    def fail():
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fail_on_the_cpu():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    candidates = {"large": Call(fail), "larger": Call(fail_on_the_cpu), "small": Call(lambda: None)}
    events = list(interleaved(candidates, repeats=2))
    failed = sorted(e for e in events if isinstance(e[1], str))
    assert failed == [("large", "out of memory"), ("larger", "out of memory")]
    assert sum(name == "small" and isinstance(seconds, float) for name, seconds in events) == 2


def test_other_failures_of_a_candidate_are_not_hidden():
    def fail():
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        list(interleaved({"a": Call(fail)}, repeats=1))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak below an earlier one is not seen")
def test_memory_of_a_call_is_its_peak_whatever_was_in_use_before():
    meter = MemoryMeter("cpu")
    torch.ones(100 * 2**20)  # an earlier peak of 400 MiB, freed

    def call():
        first = torch.ones(20 * 2**20)  # 80 MiB
        del first
        return torch.ones(10 * 2**20).sum()  # 40 MiB, after the 80 were freed

    before, peak, seconds = peak_of(Call(call), meter)
    assert 75 * 2**20 <= peak - before <= 100 * 2**20 and seconds > 0


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", TINY)
@pytest.mark.parametrize("scope", models.SCOPES)
@pytest.mark.parametrize("step", [False, True])
def test_every_kind_of_attention_is_on_the_model_when_it_is_called(preset, scope, step):
    case = ModelCase(preset, scope=scope, step=step, **TINY[preset])
    names = models.candidates(case)
    assert names[:3] == [case.own_attention, "linear", "mhla"]
    prepared = models.prepare(case, names)
    results = {}
    for name, call in prepared.calls.items():
        call.ready()
        results[name] = call.run()
    if not step:
        outputs = [out[0] if isinstance(out, tuple) else getattr(out, "sample", out) for out in results.values()]
        for i, out in enumerate(outputs):
            assert out.isfinite().all()
            assert all(not torch.equal(out, other) for other in outputs[:i])


def test_the_models_call_is_the_familys_forward_pass():
    case = ModelCase("DiT-S/2", **TINY["DiT-S/2"])
    prepared = models.prepare(case, ["softmax"])
    out = prepared.calls["softmax"].run().sample
    torch.manual_seed(0)
    example = case.family.example(case.arguments, case.size)
    model = case.family.build_model(case.preset, **{**case.arguments, **example.arguments}).eval()
    objective = case.family.objective()
    inputs = objective.prepare(model, example.latents, example.conditions, [torch.Generator().manual_seed(0)])
    with torch.no_grad():
        expected = model(inputs["noisy"], inputs["timestep"], inputs["class_labels"]).sample
    assert torch.equal(out, expected)
    assert prepared.weights == sum(x.numel() * 4 for x in (*model.parameters(), *model.buffers()))


def test_a_step_trains_the_weights_of_the_chosen_attention_only():
    case = ModelCase("DiT-S/2", step=True, **TINY["DiT-S/2"])
    prepared = models.prepare(case, ["softmax", "mhla"])
    model = prepared.calls["mhla"].ready.func.__closure__  # the model is not handed out otherwise
    model = next(c.cell_contents for c in model if isinstance(c.cell_contents, torch.nn.Module))
    prepared.calls["mhla"].ready()
    mixing = model.mixing_parameters()[0]
    before, weight = mixing.detach().clone(), model.transformer_blocks[0].attn1.to_q.weight.detach().clone()
    prepared.calls["softmax"].ready()
    prepared.calls["softmax"].run()
    assert torch.equal(mixing, before)
    assert not torch.equal(model.transformer_blocks[0].attn1.to_q.weight, weight)
    prepared.calls["mhla"].ready()
    prepared.calls["mhla"].run()
    assert not torch.equal(mixing, before)


def test_gradient_checkpointing_and_mixed_precision_reach_the_model():
    tiny = TINY["SANA-0.6B"]
    case = ModelCase("SANA-0.6B", step=True, gradient_checkpointing=True, mixed_precision="bf16", **tiny)
    call = models.prepare(case, ["mhla"]).calls["mhla"]
    call.ready()
    dtypes, calls = set(), []
    linear = F.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda x, *rest: calls.append(1) or _seen(linear(x, *rest), dtypes))
        call.run()
    assert torch.bfloat16 in dtypes
    plain = ModelCase("SANA-0.6B", step=True, mixed_precision="bf16", **tiny)
    call, fewer = models.prepare(plain, ["mhla"]).calls["mhla"], []
    call.ready()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda x, *rest: fewer.append(1) or linear(x, *rest))
        call.run()
    assert len(calls) > len(fewer)  # blocks are computed again in the backward pass


def _seen(x, dtypes):
    dtypes.add(x.dtype)
    return x


def test_weights_are_built_in_the_asked_dtype():
    case = ModelCase("Wan2.1-1.3B", dtype="bfloat16", **TINY["Wan2.1-1.3B"])
    single = ModelCase("Wan2.1-1.3B", **TINY["Wan2.1-1.3B"])
    half, full = (models.prepare(c, ["mhla"]).weights for c in (case, single))
    assert 0.45 * full < half < 0.75 * full  # buffers of the rotary embedding stay as they are
    assert torch.get_default_dtype() == torch.float32


def test_the_profile_splits_a_forward_pass():
    prepared = models.prepare(ModelCase("DiT-S/2", **TINY["DiT-S/2"]), ["softmax", "mhla"])
    for name in ("softmax", "mhla"):
        shares = prepared.profile(name)
        assert 0 < shares["core"] < shares["attention"] < shares["total"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"preset": "DiT-S2"}, "preset='DiT-S2' is unknown (did you mean 'DiT-S/2'?)"),
        ({"size": (100,)}, "size=(100,) must be one or two multiples of 16"),
        ({"size": (64, 128)}, "must be square"),
        ({"preset": "Wan2.1-1.3B", "size": (480, 832)}, "must be frames"),
        ({"preset": "Wan2.1-1.3B", "size": (82, 480, 832)}, "4k + 1"),
        ({"scope": "layer"}, "scope='layer' must be one of block, model"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing is for training steps"),
        ({"mixed_precision": "int8"}, "mixed_precision='int8' must be one of no, bf16, fp16"),
        ({"dtype": "float8"}, "dtype='float8' must be one of float32, bfloat16, float16"),
        ({"mhla": {"block": (2, 2)}}, "MHLAConfig has no field 'block'"),
        ({"batch": 0}, "batch=0 must be 1 or more"),
        ({"overrides": {"patch_size": -2}}, "overrides: patch_size=-2 must be 1 or more"),
    ],
)
def test_what_no_model_can_be_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(UserError) as refusal:
        ModelCase(**{"preset": "DiT-S/2", "size": (64,), **fields})
    assert sentence in str(refusal.value)


# Results -------------------------------------------------------------------------------------------------------------


def test_a_stopped_benchmark_goes_on_where_it_was(tmp_path):
    path, header = tmp_path / "r.jsonl", {"machine": {"processor": "x"}}
    first = Results(header, path)
    first.add(SMALL, "mhla", seconds=0.5)
    first.add(SMALL, "mhla", seconds=0.7)
    first.add(SMALL, "sdpa", memory={"weights": 0, "call": 10, "peak": 20})
    first.add(SMALL, "linear", problem="out of memory", measure="time")
    with path.open("a") as file:
        file.write('{"kind": "operator", "case": {"gr')  # killed while writing
    again = Results(header, path)
    assert again.found == 3
    assert again.of(SMALL, "mhla").seconds == [0.5, 0.7] and again.of(SMALL, "mhla").median == 0.6
    assert again.of(SMALL, "sdpa").memory["call"] == 10
    assert not again.of(SMALL, "linear").problems, "tried again"
    again.add(SMALL, "mhla", seconds=0.6)
    assert [json.loads(line) for line in path.read_text().splitlines()][-1]["seconds"] == 0.6
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"mine\n",
        b"",
        b"[1, 2]\n",
        b"\xff\xfe",
        b'{"machine": {"cores": 3}}\n',
        b'{"machine": {}}\n{"variant": "mhla"}\n',
        b'{"machine": {}}\n{"variant": "mhla", "kind": "dog", "case": {}, "seconds": 1}\n',
        b'{"machine": {}}\n{"variant": "mhla", "kind": "operator", "case": {"grids": 3}, "seconds": 1}\n',
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="exists and is not of a benchmark on this machine"):
        Results({"machine": {}}, path)
    assert path.read_bytes() == content


def test_what_differs_from_the_machine_of_a_file_is_said(tmp_path):
    Results({"machine": {"cores": 3, "threads": 1}}, tmp_path / "r.jsonl")
    with pytest.raises(UserError, match="with these versions; threads: 1 there, 2 here; name another file"):
        Results({"machine": {"cores": 3, "threads": 2}}, tmp_path / "r.jsonl")


def test_one_file_for_measurements_and_picture_is_refused(tmp_path):
    with pytest.raises(UserError, match="json and plot are both .*/same'; name two files"):
        compare([SMALL], {}, json=tmp_path / "same", plot=tmp_path / "." / "same")
    with pytest.raises(UserError, match="once measures time and memory and nothing else"):
        compare([SMALL], {}, once=True, memory=False)


def test_tables_hold_medians_quartiles_relations_and_reasons():
    results = Results({})
    for seconds in (0.010, 0.020, 0.030):
        results.add(SMALL, "mhla", seconds=seconds)
    results.add(SMALL, "sdpa", seconds=0.050)
    results.add(SMALL, "mhla", memory={"weights": 0, "call": 3 * 2**20, "peak": 4 * 2**20})
    results.add(SMALL, "linear", problem="out of memory", measure="time")
    table = candidate_table(results, SMALL, ["mhla", "sdpa", "linear"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
    assert rows[2] == ["mhla", "20.0", "15.0–25.0", "3", "1.00", "3"]
    assert rows[3] == ["sdpa", "50.0", "50.0–50.0", "1", "2.50", "not measured"]
    assert rows[4][:2] == ["linear", "out of memory"]
    assert "| 20.0 |" in " ".join(case_table(results, [SMALL], ["mhla"]).split())


def test_a_markdown_table_is_aligned():
    lines = markdown(["a", "long name"], [["first one", "1"], ["b", "22"]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].endswith("-: |")


# Growth and crossover ------------------------------------------------------------------------------------------------


@given(exponent=st.floats(0.1, 3), factor=st.floats(1e-6, 1e3), points=st.integers(2, 9))
def test_the_exponent_of_a_power_law_is_found(exponent, factor, points):
    x = [256 * 4**i for i in range(points)]
    fitted = fit_exponent(x, [factor * n**exponent for n in x])
    assert np.isclose(fitted.exponent, exponent, atol=1e-8) and np.isclose(
        np.log(fitted.factor), np.log(factor), atol=1e-6
    )
    assert fitted.points == points and (points == 2 or fitted.error < 1e-6)


def test_noise_shows_in_the_error_of_the_exponent():
    x = np.array([256.0, 1024, 4096, 16384, 65536])
    log_y = np.log(x) + np.array([0.1, -0.1, 0.05, -0.1, 0.1])
    fitted = fit_exponent(list(x), list(np.exp(log_y)))
    (slope, _), covariance = np.polyfit(np.log(x), log_y, 1, cov=True)
    assert np.isclose(fitted.exponent, slope) and np.isclose(fitted.error, np.sqrt(covariance[0, 0]))
    assert fit_exponent([256], [1.0]) is None


@given(n=st.floats(300, 60000))
def test_the_crossover_of_two_power_laws_is_found(n):
    x = [256, 1024, 4096, 16384, 65536]
    found = crossover(x, [t / n for t in x], [(t / n) ** 2 for t in x])
    assert np.isclose(found.at, n, rtol=1e-6) and not found.always


def test_the_crossover_is_from_where_it_stays_faster():
    # Faster at 256, slower at 1024, faster from 4096 on.
    found = crossover([1024, 256, 4096], [2.0, 1.0, 1.0], [1.0, 2.0, 2.0])
    assert 1024 < found.at < 4096
    assert "tokens on" in str(found)


def test_always_and_never_faster_are_told_apart():
    always, never = crossover([256, 1024], [1, 1], [2, 2]), crossover([256, 1024], [2, 2], [1, 1])
    assert always.always and always.at is None and "at all measured sizes, 256 to 1,024" in str(always)
    assert not never.always and never.at is None and "at no measured size up to 1,024" in str(never)
    assert crossover([], [], []) is None


def test_growth_is_fitted_only_where_blocks_are_few():
    base = OperatorCase(grid=(8, 8), blocks=(4, 4), heads=1, head_dim=4)
    cases = token_cases([8, 16, 32, 64], base)  # 16² blocks exceed 64 tokens
    results = Results({})
    for case in cases:
        results.add(case, "mhla", seconds=1.0 if case.num_tokens == 64 else case.num_tokens * 1e-3)
        results.add(case, "sdpa", seconds=case.num_tokens**2 * 1e-6)
        results.add(case, "mhla", memory={"weights": 0, "call": case.num_tokens * 100, "peak": 0})
    fitted = growth(series(results, cases, "mhla"))
    assert fitted.points == 3 and np.isclose(fitted.exponent, 1.0)
    assert np.isclose(growth(series(results, cases, "mhla", "memory"), "memory").exponent, 1.0)
    assert 256 < faster_from(results, cases, "mhla", "sdpa").at <= 1024


def test_what_would_take_too_long_is_left_out():
    cases = token_cases([8, 16, 32], SMALL)
    results = Results({})
    results.add(cases[0], "sdpa", seconds=1.0)
    reason = too_long(results, cases, most=3.0)
    assert reason(cases[0], "sdpa") is None
    assert "more than 3 s" in reason(cases[1], "sdpa")
    results.add(cases[1], "sdpa", problem=reason(cases[1], "sdpa"), measure="time")
    assert "more than 3 s" in reason(cases[2], "sdpa")
    assert reason(cases[1], "mhla") is None
    results.add(cases[0], "linear", seconds=0.1)
    results.add(cases[1], "linear", seconds=1.6)  # 4 times the tokens took 16 times as long
    assert "more than 3 s" in reason(cases[2], "linear")


# Processes and the command -------------------------------------------------------------------------------------------


def test_times_and_memory_come_from_processes_of_their_own(tmp_path):
    results = Results({}, tmp_path / "r.jsonl")
    jobs = plan([SMALL], lambda case: ["mhla", "sdpa"], repeats=2)
    assert [(job.measure, job.variants) for job in jobs] == [
        ("time", ("mhla", "sdpa")),
        ("memory", ("mhla",)),
        ("memory", ("sdpa",)),
    ]
    run_jobs(jobs, results, progress=False)
    for variant in ("mhla", "sdpa"):
        entry = results.of(SMALL, variant)
        assert len(entry.seconds) == 2 and min(entry.seconds) > 0
        assert entry.memory["weights"] == 0 and entry.memory["peak"] > 0
    before = (tmp_path / "r.jsonl").read_text()
    run_jobs(jobs, Results({}, tmp_path / "r.jsonl"), progress=False)  # nothing is left to do
    assert (tmp_path / "r.jsonl").read_text() == before


def test_one_call_can_give_both_time_and_memory():
    results = Results({})
    run_jobs(plan([SMALL], lambda case: ["mhla"], repeats=5, once=True), results, progress=False)
    entry = results.of(SMALL, "mhla")
    assert len(entry.seconds) == 1 and entry.memory["peak"] > 0


def test_a_killed_process_costs_one_candidate_only(monkeypatch):
    from mhla_diffusion.benchmarks import jobs as module

    def events(request):
        for name in request["variants"]:
            yield {"variant": name, "begin": True}
            if name == "large":
                raise ProcessKilled
            yield {"variant": name, "seconds": 1.0}

    monkeypatch.setattr(module, "worker_events", events)
    results = Results({})
    run_jobs(plan([SMALL], lambda case: ["a", "large", "b"], 1, memory=False), results, progress=False)
    assert results.of(SMALL, "large").problems == {"time": "killed (out of memory?)"}
    assert [results.of(SMALL, name).seconds for name in ("a", "b")] == [[1.0], [1.0]]
    results.add(SMALL, "large", seconds=0.5)
    assert time_cells(results.of(SMALL, "large"), "ms")[0] == "500, then killed (out of memory?)"


@pytest.mark.parametrize("where", ["build", "call"])
@pytest.mark.parametrize("once", [False, True])
def test_too_little_memory_costs_the_candidate_whatever_is_measured(monkeypatch, where, once):
    from mhla_diffusion.benchmarks import jobs as module
    from mhla_diffusion.benchmarks.worker import work

    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    def events(request):
        sent = []
        work(request, SimpleNamespace(send=sent.append))
        assert not any("failed" in event for event in sent), sent[-1]["failed"]
        return sent

    if where == "build":
        monkeypatch.setattr(operators, "prepare", fail)
    else:
        monkeypatch.setattr(operators, "prepare", lambda case, names: {name: Call(fail) for name in names})
    monkeypatch.setattr(module, "worker_events", events)
    results = Results({})
    run_jobs(plan([SMALL], lambda case: ["a", "b"], 1, once=once), results, progress=False)
    for name in ("a", "b"):
        assert results.of(SMALL, name).problems == {"time": "out of memory", "memory": "out of memory"}


def test_a_kill_is_told_from_a_failure():
    job = plan([SMALL], lambda case: ["mhla"], repeats=10**9)[0]
    request = dataclasses.asdict(job) | {"kind": "operator", "before": {}}
    events = worker_events(request)
    next(events)
    multiprocessing.active_children()[-1].kill()
    with pytest.raises(ProcessKilled):
        list(events)
    request = {"kind": "operator", "case": {"device": "cpu"}}
    with pytest.raises(RuntimeError, match="measuring failed"):
        list(worker_events(request))
    case = {"preset": "DiT-S/2", "size": (64,), "device": "cpu", "overrides": {"layers": 2}}
    job = {"kind": "model", "case": case, "variants": ("mhla",)}
    assert "does not suit DiT-S/2" in list(worker_events(job))[0]["refused"]


def test_the_command_prints_tables_and_keeps_what_it_measured(tmp_path, capsys):
    out = tmp_path / "b.jsonl"
    options = [
        "operator",
        "--grid",
        "4",
        "4",
        "--blocks",
        "2",
        "2",
        "--heads",
        "1",
        "--head-dim",
        "8",
        "--repeats",
        "2",
    ]
    options += ["--variants", "mhla", "sdpa", "--json", str(out), "--plot", str(tmp_path / "b.png")]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "processor" in printed and "threads" in printed and "| mhla" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["settings"]["grid"] == [4, 4] and lines[0]["machine"]["torch"] == torch.__version__
    assert sum("seconds" in line for line in lines) == 4 and sum("memory" in line for line in lines) == 2
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_scaling_reports_exponents_and_crossovers_and_draws_them(tmp_path):
    options = vars(
        parse_args(
            [
                "scaling",
                "--sides",
                "4",
                "8",
                "--blocks",
                "2",
                "2",
                "--heads",
                "1",
                "--head-dim",
                "8",
                "--grid",
                "8",
                "8",
            ]
            + ["--block-counts", "1", "2", "--model-sizes", "32", "64", "--repeats", "1", "--no-memory"]
            + ["--set", "num_layers=1", "num_attention_heads=1", "attention_head_dim=8"]
            + ["--json", str(tmp_path / "s.jsonl"), "--plot", str(tmp_path / "s.png")]
        )
    )
    text = run_command(options.pop("command"), options)
    assert "operator, time of mhla: N^" in text
    assert "operator on cpu: mhla is faster than sdpa" in text
    assert "DiT-S/2 on cpu: mhla is faster than softmax" in text
    assert "8×8 tokens, 1×8, 1×1 blocks" in text
    summary = json.loads((tmp_path / "s.jsonl").read_text().splitlines()[-1])["summary"]
    assert {"tokens/time/mhla", "tokens/time/sdpa", "model/time/softmax"} <= summary["exponents"].keys()
    assert set(summary["faster"]) == {"tokens", "model"}
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["operator", "--grid", "4", "4", "--blocks", "2"], "blocks=(2,) has 1 axes but grid=(4, 4) has 2"),
        (["operator", "--device", "abacus"], "device='abacus' is not to be had on this machine"),
        (["operator", "--variants", "sdp"], "variants: 'sdp' is unknown"),
        (["operator", "--repeats", "0"], "repeats=0 must be 1 or more"),
        (["operator", "--heads", "0"], "heads=0 must be 1 or more"),
        (["operator", "--budget", "nan"], "budget=nan must be a number of seconds above 0"),
        (["scaling", "--max-seconds", "-1"], "max_seconds=-1.0 must be a number of seconds above 0"),
        (
            ["model", "--preset", "DiT-S/2", "--size", "256", "--mhla", "cpe"],
            "mhla: 'cpe' must be of the form key=value",
        ),
        (["model", "--preset", "DiT", "--size", "256"], "preset='DiT' is unknown"),
        (["model", "--preset", "DiT-S/2", "--size", "256", "--once", "--step"], "once is for forward passes"),
        (["scaling", "--sides", "0"], "sides=[0] must be one or more positive integers"),
        (["operator", "--json", "/proc/x/y.jsonl"], "json='/proc/x/y.jsonl' cannot be written"),
    ],
)
def test_bad_options_are_one_sentence_before_anything_is_measured(options, sentence, capsys):
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_each_backend_is_a_candidate():
    names = operators.candidates(SMALL, ["plain", "abacus"])
    assert names[:2] == ["mhla-plain", "mhla-abacus"] and "mhla" not in names
    calls = operators.prepare(SMALL, names[:2])
    calls["mhla-plain"].run()
    with pytest.raises(UserError, match="backend='abacus' is unknown"):
        calls["mhla-abacus"].run()
