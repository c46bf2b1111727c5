"""Recorded figures of links, played back on an emulated WAN. Pure.

A trace is CSV or JSON lines: at `time_s`, the link from `source` to `target` has these figures, of
`bytes_per_s`, `rtt_s`, `jitter_s` and `loss`. What is absent or empty stays as it was, at first as
the topology says; the last figures stay until the run's end.

    time_s,source,target,bytes_per_s,rtt_s,loss
    0,oregon,virginia,1.25e8,0.062,0
    12.5,oregon,virginia,4.1e7,0.080,0.001

A run's own metrics.jsonl is such a recording, too. A link's bandwidth is known for the time in
which the link, and not its sender, was the limit; its round trip from when it was idle. Times count
from the first of its lines that is about a link.

A trace becomes a fault script, of `link` faults in one direction each (loading.py).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.topology.faults.script import MAX_FAULTS, Pair
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.suggest import did_you_mean, one_of
from isthmus.topology.spec.world import Topology

TRACED = ("bytes_per_s", "rtt_s", "jitter_s", "loss")
_KEYS = ("time_s", "source", "target", *TRACED)
_NEEDED = ("time_s", "source", "target")
MAX_PROBLEMS = 20
SAME = 0.05
"""A figure that differs by less than this share from the one before is no change."""
LEAST_LIMITED_S = 0.5
"""A bandwidth is measured over at least so long a time in which the link was the limit."""
LEAST_APART_S = 5.0
"""Least time between two samples of a link that are taken from a run's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """From a time on, a directed link has these figures; None: as before."""

    time_s: float
    source: str
    target: str
    bytes_per_s: float | None = None
    rtt_s: float | None = None
    jitter_s: float | None = None
    loss: float | None = None

    @property
    def pair(self) -> Pair:
        """The link."""
        return self.source, self.target

    def figures(self) -> dict[str, float]:
        """Return what is known, by name."""
        values = ((name, getattr(self, name)) for name in TRACED)
        return {name: value for name, value in values if value is not None}


def read_trace(text: str, source: str, topology: Topology) -> list[Sample]:
    """Return a trace's samples, in order of time.

    Args:
        text: Of the file.
        source: Its name in messages.
        topology: Whose links it may name.

    Raises:
        ConfigError: with every mistake, each at its line; some dozens at most.
    """
    trace = _Trace(source, topology)
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        trace.read_json(lines)
    elif first:
        trace.read_csv(lines)
    if trace.problems:
        raise ConfigError(trace.problems[:MAX_PROBLEMS])
    if not trace.samples:
        raise ConfigError([Problem(source, 0, 0, trace.why_empty, "")])
    return sorted(trace.samples, key=lambda each: each.time_s)


@dataclass(slots=True)
class _Metered:
    """What a run's metrics say of one gateway's end of a link."""

    limited_bytes: float = 0.0
    limited_s: float = 0.0
    rtt_s: float | None = None


