r"""Decide how few bits each read of a value in backward bears.

A read behind a mark belongs to a layer, and follows the layer's rule. Other reads follow the table of operations, as in
eager mode (``codec.saved_ops``), by how they use the value. In a joint graph, these operations may read few bits:

- backward operations of the table, such as those of fused attention and of pooling;
- products ``g * x`` and ``bmm`` whose other factor ``g`` depends on a gradient. If backward sums ``g * x`` to the
  gradient of a parameter, as for a layer scale ``x * gamma``, then ``x`` has the bits of ``Policy.parameter``;
- the backward of a softmax, and products with its result, if only matrix products read the result in forward, perhaps
  behind dropout;
- the backward of norms and smooth functions, and weight gradients, unless a rule leaves some layer dense
  (``Model.unmarked_layers``): without a mark, the value may be that layer's input.

A value without a mark is only packed if it depends on a mark. Weights, and tensors computed from weights, do not, so
gradients of inputs stay exact.
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
    hints,
    mask_of,
    name_of,
    passes_on,
    source_of,
    tensor_of,
    value_of,
)
from lightning_actprune.compiled.marks import Model
from lightning_actprune.config import HALF

_PRODUCTS = ops_of(Kind.PRODUCT)
_WEIGHT_GRADIENTS = frozenset({"aten.mm", "aten.mv", "aten.convolution_backward"})
"""Operations that compute the gradient of a weight, a sum over all samples."""
_OF_TWO_FACTORS = frozenset({"aten.mul", "aten.bmm", "aten.dot", "aten.mm", "aten.mv"})
"""Operations by which backward multiplies a value by a gradient."""
_GROUPED = ops_of(Kind.GROUPED)
_COMPARISONS, _RANDOM = ops_of(Kind.COMPARISON), ops_of(Kind.RANDOM)
_OF_MATRICES = frozenset({"aten.bmm", "aten.mm", "aten.baddbmm"})
"""Operations that may weigh values by a softmax."""
_SOFTMAX = ops_of(Kind.SOFTMAX)
"""Softmax, unless it is decomposed."""
_MASKS, _KEEP_MASKS = ops_of(Kind.SETS_VALUES), ops_of(Kind.KEEPS_OUTLIERS)
_MOST_NODES = 16
"""Nodes that a search for a mask or a quotient visits."""
_QUOTIENTS = ops_of(Kind.QUOTIENT)
_SAVE_NOTHING = frozenset(row.op_name for row in SAVED_OPS if row.inputs is row.result is Use.NOTHING) - ops_of(
    Kind.HOLDS_VALUES
)
"""Operations that save nothing, without views: another operation may save a view of a step."""


@dataclass(frozen=True)
class Values:
    """How to pack values: in few bits, with blocks dropped, or both.

    Args:
        bits: Bits of a stored value, 0 for uncompressed values.
        block_size: Values per block.
        parts: The sparsity, a number or its node.
        topk_over: Whether blocks compete within a sample or a token.
        selection: How blocks are selected.
        operator: The operator of the layer that reads them, ``""`` without one.
        operation: The operation that a warning of outliers names, ``""`` to look for none.
        offload: Whether the packed values wait for backward in the memory of the host.
    """

    bits: int
    block_size: int
    parts: int | Node = 0
    topk_over: str = "sample"
    selection: str = "largest"
    operator: str = ""
    operation: str = ""
    offload: bool = False

    @property
    def drops(self) -> bool:
        """Whether blocks are dropped."""
        return isinstance(self.parts, Node) or self.parts > 0


Way: TypeAlias = "Values | Literal['signs', 'shape']"


class Refusal(Exception):  # noqa: N818 - nobody has made an error
    """The reason why a value stays uncompressed."""


def find_way(joint: Joint, model: Model, read: Read) -> Way:
    """Return how to store a value for one read.

    Raises:
        Refusal: If the read needs all values, uncompressed.
    """
    layer = read.layer
    use = _find_use(joint, read.node, read.reader)
    if layer is not None and use not in (Use.SIGN, Use.SHAPE):
        assert read.mark is not None
        parts = read.mark.args[2] if len(read.mark.args) > 2 else 0
        assert isinstance(parts, int | Node)
        if layer.bits in (0, HALF) and parts == 0:
            raise Refusal("the layer's rule keeps values uncompressed")
        how = layer.bits, layer.block_size, parts, layer.topk_over, layer.selection, layer.operator
        return Values(*how, offload=layer.offload)
    operation = "" if layer is not None else _find_operation(joint, model, read, use)
    facts = _find_facts(joint, model, read, use)
    storage = storage_for(operation, use, facts, model)
    if storage.how == "signs" or storage.how == "shape":
        return storage.how
    if storage.how == "exact":
        raise Refusal(storage.reason)
    if read.node not in joint.marked:
        raise Refusal("it does not depend on a layer's input, so it may be a weight")
    is_checked = use in (Use.LINEAR, Use.BOUNDED) and not facts.is_grouped and model.bits_by_rule(operation) is None
    name = (operation or name_of(read.reader)).rpartition(".")[2] if is_checked else ""
    return Values(storage.bits, model.block_size, operation=name, offload=model.offload)


def _find_operation(joint: Joint, model: Model, read: Read, use: Use) -> str:
    """Return the name of the operation whose backward reads a value, ``""`` if rules by name do not hold for it.

    Raises:
        Refusal: If it is unknown, and a rule leaves some operation uncompressed.
    """
    operation = joint.operation_of(read.reader)
    if operation is not None:
        name = original_operation(operation)
        is_result = sequence_number(source_of(read.node)) == sequence_number(operation)
        # As in eager mode, rules by name pack no results but that of attention.
        return "" if is_result and use is not Use.ATTENDED and model.bits_by_rule(name) else name
    name = name_of(read.reader)
    if name.endswith("_backward"):
        return name.removesuffix("_backward")
    if any(bits == 0 for _, bits in model.operations):
        raise Refusal("a rule may leave the operation that reads it uncompressed")
    return ""


def _find_use(joint: Joint, node: Node, reader: Node) -> Use:
    """Return how a reader uses its argument ``node``."""
    if Use.BOUNDED in of_backward(original_operation(reader)).values():  # inductor may have decomposed it
        return Use.BOUNDED
    if _is_product(joint, node, reader):
        return Use.WEIGHTS if is_softmax(source_of(node)) else Use.LINEAR
    places = [place for place, argument in enumerate(reader.args) if argument is node]
    use = of_backward(name_of(reader)).get(places[0], Use.EXACT) if len(places) == 1 else Use.EXACT
    if use is Use.EXACT and _starts_linear_backward(joint, reader):
        return Use.LINEAR
    has_threshold = use is Use.SIGN and reader.args[-1] != 0
    return Use.EXACT if has_threshold else use


def _starts_linear_backward(joint: Joint, reader: Node) -> bool:
    """Return True if a reader is the first of several nodes of a linear backward, as of ``x^2``."""
    operation = joint.operation_of(reader)
    row = None if operation is None else of_op(original_operation(operation))
    if operation is None or row is None or row.inputs is not Use.LINEAR:
        return False
    is_own = original_operation(reader).removeprefix("aten.") in row.backward
    return is_own and (row.only is None or (*operation.args, 2)[1] in row.only[1])  # the order of a norm may be missing


def _find_facts(joint: Joint, model: Model, read: Read, use: Use) -> Facts:
    """Return the facts about a value without a mark. Outliers show only when the graph runs."""
    if use not in (Use.LINEAR, Use.BOUNDED):
        return Facts()
    is_product = _is_product(joint, read.node, read.reader)
    is_input_of_layer = use is Use.BOUNDED or name_of(read.reader) in _WEIGHT_GRADIENTS
    is_for_parameter = use is Use.LINEAR and _is_for_parameter(joint, read)
    is_grouped = is_for_parameter and name_of(read.reader) in _GROUPED
    return Facts(
        is_for_parameter=is_for_parameter,
        is_grouped=is_grouped,
        is_weighed=is_product and _is_weighed(joint, read, model.block_size),
        has_step_as_factor=is_product and _has_step_as_factor(joint, source_of(read.node)),
        may_stay_dense=not model.unmarked_layers and (is_input_of_layer or not joint.names_operations),
        is_masked=not is_grouped and is_masked(read.node),  # rows of weight gradients bear masks
    )


def _is_weighed(joint: Joint, read: Read, block_size: int) -> bool:
    """Return True if forward multiplies each row of a value by one factor."""
    source, operation = source_of(read.node), joint.operation_of(read.reader)
    shape = hints(value_of(source).shape)
    if operation is None or name_of(operation) != "aten.mul" or not shape or shape[-1] < block_size:
        return False
    return any(hints(value_of(factor).shape) == [*shape[:-1], 1] for factor in operation.all_input_nodes)


def _is_product(joint: Joint, node: Node, reader: Node) -> bool:
    """Return True if a reader multiplies ``node`` or ``-node`` by one factor that depends on a gradient."""
    name, factors = name_of(reader), reader.all_input_nodes
    if name == "aten.neg":
        return bool(reader.users) and all(_is_product(joint, reader, user) for user in reader.users)
    if name == "prims.fma":
        if node is reader.args[2]:
            return False
        factors = [factor for factor in reader.args[:2] if isinstance(factor, Node)]
    elif name not in _OF_TWO_FACTORS:
        return False
    others = [factor for factor in factors if factor is not node]
    return len(others) == 1 and others[0] in joint.tangent


def _has_step_as_factor(joint: Joint, source: Node) -> bool:
    """Return True if forward multiplies a value by a tensor that may be the step of a quantization."""
    products = [user for user in _forward_users(joint, source) if name_of(user) in _PRODUCTS]
    factors = {source_of(factor) for product in products for factor in product.all_input_nodes} - joint.without_gradient
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
    """Return the nodes of forward that read a value, perhaps through views and casts."""
    users, waiting = list[Node](), [node]
    while waiting:
        for user in waiting.pop().users:
            if user in joint.forward and user.op != "output":
                (waiting if passes_on(user) else users).append(user)
    return users


def _is_inverse(joint: Joint, node: Node) -> bool:
    """Return True if a value depends on parameters alone, and divides by one."""
    waiting, seen, inverse = [node], 0, False
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(), seen + 1
        if node in joint.marked or node in joint.without_gradient:
            return False
        if is_softmax(node):
            continue
        negative = name_of(node) == "aten.pow" and isinstance(node.args[1], int | float) and node.args[1] < 0
        inverse |= name_of(node) in _QUOTIENTS or negative
        waiting += node.all_input_nodes
    return inverse and not waiting


def scales_mask(joint: Joint, softmax: Node) -> bool:
    """Return True if masked scores are multiplied by another tensor before a softmax.

    The gradient of that tensor multiplies the large values of the mask by weights that must be exactly 0 there.
    """
    waiting, seen = list(softmax.all_input_nodes), 0
    while waiting and seen < _MOST_NODES:
        node, seen = waiting.pop(0), seen + 1
        if name_of(node) in ("aten.mul", "aten.div") and any(map(is_masked, node.all_input_nodes)):
            factors = {source for source in map(source_of, node.all_input_nodes) if tensor_of(source) is not None}
            if len(factors - joint.without_gradient) > 1:
                return True
        if passes_on(node) or name_of(node) == "aten.exp":
            waiting.append(first_input(node))
        elif name_of(node) in _KEEP_MASKS | _MASKS:
            waiting += node.all_input_nodes
    return False


def is_softmax(node: Node) -> bool:
    """Return True if a node is a softmax, perhaps decomposed, perhaps with 0 in rows that are masked as a whole."""
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
    """Return True if a softmax does nothing but weigh values, perhaps behind views, casts and dropout.

    The values have to depend on a mark: a product with constants may choose weights whose logarithm is taken.
    """
    waiting = [softmax]
    while waiting:
        weights = waiting.pop()
        for user in weights.users:
            if user.op == "output":  # the caller may take its logarithm
                return False
            if user not in joint.forward:
                continue
            if passes_on(user) or is_softmax(user) or _is_dropout(user, weights):
                waiting.append(user)
            elif name_of(user) in _OF_MATRICES:
                if any(other not in joint.marked for other in user.all_input_nodes):
                    return False
            elif name_of(user) not in _RANDOM:  # random values in its shape
                return False
    return True


def _is_dropout(node: Node, of: Node) -> bool:
    """Return True if a node multiplies a value by a mask or a number, or sets masked values to 0."""
    if name_of(node) == "aten.native_dropout" or (name_of(node) == GETITEM and name_of(of) == "aten.native_dropout"):
        return True
    others = [other for other in node.all_input_nodes if other is not of]
    if name_of(node) == "aten.where":
        return all(_is_zero(other) or mask_of(other) is not None for other in others)
    alone = node.args.count(of) == 1 and (name_of(node) == "aten.mul" or node.args[0] is of)
    return name_of(node) in ("aten.mul", "aten.div") and alone and all(mask_of(other) is not None for other in others)


def is_random_mask(node: Node) -> bool:
    """Return True if a node is a random mask, as dropout draws it."""
    if mask_of(node) is not node:
        return False
    while name_of(node) in _COMPARISONS | CASTS | VIEWS | {GETITEM}:
        node = first_input(node)
    return name_of(node) in _RANDOM


def _is_for_parameter(joint: Joint, read: Read) -> bool:
    """Return True if forward multiplies a value by parameters alone, with fewer values.

    A graph does not say which inputs are parameters. So the factors must depend on no mark and be the same for all
    samples, over which backward then sums.
    """
    operation, source = joint.operation_of(read.reader), source_of(read.node)
    if operation is None:
        return False
    is_grouped = name_of(operation) in _GROUPED
    arguments = operation.args[1:] if name_of(operation).startswith("aten.add") else operation.args  # b of b + x w
    factors = [node for node in arguments if isinstance(node, Node) and source_of(node) is not source]
    factors = factors[:1] if is_grouped else factors  # without the ends of the groups
    fewer = is_grouped or all(count_of(value_of(factor)) < count_of(value_of(source)) for factor in factors)
    return bool(factors) and fewer and joint.marked.isdisjoint(factors) and _is_summed_over_samples(read.reader)


def _is_summed_over_samples(product: Node) -> bool:
    """Return True if a product is a sum over samples, or only such sums read it."""
    name = name_of(product)
    if name in _WEIGHT_GRADIENTS or (name == "aten.bmm" and value_of(product).shape[0] == 1):
        return True
    if name in _GROUPED:
        return value_of(product).dim() == 3  # a matrix for each group of rows
    return all(
        _is_summed_over_samples(user) if passes_on(user) or name_of(user) == "aten.mul" else _sums_over_samples(user)
        for user in product.users
    )


def _sums_over_samples(node: Node) -> bool:
    """Return True if a node is a sum over the first dimension."""
    if name_of(node) != "aten.sum":
        return False
    over = node.args[1] if len(node.args) > 1 else None
    return not over or (isinstance(over, list | tuple) and bool({0, -value_of(first_input(node)).dim()} & {*over}))


def is_masked(node: Node) -> bool:
    """Return True if a mask has set values of a node, perhaps before views, parts, sums and products."""
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


def combine_ways(ways: list[Values]) -> Values:
    """Return one way for all reads: with the most bits, and with blocks dropped only if all drop the same ones.

    Raises:
        Refusal: If one read needs all blocks and another keeps values uncompressed.
    """
    most = max(ways, key=lambda way: way.bits)
    alike = len({(way.parts, way.topk_over, way.selection, way.block_size) for way in ways}) == 1
    if not all(way.bits for way in ways) and (most.bits or not alike):
        raise Refusal("another reader needs all blocks, and the values are uncompressed")
    return most if alike else Values(most.bits, most.block_size, operator=most.operator, offload=most.offload)
