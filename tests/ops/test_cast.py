"""Under autocast the kernels cast the input that they pack: it must change nothing but the time."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune import functional
from lightning_actprune.kernels import pack as kernels
from lightning_actprune.ops import linear, plan
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.geometry import input_geometry, sparsity_parts
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.setting import BlockSetting
from tests.ops.test_plan import VIEWS

CAST_BY_KERNELS = {"rows", "vector", "plain", "tokens", "features", "channels-first", "unaligned"}
"""Views whose cast lies as it is stored in blocks of 11, without gaps."""
GAPS = {"slice", "expanded"}
"""Views that have none either once they are cast, and whose rows cannot be numbered throughout before."""
HALF = 5 * 10**8

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture
def plans(monkeypatch):
    """Return a function that makes every plan, new, of one launch or of three."""

    def choose(one_launch):
        monkeypatch.setattr(kernels, "takes_one_launch", lambda *_: one_launch)
        kernels.plan.cache_clear()
        plan.plan_of_layout.cache_clear()

    yield choose
    kernels.plan.cache_clear()
    plan.plan_of_layout.cache_clear()


def view(kind, dtype, device):
    """Return a view of random numbers; for the interpreter, which cuts fp32 off to bf16, of such that are bf16."""
    with torch.device(device):
        x = VIEWS[kind]()
    if device.type == "cpu" and dtype == torch.bfloat16:
        x.copy_(x.to(dtype)) if kind != "expanded" else x[:1].copy_(x[:1].to(dtype))
    return x


ONE = {"one-sample": lambda x: x.flatten(0, 1).unsqueeze(1), "one-token": lambda x: x.flatten(0, 1).unsqueeze(0)}
"""Tensors ``[T, N, E]`` whose samples, the second dimension, lie one behind the other."""


def run(x, weight, bias, dtype, scope="sample"):
    """Return output, what is saved for backward, and gradients."""
    saved = []
    x = x.detach().requires_grad_()
    with (
        torch.autocast(x.device.type, dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = functional.linear_unchecked(x, weight, bias, sparsity_parts(0.6), BlockSetting(11, scope))
    torch.manual_seed(1)
    grads = torch.autograd.grad(y, (x, weight, bias), torch.randn_like(y))
    return [y, *saved, grads[0].float(), *grads[1:]]


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("kind", [kind for kind in VIEWS if kind != "empty"])
@pytest.mark.parametrize(
    ("one_launch", "dtype"),
    [(True, torch.float16), (False, torch.bfloat16)],
    ids=["one-launch-fp16", "three-launches-bf16"],
)
def test_all_is_as_if_the_input_had_been_cast_before(kernel_device, plans, kind, scope, one_launch, dtype):
    plans(one_launch)
    x = view(kind, dtype, kernel_device)
    weight = torch.randn(5, x.shape[-1], device=kernel_device, requires_grad=True)
    bias = torch.randn(5, device=kernel_device, requires_grad=True)
    with force_backend("triton"):
        found = input_plan(x, Setting(HALF, dtype, BlockSetting(11, scope)))
        by_kernels = kind in CAST_BY_KERNELS or (kind in GAPS and scope == "sample")
        assert (found is not None and found.new_cast is not None) == by_kernels
        found, expected = run(x, weight, bias, dtype, scope), run(x.to(dtype), weight, bias, dtype, scope)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["plain", "unaligned", *ONE])
@pytest.mark.parametrize("one_launch", [True, False])
def test_samples_that_are_second_lie_as_they_are_stored_only_if_there_is_one(kernel_device, plans, kind, one_launch):
    plans(one_launch)
    x = (
        ONE[kind](view("plain", torch.bfloat16, kernel_device))
        if kind in ONE
        else view(kind, torch.bfloat16, kernel_device)
    )
    weight, bias = (torch.randn(*shape, device=kernel_device, requires_grad=True) for shape in ((5, x.shape[-1]), (5,)))
    with force_backend("triton"):
        found = input_plan(x, Setting(HALF, torch.bfloat16, BlockSetting(11, "sample_second")))
        assert (found.new_cast is not None) == (kind in ONE)
        found = run(x, weight, bias, torch.bfloat16, "sample_second")
        expected = run(x.bfloat16(), weight, bias, torch.bfloat16, "sample_second")
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_copy_lies_as_torchs_cast_does(kernel_device):
    for kind in CAST_BY_KERNELS | GAPS:
        x = view(kind, torch.float16, kernel_device)
        with force_backend("triton"):
            copy = input_plan(x, Setting(HALF, torch.float16, BlockSetting(11, "sample"))).new_cast()
        assert (copy.stride(), copy.dtype, copy.device) == (x.half().stride(), torch.float16, x.device)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@dtypes
def test_input_of_16_bits_is_cast_by_torch_if_at_all(given, dtype):
    x = torch.randn(2, 8, 32).to(given)
    with force_backend("triton"):
        assert input_plan(x, Setting(HALF, dtype, BlockSetting(8, "sample"))).new_cast is None
        assert input_plan(x.float(), Setting(HALF, None, BlockSetting(8, "sample"))).new_cast is None


@dtypes
def test_fp64_is_not_cast(dtype):
    x, weight = torch.randn(2, 8, 32, dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    with force_backend("triton"), pytest.raises(RuntimeError, match="float64"):
        input_plan(x, Setting(HALF, dtype, BlockSetting(8, "sample")))
    with torch.autocast("cpu", dtype):
        assert functional.linear(x, weight, sparsity=0.5, block_size=8).dtype == torch.float64


@dtypes
@pytest.mark.parametrize("kind", ["plain", "tokens"])
def test_only_what_is_packed_outlives_the_forward_pass(kernel_device, kind, dtype):
    x = view(kind, dtype, kernel_device)
    weight = torch.randn(5, x.shape[-1], device=kernel_device, requires_grad=True)
    copies, saved = [], []

    def spied(*args):
        found = input_plan(*args)

        def new_cast():
            copies.append(StorageWeakRef((copy := found.new_cast()).untyped_storage()))
            return copy

        return found._replace(new_cast=new_cast)

    with (
        force_backend("triton"),
        torch.autocast(kernel_device.type, dtype),
        mock.patch.object(linear, "input_plan", spied),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = functional.linear(x, weight, sparsity=0.6, block_size=11)
    if kernel_device.type == "cpu":
        gc.collect()  # the interpreter leaves cycles that hold its arguments
    assert [copy.expired() for copy in copies] == [True]
    stored = input_geometry(x, 11, 0.6, "sample").stored_bytes(2)
    assert sum(t.untyped_storage().nbytes() for t in saved) == stored
    y.sum().backward()
