"""The training study runs at its smallest and writes records that are not made twice."""

import json

import pytest

from benchmarks import paper, pictures, report, trainings

pytestmark = pytest.mark.integration
QUICK = "--quick", "--batch-size", "8", "--epochs", "2", "--limit-batches", "1", "--depth", "1"


@pytest.mark.parametrize(
    ("task", "settings"),
    [("resmlp", ["dense", "max", "0.8:32:16:unbiased"]), ("resnet", ["0.6:32"]), ("gpt", ["max+type:linear=3"])],
)
def test_records_of_a_task(task, settings, tmp_path):
    out = tmp_path / "trainings.json"
    command = [*QUICK, "--task", task, "--settings", *settings, "--out", str(out)]
    command += ["--root", str(report.ROOT / "examples")] if task == "gpt" else []
    records = trainings.main(command)
    assert [record["setting"] for record in records] == settings
    assert all(record["final_loss"] > 0 and record["epochs"] == 2 for record in records)
    bits = {record["setting"]: record["bits_per_value"] for record in records}
    assert bits.get("dense", 16) == 16
    assert all(stored < 8 for setting, stored in bits.items() if setting != "dense")
    assert trainings.main(command) == []
    assert json.loads(out.read_text()) == records


def test_recipes_are_options_that_may_be_changed():
    args = trainings.parse(["--recipe", "gpt", "--epochs", "3"])
    assert (args.task, args.dim, args.clip, args.epochs) == ("gpt", 768, 1.0, 3)
    for name in trainings.RECIPES:
        trainings.parse(["--recipe", name, "--root", "data", "--settings", "dense", "--seeds", "0"])


def test_the_papers_accounting(tmp_path):
    records = paper.main(["--depth", "1", "--out", str(tmp_path / "paper.json")])
    saved = [r for r in records if r["table"] == "savings"]
    assert all(r["ours_saved_bytes"] > r["bsr_int32_saved_bytes"] > r["bsr_int64_saved_bytes"] for r in saved)
    assert all(0.58 < r["ours_saved_bytes"] / r["dense_bytes"] < 0.6 for r in saved if r["sparsity"] == 0.6)


def test_pictures_are_those_that_pages_show(tmp_path):
    pictures.draw_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in report.DOCS.glob("*.png")}
