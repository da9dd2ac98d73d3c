"""A LightningModule with a layer of each operator, a loader that can be resumed, and what fits must not leave open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_actprune.analysis import first_batch, recorder
from lightning_actprune.codec.dispatch import simulated_gpu
from lightning_actprune.compiled.decision_log import open_logs
from lightning_actprune.operators.attention import watchers

BATCHES = 4
TOKENS, FEATURES = 80, 256


class Batches:
    """A loader that goes on where it was when a checkpoint was saved."""

    def __init__(self) -> None:
        self.seen = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.seen % BATCHES, BATCHES):
            self.seen = number + 1
            yield torch.stack([sample(4 * number + place) for place in range(4)])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def sample(number: int) -> Tensor:
    x = torch.randn(TOKENS, FEATURES, generator=torch.Generator().manual_seed(number))
    x[0, 0] += 1e4 * (number == 0)  # an outlier in the first batch, by which hooks decide for good
    return x


class Scaled(nn.Module):
    """Is no layer that is known: saved-tensor hooks keep its input."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Everything(pl.LightningModule):
    """Has a layer of each operator, and what the saved-tensor hooks pack.

    Of its layers, ``first`` reads the batch, and ``late`` what a square saves after it has packed it; the input of
    ``spread`` has its energy in no particular block.
    """

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lr = 0.01
        self.first, self.act, self.late = nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, FEATURES)
        self.spread = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(dropout))
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.convolution = nn.Sequential(nn.Conv1d(TOKENS, 64, 3, padding=1), nn.BatchNorm1d(64), nn.SiLU())
        self.scaled, self.shifted = Scaled(), Scaled()
        self.head = nn.Linear(64, 8)

    def forward(self, batch: Tensor) -> Tensor:
        h = self.act(self.first(batch))
        y = self.scaled(self.late(h)) + self.shifted(self.late.bias + batch)
        z = self.spread(y)
        z = z + self.attention(z, z, z, need_weights=False)[0]
        return self.head(self.convolution(z)).square().mean() + h.square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        return Batches()

    val_dataloader = train_dataloader


def assert_nothing_open() -> None:
    """Assert that no hooks, modes, recorders, passes or listeners are open in this thread."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.overrides._get_current_function_mode() is None
    assert torch._dynamo.eval_frame._stance.stance == "default"
    shared = first_batch._watching, recorder._saving, recorder.eager_stance
    assert [context._users for context in shared] == [0, 0, 0]
    assert recorder._open.recorders == recorder.unpack_listeners == watchers == []
    assert not first_batch._dense_for_now
    assert simulated_gpu() is None
    assert open_logs() == ()
    assert torch.is_grad_enabled()
