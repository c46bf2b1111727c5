"""A plan as plain values for topology/planner/document.py: decisions, what they come to, why."""

from __future__ import annotations

import math
from typing import Any

from topology.errors import ConfigError, Problem
from topology.hashing import plan_hashes
from topology.job import Job
from topology.model.step_model import StepModel
from topology.planner.alternatives import alternatives
from topology.planner.choice import Choice
from topology.planner.parallel_plan import (
    cut_alternatives,
    cut_link_worths,
    cut_site_worths,
    decided_cuts,
    inside,
    predicted,
)
from topology.planner.parallel_search import ParallelSearch
from topology.planner.parallel_sources import cut_inputs, cut_warnings
from topology.planner.parallel_why import cut_binding, cut_sentences
from topology.planner.room import too_large
from topology.planner.search import Search
from topology.planner.second_opinion import simulated_otherwise
from topology.planner.shares import busiest
from topology.planner.sources import inputs, warnings
from topology.planner.why import binding, sentences
from topology.planner.worth import link_worths, site_worths
from topology.units import format_size
from topology.world import Topology


def make_plan(job: Job, topology: Topology) -> dict[str, Any]:
    """Return the best plan for a job on a topology, as its file has it.

    Args:
        job: Its placement is not looked at; its `plan` says what may be decided.
        topology: Described in full.

    Raises:
        ConfigError: nothing can be planned, or no set of sites can run the job.
    """
    if job.exchange.schedule == "off":
        raise _refused("exchange.schedule", "off exchanges nothing: there is nothing to plan")
    if job.workload is not None:
        return _plan_with_cuts(job, topology)
    search = Search(job, topology)
    choice = search.best()
    if choice is None:
        raise _impossible(search)
    job_hash, topology_hash = plan_hashes(job, topology)
    model = choice.model(search.job, topology)
    weighed = alternatives(search, choice)
    sites = site_worths(search, choice)
    links = link_worths(search, choice, model)
    bound = binding(choice, topology, model)
    plain: dict[str, Any] = _rounded(
        {
            "version": 1,
            "made_for": {"job": job_hash, "topology": topology_hash},
            "decisions": decisions(choice, job),
            "predicted": _predicted(search, choice, model),
            "binding": bound,
            "why": sentences(search, choice, model, bound, weighed, sites),
            "warnings": [
                *warnings(job, topology),
                *too_large(job, topology, choice),
                *simulated_otherwise(search.job, topology, choice),
            ],
            "alternatives": weighed,
            "sites": sites,
            "links": links,
            "inputs": inputs(search, choice),
        }
    )
    return plain


def _plan_with_cuts(job: Job, topology: Topology) -> dict[str, Any]:
    """Return a described model's best plan; arguments and errors as of `make_plan`."""
    search = ParallelSearch(job, topology)
    choice = search.best()
    if choice is None:
        told = [f"{name}: {cuts.closest()}" for name, cuts in search.cuts.items() if not cuts.cuts]
        why = "; ".join(told) or "no sites are joined, or the batch has too few sequences for them"
        raise _refused("workload", f"no set of sites can train this model. {why}")
    job_hash, topology_hash = plan_hashes(job, topology)
    model = choice.joint(search.job, topology)
    weighed = cut_alternatives(search, choice)
    sites, within = cut_site_worths(search, choice), inside(search, choice)
    bound = cut_binding(choice, search, model)
    decided = {**decisions(choice, job), "placement": decided_cuts(choice)}
    del decided["micro_batch"]
    plain: dict[str, Any] = _rounded(
        {
            "version": 1,
            "made_for": {"job": job_hash, "topology": topology_hash},
            "decisions": decided,
            "predicted": predicted(search, choice, model),
            "binding": bound,
            "why": cut_sentences(search, choice, model, bound, weighed, within, sites),
            "warnings": cut_warnings(job, topology, choice),
            "alternatives": weighed,
            "sites": sites,
            "links": cut_link_worths(search, choice, model),
            "inside": within,
            "inputs": cut_inputs(search, choice),
        }
    )
    return plain


def decisions(choice: Choice, job: Job) -> dict[str, Any]:
    """Return what a launch with this choice does, in the words of a job."""
    reduction = choice.way.reduction
    written: dict[str, Any] = {"tree": reduction.tree}
    if reduction.trees:
        written = {
            "trees": [
                {"root": tree.root, "parents": dict(tree.parents), "weight": tree.weight}
                for tree in reduction.trees
            ]
        }
    channels = job.exchange.channels_per_link
    return {
        "placement": [
            {"site": site, "sequences": count}
            for site, count in zip(choice.sites, choice.sequences, strict=True)
        ],
        "exchange": {
            **_codecs(choice, job),
            "chunk": format_size(choice.sizing.chunk_bytes),
            "bucket": format_size(choice.sizing.bucket_bytes),
            "channels_per_link": "auto" if channels is None else channels,
        },
        "reduction": written,
        "micro_batch": choice.micro_batch,
    }


def _codecs(choice: Choice, job: Job) -> dict[str, Any]:
    """Return the codec of all links, and those of single ones; what the job gives them stays."""
    decided: dict[str, Any] = {"codec": choice.coding.codec}
    if choice.coding.links and not job.exchange.codecs:
        decided["codecs"] = [
            {"between": list(each.between), "codec": each.codec} for each in choice.coding.links
        ]
    return decided


def _predicted(search: Search, choice: Choice, model: StepModel) -> dict[str, float]:
    job, topology = search.job, choice.topology(search.topology)
    ranks = [site.num_ranks for site in topology.sites]
    compute_s = model.compute_s(busiest(choice.sequences, ranks))
    batch = job.trainer.global_batch
    alone = math.fsum(
        count / each_s for count, each_s in zip(choice.sequences, compute_s, strict=True)
    )
    return {
        "step_s": choice.step_s,
        "compute_s": max(compute_s),
        "exchange_s": model.exchange_s,
        "efficiency": batch / choice.step_s / alone,
        "tokens_per_s": batch * job.trainer.model.context / choice.step_s,
        "egress_bytes_per_step": math.fsum(model.link_bytes.values()),
        "usd_per_step": choice.usd_per_step,
    }


def _rounded(value: Any) -> Any:  # noqa: ANN401 - any plain value
    """Return the same with its floats in six significant digits, as people and YAML read them."""
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
    batch, ranks = search.job.trainer.global_batch, search.topology.num_ranks
    if search.wishes.sites == "all" and batch < ranks:
        return _refused(
            "trainer.global_batch",
            f"all sites are to take part (plan.sites), and their {ranks} ranks take a sequence each: "
            f"want at least {ranks}, got {batch}; with `sites: auto` some are left out",
        )
    smallest = min(search.topology.sites, key=lambda site: site.num_ranks)
    if batch < smallest.num_ranks:
        return _refused(
            "trainer.global_batch",
            f"want at least {smallest.num_ranks}, a sequence for each rank of {smallest.name!r}, "
            f"which has the fewest; got {batch}",
        )
    return _refused("reduction", "the reduction that the job names fits no set of sites")


def _refused(path: str, message: str) -> ConfigError:
    return ConfigError([Problem("job", 0, 0, message, path)])
