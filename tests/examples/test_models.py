"""The benchmark of third-party models on a stand-in: records, checks, tables, and what becomes of failures."""

import importlib.metadata
import json
from functools import partial

import pytest
import torch
from torch import nn

from examples.benchmarks import models, summaries, tables, third_party
from tests.examples.stand_ins import counted


class StandIn(nn.Module):
    """A layer that packs, one whose weight is used without calling it, one that is too small, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 256)
        self.unused = nn.Linear(256, 256)
        self.fc1, self.fc2 = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        x = nn.functional.linear(torch.sin(self.embed(x)), self.unused.weight)
        return self.head(torch.sin(self.fc2(torch.sin(self.fc1(torch.sin(x))))).mean(1))


def stand_in_batch(batch):
    return torch.randn(batch, 256, 3), torch.randint(10, (batch,))


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """Run the benchmark in this process on a small model, with counted bytes for the allocator's."""
    loss = third_party._cross_entropy
    stand_in = third_party.Workload("torch", 4, StandIn, stand_in_batch, loss)
    monkeypatch.setattr(models, "WORKLOADS", {"stand-in": stand_in})
    monkeypatch.setattr(models, "require_gpu", lambda: None)
    monkeypatch.setattr(models, "allocated", counted)
    in_process = lambda name, method, timed: models.measure(name, method, torch.device("cpu"), timed)  # noqa: E731
    monkeypatch.setattr(models, "run_case", in_process)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder):
    return json.loads((folder / "models.json").read_text())


def pair(**changes):
    """Return the records of one made-up model: 60 MiB of 200 saved, as announced."""
    common = {"model": "net", "source": "library", "version": "1.2", "batch": 8, "precision": "bf16-mixed"}
    common |= {"gpu": "GPU", "torch": "2", "triton": "3", "command": "python made_up.py"}
    dense = common | {"method": "dense", "sparsity": None, "block_size": None}
    dense |= {"activations_mib": 200.0, "peak_mib": 300.0, "accounted_mib": 200.0}
    pruned = common | {"method": "pruned", "sparsity": 0.6, "block_size": 32, "converted": 9, "packed": 8, "skipped": 3}
    pruned |= {"activations_mib": 140.0, "peak_mib": 250.0, "accounted_mib": 140.0, "saved_mib": 60.0}
    pruned |= {"announced_mib": 60.0, "reasons": ["is small", "is unused"]}
    return [dense, pruned | changes]


@pytest.mark.slow
def test_saving_on_a_model_is_what_was_announced(on_the_cpu, capsys):
    assert models.main([]) == 0
    dense, pruned = read(on_the_cpu)
    assert (dense["method"], pruned["method"], pruned["source"]) == ("dense", "pruned", "torch")
    assert pruned["version"] == importlib.metadata.version("torch")
    # Two layers and the head pack; the unused one does not, and the embedding's three features are too few.
    assert (pruned["converted"], pruned["packed"], pruned["skipped"]) == (4, 3, 1)
    assert pruned["reasons"] == ["has 3 input features"]
    # Each figure is rounded by itself, and what was saved is the difference of two.
    assert pruned["saved_mib"] == pytest.approx(pruned["announced_mib"], abs=0.015)
    assert pruned["saved_mib"] == pruned["accounted_saved_mib"]
    assert not {"announced_mib", "converted"} & dense.keys()
    assert not {"step_ms"} & (dense.keys() | pruned.keys())
    assert {"gpu", "torch", "triton", "command"} <= dense.keys()
    printed = capsys.readouterr().out
    assert "stand-in" in printed
    assert "announced" in printed


@pytest.mark.slow
def test_memory_that_nobody_announced_is_an_offence(on_the_cpu, monkeypatch, capsys):
    monkeypatch.setattr(models, "allocated", partial(counted, pruned_extra=100 * models.MIB))
    assert models.main([]) == 1
    offences = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stand-in: ")]
    assert len(offences) == 3
    assert offences[0].startswith("stand-in: activations_mib is 1")
    assert offences[1].startswith("stand-in: peak_mib is 1")
    assert "MiB were saved and" in offences[2]


