"""Norms and scales that keep their input quantized: exact outputs, gradients from what is stored, fused passes."""

from __future__ import annotations

import copy
import importlib
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet

from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.kernels import channel_norm as kernels
from lightning_actprune.operators import channel_norm as operators
from lightning_actprune.operators.channel_norm import ChannelSetting, Running, channel_norm
from lightning_actprune.operators.norm import Affine, NormSetting, norm, scaled
from lightning_actprune.operators.registry import find_compressed_class, operator_of
from tests.kernels.agreement import small_tiles
from tests.support import oracle
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.saving import saved_tensors
from tests.support.workload import launches

BITS = (8, 4, 3, 2)
EPS = 1e-5
FP32 = torch.finfo(torch.float32).eps

ROWS = {
    f"{sets}-{shape[1]}": (shape, sets, False, block_size, dtype)
    for shape, block_size, dtype in (
        ((5, 70), 32, torch.float32),
        ((3, 300), 24, torch.bfloat16),
        ((9, 8), 32, torch.float16),
    )
    for sets in ("layer", "rms")
}
CHANNELS = {
    "batch": ((3, 10, 7, 7), 0, False, 32, torch.float32),
    "batch-whole": ((2, 5, 8, 16), 0, False, 32, torch.bfloat16),
    "batch-one": ((1, 3, 5, 9), 0, False, 16, torch.float32),
    "last": ((3, 64, 5, 3), 0, True, 32, torch.float32),
    "last-odd": ((3, 40, 5, 3), 0, True, 32, torch.bfloat16),
    "last-24": ((2, 27, 3, 3, 2), 0, True, 24, torch.float16),
    "samples": ((61, 33), 0, False, 32, torch.float32),
    "group": ((3, 12, 7, 7), 3, False, 32, torch.float32),
    "group-last": ((2, 12, 4, 8), 12, True, 32, torch.bfloat16),
    "group-rows": ((5, 60), 4, False, 32, torch.float32),
}
KINDS = ROWS | CHANNELS
"""Shape, what is normalised (rows, channels of a batch, or so many groups), channels last, block size and type."""


