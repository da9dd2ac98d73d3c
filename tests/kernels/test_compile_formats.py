"""The kernels that quantise, or read what is quantised, compiled for real GPUs: instructions, spills, shared memory."""

from __future__ import annotations

import pytest

from tests.kernels.compile_formats import CASES, SAMPLES, SPARSE, WIDE
from tests.kernels.compile_only import SHARED_MEMORY
from tests.kernels.compiled import compiled_by
from tests.kernels.test_compile import TRITON, Version

TARGETS = (80, 90, 100, 120)
KERNELS = {
    f"{kernel}_{name}_b{size}" for kernel in ("quantize", "quantize_scaled", "unpack") for name, size in (*CASES, WIDE)
}
KERNELS |= {f"{kernel}_{name}_b{size}" for kernel in ("count_and_dequantize", "quantize_all") for name, size in CASES}
KERNELS |= {"quantize_all_cast_int4_b32", "unpack_all_int4_b32"}
KERNELS |= {"quantize_all_int4_b32_block", "unpack_all_int4_b32_block"}
KERNELS |= {f"sparse_unpack_int4_b{size}" for size in SPARSE}
KERNELS |= {f"sample_{name}_b{size}" for name, size, _ in SAMPLES}


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
    # See test_compile: a frame of 8 bytes holds no spilled value, and a program that holds 64 keys a thread may spill.
    of_samples = 32 if Version("3.9") <= TRITON else 24
    for r in compiled:
        frame = of_samples if r["kernel"].startswith("sample") else 8
        assert r["stack"] <= frame, r
        assert r["local"] == 0, r


def test_dense_side_moves_16_bytes_at_a_time(compiled):
    for r in compiled:
        if r["kernel"].startswith(("quantize", "sample")):
            assert r["ptx"]["load16"] > 0, r
        if r["kernel"].startswith(("unpack", "count_and_dequantize")):
            assert r["ptx"]["store16"] > 0, r
