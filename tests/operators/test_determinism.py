"""Two runs of the same training agree in every bit of every gradient and parameter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.determinism import CASES, STEPS

ROOT = Path(__file__).parents[2]


def records():
    """Run the trainings in a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = [sys.executable, "-m", "tests.support.determinism"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@pytest.mark.gpu
def test_runs_in_one_process_and_in_two_agree_on_the_gpu():
    first, second = records(), records()
    assert first == second
    assert [r["case"] for r in first] == [list(case) for case in CASES]
    for r in first:
        one, two = r["runs"]
        assert len(set(one)) == STEPS + 1  # every step changed something
        assert one == two, r["case"]
        # Without this a method that quietly fell back to the other would be compared with itself.
        assert (r["gathers"] > 0) == (r["case"][1] == "gather"), r["case"]
