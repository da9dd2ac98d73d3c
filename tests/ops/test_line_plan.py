"""Plans of batch normalisation: the same bits as without one, whatever comes in, and running statistics on the way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_actprune.ops import line_plan
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.line_norm import LineNormSetting, few_bit_batch_norm, few_bit_line_norm
from lightning_actprune.ops.line_plan import Running
from tests.kernels.workload import launches

EPS = 1e-5
FP32 = torch.finfo(torch.float32).eps
SETTING = LineNormSetting(0, EPS, 32, "int4")
KINDS = {
    "lines": ((3, 10, 7, 7), False, torch.float32),
    "lines-whole": ((2, 5, 8, 16), False, torch.bfloat16),
    "one": ((1, 3, 5, 9), False, torch.float32),
    "last": ((3, 64, 5, 3), True, torch.bfloat16),
    "last-odd": ((3, 40, 5, 3), True, torch.float16),
    "last-21": ((2, 21, 5, 3), True, torch.float32),
    "rows": ((61, 33), False, torch.float32),
}
"""Shape, channels last, and type."""
each_kind = pytest.mark.parametrize("kind", list(KINDS))


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with force_backend("triton"):
        yield


def inputs(kind: str, device: torch.device, parameters: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shape, last, dtype = KINDS[kind]
    x = 2 * torch.randn(shape) + 1
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    weight, bias = (1 + torch.randn(2, shape[1])).to(parameters).unbind()
    return tuple(t.to(device).clone().requires_grad_() for t in (x.to(dtype), weight, bias))


def buffers(channels: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(channels).to(device), torch.rand(channels).to(device), torch.tensor(3).to(device)


@each_kind
@pytest.mark.parametrize("parameters", [torch.float32, torch.float16, None], ids=str)
def test_a_plan_changes_no_bit(kernel_device, kind, parameters):
    x, weight, bias = inputs(kind, kernel_device, parameters or torch.float32)
    weight, bias = (weight, bias) if parameters else (None, None)
    given = [t for t in (x, weight, bias) if t is not None]
    assert line_plan.plan_of(x, weight, bias, SETTING, torch.float32, None) is not None
    with launches() as planned:
        y = few_bit_batch_norm(x, weight, bias, SETTING, torch.float32)
        found = torch.autograd.grad(y, given, torch.ones_like(y) + y.detach())
    with launches() as generic:
        right_y, _ = few_bit_line_norm(x, weight, bias, SETTING, torch.float32)
        right = torch.autograd.grad(right_y, given, torch.ones_like(y) + y.detach())
    assert torch.equal(y, right_y)
    assert y.stride() == right_y.stride()
    assert planned == generic
    for actual, expected in zip(found, right, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", ["lines", "last"])
@pytest.mark.parametrize("momentum", [0.1, 0.75, 1, 0.0])
def test_running_statistics_move_in_the_same_launches(kernel_device, kind, momentum):
    x, weight, bias = inputs(kind, kernel_device)
    mean, var, batches = buffers(x.shape[1], kernel_device)
    before = [t.double().cpu() for t in (mean, var)]
    versions = [t._version for t in (mean, var, batches)]
    with launches() as names:
        few_bit_batch_norm(x, weight, bias, SETTING, x.dtype, Running(mean, var, batches, momentum))
    assert names == ["line_statistics_kernel", "merge_statistics_kernel", "normalize_lines_kernel"]
    wide, others = x.detach().double().cpu(), [0, *range(2, x.dim())]
    found = wide.mean(others), wide.var(others)
    for actual, old, new in zip((mean, var), before, found, strict=True):
        # A few roundings each of the old number, the new one and their difference.
        bound = 8 * FP32 * (old.abs() + new.abs())
        assert ((actual.double().cpu() - (old + momentum * (new - old))).abs() <= bound).all()
    assert batches == 4
    assert all(t._version > version for t, version in zip((mean, var, batches), versions, strict=True))


@pytest.mark.parametrize("kind", ["lines", "last-odd"])
def test_running_statistics_are_those_that_move_without_a_plan(kernel_device, kind):
    x, weight, bias = inputs(kind, kernel_device)
    first = buffers(x.shape[1], kernel_device)
    second, third = (tuple(t.clone() for t in first) for _ in range(2))
    few_bit_batch_norm(x, weight, bias, SETTING, x.dtype, Running(*first, 0.1))
    gaps = torch.stack([second[0]] * 2, 1)[:, 0]
    few_bit_batch_norm(x, weight, bias, SETTING, x.dtype, Running(gaps, *second[1:], 0.1))
    few_bit_batch_norm(x, weight, bias, SETTING, x.dtype, Running(*third[:2], None, 0.1))
    for actual, right in zip(first, (gaps, *second[1:]), strict=True):
        torch.testing.assert_close(actual, right, rtol=2 * FP32, atol=2 * FP32)  # one may fuse product and sum
    assert torch.equal(first[0], third[0])
    assert torch.equal(first[1], third[1])
    assert third[2] == 3


def test_not_a_number_reaches_the_running_statistics_of_its_channel(kernel_device):
    x, weight, bias = inputs("last", kernel_device)
    with torch.no_grad():
        x[1, 5, 2, 1] = float("nan")
    mean, var, batches = buffers(64, kernel_device)
    few_bit_batch_norm(x, weight, bias, SETTING, x.dtype, Running(mean, var, batches, 0.1))
    for running in (mean, var):
        assert running.isnan().nonzero().flatten().tolist() == [5]


REFUSED = {
    "momentum": lambda mean, var, batches: Running(mean, var, batches, None),
    "16 bits": lambda mean, var, batches: Running(mean.bfloat16(), var.bfloat16(), batches, 0.1),
    "one": lambda mean, var, batches: Running(mean, None, batches, 0.1),
    "gaps": lambda mean, var, batches: Running(torch.stack([mean, mean], 1)[:, 0], var, batches, 0.1),
    "count": lambda mean, var, batches: Running(mean, var, batches.float(), 0.1),
    "size": lambda mean, var, batches: Running(mean[:1], var[:1], batches, 0.1),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_other_running_statistics_have_no_plan(case):
    x, weight, bias = inputs("lines", torch.device("cpu"))
    running = REFUSED[case](*buffers(10, torch.device("cpu")))
    assert line_plan.plan_of(x, weight, bias, SETTING, x.dtype, running) is None


def test_other_inputs_have_no_plan():
    x, weight, bias = inputs("lines", torch.device("cpu"))
    shifted = torch.randn(3 * 10 * 49 + 1)[1:].view(3, 10, 7, 7)
    for other in (x[..., ::2], x.transpose(2, 3), x[:1].expand(3, 10, 7, 7), x[:0], shifted):
        assert line_plan.plan_of(other, weight, bias, SETTING, x.dtype, None) is None
    assert line_plan.plan_of(x, shifted.view(-1)[:10], bias, SETTING, x.dtype, None) is None
    with force_backend("reference"):
        assert line_plan.plan_of(x, weight, bias, SETTING, x.dtype, None) is None
    with force_backend(None):
        assert line_plan.plan_of(x, weight, bias, SETTING, x.dtype, None) is None


@pytest.mark.parametrize("kind", ["lines", "last"])
def test_gradients_of_any_kind(kernel_device, kind):
    """A gradient laid out or typed in another way is that of its values."""
    x, weight, bias = inputs(kind, kernel_device)
    y = few_bit_batch_norm(x, weight, bias, SETTING, x.dtype)
    dense = torch.randn_like(y)
    start = torch.empty(dense.numel() + 1, dtype=dense.dtype, device=kernel_device)[1:]
    moved = start.as_strided(dense.shape, dense.stride(), start.storage_offset()).copy_(dense)
    given = {
        "turned": dense.transpose(2, 3).contiguous().transpose(2, 3),
        "gaps": torch.stack([dense] * 2, -1)[..., 0],
        "shifted": moved,
    }
    right = torch.autograd.grad(y, (x, weight, bias), dense, retain_graph=True)
    for name, grad in given.items():
        found = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
        assert name == "shifted" or all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        torch.testing.assert_close(found, right)  # values that are not aligned are added in another order
    batched = torch.autograd.grad(
        y, (x, weight, bias), torch.stack([dense, 2 * dense]), retain_graph=True, is_grads_batched=True
    )
    for found, expected in zip(batched, right, strict=True):
        assert torch.equal(found[0], expected)


def test_only_what_needs_a_gradient_gets_one(kernel_device):
    x, weight, bias = inputs("last-odd", kernel_device)
    grad = torch.randn_like(x)
    full = torch.autograd.grad(few_bit_batch_norm(x, weight, bias, SETTING, x.dtype), (x, weight, bias), grad)
    for needed in ((True, False, False), (False, True, False), (True, False, True), (False, True, True)):
        given = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, weight, bias), needed, strict=True)]
        with launches() as names:
            few_bit_batch_norm(*given, SETTING, x.dtype).backward(grad)
        assert ("line_grad_kernel" in names) == needed[0]
        for tensor, wanted, right in zip(given, needed, full, strict=True):
            assert torch.equal(tensor.grad, right) if wanted else tensor.grad is None


def test_second_derivative_is_a_clear_error(kernel_device):
    x, weight, bias = inputs("lines", kernel_device)
    y = few_bit_batch_norm(x, weight, bias, SETTING, x.dtype)
    with pytest.raises(RuntimeError, match=r"Second derivatives .* are not defined"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
