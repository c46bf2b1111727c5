"""The relay: one listening port per source site and gateway of another site.

It is used in a process's own event loop, `async with Relay(config) as relay`, or as a child
process, `python -m isthmus.orchestrator.emulator.relay`. The child reads one line of JSON
(emulator_config.py) from stdin, prints its addresses, then the counters once a second. Further
lines of stdin change links at once, or make the relay forward to gateways started since; each is
answered, followed by the current counters. The child ends when stdin does, so with its parent too.

The relay ends TCP on both sides, so it cannot show TCP's own behaviour on a long path: slow start,
congestion control and retransmission, window limits. link_shape.py describes its model of loss,
relay_connection.py that of cuts. The kernel accepts a connection that is
dialled across a cut, for the relay's listener is on this machine. Such a connection gets no answer
before the link is healed, when the relay dials the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import resource
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from isthmus.orchestrator.emulator.emulator_config import (
    MAX_ENDPOINTS,
    Counted,
    RelayConfig,
    RelayEndpoint,
    Up,
    check_changes,
    check_endpoints,
)
from isthmus.orchestrator.emulator.link_shape import LinkShape, Transmitter
from isthmus.orchestrator.emulator.owner_pipes import (
    Conversation,
    LineReader,
    be_punctual,
    run_emulator,
)
from isthmus.orchestrator.emulator.relay_connection import Address, Connection, Listener, SharedLink
from isthmus.protos.failure import text_of
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError

MAX_CONNECTIONS = 1024
"""Limit on connections, more than sites ever open; further ones are closed at once."""
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
        self._listeners: list[tuple[RelayEndpoint, Listener]] = []
        """Listeners, each with the gateway it forwards to."""
        self._connections: set[Connection] = set()
        self.endpoints: tuple[RelayEndpoint, ...] = ()
        """Addresses to dial, in the order of the configuration; empty before entering."""

    async def __aenter__(self) -> Relay:
        self.endpoints = self.lead(self._config.endpoints)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    @property
    def num_connections(self) -> int:
        """Number of connections that are open at either end, or have bytes in flight."""
        return len(self._connections)

    def counters(self) -> Counted:
        """Return totals since the start, and bytes held now."""
        return Counted(
            links=tuple(
                {
                    "source": source,
                    "target": target,
                    "sent_bytes": link.sent_bytes,
                    "delivered_bytes": link.delivered_bytes,
                    "dropped_packets": 0,  # a full queue makes senders wait instead
                    "lost_packets": link.transmitter.lost_packets,
                    "queued_bytes": link.held_bytes,
                }
                for (source, target), link in self._links.items()
            )
        )

    def apply(self, changes: Sequence[Change]) -> None:
        """Make all changes now, in order.

        Raises:
            ConfigError: a link does not exist; then no change is made.
        """
        check_changes(changes, self._links)
        for change in changes:
            self._make(change)
        for _, listener in self._listeners:
            listener.update()

    def lead(self, endpoints: Sequence[RelayEndpoint]) -> tuple[RelayEndpoint, ...]:
        """Forward to these gateways, too; return the addresses to dial instead, in the same order.

        They replace earlier gateways with the same site and number.

        Raises:
            ConfigError: there is no link, a host has no address, or a port cannot be bound. Then
                the relay is unchanged.
        """
        check_endpoints(endpoints, self._links)
        opened: list[tuple[RelayEndpoint, Listener]] = []
        endpoints_here = []
        try:
            for endpoint in endpoints:
                listener, port = self._listen(endpoint)
                opened.append((endpoint, listener))
                endpoints_here.append(replace(endpoint, host=self._config.bind_host, port=port))
        except BaseException:
            _close_all(opened)
            raise
        renewed = {_gateway(endpoint) for endpoint in endpoints}
        _close_all(each for each in self._listeners if _gateway(each[0]) in renewed)
        kept = [each for each in self._listeners if _gateway(each[0]) not in renewed]
        self._listeners = [*kept, *opened]
        return tuple(endpoints_here)

    def _make(self, change: Change) -> None:
        link = self._links[change.source, change.target]
        now_s = asyncio.get_running_loop().time()
        match change.kind:
            case "shape":
                link.reshape(change.figures(), now_s)
            case "cut":
                link.cut()
            case "heal":
                link.heal(now_s)
            case _:  # a reset
                for connection in list(self._connections):
                    if connection.joins(change.source, change.target):
                        connection.close()

    def _listen(self, endpoint: RelayEndpoint) -> tuple[Listener, int]:
        """Open a listener for a gateway, and return it with its port."""
        gateway = _resolve(endpoint.host, endpoint.port)
        family, address = _resolve(self._config.bind_host, 0)
        there = self._links[endpoint.source, endpoint.target]
        back = self._links[endpoint.target, endpoint.source]
        accepted = functools.partial(self._accepted, gateway, there, back)
        try:
            listener = Listener(family, there, back, accepted)
        except OSError as error:
            raise self._unbound(error) from error
        try:
            return listener, listener.open(address)
        except OSError as error:
            listener.close()
            raise self._unbound(error) from error

    def _unbound(self, error: OSError) -> ConfigError:
        return ConfigError(f"bind_host: {self._config.bind_host}: {error.strerror}")

    def _accepted(
        self, gateway: Address, there: SharedLink, back: SharedLink, dialler: socket.socket
    ) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            dialler.close()
            return
        try:
            connection = Connection(dialler, gateway, there, back, self._connections.discard)
        except OSError as error:
            dialler.close()
            _LOG.warning("cannot dial: %s", error.strerror)
            return
        self._connections.add(connection)
        connection.dial()

    def _close(self) -> None:
        _close_all(self._listeners)
        self._listeners.clear()
        for connection in list(self._connections):
            connection.close()
        for link in self._links.values():
            link.close()


def _transmitter(shape: LinkShape, seed: int) -> Transmitter:
    """Return a link's transmitter; jitter and losses depend only on the seed and the link."""
    link = f"{seed}/{shape.source}/{shape.target}"
    jitter, losses = random.Random(link), random.Random(f"{link}/loss")  # noqa: S311 - no secrets
    return Transmitter(shape, jitter.random, losses)


