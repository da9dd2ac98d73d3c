"""How the kernels normalise, or scale, the rows of one layer: worked out once per layout and setting.

The step of a small model waits for Python. What follows from shapes, strides, types and settings alone is therefore one
look-up in plain eager mode, whose result forward hands to backward (compare ``ops.plan``). Where tensors begin decides
which compiled kernels take them; that is asked last, of tensors that kernels take: not every device has addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.ops.dispatch import Backend, forced_backend, on_device_of
from lightning_actprune.ops.geometry import ceil_div
from lightning_actprune.ops.library import in_plain_eager_mode
from lightning_actprune.ops.normalize import takes
from lightning_actprune.ops.pack import MAX_KEPT_BLOCKS

if TYPE_CHECKING:
    from lightning_actprune.kernels.norm_launch import NormGradLaunch
    from lightning_actprune.ops.norm import NormSetting


class NormLayout(NamedTuple):
    """What backward has to know of forward, besides tensors.

    Args:
        setting: With blocks cut to a row.
        shape: Of input and output.
        rows: ``(R, L)``.
        dtype: Of the input.
        parameters: Shape and type of weight and bias, ``None`` without one.
    """

    setting: NormSetting
    shape: tuple[int, ...]
    rows: tuple[int, int]
    dtype: torch.dtype
    parameters: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


class NormPlan:
    """What forward and backward do with inputs of one layout.

    Args:
        layout: What backward has to know.
        strides: Of the input.
        device: Where it is.
        residual: Type of what is added to the output, ``None`` if nothing is.
        dtype: Type of the output.
    """

    def __init__(
        self,
        layout: NormLayout,
        strides: tuple[int, ...],
        device: torch.device,
        residual: torch.dtype | None,
        dtype: torch.dtype,
    ) -> None:
        from lightning_actprune.kernels import norm_launch as kernels

        self._kernels, self.layout, self.forced, self._dtype = kernels, layout, forced_backend(), dtype
        setting, stride = layout.setting, _row_stride(layout, strides)
        self._copied, self._length = stride is None, layout.rows[1]
        present = *[given is not None for given in layout.parameters], residual is not None
        flags = *present, setting.centred, setting.rounded, setting.normed
        stored = setting.block_size, setting.value_format
        self._forward = layout.rows, self._length if stride is None else stride, flags, setting.eps, *stored
        parameters = [layout.dtype if given is None else given[1] for given in layout.parameters]
        key = device, dtype, layout.dtype, *parameters, residual or layout.dtype, *[True] * 4
        self._launch = kernels.forward_launch(key, *self._forward)
        self._new_y, self._new_x = (maker(layout.shape, kind, device) for kind in (dtype, layout.dtype))
        self._new_values = maker(self._launch.values, torch.uint8, device)
        self._new_rstd = maker(layout.rows[:1], torch.float32, device) if setting.normed else None
        self._new_weight, self._new_bias = (given and maker(*given, device) for given in layout.parameters)
        self._backward = (present[0], setting.centred, setting.normed), stored, device
        self._grad_launches: dict[tuple[bool, ...], NormGradLaunch] = {}

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``y``, which has the shape of ``x``, what is stored of ``x``, and ``rstd`` if rows are normalised."""
        if self._copied:
            x = x.contiguous()
        w, b, r = x if weight is None else weight, x if bias is None else bias, x
        if residual is not None:
            r = residual.contiguous()
        launch = self._launch
        if (x.data_ptr() | w.data_ptr() | b.data_ptr() | r.data_ptr()) & 15:
            key = self._kernels.forward_key((x, w, b, r), self._dtype)
            launch = self._kernels.forward_launch(key, *self._forward)
        y, values = self._new_y(), self._new_values()
        rstd = None if self._new_rstd is None else self._new_rstd()
        with on_device_of(x):
            launch.run(x, w, b, r, y, values, values if rstd is None else rstd)
        return y, values, rstd

    def takes(self, grad_y: Tensor) -> bool:
        """Return whether this is how to go back from ``grad_y``, too."""
        return self.forced == forced_backend() and in_plain_eager_mode(grad_y)

    def backward(
        self, grad_y: Tensor, kept: Sequence[Tensor | None], needs_weight: bool, needs_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of the input and, as far as they are needed, of weight and bias.

        ``kept``: values, ``rstd`` and weight.
        """
        values, rstd, weight = kept
        stride, needed = self._length, (needs_weight, needs_bias)
        if not grad_y.is_contiguous():
            grad_y, stride = _rows(grad_y, self.layout.rows)
        assert values is not None
        r, w = values if rstd is None else rstd, grad_y if weight is None else weight
        addresses = grad_y.data_ptr() | values.data_ptr() | r.data_ptr() | w.data_ptr()
        usual = not addresses & 15 and stride == self._length and grad_y.dtype == self._dtype
        launch = self._grad_launches.get(needed) if usual else None
        if launch is None:
            launch = self._grad_launch((grad_y, values, r, w), stride, needed)
            if usual:
                self._grad_launches[needed] = launch
        grad_x = self._new_x()
        of_weight = self._new_weight() if needs_weight and self._new_weight else None
        of_bias = self._new_bias() if needs_bias and self._new_bias else None
        with on_device_of(grad_y):
            launch((grad_y, values, r, w), grad_x, of_weight, of_bias)
        return grad_x, of_weight, of_bias

    def _grad_launch(self, given: tuple[Tensor, ...], stride: int, needed: tuple[bool, ...]) -> NormGradLaunch:
        flags, stored, device = self._backward
        wanted = [given[1] for given, wanted in zip(self.layout.parameters, needed, strict=True) if given and wanted]
        key = self._kernels.grad_key(given, (self.layout.dtype, *wanted))
        return self._kernels.grad_launch(key, self.layout.rows, stride, (*flags, *needed), *stored, device)


def norm_plan(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
) -> NormPlan | None:
    """Return how the kernels take ``given``, or ``None`` if that is not for them, or not for a plan, to do.

    Args:
        given: ``x``, weight, bias, and a residual of the shape of ``x``.
        shape: Of the last dimensions, over which rows run.
        setting: What is computed, and how it is stored.
        dtype: Type of the output.
    """
    x, weight, bias, residual = given
    return _plan(
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        None if weight is None else (weight.shape, weight.stride(), weight.dtype),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        None if residual is None else residual.dtype,
        shape,
        setting,
        dtype,
        forced_backend(),
    )


_Given = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""


@functools.lru_cache(maxsize=1024)
def _plan(
    x_shape: tuple[int, ...],
    strides: tuple[int, ...],
    x_dtype: torch.dtype,
    device: torch.device,
    weight: _Given | None,
    bias: _Given | None,
    residual: torch.dtype | None,
    shape: tuple[int, ...],
    setting: NormSetting,
    dtype: torch.dtype,
    forced: Backend | None,
) -> NormPlan | None:
    length = math.prod(shape)
    rows, setting = (math.prod(x_shape[: len(x_shape) - len(shape)]), length), setting.cut_to(length)
    if x_dtype == torch.float64 or ceil_div(rows[0] * length, setting.block_size) > MAX_KEPT_BLOCKS:
        return None
    parameters = weight, bias
    contiguous = [given is None or given[1] == _contiguous_strides(given[0]) for given in parameters]
    if not all(contiguous) or not takes(rows, x_dtype, device, setting.block_size):
        return None
    kept = tuple(None if given is None else (given[0], given[2]) for given in parameters)
    return NormPlan(NormLayout(setting, x_shape, rows, x_dtype, kept), strides, device, residual, dtype)


def _rows(grad_y: Tensor, rows: tuple[int, int]) -> tuple[Tensor, int]:
    """Return ``grad_y`` as rows whose values lie side by side, and their stride."""
    grad_y = grad_y.reshape(rows)
    grad_y = grad_y if grad_y.stride(1) == 1 else grad_y.contiguous()
    return grad_y, grad_y.stride(0)


def _row_stride(layout: NormLayout, strides: tuple[int, ...]) -> int | None:
    """Return the stride of the rows of an input, ``None`` if it has to be copied."""
    given = torch.empty_strided(layout.shape, strides, dtype=layout.dtype, device="meta")
    rows = given.reshape(layout.rows)
    shares = rows.untyped_storage()._cdata == given.untyped_storage()._cdata
    return rows.stride(0) if shares and rows.stride(1) == 1 else None


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates a contiguous tensor; asked for strides, torch takes half the time."""
    return functools.partial(torch.empty_strided, tuple(shape), _contiguous_strides(shape), dtype=dtype, device=device)
