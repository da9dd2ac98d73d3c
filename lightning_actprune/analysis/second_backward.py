"""Run backward a second time beside the first one, with other errors, to know how large the error of gradients is.

What is stored in few bits errs, by a size that is known. An operation's backward reads it and passes its error on to
all gradients before it. Formulas for that would be many, and none would know what is passed on. Here each operation
therefore runs twice: for the gradient of the training, and for a second one, for which stored values are read with one
more error, as large as their own and independent of it (``codec.formats.other_errors``)::

    d = backward'(g + d) - backward(g)

``d [as g]`` is the difference of both gradients; it starts at zero, and is summed where gradients are. To first order,
the difference that reaches a parameter is a sample of the error that its gradient has itself, with all that later
operations pass on. A parameter has many values, so its squared norm is close to the mean. No dense pass is needed, no
second forward, and no graph is kept for longer: an operation runs again as soon as it has run.

The second run uses plain torch in place of kernels. What comes before any difference and reads nothing that errs, such
as the loss, does not run again. An operation that may not run twice passes on a random difference that is as large
relative to its gradient as that of its output: functions written in Python may have side effects, such as the
recomputation of a checkpoint. Blocks that are dropped are missing from both gradients, so they do not count.

To know which operators bring the error, one batch each is measured in which those of one ``Kind`` alone err again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.codec.formats import other_errors
from lightning_actprune.config import Family
from lightning_actprune.operators.readers import ATTENTION

_MAY_RUN_TWICE = "lightning_actprune.", "torch.nn.modules."
"""Prefixes of the modules whose functions have a backward without side effects."""
_CASTS = 4
"""Casts and views between a parameter and the operation that reads it, at most."""
_CAST = tuple(f"{name}Backward" for name in ("ToCopy", "T", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze"))
"""How the names of their nodes begin."""

_FAMILIES: dict[str, Family] = {
    "activation": "activation",
    "gated": "activation",
    "norm": "norm",
    "channel_norm": "norm",
}
"""Families of the functions in these modules of ``operators``."""

_LEAST = 0.01
"""Least share of the measured square of a gradient that is not taken for its own errors."""

Grads = Sequence[Tensor | None]


class Kind(NamedTuple):
    """Stored values that are alike.

    Args:
        family: Which operators keep them; ``None`` for inputs of layers with a weight.
        bits: In how many bits.
    """

    family: Family | None
    bits: int


class SecondBackward:
    """Measures errors of gradients in the backward of a loss, which computes what it would without it.

    It is a context, or is closed after the backward. Modules must not be compiled: a graph is one operation.

    Args:
        loss: A number with a history, whose ``backward()`` comes next.
        apart: Parameters whose operations' own errors are measured apart, and are not in the second gradient.
        only: What errs again; everything by default.

    Attributes:
        squares: The squared norm of the difference by parameter, fp64, of all that came so far.
        own: The squared norm of the error that the operation reading it brings itself, by parameter of ``apart``.
        counts: How many values were read with another error, by their kind, without those of ``apart``.

    Example:
        >>> from torch import nn
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> _ = convert(model, "balanced")
        >>> loss = model(torch.randn(512, 64)).square().mean()
        >>> with SecondBackward(loss) as second:
        ...     loss.backward()
        >>> 0 < second.relative_error(model.parameters()) < 0.2
        True
    """

    def __init__(self, loss: Tensor, apart: Container[Tensor] = (), only: Kind | None = None) -> None:
        self.squares: dict[Tensor, Tensor] = {}
        self.own: dict[Tensor, Tensor] = {}
        self.counts: Counter[Kind] = Counter()
        self._apart, self._only = apart, only
        self._differences: dict[tuple[Node | None, int], Tensor] = {}
        # Python's object for a node of C++ is the same as long as somebody holds it.
        self._handles: list[tuple[Node, RemovableHandle]] = []
        for node in _nodes_behind(loss):
            parameter = _parameter_at(node)
            hook = self._run_again(node) if parameter is None else self._arrive(node, parameter)
            self._handles.append((node, node.register_hook(hook)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def relative_error(self, parameters: Iterable[Tensor]) -> float:
        """Return the root of ``mean_square`` of the errors of gradients.

        Args:
            parameters: Those whose gradients are there (``grad``).
        """
        found = [
            (p, float(square_of(p.grad)), float(self.squares.get(p, 0.0))) for p in parameters if p.grad is not None
        ]
        return math.sqrt(mean_square((p.numel(), exact_square(square, error), error) for p, square, error in found))

    def close(self) -> None:
        """Remove the hooks. Closing twice does nothing."""
        for _, handle in self._handles:
            handle.remove()
        self._handles = []
        self._differences.clear()

    def _take(self, node: Node, grads: Grads) -> list[Tensor | None]:
        """Return the differences that have arrived at the outputs of a node."""
        return [self._differences.pop((node, place), None) for place in range(len(grads))]

    def _arrive(self, node: Node, parameter: Tensor) -> Callable[[Grads, Grads], None]:
        @torch.no_grad()
        def hook(_: Grads, grads: Grads) -> None:
            (difference,) = self._take(node, grads)
            if difference is not None:
                add_to(self.squares, parameter, square_of(difference))

        return hook

    def _run_again(self, node: Node) -> Callable[[Grads, Grads], None]:
        again, family = _runner(node), _family(node)
        apart = {place: parameter for place, parameter in _parameters_of(node) if parameter in self._apart}
        errs = not apart and (self._only is None or self._only.family == family)
        bits = None if self._only is None else self._only.bits

        @torch.no_grad()
        def hook(results: Grads, grads: Grads) -> None:
            own = _differences(again, grads, results, Counter(), None, apart) if apart and again is not None else None
            for place, difference in enumerate(own or ()):
                if difference is not None:
                    add_to(self.own, apart[place], square_of(difference))
            differences, counts = self._take(node, grads), Counter[int]() if errs else None
            if all(d is None for d in differences) and (again is None or not (errs and _may_read(node))):
                return
            found = None
            if again is not None:
                second = [_sum(grad, d) for grad, d in zip(grads, differences, strict=True)]
                differences = [None] * len(second)  # sums are in their memory
                found = _differences(again, second, results, counts, bits)
                if found is None and second:
                    pairs = zip(grads, second, strict=True)
                    differences = [None if g is None or s is None else s - g for g, s in pairs]
            for place, difference in enumerate(_random(results, grads, differences) if found is None else found):
                if difference is not None:
                    add_to(self._differences, node.next_functions[place], difference)
            for each, count in (counts or {}).items():
                self.counts[Kind(family, each)] += count

        return hook


def exact_square(measured: float, error: float) -> float:
    """Return the square of a gradient without that of its error, which it contains in the mean."""
    return max(measured - error, _LEAST * measured)


def mean_square(parameters: Iterable[tuple[int, float, float]]) -> float:
    """Return the mean, over all values, of the squares of relative errors of gradients.

    Each gradient is compared with itself, since optimizers such as Adam divide it by its own size. An error that
    is larger than the gradient counts as one.

    Args:
        parameters: Number of values of each parameter, squared norm of its gradient, and that of the error.
    """
    found = [(count, min(1.0, error / exact)) for count, exact, error in parameters if exact]
    return math.fsum(count * share for count, share in found) / max(1, sum(count for count, _ in found))


def add_to(sums: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    """Add a value to the sum with this key."""
    sums[key] = value if key not in sums else sums[key] + value


def square_of(grad: Tensor) -> Tensor:
    """Return the squared norm, fp64."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    norm: Tensor = torch.linalg.vector_norm(torch.view_as_real(values) if values.is_complex() else values.float())
    return norm.double().square()


