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
