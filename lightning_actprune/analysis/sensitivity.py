r"""Predict the error that few bits would bring into the weight gradient of each layer.

A weight gradient is a sum over rows of ``x_t [IN]``, the layer's input, and ``g_t [OUT]``, the gradient of its output::

    dW = sum_t g_t x_t^T          and from what is stored, x_t + e_t:          error = sum_t g_t e_t^T

Quantization errors have mean zero and are independent from row to row (``codec.formats``), so products of two rows
cancel in the mean::

    E |error|^2 = sum_t |g_t|^2 E|e_t|^2          E|e_t|^2 = sum of size * scale^2 / 12 over the blocks of the row

Both factors are one number a row. The first one is known when the gradient of the output arrives, the second one when
the input is there. In a convolution, a value meets the gradients of all outputs in whose windows it is. Scales are in
proportion to ``1 / (2^v - 1)`` for v bits, so the error at eight bits gives that of all others, and a usual backward
shows the error of all settings at once.

**Bits where they count** (``allocate``): errors of layers are independent, so their squares add up. Each layer starts
with the setting of fewest bytes. Then the setting that lowers the sum of squares most a byte is taken, again and again,
until the bound is met.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from glob import escape as escape_glob
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.analysis.recorder import eager_stance, input_layers, is_expanded
from lightning_actprune.analysis.second_backward import square_of
from lightning_actprune.codec.blocks import BlockGeometry, block_and_keep, split_blocks, stored_view
from lightning_actprune.codec.dispatch import autocast_dtype, cast_as_autocast, cast_input, in_plain_eager_mode
from lightning_actprune.codec.formats import row_bytes, scale_of
from lightning_actprune.codec.private import DYNAMO, FOR_BACKWARD, require
from lightning_actprune.config import BITS, Config, Keep, check_model, check_share
from lightning_actprune.convert import DenseView, convert_layers, is_converted, new_owner, revert
from lightning_actprune.operators.attention import Projection, watchers
from lightning_actprune.operators.base import torch_class
from lightning_actprune.operators.convolution import Convolution, rows_of, windows_of, without_gaps
from lightning_actprune.operators.hooks import ForwardHook, is_recomputation
from lightning_actprune.operators.registry import weights_of
from lightning_actprune.report import LayerReport, make_table

LAYER_SHARE = 3.0
"""How much larger the error of a single layer may be than that of all layers together."""
CHUNK = 2**22
"""Values whose errors are in memory at once."""
_STATES = "_state", "_recompute"
"""Attributes of converted modules that name the owner."""


# === The result =======================================================================================================
@dataclass(frozen=True)
class LayerSensitivity:
    """The error that one number of bits would bring into the weight gradient of one layer.

    Args:
        fqn: Fully qualified name of the layer.
        kind: Name of its class.
        bits: Bits of each value, ``None`` for an unchanged input.
        error: Predicted norm of the error over the norm of the layer's exact weight gradient.
        share: What it adds to the error of all gradients, by root of squares: the error, at most one, times the root of
            the share of trained values that are in this layer's weights.
        nbytes: Bytes that are kept of the inputs of all batches.
    """

    fqn: str
    kind: str
    bits: int | None
    error: float
    share: float
    nbytes: int


@dataclass
class SensitivityReport:
    """How much weight gradients suffer from few bits, by layer.

    Args:
        rows: One for each layer and number of bits, layer by layer; the last row of a layer keeps its input unchanged.
        skipped: Layers that were not measured, with the reason.
    """

    rows: list[LayerSensitivity]
    skipped: list[LayerReport]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows as numbers and strings: ``pandas.DataFrame(report.to_rows())`` is a table."""
        return [asdict(row) for row in self.rows]

    def suggest(self, max_error: float = 0.1) -> dict[str, Keep | None]:
        """Return rules that keep few bytes, for ``ActivationPruning(rules=...)`` or ``convert(model, rules=...)``.

        A layer that has to keep its input unchanged stays dense (``None``).

        Args:
            max_error: Largest error of gradients, each relative to its own norm, in [0, 1]: root of the mean of its
                square over all trained values. That of a single layer may be three times as large.

        Raises:
            TypeError: If the argument is no number.
            ValueError: If the argument is out of range.
        """
        chosen = allocate(self.rows, max_error)
        # All settings are named, so that no preset changes one.
        return {
            escape_glob(fqn): Keep(row.bits, 0.0, 32, "sample", "largest", 1.0, 0) if row.bits else None
            for fqn, row in chosen.items()
        }

    def table(self) -> Table:
        """Return the relative error of each layer's gradient, by bits, to print with ``rich``."""
        table = make_table(
            "Predicted error of the weight gradient, relative to its norm", "Layer", *(f"{bits} bits" for bits in BITS)
        )
        errors: dict[str, list[str]] = {}
        for row in self.rows:
            if row.bits is not None:
                errors.setdefault(row.fqn, []).append(f"{row.error:.3f}")
        for fqn, cells in errors.items():
            table.add_row(escape(fqn), *cells)
        return table


