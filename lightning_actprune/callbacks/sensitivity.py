"""``ActivationSensitivity``: how far each layer can be pruned, measured in the first steps of a fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Group, RenderableType
from typing_extensions import override

from lightning_actprune.analysis.sensitivity import SensitivityProbe
from lightning_actprune.analysis.sensitivity_grid import BITS, LINEAR, SPARSITIES, SensitivityGrid
from lightning_actprune.analysis.sensitivity_report import SensitivityReport
from lightning_actprune.callbacks.arguments import Verbosity, check_verbose, checked, refuses_removed
from lightning_actprune.callbacks.display import MAX_ROWS, show
from lightning_actprune.callbacks.first_batch import sum_over_ranks
from lightning_actprune.callbacks.fits import CurrentFit
from lightning_actprune.callbacks.pruning import ActivationPruning
from lightning_actprune.config import Scope, Selection, check_count, check_share


class ActivationSensitivity(pl.Callback):
    """Show how close the weight gradients of converted layers would be to the exact ones, and what that suggests.

    Measured in a few training steps of a fit as they are: no forward is added, and losses and gradients are those
    without it. For each layer and each setting of a grid, the cosine between both gradients is printed, and rules for
    ``ActivationPruning(rules=...)``. All of it is in ``result``. The measured steps take several times as long as the
    steps after them, and keep the inputs of all layers until their backward. On several ranks, all of them count.

    Works with and without ``ActivationPruning``, whose own first batch it leaves out. Gradients change during
    training, and at the very start some are zero (where the last layer starts at zero, say): ``at_step`` measures
    later.

    Args:
        sparsities: Fractions of blocks dropped, each in [0, 1).
        bits: Bits of each kept value, 2, 3, 4 or 8, or ``None`` for values as they are.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"`` (see ``codec.blocks``).
        names: Which linear layers and convolutions are measured: patterns as in rules, such as ``"blocks.*.fc1"``;
            by default, linear layers that presets cover.
        batches: Training batches that are measured.
        at_step: Value of ``trainer.global_step`` from which on they are.
        min_cosine: Least cosine, in [0, 1], of the rules that are printed.
        verbose: Whether to print. 0 is ``False``; 1 and 2 are ``True``, since all of it is said once a fit.

    Raises:
        MisconfigurationException: If an argument is not allowed; in training, if a pattern matches no layer.

    Example:
        >>> import lightning as L
        >>> sensitivity = ActivationSensitivity(sparsities=[0.5, 0.8], bits=[None, 4])
        >>> trainer = L.Trainer(callbacks=[sensitivity], logger=False)
        >>> sensitivity.result is None  # a SensitivityReport once the batches were measured
        True
    """

    @refuses_removed
    def __init__(
        self,
        sparsities: Sequence[float] = SPARSITIES,
        bits: Sequence[int | None] = BITS,
        *,
        block_size: int = 32,
        scope: Scope = "sample",
        selection: Selection = "largest",
        names: Sequence[str] | str = LINEAR,
        batches: int = 2,
        at_step: int = 0,
        min_cosine: float = 0.9,
        verbose: Verbosity = 1,
    ) -> None:
        super().__init__()
        self.grid = checked(SensitivityGrid, sparsities, bits, block_size, scope, selection, names)
        """What is measured, and of which layers."""
        hint = "two batches are a start; steps count from 0."
        self.batches = checked(check_count, batches, "batches", hint, 1)
        self.at_step = checked(check_count, at_step, "at_step", hint)
        self.min_cosine = checked(check_share, min_cosine, "min_cosine")
        self.verbose = check_verbose(verbose)
        self._fit = CurrentFit()
        self._probe: SensitivityProbe | None = None
        self._result: SensitivityReport | None = None
        self._left = 0
        self._open = False

    @property
    def result(self) -> SensitivityReport | None:
        """What was measured in the current or the last fit, ``None`` before."""
        return self._result

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit.begin(self, trainer)
            self._release()  # of a fit whose end nobody told

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._result = None
        self._left = self.batches
        self._probe = SensitivityProbe(pl_module, self.grid)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._probe is None or self._left == 0 or trainer.global_step < self.at_step:
            return
        if not _pruning_is_undecided(trainer):
            self._probe.close()  # of a batch that was skipped
            checked(self._probe.__enter__)
            self._open = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._probe is not None and self._open:
            self._probe.end_batch()
            self._probe.close()
            self._open = False
            self._left -= 1  # on all ranks alike, whatever their batches showed
            if self._left == 0:
                self._finish(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._left > 0:
            self._finish(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._fit.end(trainer):
            self._release()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._fit.end(trainer):
            self._release()

    def _finish(self, trainer: pl.Trainer) -> None:
        assert self._probe is not None
        tried, self._left = self.batches - self._left, 0
        self._probe.add_up(functools.partial(sum_over_ranks, trainer))
        self._result = self._probe.report()
        if not self._result.rows:
            first = next((f" {skipped.fqn!r}: {skipped.reason}." for skipped in self._result.skipped), "")
            rank_zero_warn(
                f"ActivationSensitivity has measured no layer in {tried} batches from step {self.at_step} on.{first} "
                "HINT: `callback.result.skipped` has all reasons; see `at_step`, `names` and `bits`."
            )
        elif self.verbose:
            show(trainer, Group(*self._shown(self._result)))

    def _shown(self, result: SensitivityReport) -> Iterator[RenderableType]:
        yield result.table(MAX_ROWS)
        rules = result.to_yaml(self.min_cosine).rstrip()
        yield f"With a cosine of {self.min_cosine:g} at least, the fewest bytes are kept by these rules:\n{rules}"

    def _release(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe, self._open = None, False


def _pruning_is_undecided(trainer: pl.Trainer) -> bool:
    """Return whether ``ActivationPruning`` looks in this batch for who keeps inputs alive, which measuring does."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return any(isinstance(callback, ActivationPruning) and callback._probe.undecided for callback in callbacks)
