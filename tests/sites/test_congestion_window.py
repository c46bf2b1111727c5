"""How wide a link's window is: by how long packets take, and by what is lost."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from isthmus.sites.gateway.links.congestion.window import LinkWindow, Path

RATE = 60e6
RTT_S = 0.05
HELD = RATE * RTT_S
ALONE = int(1.15 * HELD + 0.125 * HELD)
"""1.15 times what the link holds, and what leaves between two looks."""
BESIDE = int(0.6 * HELD)
"""What is on the way beside others at first."""
MOST = 32 << 20


def path_of(
    rtt_s: float,
    shortest_rtt_s: float,
    sent_again: int,
    carried: float,
    *,
    sent: int = 0,
    back_s: float = 0.0,
) -> Path:
    """Return a path of which nothing was sent and nothing waits on its way back, unless said."""
    return Path(rtt_s, shortest_rtt_s, sent_again, carried, sent, back_s)


def widths(
    looks: Iterable[tuple[float, int]],
    window: LinkWindow | None = None,
    carried: float = 0.5,
) -> list[int]:
    """Return the windows after looks, twenty a second, at (round trip ÷ idle one, packets lost).

    A thousand packets are sent in each.
    """
    window = window or LinkWindow(MOST, RTT_S)
    found, lost = [], 0
    for index, (rtt, newly_lost) in enumerate(looks):
        lost += newly_lost
        path = path_of(rtt * RTT_S, RTT_S, lost, carried, sent=1000 * (index + 1))
        found.append(window.follow(path, RATE, 0.05 * index))
    return found


def settled(path: Path, rtt_s: float = RTT_S) -> int:
    """Return the window of a link described with `rtt_s` after half a minute of equal looks."""
    window = LinkWindow(MOST, rtt_s)
    return [window.follow(path, RATE, 0.05 * look) for look in range(600)][-1]


def test_a_link_of_ones_own_is_kept_full() -> None:
    for rtt, carried in [(1.0, 0.5), (1.1, 0.5), (1.3, 0.5), (1.5, 0.9), (1.9, 0.9)]:
        assert settled(path_of(rtt * RTT_S, RTT_S, 0, carried)) == pytest.approx(ALONE, rel=1e-3)


def test_round_trips_that_vary_by_themselves_are_no_queue() -> None:
    """The description has 50 ms, and some of them take 42."""
    looks = [path_of(rtt_s, 0.042, 0, 0.5) for rtt_s in (0.055, 0.058, 0.061, 0.08)]
    found = [settled(each) for each in looks]
    assert min(found[:3]) > 1.2 * HELD
    assert found[3] == BESIDE
    wrong = [settled(each, rtt_s=0.5) for each in looks]
    assert wrong[3] < wrong[0], "a description that is far off"


def test_a_queue_that_is_not_ones_own_is_left_to_others() -> None:
    found = widths([(1.9, 0)] * 600)
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.2 * HELD
    assert found[-1] == BESIDE


def test_one_look_says_little() -> None:
    """A window that followed each look would fill the queue and let it run empty by turns."""
    found = widths([(1.0, 0), (1.9, 0)] * 300)
    assert max(found[-2:]) < 1.05 * min(found[-2:])
    assert BESIDE < found[-1] < 1.2 * HELD
    assert widths([(1.9, 0)] * 600 + [(1.0, 0)] * 100)[-1] > 1.2 * HELD, "the other has gone"


def test_who_gets_less_than_half_beside_others_has_more_on_the_way() -> None:
    window = LinkWindow(MOST, RTT_S)
    wider = widths([(1.9, 0)] * 800, window, carried=0.2)
    assert wider[200:] == sorted(wider[200:])
    assert 5 * HELD <= wider[-1] <= MOST
    assert widths([(1.9, 0)] * 2000, window, carried=0.6)[-1] == BESIDE


def test_what_was_missing_beside_others_is_forgotten_alone() -> None:
    window = LinkWindow(MOST, RTT_S)
    assert widths([(1.9, 0)] * 800, window, carried=0.2)[-1] > 5 * HELD
    assert widths([(1.0, 0)] * 500, window, carried=0.9)[-1] == pytest.approx(ALONE, rel=1e-3)
    assert widths([(1.9, 0)] * 300, window, carried=0.5)[-1] == pytest.approx(BESIDE, rel=1e-3)


@pytest.mark.parametrize(
    ("losses", "carried", "is_wide"),
    [
        ([20, 20, 0], 0.3, True),
        ([20, 0, 0, 0], 0.3, False),  # CUBIC has the queue overflow now and then
        ([20, 20, 0], 0.45, False),  # that is one's part
    ],
)
def test_beside_those_who_do_not_slow_down_it_is_wide_open(
    losses: list[int], carried: float, is_wide: bool
) -> None:
    """BBR leaves nothing to a window that stays."""
    found = widths([(1.9, each) for each in losses] * 100, carried=carried)
    assert (MOST in found) == is_wide
    assert found[0] < MOST, "one look says little"


def test_those_who_do_not_slow_down_are_remembered_for_half_a_minute() -> None:
    looks = [(1.9, 20)] * 40
    assert widths(looks + [(1.55, 0)] * 550, carried=0.3)[-1] == MOST
    assert widths(looks + [(1.55, 0)] * 700, carried=0.3)[-1] < MOST


def test_it_is_the_narrower_the_more_waits() -> None:
    found = [settled(path_of((1.36 + 0.04 * step) * RTT_S, RTT_S, 0, 0.5)) for step in range(6)]
    assert found == sorted(set(found), reverse=True)


def test_packets_that_are_lost_without_a_queue_take_more_window() -> None:
    assert widths([(1.1, 0)] + [(1.1, 1)] * 4)[-1] == MOST
    assert widths([(1.1, 0)] + [(1.1, 1), (1.1, 0), (1.5, 0)] * 4)[-1] == MOST, "not one by one"
    lossy = [(1.1, 0)] + [(1.1, 1)] * 4
    assert widths(lossy + [(2.0, 9)] * 190)[-1] == MOST, "the queue may be one's own then"
    assert widths(lossy + [(2.0, 0)] * 210)[-1] < MOST, "for ten seconds"


def test_a_queue_that_was_never_empty_may_be_full_however_long_round_trips_seem() -> None:
    """Somebody else's packets have filled it since before the connections were there."""
    for described_s, is_wide in [(RTT_S, False), (1.6 * RTT_S, True)]:
        window, lost, found = LinkWindow(MOST, described_s), 0, []
        for look in range(20):
            lost += 300 if look % 2 else 0
            path = path_of(1.9 * RTT_S, 1.6 * RTT_S, lost, 0.5, sent=1000 * look)
            found.append(window.follow(path, RATE, 0.05 * look))
        assert (found[-1] == MOST) == is_wide


