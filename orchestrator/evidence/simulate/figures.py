"""A simulated run's figures in the form of a benchmark's. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from orchestrator.documents import Pair
from orchestrator.evidence.bench.figures import result_of
from orchestrator.evidence.bench.record import LinkBytes, Measured, Result, Run, Split
from orchestrator.evidence.simulate.prediction import predicted
from topology.simulator.run import SimulatedRun, coding_s

SIMULATED = "simulated"
"""In the place of an emulator."""


def setting_runs(
    run: SimulatedRun, alone: SimulatedRun, run_id: str, folder: str, wall_s: float, warmup: int
) -> tuple[Run, ...]:
    """Return the run of all sites, and one of each by itself.

    Args:
        run: of all sites together.
        alone: of sites that exchange nothing.
        run_id: of the run of all sites.
        folder: its own, relative to bench.json.
        wall_s: that simulating took.
        warmup: steps that do not count.
    """
    sites = range(len(run.work.sites))
    together = _run(run_id, folder, None, wall_s, _measured(run, sites, warmup))
    solo = [
        _run(f"{run_id}-{site.name}", folder, site.name, 0.0, _measured(alone, [index], warmup))
        for index, site in enumerate(run.work.sites)
    ]
    return (*solo, together)


def result(pair: Pair, runs: Sequence[Run], run: SimulatedRun, alone: SimulatedRun) -> Result:
    """Return a setting's figures; `predicted` is of the closed form, for the same links."""
    job = dataclasses.replace(
        pair.job, trainer=dataclasses.replace(pair.job.trainer, compute="modelled")
    )
    found = result_of(job, pair.topology, runs)
    assert found is not None, "all runs are there"
    return dataclasses.replace(found, predicted=predicted(pair, run, alone, found.step_s.mean))


def _run(run_id: str, folder: str, site: str | None, wall_s: float, measured: Measured) -> Run:
    return Run(
        kind="solo" if site else "all",
        site=site,
        repeat=0,
        run_id=run_id,
        folder=folder,
        emulator=SIMULATED,
        wall_s=wall_s,
        measured=measured,
    )


def _measured(run: SimulatedRun, sites: Sequence[int], warmup: int) -> Measured:
    """Return what those sites did, each step after the warm-up counting alike."""
    work = run.work
    coding = coding_s(work)
    steps = run.steps[warmup:]
    count = len(steps) * len(sites)
    parts = {
        name: math.fsum(getattr(step[site].parts, name) for step in steps for site in sites) / count
        for name in ("compute_s", "intra_s", "exposed_inter_s", "wait_s", "hidden_inter_s")
    }
    sent_bytes = math.fsum(link.sent_bytes for link in run.links)
    raw_bytes = math.fsum(link.raw_bytes for link in run.links)
    return Measured(
        tokens_per_s=math.fsum(
            work.sites[site].tokens / run.step_s(site, warmup) for site in sites
        ),
        tokens_per_step=math.fsum(work.sites[site].tokens for site in sites),
        step_s=math.fsum(run.step_s(site, warmup) for site in sites) / len(sites),
        split=Split(
            **parts,
            encode_s=math.fsum(coding[site][0] for site in sites) / len(sites),
            decode_s=math.fsum(coding[site][1] for site in sites) / len(sites),
        ),
        links=tuple(
            LinkBytes(source=link.source, target=link.target, bytes_per_step=link.sent_bytes)
            for link in run.links
        ),
        wire_ratio=sent_bytes / raw_bytes if raw_bytes else None,
    )
