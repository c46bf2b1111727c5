"""Predicted time of one exchange, against sums made by hand."""

import dataclasses

import pytest

from isthmus.protos.frame import HEADER_BYTES
from isthmus.topology.model.step_model import exchange_time_s
from isthmus.topology.spec.job import Exchange, Job, Reduction
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.tcp_constants import PAYLOAD_SHARE
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import COSTS
from isthmus.topology.trees.tree_choice import plan_reduction
from isthmus.topology.trees.tree_times import carried, plan_times_s, seconds_per_byte
from isthmus.topology.trees.wire_load import (
    FRAME_HEADER_BYTES,
    Load,
    Wire,
    pipeline_bytes_of,
)
from tests.fakes.tree_worlds import LINE, TRIANGLE, both_ways, world

CHUNK = 1000


def job(tree: str = "auto", *, codec: str = "fp32", channels: int = 1) -> Job:
    return Job(
        name="j",
        topology="t.yaml",
        exchange=Exchange(codec=codec, chunk_bytes=CHUNK, channels_per_link=channels),
        reduction=Reduction(tree=tree),
    )


def relayed(topology: Topology) -> Topology:
    """Without packets, so that sums are short."""
    return dataclasses.replace(topology, emulate=True, emulator="relay")


PAIR = relayed(world(2, [(0, 1, 500.0, 0.2), (1, 0, 2000.0, 0.1)]))


def test_a_frame_is_what_the_contract_says() -> None:
    assert FRAME_HEADER_BYTES == HEADER_BYTES + 5


def test_gather_takes_what_its_slowest_link_takes() -> None:
    # 10 chunks of 1069 bytes at 500 bytes/s, then half of 0.2 s.
    assert exchange_time_s(job(), PAIR, 10_000) == pytest.approx(10 * 1069 / 500 + 0.1)
    far = relayed(world(2, [(0, 1, 500.0, 0.2), (1, 0, 2000.0, 90.0)]))
    assert exchange_time_s(job(), far, 10_000) == pytest.approx(10 * 1069 / 2000 + 45.0)


def test_codecs_shrink_payloads_but_not_headers() -> None:
    expected_s = 10 * 569 / 500 + 0.1
    assert exchange_time_s(job(codec="bf16"), PAIR, 10_000) == pytest.approx(expected_s)
    measured = exchange_time_s(job(codec="split"), PAIR, 10_000, 0.8)
    assert measured == pytest.approx(10 * 869 / 500 + 0.1)
    with pytest.raises(ValueError, match="codec split compresses"):
        exchange_time_s(job(codec="split"), PAIR, 10_000)


@pytest.mark.parametrize(
    "changes", [{"emulator": "netns"}, {"emulator": "auto"}, {"emulate": False}]
)
def test_packets_have_headers_except_in_the_relay(changes: dict[str, object]) -> None:
    packets = dataclasses.replace(PAIR, **changes)  # type: ignore[arg-type] # fields by name
    expected_s = 10 * 1069 / PAYLOAD_SHARE / 500 + 0.1
    assert exchange_time_s(job(), packets, 10_000) == pytest.approx(expected_s)


def test_slow_start_leaves_a_link_unused() -> None:
    # 25 MB/s and 20 ms hold 500 kB. Two connections start with 30 kB and double: 30, 60, 120, 240
    # and 480 kB are sent in 5 round trips, in which the link could have carried 2500 kB.
    fast = world(2, both_ways((0, 1, 25e6, 0.02)))
    two = dataclasses.replace(job(), exchange=Exchange(codec="fp32", channels_per_link=2))
    # What takes 40 ms at most, and a power of two.
    chunk_bytes = ((512 << 10) + FRAME_HEADER_BYTES) / PAYLOAD_SHARE
    expected_s = 24 * chunk_bytes / 25e6 + (5 * 0.02 - 930e3 / 25e6) + 0.01
    assert exchange_time_s(two, fast, 12 << 20) == pytest.approx(expected_s)
    # One chunk is on one connection: 15 kB, 30 kB, and after two round trips the rest of 104 kB.
    small_bytes = (100_000 + FRAME_HEADER_BYTES) / PAYLOAD_SHARE
    expected_s = small_bytes / 25e6 + (2 * 0.02 - 45e3 / 25e6) + 0.01
    assert exchange_time_s(two, fast, 100_000) == pytest.approx(expected_s)
    assert exchange_time_s(two, relayed(fast), 100_000) == pytest.approx(100_069 / 25e6 + 0.01)


def test_nothing_crosses_within_one_site() -> None:
    assert exchange_time_s(job(), world(1, []), 10_000) == 0.0
    assert exchange_time_s(job(), PAIR, 0) == 0.0


