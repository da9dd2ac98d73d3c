r"""Simulate one training step of a GPU on a CPU, without values: what the model has in use at each moment.

**Tensors without values.** The step runs through torch's autograd and this package's layers, on plain CPU tensors that
a dispatch mode creates. For each operation it asks torch's fake tensors for the shapes, strides and types of the
results, and returns tensors over memory that is reserved and never touched, so 40 GiB of activations take only address
space. They are plain tensors, since this package is fast only on these (shared packs, outputs that are read again,
inputs of blocks in few bits, kernels). The stored bytes are those of a GPU, exactly.

**The allocator.** The life of a tensor's memory shows when it is freed. ``analysis.caching_allocator`` hands it out as
CUDA's caching allocator does. ``StepMemoryRecorder`` reads this allocator instead of CUDA's, so the resulting
``StepMemory`` is ``measured``.

**What differs on a GPU** is imitated while the step runs:

- Autocast computes more operations in fp32 (norms, softmax, losses) or in the widest type (``addcmul``). Operations
  with such a rule on a GPU and none on a CPU get one; the installed torch says which they are.
- Attention is fused: flash attention for 16-bit values without a mask, memory-efficient attention for all others.
- Dropout keeps a mask of one byte per value.
- Kernels of this package are chosen and allocate, but do not run (``codec.dispatch``). Without Triton the layers run in
  plain torch, whose temporary tensors are larger: peaks are upper bounds then.
- Backward of attention and of biases takes memory for partial sums.

It does not see other temporary tensors *inside* an operation of torch or of a library, such as workspaces of
convolutions.

**Values.** What is computed from shapes alone (positions, masks, rates of dropout) has values, up to ``MOST_VALUES`` of
them, so control flow may depend on it. What depends on parameters, on the batch or on random numbers has none, and
reading it is an error. Decisions that a first batch makes by values are those of most measured models: nothing has
outliers, so saved tensors of operations are packed wherever these tolerate it, and layers with a ``max_dropped_energy``
below 1 drop no blocks. Retained inputs are a matter of storages, which ``RetentionProbe`` finds as usual.

The model does not change: a copy of it runs, with parameters and buffers without values, and random generators are
reset. Other threads compute as usual meanwhile, but random numbers that they draw are drawn again afterwards.
"""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import math
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import TypedDict, Unpack

from lightning_actprune.analysis.caching_allocator import CachingAllocator
from lightning_actprune.analysis.dense_footprint import FakeMode
from lightning_actprune.analysis.first_batch import RetentionProbe, keep_blocks
from lightning_actprune.analysis.recorder import ModuleNames
from lightning_actprune.analysis.step_memory import StepMemory, StepMemoryRecorder
from lightning_actprune.codec.dispatch import Machine, SimulatedGPU, act_as, simulated_gpu
from lightning_actprune.codec.private import (
    FOR_SIMULATION,
    TorchDispatchMode,
    efficient_attention,
    flash_attention,
    has_kernel,
    no_dispatch_modes,
    redispatch,
    require,
    scoped_library,
    tree_leaves,
    tree_map_only,
)
from lightning_actprune.config import check_model, join_names
from lightning_actprune.operators.containers import map_tensors
from lightning_actprune.report import ConversionReport

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
Prepare: TypeAlias = Callable[[nn.Module], ConversionReport | None]
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], Optimizer]

