"""The kernels of activation functions, compiled for real GPUs: instructions, spills."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import compiled_by

pytestmark = pytest.mark.slow
TARGETS = (80, 90, 100, 120)


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("compile_activation", TARGETS)


def test_every_kernel_compiles_for_every_target(compiled):
    kernels = {(r["kernel"], r["value"]) for r in compiled}
    assert len(compiled) == len(kernels) * len(TARGETS)
    assert {"activate_gelu_int4", "activation_grad_relu_bit"} <= {kernel for kernel, _ in kernels}


def test_nothing_spills(compiled):
    for r in compiled:
        assert r["stack"] <= 8, r
        assert r["local"] == 0, r


def test_tensors_move_16_bytes_at_a_time(compiled):
    for r in compiled:
        if r["kernel"] == "pack_mask":  # eight bytes a thread, of rows whose bits are a byte
            assert r["ptx"]["load8"] == 2, r
            continue
        values = 4 if r["value"] == "fp32" else 8
        each = 2048 // (32 * 4 * values)  # of a program of 4 warps
        assert r["ptx"]["load16"] == r["ptx"]["store16"] == each, r
