"""Makes the reduction of an epoch: trees over a run's members that avoid dead links. Pure.

The plan is simple and quick to find, because ranks wait for it. Two sites gather, as do all sites
if the run began with a gather. Else it is the star, or the tree, whose slowest link is fastest.
Replanning may find a better one later.

Every chunk keeps its first codec, because ranks that encode learned it then. If trees have
different codecs, the new tree replaces each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, followed
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.trees.pairs import Pairs, edge, pairs_of
from isthmus.topology.trees.shapes import widest_tree


def plan_for(
    spec: RunSpec, members: Sequence[str], dead_links: Collection[tuple[str, str]] = ()
) -> CodedPlan | None:
    """Return a plan over some of a run's sites; the run's own plan if nothing has changed.

    Args:
        spec: The run's spec.
        members: Names of the sites that take part.
        dead_links: Pairs of sites that cannot reach each other, in any order.

    Returns:
        The plan; None where the members are not connected.
    """
    names = spec.site_names
    sites = sorted(names.index(name) for name in members)
    dead = {edge(names.index(one), names.index(other)) for one, other in dead_links}
    own = spec.reduction
    used = {edge(*hop) for tree in range(len(own.codecs)) for hop in own.plan.hops(tree)}
    if tuple(sites) == own.plan.members and not used & dead:
        return own
    found = _tree(pairs_of(spec.topology, spec.job.exchange), sites, dead)
    if found is None:
        return None
    tree, is_complete = found
    listed = ", ".join(names[site] for site in sites)
    why = f"the widest tree of {listed}, its root at {names[tree.root]}"
    if len(sites) == 1:
        why = f"{listed} alone: nothing crosses"
    if len(set(own.codecs)) > 1:
        trees = tuple(dataclasses.replace(tree, weight=each.weight) for each in own.plan.trees)
        return CodedPlan(ReductionPlan(len(names), trees, why, tuple(sites)), own.codecs)
    if is_complete and (own.plan.is_gather or len(sites) <= 2):
        why = why if len(sites) == 1 else f"gather of {listed}"
        return CodedPlan(ReductionPlan(len(names), (), why, tuple(sites)), own.codecs[:1])
    return CodedPlan(ReductionPlan(len(names), (tree,), why, tuple(sites)), own.codecs[:1])


def plan_with_followers(
    spec: RunSpec,
    reduction: CodedPlan,
    follows: Collection[str],
    dead_links: Collection[tuple[str, str]] = (),
) -> CodedPlan:
    """Return a plan extended to sites that are catching up; a member must reach each of them."""
    names = spec.site_names
    dead = {edge(names.index(one), names.index(other)) for one, other in dead_links}
    live = pairs_of(spec.topology, spec.job.exchange).bytes_per_s.keys()
    members = reduction.plan.members
    givers = {
        site: [each for each in members if edge(each, site) in live - dead]
        for site in map(names.index, follows)
    }
    plan = followed(reduction.plan, givers)
    codecs = reduction.codecs * (len(plan.trees) if reduction.plan.is_gather else 1)
    return CodedPlan(plan, codecs)


def _tree(
    pairs: Pairs, sites: Sequence[int], dead: Collection[tuple[int, int]]
) -> tuple[Tree, bool] | None:
    """Return the widest tree over some sites, and whether all pairs are linked; None: no tree."""
    if len(sites) == 1:
        return Tree(sites[0], {}), True
    live = _among(pairs, sites, dead)
    tree = widest_tree(live)
    if tree is None:
        return None
    ways = {sites[child]: sites[parent] for child, parent in tree.parent.items()}
    is_complete = not any(live.missing(site) for site in range(live.num_sites))
    return Tree(sites[tree.root], ways), is_complete


def _among(pairs: Pairs, sites: Sequence[int], dead: Collection[tuple[int, int]]) -> Pairs:
    """Return the pairs of `sites`, renumbered among these, without dead links."""
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
