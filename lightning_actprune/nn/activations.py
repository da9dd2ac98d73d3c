"""Activation functions as modules that keep their derivative, and in few bits; made by ``convert``.

Forward is exact. What backward needs is ``f'(x)``, which is kept as ``ops.activations`` says: in the bits of
``value_format`` with random errors of mean zero, or, of ReLU and its like, exactly in one. In no-grad mode, or if the
input needs no gradient, a module is the dense one in every respect.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from lightning_actprune.functional import activation_unchecked, keeps_derivative
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.nn.settings import torch_class
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

    @classmethod
    def kept_by(cls, module: Any, value_format: str) -> Kept:
        """Return what is kept of the function of ``module``, which may be dense, in this format."""
        parameters = [float(getattr(module, name)) for name in ACTIVATIONS[cls.function].parameters]
        return Kept(cls.function, tuple(parameters), value_format)

    @classmethod
    def widened_by(cls, module: Any) -> bool | None:
        """Return ``widens`` of ``module``, which may be dense."""
        return cls.widens

    def forward(self, x: Tensor) -> Tensor:
        """Return ``f(x)``."""
        if not keeps_derivative(x):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        kept = self.kept_by(self, self.value_format)
        return activation_unchecked(x, kept, self.inplace, self.widened_by(self))

    def describe_settings(self) -> str:
        """Return the format: there are no blocks."""
        return f"value_format={self.value_format!r}"


class ExactActivation(FewBitActivation):
    """Mixin of those whose derivative takes two values: one bit, whatever the format."""

    def describe_settings(self) -> str:
        """Return nothing: there is only one way."""
        return ""


class FewBitGELU(FewBitActivation, nn.GELU):
    """``nn.GELU``, exact or by tanh."""

    dense_class = nn.GELU

    @classmethod
    def kept_by(cls, module: Any, value_format: str) -> Kept:
        """Return what is kept of the function of ``module``."""
        return Kept("gelu" if module.approximate == "none" else "gelu_tanh", (), value_format)


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

    @classmethod
    def widened_by(cls, module: Any) -> bool:
        """Return whether it is written out."""
        return not isinstance(module.act, functools.partial)


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


class FewBitSigmoid(FewBitActivation, nn.Sigmoid):
    """``nn.Sigmoid`` as a gate. Alone it stays as it is: torch keeps its output, which the next layer keeps too."""

    dense_class, function = nn.Sigmoid, "sigmoid"


def activation_class(cls: type[nn.Module]) -> type[FewBitActivation] | None:
    """Return what knows the function of modules of exactly this class, which may be a converted one."""
    cls = torch_class(cls)
    if cls.__module__ == "transformers.activations":
        return TRANSFORMERS_ACTIVATIONS.get(cls.__qualname__)
    return _OF_TORCH.get(cls)


_OF_TORCH: dict[type[nn.Module], type[FewBitActivation]] = {
    **{made.dense_class: made for made in ACTIVATION_CLASSES},
    nn.Sigmoid: FewBitSigmoid,
}
