"""Codecs of links: which one trees take, what plans and predictions make of it, mistakes' lines."""

import dataclasses
import itertools
import random

import pytest

from isthmus.topology.documents.run_documents import RunDocuments
from isthmus.topology.model.step_model import StepModel, exchange_time_s
from isthmus.topology.planner.reductions import named
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import link_loads
from isthmus.topology.simulator.step_work import step_work
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import Exchange, Job, LinkCodec, Reduction
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import COSTS, GATEWAY_BYTES_PER_S, RATIOS, usual_ratio
from isthmus.topology.trees.link_codecs import codec_between, plan_codecs, smallest
from isthmus.topology.trees.pairs import pairs_of
from isthmus.topology.trees.shapes import widest_tree
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_times import carried, plan_times_s, seconds_per_byte
from isthmus.topology.trees.wire_load import (
    FRAME_HEADER_BYTES,
    Load,
    Wire,
    chunk_bytes_for,
    chunk_bytes_of,
    gateways_s_per_byte,
    tree_ratios,
)
from tests.fakes.tree_worlds import both_ways, random_world, world
from tests.topology.test_placement import load, mistakes
from tests.topology.test_trees_packing import (
    GIGABIT,
    all_spanning_trees,
    one_at_a_tenth,
    optimum_bytes_per_s,
    script,
)

TRIANGLE = world(3, both_ways((0, 1, 4e6, 0.02), (1, 2, 4e6, 0.02), (0, 2, 1e6, 0.02)))
PATHS = ReductionPlan(3, (Tree(1, {0: 1, 2: 1}, 3), Tree(0, {1: 0, 2: 0}, 1)), "given")
"""The first over the fast links only."""


def with_codecs(job: Job, *codecs: tuple[int, int, str]) -> Job:
    """Return a job with codecs of links, by the indices of their sites s0, s1, ..."""
    given = tuple(
        LinkCodec(between=(f"s{one}", f"s{other}"), codec=codec) for one, other, codec in codecs
    )
    return dataclasses.replace(job, exchange=dataclasses.replace(job.exchange, codecs=given))


def test_a_tree_takes_the_smallest_codec_of_its_links_and_others_stay_exact() -> None:
    job = with_codecs(script(), (2, 0, "int8"))
    assert plan_codecs(job, TRIANGLE, PATHS) == ("fp32", "int8")
    assert plan_codecs(script(), TRIANGLE, PATHS) == ("fp32", "fp32")
    job = with_codecs(script(), (0, 2, "int8"), (0, 1, "int4"))
    assert plan_codecs(job, TRIANGLE, PATHS) == ("int4", "int4")


def test_a_gather_takes_the_smallest_of_all_links() -> None:
    gather = ReductionPlan(3, (), "")
    assert plan_codecs(with_codecs(script(), (0, 1, "bf16")), TRIANGLE, gather) == ("bf16",)
    larger = dataclasses.replace(
        script(), exchange=Exchange(codec="int8", codecs=(LinkCodec(between=("s0", "s1"), codec="fp32"),))
    )  # fmt: skip
    assert plan_codecs(larger, TRIANGLE, gather) == ("int8",), "another link has still the job's"
    everywhere = with_codecs(larger, (0, 1, "fp32"), (1, 2, "split"), (0, 2, "fp32"))
    assert plan_codecs(everywhere, TRIANGLE, gather) == ("split",), "no link has the job's"
    assert plan_codecs(larger, world(1, ()), ReductionPlan(1, (), "")) == ("int8",)


def test_the_smallest_has_the_fewest_bytes_and_of_equal_ones_the_first() -> None:
    assert smallest(["fp8", "int8"]) == smallest(["int8", "fp8"]) == "int8"
    assert sorted(CODECS, key=usual_ratio)[-2:] == ["split", "fp32"]
    assert smallest(CODECS) == "topk2"


