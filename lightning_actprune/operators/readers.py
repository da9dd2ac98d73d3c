"""Facts about a tensor that an operation saves in eager mode, for ``codec.saved_ops`` to judge.

A mask may be there in some batches only, so what ``masked_fill`` or ``where`` put values into is not packed
(``is_masked``). Outliers are looked for by ``codec.outliers``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_actprune.codec.saved_ops import Kind, Use, nodes_of, of_node

_NODE = re.compile(r"(Backward)?\d*(_compiled)?$")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@functools.lru_cache(maxsize=1024)
def operator_name(node: str) -> str:
    """Return the name of an autograd node in snake case: ``NativeLayerNormBackward0`` is ``native_layer_norm``."""
    return _CAPITAL.sub("_", _NODE.sub("", node)).lower()


PRODUCTS = nodes_of(Kind.PRODUCT)
"""Nodes whose gradients are products of the incoming one and the other factor."""
GROUPED = nodes_of(Kind.GROUPED)
"""Nodes of products of groups of rows with a matrix each."""
ATTENTION = nodes_of(Kind.ATTENTION)
"""Nodes of fused attention."""
VIEWS_AND_CASTS = nodes_of(Kind.HOLDS_VALUES)
"""Nodes of operations whose result holds the values of their input."""
_RESHAPES = nodes_of(Kind.RESHAPE)
_MASKS = nodes_of(Kind.SETS_VALUES)
_KEEP_MASKS = nodes_of(Kind.HOLDS_VALUES | Kind.KEEPS_OUTLIERS)
_MOST_NODES = 16
"""Operations among which a mask is looked for."""


def use_of(node: Any, place: int = 0, is_result: bool = False) -> Use:
    """Return the use of a tensor that an autograd node saves.

    Args:
        node: The node.
        place: How many tensors it saved before.
        is_result: Whether its operation computed the tensor.
    """
    row = of_node(node.name())
    if row is None or (row.only is not None and getattr(node, f"_saved_{row.only[0]}", None) not in row.only[1]):
        return Use.EXACT
    if isinstance(row.inputs, tuple) and place < len(row.inputs):
        return row.inputs[place]
    if is_result:
        return row.result
    return row.inputs if isinstance(row.inputs, Use) else Use.BIAS


def nodes_since(tensors: Iterable[Tensor], number: int, names: dict[int, str]) -> dict[int, Any]:
    """Return the nodes behind ``tensors`` that are as new as ``number`` or newer, by their numbers.

    Autograd numbers the nodes of a thread in order, so that no older node leads to a newer one. ``names`` has the nodes
    that were visited before, by their numbers, which are not visited again; the new ones are added.
    """
    nodes: dict[int, Any] = {}
    waiting = [tensor.grad_fn for tensor in tensors]
    while waiting:
        node: Any = waiting.pop()
        if node is None or (own := node._sequence_nr()) < number or own in names:
            continue
        nodes[own], names[own] = node, node.name()
        waiting += [before for before, _ in node.next_functions]
    return nodes


def is_masked(tensor: Tensor) -> bool:
    """Return whether a mask put values into ``tensor``, before views, sums and products at most."""
    waiting, seen = [tensor.grad_fn], 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if node is not None and node.name() in _MASKS:
            return True
        if node is not None and node.name() in _KEEP_MASKS:
            waiting += [before for before, _ in node.next_functions]
    return False


def find_selection(
    tensor: Tensor, integers: Mapping[int, list[tuple[Tensor, int]]]
) -> tuple[tuple[Any, int], tuple[int, ...], Tensor] | None:
    """Return which result ``tensor`` was selected from by numbers of rows, its shape, and the numbers.

    ``None`` for any other tensor, and if the rows or their numbers were written to since. A node would unpack what it
    saved, which hooks around ours would see.

    Args:
        tensor: A saved tensor.
        integers: The integers that operations saved, with their versions, by the numbers of their nodes.
    """
    node: Any = tensor.grad_fn
    if node is None or node.name() != "IndexBackward0" or tensor._version:
        return None
    shape, saved = tuple(node._saved_self_sym_sizes), integers.get(node._sequence_nr(), ())
    if len(saved) != 1:
        return None
    numbers, version = saved[0]
    selected = [(*shape[:dim], *numbers.shape, *shape[dim + 1 :]) for dim in range(len(shape))]
    if selected[0] != tuple(tensor.shape) or selected.count(selected[0]) > 1 or numbers._version != version:
        return None
    return before_reshapes(*node.next_functions[0]), shape, numbers


def before_reshapes(node: Any, place: int) -> tuple[Any, int]:
    """Return the first result of a chain of views in other shapes, given the last one: its node and its place."""
    while node is not None and node.name() in _RESHAPES:
        node, place = node.next_functions[0]
    return node, place
