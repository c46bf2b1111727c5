"""Fault scripts: what happens to an emulated WAN, and when.

A `Change` changes one directed link, a `Pause` stops processes of a site, a `Kill` ends them.
Emulators import this in processes of their own, so it needs nothing but the standard library.

loading.py reads a script, `expand` computes the times. All is deterministic: a time given as a
range depends only on the seed and on the fault's place in the script. So a seed means the same
times on every machine, and a fault added at the end changes none before it.

**What overlapping faults mean.** At any time a link has a list of faults that have begun and not
ended, in the order in which they began. Faults of one microsecond stand in the order of the script.
The link is cut if any of them cuts it. Each of its figures is the one that the last of them gives,
else the configured one. A `for` takes its fault off the list, which undoes what it did and leaves
what the others do; `heal` empties the list. `expand` returns the differences: whenever a link
changes, its whole new state. At one instant, ends come before beginnings.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.suggest import shown
from isthmus.topology.spec.units import (
    DURATION,
    format_duration,
    format_fraction,
    format_rate,
    parse_duration,
)
from isthmus.topology.spec.world import Topology
from isthmus.topology.spec.yaml_keys import (
    Bounds,
    Duration,
    Key,
    Loss,
    Rate,
    Read,
    Section,
    Unwritten,
    choice,
)

KINDS = ("shape", "cut", "heal", "reset")
FIGURES = ("bytes_per_s", "delay_s", "jitter_s", "loss")


def check_figures(figures: Mapping[str, float]) -> None:
    """Raise ConfigError, naming the figure, if a link cannot have these figures."""
    for name, value in figures.items():
        most = 1.0 if name == "loss" else math.inf
        is_possible = math.isfinite(value) and 0 <= value <= most
        if not is_possible or (name == "bytes_per_s" and value == 0):
            want = {"bytes_per_s": "more than 0", "loss": "0 to 1"}.get(name, "0 or more")
            raise ConfigError(f"{name}: want {want}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one directed link; raises ConfigError if its fields contradict each other."""

    kind: str
    """`shape`: new figures, None: unchanged. `cut`: all packets are dropped silently. `heal`: no
    longer cut, and all figures as configured. `reset`: every connection is reset."""
    source: str
    target: str
    bytes_per_s: float | None = None
    delay_s: float | None = None
    """Seconds of delay, one way."""
    jitter_s: float | None = None
    loss: float | None = None
    """Share of the packets, 0 to 1."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind: want one of {', '.join(KINDS)}; got {self.kind!r}")
        if self.source == self.target:
            raise ConfigError(f"target: want another site than the source, {self.source!r}")
        figures = self.figures()
        if bool(figures) != (self.kind == "shape"):
            some = "at least one of" if self.kind == "shape" else "none of"
            raise ConfigError(f"{self.kind}: want {some} {', '.join(FIGURES)}")
        check_figures(figures)

    def figures(self) -> dict[str, float]:
        """Return what a `shape` changes, by name; empty for the other kinds."""
        values = ((name, getattr(self, name)) for name in FIGURES)
        return {name: value for name, value in values if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; figures that stay are left out."""
        return {name: value for name, value in to_json(self).items() if value is not None}

    def __str__(self) -> str:
        """Return the change in a few words, as `eu -> us: 10Mbit/s, 40ms one way`."""
        words = {
            "cut": "cut",
            "heal": "healed",
            "reset": "connections reset",
        }
        told = words.get(self.kind) or ", ".join(_figure(*each) for each in self.figures().items())
        return f"{self.source} -> {self.target}: {told}"


PROCESSES = ("site", "agent", "gateway", "torchrun", "rank")
"""The processes of a pause or kill: all of a site's, its agent only, its first gateway, its first
node's torchrun, or its first rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause: processes of a site stop where they are, or go on."""

    site: str
    is_paused: bool
    """Whether they stop; False: they go on."""
    process: str = "site"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        kind = "pause" if self.is_paused else "resume"
        return {"kind": kind, "site": self.site, "process": self.process}

    def __str__(self) -> str:
        """Return the pause in a few words, as `us: paused`."""
        return f"{_victim(self)}: {'paused' if self.is_paused else 'goes on'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill: processes of a site get SIGKILL."""

    site: str
    process: str = "site"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {"kind": "kill", "site": self.site, "process": self.process}

    def __str__(self) -> str:
        """Return the kill in a few words, as `us, gateway: killed`."""
        return f"{_victim(self)}: killed"


