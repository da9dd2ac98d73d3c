r"""How much the weight gradient of each layer suffers from what compression would keep of its input.

With ``x`` the input of a layer, ``g`` the gradient of its output and ``x_hat`` what a setting keeps of ``x``, the layer
would learn from ``P = g^T x_hat`` instead of ``G = g^T x``::

    cosine = <G, P> / (|G| |P|)          norm ratio = |P| / |G|          over all values of the weight and all batches

Nothing else differs between a dense and a compressed linear layer or convolution (``operators.linear``), so one forward
and one backward of the model as it is shows this for all layers and settings at once: when the gradient of an output
arrives, ``P`` is computed for one setting after the next, from the values that training would read, and three numbers
of it are kept. Of a layer that is called several times, ``G`` and ``P`` are the sums over its calls: its inputs and
gradients wait for the last one.

All sums stay on the device, in fp64, until ``report`` reads them; batches whose ``G`` is not finite do not count.

Blocks are ranked once a call, in plain torch; a kernel only quantizes those that a setting keeps, as a tensor of which
each row is one block. What is stored of a block depends on its values and its place among those kept, so these are the
values of training, bit for bit, and one or two compiled kernels a number of bits serve all layers and sparsities.
Where a training kernel adds squares in another order than torch, blocks whose norms agree to 24 bits may change places,
and the random choice of ``"swap"`` and ``"unbiased"`` is another one of the same distribution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.analysis.recorder import ModuleNames, eager_stance, is_expanded
from lightning_actprune.analysis.sensitivity_grid import (
    ANY,
    BITS,
    LINEAR,
    SPARSITIES,
    GridSetting,
    SensitivityGrid,
    check_names,
)
from lightning_actprune.analysis.sensitivity_report import LayerSensitivity, SensitivityReport
from lightning_actprune.codec.blocks import (
    ALL_BLOCKS,
    BlockGeometry,
    Blocks,
    block_and_keep,
    block_keys,
    factors,
    rescale,
    selection_keys,
    stored_shape,
    stored_view,
)
from lightning_actprune.codec.dispatch import as_dtype, autocast_dtype, cast, cast_input, in_plain_eager_mode
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.codec.private import DYNAMO, FOR_BACKWARD, require
from lightning_actprune.config import (
    Config,
    Keep,
    Selection,
    TopkOver,
    check_model,
    drops_blocks,
)
from lightning_actprune.convert import candidates, convert_layers, is_converted, new_owner, refusal, revert
from lightning_actprune.operators.attention import Projection, watchers
from lightning_actprune.operators.base import CompressedLayer, torch_class
from lightning_actprune.operators.convolution import (
    Convolution,
    Windows,
    rows_of,
    weight_grad,
    windows_of,
    without_gaps,
)
from lightning_actprune.operators.hooks import ForwardHook, is_recomputation
from lightning_actprune.operators.linear import weight_grad_of
from lightning_actprune.operators.registry import layers, operator_of, weights_of
from lightning_actprune.report import LayerReport

CHUNK = 2**22
"""Values whose squares are in memory at once."""


class LinearInput(NamedTuple):
    """The input of a linear layer, or of a projection inside attention, as backward of the dense layer would read it.

    Args:
        x: The input, cast as by autocast.
        samples_second: Whether it is ``[T, N, E]``, as inside attention.
    """

    x: Tensor
    samples_second: bool

    def call(self, grad_y: Tensor, setting: GridSetting) -> Call:
        """Return the call whose output has the gradient ``grad_y``; sparsity and bits of ``setting`` do not matter."""
        blocks = setting.turned_blocks if self.samples_second else setting.blocks
        # Inside attention, torch makes such a copy if the samples come first in memory.
        x = self.x.contiguous() if self.samples_second else self.x
        stored, transposed = stored_view(x, blocks.block_size, blocks.topk_over)
        grad_y = grad_y.reshape(*x.shape[:-1], grad_y.shape[-1])
        return Call(x, stored, blocks, weight_grad_of(grad_y, blocks, stored_shape(x, transposed), transposed))


class ConvolutionInput(NamedTuple):
    """The input of a convolution, likewise.

    Args:
        x: A batch, cast as by autocast.
        sizes: Those of the weight.
        windows: What each output is computed from.
    """

    x: Tensor
    sizes: torch.Size
    windows: Windows

    def call(self, grad_y: Tensor, setting: GridSetting) -> Call:
        """Return the call whose output has the gradient ``grad_y``, of a batch or of one sample."""
        x, blocks = without_gaps(self.x), setting.blocks
        grad_y = grad_y.unsqueeze(0) if grad_y.dim() < x.dim() else grad_y

        def grad_of(stored: Tensor) -> Tensor:
            grad = weight_grad(stored.contiguous().as_strided(x.shape, x.stride()), grad_y, self.sizes, self.windows)
            return as_dtype(grad, torch.promote_types(grad.dtype, torch.float32))

        stored, _ = stored_view(rows_of(x, blocks.block_size, blocks.topk_over), blocks.block_size, blocks.topk_over)
        return Call(x, stored, blocks, grad_of)


class KeptBlocks(NamedTuple):
    """The blocks that a sparsity keeps.

    Args:
        numbers: Their numbers among the blocks of all samples, in ascending order.
        factors: What each is multiplied by, ``None`` if nothing is.
    """

    numbers: Tensor
    factors: Tensor | None


class Call:
    """A call of a layer whose gradient has arrived: what each setting makes of its weight gradient.

    Args:
        x: The input.
        stored: The same as blocks are cut from it, ``[samples, rows, length]``.
        blocks: How it is cut into blocks and which are kept; the bits do not matter.
        weight_grad: Computes the weight gradient from the input, or what is kept of it, ``[samples * rows, length]``.
    """

    def __init__(self, x: Tensor, stored: Tensor, blocks: Blocks, weight_grad: Callable[[Tensor], Tensor]) -> None:
        self.nbytes = x.nbytes
        self._stored, self._blocks, self._weight_grad = stored, blocks, weight_grad
        self._size, every = block_and_keep(stored, blocks.block_size, 0, 0)
        short = -stored.shape[2] % self._size
        filled = F.pad(stored, (0, short)) if short else stored
        self._values = filled.reshape(-1, self._size)  # [samples * every, block]
        pieces = torch.split(self._values, CHUNK // self._size + 1)
        self._squares = torch.cat([block_keys(piece) for piece in pieces]).view(len(stored), every)
        self._keys = selection_keys(self._squares, blocks.selection)
        self._order = self._keys.sort(dim=1, descending=True, stable=True).indices

    def exact(self) -> Tensor:
        """Return the weight gradient of the dense layer, in fp32, or fp64 of fp64."""
        return self._weight_grad(self._stored.flatten(0, 1))

    def packed(self, kept: KeptBlocks, bits: int) -> Tensor:
        """Return the weight gradient of a layer that keeps these blocks in so many bits, 0 for values as they are."""
        (samples, rows, length), everything = self._stored.shape, len(kept.numbers) == len(self._values)
        values = self._values if everything else self._values.index_select(0, kept.numbers)
        if kept.factors is not None:
            values = rescale(values, kept.factors)
        if bits:
            (count, size), dtype = values.shape, values.dtype
            packed = pack(values[None], size, ALL_BLOCKS, bits)
            del values  # so that one copy of them is in memory
            values = unpack(*packed, count, size, size, bits, dtype)
        if not everything:
            values = self._values.new_zeros(self._values.shape).index_copy_(0, kept.numbers, values)
        return self._weight_grad(values.view(samples * rows, -1)[:, :length])

    def kept(self, parts: int) -> KeptBlocks:
        """Return the blocks that are kept at a sparsity of ``parts`` (see ``codec.blocks``)."""
        (samples, every), keep = self._keys.shape, self._keep(parts)
        first = torch.arange(0, samples * every, every, device=self._keys.device)[:, None]
        numbers = (self._order[:, :keep].sort(dim=1).values + first).flatten()
        if self._blocks.selection != "unbiased" or keep == every:
            return KeptBlocks(numbers, None)
        chosen = torch.zeros_like(self._keys, dtype=torch.bool).scatter_(1, self._order[:, :keep], True)
        return KeptBlocks(numbers, factors(self._squares, self._keys, chosen).flatten()[numbers])

    def energy(self, parts: int) -> Tensor:
        """Return the energy of the blocks of least norm, as many as are dropped, and of all, ``[2]``."""
        kept, total = self._squares.topk(self._keep(parts), dim=1).values.sum(), self._squares.sum()
        return torch.stack([total - kept, total])

    def stored_bytes(self, setting: GridSetting) -> int:
        """Return the bytes that a layer with this setting keeps, by formula."""
        if not setting.keep.changes:
            return self.nbytes
        geometry = BlockGeometry.of_stored(self._stored, self._blocks.block_size, setting.sparsity)
        return geometry.stored_bytes(self._stored.itemsize, setting.blocks.bits)

    def _keep(self, parts: int) -> int:
        return block_and_keep(self._stored, self._blocks.block_size, parts, 0)[1]


LayerInput: TypeAlias = LinearInput | ConvolutionInput
Pair: TypeAlias = tuple[LayerInput, Tensor]
"""An input and the gradient of the output."""


def unreadable(x: Any, y: Any, grid: SensitivityGrid) -> str | None:
    """Return why a call with this input and this output cannot be measured."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return "its input or output is no tensor"
    if x.is_nested or x.layout != torch.strided or not x.is_floating_point() or x.dim() == 0:
        return f"its input is no dense floating-point tensor with features ({x.dtype}, {x.layout})"
    if not in_plain_eager_mode(x.detach()):
        return "its input is a tensor of another class (a DTensor, say), or it runs inside a transform such as vmap"
    if x.dtype == torch.float64 and any(grid.bits):
        return "its input is float64, which cannot be quantized; measure bits=[None] alone"
    return None


