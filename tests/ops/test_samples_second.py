"""An input whose samples are its second dimension, as inside attention."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune import functional
from lightning_actprune.ops.geometry import input_geometry, sparsity_parts, stored_view
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle

SECOND = BlockSetting(16, "sample_second")


class Watched(TorchDispatchMode):
    """Any dispatch mode ends plain eager mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("method", ["gather", "unpack"])
@pytest.mark.parametrize("shape", [(37, 3, 70), (1, 4, 64), (9, 1, 33), (0, 3, 40), (5, 0, 40)], ids=str)
def test_blocks_of_a_sample_compete_and_the_rest_is_exact(device, shape, method, eager):
    x = oracle.integers(*shape, device=device).requires_grad_()
    weight, bias = torch.randn(24, shape[-1], device=device, requires_grad=True), torch.randn(24, device=device)
    bias.requires_grad_()
    grad_y = torch.randn(*shape[:2], 24, device=device)
    with force_method(method):
        if eager:
            y = functional.linear_unchecked(x, weight, bias, sparsity_parts(0.5), SECOND)
            grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
        else:
            with Watched():
                y = functional.linear_unchecked(x, weight, bias, sparsity_parts(0.5), SECOND)
                grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
    dense = F.linear(x, weight, bias)
    wanted = torch.autograd.grad(dense, (x, bias), grad_y)
    assert torch.equal(y, dense)
    assert torch.equal(grads[0], wanted[0])
    torch.testing.assert_close(grads[2], wanted[1])
    hat = oracle.pruned(x.detach().transpose(0, 1), 16, 0.5).transpose(0, 1)
    exact = grad_y.double().flatten(0, 1).t() @ hat.double().flatten(0, 1)
    torch.testing.assert_close(grads[1].double(), exact, rtol=1e-5, atol=1e-4)


def test_storage_is_a_view_with_the_samples_first():
    x = torch.randn(9, 3, 40)
    view, transposed = stored_view(x, 16, "sample_second")
    assert torch.equal(view, x.transpose(0, 1))
    assert view.data_ptr() == x.data_ptr()
    assert not transposed
    assert input_geometry(x, 16, 0.5, "sample_second") == input_geometry(torch.empty(3, 9, 40), 16, 0.5, "sample")


@pytest.mark.parametrize("eager", [True, False])
def test_one_feature_may_have_any_stride(eager):
    x = torch.randn(1, 5, 3).permute(1, 2, 0)  # [T, N, 1], contiguous
    assert x.is_contiguous()
    assert x.stride(2) != 1
    weight = torch.randn(4, 1, requires_grad=True)
    with nullcontext() if eager else Watched():
        y = functional.linear_unchecked(x, weight, None, sparsity_parts(0.5), SECOND)
    torch.testing.assert_close(y, x @ weight.t())
