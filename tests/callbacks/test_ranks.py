"""Fits in two processes: gradients, what is left, and what the processes decide and log together.

One pair of processes runs all fits of an accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, convert
from tests.callbacks.test_loggers import MIB, TOTALS, Noting
from tests.support.budgets import AGAIN
from tests.support.budgets import DENSE as DENSE_STACK
from tests.support.helpers import BATCHES, FEATURES, Net, assert_plain, trainer
from tests.support.ranks import RANKS, STEPS, Case, RankNet, Seen, fit_all, strategy_of
from tests.support.stack import Stack

pytestmark = pytest.mark.integration

ZERO, DEEPSPEED = ("zero1", "zero2"), find_spec("deepspeed") is not None
PRECISIONS = {
    "cpu": {"ddp": ("32-true", "bf16-mixed"), "fsdp2": ("32-true", "bf16-mixed", "bf16-true")},
    "gpu": {
        "ddp": ("32-true", "bf16-mixed", "bf16-true", "16-mixed"),
        "fsdp": ("32-true", "16-mixed", "bf16-mixed"),
        "fsdp2": ("32-true", "bf16-mixed", "bf16-true"),
        **dict.fromkeys(ZERO, ("32-true", "bf16-mixed")),
    },
}
MATRIX = {on: [(name, p) for name, each in found.items() for p in each] for on, found in PRECISIONS.items()}
DENSE, KEEPING, PRUNED = None, {"sparsity": 0.0}, {"sparsity": 0.6}
MAX = {"preset": "max", "sparsity": 0.5}
CLIP = {"norm": (0.1, nn.utils.clip_grad_norm_), "value": (0.002, nn.utils.clip_grad_value_)}
TOKENS = 512
"""Of 64 values: large enough to be packed in compiled code."""


def on(*entries: tuple[str, ...]) -> Any:
    """Parametrize by accelerator and the rest of each entry; those of a GPU carry the mark."""
    marked = [pytest.param(*e, marks=pytest.mark.gpu) if e[0] == "gpu" else e for e in entries]
    return pytest.mark.parametrize(("accelerator", "strategy", "precision")[: len(entries[0])], marked)


on_all = on(*((accelerator, strategy) for accelerator, found in PRECISIONS.items() for strategy in found))


def clipping(strategy: str) -> str:
    return "value" if strategy == "fsdp" else "norm"  # Lightning refuses the norm where parameters are flattened


def accumulated(strategy: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that takes two batches a step, and clips."""
    algorithm = clipping(strategy)
    clip = {"gradient_clip_val": CLIP[algorithm][0], "gradient_clip_algorithm": algorithm}
    return {"accumulate_grad_batches": 2, **clip}


def compiled(strategy: str, pruning: Any, compiles: bool) -> Case:
    return Case(strategy, "32-true", pruning, {}, compiles, TOKENS)


