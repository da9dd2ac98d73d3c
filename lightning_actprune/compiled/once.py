"""Modules that a compiler is to run again in backward, and that have to run once.

In eager code the second run of a module gets the buffers that its first run began with (``operators.second_run``). A
compiler reads them in backward as they are by then. So a module that reads a buffer and writes to it runs once there.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from lightning_actprune.codec.private import bodies_of


def run_once_if_written(state: Any) -> None:
    """Let the module that was traced last run once if it reads a buffer that it writes to; warn of it by its name.

    Args:
        state: Of the compiler; the name of the module is a local variable ``name`` where it is asked for.
    """
    ops = torch.ops.higher_order
    checkpoints = [node for node in state.graph().nodes if node.target is ops.tag_activation_checkpoint]
    if not checkpoints:
        return
    body, *given = checkpoints[-1].args
    inside = [node for node in bodies_of(state)[body.target].graph.nodes if node.op == "placeholder"]
    if any(_is_written(outer) and _is_read(inner) for outer, inner in zip(given, inside, strict=True)):
        checkpoints[-1].target, checkpoints[-1].kwargs = ops.wrap, {}
        name = state.get_local("name", stacklevel=1).as_python_constant()
        warnings.warn(
            f"Module {name!r} reads a buffer that it writes to: in compiled code it runs once, and keeps what a dense "
            "one does. HINT: do not compile it, or give it a rule of `None` and its layers rules of their own.",
            stacklevel=2,
        )


def _is_written(node: Any) -> bool:
    """Return whether an input of the graph has been written to."""
    is_input = isinstance(node, Node) and node.op == "placeholder"
    return is_input and getattr(node.meta["example_value"], "_version", 0) > 0


def _is_read(node: Node) -> bool:
    """Return whether anything depends on a tensor but what is written to it; a batch norm that writes does not read."""
    for user in node.users:
        if user.op == "call_function" and user.target is F.batch_norm:
            continue
        writes = user.op == "call_method" and str(user.target).endswith("_") and user.args[:1] == (node,)
        if not writes or node in (*user.args[1:], *user.kwargs.values()) or _is_read(user):
            return True
    return False
