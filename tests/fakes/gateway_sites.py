"""Gateways of several sites in one process: real gRPC on loopback, real shared memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.protos.frame import ChunkKey, Frame, Kind
from isthmus.sites.gateway.agent_port import Said
from isthmus.sites.gateway.config import GatewayConfig, PeerLink
from isthmus.sites.gateway.gateway import Gateway
from isthmus.sites.gateway.links.transport import Peer
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_rank import DEADLINE_S, Floats, GatewayRank, Heard
from tests.fakes.tcp_proxy import TcpProxy

GATHER_2 = ReductionPlan(2, (), "")
SITES = ("ash", "birch", "cedar", "dogwood", "elder")


def gateway_config(
    folder: Path,
    plan: ReductionPlan,
    site: int,
    gateway: int = 0,
    **changes: Any,  # noqa: ANN401 - any field
) -> GatewayConfig:
    """Return the configuration of one gateway on fast links; `codec` is that of all trees."""
    sites = SITES[: plan.num_sites]
    codec = changes.pop("codec", "fp32")
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "generation": 1,
        "config_hash": "a" * 64,
        "site": sites[site],
        "gateway": gateway,
        "sites": sites,
        "gateways_per_site": (1,) * plan.num_sites,
        "ranks_per_gateway": (1,) * plan.num_sites,
        "plan": plan,
        "codecs": (codec,) * max(1, len(plan.trees)),
        "error_feedback": True,
        "chunk_bytes": 4096,
        "channels_per_link": 2,
        "window_bytes": None,
        "verify_every": 10,
        "bind_host": "127.0.0.1",
        "socket_path": str(folder / f"g{site}-{gateway}.sock"),
        "links": tuple(
            PeerLink(site=sites[other], bytes_per_s=1e9, rtt_s=0.001)
            for other in plan.neighbours(site)
        ),
        "peer_lost_s": 10.0,
        "rank_wait_s": 30.0,
        "keepalive_time_s": 3.0,
        "keepalive_timeout_s": 3.0,
    }
    return GatewayConfig(**{**fields, **changes})


class Member(Heard):
    """One gateway, and what it told its agent."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__()
        self.config = config
        self.said: list[Said] = []
        self.gateway = Gateway(config, self._write)
        self.gateway.start()
        self._main = threading.Thread(target=self._run, name=f"main-{config.site}", daemon=True)
        self._main.start()

    def _run(self) -> None:
        """Do what the process's main thread does."""
        assert self.gateway.wait_ended(10 * DEADLINE_S)
        self.gateway.close()

    def _write(self, message: Said) -> None:
        self.said.append(message)
        self.hear(to_json(message))

    def end(self) -> Mapping[str, Any] | None:
        """Wait until the gateway has ended; return the failure, if there was one."""
        self._main.join(DEADLINE_S)
        assert not self._main.is_alive(), "it goes on"
        return next((each for each in self.messages if each["op"] == "failed"), None)

    @property
    def peer(self) -> Peer:
        """Where it listens."""
        told = self.wait("listening")
        return Peer(self.config.site, self.config.gateway, told["host"], int(told["port"]))


Dial = Callable[[Member, Peer], Peer]
"""Where a member is told that a peer listens: a proxy's address, or the peer's own."""


def through_proxies(
    stack: ExitStack, *, cut_after_bytes: int | None = None, damage: bytes | None = None
) -> tuple[Dial, list[TcpProxy]]:
    """Return how gateways reach each other through proxies, one a direction, and these proxies."""
    proxies: list[TcpProxy] = []

    def dial(_: Member, peer: Peer) -> Peer:
        if not peer.port:  # it dials, and does not listen
            return peer
        proxy = TcpProxy(peer.port, cut_after_bytes=cut_after_bytes, damage=damage)
        proxies.append(stack.enter_context(proxy))
        return dataclasses.replace(peer, port=proxies[-1].port)

    return dial, proxies


@contextmanager
def gateways(configs: list[GatewayConfig], dial: Dial | None = None) -> Iterator[list[Member]]:
    """Start gateways and let them dial each other; close all at the end."""
    with ExitStack() as stack:
        members = []
        for config in configs:
            member = Member(config)
            stack.callback(member.end)
            stack.callback(member.gateway.stop)
            members.append(member)
        for member in members:
            peers = [each.peer for each in members if each.config.site != member.config.site]
            if dial is not None:
                peers = [dial(member, peer) for peer in peers]
            member.gateway.connect(tuple(peers))
        yield members


def join(stack: ExitStack, member: Member) -> list[GatewayRank]:
    """Join all ranks of a gateway's node."""
    config = member.config
    num_ranks = config.ranks_per_gateway[config.site_index]
    ranks = []
    for rank in range(config.gateway * num_ranks, (config.gateway + 1) * num_ranks):
        joined = stack.enter_context(GatewayRank(config.socket_path, rank))
        assert joined.receive()["op"] == "welcome"
        ranks.append(joined)
    assert member.wait("joined")["ranks"] == [rank.rank for rank in ranks]
    return ranks


def leave(members: list[Member], ranks: list[list[GatewayRank]]) -> None:
    """End a run well: all ranks leave, and agents want no more of their gateways."""
    for each in ranks:
        for rank in each:
            rank.leave()
    for member in members:
        member.gateway.stop()


def frame_ahead(round_: int, bucket: int = 0, epoch: int = 0) -> Frame:
    """Return a frame of site birch, of a bucket that nobody has posted."""
    key = ChunkKey(round_, bucket, 0, 1, Kind.CONTRIBUTION)
    return Frame(key, epoch, 1, 0, 77, 2, 1.0, bytes(8))


def reduce_once(
    ranks: list[list[GatewayRank]], round_: int, numel: int, weights: list[float], seed: int
) -> tuple[Floats, list[dict[str, Any]]]:
    """Reduce one bucket over the ranks of each site, check that all sites agree; return it."""
    parts = []
    for site, members in enumerate(ranks):
        generator = np.random.default_rng((seed, site))
        part = generator.standard_normal(numel).astype(np.float32) * np.float32(weights[site])
        parts.append(part)
        shard = -(-numel // len(members))
        for index, rank in enumerate(members):
            region = rank.regions.get(0)
            if region is None or len(region) < shard:
                region = rank.share(0, max(1, shard))
            own = part[index * shard : (index + 1) * shard]
            region[: len(own)] = own
            rank.reduce(round_, 0, numel, weights[site])
    replies, results = [], []
    for members in ranks:
        shard, pieces = -(-numel // len(members)), []
        for index, rank in enumerate(members):
            reply = rank.receive()
            assert reply["op"] == "reduced", reply
            assert (reply["round"], reply["bucket"]) == (round_, 0)
            replies.append(reply)
            count = max(0, min(shard, numel - index * shard))
            pieces.append(rank.regions[0][:count].copy())
        results.append(np.concatenate(pieces))
    for result in results:
        assert result.tobytes() == results[0].tobytes()
    expected = np.sum(parts, axis=0, dtype=np.float64) / sum(weights)
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=0.02)  # bf16, added up
    return results[0], replies
