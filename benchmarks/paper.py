"""The memory accounting of the paper (arXiv 2311.16883, Tables I to III), computed again for this package. No GPU.

    python benchmarks/paper.py        # writes results/paper.json; `report.py` shows it in docs/paper_accounting.md

ResMLP-S12, 224 x 224, batch 32, fp32, runs on the meta device, whose tensors have shapes and storages but no data.
`bench_step.py --table paper` measures Table III on a GPU; `trainings.py --settings dense 0.6:32 0.8:32` trains.

Positions of kept blocks, for R rows with N blocks a sample, k of all blocks kept:

    ours    4 ceil(N / 32) + 4 ceil(N / 128) bytes per sample      a bit per block, an offset per 128 blocks
    BSR     i k column indices and i (R + 1) row pointers          indices of i bytes
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import MIB, RESULTS, environment, write_records
from examples.models import build_model
from lightning_actprune.codec.blocks import BlockGeometry, input_geometry
from lightning_actprune.operators.norm import Affine

Records = list[dict[str, Any]]
BATCH, TOKENS, LENGTHS = 32, 196, (384, 1536)
SPARSITIES, BLOCK_SIZES = (0.6, 0.7, 0.8), (16, 32, 64)


def subject(depth: int | None) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model with images and labels, all without data."""
    with torch.device("meta"):
        options = {"image_size": 224, "patch_size": 16, "num_classes": 1000} | ({"depth": depth} if depth else {})
        model = build_model("resmlp_s12", **options)
        return model, torch.randn(BATCH, 3, 224, 224), torch.zeros(BATCH, dtype=torch.long)


def kind_of(module: nn.Module | None) -> str:
    """Return the kind of layer that a module is."""
    if isinstance(module, Affine):
        return "layer scale" if module.bias is None else "affine"
    return {nn.Linear: "linear layers", nn.GELU: "GELU"}.get(type(module), "rest")


def components(depth: int | None) -> Records:
    """Table I: what a training step keeps; a storage counts for the layer that saved it first."""
    model, images, labels = subject(depth)
    saved: dict[int, tuple[Tensor, str]] = {}  # holds on to the tensors, so that no address is used twice
    ignored = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), images, labels)}
    running: list[nn.Module] = []

    def save(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in ignored and key not in saved:
            saved[key] = tensor.detach(), kind_of(running[-1] if running else None)
        return tensor.detach()

    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: running.append(module))
        module.register_forward_hook(lambda *_: running.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    activations: Counter[str] = Counter()
    for tensor, kind in saved.values():
        activations[kind] += tensor.untyped_storage().nbytes()
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    sizes = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters()),
        "optimizer state (AdamW)": sum(value.nbytes for state in optimizer.state.values() for value in state.values()),
        "images": images.nbytes,
        **{f"activations: {kind}": nbytes for kind, nbytes in activations.most_common()},
    }
    return [{"table": "components", "component": name, "bytes": nbytes} for name, nbytes in sizes.items()]


def bsr_index_bytes(geometry: BlockGeometry, index: int) -> tuple[int, int]:
    """Return the bytes of column indices and of row pointers of a BSR matrix with indices of `index` bytes."""
    return geometry.kept_blocks * index, (geometry.total_rows + 1) * index


def overheads() -> Records:
    """Table II: bytes of positions by block size and sparsity."""
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            for block in BLOCK_SIZES:
                for sparsity in SPARSITIES:
                    geometry = BlockGeometry.of(BATCH, TOKENS, length, block, sparsity)
                    values = geometry.kept_blocks * block * dtype.itemsize
                    columns, pointers = bsr_index_bytes(geometry, 4)
                    head = {"table": "overhead", "dtype": str(dtype).removeprefix("torch."), "length": length}
                    sizes = {"dense_bytes": geometry.dense_bytes(dtype.itemsize)}
                    sizes |= {"formula_bytes": geometry.stored_bytes(dtype.itemsize) - values}
                    sizes |= {"bsr_columns_bytes": columns, "bsr_pointers_bytes": pointers}
                    records.append({**head, "block_size": block, "sparsity": sparsity, **sizes})
    return records


def savings(depth: int | None) -> Records:
    """Table III: bytes that pruning the linear layers of all blocks saves, by our storage and by BSR's."""
    model, images, _ = subject(depth)
    inputs: list[Tensor] = []
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(images)
    records = []
    for sparsity in SPARSITIES:
        for block in BLOCK_SIZES:
            geometries = [input_geometry(x, block, sparsity, "sample") for x in inputs]
            dense = sum(g.dense_bytes(4) for g in geometries)
            values = dense - sum(g.kept_blocks * g.block_size * 4 for g in geometries)
            saved = {"ours": dense - sum(g.stored_bytes(4) for g in geometries)}
            for index in (4, 8):
                saved[f"bsr_int{8 * index}"] = values - sum(sum(bsr_index_bytes(g, index)) for g in geometries)
            head = {"table": "savings", "sparsity": sparsity, "block_size": block, "dense_bytes": dense}
            records.append({**head, **{f"{name}_saved_bytes": nbytes for name, nbytes in saved.items()}})
    return records


def main(argv: Sequence[str] | None = None) -> Records:
    """Compute everything and write the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, help="blocks of the model, for a smoke test")
    parser.add_argument("--out", type=Path, default=RESULTS / "paper.json")
    args = parser.parse_args(argv)
    records = [*components(args.depth), *overheads(), *savings(args.depth)]
    write_records(args.out, [{**record, **environment()} for record in records])
    total = sum(record["bytes"] for record in records if record["table"] == "components") / MIB
    print(f"A step of the model keeps {total:.1f} MiB; wrote {len(records)} records to {args.out}.")
    return records


if __name__ == "__main__":
    main()