@pytest.mark.parametrize(
    ("changes", "offences"),
    [
        ({}, 0),
        ({"peak_mib": 301.4}, 0),
        ({"peak_mib": 301.6}, 1),
        ({"saved_mib": 61.1}, 0),
        ({"saved_mib": 61.3}, 1),
        ({"saved_mib": 58.7}, 1),
        ({"activations_mib": 201.1, "saved_mib": -1.1, "announced_mib": -1.1}, 1),
        ({"activations_mib": 200.9, "saved_mib": -0.9, "announced_mib": -0.9}, 0),
    ],
)
def test_limits_of_the_checks(changes, offences):
    assert len(list(models.problems(pair(**changes)))) == offences


def test_a_failed_case_is_recorded_shown_and_an_offence(on_the_cpu, monkeypatch, capsys):
    error = {"error": "ModuleNotFoundError: No module named 'timm'"}
    outcomes = {"dense": {"accounted_mib": 1.0}, "pruned": error}
    monkeypatch.setattr(models, "run_case", lambda name, method, timed: outcomes[method])
    assert models.main([]) == 1
    dense, pruned = read(on_the_cpu)
    assert "error" not in dense
    assert pruned["error"] == "ModuleNotFoundError: No module named 'timm'"
    assert "stand-in, pruned: ModuleNotFoundError: No module named 'timm'" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="the case would run")
@pytest.mark.slow
def test_a_process_that_ends_with_an_error_leaves_its_last_line():
    found = models.run_case("TransformerEncoder", "dense", timed=False)
    assert list(found) == ["error"]
    assert found["error"].startswith("This benchmark needs an NVIDIA GPU")


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(models, "CASE_SECONDS", 0.01)
    assert models.run_case("TransformerEncoder", "dense", timed=False) == {"error": "took over 0.01 s"}


def test_table_has_a_row_per_model_also_if_it_failed():
    failed = [{**record, "model": "broken", "version": None} for record in pair()]
    failed[1]["error"] = "no memory"
    text = tables.models(pair() + failed)
    row = "| net | library 1.2 | 8 | 8 of 9 | 3 | 200 / 140 | 300 / 250 | 60.0 (30 %) | 60.0 |"
    assert row in text
    assert text.endswith("\n\nWhy layers are left dense:\n\n- net: is small; is unused")
    assert "| broken | library (not installed) | 8 | pruned failed: no memory | - | - | - | - | - |" in text
    assert "s = 0.6, b = 32" in text
    assert "`python made_up.py`" in text


def test_a_model_without_skipped_layers_names_no_reason():
    assert summaries.models(pair(skipped=0, reasons=[])).rows[0][4] == "0"


def test_layers_of_all_blocks_share_a_reason():
    reasons = [f"its input is kept by 'blocks.{n}.attn' (sdpa)" for n in range(3)]
    assert (
        summaries.models(pair(skipped=3, reasons=reasons)).rows[0][4]
        == "3 (its input is kept by 'blocks.*.attn' (sdpa))"
    )


def test_reasons_are_cut_to_their_first_clause():
    assert models.shortened("is a torch.nn.Foo, whose forward is not known") == "is a torch.nn.Foo"
    assert models.shortened("has 3 input features: below 64, each") == ("has 3 input features")


def test_lora_trains_only_the_updates_and_starts_as_the_base():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(5, 8)
    before = dense(x)
    model = third_party.add_lora(dense, trained="2")
    torch.testing.assert_close(model(x), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"0.lora_A.weight", "0.lora_B.weight", "2.weight", "2.bias"}


@pytest.mark.parametrize("name", third_party.WORKLOADS)
def test_every_model_says_where_it_comes_from(name):
    record = models.head(name, "pruned")
    assert record["source"] in {"lightning_actprune", "timm", "torchvision", "transformers", "torch"}
    assert (record["sparsity"], record["block_size"]) == (0.6, 32)
