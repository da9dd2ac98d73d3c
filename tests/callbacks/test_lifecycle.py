"""Reverting: after a fit, after exceptions in every phase, on the second fit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from tests.support.helpers import BATCHES, ConfiguredNet, Net, assert_plain, trainer


class Boom(Exception):
    pass


def failing(*args, **kwargs):
    raise Boom


@pytest.mark.parametrize(
    ("make", "phase"),
    [
        *((Net, phase) for phase in ("setup", "on_fit_start", "on_train_start", "on_before_zero_grad")),
        *((ConfiguredNet, phase) for phase in ("setup", "configure_model", "configure_optimizers", "training_step")),
        *((ConfiguredNet, phase) for phase in ("on_after_backward", "validation_step", "on_train_end")),
    ],
)
def test_an_exception_in_any_phase_leaves_a_plain_model(make, phase: str):
    model = make()
    setattr(model, phase, failing)
    with pytest.raises(Boom):
        trainer(ActivationPruning(sparsity=0.6), ActivationMemoryMonitor(measure_batch=0)).fit(model)
    assert_plain(model)
    assert vars(model).pop(phase) is failing
    assert "configure_model" not in vars(model)
    model.seen.clear()
    trainer(ActivationPruning(sparsity=0.5)).fit(model)
    assert model.seen == [["ActivationPrunedLinear"] * 3] * BATCHES
    assert_plain(model)


@pytest.mark.parametrize(
    ("phase", "first"),
    [("setup", True), ("setup", False), ("on_fit_start", True), ("on_train_batch_end", True), ("state_dict", False)],
)
def test_an_exception_of_another_callback_leaves_a_plain_model(phase: str, first: bool, tmp_path):
    other = pl.Callback()
    setattr(other, phase, failing)
    ours = ActivationPruning(sparsity=0.6), ActivationMemoryMonitor(measure_batch=0)
    model = ConfiguredNet()
    callbacks = (other, *ours) if first else (*ours, other)
    with pytest.raises(Boom):
        trainer(*callbacks, enable_checkpointing=True, default_root_dir=tmp_path).fit(model)
    assert_plain(model)
    assert "configure_model" not in vars(model)


def test_a_fit_without_a_usable_module_raises_lightnings_own_error():
    with pytest.raises(TypeError, match="LightningModule"):
        trainer(ActivationPruning(sparsity=0.6), ActivationMemoryMonitor()).fit(nn.Linear(3, 3))


@pytest.mark.parametrize(("make", "same_trainer"), [(ConfiguredNet, True), (lambda: Net("setup"), False)])
def test_one_callback_fits_twice_and_then_another_model(make, same_trainer: bool):
    model, callback = make(), ActivationPruning(sparsity=0.5, verbose=False)
    first = trainer(callback)
    first.fit(model)
    second = first if same_trainer else trainer(callback)
    second.fit_loop.max_epochs = 2
    model.seen.clear()
    second.fit(model)
    trainer(callback).fit(other := Net())
    for fitted in model, other:
        assert set(map(tuple, fitted.seen)) == {("ActivationPrunedLinear",) * 3}
        assert_plain(fitted)
    assert len(callback.converted) == 3


def test_parameters_hooks_and_identity_survive():
    model = Net()
    layer, parameters = model.head, list(map(id, model.parameters()))
    calls = []
    handle = layer.register_forward_hook(lambda *args: calls.append(1))
    trainer(ActivationPruning(sparsity=0.6), num_sanity_val_steps=0, limit_val_batches=0).fit(model)
    handle.remove()
    assert model.head is layer
    assert list(map(id, model.parameters())) == parameters
    assert len(calls) == BATCHES
    assert_plain(model)


def test_the_model_can_be_copied_and_pickled_during_the_fit_without_the_trainer():
    copies: list[nn.Module] = []

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            for module in pl_module.body, pl_module.head:
                state = pickle.dumps(module)
                assert b"callbacks" not in state
                copies.extend([copy.deepcopy(module), pickle.loads(state)])

    trainer(ActivationPruning(sparsity=0.5), ActivationMemoryMonitor(measure_batch=0), Copying()).fit(Net())
    for module in copies:
        assert not any(m._forward_hooks for m in module.modules())
        module(torch.randn(2, 3, next(module.parameters()).shape[1])).sum().backward()


def test_nothing_is_left_alive_after_the_fit():
    model, callback, monitor = ConfiguredNet(), ActivationPruning(sparsity=0.6), ActivationMemoryMonitor()
    made = trainer(callback, monitor)
    made.fit(model)
    alive = weakref.ref(model)
    for ours in callback, monitor:
        del ours.log, ours.log_dict  # which Lightning put there
    del made, model
    gc.collect()
    assert alive() is None
    assert len(callback.converted) == 3
    assert monitor.report is not None
