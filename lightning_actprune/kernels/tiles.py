"""Tile sizes of the weight gradient and into how many parts its reduction is cut: constants measured, none searched.

No kernel is tuned while a model trains. What follows was found on an H200; other GPUs differ in the shared memory, to
which the tiles are cut down, in the number of multiprocessors, to which the parts are fitted, and in how their tensor
cores take operands.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from lightning_actprune.ops.geometry import ceil_div


class Config(NamedTuple):
    """Tile sizes and launch parameters of ``weight_grad_kernel``."""

    bm: int
    bk: int
    warps: int
    stages: int
    values_first: bool


class Machine(NamedTuple):
    """What the choice of a configuration needs to know about a device."""

    multiprocessors: int
    shared_memory: int
    major: int


@functools.cache
def machine(device: torch.device) -> Machine:
    """Return the limits of ``device``; for the CPU's interpreter, few multiprocessors."""
    if device.type != "cuda":
        return Machine(4, 232448, 9)
    found = torch.cuda.get_device_properties(device)
    return Machine(found.multi_processor_count, found.shared_memory_per_block_optin, found.major)


CONFIGS = {
    2: {
        16: Config(128, 64, 8, 3, False),
        32: Config(128, 32, 4, 3, False),
        64: Config(128, 64, 8, 3, True),
        128: Config(128, 64, 8, 3, True),
        256: Config(128, 64, 8, 3, True),
    },
    4: {
        16: Config(128, 16, 2, 3, False),
        32: Config(128, 32, 4, 3, False),
        64: Config(64, 32, 4, 3, True),
        128: Config(64, 32, 4, 3, False),
        256: Config(64, 16, 8, 3, True),
    },
}
"""By bytes per value and block size: the best on an H200 of up to 12 each, in the geometric mean over five layers at
s = .6 and .9 (``examples/benchmarks/tune_weight_grad.py``); b = 256 by the reuse of a tile."""


FP32_BEFORE_HOPPER = {32: Config(128, 16, 4, 3, True), 128: Config(64, 16, 4, 3, True)}
"""Where the fp32 choice spills on compute capability 8.0 with Triton 3.9; not timed there."""


def choose_config(block_size: int, outputs: int, itemsize: int, machine: Machine) -> Config:
    """Return tile sizes for a block size, cut down until the pipeline's buffers fit into the shared memory."""
    block = max(16, triton.next_power_of_2(block_size))
    config = CONFIGS[itemsize][block]
    if itemsize == 4 and machine.major < 9:
        config = FP32_BEFORE_HOPPER.get(block, config)
    if itemsize == 4 and outputs <= 64:
        config = config._replace(bm=64)
    if itemsize == 2 and block <= 32 and machine.major not in (9, 10):
        # mma.sync takes a turned operand from registers only, so that grad_y could not be copied asynchronously.
        config = Config(128, 64, 8, 3, True)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.stages > 2:
        config = config._replace(stages=config.stages - 1)
    while config.stages * config.bk * (config.bm + block) * itemsize > machine.shared_memory and config.bk > 16:
        config = config._replace(bk=config.bk // 2)
    return config


MAX_IMBALANCE = 2.5
"""How many times the parts of a mean column one may have; a matter of memory for the partial tiles."""


FP32_ROWS = 512
"""Most rows that a part adds up one after another in fp32 where the reduction is cut at all.

The vendor's product cuts such reductions too; with 1,025 to 2,090 rows a part the error was 2.2 times its own. Where it
has tiles enough to fill the GPU it adds all rows one after another, more than are kept here. The bound on the memory of
the parts comes first: with some thousand outputs and few columns, a part may add up several times as many.
"""


class SplitRule(NamedTuple):
    """When and how far the reduction is cut into parts.

    Args:
        full: Warps of tiles per multiprocessor from which on it is not cut: further parts then cost up to twice the
            time, by the writing and reading of partial results.
        aim: Warps per multiprocessor wanted otherwise.
        most: Largest number of parts.
        turns: Least turns of the loop that a part is worth.
    """

    full: int
    aim: int
    most: int
    turns: int


SPLIT_RULES = {2: SplitRule(8, 12, 6, 4), 4: SplitRule(12, 32, 8, 8)}
"""By bytes per value."""


def choose_split(tiles: int, kept_per_column: int, config: Config, multiprocessors: int, rule: SplitRule) -> int:
    """Return into how many parts the reduction of a column of average length is cut."""
    warps = tiles * config.warps
    if warps >= rule.full * multiprocessors:
        return 1
    wanted = ceil_div(rule.aim * multiprocessors, warps)
    return max(1, min(wanted, rule.most, kept_per_column // (rule.turns * config.bk)))
