"""What autograd saves while a module runs, and no layer is known for: ``x * gamma``, ``torch.addcmul``, attention.

While a module in scope runs, a pair of saved-tensor hooks packs each tensor that qualifies in one launch
(``codec.formats``, all blocks), and unpacks it for the moment when backward asks for it. Forward stays as it is. A
gradient is computed from values that are off by up to half a step of their block, without bias where it is linear in
them. It is not where backward compares what was saved with a result (``amax``) or near poles (``log``): there it is an
error that names the module. Divisions by small numbers are not found out: keep such modules dense with a rule. Fused
attention computes exponentials of its logits again, with the exact sums, so that errors grow with the logits: for
models with attention, take eight bits.

Packed are activations that an operation gets as an input and that need a gradient. Left as they are:

- small tensors, other types than fp32 and 16 bits, tensor subclasses, expanded tensors, those with one value a row;
- what needs no gradient, and *results* that an operation saves of itself (softmax, exp, norms, statistics), but for
  that of fused attention, of which backward needs the product with the gradient. A result's node is the newest one of
  its thread, that of an input is older: the operation's own node is made before it saves anything, so the numbers that
  autograd gives to nodes tell them apart;
- leaves, views of leaves, copies of leaves in another type (autocast), and whatever has the shape of a parameter, up to
  transposition, such as a weight with a norm or a mask: gradients of inputs stay exact;
- what a compiled region saves, which may compute anything again from it, and what a reentrant checkpoint keeps, or any
  checkpoint runs again in backward. Inside a checkpoint's own hooks no scope opens.

A tensor is packed once for all who save it or a view of the same memory, as long as that is not written to. If
something retains its storage as it is already (a ReLU saves its result before the next layer saves it as its input),
packing would add memory, so it stays. Who comes later cannot undo a pack: those bytes are counted.

**One operation at a time.** Hooks are told of one tensor at a time. Of ``x * gamma``, which saves both factors, ``x``
is needed for the gradient of ``gamma`` alone: its errors enter no other gradient, and those of many rows cancel, as in
a linear layer. So it may have fewer bits than what the input gradient is computed from. Which of the two comes first
depends on the operation, and a norm saves a weight and its input too, but also statistics. Hence a tensor waits, as it
is, until the next operation saves something, one of this package's functions is called or the module ends; then the
operation saved *two tensors, of which one is a parameter of fewer values* or it did not. Those that do are products,
quotients and convolutions, and the rare ``maximum``, ``hypot`` or ``atan2`` with a parameter; not so ``nn.PReLU``, of
whose input the input gradient needs the sign. A loss of the distance from a parameter has as many values of each. Of
fused attention, query, key and value are stored, which it saves first, not a learned bias: where that is to mask, it is
minus infinity, or as good as that. What is written to while it waits is an error in backward, as without hooks.

**Any layout.** Dimensions are sorted by stride and those that follow each other in memory joined, so that views of one
region of memory, transposed or not, are read in one and the same order, that of their addresses. A tensor
``[B, H, N, d]`` that is cut out of a joint projection ``[B, N, 3, H, d]`` is ``B N`` rows of ``H d`` values so, and
read where it lies. The kernels take ``[S, T, L]`` with values side by side in the last dimension, and blocks are cut
from ``L``. A run of values that is a multiple of the block is read as rows of one block each: no block is cut short,
and one compiled kernel does for all shapes. What has more than three dimensions even so, or no values side by side, is
copied first. Unpacked values lie in the same order without gaps. For a tensor without gaps these are its own strides.

**Versions.** Autograd checks the version of what it saves itself, not of what hooks keep. ``Unchanged`` does so in its
place: a tensor that is written to before backward is an error, as without hooks. ``QuantizedRegion`` has its values
from when it was saved, so they are right whatever happens to the tensor.

Hooks that are open around a scope get the packed values, and everything that is left alone, in place of the graph: a
``SavedTensorMeter`` counts what is kept, ``save_on_cpu`` moves it. ``torch.func`` transforms inside a scope fail, as
they do with all hooks.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.codec.autograd import open_hooks
from lightning_actprune.codec.blocks import ALL_BLOCKS, ceil_div
from lightning_actprune.codec.dispatch import KERNEL_DTYPES, MAX_COLUMNS, in_plain_eager_mode
from lightning_actprune.codec.packed import MAX_KEPT_BLOCKS, pack, unpack
from lightning_actprune.codec.sharing import place_of
from lightning_actprune.config import MIN_QUANTIZED_BLOCK, Keep, check_bits, check_count, check_model
from lightning_actprune.operators.registry import plain_name

_autograd: Any = torch._C._autograd
Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of pack and unpack hook."""


