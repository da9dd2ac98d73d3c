"""Lightning callbacks: the only part of the package that imports Lightning."""

from lightning_actprune.callbacks.memory import ActivationMemoryMonitor
from lightning_actprune.callbacks.pruning import ActivationPruning

__all__ = ["ActivationMemoryMonitor", "ActivationPruning"]
