"""Attention with compressed projections against torch's own, and formulas with an input pruned by the oracle."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators import attention
from tests.support import oracle
from tests.support.attention import BLOCK, HEADS, SPARSITY, Case, E, Inputs, L, N, S
from tests.support.compressed import compressed
from tests.support.marks import in_turn
from tests.support.saving import saved_tensors

CAUSAL = torch.triu(torch.full((L, L), -math.inf), 1)
PADDING = torch.arange(S) >= torch.tensor([[S], [4], [2]])

CASES = {
    **{kind: Case(kind) for kind in ("self", "cross", "three", "sizes")},
    **{f"{kind}_batch_first": Case(kind, {"batch_first": True}) for kind in ("self", "cross", "three", "sizes")},
    "unbatched": Case(batched=False),
    "unbatched_batch_first": Case("cross", {"batch_first": True}, batched=False),
    "no_bias": Case("cross", {"bias": False}),
    "bias_kv": Case("three", {"add_bias_kv": True}),
    "zero_attention": Case("cross", {"add_zero_attn": True, "add_bias_kv": True}),
    "dropout": Case("self", {"dropout": 0.3}),
    "padding": Case("cross", call={"key_padding_mask": PADDING}),
    "mask": Case(call={"attn_mask": CAUSAL}),
    "mask_of_heads": Case(call={"attn_mask": CAUSAL.repeat(N * 4, 1, 1) < 0}),
    "both_masks": Case(call={"attn_mask": CAUSAL < 0, "key_padding_mask": PADDING[:, :L]}),
    "causal": Case(call={"attn_mask": CAUSAL, "is_causal": True}),
    "every_head": Case(call={"average_attn_weights": False}),
}


def run(module: Callable[..., Any], inputs: tuple[Tensor, ...], **call: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results and the gradients of copies of the inputs; those of the parameters are left on them."""
    torch.manual_seed(1)
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs}  # one where it was one
    results = module(*(leaves[id(x)] for x in inputs), **call)
    results = [y for y in ([results] if isinstance(results, Tensor) else results) if y is not None]
    sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in results).backward()
    return results, [leaf.grad for leaf in leaves.values()]


def pruned_copy(module: nn.Module, **settings: Any) -> nn.Module:
    return compressed(module, **{"sparsity": SPARSITY, "block_size": BLOCK, **settings})


def assert_only_projections_differ(pruned: nn.Module, dense: nn.Module, prunes: bool = True, **exact: float) -> None:
    """Compare the gradients; those of weights of linear layers, which have two dimensions, are the pruned ones."""
    for (name, mine), its in zip(pruned.named_parameters(), dense.parameters(), strict=True):
        if mine.dim() == 2 and prunes:
            assert not torch.allclose(mine.grad, its.grad, rtol=1e-3), name
        else:
            torch.testing.assert_close(mine.grad, its.grad, msg=name, **exact)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_but_the_projection_weights_is_torchs_own(case: Case):
    dense = case.make()
    # Of a view with the batch first, torch adds the bias in an operation of its own; else the operations are the same.
    exact = {"rtol": 0, "atol": 0} if not (case.batch_first and case.batched) else {}
    for sparsity, need_weights in itertools.product((0.0, SPARSITY), (True, False)):
        pruned, inputs = pruned_copy(dense, sparsity=sparsity), case.tensors()
        dense.zero_grad()
        found = run(pruned, inputs, need_weights=need_weights, **case.call)
        wanted = run(dense, inputs, need_weights=need_weights, **case.call)
        torch.testing.assert_close(found, wanted, **exact)
        assert_only_projections_differ(pruned, dense, sparsity > 0, **exact)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scope: str) -> Tensor:
    """Return ``F.linear`` of ``x [N, T, E]`` whose weight gradient comes from the pruned input."""
    x_hat = oracle.pruned(oracle.as_samples(x.detach(), scope), BLOCK, SPARSITY).view_as(x)
    straight = F.linear(x_hat, weight)
    return F.linear(x, weight.detach(), bias) + straight - straight.detach()


