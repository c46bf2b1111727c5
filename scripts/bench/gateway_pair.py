"""Two sites of gateways that ship, with stand-ins for their ranks, on loopback or an emulated link.

By default a site has one gateway and one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.protos.errors import IsthmusError
from isthmus.sites.gateway.config import HELD_BYTES, GatewayConfig, PeerLink
from isthmus.sites.local.chunk_grid import shard_numel
from isthmus.sites.local.rank_messages import Reduce, Region
from isthmus.sites.local.regions import create_region
from isthmus.sites.worker.exchange.gateway_link import GatewayLink
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_process import GatewayProcess

SITES = ("a", "b")
DEADLINE_S = 120.0
PAYLOAD_SHARE = 0.965


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What gateways, link and rounds are like. By default no link holds anything up."""

    bits_per_s: float = 100e9
    rtt_s: float = 1e-4
    codec: str = "fp32"
    channels: int | None = 2
    """TCP connections; None: as many as gateways choose."""
    chunk_bytes: int = 4 << 20
    window_bytes: int | None = None
    held_bytes: int = HELD_BYTES
    num_buckets: int = 1
    num_bytes: int
    """float32 of a round at a site, all buckets together."""
    num_ranks: int = 1
    """Ranks of each site; each has its shard of each bucket."""
    num_lanes: int = 1
    """Gateways of each site, which divide its ranks among them: a divisor of `num_ranks`."""

    @property
    def bound_s(self) -> float:
        """What no exchange can be faster than."""
        return self.num_bytes * 8 / (PAYLOAD_SHARE * self.bits_per_s) + self.rtt_s / 2


class RankStandIn:
    """A rank of a site: posts its shards of buckets, and waits until all have come back."""

    def __init__(self, path: Path, setting: Setting, rank: int) -> None:
        self._numel = setting.num_bytes // 4 // setting.num_buckets
        self._link = GatewayLink(path, DEADLINE_S)
        self._link.join(rank=rank, local_rank=rank, generation=1, timeout_s=DEADLINE_S)
        self._returned = threading.Semaphore(0)
        self._error: IsthmusError | None = None
        self.regions = []
        for bucket in range(setting.num_buckets):
            numel = shard_numel(self._numel, setting.num_ranks)
            values, descriptor = create_region(numel)
            self._link.send(Region(region=bucket, numel=numel), descriptor)
            os.close(descriptor)
            self.regions.append(values)
        self._link.start(lambda _: self._returned.release(), self._failed)

    def fill(self) -> None:
        """Write what is to be reduced."""
        for values in self.regions:
            values.fill(1.0)

    def check(self) -> None:
        """Refuse a wrong result; codecs round."""
        assert all((abs(values - 1.0) < 0.02).all() for values in self.regions)

    def post(self, number: int) -> float:
        """Hand all buckets over; return when the first was."""
        began_s = time.perf_counter()
        for bucket in range(len(self.regions)):
            self._link.send(
                Reduce(
                    round=number,
                    bucket=bucket,
                    region=bucket,
                    numel=self._numel,
                    layout=7,
                    weight=1.0,
                    exact=False,
                )
            )
        return began_s

    def wait(self, number: int) -> float:
        """Wait until all have come back; return when."""
        for _ in self.regions:
            if not self._returned.acquire(timeout=DEADLINE_S) or self._error is not None:
                raise SystemExit(f"round {number} did not end: {self._error}")
        return time.perf_counter()

    def leave(self) -> None:
        """End cleanly."""
        self._link.leave()

    def _failed(self, error: IsthmusError) -> None:
        self._error = error
        self._returned.release(len(self.regions))


def _config(setting: Setting, site: int, lane: int, host: str, folder: Path) -> GatewayConfig:
    bytes_per_s = setting.bits_per_s / 8
    return GatewayConfig(
        run_id="bench",
        generation=1,
        config_hash="0" * 64,
        site=SITES[site],
        gateway=lane,
        sites=SITES,
        gateways_per_site=(setting.num_lanes,) * 2,
        ranks_per_gateway=(setting.num_ranks // setting.num_lanes,) * 2,
        plan=ReductionPlan(2, (), "two sites"),
        codecs=(setting.codec,),
        error_feedback=True,
        chunk_bytes=setting.chunk_bytes,
        channels_per_link=setting.channels,
        window_bytes=setting.window_bytes,
        held_bytes=setting.held_bytes,
        pipeline_bytes=int(3 * bytes_per_s * setting.rtt_s),
        verify_every=0,
        bind_host=host,
        socket_path=str(_socket(folder, SITES[site], lane)),
        links=(PeerLink(site=SITES[1 - site], bytes_per_s=bytes_per_s, rtt_s=setting.rtt_s),),
        peer_lost_s=30.0,
        rank_wait_s=300.0,
        keepalive_time_s=10.0,
        keepalive_timeout_s=10.0,
    )


@contextlib.contextmanager
def pair(
    setting: Setting, places: Mapping[str, SiteNamespace] | None = None
) -> Iterator[tuple[list[GatewayProcess], list[RankStandIn]]]:
    """Run the gateways of two sites, connected, with their ranks: the first site's first.

    `places` are the sites' namespaces; without any they are on loopback.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sites: list[list[GatewayProcess]] = []
        for index, site in enumerate(SITES):
            place = places[site] if places else None
            lanes = []
            for lane in range(setting.num_lanes):
                log = folder / f"{site}{lane}.log"
                stack.callback(_show_warnings, log)
                gateway = stack.enter_context(GatewayProcess(log, place))
                stack.callback(gateway.end)
                gateway.configure(_config(setting, index, lane, gateway.host, folder))
                lanes.append(gateway)
            sites.append(lanes)
        for lanes, others in zip(sites, reversed(sites), strict=True):
            for gateway in lanes:
                gateway.connect(*others)
        gateways = [gateway for lanes in sites for gateway in lanes]
        for gateway in gateways:
            gateway.wait("connected", DEADLINE_S)
        ranks = []
        for site in SITES:
            for rank in range(setting.num_ranks):
                lane = rank * setting.num_lanes // setting.num_ranks
                ranks.append(RankStandIn(_socket(folder, site, lane), setting, rank))
                stack.callback(ranks[-1].leave)
        yield gateways, ranks


def _socket(folder: Path, site: str, lane: int) -> Path:
    return folder / f"{site}{lane}.sock"


def both(ranks: list[RankStandIn], number: int) -> float:
    """Let both sites do one round; return the time from the first post to the last result."""
    spans: list[tuple[float, float]] = []
    gate = threading.Barrier(len(ranks))

    def run(rank: RankStandIn) -> None:
        rank.fill()
        gate.wait(DEADLINE_S)
        began_s = rank.post(number)
        spans.append((began_s, rank.wait(number)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if len(spans) < len(ranks):
        raise SystemExit(f"round {number} did not end at both sites")
    for rank in ranks:
        rank.check()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _show_warnings(log: Path) -> None:
    for line in log.read_text().splitlines():
        if " WARNING " in line or " ERROR " in line or "hint" in line:
            print(f"    {line[:200]}")
