"""``cuda_graphs=True``: replay the modules that ``training_step`` calls from CUDA graphs (``replay``).

It starts once the settings of all layers are final. For a few steps hooks find the outermost modules that are called;
the loss, metrics and logging stay in Python. From the next step on, calls of these modules are watched, captured and
replayed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_actprune.callbacks.compiled import is_compiled
from lightning_actprune.codec.private import FOR_REPLAYS, refusal
from lightning_actprune.config import shorten
from lightning_actprune.operators.base import Converted
from lightning_actprune.operators.hooks import add_hooks, backward_runs, eager_modules
from lightning_actprune.replay.graph import CudaRecorder, Recorder
from lightning_actprune.replay.memory import move_gradients
from lightning_actprune.replay.module import ModuleReplay, ReplayedModule, replay_module, stop_replay
from lightning_actprune.report import format_count

SEARCH_STEPS = 3
"""Steps in which the outermost modules are searched, since some fits train modules in turns."""
MAX_SILENT_STEPS = 40
"""Steps after which a message names the replayed modules, even if some are still being watched."""
_STEP = "training_step"
LEFT_TO_COMPILER = 'compiled modules are left to the compiler; torch.compile(mode="reduce-overhead") replays them'


class GraphedSteps:
    """Replays the modules that ``training_step`` calls, and reports which are replayed and why others are not."""

    recorder: ClassVar[type[Recorder]] = CudaRecorder
    """Captures the graphs of a module."""

    def __init__(self) -> None:
        self._steps = 0
        self._search: OutermostCalls | None = None
        self._replays: list[tuple[nn.Module, ModuleReplay]] = []
        self._eager: dict[str, str] = {}
        self._messages: set[tuple[str, str]] | None = None
        self._has_moved_gradients = False
        self._optimized = frozenset[int]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(GraphedSteps())  # a copy of the callback is in no fit

    def batch_starts(self, trainer: pl.Trainer, model: pl.LightningModule, batch_idx: int) -> str:
        """Search modules, or start to replay them; return a message for the user, or ""."""
        self._steps += 1
        if zeroes_gradients(trainer, model, batch_idx):
            for _, replay in self._replays:
                replay.release_gradients(self._optimized)
        if self._steps == 1:
            if reason := why_eager(trainer, model, needs_cuda=self.recorder is CudaRecorder):
                self._eager[_STEP] = reason
            else:
                self._search = OutermostCalls(model)
        elif self._search is not None and self._steps > (SEARCH_STEPS if self._search.modules else MAX_SILENT_STEPS):
            self._search.close()
            self._replay(model, self._search.modules)
            self._search = None
        return self._message()

    def batch_ends(self) -> str:
        """Return "": messages come when a batch starts."""
        return ""

    def restart(self) -> None:
        """Make all modules eager again, and search again from the next batch."""
        if self._search is not None:
            self._search.close()
        for module, _ in self._replays:
            stop_replay(module)
        self._steps, self._search, self._replays, self._eager = 0, None, [], {}

    def before_optimizer(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """Move gradients together before the first optimizer step, which allocates its state between them."""
        if not self._has_moved_gradients and not why_eager(trainer, model, needs_cuda=True):
            self._has_moved_gradients = True
            move_gradients(model)

    def end(self) -> None:
        """Make all modules eager again when the fit ends."""
        self.restart()
        vars(self).update(vars(GraphedSteps()))

    def _replay(self, model: pl.LightningModule, called: set[nn.Module]) -> None:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in model.trainer.optimizers)
        self._optimized = frozenset(id(parameter) for group in groups for parameter in group["params"])
        unseen = set(model.modules()) - _find_hookable(model) - {model}  # to say why they are eager
        candidates = called | unseen
        outermost = {name: module for name, module in model.named_modules() if module in candidates}
        inner = {each for module in outermost.values() for each in module.modules() if each is not module}
        for name, module in outermost.items():
            if module in inner:
                continue
            if reason := why_module_eager(module):
                self._eager[name] = reason
            else:
                self._replays.append((module, replay_module(module, name, self.recorder)))
        if not outermost:
            self._eager[_STEP] = "it calls no module with parameters"

    def _message(self) -> str:
        replays = [replay for _, replay in self._replays]
        is_decided = _STEP in self._eager or (replays and all(replay.replays or replay.reason for replay in replays))
        if not is_decided and self._steps <= MAX_SILENT_STEPS:
            return ""
        reasons = self._eager | {replay.name: replay.reason for replay in replays if replay.reason}
        replayed = []
        if self._messages is None:
            self._messages = set()
            replayed = [replay for replay in replays if replay.graphs]
            without_graphs = [replay.name for replay in replays if not replay.graphs and not replay.reason]
            reasons |= dict.fromkeys(without_graphs, "none of its calls could be replayed so far")
        news = {name: reason for name, reason in reasons.items() if (name, reason) not in self._messages}
        self._messages.update(news.items())
        return describe_graphs(replayed, news)


class OutermostCalls:
    """Find the modules with parameters that a training step calls directly.

    Args:
        model: The model, which is not one of them.
    """

    def __init__(self, model: pl.LightningModule) -> None:
        self.modules = set[nn.Module]()
        self._running: list[nn.Module] = []
        hooks = [add_hooks(module, self._enter, self._leave) for module in _find_hookable(model)]
        self._handles = [handle for handles in hooks for handle in handles]

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        trains = module.training and torch.is_grad_enabled() and not backward_runs()
        if not self._running and trains and any(True for _ in module.parameters()):
            self.modules.add(module)
        self._running.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()


def zeroes_gradients(trainer: pl.Trainer, model: pl.LightningModule, batch_idx: int) -> bool:
    """Return True if Lightning drops gradients in this batch; it does so after forward."""
    first = batch_idx % trainer.accumulate_grad_batches == 0
    return first and model.automatic_optimization and not is_overridden("optimizer_zero_grad", model)


def _find_hookable(model: nn.Module) -> set[nn.Module]:
    """Return the inner modules whose calls hooks can see."""
    return {each for each in eager_modules(model) - {model} if not isinstance(each, torch.jit.ScriptModule)}


def why_eager(trainer: pl.Trainer, model: pl.LightningModule, *, needs_cuda: bool = True) -> str:
    """Return the reason that keeps a whole fit eager, or ""."""
    if reason := refusal("A replay", FOR_REPLAYS):
        return reason
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        return f"graphs need one device, and the strategy is {type(trainer.strategy).__name__}"
    if needs_cuda and model.device.type != "cuda":
        return f"it runs on {model.device.type}, which has no CUDA graphs"
    return "" if model in eager_modules(model) else LEFT_TO_COMPILER


def why_module_eager(module: nn.Module) -> str:
    """Return the reason that keeps a module eager, or ""."""
    if is_compiled(module):
        return LEFT_TO_COMPILER
    if isinstance(module, ReplayedModule):
        return "another callback replays it"
    if isinstance(module, Converted):
        return "it is itself a converted layer or block"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "its parameters are DTensors"
    return ""


def describe_graphs(replayed: list[ModuleReplay], eager: dict[str, str]) -> str:
    """Return which modules are replayed, and why others are eager; "" without modules."""
    parts = []
    if replayed:
        graphs, calls = sum(replay.graphs for replay in replayed), sum(replay.replays for replay in replayed)
        names = shorten([replay.name for replay in replayed])
        parts.append(f"{names} replayed ({format_count(graphs, 'graph')}, {format_count(calls, 'replay')} so far)")
    for reason in dict.fromkeys(eager.values()):
        names = shorten([name for name, each in eager.items() if each == reason])
        parts.append(f"{names} eager, since {reason}")
    return f"Activation pruning, CUDA graphs: {'; '.join(parts)}." if parts else ""
