"""Makes a plan, as plain values for topology/planner/document.py."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from isthmus.topology.cost.money import egress_usd
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.alternatives import Alternatives, sent_bytes
from isthmus.topology.planner.choice import Choice
from isthmus.topology.planner.cuts import in_words
from isthmus.topology.planner.explain import (
    binding,
    efficiency,
    num_tokens,
    sentences,
    timed_sets,
)
from isthmus.topology.planner.memory_fit import too_large
from isthmus.topology.planner.regime import Candidate, chosen, is_asked, waits
from isthmus.topology.planner.regime import sentences as regime_sentences
from isthmus.topology.planner.search import Search
from isthmus.topology.planner.sources import inputs, warnings
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.hashing import plan_hashes
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.model_shape import utilisation, workload_described
from isthmus.topology.spec.units import format_size
from isthmus.topology.spec.world import Site, Topology

_FRONT = 8
"""Number of a site's undominated cuts (time, memory) that are listed, the fastest first."""
_LACKING = 3
"""Number of listed cuts that would be faster if they fitted."""


def make_plan(job: Job, topology: Topology) -> dict[str, Any]:
    """Return the best plan for a job on a topology, as the plain values of its file.

    Args:
        job: Its `plan` section says what may be decided. Its placement is kept.
        topology: Described in full.

    Raises:
        ConfigError: nothing can be planned, or no set of sites can run the job.
    """
    if job.exchange.schedule == "off":
        raise _refused("exchange.schedule", "off exchanges nothing: there is nothing to plan")
    _check_prices(job, topology)
    search = Search(job, topology)
    best = search.best()
    if best is None:
        raise _impossible(search)
    others = Alternatives(search, best)
    regime, texts = _regime(others)
    if regime is not None and regime.timed.choice is not others.choice:
        others = Alternatives(search, regime.timed.choice, is_fixed=True)
    choice = others.choice
    decided, here = choice.job(job), choice.topology(topology)
    model = StepModel(decided, here, choice.candidate.plan)
    job_hash, topology_hash = plan_hashes(job, topology)
    within = _inside(search, choice) if job.workload is not None else []
    predicted = _predicted(search, choice, model, regime)
    _check_budget(search, choice, predicted)
    plain: dict[str, Any] = {
        "version": 1,
        "made_for": {"job": job_hash, "topology": topology_hash},
        "decisions": decisions(choice, job),
        "predicted": predicted,
        "binding": binding(search, choice, model) if regime is None else waits(regime),
        "why": [*sentences(others, model, within), *texts, *_budget_texts(others, predicted)],
        "warnings": [
            *warnings(job, topology, choice),
            *too_large(decided, here),
        ],
        "alternatives": others.listed(),
        "sites": others.sites(),
        "links": others.links(model, 1 if regime is None else regime.regime.sync_every),
        "inputs": inputs(search, choice),
    }
    if within:
        plain["inside"] = within
    if regime is not None and job.regime.is_sync:
        plain["decisions"]["regime"] = regime.decision()
    rounded: dict[str, Any] = _rounded(plain)
    return rounded


def _regime(others: Alternatives) -> tuple[Candidate | None, list[str]]:
    """Return the regime to run, None for `sync`, and sentences on it."""
    own, wishes = others.search.job.regime, others.search.wishes
    if not is_asked(own, wishes):
        return None, []
    best, found = chosen(own, wishes, others.choice, timed_sets(others))
    if not found:
        return None, []
    return best, regime_sentences(best, found, wishes, others.choice)


def decisions(choice: Choice, job: Job) -> dict[str, Any]:
    """Return a choice's decisions in the format of a job."""
    reduction = choice.candidate.reduction
    written: dict[str, Any] = {"tree": reduction.tree}
    if reduction.trees:
        written = {
            "trees": [
                {"root": tree.root, "parents": dict(tree.parents), "weight": tree.weight}
                | ({} if tree.down is None else {"down": dict(tree.down)})
                for tree in reduction.trees
            ]
        }
    channels = job.exchange.channels_per_link
    exchange: dict[str, Any] = {"codec": choice.coding.codec}
    if choice.coding.links and not job.exchange.codecs:
        exchange["codecs"] = [
            {"between": list(each.between), "codec": each.codec} for each in choice.coding.links
        ]
    placement: list[dict[str, Any]] = []
    for each in choice.job(job).placement:
        placement.append({"site": each.site, "sequences": each.sequences})
        if job.workload is not None and each.parallel is not None:
            placement[-1]["parallel"] = dataclasses.asdict(each.parallel)
    decided: dict[str, Any] = {
        "placement": placement,
        "exchange": {
            **exchange,
            "chunk": format_size(choice.sizing.chunk_bytes),
            "bucket": format_size(choice.sizing.bucket_bytes),
            "channels_per_link": "auto" if channels is None else channels,
        },
        "reduction": written,
    }
    if job.workload is None:
        decided["micro_batch"] = choice.micro_batch
    return decided


