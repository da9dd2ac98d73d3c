"""Models that are optimized by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.helpers import Net


class ByHand(Net):
    """Steps two optimizers in each batch, with backward through Lightning or past it."""

    through_lightning = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.watch(self))
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss) if self.through_lightning else loss.backward()
            self.after_backward()
            optimizer.step()

    def after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.body, self.head)]
