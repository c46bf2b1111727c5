"""The exchange of one step's buckets, up and down a plan's trees or from all to all. Pure.

A site sends a segment's sum on once its own part and those of its children are there; the root's
result goes down the same tree, or another with the same root. A site's gateways encode sums that
they send up and, at the root, the result. They decode sums from below, and the result; on the way
down bytes are passed on unchanged. In a gather every site encodes once and decodes each other
site's part. Sending takes a gateway's time, too. A site has one queue for all this work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.topology.simulator.engine import Engine, Server
from isthmus.topology.simulator.step_work import GatewayCost, Segment, StepWork
from isthmus.topology.simulator.wan_links import Flow, Network

Reduced = Callable[[int, int], None]
"""A callback with site and bucket, when all of a bucket's sum has arrived."""
Arrive = Callable[[int, int, int, float], None]
"""A callback with site, bucket, segment, and the arrival time of its last granule."""


@dataclass(slots=True)
class _Sum:
    """The sum of one segment at one site: from its children, or in a gather from all sites."""

    num_missing: int
    first_s: float = 0.0
    """Seconds at which the first granule of all parts so far has arrived."""
    last_s: float = 0.0


class ExchangeWork:
    """What the exchanges of all steps have in common."""

    def __init__(self, work: StepWork) -> None:
        """Work out who sends to whom, and what gateways need for each segment."""
        self.step = work
        sites = range(work.plan.num_sites)
        self.num_parts = [
            [1 + len(tree.children(site)) for site in sites] for tree in work.plan.trees
        ]
        """Parts of a sum by tree and site: the site's own, and those of its children."""
        self.receivers = [[tree.receivers(site) for site in sites] for tree in work.plan.trees]
        """Sites that a result is passed on to, by tree and site."""
        known = {
            gateway: [[_Cost.of(gateway, each) for each in segments] for segments in work.segments]
            for gateway in {site.gateway for site in work.sites}
        }
        self.costs = [known[site.gateway] for site in work.sites]
        """The cost of each segment by site, bucket and segment."""


@dataclass(frozen=True, slots=True)
class _Cost:
    """What a site's gateways need for a segment."""

    encode_s: float
    decode_s: float
    send_s: float
    granule: float
    """Share of the segment that crosses before the next site can go on."""

    @classmethod
    def of(cls, gateway: GatewayCost, segment: Segment) -> _Cost:
        coding_s = gateway.coding_s(segment, 1, 1)
        return cls(*coding_s, gateway.sending_s(segment, 1), segment.granule)


