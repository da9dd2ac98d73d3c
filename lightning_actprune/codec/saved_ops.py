"""The table of operations: what autograd saves for each, and how backward uses it.

Backward computes a gradient from the incoming one, ``g``, and from tensors that forward saved. A saved value ``x`` that
is stored in few bits comes back with an error of mean zero, of at most half a step of its block: ``d``. What that does
to the gradient depends on how backward uses ``x``::

    use         backward                               error of the gradient              stored
    LINEAR      multiplies by x: x * y, x @ w, x^2     mean zero                          in bits
    BOUNDED     computes g f(x) with a smooth f        at most L d |g|, see below         in bits
    QUERY, KEY  computes attention again               grows with the logits              in bits
    VALUE       multiplies by x                        mean zero                          in bits
    ATTENDED    multiplies the result of attention     mean zero                          in bits
    WEIGHTS     multiplies a softmax p: g p, p sum(gp) bounded, since 0 <= p <= 1         in bits, if compiled
    SIGN        needs to know if a result is above 0   none                               one bit each, if compiled
    SHAPE       needs the shape of x alone             none                               nothing, or the fewest bits
    BIAS        adds a bias of attention again         any: a mask is minus infinity      exactly
    EXACT       does anything else                     any, see below                     exactly

*Bounded* errors, with the largest slope ``L`` of the derivative::

    gelu, silu, mish, softplus   L d |g|, with L = 0.80, 0.50, 0.65, 0.25
    x^3                          3 (2 |x| d + d^2) |g|
    norms, their input's         2 (r d) r max|z| max|g|, with z = (x - mu) r the normalized input; mu and r = 1/sigma
                                 are exact (the weight's gradient is linear)

All other operations, and those without a row, need *exact* values. With errors, a comparison decides the other way
near its threshold (``clamp``, ``abs``, ``amax``), a quotient comes near its pole (``x / y``, ``log``), ``sin`` of large
values is in another period, ``grid_sample`` reads another pixel, and a difference of large numbers is nothing but their
errors (``var`` of values far from zero).

**Names.** A row has the name of an operation in ``torch.ops.aten``, such as ``"gelu"``. In eager mode its autograd node
is ``GeluBackward0``: the name in camel case, unless the row has ``nodes``. In a compiled graph, forward has
``aten.gelu``, and ``aten.gelu_backward`` reads the saved tensor (``backward``). If inductor decomposes them, each part
names the whole (``codec.private.original_operation``).

**Storage.** Only ``storage_for`` decides how to store a tensor, in eager mode and in compiled code: from its use, from
other facts about it (``Facts``) and from the model's rules (``Policy``). Each of the two finds small tensors, weights,
and modules that a rule leaves alone by itself.

**Parameters.** If a factor is computed from parameters alone and has fewer values than the other one, that one enters
no gradient but theirs, where errors of many rows cancel (``Policy.parameter``). Eager mode walks back from the factor.
A compiled graph does not say which inputs are parameters: there the factor depends on no mark, and backward sums the
product over samples. So compiled code cannot tell the parameters of a batched product (``bmm``) from activations of an
earlier graph, and stores its inputs in the bits of ``Policy.saved``.

**Grouped products.** Each matrix of the parameter gets the errors of its own rows alone, and those are few. So rows of
a grouped product have at least four bits, whatever ``Policy.parameter`` says.

**Weighed rows.** If the other factor of ``mul`` has one value for each row, the rows are values that are summed with
weights, as in attention. They have the bits of ``Policy.value``.

**Layers without a mark.** In compiled code an operation without a mark may belong to a layer that a rule leaves dense.
So inputs of matrix products, convolutions, norms and smooth functions are exact there once a rule leaves some layer
dense (``Facts.may_stay_dense``). Eager mode knows the module.

**Weights of a softmax** are exact in eager mode. A caller may take their logarithm, even after the module has returned,
which multiplies their errors by 1/p: then the gradient is nothing but errors. A compiled graph shows all readers, and
whether the weights are an output. It stores them in bits if they only weigh values.

**Signs and shapes.** Eager mode stores the result of ``relu`` exactly, since the next layer keeps the same memory, and
the input of pooling in the fewest bits.

**Outliers.** Where an outlier takes all steps of its block for itself, as the -10,000 of a mask does among scores, the
other values are lost, though their gradients may be all that counts. Values that ``masked_fill`` or ``where`` has
written to are exact. Other outliers show only in the values. Eager mode looks at these in the forward that decides, and
in some later ones: then the tensor is exact from that forward on. Compiled code cannot change what it stores. It looks
as often, and warns with the rule that leaves the operation uncompressed (``codec.outliers``). While a CUDA graph is
captured nobody can look: eager mode stores exactly, and compiled code has only looked in the runs before the capture.

**To add a row**, look at ``y.grad_fn.name()``, and at its attributes ``_saved_...`` for what is saved. Derive the
gradient, and find the line above by which it uses ``x``. Then add the operation to ``LINEAR``, ``NOT_LINEAR`` or
``SHAPE_ALONE`` of ``tests/contract/test_saved_ops.py``: tests disturb what is saved, compare the error with the bound,
and compare eager mode with compiled code.
Rows without uses serve code that walks a graph, by their ``kind``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, Literal, NamedTuple


class Use(Enum):
    """How backward uses a saved tensor, see the module."""

    NOTHING = auto()  # not saved
    EXACT = auto()
    LINEAR = auto()
    BOUNDED = auto()
    SHAPE = auto()
    SIGN = auto()
    QUERY = auto()
    KEY = auto()
    VALUE = auto()
    ATTENDED = auto()
    BIAS = auto()
    WEIGHTS = auto()


class Kind(Flag):
    """Kinds of operations, for code that walks a graph. One operation may have several kinds."""

    OTHER = 0
    VIEW = auto()  # all values of its input, in its memory
    CAST = auto()  # all values, in another type
    COPY = auto()  # all values, in memory of its own
    PART = auto()  # some values, in its input's memory
    SPLIT = auto()  # several parts
    JOIN = auto()  # the values of several inputs
    HOLDS_VALUES = VIEW | CAST | COPY | PART | SPLIT | JOIN
    RESHAPE = auto()  # a view that may need a copy
    PERMUTE = auto()  # a view with its dimensions in another order
    PRODUCT = auto()  # the gradient of one factor is the incoming one times the other
    GEMM = auto()  # a product of matrices or a convolution that a library computes
    GROUPED = auto()  # a product of groups of rows with a matrix each, such as those of experts
    QUOTIENT = auto()  # divides by a tensor
    ATTENTION = auto()  # fused attention
    SOFTMAX = auto()
    STATISTIC = auto()  # a number for many values
    RANDOM = auto()
    COMPARISON = auto()
    SETS_VALUES = auto()  # puts values where a mask says
    KEEPS_OUTLIERS = auto()  # an outlier of an input is one of the result
    POINTWISE = auto()  # inductor computes it inside the kernel that reads it
    STEADY = auto()  # pointwise without a jump, of bounded slope: computed again from quantized values it is near


@dataclass(frozen=True)
class SavedOp:
    """A row of the table: an operation.

    Args:
        name: Name in ``torch.ops.aten``, or ``"prims.name"``.
        inputs: How backward uses saved inputs; for attention, each of them in the order in which they are saved.
        result: How backward uses the result.
        kind: Kinds of the operation.
        nodes: Names of its autograd nodes without ``Backward0``, by default its own name in camel case.
        backward: Operations that read the saved tensors in compiled graphs, with the uses of their arguments by place.
        only: An argument of the operation, and its values for which the row holds: ``("exponent", (2, 3))``.
    """

    name: str
    inputs: Use | tuple[Use, ...] = Use.EXACT
    result: Use = Use.NOTHING
    kind: Kind = Kind.OTHER
    nodes: tuple[str, ...] | None = None
    backward: Mapping[str, Mapping[int, Use]] = field(default_factory=dict)
    only: tuple[str, tuple[float, ...]] | None = None

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of its autograd nodes: ``("GeluBackward0",)``."""
        names = (_camel_case(self.name),) if self.nodes is None else self.nodes
        return tuple(f"{name}Backward0" for name in names)

    @property
    def op_name(self) -> str:
        """Its name in compiled graphs: ``"aten.gelu"``."""
        return _op_name(self.name)


