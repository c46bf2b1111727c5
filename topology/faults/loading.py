"""Reads a fault script: YAML to FaultScript, with every mistake at its line and column. Pure.

The pydantic models define what a user may write. Further checks cover combinations of keys, and
that sites and links exist. They use plain values, not the models, so that they also run when
another part of the file is wrong, and all mistakes are reported at once. They skip values of a
wrong type, which topology/text/validation.py reports.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema

from isthmus.topology.faults.script import (
    ACTIONS,
    Fault,
    FaultScript,
    Pair,
    Process,
    Span,
    figures_of,
)
from isthmus.topology.spec.suggest import did_you_mean, one_of, shown
from isthmus.topology.spec.units import DURATION, format_duration, parse_duration
from isthmus.topology.spec.world import Topology
from isthmus.topology.spec.yaml_keys import Duration, Loss, Rate, Version
from isthmus.topology.spec.yaml_models import Strict
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import Document, Path, read_with_overrides

MAX_FAULTS = 1000


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


def _lasting(value: object) -> Span:
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

_TIME = DURATION.pattern.strip("^$")
_SPAN_SCHEMA = WithJsonSchema(
    {"type": "string", "pattern": rf"^{_TIME}(\.\.{_TIME})?$", "examples": ["5s", "8s..10s"]}
)
_HEAL_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"const": "all"},
            {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
        ]
    }
)
When = Annotated[Span, PlainValidator(parse_span), _SPAN_SCHEMA]
Lasting = Annotated[Span, PlainValidator(_lasting), _SPAN_SCHEMA]
Healed = Annotated[tuple[str, ...], PlainValidator(_healed), _HEAL_SCHEMA]
Ends = Annotated[list[str], Field(min_length=2, max_length=2)]
Groups = Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=2)]


class FaultModel(Strict):
    """One fault: a time, exactly one action, and what belongs to it."""

    at: Annotated[When, Field(description="Since the script began; a range is drawn from.")]
    link: Annotated[Ends | None, Field(description="Other figures: rate, rtt, jitter, loss.")] = (
        None
    )
    partition: Annotated[
        Groups | None, Field(description="Cut every link between sites of different groups.")
    ] = None
    cut: Annotated[Ends | None, Field(description="Nothing arrives, and nobody is told.")] = None
    flap: Annotated[Ends | None, Field(description="Cut again and again: down, up, for.")] = None
    heal: Annotated[
        Healed | None, Field(description="End what has been done to a link, or to all.")
    ] = None
    pause: Annotated[str | None, Field(description="Stop processes of a site.")] = None
    kill: Annotated[str | None, Field(description="SIGKILL processes of a site.")] = None
    what: Annotated[
        Process | None,
        Field(description="Of a pause or kill: which processes; else all of the site."),
    ] = None
    reset: Annotated[Ends | None, Field(description="Reset the connections of two sites.")] = None
    for_: Annotated[
        Lasting | None, Field(alias="for", description="How long; else until it is healed.")
    ] = None
    oneway: Annotated[bool | None, Field(description="From the first site to the second only.")] = (
        None
    )
    rate: Rate | None = None
    rtt: Annotated[Duration | None, Field(description="There and back: half of it each way.")] = (
        None
    )
    jitter: Duration | None = None
    loss: Loss | None = None
    up: Annotated[Lasting | None, Field(description="Of a flap, between two cuts.")] = None
    down: Annotated[Lasting | None, Field(description="Of a flap, of each cut.")] = None


class FaultsModel(Strict):
    """A fault script: what happens to the emulated WAN, and when."""

    version: Version
    seed: Annotated[int, Field(ge=0, lt=1 << 63, description="Of every time that is drawn.")] = 0
    faults: Annotated[list[FaultModel], Field(min_length=1, max_length=MAX_FAULTS)]


_FIGURES = ("rate", "rtt", "jitter", "loss")
_BELONGING = {
    "link": (*_FIGURES, "oneway", "for"),
    "partition": ("for",),
    "cut": ("oneway", "for"),
    "flap": ("up", "down", "oneway", "for"),
    "heal": ("oneway",),
    "pause": ("for", "what"),
    "kill": ("what",),
    "reset": (),
}
"""Keys that are allowed beside each action and `at`."""
_REQUIRED = {"flap": ("up", "down", "for"), "pause": ("for",)}
_BETWEEN_TWO = ("link", "cut", "flap", "heal", "reset")
_KEYS = frozenset(field.alias or name for name, field in FaultModel.model_fields.items())

MAX_FLAPS = 10_000
"""Limit on the cuts of one flap."""


def check_fault_references(document: Document, topology: Topology | None) -> None:
    """Add a problem for each invalid fault.

    Without a topology, names are not checked.
    """
    for index, fault in enumerate(document.sequence("faults")):
        if not isinstance(fault, dict):
            continue
        action = _check_keys(document, index)
        if action in _BETWEEN_TWO:
            _check_between(document, topology, index, action)
        elif action == "partition":
            _check_partition(document, topology, index)
        elif action in ("pause", "kill"):
            _check_site(document, topology, ("faults", index, action))
        if action == "flap":
            _check_flap(document, index)
    _check_pauses(document)


def directions(topology: Topology, ends: Pair, *, oneway: bool) -> tuple[Pair, ...]:
    """Return the links of the topology between two sites, or only the one from the first."""
    pairs = (ends,) if oneway else (ends, (ends[1], ends[0]))
    return tuple(pair for pair in pairs if topology.link(*pair) is not None)


def crossing(topology: Topology, groups: list[list[str]]) -> tuple[Pair, ...]:
    """Return the links between sites of different groups; a site in none keeps all of its own."""
    group = {name: index for index, names in enumerate(groups) for name in names}
    return tuple(
        (link.source, link.target)
        for link in topology.links
        if link.source in group
        and link.target in group
        and group[link.source] != group[link.target]
    )


def _check_keys(document: Document, index: int) -> str | None:
    """Return the fault's one action, after reporting keys that do not belong to it."""
    fault = document.mapping("faults", index)
    actions = [key for key in fault if key in ACTIONS]
    # An unknown key has been reported, and may be the misspelt action.
    is_spelt_right = fault.keys() <= _KEYS
    if not actions:
        if is_spelt_right:
            document.add(("faults", index), f"does nothing: want one of {one_of(ACTIONS)}")
        return None
    action = actions[0]
    for other in actions[1:]:
        document.add(
            ("faults", index, other),
            f"a second action beside {action!r}: give it a fault of its own",
            at_key=True,
        )
    belonging = {action, *_BELONGING[action], "at"}
    for key in fault:
        if key in _KEYS and key not in belonging and key not in ACTIONS:
            document.add(("faults", index, key), f"has no use with {action!r}", at_key=True)
    for key in _REQUIRED.get(action, ()):
        if key not in fault:
            document.add(("faults", index), f"missing key {key!r}, which {action!r} needs")
    if action == "link" and is_spelt_right and not set(_FIGURES) & fault.keys():
        document.add(("faults", index), f"changes nothing: want one or more of {one_of(_FIGURES)}")
    if action == "heal" and fault["heal"] == "all" and "oneway" in fault:
        document.add(("faults", index, "oneway"), "has no use with 'heal: all'", at_key=True)
    return action


