r"""Normalisation and scaling of rows that store their input quantized.

With ``x [R, L]``, per row::

    x^ = (x - mean) rstd,  rstd = 1 / sqrt(var + eps)      without ``centred``: mean = 0, var = mean of x^2
    y  = x^ w + b

    grad_b = sum_r g     grad_w = sum_r g x^     grad_x = rstd (g w - mean(g w) - x^ mean(g w x^))

(the second term only if ``centred``). Without ``normed``, rows are only scaled and shifted, as in an affine layer: the
mean is 0, rstd is 1 and not stored, and ``grad_x = g w`` is exact.

A residual can be added in the pass that computes y; its gradient is g itself. torch writes the product ``x w`` to
memory and reads it again for the sum.

Backward reads x~, the stored x^, in place of x^. The output and ``grad_b`` are exact, and ``rstd`` is stored in fp32.
x~ = x^ + n with errors n of mean zero and root mean square s, where that of x^ is 1 (normal values in blocks of 32:
8 bits 0.005, 4 bits 0.09, 3 bits 0.19, 2 bits 0.44):

``grad_w``
    has the error sum_r g n of mean zero: as in the weight gradient of a linear layer, errors of many rows cancel.
``grad_x``
    With c = cos of the angle between g w and x^, and |x^| = sqrt(L)::

        error = -rstd (n mean(g w x~) + x^ mean(g w n))
        |error| <= rstd |g w| s (2 + s)                      in any case
        |error| ~  rstd |g w| s sqrt(c^2 + 2/L)              if errors are independent of g

    where the norm of the exact gradient is rstd |g w| sqrt(1 - c^2). The error is large only if g w points along x^: at
    L = 768, 4 and 2 bits are off by 0.5 and 2.4 % of a random g (c = 0), and by 7 and 33 %, of mean zero, at c = 0.6.

Saved for backward: x^ quantized, one fp32 ``rstd`` per row, and the weight itself. torch saves the input itself and two
numbers per row. Statistics are in fp32, as torch's are; blocks never cross the end of a row.

In plain eager mode on a GPU, kernels run by cached launches. Everything else runs in plain torch.

**Layers that scale, and perhaps shift, each feature** (``y = x * weight + bias``) need their input only for the
gradient of the weight, as a linear layer does. The whole input is stored quantized, and all other gradients are exact.
``Affine`` is a plain layer of that kind for your own models, which ``convert`` supports, and so are the equivalent
layers of timm. timm's ``ResBlock`` (ResMLP) scales its branches by parameters of its own and adds them to its input.
Scale and sum are one kernel unless paths are dropped between them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    TensorKey,
    as_dtype,
    autocast_dtype,
    choose_backend,
    in_plain_eager_mode,
    make_apply,
    may_compress,
    no_view,
    on_device_of,
    once_differentiable,
    simulated_gpu,
)
from lightning_actprune.codec.pack_cache import remember_output
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, check_storable, pack_all, unpack_all
from lightning_actprune.codec.private import autocast_computes_in_fp32
from lightning_actprune.config import Operator
from lightning_actprune.operators.base import CompressedLayer, Traced, has_hooks
from lightning_actprune.operators.weight_grad import flat_parameter

if TYPE_CHECKING:
    from lightning_actprune.kernels.norm import NormGradLaunch, NormLaunch


# === Settings, and constants for backward =============================================================================


class NormSetting(NamedTuple):
    """Settings of the normalisation and of its storage.

    Args:
        centred: True if the mean is subtracted.
        rounded: True if normalised values are rounded to the type of the input before they are multiplied.
        eps: Added to the variance.
        block_size: Values per block; shorter rows shorten it.
        bits: Bits of a stored value.
        normed: True if rows are normalised; otherwise they are only scaled and shifted.
        keeps_layout: True if the output has the strides of the input, as torch's element-wise operations do; it is
            contiguous otherwise.
    """

    centred: bool
    rounded: bool
    eps: float
    block_size: int
    bits: int
    normed: bool = True
    keeps_layout: bool = False

    def cut_to(self, length: int) -> NormSetting:
        """Return the setting for rows of ``length`` values."""
        return self._replace(block_size=max(1, min(self.block_size, length)))


Parameter = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a weight or a bias."""


