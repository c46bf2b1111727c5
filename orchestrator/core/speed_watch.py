"""Finds a division of the batch with which a run's slowest site would be done earlier. Pure.

Each site's steps say how long it computes for its samples. A site's speed is the median of the
latest SAMPLES steps. Another division is due once it has promised to save `gain` of the time that
the slowest site computes, for as long as `lasting`, and no more once it promises less than half of
that. One that the planner found not worth it is let be until it promises `gain` more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.shares import AS_BEGUN, divided_by_speed, parts_of, whole_units
from isthmus.topology.spec.units import format_duration

SAMPLES = 5
"""Steps of which a site's speed is the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Another division of the batch, beside the present one."""

    parts: tuple[int, ...]
    """Samples of each site of the run, in its order."""
    members: Mapping[str, int]
    """Samples of each site that takes part."""
    compute_s: Mapping[str, float]
    """Measured seconds that each of them computes for its present part of a step."""
    gain: float
    """Share of the slowest site's time that it saves."""
    for_s: float = 0.0
    """For how long it has promised that."""

    def __str__(self) -> str:
        slowest, fastest = (
            pick(self.compute_s, key=self.compute_s.__getitem__) for pick in (max, min)
        )
        slow_s, fast_s = (
            format_duration(float(f"{self.compute_s[name]:.3g}")) for name in (slowest, fastest)
        )
        return (
            f"site {slowest} computes {slow_s} for its part of a step and site {fastest} {fast_s}, "
            f"for {self.for_s:.3g} s"
        )


class SpeedWatch:
    """All sites of a run."""

    def __init__(self, spec: RunSpec, settings: Replan) -> None:
        """Know no speeds."""
        self._spec, self._settings = spec, settings
        self._sample_s: dict[str, deque[float]] = {}
        """Seconds that a site computes for a sample, in its latest steps."""
        placed = {each.site: each.parallel for each in spec.job.placement}
        cuts = {site.name: placed.get(site.name) for site in spec.topology.sites}
        self._readers = {
            site.name: site.num_ranks if (cut := cuts[site.name]) is None else cut.data
            for site in spec.topology.sites
        }
        own = spec.job.trainer.micro_batch if spec.job.entrypoint is None else 1
        micro_batch = math.gcd(*(own if cut is None else cut.micro_batch for cut in cuts.values()))
        began = parts_of(spec, spec.site_names, AS_BEGUN)
        units = whole_units(began, [*self._readers.values()], micro_batch)
        self._units = dict(zip(spec.site_names, units, strict=True))
        self._since_s: float | None = None
        """When the division began to promise that much."""
        self._let_be = 0.0
        """What was promised and not found worth it."""
        self.found: Division | None = None
        """The best division by the speeds as they are; None: not all members' are known."""

    def add(self, site: str, values: Mapping[str, float]) -> None:
        """Take a step of a site."""
        samples = values.get(metrics.SITE_SAMPLES, 0.0)
        seconds = values.get(metrics.COMPUTE_S, 0.0) + values.get(metrics.INTRA_S, 0.0)
        if site in self._readers and samples > 0 and 0 < seconds < math.inf:
            self._sample_s.setdefault(site, deque(maxlen=SAMPLES)).append(seconds / samples)

    def look(self, epoch: Epoch, now_s: float) -> None:
        """Find the best division for the members that there are."""
        found = self._best(epoch)
        gain, wanted = 0.0 if found is None else found.gain, self._settings.gain
        if gain < wanted / 2:
            self._since_s, self._let_be = None, 0.0
        elif gain >= wanted + self._let_be and self._since_s is None:
            self._since_s = now_s
        for_s = 0.0 if self._since_s is None else now_s - self._since_s
        self.found = None if found is None else replace(found, for_s=for_s)

    @property
    def due(self) -> Division | None:
        """Return the division that has promised enough for long enough."""
        if self.found is None or self._since_s is None:
            return None
        return self.found if self.found.for_s >= self._settings.lasting_s else None

    def let_be(self) -> None:
        """What there is has been decided on: wait for a division that promises more."""
        self._let_be = max(0.0, 0.0 if self.found is None else self.found.gain)
        self._since_s = None

    def _best(self, epoch: Epoch) -> Division | None:
        members = epoch.members
        known = {
            name: median(each) for name, each in self._sample_s.items() if len(each) == SAMPLES
        }
        if len(members) < 2 or not known.keys() >= {*members}:
            return None
        present = parts_of(self._spec, members, epoch.shares)
        if not all(present):
            return None
        compute_s = [part * known[name] for name, part in zip(members, present, strict=True)]
        sample_s = [known[name] for name in members]
        readers = [self._readers[name] for name in members]
        units = [self._units[name] for name in members]
        best = divided_by_speed(sum(present), sample_s, units, readers) or divided_by_speed(
            sum(present), sample_s, readers, readers
        )
        if not best:
            return None
        best_s = max(part * known[name] for name, part in zip(members, best, strict=True))
        division = dict(zip(members, best, strict=True))
        return Division(
            parts=self._for_all(division, known, epoch),
            members=division,
            compute_s=dict(zip(members, compute_s, strict=True)),
            gain=1 - best_s / max(compute_s),
        )

    def _for_all(
        self, division: Mapping[str, int], known: Mapping[str, float], epoch: Epoch
    ) -> tuple[int, ...]:
        """Return a division with what sites would get that take no part now."""
        names = self._spec.site_names
        before = dict(zip(names, parts_of(self._spec, names, epoch.shares), strict=True))
        scale = sum(division.values()) / max(1, sum(before[name] for name in division))
        pace = sum(division.values()) / sum(1 / known[name] for name in division)
        return tuple(
            division.get(name)
            or max(1, round(pace / known[name] if name in known else scale * before[name]))
            for name in names
        )
