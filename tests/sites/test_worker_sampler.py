"""Every sample exactly once, whatever the numbers of sites and ranks, and whatever was lost."""

import itertools
import random

import numpy as np
import pytest

from isthmus.protos.errors import ScriptError
from isthmus.sites.local.rank_messages import Missing, Reduced, ReductionTimes
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.data_positions import DataPositions
from isthmus.sites.worker.data.sampler import FETCHED_AHEAD, Sampler
from isthmus.sites.worker.data.shuffling import key_of, shuffled
from isthmus.sites.worker.exchange.missing_sites import (
    NOTICE_STEPS,
    MissingSites,
    notice_steps_of,
)
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.compute import share
from isthmus.topology.spec.regime import regime_of


@pytest.mark.parametrize("num_samples", [1, 2, 3, 16, 17, 1000])
def test_each_order_has_every_sample_once(num_samples: int) -> None:
    orders = [shuffled(np.arange(num_samples), num_samples, key_of(seed)) for seed in (0, 1)]
    assert all(sorted(order) == list(range(num_samples)) for order in orders)
    if num_samples >= 16:
        assert (orders[0] != orders[1]).any()
        assert (np.diff(orders[0]) != 1).any()


def test_a_round_takes_holes_first() -> None:
    positions = DataPositions(next=20).with_holes([3, 4, 9])
    assert positions.holes == (range(3, 5), range(9, 10))
    taken, after = positions.taken(2)
    assert taken.tolist() == [3, 4]
    assert after == DataPositions(20, (range(9, 10),))
    taken, after = after.taken(3)
    assert taken.tolist() == [9, 20, 21]
    assert after == DataPositions(22)


@pytest.mark.parametrize("again", [[20], [-1], [3]])
def test_what_was_not_handed_out_cannot_be_given_back(again: list[int]) -> None:
    with pytest.raises(ValueError, match="given back"):
        DataPositions(20, (range(3, 4),)).with_holes(again)


@pytest.mark.parametrize("seed", range(20))
def test_losses_and_other_counts_leave_every_position_used_once(seed: int) -> None:
    chance = random.Random(seed)
    ledger, used = DataPositions(), list[int]()
    for _ in range(40):
        batch, ranks = chance.randint(1, 30), chance.randint(1, 6)
        taken, ledger = ledger.taken(batch)
        parts = [
            taken[share(batch, ranks, rank).start : share(batch, ranks, rank).stop]
            for rank in range(ranks)
        ]
        lost = chance.randrange(ranks) if chance.random() < 0.3 else None
        for rank, part in enumerate(parts):
            if rank == lost:
                ledger = ledger.with_holes(part)
            else:
                used += part.tolist()
        assert DataPositions.from_json(ledger.to_json()) == ledger
    check_used_once(used, ledger, seed)


def check_used_once(used: list[int], ledger: DataPositions, seed: int = 0) -> list[int]:
    """Each position was used, or is still to be handed out; return the latter."""
    unused = [each for hole in ledger.holes for each in hole]
    assert len(set(used)) == len(used), f"{seed=}: twice"
    assert sorted(used + unused) == list(range(ledger.next)), f"{seed=}: never"
    return unused


def shares(*ranks: int, batch: int = 6, rule: str = "keep") -> BatchShares:
    return BatchShares(full=FullBatch(batch, sum(ranks)), rule=rule, ranks=ranks)


def samplers(ranks: int, used: DataPositions) -> list[Sampler]:
    made = [
        Sampler(num_samples=23, shares=shares(ranks), site=0, rank=rank, seed=5)
        for rank in range(ranks)
    ]
    for each in made:
        each.resume(used, lambda: None)
    return made


def test_a_resumed_sampler_goes_on_after_what_was_used_not_after_what_was_drawn() -> None:
    seen: list[int] = []
    used, data_epoch = DataPositions(), 0
    for ranks in (4, 2, 3):
        made = samplers(ranks, used)
        batches = [iter(each) for each in made]
        for _ in range(4):
            for sampler, own in zip(made, batches, strict=True):
                seen += next(own)
                sampler.step()
        for own in batches:
            list(itertools.islice(own, 3))  # fetched ahead, never used
        assert len({each.used for each in made}) == 1
        used, data_epoch = made[0].used, made[0].data_epoch
    # 12 steps of 6: three whole passes and three samples of the fourth.
    counts = np.bincount(seen, minlength=23)
    assert counts.sum() == 72
    assert set(counts.tolist()) == {3, 4}
    assert data_epoch == 3


