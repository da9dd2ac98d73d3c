"""Read a joint graph, and add nodes to it.

A joint graph holds forward and backward of a compiled region. *Forward* computes the outputs and what is written to
inputs. *Backward* depends on a gradient (``tangents``). The other nodes are computed for backward alone. If forward
computes a value and a node outside of forward reads it, the value has to be stored from forward to backward. The
partitioner, which runs later, decides how, by the graph that it gets.

Operations have names such as ``"aten.view"``, so that an operation that this torch lacks does no harm.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from lightning_actprune.codec.private import (
    checkpoint_policy,
    is_of_autograd,
    is_tangent,
    original_operation,
    place_in_half,
    sequence_number,
    set_checkpoint_policy,
)
from lightning_actprune.codec.saved_ops import Kind, backward_of, ops_of
from lightning_actprune.compiled.marks import RECOMPUTE, Mark

GETITEM = "getitem"
MARK, MARK_OUTPUT = "actprune.mark", "actprune.mark_output"
FEWER = 16
"""A tensor with this many times fewer values, such as a statistic or a weight, is small beside another."""
VIEWS = ops_of(Kind.VIEW)
"""Operations whose result has all values of their input, in its memory."""
CASTS = ops_of(Kind.CAST)
COPIES = ops_of(Kind.CAST | Kind.COPY)
"""Operations whose result has all values of their input, in memory of its own."""
PARTS = ops_of(Kind.PART) | {GETITEM}
"""Operations whose result has some values of their input, in its memory; ``getitem`` those of a split."""
_PAD = "aten.constant_pad_nd"
"""Inductor pads the factors of a matrix product with it, where that is faster."""
SPLITS = ops_of(Kind.SPLIT)
_SHARE_MEMORY = VIEWS | PARTS | SPLITS | {MARK}
_MULTIPLY = ops_of(Kind.GEMM) | backward_of(Kind.GEMM)
FILLS = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}
"""Operations that fill a tensor with one number, and the place of that number in their arguments."""
WEIGHTS = {"aten.mm": 1, "aten.addmm": 2, "aten.convolution": 1}
"""Operations with a weight, and its place in their arguments, right behind the factor that it multiplies."""
FORWARD, BACKWARD, NOT_IN_FORWARD = "is_forward", "is_backward", "must_be_in_backward"
"""Tags by which the partitioner knows where a node belongs."""


def name_of(node: Node) -> str:
    """Return the name of a node's operation, ``"aten.view"``, or ``""`` if it calls none."""
    if node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return GETITEM
    return str(getattr(node.target, "overloadpacket", ""))


def tensor_of(node: Node) -> Tensor | None:
    """Return the fake tensor of a node, ``None`` if its value is no tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def value_of(node: Node) -> Tensor:
    """Return the fake tensor of a node, whose value must be a tensor."""
    value = tensor_of(node)
    assert value is not None
    return value


def is_laid_out_like(node: Node, other: Node) -> bool:
    """Return True if two values have the same shape and strides, like a value and its cast."""
    a, b = value_of(node), value_of(other)
    return a.dim() == b.dim() and hints(a.shape) == hints(b.shape) and hints(a.stride()) == hints(b.stride())


def is_size(node: Node) -> bool:
    """Return True if the value of a node is an integer, like the size of a dimension."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def hint(size: int | torch.SymInt) -> int:
    """Return a size; for a symbol, its size in the trace, without making it a constant.

    Sizes that depend on values, such as the count of a ``nonzero``, are 0.
    """
    if isinstance(size, int):
        return size
    return int(cast(int, size.node.hint)) if size.node.has_hint() else 0


def hints(sizes: Any) -> list[int]:
    """Return the sizes that ``sizes`` had in the trace."""
    return [hint(size) for size in sizes]


def count_of(x: Tensor) -> int:
    """Return the number of values of a tensor."""
    return hint(x.numel())


def bytes_of(x: Tensor) -> int:
    """Return the bytes of the values of a tensor."""
    return count_of(x) * x.dtype.itemsize


def passes_on(node: Node) -> bool:
    """Return True if a node passes on all values of its first input, and adds zeros at most."""
    name = name_of(node)
    if name == _PAD:
        pads, *filled = node.args[1:]
        assert isinstance(pads, list | tuple)
        return all(isinstance(pad, int) and pad >= 0 for pad in pads) and not any(filled) and _is_multiplied(node)
    if name in CASTS:  # a cast to integers or ``bool`` changes the values
        return value_of(node).dtype.is_floating_point and value_of(first_input(node)).dtype.is_floating_point
    return name in VIEWS or name in COPIES or name == MARK


