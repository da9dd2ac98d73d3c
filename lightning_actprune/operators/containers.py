"""Find and change tensors in the arguments, results and attributes of a user's modules, in any container or object."""

from __future__ import annotations

import copy
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.codec.private import tree_map_only


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, dataclasses, and attributes or slots of objects, but not in modules.

    The search ends after ``_MOST_OBJECTS`` objects.
    """
    waiting, seen = deque([value]), {id(value)}
    while waiting:
        each = waiting.popleft()
        if isinstance(each, Tensor):
            yield each
            continue
        for part in _parts(each):
            if id(part) not in seen and len(seen) < _MOST_OBJECTS:
                seen.add(id(part))
                waiting.append(part)


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a container or an object; values without data, such as functions and modules, have none."""
    if value is None or isinstance(value, _NO_DATA):
        return ()
    if isinstance(value, Mapping):
        return tuple(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque, UserList)):
        return tuple(value)
    return [getattr(value, name) for name in _names(value)]


def _names(value: Any) -> list[str]:
    """Return the names of the attributes and the filled slots of an object."""
    slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
    return [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]


_NO_DATA = (bool, int, float, complex, str, bytes, type, nn.Module, ModuleType, FunctionType, MethodType)
_MOST_OBJECTS = 1000


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a copy of ``value`` with ``change`` applied to tensors at any depth of containers and objects.

    Objects that cannot be copied are shared, and so are objects after the first ``_MOST_OBJECTS``.
    """
    return tree_map_only(object, partial(_copy_leaf, change, {}), value)


def _copy_leaf(change: Callable[[Tensor], Any], copies: dict[int, tuple[Any, Any]], leaf: Any) -> Any:
    """Return the copy of an object; ``copies`` has earlier copies and their originals, by ``id`` of the original."""
    if isinstance(leaf, Tensor):
        return change(leaf)
    if leaf is None or isinstance(leaf, (*_NO_DATA, torch.Generator)) or type(leaf).__module__ == "numpy":
        return leaf
    if id(leaf) in copies or len(copies) >= _MOST_OBJECTS:
        return copies.get(id(leaf), (leaf, leaf))[0]
    try:
        duplicate = copy.copy(leaf)
    except Exception:  # an object that cannot be copied may raise anything
        duplicate = leaf
    copies[id(leaf)] = duplicate, leaf
    for name in _names(leaf) if duplicate is not leaf else ():
        value = tree_map_only(object, partial(_copy_leaf, change, copies), getattr(leaf, name))
        object.__setattr__(duplicate, name, value)
    return duplicate
