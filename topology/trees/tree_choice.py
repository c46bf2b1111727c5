"""Chooses the trees of a job's chunks: the job's own, or the fastest weighted set.

Pure. The coordinator decides this once for a run, and every site reads the result
(topology/documents/run_decisions.py).

`auto` compares the times of a step's gradients (topology/trees/tree_times.py) along the reductions
below. It counts the gradients of the shipped model, or JUDGED_BYTES for a user's own script, whose
model is unknown.

- the star, or else the tree, whose slowest link is fastest;
- gather, where all pairs have links: one way instead of two, but every byte on every link;
- the best packing of stars, and of trees of any form over the fast links, and over all
  (topology/trees/packing.py): weights make every link as busy as is useful;
- where links are faster in one direction, a tree with another way down, and the best packing of
  such trees over the fast links, and over all (topology/trees/two_way_packing.py).

Where links have codecs of their own, all of this counts each tree's own bytes
(topology/trees/link_codecs.py).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from isthmus.topology.spec.compute import num_parameters
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from isthmus.topology.spec.suggest import did_you_mean
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import RATIOS, usual_ratio
from isthmus.topology.trees.named_trees import named_groups, named_trees, refused
from isthmus.topology.trees.packing import (
    EDGES_MAX,
    NEAR_ENOUGH,
    Packing,
    pack_stars,
    pack_trees,
    weighted,
)
from isthmus.topology.trees.pairs import Pairs, pairs_of
from isthmus.topology.trees.shapes import (
    Groups,
    best_hub,
    groups_by_delay,
    hierarchy,
    ring_paths,
    widest_tree,
    width,
)
from isthmus.topology.trees.tree_times import plan_times_s, seconds_per_byte
from isthmus.topology.trees.two_way_packing import (
    TwoWayPacking,
    pack_two_ways,
    uses_of,
    weighted_two_ways,
    widest_two_way_tree,
)
from isthmus.topology.trees.wire_load import Wire, tree_ratios

JUDGED_BYTES = 256 << 20
"""Assumed bytes of a step's exchange if the model is unknown: 64 million parameters, which is small
for several data centers."""
_PARTS_OF_WIDTH = (1, 4, 0)
"""The factors by which a tree's slowest link may be slower than the widest tree's; 0: any. The
first chunk over a slow link takes long, however small the link's share."""
_LISTED = 4
"""Largest number of sites or links that `why` names."""
_AS_GOOD = 1.02
"""Ratio of two plans' times below which the simpler plan is preferred."""


def plan_reduction(job: Job, topology: Topology) -> ReductionPlan:
    """Return the trees for a job.

    Automatic: the given `trees`; else the star at `hub` if the job names one; else gather for two
    sites; else the fastest reduction of the list at the top of this file.

    Raises:
        ConfigError: the job needs a link or a site that the topology does not have. Problems have
            paths in the job.
    """
    pairs = pairs_of(topology, job.exchange)
    asked = _asked(job, pairs)
    return _automatic(job, topology, pairs) if asked is None else asked


def check_reduction(job: Job, topology: Topology) -> None:
    """Check that there are trees for a job, without looking for the fastest ones.

    Raises:
        ConfigError: as `plan_reduction`.
    """
    pairs = pairs_of(topology, job.exchange)
    if _asked(job, pairs) is None:
        _widest(pairs)


def _asked(job: Job, pairs: Pairs) -> ReductionPlan | None:
    """Return the trees that a job asks for; None: it leaves them to the automatic choice."""
    wanted = job.reduction
    if wanted.hub is not None and wanted.hub not in pairs.names:
        hint = did_you_mean(wanted.hub, pairs.names)
        raise ConfigError([refused("hub", f"unknown site {wanted.hub!r}{hint}")])
    if wanted.trees:
        return _named(job, pairs)
    if pairs.num_sites == 1:
        return ReductionPlan(1, (), "one site: nothing crosses")
    if wanted.tree == "gather":
        return _gather(pairs)
    if wanted.tree == "ring":
        return _ring(pairs)
    if wanted.tree == "hierarchy":
        return _hierarchy(job, pairs)
    if wanted.tree == "star" or wanted.hub is not None:
        return _star(pairs, wanted.hub)
    return None


def _widest(pairs: Pairs) -> Tree:
    """Return the tree whose slowest link is fastest."""
    widest = widest_tree(pairs)
    if widest is None:
        raise ConfigError("links: the sites are not connected in both directions")
    return widest


def _refuse(key: str, message: str) -> ConfigError:
    return ConfigError([refused(key, message)])


