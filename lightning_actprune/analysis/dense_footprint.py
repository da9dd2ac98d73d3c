"""Find what a converted module would keep for backward if it were dense, without keeping it.

The dense model does not exist and so cannot be measured, and a formula per class would describe each class a second
time. So the forward of the dense class runs once more on *fake* tensors, which have shapes, strides, types and devices
but no values, and torch itself says which tensors it would save. It runs on a twin: the dense classes of the module and
its children, with fake parameters and buffers and without hooks. Nothing of the module changes: no running statistics,
no random numbers, no caches of autocast or of ``parametrize.cached``.

Kept bytes count by storage, so each storage of the twin has to be matched with the one that the real step has in its
place. Inputs, parameters and buffers are matched at the start, outputs when the module has returned them: a ReLU keeps
its result, which the next layer may keep as its input. Autocast's 16-bit copy of a weight is matched by its leaf and
region (``analysis.recorder``). All other storages are new.

Integers and booleans among the arguments are copied with their values, and what is computed from them alone has values
too: a graph network drops some edges before it selects a row for each, so their number depends on values.

A frozen linear layer whose weight is quantized (bitsandbytes, torchao) keeps nothing but that weight. Its twin has a
frozen weight in the type of the input in its place. Any other forward that takes tensors which are more than strided
memory (a DTensor, say), or that reads other values, cannot run this way. Its module then has no dense footprint: what
it keeps now counts as dense, of a block that runs again its inputs alone.
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
from lightning_actprune.codec.private import FakeTensorMode, no_dispatch_modes, tree_leaves, tree_map_only
from lightning_actprune.operators.base import Converted, dense_class, is_quantized
from lightning_actprune.operators.containers import map_tensors
from lightning_actprune.operators.hooks import MODULE_ATTRIBUTES
from lightning_actprune.operators.second_run import python_generators, set_python_generators

_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
"""Attributes of a module that hold hooks."""
_CONTAINERS = (list, dict, set, deque, UserList, UserDict)


class FakeMode(FakeTensorMode):  # type: ignore[misc]
    """Fake tensors on existing devices only: torch would initialise others too, and then no process can be forked."""

    @property
    def avoid_device_init(self) -> bool:
        """False: do not prepare devices that are not there."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors, or on integers with values.

        Grouped products of other types than bfloat16, which torch's rule for shapes refuses, run as those of it.
        """
        if _has_values(func, args, kwargs):
            with no_dispatch_modes():
                result = func(*args, **(kwargs or {}))
            with self:
                return tree_map_only(Tensor, lambda x: x if _is_integer(x) else _empty_like(x), result)
        if func is torch.ops.aten.index.Tensor:  # torch's rule for shapes does not read masks
            args = args[0], [numbers for index in args[1] for numbers in _list_numbers(index)]
        dtype = getattr(args[0], "dtype", None) if str(func) == "aten._grouped_mm.default" else None
        if dtype in (None, torch.bfloat16):
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self:
            narrow = [x.to(torch.bfloat16) if isinstance(x, Tensor) and x.dtype == dtype else x for x in args]
            return func(*narrow, **(kwargs or {})).to(dtype)


class DenseForward:
    """One forward of the dense class of a converted module, on fake tensors.

    Args:
        module: The converted module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Exception: Anything that the forward raises if it cannot run without values.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._fakes: dict[int, Tensor] = {}
        self._real: dict[int, Tensor] = {}
        self._keys: dict[StorageWeakRef, tuple[StorageWeakRef, int]] = {}
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)  # a fake tensor has no memory that the list could keep
            return tensor

        cached, generators = torch.is_autocast_cache_enabled(), python_generators()
        parametrized = parametrize._cache_enabled
        with (
            FakeMode(allow_non_fake_inputs=True),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            # Otherwise these caches would keep copies of fake parameters, and return them for real ones later.
            torch.set_autocast_cache_enabled(False)
            parametrize._cache_enabled = 0
            try:
                twin = self._make_twin(module)
                inputs = map_tensors(self._fake_argument, (args, dict(kwargs)))
                self._output = type(twin).forward(twin, *inputs[0], **inputs[1])
            finally:
                torch.set_autocast_cache_enabled(cached)
                parametrize._cache_enabled = parametrized
                set_python_generators(generators)
        self._saved: list[tuple[Tensor, Any]] = []
        """Each tensor that the dense module would save, with a key if it is one of autocast's shared copies."""
        for tensor in saved:
            leaf = find_copied_leaf(tensor)
            real = None if leaf is None else self._real.get(id(leaf))
            self._saved.append((tensor, None if real is None else find_shared_copy(real)))

    def find_storages(self, output: Any) -> dict[Any, int]:
        """Return the bytes of each storage that the dense module would keep; copies of autocast have their own keys.

        Args:
            output: Output of the converted module, ``None`` if it raised.
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
        """Return a module of the dense class with fake parameters and buffers, twins as children, and no hooks."""
        if isinstance(module, nn.Linear) and is_quantized(module):
            return _QuantizedLinear(module, self._pair)
        cls = type(module)
        while issubclass(cls, Converted):
            cls = dense_class(cls)
        twin = cls.__new__(cls)
        own = vars(module) | {name: OrderedDict() for name in _HOOKS}
        own.pop("forward", None)
        own["_modules"] = {name: child and self._make_twin(child) for name, child in module._modules.items()}
        own["_parameters"] = {name: self._fake_parameter(value) for name, value in module._parameters.items()}
        own["_buffers"] = tree_map_only(Tensor, self._fake, dict(module._buffers))
        # For example parts of a flat parameter, which FSDP sets while a module runs, or a weight with a norm.
        own |= {name: self._fake(value) for name, value in vars(module).items() if isinstance(value, Tensor)}
        # The twin fills its own lists and mappings.
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

    def _fake_argument(self, real: Tensor) -> Tensor:
        """Return a copy of integers, which the twin may write to, and a tensor without values of any other tensor."""
        if type(real) is Tensor and _is_integer(real) and id(real) not in self._fakes:
            self._pair(real.clone(), real)
        return self._fake(real)

    def _pair(self, fake: Tensor, real: Tensor) -> None:
        self._fakes[id(real)], self._real[id(fake)] = fake, real
        self._match_storages(fake, real)

    def _match_storages(self, fake: Tensor, real: Tensor) -> None:
        """Match the storage of ``fake`` with that of ``real``, unless it has a match."""
        for (key, _), real_storage in zip(find_storages(fake), find_storages(real), strict=False):
            self._keys.setdefault(key, real_storage)


class _QuantizedLinear(nn.Module):
    """The twin of a frozen linear layer with a quantized weight.

    Args:
        layer: The layer.
        pair: Called with a fake weight and the real one.
    """

    def __init__(self, layer: nn.Linear, pair: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._layer, self._pair = [layer], pair  # in a list, since it is no child

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output in the type of ``x``."""
        (layer,) = self._layer
        weight = torch.empty(layer.out_features, layer.in_features, dtype=x.dtype, device=x.device)
        self._pair(weight, layer.weight)
        return nn.functional.linear(x, weight)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _has_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if all tensors that an operation reads are integers with values, and it draws no random numbers."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return all(type(x) is Tensor and _is_integer(x) for x in tensors)


def _list_numbers(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return an index that selects the same; a mask with values becomes the positions of its true values."""
    if type(index) is not Tensor or index.dtype != torch.bool:
        return (index,)
    with no_dispatch_modes():
        return index.nonzero().unbind(1)


def _empty_like(real: Tensor) -> Tensor:
    """Return a tensor of the same type and layout on the same device; it has no memory inside a fake mode."""
    if type(real) not in (Tensor, nn.Parameter):
        raise TypeError(f"A {type(real).__name__} is more than memory with strides.")
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
