r"""Modules that run again in backward, from inputs that are stored in few bits.

For a block ``y = f(x)``, a dense model saves everything that its operations need, and an activation checkpoint saves
only the input ``x`` and runs ``f`` again in backward. Here ``x`` is stored in few bits, as ``x^``. The first run reads
the exact ``x``, so outputs and loss are those of the dense model, bit for bit. The second run only restores the tensors
that the operations saved. The graph is that of the first run, and the gradient of ``x`` is ::

    dx = J(x^)^T dy        in place of        J(x)^T dy

with the Jacobian ``J`` of the block, taken at a point that is off by at most half a quantization step in each value. In
a residual block ``f(x) = x + h(x)`` the identity in ``J`` is exact, and ``h`` begins with a norm, which divides by the
standard deviation of its input. So the error of ``x^`` counts relative to the standard deviation of ``x``: it is 0.2 %
in eight bits, 4 % in four.

It is built on torch's non-reentrant checkpoint (``torch.utils.checkpoint``), which restores random generators and
autocast, and stops the second run when the last tensor is restored. The checkpoint's arguments are the stored tensors,
and the first run takes the exact ones from a list beside them. So hooks around the checkpoint see the stored tensors as
saved tensors: a meter counts them, ``save_on_cpu`` moves them.

A tensor among the arguments, inside any lists, tuples and mappings, is stored in few bits if it needs a gradient, is no
leaf, is fp32 or has 16 bits, has at least ``MIN_VALUES`` values without gaps or overlaps, and is no additive mask. The
module or anything after it may then write to it. All other tensors are stored exactly, and autograd raises an error if
one of them is written to before backward. A tensor that several blocks read, such as the output of an encoder, is
stored once.

``operators.second_run`` makes sure that the second run computes what the first one did, or raises an error that names
the module. To compare both, one run of each module stores an exact copy of its inputs.

The second run has to save as many tensors as the first, of the same shapes. Experts that ``topk`` or ``argmax`` chooses
are the same in both. If shapes depend otherwise on values that are computed from ``x``, as on which are above a
threshold, they may differ and raise such an error; use ``bits=None`` there.

A compiler sees torch's checkpoint around the dense module, with marked inputs, which the pass over its joint graph
packs (``compiled.recompute``). Without the pass they are stored exactly. There are two exceptions. A module that does
not fit into a graph, for example because it writes to attributes, runs outside of compiled code. A module that reads a
buffer that it writes to runs only once, because compilers get its second run wrong.
"""

from __future__ import annotations

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
from lightning_actprune.codec.host_copy import HostCopy, can_move, share_copy
from lightning_actprune.codec.pack_cache import find, key_of, remember
from lightning_actprune.codec.packed import Packed, quantize
from lightning_actprune.codec.private import (
    are_functorch_transforms_active,
    call_while_traced,
    is_tracing,
    top_saved_tensors_hooks,
    tree_map_only,
    unseen_by_compilers,
)
from lightning_actprune.compiled.marks import mark_input
from lightning_actprune.compiled.recompute import run_once_if_written
from lightning_actprune.config import HALF, Recompute
from lightning_actprune.operators.base import Converted, torch_class
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.regions import Layout, as_read, dropped_by_checkpoint, layout_of, unpack_region
from lightning_actprune.operators.second_run import FirstRun, RunHistory, SecondRunError

MIN_VALUES = 2**10
"""Tensors of fewer values are stored exactly."""


class RecomputeState(NamedTuple):
    """Settings of a module that runs again, and results of its earlier runs.

    Args:
        keep: The setting of the rule that applies.
        owner: Name of the conversion that the module belongs to.
        mark: Text of the marks by which the compiled pass finds the inputs, empty for no marks.
        name: Name of the module in the model.
        turn: Number of its runs before the one that is compared with its second run.
        histories: Histories of its runs, by training mode.
    """

    keep: Recompute
    owner: str
    mark: str
    name: str
    turn: int
    histories: dict[bool, RunHistory]


