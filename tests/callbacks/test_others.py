"""The callback with `others`: for the time of a fit, what other layers keep is stored in few bits, and it is said."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.nn.few_bit import FewBitLayer
from tests.helpers import ConfiguredNet, Net, assert_plain, trainer


def few_bit_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FewBitLayer)]


def text_of(caplog) -> str:
    return " ".join(caplog.text.split())


@pytest.mark.parametrize("make", [Net, lambda: Net("setup"), ConfiguredNet], ids=["init", "setup", "configure_model"])
def test_layers_are_converted_for_the_time_of_a_fit(make):
    model = make()
    model.watch = few_bit_layers
    callback = ActivationPruning(sparsity=0.5, others=True, verbose=False)
    fitted = trainer(callback)
    fitted.fit(model)
    assert all(seen == ["body.1", "body.3"] for seen in model.seen)
    assert [(layer.fqn, layer.value_format) for layer in callback.few_bit] == [
        ("body.1", "int4"),
        ("body.3", "int4"),
    ]
    assert_plain(model)
    assert few_bit_layers(model) == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    fitted.validate(model, verbose=False)


def test_losses_are_those_of_dense_training_at_first_and_near_them_later():
    losses = {}
    for name, callbacks in {"dense": (), "ours": (ActivationPruning(others=True, verbose=False),)}.items():
        torch.manual_seed(0)
        model = Net()
        run = trainer(*callbacks, max_epochs=3)
        run.fit(model)
        losses[name] = run.callback_metrics["loss"]
    torch.testing.assert_close(losses["ours"], losses["dense"], rtol=0.02, atol=0)


def test_an_exception_leaves_a_plain_model():
    model = Net()

    def fail(_):
        raise RuntimeError("stop")

    model.watch = fail
    with pytest.raises(RuntimeError, match="stop"):
        trainer(ActivationPruning(others=True)).fit(model)
    assert_plain(model)
    assert few_bit_layers(model) == []
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_the_summary_says_what_is_stored_and_what_could_be(caplog):
    caplog.set_level("INFO")
    trainer(ActivationPruning(sparsity=0.5)).fit(Net())
    assert "Stored as it is: what 2 activation functions need (others=True stores it in few bits)." in text_of(caplog)
    caplog.clear()
    trainer(ActivationPruning(sparsity=0.5, others={"activation": "int2", "rest": "int8"})).fit(Net())
    assert "Stored as int2: what 2 activation functions need." in text_of(caplog)
    assert "Stored as int8: what else modules keep for backward." in text_of(caplog)


def test_the_monitor_counts_what_is_stored():
    kept = {}
    for others in (False, True):
        monitor = ActivationMemoryMonitor(verbose=False)
        trainer(ActivationPruning(others=others, verbose=False), monitor).fit(Net(batch_size=8))
        kept[others] = monitor.report.total_bytes
    assert kept[True] < 0.6 * kept[False]


def test_double_precision_is_refused():
    with pytest.raises(MisconfigurationException, match=r"(?s)64-true.*`others`.*HINT"):
        trainer(ActivationPruning(sparsity=0.5, others=True), precision="64-true").fit(Net())


def test_bad_requests_are_refused():
    with pytest.raises(MisconfigurationException, match=r"`others` must name .*got 'dropout'.*HINT"):
        ActivationPruning(others={"dropout": "int4"})


def test_the_loss_is_no_scope_also_where_a_strategy_calls_the_module_itself():
    model = Net()
    convert(model, others={"rest": "int8"})
    saving = model.__dict__["_few_bit_savings"].popitem()[1]
    assert not model._forward_pre_hooks
    assert model.body._forward_pre_hooks
    saving.detach()
    assert not model.body._forward_pre_hooks