class ForwardHook:
    """A forward hook that does nothing in a copied or pickled module.

    Args:
        method: What it calls; ``None`` in a copy.
    """

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        """Pass the call on."""
        # One that a compiled graph has taken in must do nothing either.
        if self._method is not None and not torch.compiler.is_compiling():
            self._method(*args)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()

    @property
    def idle(self) -> bool:
        """Whether it does nothing."""
        return self._method is None


def drop_idle_hooks(module: nn.Module) -> None:
    """Take the hooks off a copied module that do nothing there."""
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = getattr(module, kind)
        for key in [key for key, hook in hooks.items() if isinstance(hook, ForwardHook) and hook.idle]:
            for options in (hooks, getattr(module, f"{kind}_with_kwargs"), module._forward_hooks_always_called):
                options.pop(key, None)


def eager_modules(module: nn.Module) -> set[nn.Module]:
    """Return the modules whose calls Python sees: not those inside a compiled one."""
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return set()
    return {module}.union(*(eager_modules(child) for child in module.children()))


def backward_runs() -> bool:
    """Return whether this thread is in a backward pass: a forward in there is run again for it, and kept no longer."""
    return torch._C._current_graph_task_id() != -1


def dropped_by_checkpoint(hooks: tuple[Callable[..., Any], Callable[..., Any]] | None) -> bool:
    """Return whether ``hooks`` are the saved-tensor hooks with which torch's checkpoint drops what is saved."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


_PACKAGE = __name__.partition(".")[0] + "."
_RUNNING_AGAIN = "torch.utils.checkpoint", "torch._functorch."
_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Cat", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze"),
        "View",
    )
)
MAX_STEPS = 8
"""Views, casts and the like of a parameter that are followed back, of several tensors the first."""
_SENSITIVE = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        *(("Amax", 0), ("Amin", 0), ("Aminmax", 0), ("Max", 1), ("Min", 1), ("Median", 0), ("Nanmedian", 0)),
        *(("ScatterReduce", 0), ("SegmentReduce", 0), ("Logsumexp", 0), ("BinaryCrossEntropy", 0), ("Acos", 0)),
        *(("Acosh", 0), ("Asin", 0), ("Atanh", 0), ("Log", 0), ("Log10", 0), ("Log1P", 0), ("Log2", 0), ("Logit", 0)),
        *(("Pow", 1), ("Xlogy", 0), ("Xlogy", 1), ("SpecialXlog1Py", 0), ("SpecialXlog1Py", 1), ("SpecialEntr", 0)),
        *(("Lgamma", 0), ("Mvlgamma", 0), ("Digamma", 0), ("Polygamma", 0), ("SpecialZeta", 0), ("Erfinv", 0)),
        *(("Prod", 0), ("Prod", 1), ("Cumprod", 0), ("Logcumsumexp", 0), ("Atan2", 0)),
        *(("Cdist", 0), ("EuclideanDist", 0), ("Pdist", 0), ("Dist", 0)),
    )
)
"""Nodes that compare what they saved with their result, or divide by what may be next to nothing. A power with a tensor
for its exponent is one: it takes the logarithm of its base."""


_ATTENTION = tuple(
    f"ScaledDotProduct{kind}Backward0"
    for kind in (
        "CudnnAttention",
        "EfficientAttention",
        "FlashAttention",
        "FlashAttentionForCpu",
        "FusedAttentionOverrideable",
    )
)
"""Nodes of fused attention: of its result, backward needs the product with the gradient alone."""


def is_weight(tensor: Tensor, shapes: Container[tuple[int, ...]]) -> bool:
    """Return whether ``tensor`` is a leaf, a view of one, views and casts of a parameter, or has one of ``shapes``.

    Args:
        tensor: A saved tensor; one that needs no gradient is no weight.
        shapes: Sorted shapes of parameters: what is computed from one, such as a weight with a mask, has its shape, or
            is a view of what has.
    """
    if not tensor.requires_grad:
        return False
    base = tensor._base
    # What an autograd function returns may be a view of what it made, which is a leaf without a gradient.
    if tensor.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        return True
    # A linear layer saves its input flattened: rows may be as many as outputs, but what it is a view of has more
    # dimensions, while a weight that was flattened is a view of one with the parameter's shape.
    shaped = tensor if base is None or base.numel() != tensor.numel() else base
    return tuple(sorted(shaped.shape)) in shapes or _copies_parameter(tensor)


def is_own_result(tensor: Tensor) -> bool:
    """Return whether the operation that is saving ``tensor``, which has a history, has computed it.

    Its node was made before anything is saved, with the highest number so far; those of its inputs have lower ones. Of
    operations that make several nodes before they save (``torch._foreach_exp``), only the last result is known.
    """
    node = tensor.grad_fn
    assert node is not None
    number = node._sequence_nr()  # first: of a view whose base was written to, this makes the node
    return bool(number == _autograd._get_sequence_nr() - 1)


def is_attention_result(tensor: Tensor) -> bool:
    """Return whether fused attention has computed ``tensor``."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn.name() in _ATTENTION


