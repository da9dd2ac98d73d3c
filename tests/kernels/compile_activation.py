"""Compile the kernels of activation functions for real GPUs without one; see ``compile_only``."""

from __future__ import annotations

from lightning_actprune.kernels import activation
from lightning_actprune.operators.activation import StoredDerivative
from tests.kernels.compile_only import Specimen, print_records

PARAMETERS = {"softplus": (1.0, 20.0), "elu": (1.0,), "hardtanh": (-1.0, 1.0), "leaky_relu": (0.01,)}
CASES = [("gelu", bits) for bits in (8, 4, 3, 2)]
CASES += [(name, 4) for name in ("silu", "tanh", "softplus", "elu", "relu")]
"""Function and bits."""
WIDE = [("gelu", 4), ("relu", 4)]
"""Those that are compiled for fp32 too."""


def specimens() -> list[Specimen]:
    """Return what the launch functions use: of functions forward, of every kind of codes backward."""
    found = []
    for function, bits in CASES:
        stored = StoredDerivative(function, PARAMETERS.get(function, ()), bits)
        label = f"{function}_{'bit' if stored.exact() else f'int{bits}'}"
        for value in ("bf16", "fp32") if (function, bits) in WIDE else ("bf16",):
            found.append(specimen(f"activate_{label}", activation.activate_kernel, stored, value))
            if function in ("gelu", "relu"):
                found.append(specimen(f"activation_grad_{label}", activation.activation_grad_kernel, stored, value))
    options = {"num_warps": 4}
    return [*found, ("pack_mask", activation.pack_mask_kernel, {"TILE": 2 * activation.TILE}, "bf16", options)]


def specimen(label: str, kernel, stored: StoredDerivative, value: str) -> Specimen:
    """Return one kernel with the constants of its launch."""
    forward = kernel is activation.activate_kernel
    scalars = *(stored.forward_constants() if forward else stored.backward_constants()), activation.TILE
    names = kernel.arg_names[-len(scalars) :]
    return label, kernel, dict(zip(names, scalars, strict=True)), value, {"num_warps": 4}


if __name__ == "__main__":
    print_records(lambda target: specimens())
