from __future__ import annotations

import pickle

import pytest

from lightning_actprune import ConstantSchedule, CubicSchedule, LinearSchedule, SparsitySchedule

POINTS = [i / 20 for i in range(21)]


def test_constant_is_the_same_everywhere():
    assert {ConstantSchedule(0.4)(p) for p in POINTS} == {0.4}


@pytest.mark.parametrize("kind", [LinearSchedule, CubicSchedule])
@pytest.mark.parametrize(("start", "end"), [(0.0, 0.9), (0.2, 0.7), (0.8, 0.1)])
def test_ramp_begins_at_start_and_ends_at_end(kind: type[SparsitySchedule], start: float, end: float):
    schedule = kind(end=end, start=start, warmup=0.25, until=0.75)
    values = [schedule(p) for p in POINTS]
    assert all(v == start for v, p in zip(values, POINTS, strict=True) if p <= 0.25)
    assert all(v == pytest.approx(end) for v, p in zip(values, POINTS, strict=True) if p >= 0.75)
    assert values == sorted(values, reverse=start > end)


def test_linear_is_halfway_in_the_middle():
    assert LinearSchedule(end=0.8, start=0.2)(0.5) == pytest.approx(0.5)


def test_cubic_is_the_published_formula():
    s_i, s_f, t0, n = 0.1, 0.9, 0.2, 0.5
    schedule = CubicSchedule(end=s_f, start=s_i, warmup=t0, until=t0 + n)
    for t in (0.3, 0.45, 0.6):
        assert schedule(t) == pytest.approx(s_f + (s_i - s_f) * (1 - (t - t0) / n) ** 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ConstantSchedule(1.0), ValueError, r"`sparsity` must be in \[0, 1\), got 1.0. HINT"),
        (lambda: LinearSchedule(end=60), ValueError, r"`end` must be in \[0, 1\), got 60"),
        (lambda: LinearSchedule(end=0.5, start=-0.1), ValueError, r"`start` must be in \[0, 1\), got -0.1"),
        (lambda: CubicSchedule(end="0.5"), TypeError, r"`end` must be a number in \[0, 1\), got '0.5'"),
        (lambda: CubicSchedule(end=0.5, warmup=100), ValueError, r"`warmup` must be in \[0, 1\], got 100. HINT"),
        (lambda: CubicSchedule(end=0.5, warmup=None), TypeError, r"`warmup` must be a number in \[0, 1\], got None"),
        (lambda: CubicSchedule(end=0.5, until=float("nan")), ValueError, r"`until` must be in \[0, 1\], got nan"),
        (lambda: LinearSchedule(end=0.5, warmup=0.5, until=0.5), ValueError, "`until` must be greater than `warmup`"),
    ],
)
def test_arguments_are_checked(make, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("schedule", [ConstantSchedule(0.3), LinearSchedule(0.5, warmup=0.1), CubicSchedule(0.5)])
def test_repr_shows_all_arguments_and_pickle_keeps_them(schedule: SparsitySchedule):
    assert repr(eval(repr(schedule))) == repr(schedule)
    assert vars(pickle.loads(pickle.dumps(schedule))) == vars(schedule)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        SparsitySchedule()
