"""Which setting of the path fits: with made-up steps, with simulated ones, and what ``convert`` makes of it."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
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
    Allocator,
    Settings,
    allocate,
    check_memory_budget,
    convert_copy,
)
from lightning_actprune.analysis.simulate_step import simulate
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


SIZES = {"20GiB": 20 * 2**30, "20 GB": 20 * 10**9, " 1.5 gib ": 3 * 2**29, "512MiB": 512 * MIB, "2000000B": 2_000_000}
SIZES |= {"4000kB": 4_000_000, "2048KiB": 2 * MIB, "1TB": 10**12, MIB: MIB, 20e9: 20 * 10**9, 0.25: 0.25, 1.0: 1.0}


def test_sizes():
    for given, expected in SIZES.items():
        result = check_memory_budget(given)
        assert (result, type(result)) == (expected, type(expected))


NO_SIZES = "lots", "20", "-5GiB", "1e3MB", "20GiBs", "0GiB", "1kB", 0, 20, -MIB, 0.0, -0.5, 1.5, math.inf, math.nan
NO_SIZES += True, None, [1]


@pytest.mark.parametrize("given", NO_SIZES, ids=str)
def test_what_is_no_size(given: Any):
    with pytest.raises((ValueError, TypeError), match=r"`memory_budget` must be .*got.*HINT"):
        check_memory_budget(given)


# The path.


BATCH = torch.empty(4096, WIDTH), torch.empty(4096, dtype=torch.int64)


def converted(model: nn.Module, path: Settings, number: int) -> ConversionReport:
    return convert_layers(model, Config("max", rules=path.rules(number)), "test")


def test_along_the_path_one_block_after_the_other_changes_from_the_last_one_on():
    model = layers()
    path = Settings(model)
    assert len(path) == LAST + 1
    assert list(path)[: DEPTH + 1] == [(0, done, 0) for done in range(DEPTH + 1)]
    whole = [(setting.way, setting.changed) for setting in list(path)[DEPTH + 1 :] if not setting.layers]
    reports = [converted(model, path, number) for number in range(len(path))]
    again = [[block.fqn for block in report.recomputed] for report in reports]
    assert again == [[str(n) for n in range(1, DEPTH + 1 - done)] for done in range(DEPTH)] + [[]] * (LAST + 1 - DEPTH)
    assert all(block.recompute == Recompute(8) for report in reports for block in report.recomputed)
    assert whole == [
        *[(FEW, done) for done in range(1, DEPTH + 1)], *[(BALANCED, done) for done in range(DEPTH + 1)], (DENSE, 0)
    ]  # fmt: skip
    assert [layer.fqn for layer in reports[0].converted] == ["0", str(DEPTH + 1)]  # nothing that is in blocks
    bits = {layer.fqn: layer.keep.bits for layer in reports[2].converted if layer.operator == "linear"}
    assert bits == dict.fromkeys(["0", "3.first", "3.second", "4.first", "4.second", "5"], 2)
    assert {layer.keep.bits for layer in reports[FOUR].converted} == {4}
    mixed = reports[FOUR + 2 * PARTS]
    assert {layer.fqn.split(".")[0] for layer in mixed.converted} == {"0", "1", "2", "5"}
    assert reports[LAST].converted == []
    assert path.rules(LAST) == {"*": None}
    assert len({path.describe(number) for number in range(len(path))}) >= LAST  # few bits for all there may be twice
    revert(model)
    assert_plain(model)


def test_in_a_block_one_layer_after_the_other_changes():
    model = layers()
    path = Settings(model)
    order = [f"{DEPTH}.{name}" for name in ("first", "second", "act", "norm")]
    for done in range(1, PARTS + 1):
        keeps = {layer.fqn: layer.keep for layer in converted(model, path, DEPTH + done).converted}
        four = {name for name in keeps if name != "0" and keeps[name] in Config("balanced").keeps}
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


def assert_convert_takes(model: nn.Module, made: Allocator, number: int, own: dict[str, Any]) -> ConversionReport:
    allocation = made.allocation(number)
    report = convert(model, "max", rules={**own, **allocation.rules})
    revert(model)
    assert allocation.convert(model) == report
    layer_keeps = [(layer.fqn, layer.keep) for layer in report.layers]
    revert(model)
    expected = convert_layers(model, made.config(number), new_owner("test"))
    revert(model)
    assert layer_keeps == [(layer.fqn, layer.keep) for layer in expected.layers]
    blocks = [(block.fqn, block.recompute) for block in report.recomputed]
    assert blocks == [(block.fqn, block.recompute) for block in expected.recomputed]
    return expected


@pytest.mark.parametrize("make", [layers, transformer, conv_net, lambda: torch.compile(layers(), backend="eager")])
def test_convert_takes_the_rules_of_every_setting(make: Callable[[], nn.Module]):
    model = make()
    search = Allocator(model, lambda config: step(1))
    blocks = len(search.path.blocks)
    reports = [assert_convert_takes(model, search, number, {}) for number in range(len(search.path) - 1)]
    assert [len(report.recomputed) for report in reports] == [max(0, blocks - n) for n in range(len(reports))]
    dense = [sum(layer.keep is None for layer in report.layers) for report in reports]
    assert blocks >= 3
    assert {after - before for before, after in pairwise(dense[blocks:])} == {0, 1}
    inside = sum(len(block.layers) for block in search.path.blocks)
    assert dense[-1] == inside
    assert len(dense) == blocks + 2 * inside + 2


@pytest.mark.parametrize(
    ("own", "numbers"),
    [
        ({"2.*": None}, (2, DEPTH + 2)),
        ({"*.first": Keep(bits=8), "type:norm": None}, (DEPTH, DEPTH + 2 * PARTS)),
        ({"type:saved": None}, (DEPTH + 2, FOUR)),
        ({"type:saved": Keep(bits=8)}, (DEPTH + 2 * PARTS, FOUR + 1)),
        ({"1": Recompute(4)}, (FOUR, FOUR + 2 * PARTS + 3)),
        ({"0": None, "4.act": "balanced", "4": None}, (FOUR + 1,)),
    ],
    ids=str,
)
def test_convert_takes_the_rules_behind_those_of_the_user(own: dict[str, Any], numbers: tuple[int, ...]):
    model = layers()
    search = Allocator(model, lambda config: step(1), rules=own)
    for number in numbers:
        report = assert_convert_takes(model, search, number, own)
        first = {layer.keep for layer in report.layers if layer.fqn.endswith(".first")}
        assert "*.first" not in own or first == {Keep(bits=8, max_dropped_energy=0.2, min_rows_for_low_bits=1024)}


def test_names_may_have_the_characters_of_patterns():
    model = nn.Sequential(OrderedDict({name: layers()[1] for name in ("a[1]", "a1", "*", "?")}))
    path = Settings(model)
    assert len(path) == LAST + 1
    report = converted(model, path, 2)
    assert [block.fqn for block in report.recomputed] == ["a[1]", "a1"]
    assert {layer.fqn.rsplit(".", 1)[0] for layer in report.converted} == {"*", "?"}
    dense = {layer.fqn for layer in converted(model, path, FOUR + PARTS + 2).layers if layer.keep is None}
    assert dense == {"*.first", "*.second", *(f"?.{name}" for name in ("norm", "first", "act", "second"))}


def test_a_model_without_blocks_has_three_settings():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))
    path = Settings(model)
    bits = [{layer.keep.bits for layer in converted(model, path, number).converted} for number in range(len(path))]
    assert bits == [{2, 3}, {4}, set()]


# The search, with steps that are made up.


def step(mib: float) -> StepMemory:
    peak = int(mib * MIB)
    moments = [MemoryMoment("backward", "", None, 3 * MIB, 2 * MIB, peak, peak) for _ in range(2)]
    return StepMemory(5 * MIB, MIB, moments)


def allocator(peaks: list[float], looked_at: list[int] | None = None) -> Allocator:
    """Return an allocator whose settings have these peaks in MiB."""
    search: Allocator

    def simulated(config: Config | None) -> StepMemory:
        number = LAST if config is None else configs.index(config.described())
        if looked_at is not None:
            looked_at.append(number)
        return step(peaks[number])

    search = Allocator(layers(), simulated)
    configs = [search.config(number).described() for number in range(LAST)]
    return search


RISING = [20.0 + 2 * number for number in range(LAST + 1)]
FITS = (20, 0), (22, 0), (46.5, 13), (72, 25), (95, 37), (96, LAST), (100, LAST)
"""Budgets in MiB, and the last setting whose peak is below each by a margin."""


@pytest.mark.parametrize(
    ("budget", "off", "number"),
    [
        *((int(budget * MIB), 0, number) for budget, number in FITS),
        (1.0, 0, LAST),
        (0.75, 0, 25),  # 72 of 96
        (31 * MIB, 4 * MIB, 3),
        (31 * MIB, -4 * MIB, 7),
        (0.6, 12 * MIB, 16),  # 64.8 of 108
    ],
)
def test_the_last_setting_that_fits_is_found(budget: float, off: int, number: int):
    """Fractions are of the dense peak, and by what a measured step is off all predictions are corrected."""
    looked_at: list[int] = []
    result = allocator(RISING, looked_at).fit(budget, off=off)
    assert (result.number, result.peak_bytes) == (number, RISING[number] * MIB + off)
    assert result.is_dense == (number == LAST)
    assert result.dense.peak_bytes == RISING[-1] * MIB
    assert len(looked_at) == len(set(looked_at)) <= 2 + math.ceil(math.log2(LAST + 1))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_fits_also_where_peaks_do_not_rise(seed: int):
    rng = random.Random(seed)
    peaks = [rng.uniform(20, 60) for _ in range(LAST + 1)]
    for budget in (22, 30, 40, 50, 61):
        search = allocator(peaks)
        least = search.last_within(0)
        assert peaks[least] <= min(peaks[0], peaks[DEPTH])
        if peaks[least] > budget:
            with pytest.raises(ValueError, match="`memory_budget`"):
                search.fit(budget * MIB)
        else:
            assert search.fit(budget * MIB).peak_bytes <= budget * MIB
            assert allocator(peaks).fit(budget * MIB) == allocator(peaks).fit(budget * MIB)


def falls(least: int) -> list[float]:
    return [40.0 + abs(number - least) for number in range(DEPTH + 1)] + [60.0] * (LAST - DEPTH)


@pytest.mark.parametrize(
    ("peaks", "number", "least"),
    [
        *[(falls(least), least, 40) for least in (0, 2, DEPTH)],  # blocks that run again add their own activations
        ([50.0] * DEPTH + [30.0] + RISING[DEPTH + 1 :], DEPTH + 1, 30),  # few bits take less; the next 30 MiB, too
    ],
)
def test_peaks_may_fall_at_first(peaks: list[float], number: int, least: int):
    assert allocator(peaks).fit((least + 1) * MIB).number == number
    with pytest.raises(ValueError, match=f"`memory_budget`.* {least} MiB"):
        allocator(peaks).fit((least - 1) * MIB)


def test_what_cannot_be_met_is_an_error_that_says_what_is_there():
    parts = "20 MiB.* 9 MiB.* 5 MiB.* 3 MiB.* 2 MiB.* 1 MiB.*HINT"
    with pytest.raises(ValueError, match=rf"`memory_budget` \(19 MiB\).*{parts}"):
        allocator(RISING).fit(19 * MIB)
    with pytest.raises(ValueError, match=r"\(12 MiB, 12%.*HINT"):
        allocator(RISING).fit(0.125)


# The search, with simulated steps.


@pytest.fixture
def _small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS take next to nothing beside these small models."""
    monkeypatch.setattr(caching_allocator, "WORKSPACE", 512)


