r"""Which operations may read, in backward, what they saved in few bits.

An operation's gradient is a function of what it saved. Quantization has errors of mean zero, of at most half a step
``d`` of their block, so a gradient that is *linear* in what was saved is exact on average too. Any other gradient may
be wrong, and silently so: a comparison decides the other way near its threshold (``clamp``, ``abs``, ``amax``), a
quotient has a pole (``x / y``, ``log``), a period is forgotten (``sin`` of large values), a coordinate is that of
another pixel (``grid_sample``), a difference of large numbers is nothing but their errors (``var`` of values far from
zero). So nothing is packed unless its operation stands here:

**Linear** in each saved tensor are products, matrix products, convolutions, ``addcmul``, squares, and the gradient of
the Euclidean norm, ``x / |x|``, since ``|x|`` is saved exactly.

**Of bounded error** are, for an error of at most ``d`` in a saved value ``x``::

    x^3                          3 (2 |x| d + d^2) |g|
    gelu, silu, mish, softplus   L d |g|, with L = 0.80, 0.50, 0.65, 0.25 the steepest slope of the derivative
    norms, their input's         2 (r d) r max|z| max|g|, with z = (x - mu) r the normalised input; mu and r = 1/sigma
                                 are saved exactly (that of the weight is linear)
    fused attention              see ``operators.saved``: errors of logits enter exponentials

**The shape alone** of its input is what pooling reads.

All that is for blocks whose values are of one magnitude. Where an outlier takes all steps of its block for itself, as
the -10,000 of a mask does among scores, the other values are lost, though their gradients may be all that counts
(``loses_values``). A mask may be there in some batches only, so what ``masked_fill`` or ``where`` has put values into
is not packed, whatever it holds (``is_masked``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ALL_BLOCKS
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.operators.containers import tensors_in

_NODE = re.compile(r"(Backward)?\d*(_compiled)?$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SAMPLE = 2**20
"""Values of a tensor in which outliers are looked for, the first of them: masks recur in each sample."""
_LOST_SHARE = 1 / 4
"""Share of a block's values that may be off by more than half of themselves."""


def operator_name(node: str) -> str:
    """Return the name of an autograd node in snake case: ``NativeLayerNormBackward0`` is ``native_layer_norm``."""
    return _CAPITAL.sub("_", _NODE.sub("", node)).lower()


def _always(node: Any) -> bool:
    return True


def _square_or_cube(node: Any) -> bool:
    return getattr(node, "_saved_exponent", None) in (2, 3)


def _euclidean(node: Any) -> bool:
    return bool(getattr(node, "_saved_ord", None) == 2)


PRODUCTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Addbmm", "Addmv", "Mv", "Dot", "Addr", "Addcmul", "Convolution"),
        *("CudnnConvolution", "GroupedMm", "SlowConv2D", "Linear"),
    )
)
"""Nodes whose gradients are products of the incoming one and the other factor."""
ATTENTION = frozenset(
    f"ScaledDotProduct{kind}Backward0"
    for kind in (
        "CudnnAttention",
        "EfficientAttention",
        "FlashAttention",
        "FlashAttentionForCpu",
        "FusedAttentionOverrideable",
    )
)
"""Nodes of fused attention."""
VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Cat", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze"),
        "View",
    )
)
"""Nodes of what holds the values of its input."""
_MASKS = frozenset(f"{name}Backward0" for name in ("IndexFill", "MaskedFill", "MaskedScatter", "Where"))
_KEEP_MASKS = VIEWS_AND_CASTS | frozenset(f"{name}Backward0" for name in ("Add", "Div", "Mul", "Neg", "Sub"))
_MOST_NODES = 16
"""Operations among which a mask is looked for."""
READERS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(PRODUCTS | ATTENTION, _always),
    "PowBackward0": _square_or_cube,
    "LinalgVectorNormBackward0": _euclidean,
    **{f"{name}Backward0": _always for name in ("Gelu", "Silu", "Mish", "Softplus")},
    **{
        f"{name}Backward0": _always
        for name in ("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "FusedRmsNorm")
    },
    **{f"{kind}Pool{dims}DBackward0": _always for kind in ("Avg", "AdaptiveAvg") for dims in (2, 3)},
    **{f"MaxPool{dims}DWithIndicesBackward0": _always for dims in (2, 3)},
}
"""Nodes that may read what they saved in few bits, each with the question whether the one at hand may, too."""


POOLING = frozenset(operator_name(node) for node in READERS if "Pool" in node)
"""Operations that read no more of their input than its shape."""


def may_read(node: Any) -> bool:
    """Return whether the gradient of ``node`` is right, or off by a known bound, if what it saved is quantized."""
    answer = READERS.get(node.name())
    return answer is not None and answer(node)


def nodes_since(outputs: Any, number: int) -> dict[int, Any]:
    """Return the nodes behind the tensors in ``outputs`` that are as new as ``number`` or newer, by their numbers.

    Autograd numbers the nodes of a thread in the order in which they are made, so older ones lead to none that is new.
    """
    found: dict[int, Any] = {}
    waiting = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        own = node._sequence_nr()
        if own >= number and own not in found:
            found[own] = node
            waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def is_masked(tensor: Tensor) -> bool:
    """Return whether values were put where a mask says, and nothing but views, sums and products came after that."""
    waiting, seen = [tensor.grad_fn], 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if node is not None and node.name() in _MASKS:
            return True
        if node is not None and node.name() in _KEEP_MASKS:
            waiting += [before for before, _ in node.next_functions]
    return False


def loses_values(x: Tensor, block: int) -> bool:
    """Return whether a block of ``x`` would lose values to an outlier, or is not finite; waits for the device.

    That is a block of which a quarter of the values that are not zero would be off by more than half of themselves if
    they were stored in eight bits.

    Args:
        x: ``[samples, rows, length]``, values side by side in the last dimension.
        block: Values per block, of the last dimension.
    """
    _, rows, length = x.shape
    x = x[: max(_SAMPLE // (rows * length), 1), : max(_SAMPLE // length, 1)]
    values, none, _ = pack(x, block, ALL_BLOCKS, 8)
    read = unpack(values, none, none, x.shape[0] * x.shape[1], length, block, 8, x.dtype).view(x.shape)
    off = ~((read - x).abs() <= x.abs() / 2)  # also of what is no number
    lost = torch.nn.functional.pad((off & (x != 0)).float(), (0, -length % block)).view(-1, block).mean(-1)
    return not bool(((lost <= _LOST_SHARE).all() & x.isfinite().all()).item())
