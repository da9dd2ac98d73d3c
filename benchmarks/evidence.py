r"""What a few runs of each setting can show: differences to dense, their standard error, and what would be seen.

Runs of one seed share weights, order and augmentation, and so a part of their score. Score j of setting i is taken as

    y_ij = setting_i + seed_j + e_ij

with errors e of one variance for all settings of a study. It is that of the residuals of a least squares fit. With too
few degrees of freedom, the fit leaves out the seeds. A difference to dense is that over the n seeds which both have:

    s^2 = sum of e^2 / nu        difference = mean of (y_ij - y_j of dense)        standard error = s sqrt(2 / n)

A difference counts as seen if it is larger than t(.975, nu) standard errors, which happens by chance once in 20 times.
It is *detectable* if it would be seen in 4 of 5 repetitions of the study: (t(.975, nu) + t(.8, nu)) errors.

k studies with the same score are combined by the plain mean of their differences, since weights by precision would
prefer studies whose scatter came out small by chance. Degrees of freedom are Satterthwaite's:

    error^2 = sum of error^2 / k^2        nu = (sum of error^2)^2 / sum of (error^4 / nu of each)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Records = list[dict[str, Any]]
FEWEST = 4
"""Degrees of freedom below which nothing is said."""


class Finding(NamedTuple):
    """A difference to dense, its standard error and the degrees of freedom of that."""

    difference: float
    error: float
    freedom: float

    @property
    def seen(self) -> float:
        """Size from which on a difference counts as seen."""
        return quantile(0.975, self.freedom) * self.error

    @property
    def detectable(self) -> float:
        """Size that would be seen in four of five repetitions."""
        return self.seen + quantile(0.8, self.freedom) * self.error

    def cells(self, digits: int) -> list[str]:
        """Return the cells of a table: the difference with its error, starred if it is seen, and what is detectable."""
        star = " *" if abs(self.difference) > self.seen else ""
        difference = round(self.difference, digits) + 0.0  # no negative zero
        return [f"{difference:+.{digits}f} ± {self.error:.{digits}f}{star}", f"{self.detectable:.{digits}f}"]


def quantile(share: float, freedom: float) -> float:
    """Return a quantile of Student's distribution (Abramowitz & Stegun 26.7.5, right to 1 % from 4 degrees on)."""
    z = statistics.NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def scatter(study: Records) -> tuple[float, int] | None:
    """Return standard deviation and degrees of freedom of the errors, if there are enough runs."""
    effects = [[r["setting"] for r in study], [r["seed"] for r in study]]
    scores = np.array([r["accuracy"] for r in study])
    for chosen in (effects, effects[:1]):
        columns = [[float(mine == value) for mine in effect] for effect in chosen for value in dict.fromkeys(effect)]
        matrix = np.array(columns).T  # [runs, settings and seeds]
        freedom = len(study) - int(np.linalg.matrix_rank(matrix))
        if freedom >= FEWEST:
            residuals = scores - matrix @ np.linalg.pinv(matrix) @ scores
            return float(np.linalg.norm(residuals)) / math.sqrt(freedom), freedom
    return None


def findings(study: Records, sign: int = 1) -> dict[str, Finding]:
    """Return by setting how the runs of a study differ from dense; `sign` is -1 where `accuracy` is a negative loss."""
    errors = scatter(study)
    dense = {r["seed"]: r["accuracy"] for r in study if r["setting"] == "dense"}
    by_setting = dict[str, Finding]()
    for setting in dict.fromkeys(r["setting"] for r in study):
        runs = [r for r in study if r["setting"] == setting and r["seed"] in dense]
        if errors and runs and setting != "dense":
            mean = sign * statistics.mean(r["accuracy"] - dense[r["seed"]] for r in runs)
            by_setting[setting] = Finding(mean, errors[0] * math.sqrt(2 / len(runs)), errors[1])
    return by_setting


def together(findings: Sequence[Finding]) -> Finding:
    """Return what several studies say of one setting."""
    squares = [finding.error**2 for finding in findings]
    freedom = sum(squares) ** 2 / sum(s**2 / finding.freedom for s, finding in zip(squares, findings, strict=True))
    return Finding(statistics.mean(f.difference for f in findings), sum(squares) ** 0.5 / len(findings), freedom)
