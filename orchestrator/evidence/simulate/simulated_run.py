"""The folder of a simulated run, as a coordinator would leave it, with the metric records in it.

`isthmus report`, `trace`, `status` and `events` read it like that of a run that was made. It says
itself that none was: in its notes, and as the host of each site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.run_folder.home import claim_run_folder
from isthmus.orchestrator.run_folder.run_files import RunFiles
from isthmus.orchestrator.runs.facts import summarise
from isthmus.protos import metrics
from isthmus.protos.errors import StateConflictError
from isthmus.topology.faults.script import Change, TimedChange
from isthmus.topology.simulator.simulation import LinkLoad, SimulatedRun, coding_s
from isthmus.topology.simulator.training import BucketTimes, SiteStep

NOTE = "simulated: no process ran, and no byte crossed"
HOST = "simulated"
EMULATOR = "a simulation"


def write_run(
    home: Path,
    run_id: str,
    pair: Pair,
    run: SimulatedRun,
    began_s: float,
    *,
    told: Sequence[str] = (),
) -> Path:
    """Write HOME/runs/RUN; return it.

    It is said to have begun at `began_s`, by the wall clock. `told` is what else there is to say of
    how it was simulated.

    Raises:
        OSError: the disk refuses.
        StateConflictError: there is such a run.
    """
    folder, is_new = claim_run_folder(home, run_id, pair.job_document.written)
    if not is_new:
        raise StateConflictError(f"there is a run {run_id!r} already: {folder.path}")
    files = RunFiles(folder.path)
    files.write_documents(pair.topology_document.written, pair.job_document.written)
    sites = [site.name for site in pair.topology.sites]
    made = list(records(run, run_id, began_s))
    files.append_metrics(made)
    record = RunRecord(run_id, sites)
    journal = Journal(folder.path)
    try:
        note = "; ".join([NOTE, *told])
        _journal(journal, run_id, folder.path, pair, run, began_s, note)
        for event in journal.events(run_id):
            record.apply(event)
        for line in made:
            if line["site"]:
                record.measure(Measurement.of(line))
        journal.save_progress(run_id, {**record.measured.progress(), "active_s": run.wall_s})
        summary = summarise(record, active_s=run.wall_s, verified_steps=0)
        files.write_summary(summary)
    finally:
        journal.close()
    return folder.path


def _journal(
    journal: Journal,
    run_id: str,
    folder: Path,
    pair: Pair,
    run: SimulatedRun,
    began_s: float,
    note: str,
) -> None:
    generation = journal.raise_generation()

    def append(kind: str, at_s: float, site: str = "", **detail: object) -> None:
        journal.append(
            kind,
            wall_s=began_s + at_s,
            generation=generation,
            run_id=run_id,
            site=site,
            detail=detail,
        )

    links = [
        {
            "source": link.source,
            "target": link.target,
            "bytes_per_s": link.bytes_per_s,
            "rtt_s": link.rtt_s,
            "egress_usd_per_byte": link.egress_usd_per_byte,
        }
        for link in pair.topology.links
    ]
    sites = [site.name for site in pair.topology.sites]
    append(
        EventKind.RUN_SUBMITTED,
        0.0,
        name=pair.job.name,
        folder=str(folder),
        sites=sites,
        links=links,
        topology_overrides=pair.topology_document.overrides,
        job_overrides=pair.job_document.overrides,
    )
    append(EventKind.RUN_SIMULATED, 0.0, note=note)
    for site in sites:
        append(EventKind.SITE_JOINED, 0.0, site, host=HOST)
    if links:
        append(EventKind.WAN_EMULATED, 0.0, emulator=EMULATOR)
    append(EventKind.RUN_ACTIVE, 0.0)
    for outage in run.outages:
        append(EventKind.SITE_FAILED, outage.at_s, outage.site, lost_steps=outage.lost_steps)
        append(EventKind.RUN_RECOVERED, outage.until_s)
    for site in sites:
        append(EventKind.SITE_ENDED, run.wall_s, site, succeeded=True)
    append(
        EventKind.RUN_ENDED, run.wall_s, state="SUCCEEDED", reason_code="", reason="", failure=None
    )


Record = dict[str, Any]

BUCKETS_MAX = 256
"""Buckets of a step that are told of, as ranks do: more than a picture can show."""


def records(run: SimulatedRun, run_id: str, began_s: float) -> Iterator[Record]:
    """Yield the lines of metrics.jsonl, in the order of steps.

    The run is said to have begun at `began_s`, by the wall clock.
    """
    maker = _Maker(run, run_id, began_s)
    for change in run.changes:
        yield maker.fault(change)
    for number, step in enumerate(run.steps, 1):
        for site, each in enumerate(step):
            yield maker.step(number, site, each)
            if each.buckets is not None:
                yield from maker.timeline(number, site, each)
            yield from maker.links(number, site, each)


class _Maker:
    """Makes the records of one run."""

    def __init__(self, run: SimulatedRun, run_id: str, began_s: float) -> None:
        self._run = run
        self._run_id = run_id
        self._began_s = began_s
        self._coding_s = coding_s(run.work)
        self._tokens = sum(site.tokens for site in run.work.sites)
        self._raw_bytes = float(sum(bucket.raw_bytes for bucket in run.work.buckets))
        """Bytes of all buckets: what crosses in one round."""
        self._links: dict[str, list[LinkLoad]] = {site.name: [] for site in run.work.sites}
        for link in run.links:
            self._links[link.source].append(link)
        self._rtts_s = {(link.source, link.target): link.rtt_s for link in run.work.topology.links}

    def fault(self, each: TimedChange) -> Record:
        """Return the record of a change of a link."""
        change = each.change
        assert isinstance(change, Change), "others are not simulated"
        values = {metrics.AT_S: each.at_s, **change.figures()}
        labels = {"what": change.kind, "source": change.source, "target": change.target}
        return self._record("", metrics.FAULT, 0, each.at_s, values, labels)

    def step(self, number: int, site: int, each: SiteStep) -> Record:
        """Return the record of a site's step."""
        work = self._run.work.sites[site]
        encode_s, decode_s = self._coding_s[site]
        parts, sent = each.parts, self._sent(number)
        values = {
            metrics.TOKENS: self._tokens,
            metrics.SITE_TOKENS: 0.0 if each.is_left_out else work.tokens,
            metrics.STEP_S: each.end_s - each.begin_s,
            metrics.COMPUTE_S: parts.compute_s,
            metrics.INTRA_S: parts.intra_s,
            metrics.EXPOSED_INTER_S: parts.exposed_inter_s,
            metrics.WAIT_S: parts.wait_s,
            metrics.HIDDEN_INTER_S: parts.hidden_inter_s,
            metrics.INTER_S: parts.inter_s,
            metrics.ENCODE_S: sent * encode_s,
            metrics.DECODE_S: sent * decode_s,
            metrics.RAW_BYTES: sent * self._raw_bytes / self._run.work.round_steps / work.num_ranks,
            metrics.WIRE_BYTES: sent * self._wire_bytes(work.name),
        }
        return self._record(work.name, metrics.STEP, number, each.end_s, values)

    def timeline(self, number: int, site: int, each: SiteStep) -> Iterator[Record]:
        """Yield the record of a kept step, and one a bucket."""
        name = self._run.work.sites[site].name
        for bucket in (each.buckets or ())[:BUCKETS_MAX]:
            values = self._bucket(site, bucket)
            yield self._record(name, metrics.BUCKET, number, bucket.finished_s, values)
        values = {
            metrics.BEGIN_S: self._began_s + each.begin_s,
            metrics.COMPUTED_S: self._began_s + each.computed_s,
            metrics.END_S: self._began_s + each.end_s,
        }
        yield self._record(name, metrics.TIMELINE, number, each.end_s, values)

    def _bucket(self, site: int, bucket: BucketTimes) -> dict[str, float]:
        work, raw_bytes = self._run.work, self._run.work.buckets[bucket.index].raw_bytes
        share = work.round_steps * raw_bytes / self._raw_bytes
        encode_s, decode_s = self._coding_s[site]
        return {
            metrics.BUCKET_INDEX: float(bucket.index),
            metrics.SUBMITTED_S: self._began_s + bucket.submitted_s,
            metrics.POSTED_S: self._began_s + bucket.posted_s,
            metrics.REDUCED_S: self._began_s + bucket.reduced_s,
            metrics.FINISHED_S: self._began_s + bucket.finished_s,
            metrics.RAW_BYTES: raw_bytes / work.sites[site].num_ranks,
            metrics.WIRE_BYTES: share * self._wire_bytes(work.sites[site].name),
            metrics.WAIT_S: bucket.wait_s,
            metrics.ENCODE_S: share * encode_s,
            metrics.DECODE_S: share * decode_s,
        }

    def links(self, number: int, site: int, each: SiteStep) -> Iterator[Record]:
        """Yield the totals of a site's links after a step."""
        name = self._run.work.sites[site].name
        done = self._run.work.exchanged(number)
        for link in self._links[name] if done else ():
            sent_bytes, busy_s = done * link.sent_bytes, done * link.busy_s
            values = {
                metrics.SENT_BYTES: sent_bytes,
                metrics.RAW_BYTES: done * link.raw_bytes,
                metrics.BUSY_S: busy_s,
                metrics.THROUGHPUT_BYTES_PER_S: sent_bytes / busy_s,
                metrics.RTT_S: self._rtts_s[link.source, link.target],
            }
            labels = {"source": link.source, "target": link.target, "gateway": "0"}
            yield self._record(name, metrics.LINK, number, each.end_s, values, labels)

    def _sent(self, number: int) -> float:
        """Return what a step sends, in steps' worth.

        Of rounds, in which few steps send, the mean is 1.
        """
        return self._run.work.exchanged(number) - self._run.work.exchanged(number - 1)

    def _wire_bytes(self, name: str) -> float:
        return sum(link.sent_bytes for link in self._links[name])

    def _record(
        self,
        site: str,
        kind: str,
        step: int,
        at_s: float,
        values: Mapping[str, float],
        labels: Mapping[str, str] | None = None,
    ) -> Record:
        return {
            "run": self._run_id,
            "generation": 1,
            "site": site,
            "kind": kind,
            "rank": 0,
            "step": step,
            "values": values,
            "labels": labels or {},
            "wall_s": self._began_s + at_s,
        }
