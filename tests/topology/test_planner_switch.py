"""What a run that goes on would change: the best other trees, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from isthmus.topology.documents.placement import placed
from isthmus.topology.model.step_model import step_time
from isthmus.topology.planner.reductions import menu
from isthmus.topology.planner.search import simulated, step_of
from isthmus.topology.planner.switch import best_switch, on_best_rung, relaunched_s
from isthmus.topology.spec.codec_names import rungs
from isthmus.topology.spec.job import Exchange, Job, LinkCodec, Placed, Reduction
from isthmus.topology.spec.measured_links import LinkFigures, with_measured
from isthmus.topology.spec.regime import regime_of
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.wire_load import chunk_bytes_of
from tests.fakes.plannable import a_job, a_random_world, a_world

FAST, SLOW = 1e7, 1e6
TRIANGLE = [(0, 1, FAST, 0.01), (0, 2, FAST, 0.01), (1, 2, FAST, 0.01)]


def simulated_s(job: Job, topology: Topology) -> float:
    run = simulated(job, topology)
    assert run is not None
    return step_of(run)


def cut_of(job: Job, world: Topology) -> int:
    here = placed(job, world)
    return chunk_bytes_of(job, here, plan_reduction(job, here))


@pytest.mark.slow
def test_trees_leave_a_link_that_became_narrow() -> None:
    world = a_world([4e8] * 3, TRIANGLE)
    job = dataclasses.replace(a_job(), reduction=Reduction(tree="star", hub="s0"))
    same = best_switch(job, world, cut_of(job, world))
    cut = {("s0", "s1"): LinkFigures(bytes_per_s=SLOW / 10)}
    narrow = with_measured(world, cut, "2030-01-01T00:00:00+00:00")
    switch = best_switch(job, narrow, cut_of(job, world))
    assert switch.before_s > 2 * same.before_s
    assert switch.after_s < switch.before_s / 2
    exchange = dataclasses.replace(job.exchange, chunk_bytes=cut_of(job, world), is_cut=True)
    better = dataclasses.replace(job, exchange=exchange, reduction=switch.reduction)
    assert switch.after_s == pytest.approx(simulated_s(better, narrow), rel=1e-6)


@pytest.mark.slow
def test_a_codec_is_as_exact_as_the_links_permit() -> None:
    """On a narrow link a less exact one; the exact one again once the link is wide."""
    world = a_world([4e8] * 2, [(0, 1, FAST, 0.01)])
    job = dataclasses.replace(a_job(), reduction=Reduction(tree="gather"))
    cut_bytes, codecs = cut_of(job, world), rungs("fp32", "int4")
    chosen: dict[float, set[str]] = {}
    for share in (100.0, 1.0, 0.004):
        figures = {
            each: LinkFigures(bytes_per_s=share * FAST) for each in [("s0", "s1"), ("s1", "s0")]
        }
        here = with_measured(world, figures, "2030-01-01T00:00:00+00:00")
        for codec in ("fp32", "int8"):
            exchange = dataclasses.replace(job.exchange, codec=codec)
            running = dataclasses.replace(job, exchange=exchange)
            switch = best_switch(running, here, cut_bytes)
            found = on_best_rung(running, here, cut_bytes, switch, codecs)
            assert found.reduction == switch.reduction
            assert found.before_s == switch.before_s
            chosen.setdefault(share, set()).add(found.codec)
            if codec == "fp32" and share <= 1.0:
                assert found.after_s < found.before_s
    assert chosen[100.0] == {"fp32"}, "whatever the run has by now"
    assert chosen[0.004] == {"int4"}
    assert len(chosen[1.0]) == 1


@pytest.mark.slow
def test_what_a_regime_hides_is_no_reason_for_a_switch() -> None:
    """An exchange that takes most of a step costs `sync` much, and `delayed` nothing."""
    world = a_world([4e8] * 2, [(0, 1, 0.8 * FAST, 0.01)])
    job = dataclasses.replace(a_job(), reduction=Reduction(tree="gather"))
    cut_bytes = cut_of(job, world)
    delayed = dataclasses.replace(job, regime=regime_of("delayed"))
    for running, codec in [(job, "int4"), (delayed, "fp32")]:
        switch = best_switch(running, world, cut_bytes)
        found = on_best_rung(running, world, cut_bytes, switch, ["fp32", "int4"])
        assert found.codec == codec, found


@pytest.mark.slow
def test_chunks_stay_as_the_run_has_cut_them() -> None:
    world = a_world([4e8] * 3, TRIANGLE)
    cut = {
        (f"s{one}", f"s{other}"): LinkFigures(bytes_per_s=SLOW) for one, other in ((0, 1), (1, 0))
    }
    narrow = with_measured(world, cut, "2030-01-01T00:00:00+00:00")
    job = dataclasses.replace(a_job(), exchange=Exchange(codec="fp32", chunk_bytes=1 << 20))
    job = dataclasses.replace(job, reduction=Reduction(tree="star", hub="s0"))
    assert cut_of(job, narrow) < cut_of(job, world), "else nothing is seen here"
    exchange = dataclasses.replace(job.exchange, chunk_bytes=cut_of(job, world), is_cut=True)
    assert cut_of(dataclasses.replace(job, exchange=exchange), narrow) == cut_of(job, world)
    as_cut, as_if_new = (
        best_switch(job, narrow, cut_of(job, each)).before_s for each in (world, narrow)
    )
    assert as_cut != as_if_new


@pytest.mark.slow
def test_trees_may_change_their_codecs() -> None:
    world = a_world([4e8] * 3, TRIANGLE)
    narrow = LinkCodec(between=("s1", "s2"), codec="int8")
    exchange = dataclasses.replace(a_job().exchange, codecs=(narrow,))
    job = dataclasses.replace(
        a_job(),
        exchange=exchange,
        reduction=Reduction(tree="star", hub="s0"),
    )
    assert set(plan_codecs(job, world, plan_reduction(job, world))) == {"fp32"}
    switch = best_switch(job, world, cut_of(job, world))
    better = dataclasses.replace(job, reduction=switch.reduction)
    assert "int8" in plan_codecs(better, world, plan_reduction(better, world))
    assert switch.after_s < switch.before_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_none_of_the_menu_is_better(seed: int) -> None:
    chance = random.Random(seed)
    world = a_random_world(chance, chance.randint(2, 4))
    first = chance.choice(menu(a_job(), world))
    job = dataclasses.replace(a_job(), reduction=first.reduction)
    switch = best_switch(job, world, cut_of(job, world))
    assert switch.before_s == pytest.approx(simulated_s(job, world)), f"{seed=}"
    for way in menu(a_job(), world):
        other = step_time(dataclasses.replace(job, reduction=way.reduction), world).step_s
        assert switch.after_s <= other * 1.05, f"{seed=} {way.form}"
    better = dataclasses.replace(job, reduction=switch.reduction)
    again = best_switch(better, world, cut_of(better, world))
    assert again.after_s >= again.before_s * 0.98, f"{seed=}"
    named = plan_reduction(better, world)
    assert named.num_sites == len(world.sites)


@pytest.mark.slow
@pytest.mark.parametrize("num_sites", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_chunks_keep_their_codecs_where_they_have_to(num_sites: int) -> None:
    """One link has a codec of its own: trees over it are refused."""
    pairs = itertools.combinations(range(num_sites), 2)
    world = a_world([4e8] * num_sites, [(*pair, SLOW, 0.01) for pair in pairs])
    exchange = dataclasses.replace(
        a_job().exchange, codecs=(LinkCodec(between=("s1", "s2"), codec="int8"),)
    )
    star = Reduction(tree="star", hub="s0")
    job = dataclasses.replace(a_job(), exchange=exchange, reduction=star)

    def codecs_of(reduction: Reduction) -> set[str]:
        tried = dataclasses.replace(job, reduction=reduction)
        return set(plan_codecs(tried, world, plan_reduction(tried, world)))

    def allows(reduction: Reduction) -> bool:
        return codecs_of(reduction) == {"fp32"}

    assert codecs_of(best_switch(job, world, cut_of(job, world)).reduction) != {"fp32"}
    switch = best_switch(job, world, cut_of(job, world), allows)
    assert codecs_of(switch.reduction) == {"fp32"}


@pytest.mark.slow
def test_sites_and_sequences_stay() -> None:
    world = a_world([4e8] * 4, [*TRIANGLE, (0, 3, SLOW, 0.05)])
    placement = tuple(
        Placed(site=f"s{site}", sequences=count) for site, count in ((0, 10), (1, 4), (2, 2))
    )
    job = dataclasses.replace(a_job(), placement=placement)
    switch = best_switch(job, world, cut_of(job, world))
    sites = {tree.root for tree in switch.reduction.trees}
    sites.update(site for tree in switch.reduction.trees for site in tree.parents)
    assert sites <= {"s0", "s1", "s2"}
    assert relaunched_s(job, world) <= switch.after_s, "everything may change with a new launch"


def test_measured_figures_take_the_place_of_described_ones() -> None:
    world = a_world([4e8] * 3, TRIANGLE)
    shared = tuple(
        dataclasses.replace(link, share=0.5 if link.source == "s1" else 1.0) for link in world.links
    )
    world = dataclasses.replace(world, links=shared)
    figures = {
        ("s0", "s1"): LinkFigures(bytes_per_s=2 * FAST),
        ("s1", "s0"): LinkFigures(bytes_per_s=2 * FAST, rtt_s=0.03),
    }
    measured = with_measured(world, figures, "2030-01-01T00:00:00+00:00")
    there, back = measured.link("s0", "s1"), measured.link("s1", "s0")
    assert there is not None
    assert back is not None
    assert (there.bytes_per_s, there.bandwidth_origin) == (2 * FAST, "measured")
    assert (there.rtt_s, there.rtt_origin, there.described_bytes_per_s) == (0.01, "rtt", FAST)
    assert back.bytes_per_s == FAST, "of a shared link no more than the share is used"
    assert (back.rtt_s, back.described_rtt_s) == (0.03, 0.01)
    assert measured.link("s1", "s2") == world.link("s1", "s2")
