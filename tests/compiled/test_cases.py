"""Every layer that compilers see as a dense one with marks: outputs, gradients and bytes beside those of eager mode."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import nn

from lightning_actprune.compiled.marks import Model
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.convert import is_converted, layers, mark_layers
from tests.support.cases import CASES
from tests.support.measured import gradients, kept_bytes, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DEFAULT = "linear", "gelu"
INTEGRATION = "layer-norm", "conv2d", "batch-norm-2d", "silu", "group-norm", "affine"
FOREIGN = "llama-norm", "llama-mlp", "transformers-NewGELUActivation"
"""Of each kind of layer one, and those that are written out."""


NAMES = [
    *DEFAULT,
    *(pytest.param(name, marks=pytest.mark.integration) for name in INTEGRATION),
    *(pytest.param(name, marks=pytest.mark.foreign) for name in FOREIGN),
]


def mark(model: nn.Module) -> bool:
    """Let compilers see the layers as dense ones, and return whether there are any that they see so."""
    found = [layer for _, layer in layers(model) if is_converted(layer)]
    for owner in {layer.owner for layer in found}:
        mark_layers(model, owner)
    return all(layer.traced == "marked" for layer in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_keeps_as_much_as_in_eager_mode_and_is_about_as_far_off(name: str, monkeypatch):
    monkeypatch.setattr(sys.modules["lightning_actprune.convert"], "Model", partial(Model, min_values=64))
    torch._dynamo.reset()
    case = CASES[name]
    dense, model = case.pair()
    x = case.input()
    assert mark(model)
    with CompiledPacking() as packing:
        # Of a product, since what is given to the graph is kept by whoever gives it.
        compiled = torch.compile(lambda x: model(x * 1.0), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), dense(x), rtol=1e-5, atol=1e-5)
        found, kept = gradients(model, x, compiled), kept_bytes(model, x, compiled)
    assert packing.rows
    assert not packing.was_missed
    right, eager = gradients(dense, x), gradients(model, x)
    # In eager mode derivatives and normalised values are stored, here what they are computed from: that of a GELU is
    # off by 1.8 times as much for it with as many bits, and the input gradient of a norm by up to 2.1.
    for of, expected in right.items():
        assert relative_error(found[of], expected) <= 2.5 * relative_error(eager[of], expected) + 1e-6, of
    assert kept <= 1.2 * kept_bytes(model, x)
