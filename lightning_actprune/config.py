"""How tensors are kept for backward: one settings class, presets of it, and rules.

A ``Keep`` says in how many bits a tensor is kept, and how many of its blocks are dropped. A preset has a ``Keep`` for
each operator that it covers:

``paper``
    The method of arXiv:2311.16883 at its usual setting. Linear layers drop 60 % of the blocks of their input, 32 values
    each, and keep the other blocks unchanged. No other operator is covered.
``balanced``
    Every operator is covered and no block is dropped. Values have 4 bits, 4.5 with the headers of blocks, so they take
    a bit more than a quarter of the memory of 16-bit values. Gradients are exact but for noise of mean zero. Three
    kinds of tensors have 8 bits instead:

    - What operations outside of supported layers save (``saved``), with all that attention saves. Where attention is
      sharp, the gradients of query and key are small differences of products with the value and the result, in which
      errors do not cancel.
    - Smooth activation functions, in models with at least 8 of them and at least 8 batch norms: in such a long chain
      the noise of each one adds up.
    - Inputs of linear layers with fewer than 1024 rows, such as those of a head that reads one token of each sample.
      They cause most of a model's error and take hardly any memory.
``max``
    Every operator is covered. Linear layers have 2 bits, convolutions 3, activation functions 3, norms 4, the value of
    attention 4, and layer scales 2. Affine layers have 3, so that linear layers that read their output need no copy of
    their own. Convolutions have 2 bits in models with at least 8 batch norms and fewer than 8 smooth activation
    functions, such as ResNets. Inputs of few rows, and query, key and result of attention, are kept as by ``balanced``.
    Blocks are dropped only with a ``sparsity``, and only in layers whose dropped blocks hold at most a fifth of the
    energy (sum of squares) of their input in the first batch of a fit (``analysis.first_batch``).
``recompute``
    The blocks of the model, its largest repeated classes of modules (``operators.recompute.find_blocks``), run again in
    backward, from inputs in 8 bits. Layers inside of them stay dense unless a rule says otherwise: what these save is
    there for one block at a time. All other operators have 8 bits, so gradients are nearly exact.

Rules change a preset for some layers. They are one ordered mapping from patterns to a ``Keep``, a ``Recompute``, the
name of a preset, or ``None``. *The first rule that matches a layer applies; ``None`` keeps the layer dense; a layer
that no rule matches is kept as the preset says.* A ``Keep`` changes only the arguments that it names: with ``"max"``,
``Keep(bits=4)`` keeps the inputs of linear layers in 4 bits, and those with few rows still in 8. If the preset does not
cover the operator, the defaults of ``Keep`` apply.

A pattern is one of these:

- A glob on full names, such as ``"blocks.*.fc1"``. The model itself is ``"(root)"``.
- ``"type:"`` and an operator, such as ``"type:norm"``.
- ``"operation:"`` and the name of an operation as the tables of ``ActivationMemoryMonitor`` show it, such as
  ``"operation:sin"``. It is about tensors that the operation saves outside of supported layers. A ``Keep`` with
  ``bits`` quantizes them even if the operation is not known to tolerate that (``codec.saved_ops``); ``None`` leaves
  them unchanged.
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

TopkOver = Literal["sample", "token"]
Selection = Literal["largest", "swap", "unbiased"]
Operator = Literal[
    "linear", "convolution", "activation", "norm", "affine", "scale", "saved", "query", "key", "value", "attention_out"
]
Family = Literal["activation", "norm", "saved", "attention"]
PresetName = Literal["paper", "balanced", "max", "recompute"]
_Class = TypeVar("_Class")

BITS = (2, 3, 4, 8)
"""Bits that a value can be quantized to."""
MIN_QUANTIZED_BLOCK = 8
"""Smallest block of quantized values: in smaller ones, scale and offset take as much memory as the fewer bits save."""
HALF = 16
"""Bits of a ``Recompute`` that rounds its inputs to bfloat16 instead of quantizing them."""
MIN_FEATURES = 64
"""Fewest input features of a linear layer that presets cover; a rule covers smaller layers too. Launches dominate the
time of packing, which is about the same for 16 as for 256 features, so each MiB saved costs 2.7 ms of eager step time
at 16, 1.2 at 48, 0.9 at 64, 0.1 at 768 (H200; ``benchmarks/tune.py features``)."""
SAVED: tuple[Operator, ...] = "saved", "query", "key", "value", "attention_out"
"""Tensors that operations outside of supported layers save. The last four are the inputs and the result of fused
attention, which are kept as ``saved`` says unless a preset or a rule names them."""
FAMILIES: dict[Operator, tuple[Family, ...]] = {
    "activation": ("activation",),
    "norm": ("norm",),
    "affine": ("norm",),
    "scale": ("norm", "saved"),
    **dict.fromkeys(SAVED[1:], ("attention",)),
}
"""Where values of operators are read whose bits ``with_bits`` changes."""
TYPE = "type:"
"""Prefix of a pattern that names an operator."""
OPERATION = "operation:"
"""Prefix of a pattern that names an operation."""


# === Checks of arguments ==================================================================================


def _wrong_argument(name: str, allowed: str, value: Any, hint: str, *, is_type: bool) -> TypeError | ValueError:
    """Return the error to raise for an argument of a wrong type (``is_type``) or out of its range."""
    if is_type:
        return TypeError(f"`{name}` must be {allowed}, got {value!r} of type {type(value).__name__}. HINT: {hint}")
    return ValueError(f"`{name}` must be {allowed}, got {value!r}. HINT: {hint}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_model(value: Any, name: str = "model") -> nn.Module:
    """Return ``value`` if it is a module, else raise ``TypeError``."""
    if not isinstance(value, nn.Module):
        shown = "" if isinstance(value, Mapping) else f"{value!r} "  # a state_dict would print all its tensors
        raise TypeError(
            f"`{name}` must be a torch.nn.Module, got {shown}of type {type(value).__name__}. HINT: pass the network "
            "or the LightningModule, not its class, its layers or its weights (a state_dict)."
        )
    return value


def check_flag(value: Any, name: str) -> bool:
    """Return ``value`` if it is a bool, else raise ``TypeError``: ``"no"`` would count as true."""
    if not isinstance(value, bool):
        raise _wrong_argument(name, "a bool", value, "True or False.", is_type=True)
    return value


def check_count(value: Any, name: str, hint: str, least: int = 0) -> int:
    """Return ``value`` as an int if it is at least ``least``, else raise an error with ``hint``."""
    if not _is_int(value) or value < least:
        raise _wrong_argument(name, f"an int >= {least}", value, hint, is_type=not _is_int(value))
    return int(value)


def check_share(value: Any, name: str) -> float:
    """Return ``value`` as a float if it is a share of a whole, in [0, 1], else raise an error."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0.0 <= float(value) <= 1.0:
        hint = "it is a share of the whole, not a percentage; 0.2 is a fifth."
        raise _wrong_argument(name, "a number in [0, 1]", value, hint, is_type=not is_number)
    return float(value)