def test_each_tree_s_own_bytes_are_counted() -> None:
    job = with_codecs(script(), (0, 2, "int8"))
    relay = dataclasses.replace(TRIANGLE, emulate=True, emulator="relay")
    load = Wire(job, relay, PATHS).load(64 << 20)
    chunk_bytes = chunk_bytes_of(job, relay, PATHS)
    assert load.chunk_bytes == (chunk_bytes + FRAME_HEADER_BYTES, chunk_bytes * RATIOS["int8"] + FRAME_HEADER_BYTES)  # fmt: skip
    # Three of four chunks cross 1-2, as fp32; those of the other tree cross 0-2; both cross 0-1.
    count = load.num_chunks
    found = carried(PATHS, [count * each for each in load.chunk_bytes])
    assert found[2, 1] == pytest.approx(count * load.chunk_bytes[0] * 0.75)
    assert found[0, 2] == pytest.approx(count * load.chunk_bytes[1] * 0.25)
    assert found[1, 0] == pytest.approx(found[2, 1] + found[0, 2])
    busy_s = seconds_per_byte(PATHS, relay, tree_ratios(job, relay, PATHS))
    assert busy_s[0, 2] == pytest.approx(RATIOS["int8"] / 4 / 1e6)
    # The simulator puts the same on each link.
    named = dataclasses.replace(job, entrypoint=None, reduction=given(PATHS))
    work = step_work(named, relay, Settings())
    raw_bytes = sum(each.raw_bytes for each in work.buckets)
    for link in link_loads(work):
        hop = int(link.source[1]), int(link.target[1])
        share = carried(PATHS)[hop]
        assert link.raw_bytes == pytest.approx(raw_bytes * share, rel=0.05)
        assert link.sent_bytes == pytest.approx(raw_bytes * busy_s[hop] * rate(relay, hop), rel=0.06)  # fmt: skip


def given(plan: ReductionPlan) -> Reduction:
    """Return a plan as a job names it."""
    return named(plan, [f"s{site}" for site in range(plan.num_sites)])


def rate(topology: Topology, hop: tuple[int, int]) -> float:
    link = topology.link(f"s{hop[0]}", f"s{hop[1]}")
    assert link is not None
    return link.bytes_per_s


def test_a_way_over_links_of_two_trees_takes_the_time_of_both_their_bytes() -> None:
    even = world(3, both_ways((0, 1, 100.0, 0.2), (1, 2, 100.0, 0.2), (0, 2, 100.0, 0.2)))
    plan = ReductionPlan(3, (Tree(1, {0: 1, 2: 1}, 1), star(3, 0)), "")
    # 8 chunks, 4 of 10 bytes and 4 of 2: 0-1 carries all, 1-2 the large ones, 0-2 the small ones.
    found = plan_times_s(plan, even, Load(8, 1, (10.0, 2.0), None))
    # Over 1-0 all of both trees go, 0.48 s, and half a round trip: what it is chunk by chunk, too.
    assert found[1, 0] == pytest.approx(4 * (0.1 + 0.02) + 0.1)
    assert found[2, 2] == pytest.approx(2 * (0.1 + 0.1) + 3 * 0.1)


def test_gateways_work_by_each_tree_s_codec() -> None:
    job = with_codecs(script(), (0, 2, "int8"))
    fp32, int8 = COSTS["fp32"], COSTS["int8"]
    # Site 2 is a leaf of both: it encodes its part, decodes the result, and sends once.
    expected_s = 0.75 * (1 / fp32.encode_bytes_per_s + 1 / fp32.decode_bytes_per_s)
    expected_s += 0.25 * (1 / int8.encode_bytes_per_s + 1 / int8.decode_bytes_per_s)
    expected_s += (0.75 + 0.25 * RATIOS["int8"]) / GATEWAY_BYTES_PER_S
    assert gateways_s_per_byte(job, TRIANGLE, PATHS, 1.0)[2] == pytest.approx(expected_s)


