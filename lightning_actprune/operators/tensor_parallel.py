r"""Tensor-parallel layers: each process compresses what it would keep of its own shard.

``parallelize_module`` makes DTensors of the parameters of a layer and of what it is given, so that each process of a
mesh has a shard ``x_s`` of the input and one of the weight, and computes its part of the output. What backward keeps is
``x_s``. So the layer runs on shards as it would on tensors, and its output becomes a DTensor again. Blocks are those of
a shard: they compete within it, and no process needs to know what another one drops.

For ``y = x W^T + b`` and a norm ``y = x^ w + b`` over the last dimensions of ``x``, along a dimension of the mesh:

=============  ===========  ===============  =======================================================================
x              weight       y                gradients
=============  ===========  ===============  =======================================================================
replicated     by outputs   by features      column-wise: ``dx`` is a sum over the processes, ``dW`` and ``db`` are
                                             the shard's own
by features    by inputs    a sum            row-wise: ``dx`` and ``dW`` are the shard's own, ``db`` is the same in
                                             every process
by rows        replicated   by rows          sequence-parallel: ``dW`` and ``db`` are sums
replicated     replicated   replicated       all are the same in every process
=============  ===========  ===============  =======================================================================

A sum is left to whoever asks for its value (``Partial``), as torch does. In the row-wise layer each process adds its
part of the bias, ``b`` over the number of processes, as torch does too. A bias lies as the features of the output do.
Where input and parameters lie in another way, no process can compute its part alone: the dense layer runs, as torch
runs it on DTensors, and a warning says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

Forward = Callable[[Any, Any], Any]
"""Of a layer, which comes first."""


class Along(NamedTuple):
    """How tensors lie along a dimension of the mesh.

    Args:
        y: The output.
        grad_x: The gradient of the input.
        grad_weight: That of the weight.
        grad_bias: That of the bias.
        adds_part: Whether each process adds its part of the bias.
    """

    y: Placement
    grad_x: Placement
    grad_weight: Placement
    grad_bias: Placement
    adds_part: bool = False


def is_split(layer: nn.Module) -> bool:
    """Return whether the parameters of a layer are DTensors, as far as it has any: torch takes no others with one."""
    return all(parameter is None or isinstance(parameter, DTensor) for parameter in layer._parameters.values())


def forward_of(layer: nn.Module, compressed: Forward, dense: Forward, x: DTensor) -> Any:
    """Return what a layer makes of a DTensor, computed on the shard of this process, or else by the dense forward."""
    split = ways(layer, x)
    if split is not None:
        return on_shards(layer, compressed, x, split)
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in layer._parameters.values()):
        parameters = zip(("weight", "bias"), _parameters(layer), strict=True)
        lie = {name: parameter.placements for name, parameter in parameters if parameter is not None}
        warnings.warn(
            f"A {type(layer).__name__} runs as the dense layer and keeps its whole input, since no process can compute "
            f"its part alone of an input that lies as {x.placements}, with parameters that lie as {lie}. HINT: to "
            "silence this, say so in the rules (`rules={name: None}`).",
            stacklevel=3,
        )
    return dense(layer, x)


def ways(layer: nn.Module, x: DTensor) -> list[Along] | None:
    """Return how tensors lie along each dimension of the mesh, ``None`` if there is no way in one of them."""
    weight, bias = _parameters(layer)
    read = len(getattr(layer, "normalized_shape", (0,)))
    found = []
    for dimension in range(x.device_mesh.ndim):
        way = along(x, weight, bias, read, isinstance(layer, nn.Linear), dimension)
        if way is None:
            return None
        found.append(way)
    return found


def _parameters(layer: nn.Module) -> list[DTensor | None]:
    return [cast("DTensor | None", layer._parameters.get(name)) for name in ("weight", "bias")]


def on_shards(layer: nn.Module, forward: Forward, x: DTensor, split: list[Along]) -> DTensor:
    """Return what a layer makes of a DTensor, computed on the shard of this process.

    Args:
        layer: A linear layer or a norm, with DTensors as parameters.
        forward: Maps such a layer, but with the parameters of this process, and its shard of ``x`` to the output.
        x: The input.
        split: How all lie along each dimension of the mesh.
    """
    mesh, is_linear = x.device_mesh, isinstance(layer, nn.Linear)
    weight, bias = _parameters(layer)
    parameters: dict[str, Tensor | None] = dict(layer._parameters)
    if weight is not None:
        parameters["weight"] = weight.to_local(grad_placements=[each.grad_weight for each in split])
    if bias is not None:
        parts = math.prod([mesh.size(dimension) for dimension, each in enumerate(split) if each.adds_part])
        local = bias.to_local(grad_placements=[each.grad_bias for each in split])
        parameters["bias"] = _Part.apply(local, parts) if parts > 1 else local
    shard = object.__new__(type(layer))
    shard.__dict__ = {**layer.__dict__, "_parameters": parameters}
    y = forward(shard, x.to_local(grad_placements=[each.grad_x for each in split])).contiguous()
    shape = torch.Size([*x.shape[:-1], weight.shape[0]]) if is_linear and weight is not None else x.shape
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, [each.y for each in split], run_check=False, shape=shape, stride=strides)


def along(
    x: DTensor, weight: DTensor | None, bias: DTensor | None, read: int, is_linear: bool, dimension: int
) -> Along | None:
    """Return how tensors lie along a dimension of the mesh; ``read``: how many dimensions of ``x`` are a row."""
    given, last = x.placements[dimension], x.dim() - 1
    whole = Replicate()
    of_weight, of_bias = (whole if p is None else p.placements[dimension] for p in (weight, bias))
    if of_weight.is_replicate() and of_bias.is_replicate():
        if given.is_replicate():
            return Along(whole, whole, whole, whole)
        if any(given.is_shard(row) for row in range(x.dim() - read)):
            return Along(given, given, Partial(), Partial())
    elif is_linear and given.is_replicate() and of_weight.is_shard(0) and (bias is None or of_bias.is_shard(0)):
        return Along(Shard(last), Partial(), of_weight, of_weight)
    elif is_linear and given.is_shard(last) and of_weight.is_shard(1) and of_bias.is_replicate():
        return Along(Partial(), given, of_weight, whole, adds_part=True)
    return None


class _Part(torch.autograd.Function):
    """The part of a bias that one of some processes adds, each of which has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, parts: int) -> Tensor:
        return bias / parts

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
