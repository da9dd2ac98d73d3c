r"""Modules whose forward and backward are replayed from CUDA graphs.

An eager training step whose GPU has little to do waits for Python. A CUDA graph is a list of kernels with all their
arguments, which the GPU runs without it. It has to be right to run the same kernels on the same addresses again, so a
call of a module goes through four states, for each signature (shapes, strides, types, autocast) by itself:

1. *watched*: it runs eagerly while what Python does is noted. Whoever reads values on the host, draws from Python's
   random generators, writes to attributes, or does something else in each call, stays eager.
2. *captured*: from the same parameters, buffers and random numbers, it runs eagerly, and is captured. Nothing of
   this changes parameters, gradients, buffers or generators.
3. *compared*: outputs and gradients of a replay are those of the eager runs, bit for bit where both of these agree, and
   else within ``NOISE`` times their difference.
4. *replayed*: as long as storages of parameters and buffers, flags, hooks and sparsities are those of the capture.

A graph has one set of addresses for what it keeps for backward. So a call is eager while backward of the one before has
not run, or while somebody holds its outputs. One in ``EAGER_EVERY`` calls is eager too, in which looks are had at what
changes slowly.

Gradients of parameters are the graph's own tensors, of which ``.grad`` becomes an alias: they exist once, unless they
are accumulated over several calls.
"""

from __future__ import annotations

import pickle
import weakref
from collections import Counter, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import chain
from math import inf
from operator import is_
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_actprune.codec.private import (
    are_functorch_transforms_active,
    clear_workspaces,
    storage_uses,
    top_saved_tensors_hooks,
    tree_flatten,
    tree_unflatten,
)
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.containers import map_tensors, tensors_in
from lightning_actprune.operators.hooks import backward_runs, dropped_by_checkpoint
from lightning_actprune.operators.second_run import python_generators, set_python_generators

WATCHED = 2
"""Calls in a row in which Python has to do the same before a call is captured."""
MOST_WATCHED = 32
"""Calls of one signature that are watched at most; in the first ones, blocks that run again are compared one by one."""
MOST_GRAPHS = 8
"""Signatures of a module that are captured at most; calls of others are eager."""
MOST_CAPTURES = 24
"""Captures of a module at most, of the same signature again after something has changed."""
MOST_OTHERS = 4
"""Calls in a row after which a graph is captured anew that something else has changed for, such as a hook."""
EAGER_EVERY = 128
"""Calls of which one is eager."""
EAGER_RUNS = 3
"""Eager runs of a call before it is captured, which show whether they agree in each bit."""
NOISE = 3.0
"""Differences between eager runs that a replay may differ from them by."""
SMALL_BYTES = 2**24
"""Outputs up to this size are copied out of the graph's own."""


class Recorder(Protocol):
    """What captures work, and replays it."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays ``run``, and what that returned, which a replay writes anew."""


class CudaRecorder:
    """Captures CUDA graphs that share one pool of memory: one of them is in use at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``Recorder``."""
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that load data may use the GPU meanwhile.
            stream = _stream_beside(torch.cuda.current_device())
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            # A failed capture leaves the generator of random numbers in it; the end of the next one takes it out.
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise
        return graph.replay, results


class RefusedError(Exception):
    """A module cannot be replayed; the text is the reason."""


