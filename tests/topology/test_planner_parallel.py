"""Cuts inside sites: against every other that there is, against memory, against wider links."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Iterator

import pytest

from tests.fakes.described import MODEL, described_job, few_degrees, sites_of_nodes
from topology.cost.layer_time import device_of, interior_of
from topology.cost.memory import memory
from topology.cost.model_shape import degrees_of, misfit, node_share, workload_described
from topology.cost.parallel import step_time
from topology.documents.placement import restricted, unreached
from topology.job import Job, LinkCodec
from topology.model.buckets import gradient_bytes
from topology.model.wire_load import chunk_bytes_of
from topology.planner.cut_choice import fastest_cuts
from topology.planner.cuts import Cut, Timing, layers_together
from topology.planner.joint_step import JointModel
from topology.planner.parallel_search import ParallelSearch
from topology.planner.parallelism import every_cut, parallel_of
from topology.planner.placed_cuts import placed_timings
from topology.planner.site_cuts import SiteCuts
from topology.planner.sizings import sizings
from topology.planner.tree_mixes import mix_plan, spanning_trees
from topology.planner.ways import ways
from topology.trees.link_codecs import plan_codecs
from topology.trees.pairs import pairs_of
from topology.trees.trees import ReductionPlan
from topology.workload import DescribedModel, Limits
from topology.world import Topology

BIG = dataclasses.replace(MODEL, layers=24, width=8192, heads=64, global_batch=64)
"""Twenty billion parameters."""


def untouched_timing(
    model: DescribedModel, topology: Topology, index: int, count: int, together: int = 1
) -> list[Timing]:
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
            least_bytes=0.0,
            in_flight_bytes=0.0,
        )
        found.append(cut.timing(count, together))
    return found


def exhaustive_s(job: Job, topology: Topology) -> float:
    """Return the least seconds of a step of everything that can be decided."""
    model = job.workload
    assert model is not None
    assert job.plan is not None
    best_s = float("inf")
    names = [site.name for site in topology.sites]
    known: dict[tuple[str, int, int], list[Timing]] = {}
    for length in range(len(names) if job.plan.sites == "all" else 1, len(names) + 1):
        for chosen in itertools.combinations(names, length):
            part = restricted(topology, chosen)
            if unreached(part):
                continue
            splits = [
                split
                for split in itertools.product(range(1, model.global_batch + 1), repeat=length)
                if sum(split) == model.global_batch
            ]
            for joint, together in every_joint_model(job, part):
                for split in splits:
                    fronts = []
                    for site, count in zip(part.sites, split, strict=True):
                        key = (site.name, count, together)
                        if key not in known:
                            known[key] = untouched_timing(model, part, site.index, count, together)
                        fronts.append(known[key])
                    for timings in itertools.product(*fronts):
                        best_s = min(best_s, joint.step_s(timings))
    return best_s


def every_joint_model(job: Job, topology: Topology) -> Iterator[tuple[JointModel, int]]:
    """Yield the models of every reduction, size and assignment of codecs to links: equal ones once.

    Each with the layers that leave together. Weighted trees of the menu have one codec for all
    links.
    """
    assert job.plan is not None
    assert job.workload is not None
    mixed: set[object] = set()
    for codec, sizing in itertools.product(job.plan.codecs, sizings(job)):
        exchange = sizing.of(dataclasses.replace(job.exchange, codec=codec))
        tried = dataclasses.replace(job, exchange=exchange)
        together = layers_together(workload_described(job.workload), sizing.bucket_bytes)
        alike = (codec, chunk_bytes_of(tried, topology), together)
        for plan in () if alike in mixed else every_mix(tried, topology):
            yield JointModel(tried, topology, plan), together
        mixed.add(alike)
    pairs = list(itertools.combinations([site.name for site in topology.sites], 2))
    assigned = list(itertools.product(job.plan.codecs, repeat=max(1, len(pairs))))
    for way in ways(job, topology, by_rates=len(topology.sites) < 3):
        seen = set()
        for codecs, sizing in itertools.product(assigned, sizings(job)):
            links = tuple(
                LinkCodec(between=pair, codec=codec)
                for pair, codec in zip(pairs, codecs, strict=False)
            )
            exchange = dataclasses.replace(job.exchange, codec=codecs[0], codecs=links)
            tried = dataclasses.replace(job, exchange=sizing.of(exchange))
            together = layers_together(workload_described(job.workload), sizing.bucket_bytes)
            cut_bytes = chunk_bytes_of(tried, topology)
            key = (plan_codecs(tried, topology, way.plan), cut_bytes, together)
            if key not in seen:
                seen.add(key)
                yield JointModel(tried, topology, way.plan), together


def every_mix(job: Job, topology: Topology) -> Iterator[ReductionPlan]:
    """Yield all weighted trees of the menu for one codec and size, made here by themselves."""
    pairs = pairs_of(topology)
    if pairs.num_sites != 3:
        return
    trees = spanning_trees(pairs)
    num_chunks = math.ceil(gradient_bytes(job) / chunk_bytes_of(job, topology))
    assert num_chunks <= 12, "trees may carry every number of chunks"
    for count in range(2, len(trees) + 1):
        for some in itertools.combinations(trees, count):
            for weights in itertools.product(range(1, num_chunks), repeat=count):
                if sum(weights) == num_chunks:
                    yield mix_plan(some, weights)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_of_two_sites_it_is_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    topology = sites_of_nodes(
        [chance.choice((1, 1, 2)) for _ in range(2)],
        [(0, 1, 10 ** chance.uniform(9.5, 12.0), chance.uniform(0.0001, 0.01))],
        per_node=2,
        speeds=[chance.choice((1e14, 5e13)) for _ in range(2)],
    )
    model = dataclasses.replace(few_degrees(layers=4, global_batch=5), micro_batch=None)
    sites = "all" if seed % 2 else "auto"
    job = described_job(model, codecs=("fp32", "int8"), sites=sites, gateways="unlimited")
    choice = ParallelSearch(job, topology).best()
    assert choice is not None
    assert choice.step_s == pytest.approx(exhaustive_s(job, topology), rel=1e-9), f"{seed=}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_of_two_sites_chunks_and_buckets_are_the_best_of_all(seed: int) -> None:
    """Layers of three megabytes, so buckets matter; links that hold little, so chunks do."""
    chance = random.Random(seed)
    links = [(0, 1, 10 ** chance.uniform(7.5, 9.5), chance.uniform(0.0001, 0.02))]
    topology = sites_of_nodes([1, 1], links, per_node=2, speeds=[1e13] * 2)
    limits = Limits(tensor=1, context=1, zero_stage=0, virtual_stages=1)
    model = few_degrees(layers=8, global_batch=3, width=256, vocabulary=1000)
    model = dataclasses.replace(model, at_most=limits)
    job = described_job(model, codecs=("fp32",), sites="all", gateways="unlimited")
    check_sizes(job, topology, chance.choice((1 << 20, 8 << 20, 256 << 20)), f"{seed=}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 29, 46, 50])
def test_of_three_sites_weighted_trees_are_the_best_of_all_too(seed: int) -> None:
    """Half a megabyte, so that the menu can be enumerated. It has the best of all but the first."""
    chance = random.Random(seed)
    links = [
        (one, other, 10 ** chance.uniform(4.5, 6.0), chance.uniform(0.0001, 0.01))
        for one, other in itertools.combinations(range(3), 2)
    ]
    speeds = [chance.choice((1e8, 5e7)) for _ in range(3)]
    topology = sites_of_nodes([1, 1, 1], links, per_node=2, speeds=speeds)
    model = few_degrees(layers=2, global_batch=4, width=64, heads=2, vocabulary=256, context=32)
    limits = Limits(tensor=1, context=1, zero_stage=0, virtual_stages=1)
    model = dataclasses.replace(model, at_most=limits)
    sites, gateways = "all" if seed % 4 else "auto", chance.choice(("unlimited", "measured"))
    job = described_job(model, codecs=("fp32", "int8"), sites=sites, gateways=gateways)
    check_sizes(job, topology, chance.choice((64 << 10, 1 << 20)), f"{seed=}")


def check_sizes(job: Job, topology: Topology, bucket_bytes: int, told: str) -> None:
    """Check that a plan is the best of all, with the job's own buckets among others."""
    exchange = dataclasses.replace(job.exchange, bucket_bytes=bucket_bytes)
    job = dataclasses.replace(job, exchange=exchange)
    choice = ParallelSearch(job, topology).best()
    assert choice is not None
    assert choice.step_s == pytest.approx(exhaustive_s(job, topology), rel=1e-9), told
    # The model of these decisions says the same: what was worked out side by side, and what was
    # skipped.
    timings = placed_timings(choice.job(job), choice.topology(topology))
    assert choice.joint(job, topology).step_s(timings) == pytest.approx(choice.step_s, rel=1e-9)