def _camel_case(name: str) -> str:
    words = re.sub(r"(?<=\d)d", "D", name).split("_")  # pool2d is Pool2D
    return "".join(word[:1].upper() + word[1:] for word in words)


def _op_name(name: str) -> str:
    return name if "." in name else f"aten.{name}"


def _rows(*names: str, **fields: Any) -> tuple[SavedOp, ...]:
    """Return rows that differ only in their names."""
    return tuple(SavedOp(name, **fields) for name in names)


def _with_backward(use: Use, *names: str, place: int = 1, **fields: Any) -> tuple[SavedOp, ...]:
    """Return rows of operations with a backward operation that gets the input at ``place``."""
    return tuple(SavedOp(name, use, backward={f"{name}_backward": {place: use}}, **fields) for name in names)


def _attention(name: str, result_place: int) -> SavedOp:
    inputs, name = (_U.QUERY, _U.KEY, _U.VALUE), f"_scaled_dot_product_{name}"
    places = dict.fromkeys(range(1, 16), _U.BIAS) | dict(enumerate(inputs, 1)) | {result_place: _U.ATTENDED}
    return SavedOp(name, inputs, _U.ATTENDED, _K.ATTENTION, backward={f"{name}_backward": places})


_U, _K = Use, Kind
_SMOOTH = _K.POINTWISE | _K.STEADY
_NORMS = "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"
_CONVOLUTIONS = "Convolution", "CudnnConvolution", "SlowConv2D"
SAVED_OPS: tuple[SavedOp, ...] = (
    # === Products: the gradient of one factor is the incoming one times the other ====================================
    SavedOp("mul", _U.LINEAR, kind=_K.PRODUCT | _K.KEEPS_OUTLIERS | _SMOOTH, backward={"mul": {}}),
    SavedOp("addcmul", _U.LINEAR, kind=_K.PRODUCT | _K.STEADY, backward={"mul": {}}),
    *_rows("mm", "addmm", inputs=_U.LINEAR, kind=_K.PRODUCT | _K.GEMM, backward={"mm": {1: _U.LINEAR}}),
    *_rows("bmm", "baddbmm", inputs=_U.LINEAR, kind=_K.PRODUCT | _K.GEMM, backward={"bmm": {}}),
    *_with_backward(_U.LINEAR, "convolution", kind=_K.PRODUCT | _K.GEMM, nodes=_CONVOLUTIONS),
    *_rows("addbmm", "addmv", "addr", "dot", "linear", "mv", inputs=_U.LINEAR, kind=_K.PRODUCT),
    SavedOp("_grouped_mm", _U.LINEAR, kind=_K.PRODUCT | _K.GROUPED, backward={"_grouped_mm": {0: _U.LINEAR}}),
    # x^3 is bounded; the gradient of |x| is x / |x|, of which |x| is exact.
    SavedOp("pow", _U.LINEAR, kind=_K.POINTWISE, backward={"pow": {}, "mul": {}}, only=("exponent", (2, 3))),
    SavedOp("linalg_vector_norm", _U.LINEAR, backward={"div": {}}, only=("ord", (2,))),
    # === Of bounded error ============================================================================================
    *_with_backward(_U.BOUNDED, "gelu", "silu", "mish", "softplus", kind=_SMOOTH),
    *_with_backward(_U.BOUNDED, *_NORMS, result=_U.EXACT),
    *_with_backward(_U.BOUNDED, "cudnn_batch_norm", place=0, result=_U.EXACT),
    # === Attention: the place of the result in backward differs ======================================================
    *(_attention(name, 4) for name in ("flash_attention", "flash_attention_for_cpu", "cudnn_attention")),
    _attention("efficient_attention", 5),
    _attention("fused_attention_overrideable", 6),
    *_rows(
        "_softmax",
        "_safe_softmax",
        inputs=_U.NOTHING,
        result=_U.WEIGHTS,
        kind=_K.SOFTMAX,
        backward={"_softmax_backward_data": {1: _U.WEIGHTS}},
    ),
    # === Exact, from less than the values ============================================================================
    SavedOp("relu", _U.NOTHING, _U.SIGN, _SMOOTH, backward={"threshold_backward": {1: _U.SIGN}, "le": {0: _U.SIGN}}),
    *_with_backward(_U.SHAPE, "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *_with_backward(_U.SHAPE, "max_pool2d_with_indices", "max_pool3d_with_indices"),
    *_with_backward(_U.SHAPE, *(f"{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3))),
    SavedOp("index_add", _U.SHAPE),
    # === Exact, or nothing: for code that walks a graph ==============================================================
    *_rows("add", "sub", "neg", inputs=_U.NOTHING, kind=_K.KEEPS_OUTLIERS | _SMOOTH),
    SavedOp("div", kind=_K.KEEPS_OUTLIERS | _K.QUOTIENT | _K.POINTWISE),
    SavedOp("reciprocal", _U.NOTHING, _U.EXACT, _K.QUOTIENT | _K.POINTWISE),
    SavedOp("rsqrt", _U.NOTHING, _U.EXACT, _K.QUOTIENT | _K.STATISTIC),
    SavedOp("exp", _U.NOTHING, _U.EXACT, _K.POINTWISE),
    SavedOp("tanh", _U.NOTHING, _U.EXACT, _SMOOTH, backward={"tanh_backward": {}}),
    SavedOp("sigmoid", _U.NOTHING, _U.EXACT, _SMOOTH, backward={"sigmoid_backward": {}}),
    SavedOp("erf", kind=_SMOOTH),
    SavedOp("sign", _U.NOTHING),
    SavedOp("where", kind=_K.SETS_VALUES | _K.POINTWISE),
    *_rows("masked_fill", "masked_scatter", "index_fill", kind=_K.SETS_VALUES),
    *_rows("ge", "gt", "le", "lt", inputs=_U.NOTHING, kind=_K.COMPARISON, nodes=()),
    *_rows("mean", "sum", inputs=_U.NOTHING, kind=_K.STATISTIC),
    *_rows("amax", "amin", "max", "var", "var_mean", "std", "logsumexp", kind=_K.STATISTIC),
    *_rows("bernoulli", "native_dropout", kind=_K.RANDOM),
    *_rows("rand", "rand_like", "prims.inductor_random", kind=_K.RANDOM, nodes=()),
    # === The values of the input =====================================================================================
    *_rows("alias", "expand", "squeeze", "unsqueeze", inputs=_U.NOTHING, kind=_K.VIEW),
    *_rows("view", "_unsafe_view", "_reshape_alias", inputs=_U.NOTHING, kind=_K.VIEW | _K.RESHAPE),
    *_rows("permute", "transpose", "t", inputs=_U.NOTHING, kind=_K.VIEW | _K.PERMUTE),
    *_rows("detach", "reshape", inputs=_U.NOTHING, kind=_K.VIEW, nodes=()),
    SavedOp("_to_copy", _U.NOTHING, kind=_K.CAST),
    SavedOp("prims.convert_element_type", _U.NOTHING, kind=_K.CAST, nodes=()),
    SavedOp("clone", _U.NOTHING, kind=_K.COPY),
    SavedOp("contiguous", _U.NOTHING, kind=_K.COPY, nodes=()),
    *_rows("as_strided", "select", "slice", inputs=_U.NOTHING, kind=_K.PART),
    SavedOp("narrow", _U.NOTHING, kind=_K.PART, nodes=()),
    *_rows("split", "split_with_sizes", "unbind", inputs=_U.NOTHING, kind=_K.SPLIT),
    SavedOp("chunk", _U.NOTHING, kind=_K.SPLIT, nodes=()),
    *_rows("cat", "stack", inputs=_U.NOTHING, kind=_K.JOIN),
)
_BY_NODE = {node: row for row in SAVED_OPS for node in row.node_names}
_BY_OP = {row.op_name: row for row in SAVED_OPS}
_BY_BACKWARD = {_op_name(name): places for row in SAVED_OPS for name, places in row.backward.items()}


def of_node(name: str) -> SavedOp | None:
    """Return the row of an autograd node, ``"GeluBackward0"``, or ``None``."""
    return _BY_NODE.get(name)


def of_op(name: str) -> SavedOp | None:
    """Return the row of an operation in compiled graphs, ``"aten.gelu"``, or ``None``."""
    return _BY_OP.get(name)


def of_backward(name: str) -> Mapping[int, Use]:
    """Return the uses of arguments, by place, of a backward operation in compiled graphs, ``"aten.gelu_backward"``."""
    return _BY_BACKWARD.get(name, {})


def nodes_of(kind: Kind) -> frozenset[str]:
    """Return the names of the autograd nodes of all operations of a kind."""
    return frozenset(name for row in SAVED_OPS if row.kind & kind for name in row.node_names)


def ops_of(kind: Kind) -> frozenset[str]:
    """Return the names in compiled graphs of all operations of a kind."""
    return frozenset(row.op_name for row in SAVED_OPS if row.kind & kind)


def backward_of(kind: Kind) -> frozenset[str]:
    """Return the names of operations that read, in compiled graphs, what operations of a kind saved."""
    return frozenset(_op_name(name) for row in SAVED_OPS if row.kind & kind for name in row.backward)


# === How a tensor is stored ==========================================================================================

_GROUPED_BITS = 4
"""Fewest bits of rows that only the gradients of many matrices need, each of which has the errors of few rows."""
_FEWER_VALUES = 8
"""A step has at least this many times fewer values than the tensor that it multiplies."""


@dataclass(frozen=True)
class Policy:
    """Bits of saved tensors, from a model's rules; 0 for uncompressed values.

    Args:
        saved: Bits of tensors with no setting below.
        query: Bits of the query of fused attention.
        key: Bits of its key.
        value: Bits of its value.
        attention_out: Bits of its result.
        parameter: Bits of tensors that only the gradient of a parameter needs, such as the input of a layer scale; 0
            for those of ``saved``.
        operations: Bits by the name of an operation, in place of all others.
    """

    saved: int = 0
    query: int = 0
    key: int = 0
    value: int = 0
    attention_out: int = 0
    parameter: int = 0
    operations: tuple[tuple[str, int], ...] = ()

    def bits_by_rule(self, operation: str) -> int | None:
        """Return the bits of a rule that names an operation, as ``aten`` or as autograd does, or ``None``."""
        return {_key(name): bits for name, bits in self.operations}.get(_key(operation))


def _key(name: str) -> str:
    """Return the same key for ``"grid_sampler_2d"`` and for ``"grid_sampler2_d"``, its name in eager mode."""
    return name.rpartition(".")[2].replace("_", "").lower()


class Facts(NamedTuple):
    """Facts about a saved tensor. Eager hooks and compiled code find them in their own ways.

    Args:
        is_for_parameter: Whether only the gradient of a parameter needs it.
        is_grouped: Whether that parameter has a matrix for each group of rows.
        is_weighed: Whether its factor has one value for each row.
        has_step_as_factor: Whether its factor may be a learned step (``is_step``).
        may_stay_dense: Whether it may be the input of a layer that a rule leaves dense.
        is_masked: Whether a mask has set some of its values.
        has_outliers: Whether outliers take all steps of their blocks; ``None`` if nobody could look.
    """

    is_for_parameter: bool = False
    is_grouped: bool = False
    is_weighed: bool = False
    has_step_as_factor: bool = False
    may_stay_dense: bool = False
    is_masked: bool = False
    has_outliers: bool | None = False


class Storage(NamedTuple):
    """How to store a saved tensor.

    Args:
        how: In ``bits``, as one bit a value that tells if it is above 0, as a shape alone, or exactly.
        bits: Bits of a value.
        reason: Why it is exact.
    """

    how: Literal["bits", "signs", "shape", "exact"]
    bits: int = 0
    reason: str = ""


def is_exact(use: Use) -> bool:
    """Return True if backward needs exact values, whatever the facts."""
    return use in (Use.NOTHING, Use.EXACT, Use.BIAS)


def storage_for(operation: str, use: Use, facts: Facts, policy: Policy) -> Storage:
    """Return how to store a saved tensor.

    Args:
        operation: Name of the operation whose backward reads it, ``""`` if rules by name do not hold for it.
        use: How backward uses it.
        facts: Facts about the tensor, which matter for ``LINEAR`` and ``BOUNDED`` uses.
        policy: The model's rules.

    Example:
        >>> policy = Policy(saved=8, parameter=2)
        >>> storage_for("mul", Use.LINEAR, Facts(is_for_parameter=True), policy)
        Storage(how='bits', bits=2, reason='')
        >>> storage_for("mul", Use.LINEAR, Facts(is_masked=True), policy).how
        'exact'
    """
    by_rule = policy.bits_by_rule(operation)
    if by_rule == 0:
        return Storage("exact", reason=_BY_RULE)
    if use is Use.SHAPE:
        return Storage("shape")
    if use is Use.SIGN:
        return Storage("signs")
    if by_rule is not None:
        return Storage("bits", by_rule)
    if is_exact(use):
        return Storage("exact", reason=_BIAS if use is Use.BIAS else _NOT_KNOWN)
    linear = policy.saved
    if facts.is_for_parameter and policy.parameter:
        linear = max(policy.parameter, _GROUPED_BITS) if facts.is_grouped else policy.parameter
    elif facts.is_weighed and policy.value:
        linear = policy.value
    bits = {
        Use.QUERY: policy.query,
        Use.WEIGHTS: policy.query,  # fused attention computes them again from the query
        Use.KEY: policy.key,
        Use.VALUE: policy.value,
        Use.ATTENDED: policy.attention_out,
    }.get(use, linear)
    if not bits:
        return Storage("exact", reason=_BY_RULE)
    if use in (Use.LINEAR, Use.BOUNDED):
        for holds, reason in (
            (facts.may_stay_dense, "a rule may leave the layer that reads it dense"),
            (facts.has_step_as_factor, "its other factor has a gradient that is a difference of sums"),
            (facts.is_masked, "a mask has set values in it, which may be of any size"),
            (facts.has_outliers, OUTLIER),
            (facts.has_outliers is None, "outliers cannot be looked for while a CUDA graph is captured"),
        ):
            if holds:
                return Storage("exact", reason=reason)
    return Storage("bits", bits)


_BY_RULE = "a rule leaves it uncompressed"
_BIAS = "it is a bias, which may mask, or a statistic of attention"
_NOT_KNOWN = "its gradient is not known to be right for values in few bits"
OUTLIER = "an outlier takes all steps of its block for itself"


def is_step(values: int, factor_values: int, savers: Iterable[SavedOp | None], is_inverse: bool) -> bool:
    """Return True if a factor may be the learned step of a quantization.

    A quantization divides by its step and multiplies by it again. So the step's gradient is a difference of two sums,
    far smaller than either: an error of one of them would be most of it.

    Args:
        values: Number of values that the factor multiplies; a step has far fewer.
        factor_values: Number of values of the factor.
        savers: The operations that save the factor; for a step, one of them is no product.
        is_inverse: Whether the factor is the inverse of parameters, or such a parameter; then it may be a step, too.
    """
    others = is_inverse or any(row is None or not row.kind & Kind.PRODUCT for row in savers)
    return factor_values * _FEWER_VALUES <= values and others
