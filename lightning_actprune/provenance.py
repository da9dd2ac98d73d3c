"""Where a tensor that autograd saves comes from: a weight, the operation's own result, or something before it.

Read from the graph and the calling frame; nothing is kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGE = __name__.partition(".")[0] + "."
_RUNNING_AGAIN = "torch.utils.checkpoint", "torch._functorch."
_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Cat", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze"),
        "View",
    )
)
MAX_STEPS = 8
"""Views, casts and the like of a parameter that are followed back, of several tensors the first."""
_SENSITIVE = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        *(("Amax", 0), ("Amin", 0), ("Aminmax", 0), ("Max", 1), ("Min", 1), ("Median", 0), ("Nanmedian", 0)),
        *(("ScatterReduce", 0), ("SegmentReduce", 0), ("Logsumexp", 0), ("BinaryCrossEntropy", 0), ("Acos", 0)),
        *(("Acosh", 0), ("Asin", 0), ("Atanh", 0), ("Log", 0), ("Log10", 0), ("Log1P", 0), ("Log2", 0), ("Logit", 0)),
        *(("Pow", 1), ("Xlogy", 0), ("Xlogy", 1), ("SpecialXlog1Py", 0), ("SpecialXlog1Py", 1), ("SpecialEntr", 0)),
        *(("Lgamma", 0), ("Mvlgamma", 0), ("Digamma", 0), ("Polygamma", 0), ("SpecialZeta", 0), ("Erfinv", 0)),
        *(("Prod", 0), ("Prod", 1), ("Cumprod", 0), ("Logcumsumexp", 0), ("Atan2", 0)),
        *(("Cdist", 0), ("EuclideanDist", 0), ("Pdist", 0), ("Dist", 0)),
    )
)
"""Nodes that compare what they saved with their result, or divide by what may be next to nothing. A power with a tensor
for its exponent is one: it takes the logarithm of its base."""


_ATTENTION = tuple(
    f"ScaledDotProduct{kind}Backward0"
    for kind in (
        "CudnnAttention",
        "EfficientAttention",
        "FlashAttention",
        "FlashAttentionForCpu",
        "FusedAttentionOverrideable",
    )
)
"""Nodes of fused attention: of its result, backward needs the product with the gradient alone."""


def is_weight(tensor: Tensor, shapes: Container[tuple[int, ...]]) -> bool:
    """Return whether ``tensor`` is a leaf, a view of one, views and casts of a parameter, or has one of ``shapes``.

    Args:
        tensor: A saved tensor; one that needs no gradient is no weight.
        shapes: Sorted shapes of parameters: what is computed from one, such as a weight with a mask, has its shape, or
            is a view of what has.
    """
    if not tensor.requires_grad:
        return False
    base = tensor._base
    # What an autograd function returns may be a view of what it made, which is a leaf without a gradient.
    if tensor.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        return True
    # A linear layer saves its input flattened: rows may be as many as outputs, but what it is a view of has more
    # dimensions, while a weight that was flattened is a view of one with the parameter's shape.
    shaped = tensor if base is None or base.numel() != tensor.numel() else base
    return tuple(sorted(shaped.shape)) in shapes or _copies_parameter(tensor)


def is_own_result(tensor: Tensor) -> bool:
    """Return whether the operation that is saving ``tensor``, which has a history, has computed it.

    Its node was made before anything is saved, with the highest number so far; those of its inputs have lower ones. Of
    operations that make several nodes before they save (``torch._foreach_exp``), only the last result is known.
    """
    node = tensor.grad_fn
    assert node is not None
    number = node._sequence_nr()  # first: of a view whose base was written to, this makes the node
    return bool(number == torch._C._autograd._get_sequence_nr() - 1)


def is_attention_result(tensor: Tensor) -> bool:
    """Return whether fused attention has computed ``tensor``."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn.name() in _ATTENTION


def runs_again() -> bool:
    """Return whether what is being saved is kept to compute something again.

    A reentrant checkpoint keeps its input so, and a compiled region whatever its compiler chose.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch.autograd.function" and not name.startswith(_PACKAGE):
            return bool(name.startswith(_RUNNING_AGAIN))
        frame = frame.f_back
    return False


def sensitive_reader() -> str | None:
    """Return the name of the node that backward runs if it may enlarge errors of what it saved without bound."""
    node: Any = torch._C._current_autograd_node()
    name: str = "" if node is None else node.name()
    if name == "PowBackward0":
        exponent = node._saved_exponent
        return None if exponent >= 1 and exponent == int(exponent) else name
    if name == "LinalgVectorNormBackward0":
        return name if math.isinf(node._saved_ord) or node._saved_ord < 1 else None
    return name if name in _SENSITIVE else None


def _copies_parameter(tensor: Tensor) -> bool:
    """Return whether views and casts alone lie between a parameter and ``tensor``."""
    node = tensor.grad_fn
    for _ in range(MAX_STEPS):
        if node is None or node.name() not in _VIEWS_AND_CASTS:
            break
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)
