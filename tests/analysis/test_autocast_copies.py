"""Under autocast, what a report says is saved is what a dense model keeps more than a compressed one, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from tests.support.copy_models import (
    ELEMENTS,
    MODELS,
    Base,
    CalledTwice,
    E,
    Leaf,
    LearnedQueries,
    Random,
    RegionPerLayer,
    SizedAttention,
    Tied,
    TwoRegions,
    bf16,
)


class Kept(NamedTuple):
    """Bytes that a dense model keeps, that the compressed one keeps, and what is saved."""

    dense: int
    compact: int
    saved: int


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
    dense: tuple[str, ...] = (),
) -> tuple[Kept, Kept, MemoryReport]:
    """Return what autograd keeps of ``model`` as it is and compressed, what the report says of both, and the report."""
    dense_bytes = kept(model, x, make_context())
    keep = Keep(sparsity=0.6, block_size=16)
    convert(model, rules={**dict.fromkeys(dense, None), "type:linear": keep, "*": None})
    compact_bytes = kept(model, x, make_context())
    with SavedTensorMeter(model, x) as meter, make_context():
        model(x)
    revert(model)
    report = meter.report()
    announced = Kept(report.dense_bytes, report.stored_bytes, report.saved_bytes)
    return Kept(dense_bytes, compact_bytes, dense_bytes - compact_bytes), announced, report


@pytest.mark.parametrize("make", MODELS)
def test_saved_is_what_the_dense_model_keeps_more(make):
    found, announced, _ = compare(make(), torch.randn(3, 8, E))
    assert announced == found


@pytest.mark.parametrize(
    ("make", "dense"), [(LearnedQueries, ()), (LearnedQueries, ("a",)), (Leaf, ("b",)), (Leaf, ())]
)
def test_one_copy_of_a_leaf_that_several_layers_read(make, dense):
    for x in (torch.randn(3, 8, E), torch.randn(6, 8, E)[::2]):
        found, announced, _ = compare(make(), x.requires_grad_(), dense=dense)
        assert announced == found


@pytest.mark.parametrize("make", [Base, SizedAttention])
def test_without_autocast_no_copies_are_announced(make):
    found, announced, _ = compare(make(), torch.randn(3, 8, E), nullcontext)
    assert announced == found


@pytest.mark.parametrize(("make", "outer", "copies"), [
    (TwoRegions, bf16, 2), (TwoRegions, nullcontext, 2), (RegionPerLayer, bf16, 1), (RegionPerLayer, nullcontext, 2),
])  # fmt: skip
def test_each_region_has_copies_of_its_own(make, outer, copies):
    found, announced, _ = compare(make(), torch.randn(3, 8, E), outer)
    assert announced == found


def test_no_copy_is_kept_of_a_layer_whose_input_needs_no_gradient():
    model, x = nn.Sequential(nn.Linear(E, 96), nn.GELU(), nn.Linear(96, E)), torch.randn(3, 8, E)
    for copies in (1, 2):
        found, announced, _ = compare(model, x.requires_grad_(copies == 2))
        assert announced == found


def test_a_dense_layer_keeps_the_copy_of_the_weight_that_it_shares():
    found, announced, report = compare(Tied(), torch.randn(3, 8, E), dense=("b",))
    assert announced == found
    assert report.saved_bytes > 0


@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 0), (torch.float16, 2), (torch.float32, 1)])
def test_types_of_the_weights(dtype: torch.dtype, copies: int):
    """None of a weight that is 16-bit already, and one for each call of one in the other 16-bit type."""
    model = CalledTwice()
    model.a.to(dtype)
    others = tuple(name for name, _ in model.named_children() if name != "a")
    found, announced, _ = compare(model, torch.randn(3, 8, E), dense=others)
    assert announced == found


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int):
    draw, outer = random.Random(seed), (bf16, nullcontext)[seed % 2]
    model = Random(draw)
    dense = tuple(f"layers.{number}" for number in range(4) if draw.random() < 0.3 and number < len(model.layers))
    found, announced, _ = compare(model, torch.randn(3, 8, E), outer, dense=dense)
    assert announced == found


def test_measuring_changes_neither_gradients_nor_autocast():
    model, x = Base(), torch.randn(3, 8, E)
    convert(model, sparsity=0.6)
    with bf16():
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with torch.autocast("cpu", torch.float16), SavedTensorMeter(model, x):
        model(x)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    with bf16(), SavedTensorMeter(model, x) as meter:
        loss = model(x).sum()
    assert not torch.is_autocast_enabled("cpu")
    assert meter.report().saved_bytes > 4 * ELEMENTS
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