def check_bits(value: Any, name: str = "bits") -> int | None:
    """Return ``value`` as an int if it is one of ``BITS``, or ``None``, else raise an error."""
    if value is None:
        return None
    if not _is_int(value) or value not in BITS:
        hint = "4 is nearly exact, 2 saves most, 8 is for inputs of nonlinear operations; None keeps values unchanged."
        raise _wrong_argument(name, "2, 3, 4, 8 or None", value, hint, is_type=not _is_int(value))
    return int(value)


def check_block_size(value: Any, bits: int | None = None) -> int:
    """Return ``value`` as an int if it can be a block size, of quantized values with ``bits``, else raise an error."""
    if not _is_int(value) or value < 1:
        hint = "32 is a good start; 16, 64 and 128 are usual too. A block larger than a row is cut to the row."
        raise _wrong_argument("block_size", "a positive int", value, hint, is_type=not _is_int(value))
    if bits is not None and value < MIN_QUANTIZED_BLOCK:
        hint = "each block has a scale of its own, so 32 is a good start. Without `bits` there are no scales."
        allowed = f"at least {MIN_QUANTIZED_BLOCK} with bits={bits}"
        raise _wrong_argument("block_size", allowed, value, hint, is_type=False)
    return int(value)


def _check_choice(value: Any, name: str, choices: Any, hint: str) -> None:
    """Raise ``ValueError`` if ``value`` is none of the texts of the ``Literal`` type ``choices``."""
    if not isinstance(value, str) or value not in get_args(choices):
        allowed = " or ".join(", ".join(f'"{choice}"' for choice in get_args(choices)).rsplit(", ", 1))
        raise _wrong_argument(name, allowed, value, hint, is_type=False)


