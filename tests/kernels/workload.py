"""Every kernel once, at small odd shapes, with results compared on the CPU: the program that a sanitizer watches.

No product of the vendor's library runs here, and next to nothing of torch's on the GPU: what a tool reports is ours.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pkgutil
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from lightning_actprune import kernels
from lightning_actprune.kernels import column_sums, launch, unpack
from lightning_actprune.kernels import pack as packs
from lightning_actprune.kernels import weight_grad as weight_grads
from lightning_actprune.ops import activations, formats, reference
from lightning_actprune.ops import library as library  # registers the operators
from lightning_actprune.ops.activate import activate, activation_grad, pack_mask
from lightning_actprune.ops.activations import Kept
from lightning_actprune.ops.affine_grad import affine_grad as affine_grad  # registers the operator
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.gate import GATE_LAST, Stored, gate, gate_grad
from lightning_actprune.ops.geometry import ALL_BLOCKS, BlockGeometry
from lightning_actprune.ops.line_norm import LineNormSetting, few_bit_batch_norm_relu
from lightning_actprune.ops.line_plan import Running
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle

# Samples of 15, 1098 and 37800 blocks: one for each way of selecting. Row lengths that blocks do not divide.
STREAMED = (1, 4200, 130)
SHAPES = [((5, 3, 70), 16), ((2, 122, 130), 16), (STREAMED, 16), ((2, 61, 100), 7), ((3, 41, 100), 24)]
SHAPES += [((2, 37, 96), 32), ((2, 33, 150), 64), ((1, 150, 200), 128)]
DTYPES = (torch.float32, torch.bfloat16)
OUTPUTS = 33
SPLITS = (1, 3)
ONE_LAUNCH = [((2, 122, 130), 16, 0.6), ((2, 122, 130), 16, 0.95), ((3, 41, 100), 7, 0.3)]
"""Shape, block size and sparsity: keys in the values, where they do not fit, and where they are not aligned."""


def kernel_names() -> set[str]:
    """Return the names of all kernels of the package: jitted functions called ``*_kernel``."""
    modules = [importlib.import_module(f"{kernels.__name__}.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


@contextlib.contextmanager
def launches() -> Iterator[list[str]]:
    """Collect the names of the kernels launched inside, in their order."""
    names: list[str] = []
    original = launch.Launch.__call__

    def noting(self: launch.Launch, *tensors: Tensor) -> None:
        names.append(self._kernel.fn.__name__)
        original(self, *tensors)

    with mock.patch.object(launch.Launch, "__call__", noting):
        yield names


@contextlib.contextmanager
def split_into(parts: int) -> Iterator[None]:
    """Cut every reduction inside into ``parts``."""
    weight_grads._plan.cache_clear()
    with mock.patch.object(weight_grads, "choose_split", return_value=parts):
        yield
    weight_grads._plan.cache_clear()


@contextlib.contextmanager
def one_launch(wanted: bool) -> Iterator[None]:
    """Pack inside with one program per sample, or never so."""
    packs.plan.cache_clear()
    with mock.patch.object(packs, "takes_one_launch", return_value=wanted):
        yield
    packs.plan.cache_clear()


def check_pack_and_unpack(x: Tensor, block_size: int, sparsity: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Pack ``x [S, T, L]``, unpack it in both orders, and return the packed form."""
    samples, rows, length = x.shape
    keep = BlockGeometry.of(samples, rows, length, block_size, sparsity).keep
    packed = torch.ops.actprune.pack(x, block_size, keep)
    values, bitmap, offsets = (t.cpu() for t in packed)
    for actual, expected in zip((values, bitmap, offsets), reference.pack(x.cpu(), block_size, keep), strict=True):
        assert torch.equal(actual, expected), (x.shape, x.dtype, block_size)
    dense = reference.unpack(values, bitmap, samples * rows, length).view(x.shape)
    for features_first, expected in ((False, dense), (True, dense.transpose(0, 1))):
        actual = unpack.unpack(*packed, (samples, rows, length), features_first)
        assert torch.equal(actual.cpu(), expected), (x.shape, x.dtype, block_size, features_first)
    return packed