def runs_again() -> bool:
    """Return whether what is being saved is kept to compute something again.

    A reentrant checkpoint keeps its input so, and a compiled region whatever its compiler chose.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch.autograd.function" and not name.startswith(_PACKAGE):
            return bool(name.startswith(_RUNNING_AGAIN))
        frame = frame.f_back
    return False


def sensitive_reader() -> str | None:
    """Return the name of the node that backward runs if it may enlarge errors of what it saved without bound."""
    node: Any = torch._C._current_autograd_node()
    name: str = "" if node is None else node.name()
    if name == "PowBackward0":
        exponent = node._saved_exponent
        return None if exponent >= 1 and exponent == int(exponent) else name
    if name == "LinalgVectorNormBackward0":
        return name if math.isinf(node._saved_ord) or node._saved_ord < 1 else None
    return name if name in _SENSITIVE else None


def _copies_parameter(tensor: Tensor) -> bool:
    """Return whether views and casts alone lie between a parameter and ``tensor``."""
    node = tensor.grad_fn
    for _ in range(MAX_STEPS):
        if node is None or node.name() not in _VIEWS_AND_CASTS:
            break
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


Dims = tuple[tuple[int, int], ...]
"""Sizes and strides, the largest stride first."""
MIN_ROW_BLOCKS = 16
"""Least blocks in a row that is no multiple of them: its short last block takes up to a sixteenth more."""


class Layout(NamedTuple):
    """How a tensor is read and written.

    Args:
        region: Its joined dimensions: equal for views of one region of memory.
        copied: Whether the region is copied before it is read.
        shape: ``(S, T, L)`` as read.
        strides: Strides of these in the region or in its copy.
        block: Values per block, cut to a row.
        dense_strides: Strides of the tensor when it is unpacked.
    """

    region: Dims
    copied: bool
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block: int
    dense_strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], block_size: int) -> Layout | None:
    """Return how a tensor is read, ``None`` if it is empty or expanded, overlaps itself or has no sensible rows."""
    sizes = sorted((strides[dim], size, dim) for dim, size in enumerate(shape) if size != 1)
    reach, dense, dense_strides, joined = 1, 1, list(strides), list[tuple[int, int]]()
    for stride, size, dim in sizes:
        if size == 0 or stride < reach:
            return None
        if joined and stride == reach:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, stride))
        dense_strides[dim] = dense
        reach, dense = stride * size, dense * size
    region = tuple(reversed(joined)) or ((1, 1),)
    read, copied = _rows(region, block_size), False
    if read is None:
        read, copied = _rows(((dense, 1),), block_size), True
    if read is None:
        return None
    (samples, of_sample), (rows, of_row), (length, _) = read
    block = min(block_size, length)
    if samples * rows * ceil_div(length, block) > MAX_KEPT_BLOCKS:
        return None
    view = (samples, rows, length), (of_sample, of_row, 1)
    return Layout(region, copied, *view, block, tuple(dense_strides))


def _rows(region: Dims, block_size: int) -> Dims | None:
    """Return ``region`` as three dimensions, the last one of values side by side, ``None`` if it is not that simple."""
    *outer, (run, stride) = region
    if stride != 1 or run < MIN_QUANTIZED_BLOCK:
        return None
    for length in _lengths(run, block_size):
        rows = [] if length == run else [(run // length, length)]
        if len(outer) + len(rows) <= 2:
            filled = *outer, *rows
            missing = 2 - len(filled)
            return (*([(1, math.prod(size for size, _ in region))] * missing), *filled, (length, 1))
    return None


def _lengths(run: int, block_size: int) -> list[int]:
    """Return the lengths of rows that ``run`` values side by side may be cut to, the best first."""
    longest = block_size * MAX_COLUMNS
    if run % block_size == 0:
        return [block_size, run] if run <= longest else [block_size]
    if run < block_size:
        return [run]
    fewest, most = ceil_div(run, longest), run // (block_size * MIN_ROW_BLOCKS)
    return next(([run // rows] for rows in range(fewest, most + 1) if run % rows == 0), [])


class Retainers:
    """Who retains which storage: asked before something is packed in its place, and when it is judged what that saved.

    A storage is known by its address, which a weak reference to it keeps from being used again. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, dict[Any, weakref.ref[Any] | None]]] = {}

    def __contains__(self, address: int) -> bool:
        return address in self._storages

    def add(self, storage: StorageWeakRef, name: Any, retainer: Any = None) -> None:
        """Note that ``retainer`` retains ``storage`` for as long as it lives, or somebody by that name for good."""
        address: int = storage.cdata
        known = self._storages.setdefault(address, (storage, {}))[1]
        known[name] = None if retainer is None else weakref.ref(retainer, partial(self._forget, address, name))

    def find(self, address: int, name: Any) -> Any:
        """Return who retains the storage by that name, ``None`` if nobody."""
        known = self._storages.get(address)
        reference = None if known is None else known[1].get(name)
        return None if reference is None else reference()

    def all_of(self, address: int) -> list[Any]:
        """Return all who retain the storage and are still alive."""
        known = self._storages.get(address)
        references = () if known is None else tuple(known[1].values())
        found = (None if reference is None else reference() for reference in references)
        return [retainer for retainer in found if retainer is not None]

    def first_name(self, address: int) -> Any:
        """Return the name of who came first of those that retain the storage."""
        return next(iter(self._storages[address][1]))

    def copy(self) -> Retainers:
        """Return the same for trying what would be, for those that are here for good."""
        made = Retainers()
        made._storages = {address: (storage, dict(names)) for address, (storage, names) in self._storages.items()}
        return made

    def _forget(self, address: int, name: Any, reference: weakref.ref[Any]) -> None:
        """Remove the entry of what is gone, unless something else has taken its place."""
        known = self._storages.get(address)
        if known is not None and known[1].get(name) is reference:
            del known[1][name]
            if not known[1]:
                del self._storages[address]


