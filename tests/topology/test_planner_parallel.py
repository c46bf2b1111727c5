"""Cuts inside sites: against every other that there is, against memory, against wider links."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import pytest

from isthmus.topology.cost.layer_time import device_of, interior_of
from isthmus.topology.cost.memory import memory
from isthmus.topology.cost.parallel import step_time
from isthmus.topology.model.site_timing import Cut, SiteTiming, StageMemory, layers_together
from isthmus.topology.planner.cuts import SiteCuts, every_cut, parallel_of, timing_point
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.planner.search import Search, fastest_cuts
from isthmus.topology.spec.job import Placed
from isthmus.topology.spec.model_shape import degrees_of, misfit, node_share, workload_described
from isthmus.topology.spec.workload import DescribedModel, Limits, Parallel
from isthmus.topology.spec.world import Topology
from tests.fakes.described import MODEL, described_job, few_degrees, sites_of_nodes

BIG = dataclasses.replace(MODEL, layers=24, width=8192, heads=64, global_batch=64)
"""Twenty billion parameters."""


def untouched_timing(
    model: DescribedModel, topology: Topology, index: int, count: int, together: int = 1
) -> list[SiteTiming]:
    """Return the times of every cut of a site that fits, straight from the cost model."""
    workload, site = workload_described(model), topology.sites[index]
    found = []
    for degrees in every_cut(model, site):
        if degrees.data > count or misfit(workload, degrees) is not None:
            continue
        if memory(workload, degrees, count).total > site.accelerator.memory_bytes:
            continue
        step = step_time(workload, degrees, device_of(site.accelerator), interior_of(site), count)
        away = (degrees.pipeline - 1) * (1 - 1 / degrees.virtual_stages)
        cut = Cut(
            degrees=degrees,
            micro_batch_s=0.0,
            passage_s=0.0,
            reduction_s=step.pipeline_s + step.gradients.exposed_s,
            tail_s=step.optimizer_s + step.parameters.exposed_s,
            window_s=degrees.pipeline * step.window_s,
            node_window_s=(1 + away) * step.window_s,
            num_layers=model.layers // degrees.pipeline,
            embedding_share=workload.embedding_parameters / workload.parameters,
            node_share=node_share(workload, degrees, site),
            stages=(StageMemory(0.0, 0.0, 1),),
        )
        found.append(cut.timing(count, together))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_of_two_sites_the_cuts_are_the_best_of_all(seed: int) -> None:
    """Straight from the cost model, over the reduction, spread and sizes that were chosen."""
    chance = random.Random(seed)
    topology = sites_of_nodes(
        [chance.choice((1, 1, 2)) for _ in range(2)],
        [(0, 1, 10 ** chance.uniform(9.5, 12.0), chance.uniform(0.0001, 0.01))],
        per_node=2,
        speeds=[chance.choice((1e14, 5e13)) for _ in range(2)],
    )
    model = dataclasses.replace(few_degrees(layers=4, global_batch=5), micro_batch=None)
    job = described_job(model, codecs=("fp32", "int8"), sites="all", gateways="unlimited")
    choice = Search(job, topology).best()
    assert choice is not None
    together = layers_together(workload_described(model), choice.sizing.bucket_bytes)
    fronts = [
        untouched_timing(model, topology, index, count, together)
        for index, count in enumerate(choice.sequences)
    ]
    joint = choice.model(job, topology)
    best_s = min(joint.steps_s(list(itertools.product(*fronts))))
    assert choice.modelled_s == pytest.approx(best_s, rel=1e-9), f"{seed=}"


@pytest.mark.slow
def test_a_site_joins_where_that_is_faster_though_the_spread_begun_with_is_not() -> None:
    """A slow site: a spread in proportion to speeds is slower with it, and a better one is not."""
    world = sites_of_nodes([4, 1], [(0, 1, 4e10, 0.002)], speeds=[1e14, 3e13])
    job = described_job(
        dataclasses.replace(MODEL, global_batch=96), codecs=("int8",), gateways="unlimited"
    )
    plan = make_plan(job, world)
    step_s = plan["predicted"]["step_s"]
    for each in plan["alternatives"]:
        assert each["step_s"] >= step_s * (1 - 1e-6), each
    everybody = make_plan(
        dataclasses.replace(job, plan=dataclasses.replace(job.plan, sites="all")),  # type: ignore[type-var]
        world,
    )
    assert step_s <= everybody["predicted"]["step_s"] * (1 + 1e-6)


@pytest.mark.slow
def test_a_written_placement_and_its_cut_are_kept() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e10, 0.01)])
    job = described_job(dataclasses.replace(MODEL, global_batch=32), codecs=("bf16", "int8"))
    cut = Parallel(tensor=2, pipeline=2, data=2, zero_stage=1)
    placement = (
        Placed(site="s0", sequences=20, parallel=cut),
        Placed(site="s1", sequences=12),
    )
    plan = make_plan(dataclasses.replace(job, placement=placement), world)
    first, second = plan["decisions"]["placement"]
    assert (first["sequences"], second["sequences"]) == (20, 12)
    assert first["parallel"] == dataclasses.asdict(cut)


def test_tensor_groups_leave_a_node_only_where_the_job_says_so_and_pay_for_it() -> None:
    world = sites_of_nodes([2], [])
    model = dataclasses.replace(MODEL, global_batch=8)
    assert {each.tensor for each in every_cut(model, world.sites[0])} == {1, 2, 4}
    steps_s = {}
    for cut in (Parallel(tensor=8), Parallel(tensor=4, data=2)):
        placement = (Placed(site="s0", sequences=8, parallel=cut),)
        plan = make_plan(dataclasses.replace(described_job(model), placement=placement), world)
        assert plan["decisions"]["placement"][0]["parallel"] == dataclasses.asdict(cut)
        steps_s[cut.tensor] = plan["predicted"]["step_s"]
        warned = any("more than the 4 accelerators of a node" in each for each in plan["warnings"])
        assert warned == (cut.tensor == 8)
    assert steps_s[8] > steps_s[4]


def test_a_written_cut_that_does_not_fit_is_kept_and_warned_of() -> None:
    world = sites_of_nodes([2], [], memory_bytes=8 << 30)
    placement = (Placed(site="s0", sequences=16, parallel=Parallel(data=8)),)
    plan = make_plan(dataclasses.replace(described_job(), placement=placement), world)
    assert plan["decisions"]["placement"][0]["parallel"]["data"] == 8
    assert any("does not fit: needs" in each for each in plan["warnings"])


@pytest.mark.slow
def test_what_is_left_out_of_a_sites_cuts_is_never_faster() -> None:
    [site] = sites_of_nodes([4], []).sites
    topology = sites_of_nodes([4], [])
    model = dataclasses.replace(MODEL, context=4096)
    cuts = SiteCuts(model, workload_described(model), site)
    for count in (3, 7, 16):
        every = untouched_timing(model, topology, 0, count)
        assert cuts.timings(count)[0].alone_s == pytest.approx(min(each.alone_s for each in every))
        kept = [timing_point(each) for each in cuts.timings(count)]
        for each in every:
            mine = [value * (1 + 1e-9) for value in timing_point(each)]
            assert any(all(map(float.__le__, map(float, point), mine)) for point in kept), each


def test_cuts_fit_the_site_and_the_script() -> None:
    [site] = sites_of_nodes([4], []).sites
    model = dataclasses.replace(
        MODEL, heads=16, experts=4, active_experts=2, context=8192, at_most=Limits(tensor=2)
    )
    found = list(every_cut(model, site))
    workload = workload_described(model)
    assert len(set(found)) == len(found) > 100
    for degrees in found:
        assert degrees.num_ranks == site.num_ranks
        assert degrees.tensor <= 2
        assert misfit(workload, degrees) is None
        assert degrees_of(parallel_of(degrees), model) == degrees
    assert {each.expert for each in found} == {1, 2, 4}
    assert {each.context for each in found} == {1, 2, 4}
    assert {each.zero_stage for each in found if each.pipeline > 1} == {0, 1}
    assert {each.recompute for each in found} == {"none", "full"}
    scores = dataclasses.replace(model, fused_attention=False)
    assert "selective" in {each.recompute for each in every_cut(scores, site)}


@pytest.mark.slow
def test_memory_decides_and_says_so() -> None:
    topology = sites_of_nodes([2], [])
    roomy = Search(described_job(BIG), topology).best()
    assert roomy is not None
    tight_world = sites_of_nodes([2], [], memory_bytes=48 << 30)
    search = Search(described_job(BIG), tight_world)
    tight = search.best()
    assert tight is not None
    [tight_cut], [roomy_cut] = ([each.cut for each in some.timings] for some in (tight, roomy))
    assert tight_cut is not None
    assert roomy_cut is not None
    assert tight_cut.memory_bytes(64) <= 48 << 30 < roomy_cut.memory_bytes(64)
    assert tight.step_s >= roomy.step_s
    told = search.options.cuts["s0"].lacking(64, tight.step_s, 3)
    assert told
    for each in told:
        assert re.search(r"does not fit: needs [\d.e+]+GiB of 48GiB", each), each
    assert any("with full recompute" in each for each in told)
    times = [each.alone_s for each, _, _ in search.options.cuts["s0"].front(64)]
    sizes = [needed for _, _, needed in search.options.cuts["s0"].front(64)]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)


def test_micro_batches_in_flight_count() -> None:
    [site] = sites_of_nodes([2], []).sites
    workload = workload_described(BIG)
    cuts = SiteCuts(BIG, workload, site)
    for cut in cuts.cuts[::7]:
        for count in (8, 20, 64):
            exact = memory(workload, cut.degrees, count).total
            assert cut.memory_bytes(count) == pytest.approx(exact)


@pytest.mark.slow
def test_a_site_without_room_is_left_out() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e12, 0.001)])
    small = dataclasses.replace(world.sites[1].accelerator, memory_bytes=4 << 30)
    sites = (world.sites[0], dataclasses.replace(world.sites[1], accelerator=small))
    search = Search(described_job(BIG), dataclasses.replace(world, sites=sites))
    choice = search.best()
    assert choice is not None
    assert choice.sites == ("s0",)
    assert "does not fit: needs" in search.options.cuts["s1"].closest()
    assert search.best_of(["s0", "s1"]) is None


@pytest.mark.slow
def test_narrow_links_make_the_window_longer() -> None:
    """With few bytes a second, fewer and longer micro-batches hide more than they cost.

    Of an embedding nothing can be hidden: this one is small.
    """
    limits = Limits(zero_stage=1)
    model = dataclasses.replace(MODEL, global_batch=64, vocabulary=1000, at_most=limits)
    wide, narrow = (
        Search(
            described_job(model, sites="all", gateways="unlimited"),
            sites_of_nodes([2, 2], [(0, 1, rate, 0.001)], memory_bytes=8 << 30),
        ).best()
        for rate in (1e13, 5e9)
    )
    assert wide is not None
    assert narrow is not None
    narrow_cut, wide_cut = narrow.timings[0].cut, wide.timings[0].cut
    assert narrow_cut is not None
    assert wide_cut is not None
    assert narrow_cut.window_s >= 2 * wide_cut.window_s
    assert wide.step_s < narrow.step_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_more_bandwidth_hardly_ever_gives_a_slower_plan(seed: int) -> None:
    chance = random.Random(seed)
    before_s, rate = float("inf"), 10 ** chance.uniform(8.0, 9.5)
    speeds = [chance.choice((1e14, 5e13)) for _ in range(2)]
    for _ in range(5):
        world = sites_of_nodes([1, 2], [(0, 1, rate, 0.02)], speeds=speeds)
        choice = Search(described_job(codecs=("fp32", "int8")), world).best()
        assert choice is not None
        assert choice.step_s <= before_s * 1.02, f"{seed=}"
        before_s, rate = choice.step_s, rate * chance.uniform(1.0, 5.0)


@pytest.mark.slow
def test_links_that_cost_nothing_leave_the_sites_own_time() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e18, 0.0)])
    job = described_job(dataclasses.replace(MODEL, global_batch=32), gateways="unlimited")
    search = Search(job, world)
    choice = search.best()
    assert choice is not None
    assert choice.sequences == (16, 16)
    assert choice.step_s == pytest.approx(search.options.cuts["s0"].alone_s(16), rel=1e-3)


def test_the_fullest_node_sets_the_gateways_pace() -> None:
    """Stages that a node has alone: the first one's embedding crosses one gateway."""
    [site] = sites_of_nodes([4], []).sites
    workload = workload_described(MODEL)
    by_data = next(each for each in every_cut(MODEL, site) if each.data == 16)
    staged = next(
        each for each in every_cut(MODEL, site) if each.pipeline == 4 and each.tensor == 4
    )
    assert node_share(workload, by_data, site) == pytest.approx(1 / 4, rel=0.02)
    assert node_share(workload, staged, site) > 1 / 4


