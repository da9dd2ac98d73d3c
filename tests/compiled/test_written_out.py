"""Compiled attention that is written out: its weights are packed once, and dropout is done again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.codec.blocks import sparsity_parts
from lightning_actprune.compiled.install import CompiledPacking
from tests.compiled.support import MODEL, Marked, Result, mark, nbytes, planned, step, uncached, worst_cosine
from tests.support.conversion_models import Calls
from tests.support.marks import only

HEADS, SHAPE, VALUES = 2, (4, 2, 48, 48), 4 * 2 * 48 * 48
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose linear layers are marked, behind a norm."""

    def __init__(self, attend: Attend, query: int) -> None:
        super().__init__()
        model = replace(MODEL, query=query)
        self.norm = Marked(nn.LayerNorm(64), mark("norm", 4, model))
        self.qkv = Marked(nn.Linear(64, 192), mark("linear", 4, model))
        self.out = Marked(nn.Linear(64, 64), mark("linear", 4, model))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, 32)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def stepped(attend: Attend, query: int = 8, **options: object) -> Result:
    torch.manual_seed(0)
    model, x = Attention(attend, query), torch.randn(4, 48, 64)
    torch.manual_seed(1)
    return step(model, x, **options)


def masked(scores: Tensor, value: float = -1e4) -> Tensor:
    return scores.masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), value)


def written_out(read: Callable[[Tensor], Tensor] = lambda p: p, mask: bool = False) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.2
        return read((masked(scores, -torch.inf) if mask else scores).softmax(-1)).to(v.dtype) @ v

    return attend


def dropped(p: Tensor) -> Tensor:
    return F.dropout(p, 0.25)


def drawn(p: Tensor) -> Tensor:
    return torch.where(torch.rand_like(p) > 0.25, p, 0.0)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


def quotient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).square() + 0.1
    return weights / weights.sum(-1, keepdim=True) @ v


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As inductor pads products of matrices of odd sizes on GPUs."""
    k, v = (F.pad(x, (0, 0, 0, 4)) for x in (k, v))
    p = (q @ k.mT * 0.2)[..., :48].softmax(-1)
    return F.pad(p.to(v.dtype), (0, 4)) @ v


AGAIN = ["packed", "signs", "again"]
TWICE = ["packed", "signs", "packed"]
"""Weights, the mask of dropout, and what has passed it."""


@pytest.mark.parametrize(
    ("attend", "backend", "hows", "autocast"),
    [
        (written_out(drawn), "aot_eager", TWICE, True),
        *(
            pytest.param(*case, marks=pytest.mark.integration)
            for case in [
                (written_out(), "aot_eager", ["packed"], False),
                (written_out(dropped), "aot_eager", ["packed", "packed"], True),
                (padded, "aot_eager", ["packed"], True),
                (written_out(mask=True), planned, ["packed"], True),
                (fused, planned, AGAIN, False),
            ]
        ),
    ],
)
def test_weights_are_kept_in_eight_bits(attend, backend, hows, autocast):
    """With dropout inductor writes out what is fused as well, on a CPU."""
    found, dense = (stepped(attend, packs=packs, autocast=autocast, backend=backend) for packs in (True, False))
    rows = [row for row in found.rows if row.shape == SHAPE]
    assert [row.how for row in rows] == hows
    assert {row.bits for row in rows if row.how == "packed"} == {8}
    assert {row.stored_bytes for row in rows if row.how == "signs"} <= {VALUES // 8}
    torch.testing.assert_close(found.output, dense.output)
    assert 0.999 < worst_cosine(found, dense) < 1
    assert not any(t.is_floating_point() and t.numel() == VALUES for t in found.kept)
    assert nbytes(found.kept) < 0.7 * nbytes(dense.kept)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As torch writes out attention of 16 bits: both factors are scaled in fp32."""
    return (q.float() * 0.5 @ (k.float() * 0.5).mT).softmax(-1).to(v.dtype) @ v


def test_queries_and_keys_are_packed_before_they_are_scaled_in_fp32():
    torch.manual_seed(0)
    model, x = Attention(scaled, 8).bfloat16(), torch.randn(4, 48, 64).bfloat16()
    found, dense = (step(model, x, packs=packs, backend="aot_eager") for packs in (True, False))
    assert [row.how for row in found.rows if row.name == "aten.mul"] == ["again", "again"]
    packed = [row for row in found.rows if row.how == "packed" and row.dtype == torch.bfloat16 and not row.readers]
    assert [(row.bits, row.shape) for row in packed] == [(8, (4, HEADS, 48, 32))] * 2
    assert worst_cosine(found, dense) > 0.99


@pytest.mark.integration
def test_a_factor_of_two_multiples_is_packed_once():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = (q.float() * factor for factor in (0.5, 0.25))
        keys = k.float() * 0.5
        return ((first @ keys.mT).softmax(-1) + (second @ keys.mT).softmax(-1)).to(v.dtype) @ v

    torch.manual_seed(0)
    model, x = Attention(attend, 8).bfloat16(), torch.randn(4, 48, 64).bfloat16()
    found, dense = (step(model, x, packs=packs, backend="aot_eager") for packs in (True, False))
    factors = [row for row in found.rows if row.how == "packed" and row.dtype == torch.bfloat16 and not row.readers]
    assert len(factors) == 2
    assert worst_cosine(found, dense) > 0.99


