"""The relay with real sockets, in this process: bytes, ends, bounds and fairness."""

import asyncio
import contextlib
import socket
import struct
from dataclasses import replace

import pytest

from isthmus.orchestrator.emulator.relay import Relay
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.relay_worlds import Pair, config, seconds, world
from tests.fakes.waiting import until

ABORT = struct.pack("ii", 1, 0)


async def test_bytes_arrive_both_ways_and_are_counted() -> None:
    async with world() as wan:
        near, far = await wan.connect()
        message = bytes(range(256)) * 4096
        near[1].write(message)
        assert await far[0].readexactly(len(message)) == message
        far[1].write(b"thanks")
        assert await near[0].readexactly(6) == b"thanks"
        assert wan.counters() == {("eu", "us"): (1 << 20, 0), ("us", "eu"): (6, 0)}


async def test_each_way_takes_its_delay() -> None:
    async with world(delay_s=0.05) as wan:
        near, far = await wan.connect()
        near[1].write(b"x")
        there_s, _ = await seconds(far[0].readexactly(1))
        far[1].write(b"y")
        back_s, _ = await seconds(near[0].readexactly(1))
        assert there_s >= 0.049
        assert back_s >= 0.049


async def test_a_half_close_crosses_and_the_other_direction_lives_on() -> None:
    async with world(delay_s=0.02) as wan:
        near, far = await wan.connect()
        near[1].write(b"question")
        near[1].write_eof()
        took_s, question = await seconds(far[0].read())
        assert question == b"question"
        assert took_s >= 0.019
        far[1].write(b"answer")
        far[1].write_eof()
        assert await near[0].read() == b"answer"


@pytest.mark.parametrize("from_gateway", [False, True])
async def test_a_reset_crosses_after_the_delay(from_gateway: bool) -> None:
    async with world(delay_s=0.02) as wan:
        ends = await wan.connect()
        if from_gateway:
            ends = ends[::-1]
        broken, other = ends
        broken[1].write(b"x")
        assert await other[0].readexactly(1) == b"x"
        raw = broken[1].get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        broken[1].transport.abort()

        async def read() -> None:
            with pytest.raises(ConnectionResetError):
                await other[0].read()

        took_s, _ = await seconds(read())
        assert took_s >= 0.019


async def test_both_ends_broken_at_once_leave_nothing_behind() -> None:
    async with world(delay_s=0.02) as wan:
        for end in await wan.connect():
            raw = end[1].get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            end[1].transport.abort()
        await until(lambda: wan.relay.num_connections == 0)


async def test_a_refused_gateway_resets_the_dialler() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with Relay(config(port)) as relay:
        endpoint = relay.endpoints[0]
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert relay.num_connections == 0


@pytest.mark.slow
async def test_a_receiver_that_does_not_read_stops_its_own_sender_only() -> None:
    """The relay holds at most its queue, and what was in flight when the receiver stopped."""

    rate, delay_s = 50e6, 0.01
    async with world(rate, delay_s) as wan:
        (_, stuck), (stuck_reader, stuck_writer) = await wan.connect()
        stuck_writer.transport.pause_reading()  # type: ignore[attr-defined]
        stuck.write(bytes(32 << 20))
        near, far = await wan.connect()
        near[1].write(bytes(16 << 20))
        await far[0].readexactly(16 << 20)
        _, held_bytes = wan.counters()["eu", "us"]
        assert 0 < held_bytes <= rate * (delay_s + 0.025) + 3 * (64 << 10)
        stuck_writer.transport.resume_reading()  # type: ignore[attr-defined]
        await stuck_reader.readexactly(32 << 20)


@pytest.mark.slow
@pytest.mark.exhaustive
async def test_connections_of_a_link_share_it_fairly() -> None:
    """Four senders that never stop get a quarter each, within 15 %, and the rate together."""

    rate = 12.5e6
    received = [0, 0, 0, 0]

    async def pump(index: int, near: Pair, far: Pair) -> None:
        async def send() -> None:
            while True:
                near[1].write(bytes(128 << 10))
                await near[1].drain()

        sending = asyncio.create_task(send())
        try:
            while True:
                received[index] += len(await far[0].read(1 << 20))
        finally:
            sending.cancel()

    async with world(rate, 0.01) as wan:
        pairs = [await wan.connect() for _ in received]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5), asyncio.TaskGroup() as tasks:
                for index, (near, far) in enumerate(pairs):
                    tasks.create_task(pump(index, near, far))
    assert sum(received) <= rate * 1.6
    for share in received:
        assert share == pytest.approx(sum(received) / 4, rel=0.15)


async def test_it_leads_to_a_gateway_that_was_started_since() -> None:
    async with world() as wan:
        near, _ = await wan.connect()
        [before], [gateway] = wan.relay.endpoints, config(1).endpoints
        accepted: asyncio.Queue[Pair] = asyncio.Queue()
        later = await asyncio.start_server(lambda *pair: accepted.put_nowait(pair), "127.0.0.1", 0)
        port = later.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="no link from eu to ash"):
            wan.relay.lead([replace(gateway, port=port), replace(gateway, target="ash")])
        [dialled] = wan.relay.lead([replace(gateway, port=port)])
        assert (dialled.source, dialled.target, dialled.gateway) == ("eu", "us", 0)
        reader, writer = await asyncio.open_connection(dialled.host, dialled.port)
        _, there = await accepted.get()
        there.write(b"anew")
        assert await reader.readexactly(4) == b"anew"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(before.host, before.port)
        near[1].write(b"open before")
        await until(lambda: wan.counters()["eu", "us"][0] == len(b"open before"))
        for each in (writer, there):
            each.close()
        later.close()


async def test_leaving_resets_what_is_open() -> None:
    async with world(delay_s=10.0) as wan:
        near, _ = await wan.connect()
        near[1].write(b"never arrives")
        await until(lambda: wan.counters()["eu", "us"][1] > 0)
        await wan.relay.__aexit__(None, None, None)
        with pytest.raises(ConnectionResetError):
            await near[0].read()
        assert wan.counters()["eu", "us"] == (0, 0)


@pytest.mark.parametrize(
    ("bind_host", "message"),
    [
        ("203.0.113.7", "bind_host: 203.0.113.7: "),
        ("no such host", "host 'no such host' has no address"),
    ],
)
async def test_a_host_that_cannot_be_bound_is_named(bind_host: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await Relay(replace(config(9), bind_host=bind_host)).__aenter__()
