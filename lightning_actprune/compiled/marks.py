r"""What a converted layer tells the compiler of the tensor that its backward reads.

A compiled layer runs its dense forward. On the tensor that its backward reads, the input of a linear layer, say, it
puts a *mark* while it is traced::

    y = F.linear(marked(x, keep), weight, bias)

``torch.ops.actprune.mark`` is the identity, and so is its gradient. Its text says how the layer is kept, and what goes
for the whole model (``Mark``). The pass over the joint graph (``compiled.joint_pass``) reads the marks and takes every
one of them out: compiled code has none. Where nobody runs the pass, a mark is a copy.

The text is a constant to the compiler, so it is part of what compilations are known by, in memory and in the caches on
disk. It should be the same for layers that are the same: blocks that are compiled one by one share a compilation only
then. ``general_name`` makes such a name of that of a layer.

Where gradients are averaged over processes, a compiler cuts its graph right before a weight that fills a bucket of
them, and the mark lies in the piece before. So there linear layers and convolutions say once more, behind it, what they
have read::

    y = ended(F.linear(marked(x, keep), weight, bias), x, keep)

which is the identity of its first argument. The pass puts the mark on ``x`` where that is an input of the piece.

The sparsity is no part of the text but an argument, in the parts of ``codec.blocks.sparsity_parts``: a schedule changes
it, and to the compiler it may be a symbol.
"""

from __future__ import annotations

import functools
import json
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lightning_actprune.codec.packed import LIBRARY, TAGS
from lightning_actprune.codec.saved_ops import Policy

RECOMPUTE = "recompute"
HALF = 16
"""Bits of an input of such a module that is rounded to bfloat16 alone."""


@dataclass(frozen=True)
class Model(Policy):
    """How what no layer is known for is kept, the same for all marks of a model.

    Args:
        block_size: Values per block of all these.
        min_values: Tensors of fewer values are left alone, whoever reads them.
        unmarked_layers: Whether ``saved`` goes for the inputs of layers without a mark, too.
    """

    block_size: int = 32
    min_values: int = 2**16
    unmarked_layers: bool = False


@dataclass(frozen=True)
class Mark:
    """How a layer keeps the tensor that it marks.

    Args:
        operator: What the layer is (``config.Operator``), or ``RECOMPUTE`` for a module that runs again in backward.
        name: What reports call it, the same for layers that are to share a compilation.
        bits: Bits of a stored value, 0 for values as they are.
        block_size: Values per block.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        selection: Which blocks are kept.
        model: What goes for the whole model.

    Example:
        >>> mark = Mark("linear", "blocks.*.fc1", 4, model=Model(saved=8))
        >>> Mark.read(mark.text) == mark
        True
    """

    operator: str
    name: str
    bits: int
    block_size: int = 32
    scope: str = "sample"
    selection: str = "largest"
    model: Model = Model()

    @functools.cached_property
    def text(self) -> str:
        """The mark as the operator takes it."""
        return json.dumps(astuple(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def read(text: str) -> Mark:
        """Return the mark with that text."""
        operator, name, bits, block_size, scope, selection, model = json.loads(text)
        model = dict(zip(Model.__dataclass_fields__, model, strict=True))
        model["operations"] = tuple(map(tuple, model["operations"]))
        return Mark(operator, name, bits, block_size, scope, selection, Model(**model))


def general_name(fqn: str) -> str:
    """Return the name of a layer without its numbers.

    Example:
        >>> general_name("blocks.11.mlp.fc1")
        'blocks.*.mlp.fc1'
    """
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def marked(x: Tensor, text: str, parts: int = 0) -> Tensor:
    """Return ``x``, of which a compiler knows how it is to be kept for the layer that reads it.

    To be called while a compiler traces, where backward reads ``x``. What has no memory of its own for each value, as
    an expanded tensor has not, is returned without a mark, as are parameters and what has no fractions.

    Args:
        x: What the layer reads.
        text: That of its ``Mark``.
        parts: Its sparsity, see ``codec.blocks.sparsity_parts``.
    """
    if not x.is_floating_point() or 0 in x.stride() or isinstance(x, nn.Parameter):
        return x
    read: Tensor = torch.ops.actprune.mark(x, text, parts)
    return read


def ended(y: Tensor, x: Tensor, text: str, parts: int = 0) -> Tensor:
    """Return ``y``, of which a compiler knows that a layer has made it of ``x``, which it was to keep like that.

    Args:
        y: What the layer returns.
        x: What ``marked`` has returned.
        text: That of the layer's ``Mark``.
        parts: Its sparsity.
    """
    if isinstance(x, nn.Parameter) or not x.is_floating_point() or 0 in x.stride() or 0 in y.stride():
        return y  # of an input without a mark, as marked() returns it, or an output that has no memory of its own
    made: Tensor = torch.ops.actprune.ended(y, x, text, parts)
    return made


def left_marks() -> int:
    """Return how many marks have been computed so far, each a copy: those that no pass has taken out of their graph."""
    return _left[0]


_left = [0]


def _mark(x: Tensor, keep: str, parts: int = 0) -> Tensor:
    _left[0] += 1
    # With the strides of x, whatever they are: operations that follow are traced on these, and will get x itself.
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _copied(y: Tensor, x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device).copy_(y)


LIBRARY.define("mark(Tensor x, str keep, SymInt parts=0) -> Tensor", tags=TAGS)
LIBRARY.impl("mark", _mark, "CompositeExplicitAutograd")
LIBRARY.define("ended(Tensor y, Tensor x, str keep, SymInt parts=0) -> Tensor", tags=TAGS)
LIBRARY.impl("ended", _copied, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::mark", lib=LIBRARY)
def _mark_fake(x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@torch.library.register_fake("actprune::ended", lib=LIBRARY)
def _ended_fake(y: Tensor, x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


def _gradient_of_ended(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


torch.library.register_autograd("actprune::mark", _gradient, lib=LIBRARY)
torch.library.register_autograd("actprune::ended", _gradient_of_ended, lib=LIBRARY)


@register_sharding(torch.ops.actprune.mark.default)
def _mark_sharding(x: Any, keep: str, parts: int = 0) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Return how a DTensor may lie that is marked: as it does."""
    lie = [Replicate(), Partial(), *map(Shard, range(x.ndim))]
    return [([placement], [placement, None, None]) for placement in lie]
