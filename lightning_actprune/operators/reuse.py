r"""A linear layer behind a norm or an affine layer needs nothing of its own: it reads what that layer keeps.

A norm that keeps x~, its normalised input x^ quantized (``operators.norm``), has the output ``y = x^ w + b``. The
weight gradient of a linear layer that reads this ``y [R, L]``, with ``g [R, OUT]``, needs no more than x~::

    dW = g^T y = (g^T x~) w + (sum_r g) b        w along the rows of dW; b as an outer product

Both terms are made in fp32 after the product, of the size of the weight. If the layer reads ``y [B, T, D]`` as
``y.transpose(1, 2)``, so that tokens are its features, w and b run along what is summed, and scale x~ before the
product instead, while it is turned. An affine layer keeps x~ of its input itself, and ``y = x w + b``.

Errors n = x~ - x^ of mean zero give ``dW`` the error ``(g^T n) w``: as if ``y`` had been stored with errors n w. A
block of ``y`` itself would have errors in proportion to its own largest value, though. Where w makes the largest values
of x^ small, as it may of outlier features, n w is larger than that, by up to the ratio of the weights in a block. So
only what is kept in more bits than the layer asks for will do.

That ``y`` is the output of such a layer shows in the tensor *object* as in ``codec.sharing``, and under the same
conditions: not modified since, neither are w and b, same stream, same recording. Views that only turn or flatten ``y``
know it as their base. Weak references keep nothing alive. A layer that asks for as many bits, or for smaller blocks,
than ``y`` is known in packs its own, and so does one that computes in fp16, where x~ or ``g^T x~`` might be too large.

w and b are saved as they are, which takes no memory, and autograd checks that backward finds them unmodified. Inside
an activation checkpoint, or where other saved-tensor hooks say what is kept, each layer packs its own.
"""

from __future__ import annotations

import functools
import weakref
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.codec.blocks import Blocks
from lightning_actprune.codec.dispatch import as_dtype
from lightning_actprune.codec.packed import unpack, unpack_all
from lightning_actprune.codec.private import top_saved_tensors_hooks
from lightning_actprune.codec.sharing import Shared, live, place_of
from lightning_actprune.operators.weight_grad import dense_weight_grad, shared_weight_grad

Order = Literal["alike", "turned", "samples_second"]
"""How the rows of a layer's input lie in ``y``: as they are; as its columns, sample by sample; or as those of
``y.transpose(0, 1)``."""

_PACKAGE = __name__.partition(".")[0]


class ReusedLayout(NamedTuple):
    """What backward has to know besides tensors.

    Args:
        order: How the rows of the layer's input lie in ``y``.
        shape: Samples, rows of ``y`` per sample, and their length; one sample unless it is turned.
        block: Values per block.
        bits: To how many bits they are quantized.
    """

    order: Order
    shape: tuple[int, int, int]
    block: int
    bits: int


Reused = tuple[Tensor, Tensor | None, Tensor | None]
"""The bytes of x~, w and b."""


class _Output(NamedTuple):
    y: weakref.ref[Tensor]
    values: weakref.ref[Tensor]
    parameters: tuple[Tensor | None, Tensor | None]
    versions: tuple[int, ...]
    place: tuple[int, bool]
    order: Order
    shape: torch.Size
    dtype: torch.dtype
    block: int
    bits: int


_outputs: dict[int, _Output] = {}
"""Outputs of layers that keep them quantized, and copies of these, by ``id``."""


def remember(y: Tensor, values: Tensor, weight: Tensor | None, bias: Tensor | None, bits: int, block_size: int) -> None:
    """Let linear layers find that ``y = x^ weight + bias``, of which ``values`` keep x^; of plain eager mode alone.

    Args:
        y: ``[..., L]``, without gaps, in no more than 32 bits, no view.
        values: The bytes of all blocks of x^, ``[R, L]``.
        weight: ``L`` values or ``None``.
        bias: ``L`` values or ``None``.
        bits: To how many bits x^ is quantized.
        block_size: Values per block, cut to ``L``.
    """
    if not y.numel() or y.dtype == torch.float64 or y.is_inference():
        return
    if (weight is not None and weight.is_inference()) or (bias is not None and bias.is_inference()):
        return  # changes of it are not counted
    versions = *_state(y), *_state(weight), *_state(bias)
    given = _reference(y), weakref.ref(values), (weight, bias), versions, place_of(y)
    _outputs[id(y)] = _Output(*given, "alike", y.shape, y.dtype, block_size, bits)


def remember_copy(copy: Tensor, x: Tensor) -> None:
    """Let linear layers find what is known of ``x``, of which ``copy`` is a contiguous copy: of a turned batch."""
    found = _known(x) if _outputs else None
    if found is None or found.order != "alike" or found.dtype != x.dtype or len(found.shape) != 3:
        return
    if not _is_swapped(x, found, 0, 1) or not _is_current(found, x):
        return
    versions = *_state(copy), *found.versions[2:]
    _outputs[id(copy)] = found._replace(y=_reference(copy), order="samples_second", versions=versions)