def check_cast(x: Tensor, block_size: int, dtype: torch.dtype, keep: int) -> None:
    """Pack ``x [S, T, L]`` as ``dtype``, and compare the copy made on the way too."""
    copy = torch.empty(x.shape, dtype=dtype, device=x.device)
    plan = packs.plan(x.shape, x.stride(), block_size, keep, x.dtype, x.device, x.data_ptr() % 16 == 0, dtype)
    expected = (x.cpu().to(dtype), *reference.pack(x.cpu().to(dtype), block_size, keep))
    packed = plan(x, copy)
    for actual, right in zip((copy, *packed), expected, strict=True):
        assert torch.equal(actual.cpu(), right), (x.shape, dtype, block_size)


def check_quantized(x: Tensor, block_size: int, value_format: str) -> None:
    """Store ``x [S, T, L]`` in few bits, and compare positions, values and weight gradient with the reference's."""
    samples, rows, length = x.shape
    keep = BlockGeometry.of(samples, rows, length, block_size, 0.6).keep
    packed = torch.ops.actprune.pack(x, block_size, keep, value_format)
    expected = reference.pack(x.cpu(), block_size, keep, value_format)
    for actual, right in zip(packed[1:], expected[1:], strict=True):
        assert torch.equal(actual.cpu(), right), (x.shape, block_size, value_format)
    blocks = block_size, value_format, x.dtype
    values, right = (formats.dequantize(stored[0].cpu(), *blocks).float() for stored in (packed, expected))
    assert torch.equal(values, right), (x.shape, block_size, value_format)
    dense = reference.unpack(values, packed[1].cpu(), samples * rows, length)
    found = torch.ops.actprune.unpack(*packed, samples * rows, length, *blocks)
    assert torch.equal(found.cpu().float(), dense), (x.shape, block_size, value_format)
    grad_y = oracle.integers(samples * rows, OUTPUTS, dtype=x.dtype)
    shape = 1, samples * rows, length, False, torch.float32, block_size, value_format
    with force_method("gather"):
        actual = torch.ops.actprune.weight_grad(grad_y.to(x.device), *packed, *shape)
    assert oracle.relative_error(actual, grad_y.double().t() @ dense.double()) < 1e-5, (x.shape, value_format)


def check_selected(x: Tensor, block_size: int, value_format: str, block_selection: str) -> None:
    """Pack the chosen blocks of ``x [S, T, L]``, and compare them with the reference's."""
    samples, rows, length = x.shape
    keep = BlockGeometry.of(samples, rows, length, block_size, 0.6).keep
    packed = packs.pack(x, block_size, keep, value_format, block_selection)
    expected = reference.pack(x.cpu(), block_size, keep, value_format, block_selection)
    for actual, right in zip(packed, expected, strict=True):
        assert torch.equal(actual.cpu(), right), (x.shape, x.dtype, block_size, value_format, block_selection)


def check_whole(x: Tensor, block_size: int, value_format: str) -> None:
    """Store all blocks of ``x [S, T, L]`` in few bits, and compare what is read with the reference's."""
    samples, rows, length = x.shape
    packed = torch.ops.actprune.pack(x, block_size, ALL_BLOCKS, value_format)
    stored = formats.quantize(reference.split_blocks(x.cpu(), block_size).reshape(-1, block_size), value_format)
    assert torch.equal(packed[0].cpu(), stored), (x.shape, block_size, value_format)
    found = torch.ops.actprune.unpack(*packed, samples * rows, length, block_size, value_format, x.dtype)
    right = formats.dequantize(stored, block_size, value_format, x.dtype).view(samples * rows, -1)[:, :length]
    assert torch.equal(found.cpu(), right), (x.shape, block_size, value_format)


