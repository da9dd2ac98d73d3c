"""What was decided of compiled code is told to all who listen when it runs, wherever it comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_actprune.codec.blocks import SPARSITY_PARTS
from lightning_actprune.compiled import told
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.compiled.told import Report, Rows, listen, listening
from tests.compiled.support import Block, Marked, mark, run
from tests.support.compilers import uncached

ROWS = [
    Row("blocks.*.fc1", ("aten.mm", "aten.add"), (4, 8, 64), torch.bfloat16, 4096, 1100, "packed", 4),
    Row("aten.mul", (), (), torch.float32, 4, 4, "as it is", 0, 'a "reason" of its own'),
]


@pytest.fixture
def text():
    told.settle(ROWS)
    return told.take_settled()


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


def test_what_is_settled_is_taken_once(text):
    told.settle(ROWS)
    assert (told.take_settled(), told.take_settled()) == (text, None)


def dropping() -> nn.Module:
    """A model of which all that is packed drops half of its blocks."""
    return nn.Sequential(*(Marked(nn.Linear(64, 64), mark("linear", 0), SPARSITY_PARTS // 2) for _ in range(2)))


@pytest.mark.integration
@pytest.mark.parametrize("build", [Block, dropping])
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


FRESH = """
import torch
from torch import nn
from tests.compiled.support import Marked, mark, run
from lightning_actprune.compiled.scope import CompiledPacking

torch.manual_seed(0)
model = nn.Sequential(*(Marked(nn.Linear(64, 64), mark("linear", 4)) for _ in range(2)))
x = torch.randn(4, 32, 64)
with CompiledPacking() as packing:
    run(torch.compile(model, fullgraph=True), model, x, packing.rows, autocast=False)
counters = torch._dynamo.utils.counters
print(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
print(sorted(map(str, packing.rows)))
"""


@pytest.mark.nightly
def test_a_second_process_that_hits_the_caches_lists_what_the_first_did(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-c", FRESH]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines()[-2:])
    (missed, first), (hit, second) = outputs
    assert int(missed) == 0 < int(hit)
    assert first == second != "[]"