def _predicted(
    search: Search, choice: Choice, model: StepModel, regime: Candidate | None
) -> dict[str, float]:
    step_s = choice.step_s if regime is None else regime.step_s
    period = 1 if regime is None else regime.regime.sync_every
    return {
        "step_s": step_s,
        "compute_s": max(each.alone_s for each in choice.timings),
        "exchange_s": model.exchange_s(choice.timings),
        "efficiency": efficiency(search, choice) * choice.step_s / step_s,
        "tokens_per_s": num_tokens(search.job) / step_s,
        "egress_bytes_per_step": math.fsum(model.link_bytes.values()) / period,
        "usd_per_step": choice.usd_per_step if regime is None else regime.usd_per_step,
        **_egress(search, choice, model, period),
    }


def _egress(search: Search, choice: Choice, model: StepModel, period: int) -> dict[str, float]:
    """Return the price of what crosses: of a step, of one in float32, and of all steps."""
    job, here = choice.job(search.job), choice.topology(search.topology)
    exchange = dataclasses.replace(job.exchange, codec="fp32", codecs=())
    as_fp32 = dataclasses.replace(job, exchange=exchange)
    usd = egress_usd(here, sent_bytes(here, model)) / period
    if not usd:
        return {}
    raw = StepModel(as_fp32, here, choice.candidate.plan)
    prices = {
        "egress_usd_per_step": usd,
        "fp32_egress_usd_per_step": egress_usd(here, sent_bytes(here, raw)) / period,
    }
    if job.entrypoint is None:
        prices["egress_usd_per_run"] = usd * job.trainer.steps
    return prices


def _inside(search: Search, choice: Choice) -> list[dict[str, Any]]:
    """Return details of each site's cut, and the cuts it was chosen from."""
    return [
        _inside_site(search, search.topology.site(name), choice, index)
        for index, name in enumerate(choice.sites)
    ]


def _inside_site(search: Search, site: Site, choice: Choice, index: int) -> dict[str, Any]:
    timing, count = choice.timings[index], choice.sequences[index]
    assert search.job.workload is not None, "sites cut what a job describes"
    assert timing.cut is not None, "sites cut what a job describes"
    cuts, degrees = search.options.cuts[site.name], timing.cut.degrees
    step = cuts.step(degrees, count)
    flops = workload_described(search.job.workload).model_flops(count)
    return {
        "site": site.name,
        "cut": in_words(degrees),
        "micro_batches": step.num_micro_batches,
        "alone_s": timing.alone_s,
        "busy_s": step.compute_s,
        "collectives_s": step.exchange_s,
        "transfers_s": step.transfers_s,
        "bubble_s": step.bubble_s,
        "exposed_s": step.gradients.exposed_s + step.parameters.exposed_s,
        "optimizer_s": step.optimizer_s,
        "window_s": timing.cut.window_s,
        "memory_bytes": timing.cut.memory_bytes(count),
        "memory_of_bytes": site.accelerator.memory_bytes,
        "fullest_node": timing.cut.node_share,
        "mfu": utilisation(flops, choice.step_s, site.num_ranks, max_peak(site)),
        "front": [
            {"cut": in_words(cut.degrees), "alone_s": each.alone_s, "memory_bytes": needed}
            for each, cut, needed in cuts.front(count)[:_FRONT]
        ],
        "too_large": cuts.lacking(count, timing.alone_s, _LACKING),
    }


def max_peak(site: Site) -> float:
    """Return the peak FLOP/s for MFU: that of the cost model."""
    peaks = site.accelerator.peak_flops_per_s
    return peaks.get("bf16", max(peaks.values()))


