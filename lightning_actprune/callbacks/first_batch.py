"""Probe the first training batch of a fit for layers that are better kept in another way.

Layers whose input is retained for backward anyway are turned dense, and those whose dropped blocks would hold too much
of the input's energy drop none. Of those inside an activation checkpoint a warning tells: which of the two to leave out
is the user's choice.

The trials of Lightning's tuners have the layers that the fit will have. ``BatchSizeFinder`` and
``LearningRateFinder`` run trials in ``on_fit_start``, without the callbacks of the Trainer.
Hooks of the strategy are called there all the same, when training starts and when anything raises, so that a callback
can join a trial, and clean up after one that fails before that. The first batch of the first trial is then probed in
place of the first one of the fit, and what it shows holds for the trials that follow and for the fit. Of these no
batch is probed, so each step of the fit keeps what a step of a trial keeps. Until then no layer drops a block that it
may turn out not to drop, so the probed step keeps at least as much.

The module's own hooks are left alone: it may be copied or pickled in a trial, and its hooks are its author's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_actprune.analysis.first_batch import (
    AddedLayers,
    EnergyProbe,
    IdleLayers,
    RecomputationProbe,
    RetentionProbe,
    keep_blocks,
    leave_dense,
)
from lightning_actprune.codec.private import refusal
from lightning_actprune.config import drops_blocks, shortened
from lightning_actprune.operators.sites import Decided
from lightning_actprune.report import ConversionReport, LayerReport


class Decision(NamedTuple):
    """What the first batch has shown and what was done about it.

    Args:
        retained: Layers turned dense, since something else keeps their input.
        spread: Share of the energy that was to be dropped, by the name of the layers that drop nothing for it.
        idle: Layers that are dense for now, since they have kept nothing yet.
    """

    retained: list[LayerReport]
    spread: dict[str, float]
    idle: Sequence[LayerReport] = ()


class Decisions:
    """What first batches have shown of the layers, and for how long it holds."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        """Names of the layers that were converted, whatever was decided of them."""
        self.spread: dict[str, float] | None = None
        """Share of the energy that was to be dropped, of the layers that drop none for it; ``None`` if not judged."""
        self.retained: dict[str, str | None] | None = None
        """Of the layers that were turned dense, what keeps their input; ``None`` if none was judged.

        Without a reason are those that have kept nothing yet, which are dense until they do.
        """
        self.saved = Decided()
        """How what operations save is kept that no layer is known for, which first forwards decide."""
        self._decided: frozenset[str] = frozenset()
        self._trial_model: weakref.ref[nn.Module] | None = None

    def fit_begins(self, model: nn.Module) -> None:
        """Forget all, unless it was decided in trials of ``model`` that no training has followed yet."""
        if self._trial_model is None or self._trial_model() is not model:
            self.forget()

    def forget(self) -> None:
        """Forget all."""
        self.spread, self.retained, self._decided, self._trial_model = None, None, frozenset(), None

    @property
    def idle(self) -> list[str]:
        """Names of the layers that have kept nothing yet."""
        return [name for name, reason in (self.retained or {}).items() if reason is None]

    def wake(self) -> None:
        """Forget what was decided of layers that kept nothing."""
        self._decided -= set(self.idle)
        self.retained = {name: reason for name, reason in (self.retained or {}).items() if reason is not None}

    def end_with_the_fit(self) -> None:
        """Let what was decided hold for this fit only."""
        self._trial_model = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_trial_model": None}  # a copy of the model is another one

    def filter_undecided(self, layers: Sequence[str]) -> list[str]:
        """Return those of the named layers of which nothing is decided."""
        return [name for name in layers if name not in self._decided]

    def add(self, decision: Decision, undecided: Sequence[str]) -> None:
        """Take note of what was decided of the layers, but for those that are ``waiting``."""
        self.spread = (self.spread or {}) | decision.spread
        retained = {layer.fqn: layer.reason for layer in decision.retained}
        self.retained = (self.retained or {}) | retained | {layer.fqn: None for layer in decision.idle}
        self._decided |= set(self.layers).difference(undecided)

    def add_trial_of(self, model: nn.Module) -> None:
        """Let what was decided hold for the next training of ``model``, in this fit or, after ``Tuner``, in another."""
        self._trial_model = weakref.ref(model)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be decided of the layers."""
        return bool(self.layers) and self._decided.issuperset(self.layers)

    def apply(self, model: nn.Module, report: ConversionReport) -> None:
        """Change layers that were converted anew as it was decided."""
        self.layers = [layer.fqn for layer in report.converted]
        self._change(model, report)

    def restore(
        self,
        model: nn.Module,
        report: ConversionReport,
        spread: dict[str, float],
        retained: dict[str, str | None] | None,
    ) -> Decision:
        """Go on with what was decided before a checkpoint, and return it.

        Args:
            model: The module that holds the layers, all of them converted.
            report: The conversion.
            spread: As it was.
            retained: As it was; ``None`` if that is not known, so that a batch is still to show it.
        """
        self.spread, self.retained = spread, retained
        if retained is not None:
            self._decided = frozenset(self.layers)
        rows, idle = self._change(model, report), self.idle
        if not idle:
            check_any_left(report)
        return Decision([row for row in rows if row.fqn not in idle], spread, [row for row in rows if row.fqn in idle])

    def _change(self, model: nn.Module, report: ConversionReport) -> list[LayerReport]:
        reasons = {name: _IDLE if reason is None else reason for name, reason in (self.retained or {}).items()}
        rows = leave_dense(model, report, reasons)
        keep_blocks(model, report, self.spread or {})
        return rows


