"""What may read few bits is right, or off by no more than is said; outliers are found; nodes are found by number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_actprune.operators.readers import ATTENTION, READERS, is_masked, loses_values, may_read
from tests.support.saving import nodes_of

D = 0.01
"""Largest error of what was saved."""


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def bounded(slope: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the bound of a function whose derivative has that slope at most."""
    return lambda x, g: slope * D * g.abs()


def of_norm(dims: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    def bound(x: Tensor, g: Tensor) -> Tensor:
        r = x.var(dims, correction=0, keepdim=True).add(1e-5).rsqrt()
        z = (x - x.mean(dims, keepdim=True)) * r
        return 2 * r * D * r * z.abs().amax(dims, keepdim=True) * g.abs().amax(dims, keepdim=True)

    return bound


def of_groups(x: Tensor, g: Tensor) -> Tensor:
    return of_norm((2,))(x.view(8, 1, 64), g.view(8, 1, 64)).view(4, 2, 1).repeat_interleave(4, 1)


W, ENDS = weights(16, 16), torch.tensor([8, 8, 20, 32], dtype=torch.int32)
LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "Mul": lambda x: x * weights(4, 8, 16).requires_grad_(),
    "Mm": lambda x: x[0] @ W.clone().requires_grad_(),
    "Bmm": lambda x: torch.bmm(x, weights(4, 16, 3).requires_grad_()),
    "Addmm": lambda x: torch.addmm(weights(3), x[0], weights(16, 3).requires_grad_()),
    "Baddbmm": lambda x: torch.baddbmm(weights(4, 8, 3), x, weights(4, 16, 3).requires_grad_()),
    "Addbmm": lambda x: torch.addbmm(weights(8, 3), x, weights(4, 16, 3).requires_grad_()),
    "Addmv": lambda x: torch.addmv(weights(8), x[0], weights(16).requires_grad_()),
    "Mv": lambda x: x[0] @ weights(16).requires_grad_(),
    "Dot": lambda x: torch.dot(x[0, 0], weights(16).requires_grad_()),
    "Addr": lambda x: torch.addr(weights(16, 3), x[0, 0], weights(3).requires_grad_()),
    "Addcmul": lambda x: torch.addcmul(weights(16), x, weights(16).requires_grad_()),
    "Convolution": lambda x: F.conv1d(x, weights(3, 8, 3).requires_grad_()),
    "Pow": lambda x: x.square(),
    "LinalgVectorNorm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "GroupedMm": lambda x: F.grouped_mm(x.view(32, 16), weights(4, 16, 8).float().requires_grad_(), offs=ENDS),
}
"""Gradients are linear in each tensor saved, so errors of mean zero stay so; the first of several is disturbed."""
NOT_LINEAR: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "Pow": (lambda x: x.pow(3), lambda x, g: 3 * (2 * x.abs() * D + D**2) * g.abs()),
    "Gelu": (F.gelu, bounded(0.80)),
    "Gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), bounded(0.80)),
    "Silu": (F.silu, bounded(0.50)),
    "Mish": (F.mish, bounded(0.65)),
    "Softplus": (F.softplus, bounded(0.25)),
    "NativeLayerNorm": (lambda x: F.layer_norm(x, (16,)), of_norm((2,))),
    "NativeGroupNorm": (lambda x: F.group_norm(x, 2), of_groups),
    "NativeBatchNorm": (lambda x: F.batch_norm(x, None, None, training=True), of_norm((0, 2))),
}  # fmt: skip
SHAPE_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "AvgPool2D": lambda x: F.avg_pool2d(x, 2),
    "AvgPool3D": lambda x: F.avg_pool3d(x, 2),
    "AdaptiveAvgPool2D": lambda x: F.adaptive_avg_pool2d(x, 3),
    "AdaptiveAvgPool3D": lambda x: F.adaptive_avg_pool3d(x, 2),
    "MaxPool2DWithIndices": lambda x: F.max_pool2d(x, 2),
    "MaxPool3DWithIndices": lambda x: F.max_pool3d(x, 2),
}
ELSEWHERE = {"CudnnConvolution", "SlowConv2D", "Linear", "CudnnBatchNorm", "FusedRmsNorm"}
"""Nodes that other devices, types or builds of torch make."""


