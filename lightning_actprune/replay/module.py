r"""Modules whose forward and backward are replayed from CUDA graphs.

In an eager step the GPU waits for Python. A CUDA graph is a list of kernels with all their arguments, which the GPU
runs without Python. A replay is right only if the call would launch the same kernels on the same addresses. So each
signature of calls (shapes, strides, types, autocast, gradients) goes through four states:

1. *watched*: the call runs eagerly, and what Python does is logged. A module that reads values on the host, draws from
   Python's random generators, writes to attributes, or does something else in each call, stays eager.
2. *captured*: the call runs eagerly three times, from the same parameters, buffers and random numbers, and is captured.
   Parameters, gradients, buffers and generators are the same afterwards.
3. *compared*: outputs and gradients of a replay equal those of the eager runs, bit for bit if these agree, else within
   three times their difference.
4. *replayed*: as long as storages of parameters and buffers, flags, hooks and sparsities do not change.

A graph has one set of addresses for what it keeps for backward. So a call is eager while backward of the call before is
still to come, or while somebody holds outputs of that call.

Gradients of parameters are tensors of the graph, and ``.grad`` is an alias of them: they exist once, unless they are
accumulated over several calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Set
from functools import cache, partial, wraps
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_actprune.codec.private import (
    any_global_hook,
    are_functorch_transforms_active,
    current_graph_task_id,
    top_saved_tensors_hooks,
    tree_flatten,
)
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.containers import map_tensors, tensors_in
from lightning_actprune.operators.hooks import backward_runs
from lightning_actprune.operators.regions import dropped_by_checkpoint
from lightning_actprune.replay.call import CONSTANTS, Call, Observations, RefusedError, parse_call
from lightning_actprune.replay.capture import capture, preserve_state
from lightning_actprune.replay.graph import CudaRecorder, Graph, Recorder
from lightning_actprune.replay.memory import free_cache
from lightning_actprune.replay.watch import (
    Dependencies,
    OperationLog,
    describe_change,
    find_hooks,
    first_difference,
    snapshot,
    version_of,
)

ALIKE_CALLS = 2
"""Calls in a row in which Python must do the same as in the call before."""
MAX_WATCHED = 32
"""Watched calls of one signature. Blocks that recompute are checked one by one in the first steps, which differ."""
MAX_GRAPHS = 8
"""Signatures of a module that are captured; calls of others are eager."""
MAX_CAPTURES = 24
"""Captures of a module, of the same signature again included."""
MAX_MISMATCHES = 4
"""Calls in a row with other dependencies, such as a hook, after which a signature is captured anew."""


class ReplayedModule(Converted):
    """Mixin of the classes of modules whose calls are replayed."""

    _replay: ModuleReplay


@cache
def make_replayed_class(cls: type[nn.Module]) -> type[Any]:
    """Return the replayed class of a module class, the same one each time."""

    @wraps(cls.forward)  # some libraries read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        replay = vars(self).get("_replay")  # None if somebody calls this method after `stop_replay`
        if replay is None or not replay.is_of(self):
            return cls.forward(self, *args, **kwargs)
        return replay.call(partial(cls.forward, self), args, kwargs)

    text = f"``{cls.__name__}`` whose calls are replayed from CUDA graphs."
    attributes = {"__doc__": text, "dense_class": cls, "forward": forward}
    return type(f"Replayed{cls.__name__}", (ReplayedModule, cls), attributes)


def replay_module(module: nn.Module, name: str, make_recorder: Callable[[], Recorder] = CudaRecorder) -> ModuleReplay:
    """Replay the calls of ``module`` as soon as that is safe; ``stop_replay`` undoes it.

    Args:
        module: Any module. Its parameters and buffers stay the same objects.
        name: Its name, for reasons.
        make_recorder: Makes what captures.
    """
    replay = module._replay = ModuleReplay(module, name, make_recorder)  # type: ignore[assignment]
    module.__class__ = make_replayed_class(type(module))  # type: ignore[arg-type]
    return replay


def stop_replay(module: nn.Module) -> None:
    """Make ``module`` eager again, and free its graphs."""
    if isinstance(module, ReplayedModule):
        module.__dict__.pop("_replay").close()
        module.__class__ = type(module).dense_class  # type: ignore[assignment]


class _Signature:
    """The state of all calls of one signature."""

    def __init__(self) -> None:
        self.watched = self.alike = self.mismatches = self.replays = 0
        self.host_read = ""
        self.observations = Observations()
        self.log: list[Any] | None = None
        self.graph: Graph | None = None
        self.dependencies: Dependencies | None = None
        self.backward_refusal = ""
        """Why backward cannot be captured, or ""."""

    def observe(self, **observations: Any) -> None:
        """Note what an eager call has shown."""
        self.observations = self.observations._replace(**observations)

    def observe_gradient(self, number: int, tasks: set[int], gradient: Tensor) -> None:
        """Note that an output gets a gradient.

        Args:
            number: Index of the output.
            tasks: Numbers of the backward passes that have reached outputs of the same call.
            gradient: Its gradient.
        """
        tasks.add(current_graph_task_id())
        if len(tasks) > 1:
            self.backward_refusal = "backward runs more than once through a call"
        if torch.is_grad_enabled():
            self.backward_refusal = "its gradients are differentiated (`create_graph`)"
        autocasts = torch.is_autocast_enabled(gradient.device.type)
        self.observe(backward_autocasts=autocasts, graded=self.observations.graded | {number})


class ModuleReplay:
    """The calls of one module: watched, captured by signature, and replayed.

    Args:
        module: The module, which is not kept alive.
        name: Its name, for reasons.
        make_recorder: Makes what captures.

    Attributes:
        reason: Why all calls are eager, or "".
        replays: Calls that were replayed.
    """

    def __init__(self, module: nn.Module, name: str, make_recorder: Callable[[], Recorder]) -> None:
        self._module, self.name = weakref.ref(module), name
        self._make_recorder, self._signatures = make_recorder, dict[Any, _Signature]()
        self._recorder: Recorder | None = None
        self._captures = self.replays = 0
        self._last: Callable[[], Graph | None] = lambda: None
        recurrent = any(isinstance(inner, nn.RNNBase) for inner in module.modules())
        self.reason = "it has recurrent layers, which make lists of their weights anew" if recurrent else ""

    @property
    def graphs(self) -> int:
        """Signatures that are captured."""
        return sum(signature.graph is not None for signature in self._signatures.values())

    def __deepcopy__(self, memo: Any) -> ModuleReplay:
        return _Eager(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Eager, (self.name,)

    def release_gradients(self, zeroed: Set[int] = frozenset()) -> None:
        """Copy each ``.grad`` out of the memory that all graphs share; drop it for ``zeroed`` parameters."""
        for signature in self._signatures.values():
            if signature.graph is not None:
                signature.graph.release_gradients(zeroed)

    def is_of(self, module: nn.Module) -> bool:
        """Return True if this replays ``module``, and not one that ``module`` is a shallow copy of."""
        return self._module() in (module, None)

    def close(self) -> None:
        """Free the graphs."""
        self._signatures.clear()
        self._recorder = None
        free_cache()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return ``forward(*args, **kwargs)``, eagerly or from a graph."""
        module = self._module()
        if self.reason or module is None or not module.training or not _can_replay():
            return forward(*args, **kwargs)
        try:
            call, key = parse_call(args, kwargs)
            signature = self._signatures.get(key)
            if signature is None:
                if len(self._signatures) == MAX_GRAPHS:
                    return forward(*args, **kwargs)
                signature = self._signatures[key] = _Signature()
            if signature.graph is None:
                if signature.backward_refusal:
                    raise RefusedError(signature.backward_refusal)
                if signature.alike < ALIKE_CALLS or not signature.observations.graded:
                    return self._watch(signature, module, forward, args, kwargs)
                if self._is_in_use():  # a capture would overwrite the pool of all graphs
                    return forward(*args, **kwargs)
                self._capture(signature, module, forward, call)
        except RefusedError as reason:
            self._refuse(str(reason))
            return forward(*args, **kwargs)
        graph, dependencies = signature.graph, signature.dependencies
        assert graph is not None
        assert dependencies is not None
        if not dependencies.unchanged():
            signature.mismatches += 1
            if signature.mismatches >= MAX_MISMATCHES:
                del self._signatures[key]  # to watch and capture it anew
            return forward(*args, **kwargs)
        signature.mismatches = 0
        signature.replays += 1
        if self._is_in_use():
            return forward(*args, **kwargs)
        if signature.replays == 2:  # gradients of eager steps are gone
            free_cache()
        self.release_gradients()
        self.replays += 1
        self._last = weakref.ref(graph)
        return graph(call.tensors)

    def _refuse(self, reason: str) -> None:
        self.close()
        self.reason = reason

    def _is_in_use(self) -> bool:
        """Return True if somebody still needs what the last replay of any graph has written."""
        graphs = [self._last(), *(signature.graph for signature in self._signatures.values())]
        return any(graph is not None and graph.is_in_use() for graph in graphs)

    def _watch(
        self,
        signature: _Signature,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call eagerly, and compare what Python does with the call before.

        Raises:
            RefusedError: After ``MAX_WATCHED`` calls.
        """
        # === The call ===
        before = snapshot(module)
        leaves, spec = tree_flatten((args, dict(kwargs)))
        versions = list(map(version_of, leaves))
        with OperationLog(module, leaves) as operations:
            outputs = forward(*args, **kwargs)
        if not any(y.requires_grad for y in tensors_in(outputs)):  # a module that is frozen for now
            return outputs
        operations.log.append([leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, CONSTANTS)])
        # === Can it be replayed? ===
        refusal = describe_change(before, snapshot(module)) or operations.refusal or find_hooks(module)
        leaves_now, spec_now = tree_flatten((args, dict(kwargs)))
        same = spec_now == spec and all(map(is_, leaves, leaves_now)) and versions == list(map(version_of, leaves))
        refusal = refusal or ("" if same else "it writes to its arguments")
        # === Is it like the call before? ===
        log, signature.log = signature.log or [], None if refusal else operations.log
        signature.alike = signature.alike + 1 if log == signature.log else 0
        signature.watched += 1
        signature.host_read = operations.host_read
        if signature.watched >= MAX_WATCHED:
            other = f"it does something else in each call{first_difference(log, operations.log)}"
            other = "none of its outputs gets a gradient" if signature.alike else other
            self._refuse(refusal or operations.host_read or other)
        # === Observations for a capture ===
        signature.observe(constants=None if operations.host_read else operations.constants)
        tasks, aliases = set[int](), dict[int, Tensor]()
        for number, y in enumerate(tensors_in(outputs)):
            if y.grad_fn is not None:
                # An alias gets no gradient from other outputs, such as logits get from a loss in the module.
                alias = aliases[id(y)] = y.view_as(y) if y.layout == torch.strided else y
                alias.register_hook(partial(signature.observe_gradient, number, tasks))  # type: ignore[no-untyped-call]
            elif y.requires_grad:
                signature.observe(graded=signature.observations.graded | {number})
        return map_tensors(lambda y: aliases.get(id(y), y), outputs)

    def _capture(self, signature: _Signature, module: nn.Module, forward: Callable[..., Any], call: Call) -> None:
        """Capture a call, and compare a replay with eager runs.

        Raises:
            RefusedError: If it cannot be captured, or a replay computes something else.
        """
        self._captures += 1
        if self._captures > MAX_CAPTURES:
            raise RefusedError("its parameters, flags, hooks or sparsities change too often")
        if hooks := find_hooks(module):
            raise RefusedError(hooks)
        signature.dependencies = Dependencies(module)
        is_first = not self.graphs
        if self._recorder is None or is_first:  # with its graphs, the old pool may be gone, too
            self._recorder = self._make_recorder()
        make_trial = self._make_recorder if is_first else None
        try:
            with preserve_state(module):
                signature.graph = capture(self._recorder, module, forward, call, signature.observations, make_trial)
        except RefusedError as reason:
            has_failed = reason.__cause__ is not None  # a capture fails where values are read on the host
            raise RefusedError((has_failed and signature.host_read) or str(reason)) from reason
        signature.log = None


class _Eager(ModuleReplay):
    """The replay of a copied or unpickled module: all calls are eager."""

    def __init__(self, name: str) -> None:
        super().__init__(nn.Identity(), name, CudaRecorder)
        self.reason = "it is a copy"


def _can_replay() -> bool:
    """Return True if one backward follows a call, and no compiler, transform or global hook is active."""
    return (
        torch.is_grad_enabled()
        and not is_compiling()
        and not backward_runs()
        and not dropped_by_checkpoint(top_saved_tensors_hooks(False))
        and not are_functorch_transforms_active()
        and not any_global_hook()
        and not torch.is_inference_mode_enabled()
    )
