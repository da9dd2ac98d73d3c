"""Launch a kernel whose every argument but the tensors is fixed, without paying for Triton's argument analysis.

``kernel[grid](...)`` binds, specialises and hashes its arguments on each call, which costs several times the launch
itself; a step of a small model launches hundreds of kernels and waits for exactly that. A ``Launch`` does it once,
keeps the compiled kernel, and then passes its arguments straight through. Whoever makes one guarantees that the dtypes
and the 16-byte alignment of its tensors never change (both are part of the plans' keys).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in the interpreter; read when they are decorated, so it cannot change afterwards."""


class Launch:
    """One kernel with its grid, scalars and compile-time constants.

    Args:
        kernel: A jitted function whose parameters are its tensors first, then ``scalars`` in order.
        grid: Programs along each axis.
        scalars: All other arguments, compile-time constants included.
        options: Launch options, such as ``num_warps``.
    """

    __slots__ = ("_grid", "_kernel", "_options", "_run", "_scalars")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *scalars: Any, **options: int) -> None:
        self._kernel, self._scalars, self._options = kernel, scalars, options
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the current device."""
        if self._run is not None:
            self._run(*tensors, *self._scalars)
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, **self._options)
        if not INTERPRETED:
            self._run = compiled[self._grid]


def aligned(*tensors: Tensor) -> bool:
    """Return whether every tensor starts at a multiple of 16 bytes, which compiled code may rely on."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
