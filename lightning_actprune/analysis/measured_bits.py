"""Choose the bits of each layer in a training step, by the errors that they would bring into weight gradients.

See ``analysis.sensitivity`` for the formula and for how bits are chosen. Here layers are converted, and the step runs
at their settings. An input is there in full while its layer runs, so errors of stored values are predicted as in a
dense step. One number is kept for each row of an input until backward. It is the error at eight bits: scales of blocks
are in proportion to ``1 / (2^v - 1)`` for v bits, so errors at other bits follow.

The weight gradients of the step contain errors ``E`` themselves: their squared norm is ``|G|^2 + E`` in the mean.

What other operators keep brings errors into gradients, too, and a second backward measures all of these in one number
(``analysis.second_backward``). They are part of the error that is bounded. Other operators get more bits if fewer bytes
are kept then in all: one size more divides their square by 4.6 at least, from three bits to four.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from glob import escape as escape_glob
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.analysis.recorder import input_layers
from lightning_actprune.analysis.second_backward import LEAST_GRADIENT, SecondBackward
from lightning_actprune.analysis.sensitivity import (
    ErrorWatcher,
    LayerSensitivity,
    MeasuredLayer,
    SensitivityReport,
    Setting,
    squared_norms,
    sum_of,
    unchanged,
    weights_in,
)
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.config import BITS, Config, Keep, PresetName, check_model, check_share
from lightning_actprune.convert import convert_layers, is_converted, new_owner, revert, revert_layers
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.convolution import Convolution
from lightning_actprune.report import ConversionReport

_TOO_LARGE, _WORTH = 1.25, 0.9
"""How much of the bound an error, and of the bytes a new choice, may be until bits change in a training."""
_SHARED = 0.5
"""Share of the square of the expected error below which a layer reads what was stored in more bits."""
_FINER = (7 / 15) ** 2
"""By how much one size more of bits lowers the square of an error, at least (``config.BITS``)."""


class BitsChoice(NamedTuple):
    """The bits of layers.

    Args:
        bits: Bits of a value by name of the layer; ``None`` means that the layer keeps its input unchanged.
        average: Bits of a value over all of them, without headers of blocks.
        error: Predicted error of the gradient of all parameters, relative to its norm.
        others: The part of it that is not from these layers.
        finer: How many sizes of bits other operators get more.
    """

    bits: dict[str, int | None]
    average: float
    error: float
    others: float
    finer: int

    def rules(self, config: Config) -> dict[str, Keep | None]:
        """Return the choice as rules beside ``config``."""
        layers = {escape_glob(name): bits and Keep(bits, min_rows_for_low_bits=0) for name, bits in self.bits.items()}
        return config.finer_rules(self.finer) | {name: keep or None for name, keep in layers.items()}


class BitsProbe:
    """Finds out in one training step in how many bits the converted layers should keep their inputs.

    It measures linear layers and convolutions that keep all blocks in few bits and whose weight is trained.

    Args:
        model: The module that holds the layers.
        owner: Name of their conversion.
        config: Its settings. Layers whose bits a rule names are not measured.
        known: Names of layers that are not measured either.
    """

    def __init__(self, model: nn.Module, owner: str, config: Config, known: Container[str] = ()) -> None:
        self._layers: dict[nn.Module, _ConvertedLayer] = {}
        for fqns, module in input_layers(model):
            weights = [weight for weight in weights_in(module) if weight.requires_grad]
            if fqns[0] in known or not weights or is_parametrized(module, "weight"):
                continue
            layer: Any = module
            if not is_converted(layer) or layer.owner != owner or config.names_bits(fqns, layer.operator_of(layer)):
                continue
            if layer.bits and not layer.highest_sparsity:
                setting = Setting(8, 0.0, layer.block_size, layer.keep.topk_over)
                self._layers[module] = _ConvertedLayer(fqns, module, (setting,), weights)
        self._watcher = ErrorWatcher(self._layers)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._squares: dict[Tensor, Tensor] = {}
        self._others: list[Tensor] = []
        self._counts: Counter[int] = Counter()
        self._second: SecondBackward | None = None

    def open(self) -> None:
        """Watch the layers."""
        self._watcher.open()

    def close(self) -> None:
        """Stop watching. Closing twice does nothing."""
        self._watcher.close()
        self._end_second()

    def backward_starts(self, loss: Tensor) -> None:
        """Measure in the backward of a loss which errors come from other operators."""
        self._end_second()
        weights = {weight for layer in self._layers.values() for weight in layer.weights}
        self._second = SecondBackward(loss, apart=weights)

    def _end_second(self) -> None:
        if self._second is not None:
            self._second.close()
            self._others += [self._second.squares[p] for p in self._trained if p in self._second.squares]
            self._counts += self._second.counts
            for measured in self._layers.values():
                measured.own += [self._second.own[weight] for weight in measured.weights if weight in self._second.own]
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
        """Return the bits of all layers that were called, ``None`` if there was no gradient, or no finite one.

        Args:
            max_error: See ``ActivationPruning``.
            over_ranks: Returns the sum of a tensor over the ranks.
            mean_over: How many ranks' gradients the weights have the mean of.
            current: Bits that were chosen before. They stay unless the error is a fourth above the bound, or others
                keep a tenth less.
        """
        whole = sum_of(self._squares.values())
        zero = torch.zeros_like(whole)
        others = torch.stack([zero, zero, sum_of(self._others).to(whole), whole, zero])
        numbers = torch.stack([others, *(m.numbers(self._squares).to(whole) for m in self._layers.values())])
        numbers[:, :3] /= mean_over
        counts = numbers.new_tensor([[*(self._counts[bits] for bits in BITS), 0]])
        counts, (_, _, noise, total, _), *rows = over_ranks(torch.cat([counts, numbers])).tolist()
        # The first batch may also have shown that a layer is better left dense.
        left = [m if is_converted(m.layer) else None for m in self._layers.values()]
        found = [(m, row) for m, row in zip(left, rows, strict=True) if m is not None and row[0] and row[3]]
        if not total or not all(map(math.isfinite, (total, noise, *(number for _, row in found for number in row)))):
            return None
        exact = [max(square - own, LEAST_GRADIENT * square) for _, (_, _, own, square, _) in found]
        total -= math.fsum(row[3] for _, row in found) - math.fsum(exact)
        total = max(total - noise, LEAST_GRADIENT * total)

        def options(finer: int) -> list[LayerSensitivity]:
            return [
                m.row(bits, energy, square, total, nbytes)
                for (m, (error, expected, own, _, nbytes)), square in zip(found, exact, strict=True)
                for bits, energy in _energies(error, expected, own, finer)
            ]

        def kept_bytes(chosen: Mapping[str, LayerSensitivity], finer: int) -> float:
            sizes = [BITS[min(at + finer, len(BITS) - 1)] for at in range(len(BITS))]
            others = math.fsum(count * bits / 8 for count, bits in zip(counts[:-1], sizes, strict=True))
            return others + math.fsum(row.nbytes for row in chosen.values())

        def error_of(chosen: Mapping[str, LayerSensitivity], finer: int) -> float:
            return math.sqrt(math.fsum(row.share**2 for row in chosen.values()) + noise * _FINER**finer / total)

        choices = []
        for finer in range(len(BITS)):
            left = max_error**2 - noise * _FINER**finer / total
            if left > 0 or finer == len(BITS) - 1:
                report = SensitivityReport(options(finer), [], 1, 0, "sample")
                chosen = report.allocate(math.sqrt(max(left, 0.0)), min(1.0, LAYER_SHARE * max_error))
                choices.append((kept_bytes(chosen, finer), chosen, finer))
        nbytes, chosen, finer = min(choices, key=lambda choice: choice[0])
        if current is not None:
            now = {row.fqn: row for row in options(0) if row.bits == current.get(row.fqn)}
            if error_of(now, 0) < _TOO_LARGE * max_error and nbytes > _WORTH * kept_bytes(now, 0):
                chosen, finer = now, 0
        sizes = {m.name: row[-1] for m, row in found}
        values = max(math.fsum(sizes.values()), 1.0)
        average = math.fsum((row.bits or 16) * sizes[name] for name, row in chosen.items()) / values
        bits = {name: row.bits for name, row in chosen.items()}
        return BitsChoice(bits, average, error_of(chosen, finer), error_of({}, finer), finer)


LAYER_SHARE = 3.0
"""How much larger the error of a single layer may be than that of all layers together."""


@dataclass(eq=False)
class _ConvertedLayer(MeasuredLayer):
    """A converted layer that is measured.

    Args:
        ran_at: Bits in which the step would keep the input alone.
        own: Squares of the errors that the step itself brings into the gradients of the weights.
    """

    ran_at: int = 0
    own: list[Tensor] = field(default_factory=list)

    def see_input(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        is_fine = not isinstance(layer, Convolution) and layer._state.is_fine(x)
        self.ran_at = 8 if is_fine else layer.bits
        errors: Tensor = super().see_input(x)
        return errors

    def numbers(self, squares: Mapping[Tensor, Tensor]) -> Tensor:
        """Return squares of three errors and of the gradient, and bytes, fp64.

        The errors are those at eight bits, at the bits of the step, and that of the step as it was.
        """
        square = sum_of(squares[weight] for weight in self.weights if weight in squares)
        error = square.new_zeros(()) if self.batch is None else self.batch.sum().to(square.device)
        errors = error, error * _ratio(self.ran_at), sum_of(self.own).to(square)
        return torch.stack([*errors, square, square.new_full((), sum(self.nbytes))])

    def row(self, bits: int | None, energy: float, own: float, total: float, nbytes: float) -> LayerSensitivity:
        """Return the error and the bytes of this layer in ``bits`` bits.

        Args:
            bits: The bits; ``None`` keeps the values unchanged, in 16 bits.
            energy: Square of the error.
            own: Square of the layer's gradient.
            total: Square of the whole gradient.
            nbytes: Bytes at eight bits.
        """
        block = self.settings[0].block_size
        size = 2 * block if bits is None else row_bytes(block, bits, 0)
        size = round(nbytes * size / row_bytes(block, 8, 0))
        return LayerSensitivity(
            self.name, self.kind, 0.0, bits, math.sqrt(energy / own), math.sqrt(energy / total), size
        )


def _energies(error: float, expected: float, own: float, finer: int) -> Iterator[tuple[int | None, float]]:
    """Yield the square of a layer's error at each number of bits.

    If a layer reads what a norm in front of it keeps, it errs less than its own bits would let it. Fewer bits than
    those of the norm change nothing then.

    Args:
        error: Square of the error at eight bits.
        expected: The same at the bits in which the step would keep the input alone.
        own: Square of the step's own error.
        finer: See ``BitsChoice``.
    """
    shared = 0
    if 0 < own < _SHARED * expected:
        nearest = min(BITS, key=lambda bits: abs(math.log(own / (error * _ratio(bits)))))
        shared = BITS[min(BITS.index(nearest) + finer, len(BITS) - 1)]
    for bits in (*BITS, None):
        yield bits, error * _ratio(bits and max(bits, shared))


def _ratio(bits: int | None) -> float:
    """Return how many times larger the squared error is in ``bits`` bits than in eight."""
    return (255 / (2**bits - 1)) ** 2 if bits else 0.0


def choose_rules(
    model: nn.Module, loss: Callable[[], Tensor], max_error: float, preset: PresetName = "max", *, seed: int = 0
) -> dict[str, Keep | None]:
    """Return rules for ``convert(model, preset, rules=rules)`` by which the gradient errs by ``max_error`` at most.

    One forward and one backward with the preset show which bits that takes. They leave no trace: parameters, gradients,
    buffers, modes and torch's random numbers are as before.

    Args:
        model: Any module that is not converted or compiled.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        max_error: Bound on the norm of the error over the norm of the gradient of all parameters, in [0, 1].
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
    try:
        for parameter, _ in grads:
            parameter.grad = None
        with unchanged(model, seed):
            probe.open()
            value = loss()
            probe.backward_starts(value)
            value.backward()  # type: ignore[no-untyped-call]
            probe.backward_ends()
        choice = probe.choose(max_error, lambda numbers: numbers, mean_over=1)
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
