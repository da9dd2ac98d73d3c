"""Which operation saves a tensor: it is found once the module around returns, and decided for good for its site.

Hooks are given a tensor, and not told for whom. The operation's node is in the graph, though, once the module around
returns: its number is known when it saves, since autograd numbers nodes in order, and it is found by that number behind
the module's outputs. So what a *site* saves (an instruction in the code of a module, and how many tensors the operation
has saved before) waits, as it is, in the first forward, until the module returns. Then it is decided how what this site
saves is kept, for good, also after a checkpoint (``Decided``). In backward, the node that reads a packed tensor is
asked for its name: if another operation has come to the site meanwhile, and may not read it, that is an error. What is
not found (the graph of an output that nobody can see) stays as it is. What is written to while it waits is an error in
backward, as without hooks.

The number also tells an operation's *results* from its inputs: its node is made before it saves anything, so it is the
newest one of its thread, and that of an input is older.

Who saves which small tensors is noted, and where the inverse of a parameter is a factor: by that the learned step of a
quantization is known (``codec.saved_ops.is_step``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_actprune.codec.private import get_sequence_nr, raw_stream
from lightning_actprune.codec.saved_ops import Kind, is_step, nodes_of, of_node
from lightning_actprune.operators.readers import nodes_since
from lightning_actprune.operators.regions import Hooks, Layout, QuantizedView, Unchanged

MOST_SHARED = 2**16
"""Values of a tensor below which it is noted who else saves it."""
_QUOTIENT = -1
"""Stands for the number of the operation that has inverted a parameter."""
_QUOTIENTS = nodes_of(Kind.QUOTIENT)
MAX_STEPS = 8
"""Views, casts and the like of a parameter that are followed back, of several tensors the first."""


def is_own_result(tensor: Tensor) -> bool:
    """Return whether the operation that is saving ``tensor``, which has a history, has computed it.

    Its node was made before anything is saved, with the highest number so far; those of its inputs have lower ones. Of
    operations that make several nodes before they save (``torch._foreach_exp``), only the last result is known.
    """
    node = tensor.grad_fn
    assert node is not None
    number = node._sequence_nr()  # first: of a view whose base was written to, this makes the node
    return bool(number == get_sequence_nr() - 1)


def _parameters_behind(tensor: Tensor) -> tuple[list[Tensor], bool]:
    """Return the parameters from which alone ``tensor`` is computed, and whether it is by a quotient."""
    if isinstance(tensor, nn.Parameter):
        return [tensor], False
    inverse, leaves, waiting = False, list[Tensor](), [tensor.grad_fn]
    for _ in range(MAX_STEPS):
        if not waiting:
            break
        node: Any = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            leaves.append(leaf)
        elif node is None or not node.next_functions:
            return [], False
        inverse |= node.name() in _QUOTIENTS or (node.name() == "PowBackward0" and node._saved_exponent < 0)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return ([], False) if waiting else (leaves, inverse)


class Site(NamedTuple):
    """Where something is saved.

    Args:
        fqn: Name of the module that runs.
        code: The code that calls the operation.
        instruction: The instruction in it.
        place: How many tensors the operation has saved before.
    """

    fqn: str
    code: CodeType
    instruction: int
    place: int

    @property
    def described(self) -> str:
        """The same in another process, as long as the code and the version of torch are the same."""
        code = self.code
        same = torch.__version__, code.co_code, code.co_names, code.co_firstlineno
        return f"{self.fqn}: {code.co_name} {zlib.crc32(repr(same).encode()):08x} +{self.instruction} #{self.place}"


class Decision(NamedTuple):
    """How what a site saves is kept.

    Args:
        bits: Bits of a value, 0 for the tensor as it is.
        operation: Name of the operation.
        reason: Why it is kept as it is, ``""`` if it is not.
    """

    bits: int
    operation: str
    reason: str = ""


@dataclass
class Decided:
    """What is known of a model's sites, in primitives: a resumed training goes on with it.

    Args:
        sites: The decision for each site, as it is described.
        settled: Names of the outermost modules of scopes in which nothing was undecided the last time.
        before: The decisions that were made before a checkpoint.
    """

    sites: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    before: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return it fit for a checkpoint."""
        return {"sites": {site: list(known) for site, known in self.sites.items()}, "settled": sorted(self.settled)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what ``state_dict`` has returned."""
        self.before = {site: (bits, operation, reason) for site, (bits, operation, reason) in state["sites"].items()}
        self.sites |= self.before
        self.settled |= set(state["settled"])


@dataclass
class Saving:
    """An operation that saves tensors.

    Args:
        number: Of its node.
        count: How many it has saved.
        parameters: Values of the parameters among them.
        small: Addresses of the storages of the small tensors among them that need a gradient, with their values.
    """

    number: int
    count: int = 0
    parameters: list[int] = field(default_factory=list)
    small: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Waiting:
    """A tensor that waits for its operation to be known.

    Args:
        site: Where it was saved.
        saving: By whom.
        view: What the graph holds.
        tensor: The tensor.
        layout: How it is read.
        version: Its version.
        stream: Number of the stream on which it was saved.
        outer: The hooks around.
        depth: How many modules run, of those whose outputs may lead to the operation.
    """

    site: Site
    saving: Saving
    view: QuantizedView
    tensor: Tensor
    layout: Layout
    version: int
    stream: int
    outer: Hooks | None
    depth: int

    @property
    def is_result(self) -> bool:
        """Whether its operation has computed it."""
        node = self.tensor.grad_fn
        return node is not None and node._sequence_nr() == self.saving.number


class Operations:
    """What the operations of an open scope save.

    Args:
        store: Keeps what waits, given the nodes that were found by their numbers.
        watched: Whether it is noted which operations share small tensors, for new sites to be decided.
        checked: Whether outliers are looked for again.
    """

    def __init__(
        self, store: Callable[[Waiting, Mapping[int, Any], Operations], None], watched: bool, checked: bool
    ) -> None:
        self._store, self.watched, self.checked = store, watched, checked
        self._saving = Saving(-1)
        self._users: dict[int, set[int]] = {}
        self._waiting: list[Waiting] = []
        self.undecided = False
        """Whether something was saved at a site of which it was not known how."""

    def saves(self, tensor: Tensor) -> Saving:
        """Take note that an operation saves ``tensor``, and return it."""
        number = get_sequence_nr() - 1
        if number != self._saving.number:
            self._saving = Saving(number)
        saving = self._saving
        saving.count += 1
        if not self.watched or not tensor.requires_grad:
            return saving
        parameters, is_inverse = _parameters_behind(tensor)
        if parameters:
            saving.parameters.append(tensor.numel())
        if tensor.numel() < MOST_SHARED and (tensor.grad_fn is None or not is_own_result(tensor)):
            address = tensor.untyped_storage()._cdata
            saving.small.append((address, tensor.numel()))
            self._users.setdefault(address, set()).add(number)
            for step in (tensor, *parameters) if is_inverse else ():
                self._users.setdefault(step.untyped_storage()._cdata, set()).add(_QUOTIENT)
        return saving

    def wait(
        self, site: Site, view: QuantizedView, tensor: Tensor, layout: Layout, outer: Hooks | None, depth: int
    ) -> None:
        """Let ``tensor`` wait, as it is, until its operation is known."""
        self.undecided = True
        stay = Waiting(site, self._saving, view, tensor, layout, tensor._version, _stream(tensor), outer, depth)
        view.settle = partial(self._leave_as_it_is, stay)
        self._waiting.append(stay)

    def shares(self, stay: Waiting, nodes: Mapping[int, Any]) -> bool:
        """Return whether the factor with which what waits is multiplied may be the step of a quantization."""
        for address, values in stay.saving.small:
            numbers = self._users[address] - {_QUOTIENT}
            savers = (of_node(nodes[number].name()) if number in nodes else None for number in numbers)
            if is_step(stay.tensor.numel(), values, savers, _QUOTIENT in self._users[address]):
                return True
        return False

    def returned(self, outputs: Any, depth: int, left: Callable[[], Any] = tuple) -> None:
        """Keep what waits and whose operation is found behind the outputs of a module.

        Args:
            outputs: What the module returned.
            depth: How many modules run still; with none, all that waits is kept.
            left: Returns where else modules may have left outputs, such as their attributes; asked with none running.
        """
        inside = [stay for stay in self._waiting if stay.depth > depth and stay.view.settle is not None]
        # What the graph holds has these hooks, and so this object: a tensor that stayed here would keep its own graph.
        self._waiting = [stay for stay in self._waiting if stay.depth <= depth]
        if not inside:
            return
        first = min(stay.saving.number for stay in inside)
        nodes = nodes_since(outputs, first)
        if not depth and any(stay.saving.number not in nodes for stay in inside):
            nodes |= nodes_since(left(), first)
        for stay in inside:
            node = nodes.get(stay.saving.number)
            if node is None and depth:
                stay.depth = depth  # the module around may return what this one has not
                self._waiting.append(stay)
                continue
            stay.view.settle = None
            with _on_stream(stay.tensor, stay.stream):
                self._store(stay, nodes, self)

    def interrupted(self) -> None:
        """Keep all that waits as it is: the next forward decides."""
        waiting, self._waiting = self._waiting, []
        for stay in waiting:
            if stay.view.settle is not None:
                self._leave_as_it_is(stay)

    def _leave_as_it_is(self, stay: Waiting) -> None:
        """Keep what is read before its module returns."""
        stay.view.settle = None
        stay.view.stored = Unchanged(stay.tensor, stay.outer, stay.version)


def _stream(tensor: Tensor) -> int:
    """Return the number of the current stream, 0 without a GPU."""
    return raw_stream(tensor.device.index) if tensor.is_cuda else 0


def _on_stream(tensor: Tensor, stream: int) -> AbstractContextManager[Any]:
    """Return a context in which ``stream``, on which ``tensor`` was saved, is the current one."""
    if _stream(tensor) == stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, tensor.device))  # type: ignore[no-untyped-call]
