"""Numbered messages: each arrives once and in order, whatever connections break."""

from __future__ import annotations

import random
from collections import deque

import pytest

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.numbered import Numbered


class Side:
    """One side of a session: what it has sent on this connection, and all that it has taken."""

    def __init__(self) -> None:
        self.log: Numbered[int] = Numbered()
        self.written = 0
        self.wire: deque[tuple[int, int, int]] = deque()
        """On the way to the other side: number, content, acknowledgement."""
        self.taken: list[int] = []

    def write(self) -> None:
        """Put the next message on the wire, or an acknowledgement alone."""
        message = self.log.after(self.written)
        if message is None:
            self.wire.append((0, -1, self.log.received))
            return
        self.written += 1
        self.wire.append((self.written, message, self.log.received))

    def read(self, wire: deque[tuple[int, int, int]]) -> None:
        """Take one message from the wire."""
        number, content, received = wire.popleft()
        self.log.acknowledge(received)
        if number and self.log.takes(number):
            self.taken.append(content)


def reconnect(one: Side, other: Side) -> None:
    """Break the connection, whatever is on the way, and open another."""
    for side, peer in ((one, other), (other, one)):
        side.wire.clear()
        side.log.acknowledge(peer.log.received)
        side.written = side.log.acknowledged


@pytest.mark.parametrize("seed", range(50))
def test_each_message_arrives_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    one, other = Side(), Side()
    sent: dict[int, list[int]] = {0: [], 1: []}
    for turn in range(2000):
        for index, (side, peer) in enumerate(((one, other), (other, one))):
            if chance.random() < 0.3:
                sent[index].append(turn)
                side.log.add(turn)
            if chance.random() < 0.5:
                side.write()
            if side.wire and chance.random() < 0.5:
                peer.read(side.wire)
        if chance.random() < 0.02:
            reconnect(one, other)
    reconnect(one, other)
    while len(one.log) or len(other.log):
        for side, peer in ((one, other), (other, one)):
            side.write()
            peer.read(side.wire)
    assert other.taken == sent[0], f"{seed=}"
    assert one.taken == sent[1], f"{seed=}"


def test_what_was_sent_on_two_connections_counts_once() -> None:
    log: Numbered[str] = Numbered()
    assert [log.takes(number) for number in (1, 2, 2, 1, 3, 0, 0)] == [
        *(True, True, False, False, True),
        *(True, True),
    ]
    assert log.received == 3


def test_a_gap_and_a_false_acknowledgement_are_refused() -> None:
    log: Numbered[str] = Numbered()
    with pytest.raises(RemoteProtocolError, match="number 2 followed 0"):
        log.takes(2)
    log.add("a")
    with pytest.raises(RemoteProtocolError, match="2 acknowledged, and 1 sent"):
        log.acknowledge(2)
    assert log.acknowledge(1) == ["a"]
    assert log.acknowledge(0) == []


def test_to_somebody_who_knows_nothing_all_that_is_kept_is_sent_anew() -> None:
    log: Numbered[str] = Numbered()
    for message in "abc":
        log.add(message)
    log.acknowledge(1)
    log.takes(1)
    log.begin_anew()
    assert (log.received, log.last, len(log)) == (0, 2, 2)
    assert [log.after(0), log.after(1), log.after(2)] == ["b", "c", None]
