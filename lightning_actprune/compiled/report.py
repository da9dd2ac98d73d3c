"""What is said of the values that backward reads, and what of it the partitioner has kept.

What the pass leaves as it is need not be saved: the partitioner computes some of it again from other values, and saves
those. So rows are *settled* by the graph of forward that comes out of the partitioner, whose last outputs are what is
saved. Inductor shows it, in ``post_grad_custom_pre_pass``; with another compiler, or where forward comes out of its
cache, what stays as it is is said to be saved, which is the most that it may take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from lightning_actprune.compiled.graphs import (
    GETITEM,
    VIEWS,
    bytes_of,
    count_of,
    first_input,
    hints,
    memory_of,
    name_of,
    tensor_of,
    value_of,
)


class Row(NamedTuple):
    """How one value that backward reads is kept.

    Args:
        name: The layer that reads it, or the operation that computes it where no layer does.
        readers: What reads it in backward.
        shape: Its shape, symbols as they were when it was traced.
        dtype: Its type.
        dense_bytes: Bytes of it as it is, or of its cast if nothing else of it is read.
        stored_bytes: Bytes that are kept of it.
        how: ``"packed"``, ``"again"``, ``"signs"``, ``"shape"`` or ``"as it is"``.
        bits: Bits of a packed value.
        reason: Why it stays as it is, or who computes it again.
    """

    name: str
    readers: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dense_bytes: int
    stored_bytes: int
    how: str
    bits: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Packed:
    """What was decided of a joint graph.

    Args:
        rows: Of each value that backward reads.
        nodes: By row, the names of the nodes that hold the value or what is stored of it.
        inputs: Names of the inputs of forward.
        outputs: How many outputs forward has besides what it saves.
        min_values: Tensors of fewer values are not listed.
    """

    rows: list[Row]
    nodes: list[set[str]]
    inputs: set[str]
    outputs: int
    min_values: int

    def settled(self, graph: Graph) -> list[Row] | None:
        """Return the rows by what a graph saves, ``None`` if it is not the forward of this joint graph."""
        if not {node.name for node in graph.find_nodes(op="placeholder")} <= self.inputs:
            return None
        (results,) = graph.output_node().args
        assert isinstance(results, list | tuple)
        known = set[str]().union(*self.nodes, self.inputs)
        saved = {_seen_through(node, known): node for node in results[self.outputs :] if isinstance(node, Node)}
        rows = [self._settled(row, saved, names) for row, names in zip(self.rows, self.nodes, strict=True)]
        others = [node for name, node in saved.items() if name not in known and tensor_of(node) is not None]
        others = [node for node in others if memory_of(node).op != "placeholder"]
        return rows + [_other(node) for node in others if count_of(value_of(node)) >= self.min_values]

    @staticmethod
    def _settled(row: Row, saved: dict[str, Node], names: set[str]) -> Row:
        stored = sum(bytes_of(value_of(node)) for name, node in saved.items() if name in names)
        if row.how == "as it is" and not stored:
            return row._replace(how="again", stored_bytes=0, reason="the compiler computes it again")
        return row._replace(stored_bytes=stored)


def _seen_through(node: Node, known: set[str]) -> str:
    """Return the name of what is known of which a node holds all values in the same memory, its own without any.

    The partitioner may save a view that backward begins with.
    """
    seen = node
    while seen.name not in known and name_of(seen) in VIEWS:
        seen = first_input(seen)
    return seen.name if seen.name in known else node.name


def _other(node: Node) -> Row:
    """Return what is said of a value that was not known to be read: a statistic, or what others are computed from."""
    value = value_of(node)
    size, shape = bytes_of(value), tuple(hints(value.shape))
    return Row(computed_by(node), (), shape, value.dtype, size, size, "as it is", 0, "the compiler saves it")


def computed_by(node: Node) -> str:
    """Return the name of the operation that computes a node."""
    return name_of(first_input(node)) if name_of(node) == GETITEM else name_of(node)
