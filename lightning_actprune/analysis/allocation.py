"""How each block of a model is kept so that a training step fits into a memory budget: the fastest, most exact way.

Of a block (``operators.recompute.find_blocks``) there are four ways to keep what backward needs, from the fewest bytes
to the most. In brackets: what a ViT-B/16 keeps of its dense bytes, how much longer a step takes if all blocks are kept
so, and the square of the gradient's relative error::

    recompute    run again in backward, from its input in eight bits         (3 %, 22 %, 1e-5)
    max          in few bits, as preset "max"                                (20 %, 3 %, .03)
    balanced     in four bits, as preset "balanced"                          (26 %, 3 %, .008)
    dense        as it is                                                    (100 %, 0, 0)

What a byte buys is the largest for ``recompute -> max``, a fifth of a step's time for a sixth of the block's bytes, and
error comes after time. So the settings of a whole model form one path: from all blocks run again, one block after the
other takes the next way, the last block first, until all are kept in few bits; then the same for ``balanced``, and for
``dense``. The last block first, since the peak of a step lies where backward begins: what runs again there adds its own
activations to what all others keep, while a block further ahead runs again when those behind it have let go of theirs.
What belongs to no block is kept as ``max`` does while any block is, then as ``balanced``, and is dense in the end.

Along the path the step takes less time, and from where no block runs again its gradient becomes more exact. Its peak
grows, as far as can be said without looking; so the last setting whose peak fits is found by bisection, of which each
look is a simulated step (``analysis.simulated``). What is chosen has itself been looked at, so it fits whether or not
peaks grow all along the path.

A simulation knows no fragments, workspaces of convolutions and buckets of a strategy. Whoever has measured a step of a
setting on the device can say by how much that was off, and all predictions are corrected by that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from numbers import Integral, Real
from typing import Any, TypeAlias

from torch import nn

from lightning_actprune.analysis.memory import StepMemory
from lightning_actprune.analysis.simulated import Loss, MakeOptimizer, simulate
from lightning_actprune.config import Config, PresetName, Recompute, Rule, check_model
from lightning_actprune.convert import convert_layers, new_owner
from lightning_actprune.operators.recompute import find_blocks
from lightning_actprune.report import ConversionReport
from lightning_actprune.schedules import SparsitySchedule

Rules: TypeAlias = dict[str, Rule]
BITS = 8
"""Of the inputs of blocks that run again."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b\s*", re.IGNORECASE)
_EXAMPLE = 'HINT: a size such as "20GiB", a number of bytes, or a fraction of the dense peak such as 0.25.'
_MIB = 2**20


