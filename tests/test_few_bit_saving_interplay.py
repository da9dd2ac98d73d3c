"""FewBitSaving among others: other hooks, autocast, threads, copies, errors, Lightning."""

from __future__ import annotations

import copy
import gc
import io
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune import HolderProbe, convert
from lightning_actprune.few_bit_saving import FewBitSaving
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.step_recorder import StepMemoryRecorder
from tests.few_bit_saving import DENSE, SHAPE, STORED, Runs, activation, gradients, made, packed, top_hooks, typical
from tests.helpers import Net, assert_plain, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


def test_a_meter_counts_what_is_kept():
    model, x = made(), activation().detach()
    totals = []
    for saving in (None, FewBitSaving(model, min_values=256)):
        if saving is not None:
            saving.attach()
        with SavedTensorMeter(model, x) as meter, StepMemoryRecorder(model, x) as recorder:
            loss = model(x.clone().requires_grad_() * 1).sum()
        loss.backward()
        totals.append(meter.report().total_bytes)
        if saving is not None:
            saving.detach()
    dense_bytes = sum(row.dense_bytes for row in saving.rows)
    stored_bytes = sum(row.stored_bytes for row in saving.rows)
    # The inputs of the norm, of the GELU and of the first layer; that of the second is kept by the ReLU.
    assert (dense_bytes, stored_bytes) == (3 * DENSE, 3 * STORED)
    assert totals[0] - totals[1] == dense_bytes - stored_bytes
    assert recorder.result() is not None


def test_a_meter_and_a_probe_see_that_a_pruned_layer_shares_its_input_with_nobody_dense():
    """The norm keeps the same tensor, in few bits: pruning the layer is worth it."""

    def run(x: Tensor) -> Tensor:
        x = x.sin()
        return layer(x) + F.layer_norm(x, (64,), weight)

    layer, weight = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
    model = Runs(run)
    model.layer = layer
    report = convert(model, sparsity=0.6)
    for saving, held in ((None, ["layer"]), (FewBitSaving(model, min_values=256), [])):
        if saving is not None:
            saving.attach()
        with HolderProbe(model) as probe:
            model(activation()).sum().backward()
        assert [skipped.fqn for skipped in probe.held] == held
    assert len(report.converted) == 1


