"""Choose how to keep each block of a model so that a training step fits into a memory budget, fast and exact.

A block (``operators.recompute.find_blocks``) can keep what backward needs in four ways, from the fewest bytes to the
most. In brackets: what a ViT-B/16 keeps of its dense bytes if all blocks are kept so, and the square of the gradient's
relative error::

    recompute    run again in backward, from its input in eight bits         (3 %, 1e-5)
    max          in few bits, as preset "max"                                (22 %, .03)
    balanced     in four bits, as preset "balanced"                          (31 %, .005)
    dense        uncompressed                                                (100 %, 0)

A byte buys most in ``recompute -> max``: a second forward for a sixth of the block's bytes. Error comes after time. So
the settings of a model form one path. It starts with all blocks run again. One block after the other takes the next
way, the last block first, until all are kept in few bits; then the same for ``balanced``, and for ``dense``. The last
block comes first, since the peak of a step is where backward begins: a block that runs again there adds its activations
to what all others keep, while an earlier block runs again when later ones have released theirs. What belongs to no
block is kept like ``max`` while any block is, then like ``balanced``, and is dense at the end, together with what
attention saves.

A block runs again as a whole. The two other changes go layer by layer, in the same order: convolutions, linear layers,
activation functions, layer scales, affine layers, norms. That is by the squared error that each byte removes (table
``operators`` of ``benchmarks/results/steps.json``), and by time: a linear layer that does not pack saves it, while
activation functions and norms in few bits take no longer than dense ones. What operations of a block save besides its
layers, above all attention's inputs, is nearly exact anyway, and becomes dense with the last layer.

Along the path a step takes less time, and once no block runs again its gradient becomes more exact. Its peak grows,
with exceptions: if two layers share a tensor and one of them is dense, the other packs what is kept anyway. So
bisection finds the last setting whose peak fits, and each look is a simulated step (``analysis.simulate_step``): about
ten for the 279 settings of a ViT-B/16. The chosen setting has itself been simulated, so it fits even if peaks do not
always grow.

A simulation knows no fragmentation, no workspaces of convolutions and no buckets of a strategy. If a step of one
setting was measured on the device, all predictions are corrected by the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from glob import escape
from math import inf
from numbers import Integral, Real
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from lightning_actprune.analysis.simulate_step import Loss, MakeOptimizer, StepOptions, simulate
from lightning_actprune.analysis.step_memory import StepMemory
from lightning_actprune.config import SAVED, Config, Operator, PresetName, Recompute, Rule, check_model, matches
from lightning_actprune.convert import convert_and_check, convert_layers, new_owner
from lightning_actprune.operators.recompute import find_blocks
from lightning_actprune.operators.registry import ROOT, layers, operator_of, plain_name
from lightning_actprune.report import MIB, ConversionReport
from lightning_actprune.schedules import SparsitySchedule

Rules: TypeAlias = dict[str, Rule]
BITS = 8
"""Bits of the inputs of blocks that run again."""
WAYS = "run again", "in few bits", "in four bits", "dense"
"""How a block may be kept, from the fewest bytes to the most."""
AGAIN, FEW, BALANCED, DENSE = range(len(WAYS))
ORDER: tuple[Operator, ...] = "convolution", "linear", "activation", "scale", "affine", "norm"
"""The order in which the layers of a block change (see the module)."""
_AROUND = "type:value", "type:attention_out", "*"
"""Patterns of what belongs to no block; what attention saves is covered by type, in any block."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b\s*", re.IGNORECASE)
_EXAMPLE = 'HINT: a size such as "20GiB", a number of bytes, or a fraction of the dense peak such as 0.25.'
MARGIN = 0.005
"""Share of a budget to leave free, since the peaks of steps differ by some MiB."""


