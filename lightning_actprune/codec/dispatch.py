"""Which version of an operation runs, how its kernels' launches are kept, and the frame of all autograd functions.

**Backends.** The Triton kernels take CUDA tensors of a supported dtype and block structure on compute capability 8.0 or
newer, in plain eager mode; everything else takes the plain-torch reference, which a compiler traces. Both use the same
storage, so forward and backward need not agree. ``force_backend`` overrides the choice, for tests and for comparing the
two.

**Launches.** The step of a small model waits for Python. What follows from shapes, strides and settings alone is
therefore worked out once and kept in a ``LaunchCache``: which kernels run, with what grid and constants. Only in plain
eager mode: a compiler's symbolic sizes cannot be hashed, and a size that served as a key would be fixed.

**A simulated GPU** is a backend, too: while a thread acts as one (``act_as``), kernels are chosen for tensors of the
CPU, and allocate what they return, but run nothing. Its launches belong to it, so no other thread meets them.

**Operators of the dispatcher** (``torch.ops.actprune.*``) may keep no memory: a compiler with CUDA graphs
(``mode="reduce-overhead"``) runs operators in memory that it takes back, and raises if somebody holds on to some. And
all results of an operator have to be new tensors. Kernels called directly do not heed that.

**Autocast** casts the arguments of torch's functions; a function of our own has to do it itself.

**Autograd functions.** A function of this package keeps less than it reads, so the same holds for all of them:

- **Where torch does it all** is asked first (``may_compress``): without gradients, where somebody else than autograd
  looks on, and of what is sparse or nested.
- **Plain eager mode or not** is asked once a pass, of the first argument, and handed to the function as its last one,
  ``eager``: there kernels may run and memory be shared by its address. Anywhere else (a compiler, a transform, a
  dispatch mode) the plain-torch form runs, which these see through.
- **Undefined gradients stay undefined.** An output on which nothing depends gets no gradient, and gives none.
- **No second derivatives.** Backward refuses to run where gradients are recorded (``create_graph=True``). An error in
  the derivative of what it returns would come too late: ``torch.autograd.grad(..., inputs)`` runs only nodes that lead
  to ``inputs``, and what would lead from such a gradient to the function's input was not kept. It would leave these
  terms out and say nothing.
- **What a function returns is no view to autograd** (``no_view``), which would let nobody write to it in place.
- **Saved-tensor hooks of this package need not see what is saved** here, since it is small already: they would cost the
  host time for each tensor, forward and backward. So those hooks are taken off the stack while the function is applied.
  Hooks that somebody else has opened, inside ours or around them, see everything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.cuda import is_current_stream_capturing

from lightning_actprune.codec.blocks import MAX_BLOCK_SIZE, along_tokens
from lightning_actprune.codec.private import (
    are_functorch_transforms_active,
    is_exporting,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    is_tracing,
    len_torch_dispatch_stack,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    unsafe_view,
)

Backend = Literal["triton", "reference"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
MAX_COLUMNS = 65535
"""CUDA's limit for the second axis of a grid, along which the kernels put the column blocks."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_forced: Backend | None = None


class Machine(NamedTuple):
    """Properties of a device that the grids of kernels depend on."""

    multiprocessors: int
    shared_memory: int
    major: int


@dataclass(eq=False)
class SimulatedGPU:
    """A GPU on which kernels allocate what they return, on the CPU, and do not run (``analysis.simulate_step``).

    Args:
        machine: Its properties.
        launches: Its launches, by the function that makes them.
        counters: What ``kernels.sums`` counts in, by device and stream.
    """

    machine: Machine
    launches: dict[Callable[..., Any], dict[Any, Any]] = field(default_factory=dict)
    counters: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)


class _Thread(threading.local):
    operators: int = 0
    gpu: SimulatedGPU | None = None


_thread = _Thread()


@contextlib.contextmanager
def act_as(gpu: SimulatedGPU) -> Iterator[None]:
    """Let this thread treat tensors of the CPU as those of ``gpu``; one dispatch mode, the simulator's, is open."""
    before, _thread.gpu = _thread.gpu, gpu
    try:
        yield
    finally:
        _thread.gpu = before
        gpu.launches.clear()  # whose keys name the GPU


