"""Puts measured figures of links into a topology, and compares them with described ones. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.topology.spec.units import format_duration, format_rate
from isthmus.topology.spec.world import Link, Topology

FAR = 0.2
"""Relative difference from which a measured figure is reported. Losses and jitter vary too much
from minute to minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One figure of a link, described and measured."""

    source: str
    target: str
    what: str
    """The kind of figure: `bandwidth` or `rtt`."""
    described: float
    """The described figure: bytes per second that a run may use, or seconds."""
    measured: float
    """The measured figure, in the same unit."""
    at: str | None
    """The time of the measurement in ISO 8601."""

    @property
    def relative(self) -> float:
        """The measured figure's signed difference from the described one, as a share of it."""
        return self.measured / self.described - 1

    def __str__(self) -> str:
        form = format_rate if self.what == "bandwidth" else format_duration
        when = f" at {self.at}" if self.at else ""
        return (
            f"{self.source} to {self.target}: {self.what} {form(self.measured)} was "
            f"measured{when}, {form(self.described)} is described ({self.relative:+.0%}): the "
            "measured figure is used"
        )


def drifts(topology: Topology) -> tuple[Drift, ...]:
    """Return figures that differ by more than FAR, in the order of the links.

    Where both directions of a link differ alike, the first stands for both.
    """
    differences: list[Drift] = []
    seen: set[tuple[str, str, str, float, float]] = set()
    for link in topology.links:
        for drift in _of(link):
            figures = (drift.what, drift.described, drift.measured)
            if (link.target, link.source, *figures) not in seen:
                differences.append(drift)
            seen.add((link.source, link.target, *figures))
    return tuple(differences)


def _of(link: Link) -> list[Drift]:
    figures = [
        ("bandwidth", link.described_bytes_per_s, link.bytes_per_s),
        ("rtt", link.described_rtt_s, link.rtt_s),
    ]
    return [
        Drift(
            source=link.source,
            target=link.target,
            what=what,
            described=described,
            measured=measured,
            at=link.measured_at,
        )
        for what, described, measured in figures
        if described and abs(measured / described - 1) > FAR
    ]


Pair = tuple[str, str]
"""The names of a link's source and target."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """The measured figures of one directed link; None: nothing was measured."""

    bytes_per_s: float | None = None
    rtt_s: float | None = None


def with_measured(topology: Topology, figures: Mapping[Pair, LinkFigures], at: str) -> Topology:
    """Return a topology with figures measured `at` a time (ISO 8601) in place of its own.

    On a shared link a run uses at most its share of the measured figure. Links without figures are
    unchanged.
    """
    links = tuple(
        _measured(link, figures[link.source, link.target], at)
        if (link.source, link.target) in figures
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)


def _measured(link: Link, figures: LinkFigures, at: str) -> Link:
    if figures.bytes_per_s is not None:
        most = link.bytes_per_s if link.share < 1 else figures.bytes_per_s
        link = dataclasses.replace(
            link,
            bytes_per_s=min(figures.bytes_per_s, most),
            bandwidth_origin="measured",
            described_bytes_per_s=link.described_bytes_per_s or link.bytes_per_s,
            measured_at=at,
        )
    if figures.rtt_s is not None:
        link = dataclasses.replace(
            link,
            rtt_s=figures.rtt_s,
            rtt_origin="measured",
            described_rtt_s=link.described_rtt_s or link.rtt_s,
            measured_at=at,
        )
    return link
