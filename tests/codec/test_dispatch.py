"""Which version runs, the cache of launches, private names of torch, and the frame of autograd functions."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lightning_actprune.codec import private
from lightning_actprune.codec.dispatch import (
    CompiledCall,
    LaunchCache,
    Machine,
    SimulatedGPU,
    act_as,
    as_operator,
    choose_backend,
    force_backend,
    forced_backend,
    in_operator,
    in_plain_eager_mode,
    kernel_refusals,
    make_apply,
    may_keep_memory,
    no_view,
    once_differentiable,
)
from lightning_actprune.codec.private import look_up, refusal, require

CPU = torch.device("cpu")


def test_a_launch_is_made_once_for_each_layout_and_a_full_cache_is_emptied():
    made, x = [], torch.zeros(3, 4)
    cache = LaunchCache(lambda *key: made.append(key) or (len(made) if key[-1] < 5 else None), limit=3)
    with force_backend("reference"):
        assert cache.find((0,), x) is None  # where no kernel can run nothing is made
    assert cache.find((0,), x) is None
    with force_backend("triton"):
        tensors = x, x.clone(), x[:, 0], x[1:, 1:], None
        keys = [
            (torch.Size((3, 4)), (4, 1), torch.float32, True),
            (torch.Size((3, 4)), (4, 1), torch.float32, True),
            (torch.Size((3,)), (4,), torch.float32, True),
            (torch.Size((2, 3)), (4, 1), torch.float32, False),
            None,
        ]
        assert [cache.find((0,), *tensors), cache.find((0,), *tensors), cache.find((1,), x)] == [1, 1, 2]
        assert [cache.find((7,), x), cache.find((7,), x)] == [None, None]  # "not for the kernels" is stored, too
        assert made == [(CPU, *keys, 0), (CPU, keys[0], 1), (CPU, keys[0], 7)]
        with act_as(SimulatedGPU(Machine(1, 1, 9))):
            assert [cache.find((1,), x), cache.find((1,), x)] == [4, 4]  # nobody else meets its launches
        assert [len(cache), cache.find((2,), x), len(cache), cache.find((0,), *tensors)] == [3, 5, 1, 6]


def test_compiled_code_launches_by_address_what_it_launched_last():
    runs = []

    class Copy(CompiledCall):
        reads = 2

        def _find(self, x, out):
            return self.launch if forced_backend() is None else None

        def _compute(self, x, out):
            return x

        def launch(self, *tensors):
            runs.append(tensors)

    call, out = Copy(), torch.zeros(4)
    aligned, unaligned = torch.ones(8)[:4], torch.ones(8)[1:5]
    call.launch.__func__.by_address = None  # of Triton's own launcher, the interpreter and simulated GPUs
    for _ in range(2):
        call(aligned, out=out)
        assert runs.pop() == (aligned, aligned, out)
    call.launch.__func__.by_address = runs.append
    for x, sizes in ((aligned, ()), (unaligned, ()), (aligned, (4,)), (aligned, (5,)), (aligned, (4,))):
        call(x, *sizes, out=out)
        assert runs.pop() == (x, x, out)
        call(x, *sizes, out=out)
        assert runs.pop() == [x.data_ptr(), x.data_ptr(), out.data_ptr()]
    with force_backend("reference"):
        call(aligned, 4, out=out)
    assert (out.tolist(), runs) == ([1] * 4, [])


def test_the_choice_can_be_forced_and_the_kernels_refuse_with_reasons():
    wide = torch.zeros(2, 3, 8, dtype=torch.float64)
    assert choose_backend(wide.shape, wide.dtype, CPU, 8, 1) == "reference"
    refusals = kernel_refusals(torch.float64, CPU, 2048, 10**6)
    for reason, value in zip(refusals, ("float64", "2048", "1000000"), strict=False):
        assert value in reason
    with force_backend("triton"):
        assert forced_backend() == "triton"
        with pytest.raises(RuntimeError, match="HINT"):
            choose_backend(wide.shape, wide.dtype, CPU, 8, 1)
        with force_backend("reference"):
            assert choose_backend(wide.shape, wide.dtype, CPU, 8, 1) == "reference"
    assert forced_backend() is None
    with pytest.raises(ValueError, match="backend"), force_backend("cuda"):
        pass


def test_plain_eager_mode_is_left_for_anybody_who_wants_to_see_what_is_done():
    class Subclass(torch.Tensor):
        pass

    x, seen = torch.randn(3), []
    assert in_plain_eager_mode(x)
    assert may_keep_memory(x)
    assert as_operator(lambda: (in_operator(), may_keep_memory(x)))() == (True, False)
    assert not in_operator()
    assert not in_plain_eager_mode(x.as_subclass(Subclass))
    assert not in_plain_eager_mode(x.to("meta"))
    assert not in_plain_eager_mode(torch.zeros(2, dtype=torch.complex64).conj().imag)
    torch.vmap(lambda one: seen.append(in_plain_eager_mode(one)) or one)(torch.randn(2, 3))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        seen.append(in_plain_eager_mode(x))
    compiled = torch.compile(lambda t: t + (1 if in_plain_eager_mode(t) else 2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 2)
    assert seen == [False, False]


# Private names of torch: those that are there are used, one that is gone says so, and stand-ins agree with them.


def test_refusal_says_what_is_missing(monkeypatch):
    assert private.MISSING == []
    monkeypatch.setattr(private, "MISSING", [])
    assert look_up("torch.no_such_thing._at_all", 3) == 3
    assert look_up("no_such_module.name") is None
    assert private.MISSING == ["torch.no_such_thing._at_all", "no_such_module.name"]
    assert refusal("It", ("torch.relu",)) is None
    require("It", ("torch.relu",))
    with pytest.raises(RuntimeError, match=r"It needs torch.no_such_thing._at_all.*HINT"):
        require("It", ("torch.relu", "torch.no_such_thing._at_all"))


STAND_INS = {
    "_any_transform": private.are_functorch_transforms_active,
    "_count_modes": private.len_torch_dispatch_stack,
    "_may_open_hooks": private.saved_tensors_hooks_are_enabled,
    "_task_of_node": private.current_graph_task_id,
}
"""Functions that stand in for a name that may be gone, and what they stand in for."""


def test_stand_ins_agree_wherever_they_are_asked():
    agree = []

    def look(x):
        answers = {name: (getattr(private, name)(), real()) for name, real in STAND_INS.items()}
        agree.append(all((a != -1) == (b != -1) if "task" in name else a == b for name, (a, b) in answers.items()))
        return (x * x).sum()

    x, no_hooks = torch.randn(3, 2), torch.autograd.graph.disable_saved_tensors_hooks("none here")
    for around in (nullcontext(), BaseTorchDispatchMode(), torch.no_grad(), no_hooks):
        with around:
            look(x)
    torch.func.vmap(look)(x)
    torch.func.vmap(torch.func.grad(look))(x)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: look(t) is t or t, lambda t: t):
        y = x.exp()
    y.register_hook(lambda grad: agree.append(look(grad) is not None))
    y.sum().backward()
    assert agree == [True] * len(agree)
    assert len(agree) >= 8


def test_wrapped_tensors_and_views_are_seen():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.is_functorch_wrapped_tensor(x)) or x)(torch.randn(3, 2))
    x = torch.randn(3, requires_grad=True)
    y = x * x
    y.register_hook(lambda grad: seen.append(private.is_legacy_batchedtensor(grad)))
    torch.autograd.grad(y * 1, x, torch.eye(3), is_grads_batched=True)
    assert seen == [True, True]
    assert not private.is_functorch_wrapped_tensor(x)
    assert not private.is_legacy_batchedtensor(x)
    view = torch.randn(2, 3).view(3, 2)
    made = private.unsafe_view(view, view.shape)
    assert torch.equal(made, view)
    assert not made._is_view()


# The frame of every autograd function: which mode it says it is in, and that second derivatives are refused.

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


product = make_apply(Product)


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


rows_of = make_apply(Rows)
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
