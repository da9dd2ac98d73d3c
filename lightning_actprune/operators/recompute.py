r"""Modules that run again in backward, from inputs that are kept in few bits.

Of a block ``y = f(x)`` a dense model keeps all that its operations save, an activation checkpoint the input ``x``
alone: it runs ``f`` again when backward gets there. Here ``x`` is kept in few bits, ``x^``. The first run has the exact
``x``, so the output, the loss and all that follows are those of the dense model, bit for bit. The second one only
refills what operations have saved: the graph is that of the first run, so the gradient of ``x`` arrives where it
belongs, and is ::

    dx = J(x^)^T dy        in place of        J(x)^T dy

with the Jacobian ``J`` of the block at a point that is off by no more than half a step of each of its blocks of values.
Of a residual block, ``f(x) = x + h(x)``, the identity in ``J`` is exact, and ``h`` begins with a norm that divides by
the stream's deviation: what counts is the error of ``x^`` over the deviation of ``x``, 0.2 % in eight bits and 4 % in
four.

It is torch's own non-reentrant checkpoint (``torch.utils.checkpoint``), which restores random generators and autocast
and stops the second run when the last tensor is there, around a function that is given what is stored in place of
``x``, but takes the exact ``x`` out of a cell when it runs first. What is stored are arguments of the checkpoint, so
hooks around it are given it as any saved tensor: a meter counts it, ``save_on_cpu`` moves it.

Stored in few bits is each tensor among the arguments, in whatever lists, tuples and mappings, that needs a gradient
and is no leaf: fp32 or 16 bits, of ``MIN_VALUES`` values or more, without gaps or overlaps, and no additive mask. All
else is kept as it is, and autograd sees to it that nobody writes to it before backward. What is quantized may be
written to: by the block itself or by whoever comes later. A tensor that several blocks get, as the output of an
encoder, is stored once.

``operators.second_run`` sees to it that the second run computes what the first did, or raises an error that names the
module. One run of each module keeps its inputs exactly, in a copy, so that both can be compared.

The second run has to save as many tensors of the same shapes as the first. A block whose shapes depend on values that
are computed from ``x``, as those of experts on a router, may not: that is such an error, and ``bits=None`` is the cure.

A compiler that traces a module sees torch's checkpoint around the dense one, and its inputs marked: these are packed by
the pass over the compiler's graph (``compiled.recompute``). Where no pass runs, they are kept as they are. A module
that no graph holds, since it writes to attributes for example, runs without the compiler. One that reads a buffer that
it writes to, which a compiler gets wrong, runs once (``compiled.once``).
"""

from __future__ import annotations

import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from lightning_actprune.codec.dispatch import KERNEL_DTYPES, in_plain_eager_mode
from lightning_actprune.codec.pack_cache import find, key_of, remember
from lightning_actprune.codec.packed import Packed, quantize
from lightning_actprune.codec.private import (
    are_functorch_transforms_active,
    is_tracing,
    top_saved_tensors_hooks,
    tree_map_only,
    unseen_by_compilers,
    while_traced,
)
from lightning_actprune.compiled.marks import HALF, marked
from lightning_actprune.compiled.once import run_once_if_written
from lightning_actprune.config import Recompute
from lightning_actprune.operators.base import Converted, torch_class
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.hooks import dropped_by_checkpoint
from lightning_actprune.operators.regions import Layout, as_read, layout_of, unpack_region
from lightning_actprune.operators.second_run import FirstRun, Habits, NamedError

MIN_VALUES = 2**10
"""Tensors of fewer values stay as they are."""
_PREFIX, _DOT = "Recomputed__", "__dot__"


class RecomputeState(NamedTuple):
    """How the inputs of a module are kept.

    Args:
        keep: What a rule says.
        owner: Who converted the module.
        mark: What a compiler is told of the inputs, nothing while empty.
        name: Of the module in the model.
        turn: How many of its runs come before the one that is compared with its second run.
        habits: What its runs have shown, by training mode.
    """

    keep: Recompute
    owner: str
    mark: str
    name: str
    turn: int
    habits: dict[bool, Habits]