def allocate(rows: Iterable[LayerSensitivity], max_error: float, others: float = 0.0) -> dict[str, LayerSensitivity]:
    """Return a row for each layer: few bytes, and predicted errors within the bound of ``SensitivityReport.suggest``.

    ``others`` is the square of the error that is not from these layers and counts, too.
    """
    bound = max(check_share(max_error, "max_error") ** 2 - others, 0.0)
    most = min(1.0, LAYER_SHARE * max_error)
    options: dict[str, list[LayerSensitivity]] = {}
    for row in rows:
        if row.error <= most:
            options.setdefault(row.fqn, []).append(row)
    chosen = {fqn: min(own, key=lambda row: (row.nbytes, row.share)) for fqn, own in options.items()}
    # Each step takes the setting that lowers the square most a byte, and the first of equal ones, so results repeat.
    queue = [(*_better(own, chosen[fqn]), place, fqn) for place, (fqn, own) in enumerate(options.items())]
    heapq.heapify(queue)
    while math.fsum(row.share**2 for row in chosen.values()) > bound and queue[0][0] < 0:
        _, at, place, fqn = heapq.heappop(queue)
        chosen[fqn] = options[fqn][at]
        heapq.heappush(queue, (*_better(options[fqn], chosen[fqn]), place, fqn))
    return chosen


def _better(rows: Sequence[LayerSensitivity], now: LayerSensitivity) -> tuple[float, int]:
    """Return by how much the best other setting of a layer changes the square a byte, and its place."""
    changes = [(row.share**2 - now.share**2) / max(row.nbytes - now.nbytes, 1) for row in rows]
    return min((change, place) for place, change in enumerate(changes))


def ratio(bits: int | None) -> float:
    """Return the squared error in ``bits`` bits, relative to that in eight."""
    return (255 / (2**bits - 1)) ** 2 if bits else 0.0


# === Errors of an input at eight bits =================================================================================
def _squared_errors(stored: Tensor, block_size: int) -> Tensor:
    """Return the mean square of the error of each value of ``stored [S, T, L]``, in fp32."""
    block, _ = block_and_keep(stored, block_size, 0, 0)
    blocks = split_blocks(stored, block)  # [S, T, NB, b]
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    errors = scale_of(low.float(), high.float(), 8).square() / 12
    return errors.expand(blocks.shape).flatten(2)[..., : stored.shape[2]]


