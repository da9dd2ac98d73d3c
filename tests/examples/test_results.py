"""Tables of the accuracy study from made-up records: what is compared with what, and what they are called."""

import pytest

from examples.benchmarks.study import results
from tests.examples.study_records import study_record

DENSE = ("dense",)
HALF = ("pruned", 0.5, 16, "same")


def test_accuracy_is_compared_with_dense_of_the_same_seed():
    dense, pruned = ("dense",), ("pruned", 0.5, 16, "int4")
    figures = [(dense, 0, 70.0), (dense, 1, 72.0), (pruned, 0, 69.0), (pruned, 1, 71.0), (pruned, 2, 76.0)]
    first, second = results.accuracy([study_record(*each) for each in figures]).rows
    assert first == ["dense", "16.00", "2", "71.00 ± 1.41", "-", "0.7100 ± 0.0141"]
    assert second[:2] == ["pruned, s = 0.5, b = 16, int4", "16.00"]
    assert second[2:5] == ["3", "72.00 ± 3.61", "-1.00 ± 0.00"]


def test_what_dropped_blocks_leave_behind_is_part_of_the_setting():
    old, largest, swap = (
        study_record(HALF, 0, 70.0),
        *(study_record(HALF, 0, 70.0, block_selection=r) for r in ("largest", "swap")),
    )
    found = results.by_setting([old, largest, swap, study_record(DENSE, 0, 70.0, block_selection=None)])
    assert list(found) == ["pruned, s = 0.5, b = 16", "pruned, s = 0.5, b = 16, swap", "dense"]
    assert found["pruned, s = 0.5, b = 16"] == [old, largest]


def test_images_are_named_by_what_they_are():
    facts = {"train_images": 24, "test_images": 12, "image_size": 8, "classes": 3, "sha256": "ab"}
    title = results.study_title(study_record(DENSE, 0, 70.0, **facts))
    assert title == "net on 24 + 12 images of 8 x 8 in 3 classes (ab), 2 epochs of 3 batches of 4, bf16"


def test_batch_sizes_are_compared_where_there_are_several():
    runs = [(32, DENSE, 0, 70.0), (32, DENSE, 1, 72.0), (32, HALF, 0, 69.0), (32, HALF, 1, 71.5)]
    runs += [(8, DENSE, 0, 60.0), (8, HALF, 0, 61.0), (16, HALF, 0, 50.0), (32, ("pruned", 0.9, 16, "same"), 0, 5.0)]
    records = [study_record(s, n, x, batch=b, batches=64 // b, lr=b / 1000) for b, s, n, x in runs]
    [group] = results.batch_studies([*records, study_record(HALF, 0, 1.0, model="other")])
    assert group == records
    pruned = "pruned, s = 0.5, b = 16"
    assert results.batch_sizes(group).rows == [
        ["8", "0.008", pruned, "1", "60.00", "61.00", "+1.00"],
        ["16", "0.016", pruned, "1", "-", "50.00", "-"],
        ["32", "0.032", pruned, "2", "71.00 ± 1.41", "70.25 ± 1.77", "-0.75 ± 0.35"],
    ]
    assert results.batch_studies(records[:4]) == []


@pytest.mark.parametrize(
    ("task", "dense", "runs", "expected"),
    [
        ("resmlp", [70.0, 72.0], {8: [69.6, 69.6], 4: [69.5, 69.5], 2: [69.7, 75.0], 1.5: [80.0]}, 2),
        ("resmlp", [70.0, 72.0], {8: [69.5, 69.5]}, None),
        ("resmlp", [70.0], {8: [70.0]}, None),  # of one run no deviation is known
        ("gpt", [-1.5], {8: [-1.505], 4: [-1.52], 2: [-1.4]}, 2),
        ("gpt", [-1.5, -1.6], {8: [-1.559, -1.559], 4: [-1.561, -1.561], 2: [-1.4]}, 8),
    ],
)
def test_fewest_bits_among_means_that_are_not_below_dense_by_more_than_the_margin(task, dense, runs, expected):
    records = [study_record(DENSE, seed, score, task=task) for seed, score in enumerate(dense)]
    for bits, scores in runs.items():
        setting = "pruned", 0.5, int(bits * 16), "same"
        records += [study_record(setting, n, x, task=task, bits_per_value=bits) for n, x in enumerate(scores)]
    found = results.fewest_bits(records)
    assert {r["bits_per_value"] for r in found} == ({expected} if expected else set())


def test_without_dense_runs_no_setting_is_as_good():
    assert results.fewest_bits([study_record(HALF, 0, 70.0), study_record(HALF, 1, 70.0)]) == []
