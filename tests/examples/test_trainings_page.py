"""The page of long trainings: what it says of made-up records, and that the committed one is of the committed."""

from __future__ import annotations

import pytest

from examples.benchmarks import tables, trainings_page
from tests.examples.study_records import ENVIRONMENT, study_record

DENSE, MAX = ("dense",), ("preset:max",)
DIGITS = {"task": "vit", "model": "net", "patch_size": 4, "batch": 256, "lr": 4e-4, "dim": None, "depth": None}
DIGITS |= {"compile": None, "augmentation": "RandAugment and mixup", "start": None, "lora": None, "peak_mib": 1000.0}


def trained(setting, scores, **more):
    return [study_record(setting, seed, score, **{**DIGITS, **more}) for seed, score in enumerate(scores)]


def bits(setting):
    return {} if setting == DENSE else {"bits_per_value": 3.0}


def size(axis, number, setting, epochs, **more):
    head = {"task": "vit", "axis": axis, "setting": setting, "size": number, "dense_size": 8, "epochs": epochs}
    return {**head, "peak_mib": 990.0, "step_ms": 12.0, **ENVIRONMENT, **more}


def test_kinds_of_trainings_have_sections_with_the_evidence():
    scratch = trained(MAX, [79.0, 80.0, 81.0], bits_per_value=3.0) + trained(DENSE, [80.0, 81.0, 82.0])
    more = trained(DENSE, [60.0], turned=True) + trained(DENSE, [90.0], start="ab", lora=True)
    first, second, third, fourth = trainings_page.page(scratch + more, []).split("\n## ")
    assert first.startswith("# Long trainings")
    assert second.startswith("From scratch")
    assert second.index("| dense | 1000 | 16.00 | 3 | 81.00 ± 1.00 | - | - |") < second.index("| `max`, every layer |")
    assert "| `max`, every layer | 1000 | 3.00 | 3 | 80.00 ± 1.00 | -1.00 ± 0.82 |" in second
    assert third.startswith("More classes")
    assert "60.00" in third
    assert fourth.startswith("Fine-tuning")
    assert "fine-tuned from ab by updates of low rank" in fourth
    assert trainings_page.page(scratch, []).count("\n## ") == 1


def test_models_of_images_are_taken_together_and_text_is_not():
    scores = {DENSE: [80.0, 81.0, 82.0], MAX: [79.0, 80.0, 81.0]}
    studies = {
        name: [
            r
            for setting, each in scores.items()
            for r in trained(setting, each, model=name, task=task, **bits(setting))
        ]
        for name, task in (("net", "vit"), ("other", "resmlp"), ("text", "gpt"))
    }
    row = "| `max` | -1.00 ± 0.58 |"
    assert row not in trainings_page.page([*studies["net"], *studies["text"]], [])
    assert row in trainings_page.page([*studies["net"], *studies["other"], *studies["text"]], [])


def test_what_fine_tuning_begins_with_is_shown_with_it_and_counts_for_nothing_else():
    whole = [r for name in ("net", "other") for r in trained(DENSE, [80.0, 81.0, 82.0], model=name, classes=10)]
    whole += [r for n in ("net", "other") for r in trained(MAX, [79.0, 80.0, 81.0], model=n, classes=10, **bits(MAX))]
    half = trained(DENSE, [91.0], classes=5, epochs=9)
    tuned = trained(DENSE, [92.0], classes=5, epochs=3, start="ab")
    row = "| `max` | -1.00 ± 0.58 |"
    assert row in trainings_page.page([*whole, *half], [])
    scratch, below = trainings_page.page([*half, *whole, *tuned], []).split("\n## Fine-tuning")
    assert row in scratch
    assert "91.00" not in scratch
    assert below.index("91.00") < below.index("92.00")


def test_larger_models_are_shown_with_the_trainings_of_their_sizes_alone():
    sizes = [size(None, None, "dense", 40, step_ms=6.0), size("depth", 24, "preset:max", 20)]
    sizes += [size("patch-size", 2, "preset:max", 9, dense_size=4)]
    dense, deep = trained(DENSE, [70.0, 72.0], epochs=40), trained(MAX, [73.0, 75.0], epochs=20, depth=24)
    beside = trained(DENSE, [77.0], epochs=20, depth=24)
    slower = trained(MAX, [78.0], epochs=20, depth=24, lr=2.3e-4)
    scratch = trained(DENSE, [80.0], epochs=100)
    text = trainings_page.page([*dense, *deep, *beside, *slower, *scratch], sizes)
    above, below = text.split("\n## Larger models")
    assert "80.00" in above
    assert not any(score in above for score in ("71.00", "77.00", "78.00"))
    assert "| dense | - | 990 | 6.0 | 40 | 0.0004 | 2 | 71.00 ± 1.41 | 71.00 ± 1.41 |" in below
    assert "| depth, `max` | 24 (3.0) | 990 | 12.0 | 20 | 0.0004 | 2 | 74.00 ± 1.41 | 77.00 |" in below
    assert "| depth, `max` | 24 (3.0) | 990 | 12.0 | 20 | 0.00023 | 1 | 78.00 | - |" in below
    assert "| patch-size, `max` | 2 (2.0) | 990 | 12.0 | 9 | 0.0004 | - | - | - |" in below
    assert "| depth, `max` | 24 (3.0) | 990 | 12.0 | 20 | 0.00023 | - | - | - |" in trainings_page.page([], sizes)


def test_rules_are_shown_beside_their_like_alone():
    like = trained(DENSE, [70.0, 72.0], epochs=20) + trained(MAX, [67.0, 69.0], epochs=20)
    other = trained(DENSE, [60.0, 62.0], epochs=40)
    ruled = trained(MAX, [68.0, 70.0], epochs=20, others="linear:int3")
    assert "in more bits" not in trainings_page.page([*like, *other], [])
    above, below = trainings_page.page([*like, *other], [], ruled).split("\n## Text between")
    assert "linear int3" not in above
    assert "61.00" in above
    assert "61.00" not in below
    for score in ("71.00", "68.00", "69.00"):
        assert score in below
    assert "| `max`, every layer, linear int3 |" in below


def test_a_picture_is_linked_and_drawn_where_it_says_something(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    one, three = trained(DENSE, [80.0]), trained(DENSE, [80.0, 81.0, 82.0]) + trained(MAX, [79.0, 80.0, 81.0])
    monkeypatch.setattr(trainings_page, "PAGE", tmp_path / "trainings.md")
    for records, drawn in ((one, False), (three, True)):
        monkeypatch.setattr(trainings_page, "load", {"long": records, "larger": None}.get)
        trainings_page.main()
        assert ((tmp_path / "trainings.png").is_file(), "](trainings.png)" in trainings_page.page(records, [])) == (
            drawn,
            drawn,
        )


def test_committed_page_is_generated_from_the_committed_records():
    text = trainings_page.page(*(tables.load(name) or [] for name in ("long", "larger", "long_rules")))
    assert trainings_page.PAGE.read_text() == text
    assert "](trainings.png)" not in text or (trainings_page.PAGE.parent / "trainings.png").is_file()


def test_command_writes_the_page(monkeypatch, tmp_path):
    records = trained(DENSE, [80.0, 81.0])
    monkeypatch.setattr(trainings_page, "PAGE", tmp_path / "trainings.md")
    monkeypatch.setattr(trainings_page, "load", {"long": records, "larger": None}.get)
    trainings_page.main()
    assert (tmp_path / "trainings.md").read_text() == trainings_page.page(records, [])
