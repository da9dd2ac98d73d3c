"""The kernels of gated products, compiled for real GPUs: spills, registers, width of accesses."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import OLD_COMPILER, compiled_by

pytestmark = pytest.mark.slow
TARGETS = (80, 90, 100, 120)


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("compile_gated", TARGETS)


def test_every_kernel_compiles_for_every_target(compiled):
    kernels = {(r["kernel"], r["value"]) for r in compiled}
    assert len(compiled) == len(kernels) * len(TARGETS)
    assert {"gate_silu_int4_b32_11008", "gate_grad_int4_b32_11008"} <= {kernel for kernel, _ in kernels}


def test_nothing_spills(compiled):
    for r in compiled:
        assert r["stack"] <= 8, r
        assert r["local"] == 0, r


def test_programs_share_a_multiprocessor(compiled):
    """65536 registers: for 16 warps forward, of which each thread reads 64 bytes, and for 32 back, of usual blocks."""
    for r in compiled:
        backward = r["kernel"].startswith("gate_grad") and "_b1024" not in r["kernel"] and not OLD_COMPILER
        assert r["registers"] * 32 * (32 if backward else 16) <= 65536, r


def test_rows_are_read_and_written_16_bytes_at_a_time(compiled):
    for r in compiled:
        if not r["kernel"].endswith("_100"):
            accesses = 4 if r["value"] == "fp32" else 2  # of 16 values
            backward, single = r["kernel"].startswith("gate_grad"), "_for_" in r["kernel"]
            assert r["ptx"]["load16"] >= accesses * (1 if backward else 2), r
            assert r["ptx"]["store16"] >= accesses * (2 if backward and not single else 1), r
