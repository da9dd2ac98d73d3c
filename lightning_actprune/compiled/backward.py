"""Write inductor's graph of backward so that its kernels have less to do.

A kernel that computes the gradient of an activation from packed values computes more than it loads. Inductor takes 25
instructions for ``erf``, 20 for ``tanh`` and 8 for ``exp``, exact to the last bit or two. Functions of unpacked values
are written here with half of these. ``erf`` and ``tanh`` err by 5e-7 at most and ``exp`` by 8e-6 of its value, far less
than the packed value. The formula for ``erf`` is 7.1.26 of M. Abramowitz and I. A. Stegun, Handbook of Mathematical
Functions (1964).

A product reads a gradient from memory, so inductor writes it there. Other readers read it there, too, if they read
what the product reads. Else they compute it again, and for that inductor writes the unpacked value to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from lightning_actprune.codec.saved_ops import Kind, ops_of
from lightning_actprune.compiled.graphs import (
    CASTS,
    FEWER,
    VIEWS,
    Writer,
    after,
    count_of,
    first_input,
    is_read_by_product,
    name_of,
    tensor_of,
    value_of,
)

WRITTEN = frozenset({"aten.abs", "aten.copysign", "aten.exp2"})
"""Pointwise operations that only the functions below write."""
_aten = torch.ops.aten
_UNPACK = "actprune.dequantize", "actprune.unpack"
_POINTWISE = ops_of(Kind.POINTWISE | Kind.CAST) | VIEWS
_RESHAPES = ops_of(Kind.RESHAPE) | {"aten.reshape"}
_ERF_SLOPE = 0.3275911
_ERF_FACTORS = 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592
"""The formula's factors of powers of ``1 / (1 + slope |x|)``, of the highest one first."""


def write_backward(graph: Graph) -> None:
    """Rewrite a graph if it unpacks values."""
    unpacked, gradients, writer = set[Node](), set[Node](), None
    for node in list(graph.nodes):
        if name_of(node) in _UNPACK:
            unpacked.add(node)
            writer = writer or Writer(graph)
        elif writer is None or name_of(node) not in _POINTWISE:
            continue
        elif _depends_only_on(node, unpacked):
            unpacked.add(node)
            write = _FUNCTIONS.get(name_of(node))
            if write is not None and value_of(node).dtype == torch.float32:
                with writer.before(node, None):
                    unpacked.add(written := write(writer, first_input(node)))
                node.replace_all_uses_with(written)
                graph.erase_node(node)
        elif any(x in unpacked or (x in gradients and name_of(node) in CASTS) for x in node.all_input_nodes):
            gradients.add(node)
            _share_with_product(writer, node)


def _depends_only_on(node: Node, unpacked: set[Node]) -> bool:
    """Return True if all large inputs of a node are unpacked values or functions of them."""
    inputs = [source for source in node.all_input_nodes if tensor_of(source) is not None]
    most = count_of(value_of(node)) // FEWER
    few = (source in unpacked or count_of(value_of(source)) <= most for source in inputs)
    return any(source in unpacked for source in inputs) and all(few)


def _share_with_product(writer: Writer, node: Node) -> None:
    """Let all readers of a gradient read the view that a product reads, if its sizes are no symbols."""
    view = next((user for user in node.users if name_of(user) in _RESHAPES and is_read_by_product(user)), None)
    others, shape = [user for user in node.users if user is not view], value_of(node).shape
    if view is None or not others or any(name_of(user) in VIEWS for user in others):
        return
    if view.all_input_nodes != [node] or not all(isinstance(size, int) for size in shape):
        return
    node.append(view)
    with writer.before(after(view), None):
        same = writer.call(_aten.reshape.default, view, list(shape))
    for other in others:
        other.replace_input_with(node, same)


# === Functions ========================================================================================


def _exp(writer: Writer, x: Node) -> Node:
    """Return ``e^x``."""
    return _exp_of_product(writer, *_split_factor(x))


def _tanh(writer: Writer, x: Node) -> Node:
    """Return ``1 - 2 / (e^2x + 1)``."""
    base, factor = _split_factor(x)
    exponential = _exp_of_product(writer, base, 2 * factor)
    inverse = writer.call(_aten.reciprocal.default, writer.call(_aten.add.Tensor, exponential, 1.0))
    return writer.call(_aten.add.Tensor, writer.call(_aten.mul.Tensor, inverse, -2.0), 1.0)


def _erf(writer: Writer, x: Node) -> Node:
    """Return ``1 - p(t) e^-x^2`` with the sign of ``x``."""
    base, factor = _split_factor(x)
    square = writer.call(_aten.mul.Tensor, base, base)
    exponential = _exp_of_product(writer, square, -factor * factor)  # which the derivative of a GELU has, too
    slope = writer.call(_aten.mul.Tensor, writer.call(_aten.abs.default, x), _ERF_SLOPE)
    t = writer.call(_aten.reciprocal.default, writer.call(_aten.add.Tensor, slope, 1.0))
    first, *others = _ERF_FACTORS
    p = writer.call(_aten.mul.Tensor, t, first)
    for each in others:
        p = writer.call(_aten.mul.Tensor, writer.call(_aten.add.Tensor, p, each), t)
    rest = writer.call(_aten.mul.Tensor, p, exponential)
    size = writer.call(_aten.add.Tensor, writer.call(_aten.mul.Tensor, rest, -1.0), 1.0)
    return writer.call(_aten.copysign.Tensor, size, x)


def _exp_of_product(writer: Writer, x: Node, factor: float) -> Node:
    exponent = torch.tensor(factor * math.log2(math.e)).item()  # equal products differ in the last bits of 64
    return writer.call(_aten.exp2.default, writer.call(_aten.mul.Tensor, x, exponent))


def _split_factor(x: Node) -> tuple[Node, float]:
    """Return the two factors of a node, of which the second is a number: 1 if the node is no such product."""
    if name_of(x) == "aten.mul" and isinstance(x.args[1], float):
        base = first_input(x)
        if value_of(base).dtype == value_of(x).dtype:
            return base, x.args[1]
    return x, 1.0


_FUNCTIONS: dict[str, Callable[[Writer, Node], Node]] = {"aten.erf": _erf, "aten.exp": _exp, "aten.tanh": _tanh}
