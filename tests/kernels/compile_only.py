"""Compile every kernel for real GPUs without one, and print one JSON record per kernel and target.

Run in its own process without TRITON_INTERPRET: the variable is read when a kernel is decorated.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_actprune.kernels import columns, keys, pack, select, unpack, weight_grad

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "x_ptr": "*{v}", "values_ptr": "*{v}", "grad_ptr": "*{v}", "out_ptr": "*{v}", "keys_ptr": "*i32",
    "control_ptr": "*i32", "bitmap_ptr": "*i32", "offsets_ptr": "*i32",
    "work_ptr": "*i32",
}  # fmt: skip
ALIGNED = (
    "_ptr",
    "stride_sample",
    "stride_row",
    "stride_outer",
    "stride_inner",
    "stride_grad",
    "length",
    "outputs",
    "share",
    "counters",
    "partials",
)


SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


def specimens(target: int) -> list[tuple[str, Any, dict[str, Any], str, dict[str, int]]]:
    """Return (label, kernel, constexprs, value type, options): what the launch functions use for usual sizes."""
    tile = {"B": 32, "BLOCK": 32, "ROWS": 2, "COLS": 64, "ZEROS": 4}
    small = {"GROUP": 128, "BLOCKS": 32}
    found = [
        ("keys", keys.block_keys_kernel, tile, "bf16", {"num_warps": 4}),
        ("keys", keys.block_keys_kernel, tile, "fp32", {"num_warps": 4}),
        ("select", select.select_kernel, {"BLOCKS": select.REGISTER_BLOCKS}, "fp32", {"num_warps": 8}),
        ("select_rows", select.select_rows_kernel, small, "fp32", {"num_warps": 4}),
        ("select_shared", select.select_shared_kernel, {"PIECE": 8192}, "fp32", {"num_warps": 16}),
        ("columns", columns.columns_kernel, {"PIECE": 1024}, "fp32", {"num_warps": 4}),
    ]
    for value in ("bf16", "fp16", "fp32"):
        block = {"B": 32, "BLOCK": 32, "LANES": 128}
        found.append(("gather", pack.gather_kernel, block, value, {"num_warps": 4}))
        found.append(("unpack", unpack.unpack_kernel, block, value, {"num_warps": 4}))
        for size in (16, 32, 64, 128):
            config = weight_grad.choose_config(size, 1536, 4 if value == "fp32" else 2, SHARED_MEMORY[target])
            sizes = {"B": size, "BLOCK": size, "BM": config.bm, "BK": config.bk, "SPLIT": 1}
            modes = {"NARROW": True, "VALUES_FIRST": config.values_first, "UPCAST": False, "PRECISION": "ieee"}
            options = {"num_warps": config.warps, "num_stages": config.stages}
            found.append((f"weight_grad_b{size}", weight_grad.weight_grad_kernel, {**sizes, **modes}, value, options))
    return found


def compile_kernel(
    kernel: Any, constants: dict[str, Any], value: str, options: dict[str, int], capability: int
) -> dict[str, Any]:
    """Return what the compiled kernel uses."""
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32").format(v=value)
        if name not in constants and name.endswith(ALIGNED):
            attrs[(index,)] = [["tt.divisibility", 16]]
    if "out_ptr" in signature and "grad_ptr" in signature:
        signature["out_ptr"] = "*fp32"
    for name in ("stride_sample", "stride_batch", "size"):
        if name in signature:
            signature[name] = "i64"
    constexprs = {(kernel.arg_names.index(name),): constant for name, constant in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {**resources(binary.asm["cubin"]), "smem": binary.metadata.shared, "ptx": features(binary.asm["ptx"])}


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and stack bytes (spills) from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"]}


def features(ptx: str) -> dict[str, int]:
    """Return how often the instructions occur that decide about speed."""
    patterns = {
        "wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"tcgen05\.mma",
        "async16": r"cp\.async\.cg\.shared\.global [^;]*?0x10\b|cp\.async\.cg\.shared\.global [^;]*, 16",
        "async4": r"cp\.async\.ca\.shared\.global", "load16": r"ld\.global[\w.:]*\.v4\.b32",
        "store16": r"st\.global[\w.:]*\.v4\.b32",
    }  # fmt: skip
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


if __name__ == "__main__":
    for target in map(int, sys.argv[1:]):
        for label, kernel, constants, value, options in specimens(target):
            record = compile_kernel(kernel, constants, value, options, target)
            print(json.dumps({"kernel": label, "value": value, "target": target, **record}), flush=True)
