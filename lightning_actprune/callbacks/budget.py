"""``memory_budget``: find the setting whose step fits, after the first two steps of a fit.

A fit begins with all blocks run again (``analysis.allocation``), the setting of the fewest bytes or nearly so. Its
first step creates the state of the optimizer. The second step (with gradient accumulation, all its batches) is measured
if there is an allocator to ask. Then steps of this model with this batch are simulated and corrected by the
measurement, and the fit goes on with the setting they lead to. Two steps later, after the first batch of that setting
was probed, a step is measured again. If it differs from the prediction by more than 5 %, a warning says so. If it
exceeds the budget, the predictions are corrected by it, and the fit goes on with a setting that fits and takes less.

Rank zero decides for all ranks. A resumed fit keeps the decision of its checkpoint, unless torch may take less of the
device now. Trials of tuners such as ``BatchSizeFinder`` use the setting of the fewest bytes, and the fit after them
decides with the batch that they found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_actprune.analysis.allocation import Allocation, Allocator, convert_copy
from lightning_actprune.analysis.simulate_step import NoValuesError, check_precision, has_known_values, simulate
from lightning_actprune.analysis.step_memory import StepMemory
from lightning_actprune.callbacks.fit import holds_whole_weights, run_check
from lightning_actprune.config import Config
from lightning_actprune.convert import revert
from lightning_actprune.operators.containers import map_tensors
from lightning_actprune.report import MIB, ConversionReport

OFF = 0.05
"""Relative difference between predicted and measured peak up to which there is no warning."""
FILLED = 0.85
"""Share of torch's memory that tensors may fill. At the largest batch that fits, they fill 63 to 98 %
(``benchmarks/results/batch_size.json``), and gaps between them take the rest. A model with few large tensors leaves
more gaps."""


class MemoryBudget:
    """Chooses how each block is kept so that a step fits.

    Args:
        budget: Bytes, or a fraction of the dense model's peak.
        base: The user's arguments.
    """

    def __init__(self, budget: float, base: Config) -> None:
        self._budget, self._base = budget, base
        self.forget()

    def forget(self) -> None:
        """Start again with the setting of the fewest bytes."""
        self._allocator: Allocator | None = None
        self.number: int | None = None
        """Number of the chosen setting, ``None`` before the choice."""
        self._off = 0
        self._cap = inf
        self._ends_at: int | None = None
        self._starts_at: int | None = None
        self._is_final = False

    def begin(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Begin a fit."""
        _check_surroundings(trainer, model, self._budget)
        self.forget()

    def config(self, model: nn.Module) -> Config | None:
        """Return the current configuration, ``None`` if all stays dense."""
        # Modules may still be added, so the path of a new allocator is not stored.
        allocator = self._allocator or self._make_allocator(model, _refuse_to_simulate)
        return allocator.config(self.number or 0)

    def batch_starts(self, trainer: pl.Trainer, model: pl.LightningModule, batch: Any) -> None:
        """Start to measure once the steps to wait for are over.

        Raises:
            MisconfigurationException: In the first batch, if a step cannot be simulated.
        """
        if self._starts_at is None:  # skip the first step, which is probed and creates optimizer state
            self._starts_at = trainer.global_step + 1
            if self.number is None:
                _by_rank_zero(trainer, lambda: bool(_Simulated(trainer, model, batch)(None)))
        if self._ends_at is None and trainer.global_step >= self._starts_at and not self._is_final:
            self._ends_at = trainer.global_step + 1
            if model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(model.device)

    def batch_ends(self, trainer: pl.Trainer, model: pl.LightningModule, batch: Any) -> Allocation | None:
        """Return a setting that replaces the measured one, ``None`` if that stays."""
        if self._ends_at is None or trainer.global_step < self._ends_at:
            return None
        on_gpu = model.device.type == "cuda"
        measured = torch.cuda.max_memory_allocated(model.device) if on_gpu else None
        self._ends_at, before = None, self.number
        if before is None:
            allocation = self._choose(trainer, model, batch, measured)
        else:
            allocation = self._correct(trainer, measured)
        self.number = allocation.number
        self._starts_at = trainer.global_step + 1  # skip the step whose first batch is probed
        return None if allocation.number == before else allocation

    @property
    def is_settled(self) -> bool:
        """Whether the choice is final."""
        return self._is_final

    @property
    def allocation(self) -> Allocation | None:
        """The choice; ``None`` before it, and if an earlier run made it."""
        if self._allocator is None or self.number is None or not self._allocator.has_simulated(self.number):
            return None
        return self._allocator.allocation(self.number, self._off)

    def describe(self, allocation: Allocation) -> str:
        """Return the choice in a sentence."""
        assert self._allocator is not None
        share = allocation.peak_bytes / (allocation.dense.peak_bytes + self._off)
        return (
            f"Memory budget: {self._allocator.path.describe(allocation.number)}; predicted step peak, "
            f"with temporary tensors, {allocation.peak_bytes / MIB:,.0f} MiB ({100 * share:.0f} % of the dense one)."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the choice for a checkpoint."""
        allocator, number = self._allocator, self.number
        rules = None if allocator is None or number is None else allocator.path.rules(number)
        return {"budget": self._budget, "number": number, "setting": repr(rules), "cap": self._cap}

    def load_state_dict(self, state: Mapping[str, Any], model: pl.LightningModule) -> None:
        """Restore the choice of a checkpoint, if it was made for the same budget and blocks."""
        number, cap = state.get("number"), state.get("cap", inf)
        allocator = self._make_allocator(model, _refuse_to_simulate)
        if state.get("budget") != self._budget or number is None or number >= len(allocator.path):
            return
        if model.trainer.strategy.broadcast(_cap(self._budget, model.device) < cap):
            return
        if repr(allocator.path.rules(number)) == state.get("setting"):
            self.number, self._cap, self._is_final, self._allocator = number, cap, True, allocator

    def end(self) -> None:
        """Release what steps were simulated with; the choice stays, for a checkpoint."""
        if self._allocator is not None:
            self._allocator.release(_refuse_to_simulate)

    def _choose(self, trainer: pl.Trainer, model: pl.LightningModule, batch: Any, measured: int | None) -> Allocation:
        allocator = self._allocator = self._make_allocator(model, _Simulated(trainer, model, batch))
        if measured is not None:
            self._off = measured - allocator.step(0).peak_bytes
        self._cap = _cap(self._budget, model.device)
        number = _by_rank_zero(trainer, lambda: run_check(allocator.fit, self._budget, self._off, self._cap).number)
        allocation = allocator.allocation(number, self._off)
        if allocation.peak_bytes > self._cap:
            rank_zero_warn(
                f"ActivationPruning(memory_budget=...) finds no setting that takes at most {FILLED:.0%} of what torch "
                f"may take of the device, {self._cap / MIB:,.0f} MiB: the least is "
                f"{allocation.peak_bytes / MIB:,.0f} MiB. HINT: the fit may run out of memory; use a smaller batch."
            )
        return allocation

    def _make_allocator(self, model: nn.Module, simulated: Callable[[Config | None], StepMemory]) -> Allocator:
        base = self._base
        return Allocator(model, simulated, "max", dict(base.rules or {}), base.sparsity, base.block_size)

    def _correct(self, trainer: pl.Trainer, measured: int | None) -> Allocation:
        assert self._allocator is not None
        assert self.number is not None
        allocation = self._allocator.allocation(self.number, self._off)
        self._is_final = True
        if measured is None:
            return allocation
        if abs(measured - allocation.peak_bytes) > OFF * allocation.peak_bytes:
            rank_zero_warn(
                "ActivationPruning(memory_budget=...) predicted a step peak of "
                f"{allocation.peak_bytes / MIB:,.0f} MiB, and {measured / MIB:,.0f} MiB were measured. HINT: leave a "
                "margin in the budget if batches differ in size, or if a step runs more than training_step."
            )
        off = self._off + measured - allocation.peak_bytes
        limit = min(self._allocator.limit(self._budget, off), self._cap)
        if not trainer.strategy.broadcast(measured > limit):
            return allocation
        self._off = off
        number = _by_rank_zero(trainer, lambda: self._below(allocation, limit - off))
        self._is_final = number == allocation.number
        if self._is_final:
            rank_zero_warn(
                f"ActivationPruning(memory_budget=...): a step takes {measured / MIB:,.0f} MiB, more than the allowed "
                f"{limit / MIB:,.0f} MiB, and no setting takes less. HINT: raise the budget, or use a smaller batch."
            )
        return self._allocator.allocation(number, self._off)

    def _below(self, allocation: Allocation, limit: float) -> int:
        """Return the last setting within a limit, or the current one if none takes less."""
        assert self._allocator is not None
        number = self._allocator.last_within(limit)
        return number if self._allocator.step(number).peak_bytes < allocation.step.peak_bytes else allocation.number


def _by_rank_zero(trainer: pl.Trainer, decide: Callable[[], int]) -> int:
    """Return the decision of rank zero; if it raises, all ranks raise, since they wait for it."""
    result: int | MisconfigurationException = 0
    if trainer.is_global_zero:
        try:
            result = decide()
        except MisconfigurationException as error:
            result = error
    result = trainer.strategy.broadcast(result)
    if isinstance(result, MisconfigurationException):
        raise result
    return result


def _cap(budget: float, device: torch.device) -> float:
    """Return the bytes that tensors may take of a device, infinity if the user gave the budget in bytes."""
    if device.type != "cuda":
        return inf
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share >= 1 and isinstance(budget, int):
        return inf
    return FILLED * share * torch.cuda.get_device_properties(device).total_memory


# === Simulated steps of a module that is being trained ================================================================
class _Simulated:
    """Simulates steps of a module in training.

    Args:
        trainer: Its precision and optimizers are used.
        model: The module, converted or not.
        batch: The batch of a step.
    """

    def __init__(self, trainer: pl.Trainer, model: pl.LightningModule, batch: Any) -> None:
        self._trainer, self._model = trainer, model
        self._batch = map_tensors(_drop_memory, batch)
        self._precision = str(trainer.precision)
        self._optimizers = trainer.optimizers
        self._twin: nn.Module = model

    def __call__(self, config: Config | None) -> StepMemory:
        """Return the step under a configuration; ``None`` is the dense model."""

        def prepare(twin: nn.Module) -> ConversionReport | None:
            self._twin = twin
            for module in _find_lightning_modules(twin):
                module._trainer = _Numbers(self._trainer)  # type: ignore[assignment]
            _leave_out_metrics(twin)
            revert(twin)
            return None if config is None else convert_copy(config, twin)

        try:
            with _without_trainer(self._model):
                return simulate(
                    self._model,
                    self._batch,
                    prepare,
                    precision=self._precision,
                    optimizer=self._optimizer,
                    accumulates=self._trainer.accumulate_grad_batches > 1,
                    workspaces=self._model.device.type == "cuda",
                )
        except NoValuesError as error:
            raise MisconfigurationException(
                f"`memory_budget` needs a training step that runs without values, and that of "
                f"{type(self._model).__name__} does not: {str(error).partition(' HINT:')[0]} HINT: read no values in "
                "training_step, or choose a preset instead of a budget; `allocate` takes a loss of your own."
            ) from error
        except Exception as error:  # any error of a user's training step
            raise MisconfigurationException(
                f"`memory_budget` cannot simulate a step of {type(self._model).__name__}: {type(error).__name__}: "
                f"{error} HINT: choose a preset instead of a budget."
            ) from error

    def _optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        try:
            [optimizer] = _find_optimizers(self._twin.configure_optimizers())  # type: ignore[operator]
            optimizer.step()  # without gradients it does nothing, or asks for a closure
        except Exception:  # several optimizers, or one that reads the trainer
            return _OptimizerLike(parameters, self._model, self._optimizers)
        return optimizer


class _OptimizerLike(Optimizer):
    """An optimizer whose state is as large as that of the model's optimizers; a history counts at its full length.

    Args:
        parameters: Parameters of a copy of the model.
        model: The model.
        optimizers: Its optimizers.
    """

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module, optimizers: list[Optimizer]) -> None:
        super().__init__(parameters, {})
        states = {id(p): state for optimizer in optimizers for p, state in optimizer.state.items()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._history = max((group.get("history_size", 0) for group in groups), default=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._states = [states.get(id(parameter), {}) for parameter in trained]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state where it is missing."""
        for parameter, like in zip(self.param_groups[0]["params"], self._states, strict=True):
            if not self.state[parameter]:
                self.state[parameter] = {
                    (name, number): torch.empty(value.shape, dtype=value.dtype, device=parameter.device)
                    for name, values in like.items()
                    for number, value in enumerate(_list_tensors(values, self._history))
                }


def _list_tensors(value: Any, history: int) -> list[torch.Tensor]:
    """Return the tensors in an entry of optimizer state; a history counts at its full length."""
    if isinstance(value, torch.Tensor):
        return [value]
    tensors = [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, list | tuple) else []
    return tensors + tensors[:1] * (history - len(tensors))


class _Numbers:
    """Replaces the trainer of a copied module: it has only the numbers, texts and flags of ``trainer``."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._of = trainer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        if isinstance(value, int | float | str | None):
            return value
        return [] if isinstance(value, list) else None


def _find_lightning_modules(model: nn.Module) -> list[pl.LightningModule]:
    return [module for module in model.modules() if isinstance(module, pl.LightningModule)]


@contextmanager
def _without_trainer(model: nn.Module) -> Iterator[None]:
    """Detach the trainer from a module and those in it, so that a copy does not contain it."""
    before = [(module, module._trainer) for module in _find_lightning_modules(model)]
    for module, _ in before:
        module._trainer = None
    try:
        yield
    finally:
        for module, trainer in before:
            module._trainer = trainer


def _drop_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the batch without memory, or with the values that a simulation needs."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    if has_known_values(tensor):
        return tensor.detach().to("cpu", copy=True)
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _find_optimizers(value: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in the result of ``configure_optimizers``."""
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, Mapping):
        yield from _find_optimizers(value.get("optimizer"))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _find_optimizers(each)


