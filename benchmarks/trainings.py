"""Training study: the same training, dense and with compressed activations, over several seeds, on one device.

    python benchmarks/trainings.py --recipe vit --root data/cifar10 --settings dense max
    python benchmarks/trainings.py --recipe gpt --settings dense balanced max recompute --seeds 0 1
    python benchmarks/trainings.py --task resmlp --root data/cifar10 --epochs 12 --settings dense 0.5:16 0.6:32 0:32:4
    python benchmarks/trainings.py --task gpt --settings 0.8:32 0.8:32:16:swap 0.8:32:16:unbiased --gradients 7
    python benchmarks/trainings.py --task gpt --packages --clip 1 --epochs 60 --grow context --settings dense max
    python benchmarks/trainings.py --task resmlp --quick --settings dense max 0.6:32

Tasks: `resmlp`, `vit` and `resnet` classify images, `gpt` continues text byte by byte. `--recipe` sets the options of a
training that `docs/trainings.md` shows; options after it change it.

A setting is one of

    dense              keeps everything
    NAME[:SPARSITY]    a preset of the package on the whole model, such as `max` or `max:0.5`
    error:BOUND        bits by the error of the gradient, such as `error:0.1`, as `max_error` of a fit chooses them: at
                       the start, and again where they err too much
    S:B[:BITS[:SELECTION[:ENERGY]]]
                       linear layers of the blocks alone (convolutions where blocks have these): sparsity, block size,
                       bits of a kept value (16: as it is), `largest`, `swap` or `unbiased`, share of the energy that
                       may be dropped

and may end with rules for single layers: `max+blocks.*.attn.proj=4+type:linear=3`. `0.6:32` is the paper's method.

Each run appends one record to `--out` and is not repeated if its record is there. Several processes may share the file,
for example one for each GPU with seeds of its own (`CUDA_VISIBLE_DEVICES`).

The seed fixes weights, order and augmentation, for all settings alike. On a GPU the whole step is captured in one CUDA
graph, so the speed of the host does not matter. `accuracy` is the percentage of correctly classified test images; for
text, the negative validation loss per byte.

With `--gradients N`, the model is trained densely for N epochs. Then the weight gradients of one batch are compared
with the exact ones, by kind of layer:

    cosine = <exact, ours> / (|exact| |ours|)        norm_ratio = |ours| / |exact|

With `--errors`, one model is trained densely. At the start, at the points at which a fit measures bits again, and at
the end, the gradient of one batch is compared with that of each setting: its predicted and its actual error, as
`max_error` bounds it, and the share of the dense bytes that is kept.

With `--grow AXIS` nothing is trained. The largest size on the axis is searched whose step needs no more memory than
that of the dense model, and the number of epochs that take the time of the dense training. Learning rates follow the
size: 1/width (arXiv 2203.03466), depth^-0.5 (arXiv 2310.02244), batch^0.5 (arXiv 2205.10287).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import math
import re
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import MIB, RESULTS, environment, read_records, write_records
from benchmarks.errors import squares_of
from benchmarks.training_data import Images, Text, fingerprint
from examples.classifier import cosine_factor, parameter_groups
from examples.models import LANGUAGE_MODELS, MODELS, build_model
from lightning_actprune import Keep, config, convert, revert
from lightning_actprune.analysis.first_batch import EnergyProbe, RetentionProbe
from lightning_actprune.analysis.measured_bits import TOO_LARGE, choose_rules
from lightning_actprune.analysis.memory import LayerFootprint, MemoryReport, SavedTensorMeter
from lightning_actprune.analysis.second_backward import SecondBackward, mean_square
from lightning_actprune.callbacks.first_batch import points_of
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Rule
from lightning_actprune.convert import is_converted, mark_layers
from lightning_actprune.operators import recompute
from lightning_actprune.operators.base import CompressedLayer
from lightning_actprune.operators.registry import layers

Batch = tuple[Tensor, Tensor]
Record = dict[str, Any]
Data = Images | Text
HEAD = "head"
"""Name of the last layer of all models."""
TASKS = {
    "resmlp": ("resmlp_s12", 256),
    "vit": ("vit_8x384", 256),
    "resnet": ("resnet_9x64", 256),
    "gpt": ("gpt_6x384", 64),
}
"""Model and batch size by task."""
STRONG = "--strong --task"
RECIPES = {
    "resnet": f"{STRONG} resnet --epochs 60",
    "vit": f"{STRONG} vit --epochs 100 --lr 4e-4",
    "resmlp": f"{STRONG} resmlp --epochs 100 --compile",
    "classes": f"{STRONG} resmlp --epochs 100 --compile --turned",
    # Without a bound for its gradients, the loss of this GPT jumps, also dense.
    "gpt": "--task gpt --packages --clip 1 --dim 768 --depth 12 --context 1024 --batch-size 16 --epochs 163 --lr 3e-4"
    " --compile",
    "first": f"{STRONG} vit --part first --epochs 60 --lr 4e-4 --save first.pt",
    "tuned": "--task vit --part second --epochs 15 --lr 1e-4 --start first.pt",
    "lora": "--task vit --part second --epochs 15 --lr 1e-3 --start first.pt --lora",
    "text": "--task gpt --packages --clip 1 --epochs 60 --save text.pt",
    "tuned-text": "--task gpt --clip 1 --epochs 10 --lr 3e-4 --start text.pt",
}
"""Options by name; `tuned` and `lora` begin with the weights of `first`, `tuned-text` with those of `text`."""
QUICK = "--epochs 2 --dim 64 --depth 1 --batch-size 8 --limit-batches 2 --context 32 --settings dense max --seeds 0"
SIZES = {
    "vit": {"dim": range(384, 1537, 64), "depth": range(8, 65), "patch-size": (4, 2, 1),
            "batch-size": range(256, 4097, 64)},
    "gpt": {"dim": range(384, 1537, 64), "depth": range(6, 49), "context": range(256, 4097, 64),
            "batch-size": range(64, 1025, 16)},
}  # fmt: skip
"""Sizes that `--grow` tries by task and axis; the first one is the dense model's."""
EXPONENTS = {"dim": -1.0, "depth": -0.5, "batch-size": 0.5}
"""How the learning rate follows the size."""
WARMUP_STEPS, WARMUP = 4, 0.05
"""Eager steps before the capture, and the share of steps over which the learning rate rises."""

