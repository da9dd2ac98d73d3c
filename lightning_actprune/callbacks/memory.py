"""``ActivationMemoryMonitor``: show, log and draw what layers keep for backward, and where the peak of a step is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter, tabulate_memory
from lightning_actprune.analysis.plots import epochs_picture, layers_picture, step_picture
from lightning_actprune.analysis.step_memory import StepMemoryRecorder
from lightning_actprune.callbacks.display import show, tabulate_keepers, tabulate_step
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
"""By which factor the reported bytes of compiled code may exceed the observed ones."""
MAX_EPOCHS = 1000
"""Epochs that the history keeps, the latest ones."""
_DPI = 150
_BAR_NAMES = "actprune/stored_mib", "actprune/saved_frac"
"""Totals that the progress bar shows without and with those of the dense model."""
_BATCH_SIZE = 1
"""Weight of values that are logged once an epoch, which has no effect. Without it Lightning looks for a batch size in
the batch, and raises in ``training_step(self, dataloader_iter)``, where it sees no batch."""


class ActivationMemoryMonitor(TrainerCallback):
    """Show and log what a training step per epoch keeps for backward, in total and by layer, and where its peak is.

    It works with and without ``ActivationPruning``, so a dense and a pruned run can be compared. Kept bytes are counted
    exactly, on any device. So are the bytes that the same step would keep without conversion: for these, converted
    layers run once more without values (``analysis.dense_footprint``). On CUDA it also reads the allocator: growth of
    the requested bytes over the forward, and bytes in use over the step. For this it resets the peak statistics of the
    device many times in the measured step of an epoch.

    It prints once per fit, after the first measured step: what the whole model keeps, dense and now; the peak of the
    step, where it is, and about that of the dense model; what ``ActivationPruning`` has converted, and why layers stay
    dense; the largest of what is kept, and advice if more than a third of it is uncompressed. ``report.step``, a
    ``StepMemory``, has all of it for every moment of the step. Without CUDA its bytes are counted: parameters,
    gradients, optimizer state, batch and saved tensors, but no temporary tensors.

    At the end of each epoch it logs means over the ranks to every logger and to ``callback_metrics``, where
    ``ModelCheckpoint`` and ``EarlyStopping`` can monitor them. ``callback_metrics`` and the progress bar get the values
    of their own rank as soon as a step is measured:

    - ``actprune/dense_mib``: what the whole model would keep without conversion, in MiB
    - ``actprune/stored_mib``: what it keeps, in MiB
    - ``actprune/saved_mib``, ``actprune/saved_frac``: the difference, in MiB and as a fraction of the first
    - ``actprune/sparsity``: the highest of a layer
    - ``actprune/activations_mib``: growth of the allocated bytes over the forward, in MiB (CUDA only)
    - ``actprune/peak_mib``: most bytes allocated during the step, in MiB (CUDA only)

    Where compiled code hides converted layers, it is unknown what the dense model would keep. Then
    ``actprune/stored_mib`` replaces the first four, also in the progress bar. The table still lists how compiled code
    keeps each layer (``ActivationPruning.compiled``), beside what backward reads; the compiler of a dense model may
    recompute some of that. It does not if code was compiled for several batch sizes. If blocks share their
    code, one of them is listed, and the others count as "everything else".

    "Kept anyway" in the table means that something else keeps the input of the layer too, such as a ReLU before it, a
    sister layer or the batch. A dense layer then costs nothing there, and packing adds what it stores.
    ``ActivationPruning`` leaves such layers dense by default.

    For the monitor, the forward ends when gradients are zeroed or backward begins, whichever comes first. It cannot
    measure a step with ``torch.func`` transforms, which forbid the hooks that count saved tensors.

    Args:
        measure_batch: Index of the batch to measure in each epoch. It is the last batch if there are fewer or
            ``max_steps`` is reached before; if the loader does not know its length, none is measured then, and a fit
            without any says so. It is the next batch if ``training_step`` returns ``None``. The first batches also pay
            for lazy setup.
        verbose: What to print: nothing (``False`` or 0), the above once per fit (1, the default), or also who keeps
            what by operation, the parts of the peaks, and the table of layers in each epoch (``True`` or 2). The
            progress bar shows ``actprune/saved_frac`` unless it is nothing; logging does not depend on it.
        log_layers: Whether to log each layer, on rank zero and to loggers only: ``dense_mib``, ``stored_mib`` and
            ``sparsity`` as ``actprune_layers/<layer>/stored_mib``. If the model logs ``"step"``, which Lightning uses
            as the x-axis of the totals, layers still use the step of the training.

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
    @override
    def tells_layers(self) -> bool:
        return bool(self.verbose)

    @property
    def report(self) -> MemoryReport | None:
        """The latest measurement, ``None`` before the first."""
        return self._report

    @property
    def history(self) -> list[dict[str, float | None]]:
        """The totals of each measured epoch in the current or the last fit, as flat rows for a DataFrame.

        A row has ``epoch``, ``step`` (``trainer.global_step`` in the measured step) and ``MemoryReport.totals``. Only
        the latest 1000 epochs are kept.
        """
        return [dict(row) for row in self._history]

    def save_figures(self, folder: str | Path) -> list[Path]:
        """Write pictures of the last measurement: ``layers.png``, ``epochs.png`` and ``step.png``.

        Args:
            folder: Where to write them; created if missing.

        Returns:
            The files, without those that would show nothing; none on ranks other than zero.

        Raises:
            MisconfigurationException: If nothing was measured yet.
            ImportError: If matplotlib is not installed.
        """
        if self._report is None:
            raise MisconfigurationException("There is no step to draw yet. HINT: call `trainer.fit` with this monitor.")
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return []
        rows, figures = self._report.to_rows(), {}
        if rows:
            epoch = f", epoch {self._history[-1]['epoch']}" if self._history else ""
            figures["layers"] = layers_picture(rows, f"Kept for backward{epoch}")
        if self._history:
            figures["epochs"] = epochs_picture(self.history)
        if self._report.step is not None and self._report.step.moments:
            figures["step"] = step_picture({"Memory over the step": self._report.step})
        Path(folder).mkdir(parents=True, exist_ok=True)
        files = {Path(folder) / f"{name}.png": figure for name, figure in figures.items()}
        for path, figure in files.items():
            figure.savefig(path, dpi=_DPI)
        return list(files)

    # === Hooks, in the order of a fit =================================================================================

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
        # "At least": a run that resumes inside an epoch may begin after the batch to measure.
        due = batch_idx >= min(self.measure_batch, trainer.num_training_batches - 1)
        if self._epoch != trainer.current_epoch and (due or _is_last(trainer, pl_module, batch_idx)):
            self._epoch, self._step = trainer.current_epoch, trainer.global_step
            self._begin(pl_module, batch, trainer.optimizers)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._end_forward(pl_module)
        if self._recorder is not None:
            self._recorder.moment()  # while gradients of the previous step still exist

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
            self._stop()  # skipped, so it kept nothing: measure the next one
            self._epoch = None
        if self._end_step(trainer) and self._report is not None:
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
            show(trainer, tabulate_memory(report, trainer.current_epoch))

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._has_begun and not self._history:
            hint = " HINT: lower `measure_batch`." if self.measure_batch else ""
            rank_zero_warn(
                f"ActivationMemoryMonitor has measured no step: the fit ended before batch {self.measure_batch} of an "
                f"epoch, or skipped it and all later ones.{hint}"
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

    # === Printing and measuring =======================================================================================

    def _show(self, trainer: pl.Trainer, report: MemoryReport) -> None:
        """Print the report of a fit, with what each ``ActivationPruning`` has converted."""
        self._was_shown = True
        prunings = [callback for callback in _find_prunings(trainer) if callback.is_told_by_monitor(trainer)]
        layers = [line for callback in prunings for line in callback.describe()]
        rest = report.describe_rest()
        if any(callback.memory_budget is not None for callback in prunings):
            rest = rest[:1]  # without advice: the budget leaves dense what fits
        show(trainer, "\n".join([*report.describe_sizes(), *layers, *rest]))
        epoch, step = trainer.current_epoch, report.step
        if step is not None and is_detailed(self.verbose):
            show(trainer, tabulate_keepers(step, epoch), tabulate_step(step, epoch))

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
        """Read the meter and the allocator while all saved tensors still exist."""
        if self._meter is None:
            return
        self._pending = self._meter.report()
        if pl_module.device.type == "cuda":
            self._pending.measured_activation_bytes = _read_requested_bytes(pl_module.device) - self._requested_before
        self._close_meter()

    def _end_step(self, trainer: pl.Trainer) -> bool:
        """Finish the measurement, if this step was measured; return True if it was."""
        if self._recorder is None:
            return False
        if self._meter is not None:  # no hook ran between forward and backward, so it is too late for the allocator
            self._pending = self._meter.report()
        self._recorder.__exit__()
        report, step = self._pending, self._recorder.result()
        self._stop()
        if report is None:
            return False
        report.step = step
        report.measured_peak_bytes = step.peak_bytes if step.measured else None
        report.compiled = _find_compiled_rows(trainer, report)
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


# === What is measured =================================================================================================
def _find_prunings(trainer: pl.Trainer) -> list[ActivationPruning]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, ActivationPruning)]