def _victim(strike: Pause | Kill) -> str:
    return strike.site if strike.process == "site" else f"{strike.site}, {strike.process}"


def _figure(name: str, value: float) -> str:
    match name:
        case "bytes_per_s":
            return format_rate(value)
        case "delay_s":
            return f"{format_duration(value)} one way"
        case "jitter_s":
            return f"jitter {format_duration(value)}"
    return f"loss {format_fraction(value)}"


Pair = tuple[str, str]
"""The names of a link's source and target."""
Figures = Mapping[str, float]
"""The figures of a link by their names in Change: `bytes_per_s`, `delay_s`, `jitter_s`, `loss`."""

ACTIONS = ("link", "partition", "cut", "flap", "heal", "pause", "kill", "reset")


@dataclass(frozen=True, slots=True)
class Span:
    """A time that is drawn uniformly from a range."""

    low_s: float
    high_s: float


def parse_span(value: object) -> Span:
    """Return a time, or a range of times as `8s..10s`; ValueError for anything else."""
    low, dots, high = value.partition("..") if isinstance(value, str) else (value, "", "")
    if not dots:
        time_s = parse_duration(value)
        return Span(time_s, time_s)
    span = Span(parse_duration(low), parse_duration(high))
    if span.low_s > span.high_s:
        raise ValueError(f"want the earlier time first, got {shown(value)}")
    return span


def parse_lasting(value: object) -> Span:
    """Parse how long a fault takes, likewise; ValueError for less than SHORTEST_S."""
    span = parse_span(value)
    if span.low_s < SHORTEST_S:
        raise ValueError(f"want at least 1ms, got {shown(value)}")
    return span


def _healed(value: object) -> tuple[str, ...]:
    """Return the two names of a link; empty for `all`."""
    if value == "all":
        return ()
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError(f"want all, or two sites as [a, b]; got {shown(value)}")


SHORTEST_S = 0.001
"""Shortest duration of a fault: an emulator can hardly do less, and flaps must end."""
MAX_FAULTS = 1000

