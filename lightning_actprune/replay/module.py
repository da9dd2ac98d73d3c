r"""Modules whose forward and backward are replayed from CUDA graphs.

An eager training step whose GPU has little to do waits for Python. A CUDA graph is a list of kernels with all their
arguments, which the GPU runs without it. It has to be right to run the same kernels on the same addresses again, so a
call of a module goes through four states, for each signature (shapes, strides, types, autocast) by itself:

1. *watched*: it runs eagerly while what Python does is noted. Whoever reads values on the host, draws from Python's
   random generators, writes to attributes, or does something else in each call, stays eager.
2. *captured*: from the same parameters, buffers and random numbers, it runs eagerly three times, and is captured.
   Nothing of this changes parameters, gradients, buffers or generators.
3. *compared*: outputs and gradients of a replay are those of the eager runs, bit for bit where these agree, and else
   within three times their difference.
4. *replayed*: as long as storages of parameters and buffers, flags, hooks and sparsities are those of the capture.

A graph has one set of addresses for what it keeps for backward. So a call is eager while backward of the one before has
not run, or while somebody holds its outputs.

Gradients of parameters are the graph's own tensors, of which ``.grad`` becomes an alias: they exist once, unless they
are accumulated over several calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Set
from functools import partial, wraps
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
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.hooks import backward_runs, dropped_by_checkpoint
from lightning_actprune.replay.call import PLAIN, Call, Conduct, RefusedError, take_apart
from lightning_actprune.replay.capture import capture, unchanged
from lightning_actprune.replay.graph import CudaRecorder, Graph, Recorder
from lightning_actprune.replay.memory import free_cache
from lightning_actprune.replay.watch import Operations, State, changes, differing, hooks_in, python_state, version

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


class ReplayedModule(Converted):
    """Mixin of the classes of modules whose calls are replayed."""

    _replay: ModuleReplay


def replayed_class(cls: type[nn.Module]) -> type[Any]:
    """Return what a module of exactly this class becomes; the same one each time."""
    if cls not in _classes:

        @wraps(cls.forward)  # whose signature some look at
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            replay = vars(self).get("_replay")  # None if it was let go, and this method is held by somebody
            if replay is None or not replay.is_of(self):
                return cls.forward(self, *args, **kwargs)
            return replay.call(partial(cls.forward, self), args, kwargs)

        text = f"``{cls.__name__}`` whose calls are replayed from CUDA graphs."
        attributes = {"__doc__": text, "dense_class": cls, "forward": forward}
        _classes[cls] = type(f"Replayed{cls.__name__}", (ReplayedModule, cls), attributes)
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


class _Signature:
    """What is known of the calls of one signature."""

    def __init__(self) -> None:
        self.watched, self.alike, self.reads = 0, 0, ""
        self.conduct = Conduct()
        self.log: list[Any] | None = None
        self.graph: Graph | None = None
        self.state: State | None = None
        self.calls = self.others = 0
        self.other_backward = ""
        """What backward has done that a graph cannot."""

    def sees(self, **conduct: Any) -> None:
        """Note what an eager call has shown."""
        self.conduct = self.conduct._replace(**conduct)

    def sees_gradient(self, number: int, tasks: set[int], gradient: Tensor) -> None:
        """Note that an output gets a gradient; ``tasks``: of autograd, that have come to outputs of the same call."""
        tasks.add(current_graph_task_id())
        if len(tasks) > 1:
            self.other_backward = "backward runs more than once through a call"
        if torch.is_grad_enabled():
            self.other_backward = "its gradients are differentiated (`create_graph`)"
        autocasts = torch.is_autocast_enabled(gradient.device.type)
        self.sees(autocasts=autocasts, ends=self.conduct.ends | {number})


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
        recurrent = any(isinstance(inner, nn.RNNBase) for inner in module.modules())
        self.reason = "it has recurrent layers, which make lists of their weights anew" if recurrent else ""
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

    def leave_gradients(self, zeroed: Set[int] = frozenset()) -> None:
        """Let gradients leave the memory of the graphs, which all share it; drop those of ``zeroed`` parameters."""
        for known in self._signatures.values():
            if known.graph is not None:
                known.graph.leave_gradients(zeroed)

    def is_of(self, module: nn.Module) -> bool:
        """Return whether this is of a module, and not of one that it is a shallow copy of."""
        return self._module() in (module, None)

    def close(self) -> None:
        """Free the graphs."""
        self._signatures.clear()
        self._pool = None
        free_cache()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return ``forward(*args, **kwargs)``, eagerly or from a graph."""
        module = self._module()
        if self.reason or module is None or not module.training or not _may_replay():
            return forward(*args, **kwargs)
        try:
            call, key = take_apart(args, kwargs)
            signature = self._signature(key)
            if signature is None:
                return forward(*args, **kwargs)
            if signature.graph is None:
                if signature.other_backward:
                    raise RefusedError(signature.other_backward)
                if signature.alike < WATCHED or not signature.conduct.ends:
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
            self._refuse(str(reason))
            return forward(*args, **kwargs)
        signature.calls += 1
        graph = signature.graph
        assert graph is not None
        if self._in_use():
            return forward(*args, **kwargs)
        if signature.calls == 2:  # gradients of eager steps have gone
            free_cache()
        self.leave_gradients()
        self.replays += 1
        self._last = weakref.ref(graph)
        return graph(call.tensors)

    def _refuse(self, reason: str) -> None:
        self.close()
        self.reason = reason

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
        before = python_state(module)
        given, spec = tree_flatten((args, dict(kwargs)))
        versions = list(map(version, given))
        with Operations(module, given) as operations:
            outputs = forward(*args, **kwargs)
        if not any(y.requires_grad for y in tensors_in(outputs)):  # as of a module that is frozen for now
            return outputs
        operations.log.append([leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, PLAIN)])
        changed = changes(before, python_state(module)) or operations.reason or hooks_in(module)
        given_after, spec_after = tree_flatten((args, dict(kwargs)))
        same = spec_after == spec and all(map(is_, given, given_after)) and versions == list(map(version, given))
        if not changed and not same:
            changed = "it writes to its arguments"
        alike = not changed and operations.log == signature.log
        log, signature.log = signature.log or [], None if changed else operations.log
        signature.reads = operations.reads
        signature.sees(constants=None if operations.reads else operations.constants)
        tasks = set[int]()
        for number, y in enumerate(tensors_in(outputs)):
            if y.grad_fn is not None:
                y.register_hook(partial(signature.sees_gradient, number, tasks))  # type: ignore[no-untyped-call]
            elif y.requires_grad:
                signature.sees(ends=signature.conduct.ends | {number})
        signature.alike = signature.alike + 1 if alike else 0
        signature.watched += 1
        if signature.watched >= MOST_WATCHED:
            other = f"it does something else in each call{differing(log, operations.log)}"
            other = "none of its outputs gets a gradient" if alike else other
            self._refuse(changed or operations.reads or other)
        return outputs

    def _capture(self, signature: _Signature, module: nn.Module, forward: Callable[..., Any], call: Call) -> None:
        """Capture a call, and compare a replay with eager runs.

        Raises:
            RefusedError: If it cannot be captured, or computes something else.
        """
        self._captures += 1
        if self._captures > MOST_CAPTURES:
            raise RefusedError("its parameters, flags, hooks or sparsities change too often")
        if self._pool is None:
            self._pool = self._recorder()
        if hooked := hooks_in(module):
            raise RefusedError(hooked)
        signature.state = State(module)
        with unchanged(module):
            try:
                trial = self._recorder if self._captures == 1 else None
                signature.graph = capture(self._pool, module, forward, call, signature.conduct, trial)
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
        and not any_global_hook()
        and not torch.is_inference_mode_enabled()
    )
