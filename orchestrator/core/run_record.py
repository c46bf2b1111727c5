"""What journal and metrics of one run amount to, taken line by line: the one record of a run. Pure.

The coordinator keeps it while the run goes on; whoever reads a run's files makes the same again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.orchestrator.core.event_kinds import seen_of
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.model_flops import ModelFlops
from isthmus.orchestrator.core.run_metrics import RunMetrics
from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch

MAX_MARKS = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of metrics.jsonl."""

    site: str
    """Empty: it is of the emulated WAN."""
    kind: str
    step: int
    wall_s: float
    values: Mapping[str, float]
    labels: Mapping[str, str]
    number: int = 0
    """Number of the line, counted from 0 over all parts of the file."""

    @classmethod
    def of(cls, record: Mapping[str, Any], number: int = 0) -> Measurement:
        """Return what a line says. JSON has no NaN: only a loss may be one again.

        Raises:
            ValueError: it makes no sense.
        """
        try:
            site, kind, step = record["site"], record["kind"], int(record["step"])
            wall_s, values = float(record["wall_s"]), {}
            for name, value in record["values"].items():
                figure = math.nan if value is None else value + 0.0
                if name == metrics.LOSS or math.isfinite(figure):
                    values[name] = figure
            labels = {str(name): str(value) for name, value in record["labels"].items()}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError("the line makes no sense") from error
        if not (isinstance(site, str) and isinstance(kind, str) and math.isfinite(wall_s)):
            raise ValueError("the line makes no sense")
        return cls(site, kind, step, wall_s, values, labels, number)


@dataclass(frozen=True, slots=True)
class StepMark:
    """An event that is drawn on the charts, and the last step that was done by then."""

    step: int
    event: RecordedEvent


class RunRecord:
    """The fold of a run's journal, and beside it all that the run has measured.

    Events may be taken before measurements that are older: which sites count, and where an event
    stands among the steps, is found by the wall clock.
    """

    def __init__(
        self,
        run_id: str,
        sites: Iterable[str] = (),
        flops: ModelFlops | None = None,
        *,
        first: Epoch | None = None,
        on_loss: Callable[[int, float], None] | None = None,
        is_brief: bool = False,
    ) -> None:
        """Know nothing yet.

        Args:
            run_id: The run.
            sites: All of the run; none: nothing that is measured is taken.
            flops: Finds MFUs; None: there are none.
            first: The epoch with which the run begins; None: who only looks needs no trees.
            on_loss: Told every step whose loss is known, and that loss.
            is_brief: Leave out the noise scale and who is slow, which take half of the time.
        """
        names = tuple(sites)
        self.view = JournaledRun(run_id, () if first is None else names, first)
        self.measured = RunMetrics(names, flops, on_loss, is_brief=is_brief)
        self._counting: tuple[Epoch, bool] | None = None
        """What decides which sites count: the epoch, and whether the run is active."""
        self._due: deque[tuple[float, frozenset[str] | RecordedEvent]] = deque()
        """Which sites count from when on, and marks: both later than what was measured."""
        self._marks: deque[StepMark] = deque(maxlen=MAX_MARKS)

    def apply(self, event: RecordedEvent, at_s: float | None = None) -> None:
        """Take the next event; `at_s` as in JournaledRun.apply."""
        view = self.view
        view.apply(event, at_s)
        if not self.measured.sites:
            return
        before, epoch, is_active = self._counting, view.epochs.epoch, view.active_s is not None
        if before is None or before[0] is not epoch or before[1] is not is_active:
            self._counting = (epoch, is_active)
            self._due.append((event.wall_s, view.counted & self.measured.sites.keys()))
        if seen_of(event.kind).is_mark:
            self._due.append((event.wall_s, event))

    def measure(self, measurement: Measurement) -> bool:
        """Take a measurement of a site of the run; return whether it is new (RunMetrics.add)."""
        self.reach(measurement.wall_s)
        return self.measured.add(
            measurement.site,
            measurement.kind,
            measurement.step,
            measurement.values,
            measurement.labels,
        )

    def reach(self, wall_s: float = math.inf) -> None:
        """Take what was measured by then for complete: nothing older comes."""
        while self._due and self._due[0][0] <= wall_s:
            _, due = self._due.popleft()
            if isinstance(due, RecordedEvent):
                self._marks.append(StepMark(self.measured.last_step, due))
            else:
                self.measured.count(due)

    @property
    def marks(self) -> list[StepMark]:
        """What is drawn on the charts, in order."""
        last_step = self.measured.last_step
        due = [each for _, each in self._due if isinstance(each, RecordedEvent)]
        return [*self._marks, *(StepMark(last_step, event) for event in due)]
