"""The operators ``torch.ops.actprune.*``: schema, shape function and implementation of each.

======================  ==============================================================================================
``pack``                ``x [S, T, L]`` -> kept values, bitmap, offsets (see ``ops.geometry`` for the storage)
``unpack``              the pruned tensor ``[R, L]``
``weight_grad``         ``grad_y [R, OUT]`` and a packed input -> weight gradient ``[OUT, IN]``
======================  ==============================================================================================

They are opaque to the compiler on purpose: a partitioner then saves what ``pack`` returns instead of the dense input,
and nothing can be fused into a form that needs the dense input again. None of them is differentiable; autograd lives
in ``ops.linear``. All output shapes follow from the input shapes and the integers, so nothing waits for the device.

``pack`` and ``weight_grad`` of this module call the operators, or, told that the mode is plain eager, their
implementations: the way through the dispatcher to Python costs the host 3 to 20 us a call (machines of an H200, torch
2.11; ``host.json``: 4 and 17).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_actprune.ops import pack as _pack
from lightning_actprune.ops import weight_grad as _weight_grad
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div, keeps_all
from lightning_actprune.ops.sharing import Shared

_library = torch.library.Library("actprune", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library.define(
    "pack(Tensor x, int block_size, SymInt keep, str value_format='same', str block_selection='largest') -> "
    "(Tensor values, Tensor bitmap, Tensor offsets)",
    tags=_TAGS,
)
_library.define(
    "unpack(Tensor values, Tensor bitmap, Tensor offsets, SymInt rows, SymInt length, int block_size, "
    "str value_format, ScalarType dtype) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "weight_grad(Tensor grad_y, Tensor values, Tensor bitmap, Tensor offsets, SymInt batch, SymInt rows, "
    "SymInt length, bool transposed, ScalarType dtype, int block_size, str value_format='same') -> Tensor",
    tags=_TAGS,
)
# One implementation for every device: it chooses between kernels and reference itself.
_library.impl("pack", _pack.pack, "CompositeExplicitAutograd")
_library.impl("unpack", _weight_grad.unpack, "CompositeExplicitAutograd")
_library.impl("weight_grad", _weight_grad.weight_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::pack", lib=_library)
def _pack_fake(
    x: Tensor, block_size: int, keep: int, value_format: str = "same", block_selection: str = "largest"
) -> tuple[Tensor, Tensor, Tensor]:
    samples, rows, length = x.shape
    blocks = rows * ceil_div(length, block_size)
    row = block_size if value_format == "same" else FORMATS[value_format].row_bytes(block_size, x.element_size())
    kept, words, runs = samples * keep, ceil_div(blocks, WORD_BLOCKS), ceil_div(blocks, RUN_BLOCKS)
    if keeps_all(keep):
        kept, words, runs = samples * blocks, 0, 0
    return (
        x.new_empty(kept, row, dtype=x.dtype if value_format == "same" else torch.uint8),
        x.new_empty(samples, words, dtype=torch.int32),
        x.new_empty(samples, runs, dtype=torch.int32),
    )


@torch.library.register_fake("actprune::unpack", lib=_library)
def _unpack_fake(
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    rows: int,
    length: int,
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
) -> Tensor:
    return values.new_empty(rows, length, dtype=dtype)


@torch.library.register_fake("actprune::weight_grad", lib=_library)
def _weight_grad_fake(
    grad_y: Tensor,
    values: Tensor,
    bitmap: Tensor,
    offsets: Tensor,
    batch: int,
    rows: int,
    length: int,
    transposed: bool,
    dtype: torch.dtype,
    block_size: int,
    value_format: str = "same",
) -> Tensor:
    return grad_y.new_empty(grad_y.shape[1], rows if transposed else length, dtype=dtype)


def in_plain_eager_mode(x: Tensor) -> bool:
    """Return whether nothing but the operators' own kernels wants to see them.

    That is no compiler, no meta tensor or one with a lazy negation, no tensor subclass, no transform such as ``vmap``
    (whose tensors look like plain ones, even after it is over) and no dispatch mode.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta or x.is_neg():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    if torch._C._functorch.is_legacy_batchedtensor(x):
        return False
    return _get_current_dispatch_mode() is None


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str, block_selection: str, eager: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, bitmap and offsets of ``x [S, T, L]``; ``eager``: the result of ``in_plain_eager_mode``."""
    if eager:
        return _pack.pack(x, block_size, keep, value_format, block_selection)
    arguments = x, block_size, keep, value_format, block_selection
    packed: tuple[Tensor, Tensor, Tensor] = torch.ops.actprune.pack(*arguments)
    return packed


def weight_grad(
    grad_y: Tensor,
    shared: Shared,
    dtype: torch.dtype,
    value_format: str,
    eager: bool,
) -> Tensor:
    """Return the weight gradient in ``dtype`` from ``grad_y [R, OUT]`` and a packed input."""
    packed, shape, transposed, block_size = shared
    if eager:
        return _weight_grad.weight_grad(grad_y, *packed, *shape, transposed, dtype, block_size, value_format)
    arguments = grad_y, *packed, *shape, transposed, dtype, block_size, value_format
    grad: Tensor = torch.ops.actprune.weight_grad(*arguments)
    return grad
