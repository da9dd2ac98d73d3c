"""Compile every kernel for GPUs that are not there, in a process without TRITON_INTERPRET; print a record of each."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_actprune.codec.blocks import MAX_BLOCK_SIZE, ceil_div
from lightning_actprune.kernels import activation, channel_norm, gated, linear, norm, pack, sums, unpack
from lightning_actprune.kernels.formats import PAIRED_BLOCK, encode_format, tile_width, whole_blocks
from lightning_actprune.kernels.places import choose_turns, run_tile, stride_unit
from lightning_actprune.operators.activation import StoredDerivative

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

SHARED_MEMORY = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
"""What a block of threads may ask for, in bytes."""
BLOCK_SIZES = (16, 24, 32, 64, 128)
"""24 is no power of two: its tile is as wide as that of 32, a quarter of it masked."""
WEIGHT_GRADS = {"bf16": BLOCK_SIZES, "fp16": (32,), "fp32": (32, 128)}
"""fp16 differs from bf16 in the opcode of the product alone; of fp32, both ways round, with the largest accumulator."""
NARROW_ROW = 196
"""Values of a row that 4 divides and 8 does not."""
UNSCALED = {"keys_ptr": None}
"""What a kernel that copies or quantizes blocks gets if these are not scaled."""
FORMATS = [(4, 32), (2, 64), (8, 32), (3, 32), (4, 24), (3, 24), (4, 256), (2, 16)]
"""Bits and block sizes."""
WIDE = (4, 1024)
"""The largest block, which the weight gradient does not dequantize by itself."""

ACTIVATIONS = [("gelu", bits) for bits in (8, 4, 3, 2)]
ACTIVATIONS += [(name, 4) for name in ("silu", "tanh", "softplus", "elu", "relu")]
PARAMETERS = {"softplus": (1.0, 20.0), "elu": (1.0,)}

GATES = [("silu", bits, 32, 11008, "bf16") for bits in (8, 4, 3, 2)]
GATES += [(name, 4, 32, 11008, "bf16") for name in ("gelu", "gelu_tanh", "relu", "sigmoid")]
GATES += [("silu", 4, 32, 8192, "fp32"), ("silu", 4, 1024, 8192, "bf16"), ("gelu", 4, 24, 100, "bf16")]
"""Function, bits, block size, length and type: those of MLPs, the widest blocks, unaligned ones."""

NORMS = [(4, 32, 768, "fp32"), (2, 32, 4096, "bf16"), (4, 32, 8192, "fp32"), (4, 24, 100, "bf16")]
"""Bits, block size, length and type: rows of 24 blocks, of a power of two, the longest, unaligned ones."""
AFFINE, SCALED = (4, 32, 384, "fp32"), (2, 32, 384, "bf16")
"""The same of an affine layer, and of a branch of 16 bits that is scaled and added to an fp32 residual."""

CUTS = {
    "nhwc64": (25088, 64, 1), "nhwc40": (25088, 40, 1), "nchw56": (32, 64, 3136), "nchw7": (256, 2048, 49),
    "groups": (1, 1024, 784),
}  # fmt: skip
"""Images, channels and length: channels last (also a number that blocks do not divide) and contiguous."""
CHANNELS = [("nhwc64", 4, "bf16"), ("nhwc64", 4, "fp32"), ("nhwc40", 8, "fp16"), ("nchw56", 4, "bf16")]
CHANNELS += [("nchw7", 4, "bf16"), ("groups", 3, "bf16")]
RELUS = [("nhwc64", 4, "bf16"), ("nhwc40", 8, "fp32"), ("nchw56", 4, "bf16"), ("nchw7", 4, "bf16")]
"""Batch normalisations that are followed by a ReLU."""

Specimen = tuple[str, Any, dict[str, Any], str, dict[str, int]]
"""Label, kernel, constexprs, value type, options."""


def of_blocks(target: int) -> list[Specimen]:
    """Kernels that select, copy, unpack and multiply blocks of values that are not quantized."""
    shared, four = {"CAST": False, "B": 32, "BLOCK": 32, "ZEROS": 4, "SELECT": 0}, {"num_warps": 4}
    tile = shared | {"ROWS": 2, "COLS": 64} | rows(1536, 32)
    narrow = shared | {"ROWS": 16, "COLS": 8} | rows(NARROW_ROW, 32)
    block, cast = shared | {"ROWS": 128, "COLS": 1} | rows(32, 32), {"CAST": True}
    keys = [("keys", tile, "bf16"), ("keys", tile, "fp32"), ("keys_swap", tile | {"SELECT": pack.SWAP.value}, "bf16")]
    keys += [("keys_unbiased", tile | {"SELECT": pack.UNBIASED.value}, "bf16"), ("keys_narrow", narrow, "bf16")]
    keys += [("keys_block", block, "bf16"), ("keys_cast_block", block | cast, "bf16")]
    keys += [("keys_cast", tile | cast, "bf16"), ("keys_cast", tile | cast, "fp16")]
    keys += [("keys_cast_narrow", narrow | cast, "bf16")]
    result = [(label, pack.block_keys_kernel, constants, value, four) for label, constants, value in keys]
    result += [
        ("select", pack.select_kernel, {"BLOCKS": 32768, "PIECE": 8192}, "fp32", {"num_warps": 16}),
        ("select", pack.select_kernel, {"BLOCKS": 16384, "PIECE": 16384}, "fp32", {"num_warps": 8}),
        ("select_rows", pack.select_rows_kernel, {"GROUP": 128, "BLOCKS": 32}, "fp32", four),
        ("select_shared", pack.select_shared_kernel, {"PIECE": 8192}, "fp32", {"num_warps": 16}),
        ("largest_dropped", pack.largest_dropped_kernel, {"GROUP": 1, "BLOCKS": 4096}, "fp32", four),
        ("largest_dropped", pack.largest_dropped_kernel, {"GROUP": 128, "BLOCKS": 32}, "fp32", four),
        ("count_columns", linear.count_columns_kernel, {"TILE": 128, "COLS": 32}, "fp32", four),
        ("list_columns", linear.list_columns_kernel, {"TILE": 128, "COLS": 32}, "fp32", {"num_warps": 8}),
        ("add_parts", linear.add_parts_kernel, {"B": 32, "OUTS": 16, "COLS": 128}, "bf16", four),
    ]
    for (value, size), parts in itertools.product((("bf16", 2), ("fp32", 4)), (0, sums.MOST_PARTS)):
        added = {"ROWS": sums.TILE_BYTES // (sums.COLS * size), "COLS": sums.COLS, "STAGES": sums.STAGES}
        added["PARTS"] = parts
        result.append(("column_sums", sums.column_sums_kernel, added | {"WIDE": False}, value, four))
        if value == "fp32":
            result.append(("add_sets", sums.add_sets_kernel, added, value, four))
    result += [weight_grad_specimen(size, value, target) for value in WEIGHT_GRADS for size in WEIGHT_GRADS[value]]
    types = types_of(target)
    for size in (*BLOCK_SIZES, MAX_BLOCK_SIZE):
        _, sizes, options = run_tile(64, 4704, size)
        constants = dict(zip(("B", "BLOCK", "LANES"), sizes, strict=True)) | rows(6 * size, size)
        result.append((f"gather_b{size}", pack.gather_kernel, constants | UNSCALED, next(types), options))
        result.append((f"gather_scaled_b{size}", pack.gather_kernel, constants, next(types), options))
        result.append(
            (f"unpack_b{size}", unpack.unpack_kernel, constants | {"FLAT": False, "FORMAT": 0}, next(types), options)
        )
    for name, length in (("narrow", NARROW_ROW), ("block", 32)):
        run = {"B": 32, "BLOCK": 32, "LANES": 128} | rows(length, 32)
        result.append((f"gather_{name}", pack.gather_kernel, run | UNSCALED, "bf16", four))
        result.append((f"unpack_{name}", unpack.unpack_kernel, run | {"FLAT": False, "FORMAT": 0}, "bf16", four))
    return result


def of_formats(target: int) -> list[Specimen]:
    result, types, four = list[Specimen](), types_of(target), {"num_warps": 4}
    for bits, size in (*FORMATS, WIDE):
        constants, options = turned(bits, size)
        quantize, name = pack.quantize_kernel, f"{bits}_b{size}"
        result.append((f"quantize_{name}", quantize, constants | UNSCALED, next(types), options))
        result.append((f"quantize_scaled_{name}", quantize, constants, next(types), options))
        result.append((f"unpack_{name}", unpack.unpack_kept_kernel, constants, next(types), options))
        if (bits, size) == WIDE:
            continue
        block, blocks = whole_blocks(size)
        constants = {"B": size, "BLOCK": block, "FORMAT": encode_format(bits, size)}
        counted = constants | {"TILE": 128, "COLS": 16, "BLOCKS": blocks}
        result.append((f"count_and_dequantize_{name}", linear.count_and_dequantize_kernel, counted, next(types), four))
        constants |= {"CAST": False, "FLAT": False, "PAIRS": False, "TILE": blocks} | rows(6 * size, size)
        result.append((f"quantize_all_{name}", pack.quantize_all_kernel, constants, next(types), four))
        if (bits, size) == (4, 32):
            more = {"CAST": True}, rows(32, 32)  # also of rows of one block, as a convolution has them
            result += [("quantize_all_more", pack.quantize_all_kernel, constants | one, "bf16", four) for one in more]
        if size == PAIRED_BLOCK.value:
            pairs = constants | {"FLAT": True, "PAIRS": True, "TILE": 2 * blocks}
            result += [
                (f"quantize_pairs_{name}", pack.quantize_all_kernel, pairs, value, four) for value in ("bf16", "fp16")
            ]
            run = {"B": 32, "BLOCK": 32, "LANES": 128, "FLAT": True, "FORMAT": constants["FORMAT"]} | rows(192, 32)
            result.append((f"unpack_all_{name}", unpack.unpack_kernel, run, "bf16", four))
    for size in (64, 1000):  # almost nothing is kept, of rows that are not aligned
        constants, options = turned(4, size, 6.4, 6 * size + 6)
        result.append((f"sparse_unpack_4_b{size}", unpack.unpack_kept_kernel, constants, next(types), options))
    _, (_, _, lanes), options = run_tile(64, 4704, 32)
    for length in (192, 32):
        tile = {"B": 32, "BLOCK": min(64, tile_width(32)), "LANES": lanes, "FORMAT": encode_format(4, 32)}
        constants = tile | {"FLAT": False} | rows(length, 32)
        result.append((f"unpack_all_{length}", unpack.unpack_kernel, constants, "bf16", options))
    return result


def types_of(target: int) -> Iterator[str]:
    """Return types of values that take turns from kernel to kernel and from target to target."""
    return itertools.islice(itertools.cycle(("bf16", "fp32")), list(SHARED_MEMORY).index(target) % 2, None)


def rows(length: int, block_size: int) -> dict[str, int]:
    return {"length": length, "columns": ceil_div(length, block_size), "UNIT": stride_unit(length)}


def turned(bits: int, size: int, kept: float = 51.2, length: int | None = None) -> tuple[dict[str, Any], dict]:
    """Return constants and options of kernels that find kept blocks by rank: so many of 128, by default at .6."""
    _, (_, _, lanes), _ = run_tile(64, 4704, size)
    turns = choose_turns(tile_width(size), kept)
    tile = {"B": size, "BLOCK": tile_width(size), "TILE": turns.tile, "PARTS": turns.parts, "LANES": lanes}
    return tile | {"FORMAT": encode_format(bits, size)} | rows(length or 6 * size, size), {"num_warps": turns.warps}


def of_activations(target: int) -> list[Specimen]:
    result = []
    for function, bits in ACTIVATIONS:
        stored = StoredDerivative(function, PARAMETERS.get(function, ()), bits)
        label = f"{function}_{'bit' if stored.exact() else f'int{bits}'}"
        kernels = {"activate": (activation.activate_kernel, stored.forward_constants())}
        if function in ("gelu", "relu"):
            kernels["activation_grad"] = activation.activation_grad_kernel, stored.backward_constants()
        for value, (name, (kernel, scalars)) in itertools.product(("bf16", "fp32"), kernels.items()):
            scalars = (*scalars, activation.TILE)
            constants = dict(zip(kernel.arg_names[-len(scalars) :], scalars, strict=True))
            if value == "bf16" or (function, bits) in (("gelu", 4), ("relu", 4)):
                result.append((f"{name}_{label}", kernel, constants, value, {"num_warps": 4}))
    mask = {"TILE": 2 * activation.TILE}
    return [*result, ("pack_mask", activation.pack_mask_kernel, mask, "bf16", {"num_warps": 4})]


def of_gates(target: int) -> list[Specimen]:
    result = []
    names = "FUNCTION", "P", "Q", "LOWER", "HIGHER", "EXACT", "FOR_A", "FOR_U"
    for function, bits, size, length, value in GATES:
        single = [(1, 0), (0, 1)] if (function, bits, size, value) == ("silu", 4, 32, "bf16") else []
        for wanted in [(1, 1), *single]:
            blocks = rows(length, size) | gated.block_constants(size, bits)
            label = f"int{bits}_b{size}_{length}" + ("" if all(wanted) else "_for_" + "au"[wanted[1]])
            stored = StoredDerivative(function, (), bits)
            scalars = *stored.function_constants(), *stored.bounds(), stored.exact(), *wanted
            forward = blocks | dict(zip(names, scalars, strict=True))
            result.append((f"gate_{function}_{label}", gated.gate_kernel, forward, value, {"num_warps": 4}))
            if function == "silu" or size == 24:
                backward = blocks | {"FOR_A": wanted[0], "FOR_U": wanted[1]}
                result.append((f"gate_grad_{label}", gated.gate_grad_kernel, backward, value, {"num_warps": 4}))
    return result


def of_norms(target: int) -> list[Specimen]:
    result = []
    for case in (*NORMS, AFFINE, SCALED):
        bits, size, length, value = case
        normed, added = case in NORMS, case == SCALED
        sizes, warps = norm.tile_of(length, size)
        constants = rows(length, size) | sizes | {"WEIGHTED": True, "CENTRED": normed, "NORMED": normed}
        constants["FORMAT"] = encode_format(bits, size)
        forward = constants | {"BIASED": not added, "ADDED": added, "ROUNDED": False}
        backward, options = constants | {"OF_WEIGHT": True, "OF_BIAS": not added}, {"num_warps": warps}
        label = f"{bits}_b{size}_{length}"
        result.append((f"normalize_{label}", norm.normalize_kernel, forward, value, options))
        options = options | {"maxnreg": norm.REGISTERS}
        result.append((f"normalize_grad_{label}", norm.normalize_grad_kernel, backward, value, options))
    return result


def of_channels(target: int) -> list[Specimen]:
    merge = dict(zip(("PARTS", "CHANNELS"), channel_norm.merge_tile(528), strict=True))
    merge |= {"TRACKED": True, "COUNTED": True}
    add = {"WEIGHTED": True, "FIXED": False, "OF_WEIGHT": True, "OF_BIAS": True}
    add |= {"ROWS": channel_norm.ADDED_ROWS, "CHANNELS": channel_norm.ADDED_CHANNELS}
    result = [
        ("merge_statistics", channel_norm.merge_statistics_kernel, merge, "fp32", {"num_warps": 4}),
        ("add_sums", channel_norm.add_sums_kernel, add, "fp32", {"num_warps": 4}),
    ]
    for name, bits, value in CHANNELS:
        result += of_cut(name, bits, value, relu=False)
    for name, bits, value in RELUS:
        result += of_cut(name, bits, value, relu=True)[1:]  # all but the statistics
    return result


def of_cut(name: str, bits: int, value: str, relu: bool) -> list[Specimen]:
    _, channels, length = cut = CUTS[name]
    group, values = channel_norm.statistics_tile(channels, length)
    flat = channel_norm.flat_constants(channel_norm.Stored(cut, 32, bits, torch.device("cuda"), relu))
    if length == 1:
        sums_kernel, tile = channel_norm.pixel_sums_kernel, channel_norm.pixel_tile(channels, 32) | {"EXACT": True}
    else:
        sums_kernel, tile = channel_norm.channel_sums_kernel, channel_norm.channel_tile(channels, length, 32)
    read = {"LENGTH": length, "PIXEL": channels if length == 1 else 0, "CHANNELS": group, "VALUES": values}
    read["STAGES"] = channel_norm.STAGES
    written = flat | {"WEIGHTED": True, "BIASED": True, "RELU": relu}
    kernels = [
        ("statistics", channel_norm.channel_statistics_kernel, read),
        ("channels_normalize", channel_norm.normalize_channels_kernel, written),
        ("channel_sums", sums_kernel, tile | {"FORMAT": encode_format(bits, 32), "RELU": relu}),
        ("channels_grad", channel_norm.channel_grad_kernel, flat | {"RELU": relu}),
    ]
    label = f"{name}_{bits}" + "_relu" * relu
    return [(f"{kind}_{label}", kernel, constants, value, {"num_warps": 4}) for kind, kernel, constants in kernels]


FAMILIES = {
    "blocks": of_blocks, "formats": of_formats, "activations": of_activations, "gates": of_gates, "norms": of_norms,
    "channels": of_channels,
}  # fmt: skip


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
        "instructions": count_instructions(binary.asm["cubin"]) if constants.get("FLAT") else None,
        "smem": binary.metadata.shared,
        "ptx": features(binary.asm["ptx"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of stack and local memory (both hold spills) from the machine code."""
    numbers = {
        key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", dump(cubin, "resource-usage"))
    }
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "local": numbers["LOCAL"]}


