"""How few bytes a model can keep for how exact a gradient, and what that takes: presets, and each operator by itself.

    python examples/benchmarks/frontier.py --out frontier.json
    python examples/benchmarks/frontier.py --kind operators --out operators.json

A model of ``third_party.py`` trains densely for ``--steps`` steps: at its start many gradients are zero. Then, from
these weights, with the same batch and random numbers, its step runs dense and with one setting after the other, each
converted as ``ActivationPruning`` does it: the first forward and backward are probed for layers whose input something
else keeps and for those whose dropped blocks would hold too much. Nothing is updated in between. Of each setting:

``activations_mib``, ``peak_mib``
    Growth of the allocator's requested bytes over the forward, and the most that was allocated until backward ended,
    with the optimizer's state there.
``step_ms``
    Median of forward and backward, the device synchronised after each.
``cosine``, ``error``
    With ``g`` the gradient of all parameters, ``h`` that of the setting: ``<g, h> / (|g| |h|)`` and ``|h - g|^2 /
    |g|^2``. Errors of operators add up, since they are independent and of mean zero.

``--kind presets`` measures the presets, ``--kind operators`` one operator in few bits with all others dense: the error
of each, from which presets were made. ``dense, inputs rounded`` is how far the exact gradient moves by itself, where
inputs have other last places in 16 bits: a model of many batch norms is chaotic at its start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import MIB, environment, require_gpu, write_records
from examples.benchmarks.models import Training, described
from examples.benchmarks.third_party import WORKLOADS
from lightning_actprune import Keep, convert, revert
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe

MODELS = (
    "vit_base_patch16_224",
    "resnet50",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForSequenceClassification",
    "resmlp_12_224",
    "convnext_tiny",
)
OPERATORS: dict[str, tuple[int, ...]] = {
    "linear": (2, 3, 4),
    "convolution": (2, 3, 4),
    "activation": (2, 3, 4),
    "norm": (2, 3, 4),
    "affine": (2, 3),
    "scale": (2,),
    "query": (4, 8),
    "key": (4, 8),
    "value": (3, 4),
    "attended": (3, 4),
    "saved": (4, 8),
}
ATTENTION = ("query", "key", "value", "attended")
TIMED = 7
CASE_SECONDS = 300
Setting = tuple[str | None, dict[str, Any]]
"""The preset and the rules of a conversion."""


def operators() -> dict[str, Setting]:
    """Return the settings with one operator in few bits."""
    found: dict[str, Setting] = {}
    for operator, several in OPERATORS.items():
        for bits in several:
            rules: dict[str, Any] = {f"type:{operator}": Keep(bits=bits)}
            if operator in ATTENTION:
                rules |= {f"type:{other}": None for other in ATTENTION if other != operator}
                rules |= {"type:saved": Keep(bits=8)}
            elif operator == "saved":
                rules = {f"type:{other}": None for other in ATTENTION} | rules
            found[f"{operator} {bits}"] = None, {**rules, "*": None}
    dropped = {"type:linear": Keep(bits=2, sparsity=0.5, max_dropped_energy=0.2), "*": None}
    return found | {"linear 2, dropping": (None, dropped)}


def presets() -> dict[str, Setting]:
    """Return the presets."""
    return {name: (name, {}) for name in ("balanced", "max", "recompute")}


def layers() -> dict[str, Setting]:
    """Return settings with one operator in few bits, of which the error of each parameter's gradient is wanted."""
    chosen = ("linear 2", "convolution 2", "activation 2", "norm 3", "saved 4")
    return {name: setting for name, setting in operators().items() if name in chosen}


KINDS = {"presets": presets, "operators": operators, "layers": layers}