def test_a_sampler_that_was_stepped_cannot_be_resumed() -> None:
    (sampler,) = samplers(1, DataPositions())
    sampler.draw()
    sampler.step()
    with pytest.raises(RuntimeError, match="before the first step"):
        sampler.resume(DataPositions(6), lambda: None)


def test_a_batch_that_was_looked_at_is_handed_out_again() -> None:
    """For its shape, say, before there is a model; also where a checkpoint is found after that."""
    (sampler,) = samplers(1, DataPositions())
    looked_at = next(iter(sampler))
    assert next(iter(sampler)) == looked_at
    sampler.resume(DataPositions(6), lambda: None)
    assert sampler.used == DataPositions(6)
    assert next(iter(sampler)) == sampler.indices(np.arange(6, 12)).tolist()


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_a_loop_that_was_left_loses_no_sample(ahead: int) -> None:
    """Each epoch of a script ends by `break`, and its loader may have fetched ahead."""
    (sampler,) = samplers(1, DataPositions())
    used: list[int] = []
    for epoch in range(5):
        batches = iter(sampler)
        fetched = [next(batches) for _ in range(ahead)]
        for _ in range(epoch):
            fetched.append(next(batches))
            used += fetched.pop(0)
            sampler.step()
        next(batches)
    assert used == sampler.indices(np.arange(60)).tolist()
    assert sampler.used == DataPositions(60)


def test_holes_are_handed_out_once_by_a_loop_that_begins_anew() -> None:
    made = [Sampler(num_samples=999, shares=shares(1, 1), site=0, rank=0, seed=1) for _ in "ab"]
    batches, used = iter(made[1]), [list[int](), list[int]()]
    for step in range(2 * NOTICE_STEPS):
        used[0] += next(iter(made[0]))
        used[1] += next(batches)
        for each in made:
            each.lose({1: 3} if step >= 3 else {})
            each.step()
        list(itertools.islice(made[0], step % 7))
        assert made[0].used == made[1].used
    assert used[0] == used[1]


def test_an_iterator_ends_where_another_has_begun() -> None:
    (sampler,) = samplers(1, DataPositions())
    first = iter(sampler)
    next(first)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="another loop over it has begun"):
        next(first)


@pytest.mark.parametrize("batches_a_step", [2, 4])
@pytest.mark.parametrize("prefetched", [0, 8])
def test_several_batches_a_step_are_refused(batches_a_step: int, prefetched: int) -> None:
    """At once where the loop is left, else once no loader can have fetched so far ahead."""
    (sampler,) = samplers(1, DataPositions())

    def train(steps: int) -> None:
        batches = iter(sampler)
        list(itertools.islice(batches, prefetched))
        for _ in range(steps):
            list(itertools.islice(batches, batches_a_step))
            sampler.step()

    train(3)
    with pytest.raises(ScriptError, match=rf"took {2 * batches_a_step} batches for 2 steps"):
        train(1)
    (sampler,) = samplers(1, DataPositions())
    with pytest.raises(ScriptError, match="micro-batches"):
        train(NOTICE_STEPS + 2)


class Ranks:
    """All ranks' samplers. Each fetches so many steps ahead as chance has it."""

    def __init__(self, chance: random.Random, divided: BatchShares) -> None:
        places = [(site, rank) for site, ranks in enumerate(divided.ranks) for rank in range(ranks)]
        self._divided = divided
        self.made = {place: self.make(*place) for place in places}
        self._ahead = {place: chance.randint(0, FETCHED_AHEAD) for place in places}
        self.drawn: dict[tuple[int, int], list[list[int]]] = {place: [] for place in places}
        self.used: list[int] = []

    def make(self, site: int, rank: int) -> Sampler:
        return Sampler(num_samples=10**6, shares=self._divided, site=site, rank=rank, seed=1)

    def use(self, place: tuple[int, int], step: int) -> None:
        """Use a rank's batch of a step, which it has drawn by then, and some more."""
        drawn = self.drawn[place]
        while len(drawn) <= step + (self._ahead[place] if step else 0):
            drawn.append(self.made[place].draw().tolist())
        self.used += drawn[step]


