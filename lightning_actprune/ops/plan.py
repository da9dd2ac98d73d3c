"""How the kernels pack the input of one layer, worked out once per layout and setting.

The step of a small model waits for Python. What follows from shapes, strides and settings alone is therefore one
look-up in plain eager mode: which way blocks run, how many are kept, whether kernels take them and with which launches.
Only there: a compiler's symbolic sizes cannot be hashed, and a size that served as a key would be fixed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import Backend, choose_backend, forced_backend
from lightning_actprune.ops.geometry import AnyScope, block_and_keep, ceil_div, stored_shape, stored_view
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS


class InputPlan(NamedTuple):
    """What forward does with inputs of one layout.

    Args:
        copied: Whether the kernels read a contiguous copy, which the product reads too if it needs one.
        shape: ``[batch, rows, length]`` as stored, whatever the scope.
        transposed: Whether the rows are the features.
        launch: Packs the input or its copy.
    """

    copied: bool
    shape: tuple[int, int, int]
    transposed: bool
    launch: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def input_plan(x: Tensor, parts: int, block_size: int, scope: AnyScope) -> InputPlan | None:
    """Return how the kernels pack ``x``, or ``None`` if that is not for them, or not for a plan, to do."""
    if not x.is_cuda and forced_backend() is None:
        return None  # and no address is asked for, which not every device has, and which ends a lazy copy
    aligned = x.data_ptr() % 16 == 0
    return _plan(x.shape, x.stride(), x.dtype, x.device, aligned, parts, block_size, scope, forced_backend())


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    parts: int,
    block_size: int,
    scope: AnyScope,
    forced: Backend | None,
) -> InputPlan | None:
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    stored, transposed = stored_view(x, block_size, scope)
    block, keep = block_and_keep(stored, block_size, parts)
    copied = stored.untyped_storage()._cdata != x.untyped_storage()._cdata
    if stored.numel() == 0 or stored.shape[0] * keep > MAX_KEPT_BLOCKS or (copied and transposed):
        return None
    if choose_backend(stored.shape, dtype, device, block, ceil_div(stored.shape[2], block)) == "reference":
        return None
    from lightning_actprune.kernels import pack as kernels

    launch = kernels.plan(stored.shape, stored.stride(), block, keep, dtype, device, aligned or copied)
    return InputPlan(copied, stored_shape(x, transposed), transposed, launch)
