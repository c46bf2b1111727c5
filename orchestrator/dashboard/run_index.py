"""What metrics.jsonl of one run comes to, kept up while the file grows.

Lines are read once, in order, by one thread; answers are made from sums whose number does not grow
with the run. So no request reads the file, and how long one takes depends on the number of sites
and links only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.core.run_metrics import PARTS, RunMetrics
from isthmus.orchestrator.evidence.record.step_series import MAX_POINTS, StepSeries
from isthmus.orchestrator.exporters.run_follower import Line, RunFollower
from isthmus.protos import metrics

READ_BYTES = 512 << 10
"""Read at once: parsing them lets nobody answer for some milliseconds."""
SLICE = 256
"""Lines that are added before other threads get their turn."""
NOW_S = 15.0
"""What a link carries now is measured over about so long."""
MAX_MARKS = 200
MAX_FINE_POINTS = 16 * MAX_POINTS
"""Points that are kept of a run, so that a part of it can be shown in more detail."""
KEPT_FIGURES_S = 1.0
"""Until a history was read, figures of so long ago will do: there are others at once."""
STEP_FIGURES = (metrics.STEP_S, *PARTS, metrics.HIDDEN_INTER_S, metrics.SITE_TOKENS)
LOSSES = (metrics.LOSS, metrics.HELD_OUT_LOSS)
MARKED = {
    "site.lost": "lost",
    "site.gone": "gone",
    "site.dropped": "dropped",
    "site.returned": "returned",
    "run.replanned": "other trees",
}
"""Events that stand on the charts, and their words."""


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


@dataclass(frozen=True, slots=True)
class StepMark:
    """An event, and the last step that was done by then."""

    step: int
    words: str


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


class RunIndex:
    """The figures of one run. One thread calls `read`; any may ask."""

    def __init__(
        self,
        run_id: str,
        folder: Path,
        state: Path,
        sites: tuple[str, ...],
        flops: ModelFlops | None,
    ) -> None:
        """Read nothing yet.

        Args:
            run_id: The run.
            folder: Its folder, with the metrics.
            state: Its coordinator's, with the journal.
            sites: All of the run.
            flops: Finds MFUs; None: there are none.
        """
        self._follower = RunFollower(run_id, folder, state, READ_BYTES)
        self._lock = threading.Lock()
        self._view = JournaledRun(run_id)
        self._measured = RunMetrics(sites, flops, self._add_loss, is_brief=True)
        self._members: tuple[object, bool] = (None, True)
        """What decides who is counted: the epoch, and whether the run has not become active."""
        self._last_s = 0.0
        self._steps = StepSeries(MAX_FINE_POINTS, names=STEP_FIGURES)
        self._losses = StepSeries(MAX_FINE_POINTS)
        self._links_now: dict[tuple[str, str], _LinkNow] = {}
        self._marks: deque[StepMark] = deque(maxlen=MAX_MARKS)
        self._num_lines, self._num_odd = 0, 0
        self._figures: dict[str, Any] = {}
        self._figures_version, self._figures_s = -1, -math.inf
        """As `figures` made them last, of which version, and when."""
        self._share_read = 0.0
        self.version = 0
        """Changes with what is read."""
        self.is_complete = threading.Event()
        """Set once all was read that was there."""

    def read(self, before_slice: Callable[[], object] = lambda: None) -> bool:
        """Take what is new, some of it at once; return whether there was anything.

        `before_slice` is called again and again, and may wait for others' turn.
        """
        entries = self._follower.read()
        for begin in range(0, len(entries), SLICE):
            before_slice()
            with self._lock:
                for entry in entries[begin : begin + SLICE]:
                    self._take(entry)
                self.version += 1
        if not self.is_complete.is_set():
            self._share_read = self._follower.share_read()
        if not entries and not self.is_complete.is_set():
            self.is_complete.set()
            self.version += 1
        return bool(entries)

    def _take(self, entry: RecordedEvent | Line) -> None:
        if isinstance(entry, RecordedEvent):
            self._view.apply(entry)
            members = (self._view.epochs.epoch, self._view.active_s is None)
            if members[0] is not self._members[0] or members[1] is not self._members[1]:
                self._members = members
                self._measured.count(self._view.counted & self._measured.sites.keys())
            if entry.kind in MARKED:
                words = f"{entry.site} {MARKED[entry.kind]}".strip()
                self._marks.append(StepMark(self._measured.last_step, words))
            return
        self._num_lines += 1
        try:
            self._measure(entry.record)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            self._num_odd += 1  # it makes no sense, and is not believed

    def _measure(self, record: Mapping[str, Any]) -> None:
        kind, site = record["kind"], record["site"]
        if site not in self._measured.sites or kind in {metrics.TIMELINE, metrics.BUCKET}:
            return
        step, wall_s, labels = int(record["step"]), float(record["wall_s"]), record["labels"]
        values = {
            name: math.nan if value is None else value + 0.0  # of what is no number, TypeError
            for name, value in record["values"].items()
        }
        if not math.isfinite(wall_s):
            raise ValueError("want a time")
        self._last_s = wall_s
        self._measured.add(site, kind, step, values, labels)
        if kind == metrics.STEP:
            self._steps.add(step, wall_s, values)
        elif kind == metrics.EVALUATION and metrics.HELD_OUT_LOSS in values:
            self._add_to_losses(step, {metrics.HELD_OUT_LOSS: values[metrics.HELD_OUT_LOSS]})
        elif kind == metrics.LINK and labels.get("source") == site:
            pair = (site, labels.get("target", ""))
            sent_bytes = self._measured.link(pair)[metrics.SENT_BYTES]
            self._links_now.setdefault(pair, _LinkNow()).add(wall_s, sent_bytes)

    def _add_loss(self, step: int, loss: float) -> None:
        self._add_to_losses(step, {metrics.LOSS: loss})

    def _add_to_losses(self, step: int, values: Mapping[str, float]) -> None:
        self._losses.add(step, self._last_s, values)

    def steps(self, window: Window) -> dict[str, Any]:
        """Return figures over steps and losses, in a window."""
        with self._lock:
            return {
                name: series.to_json(
                    figures, window.first, window.last, newest_only=window.is_newest
                )
                for name, series, figures in (
                    ("steps", self._steps, STEP_FIGURES),
                    ("losses", self._losses, LOSSES),
                )
            }

    def marks(self) -> list[StepMark]:
        """Return what happened, by steps."""
        with self._lock:
            return list(self._marks)

    def figures(self) -> dict[str, Any]:
        """Return the sums over the run, and of each site and link. Nobody may change them."""
        with self._lock:
            is_old = self._figures_version != self.version
            if is_old and not self.is_complete.is_set():
                is_old = time.monotonic() - self._figures_s > KEPT_FIGURES_S
            if is_old:
                self._figures, self._figures_version = self._made_figures(), self.version
                self._figures_s = time.monotonic()
            return self._figures

    def _made_figures(self) -> dict[str, Any]:
        measured = self._measured
        return {
            "is_complete": self.is_complete.is_set(),
            "share_read": self._share_read,
            "num_lines": self._num_lines,
            "num_odd": self._num_odd,
            "last_wall_s": self._last_s or None,
            "counts_tokens": measured.counts_tokens is not False,
            "totals": measured.totals(),
            "sites": {
                name: {
                    "num_steps": site.num_steps,
                    "step": site.step,
                    "tokens": site.tokens,
                    "step_s": site.step_s,
                    "parts_s": dict(site.times_s),
                }
                for name, site in measured.sites.items()
            },
            "links": {
                pair: {**latest, "now_bytes_per_s": self._links_now[pair].bytes_per_s(self._last_s)}
                for pair, latest in measured.links.items()
            },
        }