@pytest.mark.parametrize("rule", ["keep", "shrink"])
@pytest.mark.parametrize("seed", range(20))
def test_what_a_lost_site_had_is_handed_out_to_the_others(seed: int, rule: str) -> None:
    chance = random.Random(seed)
    ranks = tuple(chance.randint(1, 3) for _ in range(3))
    divided = shares(*ranks, batch=chance.randint(sum(ranks), 40), rule=rule)
    lost, since = chance.randrange(3), chance.randint(0, 20)
    run = Ranks(chance, divided)
    ledgers: set[DataPositions] = set()
    for step in range(since + 4 * NOTICE_STEPS):
        ledgers = set()
        for place, sampler in run.made.items():
            if place[0] == lost and step >= since:
                continue
            run.use(place, step)
            # A loss is known to some in its own round, to the others in the next.
            if step > since or (step == since and chance.random() < 0.5):
                sampler.lose({lost: since})
            sampler.step()
            if step != since:
                ledgers.add(sampler.used)
        assert len(ledgers) <= 1, f"{seed=} {step=}"
    (ledger,) = ledgers
    assert check_used_once(run.used, ledger, seed) == [], "handed out again by now"


@pytest.mark.parametrize("seed", range(30))
def test_a_site_that_comes_back_takes_its_part_again(seed: int) -> None:
    """Others have fetched ahead; one more site may be lost for good; it may be given up once."""
    chance = random.Random(seed)
    ranks = tuple(chance.randint(1, 3) for _ in range(3))
    divided = shares(*ranks, batch=chance.randint(sum(ranks), 40))
    since, told = 3, 5 + chance.choice([0, 3, NOTICE_STEPS, 2 * NOTICE_STEPS])
    retold = told + chance.randint(1, 9) if seed % 3 == 0 else -1
    again, last = told + NOTICE_STEPS + 1, told + 4 * NOTICE_STEPS
    gone = {0: since, **({2: since + 1} if seed % 2 else {})}
    run, ledger = Ranks(chance, divided), DataPositions()
    for step in range(last):
        if step == again and step >= retold:
            for rank in range(ranks[0]):
                run.made[0, rank] = joiner = run.make(0, rank)
                joiner.resume(ledger, lambda: None)
                joiner.begin_without(set(gone) - {0})
                run.drawn[0, rank] = [[]] * step
        ledgers = set()
        for place, sampler in run.made.items():
            is_back = place[0] == 0 and step >= again
            if step >= gone.get(place[0], last) and not is_back:
                continue
            run.use(place, step)
            sampler.lose({} if step >= again else {at: d for at, d in gone.items() if d <= step})
            sampler.step()
            ledgers.add(sampler.used)
        assert len(ledgers) == 1, f"{seed=} {step=}"
        (ledger,) = ledgers
        left = [each for place, each in run.made.items() if gone.get(place[0], last) > step]
        if step in (told, retold):
            if step == retold:
                for each in left:
                    each.give_up(0, again)
            again = max(
                again if retold == step else 0, step + 1 + max(s.notice_steps([0]) for s in left)
            )
            for each in left:
                each.regain(0, again)
    assert check_used_once(run.used, ledger, seed) == []


