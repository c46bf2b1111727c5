"""How long steps of sites that wait for each other take in the long run: max-plus algebra. Pure.

Sites are not in step with each other. Site j ends step k once what it needs of every site i is
there, whenever that began; with w_ij the seconds from the end of i's step before to that,

    end_j(k) = max over i of (end_i(k - 1) + w_ij),

a linear recurrence in the algebra of max and plus. Whatever sites begin with, its steps take in the
long run the largest mean weight of any cycle (Baccelli et al., "Synchronization and Linearity",
theorem 3.23). So two sites that gather after they have computed for 1 s and 2 s, x apart, take
1.5 s + x, not 2 s + x: the slower one's gradient leaves late, but finds the other's already there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def largest_cycle_means(weights: Floats) -> Floats:
    """Return, of each of B graphs, the largest mean weight of the edges of any cycle.

    Karp, "A characterization of the minimum cycle mean in a digraph". O(B nodes^3).

    Args:
        weights: By graph, source and target; shape (B, nodes, nodes). -inf: no edge. Every node has
            one to itself.

    Returns:
        Shape (B,).
    """
    num_graphs, num_nodes, _ = weights.shape
    heaviest = np.zeros((num_nodes + 1, num_graphs, num_nodes))
    """By number of edges: the weight of the heaviest walk of so many that ends at a node."""
    for count in range(num_nodes):
        heaviest[count + 1] = (heaviest[count][:, :, None] + weights).max(axis=1)
    lengths = np.arange(num_nodes, 0, -1)[:, None, None]
    means: Floats = ((heaviest[-1] - heaviest[:-1]) / lengths).min(axis=0).max(axis=1)
    return means