# === Settings =====================================================================================

PRESET = re.compile(rf"({'|'.join(config.PRESETS)})(?::(0?\.\d+))?")
ERROR = re.compile(r"error:(0?\.\d+)")
PRUNED = re.compile(r"(0|0?\.\d+):(\d+)(?::(2|3|4|8|16))?(?::(largest|swap|unbiased))?(?::(0?\.\d+))?")


def checked(setting: str) -> str:
    """Return `setting` if it is one; for argparse."""
    base, *rules = setting.split("+")
    is_base = (base == "dense" and not rules) or any(known.fullmatch(base) for known in (PRESET, ERROR, PRUNED))
    if not is_base or not all(re.fullmatch(r"[^=]+=(2|3|4|8|16)", rule) for rule in rules):
        raise argparse.ArgumentTypeError(f"must be `dense`, a preset or `S:B:BITS`, see --help; got {setting!r}")
    return setting


def keep_of(bits: str | None, **options: Any) -> Keep:
    """Return what to keep with `bits` as a setting writes them."""
    return Keep(None if bits in (None, "16") else int(bits), min_rows_for_low_bits=0, **options)


def compress(model: nn.Module, setting: str, batch: Batch, precision: str) -> list[str]:
    """Convert the layers that `setting` names.

    Returns:
        The kinds of layers that stay dense, since something else keeps their input.
    """
    base, *texts = setting.split("+")
    revert(model)
    if base == "dense":
        return []
    rules: dict[str, Rule] = {pattern: keep_of(bits) for pattern, bits in (text.split("=") for text in texts)}
    preset, error = PRESET.fullmatch(base), ERROR.fullmatch(base)
    if error:
        rules |= choose_rules(model, lambda: training_loss(model, batch, precision), float(error[1]))
        report = convert(model, "max", rules=rules)
    elif preset:
        if preset[1] == "recompute":
            # A capture forbids to ask for the state of random generators, and no model here draws from them.
            recompute.checkpoint = partial(checkpoint, preserve_rng_state=False)
        report = convert(model, preset[1], sparsity=float(preset[2]) if preset[2] else None, rules=rules)  # type: ignore[arg-type]
    else:
        sparsity, block_size, bits, selection, energy = PRUNED.fullmatch(base).groups()  # type: ignore[union-attr]
        keep = keep_of(bits, sparsity=float(sparsity), block_size=int(block_size), selection=selection or "largest",
                       max_dropped_energy=float(energy or 1))  # fmt: skip
        names = [fqn for fqns, _ in layers(model) for fqn in fqns]
        rules |= {fqn: None for fqn in names if not fnmatchcase(fqn, "blocks.*")}
        rules["type:linear"] = keep
        if any(isinstance(layer, nn.Conv2d) for layer in model.blocks.modules()):
            # Inputs of these convolutions are outputs of ReLUs, which would keep them. So ReLUs keep signs alone.
            rules |= {"type:convolution": keep, "type:activation": Keep(4)}
        report = convert(model, rules={**rules, "*": None})
    retention, energies = RetentionProbe(model, batch), EnergyProbe(model)
    with buffers_restored(model), retention, energies:
        training_loss(model, batch, precision)
    dense_kinds = sorted({kind(layer.fqn) for layer in retention.apply(report)})
    energies.apply(report)
    return dense_kinds


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Undo what forwards inside do to buffers, such as statistics of batch norms."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def block_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers and convolutions of the blocks by name."""
    modules = model.named_modules()
    return {name: m for name, m in modules if isinstance(m, (nn.Linear, nn.Conv2d)) and name.startswith("blocks.")}


