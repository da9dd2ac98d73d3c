r"""Let modules of ``Recompute`` run again in backward of a joint graph, from packed inputs.

While a compiler traces such a module, it sees torch's activation checkpoint around the dense module, whose inputs are
marked outside of it. In the joint graph, the module's nodes then carry the checkpoint's tag, with which the partitioner
would compute them again from the unpacked inputs::

    x -> mark -> [ h = f(mark) ] -> y = g(h)            backward reads h

Here the copies are made before the partitioner runs. In backward, each begins with a second mark::

    x -> mark' -> [ h' = f(mark') ]                     backward reads h'

So a module's input is a value that backward reads, like any other, and its mark says how it is packed. The module's
outputs are not computed again: their readers decide how they are kept. Where all readers are marked, the module's own
reads of an output use the copy.

Indices that ``topk`` and ``argmax`` have chosen, such as the experts of a token, are saved: from inputs of few bits
they may be others. Values of ``topk`` are gathered at them.

Random numbers of the second run are those of the first: inductor draws from seeds, which are saved. Other random
operations, such as attention with dropout, are saved unpacked.

A module that reads a buffer and writes to it runs once in compiled code (``run_once_if_written``). In eager code its
second run starts with the buffers of the first (``operators.second_run``), but a compiler reads them in backward as
they are by then.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from lightning_actprune.codec.private import (
    checkpoint_bodies,
    checkpoint_number,
    set_checkpoint_policy,
    traced_value,
)
from lightning_actprune.compiled.graphs import (
    FORWARD,
    GETITEM,
    MARK,
    NOT_IN_FORWARD,
    Joint,
    Writer,
    after,
    closure,
    first_input,
    force_save,
    is_size,
    name_of,
    path,
    read_mark,
    runs_again,
    source_of,
    value_of,
)
from lightning_actprune.compiled.marks import RECOMPUTE
from lightning_actprune.config import HALF

_SEEDS = "prims.inductor_seeds"
"""Inductor's seeds of all random numbers of a graph."""
_alias = torch.ops.aten.alias.default

# === While a compiler traces ==========================================================================


def run_once_if_written(state: Any) -> None:
    """Let the module that was traced last run once if it reads a buffer that it writes to, and warn.

    Args:
        state: State of the compiler; the caller has the module's name in its local variable ``name``.
    """
    ops = torch.ops.higher_order
    checkpoints = [node for node in state.graph().nodes if node.target is ops.tag_activation_checkpoint]
    if not checkpoints:
        return
    body, *arguments = checkpoints[-1].args
    inner_inputs = [node for node in checkpoint_bodies(state)[body.target].graph.nodes if node.op == "placeholder"]
    if any(_is_written(outer) and _is_read(inner) for outer, inner in zip(arguments, inner_inputs, strict=True)):
        checkpoints[-1].target, checkpoints[-1].kwargs = ops.wrap, {}
        name = state.get_local("name", stacklevel=1).as_python_constant()
        warnings.warn(
            f"Module {name!r} reads a buffer that it writes to: in compiled code it runs once, and keeps what a dense "
            "one does. HINT: do not compile it, or give it a rule of `None` and its layers rules of their own.",
            stacklevel=2,
        )


def _is_written(node: Any) -> bool:
    """Return True for a graph input that was written to."""
    is_input = isinstance(node, Node) and node.op == "placeholder"
    return is_input and getattr(traced_value(node), "_version", 0) > 0


def _is_read(node: Node) -> bool:
    """Return True if a result depends on a tensor; writes to it do not count, nor those of a batch norm."""
    for user in node.users:
        if user.op == "call_function" and user.target is F.batch_norm:
            continue
        writes = user.op == "call_method" and str(user.target).endswith("_") and user.args[:1] == (node,)
        if not writes or node in (*user.args[1:], *user.kwargs.values()) or _is_read(user):
            return True
    return False


# === In the joint graph ===============================================================================


def run_again(joint: Joint) -> bool:
    """Let backward read copies of what recomputed modules compute, and return True if the graph has changed."""
    inputs = {node for node in joint.forward if name_of(node) == MARK and read_mark(node).operator == RECOMPUTE}
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
    """Remove all marks from a graph.

    Copies from an unpacked input begin with an alias in place of the mark. Else they would equal nodes of forward, and
    the compiler would merge them.
    """
    writer = Writer(joint.graph)
    for mark in [node for node in joint.graph.nodes if name_of(node) == MARK]:
        node = first_input(mark)
        if read_mark(mark).operator == RECOMPUTE and mark not in joint.forward:
            with writer.before(mark, NOT_IN_FORWARD):
                node = writer.call(_alias, node)
        mark.replace_all_uses_with(node)
        joint.graph.erase_node(mark)


