"""Numbers of numpy are taken wherever plain ones are, become plain ones, and come back from a checkpoint.

Arrays are refused, as are tensors: an argument that is a number or a list says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_actprune import (
    ActivationMemoryMonitor,
    ActivationPruning,
    ActivationSensitivity,
    ConstantSchedule,
    CosineSchedule,
    LayerSettings,
    LinearSchedule,
    StepSchedule,
    convert,
    functional,
    revert,
)
from tests.helpers import BATCHES, Net, sparsities, trainer

HALF, THIRTY_TWO, ONE = np.float32(0.5), np.int64(32), np.int8(1)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 64))


def test_convert_takes_them_and_keeps_plain_numbers():
    own = {"2": LayerSettings(sparsity=np.float16(0.25), block_size=np.uint8(16))}
    rows = []
    for arguments in (
        {"sparsity": {"0": HALF, "*": 0.5}, "block_size": THIRTY_TWO, "min_features": ONE, "exclude_last": ONE}
        | {"layers": own},
        {"sparsity": 0.5, "min_features": 1, "exclude_last": 1}
        | {"layers": {"2": LayerSettings(sparsity=0.25, block_size=16)}},
    ):
        made = model()
        rows.append(convert(made, **arguments).to_rows())
        assert [type(value) for layer in (made[0], made[2]) for value in (layer.sparsity, layer.block_size)] == [
            float,
            int,
        ] * 2
        made[0].sparsity = np.float64(0.75)
        assert (type(made[0].sparsity), made[0].sparsity) == (float, 0.75)
        revert(made)
    assert rows[0] == rows[1]
    assert {type(value) for row in rows[0] for value in row.values()} <= {str, int, float, type(None)}


def test_the_function_takes_them():
    x, weight = torch.randn(4, 64), torch.randn(8, 64, requires_grad=True)
    grads = []
    for sparsity, block_size in ((HALF, np.int64(16)), (0.5, 16)):
        functional.linear(x, weight, sparsity=sparsity, block_size=block_size).sum().backward()
        grads.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_schedules_keep_plain_numbers():
    schedules = (
        ConstantSchedule(HALF),
        LinearSchedule(HALF, np.float64(0.25), warmup=np.float16(0.125), until=np.int64(1)),
        StepSchedule([np.int64(0), HALF], [HALF]),
    )
    assert [repr(schedule) for schedule in schedules] == [
        "ConstantSchedule(sparsity=0.5)",
        "LinearSchedule(end=0.5, start=0.25, warmup=0.125, until=1.0)",
        "StepSchedule(sparsities=[0.0, 0.5], at=[0.5])",
    ]


def callback() -> ActivationPruning:
    own = {"head": LayerSettings(block_size=np.int16(16)), "body.0": LayerSettings(schedule=CosineSchedule(HALF))}
    numbers: dict[str, Any] = {
        "total_steps": np.int64(8),
        "max_dropped_energy": np.float64(1),
        "exclude_first": ONE - 1,
    }
    return ActivationPruning(HALF, THIRTY_TWO, min_features=np.int32(1), layers=own, verbose=False, **numbers)


def test_a_checkpoint_of_the_callback_holds_plain_numbers_and_is_resumed(tmp_path, recwarn):
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    monitor = ActivationMemoryMonitor(np.int64(1), verbose=False)
    whole = Net()
    whole.watch = sparsities
    trainer(callback(), monitor, save, enable_checkpointing=True, max_epochs=2).fit(whole)
    assert [row["step"] for row in monitor.history] == [1, BATCHES + 1]
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["callbacks"]
    [state] = [state for key, state in saved.items() if key.startswith("ActivationPruning")]
    assert {name: (type(state[name]), state[name]) for name in ("sparsity", "block_size", "total_steps")} == {
        "sparsity": (float, 0.5),
        "block_size": (int, 32),
        "total_steps": (int, 8),
    }
    resumed = Net()
    resumed.watch = sparsities
    options: dict[str, Any] = {"ckpt_path": tmp_path / "step=6.ckpt"}
    trainer(callback(), max_epochs=2).fit(resumed, **options)
    assert resumed.seen == whole.seen[6:]
    assert not [w for w in recwarn if "other settings" in str(w.message)]


def test_the_other_callbacks_take_them():
    made = ActivationSensitivity([HALF], ["same"], block_size=THIRTY_TWO, batches=ONE, at_step=ONE, min_cosine=HALF)
    trainer(made).fit(Net())
    assert [row.sparsity for row in made.result.rows] == [0.5] * 3
    assert {type(number) for number in (made.batches, made.at_step, made.min_cosine)} == {int, float}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActivationPruning(np.array([0.5])), r"`sparsity` must be a number in \[0, 1\), got array"),
        (lambda: ActivationPruning(0.5, torch.tensor(32)), r"`block_size` must be a positive int, got tensor"),
        (lambda: ActivationPruning(0.5, THIRTY_TWO / 2), r"`block_size` must be a positive int, got "),
        (
            lambda: ActivationPruning(0.5, include=np.array(["*"])),
            r"`include` must be a glob pattern or a list of them",
        ),
        (lambda: ActivationPruning(0.5, total_steps=np.float64(8)), r"`total_steps` must be a positive int or None"),
        (lambda: ActivationPruning(0.5, total_steps=np.int64(0)), r"`total_steps` must be a positive int or None"),
        (lambda: ActivationMemoryMonitor(np.float32(1)), r"`measure_batch` must be an int >= 0, got "),
        (lambda: ActivationSensitivity(np.array([0.5])), r"`sparsities` must be a list, got array"),
        (lambda: ActivationSensitivity(batches=np.float32(1)), r"`batches` must be an int >= 1, got "),
        (lambda: convert(model(), np.bool_(True)), r"`sparsity` must be a number in \[0, 1\), got "),
        (lambda: convert(model(), np.float32(1)), r"`sparsity` must be in \[0, 1\), got "),
        (lambda: StepSchedule(np.array([0, 0.5]), [0.5]), r"`sparsities` must be a list of numbers, got array"),
    ],
)
def test_what_is_no_number_is_refused(make: Callable[[], Any], message: str):
    with pytest.raises((MisconfigurationException, TypeError, ValueError), match=message + ".* HINT"):
        make()
