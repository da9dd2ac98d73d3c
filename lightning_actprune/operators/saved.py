"""Quantize tensors that autograd saves for operations outside supported layers: ``x * gamma``, attention.

While a module in scope runs, a pair of saved-tensor hooks packs each tensor that qualifies in one launch
(``codec.formats``, all blocks), and unpacks it when backward asks for it. Forward does not change. A gradient is
computed from values that are off by up to half a step of their block, so a tensor is packed only for operations that
are known to bear that (``codec.saved_ops``). Errors of fused attention grow with its logits: for models with attention,
take eight bits.

Activations are packed that an operation gets as an input and that need a gradient. Uncompressed stay:

- small tensors, other types than fp32 and 16 bits, tensor subclasses, expanded tensors, those with one value a row;
- what needs no gradient, and *results* that an operation saves of itself (softmax, exp, norms, statistics), but for
  that of fused attention, of which backward needs the product with the gradient;
- leaves, views of leaves, copies of leaves in another type (autocast), and whatever has the shape of a parameter, up to
  transposition, such as a weight with a norm or a mask: gradients of inputs stay exact;
- what compiled regions and reentrant checkpoints save, whose operations are not known, and what any checkpoint runs
  again in backward. Inside a checkpoint's own hooks no scope opens.

**When.** A tensor waits uncompressed until its operation is known, which is when a later operation saves something, or
when the module returns (``operators.sites``). Tensors of any layout are read where they are (``operators.regions``).

**Shared memory.** A tensor is packed once for all operations that save it or a view of the same memory, as long as it
is not written to. Where readers need different bits, it has the most of them, from the second forward on. If something
retains its storage uncompressed (a ReLU saves its result before the next layer saves it as its input), packing would
add memory, so it stays. What retains it later cannot undo a pack: those bytes are counted.

**Outliers.** What a mask put values into (``masked_fill``, ``where``) stays uncompressed, whatever it holds at that
moment. Other outliers may come later, for example with the first batch that is padded. So they are looked for again in
the 2nd, 4th, 8th forward and so on, and in every 127th; a tensor with outliers stays uncompressed from then on, with a
warning, since they may have come in a forward in between.

**Parameters.** Of ``x * gamma``, which saves both factors, ``x`` is needed for the gradient of ``gamma`` alone: its
errors enter no other gradient, and those of many rows cancel, as in a linear layer. So in a product with *one parameter
of fewer values* the other factor may have fewer bits than what an input gradient is computed from. Where the parameter
may be the learned step of a quantization, both factors stay uncompressed (``codec.saved_ops.is_step``).

**Grouped products** multiply each group of rows by a matrix of its own, as experts do. Where the matrices are one
parameter, only their gradients need the rows, however many values the parameter has. Such rows bear outliers, as inputs
of linear layers do, so nobody looks for them.

**Weighed rows** are multiplied by one number each, as outputs of experts are. They have the bits of the value of
attention.

**Selected rows** ``x[rows]`` are selected again in backward. If ``x`` is a parameter, the graph holds the parameter and
the numbers of the rows, and nothing is packed. If ``x`` is an argument of a running module and has no more values than
the rows, ``x`` is packed in their place, once for all that is selected from it. If ``x`` was written to since, or is
retained uncompressed, the rows are stored as any other tensor.

Hooks that are open around a scope get the packed values, and all that stays uncompressed, in place of the graph: a
``SavedTensorMeter`` counts it, ``save_on_cpu`` moves it. ``torch.func`` transforms inside a scope fail, as they do with
all hooks.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.codec.dispatch import KERNEL_DTYPES, close_hooks, in_plain_eager_mode, open_hooks
from lightning_actprune.codec.outliers import CHECKED_EVERY, is_captured, is_check_due, loses_values
from lightning_actprune.codec.pack_cache import Retainers, StorageKey, live
from lightning_actprune.codec.private import (
    FOR_OPERATIONS,
    no_function_modes,
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
    eager_modules,
    explain,
    in_compiled_region,
    is_recomputation,
)
from lightning_actprune.operators.offload import offload_hooks
from lightning_actprune.operators.readers import (
    ATTENTION,
    GROUPED,
    PRODUCTS,
    VIEWS_AND_CASTS,
    before_reshapes,
    find_selection,
    is_masked,
)
from lightning_actprune.operators.regions import (
    Hooks,
    QuantizedRegion,
    SelectedWeight,
    Selection,
    Uncompressed,
    as_read,
    dropped_by_checkpoint,
    layout_of,
)
from lightning_actprune.operators.registry import ROOT, operator_of, plain_name
from lightning_actprune.operators.sites import (
    MAX_STEPS,
    Decision,
    Operations,
    SavedActivation,
    Site,
    SiteDecisions,
    is_own_result,
)

BITS_OF_SHAPE = min(BITS)
"""Bits of a tensor of which backward reads the shape alone."""
_JUDGED = Use.LINEAR.name, Use.BOUNDED.name
"""Uses for which outliers are looked for."""


def is_weight(tensor: Tensor, shapes: Container[tuple[int, ...]]) -> bool:
    """Return whether ``tensor`` is a leaf, a view of one, views and casts of a parameter, or has one of ``shapes``.

    Args:
        tensor: A saved tensor; one that needs no gradient is no weight.
        shapes: Sorted shapes of parameters, which what is computed from them has too, such as a weight with a mask.
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


