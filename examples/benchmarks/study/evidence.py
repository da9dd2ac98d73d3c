r"""What a few runs of each setting can show: differences to dense with their standard error, and what would be seen.

Runs of one seed have weights, the order of the samples and augmentation in common, and so part of their score: much of
it in a fine-tuning, little after a long training. Score j of setting i is taken to be::

    y_ij = setting_i + seed_j + e_ij

with errors e that scatter alike in all settings of a study, so that one variance serves all of them. It is that of what
is left of a fit by least squares, with as many degrees of freedom as there are runs less what they determine; where
these are too few, without the seeds. A difference to dense is that over the n seeds which both have::

    s^2 = sum of e^2 / nu        difference = mean of (y_ij - y_j of dense)        standard error = s sqrt(2 / n)

A difference counts as seen where its size is above ``t(.975, nu)`` standard errors, which happens by chance once in 20
times. What is there in truth is seen in 4 of 5 repetitions of the study if it is as large as the *detectable
difference*::

    (t(.975, nu) + t(.8, nu)) standard error

Several studies that score alike, k of them, are taken together by the mean of their differences: weights by how exactly
each is known would prefer studies whose scatter came out too small by chance. Degrees of freedom are Satterthwaite's::

    difference = mean of differences        error^2 = sum of error^2 / k^2
    nu = (sum of error^2)^2 / sum of (error^4 / nu of each)

Quantiles of Student's distribution are those of the normal one with the first three terms in 1 / nu that correct them
(Abramowitz & Stegun, 26.7.5), right to 1 % from 4 degrees of freedom on. With fewer, nothing is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.benchmarks.study import results
from examples.benchmarks.study.settings import PRESET, parse_setting
from examples.benchmarks.summaries import Records, Summary
from lightning_actprune import config

FEWEST = 4
"""Degrees of freedom with which something can be said."""
CHANCE, POWER = 0.05, 0.8
UNTOUCHED = 15.9
"""Of 16 bits: who keeps so many has hardly anything compressed, and says nothing of a setting."""


class Scatter(NamedTuple):
    """How far runs scatter that should score alike.

    Args:
        deviation: Standard deviation, of all settings together.
        freedom: Degrees of freedom of that.
    """

    deviation: float
    freedom: int


def quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's distribution."""
    z = statistics.NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def scatter(study: Records) -> Scatter | None:
    """Return how far the runs of a study scatter, if there are enough to say it."""
    settings = [results.kept(record) for record in study]
    seeds = [record["seed"] for record in study]
    scores = torch.tensor([record["accuracy"] for record in study], dtype=torch.float64)
    for effects in ((settings, seeds), (settings,)):
        indicators = torch.cat([indicators_of(effect) for effect in effects], dim=1)
        freedom = len(study) - int(torch.linalg.matrix_rank(indicators))
        if freedom >= FEWEST:
            fitted = indicators @ torch.linalg.pinv(indicators) @ scores
            return Scatter(float(torch.linalg.vector_norm(scores - fitted)) / math.sqrt(freedom), freedom)
    return None


def indicators_of(effect: Sequence[Any]) -> Tensor:
    """Return which of the values that there are each run has, ``[runs, values]``."""
    values = list(dict.fromkeys(effect))
    return torch.tensor([[float(mine == value) for value in values] for mine in effect], dtype=torch.float64)


class Finding(NamedTuple):
    """How a setting differs from dense.

    Args:
        difference: Of the means.
        error: Its standard error.
        freedom: Degrees of freedom of that.
    """

    difference: float
    error: float
    freedom: float

    @property
    def seen(self) -> float:
        """From which size on a difference counts as seen."""
        return quantile(1 - CHANCE / 2, self.freedom) * self.error

    @property
    def detectable(self) -> float:
        """What would be seen most of the time."""
        return self.seen + quantile(POWER, self.freedom) * self.error

    def shown(self, digits: int) -> str:
        """Return the difference with its error."""
        return f"{self.difference:+.{digits}f} ± {self.error:.{digits}f}"


def findings(study: Records) -> dict[str, Finding]:
    """Return by setting how it differs from dense; none where too few runs are there to say it."""
    score, settings, known = results.score_of(study[0]), results.by_setting(study), scatter(study)
    dense = settings.pop("dense", [])
    apart = {setting: results.apart(runs, dense, score) for setting, runs in settings.items()}
    return {
        setting: Finding(statistics.mean(each), known.deviation * math.sqrt(2 / len(each)), known.freedom)
        for setting, each in apart.items()
        if each and known is not None
    }