def _gateway(endpoint: RelayEndpoint) -> tuple[str, str, int]:
    """Return the endpoint's identity without its address: (source, target, gateway)."""
    return endpoint.source, endpoint.target, endpoint.gateway


def _close_all(listeners: Iterable[tuple[RelayEndpoint, Listener]]) -> None:
    for _, listener in listeners:
        listener.close()


def _resolve(host: str, port: int) -> Address:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} has no address: {text_of(error)}") from error
    family, _, _, _, address = found[0]
    return family, address


_MAX_DESCRIPTORS = 2 * MAX_CONNECTIONS + MAX_ENDPOINTS
"""Two per connection, plus the listeners of the largest number of gateways."""


def main() -> int:
    """Run the relay until stdin ends; return the exit status."""
    return run_emulator("relay", RelayConfig, _run)


def _run(config: RelayConfig, stdin: LineReader) -> None:
    _allow_descriptors()
    be_punctual()
    asyncio.run(_serve(config, stdin))


async def _serve(config: RelayConfig, stdin: LineReader) -> None:
    loop = asyncio.get_running_loop()
    async with Relay(config) as relay:
        with _noticed(stdin.descriptor) as readable:
            owner = Conversation(
                stdin, sys.stdout.fileno(), relay.apply, relay.counters, relay.lead
            )
            owner.begin(Up(endpoints=relay.endpoints), loop.time())
            while not stdin.has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(owner.turn(loop.time())):
                        await readable.wait()
                if readable.is_set():
                    readable.clear()
                    stdin.read()
            owner.end()


@contextlib.contextmanager
def _noticed(descriptor: int) -> Iterator[asyncio.Event]:
    """Yield an event that is set while `descriptor` can be read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError as error:
        raise ConfigError("stdin must be a pipe; the relay ends when it is closed") from error
    try:
        yield readable
    finally:
        loop.remove_reader(descriptor)


def _allow_descriptors() -> None:
    """Raise the limit on open files, usually 1024, to what the relay may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
