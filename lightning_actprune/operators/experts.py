r"""Experts of transformers that store the factors of their gate's gradients quantized.

transformers keeps the weights of all experts of a layer in one module, and decorates it with
``use_experts_implementation``. Its implementations (``grouped_mm``, ``batched_mm``) differ in how they multiply, and
all call ``_apply_gate`` with the joint projection ``[S, 2 L]`` of S tokens, each with one expert. The mixins replace
that method. The forward stays that of the dense class, so tokens have the experts that they have there, and all hooks
run.

- The usual gate is the product ``f(a) u`` of the halves, as in ``operators.gated``.
- Any other gate ``z = G(a, u)`` that is computed value by value has two slopes per value, and backward needs nothing
  else: ``da = g dG/da`` and ``du = g dG/du``. The slopes are computed in forward by torch's own backward of the dense
  gate, and stored in few bits, those of ``a`` in other blocks than those of ``u``. Forward is that of the dense gate,
  bit for bit. In compiled code the dense gate runs.

An eager implementation, a loop over experts, may compute the gate without calling the method. Then the module stays
dense. What products save besides is stored by ``operators.saved``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from lightning_actprune.codec.dispatch import make_apply, once_differentiable
from lightning_actprune.codec.packed import dequantize, quantize
from lightning_actprune.operators.activation import keeps_derivative
from lightning_actprune.operators.base import CompressedLayer, Traced, torch_class
from lightning_actprune.operators.gated import CompressedGated, CompressedProduct

_MODULE = "transformers.integrations.moe"
"""Where ``use_experts_implementation`` makes the forward of a class."""


# === Autograd =========================================================================================================


class SlopesFunction(torch.autograd.Function):
    """Autograd function of a gate that is computed value by value; it saves the slopes quantized."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Callable[[Tensor], Tensor],
        interleaved: bool,
        block_size: int,
        bits: int,
        eager: bool,
    ) -> Tensor:
        """Return ``gate(x)``, for ``x [..., 2 L]`` with pairs of values side by side or in two halves."""
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            leaf = x.detach().requires_grad_()
            z = gate(leaf)
            (slopes,) = torch.autograd.grad(z, leaf, torch.ones_like(z))
        length = z.shape[-1]
        pairs = slopes.view(-1, length, 2).transpose(1, 2) if interleaved else slopes.view(-1, 2, length)
        ctx.interleaved, ctx.shape, ctx.dtype = interleaved, x.shape, x.dtype
        ctx.stored = 2 * pairs.shape[0], length, max(1, min(block_size, length)), bits
        ctx.save_for_backward(quantize(pairs.reshape(1, -1, length), ctx.stored[2], bits))
        return z.detach()

    @staticmethod
    @once_differentiable("a gate whose slopes are kept quantized")
    def backward(ctx: Any, eager: bool, grad_output: Tensor) -> tuple[Tensor]:
        """Return the gradient of ``x``."""
        (values,) = ctx.saved_tensors
        rows, length, block_size, bits = ctx.stored
        slopes = dequantize(values, rows, length, block_size, bits, ctx.dtype).view(rows // 2, 2, length)
        grad = slopes.mul_(grad_output.reshape(-1, 1, length))
        return ((grad.transpose(1, 2) if ctx.interleaved else grad).reshape(ctx.shape),)


_apply_slopes = make_apply(SlopesFunction)


def _same(tensor: Tensor) -> Tensor:
    return tensor


# === Module classes ===================================================================================================


class CompressedExperts(CompressedProduct):
    """Mixin of experts with the usual gate, the product of an activation function and the other half."""

    replaced = "act_fn"

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress ``layer``, or ``None`` if its gate is called and known."""
        return why_gate_is_not_called(layer) or super().refusal(layer)

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        """Return the gated product, storing factors quantized if a gradient is recorded."""
        if not keeps_derivative(gate_up_out):
            return cast(Tensor, super()._apply_gate(gate_up_out))  # type: ignore[misc]
        return self.product_of_halves(gate_up_out, -1, gate_first=True)


class CompressedGptOssExperts(CompressedGated):
    """Mixin of transformers' ``GptOssExperts``, whose gate clamps its inputs."""

    always_own = False
    is_concatenated: bool

    @property
    def traced(self) -> Traced:
        """The dense module."""
        return "dense"

    @classmethod
    def refusal(cls, layer: Any) -> str | None:
        """Return the reason not to compress ``layer``, or ``None`` if its gate is called."""
        return why_gate_is_not_called(layer)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Return the dense gate, storing its slopes quantized if a gradient is recorded."""
        gate = super()._apply_gate  # type: ignore[misc]
        if is_compiling() or not keeps_derivative(gate_up):
            return cast(Tensor, gate(gate_up))
        return cast(Tensor, _apply_slopes(gate_up, gate, not self.is_concatenated, self.block_size, self.bits))


def why_gate_is_not_called(layer: Any) -> str | None:
    """Return why the forward of experts does not call their gate, or ``None`` if it does."""
    forward = torch_class(type(layer)).forward
    if not layer.has_gate:
        return "its experts have no gate"
    name = layer.config._experts_implementation
    run = forward.__globals__["ALL_EXPERTS_FUNCTIONS"].get(name, inspect.unwrap(forward))
    if "_apply_gate" in run.__code__.co_names:
        return None
    return f"its implementation {name!r} computes the gate itself; `model.set_experts_implementation('grouped_mm')`"


# === Classes covered ==================================================================================================

_OTHER_GATES: dict[tuple[str, str], type[CompressedLayer]] = {
    ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"): CompressedGptOssExperts,
}
"""The mixin for each class with a gate of its own, by module and name."""


def find_mixin(cls: type[nn.Module]) -> type[CompressedLayer] | None:
    """Return the mixin for a class of experts whose gate is known, or ``None`` for any other class."""
    forward = vars(cls).get("forward")
    if not isinstance(forward, FunctionType) or forward.__globals__.get("__name__") != _MODULE:
        return None
    if getattr(cls, "_apply_gate", None) is forward.__globals__.get("_default_apply_gate"):
        return CompressedExperts
    return _OTHER_GATES.get((cls.__module__, cls.__qualname__))
