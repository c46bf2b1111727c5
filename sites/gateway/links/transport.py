"""gRPC between gateways: addresses, the greeting, and the options of channels and servers.

The options are in one place, because gRPC silently ignores unknown ones. Measured traps:

- Without keepalive, only deadlines reveal a black-holed peer; without ping_timeout, often after a
  minute.
- A server that does not expect pings answers them with GOAWAY after 40 s.
- Two servers share one port unless so_reuseport is off.
- Channels with equal arguments share one connection unless their subchannel pool is local.
- A fixed HTTP/2 window needs its estimator switched off, and only half of it is guaranteed.
"""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio

from isthmus.protos.errors import (
    ConfigMismatchError,
    IsthmusError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    UnauthenticatedError,
)
from isthmus.protos.exchange.v1.exchange_pb2 import HelloRequest, HelloResponse
from isthmus.protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from isthmus.protos.identities import GATEWAY
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES
from isthmus.protos.proxies import NO_PROXY
from isthmus.protos.security import exchange_security, explained
from isthmus.protos.versions import EXCHANGE_PROTOCOL_MAX, EXCHANGE_PROTOCOL_MIN, build
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.congestion.rate import window_bytes
from isthmus.sites.gateway.links.frame_calls import (
    FrameCall,
    Patience,
    dial,
    own_files_may_mend,
)
from isthmus.topology.spec.world import Endpoint

Options = list[tuple[str, int | str]]

SERVICE: Final = "isthmus.exchange.v1.Exchange"
PUSH_METHOD: Final = f"/{SERVICE}/Push"
PULL_METHOD: Final = f"/{SERVICE}/Pull"
SESSION_KEY: Final = "isthmus-session"

_HTTP2_WINDOW_MIN_BYTES = 4 << 20
_HTTP2_WINDOW_MAX_BYTES = 256 << 20
_HTTP2_FRAME_BYTES = (16 << 20) - 1
"""Largest frame that HTTP/2 allows. With the smallest, 16 KiB, a message is split into very many
pieces, each with its own memory."""
_STREAMS_MAX = 64
_ATTEMPT_MS = 100
_ATTEMPT_RTTS = 4
"""Round trips that a connection attempt may take, beside _ATTEMPT_MS; a reserve for queues."""