def _is_multiplied(node: Node) -> bool:
    """Return True if only products read a node; not behind a mark, which holds for the values with the zeros."""
    return all(multiplies(user) or (name_of(user) in VIEWS | COPIES and _is_multiplied(user)) for user in node.users)


def multiplies(node: Node) -> bool:
    """Return True if a node is a matrix product, a convolution or attention, in forward or backward."""
    return name_of(node) in _MULTIPLY or name_of(node).startswith("aten._scaled_dot_product")


def is_read_by_product(node: Node) -> bool:
    """Return True if a product reads a node, or a view of it."""
    return any(multiplies(user) or (name_of(user) in VIEWS and is_read_by_product(user)) for user in node.users)


def first_input(node: Node) -> Node:
    """Return the first input of a node."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def source_of(node: Node) -> Node:
    """Return the node whose values a node passes on through views, casts, copies and marks."""
    while passes_on(node):
        node = first_input(node)
    return node


def path(node: Node, source: Node) -> list[Node]:
    """Return the nodes that pass on the values of ``source`` to ``node``, with both ends."""
    nodes = [node]
    while nodes[-1] is not source:
        nodes.append(first_input(nodes[-1]))
    return nodes


def mask_of(node: Node) -> Node | None:
    """Return the boolean node that a node is, or is a cast of, and otherwise ``None``."""
    source = first_input(node) if name_of(node) in CASTS else node
    value = tensor_of(source)
    return source if value is not None and value.dtype == torch.bool else None


def memory_of(node: Node) -> Node:
    """Return the node whose memory a node shares."""
    while name_of(node) in _SHARE_MEMORY and (name_of(node) != GETITEM or name_of(first_input(node)) in SPLITS):
        node = first_input(node)
    return node


@dataclass(frozen=True)
class Read:
    """One read of a forward value in backward.

    Args:
        node: The value or a view or cast of it, the argument of ``reader``.
        reader: The node that reads it.
        mark: The mark between the value and ``node``, ``None`` without one.
    """

    node: Node
    reader: Node
    mark: Node | None

    @property
    def layer(self) -> Mark | None:
        """What the mark says."""
        return None if self.mark is None else read_mark(self.mark)


def read_mark(node: Node) -> Mark:
    """Return the content of a mark in a graph."""
    return Mark.read(str(node.args[1]))


def mark_of(node: Node) -> Node | None:
    """Return the last mark between a node and its source, ``None`` without one."""
    while passes_on(node):
        if name_of(node) == MARK:
            return node
        node = first_input(node)
    return None


class Joint:
    """A joint graph, divided into forward and backward.

    Args:
        graph: The graph.

    Attributes:
        forward: Nodes that forward needs.
        tangent: Nodes that depend on a gradient.
        marked: Nodes that depend on a mark, and inputs of the graph that a layer has marked.
        retained: Nodes whose memory outputs share: the caller may hold it until backward. None in a piece of a graph.
        inputs: Inputs of forward.
        output_count: Number of outputs of forward, in a graph with a backward.
        without_gradient: Inputs that get no gradient, such as the batch.
        names_operations: Whether nodes of backward name the operation that they belong to.
        changing: Inputs that forward writes to, and nodes that depend on them: backward would read other values.
        order: Positions of the nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        nodes = list(graph.nodes)
        self.order = {node: place for place, node in enumerate(nodes)}
        self.tangent = closure(nodes, is_tangent)
        marks = [node for node in nodes if name_of(node) == MARK]
        self.marked = closure(nodes, {*marks, *map(source_of, marks)}.__contains__)
        outputs = [node for node in graph.output_node().all_input_nodes if node not in self.tangent]
        written = [node for node in nodes if name_of(node) == "aten.copy_" and node not in self.tangent]
        self.changing = closure(nodes, {memory_of(first_input(node)) for node in written}.__contains__)
        self.forward = set[Node]()
        waiting = outputs + written
        while waiting:
            node = waiting.pop()
            if node not in self.forward:
                self.forward.add(node)
                waiting += node.all_input_nodes
        # If a layer's input is an output, with its mark, the graph is a piece. Most of its outputs go to the next one,
        # which packs what it reads; outputs that the user gets, too, look the same.
        output_marks = [node for node in outputs if name_of(node) == MARK]
        is_piece = any(read_mark(node).operator != RECOMPUTE for node in output_marks)
        self.retained = set() if is_piece else {memory_of(node) for node in outputs}
        self.inputs = [node for node in nodes if node.op == "placeholder" and node not in self.tangent]
        self.output_count, self.without_gradient = 0, set[Node]()
        if self.tangent:
            (results,) = graph.output_node().args
            assert isinstance(results, list | tuple)
            self.output_count = len(results) - len(self.inputs)  # behind them come the gradients of all inputs
            gradients = zip(self.inputs, results[self.output_count :], strict=True)
            self.without_gradient = {node for node, gradient in gradients if gradient is None}
        self._operations = dict[int | None, Node]()
        for node in nodes:
            # Operations without a gradient repeat the number of the one before: the first node with it is the owner.
            if node in self.forward and node.op == "call_function":
                self._operations.setdefault(sequence_number(node), node)
        self._operations.pop(None, None)
        self.names_operations = any(self.operation_of(node) is not None for node in self.tangent)

    def operation_of(self, reader: Node) -> Node | None:
        """Return the first forward node of the operation whose backward a node belongs to, ``None`` if unknown.

        It is unknown for custom functions, and where inductor has replaced operations by others.
        """
        operation = self._operations.get(sequence_number(reader)) if is_of_autograd(reader) else None
        return None if operation is None or not original_operation(operation) else operation

    def reads(self, node: Node) -> list[Read]:
        """Return all reads of a forward node in backward, also those of views and casts that backward makes of it."""
        readers = sorted((user for user in node.users if user not in self.forward), key=self.order.__getitem__)
        reads, waiting = list[Read](), [(node, reader) for reader in reversed(readers)]
        while waiting:
            argument, user = waiting.pop()
            if user.op == "output" or is_size(user):
                continue
            if passes_on(user) and user not in self.tangent:
                waiting += [(user, further) for further in user.users]
            else:
                reads.append(Read(argument, user, mark_of(argument)))
        return reads


