"""The links of an emulation that runs: configured, and what passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from orchestrator.evidence.view import figures
from orchestrator.evidence.view.figures import known, show
from orchestrator.evidence.view.tables import Column, FittingTable
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
                Column("configured", [figures.rate(link.bytes_per_s) for link in links]),
                Column("RTT", [figures.duration(link.rtt_s) for link in links]),
                Column("now", [show(each, figures.rate) for each in rates]),
                Column("delivered", [show(x, figures.size) for x in column("delivered_bytes")]),
                Column("queued", [show(each, figures.size) for each in column("queued_bytes")]),
                Column("dropped", [show(x, figures.count) for x in column("dropped_packets")]),
                Column("lost", [show(each, figures.count) for each in column("lost_packets")]),
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