def check_memory_budget(value: Any) -> int | float:
    """Return ``value`` as a number of bytes, or as a fraction of the dense peak in (0, 1]."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found is None:
            raise ValueError(f"`memory_budget` must be a size, got {value!r}. {_EXAMPLE}")
        value = int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`memory_budget` must be a size, got {value!r} of type {type(value).__name__}. {_EXAMPLE}")
    if isinstance(value, Integral):
        if value < _MIB:
            raise ValueError(f"`memory_budget` must be at least 1 MiB, got {value!r} bytes. {_EXAMPLE}")
        return int(value)
    if not 0.0 < float(value) <= 1.0:
        raise ValueError(f"`memory_budget` must be in (0, 1] if it is a fraction, got {value!r}. {_EXAMPLE}")
    return float(value)


def settings(model: nn.Module) -> list[Rules]:
    """Return the rules of each setting of the path, the one with the fewest bytes first, the dense model last.

    They are for the preset ``"max"``, or another one in its place.
    """
    blocks = find_blocks(model)
    inside = {name: (escape(name), f"{escape(name)}.*") for name in blocks}
    again: dict[str, Rules] = {name: {inside[name][0]: Recompute(BITS), inside[name][1]: None} for name in blocks}
    path: list[Rules] = []
    ways: list[Callable[[str], Rules]] = [
        lambda name: again[name],
        lambda name: {},
        lambda name: dict.fromkeys(inside[name], "balanced"),
        lambda name: dict.fromkeys(inside[name]),
    ]
    around: list[Rules] = [{}, {}, {"*": "balanced"}]
    for before, after, rest in zip(ways, ways[1:], around, strict=False):
        for changed in range(len(blocks) + 1):
            split = len(blocks) - changed
            rules: Rules = {}
            for number, name in enumerate(blocks):
                rules |= before(name) if number < split else after(name)
            path.append(rules | rest)
    path.append({"*": None})
    return [rules for number, rules in enumerate(path) if number == 0 or rules != path[number - 1]]


@dataclass(frozen=True)
class Allocation:
    """A setting of the path.

    Args:
        number: Its number on the path, 0 for the one with the fewest bytes.
        rules: What rules it is made of, beside the preset.
        step: The simulated step.
        dense: The simulated step of the dense model.
        least: The simulated step of the setting with the fewest bytes.
        off: By how many bytes a measured step had more than the simulated one.
    """

    number: int
    rules: Rules = field(repr=False)
    step: StepMemory = field(repr=False)
    dense: StepMemory = field(repr=False)
    least: StepMemory = field(repr=False)
    off: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether the dense model fits."""
        return self.step is self.dense

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step."""
        return self.step.peak_bytes + self.off


class Allocator:
    """Looks for the last setting of the path that fits.

    Args:
        model: The dense model.
        simulated: Returns the step of the model under a configuration, of the dense model for ``None``.
        preset: That of the path, ``"max"`` in general.
        rules: Those of the user, which come before those of the path.
        sparsity: As in ``Config``.
        block_size: As in ``Config``.
    """

    def __init__(
        self,
        model: nn.Module,
        simulated: Callable[[Config | None], StepMemory],
        preset: PresetName = "max",
        rules: Rules | None = None,
        sparsity: float | SparsitySchedule | None = None,
        block_size: int | None = None,
    ) -> None:
        self.path = settings(model)
        self._simulated, self._own = simulated, rules or {}
        self._config = partial(Config, preset, sparsity, block_size)
        self._steps: dict[int, StepMemory] = {}

    def config(self, number: int) -> Config | None:
        """Return the configuration of a setting, ``None`` for the dense model."""
        if number == len(self.path) - 1:
            return None
        rules = {**self._own, **{name: rule for name, rule in self.path[number].items() if name not in self._own}}
        return self._config(rules)

    def step(self, number: int) -> StepMemory:
        """Return the simulated step of a setting."""
        if number not in self._steps:
            self._steps[number] = self._simulated(self.config(number))
        return self._steps[number]

    def allocation(self, number: int, off: int = 0) -> Allocation:
        """Return a setting."""
        last = len(self.path) - 1
        return Allocation(number, self.path[number], self.step(number), self.step(last), self.step(0), off)

    def fit(self, budget: float, off: int = 0) -> Allocation:
        """Return the last setting that fits.

        Args:
            budget: Bytes, or a fraction of the peak of the dense model.
            off: By how many bytes a measured step had more than the simulated one.

        Raises:
            ValueError: If none fits.
        """
        last = len(self.path) - 1
        limit = budget if isinstance(budget, int) else budget * (self.step(last).peak_bytes + off)
        if self.step(0).peak_bytes + off > limit:
            raise ValueError(_too_small(budget, limit, self.step(0), off))
        fits, too_large = 0, last + 1
        number = last  # which is looked at first: whatever fits then is dense
        while too_large - fits > 1:
            if self.step(number).peak_bytes + off <= limit:
                fits = number
            else:
                too_large = number
            number = (fits + too_large) // 2
        return self.allocation(fits, off)


def _too_small(budget: float, limit: float, least: StepMemory, off: int) -> str:
    at = least.peak_in()
    parts = {} if at is None else dict(sorted(least.parts(at).items(), key=lambda part: -part[1]))
    held = ", ".join(f"{name} {nbytes / _MIB:,.0f} MiB" for name, nbytes in parts.items() if nbytes >= _MIB)
    shown = f"{limit / _MIB:,.0f} MiB" + ("" if isinstance(budget, int) else f", {budget:.0%} of the dense peak")
    return (
        f"`memory_budget` ({shown}) is less than a step takes at the least, {(least.peak_bytes + off) / _MIB:,.0f} "
        f"MiB: {held}. HINT: raise it, or take a smaller batch; parameters, gradients and optimizer state are for "
        "sharding or for an optimizer with less state, logits for `functional.linear_cross_entropy`."
    )


def allocate(
    model: nn.Module,
    batch: Any,
    memory_budget: str | float,
    *,
    preset: PresetName = "max",
    rules: Rules | None = None,
    precision: str = "bf16-mixed",
    optimizer: MakeOptimizer | None = None,
    loss: Loss | None = None,
) -> Allocation:
    """Return how each block of a model is to be kept so that the peak of a training step fits into a budget.

    Nothing of the model changes, and no GPU is needed. For a ViT-B/16 it takes some 20 s on two CPU cores. Use it with
    ``convert(model, preset, rules={**own_rules, **allocation.rules})``; of a dense one, convert nothing.

    Args:
        model: The dense model.
        batch: What a step gets. Of its tensors shapes, strides and types count.
        memory_budget: A size, such as ``"20GiB"``, a number of bytes, or a fraction of the dense model's peak.
        preset: How blocks are kept that keep few bits.
        rules: Those of the user, which count before those of the allocation.
        precision: One of Lightning's names, such as ``"bf16-mixed"`` or ``"32-true"``.
        optimizer: Makes the optimizer of the trained parameters; by default fused AdamW.
        loss: Returns the loss, given a copy of the model and the batch (see ``analysis.estimate``).

    Returns:
        The fastest setting that fits and, of those that run no block again, the most exact one.

    Raises:
        TypeError: If an argument has the wrong type, or the model cannot be copied.
        ValueError: If an argument is out of range, the budget is less than any setting needs, or a module needs values
            that are not there.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
        >>> model = nn.Sequential(*layers, nn.Linear(256, 10))
        >>> batch = torch.empty(8192, 256), torch.empty(8192, dtype=torch.int64)
        >>> found = allocate(model, batch, "100MiB", precision="32-true")
        >>> found.is_dense, found.peak_bytes <= 100 * 2**20 < found.dense.peak_bytes
        (False, True)
    """
    budget = check_memory_budget(memory_budget)
    options = {"loss": loss, "precision": precision, "optimizer": optimizer}

    def simulated(config: Config | None) -> StepMemory:
        prepare = None if config is None else partial(prepared, config)
        return simulate(model, batch, prepare, **options)  # type: ignore[arg-type]

    return Allocator(check_model(model), simulated, preset, rules).fit(budget)


def prepared(config: Config, model: nn.Module) -> ConversionReport:
    """Convert a model that is simulated."""
    return convert_layers(model, config, new_owner("allocate()"))


def described(path: Sequence[Rules], number: int) -> str:
    """Return in words how blocks are kept in a setting of a path."""
    if number == len(path) - 1:
        return "all of it dense"
    kept = path[number]
    ways = {"again": 0, "balanced": 0, "dense": 0}
    for pattern, rule in kept.items():
        if pattern.endswith("*"):
            continue
        ways["again" if isinstance(rule, Recompute) else "dense" if rule is None else "balanced"] += 1
    blocks = sum(isinstance(rule, Recompute) for rule in path[0].values())
    names = {"again": "run again", "balanced": "in four bits", "dense": "dense"}
    found = [f"{count} {names[way]}" for way, count in ways.items() if count]
    left = blocks - sum(ways.values())
    return f"of {blocks} blocks " + ", ".join(found + ([f"{left} in few bits"] if left else []))
