"""Compile the kernels of batch and group normalisation for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import line_factors, line_norm, line_norm_grad, line_statistics
from lightning_actprune.kernels.formats import encode_format
from tests.kernels.compile_only import Specimen, print_records

CUTS = {
    "nhwc64": (25088, 64, 1), "nhwc40": (25088, 40, 1), "nchw56": (32, 64, 3136), "nchw7": (256, 2048, 49),
    "groups": (1, 1024, 784),
}  # fmt: skip
"""Images, lines and length: channels last, of them some that blocks do not divide, and contiguous."""
CASES = [("nhwc64", "int4", "bf16"), ("nhwc64", "int4", "fp32"), ("nhwc40", "fp8", "fp16"), ("nchw56", "int4", "bf16")]
CASES += [("nchw7", "int4", "bf16"), ("groups", "int3", "bf16")]
RELUS = [("nhwc64", "int4", "bf16"), ("nhwc40", "fp8", "fp32"), ("nchw56", "int4", "bf16"), ("nchw7", "int4", "bf16")]
"""Those of a batch normalisation with the ReLU after it."""
BLOCK_SIZE = 32


def specimens() -> list[Specimen]:
    """Return all kernels as the launch functions use them."""
    found = [
        (
            "merge_statistics", line_statistics.merge_statistics_kernel,
            dict(zip(("PARTS", "LINES"), line_statistics.merge_tile(528), strict=True))
            | {"TRACKED": True, "COUNTED": True},
            "fp32", {"num_warps": 4},
        ),
        (
            "add_sums", line_factors.add_sums_kernel,
            {"WEIGHTED": True, "FIXED": False, "OF_WEIGHT": True, "OF_BIAS": True}
            | {"ROWS": line_factors.ADDED_ROWS, "LINES": line_factors.ADDED_LINES},
            "fp32", {"num_warps": 4},
        ),
    ]  # fmt: skip
    for name, value_format, value in CASES:
        found.extend(of_cut(name, value_format, value))
    for name, value_format, value in RELUS:
        found.extend(of_cut(name, value_format, value, relu=True)[1:])  # all but the statistics
    return found


def of_cut(name: str, value_format: str, value: str, relu: bool = False) -> list[Specimen]:
    """Return the kernels that read the tensor."""
    _, lines, length = cut = CUTS[name]
    group, values = line_statistics.statistics_tile(lines, length)
    flat = line_norm.flat_constants(cut, BLOCK_SIZE, value_format)
    if length == 1:
        sums, tile = line_norm_grad.pixel_sums_kernel, line_norm_grad.pixel_tile(lines, BLOCK_SIZE) | {"EXACT": True}
    else:
        sums, tile = line_norm_grad.line_sums_kernel, line_norm_grad.line_tile(lines, length, BLOCK_SIZE)
    read = {"LENGTH": length, "PIXEL": lines if length == 1 else 0, "LINES": group, "VALUES": values}
    read["STAGES"] = line_statistics.STAGES
    made = [
        ("statistics", line_statistics.line_statistics_kernel, read),
        ("normalize", line_norm.normalize_lines_kernel, flat | {"WEIGHTED": True, "BIASED": True, "RELU": relu}),
        ("sums", sums, tile | {"FORMAT": encode_format(value_format, BLOCK_SIZE), "RELU": relu}),
        ("grad", line_norm_grad.line_grad_kernel, flat | {"RELU": relu}),
    ]
    label = f"{name}_{value_format}" + "_relu" * relu
    return [(f"{kind}_{label}", kernel, constants, value, {"num_warps": 4}) for kind, kernel, constants in made]


if __name__ == "__main__":
    print_records(lambda target: specimens())
