"""What a measurement of sensitivity suggests and shows."""

from __future__ import annotations

import io
import json
import sys
from fnmatch import fnmatchcase

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_actprune import Keep, convert, measure_sensitivity
from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
from lightning_actprune.analysis.sensitivity_report import LayerSensitivity, SensitivityReport, _number, grouped
from lightning_actprune.config import check_rules
from lightning_actprune.report import LayerReport

GRID = SensitivityGrid([0, 0.5, 0.8], [None, 4])
BYTES = {None: 1.0, 4: 0.3}


def report(cosines: dict[str, dict[tuple[int | None, float], float]], **names: str) -> SensitivityReport:
    """Return a report with these cosines by layer, bits and sparsity; ``names``: first names of other layers."""
    rows = [
        LayerSensitivity(fqn, "Linear", sparsity, bits, cosine, cosine, sparsity, BYTES[bits] * (1 - sparsity))
        for fqn, line in cosines.items()
        for (bits, sparsity), cosine in line.items()
    ]
    known = {name: name for name in cosines} | names
    return SensitivityReport(rows, [LayerReport("idle", "Linear", "linear", reason="not called")], 2, GRID, known)


def line(*cosines: float) -> dict[tuple[int | None, float], float]:
    return dict(zip([(None, 0.0), (None, 0.5), (None, 0.8), (4, 0.0), (4, 0.5)], cosines, strict=True))


GOOD, FAIR, BAD = line(1, 0.99, 0.95, 0.99, 0.98), line(1, 0.92, 0.7, 0.98, 0.91), line(1, 0.5, 0.2, 0.97, 0.5)
BLOCKS = {f"blocks.{n}.{name}": value for n in range(3) for name, value in (("fc1", FAIR), ("fc2", GOOD))}


def test_what_keeps_the_fewest_bytes_and_is_good_enough():
    found = report({**BLOCKS, "head": BAD})
    half, all_blocks = Keep(bits=4, sparsity=0.5), Keep(bits=4)
    assert found.suggest() == {"blocks.*.fc1": half, "blocks.*.fc2": half, "head": all_blocks}
    assert found.suggest(0.96) == {"blocks.*.fc1": all_blocks, "blocks.*.fc2": half, "head": all_blocks}
    assert found.suggest(1.0) == {"blocks.*.fc1": None, "blocks.*.fc2": None, "head": None}


def test_equally_cheap_settings_are_told_apart_by_their_cosine():
    rows = [LayerSensitivity("a", "Linear", s, 4, c, 1, 0, 0.2) for s, c in ((0.1, 0.91), (0.2, 0.95), (0.3, 0.92))]
    assert SensitivityReport(rows, [], 1, GRID, {"a": "a"}).suggest() == {"a": Keep(bits=4, sparsity=0.2)}


def test_what_is_no_number_or_stores_no_less_stays_dense():
    nan = float("nan")
    rows = [LayerSensitivity("a", "Linear", 0.5, None, nan, nan, 0, 0.5)]
    rows.append(LayerSensitivity("b", "Linear", 0.01, None, 0.99, 1, 0, 1.02))
    assert SensitivityReport(rows, [], 1, GRID, {"a": "a", "b": "b"}).suggest(0) == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("wanted", "patterns"),
    [
        ({"b.0.x": 1, "b.1.x": 1, "b.10.x": 1, "c": 1}, {"b.*.x": 1, "c": 1}),
        ({"b.0.x": 1, "b.1.x": 2, "b.2.x": 1}, {"b.0.x": 1, "b.1.x": 2, "b.2.x": 1}),
        ({"b.0.x": 1, "b.1.x": None}, {"b.0.x": 1}),
        # A star would match further down, too.
        ({"b.0.x": 1, "b.1.x": 1, "b.1.y.x": 2}, {"b.0.x": 1, "b.1.x": 1, "b.1.y.x": 2}),
        # Stages that differ, of blocks that do not.
        (
            {"s.0.b.0.x": 1, "s.0.b.1.x": 1, "s.1.b.0.x": 2, "s.1.b.1.x": 2},
            {"s.0.b.*.x": 1, "s.1.b.*.x": 2},
        ),
        ({"s.0.b.0.x": 1, "s.1.b.0.x": 1, "s.0.b.1.x": 2, "s.1.b.1.x": 2}, {"s.*.b.0.x": 1, "s.*.b.1.x": 2}),
        # No star alone, which is for whatever there is.
        ({"0": 1, "2": 1}, {"0": 1, "2": 1}),
        ({"b[0].1": 1, "b[0].2": 1}, {"b[[]0].*": 1}),
        ({}, {}),
    ],
)
def test_patterns_say_what_was_wanted(wanted, patterns):
    assert grouped(wanted, [name for name, value in wanted.items() if value is not None]) == patterns
    for name, value in wanted.items():
        assert {found for pattern, found in patterns.items() if fnmatchcase(name, pattern)} <= {value} - {None} or {}
        assert value is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def test_layers_that_were_not_measured_are_not_matched_and_second_names_are():
    skipped = {"blocks.3.fc1": "blocks.3.fc1"}
    found = report({"blocks.0.fc1": FAIR, "blocks.1.fc1": FAIR}, **skipped)
    assert found.suggest() == dict.fromkeys(("blocks.0.fc1", "blocks.1.fc1"), Keep(bits=4, sparsity=0.5))
    tied = report({"blocks.0.fc1": FAIR, "blocks.1.fc1": FAIR}, **{"blocks.2.fc1": "blocks.0.fc1"})
    assert tied.suggest() == {"blocks.*.fc1": Keep(bits=4, sparsity=0.5)}


