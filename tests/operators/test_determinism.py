"""Two runs of the same training agree in every bit of every gradient and parameter, in one process and in two.

``python -m tests.operators.test_determinism`` trains a small pruned model twice in every configuration and prints a
digest of all gradients and parameters: CUBLAS_WORKSPACE_CONFIG is read when cuBLAS starts, TRITON_INTERPRET when a
kernel is decorated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples.models.resmlp import ResMLPBlock
from lightning_actprune import convert
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from lightning_actprune.operators.weight_grad import force_method
from tests.support import oracle
from tests.support.workload import launches

ROOT = Path(__file__).parents[2]
STEPS, FEATURES = 3, 96
SAMPLES = 16, 130
"""Batch and tokens: enough rows that the reduction of the weight gradient is cut into parts."""
CASES = [
    (backend, method, name, autocast)
    for backend, method in (("triton", "gather"), ("triton", "unpack"), ("reference", "unpack"))
    for name, autocast in (("float32", False), ("bfloat16", False), ("float16", False), ("bfloat16", True))
]
"""Backend, method, type, and whether under autocast."""


def model(tokens: int) -> nn.Module:
    """Row-wise and token-mixing layers: the latter packs a transposed view. ReLU makes blocks of equal size, zero."""
    layers = nn.Linear(FEATURES, FEATURES), nn.ReLU(), ResMLPBlock(FEATURES, tokens, 0.1), nn.Linear(FEATURES, 33)
    network = nn.Sequential(*layers)
    report = convert(network, rules={"type:linear": Keep(bits=None, sparsity=0.6, block_size=16), "*": None})
    assert len(report.converted) == 5
    return network


def digest(tensors: list[Tensor]) -> str:
    """Return a hash of the bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        assert torch.isfinite(tensor).all()
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(dtype: torch.dtype, autocast: bool) -> list[str]:
    """Return one digest per step, of all gradients and the parameters after it."""
    torch.manual_seed(0)
    network = model(SAMPLES[1]).to("cuda", torch.float32 if autocast else dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    steps = []
    for _ in range(STEPS):
        x = oracle.integers(*SAMPLES, FEATURES, dtype=torch.float32 if autocast else dtype, device="cuda")
        with torch.autocast("cuda", dtype) if autocast else contextlib.nullcontext():
            y = network(x)
        y.float().square().mean().backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        steps.append(digest([*gradients, *network.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, digest(list(network.parameters()))]


def records():
    """Run the trainings in a fresh process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = [sys.executable, "-m", "tests.operators.test_determinism"]
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


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    for case in CASES:
        backend, method, name, autocast = case
        runs = []
        with force_backend(backend), force_method(method), launches() as names:
            # What depends on memory that nobody wrote differs if it is full of NaN.
            for torch.utils.deterministic.fill_uninitialized_memory in (True, False):
                runs.append(train(getattr(torch, name), autocast))
        print(json.dumps({"case": case, "runs": runs, "gathers": names.count("weight_grad_kernel")}), flush=True)
