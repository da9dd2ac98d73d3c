"""``python -m lightning_actprune``: versions, GPUs and where the kernels run, for bug reports and for finding out.

It never raises for something that a machine lacks: it shows that a package is missing or a driver does not answer. CUDA
is used only when ``collect_environment`` is called.

``python -m lightning_actprune estimate MODEL``: what each preset would save of a model (``analysis.estimate``). A model
is ``timm:NAME``, ``hf:TYPE``, ``hf:ID`` on the hub or ``hf:PATH`` of a configuration, or ``MODULE:ATTRIBUTE``: a
module, or a callable that returns a module or a pair of module and batch. Models of transformers are built without
memory.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from lightning_actprune import __version__
from lightning_actprune.analysis.allocation import check_memory_budget
from lightning_actprune.analysis.estimate import DENSE, METHODS, Estimate, estimate
from lightning_actprune.analysis.simulate_step import PRECISIONS
from lightning_actprune.codec.dispatch import choose_backend, kernel_refusals

BLOCK_SIZES = (16, 32, 64, 1024, 2048)
"""Block sizes whose kernels are checked; the last is larger than kernels take."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPTIONAL = {
    "jsonargparse": "LightningCLI",
    "matplotlib": "pictures",
    "tensorboard": "TensorBoardLogger",
    "tensorboardX": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "pandas": "reports as DataFrames",
    "transformers": "its Conv1D layers",
}
"""Optional packages, and what uses them."""
_LEAST_COMPRESSED_FIRST = DENSE, "balanced", "max", "recompute"
_TASKS = {
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "VideoClassification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING",
}
"""Endings of transformers' ``AutoModelFor`` classes, with the mappings of what they cover."""
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
"""Names under which triton is distributed."""
_DESCRIPTION = "Show versions, GPUs and where the kernels run."
_ESTIMATE = "Show what each preset would save of a model, without computing anything and without a GPU."
_PIPED_WIDTH = 120
_LABELS = {"torch_cuda": "CUDA of torch", "torch_hip": "HIP of torch", "c_compiler": "C compiler"}
_BACKENDS = {"triton": "kernels", "reference": "plain PyTorch"}
_GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Print the environment, whatever is missing, or an estimate; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lightning_actprune", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    _add_estimate(parser.add_subparsers(dest="command", title="commands"))
    args = parser.parse_args(argv)
    if args.command == "estimate":
        return _print_estimate(args)
    info = collect_environment()
    if args.json:
        sys.stdout.write(json.dumps(info, indent=2) + "\n")
        return 0
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(Text(describe_kernels(info)), end="\n\n")
    for table in _make_tables(info):
        console.print(table)
        console.print()
    return 0


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser("estimate", help=_ESTIMATE, description=_ESTIMATE)
    parser.add_argument("model", help="timm:NAME, hf:TYPE, hf:ID, hf:PATH or MODULE:ATTRIBUTE")
    parser.add_argument("--batch", type=int, default=32, metavar="SAMPLES", help="samples of a step (default: 32)")
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="of a text (default: 1024)")
    parser.add_argument("--shape", type=_parse_shape, metavar="3,224,224", help="of an input of MODULE:ATTRIBUTE")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16-mixed", help="(default: bf16-mixed)")
    parser.add_argument("--memory", type=_parse_memory, metavar="24GiB", help="of a GPU; shows what fits")
    parser.add_argument("--presets", nargs="+", choices=METHODS, default=list(METHODS), metavar="PRESET", help="rows")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")


