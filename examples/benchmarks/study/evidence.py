r"""What a few runs of each setting can show: differences to dense with their standard error, and what would be seen.

Runs of one setting differ by their seed alone. Their scores are taken to scatter alike in all settings of a study, so
that one variance serves all of them, with as many degrees of freedom as there are runs less settings::

    s^2 = sum over settings of (n - 1) s_setting^2 / nu        nu = sum over settings of (n - 1)
    difference = mean - mean of dense                          standard error = s sqrt(1 / n + 1 / n of dense)

A difference counts as seen where its size is above ``t(.975, nu)`` standard errors, which happens by chance once in 20
times. What is there in truth is seen in 4 of 5 repetitions of the study if it is as large as the *detectable
difference*::

    (t(.975, nu) + t(.8, nu)) standard error

Quantiles of Student's distribution are those of the normal one with the first three terms in 1 / nu that correct them
(Abramowitz & Stegun, 26.7.5), right to 1 % from 4 degrees of freedom on. With fewer, nothing is said.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from examples.benchmarks.study import results
from examples.benchmarks.summaries import Records, Summary

FEWEST = 4
"""Degrees of freedom with which something can be said."""
CHANCE, POWER = 0.05, 0.8


class Scatter(NamedTuple):
    """How far runs of one setting lie apart.

    Args:
        deviation: Standard deviation, of all settings together.
        freedom: Degrees of freedom of that.
    """

    deviation: float
    freedom: int

    def error(self, runs: int, dense: int) -> float:
        """Return the standard error of the difference of two means."""
        return self.deviation * math.sqrt(1 / runs + 1 / dense)

    def seen(self, error: float) -> float:
        """Return the size from which on a difference of this standard error counts as seen."""
        return quantile(1 - CHANCE / 2, self.freedom) * error

    def detectable(self, error: float) -> float:
        """Return the difference that would be seen most of the time."""
        return self.seen(error) + quantile(POWER, self.freedom) * error


def quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's distribution."""
    z = statistics.NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def scatter(study: Records) -> Scatter | None:
    """Return how far the runs of a setting lie apart in a study, if there are enough to say it."""
    groups = [[r["accuracy"] for r in runs] for runs in results.by_setting(study).values()]
    freedom = sum(len(scores) - 1 for scores in groups)
    if freedom < FEWEST:
        return None
    squares = sum(statistics.variance(scores) * (len(scores) - 1) for scores in groups if len(scores) > 1)
    return Scatter(math.sqrt(squares / freedom), freedom)


class Finding(NamedTuple):
    """How a setting differs from dense.

    Args:
        difference: Of the means.
        error: Its standard error.
        seen: From which size on it counts as seen.
        detectable: What would be seen most of the time.
    """

    difference: float
    error: float
    seen: float
    detectable: float


def findings(study: Records) -> dict[str, Finding]:
    """Return by setting how it differs from dense; none where too few runs are there to say it."""
    score, settings, known = results.score_of(study[0]), results.by_setting(study), scatter(study)
    dense = score.of(settings.pop("dense", []))
    if not dense or known is None:
        return {}
    found = {}
    for setting, runs in settings.items():
        error = known.error(len(runs), len(dense))
        difference = statistics.mean(score.of(runs)) - statistics.mean(dense)
        found[setting] = Finding(difference, error, known.seen(error), known.detectable(error))
    return found


def table(study: Records) -> Summary:
    """One row per setting: what it needs, its score over the seeds, and the difference to dense as evidence."""
    score, found, rows = results.score_of(study[0]), findings(study), list[list[str]]()
    for setting, runs in results.by_setting(study).items():
        peak = f"{max(r['peak_mib'] for r in runs):.0f}" if all("peak_mib" in r for r in runs) else "-"
        cells = [setting, peak, f"{results.mean_of(runs, 'bits_per_value'):.2f}", str(len(runs))]
        cells += [results.mean_and_deviation(score.of(runs), score.digits), "-", "-"]
        if setting in found:
            difference, error, seen, detectable = found[setting]
            mark = " *" if abs(difference) > seen else ""
            cells[-2] = f"{difference:+.{score.digits}f} ± {error:.{score.digits}f}{mark}"
            cells[-1] = f"{detectable:.{score.digits}f}"
        rows.append(cells)
    header = ("method", "peak MiB of a step", "bits per value", "seeds", score.name)
    return Summary(results.study_title(study[0]), (*header, "difference to dense ± standard error", "detectable"), rows)
