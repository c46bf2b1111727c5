"""The receiving side of all links: what a gateway serves to the gateways of other sites.

Each call has a connection of its own (`frame_calls.py`), and is a task of the gateway's event loop
(`wire_loop.py`), which waits for nothing but peers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
import time
from concurrent.futures import wait
from typing import Final, Protocol

from isthmus.protos.errors import (
    ConfigMismatchError,
    CorruptDataError,
    IsthmusError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    failure_of,
)
from isthmus.protos.exchange.v1.exchange_pb2 import (
    HelloRequest,
    HelloResponse,
    LeaveRequest,
    LeaveResponse,
)
from isthmus.protos.failure import Failure
from isthmus.protos.frame import Frame, Kind, pack_ack, unpack
from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.protos.mutual_tls import Caller
from isthmus.protos.security import exchange_security, require_own_site, require_protected
from isthmus.protos.versions import (
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
    negotiate,
)
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.calls import Serve, ServedCall, answering
from isthmus.sites.gateway.links.congestion.connections import CHANNELS_MAX
from isthmus.sites.gateway.links.frame_calls import FrameCall
from isthmus.sites.gateway.links.frame_listener import FrameListener
from isthmus.sites.gateway.links.reversed_calls import InboundProxy
from isthmus.sites.gateway.links.transport import (
    HELLO_METHOD,
    LEAVE_METHOD,
    PUSH_METHOD,
    REVERSE_METHOD,
    SESSION_KEY,
    patience,
)
from isthmus.sites.gateway.links.wire_loop import WireLoop
from isthmus.sites.interfaces import address_of
from isthmus.topology.spec.world import Endpoint

_log = logging.getLogger(__name__)

_CORRUPT_FRAMES_MAX = 3
"""Corrupt frames accepted from a peer in a run; each is requested again."""
_BROKEN_PROMISES: Final = frozenset(
    {
        "CONFIG_MISMATCH",
        "CORRUPT_DATA",
        "LAYOUT_MISMATCH",
        "NEVER_ATTACHED",
        "NON_FINITE",
        "NO_TOKENS",
        "PROTOCOL_VIOLATION",
    }
)
"""Errors that end the run for all sites, not only for the one that reports them."""
_START_S = 10.0
_STOP_S = 5.0
_OTHER_CALLS = 16
"""Connections of a peer beside those that carry frames: greetings, a state, calls of Reverse."""


class Receiver(Protocol):
    """Receives frames and notices of peers. Called on the loop's thread, and never waits."""

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Accept a frame; never wait."""

    def greeted(self, sender: GatewayId) -> None:
        """A peer's heartbeat has arrived."""

    def peer_left(self, sender: GatewayId) -> None:
        """A peer has finished its run."""

    def peer_ended(self, sender: GatewayId, why: str) -> None:
        """A peer ends before its run has."""

    def fail(self, failure: Failure) -> None:
        """Report a failure that ends the run."""


