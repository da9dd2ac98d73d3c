"""Whatever else autograd saves in a forward, in few bits: ``x * gamma``, ``torch.addcmul``, attention's q, k and v.

While a module in scope runs, a pair of saved-tensor hooks packs each tensor that qualifies in one launch
(``ops.formats``, all blocks), and unpacks it for the moment when backward asks for it. Forward stays as it is. A
gradient is computed from values that are off by up to half a step of their block, without bias where it is linear in
them. It is not where backward compares what was saved with a result (``amax``) or near poles (``log``): there it is an
error that names the module. Divisions by small numbers are not found out: leave such modules out with ``exclude``.
Fused attention computes exponentials of its logits again, with the exact sums, so that errors grow with the logits: for
models with attention, take int8.

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

What the gradient of a parameter alone needs, as in ``x * gamma``, may have a format of its own (``saved_operation``),
but for the input of ``nn.PReLU``, whose sign the input gradient needs.

A tensor is packed once for all who save it or a view of the same memory, as long as that is not written to. If a
storage is held as it is by somebody who came first (a ReLU saves its result before the next layer saves it as its
input), packing would add memory, so it stays. Who comes later cannot undo a pack: those bytes are counted.

Hooks that are open around a scope get the packed values, and everything that is left alone, in place of the graph: a
``SavedTensorMeter`` counts what is kept, ``save_on_cpu`` moves it. ``torch.func`` transforms inside a scope fail, as
they do with all hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.arguments import (
    ValueFormatName,
    check_block_size,
    check_few_bits,
    check_min_values,
    check_model,
    check_patterns,
)
from lightning_actprune.held import (
    Dense,
    FewBitRow,
    FewBits,
    FewBitView,
    HeldOfStorage,
    Hooks,
    remember,
)
from lightning_actprune.hooks import ForwardHook, backward_runs, dropped_by_checkpoint, eager_modules
from lightning_actprune.ops.dispatch import KERNEL_DTYPES
from lightning_actprune.ops.layout import Layout, layout_of
from lightning_actprune.ops.library import in_plain_eager_mode
from lightning_actprune.provenance import is_attention_result, is_own_result, is_weight, runs_again
from lightning_actprune.saved_operation import OpenHooks, SavedOperation
from lightning_actprune.selection import WRAPPERS

__all__ = ["FewBitRow", "FewBitSaving"]


class _Scope(threading.local):
    """The modules in scope that run in a thread, and the hooks open for them, if any."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        self.hooks: OpenHooks | None = None


