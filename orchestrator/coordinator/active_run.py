"""The latest run of a coordinator: carries out what the core decides, and keeps what people see."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.control_messages import (
    endpoint_messages,
    namespace_message,
    run_message,
)
from isthmus.orchestrator.coordinator.exporting import Exporting
from isthmus.orchestrator.coordinator.journal import Journal, JournalError
from isthmus.orchestrator.coordinator.measured_events import events_of
from isthmus.orchestrator.coordinator.replanning import (
    Replanner,
    Replanning,
    link_reported,
    step_reported,
)
from isthmus.orchestrator.coordinator.run_epochs import epoch_message, epoch_rules, first_epoch
from isthmus.orchestrator.coordinator.submission import Submission
from isthmus.orchestrator.coordinator.wan import FaultPlan, Wan, emulation
from isthmus.orchestrator.core import replan_machine, run_events
from isthmus.orchestrator.core.clock_watch import ClockWatch
from isthmus.orchestrator.core.departures import DROPPED
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.core.run import Run, RunSettings
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.run_folder.log_files import LogWriter
from isthmus.orchestrator.run_folder.run_files import METRICS, Failing, RunFiles, read_metrics
from isthmus.orchestrator.runs.facts import summarise
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import StateConflictError
from isthmus.protos.failure import one_line
from isthmus.topology.spec.exporters import Exporters
from isthmus.topology.spec.units import format_size

PROGRESS_S = 1.0
"""Between two writings of the latest metrics into the journal."""
MAX_LABEL = 200
"""Characters of a metric's kind and labels."""

PROGRESS, LOGS, DOCUMENTS = "progress", "logs", "documents"

log = logging.getLogger(__name__)

SendTo = Callable[[str, control_pb2.CoordinatorMessage], None]