def cases(accelerator: str) -> list[Case | Callable[[Path], Any]]:
    matrix = [entry for entry in MATRIX[accelerator] if entry[0] not in ZERO or DEEPSPEED]
    found = [strategy for strategy in PRECISIONS[accelerator] if strategy not in ZERO or DEEPSPEED]
    of_all = [
        *(Case(*entry, pruning) for entry in matrix for pruning in (DENSE, KEEPING, PRUNED)),
        *(Case(strategy, "32-true", PRUNED, accumulated(strategy)) for strategy in found if strategy not in ZERO),
        *(Case(strategy, "32-true", MAX) for strategy in found),
        *(Case("tensor", "32-true", pruning) for pruning in (DENSE, KEEPING, PRUNED)),
    ]
    if accelerator == "gpu":
        return of_all
    both = [({"preset": "max"}, False), ({"preset": "max"}, True), (None, False), (None, True)]
    of_all += [compiled(strategy, *each) for strategy in ("ddp", "fsdp2") for each in both]
    return [*of_all, decided_by_energy, measured_alone, with_a_budget]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Mapping[str, list[Any]]]:
    """Return, for an accelerator, what two processes have seen of all cases, which they run when first asked."""

    @functools.cache
    def run(accelerator: str) -> Mapping[str, list[Any]]:
        if accelerator == "gpu" and torch.cuda.device_count() < RANKS:
            pytest.skip(f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
        made = cases(accelerator)
        names = [repr(case) if isinstance(case, Case) else case.__name__ for case in made]
        return dict(zip(names, fit_all(made, accelerator, tmp_path_factory.mktemp("ranks")), strict=True))

    return run


def seen(runs: Any, accelerator: str, case: Case | Callable[[Path], Any]) -> list[Any]:
    """Return what each process has seen of a case that went well."""
    if isinstance(case, Case) and case.strategy in ZERO and not DEEPSPEED:
        pytest.skip("needs deepspeed")
    found = runs(accelerator)[repr(case) if isinstance(case, Case) else case.__name__]
    errors = [of_rank.error for of_rank in found if isinstance(of_rank, Seen) and of_rank.error is not None]
    assert not errors, errors[0]
    return found


def assert_equal(found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]) -> None:
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)


@on(*((accelerator, *entry) for accelerator, entries in MATRIX.items() for entry in entries))
def test_at_sparsity_0_a_run_is_the_dense_one_and_pruned_ones_are_alike(runs, accelerator, strategy, precision):
    dense, keeping, (first, second) = (
        seen(runs, accelerator, Case(strategy, precision, pruning)) for pruning in (DENSE, KEEPING, PRUNED)
    )
    for ours, theirs in zip(keeping, dense, strict=True):
        assert ours.layers == [["ActivationPrunedLinear"] * 3] * STEPS
        assert_equal(ours.gradients, theirs.gradients)
        assert_equal([ours.state], [theirs.state])
    assert first.layers == second.layers == [["ActivationPrunedLinear"] * 3] * STEPS
    assert len(first.gradients) == STEPS
    assert_equal(first.gradients, second.gradients)
    for name in dense[0].state:
        if name.endswith("weight"):
            assert not torch.equal(first.gradients[0][name], dense[0].gradients[0][name])
    assert all(grad.isfinite().all() for grad in first.gradients[-1].values())
    assert first.metrics["actprune/saved_frac"] > 0.3
    names = [name for name in first.metrics if name.startswith("actprune")]
    assert [first.metrics[name] for name in names] == [second.metrics[name] for name in names]
    for ours, theirs in zip((first, second), dense, strict=True):
        assert ours.left == theirs.left
        shapes = [[(k, v.shape, v.dtype) for k, v in of_run.state.items()] for of_run in (ours, theirs)]
        assert shapes[0] == shapes[1]


