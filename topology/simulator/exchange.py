"""One step's buckets on their way up and down the trees of a plan, or from all to all. Pure.

A site sends a segment's sum on once its own part and those of its children are there; the root's result goes
down the same tree. Each hop up costs its sender's encoder and its receiver's decoder, as does the root's
result; on the way down bytes are passed on as they are. In a gather every site encodes once and decodes
what comes of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from topology.simulator.engine import Engine
from topology.simulator.links import Flow
from topology.simulator.network import Network
from topology.simulator.servers import Server
from topology.simulator.workload import Segment, SiteWork, Workload

Reduced = Callable[[int, int], None]
"""Called with site and bucket when all of a bucket's sum is there."""


@dataclass(slots=True)
class Codecs:
    """A site's gateways."""

    encoder: Server
    decoder: Server


@dataclass(slots=True)
class _Sum:
    """One segment at one site, on its way up; in a gather, its way in."""

    num_missing: int
    last_s: float = 0.0


class StepExchange:
    """The exchange of one step at all sites."""

    def __init__(
        self,
        engine: Engine,
        network: Network,
        work: Workload,
        codecs: list[Codecs],
        step: int,
        reduced: Reduced,
    ) -> None:
        """Expect every bucket of every site.

        Args:
            engine: the clock.
            network: the links.
            work: what is exchanged, and how.
            codecs: of each site.
            step: its number, which orders what waits for a link.
            reduced: is told what is done.
        """
        self._engine = engine
        self._network = network
        self._work = work
        self._codecs = codecs
        self._step = step
        self._reduced = reduced
        self._children = [
            [tree.children(site) for site in range(work.plan.num_sites)] for tree in work.plan.trees
        ]
        self._sums: dict[tuple[int, int, int], _Sum] = {}
        """By bucket, segment and site."""
        self._missing = [
            [len(segments) for segments in work.segments] for _ in range(work.plan.num_sites)
        ]
        self._last_s = [[0.0] * len(work.segments) for _ in range(work.plan.num_sites)]

    def post(self, site: int, bucket: int) -> None:
        """Take a site's part of a bucket: it is there now."""
        now_s = self._engine.now_s
        for index in range(len(self._work.segments[bucket])):
            if self._work.plan.is_gather:
                self._gather(site, bucket, index)
            else:
                self._add(site, bucket, index, now_s)

    def _gather(self, site: int, bucket: int, index: int) -> None:
        """Encode a segment once, and send it to every other site."""
        segment, now_s = self._work.segments[bucket][index], self._engine.now_s
        first_s, last_s = self._encode(site, segment, now_s)
        self._engine.at(first_s, self._send_to_all, site, bucket, index, last_s)

    def _send_to_all(self, site: int, bucket: int, index: int, last_s: float) -> None:
        for other in range(self._work.plan.num_sites):
            if other != site:
                self._send(site, other, bucket, index, last_s, self._take)
        self._take(site, bucket, index, last_s)

    def _take(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Decode one site's part of a gather; the last one completes the sum."""
        segment = self._work.segments[bucket][index]
        _, last_s = self._decode(site, segment, last_s)
        if self._is_complete(site, bucket, index, last_s, self._work.plan.num_sites):
            self._done(site, bucket, self._sums.pop((bucket, index, site)).last_s)

    def _add(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Add a site's own part of a segment, or what a child's sum was decoded to."""
        tree = self._work.segments[bucket][index].tree
        if not self._is_complete(site, bucket, index, last_s, 1 + len(self._children[tree][site])):
            return
        last_s = self._sums.pop((bucket, index, site)).last_s
        first_s, last_s = self._encode(site, self._work.segments[bucket][index], last_s)
        self._engine.at(first_s, self._pass_on, site, bucket, index, last_s)

    def _pass_on(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Send a site's sum up, or if it is everybody's, down."""
        segment = self._work.segments[bucket][index]
        tree = self._work.plan.trees[segment.tree]
        if site == tree.root:
            self._come_down(site, bucket, index, last_s)
        else:
            self._send(site, tree.parent[site], bucket, index, last_s, self._come_up)

    def _come_up(self, site: int, bucket: int, index: int, last_s: float) -> None:
        first_s, last_s = self._decode(site, self._work.segments[bucket][index], last_s)
        self._engine.at(first_s, self._add, site, bucket, index, last_s)

    def _come_down(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Pass a result on, and decode it."""
        segment = self._work.segments[bucket][index]
        for child in self._children[segment.tree][site]:
            self._send(site, child, bucket, index, last_s, self._come_down)
        _, last_s = self._decode(site, segment, last_s)
        self._done(site, bucket, last_s)

    def _is_complete(self, site: int, bucket: int, index: int, last_s: float, parts: int) -> bool:
        """Count a part; True with the last one."""
        key = (bucket, index, site)
        sum_ = self._sums.get(key)
        if sum_ is None:
            sum_ = self._sums[key] = _Sum(parts)
        sum_.num_missing -= 1
        sum_.last_s = max(sum_.last_s, last_s)
        return sum_.num_missing == 0

    def _done(self, site: int, bucket: int, last_s: float) -> None:
        """Count a segment whose result is decoded; the last one is the bucket's."""
        self._missing[site][bucket] -= 1
        self._last_s[site][bucket] = max(self._last_s[site][bucket], last_s)
        if self._missing[site][bucket] == 0:
            self._engine.at(self._last_s[site][bucket], self._reduced, site, bucket)

    def _send(
        self,
        source: int,
        target: int,
        bucket: int,
        index: int,
        last_s: float,
        arrive: Callable[[int, int, int, float], None],
    ) -> None:
        segment = self._work.segments[bucket][index]
        flow = Flow(
            (self._step, bucket, index),
            segment.wire_bytes,
            segment.wire_bytes * segment.granule,
            last_s,
            lambda arrived_s: arrive(target, bucket, index, arrived_s),
        )
        self._network.send(source, target, flow)

    def _encode(self, site: int, segment: Segment, last_s: float) -> tuple[float, float]:
        rate = self._work.sites[site].encode_bytes_per_s
        return self._serve(self._codecs[site].encoder, rate, segment, last_s)

    def _decode(self, site: int, segment: Segment, last_s: float) -> tuple[float, float]:
        rate = self._work.sites[site].decode_bytes_per_s
        return self._serve(self._codecs[site].decoder, rate, segment, last_s)

    def _serve(
        self, server: Server, bytes_per_s: float, segment: Segment, last_s: float
    ) -> tuple[float, float]:
        work_s = segment.raw_bytes / bytes_per_s
        return server.serve(self._engine.now_s, last_s, work_s, work_s * segment.granule)


def codecs_of(sites: tuple[SiteWork, ...]) -> list[Codecs]:
    """Return idle gateways for each site."""
    return [Codecs(Server(), Server()) for _ in sites]
