"""Accuracy study: the same training, dense and with pruned activations, over several seeds, on one GPU.

    python examples/benchmarks/accuracy.py --root data/cifar10 --sparsity 0.6 0.8 --block-size 32 --out accuracy.json

`--root` is a folder of images with `train/<class>/` and `test/<class>/`. It is decoded once and stays on the GPU as
bytes. A step cuts a random window out of each padded image, mirrors half of them, runs forward and backward under bf16
autocast and AdamW with decoupled weight decay; all of it is captured in one CUDA graph and replayed, since an eager
step of this small model is mostly launch overhead. The learning rate warms up over 5 % of the steps and then falls to
zero on a cosine.

The seed fixes the weights, the order of the images and every window and mirroring, for dense and pruned alike: the
steps that warm up and capture the graph are undone before the training starts. One record is written per run; with an
existing `--out` the runs already in it are skipped. Without a GPU the steps run eagerly, for a smoke test with
`--limit-batches`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.benchmarks.common import environment, write_records
from examples.classifier import cosine_factor, parameter_groups
from examples.data import load_image_folder_tensors
from examples.models import MODELS, build_model
from lightning_actprune import convert, revert

WARMUP_STEPS = 4
"""Eager steps before the capture: kernels compile and the optimizer makes its state."""


@dataclass(frozen=True)
class Run:
    """One training run: its method, the settings of the pruning (`None` for dense) and its seed."""

    method: str
    sparsity: float | None
    block_size: int | None
    seed: int


class Images:
    """The data set on one device: padded training images as bytes, test images, labels and the normalisation.

    Args:
        root: Folder of images.
        device: Where the tensors live.
        padding: Black pixels put around each training image, out of which windows of its size are cut.
    """

    def __init__(self, root: Path, device: torch.device, padding: int = 4) -> None:
        train, labels, test, test_labels = load_image_folder_tensors(root)
        self.size, self.padding, self.classes = train.shape[-1], padding, int(labels.max()) + 1
        sample = train[:: max(1, len(train) // 5000)].float()
        self.mean = sample.mean((0, 2, 3)).view(-1, 1, 1).to(device)
        self.std = sample.std((0, 2, 3)).view(-1, 1, 1).to(device)
        self.padded = F.pad(train.to(device), [padding] * 4)
        self.labels, self.test, self.test_labels = labels.to(device), test.to(device), test_labels.to(device)
        self.pixels = torch.arange(self.size, device=device)

    def draw(self, steps: int, batch: int, generator: torch.Generator) -> Tensor:
        """Return the choices of one epoch, `[steps, 4, batch]`: image, top and left of its window, mirrored or not."""
        order = torch.randperm(len(self.labels), generator=generator)[: steps * batch].view(steps, 1, batch)
        window = torch.randint(2 * self.padding + 1, (steps, 2, batch), generator=generator)
        mirrored = torch.randint(2, (steps, 1, batch), generator=generator)
        return torch.cat([order, window, mirrored], dim=1).to(self.labels.device)

    def batch(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised images and the labels that `choices` (`[4, batch]`) name, in one gather."""
        index, top, left, mirrored = choices.unsqueeze(-1)
        rows = top + self.pixels
        columns = left + torch.where(mirrored == 1, self.pixels.flip(0), self.pixels)
        images = self.padded[index.unsqueeze(-1), :, rows.unsqueeze(2), columns.unsqueeze(1)]  # [batch, h, w, channels]
        return self.normalise(images.permute(0, 3, 1, 2)), self.labels[index.squeeze(-1)]

    def normalise(self, images: Tensor) -> Tensor:
        """Return bytes as normalised floats."""
        return (images.float() - self.mean) / self.std