def _print_estimate(args: argparse.Namespace) -> int:
    """Print an estimate, or an error about the model."""
    try:
        model, batch = _load_model(args)
        result = estimate(model, batch, precision=args.precision, presets=args.presets)
    except (ImportError, TypeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if args.json:
        sys.stdout.write(json.dumps(result.to_rows(), indent=2) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        console.print(result.rich())
        console.print(Text(_describe_step(args, batch)))
        if args.memory is not None:
            console.print(Text(_describe_fit(result, args.memory)))
    return 0


def _describe_step(args: argparse.Namespace, batch: Any) -> str:
    """Return a sentence on what was assumed."""
    named = batch.items() if isinstance(batch, dict) else enumerate(batch if isinstance(batch, tuple) else (batch,))
    shapes = [f"{name} {[*value.shape]}" for name, value in named if isinstance(value, torch.Tensor)]
    return f"Assumed: {args.precision}, fused AdamW on all trained parameters, a batch of {', '.join(shapes)}."


def _describe_fit(result: Estimate, memory: int) -> str:
    """Return which rows fit in a GPU, and that of them which compresses the least."""
    peaks = {row.method: row.peak_bytes for row in result.rows if row.peak_bytes is not None}
    answers = [f"{method} {'yes' if peak <= memory else 'no'}" for method, peak in peaks.items()]
    text = f"Fits in {memory / _GIB:.3g} GiB: {', '.join(answers)}."
    fitting = next((name for name in _LEAST_COMPRESSED_FIRST if peaks.get(name, math.inf) <= memory), None)
    if fitting is None:
        return f"{text} Nothing does: take a smaller batch."
    if fitting == DENSE:
        return f"{text} Nothing has to be compressed."
    return f'{text} Use callbacks=[ActivationPruning("{fitting}")].'


def _load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the model that was named, and a batch for it, both without values."""
    source, _, name = args.model.partition(":")
    if args.batch < 1 or args.length < 1:
        raise ValueError(f"--batch and --length must be 1 or more, got {args.batch} and {args.length}.")
    if not name:
        raise ValueError(
            f"The model must be timm:NAME, hf:TYPE, hf:ID, hf:PATH or MODULE:ATTRIBUTE, got {args.model!r}. HINT: for "
            "example timm:vit_base_patch16_224, hf:gpt2 or mine.models:build."
        )
    if source == "timm":
        model: Any = _load_timm(name)
        return model, _make_images(args.batch, args.shape or tuple(model.pretrained_cfg["input_size"]))
    if source == "hf":
        return _load_hugging_face(name, args)
    value = _load_attribute(source, name)
    if isinstance(value, tuple) and len(value) == 2:
        return value
    if not isinstance(value, nn.Module) or args.shape is None:
        raise ValueError(
            f"{args.model!r} must be a module, with --shape of an input, or a callable that returns (model, batch), "
            f"got {type(value).__name__} and --shape {args.shape}. HINT: for example --shape 3,224,224."
        )
    return value, _make_images(args.batch, args.shape)


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"This model needs {package}, which is not installed. HINT: pip install {package}") from error


def _load_attribute(module: str, name: str) -> Any:
    """Return an attribute of a user module, or its result if it is callable."""
    try:
        value = getattr(importlib.import_module(module), name)
        return value() if callable(value) and not isinstance(value, nn.Module) else value
    except Exception as error:  # any error of the user's code
        raise ValueError(
            f"{module}:{name} raised {type(error).__name__}: {error}. HINT: run it in Python to see where."
        ) from error


def _load_timm(name: str) -> nn.Module:
    timm = _import("timm")
    try:
        model: nn.Module = timm.create_model(name)
    except Exception as error:  # RuntimeErrors, and those of downloads
        near = _suggest(name, [*timm.list_models(), *timm.list_pretrained()])
        raise ValueError(f"timm has no model {name!r} ({_format_error(error)}){near}") from error
    return model


def _load_hugging_face(name: str, args: argparse.Namespace) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model of this type, or of the configuration at this path or hub name, and a batch."""
    transformers = _import("transformers")
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    try:
        if name in types and not os.path.exists(name):  # noqa: PTH110  # any name may be a path
            config = transformers.AutoConfig.for_model(name)
        else:
            logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each attempt
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # no network, no access, or no such name
        raise ValueError(
            f"transformers has no model type {name!r}, and no configuration of that name could be loaded "
            f"({_format_error(error)}){_suggest(name, types)} HINT: without a network, give a type (hf:llama) or the "
            "folder of a config.json; models with restricted access need a token (HF_TOKEN)."
        ) from error
    config.use_cache = False
    task = _find_task(config)
    if task is None:
        raise ValueError(
            f"hf:{name} is of type {config.model_type!r}, for which transformers has no language model and no "
            "classifier of images or videos. HINT: give a callable that returns (model, batch), as MODULE:ATTRIBUTE."
        )
    size = getattr(config, "image_size", None) or 224
    image = getattr(config, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size)
    shape = {"ImageClassification": image, "VideoClassification": (getattr(config, "num_frames", 16), *image)}.get(task)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(config)
        if shape is None:
            tokens = torch.empty(args.batch, args.length, dtype=torch.int64)
            decoded = {"decoder_input_ids": tokens} if task == "Seq2SeqLM" else {}
            return model, {"input_ids": tokens, **decoded, "labels": tokens}
        labels = torch.empty(args.batch, dtype=torch.int64)
        return model, {"pixel_values": torch.empty(args.batch, *(args.shape or shape)), "labels": labels}


def _find_task(config: Any) -> str | None:
    """Return for what a model of transformers with this configuration is trained, else the first task it can be."""
    found = {task: getattr(_import("transformers"), name).get(type(config), None) for task, name in _TASKS.items()}
    for task, classes in found.items():
        names = {each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,)) if each}
        if names & set(config.architectures or ()):
            return task
    return next((task for task, classes in found.items() if classes), None)


def _suggest(name: str, names: Iterable[str]) -> str:
    """Return a clause with similar names."""
    near = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {', '.join(near)}?" if near else "."


