"""``ActivationPruning``: compress the activations that a LightningModule saves for backward during a fit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import TransformerEnginePrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_actprune.analysis.allocation import Allocation, check_memory_budget
from lightning_actprune.callbacks.budget import MemoryBudget
from lightning_actprune.callbacks.compiled import CompiledLayers
from lightning_actprune.callbacks.cuda_graphs import GraphedSteps
from lightning_actprune.callbacks.display import (
    describe_compiled,
    describe_decision,
    show,
    tabulate_compiled,
    tabulate_decision,
)
from lightning_actprune.callbacks.first_batch import BITS_STATE, Decision, FirstBatchProbe, TrialProbe, starts_step
from lightning_actprune.callbacks.fit import (
    CurrentFit,
    TrainerCallback,
    Verbosity,
    check_verbose,
    holds_whole_weights,
    is_detailed,
    run_check,
    warn_of_idle,
    warn_of_optimizers,
    warn_of_surroundings,
)
from lightning_actprune.callbacks.host_wait import HostWait
from lightning_actprune.callbacks.progress import SparsityProgress
from lightning_actprune.codec.dispatch import compilation
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.config import Config, Keep, KeepArguments, PresetName, Recompute, check_flag, check_share
from lightning_actprune.convert import (
    DenseView,
    check_conversion,
    convert_layers,
    describe_idle,
    find_hooks,
    new_owner,
    revert,
)
from lightning_actprune.operators.hooks import explain
from lightning_actprune.operators.sites import SiteDecisions
from lightning_actprune.report import ConversionReport, LayerReport, describe_layers, tabulate_conversion
from lightning_actprune.schedules import SparsitySchedule

COMPILES = "Activation pruning: the first step compiles kernels for this GPU, which takes up to 20 s once."
_REPLACED = "_actprune_replaced"
"""Attribute that marks our ``configure_model`` on a module instance; holds the instance attribute it replaces."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address in the default ``repr`` of a function or object, which differs from process to process."""


