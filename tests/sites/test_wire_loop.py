"""The loop that all streams of a process share.

It is there while anybody uses it, and leaves nothing.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from isthmus.sites.gateway.links.wire_loop import WireLoop

DEADLINE_S = 10.0


def wire_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "wire"]


async def thread_name() -> str:
    return threading.current_thread().name


def test_all_users_share_a_loop_and_the_last_ends_it() -> None:
    first, second = WireLoop.acquire(), WireLoop.acquire()
    try:
        assert first is second
        assert first.run(thread_name()).result(DEADLINE_S) == "wire"
        WireLoop.release()
        assert second.run(thread_name()).result(DEADLINE_S) == "wire"
    finally:
        WireLoop.release()
    assert not wire_threads()
    second.call(lambda: pytest.fail("a loop that has ended does nothing"))
    third = WireLoop.acquire()
    try:
        assert third is not first
        assert third.run(thread_name()).result(DEADLINE_S) == "wire"
    finally:
        WireLoop.release()


def test_tasks_that_are_left_are_cancelled_before_the_loop_ends() -> None:
    ended = threading.Event()
    begun = threading.Event()

    async def stay() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    wire = WireLoop.acquire()
    try:
        left = wire.run(stay())
        assert begun.wait(DEADLINE_S)
    finally:
        WireLoop.release()
    assert ended.is_set()
    assert left.cancelled()
    assert not wire_threads()


def test_the_loop_rests_for_a_part_of_the_shortest_round_trip() -> None:
    wire = WireLoop.acquire()
    links = [object() for _ in range(3)]
    try:
        rests_s = [wire.rest_s]
        for link, rtt_s in zip(links, (0.2, 0.005, 0.0001), strict=True):
            wire.carry(link, rtt_s)
            rests_s.append(wire.rest_s)
        assert rests_s == [0.0, 0.002, pytest.approx(0.0005), 0.0]
        for link in reversed(links):
            assert wire.rest_s == rests_s.pop()
            wire.carry(link, None)
        assert wire.rest_s == 0.0
    finally:
        WireLoop.release()


def test_a_loop_that_rests_does_all_that_it_is_asked_for() -> None:
    wire = WireLoop.acquire()
    try:
        wire.carry(wire, 1.0)
        for _ in range(20):
            assert wire.run(thread_name()).result(DEADLINE_S) == "wire"
    finally:
        WireLoop.release()
