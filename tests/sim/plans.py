"""The simulated run's sites and limits, and its reduction plans: for each member a tree from it."""

from dataclasses import replace
from functools import cache

from isthmus.orchestrator.core.quorum import Limits
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, followed
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology
from tests.fakes.worlds import topology_text

NAMES = ("ap", "eu", "sa", "us")
"""All sites that there may be, in the order of a run."""


def pair(one: str, other: str) -> tuple[str, str]:
    """Return two sites in ascending order."""
    return (one, other) if one < other else (other, one)


@cache
def all_pairs(names: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """Return the links of a full mesh."""
    return frozenset(pair(one, other) for one in names for other in names if one != other)


@cache
def plan_of(
    names: tuple[str, ...], members: tuple[str, ...], dead: frozenset[tuple[str, str]], turn: int
) -> CodedPlan:
    """Return one tree a member, over the links that are not dead; `turn` makes another plan."""
    index = {name: place for place, name in enumerate(names)}
    trees = []
    for shift in range(len(members)):
        root = members[(shift + turn) % len(members)]
        parent: dict[int, int] = {}
        border, seen = [root], {root}
        while border:
            name = border.pop(0)
            for other in members:
                if other not in seen and pair(name, other) not in dead:
                    seen.add(other)
                    parent[index[other]] = index[name]
                    border.append(other)
        assert seen == set(members), f"{members} are not linked around {dead}"
        trees.append(Tree(index[root], parent))
    only = tuple(sorted(index[name] for name in members))
    plan = ReductionPlan(len(names), tuple(trees), f"turn {turn}", only)
    return CodedPlan(plan, ("fp32",) * len(trees))


@cache
def followed_plan(
    names: tuple[str, ...],
    members: tuple[str, ...],
    dead: frozenset[tuple[str, str]],
    follows: tuple[str, ...],
    turn: int,
) -> CodedPlan:
    """Return `plan_of` some members, whose results others get."""
    made = plan_of(names, members, dead, turn)
    givers = {
        names.index(site): [names.index(each) for each in members if pair(each, site) not in dead]
        for site in follows
    }
    return CodedPlan(followed(made.plan, givers), made.codecs) if follows else made


@cache
def _links(names: tuple[str, ...], hops: tuple[tuple[int, int], ...]) -> frozenset[tuple[str, str]]:
    return frozenset(pair(names[one], names[other]) for one, other in hops)


def links_of(names: tuple[str, ...], reduction: CodedPlan) -> frozenset[tuple[str, str]]:
    """Return the links that a plan uses."""
    plan = reduction.plan
    return _links(names, tuple(hop for tree in range(len(plan.trees)) for hop in plan.hops(tree)))


@cache
def world(names: tuple[str, ...]) -> Topology:
    """Return sites that are all linked with one another, and what befalls them."""
    text = topology_text(
        len(names), ranks=2, detect_within="3s", start_within="20s", min_sites=1, max_restarts=3
    )
    made = load_topology(text, "topology.yaml")
    sites = tuple(replace(site, name=name) for site, name in zip(made.sites, names, strict=True))
    called = dict(zip((site.name for site in made.sites), names, strict=True))
    links = tuple(
        replace(link, ends=(called[link.source], called[link.target])) for link in made.links
    )
    failure = replace(made.failure, ride_out_s=15.0, coordinator_within_s=60.0)
    return replace(made, sites=sites, links=links, failure=failure)


def _limits() -> Limits:
    failure = world(NAMES[:2]).failure
    timeouts = Timeouts.derive(failure)
    return Limits(
        min_sites=failure.min_sites,
        detect_s=timeouts.lease_s,
        ride_out_s=timeouts.ride_out_s,
        alone_s=timeouts.coordinator_s,
        collect_s=timeouts.collect_s,
    )


LIMITS = _limits()
"""When sites and links count as lost."""
