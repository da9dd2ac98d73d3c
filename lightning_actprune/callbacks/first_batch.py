"""Probe the first training batch of a fit for layers that are better kept in another way.

Layers whose input is retained for backward anyway become dense. Layers whose dropped blocks would hold too much of the
input's energy drop no block. With a ``max_error``, layers get the bits that it takes. A warning names layers inside an
activation checkpoint, since the user has to decide which of the two to remove.

``BatchSizeFinder`` and ``LearningRateFinder`` run trials in ``on_fit_start``, without the callbacks of the Trainer.
Their trials use the same layers as the fit: hooks of the strategy are called there too, when training starts and when
something raises, so a callback can join a trial, and clean up after one that fails earlier. The first batch of the
first trial is probed instead of that of the fit, and its results hold for later trials and for the fit. These probe no
batch, so a step of the fit keeps as much as a step of a trial. Until the probe no layer drops blocks that it may have
to keep, so the probed step keeps at least as much. The module's own hooks are not changed: it may be copied or pickled
in a trial.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
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
from lightning_actprune.analysis.measured_bits import BitsChoice, BitsProbe, set_bits
from lightning_actprune.callbacks.progress import estimate_steps
from lightning_actprune.codec.private import refusal
from lightning_actprune.config import Config, Operator, drops_blocks, shorten
from lightning_actprune.operators.sites import SiteDecisions
from lightning_actprune.report import ConversionReport, LayerReport

_FIRST_POINT = 100
"""Steps of a training before which bits are not measured again."""
_SHARES = 0.01, 0.03, 0.1, 0.2, 0.35, 0.6
"""After which shares of a training bits are measured again: errors grow most from a tenth to a half of it."""
_POINTS = 100, 300, 1000, 3000, 10000, 30000
"""The same in steps, for a training without an end."""
_MORE = 1.15
"""How much more memory a later step may take than the one that was measured first."""
_PATIENCE = 16
"""Batches in which layers that just woke may keep nothing, for example in phases of one batch."""
_IDLE = "it kept nothing in the first batch (it is frozen, or was not called); it is converted when it does"


class Decision(NamedTuple):
    """What the first batch has shown and changed.

    Args:
        retained: Layers that became dense, since something else keeps their input.
        spread: Share of the energy that would be dropped, by name of the layers that therefore drop nothing.
        idle: Layers that are dense for now, since they have kept nothing yet.
        choice: The bits of layers, by the errors of their weight gradients.
    """

    retained: list[LayerReport]
    spread: dict[str, float]
    idle: Sequence[LayerReport] = ()
    choice: BitsChoice | None = None


BITS_STATE = "bits", "operators", "partial", "again", "peak"
"""What a checkpoint has of bits that are measured."""


class Decisions:
    """Decisions of first batches about the layers, and how long they hold."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        """Names of the converted layers, whatever was decided about them."""
        self.spread: dict[str, float] | None = None
        """Share of the energy that would be dropped, for layers that therefore drop nothing; ``None`` before a probe.
        """
        self.retained: dict[str, str | None] | None = None
        """Layers that became dense, with what keeps their input; ``None`` before a probe.

        Layers without a reason have kept nothing yet and are dense until they do."""
        self.bits: dict[str, int | None] | None = None
        """Bits by name of the layers of which errors were measured; ``None`` before that."""
        self.operators: dict[Operator, int] = {}
        """Bits of other operators that have more than the settings say."""
        self.partial: dict[str, Any] | None = None
        """What batches have shown before the last one that a choice of bits needs (``BitsProbe.state``)."""
        self.again = 0
        """How many of the steps at which bits are measured again are over."""
        self.peak = 0
        """The most memory that was in use until the end of a batch that was measured; 0 without a GPU."""
        self.saved = SiteDecisions()
        """How tensors of other operations are kept, as first forwards decide."""
        self._decided: frozenset[str] = frozenset()
        self._trial_model: weakref.ref[nn.Module] | None = None

    def fit_begins(self, model: nn.Module) -> None:
        """Forget all decisions, unless trials of ``model`` made them and no training has followed yet."""
        if self._trial_model is None or self._trial_model() is not model:
            self.forget()

    def forget(self) -> None:
        """Forget all decisions."""
        self.spread, self.retained, self.bits = None, None, None
        self.operators, self.partial, self.again, self.peak = {}, None, 0, 0
        self._decided, self._trial_model = frozenset(), None

    @property
    def idle(self) -> list[str]:
        """Names of the layers that have kept nothing yet."""
        return [name for name, reason in (self.retained or {}).items() if reason is None]

    def wake(self) -> None:
        """Forget the decisions about layers that kept nothing."""
        self._decided -= set(self.idle)
        self.retained = {name: reason for name, reason in (self.retained or {}).items() if reason is not None}

    def end_with_the_fit(self) -> None:
        """Let decisions hold for this fit only."""
        self._trial_model = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_trial_model": None}  # a copy of the model is another one

    def filter_undecided(self, layers: Sequence[str]) -> list[str]:
        """Return the layers without a decision."""
        return [name for name in layers if name not in self._decided]

    def add(self, decision: Decision, undecided: Sequence[str]) -> None:
        """Record a decision about all layers that are not ``undecided``."""
        self.spread = (self.spread or {}) | decision.spread
        retained = {layer.fqn: layer.reason for layer in decision.retained}
        self.retained = (self.retained or {}) | retained | {layer.fqn: None for layer in decision.idle}
        self._decided |= set(self.layers).difference(undecided)

    def add_bits(self, choice: BitsChoice) -> None:
        """Record the bits of layers, and of other operators."""
        self.bits = (self.bits or {}) | choice.bits
        self.operators = self.operators | choice.operators

    def add_trial_of(self, model: nn.Module) -> None:
        """Let decisions hold for the next training of ``model``: in this fit or, after ``Tuner``, in another."""
        self._trial_model = weakref.ref(model)

    @property
    def is_complete(self) -> bool:
        """Whether every layer has a decision."""
        return bool(self.layers) and self._decided.issuperset(self.layers)

    def apply(self, model: nn.Module, report: ConversionReport) -> None:
        """Apply the decisions to layers that were converted again."""
        self.layers = [layer.fqn for layer in report.converted]
        self._change(model, report)

    def restore(self, model: nn.Module, report: ConversionReport, state: Mapping[str, Any]) -> Decision:
        """Apply the decisions of a checkpoint to layers that were just converted, and return them."""
        for name in ("spread", "retained", *BITS_STATE):
            setattr(self, name, state.get(name, getattr(self, name)))
        self._decided = frozenset(self.layers)
        rows, idle = self._change(model, report), self.idle
        if not idle:
            check_any_left(report)
        retained, asleep = ([row for row in rows if (row.fqn in idle) == sleeps] for sleeps in (False, True))
        return Decision(retained, self.spread or {}, asleep)

    def _change(self, model: nn.Module, report: ConversionReport) -> list[LayerReport]:
        reasons = {name: _IDLE if reason is None else reason for name, reason in (self.retained or {}).items()}
        rows = leave_dense(model, report, reasons)
        keep_blocks(model, report, self.spread or {})
        set_bits(model, report, self.bits or {})
        return rows


def points_of(steps: float) -> list[int]:
    """Return the optimizer steps of a training after which bits are measured again."""
    found = _POINTS if math.isinf(steps) else [int(share * steps) for share in _SHARES]
    return [point for point in found if point >= _FIRST_POINT]


def _has_room(peak: int, trainer: pl.Trainer, device: torch.device) -> bool:
    """Return True if a GPU has room for a step of this peak with a few more bits, and for the state of optimizers."""
    if device.type != "cuda":
        return True
    states = (
        value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
    )
    needed = _MORE * peak + sum(
        value.nbytes for value in states if isinstance(value, Tensor) and value.device == device
    )
    return bool(peak and needed < _room(device))


def _room(device: torch.device) -> int:
    """Return the bytes of a GPU that this process has or can get."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def check_any_left(report: ConversionReport) -> None:
    """Raise if nothing is compressed any more."""
    if not report.converted and report.saved is None and not report.recomputed:
        raise MisconfigurationException(
            "No layer is left to convert: packing their inputs would add memory, or drop too much of them:\n"
            f"{report.describe_skipped()}\nHINT: choose other layers with `rules`, remove the callback, or pack "
            "anyway with `ActivationPruning(skip_retained=False)` or a higher `max_dropped_energy`."
        )


