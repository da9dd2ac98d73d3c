"""The kernels that quantize, or read what is quantized, compiled for real GPUs: instructions, spills, shared memory."""

from __future__ import annotations

import pytest

from tests.kernels.compile_formats import CASES, SPARSE, WIDE
from tests.kernels.compile_only import SHARED_MEMORY
from tests.kernels.compiled import compiled_by

pytestmark = pytest.mark.slow
TARGETS = (80, 90, 100, 120)
KERNELS = {
    f"{kernel}_{bits}_b{size}" for kernel in ("quantize", "quantize_scaled", "unpack") for bits, size in (*CASES, WIDE)
}
KERNELS |= {f"{kernel}_{bits}_b{size}" for kernel in ("count_and_dequantize", "quantize_all") for bits, size in CASES}
KERNELS |= {"quantize_all_cast_4_b32", "unpack_all_4_b32"}
KERNELS |= {"quantize_all_4_b32_block", "unpack_all_4_b32_block"}
KERNELS |= {f"sparse_unpack_4_b{size}" for size in SPARSE}


@pytest.fixture(scope="module")
def records():
    return compiled_by("compile_formats", TARGETS)


@pytest.fixture(params=TARGETS, ids=lambda target: f"sm_{target}")
def compiled(request, records):
    return [r for r in records if r["target"] == request.param]


def test_every_kernel_compiles_and_fits(compiled):
    assert {r["kernel"] for r in compiled} == KERNELS
    for r in compiled:
        assert r["smem"] <= SHARED_MEMORY[r["target"]], r


def test_nothing_spills(compiled):
    for r in compiled:  # see test_compile: a frame of 8 bytes holds no spilled value
        assert r["stack"] <= 8, r
        assert r["local"] == 0, r


def test_dense_side_moves_16_bytes_at_a_time(compiled):
    for r in compiled:
        if r["kernel"].startswith("quantize"):
            assert r["ptx"]["load16"] > 0, r
        if r["kernel"].startswith(("unpack", "count_and_dequantize")):
            assert r["ptx"]["store16"] > 0, r
