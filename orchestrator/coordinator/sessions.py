"""The agents' sessions: who is there, what waits to be sent to them, and when a session is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protos.control.v1 import control_pb2
from protos.errors import (
    ConfigMismatchError,
    IsthmusError,
    PeerLostError,
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.limits import CONTROL_MESSAGE_BYTES
from protos.versions import CONTROL_PROTOCOL_MAX, CONTROL_PROTOCOL_MIN, build, negotiate

WAITING_MESSAGES = 64
"""To one agent: a run has four, heartbeats one each; an agent that reads so little is gone."""

Read = Callable[[], Awaitable[control_pb2.AgentMessage | None]]
Write = Callable[[control_pb2.CoordinatorMessage], Awaitable[None]]


@dataclass(eq=False)
class Session:
    """One agent's stream. `serve` owns it; everybody else only sends and closes."""

    site: str
    host: str
    incarnation: str
    protocol: int
    _waiting: asyncio.Queue[control_pb2.CoordinatorMessage] = field(
        default_factory=lambda: asyncio.Queue(WAITING_MESSAGES)
    )
    _closed: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def send(self, message: control_pb2.CoordinatorMessage) -> None:
        """Queue a message. An agent that does not read loses its session."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.close(PeerLostError(f"site {self.site}: its agent does not read", self.site))

    def close(self, error: IsthmusError | None = None) -> None:
        """End the session; `serve` raises `error`. A second call changes nothing."""
        if not self._closed.done():
            if error is None:
                self._closed.set_result(None)
            else:
                self._closed.set_exception(error)

    async def serve(
        self, read: Read, write: Write, on_message: Callable[[control_pb2.AgentMessage], None]
    ) -> None:
        """Carry messages both ways until the agent leaves or the session is closed.

        Raises:
            IsthmusError: why the coordinator ends it.
        """
        tasks = [
            asyncio.create_task(self._receive(read, on_message), name=f"receive-{self.site}"),
            asyncio.create_task(self._send(write), name=f"send-{self.site}"),
        ]
        try:
            done, _ = await asyncio.wait(
                [*tasks, self._closed], return_when=asyncio.FIRST_COMPLETED
            )
            for each in done:
                each.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.close()
            self._closed.exception()

    async def _receive(
        self, read: Read, on_message: Callable[[control_pb2.AgentMessage], None]
    ) -> None:
        while (message := await read()) is not None:
            if self._closed.done():
                return
            if message.ByteSize() > CONTROL_MESSAGE_BYTES:
                raise RemoteProtocolError(
                    f"site {self.site}: a message of {message.ByteSize()} bytes; "
                    f"the limit is {CONTROL_MESSAGE_BYTES}"
                )
            on_message(message)

    async def _send(self, write: Write) -> None:
        while True:
            await write(await self._waiting.get())


class Sessions:
    """At most one session a site."""

    def __init__(self, sites: tuple[str, ...], topology_hash: str) -> None:
        self._sites = sites
        self._topology_hash = topology_hash
        self._by_site: dict[str, Session] = {}

    def hosts(self) -> dict[str, str]:
        """Return the sites that have an agent, and where it runs."""
        return {site: session.host for site, session in self._by_site.items()}

    def admit(self, hello: control_pb2.Hello) -> tuple[Session, Session | None]:
        """Return a new session, and the one of the same agent that it replaces, which is closed.

        Raises:
            ConfigMismatchError: another version, another topology, or no site of this one.
            StaleGenerationError: another agent has the site, for as long as its lease lasts.
        """
        protocol = self._check(hello)
        old = self._by_site.get(hello.site)
        if old is not None and old.incarnation != hello.incarnation:
            raise StaleGenerationError(
                f"site {hello.site} has an agent already, on host {old.host or 'unknown'}: "
                "end that one, or wait until its lease has ended"
            )
        if old is not None:
            old.close(StaleGenerationError(f"site {hello.site}: its agent has a newer session"))
        session = Session(hello.site, hello.host, hello.incarnation, protocol)
        self._by_site[hello.site] = session
        return session, old

    def remove(self, session: Session) -> bool:
        """Forget a session; False if it was not the site's any more."""
        if self._by_site.get(session.site) is not session:
            return False
        del self._by_site[session.site]
        return True

    def get(self, site: str) -> Session | None:
        """Return a site's session, if it has one."""
        return self._by_site.get(site)

    def close(self) -> None:
        """End all of them."""
        for session in list(self._by_site.values()):
            session.close()

    def _check(self, hello: control_pb2.Hello) -> int:
        ours = (CONTROL_PROTOCOL_MIN, CONTROL_PROTOCOL_MAX)
        theirs = (hello.protocol_min, hello.protocol_max)
        protocol = negotiate(ours, theirs)
        if protocol is None:
            raise ConfigMismatchError(
                f"this coordinator ({build()}) speaks versions {ours[0]} to {ours[1]}, the agent "
                f"({hello.build or 'unknown'}) {theirs[0]} to {theirs[1]}: give both the same build"
            )
        if hello.site not in self._sites:
            raise ConfigMismatchError(
                f"the topology has no site {hello.site!r}; there are {', '.join(self._sites)}"
            )
        if hello.topology_hash != self._topology_hash:
            raise ConfigMismatchError(
                f"site {hello.site} has another topology ({hello.topology_hash[:12] or 'none'}) "
                f"than the coordinator ({self._topology_hash[:12]}): "
                "give both the same file and --set"
            )
        return protocol