def test_chunks_are_what_the_busiest_links_ask_for() -> None:
    wide, narrow = (25e6, 0.02), (2.5e6, 0.02)
    topology = world(3, both_ways((0, 1, *wide), (0, 2, *wide), (1, 2, *narrow)))
    job, unused = script_with(1 << 20), ReductionPlan(3, (star(3, 0),), "")
    assert chunk_bytes_for(1 << 20, "fp32", *wide) == 256 << 10
    assert chunk_bytes_for(1 << 20, "fp32", *narrow) == 64 << 10
    assert chunk_bytes_of(job, topology, unused) == 256 << 10
    assert chunk_bytes_of(script_with(90_000), topology, unused) == 90_000, "the job's own"
    narrowest = ReductionPlan(3, (star(3, 1),), "")
    assert chunk_bytes_of(job, topology, narrowest) == 64 << 10
    # All links are busy for as long: (18 + 18 + 16) / 3 is nearest to 2 to the 17.
    shared = ReductionPlan(3, (star(3, 0, 18), star(3, 1, 1), star(3, 2, 1)), "")
    assert chunk_bytes_of(job, topology, shared) == 128 << 10
    # With int8 the narrow link holds four times as much.
    small = with_codecs(job, (1, 2, "int8"))
    assert chunk_bytes_for(1 << 20, "int8", *narrow) == 128 << 10
    assert chunk_bytes_of(small, topology, narrowest) == 128 << 10
    assert chunk_bytes_of(job, world(1, []), ReductionPlan(1, (), "")) == 1 << 20


def script_with(chunk_bytes: int) -> Job:
    return dataclasses.replace(script(), exchange=Exchange(codec="fp32", chunk_bytes=chunk_bytes))


def test_a_narrow_site_with_a_smaller_codec_takes_more_of_the_chunks_and_less_time() -> None:
    topology = one_at_a_tenth(4)
    plain, mixed = script(), with_codecs(script(), *((site, 3, "int8") for site in range(3)))
    plan = plan_reduction(mixed, topology)
    codecs = plan_codecs(mixed, topology, plan)
    pairs = pairs_of(topology, mixed.exchange)
    best = optimum_bytes_per_s(pairs, all_spanning_trees(pairs)) * 256
    busiest_s = max(seconds_per_byte(plan, topology, tree_ratios(mixed, topology, plan)).values())
    # All trees cross a link of the narrow site, so all are int8: the time is a quarter.
    assert set(codecs) == {"int8"}
    assert busiest_s <= 1.03 / best * 256
    before_s = exchange_time_s(plain, topology, 256 << 20)
    assert exchange_time_s(mixed, topology, 256 << 20) < 0.3 * before_s


def test_one_slow_pair_is_used_more_with_a_smaller_codec() -> None:
    """Where a link is narrow, its share of the chunks grows as much as its codec shrinks them."""
    links = [(one, other, GIGABIT, 0.02) for one, other in itertools.combinations(range(3), 2)]
    links[-1] = (1, 2, GIGABIT / 5, 0.02)
    topology = world(3, both_ways(*links))
    shares, times_s = {}, {}
    for codec in ("fp32", "int8"):
        job = with_codecs(script(), (1, 2, codec))
        plan = plan_reduction(job, topology)
        codecs = plan_codecs(job, topology, plan)
        assert "fp32" in codecs
        assert len(set(codecs)) == (1 if codec == "fp32" else 2)
        for tree, each in zip(plan.trees, codecs, strict=True):
            assert (each == codec) == ({1, 2} in map(set, tree.parent.items()) or codec == "fp32")
        shares[codec] = carried(plan).get((1, 2), 0)
        times_s[codec] = exchange_time_s(job, topology, 256 << 20)
    assert shares["int8"] > 2 * shares["fp32"]
    assert times_s["int8"] < 0.75 * times_s["fp32"]


@pytest.mark.parametrize("seed", range(60))
def test_the_widest_tree_counts_its_own_bytes(seed: int) -> None:
    chance = random.Random(seed)
    topology = random_world(chance, chance.randint(2, 5))
    job = with_codecs(
        script(),
        *(
            (one, other, chance.choice(("fp32", "int8", "int4")))
            for one, other in pairs_of(topology).bytes_per_s
        ),
    )
    pairs = pairs_of(topology, job.exchange)
    found = widest_tree(pairs)
    assert found is not None
    best = max(pairs.speed(tree) for tree in all_spanning_trees(pairs))
    assert pairs.speed(found.parent.items()) == best, f"{seed=}"


