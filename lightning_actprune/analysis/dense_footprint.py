"""What a converted module would keep for backward if it were dense, found without keeping it.

The dense model is not there to be measured, and a formula for every class would be a second description of each of
them. So the forward of the dense class runs once more, on *fake* tensors, which have shapes, strides, types and devices
but no values: torch itself says which tensors it would save. It runs on a twin of the module, made of the dense classes
of it and of its children, with fake parameters and buffers and without any hooks, so nothing of the module changes: no
running statistics, no random numbers, no caches of autocast or of ``parametrize.cached``.

What is kept counts by storage, so each storage of the twin must be known as the storage that the real step has in its
place. Those of inputs, parameters and buffers are known from the start, those of the output when the module has
returned it: a ReLU keeps its result, which the next layer may keep as its input. A 16-bit copy of a weight that
autocast makes is known by its leaf and region (``analysis.recorder``). All others are new.

A forward that looks at values, or takes tensors that are more than memory with strides, such as a DTensor, cannot run
so. Nothing is known of its module then.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from lightning_actprune.analysis.recorder import find_copied_leaf, find_shared_copy, find_storages, is_expanded
from lightning_actprune.codec.private import FakeTensorMode, tree_leaves, tree_map_only
from lightning_actprune.operators.base import Converted, dense_class
from lightning_actprune.operators.containers import map_tensors
from lightning_actprune.operators.hooks import MODULE_ATTRIBUTES
from lightning_actprune.operators.second_run import python_generators, set_python_generators

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
"""Attributes of a module that hold hooks."""
_CONTAINERS = (list, dict, set, deque, UserList, UserDict)


class FakeMode(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors on devices that there are: torch gets ready for others too, after which no process can be forked."""

    @property
    def avoid_device_init(self) -> bool:
        """False: no device is used that is not there."""
        return False


class DenseForward:
    """One forward of the dense class of a converted module, on fake tensors.

    Args:
        module: The converted module.
        args: What it is called with.
        kwargs: The same, by keyword.

    Raises:
        Exception: Whatever the forward raises if it cannot run without values.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._fakes: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        self._keys: dict[StorageWeakRef, tuple[StorageWeakRef, int]] = {}
        saved: list[Tensor] = []
        cached, generators, parametrized = (
            torch.is_autocast_cache_enabled(),
            python_generators(),
            parametrize._cache_enabled,
        )
        with (
            FakeMode(allow_non_fake_inputs=True),
            torch.autograd.graph.saved_tensors_hooks(_make_pack_hook(saved), lambda tensor: tensor),
        ):
            # Or they would keep copies of fake parameters, for whoever asks for real ones later.
            torch.set_autocast_cache_enabled(False)
            parametrize._cache_enabled = 0
            try:
                twin = self._make_twin(module)
                inputs = map_tensors(self._fake, (args, dict(kwargs)))
                self._output = type(twin).forward(twin, *inputs[0], **inputs[1])
            finally:
                torch.set_autocast_cache_enabled(cached)
                parametrize._cache_enabled = parametrized
                set_python_generators(generators)
        self._saved: list[tuple[Tensor, Any]] = []
        """Each tensor that the dense module would save, with its key if it is one of autocast's shared copies."""
        for tensor in saved:
            leaf = find_copied_leaf(tensor)
            real = None if leaf is None else self._real.get(id(leaf))
            self._saved.append((tensor, None if real is None else find_shared_copy(real)))

    def find_storages(self, output: Any) -> dict[Any, int]:
        """Return the bytes of each storage that the dense module would keep, autocast's copies by their own keys.

        Args:
            output: What the converted module has returned, ``None`` if it raised.
        """
        for fake, real in zip(tree_leaves(self._output), tree_leaves(output), strict=False):
            if isinstance(fake, Tensor) and isinstance(real, Tensor):
                self._match_storages(fake, real)
        sizes: dict[Any, int] = {}
        for tensor, copy in self._saved:
            for key, nbytes in find_storages(tensor):
                sizes |= dict([self._keys.get(key, (key if copy is None else copy, nbytes))])
        return sizes

    def _make_twin(self, module: nn.Module) -> nn.Module:
        """Return a module of the dense class with fake parameters and buffers, twins for children, and no hooks."""
        cls = type(module)
        while issubclass(cls, Converted):
            cls = dense_class(cls)
        twin = cls.__new__(cls)
        own = vars(module) | {name: OrderedDict() for name in _HOOKS}
        own.pop("forward", None)
        own["_modules"] = {name: child and self._make_twin(child) for name, child in module._modules.items()}
        own["_parameters"] = {name: self._fake_parameter(value) for name, value in module._parameters.items()}
        own["_buffers"] = tree_map_only(Tensor, self._fake, dict(module._buffers))
        # Such as the parts of a flat parameter, which FSDP puts there while a module runs, or a weight with a norm.
        own |= {name: self._fake(value) for name, value in vars(module).items() if isinstance(value, Tensor)}
        # The twin fills lists and mappings of its own.
        held = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
        own |= {name: map_tensors(self._fake, value) for name, value in held.items() if isinstance(value, _CONTAINERS)}
        vars(twin).update(own)
        return twin

    def _fake_parameter(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None:
            return None
        if id(parameter) not in self._fakes:
            fake = nn.Parameter(_empty_like(parameter), parameter.requires_grad)
            self._pair(fake, parameter)
        return self._fakes[id(parameter)]

    def _fake(self, real: Tensor) -> Tensor:
        """Return a tensor like ``real`` without values, the same one each time."""
        if id(real) not in self._fakes:
            fake = _empty_like(real)
            if real.requires_grad and (real.is_leaf or is_expanded(real)):
                fake.requires_grad_()
            elif real.requires_grad:  # a result, which may be written to
                fake.add_(torch.zeros((), dtype=real.dtype, device=real.device, requires_grad=True))
            self._pair(fake, real)
        return self._fakes[id(real)]

    def _pair(self, fake: Tensor, real: Tensor) -> None:
        self._fakes[id(real)], self._real[id(fake)] = fake, real
        self._match_storages(fake, real)

    def _match_storages(self, fake: Tensor, real: Tensor) -> None:
        """Let the storage of ``fake`` stand for that of ``real``, unless it stands for one already."""
        for (key, _), real_storage in zip(find_storages(fake), find_storages(real), strict=False):
            self._keys.setdefault(key, real_storage)


def _make_pack_hook(saved: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a pack hook that notes what is saved; the list keeps no memory, since fake tensors have none."""

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return note


def _empty_like(real: Tensor) -> Tensor:
    """Return a tensor of the same type and layout on the same device; inside a fake mode it has no memory."""
    if type(real) not in (Tensor, nn.Parameter):
        raise TypeError(f"A {type(real).__name__} is more than memory with strides.")
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
