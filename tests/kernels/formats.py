"""What tests of value formats share: the expected bytes and values, and each way to pack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_actprune.kernels.pack import PackPlan
from lightning_actprune.kernels.pack_sample import SamplePlan
from lightning_actprune.ops import formats, reference

each_large = pytest.mark.parametrize(
    ("shape", "block_size"),
    [((64, 196, 384), 32), ((64, 196, 1536), 64), ((130, 384, 196), 16), ((7, 211, 2000), 24), ((2, 37, 3000), 1000)],
    ids=str,
)
"""Inputs that keep a GPU busy."""
QUANTIZED = [name for name in formats.FORMATS if name != "same"]
Packed = tuple[Tensor, Tensor, Tensor]


def expected(x: Tensor, block_size: int, keep: int, value_format: str, device: str | torch.device = "cpu") -> Packed:
    """Return what the reference stores of ``x [S, T, L]``, on ``device``: of large inputs a GPU is the faster one."""
    values, bitmap, offsets = reference.pack(x.to(device), block_size, keep)
    return formats.quantize(values, value_format), bitmap, offsets


def pack(x: Tensor, block_size: int, keep: int, value_format: str, config=None) -> Packed:
    """Pack by three launches or, with a configuration, by one."""
    arguments = x.shape, x.stride()[:2], block_size, keep
    if config is None:
        plan = PackPlan(*arguments, x.device, value_format=value_format)
    else:
        plan = SamplePlan(*arguments, x.element_size(), config, value_format=value_format)
    return plan(x)


def strided(kind: str, device: torch.device) -> Tensor:
    """Return a 16-bit ``x [S, T, L]`` whose rows or samples do not follow each other in memory."""
    base = torch.randn(5, 37, 148, device=device).bfloat16()
    return {"slice": base[:, 2:, 7:], "batch-second": base.transpose(0, 1), "rows": base[:, ::2]}[kind]


def rounded(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fp32 ``values`` in ``dtype`` as a kernel rounds them: Triton's interpreter cuts them off to bf16."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        values = (values.view(torch.int32) & -0x10000).view(torch.float32)
    return values.to(dtype)


def read(
    packed: Packed, shape: tuple[int, int, int], block_size: int, value_format: str, device: str | torch.device = "cpu"
) -> Tensor:
    """Return the fp32 tensor of ``shape [S, T, L]`` that the reference reads from packed values, on ``device``."""
    values, bitmap, _ = (part.to(device) for part in packed)
    wide = formats.dequantize(values, block_size, value_format, torch.float32)
    return reference.unpack(wide, bitmap, shape[0] * shape[1], shape[2]).view(shape)