def test_yaml_is_read_as_what_was_suggested():
    yaml = pytest.importorskip("yaml", reason="comes with jsonargparse")
    found = report({**BLOCKS, "head": BAD})
    assert check_rules(yaml.safe_load(found.to_yaml(0.96))["rules"]) == found.suggest(0.96)
    assert check_rules(yaml.safe_load(found.to_yaml(1.0))["rules"]) == found.suggest(1.0)
    assert yaml.safe_load(report({}).to_yaml()) == {"rules": {}}
    assert yaml.safe_load(_number(1e-5)) == 1e-5


def test_suggestions_are_rules_of_convert():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model["again"] = model["first"]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model["out"](model["again"](model["first"](x)).relu()).square().sum()

    rules = measure_sensitivity(model, loss, [torch.randn(8, 64)], sparsities=[0.5], bits=[4]).suggest(0.1)
    assert rules == {"first": Keep(bits=4, sparsity=0.5), "out": Keep(bits=4, sparsity=0.5)}
    assert {layer.fqn: layer.keep for layer in convert(model, rules=rules).converted} == rules


def test_rows_are_plain_values():
    plain = report({"head": BAD}).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["rows"][1] == {
        "fqn": "head",
        "kind": "Linear",
        "sparsity": 0.5,
        "bits": None,
        "cosine": 0.5,
        "norm_ratio": 0.5,
        "dropped_energy": 0.5,
        "stored_share": 0.5,
    }
    assert (plain["grid"]["sparsities"], plain["grid"]["block_size"]) == ([0, 0.5, 0.8], 32)
    assert plain["skipped"] == [{"fqn": "idle", "kind": "Linear", "reason": "not called"}]


def shown(content) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(content)
    return console.file.getvalue()


def test_tables_fit_a_narrow_terminal():
    found = report({**BLOCKS, "head": BAD})
    text = shown(found.table())
    assert "values as they are" in text
    assert "4 bits" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    [same, int4] = [line.split("│")[1:-1] for line in text.splitlines() if "head" in line]
    assert [cell.strip() for cell in same] == ["head", "1.00", "0.50", "0.20"]
    assert [cell.strip() for cell in int4] == ["head", "0.97", "0.50"]
    assert "... and 5 more" in shown(found.table(max_layers=2))
    assert shown(SensitivityReport([], [], 0, GRID).table()) == ""


def test_heatmap(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    found = report({**BLOCKS, "head": BAD})
    found.heatmap(tmp_path / "cosines.png")
    found.heatmap(str(tmp_path / "cosines.svg"))
    assert (tmp_path / "cosines.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "cosines.svg").read_text()
    with pytest.raises(ValueError, match="no layer was measured"):
        SensitivityReport([], [], 0, GRID).heatmap(tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"lightning_actprune\[plots\]"):
        found.heatmap(tmp_path / "cosines.png")


def test_errors_name_the_argument():
    found = report({"head": BAD})
    with pytest.raises(ValueError, match=r"`min_cosine` must be in \[0, 1\]"):
        found.suggest(90)
    with pytest.raises(TypeError, match="`min_cosine` must be a number"):
        found.suggest("0.9")
