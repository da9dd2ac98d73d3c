"""The kernels of batch and group normalisation, compiled for real GPUs: spills, registers, width of accesses."""

from __future__ import annotations

import pytest

from tests.kernels.compile_channel_norm import CASES, RELUS
from tests.kernels.compile_only import SHARED_MEMORY
from tests.kernels.compiled import OLD_COMPILER, compiled_by

pytestmark = pytest.mark.slow
TARGETS = (80, 90)


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("compile_channel_norm", TARGETS)


def test_every_kernel_compiles_and_nothing_spills(compiled):
    assert len(compiled) == len(TARGETS) * (2 + 4 * len(CASES) + 3 * len(RELUS))
    for r in compiled:
        assert r["smem"] <= SHARED_MEMORY[r["target"]], r
        assert r["stack"] <= 8, r  # a frame of 8 bytes holds no spilled value, see test_compile
        assert r["local"] == 0, r


def test_several_programs_fit_a_multiprocessor(compiled):
    """65536 registers: three programs of four warps, the pipeline of the statistics included."""
    for r in compiled:
        assert r["registers"] * 32 * 4 * (2 if OLD_COMPILER else 3) <= 65536, r


def test_tensors_move_16_bytes_at_a_time(compiled):
    for r in compiled:
        kind = r["kernel"].split("_")[0]
        if kind in ("normalize", "grad"):
            assert r["ptx"]["load16"] > 0, r
            assert r["ptx"]["store16"] > 0, r
        elif kind == "sums" and "nchw7" not in r["kernel"]:
            assert r["ptx"]["load16"] > 0, r


def test_statistics_are_read_ahead(compiled):
    for r in compiled:
        if r["kernel"].startswith("statistics") and "nchw7" not in r["kernel"]:
            assert r["ptx"]["async16"] > 0, r
            assert r["ptx"]["async_small"] == 0, r