@pytest.mark.parametrize("rule", ["keep", "shrink"])
@pytest.mark.parametrize("sequences", [(), (2, 6, 4)])
@pytest.mark.parametrize(
    ("catches_up", "rejoins"),
    [(4, 5), (10, 20), (10, 3 + NOTICE_STEPS), (10, 90), (2 + NOTICE_STEPS, 70), (69, 90)],
)
def test_a_site_that_catches_up_soon_after_its_loss_has_the_others_ledger(
    catches_up: int, rejoins: int, sequences: tuple[int, ...], rule: str
) -> None:
    """Holes are handed out, and rates are scaled, in the same step at it as at the others."""
    divided = BatchShares(full=FullBatch(12, 3), rule=rule, ranks=(1, 1, 1), sequences=sequences)
    made = [Sampler(num_samples=999, shares=divided, site=at, rank=0, seed=1) for at in range(3)]
    heard = [MissingSites() for _ in made]
    lost, used = 3, list[int]()
    for step in range(rejoins + 90):
        if step == catches_up:
            told = made[0].handed_out()
            made[2] = Sampler(num_samples=999, shares=divided, site=2, rank=0, seed=1)
            made[2].resume(DataPositions.from_json(told), lambda: None, told["absences"])  # type: ignore[arg-type]
            heard[2] = MissingSites()
            heard[2].begin_without([2])
            heard[2].begin_amid(heard[0].absent_before())
        present = [0, 1, *([2] if not lost <= step < catches_up else [])]
        if step == rejoins:
            for at in present:
                made[at].regain(2, step - (catches_up if at == 2 else 0))
                heard[at].rejoin(2)
        scales = set()
        for at in present:
            drawn = made[at].draw().tolist()
            used += [] if at == 2 and lost <= step < rejoins else drawn
            assert at != 2 or not lost <= step < rejoins or len(drawn) == 1
            heard[at].note(result(step, *([(2, lost)] if step == lost else [])))
            heard[at].end_step()
            made[at].lose(heard[at].absent())
            made[at].step()
            scales.add(divided.batch(heard[at].gone()).learning_rate_scale)
        assert len(scales) == 1, step
        assert len({made[at].used for at in present}) == 1, step
    check_used_once(used, made[0].used)


def test_batches_fetched_too_far_ahead_are_refused_before_the_first_step() -> None:
    """Whether a site will be lost or not: a loss ends no script."""
    sampler = Sampler(num_samples=9, shares=shares(1, 1), site=0, rank=0, seed=1)
    for _ in range(FETCHED_AHEAD + 1):
        sampler.draw()
    with pytest.raises(ScriptError, match="num_workers x prefetch_factor"):
        sampler.draw()
    sampler.step()
    sampler.draw()
    alone = Sampler(num_samples=9, shares=shares(2), site=0, rank=0, seed=1)
    for _ in range(2 * NOTICE_STEPS):
        alone.draw()


def result(round_: int, *missing: tuple[int, int]) -> Reduced:
    return Reduced(
        round=round_,
        bucket=0,
        weight=1.0,
        times=ReductionTimes(),
        wire_bytes=0,
        missing=tuple(Missing(site=site, from_round=at) for site, at in missing),
    )


def test_ranks_that_hear_of_a_loss_a_round_apart_agree_on_its_step() -> None:
    early, late = MissingSites(), MissingSites()
    for step in range(5):  # two rounds a step
        for missing_sites in (early, late):
            knows = step >= 3 if missing_sites is early else step >= 4
            for round_ in (2 * step, 2 * step + 1):
                missing_sites.note(result(round_, *([(1, 7)] if knows else [])))
            missing_sites.end_step()
    assert early.absent() == late.absent() == {1: 3}
    assert early.gone() == frozenset()
    assert early.gone(3 + NOTICE_STEPS) == late.gone(3 + NOTICE_STEPS) == {1}
    assert early.gone(2 + NOTICE_STEPS) == frozenset()


def test_a_loss_heard_of_is_no_batch_fetched_ahead() -> None:
    """A site that catches up may hear of it before those that have more results."""
    shares = BatchShares(full=FullBatch(12, 3), rule="keep", ranks=(1, 1, 1))
    samplers = [
        Sampler(num_samples=1000, shares=shares, site=0, rank=0, seed=1, notice_steps=8)
        for _ in range(2)
    ]
    for each in samplers:
        each.begin_without([1])
        each.draw()
        each.step()
    samplers[0].lose({2: 0})
    asked = [each.notice_steps([1]) for each in samplers]
    assert asked[0] > asked[1] == 0
    assert [each.num_ahead for each in samplers] == [0, 0]


def test_what_crosses_before_a_site_takes_part_again_does_not_lose_it_again() -> None:
    """The mean of a step's time, say, which still says since when it was missing."""
    missing_sites = MissingSites()
    for round_ in range(4):
        missing_sites.note(result(round_, (1, 2)))
        missing_sites.end_step()
    assert missing_sites.absent() == {1: 2}
    missing_sites.rejoin(1)
    missing_sites.note(result(4, (1, 2)))
    missing_sites.end_step()
    assert missing_sites.absent() == {}
    missing_sites.begin_round(5)
    missing_sites.note(result(4, (1, 2)))
    missing_sites.end_step()
    assert missing_sites.absent() == {}
    missing_sites.note(result(6, (1, 6)))
    missing_sites.end_step()
    assert missing_sites.absent() == {1: 6}


