"""The search for sizes: what fits is found with few measurements, and how long it is trained."""

from __future__ import annotations

import json

import pytest

from examples.benchmarks import accuracy, larger
from examples.benchmarks.larger import Step

SHARE = {"dense": 1.0, "preset:balanced": 0.5, "preset:max": 0.25, "preset:recompute": 0.01}


@pytest.mark.parametrize("limit", [10, 11.5, 40, 77, 1000])
def test_the_largest_size_that_fits_is_found(limit):
    tried = []

    def measure(size):
        tried.append(size)
        return Step(size, 2.0 * size)

    size, step = larger.largest(range(10, 100, 3), limit, measure)
    assert size == max(each for each in range(10, 100, 3) if each <= limit)
    assert step == Step(size, 2.0 * size)
    assert len(tried) <= 6


@pytest.fixture
def searched(monkeypatch, image_folder, tmp_path):
    """Search with steps whose memory and time are proportional to what a model has of everything."""

    def measured(study, setting):
        options = study.options
        size = (options["dim"] or 384) * (options["depth"] or 8) * study.recipe.batch / options["patch_size"] ** 2
        return Step(SHARE[setting] * size, size)

    monkeypatch.setattr(larger, "measured", measured)
    monkeypatch.setattr(larger, "require_gpu", lambda: None)
    monkeypatch.setattr(larger, "open_study", with_batches(larger.open_study))
    out = tmp_path / "larger.json"

    def run(*more):
        larger.main(["--task", "vit", "--root", str(image_folder), "--out", str(out), *more])
        return json.loads(out.read_text())

    return run


def with_batches(open_study):
    """The data of these tests have fewer images than a batch."""

    def opened(args, data=None):
        size, args.batch_size = args.batch_size or 256, 6
        study = open_study(args, data)
        object.__setattr__(study.recipe, "batch", size)
        return study

    return opened


def test_sizes_fit_and_are_trained_as_long_as_the_dense_model(searched):
    dense, *found = searched("--settings", "preset:balanced", "preset:max", "preset:recompute")
    sizes = {(r["axis"], r["setting"]): r["size"] for r in found}
    assert (dense["axis"], dense["setting"], dense["epochs"]) == (None, "dense", 40)
    assert [sizes[axis, "preset:max"] for axis in ("dim", "depth", "batch-size", "patch-size")] == [1536, 32, 1024, 2]
    assert [sizes[axis, "preset:balanced"] for axis in ("dim", "depth", "patch-size")] == [768, 16, 4]
    assert sizes["depth", "preset:recompute"] == 64
    for record in found:
        assert record["peak_mib"] <= dense["peak_mib"]
        assert abs(record["epochs"] * record["step_ms"] - 40 * dense["step_ms"]) <= record["step_ms"] / 2
        args = accuracy.parse([*record["words"].split(), "--root", "x", "--settings", record["setting"]])
        assert (getattr(args, record["axis"].replace("-", "_")), args.epochs) == (record["size"], record["epochs"])


def test_records_of_other_tasks_stay(searched, tmp_path):
    other = {"task": "gpt", "axis": None}
    (tmp_path / "larger.json").write_text(json.dumps([other, {"task": "vit", "axis": None}]))
    found = searched("--axes", "depth", "--settings", "preset:max")
    assert found[0] == other
    assert [r["axis"] for r in found] == [None, None, "depth"]
    assert all(r["gpu"] == "none" and r["command"].startswith("python") for r in found[1:])


def test_axes_are_those_of_the_task(searched, capsys):
    with pytest.raises(SystemExit):
        searched("--axes", "context")
    assert "--axes must be of dim, depth, patch-size, batch-size" in capsys.readouterr().err


@pytest.mark.parametrize("task", larger.FAMILIES)
def test_sizes_begin_with_those_of_the_dense_model(task):
    family = larger.FAMILIES[task]
    args = accuracy.parse(
        [*family.words.split(), "--root", "x", "--settings", "dense"]
        if task == "vit"
        else [*family.words.split(), "--settings", "dense"]
    )
    assert (args.task, list(family.sizes)[:2]) == (task, ["dim", "depth"])
    assert all(list(sizes) == sorted(sizes, reverse=name == "patch-size") for name, sizes in family.sizes.items())
