"""Modules whose calls are replayed train as eager ones do, and are eager where a graph would do something else."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections import namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, autocast, autograd, nn, no_grad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Recompute, convert, replay
from lightning_actprune.replay import let_go, replay_module
from tests.support.tape import TapeRecorder

Result = namedtuple("Result", "y index")
noted: list[Any] = []


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)
        self.blocks, self.table, self.factor = nn.Sequential(nn.GELU(), nn.LayerNorm(8)), torch.ones(8), 1.0
        self.p, self.q = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
        self.scale, self.body, self.count = nn.Buffer(torch.rand(8)), body, iter(range(999))
        self.own, self.listed = torch.Generator(), [self.a.weight]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def whole(net: Net, x: Tensor) -> Tensor:
    return net.b(net.drop(net.norm(net.a(x)).relu()))


def plain(net: Net, x: Tensor) -> Tensor:
    return net.b(net.blocks(net.a(x)) * net.scale * net.table) * net.factor


def parts(net: Net, x: Tensor, pair: Any, deep: bool) -> dict[str, Any]:
    h = net.a(x) + pair[0] + pair[1]
    return {"y": net.b(h), "more": (Result(h, h.argmax(1)), None), "deep": deep, "none": h.detach(), "again": h, "x": x}


def back(*outputs: Tensor) -> Tensor:
    loss = sum(y.float().square().mean() for y in outputs)
    loss.backward()
    return loss.detach()


def twice(net: Net, x: Tensor, n: int) -> Any:
    return back(net(x)), back(net(x * 2))


class Failing(TapeRecorder):
    """One that raises in its first or second record, or whose replays compute something else."""

    def record(self, run: Any) -> Any:
        run_again, results = super().record(run)
        if len(self.tapes) == self.place:
            raise self.error
        return lambda: (run_again(), next(filter(torch.is_tensor, tree_leaves(results))).data.add_(1e-3)), results


# Each with its body, what is done before a step, and the step.
REPLAYED: dict[str, tuple[Any, ...]] = {
    "containers": (
        *(parts, None),
        lambda net, x, n: (
            (o := net(x.t().contiguous().t(), pair=(x * 2, x[:1].detach().expand(4, 8)), deep=n > 7))
            and (
                back(o["y"], o["more"][0].y * o["again"], o["x"]),
                o["none"].requires_grad,
                o["deep"],
                o["more"][0].index + 0,
            )
        ),
    ),
    "shared weight": (plain, lambda net, n: n or setattr(net.b, "weight", net.a.weight)),
    "max": (plain, lambda net, n: n or convert(net, "max", rules={"*": "max"})),
    "recompute": (plain, lambda net, n: n or convert(net, rules={"blocks": Recompute(), "a": None})),
    "sparsity": (
        *(plain, lambda net, n: (n or convert(net, rules={"*": "paper"}), setattr(net.a, "sparsity", 0.6 * (n < 6)))),
    ),
    "autocast": (whole, None, lambda net, x, n: back(autocast("cpu", torch.bfloat16, n < 8)(net.__call__)(x))),
    "modes": (
        *(whole, None),
        lambda net, x, n: [no_grad()(net.train(t).__call__)(x) for t in (n % 2 == 0, True)] + [back(net(x))],
    ),
    "shapes": (whole, None, lambda net, x, n: back(net(x[: 3 if n == 7 else 4] if n < 9 else x.detach()))),
    "two shapes": (plain, None, lambda net, x, n: back(net(x), net(torch.randn(6, 8)))),
    "two calls": (whole, None, lambda net, x, n: back(net(x), net(x * 2))),
    "some gradients": (whole, None, lambda net, x, n: autograd.grad(net(x).sum(), net.a.weight)[0].clone()),
    "checkpoint inside": (lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=False)),),
    "clipping": (
        *(lambda net, x: x * net.scale + net.p + net.q, None),
        lambda net, x, n: (back(net(x)), torch._foreach_mul_([net.p.grad, net.q.grad], 0.5)),
    ),
    "gradient of the output": (lambda net, x: x * net.scale + net.p,),
    "held": (
        *(whole, None),
        lambda net, x, n: (
            (back(y := net(x)), noted.clear(), noted.extend((y.detach(), net.a.weight.grad)))
            and (back(net(x * 2)), [tensor.clone() for tensor in noted])
        ),
    ),
    "hook of a parameter": (whole, lambda net, n: n or net.a.weight.register_hook(torch.neg)),
    "accumulated": (
        whole,
        lambda net, n: n or net.b.weight.register_post_accumulate_grad_hook(lambda p: noted.append(p.grad + 0)),
    ),
    "unused output": (lambda net, x: (net.a(x), net.b(x)), None, lambda net, x, n: back(net(x)[0])),
    "arguments": (
        *(lambda net, x, z, k: net.a(x) * (2 if x is z else 1) + (x.long() * k).is_floating_point(), None),
        lambda net, x, n: back(net(x, x if n < 6 else x + 0, 2 if n < 10 else 2.0)),
    ),
    "requires_grad": (whole, lambda net, n: net.a.requires_grad_(not 5 < n < 8)),
    "data": (plain, lambda net, n: n == 3 and setattr(net.a.weight, "data", net.a.weight.data * 2)),
    "strides": (plain, lambda net, n: n == 3 and setattr(net.a.weight, "data", net.a.weight.data.t())),
    "parameter": (plain, lambda net, n: n == 3 and setattr(net.a, "weight", nn.Parameter(net.a.weight.detach()))),
    "buffer": (plain, lambda net, n: n == 3 and setattr(net, "scale", net.scale * 2)),
    "tensor": (plain, lambda net, n: n == 3 and setattr(net, "table", net.table * 2)),
    "number": (plain, lambda net, n: n == 3 and setattr(net, "factor", 2.0)),
    "hook": (plain, lambda net, n: n == 11 and net.a.register_forward_hook(lambda *given: given[2] * 2)),
}
# What is never replayed, with a word of the reason; there is none where other calls would be replayed.
EAGER: dict[str, tuple[Any, ...]] = {
    "evaluation": (None, whole, lambda net, n: net.eval()),
    "checkpoint around": (None, whole, None, lambda net, x, n: back(checkpoint(net, x, use_reentrant=False))),
    "reentrant checkpoint": (None, whole, None, lambda net, x, n: back(checkpoint(net, x, use_reentrant=True))),
    "transform": (None, plain, None, lambda net, x, n: torch.func.grad(lambda x: net(x).sum())(x.detach())),
    "item": ("item", lambda net, x: net.b(x) * x.mean().item()),
    "bool": ("bool", lambda net, x: net.b(x) * (2 if x.mean() > 0 else 1)),
    "random": ("random", lambda net, x: net.b(x) * random.random()),
    "NumPy": ("random", lambda net, x: net.b(x) * np.random.rand()),
    "attribute": ("last", lambda net, x: setattr(net, "last", net.b(x)) or net.last),
    "list": ("listed", lambda net, x: (net.listed.append(x.detach().clone()), net.b(x))[1]),
    "written tensor": ("table", lambda net, x: net.b(x) * net.table.mul_(0.9).clone()),
    "written parameter": ("_parameters", lambda net, x: net.b(x) + net.p.detach().mul_(0.9)),
    "written input": ("", lambda net, x: net.b(x.mul_(2)), None, lambda net, x, n: back(net(y := x.detach()) * y)),
    "alternating": ("", lambda net, x: net.b(x.sin() if next(net.count) % 2 else x.cos())),
    "other weights": ("", lambda net, x: (net.a, net.b)[next(net.count) % 2](x)),
    "other output": ("", lambda net, x: (net.b(x), next(net.count)), None, lambda net, x, n: (y := net(x), back(y[0]))),
    "own generator": ("rand", lambda net, x: net.b(x) * torch.rand(8, generator=net.own)),
    "parameter in a list": ("", lambda net, x: net.b(x @ net.listed[0])),
    "argument": ("slice", lambda net, x, size: net.b(x), None, lambda net, x, n: back(net(x, slice(3)))),
    "hook of a tensor": ("register_hook", lambda net, x: ((h := net.a(x)).register_hook(noted.append), net.b(h))[1]),
    "hook": ("'a'", whole, lambda net, n: n or net.a.register_forward_hook(lambda *given: noted.append(given[2]))),
    "backward hook": (
        *("'a'", whole),
        lambda net, n: n or net.a.register_full_backward_hook(lambda *given: noted.append(given[2][0])),
    ),
    # While a call is watched, and while one would be captured.
    "error": (
        *("zero", lambda net, x: net.b(x) * (1 / (torch.initial_seed() not in (1, 4))), None),
        lambda net, x, n: back(net(x)),
    ),
}
for place, error in (0, None), (1, RuntimeError()), (2, TypeError("x")):
    recorder = type("Failing", (Failing,), {"place": place, "error": error})
    EAGER[f"failure {place}"] = ("", whole, None, twice, recorder)


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
        optimizer.zero_grad(replay.SMALL_BYTES > 0)
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
    for small in replay.SMALL_BYTES, 0:
        monkeypatch.setattr(replay, "SMALL_BYTES", small)  # and gradients are set to zeros, not None
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
        lambda net, y: [y.sum().backward(retain_graph=True) for _ in range(2)],
        lambda net, y: autograd.grad(y.exp().sum(), net.p, create_graph=True)[0].sum().backward(),
        lambda net, y: (net.b.weight.detach().mul_(2), y.sum().backward()),
    ],
)
def test_a_backward_that_a_graph_cannot_do_raises(misuse):
    net = Net(lambda net, x: net.b(net.a(x) * net.p))
    replayed = replay_module(net, "net", TapeRecorder)
    for _ in range(5):
        back(net(torch.ones(4, 8)))
    assert replayed.replays == 2
    with pytest.raises(RuntimeError):
        misuse(net, net(torch.ones(4, 8)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_eager_and_letting_go_leaves_the_module(copied):
    net = Net(whole)
    names, replayed = set(vars(net)), replay_module(net, "net", TapeRecorder)
    for rows in (rows for rows in range(2, 12) for _ in range(5)):
        back(net(torch.randn(rows, 8)))
    assert replayed.graphs == replay.MOST_GRAPHS
    y, replays, other = net(torch.randn(4, 8)), replayed.replays, copied(net)
    back(other(torch.randn(4, 8)))
    assert replayed.replays == replays
    for each in net, other:
        let_go(each)
        assert (type(each), set(vars(each))) == (Net, names)
    back(y)


def on_gpu(graphs: bool, steps: int, preset: str = "", *inner: nn.Module, width: int = 64) -> Any:
    """Return losses, weights and a later mask of a training in bf16, what replays, and the memory that is reserved."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 4, activation="gelu", batch_first=True) for _ in range(2)]
    net = nn.Sequential(*inner, *blocks).cuda()
    convert(net, preset) if preset else None
    replayed = replay_module(net, "net") if graphs else None
    optimizer, seen = torch.optim.AdamW(net.parameters()), list[Tensor]()
    for _ in range(steps):
        with autocast("cuda", torch.bfloat16):
            seen.append(back(net(torch.randn(16, 64, width, device="cuda"))))
        optimizer.step()
        optimizer.zero_grad()
    seen += [*net.parameters(), nn.functional.dropout(torch.ones(99, device="cuda"))]
    return seen, replayed, torch.cuda.memory_reserved()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["", "max", "recompute"])
def test_graphs_on_a_gpu_compute_what_eager_steps_do(preset):
    results, replayed, _ = on_gpu(True, 20, preset)
    assert replayed.replays > 10
    torch.testing.assert_close(results, on_gpu(False, 20, preset)[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_what_reads_values_of_a_gpu_stays_eager_and_later_masks_are_the_same():
    results, replayed, _ = on_gpu(True, 20, "", reads := Net(lambda net, x: x * x.mean().item()))
    assert (replayed.replays, "item" in replayed.reason) == (0, True)
    torch.testing.assert_close(results, on_gpu(False, 20, "", reads)[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_graphs_reserve_hardly_more_memory():
    assert on_gpu(True, 12, width=1024)[2] <= 1.15 * on_gpu(False, 12, width=1024)[2]
