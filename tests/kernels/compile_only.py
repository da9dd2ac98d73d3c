"""Compile every kernel for real GPUs without one, and print one JSON record per kernel and target.

Run in its own process without TRITON_INTERPRET: the variable is read when a kernel is decorated.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_actprune.codec.blocks import MAX_BLOCK_SIZE, ceil_div
from lightning_actprune.kernels import linear, pack, sums, unpack
from lightning_actprune.kernels.places import run_tile, stride_unit

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "x_ptr": "*{x}", "copy_ptr": "*{v}", "values_ptr": "*{v}", "grad_ptr": "*{v}", "out_ptr": "*{v}",
    "scratch_ptr": "*{v}", "keys_ptr": "*i32", "control_ptr": "*i32", "bitmap_ptr": "*i32", "offsets_ptr": "*i32",
    "work_ptr": "*i32", "partial_ptr": "*fp32", "counters_ptr": "*i32", "numbers_ptr": "*{v}", "weight_ptr": "*fp32",
    "bias_ptr": "*fp32", "y_ptr": "*{v}", "grad_x_ptr": "*{v}", "rstd_ptr": "*fp32", "eps": "fp32",
    "codes_ptr": "*u8", "mask_ptr": "*u8", "mean_ptr": "*fp32", "sums_ptr": "*fp32", "factors_ptr": "*fp32",
    "residual_ptr": "*fp32", "sets_ptr": "*fp32", "first_ptr": "*fp32", "second_ptr": "*bf16",
    "each": "fp32",
    "statistics_ptr": "*fp32", "var_ptr": "*fp32", "batches_ptr": "*i64", "momentum": "fp32",
    "of_weight_ptr": "*fp32", "of_bias_ptr": "*fp32",
    "a_ptr": "*{v}", "u_ptr": "*{v}", "z_ptr": "*{v}", "grad_a_ptr": "*{v}", "grad_u_ptr": "*{v}",
}  # fmt: skip
ALIGNED = ("_ptr", "stride_grad", "length", "outputs")
ALIGNED += ("share", "skipped", "size", "counts", "count")

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""What a block of threads may ask for, in bytes: 163, 99 and 227 KiB."""
BLOCK_SIZES = (16, 24, 32, 64, 128)
"""24 is no power of two: its tile is as wide as that of 32, a quarter of it masked."""

WEIGHT_GRADS = {"bf16": BLOCK_SIZES, "fp16": (32,), "fp32": (32, 128)}
"""fp16 differs from bf16 in the opcode of the product alone; of fp32, both ways round, with the largest accumulator."""

NARROW_ROW = 196
"""Values of a row that 4 divides and 8 does not."""

UNSCALED = {"keys_ptr": None}
"""What a kernel that copies or quantizes blocks gets if these are not scaled."""

Specimen = tuple[str, Any, dict[str, Any], str, dict[str, int]]
"""Label, kernel, constexprs, value type, options."""


