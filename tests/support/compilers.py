"""Compilers for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx


def planned(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile as inductor does, but run its graphs of forward and backward operation by operation.

    What it writes of them takes nine tenths of the time, and more than a minute for a few blocks.
    """
    return compile_fx(module, inputs, inner_compile=as_it_is)


def as_it_is(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Return the code that torch made of a graph."""
    return make_boxed_func(graph.forward)


@contextmanager
def uncached() -> Iterator[None]:
    """Let no graph come out of a cache: then a pass would not see it.

    With ``force_disable_caches`` C++ that is there already is compiled anew too, which takes most of the time.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
    ):
        yield
