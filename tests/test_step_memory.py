"""StepMemory: peaks, parts and what saving would change, against brute force over random steps."""

from __future__ import annotations

import random

import pytest

from lightning_actprune.footprint import MemoryReport
from lightning_actprune.pictures import series_picture, step_picture
from lightning_actprune.step_memory import PHASES, Holder, Holding, MemoryMoment, StepMemory


def random_step(seed: int, measured: bool) -> StepMemory:
    """A step of 30 moments with 20 storages, which may be freed late, never or before the next moment."""
    rng = random.Random(seed)
    holdings = []
    for _ in range(20):
        born = rng.randrange(30)
        freed = rng.choice([None, born, rng.randrange(born, 31)])
        names = [
            Holder(f"block.{rng.randrange(3)}", rng.choice(["gelu", "mul", None])) for _ in range(rng.choice([1, 2]))
        ]
        holdings.append(Holding(rng.randrange(1000), rng.random() < 0.3, born, freed, names))
    moments = []
    for i in range(30):
        peak = 40_000 + rng.randrange(5_000) if measured else None
        known = rng.randrange(100), rng.randrange(100)
        moments.append(MemoryMoment(PHASES[i // 12], f"m{i}", None, *known, peak, peak))
    return StepMemory(rng.randrange(100), rng.randrange(100), moments, holdings)


def kept(step: StepMemory, index: int, packed: bool | None = None) -> int:
    return sum(h.nbytes for h in step.holdings if h.kept_at(index) and packed in (None, h.packed))


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_against_brute_force(seed: int, measured: bool):
    step = random_step(seed, measured)
    indices = range(30)
    assert step.measured is measured
    assert step.activation_bytes == [kept(step, i) for i in indices]
    assert step.packed_bytes == [kept(step, i, packed=True) for i in indices]
    constant = step.parameter_bytes + step.batch_bytes
    counted = [constant + m.gradient_bytes + m.optimizer_bytes + kept(step, i) for i, m in enumerate(step.moments)]
    if measured:
        assert step.interval_bytes == [moment.peak_bytes for moment in step.moments]
    else:
        assert step.interval_bytes == counted
    assert step.peak_bytes == max(step.interval_bytes)
    for phase in PHASES:
        inside = [step.interval_bytes[i] for i in indices if step.moments[i].phase == phase]
        assert step.interval_bytes[step.peak_in(phase)] == max(inside)
        assert step.moments[step.peak_in(phase)].phase == phase
    for i in indices:
        assert sum(step.parts(i).values()) == step.interval_bytes[i]
        assert min(step.parts(i).values()) >= 0
        assert sum(group.nbytes for group in step.groups(i)) == step.activation_bytes[i]
        assert sum(group.count for group in step.groups(i)) == sum(h.kept_at(i) for h in step.holdings)
    stacked = [sum(column) for column in zip(*step.series(operators=1).values(), strict=True)]
    assert stacked == counted


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_peak_falls_as_activations_go_and_stops_at_what_is_not_theirs(seed: int, measured: bool):
    step = random_step(seed, measured)
    peaks = [step.peak_without(tenths / 10) for tenths in range(11)]
    assert peaks[0] == step.peak_bytes
    assert peaks == sorted(peaks, reverse=True)
    for i, left in enumerate(step.bytes_without(1.0)):
        least = min(kept(step, max(i - 1, 0)), kept(step, i)) if measured else kept(step, i)
        assert left == step.interval_bytes[i] - least
    nothing_kept = StepMemory(step.parameter_bytes, step.batch_bytes, step.moments)
    assert measured or peaks[-1] == nothing_kept.peak_bytes


def test_labels():
    holders = [Holder("a.0.b.12", "gelu"), Holder("a.1.b.3", "gelu"), Holder("layer1.x2", None), Holder("", "mul")]
    holders += [Holder("0", "exp")]
    assert [holder.label for holder in holders] == ["a.*.b.* (gelu)"] * 2 + ["layer1.x2", "(step) (mul)", "* (exp)"]
    holding = Holding(1, False, 0, None, holders)
    assert holding.label == "a.*.b.* (gelu) + layer1.x2 + (step) (mul) + 1 more"


def test_the_end_of_the_forward():
    def step(*phases: str) -> StepMemory:
        return StepMemory(0, 0, [MemoryMoment(phase, "", None, 0, 0) for phase in phases])

    assert step("forward", "forward", "backward", "forward", "backward").forward_end == 1
    assert step("forward", "forward").forward_end == 1
    assert step("forward", "backward", "optimizer").forward_end == 0


def test_an_empty_step():
    step = StepMemory(1, 2)
    assert (step.peak_bytes, step.peak_in(), step.peak_without(1.0), step.measured) == (0, None, 0, False)
    assert step.activation_bytes == []


@pytest.mark.parametrize("fraction", [-0.1, 50, "half"])
def test_fractions_are_checked(fraction):
    for without in (random_step(0, True).bytes_without, random_step(0, True).peak_without):
        with pytest.raises((ValueError, TypeError), match=r"`fraction` must be .*\[0, 1\].*HINT"):
            without(fraction)


def test_phases_are_checked():
    with pytest.raises(ValueError, match=r"`phase` must be 'forward', .* or None, got 'fwd'. HINT"):
        random_step(0, True).peak_in("fwd")


def test_a_report_with_a_step_is_plain_data():
    step = random_step(0, measured=True)
    data = MemoryReport(step=step).to_dict()["step"]
    assert data["moments"][3]["phase"] == "forward"
    assert len(data["holdings"]) == 20


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    steps = {"dense": random_step(0, True), "pruned": random_step(1, False)}
    figure = step_picture(steps)
    panels = figure.get_axes()
    assert [axes.get_title() for axes in panels] == ["dense", "pruned"]
    assert [len(axes.get_lines()) for axes in panels] == [1 + len(PHASES), len(PHASES)]  # the allocator's line
    path = tmp_path / "step.png"
    figure.savefig(path)
    assert path.stat().st_size > 1000
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    used = {name for step in steps.values() for name, line in step.series().items() if any(line)}
    assert shown == used | {"in use, at most"}


def test_a_picture_of_nothing():
    with pytest.raises(ValueError, match=r"nothing to show.* HINT"):
        series_picture({})