@pytest.mark.slow
def test_a_cheaper_plan_costs_less() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e9, 0.02)], price=2.0, speeds=[1e14, 2e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=32))
    cheap_job = described_job(dataclasses.replace(MODEL, global_batch=32), objective="cost")
    fast, cheap = (Search(each, world).best() for each in (job, cheap_job))
    assert fast is not None
    assert cheap is not None
    assert cheap.usd_per_step <= fast.usd_per_step
    assert fast.step_s <= cheap.step_s


@pytest.mark.slow
@pytest.mark.exhaustive
def test_many_sites_are_planned() -> None:
    """Of more than can be enumerated: no worse than any of them by itself, nor than all of them."""
    chance = random.Random(7)
    links = [
        (one, other, 10 ** chance.uniform(9, 11), chance.uniform(0.005, 0.1))
        for one, other in itertools.combinations(range(5), 2)
    ]
    world = sites_of_nodes([1, 2, 2, 4, 1], links, speeds=[1e14, 1e14, 5e13, 1e14, 2e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=128), codecs=("bf16", "int8"))
    search = Search(job, world)
    choice = search.best()
    assert choice is not None
    assert sum(choice.sequences) == 128
    for names in ([site.name for site in world.sites], *([site.name] for site in world.sites)):
        other = search.best_of(names)
        assert other is None or choice.step_s <= other.step_s * 1.01


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("rate", [1e9, 2e10])
def test_moving_sequences_finds_what_trying_all_spreads_does(rate: float) -> None:
    world = sites_of_nodes([4, 2], [(0, 1, rate, 0.01)], speeds=[1e14, 7e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=400), sites="all")
    search = Search(job, world)
    choice = search.best()
    assert choice is not None
    model = choice.model(job, world)
    best_s = float("inf")
    for count in range(1, 400):
        fronts = [
            search.options.cuts["s0"].timings(count),
            search.options.cuts["s1"].timings(400 - count),
        ]
        if all(fronts):
            best_s = min(best_s, fastest_cuts(model, fronts)[1])
    assert choice.modelled_s <= best_s * 1.01
