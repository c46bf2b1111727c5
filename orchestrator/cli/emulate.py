"""`isthmus emulate`: the WAN of a topology by itself, entered, changed and cleaned up."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import (
    ADDRESS,
    emulator_option,
    faults_option,
    home_option,
    seed_option,
    set_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.run_folder.home import home_folder, is_folder_name
from isthmus.protos.own_processes import entered
from isthmus.protos.security import require_protected

if TYPE_CHECKING:
    from isthmus.orchestrator.core.run_events import Endpoint
    from isthmus.topology.spec.world import Topology

_BELONGING = {"clean": (), "enter": (), "apply": ()}
"""What may stand beside each option that does something else than to emulate."""


@click.command("emulate")
@click.argument("arguments", nargs=-1, metavar="[TOPOLOGY] [-- COMMAND...]")
@emulator_option("What emulates the WAN. [the topology's, else auto]")
@set_option
@faults_option
@seed_option
@click.option("--name", help="Name of the emulation, for --enter and --apply. [the topology's]")
@click.option(
    "--serve",
    "served",
    metavar="SITE=HOST:PORT",
    multiple=True,
    help="A port that the other sites reach at SITE through the relay. May be repeated.",
)
@click.option(
    "--enter",
    nargs=2,
    metavar="NAME SITE",
    help="Run COMMAND in the network of SITE, in the emulation NAME.",
)
@click.option(
    "--apply",
    metavar="NAME",
    help="Change the emulation NAME, by 'link: [a, b], rate: 10Mbit/s' say.",
)
@click.option("--clean", is_flag=True, help="Remove what dead emulations left behind.")
@home_option
@with_output
def command(
    output: Output,
    arguments: tuple[str, ...],
    emulator: str | None,
    overrides: tuple[str, ...],
    faults_path: Path | None,
    seed: int | None,
    name: str | None,
    served: tuple[str, ...],
    enter: tuple[str, str] | None,
    apply: str | None,
    clean: bool,
    home: Path | None,
) -> int:
    """Emulate the WAN of TOPOLOGY until Ctrl-C, or until COMMAND ends.

    --enter, --apply and --clean do something else instead: see docs/emulation.md.
    """
    modes = {"clean": clean, "enter": enter, "apply": apply is not None}
    beside = {
        "emulator": emulator,
        "set": overrides,
        "faults": faults_path,
        "seed": seed is not None,
        "name": name is not None,
        "serve": served,
    }
    _refuse_mixtures(
        [mode for mode, value in modes.items() if value],
        [option for option, value in beside.items() if value],
    )
    if enter:
        return _enter(output, home_folder(home), *enter, arguments)
    if apply is not None:
        return _apply(output, home_folder(home), apply, arguments)
    if clean:
        return _clean(output, home_folder(home), arguments)
    if not arguments:
        raise click.UsageError("want a TOPOLOGY, or one of --enter, --apply, --clean")
    topology, script = _documents(Path(arguments[0]), overrides, faults_path)
    from isthmus.orchestrator.cli.emulate_run import run_emulation
    from isthmus.orchestrator.emulator.standing import Wanted

    if name is not None and not is_folder_name(name):
        raise click.UsageError("--name: want letters, digits, '.', '_' and '-', at most 64")
    emulator = emulator or topology.emulator
    if served and emulator == "netns":
        raise click.UsageError(
            "--serve: goes with the relay; with netns, sites reach each other at their addresses"
        )
    wanted = Wanted(
        topology=topology,
        emulator=emulator,
        served=_served(served, topology),
        script=script,
        seed=script.seed if seed is None else seed,
        command=arguments[1:],
        is_stdout_taken=output.as_json,
    )
    return run_emulation(output, wanted, home_folder(home), name)


def _refuse_mixtures(modes: Sequence[str], options: Sequence[str]) -> None:
    """Refuse what would be ignored; names are without their dashes."""
    if len(modes) > 1:
        raise click.UsageError(f"--{modes[0]} and --{modes[1]}: one at a time")
    for mode in modes:
        for option in options:
            if option not in _BELONGING[mode]:
                raise click.UsageError(f"--{option}: does not go with --{mode}")


def _documents(path: Path, overrides: Sequence[str], faults_path: Path | None) -> tuple[Any, Any]:
    """Return the topology and the fault script; without one, a script without faults."""
    from isthmus.orchestrator.documents import load_topology_file
    from isthmus.orchestrator.emulator.fault_files import load_faults_file
    from isthmus.topology.faults.script import FaultScript, figures_of

    topology = load_topology_file(path, overrides)
    if faults_path is not None:
        return topology, load_faults_file(faults_path, topology)
    return topology, FaultScript(seed=0, faults=(), links=figures_of(topology))


def _served(texts: Sequence[str], topology: Topology) -> tuple[Endpoint, ...]:
    """Return what --serve names; the second of a site is its gateway 1, and so on."""
    from isthmus.orchestrator.core.run_events import Endpoint

    sites = [site.name for site in topology.sites]
    served: list[Endpoint] = []
    for text in texts:
        site, equals, address = text.partition("=")
        if not equals or site not in sites:
            raise click.UsageError(
                f"--serve {text}: want SITE=HOST:PORT, with one of {', '.join(sites)}"
            )
        host, _, port = str(ADDRESS.convert(address, None, None)).rpartition(":")
        require_protected(host)
        gateway = sum(1 for each in served if each.site == site)
        served.append(Endpoint(site, gateway, host.strip("[]"), int(port)))
    return tuple(served)


def _enter(output: Output, home: Path, name: str, site: str, arguments: Sequence[str]) -> int:
    """Become a command where a site is."""
    from isthmus.orchestrator.emulator.emulations import find

    if not arguments:
        raise click.UsageError("--enter: want a command: --enter NAME SITE -- COMMAND...")
    sites = {each["site"]: each for each in find(home, name)["sites"]}
    if not sites:
        raise CommandError(
            "EMULATION_FAILED",
            f"{name} is a relay: its sites are no place to enter",
            {"name": name},
        )
    if site not in sites:
        raise click.UsageError(f"--enter: {name} has no site {site!r}; it has {', '.join(sites)}")
    place = sites[site]
    sys.stdout.flush()
    sys.stderr.flush()
    command = entered((place["user"], place["net"]), arguments)
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


def _apply(output: Output, home: Path, name: str, arguments: Sequence[str]) -> int:
    """Change an emulation that is up."""
    from isthmus.orchestrator.emulator.emulations import FOLDER, find
    from isthmus.orchestrator.emulator.standing import request_change

    if len(arguments) != 1:
        raise click.UsageError("--apply: want one change, as 'link: [a, b], rate: 10Mbit/s'")
    find(home, name)
    changes = request_change(home / FOLDER / name, arguments[0])
    return output.result(
        {"name": name, "changes": changes}, "\n".join(changes) or "nothing is different"
    )


def _clean(output: Output, home: Path, arguments: Sequence[str]) -> int:
    """Remove what dead emulations left behind, and say what there was."""
    from isthmus.orchestrator.emulator.emulations import clean, folders

    if arguments:
        raise click.UsageError("--clean: no other argument goes with it")
    removed = clean(home)
    up = [folder.name for folder in folders(home)]
    lines = [
        f"removed {each.name}"
        + "".join(f", ended its emulator (pid {pid})" for pid in each.ended_pids)
        for each in removed
    ]
    lines += [f"{name} is up: left alone" for name in up]
    data = {
        "removed": [{"name": each.name, "ended_pids": list(each.ended_pids)} for each in removed],
        "up": up,
    }
    return output.result(data, "\n".join(lines) or "nothing was left behind")
