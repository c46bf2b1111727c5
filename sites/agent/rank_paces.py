"""Compares the ranks of a site, and tells which one the others wait for. Pure.

Each rank says now and then how long it has waited for others of its site, as a median over its last
steps (sites/worker/exchange/rank_pace.py). Who is late waits least. The cost is how much longer the
others wait than it does, on average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from isthmus.protos import metrics
from isthmus.sites.local.rank_messages import Metric
from isthmus.topology.spec.slow_causes import PaceFacts, cause

_FACTS = (
    metrics.BETWEEN_S,
    metrics.RUN_QUEUE,
    metrics.THROTTLED,
    metrics.STEAL,
    metrics.CLOCK_HZ,
)
_NEEDED = (
    metrics.RANK_NUMBER,
    metrics.NUM_RANKS,
    metrics.NUM_STEPS,
    metrics.STEP_S,
    metrics.SITE_WAIT_S,
)


class RankPaces:
    """The ranks of one site of one run."""

    def __init__(self) -> None:
        self._latest: dict[int, Metric] = {}
        """By rank, since ranks were compared."""

    def take(self, message: Metric) -> Metric | None:
        """Take a metric of kind RANK.

        Return one of kind RANKS once all ranks have told of their steps, else None.
        """
        values = message.values
        if not all(math.isfinite(values.get(name, math.nan)) for name in _NEEDED):
            return None  # a script's own record, of our kind
        num_ranks = int(values[metrics.NUM_RANKS])
        self._latest[int(values[metrics.RANK_NUMBER])] = message
        if len(self._latest) < num_ranks:
            return None
        told, self._latest = self._latest, {}
        return _compared(told)


def _compared(told: Mapping[int, Metric]) -> Metric:
    waits_s = {rank: each.values[metrics.SITE_WAIT_S] for rank, each in told.items()}
    late = min(waits_s, key=lambda rank: (waits_s[rank], rank))
    others = [each for rank, each in told.items() if rank != late] or [told[late]]
    others_s = [each.values[metrics.SITE_WAIT_S] for each in others]
    cost_s = max(0.0, math.fsum(others_s) / len(others_s) - waits_s[late])
    step_s = _mean([*told.values()], metrics.STEP_S) or 0.0
    means = {name: _mean([*told.values()], name) for name in _FACTS}
    labels = dict(told[late].labels)
    slowdown = labels.pop(metrics.SLOWDOWN, "")
    mine = _facts([told[late]], slowdown)
    why = cause(mine, _facts(others), cost_s=cost_s, step_s=step_s)
    return Metric(
        kind=metrics.RANKS,
        step=max(each.step for each in told.values()),
        values={
            metrics.RANK_NUMBER: float(late),
            metrics.NUM_RANKS: float(len(told)),
            metrics.NUM_STEPS: min(each.values[metrics.NUM_STEPS] for each in told.values()),
            metrics.STEP_S: step_s,
            metrics.COST_S: cost_s,
            **{name: mean for name, mean in means.items() if mean is not None},
        },
        labels=labels | ({metrics.WHY: why} if why else {}),
    )


def _mean(told: list[Metric], name: str) -> float | None:
    """Return the mean of those that know it; None: none does."""
    values = [each.values[name] for each in told if name in each.values]
    return math.fsum(values) / len(values) if values else None


def _facts(told: list[Metric], slowdown: str = "") -> PaceFacts:
    return PaceFacts(slowdown=slowdown, **{name: _mean(told, name) for name in _FACTS})
