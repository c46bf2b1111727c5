"""An emulator's process from outside: told, heard, refused, killed, and gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest

from isthmus.orchestrator.emulator import backend as module
from isthmus.orchestrator.emulator.backend import Backend, EmulatorError
from isthmus.orchestrator.emulator.emulator_config import (
    NetnsConfig,
    RelayConfig,
    RelayEndpoint,
    shapes_of,
)
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.topology.faults.script import Change
from tests.fakes.worlds import topology

WITHIN_S = 30.0
CONFIG = RelayConfig(links=shapes_of(topology(2)), endpoints=())
NETNS_CONFIG = NetnsConfig(sites=("a", "b"), links=shapes_of(topology(2)))
CHANGE = Change(kind="cut", source="a", target="b")


async def started() -> Backend:
    deadline_s = asyncio.get_running_loop().time() + WITHIN_S
    return await Backend.start(CONFIG, deadline_s)


@contextlib.asynccontextmanager
async def stopped() -> AsyncIterator[tuple[Backend, asyncio.Future[str]]]:
    """Start one that stands still, and yield it with what will be said of its end."""
    backend = await started()
    try:
        ended = asyncio.get_running_loop().create_future()
        backend.watch(ended.set_result)
        os.kill(backend.pid, signal.SIGSTOP)
        yield backend, ended
    finally:
        await backend.close()


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_it_is_told_and_heard_and_goes_in_peace() -> None:
    ended: list[str] = []
    counted = asyncio.Event()
    backend = await started()
    process = psutil.Process(backend.pid)
    try:
        backend.on_counters = lambda counters: counted.set()
        backend.watch(ended.append)
        await backend.apply([CHANGE])
        gateway = RelayEndpoint(source="a", target="b", gateway=1, host="127.0.0.1", port=9)
        [dialled] = await backend.lead([gateway])
        assert dialled == dataclasses.replace(gateway, port=dialled.port)
        with pytest.raises(EmulatorError, match="no link from a to c"):
            await backend.lead([dataclasses.replace(gateway, target="c")])
        async with asyncio.timeout(WITHIN_S):
            await counted.wait()
        assert {(each["source"], each["target"]) for each in backend.counters} == {
            ("a", "b"),
            ("b", "a"),
        }
    finally:
        await backend.close()
        await backend.close()
    assert not process.is_running()
    assert ended == [], "it was asked to"
    with pytest.raises(EmulatorError):
        await backend.apply([CHANGE])


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_one_that_is_killed_is_noticed_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.2)

    async with stopped() as (backend, ended):
        applying = asyncio.create_task(backend.apply([CHANGE]))
        await asyncio.sleep(0)
        os.kill(backend.pid, signal.SIGKILL)
        async with asyncio.timeout(WITHIN_S):
            assert await ended == "it ended with SIGKILL"
            with pytest.raises(EmulatorError):
                await applying


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_one_that_does_not_answer_is_ended_and_that_is_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "APPLY_S", 0.2)

    async with stopped() as (backend, ended):
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(EmulatorError, match=r"did not take a change within 0\.2 s"):
                await backend.apply([CHANGE])
            assert await ended == ("it ended with SIGKILL: it did not take a change within 0.2 s")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, NETNS_CONFIG])
async def test_counters_of_the_end_are_heard(config: RelayConfig | NetnsConfig) -> None:
    if isinstance(config, NetnsConfig) and (why := netns_problem()):
        pytest.skip(why)

    deadline_s = asyncio.get_running_loop().time() + WITHIN_S
    backend = await Backend.start(config, deadline_s)
    await backend.close()
    assert {(each["source"], each["target"]) for each in backend.counters} == {
        ("a", "b"),
        ("b", "a"),
    }


@pytest.mark.multiprocess
@pytest.mark.slow
async def test_what_it_refuses_is_told_in_its_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    deadline_s = asyncio.get_running_loop().time() + WITHIN_S
    gateway = RelayEndpoint(source="a", target="b", gateway=0, host="127.0.0.1", port=9)
    nowhere = dataclasses.replace(CONFIG, endpoints=(gateway,), bind_host="203.0.113.7")
    with pytest.raises(EmulatorError, match=r"status 2: .*bind_host: 203\.0\.113\.7"):
        await Backend.start(nowhere, deadline_s)
    with pytest.raises(EmulatorError, match="not up in time"):
        await Backend.start(CONFIG, asyncio.get_running_loop().time())
    left = psutil.Process().children(recursive=True)
    assert not [each for each in left if "emulator.relay" in " ".join(_command(each))]
    assert "bind_host" in capfd.readouterr().err, "it is in our own log, too"


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
