"""What presets keep of some 380 models of timm and transformers, and how close their gradients are to exact ones.

    python benchmarks/bench_zoo.py --workers 15
    python benchmarks/bench_zoo.py --quick                                 # a dozen small ones
    python benchmarks/bench_zoo.py --models "timm/conv*" "*BertFor*"
    python benchmarks/bench_zoo.py --causes --workers 15                   # after a run, with its file as --out

On the CPU, in fp32, with small models and inputs (``zoo_models.py``); no optimizer runs. Each model has a process of
its own and at most a minute and a half. README.md has the fields of the records. The exit status is 1 if something was
raised or left behind, a forward differs by more than rounding does, or a gradient is far off that should not be.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # before transformers is imported
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from benchmarks import common
from benchmarks.common import Record, Records, Running, show
from benchmarks.zoo_models import LISTED, Sample, timm_sample, transformers_sample
from lightning_actprune import config
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, find_hooks, is_converted, new_owner, revert

PRESETS = "balanced", "max"
LIMIT_S = 90
"""Models take seconds; one that hangs must not cost the others their records."""
MIN_VALUES = 1024
"""Least values of a tensor that is packed."""
STEADY = 0.95
"""A model whose ``noise`` is below that is chaotic."""
FORWARD_OFF, PLACES = 1e-5, 2
"""How far outputs may differ: by rounding in fp32, or by so many last places of the inputs."""
LEAST_COSINE = {"balanced": 0.99, "max": 0.6}
"""Least cosine of a gradient that rounding moves by less."""
WORST, EIGHT = 16, 8
SAMPLES: dict[str, Callable[[], Sample]] = {
    f"{library}/{name}": partial(make, name)
    for library, make in (("timm", timm_sample), ("transformers", transformers_sample))
    for name in LISTED[library]
}
QUICK = (
    *("timm/test_byobnet", "timm/test_convnext", "timm/test_efficientnet", "timm/test_nfnet", "timm/test_vit"),
    *("timm/mobilenetv3_small_050", "transformers/LlamaForCausalLM", "transformers/BertForMaskedLM"),
    *("transformers/GPT2LMHeadModel", "transformers/T5ForConditionalGeneration", "transformers/MambaForCausalLM"),
    "transformers/SwinForImageClassification",
)
"""Small models of different kinds."""


# === A step of a model ================================================================================


@dataclass
class Step:
    """What a training step gave: all output tensors, the loss, gradients by name, bytes kept dense and now."""

    outputs: list[Tensor]
    loss: float
    grads: dict[str, Tensor]
    dense_bytes: int
    stored_bytes: int


class Training:
    """Steps of one model that all begin alike."""

    def __init__(self, sample: Sample) -> None:
        self.sample, self.model = sample, sample.model
        with torch.no_grad():
            self.model(*sample.args, **sample.kwargs)  # some fill buffers in their first forward
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def begin(self) -> None:
        """Let a step begin as the first one did."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    def forward(self) -> tuple[Any, Tensor]:
        output = self.model(*self.sample.args, **self.sample.kwargs)
        return output, self.sample.loss(output)

    def step(self) -> Step:
        self.begin()
        with SavedTensorMeter(self.model, self.sample.inputs()) as meter:
            output, loss = self.forward()
        loss.backward()
        outputs = [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        report = meter.report()
        return Step(outputs, loss.item(), grads, report.dense_bytes, report.stored_bytes)

    def step_on(self, change: Callable[[Tensor], Tensor]) -> Step:
        """Return what a step gives whose inputs, and what embeddings return, are changed."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        sample, embeddings = self.sample, [m for m in self.model.modules() if type(m) is nn.Embedding]
        handles = [m.register_forward_hook(lambda module, args, output: change(output)) for m in embeddings]
        self.sample = replace(sample, args=tree_map(changed, sample.args), kwargs=tree_map(changed, sample.kwargs))
        try:
            return self.step()
        finally:
            self.sample = sample
            for handle in handles:
                handle.remove()

    @contextmanager
    def converted(self, config: Config) -> Iterator[int]:
        """Convert the model as the callback does, with its first batch; give the number of converted layers."""
        owner = new_owner("zoo")
        report = convert_layers(self.model, config, owner)
        try:
            saved = find_hooks(self.model, owner)
            assert saved is not None
            saved.min_values = MIN_VALUES
            for layer in filter(is_converted, self.model.modules()):
                layer._state = replace(layer._state, keep=replace(layer.keep, min_rows_for_low_bits=0))
            self.begin()
            retention = RetentionProbe(self.model, self.sample.inputs())
            energy = EnergyProbe(self.model, eagerly=True)
            with retention, energy:
                output, loss = self.forward()
                del output
                retention.check_alive()
                loss.backward()
                del loss
            retention.apply(report)
            energy.apply(report)
            yield len(report.converted)
        finally:
            revert(self.model, owner)


def next_number(x: Tensor) -> Tensor:
    """Return the next larger number of each value."""
    at = x.detach()
    return x + (at.nextafter(torch.full_like(at, math.inf)) - at)


# === Comparisons ======================================================================================


def traits(model: nn.Module) -> dict[str, Any]:
    """Return class, attributes and hooks of each module, and the keys of the ``state_dict``."""
    found: dict[str, Any] = {"keys of the state_dict": list(model.state_dict())}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = vars(module)
        hooks = {key: list(map(id, value.values())) for key, value in attributes.items() if key.endswith("_hooks")}
        found |= {f"class of {name!r}": type(module), f"attributes of {name!r}": set(attributes)}
        found[f"hooks of {name!r}"] = hooks
    return found


def cosine(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the cosine of two gradients, which must have the same parameters."""
    if ours.keys() != exact.keys():
        names = sorted(ours.keys() ^ exact.keys())
        raise ValueError(f"Only one of the models has gradients of {', '.join(names[:3])} ({len(names)} in all).")
    dot = ours_squared = exact_squared = 0.0
    for name, grad in exact.items():
        dot += (ours[name] * grad).sum(dtype=torch.float64).item()
        ours_squared += ours[name].square().sum(dtype=torch.float64).item()
        exact_squared += grad.square().sum(dtype=torch.float64).item()
    return dot / math.sqrt(ours_squared * exact_squared) if ours_squared * exact_squared else math.nan


def largest_difference(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest difference of two lists of outputs over the largest value of each, 0 if they are equal."""
    kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (ours, exact)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"Outputs are {kinds[0]}, and {kinds[1]} dense.")
    largest = 0.0
    for x, y in zip(ours, exact, strict=True):
        if not torch.equal(x.isnan(), y.isnan()):
            raise ValueError("Outputs are NaN where they are not dense, or the other way round.")
        difference = (x.double() - y.double()).nan_to_num(0).abs().max().item() if x.numel() else 0.0
        largest = max(largest, difference / y.double().nan_to_num(0).abs().max().item() if difference else 0.0)
    return largest


def kib(nbytes: int) -> float:
    return round(nbytes / 1024, 1)


def rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 5)


def significant(value: float) -> float:
    return float(f"{value:.1e}")


def text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).partition(" HINT:")[0][:200]


# === Records ==========================================================================================


def head_of(name: str, kind: str = "model") -> Record:
    """Return what the record of a model begins with."""
    library, _, model = name.partition("/")
    return {"kind": kind, "zoo": library, "model": model, "version": common.version_of(library)}


def training_of(name: str) -> tuple[Training, Step]:
    """Return the training of a model in this process, which is for it alone, and its dense step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    training = Training(SAMPLES[name]())
    return training, training.step()


def measure(name: str) -> Record:
    """Return the figures of a model, with what was raised in place of what is missing."""
    start, record = time.perf_counter(), Record()
    try:
        training, dense = training_of(name)
        record["kib"] = kib(dense.stored_bytes)
        record["noise"] = rounded(cosine(training.step_on(lambda x: x.bfloat16().to(x.dtype)).grads, dense.grads))
        record["last_place"] = significant(largest_difference(training.step_on(next_number).outputs, dense.outputs))
    except Exception as error:
        return record | {"error": text_of(error), "seconds": round(time.perf_counter() - start, 1)}
    with suppress(Exception), torch.autocast("cpu", torch.bfloat16):  # not every model runs so
        record["bfloat16"] = rounded(cosine(training.step().grads, dense.grads))
    before = traits(training.model)
    for preset in PRESETS:
        try:
            found = compare(training, preset, dense)
        except Exception as error:
            found = {"error": text_of(error)}
        after = traits(training.model)
        changed = [trait for trait in dict.fromkeys((*before, *after)) if before.get(trait) != after.get(trait)]
        if changed:
            found["left"] = ", ".join(changed[:3])
        record |= {f"{preset}_{key}": value for key, value in found.items()}
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def compare(training: Training, preset: Any, dense: Step) -> Record:
    """Return the fields of a record for one preset."""
    with training.converted(Config(preset)) as layers:
        step = training.step()
    return {
        "layers": layers,
        "kib": kib(step.stored_bytes),
        "cosine": rounded(cosine(step.grads, dense.grads)),
        "forward": significant(largest_difference(step.outputs, dense.outputs)),
        "loss": significant(abs(step.loss - dense.loss) / abs(dense.loss) if step.loss != dense.loss else 0.0),
    }


def cause(name: str) -> Record:
    """Return the cosines of a model's gradient with ``balanced``, and with eight bits for each of its operators."""
    record, preset, (training, dense) = Record(), config.PRESETS["balanced"], training_of(name)
    operators = [operator for operator, keep in preset.items() if keep.bits != EIGHT]
    for changed in ([], *([operator] for operator in operators), operators):
        rules = {f"type:{operator}": replace(preset[operator], bits=EIGHT) for operator in changed}
        with suppress(ValueError):  # the model has no such operator
            with training.converted(Config("balanced", rules=rules)):
                step = training.step()
            label = changed[0] if len(changed) == 1 else "all" if changed else "balanced"
            record[label] = rounded(cosine(step.grads, dense.grads))
            record[f"{label}_kib"] = kib(step.stored_bytes)
    return record


def run_all(task: Callable[[str], Record], names: Sequence[str], workers: int) -> Iterator[tuple[str, Record]]:
    """Yield names and what ``task`` finds of them as it comes, so many processes at a time."""
    waiting, running = list(reversed(names)), dict[Connection, tuple[str, Running, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            started = common.start_in_fork(task, name)
            running[started[1]] = name, started, time.monotonic()
        wait(list(running), timeout=1)
        for ours, (name, started, since) in list(running.items()):
            late = time.monotonic() - since > LIMIT_S
            if late or ours.poll():
                [record] = common.finish(0 if late else 5, [started])
                if late and record.get("error", "").startswith("took over"):
                    record["error"] = f"It took over {LIMIT_S} s."
                del running[ours]
                yield name, record


def problems(records: Records) -> Iterator[str]:
    """Yield a sentence for each model that failed or was changed, or whose outputs or gradients are far off."""
    for record in records:
        name, steady = record["model"], (record.get("noise") or 0) > STEADY
        rounding = min((float(record[key]) for key in ("noise", "bfloat16") if record.get(key) is not None), default=1)
        if "error" in record:
            yield f"{name}: {record['error']}"
        for preset in PRESETS:
            found = {key.removeprefix(f"{preset}_"): value for key, value in record.items() if key.startswith(preset)}
            for kind in ("error", "left"):
                if kind in found:
                    yield f"{name}, {preset}, {kind}: {found[kind]}"
            if steady and found.get("forward", 0) > max(FORWARD_OFF, PLACES * record.get("last_place", 0)):
                yield f"{name}, {preset}: outputs differ by {found['forward']}"
            if "cosine" in found and found["cosine"] is None:
                yield f"{name}, {preset}: there is no gradient, or one that is not finite"
            elif steady and found.get("cosine", 1) < min(LEAST_COSINE[preset], rounding):
                yield f"{name}, {preset}: the gradient's cosine with the dense one is {found['cosine']}"


def worst(records: Records, count: int) -> list[str]:
    """Return the models with the lowest cosines with ``balanced``, of those that are not chaotic."""
    measured = [r for r in records if all(r.get(f"{preset}_cosine") is not None for preset in PRESETS)]
    steady = sorted((r for r in measured if r["noise"] >= STEADY), key=lambda r: float(r["balanced_cosine"]))
    return [f"{r['zoo']}/{r['model']}" for r in steady[:count]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models that the file lacks, print the worst and what is wrong."""
    parser = common.parser_for(__doc__, "zoo")
    parser.add_argument("--models", nargs="+", default=["*"], metavar="PATTERN", help="of names, as timm/conv*")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--causes", action="store_true", help="why the worst models of the file are off")
    args = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU could not be used in processes that fork from this one
    torch.set_num_threads(1)
    for library in ("timm", "transformers"):  # once, and not in each process
        with suppress(ImportError):
            importlib.import_module(library)
    file = common.RecordFile(args.out, ("kind", "zoo", "model"), args.again)
    facts = {"gpu": "none", **common.software()}
    names = [n for n in SAMPLES if any(fnmatchcase(n, p) or fnmatchcase(n.partition("/")[2], p) for p in args.models)]
    kind, task = "model", measure
    if args.quick:
        names = [name for name in names if name in QUICK]
    if args.causes:
        names, kind, task = worst(list(file.records.values()), WORST), "cause", cause
    lacking = [name for name in names if file.lacks(head_of(name, kind))]
    for name, record in run_all(task, lacking, args.workers):
        file.add({**head_of(name, kind), **record, **facts})
        print(f"{name}: {record}", flush=True)
    records = [file.records[file.key(head_of(name, kind))] for name in names]
    if args.causes:
        labels = "balanced", "linear", "convolution", "activation", "norm", "all"
        show("Eight bits in place of four", records, ["model", *labels])
        return 0
    columns = "zoo model noise bfloat16 balanced_cosine max_cosine kib balanced_kib max_kib"
    furthest = sorted((r for r in records if r.get("max_cosine") is not None), key=lambda r: r["max_cosine"])
    show("Lowest cosines, max", furthest[:12], columns.split())
    wrong = list(problems(records))
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
