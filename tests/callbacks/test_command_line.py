"""LightningCLI with our callbacks: help, config files and their round trip, wrong values, optimizers of the CLI."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from lightning_actprune.schedules import CosineSchedule, LinearSchedule, SparsitySchedule, StepSchedule
from tests.support.helpers import BATCHES, Net, assert_plain, sparsities

CALLBACK = "--trainer.accelerator=cpu", "--trainer.callbacks+=ActivationPruning"


class Halves(SparsitySchedule):
    """A schedule as a user writes one."""

    def __init__(self, later: float) -> None:
        self.later = later

    def __call__(self, progress: float) -> float:
        return self.later if progress >= 0.5 else 0.0


class WithoutOptimizer(Net):
    """Leaves the optimizer to the command line, which makes it before any hook of a fit."""

    configure_optimizers = Net.__mro__[1].configure_optimizers


def cli(*args: str) -> LightningCLI:
    return LightningCLI(WithoutOptimizer, args=args, run=False, save_config_callback=None, seed_everything_default=0)


def ours(made: LightningCLI) -> list[ActivationPruning | ActivationMemoryMonitor]:
    kinds = ActivationPruning, ActivationMemoryMonitor
    return [callback for callback in made.trainer.callbacks if isinstance(callback, kinds)]


@pytest.mark.integration
@pytest.mark.parametrize("callback", [ActivationPruning, ActivationMemoryMonitor])
def test_the_help_explains_every_argument(callback: type, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as done:
        cli(f"--trainer.callbacks.help=lightning_actprune.{callback.__name__}")
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    explained = inspect.cleandoc(callback.__doc__)
    assert explained.splitlines()[0].rstrip(".") in text
    for name in inspect.signature(callback).parameters:
        assert f"--trainer.callbacks.{name} " in text
        assert " ".join(explained.split(f"\n    {name}: ")[1].split()[:5]) in text


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("sparsty=0.3", ("sparsty",)),
        ("preset=best", ("preset", "best", "max")),
        ('rules={"head": {"sparsty": 0.3}}', ("sparsty",)),
    ],
)
def test_a_wrong_argument_is_named(wrong: str, named: tuple[str, ...], capsys):
    with pytest.raises((SystemExit, ValueError, MisconfigurationException)) as refused:
        cli(*CALLBACK, f"--trainer.callbacks.{wrong}")
    said = capsys.readouterr().err + str(refused.value)
    assert all(part in said for part in named)


def test_short_names_and_rules_on_the_command_line():
    rules = {"body.*": {"sparsity": {"class_path": "CosineSchedule", "init_args": {"end": 0.5}}}, "head": {"bits": 3}}
    monitor = "--trainer.callbacks+=ActivationMemoryMonitor", "--trainer.callbacks.verbose=false"
    settings = "preset=max", "cuda_graphs=true", "sparsity=LinearSchedule", "sparsity.end=0.7"
    with_rules = *settings, f"rules={json.dumps(rules)}"
    command = cli(*CALLBACK, *(f"--trainer.callbacks.{setting}" for setting in with_rules), *monitor)
    pruning, monitor = ours(command)
    assert (pruning.preset, pruning.cuda_graphs, pruning.sparsity) == ("max", True, LinearSchedule(0.7))
    assert pruning.rules == {"body.*": {"sparsity": CosineSchedule(0.5)}, "head": {"bits": 3}}
    assert monitor.verbose is False


CONFIG = f"""
optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.1}}}}
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_actprune.ActivationPruning
      init_args:
        sparsity: {{class_path: {__name__}.Halves, init_args: {{later: 0.75}}}}
        block_size: 16
        cuda_graphs: true
        rules:
          body.0:
            sparsity:
              class_path: lightning_actprune.schedules.StepSchedule
              init_args: {{sparsities: [0.0, 0.5], at: [0.5]}}
          head: dense
          "type:norm": null
          "type:activation": max
    - class_path: lightning_actprune.ActivationMemoryMonitor
      init_args:
        measure_batch: 1
"""


def test_a_config_file_and_its_round_trip(tmp_path: Path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    first = cli("--config", str(path))
    with pytest.raises(SystemExit):
        cli("--config", str(path), "--print_config")
    path.write_text(capsys.readouterr().out)
    second = cli("--config", str(path))
    for made in first, second:
        pruning, monitor = ours(made)
        assert (pruning.preset, pruning.block_size, pruning.cuda_graphs) == ("paper", 16, True)
        assert monitor.measure_batch == 1
        assert (type(pruning.sparsity), pruning.sparsity.later) == (Halves, 0.75)
        assert list(pruning.rules.items()) == [
            ("body.0", {"sparsity": StepSchedule([0.0, 0.5], [0.5])}),
            ("head", "dense"),
            ("type:norm", None),
            ("type:activation", "max"),
        ]
    second.model.watch = sparsities
    before = [p.detach().clone() for p in second.model.parameters()]
    second.trainer.fit(second.model)
    assert second.model.seen == [[0.0, 0.0]] * (BATCHES // 2) + [[0.5, 0.75]] * (BATCHES // 2)
    assert second.trainer.callback_metrics["actprune/dense_mib"] > 0
    assert not any(map(torch.equal, before, second.model.parameters()))
    assert_plain(second.model)
