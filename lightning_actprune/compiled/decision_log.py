"""Log how each value that backward reads is kept in compiled code, also where that code comes out of a cache.

Two steps decide that:

1. The pass over the joint graph of forward and backward packs values (``compiled.joint_pass``).
2. The partitioner splits the graph. It saves packed values as they are, and may compute unpacked ones again in
   backward. The forward graph that it returns shows what it saves. Inductor hands it to ``post_grad_custom_pre_pass``.
   Other compilers do not, and a cached forward is not partitioned: there, unpacked values count as saved, the upper
   limit.

Each open ``DecisionLog`` gets the rows of both steps: ``add_graph``, then ``settle``. Code from a cache, or from an
earlier training, runs without any pass. So inductor's code of a forward carries its settled rows as text, and its
``CachedDecisions`` adds them to each open log that does not have them yet.
"""

from __future__ import annotations

import json
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

# === Decisions ========================================================================================


class Row(NamedTuple):
    """How one value that backward reads is kept.

    Args:
        name: The layer that reads it, or the operation that computes it if no layer does.
        readers: Operations of backward that read it.
        shape: Its shape; symbolic sizes as they were when the graph was traced.
        dtype: Its type.
        dense_bytes: Bytes of the value, or of its cast if only that is read.
        stored_bytes: Bytes that are kept of it.
        how: ``"packed"``, ``"again"``, ``"signs"``, ``"shape"`` or ``"uncompressed"``.
        bits: Bits per value if it is packed.
        reason: Why it is kept unpacked, or that the compiler computes it again.
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
class PackedGraph:
    """The decisions on one joint graph.

    Args:
        rows: One for each value that backward reads.
        nodes: For each row, names of the nodes that hold the value or its packed bytes.
        inputs: Names of the inputs of forward.
        outputs: Number of outputs of forward, without saved values.
        min_values: Smaller tensors have no row.
    """

    rows: list[Row]
    nodes: list[set[str]]
    inputs: set[str]
    outputs: int
    min_values: int

    def settle(self, forward: Graph) -> list[Row] | None:
        """Return the rows with the bytes that ``forward`` saves, or ``None`` if it belongs to another joint graph."""
        if not {node.name for node in forward.find_nodes(op="placeholder")} <= self.inputs:
            return None
        (results,) = forward.output_node().args
        assert isinstance(results, list | tuple)
        logged = set[str]().union(*self.nodes, self.inputs)
        saved = {_logged_name(node, logged): node for node in results[self.outputs :] if isinstance(node, Node)}
        rows = []
        for row, names in zip(self.rows, self.nodes, strict=True):
            stored = sum(bytes_of(value_of(node)) for name, node in saved.items() if name in names)
            if row.how == "uncompressed" and not stored:
                row = row._replace(how="again", reason="the compiler computes it again")
            rows.append(row._replace(stored_bytes=stored))
        # Values that no row is about: statistics, and values that the compiler computes others from.
        for name, node in saved.items():
            if name in logged or tensor_of(node) is None or memory_of(node).op == "placeholder":
                continue
            value = value_of(node)
            if count_of(value) >= self.min_values:
                size, shape = bytes_of(value), tuple(hints(value.shape))
                reason = "the compiler saves it"
                rows.append(Row(operation_of(node), (), shape, value.dtype, size, size, "uncompressed", 0, reason))
        return rows


def _logged_name(node: Node, logged: set[str]) -> str:
    """Return the name under which the values of ``node`` are logged, or its own: the partitioner may save a view."""
    viewed = node
    while viewed.name not in logged and name_of(viewed) in VIEWS:
        viewed = first_input(viewed)
    return viewed.name if viewed.name in logged else node.name


def operation_of(node: Node) -> str:
    """Return the name of the operation that computes a node."""
    return name_of(first_input(node)) if name_of(node) == GETITEM else name_of(node)


# === Logs =============================================================================================


class DecisionLog(list[Row]):
    """The decisions on all graphs that were compiled, or that ran from a cache, while the log was open.

    Attributes:
        texts: Settled rows that it has, as text.
        unsettled: First row and number of rows of each graph that is not settled.
        has_packed: Whether any graph was packed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts = set[str]()
        self.unsettled: list[tuple[int, int]] = []
        self.has_packed = False

    def add_graph(self, rows: list[Row]) -> None:
        """Add the rows of a graph that was packed and is not settled yet."""
        self.unsettled.append((len(self), len(rows)))
        self.has_packed = True
        self += rows

    def settle(self, rows: list[Row], text: str) -> None:
        """Replace the rows of a graph by its settled ones, or add these if the graph is not there."""
        self.texts.add(text)
        for place in reversed(self.unsettled):
            start, count = place
            if list(map(_settled_fields, self[start : start + count])) == list(map(_settled_fields, rows[:count])):
                self.unsettled.remove(place)
                self[start : start + count] = rows
                shift = len(rows) - count
                self.unsettled = [(at if at < start else at + shift, n) for at, n in self.unsettled]
                return
        self += rows


def _settled_fields(row: Row) -> tuple[object, ...]:
    """Return the fields that settling does not change."""
    return row.name, row.readers, row.shape, row.dtype, row.bits


_open_logs: tuple[DecisionLog, ...] = ()
_pending_text: str | None = None


def open_logs() -> tuple[DecisionLog, ...]:
    """Return the open logs, as a new tuple whenever one was opened or closed."""
    return _open_logs


def open_log(log: DecisionLog) -> None:
    """Let ``log`` get all decisions from now on."""
    global _open_logs
    _open_logs = (*_open_logs, log)


def close_log(log: DecisionLog) -> None:
    """Let ``log`` get no more decisions."""
    global _open_logs
    _open_logs = tuple(other for other in _open_logs if other is not log)


# === Code from a cache ================================================================================


def settle_logs(rows: list[Row]) -> None:
    """Settle a graph in all open logs, and keep its rows as text for the code that inductor writes next."""
    global _pending_text
    _pending_text = json.dumps([row._replace(dtype=str(row.dtype).removeprefix("torch.")) for row in rows])  # type: ignore[arg-type]
    for log in _open_logs:
        log.settle(rows, _pending_text)


def pop_pending_text() -> str | None:
    """Return the text of the graph that was settled last, once."""
    global _pending_text
    text, _pending_text = _pending_text, None
    return text


class CachedDecisions:
    """Settled rows of a graph, in inductor's code of its forward, which calls this in each run.

    Args:
        text: From ``pop_pending_text``.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._informed: tuple[DecisionLog, ...] | None = None

    def __call__(self) -> None:
        """Settle the graph in each open log that does not have its rows."""
        if self._informed is not _open_logs:
            self._informed = _open_logs
            for log in _open_logs:
                if self._text not in log.texts:
                    log.settle(_rows_of(self._text), self._text)


def _rows_of(text: str) -> list[Row]:
    rows = []
    for name, readers, shape, dtype, *rest in json.loads(text):
        rows.append(Row(name, tuple(readers), tuple(shape), getattr(torch, dtype), *rest))
    return rows
