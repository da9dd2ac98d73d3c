r"""Predict the error that few bits, and dropped blocks, would bring into the weight gradient of each layer.

A weight gradient is a sum over rows of ``x_t [IN]``, the layer's input, and ``g_t [OUT]``, the gradient of its output::

    dW = sum_t g_t x_t^T          and from what is stored, x_t + e_t:          error = sum_t g_t e_t^T

Quantization errors have mean zero and are independent from row to row (``codec.formats``), so products of two rows
cancel in the mean::

    E |error|^2 = sum_t |g_t|^2 E|e_t|^2          E|e_t|^2 = sum of size * scale^2 / 12 over the blocks of the row

Both factors are one number a row. The first one is known when the gradient of the output arrives, the second one when
the input is there. So a usual backward shows the error of all settings at once, and no weight gradient is computed but
the one of training. In a convolution, a value meets the gradients of all outputs in whose windows it is.

The squares of a *dropped* block take the place of its errors. They are no random numbers: if rows lose the same part of
their values, products of two rows do not cancel, and the error is larger than predicted.

**Bits where they count** (``SensitivityReport.suggest``): errors of layers are independent, so their squares add up.
Each layer starts with the setting of fewest bytes. Then the setting that lowers the sum of squares most a byte is
taken, again and again, until the bound is met.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from glob import escape as escape_glob
from itertools import combinations
from numbers import Integral
from typing import Any, TypeVar, get_args

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.analysis.recorder import ModuleNames, eager_stance, input_layers, is_expanded
from lightning_actprune.analysis.second_backward import add_to, square_of
from lightning_actprune.codec.blocks import (
    BlockGeometry,
    TopkGroup,
    block_and_keep,
    block_keys,
    keep_mask,
    sparsity_parts,
    split_blocks,
    stored_view,
)
from lightning_actprune.codec.dispatch import autocast_dtype, cast, cast_input, in_plain_eager_mode
from lightning_actprune.codec.formats import scale_of
from lightning_actprune.codec.private import DYNAMO, FOR_BACKWARD, require
from lightning_actprune.config import (
    TYPE,
    Config,
    Keep,
    Operator,
    TopkOver,
    check_bits,
    check_model,
    check_share,
    drops_blocks,
    matches,
    shorten,
)
from lightning_actprune.convert import (
    DenseView,
    candidates,
    convert_layers,
    is_converted,
    new_owner,
    refusal,
    revert,
)
from lightning_actprune.operators.attention import Projection, watchers
from lightning_actprune.operators.base import CompressedLayer, torch_class
from lightning_actprune.operators.convolution import Convolution, rows_of, windows_of, without_gaps
from lightning_actprune.operators.hooks import ForwardHook, is_recomputation
from lightning_actprune.operators.registry import layers, weights_of
from lightning_actprune.report import LayerReport
from lightning_actprune.schedules import check_sparsity

LINEAR = "type:linear"
CHUNK = 2**22
"""Values whose errors are in memory at once."""
_ANY = Keep(sparsity=0.5)
"""In a configuration that says no more than which layers there are."""
_Value = TypeVar("_Value")
_UNKNOWN = object()
"""In place of a rule: of a layer that was not measured nothing is to be said."""


# === What was found ===================================================================================================


@dataclass(frozen=True)
class LayerSensitivity:
    """The error that one setting would bring into the weight gradient of one layer.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        sparsity: Fraction of blocks dropped.
        bits: Bits of each kept value, ``None`` for values as they are.
        error: Predicted norm of the error over the norm of the layer's exact weight gradient.
        share: What it adds to the error of all gradients, by root of squares: the error, at most one, times the root of
            the share of trained values that are in this layer's weights.
        nbytes: Bytes that the setting keeps of the inputs of all batches.
    """

    fqn: str
    kind: str
    sparsity: float
    bits: int | None
    error: float
    share: float
    nbytes: int


@dataclass
class SensitivityReport:
    """How much weight gradients suffer from compression, by layer and setting.

    Args:
        rows: One for each layer and setting, layer by layer; the last row of a layer keeps its input unchanged.
        skipped: Layers that were not measured, with the reason.
        batches: Batches that were measured.
        block_size: Values per block.
        topk_over: Which blocks compete to be kept.
        layer_names: First name of every layer and module, measured or not, by each of its names.
    """

    rows: list[LayerSensitivity]
    skipped: list[LayerReport]
    batches: int
    block_size: int
    topk_over: TopkOver
    layer_names: dict[str, str] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers and strings; ``pandas.DataFrame(report.to_dict()["rows"])`` is a table."""
        skipped = [{"fqn": layer.fqn, "kind": layer.kind, "reason": layer.reason} for layer in self.skipped]
        blocks = {"block_size": self.block_size, "topk_over": self.topk_over}
        return {"rows": [asdict(row) for row in self.rows], "skipped": skipped, "batches": self.batches, **blocks}

    def allocate(self, max_error: float, max_layer_error: float = 0.3) -> dict[str, LayerSensitivity]:
        """Return a setting for each measured layer: few bytes, and predicted errors of at most these.

        Args:
            max_error: Largest error of gradients, each relative to its own norm, in [0, 1]: root of the mean of its
                square over all trained values.
            max_layer_error: Largest norm of the error of a layer's weight gradient over the norm of this gradient, in
                [0, 1].

        Raises:
            TypeError: If an argument is no number.
            ValueError: If an argument is out of range.
        """
        bound = check_share(max_error, "max_error") ** 2
        most = check_share(max_layer_error, "max_layer_error")
        options: dict[str, list[LayerSensitivity]] = {}
        for row in self.rows:
            if row.error <= most:
                options.setdefault(row.fqn, []).append(row)
        chosen = {fqn: min(rows, key=lambda row: (row.nbytes, row.share)) for fqn, rows in options.items()}
        # Each step takes what lowers the square most a byte. Of equal settings it takes the first, so results repeat.
        queue = [(*_better(rows, chosen[fqn]), place, fqn) for place, (fqn, rows) in enumerate(options.items())]
        heapq.heapify(queue)
        while math.fsum(row.share**2 for row in chosen.values()) > bound and queue[0][0] < 0:
            _, at, place, fqn = heapq.heappop(queue)
            chosen[fqn] = options[fqn][at]
            heapq.heappush(queue, (*_better(options[fqn], chosen[fqn]), place, fqn))
        return chosen

    def suggest(self, max_error: float = 0.1, max_layer_error: float = 0.3) -> dict[str, Keep | None]:
        """Return the settings that ``allocate`` chooses as rules.

        For ``ActivationPruning(rules=rules)`` or ``convert(model, rules=rules)``. A layer that has to keep its input as
        it is stays dense (``None``). Layers that differ in nothing but indices share a pattern.

        Args:
            max_error: See ``allocate``.
            max_layer_error: See ``allocate``.

        Raises:
            TypeError: If an argument is no number.
            ValueError: If an argument is out of range.
        """
        best = {fqn: self._keep_of(row) for fqn, row in self.allocate(max_error, max_layer_error).items()}
        wanted: dict[str, Any] = {name: best.get(first, _UNKNOWN) for name, first in self.layer_names.items()} | best
        return grouped(wanted, best)

    def to_yaml(self, max_error: float = 0.1, max_layer_error: float = 0.3) -> str:
        """Return the rules of ``suggest`` as YAML, an entry of ``init_args`` of ``ActivationPruning``."""
        rules = self.suggest(max_error, max_layer_error)
        lines = [f"  {json.dumps(pattern)}: {_in_yaml(keep)}" for pattern, keep in rules.items()]
        return "\n".join(["rules:", *lines] if lines else ["rules: {}"]) + "\n"

    def table(self, max_layers: int | None = None) -> Table:
        """Return the relative error of each layer's gradient, by setting, to print with ``rich``.

        Args:
            max_layers: Rows that are shown before the rest is counted in one; all by default.
        """
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.bits is not None or row.sparsity:
                found.setdefault(row.fqn, {})[_setting(row)] = row.error
        made = Table("Layer", title="Predicted error of the weight gradient, relative to its norm")
        for name in next(iter(found.values()), {}):
            made.add_column(name, justify="right")
        cut = len(found) if max_layers is None or len(found) <= max_layers + 1 else max_layers
        for fqn, errors in list(found.items())[:cut]:
            made.add_row(escape(fqn), *(f"{error:.3f}" for error in errors.values()))
        if cut < len(found):
            made.add_row(f"... and {len(found) - cut} more")
        return made

    def _keep_of(self, row: LayerSensitivity) -> Keep | None:
        """Return the settings of a row, all of them named, so that no preset changes one."""
        if row.bits is None and not row.sparsity:
            return None
        return Keep(row.bits, row.sparsity, self.block_size, self.topk_over, "largest", 1.0, 0)


