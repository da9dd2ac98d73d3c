r"""Linear layers whose saved input is packed: some of its blocks dropped, the others quantized or kept as they are.

With ``x [R, IN]``, ``W [OUT, IN]``, ``g = dL/dy`` and ``x_hat`` the packed input::

    y  = x W^T + b            exact, dense
    dx = g W                  exact: needs no activation
    db = sum_r g[r]           exact
    dW = g^T x_hat            the only approximation

Saved for backward: the packed input, and the weight as it is if ``dx`` is needed; never ``x`` and never the autocast
copy of the weight (one cast in backward is cheaper than keeping both). Several layers that read one tensor save the
same packed input (``codec.sharing``), and behind a norm that stores its output quantized nothing is packed at all
(``operators.reuse``).

Method: Barley & Fröning, "Compressing the Backward Pass of Large-Scale Neural Architectures by Structured Activation
Pruning", arXiv:2311.16883.

In plain eager mode, what the kernels do with inputs of one layout is one look-up: which way blocks run, how many are
kept, whether kernels take them and with which launches. Under autocast the kernels that pack an fp32 input also write
the 16-bit copy of it that the product needs, wherever ``x.to(dtype)`` would lie in memory as it is stored, without
gaps. Other inputs are cast first. A compiler sees plain torch where all blocks are kept, and the opaque operators
``pack`` and ``weight_grad`` where they are chosen.

transformers' ``Conv1D``, of which GPT-2 and its like are made, is a linear layer whose weight lies as ``[IN, OUT]``.
Its transpose, a view, is multiplied and saved as the weight of ``nn.Linear`` is, so no copy of it is made or kept. The
weight gradient is made as ``[OUT, IN]`` and turned back, and torch copies it into the layout of the weight where it
becomes ``.grad``.
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

from lightning_actprune.codec import sharing
from lightning_actprune.codec.blocks import (
    AnyScope,
    Blocks,
    block_and_keep,
    ceil_div,
    sparsity_parts,
    stored_shape,
    stored_view,
)
from lightning_actprune.codec.dispatch import (
    Backend,
    LaunchCache,
    applied,
    as_dtype,
    autocast_dtype,
    cast_input,
    choose_backend,
    forced_backend,
    is_aligned,
    may_compress,
    no_view,
    on_device_of,
    once_differentiable,
)
from lightning_actprune.codec.dispatch import cast as cast_as_autocast
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, kept_blocks, pack_all, unpack_all
from lightning_actprune.codec.packed import pack as pack_blocks
from lightning_actprune.codec.sharing import Shared
from lightning_actprune.config import Keep, Operator, Scope, Selection
from lightning_actprune.operators import reuse
from lightning_actprune.operators.base import CompressedLayer, LayerState, refuse_dtensors
from lightning_actprune.operators.weight_grad import dense_weight_grad, shared_weight_grad
from lightning_actprune.schedules import check_sparsity

_MANAGED = "_is_fsdp_managed_module"


class InputLaunch(NamedTuple):
    """What forward does with inputs of one layout.

    Args:
        copied: Whether the kernels read a contiguous copy, which the product reads too if it needs one.
        shape: ``[batch, rows, length]`` as stored, whatever the scope.
        transposed: Whether the rows are the features.
        block: Values per block, cut to a row.
        pack: Packs the input or its copy, or, given memory for its cast too, writes and packs that.
        new_cast: Returns that memory, laid out as ``x.to(dtype)`` is; ``None`` if what is packed is there already.
    """

    copied: bool
    shape: tuple[int, int, int]
    transposed: bool
    block: int
    pack: Callable[..., tuple[Tensor, Tensor, Tensor]]
    new_cast: Callable[[], Tensor] | None


def _input_launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    parts: int,
    autocast: torch.dtype | None,
    blocks: Blocks,
    backend: Backend | None,
) -> InputLaunch | None:
    """Return how the kernels pack inputs of a layout, ``None`` if that is not for them to do.

    Unless there is a ``new_cast``, they get ``cast_input(x, autocast, blocks.block_size)``. ``aligned`` and ``backend``
    matter to the compiled kernels that are kept, and to the choice.
    """
    block_size, scope, bits, selection = blocks
    given = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    x = cast_input(given, autocast, block_size)
    stored, transposed = stored_view(x, block_size, scope)
    block, keep = block_and_keep(stored, block_size, parts, bits)
    copied = not _shares_memory(stored, x)
    if stored.numel() == 0 or kept_blocks(stored.shape, block, keep) > MAX_KEPT_BLOCKS or (copied and transposed):
        return None
    if choose_backend(stored.shape, x.dtype, device, block, ceil_div(stored.shape[2], block)) == "reference":
        return None
    from lightning_actprune.kernels.pack import pack_launch

    source = _castable(given, x, stored, transposed, block_size, scope)
    if source is not None:
        pack = pack_launch(_three(source.shape), _three(source.stride()), block, keep, device, x.dtype, bits, selection)
        new_cast = functools.partial(torch.empty_strided, shape, x.stride(), dtype=x.dtype, device=device)
        return InputLaunch(False, stored_shape(x, transposed), transposed, block, pack, new_cast)
    pack = pack_launch(_three(stored.shape), _three(stored.stride()), block, keep, device, None, bits, selection)
    return InputLaunch(copied, stored_shape(x, transposed), transposed, block, pack, None)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = sizes
    return first, second, third


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


input_launches = LaunchCache(_input_launch)
"""How the kernels pack inputs of each layout; convolutions look theirs up here too, as rows."""


class LinearFunction(torch.autograd.Function):
    """``F.linear`` whose weight gradient comes from a packed input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: Blocks, reuses: bool, eager: bool
    ) -> Tensor:
        """Compute the exact output and pack the input at a sparsity of ``parts`` (see ``codec.blocks``)."""
        ctx.x_shape, ctx.x_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        autocast = autocast_dtype(x)
        kept_weight = weight if ctx.needs_input_grad[0] else None
        if autocast is not None:
            weight = cast_as_autocast(weight, autocast)
            bias = None if bias is None else cast_as_autocast(bias, autocast)
        ctx.bits, ctx.samples_second, ctx.reused, ctx.all_blocks = (
            blocks.bits,
            blocks.scope == "sample_second",
            None,
            False,
        )
        if not eager:
            return _traced_forward(ctx, x, weight, bias, kept_weight, parts, autocast, blocks)
        if reuses and reuse._outputs:
            found = reuse.find(x, parts, blocks, autocast or x.dtype)
            if found is not None:
                reused, ctx.reused = found
                ctx.save_for_backward(kept_weight, *reused)
                rows = _rows_of(x, autocast)
                return _dense(x, rows, rows, weight, bias)
        backend, aligned = forced_backend(), is_aligned(x)
        with on_device_of(x):
            key = sharing.key_of(x, parts, autocast, blocks, backend)
            shared = None if key is None else sharing.find(x, key)
            rows = given = x
            if shared is None:
                launch = input_launches[
                    (x.shape, x.stride(), x.dtype, x.device, aligned, parts, autocast, blocks, backend)
                ]
                if launch is None:
                    given, rows, shared = _packed_by_reference(x, parts, autocast, blocks)
                else:
                    if launch.new_cast is not None:
                        rows = given = launch.new_cast()
                        packed = launch.pack(x, rows)
                    else:
                        given = x if autocast is None else cast_input(x, autocast, blocks.block_size)
                        rows = given.contiguous() if launch.copied else given
                        packed = launch.pack(rows)
                    shared = Shared(packed, launch.shape, launch.transposed, launch.block)
                if key is not None:
                    sharing.remember(x, key, shared)
            elif autocast is not None or x.stride()[-1] != 1:
                rows = given = cast_input(x, autocast, blocks.block_size)
        packed, ctx.stored_shape, ctx.transposed, ctx.block = shared
        ctx.save_for_backward(kept_weight, *packed)
        if x.is_contiguous():
            return no_view(F.linear(given, weight, bias))
        return _dense(x, given, rows, weight, bias)

    @staticmethod
    @once_differentiable("a linear layer that keeps its input compressed")
    def backward(ctx: Any, eager: bool, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Return exact input and bias gradients and the weight gradient from the packed input."""
        weight, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_w = grad_b = None
        flat = _flat(grad_y)
        if needs_x:
            weight = as_dtype(weight, flat.dtype)
            # The same product: `matmul` flattens a contiguous gradient itself, in less time than a view takes here.
            whole = grad_y.is_contiguous()
            grad_x = torch.matmul(grad_y, weight) if whole else torch.mm(flat, weight).view(*ctx.x_shape)
            grad_x = as_dtype(grad_x, ctx.x_dtype)
        if ctx.reused is not None:
            return grad_x, *_reused_gradients(ctx, grad_y, flat, kept, eager)
        if needs_weight:
            rows = _flat(grad_y.transpose(0, 1)) if ctx.samples_second else flat  # in the order of the packed samples
            if ctx.all_blocks:
                grad_w = _weight_grad_of_all(ctx, rows, kept[0])
            else:
                shared = Shared(tuple(kept), ctx.stored_shape, ctx.transposed, ctx.block)
                grad_w = shared_weight_grad(rows, shared, ctx.weight_dtype, ctx.bits, eager)
        if needs_bias:
            grad_b = _column_sums(flat, ctx.bias_dtype, eager)
        return grad_x, grad_w, grad_b


_linear = applied(LinearFunction)


def compressed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, blocks: Blocks, reuses: bool = False
) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, keeping ``x`` packed for backward if anything is kept of it.

    Args:
        x: ``[..., IN]``.
        weight: ``[OUT, IN]``.
        bias: ``[OUT]`` or ``None``.
        parts: The sparsity (see ``codec.blocks.sparsity_parts``).
        blocks: How ``x`` is cut into blocks and stored.
        reuses: Whether ``x`` may be made again from what the layer before keeps, and from that layer's parameters.
    """
    if not compresses(x, weight, parts, blocks):
        return F.linear(x, weight, bias)
    check_input(x, weight)
    y: Tensor = _linear(x, weight, bias, parts, blocks, reuses)
    return y


def compresses(x: Tensor, weight: Tensor, parts: int, blocks: Blocks) -> bool:
    """Return whether ``x`` is kept for the gradient of ``weight``, and packed."""
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


def _traced_forward(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kept_weight: Tensor | None,
    parts: int,
    autocast: torch.dtype | None,
    blocks: Blocks,
) -> Tensor:
    """Compute the output, and keep what a compiler, or whoever looks on, may see being made."""
    block_size, scope, bits, selection = blocks
    given, x = x, cast_input(x, autocast, block_size)
    stored, transposed = stored_view(x, block_size, scope)
    ctx.stored_shape, ctx.transposed = stored_shape(x, transposed), transposed
    # Blocks along the features of a transposed view are packed from the copy that the product needs too.
    y = _dense(given, x, x if transposed or scope == "sample_second" else stored, weight, bias)
    ctx.block, keep = block_and_keep(stored, block_size, parts, bits)
    ctx.all_blocks = parts == 0
    if ctx.all_blocks:
        check_stored_type(x)
        ctx.save_for_backward(kept_weight, pack_all(stored, ctx.block, bits))
    else:
        ctx.save_for_backward(kept_weight, *torch.ops.actprune.pack(stored, ctx.block, keep, bits, selection))
    return y


def check_stored_type(x: Tensor) -> None:
    """Raise if values of this type cannot be quantized."""
    if x.dtype == torch.float64:
        raise TypeError(
            "float64 values cannot be quantized: the scales of blocks have 4 bits of precision. HINT: keep them as "
            "they are (`bits=None`), or train in float32 or 16 bits."
        )


def _packed_by_reference(
    x: Tensor, parts: int, autocast: torch.dtype | None, blocks: Blocks
) -> tuple[Tensor, Tensor, Shared]:
    """Return ``x`` as autocast casts it, the same as the product had better read it, and what is kept of it."""
    x = cast_input(x, autocast, blocks.block_size)
    stored, transposed = stored_view(x, blocks.block_size, blocks.scope)
    block, keep = block_and_keep(stored, blocks.block_size, parts, blocks.bits)
    packed = pack_blocks(stored, block, keep, blocks.bits, blocks.selection)
    rows = x if transposed or blocks.scope == "sample_second" else stored
    return x, rows, Shared(packed, stored_shape(x, transposed), transposed, block)


def _rows_of(x: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return ``x`` as autocast casts it; a cast that the product would turn in memory is made turned at once."""
    if autocast is None or x.dtype == autocast:
        return x
    return x.to(dtype=autocast, memory_format=torch.contiguous_format)


def _dense(given: Tensor, x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, bit for bit as it is where gradients are recorded.

    Inside a function they are not, and an input with gaps, or a transposed one, would be multiplied sample by sample:
    198 us where copy and product take 105 (token mixing of ResMLP-S12, 128 images, H200). Recorded, there is one
    product of all rows, which is rounded before the bias is added.

    Args:
        given: The input before autocast.
        x: As autocast casts it.
        rows: As the product had better read it where that takes a copy.
        weight: ``[OUT, IN]``.
        bias: ``[OUT]`` or ``None``.
    """
    if given.dim() < 3 or given.is_contiguous() or (given.dtype != x.dtype and _is_cast_to_rows(given)):
        return no_view(F.linear(x, weight, bias))
    y = torch.mm((x if _flattens(x) else rows).reshape(-1, x.shape[-1]), weight.t())
    if bias is not None:
        y.add_(bias)
    return no_view(y.view(*x.shape[:-1], weight.shape[0]))


def _flattens(x: Tensor) -> bool:
    """Return whether ``x [..., IN]`` can be read as ``[R, IN]`` where it lies, as which products then read it."""
    expected = None
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def _is_cast_to_rows(x: Tensor) -> bool:
    """Return whether autocast's copy of ``x``, which keeps the order of dimensions in memory, is contiguous."""
    return torch.empty_like(x, device="meta").is_contiguous()


def _weight_grad_of_all(ctx: Any, rows: Tensor, values: Tensor) -> Tensor:
    """Return the weight gradient of an input all of whose blocks are kept, in plain torch."""
    batch, count, length = ctx.stored_shape
    x = unpack_all(values, batch * count, length, ctx.block, ctx.bits, rows.dtype)
    if ctx.transposed:  # [rows, batch * length] is read as the columns of [R, IN]
        x = x.reshape(ctx.stored_shape).transpose(0, 1).reshape(count, -1).t()
    return dense_weight_grad(rows, x, ctx.weight_dtype)


def _reused_gradients(
    ctx: Any, grad_y: Tensor, flat: Tensor, kept: reuse.Reused, eager: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias where the layer before keeps the input."""
    layout: reuse.ReusedLayout = ctx.reused
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    needs_sums = needs_weight and kept[2] is not None and layout.order != "turned"
    dtype = torch.float32 if needs_sums else ctx.bias_dtype
    sums = _column_sums(flat, dtype, eager) if needs_sums or needs_bias else None
    grad_w = None
    if needs_weight:
        rows = _flat(grad_y.transpose(0, 1)) if layout.order == "samples_second" else flat
        grad_w = reuse.weight_grad(rows, sums, kept, layout, ctx.weight_dtype, eager)
    return grad_w, as_dtype(sums, ctx.bias_dtype) if needs_bias and sums is not None else None


def _flat(grad_y: Tensor) -> Tensor:
    """Return ``grad_y [..., OUT]`` as ``[R, OUT]`` without turning it in memory.

    A transposed gradient (token mixing) has to be copied, but keeps its innermost dimension: on an H200, 9.6 million
    16-bit values take 23 us so and 55 turned, and their sum for the bias 7 us instead of 53.
    """
    if grad_y.dim() == 2:
        return grad_y
    if grad_y.dim() == 3 and grad_y.stride(1) == 1 and grad_y.stride(2) != 1:
        return grad_y.permute(2, 0, 1).reshape(grad_y.shape[2], -1).t()
    return grad_y.reshape(math.prod(grad_y.shape[:-1]), grad_y.shape[-1])  # of a shard without outputs, too


def _sums_launch(
    shape: tuple[int, int],
    stride: int,
    source: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    aligned: bool,
    backend: Backend | None,
) -> Callable[[Tensor], Tensor] | None:
    """Return what adds up rows by a kernel; ``aligned`` and ``backend`` matter to what it keeps, and to the choice."""
    if choose_backend(shape, source, device, 1, 1) == "reference":
        return None
    from lightning_actprune.kernels.sums import column_sums_launch

    return column_sums_launch(*shape, stride, source.itemsize, dtype, device)


_sums_launches = LaunchCache(_sums_launch)


def _column_sums(flat: Tensor, dtype: torch.dtype, eager: bool) -> Tensor:
    """Return the sum over the rows of ``flat [R, OUT]``: a compiler makes its own, and torch reads columns fastest."""
    if eager and flat.stride(1) == 1 and flat.numel() > 0:
        key = flat.shape, flat.stride(0), flat.dtype, dtype, flat.device, is_aligned(flat), forced_backend()
        launch = _sums_launches[key]
        if launch is not None:
            with on_device_of(flat):
                return launch(flat)
    return flat.sum(0, dtype=dtype)


def weight_grad_of(
    grad_y: Tensor, blocks: Blocks, shape: tuple[int, int, int], transposed: bool
) -> Callable[[Tensor], Tensor]:
    """Return what computes the weight gradient of an input, or of what is kept of it, as backward does.

    ``grad_y``: gradient of the output, inside attention ``[T, N, OUT]``; ``shape``, ``transposed``: of the input as
    stored. The function takes that as ``[batch * rows, length]``, and returns fp32, or fp64 of fp64.
    """
    rows = _flat(grad_y.transpose(0, 1) if blocks.scope == "sample_second" else grad_y)
    dtype = torch.promote_types(grad_y.dtype, torch.float32)

    def weight_grad(stored: Tensor) -> Tensor:
        if transposed:  # [rows, batch * length] is read as the columns of [R, IN]
            stored = stored.reshape(shape).transpose(0, 1).reshape(shape[1], -1).t()
        return dense_weight_grad(rows, stored, dtype)

    return weight_grad


class CompressedLinear(CompressedLayer):
    """Mixin of layers that multiply their input by a weight matrix and keep it packed."""

    operator: ClassVar[Operator] = "linear"
    drops_blocks = True


class ActivationPrunedLinear(CompressedLinear, nn.Linear):
    """A linear layer with a dense, exact forward and a packed saved input.

    Same parameters, ``state_dict`` and output as ``nn.Linear``; input and bias gradients are exact, the weight gradient
    is computed from the kept blocks (arXiv:2311.16883), or from what a norm before it keeps (``operators.reuse``). In
    no-grad mode, in a ``torch.func`` transform, while it is exported, with a frozen weight, of a sparse or nested input
    or at ``sparsity=0`` with values stored as they are, it is ``nn.Linear`` in every respect.

    Args:
        in_features: Size of each input row.
        out_features: Size of each output row.
        bias: Whether to add a learned bias.
        sparsity: Fraction of blocks dropped, in [0, 1). May be assigned between steps.
        block_size: Consecutive values per block, positive; a block larger than a row is cut to the row.
        bits: Bits of each value, ``None`` for values as they are.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
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
        scope: Scope = "sample",
        selection: Selection = "largest",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        keep = Keep(bits, check_sparsity(sparsity), block_size, scope, selection)
        self._state = LayerState(keep, check_sparsity(sparsity))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input W^T + b``: ``[..., in_features] -> [..., out_features]``."""
        state, weight = self._state, self.weight  # which a module takes a while to find
        parts, blocks = state.parts.size(0), state.blocks
        if not ((parts != 0 or blocks.bits != 0) and weight.requires_grad and may_compress(input)):
            return F.linear(input, weight, self.bias)
        plain = type(input) is Tensor and type(weight) is nn.Parameter
        if not (plain and input.dim() and input.is_floating_point()):
            check_input(input, weight)
        if state.keep.fine_rows:
            parts, blocks = state.of(input)
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


CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {nn.Linear: ActivationPrunedLinear}
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {("transformers.pytorch_utils", "Conv1D"): CompressedConv1D}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    sparsity: float,
    block_size: int = 32,
    bits: int | None = None,
    scope: Scope = "sample",
    selection: Selection = "largest",
) -> Tensor:
    """Apply a linear layer that keeps its input packed for backward.

    Output, input gradient and bias gradient are exact. In no-grad mode, in a ``torch.func`` transform, while it is
    exported, with a weight that needs no gradient, of a sparse or nested input, or at ``sparsity=0`` with values stored
    as they are, this is ``F.linear`` and nothing is packed.

    Args:
        x: Input ``[..., in_features]``, floating point.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Consecutive values per block, positive; cut to the row if larger. Blocks run along the features, or,
            of a transposed view ``[B, T, D]`` with ``T`` innermost in memory, along ``T`` if they fill up better there.
        bits: Bits of each kept value, 2, 3, 4 or 8, with random errors of mean zero (``codec.formats``); ``None`` keeps
            values as they are.
        scope: ``"sample"``: the blocks of ``x[i]`` compete (1-D and 2-D input: of a row); ``"token"``: of a row, that
            is of the values along which blocks run.
        selection: Which blocks are kept: ``"largest"``, those of the largest L2 norm (the paper); ``"swap"``,
            those of the largest norm times a random factor of at most 2^0.75 up or down, so that blocks near the
            threshold change places; ``"unbiased"``, blocks drawn at random, the larger the more often, and scaled up
            so that the expectation of what is stored is the input. The random numbers are hashes of the input: the
            same input, the same choice. Without effect at ``sparsity=0``, where all are kept.

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
    return compressed_linear(x, weight, bias, *_setting(sparsity, block_size, bits, scope, selection))


@functools.lru_cache(maxsize=256, typed=True)
def _setting(
    sparsity: float, block_size: int, bits: int | None, scope: Scope, selection: Selection
) -> tuple[int, Blocks]:
    """Return what a call is told of its arguments, checked once."""
    keep = Keep(bits, check_sparsity(sparsity), block_size, scope, selection)
    return sparsity_parts(check_sparsity(sparsity)), Blocks(keep.block_size, scope, keep.stored_bits, selection)
