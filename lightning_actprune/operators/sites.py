"""Which operation saves a tensor: the tensor waits until its operation is known, and is stored as that one bears.

Saved-tensor hooks get a tensor, but not the operation that saves it. The node of the operation can be seen soon after,
though: behind what a later operation saves, or behind what the module returns. Autograd numbers the nodes of a thread
in order, and makes a node before it saves anything, so the newest number at that moment is that of the operation.

No tensor is stored by a guess, then. What takes a look at values or at a whole forward is remembered for the next ones:
outliers, the learned step of a quantization (``codec.saved_ops.is_step``), and the bits that other readers of the same
memory need. It is remembered for a ``Site``, which has the name of the operation and its ordinal in the call of a
module. A new site is judged when its module returns. If a forward skips an operation, ordinals shift: a tensor may then
come to the site of an equal operation nearby, but the most that it can take from there is that it has no outliers, for
which ``operators.saved`` looks again and again.

While sites may be new, all nodes of the scope are looked at: a factor may be a step only if another operation than a
product saves it, or one without a name, so all operations that save it need their names.

A tensor that was selected from another one waits itself, and the other one with it. What is stored is the other one,
from which backward selects again; the site is that of the selected tensor.

A tensor whose operation is not found, since nobody can see its output, stays uncompressed. So does one that is read or
written to while it waits; to read it after it was written to is an error, as without hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_actprune.codec.pack_cache import place_of
from lightning_actprune.codec.private import get_sequence_nr, no_function_modes
from lightning_actprune.codec.saved_ops import Kind, is_step, nodes_of, of_node
from lightning_actprune.operators.containers import tensors_in
from lightning_actprune.operators.readers import nodes_since, operator_name, use_of
from lightning_actprune.operators.regions import Hooks, Layout, QuantizedRegion, Selection, Uncompressed

MOST_SHARED = 2**16
"""Operations that share a tensor are noted if it has fewer values."""
_QUOTIENT = -1
"""Stands for the number of the operation that inverted a parameter."""
_QUOTIENTS = nodes_of(Kind.QUOTIENT)
_NUMBERS = torch.int64, torch.int32
"""Types of numbers of rows. Masks are not held, since hooks around ours may move them."""
PATIENCE = 16
"""Forwards without a new site after which no new ones are expected: some operations run in few forwards."""
MAX_STEPS = 8
"""Views, casts and the like of a parameter that are followed back, of several tensors the first."""


def is_own_result(tensor: Tensor) -> bool:
    """Return whether the operation that is saving ``tensor``, which has a history, computed it.

    Of operations that make several nodes before they save (``torch._foreach_exp``), only the last result is known.
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
    """Where a tensor is saved, in primitives: the same in each forward, and in a training that is resumed.

    Args:
        fqn: Name of the innermost module with hooks that runs.
        ordinal: How many operations saved an activation before, in this call of the module itself.
        node: Name of the operation's node, ``""`` if it was not found.
        use: How its backward uses the tensor.
        place: How many tensors the operation saved before.
        source: Name of the node that computed the tensor.
        dims: Dimensions of the tensor, whose sizes may differ from batch to batch.
        itemsize: Bytes of a value.
    """

    fqn: str
    ordinal: int
    node: str
    use: str
    place: int
    source: str
    dims: int
    itemsize: int

    @property
    def operation(self) -> str:
        """Name of the operation (``"grid_sampler2_d"``), ``"unknown"`` if its node was not found."""
        return operator_name(self.node) or "unknown"


_NOWHERE = Site("", -1, "", "", 0, "", 0, 0)


class Decision(NamedTuple):
    """How a tensor is stored.

    Args:
        bits: Bits of a value, 0 for uncompressed.
        reason: Why it stays uncompressed, ``""`` if it does not.
    """

    bits: int
    reason: str = ""