def test_what_is_left_out_of_a_sites_cuts_is_never_faster() -> None:
    [site] = sites_of_nodes([4], []).sites
    topology = sites_of_nodes([4], [])
    model = dataclasses.replace(MODEL, context=4096)
    cuts = SiteCuts(model, workload_described(model), site)
    for count in (3, 7, 16):
        every = untouched_timing(model, topology, 0, count)
        assert cuts.timings(count)[0].alone_s == pytest.approx(min(each.alone_s for each in every))
        kept = [each.point for each in cuts.timings(count)]
        for each in every:
            mine = [value * (1 + 1e-9) for value in each.point]
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
        assert model.layers % degrees.pipeline == 0
        assert misfit(workload, degrees) is None
        assert degrees_of(parallel_of(degrees), model) == degrees
    assert {each.expert for each in found} == {1, 2, 4}
    assert {each.context for each in found} == {1, 2, 4}
    assert {each.zero_stage for each in found if each.pipeline > 1} == {0, 1}
    assert {each.recompute for each in found} == {"none", "full"}
    scores = dataclasses.replace(model, fused_attention=False)
    assert "selective" in {each.recompute for each in every_cut(scores, site)}


def test_memory_decides_and_says_so() -> None:
    topology = sites_of_nodes([2], [])
    roomy = ParallelSearch(described_job(BIG), topology).best()
    assert roomy is not None
    tight_world = sites_of_nodes([2], [], memory_bytes=48 << 30)
    search = ParallelSearch(described_job(BIG), tight_world)
    tight = search.best()
    assert tight is not None
    [timing] = tight.timings
    assert timing.cut.memory_bytes(64) <= 48 << 30 < roomy.timings[0].cut.memory_bytes(64)
    assert tight.step_s >= roomy.step_s
    told = search.cuts["s0"].lacking(64, tight.step_s, 3)
    assert told
    for each in told:
        assert re.search(r"does not fit: needs [\d.e+]+GiB of 48GiB", each), each
    assert any("with full recompute" in each for each in told)
    times = [each.alone_s for each, _ in search.cuts["s0"].front(64)]
    sizes = [needed for _, needed in search.cuts["s0"].front(64)]
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


