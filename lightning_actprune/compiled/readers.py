r"""How a tensor may be kept for what reads it in backward.

A reader behind a mark belongs to the layer that has put it there, and gets what the layer's rule says. All others are
judged by how they use the value, as in eager mode (``codec.saved_ops``). In a joint graph these are

- operations of backward that the table lists, such as those of fused attention and of pooling;
- products ``g * x`` and ``bmm`` with a factor ``g`` that depends on the gradient. Where the sum of a product over many
  values is the gradient of a parameter, as of a layer scale ``x * gamma``, ``x`` may have bits of its own;
- products and ``softmax``'s own backward with the weights of attention that is written out, if products of matrices
  alone read these in forward, behind dropout. Eager mode does not see all who read them: there they stay;
- the backward of norms and smooth functions, and weight gradients, unless a rule leaves some layer dense
  (``Model.unmarked_layers``): without a mark, the value may be that layer's input.

Values that no layer has marked are only taken if they depend on a mark: weights and what is computed from them do not,
so that gradients of inputs stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.fx import Node

from lightning_actprune.codec.private import original_operation, sequence_number
from lightning_actprune.codec.saved_ops import (
    SAVED_OPS,
    Facts,
    Kind,
    Use,
    is_step,
    of_backward,
    of_op,
    ops_of,
    storage_for,
)
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

_PRODUCTS = ops_of(Kind.PRODUCT)
_WEIGHT_GRADIENTS = frozenset({"aten.mm", "aten.mv", "aten.convolution_backward"})
"""Operations that compute the gradient of a weight, a sum over all samples."""
_OF_TWO_FACTORS = frozenset({"aten.mul", "aten.bmm", "aten.dot", "aten.mm", "aten.mv"})
"""Operations by which backward multiplies a value by a gradient."""
_COMPARISONS, _RANDOM = ops_of(Kind.COMPARISON), ops_of(Kind.RANDOM)
_OF_MATRICES = frozenset({"aten.bmm", "aten.mm", "aten.baddbmm"})
"""Operations that may weigh values by a softmax."""
_SOFTMAX = ops_of(Kind.SOFTMAX)
"""A softmax that is not decomposed."""
_MASKS, _KEEP_MASKS = ops_of(Kind.SETS_VALUES), ops_of(Kind.KEEPS_OUTLIERS)
_MOST_NODES = 16
"""Nodes among which a mask or a quotient is looked for."""
_QUOTIENTS = ops_of(Kind.QUOTIENT)
_SAVE_NOTHING = frozenset(row.op_name for row in SAVED_OPS if row.inputs is row.result is Use.NOTHING) - ops_of(
    Kind.HOLDS_VALUES
)
"""Operations that save nothing; but of a part of a step somebody else may save something."""


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
        operation: Name of the operation for which outliers are looked for, empty if for none.
    """

    bits: int
    block_size: int
    parts: int | Node = 0
    scope: str = "sample"
    selection: str = "largest"
    operator: str = ""
    operation: str = ""

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
    layer = read.layer
    use = _use_of(joint, read.node, read.reader)
    if layer is not None and use not in (Use.SIGN, Use.SHAPE):
        assert read.mark is not None
        parts = read.mark.args[2] if len(read.mark.args) > 2 else 0
        assert isinstance(parts, int | Node)
        if layer.bits in (0, HALF) and parts == 0:
            raise Refused("the layer's rule keeps values as they are")
        return Values(layer.bits, layer.block_size, parts, layer.scope, layer.selection, layer.operator)
    operation = "" if layer is not None else _operation_of(joint, model, read, use)
    storage = storage_for(operation, use, _facts(joint, model, read, use), model)
    if storage.how == "signs" or storage.how == "shape":
        return storage.how
    if storage.how == "exact":
        raise Refused(storage.reason)
    if read.node not in joint.marked:
        raise Refused("it does not depend on what a layer has marked, so that it may be a weight")
    is_checked = use in (Use.LINEAR, Use.BOUNDED) and model.bits_by_rule(operation) is None
    name = (operation or name_of(read.reader)).rpartition(".")[2] if is_checked else ""
    return Values(storage.bits, model.block_size, operation=name)


def _operation_of(joint: Joint, model: Model, read: Read, use: Use) -> str:
    """Return the name of the operation whose backward reads a value, ``""`` if no rule by its name is about that.

    Raises:
        Refused: If it is unknown, and a rule leaves what some operation saves as it is.
    """
    operation = joint.operation_of(read.reader)
    if operation is not None:
        name = original_operation(operation)
        is_result = sequence_number(source_of(read.node)) == sequence_number(operation)
        # As in eager mode, of all results a rule packs that of attention alone.
        return "" if is_result and use is not Use.ATTENDED and model.bits_by_rule(name) else name
    name = name_of(read.reader)
    if name.endswith("_backward"):
        return name.removesuffix("_backward")
    if any(bits == 0 for _, bits in model.operations):
        raise Refused("a rule may leave the operation as it is that reads it")
    return ""


