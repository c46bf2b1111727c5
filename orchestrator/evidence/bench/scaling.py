"""The scaling benchmark: makes its runs one after the other, and forms the figures of each setting.

A setting also has a prediction: what a step should take by the topology's figures alone. With the
exchange off that is a site's compute time, and the mean over sites, which do not wait for each
other; else it is what the step model says (topology/model/step_model.py), and in another regime
than sync the closed form of its rounds (topology/cost/local_sgd.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.bench.experiment import RUNS, Experiment, Part
from isthmus.orchestrator.evidence.bench.sweep_settings import Planned, Point, planned_runs
from isthmus.orchestrator.evidence.record.bench_record import (
    BENCH,
    Bench,
    Failed,
    LinkUse,
    Made,
    Measured,
    Predicted,
    Result,
    Run,
    SiteSpeed,
    Split,
    interval,
)
from isthmus.orchestrator.evidence.record.measured_steps import measure
from isthmus.orchestrator.evidence.view import formats
from isthmus.topology.cost.local_sgd import regime_step_s
from isthmus.topology.model.buckets import buckets_of
from isthmus.topology.model.step_model import step_time
from isthmus.topology.simulator.step_work import GatewayCost, trainer_work
from isthmus.topology.spec.compute import site_shares, step_compute_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.codec_costs import RATIOS


@dataclass(slots=True, kw_only=True)
class Scaling(Experiment[Bench]):
    """The scaling benchmark: what is done is not done again, and what failed before is."""

    file: str = BENCH
    points: Sequence[Point]
    """One for each of its settings, in their order."""
    faults: Sequence[str] = ()
    """What names the fault script of the runs with links."""

    def __post_init__(self) -> None:
        kept = [
            dataclasses.replace(each, runs=tuple(run for run in each.runs if run.measured))
            for each in self.bench.settings
        ]
        self.bench = dataclasses.replace(self.bench, settings=tuple(kept))

    def parts(self) -> list[Part]:
        """Return every run that is missing."""
        planned_all = planned_runs(self.points, self.bench.question.repeats)
        return [
            Part(f"{each.site}/{each.key}", self._name(each), partial(self._make, each))
            for each in planned_all
            if not self._is_made(each)
        ]

    def _name(self, planned: Planned) -> str:
        overrides = self.points[planned.setting].overrides
        # A solo run is shared by settings: naming one of them would say too much.
        swept = "" if planned.site else " ".join(f"{k}={v}" for k, v in overrides.items())
        what = f"{planned.site} alone" if planned.site else "all sites"
        return ", ".join(filter(None, [f"repeat {planned.repeat + 1}", swept, what]))

    def _is_made(self, planned: Planned) -> bool:
        return any(
            (run.site, run.repeat) == (planned.site, planned.repeat)
            for run in self.bench.settings[planned.setting].runs
        )

    def _make(self, planned: Planned) -> tuple[str, str | Failed]:
        point, question = self.points[planned.setting], self.bench.question
        pair = point.together if planned.site is None else point.solo[planned.site]

        def figures(records: Iterable[Mapping[str, Any]], _: Made) -> Measured:
            return measure(
                records,
                pair.topology,
                warmup_steps=question.warmup_steps,
                steps=question.steps,
            )

        made, measured = self.made(pair, figures, self.faults if planned.site is None else ())
        run = Run(
            **made.fields(),
            kind="all" if planned.site is None else "solo",
            site=planned.site,
            repeat=planned.repeat,
            folder=f"{RUNS}/{made.run_id}",
            wall_s=self.runs_s[-1],
            measured=measured,
        )
        self._keep(planned, run)
        if measured is None:
            assert run.failed is not None
            return run.run_id, run.failed
        speed = formats.count(measured.tokens_per_s)
        return run.run_id, f"{speed} tokens/s, {formats.duration(measured.step_s)} a step"

    def _keep(self, planned: Planned, run: Run) -> None:
        settings = list(self.bench.settings)
        for index, point in enumerate(self.points):
            is_shared = planned.site and point.solo_keys.get(planned.site) == planned.key
            if index != planned.setting and not is_shared:
                continue
            runs = (*settings[index].runs, run)
            pair = point.together
            settings[index] = dataclasses.replace(
                settings[index], runs=runs, result=result_of(pair.job, pair.topology, runs)
            )
        self.keep(settings=tuple(settings))


def result_of(job: Job, topology: Topology, runs: Sequence[Run]) -> Result | None:
    """Return the figures of a setting, or None before any repeat is complete.

    Each repeat's efficiency is that of its own runs: what slows the machine down for minutes slows
    down both sides of the division.
    """
    repeats = _complete_repeats(topology, runs)
    if not repeats:
        return None
    together = [each[None] for each in repeats]
    solo = [[each[site.name] for site in topology.sites] for each in repeats]
    measured = [_figures(run) for run in together]
    solo_sums = [math.fsum(_figures(run).tokens_per_s for run in each) for each in solo]
    step_s = interval([each.step_s for each in measured])
    split = _mean_split([each.split for each in measured])
    emulators = sorted({run.emulator for run in together})
    return Result(
        compute="modelled" if job.trainer.compute == "modelled" else "real",
        schedule=job.exchange.schedule,
        emulator="+".join(emulators),
        efficiency=interval(
            [each.tokens_per_s / alone for each, alone in zip(measured, solo_sums, strict=True)]
        ),
        tokens_per_s=interval([each.tokens_per_s for each in measured]),
        solo=tuple(
            SiteSpeed(
                site=site.name,
                tokens_per_s=interval([_figures(each[site.index]).tokens_per_s for each in solo]),
            )
            for site in topology.sites
        ),
        step_s=step_s,
        split=split,
        shares={part.removesuffix("_s"): getattr(split, part) / step_s.mean for part in PARTS},
        links=_links(topology, measured),
        predicted=predict(job, topology, emulators[0], _ratio(measured), step_s.mean),
    )


def _complete_repeats(topology: Topology, runs: Sequence[Run]) -> list[dict[str | None, Run]]:
    """Return the repeats of which every run has figures: runs by site, None for all together."""
    wanted = {None, *(site.name for site in topology.sites)}
    found: dict[int, dict[str | None, Run]] = {}
    for run in runs:
        if run.measured is not None:
            found.setdefault(run.repeat, {})[run.site] = run
    return [found[repeat] for repeat in sorted(found) if found[repeat].keys() == wanted]


def _figures(run: Run) -> Measured:
    assert run.measured is not None, "only complete repeats are looked at"
    return run.measured


def _mean_split(splits: Sequence[Split]) -> Split:
    names = [field.name for field in dataclasses.fields(Split)]
    return Split(**{name: fmean([getattr(each, name) for each in splits]) for name in names})


def _links(topology: Topology, measured: Sequence[Measured]) -> tuple[LinkUse, ...]:
    """Return what steps made of each link; one that no tree uses carried nothing."""
    step_s = fmean([each.step_s for each in measured])
    tokens = fmean([each.tokens_per_step for each in measured])
    uses = []
    for link in topology.links:
        carried = [
            sum(
                one.bytes_per_step
                for one in each.links
                if (one.source, one.target) == (link.source, link.target)
            )
            for each in measured
        ]
        num_bytes = fmean(carried)
        usd = num_bytes * link.egress_usd_per_byte
        uses.append(
            LinkUse(
                source=link.source,
                target=link.target,
                bytes_per_s=link.bytes_per_s,
                rtt_s=link.rtt_s,
                loss=link.loss,
                bytes_per_step=num_bytes,
                utilisation=num_bytes / (link.bytes_per_s * step_s),
                egress_usd_per_step=usd,
                egress_usd_per_1e9_tokens=usd / tokens * 1e9,
            )
        )
    return tuple(uses)


def _ratio(measured: Sequence[Measured]) -> float | None:
    known = [each.wire_ratio for each in measured if each.wire_ratio is not None]
    return fmean(known) if known else None


def predict(
    job: Job, topology: Topology, emulator: str, wire_ratio: float | None, step_s: float
) -> Predicted | None:
    """Return the prediction for a step that was measured to take `step_s`.

    None where the model's times say nothing: compute is real, or the script is the user's own.

    Without packets, with the `relay`, there are no headers. `wire_ratio` is bytes sent for each
    byte of float32, as measured: codecs that compress do so by what gradients hold.
    """
    if job.trainer.compute != "modelled" or job.entrypoint is not None:
        return None
    # What is emulated stays so: such sites may buffer more than a host's TCP.
    is_emulated = topology.emulate or emulator == "relay"
    topology = dataclasses.replace(topology, emulator=emulator, emulate=is_emulated)
    by_site_s = [_alone_s(job, topology, site) for site in topology.sites]
    shares = [sum(site_shares(job, topology, site)) for site in topology.sites]
    if job.exchange.schedule == "off":
        return by_themselves(by_site_s, step_s)
    # What was measured is a mean over all links: of several codecs it says nothing about one.
    is_known = bool(job.exchange.codecs) or job.exchange.codec in RATIOS
    predicted = step_time(job, topology, None if is_known else wire_ratio)
    expected_s = predicted.step_s
    if not job.regime.is_sync:
        expected_s = regime_step_s(job.regime, max(by_site_s), predicted.exchange_s)
    return together(shares, by_site_s, predicted.exchange_s, expected_s, step_s)


def _alone_s(job: Job, topology: Topology, site: Site) -> float:
    """Return a site's step by itself: its compute, and what collectives inside it add to that."""
    if site.fabric is None:
        return step_compute_s(job, topology, site)
    buckets = buckets_of(job.trainer.model, job.exchange.bucket_bytes)
    work = trainer_work(job, topology, site, buckets, GatewayCost(0))
    return work.alone_s(1.0, is_serial=False)[1]


def by_themselves(alone_s: Sequence[float], step_s: float) -> Predicted:
    """Return the prediction for sites that exchange nothing; arguments as of `together`."""
    mean_s = fmean(alone_s)
    return Predicted(
        compute_s=mean_s,
        exchange_s=0.0,
        step_s=mean_s,
        efficiency=1.0,
        deviation=step_s / mean_s - 1,
    )


def together(
    shares: Sequence[float],
    alone_s: Sequence[float],
    exchange_s: float,
    expected_s: float,
    step_s: float,
) -> Predicted:
    """Return the prediction for sites that wait for each other.

    Args:
        shares: of a step's work, each site's, in any unit.
        alone_s: each site's step by itself.
        exchange_s: if nothing hid it.
        expected_s: the step of all.
        step_s: as it was measured or simulated.
    """
    alone = math.fsum(share / site_s for share, site_s in zip(shares, alone_s, strict=True))
    return Predicted(
        compute_s=max(alone_s),
        exchange_s=exchange_s,
        step_s=expected_s,
        efficiency=math.fsum(shares) / expected_s / alone,
        deviation=step_s / expected_s - 1,
    )
