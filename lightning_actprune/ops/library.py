"""Operators ``torch.ops.actprune.*``: schema, shape function and implementation of each.

======================  ==============================================================================================
``pack``                ``x [S, T, L]`` -> kept values, bitmap, offsets (see ``ops.geometry`` for the storage)
``unpack``              the pruned tensor ``[R, L]``
``weight_grad``         ``grad_y [R, OUT]`` and a packed input -> weight gradient ``[OUT, IN]``
``normalize``           ``x [R, L]`` -> normalised rows, the same in few bits, rstd (see ``ops.normalize``)
``normalize_grad``      ``grad_y [R, L]`` and what ``normalize`` stored -> gradients of input, weight and bias
======================  ==============================================================================================

They are opaque to the compiler on purpose: a partitioner then saves what ``pack`` returns instead of the dense input,
and nothing can be fused into a form that needs the dense input again. Other modules define operators beside what they
compute. None is differentiable; autograd lives in ``ops.linear``, ``ops.norm`` and the like. All output shapes follow
from the input shapes and the integers, so nothing waits for the device.

The functions of this module call the operators, or, told that the mode is plain eager, their implementations: the way
through the dispatcher to Python costs the host 3 to 20 us a call (machines of an H200, torch 2.11; ``host.json``: 4 and
17).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.compiler import is_compiling

from lightning_actprune.ops import normalize as _normalize
from lightning_actprune.ops import pack as _pack
from lightning_actprune.ops import weight_grad as _weight_grad
from lightning_actprune.ops.formats import FORMATS
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div, keeps_all
from lightning_actprune.ops.operators import as_operator
from lightning_actprune.ops.scaling import scaled, scaled_grad
from lightning_actprune.ops.sharing import Shared

if TYPE_CHECKING:
    from lightning_actprune.ops.norm import NormSetting

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
_library.define(
    "normalize(Tensor x, Tensor? weight, Tensor? bias, bool centred, bool rounded, float eps, int block_size, "
    "str value_format, bool normed, ScalarType dtype, Tensor? residual=None) -> (Tensor y, Tensor values, Tensor rstd)",
    tags=_TAGS,
)
_library.define(
    "normalize_grad(Tensor grad_y, Tensor values, Tensor rstd, Tensor? weight, bool centred, int block_size, "
    "str value_format, bool normed, ScalarType dtype, bool sums) -> (Tensor grad_x, Tensor sums)",
    tags=_TAGS,
)
# One implementation for every device: it chooses between kernels and reference itself.
_library.impl("pack", as_operator(_pack.pack), "CompositeExplicitAutograd")
_library.impl("unpack", _weight_grad.unpack, "CompositeExplicitAutograd")
_library.impl("weight_grad", _weight_grad.weight_grad, "CompositeExplicitAutograd")
_library.impl("normalize", _normalize.normalize, "CompositeExplicitAutograd")
_library.impl("normalize_grad", as_operator(_normalize.normalize_grad), "CompositeExplicitAutograd")


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


@torch.library.register_fake("actprune::normalize", lib=_library)
def _normalize_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centred: bool,
    rounded: bool,
    eps: float,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, length = x.shape
    stored = rows * ceil_div(length, block_size), FORMATS[value_format].row_bytes(block_size, x.element_size())
    return (
        x.new_empty(rows, length, dtype=dtype),
        x.new_empty(stored, dtype=torch.uint8),
        x.new_empty(rows if normed else 0, dtype=torch.float32),
    )


@torch.library.register_fake("actprune::normalize_grad", lib=_library)
def _normalize_grad_fake(
    grad_y: Tensor,
    values: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    centred: bool,
    block_size: int,
    value_format: str,
    normed: bool,
    dtype: torch.dtype,
    sums: bool,
) -> tuple[Tensor, Tensor]:
    rows, length = grad_y.shape
    return (
        grad_y.new_empty(rows, length, dtype=dtype),
        grad_y.new_empty(2 if sums else 0, length, dtype=torch.float32),
    )


def in_plain_eager_mode(x: Tensor) -> bool:
    """Return whether nothing but the operators' own kernels wants to see them.

    That is no compiler, no meta tensor or one with a lazy negation, no tensor subclass, no transform such as ``vmap``
    (whose tensors look like plain ones, even after it is over) and no dispatch mode.
    """
    if is_compiling() or type(x) is not Tensor or x.is_meta or x.is_neg():
        return False
    if _are_functorch_transforms_active() or is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x):
        return False
    return _len_torch_dispatch_stack() == 0


def pack(
    x: Tensor, block_size: int, keep: int, value_format: str, block_selection: str, eager: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, bitmap and offsets of ``x [S, T, L]``; ``eager``: the result of ``in_plain_eager_mode``."""
    if eager:
        return _pack.pack(x, block_size, keep, value_format, block_selection)
    arguments = x, block_size, keep, value_format, block_selection
    packed: tuple[Tensor, Tensor, Tensor] = torch.ops.actprune.pack(*arguments)
    return packed


def unpack(
    rows: int,
    length: int,
    packed: tuple[Tensor, ...],
    block_size: int,
    value_format: str,
    dtype: torch.dtype,
    *,
    eager: bool,
) -> Tensor:
    """Return the pruned tensor ``[rows, length]`` in ``dtype``."""
    values, bitmap, offsets = packed
    arguments = values, bitmap, offsets, rows, length, block_size, value_format, dtype
    if eager:
        return _weight_grad.unpack(*arguments)
    dense: Tensor = torch.ops.actprune.unpack(*arguments)
    return dense


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


def normalize(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    setting: NormSetting,
    dtype: torch.dtype,
    eager: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows of ``x [R, L]`` in ``dtype``, the same in few bits, and ``rstd``.

    ``given``: ``x``, weight, bias and residual.
    """
    x, weight, bias, residual = given
    if eager:
        return _normalize.normalize(x, weight, bias, *setting, dtype, residual)
    if torch.compiler.is_compiling() and not setting.normed:
        return scaled(given, setting.block_size, setting.value_format, dtype)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.actprune.normalize(x, weight, bias, *setting, dtype, residual)
    return found


def normalize_grad(
    grad_y: Tensor,
    kept: tuple[Tensor, Tensor, Tensor | None],
    setting: NormSetting,
    dtype: torch.dtype,
    sums: bool,
    eager: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and parameters; ``kept``: values, ``rstd`` and the weight."""
    stored = setting.block_size, setting.value_format, setting.normed
    arguments = grad_y, *kept, setting.centred, *stored, dtype, sums
    if eager:
        return _normalize.normalize_grad(*arguments)
    if torch.compiler.is_compiling() and not setting.normed:
        values, _, weight = kept
        return scaled_grad(grad_y, values, weight, setting.block_size, setting.value_format, dtype, sums)
    grads: tuple[Tensor, Tensor] = torch.ops.actprune.normalize_grad(*arguments)
    return grads
