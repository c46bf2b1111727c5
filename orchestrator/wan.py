"""The emulated WAN of a run: a relay process between the sites' gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable

from orchestrator.core.events import Endpoint
from orchestrator.emulator.config import (
    RelayConfig,
    RelayEndpoint,
    parse_listening,
    shapes_of,
)
from orchestrator.local_agents import ended_with
from protos.errors import IsthmusError
from topology.errors import ConfigError
from topology.world import Topology

STOP_S = 3.0
LINE_BYTES = 1 << 20


class RelayError(IsthmusError):
    """The relay does not do what it is there for."""


class Wan:
    """Owns one relay process, from `open` to `close`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, topology: Topology, listening: Iterable[Endpoint], deadline_s: float
    ) -> tuple[Wan, dict[str, tuple[Endpoint, ...]]]:
        """Start a relay; return it, and where each site dials the others' gateways.

        Call it from the main thread: the leash follows the thread that starts the process.

        Args:
            topology: whose links are emulated.
            listening: the gateways.
            deadline_s: when the relay has to listen, on the event loop's clock.

        Raises:
            RelayError: it ended, or was not listening in time; in its own words if it had any.
        """
        config = RelayConfig(links=shapes_of(topology), endpoints=_dialled(topology, listening))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sites.leash", str(os.getpid()), "--"),
            *(sys.executable, "-m", "orchestrator.emulator.relay"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        wan = cls(process)
        try:
            async with asyncio.timeout_at(deadline_s):
                endpoints = await wan._configure(config)
        except TimeoutError:
            await wan.close()
            raise RelayError("it did not listen in time") from None
        except BaseException:
            await wan.close()
            raise
        return wan, _books(endpoints)

    async def _configure(self, config: RelayConfig) -> tuple[RelayEndpoint, ...]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(config.to_json()).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended, which the next line tells
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RelayError(f"it ended with {ended_with(await self._process.wait())}")
        try:
            return parse_listening(line)
        except ConfigError as error:
            raise RelayError(error.problems[0].message) from error

    def watch(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end` when the process ends before `close`."""
        self._watching = asyncio.create_task(self._watch(on_end), name="wan")

    async def _watch(self, on_end: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        # Its counters are read so that the pipe never fills, and for nothing else.
        while await self._process.stdout.read(LINE_BYTES):
            pass
        on_end(f"it ended with {ended_with(await self._process.wait())}")

    async def close(self) -> None:
        """End the process and return when it is gone. A second call changes nothing."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _dialled(topology: Topology, listening: Iterable[Endpoint]) -> tuple[RelayEndpoint, ...]:
    """Return one endpoint for each gateway and each site that has links to and from it."""
    return tuple(
        RelayEndpoint(
            source=site.name,
            target=gateway.site,
            node=gateway.node,
            host=gateway.host,
            port=gateway.port,
        )
        for gateway in listening
        for site in topology.sites
        if topology.link(site.name, gateway.site) and topology.link(gateway.site, site.name)
    )


def _books(endpoints: Iterable[RelayEndpoint]) -> dict[str, tuple[Endpoint, ...]]:
    """Return the address book of each dialling site."""
    books: dict[str, tuple[Endpoint, ...]] = {}
    for each in endpoints:
        endpoint = Endpoint(each.target, each.node, each.host, each.port)
        books[each.source] = (*books.get(each.source, ()), endpoint)
    return books