def _check_between(document: Document, topology: Topology | None, index: int, action: str) -> None:
    path = ("faults", index, action)
    if len(document.sequence(*path)) != 2:
        return
    first, second = (document.text(*path, end) for end in (0, 1))
    known = [_check_site(document, topology, (*path, end)) for end in (0, 1)]
    if first is None or second is None:
        return
    if first == second:
        document.add((*path, 1), f"a link from {first!r} to itself")
        return
    if topology is None or not all(known):
        return
    oneway = document.get("faults", index, "oneway") is True
    if not directions(topology, (first, second), oneway=oneway):
        back = oneway and topology.link(second, first) is not None
        hint = f"; there is one from {second!r} to {first!r}" if back else ""
        way = f"from {first!r} to {second!r}" if oneway else f"between {first!r} and {second!r}"
        document.add(path, f"there is no link {way} in {topology.name!r}{hint}")


def _check_site(document: Document, topology: Topology | None, path: Path) -> bool:
    """Report a site that does not exist; return whether it exists."""
    name = document.text(*path)
    if topology is None or name is None:
        return False
    names = [site.name for site in topology.sites]
    if name not in names:
        hint = did_you_mean(name, names) or f": {topology.name!r} has {', '.join(names)}"
        document.add(path, f"unknown site {name!r}{hint}")
    return name in names


