"""Watch what Python does in a call, since a graph does not repeat it, and find what a graph depends on."""

from __future__ import annotations

import pickle
import random
from collections import UserList, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_actprune.codec.private import tree_flatten
from lightning_actprune.operators.base import OF_CONVERSION
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.second_run import python_generators
from lightning_actprune.replay.call import CONSTANTS, RefusedError

_HOST_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
_HOST_READS |= {"equal", "allclose", "is_nonzero", "__contains__"}
"""Functions that copy values of a tensor to the host."""
_FACTORIES = {"arange", "zeros", "ones", "full", "eye", "linspace", "tensor"}
"""Functions that return the same tensor for the same numbers, like those named ``*_like`` or ``new_*``."""
_RANDOM = "rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential", "poisson", "empty"
"""Parts of the names of functions whose result differs from call to call."""
_TENSOR_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
"""Functions that let Python run in backward."""
_MAX_CONSTANT_VALUES = 2**20
"""Larger constant tensors are not kept alive, and so not recognized."""
_PACKAGE = __name__.partition(".")[0]
_HARMLESS_HOOKS = {"make_inputs_require_grads"}
"""Names of module hooks of transformers that only call functions of torch."""


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name


class OperationLog(TorchFunctionMode):
    """Logs the functions of torch that a call uses, with shapes and constants.

    Code may read tensors on the host that depend on constants alone, such as positions: the results of these reads are
    in ``constants``.

    Args:
        module: The module that is called.
        arguments: Its flat arguments.

    Attributes:
        log: Name, shapes and constants of each function.
        constants: Name and result of each function that reads a constant tensor on the host.
        refusal: Why the call cannot be replayed, or "".
        host_read: Which function reads other values on the host, or "".
    """

    def __init__(self, module: nn.Module, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._weights = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        conversion = [vars(inner).get(name) for inner in module.modules() for name in OF_CONVERSION]
        attributes = Dependencies(module).tensors
        self._familiar = {*self._weights, *map(id, arguments), *map(id, attributes), *map(id, tensors_in(conversion))}
        self._constants = dict[int, tuple[Tensor, int]]()
        self.log, self.constants = list[Any](), list[tuple[str, Any]]()
        self.refusal = self.host_read = ""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, leaves = _name_of(func), tree_flatten((args, dict(kwargs or {})))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_constant = self._is_constant(name, tensors)
        result = func(*args, **(kwargs or {}))
        outputs = [y for y in tree_flatten(result)[0] if isinstance(y, Tensor)]
        if is_constant:
            self._constants |= {id(y): (y, y._version) for y in outputs if y.numel() <= _MAX_CONSTANT_VALUES}
        reads = name in _HOST_READS
        if reads and tensors and is_constant:
            self.constants.append((name, result))
        elif reads and tensors:
            self.host_read = f"it reads values on the host ({name})"
            if not tensors[0].is_cuda:  # some code does not read values of a GPU while it is captured: then try
                self.refusal = self.host_read
        elif len({leaf.device.type for leaf in tensors if leaf.dim() > 0}) > 1:
            self.refusal = f"it uses tensors on different devices ({name})"
        is_question = not reads and not outputs and result is not None  # such as for a shape
        if not is_question and any(x.grad_fn is None and id(x) not in self._familiar for x in tensors):
            self.refusal = f"it computes with a tensor that is no argument, parameter or attribute ({name})"
        self._familiar.update(map(id, outputs))
        if name in _TENSOR_HOOKS:
            self.refusal = f"it calls {name}"
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.refusal = f"it draws from a generator of its own ({name})"
        if outputs or result is None or reads:
            constants = tuple(leaf for leaf in (*leaves, result) if isinstance(leaf, CONSTANTS))
            shapes = [(tuple(leaf.shape), id(leaf) if id(leaf) in self._weights else 0) for leaf in tensors]
            self.log.append((name, shapes, constants))
        return result

    def _is_constant(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Return True if a function returns the same in each call."""
        if any(part in name for part in _RANDOM):
            return False
        if name in _FACTORIES or name.endswith(("zeros_like", "ones_like", "full_like")) or name.startswith("new_"):
            return True
        entries = (self._constants.get(id(x), (None, 0)) for x in tensors)
        return bool(tensors) and all(
            x is constant and x._version == version for x, (constant, version) in zip(tensors, entries, strict=True)
        )


class KnownConstants(TorchFunctionMode):
    """Answers host reads of constants during a capture, which must not wait for the GPU, with the logged results.

    Raises:
        RefusedError: If a function reads anything else on the host.
    """

    def __init__(self, constants: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self._constants = iter(constants)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _name_of(func)
        if name in _HOST_READS and any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs or {}))[0]):
            expected, result = next(self._constants, ("", None))
            if expected != name:
                raise RefusedError(f"it reads values on the host ({name})")
            return result
        return func(*args, **(kwargs or {}))


def first_difference(before: Sequence[Any], log: Sequence[Any]) -> str:
    """Return in brackets the first function that differs from the log of the call before, or ""."""
    entry = next((entry for old, entry in zip(before, log, strict=False) if old != entry), None)
    return f" ({entry[0]})" if isinstance(entry, tuple) else ""


def snapshot(module: nn.Module) -> tuple[bytes, dict[str, tuple[Any, ...]]]:
    """Return the random generators of the host, and the objects in all attributes and in their containers."""
    attributes = {}
    for fqn, inner in module.named_modules():
        for name, value in vars(inner).items():
            items = _items(value)
            items += tuple(chain.from_iterable(map(_items, items)))
            versions = () if name == "_buffers" else map(version_of, (value, *items))
            attributes[f"{fqn}.{name}".lstrip(".")] = value, *items, *versions, *_generator_state(value)
    on_gpu = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    generators = python_generators(), torch.get_rng_state().numpy().tobytes() if on_gpu else None
    return pickle.dumps(generators), attributes


def describe_change(before: tuple[bytes, dict[str, Any]], after: tuple[bytes, dict[str, Any]]) -> str:
    """Return what a call has changed between two snapshots, or ""."""
    if before[0] != after[0]:
        return "it draws from a random generator on the host"
    old, new = before[1], after[1]
    names = [name for name in old.keys() | new.keys() if not _are_same(old.get(name, ()), new.get(name, ()))]
    return f"it writes to its attribute {min(names)!r}" if names else ""


def version_of(value: Any) -> int:
    """Return how often torch has counted a write to a tensor; 0 for other objects."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _generator_state(value: Any) -> tuple[str, ...]:
    """Return the state of a random generator of Python or NumPy; nothing for other objects."""
    if isinstance(value, random.Random):
        return (str(value.getstate()),)
    return (str(value.bit_generator.state),) if hasattr(value, "bit_generator") else ()


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (list, tuple, set, deque, UserList)) else ()


def _are_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    return len(old) == len(new) and all(
        one is other or (type(one) in (int, str) and one == other) for one, other in zip(old, new, strict=True)
    )


def find_hooks(module: nn.Module) -> str:
    """Return which inner module has hooks, or "": a replay does not call them."""
    for name, inner in module.named_modules():
        hooks = inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks
        if inner is not module and any(_needs_python(hook) for each in hooks for hook in each.values()):
            return f"its module {name!r} has hooks, which a replay does not call"
    return ""


def _needs_python(hook: Any) -> bool:
    is_ours = (getattr(hook, "__module__", None) or "").startswith(_PACKAGE)
    return not is_ours and getattr(hook, "__name__", "") not in _HARMLESS_HOOKS


class Dependencies:
    """The objects in all attributes of a module's modules, and addresses of tensors: a graph depends on them.

    A check takes .2 ms for 120 modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._types = list(map(type, self._modules))
        # Hooks of the module itself run around a replay.
        attributes = [(name, value) for name, value in vars(module).items() if not name.endswith("_hooks")]
        attributes += [item for inner in self._modules[1:] for item in vars(inner).items()]
        containers = [value for _, value in attributes if isinstance(value, (Mapping, list, deque, UserList))]
        self._holders: list[Iterable[Any]] = [vars(inner).values() for inner in self._modules]
        self._holders += [each.values() if isinstance(each, Mapping) else each for each in containers]
        self._objects = list(chain.from_iterable(self._holders))
        self.tensors = [each for each in self._objects if isinstance(each, Tensor)]
        self._places = list(map(_place, self.tensors))

    def unchanged(self) -> bool:
        """Return True if nothing has changed."""
        objects = list(chain.from_iterable(self._holders))
        return (
            len(objects) == len(self._objects)
            and (all(map(is_, objects, self._objects)) or all(map(_is_equal, objects, self._objects)))
            and self._types == list(map(type, self._modules))
            and self._places == list(map(_place, self.tensors))
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, CONSTANTS) and type(one) is type(other) and one == other)
