"""Scopes of SavedTensorCompression: which modules they are of, when they open and close, and that nothing stays."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.codec import dispatch
from lightning_actprune.config import Keep
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.checkpointing import WAYS
from tests.support.compression import SHAPE, Runs, activation, gradients, made, packed, top_hooks, typical
from tests.support.helpers import assert_plain

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


def test_rows_name_children_and_what_has_children():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(64), nn.GELU()), nn.SiLU())
    with SavedTensorCompression(model, Keep(bits=4), min_values=256) as saving:
        for _ in range(2):
            model(activation())
    stored = SHAPE[0] * SHAPE[1] * 2 * 18
    found = [(r.fqn, r.shape, r.dtype, r.count, r.dense_bytes, r.stored_bytes) for r in saving.rows]
    assert found == [
        ("0", SHAPE, torch.float32, 4, 4 * 4 * 80 * 64, 4 * stored),
        ("1", SHAPE, torch.float32, 2, 2 * 4 * 80 * 64, 2 * stored),
    ]


def test_what_is_saved_while_dense_modules_run_is_left_alone():
    """Of the model itself what it saves, and not what is in it."""
    model = Runs(lambda x: model.child(x).square())
    model.child = nn.Sequential(nn.LayerNorm(64))
    for dense, names in (("", {"child", "(root)"}), ("(root)", {"child"}), ("child", {"(root)"})):
        with SavedTensorCompression(model, min_values=256, dense=dense.__eq__) as saving:
            model(activation())
        assert {row.fqn for row in saving.rows} == names


def test_children_and_what_has_children_may_be_called_from_outside():
    model = nn.Sequential(nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.GELU()))}), nn.SiLU())
    with SavedTensorCompression(model, min_values=256) as saving:
        for module in (model[1], model[0]["a"], model[0]["a"][0]):
            module(activation())
    assert [row.fqn for row in saving.rows] == ["1", "0.a.0"]
    assert saving.rows[1].count == 2


def test_scopes_in_scopes():
    model = made()
    outer, inner = (SavedTensorCompression(module, min_values=256) for module in (model, model[1]))
    with outer, inner:
        gradients(model, activation())
        assert packed(inner) == 1
        assert packed(outer) == 2
        assert top_hooks() is None
        with SavedTensorCompression(model, min_values=256):  # a second one of the same module
            for _ in range(3):
                gradients(model, activation())
                assert dispatch._thread.hooks == []
                assert top_hooks() is None


def test_attaching_twice_is_once_and_detaching_leaves_no_trace():
    model = made()
    saving = SavedTensorCompression(model, min_values=256).attach().attach()
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    saving.detach()
    saving.detach()
    hooks = "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"
    assert not any(getattr(module, name) for module in model.modules() for name in hooks)
    assert_plain(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_keeps_and_decides_nothing_and_leaves_no_hooks_open(error: type[BaseException]):
    """Torch runs no forward hooks after an interruption: what it leaves open, ``detach`` closes."""

    def run(x: Tensor, gamma: Tensor) -> Tensor:
        y = x * gamma
        alive.append(StorageWeakRef(y.untyped_storage()))
        y = y.square()  # a first forward does not know yet how its input is kept
        if fails:
            raise fails.pop()
        return y

    model, fails, alive = nn.Sequential(nn.GELU(), Runs(run, (64,))), [error], []
    saving = SavedTensorCompression(model, min_values=256).attach()
    with pytest.raises(error):
        model(activation())
    assert (top_hooks() is None) == (error is ValueError)
    assert packed(saving) == 1
    gc.collect()
    assert alive[0].expired() or error is KeyboardInterrupt
    model(activation())
    assert [(row.fqn, row.count) for row in saving.rows] == [("0", 2), ("1", 2)]
    assert saving.left == []
    saving.detach()
    assert top_hooks() is None


def test_a_hook_that_raises_before_ours_leaves_the_scope_closed_and_usable():
    model = made()
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with SavedTensorCompression(model, min_values=256) as saving:
        with pytest.raises(ZeroDivisionError):
            model(activation())
        assert top_hooks() is None
        handle.remove()
        model(activation())
        assert packed(saving) == 3


def test_where_hooks_are_disabled_nothing_is_packed():
    model = made()
    with SavedTensorCompression(model, min_values=256) as saving:
        with disable_saved_tensors_hooks("none in here"):
            gradients(model, activation())
        assert saving.rows == []
        grads = torch.func.grad(lambda x: model(x).sum())(torch.randn(SHAPE))  # opened by the transform, outside
    assert grads.shape == SHAPE
    assert saving.rows == []


def test_copies_and_pickles_have_hooks_that_do_nothing():
    model = made()
    with SavedTensorCompression(model, min_values=256) as saving:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(activation()).sum().backward()
        assert saving.rows == []


def test_threads_have_scopes_of_their_own():
    model, seen = made(), []
    running, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            running.set()
            assert go_on.wait(60)

    x, copied = activation(), copy.deepcopy(model)
    with SavedTensorCompression(nn.ModuleList([model, copied]), min_values=256) as saving:
        expected = gradients(model, x)
        copied[1].register_forward_pre_hook(wait)
        thread = threading.Thread(target=lambda: seen.append(gradients(copied, x)))
        thread.start()
        assert running.wait(60)
        assert top_hooks() is None  # of this thread, while the other one is in its scope
        again = gradients(model, x)
        go_on.set()
        thread.join()
    assert packed(saving) == 9
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=0)


def test_nothing_is_kept_alive_and_no_cycle_is_made():
    model, alive = made(), []
    for layer in model:
        layer.register_forward_hook(lambda module, args, y: alive.append(StorageWeakRef(y.untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        with SavedTensorCompression(model, min_values=256) as saving:
            model(activation()).sum()
        assert not saving._packed._storages
        assert not saving._uncompressed._storages
        assert [storage.expired() for storage in alive] == [True] * len(model)
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_checkpoints_run_again_exactly_and_nothing_in_them_is_packed(way):
    """With the scope inside and around, where what is beside the checkpoint is packed."""
    inner, x = nn.Sequential(nn.LayerNorm(64), nn.GELU()), activation()
    region = way(inner)
    expected = gradients(region, x, lambda y: y.square().sum())
    for attached in (region, inner):
        with SavedTensorCompression(attached, min_values=256) as saving:
            found = gradients(region, x, lambda y: y.square().sum())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert packed(saving) == 0
        assert top_hooks() is None
    beside = nn.Sequential(nn.LayerNorm(64), region, nn.SiLU())
    expected = gradients(beside, x)
    with SavedTensorCompression(beside, min_values=256) as saving:
        for count in (1, 2, 3):  # the input of the norm waits while the region runs
            found = gradients(beside, x)
            assert [(row.fqn, row.count) for row in saving.rows] == [("0", count), ("2", count)]
    for gradient, exact in zip(found, expected, strict=True):
        assert (gradient - exact).norm() <= 3 * typical(8) * exact.norm()


@pytest.mark.integration
@pytest.mark.parametrize(("backend", "attached_first"), [("eager", True), ("aot_eager", False), ("aot_eager", True)])
def test_a_compiled_region_in_scope_is_left_alone(backend: str, attached_first: bool):
    torch._dynamo.reset()
    inner, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)), activation()
    model = nn.Sequential(nn.SiLU(), torch.compile(inner, backend=backend))
    expected = gradients(model, x)
    if attached_first:
        torch._dynamo.reset()
    with SavedTensorCompression(model, min_values=256) as saving:
        found = gradients(model, x)
    names = {row.fqn for row in saving.rows}
    assert names > {"0"} if backend == "eager" else names == {"0"}  # eager: plain operations, in a graph of Dynamo's
    if backend != "eager":
        torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)
    assert (found[0] - expected[0]).norm() <= 3 * typical(8) * expected[0].norm()


@pytest.mark.integration
def test_a_scope_inside_a_compiled_region_does_nothing_and_breaks_no_graph():
    torch._dynamo.reset()
    inner = made()
    with SavedTensorCompression(inner, min_values=256) as saving:
        torch.compile(inner.__call__, backend="aot_eager", fullgraph=True)(activation()).sum().backward()
    assert saving.rows == []
    assert top_hooks() is None
