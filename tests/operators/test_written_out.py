"""Weights of attention that is written out: kept in few bits where products of matrices alone read them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.operators.readers import SOFTMAX, loses_values
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compression import gradients

SAMPLES, HEADS, TOKENS = 4, 4, 64
SHAPE = (SAMPLES, HEADS, TOKENS, TOKENS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Attention(nn.Module):
    """Attention of four heads, as people write it.

    Args:
        read: What is done to its weights before they weigh the values.
        sharpness: Factor of the scores.
        softmax: Of the scores.
        returned: Whether the weights are an output, too.
    """

    def __init__(
        self,
        read: Callable[[Tensor], Tensor] = lambda p: p,
        sharpness: float = 1.0,
        softmax: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
        returned: bool = False,
    ) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.read, self.sharpness, self.softmax, self.returned = read, sharpness, softmax, returned

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, 16)).permute(2, 0, 3, 1, 4)
        weights = self.softmax(q @ k.mT * self.sharpness)
        y = self.out((self.read(weights).to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return (y, weights) if self.returned else y


class Only(nn.Module):
    """One output of a module, by default the first."""

    def __init__(self, module: nn.Module, place: int = 0) -> None:
        super().__init__()
        self.module, self.place = module, place

    def forward(self, x: Tensor) -> Tensor:
        y = self.module(x)
        return y if isinstance(y, Tensor) else y[self.place]


def made(device: str = "cpu", dtype: torch.dtype = torch.float32, **options: object) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Only(Attention(**options)).to(device, dtype), torch.randn(SAMPLES, TOKENS, 64).to(device, dtype)


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.cat([g.flatten() for g in gradients(model, x, lambda y: y.float().square().sum())]).double()


def is_close(found: Tensor, exact: Tensor, share: float) -> bool:
    return bool((found - exact).norm() <= share * exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "packs"),
    [
        ({}, 1),
        ({"returned": True}, 1),
        ({"read": lambda p: F.dropout(p, 0.1)}, 2),
        ({"read": lambda p: p * torch.ones(TOKENS, device=p.device)}, 2),
        ({"softmax": lambda scores: F.softmax(scores, -1, torch.float32)}, None),
        ({"softmax": lambda scores: torch._safe_softmax(scores, -1)}, 1),
        ({"softmax": lambda scores: scores.masked_fill(scores > 2, -torch.inf).softmax(-1)}, 1),
    ],
)
def test_weights_are_kept_in_eight_bits(options, packs, dtype, device):
    model, x = made(device, dtype, **options)
    exact = gradient(model, x)
    with SavedTensorCompression(model, min_values=256) as saving:
        for _ in range(2):
            saving.reset()
            assert is_close(gradient(model, x), exact, 0.02)
    rows = [row for row in saving.rows if row.shape in (SHAPE, (SAMPLES * HEADS, TOKENS, TOKENS))]
    assert packs is None or sum(row.count for row in rows) == packs
    assert sum(row.stored_bytes for row in rows) == sum(row.count for row in rows) * SAMPLES * HEADS * TOKENS * 2 * 34
    assert saving.left == []
    assert saving.retained_twice_bytes == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p * (p + 1e-6).log(),
        lambda p: p / p.amax(-1, keepdim=True),
        lambda p: p.cumsum(-1),
        lambda p: p @ torch.eye(TOKENS) @ p,
        lambda p: p + p.mean(-1, keepdim=True),
    ],
)
def test_what_anything_else_reads_stays_as_it_is(read):
    model, x = made(read=read)
    with SavedTensorCompression(model, min_values=256) as saving:
        for _ in range(2):
            gradient(model, x)
    assert ("softmax", "it is a softmax that does more than weigh values") in {
        (row.operation, row.reason) for row in saving.left
    }


def test_so_does_what_nobody_is_seen_to_read():
    model, x = Only(Attention(lambda p: p.detach(), returned=True), 1), torch.randn(SAMPLES, TOKENS, 64)
    with SavedTensorCompression(model, min_values=256) as saving:
        model(x)
    assert {row.operation for row in saving.left} == {"softmax"}


def test_bits_are_those_of_the_query():
    model, x = made()
    exact = gradient(model, x)
    with SavedTensorCompression(model, min_values=256, attention={"query": 0}) as saving:
        gradient(model, x)
    assert ("softmax", "a rule leaves it as it is") in {(row.operation, row.reason) for row in saving.left}
    with SavedTensorCompression(model, min_values=256, attention={"query": 4}) as saving:
        assert not is_close(gradient(model, x), exact, 0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [lambda p: p, lambda p: F.dropout(p, 0.1)])
def test_small_weights_beside_large_ones_are_no_outliers(read, dtype, device):
    """They are packed in every forward, though most of a block's values are less than a step."""
    seen = []
    model, x = made(device, dtype, read=lambda p: seen.append(p.detach()) or read(p), sharpness=4.0)
    exact = gradient(model, x)
    assert loses_values(seen[0].flatten(0, 1), 32)
    with SavedTensorCompression(model, min_values=256) as saving, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert is_close(gradient(model, x), exact, 0.05)
    assert not {"softmax", "bmm"} & {row.operation for row in saving.left}
    assert saving.retained_twice_bytes == 0


@pytest.mark.parametrize("softmax", [torch.softmax, torch._safe_softmax])
def test_gradients_are_off_by_no_more_than_is_said(softmax):
    d = 0.01
    x, g = torch.randn(64, 33, dtype=torch.float64), torch.randn(64, 33, dtype=torch.float64)
    exact = torch.autograd.functional.vjp(lambda x: softmax(x, -1), x, g)[1]
    for _ in range(5):
        leaf, noise = x.clone().requires_grad_(), d * (2 * torch.rand_like(x) - 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda p: p.detach() + noise, lambda p: p):  # noqa: B023
            p = softmax(leaf, -1)
        assert p.grad_fn.name() in SOFTMAX
        p.backward(g)
        sizes = g.abs(), (p.detach() * g.abs()).sum(-1, keepdim=True), g.abs().sum(-1, keepdim=True)
        error = (leaf.grad - exact).abs()
        assert error.max() > d / 10
        assert (error <= 1.001 * d * (sizes[0] + sizes[1] + (p.detach() + d) * sizes[2])).all()