# === Settings of a tensor and of a module =================================================================


class KeepArguments(TypedDict, total=False):
    """Arguments of ``Keep`` in a configuration file, where a rule may be a mapping of some of them."""

    bits: int | None
    sparsity: float | SparsitySchedule
    block_size: int
    topk_over: TopkOver
    selection: Selection
    max_dropped_energy: float
    min_rows_for_low_bits: int
    offload: bool


KEEP_FIELDS = tuple(KeepArguments.__annotations__)


def _record_arguments(cls: type[_Class]) -> type[_Class]:
    """Let instances of ``Keep`` record which arguments were passed."""
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


@_record_arguments
@dataclass(frozen=True)
class Keep:
    """How a tensor is kept for backward. In a rule, it changes only the arguments that are passed (see the module).

    Args:
        bits: Bits of each value: 2, 3, 4 or 8. Values are quantized, with a scale for each block and random errors of
            mean zero (``codec.formats``). ``None`` keeps values unchanged.
        sparsity: Fraction of the blocks of each sample that are dropped, in [0, 1), or a schedule of it. Only linear
            layers and convolutions drop blocks. Other layers that a rule matches keep all of theirs, and a rule that
            matches only such layers is an error.
        block_size: Consecutive values of a row that form a block: positive, and at least 8 with ``bits``. A block that
            is larger than a row is cut to the row.
        topk_over: Which blocks compete to be kept: ``"sample"``, all blocks of a sample; ``"token"``, those of a row.
        selection: Which blocks are kept. ``"largest"`` keeps those of the largest norm, as in the paper. ``"swap"`` and
            ``"unbiased"`` choose at random (``codec.blocks``). No effect at sparsity 0.
        max_dropped_energy: Largest share of the energy (sum of squares) of a layer's input that its dropped blocks may
            hold in the first batch of a fit, in [0, 1]. A layer that exceeds it drops nothing; no layer exceeds 1.
        min_rows_for_low_bits: Inputs of linear layers with fewer rows, such as tokens, are kept in 8 bits and drop no
            blocks, since errors of few rows do not cancel. No effect without ``bits``, or with 8.
        offload: Whether packed values wait for backward in the memory of the host (``codec.host_copy``). No effect
            without ``bits``, on a CPU, and in compiled code that drops blocks.
        explicit: Names of arguments that count as passed even if they have their default value. By default, the names
            of all arguments that were passed.

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
    topk_over: TopkOver = "sample"
    selection: Selection = "largest"
    max_dropped_energy: float = 1.0
    min_rows_for_low_bits: int = 0
    offload: bool = False
    explicit: frozenset[str] = field(default=frozenset(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_bits(self.bits))
        if isinstance(self.sparsity, SparsitySchedule):
            sparsity_at(self.sparsity, 0.0)
        else:
            object.__setattr__(self, "sparsity", check_sparsity(self.sparsity))
        object.__setattr__(self, "block_size", check_block_size(self.block_size, self.bits))
        hint = '"sample" lets all blocks of a sample compete (the paper), "token" those of a row, for long sequences.'
        _check_choice(self.topk_over, "topk_over", TopkOver, hint)
        hint = (
            '"largest" keeps the blocks of the largest norm (the paper), "swap" lets those near the threshold change '
            'places at random, "unbiased" draws blocks at random and scales them up, so that their mean is the input.'
        )
        _check_choice(self.selection, "selection", Selection, hint)
        object.__setattr__(self, "max_dropped_energy", check_share(self.max_dropped_energy, "max_dropped_energy"))
        hint = "rows of a linear layer's input, such as 1024; 0 treats all inputs the same."
        object.__setattr__(
            self, "min_rows_for_low_bits", check_count(self.min_rows_for_low_bits, "min_rows_for_low_bits", hint)
        )
        check_flag(self.offload, "offload")

    def __repr__(self) -> str:
        return f"Keep({', '.join(f'{name}={value!r}' for name, value in self.named.items())})"

    @property
    def named(self) -> dict[str, Any]:
        """The arguments that were passed."""
        return {name: getattr(self, name) for name in KEEP_FIELDS if name in self.explicit}

    @property
    def stored_bits(self) -> int:
        """Bits of each stored value, 0 for unchanged values, as the codec and the kernels take them."""
        return self.bits or 0


@dataclass(frozen=True)
class Recompute:
    """Run a module again in backward, from inputs that are stored in few bits (``operators.recompute``).

    Args:
        bits: Bits of each value of its inputs that need a gradient. 2, 3, 4 or 8 quantizes them as ``Keep`` does, 16
            rounds them to bfloat16. ``None`` stores them exactly: that is an activation checkpoint, with exact
            gradients.
        block_size: Consecutive values that share a scale, at least 8.
        offload: Whether the stored inputs wait for backward in the memory of the host (``codec.host_copy``). No effect
            on a CPU, and in compiled code with 16 bits or ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> Recompute(bits=4)
        Recompute(bits=4, block_size=32, offload=False)
    """

    bits: int | None = 8
    block_size: int = 32
    offload: bool = False

    def __post_init__(self) -> None:
        bits = self.bits if self.bits == HALF and not isinstance(self.bits, bool) else check_bits(self.bits)
        object.__setattr__(self, "bits", bits)
        object.__setattr__(self, "block_size", check_block_size(self.block_size, bits or BITS[-1]))
        check_flag(self.offload, "offload")


Rule: TypeAlias = Keep | Recompute | Mapping[str, Any] | str | None
"""A rule: a ``Keep`` or a mapping of its arguments, a ``Recompute`` or ``{"recompute": bits}`` (and ``"offload": True``
beside it, or without), the name of a preset, ``None`` or ``"dense"``."""

# === Presets ==============================================================================================

MANY_LAYERS = 8
"""Batch norms, and smooth activation functions, from which on two presets change (see the module)."""
FINE_ROWS = 1024
"""Rows below which presets keep the input of a linear layer in 8 bits."""
PRESETS: dict[PresetName, dict[Operator, Keep]] = {
    "paper": {"linear": Keep(sparsity=0.6)},
    "balanced": {
        "linear": Keep(bits=4, min_rows_for_low_bits=FINE_ROWS),
        "convolution": Keep(bits=4),
        "activation": Keep(bits=4),
        "norm": Keep(bits=4),
        "affine": Keep(bits=4),
        "scale": Keep(bits=4),
        "saved": Keep(bits=8),
    },
    "max": {
        "linear": Keep(bits=2, max_dropped_energy=0.2, min_rows_for_low_bits=FINE_ROWS),
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


# === Settings of a model ==================================================================================


@dataclass(frozen=True)
class Config:
    """How each layer of a model is kept: a preset, arguments that change it for all layers, and rules.

    Args:
        preset: Name of a preset, by default ``"paper"`` with a ``sparsity`` and ``"balanced"`` without one.
        sparsity: Replaces the preset's, for operators that drop blocks.
        block_size: Replaces the preset's, for all operators.
        rules: Settings of some layers (see the module).
        offload: Whether what the preset keeps waits for backward in the memory of the host (``Keep``, ``Recompute``).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or names a preset or an operator that does not exist.
    """

    preset: PresetName | None = None
    sparsity: float | SparsitySchedule | None = None
    block_size: int | None = None
    rules: Mapping[str, Rule] | None = None
    offload: bool = False
    _base: dict[Operator, Keep] = field(init=False, repr=False)
    _rules: dict[str, Keep | Recompute | PresetName | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = check_preset(self.preset) or ("balanced" if self.sparsity is None else "paper")
        changes: dict[str, Any] = {}
        if self.block_size is not None:
            changes["block_size"] = check_block_size(self.block_size)
        if check_flag(self.offload, "offload"):
            changes["offload"] = True
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
        """Return the settings for a model with these numbers of layers of two kinds (see the module)."""
        if batch_norms < MANY_LAYERS:
            return self
        if self.preset == "balanced" and smooth_activations >= MANY_LAYERS:
            return self.with_bits({"activation": 8})
        if self.preset == "max" and smooth_activations < MANY_LAYERS:
            return self.with_bits({"convolution": 2})
        return self

    def with_bits(self, bits: Mapping[Operator, int]) -> Config:
        """Return the same with other bits for some operators that the preset covers."""
        changed = copy(self)
        more = {operator: replace(self._base[operator], bits=each) for operator, each in bits.items()}
        object.__setattr__(changed, "_base", {**self._base, **more})
        return changed

    def operators_in(self, family: Family, bits: int) -> list[Operator]:
        """Return the operators that keep values of ``family`` in these bits, by the preset and not by a rule."""
        in_family = (each for each, families in FAMILIES.items() if family in families and each in self._base)
        return [each for each in in_family if self.rule_of([""], each) is None and self._base[each].bits == bits]

    def rule_of(self, fqns: Sequence[str], operator: Operator) -> str | None:
        """Return the pattern of the rule that applies to a layer with these names, ``None`` if no rule does.

        Tensors of operations outside of supported layers (``saved``) follow rules by type, and rules of ``None`` by
        name: all other rules by name are about layers.
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

    def is_dense_by_rule(self, fqns: Sequence[str], operator: Operator) -> bool:
        """Return True if a rule, not the lack of one, leaves a layer with these names dense."""
        pattern = self.rule_of(fqns, operator)
        return pattern is not None and self._rules[pattern] is None

    def keep_of(self, fqns: Sequence[str], operator: Operator) -> Keep | None:
        """Return the settings of a layer with these names, ``None`` if it stays dense."""
        pattern = self.rule_of(fqns, operator)
        rule = self._base if pattern is None else self._rules[pattern]
        assert not isinstance(rule, Recompute)
        if rule is None:
            return None
        preset = PRESETS[rule] if isinstance(rule, str) else self._base if isinstance(rule, Keep) else rule
        base = preset.get(operator, preset.get("saved") if operator in SAVED else None)
        if not isinstance(rule, Keep):
            return base
        try:
            explicit = rule.explicit if base is None else rule.explicit | base.explicit
            return replace(base or rule, **rule.named, explicit=explicit)
        except ValueError as error:
            raise ValueError(f"`rules[{pattern!r}]` for {operator!r}: {error}") from error

    def recompute_of(self, fqns: Sequence[str], blocks: Container[str] = ()) -> Recompute | None:
        """Return the settings of a module with these names that runs again in backward, ``None`` if it does not.

        ``blocks`` are the names of modules that run again unless a rule says otherwise.
        """
        for pattern, rule in self._rules.items():
            if isinstance(rule, Recompute | None) and matches(fqns, pattern):
                return rule
        return Recompute(offload=self.offload) if any(fqn in blocks for fqn in fqns) else None

    @property
    def recomputes(self) -> bool:
        """Whether the preset or a rule lets any module run again in backward."""
        return self.preset == "recompute" or any(isinstance(rule, Recompute) for rule in self._rules.values())

    def keep_of_all(self, operator: Operator) -> Keep | None:
        """Return the settings of ``operator`` by the preset and by rules that match any name, ``None`` for dense."""
        return self.keep_of([""], operator)

    def why_dense(self, fqns: Sequence[str], operator: Operator) -> str:
        """Return the reason why a layer stays dense, for which ``keep_of`` returns ``None``."""
        pattern = self.rule_of(fqns, operator)
        if pattern is None:
            return f"preset {self.preset!r} covers {join_names(self._base)} only"
        return f"the rule {pattern!r} keeps it dense"

    @property
    def operations(self) -> dict[str, int | None]:
        """The bits of tensors that some operations save, by the operations that rules name; ``None`` for unchanged."""
        named = ((pattern, rule) for pattern, rule in self._rules.items() if pattern.startswith(OPERATION))
        return {
            pattern.removeprefix(OPERATION): rule.bits if isinstance(rule, Keep) else None for pattern, rule in named
        }

    def names_bits(self, fqns: Sequence[str], operator: Operator) -> bool:
        """Return True if a rule says in how many bits a layer with these names is kept, or that it is dense."""
        pattern = self.rule_of(fqns, operator)
        rule = None if pattern is None else self._rules[pattern]
        return pattern is not None and not (isinstance(rule, Keep) and "bits" not in rule.explicit)

    @property
    def keeps(self) -> list[Keep]:
        """All settings that some layer may have."""
        own = [PRESETS[rule] if isinstance(rule, str) else {"": rule} for rule in self._rules.values()]
        return [keep for preset in (self._base, *own) for keep in preset.values() if isinstance(keep, Keep)]

    def check_that_rules_count(self, layers: Sequence[tuple[Sequence[str], Operator]], modules: Iterable[str]) -> None:
        """Raise ``ValueError`` if a rule applies to nothing, such as one with a typo, or has a sparsity in vain.

        Args:
            layers: All names of each supported layer, and its operator.
            modules: All names of modules, which a ``Recompute`` and a rule of ``None`` may also be about.
        """
        operators_of: dict[str | None, list[Operator]] = {}
        for fqns, operator in layers:
            operators_of.setdefault(self.rule_of(fqns, operator), []).append(operator)
        for pattern, rule in self._rules.items():
            if pattern in operators_of:
                _check_drops(pattern, rule, operators_of[pattern])
        module_names = list(modules)
        for pattern, rule in self._rules.items():
            part = pattern.removeprefix(TYPE) if pattern.startswith(TYPE) else None
            if pattern in operators_of or pattern == "*":
                continue
            if part is not None and (part not in SAVED[1:] or rule is None):
                continue
            if part is not None and self.rule_of([""], part) != pattern:
                raise ValueError(
                    f"`rules` pattern {pattern!r} never counts, since an earlier one is about all that operations "
                    "save. HINT: the first rule that matches applies; put this one before it."
                )
            if pattern.startswith(OPERATION) or part is not None:
                if self.keep_of(["(root)"], "saved") is not None:
                    continue
                raise ValueError(
                    f"`rules` pattern {pattern!r} counts for nothing, since tensors that operations save are not "
                    "covered. HINT: cover them (`rules={\"type:saved\": Keep(bits=8)}`), as the presets 'balanced' and "
                    "'max' do."
                )
            if not isinstance(rule, Recompute) and any(matches(fqns, pattern) for fqns, _ in layers):
                raise ValueError(
                    f"`rules` pattern {pattern!r} never counts, since earlier patterns match all its layers. HINT: the "
                    "first rule that matches a layer applies; put this one before them."
                )
            if isinstance(rule, Recompute | None) and matches(module_names, pattern):
                continue
            names = [fqns[0] for fqns, _ in layers]
            raise ValueError(
                f"`rules` pattern {pattern!r} matches no layer{suggest(pattern, names)} HINT: a pattern matches the "
                f"whole name, or is 'type:' and an operator; the layers are: {shorten(names)}."
            )

    @property
    def attention(self) -> dict[str, int]:
        """The bits of query, key, value and result of fused attention, 0 for unchanged."""
        keeps = {part: self.keep_of_all(part) for part in SAVED[1:]}
        return {part: 0 if keep is None else keep.stored_bits for part, keep in keeps.items()}

    def described(self) -> dict[str, Any]:
        """Return the settings in primitives, for a checkpoint. Rules are a list, since their order matters."""
        return {
            "kept": {operator: repr(keep) for operator, keep in self._base.items()},
            "rules": [[pattern, repr(rule)] for pattern, rule in self._rules.items()],
        }


