"""Activation memory of one training step by the CUDA allocator: dense, checkpointed per block, and pruned.

    python examples/benchmarks/memory.py --out memory.json

ResMLP-S12, 224 x 224, batch 32, fp32, AdamW; all linear layers of the blocks are pruned (the setting of the paper's
Table III, arXiv 2311.16883). Every case runs in a fresh process: three warm-up steps, then one measured step.

``activations_mib`` is the growth of the allocator's requested bytes over the forward, ``peak_mib`` its maximum over the
step, ``accounted_mib`` the distinct storages that autograd saved in a further step, counted by ``SavedTensorMeter``;
``saved_mib`` and ``accounted_saved_mib`` are the differences of both to the dense case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, step_memory, write_records
from examples.models import build_model
from lightning_actprune import convert
from lightning_actprune.analysis.memory import SavedTensorMeter

PAPER_SAVED_MIB = {
    (0.6, 16): 365.2, (0.6, 32): 384.2, (0.6, 64): 393.9,
    (0.7, 16): 437.7, (0.7, 32): 456.3, (0.7, 64): 462.0,
    (0.8, 16): 516.4, (0.8, 32): 524.1, (0.8, 64): 528.2,
}  # fmt: skip
"""Table III of the paper: MiB saved of a dense total of 1599.2."""


class Checkpointed(nn.Module):
    """A block that keeps only its input and runs again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return checkpoint(self.block, x, use_reentrant=False)


def build(method: str, sparsity: float, block_size: int, device: torch.device) -> nn.Module:
    """Return the model of one case."""
    model = build_model("resmlp_s12", image_size=224, patch_size=16, num_classes=1000).to(device)
    if method == "checkpoint":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Checkpointed(block)
    if method == "pruned":
        convert(model.blocks, sparsity=sparsity, block_size=block_size)
    return model


def measure(method: str, sparsity: float, block_size: int, batch: int) -> dict[str, Any]:
    """Return activations, peak and accounted bytes of one training step, in MiB."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = build(method, sparsity, block_size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(1000, (batch,), device=device)

    def forward() -> Tensor:
        return F.cross_entropy(model(images), labels)

    def finish(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        finish(forward())
    figures = step_memory(forward, finish)
    with SavedTensorMeter(model, (images, labels)) as meter:
        forward()
    figures["accounted_mib"] = meter.report().stored_bytes
    return {name: round(value / MIB, 2) for name, value in figures.items()}


def run_case(case: tuple[str, float, int], batch: int) -> dict[str, Any]:
    """Measure one case in a fresh process and return its record."""
    method, sparsity, block_size = case
    command = [sys.executable, __file__, "--case", method, str(sparsity), str(block_size), "--batch", str(batch)]
    output = subprocess.run(command, capture_output=True, text=True)
    if output.returncode:
        raise RuntimeError(f"{case} failed:\n{output.stderr[-3000:]}")
    pruned = {"sparsity": sparsity, "block_size": block_size} if method == "pruned" else {}
    head = {"model": "resmlp_s12", "batch": batch, "precision": "fp32", "method": method}
    return {**head, **{"sparsity": None, "block_size": None, **pruned}, **json.loads(output.stdout.splitlines()[-1])}


def compare(records: list[dict[str, Any]]) -> Table:
    """Add the savings to the pruned records, and return them beside the paper's."""
    dense = next(record for record in records if record["method"] == "dense")
    table = Table("sparsity", "block", "saved MiB", "accounted MiB", "differ %", "paper MiB", "peak MiB")
    for record in records:
        if record["method"] == "dense":
            continue
        for name, source in (("saved_mib", "activations_mib"), ("accounted_saved_mib", "accounted_mib")):
            record[name] = round(dense[source] - record[source], 2)
        if record["method"] == "pruned":
            setting = record["sparsity"], record["block_size"]
            record["paper_saved_mib"] = PAPER_SAVED_MIB[setting]
            differ = 100 * (record["accounted_saved_mib"] / record["saved_mib"] - 1)
            figures = record["saved_mib"], record["accounted_saved_mib"], differ, PAPER_SAVED_MIB[setting]
            table.add_row(*map(str, setting), *(f"{value:.2f}" for value in (*figures, record["peak_mib"])))
    return table


def main() -> None:
    """Run all cases and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=4, help="processes at a time; they do not share an allocator")
    parser.add_argument("--out", type=Path, default=Path("memory.json"))
    parser.add_argument("--case", nargs=3, metavar=("METHOD", "SPARSITY", "BLOCK"), help="measure one, print JSON")
    args = parser.parse_args()
    if args.case:
        method, sparsity, block_size = args.case
        print(json.dumps(measure(method, float(sparsity), int(block_size), args.batch)))
        return
    cases = [("dense", 0.0, 0), ("checkpoint", 0.0, 0), *(("pruned", *setting) for setting in PAPER_SAVED_MIB)]
    with ThreadPoolExecutor(args.workers) as pool:
        records = list(pool.map(lambda case: run_case(case, args.batch), cases))
    table = compare(records)
    write_records(args.out, [{**record, **environment()} for record in records])
    Console().print(table)


if __name__ == "__main__":
    main()