def test_a_meter_credits_what_waits_to_the_module_that_saved_it():
    """Query, key and value of an attention wait until its projection is called, which keeps an input of its own."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return self.proj(F.scaled_dot_product_attention(q, k, v).squeeze(1))

    model, x = nn.Sequential(Attention()), activation()
    convert(model, 0.0, value_format="int2", others={"rest": "int8"})
    model._few_bit_savings.popitem()[1].detach()
    for watched in (False, True):
        with FewBitSaving(model, min_values=256) as saving:
            if watched:
                with SavedTensorMeter(model) as meter:
                    model(x)
            else:
                model(x)
        assert sum(row.stored_bytes for row in saving.rows) == 4 * STORED
    assert [(row.fqn, row.stored_bytes) for row in meter.report().rows] == [
        ("0.qkv", 80 * 2 * (8 + 2)),
        ("0.proj", 80 * 2 * (8 + 2)),
    ]


def test_what_pruned_layers_return_is_packed():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    convert(model, sparsity=0.5)
    with FewBitSaving(model, min_values=256) as saving:
        model(activation())
    assert [(row.fqn, row.shape) for row in saving.rows] == [("1", SHAPE)]


def test_pruned_layers_share_their_input_in_a_scope_too():
    model = Runs(lambda x: sum(layer(x) for layer in layers))
    layers = model.layers = nn.ModuleList(nn.Linear(64, 48) for _ in range(3))
    convert(model, sparsity=0.6)
    totals = []
    for saving in (FewBitSaving(nn.Linear(1, 1)), FewBitSaving(model, min_values=256)):
        with saving, SavedTensorMeter(model) as meter:
            model(activation())
        totals.append(meter.report().total_bytes)
        assert saving.rows == []
    assert totals[0] == totals[1] < DENSE


def test_save_on_cpu_gets_the_packed_values():
    model, x = made(), activation()
    with FewBitSaving(model, min_values=256):
        expected = gradients(model, x)
        with save_on_cpu():
            made_gradients = gradients(model, x)
    torch.testing.assert_close(made_gradients, expected, rtol=0, atol=0)


def test_hooks_around_get_packed_values_once_and_all_else_as_it_is():
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor.detach().clone()

    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x * w + x * w).relu()

    model, x = Runs(run, (64,)), activation()
    with FewBitSaving(model, min_values=256) as saving:
        expected = gradients(model, x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
        assert packed(saving) == 2
    assert sorted(sizes) == [256, 256, STORED, DENSE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_copies_that_layers_keep_are_packed_and_those_of_weights_are_not(dtype: torch.dtype):
    model, x = made(), activation()
    with torch.autocast("cpu", dtype):
        expected = gradients(model, x)
        with FewBitSaving(model, min_values=256) as saving:
            made_gradients = gradients(model, x)
    assert {(row.fqn, row.dtype) for row in saving.rows} >= {("0", torch.float32), ("2", dtype)}
    assert all(row.shape not in {(64, 48), (48, 64)} for row in saving.rows)
    for gradient, exact in zip(made_gradients, expected, strict=True):
        most = 3 * typical("int8") + 4 * torch.finfo(dtype).eps
        assert (gradient - exact).norm() <= most * exact.norm()


def test_scopes_in_scopes():
    model = made()
    with FewBitSaving(model, min_values=256) as outer, FewBitSaving(model[1], min_values=256) as inner:
        gradients(model, activation())
        assert packed(inner) == 1
        assert packed(outer) == 2
        assert top_hooks() is None


def test_layers_without_weights_yet_are_taken():
    model = nn.Sequential(nn.LazyLinear(48), nn.GELU())
    with FewBitSaving(model, min_values=256) as saving:
        model(activation())
    assert [row.fqn for row in saving.rows] == ["0", "1"]


def test_attaching_twice_is_once_and_detaching_leaves_no_trace():
    model = made()
    saving = FewBitSaving(model, min_values=256).attach().attach()
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    saving.detach()
    saving.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    assert_plain(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_no_hooks_open(error: type[BaseException]):
    """Torch runs no forward hooks after an interruption: what it leaves open, ``detach`` closes."""

    def run(x: Tensor) -> Tensor:
        raise error

    model = nn.Sequential(nn.GELU(), Runs(run))
    saving = FewBitSaving(model, min_values=256).attach()
    with pytest.raises(error):
        model(activation())
    assert (top_hooks() is None) == (error is ValueError)
    saving.detach()
    assert top_hooks() is None
    assert packed(saving) == 1


def test_a_hook_that_raises_before_ours_leaves_the_scope_closed_and_usable():
    model = made()
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with FewBitSaving(model, min_values=256) as saving:
        with pytest.raises(ZeroDivisionError):
            model(activation())
        assert top_hooks() is None
        handle.remove()
        model(activation())
        assert packed(saving) == 3


def test_where_hooks_are_disabled_nothing_is_packed():
    model = made()
    with FewBitSaving(model, min_values=256) as saving:
        with disable_saved_tensors_hooks("none in here"):
            gradients(model, activation())
        assert saving.rows == []
        grads = torch.func.grad(lambda x: model(x).sum())(torch.randn(SHAPE))  # opened by the transform, outside
    assert grads.shape == SHAPE
    assert saving.rows == []


def test_copies_and_pickles_have_hooks_that_do_nothing():
    model = made()
    buffer = io.BytesIO()
    with FewBitSaving(model, min_values=256) as saving:
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            other(activation()).sum().backward()
        assert saving.rows == []


def test_threads_have_scopes_of_their_own():
    model, seen = made(), []
    running, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            running.set()
            assert go_on.wait(60)

    def other() -> None:
        seen.append(gradients(copied, x))

    x = activation()
    copied = copy.deepcopy(model)
    with FewBitSaving(nn.ModuleList([model, copied]), min_values=256) as saving:
        expected = gradients(model, x)
        copied[1].register_forward_pre_hook(wait)
        thread = threading.Thread(target=other)
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
    model = made()
    alive = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(StorageWeakRef(output.untyped_storage()))

    for layer in model:
        layer.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        with FewBitSaving(model, min_values=256) as saving:
            loss = model(activation()).sum()
            del loss
        assert saving._stored == saving._dense == {}
        assert [storage.expired() for storage in alive] == [True] * len(model)
    finally:
        gc.enable()


def test_a_second_derivative_is_that_of_the_values_kept():
    model = Runs(lambda x: (x.sin() * x.cos()).sum())
    x = torch.randn(SHAPE, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x * 1), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with FewBitSaving(model, min_values=256) as saving:
        made_gradient = second()
    assert saving.rows
    assert (made_gradient - expected).norm() <= 6 * typical("int8") * expected.norm()


def test_a_fit_whose_training_step_calls_children():
    model = Net()
    with FewBitSaving(model, "int4", min_values=256) as saving:
        trainer().fit(model)
    assert {row.fqn.split(".")[0] for row in saving.rows} >= {"body"}
    assert sum(row.stored_bytes for row in saving.rows) * 4 < sum(row.dense_bytes for row in saving.rows)
    assert_plain(model)
