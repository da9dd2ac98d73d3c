"""The benchmark of head and loss together, of a small model on the CPU: the same loss, records, and the table."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from examples.benchmarks import logits, models, third_party
from lightning_actprune.operators.recompute import RecomputedModule

WORDS = 300
CPU = torch.device("cpu")
ENVIRONMENT = {"gpu": "GPU", "torch": "2", "triton": "3", "command": "python made_up.py"}


@pytest.fixture
def small(monkeypatch):
    pytest.importorskip("transformers")
    sizes = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "use_cache": False}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    build = partial(third_party._transformers, "GPT2LMHeadModel", "GPT2Config", **sizes, **dropouts)
    data = partial(third_party._text, length=16, vocabulary=WORDS)
    workload = third_party.Workload("transformers", 2, build, data, third_party._own_loss)
    monkeypatch.setattr(models, "WORKLOADS", {"small": workload})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_the_loss_is_that_of_the_library(small):
    results = []
    for method in ("dense", "dense, together", "recompute, together"):
        training = logits.prepare("small", method, CPU)
        assert len(training.batch[0]) == 4
        loss = training.forward()
        loss.backward()
        results.append((loss.item(), training.model.lm_head.weight.grad))
        assert any(isinstance(m, RecomputedModule) for m in training.model.modules()) == method.startswith("recompute")
    for loss, grad in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-4)
        assert torch.cosine_similarity(grad.flatten(), results[0][1].flatten(), dim=0) > 0.999


def test_a_case(small, monkeypatch):
    monkeypatch.setattr(logits, "allocated", lambda training: {"activations_mib": 2**21, "peak_mib": 3 * 2**20})
    found = logits.measure("small", "max, together", CPU)
    assert (found["activations_mib"], found["peak_mib"]) == (2, 3)
    assert found["step_ms"] > 0


def test_records_and_the_table(monkeypatch, tmp_path, capsys):
    figures = {"activations_mib": 10, "peak_mib": 100, "step_ms": 2.0}
    answers = {"dense": figures, "dense, together": {**figures, "peak_mib": 50}, "max, together": {"error": "made up"}}
    monkeypatch.setattr(logits, "require_gpu_in_fork", lambda: None)
    monkeypatch.setattr(logits, "run_case", lambda name, method: answers[method] | ENVIRONMENT)
    path = tmp_path / "logits.json"
    assert logits.main(["--models", "GPT2LMHeadModel", "--methods", *answers, "--out", str(path)]) == 1
    records = json.loads(path.read_text())
    assert [(r["method"], r["batch"]) for r in records] == [(method, 16) for method in answers]
    assert logits.summary(records).rows == [
        ["GPT2LMHeadModel, batch 16", "dense", "10", "100", "2.0"],
        ["GPT2LMHeadModel, batch 16", "dense, together", "10 (0 %)", "50 (-50 %)", "2.0 (0 %)"],
        ["GPT2LMHeadModel, batch 16", "max, together", "-", "-", "-"],
    ]
    assert "Head and loss together" in capsys.readouterr().out


def test_liger_is_measured_where_it_is_installed(monkeypatch):
    assert set(logits.methods()) - set(logits.METHODS) <= set(logits.LIGER)
    monkeypatch.setattr(logits.importlib.util, "find_spec", lambda name: name)
    assert logits.methods() == logits.METHODS + logits.LIGER


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        logits.main([])