def together(found: Sequence[Finding]) -> Finding:
    """Return what several studies say of one setting."""
    squares = [finding.error**2 for finding in found]
    freedom = sum(squares) ** 2 / sum(s**2 / finding.freedom for s, finding in zip(squares, found, strict=True))
    return Finding(statistics.mean(f.difference for f in found), sum(squares) ** 0.5 / len(found), freedom)


def compressed(study: Records) -> dict[str, Finding]:
    """Return the findings of the settings that compress something of this model."""
    kept = {setting: results.mean_of(runs, "bits_per_value") for setting, runs in results.by_setting(study).items()}
    return {setting: finding for setting, finding in findings(study).items() if kept[setting] < UNTOUCHED}


def main_study(task: str | None, records: Records) -> Records:
    """Return the main study of a task, of those from scratch; none if there is none that says something."""
    chosen = [record for record in records if record["task"] == task and not record.get("start")]
    study = results.main_study(chosen) if chosen else []
    return study if study and findings(study) else []


PRESETS = {name: (f"{PRESET}{name}",) for name in config.PRESETS}
PRESETS["paper"] += ("paper",)
PRESETS["max"] += (f"{PRESET}max:0.5",)
"""Settings of the study that stand for a preset; that of the paper is also tried on convolutions, and ``max`` had a
sparsity at first, which is without effect in most models."""


def of_preset(name: str, study: Records) -> tuple[str, Finding | None]:
    """Return what a preset does in a study, of several settings that of the most runs, and how that is called."""
    found, runs = compressed(study) if study else {}, results.by_setting(study)
    settings = [results.kept(asdict(parse_setting(setting))) for setting in PRESETS[name]]
    setting = max((each for each in settings if each in found), key=lambda each: len(runs[each]), default="")
    return setting, found.get(setting)


def presets(studies: Sequence[Records]) -> Summary:
    """One row per preset, dense first: bits over the studies, and the difference to dense in each."""
    scores = [results.score_of(study[0]) for study in studies]
    dense = [score.of(results.by_setting(study)["dense"]) for score, study in zip(scores, studies, strict=True)]
    cells = [results.mean_and_deviation(each, score.digits) for each, score in zip(dense, scores, strict=True)]
    rows = [["dense", "16.00", *cells]]
    for name in PRESETS:
        bits, cells = list[float](), []
        for study, score in zip(studies, scores, strict=True):
            setting, finding = of_preset(name, study)
            cells.append("-" if finding is None else finding_cells(finding, score)[0])
            bits += [results.mean_of(results.by_setting(study)[setting], "bits_per_value")] if setting else []
        ends = dict.fromkeys(f"{end(bits):.2f}" for end in (min, max)) if bits else "-"
        rows.append([f"`{name}`", " - ".join(ends), *cells])
    names = (f"{results.model(s[0])}, {s[0]['epochs']} epochs, {x.name}" for s, x in zip(studies, scores, strict=True))
    return Summary("Presets", ("preset", "bits per value", *names), rows)


def table(study: Records) -> Summary:
    """One row per setting: what it needs, its score over the seeds, and the difference to dense as evidence."""
    score, found, rows = results.score_of(study[0]), findings(study), list[list[str]]()
    for setting, runs in results.by_setting(study).items():
        peak = f"{max(r['peak_mib'] for r in runs):.0f}" if all("peak_mib" in r for r in runs) else "-"
        cells = [setting, peak, f"{results.mean_of(runs, 'bits_per_value'):.2f}", str(len(runs))]
        cells += [results.mean_and_deviation(score.of(runs), score.digits), "-", "-"]
        if setting in found:
            cells[-2:] = finding_cells(found[setting], score)
        rows.append(cells)
    header = ("method", "peak MiB of a step", "bits per value", "seeds", score.name)
    return Summary(results.study_title(study[0]), (*header, *FINDING), rows)


FINDING = "difference to dense ± standard error", "detectable"


def finding_cells(finding: Finding, score: results.Score) -> list[str]:
    """Return what a table says of a difference."""
    mark = " *" if abs(finding.difference) > finding.seen else ""
    return [finding.shown(score.digits) + mark, f"{finding.detectable:.{score.digits}f}"]
