"""Decide how to store each value that backward reads.

``compiled.joint_pass`` describes the ways, and ``compiled.readers`` judges a single read.
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
    FEWER,
    FILLS,
    GETITEM,
    WEIGHTS,
    Joint,
    Read,
    count_of,
    first_input,
    is_laid_out_like,
    mask_of,
    memory_of,
    name_of,
    passes_on,
    path,
    runs_again,
    source_of,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.layout import Layout, layout_of, layout_with_drops, memory_order
from lightning_actprune.compiled.marks import Model
from lightning_actprune.compiled.readers import (
    Refusal,
    Values,
    Way,
    combine_ways,
    find_way,
    is_random_mask,
    is_softmax,
    only_weighs,
    scales_mask,
)

_STATISTICS = ops_of(Kind.STATISTIC)
_STEADY = ops_of(Kind.STEADY)
"""Operations that backward may compute again from quantized values; relu's gradient uses stored signs."""
NORM = "aten.native_layer_norm"
EXACT = Values(64, 1)
"""The way of uncompressed values: it has enough bits for every reader."""


@dataclass(eq=False)
class Source:
    """A forward value that backward reads, with the decision how to store it.

    Args:
        node: The value.
        reads: All reads of it.
        how: See ``compiled.joint_pass``; ``"uncompressed"`` before the decision.
        way: How to pack its values.
        layout: In which order to read them for that.
        bases: The sources from which backward computes it again: a packed one, an input of the graph, or the two packed
            ones whose product it is.
        reason: Why it stays uncompressed.
        ways: The way that each read needs.
    """

    node: Node
    reads: list[Read]
    how: str = "uncompressed"
    way: Values | None = None
    layout: Layout | None = None
    bases: tuple[Source, ...] = ()
    reason: str = ""
    ways: dict[Read, Way] = field(default_factory=dict)

    def reads_of(self, kind: str) -> list[Read]:
        """Return the reads that need ``"signs"``, ``"shape"`` or ``"values"``."""
        return [r for r, way in self.ways.items() if (way if isinstance(way, str) else "values") == kind]

    @property
    def operation(self) -> str:
        """The operation that a warning of outliers names, ``""`` to look for none."""
        ways = (way for way in (*self.ways.values(), self.way) if isinstance(way, Values))
        return next((way.operation for way in ways if way.operation), "")

    @property
    def packed(self) -> Node:
        """The node to pack: the value, or a cast of it to a type of fewer bytes."""
        narrow = self.node
        for read in self.reads:
            for node in path(read.node, self.node):
                dtype = value_of(node).dtype
                is_narrower = dtype in KERNEL_DTYPES and dtype.itemsize < value_of(narrow).dtype.itemsize
                if is_narrower and name_of(node) in CASTS and is_laid_out_like(node, self.node):
                    narrow = node
        return narrow


def find_sources(joint: Joint) -> list[Source]:
    """Return the floating-point values and random masks that backward reads, in the order of the graph.

    Skipped: constants, and inputs of the graph and parts of them that no layer has marked or that get no gradient.
    """
    reads = defaultdict[Node, list[Read]](list)
    for node in joint.graph.nodes:
        value = tensor_of(node)
        if node in joint.forward and value is not None and (value.is_floating_point() or is_random_mask(node)):
            reads[source_of(node)] += joint.reads(node)
    sources = [Source(node, of) for node, of in reads.items() if of and not _stays_alive(joint, node, of)]
    return sorted(sources, key=lambda source: joint.order[source.node])


def _stays_alive(joint: Joint, node: Node, reads: list[Read]) -> bool:
    """Return True for constants, weights and the batch, which need no storage of their own."""
    memory = memory_of(node)
    if memory.op != "placeholder":
        return name_of(memory) in FILLS
    return memory in joint.without_gradient or all(read.mark is None for read in reads)


def find_cast_inputs(joint: Joint) -> list[Source]:
    """Return the inputs of the graph of which backward reads a cast, while the training keeps the original alive.

    These are weights, by which forward multiplies, and inputs without a gradient, such as the batch. Inputs that
    forward writes to are skipped.
    """
    reads, others = defaultdict[Node, list[Read]](list), set[Node]()
    for node in joint.graph.nodes:
        source = source_of(node) if passes_on(node) else node
        if node not in joint.forward or source is node or source.op != "placeholder" or source in joint.changing:
            continue
        if any(name_of(on) in CASTS for on in path(node, source)):
            reads[source] += joint.reads(node)
            is_weight = all(_is_weight_of(user, node) for user in node.users if user in joint.forward)
            if not (is_weight or source in joint.without_gradient):
                others.add(source)
    return [Source(node, of) for node, of in reads.items() if of and node not in others]