def _use_of(joint: Joint, given: Node, reader: Node) -> Use:
    """Return how a reader uses a value."""
    if Use.BOUNDED in of_backward(original_operation(reader)).values():  # of which inductor makes several nodes
        return Use.BOUNDED
    if _is_product(joint, given, reader):
        return Use.WEIGHTS if is_softmax(source_of(given)) else Use.LINEAR
    places = [place for place, value in enumerate(reader.args) if value is given]
    use = of_backward(name_of(reader)).get(places[0], Use.EXACT) if len(places) == 1 else Use.EXACT
    if use is Use.EXACT and _is_linear_in(joint, given, reader):
        return Use.LINEAR
    is_threshold = use is Use.SIGN and reader.args[-1] != 0  # of a threshold that is not 0
    return Use.EXACT if is_threshold else use


def _is_linear_in(joint: Joint, given: Node, reader: Node) -> bool:
    """Return whether a reader is the first of several nodes of a backward that is linear in an input, as of ``x^2``."""
    operation = joint.operation_of(reader)
    row = None if operation is None else of_op(original_operation(operation))
    if operation is None or row is None or row.inputs is not Use.LINEAR:
        return False
    is_input = sequence_number(source_of(given)) != sequence_number(operation)
    is_own = original_operation(reader).removeprefix("aten.") in row.backward
    return is_input and is_own and (row.only is None or operation.args[1] in row.only[1])


def _facts(joint: Joint, model: Model, read: Read, use: Use) -> Facts:
    """Return what is known of a value that is read without a mark. Outliers show only when the graph runs."""
    if use not in (Use.LINEAR, Use.BOUNDED):
        return Facts()
    is_product = _is_product(joint, read.node, read.reader)
    is_input_of_layer = use is Use.BOUNDED or name_of(read.reader) in _WEIGHT_GRADIENTS
    return Facts(
        is_for_parameter=use is Use.LINEAR and _is_for_parameter(joint, read),
        has_step_as_factor=is_product and _has_step_as_factor(joint, source_of(read.node)),
        may_stay_dense=not model.unmarked_layers and (is_input_of_layer or not joint.names_operations),
        is_masked=is_masked(read.node),
    )


def _is_product(joint: Joint, given: Node, reader: Node) -> bool:
    """Return whether a reader multiplies a value, or what it is negated, by one factor that depends on a gradient."""
    name, factors = name_of(reader), reader.all_input_nodes
    if name == "aten.neg":
        return bool(reader.users) and all(_is_product(joint, reader, user) for user in reader.users)
    if name == "prims.fma":
        if given is reader.args[2]:
            return False
        factors = [node for node in reader.args[:2] if isinstance(node, Node)]
    elif name not in _OF_TWO_FACTORS:
        return False
    others = [node for node in factors if node is not given]
    return len(others) == 1 and others[0] in joint.tangent


def _has_step_as_factor(joint: Joint, source: Node) -> bool:
    """Return whether forward multiplies a value by what may be the step of a quantization."""
    products = [user for user in _forward_users(joint, source) if name_of(user) in _PRODUCTS]
    factors = {source_of(factor) for product in products for factor in product.all_input_nodes} - joint.given
    return any(
        (tensor := tensor_of(factor)) is not None
        and is_step(
            count_of(value_of(source)),
            count_of(tensor),
            [of_op(name) for name in map(name_of, _forward_users(joint, factor)) if name not in _SAVE_NOTHING],
            _is_inverse(joint, factor),
        )
        for factor in factors
    )


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


def _is_for_parameter(joint: Joint, read: Read) -> bool:
    """Return whether a value is multiplied by parameters alone, of fewer values, and the product summed over samples.

    A graph does not say which inputs are parameters: these depend on no mark, and are the same for all samples.
    """
    operation, source = joint.operation_of(read.reader), source_of(read.node)
    if operation is None:
        return False
    arguments = operation.args[1:] if name_of(operation).startswith("aten.add") else operation.args  # b of b + x w
    factors = [node for node in arguments if isinstance(node, Node) and source_of(node) is not source]
    fewer = all(count_of(value_of(factor)) < count_of(value_of(source)) for factor in factors)
    return bool(factors) and fewer and joint.marked.isdisjoint(factors) and _is_summed_over_samples(read.reader)


def _is_summed_over_samples(product: Node) -> bool:
    """Return whether sums over the first dimension alone read a product, or it computes such a sum."""
    name = name_of(product)
    if name in _WEIGHT_GRADIENTS or (name == "aten.bmm" and value_of(product).shape[0] == 1):
        return True
    return all(
        _is_summed_over_samples(user) if passes_on(user) or name_of(user) == "aten.mul" else _sums_over_samples(user)
        for user in product.users
    )


def _sums_over_samples(node: Node) -> bool:
    """Return whether a node is a sum over the first dimension, which is of many values then."""
    if name_of(node) != "aten.sum":
        return False
    over = node.args[1] if len(node.args) > 1 else None
    return not over or (isinstance(over, list | tuple) and bool({0, -value_of(first_input(node)).dim()} & {*over}))


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