class Case:
    """A model that has trained for a while, with its exact gradient.

    Args:
        name: Of the workload.
        args: Of the command line.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.backends.cudnn.allow_tf32 = args.precision == "bf16-mixed"
        self.training, self.args = Training(name, None, torch.device("cuda"), args.batches), args
        for _ in range(args.steps):
            self.training.step()
        self.exact = self.gradient()

    def forward(self) -> Tensor:
        """Return the loss, with the same random numbers each time."""
        torch.manual_seed(1)
        if self.args.precision == "bf16-mixed":
            return self.training.forward()
        return self.training.workload.loss(self.training.model, *self.training.batch)

    def rounded(self) -> dict[str, Any] | None:
        """Return how far the exact gradient moves if floating-point inputs do by one place of bfloat16."""
        whole = self.training.batch
        inputs, *others = whole
        if not inputs.is_floating_point():
            return None
        self.training.batch = inputs * (1 + torch.finfo(torch.bfloat16).eps / 2), *others
        try:
            return self.fidelity()
        finally:
            self.training.batch = whole

    def gradient(self) -> list[Tensor]:
        """Return the gradient of each parameter."""
        self.forward().backward()
        parameters = [p for p in self.training.model.parameters() if p.requires_grad]
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.training.optimizer.zero_grad(set_to_none=True)
        return found

    def measure(self, setting: Setting | None) -> dict[str, Any]:
        """Return the figures of a setting, of the dense model without one."""
        model = self.training.model
        try:
            if setting is not None:
                self.convert(setting)
            self.forward().backward()
            self.training.optimizer.zero_grad(set_to_none=True)
            return self.memory() | {"step_ms": self.step_ms()} | self.fidelity()
        finally:
            if setting is not None:
                revert(model)

    def convert(self, setting: Setting) -> None:
        """Convert the model, and let the first batch decide what it decides in a fit."""
        preset, rules = setting
        model = self.training.model
        report = convert(model, preset or "max", rules=rules)  # type: ignore[arg-type]
        with RetentionProbe(model, self.training.batch) as retention, EnergyProbe(model) as energy:
            loss = self.forward()
            retention.check_alive()
            loss.backward()
        self.training.optimizer.zero_grad(set_to_none=True)
        retention.apply(report)
        energy.apply(report)

    def memory(self) -> dict[str, Any]:
        """Return activations and peak."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss = self.forward()
        kept = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        loss.backward()
        torch.cuda.synchronize()
        own = sum(g.nbytes for g in self.exact)
        peak = torch.cuda.max_memory_allocated() - own
        self.training.optimizer.zero_grad(set_to_none=True)
        return {"activations_mib": round(kept / MIB, 2), "peak_mib": round(peak / MIB, 2)}

    def step_ms(self) -> float:
        """Return the median milliseconds of forward and backward."""
        found = []
        for _ in range(TIMED):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.forward().backward()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - begin) * 1e3)
            self.training.optimizer.zero_grad(set_to_none=True)
        return round(statistics.median(found), 2)

    def fidelity(self) -> dict[str, Any]:
        """Return how close the gradient is to the exact one."""
        sums = []
        for ours, exact in zip(self.gradient(), self.exact, strict=True):
            h, g = ours.flatten().double(), exact.flatten().double()
            sums.append(torch.stack([g @ h, h @ h, g @ g]))
        each = torch.stack(sums)
        dot, ours_squared, squared = each.sum(0).tolist()
        cosine = dot / (ours_squared * squared) ** 0.5 if ours_squared else 0.0
        found = {"cosine": round(cosine, 6), "error": rounded((ours_squared - 2 * dot + squared) / squared)}
        if self.args.kind == "layers":
            errors = ((each[:, 1] - 2 * each[:, 0] + each[:, 2]) / squared).tolist()
            shares = (each[:, 2] / squared).tolist()
            names = [name for name, p in self.training.model.named_parameters() if p.requires_grad]
            rows = zip(names, errors, shares, strict=True)
            found["by_parameter"] = {name: [rounded(error), rounded(share)] for name, error, share in rows}
        return found


def rounded(value: float) -> float:
    """Return four digits of a value."""
    return float(f"{value:.4g}")


def measured(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of each setting of a model, dense first."""
    case = Case(name, args)
    settings: dict[str, Setting | None] = {"dense": None, "dense, inputs rounded": None, **KINDS[args.kind]()}
    for method, setting in settings.items():
        try:
            found = case.measure(setting) if "," not in method or setting else case.rounded()
            if found is None:
                continue
        except ValueError as error:  # the model has no layer of that operator
            if "HINT" not in str(error):
                raise
            continue
        head = {**described(name, args.batches), "precision": args.precision, "method": method}
        yield {**head, **found, **environment()}


def run_case(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the records of one model, measured in a process of its own."""
    options = [f"--{key}={getattr(args, key)}" for key in ("kind", "batches", "steps", "precision")]
    command = [sys.executable, __file__, *options, "--case", name]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=CASE_SECONDS)
        printed, error = output.stdout, output.stderr.strip().splitlines()[-1:] if output.returncode else []
    except subprocess.TimeoutExpired as late:
        printed, error = (late.stdout or b"").decode(), [f"took over {CASE_SECONDS} s"]
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if error:
        found.append({**described(name, args.batches), "method": "error", "error": error[0][:300]})
        print(name, error[0][:300])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all models, and write the records as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(WORKLOADS), metavar="MODEL")
    parser.add_argument("--kind", default="presets", choices=list(KINDS))
    parser.add_argument("--batches", type=int, default=1, help="batches of third_party.py in one")
    parser.add_argument("--precision", default="bf16-mixed", choices=("bf16-mixed", "32-true"))
    parser.add_argument("--steps", type=int, default=20, help="of dense training before")
    parser.add_argument("--workers", type=int, default=1, help="models at a time; times are good with 1 alone")
    parser.add_argument("--out", type=Path, default=Path("frontier.json"))
    parser.add_argument("--case", metavar="MODEL", help="measure one, print JSON")
    args = parser.parse_args(arguments)
    require_gpu()
    if args.case:
        for record in measured(args.case, args):
            print(json.dumps(record), flush=True)
        return 0
    with ThreadPoolExecutor(args.workers) as pool:
        records = []
        for found in pool.map(lambda name: run_case(name, args), args.models):
            records.append(found)
            write_records(args.out, list(chain(*records)))
    return int(any("error" in record and record["method"] == "error" for record in chain(*records)))


if __name__ == "__main__":
    sys.exit(main())
