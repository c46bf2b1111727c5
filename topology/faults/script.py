"""Fault scripts: what happens to the emulated WAN, and when.

loading.py reads one, `expand` turns it into times. Nothing is left to chance: a time that the
script gives as a range depends only on the seed and on which fault of the script it belongs to, so
a seed means the same times on every machine, and a fault added at the end moves none before it.

**What overlapping faults mean.** At any time a link has a list of faults that have begun and not
ended, in the order in which they began (of two at the same microsecond, in the order of the
script). It is cut if any of them cuts it. Each of its figures is that of the last of them which
gives one, else the configured. A `for` takes its fault off the list, so that what it did is undone
and what the others do stays; `heal` empties the list. What `expand` returns are the differences:
whenever a link is not as it was, its whole new state. At one instant, ends come before beginnings.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from topology.faults.changes import Change, Pause
from topology.world import Topology

Pair = tuple[str, str]
"""Source and target."""
Figures = Mapping[str, float]
"""By their names in Change: `bytes_per_s`, `delay_s`, `jitter_s`, `loss`."""

ACTIONS = ("link", "partition", "cut", "flap", "heal", "pause", "reset", "half_open")


@dataclass(frozen=True, slots=True)
class Span:
    """A time that is drawn uniformly from a range."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of a script, its names resolved."""

    action: str
    """One of ACTIONS."""
    at_s: Span
    """When it begins."""
    for_s: Span | None = None
    """How long it lasts; None: until it is healed."""
    links: tuple[Pair, ...] = ()
    """Directed; which it changes. For `reset` and `half_open` the one between the two sites."""
    figures: Figures | None = None
    """Of `link`: which figures become what."""
    up_s: Span | None = None
    """Of `flap`: how long the links work between two cuts."""
    down_s: Span | None = None
    """Of `flap`: how long they are cut; a flap begins with a cut."""
    site: str = ""
    """Of `pause`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript:
    """A fault script for one topology."""

    seed: int
    faults: tuple[Fault, ...]
    links: Mapping[Pair, Figures]
    """Every directed link of the topology, with all its figures as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedChange:
    """What happens, and when. Those of one time belong together: apply them at once, in order."""

    at_s: float
    """Since the script began; a whole number of microseconds."""
    change: Change | Pause
    fault: int
    """Position in the script of the fault that it follows from; the last of several."""


def figures_of(topology: Topology) -> dict[Pair, Figures]:
    """Return every directed link of a topology with its figures: half the RTT each way."""
    return {
        (link.source, link.target): {
            "bytes_per_s": link.bytes_per_s,
            "delay_s": link.rtt_s / 2,
            "jitter_s": link.jitter_s,
            "loss": link.loss,
        }
        for link in topology.links
    }