def kind(fqn: str) -> str:
    """Return the name that layers of all blocks with the same task share: `blocks.3.attn.qkv` is an `attn.qkv`."""
    return re.sub(r"^blocks\.\d+\.", "", fqn)


def footprint(model: nn.Module, batch: Batch, precision: str) -> MemoryReport:
    """Return what the model keeps in one forward."""
    eager = torch.compiler.set_stance("force_eager")
    with buffers_restored(model), eager, SavedTensorMeter(model, batch) as meter:
        training_loss(model, batch, precision)
    return meter.report()


def bits_per_value(rows: Sequence[LayerFootprint] | MemoryReport, precision: str) -> float:
    """Return the stored bits, headers and positions included, of each value that the dense layers would keep."""
    dense_bits = 16 if precision == "bf16" else 32
    parts = [rows] if isinstance(rows, MemoryReport) else list(rows)
    dense = sum(part.dense_bytes for part in parts)
    return round(dense_bits * sum(part.stored_bytes for part in parts) / dense, 4) if dense else dense_bits


def stored_bits(model: nn.Module, setting: str, batch: Batch, precision: str) -> float:
    """Return the bits per value of the whole model with a preset, else those of the blocks' layers that are pruned."""
    report = footprint(model, batch, precision)
    if PRESET.match(setting) or ERROR.match(setting):
        return bits_per_value(report, precision)
    return bits_per_value([row for row in report.rows if row.fqn.startswith("blocks.")], precision)


# === Model and data ===============================================================================


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable update of low rank, as PEFT builds it."""

    def __init__(self, base: nn.Linear, rank: int = 16, alpha: int = 32) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer with its update."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def add_lora(model: nn.Module) -> None:
    """Freeze `model` except its head, and give its other linear layers updates of low rank."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != HEAD:
            model.set_submodule(name, LoRALinear(layer))
    model.get_submodule(HEAD).requires_grad_()


@dataclass(frozen=True)
class Recipe:
    """How a model is trained; `clip` is the norm to which gradients are scaled down, `compile` a backend."""

    epochs: int
    batches: int
    batch: int
    lr: float
    weight_decay: float
    precision: str
    compile: str | None
    clip: float | None


@dataclass(frozen=True)
class Study:
    """What the runs of one command share: model, data and recipe."""

    task: str
    model: str
    options: dict[str, int | None]
    data: Data
    recipe: Recipe
    start: Path | None
    lora: bool

    def build(self, seed: int) -> nn.Module:
        """Return the model with the weights of `seed`, or those to begin with except the head's."""
        torch.manual_seed(seed)
        options = {name: value for name, value in self.options.items() if value is not None}
        model = build_model(self.model, **self.data.shape, **options)
        if self.start is not None:
            weights = torch.load(self.start, map_location="cpu", weights_only=True)
            weights |= {name: value for name, value in model.state_dict().items() if name.startswith(f"{HEAD}.")}
            model.load_state_dict(weights)
        if self.lora:
            add_lora(model)
        return model.to(self.data.device)

    def key(self, figure: str) -> Record:
        """Return what identifies the study in the records."""
        start = None if self.start is None else fingerprint(self.start.read_bytes())
        head = {"figure": figure, "task": self.task, "model": self.model, **self.options, **self.data.facts}
        return {**head, **asdict(self.recipe), "start": start, "lora": self.lora or None}