class Unchanged:
    """A tensor as it is, or what hooks around ours made of it.

    Args:
        tensor: A saved tensor.
        outer: The hooks around ours, ``None`` without any.
        version: Of the tensor when it was saved, by default now.
    """

    __slots__ = ("__weakref__", "_unpack", "_value", "_version")

    def __init__(self, tensor: Tensor, outer: Hooks | None, version: int | None = None) -> None:
        self._value: Any
        self._unpack: Callable[[Any], Tensor] | None = None
        if outer is not None:
            self._value, self._unpack = outer[0](tensor), outer[1]
            return
        # A result holds its node, which holds this: without its own history there is no cycle.
        self._value = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version if version is None else version

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was written to since it was saved.
        """
        if self._unpack is not None:
            restored: Tensor = self._unpack(self._value)
            return restored
        value: Tensor = self._value
        if value._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{value.type()} {list(value.shape)}] is at version {value._version}; expected version "
                f"{self._version} instead. HINT: torch.autograd.set_detect_anomaly(True) shows the operation whose "
                "gradient failed."
            )
        return value


class QuantizedRegion:
    """A region of memory, quantized, or what hooks around ours made of these.

    Args:
        region: Tensor over the region, which is not kept.
        layout: How it is read.
        bits: Bits of a stored value.
        outer: The hooks around ours, ``None`` without any.
    """

    __slots__ = ("__weakref__", "_bits", "_dtype", "_none", "_rows", "_values", "nbytes", "outer")

    def __init__(self, region: Tensor, layout: Layout, bits: int, outer: Hooks | None) -> None:
        samples, rows, length = layout.shape
        if layout.copied:
            sizes, strides = zip(*layout.region, strict=True)
            x = region.detach().as_strided(sizes, strides).contiguous().view(layout.shape)
        else:
            x = region.detach().as_strided(layout.shape, layout.strides)
        values, self._none, _ = pack(x, layout.block, ALL_BLOCKS, bits)
        self._rows = samples * rows, length, layout.block
        self._dtype, self._bits = x.dtype, bits
        self.nbytes, self.outer = values.nbytes, outer
        self._values: Any = values if outer is None else outer[0](values)

    def goes_to(self, outer: Hooks | None) -> bool:
        """Return whether hooks that ``outer`` is now got the values."""
        return self.outer is outer or (self.outer is not None and outer is not None and self.outer[0] is outer[0])

    def unpack(self) -> Tensor:
        """Return the values in the order of their addresses."""
        rows, length, block = self._rows
        values = self._values if self.outer is None else self.outer[1](self._values)
        made = unpack if in_plain_eager_mode(values) else torch.ops.actprune.unpack
        dense: Tensor = made(values, self._none, self._none, rows, length, block, self._bits, self._dtype)
        return dense


class QuantizedView:
    """A saved tensor of which the values are quantized.

    Args:
        shape: Of the tensor.
        strides: Of the tensor when it is unpacked.
        fqn: Name of the module that ran when it was saved.
    """

    __slots__ = ("_shape", "_strides", "fqn", "settle", "stored")

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], fqn: str) -> None:
        self._shape, self._strides, self.fqn = shape, strides, fqn
        self.settle: Callable[[], None] | None = None
        """Stores its region, if that is put off."""
        self.stored: QuantizedRegion | Unchanged | None = None
        """Its region of memory, which others may share; as it is if it was written to too soon."""

    def tensor(self) -> Tensor:
        """Return the tensor, unpacked anew.

        Raises:
            RuntimeError: If errors of its values would be enlarged without bound.
        """
        reader = sensitive_reader()
        if reader is not None:
            raise RuntimeError(
                f"{reader} compares what it saved with its result, or has a pole, so its gradient would be wrong: "
                f"module {self.fqn!r} saved that in few bits. HINT: leave this module alone with a rule "
                f"(`rules={{{self.fqn!r}: None}}`), or all that no layer is known for (`rules={{'type:saved': None}}`)."
            )
        if self.settle is not None:
            self.settle()
        assert self.stored is not None
        if isinstance(self.stored, Unchanged):
            return self.stored.tensor()
        return self.stored.unpack().as_strided(self._shape, self._strides)


@dataclass
class CompressedRow:
    """Tensors of one shape that a module saved, and that were packed.

    Args:
        fqn: Fully qualified name of the innermost module with hooks that ran: where it has children, for these too.
        shape: Shape of the tensors.
        dtype: Type of their values.
        count: How many were packed; who saved what was packed already is not counted.
        dense_bytes: Bytes of their values as they are.
        stored_bytes: Bytes stored in their place.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int = 0
    dense_bytes: int = 0
    stored_bytes: int = 0


