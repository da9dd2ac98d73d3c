"""What the tests of memory budgets share: budgets of a small model, and fits."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_actprune import ActivationPruning
from lightning_actprune.analysis.allocation import BALANCED, Settings
from lightning_actprune.operators.base import torch_class
from lightning_actprune.operators.recompute import RecomputedModule
from tests.support.helpers import assert_plain, trainer
from tests.support.stack import DEPTH, Stack, layers

MIB = 2**20
AGAIN = [("RecomputedResidual", "Linear")] * DEPTH
DENSE = [("Residual", "Linear")] * DEPTH
PARTS = 4
"""Layers of a block."""
HALF = 0.4463
"""A budget that lets all blocks keep four bits, and none be dense."""
FEW = 0.4171
"""A budget that lets most blocks keep few bits, and the last one four: less than running them again takes."""


def fit(pruning: pl.Callback, model: Stack | None = None, *others: pl.Callback, **options: Any) -> Stack:
    model = Stack() if model is None else model
    ckpt = options.pop("ckpt_path", None)
    trainer(pruning, *others, **options).fit(model, ckpt_path=ckpt)
    assert_restored(model)
    return model


def assert_restored(model: nn.Module) -> None:
    assert_plain(model)
    assert all(torch_class(type(inner)) is type(inner) for inner in model.modules())
    assert not any(isinstance(inner, RecomputedModule) for inner in model.modules())


def chosen(pruning: ActivationPruning) -> int:
    """Return the number of the setting that a fit goes on with, of which the report has the layers."""
    number = pruning.state_dict()["memory_budget"]["number"]
    path = Settings(layers())
    setting = path[number]
    assert len(pruning.report.recomputed) == max(0, DEPTH - number)
    found = [layer.fqn.split(".")[1] for layer in pruning.converted if layer.fqn.endswith(".norm")]
    norms = {BALANCED: DEPTH - setting.changed, BALANCED + 1: 0}  # the last layers of blocks that become dense
    assert len(found) == norms.get(setting.way, min(number, DEPTH))
    return number
