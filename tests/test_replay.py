"""Modules whose calls are replayed train as eager ones do, and are eager where a graph would do something else."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections import namedtuple
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, autocast, autograd, nn, no_grad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Recompute, convert
from lightning_actprune.analysis.first_forwards import FirstForwards
from lightning_actprune.replay import capture, graph, memory, module
from lightning_actprune.replay.module import replay_module, stop_replay
from tests.support.tape import TapeRecorder

Result = namedtuple("Result", "y index")
noted: list[Any] = []
FOREIGN = torch.rand(8)


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)
        self.blocks, self.table, self.factor = nn.Sequential(nn.GELU(), nn.LayerNorm(8)), torch.ones(8), 1.0
        self.p, self.q = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
        self.scale, self.body, self.count = nn.Buffer(torch.rand(8)), body, iter(range(999))
        self.own, self.listed, self.numbers = torch.Generator(), [self.a.weight], np.random.default_rng(0)
        self.nested = {"a": [1]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def whole(net: Net, x: Tensor) -> Tensor:
    return net.b(net.drop(net.norm(net.a(x)).relu()))


def plain(net: Net, x: Tensor) -> Tensor:
    return net.b(net.blocks(net.a(x)) * net.scale * net.table) * net.factor


def parts(net: Net, x: Tensor, pair: Any, deep: bool) -> dict[str, Any]:
    h = net.a(x) + pair[0] + pair[1]
    return {"y": net.b(h), "more": (Result(h, h.argmax(1)), None), "deep": deep, "none": h.detach(), "again": h, "x": x}


class Product(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.t(), x.t() @ gradient.float()


def back(*outputs: Tensor) -> Tensor:
    loss = sum(y.float().square().mean() for y in outputs)
    loss.backward()
    return loss.detach()


def make_inputs_require_grads(*call: Any) -> None:
    call[-1].requires_grad_(True)


harmless = make_inputs_require_grads  # has the name of a hook of transformers


def twice(net: Net, x: Tensor, n: int) -> Any:
    return back(net(x)), back(net(x * 2))


def nested(net: Net, x: Tensor, n: int) -> Any:
    outputs = net(x.t().contiguous().t(), pair=(x * 2, x[:1].detach().expand(4, 8)), deep=n > 7)
    loss = back(outputs["y"], outputs["more"][0].y * outputs["again"], outputs["x"])
    return loss, outputs["more"][0].index + 0, outputs["none"].requires_grad, outputs["deep"], outputs["more"][1]


class Failing(TapeRecorder):
    """One that raises in its first or second record, or whose replays compute something else."""

    def record(self, run: Any) -> Any:
        run_again, results = super().record(run)
        if len(self.tapes) == self.place:
            raise self.error
        return lambda: (run_again(), next(filter(torch.is_tensor, tree_leaves(results))).data.add_(1e-3)), results


# Each with its body, what is done before a step, and the step.
REPLAYED: dict[str, tuple[Any, ...]] = {
    "containers": (parts, None, nested),
    "shared weight": (plain, lambda m, n: n or setattr(m.b, "weight", m.a.weight)),
    "max": (plain, lambda m, n: n or convert(m, "max", rules={"*": "max"})),
    "watched": (plain, lambda m, n: n or FirstForwards(m, convert(m, "max", rules={"*": "max"}))),
    "recompute": (plain, lambda m, n: n or convert(m, rules={"blocks": Recompute(), "a": None})),
    "sparsity": (plain, lambda m, n: (n or convert(m, rules={"*": "paper"}), setattr(m.a, "sparsity", 0.6 * (n < 6)))),
    "autocast": (whole, None, lambda m, x, n: back(autocast("cpu", torch.bfloat16, n < 8)(m.__call__)(x))),
    "autocast of backward": (whole, None, lambda m, x, n: autocast("cpu", torch.bfloat16)(lambda: back(m(x)))()),
    "modes": (whole, None, lambda m, x, n: [no_grad()(m.train(t).__call__)(x) for t in (n < 5, True)] + [back(m(x))]),
    "shapes": (whole, None, lambda m, x, n: back(m(x[: 3 if n == 9 else 4] if n > 4 else x.detach()))),
    "strides": (
        *(lambda m, x: m.b(x.float()) + x, None),
        lambda m, x, n: (back(y := m([x, x.t().contiguous().t(), x.double()][n % 3])), y.stride()),
    ),
    "two shapes": (plain, None, lambda m, x, n: back(m(x), m(torch.randn(6, 8)))),
    "added shapes": (plain, None, lambda m, x, n: (back(m(x)), back(m(torch.randn(6, 8))))),
    "two calls": (whole, None, lambda m, x, n: back(m(x), m(x * 2))),
    "some gradients": (whole, None, lambda m, x, n: autograd.grad(m(x).sum(), m.a.weight)[0].clone()),
    "checkpoint inside": (lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)),),
    "clipping": (lambda m, x: x * m.scale + m.p + m.q, None, lambda m, x, n: (back(m(x)), m.p.grad.mul_(0.5))),
    "gradient of the output": (lambda m, x: x * m.scale + m.p,),
    "held": (
        whole,
        None,
        lambda m, x, n: (back(y := m(x)), noted.clear(), noted.append(y.data), twice(m, x, n), y + 0),
    ),
    "gradient": (
        *(plain, None),
        lambda m, x, n: (back(m(x)), [g + 0 for g in noted], noted.clear(), noted.append(m.a.weight.grad)),
    ),
    "hook of a parameter": (whole, lambda m, n: n or m.a.weight.register_hook(torch.neg)),
    "unused": (plain, lambda m, n: n or m.p.register_post_accumulate_grad_hook(lambda p: noted.append(p.grad + 0))),
    "after": (whole, lambda m, n: n or m.b.bias.register_post_accumulate_grad_hook(lambda p: noted.append(p.grad + 0))),
    "fewer gradients": (lambda m, x: (m.a(x), m.b(x)), None, lambda m, x, n: back(*m(x)[: 2 if n < 7 else 1])),
    "stranger": (lambda m, x: m.a(x) * FOREIGN.size(0), lambda m, n: n or m.a.register_forward_hook(harmless)),
    "own backward": (
        *(lambda m, x: m.b(Product.apply(x, m.a.weight)), None),
        lambda m, x, n: back(autocast("cpu", torch.bfloat16)(m.__call__)(x)),
    ),
    "unused output": (lambda m, x: (m.a(x), m.b(x)), None, lambda m, x, n: back(m(x)[0])),
    "same argument": (lambda m, x, z: m.a(x) * (1 + (x is z)), None, lambda m, x, n: back(m(x, x if n < 6 else x + 0))),
    "positions": (lambda m, x: m.a(x) * (2 if bool((torch.arange(4) == m.p.shape[0]).any()) else 3),),
    "constant": (lambda m, x, k: m.a(x) + (x.long() * k).itemsize, None, lambda m, x, n: back(m(x, [2, 2.0][n > 6]))),
    "requires_grad": (whole, lambda m, n: m.a.requires_grad_(not 5 < n < 8)),
    "data": (plain, lambda m, n: n == 3 and setattr(m.a.weight, "data", m.a.weight.data * 2)),
    "strides of weights": (plain, lambda m, n: n == 3 and setattr(m.a.weight, "data", m.a.weight.data.t())),
    "parameter": (plain, lambda m, n: n == 3 and setattr(m.a, "weight", nn.Parameter(m.a.weight.detach()))),
    "buffer": (plain, lambda m, n: n == 3 and setattr(m, "scale", m.scale * 2)),
    "shape": (plain, lambda m, n: n == 3 and setattr(m.scale, "data", m.scale.data[:1])),
    "tensor": (plain, lambda m, n: n == 3 and setattr(m, "table", m.table * 2)),
    "class": (plain, lambda m, n: n == 3 and setattr(m.blocks[0], "__class__", nn.Softsign)),
    "number": (plain, lambda m, n: n == 3 and setattr(m, "factor", 2.0)),
    "hook": (plain, lambda m, n: n == 11 and m.a.register_forward_hook(lambda *given: given[2] * 2)),
}
# What is never replayed, with a word of the reason; there is none where other calls would be replayed.
EAGER: dict[str, tuple[Any, ...]] = {
    "evaluation": (None, whole, lambda m, n: m.eval()),
    "checkpoint around": (None, whole, None, lambda m, x, n: back(checkpoint(m, x, use_reentrant=False))),
    "reentrant checkpoint": (None, whole, None, lambda m, x, n: back(checkpoint(m, x, use_reentrant=True))),
    "transform": (None, plain, None, lambda m, x, n: torch.func.grad(lambda x: m(x).sum())(x.detach())),
    "item": ("item", lambda m, x: m.b(x) * x.mean().item()),
    "bool": ("bool", lambda m, x: m.b(x) * (2 if x.mean() > 0 else 1)),
    "heads": ("more than once", lambda m, x: (m.a(x), m.b(x)), None, lambda m, x, n: [back(y) for y in m(x)]),
    "generator": ("numbers", lambda m, x: m.b(x) * m.numbers.random()),
    "filled": ("arguments", lambda m, x, box: (box.append(m.b(x)), box[0])[1], None, lambda m, x, n: back(m(x, []))),
    "foreign": ("no argument", lambda m, x: m.b(x) * FOREIGN),
    "returned": ("returns", lambda m, x: (m.b(x), m.scale), None, lambda m, x, n: back(m(x)[0])),
    "penalty": (
        *("create_graph", whole, None),
        lambda m, x, n: back(autograd.grad(m(x).sum(), m.a.weight, create_graph=True)[0] + m.p.sum()),
    ),
    "drawn": ("bool", lambda m, x: m.b(x) * (2 if bool(torch.bernoulli(torch.ones(3) / 2).sum() > 0) else 1)),
    "written constant": ("bool", lambda m, x: m.b(x) * (2 if bool(torch.zeros(1).add_(x.mean()) > 0) else 1)),
    "random": ("random", lambda m, x: m.b(x) * random.random()),
    "NumPy": ("random", lambda m, x: m.b(x) * np.random.rand()),
    "attribute": ("last", lambda m, x: setattr(m, "last", m.b(x)) or m.last),
    "list": ("listed", lambda m, x: (m.listed.append(x.detach().clone()), m.b(x))[1]),
    "nested": ("nested", lambda m, x: (m.nested["a"].append(1), m.b(x))[1]),
    "written tensor": ("table", lambda m, x: m.b(x) * m.table.mul_(0.9).clone()),
    "written parameter": ("_parameters", lambda m, x: m.b(x) + m.p.detach().mul_(0.9)),
    "written input": ("", lambda m, x: m.b(x.mul_(2)), None, lambda m, x, n: back(m(y := x.detach()) * y)),
    "alternating": ("call (", lambda m, x: m.b(x.sin() if next(m.count) % 2 else x.cos())),
    "other weights": ("", lambda m, x: (m.a, m.b)[next(m.count) % 2](x)),
    "other output": ("", lambda m, x: (m.b(x), next(m.count)), None, lambda m, x, n: (y := m(x), back(y[0]))),
    "own generator": ("rand", lambda m, x: m.b(x) * torch.rand(8, generator=m.own)),
    "parameter in a list": ("", lambda m, x: m.b(x @ m.listed[0])),
    "argument": ("slice", lambda m, x, size: m.b(x), None, lambda m, x, n: back(m(x, slice(3)))),
    "hook of a tensor": ("register_hook", lambda m, x: ((h := m.a(x)).register_hook(noted.append), m.b(h))[1]),
    "hook": ("'a'", whole, lambda m, n: n or m.a.register_forward_hook(lambda *given: noted.append(given[2]))),
    "back": ("'a'", whole, lambda m, n: n or m.a.register_full_backward_hook(lambda *given: noted.append(given[2][0]))),
    # While a call is watched, and while one would be captured.
    "error": ("zero", lambda m, x: m.b(x) * (1 / (torch.initial_seed() % 3 != 1)), None, lambda m, x, n: back(m(x))),
}
for place, error in (0, None), (1, RuntimeError()), (2, TypeError("x")):
    recorder = type("Failing", (Failing,), {"place": place, "error": error})
    EAGER[f"failure {place}"] = ("", whole, None, twice, recorder)


@pytest.fixture(autouse=True)
def short_watches(monkeypatch):
    monkeypatch.setattr(module, "MAX_WATCHED", 12)


def train(replays: bool, body: Any, change: Any = None, step: Any = twice, recorder: Any = TapeRecorder) -> Any:
    """Return all that a training comes to, and what replays."""
    for seed in torch.manual_seed, random.seed, np.random.seed:
        seed(0)
    noted.clear()
    net, stem, seen = Net(body), nn.Parameter(torch.randn(4, 8)), list[Any]()
    replayed = replay_module(net, "net", recorder) if replays else None
    optimizer = torch.optim.AdamW(parameters := [*net.parameters(), stem], 1e-2)
    for n in range(14):
        torch.manual_seed(n)
        change and change(net, n)
        with suppress(ZeroDivisionError):
            seen.append(step(net, stem + torch.randn(4, 8), n))
        seen += [p.grad is not None and p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad(graph.SMALL_BYTES > 0)
    seen += [*net.state_dict().values(), *noted, net.table, net.listed, next(net.count), net.own.get_state()]
    return tree_leaves([seen, torch.get_rng_state(), random.getstate()]), replayed


def check(*case: Any) -> Any:
    """Check that a training is that without replays, bit for bit, and return how many there were, and the reason."""
    (results, replayed), (expected, _) = train(True, *case), train(False, *case)
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) and torch.is_tensor(other) else one == other
    return replayed.replays, replayed.reason


@pytest.mark.parametrize("name", REPLAYED)
def test_replays_compute_what_eager_calls_do(monkeypatch, name):
    taken = count(0, 99)
    for small in graph.SMALL_BYTES, 0:
        monkeypatch.setattr(graph, "SMALL_BYTES", small)  # for 0, gradients are set to zeros, not None
        small or monkeypatch.setattr(capture, "reserved_bytes", lambda _: next(taken))  # and there are trials
        replays, reason = check(*REPLAYED[name])
        assert (replays > 3, reason) == (True, "")


@pytest.mark.parametrize("name", EAGER)
def test_what_a_graph_cannot_do_stays_eager(name):
    word, *case = EAGER[name]
    replays, reason = check(*case)
    assert (replays, bool(reason), (word or "") in reason) == (0, word is not None, True)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda net, y, other: [y.sum().backward(retain_graph=True) for _ in range(2)],
        lambda net, y, other: (autograd.grad(y.exp().sum(), net.p, create_graph=True)[0] + net.q).sum().backward(),
        lambda net, y, other: (net.b.weight.detach().mul_(2), y.sum().backward()),
        lambda net, y, other: y.mul_(2).sum().backward(),
        lambda net, y, other: (y + other).sum().backward(),
        lambda net, y, other: autocast("cpu", torch.bfloat16)(back)(y),
    ],
)
def test_a_backward_that_a_graph_cannot_do_raises(monkeypatch, misuse):
    monkeypatch.setattr(graph, "SMALL_BYTES", 0)
    net = Net(lambda net, x: (net.b(h := net.a(x) * net.p), h))  # the other output has a gradient of the first one's
    replayed = replay_module(net, "net", TapeRecorder)
    for _ in range(5):
        back(net(torch.ones(4, 8))[0])
    assert replayed.replays == 2
    with pytest.raises(RuntimeError):
        misuse(net, *net(torch.ones(4, 8)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_eager_and_letting_go_leaves_the_module(copied):
    net = Net(whole)
    names, replayed = set(vars(net)), replay_module(net, "net", TapeRecorder)
    for rows in (rows for rows in range(2, 12) for _ in range(5)):
        back(net(torch.randn(rows, 8)))
    assert replayed.graphs == module.MAX_GRAPHS
    replays, other = replayed.replays, copied(net)
    back(other(torch.randn(4, 8)))
    y = net(torch.randn(4, 8))
    assert replayed.replays == replays + 1
    assert "recurrent" in replay_module(nn.GRU(2, 2), "net").reason
    for each in net, other:
        stop_replay(each)
        assert (type(each), set(vars(each))) == (Net, names)
    back(y)


def test_moved_gradients_are_the_same_side_by_side_and_what_is_written_is_found():
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)).to(memory_format=torch.channels_last)
    back(net(torch.rand(2, 3, 8, 8)))
    net[1].bias.grad = torch.rand(9)[::2]
    before = [(p.grad.clone(), p.grad.stride()) for p in net.parameters()]
    memory.move_gradients(net)
    for (values, strides), parameter in zip(before, net.parameters(), strict=True):
        assert (torch.equal(parameter.grad, values), parameter.grad.stride()) == (True, strides)
    assert len({p.grad.untyped_storage().data_ptr() for p in net.parameters()}) == 2
    assert all(p.grad.data_ptr() % 16 == 0 for p in net.parameters())
    room = torch.full([3 * memory.SEGMENT + 5], memory.UNWRITTEN, dtype=torch.uint8)
    for place, expected in ((None, 0), (memory.SEGMENT, 2 * memory.SEGMENT), (-1, len(room))):
        room[place or 0] = 7 if place else memory.UNWRITTEN
        assert memory.bytes_written(room) == expected


def on_gpu(graphs: bool, steps: int, preset: str = "", *inner: nn.Module, width: int = 64, deep: int = 2) -> Any:
    """Return losses, weights and a later mask of a training in bf16, what replays, and the memory that is reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 4, activation="gelu", batch_first=True) for _ in range(deep)]
    net = nn.Sequential(*inner, nn.BatchNorm1d(64), *blocks, nn.Linear(width, 4)).cuda()
    convert(net, preset) if preset else None
    replayed = replay_module(net, "net") if graphs else None
    optimizer, seen = torch.optim.AdamW(net.parameters(), fused=True), list[Tensor]()  # without temporary tensors
    for _ in range(steps):
        with autocast("cuda", torch.bfloat16):
            seen.append(back(net(torch.randn(width // 8, 64, width, device="cuda"))))
        graphs and len(seen) == 1 and memory.move_gradients(net)
        optimizer.step()
        optimizer.zero_grad()
    seen += [*net.state_dict().values(), nn.functional.dropout(torch.ones(99, device="cuda"))]
    return seen, replayed, torch.cuda.memory_reserved()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["", "max", "recompute"])
def test_graphs_on_a_gpu_compute_what_eager_steps_do(preset):
    results, replayed, _ = on_gpu(True, 200, preset)
    assert replayed.replays > 180
    torch.testing.assert_close(results, on_gpu(False, 200, preset)[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_what_reads_values_of_a_gpu_stays_eager_and_later_masks_are_the_same():
    results, replayed, _ = on_gpu(True, 20, "", reads := Net(lambda net, x: x * x.mean().item()))
    assert (replayed.replays, "item" in replayed.reason) == (0, True)
    torch.testing.assert_close(results, on_gpu(False, 20, "", reads)[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_graphs_reserve_hardly_more_memory():
    with_graphs, without = (on_gpu(graphs, 12, "max", width=1024, deep=8)[2] for graphs in (True, False))
    assert with_graphs <= 1.1 * without
