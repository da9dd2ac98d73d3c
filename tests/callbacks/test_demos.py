"""Lightning's own demonstration models: every hook runs as without ours, and checkpoints go both ways."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.transformer import LightningTransformer
from lightning.pytorch.demos.transformer import Transformer as DemoTransformer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, TensorDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep
from tests.support.helpers import all_traces, fit

WORDS = 40
OWN_HOOKS = "forward training_step validation_step backward manual_backward configure_callbacks configure_optimizers"
OWN_HOOKS += " configure_gradient_clipping optimizer_step optimizer_zero_grad lr_scheduler_step"
GIVEN = ("_dataloader", "training_step", "validation_step", "test_step", "predict_step")


class Transformer(LightningTransformer):
    """On random words, since the text would be downloaded."""

    def __init__(self) -> None:
        super().__init__(vocab_size=WORDS)
        self.model = DemoTransformer(WORDS, ninp=64, nhead=2, nhid=64, nlayers=1)  # not 1.3 million parameters

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*torch.randint(WORDS, (2, 6, 8))), batch_size=2)


def recorded(demo: type[pl.LightningModule], calls: list[str]) -> pl.LightningModule:
    """Return a model that notes every hook that Lightning calls, trained by an optimizer that has a state."""

    def noting(hook: Any) -> Any:
        def note(*args: Any, **kwargs: Any) -> Any:  # not "wraps", behind which Lightning finds its own
            calls.append(hook.__name__)
            return hook(*args, **kwargs)

        return note

    def configure_optimizers(self: pl.LightningModule) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    adam = type(demo.__name__, (demo,), {"configure_optimizers": configure_optimizers})
    hooks = [name for kind in (ModelHooks, DataHooks, CheckpointHooks) for name, f in vars(kind).items() if callable(f)]
    names = [n for n in (*hooks, *OWN_HOOKS.split()) if not n.startswith("_") and n != "configure_sharded_model"]
    # What gives data or runs a step is taken to be there if it is overridden.
    names = [name for name in names if not name.endswith(GIVEN) or is_overridden(name, adam())]
    torch.manual_seed(0)
    return type(demo.__name__, (adam,), {name: noting(getattr(adam, name)) for name in names})()


@pytest.mark.parametrize(
    ("demo", "data"), [(BoringModel, BoringDataModule), (ManualOptimBoringModel, None), (Transformer, None)]
)
def test_every_hook_is_called_as_without_ours_and_parameters_move(demo, data):
    both: list[list[str]] = [[], []]
    dense, model = (recorded(demo, calls) for calls in both)
    initial = [p.detach().clone() for p in model.parameters()]
    # The one layer of the boring model reads the batch itself, which is alive anyway, and has 32 features.
    rules = {"type:linear": Keep(sparsity=0.6, block_size=8), "*": None}
    pruning = ActivationPruning(rules=rules, skip_retained=False, verbose=0)
    callbacks = pruning, ActivationMemoryMonitor(1, verbose=0)
    for each, own in ((dense, []), (model, callbacks)):
        torch.manual_seed(2)
        fit(each, *own, data=data and data(), limit_train_batches=3, limit_val_batches=2)
    assert both[0] == both[1]
    assert {"configure_model", "on_before_optimizer_step", "on_train_epoch_end", "teardown"} <= {*both[0]}
    assert pruning.converted != []
    assert callbacks[1].report.stored_bytes > 0
    assert all_traces(model) == all_traces(dense)
    assert not any(map(torch.equal, initial, model.parameters()))
