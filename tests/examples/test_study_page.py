"""The page of the accuracy study: what it says of made-up records, and that the committed one is of the committed."""

from __future__ import annotations

import json

import pytest

from examples.benchmarks import study_page, tables
from tests.examples.study_records import study_record

DENSE = ("dense",)
HALF = ("pruned", 0.5, 16, "same")
FEW = ("pruned", 0.0, 32, "int2")


def trained(setting, accuracies, **more):
    return [study_record(setting, seed, accuracy, **more) for seed, accuracy in enumerate(accuracies)]


def gradient(setting, kind, **more):
    figures = {"kind": kind, "layers": 2, "bits_per_value": 2.5, "cosine": 0.98765, "norm_ratio": 1.0125, "after": 4}
    return study_record(setting, 0, 0.0, **figures) | more


def test_every_task_has_a_section_with_its_main_study_first():
    text = {"task": "gpt", "model": "gpt", "dataset": "stdlib", "bytes": 10, "sha256": "ab", "compile": "inductor"}
    records = trained(DENSE, [70.0, 72.0], batch=8) + trained(DENSE, [60.0, 61.0]) + trained(HALF, [60.0, 61.0])
    records += trained(DENSE, [-1.5], **text) + trained(HALF, [-1.75], **text, command="later")
    head, images, texts = study_page.page(records, []).split("\n## ")
    assert "`paper` (s = 0.6, b = 32), `balanced` (s = 0, b = 32, int4) and `max` (s = 0, b = 32, int2)" in head
    assert images.startswith("ResMLP\n\nnet on images, 2 epochs of 3 batches of 4, bf16:\n\n| method |")
    assert images.index("batches of 4") < images.index("batches of 8")
    assert texts.startswith("GPT\n\ngpt on stdlib (10 bytes, ab), 2 epochs of 3 batches of 4, bf16, compiled:\n\n")
    assert "| pruned, s = 0.5, b = 16 | 16.00 | 1 | 1.7500 | +0.2500 |" in texts
    assert texts.count("<sub>") == 2
    assert "`python made_up.py`" in texts
    assert "`later`" in texts


@pytest.mark.parametrize(
    ("task", "scores", "said"),
    [
        ("resmlp", [70.0, 71.0], "one standard deviation (1.41) of dense, or better: **2.50** (pruned, s = 0, b = 32"),
        ("gpt", [-71.0, -71.0], "within 0.01 of dense, or better: **2.50** (pruned, s = 0, b = 32, int2: 71.0000"),
        ("resmlp", [60.0, 61.0], "No setting has a mean within one standard deviation (1.41) of dense, or better."),
    ],
)
def test_fewest_bits_are_named(task, scores, said):
    sign = -1 if task == "gpt" else 1
    records = trained(DENSE, [sign * 70.0, sign * 72.0], task=task)
    assert said in study_page.least(records + trained(FEW, scores, task=task, bits_per_value=2.5))
    assert study_page.least(records) == ""


def test_without_deviation_of_dense_nothing_is_said():
    assert study_page.least(trained(DENSE, [70.0]) + trained(FEW, [70.0])) == ""


def test_batch_sizes_are_compared():
    records = [r for size in (4, 8) for setting in (DENSE, HALF) for r in trained(setting, [70.0 + size], batch=size)]
    text = study_page.page(records, [])
    assert "net on images, by batch size:\n\n| batch |" in text
    assert "by batch size" not in study_page.page(records[:2], [])


def test_pictures_are_those_that_are_drawn_of_the_main_study():
    records = trained(DENSE, [70.0, 72.0]) + trained(HALF, [69.0, 70.0])
    assert study_page.page(records, []).count("](accuracy_") == 1
    for record in records:
        record["losses"] = [2.0, 1.0]
    records += trained(("pruned", 0.5, 32, "same"), [69.0, 70.0], losses=[2.0, 1.0])
    text = study_page.page(records, [])
    assert all(f"](accuracy_{kind}_resmlp.png)" in text for kind in ("heatmap", "losses", "bits"))


def test_gradients_have_a_row_per_setting_and_a_column_per_kind_of_layer():
    found = [gradient(HALF, "fc1"), gradient(HALF, "fc2", cosine=0.5), gradient(FEW, "fc1")]
    [text] = study_page.gradients(found)
    assert text.startswith("Weight gradients after 4 epochs of net on images, 2 epochs of 3 batches of 4, bf16:\n\n")
    assert "| method | fc1 | fc2 |" in text
    assert "| pruned, s = 0.5, b = 16 | 0.9877 / 1.012 (2.50) | 0.5000 / 1.012 (2.50) |" in text
    assert "| pruned, s = 0, b = 32, int2 | 0.9877 / 1.012 (2.50) | - |" in text
    assert len(study_page.gradients([*found, gradient(HALF, "fc1", dim=64)])) == 2
    page = study_page.page(trained(DENSE, [70.0]), found)
    assert text in page
    assert text not in study_page.page(trained(DENSE, [70.0], task="vit"), found)


def test_committed_page_is_generated_from_the_committed_records():
    accuracy, fidelity = tables.load("accuracy"), tables.load("fidelity") or []
    text = study_page.PAGE.read_text()
    assert text == study_page.page(accuracy, fidelity)
    for _, name in [line.rstrip(")").split("](") for line in text.splitlines() if line.startswith("![")]:
        assert (study_page.PAGE.parent / name).is_file()


def test_command_writes_page_and_pictures(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    records = trained(DENSE, [70.0, 72.0]) + trained(HALF, [69.0, 70.0]) + trained(DENSE, [7.0], batch=8)
    monkeypatch.setattr(study_page, "PAGE", tmp_path / "accuracy.md")
    monkeypatch.setattr(study_page, "load", {"accuracy": records, "fidelity": None}.get)
    study_page.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.md", "accuracy_bits_resmlp.png"]
    assert (tmp_path / "accuracy.md").read_text() == study_page.page(records, [])
    capsys.readouterr()


def test_pages_show_presets_once_records_are_there(tmp_path):
    pages = tables.pages()
    assert tables.rendered(pages, tmp_path) == pages
    runs = trained(DENSE, [70.0, 72.0, 71.0]) + trained(("preset:max",), [70.0, 72.0, 71.0])
    (tmp_path / "accuracy.json").write_text("[]")
    (tmp_path / "long.json").write_text(json.dumps(runs))
    step = {
        "model": "net",
        "batch": 8,
        "mode": "eager",
        "method": "dense",
        "converted": 0,
        "dropping": 0,
        "activations_mib": 400.4,
    }
    step |= {"peak_mib": 800.0, "ms_median": 10.0, "host_ms": 4.0}
    step |= {"gpu": "GPU", "torch": "2", "triton": "3", "command": "measured"}
    (tmp_path / "presets.json").write_text(json.dumps([step]))
    text = "\n".join(tables.rendered(pages, tmp_path).values())
    assert "| dense | 16.00 | 71.00 ± 1.00 |\n" in text
    assert "| **net, batch 8** |  |  |  |  |  |\n| dense | - | 400 | 800 | 10.00 | 4.0 |" in text
    assert "`measured`" in text
