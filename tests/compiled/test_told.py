"""What was decided of compiled code is told to all who listen when it runs, wherever it comes from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_actprune.codec.blocks import SPARSITY_PARTS
from lightning_actprune.compiled import told
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.compiled.told import Report, Rows, listen, listening
from tests.compiled.support import Block, Marked, mark, run, uncached
from tests.support.marks import only

ROWS = [
    Row("blocks.*.fc1", ("aten.mm", "aten.add"), (4, 8, 64), torch.bfloat16, 4096, 1100, "packed", 4),
    Row("aten.mul", (), (), torch.float32, 4, 4, "as it is", 0, 'a "reason" of its own'),
]


@pytest.fixture
def text():
    told.settle(ROWS)
    text = told.take_settled()
    assert told.take_settled() is None
    return text


def test_a_listener_is_told_once_and_by_the_code_alone_who_was_not_by_the_pass(text):
    report, first, second = Report(text), Rows(), Rows()
    report()
    try:
        listen(first)
        first.packed(ROWS)
        told.settle(ROWS)  # of whom the pass has told
        report()
        listen(second)
        report()
        report()
        assert first == second == ROWS
        told.leave(first)
        report()
        assert second == ROWS
        assert listening() == (second,)
    finally:
        told.leave(first)
        told.leave(second)


def test_what_the_code_says_stands_in_place_of_what_the_pass_has_told(text):
    """As where the joint graph is made anew and its code comes out of a cache."""
    other = [Row("other", (), (2,), torch.float32, 8, 8, "as it is")]
    saved, rows = ROWS[0]._replace(stored_bytes=1000), Rows()
    told.settle([saved, *ROWS[1:], *other])
    text = told.take_settled()
    listen(rows)
    try:
        rows.packed(ROWS)
        rows.packed(other)
        Report(text)()
        assert rows == [saved, *ROWS[1:], *other, *other]
        told.settle(other)
        assert rows == [saved, *ROWS[1:], *other, *other]
        assert rows.open == []
    finally:
        told.leave(rows)


def dropping() -> nn.Module:
    """A model of which all that is packed drops half of its blocks."""
    return nn.Sequential(*(Marked(nn.Linear(64, 64), mark("linear", 0), SPARSITY_PARTS // 2) for _ in range(2)))


@pytest.mark.integration
@pytest.mark.parametrize("build", only([Block, dropping], dropping))
def test_code_that_is_there_tells_the_next_training(build):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = build(), torch.randn(4, 32, 64)
    compiled, rows = torch.compile(model, fullgraph=True), []
    with uncached():
        for _ in range(2):
            with CompiledPacking() as packing:
                run(compiled, model, x, packing.rows, autocast=False)
                assert run(compiled, model, x, packing.rows, autocast=False).rows is packing.rows
            rows.append(list(packing.rows))
    assert rows[0] == rows[1] != []
