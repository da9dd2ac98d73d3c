"""Modules whose calls are replayed train as eager ones do, and are eager where a graph would do something else."""

from __future__ import annotations

import copy
import io
import itertools
import random
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Recompute, convert, replay
from lightning_actprune.replay import let_go, replay_module
from tests.support.tape import TapeRecorder

noted: list[Any] = []


@dataclass
class Result:
    y: Tensor
    index: Tensor


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)
        self.blocks, self.table, self.factor = nn.Sequential(nn.GELU(), nn.LayerNorm(8)), torch.ones(8), 1.0
        self.p, self.q = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
        self.register_buffer("scale", torch.rand(8))
        self.body, self.count, self.own, self.listed = body, itertools.count(), torch.Generator(), [self.a.weight]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def whole(net: Net, x: Tensor) -> Tensor:
    return net.b(net.drop(net.norm(net.a(x)).relu()))


def plain(net: Net, x: Tensor) -> Tensor:
    return net.b(net.blocks(net.a(x)) * net.scale * net.table) * net.factor


def parts(net: Net, x: Tensor, pair: Any, deep: bool) -> dict[str, Any]:
    h = net.a(x) + pair[0] + pair[1]
    return {"y": net.b(h), "more": (Result(h, h.argmax(1)), None), "deep": deep, "none": h.detach(), "again": h, "x": x}


def hooking(net: Net, x: Tensor) -> Tensor:
    (h := net.a(x)).register_hook(lambda gradient: noted.append(gradient.clone()))
    return net.b(h)


def back(*outputs: Tensor) -> Tensor:
    loss = sum(y.float().square().mean() for y in outputs)
    loss.backward()
    return loss.detach()


def call(*args: Any, rows: int = 4, calls: int = 1) -> Any:
    """Return a step of a call with a gradient for its input, or of some before one backward."""
    return lambda net, stem, step: back(*(net(stem(torch.randn(rows, 8)), *args) for _ in range(calls)))


def twice(net: Net, stem: Any, step: int) -> Any:
    return call()(net, stem, step), call()(net, stem, step)


def nested(net: Net, stem: Any, step: int) -> Any:
    x = stem(torch.randn(8, 4).t())
    outputs = net(x, pair=(x * 2, torch.randn(1, 8).expand(4, 8)), deep=step > 7)
    result: Result = outputs["more"][0]
    loss = back(outputs["y"], result.y * outputs["again"], outputs["x"])
    return loss, result.index, outputs["none"].requires_grad, outputs["deep"], outputs["more"][1]


def in_modes(net: Net, stem: Any, step: int) -> Any:
    net.train(step % 2 == 0)
    with torch.no_grad():
        seen = net(torch.randn(4, 8)), net.train()(torch.randn(4, 8))
    return seen, call(rows=3 if step == 7 else 4)(net, stem if step < 9 else nn.Identity(), step)


def autocast(net: Net, stem: Any, step: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=step < 8):
        y = net(stem(torch.randn(4, 8)))
    return back(y)


def clipping(net: Net, stem: Any, step: int) -> Any:
    call()(net, stem, step)
    torch._foreach_mul_([p.grad for p in net.parameters() if p.grad is not None], 0.5)


def holding(net: Net, stem: Any, step: int) -> Any:
    back(y := net(torch.randn(4, 8)))
    noted[:] = [*noted[-2:], y.detach(), net.a.weight.grad]
    back(net(torch.randn(4, 8)))
    return [tensor.clone() for tensor in noted]


def at(*steps: int) -> Any:
    """Return what lets a change happen in these steps alone."""
    return lambda change: lambda net, step: change(net, step) if step in steps else None


UNCHANGED = at()(None)


def setting(path: str, value: Any) -> Any:
    """Return what sets an attribute before the seventh step."""
    holder, _, name = path.rpartition(".")
    return at(6)(lambda net, step: setattr(attrgetter(holder)(net) if holder else net, name, value(net)))


def new_hook(net: Net, step: int) -> None:
    net.a._forward_hooks.clear()
    net.a.register_forward_hook(lambda module, args, output: output * (step + 2))


def hooked(net: Net, step: int) -> None:
    net.a.weight.register_hook(lambda gradient: gradient * 2)
    net.b.weight.register_post_accumulate_grad_hook(lambda parameter: noted.append(parameter.grad.clone()))


def note(module: nn.Module, given: Any, results: Any) -> None:
    noted.extend(tensor.clone() for tensor in tree_leaves(results))


def new_sparsity(net: Net, step: int) -> None:
    if step == 0:
        convert(net, rules={"*": "paper"})
    net.a.sparsity = 0.6 if step < 6 else 0.0


