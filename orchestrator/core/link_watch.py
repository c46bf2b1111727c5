"""Finds the links that have differed for some time from what a run's plan counts on. Pure.

A figure is the median of a link's latest SAMPLES measurements, so that one that came about by
chance moves nothing. A figure begins to drift when it is farther off than `drift`. It stops when it
is less than half as far off; in between nothing changes, so that a link at the limit does not begin
anew all the time. Time counts from measurement to measurement.

A link that no tree uses any more is not measured, and might be well again. So a measurement is
believed for some time and then forgotten: the link is taken to be as described, and other trees may
try it. If it turns out to be as slow as before, that is believed twice as long as the last time.
The n-th attempt in vain therefore comes 2^n times as late as the first, and attempts cost ever less
of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median

from isthmus.protos import metrics
from isthmus.topology.spec.measured_links import LinkFigures, Pair
from isthmus.topology.spec.plan_wishes import Replan
from isthmus.topology.spec.units import format_duration, format_rate
from isthmus.topology.spec.world import Topology

SAMPLES = 5
"""Measurements of which a figure is the median."""
BANDWIDTH, RTT = "bandwidth", "rtt"
LIMITED_MIN_S = 0.1
"""The shortest time that counts as a measurement; shorter ones are added up.

A processor's turns take some milliseconds of it.
"""
RTT_MIN_S = 0.01
"""A round trip that differs by less is a processor's turn, not a way through the WAN."""
BELIEVED = 10
"""Times `lasting`: how long a measurement is believed without another one, the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """One figure of a directed link on which the plan no longer counts."""

    source: str
    target: str
    what: str
    """`bandwidth` or `rtt`."""
    planned: float
    """Bytes per second or seconds: what the plan has counted on."""
    now: float
    """What is planned with instead."""
    for_s: float
    """For how long it has been off, or was not measured."""
    is_forgotten: bool = False
    """Not measured for so long that it is taken to be as described; else measured to be off."""

    def __str__(self) -> str:
        form = format_rate if self.what == BANDWIDTH else format_duration
        planned, now = form(_short(self.planned)), form(_short(self.now))
        told = f"{self.source} to {self.target}: {self.what}"
        if self.is_forgotten:
            return (
                f"{told} {planned} has not been measured again for {self.for_s:.3g} s, so {now} "
                "is planned with, as described"
            )
        how = (
            f"median of {SAMPLES} measurements while the link was the limit"
            if self.what == BANDWIDTH
            else "median of greetings on the idle link"
        )
        return (
            f"{told} {now} for {self.for_s:.3g} s, {planned} planned "
            f"({self.now / max(self.planned, 1e-9) - 1:+.0%}; {how})"
        )

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values, as the journal names them."""
        names = ("measured", "described") if self.is_forgotten else ("assumed", "measured")
        return {
            "source": self.source,
            "target": self.target,
            "what": self.what,
            **dict(zip(names, (self.planned, self.now), strict=True)),
            "for_s": self.for_s,
        }


@dataclass(slots=True)
class _Watched:
    """One figure of one link."""

    described: float
    assumed: float
    believed_s: float
    """For how long it is counted on without a measurement, where it is not as described."""
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    since_s: float | None = None
    """When it began to be off."""
    latest_s: float = 0.0
    """When the latest sample came."""

    @property
    def value(self) -> float:
        return median(self.samples)


@dataclass(slots=True)
class _Totals:
    """What one gateway has counted of a link."""

    limited_bytes: float = 0.0
    limited_s: float = 0.0