def simulated_gpu() -> SimulatedGPU | None:
    """Return the GPU that this thread acts as."""
    return _thread.gpu


def in_plain_eager_mode(x: Tensor) -> bool:
    """Return whether nothing but our own kernels wants to see what is done to ``x``.

    That is no compiler, no meta tensor or one with a lazy negation, no tensor subclass, no transform such as ``vmap``
    (whose tensors look like plain ones, even after it is over) and no dispatch mode but that of a simulation.
    """
    if is_compiling() or type(x) is not Tensor or x.is_meta or x.is_neg():
        return False
    if are_functorch_transforms_active() or is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x):
        return False
    modes = len_torch_dispatch_stack()
    return modes == 0 or (modes == 1 and _thread.gpu is not None)


@functools.cache
def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def kernel_refusals(dtype: torch.dtype, device: torch.device, block_size: int, columns: int) -> list[str]:
    """Return the reasons why the Triton kernels cannot take a tensor; an empty list means that they can.

    Args:
        dtype: Type of the tensor to pack, or of the values packed from it.
        device: Where it is.
        block_size: Values per block.
        columns: Blocks per row.
    """
    reasons = []
    if not _triton_installed():
        reasons.append("triton is not installed")
    if dtype not in KERNEL_DTYPES:
        reasons.append(f"dtype {dtype} is not float32, bfloat16 or float16")
    if block_size > MAX_BLOCK_SIZE:
        reasons.append(f"block_size {block_size} is above {MAX_BLOCK_SIZE}")
    if columns > MAX_COLUMNS:
        reasons.append(f"{columns} blocks in a row are more than {MAX_COLUMNS}")
    if device.type != "cuda":
        if not _interpreting() and _thread.gpu is None:
            reasons.append(f"device {device.type} is not cuda (TRITON_INTERPRET=1 is not set either)")
    elif torch.version.cuda is None:
        reasons.append("the GPU is not an NVIDIA one")
    elif _capability(device.index or 0) < MIN_CAPABILITY:
        major, minor = _capability(device.index or 0)
        reasons.append(f"compute capability {major}.{minor} is below 8.0")
    return reasons


def forced_backend() -> Backend | SimulatedGPU | None:
    """Return what decides on the backend before a tensor does; part of the key wherever a choice is kept."""
    return _forced if _thread.gpu is None else _thread.gpu


def choose_backend(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, block_size: int, columns: int
) -> Backend:
    """Return the implementation for a tensor with rows of ``columns`` blocks of ``block_size`` values.

    Raises:
        RuntimeError: If the kernels are forced on a tensor they cannot take; the message lists the reasons.
    """
    forced = forced_backend()
    if forced == "reference" or (forced is None and device.type != "cuda"):
        return "reference"
    reasons = kernel_refusals(dtype, device, block_size, columns)
    if reasons and forced == "triton":
        raise RuntimeError(
            f"The Triton kernels were forced but cannot take a {tuple(shape)} tensor: {'; '.join(reasons)}. "
            'HINT: use force_backend("reference") or a supported tensor.'
        )
    return "reference" if reasons else "triton"


@functools.cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


_NOTHING = contextlib.nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the GPU of ``x`` is the current one: Triton launches on that, not on its arguments'."""
    if not x.is_cuda or not _several_gpus() or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def has_fp32_product(x: Tensor) -> bool:
    """Return whether torch multiplies 16-bit matrices like ``x`` to an fp32 result (``torch.mm(out_dtype=)``)."""
    if not x.is_cuda or torch.version.cuda is None:
        return _thread.gpu is not None and x.dtype in (torch.float16, torch.bfloat16)
    if x.dtype == torch.float16:
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return x.dtype == torch.bfloat16


