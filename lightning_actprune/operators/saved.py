"""What autograd saves while a module runs, and no layer is known for: ``x * gamma``, ``torch.addcmul``, attention.

While a module in scope runs, a pair of saved-tensor hooks packs each tensor that qualifies in one launch
(``codec.formats``, all blocks), and unpacks it for the moment when backward asks for it. Forward stays as it is. A
gradient is computed from values that are off by up to half a step of their block, so only operations may read them of
which it is known what that does (``codec.saved_ops``); what all others save stays as it is. Errors of fused attention
grow with its logits: for models with attention, take eight bits.

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

Which operation it is, is known once the module around returns: until then, in a first forward, what is saved waits as
it is (``operators.sites``). Tensors of any layout are read where they lie (``operators.regions``).

What a mask has put values into (``masked_fill``, ``where``) stays as it is whatever it holds at that moment. Other
outliers may come later than that, with the first batch that is padded, say. So they are looked for again in the 2nd,
4th, 8th forward and so on, and in every 128th from then on: what has some stays as it is from then on, with a warning,
since they may have come in a forward in between.

**Parameters.** Of ``x * gamma``, which saves both factors, ``x`` is needed for the gradient of ``gamma`` alone: its
errors enter no other gradient, and those of many rows cancel, as in a linear layer. So of a product with *one parameter
of fewer values* the other factor may have fewer bits than what the input gradient is computed from. Where the parameter
may be the learned step of a quantization, both factors stay as they are (``codec.saved_ops.is_step``).

Hooks that are open around a scope get the packed values, and everything that is left alone, in place of the graph: a
``SavedTensorMeter`` counts what is kept, ``save_on_cpu`` moves it. ``torch.func`` transforms inside a scope fail, as
they do with all hooks.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.codec.dispatch import KERNEL_DTYPES, close_hooks, in_plain_eager_mode, open_hooks
from lightning_actprune.codec.pack_cache import Retainers, StorageKey, place_of
from lightning_actprune.codec.private import (
    FOR_OPERATIONS,
    refusal,
    saved_tensors_hooks_are_enabled,
    top_saved_tensors_hooks,
    unseen_by_compilers,
)
from lightning_actprune.codec.saved_ops import OUTLIER, Facts, Policy, Use, storage_for
from lightning_actprune.compiled.marks import Model
from lightning_actprune.config import BITS, Keep, check_bits, check_count, check_model
from lightning_actprune.operators.hooks import (
    MODULE_ATTRIBUTES,
    add_hooks,
    dropped_by_checkpoint,
    eager_modules,
    explain,
    in_compiled_region,
    is_recomputation,
)
from lightning_actprune.operators.readers import (
    ATTENTION,
    PRODUCTS,
    VIEWS_AND_CASTS,
    is_masked,
    loses_values,
)
from lightning_actprune.operators.regions import (
    Hooks,
    Layout,
    QuantizedRegion,
    Uncompressed,
    as_read,
    layout_of,
)
from lightning_actprune.operators.registry import ROOT, operator_of, plain_name
from lightning_actprune.operators.sites import (
    MAX_STEPS,
    Decided,
    Decision,
    Operations,
    SavedActivation,
    Site,
    is_own_result,
)

BITS_OF_SHAPE = min(BITS)
"""Bits of a tensor of which backward reads the shape alone: they are of no account."""
_JUDGED = Use.LINEAR.name, Use.BOUNDED.name
"""Uses for which outliers are looked for."""
CHECKED_EVERY = 128
"""Forwards after which outliers are looked for again, at the latest; a power of 2."""
PATIENCE = 16
"""Forwards for which new sites are waited for, to be decided, after one in which there were some and none could be."""


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


def is_attention_result(tensor: Tensor) -> bool:
    """Return whether fused attention has computed ``tensor``."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() in ATTENTION


def _copies_parameter(tensor: Tensor) -> bool:
    """Return whether views and casts alone lie between a parameter and ``tensor``."""
    node = tensor.grad_fn
    for _ in range(MAX_STEPS):
        if node is None or node.name() not in VIEWS_AND_CASTS:
            break
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


