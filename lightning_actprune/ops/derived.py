r"""A linear layer behind a norm or an affine layer needs nothing of its own: it reads what that layer keeps.

A norm that keeps x~, its normalised input x^ in few bits (``ops.norm``), has the output ``y = x^ w + b``. The weight
gradient of a linear layer that reads this ``y [R, L]``, with ``g [R, OUT]``, needs no more than x~::

    dW = g^T y = (g^T x~) w + (sum_r g) b        w along the rows of dW; b as an outer product

Both terms are made in fp32 after the product, of the size of the weight. If the layer reads ``y [B, T, D]`` as
``y.transpose(1, 2)``, so that tokens are its features, w and b run along what is summed, and scale x~ before the
product instead, while it is turned. An affine layer keeps x~ of its input itself, and ``y = x w + b``.

Errors n = x~ - x^ of mean zero give ``dW`` the error ``(g^T n) w``: as if ``y`` had been stored with errors n w. A
block of ``y`` itself would have errors in proportion to its own largest value, though. Where w makes the largest values
of x^ small, as it may of outlier features, n w is larger than that, by up to the ratio of the weights in a block. So
only what is kept in more bits than the layer asks for will do.

That ``y`` is the output of such a layer shows in the tensor *object* as in ``ops.sharing``, and under the same
conditions: not modified since, neither are w and b, same stream, same recording. Views that only turn or flatten ``y``
know it as their base. Weak references keep nothing alive. A layer that asks for as many bits, or for smaller blocks,
than ``y`` is known in packs its own, and so does one that computes in fp16, where x~ or ``g^T x~`` might be too large.

w and b are saved as they are, which takes no memory, and autograd checks that backward finds them unmodified. Inside
an activation checkpoint, or where other saved-tensor hooks say what is kept, each layer packs its own.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from lightning_actprune.ops import library
from lightning_actprune.ops.autocast import as_dtype
from lightning_actprune.ops.dispatch import has_fp32_product
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.sharing import Shared, place_of

if TYPE_CHECKING:
    from lightning_actprune.ops.norm import NormSetting

Order = Literal["alike", "turned", "samples_second"]
"""How the rows of a layer's input lie in ``y``: as they are; as its columns, sample by sample; or as those of
``y.transpose(0, 1)``."""

_SERVES: dict[str, tuple[str, ...]] = {
    "int8": ("fp8", "int4", "int3", "int2"),
    "fp8": (),  # whose errors have no mean of zero, which integers promise
    "int4": ("int3", "int2"),
    "int3": ("int2",),
    "int2": (),
}
"""What a layer may have asked for, by what there is: fewer bits, since errors may exceed its own (see above)."""


_PACKAGE = __name__.partition(".")[0]


class DerivedLayout(NamedTuple):
    """What backward has to know besides tensors.

    Args:
        order: How the rows of the layer's input lie in ``y``.
        shape: Samples, rows of ``y`` per sample, and their length; one sample unless it is turned.
        block: Values per block.
        value_format: How they are stored.
    """

    order: Order
    shape: tuple[int, int, int]
    block: int
    value_format: str


Kept = tuple[Tensor, Tensor | None, Tensor | None]
"""The bytes of x~, w and b."""


class _Output(NamedTuple):
    y: weakref.ref[Tensor]
    values: TensorWeakRef
    parameters: tuple[Tensor | None, Tensor | None]
    versions: tuple[int, ...]
    place: tuple[int, bool]
    order: Order
    shape: torch.Size
    dtype: torch.dtype
    block: int
    value_format: str


_outputs: dict[int, _Output] = {}
"""Outputs of layers that keep them in few bits, and copies of these, by ``id``."""


def remember(y: Tensor, values: Tensor, weight: Tensor | None, bias: Tensor | None, setting: NormSetting) -> None:
    """Let linear layers find that ``y = x^ weight + bias``, of which ``values`` keep x^; of plain eager mode alone.

    Args:
        y: ``[..., L]``, contiguous, in no more than 32 bits, no view.
        values: The bytes of all blocks of x^, ``[R, L]``.
        weight: ``L`` values or ``None``.
        bias: ``L`` values or ``None``.
        setting: How x^ is stored; blocks cut to ``L``.
    """
    if not y.numel() or y.dtype == torch.float64 or y.is_inference():
        return
    if (weight is not None and weight.is_inference()) or (bias is not None and bias.is_inference()):
        return  # changes of it are not counted
    versions = *_state(y), *_state(weight), *_state(bias)
    given = _reference(y), TensorWeakRef(values), (weight, bias), versions, place_of(y)
    _outputs[id(y)] = _Output(*given, "alike", y.shape, y.dtype, setting.block_size, setting.value_format)


def remember_copy(copy: Tensor, x: Tensor) -> None:
    """Let linear layers find what is known of ``x``, of which ``copy`` is a contiguous copy: of a turned batch."""
    found = _known(x) if _outputs else None
    if found is None or found.order != "alike" or found.dtype != x.dtype or len(found.shape) != 3:
        return
    samples, rows, length = found.shape
    if x.shape != (rows, samples, length) or x.stride() != _swapped(found.shape, 0, 1) or not _is_current(found, x):
        return
    versions = *_state(copy), *found.versions[2:]
    _outputs[id(copy)] = found._replace(y=_reference(copy), order="samples_second", versions=versions)


def find(x: Tensor, parts: int, blocks: BlockSetting, dtype: torch.dtype) -> tuple[Kept, DerivedLayout] | None:
    """Return what the layer before keeps of ``x``, if that will do for a layer of these settings.

    ``dtype``: in which that computes.
    """
    if parts or not _outputs or dtype == torch.float16:
        return None
    found = _known(x)
    if found is None or blocks.value_format not in _SERVES[found.value_format] or found.block > blocks.block_size:
        return None
    order = found.order if found.y() is x else _order(x, found)
    values = found.values()
    if order is None or values is None or not _is_current(found, x) or _kept_by_others():
        return None
    shape = found.shape
    stored = (shape[0], shape[1], shape[2]) if order == "turned" else (1, shape[:-1].numel(), shape[-1])
    return (values, *found.parameters), DerivedLayout(order, stored, found.block, found.value_format)


def weight_grad(
    grad_y: Tensor, sums: Tensor | None, kept: Kept, layout: DerivedLayout, dtype: torch.dtype, eager: bool
) -> Tensor:
    """Return the weight gradient ``[OUT, IN]`` in ``dtype``.

    Args:
        grad_y: ``[R, OUT]``; rows in the order of ``y``, or, turned, of its columns.
        sums: Its sums over the rows, in fp32; needed if there is a bias, unless turned.
        kept: What is kept of ``y``.
        layout: How.
        dtype: Type of the result.
        eager: Whether the mode is plain eager.
    """
    values, weight, bias = kept[0], _flat(kept[1]), _flat(kept[2])
    packed = values, *_nowhere(values, eager)
    if layout.order == "turned":
        dense = _rescaled(packed, weight, bias, layout, grad_y.dtype, eager)
        return _product(grad_y, dense.view(layout.shape[1], -1).t(), dtype)
    shared = Shared(packed, layout.shape, False, layout.block)
    grad = library.weight_grad(grad_y, shared, torch.float32, layout.value_format, eager)
    if weight is not None:
        grad.mul_(weight)
    if bias is not None:
        assert sums is not None
        grad.addr_(sums, as_dtype(bias, torch.float32))
    return as_dtype(grad, dtype)


def _rescaled(
    packed: tuple[Tensor, Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    layout: DerivedLayout,
    dtype: torch.dtype,
    eager: bool,
) -> Tensor:
    """Return ``y`` as it is known, ``[rows, samples, length]`` in ``dtype``, contiguous: turned by what scales it."""
    samples, rows, length = layout.shape
    stored = layout.block, layout.value_format, dtype
    x = library.unpack(samples * rows, length, packed, *stored, eager=eager).view(layout.shape).transpose(0, 1)
    if not eager:  # a transform writes to no given memory
        x = x if weight is None else x * weight
        return (x if bias is None else x + bias).to(dtype).contiguous()
    turned = x.new_empty(x.shape)
    if weight is None:
        return turned.copy_(x) if bias is None else torch.add(x, bias, out=turned)
    if bias is None:
        return torch.mul(x, weight, out=turned)
    return torch.addcmul(bias, x, weight, out=turned)


def _product(grad_y: Tensor, dense: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != grad_y.dtype and dtype == torch.float32 and has_fp32_product(grad_y):
        return torch.mm(grad_y.t(), dense, out_dtype=dtype)
    return as_dtype(torch.mm(grad_y.t(), dense), dtype)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


def _nowhere(values: Tensor, eager: bool) -> tuple[Tensor, Tensor]:
    """Return the positions of blocks that are all there."""
    nothing = _nothing(values.device) if eager else values.new_empty(1, 0, dtype=torch.int32)
    return nothing, nothing


@functools.lru_cache(maxsize=64)
def _nothing(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(1, 0, dtype=torch.int32, device=device)


def _reference(y: Tensor) -> weakref.ref[Tensor]:
    number = id(y)
    return weakref.ref(y, lambda _: _outputs.pop(number, None))


def _known(x: Tensor) -> _Output | None:
    """Return what is known of ``x``, or of what it is a view of."""
    found = _outputs.get(id(x))
    if found is not None and found.y() is x:
        return found
    base = x._base
    found = None if base is None else _outputs.get(id(base))
    return found if found is not None and found.y() is base else None


def _is_current(found: _Output, x: Tensor) -> bool:
    """Return whether nothing was modified since, and ``x`` is read where ``y`` was made; views share versions."""
    weight, bias = found.parameters
    return found.versions == (*_state(x), *_state(weight), *_state(bias)) and found.place == place_of(x)


def _kept_by_others() -> bool:
    """Return whether saved-tensor hooks other than this package's say what is kept.

    Those of an activation checkpoint keep nothing at first, and want to be given the same when it runs again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[1], "__module__", "").partition(".")[0] != _PACKAGE


def _state(x: Tensor | None) -> tuple[int, int]:
    """Return what changes if ``x`` is written to, or gets other memory; what is written to ``x.data`` nobody sees."""
    return (0, 0) if x is None else (x._version, x.data_ptr())


def _order(x: Tensor, found: _Output) -> Order | None:
    """Return how the rows of ``x``, a view, lie in what it is a view of; ``None`` if it shows anything else."""
    shape = found.shape
    if found.order != "alike" or x.dtype != found.dtype or x.numel() != shape.numel():
        return None
    if x.shape[-1] == shape[-1] and x.is_contiguous():
        return "alike"
    turned = len(shape) == 3 and x.shape == (shape[0], shape[2], shape[1]) and x.stride() == _swapped(shape, 1, 2)
    return "turned" if turned else None


def _swapped(shape: torch.Size, first: int, second: int) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of three dimensions with two of them swapped."""
    strides = [shape[1] * shape[2], shape[2], 1]
    strides[first], strides[second] = strides[second], strides[first]
    return tuple(strides)
