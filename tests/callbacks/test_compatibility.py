"""With other callbacks, precisions, strategies and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from lightning_actprune import ActivationMemoryMonitor, ActivationPrunedLinear, ActivationPruning, Keep
from lightning_actprune.schedules import CosineSchedule, CubicSchedule, LinearSchedule, StepSchedule
from tests.support.helpers import BATCHES, ConfiguredNet, Gradients, Net, assert_plain, sparsities, trainer
from tests.support.marks import needs_passes

PRUNED = ["ActivationPrunedLinear"] * 3


# SWA copies the model in `setup`, so it must come after us if configure_model makes the layers: theirs, not ours.
@pytest.mark.parametrize(("make", "ours_first"), [(Net, True), (Net, False), (ConfiguredNet, True)])
def test_stochastic_weight_averaging(make, ours_first: bool):
    model = make()
    ours, swa = ActivationPruning(sparsity=0.5), StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    callbacks = (ours, swa) if ours_first else (swa, ours)
    trainer(*callbacks, max_epochs=3).fit(model)
    assert model.seen == [PRUNED] * 3 * BATCHES
    assert_plain(model)


@pytest.mark.skipif(not hasattr(pl_callbacks, "WeightAveraging"), reason="this Lightning has no WeightAveraging")
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("make", [Net, ConfiguredNet])
def test_weight_averaging(make, ours_first: bool):
    model = make()
    ours, ema = ActivationPruning(sparsity=0.5), pl_callbacks.EMAWeightAveraging(decay=0.9)
    trainer(*((ours, ema) if ours_first else (ema, ours)), max_epochs=2).fit(model)
    assert model.seen == [PRUNED] * 2 * BATCHES
    assert_plain(model)
    assert "configure_model" not in vars(model)


@pytest.mark.parametrize("make", [Net, ConfiguredNet])
def test_learning_rate_finder_sees_pruned_layers(make, tmp_path, recwarn):
    model = make()
    finder = LearningRateFinder(num_training_steps=3, min_lr=1e-4, max_lr=1e-2)
    callbacks = ActivationPruning(sparsity=LinearSchedule(end=0.5)), ActivationMemoryMonitor(measure_batch=1), finder
    trainer(*callbacks, max_epochs=2, default_root_dir=tmp_path).fit(model)
    assert len(model.seen) > BATCHES
    assert set(map(tuple, model.seen)) == {tuple(PRUNED)}
    assert_plain(model)
    assert not [w for w in recwarn if "other settings" in str(w.message)]


@pytest.mark.parametrize("make", [Net, ConfiguredNet])
def test_batch_size_finder_sees_pruned_layers(make, tmp_path):
    model = make()
    finder = BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2)
    trainer(ActivationPruning(sparsity=0.5), finder, default_root_dir=tmp_path).fit(model)
    assert model.batch_size > 2
    assert set(map(tuple, model.seen)) == {tuple(PRUNED)}
    assert_plain(model)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision: str):
    model, monitor = Net(), ActivationMemoryMonitor(measure_batch=0)
    trainer(ActivationPruning(sparsity=0.5), monitor, precision=precision).fit(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    itemsize = 8 if precision == "64-true" else 2
    assert {row.fqn: row.dense_bytes for row in monitor.report.rows}["body.2"] == 4 * 8 * 128 * itemsize
    assert [row.stored_bytes for row in monitor.report.rows] == [row.accounted_bytes for row in monitor.report.rows]
    assert_plain(model)


class Witness(pl.Callback):
    """Looks at the layers from inside a worker process, after the callbacks before it have acted."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int):
        assert any(isinstance(module, ActivationPrunedLinear) for module in pl_module.modules())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str):
        assert len(list(pl_module.modules())) > 1
        assert_plain(pl_module)


class NestedNet(Net):
    """``Net`` whose layers read sequences of several lengths as one nested tensor."""

    layout = torch.jagged

    def forward(self, x: Tensor) -> Tensor:
        sequences = [one[: 3 + number] for number, one in enumerate(x)]
        given = torch.nested.as_nested_tensor(sequences, layout=self.layout)
        return torch.stack([one.mean(0) for one in self.head(self.body(given)).unbind()])


class OldNestedNet(NestedNet):
    layout = torch.strided


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("sparsity", [None, 0.5])
@pytest.mark.parametrize("make", [NestedNet, OldNestedNet])
def test_nested_tensors(make, sparsity: float | None):
    """Of these layers keep all, so that the gradients are those of a model never pruned."""
    seen = []
    for callbacks in ([ActivationPruning("max", sparsity=sparsity), ActivationMemoryMonitor()], []):
        torch.manual_seed(1)
        seen.append(Gradients())
        trainer(*callbacks, seen[-1]).fit(make())
    for found, right in zip(*(one.seen for one in seen), strict=True):
        for grad, exact in zip(found, right, strict=True):
            assert torch.equal(grad, exact)


@pytest.mark.slow
def test_two_processes(tmp_path):
    model = ConfiguredNet(batch_size=2)
    callbacks = ActivationPruning(sparsity=CubicSchedule(end=0.8)), ActivationMemoryMonitor(), Witness()
    made = trainer(*callbacks, strategy="ddp_spawn", devices=2, num_sanity_val_steps=0, default_root_dir=tmp_path)
    made.fit(model)
    assert 0 < made.callback_metrics["actprune/saved_mib"] < made.callback_metrics["actprune/dense_mib"]
    assert_plain(model)


