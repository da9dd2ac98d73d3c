"""The kernel of an affine layer's gradients, compiled for real GPUs: spills, registers, width of accesses."""

from __future__ import annotations

import pytest

from lightning_actprune.kernels import affine
from tests.kernels.compile_affine import CASES, label_of
from tests.kernels.compile_only import SHARED_MEMORY
from tests.kernels.compiled import compiled_by

TARGETS = (80, 90, 100, 120)


@pytest.fixture(scope="module")
def records():
    return compiled_by("compile_affine", TARGETS)


@pytest.fixture(params=TARGETS, ids=lambda target: f"sm_{target}")
def compiled(request, records):
    return [r for r in records if r["target"] == request.param]


def test_every_kernel_compiles_and_nothing_spills(compiled):
    assert {r["kernel"] for r in compiled} == {label_of(*case) for case in CASES}
    for r in compiled:
        assert r["smem"] <= SHARED_MEMORY[r["target"]], r
        assert r["stack"] <= 8, r  # a frame of 8 bytes holds no spilled value, see test_compile
        assert r["local"] == 0, r


def test_all_programs_fit_a_multiprocessor(compiled):
    """65536 registers, for the wanted warps, whose programs all have to run at once."""
    for r in compiled:
        assert r["registers"] * 32 * affine.WARPS <= 65536, r


def test_rows_are_read_and_written_16_bytes_at_a_time(compiled):
    for r in compiled:
        if r["constants"]["length"] != 100:
            assert r["ptx"]["load16"] > 0, r
            assert r["ptx"]["store16"] > 0, r
