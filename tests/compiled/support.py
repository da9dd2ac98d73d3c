"""Models whose layers mark what their backward reads, compilers for them, and what they do when they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from lightning_actprune.compiled.decision_log import Row
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.marks import Mark, Model, mark_input, mark_output

MODEL = Model(saved=8, query=8, key=8, value=4, attention_out=8, min_values=1024)


class Marked(nn.Module):
    """A layer whose input is marked, by the name of its mark; a dense one without a mark."""

    ends = False
    """Whether it says what it has read once more, behind its parameters."""

    def __init__(self, layer: nn.Module, mark: Mark | None, parts: int = 0) -> None:
        super().__init__()
        self.layer, self.parts = layer, parts
        self.text = None if mark is None else mark.text

    def forward(self, x: Tensor) -> Tensor:
        if self.text is None:
            return self.layer(x)
        x = mark_input(x, self.text, self.parts)
        return mark_output(self.layer(x), x, self.text, self.parts) if self.ends else self.layer(x)


def mark(operator: str, bits: int, model: Model = MODEL, **options: object) -> Mark:
    return Mark(operator, operator, bits, model=model, **options)


class Block(nn.Module):
    """A transformer block with fused attention and a layer scale, which nobody marks."""

    def __init__(self, width: int = 64, heads: int = 2, bits: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Marked(nn.LayerNorm(width), mark("norm", bits))
        self.qkv = Marked(nn.Linear(width, 3 * width), mark("linear", bits))
        self.proj = Marked(nn.Linear(width, width), mark("linear", bits))
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.norm2 = Marked(nn.LayerNorm(width), mark("norm", bits))
        self.fc1 = Marked(nn.Linear(width, 4 * width), mark("linear", bits))
        self.act = Marked(nn.GELU(), mark("activation", bits))
        self.fc2 = Marked(nn.Linear(4 * width, width), mark("linear", bits))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.scale * self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


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


class Scheduled(nn.Module):
    """Two layers, of which the sparsity of the second is the size of a tensor."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.first, self.second = (Marked(nn.Linear(64, 64), mark("linear", 4)) for _ in range(2))
        self.act = Marked(nn.GELU(), mark("activation", 4))
        self.set(parts)

    def set(self, parts: int) -> None:
        self.sparsity = torch.empty(parts, 0, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        self.second.parts = self.sparsity.size(0)
        return self.second(self.act(self.first(x)))


class Result(NamedTuple):
    """What a compiled step computes and keeps."""

    output: Tensor
    grads: dict[str, Tensor]
    kept: list[Tensor]
    rows: list[Row]


def step(
    model: nn.Module, x: Tensor, *, packs: bool = True, backend: Callable | str = "aot_eager", autocast: bool = False
) -> Result:
    """Compile a model afresh, with nothing out of a cache of which no pass would say anything; run it and backward."""
    torch._dynamo.reset()
    with uncached(), CompiledPacking() as packing:
        if not packs:
            packing.close()
        return run(torch.compile(model, backend=backend, fullgraph=True), model, x, packing.rows, autocast)


def run(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, rows: list[Row], autocast: bool) -> Result:
    """Run forward and backward of ``call``, a compiled ``model``."""
    model.zero_grad(set_to_none=True)
    kept: list[Tensor] = []
    own = {p.data_ptr() for p in (*model.parameters(), *model.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own or tensor.numel() == 0:
            kept.append(tensor)
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            output = call(x)
        loss = output.float().square().mean()
    loss.backward()
    grads = {name.replace(".layer.", "."): p.grad.clone() for name, p in model.named_parameters()}
    return Result(output.detach(), grads, [t for t in kept if t.numel() > 0], rows)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def worst_cosine(found: Result, expected: Result) -> float:
    pairs = ((found.grads[name].flatten(), grad.flatten()) for name, grad in expected.grads.items())
    return min(float(F.cosine_similarity(a.double(), b.double(), 0)) for a, b in pairs)
