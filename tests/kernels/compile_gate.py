"""Compile the kernels of gated products for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import gate
from lightning_actprune.ops.activations import Kept
from tests.kernels.compile_only import Specimen, print_records, rows

CASES = [("silu", name, 32, 11008, "bf16") for name in ("int8", "int4", "int3", "int2")]
CASES += [(name, "int4", 32, 11008, "bf16") for name in ("gelu", "gelu_tanh", "relu", "sigmoid")]
CASES += [("silu", "int4", 32, 8192, "fp32"), ("silu", "int4", 1024, 8192, "bf16")]
CASES += [("gelu", "int4", 24, 100, "bf16")]
"""Function, format, block size, length and type: those of MLPs, the widest blocks, unaligned ones."""
SINGLE = [(1, 0), (0, 1)]
"""What is kept where one input needs no gradient."""


def specimens() -> list[Specimen]:
    """Return both kernels as the launch functions use them."""
    found = []
    for function, value_format, size, length, value in CASES:
        for wanted in [
            (1, 1),
            *(SINGLE if (function, value_format, size, value) == ("silu", "int4", 32, "bf16") else []),
        ]:
            blocks = rows(length, size) | gate.block_constants(size, value_format)
            kept, name = Kept(function, (), value_format), "" if all(wanted) else "_for_" + "au"[wanted[1]]
            label = f"{value_format}_b{size}_{length}{name}"
            forward = blocks | gate.forward_constants(kept, wanted)
            found.append((f"gate_{function}_{label}", gate.gate_kernel, forward, value, {"num_warps": 4}))
            if function == "silu" or size == 24:
                backward = blocks | {"FOR_A": wanted[0], "FOR_U": wanted[1]}
                found.append((f"gate_grad_{label}", gate.gate_grad_kernel, backward, value, {"num_warps": 4}))
    return found


if __name__ == "__main__":
    print_records(lambda target: specimens())
