r"""How a tensor may be kept for what reads it in backward.

A reader behind a mark belongs to the layer that has put it there, and gets what the layer's rule says. All others are
judged by themselves, as ``codec.saved_ops`` judges what eager operations save: a gradient may be computed from values
in few bits where it is *linear* in them, or off by a bound that is known. In a joint graph such readers are

    product          ``g * x`` and ``bmm`` with a factor that depends on the gradient; where its sum over many values is
                     the gradient of a parameter, as of a layer scale ``x * gamma``, it may have bits of its own
    attention        ``_scaled_dot_product_..._backward``, of query, key, value and result; what it saves of its sums
                     stays as it is
    softmax          of attention that is written out: ``g p`` and ``p sum(g p)``, if products of matrices alone read
                     the weights ``p`` in forward, behind dropout. Errors of weights between 0 and 1 are bounded, and
                     ``g`` has no pole where they are small, as that of ``log(p)``. They get the bits of the query,
                     which fused attention computes them from. Not in eager mode, which does not see all who read them

Not so the backward of activation functions and norms: without a mark they are those of a layer that a rule leaves
dense, or may be. So are the products of weight gradients, unless no rule does so (``Model.weight_gradients``).

Two kinds of readers need less than values, whoever they belong to. ``relu`` asks for *signs*, exactly one bit, and
pooling for the *shape* of its input.

Values that no layer has marked are only taken if they depend on a mark: weights and what is computed from them do not,
so that gradients of inputs stay exact. And they are not taken if a mask has put values into them, which may be as large
as it likes, other than into what a softmax reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.fx import Node

from lightning_actprune.codec.saved_ops import SAVED_OPS, Kind, ops_of
from lightning_actprune.compiled.graphs import (
    CASTS,
    FILLS,
    GETITEM,
    PARTS,
    SPLITS,
    VIEWS,
    Joint,
    Read,
    count_of,
    first_input,
    mask_of,
    name_of,
    passes_on,
    source_of,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.marks import HALF, Model

_PRODUCTS = frozenset({"aten.mul", "aten.bmm", "aten.dot", "aten.mv"})
_COMPARISONS, _RANDOM = ops_of(Kind.COMPARISON), ops_of(Kind.RANDOM)
_OF_MATRICES = frozenset({"aten.bmm", "aten.mm", "aten.baddbmm"})
_SOFTMAX = ops_of(Kind.SOFTMAX)
"""A softmax that is not decomposed."""
_WEIGHT_GRADIENTS = {"aten.mm": 1, "aten.convolution_backward": 1}
"""Operations that compute a weight gradient, and the place of what it is a product with."""
_SHAPE_OF = {
    f"aten.{name}_backward": 1
    for name in (
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "avg_pool2d",
        "avg_pool3d",
        "_adaptive_avg_pool2d",
    )
}
"""Backward operations with an input of which they read the shape, and its place."""
_ATTENDED = {
    f"aten._scaled_dot_product_{kind}_backward": place
    for kind, place in (
        ("flash_attention", 4),
        ("flash_attention_for_cpu", 4),
        ("cudnn_attention", 4),
        ("efficient_attention", 5),
        ("fused_attention_overrideable", 6),
    )
}
"""Backward of fused attention, and the place of the result; query, key and value are at 1, 2 and 3."""
_MASKS, _KEEP_MASKS = ops_of(Kind.SETS_VALUES), ops_of(Kind.KEEPS_OUTLIERS)
_MOST_NODES = 16
"""Nodes among which a mask or a quotient is looked for."""
_QUOTIENTS = ops_of(Kind.QUOTIENT)
_SAVE_NOTHING = frozenset(row.op_name for row in SAVED_OPS if row.saves_nothing) - ops_of(Kind.HOLDS_VALUES)
"""Operations that save nothing; but of a part of a step somebody else may save something."""
_FEWER_VALUES = 8
"""A factor with more than one eighth of the values of the other one is no step of a quantization."""


@dataclass(frozen=True)
class Values:
    """Values in few bits, or as they are but not all of them.

    Args:
        bits: Bits of a stored value, 0 for values as they are.
        block_size: Values per block.
        parts: The sparsity, a number or the node that stands for it.
        scope: Within what blocks compete.
        selection: Which blocks are kept.
        operator: Of the layer that asks, empty if none does.
    """

    bits: int
    block_size: int
    parts: int | Node = 0
    scope: str = "sample"
    selection: str = "largest"
    operator: str = ""

    @property
    def drops(self) -> bool:
        """Whether blocks are dropped."""
        return isinstance(self.parts, Node) or self.parts > 0


Way: TypeAlias = "Values | Literal['signs', 'shape']"


class Refused(Exception):  # noqa: N818 - it is no error of anybody's
    """Says why a value stays as it is."""


def way_of(joint: Joint, model: Model, read: Read) -> Way:
    """Return what a read needs.

    Raises:
        Refused: If it needs all values as they are.
    """
    given, reader = read.node, read.reader
    name = name_of(reader)
    if _asks_for_signs(name, given, reader):
        return "signs"
    if _is_only(reader, given, _SHAPE_OF.get(name)):
        return "shape"
    layer = read.layer
    if layer is not None:
        assert read.mark is not None
        parts = read.mark.args[2] if len(read.mark.args) > 2 else 0
        assert isinstance(parts, int | Node)
        if layer.bits in (0, HALF) and parts == 0:
            raise Refused("the layer's rule keeps values as they are")
        return Values(layer.bits, layer.block_size, parts, layer.scope, layer.selection, layer.operator)
    bits = _unmarked_bits(joint, model, name, given, reader)
    if not bits:
        raise Refused("the rule for what operations save keeps it as it is")
    if given not in joint.marked:
        raise Refused("it does not depend on what a layer has marked, so that it may be a weight")
    if not name.startswith("aten._scaled_dot_product") and is_masked(given):
        raise Refused("a mask has put values into it, which may be as large as it likes")
    return Values(bits, model.block_size)


def _unmarked_bits(joint: Joint, model: Model, name: str, given: Node, reader: Node) -> int:
    """Return the bits in which a reader that belongs to no layer may be given a value."""
    if name in _ATTENDED:
        places = {1: model.query, 2: model.key, 3: model.value, _ATTENDED[name]: model.attended}
        found = [bits for place, bits in places.items() if _is_only(reader, given, place)]
        if not found:
            raise Refused("it is a bias, which may mask, or a statistic of attention")
        return found[0]
    if name == "aten._softmax_backward_data" and _is_only(reader, given, 1):
        return model.query
    if _is_product(joint, given, reader):
        if is_softmax(source_of(given)):
            return model.query
        if _has_step_as_factor(joint, source_of(given)):
            raise Refused("its other factor has a gradient that is a difference of sums")
        return model.parameter or model.saved if _is_for_a_parameter(reader) else model.saved
    if model.weight_gradients and _is_only(reader, given, _WEIGHT_GRADIENTS.get(name)):
        return model.saved
    raise Refused(f"{name or reader.target} is not known to be right for values in few bits")


def _is_product(joint: Joint, given: Node, reader: Node) -> bool:
    """Return whether a reader multiplies a value, or what it is negated, by one factor that depends on a gradient."""
    name, factors = name_of(reader), reader.all_input_nodes
    if name == "aten.neg":
        return bool(reader.users) and all(_is_product(joint, reader, user) for user in reader.users)
    if name == "prims.fma":
        if given is reader.args[2]:
            return False
        factors = [node for node in reader.args[:2] if isinstance(node, Node)]
    elif name not in _PRODUCTS:
        return False
    others = [node for node in factors if node is not given]
    return len(others) == 1 and others[0] in joint.tangent


def _has_step_as_factor(joint: Joint, source: Node) -> bool:
    """Return whether forward multiplies a value by a factor that may be a quantization step.

    Another operation than a product saves the step, too, or it is the inverse of parameters. The gradient of a step is
    a small difference of two large sums, with an error of only one of them.
    """
    most = count_of(value_of(source)) // _FEWER_VALUES
    products = (user for user in _forward_users(joint, source) if name_of(user) in _PRODUCTS | _OF_MATRICES)
    factors = {source_of(factor) for product in products for factor in product.all_input_nodes} - joint.given
    return any(
        (tensor := tensor_of(factor)) is not None and count_of(tensor) <= most and _may_be_step(joint, factor)
        for factor in factors
    )


def _may_be_step(joint: Joint, factor: Node) -> bool:
    users = map(name_of, _forward_users(joint, factor))
    return any(name not in _PRODUCTS | _OF_MATRICES | _SAVE_NOTHING for name in users) or _is_inverse(joint, factor)


def _forward_users(joint: Joint, node: Node) -> list[Node]:
    """Return the nodes that read a value in forward, behind views and casts."""
    users, waiting = list[Node](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user in joint.forward and user.op != "output":
                (waiting if passes_on(user) else users).append(user)
    return users


def _is_inverse(joint: Joint, node: Node) -> bool:
    """Return whether a value depends only on parameters and is their inverse or a quotient of them."""
    waiting, seen, inverse = [node], 0, False
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(), seen + 1
        if node in joint.marked or node in joint.given:
            return False
        if is_softmax(node):
            continue
        negative = name_of(node) == "aten.pow" and isinstance(node.args[1], int | float) and node.args[1] < 0
        inverse |= name_of(node) in _QUOTIENTS or negative
        waiting += node.all_input_nodes
    return inverse and not waiting


def scales_mask(joint: Joint, softmax: Node) -> bool:
    """Return whether another tensor scales masked scores before a softmax.

    The gradient of that tensor multiplies the large values of a mask by weights, which have to be exactly 0 there.
    """
    waiting, seen = list(softmax.all_input_nodes), 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if name_of(node) in ("aten.mul", "aten.div") and any(map(is_masked, node.all_input_nodes)):
            factors = {source for source in map(source_of, node.all_input_nodes) if tensor_of(source) is not None}
            if len(factors - joint.given) > 1:
                return True
        if passes_on(node) or name_of(node) == "aten.exp":
            waiting.append(first_input(node))
        elif name_of(node) in _KEEP_MASKS | _MASKS:
            waiting += node.all_input_nodes
    return False


def is_softmax(node: Node) -> bool:
    """Return whether a node is a softmax, perhaps decomposed; rows of which all is masked may be set to 0."""
    if name_of(node) in _SOFTMAX:
        return True
    if name_of(node) == "aten.where":
        return any(map(_is_zero, node.all_input_nodes)) and any(is_softmax(source_of(x)) for x in node.all_input_nodes)
    if name_of(node) != "aten.div" or name_of(first_input(node)) != "aten.exp":
        return False
    total = node.args[1]
    return isinstance(total, Node) and name_of(total) == "aten.sum" and first_input(total) is first_input(node)


def _is_zero(node: Node) -> bool:
    place = FILLS.get(name_of(node))
    return place is not None and bool(node.args[place] == 0)


def only_weighs(joint: Joint, softmax: Node) -> bool:
    """Return whether a softmax in forward weighs values that depend on a mark, behind views, casts and dropout.

    Of constants, such as ones that choose some weights, it may be that the logarithm is taken.
    """
    waiting = [softmax]
    while waiting:
        weights = waiting.pop()
        for user in weights.users:
            if user.op == "output":  # whoever gets it may take its logarithm
                return False
            if user not in joint.forward:
                continue
            if passes_on(user) or is_softmax(user) or _is_dropout(user, weights):
                waiting.append(user)
            elif name_of(user) in _OF_MATRICES:
                if any(other not in joint.marked for other in user.all_input_nodes):
                    return False
            elif name_of(user) not in _RANDOM:  # which are made in its shape
                return False
    return True


def _is_dropout(node: Node, of: Node) -> bool:
    """Return whether a node multiplies a value by a mask or a number, or sets to 0 what a mask says."""
    if name_of(node) == "aten.native_dropout" or (name_of(node) == GETITEM and name_of(of) == "aten.native_dropout"):
        return True
    others = [other for other in node.all_input_nodes if other is not of]
    if name_of(node) == "aten.where":
        return all(_is_zero(other) or mask_of(other) is not None for other in others)
    alone = node.args.count(of) == 1 and (name_of(node) == "aten.mul" or node.args[0] is of)
    return name_of(node) in ("aten.mul", "aten.div") and alone and all(mask_of(other) is not None for other in others)


def is_random_mask(node: Node) -> bool:
    """Return whether a node stands for truth values that were drawn, as dropout's are."""
    if mask_of(node) is not node:
        return False
    while name_of(node) in _COMPARISONS | CASTS | VIEWS | {GETITEM}:
        node = first_input(node)
    return name_of(node) in _RANDOM


