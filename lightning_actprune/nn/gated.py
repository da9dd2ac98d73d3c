"""Gated products in few bits: MLPs whose hidden values are ``f(a) u``, and ``nn.GLU``; made by ``convert``.

Forward is exact. What is kept of the product are the factors of its two gradients (``ops.gate``), where torch keeps the
gate, what the function makes of it, and what that is multiplied with. Linear layers, norms and dropout inside are
called as before, with their hooks, and may be converted themselves. The activation function is computed with the
product: while a gradient is wanted its module is not called, so that hooks on it do not run.

In no-grad mode a module is the dense one in every respect. Where no input of the product needs a gradient, or the
activation function has been replaced by one that is not known, the product is torch's.

The MLPs of other packages (timm, transformers) are known by what their forward computes, and import nothing:
``few_bit_kinds`` derives a class from each and puts one of the mixins below first.
"""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.activations import activation_class
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.ops.activations import Kept
from lightning_actprune.ops.gated import gated_halves, gated_product


class FewBitGated(FewBitLayer):
    """Mixin of modules that compute a gated product.

    Raises:
        TypeError: If an input of the product is a DTensor, or in fp64.
        ValueError: If it is sparse, or has more than 2^30 blocks.
    """

    operator: ClassVar[OtherOperator] = "activation"


class FewBitMLP(FewBitGated):
    """Mixin of MLPs with an activation function, whose name is ``replaced``."""

    replaced: ClassVar[str]
    down_proj: nn.Module

    @classmethod
    def refusal(cls, layer: nn.Module) -> str | None:
        """Return why the product stays as it is: its function is not known."""
        function = getattr(layer, cls.replaced, None)
        if _known(function):
            return None
        return f"its activation function, a {type(function).__name__}, is not one that is known"

    def forward(self, x: Tensor) -> Tensor:
        """Return what the dense module does, in few bits if a gradient is recorded."""
        if not torch.is_grad_enabled() or not _known(getattr(self, self.replaced)):
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return self.output(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product."""
        raise NotImplementedError

    def output(self, hidden: Tensor) -> Tensor:
        """Return the output, by default the projection of the product."""
        return cast(Tensor, self.down_proj(hidden))

    def product(self, a: Tensor, u: Tensor) -> Tensor:
        """Return ``f(a) u``."""
        if not (a.requires_grad or u.requires_grad) or a.shape != u.shape:
            return cast(Tensor, getattr(self, self.replaced)(a) * u)
        return gated_product(a, u, *self._stored())

    def product_of_halves(self, x: Tensor, dim: int, gate_first: bool) -> Tensor:
        """Return ``f(a) u`` of the halves of ``x``."""
        if not x.requires_grad:
            first, second = x.chunk(2, dim)
            function = getattr(self, self.replaced)
            return cast(Tensor, function(first) * second if gate_first else first * function(second))
        kept, block_size, widens = self._stored()
        return gated_halves(x, kept, block_size, dim, gate_first, widens)

    def _stored(self) -> tuple[Kept, int, bool | None]:
        function = getattr(self, self.replaced)
        made = activation_class(type(function))
        assert made is not None
        return made.kept_by(function, self.value_format), self.block_size, made.widened_by(function)


class FewBitLlamaMLP(FewBitMLP):
    """Mixin of transformers' ``LlamaMLP`` and its many copies."""

    replaced = "act_fn"
    gate_proj: nn.Module
    up_proj: nn.Module

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of two projections."""
        return self.product(self.gate_proj(x), self.up_proj(x))


class FewBitPhi3MLP(FewBitMLP):
    """Mixin of transformers' ``Phi3MLP`` and its copies, which have one joint projection."""

    replaced = "activation_fn"
    gate_up_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what the dense module does, in few bits if a gradient is recorded."""
        return super().forward(hidden_states)

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of the halves of a projection."""
        return self.product_of_halves(self.gate_up_proj(x), -1, gate_first=True)


class FewBitTimmMLP(FewBitMLP):
    """Mixin of gated MLPs of timm, which drop and may normalise the product."""

    replaced = "act"
    drop1: nn.Module
    norm: nn.Module
    fc2: nn.Module
    drop2: nn.Module

    def output(self, hidden: Tensor) -> Tensor:
        """Return the projection of the product, dropped and normalised."""
        return cast(Tensor, self.drop2(self.fc2(self.norm(self.drop1(hidden)))))


class FewBitTimmGluMlp(FewBitTimmMLP):
    """Mixin of timm's ``GluMlp``, which has one joint projection."""

    fc1: nn.Module
    gate_last: bool
    chunk_dim: int

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of the halves of a projection."""
        return self.product_of_halves(self.fc1(x), self.chunk_dim, not self.gate_last)


class FewBitTimmSwiGLU(FewBitTimmMLP):
    """Mixin of timm's ``SwiGLU``."""

    fc1_g: nn.Module
    fc1_x: nn.Module

    def hidden(self, x: Tensor) -> Tensor:
        """Return the product of two projections."""
        return self.product(self.fc1_g(x), self.fc1_x(x))


class FewBitGLU(FewBitGated, nn.GLU):
    """``nn.GLU``: the first half times the sigmoid of the second."""

    dense_class = nn.GLU

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of the halves of ``input``."""
        splits = input.dim() > 0 and -input.dim() <= self.dim < input.dim() and input.shape[self.dim] % 2 == 0
        if not torch.is_grad_enabled() or not input.requires_grad or not splits:  # torch says what is wrong
            return super().forward(input)
        kept = Kept("sigmoid", (), self.value_format)
        return gated_halves(input, kept, self.block_size, self.dim, gate_first=False)


def _known(function: nn.Module | None) -> bool:
    """Return whether the forward of an activation module is that of its class, and known."""
    if not isinstance(function, nn.Module) or "forward" in function.__dict__:
        return False
    return activation_class(type(function)) is not None