class ExchangeServer:
    """The server of one gateway. Add `methods` before `start`."""

    def __init__(self, config: GatewayConfig, receiver: Receiver) -> None:
        self._config = config
        self._receiver = receiver
        self._wire: WireLoop | None = None
        self._listener: FrameListener | None = None
        self.methods: dict[str, Serve] = {
            HELLO_METHOD: answering(self._hello, HelloRequest),
            LEAVE_METHOD: answering(self._leave, LeaveRequest),
            PUSH_METHOD: self._push,
            REVERSE_METHOD: self._reverse,
        }
        """Handlers by path; also served to peers that this gateway dials."""
        self._sessions: dict[str, GatewayId] = {}
        self._proxies: dict[GatewayId, InboundProxy] = {}
        self._corrupt: dict[GatewayId, int] = {}

    def inbound_proxy(self, sender: GatewayId) -> InboundProxy:
        """Return the proxy of a gateway that only dials out."""
        if sender not in self._proxies:
            site, gateway = sender
            self._proxies[sender] = InboundProxy(self._config.sites[site], gateway)
        return self._proxies[sender]

    def start(self) -> Endpoint:
        """Listen as configured; return the address for peers, with port 0 if they cannot dial.

        Raises:
            InsecureAddressError: other hosts could reach the address without TLS.
            OSError: no port there can be bound.
        """
        self._wire = WireLoop.acquire()
        try:
            return self._wire.run(self._start()).result(_START_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all calls and stop. Idempotent."""
        wire, self._wire = self._wire, None
        if wire is None:
            return
        wait([wire.run(self._stop())], _STOP_S)
        WireLoop.release()

    async def _start(self) -> Endpoint:
        config = self._config
        if not config.listens:
            return Endpoint(host="", port=0)
        gateways = sum(
            config.gateways_per_site[config.sites.index(each.site)] * (2 if each.dials_in else 1)
            for each in config.links
        )
        host = config.bind_host
        if not host:
            host = address_of(config.interface)
            require_protected(host)
        listening = self._listen(host)
        self._listener = FrameListener(
            listening,
            self.methods,
            exchange_security(config.site),
            patience(config),
            # Twice as many: some come back while their broken predecessors still end.
            2 * gateways * (CHANNELS_MAX + _OTHER_CALLS),
        )
        self._listener.begin()
        return Endpoint(host=config.dialled_host or host, port=listening.getsockname()[1])

    def _listen(self, host: str) -> socket.socket:
        """Bind the first free port; gateways of a node start at different ones."""
        ports, family = self._config.ports, socket.AF_INET6 if ":" in host else socket.AF_INET
        wanted = [0] if ports is None else list(range(ports.first, ports.last + 1))
        begin = self._config.gateway % len(wanted)
        for port in wanted[begin:] + wanted[:begin]:
            with contextlib.suppress(OSError):
                return _bound(family, host, port)
        if ports is not None:
            raise OSError(
                f"cannot listen on {host}: no port from {ports.first} to {ports.last} is free, or "
                "it is no address of this machine"
            )
        raise OSError(f"cannot listen on {host}: is it an address of this machine?")

    async def _stop(self) -> None:
        if self._listener is not None:
            await self._listener.close()

    # ---------------------------------------------------------------- the service

    async def _hello(self, request: HelloRequest, call: ServedCall) -> HelloResponse:
        """Open a session; a repeated question has the same answer."""
        try:
            require_own_site(call, request.site)
            protocol, sender = self._admit(request)
        except IsthmusError as error:
            _log.warning("refused site %r: %s", request.site, error)
            raise
        self._receiver.greeted(sender)
        return HelloResponse(protocol=protocol, build=build(), session=self.session_of(sender))

    async def _leave(self, request: LeaveRequest, call: ServedCall) -> LeaveResponse:
        """A peer says that it ends."""
        sender = self._sender_of(request.session, call)
        site = self._config.sites[sender[0]]
        why = f"told by site {site}: {request.message}"
        if not request.code:
            _log.info("site %s has finished", site)
            self._receiver.peer_left(sender)
        elif request.code not in _BROKEN_PROMISES:
            self._receiver.peer_ended(sender, why)
        else:
            self._receiver.fail(
                Failure(
                    code=request.code,
                    message=why,
                    site=request.site or site,
                    rank=request.rank,
                    is_collateral=True,
                )
            )
        return LeaveResponse()

    async def _reverse(self, call: ServedCall) -> None:
        """A gateway that only dials out opens a connection for a call to it.

        Raises:
            RemoteProtocolError: it is no gateway that only dials out.
        """
        sender = self._sender_of(_session_in(call), call)
        if not isinstance(call, FrameCall):
            raise RemoteProtocolError("a gateway that was dialled asks to be dialled")
        await self.inbound_proxy(sender).serve(call)

    async def _push(self, call: ServedCall) -> None:
        """Accept frames one after another, and acknowledge each."""
        sender = self._sender_of(_session_in(call), call)
        await call.take_each(functools.partial(self.take, sender))

    # ---------------------------------------------------------------- what a peer wants

    def take(self, sender: GatewayId, message: memoryview) -> bytes:
        """Accept a frame, and return its acknowledgement.

        Raises:
            IsthmusError: the frame is refused; any effect on the run is already handled.
        """
        try:
            frame = unpack(message)
        except CorruptDataError as error:
            self._count_corrupt(sender, error)
            raise
        except IsthmusError as error:
            self._receiver.fail(failure_of(error, self._config.sites[sender[0]]))
            raise
        try:
            if frame.key.kind is not Kind.PADDING:
                self._receiver.receive(sender, frame)
        except IsthmusError as error:
            self._receiver.fail(failure_of(error, self._config.sites[sender[0]]))
            raise
        except Exception as error:  # a task's root: else the peer resends for ever
            _log.exception("could not handle a frame of round %d", frame.key.round)
            self._receiver.fail(failure_of(error))
            raise
        return pack_ack(frame.key, frame.epoch, time.monotonic())

    # ---------------------------------------------------------------- who may do what

    def _admit(self, request: HelloRequest) -> tuple[int, GatewayId]:
        """Return the protocol to speak and who the caller is.

        Raises:
            RemoteProtocolError: a field exceeds its limit.
            ConfigMismatchError: the caller has another configuration or protocol.
            StaleGenerationError: the caller belongs to another run or generation.
        """
        config = self._config
        if request.ByteSize() > CONTROL_MESSAGE_BYTES:
            raise RemoteProtocolError(f"a Hello of {request.ByteSize()} bytes")
        protocol = negotiate(
            (EXCHANGE_PROTOCOL_MIN, EXCHANGE_PROTOCOL_MAX),
            (request.protocol_min, request.protocol_max),
        )
        if protocol is None:
            raise ConfigMismatchError(
                f"site {request.site} (build {request.build}) speaks exchange protocols "
                f"{request.protocol_min} to {request.protocol_max}; site {config.site} (build "
                f"{build()}) speaks {EXCHANGE_PROTOCOL_MIN} to {EXCHANGE_PROTOCOL_MAX}"
            )
        if (request.run_id, request.generation) != (config.run_id, config.generation):
            raise StaleGenerationError(
                f"site {request.site} acts for run {request.run_id} generation "
                f"{request.generation}; here it is run {config.run_id} generation "
                f"{config.generation}"
            )
        if request.config_hash != config.config_hash:
            raise ConfigMismatchError(
                f"site {request.site} has configuration {request.config_hash[:12]}, site "
                f"{config.site} has {config.config_hash[:12]}: give both the same documents"
            )
        if request.site not in (link.site for link in config.links):
            raise ConfigMismatchError(f"site {config.site} has no link from site {request.site!r}")
        index = config.sites.index(request.site)
        if request.gateway >= config.gateways_per_site[index]:
            raise ConfigMismatchError(f"site {request.site} has no gateway {request.gateway}")
        return protocol, (index, request.gateway)

    def site_of(self, call: ServedCall) -> str:
        """Return the site of a call's session.

        Raises:
            StaleGenerationError: the session is unknown.
            PermissionDeniedError: the session is another site's.
        """
        return self._config.sites[self._sender_of(_session_in(call), call)[0]]

    def session_of(self, sender: GatewayId) -> str:
        """Return a gateway's session here."""
        for session, known in self._sessions.items():
            if known == sender:
                return session
        session = secrets.token_hex(16)
        self._sessions[session] = sender
        return session

    def _sender_of(self, session: str, caller: Caller) -> GatewayId:
        """Return the gateway that owns a session.

        Raises:
            StaleGenerationError: the session is unknown.
            PermissionDeniedError: the session belongs to another site than the caller.
        """
        sender = self._sessions.get(session)
        if sender is None:
            raise StaleGenerationError("an unknown session: say Hello first")
        try:
            require_own_site(caller, self._config.sites[sender[0]])
        except PermissionDeniedError as error:
            _log.warning("refused: %s", error)
            raise
        return sender

    def _count_corrupt(self, sender: GatewayId, error: CorruptDataError) -> None:
        """Count a corrupt frame, which the peer sends again; too many end the run."""
        site = self._config.sites[sender[0]]
        count = self._corrupt[sender] = self._corrupt.get(sender, 0) + 1
        _log.warning("a frame from site %s was damaged on its way: %s", site, error)
        if count > _CORRUPT_FRAMES_MAX:
            self._receiver.fail(
                Failure(
                    code=error.code,
                    message=f"{count} frames from site {site} were damaged on their way; {error}",
                    site=site,
                )
            )


def _bound(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """Return a socket bound exclusively to a port.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1)
    except BaseException:
        bound.close()
        raise
    return bound


def _session_in(call: Caller) -> str:
    """Return the session that a call names in its metadata; empty if it names none."""
    return str(dict(call.invocation_metadata()).get(SESSION_KEY, ""))