class RecomputedModule(Converted):
    """Mixin of the classes that ``convert`` gives to modules that run again in backward."""

    is_recomputed = True
    _recompute: RecomputeState

    @property
    def recompute(self) -> Recompute:
        """Setting for the inputs of the module."""
        return self._recompute.keep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the dense module, and store its inputs for a second run in backward."""
        if "_recompute" not in self.__dict__:  # the module was reverted, but something still holds this method
            return type(self).forward(self, *args, **kwargs)
        dense = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return dense(*args, **kwargs)
        if is_compiling():
            return run_in_graph(self, dense, args, kwargs)
        if are_functorch_transforms_active() or is_tracing():  # neither allows hooks on saved tensors
            return dense(*args, **kwargs)
        return run_eagerly(self, dense, args, kwargs)

    def extra_repr(self) -> str:
        """Show the text of the dense module, and how its inputs are stored."""
        shown: str = super().extra_repr()  # type: ignore[misc]
        return ", ".join(filter(None, (shown, f"recomputed from {describe_inputs(self.recompute)}")))


def describe_inputs(keep: Recompute) -> str:
    """Describe how inputs are stored, for printed modules and reports."""
    stored = "exact inputs" if keep.bits is None else f"inputs in {keep.bits} bits"
    return f"{stored} on the host" if keep.offload else stored


class _StoredFormat(NamedTuple):
    """Format in which a tensor among the arguments is stored.

    Args:
        dtype: The tensor's own type.
        layout: How the tensor is cut into quantized blocks, ``None`` if it is not quantized.
        shape: The shape of a quantized tensor.
        bits: Bits of a quantized value.
    """

    dtype: torch.dtype
    layout: Layout | None = None
    shape: tuple[int, ...] = ()
    bits: int = 0

    def read(self, values: Tensor) -> Tensor:
        """Return the tensor in its own type, shape and strides, in new memory."""
        if self.layout is None:
            return values.to(self.dtype, copy=True)  # the module may write to it
        dense = unpack_region(values, self.layout, self.bits, self.dtype)
        # A view of `dense` could not be written to, so this is a tensor on the same memory.
        memory = dense.untyped_storage(), dense.storage_offset()
        return dense.new_empty(0).set_(*memory, self.shape, self.layout.dense_strides)


class _ReadFunction(torch.autograd.Function):
    """Read a stored tensor for the second run as the result of an operation, so that the module may write to it.

    It could not write to a leaf that needs a gradient.
    """

    @staticmethod
    def forward(ctx: Any, needs_gradient: Tensor, values: Tensor, stored_format: _StoredFormat) -> Tensor:
        return stored_format.read(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("Backward passes through the graph of the first run, never through that of the second.")


def run_in_graph(
    module: RecomputedModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``forward`` for a compiler that traces it: in a checkpoint, on marked inputs."""
    mark = module._recompute.mark
    name = module._recompute.name  # noqa: F841  # for `run_once_if_written`
    if mark:
        args, kwargs = _map_arguments(Tensor, lambda x: mark_input(x, mark) if x.requires_grad else x, args, kwargs)
    run = partial(_run_outside_of_graphs, module, lambda: forward(*args, **kwargs), [])
    outputs = checkpoint(run, use_reentrant=False)
    call_while_traced(run_once_if_written)
    return outputs


@unseen_by_compilers
def _run_outside_of_graphs(module: RecomputedModule, forward: Callable[[], Any], first: list[FirstRun]) -> Any:
    """Call ``forward`` in torch's checkpoint; a compiler runs this without a graph if the module fits into none."""
    if is_compiling():
        return forward()
    if first:
        return first[0].run_again(forward)
    first.append(FirstRun(module, module._recompute.name, module._recompute.histories, turn=0))  # type: ignore[arg-type]
    with first[0].record():
        return forward()


