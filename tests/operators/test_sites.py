"""Which operation saves a tensor, what is remembered of its site; masks and outliers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.codec.outliers import CHECKED_EVERY, loses_values
from lightning_actprune.config import Keep
from lightning_actprune.operators.readers import is_masked
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compression import Runs, activation, gradients


def through(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a function of a linear layer's output, moved away from zero."""
    return Runs(lambda x, w: function(F.linear(x, w).relu().add(0.1)), (64, 64))


NOT_KNOWN = {
    "pow": lambda x: x.pow(0.5),
    "pow with a tensor": lambda x: x.pow(torch.tensor([1.7])),
    "xlogy": lambda x: torch.xlogy(x, x),
    "lgamma": torch.lgamma,
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "atan2": lambda x: torch.atan2(x, x),
    "linalg_vector_norm": lambda x: x.norm(p=0.5, dim=-1),
    "sin": lambda x: torch.sin(30 * x),
    "abs": lambda x: (x - 0.5).abs(),
    "amax": lambda x: x.amax(-1),
    "clamp": lambda x: x.clamp(max=0.5),
    "div": lambda x: x / (x.square() + 0.01),
    "var": lambda x: (x + 1000).var(-1),
    "mse_loss": lambda x: F.mse_loss(x + 1000, x.detach() + 1000, reduction="none"),
    "prelu_kernel": lambda x: F.prelu(x - 0.5, torch.tensor(0.25)),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_an_operation_saves_that_is_not_known_stays_as_it_is_and_is_listed(name):
    x = torch.randn(32, 64, 64)
    dense, module = through(NOT_KNOWN[name]), through(NOT_KNOWN[name])
    module.load_state_dict(dense.state_dict())
    with SavedTensorCompression(module, min_values=256) as saving:
        gradients_of = []
        for net in (dense, module, module):
            net.zero_grad()
            torch.manual_seed(0)
            net(x).sum().backward()
            gradients_of.append(net.weights[0].grad.clone())
    if name != "div":  # which squares a value, too
        assert all(torch.equal(gradients_of[0], other) for other in gradients_of[1:])
    row = {row.operation: row for row in saving.left}[name.split(" ")[0]]
    assert row.count >= 2
    assert row.nbytes >= 2 * 4 * 32 * 64
    assert row.reason


def skip(x: Tensor) -> Tensor:
    return x


def cumprod(x: Tensor) -> Tensor:
    return x.cumprod(-1)


OTHERS: dict[str, tuple[list[Callable[[Tensor], Tensor]], list[Callable[[Tensor], Tensor]]]] = {
    "another operation": ([torch.square], [torch.sin]),
    "another exponent": ([torch.square], [lambda x: x.pow(4)]),
    "one less": ([torch.square, torch.sin, torch.square], [skip, torch.sin, torch.square]),
    "one more": ([skip, torch.square, F.gelu], [cumprod, torch.square, F.gelu]),
    "a mask": ([skip, F.gelu, torch.square], [lambda x: x.masked_fill(x > 2, -1e4), F.gelu, torch.square]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_forward_that_skips_or_changes_operations_is_no_less_exact_for_that(name: str):
    """Ordinals shift then: no operation may read fewer bits than where all forwards are alike, and none may fail."""
    x, now = torch.randn(32, 64, 64), list[Callable[[Tensor], Tensor]]()
    model = nn.Sequential(Runs(lambda x, w: reduce(lambda x, operation: operation(x), now, F.linear(x, w)), (64, 64)))

    def run(operations: list[Callable[[Tensor], Tensor]]) -> list[Tensor]:
        now[:] = operations
        return gradients(model, x)

    def hooks() -> SavedTensorCompression:
        return SavedTensorCompression(model, Keep(bits=3), min_values=256)

    errors = []
    for operations in OTHERS[name]:
        exact = run(operations)
        with hooks():
            alike = [run(operations) for _ in range(3)][-1]
        errors.append([((a - b).norm(), b) for a, b in zip(alike, exact, strict=True)])
    # New sites come where none are expected any more, and then in turns with known ones.
    with hooks() as saving:
        for kind in (*[0] * 18, *[1] * 3, 0, 1, 0):
            for found, (error, exact) in zip(run(OTHERS[name][kind]), errors[kind], strict=True):
                assert (found - exact).norm() <= 1.001 * error
    assert saving.rows


def test_operations_may_be_added_and_taken_out_by_name():
    x = torch.randn(32, 64, 64)
    for function, operations, rows in (
        (torch.sin, {"sin": 8}, 1),
        (torch.sin, {}, 0),
        (torch.square, {"pow": None}, 0),
        (torch.square, {"pow": 4}, 1),
    ):
        module = through(function)
        with SavedTensorCompression(module, min_values=256, operations=operations) as saving:
            for _ in range(2):
                module(x).sum().backward()
        assert (len(saving.rows), len(saving.left)) == (rows, 1 - rows)
        if operations.get("pow") == 4:
            assert saving.rows[0].stored_bytes == 2 * 32 * 64 * 64 // 32 * (32 // 2 + 2)
    with pytest.raises(ValueError, match="got 5"):
        SavedTensorCompression(module, operations={"sin": 5})


@pytest.mark.parametrize("fill", [-1e2, torch.finfo(torch.float32).min])
def test_masked_scores_stay_as_they_are(fill: float):
    def run(x: Tensor, scale: Tensor, qkv: Tensor) -> Tensor:
        q, k, v = (x @ qkv).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / 4).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), fill) * scale.abs()
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    module, x = Runs(run, (4, 1, 1), (64, 192)), torch.randn(8, 64, 64, requires_grad=True)
    expected = gradients(module, x, lambda y: y.square().mean())
    with SavedTensorCompression(module, min_values=256, parameter_bits=4) as saving:
        for _ in range(2):
            found = gradients(module, x, lambda y: y.square().mean())
            for gradient, exact in zip(found[:2], expected, strict=False):  # of input and scale
                assert (gradient - exact).norm() <= 0.002 * exact.norm()
    assert "mask" in {row.reason for row in saving.left}.pop()


