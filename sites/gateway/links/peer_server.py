"""The receiving side of all links: what a gateway serves to the gateways of other sites.

gRPC's library serves Hello, Leave and ReverseTunnel. Push and Pull, which carry frames, use the
next port, the frames port (`frame_calls.py`). Each call is a task of the gateway's event loop
(`wire_loop.py`), which waits for nothing but peers.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import ExitStack
from typing import Any, Final, Never, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from isthmus.protos.error_statuses import STATUS
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
from isthmus.protos.exchange.v1.exchange_pb2_grpc import (
    ExchangeServicer,
    add_ExchangeServicer_to_server,
)
from isthmus.protos.failure import Failure
from isthmus.protos.frame import Frame, Kind, pack_ack, unpack
from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.protos.mutual_tls import Caller
from isthmus.protos.security import Security, exchange_security, require_own_site, require_protected
from isthmus.protos.versions import (
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
    negotiate,
)
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.congestion.connections import CHANNELS_MAX
from isthmus.sites.gateway.links.frame_calls import CallError, FrameCall
from isthmus.sites.gateway.links.frame_listener import FrameListener, Serve
from isthmus.sites.gateway.links.inbound_proxy import CarriedContext, InboundProxy
from isthmus.sites.gateway.links.transport import (
    PULL_METHOD,
    PUSH_METHOD,
    SESSION_KEY,
    patience,
    server_options,
)
from isthmus.sites.gateway.links.wire_loop import WireLoop
from isthmus.sites.interfaces import address_of
from isthmus.topology.spec.world import GATEWAY_PORTS, Endpoint

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
_STOP_GRACE_S = 0.2
_START_S = 10.0
_STOP_S = 5.0
_PAIRS_MAX = 64
"""Attempts to find two neighbouring free ports, if any port will do."""

Context = grpc.aio.ServicerContext[Any, Any]


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


class ExchangeServer(ExchangeServicer):
    """The gRPC server of one gateway."""

    def __init__(self, config: GatewayConfig, receiver: Receiver) -> None:
        self._config = config
        self._receiver = receiver
        self._wire: WireLoop | None = None
        self._server: grpc.aio.Server | None = None
        self._listener: FrameListener | None = None
        self._servicers: list[Callable[[grpc.aio.Server], None]] = []
        self._frame_methods: dict[str, Serve] = {PUSH_METHOD: self._push, PULL_METHOD: self._pull}
        self._sessions: dict[str, GatewayId] = {}
        self._proxies: dict[GatewayId, InboundProxy] = {}
        self._carried: dict[str, tuple[Callable[..., Any], Callable[[bytes], Any]]] = {}
        self.carry("Hello", self.Hello, HelloRequest.FromString)
        self.carry("Leave", self.Leave, LeaveRequest.FromString)
        self._corrupt: dict[GatewayId, int] = {}

    def inbound_proxy(self, sender: GatewayId) -> InboundProxy:
        """Return the proxy of a gateway that only dials out; call after `start`."""
        if sender not in self._proxies:
            assert self._wire is not None, "it has been started"
            site, gateway = sender
            self._proxies[sender] = InboundProxy(self._config.sites[site], gateway, self._wire)
        return self._proxies[sender]

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Register another service, before `start`."""
        self._servicers.append(register)

    def serve(self, method: str, serve: Serve) -> None:
        """Serve another method on the frames port; call before `start`."""
        self._frame_methods[method] = serve

    def start(self) -> Endpoint:
        """Listen as configured; return the address for peers, with port 0 if they cannot dial.

        The frames port is the next one.

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
        """End all streams and stop. Idempotent."""
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
        # Twice the streams: some come back while their broken predecessors still end.
        num_rpcs = 2 * gateways * CHANNELS_MAX + 2 * gateways + 2
        guard = exchange_security(config.site)
        server = self._server = guard.server(server_options(config), num_rpcs)
        add_ExchangeServicer_to_server(self, server)
        for register in self._servicers:
            register(server)
        host = config.bind_host
        if not host:
            host = address_of(config.interface)
            require_protected(host)
        port, frames = self._listen(guard, server, host)
        self._listener = FrameListener(
            frames, self._frame_methods, guard, patience(config), num_rpcs
        )
        self._listener.begin()
        await server.start()
        return Endpoint(host=config.told_host or host, port=port)

    def _listen(
        self, guard: Security, server: grpc.aio.Server, host: str
    ) -> tuple[int, socket.socket]:
        """Bind the first two free neighbouring ports; gateways of a node start at different ones.

        Return the lower port, which gRPC serves and peers are given, and a socket at the frames
        port.
        """
        ports, family = self._config.ports, socket.AF_INET6 if ":" in host else socket.AF_INET
        wanted = [0] * _PAIRS_MAX
        if ports is not None:
            wanted = list(range(ports.first, ports.last, GATEWAY_PORTS))
        begin = self._config.gateway % max(1, len(wanted))
        for first in wanted[begin:] + wanted[:begin]:
            with contextlib.suppress(OSError, OverflowError, RuntimeError), ExitStack() as stack:
                # Try the port first: gRPC prints to stderr each time it cannot bind.
                tried = stack.enter_context(_bound(family, host, first))
                port = tried.getsockname()[1]
                frames = stack.enter_context(_bound(family, host, port + 1))
                tried.close()
                guard.listen(server, str(Endpoint(host=host, port=port)))
                stack.pop_all()
                return port, frames
        if ports is not None:
            raise OSError(
                f"cannot listen on {host}: no two neighbouring ports from {ports.first} to "
                f"{ports.last} are free, or it is no address of this machine"
            )
        raise OSError(f"cannot listen on {host}: is it an address of this machine?")

    async def _stop(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)

    # ---------------------------------------------------------------- the service

    def carry(self, method: str, handler: Callable[..., Any], read: Callable[[bytes], Any]) -> None:
        """Serve a method also to peers that this gateway dials (through a tunnel)."""
        self._carried[method] = handler, read

    async def Hello(  # noqa: N802 - gRPC fixes the name
        self, request: HelloRequest, context: Context
    ) -> HelloResponse:
        """Open a session; a repeated call returns the same one."""
        try:
            require_own_site(context, request.site)
            protocol, sender = self._admit(request)
        except IsthmusError as error:
            _log.warning("refused site %r: %s", request.site, error)
            await abort(context, error)
        self._receiver.greeted(sender)
        return HelloResponse(protocol=protocol, build=build(), session=self._session_of(sender))

    async def Leave(  # noqa: N802 - gRPC fixes the name
        self, request: LeaveRequest, context: Context
    ) -> LeaveResponse:
        """A peer says that it ends."""
        sender = await self._sender(request.session, context)
        if not request.code:
            _log.info("site %s has finished", self._config.sites[sender[0]])
            self._receiver.peer_left(sender)
        elif request.code not in _BROKEN_PROMISES:
            site = self._config.sites[sender[0]]
            why = f"told by site {site}: {request.message}"
            self._receiver.peer_ended(sender, why)
        else:
            site = self._config.sites[sender[0]]
            self._receiver.fail(
                Failure(
                    code=request.code,
                    message=f"told by site {site}: {request.message}",
                    site=request.site or site,
                    rank=request.rank,
                    is_collateral=True,
                )
            )
        return LeaveResponse()

    async def ReverseTunnel(  # type: ignore[override]  # noqa: N802 - gRPC fixes the name
        self, _: object, context: Context
    ) -> None:
        """A gateway that only dials out opens its tunnel for calls to it."""
        await self.inbound_proxy(await self._sender(session_of(context), context)).serve_tunnel(
            context
        )

    async def _pull(self, call: FrameCall) -> None:
        """A gateway that only dials out opens a stream for frames to it."""
        await self.inbound_proxy(self._sender_of(session_of(call), call)).pull(call)

    async def _push(self, call: FrameCall) -> None:
        """Accept frames one after another, and acknowledge each."""
        sender = self._sender_of(session_of(call), call)
        while (message := await call.read()) is not None:
            await call.write(self.take(sender, message))

    # ---------------------------------------------------------------- what a peer wants

    async def answer(self, sender: GatewayId, method: str, request: bytes) -> bytes:
        """Return the serialised response to a call that came through a tunnel.

        Raises:
            CallError: the call is refused.
        """
        if method not in self._carried:
            raise CallError(grpc.StatusCode.UNIMPLEMENTED, f"{method[:80]!r} is not carried")
        handler, read = self._carried[method]
        try:
            asked = read(request)
        except DecodeError as error:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"{method}: {error}") from error
        context = CarriedContext(self._config.sites[sender[0]], self._session_of(sender))
        answered: bytes = (await handler(asked, context)).SerializeToString()
        return answered

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

    async def site_of(self, context: Context) -> str:
        """Return the site of a call's session; abort the call if the session is unknown."""
        sender = await self._sender(session_of(context), context)
        return self._config.sites[sender[0]]

    def caller_site(self, call: FrameCall) -> str:
        """Return the site of the session of a call on the frames port.

        Raises:
            StaleGenerationError: the session is unknown.
            PermissionDeniedError: the session is another site's.
        """
        return self._config.sites[self._sender_of(session_of(call), call)[0]]

    def _session_of(self, sender: GatewayId) -> str:
        for session, known in self._sessions.items():
            if known == sender:
                return session
        session = secrets.token_hex(16)
        self._sessions[session] = sender
        return session

    async def _sender(self, session: str, context: Context) -> GatewayId:
        try:
            return self._sender_of(session, context)
        except IsthmusError as error:
            await abort(context, error)

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


def session_of(context: Caller) -> str:
    """Return the session that a call names in its metadata; empty if it names none."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(SESSION_KEY, ""))


async def abort(context: Context, error: IsthmusError) -> Never:
    """Abort a call with the gRPC status of an error."""
    await context.abort(STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error))