def run_eagerly(
    module: RecomputedModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``forward`` now, and again in backward with the arguments that were stored for it."""
    keep, _, _, name, turn, histories = module._recompute
    if not any(x.requires_grad for x in tensors_in((args, kwargs))):
        trained = {parameter.requires_grad for parameter in module.parameters()}  # type: ignore[attr-defined]
        if trained == {False}:  # everything is frozen, and the dense module saves nothing
            return forward(*args, **kwargs)
    args, kwargs = _without_caches(name, args, kwargs)
    # Inside another checkpoint the first run happens twice, and has to store the same both times.
    is_inside = dropped_by_checkpoint(top_saved_tensors_hooks(False))
    turn_here = None if is_inside else 0 if keep.bits is None else turn
    first = FirstRun(module, name, histories, turn_here)  # type: ignore[arg-type]
    placeholders: dict[int, _Placeholder] = {}
    tensors: list[Tensor] = []
    on_host: dict[int, HostCopy] = {}
    formats: list[_StoredFormat | None] = []

    def store(leaf: Tensor) -> _Placeholder:
        if id(leaf) not in placeholders:
            placeholders[id(leaf)] = _Placeholder(len(tensors))
            stored_format, values = _store(leaf, keep, len(tensors), first)
            if keep.offload and not is_inside and stored_format is not None and can_move(values):
                on_host[len(tensors)] = share_copy(values)
                values = values.new_empty(0)
            tensors.append(values)
            formats.append(stored_format)
        return placeholders[id(leaf)]

    template = _map_arguments(Tensor, store, args, kwargs)
    exact = [(args, kwargs)]
    del args, kwargs

    def run(*values: Tensor) -> Any:
        if exact:
            own, by_name = exact.pop()
            with first.record():
                return forward(*own, **by_name)

        def rerun() -> Any:
            stored = [on_host[number].unpack() if number in on_host else x for number, x in enumerate(values)]
            read = [
                x if stored_format is None else _ReadFunction.apply(_NEEDS_GRADIENT, x, stored_format)
                for x, stored_format in zip(stored, formats, strict=True)
            ]
            del stored
            own, by_name = _map_arguments(_Placeholder, lambda placeholder: read[placeholder.index], *template)
            return forward(*own, **by_name)

        return first.run_again(rerun)

    return checkpoint(run, *tensors, use_reentrant=False)


def _without_caches(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments without caches of keys and values, as in transformers' own checkpoints."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    if any(cache.get_seq_length() > 0 for cache in caches):
        raise SecondRunError(
            f"Module {name!r} reads keys and values from a cache and adds its own to it, so it cannot run again in "
            "backward. HINT: let it run once, by a rule of `None` or a preset other than 'recompute'; prefix tuning "
            "needs that."
        )
    warnings.warn(
        "Modules that run again in backward cannot fill a cache of keys and values: it stays empty. HINT: set "
        "`use_cache=False` in the configuration of the model.",
        stacklevel=2,
    )
    others = {key: None if _is_cache(value) else value for key, value in kwargs.items()}
    return tuple(None if _is_cache(value) else value for value in args), others | (
        {"use_cache": False} if kwargs.get("use_cache") else {}
    )


def _is_cache(value: Any) -> bool:
    return any(cls.__module__ == "transformers.cache_utils" and cls.__name__ == "Cache" for cls in type(value).__mro__)


def _map_arguments(
    kind: type[Any], change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply ``change`` to all values of type ``kind`` in the arguments, at any depth."""

    def map_value(value: Any) -> Any:
        if isinstance(value, kind):
            return change(value)
        # torch's walk through nested arguments takes as long as a launch.
        return value if value is None or type(value) in _SIMPLE else tree_map_only(kind, change, value)

    return tuple(map(map_value, args)), {name: map_value(value) for name, value in kwargs.items()}


_SIMPLE = {bool, int, float, str}


class _Placeholder:
    """Replaces a tensor among the arguments: the one stored at ``index``."""

    def __init__(self, index: int) -> None:
        self.index = index


_NEEDS_GRADIENT = torch.zeros((), requires_grad=True)
"""Makes the results of ``_ReadFunction`` need a gradient."""


def _store(x: Tensor, keep: Recompute, number: int, first: FirstRun) -> tuple[_StoredFormat | None, Tensor]:
    """Return the format in which argument ``number`` is stored, ``None`` if exactly, and the stored tensor."""
    is_supported = type(x) is Tensor and x.dtype in KERNEL_DTYPES and x.layout == torch.strided and x.requires_grad
    if not is_supported or x.is_leaf or x.numel() < MIN_VALUES or not in_plain_eager_mode(x):
        return None, x
    if (keep.bits is None and not keep.offload) or first.is_mask(number, x):
        return None, x
    has_16_bits = keep.bits == HALF and x.dtype != torch.float32
    if first.is_compared or keep.bits is None or (has_16_bits and keep.offload):
        # A copy, since the module may write to `x` while that goes to the host.
        return _StoredFormat(x.dtype), x.detach().clone()
    if has_16_bits:
        return None, x
    if keep.bits == HALF:
        return _StoredFormat(x.dtype), x.detach().to(torch.bfloat16)
    layout = layout_of(x.shape, x.stride(), keep.block_size)
    if layout is None:
        return None, x
    stored_format = _StoredFormat(x.dtype, layout, tuple(x.shape), keep.bits)
    key = key_of(x, "recompute", keep.bits, layout)
    packed = None if key is None else find(x, key)
    if packed is not None:
        return stored_format, packed.tensors[0]
    values = quantize(as_read(x, layout), layout.block, keep.bits)
    if key is not None:
        remember(x, key, Packed((values,), layout.shape, False, layout.block, keep.bits))
    return stored_format, values


# === Blocks of a model ====================================================================================

MIN_BLOCKS, MIN_SHARE = 6, 1 / 8
"""Fewest blocks of a class, and least share of all parameters in them, to be chosen together with other classes."""


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks of ``model``: the modules of its largest repeated classes.

    Candidates are modules with children in a ``ModuleList`` or ``Sequential`` that has several modules of their class.
    Classes with ``MIN_BLOCKS`` blocks and ``MIN_SHARE`` of all parameters are chosen together, largest first, if they
    are not inside each other, as in an encoder and a decoder, and together have half of all parameters. (The four
    stages of a hierarchical model are too few.) Otherwise it is the class with most blocks of those that have half
    alone, if any.

    Embeddings, and linear layers with as many outputs as the largest embedding has rows, do not count as parameters:
    such tables of a vocabulary are most of a small language model.
    """
    blocks_of: dict[type[nn.Module], dict[str, nn.Module]] = {}
    for name, module in _find_repeated(model):
        blocks_of.setdefault(torch_class(type(module)), {}).setdefault(name, module)
    total = _count_values(model) - _count_table_values(model)
    sizes = {cls: sum(map(_count_values, blocks.values())) for cls, blocks in blocks_of.items()}
    classes = [cls for cls in blocks_of if len(blocks_of[cls]) >= MIN_BLOCKS and sizes[cls] >= MIN_SHARE * total]
    chosen: dict[str, nn.Module] = {}
    for cls in sorted(classes, key=lambda cls: -sizes[cls]):
        if not _overlap(chosen.values(), blocks_of[cls].values()):
            chosen |= blocks_of[cls]
    if 2 * sum(map(_count_values, chosen.values())) < total or not total:
        large = [list(blocks) for cls, blocks in blocks_of.items() if 2 * sizes[cls] >= total > 0]
        return max(large, key=len, default=[])
    return [name for name, module in model.named_modules() if chosen.get(name) is module]


def _overlap(some: Iterable[nn.Module], others: Iterable[nn.Module]) -> bool:
    """Return True if a module of ``some`` is inside one of ``others``, or around it."""
    some, others = set(some), set(others)
    return any(not others.isdisjoint(module.modules()) for module in some) or any(
        not some.isdisjoint(module.modules()) for module in others
    )


def _find_repeated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with children that is in a list with others of its class, and its first name."""
    for prefix, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            times = Counter(torch_class(type(module)) for module in container)
            for key, module in container.named_children():
                if times[torch_class(type(module))] > 1 and next(module.children(), None) is not None:
                    yield f"{prefix}.{key}" if prefix else key, module


def _count_table_values(model: nn.Module) -> int:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = max((embedding.num_embeddings for embedding in embeddings), default=0)
    heads = (m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == vocabulary)
    tables = {embedding.weight for embedding in embeddings} | {head.weight for head in heads}
    return sum(table.numel() for table in tables)


def _count_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
