"""Tables of pages are those of the records, and what they say of few runs is right."""

import statistics

import pytest

from benchmarks import evidence, report


def test_tables_are_those_of_the_records(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_each_table_has_one_pair_of_markers():
    texts = {report.ROOT / "README.md": "<!-- table: nothing -->\n<!-- end table -->"}
    with pytest.raises(ValueError, match="nothing"):
        report.rendered(texts)


def run(setting, seed, accuracy):
    return {"setting": setting, "seed": seed, "accuracy": accuracy}


def test_seeds_in_common_do_not_count_as_scatter():
    seeds = [0.0, 5.0, -3.0, 9.0, 1.0]
    errors = [0.1, -0.1, 0.0, 0.1, -0.1]
    study = [run("dense", i, 70 + of) for i, of in enumerate(seeds)]
    study += [run("max", i, 69 + of + error) for i, (of, error) in enumerate(zip(seeds, errors, strict=True))]
    finding = evidence.findings(study)["max"]
    # With two settings, residuals are half of the differences' own: a paired t test.
    assert finding.difference == pytest.approx(-1)
    assert finding.error == pytest.approx(statistics.stdev(errors) / 5**0.5)
    assert finding.freedom == 4
    assert finding.seen == pytest.approx(2.776 * finding.error, rel=0.01)
    assert finding.cells(2)[0].endswith("*")