def _check_partition(document: Document, topology: Topology | None, index: int) -> None:
    path = ("faults", index, "partition")
    first: dict[str, int] = {}
    sound = len(document.sequence(*path)) > 1
    groups: list[list[str]] = []
    for group in range(len(document.sequence(*path))):
        groups.append([])
        sound = sound and bool(document.sequence(*path, group))
        for member in range(len(document.sequence(*path, group))):
            place = (*path, group, member)
            name = document.text(*place)
            sound = _check_site(document, topology, place) and sound
            if name is None:
                continue
            if name in first:
                sound = False
                where = "this group" if first[name] == group else "another group"
                document.add(place, f"{name!r} is already in {where}")
            first.setdefault(name, group)
            groups[-1].append(name)
    if topology is not None and sound and not crossing(topology, groups):
        document.add(path, f"no link of {topology.name!r} joins these groups")


def _check_flap(document: Document, index: int) -> None:
    up, down, lasts = (_span(document, ("faults", index, key)) for key in ("up", "down", "for"))
    if up and down and lasts and lasts.high_s > MAX_FLAPS * (up.low_s + down.low_s) > 0:
        document.add(
            ("faults", index, "for"),
            f"could be more than {MAX_FLAPS} cuts: want a shorter time, or longer ups and downs",
        )


def _check_pauses(document: Document) -> None:
    """Check that pauses of a site do not overlap: it would go on when the first one ends."""
    seen: dict[str, list[tuple[int, Span]]] = {}
    for index in range(len(document.sequence("faults"))):
        site = document.text("faults", index, "pause")
        begin, lasts = (_span(document, ("faults", index, key)) for key in ("at", "for"))
        if site is None or begin is None or lasts is None:
            continue
        span = Span(begin.low_s, round(begin.high_s + lasts.high_s, 6))
        for other, taken in seen.setdefault(site, []):
            if span.low_s < taken.high_s and taken.low_s < span.high_s:
                line = document.place(("faults", other, "pause")).line
                document.add(
                    ("faults", index, "pause"),
                    f"{site!r} may still be paused by the fault at line {line}, which lasts "
                    f"from {format_duration(taken.low_s)} to {format_duration(taken.high_s)}",
                )
                break
        seen[site].append((index, span))


def _span(document: Document, path: Path) -> Span | None:
    try:
        return parse_span(document.text(*path))
    except ValueError:
        return None


def check_faults(document: Document, topology: Topology | None = None) -> int:
    """Check a script and return its number of faults; without a topology, names are unchecked.

    Raises:
        ConfigError: with every problem.
    """
    return len(_read(document, topology).faults)


def load_faults(text: str, source: str, topology: Topology) -> FaultScript:
    """Return the fault script that a YAML text describes: `faults_of`."""
    return faults_of(read_with_overrides(text, source, ()), topology)


def faults_of(document: Document, topology: Topology) -> FaultScript:
    """Return the fault script that a document describes for the sites and links of a topology.

    Raises:
        ConfigError: with every problem, each at its line and column.
    """
    model = _read(document, topology)
    return FaultScript(
        seed=model.seed,
        faults=tuple(_fault(written, topology) for written in model.faults),
        links=figures_of(topology),
    )


def _read(document: Document, topology: Topology | None) -> FaultsModel:
    model = validate(document, FaultsModel)
    check_fault_references(document, topology)
    document.raise_problems()
    assert model is not None, "a model that is not valid has problems"
    return model


def _fault(written: FaultModel, topology: Topology) -> Fault:
    action = next(each for each in ACTIONS if getattr(written, each) is not None)
    return Fault(
        action=action,
        at_s=written.at,
        for_s=written.for_,
        links=_links(written, action, topology),
        figures=_figures(written) if action == "link" else None,
        up_s=written.up,
        down_s=written.down,
        site=written.pause or written.kill or "",
        process=written.what or "site",
    )


def _links(written: FaultModel, action: str, topology: Topology) -> tuple[Pair, ...]:
    if action in ("pause", "kill"):
        return ()
    if written.partition is not None:
        return crossing(topology, written.partition)
    ends = getattr(written, action)
    if not ends:  # heal: all
        return tuple((link.source, link.target) for link in topology.links)
    if action == "reset":  # connections have both directions
        return ((ends[0], ends[1]),)
    return directions(topology, (ends[0], ends[1]), oneway=bool(written.oneway))


def _figures(written: FaultModel) -> dict[str, float]:
    """Return the figures that a fault gives, by their names in Change."""
    values = {
        "bytes_per_s": written.rate,
        "delay_s": None if written.rtt is None else written.rtt / 2,
        "jitter_s": written.jitter,
        "loss": written.loss,
    }
    return {name: value for name, value in values.items() if value is not None}