_TIME = DURATION.pattern.strip("^$")
_SPAN = {"type": "string", "pattern": rf"^{_TIME}(\.\.{_TIME})?$", "examples": ["5s", "8s..10s"]}
_ENDS = {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}
When = Annotated[Span, Read(parse_span, _SPAN)]
Lasting = Annotated[Span, Read(parse_lasting, _SPAN)]
Healed = Annotated[tuple[str, ...], Read(_healed, {"anyOf": [{"const": "all"}, _ENDS]})]
Group = Annotated[tuple[str, ...], Bounds(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Section):
    """One fault: a time, exactly one action, and what belongs to it."""

    at_s: Annotated[When, Key("at")]
    """Since the script began; a range is drawn from."""
    link: Pair | None = None
    """Other figures: rate, rtt, jitter, loss."""
    partition: Annotated[tuple[Group, ...], Bounds(min_length=2)] | None = None
    """Cut every link between sites of different groups."""
    cut: Pair | None = None
    """Nothing arrives, and nobody is told."""
    flap: Pair | None = None
    """Cut again and again: down, up, for."""
    heal: Healed | None = None
    """End what has been done to a link, or to all."""
    pause: str | None = None
    """Stop processes of a site."""
    kill: str | None = None
    """SIGKILL processes of a site."""
    process: Annotated[str, choice(PROCESSES), Key("what")] = "site"
    """Of a pause or kill: which processes; site: all of them."""
    reset: Pair | None = None
    """Reset the connections of two sites."""
    for_s: Annotated[Lasting | None, Key("for")] = None
    """How long; else until it is healed."""
    is_oneway: Annotated[bool, Key("oneway")] = False
    """From the first site to the second only."""
    bytes_per_s: Annotated[Rate | None, Key("rate")] = None
    rtt_s: Annotated[Duration | None, Key("rtt")] = None
    """There and back: half of it each way."""
    jitter_s: Annotated[Duration | None, Key("jitter")] = None
    loss: Loss | None = None
    up_s: Annotated[Lasting | None, Key("up")] = None
    """Of a flap, between two cuts."""
    down_s: Annotated[Lasting | None, Key("down")] = None
    """Of a flap, of each cut; it begins with one."""
    links: Annotated[tuple[Pair, ...], Unwritten] = ()
    """The directed links that it changes; for `reset` one of the two between the sites."""

    @property
    def action(self) -> str:
        """The one of ACTIONS that it is."""
        return next(each for each in ACTIONS if getattr(self, each) is not None)

    @property
    def site(self) -> str:
        """The site that a `pause` stops or a `kill` ends; else nothing."""
        return self.pause or self.kill or ""

    @property
    def figures(self) -> Figures | None:
        """The new figures of a `link`, by their names in Change; the others stay."""
        values = {
            "bytes_per_s": self.bytes_per_s,
            "delay_s": None if self.rtt_s is None else self.rtt_s / 2,
            "jitter_s": self.jitter_s,
            "loss": self.loss,
        }
        given = {name: value for name, value in values.items() if value is not None}
        return None if self.link is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultScript(Section):
    """A fault script: what happens to the emulated WAN, and when."""

    is_document: ClassVar[bool] = True
    seed: Annotated[int, Bounds(ge=0, lt=1 << 63)] = 0
    """Of every time that is drawn."""
    faults: Annotated[tuple[Fault, ...], Bounds(min_length=1, max_length=MAX_FAULTS)]
    links: Annotated[Mapping[Pair, Figures], Unwritten] = field(default_factory=dict)
    """Every directed link of the topology, with all its figures as configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedChange:
    """A change, a pause or a kill, and its time. Apply those of one time together, in order."""

    at_s: float
    """Seconds since the script began; a whole number of microseconds."""
    change: Change | Pause | Kill
    fault: int
    """Position in the script of the fault that caused it; the last of several."""


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
    """Return all changes of a script, sorted by time; `seed` overrides the script's own."""
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
    """A fault begins or ends on some links, or acts once."""

    at_s: float
    fault: int
    kind: str
    """`begin`, `end`, `heal` or `now`; resuming is an `end`."""
    links: tuple[Pair, ...] = ()
    figures: Figures | None = None
    """The new figures of a link at a `begin`; None cuts it."""
    change: Change | Pause | Kill | None = None


class _Draws:
    """Random times of one fault, determined by seed, fault and the number of earlier draws."""

    def __init__(self, seed: int, fault: int) -> None:
        self._stream = f"{seed}/{fault}"
        self._count = itertools.count()

    def time_s(self, span: Span) -> float:
        """Return a time of the span, in whole microseconds."""
        key = f"{self._stream}/{next(self._count)}".encode()
        share = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) / 2**64
        return _microseconds(span.low_s + share * (span.high_s - span.low_s))


def _microseconds(time_s: float) -> float:
    """Return whole microseconds, so that 0.1 s + 0.2 s and 0.3 s are one instant."""
    return round(time_s, 6)


def _events(index: int, fault: Fault, draws: _Draws) -> Iterator[_Event]:
    at_s = draws.time_s(fault.at_s)
    end_s = math.inf if fault.for_s is None else _microseconds(at_s + draws.time_s(fault.for_s))
    match fault.action:
        case "heal":
            yield _Event(at_s=at_s, fault=index, kind="heal", links=fault.links)
        case "reset":
            [(source, target)] = fault.links
            change = Change(kind="reset", source=source, target=target)
            yield _Event(at_s=at_s, fault=index, kind="now", change=change)
        case "pause":
            stop, go = (
                Pause(site=fault.site, is_paused=each, process=fault.process)
                for each in (True, False)
            )
            yield _Event(at_s=at_s, fault=index, kind="now", change=stop)
            yield _Event(at_s=end_s, fault=index, kind="end", change=go)
        case "kill":
            kill = Kill(site=fault.site, process=fault.process)
            yield _Event(at_s=at_s, fault=index, kind="now", change=kill)
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
    """The active faults of each link, and its resulting state."""

    def __init__(self, configured: Mapping[Pair, Figures]) -> None:
        self._configured = configured
        self._active: dict[Pair, dict[int, Figures | None]] = {pair: {} for pair in configured}
        """Active faults of each link: fault to figures, in the order of beginning; None: cut."""
        self._begun: set[int] = set()
        self._healed: dict[Pair, set[int]] = {pair: set() for pair in configured}
        """Faults that had begun when the link was healed: a flap does not cut it again."""

    def apply(self, at_s: float, events: Iterable[_Event]) -> list[TimedChange]:
        """Apply all events of one time; return the resulting changes."""
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
        """Yield the changes from an earlier state of a link to the present one."""
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
