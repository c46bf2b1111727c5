"""What the kernel is told: how fast packets may leave, and when BBR begins anew."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack

import pytest

from protos.frame import ChunkKey, Frame, Kind
from sites.gateway.links.congestion import kernel
from sites.gateway.links.congestion.kernel import (
    addresses_of,
    keep_paced,
    pace,
    use_pauses,
)
from sites.gateway.links.congestion.rate import Departure, Startup, Window
from sites.gateway.links.send_queue import Outbox
from sites.gateway.links.transport import Peer
from tests.fakes.looks import Looks, outbox_with

PEER = Peer("birch", 0, "127.0.0.1", 1)
KEY = ChunkKey(0, 0, 0, 0, Kind.CONTRIBUTION)
FRAME = 1 << 18
UNPACED = 2**64 - 1
DESCRIBED = 12.5e6
RTT_S = 0.02


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return the rates that connections were told."""
    found: list[float | None] = []
    monkeypatch.setattr(kernel, "pace", lambda _addresses, rate: found.append(rate))
    return found


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def outbox(looks: Looks) -> Outbox:
    return outbox_with(looks, bytes_per_s=DESCRIBED, rtt_s=RTT_S)


def nothing() -> None:
    """Happens."""


def send(outbox: Outbox) -> None:
    outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
    assert outbox.take(0)


def carried(window: Window, bytes_per_s: float, for_s: float) -> Window:
    """Return the window after a link has carried as much as it can, frame by frame."""
    sent: list[Departure] = []
    left_s, now_s = 1.0, 1.0 + RTT_S
    while now_s < 1.0 + for_s:
        # Always four on the way, so that the link is what holds them back.
        while len(sent) < 4:
            left_s = max(left_s, now_s - RTT_S)
            alone = not sent and left_s == 1.0
            sent.append(window.depart(FRAME, left_s, is_alone=alone, was_held=not alone))
        now_s += FRAME / bytes_per_s
        window.arrive(FRAME, sent.pop(0), now_s)
    return window


def test_only_while_something_is_on_the_way_and_not_again_and_again(
    paced: list[float | None], outbox: Outbox, looks: Looks
) -> None:
    looks.turns = [nothing, lambda: send(outbox), nothing, nothing]
    keep_paced(PEER, outbox)
    assert len(paced) == 1
    assert paced[0] is not None
    assert DESCRIBED < paced[0] < 1.25 * DESCRIBED, "frames leave faster than their packets"


def test_a_name_that_is_not_known_for_a_while_ends_nothing(
    paced: list[float | None], outbox: Outbox, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unknown(host: str, port: int) -> frozenset[tuple[str, int]]:
        asked.append(host)
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, f"{host}:{port}: temporary failure")
        return frozenset({(host, port)})

    monkeypatch.setattr(kernel, "addresses_of", unknown)
    looks.turns = [lambda: send(outbox), nothing, nothing]
    keep_paced(PEER, outbox)
    assert len(asked) == 2
    assert len(paced) == 1


def test_a_link_that_is_over_is_left_alone(
    paced: list[float | None], outbox: Outbox, looks: Looks
) -> None:
    send(outbox)
    looks.turns = [outbox.leave]
    keep_paced(PEER, outbox)
    assert not paced


def test_a_slower_link_than_described_is_not_made_slower() -> None:
    window = carried(
        Window(bytes_per_s=DESCRIBED, rtt_s=RTT_S, most_bytes=1 << 25), DESCRIBED / 4, 30.0
    )
    assert window.bytes_per_s < DESCRIBED / 2
    assert window.paced_bytes_per_s is not None
    assert window.paced_bytes_per_s > DESCRIBED


def test_a_faster_link_than_described_is_found_out_without_being_held_back() -> None:
    begun, window = (
        carried(
            Window(bytes_per_s=DESCRIBED, rtt_s=RTT_S, most_bytes=1 << 25), 8 * DESCRIBED, for_s
        )
        for for_s in (0.06, 30.0)
    )
    assert begun.paced_bytes_per_s is None, "how fast it is is not known yet"
    assert window.paced_bytes_per_s is not None
    assert window.paced_bytes_per_s > 8 * DESCRIBED


def test_a_search_waits_for_the_pace_to_be_lifted() -> None:
    """Rounds of 10 ms whose rate is that of the pace, 1.15 times the described, go on for long."""
    startup, searched_s = Startup(DESCRIBED), []
    for number in range(1, 40):
        delivered, now_s = int(number * 1.15e-2 * DESCRIBED), 5.0 + number * 0.01
        startup.arrive(delivered, delivered, now_s, was_held=True)
        if startup.is_searching:
            searched_s.append(now_s)
    assert startup.is_over
    assert searched_s[-1] - searched_s[0] > 2 * kernel._PACING_LOOK_S - 0.02


def test_connections_to_other_hosts_are_paced_and_those_that_stay_are_not() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses = addresses_of(*listener.getsockname())
        assert not pace(addresses, 1e6), "nobody has connected"
        for own, is_local in (("127.0.0.1", True), ("127.0.0.2", False)):
            client = stack.enter_context(socket.socket())
            client.settimeout(10)
            client.bind((own, 0))
            client.connect(listener.getsockname())
            for wanted, told in ((1e6, 10**6), (None, UNPACED)):
                assert pace(addresses, wanted) == (not is_local)
                assert most_paced(client) == (UNPACED if is_local else told)
            client.close()


def most_paced(connection: socket.socket) -> int:
    """Return what a connection may send a second (linux/tcp.h, tcpi_max_pacing_rate)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("=Q", info, 112)[0])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the round trips with which BBR was had begin anew."""
    found: list[float] = []
    monkeypatch.setattr(kernel, "begin_bbr_anew", lambda _addresses, rtt_s: found.append(rtt_s))
    return found


@pytest.fixture
def far_outbox(looks: Looks) -> Outbox:
    return outbox_with(looks, bytes_per_s=125e6, rtt_s=0.08)


def test_pauses_are_used_and_only_pauses(
    begun: list[float], far_outbox: Outbox, looks: Looks
) -> None:
    def send() -> None:
        assert len(begun) == 1
        far_outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
        assert far_outbox.take(0)

    def arrive() -> None:
        assert len(begun) == 1, "not while the frame was on its way"
        far_outbox.acknowledge(KEY)

    looks.turns = [nothing, send, nothing, arrive]
    use_pauses(PEER, far_outbox, 0.08)
    assert begun == [0.08, 0.08]
    assert max(looks.waited_s) < 2.5, "of BBR's ten seconds, and its third version's five"
    assert min(looks.waited_s) > 0.05


def test_a_measured_round_trip_counts_more_than_the_configured(
    begun: list[float], far_outbox: Outbox, looks: Looks
) -> None:
    looks.turns = [lambda: far_outbox.note_round_trip(0.05, is_idle=True)]
    use_pauses(PEER, far_outbox, 0.08)
    assert begun == [0.05]


def test_a_pause_that_is_over_once_the_name_is_known_is_left_alone(
    begun: list[float], far_outbox: Outbox, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(host: str, port: int) -> frozenset[tuple[str, int]]:
        far_outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
        return frozenset({(host, port)})

    monkeypatch.setattr(kernel, "addresses_of", slow)
    looks.turns = [nothing]
    use_pauses(PEER, far_outbox, 0.08)
    assert not begun
