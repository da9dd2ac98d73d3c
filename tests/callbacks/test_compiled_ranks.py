"""Compiled models with DDP and ``fully_shard``: packed, and gradients as in eager mode; DDP cuts them into pieces."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning
from lightning_actprune.compiled.report import Row
from tests.support.helpers import trainer
from tests.support.marks import needs_passes
from tests.support.ranks import COMPILER, STEPS, Case, Seen, fit_all

TOKENS = 512  # of 64 values: large enough to be packed in compiled code
CASES = [
    Case(strategy, "32-true", pruning, {}, compiled, TOKENS)
    for strategy in ("ddp", "fsdp2")
    for pruning in (None, {"preset": "max"})
    for compiled in (False, True)
]


def gradient(seen: Seen) -> Tensor:
    """Return that of the second step: the first runs eagerly with the callback, and is the same for all."""
    return torch.cat([grad.flatten() for grad in seen.gradients[1].values()])


@pytest.mark.slow
@needs_passes
def test_compiled_models_in_two_processes(tmp_path):
    found = dict(zip(map(repr, CASES), fit_all(CASES, "cpu", tmp_path), strict=True))
    for case in CASES:
        one, other = found[repr(case)]
        assert one.error is None, one.error
        assert len(one.gradients) == STEPS
        torch.testing.assert_close(one.gradients, other.gradients, rtol=0, atol=0)
        assert one.packed == other.packed
        eager, dense = found[repr(case._replace(compiled=False))][0], found[repr(case._replace(pruning=None))][0]
        assert list(one.state) == list(eager.state)
        assert one.left == dense.left
        if case.pruning is None:
            torch.testing.assert_close(gradient(one), gradient(eager))
        else:
            assert torch.cosine_similarity(gradient(one), gradient(dense), 0) > 0.98
            assert not torch.allclose(gradient(one), gradient(dense), rtol=1e-3)
        assert ("body.*" in one.packed) == (case.pruning is not None and case.compiled)


class Wide(pl.LightningModule):
    """Residual blocks of more parameters than the first bucket of DDP takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)),
                nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)),
            ]
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([torch.randn(4, 64, 512)] * 3, batch_size=None)


def kept(cuts: bool) -> list[Row]:
    """Return what is listed of a model that DDP has compiled, with buckets of 1 MiB for its 4 MiB."""
    torch._dynamo.reset()
    pruning = ActivationPruning("max")
    made = trainer(pruning, strategy=DDPStrategy(bucket_cap_mb=1), max_epochs=2)
    try:
        with torch._dynamo.config.patch(optimize_ddp=cuts):
            made.fit(torch.compile(Wide(), backend=COMPILER))
    finally:
        torch.distributed.destroy_process_group()
    return sorted(pruning.compiled)


@pytest.mark.slow
@needs_passes
def test_what_ddp_cuts_into_pieces_is_kept_as_in_one_piece():
    whole, cut = kept(cuts=False), kept(cuts=True)
    as_it_is = [[row for row in rows if row.how == "as it is"] for rows in (whole, cut)]
    assert as_it_is[0] == as_it_is[1]
    assert len(cut) == len(whole)
    # What is computed again from a value that lies in another piece is packed.
    again = [row.dense_bytes for row in whole if row.how == "again"]
    assert sum(row.stored_bytes for row in cut) < sum(row.stored_bytes for row in whole) + 0.3 * sum(again)
