"""``cuda_graphs=True``: fits equal those without it bit for bit, while modules are replayed, on CPUs by a stand-in."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.callbacks import cuda_graphs, host_wait
from lightning_actprune.callbacks.cuda_graphs import GraphedSteps, why_eager, why_module_eager
from lightning_actprune.callbacks.host_wait import HostWait
from lightning_actprune.replay.graph import CudaRecorder
from lightning_actprune.schedules import StepSchedule
from tests.support.helpers import FEATURES, ByHand, Net, all_traces, fit, loader
from tests.support.marks import only
from tests.support.tape import TapeRecorder

STEPS = 24


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    monkeypatch.setattr(GraphedSteps, "recorder", TapeRecorder)


class Blocks(Net):
    """Calls one module by a keyword and in parts, and a layer, without BatchNorm: its statistics differ on a tape."""

    def make(self) -> None:
        block = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.2))
        self.body = self.backbone = nn.Sequential(block, copy.deepcopy(block), nn.LayerNorm(FEATURES))
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.body[0](x)
        return self.head(self.body[2](self.body(input=x))).mean(1)

    def train_dataloader(self) -> Any:
        return loader(4 * STEPS - 2, 4)


def run(pruning: ActivationPruning, *callbacks: pl.Callback, classes: Any = (Blocks,), **options: Any) -> Any:
    """Fit a model; return its losses and weights, and how often modules were replayed."""
    torch.manual_seed(0)
    model, losses, replays, seen = type("Model", classes, {})(), list[Tensor](), dict[str, int](), list[bool]()
    notes = LambdaCallback(
        on_train_batch_start=lambda trainer, model, batch, n: n or torch.manual_seed(trainer.current_epoch),
        on_train_batch_end=lambda trainer, model, outputs, *_: losses.extend(outputs.values() if outputs else ()),
        on_validation_batch_start=lambda _, model, *others: seen.append(type(model.body) is not nn.Sequential),
        on_train_end=lambda *_: replays.update(
            {each.name: each.replays for _, each in getattr(pruning._graphs, "_replays", ())}
        ),
        on_train_epoch_end=lambda _, model: seen.append(b"lightning_actprune" in pickle.dumps(model.body)),
    )
    before = all_traces(model.body)
    fit(model, pruning, *callbacks, notes, **options)
    assert (all_traces(model.body), any(seen)) == (before, False)
    return [losses, model.state_dict()], replays


CASES: dict[str, tuple[Any, ...]] = {
    "schedule": ({"sparsity": StepSchedule([0.2, 0.5], at=[0.5])}, {}),
    "accumulation": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 9}),
    "budget": ({"memory_budget": 0.95}, {}),
    "EMA": ({"preset": "max"}, {"precision": "bf16-mixed"}, lambda: EMAWeightAveraging(decay=0.5)),
    "finetuning": ({"preset": "max"}, {"max_epochs": 2}, lambda: BackboneFinetuning(1, backbone_initial_lr=0.01)),
    "monitor": ({"preset": "max"}, {"max_epochs": 2}, lambda: ActivationMemoryMonitor(verbose=0)),
    "by hand": ({"preset": "max"}, {"val_check_interval": 9, "classes": (ByHand, Blocks)}),
}


@pytest.mark.parametrize("case", only(CASES, "schedule", rest="integration"))
def test_a_fit_is_the_same(case):
    arguments, options, *others = CASES[case]
    expected, none = run(ActivationPruning(**arguments, verbose=0), *(make() for make in others), **options)
    result, replays = run(
        ActivationPruning(**arguments, cuda_graphs=True, verbose=0), *(make() for make in others), **options
    )
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert none == {}
    assert (list(replays), replays["body"] > 0) == (["body"], True)


@pytest.mark.integration
def test_fits_in_a_row_and_from_a_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO")
    pruning, path = ActivationPruning("max", cuda_graphs=True, verbose=0), tmp_path / "epoch=0.ckpt"
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 2}
    whole, _ = run(pruning, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), **saves)
    again, _ = run(pruning, max_epochs=2)
    resumed, replays = run(ActivationPruning("max", cuda_graphs=True), ckpt=path, max_epochs=2)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    torch.testing.assert_close(resumed, [whole[0][STEPS:], whole[1]], rtol=0, atol=0)
    assert replays["body"] > 0
    saved = torch.load(path)
    assert saved["callbacks"][pruning.state_key].keys() == ActivationPruning("max").state_dict().keys()
    assert saved["state_dict"].keys() == Blocks().state_dict().keys()
    (shown,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert ("body" in shown, "1 graph," in shown, "head" in shown) == (True, True, True)


def test_an_error_leaves_the_model_as_it_was():
    def fail(trainer: pl.Trainer, model: Blocks, *_: Any) -> None:
        if trainer.global_step == STEPS // 2:
            raise KeyError(*vars(model.body).keys() & {"_replay"})

    model, pruning = Blocks(), ActivationPruning("max", cuda_graphs=True, verbose=0)
    before = all_traces(model.body)
    with pytest.raises(KeyError, match="_replay"):
        fit(model, pruning, LambdaCallback(on_train_batch_end=fail))
    assert all_traces(model.body) == before
    assert vars(pruning._graphs) == vars(GraphedSteps())


def test_reasons_to_stay_eager(monkeypatch):
    model, one = Net(), SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    for strategy in DDPStrategy, FSDPStrategy, ModelParallelStrategy:
        steps, several = GraphedSteps(), SimpleNamespace(strategy=strategy(), accumulate_grad_batches=1)
        assert strategy.__name__ in steps.batch_starts(several, model, 0)
        assert steps.batch_starts(several, model, 1) == ""
    assert why_eager(one, model, needs_cuda=False) == why_module_eager(model.body) == ""
    assert "cpu" in why_eager(one, model)
    assert "ScriptModule" in why_module_eager(torch.jit.script(nn.Linear(1, 1)))
    model.body[0].compile()
    assert "reduce-overhead" in why_module_eager(model.body)
    convert(model, "max", rules={"body.*": None})
    assert why_module_eager(model.head)
    monkeypatch.setattr(cuda_graphs, "DTensor", nn.Parameter)
    assert "DTensor" in why_module_eager(nn.Linear(1, 1))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_that_waits_for_python_is_noticed_once(monkeypatch, caplog, compiled):
    """With a clock on which the host takes 10 ms to launch a step, and the GPU 6 ms for its work."""
    caplog.set_level("INFO")
    clock = SimpleNamespace(now=0.0, ahead=0.0)

    class Moment(SimpleNamespace):
        def elapsed_time(self, other: Moment) -> float:
            return other.at - self.at

        def synchronize(self) -> None:
            pass

    def end(*_: Any) -> None:
        clock.now, clock.ahead = clock.now + max(10 - clock.ahead, 6), 0

    monkeypatch.setattr(host_wait, "why_eager", lambda *_: "")
    monkeypatch.setattr(host_wait, "moment", lambda: Moment(at=clock.now))
    monkeypatch.setattr(host_wait, "delay", lambda ms: setattr(clock, "ahead", ms))
    model = Blocks()
    if compiled:
        model.body[0].compile(backend="aot_eager")
    fit(model, LambdaCallback(on_train_batch_end=end), pruning := ActivationPruning("max"))
    [told] = [each.message for each in caplog.records if "waits for Python" in each.message]
    assert ("cuda_graphs" in told, "reduce-overhead" in told) == (not compiled, compiled)
    assert "40.0 % of a step of 10 ms" in told
    assert vars(pruning._graphs) == vars(HostWait())
    assert host_wait.describe_wait(10, 9.6, "") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("preset", ["max", "recompute"])
def test_a_fit_on_a_gpu_is_the_same(monkeypatch, precision, preset):
    monkeypatch.setattr(GraphedSteps, "recorder", CudaRecorder)
    options: dict[str, Any] = {"accelerator": "gpu", "max_epochs": 4}
    found = []
    for graphs in False, True:
        scaler = torch.amp.GradScaler("cuda", 2.0**28)  # with which the gradients of the first steps are infinite
        half = {"plugins": MixedPrecision("16-mixed", "cuda", scaler)} if precision == "16-mixed" else {}
        pruning = ActivationPruning(preset, cuda_graphs=graphs, verbose=0)
        found.append(run(pruning, **options, **(half or {"precision": precision})))
    (expected, _), (result, replays) = found
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert replays["body"] > 3 * STEPS