def disturbed_gradient(function: Callable[[Tensor], Tensor], x: Tensor, noise: Tensor | None) -> tuple[Tensor, str]:
    """Return the gradient of ``x`` if what is saved of it is off by ``noise``, and the node that read it."""
    readers: list[str] = []

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, is_x = kept
        if not is_x:
            return tensor
        readers.append(torch._C._current_autograd_node().name())
        assert noise is not None
        part = noise.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor + part

    x = x.clone()
    leaf = x.requires_grad_()
    address = leaf.untyped_storage()._cdata
    mark = lambda tensor: (tensor.detach(), noise is not None and tensor.untyped_storage()._cdata == address)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(mark, unpack):
        y = function(leaf)
    torch.manual_seed(5)
    outer = torch.randn(y.shape, dtype=y.dtype)
    others = [node.variable for node in nodes_of(y) if hasattr(node, "variable")]
    torch.autograd.backward([y], [outer], inputs=others)
    found = [leaf.grad, *(other.grad for other in others if other is not leaf)]
    return torch.cat([grad.flatten() for grad in found if grad is not None]), readers[0] if readers else ""


@pytest.mark.parametrize("name", LINEAR)
def test_linear_gradients_are_right_on_average(name: str):
    dtype, near = (torch.float32, 1e-5) if name == "GroupedMm" else (torch.float64, 1e-12)
    x, noise = weights(4, 8, 16).to(dtype), (D * weights(4, 8, 16).sin()).to(dtype)
    (exact, _), (up, reader), (down, _) = (disturbed_gradient(LINEAR[name], x, n) for n in (None, noise, -noise))
    assert reader == f"{name}Backward0"
    assert not torch.equal(up, exact)
    torch.testing.assert_close((up + down) / 2, exact, rtol=near, atol=near)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_other_gradients_are_off_by_no_more_than_is_said(name: str):
    function, bound = NOT_LINEAR[name]
    x = 2 * weights(4, 8, 16)
    exact, _ = disturbed_gradient(function, x, None)
    torch.manual_seed(5)
    outer = torch.randn(4, 8, 16, dtype=torch.float64)
    for seed in range(5):
        noise = D * (2 * torch.rand(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1)
        made, reader = disturbed_gradient(function, x, noise)
        assert reader == f"{name.split(',')[0]}Backward0"
        error = (made - exact).view(4, 8, 16).abs()
        assert error.max() > 0
        assert (error <= 1.001 * bound(x, outer)).all()


@pytest.mark.parametrize("name", SHAPE_ALONE)
def test_pooling_reads_no_value(name: str):
    x = weights(2, 4, 4, 4)
    exact, _ = disturbed_gradient(SHAPE_ALONE[name], x, None)
    made, reader = disturbed_gradient(SHAPE_ALONE[name], x, torch.full_like(x, 1e30))
    assert reader == f"{name}Backward0"
    assert torch.equal(made, exact)


def test_every_reader_is_tested():
    tested = {name.split(",")[0] for name in (*LINEAR, *NOT_LINEAR, *SHAPE_ALONE)} | ELSEWHERE
    assert READERS.keys() - ATTENTION == {f"{name}Backward0" for name in tested}


def test_some_powers_and_norms_may_not():
    x = torch.rand(8, requires_grad=True)
    for y in (x.pow(2), x.pow(3), torch.linalg.vector_norm(x), F.gelu(x)):
        assert may_read(y.grad_fn)
    for y in (x.pow(0.5), x.pow(-1), x.pow(4), x.pow(x), torch.linalg.vector_norm(x, 3), torch.sin(x), x / x):
        assert not may_read(y.grad_fn)


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
