"""Plans that are switched while rounds go on.

The same bits at all sites, whatever arrives in whatever order.
"""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest

from sites.gateway.config import Proposal
from sites.gateway.links.peer_links import Link
from tests.fakes.exchanges import Exchanges, _Wire
from tests.fakes.tree_worlds import FORMS, make_plan
from topology.trees.trees import ReductionPlan

ROUNDS = 4
BUCKETS = (500, 33)
"""Elements of each bucket of a round."""
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


def a_proposal(
    plan: ReductionPlan, codec: str | tuple[str, ...], *, epoch: int = 1, from_round: int = 3
) -> Proposal:
    codecs = codec if isinstance(codec, tuple) else (codec,) * max(1, len(plan.trees))
    return Proposal(epoch=epoch, from_round=from_round, plan=plan, codecs=codecs)


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
        self.proposal: Proposal | None = None
        self.proposed: set[int] = set()
        self.decided: set[int] = set()
        self.commit = True

    def run(self, first: int = 0) -> None:
        """Go on until every site has had every round, from `first` on."""
        self.first, self.places = first, [(first, 0)] * self.num_sites
        for _ in range(100_000):
            steps = [
                *([self.deliver] * 3 if self.bench.wire else []),
                *([self.post] if any(map(self.may_post, range(self.num_sites))) else []),
                *([self.propose, self.decide] if self.proposal else []),
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

    def propose(self) -> None:
        """Ask a site before it gets to the round."""
        assert self.proposal is not None
        for site in range(self.num_sites):
            if site not in self.proposed:
                exchange = self.bench.exchanges[site]
                in_time, _ = exchange.propose(self.proposal)
                assert in_time == (exchange.round < self.proposal.from_round)
                self.commit = self.commit and in_time
                self.proposed.add(site)
                return

    def decide(self) -> None:
        """Once all have answered, tell one of them what came of it."""
        assert self.proposal is not None
        left = [site for site in range(self.num_sites) if site not in self.decided]
        if left and len(self.proposed) == self.num_sites:
            site = self.chance.choice(left)
            self.decided.add(site)
            self.bench.exchanges[site].decide(self.proposal.epoch, commit=self.commit)
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

    Of the others trees have their own. With error feedback, what is owed goes over to the new plan,
    so only the sites are compared.
    """
    chance = random.Random(seed)
    num_sites = chance.randint(2, 5)
    ranks = tuple(chance.randint(1, 2) for _ in range(num_sites))
    one = chance.choice(CODECS)
    before, after = (
        make_plan(chance.choice(FORMS), num_sites, chance.randrange(1000)) for _ in range(2)
    )
    before_codecs, after_codecs = (
        tuple(one if seed < 10 else chance.choice(CODECS) for _ in range(max(1, len(each.trees))))
        for each in (before, after)
    )
    from_round = chance.randint(1, ROUNDS - 1)
    feedback = {"error_feedback": chance.random() < 0.5}

    switched = Training(a_bench(before, before_codecs, ranks, **feedback), chance, seed)
    switched.proposal = a_proposal(after, after_codecs, from_round=from_round)
    switched.run()

    old = Training(a_bench(before, before_codecs, ranks, **feedback), chance, seed)
    old.run()
    new = Training(a_bench(after, after_codecs, ranks, **feedback), chance, seed)
    new.run(from_round)
    for round_ in range(ROUNDS):
        is_new = switched.commit and round_ >= from_round
        found, alone = switched.result(round_), (new if is_new else old).result(round_)
        if not (is_new and feedback["error_feedback"]):
            assert found == alone, f"{seed=} {round_=}"