def drops_blocks(operators: Iterable[str]) -> list[Operator]:
    """Return those of ``operators`` that can drop blocks."""
    return [operator for operator in operators if operator in ("linear", "convolution")]  # type: ignore[misc]


def matches(fqns: Iterable[str], pattern: str) -> bool:
    """Return True if one of a layer's names matches ``pattern``."""
    return any(fnmatchcase(fqn, pattern) for fqn in fqns)


def join_names(names: Iterable[str]) -> str:
    """Return ``'a', 'b' and 'c'``."""
    return " and ".join(", ".join(map(repr, names)).rsplit(", ", 1))


def shorten(names: Sequence[str]) -> str:
    """Return the first eight names, and how many there are if these are not all."""
    return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")


def suggest(value: Any, names: Iterable[str]) -> str:
    """Return the end of a sentence: the one of ``names`` that is most like ``value``, or a full stop if none is."""
    given, known = str(value), list(names)
    near = difflib.get_close_matches(given, known, 1) or [n for n in known if n.startswith(given)]
    return f"; did you mean {near[0]!r}?" if near else "."


# === Checks of rules and presets ==========================================================================


def check_rules(value: Any) -> dict[str, Keep | Recompute | PresetName | None]:
    """Return ``value`` as a mapping from patterns to a ``Keep``, a ``Recompute``, the name of a preset or ``None``."""
    example = 'such as {"head": None, "blocks.*.fc1": Keep(bits=4), "type:norm": Keep(bits=4)}.'
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong_argument("rules", "a mapping from patterns to Keep or None", value, example, is_type=True)
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"`rules` must have patterns as its keys, got {pattern!r}. HINT: {example}")
        operator = pattern.removeprefix(TYPE)
        if pattern.startswith(TYPE) and operator not in get_args(Operator):
            raise ValueError(
                f"`rules` pattern {pattern!r} names no operator{suggest(operator, get_args(Operator))} HINT: the "
                f"operators are {join_names(get_args(Operator))}."
            )
    rules = {pattern: _check_rule(rule, f"rules[{pattern!r}]", example) for pattern, rule in value.items()}
    for pattern, rule in rules.items():
        name = f"rules[{pattern!r}]"
        if isinstance(rule, Recompute) and pattern.startswith((TYPE, OPERATION)):
            hint = (
                "a Recompute needs a pattern on names, such as 'blocks.*'; the outermost modules that match run again."
            )
            raise _wrong_argument(name, "a Keep or None", value[pattern], hint, is_type=False)
        if pattern.startswith(OPERATION) and rule is not None and not (isinstance(rule, Keep) and rule.bits):
            hint = "such as Keep(bits=8); None leaves the tensors that the operation saves unchanged."
            raise _wrong_argument(name, "a Keep with `bits`, or None", value[pattern], hint, is_type=False)
        if pattern.startswith((TYPE, OPERATION)):
            _check_drops(pattern, rule, [pattern.removeprefix(TYPE)])
    return rules


