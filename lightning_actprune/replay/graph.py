"""A captured call: forward, and backward as an operation of autograd."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from lightning_actprune.codec.private import storage_uses
from lightning_actprune.operators.containers import map_tensors, tensors_in
from lightning_actprune.replay.call import Call, Observations, uncached_autocast
from lightning_actprune.replay.memory import alias_memory, capture_stream
from lightning_actprune.replay.watch import KnownConstants

SMALL_BYTES = 2**24
"""Outputs up to this size are copied out of the memory of the graph."""


class Recorder(Protocol):
    """Captures work, and replays it."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture ``run``; return the replay, and the results of ``run``, which each replay overwrites."""


class CudaRecorder:
    """Captures CUDA graphs that share one pool of memory: only one of them is in use at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``Recorder``."""
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(torch.cuda.current_device())
        try:
            # "thread_local": threads that load data may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            # A failed capture leaves the random generator in capture mode; the end of another capture resets it.
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")
            raise
        return graph.replay, results


class Graph:
    """A captured call: forward, and backward from gradients of its outputs.

    Args:
        recorder: Captures both.
        forward: The module's own forward.
        call: The call, as an example of its signature.
        parameters: Those that need a gradient.
        aliases: What ``forward`` computes with in place of ``parameters``.
        with_aliases: Puts the aliases into the module.
        observations: What eager calls have shown.
        room: Bytes that the graph takes from the GPU in one piece. Several pieces would leave gaps.

    Attributes:
        room: That piece of memory, which the graph does not own; ``None`` for 0 bytes.
        ungraded: Indices of the outputs that need a gradient and have got none.
    """

    def __init__(
        self,
        recorder: Recorder,
        forward: Callable[..., Any],
        call: Call,
        parameters: Sequence[Tensor],
        aliases: Sequence[Tensor],
        with_aliases: Callable[[], AbstractContextManager[None]],
        observations: Observations,
        room: int,
    ) -> None:
        self.observations = observations  # kernels may read its constants
        self.device, graded = call.tensors[0].device.type, sorted(observations.graded)
        self._graded, self._inputs = graded, list[Tensor]()
        sources, live = list[Tensor](), list[Tensor]()
        self.room: Tensor | None = None

        # === Forward ===
        def run_forward() -> Any:
            if room:
                self.room = alias_memory(torch.empty(room, dtype=torch.uint8, device=call.tensors[0].device))
            # Inputs are not owned: the memory of one that backward does not need is free after forward.
            inputs = [torch.empty_like(x, requires_grad=x.requires_grad) for x in call.tensors]
            self._inputs = list(map(alias_memory, inputs))
            sources[:] = [*(x for x in inputs if x.requires_grad), *aliases]
            args, kwargs = call.arguments(inputs)
            with with_aliases(), uncached_autocast(self.device), _hide_capture(observations.constants):
                outputs = forward(*args, **kwargs)
            live[:] = tensors_in(outputs)
            return outputs

        self._replay_forward, outputs = recorder.record(run_forward)
        self._outputs = [y.detach() for y in live]
        self._index_of = {id(y): number for number, y in enumerate(self._outputs)}
        index_of_live = {id(y): number for number, y in enumerate(live)}
        self._template = map_tensors(lambda y: self._outputs[index_of_live[id(y)]], outputs)
        self._is_copied = [y.nbytes <= SMALL_BYTES for y in self._outputs]
        self.ungraded = [n for n, y in enumerate(live) if y.requires_grad and n not in observations.graded]

        # === Backward ===
        self._grad_outputs = [torch.zeros_like(live[number]) for number in graded]
        self._reached = [leaves_of([live[number]]) for number in graded]

        def run_backward() -> list[Tensor | None]:
            outputs = [live[number] for number in graded]
            # Blocks that recompute need the aliases.
            with with_aliases(), uncached_autocast(self.device, observations.backward_autocasts):
                return list(torch.autograd.grad(outputs, sources, self._grad_outputs, allow_unused=True))

        recorded: tuple[Callable[[], None], list[Tensor | None]] = recorder.record(run_backward)
        self._replay_backward, self._gradients = recorded
        live.clear()
        del outputs
        self._pending: weakref.ref[Any] | None = None
        self._uses = [storage_uses(y) for y in self._outputs]

        # === Gradients of inputs and parameters ===
        pairs = iter([(id(x), g) for x, g in zip(sources, self._gradients, strict=True)])
        self._of_inputs = [next(pairs) if x.requires_grad else (0, None) for x in call.tensors]
        triples = [(p, key, g) for p, (key, g) in zip(parameters, pairs, strict=True)]
        self.parameters = [p for p, _, g in triples if g is not None]  # hooks of the others do not run
        # A gradient that shares its memory with another one, or with that of an output, must not become `.grad`.
        storages = Counter(
            g.untyped_storage().data_ptr() for g in (*self._grad_outputs, *self._gradients) if g is not None
        )
        self._of_parameters = [
            (key, g, storages[g.untyped_storage().data_ptr()] == 1) for _, key, g in triples if g is not None
        ]
        self._owned = [
            (p, g, storage_uses(g))
            for p, (_, g, is_owned) in zip(self.parameters, self._of_parameters, strict=True)
            if is_owned
        ]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return the outputs of the module for other tensors."""
        results = _Replay.apply(self, len(tensors), *tensors, *self.parameters)
        return map_tensors(lambda y: results[self._index_of[id(y)]], self._template)

    def try_replay(self, tensors: list[Tensor]) -> list[Tensor | None]:
        """Return outputs and gradients of a replay, for the gradients that eager runs get."""
        self.run_forward(tensors)
        self.run_backward([probe_gradient(self._outputs[number]) for number in self._graded])
        return [*self._outputs, *self._gradients]

    def is_in_use(self) -> bool:
        """Return True if backward of the last call is still to come, or somebody holds its outputs or gradients."""
        if self._pending is not None and self._pending() is not None:
            return True
        if any(storage_uses(y) > uses for y, uses in zip(self._outputs, self._uses, strict=True)):
            return True
        return any(storage_uses(g) > uses + _is_alias(p.grad, g) for p, g, uses in self._owned)

    @torch.no_grad()
    def run_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay forward; return the outputs, small ones as copies."""
        for buffer, x in zip(self._inputs, tensors, strict=True):
            buffer.copy_(x)
        self._replay_forward()
        pairs = zip(self._outputs, self._is_copied, strict=True)
        return tuple(y.clone() if is_copied else y.detach() for y, is_copied in pairs)

    @torch.no_grad()
    def run_backward(self, grad_outputs: Sequence[Tensor | None]) -> None:
        """Replay backward from gradients of the graded outputs."""
        for buffer, grad_output in zip(self._grad_outputs, grad_outputs, strict=True):
            if grad_output is None:
                buffer.zero_()
            else:
                buffer.copy_(grad_output)
        self._replay_backward()

    @torch.no_grad()
    def release_gradients(self, zeroed: Set[int] = frozenset()) -> None:
        """Copy each ``.grad`` out of the memory of the graph, which forward overwrites.

        Args:
            zeroed: Numbers (``id``) of parameters whose ``.grad`` is dropped instead.
        """
        for parameter, gradient, _ in self._owned:
            if _is_alias(parameter.grad, gradient):
                if id(parameter) in zeroed:
                    parameter.grad = None
                else:
                    parameter.grad.data = parameter.grad.data.clone()  # type: ignore[union-attr]

    def output_versions(self) -> list[int]:
        """Return how often each output was written to that backward may read."""
        return [y._version for y, is_copied in zip(self._outputs, self._is_copied, strict=True) if not is_copied]

    def gradients(self, grad_outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of inputs, copied, and of parameters, uncopied, as they may become ``.grad``.

        ``None`` for what reaches only outputs without a gradient.
        """
        pairs = zip(self._reached, grad_outputs, strict=True)
        reached = set[int]().union(*(leaves for leaves, grad_output in pairs if grad_output is not None))
        of_inputs = [None if g is None or key not in reached else g.clone() for key, g in self._of_inputs]
        of_parameters = [
            (g.detach() if is_owned else g.clone()) if key in reached else None
            for key, g, is_owned in self._of_parameters
        ]
        return [*of_inputs, *of_parameters]


@contextmanager
def _hide_capture(constants: Sequence[tuple[str, Any]] | None) -> Iterator[None]:
    """Let code that reads only constants not know that it is captured, since some code computes something else then.

    Modules of this package have imported the function that is replaced here, and still know.
    """
    if constants is None:
        yield
        return
    original = torch.cuda.is_current_stream_capturing
    try:
        torch.cuda.is_current_stream_capturing = lambda: False
        with KnownConstants(constants):
            yield
    finally:
        torch.cuda.is_current_stream_capturing = original


def probe_gradient(y: Tensor) -> Tensor:
    """Return a gradient of an output for comparisons: of either sign, with no two rows alike."""
    steps = torch.arange(y.numel(), device=y.device, dtype=torch.float32)
    return torch.empty_like(y).copy_(torch.sin(steps + 1).view(y.shape))


def leaves_of(outputs: Sequence[Tensor]) -> set[int]:
    """Return the numbers (``id``) of the leaves that get a gradient from ``outputs``."""
    leaves, visited, nodes = set[int](), set[Any](), list[Any]()
    for y in outputs:
        if y.grad_fn is not None:
            nodes.append(y.grad_fn)
        elif y.requires_grad:
            leaves.add(id(y))
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _is_alias(gradient: Tensor | None, other: Tensor) -> bool:
    return gradient is not None and gradient.data_ptr() == other.data_ptr()


class _Replay(torch.autograd.Function):
    """A replay as an operation: its inputs are those of the module and its parameters."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, count: int, *tensors: Tensor) -> Any:
        ctx.graph = graph
        graph._pending = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.parameter_versions = [parameter._version for parameter in graph.parameters]
        results = graph.run_forward(tensors[:count])
        ctx.output_versions = graph.output_versions()
        needs_grad = {*graph.observations.graded, *graph.ungraded}
        ctx.mark_non_differentiable(*(y for number, y in enumerate(results) if number not in needs_grad))
        return results

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        graph = ctx.graph
        if torch.is_grad_enabled():
            _fail("its gradients have no derivatives", "leave out `create_graph`")
        if graph._pending is None or graph._pending() is not ctx:
            _fail("it keeps what backward needs for one backward", "leave out `retain_graph`")
        if ctx.parameter_versions != [parameter._version for parameter in graph.parameters]:
            _fail("a parameter was modified in place since forward", "call backward before the optimizer steps")
        if ctx.output_versions != graph.output_versions():
            _fail("an output was modified in place before backward", "modify a clone of it")
        if any(grad_outputs[number] is not None for number in graph.ungraded):
            _fail(
                "an output gets a gradient that got none when the module was captured",
                "let the loss depend on it from the first step",
            )
        if torch.is_autocast_enabled(graph.device) != graph.observations.backward_autocasts:
            _fail("backward runs under autocast and was captured without, or vice versa", "call it outside of autocast")
        graded = [grad_outputs[number] for number in graph._graded]
        graph.run_backward(graded)
        graph._pending = None
        return None, None, *graph.gradients(graded)


def _fail(reason: str, hint: str) -> NoReturn:
    raise RuntimeError(
        f"A module that is replayed from a CUDA graph cannot run this backward: {reason}. HINT: {hint}, or train "
        "without `cuda_graphs`."
    )