def check_memory_budget(value: Any) -> int | float:
    """Return ``value`` as a number of bytes, or as a fraction of the dense peak in (0, 1]."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(f"`memory_budget` must be a size, got {value!r}. {_EXAMPLE}")
        value = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`memory_budget` must be a size, got {value!r} of type {type(value).__name__}. {_EXAMPLE}")
    if isinstance(value, Integral) and value < MIB:
        raise ValueError(f"`memory_budget` must be at least 1 MiB, got {value!r} bytes. {_EXAMPLE}")
    size = float(value)
    if isinstance(value, Integral) or MIB <= size < inf:  # such as 20e9
        return int(size)
    if not 0.0 < size <= 1.0:
        raise ValueError(f"`memory_budget` must be in (0, 1] if it is a fraction, got {value!r}. {_EXAMPLE}")
    return size


# === The path of settings =============================================================================================
class Setting(NamedTuple):
    """A position on the path.

    Args:
        way: How blocks that have not changed yet are kept, as an index of ``WAYS``.
        changed: How many blocks, from the last one on, are kept in the next way.
        layers: How many layers of the block before these are kept in the next way.
    """

    way: int
    changed: int = 0
    layers: int = 0


class _Block(NamedTuple):
    """A block as patterns of rules.

    Args:
        name: Pattern of the block.
        layers: Patterns of its layers, in the order in which they change.
    """

    name: str
    layers: list[str]

    def make_rules(self, way: int, changed: int = 0) -> Rules:
        """Return the rules of a way, with the first ``changed`` layers in the next way."""
        inside = f"{self.name}.*"
        if way == AGAIN:
            return {self.name: Recompute(BITS), inside: None}
        if way == DENSE:
            return {self.name: None, inside: None}
        if way == FEW:
            return dict.fromkeys(self.layers[:changed], "balanced")
        remaining = self.layers[changed:]
        # Only patterns that match a layer: a rule without a match is an error.
        matches = {self.name: self.name in remaining, inside: any(name != self.name for name in remaining)}
        return dict.fromkeys(self.layers[:changed]) | {pattern: "balanced" for pattern in matches if matches[pattern]}


class Settings:
    """The path: first the setting with all blocks run again, last the dense model.

    Args:
        model: The dense model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.blocks = _find_blocks(model)
        self._path = list(self._order())

    def __len__(self) -> int:
        return len(self._path)

    def __getitem__(self, number: int) -> Setting:
        return self._path[number]

    def rules(self, number: int) -> Rules:
        """Return the rules of a setting, to use with the preset ``"max"`` or another one in its place."""
        way, changed, part = self[number]
        if way == DENSE:
            return {"*": None}
        rules, unchanged = Rules(), len(self.blocks) - changed
        for place, block in enumerate(self.blocks, 1):
            has_changed = place > unchanged
            rules |= block.make_rules(way + has_changed, part if place == unchanged else 0)
        return rules | dict.fromkeys(_AROUND, "balanced") if way == BALANCED else rules

    def describe(self, number: int) -> str:
        """Return in words how blocks are kept in a setting."""
        way, changed, part = self[number]
        if way == DENSE:
            return "all of it dense"
        if not self.blocks:
            return f"no blocks, all {WAYS[way]}"
        unchanged = len(self.blocks) - changed
        of = len(self.blocks[unchanged - 1].layers)
        between = f"1 with {part} of {of} layers {WAYS[way + 1]}" if part else ""
        whole = [(unchanged - bool(part), WAYS[way]), (changed, WAYS[way + 1])]
        first, last = (f"{count} {how}" if count else "" for count, how in whole)
        return f"of {len(self.blocks)} blocks " + ", ".join(filter(None, (first, between, last)))

    def _order(self) -> Iterator[Setting]:
        yield Setting(AGAIN if self.blocks else FEW)
        yield from (Setting(AGAIN, changed) for changed in range(1, len(self.blocks) + 1))
        yield from self._change_layers(FEW)
        yield Setting(BALANCED)  # around the blocks, too
        yield from self._change_layers(BALANCED)
        yield Setting(DENSE)

    def _change_layers(self, way: int) -> Iterator[Setting]:
        for changed, block in enumerate(reversed(self.blocks)):
            yield from (Setting(way, changed, part) for part in range(1, len(block.layers)))
            yield Setting(way, changed + 1)


def _find_blocks(model: nn.Module) -> list[_Block]:
    """Return the blocks of a model, each layer in the first block that contains it, whose rules come first."""
    members: dict[str, list[tuple[int, str]]] = {plain_name(name): [] for name in find_blocks(model)}
    for fqns, layer in layers(model):
        operator = operator_of(layer)
        within = [(name, fqn) for name in members for fqn in fqns if f"{fqn}.".startswith(f"{name}.")]
        if within and operator in ORDER:
            members[within[0][0]].append((ORDER.index(operator), escape(within[0][1])))
    return [_Block(escape(name), [fqn for _, fqn in sorted(own, key=itemgetter(0))]) for name, own in members.items()]


