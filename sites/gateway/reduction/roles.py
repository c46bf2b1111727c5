"""What a site does for the chunks of each tree."""

from __future__ import annotations

from dataclasses import dataclass

from topology.trees.trees import ReductionPlan


@dataclass(frozen=True, slots=True)
class Role:
    """What one site does for the chunks of one tree; in a gather, for all chunks."""

    site: int
    tree: int
    members: tuple[int, ...]
    """Whose contributions are summed here, its own among them, in ascending order."""
    audience: tuple[int, ...]
    """Who gets this site's contribution as it is: in a gather, all others."""
    parent: int | None
    """Who gets the sum formed here; None where it is the whole sum."""
    children: tuple[int, ...]
    """Who gets the result from here."""
    root: int | None
    """Who makes the result; None in a gather: everybody for himself."""


def roles(plan: ReductionPlan, site: int) -> tuple[Role, ...]:
    """Return the site's role in each tree, or its one role in a gather."""
    if plan.is_gather:
        everyone = tuple(range(plan.num_sites))
        others = tuple(other for other in everyone if other != site)
        return (Role(site, 0, everyone, others, None, (), None),)
    found = []
    for index, tree in enumerate(plan.trees):
        children = tree.children(site)
        members = tuple(sorted((*children, site)))
        found.append(Role(site, index, members, (), tree.parent.get(site), children, tree.root))
    return tuple(found)
