"""A run's record as trace events: https://perfetto.dev or chrome://tracing show them.

    process a site     compute: step > forward and backward, optimizer; a lane for each bucket phase
                       that goes on at once; counters of the training; instants of what happened to
                       the site
    process "links"    a counter of bytes/s each directed link, and of what waits in the emulator
    process "run"      instants of the run's events and of faults

Times are microseconds since the run was submitted. Pure.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from isthmus.orchestrator.evidence.record.run_record import LinkSample, RunRecording
from isthmus.orchestrator.evidence.record.step_timelines import PHASES, Span, StepTimeline

TraceEvent = dict[str, Any]

COMPUTE_TID = 1
LANES_PER_PHASE = 1000
"""Thread ids of a phase; more of one phase at once would not be seen anyway."""


def trace(record: RunRecording) -> dict[str, Any]:
    """Return the JSON object format: `traceEvents`, metadata first, then sorted by time."""
    clock = _Clock(record)
    pids = {site: index for index, site in enumerate(record.sites, start=1)}
    links_pid, run_pid = len(pids) + 1, len(pids) + 2
    named = [*pids.items(), ("links", links_pid), ("run", run_pid)]
    metadata = [each for name, pid in named for each in _named("process", name, pid)]
    events: list[TraceEvent] = []
    for site, pid in pids.items():
        threads, timed = _site(record.timelines, site, pid, clock)
        metadata += threads
        events += timed
    events += _link_counters(record, links_pid, clock)
    events += _instants(record, pids, run_pid, clock)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*metadata, *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "run": record.run.run_id,
            "job": record.run.name,
            "began_wall_s": clock.zero_s,
            "gaps": list(record.gaps),
        },
    }


class _Clock:
    """Wall clock to microseconds of the trace; no site's clock may be before its zero."""

    def __init__(self, record: RunRecording) -> None:
        began = [record.run.created_wall_s] if record.run.created_wall_s else []
        told = [event.wall_s for event in record.events] + [
            step.begin_s for step in record.timelines
        ]
        told += [fault.wall_s for fault in record.faults]
        told += [samples[0].wall_s for samples in record.samples.values()]
        told += [samples[0].wall_s for samples in record.emulated.values()]
        self.zero_s = min(began + told, default=0.0)

    def us(self, wall_s: float) -> float:
        """Return the time in µs, to a tenth."""
        return round((wall_s - self.zero_s) * 1e6, 1)

    def complete(
        self, span: Span, pid: int, tid: int, name: str, category: str, **arguments: object
    ) -> TraceEvent:
        """Return the event of a span; rounded ends stay ends."""
        begin_us, end_us = self.us(span.begin_s), self.us(span.end_s)
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            "cat": category,
            "ts": begin_us,
            "dur": round(max(0.0, end_us - begin_us), 1),
            "args": arguments,
        }


def _named(kind: str, name: str, pid: int, tid: int = 0) -> Iterator[TraceEvent]:
    """Yield what names a process or a thread, and puts it into its place."""
    event = {"ph": "M", "pid": pid, "tid": tid}
    yield {**event, "name": f"{kind}_name", "args": {"name": name}}
    yield {**event, "name": f"{kind}_sort_index", "args": {"sort_index": tid or pid}}


def _site(
    steps: Iterable[StepTimeline], site: str, pid: int, clock: _Clock
) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Return the threads of one site, and what they did."""
    told = [(step.step, step.sites[site]) for step in steps if site in step.sites]
    if not told:
        return [], []
    threads = list(_named("thread", "compute", pid, COMPUTE_TID))
    timed = []
    for number, each in told:
        step = Span("step", f"step {number}", each.begin_s, each.end_s)
        timed += [
            clock.complete(span, pid, COMPUTE_TID, span.words, "compute", step=number)
            for span in (step, *each.spans())
        ]
    buckets = [(number, bucket) for number, timeline in told for bucket in timeline.buckets]
    for phase, name in enumerate(PHASES.values()):
        spans = [bucket.spans()[phase] for _, bucket in buckets]
        lanes = assign_lanes([(span.begin_s, span.end_s) for span in spans])
        first_tid = (phase + 1) * LANES_PER_PHASE
        for lane in range(max(lanes, default=-1) + 1):
            numbered = name if lane == 0 else f"{name} {lane + 1}"
            threads += _named("thread", numbered, pid, first_tid + lane)
        for (number, bucket), span, lane in zip(buckets, spans, lanes, strict=True):
            arguments = {"step": number, "bucket": bucket.index, **bucket.values}
            title = f"bucket {bucket.index}"
            timed.append(clock.complete(span, pid, first_tid + lane, title, name, **arguments))
    return threads, timed


def assign_lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each span, the lowest that is free: no two spans of a lane overlap."""
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    num_lanes = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        begin_s, end_s = spans[index]
        while busy and busy[0][0] <= begin_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        lanes[index] = lane
        heapq.heappush(busy, (end_s, lane))
    return lanes


def _link_counters(record: RunRecording, pid: int, clock: _Clock) -> Iterator[TraceEvent]:
    """Yield the rate of each directed link.

    A link that several gateways share has a counter for each.
    """
    shared = Counter((source, target) for source, target, _ in record.samples)
    for (source, target, gateway), samples in record.samples.items():
        is_shared = shared[source, target] > 1
        name = f"{source} → {target}" + (f", gateway {gateway}" if is_shared else "")
        for wall_s, bytes_per_s in rates(samples):
            yield _counter(pid, name, clock.us(wall_s), {"bytes/s": bytes_per_s})
    for (source, target), emulated in record.emulated.items():
        name = f"{source} → {target}, queue of the emulator"
        for sample in emulated:
            yield _counter(pid, name, clock.us(sample.wall_s), {"bytes": sample.queued_bytes})


def _counter(pid: int, name: str, at_us: float, values: dict[str, float]) -> TraceEvent:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": at_us, "args": values}


def rates(samples: Sequence[LinkSample]) -> Iterator[tuple[float, float]]:
    """Yield from when on a link carried how many bytes a second; from the last sample on, none."""
    for before, after in itertools.pairwise(samples):
        if after.wall_s > before.wall_s:
            sent_bytes = max(0.0, after.sent_bytes - before.sent_bytes)
            yield before.wall_s, round(sent_bytes / (after.wall_s - before.wall_s), 1)
    if samples:
        yield samples[-1].wall_s, 0.0


def _instants(
    record: RunRecording, pids: dict[str, int], run_pid: int, clock: _Clock
) -> Iterator[TraceEvent]:
    """Yield what happened: of a site in its process, else over the whole trace."""
    told = [(event.wall_s, event.kind, event.site, "event") for event in record.events]
    told += [
        (fault.wall_s, f"{fault.what} {fault.where}".strip(), fault.site, "fault")
        for fault in record.faults
    ]
    for wall_s, name, site, category in told:
        yield {
            "ph": "i",
            "pid": pids.get(site, run_pid),
            "tid": 0,
            "name": name,
            "cat": category,
            "ts": clock.us(wall_s),
            "s": "p" if site in pids else "g",
        }