# === The probe ========================================================================================================
class FirstBatchProbe:
    """Decides once, in the first training batch that runs a forward, which layers stay dense.

    Args:
        skip_retained: Whether retained layers become dense; if not, the probes see nothing inside compiled modules.
        max_error: Bound on the error of weight gradients by which bits are chosen, ``None`` to leave them.
        owner: Name of the conversion.
        config: Its settings.
    """

    def __init__(self, skip_retained: bool, max_error: float | None, owner: str, config: Config) -> None:
        self._skip_retained, self._max_error = skip_retained, max_error
        self._owner, self._config = owner, config
        self.decisions = Decisions()
        self._will_probe = self._will_probe_energy = False
        self._retention: RetentionProbe | None = None
        self._energy: EnergyProbe | None = None
        self._recomputations: RecomputationProbe | None = None
        self._bits: BitsProbe | None = None
        self._open_bits: BitsProbe | None = None
        """The same in a batch that it measures."""
        self._will_choose_bits = self._measures_again = False
        self._points: Sequence[int] | None = None
        self._idle: IdleLayers | None = None
        self._added: AddedLayers | None = None
        self._any_rank_watches: bool | None = None
        """Whether any rank watches calls of idle layers: then the ranks ask each other in each batch."""
        self._patience = 0
        """How many more batches to wait for layers that were idle, if they keep nothing in the next one."""

    @property
    def judges_energy(self) -> bool:
        """Whether the next batch will show which layers drop nothing."""
        return self._will_probe and self._will_probe_energy

    @property
    def waits(self) -> bool:
        """Whether this batch or a later one will be probed."""
        return self._will_probe or self._will_choose_bits

    def ask(self, report: ConversionReport, sparsity: float) -> None:
        """Probe the next batch for decisions that are missing, if any layer packs its input.

        Args:
            report: The conversion.
            sparsity: Highest sparsity that a layer will have.
        """
        keeps = [layer.keep for layer in report.converted if layer.keep is not None and drops_blocks([layer.operator])]
        packs = sparsity > 0 or any(keep.bits is not None for keep in keeps)
        self._will_probe = packs and not self.decisions.is_complete
        has_limit = any(keep.max_dropped_energy < 1 and keep.sparsity != 0 for keep in keeps)
        self._will_probe_energy = has_limit and sparsity > 0
        of_bits = [layer.fqn for layer in report.converted if drops_blocks([layer.operator])]
        is_missing = self.decisions.bits is None or self.decisions.partial is not None
        is_missing = is_missing or bool(self.decisions.filter_undecided(of_bits))
        self._will_choose_bits = self._max_error is not None and bool(of_bits) and is_missing
        self._measures_again = self.decisions.bits is not None and self.decisions.partial is not None
        self._bits, self._points = None, None

    def is_due(self, trainer: pl.Trainer, device: torch.device) -> bool:
        """Return True if this batch shows the bits once more; it then runs eagerly.

        The bits of a first batch may be too few, or more than it takes, once the training has gone on. A step with a
        second backward must not be what runs out of memory, though: there has to be room for one as large as the first
        was, and for the state of optimizers, which was not there yet.
        """
        if self._max_error is None or self._will_choose_bits or self.decisions.bits is None:
            return False
        if self._points is None:
            self._points = points_of(estimate_steps(trainer))
        over = sum(trainer.global_step >= point for point in self._points)
        if over <= self.decisions.again:
            return False
        self.decisions.again = over
        return trainer.strategy.reduce_boolean_decision(_has_room(self.decisions.peak, trainer, device), all=True)

    def measure_again(self) -> None:
        """Measure bits in the next batch, of layers whose bits were chosen, too."""
        self._will_choose_bits = self._measures_again = True

    def wakes(self, trainer: pl.Trainer, model: nn.Module) -> bool:
        """Return True if idle layers, or new ones, keep their input from now on; convert and judge them then."""
        if self._added is None:
            self._added = AddedLayers(model)
        added = self._added.has_grown(model)
        if not self.decisions.idle and not self._any_rank_watches and not added:
            return False
        if self._idle is None:
            self._idle = IdleLayers(model, self.decisions.idle)
        if self._any_rank_watches is None:
            self._any_rank_watches = self._idle.watches  # from a checkpoint, which all ranks have read
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

    def batch_starts(self, model: nn.Module, batch: Any, starts_step: bool) -> None:
        """Open the probes unless all is decided.

        Args:
            model: The module that holds the layers.
            batch: The batch.
            starts_step: Whether gradients are of this batch alone: it is the first one of an optimizer step.
        """
        self._close_probes()  # of a batch that was skipped
        problem = refusal("Finding out in the first batch which layers are better left dense", RetentionProbe.needs)
        if self._will_probe and problem is not None:
            rank_zero_warn(f"{problem} All stay converted.")
            self._will_probe = False
        if self._will_choose_bits and starts_step:
            if self._bits is None:
                known = {} if self._measures_again else self.decisions.bits or {}
                config = self._config.with_bits(self.decisions.operators)
                self._bits = BitsProbe(model, self._owner, config, known)
                if self.decisions.partial is not None:
                    self._bits.restore(self.decisions.partial)
            self._open_bits = self._bits
            self._open_bits.open()
        if not self._will_probe:
            return
        self.decisions.saved.quiet.clear()  # tensors at new sites stay uncompressed, and would count as retained inputs
        self._recomputations = RecomputationProbe(model, eagerly=self._skip_retained)
        self._recomputations.__enter__()
        if self._will_probe_energy:
            self._energy = EnergyProbe(model, eagerly=self._skip_retained)
            self._energy.__enter__()
        if self._skip_retained:
            self._retention = RetentionProbe(model, batch)
            self._retention.__enter__()

    def backward_starts(self, loss: Tensor) -> None:
        """Look for references in Python while the graph still keeps what it needs, and nothing else does."""
        if self._retention is not None:
            self._retention.check_alive()
        if self._open_bits is not None:
            self._open_bits.backward_starts(loss)

    def backward_ends(self) -> None:
        """Take note of the gradients of this batch."""
        if self._open_bits is not None:
            self._open_bits.backward_ends()

    def batch_ends(self, trainer: pl.Trainer, model: nn.Module, report: ConversionReport) -> Decision | None:
        """Change layers as this batch has shown, and return how; ``None`` if nothing was probed.

        Args:
            trainer: Connects to the other ranks.
            model: The module that holds the layers.
            report: The conversion, which is updated.

        Raises:
            MisconfigurationException: If no layer is left to convert; the rest of the fit would save nothing.
        """
        bits = self._open_bits
        decision = self._judge_layers(trainer, model, report)
        self._close_probes()
        if bits is None:
            return decision
        assert self._max_error is not None
        mean_over = trainer.world_size if trainer.accumulate_grad_batches == 1 else 1  # else they are each rank's own
        current = self.decisions.bits if self._measures_again else None
        choice = bits.choose(self._max_error, partial(sum_over_ranks, trainer), mean_over, current)
        self.decisions.partial = bits.state()
        if choice is None:  # the next batch shows it
            return decision
        self._bits, self._will_choose_bits, self._measures_again = None, False, False
        device = next(model.parameters()).device
        if device.type == "cuda" and not self.decisions.peak:
            self.decisions.peak = torch.cuda.max_memory_allocated(device)
        if current is not None and not choice.operators and choice.bits.items() <= current.items():
            return decision
        if current is not None and not self._may_take(trainer, choice.more_bytes, device):
            rank_zero_warn(
                f"The predicted error of the gradient is above `max_error={self._max_error:g}`, but a GPU has no room "
                f"for {choice.more_bytes / 2**20:.0f} MiB more. Bits stay as they are. HINT: a smaller batch, or a "
                "larger `max_error`."
            )
            return decision
        set_bits(model, report, choice.bits)
        self.decisions.add_bits(choice)
        return (Decision([], {}) if decision is None else decision)._replace(choice=choice)

    @staticmethod
    def _may_take(trainer: pl.Trainer, nbytes: float, device: torch.device) -> bool:
        """Return True if the GPU of each rank has room for so many bytes above its highest peak."""
        has_room = device.type != "cuda" or torch.cuda.max_memory_allocated(device) + nbytes < _room(device)
        return trainer.strategy.reduce_boolean_decision(has_room, all=True)

    def _judge_layers(self, trainer: pl.Trainer, model: nn.Module, report: ConversionReport) -> Decision | None:
        """Make layers dense, or let them drop nothing; warn of those inside activation checkpoints.

        It waits for the end of backward, since a checkpointed region has to run there as in the forward. By then
        references in Python also show for layers that kept their input themselves, at sparsity 0.
        """
        retention, energy, recomputations = self._retention, self._energy, self._recomputations
        if recomputations is None:
            return None
        if retention is not None:
            retention.check_alive()
        self._close_probes()
        if not (retention or recomputations).ran:
            return None
        # === Layers that become dense: their input is retained, or they kept nothing ===
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
        # === Layers that drop nothing: the dropped blocks would hold too much energy ===
        spread: dict[str, float] = {}
        if energy is not None:
            energy.add_up(partial(sum_over_ranks, trainer))
            converted = {layer.fqn for layer in report.converted}
            spread = {name: share for name, share in energy.spread.items() if name in converted}
            keep_blocks(model, report, spread)
        if first and not asleep:
            check_any_left(report)
        # === Layers that run only inside a checkpoint: the user decides ===
        recomputed = set(self.decisions.filter_undecided(recomputations.recomputed))
        _warn_of_checkpoints([layer for layer in report.converted if layer.fqn in recomputed])
        decision = Decision(retained, spread, asleep)
        self.decisions.add(decision, idle if self._will_probe else [])
        return decision

    def stop(self) -> None:
        """Close the probes and stop watching layers, whatever happened in the step."""
        self._end_watch()
        self._close_probes()
        self._bits = None
        if self._added is not None:
            self._added.close()
            self._added = None

    def _close_probes(self) -> None:
        for probe in (self._retention, self._energy, self._recomputations, self._open_bits):
            if probe is not None:
                probe.close()
        self._retention = self._energy = self._recomputations = self._open_bits = None


