"""What a model keeps for backward, its gradients, the same in fp64, and by how much bits may make them differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_actprune.config import Keep
from tests.support import oracle
from tests.support.cases import Case, Holder
from tests.support.saving import saved_tensors, storage_bytes

ROUNDING = 2e-5
"""Relative error of sums in fp32, and of statistics of some dozens of values."""


def kept_bytes(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> int:
    """Return the bytes of all memory that a forward of ``model`` saves, without its parameters and buffers."""
    # Not a leaf, so that memory which only the input holds is counted too; the product itself saves nothing.
    given = x * 1.0
    with saved_tensors() as saved:
        (model if call is None else call)(given)
    return storage_bytes(saved, but=(*model.parameters(), *model.buffers()))


def run(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the output, with random numbers from the same seed each time."""
    torch.manual_seed(3)
    return model(x)


def grad_of(y: Tensor) -> Tensor:
    """Return a gradient of ``y``, the same for all outputs of its shape."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y)


def gradients(
    model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None, grad: Tensor | None = None
) -> dict[str, Tensor]:
    """Return gradients by name, that of the input as ``"input"``, of whatever needs one."""
    wanted = {"input": x} if x.requires_grad else {}
    wanted |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    y = run(model if call is None else call, x)
    found = torch.autograd.grad(y, list(wanted.values()), grad_of(y) if grad is None else grad)
    return dict(zip(wanted, found, strict=True))


def exact_gradients(case: Case, dense: Holder, x: Tensor, keep: Keep | None = None) -> dict[str, Tensor]:
    """Return the gradients of the dense model in fp64; those of weights are of the input without its dropped blocks."""
    if case.seeded:  # in fp64 other random numbers would be drawn
        return gradients(copy.deepcopy(dense), x)
    wide = copy.deepcopy(dense).double()
    found = gradients(wide, x.detach().double().requires_grad_())
    if keep is not None and keep.sparsity and case.dropped is not None:
        kept = case.dropped(x, keep).double().requires_grad_()
        grad = grad_of(wide(x.detach().double()).float()).double()
        found["layer.weight"] = gradients(wide, kept, grad=grad)["layer.weight"]
    return found


def bound(case: Case, name: str, keep: Keep) -> float:
    """Return what the relative error of a gradient may be: a sum over stored values has their relative error.

    A stored value is off by ``step / sqrt(12)`` on average. A step is the range of its block over ``2^bits - 1``,
    rounded up by 9/8 and 32/31 at most, and 32 normal numbers have a range of 5.5 at most: 1.9 in all.
    """
    if case.is_exact(name) or keep.bits is None:
        return ROUNDING
    return ROUNDING + case.slack * 1.9 / (2**keep.bits - 1)


relative_error = partial(oracle.relative_error, least=1e-4)
"""Of what should be zero an error may be as large as a rounding."""


def same(ours: Tensor, right: Tensor, rounds: bool) -> None:
    """Assert that outputs are equal: bit for bit, but for what may be rounded in another way, or on a GPU."""
    assert ours.dtype == right.dtype
    assert ours.shape == right.shape
    if not rounds and not ours.is_cuda:
        assert torch.equal(ours, right) or torch.equal(ours.isnan(), right.isnan())
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, right, rtol=4 * eps, atol=2e-5 if eps < 1e-6 else 4 * eps, equal_nan=True)