def _is_for_a_parameter(product: Node) -> bool:
    """Return whether a product is summed over the samples, and the sum given out as the gradient of an input."""

    def given_out(node: Node) -> bool:
        return all(user.op == "output" or (passes_on(user) and given_out(user)) for user in node.users)

    def summed(node: Node) -> bool:
        return all(
            summed(user) if passes_on(user) else _sums_over_samples(user) and given_out(user) for user in node.users
        )

    return name_of(product) == "aten.mul" and summed(product)


def _sums_over_samples(node: Node) -> bool:
    """Return whether a node is a sum over the first dimension, which is of many values then."""
    if name_of(node) != "aten.sum":
        return False
    over = node.args[1] if len(node.args) > 1 else None
    return not over or (isinstance(over, list | tuple) and bool({0, -value_of(first_input(node)).dim()} & {*over}))


def _asks_for_signs(name: str, given: Node, reader: Node) -> bool:
    if name == "aten.threshold_backward":
        return reader.args[1:] == (given, 0)
    return name == "aten.le" and reader.args == (given, 0)


def _is_only(reader: Node, given: Node, place: int | None) -> bool:
    """Return whether a reader is given a value as its argument at a place, and as no other one."""
    return place is not None and [at for at, value in enumerate(reader.args) if value is given] == [place]


def is_masked(node: Node) -> bool:
    """Return whether a mask has put values into a node, perhaps before views, parts, sums and products."""
    waiting, seen = [node], 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if is_softmax(node):
            continue
        if name_of(node) in _MASKS:
            return True
        if passes_on(node):
            waiting.append(first_input(node))
        elif name_of(node) in _KEEP_MASKS | PARTS | SPLITS | {"aten.cat"}:
            waiting += node.all_input_nodes
    return False


def most_careful(ways: list[Values]) -> Values:
    """Return one way for all: blocks are dropped only if everybody drops the same ones, and the most bits count.

    Raises:
        Refused: If somebody wants all values as they are.
    """
    first = ways[0]
    alike = all(
        (way.parts, way.scope, way.selection, way.block_size)
        == (first.parts, first.scope, first.selection, first.block_size)
        for way in ways
    )
    if any(way.bits == 0 for way in ways):
        if alike and all(way.bits == 0 for way in ways):
            return first
        raise Refused("what reads it besides needs all blocks, and its values are kept as they are")
    most = max(ways, key=lambda way: way.bits)
    if alike:
        return most
    return Values(most.bits, most.block_size, operator=most.operator)
