"""What the runs of one setting come to. Pure: measured runs in, a result out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from orchestrator.evidence.bench.interval import interval
from orchestrator.evidence.bench.prediction import predict
from orchestrator.evidence.bench.record import LinkUse, Measured, Result, Run, SiteSpeed, Split
from topology.job import Job
from topology.world import Topology

_PARTS = ("compute", "intra", "exposed_inter", "wait")


def result_of(job: Job, topology: Topology, runs: Sequence[Run]) -> Result | None:
    """Return the figures of a setting, or None before any repeat is complete.

    Each repeat's efficiency is that of its own runs: what slows the machine down for minutes slows
    down both sides of the division.

    Args:
        job: Of the runs of all sites.
        topology: Likewise.
        runs: Of the setting, failed ones too.
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
        shares={part: getattr(split, f"{part}_s") / step_s.mean for part in _PARTS},
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
    return Split(**{name: _mean([getattr(each, name) for each in splits]) for name in names})


def _links(topology: Topology, measured: Sequence[Measured]) -> tuple[LinkUse, ...]:
    """Return what steps made of each link; one that no tree uses carried nothing."""
    step_s = _mean([each.step_s for each in measured])
    tokens = _mean([each.tokens_per_step for each in measured])
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
        num_bytes = _mean(carried)
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
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
