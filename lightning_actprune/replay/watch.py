"""What Python does in a call of a module, which a graph does not, and what a graph depends on."""

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
from lightning_actprune.replay.call import PLAIN, RefusedError

_ON_HOST = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}
_ON_HOST |= {"equal", "allclose", "is_nonzero", "__contains__"}
"""Names of functions that wait for values, or take them to the host."""
_CONSTANTS = {"arange", "zeros", "ones", "full", "eye", "linspace", "tensor"}
"""Names of functions that make the same tensor of the same numbers; so do those with ``_like`` and ``new_``."""
_DRAWS = "rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential", "poisson", "empty"
"""Parts of names of functions whose results are others in each call."""
_MOST_VALUES = 2**20
"""Values of a constant tensor at most, which is kept to know it again."""
_PACKAGE = __name__.partition(".")[0]
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
"""Names of functions whose effect is in Python."""


def _called(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name


class Operations(TorchFunctionMode):
    """Notes the functions of torch that are called in here, with shapes and constants.

    Values of tensors that are made of constants alone, such as positions, may be read on the host: ``constants`` has
    what these functions returned.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        super().__init__()
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        ours = [vars(inner).get(name) for inner in module.modules() for name in OF_CONVERSION]
        self._met = {*self._own, *map(id, given), *map(id, State(module).tensors), *map(id, tensors_in(ours))}
        self._known = dict[int, tuple[Tensor, int]]()
        self.log, self.constants = list[Any](), list[tuple[str, Any]]()
        self.reason = self.reads = ""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = _called(func), tree_flatten((args, dict(kwargs or {})))[0]
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        constant = self._is_constant(name, tensors)
        result = func(*args, **(kwargs or {}))
        found = [y for y in tree_flatten(result)[0] if isinstance(y, Tensor)]
        if constant:
            self._known.update((id(y), (y, y._version)) for y in found if y.numel() <= _MOST_VALUES)
        if name in _ON_HOST and tensors:
            if constant:
                self.constants.append((name, result))
            else:
                self.reads = f"it reads values on the host ({name})"
                if not tensors[0].is_cuda:  # of a GPU's, capture tells: some code reads none while it is captured
                    self.reason = self.reads
        elif len({leaf.device.type for leaf in tensors if leaf.dim() > 0}) > 1:
            self.reason = f"it uses tensors on different devices ({name})"
        asks = name not in _ON_HOST and not found and result is not None  # for a shape, say
        if not asks and any(x.grad_fn is None and id(x) not in self._met for x in tensors):
            self.reason = f"it computes with a tensor that is no argument, parameter or attribute ({name})"
        self._met.update(map(id, found))
        if name in _HOOKS:
            self.reason = f"it calls {name}"
        if any(isinstance(leaf, torch.Generator) for leaf in given):
            self.reason = f"it draws from a generator of its own ({name})"
        if found or result is None or name in _ON_HOST:  # and not who asks for shapes
            values = tuple(leaf for leaf in (*given, result) if isinstance(leaf, PLAIN))
            shapes = [(tuple(leaf.shape), id(leaf) if id(leaf) in self._own else 0) for leaf in tensors]
            self.log.append((name, shapes, values))
        return result

    def _is_constant(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Return whether a function returns the same in each call."""
        if any(part in name for part in _DRAWS):
            return False
        if name in _CONSTANTS or name.endswith(("zeros_like", "ones_like", "full_like")) or name.startswith("new_"):
            return True
        known = (self._known.get(id(x), (None, 0)) for x in tensors)
        return bool(tensors) and all(
            x is one and x._version == version for x, (one, version) in zip(tensors, known, strict=True)
        )


class Constants(TorchFunctionMode):
    """Returns what functions that read constants returned, in their order, where a capture could not wait for values.

    Raises:
        RefusedError: If another one is called.
    """

    def __init__(self, constants: Sequence[tuple[str, Any]]) -> None:
        super().__init__()
        self._constants = iter(constants)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _called(func)
        if name in _ON_HOST and any(isinstance(leaf, Tensor) for leaf in tree_flatten((args, kwargs or {}))[0]):
            known, result = next(self._constants, ("", None))
            if known != name:
                raise RefusedError(f"it reads values on the host ({name})")
            return result
        return func(*args, **(kwargs or {}))


def differing(before: Sequence[Any], log: Sequence[Any]) -> str:
    """Return in brackets the first function that is another one than in the log before, empty if there is none."""
    found = next((call for then, call in zip(before, log, strict=False) if then != call), None)
    return f" ({found[0]})" if isinstance(found, tuple) else ""


def python_state(module: nn.Module) -> tuple[bytes, dict[str, tuple[Any, ...]]]:
    """Return random generators of the host, and what the attributes of all modules refer to, and containers in them."""
    attributes = {}
    for fqn, inner in module.named_modules():
        for name, value in vars(inner).items():
            items = _items(value)
            items += tuple(chain.from_iterable(map(_items, items)))
            versions = () if name == "_buffers" else map(version, (value, *items))
            attributes[f"{fqn}.{name}".lstrip(".")] = value, *items, *versions, *_drawn(value)
    on_gpu = any(tensor.is_cuda for tensor in (*module.parameters(), *module.buffers()))
    generators = python_generators(), torch.get_rng_state().numpy().tobytes() if on_gpu else None
    return pickle.dumps(generators), attributes


def version(value: Any) -> int:
    """Return how often a tensor has been written to, as far as torch counts it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _drawn(value: Any) -> tuple[str, ...]:
    """Return the state of a generator of Python's or NumPy's."""
    if isinstance(value, random.Random):
        return (str(value.getstate()),)
    return (str(value.bit_generator.state),) if hasattr(value, "bit_generator") else ()


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(value.values())
    return tuple(value) if isinstance(value, (list, tuple, set, deque, UserList)) else ()


def changes(before: tuple[bytes, dict[str, Any]], after: tuple[bytes, dict[str, Any]]) -> str:
    """Return what a call has changed that a graph would not, empty for nothing."""
    if before[0] != after[0]:
        return "it draws from a random generator on the host"
    held, holds = before[1], after[1]
    names = [name for name in held.keys() | holds.keys() if not _are_the_same(held.get(name, ()), holds.get(name, ()))]
    return f"it writes to its attribute {min(names)!r}" if names else ""


def _are_the_same(held: tuple[Any, ...], holds: tuple[Any, ...]) -> bool:
    return len(held) == len(holds) and all(
        one is other or (type(one) in (int, str) and one == other) for one, other in zip(held, holds, strict=True)
    )


def hooks_in(module: nn.Module) -> str:
    """Return which module inside has hooks, which no replay calls."""
    for name, inner in module.named_modules():
        hooks = inner._forward_hooks, inner._forward_pre_hooks, inner._backward_hooks, inner._backward_pre_hooks
        if inner is not module and any(_is_foreign(hook) for each in hooks for hook in each.values()):
            return f"its module {name!r} has hooks, which a replay does not call"
    return ""


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook may have an effect in Python; one that transformers checkpoints with has none."""
    ours = (getattr(hook, "__module__", None) or "").startswith(_PACKAGE)
    return not ours and getattr(hook, "__name__", "") != "make_inputs_require_grads"


class State:
    """What a graph of ``module`` depends on: all that attributes of its modules hold, and where tensors are.

    It takes 0.2 ms to look at 120 modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._types = list(map(type, self._modules))
        # Hooks of the module itself are called around a replay.
        held = [(name, value) for name, value in vars(module).items() if not name.endswith("_hooks")]
        held += [item for inner in self._modules[1:] for item in vars(inner).items()]
        containers = [value for _, value in held if isinstance(value, (Mapping, list, deque, UserList))]
        self._holders: list[Iterable[Any]] = [vars(inner).values() for inner in self._modules]
        self._holders += [each.values() if isinstance(each, Mapping) else each for each in containers]
        self._held = list(chain.from_iterable(self._holders))
        self.tensors = [each for each in self._held if isinstance(each, Tensor)]
        self._places = list(map(_place, self.tensors))

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        held = list(chain.from_iterable(self._holders))
        return (
            len(held) == len(self._held)
            and (all(map(is_, held, self._held)) or all(map(_is_as_before, held, self._held)))
            and self._types == list(map(type, self._modules))
            and self._places == list(map(_place, self.tensors))
        )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_as_before(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)
