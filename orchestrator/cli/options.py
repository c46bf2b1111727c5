"""Options that several commands share, and the types of their values."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.run_folder.home import RunChoice, is_folder_name
from isthmus.topology.spec.units import parse_duration
from isthmus.topology.spec.world import EMULATORS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Parsed(click.ParamType[Any]):
    """A value that a function makes of its text; what the function raises is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Return what `parse` makes of it."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _bind(text: str) -> str:
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|\w[\w.:-]*|::[\w.:]*):([0-9]{1,5})", text)
    if found is None or int(found[1]) > 65535:
        raise ValueError(f"want HOST:PORT, as 127.0.0.1:7443; got {text!r}")
    return text


def _address(text: str) -> str:
    if int(_bind(text).rpartition(":")[2]) == 0:
        raise ValueError(f"nobody listens on port 0; got {text!r}")
    return text


def _run_name(text: str) -> str:
    if not is_folder_name(text):
        raise ValueError("want letters, digits, '.', '_' and '-', at most 64")
    return text


ADDRESS = Parsed("host:port", _address)
"""HOST:PORT to dial."""
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
PATH = click.Path(path_type=Path)
BIND = Parsed("host:port", _bind)
"""HOST:PORT to listen on; port 0 is any."""
DURATION = Parsed("duration", parse_duration)
"""A duration with its unit, as `90s` or `2h`; given to the command in seconds."""
RUN_NAME = Parsed("name", _run_name)
"""What may name a run or a benchmark, and so its folder."""


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --json; Output.of has read it already, so that usage errors obey it too."""
    return click.option(
        "--json", is_flag=True, expose_value=False, help="Print one JSON envelope on stdout."
    )(function)


def with_output(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --json, and call the command with its Output first."""
    return json_option(click.pass_obj(function))


def timeout_option(default: str | None, help_text: str) -> Decorator:
    """Declare --timeout, given to the command as `timeout_s`."""
    return click.option("--timeout", "timeout_s", type=DURATION, default=default, help=help_text)


def out_option(help_text: str) -> Decorator:
    """Declare --out, a file."""
    return click.option("--out", type=FILE, help=help_text)


def coordinator_option(
    help_text: str = "Ask this coordinator. "
    "[$ISTHMUS_COORDINATOR, else the one that the run was launched with]",
) -> Decorator:
    """Declare --coordinator, an address to dial."""
    return click.option("--coordinator", type=ADDRESS, envvar="ISTHMUS_COORDINATOR", help=help_text)


def emulator_option(help_text: str, *more: str) -> Decorator:
    """Declare --emulator, one of EMULATORS or of `more`."""
    return click.option("--emulator", type=click.Choice((*EMULATORS, *more)), help=help_text)


def all_of(*declared: Decorator) -> Decorator:
    """Declare several options, in the order in which --help shows them."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(declared):
            function = each(function)
        return function

    return declare


def emulation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare --emulate and --emulator, which the command sees among its `overrides`."""

    @functools.wraps(function)
    def overridden(
        *arguments: object,
        overrides: tuple[str, ...],
        emulate: bool | None,
        emulator: str | None,
        **given: object,
    ) -> object:
        if emulate is not None:
            overrides = (*overrides, f"emulate={json.dumps(emulate)}")
        if emulator is not None:
            overrides = (*overrides, f"emulator={emulator}")
        return function(*arguments, overrides=overrides, **given)

    return all_of(
        click.option(
            "--emulate/--no-emulate",
            default=None,
            help="With or without the emulated WAN, whatever the topology says.",
        ),
        emulator_option("What emulates the WAN, whatever the topology says."),
    )(overridden)


job_argument: Decorator = click.argument("job", type=PATH)
topology_argument: Decorator = click.argument("topology_path", metavar="TOPOLOGY", type=PATH)
home_option: Decorator = click.option(
    "--home",
    type=FOLDER,
    envvar="ISTHMUS_HOME",
    help="Where runs are kept. [$ISTHMUS_HOME, else the user's state folder]",
)
set_option: Decorator = click.option(
    "--set",
    "overrides",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a value of the file before it is checked, as links.0.rtt=120ms. May be repeated.",
)
sweep_option: Decorator = click.option(
    "--sweep",
    "sweeps",
    metavar="PATH=V1,V2",
    multiple=True,
    help="Try each of these values, as links.*.rtt=5ms,20ms. May be repeated: every combination.",
)
name_option: Decorator = click.option(
    "--name", type=RUN_NAME, help="Name of what is kept, and of its folder. [made up]"
)
topology_option: Decorator = click.option(
    "--topology",
    "topology_path",
    type=PATH,
    help="Use this topology, not the one that the job names.",
)
faults_option: Decorator = click.option(
    "--faults", "faults_path", type=FILE, help="Play this fault script on the emulated WAN."
)
seed_option: Decorator = click.option(
    "--seed",
    type=int,
    help="Seed of the fault script's times, of losses and of jitter. [the script's]",
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Declare what every command about one run takes, RUN, --coordinator, --home, --json.

    It is called with its Output, and with `choice`.
    """

    @functools.wraps(function)
    def chosen(*arguments: object, **given: object) -> object:
        own: dict[str, Any] = {each.name: given.pop(each.name) for each in fields(RunChoice)}
        return function(*arguments, choice=RunChoice(**own), **given)

    run_argument = click.argument("run_id", metavar="[RUN]", required=False, default="")
    return all_of(run_argument, coordinator_option(), home_option, with_output)(chosen)


def whole_rounds(option: str, value: int | None, usual: int, round_steps: int) -> int:
    """Return a number of steps as it is given, else the usual one, raised to whole rounds.

    Raises:
        UsageError: the given one ends within a round, of which part would count as the whole.
    """
    if value is None:
        return round_steps * math.ceil(usual / round_steps)
    if value % round_steps:
        raise click.UsageError(
            f"{option}: want whole rounds, a multiple of their {round_steps} steps; got {value}"
        )
    return value
