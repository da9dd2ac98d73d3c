"""What compiled models pack, by the pass over their joint graph: without a GPU, and without a step that is run.

    python examples/benchmarks/plan.py --models resmlp_12_224 resnet50 --out plan.json

Models and batches of ``rivals.py``, in float32 parameters under bf16 autocast of the CPU, whose rules differ a little
from those of a GPU (norms). ``packs`` is how many values are packed in a step, ``packed_mib`` what they take and
``packable_mib`` what the listed values take in the dense model; layers that drop blocks do so, since no first batch has
told which ones had better not. The first graph that is compiled is all that is seen of a model; it is an error if that
packs nothing, as with GPT-2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._inductor.lowering  # which decompositions look up
from rich.console import Console
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, software, write_records
from examples.benchmarks.models import described
from examples.benchmarks.rivals import BATCHES
from examples.benchmarks.summaries import Records, Summary
from examples.benchmarks.third_party import WORKLOADS
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, mark_layers, new_owner

MODELS = "vit_base_patch16_224", "resmlp_12_224", "convnext_tiny", "resnet50"


class Planned(Exception):  # noqa: N818 - it is no error of anybody's
    """Ends a compilation whose plan is known."""


def stop(*_: Any) -> NoReturn:
    """Compile nothing."""
    raise Planned


def planned(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Trace forward and backward of a graph with inductor's decompositions, and compile neither."""
    return aot_module_simplified(
        module,
        inputs,
        fw_compiler=stop,
        bw_compiler=stop,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def rows_of(name: str, preset: str, batches: int = BATCHES) -> list[Row]:
    """Return how each value is kept that backward of a model reads."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model, batch = workload.build(), workload.data(batches * workload.batch)
    owner = new_owner("plan.py")
    convert_layers(model, Config(preset), owner)
    mark_layers(model, owner)

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return workload.loss(model, *batch)

    with CompiledPacking() as packing:
        try:
            torch.compile(loss, backend=planned)(*batch)
        except Exception as error:
            if not ended(error):
                raise
        if not packing.rows:
            raise RuntimeError(f"The first graph that is compiled of {name} packs nothing.")
        return list(packing.rows)


def ended(error: BaseException | None) -> bool:
    """Return whether an error is the end of a compilation, or was raised because of it."""
    return error is not None and (isinstance(error, Planned) or ended(error.__cause__) or "Planned" in str(error))


def measure(name: str, preset: str) -> dict[str, Any]:
    """Return the figures of one case."""
    rows = rows_of(name, preset)
    kept = [row for row in rows if row.how == "packed"]
    sizes = {"packed_mib": sum(row.stored_bytes for row in rows), "packable_mib": sum(row.dense_bytes for row in rows)}
    return {"packs": len(kept), **{key: round(size / MIB, 2) for key, size in sizes.items()}}


def summary(records: Records) -> Summary:
    """Packed values by model and preset."""
    names = ("model", "preset", "packs", "packed_mib", "packable_mib")
    return Summary("What is packed in compiled code", names, [[str(r[name]) for name in names] for r in records])


def main(argv: Sequence[str] | None = None) -> int:
    """Plan all cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=WORKLOADS, metavar="MODEL")
    parser.add_argument("--presets", nargs="+", default=("max",), choices=("balanced", "max", "recompute"))
    parser.add_argument("--out", type=Path, default=Path("plan.json"))
    args = parser.parse_args(argv)
    records: Records = []
    for name in args.models:
        for preset in args.presets:
            head = {**described(name, BATCHES), "preset": preset, "gpu": "none"}
            records.append({**head, **measure(name, preset), **software()})
            write_records(args.out, records)
    Console(width=None if sys.stdout.isatty() else 120).print(summary(records).rich())
    return 0


if __name__ == "__main__":
    sys.exit(main())
