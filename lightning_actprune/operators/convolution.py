r"""Convolutions whose saved input is packed.

With ``x [N, C, *spatial]``, ``W``, ``g = dL/dy`` and ``x_hat`` the packed input::

    y  = x * W + b                             exact, dense
    dx = g * W, transposed                     exact: needs no activation
    db = sum of g over all but the channels    exact
    dW = g * x_hat                             the only approximation

Saved for backward: the packed input, and the weight as it is; never ``x`` and never the autocast copy of the weight.
Backward unpacks ``x_hat`` for the time of torch's own ``convolution_backward``, laid out as ``x`` was, so that the
vendor's library takes the same algorithms: of ``x_hat``, the input gradient takes its sizes alone. Convolutions that
read one tensor, such as the first one of a residual block and that of its shortcut, save the same packed input.

Blocks are cut from a sample as it lies in memory (``input_rows``): of ``channels_last`` inputs they are channels of a
pixel, or of several if ``C`` is no multiple of the block, otherwise neighbouring pixels of a channel. So no copy is
made, no block is cut short, and how many channels there are does not matter: three of an image will do.

Zeros around the input are the same on both sides. Other padding (``padding_mode``, or ``"same"`` with an even number of
weights) makes torch keep a padded copy; such layers stay dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec import sharing
from lightning_actprune.codec.blocks import AnyScope, Blocks, block_and_keep, ceil_div, keeps_all, stored_view
from lightning_actprune.codec.dispatch import (
    MAX_COLUMNS,
    Backend,
    LaunchCache,
    applied,
    as_dtype,
    autocast_dtype,
    forced_backend,
    is_aligned,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.dispatch import cast as cast_as_autocast
from lightning_actprune.codec.packed import kept_blocks, pack, pack_all, unpack, unpack_all
from lightning_actprune.codec.sharing import Shared
from lightning_actprune.config import Operator
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.linear import check_input, check_stored_type, compresses, input_launches

_convolution_backward = torch.ops.aten.convolution_backward.default
Packed = tuple[Tensor, Tensor, Tensor]
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed


class Windows(NamedTuple):
    """Which values of the input each output is computed from.

    Args:
        stride: Steps from output to output, by dimension.
        padding: Zeros before and after, by dimension.
        dilation: Steps from weight to weight, by dimension.
        groups: Parts of the channels that do not see each other.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


class InputLayout(NamedTuple):
    """What a convolution reads, and how that is packed.

    Args:
        shape: ``[N, C, *spatial]``.
        strides: Those of the input without gaps, as it was packed.
        dtype: Type that it was packed in, and is unpacked to.
        rows: ``[1, rows, length]`` as stored.
        block: Values per block, cut to a row.
        bits: To how many bits the values are quantized.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int, int]
    block: int
    bits: int


class ConvolutionLaunch(NamedTuple):
    """What forward and backward do with inputs of one layout, which have no gaps.

    Args:
        layout: What the convolution reads, and how that is packed.
        new: Returns memory of that layout.
        casts: Whether ``pack`` writes what the convolution reads, cast from the input, to such memory.
        pack: Packs.
        unpack: Writes the packed input to such memory.
        backend: The backend that was asked for, ``None`` if none was.
    """

    layout: InputLayout
    new: Callable[[], Tensor]
    casts: bool
    pack: Callable[..., Packed]
    unpack: Callable[..., None]
    backend: Backend | None

    def cast_and_pack(self, x: Tensor) -> tuple[Tensor, Shared]:
        """Return ``x`` as autocast would cast it, and what is kept of that."""
        given = self.new() if self.casts else as_dtype(x, self.layout.dtype)
        with on_device_of(x):
            packed = self.pack(x, given) if self.casts else self.pack(given)
        return given, Shared(packed, self.layout.rows, False, self.layout.block)

    def unpacks(self, values: Tensor, bitmap: Tensor, offsets: Tensor) -> bool:
        """Return whether ``unpack`` reads what was saved: hooks may have put it where it is not aligned."""
        aligned = (values.data_ptr() | bitmap.data_ptr() | offsets.data_ptr()) % 16 == 0
        return aligned and self.backend is forced_backend()

    def unpacked(self, packed: Packed) -> Tensor:
        """Return the packed input as it was read."""
        x_hat = self.new()
        with on_device_of(x_hat):
            self.unpack(*packed, x_hat)
        return x_hat


def _launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    parts: int,
    autocast: torch.dtype | None,
    blocks: Blocks,
    backend: Backend | None,
) -> ConvolutionLaunch | None:
    """Return what is done with inputs of a layout, ``None`` if it has gaps, or if packing it is not for the kernels."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if without_gaps(x) is not x:
        return None
    rows = rows_of(x, blocks.block_size, blocks.scope)
    launch = input_launches[(rows.shape, rows.stride(), dtype, device, aligned, parts, autocast, blocks, backend)]
    if launch is None or launch.copied:
        return None
    from lightning_actprune.kernels.unpack import unpack_launch

    given = x if autocast is None else cast_as_autocast(x, autocast)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    layout = InputLayout(shape, given.stride(), given.dtype, launch.shape, launch.block, blocks.bits)
    new = functools.partial(torch.empty_strided, shape, given.stride(), dtype=given.dtype, device=device)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    kept = kept_blocks(stored.shape, block, keep) if blocks.bits else 0
    samples = 0 if keeps_all(keep) else stored.shape[0]
    unpacks = unpack_launch(samples, kept, launch.shape, False, block, blocks.bits, device)
    return ConvolutionLaunch(layout, new, launch.new_cast is not None, launch.pack, unpacks, backend)


