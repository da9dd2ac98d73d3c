"""Compressed operators as functions, without modules, and a loss that never holds all logits."""

from lightning_actprune.operators.activation import activation as activation
from lightning_actprune.operators.cross_entropy import linear_cross_entropy as linear_cross_entropy
from lightning_actprune.operators.gated import gated as gated
from lightning_actprune.operators.linear import linear as linear
from lightning_actprune.operators.linear import pack as pack

__all__ = ["activation", "gated", "linear", "linear_cross_entropy", "pack"]
