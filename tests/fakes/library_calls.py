"""Calls to a gateway by gRPC's library, as a gateway of another make would have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from isthmus.protos.exchange.v1.exchange_pb2 import HelloResponse
from isthmus.protos.exchange.v1.exchange_pb2_grpc import ExchangeStub
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES
from isthmus.protos.security import exchange_security
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.transport import greeting

DEADLINE_S = 20.0


def channel_to(port: int, config: GatewayConfig, to: str) -> grpc.Channel:
    """Return a channel to a gateway of site `to`, as the gateway with this configuration has it."""
    options = (("grpc.max_receive_message_length", EXCHANGE_CHANNEL_BYTES),)
    security = exchange_security(config.site)
    return security.channel(f"127.0.0.1:{port}", options, f"{to}.gateway")


def hello_by_library(channel: grpc.Channel, config: GatewayConfig) -> HelloResponse:
    """Say Hello, and return the answer."""
    answers = ExchangeStub(channel).Hello(iter([greeting(config)]), timeout=DEADLINE_S)
    [answer] = answers
    return answer


def push_by_library(
    channel: grpc.Channel,
    method: str,
    messages: Iterable[bytes],
    metadata: Any,  # noqa: ANN401
) -> list[bytes]:
    """Make a call of raw messages, and return what comes back."""
    call: Any = channel.stream_stream(method)
    return list(call(iter(messages), metadata=metadata, timeout=DEADLINE_S))
