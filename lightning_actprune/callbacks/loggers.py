"""What ``ActivationMemoryMonitor`` logs: totals through Lightning, and numbers per layer to each logger by itself."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_actprune.callbacks.display import MIB
from lightning_actprune.footprint import LayerFootprint, MemoryReport

_IN_BAR = "actprune/saved_frac"


def log_totals(trainer: pl.Trainer, pl_module: pl.LightningModule, report: MemoryReport | None, in_bar: bool) -> None:
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
    for name, value in _totals(report).items():
        pl_module.log(name, value, prog_bar=in_bar and name == _IN_BAR, sync_dist=True)


def log_layers(trainer: pl.Trainer, report: MemoryReport) -> None:
    """Give what each layer keeps to every logger, in a group of its own, as ``actprune_layers/<layer>/stored_mib``."""
    for logger in loggers(trainer):
        metrics = {
            logger.group_separator.join(("actprune_layers", row.fqn, name)): value
            for row in report.rows
            for name, value in _of_layer(row).items()
        }
        logger.log_metrics(metrics | {"epoch": trainer.current_epoch}, step=step(trainer))  # as Lightning adds it


def loggers(trainer: pl.Trainer) -> Sequence[Logger]:
    """Return the loggers to be given what concerns rank zero alone; none elsewhere."""
    return trainer.loggers if trainer.is_global_zero else ()


def step(trainer: pl.Trainer) -> int:
    """Return the step at which Lightning logs the totals of the epoch, so that all share an x-axis.

    It counts from zero and has no public name; Lightning's own monitors read it in this place too. A model that logs
    ``"step"`` itself gives the totals that x-axis, which nobody can know here: it may still do so when all callbacks
    have been called, and to ask what it has logged would be a reduction over the ranks.
    """
    return max(trainer.fit_loop.epoch_loop._batches_that_stepped - 1, 0)


def _totals(report: MemoryReport) -> dict[str, float]:
    metrics = {
        "actprune/dense_mib": report.dense_bytes / MIB,
        "actprune/stored_mib": report.stored_bytes / MIB,
        "actprune/saved_mib": report.saved_bytes / MIB,
        _IN_BAR: report.saved_fraction,
        "actprune/sparsity": report.sparsity,
    }
    if report.measured_activation_bytes is not None:
        metrics["actprune/activations_mib"] = report.measured_activation_bytes / MIB
    if report.measured_peak_bytes is not None:
        metrics["actprune/peak_mib"] = report.measured_peak_bytes / MIB
    return metrics


def _of_layer(row: LayerFootprint) -> dict[str, float]:
    return {"dense_mib": row.dense_bytes / MIB, "stored_mib": row.stored_bytes / MIB, "sparsity": row.sparsity}