def starts_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return True if a batch is the first of those whose gradients an optimizer step has."""
    return batch_idx % trainer.accumulate_grad_batches == 0


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
            f"{shorten([layer.fqn for layer in layers])}. A checkpointed region keeps only its input for backward, "
            "so packing there costs gradient quality and saves memory only during the region's own backward. HINT: "
            "exclude these layers with `rules={name: None}`, or do not checkpoint them."
        )


# === Trials of tuners =================================================================================================
class TrialProbe(pl.Callback):
    """Probes the first batch of a tuner's trials for a callback, which is not called there.

    Args:
        owner: The callback. Its ``on_exception`` is called even if a trial has replaced the list of callbacks.
        probe: Probes the batch.
        begin: Called when trials begin.
        end: Called at the end of each batch of a trial.
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
        """Whether trials have run before the fit begins: a checkpoint loaded in between belongs to the tuner."""

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
        """Stop joining trials, and clean up after one that ran out of memory. Return True if any ran."""
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
        self._probe.batch_starts(pl_module, batch, starts_step(trainer, batch_idx))

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._probe.backward_ends()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end(trainer, pl_module)


def _extend_hook(strategy: Strategy, name: str, action: Callable[..., None]) -> Callable[[], None]:
    """Let a hook of ``strategy`` call ``action`` too; return a function that undoes it.

    If another wrapper was put around the hook meanwhile, the hook stays inside it and does nothing more.
    """
    attributes, before, active = vars(strategy), vars(strategy).get(name), [True]
    original = getattr(strategy, name, None)
    if original is None:  # missing in a later Lightning: nobody would call it
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
