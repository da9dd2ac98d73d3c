"""What saved-tensor compression leaves as it is because it is small, beside all that a training step keeps.

``SavedTensorCompression`` packs no tensor of few values, since that takes the host as long as a large one. A model that
saves many of them, for its batch is small or its operations many, keeps them in full. With the distinct storages ``k``
that autograd saved, parameters, buffers and the batch aside, the share of these is ::

    sum_{k small} bytes(k) / sum_k bytes(k)

where ``k`` is small if a tensor in it would have been packed with more values, and nothing else that is left as it is
lies in it: with that, its bytes would have stayed whatever the size. Whether its operation may read few bits
(``operators.readers``) is not asked, so this is the most that it can be.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from lightning_actprune.analysis.recorder import Saved, SavedTensorRecorder, storages
from lightning_actprune.operators.saved import SavedTensorCompression


class SmallTensorProbe(SavedTensorRecorder):
    """Find, in one real training forward, what is kept as it is for its few values alone (see the module).

    The step is not disturbed, and nothing is kept alive. Modules inside compiled ones are not seen one by one; what
    their graphs save counts as kept.

    Args:
        model: The module whose step it is.
        compression: What packs the rest.
        batch: Whatever holds the step's input tensors; they are alive anyway and do not count.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        >>> with SavedTensorCompression(model) as compression, SmallTensorProbe(model, compression) as probe:
        ...     loss = model(torch.randn(16, 64)).sum()
        >>> probe.small_bytes  # of the inputs of GELU and norm
        [4096, 4096]
        >>> probe.kept_bytes  # also the input of the linear layer, and the norm's statistics
        12416
    """

    def __init__(self, model: nn.Module, compression: SavedTensorCompression, batch: Any = None) -> None:
        super().__init__(model, batch)
        self.compression = compression
        self._kept: dict[StorageWeakRef, int] = {}
        self._small: set[StorageWeakRef] = set()
        self._stays_anyway: set[StorageWeakRef] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        self.compression.on_unchanged = self._on_unchanged
        return self

    def close(self) -> None:
        """Stop counting; what was counted stays."""
        self.compression.on_unchanged = None
        super().close()

    @property
    def kept_bytes(self) -> int:
        """Bytes of all distinct storages that autograd saved; parameters, buffers and the batch aside."""
        return sum(self._kept.values())

    @property
    def small_bytes(self) -> list[int]:
        """Bytes of each of them that is kept as it is for its few values alone."""
        found = self._small - self._stays_anyway
        return [nbytes for key, nbytes in self._kept.items() if key in found]

    def _on_saved(self, saved: Saved) -> None:
        if saved.key not in self._batch and saved.key not in self._parameters:
            self._kept[saved.key] = saved.nbytes

    def _on_unchanged(self, tensor: Tensor, too_small: bool) -> None:
        keys = {key for key, _ in storages(tensor)}
        (self._small if too_small else self._stays_anyway).update(keys)