def open_study(args: argparse.Namespace, data: Data | None = None) -> Study:
    """Return the study that the command line asks for, with its data loaded unless they are given."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # cuDNN's attention, which torch 2.11 prefers on an H200, made the loss of a captured dense ViT NaN.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model, batch = TASKS[args.task]
    if data is None and args.task == "gpt":
        data = Text(args.root, device, args.context, args.packages)
    data = data or Images(args.root, device, args.strong, args.part, args.turned)
    size = {"dim": args.dim, "depth": args.depth}
    own = {"gpt": {"context": args.context}, "resnet": {}}.get(args.task, {"patch_size": args.patch_size})
    batch = args.batch_size or batch
    batches = min(data.epoch_batches(batch), args.limit_batches or sys.maxsize)
    how = args.lr, args.weight_decay, args.precision, args.compile, args.clip
    recipe = Recipe(args.epochs, batches, batch, *how)
    return Study(args.task, args.model or model, {**own, **size}, data, recipe, args.start, args.lora)


# === Training =====================================================================================


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context; it caches no casts, which must not outlive a capture."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def training_loss(model: nn.Module, batch: Batch, precision: str) -> Tensor:
    """Return the cross-entropy, one per image or one per byte."""
    inputs, targets = batch
    with autocast(inputs.device, precision):
        mixed = targets.is_floating_point()  # shares of classes
        return F.cross_entropy(model(inputs).flatten(0, -2), targets if mixed else targets.flatten())


class TrainStep:
    """One step of AdamW over static buffers, replayed from a CUDA graph where there is a GPU."""

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, before: TrainStep | None = None) -> None:
        cuda = data.device.type == "cuda"
        self.model, self.data, self.recipe = model, data, recipe
        self.choices = first_choices(data, recipe)
        self.lr = torch.tensor(recipe.lr, device=data.device)
        self.loss_sum = torch.zeros((), device=data.device)
        groups = parameter_groups(model, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, capturable=cuda, fused=cuda)
        if before is not None:
            self.optimizer.load_state_dict(before.optimizer.state_dict())
            self.loss_sum = before.loss_sum
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
        self.peak_bytes: int | None = None
        self.graph = self.capture() if cuda else None

    def __call__(self, choices: Tensor, lr: float) -> None:
        """Train on the samples that `choices` name at the learning rate `lr`."""
        self.choices.copy_(choices)
        self.lr.fill_(lr)
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def step(self) -> None:
        """Run the step eagerly."""
        loss = training_loss(self.model, self.data.batch(self.choices), self.recipe.precision)
        loss.backward()
        if self.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()

    def capture(self) -> torch.cuda.CUDAGraph:
        """Return a graph of one step; weights, buffers and optimizer state are then as they were before."""
        weights = *self.model.parameters(), *self.model.buffers()
        tensors = (
            *weights,
            self.loss_sum,
            *(value for state in self.optimizer.state.values() for value in state.values()),
        )
        is_first = not self.optimizer.state
        initial = [tensor.detach().clone() for tensor in tensors]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.peak_bytes = torch.cuda.max_memory_allocated() - sum(value.nbytes for value in initial[: len(weights)])
        with torch.no_grad():
            for tensor, value in zip(tensors, initial, strict=True):
                tensor.copy_(value)
        for state in self.optimizer.state.values() if is_first else ():
            for value in state.values():
                value.zero_()
        return graph


def first_choices(data: Data, recipe: Recipe) -> Tensor:
    """Return the choices of one step that depend on no seed, for what comes before the training."""
    return data.draw(1, recipe.batch, torch.Generator().manual_seed(0))[0]


class Follower:
    """Looks at the gradient of one batch at points of a training: at the start, where a fit measures bits, at the end.

    Args:
        model: The model that is trained.
        study: The study.
    """

    def __init__(self, model: nn.Module, study: Study) -> None:
        self.model, self.precision = model, study.recipe.precision
        self.batch = study.data.batch(first_choices(study.data, study.recipe))
        self.last = study.recipe.epochs * study.recipe.batches - 1
        self.points = {0, *points_of(self.last + 1), self.last}

    def change(self, step: int) -> bool:
        """Return True if bits have changed after so many steps."""
        raise NotImplementedError

    def backward(self) -> float:
        """Leave the gradient in the parameters, and return its predicted error."""
        self.model.zero_grad()
        with buffers_restored(self.model), torch.compiler.set_stance("force_eager"):
            loss = training_loss(self.model, self.batch, self.precision)
            with SecondBackward(loss) as second:
                loss.backward()
        return second.relative_error(self.model.parameters())


class Bits(Follower):
    """Notes the error of a setting, and chooses bits again as a fit does.

    Args:
        model: The model, compressed with the setting.
        study: The study.
        setting: The setting.
    """

    def __init__(self, model: nn.Module, study: Study, setting: str) -> None:
        super().__init__(model, study)
        self.setting, self.points = setting, self.points if setting != "dense" else set()
        self.errors: list[list[float]] = []
        """Steps, and the predicted error before and after bits changed."""

    def change(self, step: int) -> bool:
        """Return True if bits have changed after so many steps."""
        bound = ERROR.fullmatch(self.setting)
        before = after = self.backward()
        if bound and 0 < step < self.last and before > TOO_LARGE * float(bound[1]):
            compress(self.model, self.setting, self.batch, self.precision)
            after = self.backward()
        self.model.zero_grad()
        self.errors.append([step, round(before, 5), round(after, 5)])
        return after != before


class Errors(Follower):
    """Notes the errors of settings in a dense training.

    Args:
        model: The model.
        study: The study.
        settings: The settings.
    """

    def __init__(self, model: nn.Module, study: Study, settings: Sequence[str]) -> None:
        super().__init__(model, study)
        self.found: dict[str, list[list[float]]] = {setting: [] for setting in settings}
        """Steps, predicted and actual error, and the share of bytes that is kept, by setting."""

    def change(self, step: int) -> bool:
        """Return False: the training is dense."""
        self.backward()
        exact = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        dense = footprint(self.model, self.batch, self.precision).stored_bytes
        for setting, found in self.found.items():
            compress(self.model, setting, self.batch, self.precision)
            predicted, ours = self.backward(), dict(self.model.named_parameters())
            error = mean_square(squares_of(grad, ours[name].grad) for name, grad in exact.items())
            self.model.zero_grad()
            actual, kept = math.sqrt(error), footprint(self.model, self.batch, self.precision).stored_bytes / dense
            found.append([step, round(predicted, 5), round(actual, 5), round(kept, 5)])
            print(f"  step {step}, {setting}: {found[-1][1:]}", flush=True)
        revert(self.model)
        return False


def train(
    model: nn.Module, data: Data, recipe: Recipe, seed: int, epochs: int | None = None, bits: Follower | None = None
) -> tuple[float, float, int | None]:
    """Train `model`, for `epochs` of the recipe's if given; `bits` may change on the way.

    Returns:
        Mean loss of the last epoch, seconds without captures, and the most that a step allocates on a GPU.
    """
    if recipe.compile is not None:
        torch.compiler.reset()  # the compiler keeps only so many versions of a block
        for block in model.blocks:
            block.compile(backend=recipe.compile)
    step, batches, last = TrainStep(model, data, recipe), recipe.batches, epochs or recipe.epochs
    generator = torch.Generator().manual_seed(seed)
    loss, start, peak = math.nan, time.perf_counter(), step.peak_bytes
    for epoch in range(last):
        for i, choices in enumerate(data.draw(batches, recipe.batch, generator)):
            done = epoch * batches + i
            if bits is not None and done in bits.points:
                begin = time.perf_counter()
                if bits.change(done):
                    torch.compiler.reset()
                    for owner in owners_of(model):
                        mark_layers(model, owner)
                    step.graph = None  # gives its memory back
                    step = TrainStep(model, data, recipe, step)
                    peak = None if peak is None else max(peak, step.peak_bytes or 0)
                start += time.perf_counter() - begin
            step(choices, recipe.lr * cosine_factor(done, recipe.epochs * batches, WARMUP))
        loss = step.loss_sum.item() / batches  # waits for the GPU
        step.loss_sum.zero_()
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch + 1}/{recipe.epochs}: loss {loss:.4f}, {seconds:.1f} s", flush=True)
    return loss, time.perf_counter() - start, peak


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, precision: str, limit: int | None) -> float:
    """Return the score of `model`, eagerly, since compiling for other batch sizes would take longer."""
    model.eval()

    def scores(inputs: Tensor) -> Tensor:
        with autocast(inputs.device, precision):
            return model(inputs)

    with torch.compiler.set_stance("force_eager"):
        return data.score(scores, limit)


@contextmanager
def compiled_packing(model: nn.Module) -> Iterator[None]:
    """Pack what converted layers keep in the graphs of what is compiled inside."""
    with CompiledPacking():
        for owner in owners_of(model):
            mark_layers(model, owner)
        yield


def owners_of(model: nn.Module) -> set[str]:
    """Return the names of the conversions of a model."""
    return {layer.owner for layer in model.modules() if is_converted(layer)}


def allocated_beside(model: nn.Module) -> int:
    """Return the bytes on the GPU besides weights and buffers: above all the data."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.memory_allocated() - sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def measure(study: Study, setting: str, seed: int, limit: int | None, keep: Path | None) -> Record:
    """Train and test one model and return its figures; its weights go to `keep`."""
    data, recipe = study.data, study.recipe
    model = study.build(seed)
    batch = data.batch(first_choices(data, recipe))
    dense_kinds = compress(model, setting, batch, recipe.precision)
    stored = stored_bits(model, setting, batch, recipe.precision)
    before, bits = allocated_beside(model), Bits(model, study, setting)
    with nullcontext() if recipe.compile is None else compiled_packing(model):
        loss, seconds, peak = train(model, data, recipe, seed, bits=bits)
    accuracy = evaluate(model, data, recipe.precision, limit)
    if keep is not None:
        torch.save(model.state_dict(), keep)
    figures = {
        "bits_per_value": max(stored, stored_bits(model, setting, batch, recipe.precision)),
        "errors": bits.errors,
        "left_dense": dense_kinds,
        "accuracy": round(accuracy, 4),
        "final_loss": round(loss, 5),
    }
    peak_mib = None if peak is None else round((peak - before) / MIB, 2)
    return {**figures, "seconds": round(seconds, 2), "peak_mib": peak_mib}


