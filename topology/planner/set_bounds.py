"""What no plan of a set of sites is better than: which sets come first, and which not at all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from topology.codec_costs import usual_ratio
from topology.cost.money import accelerators_usd
from topology.job import Job
from topology.model.buckets import gradient_bytes
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Rank, rank_of
from topology.planner.shares import balanced, busiest
from topology.world import Topology

Names = tuple[str, ...]


class SetBounds:
    """Bounds for sets of a topology's sites."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        codecs: Sequence[str],
        sequence_s: Mapping[str, float],
    ) -> None:
        """Work out nothing yet.

        Args:
            job: Without a placement.
            topology: Described in full.
            codecs: That may be chosen.
            sequence_s: How long a rank of each site computes on one.
        """
        self._job, self._topology, self._codecs = job, topology, codecs
        self._sequence_s = sequence_s
        self._objective = (job.plan or PlanWishes()).objective

    def of_every_set(self, names: Names) -> list[tuple[Rank, Names]]:
        """Return every set of sites with what it cannot be better than, most promising first."""
        found = []
        for count in range(len(names), 0, -1):
            for chosen in itertools.combinations(names, count):
                bound = self._bound(chosen)
                if bound is not None:
                    found.append((bound, chosen))
        return sorted(found, key=lambda each: (each[0], -len(each[1])))

    def _bound(self, names: Names) -> Rank | None:
        sites = [self._topology.site(name) for name in names]
        ranks = [site.num_ranks for site in sites]
        times_s = [self._sequence_s[name] for name in names]
        split = balanced(ranks, times_s, self._job.trainer.global_batch)
        if split is None:
            return None
        least_s = max(
            count * each for count, each in zip(busiest(split, ranks), times_s, strict=True)
        )
        least_s = max(least_s, self._crossing_s(names))
        per_s = accelerators_usd(self._topology, dict(zip(names, ranks, strict=True)), 1.0)
        return rank_of(self._objective, least_s, per_s * least_s)[:1]

    def _crossing_s(self, names: Names) -> float:
        """Every byte leaves every site once at least, encoded, over all of its links together."""
        if len(names) == 1:
            return 0.0
        num_bytes = gradient_bytes(self._job) * min(map(usual_ratio, self._codecs))
        rates = dict.fromkeys(names, 0.0)
        for link in self._topology.links:
            if link.source in rates and link.target in rates:
                rates[link.source] += link.bytes_per_s
        return max(num_bytes / rate if rate else math.inf for rate in rates.values())
