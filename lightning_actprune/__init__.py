"""Cut the GPU memory of training by compressing the activations saved for backward.

Add two callbacks to a ``Trainer``::

    trainer = L.Trainer(callbacks=[ActivationPruning("max"), ActivationMemoryMonitor()])

or use ``convert`` / ``revert`` in a plain PyTorch loop. Importing this package does not initialise CUDA.
"""

import sys
from typing import TYPE_CHECKING

# `python -m lightning_actprune` imports this file before `__main__`, which needs no name and has to start fast.
_IS_COMMAND = sys.argv[:1] == ["-m"] and ("-m", __name__) in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)

if TYPE_CHECKING or not _IS_COMMAND:
    from lightning_actprune import functional as functional
    from lightning_actprune.analysis.sensitivity import measure_sensitivity
    from lightning_actprune.callbacks import ActivationMemoryMonitor, ActivationPruning
    from lightning_actprune.config import PRESETS, Keep, Recompute
    from lightning_actprune.convert import convert, revert
    from lightning_actprune.operators.linear import ActivationPrunedLinear

__version__ = "0.3.0"

__all__ = [
    "PRESETS",
    "ActivationMemoryMonitor",
    "ActivationPrunedLinear",
    "ActivationPruning",
    "Keep",
    "Recompute",
    "convert",
    "measure_sensitivity",
    "revert",
]
