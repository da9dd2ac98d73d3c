"""How the tensors of a model are kept for backward: one value type, presets of it, and rules.

``Keep`` says how a tensor is kept: in how many bits, with how many of its blocks dropped. A preset has a ``Keep`` for
each operator that it covers:

``paper``
    The method of arXiv:2311.16883 at its usual setting: of the inputs of linear layers, 60 % of the blocks of 32 values
    are dropped, the others kept as they are. No other operator is changed.
``balanced``
    Every operator is covered, no block is dropped, and every value is kept in four bits, 4.5 with the header of its
    block: a bit more than a quarter of 16-bit values. Gradients are the exact ones but for noise of mean zero. What is
    not known to be linear (``saved``) is kept in eight, all that attention saves with it: where its weights are sharp,
    query and key get a small difference of products with value and result, whose errors do not cancel. In eight bits
    are also smooth activation functions in nets with eight or more of them and as many batch norms: in a long chain of
    these the noise of each adds up; and inputs of linear layers with few rows, such as heads that read one token of
    each sample, whose errors are most of a model's and whose bytes are next to nothing.
``max``
    Every operator is covered, and no block is dropped unless a ``sparsity`` beside it asks for that; then a layer drops
    blocks where these hold at most a fifth of its input's energy, and none elsewhere (see ``analysis.first_batch``).
    Linear layers keep two bits a value and convolutions three, or two in nets with eight or more batch norms and fewer
    smooth activation functions, such as ResNets. Activation functions keep three bits, norms and attention's value
    four, layer scales two. Affine layers keep three, so that linear layers that read their output need none of their
    own (see ``operators.weight_grad``). Few rows, query, key and the result of attention are kept as by ``balanced``.

``recompute``
    The largest repeated class of blocks (``operators.recompute.find_blocks``) runs again in backward, from inputs that
    are kept in eight bits. The layers in these blocks stay dense but for rules: what they keep is there for one block
    at a time. All others keep eight bits, so that gradients are as good as exact.

Rules change that layer by layer. They are one ordered mapping from patterns to a ``Keep`` or ``None``, and *the first
rule that matches a layer counts; ``None`` keeps the layer dense; what no rule matches is kept as the preset says*. What
a ``Keep`` does not name is as the preset says, too: with ``"max"``, ``Keep(bits=4)`` keeps the inputs of linear layers
in four bits, and still those with few rows in eight. Where the preset does not cover the operator, it is as ``Keep``
says by default.

A pattern is a glob on fully qualified names (``"blocks.*.fc1"``; the model itself is ``"(root)"``), or ``"type:"`` and
an operator (``"type:norm"``). ``"operation:"`` and the name of an operation, as the monitor's tables show it
(``"operation:sin"``), is about what that saves where no layer is known: it adds one that is not known to be right with
few bits (``operators.readers``), or with ``None`` leaves what it saves as it is.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from torch import nn
from typing_extensions import TypedDict

from lightning_actprune.schedules import SparsitySchedule, check_sparsity, sparsity_at

Scope = Literal["sample", "token"]
Selection = Literal["largest", "swap", "unbiased"]
Operator = Literal[
    "linear", "convolution", "activation", "norm", "affine", "scale", "saved", "query", "key", "value", "attended"
]
PresetName = Literal["paper", "balanced", "max", "recompute"]
_Class = TypeVar("_Class")

BITS = (2, 3, 4, 8)
"""Bits that a value can be quantized to."""
MIN_QUANTIZED_BLOCK = 8
"""Least block size of quantized values: below, scale and offset cost as much as the fewer bits save."""
HALF = 16
"""Bits of inputs of a ``Recompute`` that are rounded to bfloat16 and not quantized."""
MIN_FEATURES = 64
"""Input features from which on presets cover a linear layer; a rule covers smaller ones too. Packing takes about as
long for 16 as for 256 features (launches dominate), so each MiB saved costs 2.7 ms of eager step time at 16, 1.2 at 48,
0.9 at 64, 0.1 at 768 (H200; ``benchmarks/tune.py features``)."""
SAVED: tuple[Operator, ...] = "saved", "query", "key", "value", "attended"
"""What operations save: the last four are the inputs and the result of fused attention, and are kept as ``saved`` says
where nothing is said of them."""
TYPE = "type:"
"""Begins a pattern that names an operator."""
OPERATION = "operation:"
"""Begins a pattern that names an operation."""


def check_model(value: Any, name: str = "model") -> nn.Module:
    """Return ``value`` if it is a module."""
    if not isinstance(value, nn.Module):
        shown = "" if isinstance(value, Mapping) else f"{value!r} "  # a state_dict would print all its tensors
        raise TypeError(
            f"`{name}` must be a torch.nn.Module, got {shown}of type {type(value).__name__}. HINT: pass the network "
            "or the LightningModule, not its class, its layers or its weights (a state_dict)."
        )
    return value


def check_flag(value: Any, name: str) -> bool:
    """Return ``value`` if it is a bool: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be a bool, got {value!r} of type {type(value).__name__}. HINT: True or False.")
    return value


