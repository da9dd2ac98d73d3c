"""Choose between kernels and plain torch, store launches of kernels, and wrap all autograd functions.

**Backends.** The Triton kernels take CUDA tensors of a supported type and block structure on compute capability 8.0 or
newer, in plain eager mode. Everything else runs in plain torch, which a compiler traces. Both store the same bytes, so
forward and backward need not agree. ``force_backend`` overrides the choice, for tests and for comparing the two.

**Launches.** A step of a small model waits for Python. A ``LaunchCache`` therefore stores what follows from shapes,
strides and settings alone: which kernels run, with what grid and constants. It is for plain eager mode only: a
compiler's symbolic sizes cannot be hashed, and a size in a key would become a constant. Code that a compiler has
written fixes most of a key itself (``CompiledCall``).

**A simulated GPU** is a backend, too: while a thread acts as one (``act_as``), kernels are chosen for tensors of the
CPU, and allocate what they return, but run nothing. Its launches belong to it, so no other thread meets them.

**Operators of the dispatcher** (``torch.ops.actprune.*``) may keep no memory: a compiler with CUDA graphs
(``mode="reduce-overhead"``) takes the memory of operators back, and raises if anything still refers to it. All results
of an operator have to be new tensors. Kernels that are called directly have neither rule.

**Autocast** casts the arguments of torch's functions; a function of this package has to do it itself.

**Autograd functions.** A function of this package saves less than it reads, so the same rules hold for all of them:

- **torch computes the layer** without gradients, where anything but autograd looks on, and for sparse or nested
  tensors (``may_compress``).
- **``eager``**, the last argument, says whether a pass runs in plain eager mode, by its first argument. There kernels
  may run, and memory may be shared by its address. Elsewhere (a compiler, a transform, a dispatch mode) the plain-torch
  form runs, which these see through.
- **Undefined gradients stay undefined.** An output on which nothing depends gets no gradient, and passes none on.
- **There are no second derivatives.** Backward raises where gradients are recorded (``create_graph=True``). An error in
  the derivative of its results would come too late: ``torch.autograd.grad(..., inputs)`` runs only nodes that lead to
  ``inputs``, and what would lead from such a gradient to the function's input was not saved. These terms would be
  missing without a word.
- **Results are no views to autograd** (``no_view``), since nobody may write to a view that a function returns.
- **Saved-tensor hooks of this package do not see what is saved here.** It is small already, and they would cost the
  host time for each tensor, forward and backward. So they are taken off the stack while the function is applied. Hooks
  that others have opened, inside ours or around them, see everything.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

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

if TYPE_CHECKING:
    from lightning_actprune.kernels.launch import Launch

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

    def __init__(self) -> None:
        self.hooks: list[SavedTensorHooks] = []


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
    """Return True if nothing but our own kernels has to see what is done to ``x``.

    That excludes compilers, meta tensors and those with a lazy negation, tensor subclasses, transforms such as ``vmap``
    (whose tensors look like plain ones, even after it is over) and dispatch modes but that of a simulation.
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
    """Return why the Triton kernels cannot take a tensor; an empty list if they can.

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
            reasons.append(f"device {device.type} is not cuda")
    elif torch.version.cuda is None:
        reasons.append("the GPU is not an NVIDIA one")
    elif _capability(device.index or 0) < MIN_CAPABILITY:
        major, minor = _capability(device.index or 0)
        reasons.append(f"compute capability {major}.{minor} is below 8.0")
    return reasons


def describe_reference(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a sentence on why no kernel runs on this device, ``None`` if they do."""
    reasons = kernel_refusals(dtype, device, MAX_BLOCK_SIZE, 1)
    if not reasons:
        return None
    return (
        f"The kernels of lightning_actprune do not run here ({'; '.join(reasons)}), so plain PyTorch saves as much "
        "memory, but a step may take several times as long. HINT: train on an NVIDIA GPU of compute capability 8.0 or "
        "newer, in float32, bfloat16 or float16."
    )


