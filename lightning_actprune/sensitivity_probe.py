r"""How much the weight gradient of each layer suffers from what pruning would keep of its input.

With ``x`` the input of a layer, ``g`` the gradient of its output and ``x_hat`` what a setting keeps of ``x``, the layer
would learn from ``P = g^T x_hat`` instead of ``G = g^T x``::

    cosine = <G, P> / (|G| |P|)          norm ratio = |P| / |G|          over all values of the weight and all batches

Nothing else differs between a dense and a pruned layer (``ops.linear``), so one forward and one backward of the model
as it is shows this for all layers and settings at once: when the gradient of an output arrives, ``P`` is computed for
one setting after the other, from the values that training would read (``ops.ranked_blocks``), and three numbers of it
are kept. Of a layer that is called several times, ``G`` and ``P`` are the sums over its calls: its inputs and gradients
wait for the last one.

All sums stay on the device, in fp64, until ``report`` reads them; batches whose ``G`` is not finite do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.conversion import convert_layers, new_owner, revert
from lightning_actprune.conversion_report import SkippedLayer
from lightning_actprune.hooks import ForwardHook, backward_runs, in_reentrant_checkpoint
from lightning_actprune.nn.attention import Projection, watchers
from lightning_actprune.nn.kinds import Layer, operator_kind
from lightning_actprune.nn.settings import PrunedLayer, torch_class
from lightning_actprune.selection import Candidate, candidates, prunable_layers, refusal
from lightning_actprune.sensitivity_grid import SensitivityGrid, check_names
from lightning_actprune.sensitivity_input import ConvolutionInput, LayerInput, LinearInput, unreadable
from lightning_actprune.sensitivity_report import SensitivityReport
from lightning_actprune.sensitivity_sums import SUMS, MeasuredLayer, Pending
from lightning_actprune.shared_context import eager_stance

__all__ = ["SensitivityProbe"]


@dataclass
class _Call:
    """One call of a layer: its input, until the gradient of its output was there."""

    given: LayerInput | None


class SensitivityProbe:
    """A context in which training steps show how sensitive each layer is to pruning; ``report`` has what they showed.

    Nothing is added to the steps but the time for the weight gradients of all settings: model, outputs and gradients
    are those without it. Layers that are pruned already are measured like others. It can be entered again, for one
    batch after another; between them, ``end_batch`` is to be called. Compiled modules run eagerly in it. Inputs are
    held until the gradient of their output arrives, also those that an activation checkpoint would drop; a
    ``HolderProbe`` in the same step would take that for a reason not to prune them.

    Args:
        model: The module that holds the layers.
        grid: What is measured, and of which layers.

    Raises:
        ValueError: When it is entered, if a pattern matches no layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> with SensitivityProbe(model, SensitivityGrid([0.5, 0.9], ["same"])) as probe:
        ...     model(torch.randn(16, 64)).square().sum().backward()
        >>> [(row.fqn, row.sparsity, row.cosine > 0.2) for row in probe.report().rows]
        [('0', 0.5, True), ('0', 0.9, True), ('2', 0.5, True), ('2', 0.9, True)]
    """

    def __init__(self, model: nn.Module, grid: SensitivityGrid) -> None:
        self._model = model
        self._grid = grid
        self._layers: dict[Layer, MeasuredLayer] = {}
        self._skipped: dict[Layer, SkippedLayer] = {}
        self._handles: list[RemovableHandle] = []
        self._owner = new_owner("SensitivityProbe()")
        self._eager = False
        self._calls: list[_Call] = []
        self._projected: Tensor | None = None
        self.batches = 0
        """Batches that were measured."""

    def __enter__(self) -> Self:
        try:
            self._select()
            check_names(self._model, self._grid)
            self._route_attention()
            watchers.append(self)
            for layer in self._layers:
                hook = ForwardHook(self._see_layer)
                # First of all hooks: others may return another output.
                self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
            if "torch._dynamo" in sys.modules:  # nothing is compiled otherwise, and the import takes seconds
                eager_stance.enter()
                self._eager = True
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: Any) -> None:
        if kind is None:
            self.end_batch()
        self.close()

    def end_batch(self) -> None:
        """Measure what still waits for other calls of its layer; called twice, it does nothing."""
        waited = False
        for measured in self._layers.values():
            for pending in measured.pending.values():
                waited = True
                measured.measure(pending)
            measured.pending.clear()
        self._let_go()
        self.batches += waited

    def close(self) -> None:
        """Leave the model as it was; what was measured stays. Closing twice does nothing."""
        if self in watchers:
            watchers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for measured in self._layers.values():
            measured.pending.clear()
        self._let_go()
        self._projected = None
        revert(self._model, self._owner)
        if self._eager:
            self._eager = False
            eager_stance.leave()

    def _let_go(self) -> None:
        """Let go of inputs whose gradient has not arrived: the graph, which somebody may keep, knows their calls."""
        for call in self._calls:
            call.given = None
        self._calls.clear()

    def leaves(self) -> list[Tensor]:
        """Return a parameter of each layer, its bias if there is one, that no gradient reaches but through its output.

        Asking autograd for their gradients alone runs all of backward but the weight gradients.
        """
        return [leaf for measured in self._layers.values() for leaf in _leaves(measured.candidate)]

    def add_up(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks of a distributed training report what was measured on any of them.

        Args:
            over_ranks: Returns the sum of a tensor over the ranks; called once, on each of them with as many values.
        """
        if self._layers:
            device = next(self._model.parameters()).device
            empty = torch.zeros(len(self._grid.settings), SUMS, dtype=torch.float64, device=device)
            found = [empty if m.sums is None else m.sums.to(device) for m in self._layers.values()]
            for measured, sums in zip(self._layers.values(), over_ranks(torch.stack(found)), strict=True):
                measured.sums = sums

    def report(self) -> SensitivityReport:
        """Return what was measured so far."""
        names = {fqn: fqns[0] for fqns, _ in prunable_layers(self._model) for fqn in fqns}
        report = SensitivityReport([], list(self._skipped.values()), self.batches, self._grid, names)
        known = [(measured, measured.sums) for measured in self._layers.values() if measured.sums is not None]
        read = torch.stack([sums.to(known[0][1].device) for _, sums in known]).tolist() if known else []
        for (measured, _), sums in zip(known, read, strict=True):
            report.rows += measured.rows(sums)
        there = {row.fqn for row in report.rows}
        report.skipped += [m.skipped() for m in self._layers.values() if m.name not in there]
        return report

    def _select(self) -> None:
        """Find the layers to measure, and why others are not; those measured before go on."""
        for candidate in candidates(self._model):
            layer = candidate.layer
            kinds = ("linear", "convolution") if self._grid.convolutions else ("linear",)
            if layer in self._layers or operator_kind(layer) not in kinds:
                continue
            owner = layer.owner if isinstance(layer, PrunedLayer) else None
            reason = refusal(candidate, self._grid.options, owner or self._owner)
            if reason is None:
                self._skipped.pop(layer, None)
                self._layers[layer] = MeasuredLayer(candidate, self._grid)
            else:
                self._skipped[layer] = SkippedLayer(candidate.fqns[0], torch_class(type(layer)).__name__, reason)

    def _route_attention(self) -> None:
        """Let attention modules tell of their projections, which keep their inputs as they are."""
        attentions = [m.candidate for layer, m in self._layers.items() if isinstance(layer, nn.MultiheadAttention)]
        attentions += [m.candidate for m in self._layers.values() if m.candidate.attention is not None]
        names = [c.fqns[0] for c in attentions if not isinstance(c.layer, PrunedLayer)]
        if names:
            convert_layers(self._model, self._grid.dense_options(names), self._owner)

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Take note of the input of a projection inside an attention module."""
        self._projected = projection.with_samples(x)

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """See a projection as the call of a layer, which it is not."""
        x, self._projected = self._projected, None
        if projection.layer in self._layers and x is not None and y is not None:
            measured, weight = self._layers[projection.layer], projection.weight
            # Parts of one weight have gradients of their own.
            self._see(measured, (weight.data_ptr(), weight.shape), weight, x, y, turned=True)

    def _see_layer(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        weight: Any = getattr(layer, "weight", None)
        given = (*args, *kwargs.values())
        if isinstance(weight, Tensor) and given:
            self._see(self._layers[layer], None, weight, given[0], y, turned=False)

    def _see(self, measured: MeasuredLayer, key: Any, weight: Tensor, x: Any, y: Any, *, turned: bool) -> None:
        """Wait for the gradient of ``y``, the output of a call with the input ``x``."""
        if not weight.requires_grad:
            return
        reason = unreadable(x, y, self._grid)
        if reason is not None:
            measured.reason = reason
            return
        pending = measured.pending.setdefault(key, Pending())
        pending.calls += not backward_runs()  # a checkpoint's second forward is the same call again
        if not y.requires_grad:
            measured.unmeasured = measured.unmeasured or _unrecorded()
            return
        measured.unmeasured = "no gradient of its output came: the loss does not depend on it"
        layer = measured.candidate.layer
        if isinstance(layer, _ConvNd):
            call = _Call(ConvolutionInput(x, layer))
        else:
            call = _Call(LinearInput(x, turned, self._grid.block_size))

        shape = y.shape

        def arrive(grad_y: Tensor | None) -> None:
            given, call.given = call.given, None
            # Not twice, if a graph is used again, and not once the probe was closed.
            if given is not None and measured.pending.get(key) is pending:
                if grad_y is None:  # autograd's zero
                    pending.calls -= 1
                else:
                    pending.arrived.append((given, grad_y.detach().reshape(shape)))
                if len(pending.arrived) == pending.calls:
                    measured.measure(pending)

        made: Any = _made(y)
        made.register_hook(arrive)
        self._calls.append(call)


def _made(y: Tensor) -> Tensor:
    """Return the tensor of which ``y`` is a view in other words, or ``y``.

    The gradient of a view is not computed if it is changed in place, by an activation function say, but that of what it
    is a view of before that change is.
    """
    base = y._base
    if base is None or not base.requires_grad or base.numel() != y.numel():
        return y
    return base if base.is_contiguous() and y.is_contiguous() else y


def _unrecorded() -> str:
    """Return why the output of a layer has no gradient."""
    if in_reentrant_checkpoint():
        return (
            "it runs inside a reentrant activation checkpoint, of which torch.autograd.grad gets no gradients "
            "(ActivationSensitivity does, and so does use_reentrant=False)"
        )
    return "it was called only where no gradients are recorded"


def _leaves(candidate: Candidate) -> list[Tensor]:
    layer, trained = candidate.layer, [weight for weight in candidate.weights if weight.requires_grad]
    if not trained:
        return []
    bias = layer.in_proj_bias if isinstance(layer, nn.MultiheadAttention) else layer.bias
    if isinstance(bias, Tensor) and bias.requires_grad:
        return [bias]
    if isinstance(layer, nn.MultiheadAttention):
        return trained
    weight: Any = layer.weight  # not the turned view that `weights` may have
    return [weight]