def inputs(kind: str, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    shape, _, last, _, dtype = KINDS[kind]
    x = 2 * torch.randn(shape) + torch.randn(shape[1]).view(-1, *[1] * (len(shape) - 2))
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    parameters = 1 + torch.randn(2, shape[1])
    return tuple(t.to(device).requires_grad_() for t in (x.to(dtype), *parameters))


def normalized(x: Tensor, weight, bias, kind: str, bits: int = 4, relu: bool = False, **options) -> Tensor:
    _, sets, _, block_size, _ = KINDS[kind]
    if kind in ROWS:
        return norm(x, weight, bias, x.shape[1:], NormSetting(sets == "layer", False, EPS, block_size, bits), x.dtype)
    return channel_norm(x, weight, bias, ChannelSetting(sets, EPS, block_size, bits, relu), x.dtype, **options)


def in_sets(x: Tensor, sets: int | str) -> tuple[Tensor, list[int]]:
    """Return ``x`` in fp64 on the CPU so that each set lies along the dimensions that are returned."""
    x = x.detach().double().cpu()
    if isinstance(sets, str):
        return x, [1]
    return (x.reshape(x.shape[0], sets, -1), [2]) if sets else (x, [0, *range(2, x.dim())])


def exact(x: Tensor, sets: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised ``x``, and ``mean`` and ``rstd`` of each set."""
    wide, dims = in_sets(x, sets)
    mean = wide.mean(dims, keepdim=True) * (sets != "rms")
    rstd = ((wide - mean).square().mean(dims, keepdim=True) + EPS).rsqrt()
    return ((wide - mean) * rstd).view(x.shape), mean, rstd


def gradients(grad_y: Tensor, hat: Tensor, rstd: Tensor, weight: Tensor, sets: int | str) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and bias in fp64, as the operators' docstrings have them."""
    g, each = grad_y.double().cpu(), [0, *range(2, grad_y.dim())]
    (along, dims), (hats, _) = in_sets(g * weight, sets), in_sets(hat, sets)
    grad_x = along - hats * (along * hats).mean(dims, keepdim=True)
    if sets != "rms":
        grad_x = grad_x - along.mean(dims, keepdim=True)
    return (grad_x * rstd).view(g.shape), (g * hat).sum(each), g.sum(each)


def in_memory(x: Tensor, kind: str) -> Tensor:
    """Return the rows of ``x`` from which blocks are cut, the last of which may be short."""
    _, sets, last, _, _ = KINDS[kind]
    return x if kind in ROWS else (x.movedim(1, -1) if last and not sets else x).reshape(1, -1)


def read(values: Tensor, kind: str, bits: int) -> Tensor:
    """Return what is stored, in the shape of the input."""
    shape, sets, last, block_size, _ = KINDS[kind]
    rows, length = shape if kind in ROWS else (1, math.prod(shape))
    wide = formats.dequantize(values.cpu(), min(block_size, length), bits, torch.float32).double()
    wide = wide.view(rows, -1)[:, :length]
    return wide.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last and not sets else wide.view(shape)


@pytest.mark.parametrize(("kind", "bits"), [*in_turn(KINDS, BITS), ("batch", 2), ("last", 4), ("group", 3)])
def test_output_is_exact_and_gradients_are_those_of_what_is_stored(device, kind, bits):
    _, sets, _, block_size, dtype = KINDS[kind]
    x, weight, bias = inputs(kind, device)
    with saved_tensors() as saved:
        y = normalized(x, weight, bias, kind, bits)
    hat, mean, rstd = exact(x, sets)
    w, b = (t.detach().double().cpu().view(-1, *[1] * (x.dim() - 2)) for t in (weight, bias))
    w, b = (w.flatten(), b.flatten()) if kind in ROWS else (w, b)
    assert y.dtype == dtype
    right = hat * w + b
    # A few roundings of fp32, of numbers as large as x rstd; then one of the output.
    wide, dims = in_sets(x, sets)
    most = (wide.abs().amax(dims, keepdim=True) * rstd).expand_as(wide).reshape(x.shape)
    bound = 8 * FP32 * (most * w.abs() + b.abs()) + torch.finfo(dtype).eps * right.abs()
    assert ((y.detach().double().cpu() - right).abs() <= bound).all()
    values, statistics, _ = saved
    if kind in ROWS:
        assert oracle.relative_error(statistics, rstd[:, 0]) < 1e-6
    else:
        for found, expected in zip(statistics[:2], (mean, rstd), strict=True):
            torch.testing.assert_close(found.double().cpu(), expected.flatten(), rtol=4 * FP32, atol=8 * FP32)
    near, blocks = read(values, kind, bits), in_memory(hat, kind)
    most = oracle.largest_error(blocks, min(block_size, blocks.shape[1]), bits)
    assert (in_memory(near - hat, kind).abs() <= most).all()
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = gradients(grad_y, near, rstd, w, sets)
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    for actual, right, tolerance in zip(found, expected, (torch.finfo(dtype).eps, 0, 0), strict=True):
        assert oracle.relative_error(actual, right) <= max(tolerance, 2e-6 if kind in ROWS else 3e-6)


def test_rounded_values_are_multiplied_in_the_wider_type(device):
    x, weight, _ = inputs("rms-70", device)
    x = x.detach().half().requires_grad_()
    y = norm(x, weight, None, (70,), NormSetting(False, True, EPS, 32, 8), torch.float32)
    near = (exact(x, "rms")[0].to(torch.float16).double() * weight.detach().double().cpu()).float()
    assert y.dtype == torch.float32
    assert (y.detach().cpu() == near).double().mean() > 0.95  # others were rounded the other way by an error of fp32
    y.sum().backward()
    assert x.grad.dtype == torch.float16


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_statistics_far_from_zero(device, last):
    """A mean of a thousand deviations: sums of squares would leave nothing of the variance in fp32."""
    x = 1000 + torch.randn(16, 6, 9, 11)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).to(device)
    with saved_tensors() as saved:
        y = channel_norm(x.requires_grad_(), None, None, ChannelSetting(0, EPS, 32, 4), x.dtype)
    hat, mean, rstd = exact(x, 0)
    unbiased = x.detach().double().cpu().var((0, 2, 3))
    statistics = saved[1].double().cpu()
    # The mean is rounded to 1000 FP32; values that lie in few tiles of a part are summed as differences.
    torch.testing.assert_close(statistics[0], mean.flatten(), rtol=2 * FP32, atol=0)
    torch.testing.assert_close(statistics[1], rstd.flatten(), rtol=64 * FP32, atol=0)
    torch.testing.assert_close(statistics[2], unbiased, rtol=64 * FP32, atol=0)
    torch.testing.assert_close(y.detach().double().cpu(), hat, rtol=0, atol=2000 * FP32)


ALL = slice(None)
NOT_FINITE = {
    "layer-70": (math.nan, (2, 4), (2,), (slice(2),)),
    "rms-70": (math.inf, (2, 4), (2,), (slice(3, None),)),
    "batch": (math.nan, (1, 4, 2, 1), (ALL, 4), (ALL, 8)),
    "last": (math.inf, (1, 4, 2, 1), (ALL, 4), (ALL, slice(32, 64))),
    "group": (math.nan, (1, 4, 2, 1), (1, slice(4, 8)), (2, ALL)),
}
"""A value, its place, the set that it is in, and values of others, in other blocks."""


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_what_is_not_finite_reaches_the_gradients_of_its_set_alone(device, kind):
    value, place, one_set, others = NOT_FINITE[kind]
    x, weight, bias = inputs(kind, device)
    with torch.no_grad():
        x[place] = value
    y = normalized(x, weight, bias, kind)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert y[place].isnan()
    assert kind in ROWS or y[one_set].isnan().all()
    assert of_x[one_set].isnan().all()
    assert of_weight[4].isnan()
    assert of_x[others].isfinite().all()


def test_what_cannot_be_stored_is_refused():
    huge = torch.empty(1, 8, requires_grad=True).expand(2**31, 8)
    with pytest.raises(ValueError, match="2147483648"):
        normalized(huge, None, None, "layer-8")


def test_other_modes_and_parameters_run_in_plain_torch(kernel_device):
    x, weight, bias = inputs("layer-70", kernel_device)
    apart = torch.stack([weight.detach()] * 2, 1)[:, 0].requires_grad_()
    grad = torch.randn_like(x)
    with force_backend("triton"):
        y = normalized(x, weight, bias, "layer-70", 8)
        right = torch.autograd.grad(y, (x, weight, bias), grad, retain_graph=True)
        with launches() as names:
            found = torch.autograd.grad(y, (x, weight, bias), torch.stack([grad] * 2), is_grads_batched=True)
            torch.testing.assert_close(normalized(x, apart, bias, "layer-70", 8), y)
    assert names == []
    for batched, expected in zip(found, right, strict=True):
        torch.testing.assert_close(batched[1], expected)


def test_only_exact_classes_are_known():
    for base in (nn.LayerNorm, nn.BatchNorm2d):
        other = type("Other", (base,), {})
        assert find_compressed_class(other) is None
        assert operator_of(other(8)) == "norm"
    assert operator_of(nn.SyncBatchNorm(8)) == "norm"
    assert all(find_compressed_class(c) is None for c in (nn.InstanceNorm2d, nn.LazyBatchNorm2d, nn.SyncBatchNorm))


@pytest.mark.foreign
@pytest.mark.parametrize(("module", "name"), [("norm", "LayerNorm"), ("norm_act", "GroupNormAct")])
def test_fast_norm_of_timm_is_left_alone(module, name):
    dense = getattr(importlib.import_module(f"timm.layers.{module}"), name)(
        24, **({"num_groups": 4} if "G" in name else {})
    )
    layer = compressed(nn.Sequential(dense), "norm", bits=8)[0]
    assert type(layer) is not type(dense)
    layer._fast_norm = True
    x = torch.randn(4, 24, *([] if name == "LayerNorm" else [3, 2]), requires_grad=True)
    with saved_tensors() as saved:
        layer(x)
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in saved)


