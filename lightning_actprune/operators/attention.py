"""``nn.MultiheadAttention`` whose projections save their inputs packed for backward.

torch's attention never calls its projections as layers: ``F.multi_head_attention_forward`` passes their weights, or
rows of them, to ``F.linear``. That code runs here unchanged, but in a copy of its namespace in which ``linear`` is ours
and takes a ``Projection`` as weight. Masks, returned weights, ``bias_k``, ``add_zero_attn``, checks and random numbers
are thus torch's own. A ``TorchFunctionMode`` cannot replace ``linear``: it sees ``multi_head_attention_forward`` as one
call and is off while that runs.

Inside, samples are the second dimension, ``[T, N, E]``, and the output projection gets ``[T * N, E]``. Both are
multiplied as torch does it and packed as ``[N, T, E]``, a view, so that the blocks of one sample compete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.codec.blocks import Blocks
from lightning_actprune.codec.dispatch import may_compress
from lightning_actprune.codec.pack_cache import remember_copy
from lightning_actprune.codec.private import no_dispatch_modes
from lightning_actprune.config import Operator
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.linear import ActivationPrunedLinear, CompressedLinear, compressed_linear, compresses

# === Projections passed as weights ====================================================================================


class Projection:
    """The weight of a projection, or some of its rows, passed to torch's attention in place of the weight.

    Args:
        layer: The layer that has the settings.
        weight: ``[out_features, in_features]``.
        samples: Samples ``N`` in an input ``[T, N, E]`` or ``[T * N, E]``.
    """

    def __init__(
        self, layer: ActivationPrunedLinear | CompressedMultiheadAttention, weight: Tensor, samples: int
    ) -> None:
        self.layer = layer
        self.weight = weight
        self.samples = samples

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return self.weight.shape

    def blocks(self, x: Tensor) -> Blocks:
        """Return the ``Blocks`` into which an input ``[T, N, E]`` is cut."""
        return self.layer._state.of(x, turned=True)[1]

    def chunk(self, chunks: int) -> list[Projection]:
        """Return ``chunks`` equal parts of the rows."""
        return [Projection(self.layer, rows, self.samples) for rows in self.weight.chunk(chunks)]

    def split(self, sizes: list[int]) -> list[Projection]:
        """Return parts of the rows of these sizes."""
        return [Projection(self.layer, rows, self.samples) for rows in torch.split(self.weight, sizes)]

    def with_samples(self, x: Tensor) -> Tensor:
        """Return ``x`` as ``[T, N, E]``."""
        return x if x.dim() == 3 else x.view(x.shape[0] // max(self.samples, 1), self.samples, x.shape[-1])

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``F.linear(x, weight, bias)``, and save ``x`` as the layer's settings say."""
        parts, blocks = self.layer._state.of(x, turned=True)
        if not compresses(x, self.weight, parts, blocks):
            return F.linear(x, self.weight, bias)
        # If the batch is first in memory, torch makes and saves the same contiguous copy.
        turned = self.with_samples(x)  # [T, N, E]
        rows = turned.contiguous()
        if rows is not turned and not torch.compiler.is_compiling():
            remember_copy(rows, turned)
        y = compressed_linear(rows, self.weight, bias, parts, blocks, self.layer.reuses)
        return y.view(*x.shape[:-1], y.shape[-1])


class Watcher(Protocol):
    """Observer of projections, which are no module calls and so have no hooks."""

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Called before a projection of ``x`` is computed."""

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:
        """Called after a projection with its output, or with ``None`` after an exception."""


watchers: list[Watcher] = []
"""Observers of every projection that is not compiled."""


def _linear(x: Tensor, weight: Tensor | Projection, bias: Tensor | None = None) -> Tensor:
    """Replace ``F.linear`` inside torch's attention."""
    if not isinstance(weight, Projection):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling() or not watchers:
        return weight.linear(x, bias)
    observers = tuple(watchers)  # a copy, because other threads add and remove theirs
    for watcher in observers:
        watcher.enter_projection(weight, x)
    y = None
    try:
        y = weight.linear(x, bias)
        return y
    finally:
        for watcher in observers:
            watcher.leave_projection(weight, y)


