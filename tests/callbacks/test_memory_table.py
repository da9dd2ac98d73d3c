"""The numbers in the tables and texts of ActivationMemoryMonitor."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport
from lightning_actprune.analysis.memory_table import headline, memory_table
from lightning_actprune.analysis.step_memory import MemoryMoment, Retained, Retainer, StepMemory
from lightning_actprune.callbacks import display
from lightning_actprune.compiled.report import Row
from lightning_actprune.tables import as_text

MIB = 2**20
LINEAR = "ActivationPrunedLinear"


def cells(table: object) -> list[list[str]]:
    rows = [line for line in as_text(table).splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.strip("│┃").replace("┃", "│").split("│")] for row in rows]


def test_corresponding_layers_are_one_row_and_the_rest_is_everything_else():
    rows = [
        LayerFootprint("a.0.fc", LINEAR, 0.6, 1, 6 * MIB, 3 * MIB, 3 * MIB, bits=4),
        LayerFootprint("b", LINEAR, 0.6, 1, 0, MIB, MIB),
        LayerFootprint("a.1.fc", LINEAR, 0.6, 1, 4 * MIB, MIB, MIB, bits=4),
        LayerFootprint("c", "Linear", 0.0, 1, 2 * MIB, 2 * MIB, 2 * MIB),
    ]
    report = MemoryReport(rows, 3 * MIB, 20 * MIB, 11 * MIB)
    found = {name: (kept, *numbers) for name, kept, *numbers in cells(memory_table(report, 7))[1:]}
    assert found["a.*.fc (2)"] == ("4 bits, drops 60 %", "10.00", "4.00", "60.0 %")
    assert found["b"][1:] == ("0.00", "1.00", "kept anyway")
    assert found["c"][1:] == ("2.00", "2.00", "0.0 %")
    assert found["Everything else"] == ("", "8.00", "3.00", "62.5 %")
    assert found["Whole model"] == ("", "20.00", "10.00", "50.0 %")
    assert found["Measured after forward"][2] == "11.00"
    assert re.findall(r"-?[0-9.]+ [M%]", headline(report)) == ["20.00 M", "10.00 M", "-50.0 %"]
    assert {headline(report), *as_text(memory_table(report)).splitlines()} == set(str(report).splitlines())
    many = [LayerFootprint(f"layer.{i}", "Linear", 0.5, 1, 2 * MIB, MIB, MIB) for i in range(200)]
    [last] = [row for row in cells(memory_table(MemoryReport(many), 0)) if "more" in row[0]]
    assert ("160 more" in last[0], last[2:4]) == (True, ["320.00", "160.00"])


def test_what_compiled_code_keeps_is_listed_and_no_part_of_everything_else():
    compiled = [
        Row("a.*.act", ("aten.gelu_backward",), (8,), torch.bfloat16, 4 * MIB, MIB, "packed", 3),
        Row("a.*.act", ("aten.gelu_backward",), (8,), torch.bfloat16, 4 * MIB, MIB, "packed", 3),
        Row("c", ("aten.mm",), (8,), torch.float32, 2 * MIB, 0, "again", 0, "from another"),
        Row("aten.where", ("aten.mul",), (8,), torch.float32, MIB, MIB, "as it is", 0, "it is a mask"),
    ]
    report = MemoryReport([], 6 * MIB, None, compiled_bytes=4 * MIB)
    found = {name: numbers for name, _, *numbers in cells(memory_table(report, 7, compiled))}
    assert found["a.*.act (2)"] == ["8.00", "2.00", "75.0 %"]
    assert found["aten.where"] == ["1.00", "1.00", "0.0 %"]
    assert found["c"] == ["2.00", "0.00", "100.0 %"]
    assert (found["Everything else"][1], found["Whole model"][1]) == ("3.00", "6.00")


def step_of(*peaks: int | None) -> StepMemory:
    """Two blocks that keep 4 MiB packed and 6 MiB as they are, each; parameters 1, gradients 2, state 3, batch 5."""
    phases = "forward", "forward", "forward", "backward", "backward", "optimizer"
    names = ("", None), ("block.0", None), ("block.1", None), ("block.1", "gelu"), ("block.0", "gelu"), ("", None)
    moments = [
        MemoryMoment(phase, *name, gradient * MIB, 3 * MIB, None if peak is None else peak * MIB, peak and peak * MIB)
        for phase, name, gradient, peak in zip(phases, names, (0, 0, 0, 0, 1, 2), peaks or (None,) * 6, strict=True)
    ]
    holdings = []
    for block in range(2):
        for nbytes, packed, operator in ((4 * MIB, True, "pruned_linear_function"), (6 * MIB, False, "gelu")):
            holdings.append(Retained(nbytes, packed, 1 + block, 5 - block, [Retainer(f"block.{block}", operator)]))
    return StepMemory(MIB, 5 * MIB, moments, holdings)


MEASURED = 9, 20, 30, 45, 30, 44


def test_the_peak_is_that_of_now_and_with_half_and_all_of_the_activations_gone():
    counted, measured = display.peak_text(step_of()), display.peak_text(step_of(*MEASURED))
    assert re.findall(r"([0-9.]+) MiB", counted) == ["29.00", "19.00", "11.00"]
    assert re.findall(r"([0-9.]+) MiB", measured) == ["45.00", "44.00", "44.00"]
    assert ("counted" in counted, "measured" in measured, "block.1" in measured) == (True, True, True)
    assert display.peak_text(StepMemory(0, 0)) == ""


def test_tables_of_the_step_and_of_who_keeps_what():
    assert [row[1:] for row in cells(display.step_table(step_of(*MEASURED), 2))[1:]] == [
        ["1.00", "1.00", "1.00"],  # parameters
        ["0.00", "0.00", "2.00"],  # gradients
        ["3.00", "3.00", "3.00"],  # state of the optimizer
        ["5.00", "5.00", "5.00"],  # batch
        ["8.00", "8.00", "0.00"],  # packed
        ["12.00", "12.00", "0.00"],  # other saved tensors
        ["1.00", "16.00", "33.00"],  # temporary ones
        ["30.00", "45.00", "44.00"],
    ]
    assert "Temporary" not in as_text(display.step_table(step_of(), 2))
    gelu, packed = cells(display.keepers_table(step_of(), 2))[1:]
    assert gelu == ["block.* (gelu)", "2", "12.00", "60.0 %"]
    assert packed[1:] == ["2", "8.00", "40.0 %"]


def advice(other: int, dense: int | None, step: StepMemory) -> str:
    dense_bytes = None if dense is None else dense * MIB
    return display.uncovered_text(MemoryReport(other_bytes=other * MIB, dense_bytes=dense_bytes, step=step))


@pytest.mark.parametrize(("operator", "hint"), [("cudnn_rnn", "Recurrent"), ("log_softmax", "loss"), ("mul", "preset")])
def test_what_nothing_covers_is_named_if_it_is_more_than_a_third(operator, hint):
    step = step_of()
    for storage in step.retained:
        storage.covered = storage.packed
    step.retained.append(Retained(9 * MIB, False, 2, 4, [Retainer("head", operator)]))
    parts = "21.00 MiB, 50.0 %", "block.* (gelu) 12.00 MiB", f"head ({operator}) 9.00 MiB", hint
    assert all(part in advice(29, 42, step) for part in parts)
    assert advice(29, 63, step) == advice(29, None, step) == advice(29, 30, step_of()) == ""


def with_logits(nbytes: int, *operators: str | None, peaks: tuple[int | None, ...] = ()) -> StepMemory:
    """The two blocks, of which nothing is kept as it is, and a loss that keeps one tensor in the last forward part."""
    step = step_of(*peaks)
    step.retained = [storage for storage in step.retained if storage.packed]
    for storage in step.retained:
        storage.covered = True
    step.retained.append(Retained(nbytes, False, 2, 4, [Retainer("", operator) for operator in operators]))
    return step


def test_logits_are_named_if_they_are_more_than_a_third_of_what_is_kept():
    for operators in (("log_softmax", "nll_loss"), ("nll_loss2_d",), ("cross_entropy_loss",)):
        assert advice(14, 60, with_logits(6 * MIB, *operators)).startswith("Logits are 6.00 MiB (42.9 %)")
        assert advice(12, 60, with_logits(4 * MIB - 1, *operators)) == ""
    for operator in ("linear_cross_entropy", "reduced_linear_cross_entropy", "softmax", "mul", None):
        assert "ogits are" not in advice(68, 300, with_logits(60 * MIB, operator))
    dense = with_logits(6 * MIB, "log_softmax")
    for storage in dense.retained:
        storage.covered = storage.packed = False
    assert all("Logits are" in advice(14, of_dense, dense) for of_dense in (14, None))


def test_temporary_tensors_of_the_loss_count_at_the_peak():
    step = with_logits(4 * MIB, "log_softmax", peaks=MEASURED)
    # 21 MiB are known by name where the loss begins to run, in the forward and in backward.
    for index, operator, found in [
        (3, "log_softmax", 4 + 24),
        (3, "gelu", 4),
        (2, None, 4 + 9),
        (4, None, 4),
        (5, None, 0),
    ]:
        step.moments[index].operator = operator
        assert step.logits_bytes(index) == found * MIB
    assert advice(12, 60, step) == ""
    step.moments[3].operator = "log_softmax"
    assert advice(12, 60, step).startswith("Logits are 28.00 MiB (62.2 %)")