def with_outliers(x: Tensor) -> Tensor:
    return x.detach().index_fill(-1, torch.tensor([3]), -1e9).requires_grad_()


def test_outliers_that_come_later_are_found():
    module, x = through(torch.square), torch.randn(32, 64, 64, requires_grad=True)
    masked = with_outliers(x)
    exact = [torch.autograd.grad(module(given).sum(), given)[0] for given in (x, masked)]
    with SavedTensorCompression(module, min_values=256) as saving:
        for _ in range(3):
            module(x).sum().backward()
        assert saving.left == []
        with pytest.warns(UserWarning, match="operation:pow"):
            y = module(masked)  # the fourth
        assert torch.equal(torch.autograd.grad(y.sum(), masked)[0], exact[1])
        assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], exact[0])
        assert [(row.operation, row.count) for row in saving.left] == [("pow", 2)]
    ((site, decision),) = saving.decisions.sites.items()
    assert site.operation == "pow"
    assert decision.bits == 0


def test_outliers_are_looked_for_now_and_then():
    """And in the first forward of a resumed training, whose decisions are older."""
    module, x = through(torch.square), torch.randn(4, 64, requires_grad=True)
    with SavedTensorCompression(module, min_values=256) as saving:
        with warnings.catch_warnings(action="error"):
            for _ in range(2 * CHECKED_EVERY - 2):
                module(x)
            module(with_outliers(x))  # the forward before the one that looks
        state = saving.decisions.state_dict()
        with pytest.warns(UserWarning, match="outliers"):
            module(with_outliers(x))
    with SavedTensorCompression(module, min_values=256) as resumed:
        resumed.decisions.load_state_dict(state)
        with pytest.warns(UserWarning, match="outliers"):
            module(with_outliers(x))


