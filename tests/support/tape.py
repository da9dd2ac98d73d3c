"""What stands in for CUDA graphs on CPUs: all kernels that a run calls, which are called again on the same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_actprune.codec.private import storage_uses


class Tape(TorchDispatchMode):
    """Records kernels; as in a graph, what Python decides and what its numbers are stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[tuple[Any, ...]] = []
        self.aliases = Counter[int]()
        """How many tensors of the tape are in each storage."""
        self.made: dict[int, Tensor] = {}
        """Tensors in storages that were allocated in here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = tree_map_only(Tensor, self._alias, (args, kwargs or {}))
        before = set(self.aliases)
        results = func(*args, **(kwargs or {}))
        found = [self._alias(y) for y in tree_leaves(results) if isinstance(y, Tensor)]
        self.made.update((key, y) for y in found if (key := _storage(y)) not in before)
        self._kernels.append((func, *own, found))
        return results

    def _alias(self, x: Tensor) -> Tensor:
        self.aliases[_storage(x)] += 1
        return x.data

    def replay(self) -> None:
        """Call all kernels again."""
        with torch.no_grad():
            for func, args, kwargs, found in self._kernels:
                results = [y for y in tree_leaves(func(*args, **kwargs)) if isinstance(y, Tensor)]
                for mine, y in zip(found, results, strict=True):
                    if mine.data_ptr() != y.data_ptr() and mine.numel():
                        mine.copy_(y)


class TapeRecorder:
    """A recorder whose pairs of tapes share memory, as graphs do: each overwrites what others have left there."""

    def __init__(self) -> None:
        self._tapes: list[Tape] = []

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``lightning_actprune.replay.Recorder``."""
        number = len(self._tapes) // 2
        with Tape() as tape:
            results = run()
        self._tapes.append(tape)
        self._overwrite(number)

        def replay() -> None:
            self._overwrite(number)
            tape.replay()

        return replay, results

    def _overwrite(self, number: int) -> None:
        """Overwrite what pairs of tapes other than this one have kept for themselves."""
        for other in range(0, len(self._tapes), 2):
            pair = self._tapes[other : other + 2]
            aliases = sum((tape.aliases for tape in pair), Counter())
            for key, y in ((key, y) for tape in pair if other != 2 * number for key, y in tape.made.items()):
                if y.is_floating_point() and storage_uses(y) <= aliases[key] + _WRAPPED:
                    y.fill_(torch.nan)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


_WRAPPED = storage_uses(torch.empty(1)) - 1
