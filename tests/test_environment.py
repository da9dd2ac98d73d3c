"""`python -m lightning_actprune`: what it says of machines, by stand-ins for the GPUs, and that it always ends well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_actprune.__main__ import main
from lightning_actprune.codec import dispatch
from lightning_actprune.commands.environment import BLOCK_SIZES, DTYPES, collect_environment, describe_kernels

ROOT = Path(__file__).parents[1]
GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for a machine with an old GPU and a new one, the latter full."""

    def free(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: out of memory")
        return 3 * GIB, 4 * GIB

    properties = [
        SimpleNamespace(name="Old [one]", major=7, minor=5, total_memory=4 * GIB),
        SimpleNamespace(name="New", major=9, minor=0, total_memory=80 * GIB),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "_capability", [(7, 5), (9, 0)].__getitem__)
    monkeypatch.setattr(dispatch, "_triton_installed", lambda: True)
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)


def answer(found: dict[str, Any], device: str, dtype: str, block_size: int) -> tuple[str, list[str]]:
    (row,) = (r for r in found["kernels"] if (r["device"], r["dtype"], r["block_size"]) == (device, dtype, block_size))
    return row["backend"], row["reasons"]


def test_gpus_and_what_runs_on_them(gpus, monkeypatch):
    result = collect_environment()
    assert json.loads(json.dumps(result)) == result
    assert result["gpus"] == [
        {"index": 0, "name": "Old [one]", "capability": "7.5", "memory_bytes": 4 * GIB, "free_bytes": 3 * GIB},
        {"index": 1, "name": "New", "capability": "9.0", "memory_bytes": 80 * GIB, "free_bytes": None},
    ]
    assert result["gpu_trouble"] is None
    assert len(result["kernels"]) == 3 * len(DTYPES) * len(BLOCK_SIZES)
    old = "compute capability 7.5 is below 8.0"
    assert answer(result, "cuda:0", "float32", 32) == ("reference", [old])
    for dtype in ("float32", "float16", "bfloat16"):
        assert answer(result, "cuda:1", dtype, 1024) == ("triton", [])
        assert answer(result, "cuda:1", dtype, 2048) == ("reference", ["block_size 2048 is above 1024"])
    backend, (reason,) = answer(result, "cuda:1", "float64", 16)
    assert (backend, "float64 is not" in reason) == ("reference", True)
    assert all(row["reasons"] for row in result["kernels"] if row["device"] == "cpu")
    monkeypatch.setattr(dispatch, "_capability", lambda index: (7, 5))
    assert old in describe_kernels(collect_environment())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in describe_kernels(collect_environment())


def test_a_driver_that_fails_is_a_finding(monkeypatch, capsys):
    def fail(*args: Any) -> Any:
        raise RuntimeError("The NVIDIA driver is too old\nand more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert main([]) == 0
    assert "RuntimeError: The NVIDIA driver is too old" in capsys.readouterr().out


def test_the_first_line_says_whether_kernels_run_and_all_fits_a_screen(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)
    assert main([]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("The kernels do not run here: ")
    assert len(shown) <= 40


@pytest.mark.integration
def test_as_a_command():
    variables = os.environ | {"PYTHONIOENCODING": "ascii", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "lightning_actprune", "--json"]
    run = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["gpus"] == []
    assert result["gpu_trouble"]
