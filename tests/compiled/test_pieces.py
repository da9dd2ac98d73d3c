"""Graphs that a compiler cuts at parameters, as it does for DDP: what lies between pieces is packed as in one piece."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer

from lightning_actprune.codec.blocks import SPARSITY_PARTS
from lightning_actprune.compiled.install import CompiledPacking
from tests.compiled.support import Block, Marked, Result, Scheduled, mark, nbytes, step, uncached, worst_cosine
from tests.support.conversion_models import Calls
from tests.support.marks import only


def cutting() -> DDPOptimizer:
    """Return what cuts before each parameter."""
    return DDPOptimizer(1, torch._dynamo.lookup_backend("aot_eager"), 1)


def ending(model: nn.Module) -> nn.Module:
    """Let layers say once more what they have read."""
    for layer in model.modules():
        if isinstance(layer, Marked):
            layer.ends = True
    return model


def step_in_pieces(model: nn.Module, x: Tensor) -> tuple[Result, int]:
    """Run a step of a model in pieces, and return their number, too."""
    # They are traced while they run for the first time, so hooks for what is saved would be traced with them.
    torch._dynamo.reset()
    cutter = cutting()
    model.zero_grad(set_to_none=True)
    with uncached(), CompiledPacking() as packing:
        output = torch.compile(model, backend=cutter.compile_fn, fullgraph=True)(x)
        loss = output.square().mean()
    kept = [tensor for tensor in saved(loss) if tensor.data_ptr() not in {p.data_ptr() for p in model.parameters()}]
    loss.backward()
    grads = {name.replace(".layer.", "."): p.grad.clone() for name, p in model.named_parameters()}
    return Result(output.detach(), grads, kept, packing.rows), len(cutter.buckets)


def saved(loss: Tensor) -> list[Tensor]:
    """Return the tensors that compiled code has saved for backward."""
    waiting, seen, found = [loss.grad_fn], set(), {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            found |= {tensor.data_ptr(): tensor for tensor in getattr(node, "saved_tensors", ()) if tensor is not None}
    return list(found.values())


def assert_packed_in_pieces(model: nn.Module, x: Tensor, pieces: int, stay: int = 0, off: float = 0.02) -> Result:
    """Check that nothing large but ``stay`` stays as it is in any piece, and that gradients are as in one piece."""
    dense, whole = step(model, x, packs=False), step(model, x)
    before, _ = step_in_pieces(model, x)
    found, number = step_in_pieces(ending(model), x)
    assert number == pieces
    assert torch.equal(found.output, dense.output)
    assert worst_cosine(found, dense) > worst_cosine(whole, dense) - off
    assert {row.how for row in found.rows} <= {"packed", "again"}
    assert [kept.shape for kept in found.kept if kept.is_floating_point() and kept.numel() >= x.numel()] == stay * [
        x.shape
    ]
    assert nbytes(found.kept) < 0.5 * nbytes(before.kept)
    return found


@pytest.mark.integration
def test_a_transformer_block_in_pieces():
    model, x = Block(), torch.randn(4, 128, 64, requires_grad=True)
    whole, cut = step(model, x), assert_packed_in_pieces(model, x, 7, stay=1)
    # In one piece what linear layers read behind norms and GELU is computed again from what those keep, and what is
    # multiplied by a layer scale, which is no layer, is known to be no weight.
    more = (1 + 1 + 4) * x.numel() // 32 * 18 + x.nbytes
    assert nbytes(whole.kept) <= nbytes(cut.kept) <= nbytes(whole.kept) + more


def flat() -> nn.Module:
    """Return a linear layer that turns its input into a matrix first, so that the cut lies behind that."""
    forward = lambda layer, x: torch.addmm(layer.bias, x.view(-1, 64), layer.weight).view(x.shape)  # noqa: E731
    return Calls(forward, weight=nn.Parameter(torch.randn(64, 64) / 8), bias=nn.Parameter(torch.zeros(64)))


@pytest.mark.integration
@pytest.mark.parametrize("tokens", only([32, 16], 16))  # with 16, 64 rows: the shape of the weight
def test_a_view_of_an_input_may_lie_in_the_piece_before(tokens):
    first, second = (Marked(flat(), mark("linear", 4), SPARSITY_PARTS // 2) for _ in range(2))
    model = nn.Sequential(first, Marked(nn.GELU(), mark("activation", 4)), second)
    cut = assert_packed_in_pieces(model, torch.randn(4, tokens, 64, requires_grad=True), 2)
    stored = [row.stored_bytes for row in cut.rows if row.name == "linear"]
    assert max(stored) < 0.6 * 4 * tokens * 64 // 32 * 18


@pytest.mark.integration
def test_a_schedule_goes_through_the_pieces():
    x = torch.randn(8, 32, 64, requires_grad=True)
    cut = assert_packed_in_pieces(Scheduled(SPARSITY_PARTS // 2), x, 2, off=0.05)  # whole, nothing is dropped
    first, second = (row.stored_bytes for row in cut.rows if row.name == "linear")
    assert 0 < second < 0.6 * first


@pytest.mark.integration
def test_another_batch_size():
    model = ending(nn.Sequential(*(Marked(nn.Linear(64, 64), mark("linear", 8)) for _ in range(3))))
    with CompiledPacking() as packing:
        compiled = torch.compile(model, backend=cutting().compile_fn, dynamic=True)
        for batch in (40, 60, 50):
            x = torch.randn(batch, 32, 64)
            grads = [
                torch.autograd.grad(call(x).square().mean(), list(model.parameters())) for call in (compiled, model)
            ]
            for ours, exact in zip(*grads, strict=True):
                assert torch.cosine_similarity(ours.flatten(), exact.flatten(), 0) > 0.999
    assert {row.how for row in packing.rows} == {"packed"}


def test_without_a_pass_it_is_the_identity():
    layer, x = Marked(nn.Linear(8, 8), mark("linear", 4)), torch.randn(2, 8)
    plain = layer(x)
    layer.ends = True
    assert torch.equal(layer(x), plain)
    torch.autograd.gradcheck(lambda x: layer.double()(x), torch.randn(2, 8, dtype=torch.float64, requires_grad=True))