Store: TypeAlias = Callable[[Tensor, Layout, int, "Hooks | None", str], QuantizedRegion]
"""Returns a tensor quantized to so many bits, for hooks around and the name of the module that ran."""


class SavedOperation:
    """The operation that is saving its tensors.

    Args:
        store: Stores a tensor.
        bits: Bits of a value that an input gradient may need.
        parameter_bits: Bits of what a parameter's gradient needs alone.
    """

    __slots__ = ("_bits", "_count", "_number", "_parameters", "_store", "_values", "_waiting", "is_attention")

    def __init__(self, store: Store, bits: int, parameter_bits: int) -> None:
        self._store, self._bits = store, (bits, parameter_bits)
        self._waiting: list[tuple[QuantizedView, Tensor, Layout, int, int, Hooks | None]] = []
        self._number, self._count, self._parameters, self._values, self.is_attention = -1, 0, 0, 0, False

    def saves(self, tensor: Tensor) -> None:
        """Take note that the operation, or the next one, saves ``tensor``."""
        number: int = _autograd._get_sequence_nr()
        if number != self._number:
            if self._waiting:
                self.settle()
            self._number, self._count, self._parameters, self._values, self.is_attention = number, 0, 0, 0, False
        self._count += 1
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            self._parameters += 1
            self._values = tensor.numel()

    def put_off(self, view: QuantizedView, tensor: Tensor, layout: Layout, outer: Hooks | None) -> None:
        """Let ``view`` have its values when the operation is settled."""
        view.settle = self.settle
        self._waiting.append((view, tensor, layout, tensor._version, _stream(tensor), outer))

    def settle(self) -> None:
        """Store what waits."""
        waiting, self._waiting = self._waiting, []
        alone = self._count == 2 and self._parameters == 1
        for place, (view, tensor, layout, version, stream, outer) in enumerate(waiting):
            view.settle = None
            if tensor._version != version:
                view.stored = Unchanged(tensor, None, version)
                continue
            if self.is_attention and place >= 3:
                view.stored = Unchanged(tensor, outer)
                continue
            with _on_stream(tensor, stream):
                bits = self._bits[alone and tensor.numel() > self._values]
                view.stored = self._store(tensor, layout, bits, outer, view.fqn)