_READY_S = 2.0
_READY_RTTS = 8
"""Deadline of a connection for frames, in seconds plus round trips. TLS takes three of those, and
TCP resends its first packet after a second."""
_CONNECT_S = 1.0
"""Timeout of a test connection; a refusal takes one round trip."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""The wait between two attempts to reach a peer is doubled each time, up to this."""
_REFUSALS: dict[grpc.StatusCode, type[IsthmusError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: ConfigMismatchError,
    grpc.StatusCode.ABORTED: StaleGenerationError,
    grpc.StatusCode.INVALID_ARGUMENT: RemoteProtocolError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}
"""Answers that make trying again pointless."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a gateway of another site, and how to connect to it."""

    site: str
    gateway: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"site {self.site} (gateway {self.gateway} at {self._target})"

    def channel(self, config: GatewayConfig) -> grpc.Channel:
        """Return a fresh connection to the peer; the caller closes it.

        Raises:
            CallError: this side's certificate cannot be used now, for example has expired.
        """
        with own_files_may_mend():
            security = exchange_security(config.site)
            return security.channel(self._target, client_options(config), self._name)

    def aio_channel(self, config: GatewayConfig) -> grpc.aio.Channel:
        """Return a fresh connection for the running event loop; the caller closes it.

        Raises:
            CallError: as for `channel`.
        """
        with own_files_may_mend():
            security = exchange_security(config.site)
            return security.aio_channel(self._target, client_options(config), self._name)

    def stream(self, config: GatewayConfig, session: str) -> AbstractAsyncContextManager[FrameCall]:
        """Open a call that carries frames, on a fresh connection.

        Raises:
            CallError: the connection cannot be made; raised on entering.
        """
        return self.dial(config, session, PUSH_METHOD)

    def dial(
        self, config: GatewayConfig, session: str, method: str
    ) -> AbstractAsyncContextManager[FrameCall]:
        """Call a method of the peer's frames port, on a fresh connection; raises as `stream`."""
        return dial(
            (self.host, self.port + 1),
            method,
            ((SESSION_KEY, session),),
            exchange_security(config.site),
            self._name,
            patience(config),
        )

    def refuses_connections(self) -> bool:
        """Whether the peer's host refuses connections to the port."""
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False

    @property
    def _name(self) -> str:
        return f"{self.site}.{GATEWAY}"

    @property
    def _target(self) -> str:
        return str(Endpoint(host=self.host, port=self.port))


def patience(config: GatewayConfig) -> Patience:
    """Return how long connections for frames wait for a silent peer."""
    return Patience(
        connect_s=_READY_S + _READY_RTTS * _farthest_s(config),
        idle_s=config.keepalive_time_s,
        lost_s=config.keepalive_time_s + config.keepalive_timeout_s,
    )


def _farthest_s(config: GatewayConfig) -> float:
    return max((link.rtt_s for link in config.links), default=0.0)


def say_hello(channel: grpc.Channel, config: GatewayConfig, timeout_s: float) -> HelloResponse:
    """Send Hello, and return the answer: the session, and the protocol to speak.

    Raises:
        grpc.RpcError: the peer refused, or did not answer.
    """
    request = HelloRequest(
        protocol_min=EXCHANGE_PROTOCOL_MIN,
        protocol_max=EXCHANGE_PROTOCOL_MAX,
        build=build(),
        config_hash=config.config_hash,
        run_id=config.run_id,
        generation=config.generation,
        site=config.site,
        gateway=config.gateway,
    )
    return ExchangeStub(channel).Hello(request, timeout=timeout_s)


def refusal_of(error: grpc.RpcError, peer: object) -> IsthmusError | None:
    """Return the error that a peer's refusal means; None if a retry makes sense."""
    kind = _REFUSALS.get(error.code())
    return None if kind is None else kind(f"{peer} refused: {details(error)}")


def details(error: grpc.RpcError) -> str:
    """Return an RPC's error in one line."""
    return explained(error.details() or error.code().name)


def client_options(config: GatewayConfig) -> Options:
    """Return the options of a channel to a peer.

    gRPC limits a connection attempt to the shortest back-off, and an answer takes one and a half
    round trips. So the back-off grows with the round trip, or distant peers would never be reached.
    """
    attempt_ms = _ATTEMPT_MS + int(1000 * _ATTEMPT_RTTS * _farthest_s(config))
    return [
        *_common(config),
        *([] if config.listens else _received(config)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        *NO_PROXY,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", attempt_ms),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def server_options(config: GatewayConfig) -> Options:
    """Return the options of the gateway's server."""
    return [
        *_common(config),
        *_received(config),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", _STREAMS_MAX),
    ]


def _received(config: GatewayConfig) -> Options:
    """Return the options of the side that receives frames.

    Peers' windows bound the bytes in flight, so the HTTP/2 window is set beyond these. gRPC's
    estimator would take up to a second of each new connection to grow it.
    """
    widest = max((window_bytes(config, link) for link in config.links), default=0)
    http2_bytes = min(max(2 * widest, _HTTP2_WINDOW_MIN_BYTES), _HTTP2_WINDOW_MAX_BYTES)
    return [
        ("grpc.http2.lookahead_bytes", 1 << (http2_bytes - 1).bit_length()),
        ("grpc.http2.bdp_probe", 0),
    ]


def _common(config: GatewayConfig) -> Options:
    return [
        ("grpc.max_send_message_length", EXCHANGE_CHANNEL_BYTES),
        ("grpc.max_receive_message_length", EXCHANGE_CHANNEL_BYTES),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # identity only: codecs are ours
        ("grpc.http2.max_frame_size", _HTTP2_FRAME_BYTES),
        ("grpc.max_metadata_size", 8192),
        ("grpc.keepalive_time_ms", max(1, int(config.keepalive_time_s * 1000))),
        ("grpc.keepalive_timeout_ms", max(1, int(config.keepalive_timeout_s * 1000))),
        ("grpc.http2.ping_timeout_ms", max(1, int(config.keepalive_timeout_s * 1000))),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
