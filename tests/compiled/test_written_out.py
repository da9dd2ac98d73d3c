"""Compiled attention that is written out: its weights are packed once, and dropout is done again in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiled.support import MODEL, Marked, Result, mark, nbytes, step, worst_cosine
from tests.support.marks import needs_passes

pytestmark = needs_passes
HEADS, SHAPE = 2, (4, 2, 48, 48)
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


def written_out(read: Callable[[Tensor], Tensor] = lambda p: p, mask: bool = False) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.2
        if mask:
            scores = scores.masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -torch.inf)
        return read(scores.softmax(-1)).to(v.dtype) @ v

    return attend


def dropped(p: Tensor) -> Tensor:
    return F.dropout(p, 0.25)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("attend", "hows"),
    [
        (written_out(), ["packed"]),
        (written_out(mask=True), ["packed"]),
        (written_out(dropped), ["packed", "again"]),
        (written_out(lambda p: torch.where(torch.rand_like(p) > 0.5, p, 0.0)), ["packed", "again"]),
        (fused, ["packed", "again"]),
    ],
)
def test_weights_are_packed_once(attend, hows, autocast, backend):
    """With dropout the compiler writes out what is fused as well, on a CPU."""
    found, dense = (stepped(attend, packs=packs, autocast=autocast, backend=backend) for packs in (True, False))
    rows = [row for row in found.rows if row.shape == SHAPE]
    assert [row.how for row in rows] == hows
    assert [row.bits for row in rows if row.how == "packed"] == [8]
    torch.testing.assert_close(found.output, dense.output)
    assert 0.999 < worst_cosine(found, dense) < 1
    weights = [t for t in found.kept if t.is_floating_point() and t.numel() >= 4 * 2 * 48 * 48]
    assert weights == []
    assert nbytes(found.kept) < 0.7 * nbytes(dense.kept)


@pytest.mark.parametrize(
    "read", [lambda p: p * (p + 1e-6).log(), lambda p: p + p.mean(-1, keepdim=True), lambda p: p.cumsum(-1)]
)
def test_what_anything_else_reads_stays_as_it_is(read):
    found = stepped(written_out(read))
    assert "it is a softmax, and not read by products of matrices alone" in {row.reason for row in found.rows}


def test_bits_are_those_of_the_query():
    found = stepped(written_out(), query=0)
    (row,) = (row for row in found.rows if row.shape == SHAPE)
    assert (row.how, row.reason) == ("as it is", "the rule for what operations save keeps it as it is")


def test_what_is_divided_by_another_sum_is_no_softmax():
    found = stepped(lambda q, k, v: (s := (q @ k.mT).square() + 0.1) / s.sum(-1, keepdim=True) @ v)
    assert "it is a quotient by a sum, in which its gradient is not linear" in {row.reason for row in found.rows}