class ActiveRun:
    """Owns a run, its files and, where the WAN is emulated, its emulator."""

    def __init__(
        self,
        submission: Submission,
        *,
        generation: int,
        folder: Path,
        journal: Journal,
        send: SendTo,
        faults: FaultPlan | None = None,
        recorded: Sequence[RecordedEvent] = (),
    ) -> None:
        """Write the run into its folder and the journal; nothing is started before `handle`.

        With `recorded`, what the journal has of it, go on with a run that an earlier coordinator
        has begun, or begin one that has waited in the queue.

        Raises:
            OSError: the folder cannot be written.
            JournalError: the journal cannot be written.
        """
        self.run_id = submission.run_id
        self.generation = generation
        self._fetching: dict[str, str] = {}
        """What each site fetched last before its gateways started, in words."""
        self.changed = asyncio.Event()
        """Set at each change of state and replaced by a new one: wait on the one that you see."""
        self._submission = submission
        self._journal = journal
        self._send = send
        self._files = RunFiles(folder)
        self.logs = LogWriter(folder)
        self._closing: asyncio.Task[None] | None = None
        self._saved_s = 0.0
        self._clock = ClockWatch()
        self._clock.look(time.time(), time.monotonic())
        self._unwritten: JournalError | None = None
        topology = submission.spec.topology
        self._wan: Wan | None = None
        """None: the run's links are real."""
        if topology.emulate:
            self._wan = emulation().RunWan(
                topology,
                faults,
                folder,
                handle=self.handle,
                record=self._record,
                add_metrics=self._add_wan_metrics,
            )
        self._exporting: Exporting | None = None
        """None: the job asks for no exporters."""
        if submission.spec.job.exporters != Exporters():
            state = journal.path.parent
            trouble = functools.partial(self.note, EventKind.EXPORTER_TROUBLE)
            self._exporting = Exporting(self.run_id, folder, state, trouble)
        self._run_record = self._recall(recorded)
        """All that is written down of the run and measured."""
        self._replanning: Replanning | None = None
        """Set once the run is active, if its job asks for replanning."""
        self._failing = {
            PROGRESS: Failing("progress"),
            LOGS: Failing(f"the logs below {folder}"),
            DOCUMENTS: Failing(folder),
        }
        """Places where writing may fail, while the run continues without."""
        if not recorded:
            submission.write(self._files)
            self._record(EventKind.RUN_SUBMITTED, detail=submission.to_json(folder))
        elif self.view.state is RunState.QUEUED:
            self._record(EventKind.RUN_DEQUEUED)
            recorded = ()
        self._run = self._begin_run()
        if recorded:
            self._go_on()

    @property
    def view(self) -> JournaledRun:
        """All that is written down of the run; what is decided is decided by this."""
        return self._run_record.view

    def _recall(self, recorded: Sequence[RecordedEvent]) -> RunRecord:
        """Return what was written down, with times as this process counts them."""
        spec, now_s, now_wall_s = self._submission.spec, time.monotonic(), time.time()
        flops = ModelFlops(spec.job, spec.topology)
        record = RunRecord(self.run_id, spec.site_names, flops, first=first_epoch(spec))
        for event in recorded:
            record.apply(event, now_s - max(0.0, now_wall_s - event.wall_s))
        return record

    def _begin_run(self) -> Run:
        spec = self._submission.spec
        job = spec.job
        settings = RunSettings(
            may_return=job.exchange.schedule != "off",
            refuses_same_data=job.same_data == "refuse",
            drops_corrupt=job.on_corruption == "drop",
            trains=job.probe is None,
            saves=job.checkpoint is not None,
        )
        return Run(spec.topology, epoch_rules(spec), settings, self.view, time.monotonic())

    def _go_on(self) -> None:
        """Take what an earlier coordinator knew of the run; what it measured is counted again."""

        def not_counted(what: object) -> None:
            log.warning("what was measured before is not all counted: %s", what)

        for line in read_metrics(self._files.folder / METRICS, on_damaged=not_counted):
            try:
                measurement = Measurement.of(line)
                if measurement.site in self._run_record.measured.sites:
                    self._run_record.measure(measurement)
            except (LookupError, ValueError) as error:
                not_counted(error)
        self._run_record.reach()
        totals = self._journal.progress(self.run_id).get("totals", {})
        self._record(EventKind.RUN_RESUMED)
        now_s = time.monotonic()
        self._carry_out(self._run.resume(now_s, int(totals.get("verified_steps", 0))), now_s)
        self._watch_links()

    @property
    def occupies(self) -> frozenset[str]:
        """The sites that the run has for itself; none once all of it has ended."""
        is_over = self.has_ended and (self._closing is None or self._closing.done())
        return frozenset() if is_over else self._submission.occupies

    @property
    def awaited(self) -> list[str]:
        """Sites where something of the run may be alive."""
        return self._run.awaited

    @property
    def restarts_agents(self) -> bool:
        """Whether an agent that has ended is of use to the run once it is started again."""
        return self._run.restarts_agents

    @property
    def has_ended(self) -> bool:
        """Whether the run is in a state in which it stays."""
        return self.view.state.is_terminal

    def message(self) -> control_pb2.Run:
        """Return the run as operators see it now."""
        told = run_message(self.view, self._progress())
        troubles: tuple[Failing | RunFiles, ...] = (*self._failing.values(), self._files)
        for each in told.sites:
            if each.state == control_pb2.SITE_STATE_JOINED:
                each.fetching = self._fetching.get(each.site, "")
        told.notes.extend(each.trouble for each in troubles if each.trouble)
        return told

    def handle(self, event: run_events.Event) -> None:
        """Let the core decide on an event, and do what it says.

        Raises:
            JournalError: it cannot be written down. Whatever was to come after it is not decided,
                and the event is lost, so the coordinator cannot go on, even if the disk recovers:
                `tick` raises it too.
        """
        now_s = time.monotonic()
        with self._writing():
            self._carry_out(self._run.handle(event, now_s), now_s)
        if isinstance(event, run_events.Ticked):
            self.replan(event)

    def drop(self, site: str, why: str = DROPPED) -> None:
        """Go on without a site, and do not start it again.

        `why` is written down, and told.

        Raises:
            StateConflictError: it cannot be done without.
            JournalError: as for `handle`.
        """
        if problem := self._run.drop_problem(site):
            raise StateConflictError(problem)
        self.handle(run_events.DropRequested(site, why))

    def add(self, site: str) -> None:
        """Start a site again that takes no part.

        Raises:
            StateConflictError: it takes part, or cannot.
            JournalError: as for `handle`.
        """
        if problem := self._run.add_problem(site):
            raise StateConflictError(problem)
        self.handle(run_events.AddRequested(site))

    def replan(self, event: replan_machine.Event) -> None:
        """Let the core decide whether the plan is made again, for as long as the run is active.

        Raises:
            JournalError: as for `handle`.
        """
        with self._writing():
            if self._replanning is not None and self.view.state is RunState.ACTIVE:
                self._replanning.handle(event)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Remember what could not be written down, and raise it again and again."""
        if self._unwritten is not None:
            raise self._unwritten
        try:
            yield
        except JournalError as error:
            self._unwritten = error
            raise

    def end_unwritten(self, error: JournalError) -> None:
        """End the run by name, for what happens to it can no longer be written down.

        Who watches it hears of it, and the journal if it can.
        """
        if self.has_ended:
            return
        detail = {
            "state": RunState.FAILED.value,
            "reason_code": error.code,
            "reason": str(error),
            "failure": None,
            "active_s": self._run.active_for_s(time.monotonic()),
        }
        try:
            self._record(EventKind.RUN_ENDED, detail=detail)
        except JournalError:
            self._show(
                RecordedEvent(
                    sequence=0,
                    wall_s=time.time(),
                    run_id=self.run_id,
                    generation=self.generation,
                    kind=EventKind.RUN_ENDED,
                    site="",
                    detail=detail,
                ),
                time.monotonic(),
            )
        self._unwritten = error
        self._finish()

    def add_metrics(self, site: str, batch: control_pb2.MetricBatch) -> None:
        """Take measurements of a site."""
        records = []
        for metric in batch.metrics:
            if metric.kind == metrics.BUFFERS:
                hashes = {one_line(name): each for name, each in metric.values.items()}
                self.handle(run_events.BuffersReported(site, metric.step, hashes))
                continue
            values, labels = dict(metric.values), _short(dict(metric.labels))
            if metric.kind == metrics.FETCH:
                self._fetching[site] = _fetching_words(values, labels)
                self.handle(run_events.SiteFetching(site))
                continue
            is_new = self._run_record.measured.add(site, metric.kind, metric.step, values, labels)
            reported = link_reported(site, metric) or step_reported(site, metric)
            if reported is not None:
                self.replan(reported)
            for event in events_of(site, metric, values, labels, self._submission.spec, self._run):
                self.handle(event)
            if not is_new:
                continue
            records.append(
                {
                    "run": self.run_id,
                    "generation": self.generation,
                    "site": site,
                    "kind": metric.kind[:MAX_LABEL],
                    "rank": metric.rank,
                    "step": metric.step,
                    "values": values,
                    "labels": labels,
                    "wall_s": time.time(),
                }
            )
        self._files.append_metrics(records)

    def tick(self) -> None:
        """Let time pass. Call it many times a second until the run has ended.

        Raises:
            JournalError: as for `handle`.
        """
        self.handle(run_events.Ticked())
        if self._exporting is not None:
            self._exporting.begin()
        now_s = time.monotonic()
        if not self.has_ended and (stepped := self._clock.look(time.time(), now_s)):
            note = f"{stepped}: times of events before and after do not compare"
            self._record(EventKind.CLOCK_STEPPED, detail={"note": note})
        if not self.has_ended and now_s - self._saved_s >= PROGRESS_S:
            self._saved_s = now_s
            self._keep_documents()
            with self._failing[PROGRESS].reported(JournalError):
                self._journal.save_progress(self.run_id, self._progress())

    def _keep_documents(self) -> None:
        """Write what was removed of the documents again: the next coordinator needs them."""
        if self._files.is_whole:
            return
        folder = self._files.folder
        with self._failing[DOCUMENTS].reported():
            self._submission.write(self._files)
            note = (
                f"something removed {folder}, or files in it, while the run goes on: its documents "
                "were written again, and what else was in it is lost"
            )
            log.warning("%s", note)
            self._record(EventKind.FOLDER_RESTORED, detail={"note": note})

    def add_logs(self, site: str, lines: Iterable[control_pb2.LogLine]) -> bool:
        """Append log lines; False: the disk refused them, and the agent has to send them again.

        Raises:
            RemoteProtocolError: a line is another site's, or its source no name.
        """
        with self._failing[LOGS].reported():
            self.logs.append(site, lines)
        return not self._failing[LOGS].is_failing

    async def close(self) -> None:
        """Return when the emulator and the exporters have ended, if there were any.

        The end of the run ends them too; only the emulator keeps its sites from other runs.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close-run")
        await asyncio.wait([self._closing])
        if self._exporting is not None:
            await self._exporting.close()

    async def _close(self) -> None:
        if self._replanning is not None:
            await self._replanning.close()
        if self._wan is not None:
            await self._wan.close()

    # ------------------------------------------------------------ actions

    def _carry_out(self, actions: Iterable[run_events.Action], now_s: float) -> None:
        """Write down what is decided, step by step, and then do the rest."""
        was_forming, rest = self.view.state is RunState.FORMING, []
        for action in actions:
            if isinstance(action, run_events.RecordEvent):
                self._record(action.kind, action.site, dict(action.detail), now_s)
            else:
                rest.append(action)
        if was_forming and self.view.state is RunState.ACTIVE:
            if self._wan is not None:
                self._wan.play()
            self._watch_links()
        for action in rest:
            self._do(action)

    def _do(self, action: run_events.Action) -> None:
        match action:
            case run_events.SendPrepare():
                self._send(action.site, self._prepare(action))
            case run_events.OpenNamespaces() | run_events.OpenRelay():
                assert self._wan is not None, "the topology asks for it"
                self._wan.open(action)
            case run_events.SendStart():
                start = control_pb2.Start(
                    run_id=self.run_id,
                    generation=self.generation,
                    endpoints=endpoint_messages(action.endpoints),
                )
                self._send(action.site, control_pb2.CoordinatorMessage(start=start))
            case run_events.SendRelease():
                release = control_pb2.Release(run_id=self.run_id, generation=self.generation)
                self._send(action.site, control_pb2.CoordinatorMessage(release=release))
            case run_events.SendStop():
                stop = control_pb2.Stop(
                    run_id=self.run_id,
                    generation=self.generation,
                    reason=action.reason,
                    grace_s=action.grace_s,
                )
                self._send(action.site, control_pb2.CoordinatorMessage(stop=stop))
            case run_events.SendPause() | run_events.SendResume() | run_events.SendCancel():
                endpoints_of = self._run.endpoints_of
                message = epoch_message(action, self.run_id, self.generation, endpoints_of)
                self._send(action.site, message)
            case run_events.EpochBegun() | run_events.TreesEnded():
                self.replan(action)
            case run_events.FinishRun():
                self._finish()

    def _record(
        self,
        kind: EventKind,
        site: str = "",
        detail: dict[str, Any] | None = None,
        now_s: float | None = None,
    ) -> None:
        """Write an event, then show it: nobody sees what a crash could take back."""
        event = self._journal.append(
            kind,
            wall_s=time.time(),
            generation=self.generation,
            run_id=self.run_id,
            site=site,
            detail=detail or {},
        )
        self._show(event, time.monotonic() if now_s is None else now_s)

    def _show(self, event: RecordedEvent, now_s: float) -> None:
        self._run_record.apply(event, now_s)
        self._run_record.reach()
        self.tell_changed()

    def tell_changed(self) -> None:
        """Have watchers look at it now."""
        self.changed.set()
        self.changed = asyncio.Event()

    def _watch_links(self) -> None:
        submission, epoch = self._submission, self._run.epoch
        spec = submission.spec
        if epoch is None:  # the run is not active
            return
        if spec.replan is not None:
            self._replanning = Replanning(
                spec,
                epoch,
                Replanner(spec, submission.described, on_answer=self.replan),
                record=self._record,
                want=self.handle,
            )

    def note(self, kind: EventKind, note: str) -> None:
        """Have people know of something that changes nothing for the run."""
        log.warning("%s", note)
        if not self.has_ended:
            with self._writing():
                self._record(kind, detail={"note": note})

    def _prepare(self, action: run_events.SendPrepare) -> control_pb2.CoordinatorMessage:
        namespace = action.namespace
        submission = self._submission
        prepare = control_pb2.Prepare(
            run_id=self.run_id,
            generation=self.generation,
            topology=submission.topology_document,
            job=submission.job_document,
            run_spec=submission.written_spec,
            namespace=namespace_message(namespace) if namespace else None,
            returns=action.returns,
            passed_env=submission.passed_env,
        )
        return control_pb2.CoordinatorMessage(prepare=prepare)

    def _add_wan_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._files.append_metrics(
            {
                "run": self.run_id,
                "generation": self.generation,
                "site": "",
                "rank": -1,
                "step": -1,
                **record,
                "wall_s": time.time(),
            }
            for record in records
        )

    def _finish(self) -> None:
        """Keep what the run came to. No watcher runs before this is done."""
        progress = self._progress()
        with self._failing[PROGRESS].reported(JournalError):
            self._journal.save_progress(self.run_id, progress)
        summary = summarise(
            self._run_record,
            active_s=progress["active_s"],
            verified_steps=self._run.verified_steps,
        )
        self._files.write_summary(summary)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close-run")

    def _progress(self) -> dict[str, Any]:
        progress = self._run_record.measured.progress()
        progress["totals"]["verified_steps"] = float(self._run.verified_steps)
        return {**progress, "active_s": self._run.active_for_s(time.monotonic())}


def _fetching_words(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    what = one_line(labels.get(metrics.WHAT, ""))
    done, total = (values.get(each, 0.0) for each in (metrics.DONE_BYTES, metrics.TOTAL_BYTES))
    if not (math.isfinite(done) and math.isfinite(total) and done > 0):
        return what
    return f"{what}: {format_size(done)}" + (f" of {format_size(total)}" if total else "")


def _short(labels: dict[str, str]) -> dict[str, str]:
    return {key[:MAX_LABEL]: value[:MAX_LABEL] for key, value in labels.items()}
