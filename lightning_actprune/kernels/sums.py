"""Column sums: the bias gradient ``sum_r grad_y[r, o]``, in the time that it takes to read ``grad_y`` once.

A program adds up a part of the rows for 64 columns, in fp32 and in a fixed order. The program that finishes last for
its columns adds the parts in their order, so the result does not depend on which program that is. It knows by a
counter, which each program increments once its part is in memory, and which the last one resets for the next launch.
Launches on one stream follow each other, so they share a few counters. A captured CUDA graph has counters of its own,
zeroed in each replay, since graphs that were captured on one stream may be replayed on several at once. So do operators
that the dispatcher calls (``codec.dispatch``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import may_keep_memory, simulated_gpu
from lightning_actprune.codec.private import raw_stream
from lightning_actprune.kernels.launch import Launch, multiprocessors

COLS = 64
"""Columns of a program."""
TILE_BYTES = 8192
"""Bytes of a tile."""
STAGES = 4
"""Tiles in a program's shared memory, of which all but one are being loaded. By default the compiler loads 16 bytes a
thread, waits, and adds: 2 TB/s on an H200."""
PROGRAMS = 4
"""Programs per multiprocessor. Of nine settings these four were the best on an H200: 34 us for 25216 x 2304 values in
bf16 and 14 for 25216 x 768, where torch takes 47 and 38."""
MOST_PARTS = 128
"""Most parts, since one program adds them all in registers."""
COUNTERS = 1024
"""Counters allocated at once, each for 64 columns."""


@triton.jit
def column_sums_kernel(
    grad_ptr, partial_ptr, counters_ptr, out_ptr, stride_grad, rows, outputs, share, ROWS: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up ``share`` rows of ``COLS`` columns; grid ``(OUT / COLS, parts)``.

    ``grad_ptr: [rows, OUT]``, ``partial_ptr: [parts, OUT]`` in fp32, ``counters_ptr: [OUT / COLS]``, zero before and
    after, ``out_ptr: [OUT]``. ``WIDE``: offsets into ``grad_y`` need 64 bits. ``PARTS`` is the number of parts, rounded
    up to a power of two, which the last program adds; or 0 if there is one part, and ``partial`` is the result.
    """
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = _sums_of_share(grad_ptr, o, stride_grad, rows, outputs, share, ROWS, COLS, WIDE, STAGES)
    tl.store(partial_ptr + tl.program_id(1) * outputs + o, sums.to(partial_ptr.dtype.element_ty), mask=o < outputs)
    if PARTS > 0:
        counter = counters_ptr + tl.program_id(0)
        if _is_last(counter):
            total = _sum_of_parts(partial_ptr, o, outputs, PARTS)
            tl.store(out_ptr + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)
            tl.store(counter, 0)


