"""With which precisions linear layers can be pruned."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision


def check_precision(trainer: pl.Trainer, value_format: str, others: bool) -> None:
    """Raise if the trainer's precision plugin replaces the linear layers by its own, or values cannot be quantised."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, (TransformerEnginePrecision, BitsandbytesPrecision)):
        raise MisconfigurationException(
            f"ActivationPruning cannot work with {type(plugin).__name__}, which replaces the linear layers by its own. "
            'HINT: use another `precision`, such as "bf16-mixed".'
        )
    if (value_format != "same" or others) and str(trainer.precision) == "64-true":
        given = f"value_format={value_format!r}" if value_format != "same" else "`others`"
        raise MisconfigurationException(
            f"ActivationPruning cannot store float64 values (precision='64-true') with {given}: the scales of blocks "
            "have fewer bits than that. HINT: set `value_format='same'` or `preset='paper'`, and `others=False`, or "
            "another `precision`."
        )
