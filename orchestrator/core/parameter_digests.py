"""Compares the parameter hashes of all ranks of all sites, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

WINDOW_STEPS = 32
"""Steps that may be open, waiting for some rank's hashes; then the oldest is closed as it is."""

Replica = tuple[str, int]
"""Site, and rank inside it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step after which the replicas' parameters were not equal."""

    step: int
    tensor: str
    """The first that differs, in the order of the model; empty if the hashes do not tell."""
    lacking: tuple[Replica, ...]
    """The ranks that have no tensor of this name; empty: all have one."""
    sites: tuple[str, ...]
    """The odd ones out if a majority agrees on something else, otherwise all that take part."""
    is_majority: bool
    """Whether `sites` are the odd ones out."""
    replicas: tuple[Replica, ...]
    """The ranks at `sites` that differ."""

    def __str__(self) -> str:
        if self.lacking:
            return (
                f"after step {self.step}, tensor {self.tensor!r} is not there at "
                f"{_listed(self.lacking)}, and elsewhere it is"
            )
        what = f"tensor {self.tensor!r} differs" if self.tensor else "the parameters differ"
        ranks = _listed(self.replicas)
        if self.is_majority:
            return f"after step {self.step}, {what} at {ranks} from all others"
        return f"after step {self.step}, {what} between {ranks}"


def _listed(replicas: Sequence[Replica]) -> str:
    ranks = ", ".join(f"site {site} rank {rank}" for site, rank in replicas[:8])
    return f"{ranks} and {len(replicas) - 8} more" if len(replicas) > 8 else ranks


@dataclass(frozen=True, slots=True)
class _Hashes:
    combined: int
    tensors: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(slots=True)
class _Step:
    groups: dict[_Hashes, list[Replica]] = field(default_factory=dict)
    """Equal replicas share one entry, so memory does not grow with the ranks."""
    seen: set[Replica] = field(default_factory=set)


class DigestComparison:
    """Compares the hashes of all ranks. Pure: hashes in, at most one difference out."""

    def __init__(self, ranks_per_site: Mapping[str, int]) -> None:
        self._all_ranks = dict(ranks_per_site)
        self._ranks_per_site = dict(ranks_per_site)
        self._since: dict[str, int] = {}
        """The first step after which a site's hashes count, where it came back."""
        self._newest = -1
        self._open: dict[int, _Step] = {}
        self._closed: deque[int] = deque(maxlen=WINDOW_STEPS)
        self.verified_steps = 0
        """Steps for which every rank's hashes came and were equal; step 0 is the beginning."""

    def report(
        self,
        site: str,
        rank: int,
        step: int,
        combined: int,
        tensors: tuple[int, ...],
        names: tuple[str, ...],
    ) -> Difference | None:
        """Take one rank's hashes after a step; repeated ones change nothing.

        Returns:
            The difference, once it is certain who differs: all have reported, a majority of all
            agrees, or there are only two.
        """
        if not 0 <= rank < self._ranks_per_site.get(site, 0) or step in self._closed:
            return None
        if step < self._since.get(site, 0):
            return None
        self._newest = max(self._newest, step)
        entry = self._open.setdefault(step, _Step())
        if (site, rank) in entry.seen:
            return None
        entry.seen.add((site, rank))
        entry.groups.setdefault(_Hashes(combined, tensors, names), []).append((site, rank))
        return self._close_if_known(step, entry) or self._evict()

    def drop(self, site: str) -> Difference | None:
        """Wait for no hashes of a site any more, and leave out those that came of open steps.

        Returns:
            The earliest difference among the others that is certain now.
        """
        self._ranks_per_site.pop(site, None)
        found = None
        for step, entry in sorted(self._open.items()):
            for hashes, replicas in list(entry.groups.items()):
                entry.groups[hashes] = [each for each in replicas if each[0] != site]
                if not entry.groups[hashes]:
                    del entry.groups[hashes]
            entry.seen = {each for each in entry.seen if each[0] != site}
            found = found or self._close_if_known(step, entry)
        return found

    def regain(self, site: str) -> None:
        """Wait for a site's hashes again, from the first step that nobody has reported."""
        self._ranks_per_site[site] = self._all_ranks[site]
        self._since[site] = self._newest + 1

    def flush(self) -> Difference | None:
        """Return the earliest difference among steps that some rank has not reported."""
        for step, entry in sorted(self._open.items()):
            if len(entry.groups) > 1:
                return _difference(step, entry, self._majority(step, entry))
        return None

    def _close_if_known(self, step: int, entry: _Step) -> Difference | None:
        """Close a step that all have reported alike; return a difference that is certain."""
        complete = len(entry.seen) == self._num_replicas(step)
        if len(entry.groups) > 1 and (complete or self._majority(step, entry) is not None):
            return _difference(step, entry, self._majority(step, entry))
        if complete and entry.seen:
            self.verified_steps += 1
            self._closed.append(step)
            del self._open[step]
        return None

    def _evict(self) -> Difference | None:
        """Close the oldest step if more are open than the window holds."""
        if len(self._open) <= WINDOW_STEPS:
            return None
        step = min(self._open)
        entry = self._open.pop(step)
        self._closed.append(step)
        return (
            _difference(step, entry, self._majority(step, entry)) if len(entry.groups) > 1 else None
        )

    def _num_replicas(self, step: int) -> int:
        return sum(
            ranks
            for site, ranks in self._ranks_per_site.items()
            if step >= self._since.get(site, 0)
        )

    def _majority(self, step: int, entry: _Step) -> _Hashes | None:
        """Return what more than half have, of at least three replicas, if they do.

        Each site has one vote, which its ranks share: those that hold shards of one whole all say
        the same, however many they are.
        """
        if self._num_replicas(step) < 3:
            return None
        votes = {
            hashes: sum(Fraction(1, self._ranks_per_site[site]) for site, _ in replicas)
            for hashes, replicas in entry.groups.items()
        }
        largest = max(votes, key=lambda hashes: votes[hashes])
        num_sites = sum(step >= self._since.get(site, 0) for site in self._ranks_per_site)
        return largest if 2 * votes[largest] > num_sites else None


def _difference(step: int, entry: _Step, majority: _Hashes | None) -> Difference:
    named = [hashes for hashes in entry.groups if hashes != majority]
    replicas = tuple(sorted(replica for hashes in named for replica in entry.groups[hashes]))
    tensor = _not_everywhere(list(entry.groups))
    lacking = [
        replica
        for hashes, at in entry.groups.items()
        if tensor and tensor not in hashes.names
        for replica in at
    ]
    return Difference(
        step=step,
        tensor=tensor or _first_differing(list(entry.groups)),
        lacking=tuple(sorted(lacking)),
        sites=tuple(sorted({site for site, _ in replicas})),
        is_majority=majority is not None,
        replicas=replicas,
    )


def _not_everywhere(groups: list[_Hashes]) -> str:
    """Return the first tensor that some replicas have and others have not; empty: there is none.

    Of a large model names stand for several tensors, and may be cut otherwise where sets differ.
    """
    sets = [set(each.names) for each in groups]
    everywhere = set.intersection(*sets)
    names = (name for each in groups for name in each.names)
    return next((name for name in names if name not in everywhere), "")


def _first_differing(groups: list[_Hashes]) -> str:
    """Return the first tensor whose hash or name is not the same in all groups."""
    listed = [list(zip(each.names, each.tensors, strict=False)) for each in groups]
    for place, tensor in enumerate(listed[0]):
        if any(each[place : place + 1] != [tensor] for each in listed[1:]):
            return tensor[0]
    return ""