class ActivationPruning(TrainerCallback):
    """Cut training memory by compressing the activations saved for backward.

    Forward stays exact, and so do the gradients of inputs and biases of linear layers and convolutions. Their weight
    gradients are computed from the kept part of the input: the largest blocks (arXiv:2311.16883), quantized values, or
    both. Gradients through quantized activation functions, norms and attention are rounded too. Layers are converted in
    place when a fit begins and reverted when it ends, also after an exception. Validation, test, prediction and
    checkpoints are those of the plain model: its modules are dense from the start of a validation until training goes
    on, no key is added to a checkpoint, and loading one does not need this package. A schedule is a function of
    ``trainer.global_step``, so a resumed run continues it.

    The first training batch of a fit shows which layers have an input that is retained for backward anyway (see
    ``RetentionProbe``). Packing it would add memory, so these layers stay dense from then on. It also shows which
    layers run only inside an activation checkpoint, and a warning names them (see ``RecomputationProbe``). Compiled
    modules run eagerly in that batch; without ``skip_retained`` they do not, and nothing inside them is seen. In a fit
    with a tuner (``BatchSizeFinder``, ``LearningRateFinder``) it is the first batch of the tuner's trials. A resumed
    fit takes these decisions from its checkpoint if the settings are the same. It then equals a fit without a stop,
    unless the checkpoint was saved before the end of the first batch.

    Several instances can share a model if the ``rules`` give each its own layers. A Trainer cannot have two instances
    with the same patterns in ``rules``, since a checkpoint has one key for both. Only ``verbose`` can be changed later.

    Args:
        preset: How each operator is kept: ``"paper"``, ``"balanced"``, ``"max"`` or ``"recompute"`` (see ``config``);
            by default ``"paper"`` with a ``sparsity``, and ``"balanced"`` without.
        sparsity: Fraction of blocks that linear layers and convolutions drop, in [0, 1), or a schedule of it, instead
            of the preset's. Trials of tuners use its lowest value.
        block_size: Consecutive values per block, positive, instead of the preset's; cut to a row if larger.
        rules: Settings of layers by pattern, as ``{"head": None, "blocks.*.fc1": Keep(bits=4)}``; the first pattern
            that matches a layer counts (see ``config``). A ``Keep`` may also be a mapping of its arguments or the name
            of a preset; ``"dense"`` means ``None``.
        offload: Whether packed tensors wait for backward in the memory of the host. Gradients do not change. On a CPU,
            and for tensors that keep their bits, it has no effect. It excludes a ``memory_budget`` and ``cuda_graphs``.
        memory_budget: Largest peak of a training step: a size such as ``"20GiB"``, a number of bytes, or a fraction of
            the dense model's peak, such as ``0.25``. It then keeps blocks in the fastest way that fits and, among
            these, in the most exact one (``callbacks.budget``); the first two steps use the fewest bytes. It excludes a
            ``preset``.
        max_error: Bound on the error of gradients, in [0, 1], such as ``0.1``: on the root of the mean of its square
            over all trained values, with each parameter's error relative to the norm of its own gradient. That of a
            single layer may be three times as large. The first batch shows in how many bits each linear layer and
            convolution has to keep its input (``analysis.measured_bits``), and what other operators add
            (``analysis.second_backward``), a few more batches which of these need more bits; until then all have the
            bits of the preset, by default ``"max"``. Both are measured again at 1, 3, 10, 20, 35 and 60 % of the
            training. Layers whose bits a rule names keep these.
        total_steps: Value of ``trainer.global_step`` at which the progress of schedules is 1. It counts the steps of
            every optimizer; the default is the Trainer's estimate, which counts batches, so set it with several
            optimizers.
        skip_retained: Whether layers stay dense whose input is kept for backward anyway; ``False`` packs them too.
        cuda_graphs: Whether to replay the modules that ``training_step`` calls from CUDA graphs, if the GPU would wait
            for Python; modules that cannot be replayed stay eager, and the reason is shown.
        verbose: What to print once per fit: nothing (``False`` or 0); the settings of operators, dense layers and the
            results of the first batch in a few lines (1, the default), which an ``ActivationMemoryMonitor`` prints with
            its own; or also tables of layers (``True`` or 2).

    Raises:
        MisconfigurationException: If an argument is not allowed; when the fit begins, if no layer is converted, a rule
            matches no layer, a layer is claimed twice, another instance has the same patterns, the precision plugin
            replaces linear layers, or the length of the training is needed and unknown; after the first batch, if every
            layer is retained.

    .. note:: Saved state is keyed by the patterns of ``rules``: these make instances distinct in a checkpoint.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ActivationPruning(sparsity=0.6, rules={"head": None})], logger=False)
    """

    without_trainer = '`lightning_actprune.convert(model, "max")` before `fabric.setup`'
    _fixed: frozenset[str] = frozenset()

    def __init__(
        self,
        preset: PresetName | None = None,
        *,
        sparsity: float | SparsitySchedule | None = None,
        block_size: int | None = None,
        rules: Mapping[str, KeepArguments | Keep | Recompute | dict[str, Any] | str | None] | None = None,
        offload: bool = False,
        memory_budget: str | float | None = None,
        max_error: float | None = None,
        total_steps: int | None = None,
        skip_retained: bool = True,
        cuda_graphs: bool = False,
        verbose: Verbosity = 1,
    ) -> None:
        super().__init__()
        budget = None if memory_budget is None else run_check(check_memory_budget, memory_budget)
        if budget is not None and preset is not None:
            raise MisconfigurationException(
                f"`preset` must be left out with a `memory_budget`, which chooses among the presets, got {preset!r}. "
                "HINT: remove one of the two; use rules for single layers."
            )
        if offload and (budget is not None or cuda_graphs):
            raise MisconfigurationException(
                f"`offload` must be False with a `memory_budget` or `cuda_graphs`, got {offload!r}: a budget is about "
                "what stays on the GPU, and a CUDA graph waits for no copy. HINT: remove one of them."
            )
        if budget is not None or (max_error is not None and preset is None):
            preset = "max"
        self._config = run_check(Config, preset, sparsity, block_size, rules, offload)
        self._budget = None if budget is None else MemoryBudget(budget, self._config)
        self.memory_budget = memory_budget
        others = {"memory_budget": memory_budget, "sparsity": sparsity}
        self.max_error = None if max_error is None else _check_max_error(max_error, others, self._config)
        self.preset = self._config.preset
        self.sparsity = sparsity
        self.block_size = block_size
        self.rules = rules
        self.offload = offload
        self.skip_retained = run_check(check_flag, skip_retained, "skip_retained")
        self.cuda_graphs = run_check(check_flag, cuda_graphs, "cuda_graphs")
        self.verbose = check_verbose(verbose)
        self._progress = SparsityProgress(total_steps)
        self.total_steps = self._progress.total_steps
        if total_steps is not None and not any(
            isinstance(keep.sparsity, SparsitySchedule) for keep in self._config.keeps
        ):
            raise MisconfigurationException(
                f"`total_steps` is the length of a schedule, and no sparsity is one, got {total_steps!r}. HINT: remove "
                "it, or use a schedule, as in `sparsity=CubicSchedule(end=0.6)`."
            )
        self._fit = CurrentFit()
        patterns = _list_patterns(self._config)
        self._owner = new_owner(f"ActivationPruning(rules={patterns})")
        # Lightning builds it so in a private method, and reads it at each hook in each step.
        self._state_key = type(self).__qualname__ + repr({"rules": patterns})
        self._report = ConversionReport()
        self._restored: dict[str, Any] | None = None
        self._probe = FirstBatchProbe(skip_retained, self.max_error, self._owner, self._config)
        self._decisions = self._probe.decisions
        self._compiled = CompiledLayers(self._owner)
        self._dense_view = DenseView()
        self._graphs = GraphedSteps() if self.cuda_graphs else HostWait()
        self._trials = TrialProbe(self, self._probe, self._begin_trials, self._end_trial_batch)
        # Refuse changes from now on; Lightning adds attributes of its own later.
        self._fixed = frozenset(name for name in vars(self) if not name.startswith("_") and name != "verbose")

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fixed:
            raise MisconfigurationException(
                f"`{name}` of {type(self).__name__} cannot be changed after construction, got {value!r} instead of "
                f"{getattr(self, name)!r}. HINT: make a new one for the next Trainer."
            )
        super().__setattr__(name, value)

    @property
    def report(self) -> ConversionReport:
        """The conversion of the current or the last fit, with ``to_rows()`` and ``to_dict()``."""
        return self._report

    @property
    def converted(self) -> list[LayerReport]:
        """Layers converted in the current or the last fit."""
        return self._report.converted

    @property
    def skipped(self) -> list[LayerReport]:
        """Layers that stay dense in the current or the last fit, with reasons."""
        return self._report.skipped

    @property
    def allocation(self) -> Allocation | None:
        """The choice of a memory budget in the current or the last fit; ``None`` before it, and in a resumed fit."""
        return None if self._budget is None else self._budget.allocation

    @property
    def compiled(self) -> list[Row]:
        """How compiled code keeps each value for backward, in the current or the last fit.

        Code from a cache of inductor is listed when it runs, if it packs a tensor.
        """
        return list(self._compiled.rows)

    @property
    def spread(self) -> dict[str, float]:
        """Share of the energy that would be dropped, by name of the layers that therefore drop nothing."""
        return dict(self._decisions.spread or {})

    @property
    @override
    def state_key(self) -> str:
        return self._state_key

    # === Hooks, in the order of a fit =================================================================================

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._fit.begin(self, trainer)
            _check_alone(trainer, self)
            _check_precision(trainer, self._config)
            if self.max_error is not None:
                _check_gradients(trainer)
            if self._budget is not None:
                self._budget.begin(trainer, pl_module)
            self._restored = None
            self._compiled.begin(pl_module)
            self._decisions.fit_begins(pl_module)
            self._convert(pl_module)
            if is_overridden("configure_model", pl_module):
                _call_after_configure_model(pl_module, self._convert)
            self._trials.wait(trainer, pl_module)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._trials.leave():  # trials convert too, before a strategy wraps layers that they make dense
            self._convert(pl_module)  # layers made in LightningModule.setup
        run_check(check_conversion, pl_module, self._report, self._config)
        if idle := describe_idle(pl_module, self._report):
            rank_zero_warn(idle)
        if self._budget is None:
            self._show_conversion(trainer)
            self._show(trainer, Decision([], self.spread))  # in trials

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # It stays open until training goes on, so also in later hooks of other callbacks.
        self._dense_view.open(pl_module, self._owner)

    @override
    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._dense_view.close()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._resume_budget(pl_module)
        if self._is_undecided and self.verbose:
            show(trainer, "Activation pruning: two steps keep as little as possible, then the memory budget decides.")
        elif self._budget is not None:
            self._show_conversion(trainer)
        self._progress.start(trainer)
        compilation.listen(lambda: self._tell(trainer, COMPILES))
        warn_of_surroundings(trainer, pl_module.device)
        warn_of_optimizers(trainer, self.total_steps, self._progress.horizon)
        warn_of_idle(self.converted, self._progress.last)
        restored = self._restore(pl_module)
        if restored is not None:
            self._show(trainer, restored)
        self._progress.follow(trainer)
        self._probe.ask(self._report, self._progress.highest)
        self._decisions.end_with_the_fit()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._dense_view.close()
        if self._probe.wakes(trainer, pl_module):
            self._convert_and_ask(trainer, pl_module)
        if self._probe.is_due(trainer, pl_module.device):
            self._graphs.restart()
            self._probe.measure_again()
        self._progress.follow(trainer)
        if self._budget is not None:
            self._budget.batch_starts(trainer, pl_module, batch)
        self._probe.batch_starts(pl_module, batch, starts_step(trainer, batch_idx))
        if (self.cuda_graphs or self.verbose) and self._is_settled:
            self._tell(trainer, self._graphs.batch_starts(trainer, pl_module, batch_idx))

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._probe.backward_starts(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._probe.backward_ends()

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._graphs.before_optimizer(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell(trainer, self._graphs.batch_ends())
        decision = self._decide(trainer, pl_module)
        if decision is not None:
            self._show(trainer, decision)
        self._show_compiled(trainer, self._compiled.news(pl_module))
        allocation = None if self._budget is None else self._budget.batch_ends(trainer, pl_module, batch)
        if allocation is not None:
            self._take(trainer, pl_module, allocation)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._fit.end(trainer):
            self._release(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        explain(exception)
        if self._fit.end(trainer):  # Lightning calls no `teardown` after an exception
            self._release(pl_module)
            self._decisions.end_with_the_fit()

    # === State in checkpoints =========================================================================================

    @override
    def state_dict(self) -> dict[str, Any]:
        settings = self._config.described()
        return {
            "kept": {operator: _ADDRESS.sub("", keep) for operator, keep in settings["kept"].items()},
            "rules": [[pattern, _ADDRESS.sub("", rule)] for pattern, rule in settings["rules"]],
            "total_steps": self._progress.horizon,
            "layers": self._decisions.layers,
            "skip_retained": self.skip_retained,
            "spread": self._decisions.spread,
            "retained": self._decisions.retained,
            "saved": self._decisions.saved.state_dict(),
            **({} if self._budget is None else {"memory_budget": self._budget.state_dict()}),
            **(
                {}
                if self.max_error is None
                else {"max_error": self.max_error, **{name: getattr(self._decisions, name) for name in BITS_STATE}}
            ),
        }

    # So Lightning takes it for the method of `Callback`, and `setup` refuses instances with the same patterns:
    # Lightning's own error does not mention rules.
    state_dict.__wrapped__ = pl.Callback.state_dict  # type: ignore[attr-defined]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._trials.ran:
            self._restored = state_dict  # compared when training starts: not all layers may exist yet

    # === Conversion and decisions =====================================================================================

    def _take(self, trainer: pl.Trainer, pl_module: pl.LightningModule, allocation: Allocation) -> None:
        """Switch to a setting that fits the budget."""
        assert self._budget is not None
        self._decisions.forget()  # nothing is known about layers that were in recomputed blocks
        self._convert_and_ask(trainer, pl_module)
        if self.verbose:
            show(trainer, self._budget.describe(allocation))
        self._show_conversion(trainer)

    def _convert_and_ask(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Convert again during a fit, and probe the next batch for missing decisions."""
        self._convert(pl_module)
        self._progress.start(trainer)
        self._probe.ask(self._report, self._progress.highest)

    @property
    def _is_settled(self) -> bool:
        """Whether settings are final for the rest of the fit, except for layers that wake."""
        return not self._probe.waits and (self._budget is None or self._budget.is_settled)

    def _tell(self, trainer: pl.Trainer, text: str) -> None:
        if self.verbose and text:
            show(trainer, text)

    def _convert(self, pl_module: pl.LightningModule) -> None:
        self._graphs.restart()
        config = self._config if self._budget is None else self._budget.config(pl_module)
        if config is None:  # the dense model fits
            revert(pl_module, self._owner)
            self._report = ConversionReport()
        else:
            config = config.with_bits(self._decisions.operators)
            self._report = run_check(convert_layers, pl_module, config, self._owner)
            for row in self._report.skipped if self._budget is not None else ():
                if self._config.rule_of([row.fqn], row.operator) != config.rule_of([row.fqn], row.operator):
                    self._report.leave_dense(row.fqn, "left dense by the memory budget")
        self._decisions.apply(pl_module, self._report)
        compression = find_hooks(pl_module, self._owner)
        self._decisions.saved = SiteDecisions() if compression is None else compression.decisions
        self._find_layers(pl_module)

    def _decide(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Decision | None:
        operators = self._decisions.operators
        decision = self._probe.batch_ends(trainer, pl_module, self._report)
        if self._decisions.operators != operators:
            self._convert(pl_module)
        elif decision is not None:
            self._find_layers(pl_module)
        return decision

    @property
    def _is_undecided(self) -> bool:
        """Whether a memory budget still has to choose; until then settings change and are not shown."""
        return self._budget is not None and self._budget.number is None

    def describe(self) -> list[str]:
        """Return the lines to print: what is converted and what stays dense."""
        if not self.verbose or (self._budget is not None and self._report == ConversionReport()):  # all dense
            return []
        return describe_layers(self._report, self._progress.last)

    def is_told_by_monitor(self, trainer: pl.Trainer) -> bool:
        """Return True if an ``ActivationMemoryMonitor`` prints these lines together with its own."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        tells = any(isinstance(each, TrainerCallback) and each.tells_layers for each in callbacks)
        return tells and not is_detailed(self.verbose)

    def _show_conversion(self, trainer: pl.Trainer) -> None:
        if (lines := self.describe()) and not self.is_told_by_monitor(trainer):
            show(trainer, "\n".join(lines))
            if is_detailed(self.verbose) and self._report.layers:
                show(trainer, tabulate_conversion(self._report, self._progress.last))

    def _show(self, trainer: pl.Trainer, decision: Decision) -> None:
        if self.verbose and not self._is_undecided:
            if self.is_told_by_monitor(trainer):
                decision = decision._replace(retained=[])
            show(trainer, *describe_decision(decision, self._report))
            if is_detailed(self.verbose):
                show(trainer, *tabulate_decision(decision))

    def _show_compiled(self, trainer: pl.Trainer, rows: list[Row]) -> None:
        if self.verbose and rows and not self._is_undecided and not self.is_told_by_monitor(trainer):
            show(trainer, describe_compiled(rows))
            if is_detailed(self.verbose):
                show(trainer, tabulate_compiled(rows))

    def _begin_trials(self, pl_module: pl.LightningModule) -> None:
        self._convert(pl_module)  # layers made in LightningModule.setup
        self._resume_budget(pl_module)
        self._restore(pl_module)
        self._probe.ask(self._report, self._progress.highest)
        self._progress.wait(at_zero=self._probe.judges_energy)

    def _end_trial_batch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._decide(trainer, pl_module) is not None:
            self._decisions.add_trial_of(pl_module)
            self._progress.wait(at_zero=False)

    def _find_layers(self, pl_module: pl.LightningModule) -> None:
        self._progress.find_layers(pl_module, self._owner, without=self.spread)
        by_rule = {layer.fqn for layer in self._report.skipped} - set(self._decisions.retained or {})
        self._compiled.mark(pl_module, unmarked_layers=not by_rule)

    def _release(self, pl_module: pl.LightningModule | None) -> None:
        compilation.listen(None)
        self._dense_view.close()
        self._graphs.end()
        self._trials.leave()
        self._compiled.end()
        self._progress.forget_layers()
        if pl_module is not None:  # None if the fit failed before it had a module
            _restore_configure_model(pl_module)
            revert(pl_module, self._owner)
            if self._budget is not None:
                self._budget.end()

    def _resume_budget(self, pl_module: pl.LightningModule) -> None:
        """Restore the choice of a memory budget from the checkpoint, if there is one."""
        then = (self._restored or {}).get("memory_budget")
        if self._budget is not None and then is not None:
            self._budget.load_state_dict(then, pl_module)
            self._convert(pl_module)

    def _restore(self, pl_module: pl.LightningModule) -> Decision | None:
        """Restore the decisions of the checkpoint; warn if it was saved with other settings."""
        then, self._restored = self._restored or {}, None
        results = "spread", "retained", "saved", "memory_budget", *BITS_STATE
        now = {name: value for name, value in self.state_dict().items() if name not in results}
        by_budget = () if self._budget is None else ("layers",)  # a budget chooses them
        _warn_of_other_settings(self._owner, then, {name: now[name] for name in now if name not in by_budget})
        deciding = ("kept", "rules", "layers", "skip_retained")  # `total_steps` changes no decision
        if any(name not in then or then[name] != now[name] for name in deciding):
            return None
        if then.get("max_error") != self.max_error or "quiet" not in then["saved"]:  # that of an older version
            return None
        decided = then["spread"] is not None
        if decided and self._decisions.is_complete:  # by trials, which may have decided about other layers
            self._decisions.forget()
            self._convert(pl_module)
        operators = then.get("operators", {})
        if operators != self._decisions.operators:
            self._decisions.operators = operators
            self._convert(pl_module)
        self._decisions.saved.load_state_dict(then["saved"])
        if not decided:
            return None
        restored = self._decisions.restore(pl_module, self._report, then)
        self._find_layers(pl_module)
        return restored


def _list_patterns(config: Config) -> list[str]:
    """Return the patterns of rules, those of dense layers marked; they show which layers instances share."""
    rules = config.described()["rules"]
    return [f"{pattern} (dense)" if rule == repr(None) else pattern for pattern, rule in rules]


def _check_alone(trainer: pl.Trainer, callback: ActivationPruning) -> None:
    """Raise if the trainer has another callback with the same state key, or this one twice."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    same = [other for other in callbacks if other.state_key == callback.state_key]
    if len(same) > 1:
        raise MisconfigurationException(
            f"A Trainer takes one ActivationPruning for the same layers, got {len(same)} whose `rules` have the same "
            f"patterns ({', '.join(_list_patterns(callback._config)) or 'none'}). HINT: keep one of them in "
            "`callbacks`, with `rules` for what differs from layer to layer."
        )


def _check_max_error(max_error: float, others: Mapping[str, Any], config: Config) -> float:
    """Return the bound on the error; raise if it is none, or if there are no bits to choose."""
    for name, value in others.items():
        if value is not None:
            raise MisconfigurationException(
                f"`max_error` chooses bits by their error, and cannot be combined with `{name}`, got {value!r}. HINT: "
                "remove one of the two."
            )
    if not any(keep.bits for keep in config.keeps):
        raise MisconfigurationException(
            f"`max_error` chooses the bits of inputs, and preset {config.preset!r} quantizes none. HINT: use the "
            'preset "max".'
        )
    return run_check(check_share, max_error, "max_error")


def _check_gradients(trainer: pl.Trainer) -> None:
    """Raise if no process has whole weight gradients."""
    strategy = trainer.strategy
    if not holds_whole_weights(strategy):
        raise MisconfigurationException(
            f"`max_error` needs the gradients of whole weights, and {type(strategy).__name__} may shard them. HINT: "
            "measure on one GPU with `measure_sensitivity`, and pass its `suggest(max_error)` as `rules`."
        )


def _check_precision(trainer: pl.Trainer, config: Config) -> None:
    """Raise if the precision plugin replaces linear layers, or the precision is too high to quantize."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, TransformerEnginePrecision):
        raise MisconfigurationException(
            f"ActivationPruning cannot work with {type(plugin).__name__}, which replaces linear layers by its own. "
            'HINT: use another `precision`, such as "bf16-mixed".'
        )
    bits = next((keep.bits for keep in config.keeps if keep.bits is not None), None)
    if bits is not None and str(trainer.precision) == "64-true":
        raise MisconfigurationException(
            f"ActivationPruning cannot store float64 values (precision='64-true') in {bits} bits, since the scales of "
            "blocks have fewer bits. HINT: set `preset='paper'`, which quantizes nothing, or another `precision`."
        )


def _warn_of_other_settings(owner: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of entries that are in both states and differ."""
    pairs = {name: (_to_entries(then[name]), _to_entries(now[name])) for name in now if name in then}
    changes = [
        f"{name}{f'[{key!r}]' if key else ''}: {before.get(key, 'nothing')} -> {after.get(key, 'nothing')}"
        for name, (before, after) in pairs.items()
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    ]
    if changes:
        rank_zero_warn(
            f"{owner} continues a checkpoint made with other settings ({'; '.join(changes)}) and uses the new "
            "ones. HINT: give the callback its old arguments if this is not intended."
        )


def _to_entries(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    pairs = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    return dict(value) if pairs else {"": value}


def _call_after_configure_model(pl_module: pl.LightningModule, action: Callable[[pl.LightningModule], None]) -> None:
    """Let the next ``pl_module.configure_model()`` end with ``action``; later calls are the user's own again.

    No hook runs between ``configure_model`` and the tuners, and an early call would leave the strategy's context.
    """
    original = pl_module.configure_model

    @functools.wraps(original)
    def configure_model() -> None:
        _restore_configure_model(pl_module)
        original()
        action(pl_module)

    vars(configure_model)[_REPLACED] = vars(pl_module).get("configure_model")
    vars(pl_module)["configure_model"] = configure_model


def _restore_configure_model(pl_module: pl.LightningModule) -> None:
    """Undo every ``_call_after_configure_model``."""
    attributes = vars(pl_module)
    while _REPLACED in getattr(attributes.get("configure_model"), "__dict__", {}):
        replaced = vars(attributes.pop("configure_model"))[_REPLACED]
        if replaced is not None:
            attributes["configure_model"] = replaced