@dataclass
class Pending:
    """Calls of one weight in a batch: how many there were, and those whose gradient has arrived."""

    calls: int = 0
    arrived: list[Pair] = field(default_factory=list)


@dataclass(eq=False)
class MeasuredLayer:
    """A layer that is measured.

    Args:
        fqns: All its names.
        layer: The layer.
        grid: The settings.
        sums: Per setting ``<G, P>``, ``<P, P>``, ``<G, G>``, dropped and whole energy, fp64 ``[settings, 5]``.
        dense_bytes: Bytes of all its inputs.
        stored_bytes: The same as each setting would store them.
        pending: What waits in the current batch, by the weight that is multiplied.
        reason: Why it cannot be measured after all.
        unmeasured: Why its calls have shown nothing, if no gradient comes; ``None`` before the first one.
    """

    fqns: list[str]
    layer: nn.Module
    grid: SensitivityGrid
    sums: Tensor | None = None
    dense_bytes: int = 0
    stored_bytes: list[int] = field(default_factory=list)
    pending: dict[Any, Pending] = field(default_factory=dict)
    reason: str | None = None
    unmeasured: str | None = None

    @property
    def name(self) -> str:
        """The first name of the layer."""
        return self.fqns[0]

    @property
    def kind(self) -> str:
        """The class of the layer, before it was converted."""
        return torch_class(type(self.layer)).__name__

    @torch.no_grad()
    def measure(self, pending: Pending) -> None:
        """Compare the gradients of all settings with the exact one, and let go of what they were computed from."""
        arrived = [pair for pair in pending.arrived if pair[1].numel()]
        if pending.arrived and not arrived:
            self.unmeasured = "its inputs were empty"
        pending.calls, pending.arrived = 0, []
        if not arrived:
            return
        calls = [given.call(grad_y, self.grid.settings[0]) for given, grad_y in arrived]
        sums = self._compare(calls)
        sums = torch.where(sums[0, 2].isfinite(), sums, 0.0)
        self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
        self.dense_bytes += sum(call.nbytes for call in calls)
        stored = [sum(call.stored_bytes(setting) for call in calls) for setting in self.grid.settings]
        self.stored_bytes = [a + b for a, b in zip(self.stored_bytes or [0] * len(stored), stored, strict=True)]

    def rows(self, sums: list[list[float]]) -> Iterator[LayerSensitivity]:
        """Yield what ``sums``, read, say of each setting; nothing of a layer without a gradient."""
        shares = [stored / self.dense_bytes for stored in self.stored_bytes]
        for setting, (dot, packed, exact, dropped, energy), share in zip(self.grid.settings, sums, shares, strict=True):
            if exact > 0:
                # Two roots, since the product may be no fp64 number.
                cosine = dot / (exact**0.5 * packed**0.5) if packed != 0 else 0.0
                found = cosine, (packed / exact) ** 0.5, dropped / energy if energy else 0.0, share
                yield LayerSensitivity(self.name, self.kind, setting.sparsity, setting.keep.bits, *found)

    def skipped(self) -> LayerReport:
        """Return why nothing was measured."""
        vanished = "its weight gradient was zero or not finite" if self.dense_bytes else None
        reason = self.reason or vanished or self.unmeasured or "it was not called"
        if not any(weight.requires_grad for weight in weights_of(self.layer)):
            reason = "its weight is frozen"
        return LayerReport(self.name, self.kind, operator_of(self.layer) or "linear", reason=reason)

    def _compare(self, calls: list[Call]) -> Tensor:
        """Return the sums of all settings."""
        settings = self.grid.settings
        exact = _total(call.exact() for call in calls)
        products: dict[GridSetting, list[Tensor]] = {}
        energies: dict[int, Tensor] = {}
        for parts in {setting.parts: None for setting in settings}:
            kept = [call.kept(parts) for call in calls]  # for all bits
            energies[parts] = torch.stack([call.energy(parts) for call in calls]).sum(0, dtype=torch.float64)
            for setting in settings:
                if setting.parts == parts:
                    bits = setting.keep.stored_bits
                    grads = (call.packed(blocks, bits) for call, blocks in zip(calls, kept, strict=True))
                    packed = _total(grads) if setting.keep.changes else exact
                    products[setting] = [_dot(exact, packed), _dot(packed, packed)]
        dots = torch.stack([product for setting in settings for product in products[setting]]).view(-1, 2)
        squares = _dot(exact, exact).expand(len(settings), 1)
        return torch.cat([dots, squares, torch.stack([energies[setting.parts] for setting in settings])], dim=1)


