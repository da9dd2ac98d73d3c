"""``ActivationPruningCallback``: compress the activations of a model that transformers' ``Trainer`` trains.

It is for the trainers of TRL too, which derive from that one, and for adapters of peft.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lightning_actprune.analysis.first_forwards import FirstForwards
from lightning_actprune.analysis.memory import MemoryReport
from lightning_actprune.callbacks.compiled import CompiledLayers
from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.config import Config, PresetName, Rule, check_flag
from lightning_actprune.convert import convert_and_check, new_owner, revert
from lightning_actprune.report import MIB, ConversionReport


class ActivationPruningCallback(TrainerCallback):  # type: ignore[misc]
    """Cut the memory of a ``transformers.Trainer`` by compressing the activations saved for backward.

    Layers are converted in place when ``train()`` begins, and reverted when it ends. The first forward shows which
    layers have an input that is kept anyway; these are dense from the second one on, in which what the model keeps is
    counted. Logs of training steps then have ``actprune_dense_mib`` and ``actprune_stored_mib``: in
    ``trainer.state.log_history``, as printed, and for callbacks behind this one. Evaluation, generation and checkpoints
    are those of the plain model: no key is added, and loading one does not need this package. A resumed training looks
    at its first forwards again.

    With ``torch_compile``, or several GPUs in one process, all layers stay converted. Nothing is counted, but
    ``compiled`` lists what compiled code keeps.

    transformers calls no callback when ``train()`` ends by an exception. The model then stays converted until
    ``train()`` is called again, or ``lightning_actprune.revert(model)``.

    Args:
        preset: ``"paper"``, ``"balanced"``, ``"max"`` or ``"recompute"``, as in ``convert``.
        sparsity: Fraction of blocks to drop, in [0, 1), instead of the preset's.
        block_size: Consecutive values per block, positive, instead of the preset's.
        rules: Settings of layers by pattern, as in ``convert``.
        offload: Whether packed tensors wait for backward in the memory of the host, as in ``convert``.
        verbose: Whether the main process prints which layers are converted, and what they keep.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range; when training begins, if no layer is converted or a pattern matches
            no layer.

    Attributes:
        report: Which layers are converted, in the current or the last training.
        memory: What the second forward of that training has kept, ``None`` before it.
        compiled: How compiled code keeps each value for backward in that training.

    Example:
        >>> from transformers import Trainer  # doctest: +SKIP
        >>> Trainer(model, args, train_dataset=data, callbacks=[ActivationPruningCallback("max")]).train()
        ... # doctest: +SKIP
    """

    def __init__(
        self,
        preset: PresetName | None = None,
        *,
        sparsity: float | None = None,
        block_size: int | None = None,
        rules: Mapping[str, Rule] | None = None,
        offload: bool = False,
        verbose: bool = True,
    ) -> None:
        self._config = Config(preset, sparsity, block_size, rules, offload)
        self._owner = new_owner("ActivationPruningCallback")
        self._compiled = CompiledLayers(self._owner)
        self._watch: FirstForwards | None = None
        self._was_shown = False
        self.verbose = check_flag(verbose, "verbose")
        self.report = ConversionReport()

    @property
    def memory(self) -> MemoryReport | None:
        """What the second forward has kept."""
        return None if self._watch is None else self._watch.memory

    @property
    def compiled(self) -> list[Row]:
        """How compiled code keeps each value."""
        return list(self._compiled.rows)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Convert the layers."""
        self._end(model)  # of a training that an exception has ended
        self._watch, self._was_shown = None, False
        names = "is_activation_checkpointing", "is_gradient_checkpointing"  # the second one in older versions
        if next((getattr(model, name) for name in names if hasattr(model, name)), False):
            warnings.warn(
                "`gradient_checkpointing` runs each block again and keeps only its inputs, so converted layers save "
                "next to nothing. HINT: set `gradient_checkpointing=False` (in newer versions "
                "`activation_checkpointing=False`), or remove this callback.",
                stacklevel=2,
            )
        self.report = convert_and_check(model, self._config, self._owner)
        self._compiled.begin(model)
        self._compiled.mark(model, unmarked_layers=not self.report.skipped)
        if args.n_gpu <= 1:  # not the replicas of `DataParallel`
            self._watch = FirstForwards(model, self.report)
        if self._watch is None or not self._watch.is_open:
            self._show(state, self.report.summary())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Show what is kept, once."""
        self._compiled.news(model)
        if self.memory is not None and not self._was_shown:
            self._was_shown = True
            self._show(state, self.report.summary())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Add what is kept, and what the dense model would keep, to the log of a training step."""
        if logs is not None and "loss" in logs and self.memory is not None and self.memory.dense_bytes is not None:
            sizes = {"actprune_dense_mib": self.memory.dense_bytes, "actprune_stored_mib": self.memory.stored_bytes}
            for log in (logs, state.log_history[-1]):  # the Trainer has copied it to its history already
                log.update({name: round(nbytes / MIB, 2) for name, nbytes in sizes.items()})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **_: Any
    ) -> None:
        """Make the layers dense again."""
        self._end(model)

    def _end(self, model: nn.Module) -> None:
        if self._watch is not None:
            self._watch.detach()
        self._compiled.end()
        revert(model, self._owner)

    def _show(self, state: TrainerState, text: str) -> None:
        if self.verbose and state.is_world_process_zero:
            print(text)  # noqa: T201 - as Trainer prints its logs
