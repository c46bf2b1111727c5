"""A mean over few repeats, and how far it can be trusted. Pure.

Repeats are taken as drawn from one normal distribution, so the mean lies within t · s / √n of what
endless repeats would give, in 95 of 100 benchmarks; s is the sample's standard deviation and t
Student's quantile for n - 1 degrees of freedom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from orchestrator.evidence.bench.record import Interval

# Two-sided 95 % quantiles of Student's t: Abramowitz and Stegun, table 26.10.
# fmt: off
_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
_T_95_MANY = ((120, 1.980), (60, 2.000), (40, 2.021))
"""From so many degrees of freedom on; between two rows the wider one is right enough."""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of `values`, at least one, with its 95 % interval."""
    mean = math.fsum(values) / len(values)
    half_width = None
    if len(values) > 1:
        half_width = t_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, half_width=half_width, values=tuple(values))


def t_95(degrees_of_freedom: int) -> float:
    """Return Student's two-sided 95 % quantile; `degrees_of_freedom` is 1 or more."""
    if degrees_of_freedom <= len(_T_95):
        return _T_95[degrees_of_freedom - 1]
    return next((t for least, t in _T_95_MANY if degrees_of_freedom >= least), _T_95[-1])
