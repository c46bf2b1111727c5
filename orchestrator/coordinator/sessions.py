"""The agents' sessions: who is there, what they have yet to get, and when a session is over.

A session outlives its connections: an agent whose connection broke dials again within its lease,
and both sides send again what is missing (protos/numbered.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable

from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import (
    ConfigMismatchError,
    IsthmusError,
    PeerLostError,
    RemoteProtocolError,
    StaleGenerationError,
)
from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.protos.numbered import Numbered
from isthmus.protos.versions import CONTROL_PROTOCOL_MAX, CONTROL_PROTOCOL_MIN, build, negotiate
from isthmus.topology.spec.lanes import AgentMachine

WAITING_MESSAGES = 64
"""Answers to heartbeats that may wait: an agent that reads so little is gone."""
KEPT_MESSAGES = 4096
"""Messages that an agent may leave unacknowledged: a run has a few, an epoch a few more."""

Read = Callable[[], Awaitable[control_pb2.AgentMessage | None]]
Write = Callable[[control_pb2.CoordinatorMessage], Awaitable[None]]


class Session:
    """One agent. Whoever serves its connection reads; everybody else only sends and closes."""

    def __init__(self, hello: control_pb2.Hello, protocol: int) -> None:
        self.site = hello.site
        self.host = hello.host
        self.usable_cores = hello.usable_cores
        self.incarnation = hello.incarnation
        self.protocol = protocol
        self.id = uuid.uuid4().hex
        self.connection: Connection | None = None
        """The newest; None: the last one broke."""
        self.certificate = b""
        """What its agent has shown last (PEM); empty without TLS."""
        self.is_leaving = False
        """Its agent has said that the session is over."""
        self.stopped: set[tuple[str, int]] = set()
        """Runs, and their generations, that do not go on and that its agent was told to stop."""
        self.numbered: Numbered[control_pb2.CoordinatorMessage] = Numbered()

    def send(self, message: control_pb2.CoordinatorMessage) -> None:
        """Send a message, on this connection or a later one. Who never reads loses its session."""
        self.numbered.add(message)
        if len(self.numbered) > KEPT_MESSAGES:
            self.close(PeerLostError(f"site {self.site}: its agent does not read", self.site))
        elif self.connection is not None:
            self.connection.wake()

    def answer(self, message: control_pb2.CoordinatorMessage) -> None:
        """Send a message that is worth nothing on another connection, before all others."""
        if self.connection is not None:
            self.connection.put_first(message)

    def close(self, error: IsthmusError | None = None) -> None:
        """End the connection; its `serve` raises `error`. A second call changes nothing."""
        if self.connection is not None:
            self.connection.close(error)

    def connect(self) -> Connection:
        """Begin another connection; one that is still there is closed."""
        self.close(StaleGenerationError(f"site {self.site}: its agent has a newer connection"))
        self.connection = Connection(self)
        return self.connection

    def begin_anew(self) -> None:
        """Talk to an agent that knows nothing of this session: it gets what it has yet to get."""
        self.id = uuid.uuid4().hex
        self.numbered.begin_anew()


class Connection:
    """One stream of an agent's session. `serve` owns it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._sent = session.numbered.acknowledged
        self._acknowledged = session.numbered.received
        """What the agent knows to have been received."""
        self._first: deque[control_pb2.CoordinatorMessage] = deque()
        self._filled = asyncio.Event()
        self._closed: asyncio.Future[None] = asyncio.Future()

    @property
    def is_newest(self) -> bool:
        """Whether its agent has no newer one."""
        return self.session.connection is self

    def put_first(self, message: control_pb2.CoordinatorMessage) -> None:
        """Send a message before all others."""
        self._first.append(message)
        self._filled.set()
        if len(self._first) > WAITING_MESSAGES:
            site = self.session.site
            self.close(PeerLostError(f"site {site}: its agent does not read", site))

    def wake(self) -> None:
        """Look for messages of the session."""
        self._filled.set()

    def close(self, error: IsthmusError | None = None) -> None:
        """End it; `serve` raises `error`. A second call changes nothing."""
        if not self._closed.done():
            if error is None:
                self._closed.set_result(None)
            else:
                self._closed.set_exception(error)
                self._closed.exception()  # nobody may serve it any more

    async def serve(
        self, read: Read, write: Write, on_message: Callable[[control_pb2.AgentMessage], None]
    ) -> None:
        """Carry messages both ways until the agent leaves or the connection is closed.

        Raises:
            IsthmusError: why the coordinator ends it.
        """
        site = self.session.site
        tasks = [
            asyncio.create_task(self._receive(read, on_message), name=f"receive-{site}"),
            asyncio.create_task(self._send(write), name=f"send-{site}"),
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

    async def _receive(
        self, read: Read, on_message: Callable[[control_pb2.AgentMessage], None]
    ) -> None:
        numbered, site = self.session.numbered, self.session.site
        while (message := await read()) is not None:
            if self._closed.done():
                return
            if message.ByteSize() > CONTROL_MESSAGE_BYTES:
                raise RemoteProtocolError(
                    f"site {site}: a message of {message.ByteSize()} bytes; "
                    f"the limit is {CONTROL_MESSAGE_BYTES}"
                )
            numbered.acknowledge(message.received)
            self._sent = max(self._sent, numbered.acknowledged)
            before = numbered.received
            if numbered.takes(message.sequence):
                try:
                    on_message(message)
                except BaseException:
                    # Only what is on disk is acknowledged: the next coordinator has to get it.
                    numbered.received = before
                    raise
                self.wake()

    async def _send(self, write: Write) -> None:
        numbered = self.session.numbered
        while True:
            if self._first:
                message = self._first.popleft()
            elif (kept := numbered.after(self._sent)) is not None:
                message = kept
                self._sent += 1
                message.sequence = self._sent
            elif self._acknowledged < numbered.received:
                message = control_pb2.CoordinatorMessage()  # it says what has been received
            else:
                self._filled.clear()
                await self._filled.wait()
                continue
            message.received = self._acknowledged = numbered.received
            await write(message)


class Sessions:
    """At most one session a site."""

    def __init__(self, sites: tuple[str, ...], topology_hash: str) -> None:
        self._sites = sites
        self._topology_hash = topology_hash
        self._by_site: dict[str, Session] = {}

    def hosts(self) -> dict[str, str]:
        """Return the sites that have an agent, and where it runs."""
        return {site: session.host for site, session in self._by_site.items()}

    def machines(self) -> dict[str, AgentMachine]:
        """Return the sites whose agents have said how many cores they may use, and where."""
        return {
            site: AgentMachine(host=session.host, usable_cores=session.usable_cores)
            for site, session in self._by_site.items()
            if session.usable_cores
        }

    def admit(self, hello: control_pb2.Hello) -> tuple[Session, bool]:
        """Return the session of an agent, which has yet to connect, and whether it goes on.

        Raises:
            ConfigMismatchError: another version, another topology, or no site of this one.
            StaleGenerationError: another agent has the site, for as long as its lease lasts.
            RemoteProtocolError: it has received what was never sent.
        """
        protocol = self._check(hello)
        session = self._by_site.get(hello.site)
        if session is None:
            session = self._by_site[hello.site] = Session(hello, protocol)
            return session, False
        if session.incarnation != hello.incarnation:
            raise StaleGenerationError(
                f"site {hello.site} has an agent already, on host {session.host or 'unknown'}: "
                "end that one, or wait until its lease has ended"
            )
        if hello.session != session.id:
            session.begin_anew()
            return session, False
        session.numbered.acknowledge(hello.received)
        return session, True

    def remove(self, session: Session) -> bool:
        """Forget a session; False if it was not the site's any more."""
        if self._by_site.get(session.site) is not session:
            return False
        del self._by_site[session.site]
        return True

    def get(self, site: str) -> Session | None:
        """Return a site's session, if it has one."""
        return self._by_site.get(site)

    def all(self) -> list[Session]:
        """Return the sites' sessions."""
        return list(self._by_site.values())

    def close(self) -> None:
        """End all of them."""
        for session in self.all():
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
