"""The benchmark of several GPUs: what it measures of a small model in two processes, how it goes on, and its table."""

from __future__ import annotations

import json
import time

import pytest
import torch

from examples.benchmarks import common, scaling, summaries
from examples.benchmarks.scaling import Case
from tests.examples.test_rivals import ENVIRONMENT
from tests.support.marks import needs_passes, quick

CASES = [("ddp", "dense"), ("ddp", "recompute"), ("fsdp2", "checkpoint"), ("fsdp2", "max")]


@pytest.mark.usefixtures("small_rival")
@pytest.mark.parametrize(("strategy", "method"), quick(CASES))
def test_a_case_in_two_processes(strategy, method):
    found = scaling.run_case(Case("small", method, strategy, 2, False, "cpu"))
    assert "error" not in found, found
    assert found["step_ms"] > 0
    assert found["samples_per_s"] == round(2 * scaling.BATCHES * 2 / found["step_ms"] * 1e3, 1)


@needs_passes
@pytest.mark.slow
@pytest.mark.usefixtures("small_rival")
def test_a_compiled_case():
    # In this process: one that has compiled has threads, without which its forks would wait for ever.
    with torch._dynamo.config.patch(optimize_ddp=True):
        found = scaling.measure(0, 0, Case("small", "max", scaling.ONE, 1, True, "cpu"))
    assert found["step_ms"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_rival")
def test_one_device_needs_no_other_process():
    found = scaling.run_case(Case("small", "max", scaling.ONE, 1, False, "cpu"))
    assert found["step_ms"] > 0


def test_a_process_that_fails_is_the_error_of_its_case(monkeypatch):
    def failing(rank, *_):
        if rank == 1:
            raise RuntimeError("no such device")
        time.sleep(100)

    monkeypatch.setattr(scaling, "measure", failing)
    monkeypatch.setattr(common, "LEFT_SECONDS", 0.5)
    begin = time.monotonic()
    found = scaling.run_case(Case("vit_base_patch16_224", "dense", "ddp", 3, False))
    assert "no such device" in found["error"]
    assert time.monotonic() - begin < 60


def made_up(strategy, devices, method, step_ms, **more):
    figures = {"activations_mib": 100.0, "peak_mib": 200.0, "step_ms": step_ms, "host_ms": 9.0}
    head = {"model": "a", "strategy": strategy, "devices": devices, "method": method, "compiled": False}
    return {**head, **figures, **more, **ENVIRONMENT}


def test_a_run_goes_on_where_it_stopped(monkeypatch, tmp_path):
    asked = []

    def run_case(case):
        asked.append(case)
        return {"activations_mib": 1.0, "peak_mib": 2.0, "step_ms": 3.0, "host_ms": 2.0, **ENVIRONMENT}

    monkeypatch.setattr(scaling, "run_case", run_case)
    monkeypatch.setattr(scaling, "require_gpu_in_fork", lambda: None)
    monkeypatch.setattr(scaling, "described", lambda name, batches: {"model": name})
    out, arguments = tmp_path / "scaling.json", ["--models", "GPT2LMHeadModel", "--methods", "dense", "max"]
    assert scaling.main([*arguments, "--devices", "1", "--out", str(out)]) == 0
    assert scaling.main([*arguments, "--devices", "1", "2", "--out", str(out)]) == 0
    model = "GPT2LMHeadModel"
    one = [Case(model, method, scaling.ONE, 1, False) for method in ("dense", "max")]
    two = [Case(model, method, strategy, 2, False) for strategy in scaling.STRATEGIES for method in ("dense", "max")]
    assert asked == one + two
    assert len(json.loads(out.read_text())) == 6
    assert scaling.main([*arguments, "--devices", "1", "--compile", "--out", str(out)]) == 0
    assert asked[6:] == [case._replace(compiled=True) for case in one]
    assert len(json.loads(out.read_text())) == 8
    del asked[6:]
    assert scaling.main([*arguments, "--devices", "2", "--compile", "--out", str(out)]) == 0
    assert [case.strategy for case in asked[6:]] == ["ddp"] * 2 + ["fsdp2"] * 2 + [scaling.WHOLE] * 2
    del asked[6:]
    scaling.main([*arguments, "--seconds", "-1", "--out", str(tmp_path / "none.json")])
    assert asked == one + two


def test_one_piece_is_for_compiled_models(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--strategies", scaling.WHOLE])
    assert "name --compile" in capsys.readouterr().err


def test_the_table_compares_with_dense_on_as_many_and_with_one():
    records = [
        made_up(scaling.ONE, 1, "dense", 10.0),
        made_up(scaling.ONE, 1, "max", 11.0),
        made_up("ddp", 2, "dense", 12.0),
        made_up("ddp", 2, "max", 12.1, peak_mib=100.0),
        made_up("ddp", 2, "max", 12.1, compiled=True),
        {key: value for key, value in made_up("fsdp2", 2, "dense", 1.0).items() if not key.endswith(("_mib", "_ms"))}
        | {"error": "none"},
        made_up("ddp, whole", 2, "dense", 6.0),
        made_up("ddp, whole", 2, "max", 1.0, peak_mib=100.0) | {"command": "another"},
    ]
    rows = summaries.scaling(records).rows
    assert rows[0] == ["a", "one GPU", "dense", "100", "200", "10.00", "-", "9"]
    assert rows[3] == ["a", "ddp, 2", "max", "100 (0 %)", "100 (-50 %)", "12.10 (+1 %)", "+10 %", "9"]
    assert rows[4] == ["a, compiled", "ddp, 2", "max", "100", "200", "12.10", "-", "9"]
    assert rows[5] == ["a", "fsdp2, 2", "dense", "none", *"----"]
    assert rows[-1] == ["a", "ddp, whole, 2", "max", "100 (0 %)", "100 (-50 %)", "1.00", "-", "9"]