def _named(job: Job, pairs: Pairs) -> ReductionPlan:
    problems: list[Problem] = []
    if pairs.num_sites == 1:
        problems.append(refused("trees", "one site has nothing to reduce: leave the trees out"))
    trees = tuple(named_trees(job.reduction.trees, pairs, problems))
    if problems:
        raise ConfigError(problems)
    return ReductionPlan(pairs.num_sites, trees, f"as the job gives them: {_roots(trees, pairs)}")


def _gather(pairs: Pairs) -> ReductionPlan:
    for site, name in enumerate(pairs.names):
        missing = pairs.missing(site)
        if missing:
            raise _refuse(
                "tree",
                "gather needs links both ways between all sites; "
                f"{name!r} lacks them with {', '.join(missing)}",
            )
    return ReductionPlan(pairs.num_sites, (), "gather: every site sends to every other")


def _star(pairs: Pairs, hub_name: str | None) -> ReductionPlan:
    if hub_name is None:
        hub = best_hub(pairs)
        if hub is None:
            raise _refuse("tree", "no site has links to all others: a star has no centre")
        why = f"star at {pairs.names[hub]}: its slowest link is the fastest of all stars'"
        return ReductionPlan(pairs.num_sites, (star(pairs.num_sites, hub),), why)
    hub = pairs.names.index(hub_name)
    missing = pairs.missing(hub)
    if missing:
        raise _refuse("hub", f"{hub_name!r} has no links both ways with {', '.join(missing)}")
    return ReductionPlan(pairs.num_sites, (star(pairs.num_sites, hub),), f"star at {hub_name}")


def _ring(pairs: Pairs) -> ReductionPlan:
    order = range(pairs.num_sites)
    for site in order:
        after = (site + 1) % pairs.num_sites
        if not pairs.rate(site, after):
            one, other = pairs.names[site], pairs.names[after]
            raise _refuse(
                "tree",
                "a ring goes round the sites in the topology's order; "
                f"there are no links both ways between {one!r} and {other!r}",
            )
    why = (
        f"ring {' - '.join((*pairs.names, pairs.names[0]))}: a path from each site both ways round"
    )
    return ReductionPlan(pairs.num_sites, ring_paths(order), why)


def _hierarchy(job: Job, pairs: Pairs) -> ReductionPlan:
    problems: list[Problem] = []
    if job.reduction.groups:
        groups = named_groups(job.reduction.groups, pairs.names, problems)
    else:
        groups = groups_by_delay(pairs)
    if problems:
        raise ConfigError(problems)
    tree = hierarchy(pairs, groups)
    listed = _groups_told(groups, pairs)
    if tree is None:
        key = "groups" if job.reduction.groups else "tree"
        raise _refuse(
            key, f"no members with links to their groups reach each other, of the groups {listed}"
        )
    why = f"two levels, {listed}: within each to its head, then to {pairs.names[tree.root]}"
    return ReductionPlan(pairs.num_sites, (tree,), why)


def _groups_told(groups: Groups, pairs: Pairs) -> str:
    return ", ".join(f"[{', '.join(pairs.names[site] for site in group)}]" for group in groups)


def _automatic(job: Job, topology: Topology, pairs: Pairs) -> ReductionPlan:
    simplest = _widest(pairs)
    if pairs.num_sites == 2:
        return _gather(pairs)
    plans = [ReductionPlan(pairs.num_sites, (simplest,), "")]
    if not any(pairs.missing(site) for site in range(pairs.num_sites)):
        plans.append(_gather(pairs))
    if pairs.one_way:
        plans.append(ReductionPlan(pairs.num_sites, (widest_two_way_tree(pairs),), ""))
    plans += [
        ReductionPlan(pairs.num_sites, trees, "")
        for trees in weighted_sets(pairs, simplest, (NEAR_ENOUGH,))
    ]
    times_s = [_judged_s(job, topology, plan) for plan in plans]
    chosen = next(
        plan
        for plan, time_s in zip(plans, times_s, strict=True)
        if time_s <= _AS_GOOD * min(times_s)
    )
    return dataclasses.replace(chosen, why=_why(chosen, plans[0], job, topology, pairs))


def weighted_sets(
    pairs: Pairs, widest: Tree, near_enough: Sequence[float]
) -> Iterator[tuple[Tree, ...]]:
    """Yield weighted sets of trees from linear programs: over few fast links first, finally all.

    Args:
        pairs: Of three sites or more.
        widest: The tree whose slowest link is fastest.
        near_enough: Allowed ratios between integer weights and the program; one set per ratio.
    """
    for packing in _packings(pairs, width(pairs, widest)):
        yield from weighted(pairs, packing, near_enough)
    for two_way in _two_way_packings(pairs):
        yield from weighted_two_ways(pairs, two_way, near_enough)


