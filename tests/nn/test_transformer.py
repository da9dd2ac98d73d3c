"""torch's transformer layers with everything in them pruned: results, fast paths, few compilations."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune import convert, revert
from lightning_actprune.nn.settings import PrunedLayer
from tests import oracle
from tests.attention import BLOCK, Case, pruned_copy, saved_tensors

N, T, E, HEADS = 3, 6, 72, 4
PADDING = torch.arange(T) >= torch.tensor([[T], [4], [2]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(T)


def encoder(**options: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, HEADS, 96, **options)
    nested = options.get("batch_first", False) and not options.get("norm_first")  # else torch warns
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


def run(model: nn.Module, *inputs: Tensor, **call: object) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = model(*leaves, **call)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y, [x.grad for x in leaves]


def assert_only_weights_differ(pruned: nn.Module, dense: nn.Module) -> None:
    """Compare the gradients; those of two-dimensional parameters are the pruned ones."""
    for (name, mine), its in zip(pruned.named_parameters(), dense.parameters(), strict=True):
        if mine.dim() == 1:
            torch.testing.assert_close(mine.grad, its.grad, msg=name)
        else:
            assert not torch.allclose(mine.grad, its.grad, rtol=1e-3), name


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["norm_last", "norm_first"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["batch_second", "batch_first"])
@pytest.mark.parametrize("call", [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL, "is_causal": True}])
def test_encoder(call: dict, batch_first: bool, norm_first: bool, training: bool):
    dense = encoder(batch_first=batch_first, norm_first=norm_first, dropout=0.2).train(training)
    pruned = pruned_copy(dense)
    x = torch.randn((N, T, E) if batch_first else (T, N, E))
    torch.testing.assert_close(run(pruned, x, **call), run(dense, x, **call))
    assert_only_weights_differ(pruned, dense)
    with torch.no_grad():
        torch.manual_seed(1)
        found = pruned(x, **call)
        torch.manual_seed(1)
        assert torch.equal(found, dense(x, **call))


@pytest.mark.parametrize("batch_first", [False, True])
def test_encoder_and_decoder(batch_first: bool):
    dense = nn.Transformer(E, HEADS, 1, 2, 96, dropout=0.2, batch_first=batch_first)
    pruned = pruned_copy(dense)
    names = [name for name, m in pruned.named_modules() if isinstance(m, PrunedLayer)]
    assert {"decoder.layers.1.self_attn", "decoder.layers.1.multihead_attn.out_proj"} <= set(names)
    source, target = torch.randn(N, T, E), torch.randn(N, 4, E)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    torch.testing.assert_close(run(pruned, source, target), run(dense, source, target))
    assert_only_weights_differ(pruned, dense)


def test_fused_paths_of_inference_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: seen.append(a[0].is_nested) or fused(*a))
    dense = encoder(batch_first=True).eval()
    pruned, x = pruned_copy(dense), torch.randn(N, T, E)
    with torch.no_grad():
        for padding, nested in ((None, False), (PADDING, True)):
            assert torch.equal(pruned(x, src_key_padding_mask=padding), dense(x, src_key_padding_mask=padding))
            assert seen == [nested] * 4
            seen.clear()


def test_an_encoder_may_be_made_of_a_converted_layer():
    layer = nn.TransformerEncoderLayer(E, HEADS, 96, batch_first=True)
    convert(layer, min_features=0)
    model = nn.TransformerEncoder(layer, 2)
    assert model.use_nested_tensor
    assert len(revert(model)) == 8


def test_training_by_checkpoint_gives_the_same():
    model, x = pruned_copy(nn.TransformerEncoderLayer(E, HEADS, 96)), torch.randn(T, N, E)
    again = copy.deepcopy(model)
    found = run(lambda y: torch.utils.checkpoint.checkpoint(model, y, use_reentrant=False), x)
    torch.testing.assert_close(found, run(again, x), rtol=0, atol=0)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), again.parameters(), strict=True))


# torch.compile.


class Attending(nn.Module):
    """Attention called in the form of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.attention = case.make()
        self.case = case

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.case.inputs != "three":
            value = key
        return self.attention(query, query if self.case.inputs == "self" else key, value)[0]


def gradients(call: Callable[..., Tensor], model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    call(*inputs).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


COMPILED = {
    "layer": (lambda: nn.TransformerEncoderLayer(E, HEADS, 96, dropout=0.0, batch_first=True), 1),
    "encoder": (lambda: encoder(dropout=0.0), 1),
    "decoder": (lambda: nn.TransformerDecoderLayer(E, HEADS, 96, dropout=0.0), 2),
    "self": (lambda: Attending(Case(call={"need_weights": True})), 3),
    "cross": (lambda: Attending(Case("cross", {"batch_first": True})), 3),
    "three": (lambda: Attending(Case("three")), 3),
}


@pytest.mark.parametrize("name", COMPILED)
# Else the compiler takes what it finds inside torch.nn's own transformer layers for constants (see the README).
@torch._dynamo.config.patch(force_nn_module_property_static_shapes=False)
def test_schedule_compiles_twice_and_equals_eager(name: str):
    torch._dynamo.reset()
    make, inputs = COMPILED[name]
    model = pruned_copy(make())
    layers = [m for m in model.modules() if isinstance(m, PrunedLayer)]
    tensors = [torch.randn(T, N, E) for _ in range(inputs)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for sparsity in (0.1, 0.29, 0.5, 0.8):
        for layer in layers:
            layer.sparsity = sparsity
        found, wanted = gradients(compiled, model, tensors), gradients(model, model, tensors)
        assert all(oracle.relative_error(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True))
    assert counter.frame_count <= 2


def test_attention_in_a_module_of_the_user_needs_no_setting():
    torch._dynamo.reset()
    model = pruned_copy(Attending(Case()))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for sparsity in (0.2, 0.4, 0.6):
        model.attention.sparsity = model.attention.out_proj.sparsity = sparsity
        compiled(*(torch.randn(T, N, E) for _ in range(3)))
    assert counter.frame_count <= 2


def test_compiled_attention_saves_what_eager_attention_saves():
    torch._dynamo.reset()
    case = Case("three")
    model, inputs = pruned_copy(case.make()), case.tensors()
    counts = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        with saved_tensors() as saved:
            call(*inputs)
        counts.append(sorted(t.shape for t in saved if t.dtype == torch.int32 or t.shape[-1] == BLOCK))
    assert counts[0] == counts[1]
    assert len(counts[0]) == 3 * 4
