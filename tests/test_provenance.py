"""Where saved tensors come from: an operation's own result, a weight, or an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.provenance import is_own_result, is_weight

WIDTH = 16


def asked(question: Callable[[Tensor], Any], run: Callable[[], Any]) -> list[tuple[int, Any]]:
    """Return the storage address of everything that ``run`` saves and has a history, with the answer to a question."""
    answers = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            answers.append((tensor.untyped_storage().data_ptr(), question(tensor)))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return answers


class KeepsAll(torch.autograd.Function):
    """Saves its input and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


RESULTS = {
    "relu": (torch.relu, [True]),
    "softmax": (lambda x: x.softmax(-1), [True]),
    "exp": (torch.exp, [True]),
    "tanh": (torch.tanh, [True]),
    "gelu": (F.gelu, [False]),
    "square": (lambda x: x * x, [False, False]),
    "norm": (lambda x: x.norm(dim=-1), [False, True]),
    "log_softmax": (lambda x: x.log_softmax(-1), [True]),
    "in place": (lambda x: x.clone().relu_(), [True]),
    "in place on a view": (lambda x: x.clone().view(-1).relu_(), [True]),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), [False] * 3 + [True]),
    "group norm": (lambda x: F.group_norm(x.flatten(0, 1), 2), [False, True, True]),
    "own function": (KeepsAll.apply, [False, True]),
    "softmax, then a product": (lambda x: x.softmax(-1) @ x.mT, [True, False, False]),
}


@pytest.mark.parametrize(("operation", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_told_from_inputs(operation: Callable[[Tensor], Tensor], expected: list[bool]):
    x = torch.rand(2, 3, 4, WIDTH, requires_grad=True) * 1
    assert [answer for _, answer in asked(is_own_result, lambda: operation(x))] == expected


class Weights(nn.Module):
    """Everything that a weight can be multiplied as."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.rand(3 * WIDTH, WIDTH).round())

    def forward(self, x: Tensor) -> list[Tensor]:
        w = self.weight
        made = [F.linear(x, w), x @ w.t(), x @ w[:WIDTH], x @ w.chunk(3)[1].to(x.dtype).t(), F.linear(x, w * self.mask)]
        made += [x * w[0], x @ w.view(3, WIDTH, WIDTH)[2].mT.contiguous(), F.linear(x, w / w.norm(dim=1, keepdim=True))]
        return made


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_what_is_made_of_them_are_known(autocast: bool, dtype: torch.dtype):
    model, x = Weights(), torch.randn(5, 7, WIDTH, requires_grad=True).to(dtype) * 1
    model.to(dtype)
    shapes = {tuple(sorted(model.weight.shape))}
    saved = []

    def question(tensor: Tensor) -> bool:
        saved.append(tensor)
        return is_weight(tensor, shapes)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        answers = [answer for _, answer in asked(question, lambda: model(x))]
    for tensor, answer in zip(saved, answers, strict=True):
        if tensor.shape[-1] != 1:  # the norms
            assert answer == (tensor.numel() != x.numel()), tensor.shape
    assert True in answers
    assert False in answers


class Views(torch.autograd.Function):
    """Returns a view of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).flatten().view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_view_that_a_function_returns_is_no_weight():
    made = Views.apply(torch.randn(5, WIDTH, requires_grad=True))
    assert made._base.is_leaf
    assert not is_weight(made, set())
    assert not is_weight(made.view(-1, 8), set())


def test_what_needs_no_gradient_is_no_weight():
    assert not is_weight(torch.ones(3, 4), {(3, 4)})
    assert is_weight(torch.ones(3, 4, requires_grad=True), set())
    assert not is_weight(nn.Embedding(9, 4)(torch.zeros(5, dtype=torch.long)), {(4, 9)})