def _find_compiled_rows(trainer: pl.Trainer, report: MemoryReport) -> list[Row]:
    """Return how compiled code keeps its values, as an ``ActivationPruning`` reports it.

    Rows of a graph that was compiled again count once. Return nothing if they exceed what the step has kept: then some
    belong to other graphs, for example of another batch size.
    """
    rows = [row for callback in _find_prunings(trainer) for row in callback.compiled]
    lengths = (n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and rows == rows[:n] * (len(rows) // n))
    rows = rows[: next(lengths, 0)]
    return rows if sum(row.stored_bytes for row in rows) <= _AS_MUCH * report.compiled_bytes else []


def _read_requested_bytes(device: torch.device) -> int:
    """Return the bytes that live tensors requested from the allocator, without rounding and cache."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def _is_last(trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int) -> bool:
    """Return True if ``max_steps`` ends the fit with this batch.

    With manual optimization, every optimizer is assumed to step in every batch, and each step counts.
    """
    steps = 1 if pl_module.automatic_optimization else len(trainer.optimizers)
    completes = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return completes and 0 < trainer.max_steps <= trainer.global_step + steps


# === Logging ================================================================================================
def _log_totals(trainer: pl.Trainer, pl_module: pl.LightningModule, report: MemoryReport | None, in_bar: bool) -> None:
    """Log the totals as means over the ranks, if every rank has measured a step.

    Call it on every rank at the end of every epoch: if only ranks with a report reduced, they would wait forever.

    Args:
        trainer: Connects to the other ranks.
        pl_module: The module to log through.
        report: The measurement of this rank in the epoch, if any.
        in_bar: Whether the progress bar shows the saved fraction.
    """
    if trainer.barebones:  # it logs nothing, and warns of each attempt
        return
    if trainer.world_size > 1:
        # A progress bar exists on one rank only. It has read the metrics of the epoch, which starts reductions over the
        # ranks. The other ranks must join them here, before any other reduction.
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
    has_dense = trainer.strategy.reduce_boolean_decision(report.dense_bytes is not None)
    for name, value in _compute_totals(report, has_dense).items():
        prog_bar = in_bar and name == _BAR_NAMES[has_dense]
        pl_module.log(name, value, prog_bar=prog_bar, sync_dist=True, batch_size=_BATCH_SIZE)


def _log_at_once(trainer: pl.Trainer, pl_module: pl.LightningModule, report: MemoryReport, in_bar: bool) -> None:
    """Send the totals of this rank to ``callback_metrics`` and the progress bar, before the epoch ends."""
    if trainer.barebones:
        return
    has_dense = report.dense_bytes is not None
    for name, value in _compute_totals(report, has_dense).items():
        prog_bar = in_bar and name == _BAR_NAMES[has_dense]
        on_host = torch.tensor(value)  # the progress bar reads it after each batch, and would wait for the GPU
        pl_module.log(
            name, on_host, on_step=True, on_epoch=False, prog_bar=prog_bar, logger=False, batch_size=_BATCH_SIZE
        )


def _log_layers(trainer: pl.Trainer, report: MemoryReport) -> None:
    """Log what each layer keeps to every logger, as ``actprune_layers/<layer>/stored_mib``."""
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
    """Return the totals by name; ``has_dense``: including those of the dense model."""
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
    """Raise if there is another monitor: Lightning would merge the values that both log under a name."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    count = sum(isinstance(callback, ActivationMemoryMonitor) for callback in callbacks)
    if count > 1:
        raise MisconfigurationException(
            f"A Trainer takes one ActivationMemoryMonitor, got {count}: they log under the same names, so loggers "
            "would get means over all of them. HINT: keep one of them in `callbacks`."
        )
