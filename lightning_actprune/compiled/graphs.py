"""What is asked of a joint graph, and how nodes are added to it.

A joint graph holds forward and backward of a compiled region. *Forward* is what the user's outputs, and what is written
to inputs, are computed from. What depends on a gradient (``tangents``) is backward, and all the rest is computed for
backward alone. A value that forward computes and anything else reads has to be kept from forward to backward: the
partitioner, which comes later, decides how, by the graph that it is given.

Operations are known by names such as ``"aten.view"``, so that one that a torch does not have is only never met.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

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

Size: TypeAlias = "int | torch.SymInt"

GETITEM = "getitem"
VIEWS = ops_of(Kind.VIEW)
"""Operations that hold all values of their input, in its memory."""
CASTS = ops_of(Kind.CAST)
COPIES = ops_of(Kind.CAST | Kind.COPY)
"""Operations that hold all values of their input in memory of their own."""
PARTS = ops_of(Kind.PART) | {GETITEM}
"""Operations that hold some values of their input, in its memory; ``getitem`` those of a split."""
_PAD = "aten.constant_pad_nd"
"""With which inductor pads the factors of a product of matrices, where that is faster."""
SPLITS = ops_of(Kind.SPLIT)
_MULTIPLY = ops_of(Kind.GEMM) | backward_of(Kind.GEMM)
FILLS = {"aten.full": 1, "aten.full_like": 1, "aten.scalar_tensor": 0}
"""Operations that make tensors of one number, and the place of that."""
WEIGHTS = {"aten.mm": 1, "aten.addmm": 2, "aten.convolution": 1}
"""Operations with a weight, and its place; what it multiplies comes right before it."""
MARK, ENDED = "actprune.mark", "actprune.ended"
FORWARD, BACKWARD, NOT_IN_FORWARD = "is_forward", "is_backward", "must_be_in_backward"
"""Where a node belongs, as the partitioner knows it."""


def name_of(node: Node) -> str:
    """Return the name of an operation, ``"aten.view"``, empty for what is none."""
    if node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return GETITEM
    return str(getattr(node.target, "overloadpacket", ""))


def tensor_of(node: Node) -> Tensor | None:
    """Return the fake tensor that a node stands for, ``None`` if it stands for something else."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def value_of(node: Node) -> Tensor:
    """Return the fake tensor that a node stands for."""
    value = tensor_of(node)
    assert value is not None
    return value


def same_place(node: Node, other: Node) -> bool:
    """Return whether two values have the same shape and strides, as a cast has."""
    a, b = value_of(node), value_of(other)
    return a.dim() == b.dim() and hints(a.shape) == hints(b.shape) and hints(a.stride()) == hints(b.stride())


def is_size(node: Node) -> bool:
    """Return whether a node stands for a number, as the size of a dimension is."""
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def hint(size: Size) -> int:
    """Return a size, for a symbol the one that was seen when the graph was traced; asking makes it no constant.

    What depends on values, such as the count of a ``nonzero``, is taken to be 0.
    """
    if isinstance(size, int):
        return size
    return int(cast(int, size.node.hint)) if size.node.has_hint() else 0


def hints(sizes: Any) -> list[int]:
    """Return all of ``sizes`` as they were when the graph was traced."""
    return [hint(size) for size in sizes]


def count_of(x: Tensor) -> int:
    """Return how many values a tensor has."""
    return hint(x.numel())


def bytes_of(x: Tensor) -> int:
    """Return how many bytes the values of a tensor take."""
    return count_of(x) * x.dtype.itemsize


def passes_on(node: Node) -> bool:
    """Return whether a node holds the values of its first input, all of them, and besides zeros at most."""
    name = name_of(node)
    if name == _PAD:
        pads, *filled = node.args[1:]
        assert isinstance(pads, list | tuple)
        return all(isinstance(pad, int) and pad >= 0 for pad in pads) and not any(filled) and _is_multiplied(node)
    if name in CASTS:  # to whole numbers or to ``bool`` others come of it
        return value_of(node).dtype.is_floating_point and value_of(first_input(node)).dtype.is_floating_point
    return name in VIEWS or name in COPIES or name == MARK


