"""One run that is shown: its journal, and while somebody looks at it its metrics, kept up.

Lines are read once, in order, by one thread; answers are made from sums whose number does not grow
with the run. So no request reads the metrics, and how long one takes depends on the number of sites
and links only. The journal is small, and is read when it is asked about.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import FILE
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.journaled_run import RecordedEvent, coordinator_lost
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.core.run_metrics import PARTS, RunMetrics
from isthmus.orchestrator.core.run_record import Measurement, RunRecord, StepMark
from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.orchestrator.evidence.record.run_timeline import (
    SiteLane,
    SiteLanes,
    Stall,
    StepEnd,
    StepGaps,
)
from isthmus.orchestrator.evidence.record.step_series import MAX_POINTS, StepSeries
from isthmus.orchestrator.evidence.report.planned_steps import (
    PlannedStep,
    codec_steps_s,
    planned_step,
)
from isthmus.orchestrator.evidence.report.run_facts import verdict_facts
from isthmus.orchestrator.evidence.report.verdict import Verdict, verdict
from isthmus.orchestrator.evidence.view.condition import Absences, Trouble, troubles
from isthmus.orchestrator.evidence.view.formats import visible
from isthmus.orchestrator.evidence.view.live import slow_now, slow_words
from isthmus.orchestrator.run_folder.log_files import LogReader
from isthmus.orchestrator.run_folder.state_lock import is_abandoned
from isthmus.orchestrator.runs.facts import (
    LinkFacts,
    SiteFacts,
    site_facts,
    to_json,
    total_facts,
)
from isthmus.orchestrator.runs.follower import JournalFollower, MetricsFollower
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.failure import Failure
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.run_spec import CodedPlan
from isthmus.topology.spec.world import Topology

SLICE = 256
"""Lines that are added before other threads get their turn."""
MAX_EVALUATIONS = 1000
"""The newest steps after which something was evaluated, so that they are not taken for stalls."""
READ_LATELY_S = 2.0
"""Metrics that were all read so lately say that no step was completed since the last."""
USUAL_DETECTION_S = 15.0
"""No stall is told before a loss would have been noticed: `failure.detect_within`, or this."""
MAX_PREDICTED_SITES = 64
"""With more sites than this, steps are not predicted: that would take long."""
NOW_S = 15.0
"""What a link carries now is measured over about so long."""
MAX_EVENTS = 1000
"""The newest events that are kept of a run."""
LOG_LINES = 12
"""The last lines that are shown of a failed rank's log."""
MAX_FINE_POINTS = 16 * MAX_POINTS
"""Points that are kept of a run, so that a part of it can be shown in more detail."""
KEPT_FIGURES_S = 1.0
"""Until a history was read, figures of so long ago will do: there are others at once."""
STEP_FIGURES = (metrics.STEP_S, *PARTS, metrics.HIDDEN_INTER_S, metrics.SITE_TOKENS)
LOSSES = (metrics.LOSS, metrics.HELD_OUT_LOSS)
_UP = ("PREPARED", "STARTING", "RUNNING", "RETURNING")
_SITES_UP = frozenset(control_pb2.SiteState.Value(f"SITE_STATE_{name}") for name in _UP)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that are shown: of the whole run, where nothing else is said."""

    first: int | None = None
    last: int | None = None
    is_newest: bool = False
    """The newest ones, one by one."""

    @property
    def query(self) -> str:
        """As an address has it."""
        if self.is_newest:
            return "window=newest"
        ends = {"first": self.first, "last": self.last}
        return "&".join(f"{name}={step}" for name, step in ends.items() if step is not None)


@dataclass(frozen=True)
class Described:
    """What was decided for a run when it was submitted; None: it cannot be read."""

    topology: Topology | None = None
    job: Job | None = None
    reduction: CodedPlan | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What its plan says beside that: orchestrator/plans.py; empty: it was not planned, or there
    not known."""

    @cached_property
    def predicted(self) -> tuple[PlannedStep | None, Mapping[str, float]]:
        """The step as the model predicts it, and that with each codec."""
        job, topology = self.job, self.topology
        if job is None or topology is None or len(topology.sites) > MAX_PREDICTED_SITES:
            return None, {}
        return planned_step(job, topology), codec_steps_s(job, topology)


