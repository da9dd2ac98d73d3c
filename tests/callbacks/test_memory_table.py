"""What ActivationMemoryMonitor shows."""

from __future__ import annotations

import pytest

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.callbacks import display, memory
from lightning_actprune.footprint import LayerFootprint, MemoryReport
from tests.helpers import BARS, Net, trainer

MIB = 2**20


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("verbose", [True, False])
def test_a_table_an_epoch(bar, verbose: bool, capsys, caplog):
    monitor = ActivationMemoryMonitor(verbose=verbose)
    callbacks = [ActivationPruning(verbose=False), monitor, *([bar()] if bar else [])]
    with caplog.at_level("INFO"):
        trainer(*callbacks, enable_progress_bar=bar is not None, max_epochs=2).fit(Net())
    text = capsys.readouterr().out + ("" if bar else caplog.text)
    for epoch in range(2):
        assert text.count(f"Kept for backward, epoch {epoch}") == verbose
    assert text.count("body.2") == text.count("Other saved tensors") == 2 * verbose


def test_a_fit_in_mixed_precision_saves_what_the_table_announces(caplog):
    dense, pruned = ActivationMemoryMonitor(verbose=False), ActivationMemoryMonitor()
    trainer(dense, precision="bf16-mixed").fit(Net())
    with caplog.at_level("INFO"):
        trainer(ActivationPruning(verbose=False), pruned, precision="bf16-mixed").fit(Net())
    assert dense.report.total_bytes - pruned.report.total_bytes == pruned.report.saved_bytes
    assert pruned.report.weight_copy_bytes == 2 * (128 * 64 + 64 * 4)  # the first layer reads the batch, normalised
    assert "16-bit weight copies" in caplog.text


def test_table_text():
    rows = [
        LayerFootprint("a", "ActivationPrunedLinear", 0.6, 1, 10 * MIB, 4 * MIB, 4 * MIB),
        LayerFootprint("b", "ActivationPrunedLinear", 0.6, 1, 0, MIB, MIB),
        LayerFootprint("c", "Linear", 0.0, 1, 2 * MIB, 2 * MIB, 2 * MIB),
    ]
    report = MemoryReport(rows, 3 * MIB, 11 * MIB, 20 * MIB, 8 * MIB)
    lines = display.as_text(memory._memory_table(report, 7)).splitlines()
    rules = [line.strip("│┃").replace("┃", "│").split("│") for line in lines if "│" in line or "MiB" in line]
    cells = [[cell.strip() for cell in line] for line in rules]
    assert lines[0].strip() == "Kept for backward, epoch 7"
    assert cells == [
        ["Layer", "Sparsity", "Dense MiB", "Stored MiB", "Saved"],
        ["a", "0.60", "10.00", "4.00", "60.0 %"],
        ["b", "0.60", "0.00", "1.00", "kept anyway"],
        ["c", "0.00", "2.00", "2.00", "0.0 %"],
        ["16-bit weight copies", "", "8.00", "0.00", "100.0 %"],
        ["Linear layers", "", "20.00", "7.00", "65.0 %"],
        ["Other saved tensors", "", "", "3.00", ""],
        ["Measured after forward", "", "", "11.00", ""],
        ["Measured peak of the step", "", "", "20.00", ""],
    ]


@pytest.mark.parametrize(("layers", "shown"), [(40, 40), (41, 41), (42, 40), (200, 40)])
def test_a_long_table_is_cut_and_summed_up(layers: int, shown: int):
    rows = [LayerFootprint(f"layer.{i}", "Linear", 0.5, 1, 2 * MIB, MIB, MIB) for i in range(layers)]
    text = display.as_text(memory._memory_table(MemoryReport(rows), 0))
    assert text.count("layer.") == shown
    rest = layers - shown
    last = [line for line in text.splitlines() if "more" in line]
    assert len(last) == bool(rest)
    assert all(part in line for line in last for part in (f"... and {rest} more", f" {2 * rest}.00", f" {rest}.00"))
