"""Reduction trees: along which links a chunk's sum is formed and its result comes back.

Pure. The executor in the gateway knows only `Reduction`; a planner may fill it in differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from topology.errors import ConfigError, Problem
from topology.job import Job
from topology.suggest import did_you_mean
from topology.world import Topology


@dataclass(frozen=True, slots=True)
class Tree:
    """A rooted tree over all sites, by index.

    Contributions travel from `parent`'s keys to its values, and are summed at each site in
    ascending order of the senders' indices, with the site's own in its place; the result is
    encoded once at the root and its bytes are passed down unchanged.
    """

    root: int
    parent: Mapping[int, int]
    weight: float = 1.0
    """Share of the chunks, relative to the other trees."""

    def children(self, site: int) -> tuple[int, ...]:
        """Return the sites that send their sums to `site`, in ascending order."""
        return tuple(sorted(child for child, parent in self.parent.items() if parent == site))


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """How every chunk is reduced: either all to all, or along a weighted set of trees."""

    num_sites: int
    trees: tuple[Tree, ...]
    """Empty: gather. Each site sends its encoded chunk to all others; each sums in site order."""
    why: str
    """One line for people."""

    @property
    def is_gather(self) -> bool:
        """Whether every site sends to every other."""
        return not self.trees

    def tree_index(self, chunk: int) -> int:
        """Return which tree carries a chunk: the smooth weighted round-robin over the trees.

        Chunk k goes to the tree that is furthest behind its share after k chunks; every site
        computes the same, for the weights are part of the configuration.
        """
        if len(self.trees) <= 1:
            return 0
        total = sum(tree.weight for tree in self.trees)
        given = [0] * len(self.trees)
        chosen = 0
        period = chunk % _PERIOD
        for position in range(period + 1):
            behind = [
                tree.weight / total * (position + 1) - count
                for tree, count in zip(self.trees, given, strict=True)
            ]
            chosen = behind.index(max(behind))
            given[chosen] += 1
        return chosen

    def neighbours(self, site: int) -> tuple[int, ...]:
        """Return the sites that `site` exchanges bytes with, in ascending order."""
        if self.is_gather:
            return tuple(other for other in range(self.num_sites) if other != site)
        found: set[int] = set()
        for tree in self.trees:
            found.update(tree.children(site))
            if site in tree.parent:
                found.add(tree.parent[site])
        return tuple(sorted(found))


_PERIOD = 256
"""Chunks after which the round-robin starts over: bounds its cost."""


def plan_reduction(job: Job, topology: Topology) -> ReductionPlan:
    """Choose the trees for a job: as it says, or automatically.

    Automatic: the star at `hub` if the job names one; else gather for two sites, else the star whose slowest link is fastest (all its links in
    both directions), ties by the smaller sum of RTTs, then by site order. Where no site reaches
    every other directly, the widest-bottleneck spanning tree.

    Raises:
        ConfigError: the tree asked for needs a link, or a site, that the topology does not have.
    """
    sites = topology.sites
    wanted, hub_name = job.reduction.tree, job.reduction.hub
    names = [site.name for site in sites]
    if hub_name is not None and hub_name not in names:
        raise _refused("hub", f"unknown site {hub_name!r}{did_you_mean(hub_name, names)}")
    if len(sites) == 1:
        return ReductionPlan(1, (), "one site: nothing crosses")
    if wanted == "gather" or (wanted == "auto" and hub_name is None and len(sites) == 2):
        _require_all_pairs(topology)
        return ReductionPlan(len(sites), (), "gather: every site sends to every other")
    if hub_name is not None:
        hub = names.index(hub_name)
        _require_star(topology, hub)
        return ReductionPlan(len(sites), (star(len(sites), hub),), f"star at {sites[hub].name}")
    hubs = [index for index in range(len(sites)) if not _missing_spokes(topology, index)]
    if hubs:
        hub = max(
            hubs, key=lambda index: (_bottleneck(topology, index), -_rtt(topology, index), -index)
        )
        why = f"star at {sites[hub].name}: its slowest link is the fastest of all stars'"
        return ReductionPlan(len(sites), (star(len(sites), hub),), why)
    if wanted == "star":
        raise _refused("tree", "no site has links to all others: a star has no centre")
    tree = _widest_tree(topology)
    return ReductionPlan(
        len(sites), (tree,), f"tree at {sites[tree.root].name}: no star reaches all"
    )


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem("job", 0, 0, message, f"reduction.{key}")])


def star(num_sites: int, hub: int) -> Tree:
    """Return the star with that centre."""
    return Tree(hub, {site: hub for site in range(num_sites) if site != hub})


def _missing_spokes(topology: Topology, hub: int) -> list[str]:
    name = topology.sites[hub].name
    return [
        other.name
        for other in topology.sites
        if other.index != hub
        and (topology.link(name, other.name) is None or topology.link(other.name, name) is None)
    ]


def _require_star(topology: Topology, hub: int) -> None:
    missing = _missing_spokes(topology, hub)
    if missing:
        name = topology.sites[hub].name
        raise _refused("hub", f"{name!r} has no links both ways with {', '.join(missing)}")


def _require_all_pairs(topology: Topology) -> None:
    for site in topology.sites:
        missing = _missing_spokes(topology, site.index)
        if missing:
            raise _refused(
                "tree",
                "gather needs links both ways between all sites; "
                f"{site.name!r} lacks them with {', '.join(missing)}",
            )


def _spokes(topology: Topology, hub: int) -> list[tuple[float, float]]:
    name = topology.sites[hub].name
    pairs = [(name, other.name) for other in topology.sites if other.index != hub]
    found = [topology.link(*pair) for pair in pairs] + [topology.link(b, a) for a, b in pairs]
    return [(link.bytes_per_s, link.rtt_s) for link in found if link is not None]


def _bottleneck(topology: Topology, hub: int) -> float:
    return min(rate for rate, _ in _spokes(topology, hub))


def _rtt(topology: Topology, hub: int) -> float:
    return sum(rtt for _, rtt in _spokes(topology, hub))


def _widest_tree(topology: Topology) -> Tree:
    """Grow from each site in turn along the widest link pair; keep the widest, lowest tree."""
    best: tuple[float, int, int] | None = None
    best_tree: Tree | None = None
    for root in range(len(topology.sites)):
        parent, width, depth = _grow(topology, root)
        score = (width, -depth, -root)
        if best is None or score > best:
            best, best_tree = score, Tree(root, parent)
    assert best_tree is not None
    return best_tree


def _grow(topology: Topology, root: int) -> tuple[dict[int, int], float, int]:
    """Prim's algorithm for a maximum-bottleneck tree; the load checked that sites are connected."""
    depth = {root: 0}
    parent: dict[int, int] = {}
    width = float("inf")
    while len(depth) < len(topology.sites):
        choice = max(
            (
                (
                    _pair_rate(topology, inside, outside.index),
                    -depth[inside],
                    -inside,
                    -outside.index,
                )
                for inside in depth
                for outside in topology.sites
                if outside.index not in depth
            ),
        )
        rate, _, inside, outside = choice[0], choice[1], -choice[2], -choice[3]
        if rate <= 0:
            raise ConfigError("links: the sites are not connected in both directions")
        parent[outside] = inside
        depth[outside] = depth[inside] + 1
        width = min(width, rate)
    return parent, width, max(depth.values())


def _pair_rate(topology: Topology, one: int, other: int) -> float:
    names = topology.sites[one].name, topology.sites[other].name
    there, back = topology.link(*names), topology.link(*names[::-1])
    return min(there.bytes_per_s, back.bytes_per_s) if there and back else 0.0
