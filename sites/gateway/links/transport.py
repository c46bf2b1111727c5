"""How a gateway reaches another one: addresses, time limits, the greeting, refusals."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from isthmus.protos.errors import (
    ConfigMismatchError,
    IsthmusError,
    PermissionDeniedError,
    RemoteProtocolError,
    StaleGenerationError,
    UnauthenticatedError,
)
from isthmus.protos.exchange.v1.exchange_pb2 import HelloRequest, HelloResponse
from isthmus.protos.identities import GATEWAY
from isthmus.protos.security import exchange_security, explained
from isthmus.protos.versions import EXCHANGE_PROTOCOL_MAX, EXCHANGE_PROTOCOL_MIN, build
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import Call, ask
from isthmus.sites.gateway.links.frame_calls import FrameCall, dial
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.topology.spec.world import Endpoint

SERVICE: Final = "isthmus.exchange.v1.Exchange"
HELLO_METHOD: Final = f"/{SERVICE}/Hello"
LEAVE_METHOD: Final = f"/{SERVICE}/Leave"
PUSH_METHOD: Final = f"/{SERVICE}/Push"
REVERSE_METHOD: Final = f"/{SERVICE}/Reverse"
SESSION_KEY: Final = "isthmus-session"

_READY_S = 2.0
_READY_RTTS = 8
"""Deadline of a connection, in seconds plus round trips. TLS takes three of those, and TCP resends
its first packet after a second."""
_CONNECT_S = 1.0
"""Timeout of a test connection; a refusal takes one round trip."""
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""The wait between two attempts to reach a peer is doubled each time, up to this."""
_REFUSALS: dict[Status, type[IsthmusError]] = {
    Status.FAILED_PRECONDITION: ConfigMismatchError,
    Status.ABORTED: StaleGenerationError,
    Status.INVALID_ARGUMENT: RemoteProtocolError,
    Status.UNAUTHENTICATED: UnauthenticatedError,
    Status.PERMISSION_DENIED: PermissionDeniedError,
}
"""Answers that make trying again pointless."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The address of a gateway of another site, and how to make calls to it."""

    site: str
    gateway: int
    host: str
    port: int

    def __str__(self) -> str:
        where = Endpoint(host=self.host, port=self.port)
        return f"site {self.site} (gateway {self.gateway} at {where})"

    def dial(
        self, config: GatewayConfig, session: str, method: str
    ) -> AbstractAsyncContextManager[FrameCall]:
        """Make a call on a fresh connection, which is cancelled at the end of the block.

        Args:
            config: this gateway's.
            session: this gateway's session at the peer; empty in a call of Hello.
            method: path of the method.

        Raises:
            CallError: the connection cannot be made; raised on entering.
        """
        return dial(
            (self.host, self.port),
            method,
            ((SESSION_KEY, session),) if session else (),
            exchange_security(config.site),
            f"{self.site}.{GATEWAY}",
            patience(config),
        )

    async def refuses_connections(self) -> bool:
        """Whether the peer's host refuses connections to the port."""
        return await asyncio.to_thread(self._refuses_connections)

    def _refuses_connections(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_S):
                return False
        except ConnectionRefusedError:
            return True
        except OSError:
            return False


def patience(config: GatewayConfig) -> Patience:
    """Return how long connections wait for a silent peer."""
    return Patience(
        connect_s=_READY_S + _READY_RTTS * _farthest_s(config),
        idle_s=config.keepalive_time_s,
        lost_s=config.keepalive_time_s + config.keepalive_timeout_s,
    )


def _farthest_s(config: GatewayConfig) -> float:
    return max((link.rtt_s for link in config.links), default=0.0)


def greeting(config: GatewayConfig) -> HelloRequest:
    """Return this gateway's Hello."""
    return HelloRequest(
        protocol_min=EXCHANGE_PROTOCOL_MIN,
        protocol_max=EXCHANGE_PROTOCOL_MAX,
        build=build(),
        config_hash=config.config_hash,
        run_id=config.run_id,
        generation=config.generation,
        site=config.site,
        gateway=config.gateway,
    )


async def say_hello(call: Call, config: GatewayConfig) -> HelloResponse:
    """Send Hello on a call of it, and return the answer: the session, and the protocol to speak.

    Raises:
        CallError: the peer refused, or did not answer.
    """
    return await ask(call, greeting(config), HelloResponse)


def refusal_of(error: CallError, peer: object) -> IsthmusError | None:
    """Return the error that a peer's refusal means; None if a retry makes sense."""
    kind = _REFUSALS.get(error.status)
    return None if kind is None else kind(f"{peer} refused: {details(error)}")


def details(error: CallError) -> str:
    """Return an RPC's error in one line."""
    return explained(error.why or error.status.name)