def specimens(target: int) -> list[Specimen]:
    """Return what the launch functions use for usual sizes on a GPU of compute capability ``target / 10``."""
    shared = {"CAST": False, "B": 32, "BLOCK": 32, "ZEROS": 4, "SELECT": 0}
    tile = shared | {"ROWS": 2, "COLS": 64} | rows(1536, 32)
    narrow = shared | {"ROWS": 16, "COLS": 8} | rows(NARROW_ROW, 32)
    block = shared | {"ROWS": 128, "COLS": 1} | rows(32, 32)
    found = [
        ("keys", pack.block_keys_kernel, tile, "bf16", {"num_warps": 4}),
        ("keys", pack.block_keys_kernel, tile, "fp32", {"num_warps": 4}),
        ("keys_swap", pack.block_keys_kernel, tile | {"SELECT": pack.SWAP.value}, "bf16", {"num_warps": 4}),
        ("keys_unbiased", pack.block_keys_kernel, tile | {"SELECT": pack.UNBIASED.value}, "bf16", {"num_warps": 4}),
        ("keys_narrow", pack.block_keys_kernel, narrow, "bf16", {"num_warps": 4}),
        ("keys_block", pack.block_keys_kernel, block, "bf16", {"num_warps": 4}),
        ("keys_cast_block", pack.block_keys_kernel, block | {"CAST": True}, "bf16", {"num_warps": 4}),
        ("keys_cast", pack.block_keys_kernel, tile | {"CAST": True}, "bf16", {"num_warps": 4}),
        ("keys_cast", pack.block_keys_kernel, tile | {"CAST": True}, "fp16", {"num_warps": 4}),
        ("keys_cast_narrow", pack.block_keys_kernel, narrow | {"CAST": True}, "bf16", {"num_warps": 4}),
        ("select", pack.select_kernel, {"BLOCKS": 32768, "PIECE": 8192}, "fp32", {"num_warps": 16}),
        ("select", pack.select_kernel, {"BLOCKS": 16384, "PIECE": 16384}, "fp32", {"num_warps": 8}),
        ("select_rows", pack.select_rows_kernel, {"GROUP": 128, "BLOCKS": 32}, "fp32", {"num_warps": 4}),
        ("select_shared", pack.select_shared_kernel, {"PIECE": 8192}, "fp32", {"num_warps": 16}),
        ("largest_dropped", pack.largest_dropped_kernel, {"GROUP": 1, "BLOCKS": 4096}, "fp32", {"num_warps": 4}),
        ("largest_dropped", pack.largest_dropped_kernel, {"GROUP": 128, "BLOCKS": 32}, "fp32", {"num_warps": 4}),
        ("count_columns", linear.count_columns_kernel, {"TILE": 128, "COLS": 32}, "fp32", {"num_warps": 4}),
        ("list_columns", linear.list_columns_kernel, {"TILE": 128, "COLS": 32}, "fp32", {"num_warps": 8}),
        ("add_parts", linear.add_parts_kernel, {"B": 32, "OUTS": 16, "COLS": 128}, "bf16", {"num_warps": 4}),
    ]
    for value, size in (("bf16", 2), ("fp32", 4)):
        wide = sums.COLS
        tile = {
            "ROWS": sums.TILE_BYTES // (wide * size),
            "COLS": wide,
            "WIDE": False,
            "STAGES": sums.STAGES,
        }
        for parts in (0, sums.MOST_PARTS):
            constants = tile | {"PARTS": parts}
            found.append(("column_sums", sums.column_sums_kernel, constants, value, {"num_warps": 4}))
            if value == "fp32":
                constants = {name: constants[name] for name in constants if name != "WIDE"}
                found.append(("add_sets", sums.add_sets_kernel, constants, value, {"num_warps": 4}))
    for value in ("bf16", "fp16", "fp32"):
        found.extend(weight_grad_specimen(size, value, target) for size in WEIGHT_GRADS[value])
    # Copies: two bytes are two bytes.
    copies = list[Specimen]()
    for size, value in itertools.product((*BLOCK_SIZES, MAX_BLOCK_SIZE), ("bf16", "fp32")):
        _, tile, options = run_tile(64, 4704, size)
        constants = dict(zip(("B", "BLOCK", "LANES"), tile, strict=True)) | rows(6 * size, size)
        copies.append((f"gather_b{size}", pack.gather_kernel, constants | UNSCALED, value, options))
        copies.append((f"gather_scaled_b{size}", pack.gather_kernel, constants, value, options))
        copies.append((f"unpack_b{size}", unpack.unpack_kernel, constants | {"FORMAT": 0}, value, options))
    found.extend(in_turn(copies, target))
    narrow = {"B": 32, "BLOCK": 32, "LANES": 128} | rows(NARROW_ROW, 32)
    found.append(("gather_narrow", pack.gather_kernel, narrow | UNSCALED, "bf16", {"num_warps": 4}))
    block = {"B": 32, "BLOCK": 32, "LANES": 128} | rows(32, 32)
    found.append(("gather_block", pack.gather_kernel, block | UNSCALED, "bf16", {"num_warps": 4}))
    found.append(("unpack_block", unpack.unpack_kernel, block | {"FORMAT": 0}, "bf16", {"num_warps": 4}))
    narrow |= {"FORMAT": 0}
    found.append(("unpack_narrow", unpack.unpack_kernel, narrow, "bf16", {"num_warps": 4}))
    return found


def in_turn(found: list[Specimen], target: int) -> list[Specimen]:
    """Return each kernel with one of its types of values, which take turns from kernel to kernel and target to target.

    To compile all kernels of all targets takes minutes.
    """
    by_label: dict[str, list[Specimen]] = {}
    for specimen in found:
        by_label.setdefault(specimen[0], []).append(specimen)
    first = list(SHARED_MEMORY).index(target)
    return [types[(first + number) % len(types)] for number, types in enumerate(by_label.values())]


def rows(length: int, block_size: int) -> dict[str, int]:
    """Return the constants of rows that follow each other without gaps."""
    return {"length": length, "columns": ceil_div(length, block_size), "UNIT": stride_unit(length)}