class StepExchange:
    """The exchange of one step at all sites."""

    def __init__(
        self,
        engine: Engine,
        network: Network,
        shared: ExchangeWork,
        gateways: Sequence[Server],
        step: int,
        reduced: Reduced,
    ) -> None:
        """Expect every bucket of every site.

        `gateways` has one server per site. `step` orders flows that wait for a link.
        """
        self._engine = engine
        self._network = network
        self._work = work = shared.step
        self._shared = shared
        self._gateways = gateways
        self._step = step
        self._reduced = reduced
        self._sums: dict[tuple[int, int, int], _Sum] = {}
        """The sums by bucket, segment and site."""
        self._missing = [
            [len(segments) for segments in work.segments] for _ in range(work.plan.num_sites)
        ]
        self._last_s = [[0.0] * len(work.segments) for _ in range(work.plan.num_sites)]

    def post(self, site: int, bucket: int) -> None:
        """Submit a site's part of a bucket now."""
        now_s = self._engine.now_s
        for index in range(len(self._work.segments[bucket])):
            if self._work.plan.is_gather:
                self._gather(site, bucket, index)
            else:
                self._add_to_tree(site, bucket, index, now_s, now_s)

    def _gather(self, site: int, bucket: int, index: int) -> None:
        """Encode a segment once, and send it to every other site."""
        now_s, num_sent = self._engine.now_s, self._work.plan.num_sites - 1
        first_s, last_s = self._serve(site, bucket, index, now_s, encoded=1, sent=num_sent)
        self._when(first_s, self._send_to_all, site, bucket, index, last_s)

    def _send_to_all(self, site: int, bucket: int, index: int, last_s: float) -> None:
        flow = self._flow(bucket, index, last_s, self._take)
        for other in range(self._work.plan.num_sites):
            if other != site:
                self._network.send(site, other, flow)
        self._take(site, bucket, index, last_s)

    def _take(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Decode one site's part of a gather; the last one completes the sum."""
        first_s, last_s = self._serve(site, bucket, index, last_s, decoded=1)
        sum_ = self._add(site, bucket, index, first_s, last_s, self._work.plan.num_sites)
        if sum_ is not None:
            self._done(site, bucket, sum_.last_s)

    def _add_to_tree(
        self, site: int, bucket: int, index: int, first_s: float, last_s: float
    ) -> None:
        """Add a site's own part of a segment, or a child's decoded sum."""
        num_parts = self._shared.num_parts[self._work.segments[bucket][index].tree][site]
        sum_ = self._add(site, bucket, index, first_s, last_s, num_parts)
        if sum_ is not None:
            self._when(sum_.first_s, self._encode_sum, site, bucket, index, sum_.last_s)

    def _encode_sum(self, site: int, bucket: int, index: int, last_s: float) -> None:
        segment = self._work.segments[bucket][index]
        sent = 0 if site == self._work.plan.trees[segment.tree].root else 1
        first_s, last_s = self._serve(site, bucket, index, last_s, encoded=1, sent=sent)
        self._when(first_s, self._pass_on, site, bucket, index, last_s)

    def _pass_on(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Send a site's sum up, or at the root, down."""
        segment = self._work.segments[bucket][index]
        tree = self._work.plan.trees[segment.tree]
        if site == tree.root:
            self._come_down(site, bucket, index, last_s)
        else:
            flow = self._flow(bucket, index, last_s, self._come_up)
            self._network.send(site, tree.parent[site], flow)

    def _come_up(self, site: int, bucket: int, index: int, last_s: float) -> None:
        first_s, last_s = self._serve(site, bucket, index, last_s, decoded=1)
        self._add_to_tree(site, bucket, index, first_s, last_s)

    def _come_down(self, site: int, bucket: int, index: int, last_s: float) -> None:
        """Pass a result on, and decode it."""
        segment = self._work.segments[bucket][index]
        num_receivers = len(self._shared.receivers[segment.tree][site])
        first_s, last_sent_s = self._serve(site, bucket, index, last_s, sent=num_receivers)
        if num_receivers:
            self._when(first_s, self._send_down, site, bucket, index, last_sent_s)
        _, last_s = self._serve(site, bucket, index, last_s, decoded=1)
        self._done(site, bucket, last_s)

    def _send_down(self, site: int, bucket: int, index: int, last_s: float) -> None:
        tree = self._work.segments[bucket][index].tree
        flow = self._flow(bucket, index, last_s, self._come_down)
        for receiver in self._shared.receivers[tree][site]:
            self._network.send(site, receiver, flow)

    def _add(
        self, site: int, bucket: int, index: int, first_s: float, last_s: float, num_parts: int
    ) -> _Sum | None:
        """Count a part, there from `first_s` to `last_s`; return the sum if it was the last one."""
        key = (bucket, index, site)
        sum_ = self._sums.get(key)
        if sum_ is None:
            sum_ = self._sums[key] = _Sum(num_parts)
        sum_.num_missing -= 1
        sum_.first_s, sum_.last_s = max(sum_.first_s, first_s), max(sum_.last_s, last_s)
        return None if sum_.num_missing else self._sums.pop(key)

    def _when(
        self, time_s: float, then: Arrive, site: int, bucket: int, index: int, last_s: float
    ) -> None:
        """Call `then` at a time that may be now."""
        if time_s <= self._engine.now_s:
            then(site, bucket, index, last_s)
        else:
            self._engine.at(time_s, then, site, bucket, index, last_s)

    def _done(self, site: int, bucket: int, last_s: float) -> None:
        """Count a segment whose result is decoded; the last one is the bucket's."""
        self._missing[site][bucket] -= 1
        self._last_s[site][bucket] = max(self._last_s[site][bucket], last_s)
        if self._missing[site][bucket] == 0:
            self._engine.at(self._last_s[site][bucket], self._reduced, site, bucket)

    def _flow(self, bucket: int, index: int, last_s: float, arrive: Arrive) -> Flow:
        """Return the flow of a segment over a link."""
        segment = self._work.segments[bucket][index]
        return Flow(
            (self._step, bucket, index),
            segment.wire_bytes,
            segment.wire_bytes * segment.granule,
            last_s,
            arrive,
        )

    def _serve(
        self,
        site: int,
        bucket: int,
        index: int,
        last_s: float,
        *,
        encoded: int = 0,
        decoded: int = 0,
        sent: int = 0,
    ) -> tuple[float, float]:
        """Return when gateways have processed the first and the last granule of a segment.

        Its first granule arrives now, its last one at `last_s`. The counts say how often the
        segment is encoded, decoded and sent.
        """
        cost = self._shared.costs[site][bucket][index]
        work_s = encoded * cost.encode_s + decoded * cost.decode_s + sent * cost.send_s
        return self._gateways[site].serve(self._engine.now_s, last_s, work_s, work_s * cost.granule)
