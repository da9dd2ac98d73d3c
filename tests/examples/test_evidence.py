"""What a few runs can show: by hand, and by repeating studies whose truth is known."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from examples.benchmarks.study import evidence
from examples.benchmarks.study.evidence import Finding, Scatter, quantile
from examples.benchmarks.study.settings import parse_setting
from tests.examples.study_records import study_record

DENSE, HALF, FEW = ("dense",), ("pruned", 0.5, 16, "same"), ("pruned", 0.0, 32, "int2")


def runs(**scores):
    settings = {"dense": DENSE, "half": HALF, "few": FEW}
    bits = {"dense": 16.0, "half": 8.0, "few": 2.5}
    return [
        study_record(settings[name], seed, score, bits_per_value=bits[name])
        for name, each in scores.items()
        for seed, score in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("share", "freedom", "right"),
    # Tables of Student's distribution.
    [(0.975, 4, 2.776), (0.975, 10, 2.228), (0.8, 4, 0.941), (0.8, 10, 0.879), (0.975, 120, 1.980), (0.9, 8, 1.397)],
)
def test_quantiles_are_those_of_the_tables(share, freedom, right):
    assert quantile(share, freedom) == pytest.approx(right, rel=0.01)


def test_scatter_is_that_of_all_settings():
    assert evidence.scatter(runs(dense=[70.0, 72.0], half=[60.0, 62.0])) is None
    found = evidence.scatter(runs(dense=[70.0, 71.0, 72.0], half=[60.0, 62.0, 64.0], few=[1.0]))
    assert found == Scatter(pytest.approx(2.5**0.5), 4)


def test_what_runs_of_one_seed_have_in_common_does_not_count():
    scores = {"dense": [70.0, 71.0, 72.0], "half": [70.0, 72.0, 71.0], "few": [61.0, 62.0, 63.0]}
    shifted = {name: [score + 10 * seed for seed, score in enumerate(each)] for name, each in scores.items()}
    found, same = evidence.findings(runs(**scores)), evidence.findings(runs(**shifted))
    assert list(found) == list(same)
    assert all(same[setting] == pytest.approx(found[setting]) for setting in found)


def test_differences_are_those_over_the_seeds_that_dense_has():
    study = runs(dense=[70.0, 71.0], half=[60.0, 62.0, 90.0], few=[50.0, 51.0, 52.0])
    assert finding_of("half", study).difference == -9.5
    alone = [record for record in study if record["method"] != "dense" or record["seed"] == 5]
    assert evidence.findings(alone) == {}


def test_differences_have_their_standard_error_and_what_would_be_seen():
    scores = {"dense": [70.0, 71.0, 72.0], "half": [70.0, 72.0, 71.0], "few": [61.0, 62.0, 63.0]}
    study = [{**record, "peak_mib": 100.4} for record in runs(**scores)]
    summary = evidence.table(study)
    dense, half, few = summary.rows
    assert dense == ["dense", "100", "16.00", "3", "71.00 ± 1.00", "-", "-"]
    assert half[5:] == ["+0.00 ± 0.47", "1.75"]
    assert few[5:] == ["-9.00 ± 0.47 *", "1.75"]
    assert summary.header[-1] == "detectable"


def test_little_is_said_of_few_runs():
    [dense, half] = evidence.table(runs(dense=[70.0], half=[60.0, 62.0])).rows
    assert (dense[1], dense[-2:], half[-2:]) == ("-", ["-", "-"], ["-", "-"])


def test_in_losses_more_is_worse():
    text = {"task": "gpt", "dataset": "text", "bytes": 1, "sha256": "a"}
    study = [{**r, **text} for r in runs(dense=[-1.0, -1.1, -1.2], half=[-2.0, -2.1, -2.2])]
    assert evidence.table(study).rows[1][5] == "+1.0000 ± 0.0816 *"


def test_what_is_called_detectable_is_seen_four_times_in_five_and_nothing_once_in_twenty():
    draw, repeats = random.Random(0), 2000

    def seen(shift):
        count = 0
        for _ in range(repeats):
            scores = {name: [draw.gauss(0, 1) for _ in range(3)] for name in ("dense", "few")}
            scores["half"] = [draw.gauss(shift, 1) for _ in range(3)]
            found = finding_of("half", runs(**scores))
            count += abs(found.difference) > found.seen
        return count / repeats

    assert seen(0.0) == pytest.approx(0.05, abs=0.02)
    assert seen(Finding(0.0, (2 / 3) ** 0.5, 4).detectable) == pytest.approx(0.8, abs=0.05)


def test_studies_together_are_their_mean():
    same = evidence.together([Finding(-1.0, 0.5, 6), Finding(-2.0, 0.5, 6)])
    assert same == pytest.approx(Finding(-1.5, 0.5**1.5, 12))
    found = evidence.together([Finding(-1.0, 0.01, 6), Finding(-2.0, 3.0, 10), Finding(0.0, 4.0, 5)])
    assert found == pytest.approx(Finding(-1.0, 5 / 3, 625 / (81 / 10 + 256 / 5)), rel=1e-4)
    assert evidence.together([Finding(0.3, 0.2, 5)]) == pytest.approx(Finding(0.3, 0.2, 5))


def test_studies_together_find_nothing_once_in_twenty():
    draw, repeats, count = random.Random(1), 1000, 0
    for _ in range(repeats):
        studies = [
            runs(**{name: [draw.gauss(0, spread) for _ in range(3)] for name in ("dense", "half", "few")})
            for spread in (1.0, 2.0, 0.5)
        ]
        half = evidence.together([next(iter(evidence.findings(study).values())) for study in studies])
        count += abs(half.difference) > half.seen
    assert count / repeats == pytest.approx(0.05, abs=0.02)


def study_of(task, **runs):
    """Make a study of settings by name: bits and scores."""
    return [
        {**study_record(DENSE, seed, score, task=task, bits_per_value=bits), **asdict(parse_setting(SETTINGS[name]))}
        for name, (bits, scores) in runs.items()
        for seed, score in enumerate(scores)
    ]


SETTINGS = {"dense": "dense", "most": "preset:max", "paper": "preset:paper", "convolutions": "0.6:32:same"}


def test_presets_are_shown_beside_dense_with_the_errors_of_each_study():
    scores = [70.0, 71.0, 72.0]
    images = study_of("resmlp", dense=(16, scores), most=(2, [s - 5 for s in scores]), paper=(15.99, scores))
    images += study_of("resmlp", convolutions=(6.4, [60.0, 62.0]))
    text = study_of("gpt", dense=(16, [-1.0, -1.1, -1.2]), most=(4, [-1.0, -1.1, -1.2]), paper=(9, [-1.5]))
    shown = evidence.presets([images, text])
    assert shown.header == (
        "preset",
        "bits per value",
        "net, 2 epochs, test accuracy %",
        "net, 2 epochs, validation loss",
    )
    dense, paper, balanced, most, recompute = shown.rows
    assert dense == ["dense", "16.00", "71.00 ± 1.00", "1.1000 ± 0.1000"]
    # Of what compresses anything, so the convolutions in the one and the preset in the other.
    assert paper == ["`paper`", "6.40 - 9.00", "-9.50 ± 0.27 *", "+0.5000 ± 0.1414 *"]
    assert balanced == ["`balanced`", "-", "-", "-"]
    assert most == ["`max`", "2.00 - 4.00", "-5.00 ± 0.22 *", "+0.0000 ± 0.0816"]
    assert recompute[0] == "`recompute`"


def test_a_preset_is_what_most_runs_say_of_it():
    scores = [70.0, 71.0, 72.0]
    study = study_of("resmlp", dense=(16, scores), paper=(9, scores), convolutions=(9, [60.0, 61.0]))
    setting, finding = evidence.of_preset("paper", study)
    assert (setting, finding.difference) == ("`paper`, every layer", 0.0)
    assert evidence.of_preset("max", study) == evidence.of_preset("max", []) == ("", None)


def test_a_task_is_shown_by_its_main_study_if_that_says_something():
    scores = [70.0, 71.0, 72.0]
    images = study_of("vit", dense=(16, scores), most=(2, scores))
    records = [*images, *study_of("gpt", dense=(16, [1.0]))]
    assert evidence.main_study("vit", records) == images
    tuned = [{**record, "start": "weights"} for record in study_of("vit", dense=(16, scores), most=(2, scores * 2))]
    assert evidence.main_study("vit", [*tuned, *records]) == images
    assert evidence.main_study("gpt", records) == evidence.main_study("vit", []) == []


def finding_of(name, study):
    settings = {"half": "s = 0.5", "few": "int2"}
    (found,) = (finding for setting, finding in evidence.findings(study).items() if settings[name] in setting)
    return found
