"""The paper's accounting of memory (arXiv 2311.16883, Tables I to III) computed again, ours beside its own. No GPU.

    python examples/benchmarks/paper.py      # writes results/paper.json and docs/paper_accounting.md

The subject is ResMLP-S12, 224 x 224, batch 32, fp32. It is built, run and trained for a step on the meta device, whose
tensors have shapes and storages but no data, so counting takes seconds.

Positions of kept blocks, for a batch of R rows of D values with N blocks per sample, a fraction s of them dropped::

    ours    4 ceil(N / 32) + 4 ceil(N / 128) bytes per sample      a bit per block, an offset per 128 blocks
    BSR     i k column indices and i (R + 1) row pointers          k kept blocks in all, indices of i bytes

So an index of the paper's format costs the same for every kept block, (1 - s) / b of the dense bytes if it is as wide
as a value, and ours the same for every block, kept or not.

Of the paper, only figures that this project has on record are shown: the savings of Table III (``memory.py``), the
overhead of Table II as a formula, the figure of its abstract.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, RESULTS, command, write_records
from examples.benchmarks.memory import PAPER_SAVED_MIB
from examples.benchmarks.paper_page import page
from examples.benchmarks.summaries import Records
from examples.benchmarks.tables import load
from examples.models import build_model
from lightning_actprune import functional
from lightning_actprune.codec.blocks import BlockGeometry, input_geometry
from lightning_actprune.operators.scale import Affine

PAGE = RESULTS.parents[2] / "docs" / "paper_accounting.md"
BATCH = 32
TOKENS = 196
LENGTHS = (384, 1536)
"""Features of the inputs of token mixing and fc1, and of fc2."""
SPARSITIES = (0.6, 0.7, 0.8)
BLOCK_SIZES = (16, 32, 64)
KINDS = "linear layers", "GELU", "affine", "layer scale", "rest"


def subject() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the model with images and labels, all without data."""
    with torch.device("meta"):
        model = build_model("resmlp_s12", image_size=224, patch_size=16, num_classes=1000)
        return model, torch.randn(BATCH, 3, 224, 224), torch.zeros(BATCH, dtype=torch.long)


def kind_of(module: nn.Module | None) -> str:
    """Return which of ``KINDS`` a module is."""
    if isinstance(module, Affine):
        return "layer scale" if module.bias is None else "affine"
    return {nn.Linear: "linear layers", nn.GELU: "GELU"}.get(type(module), "rest")


def saved_by_kind(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[dict[str, int], Tensor]:
    """Return the bytes of the distinct storages that each kind of layer saves in a forward, and the loss.

    Parameters and the batch, which are there anyway, do not count. A storage counts for the module that saved it first.
    """
    kept: dict[int, tuple[Tensor, str]] = {}  # holding on to the tensors keeps their addresses from being used again
    ignored = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), images, labels)}
    running: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    def save(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in ignored and key not in kept:
            kept[key] = tensor.detach(), kind_of(running[-1] if running else None)
        return tensor.detach()

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    for hook in hooks:
        hook.remove()
    found: Counter[str] = Counter()
    for tensor, kind in kept.values():
        found[kind] += tensor.untyped_storage().nbytes()
    return dict(found), loss


def components() -> Records:
    """Table I: what a training step keeps, by component."""
    model, images, labels = subject()
    activations, loss = saved_by_kind(model, images, labels)
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "optimizer state (AdamW)": sum(value.nbytes for value in states),
        "images": images.nbytes,
        **{f"activations: {kind}": activations[kind] for kind in KINDS},
    }
    return [{"table": "components", "component": name, "bytes": size} for name, size in found.items()]


def bsr_index_bytes(geometry: BlockGeometry, index: int) -> tuple[int, int]:
    """Return the bytes of column indices and of row pointers of a BSR matrix with indices of ``index`` bytes."""
    return geometry.kept_blocks * index, (geometry.total_rows + 1) * index


def positions_bytes(geometry: BlockGeometry, itemsize: int) -> int:
    """Return the bytes of our bitmap and offsets: what is stored beside the values."""
    return geometry.stored_bytes(itemsize) - geometry.kept_blocks * geometry.block_size * itemsize


def overhead(x: Tensor, block_size: int, sparsity: float) -> dict[str, Any]:
    """Return the bytes of positions for ``x [samples, rows, D]``: ours by formula and in a packed tensor, and BSR's."""
    packed = functional.pack(x, sparsity=sparsity, block_size=block_size)
    geometry = BlockGeometry.of(*x.shape, block_size, sparsity)
    columns, pointers = bsr_index_bytes(geometry, torch.int32.itemsize)
    head = {"table": "overhead", "dtype": str(x.dtype).removeprefix("torch."), "length": x.shape[-1]}
    return {
        **head,
        "samples": x.shape[0],
        "rows": x.shape[1],
        "block_size": block_size,
        "sparsity": sparsity,
        "dense_bytes": x.nbytes,
        "formula_bytes": positions_bytes(geometry, x.itemsize),
        "packed_bytes": packed.bitmap.nbytes + packed.offsets.nbytes,
        "bsr_columns_bytes": columns,
        "bsr_pointers_bytes": pointers,
    }


def overheads() -> Records:
    """Table II: positions by block size and sparsity, of tensors really packed."""
    records = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in LENGTHS:
            x = torch.randn(BATCH, TOKENS, length, dtype=dtype)
            records += [overhead(x, block, sparsity) for block in BLOCK_SIZES for sparsity in SPARSITIES]
    return records


def linear_inputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return the inputs of the linear layers of the blocks, in the order of the forward."""
    found: list[Tensor] = []
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(lambda _, args: found.append(args[0])) for layer in layers]
    model(images)
    for hook in hooks:
        hook.remove()
    return found


def savings() -> Records:
    """Table III: what pruning the linear layers of all blocks saves, by our storage and by the paper's."""
    model, images, _ = subject()
    inputs = linear_inputs(model, images)
    records = []
    for sparsity in SPARSITIES:
        for block in BLOCK_SIZES:
            geometries = [input_geometry(x, block, sparsity, "sample") for x in inputs]
            dense = sum(g.dense_bytes(4) for g in geometries)
            values = dense - sum(g.kept_blocks * g.block_size * 4 for g in geometries)
            saved = {"ours": dense - sum(g.stored_bytes(4) for g in geometries)}
            for index in (4, 8):
                saved[f"bsr_int{8 * index}"] = values - sum(sum(bsr_index_bytes(g, index)) for g in geometries)
            figures = {f"{name}_saved_bytes": size for name, size in saved.items()}
            head = {"table": "savings", "sparsity": sparsity, "block_size": block, "dense_bytes": dense}
            records.append({**head, **figures, "paper_saved_mib": PAPER_SAVED_MIB[sparsity, block]})
    return records


def main() -> None:
    """Compute everything, write the records and the page."""
    source = {"torch": torch.__version__, "command": command()}
    records = [{**record, **source} for record in (*components(), *overheads(), *savings())]
    write_records(RESULTS / "paper.json", records)
    PAGE.write_text(page(records, load("memory") or [], load("long") or []))
    total = sum(r["bytes"] for r in records if r["table"] == "components") / MIB
    print(f"A step of ResMLP-S12 keeps {total:.1f} MiB; wrote {PAGE.name} from {len(records)} records.")


if __name__ == "__main__":
    main()