class OpenHooks:
    """The hooks that are open in a thread.

    Args:
        pair: Pack and unpack hook.
        operation: What is saving its tensors.
        outer: The hooks around, ``None`` without any: then this package's functions are not seen.
    """

    def __init__(self, pair: Hooks, operation: SavedOperation, outer: Hooks | None) -> None:
        self.pair, self.settle, self.alone = pair, operation.settle, outer is None
        self._context = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._context.__enter__()
        self._before = open_hooks(self)

    def close(self) -> None:
        """Store what waits, and take the hooks off the stack."""
        open_hooks(self._before)
        self._context.__exit__(None, None, None)
        self.settle()


def _stream(tensor: Tensor) -> int:
    """Return the number of the current stream, 0 without a GPU."""
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


def _on_stream(tensor: Tensor, stream: int) -> AbstractContextManager[Any]:
    """Return a context in which ``stream``, on which ``tensor`` was saved, is the current one."""
    if _stream(tensor) == stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, tensor.device))  # type: ignore[no-untyped-call]


class _Scope(threading.local):
    """The modules in scope that run in a thread, and the hooks open for them, if any."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.hooks: OpenHooks | None = None


def _nowhere(fqn: str) -> bool:
    return False


class SavedTensorCompression:
    """Quantize what autograd saves while a module runs, if nothing better is known about it (see the module).

    It attaches plain forward hooks, which are gone after ``detach``; what is saved by then stays packed. Copies and
    pickles of the modules have hooks that do nothing. As a context manager it is attached inside.

    Args:
        module: In scope is whatever runs in it, in its children, or in modules further down that have children, whoever
            calls these; hooks on all others too would cost the host several times as much. Compiled modules are not.
        keep: How tensors are kept, of which ``bits`` and ``block_size`` count; by default in eight bits.
        min_values: Tensors of fewer values are left alone. Packing and unpacking one costs the host the same
            whatever its size, for which 2^16 values in 16 bits give back 64 KiB at most.
        dense: Says of a module's fully qualified name whether what is saved while it runs is left alone.
        parameter_bits: Bits of what only the gradient of a parameter needs, by default those of ``keep``.
        loss_inside: Whether ``module`` computes its loss itself, as a LightningModule does: then its own forward, which
            a strategy may route the whole step through, is no scope, but what it calls is.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is not allowed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        >>> with SavedTensorCompression(model, min_values=512) as compression:
        ...     loss = model(torch.randn(16, 64)).sum()
        >>> [(row.fqn, row.dense_bytes, row.stored_bytes) for row in compression.rows]
        [('1', 4096, 1088), ('2', 4096, 1088)]
    """

    def __init__(
        self,
        module: nn.Module,
        keep: Keep | None = None,
        *,
        min_values: int = 2**16,
        dense: Callable[[str], bool] = _nowhere,
        parameter_bits: int | None = None,
        loss_inside: bool = False,
    ) -> None:
        self._module = check_model(module, "module")
        keep = Keep(bits=8) if keep is None else keep
        if not isinstance(keep, Keep):
            raise TypeError(f"`keep` must be a Keep, got {keep!r}. HINT: such as Keep(bits=8).")
        if keep.bits is None:
            raise ValueError("`keep` must have `bits`: nothing else is done to what is saved. HINT: Keep(bits=8).")
        self._block_size, self._bits = keep.block_size, keep.bits
        self._parameter_bits = check_bits(parameter_bits, "parameter_bits") or keep.bits
        self._min_values = check_count(min_values, "min_values", "the least values of a tensor that is packed.", 1)
        self._loss_inside = loss_inside
        self._names = {m: plain_name(fqn) for fqn, m in module.named_modules()}
        self._left_alone = {m for m, fqn in self._names.items() if dense(fqn)}
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._handles: list[RemovableHandle] = []
        self._scope = _Scope()
        self._packed = Retainers()
        self._unchanged = Retainers()
        self.reset()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *exc_info: Any) -> None:
        self.detach()

    @property
    def rows(self) -> list[CompressedRow]:
        """What was packed since the last ``reset``, in the order in which modules ran."""
        return list(self._rows.values())

    def reset(self) -> None:
        """Forget what was counted."""
        self._rows: dict[Any, CompressedRow] = {}
        self.retained_twice_bytes = 0
        """Bytes stored of tensors whose storage something else saved as it is later on: they were added, not saved."""

    def attach(self) -> Self:
        """Let what the modules' next forwards save be quantized. Does nothing if attached."""
        if not self._handles:
            weights = (p for p in self._module.parameters() if not is_lazy(p) and p.dim() > 1)
            self._weight_shapes = {tuple(sorted(p.shape)) for p in weights}
            called = {self._module, *self._module.children()} | {m for m in self._module.modules() if any(m.children())}
            called |= self._left_alone | {m for m in self._module.modules() if type(m) is nn.PReLU}
            called -= {self._module} if self._loss_inside else set()
            for module in called & eager_modules(self._module):
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    self._handles.append(module.register_forward_pre_hook(ForwardHook(self._enter)))
                    # Always: a forward may raise and its caller go on without it.
                    leave = ForwardHook(self._leave)
                    self._handles.append(module.register_forward_hook(leave, always_call=True))
        return self

    def detach(self) -> None:
        """Remove every hook. Does nothing if not attached."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close()  # what a forward that was interrupted has left open

    def _enter(self, module: nn.Module, args: Any) -> None:
        scope = self._scope
        if scope.running and scope.running[0] is module and scope.hooks is not None:
            # A call of the same module inside itself is rare. More likely the last one was interrupted (Ctrl-C), after
            # which torch calls no hook.
            self._close()
        if not scope.running:
            scope.hooks = self._open()
        scope.running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._scope.running
        if running and running[-1] is module:
            running.pop()
            if not running:
                self._close()

    def _open(self) -> OpenHooks | None:
        if not (_autograd._saved_tensors_hooks_is_enabled() and torch.is_grad_enabled()) or backward_runs():
            return None
        outer = _autograd._top_saved_tensors_default_hooks(False)
        if dropped_by_checkpoint(outer):
            return None
        operation = SavedOperation(self._quantized, self._bits, self._parameter_bits)
        return OpenHooks((partial(self._pack, outer, operation), _unpack), operation, outer)

    def _close(self) -> None:
        scope = self._scope
        scope.running.clear()
        hooks, scope.hooks = scope.hooks, None
        if hooks is not None:
            hooks.close()

    def _pack(self, outer: Hooks | None, operation: SavedOperation, tensor: Tensor) -> Unchanged | QuantizedView:
        # This runs for everything that is saved: what most of it is spared by comes first.
        operation.saves(tensor)
        if type(tensor) is not Tensor or tensor.numel() < self._min_values or tensor.dtype not in KERNEL_DTYPES:
            return Unchanged(tensor, outer)
        if is_weight(tensor, self._weight_shapes) or not in_plain_eager_mode(tensor) or backward_runs():
            return Unchanged(tensor, outer)
        if tensor.layout != torch.strided or tensor.is_nested or not self._left_alone.isdisjoint(self._scope.running):
            return Unchanged(tensor, outer)
        layout = self._layout(tensor)
        if layout is None or tensor.untyped_storage()._cdata in self._unchanged:
            return self._retain(tensor, outer)
        view, running = QuantizedView(tensor.shape, layout.dense_strides, self._running_name()), self._scope.running
        if is_own_result(tensor):
            if not is_attention_result(tensor):
                return self._retain(tensor, outer)
            operation.is_attention = True
        elif not (running and type(running[-1]) is nn.PReLU):
            operation.put_off(view, tensor, layout, outer)
            return view
        view.stored = self._quantized(tensor, layout, self._bits, outer, view.fqn)
        return view

    def _layout(self, tensor: Tensor) -> Layout | None:
        """Return how to read an activation, ``None`` of anything else."""
        if not tensor.requires_grad or tensor.shape[-1:] == (1,) or runs_again():
            return None
        return layout_of(tensor.shape, tensor.stride(), self._block_size)

    def _retain(self, tensor: Tensor, outer: Hooks | None) -> Unchanged:
        """Keep the tensor as it is, and know its storage as retained for as long as that is kept."""
        kept, storage = Unchanged(tensor, outer), tensor.untyped_storage()
        address = storage._cdata
        if address not in self._unchanged:
            self._unchanged.add(StorageWeakRef(storage), None, kept)  # type: ignore[no-untyped-call]
            self.retained_twice_bytes += sum(packed.nbytes for packed in self._packed.all_of(address))
        return kept

    def _quantized(self, tensor: Tensor, layout: Layout, bits: int, outer: Hooks | None, fqn: str) -> QuantizedRegion:
        """Return the region of ``tensor`` in so many bits, as somebody has packed it already or packed now."""
        stream, recording = place_of(tensor)
        region = tensor.storage_offset(), layout.region, tensor.dtype, tensor._version, stream, recording
        storage = tensor.untyped_storage()
        for as_good in (bits, self._bits) if storage._cdata in self._packed else ():
            known: QuantizedRegion | None = self._packed.find(storage._cdata, (*region, as_good))
            if known is not None and known.goes_to(outer):
                return known
        packed = QuantizedRegion(tensor, layout, bits, outer)
        self._packed.add(StorageWeakRef(storage), (*region, bits), packed)  # type: ignore[no-untyped-call]
        self._count(fqn, tensor, packed.nbytes)
        return packed

    def _running_name(self) -> str:
        running = self._scope.running
        module = running[-1] if running else self._module
        return self._names.get(module, type(module).__name__)  # a replica of DataParallel's has no name of its own

    def _count(self, fqn: str, tensor: Tensor, stored_bytes: int) -> None:
        key = fqn, tensor.shape, tensor.dtype
        row = self._rows.setdefault(key, CompressedRow(fqn, tuple(tensor.shape), tensor.dtype))
        row.count += 1
        row.dense_bytes += tensor.nbytes
        row.stored_bytes += stored_bytes


def _unpack(kept: Unchanged | QuantizedView) -> Tensor:
    return kept.tensor()