class RecomputedModule(Converted):
    """Mixin of the classes that ``convert`` gives to modules that run again in backward."""

    runs_again = True
    _recompute: RecomputeState

    @property
    def recompute(self) -> Recompute:
        """How the inputs of the module are kept."""
        return self._recompute.keep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the dense module does, and keep of its inputs what it can be run from again."""
        if "_recompute" not in self.__dict__:  # reverted, and this method is held by somebody
            return type(self).forward(self, *args, **kwargs)
        dense = super().forward  # type: ignore[misc]
        # Transforms of torch.func allow no hooks, and a trace is to know nothing of this package.
        if not torch.is_grad_enabled():
            return dense(*args, **kwargs)
        if is_compiling():
            return checkpointed(self, dense, args, kwargs)
        if are_functorch_transforms_active() or is_tracing():  # neither allows hooks on what is saved
            return dense(*args, **kwargs)
        return recomputed(self, dense, args, kwargs)

    def extra_repr(self) -> str:
        """Show what the dense module prints, and that it runs again."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (shown, f"recomputed from {kept_inputs(self.recompute)}")))


def kept_inputs(keep: Recompute) -> str:
    """Return how inputs are kept, in words."""
    return "inputs as they are" if keep.bits is None else f"inputs in {keep.bits} bits"


class _Stored(NamedTuple):
    """How a tensor among the arguments is stored.

    Args:
        dtype: Of the tensor.
        shape: Of the tensor.
        layout: How it is read and written, ``None`` where it is rounded alone.
        bits: Of a value.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout | None
    bits: int

    def read(self, values: Tensor) -> Tensor:
        """Return the tensor."""
        if self.layout is None:
            return values.to(self.dtype, copy=True)  # the module may write to it
        dense = unpack_region(values, self.layout, self.bits, self.dtype)
        # No view of it, which could not be written to.
        place = dense.untyped_storage(), dense.storage_offset()
        return dense.new_empty(0).set_(*place, self.shape, self.layout.dense_strides)


class _Read(torch.autograd.Function):
    """A stored tensor as a result that needs a gradient, which a block may write to: a leaf it could not."""

    @staticmethod
    def forward(ctx: Any, needs_gradient: Tensor, values: Tensor, stored: _Stored) -> Tensor:
        return stored.read(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("The graph of a recomputation is not the one that backward takes.")


def checkpointed(
    module: RecomputedModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return ``forward(*args, **kwargs)`` as a compiler is to see it: in a checkpoint, from marked inputs."""
    mark = module._recompute.mark
    name = module._recompute.name  # noqa: F841  # for `run_once_if_written`
    if mark:
        args, kwargs = _mapped(Tensor, lambda x: marked(x, mark) if x.requires_grad else x, args, kwargs)
    run = partial(_run_outside_of_graphs, module, lambda: forward(*args, **kwargs), [])
    outputs = checkpoint(run, use_reentrant=False)
    while_traced(run_once_if_written)
    return outputs


@unseen_by_compilers
def _run_outside_of_graphs(module: RecomputedModule, forward: Callable[[], Any], first: list[FirstRun]) -> Any:
    """Return what ``forward`` does in torch's checkpoint, which a compiler calls where no graph holds the module."""
    if is_compiling():
        return forward()
    if first:
        return first[0].run_again(forward)
    first.append(FirstRun(module, module._recompute.name, module._recompute.habits, turn=0))  # type: ignore[arg-type]
    with first[0].noted():
        return forward()