# === Weight gradients in the middle of a training =================================================


def weight_gradients(model: nn.Module, batch: Batch, precision: str) -> dict[str, Tensor]:
    """Return the weight gradients of the blocks' layers by name."""
    weights = {name: layer.weight for name, layer in block_layers(model).items()}
    gradients = torch.autograd.grad(training_loss(model, batch, precision), list(weights.values()))
    return dict(zip(weights, gradients, strict=True))


def compare(model: nn.Module, setting: str, batch: Batch, precision: str) -> list[Record]:
    """Return cosines and norm ratios by kind of pruned layer; `model` is then as it was."""
    exact = weight_gradients(model, batch, precision)
    compress(model, setting, batch, precision)
    try:
        rows = {row.fqn: row for row in footprint(model, batch, precision).rows if row.dense_bytes}
        ours = weight_gradients(model, batch, precision)
        names = [name for name in exact if name in rows and isinstance(model.get_submodule(name), CompressedLayer)]
    finally:
        revert(model)
    records = []
    for each in dict.fromkeys(map(kind, names)):
        alike = [name for name in names if kind(name) == each]
        pairs = [(exact[name].flatten().double(), ours[name].flatten().double()) for name in alike]
        cosine = statistics.mean(F.cosine_similarity(*pair, dim=0).item() for pair in pairs)
        ratio = statistics.mean((mine.norm() / right.norm()).item() for right, mine in pairs)
        bits = bits_per_value([rows[name] for name in alike], precision)
        records.append(
            {"kind": each, "bits_per_value": bits, "cosine": round(cosine, 5), "norm_ratio": round(ratio, 5)}
        )
    return records