def check_count(value: Any, name: str, hint: str, least: int = 0) -> int:
    """Return ``value`` as an int of at least ``least``; ``hint`` says what to do about an error."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be an int >= {least}, got {value!r}. HINT: {hint}")
    if value < least:
        raise ValueError(f"`{name}` must be an int >= {least}, got {value!r}. HINT: {hint}")
    return int(value)


def check_share(value: Any, name: str) -> float:
    """Return ``value`` as a float in [0, 1], a share of something."""
    hint = "HINT: it is a share of the whole, not a percentage; 0.2 is a fifth."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number in [0, 1], got {value!r} of type {type(value).__name__}. {hint}")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"`{name}` must be in [0, 1], got {value!r}. {hint}")
    return float(value)


def check_bits(value: Any, name: str = "bits") -> int | None:
    """Return ``value`` if values can be quantized to so many bits, or are kept as they are (``None``)."""
    hint = "HINT: 4 is next to free of error, 2 saves most, 8 is for what is not linear; None keeps values as they are."
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be 2, 3, 4, 8 or None, got {value!r} of type {type(value).__name__}. {hint}")
    if value not in BITS:
        raise ValueError(f"`{name}` must be 2, 3, 4, 8 or None, got {value!r}. {hint}")
    return int(value)


def check_block_size(value: Any, bits: int | None = None) -> int:
    """Return ``value`` as a positive int, the values in a block, of which there must be some if they are quantized."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"`block_size` must be a positive int, got {value!r} of type {type(value).__name__}. "
            "HINT: 32 is a good start; 16, 64 and 128 are the other usual choices."
        )
    if value < 1:
        raise ValueError(
            f"`block_size` must be a positive int, got {value!r}. HINT: 32 is a good start; a block larger than a row "
            "is cut to the row."
        )
    if bits is not None and value < MIN_QUANTIZED_BLOCK:
        raise ValueError(
            f"`block_size` must be at least {MIN_QUANTIZED_BLOCK} with bits={bits}, got {value}. HINT: each block has "
            "a scale of its own; 32 is a good start. Values kept as they are (`bits=None`) have none."
        )
    return int(value)


def check_scope(value: Any) -> Scope:
    """Return ``value`` if it names a scope within which blocks compete."""
    if not isinstance(value, str) or value not in get_args(Scope):
        raise ValueError(
            f'`scope` must be "sample" or "token", got {value!r}. HINT: "sample" lets all blocks of one sample compete '
            '(the paper), "token" only those of one row, for very long sequences.'
        )
    return value  # type: ignore[return-value]


def check_selection(value: Any) -> Selection:
    """Return ``value`` if it names a way to choose the blocks that are kept."""
    if not isinstance(value, str) or value not in get_args(Selection):
        raise ValueError(
            f'`selection` must be "largest", "swap" or "unbiased", got {value!r}. HINT: "largest" keeps the '
            'blocks of the largest norm (the paper), "swap" lets those near the threshold change places at random, '
            '"unbiased" draws blocks at random and scales them up, so that what is stored is the input on average.'
        )
    return value  # type: ignore[return-value]


