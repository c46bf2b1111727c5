"""Finds a better reduction for a running job, and a codec if it may change.

All other decisions stay. A tree's codec follows from its links (topology/trees/link_codecs.py), so
it changes with the reduction. Where the job permits less exact codecs, the run has the most exact
one with which a step is nearly as quick as with any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.topology.cost.local_sgd import regime_step_s
from isthmus.topology.documents.placement import placed
from isthmus.topology.planner.alternatives import even_split
from isthmus.topology.planner.choice import Choice, Sizing
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.planner.reductions import named
from isthmus.topology.planner.search import Search
from isthmus.topology.spec.job import Job, Placed, Reduction
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.world import Site, Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS
from isthmus.topology.trees.tree_choice import plan_reduction

NEAR = 0.05
"""What a step may take longer, as a share of the quickest codec's, for a more exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The best reduction for a run, compared with its present one."""

    form: str
    """The form's name for people: `star at oregon`."""
    reduction: Reduction
    """The reduction as a job writes it; the run's own, if nothing is better."""
    before_s: float
    """Predicted seconds of a step with the run's present reduction."""
    after_s: float
    """Predicted seconds of a step with this reduction; the same, if nothing is better."""
    codec: str
    """The exchange's."""


def best_switch(
    job: Job,
    topology: Topology,
    cut_bytes: int,
    allows: Callable[[Reduction], bool] = lambda _: True,
) -> Switch:
    """Return the reduction with the shortest step for a run.

    Args:
        job: The running job, including its reduction.
        topology: Topology with all sites, and the current figures of links.
        cut_bytes: float32 bytes of the run's chunks, which do not change during the run.
        allows: Whether a reduction other than the run's own may be chosen.

    Raises:
        ConfigError: the run's steps cannot be predicted.
    """
    here = placed(job, topology)
    job = _as_it_runs(job, here, cut_bytes)
    present = named(plan_reduction(job, here), [site.name for site in here.sites])
    size = Sizing(chunk_bytes=cut_bytes, bucket_bytes=job.exchange.bucket_bytes)
    now = Search(dataclasses.replace(job, reduction=present), here, (size,)).best()
    assert now is not None, "a run goes on with it"
    best = Search(dataclasses.replace(job, reduction=Reduction()), here, (size,), allows).best()
    before_s = _step_s(now, job, here)
    after_s = before_s if best is None else _step_s(best, job, here)
    if best is None or after_s >= before_s:
        return Switch(
            form=now.candidate.plan.why,
            reduction=present,
            before_s=before_s,
            after_s=before_s,
            codec=job.exchange.codec,
        )
    return Switch(
        form=best.candidate.form,
        reduction=best.candidate.reduction,
        before_s=before_s,
        after_s=after_s,
        codec=job.exchange.codec,
    )


def as_fast_as_measured(
    job: Job, topology: Topology, cut_bytes: int, compute_s: Mapping[str, float]
) -> Topology:
    """Return a topology whose sites compute a step of a run for as long as was measured.

    Args:
        job: As `best_switch`, with the placement that the run has by now.
        topology: Likewise.
        cut_bytes: Likewise.
        compute_s: Seconds of each site.

    Raises:
        ConfigError: the run's steps cannot be predicted.
    """
    here = placed(job, topology)
    job = _as_it_runs(job, here, cut_bytes)
    size = Sizing(chunk_bytes=cut_bytes, bucket_bytes=job.exchange.bucket_bytes)
    now = Search(job, here, (size,)).best()
    assert now is not None, "a run goes on with it"
    alone_s = {name: each.alone_s for name, each in zip(now.sites, now.timings, strict=True)}

    def as_measured(site: Site) -> Site:
        mfu = site.accelerator.mfu * alone_s[site.name] / compute_s[site.name]
        return dataclasses.replace(site, accelerator=dataclasses.replace(site.accelerator, mfu=mfu))

    return dataclasses.replace(topology, sites=tuple(map(as_measured, topology.sites)))


def _step_s(choice: Choice, job: Job, topology: Topology) -> float:
    """Return the seconds of a step of a choice, under the run's regime."""
    if job.regime.is_sync:
        return choice.step_s
    alone_s = max(each.alone_s for each in choice.timings)
    exchange_s = choice.model(job, topology).exchange_s(choice.timings)
    return regime_step_s(job.regime, alone_s, exchange_s)


def on_best_rung(
    job: Job, topology: Topology, cut_bytes: int, switch: Switch, codecs: Sequence[str]
) -> Switch:
    """Return a switch to the same reduction with the codec that a run is to have on these links.

    Args:
        job: As `best_switch`, with the codec that the run has by now.
        topology: Likewise.
        cut_bytes: Likewise.
        switch: The best with that codec.
        codecs: Those that the run may have, the exchange's own first.
    """
    job = _as_it_runs(job, placed(job, topology), cut_bytes)
    steps = {switch.codec: switch.after_s}
    for codec in codecs:
        if codec in steps:
            continue
        exchange = dataclasses.replace(job.exchange, codec=codec)
        other = dataclasses.replace(job, exchange=exchange, reduction=switch.reduction)
        size = Sizing(chunk_bytes=cut_bytes, bucket_bytes=exchange.bucket_bytes)
        here = placed(other, topology)
        found = Search(other, here, (size,)).best()
        assert found is not None, "a run goes on with it"
        steps[codec] = _step_s(found, other, here)
    limit_s = (1 + NEAR) * min(steps.values())
    near = [codec for codec in codecs if steps[codec] <= limit_s]
    codec = min(near, key=lambda each: RELATIVE_ERRORS[each])
    return dataclasses.replace(switch, codec=codec, after_s=steps[codec])


def _as_it_runs(job: Job, topology: Topology, cut_bytes: int) -> Job:
    """Return a job whose plan may decide only the reduction."""
    exchange = dataclasses.replace(job.exchange, chunk_bytes=cut_bytes, is_cut=True)
    gateways = "measured" if job.plan is None else job.plan.gateways
    placement = job.placement or tuple(
        Placed(site=site.name, sequences=count)
        for site, count in zip(topology.sites, even_split(job, topology), strict=True)
    )
    budget = None if job.plan is None else job.plan.budget_usd_per_s
    wishes = PlanWishes(sites="all", gateways=gateways, budget_usd_per_s=budget)
    return dataclasses.replace(job, exchange=exchange, placement=placement, plan=wishes)


def relaunched_s(job: Job, topology: Topology) -> float:
    """Return the predicted seconds of a step if the job were planned anew, in all respects.

    Raises:
        ConfigError: nothing can be planned.
    """
    free = dataclasses.replace(job, placement=(), reduction=Reduction())
    step_s: float = make_plan(free, topology)["predicted"]["step_s"]
    return step_s
