"""Choose the bits of each layer in a training step, by the errors that they would bring into weight gradients.

See ``analysis.sensitivity`` for the formula and for how bits are chosen. Here layers are converted, and the step runs
at their settings. An input is there in full while its layer runs, so errors of stored values are predicted as in a
dense step. One number is kept for each row of an input until backward. It is the error at eight bits: scales of blocks
are in proportion to ``1 / (2^v - 1)`` for v bits, so errors at other bits follow.

The weight gradients of the step contain errors ``E`` themselves: their squared norm is ``|G|^2 + E`` in the mean.

The error that is bounded is a mean over all trained values (``second_backward.mean_square``): each parameter's error
counts relative to its own gradient.

What other operators keep brings errors into gradients, too, and a second backward measures all of these in one number
(``analysis.second_backward``). They are part of the error that is bounded. If they take more than half of the bound (of
its square), a batch each shows what each ``Kind`` of their values brings. Kinds get more bits if fewer bytes are kept
then in all: errors are in proportion to ``1 / (2^v - 1)`` there, too.

No kind gets fewer bits than the settings say. For attention that would not be safe: its backward computes
probabilities anew from query and key, so errors grow exponentially with the sharpness that it learns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from glob import escape as escape_glob
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_actprune.analysis.recorder import input_layers
from lightning_actprune.analysis.second_backward import Kind, SecondBackward, add_to, exact_square, mean_square
from lightning_actprune.analysis.sensitivity import (
    ErrorWatcher,
    LayerSensitivity,
    MeasuredLayer,
    allocate,
    find_measurable,
    ratio,
    squared_norms,
    unchanged,
)
from lightning_actprune.config import BITS, TYPE, Config, Family, Keep, Operator, PresetName, check_model, check_share
from lightning_actprune.convert import convert_layers, is_converted, new_owner, revert, revert_layers
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.report import ConversionReport

TOO_LARGE, _WORTH = 1.25, 0.9
"""How much of the bound an error, and of the bytes a new choice, may be until bits change in a training."""
_SHARED = 0.5
"""Share of the square of the expected error below which a layer reads what was stored in more bits."""
_MATTERS = 0.5
"""Share of the square of the bound above which errors of other operators are measured kind by kind."""
_KINDS = [Kind(family, bits) for family in (*get_args(Family), None) for bits in BITS]


class BitsChoice(NamedTuple):
    """The bits of layers.

    Args:
        bits: Bits of a value by name of the layer; ``None`` means that the layer keeps its input unchanged.
        average: Bits of a value over all of them, without headers of blocks.
        error: Predicted error of gradients, each relative to its own norm: root of the mean over all trained values.
        others: The part of it that is not from these layers.
        operators: Bits of other operators that get more than the settings say.
        more_bytes: How many bytes more than with the current bits a step keeps.
    """

    bits: dict[str, int | None]
    average: float
    error: float
    others: float
    operators: dict[Operator, int]
    more_bytes: float

    def rules(self, config: Config) -> dict[str, Keep | None]:
        """Return the choice as rules beside ``config``."""
        layers = {escape_glob(name): bits and Keep(bits, min_rows_for_low_bits=0) for name, bits in self.bits.items()}
        base = config.with_bits(self.operators)
        operators = {TYPE + operator: base.keep_of_all(operator) for operator in self.operators}
        return operators | {name: keep or None for name, keep in layers.items()}


class _Candidate(NamedTuple):
    """A possible choice: the settings of layers, bits of kinds that get more, what is kept, and squares of errors."""

    layers: dict[str, LayerSensitivity]
    kinds: dict[Kind, int]
    nbytes: float
    others: float
    error: float


@dataclass
class _Measured:
    """What batches have shown.

    Args:
        layers: Each layer with its numbers (``_list_numbers``), the square of its own error in the step, and
            that of its exact gradient.
        values: How many trained values have a gradient.
        others: Mean square of the errors from other operators in the first batch.
        counts: How many values other operators keep, by their kind.
        energies: Mean square of the errors that a kind brings, of those that were measured.
    """

    layers: list[tuple[MeasuredLayer, list[float], float, float]]
    values: int
    others: float
    counts: dict[Kind, float]
    energies: dict[Kind, float] = field(default_factory=dict)

    def options(self, kinds: Mapping[Kind, int]) -> list[LayerSensitivity]:
        """Return the settings of layers if kinds have these bits."""
        shared = {bits: min([kinds.get(k, k.bits) for k in self.counts if k.bits == bits] or [bits]) for bits in BITS}
        rows = []
        for layer, (error, expected, nbytes), own, square in self.layers:
            there = shared.get(_bits_of_reader(error, expected, own), 0)
            for bits in (*BITS, None):
                relative = math.sqrt(error * ratio(bits and max(bits, there)) / square)
                rows.append(layer.row(bits, relative, self.values, 0.0 if bits and bits <= there else nbytes))
        return rows

    def candidate(self, layers: dict[str, LayerSensitivity], kinds: dict[Kind, int]) -> _Candidate:
        """Return the choice of these settings and bits."""
        nbytes = math.fsum(count * kinds.get(kind, kind.bits) / 8 for kind, count in self.counts.items())
        nbytes += math.fsum(row.nbytes for row in layers.values())
        less = math.fsum(self.energies[kind] * (1 - ratio(bits) / ratio(kind.bits)) for kind, bits in kinds.items())
        others = max(self.others, math.fsum(self.energies.values())) - less
        return _Candidate(layers, kinds, nbytes, others, others + math.fsum(row.share**2 for row in layers.values()))

    def allocate(self, max_error: float, kinds: dict[Kind, int]) -> _Candidate:
        """Return the choice of fewest bytes that meets the bound, if one does, with these bits of kinds."""
        others = self.candidate({}, kinds).others
        return self.candidate(allocate(self.options(kinds), max_error, others), kinds)

    def allocate_all(self, max_error: float) -> _Candidate:
        """Return the choice of fewest bytes; the measured kinds get one size of bits more after the other."""
        best, bound = self.allocate(max_error, {}), max_error**2 * (1 + 1e-9)  # sums are rounded
        while True:
            now = {kind: best.kinds.get(kind, kind.bits) for kind in self.energies}
            more = [{**best.kinds, k: BITS[BITS.index(bits) + 1]} for k, bits in now.items() if bits < BITS[-1]]
            candidates = [self.allocate(max_error, kinds) for kinds in more]
            candidate = min(candidates, key=lambda each: (max(each.error, bound), each.nbytes), default=None)
            if candidate is None or (best.error <= bound and candidate.nbytes >= best.nbytes):
                return best
            best = candidate


class BitsProbe:
    """Finds out in training steps in how many bits the converted layers should keep their inputs.

    It measures linear layers and convolutions that keep all blocks in few bits and whose weight is trained. Open it in
    one batch after the other until ``choose`` returns a choice.

    Args:
        model: The module that holds the layers.
        owner: Name of their conversion.
        config: Its settings. Layers whose bits a rule names are not measured.
        known: Names of layers that are not measured either.
    """

    def __init__(self, model: nn.Module, owner: str, config: Config, known: Container[str] = ()) -> None:
        self._layers = [
            measured
            for fqns, measured in find_measurable(model, owner)
            if fqns[0] not in known and not config.names_bits(fqns, measured.layer.operator_of(measured.layer))
            if measured.layer.bits and not measured.layer.highest_sparsity
        ]
        self._config = config
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kind: Kind | None = None
        """What errs again in the next batch; everything in the first one."""
        self._measured: _Measured | None = None
        self._start()

    def state(self) -> dict[str, Any] | None:
        """Return what batches have shown, for a checkpoint; ``None`` if no further batch is needed."""
        found = self._measured
        if found is None or self._kind is None:
            return None
        layers = {layer.name: row for layer, *row in found.layers}
        counts, energies = ([(*kind, each) for kind, each in of.items()] for of in (found.counts, found.energies))
        kinds = {"counts": counts, "energies": energies, "kind": tuple(self._kind)}
        return {"layers": layers, "values": found.values, "others": found.others, **kinds}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches of a checkpoint."""
        by_name = {layer.name: layer for layer in self._layers}
        layers = [(by_name[name], *row) for name, row in state["layers"].items() if name in by_name]
        counts, energies = ({Kind(*kind): each for *kind, each in state[name]} for name in ("counts", "energies"))
        self._measured = _Measured(layers, state["values"], state["others"], counts, energies)
        self._kind = Kind(*state["kind"])

    def _start(self) -> None:
        """Forget a batch that came to nothing."""
        first = self._layers if self._kind is None else []
        for measured in first:
            measured.error, measured.nbytes = None, 0
        # The first batch may have shown that a layer is better left dense.
        self._watcher = ErrorWatcher(measured for measured in first if is_converted(measured.layer))
        self._squares: dict[Tensor, Tensor] = {}
        self._others: dict[Tensor, Tensor] = {}
        self._own: dict[Tensor, Tensor] = {}
        self._counts: Counter[Kind] = Counter()
        self._second: SecondBackward | None = None

    def open(self) -> None:
        """Watch the next batch."""
        self._start()
        self._watcher.open()

    def close(self) -> None:
        """Stop watching. Closing twice does nothing."""
        self._watcher.close()
        self._end_second()

    def backward_starts(self, loss: Tensor) -> None:
        """Measure in the backward of a loss which errors come from other operators."""
        self._end_second()
        weights = {weight for layer in self._layers for weight in layer.weights}
        self._second = SecondBackward(loss, weights if self._kind is None else (), self._kind)

    def _end_second(self) -> None:
        if self._second is not None:
            self._second.close()
            self._counts += self._second.counts
            for sums, found in ((self._others, self._second.squares), (self._own, self._second.own)):
                for parameter, square in found.items():
                    add_to(sums, parameter, square)
            self._second = None

    @torch.no_grad()
    def backward_ends(self) -> None:
        """Take note of the gradients, before anybody scales or clips them."""
        self._end_second()
        # With several optimizers, the gradients of one may be gone when those of another arrive.
        self._squares |= squared_norms({parameter: parameter.grad for parameter in self._trained})

    def choose(
        self,
        max_error: float,
        over_ranks: Callable[[Tensor], Tensor],
        mean_over: int,
        current: Mapping[str, int | None] | None = None,
    ) -> BitsChoice | None:
        """Return the bits of all layers that were called, ``None`` if the next batch has to be measured, too.

        That is if there was no gradient, or no finite one, or if the errors of another kind are needed.

        Args:
            max_error: See ``ActivationPruning``.
            over_ranks: Returns the sum of a tensor over the ranks.
            mean_over: How many ranks' gradients the weights have the mean of.
            current: Bits that were chosen before. They stay unless the error is a fourth above the bound, or others
                keep a tenth less.
        """
        found = self._add_batch(over_ranks, mean_over)
        if found is None:
            return None
        now, best = None, found.allocate(max_error, {})
        if current is not None:
            now = found.candidate({row.fqn: row for row in found.options({}) if row.bits == current.get(row.fqn)}, {})
            if now.error < (TOO_LARGE * max_error) ** 2 and best.nbytes > _WORTH * now.nbytes:
                return self._choice(found, now, now)
        if found.others > _MATTERS * max_error**2:
            more = (kind for kind in found.counts if kind not in found.energies and self._operators_in(kind))
            self._kind = next(more, None)
            if self._kind is not None:
                return None
            best = found.allocate_all(max_error)
        return self._choice(found, best, now or best)

    def _add_batch(self, over_ranks: Callable[[Tensor], Tensor], mean_over: int) -> _Measured | None:
        """Return what the batches of all ranks have shown; ``None`` if the last one has shown nothing."""
        layers = self._layers if self._measured is None else []
        zero = torch.zeros_like(next(iter(self._squares.values()), torch.zeros((), dtype=torch.float64)))
        sums = (self._others, mean_over), (self._own, mean_over), (self._squares, 1)
        parts: list[list[Any]] = [[self._counts[kind] for kind in _KINDS]]
        parts += [[of.get(parameter, zero) / ranks for parameter in self._trained] for of, ranks in sums]
        parts += [_list_numbers(measured, mean_over) for measured in layers]
        numbers = torch.stack([torch.as_tensor(number).to(zero) for part in parts for number in part])
        read: list[float] = over_ranks(numbers).tolist()
        each = iter(read)
        counts, noise, own, squares, *rows = ([next(each) for _ in part] for part in parts)
        if not any(squares) or not all(map(math.isfinite, read)):
            return None
        by_parameter = zip(self._trained, noise, own, squares, strict=True)
        found: dict[Tensor, tuple[int, float, float, float]] = {
            p: (p.numel(), exact_square(square, e + o), e, o) for p, e, o, square in by_parameter
        }
        others = mean_square(of[:3] for of in found.values())
        if self._measured is None:
            known = []
            for measured, row in zip(layers, rows, strict=True):
                weights = [found[weight] for weight in measured.weights]
                square = math.fsum(exact for _, exact, _, _ in weights)
                if row[0] and square and is_converted(measured.layer):
                    known.append((measured, row, math.fsum(error for *_, error in weights), square))
            values = sum(count for count, exact, *_ in found.values() if exact)
            kinds = {kind: count for kind, count in zip(_KINDS, counts, strict=True) if count}
            self._measured = _Measured(known, values, others, kinds)
        elif self._kind is not None:
            self._measured.energies[self._kind] = others
        return self._measured

    def _operators_in(self, kind: Kind) -> list[Operator]:
        """Return the operators of a kind that may get more bits; not those whose bits a rule names."""
        if kind.family is None or kind.bits == BITS[-1]:
            return []
        return self._config.operators_in(kind.family, kind.bits)

    def _choice(self, found: _Measured, best: _Candidate, now: _Candidate) -> BitsChoice:
        sizes = {layer.name: nbytes for layer, (*_, nbytes), _, _ in found.layers}
        values = max(math.fsum(sizes.values()), 1.0)
        average = math.fsum((row.bits or 16) * sizes[name] for name, row in best.layers.items()) / values
        operators: dict[Operator, int] = {}
        for kind, bits in best.kinds.items():
            operators |= {each: max(bits, operators.get(each, 0)) for each in self._operators_in(kind)}
        bits_of = {name: row.bits for name, row in best.layers.items()}
        errors = math.sqrt(best.error), math.sqrt(best.others)
        return BitsChoice(bits_of, average, *errors, operators, best.nbytes - now.nbytes)


