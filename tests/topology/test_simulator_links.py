"""The parts of a simulation by themselves: clock, servers, links, fair shares, chance."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence

import pytest

from isthmus.topology.simulator.engine import Engine, Server
from isthmus.topology.simulator.settings import DISTRIBUTIONS, Chance, Stragglers
from isthmus.topology.simulator.wan_links import FairNetwork, FifoLink, Flow, max_min
from isthmus.topology.spec.tcp_constants import RTO_MIN_S
from isthmus.topology.spec.world import Link
from isthmus.topology.trees.slow_start import num_halvings, window_after
from isthmus.topology.trees.wire_load import Load


def test_actions_of_one_time_run_in_the_order_of_their_scheduling() -> None:
    engine, ran = Engine(), list[str]()

    def note(name: str) -> None:
        ran.append(name)
        if name == "b":
            engine.at(engine.now_s, note, "last")

    for time_s, name in ((2.0, "d"), (1.0, "a"), (1.0, "b"), (1.0, "c")):
        engine.at(time_s, note, name)
    engine.run(1.0)
    assert (ran, engine.now_s) == (["a", "b", "c", "last"], 1.0)
    engine.run()
    assert ran[-1] == "d"
    assert not engine.step()


@pytest.mark.parametrize("seed", range(30))
def test_a_train_of_servers_serves_work_as_if_piece_by_piece(seed: int) -> None:
    """Through servers of any speed, in series and joined by a maximum, ends are exact."""
    chance = random.Random(seed)
    num_pieces = chance.randrange(1, 9)
    branches = [
        [chance.choice([0.1, 0.5, 1.0, 3.0]) for _ in range(chance.randrange(1, 4))]
        for _ in range(2)
    ]
    joined = [chance.choice([0.1, 0.7, 2.0]) for _ in range(2)]
    starts_s = [chance.uniform(0, 5) for _ in branches]

    each_s = [
        _piece_by_piece([start] * num_pieces, costs)
        for start, costs in zip(starts_s, branches, strict=True)
    ]
    together_s = [max(pair) for pair in zip(*each_s, strict=True)]
    expected = _piece_by_piece(together_s, joined)

    ends = [
        _at_once(start, start, num_pieces, costs)
        for start, costs in zip(starts_s, branches, strict=True)
    ]
    found = _at_once(max(e[0] for e in ends), max(e[1] for e in ends), num_pieces, joined)
    assert found == pytest.approx((expected[0], expected[-1])), f"{seed=}"


def _piece_by_piece(arrivals_s: Sequence[float], costs_s: Sequence[float]) -> list[float]:
    times_s = list(arrivals_s)
    for cost_s in costs_s:
        free_s = 0.0
        for index, arrival_s in enumerate(times_s):
            times_s[index] = free_s = max(arrival_s, free_s) + cost_s
    return times_s


def _at_once(
    first_s: float, last_s: float, num_pieces: int, costs_s: Sequence[float]
) -> tuple[float, float]:
    for cost_s in costs_s:
        first_s, last_s = Server().serve(first_s, last_s, num_pieces * cost_s, cost_s)
    return first_s, last_s


def _flow(key: int, num_bytes: float, into: list[tuple[int, float, float]], engine: Engine) -> Flow:
    def arrive(target: int, bucket: int, segment: int, last_s: float) -> None:
        assert (target, bucket, segment) == (1, key, 0)
        into.append((key, engine.now_s, last_s))

    return Flow((0, key, 0), num_bytes, num_bytes / 4, engine.now_s, arrive)


def test_a_link_takes_what_waits_in_the_order_of_its_keys() -> None:
    engine, arrived = Engine(), list[tuple[int, float, float]]()
    link = FifoLink(engine, 1, bytes_per_s=100.0, rtt_s=0.2)
    for key in (5, 3, 1):
        link.send(_flow(key, 200.0, arrived, engine))
    engine.run()
    # 5 was there first, and is not interrupted. A quarter arrives half a second after it began.
    assert [key for key, _, _ in arrived] == [5, 1, 3]
    assert [last for _, _, last in arrived] == pytest.approx([2.1, 4.1, 6.1])
    assert [first for _, first, _ in arrived] == pytest.approx([0.6, 2.6, 4.6])


@pytest.mark.parametrize("rtt_s", [0.0, 0.02, 0.3])
def test_slow_start_costs_what_the_closed_form_says_and_comes_back_after_a_pause(
    rtt_s: float,
) -> None:
    load = Load(num_chunks=40, num_in_flight=2, chunk_bytes=(1e5,), first_window_bytes=3e4)
    described = Link(ends=("a", "b"), bytes_per_s=1e7, rtt_s=rtt_s, rtt_origin="rtt")
    one_s = load.sending_s(described, 40 * 1e5) + rtt_s / 2
    engine, arrived = Engine(), list[tuple[int, float, float]]()
    link = FifoLink(engine, 1, 1e7, rtt_s, 3e4)
    for key in range(20):
        link.send(_flow(key, 2e5, arrived, engine))
    engine.run()
    assert arrived[-1][2] == pytest.approx(one_s)

    warm_s = arrived[-1][2]  # before the time-out: the window is as it was
    engine.run(warm_s)
    engine.at(warm_s, lambda: link.send(_flow(20, 2e5, arrived, engine)))
    engine.run()
    assert arrived[-1][2] - warm_s == pytest.approx(0.02 + rtt_s / 2)

    pause_s = engine.now_s + 12 * (
        rtt_s + RTO_MIN_S
    )  # so often halved, it is the first window again
    for key in range(21, 41):
        engine.at(pause_s, lambda key=key: link.send(_flow(key, 2e5, arrived, engine)))
    engine.run()
    assert arrived[-1][2] - pause_s == pytest.approx(one_s)


def test_a_pause_halves_the_window_once_for_each_time_out_that_is_over() -> None:
    # 10 MB/s and 100 ms hold 1 MB, and time out after 300 ms. Pauses of 200, 500 and 700 ms.
    for pause_s, halvings in ((0.2, 0), (0.5, 1), (0.7, 2)):
        assert num_halvings(pause_s, 0.1) == halvings
        engine, arrived = Engine(), list[tuple[int, float, float]]()
        link = FifoLink(engine, 1, 1e7, 0.1, 3e4)
        link.send(_flow(0, 1e7, arrived, engine))
        engine.run()
        again_s = arrived[-1][2] - 0.05 + pause_s
        engine.at(
            again_s,
            lambda link=link, arrived=arrived, engine=engine: link.send(
                _flow(1, 4e6, arrived, engine)
            ),
        )
        engine.run()
        # 250 kB and 500 kB take a round trip each where the link needs 25 and 50 ms.
        waited_s = (0.0, 0.05, 0.05 + 0.075)[halvings]
        assert arrived[-1][2] - again_s == pytest.approx(0.4 + waited_s + 0.05), f"{pause_s=}"


def test_a_window_is_what_its_burst_has_opened() -> None:
    # 30, 60, 120, 240 kB; 480 kB fill a link of 4 MB/s and 100 ms, which hold 400 kB.
    link = (4e6, 0.1, 3e4)
    assert window_after(0, *link) == 3e4
    assert window_after(89e3, *link) == 6e4
    assert window_after(90e3, *link) == 12e4
    assert window_after(1e9, *link) == 4e5
    assert window_after(1e9, 1e5, 0.1, 3e4) == 3e4


def test_max_min_shares_by_hand() -> None:
    # Two flows over x: 5 each. One over x and y is held to 5 by x, so the other of y has 15 of 20.
    ports: dict[Hashable, float] = {"x": 10.0, "y": 20.0}
    rates = max_min([("x",), ("x", "y"), ("y",)], ports)
    assert rates == pytest.approx([5.0, 5.0, 15.0])
    assert max_min([], {}) == []


@pytest.mark.parametrize("seed", range(30))
def test_max_min_fills_a_resource_of_every_flow_in_which_none_has_more(seed: int) -> None:
    chance = random.Random(seed)
    rates: dict[Hashable, float] = {name: chance.uniform(1, 100) for name in "abcdef"}
    paths = [
        chance.sample("abcdef", chance.randrange(1, 4)) for _ in range(chance.randrange(1, 12))
    ]
    shares = max_min(paths, rates)
    used = {
        name: math.fsum(s for s, path in zip(shares, paths, strict=True) if name in path)
        for name in rates
    }
    for name in rates:
        assert used[name] <= rates[name] * (1 + 1e-9), f"{seed=}"
    for share, path in zip(shares, paths, strict=True):
        bottlenecks = [
            name
            for name in path
            if used[name] >= rates[name] * (1 - 1e-9)
            and share
            >= max(s for s, other in zip(shares, paths, strict=True) if name in other) * (1 - 1e-9)
        ]
        assert bottlenecks, f"{seed=}"


def test_flows_share_a_port_and_those_that_stay_take_what_is_left() -> None:
    engine, arrived = Engine(), list[tuple[int, float, float]]()
    network = FairNetwork(engine, {"x": 100.0, "y": 100.0, "port": 100.0}, num_in_flight=2)
    network.send(_flow(0, 100.0, arrived, engine), 1, "x", ["port"], 0.5)
    network.send(_flow(1, 200.0, arrived, engine), 1, "y", ["port"], 0.5)
    engine.run()
    # Both at 50 until 2 s; then 100 are left of the second, at 100.
    assert [key for key, _, _ in arrived] == [0, 1]
    assert [last for _, _, last in arrived] == pytest.approx([2.5, 3.5])


def test_of_a_link_only_a_few_flows_are_on_their_way() -> None:
    engine, arrived = Engine(), list[tuple[int, float, float]]()
    network = FairNetwork(engine, {"x": 100.0}, num_in_flight=2)
    for key in (3, 1, 2):
        network.send(_flow(key, 100.0, arrived, engine), 1, "x", [], 0.0)
    engine.run()
    assert [(key, round(last, 6)) for key, _, last in arrived] == [(3, 2.0), (1, 2.0), (2, 3.0)]


def test_a_seed_means_the_same_numbers_for_ever() -> None:
    chance = Chance(7)
    # Of SplitMix64's reference, 0x63cbe1e459320dd7 is the first of seed 7: its upper 53 bits.
    assert chance.uniform() == pytest.approx(0x63CBE1E459320DD7 / 2**64, abs=2**-53)
    drawn = [Chance(seed).uniform() for seed in range(50)]
    assert len(set(drawn)) == 50
    assert all(0 < each < 1 for each in drawn)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_largest_of_many_ranks_is_that_of_as_many_draws(distribution: str) -> None:
    slow = Stragglers(distribution, 0.1)
    one, many = Chance(3), Chance(4)
    mean_of_max = math.fsum(max(slow.factor(one, 1) for _ in range(16)) for _ in range(2000)) / 2000
    drawn = [slow.factor(many, 16) for _ in range(2000)]
    # The mean of 2,000 has a deviation of less than 0.3 % here: 2 % never fails by chance.
    assert math.fsum(drawn) / 2000 == pytest.approx(mean_of_max, rel=0.02)
    assert Stragglers(distribution, 0.0).factor(many, 16) == 1.0
    rising = [
        math.fsum(Stragglers(distribution, 0.1).factor(Chance(s), n) for s in range(300))
        for n in (1, 10, 10_000, 10**9)
    ]
    assert all(a < b for a, b in itertools.pairwise(rising))
