"""What is told of a run's links that are no longer as its plan counts on them.

Frozen facts, no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.units import format_duration, format_rate

SAMPLES = 5
"""A figure is their median."""
BANDWIDTH, RTT = "bandwidth", "rtt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDrift:
    """One figure of a directed link that has been off for long."""

    source: str
    target: str
    what: str
    """`bandwidth` or `rtt`."""
    assumed: float
    """Bytes per second or seconds: what the plan counts on."""
    measured: float
    for_s: float

    def __str__(self) -> str:
        form = format_rate if self.what == BANDWIDTH else format_duration
        how = (
            f"median of {SAMPLES} measurements while the link was the limit"
            if self.what == BANDWIDTH
            else "median of greetings on the idle link"
        )
        return (
            f"{self.source} to {self.target}: {self.what} {form(_short(self.measured))} for "
            f"{self.for_s:.3g} s, {form(_short(self.assumed))} planned "
            f"({self.measured / max(self.assumed, 1e-9) - 1:+.0%}; {how})"
        )

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        names = ("source", "target", "what", "assumed", "measured", "for_s")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkForgotten:
    """One figure of a directed link that has not been measured for long.

    It is taken to be as described.
    """

    source: str
    target: str
    what: str
    """`bandwidth` or `rtt`."""
    measured: float
    """Bytes per second or seconds: what the plan has counted on."""
    described: float
    for_s: float

    def __str__(self) -> str:
        form = format_rate if self.what == BANDWIDTH else format_duration
        return (
            f"{self.source} to {self.target}: {self.what} {form(_short(self.measured))} has not "
            f"been measured again for {self.for_s:.3g} s, so {form(_short(self.described))} is "
            "planned with, as described"
        )

    def to_json(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        names = ("source", "target", "what", "measured", "described", "for_s")
        return {name: getattr(self, name) for name in names}


def _short(value: float) -> float:
    """Return a figure in three significant digits, in bits as in bytes."""
    return float(f"{8 * value:.3g}") / 8
