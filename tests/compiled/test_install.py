"""The user's passes run too, and are put back. Marks are the identity. Each log gets each decision once."""

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
from lightning_actprune.compiled import install
from lightning_actprune.compiled.decision_log import (
    CachedDecisions,
    DecisionLog,
    Row,
    close_log,
    open_log,
    open_logs,
    pop_pending_text,
    settle_logs,
)
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.marks import Mark, Model, general_name, mark_input
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
    assert alone == uuid() == (install.source_hash(),)
    for own, expected in ((Own("own"), (install.source_hash(), "own")), (Own(None), None), (print, None)):
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

    monkeypatch.setattr(install, "pack_joint_graph", fails)
    with pytest.raises(Exception, match=r"(?s)lightning_actprune, please report it.*torch\.compiler\.disable"):
        step(net(), torch.randn(32, 64))
    assert installed() == (None, None, None)


def test_a_torch_without_passes_says_so(monkeypatch):
    assert install.why_not() is None
    monkeypatch.setattr(private, "MISSING", [private.FOR_JOINT_PASSES[1]])
    assert "joint_custom_pass, which torch" in install.why_not()
    with pytest.raises(RuntimeError, match="HINT"):
        CompiledPacking().open()


def test_a_torch_with_other_names_for_gradients_packs_nothing_and_says_so(monkeypatch):
    monkeypatch.setattr("lightning_actprune.compiled.graphs.is_tangent", lambda node: False)
    with CompiledPacking() as packing:
        torch._dynamo.reset()
        model, x = net(), torch.randn(32, 64)
        dense = copy.deepcopy(model)
        torch.compile(model, backend="aot_eager")(x).sum().backward()
        dense(x).sum().backward()
    assert packing.was_missed
    for parameter, exact in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(parameter.grad, exact.grad)


TEXT = Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4)).text


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[:, 2:6]])
def test_a_mark_is_the_identity(view):
    x = torch.randn(6, 8, requires_grad=True)
    read = view(x)
    y = mark_input(read, TEXT)
    assert torch.equal(y, read)
    assert y.stride() == read.stride()
    grads = (torch.autograd.grad((of * of).sum(), x)[0] for of in (y, read))
    assert torch.equal(next(grads), next(grads))


def test_a_mark_says_what_it_was_told():
    for x in (torch.ones(1, 4).expand(3, 4), torch.ones(3, dtype=torch.int64)):
        assert mark_input(x, TEXT) is x
    assert Mark.read(TEXT) == Mark("linear", "fc", 4, selection="swap", model=Model(saved=8, value=4))
    assert general_name("model.layers.3.mlp") == general_name("model.layers.11.mlp")
    torch.library.opcheck(torch.ops.actprune.mark.default, (torch.randn(24), TEXT))


ROWS = [
    Row("blocks.*.fc1", ("aten.mm", "aten.add"), (4, 8, 64), torch.bfloat16, 4096, 1100, "packed", 4),
    Row("aten.mul", (), (), torch.float32, 4, 4, "uncompressed", 0, 'a "reason" of its own'),
]


@pytest.fixture
def text():
    settle_logs(ROWS)
    text = pop_pending_text()
    assert pop_pending_text() is None
    return text


def test_a_log_gets_the_decisions_once_from_the_pass_or_from_code(text):
    report, first, second = CachedDecisions(text), DecisionLog(), DecisionLog()
    report()
    try:
        open_log(first)
        first.add_graph(ROWS)
        settle_logs(ROWS)
        report()
        open_log(second)
        report()
        report()
        assert first == second == ROWS
        close_log(first)
        report()
        assert second == ROWS
        assert open_logs() == (second,)
    finally:
        close_log(first)
        close_log(second)


def test_settled_rows_of_cached_code_replace_those_of_a_new_joint_graph(text):
    other = [Row("other", (), (2,), torch.float32, 8, 8, "uncompressed")]
    saved, rows = ROWS[0]._replace(stored_bytes=1000), DecisionLog()
    settle_logs([saved, *ROWS[1:], *other])
    text = pop_pending_text()
    open_log(rows)
    try:
        rows.add_graph(ROWS)
        rows.add_graph(other)
        CachedDecisions(text)()
        assert rows == [saved, *ROWS[1:], *other, *other]
        settle_logs(other)
        assert rows == [saved, *ROWS[1:], *other, *other]
        assert rows.unsettled == []
    finally:
        close_log(rows)


def dropping() -> nn.Module:
    """A model of which all that is packed drops half of its blocks."""
    return nn.Sequential(*(Marked(nn.Linear(64, 64), mark("linear", 0), SPARSITY_PARTS // 2) for _ in range(2)))


@pytest.mark.integration
@pytest.mark.parametrize("build", only([Block, dropping], dropping))
def test_code_of_an_earlier_training_logs_its_decisions(build):
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
