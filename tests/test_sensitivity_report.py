"""What a measurement of sensitivity suggests and shows."""

from __future__ import annotations

import io
import json
import sys
from fnmatch import fnmatchcase

import pytest
from rich.console import Console

from lightning_actprune import LayerSensitivity, SensitivityGrid, SensitivityReport, SkippedLayer
from lightning_actprune.name_patterns import grouped

GRID = SensitivityGrid([0, 0.5, 0.8], ["same", "int4"])
BYTES = {"same": 1.0, "int4": 0.3}


def report(cosines: dict[str, dict[tuple[str, float], float]], **names: str) -> SensitivityReport:
    """Return a report with these cosines by layer, format and sparsity; ``names``: first names of other layers."""
    rows = [
        LayerSensitivity(fqn, "Linear", sparsity, form, cosine, cosine, sparsity, BYTES[form] * (1 - sparsity))
        for fqn, line in cosines.items()
        for (form, sparsity), cosine in line.items()
    ]
    known = {name: name for name in cosines} | names
    return SensitivityReport(rows, [SkippedLayer("idle", "Linear", "not called")], 2, GRID, known)


def line(*cosines: float) -> dict[tuple[str, float], float]:
    return dict(zip([("same", 0.0), ("same", 0.5), ("same", 0.8), ("int4", 0.0), ("int4", 0.5)], cosines, strict=True))


GOOD, FAIR, BAD = line(1, 0.99, 0.95, 0.99, 0.98), line(1, 0.92, 0.7, 0.98, 0.91), line(1, 0.5, 0.2, 0.97, 0.5)
BLOCKS = {f"blocks.{n}.{name}": value for n in range(3) for name, value in (("fc1", FAIR), ("fc2", GOOD))}


def test_the_highest_sparsity_that_is_good_enough():
    found = report({**BLOCKS, "head": BAD})
    assert found.suggest() == {"blocks.*.fc1": 0.5, "blocks.*.fc2": 0.8}
    assert found.suggest(0.96) == {"blocks.*.fc2": 0.5}
    assert found.suggest(1.0) == {}
    assert found.suggest(0.9, "int4") == {"blocks.*.fc1": 0.5, "blocks.*.fc2": 0.5, "head": 0}
    assert list(found.suggest(0)) == ["blocks.*.fc1", "blocks.*.fc2", "head"]


def test_the_cheapest_settings_that_are_good_enough():
    assert report({**BLOCKS, "head": BAD}).suggest_layers() == {
        "blocks.*.fc1": {"sparsity": 0.5, "value_format": "int4"},
        "blocks.*.fc2": {"sparsity": 0.5, "value_format": "int4"},
        "head": {"sparsity": 0.0, "value_format": "int4"},
    }


def test_equally_cheap_settings_are_told_apart_by_their_cosine():
    rows = [
        LayerSensitivity("a", "Linear", s, "int4", c, 1, 0, 0.2) for s, c in ((0.1, 0.91), (0.2, 0.95), (0.3, 0.92))
    ]
    found = SensitivityReport(rows, [], 1, GRID, {"a": "a"})
    assert found.suggest_layers() == {"a": {"sparsity": 0.2, "value_format": "int4"}}


def test_what_is_no_number_or_stores_no_less_is_not_suggested():
    nan = float("nan")
    rows = [LayerSensitivity("a", "Linear", 0.5, "same", nan, nan, 0, 0.5)]
    rows.append(LayerSensitivity("b", "Linear", 0.01, "same", 0.99, 1, 0, 1.02))
    found = SensitivityReport(rows, [], 1, GRID, {"a": "a", "b": "b"})
    assert found.suggest(0) == found.suggest_layers(0) == {}


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
    assert grouped(wanted) == patterns
    for name, value in wanted.items():
        assert {found for pattern, found in patterns.items() if fnmatchcase(name, pattern)} <= {value} - {None} or {}
        assert value is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def test_layers_that_were_not_measured_are_not_matched_and_second_names_are():
    skipped = {"blocks.3.fc1": "blocks.3.fc1"}
    found = report({"blocks.0.fc1": FAIR, "blocks.1.fc1": FAIR}, **skipped)
    assert found.suggest() == {"blocks.0.fc1": 0.5, "blocks.1.fc1": 0.5}
    tied = report({"blocks.0.fc1": FAIR, "blocks.1.fc1": FAIR}, **{"blocks.2.fc1": "blocks.0.fc1"})
    assert tied.suggest() == {"blocks.*.fc1": 0.5}


def test_yaml_is_read_as_what_was_suggested():
    yaml = pytest.importorskip("yaml", reason="comes with jsonargparse")
    found = report({**BLOCKS, "head": BAD})
    rest = {"block_size": 32, "scope": "sample", "block_selection": "largest", "min_features": 64}
    assert yaml.safe_load(found.to_yaml(0.9)) == {"sparsity": found.suggest(0.9), "value_format": "same", **rest}
    formatted = yaml.safe_load(found.to_yaml(0.9, "int4"))
    assert (formatted["sparsity"], formatted["value_format"]) == (found.suggest(0.9, "int4"), "int4")
    layers = found.suggest_layers(0.9)
    assert yaml.safe_load(found.to_yaml(0.9, layers=True)) == {"include": list(layers), "layers": layers, **rest}
    nothing = report({"head": BAD})
    assert yaml.safe_load(nothing.to_yaml(1.0)) == {"sparsity": {}, "value_format": "same", **rest}
    assert yaml.safe_load(nothing.to_yaml(1.0, layers=True)) == {"include": [], "layers": {}, **rest}


def test_rows_are_plain_values():
    plain = report({"head": BAD}).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["rows"][1] == {
        "fqn": "head",
        "kind": "Linear",
        "sparsity": 0.5,
        "value_format": "same",
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
    assert "'same'" in text
    assert "'int4'" in text
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
        found.suggest_layers("0.9")
    with pytest.raises(ValueError, match=r"`value_format` must be one that was measured \(same, int4\), got 'int2'"):
        found.to_yaml(0.9, "int2")