class _Packing(threading.local):
    """Tells the hooks around which tensor it is that they are given a packed one for."""

    def __init__(self) -> None:
        self.original: Tensor | None = None


packing = _Packing()


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


@dataclass
class LeftRow:
    """Tensors that would qualify, and stay as they are for the operation that saved them.

    Args:
        fqn: Fully qualified name of the module that ran.
        operation: Its name (``"grid_sampler2_d"``), ``"unknown"`` if it was not found.
        reason: Why they stay as they are.
        count: How many.
        nbytes: Their bytes.
    """

    fqn: str
    operation: str
    reason: str
    count: int = 0
    nbytes: int = 0


class OpenHooks:
    """The hooks that are open in a thread.

    Args:
        pair: Pack and unpack hook.
        operations: What is saved in the scope.
        outer: The hooks around, ``None`` without any: then this package's functions are not seen.
    """

    def __init__(self, pair: Hooks, operations: Operations, outer: Hooks | None) -> None:
        self.pair, self.operations, self.alone = pair, operations, outer is None
        self._context = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._context.__enter__()
        open_hooks(self)

    def close(self, finish: Callable[[Operations], None] = Operations.interrupted) -> None:
        """Take the hooks off the stack, and keep what waits."""
        close_hooks(self)
        self._context.__exit__(None, None, None)
        finish(self.operations)


def _is_captured(tensor: Tensor) -> bool:
    """Return whether a CUDA graph of what is done with ``tensor`` is being made: then nobody may wait for values."""
    return tensor.is_cuda and is_current_stream_capturing()


