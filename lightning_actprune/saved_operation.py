"""What one operation saves, stored in few bits as soon as all of it is known.

Hooks are told of one tensor at a time. Of ``x * gamma``, which saves both factors, ``x`` is needed for the gradient of
``gamma`` alone: its errors enter no other gradient, and those of many rows cancel, as in a linear layer. So it may have
fewer bits than what the input gradient is computed from. Which of the two comes first depends on the operation, and a
norm saves a weight and its input too, but also statistics. Hence a tensor waits, as it is, until the next operation
saves something, one of this package's functions is called or the module ends; then the operation saved *two tensors, of
which one is a parameter of fewer values* or it did not. Those that do are products, quotients and convolutions, but for
``prelu`` (see ``few_bit_saving``) and the rare ``maximum``, ``hypot`` or ``atan2`` with a parameter. A loss of the
distance from a parameter has as many values of each.

Of fused attention, query, key and value are stored, which it saves first, not a learned bias: where that is to mask,
it is minus infinity, or as good as that.

What is written to while it waits is an error in backward, as without hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.held import Dense, FewBits, FewBitView, Hooks
from lightning_actprune.ops.layout import Layout
from lightning_actprune.ops.unseen import open_hooks

_autograd: Any = torch._C._autograd
Store = Callable[[Tensor, Layout, str, "Hooks | None", str], FewBits]
"""Returns a tensor in few bits, in a format, for hooks around and the name of the module that ran."""


class SavedOperation:
    """The operation that is saving its tensors.

    Args:
        store: Stores a tensor.
        value_format: Format of what an input gradient may need.
        parameter_format: Format of what a parameter's gradient needs alone.
    """

    __slots__ = ("_count", "_formats", "_number", "_parameters", "_store", "_values", "_waiting", "is_attention")

    def __init__(self, store: Store, value_format: str, parameter_format: str) -> None:
        self._store, self._formats = store, (value_format, parameter_format)
        self._waiting: list[tuple[FewBitView, Tensor, Layout, int, int, Hooks | None]] = []
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

    def put_off(self, view: FewBitView, tensor: Tensor, layout: Layout, outer: Hooks | None) -> None:
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
                view.stored = Dense(tensor, None, version)
                continue
            if self.is_attention and place >= 3:
                view.stored = Dense(tensor, outer)
                continue
            with _on_stream(tensor, stream):
                value_format = self._formats[alone and tensor.numel() > self._values]
                view.stored = self._store(tensor, layout, value_format, outer, view.fqn)


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
