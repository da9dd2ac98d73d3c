"""Memory over one training step, dense, checkpointed and with ``"max"``: where the peak is and what it is made of.

    python examples/benchmarks/timeline.py --out timeline.json

timm models, bf16 autocast, fused AdamW; with ``"max"``, layers whose input is kept anyway are left dense; checkpointing
is per block. Every case runs in a fresh process: three warm-up steps, one plain step whose
peak is ``plain_peak_mib``, then one step recorded by ``StepMemoryRecorder``. As in a Trainer, gradients of the step
before are freed only when the forward is over.

``parts_mib`` holds the bytes in use at the peak of forward, backward and optimizer step by kind; ``without_mib`` what
the peak would be at most with half or all of the activations gone, and where; ``holders_mib`` who keeps most at the end
of the forward. ``series_mib`` is for the picture: of every run of moments the one with the highest peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks import summaries
from examples.benchmarks.common import MIB, RESULTS, environment, require_gpu, write_records
from examples.benchmarks.models import Training, warm_up
from examples.benchmarks.third_party import WORKLOADS, checkpoint_blocks
from examples.benchmarks.vocabulary import PRESETS
from lightning_actprune.analysis.pictures import Panel, series_picture
from lightning_actprune.analysis.step_memory import PHASES, StepMemory, StepMemoryRecorder

MODELS = ("resmlp_12_224", "vit_base_patch16_224")
METHODS = ("dense", "checkpoint", "max")
TITLES = {"dense": "dense", "checkpoint": "checkpointing", "max": 'preset "max"'}
"""What the methods are called in pictures."""
DOCS = RESULTS.parents[2] / "docs"
POINTS = 200
HOLDERS = 12


def step(training: Training) -> None:
    """Run a step as a Trainer does, old gradients alive in its forward."""
    loss = training.forward()
    training.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    training.optimizer.step()


def recorded(training: Training) -> StepMemory:
    """Run the same step and return its memory."""
    with StepMemoryRecorder(training.model, training.batch, [training.optimizer]) as recorder:
        loss = training.forward()
        recorder.moment()
        training.optimizer.zero_grad(set_to_none=True)
        recorder.mark("backward")
        loss.backward()
        recorder.mark("optimizer")
        training.optimizer.step()
    return recorder.result()


def measure(name: str, method: str, device: torch.device) -> dict[str, Any]:
    """Return the figures of one case."""
    training = Training(name, PRESETS.get(method), device, others=True)
    if method == "checkpoint":
        checkpoint_blocks(training.model)
    warm_up(training)
    step(training)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step(training)
    plain = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"plain_peak_mib": mib(plain), **figures(recorded(training))}


def figures(memory: StepMemory) -> dict[str, Any]:
    """Return what a record says of a step."""
    peaks = {phase: memory.peak_in(phase) for phase in PHASES}
    highest = memory.moments[memory.peak_in()]
    lowered = {name: memory.bytes_without(fraction) for name, fraction in (("half", 0.5), ("all", 1.0))}
    places = {name: memory.moments[max(range(len(line)), key=line.__getitem__)].phase for name, line in lowered.items()}
    groups = memory.groups(memory.forward_end)
    return {
        "peak_mib": mib(memory.peak_bytes),
        "peak_phase": highest.phase,
        "peak_at": highest.fqn,
        "peak_operator": highest.operator,
        "parts_mib": {
            phase: {name: mib(nbytes) for name, nbytes in memory.parts(index).items()} for phase, index in peaks.items()
        },
        "without_mib": {name: [mib(max(line)), places[name]] for name, line in lowered.items()},
        "holders_mib": [[group.label, group.packed, group.count, mib(group.nbytes)] for group in groups[:HOLDERS]],
        **thinned(memory),
    }


def thinned(memory: StepMemory) -> dict[str, Any]:
    """Return some ``POINTS`` moments for a picture: the highest of each run of moments, and of each phase."""
    count = len(memory.moments)
    runs = [range(count * i // POINTS, count * (i + 1) // POINTS) for i in range(POINTS)]
    highest = {max(run, key=memory.interval_bytes.__getitem__) for run in runs if run}
    chosen = sorted(highest | {memory.peak_in(phase) for phase in PHASES})
    series = {name: [mib(line[i], 0) for i in chosen] for name, line in memory.series().items()}
    return {
        "phases": [memory.moments[i].phase for i in chosen],
        "series_mib": series | {"in use": [mib(memory.interval_bytes[i], 0) for i in chosen]},
    }


def mib(nbytes: float, digits: int = 1) -> float:
    """Return bytes in MiB, rounded."""
    return round(nbytes / MIB, digits) if digits else round(nbytes / MIB)


def picture_path(name: str) -> Path:
    """Return where the picture of a model goes."""
    return DOCS / f"timeline_{name}.png"


def draw(records: list[dict[str, Any]]) -> list[Path]:
    """Draw the methods beside each other, one picture per model, and return the files."""
    paths = []
    for name in dict.fromkeys(record["model"] for record in records):
        panels = {}
        for record in records:
            if record["model"] == name:
                title = TITLES[record["method"]]
                series = {kind: [value * MIB for value in line] for kind, line in record["series_mib"].items()}
                peaks = series.pop("in use")
                panels[f"{name}, {title}"] = Panel(series, record["phases"], peaks)
        paths.append(picture_path(name))
        series_picture(panels).savefig(paths[-1], dpi=120, metadata={"Software": None})
    return paths


def run_case(name: str, method: str) -> dict[str, Any]:
    """Measure one case in a fresh process and return its record."""
    output = subprocess.run([sys.executable, __file__, "--case", name, method], capture_output=True, text=True)
    if output.returncode:
        raise RuntimeError(f"{name}, {method} failed:\n{output.stderr[-3000:]}")
    head = {"model": name, "batch": WORKLOADS[name].batch, "precision": "bf16-mixed", "method": method}
    return {**head, **json.loads(output.stdout.splitlines()[-1])}


def main() -> None:
    """Measure all cases, write the records and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("timeline.json"))
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "METHOD"), help="measure one, print JSON")
    args = parser.parse_args()
    require_gpu()
    if args.case:
        print(json.dumps(measure(*args.case, torch.device("cuda"))))
        return
    records = [run_case(name, method) for name in MODELS for method in METHODS]
    write_records(args.out, [{**record, **environment()} for record in records])
    Console(width=None if sys.stdout.isatty() else 200).print(summaries.timeline(records).rich())


if __name__ == "__main__":
    main()
