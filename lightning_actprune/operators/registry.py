"""Which modules are known, what they become, and how they are found in a model.

Only exact types are converted: a subclass may do anything in its forward. Classes of other packages are known by module
and name, so that nothing is imported for them, and those of some that are copied a lot by the code of their forward
(``operators.alike``). What such a class becomes is derived from it when it is met first: a mixin that replaces its
forward comes first among the bases, so a converted layer stays an instance of its class. A pickled one is found again
by the name of what it became, in this module.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.config import Operator
from lightning_actprune.operators import (
    activation,
    alike,
    attention,
    channel_norm,
    convolution,
    gated,
    linear,
    norm,
)
from lightning_actprune.operators.base import CompressedLayer

_FILES: tuple[Any, ...] = (
    linear,
    attention,
    convolution,
    activation,
    gated,
    norm,
    channel_norm,
)
CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    dense: made for operators in _FILES for dense, made in getattr(operators, "CLASSES", {}).items()
}
"""What a layer of exactly this class becomes."""
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {
    name: mixin for operators in _FILES for name, mixin in getattr(operators, "FOREIGN", {}).items()
}
"""Of each class of other packages, by module and name, the mixin that replaces its forward."""
LEFT_DENSE: dict[type[nn.Module], tuple[Operator, str]] = channel_norm.LEFT_DENSE
"""What classes are that stay as they are, and why."""
WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")
"""What wrappers put into names."""
ROOT = "(root)"
"""Name of the model itself, for rules, errors and tables alike: it has none."""

_derived: dict[type[nn.Module], type[CompressedLayer]] = {}
_copies: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, type[CompressedLayer] | None]]
_copies = weakref.WeakKeyDictionary()
"""What was found of classes by the code of their forward, which may be replaced."""


def compressed_class(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return what a layer of exactly this class becomes, ``None`` if its forward is not known."""
    found = CLASSES.get(cls)
    if found is not None:
        return found
    mixin = FOREIGN.get((cls.__module__, cls.__qualname__)) or _mixin_of_copy(cls)
    if mixin is None:
        return None
    found = _derived.get(cls)
    if found is not None:
        return found
    namespace = {
        "__module__": __name__,
        "__qualname__": _PREFIX + f"{cls.__module__}.{cls.__qualname__}".replace(".", _DOT),
        "__doc__": f"``{cls.__name__}`` that keeps what backward needs compressed; made by ``convert``.",
        "dense_class": cls,
    }
    return _derived.setdefault(cls, type(f"Compressed{cls.__name__}", (mixin, cls), namespace))


def enter_in_tables(made: type[CompressedLayer]) -> None:
    """Let other packages that were imported do with a class what they do with its dense one."""
    for module, name in _TABLES:
        owner, _, attribute = name.rpartition(".")
        found = sys.modules.get(module)
        table = getattr(getattr(found, owner, None) if owner else found, attribute, {})
        if made.dense_class in table:
            table.setdefault(made, table[made.dense_class])


_TABLES = (
    ("captum.attr._core.deep_lift", "SUPPORTED_NON_LINEAR"),
    ("opacus.grad_sample.grad_sample_module", "GradSampleModule.GRAD_SAMPLERS"),
)
"""Module and name of tables of other packages by ``type(module)`` that go on without an error where it is not found."""


def _mixin_of_copy(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return the mixin of a known class that computes what ``cls`` does, ``None`` without one."""
    forward = vars(cls).get("forward")
    known = _copies.get(cls)
    if known is not None and known[0] is forward:
        return known[1]
    names, found = alike.names_in_forward(cls), None
    for original, mixin in FOREIGN.items():
        # Nothing is imported for a class that does not read what the original does.
        if mixin.reads and names.issuperset(mixin.reads):
            if not alike.in_use(original[0]):  # yet
                return None
            dense = alike.installed(*original)
            if dense is not None and alike.computes_alike(cls, dense) and not _shadows(mixin, cls):
                found = mixin
    _copies[cls] = forward, found
    return found


def _shadows(mixin: type[CompressedLayer], cls: type[nn.Module]) -> bool:
    """Return whether ``cls`` has something by a name that ``mixin`` has for something else."""
    ours = {name for base in mixin.__mro__ if issubclass(base, CompressedLayer) for name in vars(base)}
    theirs = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    return any(not name.startswith("__") for name in ours & theirs - {"forward", "extra_repr"})


def known_class(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return what is known of ``cls``, also of a subclass of a known one or of a compressed one."""
    if issubclass(cls, CompressedLayer):
        return cls
    return next(filter(None, map(compressed_class, cls.__mro__)), None)


def operator_of(module: nn.Module) -> Operator | None:
    """Return what kind of operator ``module`` is, also as a subclass of a known one, ``None`` if none of them."""
    if type(module) in LEFT_DENSE:
        return LEFT_DENSE[type(module)][0]
    if convolution.is_transposed(module):
        return "convolution"
    known = known_class(type(module))
    return None if known is None else known.operator_of(module)


def layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """Yield every layer that is known once, with all its fully qualified names (wrapper prefixes removed)."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if operator_of(module) is not None:
            names.setdefault(module, []).append(plain_name(fqn))
    for layer, fqns in names.items():
        yield fqns, layer


def plain_name(fqn: str) -> str:
    """Return a fully qualified name without what wrappers put into it; ``ROOT`` if nothing else is left."""
    return WRAPPERS.sub("", fqn).removeprefix(".") or ROOT


def weights_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the weights of a linear layer as ``[OUT, IN]``: one, or those of query, key and value by themselves.

    Of a convolution, its weight as it is; of other layers, their parameters.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return attention.projection_weights(layer)
    if _is_conv1d(layer):
        return (layer.weight.t(),)  # type: ignore[operator]
    if operator_of(layer) in ("linear", "convolution"):
        return (layer.weight,)  # type: ignore[return-value]
    return tuple(layer.parameters(recurse=False))


def weight_of_call(module: nn.Module) -> Tensor | None:
    """Return the parameter by which a call of ``module`` multiplies its input, ``None`` if it is no linear layer.

    ``None`` for attention too, whose projections are no module calls. A convolution counts as long as it is compressed.
    Of a weight that ``parametrize`` computes whenever somebody asks, it is the parameter behind it.
    """
    if not (isinstance(module, (nn.Linear, convolution.CompressedConvolution)) or _is_conv1d(module)):
        return None
    if is_parametrized(module, "weight"):
        return next(module.parametrizations["weight"].parameters(), None)  # type: ignore[index, union-attr]
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def as_cut(layer: nn.Module, x: Tensor) -> Tensor:
    """Return an input of ``layer`` with the dimensions from which it cuts blocks: a convolution has rows of its own."""
    if isinstance(layer, convolution.CompressedConvolution) and x.layout == torch.strided:
        return layer.rows(x)
    return x


def _is_conv1d(module: nn.Module) -> bool:
    known = known_class(type(module))
    return known is not None and issubclass(known, linear.CompressedConv1D)


_PREFIX, _DOT = "Compressed__", "__dot__"
"""Of the names of derived classes, which have to be without dots to be found in this module."""


def __getattr__(name: str) -> Any:
    """Return the derived class of that name: of another package's class in a model that is unpickled."""
    if name.startswith(_PREFIX):
        dense = name.removeprefix(_PREFIX).replace(_DOT, ".")
        found = compressed_class(pkgutil.resolve_name(dense))
        if found is not None:
            return found
        raise ValueError(
            f"A pickled layer was made of {dense}, whose forward is not known as that package is installed here. "
            "HINT: install the version that it was pickled with, or `revert` the model before it is pickled."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