@needs_passes
@pytest.mark.slow
def test_a_compiled_module():
    model = Net()
    monitor = ActivationMemoryMonitor(measure_batch=2)
    with pytest.warns(UserWarning, match="runs no pass"):
        trainer(ActivationPruning(sparsity=0.5), monitor).fit(torch.compile(model, backend="eager"))
    assert model.seen == [PRUNED] * BATCHES
    assert monitor.report.stored_bytes > 0
    assert_plain(model)


CONFIG = """
model:
  lr: 0.02
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_actprune.ActivationPruning
      init_args:
        block_size: 16
        rules: {head: dense}
        sparsity:
          class_path: lightning_actprune.schedules.CubicSchedule
          init_args:
            end: 0.8
            warmup: 0.25
    - class_path: lightning_actprune.ActivationMemoryMonitor
      init_args:
        measure_batch: 1
"""


def cli(*arguments: str) -> LightningCLI:
    return LightningCLI(Net, args=list(arguments), run=False, save_config_callback=None, seed_everything_default=0)


def ours(trainer: pl.Trainer) -> list[pl.Callback]:
    kinds = ActivationPruning, ActivationMemoryMonitor
    return [callback for callback in trainer.callbacks if isinstance(callback, kinds)]


def test_config_file_and_its_round_trip(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    first = cli("--config", str(path))
    path.write_text(first.parser.dump(first.config, skip_none=False))
    second = cli("--config", str(path))
    for made in first, second:
        pruning, monitor = ours(made.trainer)
        assert (pruning.preset, pruning.block_size, pruning.rules) == ("paper", 16, {"head": "dense"})
        assert repr(pruning.sparsity) == repr(CubicSchedule(end=0.8, warmup=0.25))
        assert monitor.measure_batch == 1
    saved = yaml.safe_load(path.read_text())["trainer"]["callbacks"][0]
    assert saved["class_path"].endswith(".ActivationPruning")
    assert saved["init_args"]["rules"] == {"head": "dense"}
    second.trainer.fit(second.model)
    assert second.trainer.callback_metrics["actprune/dense_mib"] > 0
    assert_plain(second.model)


def test_short_names_on_the_command_line():
    made = cli(
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.callbacks+=ActivationPruning",
        "--trainer.callbacks.preset=max",
        "--trainer.callbacks.sparsity=LinearSchedule",
        "--trainer.callbacks.sparsity.end=0.7",
        "--trainer.callbacks+=ActivationMemoryMonitor",
        "--trainer.callbacks.verbose=false",
    )
    pruning, monitor = ours(made.trainer)
    assert (pruning.preset, pruning.sparsity) == ("max", LinearSchedule(0.7))
    assert monitor.verbose is False


def test_a_wrong_argument_on_the_command_line_is_named(capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.callbacks+=ActivationPruning", "--trainer.callbacks.sparsty=0.3")
    assert "sparsty" in capsys.readouterr().err


RULES = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_actprune.ActivationPruning
      init_args:
        sparsity: 0.25
        rules:
          body.0:
            block_size: 16
            sparsity:
              class_path: lightning_actprune.schedules.StepSchedule
              init_args: {sparsities: [0.0, 0.5], at: [0.5]}
          head: dense
          "type:norm": null
          "type:activation": max
"""


def test_rules_in_a_config_file_and_its_round_trip(tmp_path: Path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(RULES)
    first = cli("--config", str(path))
    with pytest.raises(SystemExit):
        cli("--config", str(path), "--print_config")
    path.write_text(capsys.readouterr().out)
    for made in first, cli("--config", str(path)):
        [pruning] = ours(made.trainer)
        assert list(pruning.rules.items()) == [
            ("body.0", Keep(block_size=16, sparsity=StepSchedule([0.0, 0.5], [0.5]))),
            ("head", "dense"),
            ("type:norm", None),
            ("type:activation", "max"),
        ]
        made.model.watch = sparsities
        made.trainer.fit(made.model)
        assert made.model.seen == [[0.0, 0.25]] * 2 + [[0.5, 0.25]] * 2
        assert_plain(made.model)


def test_rules_on_the_command_line(capsys):
    own = {"body.*": {"sparsity": {"class_path": "CosineSchedule", "init_args": {"end": 0.5}}}, "head": {"bits": 3}}
    callback = "--trainer.accelerator=cpu", "--trainer.callbacks+=ActivationPruning"
    made = cli(*callback, f"--trainer.callbacks.rules={json.dumps(own)}")
    [pruning] = [c for c in made.trainer.callbacks if isinstance(c, ActivationPruning)]
    assert pruning.rules == {"body.*": Keep(sparsity=CosineSchedule(0.5)), "head": Keep(bits=3)}
    with pytest.raises((SystemExit, ValueError, MisconfigurationException)) as refused:
        cli(*callback, '--trainer.callbacks.rules={"head": {"sparsty": 0.3}}')
    assert "sparsty" in capsys.readouterr().err + str(refused.value)
