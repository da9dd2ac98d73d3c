"""Which precision plugins leave linear layers that can be pruned."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision


def check_precision(trainer: pl.Trainer) -> None:
    """Raise if the trainer's precision plugin replaces the linear layers by its own."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, (TransformerEnginePrecision, BitsandbytesPrecision)):
        raise MisconfigurationException(
            f"ActivationPruning cannot work with {type(plugin).__name__}, which replaces the linear layers by its own. "
            'HINT: use another `precision`, such as "bf16-mixed".'
        )
