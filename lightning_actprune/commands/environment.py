"""Show whether the kernels run on this machine, with versions and GPUs, for bug reports.

A missing package or a driver that does not answer is shown and raises nothing. CUDA is used only when
``collect_environment`` is called.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text

import lightning_actprune
from lightning_actprune.codec.dispatch import choose_backend, kernel_refusals
from lightning_actprune.commands.console import format_error, make_console
from lightning_actprune.report import GIB

BLOCK_SIZES = (16, 32, 64, 1024, 2048)
"""Block sizes whose kernels are checked; the last is larger than kernels take."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPTIONAL = {
    "jsonargparse": "LightningCLI",
    "matplotlib": "figures",
    "tensorboard": "TensorBoardLogger",
    "tensorboardX": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "pandas": "reports as DataFrames",
    "transformers": "its Trainer and models",
}
"""Optional packages, and what uses them."""
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
"""Names under which triton is distributed."""
_LABELS = {"torch_cuda": "CUDA of torch", "torch_hip": "HIP of torch", "c_compiler": "C compiler"}
_BACKENDS = {"triton": "kernels", "reference": "plain PyTorch"}


def show_environment(as_json: bool) -> int:
    """Print the environment and return the exit code."""
    info = collect_environment()
    if as_json:
        sys.stdout.write(json.dumps(info, indent=2) + "\n")
        return 0
    console = make_console()
    console.print(Text(describe_kernels(info)), end="\n\n")
    for table in _make_tables(info):
        console.print(table)
        console.print()
    return 0


def describe_kernels(info: dict[str, Any]) -> str:
    """Return a sentence that says whether and where kernels run here."""
    names = {f"cuda:{gpu['index']}": gpu["name"] for gpu in info["gpus"]}
    running = dict.fromkeys(row["device"] for row in info["kernels"] if row["backend"] == "triton")
    if running:
        return f"The kernels run on {', '.join(f'{device} ({names[device]})' for device in running)}."
    reasons = dict.fromkeys(reason for row in info["kernels"] if row["device"] != "cpu" for reason in row["reasons"])
    why = next(iter(reasons), None) or info["gpu_trouble"] or "there is no supported GPU"
    return (
        f"The kernels do not run here: {why}. "
        "Plain PyTorch runs instead: it saves as much memory, but a step may take several times as long."
    )


def _make_tables(info: dict[str, Any]) -> Iterator[Table]:
    versions = {**info["versions"], "c_compiler": info["c_compiler"]}
    rows = {name: version for name, version in versions.items() if version or name != "torch_hip"}
    yield _make_table("Versions", [], ([_LABELS.get(name, name), version or "none"] for name, version in rows.items()))
    gpus = []
    for gpu in info["gpus"]:
        sizes = [gpu[name] for name in ("memory_bytes", "free_bytes")]
        gib = ["unknown" if size is None else f"{size / GIB:.1f}" for size in sizes]
        gpus.append([f"cuda:{gpu['index']}", gpu["name"], gpu["capability"], *gib])
    if info["gpu_trouble"]:
        gpus.append(["" if gpus else "none", info["gpu_trouble"]])
    yield _make_table("GPUs", ["", "Name", "Capability", "Memory GiB", "Free GiB"], gpus)
    title = "Where the kernels run"
    yield _make_table(title, ["Device", "Types", "Block sizes", "Runs", "Reason"], _merge_kernels(info["kernels"]))
    optional = ([name, version or "none", OPTIONAL[name]] for name, version in info["optional"].items())
    yield _make_table("Optional packages", ["Package", "Version", "For"], optional)


def _merge_kernels(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield one line per answer on a device: types that share it, and their block sizes.

    Reasons that hold for all tensors on a device hide the others.
    """
    general: dict[str, list[str]] = {}
    for row in rows:
        general[row["device"]] = [r for r in general.get(row["device"], row["reasons"]) if r in row["reasons"]]
    sizes: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        runs = _BACKENDS.get(row["backend"], row["backend"])
        key = row["device"], row["dtype"], runs, "; ".join(general[row["device"]] or row["reasons"])
        sizes.setdefault(key, []).append(str(row["block_size"]))
    dtypes: dict[tuple[str, ...], list[str]] = {}
    for (device, dtype, *answer), names in sizes.items():
        dtypes.setdefault((device, ", ".join(names), *answer), []).append(dtype)
    for (device, *answer), names in dtypes.items():
        yield [device, ", ".join(names), *answer]


def _make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns), box=box.SIMPLE_HEAD, show_edge=False)
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
            "lightning_actprune": lightning_actprune.__version__,
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
        return row | {"backend": "unknown", "reasons": [format_error(error)]}
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
        return gpus, format_error(error)
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