class NormLayout(NamedTuple):
    """Constants that backward needs from forward.

    Args:
        setting: Settings, with blocks cut to a row.
        shape: Shape of input and output.
        rows: ``(R, L)``.
        dtype: Type of the input.
        parameters: Shape and type of weight and bias, ``None`` for a missing one.
    """

    setting: NormSetting
    shape: tuple[int, ...]
    rows: tuple[int, int]
    dtype: torch.dtype
    parameters: tuple[Parameter | None, Parameter | None]


# === Autograd =========================================================================================================


class NormFunction(torch.autograd.Function):
    """Autograd function of normalisation or scaling over the last dimensions that saves its input quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        shape: tuple[int, ...],
        setting: NormSetting,
        dtype: torch.dtype,
        eager: bool,
    ) -> Tensor:
        """Return the exact output in ``dtype``, normalised over the last dimensions, of ``shape``."""
        # x and residual [..., *shape], read as rows [R, L]; weight and bias of L values
        eager = eager and (residual is None or in_plain_eager_mode(residual))
        bound = _launches.find((shape, setting, dtype), x, weight, bias, residual) if eager else None
        ctx.launched, ctx.residual = bound is not None, None if residual is None else residual.dtype
        if bound is None:
            y, values, rstd, ctx.layout = _normalize(x, weight, bias, residual, shape, setting, dtype)
        else:
            launch, ctx.layout = bound
            with on_device_of(x):
                y, values, rstd = launch(x, weight, bias, residual)
        ctx.save_for_backward(values, rstd, weight)
        if residual is not None:
            return y
        if not x.is_contiguous():
            y = _laid_out(y, x, setting, eager)
        if eager and len(shape) == 1:
            remember_output(y, values, weight, bias, setting.bits, ctx.layout.setting.block_size)
        return y

    @staticmethod
    @once_differentiable("a normalisation or affine layer that keeps its input quantized")
    def backward(ctx: Any, eager: bool, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight, bias and residual."""
        needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        grad_residual = as_dtype(grad_output, ctx.residual) if needs_residual else None
        if not (needs_x or needs_weight or needs_bias):
            return None, None, None, grad_residual
        layout: NormLayout = ctx.layout
        values, rstd, weight = ctx.saved_tensors  # the bytes of x~, [R], L values
        of_weight, of_bias = layout.parameters
        wanted = of_weight if needs_weight else None, of_bias if needs_bias else None
        if eager and ctx.launched:
            launch = _grad_launches.find((layout, wanted), grad_output, values, rstd, weight)
            if launch is not None:
                with on_device_of(grad_output):
                    return *launch(grad_output, values, rstd, weight), grad_residual
        rows = grad_output.reshape(layout.rows)  # [R, L]
        sums = wanted[0] is not None, wanted[1] is not None
        arguments = values, rstd, flat_parameter(weight), layout.setting, layout.dtype, sums
        grad_x, *totals = normalize_grad(rows, *arguments)
        grad_weight, grad_bias = map(_of_parameter, totals, wanted)
        return grad_x.view(layout.shape), grad_weight, grad_bias, grad_residual


_norm = make_apply(NormFunction)


def _laid_out(y: Tensor, x: Tensor, setting: NormSetting, eager: bool) -> Tensor:
    """Return the output with the strides of the dense layer's, for an ``x`` that is not contiguous."""
    if setting.keeps_layout:
        return laid_out_as(x, y)
    if setting.normed and not setting.centred and (eager or x.device.type == "cpu"):
        return no_view(y.contiguous(memory_format=dense_format(x)))  # torch's RMSNorm
    return y


def laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    """Return ``y`` with the strides that an element-wise operation of torch gives its output for ``x``."""
    laid_out = torch.empty_like(x, dtype=y.dtype)
    return y if laid_out.stride() == y.stride() else laid_out.copy_(y)


def dense_format(x: Tensor, of_batch: bool = False) -> torch.memory_format:
    """Return the memory format of outputs of torch's norms: channels last if ``x`` is an image with channels last.

    ``x`` may have gaps. If a dimension of size 1 leaves the format open, its stride decides, but not in batch
    normalisation on the CPU (``of_batch``).
    """
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous():
        return torch.contiguous_format
    if of_batch and x.is_contiguous(memory_format=last):
        return last
    least = 1
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(dim) < least or (dim == 0 and least == x.stride(1)):
            return torch.contiguous_format
        least = x.stride(dim) * x.shape[dim]
    return last