@contextlib.contextmanager
def force_backend(backend: Backend | None) -> Iterator[None]:
    """Run every operation called inside on ``backend``; ``None`` restores the automatic choice."""
    global _forced
    if backend not in ("triton", "reference", None):
        raise ValueError(f'`backend` must be "triton", "reference" or None, got {backend!r}.')
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


TensorKey = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""Shape, strides and type of a tensor, and whether it starts at a multiple of 16 bytes."""


class LaunchCache(dict[tuple[Any, ...], _R | None], Generic[_R]):
    """The bound launches of one operation, each made once: by what ``find`` reads of tensors, and by settings.

    Args:
        make: Returns the launch for ``(device, *tensor_keys, *settings)``, or ``None``, which is stored too, if that is
            not for the kernels. Types and alignment matter to the compiled kernels that a launch keeps.
        limit: Most launches. A full cache is emptied: shapes that change all the time must not fill the memory.
    """

    def __init__(self, make: Callable[..., _R | None], limit: int = 1024) -> None:
        super().__init__()
        self._make, self._limit = make, limit

    def find(self, settings: tuple[Any, ...], x: Tensor, *others: Tensor | None) -> _R | None:
        """Return the launch for tensors on the device of ``x``, in plain eager mode, ``None`` without one.

        Where no kernel can run no address is read: not every device has addresses, and reading one ends a lazy copy.
        """
        gpu = _thread.gpu
        backend = _forced if gpu is None else gpu
        if not x.is_cuda if backend is None else backend == "reference":
            return None
        key: tuple[Any, ...] = backend, settings, x.device, (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)
        for t in others:
            key += (None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % 16 == 0),)
        return self[key]

    def __missing__(self, key: tuple[Any, ...]) -> _R | None:
        _, settings, *arguments = key
        launches = self if _thread.gpu is None else _thread.gpu.launches.setdefault(self._make, {})
        if key not in launches:
            launch = self._make(*arguments, *settings)
            if len(launches) >= self._limit:
                launches.clear()
            launches[key] = launch
        return launches[key]


LONG_COMPILATION = 2.0
"""Seconds of compiling kernels that are worth a word."""


class Compilation:
    """Knows how long kernels have been compiled, and says so once to whoever listens."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tell: Callable[[], None] | None = None

    def listen(self, tell: Callable[[], None] | None) -> None:
        """Call ``tell`` as soon as compiling has taken long from now on; ``None`` ends that."""
        self._seconds, self._tell = 0.0, tell

    def add(self, seconds: float) -> None:
        """Count the first launch of a kernel."""
        self._seconds += seconds
        if self._tell is not None and self._seconds > LONG_COMPILATION:
            tell, self._tell = self._tell, None
            tell()


compilation = Compilation()


