"""Dropout that keeps its mask in one bit a value.

::

    y  = m x / (1 - p)        m of torch's own generator: the same numbers, the same output
    dx = m g / (1 - p)        exact, but for a gradient that is not finite where m is zero: 0 here, NaN in torch

torch keeps a byte a value or, in place, a number of the type of ``x``. The mask is torch's, of the operator that the
dense layer would call on that device (in place that is another one), so that also the generator is left in the same
state. The byte mask lives until it is packed, as the codes of one bit of ``operators.activation``.

Under ``torch.compile`` dropout is left to the compiler, which fuses it, and may compute a mask again from its seed; so
it is inside transforms and dispatch modes, and for tensor subclasses. Layers that drop whole channels keep nothing of
the size of their input, and stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec.autograd import applied, may_compress
from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.dispatch import (
    LaunchCache,
    choose_backend,
    forced_backend,
    in_plain_eager_mode,
    is_aligned,
    on_device_of,
)
from lightning_actprune.operators.activation import ROW, ActivationFunction, StoredMask, encode_mask
from lightning_actprune.operators.base import CompressedLayer, Traced

if TYPE_CHECKING:
    from lightning_actprune.kernels.launch import Launch


def pack_mask(mask: Tensor) -> Tensor:
    """Return what is stored of a dense bool ``mask``: a bit a value, in the order of memory."""
    count = mask.numel()
    flat = mask.as_strided((count,), (1,))
    launch = _mask_launches[count, mask.device, is_aligned(mask), forced_backend()]
    if launch is None:
        return encode_mask(flat)
    codes = mask.new_empty(ceil_div(count, ROW), dtype=torch.uint8)
    with on_device_of(mask):
        launch(flat.view(torch.uint8), codes)
    return codes


def _mask_launch(count: int, device: torch.device, aligned: bool, backend: str | None) -> Launch | None:
    """Return the launch of a mask; ``aligned`` matters to the compiled kernel that it keeps."""
    if not count or choose_backend((count,), torch.float32, device, ROW, 1) != "triton":
        return None
    from lightning_actprune.kernels.activation import pack_mask_launch

    return pack_mask_launch(count)


_mask_launches = LaunchCache(_mask_launch)


class DropoutFunction(torch.autograd.Function):
    """Dropout that keeps its mask in one bit a value."""

    backward = staticmethod(ActivationFunction.backward)

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, in_place: bool, eager: bool) -> Tensor:
        """Drop values of ``x`` with probability ``p``."""
        if in_place:
            noise = torch.empty_like(x).bernoulli_(1 - p)
            y, mask = x, noise.bool()
            x.mul_(noise.div_(1 - p))
            ctx.mark_dirty(x)
        else:
            y, mask = torch.native_dropout(x, p, True)
        ctx.strides, ctx.dtype, ctx.stored = mask.stride(), x.dtype, StoredMask(1 / (1 - p))
        ctx.save_for_backward(pack_mask(mask))
        return y


_apply = applied(DropoutFunction)


def keeps_mask(x: Tensor, p: float) -> bool:
    """Return whether a mask is kept of ``x``, and can be in one bit; without, dropout is torch's in every respect."""
    if not (0.0 < p < 1.0 and x.requires_grad and may_compress(x) and in_plain_eager_mode(x)):
        return False
    return x.is_floating_point() and x.numel() > 0


class CompressedDropout(CompressedLayer, nn.Dropout):
    """``nn.Dropout`` that keeps its mask in one bit a value, whatever the bits."""

    operator = "activation"
    one_bit = True
    dense_class = nn.Dropout

    @property
    def traced(self) -> Traced:
        """What a compiler sees: it keeps a seed, and no mask."""
        return "dense"

    def forward(self, input: Tensor) -> Tensor:
        """Return the input without the values that are dropped, the others scaled up."""
        if not self.training or not keeps_mask(input, self.p):
            return super().forward(input)
        return cast(Tensor, _apply(input, self.p, self.inplace))

    def describe(self) -> str:
        """Return nothing: there is only one way."""
        return ""


CLASSES: dict[type[nn.Module], type[CompressedDropout]] = {nn.Dropout: CompressedDropout}
"""Of each class of torch, what it becomes."""