def _of_parameter(total: Tensor | None, parameter: Parameter | None) -> Tensor | None:
    """Return the gradient ``[L]`` of a parameter in its shape and type."""
    return None if total is None or parameter is None else as_dtype(total, parameter[1]).view(parameter[0])


# === Reference in plain torch =========================================================================================


def _normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None, NormLayout]:
    """Return output, values, ``rstd`` and layout, in plain torch."""
    length, number = math.prod(shape), math.prod(x.shape[: x.dim() - len(shape)])
    setting = setting.cut_to(length)
    check_storable(x, setting.bits, ceil_div(number * length, setting.block_size), setting.block_size)
    rows, added = x.reshape(number, length), None if residual is None else residual.reshape(number, length)
    y, values, rstd = normalize(rows, flat_parameter(weight), flat_parameter(bias), added, setting, dtype)
    of_weight, of_bias = (None if p is None else (p.shape, p.dtype) for p in (weight, bias))
    layout = NormLayout(setting, x.shape, (number, length), x.dtype, (of_weight, of_bias))
    return no_view(y.contiguous().view(x.shape)), values, rstd, layout


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    setting: NormSetting,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Normalise the rows of ``x [R, L]`` in plain torch, and store what backward needs.

    Args:
        x: In fp32 or 16 bits.
        weight: ``[L]`` or ``None``.
        bias: ``[L]`` or ``None``.
        residual: ``[R, L]`` to add to the output, or ``None``.
        setting: Settings, with blocks cut to a row.
        dtype: Type of the output.

    Returns:
        ``y [R, L]``, the bytes of all blocks, and ``rstd [R]`` in fp32, or ``None`` without ``normed``.
    """
    wide, rstd = x.float(), None  # [R, L]
    if setting.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    if setting.normed:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + setting.eps)
        wide = wide * rstd
    y = wide.to(x.dtype).float() if setting.rounded else wide
    if weight is not None:
        y = y * weight.float()
    for added in (bias, residual):
        if added is not None:
            y = y + added.float()
    return y.to(dtype), pack_all(wide, setting.block_size, setting.bits), None if rstd is None else rstd.view(-1)


def normalize_grad(
    grad_output: Tensor,
    values: Tensor,
    rstd: Tensor | None,
    weight: Tensor | None,
    setting: NormSetting,
    dtype: torch.dtype,
    wanted: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of ``normalize``: of the input in ``dtype``, of weight and bias in fp32.

    Args:
        grad_output: ``[R, L]``.
        values: The bytes of all blocks.
        rstd: ``[R]``, fp32, or ``None``.
        weight: ``[L]`` or ``None``.
        setting: Settings of forward.
        dtype: Type of the input gradient.
        wanted: Which gradients of weight and bias are needed; the other ones are returned as ``None``.
    """
    x = unpack_all(values, grad_output.shape[0], grad_output.shape[1], setting.block_size, setting.bits, torch.float32)
    grad = grad_output.float()  # x and grad [R, L]
    of_weight, of_bias = (grad * x).sum(0) if wanted[0] else None, grad.sum(0) if wanted[1] else None
    if weight is not None:
        grad = grad * weight.float()
    if rstd is None:
        return grad.to(dtype), of_weight, of_bias
    grad_x = grad - x * (grad * x).mean(-1, keepdim=True)
    if setting.centred:
        grad_x = grad_x - grad.mean(-1, keepdim=True)
    return (grad_x * rstd[:, None]).to(dtype), of_weight, of_bias


# === Launches =========================================================================================================