# Each with its body, its step, and what is done before a step. First, what is replayed.
REPLAYED: dict[str, tuple[Any, ...]] = {
    "once": (whole, call()),
    "accumulation": (whole, twice),
    "containers": (parts, nested),
    "shared weight": (plain, call(), at(0)(lambda net, step: setattr(net.b, "weight", net.a.weight))),
    "max": (plain, call(), at(0)(lambda net, step: convert(net, "max", rules={"*": "max"}))),
    "recompute": (plain, twice, at(0)(lambda net, step: convert(net, rules={"blocks": Recompute(), "a": None}))),
    "sparsity": (plain, call(), new_sparsity),
    "autocast": (whole, autocast),
    "checkpoint inside": (lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=False)), call()),
    "modes and shapes": (whole, in_modes),
    "two calls": (plain, call(calls=2)),
    "two calls of BatchNorm": (whole, call(calls=2)),
    "two shapes": (plain, lambda net, stem, step: back(net(torch.randn(4, 8)), net(torch.randn(6, 8)))),
    "some gradients": (
        whole,
        lambda net, stem, step: torch.autograd.grad(net(stem(torch.randn(4, 8))).sum(), net.a.weight),
    ),
    "clipping": (lambda net, x: x * net.scale + net.p + net.q, clipping),
    "gradient of the output": (lambda net, x: x * net.scale + net.p, twice),
    "held": (whole, holding),
    "hooks of parameters": (whole, call(), at(0)(hooked)),
    "unused output": (
        lambda net, x: (net.a(x), net.b(x)),
        lambda net, stem, step: back(net(stem(torch.randn(4, 8)))[0]),
    ),
    "requires_grad": (whole, call(), lambda net, step: net.a.requires_grad_(not 5 < step < 8)),
    "data": (whole, call(), setting("a.weight.data", lambda net: net.a.weight.data * 2)),
    "strides": (whole, call(), setting("a.weight.data", lambda net: net.a.weight.data.t())),
    "parameter": (whole, call(), setting("a.weight", lambda net: nn.Parameter(net.a.weight.detach()))),
    "buffer": (plain, call(), setting("scale", lambda net: net.scale * 2)),
    "tensor": (plain, call(), setting("table", lambda net: net.table * 2)),
    "number": (plain, call(), setting("factor", lambda net: 2.0)),
    "type of argument": (
        lambda net, x, k: net.b(x) + (x.long() * k).is_floating_point(),
        lambda net, stem, step: call(2 if step < 6 else 2.0)(net, stem, step),
    ),
    "same argument": (
        lambda net, x, z: net.a(x) * (2 if x is z else 1),
        lambda net, stem, step: back(net(x := stem(torch.randn(4, 8)), x if step < 6 else x + 0)),
    ),
}
# What may be replayed or not.
EQUAL: dict[str, tuple[Any, ...]] = {
    "checkpoint around": (
        whole,
        lambda net, stem, step: back(checkpoint(net, stem(torch.randn(4, 8)), use_reentrant=False)),
    ),
    "reentrant checkpoint around": (
        whole,
        lambda net, stem, step: back(checkpoint(net, stem(torch.randn(4, 8)), use_reentrant=True)),
    ),
    "hook": (whole, call(), at(6)(new_hook)),
    "other hook": (whole, call(), at(0, 6)(new_hook)),
    "observing hook": (whole, call(), at(0)(lambda net, step: net.a.register_forward_hook(note))),
    "backward hook": (whole, call(), at(0)(lambda net, step: net.a.register_full_backward_hook(note))),
    "hook of a tensor": (hooking, call()),
    "list": (lambda net, x: (net.listed.append(x.detach().clone()), net.b(x))[1], call()),
    "written tensor": (lambda net, x: net.b(x) * net.table.mul_(0.9).clone(), call()),
    "written parameter": (lambda net, x: net.b(x) + net.p.detach().mul_(0.9), call()),
    "input": (lambda net, x: net.b(x.mul_(2)), lambda net, stem, step: back(net(x := torch.randn(4, 8)) * x)),
    "output": (
        lambda net, x: (net.b(x), next(net.count)),
        lambda net, stem, step: (y := net(torch.ones(4, 8)), back(y[0])),
    ),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "item": (lambda net, x: net.b(x) * x.mean().item(), "item"),
    "bool": (lambda net, x: net.b(x) * (2 if x.mean() > 0 else 1), "bool"),
    "random": (lambda net, x: net.b(x) * random.random(), "random"),
    "NumPy": (lambda net, x: net.b(x) * np.random.rand(), "random"),
    "attribute": (lambda net, x: setattr(net, "last", net.b(x)) or net.last, "last"),
    "alternating": (lambda net, x: net.b(x.sin() if next(net.count) % 2 else x.cos()), ""),
    "other weights": (lambda net, x: (net.a, net.b)[next(net.count) % 2](x), ""),
    "own generator": (lambda net, x: net.b(x) * torch.rand(8, generator=net.own), ""),
    "parameter in a list": (lambda net, x: net.b(x @ net.listed[0]), ""),
    "argument": (lambda net, x, size: net.b(x), "slice", slice(3)),
}
"""What is never replayed: its body, a word of the reason, and an argument."""


class Failing(TapeRecorder):
    """One that raises in its first or second record, or whose replays compute something else."""

    def __init__(self, error: Exception | None = None, place: int = 0) -> None:
        super().__init__()
        self._error, self._place = error, place

    def record(self, run: Any) -> Any:
        run_again, results = super().record(run)
        if len(self._tapes) == self._place and self._error is not None:
            raise self._error
        return lambda: (run_again(), next(filter(torch.is_tensor, tree_leaves(results))).data.add_(1e-3)), results