class KeepArguments(TypedDict, total=False):
    """Some arguments of ``Keep``, as a configuration file gives them."""

    bits: int | None
    sparsity: float | SparsitySchedule
    block_size: int
    scope: Scope
    selection: Selection
    max_dropped_energy: float
    fine_rows: int


KEEP_FIELDS = tuple(KeepArguments.__annotations__)


def _noting_arguments(cls: type[_Class]) -> type[_Class]:
    """Let instances of ``Keep`` know which arguments were passed."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        init(self, *args, **kwargs)
        passed = frozenset((*KEEP_FIELDS[: len(args)], *kwargs))
        if "explicit" in passed:  # by `dataclasses.replace`, which passes all arguments
            passed = self.explicit.union(name for name in KEEP_FIELDS if getattr(self, name) != getattr(cls, name))
        object.__setattr__(self, "explicit", passed)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@_noting_arguments
@dataclass(frozen=True)
class Keep:
    """How a tensor is kept for backward. In a rule, the preset says what is not named (see the module).

    Args:
        bits: Bits of each value, 2, 3, 4 or 8: quantized, with a scale for each block and random errors of mean zero
            (``codec.formats``). ``None`` keeps values as they are.
        sparsity: Fraction of blocks dropped, in [0, 1), or a schedule of it. Only linear layers and convolutions drop
            blocks; what else a pattern matches keeps all of them, and a rule for other operators alone is an error.
        block_size: Consecutive values per block, positive, at least 8 with ``bits``; cut to the row if larger.
        scope: Within what blocks compete: ``"sample"``, all blocks of a sample, or ``"token"``, those of a row.
        selection: Which blocks are kept: ``"largest"``, those of the largest norm (the paper), or, at random,
            ``"swap"`` or ``"unbiased"`` (``codec.blocks``). Without effect at sparsity 0.
        max_dropped_energy: Largest share of an input's energy, in [0, 1], that its dropped blocks may hold in the first
            batch of a fit; a layer above it drops none. 1 judges none.
        fine_rows: Rows, such as tokens, below which the input of a linear layer is kept in eight bits and loses no
            block: errors of so few rows do not cancel. Without effect without ``bits``, or in eight.
        explicit: Names of arguments that a rule names beside those that differ from their defaults; by default of
            those that were passed.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> Keep(bits=4)
        Keep(bits=4)
        >>> Keep(sparsity=0.6).stored_bits
        0
    """

    bits: int | None = None
    sparsity: float | SparsitySchedule = 0.0
    block_size: int = 32
    scope: Scope = "sample"
    selection: Selection = "largest"
    max_dropped_energy: float = 1.0
    fine_rows: int = 0
    explicit: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_bits(self.bits))
        if isinstance(self.sparsity, SparsitySchedule):
            sparsity_at(self.sparsity, 0.0)
        else:
            object.__setattr__(self, "sparsity", check_sparsity(self.sparsity))
        object.__setattr__(self, "block_size", check_block_size(self.block_size, self.bits))
        check_scope(self.scope)
        check_selection(self.selection)
        object.__setattr__(self, "max_dropped_energy", check_share(self.max_dropped_energy, "max_dropped_energy"))
        hint = "rows of a linear layer's input, such as 1024; 0 makes no difference between inputs."
        object.__setattr__(self, "fine_rows", check_count(self.fine_rows, "fine_rows", hint))

    def __repr__(self) -> str:
        return f"Keep({', '.join(f'{name}={value!r}' for name, value in self.named.items())})"

    @property
    def named(self) -> dict[str, Any]:
        """The arguments that were passed."""
        return {name: getattr(self, name) for name in KEEP_FIELDS if name in self.explicit}

    @property
    def stored_bits(self) -> int:
        """Bits of each stored value, 0 for values as they are: how codec and kernels are told."""
        return self.bits or 0

    @property
    def changes(self) -> bool:
        """Whether anything is kept in another way than a dense layer would."""
        return self.bits is not None or isinstance(self.sparsity, SparsitySchedule) or self.sparsity > 0


@dataclass(frozen=True)
class Recompute:
    """A module that runs again in backward, from inputs that are kept in few bits (``operators.recompute``).

    Args:
        bits: Bits of each value of its inputs that need a gradient: 2, 3, 4 or 8, quantized as those of ``Keep``, 16,
            rounded to bfloat16, or ``None``, as they are: then it is an activation checkpoint, and exact.
        block_size: Consecutive values with a scale of their own, at least 8.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> Recompute(bits=4)
        Recompute(bits=4, block_size=32)
    """

    bits: int | None = 8
    block_size: int = 32

    def __post_init__(self) -> None:
        quantized = self.bits if self.bits == HALF and not isinstance(self.bits, bool) else check_bits(self.bits)
        object.__setattr__(self, "bits", quantized)
        object.__setattr__(self, "block_size", check_block_size(self.block_size, MIN_QUANTIZED_BLOCK))


Rule: TypeAlias = Keep | Recompute | Mapping[str, Any] | str | None
"""What a rule may be: a ``Keep`` or a mapping of its arguments, a ``Recompute`` or ``{"recompute": bits}``, the name of
a preset, ``None`` or ``"dense"``."""

MANY_LAYERS = 8
"""Batch norms, and smooth activation functions, from which on presets are other ones (see the module)."""
FINE_ROWS = 1024
"""Rows below which presets keep the input of a linear layer in eight bits."""
PRESETS: dict[PresetName, dict[Operator, Keep]] = {
    "paper": {"linear": Keep(sparsity=0.6)},
    "balanced": {
        "linear": Keep(bits=4, fine_rows=FINE_ROWS),
        "convolution": Keep(bits=4),
        "activation": Keep(bits=4),
        "norm": Keep(bits=4),
        "affine": Keep(bits=4),
        "scale": Keep(bits=4),
        "saved": Keep(bits=8),
    },
    "max": {
        "linear": Keep(bits=2, max_dropped_energy=0.2, fine_rows=FINE_ROWS),
        "convolution": Keep(bits=3, max_dropped_energy=0.2),
        "activation": Keep(bits=3),
        "norm": Keep(bits=4),
        "affine": Keep(bits=3),
        "scale": Keep(bits=2),
        "saved": Keep(bits=8),
        "value": Keep(bits=4),
    },
}
PRESETS["recompute"] = {operator: replace(keep, bits=8) for operator, keep in PRESETS["balanced"].items()}


@dataclass(frozen=True)
class Config:
    """How each layer of a model is kept: a preset, what replaces parts of it, and rules.

    Args:
        preset: Name of a preset; by default ``"paper"`` with a ``sparsity``, and ``"balanced"`` without.
        sparsity: In place of the preset's, for the operators that drop blocks.
        block_size: In place of the preset's, for all operators.
        rules: See the module.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range or names nothing that there is.
    """

    preset: PresetName | None = None
    sparsity: float | SparsitySchedule | None = None
    block_size: int | None = None
    rules: Mapping[str, Rule] | None = None
    _base: dict[Operator, Keep] = field(init=False, repr=False)
    _rules: dict[str, Keep | Recompute | PresetName | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = check_preset(self.preset) or ("balanced" if self.sparsity is None else "paper")
        changes: dict[str, Any] = {}
        if self.block_size is not None:
            changes["block_size"] = check_block_size(self.block_size)
        base = {operator: replace(keep, **changes) for operator, keep in PRESETS[name].items()}
        if self.sparsity is not None:
            if not isinstance(self.sparsity, SparsitySchedule):
                check_sparsity(self.sparsity)
            for operator in drops_blocks(base):
                base[operator] = replace(base[operator], sparsity=self.sparsity)
        object.__setattr__(self, "preset", name)
        object.__setattr__(self, "_base", base)
        object.__setattr__(self, "_rules", check_rules(self.rules))

    def fitted(self, batch_norms: int, smooth_activations: int) -> Config:
        """Return this as it is for a model with so many layers of these kinds (see the module)."""
        if batch_norms < MANY_LAYERS:
            return self
        fitted, base = copy(self), dict(self._base)
        if self.preset == "balanced" and smooth_activations >= MANY_LAYERS:
            base["activation"] = replace(base["activation"], bits=8)
        if self.preset == "max" and smooth_activations < MANY_LAYERS:
            base["convolution"] = replace(base["convolution"], bits=2)
        object.__setattr__(fitted, "_base", base)
        return fitted

    def rule_of(self, fqns: Sequence[str], operator: Operator) -> str | None:
        """Return the pattern of the rule that counts for a layer with these names, ``None`` if none matches.

        What operations save that no layer is known for (``saved``) is a matter of rules by type and of ``None``: other
        rules by name are about the layers.
        """
        types = {TYPE + operator, TYPE + ("saved" if operator in SAVED else operator)}
        for pattern, rule in self._rules.items():
            if isinstance(rule, Recompute):
                continue
            if pattern in types:
                return pattern
            if not pattern.startswith(TYPE) and matches(fqns, pattern) and (operator not in SAVED or rule is None):
                return pattern
        return None

    def keep_of(self, fqns: Sequence[str], operator: Operator) -> Keep | None:
        """Return how a layer with these names is kept, ``None`` if it stays dense."""
        pattern = self.rule_of(fqns, operator)
        rule = self._base if pattern is None else self._rules[pattern]
        assert not isinstance(rule, Recompute)
        if rule is None:
            return None
        kept = PRESETS[rule] if isinstance(rule, str) else self._base if isinstance(rule, Keep) else rule
        inherited = kept.get(operator, kept.get("saved") if operator in SAVED else None)
        if not isinstance(rule, Keep):
            return inherited
        try:
            explicit = rule.explicit if inherited is None else rule.explicit | inherited.explicit
            return replace(inherited or rule, **rule.named, explicit=explicit)
        except ValueError as error:
            raise ValueError(f"`rules[{pattern!r}]` for {operator!r}: {error}") from error

    def recompute_of(self, fqns: Sequence[str], blocks: Container[str] = ()) -> Recompute | None:
        """Return how a module with these names is run again in backward, ``None`` if it is not.

        ``blocks``: the names of those that run again where no rule says otherwise.
        """
        for pattern, rule in self._rules.items():
            if isinstance(rule, Recompute | None) and matches(fqns, pattern):
                return rule
        return Recompute() if any(fqn in blocks for fqn in fqns) else None

    @property
    def recomputes(self) -> bool:
        """Whether any module is to run again in backward."""
        return self.preset == "recompute" or any(isinstance(rule, Recompute) for rule in self._rules.values())

    def keep_of_all(self, operator: Operator) -> Keep | None:
        """Return how ``operator`` is kept by the preset, and by rules whose pattern matches whatever the name."""
        return self.keep_of([""], operator)

    def why_dense(self, fqns: Sequence[str], operator: Operator) -> str:
        """Return why a layer of which ``keep_of`` returns ``None`` stays dense."""
        pattern = self.rule_of(fqns, operator)
        if pattern is None:
            return f"preset {self.preset!r} covers {listed(self._base)} only"
        return f"the rule {pattern!r} keeps it dense"

    @property
    def operations(self) -> dict[str, int | None]:
        """The bits in which rules keep what operations save, by their names, ``None`` for as it is."""
        named = ((pattern, rule) for pattern, rule in self._rules.items() if pattern.startswith(OPERATION))
        return {
            pattern.removeprefix(OPERATION): rule.bits if isinstance(rule, Keep) else None for pattern, rule in named
        }

    @property
    def keeps(self) -> list[Keep]:
        """Every ``Keep`` that a layer may have."""
        own = [PRESETS[rule] if isinstance(rule, str) else {"": rule} for rule in self._rules.values()]
        return [keep for kept in (self._base, *own) for keep in kept.values() if isinstance(keep, Keep)]

    def check_that_rules_count(self, layers: Sequence[tuple[Sequence[str], Operator]], modules: Iterable[str]) -> None:
        """Raise ``ValueError`` if a rule counts for nothing, as one with a typo in its pattern, or drops nothing.

        Args:
            layers: All names of each layer that is known, and its operator.
            modules: All names of modules, which rules of ``None`` may be about too.
        """
        counting: dict[str | None, list[Operator]] = {}
        for fqns, operator in layers:
            counting.setdefault(self.rule_of(fqns, operator), []).append(operator)
        for pattern, rule in self._rules.items():
            if pattern in counting:
                _check_drops(pattern, rule, counting[pattern])
        others = list(modules)
        for pattern, rule in self._rules.items():
            part = pattern.removeprefix(TYPE) if pattern.startswith(TYPE) else None
            if pattern in counting or pattern == "*" or (part is not None and (part not in SAVED[1:] or rule is None)):
                continue
            if part is not None and self.rule_of([""], part) != pattern:
                raise ValueError(
                    f"`rules` pattern {pattern!r} never counts, since an earlier one is about all that operations "
                    "save. HINT: the first rule that matches counts; put this one before it."
                )
            if pattern.startswith(OPERATION) or part is not None:
                if self.keep_of(["(root)"], "saved") is not None:
                    continue
                raise ValueError(
                    f"`rules` pattern {pattern!r} counts for nothing, since what operations save is not covered. HINT: "
                    "cover it (`rules={\"type:saved\": Keep(bits=8)}`), as the presets 'balanced' and 'max' do."
                )
            if not isinstance(rule, Recompute) and any(matches(fqns, pattern) for fqns, _ in layers):
                raise ValueError(
                    f"`rules` pattern {pattern!r} never counts, since earlier patterns match all its layers. HINT: the "
                    "first rule that matches a layer counts; put this one before them."
                )
            if isinstance(rule, Recompute | None) and matches(others, pattern):
                continue
            names = [fqns[0] for fqns, _ in layers]
            near = difflib.get_close_matches(pattern, names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(
                f"`rules` pattern {pattern!r} matches no layer{meant} HINT: a pattern matches the whole name, or is "
                f"'type:' and an operator; the layers are: {shortened(names)}."
            )

    @property
    def attention(self) -> dict[str, int]:
        """The bits of what fused attention saves, by what it is, 0 for as it is."""
        kept = {part: self.keep_of_all(part) for part in SAVED[1:]}
        return {part: 0 if keep is None else keep.stored_bits for part, keep in kept.items()}

    def described(self) -> dict[str, Any]:
        """Return everything in primitives, for a checkpoint; the order of rules counts."""
        return {
            "kept": {operator: repr(keep) for operator, keep in self._base.items()},
            "rules": [[pattern, repr(rule)] for pattern, rule in self._rules.items()],
        }


def drops_blocks(operators: Iterable[str]) -> list[Operator]:
    """Return those of ``operators`` that can drop blocks."""
    return [operator for operator in operators if operator in ("linear", "convolution")]  # type: ignore[misc]


def matches(fqns: Iterable[str], pattern: str) -> bool:
    """Return whether one of a layer's names matches ``pattern``."""
    return any(fnmatchcase(fqn, pattern) for fqn in fqns)


