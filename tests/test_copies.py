"""Under autocast, what a report says is saved is what a dense model keeps more than a pruned one, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert, revert
from lightning_actprune.footprint import MemoryReport, SavedTensorMeter
from tests.conv1d import block

E = 64


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def kept(model: nn.Module, x: Tensor, context: AbstractContextManager[Any]) -> int:
    """Return the bytes of the distinct storages that autograd saves beside the parameters and ``x``."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), context:
        model(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in own)


def compare(
    model: nn.Module,
    x: Tensor,
    make_context: Callable[[], AbstractContextManager[Any]] = bf16,
    **options: Any,
) -> MemoryReport:
    """Convert ``model`` for the time of two forwards, assert that its report is true, and return it."""
    dense_bytes = kept(model, x, make_context())
    convert(model, 0.6, 16, min_features=0, **options)
    pruned_bytes = kept(model, x, make_context())
    with SavedTensorMeter(model, x) as meter, make_context():
        model(x)
    report = meter.report()
    revert(model)
    assert report.total_bytes == pruned_bytes
    assert report.dense_bytes + report.other_bytes == dense_bytes
    assert report.saved_bytes == dense_bytes - pruned_bytes
    assert report.to_dict()["weight_copy_bytes"] == report.weight_copy_bytes
    return report


class Base(nn.Module):
    """Two layers ``a`` and ``b`` on an input that needs a gradient; a subclass says how they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.a, self.b = nn.Linear(E, 96), nn.Linear(E, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.norm(x))

    def use(self, h: Tensor) -> Tensor:
        return self.a(h).exp() * self.b(h.sin())


class CalledTwice(Base):
    def use(self, h):
        return self.a(h).exp() * self.a(h.sin())


class Tied(Base):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


class UsedAsAFunction(Base):
    def use(self, h):
        return super().use(h) * F.linear(h.cos(), self.a.weight)


class TwoRegions(Base):
    def use(self, h):
        first = super().use(h)
        with bf16():
            second = super().use(h.cos())
        return first.float() * second.float()


class RegionPerLayer(Base):
    def use(self, h):
        with bf16():
            first = self.a(h)
        with bf16():
            return self.a(first.exp()[..., :E])


class Fp32Inside(Base):
    def use(self, h):
        with bf16(enabled=False):
            first = self.a(h.float())
        return first.exp() * self.a(h.sin()) * self.b(h.cos())


class Uncached(Base):
    def use(self, h):
        with bf16(cache_enabled=False):
            return super().use(h) * self.a(h.cos())


class Masked(Base):
    """``torch.nn.utils.prune`` makes the weight anew before each call."""

    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.a, "weight", amount=0.5)

    def use(self, h):
        return self.a(h).exp() * self.a(h.sin())


class Checkpointed(Base):
    def use(self, h):
        return checkpoint(self.a, h, use_reentrant=False) * self.a(h.sin())


class Encoder(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(E, 2, 96, dropout=0.0, batch_first=True)

    def use(self, h):
        return self.layer(h)


class CrossAttention(Base):
    """Query beside key and value: parts of one weight, of which autocast makes copies of their own."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)

    def use(self, h):
        memory = h.sin()
        return self.attention(h, memory, memory)[0] + self.attention(h.cos(), memory, memory.sin())[0]


class SizedAttention(Base):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, kdim=40, vdim=24, batch_first=True)

    def use(self, h):
        return self.attention(h, h.sin()[..., :40], h.cos()[..., :24])[0]


ELEMENTS = E * 96
MODELS = {
    Base: 2 * ELEMENTS,
    CalledTwice: ELEMENTS,
    Tied: ELEMENTS,
    UsedAsAFunction: ELEMENTS,  # the function keeps the copy of `a`
    Fp32Inside: 2 * ELEMENTS,
    Uncached: 3 * ELEMENTS,
    Masked: 2 * ELEMENTS,
    Checkpointed: ELEMENTS,
    Encoder: 3 * E * E + E * E + 2 * ELEMENTS,
    CrossAttention: 2 * 3 * E * E + E * E,
    SizedAttention: E * (E + 40 + 24 + E),
}


@pytest.mark.parametrize("make", MODELS)
def test_saved_is_what_the_dense_model_keeps_more(make):
    assert compare(make(), torch.randn(3, 8, E)).weight_copy_bytes == 2 * MODELS[make]


