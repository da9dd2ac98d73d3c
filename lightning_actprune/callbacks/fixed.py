"""Arguments that a callback has drawn its conclusions from: to change one later would change nothing."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override


class FixedArguments:
    """Refuses to change the public attributes that are there when ``_fix`` is called, but ``verbose``."""

    _fixed: frozenset[str] = frozenset()

    def _fix(self) -> None:
        """Refuse changes from now on; Lightning gives callbacks attributes of its own later."""
        self._fixed = frozenset(name for name in vars(self) if not name.startswith("_") and name != "verbose")

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed:
            raise MisconfigurationException(
                f"`{name}` of {type(self).__name__} cannot be changed once it is made, got {value!r} in place of "
                f"{getattr(self, name)!r}. HINT: make a new one for the next Trainer."
            )
        super().__setattr__(name, value)
