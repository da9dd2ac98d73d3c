"""The kernels that quantise, or read what is quantised, compiled for real GPUs: instructions, spills, shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_formats import CASES, SAMPLES, WIDE
from tests.kernels.compile_only import SHARED_MEMORY
from tests.kernels.test_compile import TRITON, Version

TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
KERNELS = {
    f"{kernel}_{name}_b{size}" for kernel in ("quantize", "quantize_scaled", "unpack") for name, size in (*CASES, WIDE)
}
KERNELS |= {f"weight_grad_{name}_b{size}" for name, size in CASES}
KERNELS |= {f"sample_{name}_b{size}" for name, size, _ in SAMPLES}


@pytest.fixture(scope="module")
def records():
    """All targets at once: one process compiles them on every core and imports torch and triton once."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_formats", *map(str, TENSOR_CORES)],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(params=TENSOR_CORES, ids=lambda target: f"sm_{target}")
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
        frame = of_samples if r["kernel"].startswith("sample") else 0 if r["kernel"].startswith("weight_grad") else 8
        assert r["stack"] <= frame, r
        assert r["local"] == 0, r


def test_weight_gradient_uses_tensor_cores_in_16_bits_alone(compiled):
    for r in compiled:
        if r["kernel"].startswith("weight_grad"):
            used = {name for name in TENSOR_CORES.values() if r["ptx"][name] > 0}
            assert used == ({TENSOR_CORES[r["target"]]} if r["value"] == "bf16" else set()), r


def test_weight_gradient_copies_headers_and_codes_in_the_background(compiled):
    """As often as the output gradient each; rows of fp8 are not aligned to the four bytes that this takes."""
    for r in compiled:
        if r["kernel"].startswith("weight_grad"):
            gradient, values = (r["async_from"].get(name, 0) for name in ("grad_ptr", "values_ptr"))
            assert gradient > 0, r
            assert values == 0 if "fp8" in r["kernel"] else values > gradient, r


def test_dense_side_moves_16_bytes_at_a_time(compiled):
    for r in compiled:
        if r["kernel"].startswith(("quantize", "sample")):
            assert r["ptx"]["load16"] > 0, r
        if r["kernel"].startswith("unpack"):
            assert r["ptx"]["store16"] > 0, r