@pytest.mark.parametrize(("kind", "momentum"), [("batch", 0.1), ("last-odd", 0.7), ("samples", 0.1)])
def test_running_statistics_move_by_the_share_of_the_batch(device, kind, momentum):
    x, weight, bias = inputs(kind, device)
    mean, var = torch.randn(2, x.shape[1], device=device).abs() + 0.5
    batches = torch.tensor(3, device=device)
    before, versions = [t.double().cpu() for t in (mean, var)], [t._version for t in (mean, var, batches)]
    with launches() as names:
        normalized(x, weight, bias, kind, running=Running(mean, var, batches, momentum))
    assert names in ([], ["channel_statistics_kernel", "merge_statistics_kernel", "normalize_channels_kernel"])
    wide, others = x.detach().double().cpu(), [0, *range(2, x.dim())]
    for actual, old, new in zip((mean, var), before, (wide.mean(others), wide.var(others)), strict=True):
        # A few roundings each of the old number, the new one and their difference.
        bound = 8 * FP32 * (old.abs() + new.abs())
        assert ((actual.double().cpu() - (old + momentum * (new - old))).abs() <= bound).all()
    assert batches == 4
    assert all(t._version > version for t, version in zip((mean, var, batches), versions, strict=True))


@pytest.mark.parametrize(("norm_of", "shape"), [(nn.BatchNorm1d, (5, 24, 9)), (nn.BatchNorm2d, (5, 24, 4, 3))])
def test_in_eval_mode_with_frozen_weights_nothing_of_the_input_is_kept(norm_of, shape):
    dense = norm_of(24)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, 1.0)
    for _ in range(3):
        dense(torch.randn(shape) + 0.5)  # the statistics are not those of the input
    layer, dense, x = compressed(dense, "norm", bits=8).eval(), dense.eval(), 2 * torch.randn(shape) + 1
    x, grad = x.bfloat16().requires_grad_(), torch.randn(shape).bfloat16()
    for with_bias in (False, True):
        for module in (layer, dense):
            module.weight.requires_grad_(False)
            module.bias.requires_grad_(with_bias)
        with saved_tensors() as saved:
            y = layer(x)
        assert torch.equal(y, dense(x))
        assert sum(tensor.numel() for tensor in saved) == 24
        found, right = (torch.autograd.grad(m(x), [x, m.bias][: 1 + with_bias], grad) for m in (layer, dense))
        for actual, expected in zip(found, right, strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7 * len(actual) ** 0.5)
    seconds, x = [], x.detach().double().requires_grad_()
    for module in (layer.requires_grad_(False).double(), dense.requires_grad_(False).double()):
        (once,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize(("kind", "bits"), [("batch-one", 4), ("last-24", 3), ("samples", 4)])
@force_backend("triton")
def test_a_relu_of_the_same_passes_is_that_after_them(kernel_device, kind, bits):
    """Bit for bit, of NaN too, by as many launches, for a bit a value: in whole bytes for each block."""
    given, grad = inputs(kind, kernel_device), None
    with torch.no_grad():
        given[0][0, 1] = math.nan
        given[1][0] = given[2][0] = 0.0  # outputs of exactly zero, of which a ReLU passes no gradient on
    results, kept, names_of = [], [], []
    for fused in (True, False):
        with small_tiles(operators, kernels, TILE_VALUES=256), launches() as names, saved_tensors() as saved:
            y = normalized(*given, kind, bits, fused)
        kept.append(sum(t.nbytes for t in saved))
        y = y if fused else torch.relu(y)
        if grad is None:  # one that is NaN does not pass where the output is zero
            grad = torch.where(y == 0, math.nan, torch.randn_like(y))
        with small_tiles(operators, kernels, TILE_VALUES=256), launches() as backward:
            grads = torch.autograd.grad(y, given, grad)
        results.append((y, *grads))
        names_of.append(names + backward)
    for actual, right in zip(*results, strict=True):
        assert (actual.dtype, actual.stride()) == (right.dtype, right.stride())
        torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
    assert (y == 0).any()
    assert names_of[0] == names_of[1]
    count, block = given[0].numel(), min(KINDS[kind][3], given[0].numel())
    bits_bytes = -(-count // block) * -(-block // 8)
    assert bits_bytes <= kept[0] - kept[1] < bits_bytes + 16


def compressed_block(block: nn.Module, **rules) -> nn.Module:
    block = copy.deepcopy(block)
    convert(block, rules={**rules, "type:norm": Keep(bits=4), "type:activation": Keep(bits=8), "*": None})
    return block


def activations(names: list[str]) -> int:
    """Return how many of the launched kernels are not those of a norm."""
    return sum("normalize" not in name and "statistics" not in name for name in names)


@pytest.mark.integration
@pytest.mark.parametrize(("name", "most"), [("BasicBlock", 1), ("Bottleneck", 2)])
@force_backend("triton")
def test_resnet_blocks_compute_in_one_pass_what_their_layers_do(kernel_device, name, most):
    """Unless somebody may see that their layers are called."""
    cls = getattr(resnet, name)
    block = nn.Sequential(cls(16, 16 // cls.expansion, 2, nn.Sequential(nn.Conv2d(16, 16, 1, 2), nn.BatchNorm2d(16))))
    for parameter in block.to(kernel_device).parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    ours, x = compressed_block(block), torch.randn(3, 16, 6, 4, device=kernel_device).requires_grad_()
    results, seen, separate = [], [], copy.deepcopy(ours)
    separate[0].relu.register_forward_hook(lambda module, arguments, y: None)  # which is called, therefore
    for module in (ours, separate):
        with launches() as names:
            y = module(x)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
        results.append((y, *torch.autograd.grad(y, (x, *module.parameters()), grad), *module.buffers()))
        seen.append(activations(names))
    assert seen[1] - seen[0] == most
    for actual, right in zip(*results, strict=True):
        assert torch.equal(actual, right)

    def fused(changed: nn.Module) -> int:
        with launches() as names:
            changed(x)
        return most + 1 - activations(names)

    hooked = copy.deepcopy(ours)
    hooked[0].bn1.register_forward_pre_hook(lambda module, arguments: None)
    assert fused(hooked) == fused(compressed_block(block, **{"0.bn1": None})) == most - 1
    assert fused(copy.deepcopy(ours).eval()) == 0
    handle = nn.modules.module.register_module_forward_hook(lambda module, arguments, y: None)
    try:
        assert fused(ours) == 0
    finally:
        handle.remove()


# Layers that scale each feature.


@pytest.mark.parametrize(
    ("form", "dtypes", "bits"),
    in_turn(
        [((3, 5, 70), 32), ((2, 300), 24), ((9, 8), 32)] * 2,
        list(itertools.product((torch.float32, torch.bfloat16), (torch.float32,), (torch.float32, torch.bfloat16))),
        (8, 3),
    ),
    ids=str,
)
def test_a_scaled_branch_is_added_in_the_same_pass(device, form, dtypes, bits):
    shape, block = form
    made = torch.randn(shape), 1 + torch.randn(shape[-1]), torch.randn(shape)
    x, weight, residual = (t.to(device, dtype).requires_grad_() for t, dtype in zip(made, dtypes, strict=True))
    with saved_tensors() as saved:
        y = scaled(x, weight, None, residual, block, bits)
    assert y.dtype == torch.float32
    wide, w, r = (t.detach().double().cpu() for t in (x, weight, residual))
    # Rounded once or twice: by half a unit of the product, and of the sum.
    bound = torch.finfo(torch.float32).eps * ((wide * w).abs() + r.abs())
    assert ((y.detach().double().cpu() - (r + wide * w)).abs() <= bound).all()
    grad_y = torch.randn_like(y)
    of_x, of_weight, of_residual = torch.autograd.grad(y, (x, weight, residual), grad_y)
    assert [g.dtype for g in (of_x, of_weight, of_residual)] == list(dtypes)
    assert torch.equal(of_residual, grad_y.to(dtypes[2]))
    g = grad_y.double().cpu()
    assert ((of_x.double().cpu() - g * w).abs() <= torch.finfo(dtypes[0]).eps * (g * w).abs()).all()
    rows, length = x.numel() // shape[-1], shape[-1]
    near = formats.dequantize(saved[0].cpu(), min(block, length), bits, torch.float32).double().view(rows, -1)
    assert oracle.relative_error(of_weight, (g.view(rows, length) * near[:, :length]).sum(0)) < 2e-6


def test_any_strides_of_a_scaled_branch(device):
    """Of branch, residual and gradient, alone and together; tensors may start anywhere."""
    shape = (4, 6, 33)
    makers = (
        lambda: torch.randn(shape, device=device),
        lambda: torch.randn(4, 33, 6, device=device).transpose(1, 2),
        lambda: torch.randn(8, 6, 70, device=device)[::2, :, 5:38],
        lambda: torch.randn(33, device=device).expand(shape),
    )
    weight = torch.randn(1, 1, 33, device=device, requires_grad=True)
    for of_x, of_residual, of_grad in itertools.product(makers, repeat=3):
        x, residual, grad_y = of_x().requires_grad_(), of_residual().requires_grad_(), of_grad()
        y = scaled(x, weight, None, residual, 32, 8)
        torch.testing.assert_close(y, residual + weight * x, rtol=3e-7, atol=3e-7)
        grads = torch.autograd.grad(y, (x, weight, residual), grad_y)
        torch.testing.assert_close(grads[0], grad_y * weight.detach())
        assert grads[1].shape == weight.shape
        assert torch.equal(grads[2], grad_y)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_place_in_a_scaled_branch(device, value):
    x, residual = (torch.randn(5, 70, device=device) for _ in range(2))
    weight = torch.randn(70, device=device, requires_grad=True)
    x[2, 3], residual[1, 5] = value, value
    x.requires_grad_()
    y = scaled(x, weight, None, residual, 32, 4)
    assert (~y.isfinite()).nonzero().tolist() == [[1, 5], [2, 3]]
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.randn_like(y))
    assert of_x.isfinite().all()
    assert of_weight[:32].isnan().all()  # of the block that cannot be stored
    assert of_weight[32:].isfinite().all()


def test_inputs_that_cannot_be_kept_are_left_to_torch():
    """What torch multiplies all the same: other numbers, values that are expanded, and fewer dimensions."""
    dense = Affine(70)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
    ours = compressed(dense, "affine", bits=8)
    for x in (torch.ones(2, 70, dtype=torch.int64), torch.randn(2, 1), torch.randn(())):
        found, right = ((y, *torch.autograd.grad(y.sum(), list(m.parameters()))) for m in (ours, dense) for y in [m(x)])
        assert all(map(torch.equal, found, right))


@pytest.mark.foreign
@pytest.mark.parametrize("path", ["plain", "hook"])
def test_a_block_adds_its_branches_on_the_way_if_nothing_is_between(path, device):
    dense = importlib.import_module("timm.models.mlp_mixer").ResBlock(70, 5).to(device)
    nn.init.normal_(dense.ls1), nn.init.normal_(dense.ls2)
    ours, x = compressed(nn.Sequential(dense), "scale", bits=8), torch.randn(3, 5, 70, device=device)
    if path == "hook":
        for block in (dense, ours[0]):
            block.drop_path.register_forward_hook(lambda module, args, y: 2 * y)
    added = []
    with pytest.MonkeyPatch.context() as patch:
        path_of, note = "lightning_actprune.operators.norm.scaled", lambda given: added.append(given[3] is not None)
        patch.setattr(path_of, lambda *given: note(given) or scaled(*given))
        y = ours(x)
    right = dense(x)
    assert added == [path == "plain"] * 2
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)