def check_weight_grad(packed: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int, int]) -> None:
    """Compute the weight gradient from packed integers, whole and in parts: its sums are exact in fp32."""
    samples, rows, length = shape
    values, bitmap, _ = packed
    dense = reference.unpack(values.cpu(), bitmap.cpu(), samples * rows, length).float()
    grad_y = oracle.integers(samples * rows, OUTPUTS, dtype=values.dtype)
    for parts in SPLITS:
        with split_into(parts), force_method("gather"):
            actual = torch.ops.actprune.weight_grad(
                grad_y.to(values.device), *packed, 1, samples * rows, length, False, torch.float32, values.shape[1]
            )
        assert torch.equal(actual.cpu(), grad_y.float().t() @ dense), (shape, values.dtype, parts)


def check_column_sums(grad_y: Tensor) -> None:
    """Sum the columns of integers, in parts and at once."""
    for rows in (grad_y, grad_y[:20, 3:]):
        assert torch.equal(column_sums.column_sums(rows, torch.float32).cpu(), rows.cpu().float().sum(0)), rows.shape


def check_activation(x: Tensor, kept: Kept) -> None:
    """Apply an activation function to ``x [N]``, and compare what is read of its codes with the reference's."""
    y, codes = activate(x, kept, x.dtype)
    right = activations.ACTIVATIONS[kept.function].forward(x.cpu(), *kept.parameters)
    assert torch.allclose(y.cpu(), right, rtol=1e-2, atol=1e-3), (x.shape, kept)
    found = activation_grad(y, codes, (1,), kept, x.dtype).cpu()
    assert torch.equal(found, activations.multiply(y.cpu(), codes.cpu(), kept, x.dtype)), (x.shape, kept)


def check_mask(mask: Tensor) -> None:
    """Pack ``mask [N]``, and compare with the reference."""
    assert torch.equal(pack_mask(mask).cpu(), activations.encode_mask(mask.cpu())), mask.shape


def check_gate(x: Tensor, kept: Kept, block_size: int) -> None:
    """Multiply the halves of ``x [R, 2 L]``, one the gate, and go back into halves; compare what is read."""
    a, u = x.chunk(2, 1)
    stored = Stored(kept.value_format, block_size, True, True)
    z, values = gate(a, u, kept, stored, x.dtype)
    right = activations.ACTIVATIONS[kept.function].forward(a.float().cpu(), *kept.parameters) * u.float().cpu()
    assert torch.allclose(z.float().cpu(), right, rtol=1e-2, atol=1e-3), (x.shape, kept)
    found, _ = gate_grad(z, values, stored, GATE_LAST, torch.float32, torch.float32)
    with force_backend("reference"):
        expected, _ = gate_grad(z.cpu(), values.cpu(), stored, GATE_LAST, torch.float32, torch.float32)
    assert torch.equal(found.cpu(), expected), (x.shape, kept)


def check_norm(x: Tensor, block_size: int, value_format: str) -> None:
    """Normalise the rows of ``x [R, L]``, and go back; compare with torch's own layer."""
    length = x.shape[1]
    weight = oracle.integers(length, device=x.device)
    layout = True, False, 1e-5, block_size, value_format, True
    y, *kept = torch.ops.actprune.normalize(x, weight, None, *layout, x.dtype)
    wide = x.float().cpu()
    right = torch.nn.functional.layer_norm(wide, (length,), weight.cpu())
    assert oracle.relative_error(y, right) < 2 * torch.finfo(x.dtype).eps, (x.shape, block_size, value_format)
    layout = True, block_size, value_format, True, torch.float32, True
    grad_x, sums = torch.ops.actprune.normalize_grad(x, *kept, weight, *layout)
    assert torch.equal(sums[1].cpu(), wide.sum(0)), (x.shape, block_size, value_format)
    assert grad_x.cpu().isfinite().all(), (x.shape, block_size, value_format)