# === Larger models in the memory of the dense one =================================================


def measure_step(study: Study, setting: str) -> Record:
    """Return peak and time of a captured step; infinite if it does not fit into the GPU."""
    data, recipe = study.data, study.recipe
    try:
        torch._C._cuda_clearCublasWorkspaces()  # or only the first step has them in its peak
        model = study.build(0)
        choices = first_choices(data, recipe)
        compress(model, setting, data.batch(choices), recipe.precision)
        before = allocated_beside(model)
        step = TrainStep(model, data, recipe)
        times = []
        for _ in range(20):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step(choices, 0.0)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        peak = round(((step.peak_bytes or 0) - before) / MIB, 2)
        return {"peak_mib": peak, "step_ms": round(statistics.median(times), 3), "batches": recipe.batches}
    except torch.OutOfMemoryError:
        return {"peak_mib": math.inf, "step_ms": math.inf, "batches": 0}


def grow(args: argparse.Namespace, setting: str, dense: Record, data: Data) -> Record:
    """Return the largest size on `args.grow` whose step needs at most the dense model's memory, and how to train it."""
    axis, sizes = args.grow, SIZES[args.task][args.grow]
    steps: dict[int, Record] = {}

    def peak(size: int) -> float:
        sized = argparse.Namespace(**{**vars(args), axis.replace("-", "_"): size})
        steps[size] = measure_step(open_study(sized, None if axis == "context" else data), setting)
        gc.collect()  # converted layers are in cycles
        torch.cuda.empty_cache()
        print(f"  {axis} {size}: {steps[size]}", flush=True)
        return steps[size]["peak_mib"]

    size = sizes[bisect_right(sizes, dense["peak_mib"], lo=1, key=peak) - 1]
    if size not in steps:
        peak(size)
    time_of = [step["batches"] * step["step_ms"] for step in (dense, steps[size])]
    lr = float(f"{args.lr * (size / sizes[0]) ** EXPONENTS.get(axis, 0.0):.2g}")
    sized = {"size": size, "dense_size": sizes[0], **steps[size], "lr": lr}
    return {**sized, "epochs": max(1, round(args.epochs * time_of[0] / time_of[1]))}


