"""The search for the best plan of a job that describes its model: which sites take part.

As topology/planner/search.py does it for the trainer that ships: sets of sites in the order of what
they cannot be better than, and none whose bound is no better than what was found; first a guess for
each, then the most promising thoroughly. For up to CUT_EXACT_SITES sites nothing that can be
decided is better, where there are at most EVERY_SPLIT_MAX ways to spread the batch and
EVERY_CUTS_MAX combinations of cuts, and connections do not start slowly; of more, single moves lead
on from the best guess.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping

from topology.cost.model_shape import workload_described
from topology.documents.placement import restricted
from topology.job import Job
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Rank, Sizing, better, by_rank, rank_of
from topology.planner.cut_choice import CutChoice
from topology.planner.cut_set import CUT_EXACT_SITES, CutSet, compute_bound_s
from topology.planner.cuts import Timing, layers_together
from topology.planner.shares import Split
from topology.planner.site_cuts import SiteCuts
from topology.world import Site, Topology

EVERY_SET_SITES = 10
_THOROUGH_SETS = 3

Names = tuple[str, ...]


class ParallelSearch:
    """Finds the best choice for a job that describes its model. Keeps what it has found."""

    def __init__(
        self, job: Job, topology: Topology, cuts: Mapping[str, SiteCuts] | None = None
    ) -> None:
        """Work out what each site can do.

        Args:
            job: With a `workload`; its `plan` says what may be decided, its placement does not
                count.
            topology: Described in full.
            cuts: Of each of its sites, where they are known: of this model and schedule.
        """
        assert job.workload is not None, "there is a model to cut"
        self.job = dataclasses.replace(job, placement=())
        self.topology = topology
        self.model = job.workload
        self.workload = workload_described(job.workload)
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.cuts: dict[str, SiteCuts] = {**(cuts or {})}
        """By the names of sites; the same object for equal ones."""
        for site in topology.sites:
            if site.name not in self.cuts:
                self.cuts[site.name] = self._cuts_of(site)
        self._found: dict[tuple[Names, bool], CutChoice | None] = {}

    def _cuts_of(self, site: Site) -> SiteCuts:
        for known in self.cuts.values():
            if _hardware(known.site) == _hardware(site):
                return known
        serial = self.job.exchange.schedule == "serial"
        return SiteCuts(self.model, self.workload, site, serial=serial)

    def best(self) -> CutChoice | None:
        """Return the best choice of all; None where no sites can train the model."""
        names = tuple(site.name for site in self.topology.sites)
        if self.wishes.sites == "all":
            return self.best_of(names)
        able = tuple(name for name in names if self.cuts[name].cuts)
        if len(able) > EVERY_SET_SITES:
            return self._by_leaving_out(able)
        best: CutChoice | None = None
        looked: list[CutChoice] = []
        bounded = self._bounded_sets(able)
        for bound, chosen in bounded:
            if best is not None and bound > best.rank[:1]:
                break  # what may be as fast is looked at: with fewer sites, it is better
            found = self._of(chosen, thorough=False)
            if found is not None:
                looked.append(found)
                best = better(best, found)
        promising = [choice.sites for choice in sorted(looked, key=by_rank)]
        if len(able) > CUT_EXACT_SITES:
            for chosen in promising[:_THOROUGH_SETS]:
                best = better(best, self.best_of(chosen))
            return best
        bounds = {chosen: bound for bound, chosen in bounded}
        for chosen in dict.fromkeys((*promising, *bounds)):
            if best is None or bounds[chosen] <= best.rank[:1]:
                best = self._set(chosen).best(thorough=True, against=best)
        if best is not None:
            self._found[best.sites, True] = best
        return best

    def best_of(self, names: Iterable[str]) -> CutChoice | None:
        """Return the best choice in which exactly these sites take part; None: there is none."""
        wanted = set(names)
        chosen = tuple(site.name for site in self.topology.sites if site.name in wanted)
        return self._of(chosen, thorough=True)

    def estimate(self, names: Iterable[str]) -> CutChoice | None:
        """Return a good choice for these sites, and of few sites the best."""
        wanted = set(names)
        chosen = tuple(site.name for site in self.topology.sites if site.name in wanted)
        return self._of(chosen, thorough=len(chosen) <= CUT_EXACT_SITES)

    def timings(self, name: str, num_sequences: int, sizing: Sizing) -> tuple[Timing, ...]:
        """Return what a site could do with buckets of a size, the fastest by itself first."""
        together = layers_together(self.workload, sizing.bucket_bytes)
        return self.cuts[name].timings(num_sequences, together)

    def balanced(self, names: Names) -> tuple[Split, float]:
        """Return the spread over sites that is fastest if nothing has to cross, and its seconds."""
        return self._set(names).balanced()

    def _by_leaving_out(self, names: Names) -> CutChoice | None:
        """Leave out whichever site it helps most to leave out, until none does."""
        best = self._of(names, thorough=False)
        while len(names) > 1:
            fewer = [
                self._of(tuple(each for each in names if each != left), thorough=False)
                for left in names
            ]
            found = min((each for each in fewer if each is not None), key=by_rank, default=None)
            if found is None or (best is not None and best.rank <= found.rank):
                break
            best, names = found, found.sites
        return None if best is None else better(best, self.best_of(best.sites))

    def _of(self, names: Names, *, thorough: bool) -> CutChoice | None:
        key = (names, thorough)
        if key not in self._found:
            self._found[key] = self._set(names).best(thorough=thorough) if names else None
        return self._found[key]

    def _set(self, names: Names) -> CutSet:
        topology = restricted(self.topology, names)
        return CutSet(self.job, self.codecs, topology, [self.cuts[name] for name in names])

    def _bounded_sets(self, names: Names) -> list[tuple[Rank, Names]]:
        """Return every set of sites with what it cannot be better than, the best of these first."""
        found = [
            (self._bound(chosen), chosen)
            for count in range(len(names), 0, -1)
            for chosen in itertools.combinations(names, count)
        ]
        return sorted(found, key=lambda each: (each[0], -len(each[1])))

    def _bound(self, names: Names) -> Rank:
        """No set is faster than all its sites with their best micro-batches and nothing else."""
        least_s = compute_bound_s([self.cuts[name] for name in names], self.model.global_batch)
        per_s = math.fsum(
            site.num_ranks * (site.accelerator.price_usd_per_h or 0.0) / 3600
            for site in map(self.topology.site, names)
        )
        return rank_of(self.wishes.objective, least_s, per_s * least_s)[:1]


def _hardware(site: Site) -> tuple[object, ...]:
    """Return what equal sites have in common."""
    return (site.nodes, site.accelerators_per_node, site.accelerator, site.fabric)