def _two_way_packings(pairs: Pairs) -> list[TwoWayPacking]:
    """Return packings over directed links; empty if all links are symmetric."""
    if not pairs.one_way:
        return []
    widest = widest_two_way_tree(pairs)
    slowest = min(pairs.one_way[hop] for hop in uses_of(widest, pairs))
    packings: list[TwoWayPacking] = []
    for part in _PARTS_OF_WIDTH:
        packing = pack_two_ways(pairs, slowest // part if part else 0)
        if packing is not None and packing not in packings:
            packings.append(packing)
    return packings


def _packings(pairs: Pairs, width_bytes_per_s: int) -> list[Packing]:
    packings = [] if (stars := pack_stars(pairs)) is None else [stars]
    if packings and len(pairs.bytes_per_s) > EDGES_MAX:
        return packings  # trees would have few of the edges, and stars have all
    packed: list[Pairs] = []
    for part in _PARTS_OF_WIDTH:
        wide = pairs.at_least(width_bytes_per_s // part) if part else pairs
        if wide in packed:
            continue
        packed.append(wide)
        packing = pack_trees(wide)
        if packing not in packings:
            packings.append(packing)
    return packings


def _judged_s(job: Job, topology: Topology, plan: ReductionPlan) -> float:
    raw_bytes = JUDGED_BYTES
    if job.entrypoint is None:
        raw_bytes = 4 * num_parameters(job.trainer.model)
    ratio = _judged_ratio(job)
    # Without packets, as with the relay: connections are warm for most of a run, and slow start
    # would make every further hop look worse.
    plain = dataclasses.replace(topology, emulate=True, emulator="relay")
    load = Wire(job, plain, plan, ratio).load(raw_bytes)
    return max(plan_times_s(plan, topology, load).values())


def _judged_ratio(job: Job) -> float:
    """Return the assumed ratio of `exchange.codec`; the usual one if links have their own."""
    codec = job.exchange.codec
    return usual_ratio(codec) if job.exchange.codecs else RATIOS.get(codec, 1.0)


def _why(
    plan: ReductionPlan, simplest: ReductionPlan, job: Job, topology: Topology, pairs: Pairs
) -> str:
    """Return a sentence on the chosen plan and the links that limit it."""

    def busy(each: ReductionPlan) -> dict[tuple[int, int], float]:
        return seconds_per_byte(
            each, topology, tree_ratios(job, topology, each, _judged_ratio(job))
        )

    busy_s = busy(plan)
    most_s = max(busy_s.values())
    binding = sorted(
        {tuple(sorted(hop)) for hop, each_s in busy_s.items() if each_s > 0.97 * most_s}
    )
    named = [f"{pairs.names[one]}-{pairs.names[other]}" for one, other in binding]
    binds = f"{_first(named)} {'binds' if len(named) == 1 else 'bind'}"
    if plan.is_gather:
        return f"gather, one way instead of two, for so few chunks; {binds}"
    if len(plan.trees) == 1:
        return f"{_roots(plan.trees, pairs)}; {binds}"
    gain = max(busy(simplest).values()) / most_s
    worth = f": {gain:.2g} times the bandwidth of the best single tree" if gain >= _AS_GOOD else ""
    return f"{_roots(plan.trees, pairs)}{worth}; {binds}"


def _roots(trees: Sequence[Tree], pairs: Pairs) -> str:
    """Return the trees by their roots: `star at a`, or `3 trees with roots at a 60%, b 40%`."""
    if len(trees) == 1:
        ways = {*trees[0].parent.values(), *trees[0].giver.values()}
        form = "star" if ways == {trees[0].root} else "tree"
        back = "" if trees[0].down is None else ", back another way"
        return f"{form} at {pairs.names[trees[0].root]}{back}"
    weight_of_root: Counter[int] = Counter()
    for tree in trees:
        weight_of_root[tree.root] += tree.weight
    total = weight_of_root.total()
    largest = sorted(weight_of_root.items(), key=lambda each: (-each[1], each[0]))
    listed = [
        f"{pairs.names[root]} {round(Fraction(100 * part, total))}%" for root, part in largest
    ]
    return f"{len(trees)} trees with roots at {_first(listed)}"


def _first(words: Sequence[str]) -> str:
    """Return the first few words, with the number of further ones."""
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more