def _nodes_behind(loss: Tensor) -> Iterator[Node]:
    """Yield every node of the graph of a loss."""
    waiting = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        behind = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= behind
        waiting += behind


def _parameter_at(node: Any) -> Tensor | None:
    """Return the parameter whose gradient a node accumulates."""
    parameter: Tensor | None = None if isinstance(node, BackwardCFunction) else getattr(node, "variable", None)
    return parameter


def _parameters_of(node: Node) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter that an operation reads, perhaps after a cast, with the place of its gradient."""
    for place, (before, _) in enumerate(node.next_functions):
        for _ in range(_CASTS):
            if before is not None and before.name().startswith(_CAST):
                before = before.next_functions[0][0]
        parameter = _parameter_at(before)
        if parameter is not None:
            yield place, parameter


def _runner(node: Any) -> Callable[..., Any] | None:
    """Return a function that runs an operation's backward, ``None`` if that may have side effects."""
    if not isinstance(node, BackwardCFunction):
        return node if callable(node) else None
    function = getattr(node, "_forward_cls", None)
    return node.apply if function is not None and function.__module__.startswith(_MAY_RUN_TWICE) else None


def _family(node: Any) -> Family | None:
    """Return the family of an operation."""
    if not isinstance(node, BackwardCFunction):
        return "attention" if node.name() in ATTENTION else "saved"
    module = getattr(getattr(node, "_forward_cls", None), "__module__", "")
    return _FAMILIES.get(module.rpartition(".")[2]) if module.startswith(_MAY_RUN_TWICE[0]) else None


