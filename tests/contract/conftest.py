"""Cases as parameters, and the devices on which all of them run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lightning_actprune.codec.dispatch import force_backend
from tests.support.cases import CASES, Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with an argument ``case`` for every case, or for those that its mark ``cases`` selects."""
    if "case" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("cases")
    names = [name for name, case in CASES.items() if mark is None or mark.args[0](case)]
    if "keep" in metafunc.fixturenames:
        pairs = [(CASES[name], keep, f"{name}-{way}") for name in names for way, keep in CASES[name].keeps.items()]
        metafunc.parametrize(("case", "keep"), [pytest.param(c, k, id=i) for c, k, i in pairs])
        return
    metafunc.parametrize("case", [pytest.param(CASES[name], id=name) for name in names])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device of a test: the CPU with plain torch, or the GPU with the kernels, and with convolutions in fp32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with force_backend("reference" if request.param == "cpu" else "triton"):
        yield torch.device(request.param)


def leaf(case: Case) -> bool:
    """Return whether a case is one layer without dense ones inside: for ``@pytest.mark.cases``."""
    return not case.inside
