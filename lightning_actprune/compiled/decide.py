"""How each value that backward reads is kept: which reads belong together, and what is decided about them.

What it comes to is in ``compiled.joint_pass``; what a single read needs, in ``compiled.readers``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from lightning_actprune.codec.dispatch import KERNEL_DTYPES
from lightning_actprune.codec.saved_ops import Kind, ops_of
from lightning_actprune.compiled.graphs import (
    CASTS,
    FILLS,
    GETITEM,
    WEIGHTS,
    Joint,
    Read,
    count_of,
    first_input,
    mask_of,
    memory_of,
    name_of,
    passes_on,
    path,
    runs_again,
    same_place,
    source_of,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.layout import Layout, dropped_layout, layout_of, memory_order
from lightning_actprune.compiled.marks import Model
from lightning_actprune.compiled.readers import (
    Refused,
    Values,
    Way,
    is_random_mask,
    is_softmax,
    most_careful,
    only_weighs,
    scales_mask,
    way_of,
)

_STATISTICS = ops_of(Kind.STATISTIC)
_STEADY = ops_of(Kind.STEADY)
"""Operations that are computed again from quantized values; of relu the gradient asks for signs, which are stored."""
_FEWER = 16
"""A tensor that has so many times fewer values than a packed one is kept to compute something again from both."""
NORM = "aten.native_layer_norm"
EXACT = Values(64, 1)
"""How backward may read what it reads as it is."""


@dataclass
class Source:
    """A forward value that backward reads, and what was decided about it.

    Args:
        node: The value.
        reads: All reads of it.
        how: See ``compiled.joint_pass``; ``"uncompressed"`` until something else is decided.
        way: How its values are packed.
        layout: How they are read for that.
        base: The packed value that it is computed again from, or an input that backward reads as it is.
        reason: Why it stays as it is.
        ways: What each read needs.
    """

    node: Node
    reads: list[Read]
    how: str = "uncompressed"
    way: Values | None = None
    layout: Layout | None = None
    base: Source | None = None
    reason: str = ""
    ways: dict[Read, Way] = field(default_factory=dict)

    def reads_of(self, kind: str) -> list[Read]:
        """Return the reads that need signs, shape or values."""
        return [r for r, way in self.ways.items() if (way if isinstance(way, str) else "values") == kind]

    @property
    def packed(self) -> Node:
        """What is packed: the value, or a cast of it to a type of fewer bytes."""
        narrow = self.node
        for read in self.reads:
            for node in path(read.node, self.node):
                if name_of(node) in CASTS and same_place(node, self.node) and _is_narrower(node, narrow):
                    narrow = node
        return narrow


def _is_narrower(node: Node, than: Node) -> bool:
    return value_of(node).dtype.itemsize < value_of(than).dtype.itemsize and value_of(node).dtype in KERNEL_DTYPES


def sources_of(joint: Joint) -> list[Source]:
    """Return the floating-point values and drawn masks that backward reads, in their order, but for what is there.

    That are inputs of the graph, and parts of them, which no layer has marked or which get no gradient, and constants.
    """
    reads = defaultdict[Node, list[Read]](list)
    for node in joint.graph.nodes:
        value = tensor_of(node)
        if node in joint.forward and value is not None and (value.is_floating_point() or is_random_mask(node)):
            reads[source_of(node)] += joint.reads(node)
    sources = [Source(node, of) for node, of in reads.items() if of and not _is_there(joint, node, of)]
    return sorted(sources, key=lambda source: joint.order[source.node])


def _is_there(joint: Joint, node: Node, reads: list[Read]) -> bool:
    memory = memory_of(node)
    if memory.op != "placeholder":
        return name_of(memory) in FILLS  # which takes nothing to make again
    return memory in joint.given or all(read.mark is None for read in reads)


def inputs_of(joint: Joint) -> list[Source]:
    """Return the inputs of the graph of which backward reads a cast, though they are there anyway.

    These are weights, with which forward multiplies, and what gets no gradient, as the batch that the training holds.
    Not what forward writes to.
    """
    reads, others = defaultdict[Node, list[Read]](list), set[Node]()
    for node in joint.graph.nodes:
        source = source_of(node) if passes_on(node) else node
        if node not in joint.forward or source is node or source.op != "placeholder" or source in joint.changing:
            continue
        if any(name_of(on) in CASTS for on in path(node, source)):
            reads[source] += joint.reads(node)
            as_weight = all(_is_weight_of(user, node) for user in node.users if user in joint.forward)
            if not (as_weight or source in joint.given):
                others.add(source)
    return [Source(node, of) for node, of in reads.items() if of and node not in others]


def _is_weight_of(reader: Node, node: Node) -> bool:
    """Return whether a reader multiplies with a value as its weight, or passes it on to one that may."""
    place = WEIGHTS.get(name_of(reader))
    return passes_on(reader) if place is None else reader.args[place] is node


def decide(joint: Joint, model: Model, sources: list[Source]) -> dict[Node, Source]:
    """Decide how each source is kept, and return what may be computed again, each with what from."""
    by_node = {source.node: source for source in sources}
    read = {source_of(node) for node in joint.forward if joint.reads(node)}
    base: dict[Node, Source] = {}
    for node in joint.graph.nodes:
        if node not in joint.forward or tensor_of(node) is None:
            continue
        found = _base_of(joint, node, base, model)
        source = by_node.get(node)
        if source is not None:
            try:
                _decide_one(joint, model, source, found)
            except Refused as why:
                source.how, source.reason = "uncompressed", str(why)
        if source is not None and source.how == "packed" and source.way is not None and not source.way.drops:
            base[node] = source
        elif found is not None:
            base[node] = found
        elif node in read and _stays(joint, model, node):
            base[node] = Source(node, [], way=EXACT)
    return base


def _stays(joint: Joint, model: Model, node: Node) -> bool:
    """Return whether a node is an input that gets no gradient and stays what it is, and as large as what is packed."""
    value = value_of(node)
    is_given = node in joint.given and node not in joint.changing
    return is_given and value.dtype in KERNEL_DTYPES and count_of(value) >= model.min_values


def _decide_one(joint: Joint, model: Model, source: Source, base: Source | None) -> None:
    if runs_again(source.node):
        source.how, source.reason = "again", "a checkpoint computes it again"
        return
    _check(joint, model, source)
    if value_of(source.node).dtype == torch.bool:
        memory_order(value_of(source.node))
        source.ways, source.how = dict.fromkeys(source.reads, "signs"), "signs"
        return
    # What a norm that is written out multiplies with its weight belongs to it.
    norm = base.way if base is not None and _is_normalised(source.node) else None
    if norm is None or norm.operator != "norm":
        source.ways = {read: way_of(joint, model, read) for read in source.reads}
    else:
        source.ways = {read: norm if read.mark is None else way_of(joint, model, read) for read in source.reads}
    ways = [way for way in source.ways.values() if isinstance(way, Values)]
    if len(ways) < len(source.ways):
        memory_order(value_of(source.node))  # which there must be for signs and memory of its shape
    if not ways:
        source.how = "signs" if source.reads_of("signs") else "shape"
        return
    if memory_of(source.node) in joint.retained:
        raise Refused("it is an output, or shares the memory of one, which is retained anyway")
    source.way = most_careful(ways)
    if base is not None and base.way is not None and 0 < source.way.bits <= base.way.bits:
        source.how, source.base = "again", base
        return
    _lay_out(source)
    source.how = "packed"


def _check(joint: Joint, model: Model, source: Source) -> None:
    """Raise ``Refused`` of what is never packed."""
    value = value_of(source.node)
    if count_of(value) < model.min_values:
        raise Refused("it has few values")
    if value.dtype not in KERNEL_DTYPES and value.dtype != torch.bool:
        raise Refused(f"{value.dtype} values are not packed")
    of = first_input(source.node) if name_of(source.node) == GETITEM else source.node
    if name_of(of) in _STATISTICS or (name_of(of) == NORM and source.node.args[1] != 0):
        raise Refused("it is a statistic")
    if is_softmax(of):
        if not only_weighs(joint, of):
            raise Refused("it is a softmax that does more than weigh values")
        if scales_mask(joint, of):
            raise Refused("it is a softmax of masked scores times another tensor")
    elif name_of(of) == "aten.div" and any(name_of(source) == "aten.sum" for source in of.all_input_nodes[1:]):
        raise Refused("it is a quotient by a sum, in which its gradient is not linear")


def _lay_out(source: Source) -> None:
    """Decide how a source is read, all of it if the blocks that are to be dropped are not those of its readers."""
    assert source.way is not None
    packed = value_of(source.packed)
    if source.way.drops:
        mark = source.reads_of("values")[0].mark  # all drop the same blocks of the same values
        assert mark is not None
        try:
            source.layout = dropped_layout(packed, value_of(mark), source.way)
            return
        except Refused:
            if not source.way.bits:
                raise
        source.way = Values(source.way.bits, source.way.block_size)
    source.layout = layout_of(packed, source.way)


def _base_of(joint: Joint, node: Node, base: dict[Node, Source], model: Model) -> Source | None:
    """Return the one source that a node is steady and pointwise in, ``None`` if there is none."""
    if name_of(node) == GETITEM and name_of(first_input(node)) == NORM and node.args[1] == 0:
        return base.get(first_input(first_input(node)))
    if not (passes_on(node) or name_of(node) in _STEADY or _is_quotient(node)):
        return None
    found = {id(base[source]): base[source] for source in node.all_input_nodes if source in base}
    packed = [source for source in found.values() if source.how == "packed"]
    if len(packed or found) != 1:
        return None
    (source,) = packed or found.values()
    most = max(count_of(value_of(source.node)) // _FEWER, model.min_values)
    for other in node.all_input_nodes:
        value = tensor_of(other)
        large = value is not None and count_of(value) > most and not _is_mask_in_backward(joint, other)
        if base.get(other) is not source and (large or "val" not in other.meta or other in joint.changing):
            return None
    return source


def _is_mask_in_backward(joint: Joint, node: Node) -> bool:
    """Return whether a node stands for truth values that backward reads anyway, as dropout's does."""
    mask = mask_of(node)
    return mask is not None and bool(joint.reads(mask))


def _is_normalised(node: Node) -> bool:
    """Return whether a node is a product with the inverse of a deviation."""
    return name_of(node) == "aten.mul" and any(
        name_of(source_of(factor)) == "aten.rsqrt" for factor in node.all_input_nodes
    )


def _is_quotient(node: Node) -> bool:
    """Return whether a node divides by a number, or is a part of ``x / (1 + exp(-x))``, as a SiLU is decomposed."""
    if name_of(node) == "aten.exp":
        return name_of(first_input(node)) == "aten.neg" and all(_adds_one(user) for user in node.users)
    if name_of(node) != "aten.div":
        return False
    below = node.args[1]
    return not isinstance(below, Node) or (_adds_one(below) and name_of(first_input(below)) == "aten.exp")


def _adds_one(node: Node) -> bool:
    return name_of(node) == "aten.add" and node.args[1:] == (1,)
