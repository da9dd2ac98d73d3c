"""Train a small pruned model twice in every configuration and print a digest of all gradients and parameters.

Run in its own process, because CUBLAS_WORKSPACE_CONFIG is read when cuBLAS starts and TRITON_INTERPRET when a kernel is
decorated: ``python -m tests.support.determinism cuda``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from examples.models.resmlp import ResMLPBlock
from lightning_actprune import convert
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from lightning_actprune.operators.weight_grad import force_method
from tests.support import oracle
from tests.support.workload import launches

STEPS = 3
FEATURES = 96
SAMPLES = {"cpu": (2, 37), "cuda": (16, 130)}
"""Batch and tokens; on a GPU, enough rows that the reduction of the weight gradient is cut into parts."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases(device: str) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (backend, method, value type, whether under autocast)."""
    for backend, method in (("triton", "gather"), ("triton", "unpack"), ("reference", "unpack")):
        if device == "cuda" or backend == "reference":
            yield from ((backend, method, name, False) for name in DTYPES)
            yield backend, method, "bf16", True
        elif method == "gather":  # the interpreter takes long, and 16-bit values are widened before it computes
            yield backend, method, "fp32", False


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


def train(device: str, dtype: torch.dtype, autocast: bool) -> list[str]:
    """Return one digest per step, of all gradients and the parameters after it."""
    torch.manual_seed(0)
    network = model(SAMPLES[device][1]).to(device, torch.float32 if autocast else dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    steps = []
    for _ in range(STEPS):
        x = oracle.integers(*SAMPLES[device], FEATURES, dtype=torch.float32 if autocast else dtype, device=device)
        with torch.autocast(device, dtype) if autocast else contextlib.nullcontext():
            y = network(x)
        y.float().square().mean().backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        steps.append(digest([*gradients, *network.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return [*steps, digest(list(network.parameters()))]


def two_runs(device: str, case: tuple[str, str, str, bool]) -> tuple[list[list[str]], int]:
    """Return the digests of two runs and how often the gather kernel ran.

    Torch fills the empty tensors of the first run with NaN, not those of the second, which finds in them what others
    left: a result that depended on memory nobody wrote would differ.
    """
    backend, method, name, autocast = case
    runs = []
    with force_backend(backend), force_method(method), launches() as names:
        for fill in (True, False):
            torch.utils.deterministic.fill_uninitialized_memory = fill
            runs.append(train(device, DTYPES[name], autocast))
    return runs, names.count("weight_grad_kernel")


def main(device: str) -> None:
    """Print a JSON record per case."""
    torch.use_deterministic_algorithms(True)
    for case in cases(device):
        runs, gathers = two_runs(device, case)
        print(json.dumps({"case": case, "runs": runs, "gathers": gathers}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