# === The search for a setting that fits ===============================================================================
@dataclass(frozen=True)
class Allocation:
    """A setting of the path.

    Args:
        number: Its number on the path (``Settings``); 0 runs all blocks again.
        rules: Its rules, to use with the preset and after the user's rules.
        step: The simulated step.
        dense: The simulated step of the dense model.
        config: Its configuration, with the preset and the user's rules; ``None`` for the dense model.
        off: Bytes by which a measured step exceeded the simulated one.
    """

    number: int
    rules: Rules = field(repr=False)
    step: StepMemory = field(repr=False)
    dense: StepMemory = field(repr=False)
    config: Config | None = field(default=None, repr=False)
    off: int = 0

    @property
    def is_dense(self) -> bool:
        """Whether the dense model fits."""
        return self.step is self.dense

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a step."""
        return self.step.peak_bytes + self.off

    def convert(self, model: nn.Module) -> ConversionReport:
        """Convert the model so, in place, as ``lightning_actprune.convert`` does; the report is empty if it is dense.

        Raises:
            ValueError: As ``convert``.
        """
        if self.config is None:
            return ConversionReport()
        return convert_and_check(check_model(model), self.config, new_owner("allocate()"))


class Allocator:
    """Finds the last setting of the path that fits.

    Args:
        model: The dense model.
        simulated: Returns the step of the model under a configuration; ``None`` is the dense model.
        preset: Preset of the path, usually ``"max"``.
        rules: The user's rules, which come before those of the path.
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
        self.path = Settings(model)
        self._layers = [(fqns, kind) for fqns, layer in layers(model) if (kind := operator_of(layer)) is not None]
        self._simulate, self._own = simulated, rules or {}
        self._config = partial(Config, preset, sparsity, block_size)
        self._steps: dict[int, StepMemory] = {}

    def config(self, number: int) -> Config | None:
        """Return the configuration of a setting, ``None`` for the dense model."""
        if number == len(self.path) - 1:
            return None
        return self._config({**self._own, **self._find_path_rules(number)})

    def step(self, number: int) -> StepMemory:
        """Return the simulated step of a setting."""
        if number not in self._steps:
            self._steps[number] = self._simulate(self.config(number))
        return self._steps[number]

    def has_simulated(self, number: int) -> bool:
        """Return True if the steps of a setting and of the dense model have been simulated."""
        return {number, len(self.path) - 1} <= self._steps.keys()

    def release(self, simulated: Callable[[Config | None], StepMemory]) -> None:
        """Replace the function that simulates steps; simulated steps stay."""
        self._simulate = simulated

    def allocation(self, number: int, off: int = 0) -> Allocation:
        """Return the setting of this number."""
        rules, last = self._filter_rules(self._find_path_rules(number)), len(self.path) - 1
        config = None if number == last else self._config({**self._own, **rules})
        return Allocation(number, rules, self.step(number), self.step(last), config, off)

    def fit(self, budget: float, off: int = 0, cap: float = inf) -> Allocation:
        """Return the last setting that fits, or that of the fewest bytes if it fits into the budget alone.

        Args:
            budget: Bytes, or a fraction of the peak of the dense model.
            off: Bytes by which a measured step exceeded the simulated one.
            cap: Bytes of the device, whatever the budget is.

        Raises:
            ValueError: If none fits into the budget.
        """
        limit = self.limit(budget, off)
        number = self.last_within(min(limit, cap) - off)
        if self.step(number).peak_bytes + off > limit:
            raise ValueError(_describe_too_small(budget, limit, self.step(number), off))
        return self.allocation(number, off)

    def limit(self, budget: float, off: int) -> float:
        """Return a budget in bytes."""
        return budget if isinstance(budget, int) else budget * (self.step(len(self.path) - 1).peak_bytes + off)

    def last_within(self, limit: float) -> int:
        """Return the last setting whose simulated peak is within ``limit``, or that of the fewest bytes if none is.

        A margin of the limit stays free, except for the dense model and the setting of the fewest bytes.
        """
        fits, last = self._find_least(limit), len(self.path) - 1
        if self.step(fits).peak_bytes > limit:
            return fits
        if self.step(last).peak_bytes <= limit:
            return last
        too_large, limit = last, (1 - MARGIN) * limit
        number = (fits + too_large) // 2
        while too_large - fits > 1:
            if self.step(number).peak_bytes <= limit:
                fits = number
            else:
                too_large = number
            number = (fits + too_large) // 2
        return fits

    def _find_least(self, limit: float) -> int:
        """Return a setting that fits, or the one that takes least.

        If a model has few blocks, or they keep much in few bits, running the last ones again takes more memory than
        that: then peaks first fall until these blocks no longer run again, and rise afterwards.
        """

        def peak(number: int) -> int:
            return self.step(number).peak_bytes

        first, last = 0, len(self.path.blocks)
        if peak(first) <= limit:
            return first
        while first < last:
            middle = (first + last) // 2
            if peak(middle) <= limit:
                return middle
            if peak(middle) <= peak(middle + 1):
                last = middle
            else:
                first = middle + 1
        return min((0, first, len(self.path.blocks)), key=peak)

    def _find_path_rules(self, number: int) -> Rules:
        """Return the rules of a setting whose patterns are not the user's."""
        return {name: rule for name, rule in self.path.rules(number).items() if name not in self._own}

    def _filter_rules(self, rules: Rules) -> Rules:
        """Return the ``rules`` that match something not matched by the user's rules; ``convert`` takes no others."""
        config = self._config({**self._own, **rules})
        counting = {config.rule_of(fqns, operator) for fqns, operator in self._layers}
        if config.keep_of([ROOT], "saved") is not None:
            counting |= {config.rule_of([ROOT], operator) for operator in SAVED}

        def counts(name: str, rule: Rule) -> bool:
            if name in counting or name == "*" or isinstance(rule, Recompute):
                return True
            return rule is None and not any(matches(fqns, name) for fqns, _ in self._layers)

        return {name: rule for name, rule in rules.items() if counts(name, rule)}


