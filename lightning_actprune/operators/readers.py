"""What eager mode finds out about a tensor that an operation saves, for ``codec.saved_ops`` to judge.

What that says of errors is for blocks whose values are of one magnitude. Where an outlier takes all steps of its block
for itself, as the -10,000 of a mask does among scores, the other values are lost, though their gradients may be all
that counts (``loses_values``). A mask may be there in some batches only, so what ``masked_fill`` or ``where`` has put
values into is not packed, whatever it holds (``is_masked``).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ALL_BLOCKS
from lightning_actprune.codec.dispatch import simulated_gpu
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.codec.saved_ops import SAVED_OPS, Kind, Use, is_exact, nodes_of, of_node
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


PRODUCTS = nodes_of(Kind.PRODUCT)
"""Nodes whose gradients are products of the incoming one and the other factor."""
ATTENTION = nodes_of(Kind.ATTENTION)
"""Nodes of fused attention."""
VIEWS_AND_CASTS = nodes_of(Kind.HOLDS_VALUES)
"""Nodes of what holds the values of its input."""
READERS = frozenset(
    node for row in SAVED_OPS if isinstance(row.inputs, tuple) or not is_exact(row.inputs) for node in row.node_names
)
"""Nodes that may read what they saved in few bits, at least for some values of their arguments."""
_MASKS = nodes_of(Kind.SETS_VALUES)
_KEEP_MASKS = nodes_of(Kind.HOLDS_VALUES | Kind.KEEPS_OUTLIERS)
_MOST_NODES = 16
"""Operations among which a mask is looked for."""


def use_of(node: Any, place: int = 0, is_result: bool = False) -> Use:
    """Return how an autograd node uses a tensor that it saves.

    Args:
        node: The node.
        place: How many tensors it has saved before.
        is_result: Whether its operation has computed the tensor.
    """
    row = of_node(node.name())
    if row is None or (row.only is not None and getattr(node, f"_saved_{row.only[0]}", None) not in row.only[1]):
        return Use.EXACT
    if isinstance(row.inputs, tuple) and place < len(row.inputs):
        return row.inputs[place]
    if is_result:
        return row.result
    return row.inputs if isinstance(row.inputs, Use) else Use.BIAS


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
    if simulated_gpu() is not None:  # there are no values, and in most models no outliers
        return False
    _, rows, length = x.shape
    x = x[: max(_SAMPLE // (rows * length), 1), : max(_SAMPLE // length, 1)]
    values, none, _ = pack(x, block, ALL_BLOCKS, 8)
    read = unpack(values, none, none, x.shape[0] * x.shape[1], length, block, 8, x.dtype).view(x.shape)
    off = ~((read - x).abs() <= x.abs() / 2)  # also of what is no number
    lost = torch.nn.functional.pad((off & (x != 0)).float(), (0, -length % block)).view(-1, block).mean(-1)
    return not bool(((lost <= _LOST_SHARE).all() & x.isfinite().all()).item())
