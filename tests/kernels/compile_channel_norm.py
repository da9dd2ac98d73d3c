"""Compile the kernels of batch and group normalisation for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

import torch

from lightning_actprune.kernels import channel_norm
from lightning_actprune.kernels.formats import encode_format
from tests.kernels.compile_only import Specimen, print_records

CUTS = {
    "nhwc64": (25088, 64, 1), "nhwc40": (25088, 40, 1), "nchw56": (32, 64, 3136), "nchw7": (256, 2048, 49),
    "groups": (1, 1024, 784),
}  # fmt: skip
"""Images, channels and length: channels last, of them some that blocks do not divide, and contiguous."""
CASES = [("nhwc64", 4, "bf16"), ("nhwc64", 4, "fp32"), ("nhwc40", 8, "fp16"), ("nchw56", 4, "bf16")]
CASES += [("nchw7", 4, "bf16"), ("groups", 3, "bf16")]
RELUS = [("nhwc64", 4, "bf16"), ("nhwc40", 8, "fp32"), ("nchw56", 4, "bf16"), ("nchw7", 4, "bf16")]
"""Those of a batch normalisation with the ReLU after it."""
BLOCK_SIZE = 32


def specimens() -> list[Specimen]:
    """Return all kernels as the launch functions use them."""
    found = [
        (
            "merge_statistics", channel_norm.merge_statistics_kernel,
            dict(zip(("PARTS", "CHANNELS"), channel_norm.merge_tile(528), strict=True))
            | {"TRACKED": True, "COUNTED": True},
            "fp32", {"num_warps": 4},
        ),
        (
            "add_sums", channel_norm.add_sums_kernel,
            {"WEIGHTED": True, "FIXED": False, "OF_WEIGHT": True, "OF_BIAS": True}
            | {"ROWS": channel_norm.ADDED_ROWS, "CHANNELS": channel_norm.ADDED_CHANNELS},
            "fp32", {"num_warps": 4},
        ),
    ]  # fmt: skip
    for name, bits, value in CASES:
        found.extend(of_cut(name, bits, value))
    for name, bits, value in RELUS:
        found.extend(of_cut(name, bits, value, relu=True)[1:])  # all but the statistics
    return found


def of_cut(name: str, bits: int, value: str, relu: bool = False) -> list[Specimen]:
    """Return the kernels that read the tensor."""
    _, channels, length = cut = CUTS[name]
    group, values = channel_norm.statistics_tile(channels, length)
    stored = channel_norm.Stored(cut, BLOCK_SIZE, bits, torch.device("cuda"), relu)
    flat = channel_norm.flat_constants(stored)
    if length == 1:
        sums, tile = channel_norm.pixel_sums_kernel, channel_norm.pixel_tile(channels, BLOCK_SIZE) | {"EXACT": True}
    else:
        sums, tile = channel_norm.channel_sums_kernel, channel_norm.channel_tile(channels, length, BLOCK_SIZE)
    read = {"LENGTH": length, "PIXEL": channels if length == 1 else 0, "CHANNELS": group, "VALUES": values}
    read["STAGES"] = channel_norm.STAGES
    made = [
        ("statistics", channel_norm.channel_statistics_kernel, read),
        ("normalize", channel_norm.normalize_channels_kernel, flat | {"WEIGHTED": True, "BIASED": True, "RELU": relu}),
        ("sums", sums, tile | {"FORMAT": encode_format(bits, BLOCK_SIZE), "RELU": relu}),
        ("grad", channel_norm.channel_grad_kernel, flat | {"RELU": relu}),
    ]
    label = f"{name}_{bits}" + "_relu" * relu
    return [(f"{kind}_{label}", kernel, constants, value, {"num_warps": 4}) for kind, kernel, constants in made]


if __name__ == "__main__":
    print_records(lambda target: specimens())
