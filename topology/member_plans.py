"""The reduction of an epoch: trees over the members of a run, around links that are dead. Pure.

It is simple and found at once, for ranks wait for it: a gather of two sites, or of all where the
run began with one; else the star or the tree whose slowest link is fastest. Who plans again while a
run goes on may find a better one later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from topology.run_spec import CodedPlan, RunSpec
from topology.trees.link_codecs import plan_codecs
from topology.trees.pairs import Pairs, edge, pairs_of
from topology.trees.shapes import widest_tree
from topology.trees.trees import ReductionPlan, Tree


def plan_for(
    spec: RunSpec, members: Sequence[str], dead_links: Collection[tuple[str, str]] = ()
) -> CodedPlan | None:
    """Return trees over some of a run's sites; the run's own where nothing has changed.

    Args:
        spec: What the run is.
        members: The sites that take part.
        dead_links: Pairs of sites that cannot reach each other, in any order.

    Returns:
        The plan, with the codecs that its links have in the run's job; None where the members are
        not connected.
    """
    names = spec.site_names
    sites = sorted(names.index(name) for name in members)
    dead = {edge(names.index(one), names.index(other)) for one, other in dead_links}
    own = spec.reduction
    used = {edge(*hop) for tree in range(len(own.codecs)) for hop in own.plan.hops(tree)}
    if tuple(sites) == own.plan.members and not used & dead:
        return own
    plan = _plan(pairs_of(spec.topology, spec.job.exchange), sites, dead, own.plan.is_gather)
    return None if plan is None else CodedPlan(plan, plan_codecs(spec.job, spec.topology, plan))


def _plan(
    pairs: Pairs, sites: Sequence[int], dead: Collection[tuple[int, int]], prefers_gather: bool
) -> ReductionPlan | None:
    live = _among(pairs, sites, dead)
    only, told = tuple(sites), ", ".join(live.names)
    if len(sites) == 1:
        return ReductionPlan(pairs.num_sites, (), f"{told} alone: nothing crosses", only)
    tree = widest_tree(live)
    if tree is None:
        return None
    is_complete = not any(live.missing(site) for site in range(live.num_sites))
    if is_complete and (prefers_gather or len(sites) == 2):
        return ReductionPlan(pairs.num_sites, (), f"gather of {told}", only)
    ways = {sites[child]: sites[parent] for child, parent in tree.parent.items()}
    root = Tree(sites[tree.root], ways)
    why = f"the widest tree of {told}, its root at {live.names[tree.root]}"
    return ReductionPlan(pairs.num_sites, (root,), why, only)


def _among(pairs: Pairs, sites: Sequence[int], dead: Collection[tuple[int, int]]) -> Pairs:
    """Return the pairs of some sites by their places among these, without dead ones."""
    place = {site: at for at, site in enumerate(sites)}
    kept = {
        each: (place[each[0]], place[each[1]])
        for each in pairs.bytes_per_s
        if each not in dead and place.keys() >= set(each)
    }
    return Pairs(
        names=tuple(pairs.names[site] for site in sites),
        bytes_per_s={at: pairs.bytes_per_s[each] for each, at in kept.items()},
        rtt_ns={at: pairs.rtt_ns[each] for each, at in kept.items()},
        loads={at: pairs.loads[each] for each, at in kept.items() if each in pairs.loads},
    )
