"""The links between sites, and the ports that they share. Pure.

**One flow after another** (`FifoLink`). A flow is some chunks of one bucket on one tree. The link
takes waiting flows in the order of their keys, (step, bucket, segment), as a gateway's queue does,
at its full rate. A granule is the chunks in flight on the link. A flow's first granule arrives one
granule's time and half a round trip after the flow began. The next site passes it on from then on,
for chunks are reduced one by one (engine.py says when this is exact). TCP starts slowly, and after
a pause longer than its time-out, RTT + 0.2 s, with a part of the window that it had
(topology/trees/slow_start.py).

**Several flows at once** (`FairNetwork`). Flows of different links compete only if a site's ports
are narrower than its links together. There, and if flows share links, rates are max-min fair. A
link has a connection for each of a few flows; further ones wait in the order of their keys. Rates
are those of progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all flows grow
alike until a resource is full; what crosses it keeps its rate, the others grow on. They are
computed anew whenever a flow comes or goes. A flow arrives as a whole, which counts little, for
flows are small.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.topology.faults.script import Change, TimedChange
from isthmus.topology.simulator.engine import Engine, SimulationError
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.step_work import StepWork
from isthmus.topology.spec.tcp_constants import RTO_MIN_S
from isthmus.topology.spec.world import Link, Site
from isthmus.topology.trees.slow_start import Ramp, is_rested_slow, num_halvings, window_after

Key = tuple[int, int, int]
"""Step, bucket and segment of a flow; lower keys go first."""
Deliver = Callable[[int, int, int, float], None]
"""A callback for the arrival of the first granule, with site, bucket, segment, and the arrival time
of the last granule."""


@dataclass(slots=True)
class Flow:
    """Bytes that cross a link together; one object may be sent to several sites."""

    key: Key
    """The key that orders flows; lower ones go first."""
    num_bytes: float
    """Bytes on the wire."""
    granule_bytes: float
    last_s: float
    """Seconds at which the last byte is ready to be sent; the first is ready when `send` is
    called."""
    deliver: Deliver


class FifoLink:
    """One direction between two sites."""

    def __init__(
        self,
        engine: Engine,
        target: int,
        bytes_per_s: float,
        rtt_s: float,
        first_window_bytes: float | None = None,
        granules: float = 1.0,
    ) -> None:
        """Make a link that has always been idle.

        `first_window_bytes` is that of all connections together; None: no slow start. `granules` of
        a flow are in flight on this link.
        """
        self.bytes_per_s = bytes_per_s
        self.delay_s = rtt_s / 2
        self._engine = engine
        self._target = target
        self._rtt_s = rtt_s
        self._first_window_bytes = first_window_bytes
        self._granules = granules
        self._waiting: list[tuple[Key, int, Flow]] = []
        self._num_sent = 0
        self._free_s = float("-inf")
        """Seconds at which the link becomes, or became, idle."""
        self._is_cut = False
        self._will_look = False
        """Whether an action is scheduled to send waiting flows once the link is free."""
        self._window_bytes = first_window_bytes
        """Bytes of the window with which the latest burst began."""
        self._ramp = self._new_ramp()
        self._grown_bytes = 0.0
        """Bytes sent since the latest burst began."""

    def send(self, flow: Flow) -> None:
        """Send a flow whose first granule is ready."""
        is_free = not self._will_look and not self._is_cut
        if is_free and not self._waiting and self._engine.now_s >= self._free_s:
            self._begin(flow)
            return
        heapq.heappush(self._waiting, (flow.key, self._num_sent, flow))
        self._num_sent += 1
        if is_free:
            self._look_later()

    def change(
        self,
        *,
        bytes_per_s: float | None = None,
        delay_s: float | None = None,
        is_cut: bool | None = None,
    ) -> None:
        """Change the link from the next flow on; None: unchanged. Flows in flight still arrive."""
        self.bytes_per_s = self.bytes_per_s if bytes_per_s is None else bytes_per_s
        if delay_s is not None:
            self.delay_s, self._rtt_s = delay_s, 2 * delay_s
        self._ramp = self._new_ramp()
        self._is_cut = self._is_cut if is_cut is None else is_cut
        if self._waiting and not self._is_cut and not self._will_look:
            self._look_later()

    def _begin(self, flow: Flow) -> None:
        now_s = self._engine.now_s
        self._shrink(now_s - self._free_s)
        granule_bytes = min(flow.num_bytes, self._granules * flow.granule_bytes)
        work_s, granule_s = self._time_s(flow.num_bytes), self._time_s(granule_bytes)
        self._grown_bytes += flow.num_bytes
        self._free_s = now_s + work_s
        last_s = max(self._free_s, flow.last_s + granule_bytes / self.bytes_per_s)
        _, bucket, segment = flow.key
        arrives_s, last_s = now_s + granule_s + self.delay_s, last_s + self.delay_s
        self._engine.at(arrives_s, flow.deliver, self._target, bucket, segment, last_s)

    def _look_later(self) -> None:
        self._will_look = True
        self._engine.at(max(self._engine.now_s, self._free_s), self._look)

    def _look(self) -> None:
        self._will_look = False
        if self._is_cut:
            return
        self._begin(heapq.heappop(self._waiting)[2])
        if self._waiting:
            self._look_later()

    def _time_s(self, num_bytes: float) -> float:
        """Return the seconds to send the next bytes, with waits for the window."""
        plain_s, grown_bytes, ramp = num_bytes / self.bytes_per_s, self._grown_bytes, self._ramp
        if grown_bytes >= ramp.num_bytes:
            return plain_s
        return plain_s + ramp.unused_s(grown_bytes + num_bytes) - ramp.unused_s(grown_bytes)

    def _shrink(self, idle_s: float) -> None:
        """Start a burst after a pause, with the window that the pause left."""
        if self._first_window_bytes is None or idle_s <= self._rtt_s + RTO_MIN_S:
            return
        assert self._window_bytes is not None, "as there is a first one"
        window_bytes = self._first_window_bytes
        if math.isfinite(idle_s):
            link = (self.bytes_per_s, self._rtt_s)
            opened_bytes = window_after(self._grown_bytes, *link, self._window_bytes)
            left_bytes = math.ldexp(opened_bytes, -num_halvings(idle_s, self._rtt_s))
            window_bytes = max(window_bytes, left_bytes)
        self._grown_bytes = 0.0
        if window_bytes != self._window_bytes:
            self._window_bytes = window_bytes
            self._ramp = self._new_ramp()

    def _new_ramp(self) -> Ramp:
        return Ramp(self.bytes_per_s, self._rtt_s, self._window_bytes or math.inf)


_DONE = 1e-9
"""Remaining bytes below which a flow counts as sent (rounding)."""


@dataclass(slots=True, eq=False)
class _Active:
    flow: Flow
    target: int
    resources: Sequence[Hashable]
    delay_s: float
    left_bytes: float
    bytes_per_s: float = 0.0


class FairNetwork:
    """Flows with max-min fair rates over links and ports."""

    def __init__(
        self, engine: Engine, bytes_per_s: Mapping[Hashable, float], num_in_flight: int
    ) -> None:
        """Start without flows; at most `num_in_flight` are on a link at once."""
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._num_in_flight = num_in_flight
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

        The flow waits for a place on the link only; `ports` limit its rate.
        """
        sent = _Active(flow, target, (link, *ports), delay_s, flow.num_bytes)
        heapq.heappush(self._waiting.setdefault(link, []), (flow.key, self._num_sent, sent))
        self._num_sent += 1
        if self._num_active[link] < self._num_in_flight:
            self._advance()
            self._admit(link)
            self._share()

    def _admit(self, link: Hashable) -> None:
        waiting = self._waiting[link]
        while waiting and self._num_active[link] < self._num_in_flight:
            self._active.append(heapq.heappop(waiting)[2])
            self._num_active[link] += 1

    def _advance(self) -> None:
        """Count what was sent since the last change."""
        passed_s = self._engine.now_s - self._since_s
        self._since_s = self._engine.now_s
        for each in self._active:
            each.left_bytes -= each.bytes_per_s * passed_s

    def _share(self) -> None:
        """Set the rates, and schedule an update when the next flow has left."""
        paths = [each.resources for each in self._active]
        for each, rate in zip(self._active, max_min(paths, self._bytes_per_s), strict=True):
            each.bytes_per_s = rate
        self._version += 1
        if self._active:
            next_s = min(each.left_bytes / each.bytes_per_s for each in self._active)
            self._engine.at(self._engine.now_s + max(0.0, next_s), self._leave, self._version)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return  # outdated: flows came or went since
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


Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""