def _copies_parameter(tensor: Tensor) -> bool:
    """Return whether views and casts alone lie between a parameter and ``tensor``."""
    node = tensor.grad_fn
    for _ in range(MAX_STEPS):
        if node is None or node.name() not in VIEWS_AND_CASTS:
            break
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


class _Packing(threading.local):
    """Tells the hooks around what they get: packed values, or what was saved before and had to wait."""

    def __init__(self) -> None:
        self.is_packed = self.is_late = False


packing = _Packing()
listeners: dict[Any, Callable[[Tensor], None]] = {}
"""By the unpack hook around a scope: called with each tensor that autograd saves and that waits, or is not stored."""


@dataclass
class CompressedRow:
    """Tensors of one shape that a module saved, and that were packed.

    Args:
        fqn: Fully qualified name of the innermost module with hooks that ran, which stands for its children too.
        shape: Shape of the tensors.
        dtype: Type of their values.
        count: How many were packed; operations that share one are counted once.
        dense_bytes: Bytes of the tensors.
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
    """Tensors that would qualify, and stay uncompressed for the operation that saved them.

    Args:
        fqn: Fully qualified name of the module that ran.
        operation: Its name (``"grid_sampler2_d"``), ``"unknown"`` if it was not found.
        reason: Why they stay uncompressed.
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
        """Take the hooks off the stack, and store what waits."""
        close_hooks(self)
        self._context.__exit__(None, None, None)
        finish(self.operations)
        self.operations.integers.clear()  # backward frees them


