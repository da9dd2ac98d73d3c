"""What a fit is warned of: settings and surroundings in which it saves less than it could.

All but one of the warnings come before the first step. What is too small to be packed shows in a step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_actprune.analysis.small import SmallTensorProbe
from lightning_actprune.callbacks.display import mib, percent
from lightning_actprune.codec.dispatch import kernel_refusals
from lightning_actprune.codec.private import dispatch_modes, refusal
from lightning_actprune.config import Keep, drops_blocks, shortened
from lightning_actprune.convert import attached_saved
from lightning_actprune.report import LayerReport

MOST_IN_SMALL_TENSORS = 0.1
"""Share of what a step keeps from which on a fit is warned of tensors that are too small to be packed."""


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


class SmallTensorAdvice:
    """Warns once a fit where tensors too small to be packed hold much of what a step keeps.

    It looks at the first batch in which layers are as they stay: not at one that is probed, in which compiled modules
    run eagerly, nor at a tuner's, which may be smaller than those of the fit.
    """

    def __init__(self) -> None:
        self._asked = False
        self._probe: SmallTensorProbe | None = None

    def ask(self, wanted: bool) -> None:
        """Look at a batch of this fit, if that is wanted."""
        self._asked = wanted

    def batch_starts(self, model: nn.Module, batch: Any, owner: str) -> None:
        """Begin to count what is kept, unless it is known.

        Args:
            model: The module that holds the layers.
            batch: What its step is given.
            owner: Whose saved-tensor compression packs what no layer is known for.
        """
        self.stop()  # of a batch that was skipped
        compression = attached_saved(model, owner) if self._asked else None
        if compression is not None and refusal("", SmallTensorProbe.needs) is None:
            self._probe = SmallTensorProbe(model, compression, batch)
            self._probe.__enter__()

    def batch_ends(self) -> None:
        """Warn if that is due."""
        probe = self._probe
        self.stop()
        if probe is None or not probe.kept_bytes:  # no forward was run
            return
        self._asked = False
        small = probe.small_bytes
        share = sum(small) / probe.kept_bytes
        if share > MOST_IN_SMALL_TENSORS:
            rank_zero_warn(
                f"Tensors of fewer than {probe.compression.min_values:,} values are not packed where no layer is known "
                f"for them, and the model keeps up to {len(small)} of these for backward: {mib(sum(small))} MiB, "
                f"{percent(share)} of all that it keeps. HINT: train on a larger batch, in which they are large enough "
                "to be packed, or checkpoint the modules that keep them; ActivationMemoryMonitor(verbose=2) names them."
            )

    def stop(self) -> None:
        """Close what is open, whatever happened in the step."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
