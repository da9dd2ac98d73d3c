"""What stands in for CUDA graphs on CPUs: all kernels that a run calls, which are called again on the same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_actprune.codec.private import storage_uses
from lightning_actprune.operators.containers import tensors_in

_WRAPPED = storage_uses(torch.empty(1)) - 1


class Tape(TorchDispatchMode):
    """Records kernels and how often it holds which storage; as in a graph, what Python decides stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.aliases, self.allocated = list[tuple[Any, ...]](), Counter[int](), dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = tree_map_only(Tensor, self._alias, (args, kwargs or {}))
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty_like.default:  # of inputs, which are written to by then
            return results.zero_()
        new = {key for y in tensors_in(results) if (key := y.untyped_storage()._cdata) not in self.aliases}
        outputs = [self._alias(y) for y in tensors_in(results)]
        self.allocated.update((key, y) for y in outputs if (key := y.untyped_storage()._cdata) in new)
        self.kernels.append((func, *own, outputs))
        return results

    def _alias(self, x: Tensor) -> Tensor:
        self.aliases[x.untyped_storage()._cdata] += 1
        return x.data


class TapeRecorder:
    """A recorder whose pairs of tapes share memory, as graphs do: each overwrites what others have left there."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """See ``lightning_actprune.replay.graph.Recorder``."""
        number = len(self.tapes)
        place = number // 2 * 2
        with Tape() as tape:
            results = run()
        self.tapes.append(tape)

        @torch.no_grad()
        @torch.autocast("cpu", enabled=False)
        def replay(kernels: Any = tape.kernels) -> None:
            for other in range(0, len(self.tapes), 2):
                # Forward writes where backward has memory for the first time.
                pair = self.tapes[other : other + 2] if other != place else self.tapes[number + 1 : place + 2]
                aliases = sum((each.aliases for each in pair), Counter())
                for key, y in (item for each in pair for item in each.allocated.items()):
                    # What was captured later may lie in memory that was free when this was captured.
                    is_free = other >= place or storage_uses(y) <= aliases[key] + _WRAPPED
                    if y.is_floating_point() and is_free:
                        y.fill_(torch.nan)
            for func, args, kwargs, outputs in kernels:
                for mine, y in zip(outputs, tensors_in(func(*args, **kwargs)), strict=True):
                    if mine.data_ptr() != y.data_ptr() and mine.numel():
                        mine.copy_(y)

        replay(())  # a capture overwrites, too
        return replay, results
