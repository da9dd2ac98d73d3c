"""The step in which HolderProbe looks on: it is the step that it would have been, and leaves no trace."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_actprune import HolderProbe, convert
from lightning_actprune.footprint import SavedTensorMeter
from tests.holder_models import BY, KeptFeatures, NormReadsResidual, Parameter, Relu, Sdpa, Step, held, made


@pytest.mark.parametrize("make", [Relu, Sdpa, Parameter])
def test_the_probed_step_is_exact_and_packs_nothing_that_was_kept_before(make):
    model, _, x = made(make)
    dense = make()
    dense.load_state_dict(model.state_dict())
    with SavedTensorMeter(dense, x) as meter:
        expected = dense(x).square().sum()
    before = meter.report().total_bytes
    state = torch.get_rng_state()
    with HolderProbe(model, x), SavedTensorMeter(model, x) as meter:
        loss = model(x).square().sum()
    assert torch.equal(torch.get_rng_state(), state)
    report = meter.report()
    assert report.total_bytes == before
    assert report.stored_bytes == report.dense_bytes
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, list(dense.parameters())), rtol=0, atol=0)
    assert model.fc.sparsity == model.in_.sparsity == 0.6


@pytest.mark.parametrize("make", [KeptFeatures, NormReadsResidual])
def test_a_holder_that_comes_later_changes_the_weight_gradient_of_the_step_alone(make):
    model, _, x = made(make)
    dense = make()
    dense.load_state_dict(model.state_dict())
    with HolderProbe(model, x):
        loss = model(x).square().sum()
    expected = dense(x).square().sum()
    expected.backward()
    loss.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (name != "fc.weight"), name


def test_nothing_is_kept_alive():
    model, _, x = made(Step)
    with HolderProbe(model, x) as probe:
        h = F.gelu(model.in_(x))
        alive = weakref.ref(h)
        storage = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
        out = model.fc(h)
        del h
        gc.disable()
        try:
            assert alive() is None
            assert storage.expired()
        finally:
            gc.enable()
    del out
    batch = weakref.ref(x)
    del x
    assert batch() is None
    assert probe.ran
    assert [layer.fqn for layer in probe.held] == ["in_"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_all_as_it_was(error: type[BaseException]):
    def fail(*args):
        raise error

    model, _, x = made(Relu)
    handle = model.fc.register_forward_hook(fail)
    with pytest.raises(error), HolderProbe(model, x):
        model(x)
    handle.remove()
    assert model.fc.sparsity == model.in_.sparsity == 0.6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(x).sum().backward()
    assert packed


def test_a_module_that_takes_no_hooks_leaves_none_on_the_others():
    class Refusing(nn.Identity):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks")

    model, _, x = made(Step)
    model.refusing = Refusing()
    with pytest.raises(RuntimeError, match="no hooks"):
        HolderProbe(model, x).__enter__()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_probes_and_meters_see_the_same_and_close_in_any_order(order: tuple[int, ...]):
    model, _, x = made(Relu)
    alone = SavedTensorMeter(model, x)
    contexts = [HolderProbe(model, x), SavedTensorMeter(model, x), HolderProbe(model, x)]
    for context in contexts:
        context.__enter__()
    model(x).sum()
    for number in order:
        contexts[number].__exit__(None, None, None)
    assert [len(contexts[number].held) for number in (0, 2)] == [2, 2]
    for layer in (model.in_, model.fc):  # as the probes had them run
        layer.sparsity = 0.0
    with alone:
        model(x).sum()
    assert contexts[1].report().total_bytes == alone.report().total_bytes
    assert torch.overrides._get_current_function_mode() is None
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_copied_or_pickled_in_the_probed_step_takes_no_hook_along():
    model, _, x = made(Relu)
    with HolderProbe(model, x):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for module in copies:
        assert not any("HolderProbe" in repr(vars(m)) for m in module.modules())
        module(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_scripted_modules_take_no_hooks_and_need_none():
    scripted = torch.jit.trace(nn.GELU(), torch.randn(3, 64))
    model = nn.Sequential(scripted, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    convert(model, sparsity=0.6)
    assert held(model, torch.randn(3, 64)) == {"3": BY + "'2' (relu)"}
