r"""Mark the inputs of converted layers in a compiler's graph.

While a compiler traces it, a converted layer runs its dense forward, and puts a *mark* on the tensor that its backward
reads, such as the input of a linear layer::

    y = F.linear(mark_input(x, text), weight, bias)

``torch.ops.actprune.mark`` is the identity, and so is its gradient. Its text says how to store the tensor, and has the
settings of the whole model (``Mark``). The pass over the joint graph (``compiled.joint_pass``) reads all marks and
removes them. If the pass does not run, a mark is a copy.

The text is a constant of the graph and part of the cache keys of compilations, in memory and on disk. So equal layers
should have equal texts: only then do blocks that are compiled one by one share a compilation. ``general_name`` removes
the numbers from a layer's name.

For DDP, a compiler cuts its graph right before the weight that fills a bucket of gradients, and the mark is in the
piece before. So linear layers and convolutions mark their output, too::

    y = mark_output(F.linear(mark_input(x, text), weight, bias), x, text)

This is the identity of its first argument. The pass moves the mark to ``x`` if that is an input of the piece.

The sparsity is an argument and no part of the text, in the parts of ``codec.blocks.sparsity_parts``: a schedule changes
it, and it may be a symbol in the graph.
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


@dataclass(frozen=True)
class Model(Policy):
    """How to store tensors without a mark, equal in all marks of a model.

    Args:
        block_size: Values per block.
        min_values: Tensors with fewer values stay uncompressed, with and without a mark.
        unmarked_layers: Whether ``saved`` goes for the inputs of layers without a mark, too.
        offload: Whether packed tensors without a mark wait for backward in the memory of the host.
    """

    block_size: int = 32
    min_values: int = 2**16
    unmarked_layers: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Mark:
    """How to store the tensor that a layer marks.

    Args:
        operator: The layer's operator (``config.Operator``), or ``RECOMPUTE`` for a module that runs again in backward.
        name: Its name in reports, equal for layers that share a compilation.
        bits: Bits of a stored value, 0 for uncompressed values.
        block_size: Values per block.
        topk_over: Whether blocks compete within a ``"sample"`` or a ``"token"``.
        selection: How blocks are selected.
        offload: Whether the packed tensor waits for backward in the memory of the host.
        model: The settings of the whole model.

    Example:
        >>> mark = Mark("linear", "blocks.*.fc1", 4, model=Model(saved=8))
        >>> Mark.read(mark.text) == mark
        True
    """

    operator: str
    name: str
    bits: int
    block_size: int = 32
    topk_over: str = "sample"
    selection: str = "largest"
    offload: bool = False
    model: Model = Model()

    @functools.cached_property
    def text(self) -> str:
        """The mark as a string, the argument of the operator."""
        return json.dumps(astuple(self), separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def read(text: str) -> Mark:
        """Return the mark with this text."""
        operator, name, bits, block_size, topk_over, selection, offload, model = json.loads(text)
        model = dict(zip(Model.__dataclass_fields__, model, strict=True))
        model["operations"] = tuple(map(tuple, model["operations"]))
        return Mark(operator, name, bits, block_size, topk_over, selection, offload, Model(**model))


def general_name(fqn: str) -> str:
    """Return the name of a layer without its numbers.

    Example:
        >>> general_name("blocks.11.mlp.fc1")
        'blocks.*.mlp.fc1'
    """
    return ".".join("*" if part.isdigit() else part for part in fqn.split("."))


def mark_input(x: Tensor, text: str, parts: int = 0) -> Tensor:
    """Return ``x`` with a mark that says how to store it for backward; call it while a compiler traces a layer.

    Parameters, expanded tensors and tensors of integers get no mark.

    Args:
        x: The tensor that the layer's backward reads.
        text: The text of the layer's ``Mark``.
        parts: The layer's sparsity, see ``codec.blocks.sparsity_parts``.
    """
    if not x.is_floating_point() or 0 in x.stride() or isinstance(x, nn.Parameter):
        return x
    output: Tensor = torch.ops.actprune.mark(x, text, parts)
    return output


def mark_output(y: Tensor, x: Tensor, text: str, parts: int = 0) -> Tensor:
    """Return ``y`` with a mark that says how to store ``x``, from which a layer has computed it.

    Args:
        y: The output of the layer.
        x: The result of ``mark_input``.
        text: The text of the layer's ``Mark``.
        parts: The layer's sparsity.
    """
    if isinstance(x, nn.Parameter) or not x.is_floating_point() or 0 in x.stride() or 0 in y.stride():
        return y  # mark_input() has put no mark on x, or y is expanded
    output: Tensor = torch.ops.actprune.mark_output(y, x, text, parts)
    return output


def count_run_marks() -> int:
    """Return how many marks have run so far, each as a copy, since no pass has removed them from their graph."""
    return _run_marks[0]


_run_marks = [0]


def _mark(x: Tensor, keep: str, parts: int = 0) -> Tensor:
    _run_marks[0] += 1
    # The following operations are traced for the strides of x, and read x itself once the pass has removed the mark.
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _mark_output(y: Tensor, x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device).copy_(y)


LIBRARY.define("mark(Tensor x, str keep, SymInt parts=0) -> Tensor", tags=TAGS)
LIBRARY.impl("mark", _mark, "CompositeExplicitAutograd")
LIBRARY.define("mark_output(Tensor y, Tensor x, str keep, SymInt parts=0) -> Tensor", tags=TAGS)
LIBRARY.impl("mark_output", _mark_output, "CompositeExplicitAutograd")


@torch.library.register_fake("actprune::mark", lib=LIBRARY)
def _mark_fake(x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@torch.library.register_fake("actprune::mark_output", lib=LIBRARY)
def _mark_output_fake(y: Tensor, x: Tensor, keep: str, parts: int = 0) -> Tensor:
    return torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)


torch.library.register_autograd("actprune::mark", lambda ctx, grad: (grad, None, None), lib=LIBRARY)
torch.library.register_autograd("actprune::mark_output", lambda ctx, grad: (grad, None, None, None), lib=LIBRARY)


@register_sharding(torch.ops.actprune.mark.default)
def _mark_sharding(x: Any, keep: str, parts: int = 0) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Return the placements of a DTensor for which marking it moves nothing: all of them."""
    placements = [Replicate(), Partial(), *map(Shard, range(x.ndim))]
    return [([placement], [placement, None, None]) for placement in placements]