def test_a_site_without_room_is_left_out() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e12, 0.001)])
    small = dataclasses.replace(world.sites[1].accelerator, memory_bytes=4 << 30)
    sites = (world.sites[0], dataclasses.replace(world.sites[1], accelerator=small))
    search = ParallelSearch(described_job(BIG), dataclasses.replace(world, sites=sites))
    choice = search.best()
    assert choice is not None
    assert choice.sites == ("s0",)
    assert "does not fit: needs" in search.cuts["s1"].closest()
    assert search.best_of(["s0", "s1"]) is None


def test_narrow_links_make_the_window_longer() -> None:
    """With few bytes a second, fewer and longer micro-batches hide more than they cost.

    Of an embedding nothing can be hidden: this one is small.
    """
    limits = Limits(zero_stage=1)
    model = dataclasses.replace(MODEL, global_batch=64, vocabulary=1000, at_most=limits)
    wide, narrow = (
        ParallelSearch(
            described_job(model, sites="all", gateways="unlimited"),
            sites_of_nodes([2, 2], [(0, 1, rate, 0.001)], memory_bytes=8 << 30),
        ).best()
        for rate in (1e13, 5e9)
    )
    assert wide is not None
    assert narrow is not None
    assert narrow.timings[0].cut.window_s >= 2 * wide.timings[0].cut.window_s
    assert wide.step_s < narrow.step_s