# === Functional form: torch's attention with projections ==============================================================

_CHECK = "_check_key_padding_mask"


def _check_unless_tracing(check: Callable[..., None], *arguments: Any) -> None:
    """Check the shape of a mask, but not while a compiler traces: it cannot trace the text of the error."""
    if not torch.compiler.is_compiling():
        check(*arguments)


def _attention_with(linear: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return ``F.multi_head_attention_forward`` with ``linear`` replaced in it and in the functions that it calls."""
    # Without `__name__`, because the compiler would look names up in the module of that name.
    scope = {name: value for name, value in vars(F).items() if name != "__name__"}
    scope["linear"] = linear
    for name, value in vars(F).items():
        if isinstance(value, FunctionType) and "linear" in value.__code__.co_names:
            scope[name] = FunctionType(value.__code__, scope, name, value.__defaults__, value.__closure__)
            scope[name].__kwdefaults__ = value.__kwdefaults__
    if _CHECK in scope:
        scope[_CHECK] = functools.partial(_check_unless_tracing, scope[_CHECK])
    return cast(Callable[..., tuple[Tensor, Tensor | None]], scope.get("multi_head_attention_forward"))


_attention = _attention_with(_linear)


@functools.cache
def routing_refusal() -> str | None:
    """Return the reason why projections cannot be routed in this version of torch's attention, or ``None``.

    This is tried with one input, with two, and with separate weights: our function must compute each projection, and
    the result must equal torch's.
    """
    rows: list[int] = []

    def linear(x: Tensor, weight: Tensor | Projection, bias: Tensor | None = None) -> Tensor:
        if not isinstance(weight, Projection):
            return F.linear(x, weight, bias)
        rows.append(weight.shape[0])
        return F.linear(x, weight.weight, bias)

    routed = _attention_with(linear)
    reason = f"torch {torch.__version__} computes attention in a way that is not known"
    with no_dispatch_modes(), torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for inputs in ((0, 0, 0), (0, 1, 1), (0, 1, 0)):
            rows.clear()
            try:
                same = torch.equal(
                    _try_attention(routed, inputs, True), _try_attention(F.multi_head_attention_forward, inputs, False)
                )
            except Exception as error:  # unknown code may raise anything if a weight is no tensor
                return f"{reason} ({error})"
            if not same or sum(rows) != 4 * _SIZE:
                return reason
    return None


_SIZE = 2
"""Features of the small attention that is tried."""


def _try_attention(function: Callable[..., Any], inputs: tuple[int, ...], projected: bool) -> Tensor:
    """Return the result of ``function`` for two small inputs, with projections or plain weights."""
    tensors = torch.arange(6.0 * _SIZE, device="cpu").sin().view(2, 3, 1, _SIZE)
    weights = torch.arange(4.0 * _SIZE * _SIZE, device="cpu").cos().view(4 * _SIZE, _SIZE)
    parts = [weights[: 3 * _SIZE], *torch.split(weights, _SIZE)]
    joint, query, key, value, out = [Projection(None, weight, 1) if projected else weight for weight in parts]  # type: ignore[arg-type]  # the layer only has settings
    separate = inputs[0] != inputs[1] != inputs[2]
    options = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value} if separate else {}
    head = _SIZE, 1, None if separate else joint, None, None, None, False, 0.0, out, None
    y, _ = function(*[tensors[i] for i in inputs], *head, use_separate_proj_weight=separate, **options)
    return cast(Tensor, y)


def _batch_second(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs ``[N, T, E]`` as ``[T, N, E]``; equal inputs stay one tensor, which torch projects at once."""
    turned_key = key.transpose(0, 1)
    turned_value = turned_key if value is key else value.transpose(0, 1)
    return turned_key if query is key else query.transpose(0, 1), turned_key, turned_value


def projection_weights(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Return the weights of the in-projection: one, or one each for query, key and value."""
    separate = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    return tuple(weight for weight in (attention.in_proj_weight, *separate) if weight is not None)


# === Module classes ===================================================================================================


class RoutedMultiheadAttention(CompressedLayer, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that lets compressed projections save their inputs packed; made by ``convert``.

    This class compresses the output projection if that is a compressed layer, ``CompressedMultiheadAttention`` also the
    in-projection. Parameters, ``state_dict``, arguments and results are those of ``nn.MultiheadAttention``. In no-grad
    mode and with frozen projections its forward is that of the dense class, fast paths included.
    """

    dense_class = nn.MultiheadAttention
    operator: ClassVar[Operator] = "linear"
    always_own = True  # the dense forward calls no projection

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress any attention, or ``None``."""
        return routing_refusal()

    def describe(self) -> str:
        """Return "": the projection shows its own settings."""
        return ""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output and, on request, its weights, as ``nn.MultiheadAttention`` does."""
        options: dict[str, Any] = {
            "key_padding_mask": key_padding_mask,
            "need_weights": need_weights,
            "attn_mask": attn_mask,
            "average_attn_weights": average_attn_weights,
            "is_causal": is_causal,
        }
        weights = projection_weights(self) if isinstance(self, CompressedMultiheadAttention) else ()
        if isinstance(self.out_proj, CompressedLinear):
            weights = (*weights, self.out_proj.weight)
        is_kept = any(weight.requires_grad for weight in weights)
        if not (is_kept and all(map(may_compress, (query, key, value)))):
            return super().forward(query, key, value, **options)
        if not (self.batch_first and query.dim() == 3):
            return self._attend(query, key, value, options)
        output, attention = self._attend(*_batch_second(query, key, value), options)
        return output.transpose(0, 1), attention

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the results of torch's attention for ``[T, N, E]`` or ``[T, E]``."""
        samples = query.shape[1] if query.dim() == 3 else 1

        def projection(layer: nn.Module, weight: Tensor | None) -> Tensor | Projection | None:
            if weight is None or not isinstance(layer, (ActivationPrunedLinear, CompressedMultiheadAttention)):
                return weight
            return Projection(layer, weight, samples)

        return _attention(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            projection(self, self.in_proj_weight),
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            projection(self.out_proj, self.out_proj.weight),
            self.out_proj.bias,
            training=self.training,
            use_separate_proj_weight=self.in_proj_weight is None,
            q_proj_weight=projection(self, self.q_proj_weight),
            k_proj_weight=projection(self, self.k_proj_weight),
            v_proj_weight=projection(self, self.v_proj_weight),
            **options,
        )


class CompressedMultiheadAttention(CompressedLinear, RoutedMultiheadAttention):
    """Attention whose in-projection saves query, key and value packed; made by ``convert``.

    Output, attention weights and all gradients but that of the in-projection's weight are exact. That gradient is
    computed from the kept blocks (arXiv:2311.16883). A tensor that torch projects once is packed once: self-attention
    packs its input, attention over an encoder's output packs query and key, three different tensors are three packs.
    """

    dense_class = RoutedMultiheadAttention

    def describe(self) -> str:
        """Return the settings of the in-projection."""
        return CompressedLayer.describe(self)


class CompressedOutProjection(ActivationPrunedLinear, NonDynamicallyQuantizableLinear):
    """Output projection of an attention module, which reads its weight and settings; made by ``convert``."""

    dense_class = NonDynamicallyQuantizableLinear


# === Classes covered ==================================================================================================

CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    nn.MultiheadAttention: CompressedMultiheadAttention,
    RoutedMultiheadAttention: CompressedMultiheadAttention,
    NonDynamicallyQuantizableLinear: CompressedOutProjection,
}
