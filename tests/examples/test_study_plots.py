"""Pictures of the accuracy study: what is drawn of made-up records, and which files are written."""

import json
import math

import pytest

from examples.benchmarks import study_plots
from examples.benchmarks.study import evidence
from tests.examples.study_records import study_record

pytest.importorskip("matplotlib", reason="only pictures need it")

DENSE = ("dense",)


def grid_records(**more):
    """Return runs of two seeds in which a sparsity costs 10 times itself and a block of 32 one more."""
    runs = [(DENSE, 80.0)] + [
        (("pruned", s, b, "same"), 80.0 - 10 * s - (b == 32))
        for s in (0.5, 0.2)
        for b in (32, 16)
        if (s, b) != (0.2, 32)
    ]
    return [
        study_record(setting, seed, accuracy + 2 * seed, losses=[3.0 + seed, 1 + (setting[1:] or [0])[0]], **more)
        for seed in (0, 1)
        for setting, accuracy in runs
    ]


@pytest.mark.parametrize(("task", "sign"), [("resmlp", 1), ("gpt", -1)])
def test_heatmap_shows_means_less_those_of_dense(task, sign):
    others = [("pruned", 0.2, 32, "int4"), ("pruned", 0.2, 8, "same")]
    left_out = (
        study_record(others[0], 0, 5.0, task=task),
        study_record(others[1], 0, 5.0, task=task, block_selection="swap"),
    )
    axes = study_plots.heatmap([*grid_records(task=task), *left_out]).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["16", "32"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0.2", "0.5"]
    found = {text.get_position(): float(text.get_text()) for text in axes.texts}
    assert found == {(0, 0): -2.0 * sign, (0, 1): -5.0 * sign, (1, 1): -6.0 * sign}
    drawn = axes.images[0].get_array().filled(math.nan)
    assert drawn[:, 0].tolist() == [-2.0, -5.0]  # worse is red, whatever the score
    assert math.isnan(drawn[0, 1])
    dense = "81.00 ± 1.41" if sign == 1 else "-81.0000 ± 1.4142"
    assert dense in axes.get_title()


def test_loss_curves_are_means_over_the_seeds_at_the_block_size_with_most_sparsities():
    axes = study_plots.loss_curves(grid_records()).axes[0]
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert curves == {"s = 0.2": [3.5, 1.2], "s = 0.5": [3.5, 1.5], "dense": [3.5, 1.0]}
    assert "b = 16" in axes.get_title()


def test_tradeoff_has_a_point_per_setting_and_dense_as_a_band():
    more = {("int4", "largest"): 4.0, ("int4", "swap"): 5.0, ("same", "largest"): 9.0}
    runs = [
        study_record(
            ("pruned", 0.5, 16, value_format), seed, 70.0 + seed, bits_per_value=bits, block_selection=selection
        )
        for (value_format, selection), bits in more.items()
        for seed in (0, 2)
    ]
    dense = [study_record(DENSE, seed, 80.0 + seed) for seed in (0, 1, 2)]
    axes = study_plots.tradeoff(runs + dense).axes[0]
    assert axes.get_xscale() == "log"
    points = {bars.get_label(): [*bars.lines[0].get_xdata(), *bars.lines[0].get_ydata()] for bars in axes.containers}
    assert points == {"int4": [4.0, 71.0], "int4, swap": [5.0, 71.0], "as they are": [9.0, 71.0]}
    ends = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert ends.tolist() == pytest.approx([71 - math.sqrt(2), 71 + math.sqrt(2)])
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (band.y0, band.y1) == pytest.approx((80.0, 82.0))
    assert [text.get_text() for text in axes.texts] == ["0.5, 16"] * 3
    limited = study_record(("pruned", 0.5, 16, "int2"), 0, 70.0, bits_per_value=2.0, max_dropped_energy=0.2)
    assert [text.get_text() for text in study_plots.tradeoff([limited, *dense]).axes[0].texts] == ["0.5, 16, e ≤ 0.2"]


def test_command_writes_what_there_are_runs_for(tmp_path, capsys):
    records = grid_records() + grid_records(task="gpt", batch=8)
    records += [study_record(DENSE, 0, 1.0, batch=9), study_record(("pruned", 0.5, 8, "int2"), 0, 1.0, batch=9)]
    (tmp_path / "accuracy.json").write_text(json.dumps(records))
    study_plots.main([str(tmp_path / "accuracy.json"), "--out", str(tmp_path / "pictures")])
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    whole = [f"accuracy_{kind}_{task}.png" for kind in ("bits", "heatmap", "losses") for task in ("gpt", "resmlp")]
    assert names == sorted([*whole, "accuracy_bits_resmlp_2.png"])
    assert all((tmp_path / "pictures" / name).read_bytes()[:4] == b"\x89PNG" for name in names)
    assert capsys.readouterr().out.count("Wrote ") == 7


def test_nothing_is_drawn_without_dense_runs():
    assert list(study_plots.pictures([r for r in grid_records() if r["method"] == "pruned"])) == []


def test_differences_have_a_panel_per_study_and_a_bar_per_setting():
    half, few = ("pruned", 0.5, 16, "same"), ("pruned", 0.0, 32, "int2")
    scores = {DENSE: [70.0, 71.0, 72.0], half: [70.0, 71.0, 72.0], few: [61.0, 62.0, 63.0]}
    images = [study_record(setting, seed, s) for setting, each in scores.items() for seed, s in enumerate(each)]
    text = [{**r, "task": "gpt", "accuracy": -r["accuracy"], "start": "ab", "lora": True} for r in images]
    figure = study_plots.differences([images, text, images[:2]])
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("net, 2 epochs", "net, 2 epochs, LoRA")
    assert (first.get_xlabel(), second.get_xlabel()) == (
        "test accuracy %, points more than dense",
        "validation loss, less than dense",
    )
    for axes, sign in ((first, 1), (second, -1)):
        points = axes.containers[0]
        assert list(points[0].get_xdata()) == [0.0, -9.0 * sign]
        low, high = points[2][0].get_segments()[0][:, 0]
        seen = evidence.findings(images)["pruned, s = 0.5, b = 16"].seen
        assert (low, high) == pytest.approx((-seen, seen))