@triton.jit
def add_sets_kernel(
    sets_ptr, counters_ptr, first_ptr, second_ptr, stride_grad, rows, outputs, share, skipped, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up ``share`` rows of one or two sets of sums; grid ``(OUT / COLS, parts, sets)``.

    Works like ``column_sums_kernel``. ``sets_ptr: [rows, sets, OUT]`` in fp32, followed by the parts
    ``[sets, parts, OUT]`` from number ``skipped`` on; ``counters_ptr: [sets, OUT / COLS]``; ``first_ptr`` and
    ``second_ptr: [OUT]``.
    """
    which = tl.program_id(2)
    o = tl.program_id(0) * COLS + tl.arange(0, COLS)
    sums = _sums_of_share(sets_ptr + which * outputs, o, stride_grad, rows, outputs, share, ROWS, COLS, False, STAGES)
    if PARTS > 0:
        parts_ptr = sets_ptr + skipped + which * tl.num_programs(1) * outputs
        tl.store(parts_ptr + tl.program_id(1) * outputs + o, sums, mask=o < outputs)
        counter = counters_ptr + which * tl.num_programs(0) + tl.program_id(0)
        if _is_last(counter):
            _store_set(first_ptr, second_ptr, which, o, _sum_of_parts(parts_ptr, o, outputs, PARTS), outputs)
            tl.store(counter, 0)
    else:
        _store_set(first_ptr, second_ptr, which, o, sums, outputs)


@triton.jit
def _sums_of_share(
    grad_ptr, o, stride_grad, rows, outputs, share, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums ``[COLS]`` of the columns ``o`` over this program's rows, fp32."""
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, rows)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)
        row = r.to(tl.int64) if WIDE else r
        inside = (r < last)[:, None] & (o < outputs)[None, :]
        total += tl.load(grad_ptr + row[:, None] * stride_grad + o[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _is_last(counter):
    """Count this program, whose part is stored, and return True if all others of its columns were counted before."""
    tl.debug_barrier()  # the whole part is in memory before one thread counts it
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1


@triton.jit
def _sum_of_parts(partial_ptr, o, outputs, PARTS: tl.constexpr):
    """Return the sums of all parts ``[parts, OUT]`` in the columns ``o``."""
    p = tl.arange(0, PARTS)
    inside = (p < tl.num_programs(1))[:, None] & (o < outputs)[None, :]
    # Bypasses the L1 cache, which other multiprocessors' stores do not reach.
    parts = tl.load(partial_ptr + p[:, None] * outputs + o[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    return tl.sum(parts, axis=0)


@triton.jit
def _store_set(first_ptr, second_ptr, which, o, sums, outputs):
    if which == 0:
        tl.store(first_ptr + o, sums.to(first_ptr.dtype.element_ty), mask=o < outputs)
    else:
        tl.store(second_ptr + o, sums.to(second_ptr.dtype.element_ty), mask=o < outputs)


_counters: dict[tuple[torch.device, int], Tensor] = {}
"""Counters by device and stream."""


def _zeroed_counters(x: Tensor, groups: int) -> Tensor:
    """Return at least ``groups`` zeroed counters for the current stream, new ones where none may be reused."""
    if not may_keep_memory(x):
        return torch.zeros(groups, dtype=torch.int32, device=x.device)
    gpu, place = simulated_gpu(), (x.device, raw_stream(x.device.index) if x.is_cuda else 0)
    stored = _counters if gpu is None else gpu.counters
    counters = stored.get(place)
    if counters is None or counters.numel() < groups:
        counters = torch.zeros(max(COUNTERS, triton.next_power_of_2(groups)), dtype=torch.int32, device=x.device)
        stored[place] = counters
    return counters


class ColumnSumsLaunch:
    """Adds up the rows of gradients of one shape.

    Args:
        rows: Rows of the gradient.
        outputs: Columns of the gradient.
        stride: Distance of rows, in values.
        itemsize: Bytes per value.
        dtype: Type of the result.
        device: Where the kernel runs.
    """

    def __init__(
        self, rows: int, outputs: int, stride: int, itemsize: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        groups = ceil_div(outputs, COLS)
        tile, share, self.parts, finished = _shares(rows, groups, itemsize, device)
        self.outputs, self.dtype, self.groups = outputs, dtype, groups
        sizes = (stride, rows, outputs, share, tile, COLS, rows * stride >= 2**31, STAGES, finished)
        self._sum = Launch(column_sums_kernel, (groups, self.parts), *sizes, num_warps=4)

    def __call__(self, grad_y: Tensor) -> Tensor:
        """Return the sums ``[OUT]``."""
        out = grad_y.new_empty(self.outputs, dtype=self.dtype)
        if self.parts == 1:
            self._sum(grad_y, out, out, out)
        else:
            partial = grad_y.new_empty(self.parts, self.outputs, dtype=torch.float32)
            self._sum(grad_y, partial, _zeroed_counters(grad_y, self.groups), out)
        return out


class AddSetsLaunch:
    """Adds up what each of several programs has left: one or two sets of sums.

    Args:
        rows: Programs.
        sets: Sets of each program, 1 or 2.
        outputs: Sums of a set.
        device: Where the kernel runs.
    """

    def __init__(self, rows: int, sets: int, outputs: int, device: torch.device) -> None:
        groups = ceil_div(outputs, COLS)
        # Always sized for two sets, so that a sum does not depend on whether the other one is wanted.
        tile, share, parts, finished = _shares(rows, 2 * groups, 4, device)
        skipped = rows * sets * outputs
        self.scratch = skipped + (parts * sets * outputs if finished else 0)
        self._groups, self._counts = groups * sets, finished > 0
        sizes = (sets * outputs, rows, outputs, share, skipped, tile, COLS, STAGES, finished)
        self._add = Launch(add_sets_kernel, (groups, parts, sets), *sizes, num_warps=4)

    def __call__(self, scratch: Tensor, first: Tensor, second: Tensor) -> None:
        """Write the sums. ``scratch`` begins with ``[rows, sets, outputs]``; with one set ``second`` is any tensor."""
        counters = _zeroed_counters(scratch, self._groups) if self._counts else scratch
        self._add(scratch, counters, first, second)


def column_sums_launch(
    rows: int, outputs: int, stride: int, itemsize: int, dtype: torch.dtype, device: torch.device
) -> ColumnSumsLaunch:
    """Return the launch that adds up the rows of ``grad_y [rows, outputs]``, with stride 1 along columns, in ``dtype``.

    ``rows`` is positive. The compiled kernel that it keeps also depends on the dtype of ``grad_y`` and on whether that
    starts at a multiple of 16 bytes.
    """
    return ColumnSumsLaunch(rows, outputs, stride, itemsize, dtype, device)


def _shares(rows: int, groups: int, itemsize: int, device: torch.device) -> tuple[int, int, int, int]:
    """Return, for ``groups`` of columns: rows of a tile, rows of a part, the number of parts, and ``PARTS``."""
    tile = TILE_BYTES // (COLS * itemsize)
    wanted = min(MOST_PARTS, ceil_div(PROGRAMS * multiprocessors(device), groups), ceil_div(rows, 2 * tile))
    share = ceil_div(ceil_div(rows, wanted), tile) * tile
    parts = ceil_div(rows, share)
    return tile, share, parts, triton.next_power_of_2(parts) if parts > 1 else 0