class _LinkNow:
    """What was sent lately over a link."""

    __slots__ = ("samples",)

    def __init__(self) -> None:
        self.samples: deque[tuple[float, float]] = deque(maxlen=64)

    def add(self, wall_s: float, sent_bytes: float) -> None:
        self.samples.append((wall_s, sent_bytes))
        while len(self.samples) > 2 and wall_s - self.samples[1][0] >= NOW_S:
            self.samples.popleft()

    def bytes_per_s(self, now_s: float) -> float | None:
        if len(self.samples) < 2 or now_s - self.samples[-1][0] > 2 * NOW_S:
            return None
        (begin_s, begin), (end_s, end) = self.samples[0], self.samples[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else None


@dataclass(frozen=True, slots=True)
class _Source:
    """A run as verdict_facts takes it."""

    run: control_pb2.Run
    events: Sequence[RecordedEvent]
    job: Job | None
    topology: Topology | None
    plan: Mapping[str, Any]
    measured: RunMetrics


class _History:
    """Figures over the steps of a run, as its metrics are read."""

    def __init__(self, folder: Path, topology: Topology | None) -> None:
        self._topology = topology
        self.follower = MetricsFollower(folder)
        self.steps = StepSeries(MAX_FINE_POINTS, names=STEP_FIGURES)
        self.losses = StepSeries(MAX_FINE_POINTS)
        self.gaps = StepGaps()
        """Between steps, by the wall clock."""
        self.evaluated: deque[int] = deque(maxlen=MAX_EVALUATIONS)
        self.links_now: dict[tuple[str, str], _LinkNow] = {}
        self.last_s = 0.0
        self.is_complete = threading.Event()
        """Set once all was read that was there."""
        self.read_s = -math.inf
        """When all was read last that was there, on the monotonic clock."""
        self.share_read = 0.0
        self.version = 0
        """Changes with what is read."""
        self.made: dict[str, Any] = {}
        """The figures as they were made last, of which version, and when."""
        self.made_version, self.made_s = -1, -math.inf

    def add_loss(self, step: int, loss: float) -> None:
        self.losses.add(step, self.last_s, {metrics.LOSS: loss})

    def take(self, found: Measurement, record: RunRecord) -> None:
        """Take a measurement."""
        if found.site not in record.measured.sites:
            return
        if found.kind in {metrics.TIMELINE, metrics.BUCKET}:
            return
        self.last_s, step, values = found.wall_s, found.step, found.values
        record.measure(found)
        if found.kind == metrics.STEP:
            self.steps.add(step, found.wall_s, values)
            last = self.gaps.last
            if last is None or step > last.step:
                at_s = found.wall_s if last is None else max(last.at_s, found.wall_s)
                self.gaps.take(StepEnd(at_s, step, 0.0))
        elif found.kind == metrics.EVALUATION and metrics.HELD_OUT_LOSS in values:
            kept = {metrics.HELD_OUT_LOSS: values[metrics.HELD_OUT_LOSS]}
            self.losses.add(step, found.wall_s, kept)
            self.evaluated.append(step)
        elif found.kind == metrics.LINK and found.labels.get("source") == found.site:
            pair = (found.site, found.labels.get("target", ""))
            sent_bytes = record.measured.link(pair)[metrics.SENT_BYTES]
            self.links_now.setdefault(pair, _LinkNow()).add(found.wall_s, sent_bytes)

    def figures(self, record: RunRecord) -> dict[str, Any]:
        """Return the sums over the run, and of each site and link. Nobody may change them."""
        is_old = self.made_version != self.version
        if is_old and not self.is_complete.is_set():
            is_old = time.monotonic() - self.made_s > KEPT_FIGURES_S
        if is_old:
            self.made, self.made_version = self._made(record), self.version
            self.made_s = time.monotonic()
        return self.made

    def _made(self, record: RunRecord) -> dict[str, Any]:
        measured = record.measured
        return {
            "is_complete": self.is_complete.is_set(),
            "share_read": self.share_read,
            "num_lines": self.follower.num_lines,
            "num_odd": self.follower.num_odd,
            "last_wall_s": self.last_s or None,
            "totals": to_json(total_facts(measured)),
            "sites": site_facts(measured, self._topology),
            "links": {
                pair: (carried, self.links_now[pair].bytes_per_s(self.last_s))
                for pair, carried in measured.links.items()
            },
        }


class WatchedRun:
    """One run. One thread calls `read`; any may call the rest."""

    def __init__(self, place: RunPlace) -> None:
        """Read nothing yet."""
        self.place = place
        self.described = Described()
        self.view: tuple[tuple[object, object, float | None], dict[str, Any]] | None = None
        """What was made last of it (run_view.shown), and of what."""
        self.looked_at_s = 0.0
        self._folder: Path | None = None
        """The run's; None: nobody has looked at it."""
        self.opening = threading.Lock()
        """Held by whoever opens the metrics."""
        self._lock = threading.RLock()
        self._forget()

    def _forget(self, record: RunRecord | None = None, history: _History | None = None) -> None:
        """Begin anew with the journal, which is read again when somebody asks."""
        self._record, self._history = record or RunRecord(self.place.run_id), history
        self._journal: JournalFollower | None = None
        if self.place.state is not None:
            self._journal = JournalFollower(self.place.run_id, self.place.state)
        self._events: deque[RecordedEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._absences, self._lanes = Absences(), SiteLanes(())
        self._log: tuple[tuple[Failure, int], tuple[str, list[str]]] | None = None
        self._stamp: tuple[tuple[int, int], ...] = ()
        self._run: control_pb2.Run | None = None

    # ------------------------------------------------------------ what the journal says

    @property
    def is_elsewhere(self) -> bool:
        """Whether its coordinator is on another machine."""
        return self._journal is None

    @property
    def trouble(self) -> str:
        """Why its journal cannot be read; empty: it can."""
        return "" if self._journal is None else self._journal.trouble

    def run(self) -> control_pb2.Run:
        """Return the run as its journal has it now. Nobody may change what is returned."""
        assert self._journal is not None, "its journal is here"
        with self._lock:
            self._catch_up()
            is_lost = self._is_lost()
            run = self._run
            if run is None or is_lost != (run.reason_code == "COORDINATOR_LOST"):
                run = self._run = run_message(self._record.view, self._journal.progress())
                if is_lost:
                    self._tell_lost(run)
            return run

    @property
    def version(self) -> object:
        """What changes with what is shown of it."""
        history, state = self._history, self.place.state
        read = None if history is None else (id(history), history.version)
        is_abandoned_ = self.place.is_own and state is not None and is_abandoned(state)
        return read, state and (_stamp(state), is_abandoned_), self.stalled_wall_s

    def events(self, after: int = 0) -> list[RecordedEvent]:
        """Return the newest events with a sequence above `after`, in order."""
        with self._lock:
            self._catch_up()
            return [each for each in self._events if each.sequence > after]

    def all_events(self) -> list[RecordedEvent]:
        """Return every event of the run, read anew."""
        found: list[RecordedEvent] = []
        if self.place.state is not None:
            JournalFollower(self.place.run_id, self.place.state).read(found.append)
        return found

    @property
    def num_events(self) -> int:
        """All events of the run, those that are not kept among them."""
        return self._num_events

    @property
    def about(self) -> dict[str, Any]:
        """What the run was submitted with."""
        return dict(self._record.view.about)

    @property
    def active_wall_s(self) -> float | None:
        """Since when the run trains; None: it does not yet."""
        return self._record.view.active_s

    @property
    def num_training(self) -> int:
        """Sites whose part counts, and that are there."""
        return len(self._record.view.counted - self._absences.open.keys())

    @property
    def saved(self) -> tuple[int, float] | None:
        """Step and time of the newest checkpoint; None: there is none."""
        step, wall_s = self._record.view.progress.saved_step, self._absences.saved_wall_s
        return None if wall_s is None or step < 0 else (step, wall_s)

    @property
    def failure(self) -> Failure | None:
        """The first failure of the run, or of a site that is out."""
        view = self._record.view
        if view.failure is not None:
            return view.failure
        losses = [each for name in self._absences.open for each in view.members[name].losses]
        return first_failure(losses) if losses else None

    def last_log_lines(self) -> tuple[str, list[str]]:
        """Return whose log tells most of what broke first, and its last lines."""
        failure, folder = self.failure, self._folder
        if failure is None or not failure.site or folder is None:
            return "", []
        if (known := self._log) is not None and known[0] == (failure, self._num_events):
            return known[1]
        reader = LogReader(folder, site=failure.site, rank=failure.rank)
        reader.skip_to_tail(LOG_LINES)
        lines = deque((line.text for line in reader.read()), maxlen=LOG_LINES)
        found = failure.place, [visible(line) for line in lines]
        self._log = (failure, self._num_events), found
        return found

    def troubles(self) -> list[Trouble]:
        """Return what is wrong now, the worst first."""
        run, topology = self.run(), self.described.topology
        with self._lock:
            return troubles(
                run,
                self._record.view,
                self._absences,
                rules=None if topology is None else topology.failure,
                now_wall_s=time.time(),
                stalled_wall_s=self.stalled_wall_s,
                slow=[slow_words(each).partition(": ")[2] for each in slow_now(run)],
            )

    def _catch_up(self) -> None:
        """Read what is new in the journal."""
        state = self.place.state
        if state is None or self._journal is None or self._record.view.state.is_terminal:
            return  # nothing comes after its end
        stamp = _stamp(state)
        if stamp != self._stamp:
            self._journal.read(self._take_event)
            self._stamp, self._run = stamp, None

    def _take_event(self, event: RecordedEvent) -> None:
        self._record.apply(event)
        view = self._record.view
        if event.kind == EventKind.RUN_SUBMITTED:
            self._lanes = SiteLanes(tuple(view.sites))
        self._lanes.take(event, view)
        self._absences.take(event, view)
        self._events.append(event)
        self._num_events += 1

    def _is_lost(self) -> bool:
        """Whether the run had not ended when its own coordinator did."""
        has_begun = self.place.is_own and self._num_events > 0
        if not has_begun or self.place.state is None or self._record.view.state.is_terminal:
            return False
        return is_abandoned(self.place.state)

    def _tell_lost(self, run: control_pb2.Run) -> None:
        """Show it as the next coordinator would find it: JournalReader.final_view says the same."""
        end = coordinator_lost(self._record.view)
        run.state = control_pb2.RUN_STATE_FAILED
        run.reason_code, run.reason = end["reason_code"], end["reason"]
        for site in run.sites:
            if site.state in _SITES_UP:
                site.state = control_pb2.SITE_STATE_LOST

    # ------------------------------------------------------------ what its metrics say

    def open(self, folder: Path, sites: tuple[str, ...], flops: ModelFlops | None) -> None:
        """Have `read` read its metrics.

        Args:
            folder: The run's, with the metrics.
            sites: All of the run.
            flops: Finds MFUs; None: there are none.
        """
        with self._lock:
            history, self._folder = _History(folder, self.described.topology), folder
            record = RunRecord(
                self.place.run_id, sites, flops, on_loss=history.add_loss, is_brief=True
            )
            self._forget(record, history)

    def close(self) -> None:
        """Let go of its metrics."""
        with self._lock:
            self._forget()

    @property
    def is_open(self) -> bool:
        """Whether its metrics are read."""
        return self._history is not None

    def wait_read(self, within_s: float) -> None:
        """Return once all of the metrics was read that was there, or time is up."""
        if (history := self._history) is not None:
            history.is_complete.wait(within_s)

    def read(self, before_slice: Callable[[], object] = lambda: None) -> bool:
        """Take what is new of the metrics, some of it at once; return whether there was anything.

        `before_slice` is called again and again, and may wait for others' turn.
        """
        history = self._history
        if history is None:
            return False
        found, _ = history.follower.read()
        for begin in range(0, len(found), SLICE):
            before_slice()
            with self._lock:
                if history is not self._history:
                    return False
                self._catch_up()  # every event before the lines is in the journal
                for measurement in found[begin : begin + SLICE]:
                    history.take(measurement, self._record)
                history.version += 1
        if not history.is_complete.is_set():
            history.share_read = history.follower.share_read()
            if not found:
                history.is_complete.set()
                history.version += 1
        if not found:
            history.read_s = time.monotonic()
        return bool(found)

    def steps(self, window: Window) -> dict[str, Any]:
        """Return figures over steps and losses, in a window; empty: nothing is read of them."""
        with self._lock:
            if (history := self._history) is None:
                return {}
            return {
                name: series.to_json(
                    figures, window.first, window.last, newest_only=window.is_newest
                )
                for name, series, figures in (
                    ("steps", history.steps, STEP_FIGURES),
                    ("losses", history.losses, LOSSES),
                )
            }

    @property
    def last_step_wall_s(self) -> float | None:
        """When the last step was completed."""
        last = None if self._history is None else self._history.gaps.last
        return None if last is None else last.at_s

    @property
    def stalled_wall_s(self) -> float | None:
        """Since when no step was completed, where that is too long; None: it is not, or unknown."""
        history, view = self._history, self._record.view
        if history is None or history.gaps.last is None or view.state is not RunState.ACTIVE:
            return None
        if time.monotonic() - history.read_s > READ_LATELY_S:
            return None
        topology, last_s = self.described.topology, history.gaps.last.at_s
        noticed_s = USUAL_DETECTION_S if topology is None else topology.failure.detect_within_s
        evaluation_s = 2 * history.gaps.longest_s(history.evaluated)
        is_long = time.time() - last_s > max(history.gaps.limit_s, noticed_s, evaluation_s)
        return last_s if is_long else None

    def over_time(self) -> tuple[tuple[Stall, ...], tuple[SiteLane, ...]]:
        """Return when the run stood still, and what each site did, in seconds since it trains."""
        with self._lock:
            view, history = self._record.view, self._history
            if view.active_s is None or history is None:
                return (), ()
            begun_s = view.active_s
            known_s = max(begun_s, history.last_s, self._events[-1].wall_s)
            events = [(each.wall_s, each.kind, each.site) for each in self._events]
            found = history.gaps.stalls(events, (step + 1 for step in history.evaluated))
            stalls = tuple(
                replace(each, begin_s=each.begin_s - begun_s, end_s=each.end_s - begun_s)
                for each in found
            )
            return stalls, self._lanes.until((view.ended_wall_s or known_s) - begun_s)

    def verdict(
        self, run: control_pb2.Run, sites: Sequence[SiteFacts], links: Sequence[LinkFacts]
    ) -> Verdict:
        """Return how well the run uses its time."""
        described, (stalls, _) = self.described, self.over_time()
        planned, codecs = described.predicted
        with self._lock:
            source = _Source(
                run,
                self._events,
                described.job,
                described.topology,
                described.plan,
                self._record.measured,
            )
            return verdict(verdict_facts(source, sites, links, planned, stalls, codecs))

    def marks(self) -> list[StepMark]:
        """Return what happened, by steps."""
        with self._lock:
            return self._record.marks

    def figures(self) -> dict[str, Any]:
        """Return the sums over the run, and of each site and link. Nobody may change them."""
        with self._lock:
            return {} if self._history is None else self._history.figures(self._record)


def _stamp(state: Path) -> tuple[tuple[int, int], ...]:
    """Return what changes whenever the journal is written."""
    stamps = []
    for name in (FILE, f"{FILE}-wal"):
        try:
            status = (state / name).stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((status.st_mtime_ns, status.st_size))
    return tuple(stamps)
