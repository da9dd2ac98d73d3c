"""What plain eager mode looks up for a convolution: it must change no result and see every setting."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune.ops import convolution, library
from lightning_actprune.ops.convolution import pruned_convolution
from lightning_actprune.ops.convolution_plan import ConvolutionPlan, convolution_plan
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.plan import Setting
from lightning_actprune.ops.setting import BlockSetting
from tests.convolutions import CASES, laid_out

HALF = 5 * 10**8


class Watched(TorchDispatchMode):
    """Any dispatch mode ends plain eager mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


LAYOUTS = {
    "contiguous": ("3x3", lambda x: x),
    "channels last": ("3x3", lambda x: laid_out(x, True)),
    "half of the channels": ("3x3", lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]),
    "half of the last channels": ("3x3", lambda x: laid_out(torch.cat([x, x], 1), True)[:, : x.shape[1]]),
    "not aligned": ("3x3", lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)),
    "1d": ("1d", lambda x: laid_out(x, True)),
    "3d": ("3d", lambda x: x),
    "ragged": ("ragged", lambda x: x),
    "empty": ("3x3", lambda x: x[:0]),
}


def made(kind):
    """Return a case, an input of this layout and parameters, which autocast rounds to nothing else."""
    name, view = LAYOUTS[kind]
    case = CASES[name]
    layer = case.layer()
    x = case.input(False).detach()
    x.copy_(x.bfloat16())  # the interpreter cuts fp32 off to bf16
    return case, view(x).requires_grad_(), layer.weight, layer.bias


def run(kind, parts, blocks, autocast):
    """Return output and gradients in plain eager mode, and those of the operators."""
    case, x, weight, bias = made(kind)
    found = []
    for eager in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert library.in_plain_eager_mode(x)
            if eager:
                y = pruned_convolution(x, weight, bias, case.windows, parts, blocks)
            else:
                with Watched():
                    y = pruned_convolution(x, weight, bias, case.windows, parts, blocks)
        torch.manual_seed(1)
        grads = torch.autograd.grad(y, (x, weight, bias), torch.randn_like(y))
        assert (y.grad_fn.plan is not None) <= eager
        found.append([y.detach(), *grads])
    return found


@pytest.mark.parametrize(
    ("parts", "blocks"),
    [
        (0, BlockSetting(8, "sample", "int2")),
        (HALF, BlockSetting(8, "sample")),
        (HALF, BlockSetting(8, "token", "int4", "unbiased")),
    ],
    ids=["all in few bits", "half", "half of a row in few bits"],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_plain_eager_mode_gives_what_the_operators_give(kind, autocast, parts, blocks):
    with force_backend("triton"):
        found, expected = run(kind, parts, blocks, autocast)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 4
    assert [a.stride() for a in found] == [b.stride() for b in expected]


def test_a_plan_is_one_object_per_layout_and_setting():
    x, blocks = torch.randn(2, 8, 4, 4), BlockSetting(8, "sample", "int4")
    last = laid_out(torch.randn(2, 8, 4, 4), True)
    with force_backend("triton"):
        first = convolution_plan(x, Setting(0, None, blocks))
        assert convolution_plan(torch.randn(2, 8, 4, 4), Setting(0, None, blocks)) is first
        others = [
            convolution_plan(last, Setting(0, None, blocks)),
            convolution_plan(x, Setting(HALF, None, blocks)),
            convolution_plan(x, Setting(0, torch.bfloat16, blocks)),
            convolution_plan(x.half(), Setting(0, None, blocks)),
            convolution_plan(x, Setting(0, None, blocks._replace(value_format="int2"))),
        ]
        assert convolution_plan(x[:, :4], Setting(0, None, blocks)) is None  # has gaps
    assert len({id(plan) for plan in [first, *others]}) == len(others) + 1
    assert first.new().stride() == x.stride()
    assert others[0].new().stride() == last.stride()
    assert others[2].new().dtype == torch.bfloat16
    with force_backend("reference"):
        assert convolution_plan(x, Setting(0, None, blocks)) is None
    assert convolution_plan(x, Setting(0, None, blocks)) is None  # on a CPU the reference is the automatic choice


def unpacked(backward_on, hooks=None):
    """Return a weight gradient whose backward runs on this backend, and how often the plan unpacked for it."""
    torch.manual_seed(0)
    case, x, weight, bias = made("channels last")
    with force_backend("triton"):
        if hooks is None:
            y = pruned_convolution(x, weight, bias, case.windows, 0, BlockSetting(8, "sample", "int4"))
        else:
            with saved_tensors_hooks(*hooks):
                y = pruned_convolution(x, weight, bias, case.windows, 0, BlockSetting(8, "sample", "int4"))
    torch.manual_seed(1)
    grad_y = torch.randn_like(y)
    planned = mock.Mock(side_effect=ConvolutionPlan.unpack)
    with force_backend(backward_on), mock.patch.object(ConvolutionPlan, "unpack", lambda *a: planned(*a)):
        (grad,) = torch.autograd.grad(y, weight, grad_y)
    return grad, planned.call_count


def test_backward_on_another_backend_than_forward():
    (ours, planned), (reference, unplanned) = unpacked("triton"), unpacked("reference")
    assert (planned, unplanned) == (1, 0)
    torch.testing.assert_close(ours, reference, rtol=0, atol=0)


def test_hooks_may_return_what_was_saved_at_another_address():
    def elsewhere(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) if x.numel() else x

    expected, _ = unpacked("triton")
    found, planned = unpacked("triton", (lambda x: x, elsewhere))
    assert planned == 0  # its launch was made for values at multiples of 16 bytes
    assert torch.equal(found, expected)
    found, planned = unpacked("triton", (lambda x: x, torch.clone))
    assert planned == 1
    assert torch.equal(found, expected)


def test_positions_that_nobody_needs_can_be_saved_wherever_they_were_first_made():
    x, blocks = torch.randn(2, 16, 4, 4), BlockSetting(16, "sample", "int3")
    weight = torch.randn(3, 16, 1, 1, requires_grad=True)
    windows = convolution.Windows((1, 1), (0, 0), (1, 1), 1)
    with force_backend("triton"):
        plan = convolution_plan(x, Setting(0, None, blocks))
        with torch.inference_mode():
            plan.cast_and_pack(x)
        y = pruned_convolution(x, weight, None, windows, 0, blocks)
        (grad,) = torch.autograd.grad(y.sum(), weight)
    _, bitmap, offsets = plan.launch(x)
    assert bitmap.shape == offsets.shape == (2, 0)
    assert not bitmap.is_inference()
    assert torch.isfinite(grad).all()
