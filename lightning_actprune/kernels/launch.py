"""Launch a kernel whose every argument but the tensors is fixed, without paying for Triton's argument analysis.

``kernel[grid](...)`` binds, specialises and hashes its arguments on each call, which costs several times the launch
itself; a step of a small model launches hundreds of kernels and waits for exactly that. A ``Launch`` does it once,
keeps the compiled kernel, and then passes addresses straight to its launcher. Whoever makes one guarantees that the
device, the dtypes and the 16-byte alignment of its tensors never change (all are part of the plans' keys).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
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

    __slots__ = ("_grid", "_kernel", "_options", "_run", "_scalars", "_stream")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *scalars: Any, **options: int) -> None:
        self._kernel, self._scalars, self._options = kernel, scalars, options
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[..., None] | None = None
        self._stream: Callable[[], int]

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the current device."""
        if self._run is not None:
            # Addresses, since the launcher would ask each tensor for its own and the driver whether it is one.
            self._run(self._stream(), *[tensor.data_ptr() for tensor in tensors], *self._scalars)
            return
        compiled = self._kernel[self._grid](*tensors, *self._scalars, **self._options)
        if not INTERPRETED:
            self._stream = functools.partial(triton.runtime.driver.active.get_current_stream, tensors[0].device.index)
            self._run = _runner(compiled, self._grid)  # last: another thread may be waiting to see it


def _runner(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return ``run(stream, *arguments)``: Triton's own launcher without its profiling hooks (Triton 3.4 to 3.9)."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def launch(stream: int, *arguments: Any) -> None:
        run(*grid, stream, function, packed, None, None, None, *arguments)

    return launch


def aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Return which tensors start at a multiple of 16 bytes: compiled code relies on it for each of its own."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs of any size run on ``device`` at once; one in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
