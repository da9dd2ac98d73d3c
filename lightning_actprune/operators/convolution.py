r"""Convolutions that save their input packed.

With ``x [N, C, *spatial]``, ``W``, ``g = dL/dy`` and ``x_hat`` the packed input::

    y  = x * W + b                             exact, dense
    dx = g * W, transposed                     exact: needs no activation
    db = sum of g over all but the channels    exact
    dW = g * x_hat                             the only approximation

Saved for backward: the packed input, and the weight itself; never ``x`` and never the autocast copy of the weight.
Backward unpacks ``x_hat`` only while torch's own ``convolution_backward`` runs. ``x_hat`` has the strides of ``x``, so
the vendor's library takes the same algorithms; the input gradient uses only its sizes. Convolutions that read one
tensor, such as the first one of a residual block and its shortcut, save the same packed input.

Blocks are cut from a sample in the order of memory (``rows_of``). For ``channels_last`` inputs a block is channels of a
pixel, or of several pixels if ``C`` is no multiple of the block; otherwise it is neighbouring pixels of a channel. So
no copy is made, no block is cut short, and any number of channels works, also the three of an image.

Only zero padding that is equal on both sides is compressed. For other padding (``padding_mode``, or ``"same"`` with an
even number of weights) torch saves a padded copy; such layers stay dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec.blocks import (
    Blocks,
    TopkGroup,
    block_and_keep,
    ceil_div,
    keeps_all,
    stored_shape,
    stored_view,
)
from lightning_actprune.codec.dispatch import (
    MAX_COLUMNS,
    Backend,
    LaunchCache,
    SimulatedGPU,
    TensorKey,
    as_dtype,
    autocast_dtype,
    cast_as_autocast,
    forced_backend,
    make_apply,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.layout import is_channels_last
from lightning_actprune.codec.pack_cache import get_or_pack
from lightning_actprune.codec.packed import Packed, kept_blocks, pack, traced_pack
from lightning_actprune.config import Operator
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.linear import check_input, compresses, input_launch

_convolution_backward = torch.ops.aten.convolution_backward.default
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed


class Windows(NamedTuple):
    """Windows of the input from which a convolution computes its outputs, as torch's operators take them.

    Args:
        stride: Steps from output to output, by dimension.
        padding: Zeros before and after, by dimension.
        dilation: Steps from weight to weight, by dimension.
        transposed: False: transposed convolutions stay dense.
        output_padding: Zeros, for the same reason.
        groups: Number of groups of channels that are convolved separately.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


# === Autograd =========================================================================================================