def by_hand(parts: int, clip: str | None) -> list[dict[str, Tensor]]:
    """Return the gradients of all steps if one process computes those of both and takes their mean."""
    torch.manual_seed(0)
    model = RankNet()
    model.configure_model()
    convert(model, **PRUNED)
    optimizer, gradients = model.configure_optimizers(), []
    x, y = model.train_dataloader().dataset.tensors
    batches = [(x[rank::RANKS].chunk(STEPS), y[rank::RANKS].chunk(STEPS)) for rank in range(RANKS)]
    for step in range(0, STEPS, parts):
        optimizer.zero_grad()
        for part in range(step, step + parts):
            for xs, ys in batches:
                (nn.functional.cross_entropy(model(xs[part]), ys[part]) / (parts * RANKS)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        if clip is not None:
            limit, cut = CLIP[clip]
            cut(model.parameters(), limit)
        optimizer.step()
    return gradients


@on_all
def test_pruned_gradients_are_the_mean_by_hand(runs, accelerator, strategy):
    """Also over several batches, clipped: were clipping another, the steps behind the first would differ."""
    # With DeepSpeed, Lightning divides the loss by the number of batches, and DeepSpeed once more.
    for parts in (1,) if strategy in ZERO else (1, 2):
        options = accumulated(strategy) if parts > 1 else {}
        found = seen(runs, accelerator, Case(strategy, "32-true", PRUNED, options))[0].gradients
        # torch's own bounds for fp32: the same products, summed in another order where threads or GPUs share the work.
        torch.testing.assert_close(found, by_hand(parts, clipping(strategy) if parts > 1 else None))


@on_all
def test_a_preset_in_both_processes(runs, accelerator, strategy):
    first, second = seen(runs, accelerator, Case(strategy, "32-true", MAX))
    dense = seen(runs, accelerator, Case(strategy, "32-true", DENSE))
    assert_equal(first.gradients, second.gradients)
    assert not torch.equal(first.gradients[0]["body.0.weight"], dense[0].gradients[0]["body.0.weight"])
    assert [first.left, second.left] == [of_rank.left for of_rank in dense]
    assert list(first.state) == list(dense[0].state)


@on(("cpu",), ("gpu",))
def test_tensor_parallel_layers_are_pruned_on_their_shards(runs, accelerator):
    dense, kept, pruned = (
        seen(runs, accelerator, Case("tensor", "32-true", pruning)) for pruning in (DENSE, KEEPING, PRUNED)
    )
    assert_equal(pruned[0].gradients, pruned[1].gradients)
    for theirs, keeping, ours in zip(dense, kept, pruned, strict=True):
        assert keeping.layers[0] == ours.layers[0] == ["ActivationPrunedLinear"] * 3
        assert keeping.left == ours.left == theirs.left
        assert_equal(keeping.gradients, theirs.gradients)
        for name, gradient in theirs.gradients[0].items():
            exact = name.endswith("bias")
            assert exact == torch.allclose(ours.gradients[0][name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_compiled_models_in_both_processes(runs, strategy):
    """The first step runs eagerly with the callback, so that the second one is compared."""
    one, other = seen(runs, "cpu", compiled(strategy, {"preset": "max"}, True))
    eager, dense = (seen(runs, "cpu", compiled(strategy, pruning, False))[0] for pruning in ({"preset": "max"}, None))
    assert len(one.gradients) == STEPS
    assert_equal(one.gradients, other.gradients)
    assert one.packed == other.packed
    assert "body.*" in one.packed
    assert eager.packed == []
    assert list(one.state) == list(eager.state)
    assert one.left == seen(runs, "cpu", compiled(strategy, None, True))[0].left
    found, exact = (torch.cat([grad.flatten() for grad in of_run.gradients[1].values()]) for of_run in (one, dense))
    assert torch.cosine_similarity(found, exact, 0) > 0.98
    assert not torch.allclose(found, exact, rtol=1e-3)


# What the processes decide and log together: functions that both of them run.


def fit(model: pl.LightningModule, folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    made = trainer(
        *callbacks, strategy=strategy_of("ddp"), devices=RANKS, num_sanity_val_steps=0, limit_val_batches=0,
        default_root_dir=folder, **options,
    )  # fmt: skip
    made.fit(model)
    return made


LIMITS = {"low": 0.1, "high": 0.3}
"""By the layer's name: below and above the share of all samples, which is half of that of the spread ones, .41."""


class Forked(Net):
    """Two layers that read the same input: every other sample has all its energy in one of two blocks."""

    def make(self) -> None:
        self.low, self.high = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (FEATURES,))
        return self.head(nn.functional.gelu(self.low(x)) + nn.functional.gelu(self.high(x))).mean(1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), self.batch_size)  # of which Lightning gives each process every other one


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 8, FEATURES, generator=generator)
    x[::2, :, FEATURES // 2 :] *= 1e-3
    return TensorDataset(x, torch.randint(4, (16,), generator=generator))


def judging() -> list[ActivationPruning]:
    rules = ({name: Keep(4, 0.5, max_dropped_energy=limit), "*": None} for name, limit in LIMITS.items())
    return [ActivationPruning(rules=each, verbose=0) for each in rules]


def decided_by_energy(folder: Path) -> Any:
    callbacks, model, found = judging(), Forked(batch_size=BATCHES), list[Any]()
    model.watch = lambda m: found.append((m.low.sparsity, m.high.sparsity))
    fit(model, folder, *callbacks)
    return {name: share for callback in callbacks for name, share in callback.spread.items()}, found[-1]


@pytest.mark.parametrize(("first", "expected"), [(0, []), (1, ["low", "high"])])
def test_alone_either_process_would_decide_differently(first, expected):
    callbacks = judging()
    trainer(*callbacks).fit(Forked(), DataLoader(Subset(samples(), range(first, 16, 2)), batch_size=4))
    assert [name for callback in callbacks for name in callback.spread] == expected


def test_both_processes_decide_alike_by_the_energy_of_all_their_data(runs):
    first, second = seen(runs, "cpu", decided_by_energy)
    assert first == second
    spread, last = first
    assert last == (0.0, 0.5)
    assert spread.keys() == {"low"}
    assert LIMITS["low"] < spread["low"] < LIMITS["high"]


class MeasuresAlone(ActivationMemoryMonitor):
    """Measures the first epoch on rank zero only."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0 or trainer.current_epoch > 0:
            super().on_train_batch_start(trainer, *args)


class Longer(Net):
    """On rank one an input three times as long, so that the ranks do not store the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0].repeat(1, 1 + 2 * self.global_rank, 1)), batch[1])


