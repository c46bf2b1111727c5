"""How well an emulated link does what it was configured to.

Which settings, and what is good enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.emulator.config import shapes_of
from orchestrator.emulator.link import LinkShape
from topology.world import Topology

RTT_S, RTT_SHARE = 0.001, 0.02
"""A round trip may be off by this, or by this share of it, whichever is more."""
RATE_SHARE = 0.03
LOSS_SHARE = 0.1
PACKET_PAYLOAD = 1448 / 1500
"""What of an IP packet of 1500 bytes is left for TCP's payload, with its timestamps."""
GRID_RTTS_S = (0.001, 0.02, 0.08, 0.15)
GRID_BITS_PER_S = (50e6, 200e6, 500e6, 1000e6)
QUICK = ((0.02, 200e6), (0.08, 50e6))
CROSS_TALK = (0.02, 200e6)
LOSS_LINK = (0.02, 100e6)
LOSSES = (0.001, 0.01)
NUM_DATAGRAMS = 100_000
QUICK_DATAGRAMS = 20_000
MIN_LOST = 30
"""Fewer lost packets than this say nothing about a share within 10 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One link of a scene, and what is measured on it."""

    source: str
    target: str
    rate: bool = True
    loss: bool = False
    beside: tuple[str, str] | None = None
    """A second link, that is full while this one is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One emulation, and what is measured on it."""

    links: tuple[LinkShape, ...]
    pairs: tuple[Pair, ...]

    def link(self, source: str, target: str) -> LinkShape:
        """Return a directed link."""
        return next(each for each in self.links if (each.source, each.target) == (source, target))

    def rtt_s(self, pair: Pair) -> float:
        """Return the configured time there and back."""
        there = self.link(pair.source, pair.target).delay_s
        return there + self.link(pair.target, pair.source).delay_s

    @property
    def sites(self) -> tuple[str, ...]:
        """All sites, in the order in which links name them."""
        return tuple(
            dict.fromkeys(site for link in self.links for site in (link.source, link.target))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a link: configured, measured, and how far apart they may be."""

    link: str
    setting: str
    what: str
    """`RTT`, `1 connection`, `4 connections`, `loss`; with `, other link full` beside load."""
    unit: str
    """`s`, `bytes/s` or `share`."""
    expected: float
    """What the configuration allows: of a rate, the payload's share of it."""
    measured: float
    allowed: float
    """Difference, in the same unit; infinite where it says nothing about the link."""
    cpu: float | None = None
    """Of one processor, that the emulator used meanwhile."""

    @property
    def deviation(self) -> float:
        """Relative to what was expected; signed."""
        return self.measured / self.expected - 1 if self.expected else self.measured

    @property
    def is_good(self) -> bool:
        """Whether it is close enough."""
        return abs(self.measured - self.expected) <= self.allowed

    @property
    def of_allowed(self) -> float:
        """How much of the allowed difference is used up: above 1 it is too much."""
        return abs(self.measured - self.expected) / self.allowed


def allowed_rtt_s(rtt_s: float, jitter_s: float) -> float:
    """Return how far a median round trip may be off."""
    return max(RTT_S, RTT_SHARE * rtt_s) + jitter_s


def worst(figures: Iterable[Figure]) -> Figure | None:
    """Return the figure that uses up most of what it is allowed."""
    return max(figures, key=lambda figure: figure.of_allowed, default=None)


def grid(*, is_quick: bool, has_loss: bool) -> list[Scene]:
    """Return the built-in settings: every round trip with every rate, cross-talk, and loss."""
    settings = (
        list(QUICK)
        if is_quick
        else [(rtt_s, rate) for rtt_s in GRID_RTTS_S for rate in GRID_BITS_PER_S]
    )
    scenes = [
        Scene(links=_both("a", "b", *each), pairs=(Pair(source="a", target="b"),))
        for each in settings
    ]
    beside = Pair(source="a", target="b", beside=("a", "c"))
    crossing = (*_both("a", "b", *CROSS_TALK), *_both("a", "c", *CROSS_TALK))
    scenes.append(Scene(links=crossing, pairs=(beside,)))
    if has_loss:
        losses = LOSSES[1:] if is_quick else LOSSES
        scenes += [
            Scene(
                links=_both("a", "b", *LOSS_LINK, loss=loss),
                pairs=(Pair(source="a", target="b", rate=False, loss=True),),
            )
            for loss in losses
        ]
    return scenes


def scenes_of(topology: Topology, *, has_loss: bool) -> list[Scene]:
    """Return what to measure of a topology: each link that has one back."""
    links = shapes_of(topology)
    return [
        Scene(
            links=links,
            pairs=tuple(
                Pair(source=each.source, target=each.target, loss=has_loss and each.loss > 0)
                for each in links
                if topology.link(each.target, each.source)
            ),
        )
    ]


def _both(
    one: str, other: str, rtt_s: float, bits_per_s: float, loss: float = 0
) -> tuple[LinkShape, ...]:
    """Return a link each way. Only the first one loses packets: echoes come back."""
    return tuple(
        LinkShape(
            source=source,
            target=target,
            bytes_per_s=bits_per_s / 8,
            delay_s=rtt_s / 2,
            loss=loss if source == one else 0.0,
        )
        for source, target in ((one, other), (other, one))
    )