def as_operator(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``implementation`` as the dispatcher is to call it."""

    @functools.wraps(implementation)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _thread.operators += 1
        try:
            return implementation(*args, **kwargs)
        finally:
            _thread.operators -= 1

    return called


def in_operator() -> bool:
    """Return whether an operator runs that the dispatcher has called."""
    return _thread.operators > 0


def may_keep_memory(x: Tensor) -> bool:
    """Return whether a buffer where ``x`` is may be kept for the next call on the same stream."""
    return not in_operator() and not (x.is_cuda and is_current_stream_capturing())


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the active autocast for the device of ``x``, ``None`` without one."""
    device = "cuda" if x.is_cuda else x.device.type  # whose text takes a while to make
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which ``F.linear`` would compute, and save, ``x``."""
    return (autocast_dtype(x) or x.dtype) if x.dtype != torch.float64 else x.dtype


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, which takes a microsecond or two to find out that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype=dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast to ``dtype`` does: not fp64."""
    return x if x.dtype == torch.float64 else as_dtype(x, dtype)


def cast_input(x: Tensor, dtype: torch.dtype | None, block_size: int) -> Tensor:
    """Cast as autocast does, if there is one; what has to be copied along its features anyway lies so at once."""
    if dtype is None:
        return x
    turns = x.dim() == 3 and x.stride(-1) != 1 and not along_tokens(x, block_size)
    if turns and x.dtype not in (dtype, torch.float64):
        return x.to(dtype=dtype, memory_format=torch.contiguous_format)
    return cast(x, dtype)


# === The frame of autograd functions ==================================================================================


def may_compress(x: Tensor) -> bool:
    """Return whether what backward needs of ``x`` may be kept in another form than by torch; if not, torch does it all.

    That is where autograd records gradients, and nobody else does. Nor are there blocks in what is sparse or nested.
    """
    return torch.is_grad_enabled() and x.layout == torch.strided and not x.is_nested and not is_watched()


def is_watched() -> bool:
    """Return whether somebody else than autograd asks what operators do.

    A ``torch.func`` transform asks an operator for more than its backward, and what is traced or exported is to know
    nothing of this package.
    """
    if is_compiling():
        return is_exporting()
    return are_functorch_transforms_active() or is_tracing()


class SavedTensorHooks(Protocol):
    """A pair of saved-tensor hooks that leaves alone what this package's operators keep."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    alone: bool
    """Whether there are no hooks around these, which have to see everything."""


class _Open(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []


_open = _Open()


def open_hooks(hooks: SavedTensorHooks) -> None:
    """Let functions of this thread not be seen by ``hooks``, which are on the stack now."""
    _open.hooks.append(hooks)


def close_hooks(hooks: SavedTensorHooks) -> None:
    """Undo ``open_hooks``, in whatever order: hooks of one module are called in the order in which they were added."""
    _open.hooks.remove(hooks)


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of ``backward(ctx, eager, *grads)``, which returns the first of the gradients of the inputs.

    The frame adds ``None`` for all other inputs.

    Args:
        what: What has no second derivatives, for the error.
    """
    message = (
        f"Second derivatives through {what} are not defined: what they need is not kept. HINT: keep the layer dense "
        "with a rule (`rules={name: None}`) where you need create_graph=True."
    )

    def decorated(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            count, grad = len(ctx.needs_input_grad), grads[0]
            if grad is None:  # of an output on which nothing depends
                return (None,) * count
            if is_compiling():  # which refuses second derivatives by itself
                with torch.no_grad():
                    found = compute(ctx, False, *grads)
            elif torch.is_grad_enabled():
                raise RuntimeError(message)
            else:
                found = compute(ctx, in_plain_eager_mode(grad), *grads)
            return (*found, *[None] * (count - len(found)))

        return backward

    return decorated


def no_view(y: Tensor) -> Tensor:
    """Return ``y``, which its function alone holds, as a tensor of the same memory that is no view to autograd.

    Of a view that a function returns, autograd lets nobody write to it or to a part of it (``y += x``, an in-place
    ReLU), and many of torch's own functions return one: ``F.linear`` of three dimensions that are contiguous.
    """
    if is_compiling():
        return unsafe_view(y, y.shape)
    return y.data if y._is_view() else y  # a tenth of the time that the operator takes


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies ``function`` to its arguments, to which ``eager`` is added."""
    compute = function.forward

    @functools.wraps(compute)
    def forward(ctx: Any, *arguments: Any) -> Any:
        if arguments[-1]:
            ctx.set_materialize_grads(False)
        return compute(ctx, *arguments)

    function.forward = staticmethod(forward)  # type: ignore[method-assign]
    # Without the care for function transforms too, half of its time before torch 2.15, where it has none.
    eager_apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    traced_apply: Callable[..., Any] = function.apply

    def apply(x: Tensor, *arguments: Any) -> Any:
        if not in_plain_eager_mode(x):
            return traced_apply(x, *arguments, False)
        if not _open.hooks:
            return eager_apply(x, *arguments, True)
        hooks = _open.hooks[-1]
        top = top_saved_tensors_hooks(False)
        if not hooks.alone or top is None or top[0] is not hooks.pair[0]:
            return eager_apply(x, *arguments, True)
        pop_saved_tensors_hooks()
        try:
            return eager_apply(x, *arguments, True)
        finally:
            push_saved_tensors_hooks(*hooks.pair)

    return apply
