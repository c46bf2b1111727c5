"""How much trees can carry together: the exact optimum of a linear program.

Maximise the sum of x_T over spanning trees T, so that the trees over each edge carry no more than
its rate: sum of x_T over T with e in T <= c_e. A chunk crosses each edge of its tree once up and
once down, so c_e is the rate of the slower direction, and the root does not matter. The sum is the
rate at which sums of all sites can be formed; x_T divided by it is the share of the chunks that T
takes. Where links have codecs of their own, a chunk of T has l_T bytes on each of its edges, those
of the smallest of its edges' codecs: sum of l_T x_T <= c_e. Otherwise all l_T are 1. (By
Nash-Williams and Tutte it equals the least, over all ways to part the sites into k groups, of the
rate between groups divided by k - 1: that is what binds.)

There are n^(n-2) trees, so they are made as they are needed: a simplex method whose next column is
the tree that is cheapest at the current prices of the edges, l_T times their sum: a minimum
spanning tree, or that with an edge whose codec is smaller. It ends when no tree costs less than 1:
the prices then prove that no packing is better.

All in integers (Edmonds' integer pivoting: each tableau is the true one times its last pivot, so
every division is exact), with the lexicographic rule against cycles. Every site finds the same
trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from topology.trees.pairs import Edge, Pairs, edge

EDGES_MAX = 55
"""Of the program: all between 11 sites. The cost of a pivot is their square."""

ENOUGH = Fraction(995, 1000)
"""Of the optimum. The last half percent takes as long as all before it, and rounding to whole
weights loses as much."""

EdgeSet = tuple[Edge, ...]
"""A spanning tree, its edges in ascending order."""
Pricer = Callable[[int, dict[Edge, int], dict[Edge, int]], EdgeSet | None]
"""(sites, price of each edge, loads) -> the cheapest tree of its kind; None where there is none."""
_Edges = tuple[tuple[Edge, int, int], ...]
"""With rate and load."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Spanning trees, and how much per second each carries when they share the links best."""

    bytes_per_s: Fraction
    """Of all trees together: the optimum. In chunks of the unit of `Pairs.loads`, where there are
    any."""
    trees: tuple[tuple[EdgeSet, Fraction], ...]
    """In ascending order; none carries nothing."""


def pack_trees(pairs: Pairs) -> Packing:
    """Return the best packing of spanning trees of any form; stars where they do as well.

    Beyond EDGES_MAX edges only the widest take part.
    """
    return _pack(pairs.num_sites, _widest_edges(pairs), _star_or_tree)


def pack_stars(pairs: Pairs) -> Packing | None:
    """Return the best packing of stars; None where no site has edges with all others."""
    edges = _widest_edges(pairs)
    if _cheapest_star(pairs.num_sites, {each: 0 for each, _, _ in edges}, {}) is None:
        return None
    return _pack(pairs.num_sites, edges, _cheapest_star)


def _widest_edges(pairs: Pairs) -> _Edges:
    """Return all edges, or those of the widest tree, the widest of the rest, and so on.

    So that every site keeps several edges, even if its own are the narrowest.
    """
    kept: list[Edge] = []
    rest = {each: -pairs.speed([each]) for each in pairs.bytes_per_s}
    while rest:
        forest = _forest(pairs.num_sites, rest)
        if kept and len(kept) + len(forest) > EDGES_MAX:
            break
        kept += forest
        for each in forest:
            del rest[each]
    return tuple((each, pairs.bytes_per_s[each], pairs.load([each])) for each in sorted(kept))


@functools.lru_cache(maxsize=64)
def _pack(num_sites: int, given: _Edges, pricer: Pricer) -> Packing:
    edges = [each for each, _, _ in given]
    loads = {each: load for each, _, load in given if load != 1}
    tableau = _Tableau([rate for _, rate, _ in given])
    row_of = {each: row for row, each in enumerate(edges)}
    while True:
        unused = min(range(len(edges)), key=lambda row: (tableau.prices[row], row))
        if tableau.prices[unused] < 0:
            tableau.enter([unused], None)
            continue
        found = pricer(num_sites, dict(zip(edges, tableau.prices, strict=False)), loads)
        assert found is not None, "the sites are connected"
        rows, load = [row_of[each] for each in found], _load(found, loads)
        if load * sum(tableau.prices[row] for row in rows) >= ENOUGH * tableau.scale:
            return tableau.packing()
        tableau.enter(rows, found, load)


