"""ActivationSensitivity: the training steps that it measures stay as they are, and what it shows."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_actprune import ActivationPruning, ActivationSensitivity, measure_sensitivity
from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
from lightning_actprune.operators.attention import watchers
from tests.support.helpers import BARS, BATCHES, ConfiguredNet, Gradients, Net, assert_plain, trainer

GRID: dict[str, Any] = {"sparsities": [0.5, 0.8], "bits": [None, 4]}


def quiet(**options: Any) -> ActivationSensitivity:
    return ActivationSensitivity(**(GRID | {"verbose": False} | options))


@pytest.mark.parametrize("bar", BARS)
def test_it_prints_cosines_and_sparsities(bar, capsys, caplog):
    callback = ActivationSensitivity(**GRID, min_cosine=0.2)
    with caplog.at_level("INFO"):
        progress = [] if bar is None else [bar()]
        trainer(callback, *progress, enable_progress_bar=bar is not None).fit(Net())
    streams = capsys.readouterr()
    text = streams.out + streams.err + caplog.text
    assert "Cosine of the weight gradient from 4 bits and the exact one" in text
    assert "With a cosine of 0.2 at least, the fewest bytes are kept by these rules: rules:" in " ".join(text.split())


def test_it_is_what_measure_sensitivity_finds():
    model = Net()
    before = copy.deepcopy(model)
    callback = quiet(batches=1)
    trainer(callback).fit(model)

    def loss(batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(before(batch[0]), batch[1])

    expected = measure_sensitivity(before, loss, [next(iter(model.train_dataloader()))], **GRID)
    assert callback.result == expected
    assert {row.fqn for row in expected.rows} == {"body.0", "body.2", "head"}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_is_that_without_it(accumulate):
    torch.manual_seed(0)
    model = Net()
    runs = []
    for callbacks in ([], [quiet(batches=3)]):
        gradients = Gradients()
        trainer(*callbacks, gradients, accumulate_grad_batches=accumulate).fit(copy.deepcopy(model))
        runs.append(gradients.seen)
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


class Watched(pl.Callback):
    """Notes at which batches layers have hooks, and fails at one of them."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.seen: list[int] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        step = len(self.seen)
        self.seen.append(len(pl_module.head._forward_hooks))
        if step == self.fails_at:
            raise KeyError("mine")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert_plain(pl_module)


@pytest.mark.parametrize(
    ("options", "measured"),
    [({}, [1, 1, 0, 0]), ({"batches": 1, "at_step": 2}, [0, 0, 1, 0]), ({"batches": 9}, [1, 1, 1, 1])],
)
def test_steps_that_are_measured(options, measured):
    model, callback, watched = ConfiguredNet(), quiet(**options), Watched()
    trainer(callback, watched).fit(model)
    assert watched.seen == measured
    assert len(measured) == BATCHES
    assert callback.result.batches == sum(measured)
    assert callback.result.rows
    assert_plain(model)
    trainer(callback).fit(model)  # measured anew
    assert callback.result.batches == sum(measured)


def test_nothing_is_left_after_an_exception():
    model = Net()
    with pytest.raises(KeyError, match="mine"):
        trainer(quiet(), Watched(fails_at=1)).fit(model)
    assert_plain(model)
    assert not watchers


def test_steps_that_never_come_are_warned_of():
    callback = quiet(at_step=50)
    with pytest.warns(UserWarning, match=r"measured no layer in 0 batches from step 50 on.*HINT.*at_step"):
        trainer(callback).fit(Net())
    assert callback.result.rows == []


def test_a_fit_in_which_nothing_can_be_measured_says_why():
    callback = quiet(bits=[4])
    with pytest.warns(UserWarning, match=r"measured no layer in 2 batches from step 0 on. 'body.0': .*float64.*HINT"):
        trainer(callback, precision="64-true").fit(Net())


@pytest.mark.parametrize("first", [True, False])
def test_beside_pruning_it_measures_the_same_from_the_second_batch_on(first):
    model = Net(lr=0.0)
    alone, beside, pruning = (
        quiet(batches=1, at_step=1),
        quiet(batches=1),
        ActivationPruning(sparsity=0.5, verbose=False),
    )
    trainer(alone).fit(copy.deepcopy(model))
    trainer(*([beside, pruning] if first else [pruning, beside])).fit(model)
    assert beside.result == alone.result
    assert len(pruning.converted) == 3
    assert_plain(model)


def test_under_mixed_precision():
    callback = quiet()
    trainer(callback, precision="bf16-mixed").fit(Net())
    assert all(0 < row.cosine < 1 for row in callback.result.rows)
    # Bytes are of autocast's copies of 16 bits: an eighth of four, and two of every 32 for scale and base.
    share = next(row.stored_share for row in callback.result.rows if (row.sparsity, row.bits) == (0.5, 4))
    assert 0.5 * (4 / 16 + 1 / 32) < share < 0.16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsities": [2]}, "`sparsities` must be in"),
        ({"bits": [5]}, "`bits` must be 2, 3, 4, 8 or None"),
        ({"batches": 0}, "`batches` must be an int >= 1"),
        ({"at_step": -1}, "`at_step` must be an int >= 0"),
        ({"min_cosine": 2}, "`min_cosine` must be in"),
    ],
)
def test_errors_of_arguments(options, message):
    with pytest.raises(MisconfigurationException, match=message):
        ActivationSensitivity(**options)


def test_a_pattern_that_matches_nothing_is_an_error_in_training():
    model = Net()
    with pytest.raises(MisconfigurationException, match=r"`names` pattern 'tail' matches no .* of Net"):
        trainer(quiet(names="tail")).fit(model)
    assert_plain(model)


def test_it_is_made_from_yaml_and_written_again(tmp_path):
    jsonargparse = pytest.importorskip("jsonargparse", reason="only LightningCLI needs it")
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(pl.Callback, "callback")
    given = {"sparsities": [0.5], "bits": [4], "names": ["head"], "at_step": 100}
    path = "lightning_actprune.ActivationSensitivity"
    parsed = parser.parse_object({"callback": {"class_path": path, "init_args": given}})
    again = parser.parse_string(parser.dump(parsed))
    made = parser.instantiate_classes(again).callback
    assert made.grid == SensitivityGrid([0.5], [4], names=["head"])
    assert (made.at_step, made.batches, made.min_cosine) == (100, 2, 0.9)
    default = parser.parse_object({"callback": {"class_path": path}})
    assert parser.instantiate_classes(parser.parse_string(parser.dump(default))).callback.grid == SensitivityGrid()