HOPPER = Machine(multiprocessors=132, shared_memory=232448, major=9)
"""An H100 or H200, by whose properties some kernels cut their work; 16 blocks of 128 threads fit a multiprocessor."""
MOST_VALUES = 2**21
"""Most values of a tensor that depends on shapes alone and is therefore computed."""
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "32-true": (None, None),
    "16-mixed": (torch.float16, None),
    "bf16-mixed": (torch.bfloat16, None),
    "16-true": (None, torch.float16),
    "bf16-true": (None, torch.bfloat16),
}
"""Type of autocast, and type of the model, by the names of Lightning's precisions."""
_AUTOCAST = "cpu"
_ASKING = frozenset({"_local_scalar_dense", "equal", "is_nonzero"})
"""Operations that return values to Python."""
_IN_FP32 = (
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softmax.int", "log_softmax.int", "logsumexp"),
    *("sum", "sum.dim_IntList", "cumsum", "prod", "prod.dim_int", "norm.Scalar", "norm.ScalarOpt_dim"),
    *("exp", "expm1", "log", "log1p", "log2", "log10", "reciprocal", "rsqrt", "softplus", "cosine_similarity"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "cdist", "dist", "renorm"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "nll_loss", "nll_loss2d", "kl_div"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss", "triplet_margin_loss", "cosine_embedding_loss"),
)
_IN_WIDEST = "addcmul", "addcdiv", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add"
"""Operations that autocast on a GPU computes in fp32, and in the widest type of their arguments."""

_MOST_RESULTS = 2**14
_results: dict[Any, Any] = {}
"""Results of operations by types and layouts of the arguments, with layouts and positions of arguments for tensors."""
_one_at_a_time = threading.RLock()  # of what is registered with torch, and of the random generators


class StepOptions(TypedDict, total=False):
    """How a step is simulated.

    Args:
        loss: Returns the loss, given the copy of the model and the batch; by default as ``compute_loss`` does.
        precision: One of Lightning's names: ``"bf16-mixed"``, the default, ``"16-mixed"``, ``"32-true"``,
            ``"bf16-true"``, ``"16-true"``.
        optimizer: Creates the optimizer of the trained parameters; by default fused AdamW.
        accumulates: Whether gradients of the previous batch exist, to which those of this one are added.
        workspaces: Whether to count cuBLAS's workspaces, which is the default.
    """

    loss: Loss | None
    precision: str
    optimizer: MakeOptimizer | None
    accumulates: bool
    workspaces: bool


def simulate(
    model: nn.Module, batch: Any, prepare: Prepare | None = None, **options: Unpack[StepOptions]
) -> StepMemory:
    """Return the memory of one training step on a GPU, which need not exist (see the module).

    The step is in the middle of a training: optimizer state exists, and the first batch has decided.

    Args:
        model: The dense model, on any device, also ``meta``.
        batch: Batch of a step, in containers, dataclasses or other objects, on any device. Shapes, strides and types of
            its tensors matter, and the values of integers and booleans that are not on ``meta``.
        prepare: Converts a copy of the model, as ``lambda model: convert(model, "max")``, and returns the report, if
            any.
        options: See ``StepOptions``.

    Returns:
        The step, as measured.

    Raises:
        TypeError: If an argument has the wrong type, or the model cannot be copied.
        ValueError: If an argument is out of range, or a module reads values that do not exist.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batch = torch.empty(512, 64), torch.zeros(512, dtype=torch.int64)
        >>> step = simulate(model, batch, precision="32-true")
        >>> step.measured, step.activation_bytes[step.forward_end]
        (True, 1069060)
    """
    with open_simulation(model, batch, prepare, **options) as simulate_batch:
        return simulate_batch(batch)


@contextmanager
def open_simulation(
    model: nn.Module, batch: Any, prepare: Prepare | None, **options: Unpack[StepOptions]
) -> Iterator[Callable[[Any], StepMemory]]:
    """Yield a function that simulates a step with a batch of any size; ``batch`` is the first one, which decides.

    Arguments and errors are those of ``simulate``. Other threads have to wait for the end before they can simulate.
    """
    require("Simulating a step", FOR_SIMULATION)
    autocast, whole = PRECISIONS[check_precision(options.get("precision", "bf16-mixed"))]
    mode = _Mode(options.get("workspaces", True))
    with _one_at_a_time, _restore_randomness(), _register_gpu_rules(), act_as(SimulatedGPU(HOPPER)), mode:
        twin = _copy_without_values(check_model(model), mode).train()
        if whole is not None:
            twin.to(whole)
        mode.names = ModuleNames(twin)
        report = None if prepare is None else prepare(twin)
        make_optimizer = options.get("optimizer") or functools.partial(torch.optim.AdamW, fused=True)
        optimizer = make_optimizer([p for p in twin.parameters() if p.requires_grad])
        loss, accumulates = options.get("loss") or compute_loss, options.get("accumulates", False)
        step = _Step(twin, loss, autocast, optimizer, accumulates)
        make_input = functools.partial(_make_input, mode, whole)
        step.warm_up(map_tensors(make_input, batch), report)
        yield lambda batch: step.record(map_tensors(make_input, batch), mode.allocator.ask)


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return a usual loss of a batch.

    It is that of ``training_step`` if there is one, or ``model(**batch).loss`` for a mapping. For ``(inputs, targets)``
    it is the cross entropy with integer targets and the squared error with others, for a single tensor the mean of the
    output.
    """
    loss: Tensor
    if hasattr(model, "training_step"):
        training_step: Callable[..., Any] = model.training_step  # type: ignore[assignment]
        takes_number = len(inspect.signature(training_step).parameters) > 1  # as Lightning does
        result = training_step(batch, 0) if takes_number else training_step(batch)
        loss = result["loss"] if isinstance(result, Mapping) else result
        return loss
    if isinstance(batch, Mapping):
        loss = model(**batch).loss
        return loss
    if isinstance(batch, Tensor):
        return _get_logits(model(batch)).mean()
    inputs, targets = batch
    output = _get_logits(model(inputs))
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(
        output.reshape(-1, output.shape[-1]) if output.dim() > targets.dim() + 1 else output, targets
    )


def check_precision(value: Any) -> str:
    """Return ``value`` if it names a precision that can be simulated."""
    if value not in PRECISIONS:
        raise ValueError(
            f"`precision` must be one of {join_names(PRECISIONS)}, got {value!r}. HINT: 'bf16-mixed' is autocast to "
            "bfloat16, with parameters in float32."
        )
    return str(value)


def _get_logits(output: Any) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return logits


# === The step =========================================================================================================
class _Step:
    """A training step of a copy of a model."""

    def __init__(
        self, model: nn.Module, loss: Loss, autocast: torch.dtype | None, optimizer: Optimizer, accumulates: bool
    ) -> None:
        self._model, self._loss = model, loss
        self._autocast, self._optimizer, self._accumulates = autocast, optimizer, accumulates
        # Lightning drops the gradients of a step when the next forward is over.
        self._in_lightning = hasattr(model, "training_step")

    def warm_up(self, batch: Any, report: ConversionReport | None) -> None:
        """Run a first step: it makes the decisions of a first batch, and creates the optimizer's state."""
        if report is None:
            self._forward(batch).backward()  # type: ignore[no-untyped-call]
        else:
            with RetentionProbe(self._model, batch) as probe:
                loss = self._forward(batch)
                probe.check_alive()
                loss.backward()  # type: ignore[no-untyped-call]
            probe.apply(report)
            limited = (row for row in report.converted if row.keep is not None and row.keep.max_dropped_energy < 1)
            keep_blocks(self._model, report, {row.fqn: 1.0 for row in limited if row.sparsity})
        self._update()

    def record(self, batch: Any, allocator: Callable[[], tuple[int, int]]) -> StepMemory:
        """Run a step and return its memory."""
        with StepMemoryRecorder(self._model, batch, [self._optimizer], allocator=allocator) as recorder:
            loss = self._forward(batch)
            if self._in_lightning and not self._accumulates:
                recorder.moment()
                self._optimizer.zero_grad(set_to_none=True)
            recorder.mark("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            recorder.mark("optimizer")
            self._update()
        return recorder.result()

    def _forward(self, batch: Any) -> Tensor:
        with torch.autocast(_AUTOCAST, self._autocast, enabled=self._autocast is not None):
            loss = self._loss(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"`loss` must return a tensor of one value, got {type(loss).__name__}. HINT: for example `lambda "
                "model, batch: F.cross_entropy(model(batch[0]), batch[1])`."
            )
        return loss

    def _update(self) -> None:
        self._optimizer.step()
        if not self._in_lightning and not self._accumulates:
            self._optimizer.zero_grad(set_to_none=True)


# === Operations without values ========================================================================================
class NoValuesError(ValueError):
    """A step reads a value that a simulation does not have."""


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Runs operations on tensors without values (see the module)."""

    def __init__(self, workspaces: bool) -> None:
        super().__init__()
        self.allocator = CachingAllocator(workspaces)
        self.names: Mapping[nn.Module, str] = {}
        """Names of the modules, for errors."""
        self._fakes = FakeMode()

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a tensor without values of the same shape, type and layout."""
        return self._empty(_Layout.of(tensor))

    def _empty(self, layout: _Layout) -> Tensor:
        empty = torch.empty(0, dtype=layout.dtype)
        return empty.set_(self.allocator.empty(layout.nbytes), layout.offset, layout.shape, layout.strides)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else dict(kwargs)
        inputs = _list_tensors((args, *kwargs.values()))
        device = kwargs.get("device")
        # === Meta tensors, views and the profiler's marks take no memory ===
        if any(tensor.is_meta for tensor in inputs) or (device is not None and torch.device(device).type == "meta"):
            return func(*tree_map_only(Tensor, _to_meta, args), **kwargs)
        if _is_view(func) or func.namespace == "profiler":
            return func(*args, **kwargs)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        # === Small tensors with values are computed ===
        has_values = _computes(func) and not any(
            tensor.untyped_storage()._cdata in self.allocator.without_values for tensor in inputs
        )
        if inputs and has_values and sum(tensor.numel() for tensor in inputs) <= MOST_VALUES:
            return self.count_results(func(*args, **kwargs), inputs)
        if func.overloadpacket.__name__ in _ASKING:
            raise NoValuesError(self._describe_no_values(func, "reads a value"))
        # === Outputs that are written in place lose their values ===
        outputs = _find_outputs(func, args, kwargs)
        for tensor in outputs:
            self.allocator.without_values.add(tensor.untyped_storage()._cdata)
        if len(outputs) == len(func._schema.returns) > 0:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        if outputs and not func._schema.returns:  # a fused optimizer
            return None
        # === New results have shapes only; partial sums take memory meanwhile ===
        sums = self.allocator.empty(_count_sum_bytes(func, args))
        results = self._find_results(func, args, kwargs, inputs)
        if has_values and not inputs and _count_values(results) <= MOST_VALUES:  # a factory, such as that of positions
            made = self.count_results(func(*args, **kwargs), [])
        else:
            made = self._make_results(results, inputs)
        del sums
        return made

    def _find_results(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        """Return results with layouts and positions of ``inputs`` in place of tensors.

        Torch is asked once: blocks of a model are alike, and so are steps under several settings.
        """
        key = func, torch.get_default_dtype(), _describe(args), _describe(tuple(kwargs.items()))
        if key not in _results:
            if len(_results) >= _MOST_RESULTS:
                _results.clear()
            _results[key] = self._ask_torch(func, args, kwargs, inputs)
        return _results[key]

    def _ask_torch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]) -> Any:
        fakes: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return fakes[id(tensor)]

        try:
            with self._fakes:
                results = func(*tree_map_only(Tensor, fake, args), **tree_map_only(Tensor, fake, kwargs))
        except Exception as error:  # any error of an operation that needs values, or that fails
            raise NoValuesError(self._describe_no_values(func, f"fails: {type(error).__name__}: {error}")) from error
        places = {id(fakes[id(tensor)]): _Place(number) for number, tensor in enumerate(inputs) if id(tensor) in fakes}
        return tree_map_only(Tensor, lambda tensor: places.get(id(tensor)) or _Layout.of(tensor), results)

    def _make_results(self, results: Any, inputs: list[Tensor]) -> Any:
        if isinstance(results, _Layout):
            return self._empty(results)
        if isinstance(results, _Place):
            return inputs[results.number]
        if isinstance(results, (list, tuple)):
            return type(results)(self._make_results(result, inputs) for result in results)
        return results

    def count_results(self, results: Any, inputs: list[Tensor]) -> Any:
        """Return results with values, in memory of the allocator."""
        own = {id(tensor) for tensor in inputs}

        def count(tensor: Tensor) -> Tensor:
            if id(tensor) in own:
                return tensor
            copied = self.empty_like(tensor).copy_(tensor)
            self.allocator.without_values.discard(copied.untyped_storage()._cdata)
            return copied

        return tree_map_only(Tensor, count, results)

    def _describe_no_values(self, func: Any, what: str) -> str:
        name = self._describe_running()
        return (
            f"A step of this model cannot be simulated: in {name}, {func.overloadpacket.__name__} {what}, and floating-"
            f"point tensors have no values here{_describe_caller()}. HINT: let no control flow depend on such values, "
            "or measure a real step with ActivationMemoryMonitor."
        )

    def _describe_running(self) -> str:
        """Return the innermost module whose forward runs, in words."""
        frame = inspect.currentframe()
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self.names:
                return f"module {self.names[module] or '(root)'!r} ({type(module).__name__})"
            frame = frame.f_back
        return "the step outside of its modules"


@dataclass(frozen=True)
class _Layout:
    """What torch says about a result: everything but its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        """Return the layout of a tensor, with the bytes of its storage."""
        offset, nbytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
        return cls(tensor.shape, tensor.stride(), offset, tensor.dtype, nbytes)


@dataclass(frozen=True)
class _Place:
    """A result that is one of the input tensors."""

    number: int


def _list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments of an operation, whose only containers are lists and tuples."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += _list_tensors(value)
    return tensors


def _describe(value: Any) -> Any:
    """Return the part of an argument on which the shapes of results depend."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return type(value), value  # 1, 1.0 and True are equal


def _count_values(results: Any) -> int:
    """Return the number of values in all results."""
    if isinstance(results, (list, tuple)):
        return sum(map(_count_values, results))
    return results.shape.numel() if isinstance(results, _Layout) else 0


def _describe_caller() -> str:
    """Return a clause with the file and line that called torch."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((*_NOT_THE_USERS, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f" ({file}:{number}: {linecache.getline(file, number).strip()})"


_NOT_THE_USERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), functools.__file__


def _to_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@functools.lru_cache(maxsize=4096)
def _is_view(func: Any) -> bool:
    """Return True if an operation changes only shapes and strides."""
    if torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ == "_unsafe_view":
        return True
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


@functools.lru_cache(maxsize=4096)
def _computes(func: Any) -> bool:
    """Return True if results follow from arguments: they are neither random nor uninitialised memory."""
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func.overloadpacket.__name__


def _count_sum_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of partial sums while an operation runs, as measured on an H200 with torch 2.11."""
    if func.overloadpacket.__name__ in _ATTENTION_BACKWARDS:  # gradients of queries in fp32, and one sum per query
        query: Tensor = args[1]
        return 4 * (query.numel() + query.shape[:-1].numel()) if query.itemsize == 2 else 0
    if func is torch.ops.aten.sum.dim_IntList:
        x: Tensor = args[0]
        if x.dim() > 1 and {dim % x.dim() for dim in args[1] or ()} == {*range(x.dim() - 1)}:
            return _count_column_sum_bytes(x.shape[:-1].numel(), x.shape[-1])
    return 0


def _count_column_sum_bytes(rows: int, columns: int) -> int:
    """Return the bytes of partial sums of columns, such as gradients of biases (torch's ``setReduceConfig``).

    Each of the 32 x 4 threads of a block sums a part of four columns, and as many blocks run as fill the GPU.
    """
    values = math.ceil(rows / 4)  # per thread, in one block per 128 columns
    if columns < 128 or columns % 4 or values < 256:
        return 0
    blocks = min(math.ceil(HOPPER.multiprocessors * 16 / math.ceil(columns / 128)), math.ceil(values / 16))
    return 4 * 128 * columns * max(blocks, math.ceil(values / 256))


_ATTENTION_BACKWARDS = {f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient")}


def _find_outputs(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)
    names = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [leaf for name in names for leaf in tree_leaves(arguments.get(name)) if isinstance(leaf, Tensor)]


# === Model and batch without values ===================================================================================
class _Copies(TorchFunctionMode):
    """Leaves values out of the copies of tensors in any attribute: in a list of samples, for example."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (Tensor.__deepcopy__, Tensor.clone):  # a parameter copies itself by the latter
            return func(*args, **(kwargs or {}))
        empty = self._mode.empty_like(_to_meta(args[0].detach()))
        if func is Tensor.__deepcopy__:
            args[1][id(args[0])] = empty
        return empty


def _copy_without_values(model: nn.Module, mode: _Mode) -> nn.Module:
    """Return a copy of the model whose tensors have no values."""
    try:
        with _Copies(mode):
            return copy.deepcopy(model)
    except Exception as error:  # any error of an attribute that cannot be copied
        raise TypeError(
            f"`model` must be copyable, got a {type(model).__name__} whose copy raises {type(error).__name__}: "
            f"{error}. HINT: pass it before a trainer, a logger or the like is attached to it."
        ) from error


def has_known_values(tensor: Tensor) -> bool:
    """Return True if a simulation knows the values of this tensor of the batch; steps may branch on them."""
    is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    return is_index and tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() <= MOST_VALUES


def _make_input(mode: _Mode, dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and has_known_values(tensor):
        with no_dispatch_modes():
            return cast(Tensor, mode.count_results(tensor.detach().cpu(), []))
    empty = mode.empty_like(_to_meta(tensor.detach() if tensor.layout == torch.strided else tensor))
    empty = empty.to(dtype) if dtype is not None and empty.is_floating_point() else empty
    return empty.requires_grad_(tensor.requires_grad)


@contextmanager
def _restore_randomness() -> Iterator[None]:
    """Reset random generators at the end; a checkpoint reads and sets their state."""
    state, own, numpy = torch.get_rng_state(), random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(own)
        if numpy is not None and of_numpy is not None:
            numpy.random.set_state(of_numpy)


# === Autocast, attention and dropout as on a GPU ======================================================================
@contextmanager
def _register_gpu_rules() -> Iterator[None]:
    """Let a thread that acts as a GPU run autocast, attention and dropout of the CPU as a GPU does (see the module).

    They stand in torch's dispatcher, since a mode sees only the outermost function of Python, above autocast and
    autograd, or operations below these.
    """
    with scoped_library("aten", "IMPL") as library:

        def register(name: str, key: str, run: Callable[..., Any]) -> None:
            def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
                if simulated_gpu() is None:
                    return redispatch(_operation(name), keys, key, *args, **kwargs)
                return run(*args, **kwargs)

            library.impl(name, call, key, with_keyset=True)

        for names, choose in ((_IN_FP32, lambda tensors: torch.float32), (_IN_WIDEST, _find_widest)):
            for name in names:
                if has_kernel(f"aten::{name}", "AutocastCUDA") and not has_kernel(f"aten::{name}", "AutocastCPU"):
                    register(name, "AutocastCPU", functools.partial(_cast_and_call, _operation(name), choose))
        register("scaled_dot_product_attention", "AutogradCPU", _attend)
        register("dropout", "AutogradCPU", _dropout)
        yield


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast_and_call(
    operation: Callable[..., Any], choose: Callable[[list[Tensor]], torch.dtype], *args: Any, **kwargs: Any
) -> Any:
    """Call an operation as autocast does, with 16-bit arguments cast to a wider type."""
    floating = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and _is_narrow(leaf)]
    wide = choose([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
    torch.set_autocast_enabled(_AUTOCAST, False)
    try:
        if floating:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(wide) if _is_narrow(t) else t, (args, kwargs))
        return operation(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(_AUTOCAST, True)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _find_widest(tensors: list[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors if t.is_floating_point()))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run flash attention for 16-bit values without a mask, else memory-efficient attention."""
    if attn_mask is None and _is_narrow(query):
        results = flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return cast(Tensor, results[0])
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = None
    if attn_mask is not None:
        bias = attn_mask if attn_mask.is_floating_point() else torch.zeros_like(attn_mask, dtype=query.dtype)
        bias = bias.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    results = efficient_attention(query, key, value, bias, recorded, dropout_p, is_causal, scale=scale)
    return cast(Tensor, results[0])


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """Run dropout as on a GPU, where it keeps a mask."""
    return torch.native_dropout(input, p, train)[0] if train and 0 < p < 1 else input
