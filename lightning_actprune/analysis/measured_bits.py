"""Choose the bits of each layer in a training step, by the errors that they would bring into weight gradients.

See ``analysis.sensitivity`` for the formula and for how bits are chosen. Here layers are converted, and the step runs
at their settings. An input is there in full while its layer runs, so errors of stored values are predicted as in a
dense step. One number is kept for each row of an input until backward. It is the error at eight bits: scales of blocks
are in proportion to ``1 / (2^v - 1)`` for v bits, so errors at other bits follow.

The weight gradients of the step contain errors ``E`` themselves: their squared norm is ``|G|^2 + E`` in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.analysis.recorder import input_layers
from lightning_actprune.analysis.sensitivity import (
    ErrorWatcher,
    LayerSensitivity,
    MeasuredLayer,
    SensitivityReport,
    Setting,
    squared_norms,
    sum_of,
    weights_in,
)
from lightning_actprune.codec.formats import row_bytes
from lightning_actprune.config import BITS
from lightning_actprune.convert import is_converted, revert_layers
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.convolution import Convolution
from lightning_actprune.report import ConversionReport

_LEAST_GRADIENT = 0.01
"""Least share of the measured square of a gradient that is not taken for its own errors."""


class BitsChoice(NamedTuple):
    """The bits of layers.

    Args:
        bits: Bits of a value by name of the layer, ``None`` for one that keeps its input as it is.
        average: Bits of a value over all of them, without headers of blocks.
        error: Predicted error of all their weight gradients, relative to the norm of the gradient of all parameters.
    """

    bits: dict[str, int | None]
    average: float
    error: float


class BitsProbe:
    """Finds out in one training step in how many bits the converted layers should keep their inputs.

    It measures linear layers and convolutions that keep all blocks in few bits and whose weight is trained.

    Args:
        model: The module that holds the layers.
        owner: Name of their conversion.
        known: Names of layers that are not measured.
    """

    def __init__(self, model: nn.Module, owner: str, known: Mapping[str, int | None]) -> None:
        self._layers: dict[nn.Module, _ConvertedLayer] = {}
        for fqns, module in input_layers(model):
            weights = [weight for weight in weights_in(module) if weight.requires_grad]
            if fqns[0] in known or not weights or is_parametrized(module, "weight"):
                continue
            layer: Any = module
            if is_converted(layer) and layer.owner == owner and layer.bits and not layer.highest_sparsity:
                setting = Setting(8, 0.0, layer.block_size, layer.keep.topk_over)
                self._layers[module] = _ConvertedLayer(fqns, module, (setting,), weights)
        self._watcher = ErrorWatcher(self._layers)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._squares: dict[Tensor, Tensor] = {}

    def open(self) -> None:
        """Watch the layers."""
        self._watcher.open()

    def close(self) -> None:
        """Stop watching. Closing twice does nothing."""
        self._watcher.close()

    @torch.no_grad()
    def backward_ends(self) -> None:
        """Take note of the gradients, before anybody scales or clips them."""
        self._squares = squared_norms({parameter: parameter.grad for parameter in self._trained})

    def choose(self, max_error: float, over_ranks: Callable[[Tensor], Tensor], mean_over: int) -> BitsChoice | None:
        """Return the bits of all layers that were called, ``None`` if gradients were not finite.

        Args:
            max_error: See ``ActivationPruning``.
            over_ranks: Returns the sum of a tensor over the ranks.
            mean_over: How many ranks' gradients the weights have the mean of.
        """
        whole = sum_of(self._squares)
        zero, device = whole.new_zeros(1), whole.device
        errors = torch.cat([zero, *(zero if m.batch is None else m.batch.to(device) for m in self._layers.values())])
        own = [sum_of({w: self._squares[w] for w in m.weights if w in self._squares}) for m in self._layers.values()]
        squares = torch.stack([each.to(device) for each in (whole, *own)])
        (_, total), *sums = over_ranks(torch.stack([errors / mean_over, squares], 1)).tolist()
        # The first batch may also have shown that a layer is better left dense.
        left = [m if is_converted(m.layer) else None for m in self._layers.values()]
        found = [(m, *pair) for m, pair in zip(left, sums, strict=True) if m is not None and all(pair)]
        if not math.isfinite(total + math.fsum(error for _, error, _ in found)):
            return None
        exact = [max(square - error * _ratio(m.ran_at), _LEAST_GRADIENT * square) for m, error, square in found]
        total -= math.fsum(square for _, _, square in found) - math.fsum(exact)
        rows: list[LayerSensitivity] = []
        for (measured, error, _), square in zip(found, exact, strict=True):
            for bits in (*BITS, None):
                energy = error * _ratio(bits)
                relative = math.sqrt(energy / square), math.sqrt(energy / total)
                rows.append(
                    LayerSensitivity(measured.name, measured.kind, 0.0, bits, *relative, measured.bytes_at(bits))
                )
        chosen = SensitivityReport(rows, [], 1, 0, "sample").allocate(max_error, min(1.0, LAYER_SHARE * max_error))
        sizes = {measured.name: measured.nbytes[0] for measured, _, _ in found}
        values = max(sum(sizes.values()), 1)
        average = sum((row.bits or 16) * sizes[name] for name, row in chosen.items()) / values
        error = math.sqrt(math.fsum(row.share**2 for row in chosen.values()))
        return BitsChoice({name: row.bits for name, row in chosen.items()}, average, error)


LAYER_SHARE = 3.0
"""How much larger the error of a single layer may be than that of all layers together."""


class _ConvertedLayer(MeasuredLayer):
    """A converted layer that is measured."""

    ran_at = 0
    """Bits in which the step itself keeps the input, 0 if as it is."""

    def see_input(self, x: Tensor) -> Tensor:
        layer: Any = self.layer
        is_fine = not isinstance(layer, Convolution) and layer._state.is_fine(x)
        self.ran_at = 8 if is_fine else layer.bits
        errors: Tensor = super().see_input(x)
        return errors

    def bytes_at(self, bits: int | None) -> int:
        """Return the bytes of the input in so many bits; ``None``: as it is, in 16 bits."""
        block = self.settings[0].block_size
        size = 2 * block if bits is None else row_bytes(block, bits, 0)
        return self.nbytes[0] * size // row_bytes(block, 8, 0)


def _ratio(bits: int | None) -> float:
    """Return the square of the error at so many bits over that at eight."""
    return (255 / (2**bits - 1)) ** 2 if bits else 0.0


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