def forced_backend() -> Backend | SimulatedGPU | None:
    """Return the backend of this thread, ``None`` if tensors decide; part of the key wherever a choice is stored."""
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
    """Return a context in which the GPU of ``x`` is the current one, on which Triton launches."""
    if not x.is_cuda or not _several_gpus() or x.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.device)


def has_fp32_product(x: Tensor) -> bool:
    """Return True if torch multiplies 16-bit matrices like ``x`` to an fp32 result (``torch.mm(out_dtype=)``)."""
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


class CompiledCall(ABC):
    """A call in code that a compiler writes, with the launch that it used last.

    The code fixes all but some sizes: types, strides in terms of sizes, and the device, which must be the current one.
    A launch therefore serves all calls with these sizes and with the same alignment.

    Attributes:
        reads: Number of parameters of the kernel before the result; all get the address of the tensor.
    """

    reads: int

    def __init__(self) -> None:
        self._launches: dict[tuple[int, ...], Callable[[Sequence[int]], None]] = {}

    def __call__(self, x: Tensor, *sizes: int, out: Tensor) -> None:
        """Write the result to ``out``, which is contiguous and starts at a multiple of 16 bytes.

        Args:
            x: The tensor.
            sizes: All sizes that the code does not fix.
            out: Memory for the result.
        """
        address = x.data_ptr()
        key = address % 16, *sizes
        by_address = self._launches.get(key)
        if by_address is not None and _forced != "reference":
            by_address([address] * self.reads + [out.data_ptr()])
            return
        launch = self._find(x, out)
        if launch is None:
            out.copy_(self._compute(x, out))
            return
        launch(*[x] * self.reads, out)
        if launch.by_address is not None:  # never that of a simulated GPU
            self._launches = {key: launch.by_address}  # one alone: sizes that always change must not fill the memory

    @abstractmethod
    def _find(self, x: Tensor, out: Tensor) -> Launch | None:
        """Return the launch, ``None`` without one."""

    @abstractmethod
    def _compute(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the result without a launch."""


LONG_COMPILATION = 2.0
"""Seconds of compiling kernels from which on users hear of it."""


class Compilation:
    """Counts the seconds of compiling kernels, and calls a listener once if they are many."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._listener: Callable[[], None] | None = None

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` as soon as compiling has taken long from now on; ``None`` ends that."""
        self._seconds, self._listener = 0.0, listener

    def add(self, seconds: float) -> None:
        """Count the first launch of a kernel."""
        self._seconds += seconds
        if self._listener is not None and self._seconds > LONG_COMPILATION:
            listener, self._listener = self._listener, None
            listener()


compilation = Compilation()


def as_operator(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return what the dispatcher calls in place of ``implementation``, so that this knows (``in_operator``)."""

    @functools.wraps(implementation)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _thread.operators += 1
        try:
            return implementation(*args, **kwargs)
        finally:
            _thread.operators -= 1

    return run


def in_operator() -> bool:
    """Return True while an operator runs that the dispatcher has called."""
    return _thread.operators > 0


def may_keep_memory(x: Tensor) -> bool:
    """Return True if a buffer on the device of ``x`` may be stored for the next call on the same stream."""
    return not in_operator() and not (x.is_cuda and is_current_stream_capturing())


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of the active autocast for the device of ``x``, ``None`` without one."""
    device = "cuda" if x.is_cuda else x.device.type  # whose text takes a while to make
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which ``F.linear`` would read and save ``x``."""
    return (autocast_dtype(x) or x.dtype) if x.dtype != torch.float64 else x.dtype


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x.to(dtype)``, which takes a microsecond or two even where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype=dtype)


def cast_as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as autocast to ``dtype`` does, which leaves fp64 alone."""
    return x if x.dtype == torch.float64 else as_dtype(x, dtype)


def cast_input(x: Tensor, dtype: torch.dtype | None, block_size: int) -> Tensor:
    """Cast as autocast does, if it is on; the copy is contiguous if blocks need one along the features anyway."""
    if dtype is None:
        return x
    turns = x.dim() == 3 and x.stride(-1) != 1 and not along_tokens(x, block_size)
    if turns and x.dtype not in (dtype, torch.float64):
        return x.to(dtype=dtype, memory_format=torch.contiguous_format)
    return cast_as_autocast(x, dtype)


# === The frame of autograd functions ==================================================================================


def may_compress(x: Tensor) -> bool:
    """Return True if what backward needs of ``x`` may be stored in another form than torch's.

    Autograd has to record gradients, and nothing else may look on. Sparse and nested tensors have no blocks.
    """
    return torch.is_grad_enabled() and x.layout == torch.strided and not x.is_nested and not is_watched()


def is_watched() -> bool:
    """Return True if anything but autograd looks on.

    A ``torch.func`` transform needs more of an operator than its backward, and a traced or exported graph must not
    depend on this package.
    """
    if is_compiling():
        return is_exporting()
    return are_functorch_transforms_active() or is_tracing()


class SavedTensorHooks(Protocol):
    """A pair of saved-tensor hooks that skips what operators of this package save."""

    pair: tuple[Callable[..., Any], Callable[..., Any]]
    alone: bool
    """Whether no other hooks are open around these: such see everything."""


def open_hooks(hooks: SavedTensorHooks) -> None:
    """Hide what functions of this thread save from ``hooks``, which are on the stack now."""
    _thread.hooks.append(hooks)


def close_hooks(hooks: SavedTensorHooks) -> None:
    """Undo ``open_hooks``, in any order: hooks of one module are called in the order in which they were added."""
    _thread.hooks.remove(hooks)


def once_differentiable(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of ``backward(ctx, eager, *grads)``, which returns the first of the gradients of the inputs.

    The frame adds ``None`` for all other inputs.

    Args:
        what: The operation, for the error.
    """
    message = (
        f"Second derivatives through {what} are not defined: what they need is not kept. HINT: keep the layer dense "
        "with a rule (`rules={name: None}`) where you need create_graph=True."
    )

    def decorate(compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            count, grad = len(ctx.needs_input_grad), grads[0]
            if grad is None:  # nothing depends on the output
                return (None,) * count
            if is_compiling():  # a compiler refuses second derivatives itself
                with torch.no_grad():
                    gradients = compute(ctx, False, *grads)
            elif torch.is_grad_enabled():
                raise RuntimeError(message)
            else:
                gradients = compute(ctx, in_plain_eager_mode(grad), *grads)
            return (*gradients, *[None] * (count - len(gradients)))

        return backward

    return decorate


def no_view(y: Tensor) -> Tensor:
    """Return ``y``, which only its function holds, as a tensor of the same memory that is no view to autograd.

    Autograd lets nobody write to a view that a function returns, or to a part of it (``y += x``, an in-place ReLU), and
    many of torch's functions return one, such as ``F.linear`` of a contiguous tensor of three dimensions. And a
    function that returns ``y.contiguous()`` of what is contiguous gets no gradient from what torch 2.11 compiles.
    """
    if is_compiling():
        return unsafe_view(y, y.shape)
    return y.data if y._is_view() else y  # a tenth of the time that the operator takes


def make_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that applies ``function`` to its arguments and ``eager``."""
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
        if not _thread.hooks:
            return eager_apply(x, *arguments, True)
        hooks = _thread.hooks[-1]
        top = top_saved_tensors_hooks(False)
        if not hooks.alone or top is None or top[0] is not hooks.pair[0]:
            return eager_apply(x, *arguments, True)
        pop_saved_tensors_hooks()
        try:
            return eager_apply(x, *arguments, True)
        finally:
            push_saved_tensors_hooks(*hooks.pair)

    return apply
