"""Adds what a run measured, its metrics.jsonl, to its record."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.evidence.report.records import EmulatedSample, Fault, LinkSample, RunRecord
from orchestrator.evidence.report.timelines import TimelineReader, hold_back
from orchestrator.evidence.view import figures
from orchestrator.run_folder.rotated_lines import parts_of
from protos import metrics

MAX_SAMPLES = 20_000
"""Of one link: once there are more, every second one is let go. They are totals, so nothing is lost
but detail."""
MAX_LINE_BYTES = 1 << 20
"""Of metrics.jsonl; the longest that are written are some kilobytes."""

Sample = TypeVar("Sample", LinkSample, EmulatedSample)


class Measurements:
    """Adds metrics.jsonl to a record."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._timelines = TimelineReader()
        self._evaluations: dict[int, float] = {}
        self._step_ends: dict[int, float] = {}
        self._num_odd = 0

    def read(self, path: Path) -> None:
        """Take every line; one that makes no sense is counted, not believed."""
        record = self._record
        try:
            first = self._take_parts(path)
            if first is None:
                record.gaps.append(f"there is no {path}: nothing was measured")
            elif first:
                record.gaps.append(f"{path}: its first {first} lines, for only the newest are kept")
        except OSError as error:
            record.gaps.append(f"{path}: {error.strerror}")
        if self._num_odd:
            record.gaps.append(f"{path}: {self._num_odd} lines make no sense and were left out")
        if self._timelines.num_dropped:
            record.gaps.append(
                f"the timelines of {self._timelines.num_dropped} steps, for they are many"
            )
        record.evaluations = sorted(self._evaluations.items())
        record.step_ends = sorted((wall_s, step) for step, wall_s in self._step_ends.items())
        record.timelines = self._timelines.steps(record.sites)
        if record.job is not None and record.job.exchange.schedule == "serial":
            hold_back(record.timelines)
        record.faults.sort(key=lambda fault: fault.wall_s)

    def _take_parts(self, path: Path) -> int | None:
        """Take the lines of all parts.

        Return the number of the first one, None if no part is there.

        Raises:
            OSError: one cannot be read.
        """
        first = None
        for part in parts_of(path):
            with contextlib.suppress(FileNotFoundError):  # the oldest goes while a run is read
                for line in _lines(part.path):
                    self._take(line)
                first = part.first if first is None else first
        return first

    def _take(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            kind, site = str(fields["kind"]), str(fields["site"])
            step, wall_s = int(fields["step"]), float(fields["wall_s"])
            values = _finite(fields["values"])
            labels = {str(name): str(value) for name, value in fields["labels"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            self._num_odd += 1
            return
        if not math.isfinite(wall_s):
            self._num_odd += 1
        elif kind == metrics.FAULT:
            self._record.faults.append(_fault(wall_s, values, labels))
        elif kind == metrics.EMULATED_LINK:
            pair = (labels.get("source", ""), labels.get("target", ""))
            _keep(self._record.emulated.setdefault(pair, []), _emulated(wall_s, values))
        elif site not in self._record.sums:
            self._num_odd += 1
        elif kind in {metrics.TIMELINE, metrics.BUCKET}:
            self._num_odd += not self._timelines.add(site, kind, step, values)
        else:
            self._measure(kind, site, step, wall_s, values, labels)

    def _measure(
        self,
        kind: str,
        site: str,
        step: int,
        wall_s: float,
        values: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        record = self._record
        record.measured.add(site, kind, step, values, labels)
        if kind == metrics.STEP:
            sums = record.sums[site]
            sums.hidden_inter_s += values.get(metrics.HIDDEN_INTER_S, 0.0)
            sums.encode_s += values.get(metrics.ENCODE_S, 0.0)
            sums.decode_s += values.get(metrics.DECODE_S, 0.0)
            self._step_ends.setdefault(step, wall_s)
        elif kind == metrics.EVALUATION and metrics.HELD_OUT_LOSS in values:
            self._evaluations[step] = values[metrics.HELD_OUT_LOSS]
        elif kind == metrics.LINK and metrics.SENT_BYTES in values:
            key = (labels.get("source", site), labels.get("target", ""), labels.get("node", ""))
            sample = LinkSample(wall_s, values[metrics.SENT_BYTES])
            _keep(record.samples.setdefault(key, []), sample)


def _keep(samples: list[Sample], sample: Sample) -> None:
    samples.append(sample)
    if len(samples) > MAX_SAMPLES:
        del samples[1::2]


def _emulated(wall_s: float, values: Mapping[str, float]) -> EmulatedSample:
    return EmulatedSample(
        wall_s,
        values.get("lost_packets"),
        values.get("dropped_packets"),
        values.get("queued_bytes", 0.0),
    )


def _fault(wall_s: float, values: Mapping[str, float], labels: Mapping[str, str]) -> Fault:
    source, target = labels.get("source", ""), labels.get("target", "")
    site = labels.get("site", "")
    set_to = [
        f"{name} {style(values[key])}" for key, (name, style) in _SHAPE.items() if key in values
    ]
    what = f"{labels.get('what', 'fault')} {', '.join(set_to)}".strip()
    way = f"{source} → {target}" if source and target else source or target
    return Fault(wall_s, what, site or way, site)


_SHAPE: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "bytes_per_s": ("to", figures.rate),
    "delay_s": ("delay", figures.duration),
    "jitter_s": ("jitter", figures.duration),
    "loss": ("loss", figures.share),
}
"""What a fault record says of a link's new shape."""


def _lines(path: Path) -> Iterator[bytes]:
    """Yield whole lines; a last one without its end is still being written."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                yield line


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among `values`: a loss that was not finite is null."""
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