def listed(names: Iterable[str]) -> str:
    """Return ``'a', 'b' and 'c'``."""
    return " and ".join(", ".join(map(repr, names)).rsplit(", ", 1))


def shortened(names: Sequence[str], most: int = 8) -> str:
    """Return the first of ``names``, and how many there are if these are not all."""
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def meant(value: Any, names: Iterable[str]) -> str:
    """Return which of ``names`` may be meant by ``value``, as a clause, empty if none is near."""
    near = difflib.get_close_matches(str(value), list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else "."


def check_rules(value: Any) -> dict[str, Keep | Recompute | PresetName | None]:
    """Return ``value`` as a mapping from patterns to a ``Keep``, the name of a preset, or ``None``."""
    example = 'HINT: such as {"head": None, "blocks.*.fc1": Keep(bits=4), "type:norm": Keep(bits=4)}.'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"`rules` must be a mapping from patterns to Keep or None, got {value!r} of type {type(value).__name__}. "
            f"{example}"
        )
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"`rules` must have patterns as its keys, got {pattern!r}. {example}")
        operator = pattern.removeprefix(TYPE)
        if pattern.startswith(TYPE) and operator not in get_args(Operator):
            raise ValueError(
                f"`rules` pattern {pattern!r} names no operator{meant(operator, get_args(Operator))} HINT: the "
                f"operators are {listed(get_args(Operator))}."
            )
    rules = {pattern: _check_rule(rule, f"rules[{pattern!r}]", example) for pattern, rule in value.items()}
    for pattern, rule in rules.items():
        if isinstance(rule, Recompute) and pattern.startswith((TYPE, OPERATION)):
            raise ValueError(
                f"`rules[{pattern!r}]` must be a Keep or None, got {value[pattern]!r}. HINT: modules that run again "
                'are named, as {"blocks.*": Recompute(bits=8)}; the outermost ones that match do.'
            )
        if pattern.startswith(OPERATION) and rule is not None and not (isinstance(rule, Keep) and rule.bits):
            raise ValueError(
                f"`rules[{pattern!r}]` must be a Keep with `bits`, or None, got {value[pattern]!r}. HINT: such as "
                "Keep(bits=8); None leaves what the operation saves as it is."
            )
        if pattern.startswith((TYPE, OPERATION)):
            _check_drops(pattern, rule, [pattern.removeprefix(TYPE)])
    return rules


