"""Lower bounds of what a plan with some sites can reach, without making it. Pure.

A search passes over sets of sites that cannot be better than what it has found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from isthmus.topology.cost.money import accelerators_usd
from isthmus.topology.model.buckets import gradient_bytes
from isthmus.topology.planner.site_options import SiteOptions
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.codec_costs import usual_ratio


class Bounds:
    """The bounds of sets of a topology's sites, for one job."""

    def __init__(
        self, job: Job, topology: Topology, options: SiteOptions, codecs: Sequence[str]
    ) -> None:
        """Work out what sets share; `codecs` are those that a plan may choose."""
        own = [each.codec for each in job.exchange.codecs]
        self._batch = job.global_batch
        self._sent_bytes = gradient_bytes(job) * min(usual_ratio(each) for each in (*codecs, *own))
        self._is_cost = job.plan is not None and job.plan.objective == "cost"
        self._sequence_s = {site.name: options.site_sequence_s(site) for site in topology.sites}
        self._usd_per_s = {
            site.name: accelerators_usd(topology, {site.name: site.num_ranks}, 1.0)
            for site in topology.sites
        }
        self._links: dict[str, dict[str, tuple[Link, Link]]] = {
            site.name: {} for site in topology.sites
        }
        """By site and other site: the links there and back, where both are."""
        for link in topology.links:
            back = topology.link(link.target, link.source)
            if back is not None:
                self._links[link.source][link.target] = (link, back)

    def are_joined(self, names: Collection[str]) -> bool:
        """Return whether links both ways between these sites connect them all."""
        outside = set(names)
        waiting = [outside.pop()]
        while waiting and outside:
            found = outside & self._links[waiting.pop()].keys()
            outside -= found
            waiting += found
        return not outside

    def least(self, names: Collection[str]) -> float:
        """Return a lower bound of the objective: seconds or US dollars a step.

        Sites compute at least as long as if every sequence could be divided. Every site sends and
        receives all gradients once at least, and each tree has a link up and one down for every
        site but its root.
        """
        per_s = sum(1 / self._sequence_s[name] for name in names)
        step_s = self._batch / per_s if per_s else math.inf
        usd = 0.0
        if len(names) > 1:
            all_bytes_per_s = 0.0
            for name in names:
                there = [self._links[name][other] for other in names if other in self._links[name]]
                for way in zip(*there, strict=True):
                    bytes_per_s = math.fsum(link.bytes_per_s for link in way)
                    all_bytes_per_s += bytes_per_s / 2
                    step_s = max(step_s, self._sent_bytes / bytes_per_s)
                usd += self._sent_bytes * min(
                    (link.egress_usd_per_byte for link, _ in there), default=0.0
                )
            of_trees = 2 * (len(names) - 1) * self._sent_bytes
            step_s = max(step_s, of_trees / all_bytes_per_s if all_bytes_per_s else math.inf)
        if not self._is_cost:
            return step_s
        return usd + step_s * math.fsum(self._usd_per_s[name] for name in names)
