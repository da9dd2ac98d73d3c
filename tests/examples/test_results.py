"""Tables of the accuracy study from made-up records: what is compared with what, and what they are called."""

from examples.benchmarks import tables
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


def test_accuracy_of_every_study_has_a_table_of_its_own():
    same = "pruned", 0.5, 16, "same"
    images = study_record(("dense",), 0, 70.0)
    text = {"task": "gpt", "dataset": "stdlib", "bytes": 10, "sha256": "ab", "dim": 64}
    texts = [study_record(("dense",), 0, -1.5, **text), study_record(same, 0, -1.75, **text)]
    other = study_record(same, 0, -2.0, **{**text, "sha256": "cd", "compile": "inductor"}) | {"command": "later"}
    assert ":\n\n|" not in tables.accuracy([images])
    found = tables.accuracy([images, *texts, other]).split("net")[1:]
    assert len(found) == 3
    assert found[0].startswith(" on images, 2 epochs of 3 batches of 4, bf16:\n\n| method")
    assert "| 70.00 | - |" in found[0]
    assert found[1].startswith(", dim 64 on stdlib (10 bytes, ab), ")
    assert "| pruned, s = 0.5, b = 16 | 16.00 | 1 | 1.7500 | +0.2500 |" in found[1]
    assert "validation loss" in found[1]
    assert "python made_up.py" in found[1]
    assert "compiled" in found[2]
    assert "| 2.0000 | - |" in found[2]  # no dense run of the same study to compare with
    assert "`later`" in found[2]


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
    text = tables.accuracy(records)
    assert "net on images, by batch size:\n\n| batch |" in text
    assert results.batch_studies(records[:4]) == []
    assert "by batch size" not in tables.accuracy(records[:4])
