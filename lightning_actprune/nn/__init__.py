"""Drop-in modules."""

from lightning_actprune.nn.linear import ActivationPrunedLinear as ActivationPrunedLinear