def test_packets_that_are_lost_in_a_queue_do_not() -> None:
    """What is lost in a full queue is told when that has drained, up to a second later."""
    assert max(widths([(2.0, 100)] + [(1.1, 5), (1.2, 5), (1.3, 5), (1.3, 0)] * 4)) < MOST
    assert max(widths(([(2.0, 0)] + [(1.1, 5)] * 19) * 20)) < MOST


def test_frames_whose_acknowledgements_wait_take_no_room() -> None:
    for back_s in (0.0, RTT_S):
        window_bytes = settled(path_of(RTT_S, RTT_S, 0, 0.5, back_s=back_s))
        assert window_bytes == pytest.approx(ALONE + RATE * back_s, rel=1e-6)
        beside = path_of(2 * RTT_S, RTT_S, 0, 0.5, back_s=back_s)
        assert settled(beside) == BESIDE


def test_memory_limits_it() -> None:
    path = path_of(2 * RTT_S, RTT_S, 0, 0.5)
    assert LinkWindow(1000, RTT_S).follow(path, RATE, 0.0) == 1000


def test_it_holds_what_the_whole_path_does_where_the_kernel_sees_a_part() -> None:
    path = path_of(0.001, 0.001, 0, 1.0)
    assert LinkWindow(MOST, RTT_S).follow(path, RATE, 0.0) > HELD


def test_a_rate_that_was_only_described_limits_nothing() -> None:
    window, path = LinkWindow(MOST, RTT_S), path_of(1.9 * RTT_S, RTT_S, 0, 1.0)
    assert window.follow(path, RATE, 0.0, is_measured=False) == MOST
    assert window.follow(path, RATE, 0.05) < MOST