class LearnedQueries(Base):
    """A parameter that three layers and a function read: autocast makes one copy of it for all."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, E))

    def use(self, h):
        return (self.a(self.queries) * self.b(self.queries)).sum() + F.linear(self.queries, self.b.weight) + self.a(h)


class Leaf(Base):
    """Layers that read the input itself."""

    def forward(self, x):
        return self.a(x) * self.b(x) + self.a(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("exclude", [(), "a", "b"])
@pytest.mark.parametrize("make", [LearnedQueries, Leaf])
def test_one_copy_of_a_leaf_that_several_layers_read(make, exclude):
    compare(make(), torch.randn(3, 8, E, requires_grad=True), exclude=exclude)
    compare(make(), torch.randn(6, 8, E)[::2].requires_grad_(), exclude=exclude)


@pytest.mark.parametrize("make", [make for make in MODELS if make is not Uncached])
def test_without_autocast_no_copies_are_announced(make):
    assert compare(make(), torch.randn(3, 8, E), nullcontext).weight_copy_bytes == 0


@pytest.mark.parametrize(("make", "outer", "copies"), [
    (TwoRegions, bf16, 2), (TwoRegions, nullcontext, 2), (RegionPerLayer, bf16, 1), (RegionPerLayer, nullcontext, 2),
])  # fmt: skip
def test_each_region_has_copies_of_its_own(make, outer, copies):
    assert compare(make(), torch.randn(3, 8, E), outer).weight_copy_bytes == 2 * copies * ELEMENTS


def test_no_copy_is_kept_of_a_layer_whose_input_needs_no_gradient():
    model, x = nn.Sequential(nn.Linear(E, 96), nn.GELU(), nn.Linear(96, E)), torch.randn(3, 8, E)
    assert compare(model, x).weight_copy_bytes == 2 * ELEMENTS
    assert compare(model, x.requires_grad_()).weight_copy_bytes == 4 * ELEMENTS


def test_a_dense_layer_keeps_the_copy_of_the_weight_that_it_shares():
    report = compare(Tied(), torch.randn(3, 8, E), exclude="b")
    assert report.weight_copy_bytes == 0
    assert report.saved_bytes > 0


@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 0), (torch.float16, 2), (torch.float32, 1)])
def test_types_of_the_weights(dtype: torch.dtype, copies: int):
    """None of a weight that is 16-bit already, and one for each call of one in the other 16-bit type."""
    model = CalledTwice()
    model.a.to(dtype)
    assert compare(model, torch.randn(3, 8, E), include="a").weight_copy_bytes == 2 * copies * ELEMENTS


def test_float16_autocast():
    report = compare(Base(), torch.randn(3, 8, E), lambda: torch.autocast("cpu", torch.float16))
    assert report.weight_copy_bytes == 2 * 2 * ELEMENTS


def test_conv1d(conv1d):
    model = nn.Sequential(block(conv1d, E), block(conv1d, E))
    report = compare(model, torch.randn(3, 8, E))
    assert report.weight_copy_bytes == 2 * sum(
        p.numel() for name, p in model.named_parameters() if ".c_" in name and p.dim() == 2
    )


class Random(nn.Module):
    """Layers from a small stock, of which some share a weight, on inputs from earlier ones, in regions of their own."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.layers = nn.ModuleList(nn.Linear(E, E) for _ in range(4))
        self.attention = nn.MultiheadAttention(E, 2, batch_first=True)
        self.layers[1].weight = self.layers[0].weight
        uses = "layer", "layer", "layer", "function", "self", "cross"
        contexts = {"none": nullcontext, "on": bf16, "off": lambda: bf16(enabled=False)}
        contexts["uncached"] = lambda: bf16(cache_enabled=False)
        self.plan = [(draw.choice(uses), draw.randrange(4), draw.choice(["none", "none", *contexts])) for _ in range(8)]
        self.contexts = contexts

    def forward(self, x: Tensor) -> Tensor:
        for use, number, context in self.plan:
            with self.contexts[context]():
                h = self.norm(x.float())
                match use:
                    case "layer":
                        y = self.layers[number](h)
                    case "function":
                        y = F.linear(h, self.layers[number].weight)
                    case "self":
                        y = self.attention(h, h, h)[0]
                    case _:
                        y = self.attention(h, h.sin(), h.cos())[0]
            x = x.float() + y.float()
        return x


@pytest.mark.parametrize("outer", [bf16, nullcontext], ids=["outer", "none"])
@pytest.mark.parametrize("seed", range(20))
def test_random_models(seed: int, outer):
    draw = random.Random(seed)
    model = Random(draw)
    exclude = [f"layers.{number}" for number in range(4) if draw.random() < 0.3]
    compare(model, torch.randn(3, 8, E), outer, exclude=exclude)


def test_measuring_changes_neither_gradients_nor_autocast():
    model, x = Base(), torch.randn(3, 8, E)
    convert(model)
    with bf16():
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with torch.autocast("cpu", torch.float16), SavedTensorMeter(model, x):
        model(x)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    with bf16(), SavedTensorMeter(model, x) as meter:
        loss = model(x).sum()
    assert not torch.is_autocast_enabled("cpu")
    assert meter.report().weight_copy_bytes == 4 * ELEMENTS
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
