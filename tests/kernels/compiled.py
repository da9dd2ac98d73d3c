"""Run a script that compiles kernels for real GPUs (``compile_only`` and its like), and read its records."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OLD_COMPILER = importlib.metadata.version("triton").startswith("3.4")
"""That of torch 2.8 gives some kernels more registers, so that fewer of their programs run at a time."""


def compiled_by(script: str, targets: Iterable[int]) -> list[dict[str, Any]]:
    """Return the records of all targets: one process compiles them on every core and imports torch and triton once.

    Args:
        script: Name of a module beside this one.
        targets: Compute capabilities times ten.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{script}", *map(str, targets)],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
