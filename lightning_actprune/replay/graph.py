"""A captured call: forward, and backward as an operation of autograd."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_actprune.codec.private import (
    storage_uses,
)
from lightning_actprune.operators.containers import map_tensors, tensors_in
from lightning_actprune.replay.call import Call, Conduct, uncached_autocast
from lightning_actprune.replay.memory import at_its_place, stream_beside
from lightning_actprune.replay.watch import Constants

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
            stream = stream_beside(torch.cuda.current_device())
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            # A failed capture leaves the generator of random numbers in it; the end of the next one takes it out.
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise
        return graph.replay, results


class Graph:
    """A captured call: forward, and backward from gradients of its outputs.

    Args:
        recorder: What captures it.
        forward: The module's own.
        call: The call.
        parameters: Those that need a gradient.
        aliases: Tensors that ``forward`` computes with in their place.
        around: Puts them there.
        conduct: What eager calls have shown.
        room: Bytes that it takes from the GPU at once; in pieces, more would be left over between them.

    Attributes:
        room: The memory of these, which it does not keep, ``None`` if there are none.
    """

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        call: Call,
        parameters: Sequence[Tensor],
        aliases: Sequence[Tensor],
        around: Callable[[], AbstractContextManager[None]],
        conduct: Conduct,
        room: int,
    ) -> None:
        self.conduct, self.device = conduct, call.tensors[0].device.type  # constants may be what kernels read
        self._inputs, self._needs = list[Tensor](), [x.requires_grad for x in call.tensors]
        wanted, live = list[Tensor](), list[Tensor]()
        self.room: Tensor | None = None

        def run_forward() -> Any:
            if room:
                self.room = at_its_place(torch.empty(room, dtype=torch.uint8, device=call.tensors[0].device))
            # The memory of an input that backward does not need is free once forward has ended.
            inputs = [torch.empty_like(x, requires_grad=x.requires_grad) for x in call.tensors]
            self._inputs = list(map(at_its_place, inputs))
            wanted[:] = [*(x for x in inputs if x.requires_grad), *aliases]
            args, kwargs = call.arguments(inputs)
            with around(), uncached_autocast(self.device), _as_eager(conduct.constants):
                outputs = forward(*args, **kwargs)
            live[:] = tensors_in(outputs)
            return outputs

        self._replay_forward, outputs = recorder.record(run_forward)
        self._outputs = [y.detach() for y in live]
        places = {id(y): number for number, y in enumerate(live)}
        self._template = map_tensors(lambda y: self._outputs[places[id(y)]], outputs)
        self._ends = sorted(conduct.ends)
        self.others = [n for n, y in enumerate(live) if y.requires_grad and n not in conduct.ends]
        """Numbers of the outputs that need a gradient and have got none."""
        self._gradients = [torch.zeros_like(live[number]) for number in self._ends]

        self._reached = [leaves_of([live[number]]) for number in self._ends]

        def run_backward() -> list[Tensor | None]:
            ends = [live[number] for number in self._ends]
            with around(), uncached_autocast(self.device, conduct.autocasts):  # for what runs again
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
        self.run_backward([probe(self._outputs[number]) for number in self._ends])
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
    def leave_gradients(self, zeroed: Set[int] = frozenset()) -> None:
        """Give each ``.grad`` that is an alias memory of its own, since forward writes there.

        Gradients of parameters with ``zeroed`` numbers (``id``) are dropped.
        """
        for parameter, own, _ in self._gradients_of:
            if _is_alias(parameter.grad, own):
                if id(parameter) in zeroed:
                    parameter.grad = None
                else:
                    parameter.grad.data = parameter.grad.data.clone()  # type: ignore[union-attr]

    @torch.no_grad()
    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay backward with these gradients of the outputs that need one; return those of inputs and parameters."""
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


@contextmanager
def _as_eager(constants: Sequence[tuple[str, Any]] | None) -> Iterator[None]:
    """Let a forward that is captured do what eager ones do, if it reads nothing but constants.

    Some code computes something else while it is captured, in order not to read values. This package has imported the
    function that is exchanged here, and so knows better.
    """
    if constants is None:
        yield
        return
    asked = torch.cuda.is_current_stream_capturing
    try:
        torch.cuda.is_current_stream_capturing = lambda: False
        with Constants(constants):
            yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def probe(y: Tensor) -> Tensor:
    """Return the gradient of an output that captures are compared with: of either sign, and no two rows alike."""
    steps = torch.arange(y.numel(), device=y.device, dtype=torch.float32)
    return torch.empty_like(y).copy_(torch.sin(steps + 1).view(y.shape))  # in whose order sums depend on it


def leaves_of(outputs: Sequence[Tensor]) -> set[int]:
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
        needy = {*graph.conduct.ends, *graph.others}
        ctx.mark_non_differentiable(*(y for number, y in enumerate(results) if number not in needy))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph = ctx.graph
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Gradients of a module that is replayed from a CUDA graph have no derivatives. HINT: leave out "
                "`create_graph`, or `cuda_graphs`."
            )
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
        if any(gradients[number] is not None for number in graph.others):
            raise RuntimeError(
                "An output of a module that is replayed from a CUDA graph gets a gradient, and got none when it was "
                "captured. HINT: leave out `cuda_graphs`, or let the loss depend on it from the first step."
            )
        if torch.is_autocast_enabled(graph.device) != graph.conduct.autocasts:
            raise RuntimeError(
                "Backward of a module that is replayed from a CUDA graph runs within autocast and was captured "
                "outside, or the other way round. HINT: call it outside."
            )
        given = graph.differentiable(gradients)
        graph.run_backward(given)
        graph._pending = None
        return None, None, *graph.gradients_of_call(given)