def _norm_launch(
    device: torch.device,
    x: TensorKey,
    weight: TensorKey | None,
    bias: TensorKey | None,
    residual: TensorKey | None,
    row_shape: tuple[int, ...],
    setting: NormSetting,
    output: torch.dtype,
) -> tuple[NormLaunch, NormLayout] | None:
    shape, strides, dtype, _ = x
    length = math.prod(row_shape)
    rows, setting = (math.prod(shape[: len(shape) - len(row_shape)]), length), setting.cut_to(length)
    blocks, columns = ceil_div(rows[0] * length, setting.block_size), ceil_div(length, setting.block_size)
    parameters = weight, bias
    contiguous = all(p is None or p[1] == torch.empty(p[0], device="meta").stride() for p in parameters)
    if 0 in rows or dtype == torch.float64 or blocks > MAX_KEPT_BLOCKS or not contiguous:
        return None
    if choose_backend(rows, dtype, device, setting.block_size, columns) == "reference":
        return None
    from lightning_actprune.kernels import norm as kernels

    if not kernels.takes_rows(length, setting.block_size):
        return None
    present = *[parameter is not None for parameter in parameters], residual is not None
    flags = *present, setting.centred, setting.rounded, setting.normed
    stored = setting.block_size, setting.bits
    launch = kernels.NormLaunch(
        shape, length, _row_stride(shape, rows, strides), flags, setting.eps, *stored, output, device
    )
    of_weight, of_bias = (None if p is None else (p[0], p[2]) for p in parameters)
    return launch, NormLayout(setting, shape, rows, dtype, (of_weight, of_bias))


def _norm_grad_launch(
    device: torch.device,
    grad_output: TensorKey,
    values: TensorKey,
    rstd: TensorKey | None,
    weight: TensorKey | None,
    layout: NormLayout,
    wanted: tuple[Parameter | None, Parameter | None],
) -> NormGradLaunch:
    from lightning_actprune.kernels.norm import NormGradLaunch

    setting, shape, rows, of_x, parameters = layout
    flags = parameters[0] is not None, setting.centred, setting.normed
    stride = _row_stride(shape, rows, grad_output[1])
    return NormGradLaunch(shape, rows[1], stride, flags, setting.block_size, setting.bits, of_x, wanted, device)


_launches = LaunchCache(_norm_launch)
_grad_launches = LaunchCache(_norm_grad_launch)


def _row_stride(shape: tuple[int, ...], rows: tuple[int, int], strides: tuple[int, ...]) -> int | None:
    """Return the stride of the rows of a tensor, ``None`` if it has to be copied."""
    x = torch.empty_strided(shape, strides, device="meta")
    flat = x.reshape(rows)
    shares = flat.untyped_storage()._cdata == x.untyped_storage()._cdata
    return flat.stride(0) if shares and flat.stride(1) == 1 else None


