"""A gateway behind a relay, in this process: for tests of what the relay does to connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from isthmus.orchestrator.emulator.emulator_config import RelayConfig, RelayEndpoint
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.emulator.relay import Relay

Result = TypeVar("Result")
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def config(port: int, rate: float = 1e9, delay_s: float = 0.0, seed: int = 0) -> RelayConfig:
    return RelayConfig(
        links=tuple(
            LinkShape(source=source, target=target, bytes_per_s=rate, delay_s=delay_s)
            for source, target in (("eu", "us"), ("us", "eu"))
        ),
        endpoints=(
            RelayEndpoint(source="eu", target="us", gateway=0, host="127.0.0.1", port=port),
        ),
        seed=seed,
    )


class World:
    """A gateway that hands over its connections, behind a relay."""

    def __init__(self, relay: Relay, accepted: asyncio.Queue[Pair]) -> None:
        self.relay = relay
        self._accepted = accepted
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[Pair, Pair]:
        """Return a connection's two ends: the dialler's, the gateway's."""
        endpoint = self.relay.endpoints[0]
        near = await asyncio.open_connection(endpoint.host, endpoint.port)
        far = await self._accepted.get()
        self._writers += [near[1], far[1]]
        return near, far

    def counters(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {
            (link["source"], link["target"]): (link["delivered_bytes"], link["queued_bytes"])
            for link in self.relay.counters().links
        }

    def sent_bytes(self, source: str, target: str) -> int:
        links = self.relay.counters().links
        return sum(
            int(link["sent_bytes"])
            for link in links
            if (link["source"], link["target"]) == (source, target)
        )

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def world(rate: float = 1e9, delay_s: float = 0.0, seed: int = 0) -> AsyncIterator[World]:
    accepted: asyncio.Queue[Pair] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.put_nowait((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Relay(config(port, rate, delay_s, seed)) as relay:
        made = World(relay, accepted)
        try:
            yield made
        finally:
            await made.close()
            server.close()
            await server.wait_closed()


async def seconds(waited: Awaitable[Result]) -> tuple[float, Result]:
    began_s = asyncio.get_running_loop().time()
    result = await waited
    return asyncio.get_running_loop().time() - began_s, result