class ConvolutionFunction(torch.autograd.Function):
    """``torch.convolution`` whose weight gradient is computed from a packed input."""

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
        """Return the exact output, and pack the input at a sparsity of ``parts`` (see ``codec.blocks``)."""
        # x [N, C, *spatial], weight [OUT, C / groups, *sizes], bias [OUT] or None
        ctx.windows, ctx.dtypes = windows, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.bias_sizes = None if bias is None else bias.shape
        autocast = autocast_dtype(x)
        if eager:  # a linear layer that reads the same tensor cuts it into other rows
            settings = parts, autocast, blocks
            launch = _launches.find(settings, x)
            dense = x if launch is not None else without_gaps(x)
            if dense is not x:
                launch = _launches.find(settings, dense)
            x_read, packed = get_or_pack(
                x,
                ("convolution", *settings, forced_backend()),
                lambda: _cast_and_pack(dense, launch, parts, autocast, blocks, True),
                lambda: _cast(dense, autocast),
            )
        else:
            launch = None
            x_read, packed = _cast_and_pack(without_gaps(x), None, parts, autocast, blocks, False)
        tensors, *ctx.layout = packed
        ctx.launch, ctx.read = launch, (x_read.shape, x_read.stride(), x_read.dtype)
        ctx.save_for_backward(weight, *tensors)
        if autocast is not None:
            weight = cast_as_autocast(weight, autocast)
            bias = None if bias is None else cast_as_autocast(bias, autocast)
        return torch.convolution(x_read, weight, bias, *windows)

    @staticmethod
    @once_differentiable("a convolution that keeps its input compressed")
    def backward(ctx: Any, eager: bool, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients, and the weight gradient from the packed input."""
        weight, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        shape, strides, dtype = ctx.read
        # x_hat [N, C, *spatial], laid out as the convolution read it
        if eager and ctx.launch is not None and ctx.launch.can_unpack(*tensors):
            x_hat = ctx.launch.unpacked(tensors)
        else:
            x_hat = Packed(tuple(tensors), *ctx.layout).unpack(dtype, eager).contiguous().as_strided(shape, strides)
        weight = as_dtype(weight, dtype)
        grads = _convolution_backward(grad_output, x_hat, weight, ctx.bias_sizes, *ctx.windows, needed)
        return tuple(
            [as_dtype(g, dtype) if wanted else None for g, dtype, wanted in zip(grads, ctx.dtypes, needed, strict=True)]
        )


_convolution = make_apply(ConvolutionFunction)


def _cast_and_pack(
    x: Tensor, launch: ConvolutionLaunch | None, parts: int, autocast: torch.dtype | None, blocks: Blocks, eager: bool
) -> tuple[Tensor, Packed]:
    """Return ``x``, which has no gaps, cast as by autocast, and the packed input."""
    if launch is not None:
        x_read = launch.new() if launch.casts else _cast(x, autocast)
        with on_device_of(x):
            tensors = launch.pack(x, x_read) if launch.casts else launch.pack(x_read)
        return x_read, Packed(tensors, *launch.layout)
    x_read = _cast(x, autocast)
    stored, block, keep = _stored(x_read, parts, blocks)
    packed = (pack if eager else traced_pack)(stored, block, keep, blocks.bits, blocks.selection)
    return x_read, Packed(packed, stored_shape(stored, False), False, block, blocks.bits)


def _cast(x: Tensor, autocast: torch.dtype | None) -> Tensor:
    return x if autocast is None else cast_as_autocast(x, autocast)


def _stored(x_read: Tensor, parts: int, blocks: Blocks) -> tuple[Tensor, int, int]:
    """Return what is packed, ``[samples, rows, length]``, the block cut to a row, and the blocks kept per sample."""
    stored, _ = stored_view(rows_of(x_read, blocks.block_size, blocks.topk_over), blocks.block_size, blocks.topk_over)
    return stored, *block_and_keep(stored, blocks.block_size, parts, blocks.bits)


# === Rows, in the order of memory =====================================================================================


def without_gaps(x: Tensor) -> Tensor:
    """Return ``x [N, C, *spatial]`` without gaps in memory, channels last if they already are; copied only if needed.

    torch's convolution copies an input with gaps too, such as one half of the channels.
    """
    if x.is_contiguous() or is_channels_last(x):
        return x
    if x.stride(1) == 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.contiguous()


def rows_of(x: Tensor, block_size: int, topk_over: TopkGroup) -> Tensor:
    """Return ``x [N, C, *spatial]`` without gaps as rows ``[N, T, L]`` in the order of memory, to be cut into blocks.

    Rows are as long as a block if that divides a sample; else a sample is one row, if kernels take so long a row.
    Otherwise, and with ``"token"``, where the blocks of a row compete, rows are the channels of a pixel, or the
    innermost dimension of a contiguous ``x``.
    """
    memory = x if x.is_contiguous() else x.movedim(1, -1)
    values = math.prod(x.shape[1:])
    if topk_over != "token":
        if values % block_size == 0:
            return memory.reshape(x.shape[0], values // block_size, block_size)
        if ceil_div(values, block_size) <= MAX_COLUMNS:
            return memory.reshape(x.shape[0], 1, values)
    return memory.flatten(1, -2)


# === Launches: how kernels pack and unpack inputs of one layout =======================================================


class ConvolutionLaunch(NamedTuple):
    """What forward and backward do with inputs of one layout, which have no gaps.

    Args:
        layout: Shape, transposition, block and bits of ``Packed``.
        new: Returns memory laid out as what the convolution reads.
        casts: Whether ``pack`` writes what the convolution reads, cast from the input, to such memory.
        pack: Packs.
        unpack: Writes the packed input to such memory.
        backend: What has decided on kernels (``forced_backend``).
    """

    layout: tuple[tuple[int, int, int], bool, int, int]
    new: Callable[[], Tensor]
    casts: bool
    pack: Callable[..., tuple[Tensor, Tensor, Tensor]]
    unpack: Callable[..., None]
    backend: Backend | SimulatedGPU | None

    def can_unpack(self, values: Tensor, bitmap: Tensor, offsets: Tensor) -> bool:
        """Return whether ``unpack`` reads what was saved: hooks may have put it where it is not aligned."""
        aligned = (values.data_ptr() | bitmap.data_ptr() | offsets.data_ptr()) % 16 == 0
        return aligned and self.backend is forced_backend()

    def unpacked(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the packed input as it was read."""
        x_hat = self.new()
        with on_device_of(x_hat):
            self.unpack(*tensors, x_hat)
        return x_hat


def _launch(
    device: torch.device, key: TensorKey, parts: int, autocast: torch.dtype | None, blocks: Blocks
) -> ConvolutionLaunch | None:
    """Return what is done with inputs of a layout, ``None`` if it has gaps, or if packing it is not for the kernels."""
    shape, strides, dtype, aligned = key
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if without_gaps(x) is not x:
        return None
    rows = rows_of(x, blocks.block_size, blocks.topk_over)
    launch = input_launch(device, (rows.shape, rows.stride(), dtype, aligned), parts, autocast, blocks)
    if launch is None or launch.copied:
        return None
    from lightning_actprune.kernels.unpack import unpack_launch

    x_read = _cast(x, autocast)
    stored, block, keep = _stored(x, parts, blocks)
    new = functools.partial(torch.empty_strided, shape, x_read.stride(), dtype=x_read.dtype, device=device)
    kept = kept_blocks(stored.shape, block, keep) if blocks.bits else 0
    samples = 0 if keeps_all(keep) else stored.shape[0]
    unpacks = unpack_launch(samples, kept, launch.layout[0], False, block, blocks.bits, device)
    return ConvolutionLaunch(launch.layout, new, launch.new_cast is not None, launch.pack, unpacks, forced_backend())


_launches = LaunchCache(_launch)


# === Functional form ==================================================================================================


def compressed_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, parts: int, blocks: Blocks
) -> Tensor:
    """Convolve ``x``, a batch or one sample, and save it packed; to be called if ``compresses`` returns True."""
    check_input(x, weight)
    is_sample = x.dim() == weight.dim() - 1
    y: Tensor = _convolution(x.unsqueeze(0) if is_sample else x, weight, bias, windows, parts, blocks)
    return y.squeeze(0) if is_sample else y