def test_a_star_is_a_pipeline_of_its_slowest_spoke() -> None:
    # The star at site 1: spokes of 20 and 50 bytes/s, 60 and 10 ms. The slowest way goes from site
    # 0 up and back down again, and the slower spoke holds up the 3 chunks that follow the first.
    expected_s = 2 * (1069 / 20 + 0.03) + 3 * 1069 / 20
    assert exchange_time_s(job("star"), relayed(TRIANGLE), 4000) == pytest.approx(expected_s)
    # One chunk, rounded up to by half of one: 2 chunks of 750 bytes.
    expected_s = 2 * (819 / 20 + 0.03) + 819 / 20
    assert exchange_time_s(job("star"), relayed(TRIANGLE), 1500) == pytest.approx(expected_s)


def test_channels_make_a_pipeline_s_steps_longer() -> None:
    # Two chunks at a time: the first two take both hops, two more follow.
    expected_s = 2 * (2 * 1069 / 20 + 0.03) + 2 * 1069 / 20
    assert exchange_time_s(job("star", channels=2), relayed(TRIANGLE), 4000) == pytest.approx(
        expected_s
    )
    # More channels than chunks: all together up, all together down.
    expected_s = 2 * (4 * 1069 / 20 + 0.03)
    assert exchange_time_s(job("star", channels=9), relayed(TRIANGLE), 4000) == pytest.approx(
        expected_s
    )
    assert exchange_time_s(job(channels=9), PAIR, 10_000) == exchange_time_s(job(), PAIR, 10_000)


def test_a_tree_s_depth_counts_once() -> None:
    line = relayed(LINE)
    (tree,) = plan_reduction(job(), line).trees
    assert tree.root == 1
    # From site 3 two hops up to site 1, two hops down again; 5 chunks.
    expected_s = 4 * (1069 / 20 + 0.005) + 4 * 1069 / 20
    assert exchange_time_s(job(), line, 5000) == pytest.approx(expected_s)


def test_trees_that_share_links_wait_for_each_other() -> None:
    pair = world(2, both_ways((0, 1, 100.0, 0.2)))
    # Two stars over one pair of links: each link carries all 6 chunks, of one tree up, of one down.
    plan = ReductionPlan(2, (star(2, 0), star(2, 1)), "")
    # Chunk by chunk, early ones first: of each link 0 to 0.2 s two up, to 0.4 s two of those that
    # come down, to 0.5 s the last one up; it is back 0.1 + 0.1 + 0.1 s later.
    chunk_by_chunk_s = 0.8
    # By shares: the leg that comes down counts as begun after half a round trip, 0.1 s, though its
    # first chunk takes 0.1 s more. Of 0.6 s that is a sixth, and of its three chunks half a one:
    # 0.05 s.
    found = max(plan_times_s(plan, pair, Load(6, 1, (10.0, 10.0), None)).values())
    assert found == pytest.approx(chunk_by_chunk_s + 0.05)


def test_a_link_s_chunks_are_those_of_all_its_trees_by_their_weights() -> None:
    even = world(3, both_ways((0, 1, 100.0, 0.2), (1, 2, 100.0, 0.2), (0, 2, 100.0, 0.2)))
    # Of 8 chunks, 6 take the star at site 0 and 2 the path 0 - 1 - 2: links 0-1 carry all, 0-2 six.
    plan = ReductionPlan(3, (star(3, 0, 3), Tree(1, {0: 1, 2: 1}, 1)), "")
    assert [carried(plan)[hop] for hop in ((0, 1), (0, 2), (1, 2))] == [1, 0.75, 0.25]
    found = plan_times_s(plan, even, Load(8, 1, (10.0, 10.0), None))
    # Chunk by chunk, early ones first: over 1-0 six up and two that come down, the last chunk of
    # all up: 0.9 s.
    assert found[1, 0] == pytest.approx(8 * 0.1 + 0.1)
    # The last one up is at the others 0.1 + 0.1 s later: 1.1 s. By shares 0.025 s less: of each of
    # the two that come down over 1-0 an eighth goes behind it, for they begin that share of 0.8 s
    # later.
    assert found[1, 1] == found[1, 2] == pytest.approx(1.1 - 0.025)
    # What begins at the others is at site 1 when the star's last one has come down over 0-1, which
    # carries all.
    assert found[0, 1] == found[2, 1] == pytest.approx(8 * 0.1 + 0.1)
    # From site 2 and back the star goes over 0-2, and the path over 1-2, which has less to carry.
    assert found[2, 2] == pytest.approx(2 * (0.1 + 0.1) + 5 * 0.1)
    # A tree whose turn does not come is not waited for.
    assert plan_times_s(plan, even, Load(2, 1, (10.0, 10.0), None)) == plan_times_s(
        ReductionPlan(3, (star(3, 0),), ""), even, Load(2, 1, (10.0,), None)
    )


def test_more_channels_than_a_link_has_chunks_are_not_waited_for() -> None:
    pair = world(3, both_ways((0, 1, 100.0, 0.2), (1, 2, 100.0, 0.2), (0, 2, 100.0, 0.2)))
    plan = ReductionPlan(3, tuple(star(3, hub) for hub in range(3)), "")
    # Of 3 chunks each link carries one up and, later, one down, whatever 8 channels could.
    found = max(plan_times_s(plan, pair, Load(3, 8, (10.0,) * 3, None)).values())
    assert found == pytest.approx(2 * (0.1 + 0.1))