def check_affine_grad(x: Tensor, block_size: int, value_format: str) -> None:
    """Pack ``x [S, T, L]``, and compare the gradients that come from it with the reference's: sums of integers."""
    samples, rows, length = x.shape
    keep = BlockGeometry.of(samples, rows, length, block_size, 0.6).keep
    packed = torch.ops.actprune.pack(x, block_size, keep, value_format)
    grad_y = oracle.integers(samples * rows, length, dtype=x.dtype)
    weight, layout = oracle.integers(length), (torch.float32, block_size, value_format, True)
    on_cpu = [t.cpu() for t in packed]
    with force_backend("reference"):
        right_x, right = torch.ops.actprune.affine_grad(grad_y, *on_cpu, weight, *layout)
    grad_x, sums = torch.ops.actprune.affine_grad(grad_y.to(x.device), *packed, weight.to(x.device), *layout)
    assert torch.equal(grad_x.cpu(), right_x), (x.shape, block_size, value_format)
    assert torch.allclose(sums.cpu(), right, rtol=1e-4, atol=1e-4), (x.shape, block_size, value_format)


def check_line_norm(x: Tensor, groups: int, value_format: str) -> None:
    """Normalise the channels of ``x [N, C, ...]``, or groups of them, and go back; compare with torch's own layer."""
    weight = oracle.integers(x.shape[1], device=x.device)
    stored = groups, 24, value_format
    y, *kept = torch.ops.actprune.normalize_lines(x, weight, None, None, groups, 1e-5, *stored[1:], x.dtype)
    wide, others = x.float().cpu(), [0, *range(2, x.dim())]
    if groups:
        right = torch.nn.functional.group_norm(wide, groups, weight.cpu())
    else:
        right = torch.nn.functional.batch_norm(wide, None, None, weight.cpu(), training=True)
    assert oracle.relative_error(y, right) < 2 * torch.finfo(x.dtype).eps, (x.shape, groups, value_format)
    grad_x, sums = torch.ops.actprune.normalize_lines_grad(x, *kept, weight, y.stride(), False, *stored, torch.float32)
    assert torch.equal(sums[1].cpu(), wide.sum(others)), (x.shape, groups, value_format)
    assert grad_x.cpu().isfinite().all(), (x.shape, groups, value_format)


def check_line_relu(x: Tensor, value_format: str) -> None:
    """Normalise the channels of ``x [N, C, ...]`` and apply a ReLU by a plan, with running statistics, and go back."""
    x, weight = x.detach().requires_grad_(), oracle.integers(x.shape[1], device=x.device).requires_grad_()
    mean, var = torch.zeros(x.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)
    running = Running(mean, var, torch.zeros((), dtype=torch.int64, device=x.device), 0.5)
    y = few_bit_batch_norm_relu(x, weight, None, LineNormSetting(0, 1e-5, 24, value_format), x.dtype, running)
    wide, others = x.detach().float().cpu(), [0, *range(2, x.dim())]
    right = torch.nn.functional.batch_norm(wide, None, None, weight.detach().cpu(), training=True).relu()
    assert oracle.relative_error(y.detach(), right) < 2 * torch.finfo(x.dtype).eps, (x.shape, value_format)
    torch.testing.assert_close(mean.cpu(), wide.mean(others) / 2, rtol=1e-5, atol=1e-5)
    assert running.batches == 1
    for grad in torch.autograd.grad(y, (x, weight), torch.ones_like(y)):
        assert grad.cpu().isfinite().all(), (x.shape, value_format)


