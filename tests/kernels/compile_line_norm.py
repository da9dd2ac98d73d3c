"""Compile the kernels of batch and group normalisation for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import line_norm, line_norm_grad
from lightning_actprune.kernels.formats import encode_format
from tests.kernels.compile_only import Specimen, print_records

CUTS = {
    "nhwc64": (25088, 64, 1), "nhwc2048": (12544, 2048, 1), "nhwc40": (25088, 40, 1), "nchw56": (32, 64, 3136),
    "nchw7": (256, 2048, 49), "groups": (1, 1024, 784),
}  # fmt: skip
"""Images, lines and length: channels last, of them some that blocks do not divide, and contiguous."""
CASES = [(name, "int4", "bf16") for name in CUTS]
CASES += [("nhwc64", "int4", "fp32"), ("nchw56", "int2", "fp32"), ("nchw7", "int3", "bf16"), ("nhwc64", "fp8", "fp16")]
BLOCK_SIZE = 32


def specimens() -> list[Specimen]:
    """Return all kernels as the launch functions use them."""
    found = [
        (
            "merge_statistics", line_norm.merge_statistics_kernel,
            {"PARTS": line_norm.MOST_PARTS, "LINES": line_norm.MERGED_LINES}, "fp32", {"num_warps": 4},
        ),
        (
            "add_sums", line_norm_grad.add_sums_kernel,
            {"WEIGHTED": True, "ROWS": line_norm_grad.ADDED_ROWS, "LINES": line_norm_grad.ADDED_LINES}, "fp32",
            {"num_warps": 4},
        ),
    ]  # fmt: skip
    for name, value_format, value in CASES:
        found.extend(of_cut(name, value_format, value))
    return found


def of_cut(name: str, value_format: str, value: str) -> list[Specimen]:
    """Return the kernels that read the tensor."""
    _, lines, length = cut = CUTS[name]
    group, values = line_norm.statistics_tile(lines, length)
    flat = line_norm.flat_constants(cut, BLOCK_SIZE, value_format)
    if length == 1:
        sums, tile = line_norm_grad.pixel_sums_kernel, line_norm_grad.pixel_tile(lines, BLOCK_SIZE) | {"EXACT": True}
    else:
        sums, tile = line_norm_grad.line_sums_kernel, line_norm_grad.line_tile(lines, length, BLOCK_SIZE)
    read = {"LENGTH": length, "LINES": group, "VALUES": values, "STAGES": line_norm.STAGES}
    made = [
        ("statistics", line_norm.line_statistics_kernel, read),
        ("normalize", line_norm.normalize_lines_kernel, flat | {"WEIGHTED": True, "BIASED": True}),
        ("sums", sums, tile | {"FORMAT": encode_format(value_format, BLOCK_SIZE)}),
        ("grad", line_norm_grad.line_grad_kernel, flat),
    ]
    label = f"{name}_{value_format}"
    return [(f"{kind}_{label}", kernel, constants, value, {"num_warps": 4}) for kind, kernel, constants in made]


if __name__ == "__main__":
    print_records(lambda target: specimens())
