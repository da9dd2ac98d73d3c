"""Compile the kernels of gated products for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import gated
from lightning_actprune.operators.activation import StoredDerivative
from tests.kernels.compile_only import Specimen, print_records, rows

CASES = [("silu", bits, 32, 11008, "bf16") for bits in (8, 4, 3, 2)]
CASES += [(name, 4, 32, 11008, "bf16") for name in ("gelu", "gelu_tanh", "relu", "sigmoid")]
CASES += [("silu", 4, 32, 8192, "fp32"), ("silu", 4, 1024, 8192, "bf16")]
CASES += [("gelu", 4, 24, 100, "bf16")]
"""Function, bits, block size, length and type: those of MLPs, the widest blocks, unaligned ones."""
SINGLE = [(1, 0), (0, 1)]
"""What is kept where one input needs no gradient."""


def function_constants(stored: StoredDerivative, wanted: tuple[int, int]) -> dict[str, object]:
    """Return what ``gate_kernel`` knows at compile time of a function."""
    names = "FUNCTION", "P", "Q", "LOWER", "HIGHER", "EXACT", "FOR_A", "FOR_U"
    return dict(zip(names, (*stored.function_constants(), *stored.bounds(), stored.exact(), *wanted), strict=True))


def specimens() -> list[Specimen]:
    """Return both kernels as the launch functions use them."""
    found = []
    for function, bits, size, length, value in CASES:
        for wanted in [
            (1, 1),
            *(SINGLE if (function, bits, size, value) == ("silu", 4, 32, "bf16") else []),
        ]:
            blocks = rows(length, size) | gated.block_constants(size, bits)
            name = "" if all(wanted) else "_for_" + "au"[wanted[1]]
            label = f"int{bits}_b{size}_{length}{name}"
            forward = blocks | function_constants(StoredDerivative(function, (), bits), wanted)
            found.append((f"gate_{function}_{label}", gated.gate_kernel, forward, value, {"num_warps": 4}))
            if function == "silu" or size == 24:
                backward = blocks | {"FOR_A": wanted[0], "FOR_U": wanted[1]}
                found.append((f"gate_grad_{label}", gated.gate_grad_kernel, backward, value, {"num_warps": 4}))
    return found


if __name__ == "__main__":
    print_records(lambda target: specimens())
