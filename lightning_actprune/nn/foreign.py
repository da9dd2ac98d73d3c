"""Classes of other packages that are converted, known by module and name, so that nothing is imported for them.

What such a class becomes is derived from it when it is met first: a mixin that replaces its forward comes first among
the bases. So a converted layer stays an instance of its class. A pickled one is found again by the name of what it
became, in the module that keeps the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Generic, TypeAlias, TypeVar

from torch import nn

ForeignName: TypeAlias = tuple[str, str]
"""Module and name of a class."""
Mixin = TypeVar("Mixin")


class ForeignClasses(Generic[Mixin]):
    """The classes of other packages of one table, and what they become.

    Args:
        module: Name of the module that keeps the table.
        prefix: What the names of derived classes begin with.
        what: What a derived class does differently, for its docstring.
        mixins: Of each class, the mixin that replaces its forward.
    """

    def __init__(self, module: str, prefix: str, what: str, mixins: Mapping[ForeignName, type[Mixin]]) -> None:
        self._module, self._prefix, self._what, self._mixins = module, prefix, what, mixins
        self._derived: dict[type[nn.Module], type[Mixin]] = {}

    def derived(self, cls: type[nn.Module]) -> type[Mixin] | None:
        """Return what a layer of exactly this class becomes, ``None`` if it is not in the table."""
        if cls in self._derived:
            return self._derived[cls]
        name = cls.__module__, cls.__qualname__
        mixin = self._mixins.get(name)
        if mixin is None:
            return None
        namespace = {
            "__module__": self._module,
            "__qualname__": self._qualified(name),
            "__doc__": f"``{cls.__name__}`` that {self._what}; made by ``convert``.",
            "dense_class": cls,
        }
        return self._derived.setdefault(cls, type(f"{self._prefix}{cls.__name__}", (mixin, cls), namespace))

    def named(self, name: str) -> type[Mixin] | None:
        """Return the derived class of that qualified name: what the ``__getattr__`` of the module returns."""
        for module, foreign in self._mixins:
            if self._qualified((module, foreign)) == name:
                return self.derived(getattr(importlib.import_module(module), foreign))
        return None

    def _qualified(self, name: ForeignName) -> str:
        return f"{self._prefix}_" + "_".join(name).replace(".", "_")