class TrainStep:
    """One optimizer step over static buffers, replayed from a CUDA graph where there is a GPU.

    Args:
        model: The model, already converted where it shall be.
        images: The data set.
        args: Command line.
    """

    def __init__(self, model: nn.Module, images: Images, args: argparse.Namespace) -> None:
        device = images.labels.device
        cuda = device.type == "cuda"
        self.model, self.images, self.precision = model, images, args.precision
        self.choices = images.draw(1, args.batch_size, torch.Generator().manual_seed(0))[0]
        self.lr = torch.tensor(args.lr, device=device)
        self.loss_sum = torch.zeros((), device=device)
        groups = parameter_groups(model, args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr, capturable=cuda, fused=cuda)
        self.graph = self._capture() if cuda else None

    def __call__(self, choices: Tensor, lr: float) -> None:
        """Train on the images that `choices` name at the learning rate `lr`."""
        self.choices.copy_(choices)
        self.lr.fill_(lr)
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        images, labels = self.images.batch(self.choices)
        with autocast(images.device, self.precision):
            loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss_sum += loss.detach()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Return a graph of one step; weights and optimizer state are then as they were before."""
        initial = [p.detach().clone() for p in self.model.parameters()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), initial, strict=True):
                parameter.copy_(value)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss_sum.zero_()
        return graph


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the autocast context; it caches no casts, which must not outlive a capture."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def train(run: Run, images: Images, args: argparse.Namespace) -> tuple[nn.Module, float, float]:
    """Train one model; return it, with dense layers again, the mean loss of its last epoch and the seconds."""
    torch.manual_seed(run.seed)
    size = {name: value for name in ("dim", "depth") if (value := getattr(args, name))}
    shape = {"image_size": images.size, "patch_size": args.patch_size, "num_classes": images.classes}
    model = build_model(args.model, **shape, **size).to(images.labels.device)
    if run.method == "pruned":
        convert(model.blocks, sparsity=run.sparsity, block_size=run.block_size, min_features=0)
    step, batches = TrainStep(model, images, args), args.batches
    generator = torch.Generator().manual_seed(run.seed)
    start, loss = time.perf_counter(), float("nan")
    for epoch in range(args.epochs):
        for i, choices in enumerate(images.draw(batches, args.batch_size, generator)):
            step(choices, args.lr * cosine_factor(epoch * batches + i, args.epochs * batches, 0.05))
        loss = step.loss_sum.item() / batches  # also waits for the GPU
        step.loss_sum.zero_()
        print(f"  epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, {time.perf_counter() - start:.1f} s", flush=True)
    seconds = time.perf_counter() - start
    revert(model.blocks)
    return model, loss, seconds


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, args: argparse.Namespace) -> float:
    """Return the percentage of test images that `model` classifies correctly."""
    # The images are sorted by class, so that a smoke test takes them from everywhere.
    limit = args.limit_batches * args.batch_size if args.limit_batches else len(images.test)
    stride = max(1, len(images.test) // limit)
    test, labels = images.test[::stride], images.test_labels[::stride]
    correct = 0
    for pixels, truth in zip(test.split(500), labels.split(500), strict=True):
        with autocast(pixels.device, args.precision):
            correct += (model.eval()(images.normalise(pixels)).argmax(1) == truth).sum().item()
    return 100 * correct / len(labels)


def plan(args: argparse.Namespace) -> list[Run]:
    """Return the runs, seed by seed, so that those compared lie next to each other in time."""
    runs = []
    for seed in args.seeds:
        if "dense" in args.methods:
            runs.append(Run("dense", None, None, seed))
        if "pruned" in args.methods:
            runs += [Run("pruned", s, b, seed) for s in args.sparsity for b in args.block_size]
    return runs


def describe(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    """Return what identifies a run in the records."""
    names = ("model", "dim", "depth", "patch_size", "epochs", "batches", "lr", "weight_decay", "precision")
    study = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return {**study, "dataset": args.root.resolve().name, "batch": args.batch_size, **asdict(run)}


def summarise(records: list[dict[str, Any]]) -> Table:
    """Return mean and standard deviation over the seeds."""
    titles = ("method", "sparsity", "block", "seeds", "accuracy %", "loss", "seconds")
    table = Table(*(Column(title, no_wrap=True) for title in titles))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["method"], record["sparsity"], record["block_size"]), []).append(record)
    for (method, sparsity, block_size), group in groups.items():
        columns = [[record[key] for record in group] for key in ("accuracy", "final_loss", "seconds")]
        spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in columns]
        cells = [f"{statistics.mean(v):.2f} ± {s:.2f}" for v, s in zip(columns, spread, strict=True)]
        setting = ["-" if value is None else str(value) for value in (sparsity, block_size)]
        table.add_row(method, *setting, str(len(group)), *cells)
    return table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of images with train/ and test/")
    parser.add_argument("--model", choices=sorted(MODELS), default="resmlp_s12")
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--dim", type=int, help="channels, in place of the model's")
    parser.add_argument("--depth", type=int, help="blocks, in place of the model's")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--methods", nargs="+", choices=["dense", "pruned"], default=["dense", "pruned"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.6])
    parser.add_argument("--block-size", type=int, nargs="+", default=[32])
    parser.add_argument("--out", type=Path, default=Path("accuracy.json"))
    parser.add_argument("--time-budget-s", type=float, help="start no run that would end later than this")
    parser.add_argument("--limit-batches", type=int, help="train and test on this many batches only")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the study and return its records, old ones included."""
    begin = time.perf_counter()
    args = parse(argv)
    images = Images(args.root, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    args.batches = min(len(images.labels) // args.batch_size, args.limit_batches or len(images.labels))
    if not args.batches:
        raise ValueError(
            f"`--batch-size` must be at most the number of training images, got {args.batch_size} for "
            f"{len(images.labels)} images. HINT: lower it; every batch is full, as a captured step needs."
        )
    records = json.loads(args.out.read_text()) if args.out.is_file() else []
    durations: dict[str, float] = {}
    for run in plan(args):
        key = describe(run, args)
        if any(key.items() <= record.items() for record in records):
            print(f"{run}: already in {args.out}")
            continue
        start = time.perf_counter()
        expected = durations.get(run.method, 1.5 * max(durations.values(), default=0.0))
        if args.time_budget_s is not None and start - begin + expected > args.time_budget_s:
            print(f"{run}: not started, it would exceed the time budget of {args.time_budget_s:.0f} s")
            continue
        print(run, flush=True)
        model, loss, seconds = train(run, images, args)
        result = {"accuracy": round(accuracy(model, images, args), 3), "final_loss": loss, "seconds": round(seconds, 2)}
        records.append({**key, **result, **environment()})
        write_records(args.out, records)
        durations[run.method] = time.perf_counter() - start
    Console().print(summarise(records))
    return records


if __name__ == "__main__":
    main()
