"""The possible timings of each site, and initial spreads of the batch."""

from __future__ import annotations

from isthmus.topology.model.site_timing import SiteTiming, layers_together, trainer_timing
from isthmus.topology.planner.cuts import SiteCuts, site_cuts
from isthmus.topology.planner.spreads import Split, balanced
from isthmus.topology.spec.compute import sequence_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.world import Site, Topology

_UNITS = (1, 8, 64)
"""Units of sequences for cuts: replicas and their micro-batches need multiples."""


class SiteOptions:
    """The timings that sites can have: one for the shipped trainer, or one for each useful cut."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Compute the cuts, if the job describes its model."""
        self._job = job
        self._placed = {each.site: each for each in job.placement}
        self._timings: dict[object, tuple[SiteTiming, ...]] = {}
        self.cuts: dict[str, SiteCuts] = {}
        """Cuts by site name; one object for equal sites. Empty for the shipped trainer."""
        known: list[tuple[object, SiteCuts]] = []
        for site in topology.sites if job.workload is not None else ():
            mine = self._placed.get(site.name)
            hardware = (site.nodes, site.accelerators_per_node, site.accelerator, site.fabric)
            key = (hardware, None if mine is None else mine.parallel)
            alike = next((cuts for other, cuts in known if other == key), None)
            self.cuts[site.name] = alike or site_cuts(job, site, mine)
            known.append((key, self.cuts[site.name]))

    def timings(self, job: Job, site: Site, num_sequences: int) -> tuple[SiteTiming, ...]:
        """Return a site's possible timings, the fastest alone first; empty: impossible.

        Args:
            job: Buckets and the trainer's micro-batch.
            site: Which one.
            num_sequences: Sequences of a step, at least one per rank for the shipped trainer.
        """
        if job.workload is not None:
            together = layers_together(workload_described(job.workload), job.exchange.bucket_bytes)
            return self.cuts[site.name].timings(num_sequences, together)
        most = -(-num_sequences // site.num_ranks)
        key = (site.name, most, job.exchange.bucket_bytes, job.trainer.micro_batch)
        if key not in self._timings:
            self._timings[key] = (trainer_timing(job, site, most),)
        return self._timings[key]

    def site_sequence_s(self, site: Site) -> float:
        """Return a lower bound of a site's seconds per sequence; infinite if impossible."""
        if self.cuts:
            return self.cuts[site.name].sequence_s
        return sequence_s(self._job, site) / site.num_ranks

    def is_able(self, name: str) -> bool:
        """Return whether the model fits a site at all."""
        return not self.cuts or bool(self.cuts[name].cuts)

    def least(self, site: Site) -> int:
        """Return the smallest number of sequences of a site."""
        return 1 if self.cuts else site.num_ranks

    def splits(self, topology: Topology) -> list[Split]:
        """Return initial spreads of the batch; empty if the batch is too small."""
        sites, batch = topology.sites, self._job.global_batch
        if self._job.placement:
            placed = [
                self._placed[each.name].sequences for each in sites if each.name in self._placed
            ]
            return [tuple(placed)] if len(placed) == len(sites) else []
        ranks = [site.num_ranks for site in sites]
        fastest_s = [self.site_sequence_s(site) for site in sites]
        if not self.cuts:
            per_rank_s = [each * count for each, count in zip(fastest_s, ranks, strict=True)]
            spreads = [balanced(ranks, per_rank_s, batch)]
        else:
            spreads = [
                balanced([unit] * len(sites), each_s, batch)
                for each_s in (fastest_s, [1 / count for count in ranks])
                for unit in _UNITS
            ]
        return list(dict.fromkeys(each for each in spreads if each is not None))
