r"""Packing what backward reads, in the joint graph of a compiled region.

Converted layers run their dense forward while a compiler traces them, so the joint graph is that of the dense model,
with marks (``compiled.marks``). This pass, before the partitioner, looks at every value that forward computes and
backward reads. Reads that differ by views, casts and copies alone are reads of one *source*, and get one answer:

``packed``
    The source, or its cast to fewer bytes, is packed right behind what computes it, and unpacked right before its first
    reader (``torch.ops.actprune.pack`` and ``unpack``, opaque to the compiler). Each read gets a copy of its views
    and casts of the unpacked value. The same bytes as in eager mode, by the layer's rule; of several readers the one
    that asks for the most bits counts (``readers.most_careful``).
``again``
    What is pointwise in ONE packed value, without a jump, and in tensors that are far smaller or masks that backward
    reads anyway, is computed again from the unpacked value, and nothing is stored: the output of a GELU, of a norm, of
    a ReLU behind a batch norm, or of dropout, that the next linear layer or convolution reads. Only where the packed
    value has as many bits as the reader asks for. The statistics of a norm are the exact ones. So is what is pointwise
    in an input of the graph that gets no gradient and that backward reads as it is, as a norm of the batch does.
``signs``
    One bit a value, exact, for ``relu``, also beside packed values for another reader: its gradient ``g`` where the
    output is above zero, or no number, asks for no more. So are masks kept that were drawn, as dropout's. In operations
    that the compiler fuses.
``shape``
    Nothing is stored for pooling, which is given memory that nobody has written to.
``as it is``
    Everything else, with the reason: if one reader needs all of a source, the others read the same.

Copies that autocast has made of weights, and of what gets no gradient, as the batch, are made again in backward: what
they are copies of is there anyway.

Forward is not touched: what packing reads is there anyway. The partitioner then saves what ``pack`` returns, since
nothing in backward reads more: a value that somebody packs is materialized for backward, which it does not compute
again, so pack is not either. Should a checkpoint in the graph compute a value again, it is left alone.

Never packed are parameters, their casts and the batch; outputs and what shares their memory, which their reader
retains, though signs of them are stored; small tensors; what is neither floating-point values nor a drawn mask; and
results that say something about many values (``_STATISTICS``). Of inputs of the graph, those are packed that a layer
has marked and that get a gradient: where blocks are compiled one by one, or a graph breaks, they are what the one
before has computed.

What modules do that run again in backward is in ``compiled.recompute``; it comes first.

For DDP, a compiler cuts a graph into pieces at the weights of layers (``marks.ended``). An input that the layer of a
later piece has marked in the one before gets its mark back. What a piece returns is packed like anything else, since
the next ones pack what they read of it. Queries and keys of one piece that attention reads in the next may be weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_actprune.compiled.decide import Source, decide, sources_of
from lightning_actprune.compiled.graphs import (
    ENDED,
    FORWARD,
    MARK,
    WEIGHTS,
    Joint,
    Writer,
    bytes_of,
    count_of,
    hints,
    name_of,
    path,
    put_in_order,
    source_of,
    value_of,
)
from lightning_actprune.compiled.marks import Mark
from lightning_actprune.compiled.recompute import run_again, take_out
from lightning_actprune.compiled.report import Packed, Row, computed_by
from lightning_actprune.compiled.rewrite import Rewriter


def pack_joint_graph(graph: Graph) -> Packed | None:
    """Pack what backward reads in a joint graph, take all marks out of it, and return what was decided.

    A graph without marks is left as it is, and nothing is decided. Nor is it of one without backward, of whose outputs
    none needs a gradient.
    """
    restore_marks(graph)
    marks = [node for node in graph.nodes if name_of(node) == MARK]
    if not marks:
        return None
    put_in_order(graph)
    joint = Joint(graph)
    if not joint.tangent:
        take_out(joint)
        return None
    if run_again(joint):
        joint = Joint(graph)
    models = [Mark.read(str(mark.args[1])).model for mark in marks]
    model = next((model for model in models if model.saved), models[0])
    sources = sources_of(joint)
    base = decide(joint, model, sources)
    rows = [_row(source) for source in sources]
    names = [{on.name for read in source.reads for on in path(read.node, source.node)} for source in sources]
    stored = Rewriter(joint, sources, base).run()
    take_out(joint)
    graph.lint()
    for at, nodes in enumerate(stored):
        if rows[at].how != "as it is":
            rows[at] = rows[at]._replace(stored_bytes=sum(bytes_of(value_of(node)) for node in nodes))
            names[at] = {node.name for node in nodes}
    listed = [at for at, source in enumerate(sources) if count_of(value_of(source.node)) >= model.min_values]
    return Packed([rows[at] for at in listed], [names[at] for at in listed], *joint.forward_of(), model.min_values)


def restore_marks(graph: Graph) -> None:
    """Take out what layers say once more of what they have read, and mark that where it is an input of the graph."""
    for ended in [node for node in graph.nodes if name_of(node) == ENDED]:
        y, x, *keep = ended.args
        assert isinstance(x, Node)
        assert isinstance(y, Node)
        ended.replace_all_uses_with(y)
        graph.erase_node(ended)
        given = x if any(user.op != "output" for user in x.users) else _multiplied(y)
        if x.op == "placeholder" and given is not None and count_of(value_of(given)) == count_of(value_of(x)):
            _mark_input(Writer(graph), given, x, keep)


def _multiplied(y: Node) -> Node | None:
    """Return the input of the graph that a layer multiplies by its weight to get ``y``, ``None`` if there is none."""
    product = source_of(y)
    place = WEIGHTS.get(name_of(product))
    if place is None:
        return None
    x = product.args[place - 1]
    assert isinstance(x, Node)
    return given if (given := source_of(x)).op == "placeholder" else None


def _mark_input(writer: Writer, given: Node, like: Node, keep: Sequence[Any]) -> None:
    """Put a mark on an input of the graph, which may be a view of what was marked in another piece.

    Args:
        writer: Of the graph.
        given: The input.
        like: What was marked.
        keep: What the mark says.
    """
    readers = [user for user in given.users if user.op != "output"]
    first = next(node for node in writer.graph.nodes if node in readers)
    view = torch.ops.aten.view.default
    with writer.before(first, FORWARD):
        shaped = given if like is given else writer.call(view, given, _sizes(writer, like))
        mark = writer.call(torch.ops.actprune.mark.default, shaped, *keep)
        read = mark if like is given else writer.call(view, mark, _sizes(writer, given))
    for user in readers:
        user.replace_input_with(given, read)


def _sizes(writer: Writer, node: Node) -> list[int | Node]:
    return [writer.size(node, dim) for dim in range(value_of(node).dim())]


def _row(source: Source) -> Row:
    """Return what is said of a source before the graph is changed, with all its bytes stored."""
    value = value_of(source.node)
    layers = [read.layer.name for read in source.reads if read.layer is not None and read.layer.name]
    name = layers[0] if layers else computed_by(source.node)
    narrow = source.packed
    kept = narrow if all(narrow in path(read.node, source.node) for read in source.reads) else source.node
    dense = bytes_of(value_of(kept))
    readers = tuple(dict.fromkeys(name_of(read.reader) for read in source.reads))
    bits = source.way.bits if source.way is not None and source.how == "packed" else 0
    shape = tuple(hints(value.shape))
    return Row(name, readers, shape, value.dtype, dense, dense, source.how, bits, source.reason)
