"""Every kernel compiled for real GPUs, without one: instructions, spills and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compile_only import SHARED_MEMORY

SCRIPT = Path(__file__).with_name("compile_only.py")
KERNELS = {"keys", "select", "select_rows", "select_shared", "gather", "columns", "unpack"}
KERNELS |= {f"weight_grad_b{size}" for size in (16, 32, 64, 128)}


@pytest.fixture(scope="module", params=[80, 90, 100, 120], ids=lambda target: f"sm_{target}")
def compiled(request):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = SCRIPT.parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_only", str(request.param)],
        capture_output=True, text=True, env=environment, cwd=root,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return request.param, [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_every_kernel_compiles_without_spills_and_fits(compiled):
    target, records = compiled
    assert {r["kernel"] for r in records} == KERNELS
    for r in records:
        # A frame of 8 bytes holds no spilled value: ptxas reports it for the block-wide scan of some targets.
        assert r["stack"] <= 8, r
        assert r["smem"] <= SHARED_MEMORY[target], r


def test_weight_gradient_uses_tensor_cores_and_wide_asynchronous_copies(compiled):
    target, records = compiled
    instruction = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}[target]
    for r in records:
        if r["kernel"].startswith("weight_grad"):
            assert r["ptx"]["async16"] > 0 or r["kernel"] == "weight_grad_b16", r
            if r["value"] != "fp32":  # the exact fp32 product has no tensor-core instruction
                assert r["ptx"][instruction] > 0, r


def test_memory_bound_kernels_read_16_bytes_at_a_time(compiled):
    _, records = compiled
    for r in records:
        if r["kernel"] in ("keys", "gather", "unpack"):
            assert r["ptx"]["load16"] > 0, r
