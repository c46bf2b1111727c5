"""The links between sites, and the ports that they share. Pure.

Flows of different links meet only where a site's ports are narrower than its links together. There,
and where flows share links, rates are max-min fair; elsewhere each link sends by itself, one flow
after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable

from topology.cost.slow_start import is_rested_slow
from topology.faults.changes import Change
from topology.faults.script import TimedChange
from topology.simulator.engine import Engine, SimulationError
from topology.simulator.links import FifoLink, Flow
from topology.simulator.settings import Settings
from topology.simulator.sharing import FairNetwork
from topology.simulator.step_work import StepWork
from topology.world import Link, Site

Hop = tuple[int, int]
"""A directed link, by the indices of its sites."""


class Network:
    """Sends flows between neighbours."""

    def __init__(self, engine: Engine, work: StepWork, *, is_fair: bool) -> None:
        """Make every link of the topology.

        Args:
            engine: the clock.
            work: names the topology, connections and windows.
            is_fair: flows share links.
        """
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
            self._fair = FairNetwork(engine, rates, work.num_abreast)
        else:
            self._fifo = {
                hop: FifoLink(
                    engine,
                    hop[1],
                    link.bytes_per_s,
                    link.rtt_s,
                    work.first_window_bytes if is_rested_slow(link.congestion) else None,
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
        """Send a flow over the link between two sites, which is there."""
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
    """Return the network of a run, with what happens to its links in the engine's future."""
    network = Network(engine, work, is_fair=settings.sharing == "fair")
    for each in settings.changes:
        assert isinstance(each.change, Change), "checked by require_simulated"
        engine.at(each.at_s, network.change, each.change)
    return network


def require_simulated(changes: Iterable[TimedChange], *, is_fair: bool) -> None:
    """Refuse changes that a simulation knows nothing of.

    Raises:
        SimulationError: links are shared, or there is a change of another kind than rate, RTT, cut,
            heal.
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
