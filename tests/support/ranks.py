"""Fit small models in two processes, one pair for any number of fits with any strategy: starting them takes long."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning
from tests.support.helpers import ConfiguredNet, loader, trainer

RANKS = 2
STEPS = 4
BATCH = 4
COMPILER = "aot_eager"
_LIMIT = timedelta(seconds=120)


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

    def train_dataloader(self) -> DataLoader[Any]:
        made = loader(STEPS * RANKS * BATCH, BATCH, self.tokens)
        if not dist.is_initialized():
            return made
        # A sampler of our own is left alone: Lightning's would shuffle, and deal out samples to parts of one model.
        parts = (1, 0) if self.tensor_parallel else (RANKS, dist.get_rank())
        sampler = DistributedSampler(made.dataset, *parts, shuffle=False)
        return DataLoader(made.dataset, BATCH, sampler=sampler)

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


def fit(case: Case, accelerator: str, folder: Path) -> Seen:
    """Return what this process has seen of ``case``."""
    torch.manual_seed(0)
    model, witness = RankNet(case.strategy == "tensor", case.tokens), Witness(folder / "last.ckpt")
    callbacks: list[pl.Callback] = [witness, ActivationMemoryMonitor(1, verbose=False)]
    pruning = None if case.pruning is None else ActivationPruning(**case.pruning, verbose=False)
    if pruning is not None:
        callbacks.append(pruning)
    made = trainer(
        *callbacks, accelerator=accelerator, devices=RANKS, strategy=strategy_of(case.strategy),
        precision=case.precision, limit_train_batches=STEPS, limit_val_batches=0, default_root_dir=folder,
        **case.options,
    )  # fmt: skip
    if case.compiled and case.strategy == "fsdp2":
        model.make()
        for block in (model.body, model.head):
            block.compile(backend=COMPILER)
    made.fit(torch.compile(model, backend=COMPILER) if case.compiled and case.strategy == "ddp" else model)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
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


def all_traces(model: nn.Module) -> dict[str, list[str]]:
    """Return by the module's name all that a conversion could have left on it: class, attributes and hooks."""
    return {name: _traces(module) for name, module in model.named_modules()}


def _traces(module: nn.Module) -> list[str]:
    hooks = [f"{name}: {len(held)}" for name, held in sorted(vars(module).items()) if name.endswith("_hooks")]
    return [type(module).__qualname__, *sorted(vars(module)), *hooks]


def fit_all(cases: Sequence[Case | Callable[[Path], Any]], accelerator: str, folder: Path) -> list[list[Any]]:
    """Return, for each case, what each process has seen of it; for a function, what it returns."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A fork spares the seconds that two processes need for their imports. CUDA, once in use, does not survive it, nor
    # do threads of autograd, which tests that compile may have left in this process.
    compiles = any(isinstance(case, Case) and case.compiled for case in cases)
    method = "spawn" if torch.cuda.is_available() or compiles else "fork"
    mp.start_processes(_rank, (cases, accelerator, folder, port), RANKS, start_method=method)
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
            seen.append(fit(case, accelerator, path) if isinstance(case, Case) else case(path))
        except Exception:
            seen.append(Seen([], {}, [], {}, {}, [], traceback.format_exc()))
    torch.save(seen, folder / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
