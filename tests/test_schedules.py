from __future__ import annotations

import math
import pickle

import pytest

from lightning_actprune import schedules
from lightning_actprune.schedules import (
    ConstantSchedule,
    CosineSchedule,
    CubicSchedule,
    LinearSchedule,
    SparsitySchedule,
    StepSchedule,
)

POINTS = [i / 20 for i in range(21)]


@pytest.mark.parametrize("kind", [LinearSchedule, CubicSchedule, CosineSchedule])
@pytest.mark.parametrize(("start", "end"), [(0.2, 0.7), (0.8, 0.1)])
def test_ramp_begins_at_start_and_ends_at_end(kind: type[SparsitySchedule], start: float, end: float):
    schedule = kind(end=end, start=start, warmup=0.25, until=0.75)
    values = [schedule(p) for p in POINTS]
    assert all(v == start for v, p in zip(values, POINTS, strict=True) if p <= 0.25)
    assert all(v == pytest.approx(end) for v, p in zip(values, POINTS, strict=True) if p >= 0.75)
    assert values == sorted(values, reverse=start > end)


def test_formulas():
    start, end, begin, length = 0.1, 0.9, 0.2, 0.5
    options = {"start": start, "end": end, "warmup": begin, "until": begin + length}
    for p in (0.2, 0.3, 0.45, 0.6, 0.7):
        left = 1 - (p - begin) / length
        assert CubicSchedule(**options)(p) == pytest.approx(end + (start - end) * left**3)
        wave = math.cos(math.pi * (1 - left))
        assert CosineSchedule(**options)(p) == pytest.approx((start + end) / 2 + (start - end) / 2 * wave)
    # Exactly, so that layers are not set again and again.
    assert (CosineSchedule(**options)(0.0), CosineSchedule(**options)(1.0)) == (start, end)


def test_steps_jump_where_they_should_and_stay_in_between():
    schedule = StepSchedule([0.1, 0.7, 0.0, 0.5], [0.25, 0.5, 0.51])
    before, after = math.nextafter(0.5, 0), math.nextafter(0.5, 1)
    assert [schedule(p) for p in (0.0, 0.2499, 0.25, before, 0.5, after, 0.51, 1.0)] == [
        *(0.1, 0.1, 0.7, 0.7, 0.0, 0.0, 0.5, 0.5)
    ]
    assert StepSchedule([0.3], [])(1.0) == 0.3


def test_the_highest_sparsity_is_found_between_the_tenths_too():
    assert schedules.highest_sparsity(StepSchedule([0.0, 0.8, 0.2], [0.51, 0.55])) == 0.8
    assert schedules.highest_sparsity(LinearSchedule(end=0.1, start=0.7)) == 0.7
    assert schedules.highest_sparsity(0.4) == 0.4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ConstantSchedule(1.0), ValueError, r"`sparsity` must be in \[0, 1\), got 1.0. HINT"),
        (lambda: CubicSchedule(end="0.5"), TypeError, r"`end` must be a number in \[0, 1\), got '0.5'"),
        (lambda: CubicSchedule(end=0.5, warmup=100), ValueError, r"`warmup` must be in \[0, 1\], got 100. HINT"),
        (lambda: CubicSchedule(end=0.5, warmup=None), TypeError, r"`warmup` must be a number in \[0, 1\], got None"),
        (lambda: CubicSchedule(end=0.5, until=float("nan")), ValueError, r"`until` must be in \[0, 1\], got nan"),
        (lambda: LinearSchedule(end=0.5, warmup=0.5, until=0.5), ValueError, "`until` must be greater than `warmup`"),
        (lambda: StepSchedule([0, 60], [0.5]), ValueError, r"`sparsities\[1\]` must be in \[0, 1\), got 60. HINT"),
        (lambda: StepSchedule(0.5, [0.5]), TypeError, "`sparsities` must be a list of numbers, got 0.5. HINT"),
        (lambda: StepSchedule([0, 0.5], "0.5"), TypeError, "`at` must be a list of numbers, got '0.5'. HINT"),
        (lambda: StepSchedule([0, 0.5], [100]), ValueError, r"`at\[0\]` must be in \[0, 1\], got 100. HINT"),
        (lambda: StepSchedule([0, 0.5], [1.0]), ValueError, r"`at` must be numbers in \(0, 1\) that increase"),
        (lambda: StepSchedule([0, 0.1, 0.2], [0.5, 0.5]), ValueError, "that increase, got .0.5, 0.5.. HINT"),
        (lambda: StepSchedule([0, 0.5], []), ValueError, "one number more than `at`, got 2 and 0. HINT"),
    ],
)
def test_arguments_are_checked(make, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [(ConstantSchedule(0.3), 0.3), (CubicSchedule(0.5, warmup=0.1), 0.4143), (StepSchedule((0, 0.5), (0.5,)), 0.5)],
    ids=lambda value: type(value).__name__,
)
def test_repr_shows_all_arguments_and_pickle_keeps_them(schedule: SparsitySchedule, middle: float):
    assert schedule(0.5) == pytest.approx(middle, abs=1e-4)
    assert repr(eval(repr(schedule))) == repr(schedule)
    assert vars(pickle.loads(pickle.dumps(schedule))) == vars(schedule)