class _Scope(threading.local):
    """The modules in scope that run in a thread, and the hooks open for them, if any."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.counts: list[int] = []
        """How many operations have saved an activation in each of these calls."""
        self.hooks: OpenHooks | None = None
        self.outermost = ""


def _has_children(module: nn.Module) -> bool:
    """Return whether there are any: their own truth is their length, which is 0 or, of a compiled one, an error."""
    return next(module.children(), None) is not None


def _attributes(module: nn.Module) -> list[Any]:
    """Return the values of the attributes that torch does not know of."""
    return [value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]


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
        dense: Says of a module's fully qualified name whether what is saved while it runs is left alone; of that of
            ``module``, ``"(root)"``, whether what it saves itself is.
        parameter_bits: Bits of what only the gradient of a parameter needs, by default those of ``keep``.
        operations: Bits by the name of an operation (``"grid_sampler2_d"``, as tables show it), ``None`` to leave what
            it saves as it is: in place of what is known of it (``codec.saved_ops``).
        attention: Bits of ``query``, ``key`` and ``value`` of fused attention and of its result, ``attended``, 0 to
            leave it as it is; by default those of ``keep``.
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
        dense: Callable[[str], bool] = lambda fqn: False,
        parameter_bits: int | None = None,
        operations: Mapping[str, int | None] | None = None,
        attention: Mapping[str, int] | None = None,
        loss_inside: bool = False,
    ) -> None:
        self._module = check_model(module, "module")
        keep = Keep(bits=8) if keep is None else keep
        if not isinstance(keep, Keep):
            raise TypeError(f"`keep` must be a Keep, got {keep!r}. HINT: such as Keep(bits=8).")
        if keep.bits is None:
            raise ValueError("`keep` must have `bits`: nothing else is done to what is saved. HINT: Keep(bits=8).")
        self._block_size, self._bits = keep.block_size, keep.bits
        self.min_values = check_count(min_values, "min_values", "the least values of a tensor that is packed.", 1)
        bits = dict.fromkeys(("saved", "query", "key", "value", "attended"), keep.bits) | dict(attention or {})
        self._policy = Policy(
            **bits,
            parameter=check_bits(parameter_bits, "parameter_bits") or keep.bits,
            operations=tuple(
                (name, check_bits(of, "operations") or 0) for name, of in sorted((operations or {}).items())
            ),
        )
        self.decided = Decided()
        self._forwards: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._loss_inside = loss_inside
        self._names = {m: plain_name(fqn) for fqn, m in module.named_modules()}
        left_alone = {m for m, fqn in self._names.items() if dense(fqn)}
        self._left_alone_itself = {m for m in left_alone if self._names[m] == ROOT}
        """Of the model, that is what it saves itself; of any other module, also what is in it."""
        self._left_alone = left_alone - self._left_alone_itself
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._handles: list[RemovableHandle] = []
        self._scope = _Scope()
        self._packed = Retainers()
        self._first_readers: WeakKeyDictionary[QuantizedRegion, Site] = WeakKeyDictionary()
        self._uncompressed = Retainers()
        self.paused = False
        """Whether forwards save what they do without it."""
        self.reset()

    def for_compilers(self) -> Model:
        """Return how a compiler is to keep what no layer is known for, of which it does not know the module."""
        inside = bool(self._left_alone_itself) or any(map(_has_children, self._left_alone))
        unknown = inside or any(operator_of(module) is None for module in self._left_alone)
        policy = self._policy
        if unknown:
            left = tuple((name, bits) for name, bits in policy.operations if not bits)
            policy = replace(policy, saved=0, parameter=0, operations=left)
        if inside:
            policy = replace(policy, query=0, key=0, value=0, attended=0)
        return Model(**vars(policy), block_size=self._block_size, min_values=self.min_values)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *exc_info: Any) -> None:
        self.detach()

    @property
    def rows(self) -> list[CompressedRow]:
        """What was packed since the last ``reset``, in the order in which modules ran."""
        return list(self._rows.values())

    @property
    def left(self) -> list[LeftRow]:
        """What would qualify, and was left as it is for its operation, since the last ``reset``."""
        return list(self._left.values())

    def reset(self) -> None:
        """Forget what was counted."""
        self._rows: dict[Any, CompressedRow] = {}
        self._left: dict[Any, LeftRow] = {}
        self.retained_twice_bytes = 0
        """Bytes stored of tensors whose storage something else saved as it is later on: they were added, not saved."""

    def attach(self) -> Self:
        """Let what the modules' next forwards save be quantized. Does nothing if attached."""
        missing = refusal("Quantizing what no layer is known for", FOR_OPERATIONS)
        if missing is not None:
            warnings.warn(f"{missing} It stays as it is.", stacklevel=2)
        elif not self._handles:
            weights = (p for p in self._module.parameters() if not is_lazy(p) and p.dim() > 1)
            self._weight_shapes = {tuple(sorted(p.shape)) for p in weights}
            called = {self._module, *self._module.children()} | {m for m in self._module.modules() if _has_children(m)}
            called |= self._left_alone
            called -= {self._module} if self._loss_inside else set()
            # What runs again keeps nothing of what is saved in it, and hooks would cost the host time twice.
            for module in called & eager_modules(self._module, running_again=False):
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    self._handles += add_hooks(module, self._enter, self._leave)
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
            scope.outermost = self._names.get(module, "")
            scope.hooks = self._open(scope.outermost)
        scope.running.append(module)
        scope.counts.append(0)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._scope.running
        if running and running[-1] is module:
            running.pop(), self._scope.counts.pop()
            if output is None and sys.exc_info()[0] is not None:  # it raised
                explain(sys.exc_info()[1])
                if not running:
                    self._close()
            elif not running:
                left = lambda: (args, *map(_attributes, module.modules()))  # noqa: E731
                self._close(lambda operations: operations.returned(output, 0, left))
            elif self._scope.hooks is not None:
                self._scope.hooks.operations.returned(output, len(running))

    def _open(self, outermost: str) -> OpenHooks | None:
        if self.paused or not (saved_tensors_hooks_are_enabled() and torch.is_grad_enabled()) or is_recomputation():
            return None
        outer = top_saved_tensors_hooks(False)
        if dropped_by_checkpoint(outer):
            return None
        self._forwards[outermost] += 1
        checked = CHECKED_EVERY % self._forwards[outermost] == 0 or self._forwards[outermost] % CHECKED_EVERY == 0
        operations = Operations(self._store, self.decided.sites, outermost not in self.decided.settled, checked)
        return OpenHooks((partial(self._pack, outer, operations), unpack_saved), operations, outer)

    def _close(self, finish: Callable[[Operations], None] = Operations.interrupted) -> None:
        scope = self._scope
        scope.running.clear()
        scope.counts.clear()
        hooks, scope.hooks = scope.hooks, None
        if hooks is not None:
            hooks.close(finish)
            operations, name = hooks.operations, scope.outermost
            if operations.undecided:
                self.decided.settled.discard(name)
                if not operations.watched:
                    self._waits[name] = PATIENCE
            elif self._waits[name] > 0:  # these sites may not be in each forward
                self._waits[name] -= 1
            else:
                self.decided.settled.add(name)

    @unseen_by_compilers
    def _pack(self, outer: Hooks | None, operations: Operations, tensor: Tensor) -> Uncompressed | SavedActivation:
        # This runs for everything that is saved: what most of it is spared by comes first.
        saving = operations.saves(tensor)
        if type(tensor) is not Tensor or tensor.numel() < self.min_values or tensor.dtype not in KERNEL_DTYPES:
            return Uncompressed(tensor, outer)
        if self._is_left_alone(tensor):
            return Uncompressed(tensor, outer)
        layout = self._layout(tensor)
        if layout is None:
            return self._retain(tensor, outer)
        scope, is_result, stay = self._scope, is_own_result(tensor), None
        if not is_result or is_attention_result(tensor):
            if saving.ordinal < 0:
                saving.ordinal = scope.counts[-1]
                scope.counts[-1] += 1
            # Hooks around may ask whether a compiled region saves the tensor, which shows only while it does.
            is_compiled = outer is not None and in_compiled_region()
            if not is_compiled and tensor.untyped_storage()._cdata not in self._uncompressed:
                module = scope.running[-1]
                fqn = self._names.get(module, type(module).__name__)  # a replica of DataParallel's has no name
                place, depth = saving.count - 1, len(scope.running)
                stay = SavedActivation(tensor, layout, saving, place, is_result, fqn, depth, outer)
                operations.wait(stay)
        operations.saw(tensor, len(scope.running))
        return self._retain(tensor, outer) if stay is None else stay

    def _store(self, stay: SavedActivation, decision: Decision | None, operations: Operations) -> None:
        """Store a tensor at a site; the decision is ``None`` for a new one."""
        decision, tensor = self._decide(stay, decision, operations), stay.tensor
        address = tensor.untyped_storage()._cdata
        if decision.bits and tensor._version == stay.version and address not in self._uncompressed:
            stay.store(self._quantized(stay, decision.bits))
            return
        if decision.reason:
            self._count_left(stay, decision)
        stay.store(self._retain(tensor, stay.outer, stay.version))

    def _decide(self, stay: SavedActivation, decision: Decision | None, operations: Operations) -> Decision:
        """Return how a tensor is stored: as was decided for its site, unless outliers came since."""
        site = stay.site
        if decision is None:
            operations.undecided = True
            if not operations.watched:  # operations that share small tensors were not noted: the next forward decides
                return Decision(0, "it was not there in the forward before")
            decision = self.decided.sites[site] = self._judge(stay, operations)
        elif (
            operations.checked
            and decision.bits
            and site.use in _JUDGED
            and self._policy.bits_by_rule(site.operation) is None
            and not _is_captured(stay.tensor)
            and loses_values(as_read(stay.tensor, stay.layout), stay.layout.block)
        ):
            warnings.warn(
                f"What module {site.fqn!r} saves for {site.operation!r} now contains outliers that would destroy "
                "precision, as masks do. It is saved uncompressed from now on; gradients may have been off since the "
                f"last check, up to {CHECKED_EVERY} forwards ago. HINT: a rule leaves it uncompressed from the start "
                f"(`rules={{'operation:{site.operation}': None}}`).",
                stacklevel=2,
            )
            decision = self.decided.sites[site] = Decision(0, OUTLIER)
        return decision

    def _judge(self, stay: SavedActivation, operations: Operations) -> Decision:
        """Return how a tensor is stored that is saved at a new site."""
        site = stay.site
        if not site.node:
            return Decision(0, "its operation is not behind an output of its module")
        judged = site.use in _JUDGED and self._policy.bits_by_rule(site.operation) is None
        facts = self._facts(stay, operations) if judged else Facts()
        storage = storage_for(site.operation, Use[site.use], facts, self._policy)
        return Decision(BITS_OF_SHAPE if storage.how == "shape" else storage.bits, storage.reason)

    def _facts(self, stay: SavedActivation, operations: Operations) -> Facts:
        """Return what is known of a tensor; outliers, for which the host waits, are looked for last."""
        saving, tensor = stay.saving, stay.tensor
        is_factor = stay.site.node in PRODUCTS
        if is_factor and operations.shares(stay):
            return Facts(has_step_as_factor=True)
        if is_masked(tensor):
            return Facts(is_masked=True)
        if _is_captured(tensor):
            return Facts(has_outliers=None)
        alone = is_factor and saving.count == 2 and len(saving.parameters) == 1
        fewer = alone and tensor.numel() > saving.parameters[0]
        return Facts(fewer, has_outliers=loses_values(as_read(tensor, stay.layout), stay.layout.block))

    def _is_left_alone(self, tensor: Tensor) -> bool:
        """Return whether a tensor of a type that can be packed stays as it is, for what it is or where it is saved."""
        if tensor.is_nested or tensor.layout != torch.strided:  # of which nothing else may be asked
            return True
        if is_weight(tensor, self._weight_shapes) or not in_plain_eager_mode(tensor) or is_recomputation():
            return True
        running = self._scope.running
        return not (self._left_alone.isdisjoint(running) and self._left_alone_itself.isdisjoint(running[-1:]))

    def _layout(self, tensor: Tensor) -> Layout | None:
        """Return how to read an activation, ``None`` for anything else."""
        if not tensor.requires_grad or tensor.shape[-1:] == (1,):
            return None
        return layout_of(tensor.shape, tensor.stride(), self._block_size)

    def _retain(self, tensor: Tensor, outer: Hooks | None, version: int | None = None) -> Uncompressed:
        """Keep the tensor as it is, and know its storage as retained for as long as that is kept."""
        kept, storage = Uncompressed(tensor, outer, version), tensor.untyped_storage()
        address = storage._cdata
        if address not in self._uncompressed:
            self._uncompressed.add(StorageKey(storage), None, kept)  # type: ignore[no-untyped-call]
            self.retained_twice_bytes += sum(packed.nbytes for packed in self._packed.all_of(address))
        return kept

    def _quantized(self, stay: SavedActivation, bits: int) -> QuantizedRegion:
        """Return the region of a tensor in at least ``bits`` bits: as another reader has it, or packed now."""
        tensor, outer = stay.tensor, stay.outer
        storage, region = tensor.untyped_storage(), (tensor.storage_offset(), stay.layout.region, tensor.dtype)
        name = *region, stay.version, *place_of(tensor)
        for other in BITS if storage._cdata in self._packed else ():
            known: QuantizedRegion | None = self._packed.find(storage._cdata, (*name, other))
            if known is None or not known.goes_to(outer):
                continue
            if other >= bits:
                return known
            # The next forward stores it once, for both.
            site = self._first_readers[known]
            self.decided.sites[site] = self.decided.sites[site]._replace(bits=bits)
        packing.original = tensor
        try:
            packed = QuantizedRegion(tensor, stay.layout, bits, outer)
        finally:
            packing.original = None
        self._first_readers[packed] = stay.site
        self._packed.add(StorageKey(storage), (*name, bits), packed)  # type: ignore[no-untyped-call]
        self._count(stay.fqn, tensor, packed.nbytes)
        return packed

    def _count_left(self, stay: SavedActivation, decision: Decision) -> None:
        operation = stay.site.operation
        row = self._left.setdefault((stay.fqn, operation), LeftRow(stay.fqn, operation, decision.reason))
        row.count += 1
        row.nbytes += stay.tensor.nbytes

    def _count(self, fqn: str, tensor: Tensor, stored_bytes: int) -> None:
        key = fqn, tensor.shape, tensor.dtype
        row = self._rows.setdefault(key, CompressedRow(fqn, tuple(tensor.shape), tensor.dtype))
        row.count += 1
        row.dense_bytes += tensor.nbytes
        row.stored_bytes += stored_bytes


@unseen_by_compilers
def unpack_saved(kept: Uncompressed | SavedActivation) -> Tensor:
    """Return what was saved: the unpack hook of every scope."""
    return kept.unpack()