def recomputed(
    module: RecomputedModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return ``forward(*args, **kwargs)`` of ``module``, which runs again in backward from what is kept of these."""
    keep, _, _, name, turn, habits = module._recompute
    if not any(x.requires_grad for x in tensors_in((args, kwargs))):
        trained = {parameter.requires_grad for parameter in module.parameters()}  # type: ignore[attr-defined]
        if trained == {False}:  # all is frozen, and the dense module keeps nothing
            return forward(*args, **kwargs)
    args, kwargs = _without_caches(name, args, kwargs)
    inside = dropped_by_checkpoint(top_saved_tensors_hooks(False))  # has to store the same in its first runs, of two
    first = FirstRun(module, name, habits, None if inside else 0 if keep.bits is None else turn)  # type: ignore[arg-type]
    places: dict[int, _Place] = {}
    kept: list[Tensor] = []
    stored: list[_Stored | None] = []

    def store(leaf: Tensor) -> _Place:
        if id(leaf) not in places:
            places[id(leaf)] = _Place(len(kept))
            how, values = _store(leaf, keep, len(kept), first)
            kept.append(values)
            stored.append(how)
        return places[id(leaf)]

    given = _mapped(Tensor, store, args, kwargs)
    exact = [(args, kwargs)]
    del args, kwargs

    def run(*values: Tensor) -> Any:
        if exact:
            own, by_name = exact.pop()
            with first.noted():
                return forward(*own, **by_name)

        def again() -> Any:
            read = [_as_result(value, how) for value, how in zip(values, stored, strict=True)]
            own, by_name = _mapped(_Place, lambda place: read[place.number], *given)
            return forward(*own, **by_name)

        return first.run_again(again)

    return checkpoint(run, *kept, use_reentrant=False)


def _without_caches(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return arguments without the caches of keys and values of transformers, as its own checkpoints do."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise NamedError(
            f"Module {name!r} reads keys and values from a cache, to which it adds its own: it cannot run again in "
            "backward. HINT: let it run once, by a rule of `None` or a preset other than 'recompute'; prefix tuning "
            "needs that."
        )
    warnings.warn(
        "Modules that run again in backward cannot fill a cache of keys and values: it stays empty. HINT: say "
        "`use_cache=False` in the configuration of the model.",
        stacklevel=2,
    )
    left = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), left | (
        {"use_cache": False} if kwargs.get("use_cache") else {}
    )


def _is_cache(value: Any) -> bool:
    return any(cls.__module__ == "transformers.cache_utils" and cls.__name__ == "Cache" for cls in type(value).__mro__)


def _mapped(
    kind: type[Any], change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments in which all of ``kind``, however deep, are changed."""

    def mapped(value: Any) -> Any:
        if isinstance(value, kind):
            return change(value)
        # torch's walk through nested arguments takes as long as a launch.
        return value if value is None or type(value) in _SIMPLE else tree_map_only(kind, change, value)

    return tuple(map(mapped, args)), {name: mapped(value) for name, value in kwargs.items()}


_SIMPLE = {bool, int, float, str}


class _Place:
    """Stands for a tensor among the arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


_NEEDS_GRADIENT = torch.zeros((), requires_grad=True)


def _as_result(values: Tensor, stored: _Stored | None) -> Tensor:
    if stored is None:
        return values
    read: Tensor = _Read.apply(_NEEDS_GRADIENT, values, stored)
    return read


def _store(x: Tensor, keep: Recompute, number: int, first: FirstRun) -> tuple[_Stored | None, Tensor]:
    """Return how argument ``number`` is stored, ``None`` as it is, and what is stored of it.

    Both runs are compared from a copy of ``x``. A mask stays as it is.
    """
    known = type(x) is Tensor and x.dtype in KERNEL_DTYPES and x.layout == torch.strided and x.requires_grad
    if keep.bits is None or not known or x.is_leaf or x.numel() < MIN_VALUES or not in_plain_eager_mode(x):
        return None, x
    if first.is_mask(number, x):
        return None, x
    if first.compares:
        return _Stored(x.dtype, tuple(x.shape), None, 8 * x.itemsize), x.detach().clone()
    if keep.bits == HALF:
        if x.dtype != torch.float32:
            return None, x
        return _Stored(x.dtype, tuple(x.shape), None, HALF), x.detach().to(torch.bfloat16)
    layout = layout_of(x.shape, x.stride(), keep.block_size)
    if layout is None:
        return None, x
    how = _Stored(x.dtype, tuple(x.shape), layout, keep.bits)
    key = key_of(x, "recompute", keep.bits, layout)
    packed = None if key is None else find(x, key)
    if packed is not None:
        return how, packed.tensors[0]
    values = quantize(as_read(x, layout), layout.block, keep.bits)
    if key is not None:
        remember(x, key, Packed((values,), layout.shape, False, layout.block, keep.bits))
    return how, values


def recomputed_class(cls: type[nn.Module]) -> type[Any]:
    """Return what a module of exactly this class becomes; the same one each time."""
    found = _classes.get(cls)
    if found is None:
        namespace = {
            "__module__": __name__,
            "__qualname__": _PREFIX + f"{cls.__module__}.{cls.__qualname__}".replace(".", _DOT),
            "__doc__": f"``{cls.__name__}`` that runs again in backward; made by ``convert``.",
            "dense_class": cls,
        }
        found = _classes[cls] = type(f"Recomputed{cls.__name__}", (RecomputedModule, cls), namespace)
    return found


_classes: dict[type[nn.Module], type[Any]] = {}


def __getattr__(name: str) -> Any:
    """Return the derived class of that name: of a module that is unpickled."""
    if name.startswith(_PREFIX):
        return recomputed_class(pkgutil.resolve_name(name.removeprefix(_PREFIX).replace(_DOT, ".")))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


MOST_COARSE = 6
"""Least blocks of a class that is chosen though its blocks consist of repeated modules themselves."""
LEAST_SHARE = 8
"""One in so many of all parameters has to be in the blocks of a class that is chosen beside others."""


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks of ``model``, of the largest classes that are repeated in a list.

    Counted are modules with children that stand in a ``ModuleList`` or ``Sequential`` with others of their class. Of
    the classes with six blocks or more, so not of the four stages of a hierarchical model, they are those with most
    parameters that are not inside each other, as encoder and decoder, if together they hold half of all parameters;
    otherwise the class with most blocks of those that do so alone. Tables of a vocabulary do not count, since they are
    most of a small language model: embeddings, and linear layers with as many outputs as the largest one.
    """
    found: dict[type[nn.Module], dict[str, nn.Module]] = {}
    for name, module in _repeated(model):
        found.setdefault(torch_class(type(module)), {}).setdefault(name, module)
    total = _values(model) - _values_of_tables(model)
    sizes = {cls: sum(map(_values, blocks.values())) for cls, blocks in found.items()}
    many = [cls for cls, blocks in found.items() if len(blocks) >= MOST_COARSE and LEAST_SHARE * sizes[cls] >= total]
    chosen: dict[str, nn.Module] = {}
    for cls in sorted(many, key=lambda cls: -sizes[cls]):
        if not _overlap(chosen.values(), found[cls].values()):
            chosen |= found[cls]
    if 2 * sum(map(_values, chosen.values())) < total or not total:
        large = [list(blocks) for cls, blocks in found.items() if 2 * sizes[cls] >= total > 0]
        return max(large, key=len, default=[])
    return [name for name, module in model.named_modules() if chosen.get(name) is module]


def _overlap(some: Iterable[nn.Module], others: Iterable[nn.Module]) -> bool:
    """Return whether any of ``some`` is inside one of ``others``, or around it."""
    some, others = set(some), set(others)
    return any(not others.isdisjoint(module.modules()) for module in some) or any(
        not some.isdisjoint(module.modules()) for module in others
    )


def _repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with children that stands in a list with others of its class, by its first name."""
    for prefix, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            times = Counter(torch_class(type(module)) for module in container)
            for key, module in container.named_children():
                if times[torch_class(type(module))] > 1 and next(module.children(), None) is not None:
                    yield f"{prefix}.{key}" if prefix else key, module


def _values_of_tables(model: nn.Module) -> int:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=0)
    heads = (m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary)
    tables = {embedding.weight for embedding in embeddings} | {head.weight for head in heads}
    return sum(table.numel() for table in tables)


def _values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
