"""Installing the pass: what was there before runs too, and is put back. Marks are the identity. Who is told what."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from lightning_actprune.codec import private
from lightning_actprune.codec.blocks import SPARSITY_PARTS
from lightning_actprune.compiled import scope, told
from lightning_actprune.compiled.marks import Mark, Model, general_name, marked
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.compiled.told import Report, Rows, listen, listening
from tests.compiled.support import Block, Marked, mark, planned, run, step, uncached
from tests.support.marks import only


def net() -> nn.Module:
    return nn.Sequential(nn.Softsign(), Marked(nn.Linear(64, 64), mark("linear", 4)))


class Own(CustomGraphPass):
    def __init__(self, uuid: str | None) -> None:
        self.graphs, self._uuid = [], uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(graph)

    def uuid(self) -> str | None:
        return self._uuid


def installed() -> tuple[object, object, object]:
    return inductor.joint_custom_post_pass, functorch.joint_custom_pass, inductor.post_grad_custom_pre_pass


def test_what_was_there_is_put_back():
    own, other = Own("own"), lambda module, inputs: module
    with inductor.patch(joint_custom_post_pass=own), functorch.patch(joint_custom_pass=other):
        with CompiledPacking(), CompiledPacking():
            assert own not in installed()
        assert installed() == (own, other, None)
        with pytest.raises(KeyError), CompiledPacking():
            raise KeyError
        assert installed() == (own, other, None)
    assert installed() == (None, None, None)


def test_a_pass_that_came_later_stays():
    packing, own = CompiledPacking().open(), Own("own")
    inductor.joint_custom_post_pass = own
    packing.close()
    assert installed() == (own, None, None)
    inductor.joint_custom_post_pass = None


def test_scopes_may_be_closed_in_any_order():
    first, second = CompiledPacking().open(), CompiledPacking().open()
    first.close()
    step(net(), torch.randn(32, 64), packs=False)
    assert (len(first.rows), len(second.rows)) == (0, 1)
    second.close()


def test_one_that_nobody_holds_is_closed():
    packing = CompiledPacking().open()
    del packing
    assert installed() == (None, None, None)


def test_the_caches_know_all_passes():
    def uuid() -> object:
        with CompiledPacking():
            return inductor.joint_custom_post_pass.uuid()

    alone = uuid()
    assert alone == uuid() == (scope.source_hash(),)
    for own, expected in ((Own("own"), (scope.source_hash(), "own")), (Own(None), None), (print, None)):
        with inductor.patch(joint_custom_post_pass=own):
            assert uuid() == expected


def test_a_pass_that_was_there_runs_once():
    seen = []
    with functorch.patch(joint_custom_pass=lambda module, inputs: seen.append(module) or module):
        found = step(net(), torch.randn(32, 64))
    assert len(seen) == 1
    assert [row.how for row in found.rows] == ["packed"]


@pytest.mark.parametrize("backend", ["aot_eager", planned])
def test_a_graph_without_backward_is_computed_and_nothing_is_missed(backend):
    model, x = net(), torch.randn(32, 64)
    torch._dynamo.reset()
    with uncached(), CompiledPacking() as packing:
        best = torch.compile(lambda x: model(x).argmax(-1), backend=backend, fullgraph=True)
        assert torch.equal(best(x), model(x).argmax(-1))
        assert packing.rows == []
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
        assert torch.equal(best(x), model(x).argmax(-1))
    assert [row.how for row in packing.rows] == ["packed"]
    assert not packing.was_missed


def test_a_model_may_be_given_to_the_compiler_meanwhile():
    """``torch.compile`` copies the configuration, as in ``configure_model``."""
    with CompiledPacking():
        passes = installed()
        torch.compile(nn.Linear(2, 2))
        assert copy.deepcopy(passes)[:2] == passes[:2]


def test_an_error_says_whose_it_is_and_what_to_do(monkeypatch):
    def fails(graph: torch.fx.Graph) -> None:
        raise KeyError("a node")

    monkeypatch.setattr(scope, "pack_joint_graph", fails)
    with pytest.raises(Exception, match=r"(?s)lightning_actprune, please report it.*torch\.compiler\.disable"):
        step(net(), torch.randn(32, 64))
    assert installed() == (None, None, None)


def test_a_torch_without_passes_says_so(monkeypatch):
    assert scope.why_not() is None
    monkeypatch.setattr(private, "MISSING", [private.FOR_JOINT_PASSES[1]])
    assert "joint_custom_pass, which torch" in scope.why_not()
    with pytest.raises(RuntimeError, match="HINT"):
        CompiledPacking().open()


TEXT = Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4)).text


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 2:6]])
def test_a_mark_is_the_identity(view):
    x = torch.randn(6, 8, requires_grad=True)
    read = view(x)
    y = marked(read, TEXT)
    assert torch.equal(y, read)
    assert y.stride() == read.stride()
    grads = (torch.autograd.grad((of * of).sum(), x)[0] for of in (y, read))
    assert torch.equal(next(grads), next(grads))


def test_a_mark_says_what_it_was_told():
    for x in (torch.ones(1, 4).expand(3, 4), torch.ones(3, dtype=torch.int64)):
        assert marked(x, TEXT) is x
    assert Mark.read(TEXT) == Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4))
    assert general_name("model.layers.3.mlp") == general_name("model.layers.11.mlp")
    torch.library.opcheck(torch.ops.actprune.mark.default, (torch.randn(24), TEXT))


# What was decided is told to all who listen when code runs, wherever it comes from.

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