class _Tableau:
    """Constraints as equations in the basis. All entries are `scale` times the true ones."""

    def __init__(self, rates: Sequence[int]) -> None:
        size = len(rates)
        self.scale = 1
        self.rows = [[int(row == each) for each in range(size)] for row in range(size)]
        for row, rate in zip(self.rows, rates, strict=True):
            row.append(rate)
        self.prices = [0] * (size + 1)
        """Of each edge's rate; the last entry is what all trees carry."""
        self.basis: list[EdgeSet | None] = [None] * size
        """By row; None: what is unused of some edge."""

    def enter(self, rows: Sequence[int], tree: EdgeSet | None, load: int = 1) -> None:
        """Bring a column into the basis: `load` in `rows`; it gains 1 if it is a tree, else 0."""
        column = [load * sum(row[each] for each in rows) for row in self.rows]
        gain = load * sum(self.prices[each] for each in rows)
        gain -= self.scale if tree is not None else 0
        leaving = self._leaving(column)
        pivot, pivot_row = column[leaving], self.rows[leaving]
        for index, row in enumerate(self.rows):
            if index != leaving:
                self.rows[index] = self._eliminated(row, column[index], pivot, pivot_row)
        self.prices = self._eliminated(self.prices, gain, pivot, pivot_row)
        self.scale = pivot
        self.basis[leaving] = tree

    def _eliminated(
        self, row: list[int], factor: int, pivot: int, pivot_row: list[int]
    ) -> list[int]:
        if factor == 0 and pivot == self.scale:
            return row
        scale = self.scale
        return [
            (value * pivot - factor * other) // scale
            for value, other in zip(row, pivot_row, strict=True)
        ]

    def _leaving(self, column: list[int]) -> int:
        """Return the row whose ratio is least; ties by the entries of the inverse, in order."""
        rows = [index for index, value in enumerate(column) if value > 0]
        assert rows, "no tree carries more than its edges"
        for entry in (-1, *range(len(column))):
            if len(rows) == 1:
                break
            ratios = {index: Fraction(self.rows[index][entry], column[index]) for index in rows}
            least = min(ratios.values())
            rows = [index for index in rows if ratios[index] == least]
        return rows[0]

    def packing(self) -> Packing:
        """Return the trees of the basis with what they carry."""
        carried = [
            (tree, Fraction(row[-1], self.scale))
            for tree, row in zip(self.basis, self.rows, strict=True)
            if tree is not None and row[-1] > 0
        ]
        return Packing(Fraction(self.prices[-1], self.scale), tuple(sorted(carried)))


def _star_or_tree(
    num_sites: int, prices: dict[Edge, int], loads: dict[Edge, int]
) -> EdgeSet | None:
    """Return the cheapest tree; a star where one costs no more, for it has the least delay."""
    tree = _cheapest_tree(num_sites, prices, loads)
    found = _cheapest_star(num_sites, prices, loads)
    if found is None or tree is None:
        return tree
    return found if _cost(found, prices, loads) <= _cost(tree, prices, loads) else tree


def _load(tree: EdgeSet, loads: dict[Edge, int]) -> int:
    """Return the bytes of a tree's chunk; what is not in `loads` has 1."""
    return min(loads.get(each, 1) for each in tree)


def _cost(tree: EdgeSet, prices: dict[Edge, int], loads: dict[Edge, int]) -> int:
    return _load(tree, loads) * sum(prices[each] for each in tree)


def _cheapest_star(
    num_sites: int, prices: dict[Edge, int], loads: dict[Edge, int]
) -> EdgeSet | None:
    stars = []
    for hub in range(num_sites):
        spokes = tuple(sorted(edge(hub, site) for site in range(num_sites) if site != hub))
        if all(each in prices for each in spokes):
            stars.append((_cost(spokes, prices, loads), spokes))
    return min(stars)[1] if stars else None


def _cheapest_tree(
    num_sites: int, prices: dict[Edge, int], loads: dict[Edge, int]
) -> EdgeSet | None:
    """Return the cheapest tree of any form.

    For each load it is the minimum spanning tree among those with an edge of that load: what else
    the tree holds can only make it cheaper, and then it is found for that load.
    """
    forest = _forest(num_sites, prices)
    if len(forest) != num_sites - 1:
        return None
    if not loads:
        return forest
    least = _load(forest, loads)
    small = [each for each in prices if loads.get(each, 1) < least]
    trees = [forest, *(_forest(num_sites, prices, each) for each in small)]
    return min(trees, key=lambda tree: (_cost(tree, prices, loads), tree))


def _forest(
    num_sites: int, prices: Mapping[Edge, int | Fraction], first: Edge | None = None
) -> EdgeSet:
    """Return Kruskal's minimum spanning forest, with the edge `first`; of equal edges the first."""
    group = list(range(num_sites))
    taken = []
    for each in sorted(prices, key=lambda pair: (pair != first, prices[pair], pair)):
        one, other = group[each[0]], group[each[1]]
        if one != other:
            taken.append(each)
            group = [one if label == other else label for label in group]
    return tuple(sorted(taken))
