"""Every kernel once at small odd shapes, compared on the CPU: for sanitizers, hence hardly any kernel of others."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
from torch import Tensor

from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import ALL_BLOCKS, SELECTIONS, BlockGeometry
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.codec.packed import pack, unpack_batch
from lightning_actprune.kernels import activation, channel_norm, gated, launch, linear, norm, sums, unpack
from lightning_actprune.kernels import pack as packs
from lightning_actprune.kernels.linear import Shape, weight_grad_launch
from lightning_actprune.kernels.sums import AddSetsLaunch, column_sums_launch
from lightning_actprune.operators import activation as activation_operator
from lightning_actprune.operators import channel_norm as channel_operator
from lightning_actprune.operators import gated as gated_operator
from lightning_actprune.operators import norm as norm_operator
from lightning_actprune.operators.activation import StoredDerivative
from lightning_actprune.operators.dropout import pack_mask
from tests.support import oracle
from tests.support.packing import rounded

# Samples of 15, 1098 and 37800 blocks: one for each way of selecting. Row lengths that blocks do not divide.
STREAMED = (1, 4200, 130)
SHAPES = [((5, 3, 70), 16), ((2, 122, 130), 16), ((2, 61, 100), 7), ((3, 41, 100), 24)]
SHAPES += [((2, 37, 96), 32), ((2, 33, 150), 64), ((1, 150, 200), 128)]
DTYPES = (torch.float32, torch.bfloat16)
OUTPUTS = 33
SPLITS = (1, 3)
MODULES = [packs, unpack, linear, sums, activation, gated, norm, channel_norm]


def kernel_names() -> set[str]:
    return {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}


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
    with mock.patch.object(linear, "choose_split", return_value=parts):
        yield


def weight_grad(
    grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor, length: int, block_size: int, bits: int = 0
) -> Tensor:
    """Return the weight gradient in fp32 by a launch of its own."""
    rows, outputs = grad_y.shape
    sizes = bitmap.shape[0], rows, length, values.shape[0], block_size, grad_y.element_size(), bits
    launch = weight_grad_launch(Shape(outputs, grad_y.stride(0), *sizes), torch.float32, grad_y.device)
    return launch(grad_y, values, bitmap, offsets)


def assert_equal(actual: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for one, right in zip(actual, wanted, strict=True):
        assert torch.equal(one.cpu(), right)


def check_packed(
    x: Tensor, block_size: int, bits: int = 0, selection: str = "largest", all_blocks: bool = False
) -> None:
    """Pack ``x [S, T, L]``, unpack it in both orders, and compare with the reference."""
    samples, rows, length = x.shape
    keep = ALL_BLOCKS if all_blocks else BlockGeometry.of(*x.shape, block_size, 0.6).keep
    stored = pack(x, block_size, keep, bits, selection)
    right = blocks.pack(x.cpu(), block_size, keep, bits, selection)
    assert_equal(stored, right)
    dense = blocks.unpack(right[0], right[1], samples * rows, length, block_size, bits, x.dtype).view(x.shape)
    read = [unpack_batch(stored, x.shape, first, block_size, bits, x.dtype) for first in (False, True)]
    assert_equal(read, (dense, dense.transpose(0, 1)))


def check_cast(x: Tensor, block_size: int, dtype: torch.dtype, keep: int) -> None:
    """Pack ``x [S, T, L]`` as ``dtype``, and compare the copy made on the way too."""
    copy, expected = torch.empty(x.shape, dtype=dtype, device=x.device), x.cpu().to(dtype)
    packed = packs.pack_launch(x.shape, x.stride(), block_size, keep, x.device, dtype)(x, copy)
    assert_equal((copy, *packed), (expected, *blocks.pack(expected, block_size, keep)))


def check_weight_grad(x: Tensor, block_size: int, bits: int) -> None:
    """Compute the weight gradient of packed integers, whole and in parts: sums of what is not quantized are exact."""
    samples, rows, length = x.shape
    stored = blocks.pack(x.cpu(), block_size, BlockGeometry.of(*x.shape, block_size, 0.6).keep, bits)
    dense = blocks.unpack(stored[0], stored[1], samples * rows, length, block_size, bits, x.dtype)
    grad_y = oracle.integers(samples * rows, OUTPUTS, dtype=x.dtype)
    for parts in SPLITS:
        with split_into(parts):
            actual = weight_grad(grad_y.to(x.device), *(t.to(x.device) for t in stored), length, block_size, bits)
        error = oracle.relative_error(actual, grad_y.double().t() @ dense.double())
        assert error < (1e-5 if bits else 1e-12), (x.shape, x.dtype, block_size, bits, parts)


def check_sums(grad_y: Tensor) -> None:
    """Sum the columns of integers, in parts and at once, and those of two sets."""
    for rows in (grad_y, grad_y[:20, 3:]):
        sizes = *rows.shape, rows.stride(0), rows.element_size()
        found = column_sums_launch(*sizes, torch.float32, rows.device)(rows)
        assert torch.equal(found.cpu(), rows.cpu().float().sum(0)), rows.shape
    sets = grad_y.float()[:, :100].contiguous()
    launch = AddSetsLaunch(len(sets), 2, 50, sets.device)
    scratch = torch.cat([sets.flatten(), sets.new_zeros(launch.scratch - sets.numel())])
    first, second = sets.new_empty(2, 50).unbind()
    launch(scratch, first, second)
    assert torch.equal(torch.cat([first, second]).cpu(), sets.cpu().sum(0))


def check_packing(device: torch.device) -> None:
    for (shape, block_size), dtype in itertools.product(SHAPES, DTYPES):
        x = oracle.integers(*shape, dtype=dtype, device=device)
        check_packed(x, block_size)
        check_weight_grad(x, block_size, 0)
    # The interpreter takes seconds for a sample as large, and the other ways of scaling are below.
    for selection in SELECTIONS if device.type == "cuda" else SELECTIONS[-1:]:
        check_packed(oracle.integers(*STREAMED, device=device), 16, 0, selection)
    for (shape, block_size), bits, selection in itertools.product(SHAPES[:2], (0, 4), SELECTIONS[1:]):
        check_packed(oracle.integers(*shape, dtype=torch.float16, device=device), block_size, bits, selection)
    for bits, everything in itertools.product((3, 8), (False, True)):
        x = oracle.integers(3, 42, 103, device=device)[:, 1:, 3:]  # at a start that is not aligned
        check_packed(x, 24, bits, all_blocks=everything)
        check_weight_grad(oracle.integers(2, 122, 130, device=device), 16, bits)
    for dtype in (torch.bfloat16, torch.float16):
        check_cast(oracle.integers(2, 122, 130, device=device), 16, dtype, 400)
        check_cast(oracle.integers(3, 42, 103, device=device)[:, 1:, 3:], 7, dtype, 400)
    for dtype in DTYPES:
        check_sums(oracle.integers(1031, 150, dtype=dtype, device=device))


def check_activations(device: torch.device) -> None:
    for name, bits, dtype in (("gelu", 3, torch.float32), ("silu", 8, torch.bfloat16), ("relu", 4, torch.float16)):
        stored, x = StoredDerivative(name, (), bits), torch.randn(2051).to(dtype).to(device)[1:]
        _, codes = activation_operator.activate_eagerly(x, stored, dtype)
        found = activation_operator.activation_grad(x, codes, (1,), stored, dtype, True)
        right = activation_operator.multiply(x.cpu(), codes.cpu(), stored, torch.float32)
        assert torch.equal(found.cpu(), rounded(right, dtype, device)), (name, bits)
        a, u = torch.randn(13, 205).to(dtype).to(device)[:, 3:].chunk(2, 1)
        factors = gated_operator.StoredFactors(bits, 24, True, True)
        z, values = gated_operator.gate_eagerly(a, u, stored, factors, dtype)
        grads = gated_operator.gate_grad_eagerly(z, values, factors, gated_operator.SEPARATE, dtype, dtype)
        settings = factors, gated_operator.SEPARATE, torch.float32, torch.float32
        right = gated_operator.gate_grad(z.cpu(), values.cpu(), *settings)
        assert_equal(grads, (rounded(wanted, dtype, device) for wanted in right))
    mask = torch.rand(1003).to(device) < 0.3
    assert torch.equal(pack_mask(mask).cpu(), activation_operator.encode_mask(mask.cpu()))


def check_norms(device: torch.device) -> None:
    settings = norm_operator.NormSetting(True, False, 1e-5, 24, 4), norm_operator.NormSetting(False, True, 1e-5, 32, 3)
    for setting, dtype in itertools.product(settings, DTYPES):
        x, form = torch.randn(37, 103).to(dtype).to(device)[1:, 3:], ((100,), setting, torch.float32)
        check_same_gradients(lambda *given, form=form: norm_operator.norm(*given, *form), x)
    for groups, last, relu in ((0, False, False), (0, True, True), (4, False, False)):
        x = torch.randn(3, 5, 7, 20).to(device) if last else torch.randn(3, 20, 5, 7).to(device)
        form = channel_operator.ChannelSetting(groups, 1e-5, 32, 4, relu), torch.float32
        norm = lambda *given, form=form: channel_operator.channel_norm(*given, *form)  # noqa: E731
        check_same_gradients(norm, x.movedim(-1, 1) if last else x)


def check_same_gradients(norm: Callable[..., Tensor], x: Tensor) -> None:
    """Compare the gradients that kernels and plain torch make of what the kernels stored of ``x [N, C, ...]``."""
    given = [t.to(x.device).requires_grad_() for t in (x.detach(), *torch.randn(2, x.shape[1]).unbind())]
    y = norm(*given)
    grad_y, found = torch.randn(y.shape).to(x.device), []
    for backend in ("triton", "reference"):
        with force_backend(backend):  # type: ignore[arg-type]
            found.append(torch.autograd.grad(y, given, grad_y, retain_graph=True))
    for actual, wanted in zip(*found, strict=True):
        assert oracle.relative_error(actual, wanted) < max(1e-5, 2 * torch.finfo(actual.dtype).eps), x.shape


def run_all(device: torch.device) -> list[str]:
    """Launch everything on ``device`` and return the names of the kernels; raise if one is missing or wrong."""
    torch.manual_seed(0)
    with launches() as names, force_backend("triton"):
        for check in (check_packing, check_activations, check_norms):
            check(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    missing = kernel_names() - set(names)
    assert not missing, f"never launched: {sorted(missing)}"
    return sorted(set(names))