WEIGHS_NO_VALUES = "it is a softmax that does more than weigh values"
READS = [
    lambda p: p * (p + 1e-6).log(),
    lambda p: p + p.mean(-1, keepdim=True),
    lambda p: p.cumsum(-1),
    lambda p: p @ torch.eye(48),
    lambda p: F.pad(p, (0, 4), value=1.0)[..., :48],
    lambda p: F.pad(F.pad(p, (0, -4)), (0, 4)),
]


@pytest.mark.parametrize(
    ("attend", "query", "reason"),
    [
        (written_out(), 0, "a rule leaves it uncompressed"),
        (quotient, 8, "it is a quotient by a sum"),
        (lambda q, k, v: ((q @ k.mT).tril(9) / (s := q.mean().exp())).relu() * s @ v, 8, "its other factor has"),
        (lambda q, k, v: (masked(q @ k.mT) * q.mean()).softmax(-1) @ v, 8, "it is a softmax of masked scores"),
        *(pytest.param(written_out(read), 8, WEIGHS_NO_VALUES, marks=pytest.mark.integration) for read in READS),
    ],
)
def test_weights_without_bits_quotients_and_what_anything_else_reads_stay(attend, query: int, reason: str):
    rows = [row for row in stepped(attend, query).rows if row.shape == SHAPE and row.reason.startswith(reason)]
    assert [row.how for row in rows] == ["uncompressed"]


@pytest.mark.integration
@pytest.mark.parametrize("given", [dropped, lambda p: p.clone(), lambda p: p.bfloat16(), lambda p: p])
def test_so_does_what_leaves_the_graph(given):
    """Whoever gets it may take its logarithm, of which the gradient has a pole where weights are small."""
    outputs = []

    def read(p: Tensor) -> Tensor:
        outputs.append(given(p))
        return p

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs.clear()
        return model(x), outputs[0]

    torch.manual_seed(0)
    model, x, grads = Attention(written_out(read), 8), torch.randn(4, 48, 64), []
    with uncached(), CompiledPacking() as packing:
        torch._dynamo.reset()
        for f in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
            torch.manual_seed(1)
            model.zero_grad()
            y, p = f(x)
            (y.square().mean() - (p.float() + 1e-6).log().mean()).backward()
            grads.append(model.qkv.layer.weight.grad.clone())
    assert {row.how for row in packing.rows if row.name == "aten._softmax"} == {"uncompressed"}
    assert F.cosine_similarity(grads[0].flatten(), grads[1].flatten(), 0) > 0.999


@pytest.mark.integration
def test_blocks_of_what_is_padded_for_a_layer_compete_with_its_zeros():
    layers = Marked(nn.Linear(64, 64), mark("linear", 8)), Calls(lambda _, x: F.pad(x, (0, 32)).view(-1, 96))
    last = Marked(nn.Linear(96, 8), mark("linear", 4), sparsity_parts(0.5))
    model, x = nn.Sequential(*layers, last), torch.randn(64, 64)
    found, dense = (step(model, x, packs=packs) for packs in (True, False))
    (row,) = (row for row in found.rows if row.shape == (64, 96))
    assert (row.how, row.bits) == ("packed", 4)
    assert 0.9 < worst_cosine(found, dense) < 1


@pytest.mark.integration
@pytest.mark.parametrize(
    ("backend", "behind_norm"),
    only([("aot_eager", False), (planned, False), ("aot_eager", True)], (planned, False), ("aot_eager", True)),
)
def test_a_drawn_mask_has_one_bit_and_what_it_masks_is_made_again(backend, behind_norm):
    torch.manual_seed(0)
    layers = [Marked(nn.Linear(64, 64), mark("linear", 8)), Marked(nn.GELU(), mark("activation", 8))]
    layers.append(Calls(lambda _, x: (torch.rand_like(x) > 0.25) * x / 0.75))  # dropout by a mask that is drawn
    layers += [Marked(nn.LayerNorm(64), mark("norm", 8))] * behind_norm
    model, results = nn.Sequential(*layers, Marked(nn.Linear(64, 64), mark("linear", 4))), []
    for packs in (True, False):
        torch.manual_seed(1)
        results.append(step(model, torch.randn(8, 64, 64), packs=packs, backend=backend))
    found, dense = results
    torch.testing.assert_close(found.output, dense.output)
    assert 0.999 < worst_cosine(found, dense) < 1
    count = 8 * 64 * 64
    assert [row.how for row in found.rows if row.dtype == torch.bool] == ["signs"]
    assert sum(t.nbytes for t in found.kept if t.shape == (count // 8,)) == count // 8
    assert not any(t.dtype == torch.bool for t in found.kept)
    assert found.rows[-1].how == "again"
