"""The search for sizes: what fits is found with few measurements, and how long it is trained."""

from __future__ import annotations

import json

import pytest
import torch

from examples.benchmarks import accuracy, larger
from examples.benchmarks.larger import Step

MOST = 1.5 * 384 * 8 * 256 / 16
"""Memory of the GPU: one and a half times what the dense model needs."""
SHARE = {"dense": 1.0, "preset:balanced": 0.5, "preset:max": 0.25, "preset:recompute": 0.01}


@pytest.mark.parametrize("limit", [10, 11.5, 40, 77, 1000])
def test_the_largest_size_that_fits_is_found(limit):
    tried = []

    def measure(size):
        tried.append(size)
        return Step(size, 2.0 * size, 10)

    size, step = larger.largest(range(10, 100, 3), limit, measure)
    assert size == max(each for each in range(10, 100, 3) if each <= limit)
    assert step == Step(size, 2.0 * size, 10)
    assert len(tried) <= 6


@pytest.fixture
def searched(monkeypatch, image_folder, tmp_path):
    """Search with steps whose memory and time are proportional to what a model has of everything."""

    def measured(study, setting):
        options = study.options
        size = (options["dim"] or 384) * (options["depth"] or 8) * study.recipe.batch / options["patch_size"] ** 2
        if SHARE[setting] * size > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Step(SHARE[setting] * size, size, 50_000 // study.recipe.batch)

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


@pytest.mark.slow
def test_sizes_fit_and_are_trained_as_long_as_the_dense_model(searched):
    dense, *found = searched("--settings", "preset:balanced", "preset:max", "preset:recompute")
    sizes = {(r["axis"], r["setting"]): r["size"] for r in found}
    assert (dense["axis"], dense["setting"], dense["epochs"]) == (None, "dense", 40)
    assert [sizes[axis, "preset:max"] for axis in ("dim", "depth", "batch-size", "patch-size")] == [1536, 32, 1024, 2]
    assert [sizes[axis, "preset:balanced"] for axis in ("dim", "depth", "patch-size")] == [768, 16, 4]
    assert sizes["depth", "preset:recompute"] == 64
    for record in found:
        assert record["peak_mib"] <= dense["peak_mib"]
        epochs_ms = [r["epochs"] * r["batches"] * r["step_ms"] for r in (record, dense)]
        assert abs(epochs_ms[0] - epochs_ms[1]) <= record["batches"] * record["step_ms"] / 2
        args = accuracy.parse([*larger.words(record), "--root", "x", "--settings", record["setting"]])
        assert (getattr(args, record["axis"].replace("-", "_")), args.epochs) == (record["size"], record["epochs"])


@pytest.mark.slow
def test_what_the_file_has_is_not_searched_again(searched, tmp_path, capsys):
    other = {"task": "gpt", "axis": None, "setting": "dense"}
    (tmp_path / "larger.json").write_text(json.dumps([other]))
    found = searched("--axes", "depth", "--settings", "preset:max")
    assert found[0] == other
    assert [r["axis"] for r in found] == [None, None, "depth"]
    assert all(r["gpu"] == "none" and r["command"].startswith("python") for r in found[1:])
    capsys.readouterr()
    more = searched("--axes", "depth", "dim", "--settings", "preset:max")
    assert more[:3] == found
    assert [r["axis"] for r in more[3:]] == ["dim"]
    assert "depth" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("axis", "value", "lr"),
    [
        (None, 0, 4e-4),
        ("dim", 768, 2e-4),
        ("depth", 72, 1.3e-4),
        ("batch-size", 1024, 8e-4),
        ("patch-size", 2, 4e-4),
    ],
)
def test_the_learning_rate_follows_the_size(axis, value, lr):
    of_dense = {"dim": 384, "depth": 8, "batch-size": 256, "patch-size": 4}.get(axis)
    size = {"task": "vit", "axis": axis, "size": value, "dense_size": of_dense, "epochs": 3}
    args = accuracy.parse([*larger.words(size), "--root", "x", "--settings", "dense"])
    assert (args.lr, args.epochs) == (lr, 3)
    assert axis is None or getattr(args, axis.replace("-", "_")) == value


def test_another_context_cuts_the_text_anew(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n" * 20000)
    monkeypatch.setitem(larger.FAMILIES, "gpt", larger.FAMILIES["gpt"]._replace(words="--task gpt"))
    seen = []
    monkeypatch.setattr(larger, "measured", lambda study, _: seen.append(len(study.data.offsets)) or Step(1.0, 1.0, 1))
    search = larger.Search("gpt", tmp_path)
    for axis, size in (("dim", 64), ("context", 512), ("dim", 64)):
        search.step(axis, size, "dense")
    assert seen == [257, 513, 257]


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