def _may_read(node: Any) -> bool:
    """Return True if an operation reads values in few bits, or is a function in Python, of which nobody knows."""
    if isinstance(node, BackwardCFunction):
        return True
    counts: Counter[int] = Counter()
    with force_backend("reference"), other_errors(counts):
        try:
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
        except Exception:  # as of what a checkpoint has computed again, which may be read once
            return True
    return bool(counts)


def _differences(
    again: Callable[..., Any],
    grads: list[Tensor | None] | Grads,
    results: Grads,
    counts: Counter[int] | None,
    bits: int | None,
    places: Container[int] | None = None,
) -> list[Tensor | None] | None:
    """Return by how much an operation's results for ``grads`` differ; ``None`` if it does not run twice.

    Args:
        again: Runs it.
        grads: Gradients of its outputs. A list is emptied once the operation has run.
        results: Its results in the training, which the engine has reduced to the sizes of inputs.
        counts: Counts the values that are read with other errors; ``None`` if none are.
        bits: Which values err again; all by default.
        places: Of which results; all by default.
    """
    with ExitStack() as stack:
        if counts is not None:
            stack.enter_context(force_backend("reference"))
            stack.enter_context(other_errors(counts, bits))
        try:
            second = again(*grads)
            second = second if isinstance(second, tuple) else (second,)
            if len(second) != len(results):  # functions in Python also return None for what is no tensor
                there = iter([x for x in second if x is not None])
                second = [None if x is None else next(there) for x in results]
            if isinstance(grads, list):
                grads.clear()
            pairs = enumerate(zip(results, second, strict=True))
            wanted = [(a, b) if places is None or place in places else (None, None) for place, (a, b) in pairs]
            return [None if a is None or b is None else b.sum_to_size(a.shape).to(a.dtype) - a for a, b in wanted]
        except Exception:  # what it needs is gone, or there is no memory for it; the training goes on
            return None


def _sum(grad: Tensor | None, difference: Tensor | None) -> Tensor | None:
    """Return the sum, in the memory of the difference if that has its type and layout."""
    if difference is None or grad is None:
        return grad
    is_alike = difference.dtype == grad.dtype and difference.layout == grad.layout == torch.strided
    return difference.add_(grad) if is_alike else grad + difference


def _random(results: Grads, grads: Grads, differences: Grads) -> list[Tensor | None]:
    """Return results with random signs, as large relative to them as differences are to gradients."""
    known = [(grad, d) for grad, d in zip(grads, differences, strict=True) if grad is not None and d is not None]
    if not known:
        return [None] * len(results)
    whole, part = (torch.stack([square_of(x) for x in of]).sum() for of in zip(*known, strict=True))
    share = torch.where(whole > 0, part / whole, 0.0).sqrt()
    return [None if x is None else x * (_signs(x) * share).to(x.dtype) for x in results]


def _signs(x: Tensor) -> Tensor:
    """Return random numbers of 1 and -1, of a generator of their own."""
    generator = torch.Generator(x.device).manual_seed(0)
    return torch.randint(0, 2, x.shape, generator=generator, device=x.device) * 2.0 - 1