class ReplayedModule(Converted):
    """Mixin of the classes of modules whose calls are replayed."""

    _replay: ModuleReplay

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the dense module does."""
        if "_replay" not in self.__dict__:  # let go, and this method is held by somebody
            return type(self).forward(self, *args, **kwargs)
        return self._replay.call(super().forward, args, kwargs)  # type: ignore[misc]


def replayed_class(cls: type[nn.Module]) -> type[Any]:
    """Return what a module of exactly this class becomes; the same one each time."""
    if cls not in _classes:
        text = f"``{cls.__name__}`` whose calls are replayed from CUDA graphs."
        _classes[cls] = type(f"Replayed{cls.__name__}", (ReplayedModule, cls), {"__doc__": text, "dense_class": cls})
    return _classes[cls]


_classes: dict[type[nn.Module], type[Any]] = {}


def replay_module(module: nn.Module, name: str, recorder: Callable[[], Recorder] = CudaRecorder) -> ModuleReplay:
    """Let the calls of ``module`` be replayed once it is known how; ``let_go`` undoes it.

    Args:
        module: Any module. Its parameters and buffers stay the same objects.
        name: Of it, for reasons.
        recorder: Makes what captures.
    """
    replay = module._replay = ModuleReplay(module, name, recorder)  # type: ignore[assignment]
    module.__class__ = replayed_class(type(module))
    return replay


def let_go(module: nn.Module) -> None:
    """Make ``module`` what it was, and free its graphs."""
    if isinstance(module, ReplayedModule):
        module.__dict__.pop("_replay").close()
        module.__class__ = type(module).dense_class  # type: ignore[assignment]


def move_gradients(model: nn.Module) -> None:
    """Let gradients lie side by side, and give the memory between them back.

    It belonged to activations. An optimizer that steps for the first time would allocate its state there, for good, and
    graphs could not use the rest.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.is_cuda and not p.grad.is_sparse]
    copies = [gradient.to("cpu", copy=True) for gradient in gradients]
    for gradient in gradients:
        gradient.data = gradient.new_empty(0)
    torch.cuda.empty_cache()
    for gradient, copy in zip(gradients, copies, strict=True):
        gradient.data = copy.to(gradient.device)