def _total(grads: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, of which two are in memory at once."""
    return functools.reduce(torch.add, grads)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


@dataclass
class _Call:
    """One call of a layer: its input, until the gradient of its output was there."""

    given: LayerInput | None


class SensitivityProbe:
    """A context in which training steps show how sensitive each layer is; ``report`` has what they showed.

    Nothing is added to the steps but the time for the weight gradients of all settings: model, outputs and gradients
    are those without it. Layers that are compressed already are measured too. It can be entered again, for one batch
    after another; between them, ``end_batch`` is to be called. Compiled modules run eagerly in it. Inputs are kept
    until the gradient of their output arrives, also those that an activation checkpoint would drop; a
    ``RetentionProbe`` in the same step would take that for a reason not to pack them.

    Args:
        model: The module that holds the layers.
        grid: What is measured, and of which layers.

    Raises:
        ValueError: When it is entered, if a pattern matches no layer.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> with SensitivityProbe(model, SensitivityGrid([0.5, 0.9], [None])) as probe:
        ...     model(torch.randn(16, 64)).square().sum().backward()
        >>> [(row.fqn, row.sparsity, row.cosine > 0.2) for row in probe.report().rows]
        [('0', 0.5, True), ('0', 0.9, True), ('2', 0.5, True), ('2', 0.9, True)]
    """

    def __init__(self, model: nn.Module, grid: SensitivityGrid) -> None:
        self._model = model
        self._grid, self._config = grid, grid.config
        self._layers: dict[nn.Module, MeasuredLayer] = {}
        self._skipped: dict[nn.Module, LayerReport] = {}
        self._handles: list[RemovableHandle] = []
        self._owner = new_owner("SensitivityProbe()")
        self._eager = False
        self._calls: list[_Call] = []
        self._projected: Tensor | None = None
        self.batches = 0
        """Batches that were measured."""

    def __enter__(self) -> Self:
        require(type(self).__name__, FOR_BACKWARD)
        try:
            self._select()
            check_names(self._model, self._grid)
            self._route_attention()
            watchers.append(self)
            for layer in self._layers:
                hook = ForwardHook(self._see_layer)
                # First of all hooks: others may return another output.
                self._handles.append(layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
            if DYNAMO in sys.modules:  # nothing is compiled otherwise, and the import takes seconds
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
        return [leaf for measured in self._layers.values() for leaf in _leaves(measured.layer)]

    def report(self) -> SensitivityReport:
        """Return what was measured so far."""
        names = {fqn: fqns[0] for fqns, _ in layers(self._model) for fqn in fqns}
        names = {name: name for name in ModuleNames(self._model).values()} | names
        report = SensitivityReport([], list(self._skipped.values()), self.batches, self._grid, names)
        known = [(measured, measured.sums) for measured in self._layers.values() if measured.sums is not None]
        read = torch.stack([sums.to(known[0][1].device) for _, sums in known]).tolist() if known else []
        for (measured, _), sums in zip(known, read, strict=True):
            report.rows += measured.rows(sums)
        there = {row.fqn for row in report.rows}
        report.skipped += [m.skipped() for m in self._layers.values() if m.name not in there]
        return report

    def _select(self) -> None:
        """Find the layers to measure, and why some that are named are not; those measured before go on."""
        for candidate in candidates(self._model):
            layer: Any = candidate.layer
            fqns, operator = candidate.fqns, candidate.operator
            if layer in self._layers or not drops_blocks([operator]):
                continue
            if self._config.keep_of(fqns, operator) is None:
                continue
            owner = layer.owner if is_converted(layer) else None
            reason = refusal(candidate, self._config, owner or self._owner)
            if reason is None:
                self._skipped.pop(layer, None)
                self._layers[layer] = MeasuredLayer(fqns, layer, self._grid)
            else:
                kind = torch_class(type(layer)).__name__
                self._skipped[layer] = LayerReport(fqns[0], kind, operator, reason=reason)

    def _route_attention(self) -> None:
        """Let attention modules tell of their projections, which keep their inputs as they are."""
        attentions = {m.out_proj for m in self._model.modules() if isinstance(m, nn.MultiheadAttention)}
        found = [(m.name, layer) for layer, m in self._layers.items() if not is_converted(layer)]
        names = [name for name, layer in found if isinstance(layer, nn.MultiheadAttention) or layer in attentions]
        if names:
            rules: dict[str, Keep | None] = dict.fromkeys(map(escape, names), ANY)
            convert_layers(self._model, Config("paper", rules=rules | {"*": None}), self._owner)
            for _, layer in layers(self._model):
                if isinstance(layer, CompressedLayer) and is_converted(layer) and layer.owner == self._owner:
                    layer.drop_nothing()

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Take note of the input of a projection inside an attention module."""
        if projection.layer in self._layers:  # not one of another model, in another thread
            self._projected = projection.with_samples(x)

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """See a projection as the call of a layer, which it is not."""
        if projection.layer not in self._layers:
            return
        x, self._projected = self._projected, None
        if x is not None and y is not None:
            measured, weight = self._layers[projection.layer], projection.weight
            # Parts of one weight have gradients of their own.
            self._see(measured, (weight.data_ptr(), weight.shape), weight, x, y, turned=True)

    def _see_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
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
        pending.calls += not is_recomputation()  # a checkpoint's second forward is the same call again
        if not y.requires_grad:
            measured.unmeasured = measured.unmeasured or "it was called only where no gradients are recorded"
            return
        measured.unmeasured = "no gradient of its output came: the loss does not depend on it"
        layer, autocast, x = measured.layer, autocast_dtype(x), x.detach()
        if isinstance(layer, Convolution):
            x = x if autocast is None else cast(x, autocast)
            batch = x.unsqueeze(0) if x.dim() < layer.weight.dim() else x
            call = _Call(ConvolutionInput(batch, layer.weight.shape, windows_of(layer)))
        else:
            call = _Call(LinearInput(cast_input(x, autocast, self._grid.block_size), turned))
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


def _leaves(layer: Any) -> list[Tensor]:
    trained = [weight for weight in weights_of(layer) if weight.requires_grad]
    if not trained:
        return []
    bias = layer.in_proj_bias if isinstance(layer, nn.MultiheadAttention) else layer.bias
    if isinstance(bias, Tensor) and bias.requires_grad:
        return [bias]
    if isinstance(layer, nn.MultiheadAttention):
        return trained
    return [layer.weight]  # not the turned view that `weights_of` may return


def measure_sensitivity(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    sparsities: Sequence[float] = SPARSITIES,
    bits: Sequence[int | None] = BITS,
    block_size: int = 32,
    topk_over: TopkOver = "sample",
    selection: Selection = "largest",
    names: Sequence[str] | str = LINEAR,
    seed: int = 0,
) -> SensitivityReport:
    """Measure how close the weight gradients of compressed layers would be to the exact ones, for a grid of settings.

    One forward and one backward a batch, in the mode (``model.train()``) and with the weights that the model has. They
    leave no trace: parameters, gradients, buffers, modes and torch's random numbers are as before. Linear layers,
    transformers' ``Conv1D`` and the projections of ``nn.MultiheadAttention`` are measured, convolutions on request.
    The figures are those of the weights at that moment: measure again later in the training. Gradients alone are asked
    for, which a reentrant checkpoint does not support: layers inside one are not measured.

    Args:
        model: Any module, converted or not.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        batches: A few batches, such as ``itertools.islice(loader, 4)``, on the model's device.
        sparsities: Fractions of blocks dropped, each in [0, 1).
        bits: Bits of each kept value, 2, 3, 4 or 8, or ``None`` for values as they are.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        topk_over: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        selection: Which blocks are kept (see ``codec.blocks``).
        names: Which linear layers and convolutions are measured: patterns as in rules, such as ``"blocks.*.fc1"``; by
            default ``"type:linear"``, linear layers that presets cover.
        seed: Of torch's random numbers during the measurement, such as those of dropout.

    Returns:
        Cosine and norm ratio for each layer and setting, and why other layers were not measured.

    Raises:
        TypeError: If an argument has the wrong type, or ``loss`` returns no tensor.
        ValueError: If an argument is out of range, a pattern matches no layer, no layer can be measured, there is no
            batch, or a loss is no single number that needs a gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batches = [torch.randn(32, 64) for _ in range(2)]
        >>> report = measure_sensitivity(model, lambda x: model(x).square().mean(), batches, sparsities=[0.5, 0.9])
        >>> sorted(report.suggest(min_cosine=0.1))
        ['0', '2']
    """
    check_model(model)
    grid = SensitivityGrid(sparsities, bits, block_size, topk_over, selection, names)
    probe = SensitivityProbe(model, grid)
    seen = False
    with _unchanged(model, _checked_seed(seed)), probe:
        leaves = probe.leaves()
        if not leaves:
            listing = "\n".join(f"  {s.fqn} ({s.kind}): {s.reason}" for s in probe.report().skipped)
            raise ValueError(
                f"No layer of {type(model).__name__} can be measured:\n{listing}\nHINT: widen `names`, or let "
                "weights require gradients."
            )
        for batch in batches:
            seen = True
            torch.autograd.grad(_checked_loss(loss(batch)), leaves, allow_unused=True)
            probe.end_batch()
    if not seen:
        raise ValueError("`batches` must hold at least one batch, got none. HINT: an iterator can be read only once.")
    return probe.report()


@contextmanager
def _unchanged(model: nn.Module, seed: int) -> Iterator[None]:
    """Put buffers, modes and random numbers back in the end; gradients are recorded inside."""
    modes = [(module, module.training) for module in model.modules()]
    names = [(module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module, _ in modes]
    given = [b for _, buffers, _ in names for b in buffers.values() if b is not None and not is_lazy(b)]
    # Nobody writes to what is one value in many places; versions do not show what a batch norm writes.
    values = [(b, b.detach().clone()) for b in given if not is_expanded(b)]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.enable_grad():
        # Not `torch.manual_seed`, which would seed devices whose state is not put back.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, buffers, passing in names:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set.clear()
                module._non_persistent_buffers_set.update(passing)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"`seed` must be an int, got {seed!r}. HINT: it makes dropout the same in every measurement.")
    return int(seed)


def _checked_loss(value: Any) -> Tensor:
    hint = "HINT: return what you would call backward() on, such as cross_entropy(model(x), y)."
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` must return a tensor, got {type(value).__name__}. {hint}")
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"`loss` must return one number that needs a gradient, got shape {tuple(value.shape)} with "
            f"requires_grad={value.requires_grad}. {hint}"
        )
    return value
