"""Small worlds that trees are made for, at random and by hand, and what every plan must be."""

import random
from collections.abc import Iterable

from isthmus.topology.spec.job import Job, NamedTree, Reduction
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Accelerator, Topology
from isthmus.topology.trees.tree_choice import plan_reduction
from tests.fakes.small_worlds import small_site, small_world

FORMS = ("gather", "star", "ring", "hierarchy", "given")
"""Of plans, for make_plan."""
CPU = Accelerator(name="cpu", peak_flops_per_s={"fp32": 1e9}, memory_bytes=1 << 30, mfu=0.3)


def world(num_sites: int, links: Iterable[tuple[int, int, float, float]]) -> Topology:
    """Return a topology of sites s0, s1, ... with directed links (source, target, rate, RTT)."""
    return small_world((small_site(index, CPU) for index in range(num_sites)), links)


def both_ways(*links: tuple[int, int, float, float]) -> list[tuple[int, int, float, float]]:
    return [*links, *((other, one, rate, rtt) for one, other, rate, rtt in links)]


def random_world(chance: random.Random, num_sites: int) -> Topology:
    """Return a connected topology: a random tree, and some links beside it."""
    pairs = {(chance.randrange(child), child) for child in range(1, num_sites)}
    for _ in range(chance.randrange(2 * num_sites)):
        one, other = sorted(chance.sample(range(num_sites), 2))
        pairs.add((one, other))
    rates, rtts = [1e6, 5e6, 9e6, 9e7], [0.001, 0.01, 0.08]
    links = ((*pair, chance.choice(rates), chance.choice(rtts)) for pair in sorted(pairs))
    return world(num_sites, both_ways(*links))


def job(
    tree: str = "auto",
    hub: str | None = None,
    groups: tuple[tuple[str, ...], ...] = (),
    trees: tuple[NamedTree, ...] = (),
) -> Job:
    wanted = Reduction(tree=tree, hub=hub, groups=groups, trees=trees)
    return Job(name="j", topology="t.yaml", reduction=wanted)


TRIANGLE = world(3, both_ways((0, 1, 20.0, 0.06), (1, 2, 50.0, 0.01), (0, 2, 10.0, 0.07)))
LINE = world(4, both_ways((0, 1, 20.0, 0.01), (1, 2, 20.0, 0.01), (2, 3, 20.0, 0.01)))
SQUARE = world(
    4, both_ways((0, 1, 9.0, 0.01), (1, 2, 9.0, 0.01), (2, 3, 9.0, 0.01), (0, 3, 9.0, 0.01))
)


def check_plan(plan: ReductionPlan, topology: Topology, told: str = "") -> None:
    """Each tree reaches every site, without a circle, over links that are there both ways."""
    sites = range(len(topology.sites))
    for tree in plan.trees:
        assert tree.weight >= 1, told
        for way in (tree.parent, tree.giver):
            assert set(way) | {tree.root} == set(sites), told
            assert tree.root not in way, told
            for site in sites:
                steps, at = 0, site
                while at != tree.root:
                    at, steps = way[at], steps + 1
                    assert steps < len(sites), f"a circle, {told}"
    for site in sites:
        for other in plan.neighbours(site):
            assert site in plan.neighbours(other), told
            assert topology.link(f"s{site}", f"s{other}") is not None, told


def given_trees(chance: random.Random, topology: Topology) -> tuple[NamedTree, ...]:
    """Return a few trees over the topology's links, grown at random."""
    names = [site.name for site in topology.sites]
    trees = []
    for _ in range(chance.randint(1, 3)):
        root = chance.choice(names)
        parents, weight = _grown_way(chance, topology, root), chance.randint(1, 9)
        down = _grown_way(chance, topology, root) if chance.random() < 0.5 else None
        trees.append(NamedTree(root=root, parents=parents, weight=weight, down=down))
    return tuple(trees)


def _grown_way(chance: random.Random, topology: Topology, root: str) -> dict[str, str]:
    names = [site.name for site in topology.sites]
    parents: dict[str, str] = {}
    while len(parents) < len(names) - 1:
        ways = [
            (child, parent)
            for parent in (root, *parents)
            for child in names
            if child not in (root, *parents) and topology.link(child, parent) is not None
        ]
        child, parent = chance.choice(ways)
        parents[child] = parent
    return parents


def make_plan(form: str, num_sites: int, seed: int) -> ReductionPlan:
    """Return a plan of that form, as it is made for sites that all have links to each other."""
    chance = random.Random(seed)
    pairs = [(one, other) for other in range(num_sites) for one in range(other)]
    links = (
        (*pair, chance.choice((1e6, 9e6, 9e7)), chance.choice((0.001, 0.08))) for pair in pairs
    )
    topology = world(num_sites, both_ways(*links))
    if form == "given":
        return plan_reduction(job(trees=given_trees(chance, topology)), topology)
    return plan_reduction(job(form), topology)