class _Call(NamedTuple):
    """A call of a module, taken apart.

    Args:
        tensors: Among its arguments.
        places: Of these among ``leaves``.
        leaves: All that is in the arguments, without the tensors.
        spec: How the arguments are put together.
    """

    tensors: list[Tensor]
    places: list[list[int]]
    leaves: list[Any]
    spec: Any

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of its own."""
        leaves = list(self.leaves)
        for places, tensor in zip(self.places, tensors, strict=True):
            for place in places:
                leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


class _Signature:
    """What is known of the calls of one signature."""

    def __init__(self) -> None:
        self.watched, self.alike, self.reads = 0, 0, ""
        self.constants: list[tuple[str, Any]] | None = None  # if nothing else is read on the host
        self.log: list[Any] | None = None
        self.graph: Graph | None = None
        self.state: _State | None = None
        self.calls = self.others = 0


class ModuleReplay:
    """The calls of one module: watched, captured by signature, and replayed.

    Args:
        module: The module, which this does not keep.
        name: Of it, for reasons.
        recorder: Makes what captures.
    """

    def __init__(self, module: nn.Module, name: str, recorder: Callable[[], Recorder]) -> None:
        self._module, self.name = weakref.ref(module), name
        self._recorder, self._signatures = recorder, dict[Any, _Signature]()
        self._pool: Recorder | None = None
        self._captures = 0
        self._last: Callable[[], Graph | None] = lambda: None
        self.reason = ""
        """Why all calls are eager, empty if they are not."""
        self.replays = 0
        """Calls that were replayed."""

    @property
    def graphs(self) -> int:
        """Signatures that are captured."""
        return sum(signature.graph is not None for signature in self._signatures.values())

    def __deepcopy__(self, memo: Any) -> ModuleReplay:
        return _Eager(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Eager, (self.name,)

    def close(self) -> None:
        """Free the graphs."""
        self._signatures.clear()
        self._pool = None

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return ``forward(*args, **kwargs)``, eagerly or from a graph."""
        module = self._module()
        if self.reason or module is None or not module.training or not _may_replay():
            return forward(*args, **kwargs)
        try:
            call, key = _take_apart(args, kwargs)
            signature = self._signature(key)
            if signature is None:
                return forward(*args, **kwargs)
            if signature.graph is None:
                if signature.alike < WATCHED:
                    return self._watch(signature, module, forward, args, kwargs)
                if self._in_use():  # a capture overwrites what the pool of graphs has for its backward
                    return forward(*args, **kwargs)
                self._capture(signature, module, forward, call)
            if signature.state is None or not signature.state.holds():
                signature.others += 1
                if signature.others >= MOST_OTHERS:
                    del self._signatures[key]  # and watched and captured anew
                return forward(*args, **kwargs)
            signature.others = 0
        except RefusedError as reason:
            self.close()
            self.reason = str(reason)
            return forward(*args, **kwargs)
        signature.calls += 1
        graph = signature.graph
        assert graph is not None
        if signature.calls % EAGER_EVERY == 0 or self._in_use():
            return forward(*args, **kwargs)
        if signature.calls == 2:  # gradients of eager steps have gone
            _free_cache()
        for other in self._signatures.values():
            if other.graph is not None and other.graph is not graph:  # whose gradients may lie in this one's memory
                other.graph.leave_gradients()
        self.replays += 1
        self._last = weakref.ref(graph)
        return graph(call.tensors)

    def _signature(self, key: Any) -> _Signature | None:
        found = self._signatures.get(key)
        if found is None and len(self._signatures) < MOST_GRAPHS:
            found = self._signatures[key] = _Signature()
        return found

    def _in_use(self) -> bool:
        """Return whether somebody still needs what the last replay of any graph has written."""
        graphs = [self._last(), *(known.graph for known in self._signatures.values())]
        return any(graph is not None and graph.in_use() for graph in graphs)

    def _watch(
        self,
        signature: _Signature,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call eagerly, and note whether Python does what it did in the one before.

        Raises:
            RefusedError: If it never does.
        """
        before = _python_state(module)
        inputs = [x for x in tree_flatten((args, dict(kwargs)))[0] if isinstance(x, Tensor)]
        versions = [x._version for x in inputs]
        with _Operations(module) as operations:
            outputs = forward(*args, **kwargs)
        operations.log.append([leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, _PLAIN)])
        changed = _changes(before, _python_state(module)) or operations.reason or _hooks_in(module)
        if not changed and versions != [x._version for x in inputs]:
            changed = "it writes to its arguments"
        alike = not changed and operations.log == signature.log
        signature.log, signature.reads = None if changed else operations.log, operations.reads
        signature.constants = None if operations.reads else operations.constants
        signature.alike = signature.alike + 1 if alike else 0
        signature.watched += 1
        if signature.watched >= MOST_WATCHED and not alike:
            self.close()
            self.reason = changed or operations.reads or "it does something else in each call"
        return outputs

    def _capture(self, signature: _Signature, module: nn.Module, forward: Callable[..., Any], call: _Call) -> None:
        """Capture a call, and compare a replay with eager runs.

        Raises:
            RefusedError: If it cannot be captured, or computes something else.
        """
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            raise RefusedError("its parameters, flags, hooks or sparsities change too often")
        if self._pool is None:
            self._pool = self._recorder()
        signature.state = _State(module)
        with _unchanged(module):
            try:
                signature.graph = capture(self._pool, module, forward, call, signature.constants, self._captures == 1)
            except RefusedError as reason:
                fails = reason.__cause__ is not None  # where values are read, which is then why
                raise RefusedError(signature.reads if fails and signature.reads else str(reason)) from reason
        signature.log = None


class _Eager(ModuleReplay):
    """That of a copied or pickled module, whose calls are eager."""

    def __init__(self, name: str) -> None:
        super().__init__(nn.Identity(), name, CudaRecorder)
        self.reason = "it is a copy"


def _may_replay() -> bool:
    """Return whether a call keeps something for a backward that is its own, and no compiler or transform looks on."""
    return (
        torch.is_grad_enabled()
        and not is_compiling()
        and not backward_runs()
        and not dropped_by_checkpoint(top_saved_tensors_hooks(False))
        and not are_functorch_transforms_active()
        and not torch.is_inference_mode_enabled()
    )


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def _take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Call, Any]:
    """Return a call and its signature.

    Raises:
        RefusedError: If something among the arguments is no tensor and no constant.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors, places, described = list[Tensor](), list[list[int]](), list[Any]()
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.layout == torch.strided:
            number = next((number for number, x in enumerate(tensors) if x is leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
                places.append([])
            places[number].append(place)
            described.append(number)
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            leaves[place] = None
        elif isinstance(leaf, _PLAIN):
            described.append((type(leaf), leaf))
        else:
            raise RefusedError(f"an argument of type {type(leaf).__name__} is neither a tensor nor a constant")
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise RefusedError(f"its arguments are on {len(devices)} devices")
    return _Call(tensors, places, leaves, spec), (spec, tuple(described), _autocast(devices.pop().type))


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _uncached_autocast(device: str) -> torch.autocast:
    """Return autocast as it is, without its cache: casts of weights from before would be those of today for good."""
    _, enabled, dtype = _autocast(device)
    return torch.autocast(device, dtype, enabled, cache_enabled=False)


class _State:
    """What a graph of ``module`` depends on: all that attributes of its modules hold, and where tensors are.

    It takes 0.2 ms to look at 120 modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._types = list(map(type, self._modules))
        # Hooks of the module itself are called around a replay.
        held = [(name, value) for name, value in vars(module).items() if not name.endswith("_hooks")]
        held += [item for inner in self._modules[1:] for item in vars(inner).items()]
        containers = [value for _, value in held if isinstance(value, (Mapping, list, deque, UserList))]
        self._holders: list[Iterable[Any]] = [vars(inner).values() for inner in self._modules]
        self._holders += [each.values() if isinstance(each, Mapping) else each for each in containers]
        self._held = list(chain.from_iterable(self._holders))
        self._tensors = [each for each in self._held if isinstance(each, Tensor)]
        self._places = list(map(_place, self._tensors))

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        held = list(chain.from_iterable(self._holders))
        return (
            len(held) == len(self._held)
            and (all(map(is_, held, self._held)) or all(map(_is_as_before, held, self._held)))
            and self._types == list(map(type, self._modules))
            and self._places == list(map(_place, self._tensors))
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.requires_grad


def _is_as_before(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


# === What Python does in a call =======================================================================

_ON_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal"}
"""Names of functions that wait for values, or take them to the host."""
_CONSTANTS = {"arange", "zeros", "ones", "full", "eye", "linspace", "tensor"}
"""Names of functions that make the same tensor of the same numbers; so do those with ``_like`` and ``new_``."""
_DRAWS = "rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential", "poisson", "empty"
"""Parts of names of functions whose results are others in each call."""
_MOST_VALUES = 2**20
"""Values of a constant tensor at most, which is kept to know it again."""
_PACKAGE = __name__.partition(".")[0]
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
"""Names of functions whose effect is in Python."""


def _called(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name


class _Operations(TorchFunctionMode):
    """Notes the functions of torch that are called in here, with shapes and constants.

    Values of tensors that are made of constants alone, such as positions, may be read on the host: ``constants`` has
    what these functions returned.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._known = dict[int, tuple[Tensor, int]]()
        self.log, self.constants = list[Any](), list[tuple[str, Any]]()
        self.reason = self.reads = ""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = _called(func), tree_flatten((args, dict(kwargs or {})))[0]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        constant = self._is_constant(name, tensors)
        result = func(*args, **(kwargs or {}))
        found = [y for y in tree_flatten(result)[0] if isinstance(y, Tensor)]
        if constant:
            self._known.update((id(y), (y, y._version)) for y in found if y.numel() <= _MOST_VALUES)
        if name in _ON_HOST and tensors:
            if constant:
                self.constants.append((name, result))
            else:
                self.reads = f"it reads values on the host ({name})"
                if not tensors[0].is_cuda:  # of a GPU's, capture tells: some code reads none while it is captured
                    self.reason = self.reads
        elif len({leaf.device.type for leaf in tensors if leaf.dim() > 0}) > 1:
            self.reason = f"it uses tensors on different devices ({name})"
        if name in _HOOKS:
            self.reason = f"it calls {name}"
        if any(isinstance(leaf, torch.Generator) for leaf in given):
            self.reason = f"it draws from a generator of its own ({name})"
        if found or result is None or name in _ON_HOST:  # and not who asks for shapes
            values = tuple(leaf for leaf in (*given, result) if isinstance(leaf, _PLAIN))
            shapes = [(tuple(leaf.shape), id(leaf) if id(leaf) in self._own else 0) for leaf in tensors]
            self.log.append((name, shapes, values))
        return result

    def _is_constant(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Return whether a function returns the same in each call."""
        if any(part in name for part in _DRAWS):
            return False
        if name in _CONSTANTS or name.endswith(("zeros_like", "ones_like", "full_like")) or name.startswith("new_"):
            return True
        known = (self._known.get(id(x), (None, 0)) for x in tensors)
        return bool(tensors) and all(
            x is one and x._version == version for x, (one, version) in zip(tensors, known, strict=True)
        )


class _Constants(TorchFunctionMode):
    """Returns what functions that read constants returned, in their order, where a capture could not wait for values.

    Raises:
        RefusedError: If another one is called.
    """

    def __init__(self, constants: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self._constants = iter(constants)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _called(func)
        if name in _ON_HOST and any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs or {}))[0]):
            known, result = next(self._constants, ("", None))
            if known != name:
                raise RefusedError(f"it reads values on the host ({name})")
            return result
        return func(*args, **(kwargs or {}))


def _python_state(module: nn.Module) -> tuple[bytes, dict[str, tuple[Any, ...]]]:
    """Return random generators of the host, and what the attributes of all modules refer to, and containers in them."""
    attributes = {}
    for fqn, inner in module.named_modules():
        for name, value in vars(inner).items():
            items = _items(value)
            tensors = [each for each in (value, *items) if isinstance(each, Tensor) and name != "_buffers"]
            attributes[f"{fqn}.{name}".lstrip(".")] = value, *items, *(tensor._version for tensor in tensors)
    on_gpu = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    generators = python_generators(), torch.get_rng_state().numpy().tobytes() if on_gpu else None
    return pickle.dumps(generators), attributes


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (list, tuple, set, deque, UserList)) else ()


def _changes(before: tuple[bytes, dict[str, Any]], after: tuple[bytes, dict[str, Any]]) -> str:
    """Return what a call has changed that a graph would not, empty for nothing."""
    if before[0] != after[0]:
        return "it draws from a random generator on the host"
    held, holds = before[1], after[1]
    names = [name for name in held.keys() | holds.keys() if not _are_the_same(held.get(name, ()), holds.get(name, ()))]
    return f"it writes to its attribute {min(names)!r}" if names else ""


def _are_the_same(held: tuple[Any, ...], holds: tuple[Any, ...]) -> bool:
    return len(held) == len(holds) and all(
        one is other or (type(one) is int and one == other) for one, other in zip(held, holds, strict=True)
    )


def _hooks_in(module: nn.Module) -> str:
    """Return which module inside has hooks, which no replay calls."""
    for name, inner in module.named_modules():
        hooks = inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks
        foreign = (hook for each in hooks for hook in each.values() if not hook.__module__.startswith(_PACKAGE))
        if inner is not module and any(True for _ in foreign):
            return f"its module {name!r} has hooks, which a replay does not call"
    return ""


# === Capture ==========================================================================================


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Leave buffers, gradients and all random generators as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    python, drawn = python_generators(), _generators()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.data.copy_(values)  # which autograd does not take for a change
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_python_generators(python)
        _set_generators(drawn)


def _generators() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def capture(
    recorder: Recorder,
    module: nn.Module,
    forward: Callable[..., Any],
    call: _Call,
    constants: Sequence[tuple[str, Any]] | None,
    first: bool,
) -> Graph:
    """Return the graph of a call, of which a replay has computed what eager runs do.

    ``constants``: what functions return that read values on the host in it, ``None`` if not all of these are constant.
    ``first``: whether it is the recorder's first.

    Raises:
        RefusedError: If it cannot be captured, or a replay computes something else.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    aliases = [nn.Parameter(parameter.detach()) for parameter in parameters]
    around = partial(_exchanged, module, parameters, aliases)
    device = call.tensors[0].device
    drawn, buffers = _generators(), [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def from_the_start() -> None:
        _set_generators(drawn)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.data.copy_(values)  # which autograd does not take for a change

    def run() -> list[Tensor | None]:
        from_the_start()
        outputs, gradients = _run(forward, call, aliases)
        return [*(y.detach() for y in outputs), *gradients, *(buffer for buffer, _ in buffers)]

    try:
        _free_cache()
        before = _memory(device)
        with around(), _beside(device):
            one = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in run()]  # to hold them once
            room = min(now - then for now, then in zip(_memory(device, most=True), before, strict=True)) if first else 0
            others = [[_difference(*pair) for pair in zip(one, run(), strict=True)] for _ in range(EAGER_RUNS - 1)]
        _free_cache()  # which the pool of graphs cannot use
        from_the_start()
        graph = Graph(recorder, forward, call, parameters, aliases, around, constants, room)
        from_the_start()
        replayed = [*graph.trial(call.tensors), *(buffer for buffer, _ in buffers)]
        found = [_difference(*pair) for pair in zip(one, replayed, strict=True)]
        _free_cache()
    except RefusedError:
        raise
    except torch.OutOfMemoryError:
        raise RefusedError("there is not enough memory for its graph") from None
    except Exception as error:
        while isinstance(error.__context__, RuntimeError):  # of which the others only tell that it failed
            error = error.__context__
        raise RefusedError(f"it cannot be captured: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    noise = list(map(max, *others))
    typical = median([each for each in noise if each] or [0.0])  # some that vary agree by chance
    if any(mine > NOISE * max(each, typical) for mine, each in zip(found, noise, strict=True)):
        raise RefusedError("a replay of its graph computes something else than an eager run")
    return graph


@contextmanager
def _as_eager(constants: Sequence[tuple[str, Any]] | None) -> Iterator[None]:
    """Let a forward that is captured do what eager ones do, if it reads nothing but constants.

    Some code computes something else while it is captured, in order not to read values.
    """
    if constants is None:
        yield
        return
    asked = torch.cuda.is_current_stream_capturing
    try:
        torch.cuda.is_current_stream_capturing = lambda: False
        with _Constants(constants):
            yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


@contextmanager
def _exchanged(module: nn.Module, parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Let ``module`` compute with aliases of its parameters.

    What accumulates the gradient of a tensor stays with the stream that has met it first, on which a capture may not
    wait.
    """
    alias_of = {id(parameter): alias for parameter, alias in zip(parameters, aliases, strict=True)}
    places = [
        (inner._parameters, name, parameter)
        for inner in module.modules()
        for name, parameter in inner._parameters.items()
        if id(parameter) in alias_of
    ]
    try:
        for holder, name, parameter in places:
            holder[name] = alias_of[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for holder, name, parameter in places:
            holder[name] = parameter


def _run(
    forward: Callable[..., Any], call: _Call, parameters: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs of an eager run, and the gradients of inputs and parameters for those of ``_probe``."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in call.tensors]
    args, kwargs = call.arguments(inputs)
    with _uncached_autocast(inputs[0].device.type):
        outputs = list(tensors_in(forward(*args, **kwargs)))
    wanted = [*(x for x in inputs if x.requires_grad), *parameters]
    ends = [y for y in outputs if y.requires_grad]
    if not ends or not wanted:
        raise RefusedError("none of its outputs needs a gradient")
    if _leaves_of(ends) - {id(x) for x in wanted}:
        raise RefusedError("it computes with tensors that need a gradient and are not among its parameters and inputs")
    return outputs, list(torch.autograd.grad(ends, wanted, list(map(_probe, ends)), allow_unused=True))


def _probe(y: Tensor) -> Tensor:
    """Return the gradient of an output that captures are compared with: of either sign, and no two rows alike."""
    steps = torch.arange(y.numel(), device=y.device, dtype=torch.float32)
    return torch.empty_like(y).copy_(torch.sin(steps + 1).view(y.shape))  # in whose order sums depend on it


def _difference(right: Tensor | None, found: Tensor | None) -> float:
    """Return ``|found - right| / |right|``, 0 for the same bits, infinity where only one has a value."""
    if right is None or found is None:
        return 0.0 if right is found else inf
    right = right.to(found.device)
    differs = (right != found) & ~(right.isnan() & found.isnan())
    if not differs.any():
        return 0.0
    one, other = right.double(), found.double()
    return float((((other - one)[differs]).norm() / one.norm()).nan_to_num(inf, inf))


@cache
def _stream_beside(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """Run on the stream of captures: libraries take their memory for a stream when they meet it first."""
    if device.type != "cuda":
        yield
        return
    stream = _stream_beside(torch.cuda.current_device() if device.index is None else device.index)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def _memory(device: torch.device, most: bool = False) -> tuple[int, int]:
    """Return how many bytes are allocated, now or at ``most`` so far, and how many are reserved now."""
    if device.type != "cuda":
        return 0, 0
    allocated = torch.cuda.max_memory_allocated if most else torch.cuda.memory_allocated
    return allocated(device), torch.cuda.memory_reserved(device)


def _free_cache() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        clear_workspaces()
        torch.cuda.empty_cache()


class _Memory:
    """The memory of a tensor, which this does not keep."""

    def __init__(self, x: Tensor) -> None:
        place = x.data_ptr(), False
        self.__cuda_array_interface__ = {"shape": (x.nbytes,), "typestr": "|u1", "data": place, "version": 3}


def _at_its_place(x: Tensor) -> Tensor:
    """Return a tensor in the memory of ``x``, which what is captured may use again where ``x`` is no longer read."""
    if not x.is_cuda or not x.numel():
        return x.detach()
    memory: Tensor = torch.as_tensor(_Memory(x), device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


class Graph:
    """A captured call: forward, and backward from gradients of its outputs.

    Args:
        recorder: What captures it.
        forward: The module's own.
        call: The call.
        parameters: Those that need a gradient.
        aliases: Tensors that ``forward`` computes with in their place.
        around: Puts them there.
        constants: What functions return that read values on the host, ``None`` if not all of these are constant.
        room: Bytes that it takes from the GPU at once; in pieces, more would be left over between them.
    """

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        call: _Call,
        parameters: Sequence[Tensor],
        aliases: Sequence[Tensor],
        around: Callable[[], AbstractContextManager[None]],
        constants: Sequence[tuple[str, Any]] | None,
        room: int,
    ) -> None:
        self._constants = constants  # which may be tensors that kernels read
        self._inputs, self._needs = list[Tensor](), [x.requires_grad for x in call.tensors]
        wanted, live = list[Tensor](), list[Tensor]()

        def run_forward() -> Any:
            if room:
                torch.empty(room, dtype=torch.uint8, device=call.tensors[0].device)
            # The memory of an input that backward does not need is free once forward has ended.
            inputs = [torch.empty_like(x, requires_grad=x.requires_grad) for x in call.tensors]
            self._inputs = list(map(_at_its_place, inputs))
            wanted[:] = [*(x for x in inputs if x.requires_grad), *aliases]
            args, kwargs = call.arguments(inputs)
            with around(), _uncached_autocast(inputs[0].device.type), _as_eager(constants):
                outputs = forward(*args, **kwargs)
            live[:] = tensors_in(outputs)
            return outputs

        self._replay_forward, outputs = recorder.record(run_forward)
        self._outputs = [y.detach() for y in live]
        places = {id(y): number for number, y in enumerate(live)}
        self._template = map_tensors(lambda y: self._outputs[places[id(y)]], outputs)
        self._ends = [number for number, y in enumerate(live) if y.requires_grad]
        self._gradients = [torch.zeros_like(live[number]) for number in self._ends]

        self._reached = [_leaves_of([live[number]]) for number in self._ends]

        def run_backward() -> list[Tensor | None]:
            ends = [live[number] for number in self._ends]
            with around():  # for what runs again
                return list(torch.autograd.grad(ends, wanted, self._gradients, allow_unused=True))

        found: tuple[Callable[[], None], list[Tensor | None]] = recorder.record(run_backward)
        self._replay_backward, self._found = found
        live.clear()
        del outputs
        self._pending: weakref.ref[Any] | None = None
        self._numbers = {id(y): number for number, y in enumerate(self._outputs)}
        self._copied = [y.nbytes <= SMALL_BYTES for y in self._outputs]
        self._uses = [storage_uses(y) for y in self._outputs]
        count = len(wanted) - len(parameters)
        self._of_inputs = [(id(x), g) for x, g in zip(wanted[:count], self._found[:count], strict=True)]
        found_of = list(zip(parameters, wanted[count:], self._found[count:], strict=True))
        self._parameters = [p for p, _, g in found_of if g is not None]  # hooks of others are not called
        # A gradient in the memory of another, or of that of an output, would be written to twice.
        places_of = Counter(g.untyped_storage().data_ptr() for g in (*self._gradients, *self._found) if g is not None)
        self._of_parameters = [
            (id(alias), g, places_of[g.untyped_storage().data_ptr()] == 1) for _, alias, g in found_of if g is not None
        ]
        self._gradients_of = [
            (p, g, storage_uses(g))
            for p, (_, g, is_own) in zip(self._parameters, self._of_parameters, strict=True)
            if is_own
        ]

    def trial(self, tensors: list[Tensor]) -> list[Tensor | None]:
        """Return outputs and gradients of a replay, from the gradients that eager runs were given."""
        self.run_forward(tensors)
        self.run_backward([_probe(self._outputs[number]) for number in self._ends])
        return [*self._outputs, *self._found]

    def in_use(self) -> bool:
        """Return whether backward of the last call is still to come, or somebody holds what it has written."""
        if self._pending is not None and self._pending() is not None:
            return True
        if any(storage_uses(y) > uses for y, uses in zip(self._outputs, self._uses, strict=True)):
            return True
        return any(storage_uses(g) > uses + _is_alias(p.grad, g) for p, g, uses in self._gradients_of)

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return what the module does with other tensors."""
        results = _Replay.apply(self, len(tensors), *tensors, *self._parameters)
        return map_tensors(lambda y: results[self._numbers[id(y)]], self._template)

    @torch.no_grad()
    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay forward with these inputs, and return the outputs: small ones as copies."""
        for mine, x in zip(self._inputs, tensors, strict=True):
            mine.copy_(x)
        self._replay_forward()
        return tuple(y.clone() if copied else y.detach() for y, copied in zip(self._outputs, self._copied, strict=True))

    @torch.no_grad()
    def leave_gradients(self) -> None:
        """Give each ``.grad`` that is an alias memory of its own: what is next adds to it, and somebody may hold it."""
        for parameter, own, _ in self._gradients_of:
            if _is_alias(parameter.grad, own):
                parameter.grad.data = parameter.grad.data.clone()  # type: ignore[union-attr]

    @torch.no_grad()
    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay backward with these gradients of the outputs that need one; return those of inputs and parameters."""
        self.leave_gradients()
        for mine, gradient in zip(self._gradients, gradients, strict=True):
            if gradient is None:
                mine.zero_()
            else:
                mine.copy_(gradient)
        self._replay_backward()
        return self._found

    def written(self) -> list[int]:
        """Return how often the outputs have been written to that backward may read."""
        return [y._version for y, copied in zip(self._outputs, self._copied, strict=True) if not copied]

    def differentiable(self, results: Sequence[Any]) -> list[Any]:
        """Return those of the outputs that need a gradient."""
        return [results[number] for number in self._ends]

    def gradients_of_call(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of inputs, as copies, and of parameters, as aliases that may become ``.grad``.

        There is none of what only outputs without a gradient need.
        """
        reached = set[int]().union(*(r for r, g in zip(self._reached, gradients, strict=True) if g is not None))
        of_inputs = iter([None if g is None or key not in reached else g.clone() for key, g in self._of_inputs])
        of_parameters = [
            (g.detach() if is_own else g.clone()) if key in reached else None for key, g, is_own in self._of_parameters
        ]
        return [*(next(of_inputs) if needs else None for needs in self._needs), *of_parameters]


def _leaves_of(outputs: Sequence[Tensor]) -> set[int]:
    """Return the numbers (``id``) of the leaves whose gradients those of ``outputs`` reach."""
    leaves, seen, waiting = set[int](), set[Any](), list[Any]()
    for y in outputs:
        if y.grad_fn is not None:
            waiting.append(y.grad_fn)
        elif y.requires_grad:
            leaves.add(id(y))
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves


def _is_alias(gradient: Tensor | None, own: Tensor) -> bool:
    return gradient is not None and gradient.data_ptr() == own.data_ptr()


class _Replay(torch.autograd.Function):
    """A replay as an operation: its inputs are those of the module and its parameters."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, count: int, *tensors: Tensor) -> Any:
        ctx.graph = graph
        graph._pending = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.versions = [parameter._version for parameter in graph._parameters]
        results = graph.run_forward(tensors[:count])
        ctx.written = graph.written()
        ends = {id(y) for y in graph.differentiable(results)}
        ctx.mark_non_differentiable(*(y for y in results if id(y) not in ends))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph = ctx.graph
        if graph._pending is None or graph._pending() is not ctx:
            raise RuntimeError(
                "A module that is replayed from a CUDA graph keeps what backward needs for one backward. HINT: leave "
                "out `retain_graph`, or `cuda_graphs`."
            )
        if ctx.versions != [parameter._version for parameter in graph._parameters]:
            raise RuntimeError(
                "A parameter of a module that is replayed from a CUDA graph has been modified by an inplace operation "
                "since its forward. HINT: call backward before the optimizer steps."
            )
        if ctx.written != graph.written():
            raise RuntimeError(
                "An output of a module that is replayed from a CUDA graph has been modified by an inplace operation "
                "before backward. HINT: modify a clone of it, or leave out `cuda_graphs`."
            )
        given = graph.differentiable(gradients)
        graph.run_backward(given)
        graph._pending = None
        return None, None, *graph.gradients_of_call(given)
