"""The compressed operators as functions, without modules."""

from lightning_actprune.operators.activation import activation as activation
from lightning_actprune.operators.gated import gated as gated
from lightning_actprune.operators.linear import linear as linear

__all__ = ["activation", "gated", "linear"]
