"""Pack a dense tensor to its kept blocks, and unpack these, by the kernels or in plain torch.

Compilers call ``torch.ops.actprune.pack`` and ``unpack``, which are opaque on purpose: which blocks are kept depends on
the data, so a partitioner saves what ``pack`` returns instead of the dense input, and nothing can be fused into a form
that needs the dense input again. Neither is differentiable. The shapes of results follow from shapes and integers, so
nothing waits for the device. In plain eager mode the functions are called directly: the way through the dispatcher to
Python costs the host 3 to 20 us a call (machines of an H200, torch 2.11; ``benchmarks/results/kernels.json``: 4 and
17). ``quantize`` and ``dequantize`` are for compiled code in which all blocks are stored: they have one result, and no
positions.

Where all blocks of a tensor are stored, quantized and without positions, a compiler may see how: ``pack_all`` and
``unpack_all`` are plain torch, which it fuses with its surroundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from lightning_actprune.codec import blocks, formats
from lightning_actprune.codec.blocks import (
    ALL_BLOCKS,
    RUN_BLOCKS,
    WORD_BLOCKS,
    ceil_div,
    keeps_all,
    split_blocks,
)
from lightning_actprune.codec.dispatch import (
    CompiledCall,
    LaunchCache,
    TensorKey,
    as_operator,
    choose_backend,
    in_operator,
    on_device_of,
)

if TYPE_CHECKING:
    from lightning_actprune.kernels.launch import Launch
    from lightning_actprune.kernels.pack import PackLaunch, QuantizeLaunch


class Packed(NamedTuple):
    """A packed tensor.

    Args:
        tensors: Values, bitmap and offsets as ``pack`` returns them, or the values alone if all blocks are stored.
        shape: ``[batch, rows, length]`` as stored.
        transposed: True if the rows are the features.
        block: Values per block, at most the length of a row.
        bits: Bits of a stored value, 0 for values in their own type.
    """

    tensors: tuple[Tensor, ...]
    shape: tuple[int, int, int]
    transposed: bool
    block: int
    bits: int

    def unpack(self, dtype: torch.dtype, eager: bool = True) -> Tensor:
        """Return the stored tensor ``[batch * rows, length]`` in ``dtype``, zero in dropped blocks.

        Plain torch unpacks values alone; else kernels may run if ``eager``, or ``torch.ops.actprune.unpack`` runs.
        """
        batch, rows, length = self.shape
        how = batch * rows, length, self.block, self.bits, dtype
        if len(self.tensors) == 1:
            return unpack_all(self.tensors[0], *how)
        read: Callable[..., Tensor] = unpack if eager else torch.ops.actprune.unpack
        return read(*self.tensors, *how)


MAX_KEPT_BLOCKS = 2**31 - 1
"""Most blocks of a tensor that can be kept: their places are int32."""


def kept_blocks(shape: tuple[int, ...], block_size: int, keep: int) -> int:
    """Return the number of blocks that are kept of a tensor of ``shape [S, T, L]``."""
    samples, rows, length = shape
    return samples * (rows * ceil_div(length, block_size) if keeps_all(keep) else keep)


def check_storable(x: Tensor, bits: int, blocks: int = 0, block_size: int = 0) -> None:
    """Raise if ``blocks`` blocks of ``x`` cannot be stored in ``bits`` bits.

    Raises:
        TypeError: If fp64 values would be quantized.
        ValueError: If there are too many blocks to number.
    """
    if bits and x.dtype == torch.float64:
        raise TypeError(
            f"float64 values cannot be stored in {bits} bits, whose scales have 4 bits of precision. HINT: keep them "
            "as they are (`bits=None`, or a rule `{name: None}` for the layer), or train in float32 or 16 bits."
        )
    if blocks > MAX_KEPT_BLOCKS:
        raise ValueError(
            f"A tensor of {tuple(x.shape)} has {blocks} blocks to keep, more than 2^31 - 1, the most that can be "
            f"numbered. HINT: take a larger `block_size` than {block_size}."
        )


def pack(
    x: Tensor, block_size: int, keep: int, bits: int = 0, selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack ``keep`` blocks of each sample of ``x``.

    Args:
        x: Floating tensor ``[S, T, L]``; read in place if its last stride is 1.
        block_size: Values per block, in [1, max(L, 1)].
        keep: Blocks to keep per sample, in [0, T * ceil(L / block_size)], or ``ALL_BLOCKS`` if values are quantized.
        bits: Bits of a stored value (``codec.formats``), 0 for values in their own type.
        selection: Which blocks are kept (``codec.blocks``).

    Returns:
        ``values [S * keep, block_size]``, or the bytes of each quantized block, ``bitmap int32 [S, ceil(N / 32)]`` and
        ``offsets int32 [S, ceil(N / 128)]`` with ``N = T * ceil(L / block_size)``. With ``ALL_BLOCKS`` bitmap and
        offsets are ``[S, 0]``.
    """
    if x.stride(-1) != 1:  # a compiler may have changed the strides that the caller looked at
        x = x.contiguous()
    check_storable(x, bits, kept_blocks(x.shape, block_size, keep), block_size)
    launch = _pack_launches.find((block_size, keep, bits, selection), x)
    if launch is None:
        return blocks.pack(x, block_size, keep, bits, selection)
    with on_device_of(x):
        values, bitmap, offsets = launch(x)
    if keeps_all(keep) and in_operator():  # whose results must be new: the launch has one tensor for all calls
        bitmap, offsets = (x.new_empty(x.shape[0], 0, dtype=torch.int32) for _ in range(2))
    return values, bitmap, offsets