def _rounded(value: Any) -> Any:  # noqa: ANN401 - any plain value
    """Round all floats in a value to six significant digits."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
    return value


def _impossible(search: Search) -> ConfigError:
    """Return why there is no plan."""
    job, topology = search.job, search.topology
    section, model = ("trainer", "trainer.model") if job.entrypoint is None else ("workload",) * 2
    if job.workload is not None:
        reasons = [
            f"{name}: {cuts.closest()}"
            for name, cuts in search.options.cuts.items()
            if not cuts.cuts
        ]
        if not reasons and search.wishes.sites == "all":
            least = {
                name: min(cut.degrees.data for cut in cuts.cuts)
                for name, cuts in search.options.cuts.items()
            }
            if job.workload.global_batch < sum(least.values()):
                return _too_few(section, least, job.workload.global_batch)
        why = (
            "; ".join(reasons) or "no sites are joined, or the batch has too few sequences for them"
        )
        return _refused(model, f"no set of sites can train this model. {why}")
    batch, ranks = job.trainer.global_batch, topology.num_ranks
    if search.wishes.sites == "all" and batch < ranks:
        return _too_few("trainer", {site.name: site.num_ranks for site in topology.sites}, batch)
    smallest = min(topology.sites, key=lambda site: site.num_ranks)
    if batch < smallest.num_ranks:
        return _refused(
            "trainer.global_batch",
            f"want at least {smallest.num_ranks}, a sequence for each rank of {smallest.name!r}, "
            f"which has the fewest; got {batch}",
        )
    return _refused("reduction", "the reduction that the job names fits no set of sites")


def _too_few(section: str, least: Mapping[str, int], batch: int) -> ConfigError:
    """Return the error for a batch that cannot give all sites their part.

    Args:
        section: The job's section with the batch.
        least: Smallest number of sequences by site.
        batch: Sequences in the batch.
    """
    idle, left = [], batch
    for name, count in least.items():
        if count > left:
            idle.append(name)
        left -= min(count, left)
    wants = ", ".join(f"{name} {count}" for name, count in least.items())
    return _refused(
        f"{section}.global_batch",
        f"all sites are to take part (plan.sites), and {', '.join(idle)} would stay without a "
        f"sequence for each rank or replica: want at least {sum(least.values())} ({wants}), got "
        f"{batch}; with `sites: auto` some are left out",
    )


def _check_prices(job: Job, topology: Topology) -> None:
    """Refuse a budget where nothing is known of prices."""
    wishes = job.plan
    if wishes is None or wishes.budget_usd_per_s is None:
        return
    if not any(link.egress_usd_per_byte for link in topology.links):
        message = (
            "no link of the topology has a price, so nothing is known of what egress costs: say "
            "it at links, as `egress: 0.02USD/GB`"
        )
        raise _refused("plan.budget", message)


def _usd_per_s(predicted: Mapping[str, float]) -> float:
    return predicted.get("egress_usd_per_step", 0.0) / predicted["step_s"]


def _check_budget(search: Search, choice: Choice, predicted: Mapping[str, float]) -> None:
    """Refuse a plan that is over budget: it is the cheapest that was found."""
    budget, usd_per_s = search.wishes.budget_usd_per_s, _usd_per_s(predicted)
    if budget is None or usd_per_s <= budget * _ROUNDING:
        return
    cheapest = f"{choice.candidate.form} of {len(choice.sites)} sites with {choice.coding}"
    raise _refused(
        "plan.budget",
        f"no plan keeps egress within {_usd_a_day(budget)}: the cheapest found, {cheapest}, costs "
        f"{_usd_a_day(usd_per_s)}. Permit smaller codecs (plan.codecs), fewer exchanges "
        "(plan.max_sync_period) or fewer sites (plan.sites: auto), or a larger budget",
    )


def _budget_texts(others: Alternatives, predicted: Mapping[str, float]) -> list[str]:
    """Return what is to be said of the budget: what the plan costs, and what was left out."""
    budget = others.search.wishes.budget_usd_per_s
    if budget is None:
        return []
    cost, limit = _usd_a_day(_usd_per_s(predicted)), _usd_a_day(budget)
    left_out = [what for what, each in others.over_budget() if each.step_s < predicted["step_s"]]
    more = f" Left out, for they are faster and cost more than that: {', '.join(left_out)}."
    return [f"Egress costs {cost}; plan.budget permits {limit}.{more if left_out else ''}"]


_ROUNDING = 1 + 1e-6


def _usd_a_day(usd_per_s: float) -> str:
    return f"{usd_per_s * 86_400:.4g} USD a day"


def _refused(path: str, message: str) -> ConfigError:
    return ConfigError([Problem("job", 0, 0, message, path)])