def weight_grad_specimen(size: int, value: str, target: int) -> Specimen:
    """Return the weight gradient of 1536 outputs, configured as on a GPU with that much shared memory."""
    machine = linear.Machine(132, SHARED_MEMORY[target], target // 10)
    config = linear.choose_config(size, 1536, 4 if value == "fp32" else 2, machine)
    sizes = {"B": size, "BLOCK": max(16, triton.next_power_of_2(size)), "BM": config.bm, "BK": config.bk}
    sizes |= {"SPLIT": True, "NARROW": True}
    modes = {"VALUES_FIRST": config.values_first, "UPCAST": False, "PRECISION": "ieee"}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return f"weight_grad_b{size}", linear.weight_grad_kernel, sizes | modes, value, options


def compile_kernel(
    kernel: Any, constants: dict[str, Any], value: str, options: dict[str, int], capability: int
) -> dict[str, Any]:
    """Return what the compiled kernel uses."""
    signature, attrs, x = {}, {}, "fp32" if constants.get("CAST") else value
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32").format(v=value, x=x)
        if name not in constants and name.endswith(ALIGNED):
            attrs[(index,)] = [["tt.divisibility", 16]]
    if "out_ptr" in signature and "grad_ptr" in signature and "codes_ptr" not in signature:
        signature["out_ptr"] = "*fp32"
    if constants.get("ADDED"):
        signature["y_ptr"] = "*fp32"
    if constants.get("FORMAT"):
        signature |= {name: "*u8" for name in ("values_ptr", "scratch_ptr") if name in signature}
    for name in ("stride_sample", "stride_outer"):
        if name in signature:
            signature[name] = "i64"
    constexprs = {(kernel.arg_names.index(name),): constant for name, constant in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        **resources(binary.asm["cubin"]),
        "smem": binary.metadata.shared,
        "ptx": features(binary.asm["ptx"]),
        "async_from": async_sources(binary.asm["ttgir"], [n for n in kernel.arg_names if n not in constants]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of stack and local memory (both hold spills) from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"]}


def features(ptx: str) -> dict[str, int]:
    """Return how often the instructions occur that decide about speed."""
    patterns = {
        "wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"tcgen05\.mma",
        "async16": r"cp\.async\.cg\.shared\.global [^;]*?0x10\b|cp\.async\.cg\.shared\.global [^;]*, 16",
        "async_small": r"cp\.async\.ca\.shared\.global", "load16": r"ld\.global[\w.:]*\.v4\.b32",
        "store16": r"st\.global[\w.:]*\.v4\.b32", "load8": r"ld\.global[\w.:]*\.v2\.b32",
        "store8": r"st\.global[\w.:]*\.v2\.b32", "load2": r"ld\.global[\w.:]*\.b16",
        "store2": r"st\.global[\w.:]*\.b16",
    }  # fmt: skip
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def async_sources(ttgir: str, arguments: list[str]) -> dict[str, int]:
    """Return from which kernel argument how many asynchronous copies to shared memory read, prologue included."""
    defined = dict(re.findall(r"^ *(%[\w-]+) = \S+ (%[\w-]+)", ttgir, re.MULTILINE))  # result -> its first operand
    names = {f"%arg{i}": argument for i, argument in enumerate(arguments)}  # as Triton calls them before 3.5
    found: Counter[str] = Counter()
    for name in re.findall(r"ttg\.async_copy_global_to_local (%[\w-]+)", ttgir):
        while name in defined:  # a pointer is the first operand of everything that makes one from another
            name = defined[name]
        found[names.get(name, name.removeprefix("%"))] += 1
    return dict(found)


def print_records(of_target: Callable[[int], list[Specimen]]) -> None:
    """Compile the specimens of the targets that the command line names, and print a record of each."""
    made = {target: of_target(target) for target in map(int, sys.argv[1:])}
    _specimens.update(made)
    jobs = [(target, index) for target, found in made.items() for index in range(len(found))]
    # Forked, because importing torch and triton takes longer than compiling a few kernels, and kernels do not travel.
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        for line in pool.imap(_record, jobs):
            print(line, flush=True)


_specimens: dict[int, list[Specimen]] = {}
"""By target; forked processes find them here."""


def _record(job: tuple[int, int]) -> str:
    target, index = job
    label, kernel, constants, value, options = _specimens[target][index]
    used = compile_kernel(kernel, constants, value, options, target)
    return json.dumps(
        {"kernel": label, "value": value, "target": target, "constants": constants, "options": options, **used}
    )


if __name__ == "__main__":
    print_records(specimens)
