"""The conditions that an all-reduce benchmark is measured under, and what others got through.

Pure, but for reading what the emulated sites have received of cross traffic.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isthmus.orchestrator.emulator.emulator_config import CROSS_TRAFFIC, shapes_of
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.topology.faults.script import MAX_FAULTS
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import CrossTraffic, Topology

VARYING_S: Final = 5.0
"""Half a period: so long a link has its rate, and so long half of it."""

Span = tuple[float, float]
"""When a repetition began and ended, on this machine's clock."""
Samples = Sequence[tuple[float, float]]
"""Times, ascending, and the bytes that a site has received by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What is done to all emulated links alike; None: as the topology says."""

    cross_traffic: CrossTraffic | None = None
    loss: float | None = None
    """A share of the packets."""
    jitter_s: float | None = None
    queue: str | None = None
    """As a topology's `emulation.queue`."""
    described: float | None = None
    """Sites are told so many times the bandwidth that there is."""
    congestion: str | None = None
    is_varying: bool = False
    """Each link has its rate for VARYING_S, then half of it for as long, and so on."""

    def overrides(self, links: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the overrides that put a topology, with `links` as in its file, under these."""
        found = []
        for index, link in enumerate(links):
            figures = {"loss": self.loss, "jitter": _seconds(self.jitter_s)}
            for key, value in figures.items():
                # What was measured wins over what is described.
                inside = "measured." if key in (link.get("measured") or {}) else ""
                if value is not None:
                    found.append(f"links.{index}.{inside}{key}={value}")
            if self.congestion is not None:
                found.append(f"links.{index}.congestion={self.congestion}")
        emulation = {
            "queue": self.queue,
            "described": self.described,
            "congestion": self.congestion,
        }
        found += [f"emulation.{key}={value}" for key, value in emulation.items() if value]
        if self.cross_traffic is not None:
            named = self.cross_traffic.congestion
            congestion = f", congestion: {named}" if named else ""
            flows = f"{{flows: {self.cross_traffic.flows}{congestion}}}"
            found.append(f"emulation.cross_traffic={flows}")
        return found


NO_CONDITIONS: Final = Conditions()


def _seconds(time_s: float | None) -> str | None:
    return None if time_s is None else f"{time_s * 1e9:.0f}ns"


def varying_script(topology: Topology, lasting_s: float) -> str:
    """Return the fault script, as YAML, of links that vary for so long.

    Raises:
        ConfigError: it would be too long.
    """
    shapes = shapes_of(topology)
    num_periods = max(1, math.ceil(lasting_s / (2 * VARYING_S)))
    if num_periods * len(shapes) > MAX_FAULTS:
        raise ConfigError(
            f"--varying: {len(shapes)} links change {num_periods} times within --timeout, "
            f"{MAX_FAULTS} changes are the most: choose a shorter --timeout"
        )
    lines = ["version: 1", "faults:"]
    for period in range(num_periods):
        at_s = (2 * period + 1) * VARYING_S
        lines += [
            f"  - {{at: {at_s:g}s, link: [{shape.source}, {shape.target}], oneway: true, "
            f"rate: {shape.bytes_per_s * 8 / 2:.0f}bit/s, for: {VARYING_S:g}s}}"
            for shape in shapes
        ]
    return "\n".join(lines) + "\n"


def read_received(folder: Path) -> dict[str, Samples]:
    """Return what each site has received of cross traffic, by the files of an emulator's `folder`.

    Empty where there was none.
    """
    found: dict[str, Samples] = {}
    for path in sorted((folder / CROSS_TRAFFIC).glob("*.jsonl")):
        lines = path.read_text().split("\n")[:-1]  # the last one may have been cut off
        records = map(json.loads, lines)
        found[path.stem] = [(e["at_s"], sum(e["received_bytes"].values())) for e in records]
    return found


def others_bytes_per_s(
    received: Mapping[str, Samples], spans: Iterable[Span], topology: Topology
) -> float | None:
    """Return what a flow of others got through during repetitions, in the mean over all flows.

    None where there were none.

    Raises:
        MeasurementError: they were not under way all the time.
    """
    traffic = topology.emulation.cross_traffic
    if traffic is None:
        return None
    spans = list(spans)
    num_bytes = 0.0
    for site in topology.sites:
        samples = received.get(site.name, ())
        num_links = sum(link.target == site.name for link in topology.links)
        if num_links == 0:
            continue
        for begin_s, end_s in spans:
            begin = _total_at(samples, begin_s)
            end = _total_at(samples, end_s)
            if not begin or end is None:
                raise MeasurementError(
                    f"cross traffic to {site.name} was not under way during the repetitions"
                )
            num_bytes += end - begin
    num_flows = traffic.flows * len(topology.links)
    return num_bytes / num_flows / sum(end_s - begin_s for begin_s, end_s in spans)


def _total_at(samples: Samples, at_s: float) -> float | None:
    """Return the bytes by `at_s`, between samples in proportion; None outside of them."""
    for (before_s, before), (after_s, after) in itertools.pairwise(samples):
        if before_s <= at_s <= after_s:
            return before + (after - before) * (at_s - before_s) / (after_s - before_s)
    return None