def test_a_site_whose_entry_came_to_nothing_is_missing_from_that_round_on() -> None:
    """Something failed before the round was marked that it was to take part in: no epoch began."""
    missing_sites = MissingSites()
    missing_sites.note(result(0, (1, 0)))
    missing_sites.end_step()
    missing_sites.rejoin(1)
    missing_sites.begin_round(1)
    missing_sites.note(result(1, (1, 0), (2, 1)))
    missing_sites.end_step()
    assert missing_sites.absent() == {1: 1, 2: 1}


def test_a_loss_counts_from_the_first_step_of_its_round() -> None:
    """Where a round has several steps, and the script averages something amid it."""
    early, late = MissingSites(), MissingSites()
    for step in range(9):  # rounds end with steps 2, 5 and 8
        for missing_sites in (early, late):
            knows = step >= 5 if missing_sites is early else step >= 8
            missing_sites.note(result(step, *([(1, 4)] if knows else [])))
            missing_sites.end_step(has_landed=step % 3 == 2)
    assert early.absent() == late.absent() == {1: 3}
    assert notice_steps_of(regime_of("diloco", sync_every=30)) == NOTICE_STEPS + 60
    assert notice_steps_of(regime_of("delayed")) == NOTICE_STEPS


def test_shares_are_the_planners_and_stay_whole_without_a_site() -> None:
    divided = BatchShares(full=FullBatch(13, 6), rule="keep", ranks=(2, 1, 3), sequences=(3, 6, 4))
    for gone in (frozenset[int](), frozenset({0}), frozenset({0, 2})):
        left = [(site, rank) for site in {0, 1, 2} - gone for rank in range(divided.ranks[site])]
        parts = [divided.of_rank(*place, gone) for place in sorted(left)]
        assert [*itertools.chain(*parts)] == list(range(13))
    assert divided.of_site(1, frozenset()) == range(3, 9)
    even = shares(2, 1, batch=7)
    assert [even.of_rank(*place, frozenset()) for place in ((0, 0), (0, 1), (1, 0))] == [
        share(7, 3, rank) for rank in range(3)
    ]


@pytest.mark.parametrize("rule", ["keep", "shrink"])
@pytest.mark.parametrize("sequences", [(), (6, 6, 12)])
def test_a_run_that_begins_with_some_sites_has_the_full_batch(
    sequences: tuple[int, ...], rule: str
) -> None:
    """Whether a placement says how it is divided or not, and before and after a site is added."""
    divided = BatchShares(
        full=FullBatch(24, 2), rule=rule, ranks=(1, 1, 2), sequences=sequences, later=frozenset({2})
    )
    for gone in (frozenset({2}), frozenset[int](), frozenset({1})):
        batch = divided.batch(gone)
        assert (batch.samples, batch.learning_rate_scale) == (24, 1.0), gone
        parts = [divided.of_site(site, gone) for site in range(3)]
        assert sorted(place for part in parts for place in part) == list(range(24))
    lost = divided.batch(frozenset({1, 2}))
    expected = (24, 1.0) if rule == "keep" else (12, 0.5)
    assert (lost.samples, lost.learning_rate_scale) == expected


@pytest.mark.parametrize("gone", [frozenset[int](), frozenset({0})])
@pytest.mark.parametrize(
    ("divided", "even"),
    [
        (shares(2, 1, batch=6), 2),
        (shares(2, 2, batch=6), 0),
        (shares(1, 1, batch=5), 0),
        (BatchShares(full=FullBatch(9, 3), rule="keep", ranks=(2, 1), sequences=(2, 1)), 3),
        (BatchShares(full=FullBatch(9, 3), rule="keep", ranks=(2, 1), sequences=(1, 2)), 0),
    ],
)
def test_ranks_weigh_by_their_samples_and_1_where_all_have_as_many(
    divided: BatchShares, even: int, gone: frozenset[int]
) -> None:
    for site, ranks in enumerate(divided.ranks):
        for rank in range(ranks):
            sampler = Sampler(num_samples=99, shares=divided, site=site, rank=rank, seed=0)
            sampler.begin_without(gone)
            assert sampler.weight(False) == 1.0, "nothing of it is trained on yet"
            samples = len(sampler.draw())
            unit = divided.even(gone)
            assert gone or unit == even
            assert site in gone or sampler.weight(False) == samples / (unit or 1)