def _check_drops(pattern: str, rule: Rule, operators: Sequence[Operator | str]) -> None:
    """Raise ``ValueError`` if a rule has a sparsity and applies only to operators that drop no blocks."""
    if isinstance(rule, Keep) and "sparsity" in rule.explicit and rule.sparsity and not drops_blocks(operators):
        shown = ", ".join(dict.fromkeys(operators))
        raise ValueError(
            f"`rules[{pattern!r}]` has a `sparsity`, and {shown} cannot drop blocks, got {rule!r}. HINT: only linear "
            "layers and convolutions can; give other operators bits, as in Keep(bits=4)."
        )


def _check_rule(value: Any, name: str, example: str) -> Keep | Recompute | PresetName | None:
    if value is None or isinstance(value, Keep | Recompute):
        return value
    if isinstance(value, str):
        if value == "dense":
            return None
        if value in get_args(PresetName):
            return value  # type: ignore[return-value]
        names = ("dense", *get_args(PresetName))
        raise ValueError(
            f"`{name}` must be one of {join_names(names)}, got {value!r}{suggest(value, names)} HINT: {example}"
        )
    if isinstance(value, Mapping) and "recompute" in value and {*value} <= {"recompute", "offload"}:
        try:
            return Recompute(value["recompute"], offload=value.get("offload", False))
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{name}`: {error}") from error
    if not isinstance(value, Mapping) or not all(key in KEEP_FIELDS for key in value):
        unknown = next((key for key in value if key not in KEEP_FIELDS), None) if isinstance(value, Mapping) else None
        near = "." if unknown is None else f": {unknown!r} is none of them{suggest(unknown, KEEP_FIELDS)}"
        raise TypeError(
            f"`{name}` must be a Keep, a Recompute, a mapping of some of {join_names(KEEP_FIELDS)}, the name of a "
            f"preset, 'dense' or None, got {value!r}{near} HINT: {example}"
        )
    try:
        return Keep(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`{name}`: {error}") from error


def check_preset(value: Any) -> PresetName | None:
    """Return ``value`` if it is the name of a preset or ``None``, else raise ``ValueError``."""
    if value is not None and (not isinstance(value, str) or value not in PRESETS):
        raise ValueError(
            f"`preset` must be one of {join_names(PRESETS)} or None, got {value!r}{suggest(value, PRESETS)} HINT: "
            "'paper' drops blocks as in the paper, 'balanced' quantizes to 4 bits, 'max' saves most without running "
            "anything again, 'recompute' runs blocks again in backward. A sparsity is another argument, `sparsity=0.6`."
        )
    return value