@dataclass(slots=True)
class _Trace:
    """A trace while it is read."""

    source: str
    topology: Topology
    samples: list[Sample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    why_empty: str = (
        "holds no sample: want lines of " + ", ".join(_KEYS) + ", as CSV with these names in the "
        "first line or as JSON objects, or the metrics.jsonl of a run"
    )

    def read_csv(self, lines: Sequence[str]) -> None:
        """Read CSV whose first line names the columns."""
        rows = csv.reader(lines)
        names = [name.strip() for name in next(rows, [])]
        for name in names:
            if name not in _KEYS:
                hint = did_you_mean(name, _KEYS)
                self._add(1, f"unknown column {name!r}{hint}: want {one_of(_KEYS)}", name)
        for name in _NEEDED:
            if name not in names:
                self._add(1, f"a column is missing: {name}", name)
        if self.problems:
            return
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(names):
                self._add(rows.line_num, f"want {len(names)} values, got {len(row)}", "")
                continue
            cells = {name: cell.strip() for name, cell in zip(names, row, strict=True)}
            self._take(rows.line_num, {name: cell for name, cell in cells.items() if cell})

    def read_json(self, lines: Sequence[str]) -> None:
        """Read JSON lines: samples, or a run's metrics."""
        metered: dict[tuple[str, str, str], _Metered] = {}
        last_s: dict[Pair, float] = {}
        first_s: float | None = None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                if number < len(lines):  # the last line of a run may have been cut off
                    self._add(number, "want a JSON object", "")
                continue
            if "kind" not in fields:
                self._take(number, fields)
                continue
            self.why_empty = (
                "these metrics hold no bandwidth and no round trip of a link of this topology: "
                "record a run that fills its links"
            )
            figures = _link_figures(fields)
            if figures is None:
                continue
            wall_s, pair, gateway, values = figures
            first_s = wall_s if first_s is None else first_s
            if self.topology.link(*pair) is not None:
                meter = metered.setdefault((*pair, gateway), _Metered())
                if wall_s - last_s.get(pair, -math.inf) >= LEAST_APART_S:
                    sample = _metered(wall_s - first_s, pair, meter, values)
                    if sample is not None:
                        self.samples.append(sample)
                        last_s[pair] = wall_s

    def _take(self, line: int, fields: Mapping[str, Any]) -> None:
        """Take one sample."""
        before = len(self.problems)
        for name in fields:
            if name not in _KEYS:
                hint = did_you_mean(name, _KEYS)
                self._add(line, f"unknown key {name!r}{hint}: want {one_of(_KEYS)}", name)
        for name in _NEEDED:
            if fields.get(name) in (None, ""):
                self._add(line, f"want {name}", name)
        figures = {
            name: self._number(line, name, fields[name])
            for name in ("time_s", *TRACED)
            if fields.get(name) not in (None, "")
        }
        if len(figures) < 2 and len(self.problems) == before:
            self._add(line, f"says nothing of the link: want {one_of(TRACED)}", "")
        ends = str(fields.get("source", "")), str(fields.get("target", ""))
        if all(ends) and self.topology.link(*ends) is None:
            links = [f"{link.source} to {link.target}" for link in self.topology.links]
            listed = ", ".join(links[:6]) + (", …" if len(links) > 6 else "")
            self._add(
                line,
                f"the topology has no link from {ends[0]} to {ends[1]}; it has: {listed or 'none'}",
                "source",
            )
        if len(self.problems) == before:
            self.samples.append(Sample(source=ends[0], target=ends[1], **figures))

    def _number(self, line: int, name: str, value: object) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except ValueError:
            number = math.nan
        most = 1.0 if name == "loss" else math.inf
        is_possible = math.isfinite(number) and 0 <= number < most
        if isinstance(value, bool) or not is_possible or (name == "bytes_per_s" and not number):
            want = {
                "bytes_per_s": "bytes a second, more than 0",
                "loss": "a share of packets, 0 to less than 1",
            }.get(name, "seconds, 0 or more")
            self._add(line, f"want {want}, as a plain number; got {value!r}", name)
        return number

    def _add(self, line: int, message: str, path: str) -> None:
        self.problems.append(Problem(self.source, line, 1, message, path))


Figures = tuple[float, Pair, str, Mapping[str, float]]


def _link_figures(fields: Mapping[str, Any]) -> Figures | None:
    """Return time, link, gateway and totals of a metric; None: it is of another kind, or none."""
    labels, values = fields.get("labels"), fields.get("values")
    wall_s = fields.get("wall_s")
    if fields["kind"] != "link" or not isinstance(labels, dict) or not isinstance(values, dict):
        return None
    if not isinstance(wall_s, int | float) or not math.isfinite(wall_s):
        return None
    pair = str(labels.get("source", "")), str(labels.get("target", ""))
    known = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return float(wall_s), pair, str(labels.get("gateway", "")), known


def _metered(
    time_s: float, pair: Pair, meter: _Metered, values: Mapping[str, float]
) -> Sample | None:
    """Return what a link's totals say since they were looked at; None: nothing new."""
    limited_bytes, limited_s = values.get("limited_bytes", 0.0), values.get("limited_s", 0.0)
    if limited_s < meter.limited_s:  # its gateway was started again
        meter.limited_bytes = meter.limited_s = 0.0
    more_s, rate = limited_s - meter.limited_s, None
    if more_s >= LEAST_LIMITED_S and limited_bytes > meter.limited_bytes:
        rate = (limited_bytes - meter.limited_bytes) / more_s
        meter.limited_bytes, meter.limited_s = limited_bytes, limited_s
    rtt_s = values.get("idle_rtt_s")
    if rtt_s == meter.rtt_s:
        rtt_s = None
    meter.rtt_s = meter.rtt_s if rtt_s is None else rtt_s
    if rate is None and rtt_s is None:
        return None
    return Sample(
        time_s=max(0.0, time_s), source=pair[0], target=pair[1], bytes_per_s=rate, rtt_s=rtt_s
    )


def fault_script(samples: Sequence[Sample], source: str) -> str:
    """Return the fault script, as YAML, that plays a trace.

    Raises:
        ConfigError: it changes links too often.
    """
    changes = list(_changes(samples))
    if len(changes) > MAX_FAULTS:
        message = (
            f"links change {len(changes)} times, by {SAME:.0%} or more, and {MAX_FAULTS} changes "
            "are the most: leave out samples, every second one say, or cut the trace to as long "
            "as the runs are"
        )
        raise ConfigError([Problem(source, 0, 0, message, "")])
    lines = ["# Made from a link trace by `isthmus bench --link-trace`.", "version: 1", "faults:"]
    for each in changes:
        ends = f"[{json.dumps(each.source)}, {json.dumps(each.target)}]"
        figures = [f"{key}: {text}" for key, text in _written(each)]
        at = f"at: {each.time_s:.3f}s"
        lines.append(f"  - {{{', '.join([at, f'link: {ends}', 'oneway: true', *figures])}}}")
    return "\n".join(lines) + "\n"


def _changes(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the samples that change something, with the figures that do."""
    now: dict[Pair, dict[str, float]] = {}
    for each in samples:
        before = now.setdefault(each.pair, {})
        new = {
            name: value
            for name, value in each.figures().items()
            if name not in before or abs(value - before[name]) > SAME * before[name]
        }
        if new:
            before.update(new)
            yield Sample(time_s=each.time_s, source=each.source, target=each.target, **new)


def _written(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield a fault's keys and their values, with units."""
    if sample.bytes_per_s is not None:
        yield "rate", f"{max(1, round(sample.bytes_per_s * 8))}bit/s"
    if sample.rtt_s is not None:
        yield "rtt", f"{round(sample.rtt_s * 1e9)}ns"
    if sample.jitter_s is not None:
        yield "jitter", f"{round(sample.jitter_s * 1e9)}ns"
    if sample.loss is not None:
        yield "loss", f"{sample.loss * 100:.6f}%"
