"""What a user of LightningCLI meets: help for every argument, schedules of their own, optimizers that the CLI makes."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, ActivationSensitivity
from lightning_actprune.schedules import SparsitySchedule
from tests.support.helpers import BATCHES, Net, assert_plain, sparsities


class Halves(SparsitySchedule):
    """A schedule as a user writes one.

    Args:
        later: Sparsity in the second half of the training.
    """

    def __init__(self, later: float) -> None:
        self.later = later

    def __call__(self, progress: float) -> float:
        return self.later if progress >= 0.5 else 0.0


class WithoutOptimizer(Net):
    """Leaves the optimizer to the command line, which makes it before any hook of a fit."""

    configure_optimizers = Net.__mro__[1].configure_optimizers


def cli(model: type[Net], *args: str) -> LightningCLI:
    return LightningCLI(model, args=list(args), run=False, save_config_callback=None, seed_everything_default=0)


@pytest.mark.parametrize("callback", [ActivationPruning, ActivationMemoryMonitor, ActivationSensitivity])
def test_the_help_explains_every_argument(callback: type, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        cli(Net, f"--trainer.callbacks.help=lightning_actprune.{callback.__name__}")
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    explained = inspect.cleandoc(callback.__doc__)
    assert explained.splitlines()[0].rstrip(".") in text
    for name in inspect.signature(callback).parameters:
        assert f"--trainer.callbacks.{name} " in text
        assert " ".join(explained.split(f"\n    {name}: ")[1].split()[:5]) in text


@pytest.mark.parametrize(
    ("name", "value", "choice"),
    [("preset", "best", "max")],
)
def test_a_wrong_value_is_an_error_that_names_the_choices(name: str, value: str, choice: str, capsys):
    with pytest.raises(SystemExit):
        cli(Net, "--trainer.callbacks+=lightning_actprune.ActivationPruning", f"--trainer.callbacks.{name}={value}")
    said = capsys.readouterr().err
    assert all(part in said for part in (name, value, choice))


def test_a_schedule_of_the_users_own_is_named_in_yaml(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(f"""
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  callbacks:
    - class_path: lightning_actprune.ActivationPruning
      init_args:
        sparsity: {{class_path: {__name__}.Halves, init_args: {{later: 0.75}}}}
""")
    made = cli(Net, "--config", str(path))
    made.model.watch = sparsities
    made.trainer.fit(made.model)
    assert made.model.seen == [[0.0] * 3] * (BATCHES // 2) + [[0.75] * 3] * (BATCHES // 2)


def test_an_optimizer_that_the_command_line_makes_moves_the_pruned_layers():
    quiet = "--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.max_epochs=1"
    ours = "--trainer.accelerator=cpu", "--trainer.callbacks+=lightning_actprune.ActivationPruning"
    made = cli(WithoutOptimizer, *quiet, *ours, "--optimizer=torch.optim.SGD", "--optimizer.lr=0.1")
    before = [p.detach().clone() for p in made.model.parameters()]
    made.trainer.fit(made.model)
    assert set(map(tuple, made.model.seen)) == {("ActivationPrunedLinear",) * 3}
    assert not any(map(torch.equal, before, made.model.parameters()))
    assert_plain(made.model)
