"""Who retains which storage, for those who must not store it a second time."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef


class StorageKey(StorageWeakRef):
    """A weak reference to a storage that is its own copy: each copy of torch's own frees what it refers to again."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> StorageKey:
        return self


class Retainers:
    """Who retains which storage: asked before something is packed in its place, and when it is judged what that saved.

    A storage is known by its address, which a weak reference to it keeps from being used again. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, weakref.ref[Any] | None]]] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._storages

    def add(self, storage: StorageWeakRef, name: Any, retainer: Any = None) -> None:
        """Note that ``retainer`` retains ``storage`` for as long as it lives, or somebody by that name for good."""
        address: int = storage.cdata
        known = self._storages.setdefault(address, (storage, {}))[1]
        known[name] = None if retainer is None else weakref.ref(retainer, partial(self._forget, address, name))

    def find(self, address: int, name: Any) -> Any:
        """Return who retains the storage by that name, ``None`` if nobody."""
        known = self._storages.get(address)
        reference = None if known is None else known[1].get(name)
        return None if reference is None else reference()

    def all_of(self, address: int) -> list[Any]:
        """Return all who retain the storage and are still alive."""
        known = self._storages.get(address)
        references = () if known is None else tuple(known[1].values())
        found = (None if reference is None else reference() for reference in references)
        return [retainer for retainer in found if retainer is not None]

    def first_name(self, address: int) -> Any:
        """Return the name of who came first of those that retain the storage."""
        return next(iter(self._storages[address][1]))

    def copy(self) -> Retainers:
        """Return the same for trying what would be, for those that are here for good."""
        made = Retainers()
        made._storages = {address: (storage, dict(names)) for address, (storage, names) in self._storages.items()}
        return made

    def _forget(self, address: int, name: Any, reference: weakref.ref[Any]) -> None:
        """Remove the entry of what is gone, unless something else has taken its place."""
        known = self._storages.get(address)
        if known is not None and known[1].get(name) is reference:
            del known[1][name]
            if not known[1]:
                del self._storages[address]
