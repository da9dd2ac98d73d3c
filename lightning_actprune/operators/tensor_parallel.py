r"""Tensor-parallel layers: each process stores its own shard of the input compressed.

``parallelize_module`` turns a layer's parameters and its input into DTensors. Each process of a mesh then holds a shard
``x_s`` of the input and one of the weight, computes its part of the output, and keeps ``x_s`` for backward. So the
compressed layer runs on the local shards as on any tensors, and its output becomes a DTensor again. Blocks are cut from
a shard and compete within it: no process needs to know which blocks another one drops.

For ``y = x W^T + b`` and a norm ``y = x^ w + b`` over the last dimensions of ``x``, along one dimension of the mesh:

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

As in torch, a sum stays ``Partial`` until somebody reads its value, and in the row-wise layer each process adds ``b``
over the number of processes. A bias is split like the features of the output. With any other placements no process can
compute its part alone: the dense layer runs, as torch runs it on DTensors, and a warning says so.
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
"""The forward of a layer: takes the layer and its input."""


class Placements(NamedTuple):
    """Placements of a layer's output and gradients along one dimension of the mesh.

    Args:
        y: Placement of the output.
        grad_x: Placement of the gradient of the input.
        grad_weight: Placement of the gradient of the weight.
        grad_bias: Placement of the gradient of the bias.
        divides_bias: True if each process adds only its part of the bias.
    """

    y: Placement
    grad_x: Placement
    grad_weight: Placement
    grad_bias: Placement
    divides_bias: bool = False


def has_dtensor_parameters(layer: nn.Module) -> bool:
    """Return True if a layer's parameters, if any, all are DTensors: torch does not mix DTensors with tensors."""
    return all(parameter is None or isinstance(parameter, DTensor) for parameter in layer._parameters.values())


def forward_dtensor(layer: nn.Module, compressed: Forward, dense: Forward, x: DTensor) -> Any:
    """Run a layer on the shard of this process if its placements allow that, else its dense forward on the DTensor."""
    placements = find_placements(layer, x)
    if placements is not None:
        return run_on_shards(layer, compressed, x, placements)
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in layer._parameters.values()):
        parameters = zip(("weight", "bias"), _weight_and_bias(layer), strict=True)
        split = {name: parameter.placements for name, parameter in parameters if parameter is not None}
        warnings.warn(
            f"A {type(layer).__name__} runs as the dense layer and keeps its whole input: no process can compute its "
            f"part alone of an input placed as {x.placements} with parameters placed as {split}. HINT: to silence "
            "this, keep the layer dense by a rule (`rules={name: None}`).",
            stacklevel=3,
        )
    return dense(layer, x)


def find_placements(layer: nn.Module, x: DTensor) -> list[Placements] | None:
    """Return the placements along each dimension of the mesh, or ``None`` if the layer cannot run on shards."""
    weight, bias = _weight_and_bias(layer)
    row_dims = len(getattr(layer, "normalized_shape", (0,)))
    placements = []
    for mesh_dim in range(x.device_mesh.ndim):
        along_dim = _placements_along(x, weight, bias, row_dims, isinstance(layer, nn.Linear), mesh_dim)
        if along_dim is None:
            return None
        placements.append(along_dim)
    return placements


def _weight_and_bias(layer: nn.Module) -> list[DTensor | None]:
    return [cast("DTensor | None", layer._parameters.get(name)) for name in ("weight", "bias")]


def _placements_along(
    x: DTensor, weight: DTensor | None, bias: DTensor | None, row_dims: int, is_linear: bool, mesh_dim: int
) -> Placements | None:
    """Return the row of the table above for ``mesh_dim``, or ``None``; a norm's row has ``row_dims`` dimensions."""
    of_x, features = x.placements[mesh_dim], x.dim() - 1
    whole = Replicate()
    of_weight, of_bias = (whole if p is None else p.placements[mesh_dim] for p in (weight, bias))
    if of_weight.is_replicate() and of_bias.is_replicate():
        if of_x.is_replicate():
            return Placements(whole, whole, whole, whole)
        if any(of_x.is_shard(row) for row in range(x.dim() - row_dims)):
            return Placements(of_x, of_x, Partial(), Partial())
    elif is_linear and of_x.is_replicate() and of_weight.is_shard(0) and (bias is None or of_bias.is_shard(0)):
        return Placements(Shard(features), Partial(), of_weight, of_weight)
    elif is_linear and of_x.is_shard(features) and of_weight.is_shard(1) and of_bias.is_replicate():
        return Placements(Partial(), of_x, of_weight, whole, divides_bias=True)
    return None


def run_on_shards(layer: nn.Module, forward: Forward, x: DTensor, placements: list[Placements]) -> DTensor:
    """Compute a layer's output on the shard of this process, and return it as a DTensor.

    Args:
        layer: A linear layer or a norm whose parameters are DTensors.
        forward: Takes a copy of the layer with the shards of this process as parameters, and the shard of ``x``.
        x: The input.
        placements: The placements along each dimension of the mesh.
    """
    mesh, is_linear = x.device_mesh, isinstance(layer, nn.Linear)
    weight, bias = _weight_and_bias(layer)
    parameters: dict[str, Tensor | None] = dict(layer._parameters)
    if weight is not None:
        parameters["weight"] = weight.to_local(grad_placements=[each.grad_weight for each in placements])
    if bias is not None:
        parts = math.prod([mesh.size(dim) for dim, each in enumerate(placements) if each.divides_bias])
        local_bias = bias.to_local(grad_placements=[each.grad_bias for each in placements])
        parameters["bias"] = _DivideBiasFunction.apply(local_bias, parts) if parts > 1 else local_bias
    local_layer = object.__new__(type(layer))
    local_layer.__dict__ = {**layer.__dict__, "_parameters": parameters}
    local_y = forward(local_layer, x.to_local(grad_placements=[each.grad_x for each in placements])).contiguous()
    shape = torch.Size([*x.shape[:-1], weight.shape[0]]) if is_linear and weight is not None else x.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local_y, mesh, [each.y for each in placements], run_check=False, shape=shape, stride=stride
    )


class _DivideBiasFunction(torch.autograd.Function):
    """Return the part of a bias that each of ``parts`` processes adds; each of them gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, parts: int) -> Tensor:
        return bias / parts  # [OUT]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
