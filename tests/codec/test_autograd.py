"""The frame of every autograd function: which mode it says it is in, and that second derivatives are refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lightning_actprune.codec.autograd import applied, no_view, once_differentiable

modes: list[tuple[str, bool]] = []
"""What the function below was told, where and whether it is plain eager mode."""


def note(where: str, eager: bool) -> None:
    if not torch.compiler.is_compiling():  # which lets nobody write to what is outside
        modes.append((where, eager))


class Product(torch.autograd.Function):
    """``x w``, whose weight gradient is that of twice the product: so that it shows who has computed it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, name: str, eager: bool) -> Tensor:
        note("forward", eager)
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    @once_differentiable("a product")
    def backward(ctx: Any, eager: bool, grad: Tensor) -> tuple[Tensor, Tensor]:
        note("backward", eager)
        x, w = ctx.saved_tensors
        return grad * w, 2 * grad * x  # the frame adds a None for `name` and one for `eager`


product = applied(Product)


@pytest.fixture(autouse=True)
def _forget() -> None:
    modes.clear()
    torch._dynamo.reset()


def leaves() -> tuple[Tensor, Tensor]:
    return torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)


def test_plain_eager_mode_and_what_ends_it():
    """Dispatch modes, and of backward batched gradients."""
    x, w = leaves()
    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        y = product(x, w, "name")
    assert seen == [x.data_ptr(), w.data_ptr()]  # hooks of others see what is saved
    grads = torch.autograd.grad(y.sum(), (x, w))
    torch.testing.assert_close(grads, (w.detach(), 2 * x.detach()))
    with BaseTorchDispatchMode():
        y = product(x, w, "name")
    torch.autograd.grad(y.sum(), (x, w))
    with BaseTorchDispatchMode():
        torch.autograd.grad(product(x, w, "name").sum(), (x, w))
    grads = torch.randn(2, 3)
    (found,) = torch.autograd.grad(product(x, w, "name"), x, grads, is_grads_batched=True)
    torch.testing.assert_close(found, grads * w.detach())
    assert [eager for _, eager in modes] == [True, True, False, True, False, False, True, False]
    assert [where for where, _ in modes] == 4 * ["forward", "backward"]


class Rows(torch.autograd.Function):
    """Twice the values of ``x``, as rows: a view where they are made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eager: bool) -> Tensor:
        ctx.shape = x.shape
        y = (2 * x).view(-1, x.shape[-1])
        if not torch.compiler.is_compiling():
            addresses.append(y.data_ptr())
        return no_view(y)

    @staticmethod
    @once_differentiable("rows")
    def backward(ctx: Any, eager: bool, grad: Tensor) -> tuple[Tensor]:
        return (2 * grad.reshape(ctx.shape),)


rows_of = applied(Rows)
addresses: list[int] = []


@pytest.mark.parametrize("mode", ["plain", "watched", "compiled"])
def test_a_result_may_be_written_to_and_is_no_copy(mode):
    x = torch.randn(2, 4, 3, requires_grad=True)
    call = torch.compile(rows_of, backend="aot_eager", fullgraph=True) if mode == "compiled" else rows_of
    with BaseTorchDispatchMode() if mode == "watched" else nullcontext():
        y = call(x)
    assert mode == "compiled" or y.data_ptr() == addresses[-1]
    y[:, 0] *= 3
    y.relu_()
    (grad,) = torch.autograd.grad(y.sum(), x)
    right = 2 * torch.tensor([3, 1, 1]) * (x > 0)
    assert torch.equal(grad, right)


def test_second_derivatives_are_refused_at_once():
    """Asked for ``x`` alone, autograd would run nothing of ours afterwards, so an error then would come too late."""
    x, w = leaves()
    for wanted in (x, (x, w)):
        with pytest.raises(RuntimeError, match=r"a product.*HINT.*rules.*create_graph=True"):
            torch.autograd.grad(product(x, w, "name").sum(), wanted, create_graph=True)
