"""``ActivationPruning(memory_budget=...)``: what fits is found after two steps, also in resumed and tuned fits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning
from lightning_actprune.analysis import simulated
from lightning_actprune.analysis.allocation import MARGIN
from lightning_actprune.callbacks import budget as budget_module
from lightning_actprune.schedules import CubicSchedule
from tests.support.budgets import AGAIN, DENSE, FEW, HALF, PARTS, assert_restored, chosen, fit
from tests.support.helpers import trainer
from tests.support.stack import DEPTH, STEPS, WIDTH, Stack, batches


class Watched(Stack):
    """Notes who its parameters, the optimizer's states and the batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.batches = list[Any](), list[weakref.ref[Tensor]]()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        states = {id(p): {name: id(value) for name, value in s.items()} for p, s in optimizer.state.items()}
        self.ids.append(([id(p) for p in self.parameters()], states))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(weakref.ref(batch[0]))


@pytest.mark.parametrize(
    ("budget", "kinds", "accumulated"),
    [
        (1.0, {"Residual/Linear"}, 1),
        (HALF, {"Residual/ActivationPrunedLinear"}, 1),
        pytest.param(0.8, {"Residual/ActivationPrunedLinear", "Residual/Linear"}, 2, marks=pytest.mark.integration),
    ],
)
def test_a_fit_begins_with_the_fewest_bytes_and_decides_after_the_second_step(
    budget: float, kinds: set[str], accumulated: int, caplog
):
    """Parameters and states of the optimizer stay the same objects, and no batch is held."""
    caplog.set_level("INFO")
    pruning, model = ActivationPruning(memory_budget=budget), Watched()
    fit(pruning, model, accumulate_grad_batches=accumulated)
    first, later = model.kinds[: 2 * accumulated], model.kinds[2 * accumulated :]
    assert first == [AGAIN] * (2 * accumulated)
    assert later == [later[0]] * (STEPS - 2 * accumulated)
    assert {f"{block}/{layer}" for block, layer in later[0]} == kinds
    number = chosen(pruning)
    allocator, found = pruning._budget._allocator, pruning._budget._allocator.allocation(number)
    assert found.peak_bytes <= budget * found.dense.peak_bytes
    assert allocator.fit(budget).number == number
    if found.is_dense:
        assert pruning.report.layers == []
    else:
        assert allocator.step(number + 1).peak_bytes > (1 - MARGIN) * budget * found.dense.peak_bytes
    assert caplog.text.count("Memory budget: ") == 1

    (parameters, none), (_, states), *_ = model.ids
    assert none == {}
    assert states.keys() == set(parameters)
    assert model.ids[1:] == [(parameters, states)] * (len(model.ids) - 1)
    gc.collect()
    assert [batch() for batch in model.batches] == [None] * STEPS


def test_gradients_stay_where_they_accumulate():
    """Lightning lets go of those of the step before after the forward, but not of those of the batch before."""
    model, (batch, *_) = Stack(), batches()
    weights = sum(p.nbytes for p in model.parameters())
    for accumulates in (False, True):
        step = simulated.simulate(model, batch, precision="32-true", accumulates=accumulates)
        assert step.moments[step.forward_end - 1].gradient_bytes == weights
        first = next(moment for moment in step.moments if moment.phase == "backward")
        assert first.gradient_bytes == weights * accumulates


@pytest.mark.integration
def test_layers_of_blocks_that_no_longer_run_again_are_judged_like_any_other():
    """Their first batch shows which drop nothing, and what is retained."""
    plain, ours = (
        ActivationPruning(sparsity=0.5, verbose=0, **kept) for kept in ({"preset": "max"}, {"memory_budget": FEW})
    )
    fit(plain)
    model = fit(ours)
    assert chosen(ours) == DEPTH + PARTS
    assert model.kinds[-1] == [("Residual", "ActivationPrunedLinear")] * DEPTH
    two = {layer.fqn for layer in ours.converted if layer.operator == "linear" and layer.keep.bits == 2}
    assert two == {*(f"body.{n}.{name}" for n in (1, 2, 3) for name in ("first", "second")), "body.5"}
    assert len(two & plain.spread.keys()) > 2
    assert ours.spread.keys() == two & plain.spread.keys()
    assert {layer.fqn: layer.reason for layer in ours.skipped} == {"body.0": "its input is part of the batch"}