class FewBitSaving:
    """Keep in few bits what autograd saves while a module runs, if nothing better is known about it (see the module).

    It attaches plain forward hooks, which are gone after ``detach``; what is saved by then stays packed. Copies and
    pickles of the modules have hooks that do nothing. As a context manager it is attached inside.

    Args:
        module: In scope is whatever runs in it, in its children, or in modules further down that have children, whoever
            calls these; hooks on all others too would cost the host several times as much. Compiled modules are not.
        value_format: ``"fp8"``, ``"int8"``, ``"int4"``, ``"int3"`` or ``"int2"`` (``ops.formats``).
        block_size: Consecutive values in memory that share a scale, at least 8.
        min_values: Tensors of fewer values are left alone. Packing and unpacking one costs the host the same
            whatever its size, for which 2^16 values in 16 bits give back 64 KiB at most.
        exclude: Glob patterns on fully qualified names: what is saved while such a module runs is left alone.
        parameter_format: How to store what only the gradient of a parameter needs, by default ``value_format``.
        loss_inside: Whether ``module`` computes its loss itself, as a LightningModule does: then its own forward, which
            a strategy may route the whole step through, is no scope, but its parts are.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is not allowed.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        >>> with FewBitSaving(model, "int8", min_values=512) as saving:
        ...     loss = model(torch.randn(16, 64)).sum()
        >>> [(row.fqn, row.dense_bytes, row.stored_bytes) for row in saving.rows]
        [('1', 4096, 1088), ('2', 4096, 1088)]
    """

    def __init__(
        self,
        module: nn.Module,
        value_format: ValueFormatName = "int8",
        block_size: int = 32,
        *,
        min_values: int = 2**16,
        exclude: Sequence[str] | str = (),
        parameter_format: ValueFormatName | None = None,
        loss_inside: bool = False,
    ) -> None:
        self._module = check_model(module, "module")
        self._block_size = check_block_size(block_size)
        self._value_format = check_few_bits(value_format, self._block_size)
        self._parameter_format = check_few_bits(parameter_format or value_format, self._block_size, "parameter_format")
        self._min_values = check_min_values(min_values)
        self._loss_inside = loss_inside
        self._names = {m: WRAPPERS.sub("", fqn).removeprefix(".") for fqn, m in module.named_modules()}
        patterns = check_patterns(exclude, "exclude")
        self._excluded = {m for m, fqn in self._names.items() if any(fnmatchcase(fqn, p) for p in patterns)}
        self._weight_shapes: set[tuple[int, ...]] = set()
        self._handles: list[RemovableHandle] = []
        self._scope = _Scope()
        self._stored: dict[int, HeldOfStorage] = {}
        self._dense: dict[int, HeldOfStorage] = {}
        self.reset()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *exc_info: Any) -> None:
        self.detach()

    @property
    def rows(self) -> list[FewBitRow]:
        """What was packed since the last ``reset``, in the order in which modules ran."""
        return list(self._rows.values())

    def reset(self) -> None:
        """Forget what was counted."""
        self._rows: dict[Any, FewBitRow] = {}
        self.held_twice_bytes = 0
        """Bytes stored of tensors whose storage something else saved as it is later on: they were added, not saved."""

    def attach(self) -> Self:
        """Let the modules' next forwards save in few bits. Does nothing if attached."""
        if not self._handles:
            weights = (p for p in self._module.parameters() if not is_lazy(p) and p.dim() > 1)
            self._weight_shapes = {tuple(sorted(p.shape)) for p in weights}
            called = {self._module, *self._module.children()} | {m for m in self._module.modules() if any(m.children())}
            called |= self._excluded | {m for m in self._module.modules() if type(m) is nn.PReLU}
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
        allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if not (allowed and torch.is_grad_enabled()) or backward_runs():
            return None
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if dropped_by_checkpoint(outer):
            return None
        operation = SavedOperation(self._few_bits, self._value_format, self._parameter_format)
        return OpenHooks((partial(self._pack, outer, operation), _unpack), operation, outer)

    def _close(self) -> None:
        scope = self._scope
        scope.running.clear()
        hooks, scope.hooks = scope.hooks, None
        if hooks is not None:
            hooks.close()

    def _pack(self, outer: Hooks | None, operation: SavedOperation, tensor: Tensor) -> Dense | FewBitView:
        # This runs for everything that is saved: what spares most of it the rest comes first.
        operation.saves(tensor)
        if type(tensor) is not Tensor or tensor.numel() < self._min_values or tensor.dtype not in KERNEL_DTYPES:
            return Dense(tensor, outer)
        if is_weight(tensor, self._weight_shapes) or not in_plain_eager_mode(tensor) or backward_runs():
            return Dense(tensor, outer)
        if tensor.layout != torch.strided or tensor.is_nested or not self._excluded.isdisjoint(self._scope.running):
            return Dense(tensor, outer)
        address = tensor.untyped_storage()._cdata
        layout = self._layout(tensor)
        if layout is None or address in self._dense:
            return self._keep_dense(tensor, address, outer)
        view, running = FewBitView(tensor.shape, layout.dense_strides, self._running_name()), self._scope.running
        if is_own_result(tensor):
            if not is_attention_result(tensor):
                return self._keep_dense(tensor, address, outer)
            operation.is_attention = True
        elif not (running and type(running[-1]) is nn.PReLU):
            operation.put_off(view, tensor, layout, outer)
            return view
        view.stored = self._few_bits(tensor, layout, self._value_format, outer, view.fqn)
        return view

    def _layout(self, tensor: Tensor) -> Layout | None:
        """Return how to read an activation, ``None`` of anything else."""
        if not tensor.requires_grad or tensor.shape[-1:] == (1,) or runs_again():
            return None
        return layout_of(tensor.shape, tensor.stride(), self._block_size)

    def _keep_dense(self, tensor: Tensor, address: int, outer: Hooks | None) -> Dense:
        held = Dense(tensor, outer)
        if address not in self._dense:
            remember(self._dense, tensor, None, held)
            stored = self._stored.get(address)
            few_bits = [] if stored is None else [reference() for reference in tuple(stored.held.values())]
            self.held_twice_bytes += sum(packed.nbytes for packed in few_bits if packed is not None)
        return held

    def _few_bits(self, tensor: Tensor, layout: Layout, value_format: str, outer: Hooks | None, fqn: str) -> FewBits:
        """Return the region of ``tensor`` in few bits, as somebody has packed it already or packed now."""
        stream, recording = 0, False
        if tensor.is_cuda:  # as in ``ops.sharing``
            stream = torch._C._cuda_getCurrentRawStream(tensor.device.index)
            recording = torch.cuda.is_current_stream_capturing()
        region = tensor.storage_offset(), layout.region, tensor.dtype, tensor._version, stream, recording
        stored = self._stored.get(tensor.untyped_storage()._cdata)
        held = {} if stored is None else stored.held
        for as_good in (value_format, self._value_format) if held else ():
            known = held.get((*region, as_good))
            few_bits: FewBits | None = None if known is None else known()
            if few_bits is not None and few_bits.goes_to(outer):
                return few_bits
        few_bits = FewBits(tensor, layout, value_format, outer)
        remember(self._stored, tensor, (*region, value_format), few_bits)
        self._count(fqn, tensor, few_bits.nbytes)
        return few_bits

    def _running_name(self) -> str:
        running = self._scope.running
        module = running[-1] if running else self._module
        return self._names.get(module, type(module).__name__)  # a replica of DataParallel's has no name of its own

    def _count(self, fqn: str, tensor: Tensor, stored_bytes: int) -> None:
        key = fqn, tensor.shape, tensor.dtype
        row = self._rows.setdefault(key, FewBitRow(fqn, tuple(tensor.shape), tensor.dtype))
        row.count += 1
        row.dense_bytes += tensor.nbytes
        row.stored_bytes += stored_bytes


def _unpack(held: Dense | FewBitView) -> Tensor:
    return held.tensor()