def measured_alone(folder: Path) -> Any:
    monitor, logger = MeasuresAlone(verbose=False, log_layers=True), Noting()
    made = fit(Longer(), folder, monitor, max_epochs=2, logger=logger)
    totals = [metrics["actprune/dense_mib"] for _, metrics in logger.got if metrics.keys() >= TOTALS]
    layers = [step for step, metrics in logger.got if "actprune_layers.head.sparsity" in metrics]
    monitored = made.callback_metrics["actprune/dense_mib"].item()
    return [*totals, monitored], layers, [row["dense_bytes"] for row in monitor.history]


def test_ranks_that_measure_different_things_wait_for_each_other(runs):
    (totals, layers, (_, alone)), (of_second, no_layers, (other,)) = seen(runs, "cpu", measured_alone)
    assert 2.9 * alone < other < 3.1 * alone
    assert totals == of_second == [(alone + other) / 2 / MIB] * 2
    assert (len(layers), no_layers) == (2, [])  # of rank zero, which has measured twice


def with_a_budget(folder: Path) -> Any:
    pruning, model = ActivationPruning(memory_budget=0.96, verbose=0), Stack()  # of which most are workspaces
    fit(model, folder, pruning)
    return pruning.state_dict()["memory_budget"]["number"], model.kinds


def test_both_processes_take_the_setting_that_the_first_one_decides(runs):
    first, second = seen(runs, "cpu", with_a_budget)
    assert first == second
    assert first[1][-1] not in (AGAIN, DENSE_STACK)


class Logging(RankNet):
    """Logs what is reduced over the processes at the end of the epoch; its callbacks stand behind the progress bar."""

    def configure_callbacks(self) -> list[pl.Callback]:
        return [ActivationMemoryMonitor(1, verbose=False), ActivationPruning(sparsity=0.6, verbose=0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mean", float(self.global_rank), on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA, once in use, does not survive the fork")
def test_the_processes_of_a_notebook_with_metrics_reduced_for_the_progress_bar_of_one():
    model = Logging()
    made = trainer(strategy="ddp_notebook", devices=RANKS, limit_val_batches=0, enable_progress_bar=True)
    made.fit(model)
    assert made.callback_metrics["mean"] == 0.5
    assert made.callback_metrics["actprune/saved_frac"] > 0.3
    assert_plain(model)
