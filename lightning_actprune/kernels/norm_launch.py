"""Launches of the kernels of ``norm``: one forward, and two backward, of which one adds the parameters' gradients."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lightning_actprune.kernels.column_sums import AddSetsPlan
from lightning_actprune.kernels.formats import encode_format, values_layout
from lightning_actprune.kernels.keys import stride_unit
from lightning_actprune.kernels.launch import Launch, aligned, multiprocessors
from lightning_actprune.kernels.norm import normalize_grad_kernel, normalize_kernel, tile_of
from lightning_actprune.ops.geometry import ceil_div

WARPS, REGISTERS = 16, 128
"""Of backward, whose programs stay until all rows are done: warps per multiprocessor, and registers of a thread. So all
of these run at once; left to itself the compiler takes up to 164, and with 128 it spills nothing (sm_90)."""


class NormLaunch:
    """The forward launch for one kind of input.

    Args:
        shape: ``(R, L)``.
        stride: Of rows; values of a row lie side by side.
        flags: ``WEIGHTED``, ``BIASED``, ``ADDED``, ``CENTRED``, ``ROUNDED`` and ``NORMED`` of the kernel.
        eps: Added to the variance.
        block_size: Values per block.
        value_format: How values are stored.
    """

    def __init__(
        self, shape: tuple[int, int], stride: int, flags: tuple[bool, ...], eps: float, block_size: int,
        value_format: str,
    ) -> None:  # fmt: skip
        (rows, length), stored = shape, encode_format(value_format, block_size)
        columns, unit = ceil_div(length, block_size), stride_unit(stride)
        self.values, _ = values_layout(rows * columns, block_size, stored)
        sizes, warps = tile_of(length, block_size)
        constants = length, columns, unit, *flags, *sizes.values(), stored
        grid = (ceil_div(rows, sizes["ROWS"]),)
        self.run = Launch(normalize_kernel, grid, stride // unit, rows, eps, *constants, num_warps=warps)
        """Takes ``x``, weight, bias and residual, those that are absent ``x`` again, ``y``, values and ``rstd``."""


class NormGradLaunch:
    """The backward launches for one kind of gradient.

    Args:
        shape: ``(R, L)``.
        stride: Of the gradient's rows; values of a row lie side by side.
        flags: ``WEIGHTED``, ``CENTRED``, ``NORMED``, ``OF_WEIGHT`` and ``OF_BIAS`` of the kernel.
        block_size: Values per block.
        value_format: How values are stored.
        device: Where the kernels run.
    """

    def __init__(
        self, shape: tuple[int, int], stride: int, flags: tuple[bool, ...], block_size: int, value_format: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        (rows, length), sets = shape, sum(flags[-2:])
        columns, unit = ceil_div(length, block_size), stride_unit(stride)
        sizes, warps = tile_of(length, block_size)
        programs = min(ceil_div(rows, sizes["ROWS"]), multiprocessors(device) * max(1, WARPS // warps))
        self._add = AddSetsPlan(programs, sets, length, device) if sets else None
        constants = length, columns, unit, *flags, *sizes.values(), encode_format(value_format, block_size)
        options = {"num_warps": warps, "maxnreg": REGISTERS}
        self._run = Launch(normalize_grad_kernel, (programs,), stride // unit, rows, *constants, **options)

    def __call__(
        self, given: tuple[Tensor, ...], grad_x: Tensor, of_weight: Tensor | None, of_bias: Tensor | None
    ) -> None:
        """Write the gradients of the input and of those parameters that are to get one.

        ``given``: ``grad_y``, values, ``rstd`` and weight, of which the last two may be any tensors if there are none.
        """
        add = self._add
        if add is None:
            self._run(*given, grad_x, grad_x)
            return
        scratch = grad_x.new_empty(add.scratch, dtype=torch.float32)
        self._run(*given, grad_x, scratch)
        first = of_bias if of_weight is None else of_weight
        assert first is not None
        add(scratch, first, first if of_bias is None else of_bias)


@functools.lru_cache(maxsize=1024)
def forward_launch(key: object, *arguments: object) -> NormLaunch:
    """Return the launch; ``key``: dtypes, device and alignment, which matter to the compiled kernel that it keeps."""
    return NormLaunch(*arguments)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def grad_launch(key: object, *arguments: object) -> NormGradLaunch:
    """Return the launches of backward; ``key`` as above."""
    return NormGradLaunch(*arguments)  # type: ignore[arg-type]


def forward_key(given: tuple[Tensor, ...], dtype: torch.dtype) -> object:
    """Return the key of ``forward_launch``; ``dtype``: of the output."""
    return given[0].device, dtype, *[tensor.dtype for tensor in given], *aligned(*given)


def grad_key(given: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> object:
    """Return the key of ``grad_launch``, of what its kernels read and the types of what they write."""
    return *dtypes, *[tensor.dtype for tensor in given], *aligned(*given)


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    rounded: bool,
    eps: float,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(y, values, rstd)`` of ``x [R, L]``, not empty; see ``ops.normalize``."""
    optional = weight, bias, residual
    given = x, *[x if tensor is None else tensor for tensor in optional]
    flags = *[tensor is not None for tensor in optional], centred, rounded, normed
    layout = x.shape, x.stride(0), flags, eps, block_size, value_format
    launch = forward_launch(forward_key(given, dtype), *layout)
    y, values = x.new_empty(x.shape, dtype=dtype), x.new_empty(launch.values, dtype=torch.uint8)
    rstd = x.new_empty(x.shape[0] if normed else 0, dtype=torch.float32)
    launch.run(*given, y, values, rstd)
    return y, values, rstd


def normalize_grad(
    grad_y: Tensor,
    values: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    centred: bool,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return ``(grad_x, sums)`` of ``grad_y [R, L]``, not empty; see ``ops.normalize``."""
    flags = weight is not None, centred, normed, sums, sums
    grad_x = grad_y.new_empty(grad_y.shape, dtype=dtype)
    totals = grad_y.new_empty(2 if sums else 0, grad_y.shape[1], dtype=torch.float32)
    given = grad_y, values, rstd, grad_y if weight is None else weight
    key = grad_key((*given, *totals), (dtype,))
    layout = grad_y.shape, grad_y.stride(0), flags, block_size, value_format, grad_y.device
    of_weight, of_bias = totals if sums else (None, None)
    grad_launch(key, *layout)(given, grad_x, of_weight, of_bias)
    return grad_x, totals
