"""The planner's choice: against random ones, the simulator, and what it prints itself."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from isthmus.topology.documents.placement import placed, restricted, unreached
from isthmus.topology.planner.choice import Sizing
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.planner.reductions import menu
from isthmus.topology.planner.search import Search, simulated, sizings, step_of
from isthmus.topology.spec.job import Job, LinkCodec, Placed, Reduction
from isthmus.topology.spec.reduction_plan import star
from isthmus.topology.spec.world import Topology
from tests.fakes.plannable import a_job, a_random_world, a_world


def simulated_s(job: Job, topology: Topology) -> float:
    run = simulated(job, topology)
    assert run is not None
    return step_of(run)


def with_exchange(
    job: Job, sizing: Sizing, codec: str = "fp32", codecs: tuple[LinkCodec, ...] = ()
) -> Job:
    exchange = sizing.of(dataclasses.replace(job.exchange, codec=codec, codecs=codecs))
    return dataclasses.replace(job, exchange=exchange)


def random_steps_s(
    chance: random.Random, job: Job, topology: Topology, count: int
) -> Iterator[float]:
    """Yield simulated steps of anything a plan could be, over two random sets of sites."""
    for _ in range(2):
        part = random_part(chance, topology)
        known = menu(job, part)  # most of what this takes: each set is asked once
        for _ in range(count // 2):
            way = chance.choice(known)
            sized = with_exchange(
                job, chance.choice(sizings(job)), *random_codecs(chance, job, part)
            )
            split = [1] * len(part.sites)
            for _ in range(job.trainer.global_batch - len(split)):
                split[chance.randrange(len(split))] += 1
            placement = tuple(
                Placed(site=site.name, sequences=count)
                for site, count in zip(part.sites, split, strict=True)
            )
            decided = dataclasses.replace(sized, placement=placement, reduction=way.reduction)
            yield simulated_s(decided, part)


def random_codecs(
    chance: random.Random, job: Job, topology: Topology
) -> tuple[str, tuple[LinkCodec, ...]]:
    """Return a codec for all links, and one for some."""
    permitted = (job.plan and job.plan.codecs) or (job.exchange.codec,)
    pairs = sorted({tuple(sorted((link.source, link.target))) for link in topology.links})
    return chance.choice(permitted), tuple(
        LinkCodec(between=(one, other), codec=chance.choice(permitted))
        for one, other in pairs
        if chance.random() < 0.5
    )


def random_part(chance: random.Random, topology: Topology) -> Topology:
    while True:
        names = [site.name for site in topology.sites if chance.random() < 0.7]
        part = restricted(topology, names)
        if names and not unreached(part):
            return part


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_sites"), [(0, 3), (1, 4), (2, 5), (3, 6), (4, 8), (5, 16)])
def test_it_is_no_worse_than_random_plans(seed: int, num_sites: int) -> None:
    chance = random.Random(seed)
    job = a_job(batch=2 * num_sites, codecs=("fp32", "int8"))
    topology = a_random_world(chance, num_sites, density=chance.choice((0.3, 1.0)))
    choice = Search(job, topology).best()
    assert choice is not None
    for step_s in random_steps_s(chance, job, topology, count=16):
        assert choice.step_s <= step_s * 1.01, f"{seed=}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_what_it_says_is_what_the_simulator_says(seed: int) -> None:
    chance = random.Random(seed)
    topology = a_random_world(chance, 3, rates=(4.5, 7.0))
    plan = make_plan(a_job(12, codecs=("fp32", "int8")), topology)
    choice = Search(a_job(12, codecs=("fp32", "int8")), topology).best()
    assert choice is not None
    decided = choice.job(a_job(12))
    step_s = simulated_s(decided, placed(decided, topology))
    assert choice.step_s == pytest.approx(step_s)
    assert plan["predicted"]["step_s"] <= choice.step_s * (1 + 1e-5)
    assert choice.modelled_s == pytest.approx(choice.step_s, rel=0.15), "or ranks mean nothing"


def with_prices(topology: Topology, chance: random.Random) -> Topology:
    """Return a topology whose accelerators and links have prices."""
    sites = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(
                site.accelerator, price_usd_per_h=chance.choice((0.5, 2.0, 4.0))
            ),
        )
        for site in topology.sites
    )
    links = tuple(
        dataclasses.replace(link, egress_usd_per_byte=chance.choice((0.0, 1e-11, 1e-9)))
        for link in topology.links
    )
    return dataclasses.replace(topology, sites=sites, links=links)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "objective"),
    [
        ("auto", "throughput"),
        ("all", "cost"),
        pytest.param("auto", "cost", marks=pytest.mark.exhaustive),
        pytest.param("all", "throughput", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_worse_than_one_that_it_prints(seed: int, sites: str, objective: str) -> None:
    chance = random.Random(seed)
    topology = with_prices(a_random_world(chance, 4, density=0.7, rates=(4.5, 7.0)), chance)
    job = a_job(12, codecs=("fp32", "int8"), sites=sites, objective=objective)
    plan = make_plan(job, topology)
    key = "usd_per_step" if objective == "cost" else "step_s"
    for each in plan["alternatives"]:
        if "(not permitted)" in each["what"]:
            assert sites == "all", each
            assert each[key] < plan["predicted"][key], each
        else:
            assert each[key] >= plan["predicted"][key], each
    if sites == "auto" and objective == "throughput":
        for each in plan["sites"]:
            assert (each["step_s_otherwise"] or 1e9) >= plan["predicted"]["step_s"], each


def test_a_site_alone_is_compared_by_its_own_step() -> None:
    # The step model prefers both sites. Simulated, slow start makes them slower than one.
    world = a_world([4e8, 2e8], [(0, 1, 450_183.0, 0.135604)])
    job = a_job(16, codecs=("fp32", "int8"))
    serial = dataclasses.replace(job, exchange=dataclasses.replace(job.exchange, schedule="serial"))
    plan = make_plan(serial, dataclasses.replace(world, emulator="netns"))
    assert [each["site"] for each in plan["decisions"]["placement"]] == ["s0"]


def test_a_written_placement_is_kept() -> None:
    world = a_world([4e8] * 3, [(0, 1, 1e7, 0.01), (0, 2, 1e7, 0.01), (1, 2, 1e7, 0.01)])
    placement = (Placed(site="s0", sequences=13), Placed(site="s2", sequences=3))
    job = dataclasses.replace(a_job(16, codecs=("fp32", "int8")), placement=placement)
    plan = make_plan(job, world)
    assert plan["decisions"]["placement"] == [
        {"site": "s0", "sequences": 13},
        {"site": "s2", "sequences": 3},
    ]
    assert "s1 is left out: the job's placement does not list it" in " ".join(plan["why"])


@pytest.mark.slow
def test_a_site_that_slows_the_others_is_left_out() -> None:
    near = [(0, 1, 1e9, 0.001), (0, 2, 1e4, 0.2), (1, 2, 1e4, 0.2)]
    search = Search(a_job(codecs=("fp32",)), a_world([4e8, 4e8, 4e8], near))
    choice = search.best()
    assert choice is not None
    assert choice.sites == ("s0", "s1")
    everybody = Search(a_job(codecs=("fp32",), sites="all"), search.topology).best()
    assert everybody is not None
    assert everybody.sites == ("s0", "s1", "s2")
    assert everybody.step_s > 2 * choice.step_s


def test_a_faster_site_takes_more() -> None:
    world = a_world([3e8, 1e8], [(0, 1, 1e10, 0.0)])
    choice = Search(a_job(16), world).best()
    assert choice is not None
    assert choice.sequences == (12, 4)


def test_what_the_job_names_is_kept() -> None:
    world = a_world([1e8] * 3, [(0, 1, 1e7, 0.01), (0, 2, 1e7, 0.01), (1, 2, 1e7, 0.01)])
    job = dataclasses.replace(a_job(), reduction=Reduction(tree="star", hub="s1"))
    choice = Search(job, world).best()
    assert choice is not None
    assert "s1" in choice.sites
    assert choice.coding.codecs == ("fp32",)
    assert choice.candidate.plan.trees == (star(len(choice.sites), choice.sites.index("s1")),)


def test_money_leaves_out_what_costs_more_than_it_brings() -> None:
    links = [(0, 1, 1e9, 0.001)]
    world = a_world([4e8, 1e8], links, price=2.0, egress=1e-9)
    fast = Search(a_job(16), world).best()
    cheap = Search(a_job(16, objective="cost"), world).best()
    assert fast is not None
    assert cheap is not None
    assert (fast.sites, cheap.sites) == (("s0", "s1"), ("s0",))
    assert cheap.usd_per_step < fast.usd_per_step
    assert cheap.step_s > fast.step_s


def test_too_few_sequences_leave_sites_out_or_give_no_plan() -> None:
    world = a_world([1e8, 1e8], [(0, 1, 1e10, 0.0)], ranks=[3, 5])
    choice = Search(a_job(4), world).best()
    assert choice is not None
    assert choice.sites == ("s0",)
    assert Search(a_job(2), world).best() is None


@pytest.mark.slow
def test_links_that_cost_nothing_leave_nothing_but_compute() -> None:
    world = a_world([1e8] * 3, [(0, 1, 1e15, 0.0), (0, 2, 1e15, 0.0), (1, 2, 1e15, 0.0)])
    choice = Search(a_job(12), world).best()
    assert choice is not None
    assert choice.sequences == (4, 4, 4)
    compute_s = max(each.alone_s for each in choice.timings)
    # What a gateway needs for its last bucket is no cost of the links.
    assert compute_s / choice.step_s == pytest.approx(1.0, abs=0.005)
