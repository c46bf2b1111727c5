"""The real executors of several sites, with nothing between them but bytes that a test delivers.

What a link would send is packed as it would be, and lies in `wire`; `deliver` takes bytes the way
that the server does: unpack, then `Executor.receive`. The pool works when the test says so, on its
thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from isthmus.protos.failure import Failure
from isthmus.protos.frame import Frame, Kind, Packed, pack, unpack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.executor import Executor
from isthmus.sites.gateway.reduction.pool import Pool, Priority
from isthmus.sites.local.rank_messages import Reduce, Reduced
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_sites import gateway_config


def request_of(numel: int, **changes: Any) -> Reduce:  # noqa: ANN401 - fields of the request
    """Return a rank's request for a bucket; its region is not looked at."""
    fields = {"round": 0, "bucket": 0, "layout": 77, "weight": 1.0, "exact": False, **changes}
    return Reduce(region=0, numel=numel, **fields)


class StepPool(Pool):
    """Does what was submitted when it is told to, the earliest chunk first."""

    def __init__(self) -> None:
        super().__init__(0)

    def submit(self, priority: Priority, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (priority, next(self._order), work))

    def run(self) -> None:
        while self.run_one():
            pass

    def run_one(self) -> bool:
        """Do the earliest chunk's work; return whether there was any."""
        if not self._heap:
            return False
        heapq.heappop(self._heap)[2]()
        return True


@dataclass(frozen=True, slots=True)
class Sent:
    """One frame on its way."""

    source: int
    target: int
    data: Packed


class _Wire:
    """Stands where a Link does."""

    ahead_bytes = 1 << 30
    unsent_bytes = 0
    num_channels = 2
    rtt_s = 0.001
    bytes_per_s = 1e9

    def __init__(self, source: int, target: int, wire: list[Sent]) -> None:
        self._source, self._target, self._wire = source, target, wire

    def send(self, frame: Frame, raw_bytes: int) -> int:
        assert raw_bytes > 0 or frame.key.kind is Kind.ROUND_ENDS
        data = pack(frame)
        self._wire.append(Sent(self._source, self._target, data))
        return len(data)


class Exchanges:
    """One gateway's executor at each site; `wire`, `reduced` and `failures` tell what they did."""

    def __init__(
        self,
        plan: ReductionPlan,
        codec: str | tuple[str, ...],
        ranks: Sequence[int],
        **changes: Any,  # noqa: ANN401 - fields of the configuration
    ) -> None:
        self.wire: list[Sent] = []
        self.reduced: list[tuple[int, int, Reduced]] = []
        """Site, rank and what it was told."""
        self.ended: list[tuple[int, int]] = []
        """Site, and the round that it was told has ended."""
        self.failures: list[Failure] = []
        self.pools = [StepPool() for _ in ranks]
        self.exchanges = [
            self._exchange(
                gateway_config(
                    Path("/nowhere"),
                    plan,
                    site,
                    **({"codec": codec} if isinstance(codec, str) else {"codecs": codec}),
                    ranks_per_gateway=tuple(ranks),
                    **changes,
                )
            )
            for site in range(plan.num_sites)
        ]

    def _exchange(self, config: GatewayConfig) -> Executor:
        site = config.site_index

        def on_reduced(rank: int, reduced: Reduced) -> None:
            self.reduced.append((site, rank, reduced))

        exchange = Executor(
            config,
            self.pools[site],
            on_reduced=on_reduced,
            on_failure=self.failures.append,
            on_round_ends=lambda round_: self.ended.append((site, round_)),
        )
        links = {
            (other, 0): _Wire(site, other, self.wire) for other in config.plan.neighbours(site)
        }
        exchange.connect(cast("Mapping[tuple[int, int], Link]", links))
        return exchange

    def post(self, site: int, rank: int, request: Reduce, values: Floats) -> None:
        """Hand a rank's part over, and do what can be done with it."""
        self.exchanges[site].post(rank, request, values)
        self.pools[site].run()

    def post_all(self, parts: Sequence[Floats], weights: Sequence[float]) -> None:
        """Hand over every rank's part of the bucket whose contributions `parts` are, by site."""
        for site, part in enumerate(parts):
            self.post_site(site, part, weights[site])

    def post_site(
        self,
        site: int,
        part: Floats,
        weight: float,
        **changes: Any,  # noqa: ANN401 - fields of the post
    ) -> None:
        """Hand over one site's part: it is lent, and then holds the result."""
        ranks = self.exchanges[site]._config.ranks_per_site[site]
        numel = len(part)
        size = max(1, -(-numel // ranks))
        for rank in range(ranks):
            start, end = min(rank * size, numel), min((rank + 1) * size, numel)
            request = request_of(numel, weight=weight, **changes)
            self.post(site, rank, request, part[start:end])

    def deliver(self, source: int, target: int, data: Packed) -> None:
        """Give bytes to a site as from another one's gateway.

        Raises:
            IsthmusError: they were refused before they were taken over.
        """
        self.exchanges[target].receive((source, 0), unpack(data))
        self.pools[target].run()
