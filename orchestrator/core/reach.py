"""Which sites of a run reach each other, by what they say of one another. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core.run_events import Reached, Suspected

Pair = tuple[str, str]
"""Two sites that are linked, in ascending order."""


@dataclass(frozen=True, slots=True)
class _Suspicion:
    since_s: float
    is_gone: bool
    why: str


class Reach:
    """Owns what sites say of each other."""

    def __init__(self, links: Iterable[Pair], *, detect_s: float, collect_s: float) -> None:
        """Begin with all links well.

        `links`: the sites that reach each other when nothing is wrong. `collect_s`: from the first
        news of a dead link, for further ones that belong to it.
        """
        self._links = frozenset(links)
        self._detect_s, self._collect_s = detect_s, collect_s
        self._suspicions: dict[Pair, _Suspicion] = {}
        """By who suspects and who is suspected."""

    def suspect(self, said: Suspected, now_s: float) -> None:
        """Note that a site does not reach another; that it is gone is news where it was silent."""
        known = self._suspicions.get((said.by, said.site))
        if known is None or said.is_gone is not known.is_gone:
            self._suspicions[said.by, said.site] = _Suspicion(now_s, said.is_gone, said.why)

    def clear(self, said: Reached) -> None:
        """Note that a site reaches another again."""
        self._suspicions.pop((said.by, said.site), None)

    def forget(self, site: str) -> None:
        """What others think of a site counts no more, nor what it thinks of them."""
        for pair in [each for each in self._suspicions if site in each]:
            del self._suspicions[pair]

    def is_called_gone(self, site: str, is_live: Callable[[str], bool]) -> bool:
        """Whether any live site says that another's gateways are gone."""
        return any(
            suspicion.is_gone and is_live(by)
            for (by, of), suspicion in self._suspicions.items()
            if of == site
        )

    def why_not(self, site: str) -> str:
        """Return why a site that lives is not reached, or does not reach others."""
        whys = [
            f"{by} and {of} do not reach each other: {suspicion.why}"
            for (by, of), suspicion in self._suspicions.items()
            if site in (by, of)
        ]
        return whys[0] if whys else "the others do not reach it"

    def dead_links(self, is_live: Callable[[str], bool], now_s: float) -> frozenset[Pair]:
        """Return the links between live sites that are not to be used."""
        live = {
            pair: suspicion
            for pair, suspicion in self._suspicions.items()
            if all(is_live(name) for name in pair)
        }
        dead = {
            pair
            for pair, suspicion in live.items()
            if now_s - suspicion.since_s
            >= self._collect_s + (self._detect_s if suspicion.is_gone else 0.0)
        }
        if dead:  # what was heard since the first belongs to it
            dead |= {pair for pair, suspicion in live.items() if not suspicion.is_gone}
        return frozenset(pair_of(*pair) for pair in dead)

    def any_reach(self, names: Sequence[str]) -> bool:
        """Whether any two of some sites reach each other, for all that is known."""
        suspected = frozenset(pair_of(*pair) for pair in self._suspicions)
        return any(ways for ways in self.ways(names, suspected).values())

    def parts(self, names: Sequence[str], dead: frozenset[Pair]) -> list[tuple[str, ...]]:
        """Return the parts of some sites that are linked with one another, each in their order."""
        return linked_parts(names, self.ways(names, dead))

    def ways(self, names: Sequence[str], dead: frozenset[Pair]) -> dict[str, set[str]]:
        """Return whom each of some sites reaches among them."""
        alive = self._links - dead
        return {
            name: {other for other in names if pair_of(name, other) in alive and other != name}
            for name in names
        }


def linked_parts(names: Sequence[str], ways: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the connected parts of a graph of sites."""
    parts, left = [], list(names)
    while left:
        part, border = set[str](), {left[0]}
        while border:
            part |= border
            border = {other for name in border for other in ways[name]} - part
        parts.append(tuple(name for name in names if name in part))
        left = [name for name in left if name not in part]
    return parts


def pair_of(one: str, other: str) -> Pair:
    """Return two sites in ascending order."""
    return (one, other) if one < other else (other, one)
