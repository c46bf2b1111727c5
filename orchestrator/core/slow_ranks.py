"""Finds the rank of a site that the site's other ranks wait for, and why sites are slow. Pure.

A site's agent compares its ranks, over ten steps or more at a time. It tells which one is late,
what that costs the others, and what explains it (sites/agent/rank_paces.py). What a rank costs is
added up, and told once it is much, as of sites (orchestrator/core/slow_sites.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from isthmus.orchestrator.core.slow_sites import SlowAccounts, SlowPeriod
from isthmus.protos import metrics
from isthmus.topology.spec.slow_causes import PaceFacts, cause

_MAX_WORDS = 200
_NEEDED = (
    metrics.RANK_NUMBER,
    metrics.NUM_STEPS,
    metrics.STEP_S,
    metrics.COST_S,
)


class SlowRanks:
    """Takes what agents tell of their ranks."""

    def __init__(self) -> None:
        self._accounts = SlowAccounts()
        self._facts: dict[str, PaceFacts] = {}
        """The latest of each site, on average over its ranks."""

    @property
    def periods(self) -> Sequence[SlowPeriod]:
        """The ranks that have cost others of their site much."""
        return self._accounts.periods

    @property
    def now(self) -> Sequence[SlowPeriod]:
        """Those that are slow now."""
        return self._accounts.now

    def add(
        self, site: str, step: int, values: Mapping[str, float], labels: Mapping[str, str]
    ) -> None:
        """Take what an agent tells of its ranks up to a step."""
        if not all(math.isfinite(values.get(name, math.nan)) for name in _NEEDED):
            return
        self._facts[site] = PaceFacts(
            between_s=values.get(metrics.BETWEEN_S),
            run_queue=values.get(metrics.RUN_QUEUE),
            throttled=values.get(metrics.THROTTLED),
            steal=values.get(metrics.STEAL),
            clock_hz=values.get(metrics.CLOCK_HZ),
        )
        late, num_steps = int(values[metrics.RANK_NUMBER]), int(values[metrics.NUM_STEPS])
        step_s, cost_s = values[metrics.STEP_S], max(0.0, values[metrics.COST_S])
        share, first = cost_s / step_s if step_s > 0 else 0.0, max(1, step - num_steps + 1)
        for rank in {late, *self._accounts.ranks_of(site)}:
            who = SlowPeriod(site, first, step, rank=rank)
            who.node = labels.get(metrics.NODE, "")[:_MAX_WORDS]
            who.host = labels.get(metrics.HOST, "")[:_MAX_WORDS]
            of_rank = share if rank == late else -share
            period = self._accounts.add(who, num_steps, of_rank, step_s * num_steps)
            if rank == late:
                period.why = labels.get(metrics.WHY, "")[:_MAX_WORDS] or period.why

    def why_slow(self, slow: SlowPeriod) -> str:
        """Return what explains that a site is slow: a rank of it, or facts of all its ranks."""
        rank = next((each for each in self.now if each.site == slow.site), None)
        if rank is not None:
            return f"its rank {rank.rank} is slow" + (f": {rank.why}" if rank.why else "")
        facts = dict(self._facts)
        mine = facts.pop(slow.site, None)
        if mine is None or not facts or not slow.num_steps:
            return ""
        step_s = slow.for_s / slow.num_steps
        return cause(mine, _mean([*facts.values()]), cost_s=slow.cost_s, step_s=step_s)


def _mean(facts: Sequence[PaceFacts]) -> PaceFacts:
    def of(values: Sequence[float | None]) -> float | None:
        known = [each for each in values if each is not None]
        return math.fsum(known) / len(known) if known else None

    return PaceFacts(
        between_s=of([each.between_s for each in facts]),
        run_queue=of([each.run_queue for each in facts]),
        throttled=of([each.throttled for each in facts]),
        steal=of([each.steal for each in facts]),
        clock_hz=of([each.clock_hz for each in facts]),
    )