def run_all(device: torch.device) -> list[str]:
    """Launch everything on ``device`` and return the names of the kernels; raise if one is missing or wrong."""
    torch.manual_seed(0)
    with launches() as names, force_backend("triton"):
        for (shape, block_size, sparsity), dtype in itertools.product(ONE_LAUNCH, DTYPES):
            with one_launch(True):
                check_pack_and_unpack(oracle.integers(*shape, dtype=dtype, device=device), block_size, sparsity)
        for (shape, block_size), dtype in itertools.product(SHAPES, DTYPES):
            with one_launch(False):
                packed = check_pack_and_unpack(oracle.integers(*shape, dtype=dtype, device=device), block_size)
                if shape != STREAMED:  # whose many rows bring nothing new here, and take the interpreter long
                    check_weight_grad(packed, shape)
        for dtype in DTYPES:
            check_column_sums(oracle.integers(1031, 150, dtype=dtype, device=device))
        for wanted, dtype in itertools.product((True, False), (torch.bfloat16, torch.float16)):
            with one_launch(wanted):
                check_cast(oracle.integers(2, 122, 130, device=device), 16, dtype, 400)
                check_cast(oracle.integers(3, 42, 103, device=device)[:, 1:, 3:], 7, dtype, 400)
        for wanted, value_format in itertools.product((True, False), ("int3", "fp8")):
            with one_launch(wanted):
                check_quantized(oracle.integers(2, 122, 130, device=device), 16, value_format)
            check_whole(oracle.integers(3, 42, 103, device=device)[:, 1:, 3:], 24, value_format)
        for dtype, value_format in itertools.product((torch.float32, torch.float16), ("same", "int4")):
            with one_launch(True):
                check_selected(oracle.integers(2, 122, 130, dtype=dtype, device=device), 16, value_format, "swap")
            with one_launch(False):
                for shape, block_size in SHAPES[:2]:
                    x = oracle.integers(*shape, dtype=dtype, device=device)
                    check_selected(x, block_size, value_format, "swap")
                    check_selected(x, block_size, value_format, "unbiased")
        check_selected(oracle.integers(*STREAMED, device=device), 16, "same", "unbiased")
        for dtype, value_format in itertools.product((torch.float32, torch.float16), activations.FORMAT_NAMES):
            check_activation(oracle.integers(4100, dtype=dtype, device=device)[3:], Kept("gelu", (), value_format))
            check_activation(oracle.integers(2051, dtype=dtype, device=device), Kept("relu6", (), value_format))
        check_mask(oracle.integers(4103, device=device)[3:] > 1)
        for dtype, value_format in itertools.product(DTYPES, ("int3", "int4")):
            x = oracle.integers(37, 2 * 103 + 4, dtype=dtype, device=device)[1:, 3:-1]
            check_gate(x, Kept("silu", (), value_format), 24)
            check_gate(x, Kept("relu", (), value_format), 32)
        for dtype, value_format in itertools.product(DTYPES, ("int3", "fp8")):
            check_norm(oracle.integers(37, 103, dtype=dtype, device=device)[1:, 3:], 24, value_format)
            images = oracle.integers(3, 10, 7, 9, dtype=dtype, device=device)
            check_line_norm(images, 0, value_format)
            check_line_norm(images, 5, value_format)
            check_line_norm(images.contiguous(memory_format=torch.channels_last), 0, value_format)
            check_line_relu(images.contiguous(memory_format=torch.channels_last), value_format)
            check_line_relu(images.contiguous(), value_format)
        for dtype, value_format in itertools.product(DTYPES, ("same", "int3")):
            check_affine_grad(oracle.integers(3, 42, 103, dtype=dtype, device=device)[:, 1:, 3:], 24, value_format)
            check_affine_grad(oracle.integers(5, 3, 70, dtype=dtype, device=device), 16, value_format)
        # Rows with gaps between them, at a start that is not aligned.
        check_pack_and_unpack(oracle.integers(2, 37, 101, device=device)[:, 1:, 3:], 16)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    missing = kernel_names() - set(names)
    assert not missing, f"never launched: {sorted(missing)}"
    return sorted(set(names))