def expected(module: nn.MultiheadAttention, inputs: Inputs, scope: str) -> tuple[Tensor, Tensor]:
    """Return the output and the average weights of attention ``[N, T, E]`` by formula, gradients as the design says."""
    apart = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    weights = apart if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    q, k, v = (
        linear(x, w, b, scope).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for x, w, b in zip(inputs, weights, module.in_proj_bias.chunk(3), strict=True)
    )
    attention = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), -1)
    heads = (attention @ v).transpose(1, 2).flatten(2)
    return linear(heads, module.out_proj.weight, module.out_proj.bias, scope), attention.mean(1)


@pytest.mark.parametrize("name", list(CASES)[:10])
def test_weight_gradients_are_those_of_the_pruned_inputs(name: str):
    case = CASES[name]

    def samples_first(x: Tensor) -> Tensor:
        if not case.batched:
            return x.unsqueeze(0)
        return x if case.batch_first else x.transpose(0, 1)

    for scope, need_weights in (("sample", True), ("token", False)):
        dense, inputs = case.make(torch.float64), case.tensors(torch.float64)
        pruned = pruned_copy(dense, topk_over=scope)
        output, weights = pruned(*inputs, need_weights=need_weights)
        wanted, wanted_weights = expected(dense, tuple(samples_first(x) for x in inputs), scope)
        torch.testing.assert_close(samples_first(output), wanted)
        if need_weights:
            torch.testing.assert_close(weights, wanted_weights if case.batched else wanted_weights[0])
        grad = torch.randn_like(wanted)
        samples_first(output).backward(grad)
        wanted.backward(grad)
        for (parameter, mine), its in zip(pruned.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-10, msg=parameter)


def saved_by(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    with saved_tensors() as saved:
        module(*inputs)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return [t for t in saved if t.untyped_storage().data_ptr() not in own]


@pytest.mark.parametrize(("inputs", "lengths"), [("self", [L, L]), ("cross", [L, S, L]), ("three", [L, S, S, L])])
def test_every_sample_keeps_its_share_of_every_input_and_nothing_else(inputs: str, lengths: list[int]):
    columns = math.ceil(E / BLOCK)
    for batch_first in (False, True):
        case = Case(inputs, {"batch_first": batch_first})
        given = case.tensors()
        inner = {id(x): x + 0 for x in given}  # so that no leaf is saved
        tensors = tuple(inner[id(x)] for x in given)
        saved = saved_by(pruned_copy(case.make()), tensors)
        bitmaps = [t for t in saved if t.dtype == torch.int32][::2]  # each is followed by its offsets
        for bitmap, length in zip(bitmaps, lengths, strict=True):
            kept = [sum(bin(word & 0xFFFFFFFF).count("1") for word in sample) for sample in bitmap.tolist()]
            assert kept == [length * columns - math.floor(length * columns * 0.6)] * N
        assert not any(t.shape in ((N * L, E), (N * S, E)) for t in saved)


def test_one_projection_alone():
    dense, inputs = Case("cross").make(), Case("cross").tensors()
    keep, names = Keep(bits=None, sparsity=SPARSITY, block_size=BLOCK), ("out_proj.weight", "in_proj_weight")
    run(dense, inputs)
    for changed, exact in (names, names[::-1]):
        rules = {"out_proj": None, "type:linear": keep} if changed == names[1] else {"out_proj": keep}
        pruned = copy.deepcopy(dense)
        pruned.zero_grad()
        convert(pruned, rules={**rules, "*": None})
        run(pruned, inputs)
        assert torch.equal(pruned.get_parameter(exact).grad, dense.get_parameter(exact).grad)
        assert not torch.allclose(pruned.get_parameter(changed).grad, dense.get_parameter(changed).grad, rtol=1e-3)


@pytest.mark.integration
def test_one_that_only_routes_compiles():
    torch._dynamo.reset()
    case = Case("cross")
    dense, inputs = case.make(), case.tensors()
    pruned = copy.deepcopy(dense)
    convert(pruned, rules={"out_proj": Keep(bits=None, sparsity=SPARSITY, block_size=BLOCK), "*": None})
    expected, found = dense(*inputs)[0], torch.compile(pruned, backend="aot_eager")(*inputs)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", [["in_proj_weight"], ["out_proj.weight"], ["in_proj_weight", "out_proj.weight"]])
def test_a_frozen_projection_packs_nothing(frozen: list[str]):
    case = Case()
    dense, inputs = case.make(), case.tensors()
    for name in frozen:
        dense.get_parameter(name).requires_grad_(False)
    pruned = pruned_copy(dense)
    assert sum(t.dtype == torch.int32 for t in saved_by(pruned, inputs)) == 2 * (2 - len(frozen))
    run(pruned, inputs)
    assert [name for name, p in pruned.named_parameters() if p.grad is None] == frozen


def test_without_gradients_the_fast_path_of_torch_runs(monkeypatch: pytest.MonkeyPatch):
    calls, fast = [], torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(args) or fast(*args))
    case = Case(options={"batch_first": True})
    dense = case.make().eval()
    pruned, inputs = pruned_copy(dense), case.tensors()
    with torch.no_grad():
        assert torch.equal(pruned(*inputs)[0], dense(*inputs)[0])
    assert len(calls) == 2
    pruned.requires_grad_(False)
    pruned(*(x.detach() for x in inputs[:1] * 3))
    assert len(calls) == 2  # not one tensor
    x = inputs[0].detach()
    pruned(x, x, x)
    assert len(calls) == 3


