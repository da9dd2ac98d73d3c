"""Train a small pruned model twice in every configuration and print a digest of all gradients and parameters.

Run on a GPU, in its own process, because CUBLAS_WORKSPACE_CONFIG is read when cuBLAS starts and TRITON_INTERPRET when a
kernel is decorated: ``python -m tests.support.determinism``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json

import torch
from torch import Tensor, nn

from examples.models.resmlp import ResMLPBlock
from lightning_actprune import convert
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from lightning_actprune.operators.weight_grad import force_method
from tests.support import oracle
from tests.support.workload import launches

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
    report = convert(network, rules={"type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
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
