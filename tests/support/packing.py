"""What tests of packing share: inputs that are difficult, the expected bytes and values, and how kernels round."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import BlockGeometry, stored_view
from lightning_actprune.codec.formats import PLANES
from lightning_actprune.codec.packed import Packed, pack
from lightning_actprune.kernels.pack import PackLaunch, QuantizeLaunch, pack_launch
from tests.support import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
each_bits = pytest.mark.parametrize("bits", PLANES)
Stored = tuple[Tensor, Tensor, Tensor]


def packed(
    x: Tensor, block_size: int, sparsity: float, scope: str = "sample", bits: int = 0, selection: str = "largest"
) -> tuple[Packed, BlockGeometry]:
    """Return a layer input of any shape as it is packed."""
    stored, _ = stored_view(x, block_size, scope)
    geometry = BlockGeometry.of_stored(stored, block_size, sparsity)
    keep = blocks.block_and_keep(stored, block_size, blocks.sparsity_parts(sparsity), bits)[1]
    tensors = pack(stored, geometry.block_size, keep, bits, selection)
    return Packed(tensors, tuple(stored.shape), False, geometry.block_size, bits), geometry


def unpacked(x: Tensor, p: Packed) -> Tensor:
    return p.unpack(x.dtype).view(p.shape)


def expected(
    x: Tensor, block_size: int, keep: int, bits: int = 0, selection: str = "largest", device: object = "cpu"
) -> Stored:
    """Return what the reference stores of ``x [S, T, L]``, on ``device``: of large inputs a GPU is the faster one.

    Scaled values are rounded as on the device of ``x``.
    """
    exact = blocks.rescale

    def rescale(values: Tensor, by: Tensor) -> Tensor:
        if values.dtype != torch.bfloat16:
            return exact(values, by)
        wide = rounded(values.float() * by[:, None] + 0.0, torch.bfloat16, x.device)
        return torch.where(by[:, None] > 1, wide, values)

    with mock.patch.object(blocks, "rescale", rescale):
        return blocks.pack(x.to(device), block_size, keep, bits, selection)


def read(stored: Stored, shape: tuple[int, int, int], block_size: int, bits: int, device: object = "cpu") -> Tensor:
    """Return the fp32 tensor of ``shape [S, T, L]`` that the reference reads from quantized values, on ``device``."""
    values, bitmap, _ = (part.to(device) for part in stored)
    return blocks.unpack(values, bitmap, shape[0] * shape[1], shape[2], block_size, bits, torch.float32).view(shape)


def rounded(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fp32 ``values`` in ``dtype`` as a kernel rounds them: Triton's interpreter cuts them off to bf16."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)


def launch_of(
    x: Tensor, block_size: int, keep: int, cast: torch.dtype | None = None, bits: int = 0, selection: str = "largest"
) -> PackLaunch | QuantizeLaunch:
    """Return a new launch for inputs like ``x [S, T, L]``."""
    paired = x.element_size() == 2 and x.data_ptr() % 16 == 0
    return pack_launch(x.shape, x.stride(), block_size, keep, x.device, cast, bits, selection, paired)


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), wanted.cpu(), rtol=0, atol=0, equal_nan=True)


def all_same(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, right in zip(actual, wanted, strict=True):
        assert_same(one, right)


def strided(kind: str, device: torch.device) -> Tensor:
    """Return ``x [S, T, L]`` of nearly integers whose rows or samples do not follow each other in memory."""
    return STRIDED[kind](nearly_integers(3, 15, 100, device=device))


STRIDED = {
    "slice": lambda x: x[:, 2:, 7:],
    "batch-second": lambda x: x.transpose(0, 1),
    "rows": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, 15, 100),
    "expanded-rows": lambda x: x[:, :1].expand(3, 15, 100),
}
each_strided = pytest.mark.parametrize("kind", STRIDED)


def nearly_integers(*shape: int, device: torch.device) -> Tensor:
    """Values that differ and are integers in 16 bits, rounded or cut off: keys of what is not rounded have no ties."""
    return oracle.integers(*shape, device=device) * (1 + 2**-14 * torch.rand(shape, device=device))


def tied_integers(*shape: int, device: torch.device | str) -> Tensor:
    """Return bf16 integers from -4 to 4: sums of squares are exact in any order, and hundreds of blocks tie on each."""
    return torch.randint(-4, 5, shape, device=device, dtype=torch.int8).to(torch.bfloat16)


def on_kernels(names: str, small: list[object], large: list[object]) -> pytest.MarkDecorator:
    """Return the parameters of a test of kernels: a few cases for the interpreter, all of them for a GPU.

    The test takes the fixture ``kernel_device`` besides ``names``.
    """
    arguments = [name.strip() for name in names.split(",")]

    def case(device: str, values: object, mark: tuple[pytest.MarkDecorator, ...]) -> object:
        each = values if isinstance(values, tuple) and len(arguments) > 1 else (values,)
        return pytest.param(device, *each, marks=mark, id="-".join(map(_name, (device, *each))))

    cases = [case("cpu", values, ()) for values in small]
    cases += [case("cuda", values, (pytest.mark.gpu,)) for values in [*small, *large]]
    return pytest.mark.parametrize(("kernel_device", *arguments), cases, indirect=["kernel_device"])


def _name(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")