@pytest.mark.integration
@pytest.mark.usefixtures("_small_workspaces")
def test_what_is_allocated_fits_and_grows_with_the_budget():
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def simulated(config: Config | None) -> StepMemory:
        return simulate(model, BATCH, None if config is None else partial(convert_copy, config), precision="32-true")

    search = Allocator(model, simulated)
    dense = search.step(LAST).peak_bytes
    shares = 0.35, 0.4, 0.5, 0.65, 0.8, 0.95, 1.0
    result = [search.fit(int(share * dense)) for share in shares]
    assert all(own.peak_bytes <= share * dense for own, share in zip(result, shares, strict=True))
    numbers = [own.number for own in result]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 4
    assert numbers[-1] == LAST
    assert result[-1].convert(model) == ConversionReport()
    for _ in range(2):  # and is the same each time
        again = allocate(model, BATCH, 0.65, precision="32-true")
        assert (again.number, again.peak_bytes) == (numbers[3], result[3].peak_bytes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert_plain(model)
    with pytest.raises(ValueError, match=r"`memory_budget` \(\d+ MiB, 10%.*HINT"):
        search.fit(0.1)


@pytest.mark.usefixtures("_small_workspaces")
def test_a_loss_and_an_optimizer_of_the_user_count():
    model, losses = layers(), []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses.append(model(batch[0]).square().mean())
        return losses[-1]

    sgd = partial(torch.optim.SGD, lr=0.1)
    plain, adam = (
        allocate(model, BATCH, 1.0, loss=loss, precision="32-true", **options) for options in ({"optimizer": sgd}, {})
    )
    assert losses
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert adam.dense.moments[0].optimizer_bytes - plain.dense.moments[0].optimizer_bytes >= state


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model": "vit"}, TypeError, "`model`"),
        ({"memory_budget": "much"}, ValueError, "`memory_budget`"),
        ({"precision": "bf16"}, ValueError, "`precision`"),
        ({"preset": "recompute"}, ValueError, "`preset` .*'recompute'. HINT"),
        ({"preset": "min"}, ValueError, "`preset` must be one of"),
        ({"rules": {"type:lines": None}}, ValueError, "type:lines"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        allocate(**({"model": layers(), "batch": BATCH, "memory_budget": 1.0} | change))
