"""With which precisions linear layers can be pruned."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, TransformerEnginePrecision

from lightning_actprune.conversion_options import ConversionOptions


def check_precision(trainer: pl.Trainer, options: ConversionOptions) -> None:
    """Raise if the trainer's precision plugin replaces the linear layers by its own, or values cannot be quantised."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, (TransformerEnginePrecision, BitsandbytesPrecision)):
        raise MisconfigurationException(
            f"ActivationPruning cannot work with {type(plugin).__name__}, which replaces the linear layers by its own. "
            'HINT: use another `precision`, such as "bf16-mixed".'
        )
    few_bits = _few_bits(options)
    if few_bits is not None and str(trainer.precision) == "64-true":
        raise MisconfigurationException(
            f"ActivationPruning cannot store float64 values (precision='64-true') with {few_bits}: the scales of "
            "blocks have fewer bits than that. HINT: set `value_format='same'` or `preset='paper'`, and "
            "`others=False`, or another `precision`."
        )


def _few_bits(options: ConversionOptions) -> str | None:
    """Return what asks for values of few bits, ``None`` if nothing does."""
    if options.value_format != "same":
        return f"value_format={options.value_format!r}"
    for pattern, settings in options.settings_by_name.items():
        if settings.value_format not in (None, "same"):
            return f"`layers[{pattern!r}]`, of value_format={settings.value_format!r}"
    return "`others`" if any(value_format != "same" for value_format in options.other_formats.values()) else None
