"""Whether another plan leaves every chunk its codec. Pure.

Ranks that encode were told once which turn has which.
"""

from __future__ import annotations

from collections.abc import Sequence

from topology.trees.trees import ReductionPlan


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
