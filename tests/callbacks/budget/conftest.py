"""What all fits with a budget have here: small workspaces, and no step that is simulated twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_actprune.analysis import caching_allocator
from lightning_actprune.callbacks import budget as module
from lightning_actprune.config import Config

_known: dict[Any, Any] = {}
"""Simulated steps by all that they depend on."""


@pytest.fixture(autouse=True, scope="module")
def no_patches() -> Iterator[Callable[[], None]]:
    """Share what simulations of equal models with equal batches find, and let cuBLAS take next to nothing beside them.

    Simulations take longer than all else. What is returned lets a test do without.
    """
    original = module._Simulated.__call__

    def call(self: Any, config: Config | None) -> Any:
        model, trainer = self._model, self._trainer
        methods = [getattr(type(model), name, None) for name in ("training_step", "loss", "configure_optimizers")]
        simple = {name: value for name, value in vars(model).items() if isinstance(value, int | float | str | None)}
        tensors = [(name, t.shape, t.dtype, t.requires_grad) for name, t in model.state_dict(keep_vars=True).items()]
        batch = [(t.shape, t.dtype) for t in self._batch]
        key = repr((methods, simple, tensors, batch, trainer.precision, trainer.accumulate_grad_batches, config))
        if key not in _known:
            _known[key] = original(self, config)
        return _known[key]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(caching_allocator, "WORKSPACE", 512)
        patches.setattr(module._Simulated, "__call__", call)
        yield patches.undo
