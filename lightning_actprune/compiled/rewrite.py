"""Putting into a joint graph what was decided about its values."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import Node

from lightning_actprune.codec.blocks import SPARSITY_PARTS, ceil_div
from lightning_actprune.codec.saved_ops import Kind, ops_of
from lightning_actprune.compiled.decide import Source, inputs_of
from lightning_actprune.compiled.graphs import (
    BACKWARD,
    CASTS,
    FORWARD,
    GETITEM,
    MARK,
    NOT_IN_FORWARD,
    Joint,
    Read,
    Size,
    Writer,
    after,
    first_input,
    mask_of,
    multiplies,
    must_be_saved,
    name_of,
    passes_on,
    same_place,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.layout import Layout, memory_order
from lightning_actprune.compiled.signs import PER_BYTE

_FEW_BITS = 4
"""Up to which rounding to bf16 is nothing: a tenth of the distance of two codes at most."""
_TURNS, _RESHAPES = ops_of(Kind.PERMUTE), ops_of(Kind.RESHAPE)
_aten, _own, _prims = torch.ops.aten, torch.ops.actprune, torch.ops.prims


class Rewriter:
    """Puts what was decided into a graph.

    Args:
        joint: The graph.
        sources: What was decided.
        base: What may be computed again, each with what from.
    """

    def __init__(self, joint: Joint, sources: list[Source], base: dict[Node, Source]) -> None:
        self._joint, self._sources, self._base = joint, sources, base
        self._writer = Writer(joint.graph)
        self._restored: dict[Node, Node] = {}

    def run(self) -> list[list[Node]]:
        """Put everything into the graph, and return what is stored of each source, but for what stays as it is."""
        for source in inputs_of(self._joint):
            # The partitioner would keep the cast of what may be no longer there: it knows weights alone to stay.
            tag = NOT_IN_FORWARD if source.node in self._joint.given else BACKWARD
            with self._writer.before(self._first([read.reader for read in source.reads]), tag):
                # Of a view, or the partitioner takes the cast for that of forward, which it would then keep.
                value = self._writer.call(_aten.view.default, source.node, self._sizes(source.node, None))
            self._give(source, value, source.reads, tag)
        first = self._first_readers()
        for node in first:  # in the same order in every process
            if node in self._joint.given:
                with self._writer.before(first[node], NOT_IN_FORWARD):
                    self._restored[node] = self._writer.call(_aten.view.default, node, self._sizes(node, None))
        return [self._put(source, first) for source in self._sources]

    def _put(self, source: Source, first: dict[Node, Node]) -> list[Node]:
        """Let backward read what is kept of a source in place of it, and return that."""
        if source.how == "uncompressed":
            return []
        stored = self._pack(source, first[source.node]) if source.how == "packed" else []
        if source.reads_of("signs"):
            stored.append(self._signs(source))
        if source.reads_of("shape"):
            self._shape(source)
        if source.reads_of("values"):
            self._values(source)
        return stored

    def _first_readers(self) -> dict[Node, Node]:
        """Return by packed source the first node in backward that its unpacked value is needed for."""
        readers = defaultdict[Node, list[Node]](list)
        for source in self._sources:
            unpacked = source if source.base is None else source.base
            readers[unpacked.node] += [read.reader for read in source.reads_of("values")]
        return {node: self._first(of) for node, of in readers.items() if of}

    def _pack(self, source: Source, reader: Node) -> list[Node]:
        """Pack a source behind it, and unpack it before ``reader``; return what is kept."""
        layout, node, writer = source.layout, self._computed(source), self._writer
        assert layout is not None
        value = value_of(node)
        with writer.before(after(node), FORWARD):
            read = self._in_memory_order(node, layout)
            kept = self._kept(source, read)
        for saved in kept:
            must_be_saved(saved)
        with writer.before(reader, BACKWARD):
            self._restored[source.node] = self._unpack(source, kept, read, value)
        return kept

    def _computed(self, source: Source) -> Node:
        """Return what is packed of a source as forward computes it: a block that runs again makes casts of its own."""
        if source.packed in self._joint.forward:
            return source.packed
        with self._writer.before(after(source.node), FORWARD):
            return self._writer.cast(source.node, value_of(source.packed).dtype)

    def _kept(self, source: Source, read: Node) -> list[Node]:
        """Return what is kept of a source, of which ``read`` is laid out as it is packed."""
        way, layout, writer = source.way, source.layout, self._writer
        assert way is not None
        assert layout is not None
        if not way.drops:
            return [writer.call(_own.quantize.default, read, layout.block, way.bits)]
        blocks = writer.compute(operator.mul, writer.size(read, 1), ceil_div(layout.shape[2], layout.block))
        keep = self._keep_count(blocks, way.parts)
        packed = writer.call(_own.pack.default, read, layout.block, keep, way.bits, way.selection)
        must_be_saved(packed)
        return [writer.call(operator.getitem, packed, place) for place in range(3)]

    def _in_memory_order(self, node: Node, layout: Layout) -> Node:
        writer, node = self._writer, self._turned(node, layout.order)
        if layout.copied:
            node = writer.call(_aten.clone.default, node, memory_format=torch.contiguous_format)
        return writer.call(_aten.view.default, node, list(layout.shape))

    def _keep_count(self, blocks: int | Node, parts: int | Node) -> int | Node:
        """Return ``codec.blocks.keep_count``, which may be a symbol."""
        compute = self._writer.compute
        dropped = compute(operator.floordiv, compute(operator.mul, blocks, parts), SPARSITY_PARTS)
        return compute(operator.sub, blocks, dropped)

    def _unpack(self, source: Source, kept: list[Node], read: Node, value: Tensor) -> Node:
        """Return the unpacked value of a source, in its shape and the order of its memory, in the type of ``value``."""
        way, layout, writer = source.way, source.layout, self._writer
        assert way is not None
        assert layout is not None
        how = layout.shape[2], layout.block, way.bits, self._dtype(source, value)
        if way.drops:
            rows = writer.compute(operator.mul, writer.size(read, 0), writer.size(read, 1))
            flat = writer.call(_own.unpack.default, *kept, rows, *how)
        else:
            (values,) = kept
            rows = writer.compute(operator.floordiv, writer.size(values, 0), ceil_div(layout.shape[2], layout.block))
            flat = writer.call(_own.dequantize.default, values, rows, *how)
        dense = writer.call(_aten.view.default, flat, self._sizes(source.node, layout.order))
        return self._turned_back(dense, layout.order)

    def _turned(self, node: Node, order: tuple[int, ...]) -> Node:
        """Return a view of which the dimensions are in an order."""
        return node if order == tuple(sorted(order)) else self._writer.call(_aten.permute.default, node, list(order))

    def _turned_back(self, node: Node, order: tuple[int, ...]) -> Node:
        """Undo ``_turned``."""
        return self._turned(node, tuple(order.index(dim) for dim in range(len(order))))

    def _dtype(self, source: Source, value: Tensor) -> torch.dtype:
        """Return the type in which the value of a source is unpacked: few bits have no use for the places of fp32.

        What multiplies gets the type that it multiplies.
        """
        assert source.way is not None
        few = 0 < source.way.bits <= _FEW_BITS and value.dtype == torch.float32
        return torch.bfloat16 if few and not any(multiplies(read.reader) for read in source.reads) else value.dtype

    def _sizes(self, node: Node, order: tuple[int, ...] | None) -> list[int | Node]:
        """Return the sizes of a forward node in an order of its dimensions, -1 for the first that is a symbol."""
        sizes, inferred = list[int | Node](), False
        for dim in order or range(value_of(node).dim()):
            size: Size = value_of(node).shape[dim]
            if not isinstance(size, int) and not inferred:
                inferred = True
                sizes.append(-1)
            else:
                sizes.append(size if isinstance(size, int) else self._writer.size(node, dim))
        return sizes

    def _signs(self, source: Source) -> Node:
        """Store the signs of a source and let those read them who ask for no more; return what is stored."""
        writer, node, order = self._writer, source.node, memory_order(value_of(source.node))
        with writer.before(after(node), FORWARD):
            flat = writer.call(_aten.reshape.default, self._turned(node, order), [-1])
            count = writer.size(flat, 0)
            is_mask = value_of(node).dtype == torch.bool
            stored = writer.call(_own.signs.default, writer.cast(flat, torch.uint8) if is_mask else flat)
        must_be_saved(stored)
        reads = source.reads_of("signs")
        with writer.before(self._first([read.reader for read in reads + self._reads_of_masked(source)]), BACKWARD):
            signs = writer.cast(self._split(stored, count), value_of(node).dtype)
            dense = writer.call(_aten.view.default, signs, self._sizes(node, order))
            dense = self._turned_back(dense, order)
        if is_mask:
            self._restored[node] = dense
        self._give(source, dense, reads)
        return stored

    def _reads_of_masked(self, mask: Source) -> list[Read]:
        """Return the reads of what is computed again with a mask."""
        again = (source for source in self._sources if source.base is not None)
        return [read for source in again if mask.node in self._masks_of(source) for read in source.reads_of("values")]

    def _masks_of(self, source: Source) -> set[Node]:
        """Return the masks from which something is computed again."""
        assert source.base is not None
        masks, waiting = set[Node](), [source.node]
        while waiting:
            made = waiting.pop()
            made = first_input(made) if name_of(made) == GETITEM else made  # a norm, which itself is not made again
            for node in made.all_input_nodes:
                mask = mask_of(node)
                if mask is not None:
                    masks.add(mask)
                elif node is not source.base.node and node in self._base:
                    waiting.append(node)
        return masks

    def _split(self, stored: Node, count: int | Node) -> Node:
        """Undo ``compiled.signs``: return the bits as numbers."""
        writer = self._writer
        bytes_ = writer.call(_aten.unsqueeze.default, stored, 0)
        shifted = writer.call(_aten.bitwise_right_shift.Tensor, bytes_, self._places(value_of(stored).device))
        bits = writer.call(_aten.view.default, writer.call(_aten.bitwise_and.Scalar, shifted, 1), [-1])
        return writer.call(_aten.slice.Tensor, bits, 0, 0, count)

    def _places(self, device: torch.device) -> Node:
        """Return the places of the bits of a byte, ``[8, 1]``."""
        options = {"start": 0, "step": 1, "dtype": torch.int32, "device": device, "requires_grad": False}
        places = self._writer.cast(self._writer.call(_prims.iota.default, PER_BYTE, **options), torch.uint8)
        return self._writer.call(_aten.unsqueeze.default, places, 1)

    def _shape(self, source: Source) -> None:
        """Let those read memory that nobody has written to who ask for no more than its shape."""
        writer, value, reads = self._writer, value_of(source.node), source.reads_of("shape")
        order = memory_order(value)
        with writer.before(self._first([read.reader for read in reads]), BACKWARD):
            sizes = [writer.size(source.node, dim) for dim in order]
            made = writer.call(_aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
            made = self._turned_back(made, order)
        self._give(source, made, reads)

    def _values(self, source: Source) -> None:
        """Let backward read the unpacked value of a source, or what is computed again from another one's."""
        reads, base = source.reads_of("values"), source.base
        if base is None:
            self._give(source, self._restored[source.node], reads)
            return
        with self._writer.before(self._first([read.reader for read in reads]), BACKWARD):
            made = self._again(source.node, {base.node: self._restored[base.node]})
        self._give(source, made, reads)

    def _give(self, source: Source, made: Node, reads: list[Read], tag: str = BACKWARD) -> None:
        """Replace reads of a source by reads of ``made``, through copies of their views and casts."""
        by_node = defaultdict[Node, list[Node]](list)
        for read in reads:
            by_node[read.node].append(read.reader)
        for node, readers in by_node.items():
            with self._writer.before(self._first(readers), tag):
                given = self._passed_on(node, {source.node: made})
                given = self._writer.cast(given, value_of(node).dtype)
            for reader in readers:
                reader.replace_input_with(node, given)
            self._drop(node)

    def _first(self, nodes: list[Node]) -> Node:
        return min(nodes, key=self._joint.order.__getitem__)

    def _drop(self, node: Node) -> None:
        """Take out a view that backward reads no more."""
        while not node.users and node not in self._joint.forward:
            before = first_input(node)
            self._joint.graph.erase_node(node)
            node = before

    def _passed_on(self, node: Node, made: dict[Node, Node]) -> Node:
        """Return what stands for ``node`` in backward, a value that one in ``made`` is passed on to."""
        if node in made:
            return made[node]
        source, name = first_input(node), name_of(node)
        if name in _TURNS and name_of(source) in _TURNS and same_place(node, first_input(source)):
            return self._passed_on(first_input(source), made)
        before = self._passed_on(source, made)
        if name == MARK:
            return before
        if name in CASTS and same_place(node, source):
            return self._writer.cast(before, value_of(node).dtype)
        if name in _RESHAPES and not same_place(before, source):  # which may be no view of what is made again
            before = self._writer.call(_aten.clone.default, before, memory_format=torch.contiguous_format)
        return self._writer.copy(node, {source: before})

    def _again(self, node: Node, made: dict[Node, Node]) -> Node:
        """Return what ``node`` computes, computed again from values in ``made``, or itself if it depends on none."""
        if node in made:
            return made[node]
        mask = mask_of(node)
        if mask is not None and mask in self._restored:
            return self._writer.cast(self._restored[mask], value_of(node).dtype)
        if node not in self._base or node.op == "placeholder":
            return node
        if name_of(node) == GETITEM:
            made[node] = self._normalised(node, made)
        elif passes_on(node):
            made[node] = self._passed_on(node, {first_input(node): self._again(first_input(node), made)})
        else:
            tensors = (source for source in node.all_input_nodes if tensor_of(source) is not None)
            inputs = {
                source: self._writer.cast(self._again(source, made), value_of(source).dtype) for source in tensors
            }
            made[node] = self._writer.copy(node, inputs)
        return made[node]

    def _normalised(self, node: Node, made: dict[Node, Node]) -> Node:
        """Return the output of a layer norm, by the mean and the deviation that forward has found."""
        writer, norm = self._writer, first_input(node)
        x = writer.cast(self._again(first_input(norm), made), torch.float32)
        mean, rstd = (self._item(norm, place) for place in (1, 2))
        y = writer.call(_aten.mul.Tensor, writer.call(_aten.sub.Tensor, x, mean), rstd)
        weight, bias = norm.args[2:4]
        y = y if weight is None else writer.call(_aten.mul.Tensor, y, weight)
        y = y if bias is None else writer.call(_aten.add.Tensor, y, bias)
        return writer.cast(y, value_of(node).dtype)

    def _item(self, node: Node, place: int) -> Node:
        """Return one of several results."""
        for user in node.users:
            if name_of(user) == GETITEM and user.args[1] == place:
                return user
        return self._writer.call(operator.getitem, node, place)
