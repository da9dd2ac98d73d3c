"""Find the modules of a model that ``convert`` supports, and the compressed class of each.

A module is converted if its exact type is supported; a subclass may do anything in its forward. ``CLASSES`` has torch's
classes. ``FOREIGN`` has classes of other packages by module and name, so that nothing is imported for them. The
compressed class of such a class is derived from it on first use, with a mixin in front that replaces the forward. A
converted layer therefore stays an instance of its own class, and a pickled one finds its derived class by its name in
this module.

No list of names is ever complete: transformers has some 140 copies of ``LlamaRMSNorm`` and as many of ``LlamaMLP``, and
people start their own models from such copies. So a class is also supported if its forward has *the same code* as a
class that a mixin was written for, as installed. Bytecode is compared: it is the source without layout, comments and
annotations, and it is what runs.

The same code computes the same only if its names mean the same. Each global that the code names, and each attribute of
the class by one of its names (a helper method, a property, a constant), must be the very same object in both classes,
or missing from both; then layers themselves hold the attribute, as they hold their weights. Both classes must leave
calls and attributes to ``nn.Module``. A forward is never matched if it has a closure or default arguments, is inherited
or wrapped, or is no Python function.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_actprune.config import Operator
from lightning_actprune.operators import (
    activation,
    attention,
    channel_norm,
    convolution,
    experts,
    gated,
    linear,
    norm,
)
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.recompute import RecomputedModule

_FILES: tuple[Any, ...] = (
    linear,
    attention,
    convolution,
    activation,
    gated,
    experts,
    norm,
    channel_norm,
)
CLASSES: dict[type[nn.Module], type[CompressedLayer]] = {
    dense: compressed for file in _FILES for dense, compressed in getattr(file, "CLASSES", {}).items()
}
"""The compressed class of each supported class of torch."""
FOREIGN: dict[tuple[str, str], type[CompressedLayer]] = {
    name: mixin for file in _FILES for name, mixin in getattr(file, "FOREIGN", {}).items()
}
"""The mixin that replaces the forward of each supported class of another package, by module and name."""
LEFT_DENSE: dict[type[nn.Module], tuple[Operator, str]] = channel_norm.LEFT_DENSE
"""Recognised classes that stay dense: the operator of each, and the reason."""
ROOT = "(root)"
"""Name of the model itself, whose full name is empty, in rules, errors and tables."""

_derived: dict[tuple[type, type[nn.Module]], type[Any]] = {}
"""Derived classes by mixin and dense class."""
_mixins: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, type[CompressedLayer] | None]]
_mixins = weakref.WeakKeyDictionary()
"""By class that was compared with the supported ones: its forward, and the mixin of the class with the same code. The
forward is stored because somebody may replace it later."""


# === Compressed classes ===================================================================================


def find_compressed_class(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return the class that a layer of exactly this class becomes, or ``None`` if it is not supported."""
    if cls in CLASSES:
        return CLASSES[cls]
    name = cls.__module__, cls.__qualname__
    mixin = FOREIGN.get(name) or experts.find_mixin(cls) or _find_mixin_by_code(cls)
    return None if mixin is None else _derive("Compressed", mixin, cls, "keeps what backward needs compressed")


def make_recomputed_class(cls: type[nn.Module]) -> type[Any]:
    """Return the class that a module of exactly this class becomes if it runs again in backward."""
    return _derive("Recomputed", RecomputedModule, cls, "runs again in backward")


def _derive(prefix: str, mixin: type, cls: type[nn.Module], summary: str) -> type[Any]:
    """Return the class derived from ``mixin`` and ``cls``, the same one each time."""
    derived = _derived.get((mixin, cls))
    if derived is not None:
        return derived
    namespace = {
        "__module__": __name__,
        "__qualname__": f"{prefix}__{cls.__module__}.{cls.__qualname__}".replace(".", _DOT),
        "__doc__": f"``{cls.__name__}`` that {summary}; made by ``convert``.",
        "dense_class": cls,
    }
    return _derived.setdefault((mixin, cls), type(f"{prefix}{cls.__name__}", (mixin, cls), namespace))


