"""The options of `isthmus bench allreduce` for the conditions of the network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import DURATION, Parsed, all_of
from isthmus.orchestrator.documents import load_topology_file
from isthmus.orchestrator.emulator.site_namespaces import netns_problem
from isthmus.orchestrator.evidence.bench.allreduce_conditions import Conditions
from isthmus.topology.documents.load import split_overrides
from isthmus.topology.spec.units import parse_fraction
from isthmus.topology.spec.world import CONGESTION, MAX_FLOWS, CrossTraffic, parse_queue

MAX_DESCRIBED = 1000.0


def _cross_traffic(text: str) -> CrossTraffic:
    flows, colon, congestion = text.partition(":")
    if not flows.isdecimal() or not 1 <= int(flows) <= MAX_FLOWS:
        raise ValueError(f"want 1 to {MAX_FLOWS} flows, as 2 or 2:cubic; got {text!r}")
    if colon and congestion not in CONGESTION:
        raise ValueError(f"want {', '.join(CONGESTION)} after the colon, got {congestion!r}")
    return CrossTraffic(flows=int(flows), congestion=congestion or None)


def _loss(text: str) -> float:
    loss = parse_fraction(text)
    if loss == 1:
        raise ValueError("a link that loses every packet carries nothing: want less than 100%")
    return loss


def _queue(text: str) -> str:
    parse_queue(text)
    return text


def _described(text: str) -> float:
    factor = float(text)
    if not 0 < factor <= MAX_DESCRIBED:
        raise ValueError(f"want more than 0, at most {MAX_DESCRIBED:g}; got {text}")
    return factor


_options = all_of(
    click.option(
        "--cross-traffic",
        type=Parsed("flows[:congestion]", _cross_traffic),
        help="Bulk TCP flows of somebody else on each direction of each link, as 2:cubic.",
    ),
    click.option(
        "--loss",
        type=Parsed("share", _loss),
        help="The share of packets that each link loses, as 0.1%.",
    ),
    click.option("--jitter", "jitter_s", type=DURATION, help="The jitter of each link."),
    click.option(
        "--queue",
        type=Parsed("queue", _queue),
        help="The queue of each direction of each link, as 0.5BDP or 256KiB. [1BDP]",
    ),
    click.option(
        "--described",
        type=Parsed("factor", _described),
        help="Tell sites this many times the bandwidth that links have.",
    ),
    click.option(
        "--congestion",
        type=click.Choice(CONGESTION),
        help="TCP's congestion control between sites. [this host's]",
    ),
    click.option(
        "--varying", "is_varying", is_flag=True, help="Links' rates halve and double every 5 s."
    ),
)
"""Named as the fields of Conditions are."""


def condition_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the conditions; what it decorates is called with `conditions`."""

    @functools.wraps(function)
    def chosen(*arguments: object, **given: object) -> object:
        own: dict[str, Any] = {name: given.pop(name) for name in Conditions.__dataclass_fields__}
        return function(*arguments, conditions=Conditions(**own), **given)

    return _options(chosen)


def emulator_for(
    conditions: Conditions, topology: Path, overrides: Sequence[str], emulator: str | None
) -> str | None:
    """Return the emulator for some conditions: packets, where there are any; else what was asked.

    Raises:
        CommandError: packets are not emulated, or cannot be here.
        ConfigError: the topology has mistakes.
    """
    named = [
        f"--{name.removeprefix('is_').removesuffix('_s').replace('_', '-')}"
        for name in Conditions.__dataclass_fields__
        if getattr(conditions, name) not in (None, False)
    ]
    if not named:
        return emulator
    if emulator is None:
        loaded = load_topology_file(topology, split_overrides(overrides)[0])
        emulator = loaded.emulator if loaded.emulate else "none"
    if emulator in ("relay", "none"):
        why: str | None = "no WAN is emulated" if emulator == "none" else "the relay has no packets"
        cure = "add --emulator netns"
    else:
        why, cure = netns_problem(), "measure without it"
    if why is not None:
        raise CommandError(
            "EMULATION_FAILED",
            f"{', '.join(named)}: only where packets are emulated; {cure}: {why}",
        )
    return "netns"