def expand(script: FaultScript, seed: int | None = None) -> tuple[TimedChange, ...]:
    """Return all that a script does, sorted by time.

    Args:
        script: As loaded.
        seed: Instead of the script's own.
    """
    used_seed = script.seed if seed is None else seed
    events = [
        event
        for index, fault in enumerate(script.faults)
        for event in _events(index, fault, _Draws(used_seed, index))
    ]
    events.sort(key=lambda event: (event.at_s, event.kind != "end"))  # stable: else script order
    wan = _Wan(script.links)
    return tuple(
        timed
        for at_s, together in itertools.groupby(events, key=lambda event: event.at_s)
        for timed in wan.apply(at_s, together)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """A fault begins or ends on some links, or does what is over at once."""

    at_s: float
    fault: int
    kind: str
    """`begin`, `end`, `heal` or `now`; resuming is an `end`."""
    links: tuple[Pair, ...] = ()
    figures: Figures | None = None
    """Of `begin`: None cuts."""
    change: Change | Pause | None = None


class _Draws:
    """The times of one fault: each depends on seed, fault and how many were drawn before it."""

    def __init__(self, seed: int, fault: int) -> None:
        self._stream = f"{seed}/{fault}"
        self._count = itertools.count()

    def time_s(self, span: Span) -> float:
        """Return a time of the span, in whole microseconds."""
        key = f"{self._stream}/{next(self._count)}".encode()
        share = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
        return _microseconds(span.low_s + share * (span.high_s - span.low_s))


def _microseconds(time_s: float) -> float:
    """Round, so that 0.1 s + 0.2 s and 0.3 s are one instant."""
    return round(time_s, 6)


def _events(index: int, fault: Fault, draws: _Draws) -> Iterator[_Event]:
    at_s = draws.time_s(fault.at_s)
    end_s = math.inf if fault.for_s is None else _microseconds(at_s + draws.time_s(fault.for_s))
    match fault.action:
        case "heal":
            yield _Event(at_s=at_s, fault=index, kind="heal", links=fault.links)
        case "reset" | "half_open":
            [(source, target)] = fault.links
            change = Change(kind=fault.action, source=source, target=target)
            yield _Event(at_s=at_s, fault=index, kind="now", change=change)
        case "pause":
            stop, go = (Pause(site=fault.site, is_paused=each) for each in (True, False))
            yield _Event(at_s=at_s, fault=index, kind="now", change=stop)
            yield _Event(at_s=end_s, fault=index, kind="end", change=go)
        case "flap":
            assert fault.up_s is not None
            assert fault.down_s is not None
            while at_s < end_s:
                up_at_s = min(end_s, _microseconds(at_s + draws.time_s(fault.down_s)))
                yield from _lasting(index, fault, at_s, up_at_s)
                at_s = _microseconds(up_at_s + draws.time_s(fault.up_s))
        case _:
            yield from _lasting(index, fault, at_s, end_s)


def _lasting(index: int, fault: Fault, at_s: float, end_s: float) -> Iterator[_Event]:
    yield _Event(at_s=at_s, fault=index, kind="begin", links=fault.links, figures=fault.figures)
    if end_s < math.inf:
        yield _Event(at_s=end_s, fault=index, kind="end", links=fault.links)


class _Wan:
    """Which faults each link is under, and what follows from them."""

    def __init__(self, configured: Mapping[Pair, Figures]) -> None:
        self._configured = configured
        self._active: dict[Pair, dict[int, Figures | None]] = {pair: {} for pair in configured}
        """By fault, in the order in which they began; None cuts."""
        self._begun: set[int] = set()
        self._healed: dict[Pair, set[int]] = {pair: set() for pair in configured}
        """Faults that had begun when the link was healed: a flap does not cut it again."""

    def apply(self, at_s: float, events: Iterable[_Event]) -> list[TimedChange]:
        """Take in all that happens at one time; return what to do about it."""
        before: dict[Pair, tuple[bool, Figures]] = {}
        cause: dict[Pair, int] = {}
        at_once = []
        for event in events:
            for pair in event.links:
                before.setdefault(pair, self._state(pair))
                cause[pair] = event.fault
                self._take(pair, event)
            if event.kind == "begin":
                self._begun.add(event.fault)
            if event.change is not None:
                at_once.append(TimedChange(at_s=at_s, change=event.change, fault=event.fault))
        changed = [
            TimedChange(at_s=at_s, change=change, fault=cause[pair])
            for pair, was in before.items()
            for change in self._changes(pair, was)
        ]
        return [*changed, *at_once]

    def _take(self, pair: Pair, event: _Event) -> None:
        active = self._active[pair]
        match event.kind:
            case "begin" if event.fault not in self._healed[pair]:
                active[event.fault] = event.figures
            case "end":
                active.pop(event.fault, None)
            case "heal":
                active.clear()
                self._healed[pair] |= self._begun

    def _state(self, pair: Pair) -> tuple[bool, Figures]:
        """Return whether a link is cut, and all its figures."""
        figures, is_cut = dict(self._configured[pair]), False
        for change in self._active[pair].values():
            is_cut = is_cut or change is None
            figures.update(change or {})
        return is_cut, figures

    def _changes(self, pair: Pair, was: tuple[bool, Figures]) -> Iterator[Change]:
        """Yield what brings a link from an earlier state to the present one."""
        (was_cut, old), (is_cut, new) = was, self._state(pair)
        source, target = pair
        heals = (was_cut or old != new) and not is_cut and new == self._configured[pair]
        if heals or (was_cut and not is_cut):
            yield Change(kind="heal", source=source, target=target)
            old = self._configured[pair]
        if old != new:
            yield Change(kind="shape", source=source, target=target, **new)
        if is_cut and not was_cut:
            yield Change(kind="cut", source=source, target=target)
