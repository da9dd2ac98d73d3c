"""Launch a kernel whose arguments are fixed but for its tensors, without Triton's argument analysis.

``kernel[grid](...)`` binds, specialises and hashes its arguments in each call, which takes several times as long as the
launch itself, and a step of a small model launches hundreds of kernels. A ``Launch`` does it once, stores the compiled
kernel, and then passes addresses straight to its launcher. The device, the types and the 16-byte alignment of its
tensors never change, since they are part of its key in a ``codec.dispatch.LaunchCache``. A launch of a simulated GPU
does nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_actprune.codec.dispatch import compilation, simulated_gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in the interpreter. It is read when they are decorated, so it cannot change later."""


class Launch:
    """One kernel with its grid, scalars and compile-time constants.

    Args:
        kernel: A jitted function whose parameters are its tensors first, then ``scalars`` in order.
        grid: Programs along each axis.
        scalars: All other arguments, compile-time constants included.
        options: Launch options, such as ``num_warps``.

    Attributes:
        by_address: Launches the compiled kernel, given the addresses of its tensors; ``None`` before the first launch,
            and where Triton launches always.
    """

    __slots__ = ("_grid", "_kernel", "_options", "_run", "_scalars", "by_address")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *scalars: Any, **options: int) -> None:
        self._kernel, self._scalars, self._options = kernel, scalars, options
        self._grid = (*grid, 1, 1)[:3]
        self._run: Callable[[tuple[Tensor, ...]], None] | None = None if simulated_gpu() is None else _run_nothing
        self.by_address: Callable[[Sequence[int]], None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream of the current device."""
        if self.by_address is not None:
            self.by_address([tensor.data_ptr() for tensor in tensors])
            return
        if self._run is not None:
            self._run(tensors)
            return
        start = time.perf_counter()
        compiled = self._by_triton(tensors)
        compilation.add(time.perf_counter() - start)
        if not INTERPRETED:  # comes last, since another thread may wait for it
            self.by_address = runner(compiled, tensors[0].device.index, self._grid, self._scalars)
            self._run = self._by_triton

    def _by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        return self._kernel[self._grid](*tensors, *self._scalars, **self._options)


def _run_nothing(tensors: tuple[Tensor, ...]) -> None:
    """Do nothing: a simulated GPU computes no values."""


def runner(
    compiled: Any, device: int, grid: tuple[int, ...], scalars: tuple[Any, ...]
) -> Callable[[Sequence[int]], None] | None:
    """Return ``run(addresses)``, which launches a compiled kernel with all other arguments filled in.

    Given a tensor, a launcher asks it for its address, and the driver whether that is on the GPU. In Triton 3.4 to 3.9
    a launcher is Python code that ends in one call of a native function, its ``launch``. That code is skipped: its call
    is recorded once, and the native function is called in the same way. A ResMLP-S12 step then kept a slow host busy
    for 25.5 ms instead of 30.6 (H200, commits 8294153 and 34ba7b9). ``None`` if the launcher is any other one, which
    Triton calls.
    """
    try:
        stream = functools.partial(triton.runtime.driver.active.get_current_stream, device)
        fixed = (compiled.function, compiled.packed_metadata, None, None, None)  # no profiling hooks
        native = _native_call(compiled.run, grid, fixed)
    except AttributeError:
        return None
    if native is None:
        return None
    launch, before, after, in_tuple = native

    def run_flat(addresses: Sequence[int]) -> None:
        launch(*before, stream(), *after, *addresses, *scalars)

    def run_tuple(addresses: Sequence[int]) -> None:
        launch(*before, stream(), *after, (*addresses, *scalars))

    return run_tuple if in_tuple else run_flat


_FIRST = "gridX", "gridY", "gridZ", "stream", "function"
_KNOWN = (
    (*_FIRST, "*args"),
    (*_FIRST, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "*args"),
)
"""Parameters of the launchers that can be skipped. ``args`` of the first one begins with what the second one names."""


def _native_call(
    launcher: Any, grid: tuple[int, ...], fixed: tuple[Any, ...]
) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], bool] | None:
    """Return a launcher's native function, its arguments before and after the stream, and whether it takes a tuple.

    The tuple, if it takes one, holds the kernel's arguments. ``None`` if the launcher does more than pass its arguments
    on (memory for the kernel, a sanitizer), has other parameters than ``_KNOWN``, or is no Python code.
    """
    scratch = [getattr(launcher, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    if not callable(getattr(launcher, "launch", None)) or any(scratch) or getattr(launcher, "gsan_enabled", False):
        return None
    if tuple(map(str, inspect.signature(launcher).parameters.values())) not in _KNOWN:
        return None
    recorder, calls = copy.copy(launcher), []
    recorder.launch = lambda *arguments: calls.append(arguments)
    stream, arguments = object(), (object(), object())
    recorder(*grid, stream, *fixed, *arguments)
    if len(calls) != 1 or stream not in calls[0]:
        return None
    place = calls[0].index(stream)
    before, after = calls[0][:place], calls[0][place + 1 :]
    if after[-2:] == arguments:
        return launcher.launch, before, after[:-2], False
    return (launcher.launch, before, after[:-1], True) if after[-1:] == (arguments,) else None


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors ``device`` has, each of which can run any program; 1 in the interpreter."""
    gpu = simulated_gpu()
    if gpu is not None:
        return gpu.machine.multiprocessors
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