def _is_weight_of(reader: Node, node: Node) -> bool:
    """Return True if a node is the weight of a reader, or the reader passes it on."""
    place = WEIGHTS.get(name_of(reader))
    return passes_on(reader) if place is None else reader.args[place] is node


Bases = dict[Node, tuple[Source, ...]]
"""The nodes that backward may compute again, each with the sources from which it does."""


def decide(joint: Joint, model: Model, sources: list[Source]) -> Bases:
    """Decide how to store each source, and return what backward may compute again.

    A source that is computed from a factor of fewer bytes adds this factor to ``sources``.
    """
    by_node = {source.node: source for source in sources}
    read_nodes = {source_of(node) for node in joint.forward if joint.reads(node)}
    constants = joint.without_gradient - joint.changing
    bases: Bases = {}
    for node in joint.graph.nodes:
        if node not in joint.forward or tensor_of(node) is None:
            continue
        own_bases = _find_bases(joint, node, bases, model)
        source = by_node.get(node)
        if source is not None:
            try:
                _decide_one(joint, model, source, own_bases)
            except Refusal as refusal:
                source.how, source.reason = "uncompressed", str(refusal)
        if source is not None and source.how == "packed" and source.way is not None and not source.way.drops:
            bases[node] = (source,)
            factor = _find_narrow_factor(joint, source)
            if factor is not None and factor not in by_node and factor not in bases:
                sources += _pack_factor(source, factor, bases)
        elif own_bases:
            bases[node] = own_bases
        elif node in read_nodes and node in constants:
            value = value_of(node)
            if value.dtype in KERNEL_DTYPES and count_of(value) >= model.min_values:
                bases[node] = (Source(node, [], way=EXACT),)
    sources.sort(key=lambda source: joint.order[source.node])
    return bases


def _decide_one(joint: Joint, model: Model, source: Source, bases: tuple[Source, ...]) -> None:
    if runs_again(source.node):
        source.how, source.reason = "again", "a checkpoint computes it again"
        return
    _check(joint, model, source)
    if value_of(source.node).dtype == torch.bool:
        memory_order(value_of(source.node))
        source.ways, source.how = dict.fromkeys(source.reads, "signs"), "signs"
        return
    # The product of a written-out norm with its weight belongs to the norm.
    norm = bases[0].way if len(bases) == 1 and _is_normalized(source.node) else None
    if norm is None or norm.operator != "norm":
        source.ways = {read: find_way(joint, model, read) for read in source.reads}
    else:
        source.ways = {read: norm if read.mark is None else find_way(joint, model, read) for read in source.reads}
    ways = [way for way in source.ways.values() if isinstance(way, Values)]
    if len(ways) < len(source.ways):
        memory_order(value_of(source.node))  # raises Refusal if signs and shape cannot be stored
    if not ways:
        source.how = "signs" if source.reads_of("signs") else "shape"
        return
    if memory_of(source.node) in joint.retained:
        raise Refusal("it is an output, or shares the memory of one, so it stays in memory")
    source.way = combine_ways(ways)
    # A factor with a bit more has half of the error, and two of them .7.
    needed = source.way.bits + (len(bases) > 1)
    if bases and source.way.bits and all(base.way is not None and needed <= base.way.bits for base in bases):
        source.how, source.bases = "again", bases
        return
    _lay_out(source)
    source.how = "packed"


def _check(joint: Joint, model: Model, source: Source) -> None:
    """Raise ``Refusal`` if a source is never packed."""
    value = value_of(source.node)
    if count_of(value) < model.min_values:
        raise Refusal("it has few values")
    if value.dtype not in KERNEL_DTYPES and value.dtype != torch.bool:
        raise Refusal(f"{value.dtype} values are not packed")
    of = first_input(source.node) if name_of(source.node) == GETITEM else source.node
    if name_of(of) in _STATISTICS or (name_of(of) == NORM and source.node.args[1] != 0):
        raise Refusal("it is a statistic")
    if is_softmax(of):
        if not only_weighs(joint, of):
            raise Refusal("it is a softmax that does more than weigh values")
        if scales_mask(joint, of):
            raise Refusal("it is a softmax of masked scores times another tensor")
    elif name_of(of) == "aten.div" and any(name_of(source) == "aten.sum" for source in of.all_input_nodes[1:]):
        raise Refusal("it is a quotient by a sum, in which its gradient is not linear")


