"""Cases as parameters: one of each autograd function by default, the other classes in CI."""

from __future__ import annotations

import pytest

from tests.support.cases import CASES, CASES_OF_PACKAGES, FUNCTIONS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument ``case`` for every case, or for those that its mark ``cases`` selects."""
    if "case" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("cases")
        names = [name for name, case in CASES.items() if mark is None or mark.args[0](case)]
        metafunc.parametrize("case", [pytest.param(CASES[name], id=name, marks=_marks(name)) for name in names])


def _marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name in FUNCTIONS:
        return ()
    foreign = name in CASES_OF_PACKAGES and name not in ("basic-block", "bottleneck")  # of torchvision
    return (pytest.mark.foreign if foreign else pytest.mark.integration,)