def _better(rows: Sequence[LayerSensitivity], now: LayerSensitivity) -> tuple[float, int]:
    """Return by how much the best other setting of a layer changes the square a byte, and its place."""
    changes = [(row.share**2 - now.share**2) / max(row.nbytes - now.nbytes, 1) for row in rows]
    return min((change, place) for place, change in enumerate(changes))


def _setting(row: LayerSensitivity) -> str:
    bits = "as is" if row.bits is None else f"{row.bits} bits"
    return f"{bits}, {row.sparsity:g}" if row.sparsity else bits


def _in_yaml(keep: Keep | None) -> str:
    """Return a rule as YAML reads it."""
    if keep is None:
        return "dense"
    values = {name: "null" if value is None else value for name, value in keep.named.items()}
    shown = {name: _number(value) if isinstance(value, float) else str(value) for name, value in values.items()}
    return f"{{{', '.join(f'{name}: {value}' for name, value in shown.items())}}}"


def _number(value: float) -> str:
    """Return ``value`` as YAML reads it, which takes 1e-05 for a word."""
    return f"{value:.20f}".rstrip("0") if "e" in repr(value) else repr(value)


def grouped(wanted: Mapping[str, _Value], needed: Container[str]) -> dict[str, _Value]:
    """Return patterns that give each name that is ``needed`` its value, and match no name of another value.

    Names that differ in nothing but indices share a pattern, such as ``"blocks.*.fc1"``, if no other value is in the
    way; of several, the one with the most stars. No name matches patterns of different values, so that their order
    says nothing.

    Example:
        >>> wanted = {"blocks.0.fc1": 0.5, "blocks.1.fc1": 0.5, "blocks.0.fc2": 0.8, "blocks.1.fc2": 0.7, "head": None}
        >>> grouped(wanted, [name for name in wanted if name != "head"])
        {'blocks.*.fc1': 0.5, 'blocks.0.fc2': 0.8, 'blocks.1.fc2': 0.7}
    """
    found: dict[str, _Value] = {}
    for name, value in wanted.items():
        if name in needed and not any(fnmatchcase(name, pattern) for pattern in found):
            found[_widest(name, value, wanted)] = value
    return found