def traced_pack(x: Tensor, block_size: int, keep: int, bits: int, selection: str) -> tuple[Tensor, ...]:
    """Pack in plain torch, or by an operator where blocks are dropped, for compilers and whatever else looks on.

    With ``ALL_BLOCKS`` the values alone are returned.
    """
    if keeps_all(keep):
        check_storable(x, bits)
        return (pack_all(x, block_size, bits),)
    packed: tuple[Tensor, ...] = torch.ops.actprune.pack(x, block_size, keep, bits, selection)
    return packed


def unpack(
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    rows: int,
    length: int,
    block_size: int,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` in ``dtype``, contiguous."""
    return unpack_batch((values, bitmap, offsets), (1, rows, length), False, block_size, bits, dtype)[0]


def unpack_batch(
    packed: tuple[Tensor, Tensor, Tensor],
    shape: tuple[int, int, int],
    features_first: bool,
    block_size: int,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the pruned tensor ``[batch, rows, length]`` of ``shape``, or permuted to ``[rows, batch, length]``."""
    values, bitmap, offsets = packed
    batch, rows, length = shape
    launch = _unpack_launches.find((shape, features_first, block_size, bits, dtype), values, bitmap, offsets)
    if launch is not None:
        out = values.new_empty((rows, batch, length) if features_first else shape, dtype=dtype)
        with on_device_of(values):
            launch(values, bitmap, offsets, out)
        return out
    dense = blocks.unpack(values, bitmap, batch * rows, length, block_size, bits, dtype).reshape(batch, rows, length)
    return (dense.transpose(0, 1) if features_first else dense).contiguous()


def quantize(x: Tensor, block_size: int, bits: int) -> Tensor:
    """Return all blocks of ``x [S, T, L]`` quantized: the values of ``pack`` with ``ALL_BLOCKS``."""
    return pack(x, block_size, ALL_BLOCKS, bits)[0]


def dequantize(values: Tensor, rows: int, length: int, block_size: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Undo ``quantize``: return the values ``[rows, length]`` in ``dtype``, contiguous."""
    nowhere = no_positions(values.device)
    return unpack(values, nowhere, nowhere, rows, length, block_size, bits, dtype)


class Quantize(CompiledCall):
    """``quantize`` for code that a compiler writes.

    Args:
        block_size: Values per block.
        bits: Bits of a stored value.
    """

    reads = 2  # the input, and a copy that the kernel does not write

    def __init__(self, block_size: int, bits: int) -> None:
        super().__init__()
        self._how = block_size, bits

    def _find(self, x: Tensor, out: Tensor) -> Launch | None:
        if x.stride(-1) != 1 or len(out) > MAX_KEPT_BLOCKS:
            return None
        block_size, bits = self._how
        launch = _pack_launches.find((block_size, ALL_BLOCKS, bits, "largest"), x)
        return None if launch is None else cast("QuantizeLaunch", launch).kernel

    def _compute(self, x: Tensor, out: Tensor) -> Tensor:
        return quantize(x, *self._how)


class Dequantize(CompiledCall):
    """``dequantize`` of contiguous values for code that a compiler writes.

    Args:
        block_size: Values per block.
        bits: Bits of a stored value.
        dtype: Type of the result.
    """

    reads = 3  # values, and bitmap and offsets, which the kernel does not read

    def __init__(self, block_size: int, bits: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._how = block_size, bits, dtype

    def _find(self, x: Tensor, out: Tensor) -> Launch | None:
        nowhere = no_positions(x.device)
        return _unpack_launches.find(((1, *out.shape), False, *self._how), x, nowhere, nowhere)

    def _compute(self, x: Tensor, out: Tensor) -> Tensor:
        rows, length = out.shape
        return dequantize(x, rows, length, *self._how)


@functools.cache
def no_positions(device: torch.device) -> Tensor:
    """Return the positions where all blocks are stored: a tensor without memory, which kernels do not read."""
    with torch.inference_mode(False):
        return torch.empty(0, 0, dtype=torch.int32, device=device)


def pack_all(x: Tensor, block_size: int, bits: int) -> Tensor:
    """Return all blocks of ``x [..., L]`` quantized, row by row: ``[R * ceil(L / block_size), row_bytes]``."""
    return formats.quantize(split_blocks(x, block_size).reshape(-1, block_size), bits)


def unpack_all(values: Tensor, rows: int, length: int, block_size: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_all``: return the values ``[rows, length]`` in ``dtype``."""
    read = formats.dequantize(values, block_size, bits, dtype)
    return read.view(rows, ceil_div(length, block_size) * block_size)[:, :length]


def _pack_launch(
    device: torch.device, x: TensorKey, block_size: int, keep: int, bits: int, selection: str
) -> PackLaunch | QuantizeLaunch | None:
    (samples, rows, length), (first, second, third), dtype, is_aligned = x
    shape, strides = (samples, rows, length), (first, second, third)
    if not kept_blocks(shape, block_size, keep) or not samples * rows * length:
        return None
    if choose_backend(shape, dtype, device, block_size, ceil_div(length, block_size)) == "reference":
        return None
    from lightning_actprune.kernels.pack import pack_launch

    paired = dtype.itemsize == 2 and is_aligned
    return pack_launch(shape, strides, block_size, keep, device, None, bits, selection, paired)


def _unpack_launch(
    device: torch.device,
    values: TensorKey,
    bitmap: TensorKey,
    offsets: TensorKey,
    shape: tuple[int, int, int],
    features_first: bool,
    block_size: int,
    bits: int,
    dtype: torch.dtype,
) -> Launch | None:
    """Return what writes the unpacked tensor, given values, bitmap, offsets and memory, ``None`` without a kernel."""
    kept, (samples, words) = values[0][0], bitmap[0]
    if not kept or choose_backend(values[0], dtype, device, block_size, ceil_div(shape[2], block_size)) == "reference":
        return None
    from lightning_actprune.kernels.unpack import unpack_launch

    # The number of samples within which blocks compete, and, where something depends on it, that of blocks.
    counts = samples if words else 0, kept if bits else 0
    return unpack_launch(*counts, shape, features_first, block_size, bits, device)


_pack_launches: LaunchCache[PackLaunch | QuantizeLaunch] = LaunchCache(_pack_launch)
_unpack_launches = LaunchCache(_unpack_launch)

LIBRARY = torch.library.Library("actprune", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
FLEXIBLE = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
"""Tags of what packs values of any layout."""

LIBRARY.define(
    "pack(Tensor x, int block_size, SymInt keep, int bits=0, str selection='largest') -> "
    "(Tensor values, Tensor bitmap, Tensor offsets)",
    tags=TAGS,
)
LIBRARY.define(
    "unpack(Tensor values, Tensor bitmap, Tensor offsets, SymInt rows, SymInt length, int block_size, int bits, "
    "ScalarType dtype) -> Tensor",
    tags=TAGS,
)
# One implementation for every device: it chooses between kernels and plain torch itself.
LIBRARY.impl("pack", as_operator(pack), "CompositeExplicitAutograd")
LIBRARY.impl("unpack", unpack, "CompositeExplicitAutograd")
LIBRARY.define("quantize(Tensor x, int block_size, int bits) -> Tensor", tags=FLEXIBLE)
LIBRARY.define(
    "dequantize(Tensor values, SymInt rows, SymInt length, int block_size, int bits, ScalarType dtype) -> Tensor",
    tags=TAGS,
)
LIBRARY.impl("quantize", quantize, "CompositeExplicitAutograd")
LIBRARY.impl("dequantize", dequantize, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::pack", lib=LIBRARY)
def _pack_fake(
    x: Tensor, block_size: int, keep: int, bits: int = 0, selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    samples, rows, length = x.shape
    kept, row = kept_blocks(x.shape, block_size, keep), formats.row_bytes(block_size, bits, 0) if bits else block_size
    competing = 0 if keeps_all(keep) else rows * ceil_div(length, block_size)
    return (
        x.new_empty(kept, row, dtype=torch.uint8 if bits else x.dtype),
        x.new_empty(samples, ceil_div(competing, WORD_BLOCKS), dtype=torch.int32),
        x.new_empty(samples, ceil_div(competing, RUN_BLOCKS), dtype=torch.int32),
    )


@torch.library.register_fake("actprune::unpack", lib=LIBRARY)
def _unpack_fake(
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    rows: int,
    length: int,
    block_size: int,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    return values.new_empty(rows, length, dtype=dtype)


@torch.library.register_fake("actprune::quantize", lib=LIBRARY)
def _quantize_fake(x: Tensor, block_size: int, bits: int) -> Tensor:
    kept = kept_blocks(x.shape, block_size, ALL_BLOCKS)
    return x.new_empty(kept, formats.row_bytes(block_size, bits, 0), dtype=torch.uint8)


@torch.library.register_fake("actprune::dequantize", lib=LIBRARY)
def _dequantize_fake(values: Tensor, rows: int, length: int, block_size: int, bits: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty(rows, length, dtype=dtype)
