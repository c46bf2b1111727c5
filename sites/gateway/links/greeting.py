"""How gateways greet each other, and which answers are final."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from protos.errors import (
    ConfigMismatchError,
    IsthmusError,
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.exchange.v1.exchange_pb2 import HelloRequest
from protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from protos.versions import EXCHANGE_PROTOCOL_MAX, EXCHANGE_PROTOCOL_MIN, build
from sites.gateway.config import GatewayConfig

BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 1.0
"""Between two attempts to reach a peer: twice as long each time, up to this."""
_REFUSALS: dict[grpc.StatusCode, type[IsthmusError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: ConfigMismatchError,
    grpc.StatusCode.ABORTED: StaleGenerationError,
    grpc.StatusCode.INVALID_ARGUMENT: RemoteProtocolError,
}
"""What makes trying again pointless."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where one gateway of another site can be dialled."""

    site: str
    node: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"site {self.site} (gateway {self.node} at {self.host}:{self.port})"


def say_hello(channel: grpc.Channel, config: GatewayConfig, timeout_s: float) -> str:
    """Say Hello, and return the session that the peer names.

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
        node=config.node,
    )
    return ExchangeStub(channel).Hello(request, timeout=timeout_s).session


def refusal_of(error: grpc.RpcError, peer: Peer) -> IsthmusError | None:
    """Return what a peer's final answer means; None if it is worth trying again."""
    kind = _REFUSALS.get(error.code())
    return None if kind is None else kind(f"{peer} refused: {details(error)}")


def details(error: grpc.RpcError) -> str:
    """Return an RPC's error in one line."""
    return error.details() or error.code().name
