"""Reduction plans: the trees along which chunks are summed and results come back.

Pure. The executor in the gateway knows only `ReductionPlan`; topology/trees/tree_choice.py
makes one from a job and its topology.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from isthmus.topology.spec.errors import ConfigError

TREES_MAX = 128
"""Limit on the trees of one plan: all 125 of five sites, and three more."""
WEIGHT_MAX = 100
"""Largest weight of a tree. With TREES_MAX it bounds the length of a plan's turns."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A rooted tree over the members, by their indices among all sites of the run.

    Contributions travel from `parent`'s keys to its values. Each site sums them in ascending order
    of the senders' indices, with its own in its place. The root encodes the result once, and its
    bytes are passed down unchanged: along the same edges turned around, or along those of `down`.
    """

    root: int
    parent: Mapping[int, int]
    weight: int = 1
    """Share of the chunks relative to the other trees; an integer, so that all sites agree."""
    down: Mapping[int, int] | None = None
    """Site that sends the result, for every site but the root; None: the parent. Sites that are
    catching up are only here: they get results and contribute nothing."""

    def __post_init__(self) -> None:
        if self.down == self.parent:
            object.__setattr__(self, "down", None)

    @property
    def giver(self) -> Mapping[int, int]:
        """Site that sends the result, for every site but the root."""
        return self.parent if self.down is None else self.down

    @property
    def followers(self) -> tuple[int, ...]:
        """Sites that are catching up and only get the result, in ascending order."""
        return tuple(sorted(self.giver.keys() - self.parent.keys()))

    def hops(self) -> Iterator[tuple[int, int]]:
        """Yield the directed links (from, to) that chunks cross.

        A link that is used both up and down appears twice.
        """
        yield from self.parent.items()
        for site, giver in self.giver.items():
            yield giver, site

    def children(self, site: int) -> tuple[int, ...]:
        """Return the sites that send their sums to `site`, in ascending order."""
        return tuple(sorted(child for child, parent in self.parent.items() if parent == site))

    def receivers(self, site: int) -> tuple[int, ...]:
        """Return the sites that `site` passes the result on to, in ascending order."""
        return tuple(sorted(taker for taker, giver in self.giver.items() if giver == site))


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """How every chunk is reduced: either all to all, or along a weighted set of trees."""

    num_sites: int
    """Number of all sites of the run, members or not; indices refer to these."""
    trees: tuple[Tree, ...]
    """The trees; empty: gather. Each member sends its encoded chunk to all others; each sums in
    site order."""
    why: str
    """The reason for the plan in a line or two, for people."""
    only: tuple[int, ...] | None = None
    """The sites that take part, in ascending order; None: all."""
    gathered_bytes: int = 0
    """Size in float32 bytes up to which buckets are gathered, whatever the trees
    (topology/trees/small_buckets.py)."""
    turns: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Tree that carries a chunk, by turn; repeated cyclically."""

    def __post_init__(self) -> None:
        weights = [tree.weight for tree in self.trees]
        if len(weights) > TREES_MAX or not all(1 <= each <= WEIGHT_MAX for each in weights):
            raise ConfigError(f"plan.trees: want {TREES_MAX} at most, of weight 1 to {WEIGHT_MAX}")
        if self.gathered_bytes < 0:
            raise ConfigError(f"plan.gathered_bytes: want 0 or more, got {self.gathered_bytes}")
        if self.only == tuple(range(self.num_sites)):
            object.__setattr__(self, "only", None)
        if self.only is not None:
            in_range = set(self.only) <= set(range(self.num_sites))
            if not self.only or not in_range or list(self.only) != sorted(set(self.only)):
                raise ConfigError(f"plan.only: want some of {self.num_sites} sites, in order")
        object.__setattr__(self, "turns", _turns(weights))

    @property
    def members(self) -> tuple[int, ...]:
        """The sites that take part, in ascending order."""
        return tuple(range(self.num_sites)) if self.only is None else self.only

    @property
    def is_gather(self) -> bool:
        """Whether every member sends to every other."""
        return not self.trees

    def gathering(self) -> "ReductionPlan":
        """Return how small buckets are reduced: all to all, among the same members."""
        return ReductionPlan(self.num_sites, (), self.why, self.only)

    def tree_index(self, turn: int) -> int:
        """Return the tree that carries the chunk with this turn, equal at all sites; 0 in a gather.

        Of the first n turns, for every n, each tree gets its share to within one chunk. Turns
        continue from bucket to bucket. Cost: O(1).
        """
        return self.turns[turn % len(self.turns)]

    def hops(self, tree: int) -> Iterator[tuple[int, int]]:
        """Yield the directed links that a tree's chunks cross, as `Tree.hops`; all, in a gather."""
        if self.is_gather:
            yield from itertools.permutations(self.members, 2)
            return
        yield from self.trees[tree].hops()

    def neighbours(self, site: int) -> tuple[int, ...]:
        """Return the sites that exchange bytes with `site`, in ascending order."""
        trees = range(max(1, len(self.trees)))
        hops = itertools.chain.from_iterable(map(self.hops, trees))
        return tuple(sorted({other for hop in hops if site in hop for other in hop} - {site}))