def _check_drops(pattern: str, rule: Rule, operators: Sequence[Operator | str]) -> None:
    """Raise ``ValueError`` if a rule names a sparsity, and counts only for operators that drop no blocks."""
    if isinstance(rule, Keep) and "sparsity" in rule.explicit and rule.sparsity and not drops_blocks(operators):
        shown = ", ".join(dict.fromkeys(operators))
        raise ValueError(
            f"`rules[{pattern!r}]` has a `sparsity`, and {shown} cannot drop blocks, got {rule!r}. HINT: only linear "
            "layers and convolutions can; name the bits of others, as in Keep(bits=4)."
        )


def _check_rule(value: Any, name: str, example: str) -> Keep | Recompute | PresetName | None:
    if value is None or isinstance(value, Keep | Recompute):
        return value
    if isinstance(value, str):
        if value == "dense":
            return None
        if value in get_args(PresetName):
            return value  # type: ignore[return-value]
        known = ("dense", *get_args(PresetName))
        raise ValueError(f"`{name}` must be one of {listed(known)}, got {value!r}{meant(value, known)} {example}")
    if isinstance(value, Mapping) and list(value) == ["recompute"]:
        try:
            return Recompute(value["recompute"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{name}`: {error}") from error
    if not isinstance(value, Mapping) or not all(key in KEEP_FIELDS for key in value):
        unknown = next((key for key in value if key not in KEEP_FIELDS), None) if isinstance(value, Mapping) else None
        near = "." if unknown is None else f": {unknown!r} is none of them{meant(unknown, KEEP_FIELDS)}"
        raise TypeError(
            f"`{name}` must be a Keep, a mapping of some of {listed(KEEP_FIELDS)}, the name of a preset, 'dense' or "
            f"None, got {value!r}{near} {example}"
        )
    try:
        return Keep(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{name}`: {error}") from error


def check_preset(value: Any) -> PresetName | None:
    """Return ``value`` if it names a preset, or is ``None``."""
    if value is not None and (not isinstance(value, str) or value not in PRESETS):
        raise ValueError(
            f"`preset` must be one of {listed(PRESETS)} or None, got {value!r}{meant(value, PRESETS)} HINT: 'paper' "
            "drops blocks as the paper does, 'balanced' quantizes to four bits, 'max' saves most without running "
            "anything again, 'recompute' runs blocks again; a sparsity is an argument of its own, `sparsity=0.6`."
        )
    return value
