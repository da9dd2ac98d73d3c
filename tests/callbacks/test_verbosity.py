"""``verbose`` means the same to all callbacks: nothing, what is said once a fit, or also what is said in each epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, ActivationSensitivity
from tests.helpers import Net, trainer

CALLBACKS = [ActivationPruning, ActivationMemoryMonitor, ActivationSensitivity]
EPOCHS = 3


class Held(Net):
    """The last layer reads what a ReLU keeps, which the first batch shows."""

    def make(self) -> None:
        super().make()
        self.body[3] = nn.ReLU()


@pytest.mark.parametrize(("verbose", "level"), [(False, 0), (0, 0), (1, 1), (np.int64(1), 1), (2, 2), (True, 2)])
def test_what_is_printed(verbose: Any, level: int, capsys):
    sensitivity = ActivationSensitivity([0.5], ["same"], batches=1, verbose=verbose)
    ours = ActivationPruning(0.5, verbose=verbose), ActivationMemoryMonitor(verbose=verbose), sensitivity
    made = trainer(*ours, TQDMProgressBar(), enable_progress_bar=True, max_epochs=EPOCHS)
    made.fit(Held())
    text = capsys.readouterr().out
    once = "Activation pruning: 3", "1 linear layer stays dense", "by holder", "Memory of the step", "With a cosine of"
    assert [text.count(part) for part in once] == [min(level, 1)] * len(once)
    tables = [text.count(f"Kept for backward, epoch {epoch}") for epoch in range(EPOCHS)]
    assert tables == {0: [0, 0, 0], 1: [1, 0, 0], 2: [1, 1, 1]}[level]
    assert ("actprune/saved_frac" in made.progress_bar_metrics) is (level > 0)
    assert made.callback_metrics["actprune/saved_frac"] > 0


@pytest.mark.parametrize("make", CALLBACKS)
@pytest.mark.parametrize("value", [3, -1, 1.0, "1", None, np.bool_(True)])
def test_wrong_values_are_refused(make: type, value: Any):
    with pytest.raises(MisconfigurationException, match=r"`verbose` must be a bool, 0, 1 or 2, got .* HINT: 0"):
        make(verbose=value)


@pytest.mark.parametrize(("given", "expected"), [("false", False), ("true", True), ("0", 0), ("1", 1), ("2", 2)])
def test_from_yaml_and_into_the_saved_config(given: str, expected: bool | int, tmp_path):
    path = tmp_path / "config.yaml"
    lines = [
        f"    - {{class_path: lightning_actprune.{make.__name__}, init_args: {{verbose: {given}}}}}"
        for make in CALLBACKS
    ]
    path.write_text("\n".join(["trainer:", "  accelerator: cpu", "  callbacks:", *lines]))
    for _ in range(2):
        args = ["--config", str(path)]
        made = LightningCLI(Net, args=args, run=False, save_config_callback=None, seed_everything_default=0)
        found = [c.verbose for c in made.trainer.callbacks if isinstance(c, tuple(CALLBACKS))]
        assert [(type(value), value) for value in found] == [(type(expected), expected)] * 3
        path.write_text(made.parser.dump(made.config, skip_none=False))


def test_a_wrong_value_on_the_command_line_is_named(capsys):
    callback = "--trainer.callbacks+=lightning_actprune.ActivationMemoryMonitor", "--trainer.callbacks.verbose=3"
    with pytest.raises(SystemExit):
        LightningCLI(Net, args=list(callback), run=False, save_config_callback=None)
    assert "verbose" in capsys.readouterr().err