class LinkWatch:
    """All links of a run."""

    def __init__(self, topology: Topology, settings: Replan) -> None:
        """Count on what the topology says."""
        self._settings = settings
        self._believed_s = BELIEVED * settings.lasting_s
        self._gateways = {
            site.name: frozenset(map(str, range(site.num_gateways))) for site in topology.sites
        }
        self._watched: dict[tuple[Pair, str], _Watched] = {}
        for link in topology.links:
            pair = (link.source, link.target)
            for what, value in ((BANDWIDTH, link.bytes_per_s), (RTT, link.rtt_s)):
                self._watched[pair, what] = _Watched(value, value, self._believed_s)
        self._most = {
            (link.source, link.target): link.bytes_per_s
            for link in topology.links
            if link.share < 1
        }
        self._totals: dict[tuple[Pair, str], _Totals] = {}
        self._open: dict[Pair, dict[str, _Totals]] = {}

    def add(self, pair: Pair, gateway: str, values: Mapping[str, float], now_s: float) -> None:
        """Take what one gateway reports of a link: totals since its process began.

        Reports of unknown links or gateways, or with figures that are no numbers, change nothing.
        """
        if (pair, BANDWIDTH) not in self._watched or gateway not in self._gateways[pair[0]]:
            return
        if not all(map(isfinite, values.values())):
            return
        rtt_s = values.get(metrics.IDLE_RTT_S)
        if rtt_s is not None and rtt_s > 0:
            self._sample(pair, RTT, rtt_s, now_s)
        now = _Totals(values.get(metrics.LIMITED_BYTES, 0.0), values.get(metrics.LIMITED_S, 0.0))
        before = self._totals.setdefault((pair, gateway), _Totals())
        if now.limited_s < before.limited_s:  # it was started again
            before = self._totals[pair, gateway] = _Totals()
        limited_s = now.limited_s - before.limited_s
        if limited_s < LIMITED_MIN_S:
            return
        self._totals[pair, gateway] = now
        # Several gateways share a link: what they carry at once belongs together.
        begun = self._open.setdefault(pair, {})
        if gateway in begun:
            self._close(pair, now_s)
            begun = self._open.setdefault(pair, {})
        begun[gateway] = _Totals(now.limited_bytes - before.limited_bytes, limited_s)
        if len(begun) == len(self._gateways[pair[0]]):
            self._close(pair, now_s)

    def drifts(self) -> tuple[LinkChange, ...]:
        """Return what has drifted for long, the farthest off first."""
        found = []
        for ((source, target), what), watched in self._watched.items():
            if watched.since_s is None:
                continue
            for_s = watched.latest_s - watched.since_s
            off = _off(what, watched.value, watched.assumed)
            if off > self._settings.drift and for_s >= self._settings.lasting_s:
                change = LinkChange(
                    source=source,
                    target=target,
                    what=what,
                    planned=watched.assumed,
                    now=watched.value,
                    for_s=for_s,
                )
                found.append(change)
        return tuple(sorted(found, key=lambda each: -_times_off(each.now, each.planned)))

    def figures(self) -> dict[Pair, LinkFigures]:
        """Return what to plan with, of the figures that are not as described.

        A figure that is off, lasting or not, counts as measured; any other as it was counted on
        last, since figures vary by chance.
        """
        known = {
            key: each.assumed if each.since_s is None else each.value
            for key, each in self._watched.items()
            if each.since_s is not None or each.assumed != each.described
        }
        return {
            pair: LinkFigures(
                bytes_per_s=known.get((pair, BANDWIDTH)), rtt_s=known.get((pair, RTT))
            )
            for pair in dict.fromkeys(pair for pair, _ in known)
        }

    def assume(self, figures: Mapping[Pair, LinkFigures]) -> None:
        """From now on count on these: a plan was made with them."""
        for pair, figure in figures.items():
            for what, value in ((BANDWIDTH, figure.bytes_per_s), (RTT, figure.rtt_s)):
                if value is not None:
                    watched = self._watched[pair, what]
                    watched.assumed, watched.since_s = value, None

    def forget(self, now_s: float) -> tuple[LinkChange, ...]:
        """Take links as described again that were not measured for long; return which."""
        found = []
        for ((source, target), what), watched in self._watched.items():
            for_s = now_s - watched.latest_s
            if not watched.samples or for_s < watched.believed_s:
                continue
            watched.samples.clear()
            watched.since_s = None
            if not self._is_near(what, watched.assumed, watched.described):
                change = LinkChange(
                    source=source,
                    target=target,
                    what=what,
                    planned=watched.assumed,
                    now=watched.described,
                    for_s=for_s,
                    is_forgotten=True,
                )
                found.append(change)
                watched.believed_s *= 2
            watched.assumed = watched.described
        return tuple(found)

    def _close(self, pair: Pair, now_s: float) -> None:
        parts: Iterable[_Totals] = self._open.pop(pair).values()
        limited_bytes = sum(each.limited_bytes for each in parts)
        bytes_per_s = limited_bytes / max(each.limited_s for each in parts)
        if bytes_per_s > 0:
            most = self._most.get(pair, bytes_per_s)
            self._sample(pair, BANDWIDTH, min(bytes_per_s, most), now_s)

    def _sample(self, pair: Pair, what: str, value: float, now_s: float) -> None:
        watched = self._watched[pair, what]
        watched.samples.append(value)
        watched.latest_s = now_s
        off = _off(what, watched.value, watched.assumed)
        if off > self._settings.drift and len(watched.samples) > SAMPLES // 2:
            watched.since_s = now_s if watched.since_s is None else watched.since_s
        elif off < self._settings.drift / 2:
            watched.since_s = None
        is_full = len(watched.samples) == SAMPLES
        if is_full and self._is_near(what, watched.value, watched.described):
            watched.believed_s = self._believed_s

    def _is_near(self, what: str, value: float, expected: float) -> bool:
        return _off(what, value, expected) < self._settings.drift / 2


def _off(what: str, value: float, expected: float) -> float:
    """Return how far a figure is off what is expected, of that."""
    difference = abs(value - expected)
    if what == RTT and difference < RTT_MIN_S:
        return 0.0
    return difference / max(expected, 1e-9)


def _times_off(measured: float, assumed: float) -> float:
    """Return how many times a figure is the other, whichever is larger."""
    return max(measured, assumed) / max(min(measured, assumed), 1e-12)


def _short(value: float) -> float:
    """Return a figure in three significant digits, in bits as in bytes."""
    return float(f"{8 * value:.3g}") / 8