def _leave_out_metrics(twin: nn.Module) -> None:
    """Make metrics and logging of a copy do nothing, since they read values or a trainer."""
    for module in twin.modules():
        if isinstance(module, Metric):
            vars(module).update(dict.fromkeys(("forward", "update", "compute"), lambda *_, **__: torch.zeros(())))
        if isinstance(module, pl.LightningModule):
            vars(module)["log"] = vars(module)["log_dict"] = lambda *args, **kwargs: None


def _refuse_to_simulate(config: Config | None) -> StepMemory:
    raise AssertionError("No step can be simulated without a batch.")


def _check_surroundings(trainer: pl.Trainer, model: pl.LightningModule, budget: float) -> None:
    """Raise where a budget cannot be kept."""
    run_check(check_precision, str(trainer.precision))
    if not model.automatic_optimization:
        raise MisconfigurationException(
            f"`memory_budget` cannot work with the manual optimization of {type(model).__name__}: a training_step that "
            "steps optimizers cannot be simulated. HINT: choose a preset, or use `allocate` with a loss of your own."
        )
    strategy = trainer.strategy
    if not holds_whole_weights(strategy):
        raise MisconfigurationException(
            f"`memory_budget` cannot work with {type(strategy).__name__}, which loads and frees parameters itself. "
            "HINT: choose a preset, or train on one device or with DDP."
        )
    if strategy.root_device.type == "cuda" and isinstance(budget, int):
        capacity = torch.cuda.get_device_properties(strategy.root_device).total_memory
        if budget > capacity:
            raise MisconfigurationException(
                f"`memory_budget` must be at most what the device has, {capacity / MIB:,.0f} MiB, got "
                f"{budget / MIB:,.0f} MiB. HINT: 0.9 of it leaves room for CUDA itself."
            )
