"""The receiving side: Hello, Push and Leave from the gateways of other sites.

A process of its own serves them, on a pool of threads large enough that streams, which hold a thread
each, never starve the small calls.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol

import grpc

from protos.errors import (
    STATUS,
    ConfigMismatchError,
    CorruptDataError,
    IsthmusError,
    StaleGenerationError,
)
from protos.exchange.v1.exchange_pb2 import (
    HelloRequest,
    HelloResponse,
    LeaveRequest,
    LeaveResponse,
)
from protos.exchange.v1.exchange_pb2_grpc import ExchangeServicer, add_ExchangeServicer_to_server
from protos.frame import Frame, pack_ack, unpack
from protos.versions import (
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
    negotiate,
)
from sites.gateway.channels import CHANNELS_MAX
from sites.gateway.config import GatewayConfig
from sites.gateway.failure import Failure
from sites.gateway.transport import SERVICE, SESSION_KEY, server_options

_log = logging.getLogger(__name__)

_CORRUPT_FRAMES_MAX = 3
"""A peer's frames that may fail their checksum and be asked for again, a run."""
_STOP_GRACE_S = 0.2

Sender = tuple[int, int]
"""Site index and node of a gateway."""


class Receiver(Protocol):
    """Who gets what peers send. Called from many threads."""

    def receive(self, sender: Sender, frame: Frame) -> None:
        """Take a frame over; never wait."""

    def greeted(self, sender: Sender) -> None:
        """The peer asks whether this gateway lives."""

    def peer_left(self, sender: Sender) -> None:
        """The peer has finished."""

    def fail(self, failure: Failure) -> None:
        """The run cannot go on."""


class ExchangeServer(ExchangeServicer):
    """The gRPC server of one gateway."""

    def __init__(self, config: GatewayConfig, receiver: Receiver) -> None:
        self._config = config
        self._receiver = receiver
        self._lock = threading.Lock()
        self._sessions: dict[str, Sender] = {}
        self._corrupt: dict[Sender, int] = {}
        gateways = sum(
            config.nodes_per_site[config.sites.index(each.site)] for each in config.links
        )
        # Twice the streams, for those that are coming back while the broken ones still end. A thread
        # begins with its first call.
        num_rpcs = 2 * gateways * CHANNELS_MAX + 2 * gateways + 2
        self._server = grpc.server(
            ThreadPoolExecutor(num_rpcs, thread_name_prefix="rpc"),
            options=server_options(config),
            maximum_concurrent_rpcs=num_rpcs,
        )
        add_ExchangeServicer_to_server(self, self._server)
        # Raw bytes both ways: no serializers, so gRPC hands over what is on the wire.
        push: grpc.RpcMethodHandler[bytes, bytes]
        push = grpc.stream_stream_rpc_method_handler(self._push)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Push": push}),)
        )

    @property
    def grpc_server(self) -> grpc.Server:
        """What serves: other services may be added before `start`."""
        return self._server

    def start(self) -> int:
        """Listen on the configured host; return the port.

        Raises:
            OSError: the host's address cannot be bound.
        """
        host = self._config.bind_host
        try:
            port = self._server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {host}: is it an address of this machine?") from error
        self._server.start()
        return port

    def close(self) -> None:
        """End all streams and stop."""
        self._server.stop(_STOP_GRACE_S).wait(timeout=5)

    # ---------------------------------------------------------------- the service

    def Hello(  # noqa: N802 - gRPC fixes the name
        self, request: HelloRequest, context: grpc.ServicerContext
    ) -> HelloResponse:
        """Open a session, or say again that it is open."""
        try:
            protocol, sender = self._admit(request)
        except IsthmusError as error:
            _log.warning("refused site %r: %s", request.site, error)
            _abort(context, error)
        self._receiver.greeted(sender)
        return HelloResponse(protocol=protocol, build=build(), session=self._session_of(sender))

    def Leave(  # noqa: N802 - gRPC fixes the name
        self, request: LeaveRequest, context: grpc.ServicerContext
    ) -> LeaveResponse:
        """A peer's gateway ends."""
        sender = self._sender(request.session, context)
        if not request.code:
            _log.info("site %s has finished", self._config.sites[sender[0]])
            self._receiver.peer_left(sender)
        else:
            site = self._config.sites[sender[0]]
            self._receiver.fail(
                Failure(
                    code=request.code,
                    message=f"told by site {site}: {request.message}",
                    site=request.site or site,
                    rank=request.rank,
                    collateral=True,
                )
            )
        return LeaveResponse()

    def _push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Take frames over, one after another, and acknowledge each."""
        metadata = dict(context.invocation_metadata())
        sender = self._sender(str(metadata.get(SESSION_KEY, "")), context)
        for message in requests:
            try:
                frame = unpack(message)
            except CorruptDataError as error:
                self._count_corrupt(sender, error)
                _abort(context, error)
            except IsthmusError as error:
                self._refuse(sender, error, context)
            try:
                self._receiver.receive(sender, frame)
            except IsthmusError as error:
                self._refuse(sender, error, context)
            except Exception as error:  # a task's root: else the peer would send it for ever
                _log.exception("a frame of round %d was not taken", frame.key.round)
                self._receiver.fail(Failure.of(error))
                raise
            yield pack_ack(frame.key, frame.generation)

    # ---------------------------------------------------------------- who may do what

    def _admit(self, request: HelloRequest) -> tuple[int, Sender]:
        """Return the protocol to speak and who the caller is.

        Raises:
            ConfigMismatchError: it was started with something else.
            StaleGenerationError: it belongs to another run or generation.
        """
        config = self._config
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
        if request.node >= config.nodes_per_site[index]:
            raise ConfigMismatchError(f"site {request.site} has no node {request.node}")
        return protocol, (index, request.node)

    def site_of(self, session: str, context: grpc.ServicerContext) -> str:
        """Return the site whose session it is; an unknown one is ABORTED."""
        return self._config.sites[self._sender(session, context)[0]]

    def _session_of(self, sender: Sender) -> str:
        with self._lock:
            for session, known in self._sessions.items():
                if known == sender:
                    return session
            session = secrets.token_hex(16)
            self._sessions[session] = sender
            return session

    def _sender(self, session: str, context: grpc.ServicerContext) -> Sender:
        with self._lock:
            sender = self._sessions.get(session)
        if sender is None:
            _abort(context, StaleGenerationError("an unknown session: say Hello first"))
        return sender

    def _refuse(
        self, sender: Sender, error: IsthmusError, context: grpc.ServicerContext
    ) -> NoReturn:
        self._receiver.fail(Failure.of(error, self._config.sites[sender[0]]))
        _abort(context, error)

    def _count_corrupt(self, sender: Sender, error: CorruptDataError) -> None:
        """Have a damaged frame sent again, but not for ever."""
        site = self._config.sites[sender[0]]
        with self._lock:
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


def _abort(context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
    context.abort(STATUS.get(type(error), grpc.StatusCode.INTERNAL), str(error))
    raise AssertionError("abort raises")
