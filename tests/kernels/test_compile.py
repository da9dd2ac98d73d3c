"""Every kernel compiled for real GPUs, without one: instructions, spills, registers and shared memory."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from packaging.version import Version

from lightning_actprune.kernels import norm
from tests.kernels.compile_only import FAMILIES, SHARED_MEMORY, WEIGHT_GRADS, specimens

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05", 120: "mma"}
NEWER = Version(triton.__version__) >= Version("3.8")
REGISTERS = 65536
"""Of a multiprocessor."""


@pytest.fixture(scope="module")
def records():
    """The records of all targets: one process compiles them on every core."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_only", *map(str, TENSOR_CORES)],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(params=itertools.product(TENSOR_CORES, FAMILIES), ids=str)
def compiled(records, request):
    """The records of all kernels of a family for a target."""
    target, family = request.param
    rows = [r for r in records if (r["target"], r["family"]) == (target, family)]
    expected = [(label, value) for (name, _), (label, _, _, value, _) in specimens(target).items() if name == family]
    assert [(r["kernel"], r["value"]) for r in rows] == expected
    assert len(expected) >= 12
    return rows


def allowed_stack(name, target):
    """Bytes of stack that a kernel may use: a frame of 8 holds no spilled value, and ptxas reports it for scans."""
    if name == "select":  # up to 64 keys a thread: of its own accord ptxas spills some to fit one program more
        return 136 if NEWER and target >= 90 else 24
    if name.startswith("weight_grad"):
        return 0
    odd = {"normalize_grad_4_b24_100": 24, "normalize_4_b32_384": 16} if NEWER and target >= 100 else {}
    return odd.get(name, 8)


def wanted_warps(record):
    """Warps that have to run at once on a multiprocessor, so that it is busy or that programs can wait for all."""
    name, family = record["kernel"], record["family"]
    if family == "norms":
        return norm.WARPS if name.startswith("normalize_grad") else 20
    if family == "gates":
        return 32 if name.startswith("gate_grad") and "_b1024" not in name else 16
    return 12 if family == "channels" else 0


def test_nothing_spills_and_programs_share_a_multiprocessor(compiled):
    for r in compiled:
        assert r["smem"] <= SHARED_MEMORY[r["target"]], r
        assert r["stack"] <= allowed_stack(r["kernel"], r["target"]), r
        assert r["local"] == 0, r
        assert r["registers"] * 32 * wanted_warps(r) <= REGISTERS, r


def test_the_weight_gradient(records):
    """Tensor cores but for fp32; output gradients come by asynchronous copies of 16 bytes, as many as a turn needs."""
    rows = [r for r in records if r["kernel"].startswith("weight_grad")]
    assert {(r["value"], r["target"]) for r in rows} == set(itertools.product(WEIGHT_GRADS, TENSOR_CORES))
    for r in rows:
        constants, size = r["constants"], 4 if r["value"] == "fp32" else 2
        if r["value"] == "fp32":
            assert not any(r["ptx"][instruction] for instruction in TENSOR_CORES.values()), r
        else:
            assert r["ptx"][TENSOR_CORES[r["target"]]] > 0, r
        pieces = constants["BK"] * constants["BM"] * size // (16 * 32 * r["options"]["num_warps"])
        assert r["ptx"]["async16"] >= max(pieces, 1, r["ptx"]["async_small"] / 2), r


def test_no_kernel_that_writes_bytes_passes_on_nan_by_an_instruction(records):
    """Triton 3.8 may then write wrong bytes: its issue 11111. Codes of whole words are written as these."""
    passed_on = [r for r in records if r["ptx"]["nan"]]
    assert passed_on
    for r in passed_on:
        assert (r["constants"].get("FORMAT", 0) >> 16) & 255 == 32, r


def accesses(record):
    """Return the least number of loads and of stores of 16 bytes a kernel must have, and whether they are all."""
    name, size = record["kernel"], 4 if record["value"] == "fp32" else 2
    match record["family"]:
        case "blocks" if not name.endswith("narrow"):
            loads = name.startswith(("keys", "gather", "unpack"))
            return loads, name.startswith(("gather", "unpack", "keys_cast")), False
        case "formats":
            return name.startswith("quantize"), name.startswith(("unpack", "count_and_dequantize")), False
        case "activations" if name != "pack_mask":
            each = 2048 // (32 * 4 * (16 // size))  # of a program of 4 warps
            return each, each, True
        case "gates" if not name.endswith("_100"):
            backward, single = name.startswith("gate_grad"), "_for_" in name
            return size * (1 if backward else 2), size * (2 if backward and not single else 1), False
        case "norms" if not name.endswith("_100"):
            return 1, 1, False
        case "channels" if name.startswith("channels"):
            return 1, 1, False
        case "channels" if name.startswith("channel_sums") and "nchw7" not in name:
            return 1, 0, False
    return 0, 0, False


def test_memory_moves_16_bytes_at_a_time(compiled):
    for r in compiled:
        name, ptx, (loads, stores, exactly) = r["kernel"], r["ptx"], accesses(r)
        assert ptx["load16"] >= loads, r
        assert ptx["store16"] >= stores, r
        assert not exactly or (ptx["load16"], ptx["store16"]) == (loads, stores), r
        if name.endswith("narrow"):  # rows of a multiple of 4 values move 8 bytes at a time
            assert ptx["store8" if name.startswith(("unpack", "keys_cast")) else "load8"] > 0, r
            assert ptx["load2"] == ptx["store2"] == 0, r
        if name == "pack_mask":
            assert ptx["load8"] == 2, r
        if name in ("column_sums", "add_sets") or (name.startswith("statistics") and "nchw7" not in name):
            assert ptx["async16"] > 0, r
            assert ptx["async_small"] == 0, r


INSTRUCTIONS = {
    "quantize_pairs": {3: 14.5, 4: 11, 8: 12.5},
    "unpack_all": {3: 14.5, 4: 9.5, 8: 9.5},
}
"""Most instructions a value on Hopper, by kernel and bits. With twice as many they take longer than memory does."""


def test_packing_takes_few_instructions(records):
    for kernel, of_bits in INSTRUCTIONS.items():
        for bits, most in of_bits.items():
            wanted = f"{kernel}_{bits}_b32", "bf16", 90
            [r] = [r for r in records if (r["kernel"], r["value"], r["target"]) == wanted]
            assert r["instructions"] <= most * 32, r  # a thread has 32 values
