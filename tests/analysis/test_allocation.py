"""Which setting of the path fits: with made-up steps, with simulated ones, and what ``convert`` makes of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, Recompute, convert, revert
from lightning_actprune.analysis import caching_allocator
from lightning_actprune.analysis.allocation import (
    BALANCED,
    DENSE,
    FEW,
    MARGIN,
    Allocator,
    Settings,
    allocate,
    check_memory_budget,
    prepared,
)
from lightning_actprune.analysis.simulated import simulate
from lightning_actprune.analysis.step_memory import MemoryMoment, StepMemory
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, new_owner
from lightning_actprune.report import ConversionReport
from tests.support.helpers import assert_plain
from tests.support.stack import DEPTH, WIDTH, layers

MIB = 2**20
PARTS = 4
"""Layers of a block."""
FOUR = DEPTH + DEPTH * PARTS + 1
"""Number of the setting with all in four bits: one for each block, for each layer, and for what is around them."""
LAST = FOUR + DEPTH * PARTS + 1
"""Number of the dense setting."""


# Sizes.


def test_sizes():
    sizes = {
        "20GiB": 20 * 2**30,
        "20 GB": 20 * 10**9,
        " 1.5 gib ": 3 * 2**29,
        "512MiB": 512 * MIB,
        "2000000B": 2_000_000,
    }
    sizes |= {"4000kB": 4_000_000, "2048KiB": 2 * MIB, "1TB": 10**12, MIB: MIB, 20e9: 20 * 10**9, 0.25: 0.25, 1.0: 1.0}
    for given, expected in sizes.items():
        found = check_memory_budget(given)
        assert (found, type(found)) == (expected, type(expected))


NO_SIZES = "lots", "20", "-5GiB", "1e3MB", "20GiBs", "0GiB", "1kB", 0, 20, -MIB, 0.0, -0.5, 1.5, math.inf, math.nan
NO_SIZES += True, None, [1]


@pytest.mark.parametrize("given", NO_SIZES, ids=str)
def test_what_is_no_size(given: Any):
    error = ValueError if isinstance(given, str | int | float) and given is not True else TypeError
    with pytest.raises(error, match=r"`memory_budget` must be .*got.*HINT"):
        check_memory_budget(given)


# The path.


def converted(model: nn.Module, path: Settings, number: int) -> ConversionReport:
    return convert_layers(model, Config("max", rules=path.rules(number)), "test")


def test_the_path_begins_with_all_blocks_run_again_and_ends_dense():
    model = layers()
    path = Settings(model)
    assert len(path) == LAST + 1
    names = [f"{number}" for number in range(1, DEPTH + 1)]
    first = converted(model, path, 0)
    assert [block.fqn for block in first.recomputed] == names
    assert all(block.recompute == Recompute(8) for block in first.recomputed)
    assert [layer.fqn for layer in first.converted] == ["0", str(DEPTH + 1)]  # nothing that is in them
    last = converted(model, path, LAST)
    assert last.converted == last.recomputed == []
    assert path.rules(LAST) == {"*": None}
    revert(model)
    assert_plain(model)


def test_along_the_path_one_block_after_the_other_changes_from_the_last_one_on():
    model = layers()
    path = Settings(model)
    assert list(path)[: DEPTH + 1] == [(0, done, 0) for done in range(DEPTH + 1)]
    whole = [(setting.way, setting.changed) for setting in list(path)[DEPTH + 1 :] if not setting.layers]
    again = [len(converted(model, path, number).recomputed) for number in range(len(path))]
    assert again == [DEPTH - done for done in range(DEPTH)] + [0] * (LAST + 1 - DEPTH)
    assert whole == [
        *[(FEW, done) for done in range(1, DEPTH + 1)], *[(BALANCED, done) for done in range(DEPTH + 1)], (DENSE, 0)
    ]  # fmt: skip
    half = converted(model, path, 2)
    assert [block.fqn for block in half.recomputed] == ["1", "2"]
    bits = {layer.fqn: layer.keep.bits for layer in half.converted if layer.operator == "linear"}
    assert bits == dict.fromkeys(["0", "3.first", "3.second", "4.first", "4.second", "5"], 2)
    assert {layer.keep.bits for layer in converted(model, path, FOUR).converted} == {4}
    mixed = converted(model, path, FOUR + 2 * PARTS)
    assert {layer.fqn.split(".")[0] for layer in mixed.converted} == {"0", "1", "2", "5"}


def test_in_a_block_one_layer_after_the_other_changes():
    model = layers()
    path = Settings(model)
    order = [f"{DEPTH}.{name}" for name in ("first", "second", "act", "norm")]
    assert path.rules(FOUR + 2) == {
        **{f"{number}.*": "balanced" for number in range(1, DEPTH)},
        **dict.fromkeys(order[:2]),
        **dict.fromkeys([f"{DEPTH}.*", "type:value", "type:attended", "*"], "balanced"),
    }  # fmt: skip
    for done in range(1, PARTS + 1):
        kept = {layer.fqn: layer.keep for layer in converted(model, path, DEPTH + done).converted}
        four = {name for name in kept if name != "0" and kept[name] in Config("balanced").keeps}
        assert four == {*order[:done], *(f"{number}.norm" for number in range(1, DEPTH + 1))}  # have four in both
        dense = {layer.fqn for layer in converted(model, path, FOUR + done).layers if layer.keep is None}
        assert dense == set(order[:done])


def conv_net() -> nn.Sequential:
    """Return a net of three blocks that share their norm."""
    norm, of = nn.BatchNorm2d(64), partial(nn.Conv2d, 64, 64)
    blocks = (nn.Sequential(of(3), norm, nn.ReLU(), of(1), nn.Dropout(0.1)) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 64, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.mark.parametrize("make", [layers, transformer, conv_net, lambda: torch.compile(layers(), backend="eager")])
def test_convert_takes_the_rules_of_every_setting(make: Callable[[], nn.Module]):
    model = make()
    made = Allocator(model, lambda config: step(1))
    blocks = len(made.path.blocks)
    dense = []
    for number in range(len(made.path) - 1):
        report = convert(model, "max", rules=made.allocation(number).rules)
        revert(model)
        expected = convert_layers(model, made.config(number), new_owner("test"))
        revert(model)
        assert [(layer.fqn, layer.keep) for layer in report.layers] == [(own.fqn, own.keep) for own in expected.layers]
        assert len(report.recomputed) == len(expected.recomputed) == max(0, blocks - number)
        dense.append(sum(layer.keep is None for layer in expected.layers))
    assert blocks >= 3
    assert {after - before for before, after in pairwise(dense[blocks:])} == {0, 1}
    inside = sum(len(block.layers) for block in made.path.blocks)
    assert dense[-1] == inside
    assert len(dense) == blocks + 2 * inside + 2


class Named(nn.Module):
    """Has its blocks under names that are patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential()
        for name in ("a[1]", "a1", "*", "?"):
            self.parts.add_module(name, layers()[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def test_names_may_have_the_characters_of_patterns():
    model = Named()
    path = Settings(model)
    assert len(path) == LAST + 1
    report = converted(model, path, 2)
    assert [block.fqn for block in report.recomputed] == ["parts.a[1]", "parts.a1"]
    assert {layer.fqn.rsplit(".", 1)[0] for layer in report.converted} == {"parts.*", "parts.?"}
    dense = {layer.fqn for layer in converted(model, path, FOUR + PARTS + 2).layers if layer.keep is None}
    assert dense == {
        "parts.*.first",
        "parts.*.second",
        *(f"parts.?.{name}" for name in ("norm", "first", "act", "second")),
    }


def test_a_model_without_blocks_has_three_settings():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
    path = Settings(model)
    assert [path.described(number) for number in range(len(path))] == [
        "no blocks, all in few bits", "no blocks, all in four bits", "all of it dense"
    ]  # fmt: skip
    assert [{layer.keep.bits for layer in converted(model, path, n).converted} for n in range(3)] == [
        {2, 3},
        {4},
        set(),
    ]


def test_settings_in_words():
    path = Settings(layers())
    described = [path.described(number) for number in range(len(path))]
    assert len(set(described)) >= len(path) - 1  # of few bits for all there may be two
    numbers = [[int(word.rstrip(",")) for word in text.split() if word.rstrip(",").isdigit()] for text in described]
    assert numbers[:2] == [[DEPTH, DEPTH], [DEPTH, DEPTH - 1, 1]]
    assert numbers[DEPTH + 3] == [DEPTH, DEPTH - 1, 1, 3, PARTS]
    assert numbers[FOUR + 2 * PARTS + 1] == [DEPTH, 1, 1, 1, PARTS, 2]
    assert numbers[LAST - 1 :] == [[DEPTH, DEPTH], []]


# The search, with steps that are made up.


def step(mib: float) -> StepMemory:
    peak = int(mib * MIB)
    moments = [MemoryMoment("backward", "", None, 3 * MIB, 2 * MIB, peak, peak) for _ in range(2)]
    return StepMemory(5 * MIB, MIB, moments)


def allocator(peaks: list[float], looked_at: list[int] | None = None) -> Allocator:
    """Return an allocator whose settings have these peaks in MiB."""
    made: Allocator

    def simulated(config: Config | None) -> StepMemory:
        number = LAST if config is None else configs.index(config.described())
        if looked_at is not None:
            looked_at.append(number)
        return step(peaks[number])

    made = Allocator(layers(), simulated)
    configs = [made.config(number).described() for number in range(LAST)]
    return made


RISING = [20.0 + 2 * number for number in range(LAST + 1)]


@pytest.mark.parametrize("budget", [20, 22, 46.5, 72, 95, 96, 100])
def test_the_last_setting_that_fits_is_found(budget: float):
    looked_at: list[int] = []
    found = allocator(RISING, looked_at).fit(int(budget * MIB))
    within = [number for number, peak in enumerate(RISING) if peak <= (1 - MARGIN) * budget]
    assert found.number == (LAST if found.is_dense else max(within, default=0))
    assert found.peak_bytes == RISING[found.number] * MIB
    assert found.is_dense == (budget >= RISING[-1])
    assert found.dense.peak_bytes == RISING[-1] * MIB
    assert len(looked_at) == len(set(looked_at)) <= 2 + math.ceil(math.log2(LAST + 1))


def test_fractions_are_of_the_dense_peak():
    assert allocator(RISING).fit(1.0).is_dense
    assert allocator(RISING).fit(0.75).number == 25  # 72 of 96, less a margin


def test_what_was_measured_corrects_all_predictions():
    found = allocator(RISING).fit(31 * MIB, off=4 * MIB)
    assert (found.number, found.peak_bytes) == (3, 30 * MIB)
    assert allocator(RISING).fit(31 * MIB, off=-4 * MIB).number == 7
    assert allocator(RISING).fit(0.6, off=12 * MIB).number == 16  # 64.8 of 108


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_fits_also_where_peaks_do_not_rise(seed: int):
    rng = random.Random(seed)
    peaks = [rng.uniform(20, 60) for _ in range(LAST + 1)]
    for budget in (22, 30, 40, 50, 61):
        made = allocator(peaks)
        least = made.last_within(0)
        assert peaks[least] <= min(peaks[0], peaks[DEPTH])
        if peaks[least] > budget:
            with pytest.raises(ValueError, match="`memory_budget`"):
                made.fit(budget * MIB)
        else:
            assert made.fit(budget * MIB).peak_bytes <= budget * MIB
            assert allocator(peaks).fit(budget * MIB) == allocator(peaks).fit(budget * MIB)


@pytest.mark.parametrize("least", [0, 2, DEPTH])
def test_peaks_may_fall_at_first_where_fewer_blocks_run_again(least: int):
    """What runs again there adds its own activations to what all others keep."""
    peaks = [40.0 + abs(number - least) for number in range(DEPTH + 1)] + [60.0] * (LAST - DEPTH)
    assert allocator(peaks).fit(int(40.5 * MIB)).number == least
    assert allocator(peaks).last_within(39 * MIB) == least
    with pytest.raises(ValueError, match="at the least, 40 MiB"):
        allocator(peaks).fit(39 * MIB)


def test_few_bits_are_looked_at_before_an_error_since_they_may_take_less_than_running_again():
    peaks = [50.0] * DEPTH + [30.0] + RISING[DEPTH + 1 :]
    assert allocator(peaks).fit(31 * MIB).number == DEPTH + 1  # 30 MiB, too
    with pytest.raises(ValueError, match=r"at the least, 30 MiB"):
        allocator(peaks).fit(29 * MIB)


def test_what_cannot_be_met_is_an_error_that_says_what_is_there():
    match = (
        r"`memory_budget` \(19 MiB\) is less than a step takes at the least, 20 MiB: other 9 MiB, parameters 5 MiB, "
        r"gradients 3 MiB, optimizer state 2 MiB, batch 1 MiB\. HINT: raise it"
    )
    with pytest.raises(ValueError, match=match):
        allocator(RISING).fit(19 * MIB)
    with pytest.raises(ValueError, match=r"\(12 MiB, 12% of the dense peak\) is less than.*HINT"):
        allocator(RISING).fit(0.125)


# The search, with simulated steps.


@pytest.fixture
def _small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS take next to nothing beside these small models."""
    monkeypatch.setattr(caching_allocator, "WORKSPACE", 512)


def batch(rows: int = 4096) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, WIDTH), torch.empty(rows, dtype=torch.int64)


def prepared_by(config: Config | None) -> Callable[[nn.Module], ConversionReport] | None:
    return None if config is None else partial(prepared, config)


@pytest.mark.integration
@pytest.mark.usefixtures("_small_workspaces")
def test_what_is_allocated_fits_and_grows_with_the_budget():
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = Allocator(model, lambda config: simulate(model, batch(), prepared_by(config), precision="32-true"))
    dense = made.step(LAST).peak_bytes
    shares = 0.35, 0.4, 0.5, 0.65, 0.8, 0.95, 1.0
    found = [made.fit(int(share * dense)) for share in shares]
    assert all(own.peak_bytes <= share * dense for own, share in zip(found, shares, strict=True))
    numbers = [own.number for own in found]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 4
    assert numbers[-1] == LAST
    for _ in range(2):  # and is the same each time
        again = allocate(model, batch(), 0.65, precision="32-true")
        assert (again.number, again.peak_bytes) == (numbers[3], found[3].peak_bytes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_plain(model)
    with pytest.raises(ValueError, match=r"`memory_budget` \(\d+ MiB, 10% of the dense peak\) is less than.*HINT"):
        made.fit(0.1)


OWN = [
    {},
    {"2.*": None},
    {"*.first": Keep(bits=8), "type:norm": None},
    {"type:saved": None},
    {"type:saved": Keep(bits=8)},
    {"1": Recompute(4)},
    {"0": None, "4.act": "balanced", "4": None},
]
NUMBERS = [0, 2, DEPTH, DEPTH + 2, DEPTH + 2 * PARTS, FOUR, FOUR + 1, FOUR + 2 * PARTS + 3]


@pytest.mark.parametrize(
    ("own", "number"), [*zip(OWN, NUMBERS, strict=False), *zip(OWN, NUMBERS[3:], strict=False)], ids=str
)
def test_convert_takes_the_rules_behind_those_of_the_user(own: dict[str, Any], number: int):
    model = layers()
    made = Allocator(model, lambda config: step(1), rules=own)
    rules = {**own, **made.allocation(number).rules}
    report = convert(model, "max", rules=rules)
    kept = [(layer.fqn, layer.keep) for layer in report.layers]
    again = [(block.fqn, block.recompute) for block in report.recomputed]
    revert(model)
    expected = convert_layers(model, made.config(number), new_owner("test"))
    assert kept == [(layer.fqn, layer.keep) for layer in expected.layers]
    assert again == [(block.fqn, block.recompute) for block in expected.recomputed]
    for layer in expected.layers:
        if layer.fqn.endswith(".first") and "*.first" in own:
            assert layer.keep == Keep(bits=8)


@pytest.mark.usefixtures("_small_workspaces")
def test_a_loss_and_an_optimizer_of_the_user_count():
    model, made = layers(), []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, 0.1))
        return made[-1]

    options = {"loss": lambda model, batch: model(batch[0]).square().mean(), "precision": "32-true"}
    plain = allocate(model, batch(), 1.0, optimizer=optimizer, **options)
    adam = allocate(model, batch(), 1.0, **options)
    assert made
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert adam.dense.moments[0].optimizer_bytes - plain.dense.moments[0].optimizer_bytes >= state


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model": "vit"}, TypeError, "`model` must be a torch.nn.Module"),
        ({"memory_budget": "much"}, ValueError, "`memory_budget` must be a size"),
        ({"precision": "bf16"}, ValueError, "`precision` must be one of '32-true'"),
        ({"preset": "recompute"}, ValueError, "`preset` must be one that keeps few bits, got 'recompute'. HINT"),
        ({"preset": "min"}, ValueError, "`preset` must be one of"),
        ({"rules": {"type:lines": None}}, ValueError, "names no operator"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        allocate(**({"model": layers(), "batch": batch(8), "memory_budget": 1.0} | change))
