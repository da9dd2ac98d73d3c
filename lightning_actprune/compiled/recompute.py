r"""Modules that run again in backward, in a joint graph, from inputs that are packed.

While a compiler traces a module of ``Recompute``, it sees torch's activation checkpoint around the dense module, whose
inputs are marked outside of it. In the joint graph, what the module computes then carries the checkpoint's tag, and the
partitioner would compute it again, from the inputs as they are::

    x -> mark -> [ h = f(mark) ] -> y = g(h)            backward reads h

Here the copies are made before the partitioner comes, and in backward each begins with a second mark of its own::

    x -> mark' -> [ h' = f(mark') ]                     backward reads h'

So an input is a value that backward reads, like any other, and the marks say how it is packed. What leaves the module
is no longer computed again: it is kept as those say who read it. Where all of these have marks, the module's own reads
of it are known to be without, and read the copy.

Random numbers of the second run are those of the first: inductor's come from seeds, which are kept. What draws in
another way, attention with dropout for example, is kept as it is.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from lightning_actprune.compiled.graphs import (
    FORWARD,
    MARK,
    NOT_IN_FORWARD,
    Joint,
    Writer,
    after,
    closure,
    first_input,
    is_size,
    must_be_saved,
    name_of,
    path,
    runs_again,
    source_of,
    value_of,
)
from lightning_actprune.compiled.marks import HALF, RECOMPUTE, Mark

_SEEDS = "prims.inductor_seeds"
"""Inductor's seeds of all random numbers of a graph."""
_alias = torch.ops.aten.alias.default


def run_again(joint: Joint) -> bool:
    """Let backward read copies of what recomputed modules compute, from inputs that it reads itself.

    Returns:
        Whether the graph has changed, so that it has to be looked at anew.
    """
    inputs = {node for node in joint.forward if name_of(node) == MARK and _text(node).operator == RECOMPUTE}
    if not inputs:
        return False
    seeds = {node for node in joint.forward if name_of(node) == _SEEDS}
    copies = _Copies(joint, inputs | seeds, _repeatable(joint, inputs, seeds))
    for reader in list(joint.graph.nodes):
        if reader.op == "call_function" and reader not in joint.forward and not is_size(reader):
            for node in reader.all_input_nodes:
                if copies.has(node):
                    reader.replace_input_with(node, copies.of(node, reader))
    return True


def take_out(joint: Joint) -> None:
    """Take all marks out of a graph.

    Where an input is kept as it is, copies begin with another node in place of the mark: else they would be what
    forward computes, and be taken for it.
    """
    writer = Writer(joint.graph)
    for mark in [node for node in joint.graph.nodes if name_of(node) == MARK]:
        node = first_input(mark)
        if _text(mark).operator == RECOMPUTE and mark not in joint.forward:
            with writer.before(mark, NOT_IN_FORWARD):
                node = writer.call(_alias, node)
        mark.replace_all_uses_with(node)
        joint.graph.erase_node(mark)


def _text(mark: Node) -> Mark:
    return Mark.read(str(mark.args[1]))


def _repeatable(joint: Joint, inputs: set[Node], seeds: set[Node]) -> set[Node]:
    """Return what is to be computed again from ``inputs`` and ``seeds``, and take the tags off their checkpoints.

    The partitioner would keep what goes into those, whether or not backward reads anything of it.
    """
    tagged = [node for node in joint.graph.nodes if node in joint.forward and runs_again(node)]
    given, drawn = (closure(joint.graph.nodes, of.__contains__) for of in (inputs, seeds))
    numbers = {node.meta["ac_graph_id"] for node in tagged if node in given}
    region = {node: number for node in tagged if (number := node.meta["ac_graph_id"]) in numbers}
    repeatable = set[Node]()
    for node, number in region.items():
        users = (user for user in node.users if user.op == "output" or user in joint.forward)
        outside = [user for user in users if region.get(user) != number]
        known = (node in given or node in drawn) and all("val" in of.meta for of in node.all_input_nodes)
        if name_of(node) == MARK and first_input(node) not in repeatable and first_input(node) not in inputs:
            continue  # of what is kept, such as a result of dropout: the layer packs it as elsewhere
        if known and not _draws(node) and all(name_of(user) == MARK for user in outside):
            repeatable.add(node)
    # What goes into a module may come out of one that keeps its tags, since nothing that is given to it has a gradient.
    kept = {on for mark in inputs for on in path(mark, source_of(mark))}
    for node in joint.graph.nodes:
        if node.meta.get("ac_graph_id") in numbers or node in kept:
            node.meta.pop("recompute", None)
    return repeatable


def _draws(node: Node) -> bool:
    """Return whether a node draws random numbers, or is a result of one that does."""
    target = node.target
    if name_of(node) == "getitem":
        return _draws(first_input(node))
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    chance = node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0)
    return not isinstance(chance, int | float) or chance > 0


class _Copies:
    """Copies of forward nodes in backward.

    Args:
        joint: The graph.
        inputs: What they begin with: the marks of what modules are given, and seeds.
        repeatable: What may be copied besides.
    """

    def __init__(self, joint: Joint, inputs: set[Node], repeatable: set[Node]) -> None:
        self._joint, self._inputs, self._repeatable = joint, inputs, repeatable
        self._writer = Writer(joint.graph)
        self._made: dict[Node, Node] = {}

    def has(self, node: Node) -> bool:
        """Return whether there is a copy of a node."""
        return node in self._repeatable or (node in self._inputs and name_of(node) == MARK)

    def of(self, node: Node, reader: Node) -> Node:
        """Return the copy of a node, made with all that it is computed from before ``reader`` unless it is there.

        Readers are to come in the order of the graph.
        """
        missing, waiting = set[Node](), [node]
        while waiting:
            wanted = waiting.pop()
            if wanted not in self._made and wanted not in missing:
                if wanted in self._repeatable:
                    waiting += wanted.all_input_nodes
                elif wanted not in self._inputs:
                    continue
                missing.add(wanted)
        for wanted in sorted(missing, key=self._joint.order.__getitem__):
            half = self._half(wanted)
            with self._writer.before(reader, NOT_IN_FORWARD):
                self._made[wanted] = self._copy(wanted) if half is None else self._writer.cast(half, torch.float32)
        return self._made[node]

    def _copy(self, node: Node) -> Node:
        if name_of(node) == _SEEDS:
            return self._writer.call(_alias, node)
        if name_of(node) == MARK and node not in self._inputs:  # of a layer in the module, which keeps nothing
            return self._made[first_input(node)]
        return self._writer.copy(node, self._made)

    def _half(self, mark: Node) -> Node | None:
        """Return what is kept of an input that is rounded to bfloat16 alone, ``None`` of any other."""
        if mark not in self._inputs or name_of(mark) != MARK or _text(mark).bits != HALF:
            return None
        node = first_input(mark)
        if value_of(node).dtype != torch.float32:
            return None
        with self._writer.before(after(node), FORWARD):
            half = self._writer.cast(node, torch.bfloat16)
        must_be_saved(half)
        return half