# === Functional form ==================================================================================================


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``x`` normalised over its last dimensions, of ``shape``, in ``dtype``."""
    y: Tensor = _norm(x, weight, bias, None, shape, setting, dtype)
    return y


def scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, block_size: int, bits: int
) -> Tensor:
    """Return ``x * weight + bias + residual`` in the common type of all.

    Args:
        x: ``[..., L]``.
        weight: One value per feature, in any shape.
        bias: In the shape of ``weight``, or ``None``.
        residual: In the shape of ``x``, or ``None``.
        block_size: Values per block.
        bits: Bits of a stored value.
    """
    dtype = x.dtype
    for other in (weight, bias, residual):
        if other is not None:
            dtype = torch.promote_types(dtype, other.dtype)
    setting = NormSetting(False, False, 0.0, block_size, bits, normed=False, keeps_layout=True)
    y: Tensor = _norm(x, weight, bias, residual, (weight.numel(),), setting, dtype)
    return y


def output_dtype(x: Tensor, operator: str) -> torch.dtype:
    """Return the type in which torch's ``operator`` computes and returns the normalised ``x``.

    A kernel reads ``x`` in its own type, and writes fp32 where autocast asks for it: no copy is made.
    """
    dtype = x.dtype
    if dtype in (torch.float32, torch.float64) or autocast_dtype(x) is None:
        return dtype
    device = x.device.type if simulated_gpu() is None else "cuda"
    return torch.float32 if autocast_computes_in_fp32(operator, device) else dtype


# === Module classes ===================================================================================================


class CompressedNorm(CompressedLayer):
    """Mixin of normalisation layers that save their normalised input quantized.

    Parameters, ``state_dict`` and output (to rounding) are those of the dense layers, and so are the types under
    autocast. If neither input nor weight needs a gradient, they behave exactly as the dense layers.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[Operator] = "norm"

    def keeps(self, x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
        """Return True if anything is saved of ``x``."""
        if not (x.requires_grad or (weight is not None and weight.requires_grad)) or not may_compress(x):
            return False
        plain = type(x) is Tensor and (weight is None or (type(weight) is nn.Parameter and weight.device == x.device))
        if plain and x.is_floating_point() and x.shape[-len(shape) :] == shape:
            return True  # the usual case, in which ``takes`` returns True
        return self.takes(x, weight, shape)

    def setting(self, centred: bool, eps: float | None) -> NormSetting:
        """Return the settings; if ``eps`` is ``None``, torch takes the machine epsilon of fp32."""
        least = torch.finfo(torch.float32).eps if eps is None else eps
        blocks = self._state.blocks
        return NormSetting(centred, False, least, blocks.block_size, blocks.bits)


class CompressedLayerNorm(CompressedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that keeps its normalised input quantized; see ``CompressedNorm``."""

    dense_class = nn.LayerNorm
    takes_shards = True

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        shape, weight = self.normalized_shape, self.weight  # read once: looking up a module's parameter takes time
        if (weight is not None and weight.shape != shape) or not self.keeps(input, weight, shape):
            return super().forward(input)
        return norm(input, weight, self.bias, shape, self.setting(True, self.eps), output_dtype(input, "layer_norm"))


class CompressedRMSNorm(CompressedNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that keeps its normalised input quantized; see ``CompressedNorm``."""

    dense_class = nn.RMSNorm
    takes_shards = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        shape, weight = self.normalized_shape, self.weight
        if (weight is not None and weight.shape != shape) or not self.keeps(x, weight, shape):
            return super().forward(x)
        return norm(x, weight, None, shape, self.setting(False, self.eps), output_dtype(x, "rms_norm"))


class CompressedTimmLayerNorm(CompressedLayerNorm):
    """Mixin of timm's ``LayerNorm``, which is torch's unless timm's "fast norm" is switched on."""

    _fast_norm: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[..., *normalized_shape]``."""
        return self.dense_class.forward(self, x) if self._fast_norm else super().forward(x)


class CompressedTimmLayerNorm2d(CompressedTimmLayerNorm):
    """Mixin of timm's ``LayerNorm2d``, which normalises over the channels of images."""

    takes_shards = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input: ``[N, C, H, W]``."""
        channels_last = x.permute(0, 2, 3, 1)
        if self._fast_norm or not self.keeps(channels_last, self.weight, self.normalized_shape):
            return self.dense_class.forward(self, x)
        return super().forward(channels_last).permute(0, 3, 1, 2)


class CompressedLlamaRMSNorm(CompressedNorm):
    """Mixin of transformers' ``LlamaRMSNorm`` and its many copies.

    They normalise in fp32, round to the type of the input, and multiply by the weight in the common type of both,
    under autocast too.
    """

    takes_shards = True
    reads = "weight", "variance_epsilon"
    weight: nn.Parameter
    variance_epsilon: float

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress ``layer``, or ``None``: copies of the class may have other attributes."""
        weight, eps = (getattr(layer, name, None) for name in cls.reads)
        if not isinstance(weight, Tensor) or weight.dim() != 1:
            return "its `weight` is no vector, so it is not known to normalise what the weight is for"
        return None if isinstance(eps, float) else f"its `variance_epsilon` is a {type(eps).__name__} and no float"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised input: ``[..., hidden_size]``."""
        x, weight = hidden_states, self.weight
        if not self.keeps(x, weight, weight.shape):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        rounded, blocks = x.dtype != torch.float32, self._state.blocks
        stored = blocks.block_size, blocks.bits
        setting = NormSetting(False, rounded, self.variance_epsilon, *stored, keeps_layout=True)
        return norm(x, weight, None, weight.shape, setting, torch.promote_types(weight.dtype, x.dtype))


class Affine(nn.Module):
    """Scale each feature by a learned factor and add a learned number: the "affine" layer of ResMLP, or a layer scale.

    Args:
        features: Size of each input row.
        bias: Whether to add a learned number.
        scale: Initial value of all factors.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Example:
        >>> Affine(4, bias=False, scale=0.5)(torch.ones(2, 4)).sum().item()
        4.0
    """

    def __init__(
        self, features: int, bias: bool = True, *, scale: float = 1.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.full((features,), scale, **factory))
        self.bias = nn.Parameter(torch.zeros(features, **factory)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        if self.bias is None:
            return input * self.weight
        return torch.addcmul(self.bias, self.weight, input)

    def extra_repr(self) -> str:
        """Show the sizes in the printed module."""
        return f"{self.weight.shape[0]}, bias={self.bias is not None}"


class CompressedScale(CompressedLayer):
    """Mixin of layers that scale each feature and save their input quantized.

    In no-grad mode, with frozen factors, or if the input is no floating-point tensor with as many features, they behave
    exactly as the dense layers.

    Raises:
        TypeError: If the input is a DTensor, or in fp64.
        ValueError: If the input has more than 2^31 - 1 blocks.
    """

    operator: ClassVar[Operator] = "scale"

    def keeps(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if ``x`` is saved for the gradient of ``weight``."""
        return weight.requires_grad and may_compress(x) and self.takes(x, weight, (weight.numel(),))

    def scaled(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return ``x * weight + bias + residual``, where parameters have one value per feature."""
        return scaled(x, weight, bias, residual, self.block_size, self.bits)


class CompressedAffine(CompressedScale, Affine):
    """``Affine`` that keeps its input quantized; see ``CompressedScale``."""

    dense_class = Affine

    @classmethod
    def operator_of(cls, layer: Any) -> Operator:
        """Return the operator of ``layer``, dense or compressed: without a bias it only scales."""
        return "scale" if layer.bias is None else "affine"

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input * weight + bias``: ``[..., features]``."""
        weight = self.weight
        return self.scaled(input, weight, self.bias) if self.keeps(input, weight) else super().forward(input)


class CompressedTimmAffine(CompressedScale):
    """Mixin of timm's ``Affine``, whose parameters are ``[1, 1, features]``."""

    operator: ClassVar[Operator] = "affine"
    alpha: nn.Parameter
    beta: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * alpha + beta``: ``[B, T, features]``."""
        if x.dim() < 3 or not self.keeps(x, self.alpha):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.alpha, self.beta)


class CompressedTimmLayerScale(CompressedScale):
    """Mixin of timm's ``LayerScale``."""

    gamma: nn.Parameter
    inplace: bool

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress ``layer``, or ``None``."""
        return "scales in place, of which torch keeps a copy" if layer.inplace else None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x * gamma``: ``[..., features]``."""
        if self.inplace or not self.keeps(x, self.gamma):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.scaled(x, self.gamma, None)


class CompressedTimmResBlock(CompressedScale):
    """Mixin of timm's ``ResBlock``."""

    norm1: nn.Module
    norm2: nn.Module
    linear_tokens: nn.Module
    mlp_channels: nn.Module
    drop_path: nn.Module
    ls1: nn.Parameter
    ls2: nn.Parameter

    @property
    def traced(self) -> Traced:
        """The dense layer: the layers in its branches mark their own inputs."""
        return "dense"

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` and its scaled branches: ``[B, T, features]``."""
        x = self._sum(x, self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2), self.ls1)
        return self._sum(x, self.mlp_channels(self.norm2(x)), self.ls2)

    def _sum(self, x: Tensor, branch: Tensor, factors: Tensor) -> Tensor:
        """Return ``x + drop_path(factors * branch)``, in one pass if no path is dropped."""
        if not self.keeps(branch, factors):
            return cast(Tensor, x + self.drop_path(factors * branch))
        wide = x.dtype == torch.float64 or not x.is_floating_point()
        drops_nothing = type(self.drop_path) is nn.Identity and not has_hooks(self.drop_path)
        if wide or x.shape != branch.shape or x.device != branch.device or not drops_nothing:
            return cast(Tensor, x + self.drop_path(self.scaled(branch, factors, None)))
        return self.scaled(branch, factors, None, x)


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.LayerNorm: CompressedLayerNorm,
    nn.RMSNorm: CompressedRMSNorm,
    Affine: CompressedAffine,
}
"""The compressed class of each class of torch and of this package."""
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {
    ("timm.layers.norm", "LayerNorm"): CompressedTimmLayerNorm,
    ("timm.layers.norm", "LayerNorm2d"): CompressedTimmLayerNorm2d,
    ("transformers.models.llama.modeling_llama", "LlamaRMSNorm"): CompressedLlamaRMSNorm,
    ("timm.models.mlp_mixer", "Affine"): CompressedTimmAffine,
    ("timm.layers.layer_scale", "LayerScale"): CompressedTimmLayerScale,
    ("timm.models.mlp_mixer", "ResBlock"): CompressedTimmResBlock,
}
"""The mixin that replaces the forward of each class of another package; it comes first among the bases."""
