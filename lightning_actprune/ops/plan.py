"""How the kernels pack the input of one layer, worked out once per layout and setting.

The step of a small model waits for Python. What follows from shapes, strides and settings alone is therefore one
look-up in plain eager mode: which way blocks run, how many are kept, whether kernels take them and with which launches.
Only there: a compiler's symbolic sizes cannot be hashed, and a size that served as a key would be fixed.

Under autocast the kernels that pack an fp32 input also write the 16-bit copy of it that the product needs, wherever
``x.to(dtype)`` would lie in memory as it is stored, without gaps. Other inputs are cast first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.autocast import cast_input
from lightning_actprune.ops.dispatch import Backend, choose_backend, forced_backend
from lightning_actprune.ops.geometry import AnyScope, block_and_keep, ceil_div, stored_shape, stored_view
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS, kept_blocks
from lightning_actprune.ops.setting import BlockSetting


class Setting(NamedTuple):
    """How a layer packs its inputs, besides what follows from their layout.

    Args:
        parts: Sparsity in parts of 10^9.
        autocast: Type of the active autocast, ``None`` without one.
        blocks: How inputs are cut into blocks and stored.
    """

    parts: int
    autocast: torch.dtype | None
    blocks: BlockSetting


class InputPlan(NamedTuple):
    """What forward does with inputs of one layout.

    Args:
        copied: Whether the kernels read a contiguous copy, which the product reads too if it needs one.
        shape: ``[batch, rows, length]`` as stored, whatever the scope.
        transposed: Whether the rows are the features.
        block: Values per block, cut to a row.
        launch: Packs the input or its copy, or, given memory for its cast too, writes and packs that.
        new_cast: Returns that memory, laid out as ``x.to(dtype)`` is; ``None`` if what is packed is there already.
    """

    copied: bool
    shape: tuple[int, int, int]
    transposed: bool
    block: int
    launch: Callable[..., tuple[Tensor, Tensor, Tensor]]
    new_cast: Callable[[], Tensor] | None


def input_plan(x: Tensor, setting: Setting) -> InputPlan | None:
    """Return how the kernels pack ``x``, or ``None`` if that is not for them, or not for a plan, to do.

    Unless the plan has a ``new_cast``, its input is ``cast_input(x, setting.autocast, setting.blocks.block_size)``.
    """
    forced = forced_backend()
    return plan_of_layout(x.shape, x.stride(), x.dtype, x.device, is_aligned(x, forced), setting, forced)


def is_aligned(x: Tensor, forced: Backend | None) -> bool:
    """Return whether ``x`` starts at a multiple of 16 bytes, as far as that matters to anybody.

    Where no kernel can run no address is asked for, which not every device has, and which ends a lazy copy.
    """
    return not (x.is_cuda or forced is not None) or x.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=1024)
def plan_of_layout(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    setting: Setting,
    forced: Backend | None,
) -> InputPlan | None:
    """Return the plan of ``input_plan`` for inputs of this layout; ``forced`` is what ``choose_backend`` sees too."""
    parts, autocast, (block_size, scope, *choices) = setting
    given = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    x = cast_input(given, autocast, block_size)
    stored, transposed = stored_view(x, block_size, scope)
    block, keep = block_and_keep(stored, block_size, parts, choices[0])
    copied = not _shares_memory(stored, x)
    if stored.numel() == 0 or kept_blocks(stored.shape, block, keep) > MAX_KEPT_BLOCKS or (copied and transposed):
        return None
    if choose_backend(stored.shape, x.dtype, device, block, ceil_div(stored.shape[2], block)) == "reference":
        return None
    from lightning_actprune.kernels import pack as kernels

    source = _castable(given, x, stored, transposed, block_size, scope)
    if source is not None:
        strides = source.stride()
        launch = kernels.plan(source.shape, strides, block, keep, dtype, device, aligned, x.dtype, *choices)
        new_cast = functools.partial(torch.empty_strided, shape, x.stride(), dtype=x.dtype, device=device)
        return InputPlan(False, stored_shape(x, transposed), transposed, block, launch, new_cast)
    aligned = aligned or copied or x is not given
    strides = stored.stride()
    launch = kernels.plan(stored.shape, strides, block, keep, x.dtype, device, aligned, None, *choices)
    return InputPlan(copied, stored_shape(x, transposed), transposed, block, launch, None)


def _castable(
    x: Tensor, cast: Tensor, stored: Tensor, transposed: bool, block_size: int, scope: AnyScope
) -> Tensor | None:
    """Return the view of ``x`` that kernels can cast to ``stored``, a view of ``cast``, or ``None`` without one."""
    if cast is x or x.dtype != torch.float32:
        return None
    source, alike = stored_view(x, block_size, scope)
    views = _shares_memory(source, x) and _shares_memory(stored, cast)
    return source if views and alike == transposed and stored.is_contiguous() else None


def _shares_memory(view: Tensor, x: Tensor) -> bool:
    return bool(view.untyped_storage()._cdata == x.untyped_storage()._cdata)