def _list_numbers(measured: MeasuredLayer, mean_over: int) -> list[Tensor | float]:
    """Return the squares of the errors at eight bits and at the bits of the step, and bytes at eight bits."""
    error = 0.0 if measured.error is None else measured.error / mean_over
    return [error, error * ratio(measured.ran_at), float(measured.nbytes)]


def _bits_of_reader(error: float, expected: float, own: float) -> int:
    """Return the bits in which a norm keeps the input of a layer behind it, 0 if the layer reads its own.

    A layer that reads what a norm keeps errs less than its own bits would let it, and keeps nothing itself.

    Args:
        error: Square of the layer's error at eight bits.
        expected: The same at the bits in which the step would keep the input alone.
        own: Square of the step's own error.
    """
    if not 0 < own < _SHARED * expected:
        return 0
    return min(BITS, key=lambda bits: abs(math.log(own / (error * ratio(bits)))))


def choose_rules(
    model: nn.Module, loss: Callable[[], Tensor], max_error: float, preset: PresetName = "max", *, seed: int = 0
) -> dict[str, Keep | None]:
    """Return rules for ``convert(model, preset, rules=rules)`` by which the gradient errs by ``max_error`` at most.

    A few forwards and backwards with the preset show which bits that takes. They leave no trace: parameters, gradients,
    buffers, modes and torch's random numbers are as before.

    Args:
        model: Any module that is not converted or compiled.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        max_error: Bound on the error of gradients, each relative to its own norm, in [0, 1]: on the root of the mean of
            its square over all trained values.
        preset: The preset; one that quantizes.
        seed: Of torch's random numbers during the measurement.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, no layer is converted, or the gradient is zero or not finite.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> x = torch.randn(2048, 64)
        >>> sorted(choose_rules(model, lambda: model(x).square().mean(), 0.1))
        ['0', '2']
    """
    return choose_bits(model, loss, max_error, preset, seed=seed).rules(Config(preset))