class Leaves(nn.Module):
    """Returns, or leaves somewhere, what is behind its operations."""

    def __init__(self, leave: Callable[[nn.Module, list[Any], Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.leave, self.own = nn.Parameter(torch.ones(64)), leave, []

    def forward(self, x: Tensor, given: list[Any]) -> Any:
        return self.leave(self, given, x * self.weight)


Row, Slots = make_dataclass("Row", ["y"]), make_dataclass("Slots", ["y"], slots=True)
NOWHERE: list[Tensor] = []
LEAVES = {
    "dataclass": lambda module, given, y: Row(Row(y)),
    "object": lambda module, given, y: SimpleNamespace(rows=[{"y": y}]),
    "slots": lambda module, given, y: Slots(y),
    "attribute": lambda module, given, y: setattr(module, "kept", y),
    "own list": lambda module, given, y: module.own.append(y),
    "given list": lambda module, given, y: given.append(y),
    "nowhere": lambda module, given, y: NOWHERE.append(y),  # which no module returns
}


@pytest.mark.parametrize("leaves", LEAVES)
def test_operations_are_known_behind_outputs_of_any_shape(leaves: str):
    model = Leaves(LEAVES[leaves])
    with SavedTensorCompression(model, min_values=256) as saving:
        for _ in range(2):
            model(activation(), [])
    assert [(row.fqn, row.count) for row in saving.rows] == [("(root)", 2)] * (leaves != "nowhere")
    assert [(row.operation, row.count) for row in saving.left] == [("unknown", 2)] * (leaves == "nowhere")
    if leaves == "nowhere":
        NOWHERE[0].sum().backward()


def test_what_is_read_before_its_module_returns_is_exact():
    def penalty(x: Tensor) -> Tensor:
        loss = (x * x).sum()
        return loss + torch.autograd.grad(loss, x, retain_graph=True)[0].sum()

    model, x = Runs(penalty), activation().detach().requires_grad_()
    with SavedTensorCompression(model, min_values=256):
        model(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=0)


def scales() -> nn.Module:
    return Runs(lambda x, gamma: x * gamma, (64,))


def test_each_of_several_scopes_decides_in_its_own_first_forward():
    """Where a model computes its own loss, each of its children is a scope."""
    model = nn.Sequential(nn.Identity(), scales(), nn.Identity(), scales(), nn.Identity())
    with SavedTensorCompression(model, min_values=256, loss_inside=True) as saving:
        for count in (1, 2):
            model(activation()).sum().backward()
            assert [(row.fqn, row.count) for row in saving.rows] == [("1", count), ("3", count)]
    assert saving.left == []


def test_what_is_saved_in_some_forwards_alone_is_decided_in_the_second_of_them_at_the_latest():
    module = nn.Sequential(scales())
    with SavedTensorCompression(module, min_values=256) as saving:
        for trained, count in ((False, 0), (True, 1), *[(False, 1)] * 20, (True, 2)):
            module.requires_grad_(trained)
            module(activation() if trained else activation().detach())
            assert sum(row.count for row in saving.rows) == count
    module = nn.Sequential(scales())
    with SavedTensorCompression(module, min_values=256) as saving:
        for trained, count in (*[(False, 0)] * 20, (True, 0), (False, 0), (True, 1)):
            module.requires_grad_(trained)
            module(activation() if trained else activation().detach())
            assert sum(row.count for row in saving.rows) == count


def test_what_was_decided_before_a_checkpoint_is_not_decided_again():
    """Nor what is there for the first time: that is left as it is once, as in the training that was not stopped."""
    model, x = nn.Sequential(scales(), scales()), activation()
    x.data[0, 0, 0] = 1e6
    states = []
    for at_first in (x, activation()):
        with SavedTensorCompression(model, min_values=256) as saving:
            model(at_first)
            states.append(saving.decisions.state_dict())
            assert len(saving.rows) == (0 if at_first is x else 2)
    assert states == json.loads(json.dumps(states))
    for state, count in zip(states, (0, 2), strict=True):
        with SavedTensorCompression(model, min_values=256) as saving:
            saving.decisions.load_state_dict(state)
            model(activation())
            assert sum(row.count for row in saving.rows) == count
            assert saving.decisions.state_dict() == state | {"quiet": {"(root)": 1}}
    sites = [row for row in state["sites"] if row[0] == "0"]
    with SavedTensorCompression(model, min_values=256) as saving:
        saving.decisions.load_state_dict({"sites": sites, "quiet": {"(root)": 16}})
        for names in (["0"], ["0", "1"]):
            model(activation())
            assert [row.fqn for row in saving.rows] == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outliers_that_take_all_steps_are_found(dtype: torch.dtype):
    x = torch.randn(2, 8, 64).to(dtype)
    relu, heavy = x.relu(), torch.distributions.StudentT(2.0).sample((2, 8, 64)).to(dtype)
    for usual in (x, x + 100, 1e-4 * x, relu, relu[..., :40], heavy, torch.zeros_like(x)):
        assert not loses_values(usual, 32)
    for value in (-1e4, -1e9, torch.finfo(dtype).min, -torch.inf, torch.nan):
        masked = x.clone()
        masked[1, 5, 32:44] = value
        assert loses_values(masked, 32)
        assert not loses_values(masked[:1], 32)
    one = x.clone()
    one[0, 0, 0] = 1000.0
    assert loses_values(one, 32)


def test_a_mask_is_found():
    x, m = torch.randn(4, 4, requires_grad=True), torch.eye(4, dtype=torch.bool)
    filled = x.masked_fill(m, 0)
    masked = filled, torch.where(m, x, 0.0), x.index_fill(0, torch.tensor([0]), 0.0), x + filled
    for y in (*masked, (2 * filled.mT.half() - 1).unsqueeze(0) / 3):
        assert is_masked(y)
        assert not is_masked(y.detach())
    for y in (x * m, filled.softmax(-1), filled @ x, x):
        assert not is_masked(y)
