"""Fits in two processes: gradients, what is left, and what the processes decide and log together.

One pair of processes runs all fits of an accelerator, since starting them takes long.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, Keep, convert
from lightning_actprune.schedules import LinearSchedule
from tests.callbacks.test_budget import AGAIN
from tests.callbacks.test_budget import DENSE as DENSE_STACK
from tests.callbacks.test_memory import MIB, TOTALS, Noting
from tests.support.helpers import FEATURES, ConfiguredNet, Net, all_traces, assert_plain, fit, loader
from tests.support.stack import Stack

pytestmark = pytest.mark.integration

RANKS = 2
STEPS = 4
BATCH = 4
COMPILER = "aot_eager"
_LIMIT = timedelta(seconds=120)

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


# What one process does.


class Case(NamedTuple):
    """A fit in two processes."""

    strategy: str  # "ddp", "fsdp", "fsdp2", "zero1" and "zero2" of DeepSpeed, or "tensor": layers are split
    precision: str
    pruning: Mapping[str, Any] | None  # arguments of the callback; None is without it
    options: Mapping[str, Any] = {}  # of the Trainer
    compiled: bool = False  # with DDP as a whole, with FSDP2 what is sharded by itself
    tokens: int = 8


class Seen(NamedTuple):
    """What one process has seen of a fit."""

    gradients: list[dict[str, Tensor]]  # before each optimizer step
    state: Mapping[str, Tensor]  # of a checkpoint at the end of the fit, gathered from all processes
    layers: list[list[str]]  # classes of the linear layers in each training step
    metrics: Mapping[str, float]
    left: Mapping[str, list[str]]  # class, attributes and hooks of every module after the fit
    packed: list[str]  # readers of what a compiler packs
    error: str | None


class RankNet(ConfiguredNet):
    """Gives each process every other sample; where the strategy leaves it to the model, it is split there."""

    def __init__(self, tensor_parallel: bool = False, tokens: int = 8) -> None:
        super().__init__()
        self.tensor_parallel, self.tokens = tensor_parallel, tokens

    def make(self) -> None:
        """Draw the weights on the CPU, wherever the strategy makes them, so that one process can draw the same."""
        super().make()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, device="cpu"))

    def configure_model(self) -> None:
        if self.body is None:
            super().configure_model()
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and self.tensor_parallel:
            parallelize_module(self.body, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        elif mesh is not None:
            fully_shard(self.body, mesh=mesh["data_parallel"])
            fully_shard(self, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.tokens == TOKENS:  # compiled, where what is logged would break the graph
            return nn.functional.cross_entropy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        data = loader(STEPS * RANKS * BATCH, BATCH, self.tokens)
        if not dist.is_initialized():
            return data
        # A sampler of our own is left alone: Lightning's would shuffle, and deal out samples to parts of one model.
        parts = (1, 0) if self.tensor_parallel else (RANKS, dist.get_rank())
        sampler = DistributedSampler(data.dataset, *parts, shuffle=False)
        return DataLoader(data.dataset, BATCH, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=False)


class Witness(pl.Callback):
    """Notes whole gradients, of sharded parameters too, and saves a checkpoint while the layers are still pruned."""

    def __init__(self, checkpoint: Path) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.checkpoint = checkpoint

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.checkpoint)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        model = trainer.strategy.model
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            if model.is_gradient_accumulation_boundary():  # it accumulates itself, and Lightning calls each time
                self.seen.append(_zero_gradients(pl_module))
        elif isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                self.seen.append(_gradients(pl_module))
        else:
            self.seen.append(_gradients(pl_module))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {
        name: (g.full_tensor() if isinstance(g, DTensor) else g).detach().cpu().clone() for name, g in named.items()
    }


def _zero_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of which DeepSpeed leaves each process a part."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(parameter).cpu().clone() for name, parameter in model.named_parameters()}


def strategy_of(name: str) -> Strategy:
    if name.startswith("zero"):
        return DeepSpeedStrategy(stage=int(name[-1]), timeout=_LIMIT)
    if name == "fsdp":
        return FSDPStrategy(auto_wrap_policy={nn.Sequential, nn.Linear}, state_dict_type="full", timeout=_LIMIT)
    if name in ("fsdp2", "tensor"):
        parallel = (1, RANKS) if name == "tensor" else (RANKS, 1)
        return ModelParallelStrategy(*parallel, save_distributed_checkpoint=False, timeout=_LIMIT)
    return DDPStrategy(timeout=_LIMIT)


def fit_case(case: Case, accelerator: str, folder: Path) -> Seen:
    """Return what this process has seen of ``case``."""
    torch.manual_seed(0)
    model, witness = RankNet(case.strategy == "tensor", case.tokens), Witness(folder / "last.ckpt")
    callbacks: list[pl.Callback] = [witness, ActivationMemoryMonitor(1, verbose=False)]
    pruning = None if case.pruning is None else ActivationPruning(**case.pruning, verbose=False)
    if pruning is not None:
        callbacks.append(pruning)
    if case.compiled and case.strategy == "fsdp2":
        model.make()
        for block in (model.body, model.head):
            block.compile(backend=COMPILER)
    run = fit(
        torch.compile(model, backend=COMPILER) if case.compiled and case.strategy == "ddp" else model, *callbacks,
        accelerator=accelerator, devices=RANKS, strategy=strategy_of(case.strategy), precision=case.precision,
        limit_train_batches=STEPS, limit_val_batches=0, default_root_dir=folder, **case.options,
    )  # fmt: skip
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    state = _saved_state(witness.checkpoint)
    packed = [] if pruning is None else [row.name for row in pruning.compiled if row.how == "packed"]
    return Seen(witness.seen, state, model.seen, metrics, all_traces(model), packed, None)


def _saved_state(checkpoint: Path) -> Mapping[str, Tensor]:
    if checkpoint.is_dir():  # DeepSpeed's, with whole weights in the file of the first process
        saved = torch.load(
            checkpoint / "checkpoint" / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False
        )
        return saved["module"]
    return torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"]


def fit_all(cases: Sequence[Case | Callable[[Path], Any]], accelerator: str, folder: Path) -> list[list[Any]]:
    """Return, for each case, what each process has seen of it; for a function, what it returns."""
    # A fork spares imports, which take seconds. Tests that compile may have left threads of autograd in this process,
    # so a server is forked instead. CUDA survives no fork, once asked how many GPUs there are.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    mp.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(_rank, (cases, accelerator, folder, find_free_network_port()), RANKS, start_method=method)
    by_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return [list(seen) for seen in zip(*by_rank, strict=True)]


def _rank(rank: int, cases: Sequence[Case | Callable[[Path], Any]], accelerator: str, folder: Path, port: int) -> None:
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    told |= {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(1)
    seen = []
    for number, case in enumerate(cases):
        path = folder / str(number)
        path.mkdir(exist_ok=True)
        try:
            seen.append(fit_case(case, accelerator, path) if isinstance(case, Case) else case(path))
        except Exception:
            seen.append(Seen([], {}, [], {}, {}, [], traceback.format_exc()))
    torch.save(seen, folder / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


# The cases.


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


COMPILED = {
    strategy: (
        Case(strategy, "32-true", {"preset": "max"}, compiled=True, tokens=TOKENS),
        Case(strategy, "32-true", DENSE, compiled=strategy == "fsdp2", tokens=TOKENS),
    )
    for strategy in ("ddp", "fsdp2")
}
"""Of each strategy a compiled fit, and a dense one that leaves the same traces: compiled blocks have one more."""


def cases(accelerator: str) -> list[Case | Callable[[Path], Any]]:
    matrix = [entry for entry in MATRIX[accelerator] if entry[0] not in ZERO or DEEPSPEED]
    result = [strategy for strategy in PRECISIONS[accelerator] if strategy not in ZERO or DEEPSPEED]
    of_all = [
        *(Case(*entry, pruning) for entry in matrix for pruning in (DENSE, KEEPING, PRUNED)),
        *(Case(strategy, "32-true", PRUNED, accumulated(strategy)) for strategy in result if strategy not in ZERO),
        *(Case(strategy, "32-true", MAX) for strategy in result),
        *(Case("tensor", "32-true", pruning) for pruning in (DENSE, KEEPING, PRUNED)),
    ]
    if accelerator == "gpu":
        return of_all
    return [*of_all, *COMPILED["ddp"], *COMPILED["fsdp2"], decided_by_energy, measured_alone, with_a_budget]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Mapping[str, list[Any]]]:
    """Return, for an accelerator, what two processes have seen of all cases, which they run when first asked."""

    @functools.cache
    def run(accelerator: str) -> Mapping[str, list[Any]]:
        if accelerator == "gpu" and torch.cuda.device_count() < RANKS:
            pytest.skip(f"needs {RANKS} GPUs, found {torch.cuda.device_count()}")
        runs = cases(accelerator)
        names = [repr(case) if isinstance(case, Case) else case.__name__ for case in runs]
        return dict(zip(names, fit_all(runs, accelerator, tmp_path_factory.mktemp("ranks")), strict=True))

    return run


def seen(runs: Any, accelerator: str, case: Case | Callable[[Path], Any]) -> list[Any]:
    """Return what each process has seen of a case that went well."""
    if isinstance(case, Case) and case.strategy in ZERO and not DEEPSPEED:
        pytest.skip("needs deepspeed")
    result = runs(accelerator)[repr(case) if isinstance(case, Case) else case.__name__]
    errors = [of_rank.error for of_rank in result if isinstance(of_rank, Seen) and of_rank.error is not None]
    assert not errors, errors[0]
    return result


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
        result = seen(runs, accelerator, Case(strategy, "32-true", PRUNED, options))[0].gradients
        # torch's own bounds for fp32: the same products, summed in another order where threads or GPUs share the work.
        torch.testing.assert_close(result, by_hand(parts, clipping(strategy) if parts > 1 else None))


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
    (one, other), (dense, _) = (seen(runs, "cpu", case) for case in COMPILED[strategy])
    assert len(one.gradients) == STEPS
    assert_equal(one.gradients, other.gradients)
    assert one.packed == other.packed
    assert "body.*" in one.packed
    assert list(one.state) == list(dense.state)
    assert {**one.left, "": None} == {**dense.left, "": None}  # the compiler leaves more on what it was given
    result, exact = (torch.cat([grad.flatten() for grad in of_run.gradients[1].values()]) for of_run in (one, dense))
    assert torch.cosine_similarity(result, exact, 0) > 0.98
    assert not torch.allclose(result, exact, rtol=1e-3)


# What the processes decide and log together: functions that both of them run.


def fit_both(model: pl.LightningModule, folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    options |= {"strategy": strategy_of("ddp"), "devices": RANKS, "limit_val_batches": 0, "default_root_dir": folder}
    return fit(model, *callbacks, **options)


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
        """Return samples of which Lightning gives each process every other one: alone, they decide differently."""
        data = loader(16, self.batch_size)
        data.dataset.tensors[0][::2, :, FEATURES // 2 :] *= 1e-3
        return data


def decided_by_energy(folder: Path) -> Any:
    model, callbacks, schedule = Forked(batch_size=2), list[ActivationPruning](), LinearSchedule(end=0.5, until=0.5)
    for name, limit in LIMITS.items():
        rules = {name: Keep(4, schedule, max_dropped_energy=limit, min_rows_for_low_bits=0), "*": None}
        callbacks.append(ActivationPruning(rules=rules, verbose=0))
    model.watch = lambda m: (m.low.sparsity, m.high.sparsity)
    fit_both(model, folder, *callbacks)
    return {name: share for callback in callbacks for name, share in callback.spread.items()}, model.seen


def test_both_processes_decide_alike_by_the_energy_of_all_their_data(runs):
    first, second = seen(runs, "cpu", decided_by_energy)
    assert first == second
    spread, sparsities = first
    assert sparsities == [(0.0, sparsity) for sparsity in (0.0, 0.25, 0.5, 0.5)]
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
    run = fit_both(Longer(), folder, monitor, max_epochs=2, logger=logger)
    totals = [metrics["actprune/dense_mib"] for _, metrics in logger.got if metrics.keys() >= TOTALS]
    layers = [step for step, metrics in logger.got if "actprune_layers.head.sparsity" in metrics]
    monitored = run.callback_metrics["actprune/dense_mib"].item()
    return [*totals, monitored], layers, [row["dense_bytes"] for row in monitor.history]


def test_ranks_that_measure_different_things_wait_for_each_other(runs):
    (totals, layers, (_, alone)), (of_second, no_layers, (other,)) = seen(runs, "cpu", measured_alone)
    assert 2.9 * alone < other < 3.1 * alone
    assert totals == of_second == [(alone + other) / 2 / MIB] * 2
    assert (len(layers), no_layers) == (2, [])  # of rank zero, which has measured twice


def with_a_budget(folder: Path) -> Any:
    pruning, model = ActivationPruning(memory_budget=0.45, verbose=0), Stack()
    fit_both(model, folder, pruning)
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
    run = fit(model, strategy="ddp_notebook", devices=RANKS, limit_val_batches=0, enable_progress_bar=True)
    assert run.callback_metrics["mean"] == 0.5
    assert run.callback_metrics["actprune/saved_frac"] > 0.3
    assert_plain(model)
