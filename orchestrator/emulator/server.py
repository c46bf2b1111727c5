"""The relay: one listening port for each way from a site to another site's gateway.

Used in a process's own event loop, `async with Relay(config) as relay`, or as the child process
that relay.py makes of it.

It ends TCP on both sides, so what it cannot show is TCP's own behaviour on a long path: slow
start, loss and retransmission, window limits.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import socket
from dataclasses import replace
from typing import Any

from orchestrator.emulator.config import RelayConfig, RelayEndpoint
from orchestrator.emulator.connection import Address, Connection, bound_receive_buffer
from orchestrator.emulator.flow import SharedLink
from orchestrator.emulator.link import LinkShape, Transmitter
from topology.errors import ConfigError

MAX_CONNECTIONS = 1024
"""More than a relay's sites would ever open; beyond it new ones are closed at once."""
_BACKLOG = 256
_ACCEPT_AGAIN_S = 1.0
_RESOLVE_WITHIN_S = 5.0
_LOG = logging.getLogger("relay")


class Relay:
    """Emulates the links of `config` while it is entered.

    Raises:
        ConfigError: on entering, when a host has no address or a port cannot be bound.
    """

    def __init__(self, config: RelayConfig) -> None:
        self._config = config
        self._links = {
            (shape.source, shape.target): SharedLink(_transmitter(shape, config.seed))
            for shape in config.links
        }
        self._listeners: list[socket.socket] = []
        self._connections: set[Connection] = set()
        self._reopen: dict[socket.socket, asyncio.TimerHandle] = {}
        self.endpoints: tuple[RelayEndpoint, ...] = ()
        """Where to dial, in the order of the configuration; empty before entering."""

    async def __aenter__(self) -> Relay:
        try:
            self.endpoints = tuple([await self._listen(each) for each in self._config.endpoints])
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    @property
    def num_connections(self) -> int:
        """How many connections are open at either end, or still have bytes in flight."""
        return len(self._connections)

    def counters(self) -> dict[str, Any]:
        """Return the `counters` message: totals since the start, and what is held right now."""
        return {
            "op": "counters",
            "links": [
                {
                    "source": source,
                    "target": target,
                    "bytes": link.delivered_bytes,
                    "queued_bytes": link.held_bytes,
                }
                for (source, target), link in self._links.items()
            ],
        }

    async def _listen(self, endpoint: RelayEndpoint) -> RelayEndpoint:
        gateway = await _resolve(endpoint.host, endpoint.port)
        family, address = await _resolve(self._config.bind_host, 0)
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.setblocking(False)
        bound_receive_buffer(listener, self._links[endpoint.source, endpoint.target].shape)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"bind_host: {self._config.bind_host}: {error.strerror}") from error
        listener.listen(_BACKLOG)
        accept = functools.partial(self._accept, listener, endpoint, gateway)
        asyncio.get_running_loop().add_reader(listener, accept)
        return replace(endpoint, host=self._config.bind_host, port=int(listener.getsockname()[1]))

    def _accept(self, listener: socket.socket, endpoint: RelayEndpoint, gateway: Address) -> None:
        try:
            dialler, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: a ready listener would spin
            _LOG.warning("cannot accept: %s", error.strerror)
            self._pause(listener, functools.partial(self._accept, listener, endpoint, gateway))
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            dialler.close()
            return
        there = self._links[endpoint.source, endpoint.target]
        back = self._links[endpoint.target, endpoint.source]
        try:
            connection = Connection(dialler, gateway, there, back, self._connections.discard)
        except OSError as error:
            dialler.close()
            _LOG.warning("cannot dial: %s", error.strerror)
            return
        self._connections.add(connection)
        connection.dial()

    def _pause(self, listener: socket.socket, accept: functools.partial[None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._reopen[listener] = loop.call_later(_ACCEPT_AGAIN_S, loop.add_reader, listener, accept)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for timer in self._reopen.values():
            timer.cancel()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections):
            connection.close()
        for link in self._links.values():
            link.close()


def _transmitter(shape: LinkShape, seed: int) -> Transmitter:
    """Return a link's clock; its jitter depends on nothing but the seed and the link."""
    jitter = random.Random(f"{seed}/{shape.source}/{shape.target}")  # noqa: S311 - not a secret
    return Transmitter(shape, jitter.random)


async def _resolve(host: str, port: int) -> Address:
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(
            loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), _RESOLVE_WITHIN_S
        )
    except (OSError, UnicodeError, TimeoutError) as error:
        raise ConfigError(f"host {host!r} has no address: {str(error) or 'no answer'}") from error
    family, _, _, _, address = found[0]
    return family, address
