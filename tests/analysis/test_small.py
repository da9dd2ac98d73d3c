"""SmallTensorProbe: what saved-tensor compression leaves as it is for its few values alone, and all that is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.small import SmallTensorProbe
from lightning_actprune.analysis.step_memory import StepMemoryRecorder
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compression import SHAPE, Runs, activation, attention, packed, top_hooks

INPUT = 4 * 20 * 64 * 4
"""Bytes of an activation."""
assert SHAPE == (4, 20, 64)

FOUND: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
    "an input": (lambda x, w, qkv: x.square(), [INPUT]),
    "a product of two": (lambda x, w, qkv: (x + 1) * (x + 2), [INPUT, INPUT]),
    "one storage, saved twice": (lambda x, w, qkv: x.square() + (x * x), [INPUT]),
    "beside a parameter": (lambda x, w, qkv: x * w[0], [INPUT]),
    "three views of one storage": (lambda x, w, qkv: attention(x, qkv), [INPUT, 3 * INPUT, INPUT]),
    "the input of a product with a weight": (lambda x, w, qkv: x @ (w * (w > 0)), [INPUT]),
    "16 bits": (lambda x, w, qkv: x.bfloat16().square(), [INPUT // 2]),
    "a part of a storage, which is kept in full": (lambda x, w, qkv: x[:1].square(), [INPUT]),
    "another type": (lambda x, w, qkv: x.double().square(), []),
    "no gradient": (lambda x, w, qkv: x.detach().square() * w[0], []),
    "results": (lambda x, w, qkv: x.exp().sigmoid(), []),
    "the result of an operation, which saved it, as an input": (lambda x, w, qkv: x.exp().square(), []),
    "an input of which a part with one value a row, which is not packed, is saved too": (
        lambda x, w, qkv: x.square() + x[..., :1].square(),
        [],
    ),
    "what a checkpoint runs again": (lambda x, w, qkv: checkpoint(torch.square, x + 1, use_reentrant=False), []),
    "expanded": (lambda x, w, qkv: x[:1].expand(4, 20, 64).square(), []),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_kept_for_its_few_values_alone(name: str):
    run, expected = FOUND[name]
    model, x = Runs(run, (64, 64), (64, 192)), activation()
    with SavedTensorCompression(model) as compression, SmallTensorProbe(model, compression) as probe:
        y = model(x)
    assert sorted(probe.small_bytes) == sorted(expected)
    assert packed(compression) == 0
    y.sum().backward()


@pytest.mark.parametrize("name", FOUND)
def test_it_is_what_would_be_packed_if_size_did_not_count(name: str):
    run, expected = FOUND[name]
    model = Runs(run, (64, 64), (64, 192))
    with SavedTensorCompression(model, min_values=1) as compression, SmallTensorProbe(model, compression) as probe:
        y = model(activation())
    assert probe.small_bytes == []
    assert (packed(compression) > 0) == bool(expected)
    del y


def test_all_that_is_kept_is_what_a_step_keeps_at_the_end_of_its_forward():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))
    batch = torch.randn(SHAPE)
    compression = SavedTensorCompression(model, min_values=4000)
    recorder, probe = StepMemoryRecorder(model, batch), SmallTensorProbe(model, compression, batch)
    with recorder, compression, probe:
        loss = F.softmax(model(batch), -1).square().sum()  # outside of the model, and kept too
    assert probe.kept_bytes == recorder.result().activation_bytes[-1] > 0
    assert packed(compression) == 1
    del loss


def test_values_below_the_limit_count_and_those_at_it_do_not():
    model, x = Runs(lambda x: x.sin()), activation()
    for least, expected in ((x.numel(), []), (x.numel() + 1, [INPUT])):
        with SavedTensorCompression(model, min_values=least) as compression:
            with SmallTensorProbe(model, compression) as probe:
                model(x)
            assert probe.small_bytes == expected


def test_modules_that_a_rule_leaves_alone_do_not_count():
    model = Runs(lambda x: x.sin())
    with (
        SavedTensorCompression(model, dense=lambda fqn: True) as compression,
        SmallTensorProbe(model, compression) as probe,
    ):
        model(activation())
    assert probe.small_bytes == []
    assert probe.kept_bytes == INPUT


def test_packing_has_no_listener_but_while_it_is_open():
    model = Runs(lambda x: x.sin())
    with SavedTensorCompression(model) as compression:
        with SmallTensorProbe(model, compression) as probe:
            pass
        model(activation())
    assert compression.on_unchanged is None
    assert probe.kept_bytes == 0
    assert top_hooks() is None


def test_it_can_be_opened_only_where_hooks_can_and_leaves_nothing_behind():
    model = Runs(lambda x: x.sin())
    compression = SavedTensorCompression(model)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        SmallTensorProbe(model, compression).__enter__()
    assert compression.on_unchanged is None
