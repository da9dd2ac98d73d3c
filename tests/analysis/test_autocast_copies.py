"""Under autocast, what a report says is saved is what a dense model keeps more than a compressed one, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
from tests.support.saving import bytes_saved


def check(
    model: nn.Module,
    x: Tensor,
    make_context: Callable[[], AbstractContextManager[Any]] = bf16,
    dense: tuple[str, ...] = (),
) -> MemoryReport:
    """Return the report of the compressed model, whose figures are what autograd keeps before and after ``convert``."""
    dense_bytes = bytes_saved(model, x, context=make_context())
    convert(model, rules={**dict.fromkeys(dense), "type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    stored_bytes = bytes_saved(model, x, context=make_context())
    with SavedTensorMeter(model, x) as meter, make_context():
        model(x)
    revert(model)
    report = meter.report()
    assert (report.dense_bytes, report.stored_bytes) == (dense_bytes, stored_bytes)
    assert report.saved_bytes == dense_bytes - stored_bytes
    return report


@pytest.mark.parametrize("make", [*MODELS, TwoRegions, RegionPerLayer])
def test_saved_is_what_the_dense_model_keeps_more(make):
    check(make(), torch.randn(3, 8, E))


@pytest.mark.parametrize(
    ("make", "dense"), [(LearnedQueries, ()), (LearnedQueries, ("a",)), (Leaf, ("b",)), (Leaf, ())]
)
def test_one_copy_of_a_leaf_that_several_layers_read(make, dense):
    for x in (torch.randn(3, 8, E), torch.randn(6, 8, E)[::2]):
        check(make(), x.requires_grad_(), dense=dense)


@pytest.mark.parametrize("make", [Base, SizedAttention, TwoRegions, RegionPerLayer])
def test_each_region_has_copies_of_its_own_and_without_autocast_there_are_none(make):
    check(make(), torch.randn(3, 8, E), nullcontext)


@pytest.mark.parametrize("copies", [1, 2])
def test_no_copy_is_kept_of_a_layer_whose_input_needs_no_gradient(copies: int):
    model = nn.Sequential(nn.Linear(E, 96), nn.GELU(), nn.Linear(96, E))
    check(model, torch.randn(3, 8, E, requires_grad=copies == 2))


def test_a_dense_layer_keeps_the_copy_of_the_weight_that_it_shares():
    assert check(Tied(), torch.randn(3, 8, E), dense=("b",)).saved_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_of_the_weights(dtype: torch.dtype):
    """No copy of a weight that is 16-bit already, and one for each call of one in the other 16-bit type."""
    model = CalledTwice()
    model.a.to(dtype)
    check(model, torch.randn(3, 8, E), dense=("norm", "b"))


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int):
    draw = random.Random(seed)
    model = Random(draw)
    dense = tuple(f"layers.{number}" for number in range(4) if draw.random() < 0.3 and number < len(model.layers))
    check(model, torch.randn(3, 8, E), (bf16, nullcontext)[seed % 2], dense=dense)


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
