"""``measure_sensitivity``: which layers of a model can be pruned how far, in a few seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_actprune.arguments import BlockSelection, Scope, ValueFormatName, check_model
from lightning_actprune.conversion_options import MIN_FEATURES
from lightning_actprune.sensitivity_grid import SPARSITIES, VALUE_FORMATS, SensitivityGrid
from lightning_actprune.sensitivity_probe import SensitivityProbe
from lightning_actprune.sensitivity_report import SensitivityReport

__all__ = ["measure_sensitivity"]


def measure_sensitivity(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    *,
    sparsities: Sequence[float] = SPARSITIES,
    value_formats: Sequence[ValueFormatName] = VALUE_FORMATS,
    block_size: int = 32,
    scope: Scope = "sample",
    block_selection: BlockSelection = "largest",
    include: Sequence[str] | str = ("*",),
    exclude: Sequence[str] | str = (),
    min_features: int = MIN_FEATURES,
    convolutions: bool = False,
    seed: int = 0,
) -> SensitivityReport:
    """Measure how close the weight gradients of pruned layers would be to the exact ones, for every setting of a grid.

    One forward and one backward a batch, in the mode (``model.train()``) and with the weights that the model has. They
    leave no trace: parameters, gradients, buffers, modes and torch's random numbers are as before. Linear layers,
    transformers' ``Conv1D`` and the projections of ``nn.MultiheadAttention`` are measured, convolutions on request.
    The figures are those of the weights at that moment: measure again later in the training. Gradients alone are asked
    for, which a reentrant checkpoint does not support: ``ActivationSensitivity`` measures inside one, too.

    Args:
        model: Any module, converted or not.
        loss: Returns the loss of a batch, computed by ``model``, under autocast if training is.
        batches: A few batches, such as ``itertools.islice(loader, 4)``, on the model's device.
        sparsities: Fractions of blocks dropped, each in [0, 1).
        value_formats: How kept values are stored, each as in ``convert``.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        block_selection: Which blocks are kept (see ``functional.linear``).
        include: Glob patterns on fully qualified names; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Linear layers with fewer input features are not measured.
        convolutions: Whether convolutions are measured too, which ``others`` of ``convert`` prunes.
        seed: Of torch's random numbers during the measurement, such as those of dropout.

    Returns:
        Cosine and norm ratio for each layer and setting, and why other layers were not measured.

    Raises:
        TypeError: If an argument has the wrong type, or ``loss`` returns no tensor.
        ValueError: If an argument is out of range, a pattern matches no layer, no layer can be measured, there is no
            batch, or a loss is no single number that needs a gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> batches = [torch.randn(32, 64) for _ in range(2)]
        >>> report = measure_sensitivity(model, lambda x: model(x).square().mean(), batches, sparsities=[0.5, 0.9])
        >>> sorted(report.suggest(min_cosine=0.1))
        ['0', '2']
    """
    check_model(model)
    stored = block_size, scope, block_selection
    grid = SensitivityGrid(sparsities, value_formats, *stored, include, exclude, min_features, convolutions)
    probe = SensitivityProbe(model, grid)
    seen = False
    with _unchanged(model, _checked_seed(seed)), probe:
        leaves = probe.leaves()
        if not leaves:
            listing = "\n".join(f"  {s.fqn} ({s.kind}): {s.reason}" for s in probe.report().skipped)
            raise ValueError(
                f"No layer of {type(model).__name__} can be measured:\n{listing}\nHINT: widen `include`, narrow "
                "`exclude`, lower `min_features`, or let weights require gradients."
            )
        for batch in batches:
            seen = True
            torch.autograd.grad(_checked_loss(loss(batch)), leaves, allow_unused=True)
            probe.end_batch()
    if not seen:
        raise ValueError("`batches` must hold at least one batch, got none. HINT: an iterator can be read only once.")
    return probe.report()


@contextmanager
def _unchanged(model: nn.Module, seed: int) -> Iterator[None]:
    """Put buffers, modes and random numbers back in the end; gradients are recorded inside."""
    modes = [(module, module.training) for module in model.modules()]
    names = [(module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module, _ in modes]
    given = [b for _, buffers, _ in names for b in buffers.values() if b is not None and not is_lazy(b)]
    # Nobody writes to what is one value in many places; versions do not show what a batch norm writes.
    values = [(b, b.detach().clone()) for b in given if torch._debug_has_internal_overlap(b) != 1]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.enable_grad():
        # Not `torch.manual_seed`, which would seed devices whose state is not put back.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, buffers, passing in names:
                module._buffers.clear()
                module._buffers.update(buffers)
                module._non_persistent_buffers_set.clear()
                module._non_persistent_buffers_set.update(passing)
            with torch.no_grad():
                for buffer, value in values:
                    buffer.copy_(value)


def _checked_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"`seed` must be an int, got {seed!r}. HINT: it makes dropout the same in every measurement.")
    return int(seed)


def _checked_loss(value: Any) -> Tensor:
    hint = "HINT: return what you would call backward() on, such as cross_entropy(model(x), y)."
    if not isinstance(value, Tensor):
        raise TypeError(f"`loss` must return a tensor, got {type(value).__name__}. {hint}")
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"`loss` must return one number that needs a gradient, got shape {tuple(value.shape)} with "
            f"requires_grad={value.requires_grad}. {hint}"
        )
    return value