@pytest.mark.parametrize("seed", range(6))
def test_more_bandwidth_never_gives_a_slower_plan(seed: int) -> None:
    chance = random.Random(seed)
    before_s, rate = float("inf"), 10 ** chance.uniform(8.0, 9.5)
    speeds = [chance.choice((1e14, 5e13)) for _ in range(2)]
    for _ in range(5):
        world = sites_of_nodes([1, 2], [(0, 1, rate, 0.02)], speeds=speeds)
        choice = ParallelSearch(described_job(codecs=("fp32", "int8")), world).best()
        assert choice is not None
        assert choice.step_s <= before_s * (1 + 1e-9), f"{seed=}"
        before_s, rate = choice.step_s, rate * chance.uniform(1.0, 5.0)


def test_links_that_cost_nothing_leave_the_sites_own_time() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e18, 0.0)])
    job = described_job(dataclasses.replace(MODEL, global_batch=32), gateways="unlimited")
    search = ParallelSearch(job, world)
    choice = search.best()
    assert choice is not None
    assert choice.sequences == (16, 16)
    assert choice.step_s == pytest.approx(search.cuts["s0"].alone_s(16), rel=1e-3)


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


def test_a_cheaper_plan_costs_less() -> None:
    world = sites_of_nodes([2, 2], [(0, 1, 1e9, 0.02)], price=2.0, speeds=[1e14, 2e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=32))
    cheap_job = described_job(dataclasses.replace(MODEL, global_batch=32), objective="cost")
    fast, cheap = (ParallelSearch(each, world).best() for each in (job, cheap_job))
    assert fast is not None
    assert cheap is not None
    assert cheap.usd_per_step <= fast.usd_per_step
    assert fast.step_s <= cheap.step_s


@pytest.mark.slow
def test_many_sites_are_planned() -> None:
    """Of more than can be enumerated: no worse than any of them by itself, nor than all of them."""
    chance = random.Random(7)
    links = [
        (one, other, 10 ** chance.uniform(9, 11), chance.uniform(0.005, 0.1))
        for one, other in itertools.combinations(range(5), 2)
    ]
    world = sites_of_nodes([1, 2, 2, 4, 1], links, speeds=[1e14, 1e14, 5e13, 1e14, 2e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=128), codecs=("bf16", "int8"))
    search = ParallelSearch(job, world)
    choice = search.best()
    assert choice is not None
    assert sum(choice.sequences) == 128
    for names in ([site.name for site in world.sites], *([site.name] for site in world.sites)):
        other = search.best_of(names)
        assert other is None or choice.rank <= other.rank


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e9, 2e10])
def test_moving_sequences_finds_what_trying_all_spreads_does(rate: float) -> None:
    world = sites_of_nodes([4, 2], [(0, 1, rate, 0.01)], speeds=[1e14, 7e13])
    job = described_job(dataclasses.replace(MODEL, global_batch=400), sites="all")
    search = ParallelSearch(job, world)
    choice = search.best()
    assert choice is not None
    model = choice.joint(job, world)
    best_s = float("inf")
    for count in range(1, 400):
        fronts = [search.cuts["s0"].timings(count), search.cuts["s1"].timings(400 - count)]
        if all(fronts):
            best_s = min(best_s, fastest_cuts(model, fronts)[1])
    assert best_s * (1 - 1e-9) <= choice.step_s <= best_s * 1.005
