r"""Linear layers that save their input packed: some of its blocks are dropped, and kept blocks may be quantized.

With ``x [R, IN]``, ``W [OUT, IN]``, ``g = dL/dy`` and ``x_hat`` the packed input::

    y  = x W^T + b            exact, dense
    dx = g W                  exact: needs no activation
    db = sum_r g[r]           exact
    dW = g^T x_hat            the only approximation

Saved for backward: the packed input, and the weight itself if ``dx`` is needed; never ``x``, and never the autocast
copy of the weight (one cast in backward is cheaper than saving both). Layers that read one tensor save the same packed
input (``codec.pack_cache``). Behind a norm that stores its output quantized, nothing is packed at all
(``operators.weight_grad``).

Method: Barley & Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures by Structured Activation
Pruning", arXiv:2311.16883.

In plain eager mode, one look-up by the input's layout returns the direction of blocks, the number to keep, and the
launches if kernels take the input. Under autocast, the kernels that pack an fp32 input also write the 16-bit copy that
the product reads, if ``x.to(dtype)`` has the strides of the stored layout and no gaps. Other inputs are cast first. A
compiler traces plain torch where all blocks are kept, and the opaque operators ``pack`` and ``weight_grad`` where
blocks are chosen.

transformers' ``Conv1D``, used in GPT-2 and similar models, is a linear layer whose weight is ``[IN, OUT]``. Its
transpose, a view, is multiplied and saved like the weight of ``nn.Linear``, so it is never copied. The weight gradient
is computed as ``[OUT, IN]`` and transposed; torch copies it into the layout of the weight when it becomes ``.grad``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_actprune.codec.blocks import (
    Blocks,
    TopkGroup,
    block_and_keep,
    ceil_div,
    sparsity_parts,
    stored_shape,
    stored_view,
)
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    TensorKey,
    as_dtype,
    autocast_dtype,
    cast_as_autocast,
    cast_input,
    choose_backend,
    forced_backend,
    make_apply,
    may_compress,
    no_view,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.pack_cache import OutputLayout, find_output, get_or_pack
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, Packed, kept_blocks, traced_pack
from lightning_actprune.codec.packed import pack as pack_blocks
from lightning_actprune.config import Keep, Operator, Selection, TopkOver
from lightning_actprune.operators.base import CompressedLayer, LayerState, refuse_dtensors
from lightning_actprune.operators.weight_grad import packed_weight_grad, weight_grad_behind_norm
from lightning_actprune.schedules import check_sparsity

_MANAGED = "_is_fsdp_managed_module"

# === Autograd =========================================================================================================


class LinearFunction(torch.autograd.Function):
    """``F.linear`` whose weight gradient is computed from a packed input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: Blocks, reuses: bool, eager: bool
    ) -> Tensor:
        """Return the exact output, and pack the input at a sparsity of ``parts`` (see ``codec.blocks``)."""
        # x [..., IN], weight [OUT, IN], bias [OUT] or None
        ctx.x_shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.samples_second = blocks.topk_over == "sample_second"
        weight_kept = weight if ctx.needs_input_grad[0] else None
        autocast = autocast_dtype(x)
        if autocast is not None:
            weight = cast_as_autocast(weight, autocast)
            bias = None if bias is None else cast_as_autocast(bias, autocast)

        output, settings = None, (parts, autocast, blocks)
        if eager:
            launch, backend = _input_launches.find(settings, x), forced_backend()
            with on_device_of(x):
                output = find_output(x, parts, blocks, autocast or x.dtype) if reuses else None
                if output is None:  # query, key and value projections share one pack
                    (x_read, x_rows), packed = get_or_pack(
                        x,
                        (*settings, backend),
                        lambda: _cast_and_pack(x, launch, *settings, True),
                        lambda: _cast(x, autocast, blocks),
                    )
        else:
            (x_read, x_rows), packed = _cast_and_pack(x, None, *settings, False)
        if output is not None:  # the norm before keeps x
            tensors, ctx.layout = cast(tuple[Tensor, ...], output[0]), output[1]
            x_read = x_rows = _cast_to_rows(x, autocast)
        else:
            tensors, *ctx.layout = packed
        ctx.save_for_backward(weight_kept, *tensors)
        if x.is_contiguous():
            return no_view(F.linear(x_read, weight, bias))
        return _product(x, x_read, x_rows, weight, bias)

    @staticmethod
    @once_differentiable("a linear layer that keeps its input compressed")
    def backward(ctx: Any, eager: bool, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients, and the weight gradient from the packed input."""
        weight, *tensors = ctx.saved_tensors  # weight [OUT, IN] if needed, and the packed input
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_x = grad_weight = grad_bias = sums = None
        grad_rows = _as_rows(grad_output)  # [..., OUT] -> [R, OUT]

        # === GEMM 1: grad_x [..., IN] = grad_output [..., OUT] @ weight [OUT, IN] ===
        if needs_x:
            weight = as_dtype(weight, grad_rows.dtype)
            # Both are the same product: `matmul` flattens a contiguous gradient itself, faster than a view does here.
            whole = grad_output.is_contiguous()
            grad_x = torch.matmul(grad_output, weight) if whole else torch.mm(grad_rows, weight).view(*ctx.x_shape)
            grad_x = as_dtype(grad_x, x_dtype)

        # === GEMM 2: grad_weight [OUT, IN] = grad_output.T [OUT, R] @ x_hat [R, IN] ===
        if needs_weight:
            behind_norm = isinstance(ctx.layout, OutputLayout)
            is_turned = ctx.layout.order == "samples_second" if behind_norm else ctx.samples_second
            # [R, OUT], rows in the order of the packed input
            rows = _as_rows(grad_output.transpose(0, 1)) if is_turned else grad_rows
            if behind_norm:
                if tensors[2] is not None and ctx.layout.order != "columns":  # the norm has a bias
                    sums = _column_sums(grad_rows, torch.float32, eager)
                grad_weight = weight_grad_behind_norm(rows, sums, tuple(tensors), ctx.layout, weight_dtype, eager)
            else:
                packed = Packed(tuple(tensors), *ctx.layout)
                grad_weight = packed_weight_grad(rows, packed, weight_dtype, eager)

        # === Reduction: grad_bias [OUT] = sum of grad_output over the rows ===
        if needs_bias:
            sums = _column_sums(grad_rows, bias_dtype, eager) if sums is None else sums
            grad_bias = as_dtype(sums, bias_dtype)
        return grad_x, grad_weight, grad_bias


_linear = make_apply(LinearFunction)


def _cast_and_pack(
    x: Tensor, launch: InputLaunch | None, parts: int, autocast: torch.dtype | None, blocks: Blocks, eager: bool
) -> tuple[tuple[Tensor, Tensor], Packed]:
    """Return ``x`` cast as by autocast, the same laid out for the product, and the packed input.

    ``eager``: kernels may run.
    """
    if launch is not None and launch.new_cast is not None:
        x_read = launch.new_cast()
        return (x_read, x_read), Packed(launch.pack(x, x_read), *launch.layout)
    x_read, _ = _cast(x, autocast, blocks)
    if launch is not None:
        x_rows = x_read.contiguous() if launch.copied else x_read
        return (x_read, x_rows), Packed(launch.pack(x_rows), *launch.layout)
    stored, transposed = stored_view(x_read, blocks.block_size, blocks.topk_over)  # [samples, rows, length]
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    tensors = (pack_blocks if eager else traced_pack)(stored, block, keep, blocks.bits, blocks.selection)
    # If blocks run along the features of a transposed view, `stored` is a copy, which the product needs too.
    x_rows = x_read if transposed or blocks.topk_over == "sample_second" else stored
    return (x_read, x_rows), Packed(tensors, stored_shape(x_read, transposed), transposed, block, blocks.bits)


def _cast(x: Tensor, autocast: torch.dtype | None, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the first two results of ``_cast_and_pack`` for an ``x`` that is packed already."""
    x_read = x if autocast is None else cast_input(x, autocast, blocks.block_size)
    return x_read, x_read


def _cast_to_rows(x: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return ``x`` cast as by autocast; a cast copy is contiguous, since the product would copy any other again."""
    if autocast is None or x.dtype == autocast:
        return x
    return x.to(dtype=autocast, memory_format=torch.contiguous_format)


def _product(x: Tensor, x_read: Tensor, x_rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x_read, weight, bias)``, bit for bit as torch computes it while it records gradients.

    Inside an autograd function gradients are not recorded, and torch would multiply an input with gaps, or a transposed
    one, sample by sample: 198 us, where copy and product take 105 (token mixing of ResMLP-S12, 128 images, H200). While
    it records, torch computes one product of all rows, which is rounded before the bias is added.

    Args:
        x: The input before autocast, not contiguous.
        x_read: The input after autocast, ``[..., IN]``.
        x_rows: The same laid out for the product, to be read if ``x_read`` would be copied.
        weight: ``[OUT, IN]``.
        bias: ``[OUT]`` or ``None``.
    """
    # A cast copy has the same order of dimensions in memory, but no gaps.
    if x.dim() < 3 or (x.dtype != x_read.dtype and torch.empty_like(x, device="meta").is_contiguous()):
        return no_view(F.linear(x_read, weight, bias))
    y = torch.mm((x_read if _flattens(x_read) else x_rows).reshape(-1, x_read.shape[-1]), weight.t())
    if bias is not None:
        y.add_(bias)
    return no_view(y.view(*x_read.shape[:-1], weight.shape[0]))


def _flattens(x: Tensor) -> bool:
    """Return True if ``x [..., IN]`` can be read as ``[R, IN]`` in place; torch's product then does so."""
    expected = None
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def _as_rows(grad_output: Tensor) -> Tensor:
    """Return ``grad_output [..., OUT]`` as ``[R, OUT]`` without transposing it in memory.

    A transposed gradient (token mixing) has to be copied, but the copy has the same innermost dimension: on an H200,
    9.6 million 16-bit values take 23 us that way and 55 if transposed, and their sum for the bias 7 us instead of 53.
    """
    if grad_output.dim() == 2:
        return grad_output
    if grad_output.dim() == 3 and grad_output.stride(1) == 1 and grad_output.stride(2) != 1:
        return grad_output.permute(2, 0, 1).reshape(grad_output.shape[2], -1).t()
    rows = math.prod(grad_output.shape[:-1])  # -1 would fail for a shard without outputs
    return grad_output.reshape(rows, grad_output.shape[-1])


def _column_sums(grad_rows: Tensor, dtype: torch.dtype, eager: bool) -> Tensor:
    """Return the sum of ``grad_rows [R, OUT]`` over its rows; if columns are contiguous, torch's own sum is fastest."""
    if eager and grad_rows.stride(1) == 1 and grad_rows.numel() > 0:
        launch = _sums_launches.find((dtype,), grad_rows)
        if launch is not None:
            with on_device_of(grad_rows):
                return launch(grad_rows)
    return grad_rows.sum(0, dtype=dtype)


# === Launches: how kernels pack inputs of one layout ==================================================================


class InputLaunch(NamedTuple):
    """Launch and constants of forward for inputs of one layout.

    Args:
        copied: True if the kernels read a contiguous copy, which the product reads too if it needs one.
        layout: Shape, transposition, block and bits of ``Packed``.
        pack: Packs the input or its copy. With memory for the cast input as a second argument, it casts and packs.
        new_cast: Allocates that memory with the strides of ``x.to(dtype)``; ``None`` if ``pack`` does not cast.
    """

    copied: bool
    layout: tuple[tuple[int, int, int], bool, int, int]
    pack: Callable[..., tuple[Tensor, Tensor, Tensor]]
    new_cast: Callable[[], Tensor] | None


def input_launch(
    device: torch.device, key: TensorKey, parts: int, autocast: torch.dtype | None, blocks: Blocks
) -> InputLaunch | None:
    """Return the launch for inputs of a layout, or ``None`` if no kernel takes them.

    Unless there is a ``new_cast``, they get ``cast_input(x, autocast, blocks.block_size)``.
    """
    (shape, strides, dtype, is_aligned), (block_size, topk_over, bits, selection) = key, blocks
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    x_read = cast_input(x, autocast, block_size)
    stored, transposed = stored_view(x_read, block_size, topk_over)
    block, keep = block_and_keep(stored, block_size, parts, bits)
    copied = not _shares_memory(stored, x_read)
    if stored.numel() == 0 or kept_blocks(stored.shape, block, keep) > MAX_KEPT_BLOCKS or (copied and transposed):
        return None
    if choose_backend(stored.shape, x_read.dtype, device, block, ceil_div(stored.shape[2], block)) == "reference":
        return None
    from lightning_actprune.kernels.pack import pack_launch

    layout = stored_shape(x_read, transposed), transposed, block, bits
    source = _castable(x, x_read, stored, transposed, block_size, topk_over)
    new_cast = dtype_of_cast = None
    if source is not None:
        stored, dtype_of_cast = source, x_read.dtype
        new_cast = functools.partial(torch.empty_strided, shape, x_read.stride(), dtype=x_read.dtype, device=device)
    sizes = _three(stored.shape), _three(stored.stride())
    paired = x_read.dtype.itemsize == 2 and (is_aligned or not _shares_memory(stored, x))
    pack = pack_launch(*sizes, block, keep, device, dtype_of_cast, bits, selection, paired)
    return InputLaunch(copied, layout, pack, new_cast)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = sizes
    return first, second, third


def _castable(
    x: Tensor, cast: Tensor, stored: Tensor, transposed: bool, block_size: int, topk_over: TopkGroup
) -> Tensor | None:
    """Return the view of ``x`` that kernels can cast to ``stored``, a view of ``cast``, or ``None``."""
    if cast is x or x.dtype != torch.float32:
        return None
    source, alike = stored_view(x, block_size, topk_over)
    views = _shares_memory(source, x) and _shares_memory(stored, cast)
    return source if views and alike == transposed and stored.is_contiguous() else None


def _shares_memory(view: Tensor, x: Tensor) -> bool:
    return bool(view.untyped_storage()._cdata == x.untyped_storage()._cdata)


_input_launches = LaunchCache(input_launch)


def _sums_launch(device: torch.device, rows: TensorKey, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    (count, outputs), (stride, _), source, _ = rows
    if choose_backend(rows[0], source, device, 1, 1) == "reference":
        return None
    from lightning_actprune.kernels.sums import column_sums_launch

    return column_sums_launch(count, outputs, stride, source.itemsize, dtype, device)


_sums_launches = LaunchCache(_sums_launch)


# === Functional form ==================================================================================================


def compressed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: Blocks, reuses: bool = False
) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, and save ``x`` packed for backward if ``compresses`` says so.

    Args:
        x: ``[..., IN]``.
        weight: ``[OUT, IN]``.
        bias: ``[OUT]`` or ``None``.
        parts: The sparsity (see ``codec.blocks.sparsity_parts``).
        blocks: How ``x`` is cut into blocks and stored.
        reuses: Whether ``x`` may be computed again from the stored output of the layer before and its parameters.
    """
    if not compresses(x, weight, parts, blocks):
        return F.linear(x, weight, bias)
    check_input(x, weight)
    y: Tensor = _linear(x, weight, bias, parts, blocks, reuses)
    return y


def compresses(x: Tensor, weight: Tensor, parts: int, blocks: Blocks) -> bool:
    """Return True if ``x`` is packed for the gradient of ``weight``."""
    return (parts != 0 or blocks.bits != 0) and weight.requires_grad and may_compress(x)


def check_input(x: Tensor, weight: Tensor) -> None:
    """Raise if an operator that packs its input cannot take ``x`` and ``weight``."""
    if isinstance(x, DTensor) or isinstance(weight, DTensor):
        refuse_dtensors(x)
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, its features. HINT: pass `x.reshape(1)`.")
    if not x.is_floating_point():
        raise TypeError(
            f"`x` must be a floating-point tensor (float16, bfloat16, float32 or float64), got {x.dtype}. "
            "HINT: convert it, or keep the layer dense."
        )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sparsity: float,
    block_size: int = 32,
    bits: int | None = None,
    topk_over: TopkOver = "sample",
    selection: Selection = "largest",
) -> Tensor:
    """Apply a linear layer that saves its input packed for backward.

    Output, input gradient and bias gradient are exact. Nothing is packed and this is ``F.linear`` in no-grad mode, in a
    ``torch.func`` transform, during export, if the weight needs no gradient, if the input is sparse or nested, and at
    ``sparsity=0`` without ``bits``.

    Args:
        x: Input ``[..., in_features]``, floating point.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Consecutive values per block, positive; shorter rows shorten it. Blocks run along the features, or
            along ``T`` for a transposed view ``[B, T, D]`` with ``T`` innermost in memory if that fills them up better.
        bits: Bits of each kept value, 2, 3, 4 or 8, with random errors of mean zero (``codec.formats``); ``None`` keeps
            values in their own type.
        topk_over: Blocks that compete: ``"sample"``, those of ``x[i]`` (1-D and 2-D input: of a row); ``"token"``,
            those of a row, along which blocks run.
        selection: Which blocks are kept. ``"largest"``: those with the largest L2 norm (the paper). ``"swap"``: those
            with the largest norm times a random factor of at most 2^0.75 up or down, so that blocks near the threshold
            change places. ``"unbiased"``: blocks drawn at random, larger ones more often, and scaled up so that the
            expectation of the stored input is the input. Random numbers are hashes of the input, so the same input
            gives the same choice. No effect at ``sparsity=0``, where all blocks are kept.

    Returns:
        ``[..., out_features]``, as ``F.linear`` returns it (autocast included).

    Raises:
        TypeError: If an argument has the wrong type, ``x`` is not floating point or a tensor is a DTensor.
        ValueError: If an argument is out of range or ``x`` has no dimension.

    Example:
        >>> x, w = torch.randn(8, 16, 64), torch.randn(32, 64, requires_grad=True)
        >>> linear(x, w, sparsity=0.5, block_size=16).shape
        torch.Size([8, 16, 32])
    """
    return compressed_linear(x, weight, bias, *_setting(sparsity, block_size, bits, topk_over, selection))


@functools.lru_cache(maxsize=256, typed=True)
def _setting(
    sparsity: float, block_size: int, bits: int | None, topk_over: TopkOver, selection: Selection
) -> tuple[int, Blocks]:
    """Check the arguments and return them as parts and blocks; cached, so equal arguments are checked once."""
    keep = Keep(bits, check_sparsity(sparsity), block_size, topk_over, selection)
    return sparsity_parts(check_sparsity(sparsity)), Blocks(keep.block_size, topk_over, keep.stored_bits, selection)


# === Module classes ===================================================================================================


class CompressedLinear(CompressedLayer):
    """Mixin of layers that multiply their input by a weight matrix and save it packed."""

    operator: ClassVar[Operator] = "linear"
    drops_blocks = True


class ActivationPrunedLinear(CompressedLinear, nn.Linear):
    """A linear layer with a dense, exact forward that saves its input packed.

    Parameters, ``state_dict`` and output are those of ``nn.Linear``. Input and bias gradients are exact. The weight
    gradient is computed from the kept blocks (arXiv:2311.16883), or from the stored output of a norm before the layer.
    It behaves exactly as ``nn.Linear`` in no-grad mode, in a ``torch.func`` transform, during export, with a frozen
    weight, for a sparse or nested input, and at ``sparsity=0`` without ``bits``.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias: Whether to add a learned bias.
        sparsity: Fraction of blocks dropped, in [0, 1). May be assigned between steps.
        block_size: Consecutive values per block, positive; shorter rows shorten it.
        bits: Bits of each kept value, ``None`` for values in their own type.
        topk_over: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"``.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Raises:
        TypeError: If a setting has the wrong type, or the input is not floating point or a DTensor.
        ValueError: If a setting is out of range, or the input has no dimension.

    Example:
        >>> layer = ActivationPrunedLinear(64, 32, sparsity=0.5, block_size=16)
        >>> layer(torch.randn(8, 10, 64)).shape
        torch.Size([8, 10, 32])
    """

    dense_class = nn.Linear
    takes_shards = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sparsity: float,
        block_size: int = 32,
        bits: int | None = None,
        topk_over: TopkOver = "sample",
        selection: Selection = "largest",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        keep = Keep(bits, check_sparsity(sparsity), block_size, topk_over, selection)
        self._state = LayerState(keep, check_sparsity(sparsity))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``: ``[..., in_features] -> [..., out_features]``."""
        state, weight = self._state, self.weight  # read once: looking up attributes of a module takes time
        parts, blocks = state.parts.size(0), state.blocks
        if state.keep.min_rows_for_low_bits and not input.is_nested:
            parts, blocks = state.of(input)
        if not ((parts != 0 or blocks.bits != 0) and weight.requires_grad and may_compress(input)):
            return F.linear(input, weight, self.bias)
        plain = type(input) is Tensor and type(weight) is nn.Parameter
        if not (plain and input.dim() and input.is_floating_point()):
            check_input(input, weight)
        y: Tensor = _linear(input, weight, self.bias, parts, blocks, _MANAGED not in self.__dict__)
        return y


class CompressedConv1D(CompressedLinear):
    """Mixin of transformers' ``Conv1D``."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W + b``: ``[..., IN] -> [..., OUT]``."""
        state = self._state
        if not compresses(x, self.weight, state.parts.size(0), state.blocks):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        parts, blocks = state.of(x)
        return compressed_linear(x, self.weight.t(), self.bias, parts, blocks, self.reuses)

    def __repr__(self) -> str:
        inputs, outputs = self.weight.shape
        return f"{type(self).__name__}(nf={outputs}, nx={inputs}, {self.describe()})"


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {nn.Linear: ActivationPrunedLinear}
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {("transformers.pytorch_utils", "Conv1D"): CompressedConv1D}
