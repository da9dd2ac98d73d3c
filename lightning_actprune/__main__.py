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
from lightning_actprune.analysis.estimate import METHODS, estimate
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
        Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(result.rich())
    return 0


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
        tokens = torch.empty(args.batch, args.length, dtype=torch.int64, device="meta")
        return _load_hugging_face(name), {"input_ids": tokens, "labels": tokens}
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


def _load_hugging_face(name: str) -> nn.Module:
    """Return a causal language model of this type, or of the configuration at this path or hub name."""
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
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"hf:{name} is no causal language model of transformers (its type is {config.model_type!r}). HINT: give a "
            "callable that returns (model, batch), as MODULE:ATTRIBUTE."
        )
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _suggest(name: str, names: Iterable[str]) -> str:
    """Return a clause with similar names."""
    near = difflib.get_close_matches(name, list(names), 3)
    return f"; did you mean {', '.join(near)}?" if near else "."


def _make_images(samples: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.empty(samples, *shape, device="meta")
    return inputs, torch.empty(samples, dtype=torch.int64, device="meta")


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
