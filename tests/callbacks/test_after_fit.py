"""What others see of the layers: the model summary during the fit, and export after it."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from lightning_actprune import ActivationPruning
from tests.support.helpers import FEATURES, Net, assert_plain, trainer


@pytest.fixture(scope="module")
def fitted() -> tuple[Net, Net]:
    """A model after a fit that prunes and stores in few bits all that it can, and the same weights in one never fit."""
    model = Net()
    trainer(ActivationPruning(preset="max", verbose=False)).fit(model)
    assert_plain(model)
    untouched = Net()
    untouched.load_state_dict(model.state_dict())
    return model.eval(), untouched.eval()


def operators(model: nn.Module, x: torch.Tensor) -> list[str]:
    program = torch.export.export(model, (x,))
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_an_exported_model_is_that_of_a_model_never_fit(fitted):
    x = torch.randn(2, 8, FEATURES)
    found, expected = (operators(model, x) for model in fitted)
    assert found == expected
    assert found.count("aten.linear.default") == 3
    model = fitted[0]
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_traced_model_knows_nothing_of_the_package(fitted, tmp_path):
    model, x = fitted[0], torch.randn(2, 8, FEATURES)
    torch.jit.save(torch.jit.trace(model, x), tmp_path / "model.pt")
    assert b"actprune" not in (tmp_path / "model.pt").read_bytes()
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(x), model(x), rtol=0, atol=0)


def test_a_pickle_of_the_whole_module_is_that_of_a_model_never_fit(fitted, tmp_path):
    for number, model in enumerate(fitted):
        bare = nn.ModuleDict({"body": model.body, "head": model.head})
        torch.save(copy.deepcopy(bare), tmp_path / f"{number}.pt")
    assert b"actprune" not in (tmp_path / "0.pt").read_bytes()
    sizes = [(tmp_path / f"{number}.pt").stat().st_size for number in range(2)]
    assert sizes[0] == sizes[1]


@pytest.mark.filterwarnings("ignore:You are using the legacy:DeprecationWarning")
def test_onnx(fitted, tmp_path):
    pytest.importorskip("onnxscript")
    torch.onnx.export(fitted[0], (torch.randn(2, 8, FEATURES),), tmp_path / "model.onnx")
    assert b"actprune" not in (tmp_path / "model.onnx").read_bytes()


def test_the_summary_names_the_classes_of_converted_layers(capsys, caplog):
    model = Net()
    model.watch = lambda module: str(summarize(module, max_depth=2))
    with caplog.at_level("INFO"):
        trainer(ActivationPruning(sparsity=0.5, rules={"body.0": None}, verbose=False), enable_model_summary=True).fit(
            model
        )
    lines = model.seen[0].splitlines()
    types = {cells[1].strip(): cells[2].strip() for line in lines if len(cells := line.split("|")) > 3}
    assert (types["body.0"], types["body.2"], types["head"]) == ("Linear",) + ("ActivationPrunedLinear",) * 2
    assert "ActivationPrunedLinear" in capsys.readouterr().out + caplog.text  # Lightning's own, of the top level
