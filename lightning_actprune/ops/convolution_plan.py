"""How plain eager mode packs the input of a convolution and rebuilds it, worked out once per layout and setting.

As ``ops.plan`` does for linear layers, whose plan of the rows this one holds. Besides, it answers all that backward
needs: the memory that the pruned input is rebuilt in, laid out as the convolution read it, and the launch that does it.

Blocks are cut from a sample as it lies in memory (``input_rows``): of ``channels_last`` inputs they are channels of a
pixel, or of several if ``C`` is no multiple of the block, otherwise neighbouring pixels of a channel. So no copy is
made, no block is cut short, and how many channels there are does not matter: three of an image will do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.autocast import as_dtype, cast
from lightning_actprune.ops.dispatch import MAX_COLUMNS, Backend, forced_backend, on_device_of
from lightning_actprune.ops.geometry import AnyScope, block_and_keep, ceil_div, keeps_all, stored_view
from lightning_actprune.ops.pack import kept_blocks
from lightning_actprune.ops.plan import Setting, is_aligned, plan_of_layout
from lightning_actprune.ops.sharing import Packed, Shared


class InputLayout(NamedTuple):
    """What a convolution reads, and how that is packed.

    Args:
        shape: ``[N, C, *spatial]``.
        strides: Those of the input without gaps, as it was packed.
        dtype: Type that it was packed in, and is unpacked to.
        rows: ``[1, rows, length]`` as stored.
        block: Values per block, cut to a row.
        value_format: How the values are stored.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int, int]
    block: int
    value_format: str


class ConvolutionPlan(NamedTuple):
    """What forward and backward do with inputs of one layout, which have no gaps.

    Args:
        layout: What the convolution reads, and how that is packed.
        new: Returns memory of that layout.
        casts: Whether ``launch`` writes what the convolution reads, cast from the input, to such memory.
        launch: Packs.
        launch_unpack: Writes the pruned input, of what was packed, to such memory.
        forced: The backend that was asked for, ``None`` if none was.
    """

    layout: InputLayout
    new: Callable[[], Tensor]
    casts: bool
    launch: Callable[..., Packed]
    launch_unpack: Callable[..., None]
    forced: Backend | None

    def cast_and_pack(self, x: Tensor) -> tuple[Tensor, Shared]:
        """Return ``x`` as autocast would cast it, and what is kept of that."""
        given = self.new() if self.casts else as_dtype(x, self.layout.dtype)
        with on_device_of(x):
            packed = self.launch(x, given) if self.casts else self.launch(given)
        return given, Shared(packed, self.layout.rows, False, self.layout.block)

    def unpacks(self, values: Tensor, bitmap: Tensor, offsets: Tensor) -> bool:
        """Return whether ``launch_unpack`` reads what was saved: hooks may have put it where it is not aligned."""
        aligned = (values.data_ptr() | bitmap.data_ptr() | offsets.data_ptr()) % 16 == 0
        return aligned and self.forced is forced_backend()

    def unpack(self, packed: Packed) -> Tensor:
        """Return the pruned input."""
        x_hat = self.new()
        with on_device_of(x_hat):
            self.launch_unpack(*packed, x_hat)
        return x_hat


def convolution_plan(x: Tensor, setting: Setting) -> ConvolutionPlan | None:
    """Return the plan for ``x``, or ``None`` if it has gaps, or if packing it is not for the kernels to do."""
    forced = forced_backend()
    return _plan(x.shape, x.stride(), x.dtype, x.device, is_aligned(x, forced), setting, forced)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    setting: Setting,
    forced: Backend | None,
) -> ConvolutionPlan | None:
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if without_gaps(x) is not x:
        return None
    blocks = setting.blocks
    rows = rows_of(x, blocks.block_size, blocks.scope)
    plan = plan_of_layout(rows.shape, rows.stride(), dtype, device, aligned, setting, forced)
    if plan is None or plan.copied:
        return None
    from lightning_actprune.kernels import unpack as kernels

    given = x if setting.autocast is None else cast(x, setting.autocast)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    layout = InputLayout(shape, given.stride(), given.dtype, plan.shape, plan.block, blocks.value_format)
    new = functools.partial(torch.empty_strided, shape, given.stride(), dtype=given.dtype, device=device)
    block, keep = block_and_keep(stored, blocks.block_size, setting.parts, blocks.value_format)
    kept = 0 if blocks.value_format == "same" else kept_blocks(stored.shape, block, keep)
    samples = 0 if keeps_all(keep) else stored.shape[0]
    how = block, blocks.value_format, given.dtype, device, (True, True, True)
    launch_unpack = kernels.plan(samples, kept, plan.shape, False, *how)
    return ConvolutionPlan(layout, new, plan.new_cast is not None, plan.launch, launch_unpack, forced)


def without_gaps(x: Tensor) -> Tensor:
    """Return ``x [N, C, *spatial]`` with its values side by side, channels last if they are: a copy if need be.

    Of what has gaps, such as one half of the channels, torch's convolution makes that copy too.
    """
    if x.is_contiguous() or _channels_last(x):
        return x
    if x.stride(1) == 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.contiguous()


def input_rows(x: Tensor, block_size: int, scope: AnyScope) -> Tensor:
    """Return ``x [N, C, *spatial]`` as rows ``[N, T, L]`` from which blocks are cut, in the order of memory.

    In a sample, rows are as long as a block where that divides it; all of it is one row otherwise, if kernels take so
    long a row. With scope ``"token"``, within a row of which blocks compete, they are the channels of a pixel, or the
    innermost dimension of a contiguous ``x``.
    """
    return rows_of(without_gaps(x), block_size, scope)


def rows_of(x: Tensor, block_size: int, scope: AnyScope) -> Tensor:
    """Return the rows of ``x``, which has no gaps, see ``input_rows``."""
    memory = x if x.is_contiguous() else x.movedim(1, -1)
    values = math.prod(x.shape[1:])
    if scope != "token":
        if values % block_size == 0:
            return memory.reshape(x.shape[0], values // block_size, block_size)
        if ceil_div(values, block_size) <= MAX_COLUMNS:
            return memory.reshape(x.shape[0], 1, values)
    return memory.flatten(1, -2)


def _channels_last(x: Tensor) -> bool:
    if x.dim() == 4:  # without a view, which takes the host longer
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()