Ways = tuple[tuple[int, int], ...]
"""Edges of a tree in one direction, in ascending order."""


def shape_of(tree: Tree) -> tuple[int, Ways, Ways]:
    """Return a tree's root and edges, without its weight, for comparisons."""
    return tree.root, tuple(sorted(tree.parent.items())), tuple(sorted((tree.down or {}).items()))


def has_same_turns(
    one: tuple[ReductionPlan, Sequence[str]], other: tuple[ReductionPlan, Sequence[str]]
) -> bool:
    """Return whether two plans, each with its trees' codecs, give every turn the same codec.

    Sequences with periods p and q that are equal for p + q turns are equal for ever (Fine and Wilf,
    1965).
    """
    turns = range(sum(len(plan.turns) for plan, _ in (one, other)))
    return all(
        len({codecs[plan.tree_index(turn)] for plan, codecs in (one, other)}) == 1 for turn in turns
    )


def among(plan: ReductionPlan, num_sites: int, members: Sequence[int]) -> ReductionPlan:
    """Renumber a plan that was made for the members alone to indices among `num_sites` sites.

    `members` are the members' indices, in ascending order.
    """

    def way(links: Mapping[int, int]) -> dict[int, int]:
        return {members[site]: members[other] for site, other in links.items()}

    trees = tuple(
        Tree(
            members[tree.root],
            way(tree.parent),
            tree.weight,
            None if tree.down is None else way(tree.down),
        )
        for tree in plan.trees
    )
    return ReductionPlan(num_sites, trees, plan.why, tuple(members), plan.gathered_bytes)


def followed(plan: ReductionPlan, givers: Mapping[int, Sequence[int]]) -> ReductionPlan:
    """Extend a plan to sites that are catching up, which only get results.

    A gather becomes stars, one around each member, because only a root has a result to send.

    Args:
        plan: Plan of the other members.
        givers: By site that is catching up: the members that can reach it, at least one.
    """
    trees = plan.trees or tuple(
        Tree(hub, {site: hub for site in plan.members if site != hub}) for hub in plan.members
    )
    trees = tuple(
        Tree(
            tree.root,
            tree.parent,
            tree.weight,
            {
                **tree.giver,
                **{
                    site: tree.root if tree.root in reaching else min(reaching)
                    for site, reaching in givers.items()
                },
            },
        )
        for tree in trees
    )
    return ReductionPlan(plan.num_sites, trees, plan.why, plan.members)


def star(num_sites: int, hub: int, weight: int = 1) -> Tree:
    """Return the star with centre `hub`."""
    return Tree(hub, {site: hub for site in range(num_sites) if site != hub}, weight)


def _turns(weights: list[int]) -> tuple[int, ...]:
    """Return the trees in the order of the chunks, over the shortest period.

    Tijdeman's rule (The chairman assignment problem, 1980): a tree of weight w may take its chunk j
    from turn j W/w on, and must have it before turn (j + 1) W/w; of those that may, the one that
    must soonest does. Then no tree is ever a whole chunk ahead of its share, or behind it.
    """
    shared = gcd(*weights)
    shares = [weight // shared for weight in weights] or [1]
    period = sum(shares)
    taken = [0] * len(shares)
    turns = []
    for turn in range(period):
        ready = [
            (-(-(taken[index] + 1) * period // share), taken[index] * period // share, index)
            for index, share in enumerate(shares)
            if taken[index] * period // share <= turn
        ]
        index = min(ready)[2]
        taken[index] += 1
        turns.append(index)
    return tuple(turns)