def windows_of(layer: Convolution) -> Windows:
    """Return the windows of a convolution."""
    padding = layer.padding
    if isinstance(padding, str):
        sizes = zip(layer.dilation, layer.kernel_size, strict=True)
        padding = tuple(0 if padding == "valid" else d * (k - 1) // 2 for d, k in sizes)
    return Windows(layer.stride, padding, layer.dilation, False, (0,) * len(layer.stride), layer.groups)


def is_transposed(module: nn.Module) -> bool:
    """Return True if ``module`` is a transposed convolution, which stays dense."""
    return isinstance(module, Transposed)


# === Module classes ===================================================================================================


class CompressedConvolution(CompressedLayer, nn.Module):
    """Mixin of convolutions with a dense, exact forward that save their input packed; made by ``convert``.

    Parameters, ``state_dict`` and output are those of torch's convolutions. They behave exactly as torch's in no-grad
    mode, in ``torch.func`` transforms, during export, with a frozen weight, and at ``sparsity=0`` without ``bits``.

    Raises:
        TypeError: If the input is not floating point, is a DTensor, or is fp64 and would be quantized.
    """

    operator: ClassVar[Operator] = "convolution"
    drops_blocks = True
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress a convolution, or ``None``."""
        if layer.padding_mode != "zeros":
            return f"its padding is {layer.padding_mode!r}, of which torch keeps a padded copy"
        sizes = zip(layer.dilation, layer.kernel_size, strict=True)
        if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in sizes):
            return "its padding is 'same' with an even number of weights, of which torch keeps a padded copy"
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch ``[N, in_channels, *spatial]``, or of one sample."""
        state, weight = self._state, self.weight  # read once: looking up attributes of a module takes time
        parts = state.parts.size(0)
        if not compresses(input, weight, parts, state.blocks):
            return cast(Tensor, super().forward(input))
        return compressed_convolution(
            input, weight, self.bias, windows_of(cast(Convolution, self)), parts, state.blocks
        )

    def rows(self, x: Tensor) -> Tensor:
        """Return an input as the rows ``[samples, rows, length]`` from which its blocks are cut."""
        batch = x.unsqueeze(0) if x.dim() == self.weight.dim() - 1 else x
        return rows_of(without_gaps(batch), self.keep.block_size, self.keep.topk_over)


class CompressedConv1d(CompressedConvolution, nn.Conv1d):
    """``nn.Conv1d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv1d


class CompressedConv2d(CompressedConvolution, nn.Conv2d):
    """``nn.Conv2d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv2d


class CompressedConv3d(CompressedConvolution, nn.Conv3d):
    """``nn.Conv3d`` that keeps its input packed; see ``CompressedConvolution``."""

    dense_class = nn.Conv3d


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.Conv1d: CompressedConv1d,
    nn.Conv2d: CompressedConv2d,
    nn.Conv3d: CompressedConv3d,
}
