"""What ActivationMemoryMonitor shows."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport
from lightning_actprune.analysis.step_memory import MemoryMoment, Retained, Retainer, StepMemory
from lightning_actprune.callbacks import display
from lightning_actprune.callbacks.display import (
    headline,
    keepers_table,
    memory_table,
    peak_text,
    step_table,
    uncovered_text,
)
from lightning_actprune.compiled.report import Row
from tests.support.helpers import BARS, Net, trainer

MIB = 2**20


@pytest.mark.parametrize("bar", BARS)
def test_a_table_an_epoch(bar, capsys, caplog):
    monitor = ActivationMemoryMonitor(verbose=True)
    callbacks = [ActivationPruning(sparsity=0.6, verbose=False), monitor, *([bar()] if bar else [])]
    with caplog.at_level("INFO"):
        trainer(*callbacks, enable_progress_bar=bar is not None, max_epochs=2).fit(Net())
    text = capsys.readouterr().out + ("" if bar else caplog.text)
    titles = "Kept at the end of the forward, by who", "Memory of the step at the peak", "Peak of the step", "MiB dense"
    assert [text.count(f"Kept for backward, epoch {epoch}") for epoch in range(2)] == [1, 1]
    assert text.count("│ body.2 ") == 2
    assert [text.count(title) for title in titles] == [1] * 4


def test_table_text():
    rows = [
        LayerFootprint("a.0.fc", "ActivationPrunedLinear", 0.6, 1, 6 * MIB, 3 * MIB, 3 * MIB, bits=4),
        LayerFootprint("b", "ActivationPrunedLinear", 0.6, 1, 0, MIB, MIB),
        LayerFootprint("a.1.fc", "ActivationPrunedLinear", 0.6, 1, 4 * MIB, MIB, MIB, bits=4),
        LayerFootprint("a.2.fc", "ActivationPrunedLinear", 0.0, 1, 0, 0, 0, bits=4),
        LayerFootprint("c", "Linear", 0.0, 1, 2 * MIB, 2 * MIB, 2 * MIB),
    ]
    report = MemoryReport(rows, 3 * MIB, 20 * MIB, 11 * MIB)
    lines = display.as_text(memory_table(report, 7)).splitlines()
    rules = [line.strip("│┃").replace("┃", "│").split("│") for line in lines if "│" in line or "MiB" in line]
    cells = [[cell.strip() for cell in line] for line in rules]
    assert lines[0].strip() == "Kept for backward, epoch 7"
    assert cells == [
        ["Layer", "Kept", "Dense MiB", "Stored MiB", "Saved"],
        ["a.*.fc (2)", "4 bits, drops 60 %", "10.00", "4.00", "60.0 %"],
        ["b", "values as they are, drops 60 %", "0.00", "1.00", "kept anyway"],
        ["a.2.fc", "4 bits", "0.00", "0.00", "-"],
        ["c", "whole", "2.00", "2.00", "0.0 %"],
        ["Everything else", "", "8.00", "3.00", "62.5 %"],
        ["Whole model", "", "20.00", "10.00", "50.0 %"],
        ["Measured after forward", "", "", "11.00", ""],
    ]
    assert headline(report) == "Activations: 20.00 MiB dense -> 10.00 MiB (-50.0 %)."
    hidden = MemoryReport(rows, 3 * MIB, None, compiled_bytes=2 * MIB)
    assert "10.00 MiB, 2.00 MiB of it kept by compiled code" in headline(hidden)
    assert "not known" in display.as_text(memory_table(hidden, 7))
    assert headline(MemoryReport(rows[-1:], MIB, 3 * MIB)) == "Activations: 3.00 MiB, as in the dense model."


def test_what_compiled_code_keeps_is_listed_and_no_part_of_everything_else():
    compiled = [
        Row("a.*.act", ("aten.gelu_backward",), (8,), torch.bfloat16, 4 * MIB, MIB, "packed", 3),
        Row("a.*.act", ("aten.gelu_backward",), (8,), torch.bfloat16, 4 * MIB, MIB, "packed", 3),
        Row("b", ("aten.mm",), (8,), torch.float32, 2 * MIB, 2 * MIB, "packed", 0),
        Row("c", ("aten.mm",), (8,), torch.float32, 2 * MIB, 0, "again", 0, "from another"),
        Row("aten.where", ("aten.mul",), (8,), torch.float32, MIB, MIB, "as it is", 0, "it is a mask"),
    ]
    report = MemoryReport([], 8 * MIB, None, compiled_bytes=6 * MIB)
    lines = display.as_text(memory_table(report, 7, compiled)).splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]
    assert cells == [
        ["a.*.act (2)", "3 bits", "8.00", "2.00", "75.0 %"],
        ["b", "fewer blocks", "2.00", "2.00", "0.0 %"],
        ["aten.where", "as it is: it is a mask", "1.00", "1.00", "0.0 %"],
        ["c", "computed again", "2.00", "0.00", "100.0 %"],
        ["Everything else", "", "not known", "3.00", ""],
        ["Whole model", "", "not known", "8.00", ""],
    ]
    assert "6.00 MiB of it kept by compiled code, whose backward reads 13.00 MiB" in headline(report, compiled)


@pytest.mark.parametrize(("layers", "shown"), [(40, 40), (41, 41), (42, 40), (200, 40)])
def test_a_long_table_is_cut_and_summed_up(layers: int, shown: int):
    rows = [LayerFootprint(f"layer.{i}", "Linear", 0.5, 1, 2 * MIB, MIB, MIB) for i in range(layers)]
    text = display.as_text(memory_table(MemoryReport(rows), 0))
    assert text.count("layer.") == shown
    rest = layers - shown
    last = [line for line in text.splitlines() if "more" in line]
    assert len(last) == bool(rest)
    assert all(part in line for line in last for part in (f"... and {rest} more", f" {2 * rest}.00", f" {rest}.00"))


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if "│" in line or "┃" in line]
    return [[cell.strip() for cell in row.strip("│┃").replace("┃", "│").split("│")] for row in rows]


def step_of(*peaks: int | None) -> StepMemory:
    """Two blocks that keep 4 MiB packed and 6 MiB as they are, each; parameters 1, gradients 2, state 3, batch 5."""
    phases = "forward", "forward", "forward", "backward", "backward", "optimizer"
    names = ("", None), ("block.0", None), ("block.1", None), ("block.1", "gelu"), ("block.0", "gelu"), ("", None)
    gradients = 0, 0, 0, 0, 1, 2
    moments = [
        MemoryMoment(phase, *name, gradient * MIB, 3 * MIB, None if peak is None else peak * MIB, peak and peak * MIB)
        for phase, name, gradient, peak in zip(phases, names, gradients, peaks, strict=True)
    ]
    holdings = []
    for block in range(2):
        for nbytes, packed, operator in ((4 * MIB, True, "pruned_linear_function"), (6 * MIB, False, "gelu")):
            retainers = [Retainer(f"block.{block}", operator)]
            holdings.append(Retained(nbytes, packed, 1 + block, 5 - block, retainers))
    return StepMemory(MIB, 5 * MIB, moments, holdings)


def test_text_of_the_peak_has_its_bytes_now_and_with_half_and_all_of_the_activations_gone():
    counted, measured = peak_text(step_of(*[None] * 6)), peak_text(step_of(9, 20, 30, 45, 30, 44))
    assert re.findall(r"([0-9.]+) MiB", counted) == ["29.00", "19.00", "11.00"]
    assert re.findall(r"([0-9.]+) MiB", measured) == ["45.00", "44.00", "44.00"]
    assert ("counted" in counted, "measured" in measured, "block.1" in measured) == (True, True, True)


def test_table_of_the_step():
    rows = cells(display.as_text(step_table(step_of(9, 20, 30, 45, 30, 44), 2)))
    assert rows == [
        ["", "Forward", "Backward (peak)", "Optimizer step"],
        ["Parameters", "1.00", "1.00", "1.00"],
        ["Gradients", "0.00", "0.00", "2.00"],
        ["Optimizer state", "3.00", "3.00", "3.00"],
        ["Batch", "5.00", "5.00", "5.00"],
        ["Packed tensors", "8.00", "8.00", "0.00"],
        ["Other saved tensors", "12.00", "12.00", "0.00"],
        ["Temporary and other tensors", "1.00", "16.00", "33.00"],
        ["In use", "30.00", "45.00", "44.00"],
    ]
    assert "Temporary" not in display.as_text(step_table(step_of(*[None] * 6), 2))


def test_table_of_the_retainers():
    assert cells(display.as_text(keepers_table(step_of(*[None] * 6), 2))) == [
        ["Kept by", "Tensors", "MiB", "Share"],
        ["block.* (gelu)", "2", "12.00", "60.0 %"],
        ["block.* (pruned_linear_function), packed", "2", "8.00", "40.0 %"],
    ]
    many = StepMemory(
        0, 0, step_of(*[None] * 6).moments, [Retained(MIB, False, 1, 5, [Retainer(f"l{i}", None)]) for i in range(20)]
    )
    text = display.as_text(keepers_table(many, 0))
    assert "... and 8 more" in text
    assert "(mul)" not in text
    assert display.as_text(keepers_table(StepMemory(0, 0, step_of(*[None] * 6).moments), 0)).count("Kept by ") == 1


@pytest.mark.parametrize(("operator", "hint"), [("cudnn_rnn", "Recurrent"), ("log_softmax", "loss"), ("mul", "preset")])
def test_what_nothing_covers_is_named_if_it_is_more_than_a_third(operator, hint):
    step = step_of(*[None] * 6)
    for storage in step.retained:
        storage.covered = storage.packed
    step.retained.append(Retained(9 * MIB, False, 2, 4, [Retainer("head", operator)]))
    text = uncovered_text(MemoryReport(other_bytes=29 * MIB, dense_bytes=42 * MIB, step=step))
    named = "21.00 MiB, 50.0 %", "block.* (gelu) 12.00 MiB", f"head ({operator}) 9.00 MiB", hint
    assert all(part in text for part in named)
    assert uncovered_text(MemoryReport(other_bytes=29 * MIB, dense_bytes=63 * MIB, step=step)) == ""
    assert uncovered_text(MemoryReport(other_bytes=29 * MIB, dense_bytes=None, step=step)) == ""


def with_logits(nbytes: int, *operators: str, peaks: tuple[int | None, ...] = (None,) * 6) -> StepMemory:
    """The two blocks, of which nothing is kept as it is, and a loss that keeps one tensor in the last forward part."""
    step = step_of(*peaks)
    step.retained = [storage for storage in step.retained if storage.packed]
    for storage in step.retained:
        storage.covered = True
    step.retained.append(Retained(nbytes, False, 2, 4, [Retainer("", operator) for operator in operators]))
    return step


@pytest.mark.parametrize("operators", [("log_softmax", "nll_loss"), ("nll_loss2_d",), ("cross_entropy_loss",)])
def test_logits_are_named_if_they_are_more_than_a_third_of_what_is_kept(operators):
    step = with_logits(6 * MIB, *operators)
    text = uncovered_text(MemoryReport(other_bytes=14 * MIB, dense_bytes=60 * MIB, step=step))
    assert text.startswith("Logits are 6.00 MiB (42.9 %) of what")
    few = with_logits(4 * MIB - 1, *operators)
    assert uncovered_text(MemoryReport(other_bytes=12 * MIB, dense_bytes=60 * MIB, step=few)) == ""


@pytest.mark.parametrize("operator", ["linear_cross_entropy", "reduced_linear_cross_entropy", "softmax", "mul", None])
def test_other_operations_keep_no_logits(operator):
    step = with_logits(60 * MIB, operator)
    assert "ogits are" not in uncovered_text(MemoryReport(other_bytes=68 * MIB, dense_bytes=300 * MIB, step=step))


def test_temporary_tensors_of_the_loss_count_at_the_peak():
    step = with_logits(4 * MIB, "log_softmax", peaks=(9, 20, 30, 45, 30, 44))
    # 21 MiB are known by name where the loss begins to run, in the forward and in backward.
    for index, operator, found in (
        (3, "log_softmax", 4 + 24),
        (3, "gelu", 4),
        (2, None, 4 + 9),
        (4, None, 4),
        (5, None, 0),
    ):
        step.moments[index].operator = operator
        assert step.logits_bytes(index) == found * MIB
    assert uncovered_text(MemoryReport(other_bytes=12 * MIB, dense_bytes=60 * MIB, step=step)) == ""
    step.moments[3].operator = "log_softmax"
    text = uncovered_text(MemoryReport(other_bytes=12 * MIB, dense_bytes=60 * MIB, step=step))
    assert text.startswith("Logits are 28.00 MiB (62.2 %) of the peak")


def test_a_dense_model_gets_no_other_advice_and_an_empty_step_no_text():
    assert uncovered_text(MemoryReport(other_bytes=29 * MIB, dense_bytes=30 * MIB, step=step_of(*[None] * 6))) == ""
    assert peak_text(StepMemory(0, 0)) == ""
