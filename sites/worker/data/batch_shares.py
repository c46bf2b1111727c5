"""How a global batch is divided over the ranks of the sites that take part. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.batch_rule import Batch, FullBatch, batch_with
from isthmus.topology.spec.compute import share
from isthmus.topology.spec.shares import place_of

Gone = frozenset[int]
"""Sites, by index, that do not take part any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShares:
    """The division of one run's batch. Contiguous, in the order of sites and ranks."""

    full: FullBatch
    """What the run began with."""
    rule: str
    """One of isthmus.topology.spec.batch_rule.ON_FEWER_SITES."""
    rate: str = "linear"
    """One of isthmus.topology.spec.batch_rule.RATES."""
    ranks: tuple[int, ...]
    """Ranks of each site."""
    sequences: tuple[int, ...] = ()
    """A placement's part of the batch for each site; empty: all ranks take as many."""
    parts: tuple[int, ...] = ()
    """What has been decided since (topology/spec/shares.py); empty: nothing. It changes how the
    batch is divided, and not how large it is."""
    later: Gone = frozenset()
    """Sites that the run did not begin with: the batch is full without them."""

    def batch(self, gone: Gone) -> Batch:
        """Return the batch without some sites."""
        if self.sequences:
            first, left = (
                sum(each for site, each in enumerate(self.sequences) if site not in without)
                for without in (self.later, gone)
            )
            return batch_with(FullBatch(self.full.samples, first), left, self.rule, self.rate)
        left = sum(each for site, each in enumerate(self.ranks) if site not in gone)
        return batch_with(self.full, left, self.rule, self.rate)

    def even(self, gone: Gone) -> int:
        """Return how many samples each rank has, where all have as many; else 0."""
        (samples, rest), *others = {
            divmod(len(self.of_site(site, gone)), ranks)
            for site, ranks in enumerate(self.ranks)
            if site not in gone
        }
        return 0 if rest or others else samples

    def of_site(self, site: int, gone: Gone) -> range:
        """Return the places of a site in the batch."""
        weights = self.parts or self.sequences or self.ranks
        present = [0 if each in gone else weight for each, weight in enumerate(weights)]
        return place_of(self.batch(gone).samples, present, site)

    def of_rank(self, site: int, rank: int, gone: Gone) -> range:
        """Return the places of a rank, inside its site."""
        if not (self.parts or self.sequences):
            present = [0 if each in gone else ranks for each, ranks in enumerate(self.ranks)]
            samples = self.batch(gone).samples
            return share(samples, sum(present), sum(present[:site]) + rank)
        return self.of_replica(site, rank, self.ranks[site], gone)

    def of_replica(self, site: int, replica: int, replicas: int, gone: Gone) -> range:
        """Return the places of one replica of a site whose ranks share their data in groups."""
        own = self.of_site(site, gone)
        part = share(len(own), replicas, replica)
        return range(own.start + part.start, own.start + part.stop)
