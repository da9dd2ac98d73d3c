"""What this machine has, and where the kernels run on it: what ``python -m lightning_actprune`` prints.

Nothing here raises for what a machine lacks: a package that is missing or a driver that does not answer is a finding.
CUDA is asked only when ``environment`` is called.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterable
from typing import Any

import torch

from lightning_actprune.ops.dispatch import choose_backend, kernel_refusals

BLOCK_SIZES = (16, 32, 64, 1024, 2048)
"""Block sizes whose kernels are asked for; the last is beyond what they take."""
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
"""Packages that are used where they are there, and what for."""
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
"""Names under which triton is distributed."""


def environment(package_version: str) -> dict[str, Any]:
    """Return versions, GPUs, optional packages and the backend by device, dtype and block size, fit for JSON.

    Args:
        package_version: Version of this package, whose code need not be installed.
    """
    gpus, trouble = _gpus()
    devices = [*(torch.device("cuda", gpu["index"]) for gpu in gpus), torch.device("cpu")]
    return {
        "versions": {
            "lightning_actprune": package_version,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            "torch_hip": torch.version.hip,
            "triton": _first(map(_version, _TRITON)),
            "lightning": _version("lightning"),
        },
        "gpus": gpus,
        "gpu_trouble": trouble,
        "c_compiler": _c_compiler(),
        "triton_interpret": os.environ.get("TRITON_INTERPRET") == "1",
        "optional": {name: _version(name) for name in OPTIONAL},
        "kernels": [_backend(dtype, device, size) for device in devices for dtype in DTYPES for size in BLOCK_SIZES],
    }


def _backend(dtype: torch.dtype, device: torch.device, block_size: int) -> dict[str, Any]:
    """Return which implementation takes a tensor, and why it is not the kernels."""
    row = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "block_size": block_size}
    try:
        backend: str = choose_backend((1, block_size), dtype, device, block_size, 1)
        reasons = [] if backend == "triton" else kernel_refusals(dtype, device, block_size, 1)
    except Exception as error:  # of a driver that has stopped to answer
        return row | {"backend": "unknown", "reasons": [_text(error)]}
    if backend == "reference" and not reasons:
        reasons = ["the interpreter runs only where kernels are forced"]
    return row | {"backend": backend, "reasons": reasons}


def _gpus() -> tuple[list[dict[str, Any]], str | None]:
    """Return what is known of each GPU, and what keeps torch from using them, if anything does."""
    found = []
    try:
        if not torch.cuda.is_available():
            return [], "torch sees no GPU" if _built_for_gpus() else "this torch is built without CUDA"
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            memory = {"memory_bytes": properties.total_memory, "free_bytes": _free_bytes(index)}
            found.append({"index": index, "name": properties.name, "capability": capability, **memory})
    except Exception as error:  # a driver too old, a GPU that has fallen off the bus
        return found, _text(error)
    return found, None


def _built_for_gpus() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def _free_bytes(index: int) -> int | None:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except Exception:  # on a full GPU there may be no room for this process's context
        return None


def _c_compiler() -> str | None:
    """Return the C compiler, with which triton builds what launches its kernels."""
    return _first(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang"))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((one for one in found if one), None)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