class _Scope(threading.local):
    """The modules in scope that run in a thread, and the hooks open for them, if any."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.arguments: list[list[tuple[weakref.ref[Tensor], int]]] = []
        """The arguments of each that have a history, with their versions."""
        self.counts: list[int] = []
        """How many operations saved an activation in each of these calls."""
        self.hooks: OpenHooks | None = None
        self.outermost = ""


def _has_children(module: nn.Module) -> bool:
    """Return whether a module has children, whose own truth is their length, or an error if they are compiled."""
    return next(module.children(), None) is not None


def _attributes(module: nn.Module) -> list[Any]:
    """Return the values of a module's attributes that are not torch's."""
    return [value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES]


class SavedTensorCompression:
    """Quantize tensors that autograd saves while a module runs, outside supported layers (see the module).

    It attaches plain forward hooks, which are gone after ``detach``; what was saved before stays packed. Copies and
    pickles of the modules have hooks that do nothing. As a context manager it is attached inside.

    Args:
        module: Its scopes are its own calls and those of its children and of all modules in it that have children,
            but not of compiled modules; hooks on all modules would cost the host several times as much.
        keep: Its ``bits`` and ``block_size`` are those of the packed tensors; by default eight bits.
        min_values: Tensors of fewer values stay uncompressed. To pack and unpack one takes the host the same time
            whatever its size, and 2^16 values in 16 bits give back 64 KiB at most.
        dense: Says of a module by its fully qualified name whether all that is saved while it runs stays uncompressed;
            of ``module`` itself, ``"(root)"``, whether what it saves in its own forward does.
        parameter_bits: Bits of what only the gradient of a parameter needs, by default those of ``keep``.
        operations: Bits by the name of an operation, as tables show it (``"grid_sampler2_d"``), in place of those by
            ``codec.saved_ops``; ``None`` for uncompressed.
        attention: Bits of ``query``, ``key`` and ``value`` of fused attention and of its result, ``attention_out``; 0
            for uncompressed. By default those of ``keep``.
        loss_inside: Whether ``module`` computes its loss itself, as a LightningModule does: then its own forward, which
            a strategy may route the whole step through, is no scope, but those of the modules in it are.

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
            raise ValueError("`keep` must have `bits`: without, no tensor would be packed. HINT: Keep(bits=8).")
        self._block_size, self._offload = keep.block_size, keep.offload
        self.min_values = check_count(min_values, "min_values", "the least values of a tensor that is packed.", 1)
        bits = dict.fromkeys(("saved", "query", "key", "value", "attention_out"), keep.bits) | dict(attention or {})
        self._policy = Policy(
            **bits,
            parameter=check_bits(parameter_bits, "parameter_bits") or keep.bits,
            operations=tuple(
                (name, check_bits(of, "operations") or 0) for name, of in sorted((operations or {}).items())
            ),
        )
        self.decisions = SiteDecisions()
        self._forwards: Counter[str] = Counter()
        self._loss_inside = loss_inside
        self._names = {m: plain_name(fqn) for fqn, m in module.named_modules()}
        left_alone = {m for m, fqn in self._names.items() if dense(fqn)}
        self._left_alone_itself = {m for m in left_alone if self._names[m] == ROOT}
        """The model, if what it saves in its own forward stays uncompressed."""
        self._left_alone = left_alone - self._left_alone_itself
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._handles: list[RemovableHandle] = []
        self._scope = _Scope()
        self._packed = Retainers()
        self._first_readers: weakref.WeakKeyDictionary[QuantizedRegion, Site] = weakref.WeakKeyDictionary()
        self._uncompressed = Retainers()
        self.paused = False
        """Whether forwards save the same as without the hooks."""
        self.reset()

    def for_compilers(self) -> Model:
        """Return the settings for a compiler, which does not know the module that saves a tensor."""
        inside = bool(self._left_alone_itself) or any(map(_has_children, self._left_alone))
        unknown = inside or any(operator_of(module) is None for module in self._left_alone)
        policy = self._policy
        if unknown:
            left = tuple((name, bits) for name, bits in policy.operations if not bits)
            policy = replace(policy, saved=0, parameter=0, operations=left)
        if inside:
            policy = replace(policy, query=0, key=0, value=0, attention_out=0)
        return Model(**vars(policy), block_size=self._block_size, min_values=self.min_values, offload=self._offload)

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
        """What would qualify, and stayed uncompressed for its operation, since the last ``reset``."""
        return list(self._left.values())

    def reset(self) -> None:
        """Start counting anew."""
        self._rows: dict[Any, CompressedRow] = {}
        self._left: dict[Any, LeftRow] = {}

    def attach(self) -> Self:
        """Quantize what the next forwards save. Does nothing if attached."""
        missing = refusal("Quantizing what operations outside supported layers save", FOR_OPERATIONS)
        if missing is not None:
            warnings.warn(f"{missing} It stays uncompressed.", stacklevel=2)
        elif not self._handles:
            weights = (p for p in self._module.parameters() if not is_lazy(p) and p.dim() > 1)
            self._weight_shapes = {tuple(sorted(p.shape)) for p in weights}
            called = {self._module, *self._module.children()} | {m for m in self._module.modules() if _has_children(m)}
            called |= self._left_alone
            called -= {self._module} if self._loss_inside else set()
            # What runs again in backward keeps nothing that is saved in it.
            for module in called & eager_modules(self._module, running_again=False):
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    self._handles += add_hooks(module, self._enter, self._leave)
        return self

    def detach(self) -> None:
        """Remove every hook. Does nothing if not attached."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close()  # after a forward that was interrupted

    def _enter(self, module: nn.Module, args: Any) -> None:
        scope = self._scope
        if scope.running and scope.running[0] is module and scope.hooks is not None:
            # The last call was interrupted (Ctrl-C), after which torch calls no hook; a call inside itself is rare.
            self._close()
        if not scope.running:
            scope.outermost = self._names.get(module, "")
            scope.hooks = self._open(scope.outermost)
        scope.running.append(module)
        scope.counts.append(0)
        scope.arguments.append([])
        if scope.hooks is not None:
            with no_function_modes():
                tensors = (x for x in args if isinstance(x, Tensor) and x.grad_fn is not None)
                scope.arguments[-1] += [(weakref.ref(x), x._version) for x in tensors]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        running = self._scope.running
        if running and running[-1] is module:
            running.pop(), self._scope.counts.pop(), self._scope.arguments.pop()
            if output is None and sys.exc_info()[0] is not None:  # it raised
                explain(sys.exc_info()[1])
                if not running:
                    self._close()
            elif not running:
                left = lambda: (args, *map(_attributes, module.modules()))  # noqa: E731
                self._close(lambda operations: operations.returned(output, 0, left))
            elif (hooks := self._scope.hooks) is not None:
                top = top_saved_tensors_hooks(False)
                if top is not None and top[0] is hooks.pair[0]:  # a checkpoint would record what packing computes
                    hooks.operations.returned(output, len(running))

    def _open(self, outermost: str) -> OpenHooks | None:
        if self.paused or not (saved_tensors_hooks_are_enabled() and torch.is_grad_enabled()) or is_recomputation():
            return None
        outer = top_saved_tensors_hooks(False)
        if dropped_by_checkpoint(outer):
            return None
        self._forwards[outermost] += 1
        is_checked = is_check_due(self._forwards[outermost])
        operations = Operations(self._store, self.decisions.sites, not self.decisions.is_settled(outermost), is_checked)
        stored_by = offload_hooks(outer) if self._offload else outer
        listener = None if outer is None else listeners.get(outer[1])
        return OpenHooks((partial(self._pack, stored_by, listener, operations), unpack_saved), operations, outer)

    def _close(self, finish: Callable[[Operations], None] = Operations.interrupted) -> None:
        scope = self._scope
        scope.running.clear()
        scope.counts.clear()
        scope.arguments.clear()
        hooks, scope.hooks = scope.hooks, None
        if hooks is not None:
            hooks.close(finish)
            self.decisions.end(scope.outermost, hooks.operations.has_new_site)

    @unseen_by_compilers
    def _pack(
        self, outer: Hooks | None, listener: Callable[[Tensor], None] | None, operations: Operations, tensor: Tensor
    ) -> Uncompressed | SelectedWeight | SavedActivation:
        # This runs for everything that is saved: checks that most tensors fail come first.
        saving = operations.saves(tensor)
        if type(tensor) is not Tensor or tensor.numel() < self.min_values or tensor.dtype not in KERNEL_DTYPES:
            return Uncompressed(tensor, outer)
        if self._is_left_alone(tensor):
            return Uncompressed(tensor, outer)
        is_activation = tensor.requires_grad and tensor.shape[-1:] != (1,)
        layout = layout_of(tensor.shape, tensor.stride(), self._block_size) if is_activation else None
        if layout is None:
            return self._retain(tensor, outer)
        selected = find_selection(tensor, operations.integers)
        parameter = None if selected is None else getattr(selected[0][0], "variable", None)
        if selected is not None and isinstance(parameter, nn.Parameter) and parameter.shape == selected[1]:
            operations.look_behind(tensor, len(self._scope.running), None)
            if listener is not None:
                listener(tensor)
            return SelectedWeight(parameter, selected[2], outer)
        scope, is_result, stay = self._scope, is_own_result(tensor), None
        if not is_result or cast(Any, tensor.grad_fn).name() in ATTENTION:
            if saving.ordinal < 0:
                saving.ordinal = scope.counts[-1]
                scope.counts[-1] += 1
            # Hooks around may ask whether a compiled region saves the tensor, which shows only while it does.
            is_compiled = outer is not None and in_compiled_region()
            if not is_compiled and tensor.untyped_storage()._cdata not in self._uncompressed:
                module = scope.running[-1]
                fqn = self._names.get(module, type(module).__name__)  # a replica of DataParallel's has no name
                place, depth = saving.count - 1, len(scope.running)
                selection = None if selected is None else self._find_source(tensor, *selected)
                stay = SavedActivation(tensor, layout, saving, place, is_result, fqn, depth, outer, selection)
                if listener is not None:
                    listener(tensor)
        operations.look_behind(tensor, len(scope.running), stay)
        return self._retain(tensor, outer) if stay is None else stay

    def _find_source(
        self, tensor: Tensor, origin: tuple[Any, int], shape: tuple[int, ...], indices: Tensor
    ) -> Selection | None:
        """Return where the rows of a tensor were selected, if from an argument of a module, and as many or more."""
        if math.prod(shape) > tensor.numel():
            return None
        for reference, version in itertools.chain(*reversed(self._scope.arguments)):
            argument = live(reference)
            if argument is None or before_reshapes(argument.grad_fn, argument.output_nr) != origin:
                continue
            if argument.numel() == math.prod(shape) and argument.is_contiguous():
                source = argument.detach().view(shape)
                layout = layout_of(source.shape, source.stride(), self._block_size)
                numbers = Uncompressed(indices, None)
                return None if layout is None else Selection(source, source.shape, layout, version, numbers)
        return None

    def _store(self, stay: SavedActivation, decision: Decision | None, operations: Operations) -> None:
        """Store a tensor at a site; the decision is ``None`` for a new one."""
        decision = self._decide(stay, decision, operations)
        was_late, packing.is_late = packing.is_late, True
        try:
            self._store_as(stay, decision)
        finally:
            packing.is_late = was_late

    def _store_as(self, stay: SavedActivation, decision: Decision) -> None:
        """Store a tensor as decided."""
        tensor, address = stay.tensor, stay.tensor.untyped_storage()._cdata
        if stay.selection is not None and not self._can_select_again(stay.selection):
            stay.selection = None
        if decision.bits and tensor._version == stay.version and address not in self._uncompressed:
            stay.store(self._quantized(stay, decision.bits))
            return
        if decision.reason:
            key = stay.fqn, stay.site.operation
            row = self._left.setdefault(key, LeftRow(*key, decision.reason))
            row.count += 1
            row.nbytes += tensor.nbytes
        stay.store(self._retain(tensor, stay.outer, stay.version))

    def _can_select_again(self, selection: Selection) -> bool:
        """Return whether the source of a selection is as it was, and is not stored uncompressed anyway."""
        source = cast(Tensor, selection.source)
        return source._version == selection.version and source.untyped_storage()._cdata not in self._uncompressed

    def _decide(self, stay: SavedActivation, decision: Decision | None, operations: Operations) -> Decision:
        """Return the decision for the site of a tensor, which changes if outliers came since."""
        site = stay.site
        if decision is None:
            operations.has_new_site = True
            if not operations.is_watched:  # the next forward is
                return Decision(0, "it was not there in the forward before")
            decision = self.decisions.sites[site] = self._judge(stay, operations)
        elif (
            operations.is_checked
            and decision.bits
            and site.use in _JUDGED
            and site.node not in GROUPED
            and self._policy.bits_by_rule(site.operation) is None
            and not is_captured(stay.tensor)
            and loses_values(as_read(stay.tensor, stay.layout), stay.layout.block)
        ):
            warnings.warn(
                f"What module {site.fqn!r} saves for {site.operation!r} now contains outliers that would destroy "
                "precision, as masks do. It is saved uncompressed from now on; gradients may have been off since the "
                f"last check, up to {CHECKED_EVERY} forwards ago. HINT: a rule leaves it uncompressed from the start "
                f"(`rules={{'operation:{site.operation}': None}}`).",
                stacklevel=2,
            )
            decision = self.decisions.sites[site] = Decision(0, OUTLIER)
        return decision

    def _judge(self, stay: SavedActivation, operations: Operations) -> Decision:
        """Return the decision for a new site."""
        site = stay.site
        if not site.node:
            return Decision(0, "its operation is not behind an output of its module")
        judged = site.use in _JUDGED and self._policy.bits_by_rule(site.operation) is None
        facts = self._facts(stay, operations) if judged else Facts()
        storage = storage_for(site.operation, Use[site.use], facts, self._policy)
        return Decision(BITS_OF_SHAPE if storage.how == "shape" else storage.bits, storage.reason)

    def _facts(self, stay: SavedActivation, operations: Operations) -> Facts:
        """Return the facts about a tensor; outliers come last, since the host waits for them."""
        saving, tensor = stay.saving, stay.tensor
        is_factor = stay.site.node in PRODUCTS
        if is_factor and operations.shares(stay):
            return Facts(has_step_as_factor=True)
        alone = is_factor and len(saving.factors) == 2 and len(saving.parameters) == 1
        grouped = stay.site.node in GROUPED
        fewer = alone and (grouped or tensor.numel() > saving.parameters[0])
        # Rows that only gradients of weights need bear masks and outliers, as inputs of linear layers do.
        bears = grouped and fewer
        if not bears and is_masked(tensor):
            return Facts(is_masked=True)
        if is_captured(tensor):
            return Facts(has_outliers=None)
        outliers = not bears and loses_values(as_read(tensor, stay.layout), stay.layout.block)
        pair = [tensor.shape, torch.Size((*tensor.shape[:-1], 1))]
        is_long = tensor.shape[-1] >= self._block_size  # the weight's gradient is a sum over a row
        weighed = is_long and stay.site.operation == "mul" and saving.factors in (pair, pair[::-1])
        return Facts(fewer, grouped, weighed, has_outliers=outliers)

    def _is_left_alone(self, tensor: Tensor) -> bool:
        """Return whether a tensor stays uncompressed for what it is or where it is saved."""
        if tensor.is_nested or tensor.layout != torch.strided:  # the other checks may fail for it
            return True
        if is_weight(tensor, self._weight_shapes) or not in_plain_eager_mode(tensor) or is_recomputation():
            return True
        running = self._scope.running
        return not (self._left_alone.isdisjoint(running) and self._left_alone_itself.isdisjoint(running[-1:]))

    def _retain(self, tensor: Tensor, outer: Hooks | None, version: int | None = None) -> Uncompressed:
        """Leave a tensor uncompressed, and note that its storage is retained for as long as the graph lives."""
        stored, storage = Uncompressed(tensor, outer, version), tensor.untyped_storage()
        address = storage._cdata
        if address not in self._uncompressed:
            self._uncompressed.add(StorageKey(storage), None, stored)  # type: ignore[no-untyped-call]
        return stored

    def _quantized(self, stay: SavedActivation, bits: int) -> QuantizedRegion:
        """Return the region of a tensor in at least ``bits`` bits: as another reader has it, or packed now."""
        tensor, layout, version, outer = stay.tensor, stay.layout, stay.version, stay.outer
        if stay.selection is not None:
            tensor, layout, version = cast(Tensor, stay.selection.source), stay.selection.layout, stay.selection.version
        storage, region = tensor.untyped_storage(), (tensor.storage_offset(), layout.region, tensor.dtype)
        name = *region, version, *stay.stream
        for other in BITS if storage._cdata in self._packed else ():
            known: QuantizedRegion | None = self._packed.find(storage._cdata, (*name, other))
            if known is None or not known.goes_to(outer):
                continue
            if other >= bits:
                return known
            site = self._first_readers[known]
            if 0 < self.decisions.sites[site].bits < bits:  # the next forward stores it once, for both
                self.decisions.sites[site] = Decision(bits)
        packing.is_packed = True
        try:
            packed = QuantizedRegion(tensor, layout, bits, outer)
        finally:
            packing.is_packed = False
        self._first_readers[packed] = stay.site
        self._packed.add(StorageKey(storage), (*name, bits), packed)  # type: ignore[no-untyped-call]
        key = stay.fqn, stay.shape, tensor.dtype
        row = self._rows.setdefault(key, CompressedRow(stay.fqn, tuple(stay.shape), tensor.dtype))
        row.count += 1
        row.dense_bytes += stay.tensor.nbytes
        row.stored_bytes += packed.nbytes
        return packed


@unseen_by_compilers
def unpack_saved(saved: Uncompressed | SelectedWeight | SavedActivation) -> Tensor:
    """Return a saved tensor: the unpack hook of every scope."""
    return saved.unpack()
