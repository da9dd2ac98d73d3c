"""Drop-in modules."""

from lightning_actprune.nn.affine import Affine as Affine
from lightning_actprune.nn.attention import ActivationPrunedMultiheadAttention as ActivationPrunedMultiheadAttention
from lightning_actprune.nn.linear import ActivationPrunedLinear as ActivationPrunedLinear
