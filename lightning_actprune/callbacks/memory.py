"""``ActivationMemoryMonitor``: what the layers keep for backward and where the peak is, shown, logged and drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from rich.console import RenderableType
from torch.optim import Optimizer
from typing_extensions import override

from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter, describe_memory, tabulate_memory
from lightning_actprune.analysis.plots import epochs_picture, layers_picture, step_picture
from lightning_actprune.analysis.step_memory import StepMemoryRecorder
from lightning_actprune.callbacks.display import (
    describe_peak,
    describe_uncovered,
    show,
    tabulate_keepers,
    tabulate_step,
)
from lightning_actprune.callbacks.fit import (
    CurrentFit,
    TrainerCallback,
    Verbosity,
    check_verbose,
    is_detailed,
    run_check,
)
from lightning_actprune.callbacks.pruning import ActivationPruning
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.config import check_count, check_flag
from lightning_actprune.operators.hooks import explain
from lightning_actprune.report import MIB

_AS_MUCH = 1.02
"""By how much compiled code may be said to keep more than it was seen to."""
MAX_EPOCHS = 1000
"""Epochs that the history keeps, the latest."""
_DPI = 150
_BATCH_SIZE = 1
"""The weight of what is logged once an epoch, which counts for nothing; Lightning asks for it, or looks for it in the
batch, and raises where it can see none: with ``training_step(self, dataloader_iter)``."""


class ActivationMemoryMonitor(TrainerCallback):
    """Show and log what a training step per epoch keeps for backward, in all and layer by layer, and where its peak is.

    Works with and without ``ActivationPruning``, so that a dense and a pruned run can be compared. The bytes kept are
    counted exactly, on any device; so are those that the same step would keep if no layer were converted, for which
    converted layers run once more without values (``analysis.dense_footprint``). On CUDA the allocator is read too:
    growth of the requested bytes over the forward, and the bytes in use over the step, for which the peak statistics
    of the device are reset again and again in the measured step of an epoch.

    Printed are, once a fit, after the first measured step: what the whole model keeps, dense and now; who keeps more
    than a third of it as it is; what each layer keeps, those at corresponding places (``blocks.*.fc1``) in one row; and
    in which part of the step the peak lies: forward, backward or optimizer step, and what it would be with fewer
    activations. All of it, for every moment of the step, is in ``report.step``, a ``StepMemory``. Without CUDA its
    bytes are counted: parameters, gradients, optimizer state, batch and saved tensors, no temporary ones.

    Logged at the end of each epoch, as means over the ranks, to every logger and ``callback_metrics`` (so that
    ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them); ``callback_metrics`` and the progress bar have those of
    the own rank as soon as a step was measured:

    - ``actprune/dense_mib``: what the whole model would keep if no layer were converted, in MiB
    - ``actprune/stored_mib``: what it keeps, in MiB
    - ``actprune/saved_mib``, ``actprune/saved_frac``: the difference, in MiB and as a fraction of the first
    - ``actprune/sparsity``: the highest of a layer
    - ``actprune/activations_mib``: growth of the allocated bytes over the forward, in MiB (CUDA only)
    - ``actprune/peak_mib``: most bytes allocated during the step, in MiB (CUDA only)

    Where compiled code hides converted layers, what the dense model would keep is not known: ``actprune/stored_mib``
    is logged, and shown by the progress bar, in place of the first four. What the compiler was told to keep of each
    layer is in the table all the same, as ``ActivationPruning.compiled`` has it, beside what backward reads, of which a
    dense model's compiler may compute some again. Not so where several batch sizes were compiled for. Of blocks that
    share their code one is listed, and the others are a part of everything else.

    "Kept anyway" in the table means that something else keeps the layer's input too, such as a ReLU before it, a sister
    layer or the batch itself: the dense layer costs nothing there, and packing it adds what it stores.
    ``ActivationPruning`` leaves such layers dense unless told otherwise.

    The forward ends for the monitor where gradients are zeroed or backward begins, whichever comes first. A step that
    applies ``torch.func`` transforms cannot be measured, since they forbid the hooks that count saved tensors.

    Args:
        measure_batch: Index of the batch that is measured in each epoch, or the last one if there are fewer or
            ``max_steps`` is reached before (of a loader that does not know its length, none is then, and a fit without
            any says so); the next one if it is skipped, that is, if ``training_step`` returns ``None``. The first
            batches also pay for what is set up lazily.
        verbose: What is printed: nothing (``False`` or 0), the above once a fit (1, the default), or also who keeps
            what by operation and what the peaks consist of, and the table of the layers in each epoch (``True`` or
            2). The progress bar shows ``actprune/saved_frac`` unless it is nothing; logging does not depend on it.
        log_layers: Whether to log each layer too, on rank zero and to the loggers alone: ``dense_mib``, ``stored_mib``
            and ``sparsity`` as ``actprune_layers/<layer>/stored_mib``. Where the model logs ``"step"``, which Lightning
            takes for the x-axis of the totals, layers stay at the step of the training.

    Raises:
        MisconfigurationException: If an argument is not allowed; when a fit begins, if the Trainer has another monitor.

    Example:
        >>> import lightning as L
        >>> monitor = ActivationMemoryMonitor()
        >>> trainer = L.Trainer(callbacks=[monitor], logger=False)
        >>> monitor.report is None  # a MemoryReport once a step was measured
        True
    """

    without_trainer = "`lightning_actprune.analysis.memory.SavedTensorMeter` around a forward"

    def __init__(self, measure_batch: int = 3, verbose: Verbosity = 1, *, log_layers: bool = False) -> None:
        super().__init__()
        hint = "3 lets the first batches warm up."
        self.measure_batch = run_check(check_count, measure_batch, "measure_batch", hint)
        self.verbose = check_verbose(verbose)
        self.log_layers = run_check(check_flag, log_layers, "log_layers")
        self._fit = CurrentFit()
        self._report: MemoryReport | None = None
        self._pending: MemoryReport | None = None
        self._to_log = False
        self._epoch: int | None = None
        self._step = 0
        self._history: deque[dict[str, float | None]] = deque(maxlen=MAX_EPOCHS)
        self._was_shown = self._has_begun = self._backward = False
        self._meter: SavedTensorMeter | None = None
        self._recorder: StepMemoryRecorder | None = None
        self._requested_before = 0

    @property
    def report(self) -> MemoryReport | None:
        """The latest measurement, ``None`` before the first."""
        return self._report

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The totals of each epoch measured in the current or the last fit, flat rows fit for a DataFrame.

        ``epoch``, ``step`` (``trainer.global_step`` in the measured step) and what ``MemoryReport.totals`` returns; of
        a longer training the latest 1000 epochs.
        """
        return [dict(row) for row in self._history]

    def save_figures(self, folder: str | Path) -> list[Path]:
        """Write pictures of what was measured last: ``layers.png``, ``epochs.png`` and ``step.png``.

        Args:
            folder: Where to; made if it is missing.

        Returns:
            The files, of which those that would show nothing are missing; none on ranks other than zero.

        Raises:
            MisconfigurationException: If nothing was measured yet.
            ImportError: If matplotlib is not installed.
        """
        if self._report is None:
            raise MisconfigurationException("There is no step to draw yet. HINT: call `trainer.fit` with this monitor.")
        return _save_figures(self._report, self.history, Path(folder)) or []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit.begin(self, trainer)
            _check_alone(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._history.clear()
        self._epoch = None
        self._to_log = self._was_shown = self._has_begun = False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._has_begun = True
        # "At least": a run resumed in the middle of an epoch may begin behind the batch to measure.
        due = batch_idx >= min(self.measure_batch, trainer.num_training_batches - 1)
        if self._epoch != trainer.current_epoch and (due or _is_last(trainer, pl_module, batch_idx)):
            self._epoch, self._step = trainer.current_epoch, trainer.global_step
            self._begin(pl_module, batch, trainer.optimizers)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._end_forward(pl_module)
        if self._recorder is not None:
            self._recorder.moment()  # while the gradients of the step before are still there

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._end_forward(pl_module)
        self._backward = True
        if self._recorder is not None:
            self._recorder.mark("backward")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None:
            self._recorder.mark("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None and pl_module.automatic_optimization and not self._backward:
            self._stop()  # skipped, so nothing was kept: measure the next one
            self._epoch = None
        if self._end_step() and self._report is not None:
            _log_at_once(trainer, pl_module, self._report, in_bar=bool(self.verbose))
            if self.verbose and not self._was_shown:
                self._show(trainer, self._report)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        measured, self._to_log = self._to_log, False
        report = self._report if measured else None
        _log_totals(trainer, pl_module, report, in_bar=bool(self.verbose))
        if report is None:
            return
        if self.log_layers:
            _log_layers(trainer, report)
        if is_detailed(self.verbose):
            show(trainer, tabulate_memory(report, trainer.current_epoch, _find_compiled_rows(trainer, report)))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._has_begun and not self._history:
            hint = " HINT: lower `measure_batch`." if self.measure_batch else ""
            rank_zero_warn(
                f"ActivationMemoryMonitor has measured no step: the fit was over before batch {self.measure_batch} of "
                f"an epoch, or skipped it and those behind it.{hint}"
            )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        explain(exception)
        if self._fit.end(trainer):
            self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._fit.end(trainer):
            self._stop()

    def _show(self, trainer: pl.Trainer, report: MemoryReport) -> None:
        """Print what is printed once a fit."""
        self._was_shown = True
        epoch, step, detailed = trainer.current_epoch, report.step, is_detailed(self.verbose)
        rows = _find_compiled_rows(trainer, report)
        parts: list[RenderableType] = [
            text for text in (describe_memory(report, rows), describe_uncovered(report)) if text
        ]
        parts += [] if detailed else [tabulate_memory(report, epoch, rows)]  # which the end of the epoch prints
        if step is not None:
            parts += [tabulate_keepers(step, epoch), tabulate_step(step, epoch)] if detailed else []
            parts += [text for text in (describe_peak(step),) if text]
        show(trainer, *parts)

    def _begin(self, pl_module: pl.LightningModule, batch: Any, optimizers: Sequence[Optimizer]) -> None:
        self._stop()
        self._backward = False
        if pl_module.device.type == "cuda":
            self._requested_before = _read_requested_bytes(pl_module.device)
        self._meter = SavedTensorMeter(pl_module, batch)
        self._meter.__enter__()
        self._recorder = StepMemoryRecorder(pl_module, batch, optimizers, pl_module.device)
        self._recorder.__enter__()

    def _end_forward(self, pl_module: pl.LightningModule) -> None:
        """Read the meter and the allocator while everything that was saved is still there."""
        if self._meter is None:
            return
        self._pending = self._meter.report()
        if pl_module.device.type == "cuda":
            self._pending.measured_activation_bytes = _read_requested_bytes(pl_module.device) - self._requested_before
        self._close_meter()

    def _end_step(self) -> bool:
        """Take over what was measured, if this step was; return whether it was."""
        if self._recorder is None:
            return False
        if self._meter is not None:  # no hook ran between forward and backward: the allocator was asked too late
            self._pending = self._meter.report()
        self._recorder.__exit__()
        report, step = self._pending, self._recorder.result()
        self._stop()
        if report is None:
            return False
        report.step = step
        report.measured_peak_bytes = step.peak_bytes if step.measured else None
        self._report, self._to_log = report, True
        self._history.append({"epoch": self._epoch, "step": self._step, **report.totals()})
        return True

    def _stop(self) -> None:
        """Stop measuring, whatever happened in the step."""
        self._pending = None
        self._close_meter()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _close_meter(self) -> None:
        if self._meter is not None:
            self._meter.close()
            self._meter = None


def _find_compiled_rows(trainer: pl.Trainer, report: MemoryReport) -> list[Row]:
    """Return how what compiled code keeps is kept, as an ``ActivationPruning`` knows it.

    What is said again of a graph that was compiled again counts once. Nothing if that is more than the step has kept:
    then some of it is of other graphs, of another batch size say.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    rows = [row for callback in callbacks if isinstance(callback, ActivationPruning) for row in callback.compiled]
    lengths = (n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and rows == rows[:n] * (len(rows) // n))
    rows = rows[: next(lengths, 0)]
    return rows if sum(row.stored_bytes for row in rows) <= _AS_MUCH * report.compiled_bytes else []


def _read_requested_bytes(device: torch.device) -> int:
    """Return the bytes that live tensors asked the allocator for: no rounding, no cache."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def _is_last(trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int) -> bool:
    """Return whether ``max_steps`` ends the fit with this batch.

    Without automatic optimization, all optimizers are taken to step in every batch; each of them counts.
    """
    steps = 1 if pl_module.automatic_optimization else len(trainer.optimizers)
    completes = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return completes and 0 < trainer.max_steps <= trainer.global_step + steps


def _log_totals(trainer: pl.Trainer, pl_module: pl.LightningModule, report: MemoryReport | None, in_bar: bool) -> None:
    """Log the totals as means over the ranks, if all of them have measured a step.

    To be called on every rank in the end of every epoch: if only those that have a report reduced it, they would wait
    for the others for ever.

    Args:
        trainer: The trainer, which knows the other ranks.
        pl_module: The module to log through.
        report: What this rank has measured in the epoch, if it has.
        in_bar: Whether the progress bar shows the saved fraction.
    """
    if trainer.barebones:  # which logs nothing, and warns of each attempt
        return
    if trainer.world_size > 1:
        # A progress bar in front, which one rank alone has, has asked for the metrics of the epoch, and so begun to
        # reduce those that are reduced over the ranks. The other ranks must do that here, before anything else is.
        _ = trainer.callback_metrics
    measured = report is not None
    all_have = trainer.strategy.reduce_boolean_decision(measured)
    any_has = trainer.strategy.reduce_boolean_decision(measured, all=False)
    if not all_have:
        if any_has:
            rank_zero_warn(
                f"The memory totals of epoch {trainer.current_epoch} are not logged, since a rank has not measured a "
                "step. HINT: give `measure_batch` the same value on all ranks, below the number of batches."
            )
        return
    assert report is not None, "all ranks have measured"
    _check_trainer(trainer, pl_module)
    has_dense = trainer.strategy.reduce_boolean_decision(report.dense_bytes is not None)
    for name, value in _compute_totals(report, has_dense).items():
        prog_bar = in_bar and name == _choose_bar_name(has_dense)
        pl_module.log(name, value, prog_bar=prog_bar, sync_dist=True, batch_size=_BATCH_SIZE)


def _log_at_once(trainer: pl.Trainer, pl_module: pl.LightningModule, report: MemoryReport, in_bar: bool) -> None:
    """Give the totals of this rank to ``callback_metrics`` and the progress bar, long before the epoch ends."""
    if trainer.barebones:
        return
    _check_trainer(trainer, pl_module)
    has_dense = report.dense_bytes is not None
    for name, value in _compute_totals(report, has_dense).items():
        prog_bar = in_bar and name == _choose_bar_name(has_dense)
        on_host = torch.tensor(value)  # Lightning reads what the progress bar shows after each batch, and waits for it
        pl_module.log(
            name, on_host, on_step=True, on_epoch=False, prog_bar=prog_bar, logger=False, batch_size=_BATCH_SIZE
        )


def _check_trainer(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Raise if the module would log through another Trainer, which Lightning's own error takes for another mistake."""
    if pl_module.trainer is not trainer:
        raise MisconfigurationException(
            "ActivationMemoryMonitor cannot log: the model was given to another Trainer during this fit. HINT: give "
            "the other Trainer a copy of the model, or set `model.trainer` back to this one afterwards."
        )


def _choose_bar_name(has_dense: bool) -> str:
    """Return which of the totals the progress bar shows."""
    return "actprune/saved_frac" if has_dense else "actprune/stored_mib"


def _log_layers(trainer: pl.Trainer, report: MemoryReport) -> None:
    """Give what each layer keeps to every logger, in a group of its own, as ``actprune_layers/<layer>/stored_mib``."""
    # Lightning logs the totals of the epoch at this step, so all share an x-axis. It counts from zero and has no public
    # name; Lightning's own monitors read it here too. A model that logs "step" itself moves the totals and not the
    # layers: it may log "step" after all callbacks, and reading what it has logged would reduce over the ranks.
    step = max(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step) - 1, 0)
    for logger in trainer.loggers if trainer.is_global_zero else ():
        metrics = {
            logger.group_separator.join(("actprune_layers", row.fqn, name)): value
            for row in report.rows
            for name, value in (
                ("dense_mib", row.dense_bytes / MIB),
                ("stored_mib", row.stored_bytes / MIB),
                ("sparsity", row.sparsity),
            )
        }
        logger.log_metrics(metrics | {"epoch": trainer.current_epoch}, step=step)  # as Lightning adds it


def _compute_totals(report: MemoryReport, has_dense: bool) -> dict[str, float]:
    """Return the totals by the names under which they are logged; ``known``: also those of the dense model."""
    metrics = {"actprune/stored_mib": report.stored_bytes / MIB}
    if has_dense and report.dense_bytes is not None:
        metrics["actprune/dense_mib"] = report.dense_bytes / MIB
        metrics["actprune/saved_mib"] = (report.dense_bytes - report.stored_bytes) / MIB
        metrics["actprune/saved_frac"] = report.saved_fraction or 0.0
        metrics["actprune/sparsity"] = report.sparsity
    if report.measured_activation_bytes is not None:
        metrics["actprune/activations_mib"] = report.measured_activation_bytes / MIB
    if report.measured_peak_bytes is not None:
        metrics["actprune/peak_mib"] = report.measured_peak_bytes / MIB
    return metrics


def _check_alone(trainer: pl.Trainer) -> None:
    """Raise if there is another monitor: Lightning takes what both log under a name for two values of it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    count = sum(isinstance(callback, ActivationMemoryMonitor) for callback in callbacks)
    if count > 1:
        raise MisconfigurationException(
            f"A Trainer takes one ActivationMemoryMonitor, got {count}: they log under the same names, so that loggers "
            "would get means of what all of them measure. HINT: keep one of them in `callbacks`."
        )


@rank_zero_only
def _save_figures(report: MemoryReport, history: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the pictures of the layers, the epochs and the step, those that show anything, and return the files."""
    rows, figures = report.to_rows(), {}
    if rows:
        figures["layers"] = layers_picture(rows, f"Kept for backward, epoch {history[-1]['epoch']}" if history else "")
    if history:
        figures["epochs"] = epochs_picture(history)
    if report.step is not None and report.step.moments:
        figures["step"] = step_picture({"Memory over the step": report.step})
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in files.items():
        figure.savefig(path, dpi=_DPI)
    return list(files)
