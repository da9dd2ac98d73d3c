"""Watch the first training forwards of a converted model, in any training loop.

The first one shows which layers have an input that is kept for backward anyway (``RetentionProbe``). They are dense
from the second one on, in which what the model keeps is counted (``SavedTensorMeter``). Hooks on the model see its
forwards; they are gone after the second one, after ``revert``, and in copies.

A forward without gradients or in evaluation mode is not watched, nor is one that an activation checkpoint runs again in
backward, or one under transforms of ``torch.func``, which forbid hooks for saved tensors. If a forward raises, the next
one is watched in its place.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.codec.dispatch import describe_reference
from lightning_actprune.codec.private import are_functorch_transforms_active, refusal, unseen_by_compilers
from lightning_actprune.convert import detach_with_revert
from lightning_actprune.operators.hooks import ForwardHook, eager_modules, is_recomputation
from lightning_actprune.report import ConversionReport


class FirstForwards:
    """Make layers dense whose input the first training forward keeps anyway, and count what the second one keeps.

    Call it once, after ``convert`` and before the loop. The first forward should be like later ones. Compiled modules
    inside the model run eagerly in it. Nothing happens in a model that is compiled as one graph: all its layers stay
    converted. If something around it breaks the graph, as accelerate does, it is watched.

    Args:
        model: The module that ``convert`` was called on.
        report: The conversion, which is updated when the second forward begins.

    Attributes:
        memory: What the second forward has kept, ``None`` before it.

    Example:
        >>> from lightning_actprune import convert, revert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> report = convert(model, "max")
        >>> watch = FirstForwards(model, report)
        >>> for _ in range(2):
        ...     model(torch.randn(4096, 64)).sum().backward()
        >>> print(report.skipped[0].fqn, report.skipped[0].reason, sep=": ")
        0: its input is part of the batch
        >>> watch.memory.stored_bytes < 0.5 * watch.memory.dense_bytes
        True
        >>> revert(model)
        ['1', '2']
    """

    def __init__(self, model: nn.Module, report: ConversionReport) -> None:
        self._model, self._report = model, report
        self._probe: RetentionProbe | None = None
        self._open: RetentionProbe | SavedTensorMeter | None = None
        self._handles: list[RemovableHandle] = []
        self.memory: MemoryReport | None = None
        if problem := refusal("Finding out which layers are better left dense", RetentionProbe.needs):
            warnings.warn(f"{problem} All stay converted.", stacklevel=2)
        elif model in eager_modules(model):
            enter, leave = ForwardHook(self._enter), ForwardHook(self._leave)
            before = model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            self._handles = [before, model.register_forward_hook(leave, always_call=True)]
            detach_with_revert(model, self)

    @property
    def is_open(self) -> bool:
        """Whether it watches the next forward."""
        return bool(self._handles)

    def detach(self) -> None:
        """Watch no further forward; ``revert`` does it, too."""
        while self._handles:
            self._handles.pop().remove()
        if self._open is not None:
            self._open.close()
            self._open = None

    @unseen_by_compilers
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self._model:  # a replica of DataParallel
            return
        if self._open is not None:  # the model calls itself, or an interrupt has ended its last forward
            self.detach()
            return
        is_visible = not are_functorch_transforms_active() and not is_recomputation()
        if module.training and torch.is_grad_enabled() and is_visible:
            if self._probe is None:
                weight = next(module.parameters(), None)
                if weight is not None and (problem := describe_reference(torch.float32, weight.device)):
                    warnings.warn(problem, stacklevel=2)
                self._open = RetentionProbe(module, (args, kwargs)).enter_inside(args, kwargs)
                return
            self._probe.apply(self._report)
            self._open = SavedTensorMeter(module, (args, kwargs)).enter_inside(args, kwargs)

    @unseen_by_compilers
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        watch = self._open
        if watch is None or module is not self._model:
            return
        self._open = None
        if output is None:  # it has raised
            watch.close()
            return
        watch.exit_inside(args, output)
        if isinstance(watch, RetentionProbe):
            self._probe = watch
        else:
            self.memory = self._report.memory = watch.report()
            self.detach()