def check_any_left(report: ConversionReport) -> None:
    """Raise if nothing is left to be kept in another way than by the dense model."""
    if not report.converted and report.saved is None and not report.recomputed:
        raise MisconfigurationException(
            "No layer is left to convert: packing their inputs would add memory, or drop too much of them:\n"
            f"{report.describe_skipped()}\nHINT: choose other layers with `rules`, take the callback out, or pack "
            "all the same with `ActivationPruning(skip_retained=False)` or a higher `max_dropped_energy`."
        )


class FirstBatchProbe:
    """Decides once, in the first training batch that runs a forward, which layers are left dense.

    Args:
        skip_retained: Whether to turn retained layers dense; without it, nothing inside compiled modules is seen.
    """

    def __init__(self, skip_retained: bool) -> None:
        self._skip_retained = skip_retained
        self.decisions = Decisions()
        self._will_probe = self._will_probe_energy = False
        self._retention: RetentionProbe | None = None
        self._energy: EnergyProbe | None = None
        self._recomputations: RecomputationProbe | None = None
        self._idle: IdleLayers | None = None
        self._added: AddedLayers | None = None
        self._any_rank_watches: bool | None = None
        """Whether calls of idle layers count on any rank: then all of them ask each other in each batch."""
        self._patience = 0
        """Batches for which layers that were idle are waited for, if they keep nothing in the next one."""

    @property
    def judges_energy(self) -> bool:
        """Whether the next batch will show which layers drop nothing; not if a checkpoint has told."""
        return self._will_probe and self._will_probe_energy

    @property
    def waits(self) -> bool:
        """Whether this batch is probed, or a later one will be."""
        return self._will_probe

    def ask(self, report: ConversionReport, sparsity: float) -> None:
        """Probe the next batch for what is not known yet; nothing where no layer packs its input.

        Args:
            report: The conversion.
            sparsity: Highest sparsity that any of the layers will have.
        """
        keeps = [layer.keep for layer in report.converted if layer.keep is not None and drops_blocks([layer.operator])]
        packs = sparsity > 0 or any(keep.bits is not None for keep in keeps)
        self._will_probe = packs and not self.decisions.is_complete
        has_limit = any(keep.max_dropped_energy < 1 and keep.sparsity != 0 for keep in keeps)
        is_known = self.decisions.spread is not None and self.decisions.retained is None  # by a checkpoint, in part
        self._will_probe_energy = has_limit and sparsity > 0 and not is_known

    def wakes(self, trainer: pl.Trainer, model: nn.Module) -> bool:
        """Return whether layers that kept nothing so far do from now on; they are to be converted and judged then."""
        if self._added is None:
            self._added = AddedLayers(model)
        added = self._added.has_grown(model)
        if not self.decisions.idle and not self._any_rank_watches and not added:
            return False
        if self._idle is None:
            self._idle = IdleLayers(model, self.decisions.idle)
        if self._any_rank_watches is None:
            self._any_rank_watches = self._idle.watches  # of a checkpoint, which all ranks have read
        awake = added or self._idle.is_awake()
        if self._any_rank_watches:
            awake = trainer.strategy.reduce_boolean_decision(awake, all=False)
        if awake:
            self._end_watch()
            self.decisions.wake()
            self._patience = _PATIENCE
        return awake

    def _end_watch(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None

    def batch_starts(self, model: nn.Module, batch: Any) -> None:
        """Open the probes unless all is decided."""
        self._close_probes()  # of a batch that was skipped
        problem = refusal("Finding out in the first batch which layers are better left dense", RetentionProbe.needs)
        if self._will_probe and problem is not None:
            rank_zero_warn(f"{problem} All stay converted.")
            self._will_probe = False
        if not self._will_probe:
            return
        self.decisions.saved.settled.clear()  # what is undecided, and so kept, would be held against layers
        self._recomputations = RecomputationProbe(model, eagerly=self._skip_retained)
        self._recomputations.__enter__()
        if self._will_probe_energy:
            self._energy = EnergyProbe(model, eagerly=self._skip_retained)
            self._energy.__enter__()
        if self._skip_retained:
            self._retention = RetentionProbe(model, batch)
            self._retention.__enter__()

    def backward_starts(self) -> None:
        """Look for references in Python while the graph still keeps what it needs, and nothing else does."""
        if self._retention is not None:
            self._retention.check_alive()

    def batch_ends(self, trainer: pl.Trainer, model: nn.Module, report: ConversionReport) -> Decision | None:
        """Turn layers dense, or let them drop nothing; warn of those inside activation checkpoints.

        Not before backward is over: a checkpointed region has to run there as it did in the forward. By then references
        in Python show also for layers that kept their input themselves, at sparsity 0.

        Args:
            trainer: Knows the other ranks.
            model: The module that holds the layers.
            report: The conversion, which is brought up to date.

        Returns:
            What was decided; ``None`` unless this was the batch that was probed.

        Raises:
            MisconfigurationException: If no layer is left to convert. The fit is one step old, and would go on to save
                nothing.
        """
        retention, energy, recomputations = self._retention, self._energy, self._recomputations
        if recomputations is None:
            return None
        if retention is not None:
            retention.check_alive()
        self._close_probes()
        if not (retention or recomputations).ran:
            return None
        first = self.decisions.retained is None
        idle = [] if retention is None else self.decisions.filter_undecided(recomputations.idle)
        retained = [] if retention is None else retention.apply(report)
        waits = not first and self._patience > 0
        self._will_probe = waits and trainer.strategy.reduce_boolean_decision(bool(idle), all=False)
        self._patience -= self._will_probe
        asleep = [] if self._will_probe else leave_dense(model, report, dict.fromkeys(idle, _IDLE))
        self._end_watch()
        self._idle = IdleLayers(model, [layer.fqn for layer in asleep])
        self._any_rank_watches = trainer.strategy.reduce_boolean_decision(self._idle.watches, all=False)
        spread: dict[str, float] = {}
        if energy is not None:
            energy.add_up(partial(sum_over_ranks, trainer))
            converted = {layer.fqn for layer in report.converted}
            spread = {name: share for name, share in energy.spread.items() if name in converted}
            keep_blocks(model, report, spread)
        if first and not asleep:
            check_any_left(report)
        recomputed = set(self.decisions.filter_undecided(recomputations.recomputed))
        _warn_of_checkpoints([layer for layer in report.converted if layer.fqn in recomputed])
        decision = Decision(retained, spread, asleep)
        self.decisions.add(decision, idle if self._will_probe else [])
        return decision

    def stop(self) -> None:
        """Close the probes, and watch no layers any more, whatever happened in the step."""
        self._end_watch()
        self._close_probes()
        if self._added is not None:
            self._added.close()
            self._added = None

    def _close_probes(self) -> None:
        for probe in (self._retention, self._energy, self._recomputations):
            if probe is not None:
                probe.close()
        self._retention = self._energy = self._recomputations = None


_PATIENCE = 16
"""Batches in which layers that have begun to keep something may keep nothing, as in phases of one batch."""
_IDLE = "it kept nothing in the first batch (it is frozen, or was not called); it is converted when it does"


def sum_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    """Return the sum of ``values`` over the ranks of a distributed training."""
    total = trainer.strategy.reduce(values, reduce_op="sum")
    assert isinstance(total, Tensor)
    return total


def _warn_of_checkpoints(layers: Sequence[LayerReport]) -> None:
    if layers:
        noun = "layers" if any(layer.operator != "linear" for layer in layers) else "linear layers"
        rank_zero_warn(
            f"{len(layers)} converted {noun} run only inside an activation checkpoint: "
            f"{shortened([layer.fqn for layer in layers])}. Of a checkpointed "
            "region only the input is kept for backward, so packing there costs gradient quality and saves memory for "
            "no longer than the region's own backward takes. HINT: leave these layers out with `rules={name: None}`, "
            "or do not checkpoint them."
        )


# === Trials of tuners =================================================================================================


class TrialProbe(pl.Callback):
    """Probes the first batch of a tuner's trials in place of a callback, which is not called there.

    Args:
        owner: The callback; its ``on_exception`` is called also where a trial has replaced the list that it is in.
        probe: What it probes a first batch with.
        begin: Called when trials begin.
        end: Called at the end of each of their batches.
    """

    def __init__(
        self,
        owner: pl.Callback,
        probe: FirstBatchProbe,
        begin: Callable[[pl.LightningModule], None],
        end: Callable[[pl.Trainer, pl.LightningModule], None],
    ) -> None:
        self._owner, self._probe, self._begin, self._end = owner, probe, begin, end
        self._undo: list[Callable[[], None]] = []
        self.ran = False
        """Whether there were trials in this fit, which is still to begin: who loads a checkpoint is their tuner."""

    def wait(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Join the trials of this fit from now on."""
        self.leave()

        def join() -> None:
            if self._owner not in trainer.callbacks and self not in trainer.callbacks:  # type: ignore[attr-defined]
                trainer.callbacks.append(self)  # type: ignore[attr-defined]  # the tuner's own list, which ends with it
                self.ran = True
                self._begin(pl_module)

        def clean_up(exception: BaseException) -> None:
            self._owner.on_exception(trainer, pl_module, exception)

        strategy = trainer.strategy
        self._undo = [_extend_hook(strategy, "on_train_start", join), _extend_hook(strategy, "on_exception", clean_up)]

    def leave(self) -> bool:
        """Join no more of them; close what one that ran out of memory has left open. Return whether there were any."""
        ran, self.ran = self.ran, False
        for undo in self._undo:
            undo()
        self._undo = []
        self._probe.stop()
        return ran

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._probe.batch_starts(pl_module, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end(trainer, pl_module)


def _extend_hook(strategy: Strategy, name: str, action: Callable[..., None]) -> Callable[[], None]:
    """Let a hook of ``strategy`` do ``action`` too; return what ends that.

    A hook that somebody else has put around it meanwhile stays, and what is inside then does nothing.
    """
    attributes, before, active = vars(strategy), vars(strategy).get(name), [True]
    original = getattr(strategy, name, None)
    if original is None:  # of a later Lightning: nobody would call it
        return lambda: None

    def hook(*arguments: Any) -> None:
        original(*arguments)
        if active[0]:
            action(*arguments)

    def undo() -> None:
        active[0] = False
        if attributes.get(name) is hook:
            del attributes[name]
            if before is not None:
                attributes[name] = before

    attributes[name] = hook
    return undo
