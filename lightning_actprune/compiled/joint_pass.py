r"""Pack values that backward reads, in the joint graph of a compiled region.

While a compiler traces them, converted layers run their dense forward, so the joint graph of forward and backward is
that of the dense model, with marks that say how layers keep their inputs (``compiled.marks``). This pass runs before
the partitioner. It looks at each value that forward computes and backward reads. Reads that differ only by views, casts
and copies are reads of one *source*, which is kept in one way:

``packed``
    The source, or its cast to fewer bytes, is packed right after the node that computes it, and unpacked right before
    its first reader (``torch.ops.actprune.pack`` and ``unpack``, opaque to the compiler). Each reader gets its views
    and casts of the unpacked value. The bytes are those of eager mode. If readers ask for different bits, the most
    count (``readers.combine_ways``). A softmax in fp32 is packed from fp16. In place of a multiple of a value of fewer
    bytes, such as a query that is scaled in fp32, that value is packed.
``again``
    Nothing is stored. The value is computed again in backward from one packed value, if it is pointwise in it, without
    jumps, and in tensors that are far smaller or in masks that backward reads anyway: the output of a GELU, a norm, a
    dropout, or a ReLU behind a batch norm, which the next layer reads. The packed value must have as many bits as the
    reader asks for. A product of two such values, as in a SwiGLU, is computed again from both if each has a bit more
    than the reader asks for: then its error is smaller than that of packing it. Statistics of norms are exact. Values
    that are pointwise in an unpacked graph input without a gradient are computed again, too, such as a norm of the
    batch.
``signs``
    One exact bit a value, for the output of ``relu``, whose gradient is ``g`` where the output is positive or NaN. It
    may be packed for another reader besides. Drawn masks, as of dropout, are kept in the same way. The compiler fuses
    both.
``shape``
    Nothing is stored for pooling, whose backward reads only the shape.
``uncompressed``
    The value is saved unpacked, with the reason. If one reader needs it exactly, all readers get it.

Autocast's copies of weights, and of tensors without a gradient such as the batch, are made again in backward, where the
originals are alive.

Forward does not change, since packing reads what it computes anyway. Backward reads only the results of ``pack``, so
the partitioner saves these. It computes no packed value again, since packing materializes it. A value that a checkpoint
in the graph computes again is left alone.

Never packed are parameters, their casts and the batch; outputs and values in their memory, which their readers keep
alive (signs of them are stored); small tensors; tensors that are neither floating-point values nor drawn masks; and
results that summarize many values (``_STATISTICS``). Graph inputs are packed if a layer has marked them and they get a
gradient: if blocks are compiled one by one, or a graph breaks, these are the outputs of the piece before.

``compiled.recompute`` comes first, for modules that run again in backward.

For DDP, a compiler cuts a graph into pieces at the weights of layers (``marks.mark_output``). If a layer of a later
piece marks a value of an earlier one, the mark moves to the input of the later piece. Outputs of a piece are packed
like other values, since later pieces pack what they read of them. Queries and keys that attention of the next piece
reads may be weights, and stay unpacked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_actprune.compiled.decide import Source, decide, find_sources
from lightning_actprune.compiled.decision_log import PackedGraph, Row, operation_of
from lightning_actprune.compiled.graphs import (
    FORWARD,
    MARK,
    MARK_OUTPUT,
    WEIGHTS,
    Joint,
    Writer,
    bytes_of,
    count_of,
    hints,
    name_of,
    path,
    put_in_order,
    read_mark,
    source_of,
    value_of,
)
from lightning_actprune.compiled.recompute import run_again, take_out
from lightning_actprune.compiled.rewrite import Rewriter


def pack_joint_graph(graph: Graph) -> PackedGraph | None:
    """Pack values in a joint graph, remove all marks, and return the decisions.

    ``None`` if the graph has no marks and stays as it is, or has no backward.
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
    models = [read_mark(mark).model for mark in marks]
    model = next((model for model in models if model.saved), models[0])
    sources = find_sources(joint)
    bases = decide(joint, model, sources)
    rows = [_row(source) for source in sources]
    names = [{on.name for read in source.reads for on in path(read.node, source.node)} for source in sources]
    stored = Rewriter(joint, sources, bases).run()
    take_out(joint)
    graph.lint()
    for at, nodes in enumerate(stored):
        if rows[at].how != "uncompressed":
            rows[at] = rows[at]._replace(stored_bytes=sum(bytes_of(value_of(node)) for node in nodes))
            names[at] = {node.name for node in nodes}
    listed = [at for at, source in enumerate(sources) if count_of(value_of(source.node)) >= model.min_values]
    return PackedGraph(
        [rows[at] for at in listed],
        [names[at] for at in listed],
        {node.name for node in joint.inputs},
        joint.output_count,
        model.min_values,
    )


def restore_marks(graph: Graph) -> None:
    """Remove the marks at outputs of layers, and mark their inputs instead where these are inputs of the graph."""
    for output_mark in [node for node in graph.nodes if name_of(node) == MARK_OUTPUT]:
        y, x, *keep = output_mark.args
        assert isinstance(x, Node)
        assert isinstance(y, Node)
        output_mark.replace_all_uses_with(y)
        graph.erase_node(output_mark)
        graph_input = x if any(user.op != "output" for user in x.users) else _multiplied_input(y)
        if x.op != "placeholder" or graph_input is None:
            continue
        if count_of(value_of(graph_input)) == count_of(value_of(x)):
            _mark_input(Writer(graph), graph_input, x, keep)


def _multiplied_input(y: Node) -> Node | None:
    """Return the graph input that a layer multiplies by its weight to get ``y``, or ``None``."""
    product = source_of(y)
    place = WEIGHTS.get(name_of(product))
    if place is None:
        return None
    x = product.args[place - 1]
    assert isinstance(x, Node)
    return source_of(x) if source_of(x).op == "placeholder" else None


def _mark_input(writer: Writer, graph_input: Node, marked: Node, keep: Sequence[Any]) -> None:
    """Mark an input of the graph.

    Args:
        writer: Writer of the graph.
        graph_input: The input.
        marked: The value that another piece has marked; the input may be a view of it.
        keep: The other arguments of the mark.
    """
    readers = [user for user in graph_input.users if user.op != "output"]
    first = next(node for node in writer.graph.nodes if node in readers)
    view = torch.ops.aten.view.default
    with writer.before(first, FORWARD):
        shaped = graph_input if marked is graph_input else writer.call(view, graph_input, _sizes(writer, marked))
        mark = writer.call(torch.ops.actprune.mark.default, shaped, *keep)
        read = mark if marked is graph_input else writer.call(view, mark, _sizes(writer, graph_input))
    for user in readers:
        user.replace_input_with(graph_input, read)


def _sizes(writer: Writer, node: Node) -> list[int | Node]:
    return [writer.size(node, dim) for dim in range(value_of(node).dim())]


def _row(source: Source) -> Row:
    """Return the row of a source as if all its bytes were stored; the graph must not have changed yet."""
    value = value_of(source.node)
    layers = [read.layer.name for read in source.reads if read.layer is not None and read.layer.name]
    name = layers[0] if layers else operation_of(source.node)
    narrow = source.packed
    only_narrow = all(narrow in path(read.node, source.node) for read in source.reads)
    dense = bytes_of(value_of(narrow if only_narrow else source.node))
    readers = tuple(dict.fromkeys(name_of(read.reader) for read in source.reads))
    bits = source.way.bits if source.way is not None and source.how == "packed" else 0
    shape = tuple(hints(value.shape))
    return Row(name, readers, shape, value.dtype, dense, dense, source.how, bits, source.reason)
