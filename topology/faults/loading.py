"""Reads a fault script: YAML to FaultScript, with every mistake at its line and column. Pure.

`Fault` defines what a user may write. Further checks cover combinations of keys, and that sites and
links exist. They use plain values, not the classes, so that they also run when another part of the
file is wrong, and all mistakes are reported at once. They skip values of a wrong type, which
topology/text/validation.py reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isthmus.topology.faults.script import (
    ACTIONS,
    Fault,
    FaultScript,
    Pair,
    Span,
    figures_of,
    parse_span,
)
from isthmus.topology.spec.suggest import did_you_mean, one_of
from isthmus.topology.spec.units import format_duration
from isthmus.topology.spec.world import Topology
from isthmus.topology.spec.yaml_models import model_of
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import Document, Path, read_with_overrides

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
_KEYS = frozenset(model_of(Fault).model_fields)

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


def crossing(topology: Topology, groups: Sequence[Sequence[str]]) -> tuple[Pair, ...]:
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
    script = _read(document, topology)
    faults = tuple(replace(each, links=_links(each, topology)) for each in script.faults)
    return replace(script, faults=faults, links=figures_of(topology))


def _read(document: Document, topology: Topology | None) -> FaultScript:
    script = validate(document, FaultScript)
    check_fault_references(document, topology)
    document.raise_problems()
    assert script is not None, "a script that is not valid has problems"
    return script


def _links(fault: Fault, topology: Topology) -> tuple[Pair, ...]:
    """Return the links that a fault changes."""
    if fault.partition is not None:
        return crossing(topology, fault.partition)
    ends = fault.link or fault.cut or fault.flap or fault.reset or fault.heal
    if fault.site or ends is None:
        return ()
    if not ends:  # heal: all
        return tuple(link.ends for link in topology.links)
    source, target = ends
    if fault.reset is not None:  # connections have both directions
        return ((source, target),)
    return directions(topology, (source, target), oneway=fault.is_oneway)
