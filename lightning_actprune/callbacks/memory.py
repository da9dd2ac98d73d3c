"""``ActivationMemoryMonitor``: what the layers keep for backward, shown and logged once an epoch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.table import Table
from torch.optim import Optimizer
from typing_extensions import override

from lightning_actprune.callbacks.display import MIB, mib, percent, shortened, show, table
from lightning_actprune.footprint import LayerFootprint, MemoryReport, SavedTensorMeter


class ActivationMemoryMonitor(pl.Callback):
    """Show and log what one training step per epoch keeps for backward, layer by layer.

    Works with and without ``ActivationPruning``, so that a dense and a pruned run can be compared. The bytes per layer
    are counted exactly, on any device. On CUDA the allocator is asked too: growth of the requested bytes over the
    forward, and the peak over the step, for which the peak statistics of the device are reset once an epoch.

    Logged at the end of each epoch, to every logger and ``callback_metrics`` (so ``ModelCheckpoint`` can monitor them):

    - ``actprune/dense_mib``: what the linear layers would keep if none were pruned, in MiB, with the 16-bit copies of
      their weights that autocast makes and pruned layers do without
    - ``actprune/stored_mib``: what they keep, in MiB
    - ``actprune/saved_mib``, ``actprune/saved_frac``: the difference, in MiB and as a fraction of the first
    - ``actprune/activations_mib``: growth of the allocated bytes over the forward, in MiB (CUDA only)
    - ``actprune/peak_mib``: most bytes allocated during the step, in MiB (CUDA only)

    "Kept anyway" in the table means that something else holds the layer's input too, such as a ReLU before it, a sister
    layer or the batch itself: the dense layer costs nothing there, and pruning it adds what it stores.
    ``ActivationPruning`` leaves such layers dense unless told otherwise.

    The forward ends for the monitor where gradients are zeroed or backward begins, whichever comes first. A step that
    applies ``torch.func`` transforms cannot be measured, since they forbid the hooks that count saved tensors.

    Args:
        measure_batch: Index of the batch that is measured in each epoch, or the last one if there are fewer (of a
            loader that does not know its length, none is then); the first batches also pay for what is set up lazily.
        verbose: Whether to print a table at the end of each epoch.

    Raises:
        MisconfigurationException: If an argument is not allowed.

    Example:
        >>> import lightning as L
        >>> monitor = ActivationMemoryMonitor()
        >>> trainer = L.Trainer(callbacks=[monitor], logger=False)
        >>> monitor.report is None  # a MemoryReport once a step was measured
        True
    """

    def __init__(self, measure_batch: int = 3, verbose: bool = True) -> None:
        super().__init__()
        if isinstance(measure_batch, bool) or not isinstance(measure_batch, int) or measure_batch < 0:
            raise MisconfigurationException(
                f"`measure_batch` must be an int >= 0, got {measure_batch!r}. HINT: 3 lets the first batches warm up."
            )
        self.measure_batch = measure_batch
        self.verbose = verbose
        self._report: MemoryReport | None = None
        self._pending: MemoryReport | None = None
        self._to_log = False
        self._epoch: int | None = None
        self._meter: SavedTensorMeter | None = None
        self._requested_before = 0

    @property
    def report(self) -> MemoryReport | None:
        """The latest measurement, ``None`` before the first."""
        return self._report

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._epoch = None
        self._to_log = False

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # "At least": a run resumed in the middle of an epoch may begin behind the batch to measure.
        if self._epoch != trainer.current_epoch and batch_idx >= min(
            self.measure_batch, trainer.num_training_batches - 1
        ):
            self._epoch = trainer.current_epoch
            self._begin(pl_module, batch)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        self._end_forward(pl_module)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        self._end_forward(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_step(pl_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if self._report is not None and self._to_log:
            self._to_log = False
            pl_module.log_dict(_metrics(self._report), sync_dist=True)
            if self.verbose:
                show(trainer, _memory_table(self._report, trainer.current_epoch))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _begin(self, pl_module: pl.LightningModule, batch: Any) -> None:
        self._stop()
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
            self._requested_before = _requested_bytes(pl_module.device)
        self._meter = SavedTensorMeter(pl_module, batch)
        self._meter.__enter__()

    def _end_forward(self, pl_module: pl.LightningModule) -> None:
        """Read the meter and the allocator while everything that was saved is still there."""
        if self._meter is None:
            return
        report = self._meter.report()
        if pl_module.device.type == "cuda":
            report.measured_activation_bytes = _requested_bytes(pl_module.device) - self._requested_before
        self._stop()
        self._pending = report

    def _end_step(self, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:  # no hook ran between forward and backward: the allocator was asked too late
            self._pending = self._meter.report()
            self._meter.__exit__()
            self._meter = None
        if self._pending is None:
            return
        if pl_module.device.type == "cuda":
            self._pending.measured_peak_bytes = torch.cuda.max_memory_allocated(pl_module.device)
        self._report, self._pending, self._to_log = self._pending, None, True

    def _stop(self) -> None:
        """Close the meter, whatever happened in the step."""
        self._pending = None
        if self._meter is not None:
            self._meter.__exit__()
            self._meter = None


def _requested_bytes(device: torch.device) -> int:
    """Return the bytes that live tensors asked the allocator for: no rounding, no cache."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])


def _metrics(report: MemoryReport) -> dict[str, float]:
    metrics = {
        "actprune/dense_mib": report.dense_bytes / MIB,
        "actprune/stored_mib": report.stored_bytes / MIB,
        "actprune/saved_mib": report.saved_bytes / MIB,
        "actprune/saved_frac": report.saved_fraction,
    }
    if report.measured_activation_bytes is not None:
        metrics["actprune/activations_mib"] = report.measured_activation_bytes / MIB
    if report.measured_peak_bytes is not None:
        metrics["actprune/peak_mib"] = report.measured_peak_bytes / MIB
    return metrics


def _memory_table(report: MemoryReport, epoch: int) -> Table:
    made = table(f"Kept for backward, epoch {epoch}", "Layer", "Sparsity", "Dense MiB", "Stored MiB", "Saved")
    shown, rest = shortened(report.rows)
    for row in shown:
        made.add_row(row.fqn, f"{row.sparsity:.2f}", *_byte_cells(row))
    if rest:
        made.add_row(f"... and {len(rest)} more", "", *_byte_cells(MemoryReport(list(rest))))
    if report.weight_copy_bytes:
        made.add_row("16-bit weight copies", "", *_byte_cells(MemoryReport(weight_copy_bytes=report.weight_copy_bytes)))
    made.add_section()
    made.add_row("Linear layers", "", *_byte_cells(report))
    made.add_row("Other saved tensors", "", "", mib(report.other_bytes), "")
    if report.measured_activation_bytes is not None:
        made.add_row("Measured after forward", "", "", mib(report.measured_activation_bytes), "")
    if report.measured_peak_bytes is not None:
        made.add_row("Measured peak of the step", "", "", mib(report.measured_peak_bytes), "")
    return made


def _byte_cells(part: LayerFootprint | MemoryReport) -> tuple[str, str, str]:
    if part.dense_bytes:
        saved = percent(part.saved_bytes / part.dense_bytes)
    else:
        saved = "kept anyway" if part.stored_bytes else "-"
    return mib(part.dense_bytes), mib(part.stored_bytes), saved