_DOT = "__dot__"
"""Replaces dots in names of derived classes: pickle takes a name with dots for a nested class."""


def __getattr__(name: str) -> Any:
    """Return the derived class of that name, which pickle looks up in another process."""
    prefix, separator, dense = name.partition("__")
    if not separator or prefix not in ("Compressed", "Recomputed"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    dense = dense.replace(_DOT, ".")
    cls = pkgutil.resolve_name(dense)
    derived = make_recomputed_class(cls) if prefix == "Recomputed" else find_compressed_class(cls)
    if derived is None:
        raise ValueError(
            f"A pickled layer was a converted {dense}, but the forward of this class is not supported as its package "
            "is installed here. HINT: install the version that it was pickled with, or `revert` the model before it is "
            "pickled."
        )
    return derived


def find_known_class(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return ``cls`` if it is compressed, else the compressed class of it or of its first supported base."""
    if issubclass(cls, CompressedLayer):
        return cls
    return next(filter(None, map(find_compressed_class, cls.__mro__)), None)


_TABLES = (
    ("captum.attr._core.deep_lift", "SUPPORTED_NON_LINEAR"),
    ("opacus.grad_sample.grad_sample_module", "GradSampleModule.GRAD_SAMPLERS"),
)
"""Module and name of tables by ``type(module)`` in other packages that skip a missing class without an error."""


def enter_in_tables(compressed: type[CompressedLayer]) -> None:
    """Add a compressed class to the tables of other packages that have its dense class."""
    for module, name in _TABLES:
        owner, _, attribute = name.rpartition(".")
        package = sys.modules.get(module)
        table = getattr(getattr(package, owner, None) if owner else package, attribute, {})
        if compressed.dense_class in table:
            table.setdefault(compressed, table[compressed.dense_class])


# === Classes with the same code as a supported one ========================================================


def _find_mixin_by_code(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return the mixin of the supported class whose forward has the same code as that of ``cls``, or ``None``."""
    forward = vars(cls).get("forward")
    if cls in _mixins and _mixins[cls][0] is forward:
        return _mixins[cls][1]
    names = set(forward.__code__.co_names) if isinstance(forward, FunctionType) else set()
    match = None
    for (module, name), mixin in FOREIGN.items():
        # Cheap tests first: nothing is imported for a class that does not read the attributes that the original reads,
        # and nothing before other code has imported the original's package.
        if not mixin.reads or not names.issuperset(mixin.reads):
            continue
        if module not in sys.modules and module.partition(".")[0] not in sys.modules:
            return None
        original = _import_original(module, name)
        if original is not None and has_same_forward_code(cls, original) and not _has_clashing_names(mixin, cls):
            match = mixin
    _mixins[cls] = forward, match
    return match


def _import_original(module: str, name: str) -> type[nn.Module] | None:
    """Return a class as its package defines it, or ``None`` if it is missing or its forward was replaced.

    Libraries of faster kernels replace forwards in other packages, and such a forward may compute something else.
    """
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except Exception:  # another version of a package, or a broken one, may raise anything
        return None
    if not isinstance(cls, type) or (cls.__module__, cls.__qualname__) != (module, name):
        return None
    return cls if getattr(vars(cls).get("forward"), "__module__", None) == module else None


def has_same_forward_code(cls: type[nn.Module], original: type[nn.Module]) -> bool:
    """Return True if ``cls`` itself defines the forward of ``original``, with the same meaning of all names."""
    ours, theirs = vars(cls).get("forward"), vars(original).get("forward")
    if not _is_plain(ours) or not _is_plain(theirs) or _code_of(ours) != _code_of(theirs):
        return False
    names = theirs.__code__.co_names
    return (
        type(cls) is type(original)
        and all(ours.__globals__.get(name) is theirs.__globals__.get(name) for name in names)
        and all(
            inspect.getattr_static(cls, name, None) is inspect.getattr_static(original, name, None)
            for name in (*names, *_CALLS_AND_ATTRIBUTES)
        )
    )


_CALLS_AND_ATTRIBUTES = (
    *("__call__", "__getattr__", "__getattribute__", "__setattr__", "__init_subclass__"),
    *("_call_impl", "_wrapped_call_impl"),
)
"""Methods that change the effect of a call, or how a layer and its class can be changed."""


def _is_plain(forward: Any) -> TypeGuard[FunctionType]:
    """Return True for a function without closure, default arguments or wrapper."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    return forward.__closure__ is None and forward.__defaults__ is None and forward.__kwdefaults__ is None


def _code_of(forward: FunctionType) -> tuple[Any, ...]:
    """Return the compiled code of a forward without its position in a file, for comparison."""
    code = forward.__code__
    takes_any = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, takes_any
    # The constants 1, 1.0 and True are equal, but their texts are not.
    return code.co_code, code.co_names, code.co_varnames, repr(code.co_consts), *counts


def _has_clashing_names(mixin: type[CompressedLayer], cls: type[nn.Module]) -> bool:
    """Return True if ``cls`` uses a name for something else than ``mixin`` does."""
    ours = {name for base in mixin.__mro__ if issubclass(base, CompressedLayer) for name in vars(base)}
    theirs = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    return any(not name.startswith("__") for name in ours & theirs - {"forward", "extra_repr"})


# === Layers of a model ====================================================================================


def operator_of(module: nn.Module) -> Operator | None:
    """Return the operator of ``module``, or ``None``; a subclass has the operator of its supported base."""
    if type(module) in LEFT_DENSE:
        return LEFT_DENSE[type(module)][0]
    if convolution.is_transposed(module):
        return "convolution"
    cls = find_known_class(type(module))
    return None if cls is None else cls.operator_of(module)


def layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """Yield every layer that has an operator once, with all its full names, without the parts that wrappers add."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if operator_of(module) is not None:
            names.setdefault(module, []).append(plain_name(fqn))
    for layer, fqns in names.items():
        yield fqns, layer


_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


def plain_name(fqn: str) -> str:
    """Return a full name without the parts that wrappers add; ``ROOT`` if nothing is left."""
    return _WRAPPERS.sub("", fqn).removeprefix(".") or ROOT


def weights_of(layer: nn.Module) -> tuple[Tensor, ...]:
    """Return the weights of a layer.

    A linear layer has one, ``[OUT, IN]``, and attention one for each projection of query, key and value. The weight of
    a convolution has its own shape. For other layers these are all parameters.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return attention.projection_weights(layer)
    if _is_conv1d(layer):
        return (layer.weight.t(),)  # type: ignore[operator]
    if operator_of(layer) in ("linear", "convolution"):
        return (layer.weight,)  # type: ignore[return-value]
    return tuple(layer.parameters(recurse=False))


def weight_of_call(module: nn.Module) -> Tensor | None:
    """Return the parameter by which a call of ``module`` multiplies its input, or ``None`` if it is no linear layer.

    A convolution counts while it is compressed. Attention does not, because its projections are no calls of modules. If
    ``parametrize`` computes the weight, it is the first parameter that the weight is computed from.
    """
    if not (isinstance(module, (nn.Linear, convolution.CompressedConvolution)) or _is_conv1d(module)):
        return None
    if is_parametrized(module, "weight"):
        return next(module.parametrizations["weight"].parameters(), None)  # type: ignore[index, union-attr]
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight


def as_cut(layer: nn.Module, x: Tensor) -> Tensor:
    """Return an input of ``layer`` in the shape that is cut into blocks, ``[S, T, L]`` for a convolution."""
    if isinstance(layer, convolution.CompressedConvolution) and x.layout == torch.strided:
        return layer.rows(x)
    return x


def _is_conv1d(module: nn.Module) -> bool:
    """Return True for the linear layer of transformers whose weight is ``[IN, OUT]``."""
    cls = find_known_class(type(module))
    return cls is not None and issubclass(cls, linear.CompressedConv1D)