def _widest(name: str, value: _Value, wanted: Mapping[str, _Value]) -> str:
    """Return the pattern with the most stars that matches ``name`` and no name of another value."""
    for pattern in _patterns(name):
        matched = [other for other in wanted if fnmatchcase(other, pattern)]
        if len(matched) > 1 and all(wanted[other] == value for other in matched):
            return pattern
    return escape_glob(name)


def _patterns(name: str) -> Iterator[str]:
    """Yield ``name`` with stars in place of its indices, of all of them first; never a star alone."""
    parts = name.split(".")
    indices = [place for place, part in enumerate(parts) if part.isdigit()]
    for stars in range(min(len(indices), len(parts) - 1), 0, -1):
        for chosen in combinations(indices, stars):
            yield ".".join("*" if place in chosen else escape_glob(part) for place, part in enumerate(parts))


# === Errors of a stored input =========================================================================================


@dataclass(frozen=True)
class Setting:
    """One way to keep an input.

    Args:
        bits: Bits of each kept value, 0 for values as they are.
        sparsity: Fraction of blocks dropped.
        block_size: Values per block.
        topk_over: Which blocks compete to be kept.
    """

    bits: int
    sparsity: float
    block_size: int
    topk_over: TopkOver

    def stored(self, x: Tensor, *, is_convolved: bool) -> tuple[Tensor, bool]:
        """Return an input as blocks are cut from it, ``[S, T, L]``, and whether the tokens are its last dimension."""
        rows = rows_of(x, self.block_size, self.topk_over) if is_convolved else x
        topk: TopkGroup = self.topk_over
        return stored_view(rows, self.block_size, topk)

    def errors(self, stored: Tensor) -> Tensor:
        """Return the mean square of the error of each value of ``stored [S, T, L]``, in fp32."""
        parts = sparsity_parts(self.sparsity)
        block, keep = block_and_keep(stored, self.block_size, parts, 0)
        blocks = split_blocks(stored, block)  # [S, T, NB, b]
        errors = torch.zeros(blocks.shape, dtype=torch.float32, device=stored.device)
        if self.bits:
            low, high = blocks.aminmax(dim=-1, keepdim=True)
            errors = errors + scale_of(low.float(), high.float(), self.bits).square() / 12
        if parts:
            kept = keep_mask(block_keys(blocks).flatten(1), keep).view(blocks.shape[:3])
            errors = torch.where(kept.unsqueeze(-1), errors, blocks.float().square())
        return errors.flatten(2)[..., : stored.shape[2]]

    def stored_bytes(self, x: Tensor, *, is_convolved: bool) -> int:
        """Return the bytes that are kept of an input, by formula."""
        if not self.bits and not self.sparsity:
            return x.nbytes
        stored, _ = self.stored(x, is_convolved=is_convolved)
        geometry = BlockGeometry.of_stored(stored, self.block_size, self.sparsity)
        return geometry.stored_bytes(stored.itemsize, self.bits)


