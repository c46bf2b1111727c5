"""What a fault script comes to: times from a seed, and the state of each link under its faults."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.documents.load import load_topology
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import (
    Change,
    Fault,
    FaultScript,
    Figures,
    Pair,
    Span,
    TimedChange,
    expand,
    figures_of,
)
from tests.topology.fault_documents import SCRIPT, TOPOLOGY
from tests.topology.test_changes import FIGURES

CHAIN = load_topology(TOPOLOGY, "topology.yaml")
LINKS = figures_of(CHAIN)
State = tuple[bool, dict[str, float]]
"""Whether a link is cut, and its figures."""


def script(*lines: str, seed: int = 0) -> FaultScript:
    text = "".join(f"  - {{{line}}}\n" for line in lines)
    return load_faults(f"version: 1\nseed: {seed}\nfaults:\n{text}", "faults.yaml", CHAIN)


def told(*lines: str) -> list[str]:
    return [f"{each.at_s:g} {each.change}" for each in expand(script(*lines))]


def states(times: tuple[TimedChange, ...]) -> dict[float, dict[Pair, State]]:
    """Return what every link is like after each instant, by what an emulator does with a change."""
    now: dict[Pair, State] = {pair: (False, dict(figures)) for pair, figures in LINKS.items()}
    found = {0.0: dict(now)}
    for timed in times:
        change = timed.change
        if isinstance(change, Change):
            pair = (change.source, change.target)
            is_cut, figures = now[pair]
            match change.kind:
                case "cut":
                    now[pair] = (True, figures)
                case "heal":
                    now[pair] = (False, dict(LINKS[pair]))
                case "shape":
                    now[pair] = (is_cut, {**figures, **change.figures()})
        found[timed.at_s] = dict(now)
    return found


def test_what_one_fault_does_is_undone_when_it_ends() -> None:
    assert told("at: 5s, link: [east, middle], rate: 10Mbit/s, rtt: 80ms, for: 3s") == [
        "5 east -> middle: 10Mbit/s, 40ms one way, jitter 0s, loss 0%",
        "5 middle -> east: 10Mbit/s, 40ms one way, jitter 0s, loss 0%",
        "8 east -> middle: healed",
        "8 middle -> east: healed",
    ]


def test_one_way_is_the_first_site_to_the_second() -> None:
    assert told("at: 5s, cut: [west, middle], oneway: true, for: 3s") == [
        "5 west -> middle: cut",
        "8 west -> middle: healed",
    ]


def test_a_partition_cuts_what_crosses_its_groups_and_nothing_else() -> None:
    assert told("at: 0s, partition: [[east, west], [middle]]") == [
        "0 east -> middle: cut",
        "0 middle -> east: cut",
        "0 middle -> west: cut",
        "0 west -> middle: cut",
    ]
    assert len(told("at: 0s, partition: [[east], [middle, west]]")) == 2
    assert len(told("at: 0s, partition: [[middle], [west]]")) == 2


def test_overlapping_faults_leave_what_the_others_do() -> None:
    """Two shapes and a cut.

    The last to begin wins each figure, and each `for` ends only its own.
    """
    assert told(
        "at: 1s, link: [middle, west], rate: 10Mbit/s, loss: 5%, oneway: true, for: 10s",
        "at: 2s, link: [middle, west], rate: 20Mbit/s, oneway: true, for: 4s",
        "at: 3s, cut: [middle, west], oneway: true, for: 5s",
    ) == [
        "1 middle -> west: 10Mbit/s, 20ms one way, jitter 1ms, loss 5%",
        "2 middle -> west: 20Mbit/s, 20ms one way, jitter 1ms, loss 5%",
        "3 middle -> west: cut",
        "6 middle -> west: 10Mbit/s, 20ms one way, jitter 1ms, loss 5%",
        "8 middle -> west: healed",
        "8 middle -> west: 10Mbit/s, 20ms one way, jitter 1ms, loss 5%",
        "11 middle -> west: healed",
    ]


def test_two_cuts_that_overlap_are_one() -> None:
    assert told(
        "at: 1s, cut: [east, middle], oneway: true, for: 4s",
        "at: 2s, cut: [east, middle], oneway: true, for: 5s",
    ) == ["1 east -> middle: cut", "7 east -> middle: healed"]


def test_an_end_comes_before_a_beginning_at_the_same_instant() -> None:
    """0.1 s + 0.2 s and 0.3 s are one instant, whatever floating point makes of them."""
    assert told(
        "at: 300ms, cut: [east, middle], oneway: true, for: 1s",
        "at: 100ms, link: [east, middle], rate: 1Mbit/s, oneway: true, for: 200ms",
    ) == [
        "0.1 east -> middle: 1Mbit/s, 10ms one way, jitter 0s, loss 0%",
        "0.3 east -> middle: 1Gbit/s, 10ms one way, jitter 0s, loss 0%",
        "0.3 east -> middle: cut",
        "1.3 east -> middle: healed",
    ]


def test_healing_ends_what_has_begun_and_not_what_comes() -> None:
    assert told(
        "at: 1s, cut: [east, middle], oneway: true, for: 10s",
        "at: 2s, link: [middle, west], rate: 1Mbit/s, oneway: true",
        "at: 3s, heal: [east, middle]",
        "at: 4s, cut: [east, middle], oneway: true",
        "at: 5s, heal: all",
        "at: 6s, heal: all",
    ) == [
        "1 east -> middle: cut",
        "2 middle -> west: 1Mbit/s, 20ms one way, jitter 1ms, loss 0.1%",
        "3 east -> middle: healed",
        "4 east -> middle: cut",
        "5 east -> middle: healed",
        "5 middle -> west: healed",
    ]


def test_a_flap_cuts_again_and_again_until_it_ends_or_is_healed() -> None:
    flap = "at: 1s, flap: [east, middle], oneway: true, up: 300ms, down: 100ms, for: 1s"
    assert [line.split()[0] + " " + line.split()[-1] for line in told(flap)] == [
        *("1 cut", "1.1 healed", "1.4 cut", "1.5 healed", "1.8 cut", "1.9 healed")
    ]
    assert told(flap, "at: 1200ms, heal: all") == told(flap)[:2]
    assert told(flap.replace("for: 1s", "for: 850ms"))[-1] == "1.85 east -> middle: healed"


def test_connections_and_sites_are_told_in_order_with_links_first() -> None:
    assert told(
        "at: 2s, pause: west, for: 1s",
        "at: 3s, reset: [east, middle]",
        "at: 3s, reset: [middle, east]",
        "at: 3s, cut: [east, middle], oneway: true",
        "at: 3s, pause: west, what: rank, for: 1s",
        "at: 5s, kill: west",
        "at: 6s, kill: west, what: gateway",
    ) == [
        "2 west: paused",
        "3 east -> middle: cut",
        "3 west: goes on",
        "3 east -> middle: connections reset",
        "3 middle -> east: connections reset",
        "3 west, rank: paused",
        "4 west, rank: goes on",
        "5 west: killed",
        "6 west, gateway: killed",
    ]


def test_each_change_names_the_fault_it_follows_from() -> None:
    times = expand(load_faults(SCRIPT, "faults.yaml", CHAIN))
    assert {each.fault for each in times} == set(range(10)) - {9}  # nothing is left to heal then
    assert list(times) == sorted(times, key=lambda each: each.at_s)


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_the_same_times_and_stays_in_the_ranges(seed: int) -> None:
    drawn = script("at: 8s..10s, cut: [east, middle], oneway: true, for: 1s..3s", seed=seed)
    first, last = expand(drawn)
    assert expand(drawn) == (first, last), f"{seed=}"
    assert 8 <= first.at_s <= 10, f"{seed=}"
    assert 1 - 1e-6 <= last.at_s - first.at_s <= 3 + 1e-6, f"{seed=}"
    assert expand(drawn, seed + 1) != (first, last), f"{seed=}"
    assert expand(drawn, seed) == expand(dataclasses.replace(drawn, seed=99), seed), f"{seed=}"


def test_times_are_the_same_on_every_machine() -> None:
    times = expand(script("at: 0s..1h, cut: [east, middle], oneway: true, for: 1ms..1h", seed=7))
    assert [each.at_s for each in times] == [1910.584514, 2041.775916]


def test_a_fault_at_the_end_moves_none_before_it() -> None:
    lines = ["at: 8s..10s, cut: [east, middle]", "at: 1s..9s, reset: [middle, west]"]
    before = expand(script(*lines))
    after = expand(script(*lines, "at: 0s..20s, pause: west, for: 1s..2s"))
    assert [each for each in after if each.fault < 2] == list(before)


def spans(low_s: float, high_s: float) -> st.SearchStrategy[Span]:
    times = st.floats(low_s, high_s, allow_nan=False)
    return st.tuples(times, times).map(lambda pair: Span(min(pair), max(pair)))


SOME_LINKS = st.lists(st.sampled_from(sorted(LINKS)), min_size=1, max_size=4, unique=True).map(
    tuple
)
LASTING = spans(0.01, 5)
ENDS = st.just(("east", "middle"))
WITHOUT_END = st.builds(Fault, cut=ENDS, at_s=spans(0, 9), links=SOME_LINKS)
FAULTS = st.one_of(
    st.builds(Fault, cut=ENDS, at_s=spans(0, 9), for_s=LASTING, links=SOME_LINKS),
    st.builds(
        lambda figures, **given: Fault(
            **{"rtt_s" if name == "delay_s" else name: each for name, each in figures.items()},
            **given,
        ),
        FIGURES,
        link=ENDS,
        at_s=spans(0, 9),
        for_s=LASTING,
        links=SOME_LINKS,
    ),
    st.builds(
        Fault,
        flap=ENDS,
        at_s=spans(0, 9),
        for_s=LASTING,
        links=SOME_LINKS,
        up_s=spans(0.05, 1),
        down_s=spans(0.05, 1),
    ),
    st.builds(Fault, heal=st.just(()), at_s=spans(0, 9), links=SOME_LINKS),
)
SEEDS = st.integers(0, 2**63 - 1)


@pytest.mark.slow
@given(st.lists(FAULTS, max_size=8), SEEDS)
def test_when_all_has_ended_every_link_is_as_configured(faults: list[Fault], seed: int) -> None:
    times = expand(FaultScript(seed=seed, faults=tuple(faults), links=LINKS))
    assert list(times) == sorted(times, key=lambda each: each.at_s)
    assert all(each.at_s == round(each.at_s, 6) for each in times)
    last = list(states(times).values())[-1]
    assert last == {pair: (False, dict(figures)) for pair, figures in LINKS.items()}


@pytest.mark.slow
@given(st.lists(FAULTS | WITHOUT_END, max_size=8), SEEDS)
def test_a_link_is_at_any_time_what_its_active_faults_make_of_it(
    faults: list[Fault], seed: int
) -> None:
    """Against each fault's own times, as it has them by itself: no machinery in common."""
    links = LINKS
    times = expand(FaultScript(seed=seed, faults=tuple(faults), links=links))
    alone = [intervals(index, faults, seed) for index in range(len(faults))]
    for at_s, found in states(times).items():
        for pair in links:
            assert found[pair] == expected_state(at_s, pair, faults, alone), f"{at_s=} {pair=}"


