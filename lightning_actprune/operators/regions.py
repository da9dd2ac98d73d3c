"""What a graph holds in place of a saved tensor: the tensor uncompressed, or its region of memory in few bits.

A tensor of any layout is read in the order of its memory (``codec.layout``), so that views of one region share what is
packed. Unpacked values have the same order, without gaps.

**Versions.** Autograd checks the version of what it saves itself, but not of what hooks return. ``Uncompressed`` does
so in its place: a tensor that is written to before backward is an error, as without hooks. A ``QuantizedRegion`` has
the values of the moment at which it was packed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import in_plain_eager_mode
from lightning_actprune.codec.layout import Run, cut_rows, join_runs, memory_order
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, dequantize, quantize

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of pack and unpack hook."""
Dims = tuple[tuple[int, int], ...]
"""Sizes and strides, the largest stride first."""


def dropped_by_checkpoint(hooks: Hooks | None) -> bool:
    """Return whether ``hooks`` are those with which torch's checkpoint drops saved tensors."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


class Layout(NamedTuple):
    """How a tensor is read and written.

    Args:
        region: Its joined dimensions: equal for views of one region of memory.
        copied: Whether the region is copied before it is read.
        shape: Samples, rows and length, ``(S, T, L)``.
        strides: Strides of these in the region or in its copy.
        block: Values per block, cut to a row.
        dense_strides: Strides of the tensor when it is unpacked.
    """

    region: Dims
    copied: bool
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block: int
    dense_strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], block_size: int) -> Layout | None:
    """Return the layout of a tensor, ``None`` if it is empty or expanded, overlaps itself or has no sensible rows."""
    order = memory_order(strides)
    runs = None if 0 in shape else join_runs(shape, strides, order)
    if runs is None:
        return None
    whole = lambda run: (int(math.prod(run.sizes)), int(run.stride))  # noqa: E731
    region = tuple(map(whole, runs))
    count = math.prod(shape)
    rows, copied = cut_rows(runs, block_size), False
    if rows is None:
        runs, copied = [Run([count], 1)], True
        rows = cut_rows(runs, block_size)
    if rows is None:
        return None
    length, is_cut = rows
    dims = list(map(whole, runs))
    dims[-1:] = [(dims[-1][0] // length, length)] if is_cut else []
    (samples, of_sample), (of_rows, of_row) = [(1, count)] * (2 - len(dims)) + dims
    block = min(block_size, length)
    if samples * of_rows * ceil_div(length, block) > MAX_KEPT_BLOCKS:
        return None
    dense, dense_strides = 1, list(strides)
    for dim in reversed(order):
        if shape[dim] != 1:
            dense_strides[dim] = dense
            dense *= shape[dim]
    return Layout(region, copied, (samples, of_rows, length), (of_sample, of_row, 1), block, tuple(dense_strides))


class Uncompressed:
    """A saved tensor, or what hooks around ours made of it.

    Args:
        tensor: The tensor.
        outer: The hooks around ours, ``None`` without any.
        version: Version of the tensor when it was saved, by default its version now.
    """

    __slots__ = ("__weakref__", "_unpack", "_value", "_version")

    def __init__(self, tensor: Tensor, outer: Hooks | None, version: int | None = None) -> None:
        self._value: Any
        self._unpack: Callable[[Any], Tensor] | None = None
        if outer is not None:
            self._value, self._unpack = outer[0](tensor), outer[1]
            return
        # A result holds its node, which holds this: without its own history there is no cycle.
        self._value = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version if version is None else version

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was written to since it was saved.
        """
        if self._unpack is not None:
            restored: Tensor = self._unpack(self._value)
            return restored
        value: Tensor = self._value
        if value._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{value.type()} {list(value.shape)}] is at version {value._version}; expected version "
                f"{self._version} instead. HINT: torch.autograd.set_detect_anomaly(True) shows the operation whose "
                "gradient failed."
            )
        return value


def as_read(region: Tensor, layout: Layout) -> Tensor:
    """Return a region ``[S, T, L]``, as its layout says."""
    if layout.copied:
        sizes, strides = zip(*layout.region, strict=True)
        return region.detach().as_strided(sizes, strides).contiguous().view(layout.shape)
    return region.detach().as_strided(layout.shape, layout.strides)


def unpack_region(values: Tensor, layout: Layout, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the values of a quantized region in the order of their addresses."""
    samples, rows, length = layout.shape
    read = dequantize if in_plain_eager_mode(values) else torch.ops.actprune.dequantize
    dense: Tensor = read(values, samples * rows, length, layout.block, bits, dtype)
    return dense


class QuantizedRegion:
    """The quantized values of a region of memory, or what hooks around ours made of them.

    Args:
        region: Tensor over the region.
        layout: How it is read.
        bits: Bits of a stored value.
        outer: The hooks around ours, ``None`` without any.
    """

    __slots__ = ("__weakref__", "_bits", "_dtype", "_layout", "_values", "nbytes", "outer")

    def __init__(self, region: Tensor, layout: Layout, bits: int, outer: Hooks | None) -> None:
        values = quantize(as_read(region, layout), layout.block, bits)
        self._layout, self._dtype, self._bits = layout, region.dtype, bits
        self.nbytes, self.outer = values.nbytes, outer
        self._values: Any = values if outer is None else outer[0](values)

    def goes_to(self, outer: Hooks | None) -> bool:
        """Return whether the hooks around ours are still those that got the values."""
        return self.outer is outer or (self.outer is not None and outer is not None and self.outer[0] is outer[0])

    def unpack(self) -> Tensor:
        """Return the values in the order of their addresses."""
        values = self._values if self.outer is None else self.outer[1](self._values)
        return unpack_region(values, self._layout, self._bits, self._dtype)


class Selection(NamedTuple):
    """Rows ``source[indices]``, which backward can select again.

    Args:
        source: What they were selected from, ``None`` once it is stored.
        shape: Its shape.
        layout: How it is read.
        version: Its version when they were selected.
        indices: The numbers of the rows.
    """

    source: Tensor | None
    shape: torch.Size
    layout: Layout
    version: int
    indices: Uncompressed

    def select(self, values: Tensor) -> Tensor:
        """Return the rows of the unpacked source."""
        return values.as_strided(self.shape, self.layout.dense_strides)[self.indices.unpack()]


class SelectedWeight:
    """Rows or matrices of a parameter, which is there anyway, so that backward can select them again.

    Args:
        parameter: The parameter.
        indices: The numbers of the rows.
        outer: The hooks around ours, ``None`` without any.
    """

    __slots__ = ("_indices", "_parameter")

    def __init__(self, parameter: Tensor, indices: Tensor, outer: Hooks | None) -> None:
        self._parameter, self._indices = Uncompressed(parameter, outer), Uncompressed(indices, None)

    def unpack(self) -> Tensor:
        """Return the rows; see ``Uncompressed.unpack``."""
        return self._parameter.unpack().detach()[self._indices.unpack()]
