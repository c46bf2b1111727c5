"""Decides how many gateways a node of a site gets, where the topology leaves it to isthmus. Pure.

Each gateway is a lane: one process with one event loop, which carries the traffic of some of the
node's ranks. `wan.gateways_per_node: auto` is as many as the site's links and the node's card (its
NIC) ask for, and no more than its ranks can be divided among, its cores can feed, and its ports
allow. A rank has one gateway, so a node never has more of them than ranks.

The coordinator decides, when a run is submitted: then the agents have told how many cores they may
use. Gateways, ranks and agents read the number in the run's spec.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.topology.spec.world import Site, Topology

LANE_BYTES_PER_S = 1.5e9
"""What one gateway carries each way: 12 Gbit/s in fp32 (docs/measurements/lanes.md)."""
CORES_PER_LANE = 2
"""Cores that a gateway keeps busy at that rate: 1.30 CPU-s a GB (docs/measurements/lanes.md)."""
LINKS, CARD, RANKS, CORES, PORTS = "links", "card", "ranks", "cores", "ports"
"""What may limit the number."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMachine:
    """The machine of a site's agent, as far as it matters here."""

    host: str
    """Equal for agents on the same machine."""
    usable_cores: int
    """Cores that its processes may use."""
    has_all_nodes: bool = False
    """Whether all nodes of the site are on it, also those that have hosts of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The number of gateways of a node, and why."""

    num_gateways: int
    asked: Mapping[str, int]
    """What each of LINKS, CARD, RANKS, CORES and PORTS would have, as far as they are known."""
    limit: str
    """The one of them that has the least."""

    @property
    def is_of_interest(self) -> bool:
        """Whether more than one is asked for."""
        return min(self.asked[name] for name in (LINKS, CARD) if name in self.asked) > 1

    @property
    def why(self) -> str:
        """Return the reasons, as a part of a sentence."""
        says = {
            LINKS: "links ask for {}",
            CARD: "the card for {}",
            RANKS: "ranks allow {}",
            CORES: "cores allow {}",
            PORTS: "ports allow {}",
        }
        told = ", ".join(says[name].format(count) for name, count in self.asked.items())
        return f"{told}; limited by {self.limit}"


def lanes_of(site: Site, topology: Topology, cores: int | None) -> Lanes:
    """Return the gateways of each node of a site that leaves the number to isthmus.

    Args:
        site: one of the topology.
        topology: the sites that exchange, and their links.
        cores: for the processes of one node; None: not known, and enough.
    """
    ranks, card, ports = site.accelerators_per_node, site.nic_bytes_per_s, site.ports
    asked = {LINKS: _lanes_for(_link_bytes_per_s(site, topology) / site.nodes)}
    if card is not None:
        asked[CARD] = _lanes_for(card)
    wanted = min(asked.values())
    asked[RANKS] = ranks
    if cores is not None:
        asked[CORES] = max(1, (cores - ranks) // CORES_PER_LANE)  # a rank keeps one core busy
    if ports is not None:
        asked[PORTS] = len(ports)
    most = min(asked[name] for name in (RANKS, CORES, PORTS) if name in asked)
    # Gateways of a node have the same number of ranks.
    fitting = [count for count in range(1, most + 1) if ranks % count == 0]
    return Lanes(
        num_gateways=next((count for count in fitting if count >= wanted), fitting[-1]),
        asked=asked,
        limit=min(asked, key=lambda name: asked[name]),
    )


def decide_lanes(topology: Topology, agents: Mapping[str, AgentMachine]) -> dict[str, Lanes]:
    """Return the gateways of each site that leaves their number to isthmus.

    A site without an agent gets one gateway a node.

    Args:
        topology: the sites that take part in a run.
        agents: the machines of agents, by site.
    """
    cores = cores_per_node(topology, agents)
    return {
        site.name: lanes_of(site, topology, cores.get(site.name, 1))
        for site in topology.sites
        if site.chooses_gateways
    }


def bounds_of_lanes(topology: Topology) -> dict[str, Lanes]:
    """Return the most gateways that such sites can get, while nobody knows their cores."""
    return {
        site.name: lanes_of(site, topology, None)
        for site in topology.sites
        if site.chooses_gateways
    }


def with_lanes(topology: Topology, lanes: Mapping[str, Lanes]) -> Topology:
    """Return the topology with what has been decided."""
    sites = (
        dataclasses.replace(
            site, gateways_per_node=lanes[site.name].num_gateways, chooses_gateways=False
        )
        if site.name in lanes
        else site
        for site in topology.sites
    )
    return dataclasses.replace(topology, sites=tuple(sites))


def cores_per_node(topology: Topology, agents: Mapping[str, AgentMachine]) -> dict[str, int]:
    """Return the cores for each node of the sites that have an agent.

    All nodes on one machine have the same share of its cores. Other machines of a site are taken to
    be like that of its agent.
    """
    nodes_here = {
        site.name: site.nodes if agents[site.name].has_all_nodes or not _is_spread(site) else 1
        for site in topology.sites
        if site.name in agents
    }
    nodes_at = Counter[str]()
    for name, count in nodes_here.items():
        nodes_at[agents[name].host] += count
    return {name: agents[name].usable_cores // nodes_at[agents[name].host] for name in nodes_here}


def _is_spread(site: Site) -> bool:
    """Whether each node is a machine of its own."""
    return bool(site.hosts) or site.launcher.kind == "slurm"


def _link_bytes_per_s(site: Site, topology: Topology) -> float:
    """Return what all links of a site carry together, in the direction that carries more."""
    sent = sum(link.bytes_per_s for link in topology.links if link.source == site.name)
    received = sum(link.bytes_per_s for link in topology.links if link.target == site.name)
    return max(sent, received)


def _lanes_for(bytes_per_s: float) -> int:
    return max(1, math.ceil(bytes_per_s / LANE_BYTES_PER_S - _TOLERANCE))
