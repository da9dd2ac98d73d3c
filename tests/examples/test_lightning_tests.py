"""Lightning's tests with our callbacks, on a stand-in for its checkout: which tests count as failing with them only."""

import json
import sys

import lightning.pytorch as pl
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from examples.benchmarks import lightning_tests
from lightning_actprune import ActivationMemoryMonitor, ActivationPruning

COUNTS = """
from importlib.metadata import entry_points
from pathlib import Path
import os
import pytest

FOUND = {point.name for point in entry_points(group="lightning.pytorch.callbacks_factory")}

class TestOurs:
    @pytest.mark.parametrize("count", [0, 1])
    def test_count(self, count):
        assert ("actprune" in FOUND) == count

def test_fails_once():
    mark = Path(__file__).with_suffix(".mark")
    if FOUND and not mark.exists():
        mark.touch()
        pytest.fail("this time")

def test_ends_its_process():
    if FOUND:
        os._exit(3)
"""
OTHERS = """
import pytest

def test_cleans_up_badly(request):
    request.addfinalizer(lambda: 1 / 0)

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "tests" / "tests_pytorch" / "tuner"
    folder.mkdir(parents=True)
    (folder / "test_counts.py").write_text(COUNTS)
    (folder / "test_others.py").write_text(OTHERS)
    (tmp_path / "checkout" / "pyproject.toml").write_text("[tool.pytest.ini_options]\nxfail_strict = true\n")
    return tmp_path / "checkout"


def run(checkout, *more):
    out = checkout.parent / "found.json"
    places = ["--lightning", str(checkout), "--out", str(out), "--work", str(checkout.parent / "work")]
    status = lightning_tests.main([*places, "--only", "tuner", "--runs", "exact", *more])
    return status, json.loads(out.read_text())


RESULTS = """<testsuites><testsuite name="pytest">
<testcase classname="tests.tests_pytorch.tuner.test_counts" name="test_fails_once" />
<testcase classname="tests.tests_pytorch.tuner.test_counts.TestOurs" name="test_count[a.b/c-1]"><failure /></testcase>
<testcase classname="tests.tests_pytorch.tuner.test_others" name="test_skipped"><skipped /></testcase>
<testcase classname="tests.tests_pytorch.tuner.test_others" name="test_cleans_up_badly" />
<testcase classname="tests.tests_pytorch.tuner.test_others" name="test_cleans_up_badly"><error /></testcase>
<testcase classname="" name="tests.tests_pytorch.tuner.test_broken"><error /></testcase>
</testsuite></testsuites>"""


def test_results_are_read_by_the_names_that_pytest_takes(checkout, tmp_path):
    path = tmp_path / "results.xml"
    path.write_text(RESULTS)
    assert lightning_tests.outcomes(path, checkout / "tests") == {
        "tests_pytorch/tuner/test_counts.py::test_fails_once": "passed",
        "tests_pytorch/tuner/test_counts.py::TestOurs::test_count[a.b/c-1]": "failed",
        "tests_pytorch/tuner/test_others.py::test_skipped": "skipped",
        "tests_pytorch/tuner/test_others.py::test_cleans_up_badly": "failed",
        "tests_pytorch.tuner.test_broken": "failed",
    }


@pytest.mark.slow
def test_tests_that_fail_only_with_our_callbacks_have_a_reason_or_are_new(checkout, monkeypatch, capsys):
    status, records = run(checkout)
    without, found, *failing = records
    numbers = [[record[name] for name in ("passed", "failed", "skipped")] for record in (without, found)]
    assert numbers == [[3, 2, 1], [2, 3, 1]]
    names = ["TestOurs::test_count[0]", "test_ends_its_process"]
    assert [(r["test"], r["reason"]) for r in failing] == [(f"tuner/test_counts.py::{name}", "new") for name in names]
    assert status == 1
    assert "fails only with exact: tuner/test_counts.py::TestOurs::test_count[0]" in capsys.readouterr().out
    assert {"lightning", "python", "torch", "cpu", "command"} <= without.keys()
    # What was run is not run again, and a reason for both makes the status 0.
    monkeypatch.setattr(lightning_tests, "run_pytest", None)
    monkeypatch.setattr(lightning_tests, "REASONS", {"*::test_count*": "it counts", "*::test_ends*": "it ends"})
    status, records = run(checkout)
    assert status == 0
    assert [record["reason"] for record in records[2:]] == ["it counts", "it ends"]
    assert lightning_tests.counted(records).rows == [["tuner", "6", "3", "2", "2"]]
    assert lightning_tests.causes(records).rows == [["it counts", "1"], ["it ends", "1"]]


@pytest.mark.slow
def test_one_in_several_of_the_tests_can_be_run(checkout):
    _, records = run(checkout, "--every", "tuner=3")
    assert [sum(record[name] for name in ("passed", "failed", "skipped")) for record in records[:2]] == [2, 2]
    assert lightning_tests.counted(records).rows[0][:2] == ["tuner (one in 3)", "2"]


def test_a_folder_that_is_not_there_is_an_error(checkout, capsys):
    with pytest.raises(SystemExit):
        run(checkout, "--only", "other")
    assert "there is no other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(checkout, "--every", "tuner=0")
    assert "positive number" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["exact", "max"])
def test_every_trainer_gets_the_callbacks_and_no_model_is_refused(name, tmp_path, monkeypatch):
    lightning_tests.register(name, tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    converted = []
    for model in (BoringModel(), WithoutLayers()):
        made = pl.Trainer(
            max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        pruning, monitor = (one for one in made.callbacks if type(one).__module__.startswith("lightning_actprune"))
        assert (type(pruning), type(monitor)) == (ActivationPruning, ActivationMemoryMonitor)
        made.fit(model)
        converted.append(len(pruning.converted))
    assert converted == [name == "exact", 0]  # the boring model's layer reads the batch, which is alive anyway


class WithoutLayers(BoringModel):
    def __init__(self):
        super().__init__()
        self.weight, self.layer = self.layer.weight, None

    def forward(self, x):
        return x @ self.weight.T
