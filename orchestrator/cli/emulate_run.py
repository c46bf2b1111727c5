"""Runs an emulation for `isthmus emulate TOPOLOGY`, and shows it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from isthmus.orchestrator.cli.display import live_on_stderr
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.emulator.backend import Counters
from isthmus.orchestrator.emulator.emulations import claimed
from isthmus.orchestrator.emulator.standing import Listeners, Standing, Wanted
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.runs.facts import known
from isthmus.topology.faults.script import TimedChange
from isthmus.topology.spec.world import Topology


@dataclass(frozen=True, slots=True)
class EmulationTable:
    """Renders an emulation at one time; give rich's Live a new one for the next."""

    name: str
    topology: Topology
    before: Counters
    """The counters `interval_s` before `now`."""
    now: Counters
    interval_s: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"emulation {self.name}")
        links = self.topology.links
        before, now = (
            [counters.get((link.source, link.target), {}) for link in links]
            for counters in (_by_link(self.before), _by_link(self.now))
        )
        rates = [self._rate(*each) for each in zip(before, now, strict=True)]

        def column(title: str, key: str, shown: Callable[[float], str]) -> Column:
            return Column(title, [show(known(values, key), shown) for values in now])

        yield FittingTable(
            [
                Column(
                    "link",
                    [formats.way(link.source, link.target) for link in links],
                    is_text=True,
                ),
                Column("configured", [formats.rate(link.bytes_per_s) for link in links]),
                Column("RTT", [formats.duration(link.rtt_s) for link in links]),
                Column("now", [show(each, formats.rate) for each in rates]),
                column("delivered", "delivered_bytes", formats.size),
                column("queued", "queued_bytes", formats.size),
                column("dropped", "dropped_packets", formats.count),
                column("lost", "lost_packets", formats.count),
            ]
        )

    def _rate(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
        """Return bytes delivered a second, lately, by a link's counters."""
        then_bytes, now_bytes = (known(each, "delivered_bytes") for each in (before, now))
        if then_bytes is None or now_bytes is None or self.interval_s <= 0:
            return None
        return max(0.0, now_bytes - then_bytes) / self.interval_s


def _by_link(counters: Counters) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(str(each["source"]), str(each["target"])): each for each in counters}


def run_emulation(output: Output, wanted: Wanted, home: Path, name: str | None) -> int:
    """Emulate until a signal or the end of the command; return the exit status.

    With --json: JSON Lines `up`, `fault` and `counters`, then the envelope.

    Raises:
        EmulatorError: it cannot be emulated here as wanted.
        ConfigError: the faults cannot be played here.
        StateConflictError: the name is taken.
    """
    # It is followed: who reads it needs to know where the sites are while it runs.
    output.streaming = True
    with INTERRUPTION.holding(), claimed(home, name, wanted.topology.name) as folder:
        shown = Shown(output, wanted)
        listeners = Listeners(on_up=shown.up, on_fault=shown.fault, on_counters=shown.counters)
        try:
            status = asyncio.run(Standing(wanted, folder, listeners).run())
        finally:
            shown.close()
    return output.result({"name": folder.name, "counters": shown.latest}, exit_code=status)


class Shown:
    """What people or programs see of an emulation while it runs."""

    def __init__(self, output: Output, wanted: Wanted) -> None:
        self.latest: list[Mapping[str, Any]] = []
        self._output = output
        self._wanted = wanted
        self._stack = contextlib.ExitStack()
        self._live: Live | None = None
        self._name = ""
        self._told_s = 0.0

    def up(self, state: Mapping[str, Any]) -> None:
        """Print where the sites are, and on a terminal start the table."""
        self._name = state["name"]
        self._output.event("up", state, "\n".join(_places(state)))
        live = None if self._wanted.command else live_on_stderr()
        if live is not None:
            self._live = self._stack.enter_context(live)

    def fault(self, timed: TimedChange) -> None:
        """Tell of a change that was made."""
        fields = {"at_s": timed.at_s, "change": timed.change.to_json()}
        self._output.event("fault", fields, f"{timed.at_s:.3f} s  {timed.change}")

    def counters(self, counters: Counters) -> None:
        """Show the latest counters."""
        before, self.latest = self.latest, list(counters)
        now_s = time.monotonic()
        interval_s, self._told_s = now_s - self._told_s, now_s
        if self._live is not None:
            table = EmulationTable(self._name, self._wanted.topology, before, counters, interval_s)
            self._live.update(table, refresh=True)
        elif self._output.as_json:
            self._output.event("counters", {"links": self.latest}, "")

    def close(self) -> None:
        """Give the terminal back."""
        self._stack.close()


def _places(state: Mapping[str, Any]) -> list[str]:
    """Return what people need to use an emulation."""
    kind = state["emulator"]["kind"]
    lines = [f"emulation {state['name']} is up ({kind}); Ctrl-C ends it"]
    for site in state["sites"]:
        ours, raw = _how_to_enter(state["name"], site)
        lines += [f"{site['site']}  {site['address']}", f"  {ours}", f"  {raw}"]
    if not state["sites"] and not state["endpoints"]:
        lines.append("no site reaches another through it: --serve says what there is to reach")
    for each in state["endpoints"]:
        gateway = f" gateway {each['gateway']}" if each["gateway"] else ""
        address = f"{each['host']}:{each['port']}"
        lines.append(f"{each['source']} reaches {each['target']}{gateway} at {address}")
    return lines


def _how_to_enter(name: str, site: dict[str, Any]) -> list[str]:
    """Return the two command lines that lead into a site."""
    user = f"--user={site['user']} --preserve-credentials " if site["user"] else ""
    return [
        f"isthmus emulate --enter {shlex.quote(name)} {shlex.quote(site['site'])} -- COMMAND",
        f"nsenter {user}--net={site['net']} COMMAND",
    ]
