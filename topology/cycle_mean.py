"""How long a step takes in the long run where sites wait for each other: cycles in max-plus algebra. Pure.

Sites are not in step with each other. Site j ends step k once what it needs of every site i is there,
whenever that began; with w_ij the seconds from the end of i's step before to that,

    end_j(k) = max over i of (end_i(k - 1) + w_ij),

a linear recurrence in the algebra of max and plus. Whatever sites begin with, its steps take in the
long run the largest mean weight of any cycle (Baccelli et al., "Synchronization and Linearity",
theorem 3.23). So two sites that gather after they have computed for 1 s and 2 s, x apart, take 1.5 s
+ x, not 2 s + x: the slower one's gradient leaves late, but finds the other's already there.
"""

from __future__ import annotations

from operator import add

Weights = list[list[float]]
"""By source, then target; -inf: no edge."""


def largest_cycle_mean(weights: Weights) -> float:
    """Return the largest mean weight of the edges of any cycle; every node has one to itself.

    Karp, "A characterization of the minimum cycle mean in a digraph". O(nodes^3).
    """
    into = list(zip(*weights, strict=True))
    heaviest = [[0.0] * len(weights)]
    """By number of edges: the weight of the heaviest walk of so many that ends at a node."""
    for _ in weights:
        before = heaviest[-1]
        heaviest.append([max(map(add, before, column)) for column in into])
    last = len(weights)
    return max(
        min((heaviest[last][v] - heaviest[k][v]) / (last - k) for k in range(last))
        for v in range(last)
    )
