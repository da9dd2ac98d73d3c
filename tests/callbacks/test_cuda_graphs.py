"""``cuda_graphs=True``: fits equal those without it bit for bit, while modules are replayed, on CPUs by a stand-in."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.callbacks import cuda_graphs
from lightning_actprune.callbacks.cuda_graphs import GraphedSteps, OutermostCalls, why_eager, why_module_eager
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.schedules import StepSchedule
from tests.support.helpers import FEATURES, ByHand, Net, all_traces, fit, loader
from tests.support.marks import only

STEPS = 24


class Again:
    """Stands for a recorder on CPUs: a replay runs the work again and writes to what it returned at first."""

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = run()
        own = [y.detach() for y in tensors_in(results)]

        def replay() -> None:
            with torch.enable_grad():
                new = list(tensors_in(run()))
            with torch.no_grad():
                for mine, y in zip(own, new, strict=True):
                    mine.copy_(y)

        return replay, results


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphedSteps, "recorder", Again)


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Dropout(0.2))


class Blocks(Net):
    """Calls a module of blocks with dropout and a norm that counts, and a layer; its last batch is smaller."""

    raises: BaseException | None = None

    def make(self) -> None:
        self.body = self.backbone = nn.Sequential(block(), block(), nn.BatchNorm1d(8))
        self.head = nn.Linear(FEATURES, 4)
        self.losses, self.validated = list[Any](), set[str]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            torch.manual_seed(self.current_epoch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"]] if outputs else []
        if self.raises is not None and batch_idx == STEPS // 2:
            assert "_replay" in vars(self.body)
            raise self.raises

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated |= {type(module).__name__ for module in self.modules()} | vars(self.body).keys()
        super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return loader(4 * STEPS - 2, 4)


class TwoOptimizers(ByHand, Blocks):
    """Steps each by hand."""


def run(pruning: ActivationPruning, *callbacks: pl.Callback, model: Blocks | None = None, **options: Any) -> Any:
    """Fit a model; return it, its losses and weights, and how often modules were replayed."""
    torch.manual_seed(0)
    model = model or Blocks()
    before, counts = all_traces(model.body), list[int]()

    def note(*_: Any) -> None:
        counts.extend(replay.replays for _, replay in pruning._graphs._replays)
        assert b"lightning_actprune" not in pickle.dumps(model.body)

    fit(model, pruning, *callbacks, LambdaCallback(on_train_end=note), **options)
    assert all_traces(model.body) == before
    assert not [name for name in model.validated if "eplay" in name]
    return model, [model.losses, {name: value.clone() for name, value in model.state_dict().items()}], sum(counts)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], list[pl.Callback]]]] = {
    "validation": ({"preset": "max"}, {"val_check_interval": 9}, list),
    "accumulation": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, list),
    "recompute": ({"preset": "recompute"}, {"precision": "bf16-mixed"}, list),
    "schedule": ({"sparsity": StepSchedule([0.2, 0.5], at=[0.5])}, {}, list),
    "budget": ({"memory_budget": 0.95}, {}, list),
    "EMA": ({"preset": "max"}, {}, lambda: [EMAWeightAveraging(decay=0.5)]),
    "finetuning": ({"preset": "max"}, {"max_epochs": 2}, lambda: [BackboneFinetuning(1, backbone_initial_lr=0.01)]),
    "monitor": ({"preset": "max"}, {"max_epochs": 2}, lambda: [ActivationMemoryMonitor(verbose=0)]),
    "by hand": ({"preset": "max"}, {"val_check_interval": 9}, list),
}


@pytest.mark.parametrize("case", only(CASES, "schedule", rest="integration"))
def test_a_fit_is_the_same(case: str):
    arguments, options, others = CASES[case]
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = TwoOptimizers() if case == "by hand" else Blocks()
        pruning = ActivationPruning(**arguments, cuda_graphs=graphs, verbose=0)
        found.append(run(pruning, *others(), model=model, **options)[1:])
    (expected, none), (result, replays) = found
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert none == 0 < replays


@pytest.mark.integration
def test_fits_in_a_row_and_from_a_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO")
    pruning = ActivationPruning("max", cuda_graphs=True, verbose=0)
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    _, whole, _ = run(pruning, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_epochs=2, **saves)
    _, again, _ = run(pruning, max_epochs=2)
    first = torch.load(tmp_path / "epoch=0.ckpt")
    assert first["callbacks"][pruning.state_key].keys() == ActivationPruning("max").state_dict().keys()
    assert first["state_dict"].keys() == Blocks().state_dict().keys()
    _, resumed, replays = run(ActivationPruning("max", cuda_graphs=True), ckpt=tmp_path / "epoch=0.ckpt", max_epochs=2)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)
    torch.testing.assert_close(resumed, [whole[0][STEPS:], whole[1]], rtol=0, atol=0)
    assert replays > 0
    (shown,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert ("body" in shown, "1 graph," in shown, "head" in shown) == (True, True, True)


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_an_error_leaves_the_model_as_it_was(error: BaseException):
    model, pruning = Blocks(), ActivationPruning("max", cuda_graphs=True, verbose=0)
    before, model.raises = all_traces(model.body), error
    with pytest.raises((ValueError, SystemExit, KeyboardInterrupt)):
        fit(model, pruning)
    assert all_traces(model.body) == before
    assert vars(pruning._graphs) == vars(GraphedSteps())


class Calls(Net):
    """Calls modules by name, also in parts and without a gradient, and a loss that has no parameters."""

    def make(self) -> None:
        self.outer, self.loss = nn.ModuleDict({"inner": nn.Linear(FEATURES, 4), "frozen": block()}), nn.MSELoss()
        self.outer.forward = lambda *, x: self.outer["inner"](x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            x = self.outer["frozen"](batch)
        return self.loss(self.outer(x=x), self.outer["inner"](x))


def test_the_outermost_modules_with_parameters_are_found():
    model = Calls()
    calls = OutermostCalls(model)
    model.training_step(torch.randn(2, FEATURES), 0)
    calls.close()
    assert calls.modules == {model.outer, model.outer["inner"]}  # of which the inner one is left to the other
    steps = GraphedSteps()
    steps._replay(model, calls.modules)
    assert [replay.name for _, replay in steps._replays] == ["outer"]
    steps.end()
    assert all_traces(model.outer) == all_traces(Calls().outer)


def test_reasons_to_stay_eager(monkeypatch: pytest.MonkeyPatch):
    model, one = Net(), SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    for strategy in DDPStrategy, FSDPStrategy, ModelParallelStrategy:
        steps, several = GraphedSteps(), SimpleNamespace(strategy=strategy())
        assert strategy.__name__ in steps.batch_starts(several, model)
        assert steps.batch_starts(several, model) == ""
    assert why_eager(one, model, needs_cuda=False) == why_module_eager(model.body) == ""
    assert "cpu" in why_eager(one, model)
    model.body[0].compile()
    assert "reduce-overhead" in why_module_eager(model.body)
    convert(model, "max", rules={"body.*": None})
    assert why_module_eager(model.head)
    monkeypatch.setattr(cuda_graphs, "DTensor", nn.Parameter)
    assert "DTensor" in why_module_eager(nn.Linear(1, 1))
