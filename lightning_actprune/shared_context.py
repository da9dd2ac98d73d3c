"""Contexts that several users of a thread hold open at once, and close in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class SharedContext(threading.local):
    """A context that several users of a thread hold open: entered with the first, left with the last, in any order."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._users = 0
        self._context: AbstractContextManager[Any] | None = None
        self._value: Any = None

    def enter(self) -> Any:
        """Return what the context gave when it was entered."""
        if self._context is None:
            context = self._make()
            self._value = context.__enter__()
            self._context = context
        self._users += 1
        return self._value

    @contextmanager
    def held(self) -> Iterator[Any]:
        """Enter, and leave in the end."""
        value = self.enter()
        try:
            yield value
        finally:
            self.leave()

    def leave(self) -> None:
        """Undo one ``enter``."""
        self._users -= 1
        if self._users == 0 and self._context is not None:
            context, self._context, self._value = self._context, None, None
            context.__exit__(None, None, None)


eager_stance = SharedContext(lambda: torch.compiler.set_stance("force_eager"))
"""Lets compiled modules run eagerly: one for all, since a stance that is left too early leaves the other's behind."""
