"""What the presets keep of some 370 models of timm and transformers, and how close their gradients are to exact ones.

    python examples/benchmarks/zoo.py --workers 15 --out zoo.json
    python examples/benchmarks/zoo.py --quick                                     # a dozen small ones
    python examples/benchmarks/zoo.py --models "timm/conv*" "*BertFor*"
    python examples/benchmarks/zoo.py --causes zoo.json --workers 15 --out zoo_causes.json

On the CPU, in fp32, with small models and inputs (``zoo_models.py``): no optimizer runs, and nothing is downloaded.
Each model has a process of its own and at most a minute and a half. A record is written as soon as it is there, to the
file of ``--out`` with the ending ``.jsonl``; models that are in that file already are not run again, so that a run that
was cut short goes on where it was. In the end all records are written to ``--out``.

Each model makes a training step dense, one dense with rounded inputs, and for each preset two steps converted: one with
the probes that the callback opens in its first batch, and one that is measured. All begin with the same parameters,
buffers and random numbers. Recorded are

``kib``, ``balanced_kib``, ``max_kib``
    What backward keeps, by ``SavedTensorMeter``, dense and converted. Tensors of fewer than 1024 values are left alone,
    in place of 65536 as otherwise, and linear layers have no few rows: inputs are small here.
``noise``
    Cosine of the whole gradient with that of the same dense model whose inputs, and what its embeddings return, are
    rounded to bfloat16 (by 2^-9 to 2^-8). It is far from 1 where a model is chaotic at its start: there no gradient
    means much, nor does its cosine with another one.
``last_place``
    Largest difference of an output of the same dense model when each of these is the next larger number.
``bfloat16``
    Cosine of the whole gradient with that of the same dense model under autocast to bfloat16, as most are trained.
``.._cosine``
    Cosine of the whole gradient with the dense one.
``.._forward``, ``.._loss``
    Largest difference of an output from the dense one over the largest output, 0 if they are equal bit by bit, and the
    relative difference of the loss.
``.._left``
    What ``revert`` left: classes, attributes, hooks, keys of the ``state_dict``.
``.._error``, ``error``
    What was raised, with a preset or without any.

With ``--causes``, the models of a file of records whose gradients with ``balanced`` are furthest off, of those that are
not chaotic, make that step again with eight bits for one operator after the other, and for all of them.

The program ends with an error if something was raised or left behind, a forward differs by more than rounding does, or
a gradient is far off that should not be.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":  # before transformers is imported, which others do
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

from examples.benchmarks import summaries
from examples.benchmarks.common import environment, write_records
from examples.benchmarks.summaries import Record, Records
from examples.benchmarks.zoo_models import TIMM, TRANSFORMERS, Sample, timm_sample, transformers_sample
from lightning_actprune import config
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Config, PresetName
from lightning_actprune.convert import attached_saved, convert_layers, is_converted, new_owner, revert

PRESETS: tuple[PresetName, ...] = summaries.ZOO_PRESETS
LIMIT_S = 90
"""A model takes seconds; one that hangs must not cost the others their records."""
SAMPLES: dict[str, Callable[[], Sample]] = {
    **{f"timm/{name}": partial(timm_sample, name, built) for name, built in TIMM.items()},
    **{f"transformers/{name}": partial(transformers_sample, name, tiny) for name, tiny in TRANSFORMERS.items()},
}
QUICK = (
    *("timm/test_byobnet", "timm/test_convnext", "timm/test_efficientnet", "timm/test_nfnet", "timm/test_vit"),
    *("timm/mobilenetv3_small_050", "transformers/LlamaForCausalLM", "transformers/BertForMaskedLM"),
    *("transformers/GPT2LMHeadModel", "transformers/T5ForConditionalGeneration", "transformers/MambaForCausalLM"),
    "transformers/SwinForImageClassification",
)
"""Small models of different kinds."""
FORWARD_OFF = 1e-5
"""Above what rounding in fp32 comes to, where a model does not amplify it."""
PLACES = 2
"""Last places of the inputs by which a model that does may be off."""
PRESET, EIGHT = config.PRESETS["balanced"], 8
WORST = 16
"""Models whose causes are looked for."""
LEAST_COSINE = {"balanced": 0.99, "max": 0.6}
"""Of a gradient that rounding moves by less."""


Task = Callable[[str], Record]
"""Returns the record of a model."""


@dataclass
class Step:
    """What a training step gave.

    Args:
        outputs: All tensors that the model returned.
        loss: Its loss.
        grads: Gradients by the names of parameters.
        dense_bytes: What the dense model keeps for backward.
        stored_bytes: What this one keeps.
    """

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
        """Return what the model returns, and its loss."""
        output = self.model(*self.sample.args, **self.sample.kwargs)
        return output, self.sample.loss(output)

    def step(self) -> Step:
        """Return what a step gives."""
        self.begin()
        with SavedTensorMeter(self.model, self.sample.inputs()) as meter:
            output, loss = self.forward()
        loss.backward()
        outputs = [leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        report = meter.report()
        return Step(outputs, loss.item(), grads, report.dense_bytes, report.stored_bytes)

    def step_in_bfloat16(self) -> Step:
        """Return what a step gives under autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.step()

    def step_on(self, change: Callable[[Tensor], Tensor]) -> Step:
        """Return what a step gives whose inputs, and what embeddings return, are changed."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return change(output)

        sample = self.sample
        handles = [m.register_forward_hook(hook) for m in self.model.modules() if type(m) is nn.Embedding]
        self.sample = replace(sample, args=tree_map(changed, sample.args), kwargs=tree_map(changed, sample.kwargs))
        try:
            return self.step()
        finally:
            self.sample = sample
            for handle in handles:
                handle.remove()

    @contextmanager
    def converted(self, config: Config) -> Iterator[int]:
        """Convert the model as the callback does, its first batch included, and return how many layers were."""
        owner = new_owner("zoo")
        report = convert_layers(self.model, config, owner)
        try:
            saved = attached_saved(self.model, owner)
            assert saved is not None
            saved.min_values = summaries.ZOO_MIN_VALUES
            for layer in filter(is_converted, self.model.modules()):
                layer._state = replace(layer._state, keep=replace(layer.keep, fine_rows=0))
            self.begin()
            with (
                RetentionProbe(self.model, self.sample.inputs()) as retention,
                EnergyProbe(self.model, eagerly=True) as energy,
            ):
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


def to_bfloat16(x: Tensor) -> Tensor:
    """Return ``x`` with a mantissa of eight bits."""
    return x.bfloat16().to(x.dtype)


def next_number(x: Tensor) -> Tensor:
    """Return the next larger number of each."""
    at = x.detach()
    return x + (at.nextafter(torch.full_like(at, math.inf)) - at)


def traits(model: nn.Module) -> dict[str, Any]:
    """Return of each module its class, its attributes and its hooks, and the keys of the ``state_dict``."""
    found: dict[str, Any] = {"keys of the state_dict": list(model.state_dict())}
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = vars(module)
        found[f"class of {name!r}"] = type(module)
        found[f"attributes of {name!r}"] = set(attributes)
        hooks = {key: list(map(id, value.values())) for key, value in attributes.items() if key.endswith("_hooks")}
        found[f"hooks of {name!r}"] = hooks
    return found


def cosine(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Return the cosine of two gradients.

    Raises:
        ValueError: If one has parameters that the other lacks.
    """
    if found.keys() != right.keys():
        names = sorted(found.keys() ^ right.keys())
        raise ValueError(f"Only one of the models has gradients of {', '.join(names[:3])} ({len(names)} in all).")
    along = ours = theirs = 0.0
    for name, grad in right.items():
        along += (found[name] * grad).sum(dtype=torch.float64).item()
        ours += found[name].square().sum(dtype=torch.float64).item()
        theirs += grad.square().sum(dtype=torch.float64).item()
    return along / math.sqrt(ours * theirs) if ours * theirs else math.nan


