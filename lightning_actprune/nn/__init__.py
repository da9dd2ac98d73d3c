"""Drop-in modules."""

from lightning_actprune.nn.affine import ActivationPrunedAffine as ActivationPrunedAffine
from lightning_actprune.nn.affine import Affine as Affine
from lightning_actprune.nn.attention import ActivationPrunedMultiheadAttention as ActivationPrunedMultiheadAttention
from lightning_actprune.nn.convolutions import ActivationPrunedConv1d as ActivationPrunedConv1d
from lightning_actprune.nn.convolutions import ActivationPrunedConv2d as ActivationPrunedConv2d
from lightning_actprune.nn.convolutions import ActivationPrunedConv3d as ActivationPrunedConv3d
from lightning_actprune.nn.linear import ActivationPrunedLinear as ActivationPrunedLinear