def _errors_of_rows(x: Tensor, setting: Setting) -> Tensor:
    """Return the sum of squared errors of each row of the input of a linear layer, ``[..., IN] -> [R]``."""
    stored, along_tokens = setting.stored(x, is_convolved=False)
    return setting.errors(stored).sum(1 if along_tokens else 2).flatten()


def _errors_of_windows(x: Tensor, setting: Setting, layer: Convolution) -> Tensor:
    """Return the sum of squared errors in the window of each output of a convolution.

    ``x [N, C, *spatial]`` has no gaps in memory; the result is ``[N * groups * outputs]``.
    """
    stored, _ = setting.stored(x, is_convolved=True)
    errors = setting.errors(stored).contiguous().as_strided(x.shape, x.stride())
    stride, padding, dilation, groups = windows_of(layer)
    ones = errors.new_ones(groups, x.shape[1] // groups, *layer.kernel_size)
    none = (0,) * len(stride)
    with torch.autocast(x.device.type, enabled=False):  # small errors are zero in fp16
        return torch.convolution(errors, ones, None, stride, padding, dilation, False, none, groups).flatten()


def _squares(grad_y: Tensor, layer: nn.Module) -> Tensor:
    """Return the squares of the gradients of outputs that ``_errors_of_...`` are multiplied by, in fp32."""
    shape = grad_y.shape
    if isinstance(layer, Convolution):
        grad_y, dim = grad_y.reshape(shape[0], layer.groups, -1, *shape[2:]), 2  # [N, groups, OUT / groups, *spatial]
    else:
        grad_y, dim = grad_y.reshape(-1, shape[-1]), 1
    norms: Tensor = torch.linalg.vector_norm(grad_y, dim=dim, dtype=torch.float32)
    return norms.square().flatten()


# === The measurement ==================================================================================================


@dataclass(eq=False)
class MeasuredLayer:
    """A layer that is measured.

    Args:
        fqns: All its names.
        layer: The layer.
        settings: The settings.
        weights: Its trained weights.
        batch: Squared error by setting in the current batch, fp64 ``[settings]``.
        sums: The same and the squared norm of the gradient, of all batches, fp64 ``[settings + 1]``.
        nbytes: Bytes of the inputs by setting.
        reason: Why it was not measured.
    """

    fqns: list[str]
    layer: nn.Module
    settings: Sequence[Setting]
    weights: list[Tensor]
    batch: Tensor | None = None
    sums: Tensor | None = None
    nbytes: list[int] = field(default_factory=list)
    reason: str = "it was not called"

    @property
    def name(self) -> str:
        """The first name of the layer."""
        return self.fqns[0]

    @property
    def kind(self) -> str:
        """The class of the layer, before it was converted."""
        return torch_class(type(self.layer)).__name__

    @torch.no_grad()
    def see_input(self, x: Tensor) -> Tensor:
        """Return the squared errors of an input by setting and row, ``[settings, R]``, and count its bytes."""
        layer = self.layer
        is_convolved = isinstance(layer, Convolution)
        x = without_gaps(x) if is_convolved else x
        nbytes = [setting.stored_bytes(x, is_convolved=is_convolved) for setting in self.settings]
        self.nbytes = [a + b for a, b in zip(self.nbytes or [0] * len(nbytes), nbytes, strict=True)]
        pieces = torch.split(x, max(1, CHUNK * len(x) // x.numel()))
        return torch.stack([torch.cat([self._errors(piece, setting) for piece in pieces]) for setting in self.settings])

    def _errors(self, x: Tensor, setting: Setting) -> Tensor:
        layer = self.layer
        if isinstance(layer, Convolution):
            return _errors_of_windows(x, setting, layer)
        return _errors_of_rows(x, setting)

    @torch.no_grad()
    def see_gradient(self, errors: Tensor, grad_y: Tensor) -> None:
        """Add the errors of one call."""
        energy = (errors * _squares(grad_y, self.layer)).sum(1, dtype=torch.float64)
        self.batch = energy if self.batch is None else self.batch + energy

    def end_batch(self, squares: Mapping[Tensor, Tensor], is_finite: Tensor) -> None:
        """Add a batch if it is finite; ``squares``: the squared norms of the gradients of parameters."""
        batch, self.batch = self.batch, None
        own = [squares[weight] for weight in self.weights if weight in squares]
        if batch is None or not own:
            return
        sums = torch.cat([batch, torch.stack(own).sum().view(1)])
        sums = torch.where(sums.isfinite().all() & is_finite.to(sums.device), sums, 0.0)
        self.sums = sums if self.sums is None else self.sums + sums
        self.reason = "its weight gradient was zero or not finite"

    def rows(self, energies: list[float], values: int) -> Iterator[LayerSensitivity]:
        """Yield what was found; ``energies`` are the sums, read, ``values`` the number of trained values."""
        *errors, own = energies
        for setting, error, nbytes in zip(self.settings, errors, self.nbytes, strict=True):
            relative = math.sqrt(error / own)
            how = setting.sparsity, setting.bits or None, relative, self.share(relative, values)
            yield LayerSensitivity(self.name, self.kind, *how, nbytes)

    def share(self, error: float, values: int) -> float:
        """Return what an error of the weights adds to that of all ``values``."""
        return min(1.0, error) * math.sqrt(sum(weight.numel() for weight in self.weights) / values)


class ErrorWatcher:
    """Hooks that see inputs of layers, and gradients of their outputs, while it is open; compiled modules run eagerly.

    A step computes what it would without it.

    Args:
        layers: The layers that are measured.
    """

    def __init__(self, layers: Mapping[nn.Module, MeasuredLayer]) -> None:
        self._layers = layers
        self._open = ExitStack()
        self._projected: Tensor | None = None

    def open(self) -> None:
        """Watch the layers."""
        with ExitStack() as stack:
            watchers.append(self)
            stack.callback(watchers.remove, self)
            for layer in self._layers:
                hook = ForwardHook(self._see_layer)
                # First of all hooks: others may return another output.
                handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
            if DYNAMO in sys.modules:  # nothing is compiled otherwise, and the import takes seconds
                eager_stance.enter()
                stack.callback(eager_stance.leave)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Remove the hooks. Closing twice does nothing."""
        self._open.close()

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Take note of the input of a projection inside an attention module."""
        if projection.layer in self._layers:  # not one of another model, in another thread
            self._projected = projection.with_samples(x)

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """See a projection as the call of a layer, which it is not."""
        x, self._projected = self._projected, None
        if projection.layer in self._layers and x is not None and y is not None:
            self._see(self._layers[projection.layer], x, y, samples_second=True)

    def _see_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        given = (*args, *kwargs.values())
        if given and not isinstance(layer, nn.MultiheadAttention):
            self._see(self._layers[layer], given[0], y, samples_second=False)

    def _see(self, measured: MeasuredLayer, x: Any, y: Any, *, samples_second: bool) -> None:
        """Wait for the gradient of ``y``, the output of a call with the input ``x``."""
        reason = _unreadable(x, y)
        if reason is not None or not y.requires_grad or is_recomputation():
            measured.reason = reason or measured.reason
            return
        measured.reason = "no gradient of its output came: the loss does not depend on it"
        layer, autocast, shape = measured.layer, autocast_dtype(x), y.shape
        x = x.detach()
        if isinstance(layer, Convolution):
            x = x if autocast is None else cast(x, autocast)
            x = x.unsqueeze(0) if x.dim() < layer.weight.dim() else x
            shape = shape if len(shape) == x.dim() else torch.Size((1, *shape))
        else:
            x = cast_input(x, autocast, measured.settings[0].block_size)
            x = x.transpose(0, 1) if samples_second else x.unsqueeze(0) if x.dim() == 1 else x
            shape = torch.Size((*(x.transpose(0, 1) if samples_second else x).shape[:-1], y.shape[-1]))
        if x.numel() == 0:
            measured.reason = "its inputs were empty"
            return
        errors = measured.see_input(x)

        def arrive(grad_y: Tensor) -> None:
            nonlocal errors
            if errors is not None:  # not twice, if a graph is used again
                grad_y = grad_y.detach().reshape(shape)
                measured.see_gradient(errors, grad_y.transpose(0, 1) if samples_second else grad_y)
                errors = None  # type: ignore[assignment]

        made: Any = _made(y)
        made.register_hook(arrive)


class SensitivityProbe:
    """A context in which training steps show how sensitive layers are; ``report`` has what they showed.

    Converted layers are dense in it, and compiled modules run eagerly. A step computes what it would without it.

    Args:
        model: The module that holds the layers.
        settings: What is measured; the last one keeps inputs as they are.
        names: Which layers, see ``measure_sensitivity``.

    Raises:
        ValueError: When it is entered, if a pattern matches no layer.
    """

    def __init__(self, model: nn.Module, settings: Sequence[Setting], names: Sequence[str]) -> None:
        self._model, self._settings, self._names = model, settings, names
        self._config = _config_of(names)
        self._layers: dict[nn.Module, MeasuredLayer] = {}
        self._watcher = ErrorWatcher(self._layers)
        self._skipped: list[LayerReport] = []
        self._owner = new_owner("measure_sensitivity()")
        self._open = ExitStack()
        self._squares: dict[Tensor, Tensor] = {}
        self.batches = 0
        """Batches that were measured."""

    def __enter__(self) -> SensitivityProbe:
        require("measure_sensitivity", FOR_BACKWARD)
        _check_names(self._model, self._names)
        with ExitStack() as stack:
            for owner in {vars(m)[name].owner for m in self._model.modules() for name in _STATES if name in vars(m)}:
                if owner is not None:
                    view = DenseView()
                    stack.callback(view.close)
                    view.open(self._model, owner)
            self._select()
            stack.callback(revert, self._model, self._owner)
            self._route_attention()
            stack.callback(self._watcher.close)
            self._watcher.open()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._open.close()

    @property
    def is_empty(self) -> bool:
        """Whether there is no layer to measure."""
        return not self._layers

    def end_batch(self, grads: Mapping[Tensor, Tensor | None]) -> None:
        """Add the batch whose backward has run, with the gradients of all trained parameters."""
        self.batches += 1
        squares = squared_norms(grads)
        is_finite = sum_of(squares.values()).isfinite()
        for parameter, square in squares.items():
            add_to(self._squares, parameter, torch.where(is_finite.to(square.device), square, 0.0))
        for measured in self._layers.values():
            measured.end_batch(squares, is_finite)

    def report(self) -> SensitivityReport:
        """Return what was measured so far."""
        names = {fqn: fqns[0] for fqns, _ in layers(self._model) for fqn in fqns}
        names = {name: name for name in ModuleNames(self._model).values()} | names
        first = self._settings[0]
        report = SensitivityReport([], list(self._skipped), self.batches, first.block_size, first.topk_over, names)
        known = [(measured, measured.sums) for measured in self._layers.values() if measured.sums is not None]
        read = torch.stack([sums.to(known[0][1].device) for _, sums in known]).tolist() if known else []
        # As in `mean_square`, what gets no gradient does not count.
        values = sum(parameter.numel() for parameter, square in self._squares.items() if square)
        for (measured, _), energies in zip(known, read, strict=True):
            if energies[-1] > 0:
                report.rows += measured.rows(energies, values)
        there = {row.fqn for row in report.rows}
        left = [m for m in self._layers.values() if m.name not in there]
        report.skipped += [LayerReport(m.name, m.kind, "linear", reason=m.reason) for m in left]
        return report

    def _select(self) -> None:
        """Find the layers to measure, and why some that are named are not."""
        for candidate in candidates(self._model):
            layer: Any = candidate.layer
            fqns, operator = candidate.fqns, candidate.operator
            if not drops_blocks([operator]) or self._config.keep_of(fqns, operator) is None:
                continue
            reason = refusal(candidate, self._config, self._owner)
            if reason is None and is_parametrized(layer, "weight"):
                reason = "its weight is computed by a parametrization"
            weights = [] if reason else [weight for weight in weights_in(layer) if weight.requires_grad]
            if weights:
                self._layers[layer] = MeasuredLayer(fqns, layer, self._settings, weights)
            else:
                kind = torch_class(type(layer)).__name__
                reason = reason or "its weight is frozen"
                self._skipped.append(LayerReport(fqns[0], kind, operator, reason=reason))

    def _route_attention(self) -> None:
        """Let attention modules tell of their projections, which keep their inputs as they are."""
        attentions = {m.out_proj for m in self._model.modules() if isinstance(m, nn.MultiheadAttention)}
        found = [(m.name, layer) for layer, m in self._layers.items()]
        names = [name for name, layer in found if isinstance(layer, nn.MultiheadAttention) or layer in attentions]
        if names:
            rules: dict[str, Keep | None] = dict.fromkeys(map(escape_glob, names), _ANY)
            convert_layers(self._model, Config("paper", rules=rules | {"*": None}), self._owner)
            for _, layer in layers(self._model):
                if isinstance(layer, CompressedLayer) and is_converted(layer) and layer.owner == self._owner:
                    layer.drop_nothing()


_STATES = "_state", "_recompute"
"""Attributes of converted modules that name the owner."""


def _unreadable(x: Any, y: Any) -> str | None:
    """Return why a call with this input and this output cannot be measured."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return "its input or output is no tensor"
    if x.is_nested or x.layout != torch.strided or not x.is_floating_point() or x.dim() == 0:
        return f"its input is no dense floating-point tensor with features ({x.dtype}, {x.layout})"
    if not in_plain_eager_mode(x.detach()):
        return "its input is a tensor of another class (a DTensor, say), or it runs inside a transform such as vmap"
    return "its input is float64, which cannot be quantized" if x.dtype == torch.float64 else None


def _made(y: Tensor) -> Tensor:
    """Return the tensor of which ``y`` is a view in other words, or ``y``.

    The gradient of a view is not computed if it is changed in place, by an activation function say, but that of what it
    is a view of before that change is.
    """
    base = y._base
    if base is None or not base.requires_grad or base.numel() != y.numel():
        return y
    return base if base.is_contiguous() and y.is_contiguous() else y


def squared_norms(grads: Mapping[Tensor, Tensor | None]) -> dict[Tensor, Tensor]:
    """Return the squared norm of each gradient that is there, fp64."""
    return {parameter: square_of(grad) for parameter, grad in grads.items() if grad is not None}


def sum_of(squares: Iterable[Tensor]) -> Tensor:
    """Return the sum of numbers that may be on several devices."""
    total = torch.zeros((), dtype=torch.float64)
    for square in squares:
        total = total.to(square.device) + square
    return total


def weights_in(layer: Any) -> Sequence[Tensor]:
    """Return the weights themselves, and not turned views of them."""
    return weights_of(layer) if isinstance(layer, nn.MultiheadAttention) else (layer.weight,)


def _config_of(names: Sequence[str]) -> Config:
    """Return which layers are measured: those that it would convert."""
    by_name: dict[str, Keep | None] = {name: _ANY for name in names if not name.startswith(TYPE)}
    by_type: dict[str, Keep | None] = {TYPE + each: None for each in get_args(Operator)}
    by_type |= {name: _ANY for name in names if name.startswith(TYPE)}
    if by_type[LINEAR] is not None:
        del by_type[LINEAR]  # as the preset covers them
    return Config("paper", rules=by_name | by_type)


def _check_names(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise ``ValueError`` if a pattern matches no layer of ``model`` that can drop blocks."""
    names = [fqn for fqns, _ in input_layers(model) for fqn in fqns]
    for pattern in patterns:
        if not pattern.startswith(TYPE) and not matches(names, pattern):
            raise ValueError(
                f"`names` pattern {pattern!r} matches no linear layer or convolution of {type(model).__name__}. "
                f"HINT: patterns match the whole name; such layers are: {shorten(names) or 'none'}."
            )
        if pattern.startswith(TYPE) and not drops_blocks([pattern.removeprefix(TYPE)]):
            raise ValueError(
                f"`names` pattern {pattern!r} names no operator with a weight gradient. HINT: those are 'type:linear' "
                "and 'type:convolution'."
            )


# === The function =====================================================================================================


def measure_sensitivity(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    bits: Sequence[int | None] = (2, 3, 4, 8),
    sparsities: Sequence[float] = (0.0,),
    block_size: int = 32,
    topk_over: TopkOver = "sample",
    names: Sequence[str] | str = LINEAR,
    seed: int = 0,
) -> SensitivityReport:
    """Predict the error of weight gradients from what each setting would keep, and suggest bits for each layer.

    One forward and one backward a batch, in the mode (``model.train()``) and with the weights that the model has. They
    leave no trace: parameters, gradients, buffers, modes and torch's random numbers are as before. Linear layers,
    transformers' ``Conv1D`` and the projections of ``nn.MultiheadAttention`` are measured, convolutions on request.
    The figures are those of the weights at that moment: measure again later in the training. Gradients alone are asked
    for, which a reentrant checkpoint does not support: layers inside one are not measured.

    Predictions for bits are means over random errors, from which one batch differs by a few per cent. For dropped
    blocks they are lower bounds (see the module).

    Args:
        model: Any module, converted or not.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        batches: A few batches, such as ``itertools.islice(loader, 4)``, on the model's device.
        bits: Bits of each kept value, 2, 3, 4 or 8, or ``None`` for values as they are.
        sparsities: Fractions of blocks dropped, each in [0, 1).
        block_size: Consecutive values per block, positive; cut to the row if larger.
        topk_over: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        names: Which linear layers and convolutions are measured: patterns as in rules, such as ``"blocks.*.fc1"``; by
            default ``"type:linear"``, linear layers that presets cover.
        seed: Of torch's random numbers during the measurement, such as those of dropout.

    Returns:
        The predicted error for each layer and setting, and why other layers were not measured.

    Raises:
        TypeError: If an argument has the wrong type, or ``loss`` returns no tensor.
        ValueError: If an argument is out of range, a pattern matches no layer, no layer can be measured, there is no
            batch, or a loss is no single number that needs a gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batches = [torch.randn(32, 64) for _ in range(2)]
        >>> report = measure_sensitivity(model, lambda x: model(x).square().mean(), batches)
        >>> sorted(report.suggest(max_error=0.2))
        ['0', '2']
    """
    check_model(model)
    names = _several([names] if isinstance(names, str) else names, "names", "['blocks.*.fc1']")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"`names` must be patterns, got {name!r}. HINT: such as 'blocks.*.fc1', 'type:linear'.")
    probe = SensitivityProbe(model, _settings_of(bits, sparsities, block_size, topk_over), names)
    with unchanged(model, _check_seed(seed)), probe:
        if probe.is_empty:
            listing = "\n".join(f"  {s.fqn} ({s.kind}): {s.reason}" for s in probe.report().skipped)
            raise ValueError(
                f"No layer of {type(model).__name__} can be measured:\n{listing}\nHINT: widen `names`, or let "
                "weights require gradients."
            )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for batch in batches:
            grads = torch.autograd.grad(_check_loss(loss(batch)), trained, allow_unused=True)
            probe.end_batch(dict(zip(trained, grads, strict=True)))
    if not probe.batches:
        raise ValueError("`batches` must hold at least one batch, got none. HINT: an iterator can be read only once.")
    return probe.report()


def _settings_of(bits: Any, sparsities: Any, block_size: int, topk_over: TopkOver) -> tuple[Setting, ...]:
    """Check the arguments, and return every number of bits with every sparsity, and inputs as they are at the end."""
    bits = [check_bits(each, "bits") for each in _several(bits, "bits", "[2, 4]")]
    sparsities = [check_sparsity(each, "sparsities") for each in _several(sparsities, "sparsities", "[0.0, 0.5]")]
    keeps = [Keep(each, sparsity, block_size, topk_over) for each in bits for sparsity in sparsities]
    settings = [Setting(keep.stored_bits, float(keep.sparsity), keep.block_size, topk_over) for keep in keeps]  # type: ignore[arg-type]
    as_is = Setting(0, 0.0, keeps[0].block_size, topk_over)
    return (*(setting for setting in settings if setting != as_is), as_is)


def _several(values: Any, name: str, example: str) -> tuple[Any, ...]:
    """Return ``values`` as a tuple without repetitions, one at least."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` must be a list, got {values!r}. HINT: {name}={example} is one.")
    if not values:
        raise ValueError(f"`{name}` must name at least one to measure, got {values!r}. HINT: {example} is a start.")
    return tuple(dict.fromkeys(values))


@contextmanager
def unchanged(model: nn.Module, seed: int) -> Iterator[None]:
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


def _check_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"`seed` must be an int, got {seed!r}. HINT: it makes dropout the same in every measurement.")
    return int(seed)


def _check_loss(value: Any) -> Tensor:
    hint = "HINT: return what you would call backward() on, such as cross_entropy(model(x), y)."
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` must return a tensor, got {type(value).__name__}. {hint}")
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"`loss` must return one number that needs a gradient, got shape {tuple(value.shape)} with "
            f"requires_grad={value.requires_grad}. {hint}"
        )
    return value
