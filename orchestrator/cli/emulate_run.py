"""Runs an emulation for `isthmus emulate TOPOLOGY`, and shows it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from orchestrator.cli.output import Output
from orchestrator.emulator.emulations import claimed
from orchestrator.emulator.standing import Listeners, Standing, Wanted
from orchestrator.evidence.view import formats
from orchestrator.evidence.view.fitting_table import Column, FittingTable
from orchestrator.evidence.view.formats import known, show
from orchestrator.interruption import INTERRUPTION
from topology.faults.script import TimedChange
from topology.world import Topology

Counters = Sequence[Mapping[str, Any]]


class EmulationTable:
    """Renders an emulation at one time; give rich's Live a new one for the next.

    Args:
        name: of the emulation.
        topology: whose links are emulated.
        before: counters of `interval_s` ago.
        now: the latest counters.
        interval_s: between the two.
    """

    def __init__(
        self, name: str, topology: Topology, before: Counters, now: Counters, interval_s: float
    ) -> None:
        self._name = name
        self._topology = topology
        self._before = _by_link(before)
        self._now = _by_link(now)
        self._interval_s = interval_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"emulation {self._name}")
        arrow = "->" if options.ascii_only else "→"
        links = self._topology.links
        latest = [self._now.get((link.source, link.target), {}) for link in links]
        rates = [self._rate(link.source, link.target) for link in links]

        def column(key: str) -> list[float | None]:
            return [known(values, key) for values in latest]

        yield FittingTable(
            [
                Column(
                    "link", [f"{link.source} {arrow} {link.target}" for link in links], is_text=True
                ),
                Column("configured", [formats.rate(link.bytes_per_s) for link in links]),
                Column("RTT", [formats.duration(link.rtt_s) for link in links]),
                Column("now", [show(each, formats.rate) for each in rates]),
                Column("delivered", [show(x, formats.size) for x in column("delivered_bytes")]),
                Column("queued", [show(each, formats.size) for each in column("queued_bytes")]),
                Column("dropped", [show(x, formats.count) for x in column("dropped_packets")]),
                Column("lost", [show(each, formats.count) for each in column("lost_packets")]),
            ]
        )

    def _rate(self, source: str, target: str) -> float | None:
        """Return bytes delivered a second, lately."""
        before, now = (
            known(counters.get((source, target), {}), "delivered_bytes")
            for counters in (self._before, self._now)
        )
        if before is None or now is None or self._interval_s <= 0:
            return None
        return max(0.0, now - before) / self._interval_s


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
        """Say where the sites are, and on a terminal start the table."""
        self._name = state["name"]
        self._output.event("up", state, "\n".join(_places(state)))
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal and not self._wanted.command:
            live = Live(console=console, auto_refresh=False, transient=True)
            self._live = self._stack.enter_context(live)

    def fault(self, timed: TimedChange) -> None:
        """Tell of a change that was made."""
        fields = {"at_s": timed.at_s, "change": timed.change.to_json()}
        self._output.event("fault", fields, f"{timed.at_s:.3f} s  {timed.change}")

    def counters(self, counters: Sequence[Mapping[str, Any]]) -> None:
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
        node = f" node {each['node']}" if each["node"] else ""
        address = f"{each['host']}:{each['port']}"
        lines.append(f"{each['source']} reaches {each['target']}{node} at {address}")
    return lines


def _how_to_enter(name: str, site: dict[str, Any]) -> list[str]:
    """Return the two command lines that lead into a site."""
    user = f"--user={site['user']} --preserve-credentials " if site["user"] else ""
    return [
        f"isthmus emulate --enter {shlex.quote(name)} {shlex.quote(site['site'])} -- COMMAND",
        f"nsenter {user}--net={site['net']} COMMAND",
    ]
