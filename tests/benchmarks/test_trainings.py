"""The training study runs at its smallest and writes records that are not made twice."""

import json

import pytest
import torch

from benchmarks import paper, pictures, report, trainings
from benchmarks.training_data import COLOURS, GEOMETRIC, Images, augment

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


def test_weight_gradients_are_closer_with_more_bits():
    settings = ["0.5:32", "0:32:2", "0:32:8"]
    records = trainings.main([*QUICK, "--task", "vit", "--gradients", "1", "--settings", *settings])
    cosines = [min(r["cosine"] for r in records if r["setting"] == setting) for setting in settings]
    assert cosines == sorted(cosines)
    assert cosines[-1] > 0.999


@pytest.mark.parametrize("setting", ["half", "max:2", "0.5", "0.5:32:5", "max+fc1=5", "dense+fc1=4"])
def test_settings_that_are_none(setting, capsys):
    with pytest.raises(SystemExit):
        trainings.parse(["--task", "gpt", "--settings", setting])
    assert setting in capsys.readouterr().err


def test_recipes_are_options_that_may_be_changed():
    args = trainings.parse(["--recipe", "gpt", "--epochs", "3"])
    assert (args.task, args.dim, args.clip, args.epochs) == ("gpt", 768, 1.0, 3)
    for name in trainings.RECIPES:
        trainings.parse(["--recipe", name, "--root", "data", "--settings", "dense", "--seeds", "0"])


def test_augmentation_keeps_bytes_and_batches_are_alike():
    images = torch.randint(256, (6, 3, 16, 16)).float()
    for operation in range(len(GEOMETRIC) + len(COLOURS)):
        choices = torch.zeros(5, 6, dtype=torch.long)
        choices[0], choices[2] = operation, torch.arange(6) % 2
        changed = augment(images, choices)
        assert torch.equal(changed, changed.round())
        assert changed.min() >= 0
        assert changed.max() <= 255
        assert torch.equal(changed, images) == (operation == 0)
    data = Images(None, torch.device("cpu"), strong=True, turned=True)
    choices = data.draw(1, 8, torch.Generator().manual_seed(0))[0]
    (first, targets), (second, _) = data.batch(choices), data.batch(choices)
    assert torch.equal(first, second)
    assert torch.allclose(targets.sum(1), torch.ones(8))
    assert targets.shape == (8, 80)


def test_the_papers_accounting(tmp_path):
    records = paper.main(["--depth", "1", "--out", str(tmp_path / "paper.json")])
    saved = [r for r in records if r["table"] == "savings"]
    assert all(r["ours_saved_bytes"] > r["bsr_int32_saved_bytes"] > r["bsr_int64_saved_bytes"] for r in saved)
    assert all(0.58 < r["ours_saved_bytes"] / r["dense_bytes"] < 0.6 for r in saved if r["sparsity"] == 0.6)


def test_pictures_are_those_that_pages_show(tmp_path):
    pictures.draw_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in report.DOCS.glob("*.png")}
