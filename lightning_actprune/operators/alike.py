"""Which classes of other packages compute what a known one does: those whose forward is the same code.

Libraries copy whole classes: transformers has some 140 norms and as many MLPs whose forward is, word for word, that of
``LlamaRMSNorm`` or ``LlamaMLP``, others with each release, and the models that people write themselves begin with them.
No list of their names stays complete, or right. So their forward is compared with that of the class that a mixin was
written for, as it is installed: what Python has compiled of both, which is the source without its layout, comments and
annotations. It is what runs, whatever has become of the file since.

The same code computes the same only where its names mean the same. What the code names as a global, and what the class
has by any of its names (a helper method, a property, a constant), must be the very same object as the known class has,
or missing from both; then layers hold it themselves, as they do their weights. The class must leave calls and
attributes to ``nn.Module``. A forward with a closure or with default arguments is not known, nor one that is inherited,
wrapped, or not a function of Python.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import FunctionType
from typing import Any, TypeGuard

from torch import nn

_BY_MODULE = (
    *("__call__", "__getattr__", "__getattribute__", "__setattr__", "__init_subclass__"),
    *("_call_impl", "_wrapped_call_impl"),
)
"""What would change what a call does, or what can be done to a layer and its class."""
_ARGUMENTS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def computes_alike(cls: type[nn.Module], known: type[nn.Module]) -> bool:
    """Return whether the forward of ``cls`` itself is the code of that of ``known``, and means the same."""
    ours, theirs = vars(cls).get("forward"), vars(known).get("forward")
    if not _is_plain(ours) or not _is_plain(theirs) or _code(ours) != _code(theirs) or type(cls) is not type(known):
        return False
    names = theirs.__code__.co_names
    return all(ours.__globals__.get(name) is theirs.__globals__.get(name) for name in names) and all(
        inspect.getattr_static(cls, name, None) is inspect.getattr_static(known, name, None)
        for name in (*names, *_BY_MODULE)
    )


def names_in_forward(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names of globals and attributes in the forward of ``cls`` itself, none if it has none."""
    forward = vars(cls).get("forward")
    return frozenset(forward.__code__.co_names) if isinstance(forward, FunctionType) else frozenset()


def in_use(module: str) -> bool:
    """Return whether a package is imported, so that no other of its modules is a burden."""
    return module in sys.modules or module.partition(".")[0] in sys.modules


def installed(module: str, name: str) -> type[nn.Module] | None:
    """Return a class as its package has defined it, ``None`` if that has not.

    Who replaces forwards in other packages, as libraries of faster kernels do, replaces what was known of them.
    """
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception:  # whatever a package of another version, or half of one, raises
        return None
    if not isinstance(found, type) or (found.__module__, found.__qualname__) != (module, name):
        return None
    forward = vars(found).get("forward")
    return found if getattr(forward, "__module__", None) == module else None


def _is_plain(forward: Any) -> TypeGuard[FunctionType]:
    """Return whether ``forward`` is a function that has nothing but its code."""
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return False
    return forward.__closure__ is None and forward.__defaults__ is None and forward.__kwdefaults__ is None


def _code(forward: FunctionType) -> tuple[Any, ...]:
    """Return what Python has compiled of a forward, without where it stands."""
    code = forward.__code__
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _ARGUMENTS
    # Equal constants may differ: 1, 1.0 and True. Their text tells.
    return code.co_code, code.co_names, code.co_varnames, repr(code.co_consts), *counts
