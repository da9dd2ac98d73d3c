"""Compilers for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch._inductor.compile_fx import compile_fx


def planned(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile as inductor does, but run its graphs operation by operation: generating code takes 9/10 of the time."""
    return compile_fx(module, inputs, inner_compile=lambda graph, inputs, **_: make_boxed_func(graph.forward))


@contextmanager
def uncached() -> Iterator[None]:
    """Take no graph from a cache, where a pass would not see it; cached C++ stays, unlike with force_disable_caches."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
    ):
        yield
