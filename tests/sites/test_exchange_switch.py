"""Plans that are switched while rounds go on.

The same bits at all sites, whatever arrives in whatever order.
"""

from __future__ import annotations

import dataclasses
import random
from typing import cast

import numpy as np
import pytest

from isthmus.sites.gateway.links.peer_links import Link
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.exchanges import Exchanges, _Wire
from tests.fakes.tree_worlds import FORMS, make_plan

ROUNDS = 4
BUCKETS = (500, 33)
"""Elements of each bucket of a round."""
COMMITS = 0.8
"""How often a change comes that sites have settled for."""
SETTLES = 0.1
"""How often one settles when it could."""
CODECS = ("fp32", "bf16", "int8-zstd", "topk")


def a_bench(
    plan: ReductionPlan, codec: str | tuple[str, ...], ranks: tuple[int, ...], **changes: object
) -> Exchanges:
    """Return sites that all have links to each other, whatever the plan."""
    bench = Exchanges(plan, codec, ranks, chunk_bytes=256, **changes)
    for site, exchange in enumerate(bench.exchanges):
        others = [other for other in range(plan.num_sites) if other != site]
        links = {(other, 0): _Wire(site, other, bench.wire) for other in others}
        exchange.connect(cast("dict[tuple[int, int], Link]", links))
    return bench


class Training:
    """Rounds at several sites, each as fast as chance has it.

    In the middle a switch, if there is one.
    """

    def __init__(self, bench: Exchanges, chance: random.Random, seed: int) -> None:
        self.bench, self.chance = bench, chance
        self.num_sites = len(bench.exchanges)
        generator = np.random.default_rng(seed)
        self.parts = {
            (round_, bucket, site): generator.standard_t(3, numel).astype(np.float32)
            for round_ in range(ROUNDS)
            for bucket, numel in enumerate(BUCKETS)
            for site in range(self.num_sites)
        }
        self.first = 0
        self.places = [(0, 0)] * self.num_sites
        """The next round and bucket that a site posts."""
        self.switch: tuple[ReductionPlan, tuple[str, ...]] | None = None
        """The plan and codecs to go over to in the middle."""
        self.begun: dict[int, int] = {}
        """The latest round at each site that has settled."""
        self.decided: set[int] = set()
        self.commit = chance.random() < COMMITS

    def run(self, first: int = 0) -> None:
        """Go on until every site has had every round, from `first` on."""
        self.first, self.places = first, [(first, 0)] * self.num_sites
        for _ in range(100_000):
            steps = [
                *([self.deliver] * 3 if self.bench.wire else []),
                *([self.post] if any(map(self.may_post, range(self.num_sites))) else []),
                *([self.settle, self.decide] if self.switch else []),
            ]
            if not steps:
                break
            self.chance.choice(steps)()
            assert not self.bench.failures
            if self.is_over:
                break
        assert self.is_over, self.places

    @property
    def is_over(self) -> bool:
        return not self.bench.wire and all(place == (ROUNDS, 0) for place in self.places)

    def deliver(self) -> None:
        wire = self.bench.wire
        at = self.chance.randrange(len(wire))
        sent = wire.pop(at)
        self.bench.deliver(sent.source, sent.target, sent.data)

    def may_post(self, site: int) -> bool:
        round_, bucket = self.places[site]
        if round_ == ROUNDS or not self.bench.exchanges[site]._epochs.may_begin(self.name(round_)):
            return False
        if bucket:
            return True
        if round_ == self.first:
            return True
        before = [
            reduced.round == self.name(round_ - 1)
            for where, _, reduced in self.bench.reduced
            if where == site
        ]
        ranks = self.bench.exchanges[site]._config.ranks_per_site[site]
        return sum(before) == len(BUCKETS) * ranks

    def name(self, round_: int) -> int:
        """Return what a round is called: gateways count from 0."""
        return round_ - self.first

    def post(self) -> None:
        site = self.chance.choice([each for each in range(self.num_sites) if self.may_post(each)])
        round_, bucket = self.places[site]
        self.places[site] = (round_, bucket + 1) if bucket + 1 < len(BUCKETS) else (round_ + 1, 0)
        part = self.parts[round_, bucket, site]
        weight, name = float(site + round_ + 1), self.name(round_)
        self.bench.post_site(site, part, weight, round=name, bucket=bucket)

    @property
    def from_round(self) -> int:
        """The first of the other plan, once all have settled."""
        return max(self.begun.values()) + 1

    def settle(self) -> None:
        """Have a site begin no further round, at some moment."""
        left = [site for site in range(self.num_sites) if site not in self.begun]
        if left and self.chance.random() < SETTLES:
            settled = self.bench.exchanges[left[0]].settle(1, stops=False)
            self.begun[left[0]] = settled.round

    def decide(self) -> None:
        """Once all have settled, tell one of them what came of it."""
        assert self.switch is not None
        left = [site for site in range(self.num_sites) if site not in self.decided]
        if left and len(self.begun) == self.num_sites:
            site = self.chance.choice(left)
            self.decided.add(site)
            if self.commit:
                self.bench.exchanges[site].resume(1, self.from_round, *self.switch)
            else:
                self.bench.exchanges[site].cancel(1)
            self.bench.pools[site].run()

    def result(self, round_: int) -> bytes:
        """Return a round's results, once they are seen to be the same at all sites."""
        found = [
            b"".join(self.parts[round_, bucket, site].tobytes() for bucket in range(len(BUCKETS)))
            for site in range(self.num_sites)
        ]
        assert found == found[:1] * self.num_sites, f"round {round_}"
        return found[0]


@pytest.mark.parametrize("seed", range(30))
def test_before_and_after_a_switch_sites_have_the_bits_of_each_plan_alone(seed: int) -> None:
    """Of the first ten seeds all chunks have one codec, before and after.

    Of the others trees have their own. With error feedback, the residual goes over to the new plan,
    so only the sites are compared.
    """
    chance = random.Random(seed)
    num_sites = chance.randint(2, 5)
    ranks = tuple(chance.randint(1, 2) for _ in range(num_sites))
    one = chance.choice(CODECS)
    before, after = (
        dataclasses.replace(
            make_plan(chance.choice(FORMS), num_sites, chance.randrange(1000)),
            gathered_bytes=chance.choice((0, 0, 1024)),
        )
        for _ in range(2)
    )
    before_codecs, after_codecs = (
        tuple(one if seed < 10 else chance.choice(CODECS) for _ in range(max(1, len(each.trees))))
        for each in (before, after)
    )
    feedback = {"error_feedback": chance.random() < 0.5}

    switched = Training(a_bench(before, before_codecs, ranks, **feedback), chance, seed)
    switched.switch = after, after_codecs
    switched.run()
    from_round = switched.from_round if switched.begun else ROUNDS

    old = Training(a_bench(before, before_codecs, ranks, **feedback), chance, seed)
    old.run()
    new = Training(a_bench(after, after_codecs, ranks, **feedback), chance, seed)
    if from_round < ROUNDS:
        new.run(from_round)
    for round_ in range(ROUNDS):
        is_new = switched.commit and round_ >= from_round
        found, alone = switched.result(round_), (new if is_new else old).result(round_)
        if not (is_new and feedback["error_feedback"]):
            assert found == alone, f"{seed=} {round_=}"