def put_in_order(graph: Graph) -> None:
    """Move nodes that come after a reader of theirs to right before it.

    Where inductor has fused written-out attention, nodes of backward may read later ones.
    """
    ordered = dict[Node, None]()
    for node in graph.nodes:
        waiting = [node]
        while waiting:
            lacking = [source for source in waiting[-1].all_input_nodes if source not in ordered]
            if lacking:
                waiting += reversed(lacking)
            else:
                ordered[waiting.pop()] = None
    for before, node in itertools.pairwise(ordered):
        if before.next is not node:
            before.append(node)


def closure(nodes: Iterable[Node], chosen: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes that are chosen, and all that depend on them."""
    dependents = set[Node]()
    for node in nodes:
        if chosen(node) or any(source in dependents for source in node.all_input_nodes):
            dependents.add(node)
    return dependents


class Writer:
    """Adds nodes with fake values to a graph.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        values = (tensor for node in graph.nodes if (tensor := tensor_of(node)) is not None)
        self._fake_mode: Any = next(values).fake_mode  # type: ignore[attr-defined]
        self._tag: str | None = None

    @contextmanager
    def before(self, node: Node, tag: str | None) -> Iterator[None]:
        """Add nodes before ``node``; ``tag`` tells the partitioner, if it is still to run, where they belong."""
        self._tag = tag
        with self.graph.inserting_before(node):
            yield

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Add a call of an operation."""
        node = self.graph.call_function(target, args, kwargs)
        values, options = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self._fake_mode, torch.no_grad():
            node.meta["val"] = target(*values, **options)
        if self._tag is not None:
            place_in_half(node, self._tag)
        return node

    def copy(self, node: Node, inputs: dict[Node, Node]) -> Node:
        """Add a copy of a node that reads ``inputs[x]`` in place of ``x``."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: inputs.get(source, source))
        assert callable(node.target)
        return self.call(node.target, *args, **kwargs)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return a node cast to ``dtype``, or itself if it has that type."""
        value = node.meta["val"]
        return node if value.dtype == dtype else self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def size(self, node: Node, dim: int) -> int | Node:
        """Return the size of a dimension: an integer, or a node if it is a symbol."""
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

    def compute(self, function: Callable[[Any, Any], Any], a: int | Node, b: int | Node) -> int | Node:
        """Return ``function(a, b)``: an integer, or a node if one of them is a node."""
        if isinstance(a, Node) or isinstance(b, Node):
            return self.call(function, a, b)
        result: int = function(a, b)
        return result


def after(node: Node) -> Node:
    """Return the first node before which readers of ``node`` may be added."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def force_save(node: Node) -> None:
    """Let the partitioner save the value of a node, and not compute it again."""
    set_checkpoint_policy(node, CheckpointPolicy.MUST_SAVE)


def runs_again(node: Node) -> bool:
    """Return True if a checkpoint computes a node again in backward."""
    return checkpoint_policy(node) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
