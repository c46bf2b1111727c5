"""When a link has BBR begin anew: in pauses, and only then."""

from __future__ import annotations

import socket

import pytest

from protos.frame import ChunkKey, Frame, Kind
from sites.gateway.links.congestion import kernel
from sites.gateway.links.congestion.kernel import Pauses
from sites.gateway.links.send_queue import Outbox
from sites.gateway.links.transport import Peer
from tests.fakes.looks import Looks, outbox_with

PEER = Peer("birch", 0, "127.0.0.1", 1)
KEY = ChunkKey(0, 0, 0, 0, Kind.CONTRIBUTION)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the round trips with which BBR was had begin anew."""
    found: list[float] = []
    monkeypatch.setattr(kernel, "begin_bbr_anew", lambda _addresses, rtt_s: found.append(rtt_s))
    return found


@pytest.fixture
def looks() -> Looks:
    return Looks()


@pytest.fixture
def outbox(looks: Looks) -> Outbox:
    return outbox_with(looks, bytes_per_s=125e6, rtt_s=0.08)


def nothing() -> None:
    """Happens."""


def test_pauses_are_used_and_only_pauses(begun: list[float], outbox: Outbox, looks: Looks) -> None:
    def send() -> None:
        assert len(begun) == 1
        outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
        assert outbox.take(0)

    def arrive() -> None:
        assert len(begun) == 1, "not while the frame was on its way"
        outbox.acknowledge(KEY)

    looks.turns = [nothing, send, nothing, arrive]
    Pauses(PEER, outbox, 0.08).run()
    assert begun == [0.08, 0.08]
    assert max(looks.waited_s) < 2.5, "of BBR's ten seconds, and its third version's five"
    assert min(looks.waited_s) > 0.05


def test_a_measured_round_trip_counts_more_than_the_configured(
    begun: list[float], outbox: Outbox, looks: Looks
) -> None:
    looks.turns = [lambda: outbox.note_round_trip(0.05, is_idle=True)]
    Pauses(PEER, outbox, 0.08).run()
    assert begun == [0.05]


def test_a_link_that_is_over_is_left_alone(
    begun: list[float], outbox: Outbox, looks: Looks
) -> None:
    looks.turns = [outbox.leave]
    Pauses(PEER, outbox, 0.08).run()
    assert not begun
    assert len(looks.waited_s) == 1


def test_a_pause_that_is_over_once_the_name_is_known_is_left_alone(
    begun: list[float], outbox: Outbox, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(host: str, port: int) -> frozenset[tuple[str, int]]:
        outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
        return frozenset({(host, port)})

    monkeypatch.setattr(kernel, "addresses_of", slow)
    looks.turns = [nothing]
    Pauses(PEER, outbox, 0.08).run()
    assert not begun


def test_a_name_that_is_not_known_for_a_while_ends_nothing(
    begun: list[float], outbox: Outbox, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str, port: int) -> frozenset[tuple[str, int]]:
        raise socket.gaierror(socket.EAI_AGAIN, f"{host}:{port}: temporary failure")

    monkeypatch.setattr(kernel, "addresses_of", unknown)
    looks.turns = [nothing, nothing]
    Pauses(PEER, outbox, 0.08).run()
    assert not begun
    assert len(looks.waited_s) == 3