def _lay_out(source: Source) -> None:
    """Find the layout of a source; if its blocks cannot be dropped as its layer would, drop none."""
    assert source.way is not None
    packed = value_of(source.packed)
    if source.way.drops:
        mark = source.reads_of("values")[0].mark  # all reads drop the same blocks
        assert mark is not None
        try:
            source.layout = layout_with_drops(packed, value_of(mark), source.way)
            return
        except Refusal:
            if not source.way.bits:
                raise
        source.way = Values(source.way.bits, source.way.block_size, offload=source.way.offload)
    source.layout = layout_of(packed, source.way)


def _find_narrow_factor(joint: Joint, source: Source) -> Node | None:
    """Return the value of which a source is a multiple, if it has fewer bytes, such as a query before its scale."""
    node = source.node
    if name_of(node) != "aten.mul" or isinstance(node.args[1], Node):
        return None
    factor, value = source_of(first_input(node)), value_of(node)
    narrow = value_of(factor)
    is_narrow = narrow.dtype in KERNEL_DTYPES and narrow.dtype.itemsize < value_of(source.packed).dtype.itemsize
    is_free = factor in joint.forward and factor.op != "placeholder" and memory_of(factor) not in joint.retained
    return factor if is_narrow and is_free and count_of(narrow) == count_of(value) else None


def _pack_factor(source: Source, factor: Node, bases: Bases) -> list[Source]:
    """Return the factor as a source to pack in place of ``source``, or none if it cannot be laid out."""
    packed = Source(factor, [], how="packed", way=source.way)
    try:
        _lay_out(packed)
    except Refusal:
        return []
    bases.update(dict.fromkeys((*path(first_input(source.node), factor), source.node), (packed,)))
    source.how, source.bases, source.layout = "again", (packed,), None
    return [packed]


def _find_bases(joint: Joint, node: Node, bases: Bases, model: Model) -> tuple[Source, ...]:
    """Return the sources from which a node can be computed again, none if it cannot.

    It is a steady pointwise function of one packed value, or of the product of two. Other inputs of the node must be
    small, or masks that backward reads, too.
    """
    if name_of(node) == GETITEM and name_of(first_input(node)) == NORM and node.args[1] == 0:
        return bases.get(first_input(first_input(node)), ())
    if not (passes_on(node) or name_of(node) in _STEADY or _is_quotient(node)):
        return ()
    inputs = node.all_input_nodes
    of_inputs = dict.fromkeys(base for of in inputs for base in bases.get(of, ()))
    chosen = tuple(base for base in of_inputs if base.how == "packed") or tuple(of_inputs)
    if len(chosen) != 1 and not _multiplies_two(node, chosen, bases):
        return ()
    most = max(count_of(value_of(chosen[0].node)) // FEWER, model.min_values)
    for other in inputs:
        value = tensor_of(other)
        mask = mask_of(other)
        is_stored = mask is not None and bool(joint.reads(mask))  # such as dropout's
        is_large = value is not None and count_of(value) > most and not is_stored
        is_computed = other in bases and set(bases[other]).issubset(chosen)
        if not is_computed and (is_large or "val" not in other.meta or other in joint.changing):
            return ()
    return chosen


def _multiplies_two(node: Node, chosen: tuple[Source, ...], bases: Bases) -> bool:
    """Return True if a node is the product of functions of one packed value each, or a function of such a product."""
    of_inputs = [bases[of] for of in node.all_input_nodes if of in bases]
    if len(chosen) != 2 or any(base.how != "packed" for base in chosen):
        return False
    is_product = name_of(node) == "aten.mul" and all(len(of) == 1 for of in of_inputs)
    return is_product or all(of == chosen for of in of_inputs)


def _is_normalized(node: Node) -> bool:
    """Return True if a node is a product with the inverse of a deviation."""
    return name_of(node) == "aten.mul" and any(
        name_of(source_of(factor)) == "aten.rsqrt" for factor in node.all_input_nodes
    )


def _is_quotient(node: Node) -> bool:
    """Return True if a node divides by a number, or is a part of ``x / (1 + exp(-x))``, a decomposed SiLU."""
    if name_of(node) == "aten.exp":
        return name_of(first_input(node)) == "aten.neg" and all(_adds_one(user) for user in node.users)
    if name_of(node) != "aten.div":
        return False
    below = node.args[1]
    return not isinstance(below, Node) or (_adds_one(below) and name_of(first_input(below)) == "aten.exp")


def _adds_one(node: Node) -> bool:
    return name_of(node) == "aten.add" and node.args[1:] == (1,)