def _is_multiplied(node: Node) -> bool:
    """Return whether products alone read a node. A layer's mark says of what it stands behind, with the zeros."""
    return all(multiplies(user) or (name_of(user) in VIEWS | COPIES and _is_multiplied(user)) for user in node.users)


def multiplies(node: Node) -> bool:
    """Return whether a node is a product of matrices, a convolution or attention, in forward or backward."""
    return name_of(node) in _MULTIPLY or name_of(node).startswith("aten._scaled_dot_product")


def first_input(node: Node) -> Node:
    """Return the input of a node that passes it on."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def source_of(node: Node) -> Node:
    """Return what a node holds the values of, behind views, casts, copies and marks."""
    while passes_on(node):
        node = first_input(node)
    return node


def path(node: Node, source: Node) -> list[Node]:
    """Return the nodes by which a source is passed on to ``node``, both included."""
    found = [node]
    while found[-1] is not source:
        found.append(first_input(found[-1]))
    return found


def mask_of(node: Node) -> Node | None:
    """Return the truth values that a node stands for, perhaps as numbers, ``None`` if it stands for something else."""
    source = first_input(node) if name_of(node) in CASTS else node
    value = tensor_of(source)
    return source if value is not None and value.dtype == torch.bool else None


def memory_of(node: Node) -> Node:
    """Return the node in whose memory a node lies."""
    while True:
        name = name_of(node)
        if name == GETITEM and name_of(first_input(node)) not in SPLITS:
            return node
        if name not in VIEWS and name not in PARTS and name not in SPLITS and name != MARK:
            return node
        node = first_input(node)


@dataclass(frozen=True)
class Read:
    """One read of a forward value in backward.

    Args:
        node: The value as it is read, behind views and casts.
        reader: What reads it.
        mark: The mark behind which it does, ``None`` without one.
    """

    node: Node
    reader: Node
    mark: Node | None

    @property
    def layer(self) -> Mark | None:
        """The mark's content."""
        return None if self.mark is None else Mark.read(str(self.mark.args[1]))


def mark_of(node: Node) -> Node | None:
    """Return the mark that is nearest to a value, ``None`` if there is none between it and its source."""
    while passes_on(node):
        if name_of(node) == MARK:
            return node
        node = first_input(node)
    return None


