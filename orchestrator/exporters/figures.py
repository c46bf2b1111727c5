"""What is exported of a run, made from its journal and its metrics. Pure: records in, figures out.

Three forms, for three kinds of tools: `samples` are all figures as they are now (Prometheus,
OpenTelemetry), `Point` has figures of one step (TensorBoard, W&B, MLflow), and `ExportedEvent`
is an event that people wait for (webhooks, and any tool that has a place for it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.core.event_kinds import seen_of
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import OPEN_STEPS
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.exporters import families
from isthmus.orchestrator.exporters.families import Family
from isthmus.orchestrator.runs.facts import link_facts, total_facts
from isthmus.orchestrator.runs.told_facts import described
from isthmus.protos import metrics
from isthmus.topology.spec.run_spec import RunSpec

PARTS = {
    metrics.COMPUTE_S: "compute",
    metrics.INTRA_S: "inside_site",
    metrics.EXPOSED_INTER_S: "exposed_wan",
    metrics.WAIT_S: "waiting",
}
"""What a step's time is split into, and the label of each part: they add up."""
LINKS_EVERY_S = 5.0
"""Seconds between two points with figures of links."""
USED_OVER_S = 2.0
"""Shortest time over which a link's use is counted: gateways report twice a second."""
_OUT = {"LOST", "DROPPED", "RETURNING"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure as it is now."""

    family: Family
    labels: tuple[str, ...]
    """The values of the family's own labels, in their order."""
    value: float


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of one step, by name; what is of one site or link has that after a slash."""

    step: int
    wall_s: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedEvent:
    """An event that people wait for."""

    event: str
    """One of EVENTS (topology/spec/exporters.py)."""
    kind: str
    """Its kind in the journal."""
    sequence: int
    """Its number in the journal."""
    wall_s: float
    site: str
    """Empty: none in particular."""
    step: int
    """The last that any site had taken."""
    text: str
    """A line for people."""
    detail: Mapping[str, Any]
    """As the journal has it."""


@dataclass(slots=True)
class _Use:
    """How much of a link was used lately."""

    wall_s: float
    sent_bytes: float
    share: float | None = None


@dataclass(slots=True)
class _OpenStep:
    """A step that not all sites have taken yet."""

    tokens_per_s: dict[str, float] = field(default_factory=dict)


class RunFigures:
    """All that is exported of one run. Give it the journal's events and the metrics in order."""

    def __init__(self, run_id: str, spec: RunSpec) -> None:
        """Know nothing yet but what the run is."""
        self.run_id, self.job = run_id, spec.job.name
        self._links = {(link.source, link.target): link for link in spec.topology.links}
        self._losses: list[tuple[int, float]] = []
        self._record = RunRecord(
            run_id,
            spec.site_names,
            on_loss=lambda step, loss: self._losses.append((step, loss)),
            is_brief=True,
        )
        self._view, self._metrics = self._record.view, self._record.measured
        self._counts: dict[str, int] = {}
        self._open: dict[int, _OpenStep] = {}
        self._uses: dict[tuple[str, str], _Use] = {}
        self._links_wall_s = -math.inf
        self._evaluated_step = -1

    @property
    def state(self) -> str:
        """The run's state, as the journal names it."""
        return self._view.state.value

    @property
    def submitted_s(self) -> float:
        """When the run was submitted, by the wall clock; 0: not known."""
        return self._view.created_wall_s

    @property
    def has_ended(self) -> bool:
        """Whether the run is in a state in which it stays."""
        return self._view.state.is_terminal

    def add_event(self, event: RecordedEvent) -> tuple[list[Point], list[ExportedEvent]]:
        """Take the run's next event; return what is new by it."""
        self._record.apply(event)
        self._record.reach(event.wall_s)
        points = list(self._new_losses(event.wall_s))
        name = seen_of(event.kind).exported
        if not name:
            return points, []
        self._counts[name] = self._counts.get(name, 0) + 1
        told = ExportedEvent(
            event=name,
            kind=event.kind,
            sequence=event.sequence,
            wall_s=event.wall_s,
            site=event.site,
            step=self._metrics.last_step,
            text=event.text,
            detail=event.detail,
        )
        return points, [told]

    def add_metric(self, measurement: Measurement) -> list[Point]:
        """Take a line of metrics.jsonl; return what is new by it."""
        site, kind, step = measurement.site, measurement.kind, measurement.step
        wall_s, values, labels = measurement.wall_s, measurement.values, measurement.labels
        if site not in self._metrics.sites or not self._record.measure(measurement):
            return []
        points = list(self._new_losses(wall_s))
        if kind == metrics.STEP:
            points += self._step_points(site, step, wall_s, values)
        elif kind == metrics.EVALUATION and step > self._evaluated_step:
            self._evaluated_step = step
            if metrics.HELD_OUT_LOSS not in values:
                return points
            points.append(Point(step, wall_s, {"held_out_loss": values[metrics.HELD_OUT_LOSS]}))
        elif kind == metrics.LINK and labels.get("source") == site:
            self._note_use((site, labels.get("target", "")), wall_s)
            points += self._link_points(wall_s)
        return points

    # ------------------------------------------------------------ figures of a step

    def _new_losses(self, wall_s: float) -> Iterator[Point]:
        for step, loss in self._losses:
            yield Point(step, wall_s, {"loss": loss})
        self._losses.clear()

    def _step_points(
        self, site: str, step: int, wall_s: float, values: Mapping[str, float]
    ) -> Iterator[Point]:
        of_site = {f"step_seconds/{site}": values.get(metrics.STEP_S)}
        of_site |= {f"{label}_seconds/{site}": values.get(name) for name, label in PARTS.items()}
        of_site[f"hidden_wan_seconds/{site}"] = values.get(metrics.HIDDEN_INTER_S)
        of_site[f"site_loss/{site}"] = _loss(values)
        rate = _tokens_per_s(values)
        of_site[f"site_tokens_per_second/{site}"] = rate
        yield Point(
            step, wall_s, {name: each for name, each in of_site.items() if each is not None}
        )
        counted = self._view.counted
        if rate is None or site not in counted:
            return
        open_step = self._open.setdefault(step, _OpenStep())
        open_step.tokens_per_s[site] = rate
        if open_step.tokens_per_s.keys() >= counted:
            yield Point(
                step, wall_s, {"tokens_per_second": math.fsum(open_step.tokens_per_s.values())}
            )
            self._open = {each: rest for each, rest in self._open.items() if each > step}
        elif len(self._open) > OPEN_STEPS:
            del self._open[min(self._open)]

    def _link_points(self, wall_s: float) -> Iterator[Point]:
        if not self._metrics.last_step or wall_s - self._links_wall_s < LINKS_EVERY_S:
            return
        self._links_wall_s = wall_s
        values = {
            f"{sample.family.prometheus.removeprefix('isthmus_').removesuffix('_total')}/"
            + "-to-".join(sample.labels): sample.value
            for sample in self._link_samples()
        }
        yield Point(self._metrics.last_step, wall_s, values)

    def _note_use(self, pair: tuple[str, str], wall_s: float) -> None:
        link = self._links.get(pair)
        if link is None:
            return
        use = self._uses.get(pair)
        for_s = USED_OVER_S if use is None else wall_s - use.wall_s
        if 0 <= for_s < USED_OVER_S:
            return
        sent_bytes, share = self._metrics.link(pair)[metrics.SENT_BYTES], None
        if use is not None and for_s > 0:  # else a clock was set
            share = (sent_bytes - use.sent_bytes) / (for_s * link.bytes_per_s)
        self._uses[pair] = _Use(wall_s, sent_bytes, share)

    # ------------------------------------------------------------ figures as they are now

    def samples(self) -> list[Sample]:
        """Return all figures that are known."""
        return [*self._run_samples(), *self._site_samples(), *self._link_samples()]

    def _run_samples(self) -> Iterator[Sample]:
        view, measured = self._view, self._metrics
        totals = total_facts(measured)
        yield Sample(families.RUN_INFO, (self.job,), 1.0)
        yield Sample(families.RUN_STATE, (view.state.value,), 1.0)
        yield Sample(families.EPOCH, (), view.epoch)
        yield Sample(families.MEMBERS, (), len(view.taking_part))
        for event, count in self._counts.items():
            yield Sample(families.EVENTS, (event,), count)
        yield Sample(families.STEP, (), totals.steps)
        if totals.loss is not None:
            yield Sample(families.LOSS, (), totals.loss)
        if totals.held_out_loss is not None:
            yield Sample(families.HELD_OUT_LOSS, (), totals.held_out_loss)
        rates = [
            _tokens_per_s(measured.sites[name].latest)
            for name in view.counted & measured.sites.keys()
            if view.sites[name].state.value not in _OUT
        ]
        if known := [rate for rate in rates if rate is not None]:
            yield Sample(families.TOKENS_PER_S, (), math.fsum(known))
        if view.progress.saved_step >= 0:
            yield Sample(families.CHECKPOINT_STEP, (), view.progress.saved_step)

    def _site_samples(self) -> Iterator[Sample]:
        for name, certificate in self._view.certificates.items():
            yield Sample(families.CERTIFICATE_ENDS, (name,), certificate.ends_wall_s)
        for name, shown in self._view.sites.items():
            yield Sample(families.SITE_STATE, (name, shown.state.value), 1.0)
        for name, site in self._metrics.sites.items():
            if not site.num_steps:
                continue
            yield Sample(families.STEPS, (name,), site.num_steps)
            yield Sample(families.TOKENS, (name,), site.tokens)
            if (loss := _loss(site.latest)) is not None:
                yield Sample(families.SITE_LOSS, (name,), loss)
            for family, key in (
                (families.STEP_TIME, metrics.STEP_S),
                (families.HIDDEN_TIME, metrics.HIDDEN_INTER_S),
            ):
                if key in site.latest:
                    yield Sample(family, (name,), site.latest[key])
            for key, part in PARTS.items():
                if key in site.latest:
                    yield Sample(families.PART_TIME, (name, part), site.latest[key])
                yield Sample(families.PART_TIME_TOTAL, (name, part), site.times_s[key])

    def _link_samples(self) -> Iterator[Sample]:
        measured = self._metrics.links
        for pair, link in self._links.items():
            yield Sample(families.DESCRIBED_RATE, pair, link.bytes_per_s)
            yield Sample(families.DESCRIBED_RTT, pair, link.rtt_s)
            if pair not in measured:
                continue
            latest = measured[pair]
            facts = link_facts(described(link), latest, active_s=None, step_s=None)
            yield Sample(families.SENT_BYTES, pair, facts.sent_bytes or 0.0)
            yield Sample(families.RAW_BYTES, pair, facts.raw_bytes or 0.0)
            if latest[metrics.LIMITED_S] > 0:
                rate = latest[metrics.LIMITED_BYTES] / latest[metrics.LIMITED_S]
                yield Sample(families.MEASURED_RATE, pair, rate)
            use = self._uses.get(pair)
            if use is not None and use.share is not None:
                yield Sample(families.UTILISATION, pair, use.share)
            if facts.rtt_s is not None:
                yield Sample(families.RTT, pair, facts.rtt_s)
            if facts.egress_usd is not None:
                yield Sample(families.EGRESS, pair, facts.egress_usd)


def _loss(values: Mapping[str, float]) -> float | None:
    """Return a site's loss; None while it catches up: a mean over no tokens is none."""
    return None if values.get(metrics.SITE_TOKENS) == 0 else values.get(metrics.LOSS)


def _tokens_per_s(values: Mapping[str, float]) -> float | None:
    tokens, step_s = values.get(metrics.SITE_TOKENS), values.get(metrics.STEP_S, 0.0)
    return tokens / step_s if tokens and step_s > 0 else None