def _describe_too_small(budget: float, limit: float, least: StepMemory, off: int) -> str:
    at = least.peak_in()
    parts = {} if at is None else dict(sorted(least.parts(at).items(), key=lambda part: -part[1]))
    named = {("temporary tensors" if name == "other" else name): nbytes for name, nbytes in parts.items()}
    contents = ", ".join(f"{name} {nbytes / MIB:,.0f} MiB" for name, nbytes in named.items() if nbytes >= MIB / 2)
    size = f"{limit / MIB:,.0f} MiB" + ("" if isinstance(budget, int) else f", {budget:.0%} of the dense peak")
    return (
        f"`memory_budget` ({size}) is less than a step takes at the least, {(least.peak_bytes + off) / MIB:,.0f} "
        f"MiB: {contents}. HINT: raise it, or use a smaller batch; sharding or an optimizer with less state lowers "
        "parameters, gradients and optimizer state, a loss fused with the head lowers logits."
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
    """Choose how to keep each block of a model so that the peak of a training step fits into a budget.

    The model does not change, and no GPU is needed. A ViT-B/16 takes some 25 s on two CPU cores. The method ``convert``
    of the result converts it.

    Args:
        model: The dense model.
        batch: Batch of a step; only shapes, strides and types of its tensors matter.
        memory_budget: A size, such as ``"20GiB"``, a number of bytes, or a fraction of the dense model's peak.
        preset: Preset of blocks in few bits.
        rules: The user's rules, which come before those of the allocation.
        precision: One of Lightning's names, such as ``"bf16-mixed"`` or ``"32-true"``.
        optimizer: Creates the optimizer of the trained parameters; by default fused AdamW.
        loss: Returns the loss, given a copy of the model and the batch (see ``analysis.estimate``).

    Returns:
        The fastest setting that fits and, of those that run no block again, the most exact one.

    Raises:
        TypeError: If an argument has the wrong type, or the model cannot be copied.
        ValueError: If an argument is out of range, the budget is too small for every setting, or a module reads values
            that do not exist.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
        >>> model = nn.Sequential(*layers, nn.Linear(256, 10))
        >>> batch = torch.empty(8192, 256), torch.empty(8192, dtype=torch.int64)
        >>> allocation = allocate(model, batch, "120MiB", precision="32-true")
        >>> allocation.is_dense, allocation.peak_bytes <= 120 * 2**20 < allocation.dense.peak_bytes
        (False, True)
    """
    budget = check_memory_budget(memory_budget)
    if preset == "recompute":
        raise ValueError(
            "`preset` must be one that keeps few bits, got 'recompute'. HINT: use 'max'; blocks run again where "
            "nothing else fits."
        )
    options: StepOptions = {"loss": loss, "precision": precision, "optimizer": optimizer}

    def simulated(config: Config | None) -> StepMemory:
        prepare = None if config is None else partial(convert_copy, config)
        return simulate(model, batch, prepare, **options)

    return Allocator(check_model(model), simulated, preset, rules).fit(budget)


def convert_copy(config: Config, model: nn.Module) -> ConversionReport:
    """Convert the copy of a model that is simulated."""
    return convert_layers(model, config, new_owner("allocate()"))
