"""The plan of what compiled models pack: on a small model."""

from __future__ import annotations

import json

import pytest

from examples.benchmarks import models, plan, third_party
from tests.examples.stand_ins import Blocks, vectors
from tests.support.marks import needs_passes

pytestmark = needs_passes


@pytest.fixture
def small(monkeypatch):
    workload = third_party.Workload("torch", 4, Blocks, vectors, third_party._cross_entropy)
    for module in (models, plan):
        monkeypatch.setitem(module.WORKLOADS, "small", workload)


@pytest.mark.usefixtures("small")
def test_what_a_step_packs_is_listed_without_a_step():
    hows = [(row.name, row.how) for row in plan.rows_of("small", "max")]
    # Inputs of activation functions and of norms, but of the first norm, which reads the batch.
    assert hows.count(("blocks.*.*", "packed")) == 5
    assert hows.count(("blocks.*.*", "again")) == 6  # those of linear layers


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_records(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan.main(["--models", "small", "--presets", "max", "balanced", "--out", str(out)]) == 0
    first, second = json.loads(out.read_text())
    assert (first["preset"], first["packs"], second["packs"]) == ("max", 5, 5)
    assert 0 < first["packed_mib"] < second["packed_mib"] < second["packable_mib"] / 3
    assert "small" in capsys.readouterr().out


@pytest.mark.slow
def test_another_error_is_none_of_its_own(monkeypatch, small):
    def fail(*_):
        raise ValueError("made up")

    monkeypatch.setattr(plan, "stop", fail)
    with pytest.raises(Exception, match="made up"):
        plan.rows_of("small", "max")


@pytest.mark.slow
def test_a_graph_that_packs_nothing_is_no_plan(monkeypatch, small):
    monkeypatch.setattr(plan, "mark_layers", lambda *_: None)
    with pytest.raises(RuntimeError, match="compiled of small packs nothing"):
        plan.rows_of("small", "max")
