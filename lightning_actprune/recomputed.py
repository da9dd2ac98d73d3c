"""Which pruned layers run only inside an activation checkpoint: there pruning saves next to nothing.

Of a checkpointed region only the input is kept. The region runs again when backward gets to it, and what its layers
save then lives until its own backward, which follows at once: pruning lowers that moment's memory, if anything, and
costs gradient quality.

Two kinds of calls that record a graph are told apart:

- *again*: while backward runs. That is how every recomputation shows, whatever makes it: either form of
  ``torch.utils.checkpoint``, the wrappers of FSDP and Hugging Face, the own implementations of other libraries, or a
  reversible block.
- *kept*: before backward, unless the innermost saved-tensor hooks are those with which torch's non-reentrant checkpoint
  drops what is saved. (Reentrant checkpoints record no graph before backward.)

A layer with calls of the first kind alone is reported; one that runs outside of checkpoints too saves memory there. A
forward that the user runs in backward for other ends, such as in a tensor's hook, looks like a recomputation, but is as
a rule not the layer's only call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.following import PrunedCallFollower
from lightning_actprune.hooks import backward_runs, dropped_by_checkpoint
from lightning_actprune.nn.kinds import Layer
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.selection import prunable_layers

__all__ = ["RecomputationProbe"]


class RecomputationProbe(PrunedCallFollower):
    """Find, in one real training step, the pruned layers that run only inside an activation checkpoint.

    Open it around forward and backward: a checkpoint shows in that a layer runs again while backward runs (see the
    module). It uses plain forward hooks, which are gone when the context is left, and does not look at tensors. Layers
    that keep nothing, such as frozen ones, are not reported.

    Args:
        model: The module that ``convert`` was called on.
        eagerly: Whether compiled modules run eagerly in this context, as they do inside ``HolderProbe``. Otherwise
            nothing inside them is seen.

    Example:
        >>> from lightning_actprune import convert
        >>> from torch.utils.checkpoint import checkpoint
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> _ = convert(model, sparsity=0.6)
        >>> with RecomputationProbe(model) as probe:
        ...     x = model[0](torch.randn(16, 64))
        ...     checkpoint(model[1:], x, use_reentrant=False).sum().backward()
        >>> probe.recomputed
        ['2']
    """

    def __init__(self, model: nn.Module, *, eagerly: bool = False) -> None:
        super().__init__(model, eagerly=eagerly)
        self._again: set[Layer] = set()
        self._kept: set[Layer] = set()

    @property
    def recomputed(self) -> list[str]:
        """Names of the layers found so far, in the order of the model."""
        found = self._again - self._kept
        return [fqns[0] for fqns, layer in prunable_layers(self._model) if layer in found]

    def _see(self, layer: Layer, weight: Tensor, x: Any, blocks: BlockSetting) -> None:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return
        if backward_runs():
            self._again.add(layer)
        elif not dropped_by_checkpoint(torch._C._autograd._top_saved_tensors_default_hooks(False)):
            self._kept.add(layer)
