"""The donors of a training state to a rejoining site: addresses and bandwidth."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import Call, Target, deadline
from isthmus.sites.gateway.links.transport import HELLO_METHOD, say_hello
from isthmus.sites.gateway.transfer.state_fetch import Donor
from isthmus.sites.local.entry_folder import PIECE_BYTES

_STREAMS_MAX: Final = 8


def bytes_per_s_to(config: GatewayConfig) -> Mapping[str, float]:
    """Return the rate in bytes/s at which this gateway may send a state, by site."""
    gateways = config.gateways_per_site[config.site_index]
    return {each.site: each.bytes_per_s * config.return_share / gateways for each in config.links}


def donor(config: GatewayConfig, peer: Target, address: Callable[[], Target]) -> Donor:
    """Return a peer as a donor of its state to this gateway.

    `address` returns the peer's current address; it may have restarted.
    """

    @asynccontextmanager
    async def connect(method: str) -> AsyncIterator[Call]:
        now = address()
        async with deadline(config.peer_lost_s / 3), now.dial(config, "", HELLO_METHOD) as greeting:
            session = (await say_hello(greeting, config)).session
        async with now.dial(config, session, method) as call:
            yield call

    [link] = [each for each in config.links if each.site == peer.site]
    gateways = config.gateways_per_site[config.index_of(peer.site)]
    held_bytes = link.bytes_per_s * config.return_share * link.rtt_s / gateways
    num_streams = min(max(1, math.ceil(held_bytes / PIECE_BYTES)), _STREAMS_MAX)
    return Donor(str(peer), connect, num_streams)
