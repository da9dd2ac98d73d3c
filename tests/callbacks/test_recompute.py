"""Fits whose blocks run again in backward: what they learn, what is printed and measured, and what is left."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Recompute
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, new_owner
from lightning_actprune.operators.recompute import RecomputedModule
from tests.support.helpers import FEATURES, Net, assert_plain, loader, trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(FEATURES), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))


class Blocks(Net):
    """Four residual blocks behind a layer, of sequences that are long enough to be stored in few bits."""

    def make(self) -> None:
        self.stem, self.blocks = nn.Linear(FEATURES, FEATURES), nn.ModuleList(Block() for _ in range(4))
        self.head, self.losses = nn.Linear(FEATURES, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def train_dataloader(self):
        return loader(16, 4, tokens=32)


def fit(*callbacks: pl.Callback, **options) -> Blocks:
    pl.seed_everything(0)
    model = Blocks()
    trainer(*callbacks, **options).fit(model)
    return model


def test_a_fit_learns_what_the_dense_one_does(caplog):
    caplog.set_level("INFO")
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    dense, monitor = fit(**options), ActivationMemoryMonitor()
    pruning = ActivationPruning("recompute", rules={"blocks.3": None}, verbose=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = fit(pruning, monitor, **options)
    assert not [str(w.message) for w in caught if "checkpoint" in str(w.message)]
    assert torch.equal(ours.losses[0], dense.losses[0])
    torch.testing.assert_close(torch.stack(ours.losses), torch.stack(dense.losses), rtol=0.01, atol=0.01)
    assert_plain(ours)
    assert not any(isinstance(module, RecomputedModule) for module in ours.modules())
    assert [block.fqn for block in pruning.report.recomputed] == [f"blocks.{n}" for n in range(3)]
    assert monitor.report.saved_fraction > 0.5
    assert "Run again in backward: blocks.* (3 Block, inputs in 8 bits)." in " ".join(caplog.text.split())


def test_exact_inputs_make_it_a_checkpoint():
    rules = {"blocks.*": Recompute(None), "*": None, "type:saved": None}
    dense, ours = fit(), fit(ActivationPruning(rules=rules))
    assert torch.equal(torch.stack(ours.losses), torch.stack(dense.losses))


def test_a_model_without_blocks_is_an_error():
    with pytest.raises(MisconfigurationException, match="no class of blocks that is repeated"):
        trainer(ActivationPruning("recompute")).fit(Net())


def test_blocks_are_converted_again_by_their_owner():
    model, owner = Blocks(), new_owner("fit")
    for _ in range(2):
        report = convert_layers(model, Config("recompute"), owner)
        assert [block.kind for block in report.recomputed] == ["Block"] * 4
        assert all(len(type(block).__mro__) == len(Block.__mro__) + 3 for block in model.blocks)
    report = convert_layers(model, Config("balanced"), owner)
    assert report.recomputed == []
    assert [type(block) for block in model.blocks] == [Block] * 4