def test_slow_start_ends_with_the_chunks_of_its_link() -> None:
    fast = world(3, both_ways((0, 1, 1e6, 0.1), (1, 2, 1e6, 0.1), (0, 2, 1e6, 0.1)))
    plan = ReductionPlan(3, tuple(star(3, hub) for hub in range(3)), "")
    # Windows of 10, 20, 40 kB while the link holds 100 kB. The first chunk up waits for one, and is
    # there at 0.155 s, the second at 0.17 s; then the first one down waits for the second window of
    # its link, and the second one follows it.
    load = Load(6, 1, (15_000.0,) * 3, 10_000.0)
    expected_s = 0.155 + (0.1 - 0.02) + 0.015 + 0.015 + 0.05
    found_s = max(plan_times_s(plan, fast, load).values())
    # By shares the last chunk up waits for the share of a chunk that comes down: at most all of it,
    # and for as much of the window.
    assert expected_s <= found_s <= expected_s + 0.03


def test_seconds_per_byte_say_which_link_is_busiest() -> None:
    assert seconds_per_byte(ReductionPlan(2, (), ""), PAIR) == {(0, 1): 1 / 500, (1, 0): 1 / 2000}
    plan = ReductionPlan(3, (star(3, 1, 3), star(3, 2, 1)), "")
    busy = seconds_per_byte(plan, TRIANGLE)
    assert busy[0, 1] == busy[1, 0] == 0.75 / 20
    assert busy[1, 2] == 1 / 50
    assert busy[2, 0] == 0.25 / 10


@pytest.mark.parametrize("tree", ["auto", "ring", "hierarchy"])
def test_large_exchanges_take_what_the_busiest_link_takes(tree: str) -> None:
    # Three rates and delays; 100 MB in chunks of 1000 bytes, so that only bandwidth counts.
    topology = relayed(world(3, both_ways((0, 1, 2e6, 0.06), (1, 2, 5e6, 0.01), (0, 2, 1e6, 0.07))))
    plan = plan_reduction(job(tree), topology)
    bound_s = 100e6 * 1.069 * max(seconds_per_byte(plan, topology).values())
    assert bound_s <= exchange_time_s(job(tree), topology, 100_000_000) <= 1.01 * bound_s


def times_s(of: Job, topology: Topology, raw_bytes: int) -> dict[tuple[int, int], float]:
    plan = plan_reduction(of, topology)
    return plan_times_s(plan, topology, Wire(of, topology, plan).load(raw_bytes))


def test_who_waits_for_whom() -> None:
    gather = times_s(job(), PAIR, 10_000)
    assert gather == {
        (0, 1): pytest.approx(10 * 1069 / 500 + 0.1),
        (1, 0): pytest.approx(10 * 1069 / 2000 + 0.05),
    }
    # Of the star, everyone waits for everyone, but the root not for itself.
    found = times_s(job("star"), relayed(TRIANGLE), 2000)
    assert set(found) == {(one, other) for one in range(3) for other in range(3)} - {(1, 1)}
    slow_s, fast_s = 1069 / 20, 1069 / 50
    assert found[0, 1] == pytest.approx(2 * slow_s + 0.03)
    assert found[2, 1] == pytest.approx(2 * fast_s + 0.005)
    assert found[2, 0] == pytest.approx(fast_s + 0.005 + slow_s + 0.03 + slow_s)
    assert found[2, 2] == pytest.approx(2 * (fast_s + 0.005) + fast_s)


def test_so_much_is_without_a_result_while_links_are_busy() -> None:
    """Three round trips of the longest link, at what the narrowest site or the fastest link has."""
    plan = ReductionPlan(3, (), "")

    def pipeline_bytes(topology: Topology, codec: str = "fp32") -> int:
        return pipeline_bytes_of(job(codec=codec), topology, plan)

    equal = world(3, both_ways((0, 1, 4e6, 0.1), (1, 2, 4e6, 0.2), (0, 2, 4e6, 0.1)))
    assert pipeline_bytes(equal) == 2_400_000
    assert pipeline_bytes(equal, "bf16") == 4_800_000
    narrow = world(3, both_ways((0, 1, 9e6, 0.1), (1, 2, 1e6, 0.2), (0, 2, 2e6, 0.1)))
    assert pipeline_bytes(narrow) == 1_800_000
    fast = world(3, both_ways((0, 1, 1e9, 0.1), (1, 2, 1e9, 0.1), (0, 2, 1e9, 0.1)))
    assert pipeline_bytes(fast, "topk") == int(3 * 0.1 * COSTS["topk"].encode_bytes_per_s)
    assert pipeline_bytes_of(job(), world(1, []), ReductionPlan(1, (), "")) == 0
