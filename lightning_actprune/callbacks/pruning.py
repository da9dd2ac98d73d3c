"""``ActivationPruning``: convert the linear layers of a LightningModule for the time of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from lightning_actprune.arguments import BlockSelection, Others, Scope, ValueFormatName, check_flag, check_share
from lightning_actprune.callbacks.configure import call_after_configure_model, restore_configure_model
from lightning_actprune.callbacks.display import conversion_summary, findings, show
from lightning_actprune.callbacks.fixed import FixedArguments
from lightning_actprune.callbacks.precision import check_precision
from lightning_actprune.callbacks.probing import FirstBatchProbe
from lightning_actprune.callbacks.progress import SparsityProgress, checked
from lightning_actprune.callbacks.resuming import settings_state, warn_of_other_settings
from lightning_actprune.callbacks.tuning import TrialProbe
from lightning_actprune.callbacks.verbosity import Verbosity, check_verbose
from lightning_actprune.callbacks.verdict import Findings
from lightning_actprune.conversion import check_conversion, convert_layers, new_owner, revert
from lightning_actprune.conversion_options import MIN_FEATURES, ConversionOptions
from lightning_actprune.conversion_report import ConversionReport, ConvertedLayer, FewBitConversion, SkippedLayer
from lightning_actprune.layer_settings import LayerSettings
from lightning_actprune.presets import Preset, PresetName, check_preset, given
from lightning_actprune.schedules import SparsitySchedule


class ActivationPruning(FixedArguments, pl.Callback):
    """Cut training memory by keeping only the largest blocks of every linear layer's input for backward.

    Forward, input gradients and bias gradients stay exact; the weight gradient is computed from the kept blocks
    (arXiv:2311.16883). With ``others``, gradients that pass through activation functions, norms and attention are
    rounded, too. Layers are converted in place when a fit begins and turned back when it ends, also after an
    exception. Validation, test, prediction and checkpoints are those of the plain model: no key is added, and the
    package is not needed to load one. A schedule is a function of ``trainer.global_step``: a resumed run continues it.

    The first training batch of a fit shows which layers have an input that something else keeps for backward anyway
    (see ``HolderProbe``). Packing it would add memory, so these layers are dense from then on. Compiled modules run
    eagerly in that batch. It also shows the pruned layers that run only inside an activation checkpoint, of which a
    warning tells (see ``RecomputationProbe``); without ``skip_held`` nothing inside compiled modules is seen. In a fit
    with a tuner (``BatchSizeFinder``, ``LearningRateFinder``) it is the first batch of its trials.

    Several instances can share a model if ``include`` and ``exclude`` give each its own layers. No argument can be
    changed later but ``verbose``.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1), or a mapping from glob patterns to such, as
            ``{"blocks.*.fc1": 0.3, "*": 0.6}``: the first pattern that matches a layer counts, and layers that match
            none stay dense. A number is not used if there is a ``schedule``.
        block_size: Consecutive values of a row per block, positive; cut to the row if larger; 32 by default.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row, for very long sequences.
        include: Glob patterns on fully qualified layer names, such as ``"blocks.*.fc1"``; a layer must match one.
        exclude: Glob patterns on fully qualified layer names; a layer must match none.
        min_features: Linear layers with fewer input features stay dense.
        schedule: Sparsity as a function of training progress. Trials of tuners are at its lowest.
        total_steps: Value of ``trainer.global_step``, which counts the steps of every optimizer, at which the
            schedule's progress is 1; by default the Trainer's estimate of the whole training, which counts batches:
            with several optimizers, say it.
        skip_held: Whether to leave layers dense whose input is kept for backward anyway; ``False`` prunes them all
            the same.
        value_format: How kept values are stored: ``"same"`` (the paper), ``"fp8"``, or ``"int8"``, ``"int4"``,
            ``"int3"``, ``"int2"``: in so many bits, with random errors of mean zero; at ``sparsity=0`` too.
        block_selection: Which blocks are kept: ``"largest"`` (the paper), or, at random, ``"swap"`` or ``"unbiased"``
            (see ``functional.linear``); without effect at ``sparsity=0``.
        max_dropped_energy: Largest share, in [0, 1], of an input's energy that its dropped blocks may hold in the first
            batch; layers above it drop none (see ``EnergyProbe``). 1 judges none.
        preset: What the arguments that are not given stand at: ``"paper"``, ``"balanced"`` or ``"max"`` (``presets``).
            By default ``"paper"`` with a ``sparsity`` or a ``schedule``, and ``"balanced"`` without.
        others: Whether layers besides the linear ones keep in few bits what they need: none, all that are known, or
            those of a mapping, such as ``{"activation": "int4", "norm": "int4"}``, in the formats it names; ``True``
            takes those of the preset. A ``"convolution"``, an ``"affine"`` layer and a layer ``"scale"`` are pruned as
            a linear layer is, and store what they keep in the format named here.
        layers: Settings of layers by glob patterns on their names, as ``{"head": LayerSettings(sparsity=0.3)}``, a
            schedule included: the first pattern that matches a layer counts, and what it does not say is as for all
            other layers.
        exclude_first: So many layers stay dense: the first ones in the order of ``named_modules()``, of linear layers,
            and of convolutions, affine layers and layer scales if asked for; those that ``exclude`` names count.
        exclude_last: So many layers stay dense: the last ones.
        verbose: Whether to print, once a fit, converted and skipped layers and what the first batch shows; 0, 1 or 2.

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
        sparsity: float | Mapping[str, float] | None = None,
        block_size: int | None = None,
        *,
        scope: Scope = "sample",
        include: Sequence[str] | str = "*",
        exclude: Sequence[str] | str = (),
        min_features: int = MIN_FEATURES,
        schedule: SparsitySchedule | None = None,
        total_steps: int | None = None,
        skip_held: bool = True,
        value_format: ValueFormatName | None = None,
        block_selection: BlockSelection | None = None,
        max_dropped_energy: float | None = None,
        preset: PresetName | None = None,
        others: Others = False,
        layers: Mapping[str, LayerSettings] | None = None,
        exclude_first: int = 0,
        exclude_last: int = 0,
        verbose: Verbosity = True,
    ) -> None:
        super().__init__()
        base = checked(check_preset, given(preset, "balanced" if sparsity is None and schedule is None else "paper"))
        self.preset = preset
        self.sparsity = given(sparsity, base.sparsity)
        self.block_size = given(block_size, base.block_size)
        self.scope = scope
        self.include = include
        self.exclude = exclude
        self.min_features = min_features
        self.schedule = schedule
        self.skip_held = checked(check_flag, skip_held, "skip_held")
        self.value_format = given(value_format, base.value_format)
        self.block_selection = given(block_selection, base.block_selection)
        energy = given(max_dropped_energy, base.max_dropped_energy)
        self.max_dropped_energy = checked(check_share, energy, "max_dropped_energy")
        self.others = others
        self.layers = layers
        self.exclude_first = exclude_first
        self.exclude_last = exclude_last
        self.verbose = check_verbose(verbose)
        self._options = self._checked_options(base)
        self._progress = SparsityProgress(self._options, total_steps)
        self.total_steps = self._progress.total_steps
        patterns = f"include={list(self._options.include)}, exclude={list(self._options.exclude)}"
        self._owner = new_owner(f"ActivationPruning({patterns})")
        self._report = ConversionReport()
        self._restored: dict[str, Any] | None = None
        self._probe = FirstBatchProbe(self.max_dropped_energy, skip_held)
        self._verdict = self._probe.verdict
        self._trials = TrialProbe(self, self._probe, self._begin_trials, self._end_trial_batch)
        self._fix()

    @property
    def report(self) -> ConversionReport:
        """What the current or the last fit has converted and what not, with ``to_rows()`` and ``to_dict()``."""
        return self._report

    @property
    def converted(self) -> list[ConvertedLayer]:
        """Layers converted in the current or the last fit."""
        return self._report.converted

    @property
    def skipped(self) -> list[SkippedLayer]:
        """Layers left as they are in the current or the last fit, with the reason."""
        return self._report.skipped

    @property
    def few_bit(self) -> list[FewBitConversion]:
        """Layers of other operators that keep in few bits what they need, in the current or the last fit."""
        return self._report.few_bit

    @property
    def spread(self) -> dict[str, float]:
        """Share of the energy that was to be dropped, by the name of the layers that drop nothing for it."""
        return dict(self._verdict.spread or {})

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(include=list(self._options.include), exclude=list(self._options.exclude))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_precision(trainer, self._options)
            self._restored = None
            self._verdict.fit_begins(pl_module)
            self._convert(pl_module)
            if is_overridden("configure_model", pl_module):
                call_after_configure_model(pl_module, self._convert)
            self._trials.wait(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trials.leave():  # which convert too, before a strategy may have wrapped what they turn dense
            self._convert(pl_module)  # layers made in LightningModule.setup
        checked(check_conversion, pl_module, self._report, self._options)
        if self.verbose:
            value_bytes = 2 if "16" in str(trainer.precision) else 4
            found = findings(Findings([], self.spread), self._report)  # in trials
            show(trainer, conversion_summary(self._report, self._progress.last, value_bytes), *found)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.start(trainer)
        self._restore(pl_module)
        self._progress.follow(trainer)
        self._probe.ask(self._report, self._progress.highest)
        self._verdict.end_with_the_fit()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._progress.follow(trainer)
        self._probe.batch_starts(pl_module, batch)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = self._judge(trainer, pl_module)
        if found is not None and self.verbose:
            show(trainer, *findings(found, self._report))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._release(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._release(pl_module)  # Lightning calls no `teardown` after an exception
        self._verdict.end_with_the_fit()

    @override
    def state_dict(self) -> dict[str, Any]:
        state = settings_state(self._options) | {"max_dropped_energy": self.max_dropped_energy}
        return state | {
            "total_steps": self._progress.horizon,
            "layers": self._verdict.layers,
            "spread": self._verdict.spread,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._trials.ran:
            self._restored = state_dict  # compared when training starts: not all layers may exist yet

    def _checked_options(self, preset: Preset) -> ConversionOptions:
        chosen = {field.name: getattr(self, field.name) for field in fields(ConversionOptions) if field.init}
        return checked(ConversionOptions, **chosen | {"others": preset.others if self.others is True else self.others})

    def _convert(self, pl_module: pl.LightningModule) -> None:
        self._report = checked(convert_layers, pl_module, self._options, self._owner)
        self._verdict.apply(pl_module, self._report)
        self._find_layers(pl_module)

    def _judge(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Findings | None:
        found = self._probe.batch_ends(trainer, pl_module, self._report)
        if found is not None:
            self._find_layers(pl_module)
        return found

    def _begin_trials(self, pl_module: pl.LightningModule) -> None:
        self._convert(pl_module)  # layers made in LightningModule.setup
        self._restore(pl_module)
        self._probe.ask(self._report, self._progress.highest)
        self._progress.wait(at_zero=self._probe.judges_energy)

    def _end_trial_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._judge(trainer, pl_module) is not None:
            self._verdict.add_trial_of(pl_module)
            self._progress.wait(at_zero=False)

    def _find_layers(self, pl_module: pl.LightningModule) -> None:
        self._progress.find_layers(pl_module, self._owner, without=self.spread)

    def _release(self, pl_module: pl.LightningModule | None) -> None:
        self._trials.leave()
        self._progress.forget_layers()
        if pl_module is not None:  # None if the fit failed before it had a module
            restore_configure_model(pl_module)
            revert(pl_module, self._owner)

    def _restore(self, pl_module: pl.LightningModule) -> None:
        """Go on with what was found before the checkpoint; warn if that was made with other settings than the new."""
        then, self._restored = self._restored or {}, None
        now = {name: value for name, value in self.state_dict().items() if name != "spread"}
        judged_alike = all(then.get(name) == value for name, value in now.items() if name != "total_steps")
        if then.get("spread") is not None and judged_alike:
            if self._verdict.complete:  # by trials, which may have changed other layers
                self._verdict.forget()
                self._convert(pl_module)
            self._verdict.restore(pl_module, self._report, then["spread"])
            self._find_layers(pl_module)
        warn_of_other_settings(self._owner, then, now)
