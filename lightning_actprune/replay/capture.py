"""Captures a call, and compares a replay with eager runs."""

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
from lightning_actprune.replay.call import Call, Conduct, RefusedError, uncached_autocast
from lightning_actprune.replay.graph import Graph, Recorder, leaves_of, probe
from lightning_actprune.replay.memory import UNWRITTEN, beside, free_cache, reserved, written

EAGER_RUNS = 3
"""Eager runs of a call before it is captured, which show whether they agree in each bit."""
NOISE = 3.0
"""Differences between eager runs that a replay may differ from them by."""


def capture(
    recorder: Recorder,
    module: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    conduct: Conduct,
    trial: Callable[[], Recorder] | None,
) -> Graph:
    """Return the graph of a call, of which a replay has computed what eager runs do.

    ``conduct``: what eager calls have shown. ``trial``: makes another recorder, if this one has no graph yet: a first
    capture gets as much memory at once as eager runs take, and shows how much of it is enough.

    Raises:
        RefusedError: If it cannot be captured, or a replay computes something else.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    aliases = [nn.Parameter(parameter.detach()) for parameter in parameters]
    around = partial(_exchanged, module, parameters, aliases)
    device = call.tensors[0].device
    own = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers()) if x.numel()}
    drawn, buffers = _generators(), [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def from_the_start() -> None:
        _set_generators(drawn)
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.data.copy_(values)  # which autograd does not take for a change

    def run() -> list[Tensor | None]:
        from_the_start()
        outputs, gradients = _run(forward, call, aliases, own, conduct)
        return [*(y.detach() for y in outputs), *gradients, *(buffer for buffer, _ in buffers)]

    try:
        free_cache()
        before = reserved(device)
        with around(), beside(device):
            one = [None if tensor is None else tensor.to("cpu", copy=True) for tensor in run()]  # to hold them once
            room = 0 if trial is None else reserved(device) - before
            others = [[_difference(*pair) for pair in zip(one, run(), strict=True)] for _ in range(EAGER_RUNS - 1)]
        free_cache()  # which the pool of graphs cannot use
        from_the_start()
        of_call = forward, call, parameters, aliases, around, conduct
        if room and trial is not None:
            room = _enough(Graph(trial(), *of_call, room), call)
            free_cache()
            from_the_start()
        graph = Graph(recorder, *of_call, room)
        from_the_start()
        replayed = [*graph.trial(call.tensors), *(buffer for buffer, _ in buffers)]
        found = [_difference(*pair) for pair in zip(one, replayed, strict=True)]
        free_cache()
    except RefusedError:
        raise
    except torch.OutOfMemoryError:
        raise RefusedError("there is not enough memory for its graph") from None
    except Exception as error:
        while isinstance(error.__context__, RuntimeError):  # of which the others only tell that it failed
            error = error.__context__
        raise RefusedError(f"it cannot be captured: {(str(error).strip() or repr(error)).splitlines()[0]}") from error
    noise = list(map(max, *others))
    least = _precision(call) if any(noise) else 0.0  # then some agree by chance
    if any(mine > max(NOISE * each, least) for mine, each in zip(found, noise, strict=True)):
        raise RefusedError("a replay of its graph computes something else than an eager run")
    return graph


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Leave buffers and all random generators as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    python, drawn = python_generators(), _generators()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.data.copy_(values)  # which autograd does not take for a change
        set_python_generators(python)
        _set_generators(drawn)


def _generators() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


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
    forward: Callable[..., Any], call: Call, parameters: Sequence[Tensor], own: set[int], conduct: Conduct
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs of an eager run, and the gradients of inputs and parameters for those of ``probe``."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in call.tensors]
    args, kwargs = call.arguments(inputs)
    with uncached_autocast(inputs[0].device.type):
        outputs = list(tensors_in(forward(*args, **kwargs)))
    wanted = [*(x for x in inputs if x.requires_grad), *parameters]
    ends = [outputs[number] for number in sorted(conduct.ends)]
    if {y.untyped_storage().data_ptr() for y in outputs if y.numel()} & own:
        raise RefusedError("it returns one of its parameters or buffers")
    if leaves_of(ends) - {id(x) for x in wanted}:
        raise RefusedError("it computes with tensors that need a gradient and are not among its parameters and inputs")
    with uncached_autocast(inputs[0].device.type, conduct.autocasts):
        return outputs, list(torch.autograd.grad(ends, wanted, list(map(probe, ends)), allow_unused=True))


def _enough(graph: Graph, call: Call) -> int:
    """Return how many bytes of its room a graph needs."""
    assert graph.room is not None
    graph.room.fill_(UNWRITTEN)
    graph.trial(call.tensors)
    return written(graph.room)


def _precision(call: Call) -> float:
    """Return the relative error of one rounding in the types that a call computes with."""
    device = call.tensors[0].device.type
    types = [x.dtype for x in call.tensors if x.is_floating_point()] or [torch.float32]
    types += [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return max(torch.finfo(dtype).eps for dtype in types)


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
