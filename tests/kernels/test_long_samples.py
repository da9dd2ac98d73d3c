"""Samples too long for registers are selected from exactly, whatever the ties, and in reasonable time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_actprune import functional
from tests.kernels.long_sample import expected_mask, tied_integers

ROOT = Path(__file__).parents[2]


def assert_exact(x, block_size, sparsity):
    packed = functional.pack(x, sparsity=sparsity, block_size=block_size)
    mask = expected_mask(x, packed.geometry.block_size, packed.geometry.keep)
    assert torch.equal(packed.mask(), mask)
    per_value = mask.repeat_interleave(packed.geometry.block_size, 1)[:, : x.shape[2]]
    assert torch.equal(packed.unpack(), torch.where(per_value.reshape(x.shape), x, 0))


@pytest.mark.parametrize(
    ("shape", "block_size", "sparsity"), [((1, 1037, 512), 32, 0.6), ((2, 700, 500), 16, 0.99)], ids=str
)
def test_thousands_of_blocks_with_ties(device, shape, block_size, sparsity):
    assert_exact(tied_integers(*shape, device=device), block_size, sparsity)


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [0.01, 0.6, 0.999])
@pytest.mark.parametrize("kind", ["integers", "all equal", "all zero", "one row"])
def test_over_a_million_blocks(kind, sparsity):
    shape = (1, 131072 + 37, 512)
    x = tied_integers(*shape, device="cuda")
    if kind == "all equal":
        x.fill_(3)
    elif kind == "all zero":
        x.zero_()
    elif kind == "one row":
        x[:, :-1] = 0
    assert_exact(x, 32, sparsity)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "block_size"), [((2, 70001, 500), 24), ((1, 300007, 64), 16)], ids=str)
def test_over_a_million_blocks_of_odd_shapes(shape, block_size):
    assert_exact(tied_integers(*shape, device="cuda"), block_size, 0.5)


@pytest.mark.gpu
def test_over_two_million_blocks_take_under_a_minute_and_spill_nothing(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.long_sample"],
        capture_output=True, text=True, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    record = json.loads(run.stdout.splitlines()[-1])
    assert any(tmp_path.iterdir())  # compiled here, not found
    assert record["blocks"] > 2e6
    assert record["equal"] == [True, True]
    assert record["seconds"] < 60
    assert record["frames"]
    assert max(record["frames"].values()) <= 8, record  # the frame of a block-wide scan; see test_compile.py