def test_ranks_that_share_experts_weigh_alike_in_each_site() -> None:
    """From the start uneven shares are refused; once a site was lost nothing ends for them."""
    divided = shares(2, 2, 2, batch=18)
    made = [
        Sampler(num_samples=99, shares=divided, site=site, rank=rank, seed=0)
        for site in range(3)
        for rank in range(2)
    ]
    for each in made:
        each.draw()
    assert {each.weight(True) for each in made} == {1.0}
    for each in made[:4]:
        each.begin_without({2})
    weights = [each.weight(True) for each in made[:4]]
    assert weights == [4.5] * 4
    assert [each.weight(False) for each in made[:4]] == [4.0, 5.0, 4.0, 5.0]
    uneven = Sampler(num_samples=99, shares=shares(2, 1, batch=5), site=0, rank=0, seed=0)
    uneven.draw()
    with pytest.raises(
        ScriptError, match="2 ranks of this site share 3 samples of a step unevenly"
    ):
        uneven.weight(True)


def test_a_resumed_run_goes_on_with_the_parts_that_were_decided() -> None:
    def two() -> list[Sampler]:
        return [
            Sampler(num_samples=99, shares=shares(1, 1, batch=12), site=site, rank=0, seed=5)
            for site in (0, 1)
        ]

    def steps(made: list[Sampler], count: int) -> list[list[list[int]]]:
        found = []
        for _ in range(count):
            found.append([each.draw().tolist() for each in made])
            for each in made:
                each.step()
        return found

    undisturbed = two()
    for each in undisturbed:
        each.divide(3, (8, 4))
        each.divide(7, (3, 9))
    steps(undisturbed, 5)
    resumed = two()
    for each, before in zip(resumed, undisturbed, strict=True):
        each.resume(before.used, lambda: None)
        for step, parts in before.divisions():
            each.divide(step, parts)
    after = steps(undisturbed, 5)
    assert [[len(own) for own in step] for step in after] == [[8, 4]] * 2 + [[3, 9]] * 3
    assert steps(resumed, 5) == after
    assert [each.weight(False) for each in resumed] == [3, 9]


def test_ranks_that_weigh_alike_weigh_as_their_mean_where_parts_are_uneven() -> None:
    """As after a site has come back, until the parts are decided again."""
    sampler = Sampler(num_samples=99, shares=shares(2, 1, batch=9), site=0, rank=0, seed=5)
    sampler.divide(0, (5, 4))
    sampler.draw()
    assert sampler.weight(True) == 2.5


def open_samplers(*ranks: int) -> list[Sampler]:
    return [
        Sampler(
            num_samples=1000,
            shares=shares(*ranks, batch=12),
            site=site,
            rank=rank,
            seed=5,
            most_ahead=0,
        )
        for site, num_ranks in enumerate(ranks)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_slow_sites_do_not_come_to_is_handed_out_in_the_next_round(seed: int) -> None:
    """Each sample is used once; also those of a site that is lost amid it all."""
    chance, length, lost_in = random.Random(seed), 4, 9
    made = open_samplers(1, 2, 1)
    used: list[int] = []
    for round_ in range(40):
        taken = {site: chance.randint(0, length) for site in range(3)}
        if round_ >= lost_in:
            del taken[2]
        for sampler in made:
            sampler.lose({2: lost_in * length} if round_ > lost_in else {})
            for step in range(length):
                is_wasted = step >= taken.get(sampler._site, 0)
                if is_wasted and chance.random() < 0.5:
                    break  # passed over, or ended early
                drawn = sampler.draw().tolist()
                used += [] if is_wasted else drawn
                if step < length - 1:
                    sampler.step()
            sampler.end_round(length, taken)
        alive = [each for each in made if each._site != 2 or round_ < lost_in]
        assert len({str(each.used) for each in alive}) == 1
    check_used_once(used, made[0].used, seed)


def test_a_batch_that_is_fetched_ahead_of_a_round_is_refused() -> None:
    sampler, *_ = open_samplers(1, 1)
    batches = iter(sampler)
    next(batches)
    with pytest.raises(ScriptError, match="num_workers=0"):
        next(batches)