@dataclass
class SiteDecisions:
    """What is remembered of a model's sites, for a checkpoint in primitives.

    Args:
        sites: The decision for each site.
        quiet: Forwards since the last new site, ``PATIENCE`` at most, by the name of the outermost module.
    """

    sites: dict[Site, Decision] = field(default_factory=dict)
    quiet: dict[str, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"sites": [[*site, *decision] for site, decision in self.sites.items()], "quiet": dict(self.quiet)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self.sites |= {Site(*row[:-2]): Decision(*row[-2:]) for row in state["sites"]}
        self.quiet |= state["quiet"]

    def is_settled(self, outermost: str) -> bool:
        """Return whether no new sites are expected."""
        return self.quiet.get(outermost, 0) >= PATIENCE

    def end(self, outermost: str, has_new_site: bool) -> None:
        """Note that a forward ended, and whether a site was new in it."""
        self.quiet[outermost] = 0 if has_new_site else min(self.quiet.get(outermost, 0) + 1, PATIENCE)


@dataclass(slots=True)
class Saving:
    """An operation that saves tensors.

    Args:
        number: Of its node.
        ordinal: See ``Site``; -1 if it saved no activation.
        count: How many tensors it saved.
        factors: Shapes of those that are no integers, such as the ends of groups.
        parameters: Values of the parameters among them.
        small: Addresses of the storages of the small tensors among them that need a gradient, with their values.
    """

    number: int
    ordinal: int = -1
    count: int = 0
    factors: list[torch.Size] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    small: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SavedActivation:
    """What the graph holds in place of an activation, which waits until the node of its operation is found.

    Args:
        tensor: The activation, until it is stored.
        layout: How it is read.
        saving: The operation.
        place: How many tensors the operation saved before.
        is_result: Whether the operation computed the tensor.
        fqn: Name of the module that ran.
        depth: How many modules run, of those whose outputs may lead to the operation.
        outer: The hooks around.
        selection: Where its rows were selected, if they are to be selected again.
    """

    tensor: Tensor
    layout: Layout
    saving: Saving
    place: int
    is_result: bool
    fqn: str
    depth: int
    outer: Hooks | None
    selection: Selection | None = None
    version: int = field(init=False)
    stream: tuple[int, bool] = field(init=False)
    """The stream on which it was saved, and whether that was recorded."""
    shape: torch.Size = field(init=False)
    site: Site = _NOWHERE
    """Where it was saved, once the node is found."""
    stored: QuantizedRegion | Uncompressed | None = None

    def __post_init__(self) -> None:
        self.version, self.stream, self.shape = self.tensor._version, place_of(self.tensor), self.tensor.shape

    def site_at(self, node: Any) -> Site:
        """Return the site for the node of the operation, ``None`` for one that is not found."""
        name = "" if node is None else node.name()
        use = "" if node is None else use_of(node, self.place, self.is_result).name
        tensor, before = self.tensor, self.tensor.grad_fn  # None if it was detached in place meanwhile
        source = "" if before is None else before.name()
        return Site(self.fqn, self.saving.ordinal, name, use, self.place, source, tensor.dim(), tensor.element_size())

    def store(self, stored: QuantizedRegion | Uncompressed) -> None:
        """Let go of the tensor, and of what it was selected from."""
        self.stored = stored
        if self.selection is not None:
            self.selection = self.selection._replace(source=None)
        # What the graph holds has the hooks, and so what waits: the tensor would keep its own graph.
        del self.tensor

    def leave(self) -> None:
        """Leave the tensor uncompressed."""
        self.store(Uncompressed(self.tensor, self.outer, self.version))

    def unpack(self) -> Tensor:
        """Return the tensor, unpacked anew."""
        if self.stored is None:
            self.leave()
        values = cast(QuantizedRegion | Uncompressed, self.stored).unpack()
        if isinstance(self.stored, Uncompressed):
            return values
        if self.selection is not None:
            return self.selection.select(values)
        return values.as_strided(self.shape, self.layout.dense_strides)


class Operations:
    """The operations of an open scope, and the tensors that wait for them.

    Args:
        store: Stores a tensor by the decision for its site, ``None`` for a new one.
        sites: The decisions.
        is_watched: Whether operations that share small tensors are noted, by which new sites are judged.
        is_checked: Whether outliers are looked for again.
    """

    def __init__(
        self,
        store: Callable[[SavedActivation, Decision | None, Operations], None],
        sites: Mapping[Site, Decision],
        is_watched: bool,
        is_checked: bool,
    ) -> None:
        self._store, self._sites, self.is_watched, self.is_checked = store, sites, is_watched, is_checked
        self._saving, self._first = Saving(-1), get_sequence_nr()
        self._users: dict[int, set[int]] = {}
        self.integers: dict[int, list[tuple[Tensor, int]]] = {}
        """Integers that operations saved, such as numbers of rows, with versions, by the numbers of their nodes."""
        self._waiting: list[SavedActivation] = []
        self._names: dict[int, str] = {}
        """Names of the nodes that were looked at, by their numbers."""
        self.has_new_site = False
        """Whether something was saved at a new site."""

    def saves(self, tensor: Tensor) -> Saving:
        """Note that an operation saves ``tensor``, and return the operation."""
        number = get_sequence_nr() - 1
        if number != self._saving.number:
            self._saving = Saving(number)
        saving = self._saving
        saving.count += 1
        if tensor.is_floating_point():
            saving.factors.append(torch.Size() if tensor.is_nested else tensor.shape)
        elif tensor.dtype in _NUMBERS:
            self.integers.setdefault(number, []).append((tensor, tensor._version))
        if not self.is_watched or not tensor.requires_grad:
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

    def shares(self, stay: SavedActivation) -> bool:
        """Return whether the factor with which the tensor is multiplied may be the step of a quantization."""
        for address, values in stay.saving.small:
            numbers = self._users[address] - {_QUOTIENT}
            savers = (of_node(self._names.get(number, "")) for number in numbers)
            if is_step(stay.tensor.numel(), values, savers, _QUOTIENT in self._users[address]):
                return True
        return False

    def look_behind(self, tensor: Tensor, depth: int, stay: SavedActivation | None) -> None:
        """Store what waits for an operation behind a saved tensor, if its site is known.

        Args:
            tensor: The tensor.
            depth: How many modules run.
            stay: The tensor, if it has to wait itself.
        """
        if stay is not None:
            self._waiting.append(stay)
        if self._waiting and self._find([tensor]):
            self._store_ready(depth)

    def returned(self, outputs: Any, depth: int, left: Callable[[], Any] = tuple) -> None:
        """Store what waits for an operation behind the outputs of a module.

        Args:
            outputs: What the module returned.
            depth: How many modules run still; with none, all that waits is stored.
            left: Returns where else modules may have left outputs, such as their attributes.
        """
        if not self._waiting:
            return
        with no_function_modes():  # which see nothing of what hooks pack inside an operation, either
            self._find(tensors_in(outputs))
            if not depth:
                lost = [stay for stay in self._waiting if stay.site is _NOWHERE]
                if any(stay.site_at(None) not in self._sites for stay in lost):
                    self._find(tensors_in(left()))
                for stay in lost:
                    stay.site = stay.site_at(None) if stay.site is _NOWHERE else stay.site
            self._store_ready(depth)

    def interrupted(self) -> None:
        """Leave all that waits uncompressed: the next forward decides."""
        waiting, self._waiting = self._waiting, []
        for stay in waiting:
            if stay.stored is None:
                stay.leave()

    def _find(self, tensors: Iterable[Tensor]) -> bool:
        """Find nodes of what waits behind tensors; return whether there are any."""
        unknown = [stay for stay in self._waiting if stay.site is _NOWHERE]
        if not unknown:
            return False
        # Who shares a small tensor has to have a name, though nothing may have waited for its node.
        first = self._first if self.is_watched else unknown[0].saving.number
        nodes = nodes_since(tensors, first, self._names)
        matches = [stay for stay in unknown if stay.saving.number in nodes]
        for stay in matches:
            stay.site = stay.site_at(nodes[stay.saving.number])
        return bool(matches)

    def _store_ready(self, depth: int) -> None:
        """Store what waits at a known site, or in a module that returned; of one storage in the order of saving."""
        waiting, self._waiting = self._waiting, []
        held: set[int] = set()
        for stay in waiting:
            if stay.stored is not None:  # it was read meanwhile
                continue
            address = stay.tensor.untyped_storage()._cdata
            decision = self._sites.get(stay.site)
            is_ready = decision is not None or (stay.depth > depth and stay.site is not _NOWHERE)
            if not is_ready or address in held:
                stay.depth = min(stay.depth, depth)  # the module around may return what this one did not
                held.add(address)
                self._waiting.append(stay)
                continue
            if not stay.tensor.is_cuda or stay.stream[0] == place_of(stay.tensor)[0]:
                self._store(stay, decision, self)
            else:
                with torch.cuda.stream(torch.cuda.ExternalStream(stay.stream[0], stay.tensor.device)):  # type: ignore[no-untyped-call]
                    self._store(stay, decision, self)
