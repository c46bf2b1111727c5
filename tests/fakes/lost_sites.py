"""Carried exchanges of which some sites are lost, and a coordinator that has the others go on.

A lost site does nothing more, but frames of it may still be on their way. The others settle one
after another while chunks still cross between them. Of what each has finished the coordinator makes
handovers. Another site may be lost before all have settled, or before all have resumed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway.config import GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.epochs import Gift
from isthmus.sites.gateway.reduction.executor import Settled
from isthmus.sites.local.chunk_grid import Grid, grid
from isthmus.topology.spec.epoch import Finished, merged, numbers_of, runs_of
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.carried_exchanges import SPEEDS, CarriedExchanges, World

MakePlan = Callable[[tuple[int, ...]], tuple[ReductionPlan, tuple[str, ...]]]
"""Draws a plan for some members, and its codecs."""


class LosingExchanges(CarriedExchanges):
    """Loses `num_losses` sites, at times that chance draws."""

    def __init__(
        self, world: World, chance: random.Random, num_losses: int, make_plan: MakePlan
    ) -> None:
        super().__init__(world, chance)
        self.members = tuple(range(world.plan.num_sites))
        self.epoch = 0
        self.num_handed_over = 0
        self._make_plan = make_plan
        self._losses = sorted(int(10 ** chance.uniform(0.5, 3.5)) for _ in range(num_losses))
        """Each happens once so many frames have arrived."""
        self._settled: dict[GatewayId, Settled] = {}
        self._resume: tuple[int, ReductionPlan, tuple[str, ...], list[Gift]] | None = None
        self._resumed: set[GatewayId] = set()

    def _turns(self) -> tuple[list[Callable[[], bool]], list[float]]:
        turns, speeds = super()._turns()
        turns += [self._lose, self._settle_one, self._decide, self._resume_one]
        return turns, [*speeds, 1.0, *(0.1 * self._chance.choice(SPEEDS) for _ in range(3))]

    @property
    def _gateways(self) -> list[GatewayId]:
        return [each for each in self.exchanges if each[0] in self.members]

    def _lose(self) -> bool:
        if not self._losses or self.num_arrived < self._losses[0] or len(self.members) == 1:
            return False
        del self._losses[0]
        if self._chance.random() < 0.8:  # else it is only a link, which the next plan goes around
            lost = self._chance.choice(self.members)
            self.lost.add(lost)
            self.members = tuple(site for site in self.members if site != lost)
        self.epoch += 1
        self._settled, self._resume, self._resumed = {}, None, set()
        return True

    def _settle_one(self) -> bool:
        left = [each for each in self._gateways if each not in self._settled]
        if not self.epoch or not left:
            return False
        gateway = self._chance.choice(left)
        self._settled[gateway] = self.exchanges[gateway].settle(self.epoch, stops=True)
        for (source, _), link in self.links.items():
            if source == gateway:
                link.queue.drop_before(self.epoch)
        return True

    def _decide(self) -> bool:
        if not self.epoch or self._resume is not None or len(self._settled) < len(self._gateways):
            return False
        rounds = {
            site: max(settled.round for (at, _), settled in self._settled.items() if at == site)
            for site in self.members
        }
        from_round = max(0, min(rounds.values()))
        plan, codecs = self._make_plan(self.members)
        self._resume = from_round, plan, codecs, self._gifts(from_round)
        return True

    def _gifts(self, from_round: int) -> list[Gift]:
        """Return who gives what to whom: directly, or by somebody who is given it before."""
        finished = {
            site: merged(
                each
                for (at, _), settled in self._settled.items()
                if at == site
                for each in settled.finished
            )
            for site in self.members
        }
        found = []
        chunks = sorted(
            {
                (each.round, each.bucket, chunk)
                for done in finished.values()
                for each in done
                if each.round >= from_round
                for chunk in numbers_of(each.runs)
            }
        )
        for round_, bucket, chunk in chunks:
            have = [site for site in self.members if _has(finished[site], round_, bucket, chunk)]
            lack = [
                site
                for site in self.members
                if site not in have and rounds_of(self._settled, site) <= round_
            ]
            for site in self._chance.sample(lack, len(lack)):
                donor = self._chance.choice(have)
                found.append(Gift(donor, site, round_, bucket, runs_of([chunk])))
                have.append(site)
        self.num_handed_over += len(found)
        return found

    def _resume_one(self) -> bool:
        left = [each for each in self._gateways if each not in self._resumed]
        if self._resume is None or not left:
            return False
        gateway = self._chance.choice(left)
        self._resumed.add(gateway)
        from_round, plan, codecs, gifts = self._resume
        exchange = self.exchanges[gateway]
        links = {
            target: link
            for (source, target), link in self.links.items()
            if source == gateway and target[0] in self.members
        }
        exchange.connect(cast("Mapping[GatewayId, Link]", links))
        exchange.resume(self.epoch, from_round, plan, codecs, gifts)
        return True

    def contribution(self, site: int, index: int) -> Floats:
        """Return what a site handed over of a bucket, by its number."""
        return np.concatenate(
            [each.part(index) for (at, _), each in self.ranks.items() if at == site]
        )

    def grid_of(self, numel: int) -> Grid:
        """Return how a bucket is cut."""
        world = self.world
        ranks = tuple(
            gateways * each
            for gateways, each in zip(world.gateways_per_site, world.ranks_per_gateway, strict=True)
        )
        return grid(numel, world.chunk_bytes // 4, ranks)


def rounds_of(settled: Mapping[GatewayId, Settled], site: int) -> int:
    """Return the latest round that a site has begun."""
    return max(each.round for (at, _), each in settled.items() if at == site)


def _has(finished: tuple[Finished, ...], round_: int, bucket: int, chunk: int) -> bool:
    return any(
        (each.round, each.bucket) == (round_, bucket) and chunk in numbers_of(each.runs)
        for each in finished
    )