class Network:
    """All links of a topology: sends flows between neighbouring sites."""

    def __init__(self, engine: Engine, work: StepWork, *, is_fair: bool) -> None:
        """Make every link of the topology; flows share links if `is_fair`."""
        topology = work.topology
        names = [site.name for site in topology.sites]
        self._index = {name: index for index, name in enumerate(names)}
        self._links: dict[Hop, Link] = {}
        for one, other in itertools.permutations(range(len(names)), 2):
            link = topology.link(names[one], names[other])
            if link is not None:
                self._links[one, other] = link
        self._ports = {
            (name, site.index): port_bytes_per_s
            for site in topology.sites
            for name in ("out of", "into")
            if (port_bytes_per_s := self._port(site, name)) is not None
        }
        self._fair: FairNetwork | None = None
        self._fifo: dict[Hop, FifoLink] = {}
        if is_fair or self._ports:
            rates: dict[Hashable, float] = dict(self._ports)
            rates |= {hop: link.bytes_per_s for hop, link in self._links.items()}
            self._fair = FairNetwork(engine, rates, work.num_in_flight)
        else:
            self._fifo = {
                hop: FifoLink(
                    engine,
                    hop[1],
                    link.bytes_per_s,
                    link.rtt_s,
                    work.first_window_bytes if is_rested_slow(link.assumed_congestion) else None,
                    work.granules_of_links.get(hop, 1.0),
                )
                for hop, link in self._links.items()
            }

    def _port(self, site: Site, name: str) -> float | None:
        """Return the rate of a site's ports in a direction, if they are narrower than its links."""
        if site.nic_bytes_per_s is None:
            return None
        bytes_per_s = site.nic_bytes_per_s * site.nodes
        end = 0 if name == "out of" else 1
        links = sum(link.bytes_per_s for hop, link in self._links.items() if hop[end] == site.index)
        return bytes_per_s if bytes_per_s < links else None

    def send(self, source: int, target: int, flow: Flow) -> None:
        """Send a flow over the existing link between two sites."""
        hop = (source, target)
        if self._fair is None:
            self._fifo[hop].send(flow)
            return
        ports = [port for port in (("out of", source), ("into", target)) if port in self._ports]
        self._fair.send(flow, target, hop, ports, self._links[hop].rtt_s / 2)

    def change(self, change: Change) -> None:
        """Change one direction of a link now.

        Raises:
            SimulationError: flows of several links share a site's ports.
        """
        if not self._fifo:
            raise SimulationError("faults: want network cards as wide as their links together")
        hop = (self._index[change.source], self._index[change.target])
        link, described = self._fifo[hop], self._links[hop]
        if change.kind == "cut":
            link.change(is_cut=True)
        elif change.kind == "heal":
            link.change(
                bytes_per_s=described.bytes_per_s, delay_s=described.rtt_s / 2, is_cut=False
            )
        else:
            link.change(bytes_per_s=change.bytes_per_s, delay_s=change.delay_s)


def changing_network(engine: Engine, work: StepWork, settings: Settings) -> Network:
    """Return a run's network, with all changes of links scheduled in the engine."""
    network = Network(engine, work, is_fair=settings.sharing == "fair")
    for each in settings.changes:
        assert isinstance(each.change, Change), "checked by require_simulated"
        engine.at(each.at_s, network.change, each.change)
    return network


def require_simulated(changes: Iterable[TimedChange], *, is_fair: bool) -> None:
    """Refuse changes that cannot be simulated.

    Raises:
        SimulationError: links are shared, or a change is not of rate, RTT, cut or heal.
    """
    for each in changes:
        change = each.change
        if is_fair:
            raise SimulationError("faults: links that flows share do not change: want sharing fifo")
        known = isinstance(change, Change) and change.kind in ("shape", "cut", "heal")
        if not known or not {"jitter_s", "loss"}.isdisjoint(getattr(change, "figures", dict)()):
            raise SimulationError(
                f"faults: {change}: only rate, rtt, cut, partition, flap and heal are simulated"
            )