def count_instructions(cubin: bytes) -> int:
    """Return the instructions up to the last exit; jumps to themselves and others that do nothing are behind it."""
    code = dump(cubin, "sass")
    return len(re.findall(r"/\*[0-9a-f]{4}\*/ +(?!NOP)", code[: code.rindex("EXIT")]))


def dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.check_output([CUOBJDUMP, f"--dump-{what}", file.name], text=True, stderr=subprocess.DEVNULL)


def features(ptx: str) -> dict[str, int]:
    patterns = {
        "wgmma": r"wgmma\.mma_async", "mma": r"\bmma\.sync", "tcgen05": r"tcgen05\.mma",
        "async16": r"cp\.async\.cg\.shared\.global [^;]*?0x10\b|cp\.async\.cg\.shared\.global [^;]*, 16",
        "async_small": r"cp\.async\.ca\.shared\.global", "load16": r"ld\.global[\w.:]*\.v4\.b32",
        "store16": r"st\.global[\w.:]*\.v4\.b32", "load8": r"ld\.global[\w.:]*\.v2\.b32",
        "store8": r"st\.global[\w.:]*\.v2\.b32", "load2": r"ld\.global[\w.:]*\.b16",
        "store2": r"st\.global[\w.:]*\.b16", "nan": r"\b(?:min|max)\.NaN",
    }  # fmt: skip
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def specimens(target: int) -> dict[tuple[str, int], Specimen]:
    """Return what the launch functions use for usual sizes on a GPU of compute capability ``target / 10``."""
    return {(name, i): one for name, of in FAMILIES.items() for i, one in enumerate(of(target))}


def main(targets: list[int]) -> None:
    jobs = [(target, *key) for target in targets for key in _specimens.setdefault(target, specimens(target))]
    # Forked, because importing torch and triton takes longer than compiling a few kernels, and kernels do not travel.
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        for line in pool.imap(_record, jobs):
            print(line, flush=True)


_specimens: dict[int, dict[tuple[str, int], Specimen]] = {}
"""By target; forked processes find them here."""


def _record(job: tuple[int, str, int]) -> str:
    target, family, index = job
    label, kernel, constants, value, options = _specimens[target][family, index]
    used = compile_kernel(kernel, constants, value, options, target)
    names = {"family": family, "kernel": label, "value": value, "target": target}
    return json.dumps({**names, "constants": constants, "options": options, **used})


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
