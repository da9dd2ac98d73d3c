"""A call of a module: its tensors, its other arguments, its signature, and what eager calls have shown of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.codec.private import tree_flatten, tree_unflatten

CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of arguments that are a part of the signature."""


class RefusedError(Exception):
    """A module cannot be replayed; the text is the reason."""


class Call(NamedTuple):
    """The arguments of a call.

    Args:
        tensors: All tensors, each once.
        places: For each tensor, its indices in ``leaves``.
        leaves: The flat arguments, with ``None`` in place of tensors.
        spec: The containers that hold the leaves.
    """

    tensors: list[Tensor]
    places: list[list[int]]
    leaves: list[Any]
    spec: Any

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``args`` and ``kwargs`` with other tensors in place of those of the call."""
        leaves = list(self.leaves)
        for places, tensor in zip(self.places, tensors, strict=True):
            for place in places:
                leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def parse_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Any]:
    """Return a call and its signature: shapes, strides, types, constants, containers and autocast.

    Raises:
        RefusedError: If an argument is neither a tensor nor a constant, or tensors are on several devices.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors, places, signature = list[Tensor](), list[list[int]](), list[Any]()
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.layout == torch.strided:
            number = next((number for number, x in enumerate(tensors) if x is leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
                places.append([])
            places[number].append(place)
            signature.append((number, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            leaves[place] = None
        elif isinstance(leaf, CONSTANTS):
            signature.append((type(leaf), leaf))
        else:
            raise RefusedError(f"an argument of type {type(leaf).__name__} is neither a tensor nor a constant")
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise RefusedError(f"its arguments are on {len(devices)} devices")
    return Call(tensors, places, leaves, spec), (spec, tuple(signature), _autocast(devices.pop().type))


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def uncached_autocast(device: str, enabled: bool | None = None) -> torch.autocast:
    """Return autocast in its present state, or switched on or off, without its cache of weights.

    A graph would use the weights that were in the cache at its capture for good.
    """
    _, now, dtype = _autocast(device)
    return torch.autocast(device, dtype, now if enabled is None else enabled, cache_enabled=False)


class Observations(NamedTuple):
    """Facts that eager calls of a signature have shown.

    Args:
        constants: Names and results of the functions that read constants on the host; ``None`` if other values are
            read, too.
        backward_autocasts: Whether backward runs under autocast, which computes sums and products in other types.
        graded: Indices of the outputs that get a gradient.
    """

    constants: list[tuple[str, Any]] | None = None
    backward_autocasts: bool = False
    graded: frozenset[int] = frozenset()
