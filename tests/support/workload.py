"""Every kernel at small odd shapes, for sanitizers: the tests of the kernels compare what they compute."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

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
from lightning_actprune.operators.activation import StoredDerivative, pack_mask

# Samples of 15, 1098 and 37800 blocks: one for each way of selecting. Row lengths that blocks do not divide.
STREAMED = (1, 4200, 130)
SHAPES = [((5, 3, 70), 16), ((2, 122, 130), 16), ((2, 61, 100), 7), ((3, 41, 100), 24)]
SHAPES += [((2, 37, 96), 32), ((2, 33, 150), 64), ((1, 150, 200), 128)]
DTYPES = (torch.float32, torch.bfloat16)
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


def weight_grad(
    grad_y: Tensor, values: Tensor, bitmap: Tensor, offsets: Tensor, length: int, block_size: int, bits: int = 0
) -> Tensor:
    """Return the weight gradient in fp32 by a launch of its own."""
    rows, outputs = grad_y.shape
    sizes = bitmap.shape[0], rows, length, values.shape[0], block_size, grad_y.element_size(), bits
    launch = weight_grad_launch(Shape(outputs, grad_y.stride(0), *sizes), torch.float32, grad_y.device)
    return launch(grad_y, values, bitmap, offsets)


def keep_of(x: Tensor, block_size: int) -> int:
    return BlockGeometry.of(*x.shape, block_size, 0.6).keep


def pack_and_unpack(x: Tensor, block_size: int, keep: int, bits: int = 0, selection: str = "largest") -> None:
    """Pack ``x [S, T, L]``, and unpack it in both orders."""
    stored = pack(x, block_size, keep, bits, selection)
    for samples_second in (False, True):
        unpack_batch(stored, x.shape, samples_second, block_size, bits, x.dtype)


def reduce(x: Tensor, block_size: int, bits: int = 0) -> None:
    """Compute the weight gradient of ``x [S, T, L]`` as it is packed, whole and in parts."""
    stored = pack(x, block_size, keep_of(x, block_size), bits, "largest")
    grad_y = torch.randn(len(x) * x.shape[1], 33, device=x.device).to(x.dtype)
    for parts in (1, 3):
        with mock.patch.object(linear, "choose_split", return_value=parts):
            weight_grad(grad_y, *stored, x.shape[2], block_size, bits)


def add_up(grad_y: Tensor) -> None:
    """Sum the columns, in parts and at once, and those of two sets."""
    for rows in (grad_y, grad_y[:20, 3:]):
        sizes = *rows.shape, rows.stride(0), rows.element_size()
        column_sums_launch(*sizes, torch.float32, rows.device)(rows)
    sets = grad_y.float()[:, :100].contiguous()
    launch = AddSetsLaunch(len(sets), 2, 50, sets.device)
    scratch = torch.cat([sets.flatten(), sets.new_zeros(launch.scratch - sets.numel())])
    launch(scratch, *sets.new_empty(2, 50).unbind())


def run_packing(device: torch.device) -> None:
    for (shape, block_size), dtype in itertools.product(SHAPES, DTYPES):
        x = torch.randn(shape, device=device).to(dtype)
        pack_and_unpack(x, block_size, keep_of(x, block_size))
        reduce(x, block_size)
    # The interpreter takes seconds for a sample as large, and the other ways of scaling are below.
    for selection in SELECTIONS if device.type == "cuda" else SELECTIONS[-1:]:
        x = torch.randn(STREAMED, device=device)
        pack_and_unpack(x, 16, keep_of(x, 16), 0, selection)
    for (shape, block_size), bits, selection in itertools.product(SHAPES[:2], (0, 4), SELECTIONS[1:]):
        x = torch.randn(shape, device=device).half()
        pack_and_unpack(x, block_size, keep_of(x, block_size), bits, selection)
    unaligned, whole = torch.randn(3, 42, 103, device=device)[:, 1:, 3:], torch.randn(2, 122, 130, device=device)
    for bits in (3, 8):
        pack_and_unpack(unaligned, 24, ALL_BLOCKS, bits)
        pack_and_unpack(unaligned, 24, keep_of(unaligned, 24), bits)
        reduce(whole, 16, bits)
    for dtype, (x, block_size) in itertools.product((torch.bfloat16, torch.float16), ((whole, 16), (unaligned, 7))):
        copy = torch.empty(x.shape, dtype=dtype, device=device)
        packs.pack_launch(x.shape, x.stride(), block_size, 400, device, dtype)(x, copy)
    for dtype in DTYPES:
        add_up(torch.randn(1031, 150, device=device).to(dtype))


def run_activations(device: torch.device) -> None:
    for name, bits, dtype in (("gelu", 3, torch.float32), ("silu", 8, torch.bfloat16), ("relu", 4, torch.float16)):
        stored, x = StoredDerivative(name, (), bits), torch.randn(2051).to(dtype).to(device)[1:]
        _, codes = activation_operator.activate_eagerly(x, stored, dtype)
        activation_operator.activation_grad(x, codes, (1,), stored, dtype, True)
        a, u = torch.randn(13, 205).to(dtype).to(device)[:, 3:].chunk(2, 1)
        factors = gated_operator.StoredFactors(bits, 24, True, True)
        z, values = gated_operator.gate_eagerly(a, u, stored, factors, dtype)
        gated_operator.gate_grad_eagerly(z, values, factors, gated_operator.SEPARATE, dtype, dtype)
    pack_mask(torch.rand(1003).to(device) < 0.3)


def run_norms(device: torch.device) -> None:
    settings = norm_operator.NormSetting(True, False, 1e-5, 24, 4), norm_operator.NormSetting(False, True, 1e-5, 32, 3)
    for setting, dtype in itertools.product(settings, DTYPES):
        x, form = torch.randn(37, 103).to(dtype).to(device)[1:, 3:], ((100,), setting, torch.float32)
        go_both_ways(norm_operator.norm, x, form)
    for groups, last, relu in ((0, False, False), (0, True, True), (4, False, False)):
        x = torch.randn(3, 5, 7, 20).to(device) if last else torch.randn(3, 20, 5, 7).to(device)
        form = channel_operator.ChannelSetting(groups, 1e-5, 32, 4, relu), torch.float32
        go_both_ways(channel_operator.channel_norm, x.movedim(-1, 1) if last else x, form)


def go_both_ways(operator: Callable[..., Tensor], x: Tensor, form: tuple[object, ...]) -> None:
    """Normalise ``x [N, C, ...]`` with a weight and a bias, and compute their gradients."""
    given = [t.to(x.device).requires_grad_() for t in (x.detach(), *torch.randn(2, x.shape[1]).unbind())]
    y = operator(*given, *form)
    torch.autograd.grad(y, given, torch.randn(y.shape).to(x.device))


def run_all(device: torch.device) -> list[str]:
    """Launch everything on ``device`` and return the names of the kernels; raise if one is missing."""
    torch.manual_seed(0)
    with launches() as names, force_backend("triton"):
        for run in (run_packing, run_activations, run_norms):
            run(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    missing = kernel_names() - set(names)
    assert not missing, f"never launched: {sorted(missing)}"
    return sorted(set(names))
