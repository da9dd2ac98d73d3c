"""Signs of values, a bit each: whether a value is not below or equal to zero.

A byte has the bits of eight values that are far from each other: with n values and B = ceil(n / 8) bytes, bit j of byte
i is that of value ``i + j B``, so that neighbours read and write next to each other. Bits beyond the last value are
zero. To a compiler ``torch.ops.actprune.signs`` is one operation, and inductor writes it as a kernel that loads eight
values for each byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import ceil_div
from lightning_actprune.codec.packed import LIBRARY, TAGS
from lightning_actprune.codec.private import lowering as inductor
from lightning_actprune.codec.private import operations

PER_BYTE = 8


def signs(x: Tensor) -> Tensor:
    """Return the signs of values ``[n]``, uint8 ``[ceil(n / 8)]``."""
    size = ceil_div(x.shape[0], PER_BYTE)
    bits = torch.nn.functional.pad(~(x <= 0), (0, PER_BYTE * size - x.shape[0])).view(PER_BYTE, size)
    joined = bits[0].to(torch.uint8)
    for place in range(1, PER_BYTE):
        joined |= bits[place].to(torch.uint8) << place
    return joined


LIBRARY.define("signs(Tensor x) -> Tensor", tags=TAGS)
LIBRARY.impl("signs", signs, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::signs", lib=LIBRARY)
def _signs_fake(x: Tensor) -> Tensor:
    return x.new_empty(ceil_div(x.shape[0], PER_BYTE), dtype=torch.uint8)


def lower_signs(x: Any) -> Any:
    """Return ``signs(x)`` as inductor writes it."""
    (count,) = x.get_size()
    size, whole = ceil_div(count, PER_BYTE), count % PER_BYTE == 0
    x.realize()  # or what it is computed from would be computed for each of the eight
    load, ops = x.make_loader(), operations()

    def bit(at: Any) -> Any:
        positive = ops.logical_not(ops.le(load([at]), ops.constant(0, x.get_dtype())))
        return ops.to_dtype(positive, torch.uint8)

    def byte(index: Any) -> Any:
        joined = bit(index[0])
        for place in range(1, PER_BYTE):
            at = index[0] + place * size
            if whole:
                one = bit(at)
            else:
                inside = ops.lt(ops.index_expr(at, torch.int64), ops.index_expr(count, torch.int64))
                one = ops.masked(inside, lambda at=at: bit(at), 0)
            joined = joined | ops.bitwise_left_shift(one, ops.constant(place, torch.uint8))
        return joined

    pointwise = inductor().ir.Pointwise
    return pointwise.create(device=x.get_device(), dtype=torch.uint8, inner_fn=byte, ranges=[size])