def _repeatable(joint: Joint, inputs: set[Node], seeds: set[Node]) -> set[Node]:
    """Return the nodes to compute again from ``inputs`` and ``seeds``, and remove the tags of their checkpoints.

    With the tags, the partitioner would save all inputs of a checkpoint, even those that backward does not read.
    """
    tagged = [node for node in joint.graph.nodes if node in joint.forward and runs_again(node)]
    from_inputs, from_seeds = (closure(joint.graph.nodes, of.__contains__) for of in (inputs, seeds))
    numbers = {checkpoint_number(node) for node in tagged if node in from_inputs}
    region = {node: number for node in tagged if (number := checkpoint_number(node)) in numbers}
    repeatable = set[Node]()
    for node, number in region.items():
        users = (user for user in node.users if user.op == "output" or user in joint.forward)
        outside = [user for user in users if region.get(user) != number]
        can_copy = (node in from_inputs or node in from_seeds) and all("val" in of.meta for of in node.all_input_nodes)
        if name_of(node) == MARK and first_input(node) not in repeatable and first_input(node) not in inputs:
            continue  # of a saved value, such as a result of dropout, which the layer packs as elsewhere
        if can_copy and not (_draws(node) or _chooses(node)) and all(name_of(user) == MARK for user in outside):
            repeatable.add(node)
    # The input of a module may be the output of one that keeps its tags because none of its inputs has a gradient.
    untagged = {on for mark in inputs for on in path(mark, source_of(mark))}
    for node in joint.graph.nodes:
        if checkpoint_number(node) in numbers or node in untagged:
            set_checkpoint_policy(node, None)
    return repeatable


def _draws(node: Node) -> bool:
    """Return True if a node draws random numbers, or is a result of a node that does."""
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


def _chooses(node: Node) -> bool:
    """Return True if a node is the indices that an operation has chosen."""
    return name_of(node) == "aten.argmax" or (_is_of_topk(node) and node.args[1:] == (1,))


def _is_of_topk(node: Node) -> bool:
    return name_of(node) == GETITEM and name_of(first_input(node)) == "aten.topk"


class _Copies:
    """Copies of forward nodes in backward.

    Args:
        joint: The graph.
        inputs: The first nodes of the copies: marks of modules' inputs, and seeds.
        repeatable: The other nodes that may be copied.
    """

    def __init__(self, joint: Joint, inputs: set[Node], repeatable: set[Node]) -> None:
        self._joint, self._inputs, self._repeatable = joint, inputs, repeatable
        self._writer = Writer(joint.graph)
        self._copy_of: dict[Node, Node] = {}

    def has(self, node: Node) -> bool:
        """Return True if a node has a copy."""
        return node in self._repeatable or (node in self._inputs and name_of(node) == MARK)

    def of(self, node: Node, reader: Node) -> Node:
        """Return the copy of a node; new copies, of it and of all that it depends on, are inserted before ``reader``.

        Readers must come in the order of the graph.
        """
        missing, stack = set[Node](), [node]
        while stack:
            original = stack.pop()
            if original not in self._copy_of and original not in missing:
                if original in self._repeatable:
                    stack += original.all_input_nodes
                elif original not in self._inputs:
                    continue
                missing.add(original)
        for original in sorted(missing, key=self._joint.order.__getitem__):
            half = self._half(original)
            with self._writer.before(reader, NOT_IN_FORWARD):
                copy = self._copy(original) if half is None else self._writer.cast(half, torch.float32)
            self._copy_of[original] = copy
        return self._copy_of[node]

    def _copy(self, node: Node) -> Node:
        if name_of(node) == _SEEDS:
            return self._writer.call(_alias, node)
        if name_of(node) == MARK and node not in self._inputs:  # of a layer in the module, which saves nothing
            return self._copy_of[first_input(node)]
        if _is_of_topk(node):
            topk = first_input(node)
            indices = next((user for user in topk.users if _chooses(user)), None)
            if indices is not None:
                dim = topk.args[2] if len(topk.args) > 2 else -1
                return self._writer.call(torch.ops.aten.gather.default, self._copy_of[first_input(topk)], dim, indices)
        return self._writer.copy(node, self._copy_of)

    def _half(self, mark: Node) -> Node | None:
        """Return an input in bfloat16 if that is how it is kept, else ``None``."""
        if mark not in self._inputs or name_of(mark) != MARK or read_mark(mark).bits != HALF:
            return None
        node = first_input(mark)
        if value_of(node).dtype != torch.float32:
            return None
        with self._writer.before(after(node), FORWARD):
            half = self._writer.cast(node, torch.bfloat16)
        force_save(half)
        return half