ERRORS = {"RuntimeError": RuntimeError("x"), "no text": RuntimeError(), "TypeError": TypeError("x")}
FAILURES = {f"{name} at {place}": partial(Failing, error, place) for name, error in ERRORS.items() for place in (1, 2)}
MISUSES = {
    "retain_graph": lambda net, y: [y.sum().backward(retain_graph=True) for _ in range(2)],
    "double backward": lambda net, y: torch.autograd.grad(y.exp().sum(), net.p, create_graph=True)[0].sum().backward(),
    "written weight": lambda net, y: (net.b.weight.detach().mul_(2), y.sum().backward()),
}
FAILS: tuple[str, ...] = ()
"""What does not hold yet."""


def cases(argument: str, table: dict[str, Any]) -> Any:
    fails = pytest.mark.xfail(reason="replay.py does otherwise")
    values = [pytest.param(table[name], id=name, marks=[fails] * (name in FAILS)) for name in table]
    return pytest.mark.parametrize(argument, values)


def train(body: Any, step: Any, change: Any, recorder: Any, to_none: bool) -> Any:
    """Return all that a training comes to, eager without a recorder, and what replays."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    noted.clear()
    net, stem, seen = Net(body), nn.Linear(8, 8), list[Any]()
    replayed = replay_module(net, "net", recorder) if recorder else None
    optimizer = torch.optim.AdamW([*net.parameters(), *stem.parameters()], 1e-2)
    for number in range(12):
        torch.manual_seed(number)
        change(net, number)
        seen.append(step(net, stem, number))
        seen += [None if p.grad is None else p.grad.clone() for p in (*net.parameters(), *stem.parameters())]
        optimizer.step()
        optimizer.zero_grad(to_none)
    seen += [*net.state_dict().values(), *noted, net.table, net.listed, next(net.count), net.own.get_state()]
    return tree_leaves([seen, torch.get_rng_state(), random.getstate()]), replayed


def check(body: Any, step: Any, change: Any = UNCHANGED, recorder: Any = TapeRecorder, to_none: bool = True) -> Any:
    """Check that a training is that without replays, bit for bit, and return how many there were, and the reason."""
    expected = train(body, step, change, None, to_none)[0]
    found, replayed = train(body, step, change, recorder, to_none)
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else one == other
    return replayed.replays, replayed.reason


@cases("case", REPLAYED)
def test_replays_compute_what_eager_calls_do(monkeypatch, case):
    for to_none, small in ((True, 2**24), (False, 0)):
        monkeypatch.setattr(replay, "SMALL_BYTES", small)
        replays, reason = check(*case, to_none=to_none)
        assert replays > 0
        assert not reason


@cases("case", EQUAL)
def test_nothing_is_lost_in_a_replay(case):
    check(*case)


@cases("case", REFUSED)
def test_what_differs_between_calls_stays_eager(case):
    step = call(*case[2:])
    replays, reason = check(case[0], lambda *args: (step(*args), step(*args)))
    assert replays == 0
    assert reason
    assert case[1] in reason


@cases("recorder", {**FAILURES, "other results": Failing})
def test_a_failed_capture_leaves_what_an_eager_call_does(recorder):
    replays, reason = check(whole, call(), recorder=recorder)
    assert replays == 0
    assert reason


@cases("error", ERRORS)
def test_errors_of_the_module_are_its_own(error):
    """They come while a call is watched, and while it would be captured."""

    def body(net: Net, x: Tensor) -> Tensor:
        y = whole(net, x)
        if fails:
            raise error
        return y

    def step(net: Net, stem: Any, number: int) -> Any:
        if number in (1, 3):
            fails[:] = [True]
            with pytest.raises(type(error)):
                call()(net, stem, number)
            fails.clear()
        return call()(net, stem, number)

    fails: list[bool] = []
    check(body, step)


@cases("misuse", MISUSES)
def test_what_a_graph_cannot_do_raises(misuse):
    net = Net(lambda net, x: net.b(net.a(x) * net.p))
    replayed = replay_module(net, "net", TapeRecorder)
    for step in range(5):
        call()(net, nn.Identity(), step)
    assert replayed.replays == 2
    with pytest.raises(RuntimeError):
        misuse(net, net(torch.randn(4, 8)))


def pickled(net: Net) -> Net:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@cases("copied", {"deepcopy": copy.deepcopy, "pickle": pickled})
def test_copies_are_eager_and_letting_go_leaves_the_module(copied):
    net = Net(whole)
    names, replayed = set(vars(net)), replay_module(net, "net", TapeRecorder)
    for rows in (rows for rows in range(2, 12) for _ in range(5)):
        call(rows=rows)(net, nn.Identity(), 0)
    assert replayed.graphs == replay.MOST_GRAPHS
    y, replays, other = net(torch.randn(4, 8)), replayed.replays, copied(net)
    call()(other, nn.Identity(), 0)
    assert replayed.replays == replays
    for each in (net, other):
        let_go(each)
        assert type(each) is Net
        assert set(vars(each)) == names
    back(y)