def largest_difference(found: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest difference of two lists of outputs, over the largest value of each, 0 if they are equal.

    Raises:
        ValueError: If they are not alike in number, shape or type, or have NaN at different places.
    """
    kinds = [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in (found, right)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"Outputs are {kinds[0]}, and {kinds[1]} dense.")
    largest = 0.0
    for ours, theirs in zip(found, right, strict=True):
        if not torch.equal(ours.isnan(), theirs.isnan()):
            raise ValueError("Outputs are NaN where they are not dense, or the other way round.")
        difference = (ours.double() - theirs.double()).nan_to_num(0).abs().max().item() if ours.numel() else 0.0
        largest = max(largest, difference / theirs.double().nan_to_num(0).abs().max().item() if difference else 0.0)
    return largest


def measure(name: str) -> Record:
    """Return the record of a model, with what was raised in place of what it lacks."""
    library, _, model = name.partition("/")
    record: Record = {"zoo": library, "model": model}
    start = time.perf_counter()
    with suppress(importlib.metadata.PackageNotFoundError):
        record["version"] = importlib.metadata.version(library)
    try:
        torch.manual_seed(0)
        training = Training(SAMPLES[name]())
        dense = training.step()
        record["kib"] = kib(dense.stored_bytes)
        record["noise"] = rounded(cosine(training.step_on(to_bfloat16).grads, dense.grads))
        record["last_place"] = significant(largest_difference(training.step_on(next_number).outputs, dense.outputs))
    except Exception as error:
        return record | {"error": text_of(error), "seconds": round(time.perf_counter() - start, 1)}
    with suppress(Exception):  # not every model runs so
        record["bfloat16"] = rounded(cosine(training.step_in_bfloat16().grads, dense.grads))
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


def compare(training: Training, preset: PresetName, dense: Step) -> Record:
    """Return what a record says of one preset."""
    with training.converted(Config(preset)) as layers:
        step = training.step()
    forward = largest_difference(step.outputs, dense.outputs)
    loss = abs(step.loss - dense.loss) / abs(dense.loss) if step.loss != dense.loss else 0.0
    return {
        "layers": layers,
        "kib": kib(step.stored_bytes),
        "cosine": rounded(cosine(step.grads, dense.grads)),
        "forward": significant(forward),
        "loss": significant(loss),
    }


def cause(name: str) -> Record:
    """Return the cosines of a model's gradient with ``balanced``, and with eight bits for each of its operators."""
    library, _, model = name.partition("/")
    record: Record = {"zoo_causes": library, "model": model}
    torch.manual_seed(0)
    training = Training(SAMPLES[name]())
    dense = training.step()
    operators = [operator for operator, keep in PRESET.items() if keep.bits != EIGHT]
    for changed in ([], *([operator] for operator in operators), operators):
        rules = {f"type:{operator}": replace(PRESET[operator], bits=EIGHT) for operator in changed}
        with suppress(ValueError):  # the model has no such operator
            with training.converted(Config("balanced", rules=rules)):
                step = training.step()
            label = changed[0] if len(changed) == 1 else "all" if changed else "balanced"
            record[label] = rounded(cosine(step.grads, dense.grads))
            record[f"{label}_kib"] = kib(step.stored_bytes)
    return record


def kib(nbytes: int) -> float:
    """Return bytes as records have them."""
    return round(nbytes / 1024, 1)


def rounded(value: float) -> float | None:
    """Return a cosine as records have it, ``None`` if there is none."""
    return None if math.isnan(value) else round(value, 5)


def significant(value: float) -> float:
    """Return a difference as records have it."""
    return float(f"{value:.1e}")


def text_of(error: BaseException) -> str:
    """Return an error as records have it."""
    return " ".join(f"{type(error).__name__}: {error}".split()).partition(" HINT:")[0][:200]


def serve(task: Task, name: str, connection: Connection) -> None:
    """Measure a model in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    connection.send(task(name))
    connection.close()


def run_all(task: Task, names: Iterable[str], workers: int) -> Iterator[Record]:
    """Yield what ``task`` finds of models as it comes, so many processes at a time."""
    context, waiting = multiprocessing.get_context("fork"), list(reversed(list(names)))
    running: dict[Connection, tuple[Any, str, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=serve, args=(task, name, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = process, name, time.monotonic()
        wait(list(running), timeout=1)
        for connection, (process, name, started) in list(running.items()):
            if connection.poll():
                record = received(connection, process, name)
            elif time.monotonic() - started > LIMIT_S:
                process.kill()
                record = failed(name, f"It took over {LIMIT_S} s.")
            else:
                continue
            process.join()
            connection.close()
            del running[connection]
            yield record


def received(connection: Connection, process: Any, name: str) -> Record:
    """Return the record that a process has sent, or what became of it."""
    try:
        record: Record = connection.recv()
    except EOFError:
        process.join()
        return failed(name, f"Its process ended with status {process.exitcode}.")
    return record


def failed(name: str, error: str) -> Record:
    """Return the record of a model of which nothing is known."""
    library, _, model = name.partition("/")
    return {"zoo": library, "model": model, "error": error}


def chosen(patterns: Sequence[str]) -> list[str]:
    """Return the names of models that match one of ``patterns``, with or without the name of their library."""
    return [
        name
        for name in SAMPLES
        if any(fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[2], pattern) for pattern in patterns)
    ]


def problems(records: Records) -> Iterator[str]:
    """Yield a sentence for each model that failed or was changed, or whose outputs or gradients are far off."""
    for record in records:
        name, steady = record["model"], (record.get("noise") or 0) > summaries.ZOO_STEADY
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
            elif steady and found.get("cosine", 1) < min(LEAST_COSINE[preset], summaries.zoo_rounding(record)):
                yield f"{name}, {preset}: the gradient's cosine with the dense one is {found['cosine']}"


def line(record: Record) -> str:
    """Return what is printed of a model when it is done."""
    name, noise, bfloat16, *others = summaries.zoo_cells(record)
    cells = [f"rounded inputs {noise}", f"bfloat16 {bfloat16}"] if "noise" in record else []
    for number, preset in enumerate(PRESETS):
        if f"{preset}_kib" in record:
            cells.append(f"{preset} {others[number]} with {others[number + len(PRESETS)]}")
    cells += [record[key] for key in record if key.endswith(("error", "left"))]
    return f"{name}: {', '.join([*cells, str(record.get('seconds', LIMIT_S))])} s"


def read(path: Path) -> Records:
    """Return the records that a run has written so far."""
    if not path.is_file():
        return []
    records = []
    for text in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):  # the last one, if the run was cut short
            records.append(json.loads(text))
    return records


def find_causes(records: Records, workers: int, out: Path) -> int:
    """Write, and print, why the gradients of the worst models are off."""
    names = [summaries.zoo_name(record) for record in summaries.zoo_worst(records, WORST)]
    found = {record["model"]: record | environment() for record in run_all(cause, names, workers)}
    write_records(out, [found[name.partition("/")[2]] for name in names])
    Console(width=160).print(summaries.zoo_causes(list(found.values())).rich())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the models that are asked for, write the records, print the worst and what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["*"], metavar="PATTERN", help="of names, as timm/conv*")
    parser.add_argument("--quick", action="store_true", help="a dozen small models")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--causes", type=Path, metavar="RECORDS", help="why some models of a former run are off")
    parser.add_argument("--out", type=Path, default=Path("zoo.json"))
    args = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU could not be used in processes that fork from this one
    torch.set_num_threads(1)
    for library in ("timm", "transformers"):  # once, and not in each process
        with suppress(ImportError):
            importlib.import_module(library)
    if args.causes is not None:
        return find_causes(json.loads(args.causes.read_text()), args.workers, args.out)
    names = [name for name in chosen(args.models) if not args.quick or name in QUICK]
    unfinished = args.out.with_suffix(".jsonl")
    known = {summaries.zoo_name(record): record for record in read(unfinished)}
    facts = environment()
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    with unfinished.open("a") as file:
        for record in run_all(measure, [name for name in names if name not in known], args.workers):
            known[summaries.zoo_name(record)] = record = record | facts
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(line(record), flush=True)
    records = [known[name] for name in SAMPLES if name in known]
    write_records(args.out, records)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for summary in summaries.zoo(records):
        console.print(summary.rich())
    found = list(problems([known[name] for name in names]))
    for problem in found:
        print(problem)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