def _make_images(samples: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.empty(samples, *shape, device="meta")
    return inputs, torch.empty(samples, dtype=torch.int64, device="meta")


def _parse_memory(text: str) -> int:
    try:
        size = check_memory_budget(text)
    except ValueError:
        size = 0.0
    if not isinstance(size, int):
        raise argparse.ArgumentTypeError(f"must be a size such as 24GiB, got {text!r}")
    return size


def _parse_shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def describe_kernels(info: dict[str, Any]) -> str:
    """Return a sentence that says whether and where kernels run here."""
    names = {f"cuda:{gpu['index']}": gpu["name"] for gpu in info["gpus"]}
    running = dict.fromkeys(row["device"] for row in info["kernels"] if row["backend"] == "triton")
    if running:
        return f"Kernels run on {', '.join(f'{device} ({names[device]})' for device in running)}."
    reasons = dict.fromkeys(reason for row in info["kernels"] if row["device"] != "cpu" for reason in row["reasons"])
    why = next(iter(reasons), None) or info["gpu_trouble"] or "there is no GPU that they take"
    return f"No kernels run here: {why}. Plain PyTorch saves as much memory, but a step may take several times as long."


def _make_tables(info: dict[str, Any]) -> Iterator[Table]:
    versions = {**info["versions"], "c_compiler": info["c_compiler"]}
    rows = {name: version for name, version in versions.items() if version or name != "torch_hip"}
    yield _make_table("Versions", [], ([_LABELS.get(name, name), version or "none"] for name, version in rows.items()))
    gpus = []
    for gpu in info["gpus"]:
        sizes = [gpu[name] for name in ("memory_bytes", "free_bytes")]
        gib = ["unknown" if size is None else f"{size / _GIB:.1f}" for size in sizes]
        gpus.append([f"cuda:{gpu['index']}", gpu["name"], gpu["capability"], *gib])
    if info["gpu_trouble"]:
        gpus.append(["" if gpus else "none", info["gpu_trouble"]])
    yield _make_table("GPUs", ["", "Name", "Capability", "Memory GiB", "Free GiB"], gpus)
    title = "Which implementation runs, by device, type and block size"
    yield _make_table(title, ["Device", "Types", "Block sizes", "Runs", "Why"], _merge_kernels(info["kernels"]))
    optional = ([name, version or "none", OPTIONAL[name]] for name, version in info["optional"].items())
    yield _make_table("Optional packages", ["Package", "Version", "For"], optional)


def _merge_kernels(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield one line per answer on a device: types that share it, and their block sizes."""
    sizes: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        runs = _BACKENDS.get(row["backend"], row["backend"])
        key = row["device"], row["dtype"], runs, "; ".join(row["reasons"])
        sizes.setdefault(key, []).append(str(row["block_size"]))
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for (device, dtype, *answer), names in sizes.items():
        dtypes.setdefault((device, ", ".join(names), *answer), []).append(dtype)
    for (device, *answer), names in dtypes.items():
        yield [device, ", ".join(names), *answer]


def _make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup, which would drop words in brackets
    return table


def collect_environment() -> dict[str, Any]:
    """Return versions, GPUs, packages and the backend by device, type and block size, ready for JSON."""
    gpus, trouble = _find_gpus()
    devices = [*(torch.device("cuda", gpu["index"]) for gpu in gpus), torch.device("cpu")]
    return {
        "versions": {
            "lightning_actprune": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "torch_hip": torch.version.hip,
            "triton": _find_first(map(_find_version, _TRITON)),
            "lightning": _find_version("lightning"),
        },
        "gpus": gpus,
        "gpu_trouble": trouble,
        # Triton builds its launchers with it.
        "c_compiler": _find_first(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")),
        "triton_interpret": os.environ.get("TRITON_INTERPRET") == "1",
        "optional": {name: _find_version(name) for name in OPTIONAL},
        "kernels": [_find_backend(t, device, size) for device in devices for t in DTYPES for size in BLOCK_SIZES],
    }


def _find_backend(dtype: torch.dtype, device: torch.device, block_size: int) -> dict[str, Any]:
    """Return the implementation for a tensor, with the reason if it is not the kernels."""
    row = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "block_size": block_size}
    try:
        backend: str = choose_backend((1, block_size), dtype, device, block_size, 1)
        reasons = [] if backend == "triton" else kernel_refusals(dtype, device, block_size, 1)
    except Exception as error:  # a driver that no longer answers
        return row | {"backend": "unknown", "reasons": [_format_error(error)]}
    if backend == "reference" and not reasons:
        reasons = ["the interpreter runs only where kernels are forced"]
    return row | {"backend": backend, "reasons": reasons}


def _find_gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return a description of each GPU, or the reason why torch cannot use them."""
    gpus = []
    try:
        if not torch.cuda.is_available():
            has_gpu_code = torch.version.cuda is not None or torch.version.hip is not None
            return [], "torch sees no GPU" if has_gpu_code else "this torch is built without CUDA"
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            memory = {"memory_bytes": properties.total_memory, "free_bytes": _read_free_bytes(index)}
            gpus.append({"index": index, "name": properties.name, "capability": capability, **memory})
    except Exception as error:  # a driver too old, a GPU that has fallen off the bus
        return gpus, _format_error(error)
    return gpus, None


def _read_free_bytes(index: int) -> int | None:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except Exception:  # on a full GPU there may be no room for this process's context
        return None


def _find_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_first(values: Iterable[str | None]) -> str | None:
    return next((value for value in values if value), None)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
