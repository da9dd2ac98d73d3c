"""Warnings at the start of a fit: settings and surroundings in which it saves less than it could."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_actprune.codec.dispatch import kernel_refusals
from lightning_actprune.codec.private import dispatch_modes
from lightning_actprune.config import Keep, drops_blocks, shortened
from lightning_actprune.report import LayerReport


def warn_of_surroundings(trainer: pl.Trainer, device: torch.device) -> None:
    """Warn where no kernel runs, and where somebody looks at every operation of torch."""
    dtype = torch.float64 if str(trainer.precision) == "64-true" else torch.float32
    reasons = kernel_refusals(dtype, device, Keep.block_size, 1)
    if reasons:
        shown = "; ".join(reason.partition(" (")[0] for reason in reasons)
        rank_zero_warn(
            f"The kernels of ActivationPruning do not run here ({shown}), so plain PyTorch does their "
            "work: as much memory is saved, but a step may take several times as long. HINT: train on an NVIDIA GPU of "
            "compute capability 8.0 or newer, in float32, bfloat16 or float16."
        )
    modes = [type(mode).__name__ for mode in dispatch_modes()]
    if modes:
        rank_zero_warn(
            f"A dispatch mode is open around the fit ({', '.join(modes)}). What is on the fast path only, such as "
            "inputs that several layers share, is switched off while it is: less is saved, and a step takes longer. "
            "HINT: count operations in a short run of its own."
        )


def warn_of_optimizers(trainer: pl.Trainer, total_steps: int | None, horizon: int | None) -> None:
    """Warn where schedules would end early, since every optimizer counts its steps and the length was not given."""
    count = len(trainer.optimizers)
    if horizon is not None and total_steps is None and count > 1:
        rank_zero_warn(
            f"Schedules of the sparsity end at step {horizon}, the Trainer's estimate, which counts batches; but "
            f"`trainer.global_step` counts the steps of all {count} optimizers, so that they may end early. HINT: set "
            "`ActivationPruning(total_steps=...)` to the steps of all optimizers together."
        )


def warn_of_idle(converted: Sequence[LayerReport], last: dict[str, float]) -> None:
    """Warn of layers that keep all their values as they are, at every step of the training.

    Args:
        converted: The converted layers.
        last: The sparsity of each that drops blocks, when the training ends.
    """
    idle = [
        layer.fqn
        for layer in converted
        if layer.keep is not None
        and drops_blocks([layer.operator])
        and layer.keep.bits is None
        and not (layer.sparsity or last.get(layer.fqn))
    ]
    if idle:
        one = len(idle) == 1
        rank_zero_warn(
            f"{len(idle)} converted {'layer keeps' if one else 'layers keep'} all values as they are (a sparsity of 0 "
            f"without `bits`), which saves nothing: {shortened(idle)}. HINT: set a sparsity, or quantize the values "
            "(`Keep(bits=4)`, or the preset 'balanced')."
        )