def intervals(index: int, faults: list[Fault], seed: int) -> list[tuple[float, float]]:
    """Return when a fault would be active, were it the only one: the others do nothing."""
    fault = faults[index]
    idle = [Fault(heal=(), at_s=each.at_s) for each in faults]
    probe = dataclasses.replace(fault, links=(("east", "middle"),))
    if fault.action == "link":  # figures that change nothing would not show
        probe = dataclasses.replace(probe, loss=0.75)
    if fault.action == "heal":
        probe = dataclasses.replace(probe, heal=None, cut=("east", "middle"), for_s=None)
    idle[index] = probe
    times = expand(FaultScript(seed=seed, faults=tuple(idle), links=LINKS))
    begins = [each.at_s for each in times if str(each.change).split(": ")[1] != "healed"]
    ends = [each.at_s for each in times if str(each.change).split(": ")[1] == "healed"]
    return list(zip(begins, [*ends, float("inf")], strict=False))


def expected_state(
    at_s: float, pair: Pair, faults: list[Fault], alone: list[list[tuple[float, float]]]
) -> State:
    is_cut, figures = False, dict(LINKS[pair])
    order = sorted(range(len(faults)), key=lambda index: (alone[index][0][0], index))
    for place, index in enumerate(order):
        fault = faults[index]
        healed = any(
            faults[later].action == "heal"
            and pair in faults[later].links
            and alone[later][0][0] <= at_s
            for later in order[place + 1 :]
        )
        active = any(begin_s <= at_s < end_s for begin_s, end_s in alone[index])
        if fault.action == "heal" or pair not in fault.links or healed or not active:
            continue
        is_cut = is_cut or fault.figures is None
        figures.update(fault.figures or {})
    return is_cut, figures


def test_figures_are_those_of_the_topology() -> None:
    figures: Figures = LINKS["west", "middle"]
    assert figures == {"bytes_per_s": 12.5e6, "delay_s": 0.02, "jitter_s": 0.001, "loss": 0.001}