class Peaked(Stack):
    """Has the energy of what its blocks' second layers read in one block of values."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.body[1:-1]:
            nn.init.constant_(block.first.bias, -9.0)
            nn.init.constant_(block.first.bias[:WIDTH], 9.0)


@pytest.mark.integration
def test_schedules_begin_with_layers_that_were_in_blocks_run_again():
    """There was no layer with a schedule when the training began."""
    rules, seen = {"body.0": None, "body.5": None}, list[Any]()

    def note(_: pl.Trainer, model: Stack, *args: Any) -> None:
        found = {getattr(block.second, "sparsity", None) for block in model.body[1:-1]}
        seen.append((found, pruning.state_dict()["total_steps"]))

    pruning = ActivationPruning(memory_budget=FEW, sparsity=CubicSchedule(end=0.8), rules=rules, verbose=0)
    fit(pruning, Peaked(), LambdaCallback(on_train_batch_end=note))
    assert seen[0] == ({None}, None)
    assert [steps for _, steps in seen[1:]] == [STEPS] * (STEPS - 1)
    assert CubicSchedule(end=0.8)((STEPS - 1) / STEPS) in seen[-1][0]


# Resumed and tuned fits.


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run that an exception has stopped in its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    kill = LambdaCallback(on_train_batch_start=lambda made, *_: made.global_step == 8 and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(
            ActivationPruning(memory_budget=HALF, verbose=0), Stack(), save, kill, enable_checkpointing=True,
            max_epochs=2,
        )  # fmt: skip
    return folder


def resumed(ckpt: Path) -> tuple[ActivationPruning, Stack]:
    pruning = ActivationPruning(memory_budget=HALF, verbose=0)
    return pruning, fit(pruning, Stack(), max_epochs=2, ckpt_path=ckpt)


@pytest.mark.integration
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(stopped: Path, recwarn):
    """It goes on with the setting that was chosen, from its first step on."""
    whole = ActivationPruning(memory_budget=HALF, verbose=0)
    expected = fit(whole, Stack(), max_epochs=2)
    for at in (STEPS, 8):
        parts, found = resumed(stopped / f"step={at}.ckpt")
        assert found.kinds == [expected.kinds[-1]] * (2 * STEPS - at)
        assert parts.state_dict()["memory_budget"] == whole.state_dict()["memory_budget"]
        assert parts.report.to_rows() == whole.report.to_rows()
        assert parts.spread == whole.spread
        if at == STEPS:  # in the middle of an epoch, Lightning begins that epoch's data anew
            torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("at", "changes", "anew"),
    [
        (1, {}, True),  # from before the decision
        (6, {"number": 1000}, True),
        (6, {"setting": "another one"}, True),
        (6, {"budget": 0.9}, True),
        (6, {"cap": 2.0**41}, True),  # torch may take less now
        (6, {"cap": 2.0**39}, False),
    ],
)
def test_a_checkpoint_of_another_setting_budget_or_device_decides_anew(
    stopped: Path, at: int, changes: dict[str, Any], anew: bool, monkeypatch
):
    saved = torch.load(stopped / f"step={at}.ckpt", weights_only=True)
    [state] = [state for key, state in saved["callbacks"].items() if "ActivationPruning" in key]
    state["memory_budget"] |= changes
    torch.save(saved, stopped / "edited.ckpt")
    if "cap" in changes:
        monkeypatch.setattr(budget_module, "_cap", lambda *_: 2.0**40)
    pruning, found = resumed(stopped / "edited.ckpt")
    assert (found.kinds[:2] == [AGAIN] * 2) == anew
    assert found.kinds[2] not in (AGAIN, DENSE)
    if "cap" in changes:
        assert pruning.state_dict()["memory_budget"]["cap"] == min(changes["cap"], 2.0**40)


class Sized(Stack):
    """Does not fit with more than 16 samples, and notes its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size, self.sizes = 8, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 16:
            raise RuntimeError("CUDA out of memory.")
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(64 // self.batch_size * 2, self.batch_size)


@pytest.mark.integration
def test_trials_have_the_fewest_bytes_and_the_fit_decides_for_the_batch_that_was_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pruning, model = ActivationPruning(memory_budget=1.0, verbose=0), Sized()
    finder = BatchSizeFinder(steps_per_trial=3, init_val=8)
    fit(pruning, model, finder, limit_val_batches=0, num_sanity_val_steps=0)
    trials = 6
    assert model.batch_size == 16
    assert model.sizes[: trials + 2] == [8] * 3 + [16] * 5
    assert model.kinds[: trials + 2] == [AGAIN] * (trials + 2)
    assert model.kinds[trials + 2 :]
    assert AGAIN not in model.kinds[trials + 2 :]
    batch = pruning._budget._allocator.step(0).batch_bytes
    assert batch == sum(tensor[:16].nbytes for tensor in batches().dataset.tensors)


# On a GPU.


class Transformer(pl.LightningModule):
    """Classifies tokens; notes the most bytes in use in each step."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        made = (nn.TransformerEncoderLayer(256, 8, 1024, **options) for _ in range(depth))
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, 256), nn.Sequential(*made), nn.Linear(256, 4)
        self.peaks: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.blocks(self.stem(batch[0])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4, fused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.4, 0.8])
def test_steps_on_a_gpu_take_what_is_predicted(share: float, no_patches):
    no_patches()  # workspaces are what they are
    pruning, model = ActivationPruning(memory_budget=share, verbose=0), Transformer()
    note = LambdaCallback(on_train_batch_end=lambda *_: model.peaks.append(torch.cuda.max_memory_allocated()))
    options = {"accelerator": "gpu", "precision": "bf16-mixed", "num_sanity_val_steps": 0}
    trainer(note, pruning, **options).fit(model, batches(10, 512))
    own = pruning._budget
    found = own._allocator.allocation(own.number, own._off)
    measured, dense = max(model.peaks[5:]), found.dense.peak_bytes + own._off
    assert measured <= share * dense or found.is_dense
    assert measured == pytest.approx(found.peak_bytes, rel=0.05)
    assert_restored(model)
