"""Compile the kernels of activation functions for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import activations
from lightning_actprune.ops.activations import Kept
from tests.kernels.compile_only import Specimen, print_records

PARAMETERS = {"softplus": (1.0, 20.0), "elu": (1.0,), "hardtanh": (-1.0, 1.0), "leaky_relu": (0.01,)}
CASES = [("gelu", name) for name in ("int8", "int4", "int3", "int2")]
CASES += [(name, "int4") for name in ("silu", "tanh", "softplus", "elu", "relu")]
"""Function and format."""
WIDE = [("gelu", "int4"), ("relu", "int4")]
"""Those that are compiled for fp32 too."""


def specimens() -> list[Specimen]:
    """Return what the launch functions use: of functions forward, of every kind of codes backward."""
    found = []
    for function, value_format in CASES:
        kept = Kept(function, PARAMETERS.get(function, ()), value_format)
        label = f"{function}_{'bit' if kept.exact else value_format}"
        for value in ("bf16", "fp32") if (function, value_format) in WIDE else ("bf16",):
            found.append(specimen(f"activate_{label}", activations.activate_kernel, kept, value))
            if function in ("gelu", "relu"):
                found.append(specimen(f"activation_grad_{label}", activations.activation_grad_kernel, kept, value))
    options = {"num_warps": 4}
    return [*found, ("pack_mask", activations.pack_mask_kernel, {"TILE": 2 * activations.TILE}, "bf16", options)]


def specimen(label: str, kernel, kept: Kept, value: str) -> Specimen:
    """Return one kernel with the constants of its launch."""
    forward = kernel is activations.activate_kernel
    scalars = activations.forward_constants(kept) if forward else activations.backward_constants(kept)
    names = kernel.arg_names[-len(scalars) :]
    return label, kernel, dict(zip(names, scalars, strict=True)), value, {"num_warps": 4}


if __name__ == "__main__":
    print_records(lambda target: specimens())