_launches = LaunchCache(_launch)


class ConvolutionFunction(torch.autograd.Function):
    """``torch.convolution`` whose weight gradient comes from a packed input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        windows: Windows,
        parts: int,
        blocks: Blocks,
        eager: bool,
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``codec.blocks``)."""
        ctx.windows, ctx.dtypes = windows, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        autocast = autocast_dtype(x)
        ctx.bias_sizes = None if bias is None else bias.shape
        packed: tuple[Tensor, ...]
        if eager:
            given, packed, ctx.layout, ctx.launch = _read_and_keep(x, parts, autocast, blocks)
        else:
            given, packed, ctx.layout = _traced_read_and_keep(x, parts, autocast, blocks)
            ctx.launch = None
        ctx.save_for_backward(weight, *packed)
        if autocast is not None:
            weight = cast_as_autocast(weight, autocast)
            bias = None if bias is None else cast_as_autocast(bias, autocast)
        stride, padding, dilation, groups = windows
        return torch.convolution(given, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    @once_differentiable("a convolution that keeps its input compressed")
    def backward(ctx: Any, eager: bool, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the weight gradient from the packed input."""
        weight, *packed = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        x_hat = _unpack(ctx.launch, ctx.layout, tuple(packed), eager)
        stride, padding, dilation, groups = ctx.windows
        moves = stride, padding, dilation, False, (0,) * len(stride), groups
        weight = as_dtype(weight, ctx.layout.dtype)
        grads = _convolution_backward(grad_y, x_hat, weight, ctx.bias_sizes, *moves, needed)
        return tuple(
            [as_dtype(g, dtype) if wanted else None for g, dtype, wanted in zip(grads, ctx.dtypes, needed, strict=True)]
        )


_convolution = applied(ConvolutionFunction)


def compressed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, parts: int, blocks: Blocks
) -> Tensor:
    """Convolve ``x``, a batch or one sample, for a weight for which it is kept (``compresses``), and keep it packed."""
    check_input(x, weight)
    if x.dim() == weight.dim() - 1:
        y: Tensor = _convolution(x.unsqueeze(0), weight, bias, windows, parts, blocks)
        return y.squeeze(0)
    made: Tensor = _convolution(x, weight, bias, windows, parts, blocks)
    return made


def weight_grad(x: Tensor, grad_y: Tensor, sizes: torch.Size, windows: Windows) -> Tensor:
    """Return the weight gradient that backward of a convolution computes from ``x``, the packed input.

    ``sizes``: those of the weight, whose values are not needed.
    """
    stride, padding, dilation, groups = windows
    moves = stride, padding, dilation, False, (0,) * len(stride), groups
    grads = _convolution_backward(grad_y, x, x.new_empty(sizes), None, *moves, [False, True, False])
    grad: Tensor = grads[1]
    return grad


def _read_and_keep(
    x: Tensor, parts: int, autocast: torch.dtype | None, blocks: Blocks
) -> tuple[Tensor, Packed, InputLayout, ConvolutionLaunch | None]:
    """Return what the convolution reads of ``x``, what is kept of that, its layout and its launches."""
    setting = parts, autocast, blocks, forced_backend()
    key = sharing.key_of(x, *setting)
    # A linear layer that reads the same tensor cuts it into other rows.
    key = None if key is None else (*key, "convolution")
    shared = None if key is None else sharing.find(x, key)
    given = x
    launch = _launches[(x.shape, x.stride(), x.dtype, x.device, is_aligned(x), *setting)]
    if launch is None:
        given = without_gaps(x)
        if given is not x:
            launch = _launches[(x.shape, given.stride(), x.dtype, x.device, is_aligned(given), *setting)]
    if shared is not None:
        given = given if autocast is None else cast_as_autocast(given, autocast)
    else:
        made = launch.cast_and_pack(given) if launch is not None else _cast_and_pack(given, parts, autocast, blocks)
        given, shared = made
        if key is not None:
            sharing.remember(x, key, shared)
    if launch is not None:
        return given, shared.packed, launch.layout, launch
    layout = given.shape, given.stride(), given.dtype, shared.shape, shared.block, blocks.bits
    return given, shared.packed, InputLayout(*layout), None


def _cast_and_pack(x: Tensor, parts: int, autocast: torch.dtype | None, blocks: Blocks) -> tuple[Tensor, Shared]:
    """Return ``x``, which has no gaps, as autocast would cast it, and what is kept of that, without kernels."""
    given = x if autocast is None else cast_as_autocast(x, autocast)
    rows = rows_of(given, blocks.block_size, blocks.scope)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    packed = pack(stored, block, keep, blocks.bits, blocks.selection)
    return given, Shared(packed, (1, rows.shape[0] * rows.shape[1], rows.shape[2]), False, block)


def _traced_read_and_keep(
    x: Tensor, parts: int, autocast: torch.dtype | None, blocks: Blocks
) -> tuple[Tensor, tuple[Tensor, ...], InputLayout]:
    """Do the same as a compiler may see it: what is kept are all blocks, or an operator's result."""
    given = without_gaps(x)
    given = given if autocast is None else cast_as_autocast(given, autocast)
    rows = rows_of(given, blocks.block_size, blocks.scope)
    stored, _ = stored_view(rows, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    shape = 1, rows.shape[0] * rows.shape[1], rows.shape[2]
    layout = InputLayout(given.shape, given.stride(), given.dtype, shape, block, blocks.bits)
    if parts == 0:
        check_stored_type(given)
        return given, (pack_all(stored, block, blocks.bits),), layout
    return given, torch.ops.actprune.pack(stored, block, keep, blocks.bits, blocks.selection), layout


def _unpack(launch: ConvolutionLaunch | None, layout: InputLayout, packed: tuple[Tensor, ...], eager: bool) -> Tensor:
    """Return the packed input laid out as the convolution read it."""
    _, rows, length = layout.rows
    stored = rows, length, layout.block, layout.bits, layout.dtype
    if len(packed) == 1:
        return unpack_all(packed[0], *stored).contiguous().as_strided(layout.shape, layout.strides)
    if launch is not None and eager and launch.unpacks(*packed):
        return launch.unpacked(packed)  # type: ignore[arg-type]
    values, bitmap, offsets = packed
    unpacked: Tensor = (unpack if eager else torch.ops.actprune.unpack)(values, bitmap, offsets, *stored)
    return unpacked.as_strided(layout.shape, layout.strides)


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


class CompressedConvolution(CompressedLayer, nn.Module):
    """Mixin of convolutions with a dense, exact forward and a packed saved input; made by ``convert``.

    Same parameters, ``state_dict`` and output as the convolutions of torch. In no-grad mode, in ``torch.func``
    transforms, while they are exported, with a frozen weight or at ``sparsity=0`` with values stored as they are, they
    are torch's convolutions in every respect.

    Raises:
        TypeError: If the input is not floating point, a DTensor, or fp64 to be quantized.
    """

    operator: ClassVar[Operator] = "convolution"
    drops_blocks = True
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return why a convolution cannot be compressed."""
        padding = padding_refusal(layer)
        return None if padding is None else f"its padding {padding}"

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch ``[N, in_channels, *spatial]``, or of one sample."""
        state, weight = self._state, self.weight  # which a module takes a while to find
        parts = state.parts.size(0)
        if not compresses(input, weight, parts, state.blocks):
            return cast(Tensor, super().forward(input))
        return compressed_convolution(
            input, weight, self.bias, windows_of(cast(Convolution, self)), parts, state.blocks
        )

    def rows(self, x: Tensor) -> Tensor:
        """Return an input as the rows ``[samples, rows, length]`` from which its blocks are cut."""
        batch = x.unsqueeze(0) if x.dim() == self.weight.dim() - 1 else x
        return input_rows(batch, self.keep.block_size, self.keep.scope)


class CompressedConv1d(CompressedConvolution, nn.Conv1d):
    """``nn.Conv1d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv1d


class CompressedConv2d(CompressedConvolution, nn.Conv2d):
    """``nn.Conv2d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv2d


class CompressedConv3d(CompressedConvolution, nn.Conv3d):
    """``nn.Conv3d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv3d


def windows_of(layer: Convolution) -> Windows:
    """Return which values of its input a convolution computes each output from."""
    return Windows(layer.stride, _zeros(layer), layer.dilation, layer.groups)


def _zeros(layer: Convolution) -> tuple[int, ...]:
    """Return how many zeros are before and after the input, by dimension."""
    if not isinstance(layer.padding, str):
        return layer.padding
    if layer.padding == "valid":
        return (0,) * len(layer.kernel_size)
    return tuple(d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))


def padding_refusal(layer: Convolution) -> str | None:
    """Return why a convolution with this padding cannot be compressed."""
    if layer.padding_mode != "zeros":
        return f"is {layer.padding_mode!r}, of which torch keeps a padded copy"
    sizes = zip(layer.dilation, layer.kernel_size, strict=True)
    if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in sizes):
        return "is 'same' with an even number of weights, of which torch keeps a padded copy"
    return None


def is_transposed(module: nn.Module) -> bool:
    """Return whether ``module`` is a transposed convolution, whose input is kept as it is."""
    return isinstance(module, Transposed)


CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.Conv1d: CompressedConv1d,
    nn.Conv2d: CompressedConv2d,
    nn.Conv3d: CompressedConv3d,
}
