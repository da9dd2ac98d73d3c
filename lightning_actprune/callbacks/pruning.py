"""``ActivationPruning``: convert the linear layers of a LightningModule for the time of a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_actprune.arguments import Scope, ValueFormatName, check_sparsity
from lightning_actprune.callbacks.configure import call_after_configure_model, restore_configure_model
from lightning_actprune.callbacks.display import conversion_summary, held_summary, show
from lightning_actprune.callbacks.precision import check_precision
from lightning_actprune.callbacks.probing import FirstBatchProbe
from lightning_actprune.conversion import (
    ConversionReport,
    ConvertedLayer,
    SkippedLayer,
    check_conversion,
    convert_layers,
    new_owner,
    revert,
)
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.schedules import ConstantSchedule, SparsitySchedule
from lightning_actprune.selection import MIN_FEATURES, ConversionOptions, LayerClaimedError, linear_layers


class ActivationPruning(pl.Callback):
    """Cut training memory by keeping only the largest blocks of every linear layer's input for backward.

    Forward, input gradients and bias gradients stay exact; the weight gradient is computed from the kept blocks
    (arXiv:2311.16883). Layers are converted in place when a fit begins and turned back when it ends, also after an
    exception. Validation, test, prediction and checkpoints are those of the plain model: no key is added, and the
    package is not needed to load one.

    The sparsity of a schedule is a function of ``trainer.global_step`` alone, so a resumed run continues it. Layers
    made in ``LightningModule.setup`` of a module without ``configure_model`` are converted after the tuners have run,
    which therefore measure them dense.

    The first training batch of a fit shows which layers have an input that something else keeps for backward anyway
    (see ``HolderProbe``). Packing it would add memory, so these layers are dense from then on. Compiled modules run
    eagerly in that batch. It also shows the pruned layers that run only inside an activation checkpoint, of which a
    warning tells (see ``RecomputationProbe``); without ``skip_held`` nothing inside compiled modules is seen.

    Several instances can share a model if ``include`` and ``exclude`` give each its own layers.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1). Not used if there is a ``schedule``.
        block_size: Consecutive values of a row per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row, for very long sequences.
        include: Glob patterns on fully qualified layer names, such as ``"blocks.*.fc1"``; a layer must match one.
        exclude: Glob patterns on fully qualified layer names; a layer must match none.
        min_features: Layers with fewer input features stay dense.
        schedule: Sparsity as a function of training progress. Before the first step (tuners) it is at progress 0.
        total_steps: Value of ``trainer.global_step``, which counts the steps of every optimizer, at which the
            schedule's progress is 1; by default the Trainer's estimate of the whole training.
        skip_held: Whether to leave layers dense whose input is kept for backward anyway; ``False`` prunes them all
            the same.
        value_format: How kept values are stored: ``"same"`` (the paper), ``"fp8"``, or ``"int8"``, ``"int4"``,
            ``"int3"``, ``"int2"``: in so many bits, with random errors of mean zero; at ``sparsity=0`` too.
        verbose: Whether to print the converted and the skipped layers when the fit begins, and those that turn out to
            be held.

    Raises:
        MisconfigurationException: If an argument is not allowed; when the fit begins, if no layer is converted, a
            pattern matches no linear layer, a layer is claimed twice, the precision plugin replaces linear layers, or
            the length of the training is needed and unknown; after the first batch, if every layer is held.

    .. note:: Saved state is keyed by ``include`` and ``exclude``: these make instances distinct in a checkpoint.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ActivationPruning(sparsity=0.6, exclude=["head"])], logger=False)
    """

    def __init__(
        self,
        sparsity: float = 0.6,
        block_size: int = 32,
        *,
        scope: Scope = "sample",
        include: Sequence[str] | str = "*",
        exclude: Sequence[str] | str = (),
        min_features: int = MIN_FEATURES,
        schedule: SparsitySchedule | None = None,
        total_steps: int | None = None,
        skip_held: bool = True,
        value_format: ValueFormatName = "same",
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.block_size = block_size
        self.scope = scope
        self.include = include
        self.exclude = exclude
        self.min_features = min_features
        self.schedule = schedule
        self.total_steps = total_steps
        self.skip_held = skip_held
        self.value_format = value_format
        self.verbose = verbose
        self._options = self._checked_options()
        patterns = f"include={list(self._options.include)}, exclude={list(self._options.exclude)}"
        self._owner = new_owner(f"ActivationPruning({patterns})")
        self._report = ConversionReport()
        self._claimed: list[str] = []
        self._layers: list[PrunedLayer] = []
        self._horizon: float | None = None
        self._restored: dict[str, Any] | None = None
        self._probe = FirstBatchProbe()

    @property
    def converted(self) -> list[ConvertedLayer]:
        """Layers converted in the current or the last fit."""
        return self._report.converted

    @property
    def skipped(self) -> list[SkippedLayer]:
        """Linear layers left as they are in the current or the last fit, with the reason."""
        return self._report.skipped

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(include=list(self._options.include), exclude=list(self._options.exclude))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_precision(trainer)
            self._restored = None
            self._convert(pl_module)
            if is_overridden("configure_model", pl_module):
                call_after_configure_model(pl_module, self._convert)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._convert(pl_module)  # layers made in LightningModule.setup
        self._check_conversion(pl_module)
        if self.verbose:
            value_bytes = 2 if "16" in str(trainer.precision) else 4
            show(trainer, conversion_summary(self._report, self._sparsity_at(1.0), value_bytes))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._horizon = self._find_horizon(trainer)
        self._warn_of_changes()
        self._follow_schedule(trainer)
        self._probe.fit_starts(self._highest_sparsity(), self.skip_held, self._options.value_format != "same")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._follow_schedule(trainer)
        self._probe.batch_starts(pl_module, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        held = self._probe.batch_ends(self._report)
        if held:
            self._find_layers(pl_module)
            if self.verbose:
                show(trainer, held_summary(held, len(self.converted)))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(pl_module)  # Lightning calls no `teardown` after an exception

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "sparsity": self._options.sparsity if self.schedule is None else repr(self.schedule),
            "block_size": self._options.block_size,
            "scope": self._options.scope,
            "value_format": self._options.value_format,
            "total_steps": self.total_steps,
            "layers": self._claimed,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict  # compared when training starts: not all layers may exist yet

    def _checked_options(self) -> ConversionOptions:
        if self.schedule is not None and not isinstance(self.schedule, SparsitySchedule):
            raise MisconfigurationException(
                f"`schedule` must be a SparsitySchedule or None, got {self.schedule!r}. HINT: use LinearSchedule or "
                "CubicSchedule, or subclass SparsitySchedule."
            )
        steps = self.total_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise MisconfigurationException(
                f"`total_steps` must be a positive int or None, got {steps!r}. HINT: it is the number of optimizer "
                "steps of the whole training; None asks the Trainer."
            )
        patterns = self.include, self.exclude
        try:
            sparsity = check_sparsity(self.sparsity) if self.schedule is None else self._sparsity_at(0.0)
            return ConversionOptions(
                sparsity, self.block_size, self.scope, *patterns, self.min_features, self.value_format
            )
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(str(error)) from error

    def _convert(self, pl_module: pl.LightningModule) -> None:
        try:
            self._report = convert_layers(pl_module, self._options, self._owner)
        except LayerClaimedError as error:
            raise MisconfigurationException(str(error)) from error
        self._claimed = [layer.fqn for layer in self.converted]
        self._find_layers(pl_module)

    def _find_layers(self, pl_module: pl.LightningModule) -> None:
        layers = [layer for _, layer in linear_layers(pl_module) if isinstance(layer, PrunedLayer)]
        self._layers = [layer for layer in layers if layer.owner == self._owner]

    def _check_conversion(self, pl_module: pl.LightningModule) -> None:
        try:
            check_conversion(pl_module, self._report, self._options)
        except ValueError as error:
            raise MisconfigurationException(str(error)) from error

    def _release(self, pl_module: pl.LightningModule | None) -> None:
        self._probe.stop()
        self._layers = []
        self._horizon = None
        if pl_module is not None:  # None if the fit failed before it had a module
            restore_configure_model(pl_module)
            revert(pl_module, self._owner)

    def _find_horizon(self, trainer: pl.Trainer) -> float | None:
        """Return the optimizer steps at which progress is 1, ``None`` if the sparsity does not depend on it."""
        if self.schedule is None or isinstance(self.schedule, ConstantSchedule):
            return None
        steps = self.total_steps or trainer.estimated_stepping_batches
        if math.isinf(steps) or steps < 0:
            raise MisconfigurationException(
                f"{self.schedule!r} needs the length of the training, which the Trainer does not know "
                f"(estimated_stepping_batches={steps}). HINT: set `ActivationPruning(total_steps=...)`, or `max_steps` "
                "of the Trainer."
            )
        return max(steps, 1)

    def _follow_schedule(self, trainer: pl.Trainer) -> None:
        """Give the layers the sparsity that belongs to ``trainer.global_step``."""
        if self.schedule is None:
            return
        sparsity = self._sparsity_at(min(trainer.global_step / self._horizon, 1.0) if self._horizon else 0.0)
        for layer in self._layers:
            if layer.sparsity != sparsity:
                layer.sparsity = sparsity

    def _sparsity_at(self, progress: float) -> float:
        if self.schedule is None:
            return self._options.sparsity
        try:
            return check_sparsity(self.schedule(progress), f"{self.schedule!r}({progress:g})")
        except (TypeError, ValueError) as error:
            raise MisconfigurationException(str(error)) from error

    def _highest_sparsity(self) -> float:
        return max(self._sparsity_at(tenths / 10) for tenths in range(11))

    def _warn_of_changes(self) -> None:
        """Warn if the checkpoint that the run continues was made with other settings; the new ones are used."""
        then, now = self._restored or {}, self.state_dict()
        self._restored = None
        changes = [
            f"{name}: {then[name]!r} -> {now[name]!r}" for name in now if name in then and then[name] != now[name]
        ]
        if changes:
            rank_zero_warn(
                f"{self._owner} continues a checkpoint made with other settings ({'; '.join(changes)}) and goes on "
                "with the new ones. HINT: give the callback its old arguments if this is not intended."
            )
