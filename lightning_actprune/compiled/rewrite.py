"""Rewrite a joint graph: pack values in forward, and unpack or compute them again in backward."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import Tensor
from torch.fx import Node

from lightning_actprune.codec.blocks import SPARSITY_PARTS, ceil_div
from lightning_actprune.codec.dispatch import KERNEL_DTYPES
from lightning_actprune.codec.layout import inverse_order
from lightning_actprune.codec.saved_ops import Kind, ops_of
from lightning_actprune.compiled.decide import Bases, Source, find_cast_inputs
from lightning_actprune.compiled.graphs import (
    BACKWARD,
    CASTS,
    FORWARD,
    GETITEM,
    MARK,
    NOT_IN_FORWARD,
    Joint,
    Read,
    Writer,
    after,
    first_input,
    force_save,
    is_laid_out_like,
    mask_of,
    multiplies,
    name_of,
    passes_on,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.layout import Layout, memory_order
from lightning_actprune.compiled.readers import is_softmax
from lightning_actprune.compiled.signs import PER_BYTE

_FEW_BITS = 4
"""Up to this many bits, rounding to bf16 is a tenth of the distance of two codes at most."""
_PERMUTATIONS, _RESHAPES = ops_of(Kind.PERMUTE), ops_of(Kind.RESHAPE)
_aten, _own, _prims = torch.ops.aten, torch.ops.actprune, torch.ops.prims


class Rewriter:
    """Rewrites a graph as decided.

    Args:
        joint: The graph.
        sources: The decisions.
        bases: What backward may compute again (``decide``).
    """

    def __init__(self, joint: Joint, sources: list[Source], bases: Bases) -> None:
        self._joint, self._sources, self._bases = joint, sources, bases
        self._writer = Writer(joint.graph)
        self._restored: dict[Node, Node] = {}

    def run(self) -> list[list[Node]]:
        """Rewrite the graph, and return the nodes that each source stores; none if it stays uncompressed."""
        for source in find_cast_inputs(self._joint):
            # Without the tag the partitioner would save the cast of an input that is no weight: it may be freed.
            tag = NOT_IN_FORWARD if source.node in self._joint.without_gradient else BACKWARD
            with self._writer.before(self._first([read.reader for read in source.reads]), tag):
                # The cast of a view, or the compiler would merge it with the cast in forward, and save that.
                value = self._writer.call(_aten.view.default, source.node, self._sizes(source.node, None))
            self._replace_reads(source, value, source.reads, tag)
        first = self._first_readers()
        for node in first:  # in the same order in every process
            if node in self._joint.without_gradient:
                with self._writer.before(first[node], NOT_IN_FORWARD):
                    self._restored[node] = self._writer.call(_aten.view.default, node, self._sizes(node, None))
        return [self._put(source, first) for source in self._sources]

    def _put(self, source: Source, first: dict[Node, Node]) -> list[Node]:
        """Let backward read the stored form of a source in its place, and return what is stored."""
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
        """Return for each packed source the first node in backward that needs its unpacked value."""
        readers = defaultdict[Node, list[Node]](list)
        for source in self._sources:
            for unpacked in source.bases or (source,):
                readers[unpacked.node] += [read.reader for read in source.reads_of("values")]
        return {node: self._first(of) for node, of in readers.items() if of}

    def _pack(self, source: Source, reader: Node) -> list[Node]:
        """Pack a source right behind it, unpack it before ``reader``, and return what is stored."""
        way, layout, node, writer = source.way, source.layout, self._computed(source), self._writer
        assert way is not None
        assert layout is not None
        value = value_of(node)
        with writer.before(after(node), FORWARD):
            rows = self._lay_out(node, layout)
            packed = self._compress(source, rows)
            moves = way.offload and not way.drops and value_of(packed[0]).is_cuda
            stored = [writer.call(_own.to_host.default, packed[0])] if moves else packed
        for saved in stored:
            force_save(saved)
        with writer.before(reader, BACKWARD):
            if moves:
                sizes, device = [writer.size(packed[0], dim) for dim in range(2)], value_of(packed[0]).device
                packed = [writer.call(_own.from_host.default, stored[0], *sizes, device)]
            self._restored[source.node] = self._unpack(source, packed, rows, value)
        return stored

    def _computed(self, source: Source) -> Node:
        """Return the node to pack, as a node of forward: blocks that run again make casts of their own."""
        dtype = value_of(source.packed).dtype
        if dtype == torch.float32 and is_softmax(source.node):
            dtype = torch.float16  # exact to 2^-12, where codes of 8 bits are to 2^-9
        elif source.packed in self._joint.forward:
            return source.packed
        with self._writer.before(after(source.node), FORWARD):
            return self._writer.cast(source.node, dtype)

    def _compress(self, source: Source, rows: Node) -> list[Node]:
        """Return the packed tensors of a source with the values ``rows [S, T, L]``."""
        way, layout, writer = source.way, source.layout, self._writer
        assert way is not None
        assert layout is not None
        if not way.drops:
            how = rows, layout.block, way.bits
            if not source.operation:
                return [writer.call(_own.quantize.default, *how)]
            return [writer.call(_own.quantize_checked.default, *how, source.operation)]
        blocks = writer.compute(operator.mul, writer.size(rows, 1), ceil_div(layout.shape[2], layout.block))
        # codec.blocks.keep_count, which may be a symbol
        dropped = writer.compute(operator.floordiv, writer.compute(operator.mul, blocks, way.parts), SPARSITY_PARTS)
        keep = writer.compute(operator.sub, blocks, dropped)
        packed = writer.call(_own.pack.default, rows, layout.block, keep, way.bits, way.selection)
        force_save(packed)
        return [writer.call(operator.getitem, packed, place) for place in range(3)]

    def _lay_out(self, node: Node, layout: Layout) -> Node:
        """Return the values ``[S, T, L]`` of a node in the order of its memory."""
        writer, node = self._writer, self._permute(node, layout.order)
        if layout.copied:
            node = writer.call(_aten.clone.default, node, memory_format=torch.contiguous_format)
        return writer.call(_aten.view.default, node, list(layout.shape))

    def _unpack(self, source: Source, stored: list[Node], rows: Node, value: Tensor) -> Node:
        """Return the unpacked value of a source, in its shape and the order of its memory, in the type of ``value``."""
        way, layout, writer = source.way, source.layout, self._writer
        assert way is not None
        assert layout is not None
        length, inner = layout.shape[2], value.shape[layout.order[-1]]
        if not way.drops and isinstance(inner, int) and length == layout.block and inner % length == 0:
            length = inner  # in whole rows, so that inductor's kernels run over one dimension
        how = length, layout.block, way.bits, self._dtype(source, value)
        if way.drops:
            count = writer.compute(operator.mul, writer.size(rows, 0), writer.size(rows, 1))
            flat = writer.call(_own.unpack.default, *stored, count, *how)
        else:
            (values,) = stored
            count = writer.compute(operator.floordiv, writer.size(values, 0), ceil_div(length, layout.block))
            flat = writer.call(_own.dequantize.default, values, count, *how)
        dense = writer.call(_aten.view.default, flat, self._sizes(source.node, layout.order))
        return self._undo_permute(dense, layout.order)

    def _permute(self, node: Node, order: tuple[int, ...]) -> Node:
        """Return a view with the dimensions in this order."""
        return node if order == tuple(sorted(order)) else self._writer.call(_aten.permute.default, node, list(order))

    def _undo_permute(self, node: Node, order: tuple[int, ...]) -> Node:
        return self._permute(node, tuple(inverse_order(order)))

    def _dtype(self, source: Source, value: Tensor) -> torch.dtype:
        """Return the type of the unpacked value: that in which all read it, or bf16 if bits are few."""
        assert source.way is not None
        reads, is_base = source.reads_of("values"), any(source in other.bases for other in self._sources)
        types = {value_of(read.node).dtype for read in reads}
        narrow = [dtype for dtype in types if dtype in KERNEL_DTYPES and dtype.itemsize < value.dtype.itemsize]
        if len(types) == len(narrow) == 1 and not is_base:
            return narrow[0]
        few = 0 < source.way.bits <= _FEW_BITS and value.dtype == torch.float32
        return torch.bfloat16 if few and not any(multiplies(read.reader) for read in reads) else value.dtype

    def _sizes(self, node: Node, order: tuple[int, ...] | None) -> list[int | Node]:
        """Return the sizes of a node with its dimensions in this order, and -1 for the first symbol."""
        value, sizes = value_of(node), list[int | Node]()
        for dim in order or range(value.dim()):
            is_symbol = not isinstance(value.shape[dim], int)
            sizes.append(-1 if is_symbol and -1 not in sizes else self._writer.size(node, dim))
        return sizes

    def _signs(self, source: Source) -> Node:
        """Store the signs of a source for the reads that need no more, and return what is stored."""
        writer, node, order = self._writer, source.node, memory_order(value_of(source.node))
        with writer.before(after(node), FORWARD):
            flat = writer.call(_aten.reshape.default, self._permute(node, order), [-1])
            count = writer.size(flat, 0)
            is_mask = value_of(node).dtype == torch.bool
            stored = writer.call(_own.signs.default, writer.cast(flat, torch.uint8) if is_mask else flat)
        force_save(stored)
        reads = source.reads_of("signs")
        with writer.before(self._first([read.reader for read in reads + self._find_masked_reads(source)]), BACKWARD):
            signs = writer.cast(self._unpack_signs(stored, count), value_of(node).dtype)
            dense = writer.call(_aten.view.default, signs, self._sizes(node, order))
            dense = self._undo_permute(dense, order)
        if is_mask:
            self._restored[node] = dense
        self._replace_reads(source, dense, reads)
        return stored

    def _find_masked_reads(self, mask: Source) -> list[Read]:
        """Return the reads of sources that backward computes again with a mask."""
        again = (source for source in self._sources if source.bases)
        return [read for source in again if mask.node in self._find_masks(source) for read in source.reads_of("values")]

    def _find_masks(self, source: Source) -> set[Node]:
        """Return the masks with which backward computes a source again."""
        masks, waiting, bases = set[Node](), [source.node], {base.node for base in source.bases}
        while waiting:
            current = waiting.pop()
            current = first_input(current) if name_of(current) == GETITEM else current  # the norm with this result
            for node in current.all_input_nodes:
                mask = mask_of(node)
                if mask is not None:
                    masks.add(mask)
                elif node not in bases and node in self._bases:
                    waiting.append(node)
        return masks

    def _unpack_signs(self, stored: Node, count: int | Node) -> Node:
        """Undo ``compiled.signs``: return each bit as a number."""
        writer = self._writer
        options = {"start": 0, "step": 1, "dtype": torch.int32, "requires_grad": False}
        places = writer.call(_prims.iota.default, PER_BYTE, device=value_of(stored).device, **options)
        places = writer.call(_aten.unsqueeze.default, writer.cast(places, torch.uint8), 1)  # [8, 1]
        bytes_ = writer.call(_aten.unsqueeze.default, stored, 0)  # [1, B]
        shifted = writer.call(_aten.bitwise_right_shift.Tensor, bytes_, places)
        bits = writer.call(_aten.view.default, writer.call(_aten.bitwise_and.Scalar, shifted, 1), [-1])
        return writer.call(_aten.slice.Tensor, bits, 0, 0, count)

    def _shape(self, source: Source) -> None:
        """Let reads that need only a shape read uninitialized memory."""
        writer, value, reads = self._writer, value_of(source.node), source.reads_of("shape")
        order = memory_order(value)
        with writer.before(self._first([read.reader for read in reads]), BACKWARD):
            sizes = [writer.size(source.node, dim) for dim in order]
            empty = writer.call(_aten.empty.memory_format, sizes, dtype=value.dtype, device=value.device)
            empty = self._undo_permute(empty, order)
        self._replace_reads(source, empty, reads)

    def _values(self, source: Source) -> None:
        """Let backward read the unpacked value of a source, or its value computed again from those of its bases."""
        reads = source.reads_of("values")
        if not source.bases:
            self._replace_reads(source, self._restored[source.node], reads)
            return
        with self._writer.before(self._first([read.reader for read in reads]), BACKWARD):
            restored = {base.node: self._restored[base.node] for base in source.bases}
            value = self._compute_again(source.node, restored)
        self._replace_reads(source, value, reads)

    def _replace_reads(self, source: Source, value: Node, reads: list[Read], tag: str = BACKWARD) -> None:
        """Replace reads of a source by reads of ``value``, through copies of their views and casts."""
        by_node = defaultdict[Node, list[Node]](list)
        for read in reads:
            by_node[read.node].append(read.reader)
        for node, readers in by_node.items():
            with self._writer.before(self._first(readers), tag):
                argument = self._copy_path(node, {source.node: value})
                argument = self._writer.cast(argument, value_of(node).dtype)
            for reader in readers:
                reader.replace_input_with(node, argument)
            while not node.users and node not in self._joint.forward:  # a view that backward reads no more
                before = first_input(node)
                self._joint.graph.erase_node(node)
                node = before

    def _first(self, nodes: list[Node]) -> Node:
        return min(nodes, key=self._joint.order.__getitem__)

    def _copy_path(self, node: Node, values: dict[Node, Node]) -> Node:
        """Return a copy of ``node``, and of the views and casts before it, that reads a value of ``values``."""
        if node in values:
            return values[node]
        source, name = first_input(node), name_of(node)
        both_permute = name in _PERMUTATIONS and name_of(source) in _PERMUTATIONS
        if both_permute and is_laid_out_like(node, first_input(source)):
            return self._copy_path(first_input(source), values)
        before = self._copy_path(source, values)
        if name == MARK:
            return before
        if name in CASTS and is_laid_out_like(node, source):
            return self._writer.cast(before, value_of(node).dtype)
        if name in _RESHAPES and not is_laid_out_like(before, source):  # it may be no view of the new value
            before = self._writer.call(_aten.clone.default, before, memory_format=torch.contiguous_format)
        return self._writer.copy(node, {source: before})

    def _compute_again(self, node: Node, values: dict[Node, Node]) -> Node:
        """Return ``node`` computed again from ``values``, which keeps the results, or itself if it depends on none."""
        if node in values:
            return values[node]
        mask = mask_of(node)
        if mask is not None and mask in self._restored:
            return self._writer.cast(self._restored[mask], value_of(node).dtype)
        if node not in self._bases or node.op == "placeholder":
            return node
        if name_of(node) == GETITEM:
            values[node] = self._normalize_again(node, values)
        elif passes_on(node):
            values[node] = self._copy_path(node, {first_input(node): self._compute_again(first_input(node), values)})
        else:
            tensors = (source for source in node.all_input_nodes if tensor_of(source) is not None)
            inputs = {
                source: self._writer.cast(self._compute_again(source, values), value_of(source).dtype)
                for source in tensors
            }
            values[node] = self._writer.copy(node, inputs)
        return values[node]

    def _normalize_again(self, node: Node, values: dict[Node, Node]) -> Node:
        """Return the output of a layer norm, computed with the mean and the deviation from forward."""
        writer, norm = self._writer, first_input(node)
        x = writer.cast(self._compute_again(first_input(norm), values), torch.float32)
        mean, rstd = (self._item(norm, place) for place in (1, 2))
        y = writer.call(_aten.mul.Tensor, writer.call(_aten.sub.Tensor, x, mean), rstd)
        weight, bias = norm.args[2:4]
        y = y if weight is None else writer.call(_aten.mul.Tensor, y, weight)
        y = y if bias is None else writer.call(_aten.add.Tensor, y, bias)
        return writer.cast(y, value_of(node).dtype)

    def _item(self, node: Node, place: int) -> Node:
        """Return the result of a node at this place."""
        for user in node.users:
            if name_of(user) == GETITEM and user.args[1] == place:
                return user
        return self._writer.call(operator.getitem, node, place)
