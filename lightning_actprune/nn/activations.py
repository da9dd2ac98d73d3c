"""Activation functions as modules that keep their derivative, and in few bits; made by ``convert``.

Forward is exact. What backward needs is ``f'(x)``, which is kept as ``ops.activations`` says: in the bits of
``value_format`` with random errors of mean zero, or, of ReLU and its like, exactly in one. In no-grad mode, or if the
input needs no gradient, a module is the dense one in every respect.
"""

from __future__ import annotations

import functools
from typing import ClassVar, cast

from torch import Tensor, nn

from lightning_actprune.functional import activation_unchecked, keeps_derivative
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.ops.activations import ACTIVATIONS, Kept


class FewBitActivation(FewBitLayer):
    """Mixin of activation functions, first among the bases; parameters are attributes, named as those of torch.

    Raises:
        TypeError: If the input is a DTensor, or, where its derivative takes more than two values, fp64.
        ValueError: If the input is sparse.
    """

    operator = "activation"
    function: ClassVar[str]
    """Name in ``ops.activations``."""
    widens: ClassVar[bool | None] = None
    """Whether autocast on a GPU makes the output fp32; ``None`` for as torch's function does."""
    inplace: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Return ``f(x)``."""
        if not keeps_derivative(x):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return activation_unchecked(x, self._kept(), self.inplace, self.widens)

    def describe_settings(self) -> str:
        """Return the format: there are no blocks."""
        return f"value_format={self.value_format!r}"

    def _kept(self) -> Kept:
        parameters = [float(getattr(self, name)) for name in ACTIVATIONS[self.function].parameters]
        return Kept(self.function, tuple(parameters), self.value_format)


class ExactActivation(FewBitActivation):
    """Mixin of those whose derivative takes two values: one bit, whatever the format."""

    def describe_settings(self) -> str:
        """Return nothing: there is only one way."""
        return ""


class FewBitGELU(FewBitActivation, nn.GELU):
    """``nn.GELU``, exact or by tanh."""

    dense_class = nn.GELU

    def _kept(self) -> Kept:
        return Kept("gelu" if self.approximate == "none" else "gelu_tanh", (), self.value_format)


class FewBitSiLU(FewBitActivation, nn.SiLU):
    """``nn.SiLU``."""

    dense_class, function = nn.SiLU, "silu"


class FewBitMish(FewBitActivation, nn.Mish):
    """``nn.Mish``."""

    dense_class, function = nn.Mish, "mish"


class FewBitTanh(FewBitActivation, nn.Tanh):
    """``nn.Tanh``."""

    dense_class, function = nn.Tanh, "tanh"


class FewBitELU(FewBitActivation, nn.ELU):
    """``nn.ELU``."""

    dense_class, function = nn.ELU, "elu"


class FewBitHardswish(FewBitActivation, nn.Hardswish):
    """``nn.Hardswish``."""

    dense_class, function = nn.Hardswish, "hardswish"


class FewBitReLU(ExactActivation, nn.ReLU):
    """``nn.ReLU``."""

    dense_class, function = nn.ReLU, "relu"


class FewBitReLU6(ExactActivation, nn.ReLU6):
    """``nn.ReLU6``."""

    dense_class, function = nn.ReLU6, "relu6"


class FewBitHardtanh(ExactActivation, nn.Hardtanh):
    """``nn.Hardtanh``."""

    dense_class, function = nn.Hardtanh, "hardtanh"


class FewBitLeakyReLU(ExactActivation, nn.LeakyReLU):
    """``nn.LeakyReLU``."""

    dense_class, function = nn.LeakyReLU, "leaky_relu"


class FewBitHardsigmoid(ExactActivation, nn.Hardsigmoid):
    """``nn.Hardsigmoid``."""

    dense_class, function = nn.Hardsigmoid, "hardsigmoid"


class ForeignGELU(FewBitActivation):
    """Mixin for GELUs of transformers; that in Python is the same function."""

    function = "gelu"


class ForeignGELUTanh(FewBitActivation):
    """Mixin for GELUs by tanh that are one operator of torch, or products of ``x``."""

    function = "gelu_tanh"


class ForeignWrittenGELUTanh(FewBitActivation):
    """Mixin for GELUs by tanh that are written with ``torch.pow``, which autocast on a GPU computes in fp32."""

    function, widens = "gelu_tanh", True


class ForeignEitherGELUTanh(ForeignGELUTanh):
    """Mixin for ``GELUTanh``, which is one operator of torch or, if asked to, written with ``torch.pow``."""

    @property
    def widens(self) -> bool:  # type: ignore[override]
        """Whether it is written out."""
        return not isinstance(self.act, functools.partial)  # type: ignore[attr-defined]


class ForeignQuickGELU(FewBitActivation):
    """Mixin for GELUs by a sigmoid."""

    function = "quick_gelu"


class ForeignSiLU(FewBitActivation):
    """Mixin for SiLUs."""

    function = "silu"


class ForeignMish(FewBitActivation):
    """Mixin for Mish."""

    function = "mish"


ACTIVATION_CLASSES: tuple[type[FewBitActivation], ...] = (
    FewBitGELU,
    FewBitSiLU,
    FewBitMish,
    FewBitTanh,
    FewBitELU,
    FewBitHardswish,
    FewBitReLU,
    FewBitReLU6,
    FewBitHardtanh,
    FewBitLeakyReLU,
    FewBitHardsigmoid,
)
TRANSFORMERS_ACTIVATIONS: dict[str, type[FewBitActivation]] = {
    "GELUActivation": ForeignGELU,
    "NewGELUActivation": ForeignWrittenGELUTanh,
    "AccurateGELUActivation": ForeignWrittenGELUTanh,
    "GELUTanh": ForeignEitherGELUTanh,
    "PytorchGELUTanh": ForeignGELUTanh,
    "FastGELUActivation": ForeignGELUTanh,
    "QuickGELUActivation": ForeignQuickGELU,
    "SiLUActivation": ForeignSiLU,
    "MishActivation": ForeignMish,
}
"""Of ``transformers.activations``."""
