"""FewBitSaving with activation checkpoints and the compiler: what these keep to compute again is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_actprune.few_bit_saving import FewBitSaving
from tests.checkpointing import WAYS
from tests.few_bit_saving import activation, gradients, made, packed, top_hooks, typical

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("scope", ["around", "inside"])
def test_checkpoints_run_again_exactly_and_nothing_in_them_is_packed(way, scope: str):
    inner = nn.Sequential(nn.LayerNorm(64), nn.GELU())
    region = way(inner)
    attached = region if scope == "around" else inner
    x = activation()
    expected = gradients(region, x, lambda y: y.square().sum())
    with FewBitSaving(attached, min_values=256) as saving:
        made_gradients = gradients(region, x, lambda y: y.square().sum())
    if way is WAYS["own"] and scope == "around":
        assert packed(saving) == 1  # its input: nothing tells it from that of any other function
        return
    torch.testing.assert_close(made_gradients, expected, rtol=0, atol=0)
    assert packed(saving) == 0
    assert top_hooks() is None


def test_what_is_beside_a_checkpoint_in_scope_is_packed():
    model = nn.Sequential(
        nn.LayerNorm(64), WAYS["non_reentrant"](nn.Sequential(nn.Linear(64, 64), nn.GELU())), nn.SiLU()
    )
    with FewBitSaving(model, min_values=256) as saving:
        gradients(model, activation())
    assert [(row.fqn, row.count) for row in saving.rows] == [("0", 1), ("2", 1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("attached_first", [False, True])
def test_a_compiled_region_in_scope_is_left_alone(backend: str, attached_first: bool):
    torch._dynamo.reset()
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))
    model = nn.Sequential(nn.SiLU(), torch.compile(inner, backend=backend))
    x = activation()
    expected = gradients(model, x)
    if attached_first:
        torch._dynamo.reset()
    with FewBitSaving(model, min_values=256) as saving:
        made_gradients = gradients(model, x)
    names = {row.fqn for row in saving.rows}
    if backend == "eager":  # plain operations, in a graph of Dynamo's
        assert names > {"0"}
    else:
        assert names == {"0"}
        torch.testing.assert_close(made_gradients[1:], expected[1:], rtol=0, atol=0)
    assert (made_gradients[0] - expected[0]).norm() <= 3 * typical("int8") * expected[0].norm()


def test_a_whole_compiled_model_has_no_scope():
    torch._dynamo.reset()
    model = torch.compile(made(), backend="aot_eager")
    x = activation()
    expected = gradients(model, x)
    with FewBitSaving(model, min_values=256) as saving:
        torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert saving.rows == []


def test_a_scope_inside_a_compiled_region_does_nothing_and_breaks_no_graph():
    torch._dynamo.reset()
    inner = made()
    x = activation()
    with FewBitSaving(inner, min_values=256) as saving:
        compiled = torch.compile(inner.__call__, backend="aot_eager", fullgraph=True)
        compiled(x).sum().backward()
    assert saving.rows == []
    assert top_hooks() is None