# === Command line =================================================================================


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; options of a recipe come before those that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, help="options of a training of docs/trainings.md")
    parser.add_argument("--task", choices=TASKS, default="resmlp")
    parser.add_argument("--settings", nargs="+", type=checked, metavar="SETTING", default=["dense", "max"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--root", type=Path, help="folder of images, or of *.py files for gpt; CIFAR-10 is downloaded to it"
    )
    parser.add_argument("--model", choices=sorted(MODELS | LANGUAGE_MODELS), help="in place of the task's")
    parser.add_argument("--strong", action="store_true", help="images: RandAugment and mixup")
    parser.add_argument("--turned", action="store_true", help="images: eight times the classes")
    parser.add_argument("--part", choices=["first", "second"], help="images: half of the classes")
    parser.add_argument("--packages", action="store_true", help="gpt: the text that installed packages ship")
    parser.add_argument("--start", type=Path, help="weights to begin with, except the head's; see --save")
    parser.add_argument("--lora", action="store_true", help="with --start: updates of low rank")
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=256, help="gpt: bytes that the model sees at a time")
    parser.add_argument("--dim", type=int, help="channels, in place of the model's")
    parser.add_argument("--depth", type=int, help="blocks, in place of the model's")
    parser.add_argument("--epochs", type=int, default=20, help="for gpt, an epoch is 75 batches")
    parser.add_argument("--batch-size", type=int, help="by default 256 images or 64 windows of text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip", type=float, metavar="NORM")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks")
    parser.add_argument("--limit-batches", type=int, help="train and test on this many batches only")
    parser.add_argument("--errors", action="store_true", help="follow the errors of settings in a dense training")
    parser.add_argument(
        "--gradients", type=int, metavar="EPOCHS", help="compare weight gradients after so many dense epochs"
    )
    parser.add_argument(
        "--grow", metavar="AXIS", help="search the largest size: dim, depth, patch-size, context, batch-size"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run later than this")
    parser.add_argument("--save", type=Path, help="file for the weights of a single run")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds; records go to --out alone")
    parser.add_argument("--out", type=Path, help=f"by default {RESULTS / 'trainings.json'}, with --quick nowhere")
    words = list(sys.argv[1:] if argv is None else argv)
    first = parser.parse_args(words)
    args = parser.parse_args([*RECIPES.get(first.recipe, "").split(), *(QUICK.split() if first.quick else []), *words])
    if args.out is None and not args.quick:
        args.out = RESULTS / "trainings.json"
    if args.root is None and args.task != "gpt" and not args.quick:
        parser.error(f"--root must be a folder for --task {args.task}, which reads images")
    if args.lora and (args.start is None or args.task == "resnet"):
        parser.error("--lora needs --start, and a model of linear layers")
    if args.save is not None and len(args.seeds) * len(args.settings) > 1:
        parser.error("--save takes the weights of one run: one setting and one seed")
    if args.model is not None and not args.model.startswith(f"{args.task}_"):
        parser.error(f"--model must be one of --task {args.task}, got {args.model}")
    if args.grow is not None and (args.grow not in SIZES.get(args.task, {}) or not torch.cuda.is_available()):
        parser.error(f"--grow needs a GPU, a --task of {', '.join(SIZES)} and one of its axes, got {args.grow}")
    return args


def recorded(records: Sequence[Record], key: Record) -> Record | None:
    """Return a record that says all that `key` says; a missing field is `None`."""
    return next((r for r in records if all(r.get(name) == value for name, value in key.items())), None)


def append(path: Path | None, records: list[Record]) -> None:
    """Add records to a file that other processes add to as well."""
    if path is None:
        return
    lock = Path(tempfile.gettempdir()) / f"trainings-{fingerprint(str(path.resolve()).encode())}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_records(path, [*read_records(path), *records])


def main(argv: Sequence[str] | None = None) -> list[Record]:
    """Run what is missing and return the records of this command."""
    args, begin = parse(argv), time.monotonic()
    study = open_study(args)
    old = read_records(args.out) if args.out else []
    new: list[Record] = []

    def add(key: Record, figures: list[Record]) -> None:
        rows = [{**key, **each, **environment()} for each in figures]
        new.extend(rows)
        append(args.out, rows)
        for row in figures:
            print(f"  {row}", flush=True)

    if args.errors:
        for seed in args.seeds:
            key = {**study.key("error"), "seed": seed}
            missing = [setting for setting in args.settings if not recorded(old, {**key, "setting": setting})]
            model = study.build(seed)
            errors = Errors(model, study, missing)
            if missing:
                train(model, study.data, study.recipe, seed, bits=errors)
            for setting in missing:
                add({**key, "setting": setting}, [{"errors": errors.found[setting]}])
        return new
    if args.gradients is not None:
        key = {**study.key("gradient"), "after": args.gradients, "seed": args.seeds[0]}
        model = study.build(args.seeds[0])
        train(model, study.data, study.recipe, args.seeds[0], args.gradients)
        batch = study.data.batch(first_choices(study.data, study.recipe))
        with torch.compiler.set_stance("force_eager"):
            for setting in args.settings:
                if setting != "dense" and not recorded(old, {**key, "setting": setting}):
                    add({**key, "setting": setting}, compare(model, setting, batch, study.recipe.precision))
        return new
    if args.grow is not None:
        key = {"figure": "size", "task": args.task, "model": study.model}
        dense = {**measure_step(study, "dense"), "epochs": args.epochs, "lr": args.lr}
        for setting in args.settings:
            axis = None if setting == "dense" else args.grow
            if not recorded(old, {**key, "axis": axis, "setting": setting}):
                size = dense if axis is None else grow(args, setting, dense, study.data)
                add({**key, "axis": axis, "setting": setting}, [size])
        return new
    limit = args.limit_batches * study.recipe.batch if args.limit_batches else None
    # Seed by seed, so that runs that are compared lie next to each other in time.
    for seed, setting in ((seed, setting) for seed in args.seeds for setting in args.settings):
        key = {**study.key("training"), "setting": setting, "seed": seed}
        if recorded(old, key) and (args.save is None or args.save.is_file()):
            print(f"{setting}, seed {seed}: already in {args.out}")
            continue
        if time.monotonic() - begin > args.seconds:
            print(f"{setting}, seed {seed}: no time left")
            continue
        print(f"{args.task} {setting}, seed {seed}", flush=True)
        add(key, [measure(study, setting, seed, limit, args.save)])
    return new


if __name__ == "__main__":
    main()
