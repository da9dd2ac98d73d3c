"""Exports and pickles of a model after a fit, and its summary during the fit."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.utilities.model_summary import summarize
from torch import nn

from lightning_actprune import ActivationPruning
from tests.support.helpers import FEATURES, Net, assert_plain, trainer


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_exports_and_pickles_are_those_of_a_model_never_fit(tmp_path, capsys, caplog):
    model, x = Net(), torch.randn(2, 8, FEATURES)
    model.watch = lambda module: str(summarize(module, max_depth=2))
    with caplog.at_level("INFO"):
        trainer(ActivationPruning("max", rules={"body.0": None}, verbose=False), enable_model_summary=True).fit(model)
    rows = [cells for line in model.seen[0].splitlines() if len(cells := line.split("|")) > 3]
    types = {cells[1].strip(): cells[2].strip() for cells in rows}
    assert (types["body.0"], types["body.2"], types["head"]) == ("Linear",) + ("ActivationPrunedLinear",) * 2
    assert "ActivationPrunedLinear" in capsys.readouterr().out + caplog.text

    assert_plain(model)
    untouched = Net()
    untouched.load_state_dict(model.state_dict())
    programs = [torch.export.export(each.eval(), (x,)) for each in (model, untouched)]
    found, expected = ([str(node.target) for node in program.graph.nodes] for program in programs)
    assert found == expected
    torch.testing.assert_close(programs[0].module()(x), untouched(x), rtol=0, atol=0)

    torch.jit.save(torch.jit.trace(model, x), tmp_path / "traced.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "traced.pt")(x), untouched(x), rtol=0, atol=0)
    for each, name in ((model, "ours.pt"), (untouched, "bare.pt")):
        torch.save(copy.deepcopy(nn.ModuleDict({"body": each.body, "head": each.head})), tmp_path / name)
    assert all(b"actprune" not in (tmp_path / name).read_bytes() for name in ("traced.pt", "ours.pt"))
    assert (tmp_path / "ours.pt").stat().st_size == (tmp_path / "bare.pt").stat().st_size
