"""The most promising weighted sets of trees, where no bound says which is best.

Connections that start slowly, and batches of which not all spreads are tried: what mixes come to is
then known of single ones only, and takes long. A few are picked by what they come to without that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.planner.mix_group import MixGroup
from topology.planner.tree_mixes import Mixes, small_mixes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FEW = 9
"""That are picked."""
_FEW_OF_SET = 3
"""Of them with the same trees, whose bounds are hardly ever right for one and wrong for another."""
_SETS = 200
_MIXES_OF_SET = 32
"""So many sets of trees, and mixes of each, are judged for that."""


def promising(group: MixGroup, spreads: Sequence[Sequence[int]]) -> list[Mixes]:
    """Return single mixes of a group, the most promising first.

    Args:
        group: With the same codec, chunk and bucket.
        spreads: Of the busiest rank of each site, to judge by.
    """
    few = _Few()
    begun = small_mixes(len(group.trees))
    for row in group.bounds.least_s(begun, math.inf).argsort(kind="stable")[:_FEW].tolist():
        one = begun.of(slice(row, row + 1))
        few.take(one, _judged(group, one, spreads))
    for part in group.menu:
        looked = group.looked(part, few.limit_s)
        for mixes, least_n in itertools.islice(looked, _SETS):
            block = mixes.of(least_n < few.limit_s).of(slice(_MIXES_OF_SET))
            if len(block.set_n):
                few.take(block, _judged(group, block, spreads))
    return [mixes for _, mixes in few.all]


def _judged(group: MixGroup, mixes: Mixes, spreads: Sequence[Sequence[int]]) -> Floats:
    return group.bounds.of_spreads_s(group.bounds.crossed(mixes), spreads)


class _Few:
    """The mixes with the least bounds, and not all of one set of trees."""

    def __init__(self) -> None:
        """Begin with none."""
        self._of_sets: dict[tuple[int, ...], dict[float, Mixes]] = {}
        """By trees, then by bounds: of mixes that share out the chunks alike one is enough."""

    @property
    def all(self) -> list[tuple[float, Mixes]]:
        """Return them, the least first."""
        found = (each for some in self._of_sets.values() for each in some.items())
        return sorted(found, key=lambda each: each[0])[:_FEW]

    @property
    def limit_s(self) -> float:
        """What others have to be below."""
        known = self.all
        return known[-1][0] if len(known) == _FEW else math.inf

    def take(self, mixes: Mixes, least_n: Floats) -> None:
        """Keep the least of these mixes of one set of trees."""
        some = self._of_sets.setdefault(tuple(sorted(mixes.trees_nj[0].tolist())), {})
        for row in least_n.argsort(kind="stable").tolist():
            some.setdefault(float(least_n[row]), mixes.of(slice(row, row + 1)))
            if len(some) > _FEW_OF_SET + 1:
                break
        for least_s in sorted(some)[_FEW_OF_SET:]:
            del some[least_s]