def find(x: Tensor, parts: int, blocks: Blocks, dtype: torch.dtype) -> tuple[Reused, ReusedLayout] | None:
    """Return what the layer before keeps of ``x``, if that will do for a layer of these settings.

    ``dtype``: in which that computes.
    """
    if parts or not _outputs or dtype == torch.float16:
        return None
    found = _known(x)
    # Only what is kept in more bits than are asked for: errors may exceed those of a pack of its own (see above).
    if found is None or not 0 < blocks.bits < found.bits or found.block > blocks.block_size:
        return None
    order = found.order if found.y() is x else _order(x, found)
    values = live(found.values)
    if order is None or values is None or not _is_current(found, x) or _kept_by_others():
        return None
    shape = found.shape
    stored = (shape[0], shape[1], shape[2]) if order == "turned" else (1, shape[:-1].numel(), shape[-1])
    return (values, *found.parameters), ReusedLayout(order, stored, found.block, found.bits)


def weight_grad(
    grad_y: Tensor, sums: Tensor | None, kept: Reused, layout: ReusedLayout, dtype: torch.dtype, eager: bool
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
    if layout.order == "turned":
        dense = _rescaled(values, weight, bias, layout, grad_y.dtype, eager)
        return dense_weight_grad(grad_y, dense.view(layout.shape[1], -1).t(), dtype)
    if not eager:
        batch, rows, length = layout.shape
        dense = unpack_all(values, batch * rows, length, layout.block, layout.bits, grad_y.dtype)
        grad = as_dtype(torch.mm(grad_y.t(), dense), torch.float32)
        grad = grad if weight is None else grad * weight
        return as_dtype(grad if bias is None or sums is None else grad + torch.outer(sums, bias.float()), dtype)
    nowhere = _nowhere(values.device)
    shared = Shared((values, nowhere, nowhere), layout.shape, False, layout.block)
    grad = shared_weight_grad(grad_y, shared, torch.float32, layout.bits, eager)
    if weight is not None:
        grad.mul_(weight)
    if bias is not None:
        assert sums is not None
        grad.addr_(sums, as_dtype(bias, torch.float32))
    return as_dtype(grad, dtype)


def _rescaled(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    layout: ReusedLayout,
    dtype: torch.dtype,
    eager: bool,
) -> Tensor:
    """Return ``y`` as it is known, ``[rows, samples, length]`` in ``dtype``, contiguous: turned by what scales it."""
    samples, rows, length = layout.shape
    stored = samples * rows, length, layout.block, layout.bits, dtype
    if not eager:  # a transform writes to no given memory
        x = unpack_all(values, *stored).reshape(layout.shape).transpose(0, 1)
        x = x if weight is None else x * weight
        return (x if bias is None else x + bias).to(dtype).contiguous()
    nowhere = _nowhere(values.device)
    x = unpack(values, nowhere, nowhere, *stored).view(layout.shape).transpose(0, 1)
    turned = x.new_empty(x.shape)
    if weight is None:
        return turned.copy_(x) if bias is None else torch.add(x, bias, out=turned)
    if bias is None:
        return torch.mul(x, weight, out=turned)
    return torch.addcmul(bias, x, weight, out=turned)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.reshape(-1)


@functools.lru_cache(maxsize=64)
def _nowhere(device: torch.device) -> Tensor:
    """Return the positions of blocks that are all there."""
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
    hooks = top_saved_tensors_hooks(False)
    return hooks is not None and getattr(hooks[1], "__module__", "").partition(".")[0] != _PACKAGE


def _state(x: Tensor | None) -> tuple[int, int]:
    """Return what changes if ``x`` is written to, or gets other memory; what is written to ``x.data`` nobody sees."""
    return (0, 0) if x is None else (x._version, x.data_ptr())


def _order(x: Tensor, found: _Output) -> Order | None:
    """Return how the rows of ``x``, a view, lie in what it is a view of; ``None`` if it shows anything else."""
    y = found.y()
    if y is None or found.order != "alike" or x.dtype != found.dtype or x.numel() != y.numel():
        return None
    if x.shape[-1] == y.shape[-1] and x.is_contiguous() and y.is_contiguous():
        return "alike"
    return "turned" if y.dim() == 3 and _is_swapped(x, found, 1, 2) else None


def _is_swapped(x: Tensor, found: _Output, first: int, second: int) -> bool:
    """Return whether ``x`` is a view of what is known, of three dimensions, with two of them swapped."""
    y = found.y()
    if y is None:
        return False
    order = [0, 1, 2]
    order[first], order[second] = second, first
    return x.shape == tuple([y.shape[dim] for dim in order]) and x.stride() == tuple([y.stride(dim) for dim in order])