def _sum_windows(errors: Tensor, layer: Convolution) -> Tensor:
    """Return the sum in the window of each output, ``[N, C, *spatial] -> [N * groups * outputs]``."""
    ones = errors.new_ones(layer.groups, errors.shape[1] // layer.groups, *layer.kernel_size)
    with torch.autocast(errors.device.type, enabled=False):  # small errors are zero in fp16
        return torch.convolution(errors, ones, None, *windows_of(layer)).flatten()


def _squares_of_rows(grad_y: Tensor, layer: nn.Module) -> Tensor:
    """Return the square of the gradient of each row, or of each output of a convolution and group, in fp32."""
    shape = grad_y.shape
    if isinstance(layer, Convolution):
        grad_y, dim = grad_y.reshape(shape[0], layer.groups, -1, *shape[2:]), 2  # [N, groups, OUT / groups, *spatial]
    else:
        grad_y, dim = grad_y.reshape(-1, shape[-1]), 1
    norms: Tensor = torch.linalg.vector_norm(grad_y, dim=dim, dtype=torch.float32)
    return norms.square().flatten()


@dataclass(eq=False)
class MeasuredLayer:
    """A converted layer that is measured.

    Args:
        name: Its first name.
        layer: The layer.
        weights: Its trained weights.
        block_size: Values per block.
        error: Squared error at eight bits of all calls so far, fp64; ``None`` before a gradient came.
        nbytes: Bytes of the inputs at eight bits.
        itemsize: Bytes of an unchanged value.
        ran_at: Bits in which the step keeps the input.
        reason: Why it was not measured.
    """

    name: str
    layer: Any
    weights: list[Tensor]
    block_size: int
    error: Tensor | None = None
    nbytes: int = 0
    itemsize: int = 2
    ran_at: int = 0
    reason: str = "it was not called"

    @torch.no_grad()
    def see_input(self, x: Tensor) -> Tensor:
        """Return the squared error of each row of an input at eight bits, ``[R]``, and count its bytes."""
        layer = self.layer
        is_convolved = isinstance(layer, Convolution)
        self.ran_at = 8 if not is_convolved and layer._state.is_fine(x) else layer.bits
        self.itemsize = x.itemsize
        x = without_gaps(x) if is_convolved else x
        self.nbytes += BlockGeometry.of_stored(self._stored(x)[0], self.block_size, 0.0).stored_bytes(x.itemsize, 8)
        return torch.cat([self._errors(piece) for piece in torch.split(x, max(1, CHUNK * len(x) // x.numel()))])

    def _stored(self, x: Tensor) -> tuple[Tensor, bool]:
        """Return an input as blocks are cut from it, ``[S, T, L]``, and whether the tokens are its last dimension."""
        size, topk_over = self.block_size, self.layer.keep.topk_over
        rows = rows_of(x, size, topk_over) if isinstance(self.layer, Convolution) else x
        return stored_view(rows, size, topk_over)

    def _errors(self, x: Tensor) -> Tensor:
        stored, along_tokens = self._stored(x)
        errors = _squared_errors(stored, self.block_size)
        if isinstance(self.layer, Convolution):
            return _sum_windows(errors.contiguous().as_strided(x.shape, x.stride()), self.layer)
        return errors.sum(1 if along_tokens else 2).flatten()

    @torch.no_grad()
    def see_gradient(self, errors: Tensor, grad_y: Tensor) -> None:
        """Add the errors of one call."""
        energy = (errors * _squares_of_rows(grad_y, self.layer)).sum(dtype=torch.float64)
        self.error = energy if self.error is None else self.error + energy

    def row(self, bits: int | None, error: float, values: int, nbytes: float) -> LayerSensitivity:
        """Return the error and the bytes of this layer in ``bits`` bits.

        Args:
            bits: The bits; ``None`` keeps the values unchanged.
            error: Relative error.
            values: How many trained values there are.
            nbytes: Bytes at eight bits.
        """
        block, kind = self.block_size, torch_class(type(self.layer)).__name__
        size = self.itemsize * block if bits is None else row_bytes(block, bits, 0)
        share = min(1.0, error) * math.sqrt(sum(weight.numel() for weight in self.weights) / values)
        return LayerSensitivity(self.name, kind, bits, error, share, round(nbytes * size / row_bytes(block, 8, 0)))


def find_measurable(model: nn.Module, owner: str) -> Iterator[tuple[list[str], MeasuredLayer]]:
    """Yield all names of each layer that ``owner`` has converted and whose weight is trained, and the layer."""
    for fqns, module in input_layers(model):
        layer: Any = module
        if is_converted(layer) and layer.owner == owner and not is_parametrized(module, "weight"):
            # The weights themselves, and not turned views of them.
            is_attention = isinstance(module, nn.MultiheadAttention)
            weights: Sequence[Any] = weights_of(module) if is_attention else (module.weight,)
            trained = [weight for weight in weights if weight.requires_grad]
            if trained:
                yield fqns, MeasuredLayer(fqns[0], module, trained, layer.block_size)


class ErrorWatcher:
    """Hooks that see inputs of layers, and gradients of their outputs, while it is open; compiled modules run eagerly.

    A step computes what it would without it.

    Args:
        layers: The layers that are measured.
    """

    def __init__(self, layers: Iterable[MeasuredLayer]) -> None:
        self._layers: dict[nn.Module, MeasuredLayer] = {measured.layer: measured for measured in layers}
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
                stack.enter_context(eager_stance.opened())
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
        inputs = (*args, *kwargs.values())
        if inputs and not isinstance(layer, nn.MultiheadAttention):
            self._see(self._layers[layer], inputs[0], y, samples_second=False)

    def _see(self, measured: MeasuredLayer, x: Any, y: Any, *, samples_second: bool) -> None:
        """Wait for the gradient of ``y``, the output of a call with the input ``x``."""
        is_readable = isinstance(x, Tensor) and isinstance(y, Tensor) and _is_readable(x)
        if not is_readable or not y.requires_grad or is_recomputation():
            if not is_readable:
                measured.reason = (
                    "its input is no tensor that can be quantized (it is sparse, float64 or a DTensor, say)"
                )
            return
        measured.reason = "no finite gradient of it came: the loss does not depend on it, or is not finite"
        layer, autocast, shape = measured.layer, autocast_dtype(x), y.shape
        x = x.detach()
        if isinstance(layer, Convolution):
            x = x if autocast is None else cast_as_autocast(x, autocast)
            x = x.unsqueeze(0) if x.dim() < layer.weight.dim() else x
            shape = shape if len(shape) == x.dim() else torch.Size((1, *shape))
        else:
            x = cast_input(x, autocast, measured.block_size)
            x = x.transpose(0, 1) if samples_second else x.unsqueeze(0) if x.dim() == 1 else x
            shape = torch.Size((*(x.transpose(0, 1) if samples_second else x).shape[:-1], y.shape[-1]))
        if x.numel() == 0:
            return
        errors: Tensor | None = measured.see_input(x)

        def arrive(grad_y: Tensor) -> None:
            nonlocal errors
            if errors is not None:  # not twice, if a graph is used again
                grad_y = grad_y.detach().reshape(shape)
                measured.see_gradient(errors, grad_y.transpose(0, 1) if samples_second else grad_y)
                errors = None

        result: Any = _find_result(y)
        result.register_hook(arrive)


def _is_readable(x: Tensor) -> bool:
    """Return True if the errors of an input can be predicted."""
    is_dense = not x.is_nested and x.layout == torch.strided and x.is_floating_point() and x.dim() > 0
    return is_dense and in_plain_eager_mode(x.detach()) and x.dtype != torch.float64


def _find_result(y: Tensor) -> Tensor:
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


# === The function =====================================================================================================
def measure_sensitivity(model: nn.Module, loss: Callable[[Any], Tensor], batches: Iterable[Any]) -> SensitivityReport:
    """Predict the error of weight gradients from 2, 3, 4 and 8 bits, and suggest bits for each layer.

    One forward and one backward a batch, in the mode (``model.train()``) and with the weights that the model has. They
    leave no trace: parameters, gradients, buffers, modes and torch's random numbers are as before. Linear layers,
    transformers' ``Conv1D``, the projections of ``nn.MultiheadAttention`` and convolutions are measured. The figures
    are those of the weights at that moment: measure again later in the training. Gradients alone are asked for, which a
    reentrant checkpoint does not support: layers inside one are not measured.

    Predictions are means over random errors, from which one batch differs by a few per cent.

    Args:
        model: Any module, converted or not.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        batches: A few batches, such as ``itertools.islice(loader, 4)``, on the model's device.

    Returns:
        The predicted error for each layer and number of bits, and why other layers were not measured.

    Raises:
        TypeError: If an argument has the wrong type, or ``loss`` returns no tensor.
        ValueError: If no layer can be measured, there is no batch, or a loss is no single number that needs a gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batches = [torch.randn(32, 64) for _ in range(2)]
        >>> report = measure_sensitivity(model, lambda x: model(x).square().mean(), batches)
        >>> sorted(report.suggest(max_error=0.2))
        ['0', '2']
    """
    require("measure_sensitivity", FOR_BACKWARD)
    with unchanged(check_model(model), 0), _watched(model) as (measured, skipped):
        if not measured:
            listing = "\n".join(f"  {layer.fqn} ({layer.kind}): {layer.reason}" for layer in skipped)
            raise ValueError(
                f"No layer of {type(model).__name__} can be measured:\n{listing}\nHINT: let weights of linear "
                "layers or convolutions require gradients."
            )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        squares = defaultdict[Tensor, float](float)
        for batch in batches:
            grads = torch.autograd.grad(_check_loss(loss(batch)), parameters, allow_unused=True)
            for parameter, square in squared_norms(dict(zip(parameters, grads, strict=True))).items():
                squares[parameter] += float(square)
        if not squares:
            raise ValueError(
                "`batches` must hold at least one batch, whose loss depends on trained parameters, got none. HINT: an "
                "iterator can be read only once."
            )
        values = sum(parameter.numel() for parameter, total in squares.items() if total)
        rows: list[LayerSensitivity] = []
        for layer in measured:
            error = 0.0 if layer.error is None else float(layer.error)
            own = math.fsum(squares[weight] for weight in layer.weights)
            if error and own and math.isfinite(error / own):
                relative = {bits: math.sqrt(error * ratio(bits) / own) for bits in (*BITS, None)}
                rows += [layer.row(bits, each, values, layer.nbytes) for bits, each in relative.items()]
            else:
                kind = torch_class(type(layer.layer)).__name__
                skipped.append(LayerReport(layer.name, kind, "linear", reason=layer.reason))
        return SensitivityReport(rows, skipped)


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[MeasuredLayer], list[LayerReport]]]:
    """Watch the linear layers and convolutions of a dense model, whoever has converted it.

    They are converted, so that attention modules tell of their projections, and keep their inputs unchanged. Yields
    the layers to measure, and the others with the reason.
    """
    config, owner = Config("paper", rules={"type:convolution": Keep(sparsity=0.5)}), new_owner("measure_sensitivity()")
    with ExitStack() as stack:
        for other in {vars(m)[name].owner for m in model.modules() for name in _STATES if name in vars(m)} - {None}:
            view = DenseView()
            stack.callback(view.close)
            view.open(model, other)
        stack.callback(revert, model, owner)
        report = convert_layers(model, config, owner)
        measured = [layer for _, layer in find_measurable(model, owner)]
        for layer in measured:
            layer.layer.drop_nothing()
        names = {layer.name for layer in measured}
        for row in [row for row in report.converted if row.fqn not in names]:
            report.leave_dense(row.fqn, "its weight is frozen, or computed by a parametrization")
        watcher = ErrorWatcher(measured)
        stack.callback(watcher.close)
        watcher.open()
        yield measured, report.skipped


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