def choose_bits(
    model: nn.Module, loss: Callable[[], Tensor], max_error: float, preset: PresetName = "max", *, seed: int = 0
) -> BitsChoice:
    """Return the choice behind ``choose_rules``, which has the same arguments."""
    config, owner = Config(preset), new_owner("choose_bits()")
    check_share(max_error, "max_error")
    grads = [(parameter, parameter.grad) for parameter in check_model(model).parameters()]
    convert_layers(model, config, owner)
    probe = BitsProbe(model, owner, config)
    choice = None
    try:
        for _ in range(1 + len(_KINDS)):
            for parameter, _ in grads:
                parameter.grad = None
            with unchanged(model, seed):
                probe.open()
                value = loss()
                probe.backward_starts(value)
                value.backward()  # type: ignore[no-untyped-call]
                probe.backward_ends()
                probe.close()
            choice = probe.choose(max_error, lambda numbers: numbers, mean_over=1)
            if choice is not None or probe.state() is None:
                break
    finally:
        probe.close()
        revert(model, owner)
        for parameter, grad in grads:
            parameter.grad = grad
    if choice is None:
        raise ValueError(
            "The gradient of `loss` is zero or not finite, so it has no relative error. HINT: lower the loss scale."
        )
    return choice


def set_bits(model: nn.Module, report: ConversionReport, bits: Mapping[str, int | None]) -> None:
    """Keep the inputs of converted layers in these bits; ``None`` makes a layer dense."""
    layers = {fqns[0]: layer for fqns, layer in input_layers(model)}
    for fqn in [layer.fqn for layer in report.converted if layer.fqn in bits]:
        layer = layers[fqn]
        assert isinstance(layer, CompressedLayer)
        if bits[fqn] is None:
            revert_layers(model, {layer}.__contains__)
            report.leave_dense(fqn, "few bits would bring too large an error into its weight gradient (max_error)")
            continue
        keep = replace(layer.keep, bits=bits[fqn], min_rows_for_low_bits=0)
        layer._state = replace(layer._state, keep=keep)
        report.replace(fqn, keep=keep)