class Joint:
    """A joint graph, seen as forward and backward.

    Args:
        graph: The graph.

    Attributes:
        forward: Nodes that forward needs.
        tangent: Nodes that depend on a gradient.
        marked: Nodes that depend on a mark, and inputs of the graph that a layer has marked.
        retained: Nodes in whose memory outputs lie, which somebody may hold until backward; none in a piece of a graph.
        given: Inputs that get no gradient, such as the batch.
        names_operations: Whether nodes of backward say which operation they belong to.
        changing: Inputs that forward writes to, and what depends on them: backward would find other values there.
        order: Places of the nodes.
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
        # Where what a layer reads is an output, with its mark, the graph is a piece of one. Most of what it returns is
        # for the next piece, which packs what it reads; what the user is given as well cannot be told from that.
        given = [node for node in outputs if name_of(node) == MARK]
        is_piece = any(Mark.read(str(node.args[1])).operator != RECOMPUTE for node in given)
        self.retained = set() if is_piece else {memory_of(node) for node in outputs}
        self.given = self._without_gradient(nodes) if self.tangent else set()
        self._operations = dict[int | None, Node]()
        for node in nodes:
            # What needs no gradient has the number of the operation before it: the first one is that with the number.
            if node in self.forward and node.op == "call_function":
                self._operations.setdefault(sequence_number(node), node)
        self._operations.pop(None, None)
        self.names_operations = any(self.operation_of(node) is not None for node in self.tangent)

    def operation_of(self, reader: Node) -> Node | None:
        """Return the first node of the operation in forward whose backward a node is a part of, ``None`` if unknown.

        It is unknown of what custom functions compute, and where inductor has put other operations in its place.
        """
        operation = self._operations.get(sequence_number(reader)) if is_of_autograd(reader) else None
        return None if operation is None or not original_operation(operation) else operation

    def _without_gradient(self, nodes: list[Node]) -> set[Node]:
        """Return the inputs of forward in whose place there is no gradient, of which the last results are a list."""
        inputs = [node for node in nodes if node.op == "placeholder" and node not in self.tangent]
        (results,) = self.graph.output_node().args
        assert isinstance(results, list | tuple)
        gradients = results[-len(inputs) :] if inputs else ()
        return {node for node, gradient in zip(inputs, gradients, strict=True) if gradient is None}

    def forward_of(self) -> tuple[set[str], int]:
        """Return the names of the inputs of forward, and how many outputs it has."""
        inputs = {node.name for node in self.graph.find_nodes(op="placeholder") if node not in self.tangent}
        (results,) = self.graph.output_node().args
        assert isinstance(results, list | tuple)
        return inputs, len(results) - len(inputs)

    def readers(self, node: Node) -> list[Node]:
        """Return what reads a forward node and is no part of forward, in the order of the graph."""
        others = [user for user in node.users if user not in self.forward]
        readers = [user for user in others if user.op != "output" and not is_size(user)]
        return sorted(readers, key=self.order.__getitem__)

    def reads(self, node: Node) -> list[Read]:
        """Return all reads of a forward node in backward."""
        endings = (ending for reader in self.readers(node) for ending in self.endings(node, reader))
        return [Read(given, reader, mark_of(given)) for given, reader in endings]

    def endings(self, node: Node, reader: Node) -> Iterator[tuple[Node, Node]]:
        """Yield what computes something of a node that ``reader`` reads, and as which node it is given that."""
        waiting = [(node, reader)]
        while waiting:
            given, user = waiting.pop()
            if user.op == "output" or is_size(user):
                continue
            if passes_on(user) and user not in self.tangent:
                waiting += [(user, further) for further in user.users]
            else:
                yield given, user


def put_in_order(graph: Graph) -> None:
    """Put every node behind what it reads, right before its first reader where it is not.

    Where inductor has put fused attention in place of one that is written out, nodes of backward may read later ones.
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
    found = set[Node]()
    for node in nodes:
        if chosen(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


class Writer:
    """Adds nodes to a graph, each with the value that it stands for.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        values = (tensor for node in graph.nodes if (tensor := tensor_of(node)) is not None)
        self._fake_mode: Any = next(values).fake_mode  # type: ignore[attr-defined]
        self._tag: str | None = None

    @contextmanager
    def before(self, node: Node, tag: str) -> Iterator[None]:
        """Add nodes before ``node``; ``tag`` says to the partitioner where they belong."""
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
        """Add a copy of a node that reads others in place of its inputs."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: inputs.get(source, source))
        assert callable(node.target)
        return self.call(node.target, *args, **kwargs)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return a node as ``dtype``, itself if it is that."""
        value = node.meta["val"]
        return node if value.dtype == dtype else self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def size(self, node: Node, dim: int) -> int | Node:
        """Return the size of a dimension: a number if it is known, or a node."""
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.call(torch.ops.aten.sym_size.int, node, dim)

    def compute(self, function: Callable[[Any, Any], Any], a: int | Node, b: int | Node) -> int | Node:
        """Return what ``function`` makes of two integers: a number if both are, or a node."""
        if isinstance(a, Node) or isinstance(b, Node):
            return self.call(function, a, b)
        result: int = function(a, b)
        return result


def after(node: Node) -> Node:
    """Return the node before which to add what reads ``node``."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def must_be_saved(node: Node) -> None:
    """Let the partitioner save what a node stands for, and not compute it again."""
    set_checkpoint_policy(node, CheckpointPolicy.MUST_SAVE)


def runs_again(node: Node) -> bool:
    """Return whether a checkpoint computes a node again in backward anyway."""
    return checkpoint_policy(node) in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