def encoder(**options: object) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, HEADS, 96, **options)
    nested = options.get("batch_first", False) and not options.get("norm_first")  # else torch warns
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


MASKS = {"none": {}, "padding": {"src_key_padding_mask": PADDING[:, :L]}, "causal": {"mask": CAUSAL, "is_causal": True}}


@pytest.mark.parametrize(
    ("mask", "batch_first", "norm_first", "training"),
    in_turn([*MASKS] * 2, (False, True), (False, True, True, False), (True, True, False)),
)
def test_encoder(mask: str, batch_first: bool, norm_first: bool, training: bool):
    dense = encoder(batch_first=batch_first, norm_first=norm_first, dropout=0.2).train(training)
    pruned, call = pruned_copy(dense), MASKS[mask]
    x = torch.randn((N, L, E) if batch_first else (L, N, E))
    torch.testing.assert_close(run(pruned, (x,), **call), run(dense, (x,), **call))
    assert_only_projections_differ(pruned, dense)
    with torch.no_grad():
        torch.manual_seed(1)
        found = pruned(x, **call)
        torch.manual_seed(1)
        assert torch.equal(found, dense(x, **call))


def test_fused_paths_of_inference_run(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    fused = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: seen.append(a[0].is_nested) or fused(*a))
    dense = encoder(batch_first=True).eval()
    pruned, x = pruned_copy(dense), torch.randn(N, L, E)
    with torch.no_grad():
        for padding, nested in ((None, False), (PADDING[:, :L], True)):
            assert torch.equal(pruned(x, src_key_padding_mask=padding), dense(x, src_key_padding_mask=padding))
            assert seen == [nested] * 4
            seen.clear()


@pytest.mark.parametrize(
    ("name", "other"),
    [("_in_projection_packed", lambda x, w, b: torch._C._nn.linear(x, w, b)), ("multi_head_attention_forward", None)],
)
def test_attention_that_is_computed_in_another_way_stays_dense(name, other, monkeypatch):
    monkeypatch.setattr(F, name, other) if other else monkeypatch.delattr(F, name)
    attention.routing_refusal.cache_clear()
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.MultiheadAttention(64, 2))
        report = convert(model, "max")
    finally:
        attention.routing_refusal.cache_clear()
    assert [layer.fqn for layer in report.converted] == ["0"]
    reasons = {layer.fqn: layer.reason for layer in report.skipped}
    assert {"1", "1.out_proj"} <= reasons.keys()
    assert torch.__version__ in reasons["1"]
    assert type(model[1]) is nn.MultiheadAttention