@pytest.mark.parametrize("seed", range(12))
def test_automatic_plans_are_near_the_best_with_codecs_of_links(seed: int) -> None:
    chance = random.Random(seed)
    topology = random_world(chance, chance.randint(3, 5))
    job = with_codecs(
        script(),
        *(
            (one, other, chance.choice(("fp32", "bf16", "int8", "int4")))
            for one, other in pairs_of(topology).bytes_per_s
        ),
    )
    plan = plan_reduction(job, topology)
    pairs = pairs_of(topology, job.exchange)
    # Loads are ratios in a unit of all of them; where all links have one codec, they have none.
    some = next(iter(pairs.bytes_per_s))
    codec = codec_between(job.exchange, *(f"s{site}" for site in some))
    unit = pairs.load([some]) / usual_ratio(codec)
    best = optimum_bytes_per_s(pairs, all_spanning_trees(pairs)) * unit
    ratios = tree_ratios(job, topology, plan)
    busiest_s = max(seconds_per_byte(plan, topology, ratios).values())
    assert busiest_s <= 1.05 / best, f"{seed=} {plan.why}"


def test_a_prediction_counts_them_too() -> None:
    job = dataclasses.replace(Job(name="j", topology="t.yaml"), reduction=given(PATHS))
    job = dataclasses.replace(job, exchange=Exchange(codec="fp32"))
    mixed = with_codecs(job, (0, 2, "int8"))
    fp32, smaller = (
        StepModel(each, TRIANGLE, plan_reduction(each, TRIANGLE)) for each in (job, mixed)
    )
    assert smaller.link_s[0, 2] == pytest.approx(RATIOS["int8"] * fp32.link_s[0, 2], rel=0.01)
    assert smaller.link_s[1, 2] == fp32.link_s[1, 2]


def loaded(codecs: str) -> RunDocuments:
    return load(f"exchange: {{codec: fp32, codecs: {codecs}}}\n")


def test_codecs_of_links_are_read_and_hashed() -> None:
    run = loaded("[{between: [b, a], codec: int8}, {between: [c, d], codec: bf16}]")
    assert run.job.exchange.codecs == (
        LinkCodec(between=("b", "a"), codec="int8"),
        LinkCodec(between=("c", "d"), codec="bf16"),
    )
    assert config_hash(run.job, run.topology) != config_hash(load("").job, run.topology)


def test_a_site_that_is_left_out_may_have_a_codec() -> None:
    text = "placement: [{site: a, sequences: 5}, {site: b, sequences: 8}]\n"
    run = load(f"{text}exchange: {{codec: fp32, codecs: [{{between: [c, d], codec: int8}}]}}\n")
    assert plan_codecs(run.job, run.topology, plan_reduction(run.job, run.topology)) == ("fp32",)


@pytest.mark.parametrize(
    ("codecs", "told"),
    [
        (
            "[{between: [a, bb], codec: int8}]",
            "job.yaml:5:48: error: unknown site 'bb'",
        ),
        ("[{between: [a, c], codec: int8}]", "5:44: error: there is no link between 'a' and 'c'"),
        ("[{between: [a, a], codec: int8}]", "want two different sites, got 'a' twice"),
        (
            "[{between: [a, b], codec: int8}, {between: [b, a], codec: bf16}]",
            "5:76: error: the link between 'b' and 'a' is there twice (first as exchange.codecs.0)",
        ),
        ("[{between: [a, b], codec: int3}]", "got 'int3' (did you mean 'int8'?)"),
        ("[{between: [a], codec: int8}]", "want at least 2 of them, got 1"),
        ("[{between: [a, b]}]", "missing key 'codec'"),
        ("[{betwen: [a, b], codec: int8}]", "unknown key 'betwen' (did you mean 'between'?)"),
    ],
)
def test_mistakes_are_told_at_their_place(codecs: str, told: str) -> None:
    said = mistakes(f"exchange: {{codec: fp32, codecs: {codecs}}}\n")
    assert any(told in line for line in said), said
    assert all(line.startswith("job.yaml:") for line in said)
