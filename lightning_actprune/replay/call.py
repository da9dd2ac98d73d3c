"""A call of a module, taken apart: its tensors, what else it is given, and in which settings it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_actprune.codec.private import (
    tree_flatten,
    tree_unflatten,
)

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class RefusedError(Exception):
    """A module cannot be replayed; the text is the reason."""


class Call(NamedTuple):
    """A call of a module, taken apart.

    Args:
        tensors: Among its arguments.
        places: Of these among ``leaves``.
        leaves: All that is in the arguments, without the tensors.
        spec: How the arguments are put together.
    """

    tensors: list[Tensor]
    places: list[list[int]]
    leaves: list[Any]
    spec: Any

    def arguments(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors in place of its own."""
        leaves = list(self.leaves)
        for places, tensor in zip(self.places, tensors, strict=True):
            for place in places:
                leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def take_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Any]:
    """Return a call and its signature.

    Raises:
        RefusedError: If something among the arguments is no tensor and no constant.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors, places, described = list[Tensor](), list[list[int]](), list[Any]()
    for place, leaf in enumerate(leaves):
        if type(leaf) is Tensor and leaf.layout == torch.strided:
            number = next((number for number, x in enumerate(tensors) if x is leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
                places.append([])
            places[number].append(place)
            described.append(number)
            described.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad))
            leaves[place] = None
        elif isinstance(leaf, PLAIN):
            described.append((type(leaf), leaf))
        else:
            raise RefusedError(f"an argument of type {type(leaf).__name__} is neither a tensor nor a constant")
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise RefusedError(f"its arguments are on {len(devices)} devices")
    return Call(tensors, places, leaves, spec), (spec, tuple(described), _autocast(devices.pop().type))


def _autocast(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def uncached_autocast(device: str, enabled: bool | None = None) -> torch.autocast:
    """Return autocast, as it is or ``enabled`` or not.

    It has no cache: casts of weights from before would be those of today for good.
    """
    _, now, dtype = _autocast(device)
    return torch.autocast(device, dtype, now if enabled is None else enabled, cache_enabled=False)


class Conduct(NamedTuple):
    """What eager calls of a signature have shown.

    Args:
        constants: What functions return that read values on the host, ``None`` if not all of these are constant.
        autocasts: Whether backward runs within autocast, where sums and products are others than outside.
        ends: Numbers of the outputs that get gradients.
    """

    constants: list[tuple[str, Any]] | None = None
    autocasts: bool = False
    ends: frozenset[int] = frozenset()
