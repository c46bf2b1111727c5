"""Links that several flows share at once, and ports that links share: max-min fairness. Pure.

A link has a connection for each of a few flows; further ones wait in the order of their keys. Each
flow on its way crosses some resources, each with a rate: its link, and its sites' ports towards the
WAN where these are narrower than what leaves through them. Rates are those of progressive filling
(Bertsekas and Gallager, Data Networks, 6.5.2): all flows grow alike until a resource is full; what
crosses it keeps its rate, the others grow on. They are computed anew whenever a flow comes or goes.

A flow arrives as a whole: the next site has none of it before. Flows are small where this counts.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from topology.simulator.engine import Engine
from topology.simulator.links import Flow, Key

_DONE = 1e-9
"""Of a flow's bytes: what rounding leaves."""


@dataclass(slots=True, eq=False)
class _Active:
    flow: Flow
    target: int
    resources: Sequence[Hashable]
    delay_s: float
    left_bytes: float
    bytes_per_s: float = 0.0


class FairNetwork:
    """Resources, and the flows on them."""

    def __init__(
        self, engine: Engine, bytes_per_s: Mapping[Hashable, float], num_abreast: int
    ) -> None:
        """Start without flows.

        Args:
            engine: the clock.
            bytes_per_s: of each resource.
            num_abreast: flows of one link that are on their way at once, at most.
        """
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._num_abreast = num_abreast
        self._waiting: dict[Hashable, list[tuple[Key, int, _Active]]] = {}
        self._num_active: Counter[Hashable] = Counter()
        self._active: list[_Active] = []
        self._num_sent = 0
        self._since_s = 0.0
        self._version = 0

    def send(
        self, flow: Flow, target: int, link: Hashable, ports: Sequence[Hashable], delay_s: float
    ) -> None:
        """Take a flow; it arrives `delay_s` after its last byte has left.

        Args:
            flow: its bytes.
            target: the site that it goes to.
            link: the resource that it waits for.
            ports: further ones that it crosses.
            delay_s: one way.
        """
        sent = _Active(flow, target, (link, *ports), delay_s, flow.num_bytes)
        heapq.heappush(self._waiting.setdefault(link, []), (flow.key, self._num_sent, sent))
        self._num_sent += 1
        if self._num_active[link] < self._num_abreast:
            self._advance()
            self._admit(link)
            self._share()

    def _admit(self, link: Hashable) -> None:
        waiting = self._waiting[link]
        while waiting and self._num_active[link] < self._num_abreast:
            self._active.append(heapq.heappop(waiting)[2])
            self._num_active[link] += 1

    def _advance(self) -> None:
        """Count what was sent since the last change."""
        passed_s = self._engine.now_s - self._since_s
        self._since_s = self._engine.now_s
        for each in self._active:
            each.left_bytes -= each.bytes_per_s * passed_s

    def _share(self) -> None:
        """Set the rates, and look again when the next flow has left."""
        paths = [each.resources for each in self._active]
        for each, rate in zip(self._active, max_min(paths, self._bytes_per_s), strict=True):
            each.bytes_per_s = rate
        self._version += 1
        if self._active:
            next_s = min(each.left_bytes / each.bytes_per_s for each in self._active)
            self._engine.at(self._engine.now_s + max(0.0, next_s), self._leave, self._version)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return  # something came or went since, and that looked again
        self._advance()
        least = min(each.left_bytes / each.flow.num_bytes for each in self._active)
        left = [
            each
            for each in self._active
            if each.left_bytes <= max(_DONE, least) * each.flow.num_bytes
        ]
        self._active = [each for each in self._active if each not in left]
        for each in left:
            self._num_active[each.resources[0]] -= 1
            self._admit(each.resources[0])
        self._share()
        for each in left:
            granule_s = each.flow.granule_bytes / each.bytes_per_s
            done_s = max(self._engine.now_s, each.flow.last_s + granule_s) + each.delay_s
            _, bucket, segment = each.flow.key
            self._engine.at(done_s, each.flow.deliver, each.target, bucket, segment, done_s)


def max_min(
    paths: Sequence[Sequence[Hashable]], bytes_per_s: Mapping[Hashable, float]
) -> list[float]:
    """Return the max-min fair rate of each path over resources of given rates.

    O(resources * (resources + paths)).
    """
    rates = [math.inf] * len(paths)
    left = {resource: bytes_per_s[resource] for path in paths for resource in path}
    growing: dict[Hashable, set[int]] = {resource: set() for resource in left}
    for index, path in enumerate(paths):
        for resource in path:
            growing[resource].add(index)
    while any(growing.values()):
        shares = {
            resource: left[resource] / len(each) for resource, each in growing.items() if each
        }
        narrowest = min(shares, key=shares.__getitem__)
        for index in sorted(growing[narrowest]):
            rates[index] = shares[narrowest]
            for resource in paths[index]:
                growing[resource].discard(index)
                left[resource] -= shares[narrowest]
    return rates
