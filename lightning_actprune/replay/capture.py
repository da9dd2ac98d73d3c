"""Capture a call of a module, and compare a replay with eager runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.second_run import python_generators, set_python_generators
from lightning_actprune.replay.call import Call, Observations, RefusedError, uncached_autocast
from lightning_actprune.replay.graph import Graph, Recorder, leaves_of, probe_gradient
from lightning_actprune.replay.memory import UNWRITTEN, bytes_written, free_cache, on_capture_stream, reserved_bytes

EAGER_RUNS = 3
"""Eager runs of a call before its capture: they show whether they agree in each bit."""
NOISE = 3.0
"""A replay may differ from an eager run by this multiple of the difference between eager runs."""


def capture(
    recorder: Recorder,
    module: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    observations: Observations,
    make_trial: Callable[[], Recorder] | None,
) -> Graph:
    """Return the graph of a call, after a replay has computed what eager runs compute.

    Args:
        recorder: Captures the graph.
        module: The module.
        forward: Its own forward.
        call: The call, as an example of its signature.
        observations: What eager calls have shown.
        make_trial: Makes another recorder, if this one has no graph yet. A first graph then gets as much memory in one
            piece as an eager run reserves, and shows how much of it is enough for the second one.

    Raises:
        RefusedError: If the call cannot be captured, or a replay computes something else.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    aliases = [nn.Parameter(parameter.detach()) for parameter in parameters]
    with_aliases = partial(_exchange, module, parameters, aliases)
    device = call.tensors[0].device
    weights = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers()) if x.numel()}
    generators, buffers = _generators(), [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def reset() -> None:
        _set_generators(generators)
        _set_buffers(buffers)

    def run() -> list[Tensor | None]:
        reset()
        outputs, gradients = _run_eagerly(forward, call, aliases, weights, observations)
        return [*(y.detach() for y in outputs), *gradients, *(buffer for buffer, _ in buffers)]

    try:
        # === Eager runs: what is right, how exactly, and in how much memory ===
        free_cache()
        before = reserved_bytes(device)
        with with_aliases(), on_capture_stream(device):
            expected = [None if x is None else x.to("cpu", copy=True) for x in run()]  # to hold the results once
            room = 0 if make_trial is None else reserved_bytes(device) - before
            noises = [[_difference(*pair) for pair in zip(expected, run(), strict=True)] for _ in range(EAGER_RUNS - 1)]
        free_cache()  # the pool of graphs cannot use what eager runs leave
        # === Captures ===
        reset()
        arguments = forward, call, parameters, aliases, with_aliases, observations
        if room and make_trial is not None:
            room = _measure_room(Graph(make_trial(), *arguments, room), call)
            free_cache()
            reset()
        graph = Graph(recorder, *arguments, room)
        # === Comparison ===
        reset()
        results = [*graph.try_replay(call.tensors), *(buffer for buffer, _ in buffers)]
        differences = [_difference(*pair) for pair in zip(expected, results, strict=True)]
        free_cache()
    except RefusedError:
        raise
    except torch.OutOfMemoryError:
        raise RefusedError("there is not enough memory for its graph") from None
    except Exception as error:
        while isinstance(error.__context__, RuntimeError):  # later errors only say that the capture has failed
            error = error.__context__
        raise RefusedError(f"it cannot be captured: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    noise = list(map(max, *noises))
    rounding = _rounding(call) if any(noise) else 0.0  # if anything differs, the rest may agree by chance
    for name, mine, each in zip(_names(module, call, len(noise)), differences, noise, strict=True):
        if mine > max(NOISE * each, rounding):
            raise RefusedError(
                f"a replay of its graph computes something else than an eager run: {name} differs by {mine:.1e} of its "
                f"norm, and in eager runs by {each:.1e}"
            )
    return graph


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Set buffers and all random generators back at the end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    python, generators = python_generators(), _generators()
    try:
        yield
    finally:
        _set_buffers(buffers)
        set_python_generators(python)
        _set_generators(generators)


@torch.no_grad()
def _set_buffers(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, values in buffers:
        buffer.data.copy_(values)  # does not count as a write for autograd


def _generators() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def _exchange(module: nn.Module, parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> Iterator[None]:
    """Let ``module`` compute with aliases of its parameters.

    Autograd accumulates the gradient of a parameter on the stream that has used the parameter first. A capture must not
    wait for that stream.
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


def _run_eagerly(
    forward: Callable[..., Any], call: Call, parameters: Sequence[Tensor], weights: set[int], observations: Observations
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs, and the gradients of inputs and parameters for ``probe_gradient`` of the outputs."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in call.tensors]
    args, kwargs = call.arguments(inputs)
    with uncached_autocast(inputs[0].device.type):
        outputs = list(tensors_in(forward(*args, **kwargs)))
    sources = [*(x for x in inputs if x.requires_grad), *parameters]
    graded = [outputs[number] for number in sorted(observations.graded)]
    if {y.untyped_storage().data_ptr() for y in outputs if y.numel()} & weights:
        raise RefusedError("it returns one of its parameters or buffers")
    if leaves_of(graded) - {id(x) for x in sources}:
        raise RefusedError("it computes with tensors that need a gradient and are not among its parameters and inputs")
    with uncached_autocast(inputs[0].device.type, observations.backward_autocasts):
        return outputs, list(torch.autograd.grad(graded, sources, list(map(probe_gradient, graded)), allow_unused=True))


def _names(module: nn.Module, call: Call, count: int) -> list[str]:
    """Return the names of ``count`` results: outputs, gradients of inputs and parameters, and buffers."""
    names = [f"the gradient of input {number}" for number, x in enumerate(call.tensors) if x.requires_grad]
    names += [f"the gradient of {name}" for name, parameter in module.named_parameters() if parameter.requires_grad]
    names += [f"buffer {name}" for name, _ in module.named_buffers()]
    return [*(f"output {number}" for number in range(count - len(names))), *names]


def _measure_room(graph: Graph, call: Call) -> int:
    """Return the bytes that a graph uses of its first piece of memory."""
    assert graph.room is not None
    graph.room.fill_(UNWRITTEN)
    graph.try_replay(call.tensors)
    return bytes_written(graph.room)


def _rounding(call: Call) -> float:
    """Return the relative error of one rounding in the coarsest type that a call computes in."""
    device = call.tensors[0].device.type
    types = [x.dtype for x in call.tensors if x.is_floating_point()] or [torch.float32]
    types += [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return max(torch.finfo(dtype).eps for dtype in types)


def _difference(expected: Tensor | None, result: Tensor | None) -> float:
    """Return ``|result - expected| / |expected|``: 0 for the same bits, infinity if only one of them is a tensor."""
    if expected is None or result is None:
        return 0.0 if expected is result else inf
    expected = expected.to(result.device)
    differs = (expected != result) & ~(expected.isnan() & result.isnan())
    if not differs.any():
        return 0.0
    one, other = expected.double(), result.double()
    return float((((other - one)[differs]).norm() / one.norm()).nan_to_num(inf, inf))
